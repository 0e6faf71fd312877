"""Times, durations and sizes, read from flags and written for people; text that a host said, what of a text a terminal
may have, and what a file looks like that is not what somebody took it for.
"""

from __future__ import annotations

import math
import re
from datetime import datetime, timezone

from deepep_bootstrap.core.errors import Problem, Trouble

GIB = 1024**3

REMOVED = "[removed]"
"""Stands where a secret was."""

LAST_SECOND = 253402300799
"""The end of the year 9999 in seconds since 1970: what comes later is no date for Python, nor for us."""

UNSAFE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
    r"|[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
"""Escape sequences of ECMA-48, the control characters of C0 and C1 but tab and newline, and the characters of Unicode's
bidirectional algorithm (UAX 9) that turn the order of what is shown."""

STORE_HASH = re.compile(r"\b([0-9a-z]{7})[0-9a-z]{25}(?=-)")

LONGEST_SAID = 2000
"""Characters that are shown of what a host said."""


class HostText:
    """Free text of a host, for showing only. It is no `str`: mypy does not let it be a word or a variable of a
    command, and remote.jobs.Job refuses it too. As text it has no control characters and a limit."""

    __slots__ = ("_text",)

    def __init__(self, text: str = "") -> None:
        self._text = text

    def __str__(self) -> str:
        return plain(self._text)[:LONGEST_SAID]

    def __repr__(self) -> str:
        return f"HostText({self._text!r})"

    def __bool__(self) -> bool:
        return bool(self._text)

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
    return value if math.isfinite(value) and 0 <= value <= LAST_SECOND else None


def moment(since_1970: float) -> datetime:
    """Return a time in seconds since 1970 as one of UTC; the nearest there is for a number that is no date. What is
    read is held to 0 … LAST_SECOND where it is read, so that a person hears of it."""
    known = since_1970 if math.isfinite(since_1970) else 0.0
    return datetime.fromtimestamp(min(max(known, 0), LAST_SECOND), timezone.utc)


def day(since_1970: float) -> str:
    """Return the day of a time in seconds since 1970, in UTC."""
    return f"{moment(since_1970):%Y-%m-%d}"


def plain(text: str) -> str:
    """Return a text as a terminal may have it: it shows what a host, a log or a file says, and obeys none of it."""
    return UNSAFE.sub("", text)


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


def three_digits(value: float) -> str:
    """Return a measured number with three significant digits, all those before the point, and no exponent: `0.00118`,
    `52.1`, `23745`."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = int(f"{value:.2e}".partition("e")[2])
    return f"{value:.{max(0, 2 - exponent)}f}"


def round_number(value: float) -> str:
    """Return a number that somebody wrote with three significant digits at most: `0.03`, `70.5`, `1637`."""
    text = three_digits(value)
    return text.rstrip("0").rstrip(".") if "." in text else text


def size(count: int) -> str:
    """Return `count` bytes in the unit a person would choose."""
    for unit, of_it in (("GiB", GIB), ("MiB", 1024**2), ("KiB", 1024)):
        if count >= of_it:
            return f"{count / of_it:.1f} GiB" if unit == "GiB" else f"{count / of_it:.0f} {unit}"
    return f"{count} byte{'' if count == 1 else 's'}"


LOCK, HOSTS = "a lock", "a hosts file"

FILE_KINDS = (
    ("JSON", re.compile(r"\A\s*[{\[]\s*[\"{\]}]")),
    ("a script", re.compile(r"\A#!")),
    (LOCK, re.compile(r"^\[(?:source|stack|indexes|system)\.[\w.-]+\]\s*$", re.MULTILINE)),
    ("a log", re.compile(r"^(?:deepep: |\[tuning\] |\[testing\] |\[config\] |Traceback \(most)", re.MULTILINE)),
    ("YAML", re.compile(r"\A---\s*$", re.MULTILINE)),
    ("TOML", re.compile(r"^\[\[?[\w.-]{1,100}\]\]?\s*$", re.MULTILINE)),
    (
        HOSTS,
        re.compile(
            r"^defaults [a-z_]+=|^[\w.@-]{1,100}\[\d[\d,-]*\]|^[\w.@-]{1,100} (?:role|user|port)=", re.MULTILINE
        ),
    ),
)
"""In the order in which they are tried."""

LOOKED_AT = 64 * 1024
"""Characters of a file that are looked at."""


def looks_like(text: str) -> str:
    """Return what a text looks like, "" where that is not known."""
    head = text[:LOOKED_AT]
    return next((kind for kind, pattern in FILE_KINDS if pattern.search(head)), "")


def other_than(text: str, wanted: str) -> str:
    """Return that a file looks like something other than what was `wanted` ("a hosts file"), "" where it does not."""
    found = looks_like(text)
    return f"this looks like {found}, not {wanted}" if found not in {"", wanted} else ""
