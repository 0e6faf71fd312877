"""Figures of a run of upstream's tests, the document of `invoke results`; verdicts on figures, NICs and counters: one
line each for people, and as JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct, field, structs, to_builtins

from deepep_bootstrap.core.text import round_number, three_digits

SCHEMA = 1
KINDS = ("intranode", "internode", "low-latency", "ep")
OURS = ("nccl", "pairs", "smoke")
"""Programs of our own."""

OPERATIONS = ("dispatch_fp8", "dispatch_bf16", "combine")


class Best(Struct, frozen=True):
    """The best setting of one operation: GB/s (10^9 bytes per second) over NVLink and over RDMA (None on one node),
    microseconds, and the setting; the chunks are in tokens, None where the test does not say them."""

    nvl_gbs: float | None = None
    rdma_gbs: float | None = None
    us: float | None = None
    sms: int | None = None
    nvl_chunk: int | None = None
    rdma_chunk: int | None = None


class Point(Struct, frozen=True):
    """One setting that a sweep tried: the operation (one of OPERATIONS; "" where the log ended before its end said
    which), and what came of it. A chunk of None is upstream's default where `default` is true."""

    operation: str
    sms: int
    nvl_chunk: int | None
    rdma_chunk: int | None
    nvl_gbs: float | None
    rdma_gbs: float | None
    us: float
    default: bool = False


class Spread(Struct, frozen=True):
    """Smallest, middle and largest value among the ranks."""

    min: float
    median: float
    max: float


class LowLatency(Struct, frozen=True):
    """The low-latency kernels over all ranks: GB/s of dispatch and combine together, and the median of the ranks'
    average microseconds of each (the largest rank is the one to look for in `ranks`). The last five are medians, too:
    of both together, and of the sending and the receiving half of each, as a program with a receive hook has them."""

    dispatch_combine_gbs: Spread | None = None
    dispatch_us: float | None = None
    combine_us: float | None = None
    dispatch_gbs: Spread | None = None
    combine_gbs: Spread | None = None
    dispatch_combine_us: float | None = None
    dispatch_send_us: float | None = None
    dispatch_recv_us: float | None = None
    combine_send_us: float | None = None
    combine_recv_us: float | None = None


LOW_LATENCY_PARTS = (
    "dispatch_combine_us",
    *(f"{operation}_{half}_us" for operation in ("dispatch", "combine") for half in ("send", "recv")),
)
"""Times that few references have: compared where one does, and said by `invoke results` alone elsewhere."""

LAYOUT = "layout"
"""The operation of V1's tests that moves nothing: which token goes where."""


class Operation(Struct, frozen=True):
    """One operation of V2's test over all ranks: GB/s as upstream counts them when scaling out (SO: between nodes,
    local traffic included unless it was left out) and up (SU: inside a node), microseconds, bytes of one rank.

    Of our programs: `bus_gbs` is what the links of a collective operation carry (nccl; the "bus" of nccl-tests, at
    the size that was fastest), `gpu_gbs` what one GPU sends over all pairs of nodes while it receives as much
    (pairs)."""

    so_gbs: Spread | None = None
    su_gbs: Spread | None = None
    us: Spread | None = None
    bytes: int | None = None
    bus_gbs: Spread | None = None
    gpu_gbs: Spread | None = None


class Rank(Struct, frozen=True):
    """One rank's own figures, by name (`dispatch_combine_gbs`, `dispatch_us`, …); `state` is ok, slow or missing,
    `why` says it."""

    rank: int
    state: str = "ok"
    why: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


class Pass(Struct, frozen=True):
    """One pass of a test that runs with several numbers of tokens: its number, tokens of each rank, how many runs it
    has and how many of those ended well, and the combine calls of these whose result the test compared, over all
    ranks."""

    number: int
    tokens: int
    runs: int
    passed_runs: int
    checked_calls: int


class Tested(Struct, frozen=True):
    """One test found in the logs. `ended`: it reached its end as far as its output can say. `log` is where it was
    found and `line` the number of its first line there. `ok` only if it ended, no case failed and no rank is
    missing. `test_pass` is the pass that it is, None for a test without passes."""

    test: str
    generation: str
    ok: bool
    ended: bool
    passed: int = 0
    failed: int = 0
    config: Mapping[str, int | float | str] = field(default_factory=dict)
    best: Mapping[str, Best] = field(default_factory=dict)
    low_latency: LowLatency | None = None
    operations: Mapping[str, Operation] = field(default_factory=dict)
    ranks: Sequence[Rank] = ()
    sweep: Sequence[Point] = ()
    errors: Sequence[str] = ()
    log: str = ""
    line: int = 1
    test_pass: Pass | None = None

    @property
    def is_later_pass(self) -> bool:
        """Return whether it is a pass after the first: its figures are shown, and compared with nothing."""
        return self.test_pass is not None and self.test_pass.number > 1

    @property
    def title(self) -> str:
        """Return what people call it: the test, of a later pass with its number of tokens."""
        return f"{self.test}, {self.test_pass.tokens} tokens" if self.test_pass and self.is_later_pass else self.test


