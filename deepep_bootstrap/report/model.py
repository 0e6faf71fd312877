"""The report of one run as values: state, reason, tests, hosts, ranks, sweeps, logs and earlier runs; and
its JSON.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from msgspec import Struct, field, structs
from msgspec.structs import replace

from deepep_bootstrap.analysis.compare import title
from deepep_bootstrap.analysis.diagnosis import engine
from deepep_bootstrap.analysis.diagnosis.engine import Diagnosis
from deepep_bootstrap.analysis.diagnosis.log import Evidence
from deepep_bootstrap.analysis.reference_file import unit_of
from deepep_bootstrap.analysis.results import model
from deepep_bootstrap.analysis.results.collectors import numbers
from deepep_bootstrap.analysis.results.model import BELOW, ERROR, FIGURE, NIC, Tested, Verdict
from deepep_bootstrap.analysis.traffic import NicTraffic, gigabytes
from deepep_bootstrap.analysis.tuning.sweep import HeatMap, heat_maps
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.redact import scrub
from deepep_bootstrap.core.text import number, plain, three_digits
from deepep_bootstrap.inventory.natural import natural
from deepep_bootstrap.testing.run_folder import RunVerdict, TestRun


class Past(Struct, frozen=True):
    """What one earlier run of the same kind gave: figures by test and path, see `keyed`."""

    name: str
    started: float
    failed: bool
    figures: Mapping[str, float] = field(default_factory=dict)


class Series(Struct, frozen=True):
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
        return f"{three_digits(min(values))} to {three_digits(max(values))} {self.verdict.unit}"


class Row(Struct, frozen=True):
    """One line about hosts: what it is about, the value, and of which hosts ("" for all)."""

    label: str
    value: str
    hosts: str = ""


class Report(Struct, frozen=True):
    """Everything a report shows. `why` is the reason of the verdict in one sentence, `program_output` what a
    program of ours (nccl, pairs, smoke) printed of its own, `failure` the line that says why it failed,
    `rerun` the command that runs it again, but for its hosts ("" for one that passed)."""

    run: TestRun
    verdict: RunVerdict
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
    log_ends: tuple[LogEnd, ...]
    past: tuple[Past, ...] = ()
    program_output: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    failure: Evidence | None = None
    rerun: str = ""

    @property
    def figures(self) -> tuple[Verdict, ...]:
        """Return the verdicts on figures."""
        return tuple(verdict for verdict in self.verdicts if verdict.kind == FIGURE and verdict.value is not None)

    @property
    def by_test(self) -> tuple[tuple[Tested, tuple[Verdict, ...]], ...]:
        """Return the tests with the verdicts on their figures."""
        kinds = [(tested, (tested.title, tested.log)) for tested in self.tests]
        return tuple(
            (tested, tuple(each for each in self.figures if (each.test, each.log) == key)) for tested, key in kinds
        )

    @property
    def no_traffic(self) -> str:
        """Return what to say in place of each NIC's line: on one node none carries anything of a test, and nothing
        speaks against it; "" where the lines are to be seen."""
        rows = [row for host in self.hosts for row in host.nics]
        spoken = any(row.text for row in rows) or any(host.verdicts for host in self.hosts)
        if len(self.run.nodes) != 1 or not rows or spoken or any(host.state != "ok" for host in self.hosts):
            return ""
        if moved := sum(row.traffic.sent + row.traffic.received for row in rows):
            return f"no NIC traffic of its own, as expected on one node ({gigabytes(moved)} of others)"
        return "no NIC traffic, as expected on one node"

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
            (state, f"rank{'s' * (len(ranks) > 1)} {numbers(ranks)} of {test}: {why}")
            for (state, why, test), ranks in groups.items()
        )

    @property
    def spread_groups(self) -> tuple[tuple[str, tuple[Spread, ...]], ...]:
        """Return the spreads by test."""
        tests = dict.fromkeys(spread.test for spread in self.spreads)
        return tuple((test, tuple(spread for spread in self.spreads if spread.test == test)) for test in tests)

    def rank_rows(self, group: Sequence[Spread]) -> list[tuple[int, list[float | None]]]:
        """Return each rank with its value of every figure of a group."""
        tables = [{each.rank: each.value for each in spread.values} for spread in group]
        return [
            (rank, [table.get(rank) for table in tables])
            for rank in sorted({rank for table in tables for rank in table})
        ]

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
        return (
            ended - self.started if ended is not None and self.started is not None and ended >= self.started else None
        )


def as_json(report: Report, folder: str) -> dict[str, Any]:
    """Return the same content as the keys that docs/json.md promises; `folder` is where the run lies."""
    run = report.run
    return {
        "run": {"name": run.name, "folder": folder, "values": dict(run.values)},
        "nodes": list(run.nodes),
        "verdict": report.verdict.value,
        "why": report.why,
        "failure": engine.line_json(report.failure),
        "rerun": report.rerun,
        "seconds": report.seconds,
        "results": model.document(report.tests),
        "verdicts": [verdict.as_json() for verdict in report.verdicts],
        "traffic": [
            nic_json(host.host, row.state, row.text, row.traffic) for host in report.hosts for row in host.nics
        ],
        **engine.as_json(report.diagnosis),
        "facts": [structs.asdict(row) for row in report.facts],
        "history": [
            {"name": each.name, "started": each.started, "failed": each.failed, "figures": dict(each.figures)}
            for each in report.past
        ],
        "said": list(report.program_output),
        "remarks": list(report.remarks),
    }


def nic_json(host: str, state: str, text: str, nic: NicTraffic) -> dict[str, Any]:
    """Return what one NIC carried as a JSON value."""
    return {**structs.asdict(nic), "errors": dict(nic.errors), "host": host, "state": state, "text": text}


TAIL_LINES = 40
"""Lines of each log's end that a report shows."""

