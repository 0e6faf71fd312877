"""A run's folder as files by name, made into a TestRun; and what one line a run says of earlier ones. Pure but for `of_folder`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.testing.run_folder import Counters, TestRun, parse_counters, parse_values

VALUES, FACTS, RESULTS = "run.env", "facts.json", "results.json"
COUNTERS = re.compile(r"counters/(?P<host>[^/]+)\.(?P<when>before|after)")
LOG = re.compile(r"[^/]+\.log")
LARGEST = 8 * 1024 * 1024
"""Bytes of a log that are read: its first and its last half of that, where it has more."""

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
"""What the name of a run may be: it becomes a part of a path."""


def of_files(name: str, files: Mapping[str, str]) -> TestRun:
    """Return the run whose folder holds these texts, by path in it; files that belong to no run are left alone. Trouble where run.env is
    missing or where a line of it, or of counters, cannot be read."""
    if VALUES not in files:
        found = ", ".join(sorted(files)[:4]) or "nothing"
        raise Trouble(Problem(name, "this is no run of a test", found, f"a folder with {VALUES}", "invoke test, then invoke report"))
    return TestRun(
        name=name,
        values=parse_values(files[VALUES], f"{name}/{VALUES}"),
        logs={path: text for path, text in sorted(files.items()) if LOG.fullmatch(path)},
        counters=_counters(name, files),
        facts=files.get(FACTS, ""),
    )


def _counters(name: str, files: Mapping[str, str]) -> dict[str, tuple[Counters | None, Counters | None]]:
    """Return the counters before and after by host; None for a file that is not there, or that a node could not write to its end: a
    run that was cut off is what a report is for."""
    found: dict[str, dict[str, Counters]] = {}
    for path, text in sorted(files.items()):
        if match := COUNTERS.fullmatch(path):
            times = found.setdefault(match["host"], {})
            if text.endswith("\n"):
                times[match["when"]] = parse_counters(text, f"{name}/{path}")
    return {host: (both.get("before"), both.get("after")) for host, both in found.items()}


def is_part(path: str) -> bool:
    """Return whether a file of a run's folder is one that says something."""
    return path in {VALUES, FACTS, RESULTS} or bool(LOG.fullmatch(path) or COUNTERS.fullmatch(path))


def cut(data: bytes) -> str:
    """Return a file's text; of one over LARGEST the beginning and the end, with a line between that says how much is left out."""
    if len(data) > LARGEST:
        half = LARGEST // 2
        left_out = f"\n[{len(data) - LARGEST} bytes left out here]\n".encode()
        data = data[:half] + left_out + data[-half:]
    return data.decode("utf-8", errors="replace")


def of_folder(folder: Path) -> dict[str, str]:
    """Return the files of a run's folder on this machine by path in it; Trouble where it cannot be read."""
    try:
        paths = [path for path in (*folder.iterdir(), *_inside(folder / "counters")) if path.is_file()]
        names = {path.relative_to(folder).as_posix(): path for path in paths}
        return {name: cut(path.read_bytes()) for name, path in names.items() if is_part(name)}
    except OSError as error:
        raise Trouble(Problem(str(folder), "this run cannot be read", error.strerror or str(error), "a run's folder")) from None


def _inside(folder: Path) -> Iterable[Path]:
    return folder.iterdir() if folder.is_dir() else ()
