"""The end of `invoke test` for people: the state, figures and traffic that deserve a look, causes, the next
commands.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from deepep_bootstrap.analysis.assess import Assessment
from deepep_bootstrap.analysis.diagnosis import engine
from deepep_bootstrap.analysis.results import wording
from deepep_bootstrap.analysis.results.model import BELOW, ERROR, FIGURE, NIC, NONE, OK, Verdict, worst_first
from deepep_bootstrap.core.nodeset import fold

SHOWN = 12
"""Verdicts shown one by one; the report has all of them."""

STYLES = {BELOW: "red", OK: "green", NONE: "dim"}


def lines(assessment: Assessment, kind: str = "") -> Iterator[tuple[str, str]]:
    """Yield lines, each with the style it is shown in; `kind` is the kind of test that was asked for."""
    for tested in assessment.tests:
        yield from _under_head(wording.lines(tested, kind), "bold")
    yield from _verdict_lines(assessment.verdicts)
    yield from _without_reference(assessment)
    yield from _under_head(engine.brief(assessment.diagnosis), "bold")
    more = assessment.diagnosis.findings[1:]
    if more:
        yield f"also possible: {', '.join(finding.cause for finding in more)} (invoke diagnose)", "dim"


def _under_head(texts: Iterable[str], style: str) -> Iterator[tuple[str, str]]:
    """Yield lines of which the first one has a style."""
    for number, text in enumerate(texts):
        yield text, "" if number else style


def _verdict_lines(verdicts: Iterable[Verdict]) -> Iterator[tuple[str, str]]:
    """Yield the verdicts that deserve a look, the worst first."""
    shown = [verdict for verdict in worst_first(verdicts) if not _is_without_reference(verdict)]
    told: set[str] = set()
    for verdict, hosts in _folded(shown)[:SHOWN]:
        first, *lines = verdict.lines()
        others = [line for line in lines if line not in told]  # each advice once
        told.update(others)
        if verdict.host:
            first = first.replace(f"{verdict.host}: ", f"{hosts}: ", 1)
        yield from _under_head([first, *others], STYLES.get(verdict.state, ""))


def _without_reference(assessment: Assessment) -> Iterator[tuple[str, str]]:
    """Yield a line with the number of figures that have no reference; those of later passes never have one."""
    later = {tested.title for tested in assessment.tests if tested.is_later_pass}
    bare = [verdict for verdict in assessment.verdicts if _is_without_reference(verdict) and verdict.test not in later]
    if bare:
        yield f"no reference for {len(bare)} figure{'s' * (len(bare) > 1)} (--save-as-reference keeps them)", "dim"


def _is_without_reference(verdict: Verdict) -> bool:
    return verdict.kind == FIGURE and verdict.state == NONE


def unkept(code: int, assessment: Assessment) -> str:
    """Return why the figures of a run whose own exit code is `code` cannot be a site's references; "" if they can.

    A figure below a published reference is no reason: it may be all that this site's hardware can do, and its own
    references are to say so.
    """
    if code or assessment.failed:
        return "the test did not pass"
    low = [verdict for verdict in assessment.verdicts if verdict.kind != FIGURE and verdict.state == BELOW]
    return f"{low[0].host}: {low[0].text}" if low else ""


def _folded(verdicts: Sequence[Verdict]) -> list[tuple[Verdict, str]]:
    """Return verdicts with the hosts each holds of; those that say the same of several hosts are one."""
    groups: dict[tuple[str, str, str], list[Verdict]] = {}
    for verdict in verdicts:
        key = (
            (verdict.kind, verdict.subject, verdict.text)
            if verdict.kind in {NIC, ERROR}
            else (verdict.kind, verdict.log, verdict.subject)
        )
        groups.setdefault(key, []).append(verdict)
    return [(group[0], fold(verdict.host for verdict in group) if group[0].host else "") for group in groups.values()]
