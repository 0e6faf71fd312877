"""The report of a run, composed of its assessment, the facts of its hosts and earlier runs of its kind."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from deepep_bootstrap.analysis.assess import Assessment, failure_logs, judge_run
from deepep_bootstrap.analysis.compare import figures_of
from deepep_bootstrap.analysis.diagnosis.engine import Diagnosis
from deepep_bootstrap.analysis.diagnosis.first_error import scrubbed
from deepep_bootstrap.analysis.diagnosis.log import Evidence
from deepep_bootstrap.analysis.results.model import FIGURE, Tested
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.redact import scrub
from deepep_bootstrap.core.text import number
from deepep_bootstrap.inventory.facts import Facts, by_label, lines
from deepep_bootstrap.prefix.test_kinds import KINDS
from deepep_bootstrap.report.model import Past, Report, Row, Series, grids, hosts_of, log_ends, spreads
from deepep_bootstrap.testing.run_folder import RunVerdict, TestRun

COMPARED = {RunVerdict.PASSED, RunVerdict.BELOW, RunVerdict.FAILED}
"""Verdicts that today's rules can change; of a run that was stopped its files say less than whoever saw it."""

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
    again = judge_run(run, found)
    judgement = run.kept or again
    if judgement.verdict is not again.verdict and {judgement.verdict, again.verdict} <= COMPARED:
        remarks = (*remarks, f"judged {judgement.verdict.value} when it ran; today: {again.verdict.value}, {again.why}")
    return Report(
        run=run,
        verdict=judgement.verdict,
        why=judgement.why,
        tests=found.tests,
        verdicts=found.verdicts,
        hosts=hosts_of(found.traffic, found.verdicts),
        diagnosis=found.diagnosis,
        spreads=spreads(found.tests),
        grids=grids(found.tests),
        series=series(run, found, earlier),
        facts=lines_of(facts),
        about=tuple(Row(label, run.values[key]) for key, label in LABELS if run.values.get(key)),
        log_ends=log_ends(run, logs_of_failure(run, found)),
        failure=found.failure,
        rerun="" if judgement.verdict is RunVerdict.PASSED else shlex.join(rerun_words(run)),
        past=tuple(earlier),
        program_output=program_output(run),
        remarks=tuple(remarks),
    )


def rerun_words(run: TestRun) -> list[str]:
    """Return the command that runs the same test again, but for its hosts; nothing for a run that does not say what it
    was."""
    if run.kind not in KINDS:
        return []
    stack, kind = run.values.get("stack", ""), KINDS[run.kind]
    more = [f"--stack={stack}"] if stack else []
    more += [f"--nodes={len(run.nodes)}"] if run.nodes and len(run.nodes) != kind.nodes else []
    more += [f"--args={shlex.join(run.args)}"] if run.args else []
    return ["invoke", "test", f"--kind={run.kind}", *more]


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
        found,
        tests=tests,
        diagnosis=diagnosis,
        own_words=tuple(map(scrub, found.own_words)),
        failure=quoted((found.failure,))[0] if found.failure else None,
    )


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


def logs_of_failure(run: TestRun, found: Assessment) -> frozenset[str]:
    """Return the logs that show why a run failed; of one that did not, none."""
    shown = [evidence.log for finding in found.diagnosis.findings for evidence in finding.evidence[:1]]
    first = found.diagnosis.first
    shown += [line.log for line in (found.failure, first and first.evidence) if line][:1]
    return frozenset(shown) if run.code != 0 else frozenset()


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
