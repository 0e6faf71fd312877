"""Expected trouble, exit codes, and the one guard at the front door.

Expected trouble is a value with four parts (where, what, found / wanted, try); anything else that escapes a verb is a bug.
Exit codes and their order of severity are those of the README.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

OK = 0
TROUBLE = 1
CHANGES = 2
BUG = 3
VERDICT = 4
INTERRUPTED = 130
REMEDY = ". Try: "
"""What stands before the remedy in a message."""
WORST_FIRST = (BUG, INTERRUPTED, TROUBLE, VERDICT, CHANGES, OK)

READER_GONE = frozenset((errno.EPIPE, errno.EIO))
"""What writing to a pipe without a reader, or to a terminal that was closed, ends with."""

MACHINE_TROUBLE = frozenset(
    (
        *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EMFILE, errno.ENFILE),
        *(errno.ENAMETOOLONG, errno.ELOOP),
    )
)
"""Errors of the operating system that say something about this machine or what it was given, not about a bug: full, read-only,
forbidden, a name that no file can have."""


ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Escape sequences of ECMA-48 and control characters but tab and newline: a terminal would obey what a host only said."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, said in the form every message of this program has.

    `where` is a file and key or a folded host set, `what` the fact, `found` and `wanted` the difference, `try_` a command or an
    action that helps. Empty parts are left out of the sentence.
    """

    where: str
    what: str
    found: str = ""
    wanted: str = ""
    try_: str = ""

    def __str__(self) -> str:
        return plain(f"{self.where}: {self.said}")

    @property
    def said(self) -> str:
        """The message without its place, for a line that names the host itself."""
        parts = [part for part in (self.found and f"found {self.found}", self.wanted and f"wanted {self.wanted}") if part]
        difference = f" — {', '.join(parts)}" if parts else ""
        remedy = f"{REMEDY}{self.try_}" if self.try_ else ""
        return plain(f"{self.what}{difference}{remedy}")

    def as_json(self) -> dict[str, str]:
        """Return the five keys of `errors` in every JSON document."""
        return {"where": self.where, "what": self.what, "found": self.found, "wanted": self.wanted, "try": self.try_}


class Trouble(Exception):
    """Expected trouble: one or more problems, shown one a line, never as a traceback."""

    def __init__(self, *problems: Problem, code: int = TROUBLE) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems
        self.code = code


def plain(text: str) -> str:
    """Return text without escape sequences and control characters but tab and newline."""
    return ESCAPES.sub("", text)


def worst(codes: Iterable[int]) -> int:
    """Return the most severe of `codes`; 0 when there are none. An unknown code counts as expected trouble."""
    known = [code if code in WORST_FIRST else TROUBLE for code in codes]
    return min(known, key=WORST_FIRST.index, default=OK)


def state_dir() -> Path:
    """Return the directory for logs on the control machine (XDG base directory specification)."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(base) / "deepep-bootstrap"


def guarded(verb: str, body: Callable[[], int], *, as_json: bool = False) -> int:
    """Run one verb and return its exit code; the only place where every exception is caught.

    `body` returns an exit code and prints its own result. Expected trouble becomes one message per problem on stderr (with
    `as_json` one document on stdout instead), ^C becomes 130, anything else a log file and two lines.
    """
    try:
        code = body()
        sys.stdout.flush()
        return code
    except Trouble as trouble:
        return _tell(verb, trouble.problems, trouble.code, as_json=as_json)
    except KeyboardInterrupt:
        # From here on a second ^C may end us at once: everything on the hosts has been told to stop.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        stopped = Problem(verb, "interrupted", try_="the same command again: it goes on from what is already there")
        return _tell(verb, (stopped,), INTERRUPTED, as_json=as_json)
    except OSError as error:
        return _tell_os_error(verb, error, as_json=as_json)
    except Exception:  # noqa: BLE001 - the front door: a bug must not end in a traceback on an admin's screen
        return _tell_bug(verb, as_json=as_json)


def _tell_os_error(verb: str, error: OSError, *, as_json: bool) -> int:
    """Return the exit code for an error of the operating system: trouble with this machine, or a bug like any other."""
    if error.errno in READER_GONE and error.filename is None:
        # The reader of our output (head, less, a terminal) has gone, so there is nobody to tell.
        _silence(sys.stdout)
        return INTERRUPTED if _followed_interrupt(error) else TROUBLE
    if error.errno not in MACHINE_TROUBLE:
        return _tell_bug(verb, as_json=as_json)
    if error.filename is None:
        _silence(sys.stdout)
    where = str(error.filename or "output")
    return _tell(verb, (Problem(where, f"cannot be used: {error.strerror}"),), TROUBLE, as_json=as_json)


def _followed_interrupt(error: BaseException) -> bool:
    """Return whether `error` came up while an interrupt was on its way out: a closed terminal interrupts, then cannot be written."""
    while error.__context__ is not None:
        error = error.__context__
        if isinstance(error, KeyboardInterrupt):
            return True
    return False


def _tell_bug(verb: str, *, as_json: bool) -> int:
    """Write everything that a report of the bug needs, say where, and return the exit code. Called while the exception is handled."""
    try:
        log = _write_bug_log(verb, state_dir() / "bugs")
    except OSError:
        log = _write_bug_log(verb, Path(tempfile.mkdtemp(prefix="deepep-bootstrap-bug-")))
    bug = Problem(verb, f"internal error, details in {log}", try_="sending that file with a report of what you did")
    return _tell(verb, (bug,), BUG, as_json=as_json)


def _silence(stream: IO[str]) -> None:
    """Point a stream that cannot be written elsewhere, so that the interpreter's own flush at its end stays silent."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _tell(verb: str, problems: tuple[Problem, ...], code: int, *, as_json: bool) -> int:
    document = {"schema": 1, "verb": verb, "exit": code, "errors": [problem.as_json() for problem in problems]}
    stream = sys.stdout if as_json else sys.stderr
    text = json.dumps(document, indent=2) if as_json else "\n".join(map(str, problems))
    try:
        print(text, file=stream, flush=True)
    except OSError:
        # Nobody can be told any more: the terminal was closed, or the disk behind `>file` is full. The exit code still says it.
        _silence(stream)
    return code


def _write_bug_log(verb: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{verb}-{os.getpid()}.log"
    facts = f"verb: {verb}\npython: {sys.version}\nplatform: {platform.platform()}\nargv: {sys.argv[1:]}\n\n"
    log.write_text(facts + traceback.format_exc(), encoding="utf-8")
    return log