def as_json(tested: Tested) -> dict[str, Any]:
    """Return one test as a JSON value with the keys that docs/json.md promises."""
    return {
        "test": tested.test,
        "generation": tested.generation,
        "ok": tested.ok,
        "ended": tested.ended,
        "cases": {"passed": tested.passed, "failed": tested.failed},
        "config": dict(tested.config),
        "best": {name: to_builtins(best) for name, best in tested.best.items()},
        "low_latency": None if tested.low_latency is None else to_builtins(tested.low_latency),
        "operations": {name: to_builtins(operation) for name, operation in tested.operations.items()},
        "ranks": [to_builtins(rank) for rank in tested.ranks],
        "sweep": [to_builtins(point) for point in tested.sweep],
        "errors": list(tested.errors),
        "log": tested.log,
        "line": tested.line,
        "pass": None if tested.test_pass is None else to_builtins(tested.test_pass),
    }


def document(tests: Sequence[Tested]) -> dict[str, Any]:
    """Return the whole document but for its frame: the first high-throughput test at the top (else the first of
    all), with `low_latency` of whichever test has it, and every test in `tests`. `ok` only if there is a test and
    all are ok."""
    if not tests:
        return {"test": None, "ok": False, "tests": []}
    top = next((tested for tested in tests if tested.test != "low-latency"), tests[0])
    found = as_json(top)
    low = next((tested.low_latency for tested in tests if tested.low_latency is not None), None)
    found["low_latency"] = None if low is None else to_builtins(low)
    found["ok"] = all(tested.ok for tested in tests)
    return {**found, "tests": [as_json(tested) for tested in tests]}


OK, BELOW, ABOVE, NONE, NOTE = "ok", "below", "above", "none", "note"
STATES = (BELOW, ABOVE, NOTE, NONE, OK)
"""In the order in which they deserve a look. Only `below` says no; `none`: there was nothing to compare with, or it
could not be read."""

FIGURE, NIC, ERROR = "figure", "nic", "error"


ALIKE = 1.005
"""Two times that differ by less than this factor are the same to a person."""


def percent_text(percent: float) -> str:
    """Return a share in percent for people: whole ones from ten on."""
    return f"{percent:.0f}" if percent >= 10 or percent == 0 else f"{percent:.2g}"


class Verdict(Struct, frozen=True):
    """The judgement on one thing.

    - `kind` is figure, nic or error; `subject` the figure's path in the document of `invoke results`
      ("best.dispatch_fp8.nvl_gbs"), or the NIC ("mlx5_3/1") or GPU ("gpu 4") of `host`; `test` and `log` say where a
      figure is from.
    - `value` in `unit`; `wanted` is the reference's value, `low` and `high` what counts as ok around it, `percent` the
      performance in percent of the reference (for times too: twice as slow is 50), `source` where the reference is
      from.
    - `limit` is what the hardware can move at most, in `unit`, `of_limit` the value in percent of it; `impossible`:
      more than can be.
    - `text` is the verdict in one sentence, `means` what a figure like this usually comes from, the likeliest first.
    """

    kind: str
    subject: str
    state: str
    text: str
    title: str = ""
    host: str = ""
    test: str = ""
    log: str = ""
    value: float | None = None
    unit: str = ""
    wanted: float | None = None
    low: float | None = None
    high: float | None = None
    percent: float | None = None
    source: str = ""
    limit: float | None = None
    of_limit: float | None = None
    impossible: bool = False
    means: tuple[str, ...] = ()

    @property
    def is_time(self) -> bool:
        """Return whether it is on a time, of which less is better."""
        return self.unit == "us"

    @property
    def performance(self) -> str:
        """Return how fast it is beside its reference: a rate in percent of it, a time by how many times slower or
        faster; "" without a reference."""
        if self.percent is None or self.value is None or self.wanted is None:
            return ""
        if not self.is_time:
            return f"{percent_text(self.percent)} %"
        slower, faster = self.value / self.wanted, self.wanted / self.value
        if max(slower, faster) < ALIKE:
            return "as fast"
        return f"{three_digits(slower)} × slower" if slower > 1 else f"{three_digits(faster)} × faster"

    @property
    def beside(self) -> str:
        """Return the same with the reference: `74 % of 70.5 GB/s`, `14.5 × slower than 1637 us`; "" without one."""
        if not self.performance or self.wanted is None:
            return ""
        word = "of"
        if self.is_time:
            word = "as" if self.performance == "as fast" else "than"
        return f"{self.performance} {word} {round_number(self.wanted)} {self.unit}"

    @property
    def allowed(self) -> str:
        """Return the end of the range from which on it is below its reference: `from 67.0`, for times `up to 1818`."""
        end = self.high if self.is_time else self.low
        return "" if end is None else f"{'up to' if self.is_time else 'from'} {round_number(end)}"

    def as_json(self) -> dict[str, Any]:
        """Return the verdict as a JSON value with the keys that docs/json.md promises."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in structs.asdict(self).items()
        }

    def lines(self) -> tuple[str, ...]:
        """Return the verdict for people: one line, and one more for each thing it usually means."""
        where = f"{self.host}: " if self.host else f"{self.test} " if self.test else ""
        return f"{self.state:<5}  {where}{self.text}", *(f"       {meaning}" for meaning in self.means)


def worst_first(verdicts: Iterable[Verdict]) -> tuple[Verdict, ...]:
    """Return the verdicts in the order of STATES, and as they came within each."""
    return tuple(sorted(verdicts, key=lambda verdict: STATES.index(verdict.state)))
