"""Values collected from the lines of one log, divided into its tests; figures of its ranks summed up and
compared.

Collectors are the only values of this package that change; `analysis.results.read` makes a `model.Tested`
of all parts of a test.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from deepep_bootstrap.analysis.results.model import Best, Point, Rank, Spread
from deepep_bootstrap.analysis.results.passes import PassRun
from deepep_bootstrap.analysis.results.scanner import Token

Key = tuple[int, float, float]


@dataclass
class Sweep:
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

    def found_best(self, operation: str) -> None:
        """Say that the oldest block without an operation was this one's; a second node's word changes nothing."""
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


@dataclass
class NodeOutput:
    """What one node printed, or all nodes together where nothing tells them apart (`copies`: how many those are)."""

    configs: int = 0
    opened: int = 0
    passed: int = 0
    ep_cases: list[str] = field(default_factory=list)
    blanks: int = 0
    best: dict[str, list[Best]] = field(default_factory=dict)
    sweep: Sweep = field(default_factory=Sweep)

    @property
    def copies(self) -> int:
        """How many nodes speak: each prints its configuration before it tries anything."""
        return self.sweep.copies

    def add_config(self, *, late: bool = False) -> None:
        """Count a configuration: one more node speaks, if nothing was tried yet or it is `late`; a test without an
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


@dataclass
class LogSection:
    """One test as one log tells it. `figures` are a rank's values by name, one for each time it printed them;
    `world` is what the ranks themselves say, `nodes` what the job says; `headers` counts the nodes on which a file
    of ours began it: each of them says an exit code in the end. `turn` is its pass, of a test that has passes; it
    `goes_on` where its log has the next one, behind which the job's last word stands then."""

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
    voices: dict[str, NodeOutput] = field(default_factory=dict)
    figures: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    nodes: int = 0
    world: int = 0
    allocations: int = 0
    seeds: int = 0
    endless: bool = False
    content: bool = False
    turn: PassRun | None = None
    goes_on: bool = False
    errors: list[tuple[str, int | None]] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        """Return whether something was tried or measured."""
        return bool(self.figures) or any(voice.busy for voice in self.voices.values())

    @property
    def is_closed(self) -> bool:
        """Return whether all that began it said how it ended."""
        return bool(self.codes) and len(self.codes) >= self.headers

    @property
    def _awaits_node(self) -> bool:
        """Return whether a node that the job has did not begin yet: what it prints first may come behind what
        another one tried."""
        begun = sum(max(voice.configs, bool(voice.busy)) for voice in self.voices.values())
        return self.kind in {"intranode", "internode"} and 0 < begun < self.nodes

    def is_over(self, token: Token) -> bool:
        """Return whether a token belongs to the next test of the log."""
        kind = token.kind
        if kind == "header":
            again = bool(self.headers) and (self.header, self.module, self.script, self.args) == token.words
            return bool(self.headers or self.content) and (self.is_closed or not again)
        if kind not in CONTENT:
            return False
        if self.is_closed:
            return True
        if self.turn and not (self.turn.is_last and self.turn.is_over(max(self.nodes, 1))):
            return False
        if self._awaits_node and kind in {"config", "seed"}:
            return False
        if kind == "config":
            begins = self.kind not in {"", "intranode", "internode"} or not self.endless
        elif kind == "ep_config":
            begins = self.kind != "ep" or not self.seeds
        elif kind == "seed":
            # Seed 0 is the first of a test between nodes, but of a low-latency test the first one after its only
            # regular round.
            begins = token.words == (" ", "0") and self.kind in {"intranode", "internode"}
        else:
            begins = kind == "allocating" or kind in FOREIGN.get(self.kind, ())
        return begins and self.busy

    def take(self, token: Token) -> None:
        """Collect what a token says."""
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
            self._take_word_of_job(kind, words)
        elif kind == "allocating":
            self._take_buffer(float(words[0] or 0))
        elif kind in {"seed", "hash"}:
            self._take_round(kind, words)
        else:
            self._take_throughput(token)

    def voice(self, label: str) -> NodeOutput:
        """Return what came with a label."""
        found = self.voices.get(label)
        if found is None:
            found = self.voices[label] = NodeOutput()
        return found

    def _measured(self, rank: int, values: Iterable[tuple[str, str | None]]) -> None:
        own = self.figures.setdefault(rank, {})
        for name, value in values:
            if value is not None:
                own.setdefault(name, []).append(float(value))

    def _take_ep(self, token: Token) -> None:
        words, voice = token.words, self.voice(token.label)
        self.kind = self.kind or "ep"
        if token.kind == "ep":
            rank, world, way, plain, so, su, us, size, extra, *more = words
            operation = f"{(way or '').strip()}_{plain}".lstrip("_")
            names = (
                f"{operation}_{name}" for name in ("so_gbs", "su_gbs", "us", "bytes", f"{extra}_gbs", f"{extra}_us")
            )
            self.world = max(self.world, int(world or 0))
            self._measured(int(rank or 0), zip(names, (so, su, us, size, *more), strict=True))
            voice.blanks = 0
        elif token.kind == "ep_case":
            voice.ep_cases.append(words[0] or "")
            voice.blanks = 0
        elif token.kind == "ep_config":
            voice.add_config()
        else:
            self.config |= {name: int(value) for name, value in zip(EP_SETUP, words, strict=True) if value is not None}

    def _take_word_of_job(self, kind: str, words: tuple[str | None, ...]) -> None:
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
        if self.turn is None or not self.busy:
            self.allocations += 1
            self.config["buffer_mb"] = size

    def take_pass(self, token: Token) -> None:
        """Collect what a line of its pass says."""
        self.turn = self.turn or PassRun.before(token.words)
        self.turn.take(token.words)
        self.kind, self.content = self.kind or "low-latency", True
        if self.turn.tokens:
            self.config["num_tokens"] = self.turn.tokens

    def next_pass(self, line: int) -> LogSection:
        """Return the part of the pass after this one: of the same test, whose last word is left to it."""
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
        words, voice = token.words, self.voice(token.label)
        if token.kind == "blank":
            voice.blanks += 1
        elif token.kind == "config":
            pairs = (pair.partition("=")[::2] for pair in (words[0] or "").split(", "))
            self.config |= {name: int(value) if re.fullmatch(r"\d{1,15}", value) else value for name, value in pairs}
            self._is_between_nodes("num_topk_groups" in self.config)
            voice.add_config(late=self._awaits_node)
        elif token.kind == "case":
            voice.opened += 1
        elif token.kind == "passed":
            voice.passed = min(voice.opened, voice.passed + (words[0] or "").count("passed"))
        else:
            self._take_tuning(voice, words)

    def _take_tuning(self, voice: NodeOutput, words: tuple[str | None, ...]) -> None:
        name, sms, nvl, rdma, _, after_notify, transmit, _, rdma_gbs, nvl_gbs, alone_gbs, alone_us = words
        us = next((float(each) for each in (after_notify, transmit, alone_us) if each is not None), None)
        chunk, rdma_chunk = (int(each) if each and each != "default" else None for each in (nvl, rdma))
        nvl_rate, rdma_rate = float(nvl_gbs or alone_gbs or 0), None if rdma_gbs is None else float(rdma_gbs)
        self._is_between_nodes(rdma_rate is not None)
        if name:
            best = Best(nvl_rate, rdma_rate, us, int(sms or 0), chunk, rdma_chunk)
            voice.best.setdefault(BEST[name], []).append(best)
            voice.sweep.found_best(BEST[name])
        elif us is not None:
            voice.sweep.add(Point("", int(sms or 0), chunk, rdma_chunk, nvl_rate, rdma_rate, us, nvl == "default"))

    def _is_between_nodes(self, shown: bool) -> None:
        if shown and self.kind in {"", "intranode"}:
            self.kind = "internode"
        self.kind = self.kind or "intranode"


