"""Times, durations and sizes, read from flags and written for people."""

from __future__ import annotations

import math
import re

from deepep_bootstrap.core.errors import Problem, Trouble

GIB = 1024**3

STORE_HASH = re.compile(r"\b([0-9a-z]{7})[0-9a-z]{25}(?=-)")


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


def seconds(count: float) -> str:
    """Return a duration in the units a person would choose."""
    if count < 9.95:
        return f"{count:.1f} s"
    whole = round(count)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def size(count: int) -> str:
    """Return `count` bytes in the unit a person would choose."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 1024**2:.0f} MiB"
