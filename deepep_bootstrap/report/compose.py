"""The report of a run, composed of its assessment, the facts of its hosts and earlier runs of its kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from deepep_bootstrap.analysis.assess import Assessment, failure_logs
from deepep_bootstrap.analysis.compare import figures_of
from deepep_bootstrap.analysis.diagnosis.engine import SURE, Diagnosis
from deepep_bootstrap.analysis.diagnosis.first_error import scrubbed
from deepep_bootstrap.analysis.diagnosis.log import Evidence
from deepep_bootstrap.analysis.results import wording
from deepep_bootstrap.analysis.results.model import ABOVE, BELOW, ERROR, FIGURE, NIC, NONE, OK, Tested
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.redact import scrub
from deepep_bootstrap.core.text import number
from deepep_bootstrap.inventory.facts import Facts, by_label, lines
from deepep_bootstrap.report.model import (
    FAILED,
    OPEN,
    PASSED,
    SLOW,
    Past,
    Report,
    Row,
    Series,
    grids,
    hosts_of,
    log_ends,
    spreads,
)
from deepep_bootstrap.testing.run_folder import TestRun

PAST_RUNS = 30
"""How many earlier runs a trend shows."""

MOST_SAID = 60
"""Lines of a program of ours that a report shows."""

LABELS = (
    ("module", "module"),
    ("stack", "stack"),
    ("deepep", "DeepEP"),
    ("generation", "generation"),
    ("lock_digest", "lock digest"),
    ("prefix", "prefix"),
    ("via", "started by"),
    ("job", "Slurm job"),
    ("script", "script"),
    ("args", "arguments"),
    ("time_limit", "time limit, s"),
    ("code", "exit code"),
)
"""Values of run.env in the order of a report, and what people call them."""


def compose(
    run: TestRun,
    found: Assessment,
    facts: Mapping[str, Facts],
    *,
    past: Sequence[Past] = (),
    remarks: Sequence[str] = (),
) -> Report:
    """Return the report of a run: what was found in it, the facts of its hosts by name, earlier runs of its kind,
    and what a reader is to know beside."""
    run, found = discreet(run, found)
    earlier = sorted((each for each in past if each.name != run.name), key=lambda each: (each.started, each.name))[
        -PAST_RUNS:
    ]
    state = state_of(run, found)
    return Report(
        run=run,
        state=state,
        why=reason(run, state, found),
        tests=found.tests,
        verdicts=found.verdicts,
        hosts=hosts_of(found.traffic, found.verdicts),
        diagnosis=found.diagnosis,
        spreads=spreads(found.tests),
        grids=grids(found.tests),
        series=series(run, found, earlier),
        facts=lines_of(facts),
        about=tuple(Row(label, run.values[key]) for key, label in LABELS if run.values.get(key)),
        log_ends=log_ends(run, logs_of_failure(run, found.diagnosis)),
        past=tuple(earlier),
        program_output=program_output(run),
        remarks=tuple(remarks),
    )


def discreet(run: TestRun, found: Assessment) -> tuple[TestRun, Assessment]:
    """Return the same with nobody's passwords, tokens and keys in what is quoted of logs and commands: reports are
    handed around."""

    def quoted(evidence: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
        return tuple(replace(each, text=scrub(each.text)) for each in evidence)

    diagnosis = Diagnosis(
        tuple(replace(finding, evidence=quoted(finding.evidence)) for finding in found.diagnosis.findings),
        tuple(replace(note, evidence=quoted(note.evidence)) for note in found.diagnosis.notes),
        scrubbed(found.diagnosis.first, scrub) if found.diagnosis.first else None,
    )
    tests = tuple(
        replace(
            tested,
            errors=tuple(map(scrub, tested.errors)),
            ranks=tuple(replace(rank, why=scrub(rank.why)) if rank.why else rank for rank in tested.ranks),
        )
        for tested in found.tests
    )
    values = {key: scrub(value) for key, value in run.values.items()}
    return replace(run, values=values), replace(
        found, tests=tests, diagnosis=diagnosis, own_words=tuple(map(scrub, found.own_words))
    )


def state_of(run: TestRun, found: Assessment) -> str:
    """Return how a run went; one that nobody saw end is open, whatever its logs have so far."""
    if run.code is None:
        return OPEN
    if found.failed:
        return FAILED
    return SLOW if any(verdict.state == BELOW for verdict in found.verdicts) else PASSED


def reason(run: TestRun, state: str, found: Assessment) -> str:
    """Return why the state is what it is, in one sentence."""
    if state == OPEN:
        return "it is still running, or whoever followed it was stopped"
    if state == FAILED:
        return failure(run, found)
    if state == SLOW:
        return fault(found)
    return praise(found)


def failure(run: TestRun, found: Assessment) -> str:
    """Return why a run failed: its first cause if that is sure, else what a test says, else the first line that
    shows a failure."""
    if found.diagnosis.findings and found.diagnosis.findings[0].confidence >= SURE:
        return found.diagnosis.findings[0].title
    reasons = [
        *found.own_words,
        *filter(None, map(wording.wrong, found.tests)),
        *(error for tested in found.tests for error in tested.errors),
    ]
    if shown := found.diagnosis.failure:
        reasons.append(f"{shown.log}, line {shown.line}: {shown.text}")
    return reasons[0] if reasons else f"exit code {run.code}" if run.code else "a test did not reach its end"


def fault(found: Assessment) -> str:
    """Return the first thing that is below what it should be: NICs and errors before figures, which suffer from
    them."""
    low = sorted(
        (verdict for verdict in found.verdicts if verdict.state == BELOW), key=lambda verdict: verdict.kind == FIGURE
    )
    first = low[0]
    text = f"{first.host}: {first.text}" if first.host else first.text
    if first.kind == FIGURE and first.percent is not None:
        text = f"{first.title}: {first.value:.1f} {first.unit}, {first.percent:.0f} % of {first.wanted:g}"
    return f"{text}; {len(low) - 1} more" if len(low) > 1 else text


def program_output(run: TestRun) -> tuple[str, ...]:
    """Return what a program of ours printed of its own, each line once: its lines begin with the kind in brackets."""
    mark = f"[{run.kind}] "
    found = (
        scrub(line.removeprefix(mark).strip())
        for text in failure_logs(run).values()
        for line in text.splitlines()
        if line.startswith(mark)
    )
    return tuple(dict.fromkeys(found))[:MOST_SAID]


def logs_of_failure(run: TestRun, diagnosis: Diagnosis) -> frozenset[str]:
    """Return the logs that show why a run failed; of one that did not, none."""
    shown = [evidence.log for finding in diagnosis.findings for evidence in finding.evidence[:1]]
    shown += [diagnosis.failure.log] if diagnosis.failure else []
    return frozenset(shown) if run.code != 0 else frozenset()


def praise(found: Assessment) -> str:
    """Return what is good about a run that passed."""
    passed = sum(tested.passed for tested in found.tests)
    parts = [f"{passed} cases passed"] if passed else []
    later = [tested.test_pass for tested in found.tests if tested.test_pass and tested.is_later_pass]
    parts += [f"{checked.checked_calls} combine calls checked at {checked.tokens} tokens" for checked in later]
    compared = [verdict for verdict in found.verdicts if verdict.kind == FIGURE and verdict.wanted is not None]
    if compared:
        above = sum(verdict.state == ABOVE for verdict in compared)
        parts.append(f"{len(compared)} figures at their reference" + (f", {above} of them above" if above else ""))
    parts += carried(found)
    if any(verdict.kind == ERROR for verdict in found.verdicts):
        parts.append("with new errors of links that are no fault by themselves")
    return "; ".join(parts) or "exit code 0"


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


def keyed(tests: Iterable[Tested]) -> dict[str, float]:
    """Return the figures of tests by test and path ("internode best.combine.rdma_gbs"); of two tests of one kind the
    first counts, and so does the first of several passes."""
    found: dict[str, float] = {}
    for tested in tests:
        for path, value in () if tested.is_later_pass else figures_of(tested).items():
            found.setdefault(f"{tested.test} {path}", value)
    return found


def series(run: TestRun, found: Assessment, earlier: Sequence[Past]) -> tuple[Series, ...]:
    """Return each rate of this run over the runs before it, in the order of the verdicts; times are left to the
    table."""
    now = Past(run.name, number(run.values.get("started", "")) or 0.0, found.failed, keyed(found.tests))
    shown: dict[str, Series] = {}
    for verdict in found.verdicts:
        key = f"{verdict.test} {verdict.subject}"
        if verdict.kind != FIGURE or verdict.unit != "GB/s" or key not in now.figures or key in shown:
            continue
        shown[key] = Series(
            verdict, tuple((each, each.figures[key]) for each in (*earlier, now) if key in each.figures)
        )
    return tuple(shown.values())


def lines_of(facts: Mapping[str, Facts]) -> tuple[Row, ...]:
    """Return what the hosts are, a value that all share once, others each with the hosts that have it."""
    rows = []
    for label, values in by_label({name: lines(seen) for name, seen in facts.items()}).items():
        rows += [Row(label, value, "" if len(values) == 1 else fold(names)) for value, names in values.items()]
    return tuple(rows)