def parts(log: str, found: Iterable[Token]) -> list[LogSection]:
    """Return the tests of one log in its order; what stands before the first, or says nothing about any, belongs to
    the next one. Each pass of a test is a part of its own."""
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
    return [part for part in done if part.kind or part.errors or part.codes]


def _of_pass(done: list[LogSection], token: Token) -> LogSection:
    """Return the part that a line of a pass belongs to: nodes may be some lines apart. It is made where it is new."""
    number = PassRun.before(token.words).number
    last = done[-1]
    if last.turn is None:
        if last.busy or last.is_closed:
            done.append(LogSection(last.log, token.line))
        done[-1].line = token.line
        return done[-1]
    for part in reversed(done):
        if part.turn is None or part.turn.number > last.turn.number:
            break
        if part.turn.number == number and not part.is_closed and not part.turn.has_begun(token.words):
            return part
    begins = number <= last.turn.number or last.is_closed
    done.append(LogSection(last.log, token.line) if begins else last.next_pass(token.line))
    return done[-1]


def _behind(done: list[LogSection], token: Token) -> LogSection | None:
    """Return the pass before the last one where a figure is still of that one: of a rank that has not printed it
    there. Each rank prints each figure once in every run, and another node's first line of the next pass may stand
    before it."""
    if len(done) < 2 or not (done[-1].turn and done[-2].turn) or done[-2].turn.number + 1 != done[-1].turn.number:
        return None
    own = done[-2].figures.get(int(token.words[0] or 0), {})
    return done[-2] if len(own.get(LOW[token.kind][0], ())) < done[-2].turn.runs else None


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
"""Times that tell little about a rank: extremes, waiting for others, and copies of few microseconds."""


def judge(figures: Mapping[int, Mapping[str, float]], lacking: Mapping[int, str]) -> tuple[Rank, ...]:
    """Return every rank with its state. `lacking` are ranks that are not whole, and why."""
    times: dict[str, dict[int, float]] = {}
    for rank, own in figures.items():
        for name, value in own.items():
            if name.endswith("_us") and not name.endswith(NOT_OWN):
                times.setdefault(name, {})[rank] = value
    slow: dict[int, tuple[float, str]] = {}
    for name, values in times.items():
        for rank, ratio, middle in outliers(values):
            words = (
                f"{name.removesuffix('_us').replace('_', ' ')} {values[rank]:g} us, the median of all ranks is "
                f"{middle:g} us"
            )
            slow[rank] = max(slow.get(rank, (0.0, "")), (ratio, words))
    found = []
    for rank in sorted({*figures, *lacking}):
        state = "missing" if rank in lacking else "slow" if rank in slow else "ok"
        why = lacking.get(rank) or slow.get(rank, (0.0, ""))[1]
        found.append(Rank(rank, state, why, dict(figures.get(rank, {}))))
    return tuple(found)


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
