"""All-reduce and all-to-all among all GPUs, through torch.distributed: is the network below DeepEP right, and how fast
is it?

    WORLD_SIZE=2 RANK=0 MASTER_ADDR=node1 MASTER_PORT=8361 python nccl.py        on node1, with RANK=1 on the other

Every result is compared number by number with what it must be. For each size one line says three figures, the slowest
rank's:

    [nccl] all_reduce 1048576 bytes: 45.10 GB/s (algorithm), 84.56 GB/s (bus), 23.2 us

As in nccl-tests (doc/PERFORMANCE.md there): bytes are those of one rank's buffer, the algorithm's rate is bytes / time,
and the bus's rate is that times 2(n-1)/n for all-reduce and (n-1)/n for all-to-all among n ranks: what links must
carry, whatever n is.

Exit code 0 if all results were right, else 1.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import launching

OPERATIONS = ("all_reduce", "all_to_all")
SIZES = ("64K", "1M", "16M", "256M", "1G")
PERIOD = 97  # numbers repeat after so many: a prime, so that no chunk of a message begins where another one does
WARM_UP = 3


@dataclass(frozen=True)
class Figure:
    """How fast one operation was: bytes of one rank's buffer, seconds, ranks."""

    operation: str
    size: int
    seconds: float
    ranks: int

    @property
    def algorithm(self) -> float:
        """GB/s (10^9) of the algorithm."""
        return self.size / self.seconds / 1e9

    @property
    def bus(self) -> float:
        """GB/s (10^9) that links carry."""
        return self.algorithm * (2 if self.operation == "all_reduce" else 1) * (self.ranks - 1) / self.ranks

    def __str__(self) -> str:
        rates = f"{self.algorithm:.2f} GB/s (algorithm), {self.bus:.2f} GB/s (bus), {self.seconds * 1e6:.1f} us"
        return f"{self.operation} {self.size} bytes: {rates}"


