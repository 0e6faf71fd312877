"""Times, durations and sizes, read from flags and written for people; and text that a host said."""

from __future__ import annotations

import math
import re

from deepep_bootstrap.core.errors import Problem, Trouble, plain

GIB = 1024**3

STORE_HASH = re.compile(r"\b([0-9a-z]{7})[0-9a-z]{25}(?=-)")

LONGEST_SAID = 2000
"""Characters that are shown of what a host said."""


class HostText:
    """Free text of a host, for showing only. It is no `str`: mypy does not let it be a word or a variable of a
    command, and remote.fleet.Job refuses it too. As text it has no control characters and a limit."""

    __slots__ = ("_said",)

    def __init__(self, said: str = "") -> None:
        self._said = said

    def __str__(self) -> str:
        return plain(self._said)[:LONGEST_SAID]

    def __repr__(self) -> str:
        return f"HostText({self._said!r})"

    def __bool__(self) -> bool:
        return bool(self._said)

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other) if isinstance(other, (str, HostText)) else NotImplemented

    def __hash__(self) -> int:
        return hash(str(self))


NO_TEXT = HostText()
"""What stands for a host that said nothing."""

Words = str | HostText
"""A sentence to show: ours, or what a host said."""


def parse_time(flag: str, text: str) -> float:
    """Return the seconds of `90s`, `30m`, `4h`, or of `30`, which are minutes."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})([smh]?)", text, re.ASCII)
    if not match:
        raise Trouble(Problem(flag, "not a time", text[:40] or "nothing", "minutes, or such as 90s, 30m, 4h"))
    return float(match.group(1)) * {"s": 1, "m": 60, "": 60, "h": 3600}[match.group(2)]


def number(text: str) -> float | None:
    """Return a time of run.env; None for what is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and 0 <= value < 2**40 else None


def shortened(text: str) -> str:
    """Return a message with the hashes of store entries cut to what a person compares; JSON and logs have them
    whole."""
    return STORE_HASH.sub(r"\1…", text)


def duration(seconds: float) -> str:
    """Return a duration for people: `0.4 s`, `59 s`, `30 min`, `12 min 34 s`, `2 h 03 min`.

    Rounded to the nearest tenth of a second below 10 s, second below an hour, minute from there on. A smaller unit
    that is zero is left out, so that a limit reads as it was set.
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s".replace(".0 s", " s")
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        (count, rest), unit, smaller = divmod(whole, 60), "min", "s"
    else:
        (count, rest), unit, smaller = divmod(round(whole / 60), 60), "h", "min"
    return f"{count} {unit} {rest:02} {smaller}" if rest else f"{count} {unit}"


def size(count: int) -> str:
    """Return `count` bytes in the unit a person would choose."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 1024**2:.0f} MiB"
