"""Where flags come from that were not given: the environment, a deepep.toml, the lock of this directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from deepep_bootstrap.cli.settings import settle
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.fetch.locations import read_mirrors

NONE: dict[str, Any] = {"hosts": "", "lock": "", "prefix": "", "mirror": None}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a hosts file, a source tree (`root`) and a user's own settings (`config/deepep-bootstrap`)."""
    for name in ("root", "site", "start", "config/deepep-bootstrap"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "root" / "tasks.py").touch()
    (tmp_path / "root" / "deepep.lock.toml").touch()
    (tmp_path / "site" / "hosts.txt").write_text("defaults partition=gpu\nn001\n")
    monkeypatch.chdir(tmp_path / "start")
    return tmp_path


def settled(place: Path, given: dict[str, Any] | None = None, **environment: str) -> tuple[dict[str, Any], str]:
    environment["XDG_CONFIG_HOME"] = str(place / "config")
    found = settle({**NONE, **(given or {})}, place / "root", environment)
    return dict(found.values), "\n".join(found.notes).replace(str(place), "")


def test_nothing_set_is_nothing_said(place: Path) -> None:
    assert settled(place) == (NONE, "")


def test_a_flag_counts_before_all_others(place: Path) -> None:
    given = {"hosts": "n1", "lock": "a.toml", "prefix": "/a", "mirror": ["x=/y"]}
    assert settled(place, given, DEEPEP_HOSTS="n2", DEEPEP_LOCK="b", DEEPEP_PREFIX="/b") == (given, "")


def test_the_environment_counts_before_files(place: Path) -> None:
    hosts = place / "site" / "hosts.txt"
    (place / "site" / "deepep.toml").write_text('lock = "its.toml"\nprefix = "/of/file"\n')
    values, notes = settled(place, DEEPEP_HOSTS=str(hosts), DEEPEP_LOCK="env.toml", DEEPEP_PREFIX="/of/env")
    assert values == {"hosts": str(hosts), "lock": "env.toml", "prefix": "/of/env", "mirror": None}
    assert notes == (
        "hosts: /site/hosts.txt (DEEPEP_HOSTS)\nlock: env.toml (DEEPEP_LOCK)\nprefix: /of/env (DEEPEP_PREFIX)"
    )


def test_a_file_beside_the_hosts_counts_before_the_users_own(place: Path) -> None:
    user = place / "config" / "deepep-bootstrap" / "deepep.toml"
    user.write_text(f'hosts = "{place}/site/hosts.txt"\nlock = "/user.toml"\nmirror = ["index:pypi=/srv/pypi"]\n')
    (place / "site" / "deepep.toml").write_text('lock = "its.toml"\nprefix = "/of/file"\n')
    values, notes = settled(place)
    assert values["lock"] == str(place / "site" / "its.toml")
    assert (values["prefix"], values["mirror"]) == ("/of/file", ("index:pypi=/srv/pypi",))
    assert notes.splitlines() == [
        "hosts: /site/hosts.txt (/config/deepep-bootstrap/deepep.toml)",
        "lock: /site/its.toml (/site/deepep.toml)",
        "prefix: /of/file (/site/deepep.toml)",
        "mirror: index:pypi=/srv/pypi (/config/deepep-bootstrap/deepep.toml)",
    ]


def test_a_prefix_that_the_hosts_file_states_is_the_prefix(place: Path) -> None:
    """Whoever loaded our module has DEEPEP_PREFIX: that must not move what an admin's file says."""
    hosts = place / "site" / "hosts.txt"
    hosts.write_text("# prefix=/not/this\ndefaults prefix=/shared/deepep\nn001\n")
    values, notes = settled(place, {"hosts": str(hosts)}, DEEPEP_PREFIX="/of/env")
    assert values["prefix"] == ""
    said = "prefix: /shared/deepep (/site/hosts.txt), not /of/env (DEEPEP_PREFIX): that is for hosts that state none"
    assert notes == said
    assert settled(place, {"hosts": str(hosts)}, DEEPEP_PREFIX="/shared/deepep")[1] == ""


def test_the_lock_of_this_directory_then_the_packaged_one(place: Path) -> None:
    (place / "start" / "deepep.lock.toml").touch()
    values, notes = settled(place)
    assert values["lock"] == str(place / "start" / "deepep.lock.toml")
    assert notes == "lock: /start/deepep.lock.toml (of this directory)"
    (place / "start" / "deepep.lock.toml").unlink()
    (place / "root" / "tasks.py").unlink()
    values, notes = settled(place)
    assert values["lock"] == ""
    assert notes.startswith("lock: /root/deepep.lock.toml (packaged; no --lock, ")


def test_a_verb_without_a_flag_is_told_nothing_of_it(place: Path) -> None:
    found = settle({"shell": "bash"}, place / "root", {"DEEPEP_HOSTS": "n1", "DEEPEP_LOCK": "x"})
    assert (found.values, found.notes) == ({"shell": "bash"}, ())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            'lock = "x"\nhost = "n1"\n',
            "deepep.toml:2: host: unknown key, did you mean hosts? — wanted hosts, lock, prefix",
        ),
        ("hosts = 3\n", "deepep.toml:1: hosts: is of the wrong type — found 3, wanted text in quotes"),
        ("hosts = \n", "deepep.toml:1: is not TOML: "),
        ('prefix = "here"\n', "deepep.toml: prefix: not a usable prefix — found here"),
        ('mirror = ["https://x/=y"]\n', "deepep.toml: mirror: is no address and no absolute directory"),
    ],
)
def test_a_faulty_file_is_refused_with_its_line(place: Path, text: str, said: str) -> None:
    (place / "site" / "deepep.toml").write_text(text)
    with pytest.raises(Trouble) as caught:
        settled(place, {"hosts": str(place / "site" / "hosts.txt")})
    assert said in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
@pytest.mark.parametrize("name", ["site/deepep.toml", "start/deepep.lock.toml"])
def test_a_file_that_somebody_else_wrote_decides_nothing(place: Path, name: str) -> None:
    (place / name).touch()
    os.chown(place / name, 1234, -1)
    with pytest.raises(Trouble, match="belongs to somebody else — found user 1234, wanted you or root"):
        settled(place, {"hosts": str(place / "site" / "hosts.txt")})
    os.chown(place / name, 0, -1)
    (place / name).chmod(0o666)
    with pytest.raises(Trouble, match=r"may be written by everybody\. Try: chmod o-w "):
        settled(place, {"hosts": str(place / "site" / "hosts.txt")})


def test_mirrors_of_the_environment_are_words(tmp_path: Path) -> None:
    text = f"# of the lab\nhttps://a/={tmp_path}/ index:b={tmp_path}\nhttps://c/=https://d/\n"
    found = read_mirrors((), {"DEEPEP_MIRRORS": text}, {}).levels[1]
    assert (dict(found.prefixes), dict(found.indexes)) == (
        {"https://a/": str(tmp_path), "https://c/": "https://d/"},
        {"b": str(tmp_path)},
    )
