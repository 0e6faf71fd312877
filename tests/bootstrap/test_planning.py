"""The hosts of one bootstrap as its phases see them, on recorded hosts."""

from __future__ import annotations

from pathlib import Path

from deepep_bootstrap.bootstrap.planning import (
    BootstrapContext,
    RunLogs,
    decide,
    look_again,
    look_at_hosts,
    read_wanted,
    request_for,
)
from deepep_bootstrap.bootstrap.reboot.policy import NEVER, Policy
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.survey import read_inventory
from tests.support import crowd
from tests.support.paths import ROOT


def test_a_host_that_was_silent_at_first_stays_out_of_the_run(tmp_path: Path) -> None:
    flags = Flags(root=ROOT, hosts=str(crowd.hosts_file(tmp_path, 12)))
    inventory, prefix = read_inventory(flags)
    answering, silent = crowd.SoundCrowd.of(flags, 12), crowd.Crowd(())
    silent.answers = answering.answers
    survey = look_at_hosts(flags, silent, inventory, prefix)
    request = request_for(flags, survey, read_wanted(flags))
    plan = decide(answering, survey, request)
    context = BootstrapContext(
        flags, Screen("bootstrap"), RunLogs.none(), answering, survey, request, plan, Policy(NEVER)
    )
    answering.asked.clear()
    again = look_again(context)
    assert "n0011" not in answering.asked, "what it needs was in no plan that anybody has seen"
    assert "n0011" not in again.survey.facts
    assert [problem.where for problem in again.survey.problems] == ["n0011"]
    assert len(again.survey.facts) == 11
    assert again.survey.inventory == inventory
