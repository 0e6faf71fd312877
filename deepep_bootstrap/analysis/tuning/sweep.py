"""Sweeps of upstream's tests: the best settings of each, merged with earlier documents, and the sweep as
heat maps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from deepep_bootstrap.analysis.results.model import OPERATIONS, Point, Tested
from deepep_bootstrap.analysis.tuning.document import Document, Key, PastSetting, TunedSetting, gpu_slug
from deepep_bootstrap.testing.run_folder import TestRun

SWEPT = ("intranode", "internode")
"""The tests that sweep. The low-latency kernels have no such settings, and V2 computes its own."""

DEFAULTS: Mapping[str, int] = {"num_topk": 8, "num_experts": 256, "num_processes": 8}
"""What upstream's V1 tests use where neither their output nor their arguments say it (their argparse defaults)."""

NVL_BUFFER_INTRANODE, NVL_BUFFER, RDMA_BUFFER = 256, 512, 128
NVL_BUFFERS: Mapping[int, int] = dict.fromkeys((24, 48, 96, 144, 160), 720)
"""Receive buffers of the sweep, in tokens, the last by number of ranks: `nvl_buffer_size` and `rdma_buffer_size` of
V1's tests/test_intranode.py and tests/test_internode.py. (The kernels divide the first by the number of nodes.)"""

SLOWER = 0.10
"""By how much an operation may take longer than before until a run counts as disturbed. Runs of one machine differ
by 1 to 2 % (eight H200, three runs), so a tenth is no noise."""

HISTORY = 12
"""How many runs a document remembers beside the one whose settings it has."""


class Made(Struct, frozen=True):
    """How a run was made, beside what its output says: the GPU (type or product name), nodes, stack, commit of
    DeepEP, name of the run, seconds since 1970 when it ended, and the words its script got."""

    gpu: str
    nodes: int
    stack: str
    deepep: str
    run: str
    measured: int
    args: Sequence[str] = field(default_factory=tuple)


class Merged(Struct, frozen=True):
    """A document after a run, and what became of that run: "new", "replaced", "slower" (kept in the history alone),
    "older"."""

    document: Document
    state: str


class HeatMap(Struct, frozen=True):
    """A sweep as a table: GB/s over `fabric` (NVLink or RDMA) in `values[row][column]`, None where nothing was
    measured. `rows` are SMs or RDMA chunks as `rows_are` says, `columns` NVL chunks; `fixed` says what is the same
    in the whole map ("24 SMs", "RDMA chunk 16" or nothing). `best` is the (row, column) with most GB/s, by their
    numbers; `default` is what upstream's default gave."""

    operation: str
    fabric: str
    rows_are: str
    rows: Sequence[int]
    columns: Sequence[int]
    values: Sequence[Sequence[float | None]]
    best: tuple[int, int] | None
    fixed: str = ""
    default: float | None = None


def made_by(run: TestRun, gpu: str) -> Made:
    """Return how `run` was made, on GPUs of the type or product name `gpu`."""
    ended = run.values.get("ended", "")
    measured = int(float(ended)) if re.fullmatch(r"\d{1,12}(\.\d*)?", ended) else 0
    values = run.values
    return Made(
        gpu, len(run.nodes) or 1, values.get("stack", ""), values.get("deepep", ""), run.name, measured, run.args
    )


def documents(tests: Sequence[Tested], made: Made) -> tuple[tuple[Document, ...], tuple[str, ...]]:
    """Return the documents of the sweeps in `tests`, and for each sweep that gives none a sentence why.

    Only whole runs count: half a sweep would call best what came first. Where several logs hold one test (every
    node's first rank prints its own figures), the first counts, as upstream itself goes by rank 0.
    """
    found: dict[str, Document] = {}
    reasons = []
    for tested in tests:
        if tested.test not in SWEPT or tested.generation != "v1":
            continue
        document = _document(tested, made)
        if isinstance(document, str):
            reasons.append(f"{tested.log or tested.test}: {document}")
        else:
            found.setdefault(document.key.file, document)
    return tuple(found.values()), tuple(reasons)


