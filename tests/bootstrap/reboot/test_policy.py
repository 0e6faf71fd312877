"""What the flags of bootstrap say about reboots."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from deepep_bootstrap.bootstrap.reboot import policy
from deepep_bootstrap.bootstrap.reboot.drained import drained_and_silent, left_behind
from deepep_bootstrap.bootstrap.reboot.host_reboot import _active
from deepep_bootstrap.bootstrap.reboot.policy import ACTIVE_LATER, NEVER, HostReboot, Policy, read_policy
from deepep_bootstrap.bootstrap.reboots import done_at_once, held_up, lacking, permitted, refusal
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.core.text import parse_time
from deepep_bootstrap.inventory.facts import Slurm
from deepep_bootstrap.inventory.survey import Survey
from deepep_bootstrap.plan.host_recipes import Check
from deepep_bootstrap.remote.fleet import ConnectionPool, Options
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.slurm.identity import slurm_hosts
from deepep_bootstrap.slurm.nodes import read_reason
from tests.support.plan import PREFIX, READY, changed, cluster, request


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("never", ("never", 1)),
        ("ask", ("ask", 1)),
        ("rolling", ("rolling", 1)),
        ("rolling:16", ("rolling", 16)),
        ("all", ("all", 0)),
    ],
)
def test_modes(text: str, mode: tuple[str, int]) -> None:
    assert policy.parse_mode(text) == mode


@pytest.mark.parametrize(
    "text", ["", "yes", "rolling:0", "rolling:-1", "rolling:x", "all:3", "never:1", "rolling:", "Rolling", "rolling:٣"]
)
def test_other_modes_are_refused_with_those_that_exist(text: str) -> None:
    with pytest.raises(
        Trouble, match=r"--reboot: unknown value — found .*, wanted never, ask, rolling, rolling:K or all"
    ):
        policy.parse_mode(text)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("30", 1800), ("4h", 14400)])
def test_times(text: str, seconds: float) -> None:
    assert parse_time("--boot-timeout", text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0s", "-5", "5d", "1.5h", "4 h", "s"])
def test_what_is_no_time_is_named_with_its_flag(text: str) -> None:
    with pytest.raises(Trouble, match=r"--drain-timeout: not a time"):
        parse_time("--drain-timeout", text)


def test_a_policy_reboots_unless_that_is_never_allowed() -> None:
    wanted = read_policy(
        "rolling:4", "22:00-06:00", drain_timeout="2h", boot_timeout="20s", reload=True, reservation="maint"
    )
    policy = replace(wanted, run="run-1")
    assert (policy.at_once, policy.drain_timeout, policy.boot_timeout, policy.settle) == (4, 7200, 20, 20)
    assert (str(policy.window), policy.reservation, policy.run, policy.reboot) == (
        "22:00-06:00",
        "maint",
        "run-1",
        True,
    )
    assert not Policy(NEVER).reboot


@pytest.mark.parametrize(
    ("before", "now", "for_it", "kept"),
    [
        ("reboot", "ok", True, False),
        ("reboot", "reboot", True, True),
        ("reboot", "stuck", True, True),
        ("todo", "todo", True, True),
        ("todo", "todo", False, False),  # it was so, and is no work of this wave
        ("stuck", "stuck", False, False),
        ("stuck", "stuck", True, True),  # what the node was drained for
        ("blocked", "blocked", False, False),
        ("blocked", "todo", False, False),
        ("ok", "todo", False, True),
        ("todo", "stuck", False, True),
        ("ok", "blocked", False, True),
        ("", "blocked", False, True),  # a driver that the new kernel has not
    ],
)
def test_what_keeps_a_host_that_came_back(before: str, now: str, *, for_it: bool, kept: bool) -> None:
    earlier = {"nvidia-driver": Check("nvidia-driver", before, "", "")} if before else {}
    checks = {"nvidia-driver": Check("nvidia-driver", now, "no driver loaded", "the driver, loaded")}
    found = list(lacking(earlier, checks, {"nvidia-driver"} if for_it else {"doca-ofed"}))
    assert found == (["NVIDIA driver: found no driver loaded, wanted the driver, loaded"] if kept else [])


def test_what_was_done_before_a_wave_and_is_gone_after_it_keeps_a_host() -> None:
    plan = {
        "limits": Check("limits", "todo", "", ""),
        "doca-ofed": Check("doca-ofed", "todo", "", "", needs_reboot=True),
    }
    assert {name: check.state for name, check in done_at_once(plan).items()} == {"limits": "ok", "doca-ofed": "todo"}


def test_no_wave_begins_while_a_node_of_another_stays_drained() -> None:
    mine, failed = (
        HostReboot(Host("n002"), "n002", "x", ""),
        HostReboot(Host("n003"), "n003", "x", "", refused="not rebooted: limits failed there"),
    )
    assert held_up((mine, failed), {}) == (mine, failed)
    held = held_up(
        (mine, failed), {"n001": "came back without what was wanted: GPUs: found 7, wanted 8 as before (run 7)"}
    )
    assert held[0].refused.startswith(
        "not started: n001 stays drained (came back without what was wanted: GPUs: found 7, wanted 8"
    )
    assert held[1].refused == failed.refused


DRAINED: Mapping[str, Any] = {
    "slurm.state": "IDLE+DRAIN",
    "prepared.slurm_reason": "deepep-bootstrap: x (run 7) [root@2026-11-21T03:48:17]",
}


def test_nodes_that_are_left_drained_by_us() -> None:
    fleet = ConnectionPool((), Options())
    facts = cluster(
        n001=DRAINED, n002={**DRAINED, "prepared.slurm_reason": "deepep-bootstrap: y", "slurm.state": "IDLE"}
    )
    survey = Survey(request().inventory, PREFIX, facts)
    assert left_behind(fleet, survey, slurm_hosts(survey), but=()) == {"n001": "x (run 7)"}
    assert left_behind(fleet, survey, slurm_hosts(survey), but={"n001"}) == {}


SCONTROL = """#!/bin/sh
code=0
for name in $(echo "$4" | tr , ' '); do case $name in
    n002) echo "NodeName=n002 NodeHostName=n002 State=DOWN*+DRAIN Reason=deepep-bootstrap: x (run 7) : reboot issued [slurm@2026]" ;;
    site4) echo "NodeName=site4 NodeHostName=site4 State=IDLE+DRAIN Reason=bad fan [joe@2026]" ;;
    *) echo "Node $name not found"; code=1 ;;
