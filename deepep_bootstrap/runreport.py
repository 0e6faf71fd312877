"""What a report of one run shows, in the order of a reader's questions: did it work, how well, why not, against what before. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from deepep_bootstrap import diagnose, figures
from deepep_bootstrap.assess import Assessment
from deepep_bootstrap.datalines import natural
from deepep_bootstrap.diagnose import Diagnosis
from deepep_bootstrap.factlines import by_label, lines
from deepep_bootstrap.facts import Facts
from deepep_bootstrap.figures import Tested
from deepep_bootstrap.hosts import fold
from deepep_bootstrap.references import figures_of
from deepep_bootstrap.runviews import Grid, HostRow, Spread, Tail, grids, hosts_of, spreads, tails
from deepep_bootstrap.testruns import TestRun
from deepep_bootstrap.traffic import NicTraffic
from deepep_bootstrap.verdicts import ABOVE, BELOW, ERROR, FIGURE, NIC, Verdict

PASSED, SLOW, FAILED, OPEN = "passed", "below", "failed", "unfinished"
HEADLINES = {PASSED: "Passed", SLOW: "Below its reference", FAILED: "Failed", OPEN: "Not ended"}

PAST_RUNS = 30
"""How many earlier runs a trend shows."""

LABELS = (
    ("module", "module"), ("stack", "stack"), ("deepep", "DeepEP"), ("generation", "generation"), ("lock_digest", "lock digest"),
    ("prefix", "prefix"), ("via", "started by"), ("job", "Slurm job"), ("script", "script"), ("args", "arguments"),
    ("time_limit", "time limit, s"), ("code", "exit code"),
)  # fmt: skip
"""Values of run.env in the order of a report, and what people call them."""


@dataclass(frozen=True)
class Past:
    """What one earlier run of the same kind gave: figures by test and path, see `keyed`."""

    name: str
    started: float
    failed: bool
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Series:
    """One figure over the runs, oldest first, this one last: its verdict now, and a value for each run that has it."""

    verdict: Verdict
    values: tuple[tuple[Past, float], ...]

    @property
    def before(self) -> float | None:
        """Return the median of the runs before; None for the first run."""
        return median(value for _, value in self.values[:-1]) if len(self.values) > 1 else None

    @property
    def change(self) -> float:
        """Return by how many percent this run is above that."""
        return 100 * (self.values[-1][1] / self.before - 1) if self.before else 0.0

    @property
    def span(self) -> str:
        """Return the least and the greatest value of all runs."""
        values = [value for _, value in self.values]
        return f"{min(values):.1f} to {max(values):.1f} {self.verdict.unit}"


@dataclass(frozen=True)
class Row:
    """One line about hosts: what it is about, what is said, and of which hosts ("" for all)."""

    label: str
    value: str
    hosts: str = ""


@dataclass(frozen=True)
class Report:
    """Everything a report shows. `state` is passed, below, failed or unfinished; `why` says it in one sentence."""

    run: TestRun
    state: str
    why: str
    tests: tuple[Tested, ...]
    verdicts: tuple[Verdict, ...]
    hosts: tuple[HostRow, ...]
    diagnosis: Diagnosis
    spreads: tuple[Spread, ...]
    grids: tuple[Grid, ...]
    series: tuple[Series, ...]
    facts: tuple[Row, ...]
    about: tuple[Row, ...]
    tails: tuple[Tail, ...]
    past: tuple[Past, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def figures(self) -> tuple[Verdict, ...]:
        """Return the verdicts on figures."""
        return tuple(verdict for verdict in self.verdicts if verdict.kind == FIGURE and verdict.value is not None)

    @property
    def by_test(self) -> tuple[tuple[Tested, tuple[Verdict, ...]], ...]:
        """Return the tests with the verdicts on their figures."""
        kinds = [(tested, (tested.test, tested.log)) for tested in self.tests]
        return tuple((tested, tuple(each for each in self.figures if (each.test, each.log) == key)) for tested, key in kinds)

    @property
    def sources(self) -> tuple[str, ...]:
        """Return where the references of the figures are from, each once."""
        return tuple(dict.fromkeys(verdict.source for verdict in self.figures if verdict.source))

    @property
    def slow_ranks(self) -> tuple[tuple[str, str], ...]:
        """Return state and sentence of every rank that is slow or missing."""
        found = [(tested, rank) for tested in self.tests for rank in tested.ranks if rank.state != "ok"]
        return tuple((rank.state, f"rank {rank.rank}, {rank.why or 'its log says more'} ({tested.test})") for tested, rank in found)

    @property
    def spread_groups(self) -> tuple[tuple[str, tuple[Spread, ...]], ...]:
        """Return the spreads by test."""
        tests = dict.fromkeys(spread.test for spread in self.spreads)
        return tuple((test, tuple(spread for spread in self.spreads if spread.test == test)) for test in tests)

    def rank_rows(self, group: Sequence[Spread]) -> list[tuple[int, list[float | None]]]:
        """Return each rank with its value of every figure of a group."""
        tables = [{each.rank: each.value for each in spread.values} for spread in group]
        return [(rank, [table.get(rank) for table in tables]) for rank in sorted({rank for table in tables for rank in table})]

    @property
    def run_rows(self) -> list[tuple[Past, list[float | None]]]:
        """Return each run, newest first, with its value of every series."""
        runs = {past.name: past for series in self.series for past, _ in series.values}
        tables = [{past.name: value for past, value in series.values} for series in self.series]
        newest_first = sorted(runs.values(), key=lambda past: (past.started, past.name), reverse=True)
        return [(past, [table.get(past.name) for table in tables]) for past in newest_first]

    @property
    def nic_names(self) -> tuple[str, ...]:
        """Return the NICs of all hosts."""
        return tuple(sorted({row.traffic.device for host in self.hosts for row in host.nics}, key=natural))

    @property
    def nodes(self) -> str:
        """Return the nodes as one folded set."""
        return fold(self.run.nodes) if self.run.nodes else ""

    @property
    def started(self) -> float | None:
        """Return when the run began, in seconds since 1970."""
        return number(self.run.values.get("started", ""))

    @property
    def seconds(self) -> float | None:
        """Return how long it took; None where nobody said it."""
        ended = number(self.run.values.get("ended", ""))
        return ended - self.started if ended is not None and self.started is not None and ended >= self.started else None


def compose(
    run: TestRun, found: Assessment, facts: Mapping[str, Facts], *, past: Sequence[Past] = (), remarks: Sequence[str] = ()
) -> Report:
    """Return the report of a run: what was found in it, the facts of its hosts by name, earlier runs of its kind, and what a reader is
    to know beside."""
    earlier = sorted((each for each in past if each.name != run.name), key=lambda each: (each.started, each.name))[-PAST_RUNS:]
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
        tails=tails(run, telling(run, found.diagnosis)),
        past=tuple(earlier),
        remarks=tuple(remarks),
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
        low = [verdict for verdict in found.verdicts if verdict.state == BELOW]
        more = f", and {len(low) - 1} more" if len(low) > 1 else ""
        return f"{low[0].host and low[0].host + ': '}{low[0].text}{more}"
    return praise(found)


def failure(run: TestRun, found: Assessment) -> str:
    """Return why a run failed: its first cause, else what a test says, else the first line that tells of a failure."""
    if found.diagnosis.findings:
        return found.diagnosis.findings[0].title
    said = [error for tested in found.tests for error in tested.errors]
    if shown := found.diagnosis.failure:
        said.append(f"{shown.log}, line {shown.line}: {shown.text}")
    return said[0] if said else f"exit code {run.code}" if run.code else "a test did not reach its end"


def telling(run: TestRun, diagnosis: Diagnosis) -> frozenset[str]:
    """Return the logs that show why a run failed; of one that did not, none."""
    shown = [evidence.log for finding in diagnosis.findings for evidence in finding.evidence[:1]]
    shown += [diagnosis.failure.log] if diagnosis.failure else []
    return frozenset(shown) if run.code != 0 else frozenset()


def praise(found: Assessment) -> str:
    """Return what is good about a run that passed."""
    passed = sum(tested.passed for tested in found.tests)
    said = [f"{passed} cases passed"] if passed else []
    compared = [verdict for verdict in found.verdicts if verdict.kind == FIGURE and verdict.wanted is not None]
    if compared:
        above = sum(verdict.state == ABOVE for verdict in compared)
        said.append(f"{len(compared)} figures at their reference" + (f", {above} of them above" if above else ""))
    if any(verdict.kind == NIC for verdict in found.verdicts):
        said.append("every NIC carried its share")
    if any(verdict.kind == ERROR for verdict in found.verdicts):
        said.append("with new errors of links that are no fault by themselves")
    return "; ".join(said) or "exit code 0"


def keyed(tests: Iterable[Tested]) -> dict[str, float]:
    """Return the figures of tests by test and path ("internode best.combine.rdma_gbs"); of two tests of one kind the first counts."""
    found: dict[str, float] = {}
    for tested in tests:
        for path, value in figures_of(tested).items():
            found.setdefault(f"{tested.test} {path}", value)
    return found


def series(run: TestRun, found: Assessment, earlier: Sequence[Past]) -> tuple[Series, ...]:
    """Return each rate of this run over the runs before it, in the order of the verdicts; times are left to the table."""
    now = Past(run.name, number(run.values.get("started", "")) or 0.0, found.failed, keyed(found.tests))
    shown: dict[str, Series] = {}
    for verdict in found.verdicts:
        key = f"{verdict.test} {verdict.subject}"
        if verdict.kind != FIGURE or verdict.unit != "GB/s" or key not in now.figures or key in shown:
            continue
        shown[key] = Series(verdict, tuple((each, each.figures[key]) for each in (*earlier, now) if key in each.figures))
    return tuple(shown.values())


def lines_of(facts: Mapping[str, Facts]) -> tuple[Row, ...]:
    """Return what the hosts are, a value that all share once, others each with the hosts that have it."""
    rows = []
    for label, values in by_label({name: lines(seen) for name, seen in facts.items()}).items():
        rows += [Row(label, value, "" if len(values) == 1 else fold(names)) for value, names in values.items()]
    return tuple(rows)


def number(text: str) -> float | None:
    """Return a time of run.env; None for what is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and 0 <= value < 2**40 else None


def as_json(report: Report) -> dict[str, Any]:
    """Return the same content as the keys that docs/json.md promises."""
    run = report.run
    return {
        "run": run.name,
        "values": dict(run.values),
        "nodes": list(run.nodes),
        "state": report.state,
        "why": report.why,
        "seconds": report.seconds,
        "results": figures.document(report.tests),
        "verdicts": [verdict.as_json() for verdict in report.verdicts],
        "traffic": [nic_json(host.host, row.state, row.text, row.traffic) for host in report.hosts for row in host.nics],
        **diagnose.as_json(report.diagnosis),
        "facts": [vars(row) for row in report.facts],
        "history": [
            {"run": each.name, "started": each.started, "failed": each.failed, "figures": dict(each.figures)} for each in report.past
        ],
        "remarks": list(report.remarks),
    }


def nic_json(host: str, state: str, text: str, nic: NicTraffic) -> dict[str, Any]:
    """Return what one NIC carried as a JSON value."""
    return {**vars(nic), "errors": dict(nic.errors), "host": host, "state": state, "text": text}
