"""What one node printed of a test of throughput: its cases, its best settings, and the sweep of settings it tried. Pure.

These are collectors: `results_parts` fills them line by line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from deepep_bootstrap.analysis.results.model import Best, Point

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
                yield Point(operation, one.sms, one.nvl_chunk, one.rdma_chunk, one.nvl_gbs, one.rdma_gbs, one.us, one.default)


def _chunk(chunk: int | None) -> float:
    return float("inf") if chunk is None else chunk


@dataclass
class Voice:
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
        """Count a configuration: one more node speaks, if nothing was tried yet or it is `late`; a test without an end says it again."""
        self.configs += 1
        if late or not self.busy:
            self.sweep.copies = self.configs

    @property
    def busy(self) -> bool:
        """Return whether the test is under way: something was tried."""
        return bool(self.opened or self.ep_cases or self.best or self.sweep.blocks)