def _document(tested: Tested, made: Made) -> Document | str:
    settings = {**DEFAULTS, **_words(made.args), **tested.config}
    numbers = {name: value for name, value in settings.items() if isinstance(value, int) and value > 0}
    if not tested.ok:
        return "no settings are kept of a test that failed or did not end"
    if missing := [name for name in ("num_tokens", "hidden") if name not in numbers]:
        return f"the log does not say {' and '.join(missing)}"
    ranks = made.nodes * numbers["num_processes"]
    shape = (numbers["num_tokens"], numbers["hidden"], numbers["num_topk"], numbers["num_experts"])
    chosen = choose_settings(tested, ranks)
    if not chosen:
        return f"no number of SMs was measured for all of {', '.join(OPERATIONS)}"
    key = Key(gpu_slug(made.gpu) or "unknown", made.nodes, ranks, *shape, made.stack)
    past = PastSetting(made.run, made.measured, made.deepep, _times(chosen), used=True)
    return Document(key, tested.test, made.deepep, made.run, made.measured, chosen, tuple(tested.sweep), (past,))


def _words(args: Sequence[str]) -> dict[str, int]:
    """Return the whole numbers among the arguments of a test, by the names that its output has for them."""
    text = " ".join(args)
    return {name.replace("-", "_"): int(value) for name, value in re.findall(r"--([a-z-]+)[ =](\d{1,9})(?!\S)", text)}


def choose_settings(tested: Tested, ranks: int) -> dict[str, TunedSetting]:
    """Return the best setting of each operation, or nothing where one has none.

    All have one number of SMs, since combine reads what dispatch laid out for its channels (two SMs each): the number
    with the smallest sum of times. Upstream's own choice goes first among equals; its default setting is no candidate,
    as in upstream.
    """
    points = _candidates(tested)
    complete = []
    for sms in sorted({point.sms for point in points}):
        best = _fastest([point for point in points if point.sms == sms])
        if len(best) == len(OPERATIONS):
            complete.append(best)
    if not complete:
        return {}
    chosen = min(complete, key=lambda best: sum(point.us for point in best.values()))
    return {name: _setting(point, tested.test, ranks) for name, point in chosen.items()}


def _candidates(tested: Tested) -> list[Point]:
    """Return the settings that were measured, upstream's own choice first."""
    points = [
        Point(name, best.sms or 0, best.nvl_chunk, best.rdma_chunk, best.nvl_gbs, best.rdma_gbs, best.us or 0.0)
        for name, best in tested.best.items()
    ]
    points += _averaged(tested.sweep)
    return [each for each in points if each.operation in OPERATIONS and each.sms and each.nvl_chunk and each.us > 0]


def _fastest(points: Sequence[Point]) -> dict[str, Point]:
    """Return the fastest point of each operation that has any."""
    best = {}
    for name in OPERATIONS:
        if found := _of(points, name):
            best[name] = min(found, key=lambda point: point.us)
    return best


def _of(points: Sequence[Point], operation: str) -> list[Point]:
    return [point for point in points if point.operation == operation]


