"""Values read from JSON, held to what the fields of a frozen dataclass say they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

T = TypeVar("T")


def _is_text(value: object) -> bool:
    # JSON can spell half a character, which nothing can write down.
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _are_texts(value: object) -> bool:
    return isinstance(value, tuple) and all(map(_is_text, value))


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(_is_text, (*value, *value.values())))


def _is_table_of_tables(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(_is_text, value)) and all(map(_is_table, value.values()))


KINDS: Mapping[str, Callable[[object], bool]] = {
    "str": _is_text,
    "tuple[str, ...]": _are_texts,
    "Mapping[str, str]": _is_table,
    "Mapping[str, Mapping[str, str]]": _is_table_of_tables,
}
"""Annotations, as they are written, and what fits them; a field of any other is for who made its value."""


def made(kind: type[T], found: Mapping[str, Any]) -> T:
    """Return the dataclass `kind` with the values `found`, lists as tuples; KeyError with what is missing, TypeError
    for what it does not have, or is not of that kind."""
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    required = [name for name, each in known.items() if each.default is MISSING and each.default_factory is MISSING]
    if missing := [name for name in required if name not in values]:
        raise KeyError(", ".join(sorted(missing)))
    kinds = {name: KINDS.get(str(each.type)) for name, each in known.items()}
    if wrong := [name for name, fits in kinds.items() if fits and name in values and not fits(values[name])]:
        raise TypeError(f"not what belongs there: {', '.join(sorted(wrong))}")
    return kind(**values)
