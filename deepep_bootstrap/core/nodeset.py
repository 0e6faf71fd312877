"""Node sets such as `b200-[001-016]`: expanded and folded by ClusterShell, without its group upcalls and
with a bound on the size.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

MOST_NAMES = 10_000
COMMA_OR_BRACKET = re.compile(r"[\[\],]")
BRACKETS = re.compile(r"\[([^\[\]]*)\]")
RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?:/([1-9]\d{0,5}))?)?", re.ASCII)
ONE_NUMBER = re.compile(r"([A-Za-z._-]*)([0-9]{1,9})([A-Za-z._-]*)", re.ASCII)
SETS_KEPT = 256
"""Sets of hosts that were folded: most are told more than once."""
LONGEST_SHOWN = 120
"""Characters of a set on a screen: some twenty ranges."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")


def pieces(entry: str) -> list[str]:
    """Return the parts of `a[1-2,5],b,user@c:22` between the commas that stand outside brackets, in their order."""
    # From the end, in one pass: a comma is inside where the next bracket behind it closes one.
    parts: list[str] = []
    end, inside = len(entry), False
    for found in reversed(list(COMMA_OR_BRACKET.finditer(entry))):
        if found[0] != ",":
            inside = found[0] == "]"
        elif not inside:
            parts.append(entry[found.end() : end])
            end = found.start()
    return [entry[:end], *reversed(parts)]


def expand(pattern: str) -> list[str] | str:
    """Return the names of a ClusterShell pattern, or, as one string, what a right one would look like."""
    if pattern.count(":") > 1:
        try:
            return [str(ipaddress.ip_address(pattern))]
        except ValueError:
            return "a host name, a node set or an IP address"
    if not NAME.fullmatch(BRACKETS.sub("0", pattern)):
        return "a node set of letters, digits, '.', '_', '-' such as b200-[001-016]"
    sizes = [_range_size(group) for group in BRACKETS.findall(pattern)]
    if not all(sizes):
        return "ranges such as [001-016] or [1-9/2,12]"
    if math.prod(sizes) > MOST_NAMES:
        return f"at most {MOST_NAMES} hosts"
    try:
        names = [str(name) for name in NodeSet(pattern, resolver=RESOLVER_NOGROUP)]
    except NodeSetException as error:
        return f"a node set that ClusterShell can read ({error})"
    return names


def _range_size(group: str) -> int:
    """Return how many numbers a bracket group such as `001-016,20` holds; 0 when it is malformed."""
    total = 0
    for part in group.split(","):
        match = RANGE.fullmatch(part)
        first, last, step = match.groups() if match else ("1", "0", None)
        size = (int(last or first) - int(first)) // int(step or 1) + 1
        if size < 1:
            return 0
        total += size
    return total


def outside_brackets(entry: str) -> str:
    """Return `entry` without its bracketed ranges, in which a slash is a step and no path."""
    return BRACKETS.sub("", entry)


def fold(names: Iterable[str]) -> str:
    """Return host names as one folded set with its size, e.g. `b200-[003,017] (2)`; a single name stands alone."""
    return _folded(tuple(dict.fromkeys(names)))


@lru_cache(SETS_KEPT)
def _folded(unique: tuple[str, ...]) -> str:
    if len(unique) == 1:
        return unique[0]
    if (text := _one_range(unique)) is None:
        try:
            text = str(NodeSet.fromlist(unique, resolver=RESOLVER_NOGROUP))
        except NodeSetException:
            text = ", ".join(unique)
    return f"{text} ({len(unique)})"


def fold_short(names: Iterable[str]) -> str:
    """Return the same for a screen: of a set with many gaps the first ranges, and how many hosts it has."""
    text = fold(names)
    if len(text) <= LONGEST_SHOWN:
        return text
    count = text.rpartition(" ")[2]
    start = text[:LONGEST_SHOWN].rpartition(",")[0]
    return f"{start},…{']' if start.count('[') > start.count(']') else ''} {count}"


def _one_range(names: Sequence[str]) -> str | None:
    """Return names that differ in one number of one width, as ClusterShell would fold them; None for others, which it
    has to fold. It takes 50 times as long, and a verb on a thousand hosts folds dozens of large sets."""
    found = [match for match in map(ONE_NUMBER.fullmatch, names) if match]
    shapes = {(match[1], len(match[2]), match[3]) for match in found}
    if len(shapes) != 1 or len(found) != len(names):
        return None
    ((before, width, behind),) = shapes
    runs = [(f"{first:0{width}}", f"{last:0{width}}") for first, last in _runs(sorted(int(each[2]) for each in found))]
    parts = (first if first == last else f"{first}-{last}" for first, last in runs)
    return f"{before}[{','.join(parts)}]{behind}"


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and the last of each run of ascending numbers without a gap."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs
