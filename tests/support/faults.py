"""The table of faults: what `make hostile` did to the program, how often, and how often it held.

A row is a test of tests/hostile, in words its name; a fault is a case of it. `--fault-table=FILE` writes the table
between two marks of FILE, which is SECURITY.md.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

BEGIN, END = "<!-- faults: made by `make hostile` -->", "<!-- end of faults -->"
FOLDER = "tests/hostile/"


class FaultTable:
    """Counts cases of tests/hostile as they end, and writes the table at the end of the run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.held: dict[tuple[str, str], list[bool]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.nodeid.startswith(FOLDER):
            return
        if report.when == "call" or report.failed:
            file, _, name = report.nodeid.partition("::")
            self.held[subject(file), sentence(name)].append(report.passed)

    def pytest_sessionfinish(self) -> None:
        before, begin, rest = self.path.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        if begin and self.held:
            self.path.write_text(f"{before}{BEGIN}\n{self.table()}\n{END}{after}", encoding="utf-8")

    def table(self) -> str:
        """Return the rows in the order of files and names, and their sum."""
        lines = ["| subject | what happens | faults | held |", "|---|---|---|---|"]
        lines += [
            f"| {what} | {name} | {len(held)} | {sum(held)} |" for (what, name), held in sorted(self.held.items())
        ]
        every = [each for held in self.held.values() for each in held]
        return "\n".join([*lines, f"| all | | **{len(every)}** | **{sum(every)}** |"])


def subject(file: str) -> str:
    """Return what a file of tests is about: `local user` for tests/hostile/test_local_user.py."""
    return Path(file).stem.removeprefix("test_").replace("_", " ")


def sentence(name: str) -> str:
    """Return the name of a test in words, without its case."""
    return name.partition("[")[0].removeprefix("test_").replace("_", " ")
