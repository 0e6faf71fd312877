"""Verbs run as a person runs them, each in a fork of this process: what they write is seen to the byte, with a terminal
and without."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import struct
import sys
import termios
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from invoke.main import program

import tasks
from deepep_bootstrap.cli import app
from deepep_bootstrap.cli.app import Verb
from deepep_bootstrap.cli.verbs import VERBS
from tests.support.paths import ROOT

# What a verb imports when it runs is imported once, and not by each fork.
for name in VERBS:
    app.load(name)


@dataclass(frozen=True)
class Said:
    """What a verb wrote, and its exit code; with a terminal both streams are one."""

    code: int
    out: bytes
    err: bytes


def discovered() -> dict[str, Verb]:
    """Return every verb of tasks.py with what may stand behind it."""
    return {name: app.verb_of(each) for name, each in tasks.namespace.tasks.items()}


def run_verb(
    words: Sequence[str], folder: Path, *, env: Mapping[str, str] | None = None, columns: int = 0, data: bytes = b""
) -> Said:
    """Run `invoke WORDS…` with `data` on stdin and files of its own in `folder`; with `columns` on a terminal that is so
    wide, where stdin is one too."""
    if columns:
        return _on_terminal(words, env or {}, columns)
    files = [folder / name for name in ("stdin", "stdout", "stderr")]
    files[0].write_bytes(data)
    with files[0].open("rb") as given, files[1].open("wb") as out, files[2].open("wb") as err:
        pid = os.fork()
        if not pid:
            _be_invoke(words, env or {}, (given.fileno(), out.fileno(), err.fileno()))
        _, status = os.waitpid(pid, 0)
    return Said(os.waitstatus_to_exitcode(status), files[1].read_bytes(), files[2].read_bytes())


def _on_terminal(words: Sequence[str], env: Mapping[str, str], columns: int) -> Said:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    pid = os.fork()
    if not pid:
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
        _be_invoke(words, {"TERM": "xterm-256color", **env}, (theirs, theirs, theirs))
    os.close(theirs)
    written = bytearray()
    # The end of a terminal's other side is an error for its reader.
    with contextlib.suppress(OSError):
        while data := os.read(ours, 65536):
            written += data
    os.close(ours)
    _, status = os.waitpid(pid, 0)
    return Said(os.waitstatus_to_exitcode(status), bytes(written), b"")


def _be_invoke(words: Sequence[str], env: Mapping[str, str], streams: tuple[int, int, int]) -> None:
    """Be the process of `invoke`; never returns."""
    code = 99
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115 - they are its own
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
        os.environ.update(env)
        os.chdir(ROOT)
        sys.argv = ["invoke", *words]
        try:
            program.run(sys.argv)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)
