"""Slurm nodes around a reboot: parsers on what a real Slurm 22.05 printed while nodes were drained, rebooted and
reserved."""

from __future__ import annotations

import contextlib
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.slurm import commands, nodes
from deepep_bootstrap.slurm.nodes import DrainReason
from tests.support.paths import TESTS

CASES = sorted((TESTS / "cases" / "slurm" / "nodes").glob("*.json"))


def plain(value: Any) -> Any:
    """Return what JSON would make of a parser's result: sets sorted, times as text."""
    if isinstance(value, msgspec.Struct):
        return {field.name: plain(getattr(value, field.name)) for field in structs.fields(value)}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(value)
    return value.isoformat() if isinstance(value, datetime) else value


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_recorded_output(path: Path) -> None:
    case = json.loads(path.read_text(encoding="utf-8"))
    found = plain(getattr(nodes, case["parser"])("\n".join(case["input"])))
    assert found == case["expected"]


@pytest.mark.parametrize("parser", ["parse_look", "parse_jobs", "parse_reservations", "read_reason"])
@given(
    text=st.text()
    | st.from_regex(r"@now\n\d{4}-01-\d\dT00:00:00|\d+\|n\[\d-\d\]|ReservationName=\S* StartTime=\S* Nodes=\S*")
)
def test_any_text_is_a_value_or_trouble(parser: str, text: str) -> None:
    with contextlib.suppress(Trouble):
        getattr(nodes, parser)(text)


@given(st.text(), st.from_regex(r"[a-z0-9-]{0,30}", fullmatch=True))
def test_our_reason_is_one_short_line_that_is_known_again(why: str, run: str) -> None:
    reason = nodes.our_reason(why, run)
    assert len(reason) <= nodes.LONGEST_REASON
    assert len(reason.splitlines()) == 1
    assert nodes.is_ours(reason)
    assert not run or reason.endswith(f" (run {run})")
    for words in ("reboot issued", "reboot issued : reboot timed out"):
        assert nodes.read_reason(f"{reason} : {words} [slurm@2026-11-21T03:18:56]") == DrainReason(reason, "slurm")


def node(state: str, reason: str = "") -> commands.SlurmNode:
    return commands.SlurmNode("n001", "n001", state, "gpu:8", ("batch",), reason)


@pytest.mark.parametrize(
    ("state", "reason", "kept"),
    [
        ("IDLE", "", False),
        ("IDLE+DRAIN", "bad fan [root@2026-11-21T03:25:09]", True),
        ("IDLE+DRAIN", "Kill task failed [slurm@2026-11-21T03:25:09]", True),
        ("IDLE+DRAIN", "deepep-bootstrap: driver options (run 7) [root@2026-11-21T03:25:09]", False),
        ("DOWN+DRAIN", "deepep-bootstrap: x : reboot issued [slurm@2026-11-21T03:25:09]", False),
        ("DOWN*", "Not responding [slurm@2026-11-21T03:25:09]", False),
        ("DOWN", "Node unexpectedly rebooted [slurm@2026-11-21T03:25:09]", False),
        ("DOWN", "reboot timed out [slurm@2026-11-21T03:25:09]", False),
        ("DOWN", "sold [joe@2026-11-21T03:25:09]", True),
        ("DOWN", "", False),
        ("IDLE", "resumed by hand, the reason stayed [joe@2026-11-21T03:25:09]", False),
    ],
)
def test_what_somebody_else_keeps_out_of_use(state: str, reason: str, *, kept: bool) -> None:
    assert nodes.set_by_somebody(node(state, reason)) is kept


