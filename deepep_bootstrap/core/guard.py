"""The one place where every exception is caught: exit codes, interruption, lost readers, and the log of a
bug.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TextIO, cast

from deepep_bootstrap.core.errors import BUG, INTERRUPTED, TROUBLE, Problem, ToldInterrupt, Trouble
from deepep_bootstrap.core.program import as_called
from deepep_bootstrap.core.text import plain

READER_GONE = frozenset((errno.EPIPE, errno.EIO))
"""What writing to a pipe without a reader, or to a terminal that was closed, ends with."""

READER_LEFT = 128 + signal.SIGPIPE
"""The exit code then: what a shell says of a program that SIGPIPE ended, as it ends others in `… | head`."""

MACHINE_TROUBLE = frozenset(
    (
        *(
            errno.ENOSPC,
            errno.EDQUOT,
            errno.EROFS,
            errno.EACCES,
            errno.EPERM,
            errno.ENOTDIR,
            errno.EMFILE,
            errno.ENFILE,
        ),
        *(errno.ENAMETOOLONG, errno.ELOOP),
    )
)
"""Errors of the operating system that say something about this machine or what it was given, not about a bug: full,
read-only, forbidden, a name that no file can have."""


READ_ONLY = frozenset(
    ("plan", "facts", "doctor", "status", "generations", "diff", "verify", "results", "report", "diagnose")
)
"""Verbs that look and change nothing: ^C ends them without many words."""


class PlainStream:
    """stdout or stderr without what a terminal would obey."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        """Write a text as a terminal may have it."""
        self.raw.write(as_called(plain(text)))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


@contextmanager
def plain_streams() -> Iterator[None]:
    """Let nothing through stdout and stderr that a terminal would obey, while the body runs; one that is closed stays
    so."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast("TextIO", PlainStream(each)) if each else each for each in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def raw_stream(stream: TextIO) -> TextIO:
    """Return the stream behind those that make texts plain."""
    while isinstance(stream, PlainStream):
        stream = stream.raw
    return stream


def state_dir() -> Path:
    """Return the directory for logs on the control machine (XDG base directory specification)."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(base) / "deepep-bootstrap"


def guarded(verb: str, body: Callable[[], int], *, as_json: bool = False) -> int:
    """Run one verb and return its exit code; the only place where every exception is caught, and behind which nothing
    is printed that a terminal would obey.

    `body` returns an exit code and prints its own result. Expected trouble becomes one message per problem on stderr
    (with `as_json` one document on stdout instead), ^C becomes 130, anything else a log file and two lines.
    """
    with plain_streams():
        return _guarded(verb, body, as_json=as_json)


def _guarded(verb: str, body: Callable[[], int], *, as_json: bool) -> int:
    try:
        code = body()
        sys.stdout.flush()
        return code
    except Trouble as trouble:
        guess = (Problem(trouble.file, trouble.guess),) if trouble.guess else ()
        return _tell(verb, (*trouble.problems, *guess), trouble.code, as_json=as_json, lines=trouble.lines)
    except KeyboardInterrupt as interrupt:
        # From here on a second ^C may end us at once: everything on the hosts has been told to stop.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        return _tell_interrupt(verb, told=isinstance(interrupt, ToldInterrupt), as_json=as_json)
    except OSError as error:
        return _tell_os_error(verb, error, as_json=as_json)
    except ModuleNotFoundError as error:
        return _tell_missing_package(verb, error, as_json=as_json)
    except Exception:  # noqa: BLE001 - a bug must not end in a traceback on an admin's screen
        return _tell_bug(verb, as_json=as_json)


def _tell_interrupt(verb: str, *, told: bool, as_json: bool) -> int:
    """Return the exit code of ^C. What only looks leaves nothing to go on from."""
    if told and not as_json:
        return INTERRUPTED
    again = "" if verb in READ_ONLY else "the same command again: it goes on from what is already there"
    return _tell(verb, (Problem(verb, "interrupted", try_=again),), INTERRUPTED, as_json=as_json)


def _tell_os_error(verb: str, error: OSError, *, as_json: bool) -> int:
    """Return the exit code for an error of the operating system: trouble with this machine, or a bug like any other."""
    if error.errno in READER_GONE and error.filename is None:
        # The reader of our output (head, less, a terminal) has gone, so there is nobody to tell.
        _silence(sys.stdout)
        # A closed terminal also sends SIGHUP: whichever comes first, it is one end.
        return INTERRUPTED if error.errno == errno.EIO or _followed_interrupt(error) else READER_LEFT
    if error.errno not in MACHINE_TROUBLE:
        return _tell_bug(verb, as_json=as_json)
    if error.filename is None:
        _silence(sys.stdout)
    where = str(error.filename or "output")
    return _tell(verb, (Problem(where, f"cannot be used: {error.strerror}"),), TROUBLE, as_json=as_json)


def _tell_missing_package(verb: str, error: ModuleNotFoundError, *, as_json: bool) -> int:
    """Return the exit code where a package that the engine needs is not there: the checkout is newer than its
    environment, which a verb may notice late, since most packages are imported where they are used."""
    package = (error.name or "").partition(".")[0]
    if package in {"", "deepep_bootstrap"}:
        return _tell_bug(verb, as_json=as_json)
    what = f"the Python package of `import {package}` is not there"
    again = f"{shlex.quote(sys.executable)} -m pip install ., in the checkout, then the same command again"
    missing = Problem(verb, what, f"none for {sys.executable}", "the dependencies in pyproject.toml", again)
    return _tell(verb, (missing,), TROUBLE, as_json=as_json)


def _followed_interrupt(error: BaseException) -> bool:
    """Return whether `error` came up while an interrupt was on its way out: a closed terminal interrupts, then
    cannot be written."""
    while error.__context__ is not None:
        error = error.__context__
        if isinstance(error, KeyboardInterrupt):
            return True
    return False


def _tell_bug(verb: str, *, as_json: bool) -> int:
    """Write everything that a report of the bug needs, say where, and return the exit code. Called while the
    exception is handled."""
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


def _tell(
    verb: str, problems: tuple[Problem, ...], code: int, *, as_json: bool, lines: tuple[str, ...] | None = None
) -> int:
    """Tell problems, as `lines` where a person sees others than all of them, and return the exit code."""
    document = {"schema": 1, "verb": verb, "exit": code, "errors": [problem.as_json() for problem in problems]}
    stream = sys.stdout if as_json else sys.stderr
    text = json.dumps(document, indent=2) if as_json else "\n".join(lines or map(str, problems))
    try:
        print(text, file=stream, flush=True)
    except OSError:
        # Nobody can be told any more: the terminal was closed, or the disk behind `>file` is full. The exit code still
        # says it.
        _silence(stream)
    return code


def _write_bug_log(verb: str, folder: Path) -> Path:
    """Write what a report needs, for the account alone and without passwords: a flag, an address in the traceback or
    the value of a variable may hold one, and the file is made to be sent."""
    # Not at the top: its patterns take long to compile, and most runs need none.
    from deepep_bootstrap.core.redact import scrub, secrets_of

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = folder / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{verb}-{os.getpid()}.log"
    facts = f"verb: {verb}\npython: {sys.version}\nplatform: {platform.platform()}\n"
    text = scrub(f"{facts}argv: {shlex.join(sys.argv[1:])}\n\n" + traceback.format_exc(), secrets_of(os.environ))
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(log, flags, 0o600), "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
    return log
