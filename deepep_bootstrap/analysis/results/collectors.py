"""Values collected from the lines of one log, divided into its tests; figures of its ranks summed up and
compared.

Collectors are the only values of this package that change; `analysis.results.read` makes a `model.Tested`
of all sections of a test.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping

from msgspec import Struct, field

from deepep_bootstrap.analysis.results.model import Best, Point, Rank, Spread
from deepep_bootstrap.analysis.results.scanner import Token

Key = tuple[int, float, float]
Words = tuple[str | None, ...]


class Sweep(Struct):
    """The settings that a test tried, in blocks: one for each operation, since a test tries them in rising order.

    Where nodes print into one log without labels each setting comes `copies` times; the first counts.
    """

    copies: int = 1
    blocks: list[dict[Key, list[Point]]] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)
    filling: bool = False

    def add(self, point: Point) -> None:
        """Put a point into the block that is being filled, or into a new one where its setting says that one began."""
        key = (point.sms, _chunk(point.nvl_chunk), _chunk(point.rdma_chunk))
        last = self.blocks[-1] if self.blocks else {}
        seen = len(last.get(key, ()))
        if not self.filling and 0 < seen < self.copies:
            return  # another node's last point, behind the first node's best
        if not self.filling or seen >= self.copies or (not seen and key < max(last)):
            self.blocks.append({})
            self.filling = True
        self.blocks[-1].setdefault(key, []).append(point)

    def close_block(self, operation: str) -> None:
        """Close the oldest open block as this operation's; a second node's best line changes nothing."""
        if operation not in self.operations and len(self.operations) < len(self.blocks):
            self.operations.append(operation)
            self.filling = False

    def points(self) -> Iterator[Point]:
        """Yield every setting once, with its operation where a best line said it."""
        for index, block in enumerate(self.blocks):
            operation = self.operations[index] if index < len(self.operations) else ""
            for one, *_ in block.values():
                yield Point(
                    operation, one.sms, one.nvl_chunk, one.rdma_chunk, one.nvl_gbs, one.rdma_gbs, one.us, one.default
                )


def _chunk(chunk: int | None) -> float:
    return float("inf") if chunk is None else chunk


class NodeOutput(Struct):
    """The output of one node, or of all nodes together where nothing tells them apart (`copies`: their number)."""

    configs: int = 0
    opened: int = 0
    passed: int = 0
    ep_cases: list[str] = field(default_factory=list)
    blanks: int = 0
    best: dict[str, list[Best]] = field(default_factory=dict)
    sweep: Sweep = field(default_factory=Sweep)

    @property
    def copies(self) -> int:
        """The number of nodes that print: each prints its configuration before it tries anything."""
        return self.sweep.copies

    def add_config(self, *, late: bool = False) -> None:
        """Count a configuration: one more node prints, if nothing was tried yet or it is `late`; a test without an
        end says it again."""
        self.configs += 1
        if late or not self.busy:
            self.sweep.copies = self.configs

    @property
    def busy(self) -> bool:
        """Return whether the test is under way: something was tried."""
        return bool(self.opened or self.ep_cases or self.best or self.sweep.blocks)


SCRIPTS = {
    "test_intranode.py": "intranode",
    "test_internode.py": "internode",
    "test_low_latency.py": "low-latency",
    "test_ep.py": "ep",
}
BEST = {"dispatch (FP8)": "dispatch_fp8", "dispatch (BF16)": "dispatch_bf16", "combine": "combine"}
LOW = {
    "both": ("dispatch_combine_gbs", "dispatch_combine_us", "dispatch_combine_min_us", "dispatch_combine_max_us"),
    "each": ("dispatch_gbs", "dispatch_us", "combine_gbs", "combine_us"),
    "halves": ("dispatch_send_us", "dispatch_recv_us", "combine_send_us", "combine_recv_us"),
}
"""Names of a rank's figures in the order of upstream's line."""

EP_SETUP = (
    *("scaleout_ranks", "scaleup_ranks", "num_topk", "num_experts", "num_tokens", "num_max_tokens", "hidden"),
    *("num_sms", "num_qps", "num_allocated_qps"),
)
CONTENT = frozenset(("config", "case", "tuning", "seed", "allocating", "ep_config", "ep_case", "ep", *LOW))
"""Tokens that a test itself prints; the others say something about one."""

FOREIGN = {
    "low-latency": ("case", "tuning", "ep", "ep_case"),
    "ep": ("tuning", *LOW),
    "intranode": ("ep", "ep_case"),
    "internode": ("ep", "ep_case"),
}
"""What a test of one kind never prints. Low latency lines may end a test between nodes that tries both."""


US_OF_MS = 1000.0
RUNS_MAX = 100_000
"""More runs than this are a misread number."""


class PassRun(Struct):
    """One pass of a test that runs more than once, as one log has it: its number, of how many, tokens of each rank, how
    many runs it has, combine calls that one run compares over all ranks; which runs began and how they ended, by node
    and number. programs/passes.py marks it in the logs:

        deepep: pass 2 of 2 on node 0: 256 tokens, run 1 of 8, 64 combine calls to check
        deepep: pass 2 of 2 on node 0: run 1 of 8 ended with exit code 0

    A pass is one number of tokens; its runs are starts of the same test. Each node marks its own, and each rank the
    begin of a run in its file."""

    number: int
    of: int
    tokens: int = 0
    runs: int = 1
    calls: int = 0
    begun: set[tuple[int, int]] = field(default_factory=set)
    ended: dict[tuple[int, int], int] = field(default_factory=dict)

    @classmethod
    def before(cls, words: Words) -> PassRun:
        """Return an empty pass with the numbers in the words of one of its lines."""
        number, of = (min(int(word or 0), RUNS_MAX) for word in words[:2])
        return cls(number, of)

    def take(self, words: Words) -> None:
        """Collect the begin or the end of a run from the words of a line."""
        _, _, node, tokens, run, runs, calls, ended, _, code = (None if word is None else int(word) for word in words)
        if tokens is None:
            self.ended[node or 0, ended or 0] = code or 0
            return
        self.begun.add((node or 0, run or 0))
        self.tokens, self.runs, self.calls = tokens, min(runs or 1, RUNS_MAX), calls or 0

    def has_begun(self, words: Words) -> bool:
        """Return whether a line marks the begin of a run that began before: another start of the whole test."""
        return words[3] is not None and (int(words[2] or 0), int(words[4] or 0)) in self.begun

    @property
    def passed(self) -> int:
        """Return how many runs ended well, on the node that has fewest."""
        nodes = {node for node, _ in (*self.begun, *self.ended)}
        return min(
            (sum(code == 0 for (own, _), code in self.ended.items() if own == node) for node in nodes), default=0
        )

    @property
    def is_last(self) -> bool:
        """Return whether no further pass follows."""
        return self.number >= self.of

    def is_over(self, nodes: int) -> bool:
        """Return whether all runs ended well on so many nodes."""
        return len({node for node, _ in self.ended}) >= nodes and self.passed >= self.runs


def join_runs(runs: Iterable[PassRun | None]) -> PassRun | None:
    """Return one pass as several logs have it together; None where none has it."""
    found: PassRun | None = None
    for run in filter(None, runs):
        found = found or PassRun(run.number, run.of)
        if run.tokens:
            found.tokens, found.runs, found.calls = run.tokens, run.runs, run.calls
        found.begun |= run.begun
        found.ended |= run.ended
    return found


class LogSection(Struct):
    """One test in one log. `figures` are a rank's values by name, one for each time it printed them;
    `world` is the number of ranks by the ranks' own lines, `nodes` that of nodes by the job's; `headers` counts the
    nodes on which a file of ours began it: each of them says an exit code in the end. `pass_run` is its
    pass, of a test that has passes; it `goes_on` where its log has the next one, behind which the job's last line
    stands then. `layouts` are the times of the layout kernel in microseconds, one for each node that printed it."""

    log: str
    line: int
    kind: str = ""
    header: str = ""
    module: str = ""
    script: str = ""
    args: str = ""
    headers: int = 0
    codes: list[int] = field(default_factory=list)
    config: dict[str, int | float | str] = field(default_factory=dict)
    outputs: dict[str, NodeOutput] = field(default_factory=dict)
    figures: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    nodes: int = 0
    world: int = 0
    allocations: int = 0
    seeds: int = 0
    endless: bool = False
    content: bool = False
    pass_run: PassRun | None = None
    goes_on: bool = False
    errors: list[tuple[str, int | None]] = field(default_factory=list)
    layouts: list[float] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        """Return whether something was tried or measured."""
        return bool(self.figures) or any(output.busy for output in self.outputs.values())

    @property
    def is_closed(self) -> bool:
        """Return whether all that began it said how it ended."""
        return bool(self.codes) and len(self.codes) >= self.headers

    @property
    def _awaits_node(self) -> bool:
        """Return whether a node that the job has did not begin yet: what it prints first may come behind what
        another one tried."""
        begun = sum(max(output.configs, bool(output.busy)) for output in self.outputs.values())
        return self.kind in {"intranode", "internode"} and 0 < begun < self.nodes

    def is_over(self, token: Token) -> bool:
        """Return whether a token belongs to the next test of the log."""
        kind = token.kind
        if kind == "header":
            return self._is_over_at_header(token)
        if kind not in CONTENT:
            return False
        if self.is_closed:
            return True
        runs_on = self.pass_run is not None and not self._is_last_pass_over(self.pass_run)
        if runs_on or (self._awaits_node and kind in {"config", "seed"}):
            return False
        return self.busy and self._is_begin_of_other(token)

    def _is_over_at_header(self, token: Token) -> bool:
        is_same = bool(self.headers) and (self.header, self.module, self.script, self.args) == token.words
        return bool(self.headers or self.content) and (self.is_closed or not is_same)

    def _is_last_pass_over(self, pass_run: PassRun) -> bool:
        return pass_run.is_last and pass_run.is_over(max(self.nodes, 1))

    def _is_begin_of_other(self, token: Token) -> bool:
        """Return whether a token can only be the begin of another test than this one, which is under way."""
        kind = token.kind
        if kind == "config":
            return self.kind not in {"", "intranode", "internode"} or not self.endless
        if kind == "ep_config":
            return self.kind != "ep" or not self.seeds
        if kind == "seed":
            # Seed 0 is the first of a test between nodes, but of a low-latency test the first one after its only
            # regular round.
            return token.words == (" ", "0") and self.kind in {"intranode", "internode"}
        return kind == "allocating" or kind in FOREIGN.get(self.kind, ())

    def take(self, token: Token) -> None:
        """Collect a token."""
        kind, words = token.kind, token.words
        if kind in CONTENT and not self.content:
            self.content, self.line = True, token.line
        if kind in LOW:
            self.kind = self.kind or "low-latency"
            self._measured(int(words[0] or 0), zip(LOW[kind], words[1:], strict=True))
        elif kind in {"ep", "ep_case", "ep_config", "ep_setup"}:
            self._take_ep(token)
        elif kind == "error":
            self.errors.append((words[0] or "", None if words[1] is None else int(words[1])))
        elif kind in {"header", "job", "exit"}:
            self._take_job_line(kind, words)
        elif kind == "allocating":
            self._take_buffer(float(words[0] or 0))
        elif kind in {"seed", "hash"}:
            self._take_round(kind, words)
        else:
            self._take_throughput(token)

    def output(self, label: str) -> NodeOutput:
        """Return the output with a label."""
        found = self.outputs.get(label)
        if found is None:
            found = self.outputs[label] = NodeOutput()
        return found

    def _measured(self, rank: int, values: Iterable[tuple[str, str | None]]) -> None:
        own = self.figures.setdefault(rank, {})
        for name, value in values:
            if value is not None:
                own.setdefault(name, []).append(float(value))

    def _take_ep(self, token: Token) -> None:
        words, output = token.words, self.output(token.label)
        self.kind = self.kind or "ep"
        if token.kind == "ep":
            rank, world, way, plain, so, su, us, size, extra, *more = words
            operation = f"{(way or '').strip()}_{plain}".lstrip("_")
            names = (
                f"{operation}_{name}" for name in ("so_gbs", "su_gbs", "us", "bytes", f"{extra}_gbs", f"{extra}_us")
            )
            self.world = max(self.world, int(world or 0))
            self._measured(int(rank or 0), zip(names, (so, su, us, size, *more), strict=True))
            output.blanks = 0
        elif token.kind == "ep_case":
            output.ep_cases.append(words[0] or "")
            output.blanks = 0
        elif token.kind == "ep_config":
            output.add_config()
        else:
            self.config |= {name: int(value) for name, value in zip(EP_SETUP, words, strict=True) if value is not None}

    def _take_job_line(self, kind: str, words: tuple[str | None, ...]) -> None:
        if kind == "header":
            self.header, self.module, self.script, self.args = (word or "" for word in words)
            self.kind = SCRIPTS.get(self.script.rpartition("/")[2], "other")
            self.headers += 1
            self.endless = self.header == "pressure" or "pressure-test" in self.args
        elif kind == "job":
            self.nodes = max(self.nodes, int(words[0] or words[1] or 0))
        else:
            self.codes.append(int(words[1] or 0))

    def _take_buffer(self, size: float) -> None:
        """Collect that a node has its buffer; those of later runs of a pass, and of a node that is ahead, come
        behind figures."""
        self.kind = self.kind or "low-latency"
        if self.pass_run is None or not self.busy:
            self.allocations += 1
            self.config["buffer_mb"] = size

    def take_pass(self, token: Token) -> None:
        """Collect a line of its pass."""
        self.pass_run = self.pass_run or PassRun.before(token.words)
        self.pass_run.take(token.words)
        self.kind, self.content = self.kind or "low-latency", True
        if self.pass_run.tokens:
            self.config["num_tokens"] = self.pass_run.tokens

    def next_pass(self, line: int) -> LogSection:
        """Return the section of the pass after this one: of the same test, whose last line is left to it."""
        found = LogSection(
            self.log, line, self.kind, self.header, self.module, self.script, self.args, self.headers, nodes=self.nodes
        )
        self.headers, self.goes_on = 0, True
        return found

    def _take_round(self, kind: str, words: tuple[str | None, ...]) -> None:
        if kind == "hash" or words != (" ", "0"):
            self.endless = True
        self.seeds += kind == "seed"
        if words[:1] == (" ",) and not self.busy:
            self.kind = self.kind or "internode"

    def _take_throughput(self, token: Token) -> None:
        words, output = token.words, self.output(token.label)
        if token.kind == "blank":
            output.blanks += 1
        elif token.kind == "config":
            pairs = (pair.partition("=")[::2] for pair in (words[0] or "").split(", "))
            self.config |= {name: int(value) if re.fullmatch(r"\d{1,15}", value) else value for name, value in pairs}
            self._is_between_nodes("num_topk_groups" in self.config)
            output.add_config(late=self._awaits_node)
        elif token.kind == "layout":
            self.layouts.append(round(float(words[0] or 0) * US_OF_MS, 3))
        elif token.kind == "case":
            output.opened += 1
        elif token.kind == "passed":
            output.passed = min(output.opened, output.passed + (words[0] or "").count("passed"))
        else:
            self._take_tuning(output, words)

    def _take_tuning(self, output: NodeOutput, words: tuple[str | None, ...]) -> None:
        name, sms, nvl, rdma, _, after_notify, transmit, _, rdma_gbs, nvl_gbs, alone_gbs, alone_us = words
        us = next((float(each) for each in (after_notify, transmit, alone_us) if each is not None), None)
        chunk, rdma_chunk = (int(each) if each and each != "default" else None for each in (nvl, rdma))
        nvl_rate, rdma_rate = float(nvl_gbs or alone_gbs or 0), None if rdma_gbs is None else float(rdma_gbs)
        self._is_between_nodes(rdma_rate is not None)
        if name:
            best = Best(nvl_rate, rdma_rate, us, int(sms or 0), chunk, rdma_chunk)
            output.best.setdefault(BEST[name], []).append(best)
            output.sweep.close_block(BEST[name])
        elif us is not None:
            output.sweep.add(Point("", int(sms or 0), chunk, rdma_chunk, nvl_rate, rdma_rate, us, nvl == "default"))

    def _is_between_nodes(self, shown: bool) -> None:
        if shown and self.kind in {"", "intranode"}:
            self.kind = "internode"
        self.kind = self.kind or "intranode"


def sections(log: str, found: Iterable[Token]) -> list[LogSection]:
    """Return the tests of one log in its order; what stands before the first, or says nothing about any, belongs to
    the next one. Each pass of a test is a section of its own."""
    done = [LogSection(log, 1)]
    for token in found:
        if token.kind == "pass":
            _of_pass(done, token).take_pass(token)
            continue
        if token.kind in LOW and (behind := _behind(done, token)):
            behind.take(token)
            continue
        if done[-1].is_over(token):
            done.append(LogSection(log, token.line))
            if token.kind == "config" and done[-2].kind == "low-latency" and done[-2].seeds:
                # The seed that stood between the two belongs to the test that begins here.
                done[-1].seeds, done[-2].seeds, done[-1].kind = done[-2].seeds, 0, "internode"
        done[-1].take(token)
    return [section for section in done if section.kind or section.errors or section.codes]


def _of_pass(done: list[LogSection], token: Token) -> LogSection:
    """Return the section that a line of a pass belongs to, a new one where there is none: nodes may be some
    lines apart."""
    number = PassRun.before(token.words).number
    last = done[-1]
    if last.pass_run is None:
        if last.busy or last.is_closed:
            done.append(LogSection(last.log, token.line))
        done[-1].line = token.line
        return done[-1]
    for section in reversed(done):
        own = section.pass_run
        if own is None or own.number > last.pass_run.number:
            break
        if own.number == number and not section.is_closed and not own.has_begun(token.words):
            return section
    begins = number <= last.pass_run.number or last.is_closed
    done.append(LogSection(last.log, token.line) if begins else last.next_pass(token.line))
    return done[-1]


def _behind(done: list[LogSection], token: Token) -> LogSection | None:
    """Return the pass before the last one where a figure is still of that one: of a rank that has not printed it
    there. Each rank prints each figure once in every run, and another node's first line of the next pass may stand
    before it."""
    if (
        len(done) < 2
        or not (done[-1].pass_run and done[-2].pass_run)
        or done[-2].pass_run.number + 1 != done[-1].pass_run.number
    ):
        return None
    own = done[-2].figures.get(int(token.words[0] or 0), {})
    return done[-2] if len(own.get(LOW[token.kind][0], ())) < done[-2].pass_run.runs else None


SLOW_RATIO = 1.25
"""A rank is slow from this multiple of all ranks' median time. Healthy ranks of one node stay within 1.15 of it
(NVLink, H200)."""

SLOW_DEVIATIONS = 5.0
"""… and from so many median absolute deviations above it, so that nobody is called slow where all ranks differ
widely. The median and this deviation hold where up to half of the ranks are odd, which mean and standard deviation
do not."""

FEWEST = 4
"""Among fewer ranks there is no middle that means anything."""

NOT_OWN = ("_min_us", "_max_us", "_recv_us", "_copy_us", "_reduce_us")
"""Times that say little about a rank: extremes, waiting for others, and copies of few microseconds."""


def judge(figures: Mapping[int, Mapping[str, float]], lacking: Mapping[int, str]) -> tuple[Rank, ...]:
    """Return every rank with its state. `lacking` are ranks that are not whole, and why."""
    slow = _slow_ranks(figures)
    found = []
    for rank in sorted({*figures, *lacking}):
        state, why = "ok", ""
        if rank in lacking:
            state, why = "missing", lacking[rank] or slow.get(rank, "")
        elif rank in slow:
            state, why = "slow", slow[rank]
        found.append(Rank(rank, state, why, dict(figures.get(rank, {}))))
    return tuple(found)


def _slow_ranks(figures: Mapping[int, Mapping[str, float]]) -> dict[int, str]:
    """Return the slow ranks, each with the time that is furthest above the median of all, in words."""
    slow: dict[int, tuple[float, str]] = {}
    for name, values in _own_times(figures).items():
        title = name.removesuffix("_us").replace("_", " ")
        for rank, ratio, middle in outliers(values):
            words = f"{title} {values[rank]:g} us, the median of all ranks is {middle:g} us"
            slow[rank] = max(slow.get(rank, (0.0, "")), (ratio, words))
    return {rank: words for rank, (_, words) in slow.items()}


def _own_times(figures: Mapping[int, Mapping[str, float]]) -> dict[str, dict[int, float]]:
    """Return the times that say something about a rank by name, each by rank."""
    times: dict[str, dict[int, float]] = {}
    for rank, own in figures.items():
        for name, value in own.items():
            if name.endswith("_us") and not name.endswith(NOT_OWN):
                times.setdefault(name, {})[rank] = value
    return times


def outliers(values: Mapping[int, float]) -> Iterable[tuple[int, float, float]]:
    """Yield ranks whose time is far above the median of all, with its multiple of it, and the median."""
    if len(values) < FEWEST:
        return
    middle = statistics.median(values.values())
    deviation = statistics.median(abs(value - middle) for value in values.values())
    for rank, value in values.items():
        if middle and value > SLOW_RATIO * middle and value - middle > SLOW_DEVIATIONS * deviation:
            yield rank, value / middle, tidy(middle)


def spread(figures: Mapping[int, Mapping[str, float]], name: str) -> Spread | None:
    """Return smallest, middle and largest of one figure, None where no rank has it."""
    values = [own[name] for own in figures.values() if name in own]
    return Spread(min(values), tidy(statistics.median(values)), max(values)) if values else None


def median_of(figures: Mapping[int, Mapping[str, float]], name: str) -> float | None:
    """Return the middle value of one figure over the ranks, None where no rank has it."""
    found = spread(figures, name)
    return None if found is None else found.median


def middle(values: Iterable[float]) -> float:
    """Return the middle value."""
    return tidy(statistics.median(values))


def tidy(value: float) -> float:
    """Return a mean of two printed numbers without the noise of binary fractions; nobody prints more than six
    places."""
    return round(value, 6)


def numbers(ranks: Collection[int]) -> str:
    """Return rank numbers as people write them: 0-3, 7."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
