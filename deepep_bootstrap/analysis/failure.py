"""The line that says why a program failed: of a traceback the last one, of a refused command line that of argparse, of
anything else the first error. What a launcher says of an exit code counts only where nothing better is there.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct, field

from deepep_bootstrap.analysis.diagnosis.log import ESCAPES, LABEL, TIME, Evidence
from deepep_bootstrap.analysis.results.scanner import is_launchers, tokens

CONSEQUENCES = frozenset(
    (
        *("ProcessRaisedException", "ProcessExitedException", "ChildFailedError", "CalledProcessError", "SystemExit"),
        *("KeyboardInterrupt", "BrokenPipeError", "ConnectionResetError", "DistNetworkError", "EOFError"),
    )
)
"""Exceptions by which a process says that another one failed."""

HEAD = "Traceback (most recent call last):"
FRAME = re.compile(r'\s+File "(?P<path>[^"]+)", line (?P<line>\d+)')
EXCEPTION = re.compile(r"(?P<name>(?:[A-Za-z_]\w*\.)*[A-Z]\w*)(?::|$)")
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
IGNORED = "Exception ignored"
REFUSED = re.compile(r"(?:[\w./-]+/)?[\w.-]+: error: ")
"""How argparse refuses a command line, below its usage."""

PROGRAM = re.compile(r"(?:[\w./-]+/)?[\w-]+\.py: error: ")
"""The same without a usage, as the examples refuse to run where they cannot: only a program in Python says it so."""

OF_IMPORT = re.compile(r"^(ImportError: .*?) \([^()]*\)$")
"""Where the module lies that lacks a name: the store's long path says nothing to a person."""

LIBRARIES = ("site-packages/", "dist-packages/", "/lib/python3", "<")
"""Parts of paths of frames that are not the program's own."""

LONGEST = 300
"""Characters of the line that are shown."""

STRONG, WEAK, LAST = 0, 1, 2
"""How much a line says: of the failure itself; of one elsewhere; of an exit code."""


class _Found(Struct, frozen=True):
    strength: int
    line: int
    text: str


class _Traceback(Struct):
    """The traceback that the lines under one label are in: the last frame, and that of the program itself."""

    ignored: bool = False
    inner: str = ""
    own: str = ""

    def take(self, line: str) -> bool:
        """Return whether a line belongs to it, and keep its place where it is a frame."""
        if frame := FRAME.match(line):
            place = f"{posixpath.basename(frame['path'])}:{frame['line']}"
            self.inner = place
            if not any(part in frame["path"] for part in LIBRARIES):
                self.own = place
        return not line or line[0].isspace()


class _Stream(Struct):
    """The lines of one process in a log: whether a usage was printed, the traceback they are in, what was found."""

    usage: bool = False
    ignoring: bool = False
    chained: bool = False
    traceback: _Traceback | None = None
    found: list[_Found] = field(default_factory=list)

    def take(self, number: int, line: str) -> None:
        """Look at the next line."""
        if line == HEAD:
            self.traceback, self.ignoring = _Traceback(self.ignoring), False
        elif self.traceback is not None:
            if not self.traceback.take(line):
                self._end_traceback(number, line, self.traceback)
        elif line.startswith(IGNORED):
            self.ignoring = True
        elif line.startswith(CHAINED):
            self.chained = True
        elif line.startswith("usage: "):
            self.usage = True
        elif REFUSED.match(line) and (self.usage or PROGRAM.match(line)):
            self.found.append(_Found(STRONG, number, posixpath.basename(line)))

    def _end_traceback(self, number: int, line: str, traceback: _Traceback) -> None:
        exception = EXCEPTION.match(line)
        if exception is None:
            return  # another process printed between the lines of this one
        self.traceback = None
        if traceback.ignored:
            return
        if self.chained and self.found:
            self.found.pop()
        self.chained = False
        text = OF_IMPORT.sub(r"\1", line)[:LONGEST]
        place = traceback.own or traceback.inner
        strength = WEAK if exception["name"].rpartition(".")[2] in CONSEQUENCES else STRONG
        self.found.append(_Found(strength, number, f"{text} ({place})" if place else text))


def failure_line(logs: Mapping[str, str]) -> Evidence | None:
    """Return the line that says most about a failure, the first of those that say as much, in the order of the logs;
    None where no line shows one. An exception's line goes on with the place in the program: `(moe_prefill.py:18)`."""
    found = [(log, each) for log, text in logs.items() for each in _in_log(text)]
    if not found:
        return None
    log, best = min(found, key=lambda one: one[1].strength)
    return Evidence(log, best.line, best.text)


def told_better(errors: Iterable[str], line: Evidence | None) -> tuple[str, ...]:
    """Return the errors of a test; where all of them are a launcher's, the line that says why before them."""
    known = tuple(errors)
    better = line is not None and not is_launchers(line.text) and all(map(is_launchers, known))
    return (line.text, *known) if line is not None and better else known


def _in_log(text: str) -> Iterator[_Found]:
    """Yield what shows a failure in one log, in its order."""
    streams: dict[str, _Stream] = {}
    for number, raw in enumerate(text.split("\n"), 1):
        line = TIME.sub("", ESCAPES.sub("", raw), count=1).rstrip("\r ")
        label = LABEL.match(line)
        name = label[0].strip() if label else ""
        streams.setdefault(name, _Stream()).take(number, line[label.end() :].removeprefix(" ") if label else line)
    exceptions = [found for stream in streams.values() for found in stream.found]
    yield from sorted(exceptions, key=lambda found: found.line)
    if not any(found.strength == STRONG for found in exceptions):
        for token in tokens(text):
            if token.kind == "error":
                error = token.words[0] or ""
                yield _Found(LAST if is_launchers(error) else WEAK, token.line, error)
