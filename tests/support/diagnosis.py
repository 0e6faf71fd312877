"""The recorded cases of `invoke diagnose`: logs with the cause that each is about, and the rules they are held to."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from msgspec import Struct

from deepep_bootstrap.analysis.diagnosis.engine import Diagnosis, Looked, conclude, look_at
from deepep_bootstrap.analysis.diagnosis.rules import read_shipped_causes
from deepep_bootstrap.core.toml import load_toml
from tests.support.paths import ROOT

CASES = ROOT / "tests" / "cases" / "diagnosis"
OUTSIDER = tuple(sorted(path.name for path in CASES.glob("outsider-2026*")))
YEARS = ("blind-2026", *OUTSIDER)
"""Sets of logs from public threads that no rule came from, with the line of their first error."""

SETS = ("known", "blind", *YEARS)
"""Sets of logs written without sight of the rules, each with an index.toml."""

RULES = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "env" / "rules" / "causes").iterdir())}
BOOK = read_shipped_causes(ROOT)
SLUGS = dict.fromkeys(cause.slug for cause in BOOK.causes)

CONFIDENT = 0.9
"""From here on nineteen of twenty causes that are named are to be right."""

A_CAUSE = """
[[cause]]
slug = "a-cause"
title = "t"
why = "w"
fix = "f"
source = "s"
"""
"""The head of a rule of one's own: its signs follow."""


@functools.cache
def diagnosed(name: str, text: str) -> Diagnosis:
    """Return the diagnosis of a log by the shipped rules, which several tests of a file look at."""
    return conclude(looked(name, text))


@functools.cache
def looked(name: str, text: str) -> Looked:
    """Return what shows in a log by the shipped rules."""
    return look_at({name: text}, BOOK)


class Case(Struct, frozen=True):
    """A recorded log: its name among all, its file, the cause it is about ("" for none), and others that a careful
    reader could name too."""

    name: str
    path: Path
    cause: str
    also: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The log."""
        return self.path.read_text(encoding="utf-8", errors="replace")


def cases_of_set(name: str) -> list[Case]:
    """Return the cases of one set in the order of its index."""
    folder = CASES / name
    index = load_toml((folder / "index.toml").read_text(encoding="utf-8"), f"{name}/index.toml")
    return [
        Case(f"{name}/{file}", folder / file, entry["cause"], tuple(entry.get("also", ())))
        for file, entry in index.items()
    ]


def cases_of_rules(kind: str) -> list[Path]:
    """Return the logs beside the rules: those that are `failing`, `near` misses, `healthy`, or `unrelated`."""
    return sorted((CASES / "rules" / kind).glob("*.log"))


def slug_of(path: Path) -> str:
    """Return the cause of a failing log by its name: the slug, and a number where there are several."""
    return path.stem if path.stem in SLUGS else re.sub(r"-\d+$", "", path.stem)


def recorded_cases() -> list[Case]:
    """Return all recorded cases, healthy logs too."""
    rules = [Case(f"rules/{path.name}", path, slug_of(path)) for path in cases_of_rules("failing")]
    quiet = [
        Case(f"rules/{kind}/{path.name}", path, "")
        for kind in ("healthy", "unrelated")
        for path in cases_of_rules(kind)
    ]
    sets = [case for name in SETS if (CASES / name).is_dir() for case in cases_of_set(name)]
    return [*rules, *quiet, *sets]
