"""What hostile inputs cost: CPU time of a hosts file with one endless line, a run with very many nodes, and a host's
output before and behind the mark, each at two sizes. Twice the size should take about twice the time.

python tests/bench/bench_bounds.py
"""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT)]

from deepep_bootstrap.cli.commands import report
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.core.records import RecordForm, read_records
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.hostsfile import parse_hosts_file
from deepep_bootstrap.remote.script import EARLY_LIMIT, Lines

RUNS = ROOT / "tests" / "cases" / "report" / "runs"


def hosts_file(size: int) -> None:
    """One line of this size."""
    parse_hosts_file("n001," * (size // 5) + "\n", "hosts")


def faulty_lines(size: int) -> None:
    """Lines that are no data lines."""
    read_records("junk\n" * (size // 5), RecordForm({"state": 1}), "n001", "facts.sh")


def before_the_mark(size: int) -> None:
    """Output of start-up files, in pieces as small as a line."""
    lines = Lines(b"@mark@\n", None)
    for _ in range(min(size, EARLY_LIMIT) // 16):
        lines.feed(b"0123456789abcde\n")


def one_line(size: int) -> None:
    """A line without an end."""
    lines = Lines(b"", lambda line: None)
    for _ in range(size // 1000):
        lines.feed(b"x" * 1000)


def nodes(count: int, name: str) -> None:
    """The report of a run on so many nodes."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        run = Path(folder) / name
        shutil.copytree(RUNS / name, run)
        kept = [line for line in (run / "run.env").read_text().splitlines() if not line.startswith("nodes=")]
        names = ",".join(f"n{number:06}" for number in range(count))
        (run / "run.env").write_text("\n".join([*kept, f"nodes={names}", ""]))
        report.report(Flags.of(ROOT, {}), run=str(run))


CASES: tuple[tuple[str, Callable[[int], None], tuple[int, int]], ...] = (
    ("a line of a hosts file, bytes", hosts_file, (2_500_000, 5_000_000)),
    ("junk instead of data lines, bytes", faulty_lines, (2_000_000, 4_000_000)),
    ("output before the mark, bytes", before_the_mark, (EARLY_LIMIT // 2, EARLY_LIMIT)),
    ("a line of a log without an end, bytes", one_line, (4_000_000, 8_000_000)),
    ("report of a run that failed, nodes", lambda count: nodes(count, "failed"), (50_000, 100_000)),
    ("report of a run that is well, nodes", lambda count: nodes(count, "healthy"), (50_000, 100_000)),
)


def main() -> None:
    """Measure each case at both sizes."""
    for name, call, sizes in CASES:
        times = []
        for size in sizes:
            begin = time.process_time()
            with contextlib.suppress(Trouble):
                call(size)
            times.append(max(time.process_time() - begin, 1e-4))
        print(f"{name:<40} {sizes[1]:10,}  {times[1]:6.2f} s   twice the size: {times[1] / times[0]:.1f} times as long")


if __name__ == "__main__":
    main()