@pytest.mark.parametrize(
    ("state", "reason", "said"),
    [
        ("IDLE+DRAIN", "deepep-bootstrap: x (run 7) [root@2026-11-21T03:25:09]", ""),
        # ResumeTimeout is over before the node is back; where Slurm runs as root its user says nothing.
        ("DOWN+DRAIN", "deepep-bootstrap: x (run 7) : reboot issued : reboot timed out [root@2026-11-21T03:25:09]", ""),
        ("DOWN", "deepep-bootstrap: x (run 7) : reboot timed out [slurm@2026-11-21T03:25:09]", ""),
        ("DOWN", "reboot timed out [root@2026-11-21T03:25:09]", ""),
        ("DOWN+DRAIN", "deepep-bootstrap: x (run 7) : words of a later Slurm [root@2026-11-21T03:25:09]", ""),
        ("IDLE+DRAIN", "deepep-bootstrap: x (run 78) [root@2026-11-21T03:25:09]", "root keeps it out of use now: "),
        ("IDLE+DRAIN", "disk swap [joe@2026-11-21T03:25:09]", "joe keeps it out of use now: disk swap"),
        ("IDLE", "", "somebody brought it back into use"),
    ],
)
def test_whose_a_drained_node_is_now(state: str, reason: str, said: str) -> None:
    found = nodes.not_ours_any_more(node(state, reason), "deepep-bootstrap: x (run 7)")
    assert found.startswith(said)
    assert bool(found) == bool(said)


OURS_7, DISK_SWAP = "deepep-bootstrap: x (run 7)", "disk swap [joe@2026-11-21T03:25:09]"


@pytest.mark.parametrize(
    ("before", "state", "reason", "said"),
    [
        ("", "IDLE", "", ""),
        ("", "IDLE+DRAIN", DISK_SWAP, "joe keeps it out of use now: disk swap"),
        ("", "IDLE+FAIL", DISK_SWAP, "joe keeps it out of use now: disk swap"),
        ("", "IDLE+DRAIN", OURS_7, "somebody else keeps it out of use now: deepep-bootstrap: x (run 7)"),
        ("", "DOWN", "Not responding [slurm@2026-11-21T03:25:09]", ""),
        ("disk swap", "IDLE+DRAIN", DISK_SWAP, ""),
        ("disk  swap", "IDLE+DRAIN", DISK_SWAP, ""),
        ("disk", "IDLE+DRAIN", DISK_SWAP, "joe keeps it out of use now: disk swap"),
        ("disk swap", "IDLE", "", ""),
        (OURS_7, "IDLE+DRAIN", f"{OURS_7} : reboot issued [root@2026-11-21T03:25:09]", ""),
        (OURS_7, "DOWN", f"{OURS_7} : reboot timed out [slurm@2026-11-21T03:25:09]", "its state is DOWN now"),
        (OURS_7, "IDLE+DRAIN", DISK_SWAP, "joe keeps it out of use now: disk swap"),
        (
            OURS_7,
            "IDLE+DRAIN",
            "deepep-bootstrap: x (run 8) [root@2026-11-21T03:25:09]",
            "root keeps it out of use now:",
        ),
        (OURS_7, "IDLE+DRAIN+FAIL", OURS_7, "its state is IDLE+DRAIN+FAIL now"),
        (OURS_7, "MIXED", "", "somebody brought it back into use"),
    ],
)
def test_what_somebody_made_of_a_node_since(before: str, state: str, reason: str, said: str) -> None:
    found = nodes.taken_since(node(state, reason), before)
    if nodes.is_ours(before):
        found = nodes.not_to_resume(node(state, reason), before)
    assert found.startswith(said)
    assert bool(found) == bool(said)


@pytest.mark.parametrize(
    ("state", "drained", "down", "answers"),
    [
        ("IDLE", False, False, True),
        ("MIXED+DRAIN", True, False, True),
        ("IDLE+DRAIN+REBOOT_REQUESTED", True, False, False),
        ("DOWN+DRAIN+REBOOT_ISSUED", True, True, False),
        ("IDLE+NOT_RESPONDING", False, False, False),
        ("IDLE*+DRAIN", True, False, False),
        ("DOWN*", False, True, False),
        ("POWERED_DOWN", False, False, True),
    ],
)
def test_states(state: str, *, drained: bool, down: bool, answers: bool) -> None:
    found = (nodes.is_drained(state), nodes.is_down(state), nodes.answers(state))
    assert found == (drained, down, answers)


