"""The order of test files: the one that takes longest first, so that no worker is left with a long one at the end.

durations.toml has the seconds of each file that takes five or more; `make test PYTEST_ARGS=--record-durations` writes
it anew. A file that is not in it comes after those that are: first one with `system` tests, then one without.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from deepep_bootstrap.core.toml import load_toml
from tests.support.paths import ROOT

TABLE = Path(__file__).with_name("durations.toml")
LEAST = 5.0


def read_durations() -> dict[str, float]:
    """Return the seconds by path of file, as recorded."""
    return {path: float(seconds) for path, seconds in load_toml(TABLE.read_text(encoding="utf-8"), str(TABLE)).items()}


def longest_first(
    items: list[pytest.Item], durations: Mapping[str, float], is_system: Callable[[pytest.Item], bool]
) -> list[pytest.Item]:
    """Return the tests with the files that take longest first, and as they were inside a file."""
    files: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[file_of(item.nodeid)].append(item)

    def place(path: str) -> tuple[float, bool]:
        return -durations.get(path, 0.0), not any(is_system(item) for item in files[path])

    return [item for path in sorted(files, key=place) for item in files[path]]


def file_of(nodeid: str) -> str:
    """Return the path of the file that a test is in."""
    return nodeid.partition("::")[0]


class Recorder:
    """Adds up what the tests of each file take, and writes the table at the end of the run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        known = read_durations() | dict(self.seconds)
        there = {path: seconds for path, seconds in known.items() if seconds >= LEAST and (ROOT / path).exists()}
        ordered = sorted(there.items(), key=lambda each: -each[1])
        TABLE.write_text("".join(f'"{path}" = {seconds:.0f}\n' for path, seconds in ordered), encoding="utf-8")
