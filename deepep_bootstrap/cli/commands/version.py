"""`invoke version`: this program, its commit, and the pins of the lock."""

from __future__ import annotations

from pathlib import Path

from deepep_bootstrap.core import program
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import OK
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.lock import model

SHORT = 7
"""Characters of a revision that are shown, as in the names of modules."""


def version(flags: Flags) -> int:
    """Say which version of this program runs, of which commit, and what the lock pins DeepEP to in each stack."""
    screen = Screen("version", as_json=flags.json)
    path = Path(flags.lock or flags.root / "deepep.lock.toml")
    lock = model.read_lock_file(path)
    pins = {name: lock.sources[stack.deepep].rev for name, stack in lock.stacks.items()}
    release, commit = program.version(), program.commit()
    shown = ", ".join(f"{name} {rev[:SHORT]}" for name, rev in pins.items())
    screen.say(f"{program.NAME} {release}{f' ({commit})' if commit else ''}, lock {shown}")
    screen.document(OK, (), version=release, commit=commit, lock=str(path), pins=pins, data=str(flags.root))
    return OK
