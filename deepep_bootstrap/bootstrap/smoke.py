"""The last proof of a bootstrap that built or offered something: one dispatch and one combine on one free
node, in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from msgspec.structs import replace

from deepep_bootstrap.bootstrap.planning import BootstrapContext, show_outcomes
from deepep_bootstrap.core.errors import OK, Trouble
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.prefix.generations import PrefixHandle
from deepep_bootstrap.prefix.test_kinds import KINDS
from deepep_bootstrap.testing import slurm_run, ssh_run
from deepep_bootstrap.testing.placement import find_placement
from deepep_bootstrap.testing.run_folder import Judgement, RunVerdict, keep_judgement
from deepep_bootstrap.testing.slurm_run import LATE, STOPPED, TestRequest, TestRunResult

SMOKE = "smoke"
STEP = "smoke test"
PATIENCE = 60
"""Seconds to wait for a free node: whoever has jobs on all of them is not to wait for a proof."""

FEWEST = 2
"""GPUs of a node between which something can be exchanged."""

LIMIT = 300
"""Seconds the test may take; V2 compiles its kernels first."""


def try_out(context: BootstrapContext) -> tuple[Outcome, ...]:
    """Run the smoke test of the stack that was offered, through Slurm where it runs. Skipped where nothing is new
    since it was passed, where no host with a driver and two GPUs is free, and with --skip=smoke."""
    news = context.offers_news or context.is_unproved
    most = max((len(seen.gpus) for seen in context.survey.facts.values() if seen.prepared.nvidia_version), default=0)
    if not news or most < FEWEST or SMOKE in context.request.skip:
        return ()
    survey = replace(context.look(), problems=())
    kind, record = KINDS[SMOKE], context.plan.choice.record
    request = TestRequest(
        kind, record, slurm_run.run_name(SMOKE), 1, LIMIT, start_limit=PATIENCE, user=context.build_user
    )
    try:
        spot = find_placement(
            survey, kind, 1, limited=bool(context.flags.limit), use_busy=context.flags.on_busy_host == "use"
        )
    except Trouble as trouble:
        return show_outcomes(
            context, (Outcome(STEP, fold(survey.facts), "skipped", "; ".join(map(str, trouble.problems))),)
        )
    context.screen.started(STEP, [spot.where])
    lines: list[str] = []

    def show(line: str) -> None:
        lines.append(line)
        context.screen.line(spot.where, STEP, line)

    request = replace(request, named=spot.named)
    if spot.client:
        result = slurm_run.submit(context.transport, spot.client, request, context.request.recipes, on_line=show)
    else:
        result = ssh_run.run_over_ssh(context.transport, spot.hosts, request, context.request.recipes, on_line=show)
    _keep_judgement(context, request, result)
    log = context.run.log(result.host.name, SMOKE, "\n".join([*lines, ""]))
    return show_outcomes(context, (replace(_outcome_of(result, request, lines), log=str(log)),))


def _keep_judgement(context: BootstrapContext, request: TestRequest, result: TestRunResult) -> None:
    """Add the verdict to the run's folder. This test measures nothing: its exit code says all."""
    if not result.began:
        return
    verdict = RunVerdict.STOPPED if result.state == STOPPED else RunVerdict.FAILED
    if result.outcome.code == OK:
        verdict = RunVerdict.PASSED
    place = PrefixHandle(result.host, request.record.prefix, context.request.recipes, request.user)
    with suppress(Trouble):  # the proof counts, with its record or without
        keep_judgement(context.transport, place, result.place, Judgement(verdict, result.ending or "exit code 0"))


def _outcome_of(result: TestRunResult, request: TestRequest, lines: Sequence[str]) -> Outcome:
    if result.state == LATE:
        later = f"sbatch {request.file}, when a node is free"
        return replace(result.outcome, state="skipped", code=OK, detail=f"{result.outcome.detail}. Try: {later}")
    failures = [line for line in lines if f"[{SMOKE}] failed" in line or f"[{SMOKE}] rank " in line]
    if result.outcome.code != OK and failures:
        return replace(result.outcome, detail=f"{result.outcome.detail}: {failures[0]}")
    return result.outcome
