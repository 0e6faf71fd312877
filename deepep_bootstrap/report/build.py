"""How long the builds of a bootstrap took, entry by entry, and which compile units took longest: read out of the logs
that it left on this machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from deepep_bootstrap.analysis.build_times import LONGEST, Unit, parse_build_times
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.text import duration

LOGS = "*/build-*.log"
"""Logs of builds below the folder of a run: one folder a host, one file an entry."""
LOG_NAME = re.compile(r"build-[0-9a-z]{32}-(.+)\.log")


class EntryBuild(Struct, frozen=True):
    """The build of one entry (`nvshmem-3.4.5`): seconds with all waiting (None where its log does not say: it was cut
    short), and its compile units, the longest first."""

    entry: str
    seconds: float | None
    units: tuple[Unit, ...]

    @property
    def took(self) -> str:
        """How long it took, for a person."""
        return "no end" if self.seconds is None else duration(self.seconds)


def is_log_of_build(name: str) -> bool:
    """Return whether a file of this name, as an outcome has it, is the log of a build."""
    return bool(LOG_NAME.fullmatch(Path(name).name))


def find_logs(runs: Path, name: str) -> Path:
    """Return the folder of the run `name`, a path or the name of one below `runs`; "" for the newest that built
    something. Raises Trouble where there is none."""
    # Their names begin with the time.
    newest = sorted(runs.glob("*/"), reverse=True)
    asked = [Path(name), runs / name] if name else newest
    if found := next((folder for folder in asked if any(folder.glob(LOGS))), None):
        return found
    what = "has no log of a build" if name else "no run has left a log of a build there"
    listed = ", ".join(folder.name for folder in newest[:LONGEST])
    remedy = "the folder of a run of bootstrap, as its last lines name it"
    raise Trouble(Problem(name or str(runs), what, f"of the last runs {listed}" if listed else "", try_=remedy))


def read_builds(files: Iterable[Path]) -> list[EntryBuild]:
    """Return what logs of builds say, the entry that took longest first."""
    return sorted(map(_read, files), key=lambda each: (-(each.seconds or 0.0), each.entry))


def _read(file: Path) -> EntryBuild:
    match = LOG_NAME.fullmatch(file.name)
    with file.open(encoding="utf-8", errors="replace") as log:
        times = parse_build_times(log)
    return EntryBuild(match[1] if match else file.stem, times.seconds, times.units)


def longest_units(entries: Iterable[EntryBuild]) -> list[str]:
    """Return the longest units of all entries, for a person."""
    units = sorted(((entry, unit) for entry in entries for unit in entry.units), key=lambda each: -each[1].seconds)
    return [f"{unit.text} of {entry.entry}" for entry, unit in units[:LONGEST]]


def build_lines(entries: Iterable[EntryBuild]) -> Iterator[str]:
    """Yield lines for a person: how long each entry took, then the longest units of all."""
    several = list(entries)
    width = max((len(each.entry) for each in several), default=0)
    for each in several:
        yield f"  {each.entry:<{width}}  {each.took}"
    for number, text in enumerate(longest_units(several)):
        yield f"{'Longest to compile:' if number == 0 else '':<19} {text}"
