"""rollback: what users lose and gain is said, asked about, and remembered."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from deepep_bootstrap.cli.commands.rollback import rollback
from deepep_bootstrap.cli.commands.status import status
from deepep_bootstrap.inventory.flags import Flags
from tests.support.build import ROOT
from tests.support.consent import terminal
from tests.support.store import Prefix, entry_name

pytest_plugins = ["tests.support.store"]

QUESTION = "Roll back?"
SCREEN = """\
PREFIX: generation 2 → 1 for every new `module load`
  - deepep/2-v1 (gone)
  - deepep/2-v1-cu13 (gone)
  + deepep/1-v1 (again)
  ~ `module load deepep`: deepep/2-v1 → deepep/1-v1
  ~ v1 partition: batch → (none)
  ~ v1 NCCL_SOCKET_IFNAME: eth0 → (none)
  and 1 more: invoke diff 2 1
Jobs that run keep what they loaded. `invoke bootstrap` offers what the lock says again, as a new generation.
"""


@pytest.fixture
def offered(prefix: Prefix) -> Prefix:
    """Two generations: a stack, then the next commit of it with a partition, a variable, and a second stack beside."""
    first, second, other = (entry_name("deepep", version) for version in ("1", "2", "3"))
    for name in (first, second, other):
        prefix.entry(name)
    old = {"stack": "v1", "module": "deepep/1-v1", "deepep": first, "site": {"partition": ""}}
    new = {"stack": "v1", "module": "deepep/2-v1", "deepep": second, "site": {"partition": "batch"}}
    new["environment"] = {"NCCL_SOCKET_IFNAME": "eth0"}
    prefix.offer_records({"v1": old})
    prefix.offer_records({"v1": new, "v1-cu13": {"stack": "v1-cu13", "module": "deepep/2-v1-cu13", "deepep": other}})
    return prefix


def flags(prefix: Prefix, **more: object) -> Flags:
    return Flags(root=ROOT, prefix=str(prefix.path), **more)


def current(prefix: Prefix) -> str:
    return os.readlink(prefix.path / "current")


def test_rollback_names_what_users_lose_and_asks(
    offered: Prefix, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = SCREEN.replace("PREFIX", str(offered.path))
    assert rollback(flags(offered, dry_run=True)) == 0
    assert capsys.readouterr().out == screen
    assert rollback(flags(offered)) == 1
    said, refused = capsys.readouterr()
    assert said == screen
    assert refused == (
        "rollback: not confirmed, nothing was changed — found no terminal to ask on, wanted --yes. Try: the same "
        "command with --yes\n"
    )
    assert rollback(flags(offered, json=True)) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["changed"], document["lost"], document["gained"]) == (
        False,
        ["deepep/2-v1", "deepep/2-v1-cu13"],
        ["deepep/1-v1"],
    )
    with terminal(monkeypatch, "\n", QUESTION):
        assert rollback(flags(offered)) == 1
    assert current(offered) == "generations/2"
    with terminal(monkeypatch, "y\n", QUESTION):
        assert rollback(flags(offered)) == 0
    assert current(offered) == "generations/1"


def test_who_went_back_is_remembered_until_there_is_a_newer_offer(offered: Prefix) -> None:
    assert offered.look().rolled_back is None
    assert rollback(flags(offered, yes=True)) == 0
    last = offered.look().rolled_back
    assert last is not None
    assert (last.before, last.to) == (2, 1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", last.at)
    assert last.by.endswith(" by way of localhost")
    # Forward again is a rollback as well; the newest one needs no word.
    assert rollback(flags(offered, yes=True), to="2") == 0
    assert offered.look().rolled_back is None
    (offered.path / ".rolled-back").write_text("what somebody else wrote\n")
    assert offered.look().last_rollback is None


def test_status_says_that_a_newer_generation_is_not_the_current_one(
    offered: Prefix, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = tmp_path / "hosts.txt"
    hosts.write_text(f"defaults prefix={offered.path}\nhere connection=local\n")
    status(flags(offered, hosts=str(hosts)))
    assert "is newer" not in capsys.readouterr().out
    rollback(flags(offered, yes=True))
    capsys.readouterr()
    status(flags(offered, hosts=str(hosts)))
    said = capsys.readouterr().out
    assert re.search(
        r"^  generation 1 is current; 2 is newer \(rolled back 20\S+Z by \S+ by way of localhost\)$", said, re.M
    )
    status(flags(offered, hosts=str(hosts), json=True))
    (last,) = json.loads(capsys.readouterr().out)["rolled_back"]
    assert (last["before"], last["to"]) == (2, 1)
