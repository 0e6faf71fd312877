"""Subprocesses on the control machine: argument lists, never a shell string, always in a process group of
their own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from deepep_bootstrap.core.errors import Problem, Trouble

LAST_LINES = 10


class Completed(Struct, frozen=True):
    """What a finished command left: its arguments, exit code (negative: the signal's number) and both streams as
    text."""

    argv: tuple[str, ...]
    code: int
    out: str
    err: str

    @property
    def tail(self) -> str:
        """The last lines of stderr, or of stdout where stderr is empty, for a message."""
        lines = (self.err.strip() or self.out.strip()).splitlines()
        return "\n".join(lines[-LAST_LINES:])


def run_program(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    data: bytes = b"",
    timeout: float | None = None,
    on_start: Callable[[int], None] | None = None,
) -> Completed:
    """Run `argv` to its end and return what it left; a non-zero exit is a value, not an exception.

    `env` replaces the environment where given, `data` goes to stdin, `timeout` is in seconds. `on_start` gets the
    number of the process group, for `end_group` from another thread. A program that is missing, or one that outlasts
    the timeout (its group is killed), raises Trouble.
    """
    words = tuple(str(word) for word in argv)
    with _interrupts_held() as let_in:
        process = _start(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=env, cwd=cwd)
        try:
            let_in()
            if on_start:
                on_start(process.pid)
            out, err = process.communicate(data, timeout=timeout)
        except subprocess.TimeoutExpired:
            end_group(process.pid)
            process.wait()
            raise Trouble(Problem(" ".join(words[:3]), f"no end after {timeout:g} s")) from None
        except BaseException:
            end_group(process.pid)
            process.wait()
            raise
    return Completed(words, process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))


@contextlib.contextmanager
def _interrupts_held() -> Iterator[Callable[[], None]]:
    """Hold back signals that raise in this thread, and yield what lets them in. One that comes while a process begins
    would leave it running: nobody knows it yet who could end it."""
    caught: list[int] = []
    held: dict[int, Any] = {}

    def let_in() -> None:
        while held:
            signal.signal(*held.popitem())
        while caught:
            signal.raise_signal(caught.pop())

    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if callable(handler := signal.getsignal(signum)):
                held[signum] = handler
                signal.signal(signum, lambda number, _: caught.append(number))
    try:
        yield let_in
    finally:
        let_in()


def _start(
    words: tuple[str, ...], *, stdin: int, stderr: int, env: Mapping[str, str] | None, cwd: Path | None
) -> subprocess.Popen[bytes]:
    # What programs say is read: they speak one language, whatever the person's locale is.
    env = {**(os.environ if env is None else env), "LC_ALL": "C"}
    try:
        return subprocess.Popen(
            words, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, env=env, cwd=cwd, start_new_session=True
        )
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        if cwd and not cwd.is_dir():
            raise Trouble(Problem(str(cwd), f"no directory to run {words[0]} in")) from None
        # A directory of PATH that may not be entered also says "permission denied" of a program that is not there.
        found = "" if isinstance(error, FileNotFoundError) else "no permission to run it"
        raise Trouble(
            Problem(words[0], "this program is not installed here", found, try_=f"installing {words[0]}")
        ) from None


def end_group(pid: int, signum: int = signal.SIGKILL) -> None:
    """Send `signum` to the process group led by `pid`; a group that is already gone is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signum)
