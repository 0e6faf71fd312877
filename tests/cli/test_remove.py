"""remove: through which host the offer is read and changed, and what stays of it."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepep_bootstrap.cli.commands.remove import (
    Written,
    offered,
    remove,
    seat,
    shared,
    undo_line,
    withdraw,
    without,
    written,
)
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.inventory import facts, hostsfile
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.survey import Survey
from deepep_bootstrap.prefix import generations, modulefiles
from deepep_bootstrap.prefix.contents import entry_names
from deepep_bootstrap.prefix.generations import Content
from deepep_bootstrap.prefix.offer import offer_document
from deepep_bootstrap.remote.fleet import ConnectionPool, Options
from tests.support import modules as support
from tests.support.build import RECIPES, ROOT
from tests.support.store import Prefix

pytest_plugins = ["tests.support.store"]

DOWN = "127.0.0.1"


@pytest.mark.parametrize(
    ("settings", "answered", "wanted"),
    [
        ("", "abc", "b"),  # GPU hosts before login hosts, as in other verbs
        ("", "ac", "c"),
        ("build_host=c", "abc", "c"),
        ("build_host=c prefix_host=a", "abc", "a"),
        ("build_host=c", "ab", "build_host: this host did not answer — found c"),
        ("build_host=c prefix_host=a", "bc", "prefix_host: this host did not answer — found a"),
    ],
)
def test_the_host_is_that_of_every_verb_on_the_prefix(settings: str, answered: str, wanted: str) -> None:
    inventory = hostsfile.parse_hosts_file(f"defaults prefix=/p {settings}\na role=login\nb\nc\n", "hosts.txt")
    survey = Survey(inventory, "/p", {name: Facts() for name in answered})
    if len(wanted) > 1:
        with pytest.raises(Trouble, match=wanted):
            seat(survey)
    else:
        assert seat(survey).name == wanted


def test_offer_and_number_are_those_that_one_host_sees(prefix: Prefix) -> None:
    offer = support.offer(str(prefix.path))
    for name in entry_names(offer_document(offer)):
        prefix.entry(name)
    text = modulefiles.manifest(
        offer, generation=1, created="2026-01-01T00:00:00Z", by="admin", lock_digest="", hosts=("a", "b")
    )
    generations.publish_generation(prefix.transport, prefix.place, [Content("manifest.json", text.encode())], 0)
    # Another host's view of a network filesystem may be a minute old, or of another directory.
    old = facts.Prefix(generation=7, manifest=text.replace("v1-cu13", "old"))
    inventory = hostsfile.parse_hosts_file(
        "defaults build_host=b\na connection=local\nb connection=local\n", "hosts.txt"
    )
    # The one before was made for `c` too, which is down now.
    text = text.replace('"a",', '"c", "a",')
    seen = {"a": Facts(prefix=old), "b": Facts(prefix=facts.Prefix(generation=1, manifest=text))}
    survey = Survey(inventory, str(prefix.path), seen)
    found = offered(survey, seat(survey))
    assert list(found.stacks) == ["v1", "v1-cu13"]
    (outcome,) = withdraw(Flags(root=ROOT, stack="v1-cu13"), prefix.transport, survey, without(found, "v1-cu13", "v1"))
    assert (outcome.host, outcome.state) == ("b", "done")
    newest = prefix.look().generations[-1]
    assert (newest.number, list(newest.stacks)) == (2, ["v1"])
    assert json.loads((prefix.path / "current/manifest.json").read_text())["hosts"] == ["c", "a", "b"]


A, B = "/shared/a/modulefiles", "/shared/b/modulefiles"
HOOK_FILE, LIMITS_FILE = "/etc/profile.d/zz-deepep.sh", "/etc/security/limits.d/deepep.conf"


@pytest.mark.parametrize(
    ("hook", "heir", "ours", "said"),
    [
        (
            A,
            "",
            True,
            [
                f"delete {HOOK_FILE} (module-hook)",
                f"restore {LIMITS_FILE} (limits) as it was before",
                "no longer hold doca-ofed (doca-ofed)",
            ],
        ),
        ("", "", True, [f"delete {HOOK_FILE} (module-hook)", f"restore {LIMITS_FILE} (limits) as it was before"]),
        (
            B,
            "",
            True,
            [
                f"leave {HOOK_FILE} (module-hook): of /shared/b, not of this prefix",
                f"leave {LIMITS_FILE} (limits): needed by /shared/b",
                "leave doca-ofed (held by doca-ofed): needed by /shared/b",
            ],
        ),
        (
            A,
            B,
            True,
            [
                f"change {HOOK_FILE} (module-hook): back to /shared/b, which had it before",
                f"leave {LIMITS_FILE} (limits): needed by /shared/b",
            ],
        ),
        (
            A,
            B,
            False,
            [
                f"leave {HOOK_FILE} (module-hook): somebody changed it since; by hand, if it is to go",
                f"leave {LIMITS_FILE} (limits): there is a hook still",
            ],
        ),
    ],
)
def test_what_the_host_shares_outlives_a_prefix(hook: str, heir: str, ours: bool, said: list[str]) -> None:
    files = (
        Written("module-hook", HOOK_FILE, ours=ours),
        Written("limits", LIMITS_FILE, ours=True, replaced=True),
        Written("doca-ofed", "", ours=True, held="doca-ofed"),
    )
    assert [undo_line(each) for each in shared(files, A, hook, heir)][: len(said)] == said


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which a recipe wrote one file, /etc/ours, as every local host sees it."""
    root = tmp_path / "machine"
    kept = root / "var/lib/deepep-bootstrap"
    for folder in (root / "etc", kept / "files", kept / "absent/etc"):
        folder.mkdir(parents=True)
    (root / "etc/ours").write_text("ours\n")
    (kept / "absent/etc/ours").touch()
    (kept / "files/limits").write_text(f"{hashlib.sha256(b'ours' + bytes([10])).hexdigest()} /etc/ours\n")
    monkeypatch.setenv("HOST_ROOT", str(root))
    return root


