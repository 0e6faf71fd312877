"""How long the compile units of an entry took, out of the log of its build.

`tell_times` of recipes/build/units.sh puts there, each line marked, ninja's log (versions 4 to 7: begin and end in
milliseconds, time of the file, output, hash, with tabs between) and the table of `nvcc --time` (source, phase, its
input and output, architecture, tool, figure, unit, with commas between; as of nvcc 13.0). bootstrap.build adds the
seconds of the whole entry. Other lines, and marked ones that are not of these forms, are passed over.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

from msgspec import Struct

from deepep_bootstrap.core.text import duration, plain

NINJA, NVCC, SECONDS = "timing ninja: ", "timing nvcc: ", "timing seconds: "
LONGEST = 3
"""Units that are named to a person."""
NINJA_LINE = re.compile(r"(\d{1,12})\t(\d{1,12})\t-?\d{1,20}\t([^\t]{1,4096})\t[0-9a-f]{1,16}")
NVCC_LINE = re.compile(
    r"(?P<source>[^,]*),(?P<phase>[^,]*),[^,]*,[^,]*,[^,]*,[^,]*,\s*(?P<figure>\d{1,12}(?:\.\d{1,9})?)\s*,\s*ms\s*"
)
OBJECTS = (".o", ".obj")


class Unit(Struct, frozen=True):
    """A compile unit, its wall time in seconds, and where nvcc said so the phase that took longest (of all
    architectures together) with its seconds; "" and 0.0 where not."""

    name: str
    seconds: float
    phase: str = ""
    phase_seconds: float = 0.0

    @property
    def text(self) -> str:
        """It, for a person: `internode.cu 27 s (ptxas 19 s)`."""
        phase = f" ({self.phase} {duration(self.phase_seconds)})" if self.phase else ""
        return f"{self.name} {duration(self.seconds)}{phase}"


class BuildTimes(Struct, frozen=True):
    """An entry's compile units, the longest first, and the seconds it took with all waiting (None: the log does not
    say)."""

    seconds: float | None
    units: tuple[Unit, ...]


def parse_build_times(lines: Iterable[str]) -> BuildTimes:
    """Return the times in the log of a build."""
    marked: dict[str, list[str]] = {NINJA: [], NVCC: [], SECONDS: []}
    for line in lines:
        for mark, found in marked.items():
            if line.startswith(mark):
                found.append(line[len(mark) :].rstrip("\n"))
    told = [text for text in marked[SECONDS] if re.fullmatch(r"\d{1,9}(?:\.\d{1,3})?", text)]
    return BuildTimes(float(told[-1]) if told else None, tuple(units_of(marked[NINJA], marked[NVCC])))


def units_of(ninja: Iterable[str], nvcc: Iterable[str]) -> list[Unit]:
    """Return the units in the lines of ninja's log and of nvcc's table, the longest first. Without ninja's log a unit's
    time is that of all its phases."""
    objects, phases = dict(parse_ninja_log(ninja)), parse_nvcc_times(nvcc)
    if not objects:
        found = [_unit(name, sum(took.values()), took) for name, took in phases.items()]
    else:
        # torch calls the object of internode.cu internode.o, CMake internode.cu.o.
        sources = {PurePosixPath(name).stem: name for name in phases} | {name: name for name in phases}
        named = [(sources.get(name, name), seconds) for name, seconds in objects.values()]
        times = Counter(name for name, _ in named)
        # nvcc names sources alone: what it says of one that several targets compile is of none of them.
        found = [_unit(name, seconds, phases.get(name, {}) if times[name] == 1 else {}) for name, seconds in named]
    return sorted(found, key=lambda unit: (-unit.seconds, unit.name))


def parse_ninja_log(lines: Iterable[str]) -> Iterator[tuple[str, tuple[str, float]]]:
    """Yield the objects in ninja's log: path, name without the ending, and seconds. One that was made twice comes
    twice; CMake's generator notes some under two paths, of which the absolute one is passed over."""
    listed = [match for match in map(NINJA_LINE.fullmatch, lines) if match]
    relative = {(match[1], match[2], PurePosixPath(match[3]).name) for match in listed if match[3][0] != "/"}
    for match in listed:
        path = PurePosixPath(match[3])
        begin, end = int(match[1]), int(match[2])
        twice = path.is_absolute() and (match[1], match[2], path.name) in relative
        if path.suffix in OBJECTS and begin <= end and not twice:
            yield str(path), (plain(path.stem), (end - begin) / 1000)


def parse_nvcc_times(lines: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return seconds by phase by source. What gcc does comes several times under a number, and is one phase here."""
    found: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for match in filter(None, map(NVCC_LINE.fullmatch, lines)):
        source, phase = match["source"].strip(), re.sub(r" \d+\)$", ")", match["phase"].strip())
        if source and phase:
            found[plain(PurePosixPath(source).name)][plain(phase)] += float(match["figure"]) / 1000
    return {source: dict(took) for source, took in found.items()}


def _unit(name: str, seconds: float, phases: dict[str, float]) -> Unit:
    phase = max(phases, key=lambda each: (phases[each], each), default="")
    return Unit(name, round(seconds, 3), phase, round(phases.get(phase, 0.0), 3))