@pytest.mark.parametrize(
    ("state", "started", "registered"),
    [
        ("IDLE+DRAIN", "2026-11-21T03:18:19", False),  # as before the reboot: nothing was heard of it since
        ("DOWN*+DRAIN", "2026-11-21T03:18:19", False),
        ("IDLE+DRAIN", "2026-11-21T03:40:00", True),
        ("DOWN+DRAIN", "2026-11-21T03:40:00", True),  # "unexpectedly rebooted"
        ("DOWN+DRAIN+INVALID_REG", "2026-11-21T03:40:00", False),
        ("DOWN+DRAIN+NOT_RESPONDING", "2026-11-21T03:40:00", False),
        ("IDLE+DRAIN", "", True),
        ("DOWN+DRAIN", "", False),
    ],
)
def test_who_has_registered_since_a_reboot(state: str, started: str, *, registered: bool) -> None:
    now = structs.replace(node(state), started=started)
    assert nodes.has_registered(now, "2026-11-21T03:18:19") is registered


@pytest.mark.parametrize(
    ("state", "occupied"),
    [
        ("IDLE+DRAIN", False),
        ("MIXED+DRAIN", True),
        ("ALLOCATED+DRAIN", True),
        ("IDLE+COMPLETING+DRAIN", True),
        ("DOWN*+DRAIN", False),
    ],
)
def test_jobs_show_in_the_state_too(state: str, *, occupied: bool) -> None:
    assert nodes.is_occupied(state) is occupied


def test_keys_behind_a_reason_are_no_part_of_it() -> None:
    said = "fan [ticket@7] [joe@2026-11-21T03:25:09] Comment=a b Extra=x InstanceId=i-1 InstanceType=a4"
    assert nodes.read_reason(said) == DrainReason("fan [ticket@7]", "joe")


def test_a_reason_keeps_brackets_that_are_its_own() -> None:
    assert nodes.read_reason("fan [ticket@7] [joe@2026-11-21T03:25:09]") == DrainReason("fan [ticket@7]", "joe")
    assert nodes.read_reason("") == DrainReason("", "")


@pytest.mark.parametrize(
    ("name", "seconds", "allowed", "found"),
    [
        ("n002", 60, "", ""),  # maint begins in two minutes
        ("n002", 120, "", "maint"),
        ("n002", 3600, "maint", ""),
        ("n001", 0, "", "now"),
        ("n001", 0, "now", ""),
        ("n003", 0, "", ""),  # a reservation that is over
    ],
)
def test_reservations_in_the_way(name: str, seconds: float, allowed: str, found: str) -> None:
    times = {"now": ("n001", "03:20", "03:35"), "maint": ("n002", "03:27", "03:37"), "over": ("n003", "01:00", "03:25")}
    text = "\n".join(
        f"ReservationName={key} StartTime=2026-11-21T{start}:00 EndTime=2026-11-21T{end}:00 Nodes={nodes} State=X"
        for key, (nodes, start, end) in times.items()
    )
    look = nodes.parse_look(
        f"@nodes\n@jobs\n@reservations\n{text}\n@reboot_program\n(null)\n@now\n2026-11-21T03:25:00\n"
    )
    other = nodes.in_the_way(look, name, seconds, allowed)
    assert (other.name if other else "") == found


def test_commands() -> None:
    assert nodes.drain("n001", "a b")[1:] == ("update", "nodename=n001", "state=drain", "reason=a b")
    # Never ASAP, which takes the drain back on return, and never a next state: we bring the node back, after looking at
    # it.
    assert nodes.reboot("n001") == ("scontrol", "reboot", "n001")


@pytest.mark.parametrize(
    "text", ["slurm_update error: Invalid user id", "scontrol_reboot_nodes error: Permission denied"]
)
def test_a_refusal_is_known(text: str) -> None:
    assert nodes.says_refused(text)
    assert not nodes.says_away(text)
