"""What a report of one run shows: how it went, how well, why not, and against what before. Values, pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from deepep_bootstrap.analysis.diagnosis import engine
from deepep_bootstrap.analysis.diagnosis.engine import Diagnosis
from deepep_bootstrap.analysis.results import model
from deepep_bootstrap.analysis.results.model import Tested
from deepep_bootstrap.analysis.results.ranks import numbers
from deepep_bootstrap.analysis.traffic import NicTraffic
from deepep_bootstrap.analysis.verdict import FIGURE, Verdict
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.records import natural
from deepep_bootstrap.core.text import number
from deepep_bootstrap.report.runviews import Grid, HostRow, Spread, Tail
from deepep_bootstrap.testing.run_folder import TestRun

PASSED, SLOW, FAILED, OPEN = "passed", "below", "failed", "unfinished"
HEADLINES = {PASSED: "Passed", SLOW: "Below what is expected", FAILED: "Failed", OPEN: "Not ended"}


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
    """Everything a report shows. `state` is passed, below, failed or unfinished; `why` says it in one sentence, `said`
    is what a program of ours (nccl, pairs, smoke) printed of its own."""

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
    said: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def figures(self) -> tuple[Verdict, ...]:
        """Return the verdicts on figures."""
        return tuple(verdict for verdict in self.verdicts if verdict.kind == FIGURE and verdict.value is not None)

    @property
    def by_test(self) -> tuple[tuple[Tested, tuple[Verdict, ...]], ...]:
        """Return the tests with the verdicts on their figures."""
        kinds = [(tested, (tested.title, tested.log)) for tested in self.tests]
        return tuple((tested, tuple(each for each in self.figures if (each.test, each.log) == key)) for tested, key in kinds)

    @property
    def sources(self) -> tuple[str, ...]:
        """Return where the references of the figures are from, each once."""
        return tuple(dict.fromkeys(verdict.source for verdict in self.figures if verdict.source))

    @property
    def slow_ranks(self) -> tuple[tuple[str, str], ...]:
        """Return states and sentences of the ranks that are slow or missing; those of which the same is said in one."""
        groups: dict[tuple[str, str, str], list[int]] = {}
        for tested in self.tests:
            for rank in tested.ranks:
                if rank.state != "ok":
                    groups.setdefault((rank.state, rank.why or "its log says more", tested.title), []).append(rank.rank)
        return tuple(
            (state, f"rank{'s' * (len(ranks) > 1)} {numbers(ranks)} of {test}: {why}") for (state, why, test), ranks in groups.items()
        )

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


def as_json(report: Report, folder: str) -> dict[str, Any]:
    """Return the same content as the keys that docs/json.md promises; `folder` is where the run lies."""
    run = report.run
    return {
        "run": {"name": run.name, "folder": folder, "values": dict(run.values)},
        "nodes": list(run.nodes),
        "state": report.state,
        "why": report.why,
        "seconds": report.seconds,
        "results": model.document(report.tests),
        "verdicts": [verdict.as_json() for verdict in report.verdicts],
        "traffic": [nic_json(host.host, row.state, row.text, row.traffic) for host in report.hosts for row in host.nics],
        **engine.as_json(report.diagnosis),
        "facts": [vars(row) for row in report.facts],
        "history": [
            {"name": each.name, "started": each.started, "failed": each.failed, "figures": dict(each.figures)} for each in report.past
        ],
        "said": list(report.said),
        "remarks": list(report.remarks),
    }


def nic_json(host: str, state: str, text: str, nic: NicTraffic) -> dict[str, Any]:
    """Return what one NIC carried as a JSON value."""
    return {**vars(nic), "errors": dict(nic.errors), "host": host, "state": state, "text": text}
