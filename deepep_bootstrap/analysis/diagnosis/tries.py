"""What a log shows to have been tried and got over without a command that was typed again: hosts that ssh reached at
last, and test programs by which a build in Python asks what a compiler can do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

REFUSED = re.compile(r"ssh: (?:Could not resolve hostname|connect to host) (?P<host>[\w.:-]+?):? ")
REACHED = re.compile(r"Permanently added '\[?(?P<hosts>[\w.:,\]-]+)'")
"""What ssh says of a host that it had not met before, once it is connected: the name, and mostly the address."""

TEST_PROGRAM = "_configtest."
"""distutils writes a program of this name, compiles and links it, says `success!` or `failure.`, and removes it."""

FAILURE = re.compile(r"\W*failure\.\s*")
TEST_LINES = 60
"""Lines that the compiler may print about such a program."""


def harmless_tries(lines: Sequence[str]) -> frozenset[int]:
    """Return the lines, counted from 0, of tries that failed and did no harm."""
    return frozenset((*_refused_first(lines), *_only_asked(lines)))


def _refused_first(lines: Sequence[str]) -> set[int]:
    """Return the lines on which ssh did not reach a host that it reached further down."""
    refused: dict[str, list[int]] = {}
    over: set[int] = set()
    for number, line in enumerate(lines):
        if "ssh: " in line and (match := REFUSED.search(line)):
            refused.setdefault(match["host"], []).append(number)
        elif "Permanently added" in line and (match := REACHED.search(line)):
            for host in match["hosts"].split(","):
                over.update(refused.pop(host.rstrip("]"), ()))
    return over


def _only_asked(lines: Sequence[str]) -> set[int]:
    """Return the lines about test programs that did not build, where the build went on."""
    failed = (number for number, line in enumerate(lines) if "failure." in line and FAILURE.fullmatch(line))
    return {line for number in failed if _goes_on(lines, number) for line in _about_test(lines, number)}


def _about_test(lines: Sequence[str], end: int) -> range:
    """Return the lines about a test program up to `end`, on which its failure is told."""
    above = range(end, max(-1, end - TEST_LINES), -1)
    first = next((number for number in above if TEST_PROGRAM in lines[number]), end + 1)
    return range(first, end + 1)


def _goes_on(lines: Sequence[str], number: int) -> bool:
    """Return whether a build goes on after a line, but for removing its test program."""
    below = (lines[after].strip() for after in range(number + 1, len(lines)))
    said = next((line for line in below if line and TEST_PROGRAM not in line), "error")
    return not said.startswith("error")
