"""What the flags of bootstrap allow when a change needs a reboot. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deepep_bootstrap.errors import Problem, Trouble

NEVER, ASK, ROLLING, ALL = "never", "ask", "rolling", "all"


@dataclass(frozen=True)
class Reboots:
    """`mode` is "never", "ask", "rolling" or "all"; `at_once` how many hosts a rolling wave works on at a time."""

    mode: str = NEVER
    at_once: int = 1


def parse_mode(text: str) -> tuple[str, int]:
    """Return mode and how many hosts at once of `never`, `ask`, `rolling`, `rolling:4` or `all` (0: as many as there are)."""
    match = re.fullmatch(r"(never|ask|all|rolling)(?::([1-9][0-9]{0,4}))?", text)
    if not match or (match.group(2) and match.group(1) != ROLLING):
        raise Trouble(Problem("--reboot", "unknown value", text or "nothing", "never, ask, rolling, rolling:K or all"))
    return match.group(1), 0 if match.group(1) == ALL else int(match.group(2) or 1)
