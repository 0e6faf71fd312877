"""Data lines, as recipes print them on standard output: `key=value` with fields separated by tabs, read
against a list of known keys and of what each of their fields may hold (inventory.forms).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache

from msgspec import Struct, field

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.text import HostText

SHOWN = 80
"""How many characters of an unexpected line a message shows."""

FAULTS = 5
"""How many unexpected lines are told; of more there is the count."""


class ValueForm(Struct, frozen=True):
    """What one field may hold: `pattern`, a regular expression, matches all of it, and a number lies in `span`.
    `wanted` says so to people. Without a pattern it is free text, which is for showing alone."""

    wanted: str
    pattern: str | None
    longest: int = 256
    span: tuple[int, int] | None = None

    @property
    def free(self) -> bool:
        """Whether it is free text."""
        return self.pattern is None

    def fits(self, text: str) -> bool:
        """Return whether a field may hold this text."""
        if self.pattern is None:
            return True
        if len(text) > self.longest or not _compiled(self.pattern).fullmatch(text):
            return False
        return self.span is None or not text.lstrip("-").isdecimal() or self.span[0] <= int(text) <= self.span[1]


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Return a compiled pattern. A command meets a few of a hundred: the rest are never compiled."""
    return re.compile(pattern)


Fields = tuple[ValueForm, ...]
"""The forms of a line's fields in their order. Free text stands last."""


class RecordForm(Struct, frozen=True, eq=False):
    """Which lines a recipe prints: keys that stand in one line at most and keys that may stand in many, each with
    the forms of its fields. `end` is the key of the last line, whose value is 1, and "" where a recipe has none. A form
    equals itself alone: what was read by it is kept (`_kept_line`)."""

    single: Mapping[str, Fields]
    many: Mapping[str, Fields] = field(default_factory=dict)
    end: str = ""

    def fields(self, key: str) -> Fields | None:
        """Return the forms of a line's fields; None for a key that no line has."""
        return self.single.get(key) or self.many.get(key)


class Records(Struct, frozen=True):
    """The lines that were read: for each key its lines in order, each split into fields, all of them of their form.
    What is free text is got by `shown` and `rows_with_text` alone, as HostText."""

    lines: Mapping[str, Sequence[tuple[str, ...]]]
    form: RecordForm

    def rows(self, key: str) -> Sequence[tuple[str, ...]]:
        """Return all lines of `key`, split into fields."""
        if key in _with_text(self.form):
            raise TypeError(f"{key} has free text, which is for showing alone")
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

    def rows_with_text(self, key: str) -> Sequence[tuple[tuple[str, ...], HostText]]:
        """Return, for all lines of `key`, the fields but the last, and that one, which is free text."""
        return tuple((fields[:-1], HostText(fields[-1])) for fields in self.lines.get(key, ()))

    def shown(self, key: str) -> HostText:
        """Return the free text of the one line of `key`, an empty one without that line."""
        return next((text for _, text in self.rows_with_text(key)), HostText())


def read_records(text: str, form: RecordForm, where: str, printer: str) -> Records:
    """Return the data lines of `text`. Trouble that names `where` (a host) and `printer` (a recipe) for the first
    FAULTS lines that are not of the `form`, with the number of the others, for every key whose value is not, and for
    an answer that was cut off."""
    lines: dict[str, list[tuple[str, ...]]] = {}
    strange: list[Problem] = []
    misfits: dict[str, Problem] = {}
    for line in filter(None, text.split("\n")):
        read = _kept_line(form, line) if len(line) <= LONGEST_KEPT else _line(form, line)
        again = f"a second line {read.key}" if read.key in form.single and read.key in lines else ""
        if fault := read.fault or again:
            strange.append(disagreement(where, printer, fault))
        elif read.misfit:
            # Of eight GPUs that are all alike one is enough to say so.
            misfits.setdefault(read.key, misfit_problem(where, printer, read.key, *read.misfit))
        else:
            lines.setdefault(read.key, []).append(read.fields)
    problems = [*strange[:FAULTS], *misfits.values()]
    if len(strange) > FAULTS:
        problems.append(disagreement(where, printer, f"{len(strange) - FAULTS} more such lines"))
    if problems:
        raise Trouble(*problems)
    if form.end and lines.get(form.end) != [("1",)]:
        cut = f"{len(text)} characters without the last line"
        raise Trouble(
            Problem(where, f"the answer of {printer} is cut off", cut, f"{form.end}=1", "the same command again")
        )
    return Records(lines, form)


