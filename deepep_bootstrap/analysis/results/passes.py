"""The passes of a test that runs more than once, as programs/passes.py marks them in its logs.

    deepep: pass 2 of 2 on node 0: 256 tokens, run 1 of 8, 64 combine calls to check
    deepep: pass 2 of 2 on node 0: run 1 of 8 ended with exit code 0

A pass is one number of tokens; its runs are starts of the same test. Each node marks its own, and each rank the
begin of a run in its file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

Words = tuple[str | None, ...]
RUNS_MAX = 100_000
"""More runs than this are a misread number."""


@dataclass
class PassRun:
    """What one log says of one pass: its number, of how many, tokens of each rank, how many runs it has, combine
    calls that one run compares over all ranks; which runs began and how they ended, by node and number."""

    number: int
    of: int
    tokens: int = 0
    runs: int = 1
    calls: int = 0
    begun: set[tuple[int, int]] = field(default_factory=set)
    ended: dict[tuple[int, int], int] = field(default_factory=dict)

    @classmethod
    def before(cls, words: Words) -> PassRun:
        """Return a pass of which nothing was said yet, by the words of one of its lines."""
        number, of = (min(int(word or 0), RUNS_MAX) for word in words[:2])
        return cls(number, of)

    def take(self, words: Words) -> None:
        """Collect what a line says about a run."""
        _, _, node, tokens, run, runs, calls, ended, _, code = (None if word is None else int(word) for word in words)
        if tokens is None:
            self.ended[node or 0, ended or 0] = code or 0
            return
        self.begun.add((node or 0, run or 0))
        self.tokens, self.runs, self.calls = tokens, min(runs or 1, RUNS_MAX), calls or 0

    def has_begun(self, words: Words) -> bool:
        """Return whether a line tells of the begin of a run that began before: another start of the whole test."""
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
    """Return what several logs say of the same pass; None where none says anything."""
    found: PassRun | None = None
    for run in filter(None, runs):
        found = found or PassRun(run.number, run.of)
        if run.tokens:
            found.tokens, found.runs, found.calls = run.tokens, run.runs, run.calls
        found.begun |= run.begun
        found.ended |= run.ended
    return found
