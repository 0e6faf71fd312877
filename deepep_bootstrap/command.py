"""Subprocesses on the control machine: argument lists, never a shell string, always in a process group of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepep_bootstrap.errors import Problem, Trouble
from deepep_bootstrap.transcript import Lines

LAST_LINES = 10
BLOCK = 64 * 1024


@dataclass(frozen=True)
class Completed:
    """What a finished command left: its arguments, exit code (negative: the signal's number) and both streams as text."""

    argv: tuple[str, ...]
    code: int
    out: str
    err: str

    @property
    def tail(self) -> str:
        """The last lines of stderr, or of stdout where stderr is empty, for a message."""
        lines = (self.err.strip() or self.out.strip()).splitlines()
        return "\n".join(lines[-LAST_LINES:])


def run(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    data: bytes = b"",
    timeout: float | None = None,
) -> Completed:
    """Run `argv` to its end and return what it left; a non-zero exit is a value, not an exception.

    `env` replaces the environment where given, `data` goes to stdin, `timeout` is in seconds. A program that is missing, or one
    that outlasts the timeout (its process group is killed), raises Trouble.
    """
    words = tuple(str(word) for word in argv)
    process = _start(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=env, cwd=cwd)
    try:
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


def stream(
    argv: Sequence[str | Path], on_line: Callable[[str], None], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Completed:
    """Run `argv` like `run`, and hand each line of both streams, which are one here, to `on_line` as it comes; progress that is
    shown by overwriting comes line by line too. The whole output is `out` of the result."""
    words = tuple(str(word) for word in argv)
    process = _start(words, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, env=env, cwd=cwd)
    lines = Lines(b"", on_line)
    try:
        while process.stdout and (data := os.read(process.stdout.fileno(), BLOCK)):
            lines.feed(data)
        lines.end()
        code = process.wait()
    except BaseException:
        end_group(process.pid)
        process.wait()
        raise
    finally:
        if process.stdout:
            process.stdout.close()
    return Completed(words, code, lines.text, "")


def _start(words: tuple[str, ...], *, stdin: int, stderr: int, env: Mapping[str, str] | None, cwd: Path | None) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(words, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, env=env, cwd=cwd, start_new_session=True)
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        if cwd and not cwd.is_dir():
            raise Trouble(Problem(str(cwd), f"no directory to run {words[0]} in")) from None
        # A directory of PATH that may not be entered also says "permission denied" of a program that is not there.
        found = "" if isinstance(error, FileNotFoundError) else "no permission to run it"
        raise Trouble(Problem(words[0], "this program is not installed here", found, try_=f"installing {words[0]}")) from None


def end_group(pid: int, signum: int = signal.SIGKILL) -> None:
    """Send `signum` to the process group led by `pid`; a group that is already gone is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signum)
