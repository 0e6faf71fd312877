"""Facts read back from the document of `invoke facts`, held to what the dataclasses say they are. Pure."""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.inventory.facts import Facts

SCHEMA = 1


def read(text: str, where: str) -> dict[str, Facts]:
    """Return the facts of every host in a document of `invoke facts`; {} for no text. Trouble for a text that is none, naming the host
    and the key. Keys that are missing have their defaults: facts grow from version to version."""
    if not text.strip():
        return {}
    try:
        document = json.loads(text)
        hosts = document["hosts"] if document["schema"] == SCHEMA else None
    except (ValueError, KeyError, TypeError, RecursionError):
        hosts = None
    if not isinstance(hosts, dict):
        raise Trouble(Problem(where, "these are no facts of hosts", wanted=f"the document of `invoke facts --json`, schema {SCHEMA}"))
    try:
        return {name: _made(Facts, seen, name) for name, seen in hosts.items()}
    except TypeError as error:
        raise Trouble(Problem(where, "facts of a host cannot be read", str(error), "what `invoke facts --json` prints")) from None


@functools.cache
def _types(kind: Any) -> Mapping[str, Any]:
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}


def _made(kind: Any, value: Any, path: str) -> Any:
    """Return `value` as what the annotation `kind` says; TypeError with the place of what is not."""
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        if not isinstance(value, dict):
            raise TypeError(f"{path} is no table")
        return _record(kind, value, path)
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError(f"{path} is no list")
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else list(inner)
        if len(kinds) != len(value):
            raise TypeError(f"{path} has {len(value)} parts")
        return tuple(_made(one, each, f"{path}[{number}]") for number, (one, each) in enumerate(zip(kinds, value, strict=True)))
    if origin in {Union, types.UnionType}:
        return None if value is None else _made(next(one for one in inner if one is not type(None)), value, path)
    return _plain(kind, value, path)


def _record(kind: Any, value: Mapping[str, Any], path: str) -> Any:
    """Return a dataclass with the keys of `value` that it knows; TypeError names those that it cannot do without."""
    needed = [each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING and each.name not in value]
    if needed:
        raise TypeError(f"{path} lacks {', '.join(needed)}")
    return kind(**{name: _made(one, value[name], f"{path}.{name}") for name, one in _types(kind).items() if name in value})


def _plain(kind: Any, value: Any, path: str) -> Any:
    """Return a number, a truth or a text; a float may be written as a whole number, half a character is no text."""
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind or (kind is str and any("\ud800" <= letter <= "\udfff" for letter in value)):
        raise TypeError(f"{path} is {type(value).__name__}, not {getattr(kind, '__name__', kind)}")
    return value
