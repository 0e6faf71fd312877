"""The lock's text: values replaced in place, with comments, order and every other byte as they were. Text in, text out."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.toml import load

Place = tuple[str, ...]
"""Where a value is: the names of its tables and its key, such as ("source", "nvshmem", "rev")."""


def rewrite(text: str, values: Mapping[Place, str | int], path: str) -> str:
    """Return the lock `text` with `values` in place of what stood there; `path` names it in messages.

    Every place must be there already. The result is read again: it must say exactly what was asked and differ in no other line.
    Raises Trouble where that cannot be, and leaves it to a person then.
    """
    wanted: dict[str, Any] = load(text, path)
    document = tomlkit.parse(text)
    for place, value in values.items():
        _put(document, place, value, path)
        _put(wanted, place, value, path)
    new = tomlkit.dumps(document)
    if load(new, path) != wanted or not _touches_only(text, new, len(values)):
        lines = ", ".join(f"{'.'.join(place)} = {value!r}" for place, value in values.items())
        raise Trouble(Problem(path, "cannot be rewritten without touching other lines", try_=f"writing by hand: {lines}"))
    return new


def diff(old: str, new: str, path: str) -> str:
    """Return the difference of two texts of the lock as a unified diff without context; "" where there is none."""
    return "".join(difflib.unified_diff(old.splitlines(keepends=True), new.splitlines(keepends=True), path, path, n=0))


def _put(table: MutableMapping[str, Any], place: Sequence[str], value: str | int, path: str) -> None:
    for number, name in enumerate(place):
        if not isinstance(table, MutableMapping) or name not in table:
            raise Trouble(Problem(path, "has no such key to rewrite", wanted=".".join(place[: number + 1])))
        if number < len(place) - 1:
            table = table[name]
    try:
        if table[place[-1]] != value:
            table[place[-1]] = value
    except TOMLKitError as error:
        raise Trouble(Problem(path, f"cannot be rewritten: {error}", wanted=".".join(place))) from None


def _touches_only(old: str, new: str, most: int) -> bool:
    """Return whether two texts have the same lines but for at most `most` of them."""
    before, after = old.split("\n"), new.split("\n")
    changed = [pair for pair in zip(before, after, strict=False) if pair[0] != pair[1]]
    return len(before) == len(after) and len(changed) <= most
