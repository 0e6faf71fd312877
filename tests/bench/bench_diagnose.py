"""How long `invoke diagnose` takes for long logs: python tests/bench/bench_diagnose.py [MB …]

A log of this size is made of ordinary lines of a NCCL and DeepEP run on 64 ranks, with one failure at its end; a second
one repeats a message that looks like a cause on every line, in a third every line fits a sign, a fourth is one line,
and in a fifth a script runs each command twice. Prints seconds of CPU time, lines per second, and how many times as
long as the size before: twice the size should take about twice the time.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT)]

from deepep_bootstrap.analysis.diagnosis.engine import diagnose
from deepep_bootstrap.analysis.diagnosis.rules import read_shipped_causes

USUAL = (
    (
        "{rank}: n{node:03}:41{rank:02}:41{rank:02} [{rank}] NCCL INFO Channel 0{rank}/0 : {rank}[{rank}] -> 1[1] via "
        "P2P/CUMEM"
    ),
    "{rank}: [testing] Running with BF16, with top-k (async=False, previous=False) ... passed",
    "{rank}: [tuning] SMs 24, NVL chunk {rank}, RDMA chunk 16: 5{node}.21 GB/s (RDMA), 186.10 GB/s (NVL)",
    "{rank}: NVSHMEM INFO NVSHMEM_ENABLE_NIC_PE_MAPPING = 0, device 0 setting dev_id = {rank}",
)
FAILURE = "3: RuntimeError: Failed: CUDA error csrc/kernels/internode.cu:133 'named symbol not found'\n"


def ordinary(size: int) -> str:
    """Return about `size` characters of ordinary lines with a failure at their end."""
    block = "".join(
        line.format(rank=rank, node=node) + "\n" for node in range(4) for rank in range(16) for line in USUAL
    )
    return block * (size // len(block)) + FAILURE


def suspicious(size: int) -> str:
    """Return lines that each have words of several rules, and fit none."""
    line = "7: NCCL WARN ibv_modify_qp failing? timeout named symbol cannot allocate /dev/shm Permission Killed\n"
    return line * (size // len(line)) + FAILURE


def fitting(size: int) -> str:
    """Return lines that all fit a sign."""
    return FAILURE * (size // len(FAILURE))


def one_line(size: int) -> str:
    """Return one line, as a progress bar leaves it."""
    step = "\rDownloading named symbol  {} %"
    return "".join(step.format(number % 100) for number in range(size // len(step))) + FAILURE


def repeated(size: int) -> str:
    """Return commands of a script that runs each of them twice at once."""
    tries = "+ cp {number}.bin /mnt/n{number}\ncopied\n" * 2
    block = "".join(tries.format(number=number) for number in range(1_000_000, 1_000_000 + size // len(tries)))
    return block + FAILURE


def main() -> None:
    """Measure each kind of log at each size."""
    begin = time.process_time()
    rules = read_shipped_causes(ROOT)
    print(f"reading the rules: {time.process_time() - begin:.2f} s of CPU time")
    for kind in (ordinary, suspicious, fitting, one_line, repeated):
        before = None
        for megabytes in map(int, sys.argv[1:] or ("15", "30")):
            text = kind(megabytes * 1_000_000)
            begin = time.process_time()
            found = diagnose({"log": text}, rules)
            took = time.process_time() - begin
            first = found.findings[0].cause if found.findings else "nothing"
            print(
                f"{megabytes:4} MB {kind.__name__:10} {took:6.2f} s, {text.count(chr(10)) / took:12,.0f} lines/s"
                f"{f', {took / before:.1f} times as long' if before else ''}: {first}"
            )
            before = took


if __name__ == "__main__":
    main()
