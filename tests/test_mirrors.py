"""Mirrors: which replacement wins, what a directory must hold, and what is no mirror."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepep_bootstrap import mirrors
from deepep_bootstrap.errors import Trouble
from deepep_bootstrap.mirrors import Mirrors

URL = "https://host.invalid/owner/name"


def test_no_mirrors_change_nothing() -> None:
    assert mirrors.read([], {}, {}) == mirrors.read([], {"DEEPEP_MIRRORS": "\n # a comment\n"}, {})
    assert Mirrors().source(URL) == URL
    assert Mirrors().index("pypi") == ""


def test_the_longest_prefix_wins() -> None:
    flags = ["https://=https://a/", "https://host.invalid/owner/=https://b/", "https://host.invalid/=https://c/"]
    assert mirrors.read(flags, {}, {}).source(URL) == "https://b/name"
    assert mirrors.read(flags, {}, {}).source("https://host.invalid/other/x") == "https://c/other/x"
    assert mirrors.read(flags, {}, {}).source("https://elsewhere.invalid/x") == "https://a/elsewhere.invalid/x"
    assert mirrors.read(flags, {}, {}).source("ssh://git@host.invalid/x") == "ssh://git@host.invalid/x"


def test_the_flag_wins_over_the_environment_over_the_lock(tmp_path: Path) -> None:
    environment = {"DEEPEP_MIRRORS": f"{URL}=https://environment/\n\n  index:inner=https://environment/simple  \nindex:other={tmp_path}\n"}
    locked = {"inner": "https://lock/simple", "other": "https://lock/simple", "third": "https://lock/simple"}
    both = mirrors.read(["https://=https://flag/", "index:inner=https://flag/simple"], environment, locked)
    assert both.source(URL) == "https://flag/host.invalid/owner/name"
    assert [both.index(name) for name in ("inner", "other", "third", "pypi")] == [
        "https://flag/simple",
        str(tmp_path),
        "https://lock/simple",
        "",
    ]
    assert mirrors.read([], environment, locked).source(URL) == "https://environment/"


def test_split_at_the_last_equals_sign() -> None:
    assert mirrors.read(["https://host.invalid/?a=b/=https://c/"], {}, {}).source("https://host.invalid/?a=b/x") == "https://c/x"
    assert mirrors.read(["index:inner=https://c/simple?a=b"], {}, {}).index("inner") == "https://c/simple?a=b"


@pytest.mark.parametrize("made", ["owner/name", "owner/name.git"])
@pytest.mark.parametrize("asked", ["", "/", ".git"])
def test_a_directory_of_repositories(made: str, asked: str, tmp_path: Path) -> None:
    (tmp_path / made).mkdir(parents=True)
    for prefix in ("https://host.invalid/", "https://host.invalid"):
        read = mirrors.read([f"{prefix}={tmp_path}/"], {}, {})
        assert read.source(URL + asked) == str(tmp_path / made)
    assert mirrors.read([f"https://host.invalid/=file://{tmp_path}"], {}, {}).source(URL) == str(tmp_path / made)


def test_a_directory_without_the_repository(tmp_path: Path) -> None:
    read = mirrors.read([f"https://host.invalid/={tmp_path}"], {}, {})
    with pytest.raises(Trouble) as caught:
        read.source(URL)
    assert str(caught.value) == (
        f"mirror {tmp_path}: has no repository for {URL} — wanted {tmp_path}/owner/name or {tmp_path}/owner/name.git. "
        f"Try: git clone --mirror {URL} there"
    )
    (tmp_path.parent / "secret").mkdir()
    with pytest.raises(Trouble, match=r"has no repository for https://host\.invalid/\.\./secret — wanted a path below it"):
        read.source("https://host.invalid/../secret")


def test_relative_directories_are_relative_to_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wheels").mkdir()
    monkeypatch.chdir(tmp_path)
    assert mirrors.read(["index:pypi=wheels"], {}, {}).index("pypi") == str(tmp_path / "wheels")


def test_a_directory_written_by_mirror(tmp_path: Path) -> None:
    (tmp_path / "git/host.invalid/owner/name.git").mkdir(parents=True)
    (tmp_path / "wheels").mkdir()
    read = mirrors.read([str(tmp_path)], {}, {"inner": "https://lock/simple"})
    assert read.source(URL) == str(tmp_path / "git/host.invalid/owner/name.git")
    assert read.index("pypi") == read.index("inner") == str(tmp_path / "wheels")


def test_everything_that_is_no_mirror_at_once(tmp_path: Path) -> None:
    flags = [str(tmp_path), "https://host.invalid", "=x", "https://x/=", "index:=x", "https://x/=/no/where"]
    with pytest.raises(Trouble) as caught:
        mirrors.read(flags, {"DEEPEP_MIRRORS": "index:pypi=/no/where"}, {})
    whats = [(problem.where, problem.what) for problem in caught.value.problems]
    assert whats == [
        (f"--mirror {tmp_path}", "is no mirror: a plain directory has to hold git/ and wheels/"),
        ("--mirror https://host.invalid", "is no mirror: a plain directory has to hold git/ and wheels/"),
        ("--mirror =x", "is no mirror"),
        ("--mirror https://x/=", "is no mirror"),
        ("--mirror index:=x", "is no mirror"),
        ("--mirror https://x/=/no/where", "there is no such directory"),
        ("DEEPEP_MIRRORS index:pypi=/no/where", "there is no such directory"),
    ]