LONGEST_LINE = 400
"""Characters of a line that are shown."""


UNSEEN = "\N{REPLACEMENT CHARACTER}"


class NicRow(Struct, frozen=True):
    """One port of a NIC: what it carried, `state` ok, below or idle (it need not carry anything), and the verdict's
    sentence."""

    traffic: NicTraffic
    state: str
    text: str = ""


class HostRow(Struct, frozen=True):
    """One host's NICs, whether all is well, an equal share of those that carry GPU traffic, and the verdicts on
    the host itself: its NICs together, its GPUs' errors, counters that are missing."""

    host: str
    nics: tuple[NicRow, ...]
    fair: float
    state: str
    verdicts: tuple[Verdict, ...] = ()

    def nic(self, device: str) -> NicRow | None:
        """Return the NIC of a name; None where this host has none."""
        return next((row for row in self.nics if row.traffic.device == device), None)


class RankValue(Struct, frozen=True):
    """One rank's value of one figure; `state` is ok or slow."""

    rank: int
    value: float
    state: str


class Spread(Struct, frozen=True):
    """One figure of all ranks of a test."""

    test: str
    title: str
    unit: str
    values: tuple[RankValue, ...]

    @property
    def numbers(self) -> tuple[float, float, float]:
        """Return the smallest, middle and largest value."""
        values = [each.value for each in self.values]
        return min(values), median(values), max(values)


class Grid(Struct, frozen=True):
    """A sweep of one operation as a table in GB/s, not wider than high: values by row and column, None where nothing
    was measured. `fixed` is what is the same everywhere, `best` the (row, column) with most, `default` what upstream's
    default gave (None where it was not tried)."""

    title: str
    fixed: str
    row_name: str
    column_name: str
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    values: tuple[tuple[float | None, ...], ...]
    best: tuple[int, int] | None
    default: float | None = None

    @property
    def gain(self) -> float | None:
        """Return by how many percent the best is more than upstream's default gave; None where that was not tried."""
        return 100 * (self.span[1] / self.default - 1) if self.default else None

    @property
    def best_words(self) -> str:
        """Return what is best, in words: a setting that was tried, or upstream's default where none gave more."""
        if self.best is None:
            return "unknown"
        tried = (
            f"{three_digits(self.span[1])} GB/s at {self.row_name} {self.best[0]}, {self.column_name} {self.best[1]}"
        )
        if self.gain is None or self.default is None:
            return tried
        if self.gain > 0:
            return f"{tried}, {self.gain:.1f} % more than upstream's default"
        return f"upstream's default, {three_digits(self.default)} GB/s; of those tried {tried}"

    @property
    def span(self) -> tuple[float, float]:
        """Return the least and the greatest value."""
        known = [value for row in self.values for value in row if value is not None]
        return min(known, default=0.0), max(known, default=0.0)


class LogEnd(Struct, frozen=True):
    """The last lines of a log, with the number of the first one and of all; `open_`: a reader should see it at once;
    `same` are other logs that end alike."""

    name: str
    text: str
    first: int
    count: int
    open_: bool = False
    same: tuple[str, ...] = ()


def clean(text: str) -> str:
    """Return a text without escape sequences, and with a mark for every character that has no place in a line:
    controls, and those that turn the direction of writing."""
    bare = plain(text).replace("\t", "    ")
    return "".join(letter if letter.isprintable() else UNSEEN for letter in bare)


def _last_written(line: str) -> str:
    """Return what a terminal would show of a line that was written over itself, as progress is."""
    return line.rstrip("\r").rpartition("\r")[2]


def hosts_of(traffic: Iterable[NicTraffic], verdicts: Iterable[Verdict]) -> tuple[HostRow, ...]:
    """Return what the NICs of each host carried with what the verdicts say of them, hosts in their order."""
    nics: dict[str, list[NicTraffic]] = {}
    by_host: dict[str, list[Verdict]] = {}
    for nic in traffic:
        nics.setdefault(nic.host, []).append(nic)
    for verdict in verdicts:
        if verdict.kind in {NIC, ERROR}:
            by_host.setdefault(verdict.host, []).append(verdict)
    return tuple(
        _host_row(host, nics.get(host, []), by_host.get(host, [])) for host in dict.fromkeys((*nics, *by_host))
    )


