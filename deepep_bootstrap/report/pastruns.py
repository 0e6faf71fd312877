"""Runs that lie in a prefix or in a folder of this machine: which there are, and what earlier ones of a kind gave."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from deepep_bootstrap.analysis.results.read import read_logs
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.recipes import compose, last_lines
from deepep_bootstrap.core.text import number
from deepep_bootstrap.prefix.generations import Place
from deepep_bootstrap.remote.fleet import Door, Job
from deepep_bootstrap.report.compose import PAST_RUNS, keyed
from deepep_bootstrap.report.model import Past
from deepep_bootstrap.testing import collect, runfiles
from deepep_bootstrap.testing.run_folder import TestRun, parse_values

HISTORY = ("lib.sh", "test/history.sh")
MOST = 1000
"""Runs that are looked at, newest first."""

LARGEST, TOTAL = 1 << 20, 32 << 20
"""Bytes of one earlier log and of all of them: a longer log is no test of the usual length."""

LIMIT = 300.0


def listed(door: Door, place: Place, most: int = MOST) -> dict[str, dict[str, str]]:
    """Return the values of the `most` newest runs there are, by folder, the newest first. A run whose values cannot be read has none."""
    found = _read(door, place, (), most)
    return {path.removesuffix(f"/{runfiles.VALUES}"): _values(text) for path, text in found.items()}


def listed_here(folder: Path) -> dict[str, dict[str, str]]:
    """Return the same of the runs that lie beside each other in a folder of this machine."""
    try:
        paths = sorted(folder.glob(f"*/{runfiles.VALUES}"), reverse=True)[:MOST]
        return {str(path.parent): _values(path.read_text(encoding="utf-8", errors="replace")) for path in paths}
    except OSError as error:
        raise Trouble(Problem(str(folder), "runs cannot be looked at", error.strerror or str(error))) from None


def _values(text: str) -> dict[str, str]:
    try:
        return parse_values(text, runfiles.VALUES)
    except Trouble:
        return {}


def like(run: TestRun, runs: Mapping[str, Mapping[str, str]]) -> tuple[str, ...]:
    """Return the folders of the earlier runs that can be compared with a run: of its kind, on as many nodes, with the same arguments."""
    start = number(run.values.get("started", ""))

    def fits(folder: str, values: Mapping[str, str]) -> bool:
        before = number(values.get("started", ""))
        nodes = len([name for name in values.get("nodes", "").split(",") if name])
        same = (values.get("kind"), values.get("args", ""), nodes) == (run.kind, run.values.get("args", ""), len(run.nodes))
        return same and PurePosixPath(folder).name != run.name and before is not None and (start is None or before <= start)

    known = [folder for folder, values in runs.items() if fits(folder, values)]
    return tuple(sorted(known, key=lambda folder: number(runs[folder]["started"]) or 0.0)[-PAST_RUNS:])


def earlier(door: Door, place: Place, runs: Mapping[str, Mapping[str, str]], folders: Iterable[str]) -> tuple[Past, ...]:
    """Return what the runs in `folders` gave."""
    names = tuple(folders)
    logs: dict[str, dict[str, str]] = {name: {} for name in names}
    for path, text in (_read(door, place, names) if names else {}).items():
        folder, _, name = path.rpartition("/")
        logs.setdefault(folder, {})[name] = text
    return tuple(past(name, runs[name], logs[name]) for name in names)


def earlier_here(runs: Mapping[str, Mapping[str, str]], folders: Iterable[str]) -> tuple[Past, ...]:
    """Return what the runs in `folders` of this machine gave."""
    found = []
    for name in folders:
        texts = {path.name: path.read_bytes() for path in sorted(Path(name).glob("node-*.log")) if path.stat().st_size <= LARGEST}
        found.append(past(name, runs[name], {log: data.decode("utf-8", "replace") for log, data in texts.items()}))
    return tuple(found)


def past(folder: str, values: Mapping[str, str], logs: Mapping[str, str]) -> Past:
    """Return what one run gave, by its logs of nodes; a run that failed may have figures too."""
    return Past(PurePosixPath(folder).name, number(values.get("started", "")) or 0.0, values.get("code") != "0", keyed(read_logs(logs)))


def _read(door: Door, place: Place, folders: Iterable[str], most: int = MOST) -> dict[str, str]:
    came = bytearray()
    env = {"PREFIX": place.prefix, "RUNS": "\n".join(folders), "MOST": str(most), "LARGEST": str(LARGEST), "TOTAL": str(TOTAL)}
    job = Job(compose(place.recipes, *HISTORY), env=env, user=place.user, timeout=LIMIT, sink=came.extend)
    reply = door.run(place.host, job)
    if reply.code:
        raise Trouble(Problem(f"{place.host.name} {place.prefix}/logs/tests", "runs cannot be looked at", last_lines(reply.err)))
    found = collect.parse(bytes(came), f"{place.host.name} {place.prefix}/logs/tests")
    return {path: text for path, text in found.files.items() if path not in found.cut}
