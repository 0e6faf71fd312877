"""Reading logs: MB a second of CPU time for logs of tests, for what libraries print beside them, and for one endless
line; whether twice the size takes twice the time.

python tests/bench/bench_results.py [MB]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent)]

from deepep_bootstrap.analysis.results.read import read_logs

CASES = HERE.parent / "cases" / "analysis" / "results"
NOISE = "gpu-001:4711:4822 [3] NCCL INFO Channel 07/0 : 3[3] -> 4[4] via P2P/CUMEM/read\n"
MB = 1_000_000


def sample(case: str) -> str:
    """Return the one log of a case."""
    (path,) = (path for path in (CASES / case).iterdir() if path.name != "expected.json")
    return path.read_text(encoding="utf-8")


def filled(text: str, size: int) -> str:
    """Return `text` again and again up to `size` characters."""
    return (text * (size // len(text) + 1))[:size]


def main(size: int) -> None:
    texts = {
        "tests of one node": sample("h200-intranode"),
        "tests between nodes": sample("internode-merged"),
        "V2's test": sample("ep-16-interleaved"),
        "pressure, one test": sample("pressure-unended").split("ref_hash")[0] + "ref_hash=1\n",
        "noise": NOISE,
        "noise without line ends": NOISE.replace("\n", " "),
        "cut lines without ends": "[testing] Running with [tuning] SMs 24, NVL chunk 4: 3 GB/s [rank 3] Dispatch "
        "bandwidth: EP: 1/2 | ",
        "headers without ends": "deepep: internode test of deepep/1: /tests/test_internode.py --num-tokens 4096 ",
    }
    for name, text in texts.items():
        times = []
        for part in (size // 2, size):
            log = filled(text, part)
            start = time.process_time()
            read_logs({"bench.log": log})
            times.append(time.process_time() - start)
        print(f"{name:<26} {size / MB / times[1]:7.1f} MB/s   twice the size: {times[1] / times[0]:.1f} times as long")


if __name__ == "__main__":
    main(int(sys.argv[1] if len(sys.argv) > 1 else 20) * MB)