def _host_row(host: str, nics: Sequence[NicTraffic], verdicts: Sequence[Verdict]) -> HostRow:
    names = {nic.device for nic in nics}
    rows = tuple(_nic_row(nic, [verdict for verdict in verdicts if verdict.subject == nic.device]) for nic in nics)
    used = sum(nic.expected for nic in nics)
    state = "below" if any(verdict.state == BELOW for verdict in verdicts) else "ok"
    return HostRow(
        host,
        rows,
        1 / used if used else 0.0,
        state,
        tuple(verdict for verdict in verdicts if verdict.subject not in names),
    )


def _nic_row(nic: NicTraffic, verdicts: Sequence[Verdict]) -> NicRow:
    bad = [verdict for verdict in verdicts if verdict.state == BELOW]
    texts = [verdict.text for verdict in (*bad, *(each for each in verdicts if each.state != BELOW))]
    return NicRow(nic, "below" if bad else "ok" if nic.expected else "idle", "; ".join(texts) or nic.problem)


def spreads(tests: Sequence[Tested]) -> tuple[Spread, ...]:
    """Return every figure that two ranks or more of a test gave, as a spread."""
    return tuple(spread for tested in tests for spread in _spreads(tested))


def _spreads(tested: Tested) -> Iterator[Spread]:
    names = dict.fromkeys(name for rank in tested.ranks for name in rank.figures)
    for name in names:
        own = [(rank, rank.figures[name]) for rank in tested.ranks if name in rank.figures]
        values = tuple(RankValue(rank.rank, value, "slow" if rank.state == "slow" else "ok") for rank, value in own)
        if len(values) > 1:
            yield Spread(tested.title, rank_title(name), unit_of(name)[0], values)


PARTS = {
    "fp8": "FP8",
    "bf16": "BF16",
    "nvl": "NVLink",
    "rdma": "RDMA",
    "gbs": "",
    "us": "time",
    "send": "send",
    "recv": "receive",
    "so": "between nodes",
    "su": "inside a node",
    "min": "least",
    "max": "most",
}
"""Words in the names of ranks' figures, and what people call them."""


def rank_title(name: str) -> str:
    """Return what people call a rank's own figure: "dispatch FP8, NVLink" for dispatch_fp8_nvl_gbs."""
    words = [PARTS.get(word, word) for word in name.removesuffix("_gbs").split("_")]
    text = " ".join(words).replace("dispatch combine", "dispatch and combine")
    return re.sub(r" (NVLink|RDMA|between nodes|inside a node|(?:(?:send|receive|least|most) )?time)$", r", \1", text)


def grids(tests: Sequence[Tested]) -> tuple[Grid, ...]:
    """Return the sweeps of all tests as tables; of two logs of one test, as of two nodes, the first counts."""
    found: dict[tuple[str, str], Grid] = {}
    for tested in tests:
        for map_ in heat_maps(tested.sweep):
            grid = _grid(map_)
            found.setdefault((f"{tested.test} {grid.title}", grid.fixed), grid)
    return tuple(found.values())


def _grid(found: HeatMap) -> Grid:
    """Return a heat map lying so that it fits on a narrow page."""
    rows, columns = (found.rows_are, tuple(found.rows)), ("NVL chunk", tuple(found.columns))
    values, best = tuple(tuple(row) for row in found.values), found.best
    if len(found.columns) > len(found.rows):
        rows, columns, values = columns, rows, tuple(zip(*values, strict=True))
        best = best and (best[1], best[0])
    grid = Grid(
        f"{title(found.operation)}, {found.fabric}", found.fixed, rows[0], columns[0], rows[1], columns[1], values, best
    )
    return replace(grid, default=found.default)


def log_ends(run: TestRun, open_logs: Collection[str]) -> tuple[LogEnd, ...]:
    """Return the ends of a run's logs; `open_logs` are those that a reader should see at once, by name. Equal ends are
    shown once, empty ones not at all."""
    texts = {
        name: [clean(_last_written(line))[:LONGEST_LINE] for line in text.rstrip().split("\n")]
        for name, text in run.logs.items()
    }
    ends = {name: "\n".join(lines[-TAIL_LINES:]) for name, lines in texts.items()}
    names: dict[str, list[str]] = {}
    for name, end in ends.items():
        names.setdefault(end, []).append(name)
    return tuple(
        LogEnd(
            first,
            scrub(end),
            max(1, len(texts[first]) - TAIL_LINES + 1),
            len(texts[first]),
            not {first, *same}.isdisjoint(open_logs),
            tuple(same),
        )
        for end, (first, *same) in names.items()
        if end.strip()
    )
