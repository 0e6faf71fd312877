"""Consent: the one rule by which every verb asks before it changes what others use.

A question is due where packages, the module hook, reboots, deletion or what users load is concerned. It is asked on a
terminal, on stderr so that `| tee` shows it, and anything but yes is No. Where nobody can be asked (no terminal, or
--json, whose output is one document) the flag that says yes must be given; without it nothing is changed and the
verb exits 1 with its plan shown.
"""

from __future__ import annotations

import sys

from deepep_bootstrap.core.errors import Problem
from deepep_bootstrap.inventory.flags import Flags

YES = frozenset(("y", "yes"))
UNCHANGED = "not confirmed, nothing was changed"


def consent(flags: Flags, verb: str, question: str) -> Problem | None:
    """Return None where --yes says so or a person does; else why `verb` changes nothing."""
    if flags.yes:
        return None
    if not can_ask(flags):
        return Problem(verb, UNCHANGED, why_not_asked(flags), "--yes", "the same command with --yes")
    return None if said_yes(question) else Problem(verb, UNCHANGED)


def can_ask(flags: Flags) -> bool:
    """Whether there is a person to ask."""
    return not flags.json and sys.stdin.isatty() and sys.stderr.isatty()


def why_not_asked(flags: Flags) -> str:
    """Return why nobody can be asked, for a message."""
    return "--json, which asks nothing" if flags.json else "no terminal to ask on"


def said_yes(question: str) -> bool:
    """Ask on the terminal and return whether the answer is yes; the end of the input is none."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in YES