esac; done
exit $code
"""


@pytest.mark.usefixtures("programs")
def test_a_silent_host_that_slurm_does_not_know_hides_no_node_that_never_returned(tmp_path: Path) -> None:
    """Slurm's own words and exit code for several nodes of which it knows some."""
    (tmp_path / "scontrol").write_text(SCONTROL, encoding="ascii")
    (tmp_path / "scontrol").chmod(0o755)
    asked = request("defaults prefix=/p\nn001 connection=local\nn002.a.example\noutside\nsite4\n10.0.0.7\n")
    fleet = ConnectionPool((), Options())
    fleet.equip("n001", str(tmp_path), {})
    survey = Survey(asked.inventory, PREFIX, {"n001": cluster()["n001"]})
    found = drained_and_silent(fleet, survey, slurm_hosts(survey))
    assert {host: read_reason(reason).text for host, reason in found.items()} == {
        "n002.a.example": "deepep-bootstrap: x (run 7)"
    }
    assert left_behind(fleet, survey, slurm_hosts(survey), but=()) == {"n002.a.example": "x (run 7)"}
    (tmp_path / "scontrol").write_text(
        "#!/bin/sh\necho 'slurm_load_node error: Unable to contact slurm controller' >&2; exit 1\n"
    )
    assert drained_and_silent(fleet, survey, slurm_hosts(survey)) == {}


@pytest.mark.usefixtures("programs")
def test_no_other_node_than_the_slurm_host_says_which_nodes_are_drained(tmp_path: Path) -> None:
    """n001 was taken over: it would have an administrator mend n002, and keep waves from their start."""
    fleet = ConnectionPool((), Options())
    for host, text in (("n001", SCONTROL), ("login1", "#!/bin/sh\necho 'Node n002 not found'; exit 1\n")):
        folder = tmp_path / host
        folder.mkdir()
        (folder / "scontrol").write_text(text, encoding="ascii")
        (folder / "scontrol").chmod(0o755)
        fleet.equip(host, str(folder), {})
    asked = request("defaults prefix=/p connection=local\nn[001-002]\nlogin1 role=login\n")
    facts = cluster()
    survey = Survey(asked.inventory, PREFIX, {name: facts[name] for name in ("n001", "login1")})
    assert [host.name for host in slurm_hosts(survey)] == ["login1"]
    assert drained_and_silent(fleet, survey, slurm_hosts(survey)) == {}
    alone = Survey(asked.inventory, PREFIX, {"n001": facts["n001"]})
    assert list(drained_and_silent(fleet, alone, slurm_hosts(alone))) == ["n002"], "it is what is left of Slurm"


def test_without_leave_to_reboot_only_reloads_are_begun() -> None:
    reload, install = HostReboot(Host("n001"), "n001", "x", "", reload=True), HostReboot(Host("n002"), "n002", "y", "")
    assert permitted((reload, install), Policy("never", reload=True)) == (reload,)
    assert permitted((reload, install), Policy("rolling", reload=True)) == (reload, install)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"slurm.works": False, "slurm.node": ""}, "sinfo does not answer there"),
        ({"slurm.node": ""}, "Slurm knows no node of that name"),
        ({"slurm.node": "", "prepared.slurmd_memlock": ""}, ""),
        ({"slurm.node": "", "prepared.slurmd_memlock": "", "slurm.slurmd": True}, "Slurm knows no node of that name"),
        # A slurmd that the account cannot see, as with hidepid, and a controller that is away.
        (
            {"slurm.works": False, "slurm.node": "", "prepared.slurmd_memlock": ""},
            "Slurm is installed there, but sinfo does not answer there, so nobody knows whether jobs run",
        ),
        (
            {"slurm": Slurm(path="/opt/slurm/bin"), "prepared.slurmd_memlock": ""},
            "Slurm is installed there, but sinfo does not answer",
        ),
        ({"slurm": Slurm(), "prepared.slurmd_memlock": ""}, ""),
    ],
)
def test_where_slurmd_runs_and_slurm_cannot_be_asked_nothing_is_rebooted(changes: Mapping[str, Any], why: str) -> None:
    said = refusal(changed(changed(READY, {"prepared.slurmd_memlock": "unlimited"}), changes))
    assert why in said
    assert bool(said) == bool(why)


def test_a_change_that_a_reboot_made_active_says_since_when() -> None:
    outcome = Outcome("DOCA-OFED and reboot", "n001", "done", f"{ACTIVE_LATER}; 3 packages held")
    assert _active(outcome, "04:37").detail == "active since the reboot at 04:37; 3 packages held"
    assert _active(replace(outcome, detail="no change"), "04:37").detail == "no change"
