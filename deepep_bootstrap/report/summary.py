"""The end of `invoke test` for people: the state, figures and traffic that deserve a look, causes, the next
commands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deepep_bootstrap.analysis.assess import Assessment
from deepep_bootstrap.analysis.diagnosis import engine
from deepep_bootstrap.analysis.results import wording
from deepep_bootstrap.analysis.results.model import BELOW, ERROR, FIGURE, NIC, NONE, OK, Verdict, worst_first
from deepep_bootstrap.core.nodeset import fold

SHOWN = 12
"""Verdicts told one by one; the report has all of them."""

STYLES = {BELOW: "red", OK: "green", NONE: "dim"}


def lines(assessment: Assessment) -> Iterator[tuple[str, str]]:
    """Yield lines, each with the style it is shown in."""
    for tested in assessment.tests:
        for number, line in enumerate(wording.lines(tested)):
            yield line, "bold" if number == 0 else ""
    told = [
        verdict
        for verdict in worst_first(assessment.verdicts)
        if not (verdict.kind == FIGURE and verdict.state == NONE)
    ]
    for verdict, where in _folded(told)[:SHOWN]:
        for number, line in enumerate(verdict.lines()):
            plain = line.replace(f"{verdict.host}: ", f"{where}: ", 1) if verdict.host and number == 0 else line
            yield plain, STYLES.get(verdict.state, "") if number == 0 else ""
    later = {tested.title for tested in assessment.tests if tested.is_later_pass}
    bare = sum(
        verdict.kind == FIGURE and verdict.state == NONE and verdict.test not in later
        for verdict in assessment.verdicts
    )
    if bare:
        yield (
            (
                f"none   {bare} figures have no reference for this GPU, network and these settings "
                "(--save-as-reference keeps them)"
            ),
            "dim",
        )
    for number, line in enumerate(engine.brief(assessment.diagnosis)):
        yield line, "bold" if number == 0 else ""
    more = assessment.diagnosis.findings[1:]
    if more:
        yield f"also possible: {', '.join(finding.cause for finding in more)} (invoke diagnose)", "dim"


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
