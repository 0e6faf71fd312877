"""What people paste around a log: commands that they typed, tables of states, exit codes that they asked for."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence

from msgspec import Struct

from deepep_bootstrap.analysis.diagnosis.log import bare

AT_PROMPT = r"(?:\(\S{1,40}\) )?(?:\[?[\w.-]+@[\w.-]+[: ][^#$\n]{0,80}[#$]|\$) "
"""A prompt, with or without the name of a virtual environment before it."""

COMMAND = re.compile(rf"(?:{AT_PROMPT}|(?P<traced>\++) )(?=\S)(?P<text>(?:(?P<name>[a-z]+)\b)?.*)")
"""A command that somebody typed at a prompt, or that `set -x` prints before it runs (`traced`)."""

LOOKS = frozenset(("ls", "stat", "cat", "find", "grep", "which", "readlink", "du", "head", "tail"))
"""Commands by which somebody looks whether something is there."""

PAUSES = re.compile(r"(?:sleep|echo|true|test|let)\b|\[|\(\(")
"""What a script runs between two tries of a command."""

ONLY_LOOKS = re.compile(
    rf"(?:sudo )?(?:{'|'.join(sorted(LOOKS))}|dmesg|journalctl|squeue|sinfo|sacct|scontrol show|ps|df|free"
    r"|systemctl status|kubectl (?:\S+ \S+ )?(?:get|describe|logs)|docker (?:ps|logs|inspect))\b"
)
"""A command that only shows what others did: that it shows no failure any more says nothing about the one before."""

SOURCE = re.compile(r"\s+raise [\w.]+(?:\(|$)|[\w.-]+ = [\[{]\s*$")
"""A line of a program in Python that raises an exception, or one of settings in TOML: an error where it runs, and none
where it is shown."""

COLUMNS = re.compile(r"\s*(?:[A-Z][A-Z0-9_()/%:.-]+(?: [A-Z0-9_()/%:.-]+)?(?: +|$)){3,}")
"""The head of a table, as squeue, sinfo and kubectl print it: words in capitals alone."""

DASHES = re.compile(r"[ \t]*-{3,}(?:[ \t]+-{3,}){2,}[ \t]*")
"""What sacct puts below the head of its table."""

ROW = re.compile(r"(?!.*\w: ).*\S {2,}\S")
"""A row of one: gaps, and no message behind a colon."""

TELLING = "MESSAGE"
"""A column whose rows tell what happened, when it did."""

ROWS = 200
"""Lines that a table may have, and what a command prints that is looked at as a whole."""

PING = re.compile(r"PING \S|\d+ packets transmitted, |ping: ")
"""What ping prints."""

ECHO = re.compile(r"echo (?:-e )?(?P<said>\S.*)")
"""A script says something."""

CODE = re.compile(r"\s*\d{1,3}\s*")
ASKED = re.compile(r"echo \$\?\s*$")
"""Somebody asks for the exit code of the command before."""


def is_command(line: str) -> bool:
    """Return whether a line is a command that a shell is about to run, or that somebody typed."""
    return _command(line) is not None


def only_looks(line: str) -> bool:
    """Return whether a line is a command that only shows what others did: what it asks for is no sign of it."""
    typed = _command(line)
    return typed is not None and ONLY_LOOKS.match(typed["text"]) is not None


def _command(line: str) -> re.Match[str] | None:
    return COMMAND.match(line) or COMMAND.match(bare(line))


def is_row(lines: Sequence[str], number: int) -> bool:
    """Return whether a line is a row of a table of states: they are looked at when something failed already."""
    for above in range(number, max(-1, number - ROWS), -1):
        if COLUMNS.fullmatch(lines[above]) or DASHES.fullmatch(lines[above]):
            return above != number and TELLING not in lines[above]
        if ROW.match(lines[above]) is None:
            return False
    return False


def is_of_ping(line: str) -> bool:
    """Return whether a line is one that ping prints: somebody asks for the way to a host when something failed
    already."""
    return PING.match(line) is not None


def is_answer(lines: Sequence[str], number: int) -> bool:
    """Return whether a line is what a command says by which somebody looked for a file that is not there: they look
    when something failed already, or before they try."""
    name = lines[number].partition(":")[0]
    if name not in LOOKS:
        return False
    above = next((n for n in range(number - 1, max(-1, number - ROWS), -1) if not lines[n].startswith(f"{name}: ")), -1)
    typed = COMMAND.match(lines[above]) if above >= 0 else None
    return typed is not None and typed["name"] == name


def is_echoed(lines: Sequence[str], number: int) -> bool:
    """Return whether a line is what a script says by an `echo` that `set -x` printed before: it says so after another
    command failed."""
    typed = COMMAND.match(lines[number - 1]) if number else None
    echo = ECHO.match(typed["text"].strip()) if typed else None
    return echo is not None and echo["said"].strip("'\"") == lines[number].strip()


def worked_at_last(lines: Sequence[str], fails: Callable[[range], bool]) -> frozenset[int]:
    """Return the lines, counted from 0, of a command that somebody typed again further down, or that a script tried
    again at once, where it printed little the last time, and among those lines nothing `fails`."""
    runs = defaultdict[tuple[str, int], list[range]](list)
    commands = [(number, match) for number, line in enumerate(lines) if (match := COMMAND.match(line))]
    ends = [*(number for number, _ in commands[1:]), len(lines)]
    row, before = 0, ""
    for (number, command), end in zip(commands, ends, strict=False):
        text = command["text"].strip()
        if command["traced"] and PAUSES.match(text) is None:
            row, before = row + (text != before), text
        if not ONLY_LOOKS.match(text):
            runs[text, row if command["traced"] else 0].append(range(number, end))
    worked = (each for each in runs.values() if len(each) > 1 and len(each[-1]) <= ROWS and not fails(each[-1]))
    return frozenset(number for each in worked for run in each[:-1] for number in run)


class ExitCode(Struct, frozen=True):
    """An exit code that somebody asked for, and the line, from 0, that says it."""

    line: int
    code: int


def asked_code(lines: Sequence[str]) -> ExitCode | None:
    """Return the last exit code that somebody asked for; None for none."""
    pairs = range(len(lines) - 1, 0, -1)
    line = next((n for n in pairs if CODE.fullmatch(lines[n]) and ASKED.search(lines[n - 1])), None)
    return None if line is None else ExitCode(line, int(lines[line]))
