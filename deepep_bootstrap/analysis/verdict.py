"""The verdict on a run and the reason in one sentence, out of what was found in its files: the same in `test`, `status`
and `report`.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepep_bootstrap.analysis.assess import Assessment
from deepep_bootstrap.analysis.diagnosis.engine import SURE
from deepep_bootstrap.analysis.results import wording
from deepep_bootstrap.analysis.results.model import ABOVE, BELOW, ERROR, FIGURE, NIC, NONE, OK
from deepep_bootstrap.analysis.results.scanner import is_launchers
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.text import three_digits
from deepep_bootstrap.testing.run_folder import Judgement, RunVerdict, TestRun

SLOW_NAMED = 3
"""Slow ranks that the reason names; the report has all."""


def judge_run(run: TestRun, found: Assessment) -> Judgement:
    """Return the verdict on a run by its files; one that nobody saw end has none, whatever its logs have so far."""
    if run.code is None:
        return Judgement(RunVerdict.OPEN, "it is still running, or whoever followed it was stopped")
    if found.failed:
        return Judgement(RunVerdict.FAILED, failure(run, found))
    if any(verdict.state == BELOW for verdict in found.verdicts):
        return Judgement(RunVerdict.BELOW, fault(found))
    return Judgement(RunVerdict.PASSED, praise(found))


def failure(run: TestRun, found: Assessment) -> str:
    """Return why a run failed: wrong results before all, then its first cause if that is sure, then what a program of
    ours or a test says, else the line that says most, and what a launcher says of exit codes only where there is
    nothing else."""
    reasons = list(filter(None, map(wording.wrong, found.tests)))
    if found.refused_args and found.failure:
        reasons.append(found.failure.text)
    if found.diagnosis.findings and found.diagnosis.findings[0].confidence >= SURE:
        reasons.append(found.diagnosis.findings[0].title)
    reasons += found.own_words
    if found.failure:
        reasons.append(found.failure.text)
    first = found.diagnosis.first
    if first and not is_launchers((shown := first.evidence).text):
        reasons.append(f"{shown.log}, line {shown.line}: {shown.text}")
    if run.code:
        reasons.append(f"exit code {run.code}")
    reasons += [fault for tested in found.tests for fault in wording.faults(tested)]
    reasons.append("its output says nothing of a test")
    return next((reason for reason in reasons if not is_launchers(reason)), reasons[0])


def fault(found: Assessment) -> str:
    """Return the first thing that is below what it should be: NICs and errors before figures, which suffer from
    them."""
    low = sorted(
        (verdict for verdict in found.verdicts if verdict.state == BELOW), key=lambda verdict: verdict.kind == FIGURE
    )
    first = low[0]
    text = f"{first.host}: {first.text}" if first.host else first.text
    if first.kind == FIGURE and first.percent is not None:
        text = f"{first.title}: {three_digits(first.value or 0.0)} {first.unit}, {first.beside}"
    return f"{text}; {len(low) - 1} more" if len(low) > 1 else text


def praise(found: Assessment) -> str:
    """Return what is good about a run that passed, and which of its ranks are slow."""
    parts = list(counted(found))
    compared = [verdict for verdict in found.verdicts if verdict.kind == FIGURE and verdict.wanted is not None]
    if compared:
        above = sum(verdict.state == ABOVE for verdict in compared)
        parts.append(f"{len(compared)} figures at their reference" + (f", {above} of them above" if above else ""))
    parts += carried(found)
    if any(verdict.kind == ERROR for verdict in found.verdicts):
        parts.append("with new errors of links that are no fault by themselves")
    ranks = (rank for tested in found.tests for rank in tested.ranks)
    slow = [f"rank {rank.rank} is slow" for rank in ranks if rank.state == "slow"]
    return "; ".join([*parts, *slow[:SLOW_NAMED]]) or "exit code 0"


def counted(found: Assessment) -> Iterator[str]:
    """Yield how many cases passed, and what later passes compared."""
    if passed := sum(tested.passed for tested in found.tests):
        yield f"{passed} case{'s' * (passed != 1)} passed"
    for tested in found.tests:
        if tested.test_pass and tested.is_later_pass:
            yield f"checked {wording.checked(tested.test_pass)}"


def carried(found: Assessment) -> Iterator[str]:
    """Yield what is known of the NICs of a run that passed: praise only where all were measured and are well."""
    nics = [verdict for verdict in found.verdicts if verdict.kind == NIC]
    if nics and all(verdict.state == OK for verdict in nics):
        yield "every NIC carried its share"
    unmeasured = [verdict for verdict in nics if verdict.state == NONE]
    if bare := {verdict.host for verdict in unmeasured if verdict.subject == "nics"}:
        yield f"no RDMA NIC on {fold(bare)}: what nodes sent each other went over sockets"
    if unknown := {verdict.host for verdict in unmeasured if verdict.subject != "nics"}:
        yield f"what NICs carried was not measured on {fold(unknown)}"
