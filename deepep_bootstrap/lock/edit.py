"""Changes of the lock's text: values and lists of wheels replaced in place, with comments, order and every
other byte as they were.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from itertools import zip_longest
from typing import Any

import tomlkit
from msgspec.structs import asdict
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import String, StringType

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.toml import load_toml
from deepep_bootstrap.lock.model import Wheel

Place = tuple[str, ...]
"""Where a value is: the names of its tables and its key, such as ("source", "nvshmem", "rev")."""


def rewrite(text: str, values: Mapping[Place, str | int], path: str) -> str:
    """Return the lock `text` with `values` in place of what stood there; `path` names it in messages.

    Every place must be there already. The result is read again: it must say exactly what was asked and differ in no
    other line. Raises Trouble where that cannot be, and leaves it to a person then.
    """
    wanted: dict[str, Any] = load_toml(text, path)
    document = tomlkit.parse(text)
    for place, value in values.items():
        _put(document, place, value, path)
        _put(wanted, place, value, path)
    new = tomlkit.dumps(document)
    if load_toml(new, path) != wanted or not _touches_only(text, new, len(values)):
        lines = ", ".join(f"{'.'.join(place)} = {value!r}" for place, value in values.items())
        raise Trouble(
            Problem(path, "cannot be rewritten without touching other lines", try_=f"writing by hand: {lines}")
        )
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


HEADER = re.compile(r"^[ \t]*\[{1,2}(?P<name>[^\[\]\n{]+)\]{1,2}[ \t]*(?:#.*)?\r?$", re.MULTILINE)
TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*|[\[\]]')
"""What matters while looking for the end of a list: strings and comments, in which brackets mean nothing, and
brackets."""
INDENT = "  "

Target = tuple[str, str]
"""Stack and target, such as ("v1", "cp312-x86_64")."""


def put_wheels(text: str, lists: Mapping[Target, Sequence[Wheel]], path: str) -> str:
    """Return the lock `text` with these lists of wheels in place of those that stand there, or added to their stack;
    `path` names it in messages. Lines of wheels that stay are kept as they are, with comments above them.

    The result is read again: it must say exactly what was asked. Raises Trouble where that cannot be, and leaves it to
    a person then.
    """
    wanted: dict[str, Any] = load_toml(text, path)
    for (stack, target), wheels in lists.items():
        wanted["stack"][stack].setdefault("wheels", {})[target] = [asdict(wheel) for wheel in wheels]
        text = _put_wheel(text, (stack, target), wheels, path)
    if load_toml(text, path) != wanted:
        raise _by_hand(path, ", ".join(f"stack.{stack}.wheels.{target}" for stack, target in lists))
    return text


def line(wheel: Wheel) -> str:
    """Return a wheel as an entry of its list."""
    values = ", ".join(f"{key} = {_literal(value)}" for key, value in asdict(wheel).items())
    return f"{{ {values} }},"


def _literal(value: str | int) -> str:
    return String.from_raw(value, StringType.SLB).as_string() if isinstance(value, str) else str(value)


def _by_hand(path: str, keys: str) -> Trouble:
    return Trouble(
        Problem(
            path, "cannot be rewritten without touching other lines", keys, try_="writing it by hand, one wheel a line"
        )
    )


def _put_wheel(text: str, where: Target, wheels: Sequence[Wheel], path: str) -> str:
    stack, target = where
    newline = "\r\n" if "\r\n" in text else "\n"
    span = _list_span(text, where)
    if span:
        start, end = span
        if comment := re.compile(r"[ \t]*#[^\r\n]*").match(text, start, end):
            start = comment.end()
        return text[:start] + newline.join(["", *_body(text[start:end], wheels), ""]) + text[end:]
    at = _end_of_stack(text, stack)
    if at is None:
        raise _by_hand(path, f"stack.{stack}.wheels.{target}")
    head = "" if text[:at].endswith("\n") else newline
    return text[:at] + head + newline.join([f"wheels.{target} = [", *_body("", wheels), "]", ""]) + text[at:]


def _body(old: str, wheels: Sequence[Wheel]) -> Iterator[str]:
    """Yield the lines of a list: those of wheels that stay as they are, new ones for the others; comments go with
    the next wheel."""
    kept: dict[str, tuple[list[str], str]] = {}
    above: list[str] = []
    for text in old.replace("\r\n", "\n").split("\n"):
        if text.lstrip().startswith("#"):
            above.append(text.rstrip())
        elif name := re.search(r'\bname\s*=\s*["\']([^"\']+)["\']', text):
            kept[name[1]] = (above, text)
            above = []
    for wheel in wheels:
        comments, text = kept.get(wheel.name, ([], ""))
        yield from comments
        same = text.strip().startswith("{") and _said(text) == [asdict(wheel)]
        yield text if same else INDENT + line(wheel)
    yield from above


def _said(text: str) -> object:
    """Return what one line of a list says; None where it is no line by itself."""
    try:
        return load_toml(f"x = [\n{text}\n]\n", "").get("x") if re.search(r"\},\s*(?:#.*)?$", text) else None
    except Trouble:
        return None


def _tables(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield the tables by name, without quotes, with where what they hold begins and ends."""
    found = list(HEADER.finditer(text))
    for match, following in zip_longest(found, found[1:]):
        yield re.sub(r"[\s\"']", "", match["name"]), match.end(), following.start() if following else len(text)


def _list_span(text: str, where: Target) -> tuple[int, int] | None:
    """Return where the list of a target begins, behind its bracket, and where its closing bracket is."""
    stack, target = where
    for name, start, end in _tables(text):
        prefix = {f"stack.{stack}": r"[\"']?wheels[\"']?[ \t]*\.[ \t]*", f"stack.{stack}.wheels": ""}.get(name)
        if prefix is None:
            continue
        key = re.compile(rf"^[ \t]*{prefix}[\"']?{re.escape(target)}[\"']?[ \t]*=[ \t]*\[", re.MULTILINE)
        match = key.search(text, start, end)
        if match:
            return match.end(), _closing(text, match.end())
    return None


def _closing(text: str, start: int) -> int:
    depth = 1
    for token in TOKEN.finditer(text, start):
        depth += {"[": 1, "]": -1}.get(token[0], 0)
        if depth == 0:
            return token.start()
    return len(text)


def _end_of_stack(text: str, stack: str) -> int | None:
    """Return where the table of a stack ends: behind its last line that is neither empty nor a comment, which may be
    about what follows."""
    for name, start, end in _tables(text):
        if name == f"stack.{stack}":
            lines = text[start:end].splitlines(keepends=True)
            while lines and (not lines[-1].strip() or lines[-1].lstrip().startswith("#")):
                lines.pop()
            return start + sum(len(each) for each in lines) if lines else end
    return None
