"""The last proof of a bootstrap that built or offered something: one dispatch and one combine on one free
node, in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deepep_bootstrap.bootstrap.context import BootstrapContext, tell
from deepep_bootstrap.core.errors import OK, Trouble
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.inventory.survey import gather
from deepep_bootstrap.prefix.test_kinds import KINDS
from deepep_bootstrap.testing import slurm_run, ssh_run
from deepep_bootstrap.testing.placement import find_placement
from deepep_bootstrap.testing.slurm_run import LATE, TestRequest, TestRunResult

SMOKE = "smoke"
STEP = "smoke test"
PATIENCE = 60
"""Seconds to wait for a free node: whoever has jobs on all of them is not to wait for a proof."""

FEWEST = 2
"""GPUs of a node between which something can be exchanged."""

LIMIT = 300
"""Seconds the test may take; V2 compiles its kernels first."""


def try_out(work: BootstrapContext) -> tuple[Outcome, ...]:
    """Run the smoke test of the stack that was offered, through Slurm where it runs. Skipped where nothing is new
    since it was passed, where no host with a driver and two GPUs is free, and with --skip=smoke."""
    news = work.offers_news or work.is_unproved
    most = max((len(seen.gpus) for seen in work.survey.facts.values() if seen.prepared.nvidia_version), default=0)
    if not news or most < FEWEST or SMOKE in work.request.skip:
        return ()
    survey = replace(gather(work.flags, work.door, work.survey.inventory, work.request.prefix), problems=())
    kind, record = KINDS[SMOKE], work.plan.choice.record
    wish = TestRequest(kind, record, slurm_run.run_name(SMOKE), 1, LIMIT, start_limit=PATIENCE, user=work.build_user)
    try:
        spot = find_placement(
            survey, kind, 1, limited=bool(work.flags.limit), use_busy=work.flags.on_busy_host == "use"
        )
    except Trouble as trouble:
        return tell(work, (Outcome(STEP, fold(survey.facts), "skipped", "; ".join(map(str, trouble.problems))),))
    work.screen.started(STEP, [spot.where])
    lines: list[str] = []

    def show(line: str) -> None:
        lines.append(line)
        work.screen.line(spot.where, STEP, line)

    wish = replace(wish, named=spot.named)
    if spot.client:
        went = slurm_run.submit(work.door, spot.client, wish, work.request.recipes, on_line=show)
    else:
        went = ssh_run.run_over_ssh(work.door, spot.hosts, wish, work.request.recipes, on_line=show)
    log = work.run.log(went.host.name, SMOKE, "\n".join([*lines, ""]))
    return tell(work, (replace(_told(went, wish, lines), log=str(log)),))


def _told(went: TestRunResult, wish: TestRequest, lines: Sequence[str]) -> Outcome:
    if went.state == LATE:
        later = f"sbatch {wish.file}, when a node is free"
        return replace(went.outcome, state="skipped", code=OK, detail=f"{went.outcome.detail}. Try: {later}")
    said = [line for line in lines if f"[{SMOKE}] failed" in line or f"[{SMOKE}] rank " in line]
    if went.outcome.code != OK and said:
        return replace(went.outcome, detail=f"{went.outcome.detail}: {said[0]}")
    return went.outcome