def whole(size: int, ranks: int) -> int:
    """Return the nearest size not below `size` that gives every rank the same count of 4-byte numbers."""
    part = 4 * ranks
    return -(-size // part) * part


def best(figures: list[Figure]) -> list[Figure]:
    """Return the fastest figure of each operation."""
    names = dict.fromkeys(figure.operation for figure in figures)
    return [max((each for each in figures if each.operation == name), key=lambda each: each.bus) for name in names]


class Rank:
    """One rank with its device."""

    def __init__(self, torch: Any, place: launching.Place, local_rank: int, backend: str) -> None:
        self.torch, self.rank, self.ranks = torch, place.rank(local_rank), place.ranks
        self.device = torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")
        if backend == "nccl":
            torch.cuda.set_device(self.device)

    def pattern(self, count: int) -> Any:
        """Return `count` numbers 0, 1, 2, … PERIOD-1, 0, 1, …"""
        period = self.torch.arange(PERIOD, dtype=self.torch.float32, device=self.device)
        return period.repeat(-(-count // PERIOD))[:count]

    def prepare(self, operation: str, size: int) -> tuple[Callable[[], Any], Any, Any]:
        """Return what runs the operation once, where its result is then, and what it must be after the first time."""
        dist, count = self.torch.distributed, size // 4
        numbers = self.pattern(count)
        if operation == "all_reduce":
            buffer = numbers + self.rank
            # Sums of whole numbers below 2^24: exact in float32 in whatever order they are added.
            return lambda: dist.all_reduce(buffer), buffer, numbers * self.ranks + self.ranks * (self.ranks - 1) // 2
        part = count // self.ranks
        given = numbers + self.rank
        result = self.torch.full_like(given, -1)
        ours = numbers[self.rank * part : (self.rank + 1) * part]
        wanted = self.torch.cat([ours + sender for sender in range(self.ranks)])
        return lambda: dist.all_to_all_single(result, given), result, wanted

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()

    def differs(self, operation: str, result: Any, wanted: Any) -> int:
        """Say on this rank what is wrong with a result; return how many numbers are."""
        wrong = (result != wanted).nonzero().flatten()
        if len(wrong):
            first = int(wrong[0])
            found = f"the first at {first}: found {float(result[first]):g}, wanted {float(wanted[first]):g}"
            text = (
                f"rank {self.rank}: {operation} {result.numel() * 4} bytes: {len(wrong)} of {len(result)} numbers "
                f"wrong, {found}"
            )
            launching.say("nccl", text, error=True)
        return len(wrong)

    def measure(self, operation: str, size: int, repeats: int) -> tuple[Figure, bool]:
        """Return how fast an operation is, and whether its result was right on every rank; all ranks get the same
        answer."""
        torch, dist = self.torch, self.torch.distributed
        once, result, wanted = self.prepare(operation, size)
        once()
        self.synchronize()
        wrong = self.differs(operation, result, wanted)
        del wanted
        for _ in range(WARM_UP):
            once()
        dist.barrier()
        self.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            once()
        self.synchronize()
        worst = torch.tensor(
            [(time.perf_counter() - start) / repeats, float(wrong)], dtype=torch.float64, device=self.device
        )
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return Figure(operation, size, float(worst[0]), self.ranks), float(worst[1]) == 0


def be_rank(local_rank: int, place: launching.Place, chosen: argparse.Namespace) -> None:
    """Measure everything as one rank; exits with 1 if any result was wrong on any rank."""
    import torch

    rank = Rank(torch, place, local_rank, chosen.backend)
    torch.distributed.init_process_group(
        chosen.backend,
        init_method=f"tcp://{place.host}:{place.port}",
        world_size=place.ranks,
        rank=rank.rank,
        timeout=datetime.timedelta(seconds=chosen.timeout),
        device_id=rank.device if chosen.backend == "nccl" else None,
    )
    if rank.rank == 0:
        library = "NCCL " + ".".join(map(str, torch.cuda.nccl.version())) if chosen.backend == "nccl" else "gloo"
        nodes = launching.count(place.nodes, "node")
        launching.say(
            "nccl", f"{nodes} x {launching.count(place.local_ranks, 'rank')}, {library}, torch {torch.__version__}"
        )
    figures, right = [], True
    for operation in OPERATIONS if chosen.operation is None else (chosen.operation,):
        for size in chosen.sizes:
            figure, good = rank.measure(operation, whole(size, place.ranks), chosen.repeats)
            right = right and good
            figures.append(figure)
            if rank.rank == 0:
                launching.say("nccl", str(figure))
    for figure in best(figures) if rank.rank == 0 else ():
        launching.say("nccl", f"best {figure}")
    torch.distributed.destroy_process_group()
    if not right:
        sys.exit(1)


def main(words: list[str]) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="nccl.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    launching.add_options(parser)
    parser.add_argument("--operation", choices=OPERATIONS, help="only this one (default: both)")
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=launching.size,
        metavar="SIZE",
        help=f"bytes of one rank's buffer, as 4096, 64K, 1M or 1G (default: those of {' '.join(SIZES)} that GPUs hold)",
    )
    parser.add_argument(
        "--repeats", type=int, default=20, metavar="N", help="runs that are timed together (default: 20)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300,
        metavar="SECONDS",
        help="for a rank to come, and for one run (default: 300)",
    )
    chosen = parser.parse_args(words)
    place = launching.place(chosen.num_processes)
    if place.ranks < 2:
        launching.say("nccl", "failed: one rank has nobody to talk to", error=True)
        return 1
    chosen.sizes = chosen.sizes or launching.fitting([launching.size(size) for size in SIZES])
    wrong = launching.wait_for(launching.start(be_rank, (place, chosen), place.local_ranks))
    launching.say("nccl", f"failed: {wrong}" if wrong else "passed", error=bool(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
