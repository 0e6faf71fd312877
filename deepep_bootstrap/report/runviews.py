"""Parts of a run's report as rows and cells: traffic of hosts, spread of ranks, grids of a sweep, ends of logs. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from deepep_bootstrap.analysis.compare import title
from deepep_bootstrap.analysis.reference_file import unit_of
from deepep_bootstrap.analysis.results.model import Tested
from deepep_bootstrap.analysis.traffic import NicTraffic
from deepep_bootstrap.analysis.tuning.sweep import HeatMap, heat_maps
from deepep_bootstrap.analysis.verdict import BELOW, ERROR, NIC, Verdict
from deepep_bootstrap.core.errors import plain
from deepep_bootstrap.core.redact import scrub
from deepep_bootstrap.testing.run_folder import TestRun

TAIL_LINES = 40
"""Lines of each log's end that a report shows."""

LONGEST_LINE = 400
"""Characters of a line that are shown."""


UNSEEN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class NicRow:
    """One port of a NIC: what it carried, `state` ok, below or idle (it need not carry anything), and the verdict's sentence."""

    traffic: NicTraffic
    state: str
    text: str = ""


@dataclass(frozen=True)
class HostRow:
    """One host's NICs, whether all is well, an equal share of those that carry GPU traffic, and what else is said of the host: its NICs
    together, its GPUs' errors, counters that are missing."""

    host: str
    nics: tuple[NicRow, ...]
    fair: float
    state: str
    said: tuple[Verdict, ...] = ()

    def nic(self, device: str) -> NicRow | None:
        """Return the NIC of a name; None where this host has none."""
        return next((row for row in self.nics if row.traffic.device == device), None)


@dataclass(frozen=True)
class RankValue:
    """One rank's value of one figure; `state` is ok or slow."""

    rank: int
    value: float
    state: str


@dataclass(frozen=True)
class Spread:
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


@dataclass(frozen=True)
class Grid:
    """A sweep of one operation as a table in GB/s, not wider than high: values by row and column, None where nothing was measured.
    `fixed` is what is the same everywhere, `best` the (row, column) with most, `gain` by how many percent that is more than upstream's
    default gave (None where the default was not tried)."""

    title: str
    fixed: str
    row_name: str
    column_name: str
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    values: tuple[tuple[float | None, ...], ...]
    best: tuple[int, int] | None
    gain: float | None = None

    @property
    def span(self) -> tuple[float, float]:
        """Return the least and the greatest value."""
        known = [value for row in self.values for value in row if value is not None]
        return min(known, default=0.0), max(known, default=0.0)


@dataclass(frozen=True)
class Tail:
    """The last lines of a log, with the number of the first one and of all; `open_`: a reader should see it at once; `same` are other
    logs that end alike."""

    name: str
    text: str
    first: int
    count: int
    open_: bool = False
    same: tuple[str, ...] = ()


def clean(text: str) -> str:
    """Return a text without escape sequences, and with a mark for every character that has no place in a line: controls, and those
    that turn the direction of writing."""
    bare = plain(text).replace("\t", "    ")
    return "".join(letter if letter.isprintable() else UNSEEN for letter in bare)


def _last_written(line: str) -> str:
    """Return what a terminal would show of a line that was written over itself, as progress is."""
    return line.rstrip("\r").rpartition("\r")[2]


def hosts_of(traffic: Iterable[NicTraffic], verdicts: Iterable[Verdict]) -> tuple[HostRow, ...]:
    """Return what the NICs of each host carried with what the verdicts say of them, hosts in their order."""
    nics: dict[str, list[NicTraffic]] = {}
    said: dict[str, list[Verdict]] = {}
    for nic in traffic:
        nics.setdefault(nic.host, []).append(nic)
    for verdict in verdicts:
        if verdict.kind in {NIC, ERROR}:
            said.setdefault(verdict.host, []).append(verdict)
    return tuple(_host_row(host, nics.get(host, []), said.get(host, [])) for host in dict.fromkeys((*nics, *said)))


def _host_row(host: str, nics: Sequence[NicTraffic], said: Sequence[Verdict]) -> HostRow:
    names = {nic.device for nic in nics}
    rows = tuple(_nic_row(nic, [verdict for verdict in said if verdict.subject == nic.device]) for nic in nics)
    used = sum(nic.expected for nic in nics)
    state = "below" if any(verdict.state == BELOW for verdict in said) else "ok"
    return HostRow(host, rows, 1 / used if used else 0.0, state, tuple(verdict for verdict in said if verdict.subject not in names))


def _nic_row(nic: NicTraffic, said: Sequence[Verdict]) -> NicRow:
    bad = [verdict for verdict in said if verdict.state == BELOW]
    told = [verdict.text for verdict in (*bad, *(each for each in said if each.state != BELOW))]
    return NicRow(nic, "below" if bad else "ok" if nic.expected else "idle", "; ".join(told) or nic.problem)


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


PARTS = {"fp8": "FP8", "bf16": "BF16", "nvl": "NVLink", "rdma": "RDMA", "gbs": "", "us": "time", "send": "send", "recv": "receive",
         "so": "between nodes", "su": "inside a node", "min": "least", "max": "most"}  # fmt: skip
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
    grid = Grid(f"{title(found.operation)}, {found.fabric}", found.fixed, rows[0], columns[0], rows[1], columns[1], values, best)
    return replace(grid, gain=100 * (grid.span[1] / found.default - 1)) if found.default else grid


def tails(run: TestRun, telling: Collection[str]) -> tuple[Tail, ...]:
    """Return the ends of a run's logs; `telling` are those that a reader should see at once, by name. Equal ends are shown once, empty
    ones not at all."""
    texts = {name: [clean(_last_written(line))[:LONGEST_LINE] for line in text.rstrip().split("\n")] for name, text in run.logs.items()}
    ends = {name: "\n".join(lines[-TAIL_LINES:]) for name, lines in texts.items()}
    names: dict[str, list[str]] = {}
    for name, end in ends.items():
        names.setdefault(end, []).append(name)
    return tuple(
        Tail(
            first,
            scrub(end),
            max(1, len(texts[first]) - TAIL_LINES + 1),
            len(texts[first]),
            not {first, *same}.isdisjoint(telling),
            tuple(same),
        )
        for end, (first, *same) in names.items()
        if end.strip()
    )
