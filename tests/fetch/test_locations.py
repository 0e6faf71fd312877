"""Mirrors: which replacement wins, what a directory must hold, and what is no mirror."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.fetch import locations
from deepep_bootstrap.fetch.locations import Mirrors

URL = "https://host.invalid/owner/name"


def test_no_mirrors_change_nothing() -> None:
    assert locations.read_mirrors([], {}, {}) == locations.read_mirrors([], {"DEEPEP_MIRRORS": "\n # a comment\n"}, {})
    assert Mirrors().source(URL) == URL
    assert Mirrors().index("pypi") == ""


def test_the_longest_prefix_wins() -> None:
    flags = ["https://=https://a/", "https://host.invalid/owner/=https://b/", "https://host.invalid/=https://c/"]
    assert locations.read_mirrors(flags, {}, {}).source(URL) == "https://b/name"
    assert locations.read_mirrors(flags, {}, {}).source("https://host.invalid/other/x") == "https://c/other/x"
    assert (
        locations.read_mirrors(flags, {}, {}).source("https://elsewhere.invalid/x") == "https://a/elsewhere.invalid/x"
    )
    assert locations.read_mirrors(flags, {}, {}).source("ssh://git@host.invalid/x") == "ssh://git@host.invalid/x"


def test_the_flag_wins_over_the_environment_over_the_lock(tmp_path: Path) -> None:
    environment = {
        "DEEPEP_MIRRORS": f"{URL}=https://environment/\n\n  index:inner=https://environment/simple  "
        f"\nindex:other={tmp_path}\n"
    }
    locked = {"inner": "https://lock/simple", "other": "https://lock/simple", "third": "https://lock/simple"}
    both = locations.read_mirrors(["https://=https://flag/", "index:inner=https://flag/simple"], environment, locked)
    assert both.source(URL) == "https://flag/host.invalid/owner/name"
    assert [both.index(name) for name in ("inner", "other", "third", "pypi")] == [
        "https://flag/simple",
        str(tmp_path),
        "https://lock/simple",
        "",
    ]
    assert locations.read_mirrors([], environment, locked).source(URL) == "https://environment/"


def test_split_at_the_last_equals_sign() -> None:
    assert (
        locations.read_mirrors(["https://host.invalid/?a=b/=https://c/"], {}, {}).source("https://host.invalid/?a=b/x")
        == "https://c/x"
    )
    assert locations.read_mirrors(["index:inner=https://c/simple?a=b"], {}, {}).index("inner") == "https://c/simple?a=b"


@pytest.mark.parametrize("made", ["owner/name", "owner/name.git"])
@pytest.mark.parametrize("asked", ["", "/", ".git"])
def test_a_directory_of_repositories(made: str, asked: str, tmp_path: Path) -> None:
    (tmp_path / made).mkdir(parents=True)
    for prefix in ("https://host.invalid/", "https://host.invalid"):
        read = locations.read_mirrors([f"{prefix}={tmp_path}/"], {}, {})
        assert read.source(URL + asked) == str(tmp_path / made)
    assert locations.read_mirrors([f"https://host.invalid/=file://{tmp_path}"], {}, {}).source(URL) == str(
        tmp_path / made
    )


def test_a_directory_without_the_repository(tmp_path: Path) -> None:
    read = locations.read_mirrors([f"https://host.invalid/={tmp_path}"], {}, {})
    with pytest.raises(Trouble) as caught:
        read.source(URL)
    assert str(caught.value) == (
        f"mirror {tmp_path}: has no repository for {URL} — wanted {tmp_path}/owner/name or {tmp_path}/owner/name.git. "
        f"Try: git clone --mirror {URL} there"
    )
    (tmp_path.parent / "secret").mkdir()
    with pytest.raises(
        Trouble, match=r"has no repository for https://host\.invalid/\.\./secret — wanted a path below it"
    ):
        read.source("https://host.invalid/../secret")


def test_relative_directories_are_relative_to_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wheels").mkdir()
    monkeypatch.chdir(tmp_path)
    assert locations.read_mirrors(["index:pypi=wheels"], {}, {}).index("pypi") == str(tmp_path / "wheels")


def written(root: Path) -> Path:
    """Make what looks like a directory of `invoke mirror`."""
    (root / "git/host.invalid/owner/name.git").mkdir(parents=True)
    (root / "mirror.json").touch()
    return root


@pytest.mark.parametrize(
    "url", [URL, f"{URL}.git", f"{URL}/", URL.replace("https", "http"), "https://user:secret@host.invalid/owner/name"]
)
def test_a_directory_written_by_mirror(url: str, tmp_path: Path) -> None:
    written(tmp_path / "mirror")
    for value in (f"{tmp_path}/mirror", f"{tmp_path}/mirror/", f"file://{tmp_path}/mirror"):
        read = locations.read_mirrors([value], {}, {"inner": "https://lock/simple"})
        assert read.source(url) == f"{tmp_path}/mirror/git/host.invalid/owner/name.git"
        assert read.index("pypi") == f"{tmp_path}/mirror/wheels/pypi"
        assert read.index("inner") == f"{tmp_path}/mirror/wheels/inner"


def test_a_web_server_with_what_mirror_wrote() -> None:
    for value in ("http://user:secret@mirror.invalid/deepep", "http://user:secret@mirror.invalid/deepep/"):
        read = locations.read_mirrors([value], {}, {})
        assert read.source(URL) == "http://user:secret@mirror.invalid/deepep/git/host.invalid/owner/name.git"
        assert read.index("pypi") == "http://user:secret@mirror.invalid/deepep/wheels/pypi"


def test_what_is_named_wins_over_what_mirror_wrote(tmp_path: Path) -> None:
    flags = [
        str(written(tmp_path)),
        f"{URL}=https://b/name",
        "index:pypi=https://b/simple",
        "http://second.invalid/mirror",
    ]
    read = locations.read_mirrors(flags, {"DEEPEP_MIRRORS": "https://=https://c/"}, {})
    assert (read.source(URL), read.index("pypi")) == ("https://b/name", "https://b/simple")
    assert read.index("inner") == f"{tmp_path}/wheels/inner"
    with pytest.raises(
        Trouble,
        match=r"has no repository for https://other\.invalid/x — wanted \S+/git/other\.invalid/x\.git\. Try: invoke",
    ):
        read.source("https://other.invalid/x")


@pytest.mark.parametrize(
    ("url", "path"),
    [
        (URL, "git/host.invalid/owner/name.git"),
        ("https://HOST.invalid:8443//a/b.git/", "git/host.invalid:8443/a/b.git"),
        ("ssh://git@host.invalid/owner/name", "git/ssh+host.invalid/owner/name.git"),
        ("git@host.invalid:owner/name.git", "git/ssh+host.invalid/owner/name.git"),
        ("file:///srv/git/name", "git/file+/srv/git/name.git"),
    ],
)
def test_where_a_mirror_keeps_a_repository(url: str, path: str) -> None:
    assert locations.repository_path(url) == path


@pytest.mark.parametrize(
    "url",
    [
        *(
            "https://host.invalid/../../etc",
            "https://../etc/passwd",
            "https://host.invalid/a/%2e%2e/%2e%2e/b",
            "https://host.invalid/a\\b",
        ),
        *(
            "https://host.invalid/",
            "/etc/passwd",
            "../etc",
            "",
            "https://host.invalid/a%0ab",
            "https://host.invalid/a%00",
            "x:../../etc",
        ),
    ],
)
def test_no_address_leads_out_of_a_mirror(url: str, tmp_path: Path) -> None:
    with pytest.raises(Trouble, match=r"has no place in a mirror"):
        locations.repository_path(url)
    with pytest.raises(Trouble):
        locations.read_mirrors([str(written(tmp_path))], {}, {}).source(url)


def test_no_symbolic_link_leads_out_of_a_mirror(tmp_path: Path) -> None:
    root = written(tmp_path / "mirror")
    (tmp_path / "elsewhere/owner/name.git").mkdir(parents=True)
    (root / "git/linked.invalid").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "short").symlink_to(root)
    read = locations.read_mirrors([str(tmp_path / "short")], {}, {})
    assert read.source(URL) == f"{tmp_path}/short/git/host.invalid/owner/name.git"
    with pytest.raises(Trouble, match="a symbolic link leads to another "):
        read.source("https://linked.invalid/owner/name")


PACKAGES = "https://vendor.invalid/repos/x86_64"


def test_from_where_hosts_get_a_repository(tmp_path: Path) -> None:
    assert Mirrors().packages(PACKAGES) == PACKAGES
    vendor = tmp_path / "vendor"
    (vendor / "repos/x86_64").mkdir(parents=True)
    (tmp_path / "a b").mkdir()
    below = locations.read_mirrors([f"https://vendor.invalid/={vendor}/"], {}, {})
    assert below.packages(f"{PACKAGES}/key.pub") == f"file://{vendor}/repos/x86_64/key.pub"
    assert locations.read_mirrors([f"{PACKAGES}={vendor}"], {}, {}).packages(PACKAGES) == f"file://{vendor}"
    environment = {"DEEPEP_MIRRORS": "https://=http://proxy/"}
    assert locations.read_mirrors([], environment, {}).packages(PACKAGES) == "http://proxy/vendor.invalid/repos/x86_64"
    with pytest.raises(
        Trouble,
        match=r"package managers do not take this path — wanted no blanks, % or special letters in it\. Try: another",
    ):
        locations.read_mirrors([f"https://vendor.invalid/={tmp_path}/a b"], {}, {}).packages(PACKAGES)


def test_what_mirror_wrote_has_no_packages_for_hosts(tmp_path: Path) -> None:
    """They stay where the lock says, or where a prefix of any level sends them."""
    for place in (str(written(tmp_path / "mirror")), "http://server"):
        assert locations.read_mirrors([place], {}, {}).packages(PACKAGES) == PACKAGES
        environment = {"DEEPEP_MIRRORS": "https://=http://proxy/"}
        both = locations.read_mirrors([place], environment, {})
        assert both.packages(PACKAGES) == "http://proxy/vendor.invalid/repos/x86_64"


def test_everything_that_is_no_mirror_at_once(tmp_path: Path) -> None:
    (tmp_path / "half/git").mkdir(parents=True)
    flags = [
        str(tmp_path),
        f"{tmp_path}/half",
        "ssh://host.invalid/m",
        "=x",
        "https://x/=",
        "index:=x",
        "https://x/=/no/where",
    ]
    with pytest.raises(Trouble) as caught:
        locations.read_mirrors(flags, {"DEEPEP_MIRRORS": "index:pypi=/no/where"}, {})
    whats = [(problem.where, problem.what) for problem in caught.value.problems]
    assert whats == [
        (f"--mirror {tmp_path}", "is no mirror: a plain directory has to be one that invoke mirror wrote"),
        (f"--mirror {tmp_path}/half", "is a mirror that was not finished: it has no mirror.json"),
        ("--mirror ssh://host.invalid/m", "is no address of a mirror"),
        ("--mirror =x", "is no mirror"),
        ("--mirror https://x/=", "is no mirror"),
        ("--mirror index:=x", "is no mirror"),
        ("--mirror https://x/=/no/where", "there is no such directory"),
        ("DEEPEP_MIRRORS index:pypi=/no/where", "there is no such directory"),
    ]
