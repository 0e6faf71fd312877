"""What one log says about one test: what was collected from its lines, and where in a log one test ends and the next begins. Pure.

These are collectors, the only values of this room that change; `results` makes a `figures.Tested` of all parts of a test.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from deepep_bootstrap.analysis.results.model import Best, Point
from deepep_bootstrap.analysis.results.passes import Turn
from deepep_bootstrap.analysis.results.results_voices import Voice
from deepep_bootstrap.analysis.results.scanner import Token

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
class Part:
    """One test as one log tells it. `figures` are a rank's values by name, one for each time it printed them; `world` is what the
    ranks themselves say, `nodes` what the job says; `headers` counts the
    nodes on which a file of ours began it: each of them says an exit code in the end. `turn` is its pass, of a test that
    has passes; it `goes_on` where its log has the next one, behind which the job's last word stands then."""

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
    voices: dict[str, Voice] = field(default_factory=dict)
    figures: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    nodes: int = 0
    world: int = 0
    allocations: int = 0
    seeds: int = 0
    endless: bool = False
    content: bool = False
    turn: Turn | None = None
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
        """Return whether a node that the job has did not begin yet: what it prints first may come behind what another one tried."""
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
            # Seed 0 is the first of a test between nodes, but of a low-latency test the first one after its only regular round.
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

    def voice(self, label: str) -> Voice:
        """Return what came with a label."""
        found = self.voices.get(label)
        if found is None:
            found = self.voices[label] = Voice()
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
            names = (f"{operation}_{name}" for name in ("so_gbs", "su_gbs", "us", "bytes", f"{extra}_gbs", f"{extra}_us"))
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
        """Collect that a node has its buffer; those of later runs of a pass, and of a node that is ahead, come behind figures."""
        self.kind = self.kind or "low-latency"
        if self.turn is None or not self.busy:
            self.allocations += 1
            self.config["buffer_mb"] = size

    def take_pass(self, token: Token) -> None:
        """Collect what a line of its pass says."""
        self.turn = self.turn or Turn.before(token.words)
        self.turn.take(token.words)
        self.kind, self.content = self.kind or "low-latency", True
        if self.turn.tokens:
            self.config["num_tokens"] = self.turn.tokens

    def next_pass(self, line: int) -> Part:
        """Return the part of the pass after this one: of the same test, whose last word is left to it."""
        found = Part(self.log, line, self.kind, self.header, self.module, self.script, self.args, self.headers, nodes=self.nodes)
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

    def _take_tuning(self, voice: Voice, words: tuple[str | None, ...]) -> None:
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


def parts(log: str, found: Iterable[Token]) -> list[Part]:
    """Return the tests of one log in its order; what stands before the first, or says nothing about any, belongs to the next one. Each
    pass of a test is a part of its own."""
    done = [Part(log, 1)]
    for token in found:
        if token.kind == "pass":
            _of_pass(done, token).take_pass(token)
            continue
        if token.kind in LOW and (behind := _behind(done, token)):
            behind.take(token)
            continue
        if done[-1].is_over(token):
            done.append(Part(log, token.line))
            if token.kind == "config" and done[-2].kind == "low-latency" and done[-2].seeds:
                # The seed that stood between the two belongs to the test that begins here.
                done[-1].seeds, done[-2].seeds, done[-1].kind = done[-2].seeds, 0, "internode"
        done[-1].take(token)
    return [part for part in done if part.kind or part.errors or part.codes]


def _of_pass(done: list[Part], token: Token) -> Part:
    """Return the part that a line of a pass belongs to: nodes may be some lines apart. It is made where it is new."""
    number = Turn.before(token.words).number
    last = done[-1]
    if last.turn is None:
        if last.busy or last.is_closed:
            done.append(Part(last.log, token.line))
        done[-1].line = token.line
        return done[-1]
    for part in reversed(done):
        if part.turn is None or part.turn.number > last.turn.number:
            break
        if part.turn.number == number and not part.is_closed and not part.turn.has_begun(token.words):
            return part
    begins = number <= last.turn.number or last.is_closed
    done.append(Part(last.log, token.line) if begins else last.next_pass(token.line))
    return done[-1]


def _behind(done: list[Part], token: Token) -> Part | None:
    """Return the pass before the last one where a figure is still of that one: of a rank that has not printed it there. Each rank
    prints each figure once in every run, and another node's first line of the next pass may stand before it."""
    if len(done) < 2 or not (done[-1].turn and done[-2].turn) or done[-2].turn.number + 1 != done[-1].turn.number:
        return None
    own = done[-2].figures.get(int(token.words[0] or 0), {})
    return done[-2] if len(own.get(LOW[token.kind][0], ())) < done[-2].turn.runs else None
