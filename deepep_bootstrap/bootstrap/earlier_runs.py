"""What earlier runs on this machine leave for later ones: the notes that were shown with a plan, and how long steps
took.

They are kept for each hosts file and prefix in the account's state folder, beside the logs: they are about what a
person has read and what this machine has seen, so they are no state of the prefix, and losing them costs nothing but a
note that is shown again and an estimate.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.filetree import whole_file
from deepep_bootstrap.core.guard import state_dir
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.core.recipes import digest
from deepep_bootstrap.plan.screen import PlanView, show_plan
from deepep_bootstrap.plan.steps import Plan

LARGEST = 1024**2
"""Bytes of a file of ours that is read; it has some ten lines."""


class EarlierRuns(Struct, frozen=True):
    """What is kept: notes that the last plan had, and seconds of work by the title of a step, its last time."""

    notes: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)


def kept_at(hosts: str, prefix: str) -> Path:
    """Return the file for a hosts file (or node set) and a prefix."""
    where = hosts if not os.path.exists(hosts) else os.path.realpath(hosts)
    return state_dir() / "earlier" / f"{digest({'hosts': where, 'prefix': prefix})}.json"


def read_earlier(path: Path) -> EarlierRuns:
    """Return what is kept; nothing where that cannot be read."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(LARGEST), type=EarlierRuns)
    except (OSError, msgspec.MsgspecError):
        return EarlierRuns()


def keep(path: Path, earlier: EarlierRuns) -> None:
    """Write what is to be kept; where nothing can be written, nothing is."""
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(msgspec.json.encode(earlier))


def present_plan(screen: Screen, plan: Plan, path: Path, view: PlanView) -> EarlierRuns:
    """Show a plan with the notes that are new since the last one, keep those of this one, and return what earlier runs
    left. Nobody has read the notes of a document."""
    earlier = read_earlier(path)
    show_plan(screen, plan, replace(view, seen=frozenset(earlier.notes), seconds=earlier.seconds))
    if not screen.as_json and plan.notes != earlier.notes:
        earlier = replace(earlier, notes=plan.notes)
        keep(path, earlier)
    return earlier


def keep_durations(path: Path, outcomes: Iterable[Outcome]) -> None:
    """Keep how long the steps that were done worked, the slowest host of each."""
    took: dict[str, float] = {}
    for outcome in outcomes:
        if outcome.state == "done":
            took[outcome.step] = max(took.get(outcome.step, 0.0), outcome.seconds - outcome.waited)
    if took:
        earlier = read_earlier(path)
        keep(path, replace(earlier, seconds={**earlier.seconds, **took}))
