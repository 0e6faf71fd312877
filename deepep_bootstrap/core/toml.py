"""Checked reading of TOML tables: keys are taken out one by one, and everything wrong with them is noted for
one report.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import TypeVar
from urllib.parse import urlsplit

import tomli
from msgspec import Struct

from deepep_bootstrap.core.errors import Problem, Trouble

LONGEST = 80
MOST = 2**63 - 1
"""The largest whole number that TOML promises; sizes and counts of a lock are added up, and none comes near."""

KINDS: Mapping[type, str] = {
    str: "text in quotes",
    int: "a whole number",
    float: "a number with a point",
    bool: "true or false",
    list: "a list",
    dict: "a table",
}
T = TypeVar("T")
LARGEST = 2**63
"""Whole numbers of TOML have 64 bits; longer ones in base 16 are ones that Python reads, and cannot print."""


class ValueForm(Struct, frozen=True):
    """What a text must look like: a regular expression for the whole of it, and the same in words for a message."""

    pattern: str
    words: str

    def fits(self, text: str) -> bool:
        """Return whether the whole of `text` has this form."""
        return re.fullmatch(self.pattern, text) is not None


ANY = ValueForm(r"[\s\S]*", "text")
SOME = ValueForm(r"[\s\S]+", "text that is not empty")
NAME = ValueForm(r"[a-z0-9][a-z0-9._-]*", "a name of small letters, digits, dots and dashes")


def load_toml(text: str, path: str) -> dict[str, object]:
    """Return TOML `text` as plain values. Raises Trouble naming `path` and the line where it is not TOML."""
    try:
        data: dict[str, object] = tomli.loads(text)  # tomllib in compiled form: a third of its time for the lock
        if not _is_small(data):
            raise Trouble(Problem(path, "is not TOML: a number of more than 64 bits"))
    except (
        ValueError,
        RecursionError,
    ) as error:  # ValueError: TOML's own error, or a number that is too long even for Python
        raise Trouble(_explain(str(error), text, path)) from None
    return data


def _explain(message: str, text: str, path: str) -> Problem:
    """Return the problem for what the parser said, with the line that it means."""
    place = re.search(r" \(at line (\d+), column (\d+)\)$", message)
    lines = text.split("\n")
    number = int(place[1]) if place else len(lines)  # "(at end of document)"
    reason = message[: place.start()] if place else message
    if reason == "Cannot overwrite a value":
        reason = "this key is there twice"
    found = lines[number - 1]
    if place and len(found) > LONGEST:
        found = f"...{found[max(0, int(place[2]) - LONGEST // 2) :]}"
    return Problem(f"{path}:{number}", f"is not TOML: {reason}", _shorten(found.strip()))


def _shorten(text: str) -> str:
    """Return `text` as a message may show it: without what would steer a terminal, and not too long."""
    shown = text if text.isprintable() else repr(text)
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 3]}..."


def _is_small(value: object) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(map(_is_small, inner)) and not (isinstance(value, int) and not -LARGEST <= value < LARGEST)


class Table:
    """One table while it is read. `where` names it in messages, `problems` is the list they go to, shared by all tables
    of a file.

    Every reader returns a value of the asked type; where something is wrong that value is neutral and a problem is
    noted.
    """

    def __init__(self, data: Mapping[str, object], where: str, problems: list[Problem]) -> None:
        self.data = data
        self.where = where
        self.problems = problems
        self.known: list[str] = []

    def at(self, key: str) -> str:
        """Return where `key` of this table is, for a message."""
        shown = key if re.fullmatch(r"[\w.-]+", key, re.ASCII) else repr(key)
        return f"{self.where}.{shown}" if ": " in self.where else f"{self.where}: {shown}"

    def complain(self, key: str, what: str, found: object = None, wanted: str = "") -> None:
        """Note a problem with `key`; a long or unprintable `found` is shortened or escaped."""
        text = "" if found is None else _shorten(found if isinstance(found, str) else repr(found))
        self.problems.append(Problem(self.at(key), what, text, wanted))

    def take(self, key: str, kind: type[T], default: T | None = None, wanted: str = "") -> T:
        """Return the value of `key`, which must be exactly of type `kind`; without a default it must be there.
        `wanted`: in words."""
        self.known.append(key)
        if key not in self.data and default is not None:
            return default
        value = self.data.get(key)
        if type(value) is kind:
            return value
        if key in self.data:
            self.complain(key, "is of the wrong type", repr(value), KINDS[kind])
        else:
            self.complain(key, "is missing", wanted=wanted or KINDS[kind])
        return kind()

    def text(self, key: str, form: ValueForm) -> str:
        """Return the text of `key`, which must be there and have `form`; "" when it has not."""
        value = self.take(key, str, wanted=form.words)
        if type(self.data.get(key)) is not str:
            return ""
        if not form.fits(value):
            self.complain(key, "is not what belongs here", value or "nothing", form.words)
            return ""
        return value

    def address(self, key: str, form: ValueForm) -> str:
        """Return the address of `key`, which must be there, have `form`, and be one: its host and port can be told
        from it."""
        value = self.text(key, form)
        try:
            well = not value or (value.isascii() and value.isprintable() and urlsplit(value).port != 0)
        except ValueError:
            well = False
        if not well:
            self.complain(key, "is not what belongs here", value, f"{form.words}, in printable ASCII")
        return value if well else ""

    def number(self, key: str, least: int, most: int = MOST) -> int:
        """Return the whole number of `key`, which must be there and from `least` to `most`; `least` where it is not."""
        value = self.take(key, int)
        if type(self.data.get(key)) is not int:
            return value
        if value < least:
            self.complain(key, "is too small", value, f"{least} or more")
        elif value > most:
            self.complain(key, "is too large", value, f"{most} at most")
        return min(max(value, least), most)

    def words(self, key: str, form: ValueForm) -> tuple[str, ...]:
        """Return the list of texts of `key`, each of `form`; the key may be absent."""
        values = self.take(key, list, [])
        for value in values:
            if not isinstance(value, str) or not form.fits(value):
                self.complain(key, "holds something that does not belong there", value, form.words)
        return tuple(str(value) for value in values)

    def tables(self, key: str) -> Iterator[Table]:
        """Return the tables in the list of `key`, numbered from 1 in messages; the key may be absent."""
        for number, value in enumerate(self.take(key, list, []), 1):
            if isinstance(value, dict):
                yield Table(value, f"{self.at(key)}[{number}]", self.problems)
            else:
                self.complain(key, f"entry {number} is no table", value)

    def named(self, key: str, form: ValueForm = NAME) -> Iterator[tuple[str, Table]]:
        """Return the tables in the table of `key` with their names, which must have `form`; the key may be absent."""
        inner = self.inner(key)
        for name in inner.data:
            if not form.fits(name):
                inner.complain(name, "this name cannot be used", wanted=form.words)
            table = inner.inner(name)
            if isinstance(inner.data[name], dict):
                yield name, table

    def inner(self, key: str) -> Table:
        """Return the table of `key`, empty when it is absent."""
        return Table(self.take(key, dict, {}), self.at(key), self.problems)

    def close(self) -> None:
        """Note every key that nobody has taken, with the nearest known one."""
        for key in self.data:
            if key not in self.known:
                near = difflib.get_close_matches(key, self.known, 1)
                self.complain(
                    key,
                    f"unknown key, did you mean {near[0]}?" if near else "unknown key",
                    wanted=", ".join(self.known),
                )