LONGEST_KEPT, LINES_KEPT = 512, 4096
"""Characters of a line, and lines, that are kept once they were read. Equal hosts differ in some lines (name, boot,
addresses) and share the others, which are read once for all of them; lines of one host alone push each other out."""


class _Line(Struct, frozen=True):
    """One line that was read: its fields, and what is wrong with it as a whole, or with a value (found and wanted)."""

    key: str
    fields: tuple[str, ...]
    fault: str
    misfit: tuple[str, str] | None


def _line(form: RecordForm, line: str) -> _Line:
    key, _, value = line.partition("=")
    fields = tuple(value.split("\t"))
    fault = _fault(line, form)
    return _Line(
        key, fields, fault, None if fault else next(filter(None, map(_misfit, form.fields(key) or (), fields)), None)
    )


_kept_line = lru_cache(LINES_KEPT)(_line)


@cache
def _with_text(form: RecordForm) -> frozenset[str]:
    """Return the keys whose lines have free text."""
    both = (*form.single.items(), *form.many.items())
    return frozenset(key for key, fields in both if any(each.free for each in fields))


def _fault(line: str, form: RecordForm) -> str:
    """Return what is wrong with a line, or ""."""
    key, equals, value = line.partition("=")
    wanted = form.fields(key)
    if not equals or wanted is None:
        return f"the line {line[:SHOWN]!r}"
    if "\0" in line:
        return f"a zero byte in {line[:SHOWN]!r}"
    if (count := value.count("\t") + 1) != len(wanted):
        return f"{count} fields in {line[:SHOWN]!r}"
    return ""


def _misfit(form: ValueForm, text: str) -> tuple[str, str] | None:
    """Return a value that is not of its form, and what was wanted; None for one that is."""
    return None if form.fits(text) else (text, form.wanted)


def misfit_problem(where: str, printer: str, key: str, found: str, wanted: str) -> Problem:
    """Return the problem of a host that answers `key` with what it cannot be."""
    what = f"{printer} answers {key} with what cannot be, so nothing of it is believed"
    return Problem(where, what, repr(found[:SHOWN]), wanted, "a look at the tools of that host, or --limit to others")


def disagreement(where: str, printer: str, found: str) -> Problem:
    """Return the problem of a recipe and this program not being of one version."""
    return Problem(
        where, f"{printer} and this program disagree", found, "data lines of one version", "a fresh checkout"
    )


@lru_cache(LINES_KEPT)
def number(text: str, missing: int = 0) -> int:
    """Return a whole number; `missing` for an empty field and for the [N/A] of nvidia-smi; ValueError for anything
    else."""
    if not text or text.startswith("["):
        return missing
    if not re.fullmatch(r"-?[0-9]{1,15}", text):
        raise ValueError(f"{text[:SHOWN]!r} where a whole number should be")
    return int(text)


@lru_cache(LINES_KEPT)
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


@lru_cache(LINES_KEPT)
def driver_value(text: str) -> str:
    """Return a driver parameter in one spelling: `1`, `0x1` and `1;` are "1", `"PeerMappingOverride=0x1;"` is
    "PeerMappingOverride=1"."""
    parts = [part.strip().partition("=") for part in text.strip().strip('"').split(";") if part.strip()]
    return ";".join(f"{name}={one_spelling(value)}" if equals else one_spelling(name) for name, equals, value in parts)