def _averaged(sweep: Sequence[Point]) -> list[Point]:
    """Return one point for each setting, with the mean of what several ranks measured of it; without defaults."""
    groups: dict[tuple[str, int, int | None, int | None], list[Point]] = {}
    for point in sweep:
        if not point.default:
            groups.setdefault((point.operation, point.sms, point.nvl_chunk, point.rdma_chunk), []).append(point)
    return [
        replace(
            group[0],
            us=math.fsum(point.us for point in group) / len(group),
            nvl_gbs=_mean([point.nvl_gbs for point in group]),
            rdma_gbs=_mean([point.rdma_gbs for point in group]),
        )
        for group in groups.values()
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _setting(point: Point, test: str, ranks: int) -> TunedSetting:
    between = test == "internode"
    return TunedSetting(
        sms=point.sms,
        nvl_chunk=point.nvl_chunk or 0,
        nvl_buffer=NVL_BUFFERS.get(ranks, NVL_BUFFER) if between else NVL_BUFFER_INTRANODE,
        rdma_chunk=point.rdma_chunk if between else None,
        rdma_buffer=RDMA_BUFFER if between else None,
        nvl_gbs=point.nvl_gbs,
        rdma_gbs=point.rdma_gbs,
        us=point.us,
    )


def _times(settings: Mapping[str, TunedSetting]) -> dict[str, float]:
    return {name: setting.us for name, setting in settings.items()}


def merge(kept: Document | None, new: Document) -> Merged:
    """Return the document of a key after the run `new`.

    The newest run counts, since settings are about the cluster as it is now. But a run in which an operation took more
    than SLOWER longer is taken for a disturbed one (a busy neighbour, a bad link) and only remembered; a second such
    run in a row proves the change and counts. So does the first run of another DeepEP, whose kernels are others.
    """
    if kept is None:
        return Merged(new, "new")
    others = [past for past in kept.history if past.run != new.run]
    slow = any(setting.us > (1 + SLOWER) * kept.settings[name].us for name, setting in new.settings.items())
    proved = any(past.measured > kept.measured and not past.used for past in others)
    if new.run == kept.run:
        state = "replaced"
    elif new.measured < kept.measured:
        state = "older"
    else:
        state = "slower" if slow and not proved and new.deepep == kept.deepep else "replaced"
    used = state == "replaced"
    past = PastSetting(new.run, new.measured, new.deepep, _times(new.settings), used)
    history = tuple(sorted([*others, past], key=lambda each: each.measured)[-HISTORY:])
    return Merged(replace(new if used else kept, history=history), state)


def heat_maps(sweep: Sequence[Point]) -> tuple[HeatMap, ...]:
    """Return the maps of a sweep: SMs by NVL chunk, one map for each operation and RDMA chunk. Where the sweep had
    one number of SMs and several RDMA chunks (as upstream's has), RDMA chunk by NVL chunk, one map for each
    operation. Points of an operation that the log does not name are left out."""
    points = [point for point in _averaged(sweep) if point.nvl_chunk is not None]
    return tuple(
        one for name in OPERATIONS if (mine := _of(points, name)) for one in _maps(name, mine, _of(sweep, name))
    )


def _maps(operation: str, points: Sequence[Point], sweep: Sequence[Point]) -> Iterator[HeatMap]:
    sms = sorted({point.sms for point in points})
    chunks = sorted({point.rdma_chunk for point in points if point.rdma_chunk is not None})
    empty = _empty_map(operation, points, sweep)
    if len(sms) == 1 and len(chunks) > 1:
        yield _filled(replace(empty, rows_are="RDMA chunk", fixed=f"{sms[0]} SMs"), _by_chunks(points, empty.fabric))
        return
    if not chunks:
        yield _filled(empty, _by_sms(points, empty.fabric))
    for chunk in chunks:
        of_chunk = [point for point in points if point.rdma_chunk == chunk]
        fixed = f"RDMA chunk {chunk}" if chunk else ""
        yield _filled(replace(empty, fixed=fixed), _by_sms(of_chunk, empty.fabric))


def _empty_map(operation: str, points: Sequence[Point], sweep: Sequence[Point]) -> HeatMap:
    """Return a map without values, of the fabric that its points were measured over."""
    over_rdma = any(point.rdma_chunk is not None for point in points)
    fabric = "RDMA" if over_rdma and any(point.rdma_gbs is not None for point in points) else "NVLink"
    default = _mean([_gbs(point, fabric) for point in sweep if point.default])
    return HeatMap(operation, fabric, "SMs", (), (), (), None, default=default)


def _by_chunks(points: Sequence[Point], fabric: str) -> dict[tuple[int, int], float | None]:
    return {(point.rdma_chunk or 0, point.nvl_chunk or 0): _gbs(point, fabric) for point in points}


def _by_sms(points: Sequence[Point], fabric: str) -> dict[tuple[int, int], float | None]:
    return {(point.sms, point.nvl_chunk or 0): _gbs(point, fabric) for point in points}


def _gbs(point: Point, fabric: str) -> float | None:
    return point.rdma_gbs if fabric == "RDMA" else point.nvl_gbs


def _filled(empty: HeatMap, cells: Mapping[tuple[int, int], float | None]) -> HeatMap:
    """Return the map with the values of `cells`, by row and column."""
    rows, columns = sorted({row for row, _ in cells}), sorted({column for _, column in cells})
    values = tuple(tuple(cells.get((row, column)) for column in columns) for row in rows)
    known = {cell: value for cell, value in cells.items() if value is not None}
    best = max(known, key=lambda cell: known[cell]) if known else None
    return replace(empty, rows=tuple(rows), columns=tuple(columns), values=values, best=best)
