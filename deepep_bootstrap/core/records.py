"""Data lines, as recipes print them on standard output: `key=value` with fields separated by tabs, read
against a list of known keys.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from deepep_bootstrap.core.errors import Problem, Trouble

SHOWN = 80
"""How many characters of an unexpected line a message shows."""


@dataclass(frozen=True)
class RecordForm:
    """Which lines a recipe prints: keys that stand in one line at most and keys that may stand in many, each with
    the number of its fields. `end` is the key of the last line, whose value is 1, and "" where a recipe has none."""

    single: Mapping[str, int]
    many: Mapping[str, int] = field(default_factory=dict)
    end: str = ""


@dataclass(frozen=True)
class Records:
    """The lines that were read: for each key its lines in order, each split into fields."""

    lines: Mapping[str, Sequence[tuple[str, ...]]]

    def rows(self, key: str) -> Sequence[tuple[str, ...]]:
        """Return all lines of `key`, split into fields."""
        return self.lines.get(key, ())

    def words(self, key: str) -> tuple[str, ...]:
        """Return the first field of every line of `key`."""
        return tuple(fields[0] for fields in self.rows(key))

    def text(self, key: str) -> str:
        """Return the first field of the one line of `key`, "" without that line."""
        return next((fields[0] for fields in self.rows(key)), "")

    def number(self, key: str, missing: int = 0) -> int:
        """Return the value of `key` as a whole number, `missing` where nothing is said; ValueError for anything
        else."""
        return number(self.text(key), missing)

    def truth(self, key: str) -> bool:
        """Return whether the value of `key` is 1."""
        return self.text(key) == "1"


def read_records(text: str, form: RecordForm, where: str, printer: str) -> Records:
    """Return the data lines of `text`. Trouble that names `where` (a host) and `printer` (a recipe) for every line
    that is not of the `form`, and for an answer that was cut off."""
    lines: dict[str, list[tuple[str, ...]]] = {}
    faults = []
    for line in filter(None, text.split("\n")):
        key, _, value = line.partition("=")
        if fault := _fault(line, form, lines.keys()):
            faults.append(fault)
        else:
            lines.setdefault(key, []).append(tuple(value.split("\t")))
    if faults:
        raise Trouble(*(disagreement(where, printer, fault) for fault in faults))
    if form.end and lines.get(form.end) != [("1",)]:
        cut = f"{len(text)} characters without the last line"
        raise Trouble(
            Problem(where, f"the answer of {printer} is cut off", cut, f"{form.end}=1", "the same command again")
        )
    return Records(lines)


def _fault(line: str, form: RecordForm, known: Collection[str]) -> str:
    """Return what is wrong with a line, or ""; `known` are the keys of the lines before it."""
    key, equals, value = line.partition("=")
    wanted = form.single.get(key) or form.many.get(key)
    if not equals or wanted is None:
        return f"the line {line[:SHOWN]!r}"
    if "\0" in line:
        return f"a zero byte in {line[:SHOWN]!r}"
    if (count := value.count("\t") + 1) != wanted:
        return f"{count} fields in {line[:SHOWN]!r}"
    return f"a second line {key}" if key in form.single and key in known else ""


def disagreement(where: str, printer: str, found: str) -> Problem:
    """Return the problem of a recipe and this program not being of one version."""
    return Problem(
        where, f"{printer} and this program disagree", found, "data lines of one version", "a fresh checkout"
    )


def number(text: str, missing: int = 0) -> int:
    """Return a whole number; `missing` for an empty field and for the [N/A] of nvidia-smi; ValueError for anything
    else."""
    if not text or text.startswith("["):
        return missing
    if not re.fullmatch(r"-?[0-9]{1,15}", text):
        raise ValueError(f"{text[:SHOWN]!r} where a whole number should be")
    return int(text)


def decimal(text: str, missing: float = 0.0) -> float:
    """Return a number such as 100 or 2.5; `missing` for an empty field; ValueError for anything else."""
    if not text:
        return missing
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", text):
        raise ValueError(f"{text[:SHOWN]!r} where a number should be")
    return float(text)


def one_spelling(text: str) -> str:
    """Return a whole number in decimal, whatever its spelling (0x1F, 31); any other text as it is."""
    return str(int(text, 0)) if re.fullmatch(r"0[xX][0-9a-fA-F]{1,16}|0|[1-9][0-9]{0,19}", text) else text


def driver_value(text: str) -> str:
    """Return a driver parameter in one spelling: `1`, `0x1` and `1;` are "1", `"PeerMappingOverride=0x1;"` is
    "PeerMappingOverride=1"."""
    parts = [part.strip().partition("=") for part in text.strip().strip('"').split(";") if part.strip()]
    return ";".join(f"{name}={one_spelling(value)}" if equals else one_spelling(name) for name, equals, value in parts)


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts mlx5_2 before mlx5_10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]{1,9})", name)]
