"""How a bootstrap says how far it came: counts at its end, and after ^C what is built and what was stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepep_bootstrap.bootstrap.planning import BootstrapContext, RunLogs
from deepep_bootstrap.bootstrap.reboot.policy import NEVER, Policy
from deepep_bootstrap.cli.commands.bootstrap import RunState, expected_steps, how_far, how_it_ended
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.survey import Survey
from deepep_bootstrap.plan.steps import make_plan
from deepep_bootstrap.remote.fleet import ConnectionPool
from tests.support.paths import ROOT
from tests.support.plan import PREFIX, cluster, request

BARE = {"modules.hook": ""}


@pytest.fixture
def state(tmp_path: Path) -> RunState:
    """A run that has everything to do."""
    wanted, facts = request(), cluster(n001=BARE, n002=BARE)
    plan = make_plan(wanted, facts)
    survey = Survey(wanted.inventory, PREFIX, facts)
    logs = RunLogs("run", tmp_path)
    transport = ConnectionPool(())
    context = BootstrapContext(Flags(ROOT), Screen("bootstrap"), logs, transport, survey, wanted, plan, Policy(NEVER))
    return RunState(context, plan)


def outcome(step: str, state: str = "done", host: str = "n001") -> Outcome:
    return Outcome(step, host, state, seconds=1)


def test_steps_are_numbered_in_the_order_in_which_they_are_done(state: RunState) -> None:
    assert expected_steps(state) == [
        *("prefix", "fetch", "build gdrcopy 2.5.1", "build nvshmem 3.4.5", "build Python with torch 2.10.0"),
        *("build deepep 1.2.1", "publish modules", "MODULEPATH hook", "verify", "smoke test"),
    ]


def test_after_ctrl_c_it_says_what_is_built_and_what_was_stopped(state: RunState) -> None:
    assert how_far(state) == "between two steps. The same command goes on."
    state.context.screen.started("fetch", ["this machine"])
    assert how_far(state) == "fetch on this machine stopped. The same command goes on."
    state.context.screen.finished("fetch", "this machine")
    state.outcomes = [outcome("prefix"), outcome("build gdrcopy 2.5.1"), outcome("build nvshmem 3.4.5", "stopped")]
    assert how_far(state) == "gdrcopy 2.5.1 is built, 3 builds stopped. The same command goes on."
    state.outcomes += [outcome("build Python with torch 2.10.0", "unchanged"), outcome("build deepep 1.2.1", "failed")]
    assert how_far(state) == (
        "gdrcopy 2.5.1 and Python with torch 2.10.0 are built, 1 build stopped. The same command goes on."
    )
    state.outcomes = []
    state.context.screen.started("MODULEPATH hook", ["n001", "n002"])
    assert how_far(state) == "MODULEPATH hook on n[001-002] (2) stopped. The same command goes on."


def test_the_end_counts_and_names_the_hosts_of_failures(state: RunState) -> None:
    state.outcomes = [outcome("prefix"), outcome("verify"), outcome("smoke test", "skipped")]
    assert how_it_ended(state, 3.4) == "Finished after 3.4 s: 2 done, 1 skipped."
    state.outcomes.append(outcome("limits", "failed", "n002"))
    assert how_it_ended(state, 61) == (
        "Not finished after 1 min 01 s: 2 done, 1 failed, 1 skipped, with failures on n002; once that is mended, the "
        "same command goes on from here."
    )