@pytest.fixture
def gone() -> Iterator[int]:
    """A port of this machine where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", {DOWN: "127.0.0.1: refuses connections"}),
        (
            "data colour red",
            {DOWN: "127.0.0.1: refuses connections", "a": "a: host/written.sh and this program disagree"},
        ),
        ("data file a", {DOWN: "127.0.0.1: refuses connections", "a": "a: host/written.sh and this program disagree"}),
        ("exit 0", {DOWN: "127.0.0.1: refuses connections", "a": "a: the answer of host/written.sh is cut off"}),
        (
            "die 'the disk is gone'",
            {
                DOWN: "127.0.0.1: refuses connections",
                "a": "a: cannot say what was written there — found error: the disk is gone",
            },
        ),
    ],
)
def test_a_host_that_cannot_say_what_was_written_is_named_and_the_others_are_heard(
    machine: Path, gone: int, tmp_path: Path, text: str, said: dict[str, str]
) -> None:
    inventory = hostsfile.parse_hosts_file(f"defaults prefix=/p\na connection=local\n{DOWN} port={gone}\n", "hosts.txt")
    survey = Survey(inventory, "/p", {"a": Facts(), DOWN: Facts()})
    recipes = {**RECIPES, "host/written.sh": f"{text}\n{RECIPES['host/written.sh']}"}
    transport = ConnectionPool(inventory.hosts, Options(ssh_config="", known_hosts=(str(tmp_path / "known"),)))
    found, problems = written(transport, survey, recipes)
    transport.close()
    assert {problem.where: str(problem)[: len(said[problem.where])] for problem in problems} == said
    assert found == ({} if "a" in said else {"a": (Written("limits", "/etc/ours", ours=True),)})


@pytest.mark.skipif(os.geteuid() != 0, reason="hosts are undone as root (make test uses sudo)")
def test_hosts_are_undone_although_the_offer_cannot_be_changed(
    prefix: Prefix, machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    offer = support.offer(str(prefix.path))
    for name in entry_names(offer_document(offer)):
        (prefix.path / "store" / name).mkdir()
    text = modulefiles.manifest(offer, generation=1, created="", by="admin", lock_digest="", hosts=("a",))
    generations.publish_generation(prefix.transport, prefix.place, [Content("manifest.json", text.encode())], 0)
    (prefix.path / "store").rename(prefix.path / "elsewhere")
    names = tmp_path / "hosts.txt"
    names.write_text(f"defaults prefix={prefix.path}\na connection=local\n")
    code = remove(Flags(root=ROOT, hosts=str(names), yes=True))
    said = capsys.readouterr().out
    assert (code, (machine / "etc/ours").exists()) == (1, False), said
    assert "failed     offer" in said
