"""What the programs of this folder share: where a launcher stands among the nodes, and how it runs one process per GPU.

The convention is that of DeepEP's own tests: one launcher per node, WORLD_SIZE is the number of nodes, RANK this node's
index, and all meet at MASTER_ADDR:MASTER_PORT.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

DEFAULTS = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "8361"}  # as in DeepEP's tests
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Place:
    """One launcher among all: its node, how many there are, ranks on each, and where they meet."""

    node: int
    nodes: int
    local_ranks: int
    host: str
    port: int

    @property
    def ranks(self) -> int:
        """How many ranks all nodes have together."""
        return self.nodes * self.local_ranks

    def rank(self, local_rank: int) -> int:
        """Return the rank among all of one of this node's."""
        return self.node * self.local_ranks + local_rank


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all programs have."""
    parser.add_argument(
        "--num-processes", type=int, metavar="N", help="GPUs to use on each node (default: all of this node)"
    )
    parser.add_argument(
        "--backend",
        choices=("nccl", "gloo"),
        default="nccl",
        help="nccl (default), or gloo: without GPUs, to try the program itself",
    )


def place(local_ranks: int | None) -> Place:
    """Return this launcher's place; exits with a message where there is no GPU or a variable makes no sense."""
    import torch

    count = local_ranks or torch.cuda.device_count()
    if count < 1:
        sys.exit(f"no GPU on {os.uname().nodename}")
    values = {name: os.environ.get(name, default) for name, default in DEFAULTS.items()}
    for name, value in values.items():
        if not (value.isascii() and value.isdigit()):
            sys.exit(f"{name}={value}: not a number")
    node, nodes = int(values["RANK"]), int(values["WORLD_SIZE"])
    if node >= nodes:
        sys.exit(f"RANK={node}: with WORLD_SIZE={nodes} nodes it must be below that")
    return Place(node, nodes, count, os.environ.get("MASTER_ADDR", "127.0.0.1"), int(values["MASTER_PORT"]))


def size(text: str) -> int:
    """Return bytes of a size such as 64K, 1M or 1G (powers of 1024), for argparse."""
    number, unit = (text[:-1], text[-1:].upper()) if text[-1:].isalpha() else (text, "")
    if unit not in UNITS or not (number.isascii() and number.isdigit()) or int(number) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 4096, 64K, 1M or 1G")
    return int(number) * UNITS[unit]


def fitting(sizes: Sequence[int]) -> list[int]:
    """Return those of the sizes, in bytes, that this node's GPUs hold eight times over: programs keep a message, what
    came and what must have come, and libraries keep buffers of their own. At least the smallest one; all where there is
    no GPU."""
    import torch

    gpus = range(torch.cuda.device_count())
    room = min((torch.cuda.get_device_properties(gpu).total_memory // 8 for gpu in gpus), default=max(sizes))
    return [size for size in sizes if size <= room] or [min(sizes)]


def count(number: int, thing: str) -> str:
    """Return "1 round", "2 rounds"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def say(name: str, text: str, error: bool = False) -> None:
    """Print one line, whole and at once, with the program's name in front."""
    os.write(2 if error else 1, f"[{name}] {text}\n".encode())


def end_by_signal() -> None:
    """Let SIGTERM end this process as an exception would, so that what runs below it is ended too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def start(function: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> Any:
    """Start `function(local_rank, *arguments)` in one process per rank; return torch's ProcessContext. A SIGTERM
    ends them and then this process, also one that comes while they are being started."""
    import torch

    early: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: early.append(number))
    context = torch.multiprocessing.spawn(function, args=arguments, nprocs=ranks, join=False)

    def end(number: int, _: object) -> None:
        # Not left to who holds the context: nobody may hold it yet, and Python would wait at its end for ranks that
        # wait for others.
        stop(context)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    if early:
        end(early[0], None)
    return context


def wait_for(context: Any, seconds: float | None = None) -> str:
    """Wait for the ranks of a ProcessContext, no longer than so many seconds.

    Returns what went wrong in one line, "" if nothing did; the traceback of a rank goes to standard error before. None
    of them runs any more afterwards.
    """
    import torch

    end = time.monotonic() + (seconds or float("inf"))
    try:
        while not context.join(max(0.0, min(1.0, end - time.monotonic()))):
            if time.monotonic() >= end:
                stuck = [str(rank) for rank, process in enumerate(context.processes) if process.is_alive()]
                return f"after {seconds:g} s still running: ranks {', '.join(stuck)} of this node"
    except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException) as error:
        *before, last = str(error).strip().splitlines()
        if before:
            print("\n".join([*before, last]), file=sys.stderr, flush=True)
        return last
    finally:
        stop(context)
    return ""


def stop(context: Any) -> None:
    """End what still runs."""
    for process in context.processes:
        if process.is_alive():
            process.kill()
        process.join()
