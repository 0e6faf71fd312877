"""A command of the program on a terminal of its own, as a person sees it."""

from __future__ import annotations

import os

import pexpect

from tests.support.e2e import PATIENCE, ROOT, Engine, wait_until


class Terminal:
    """One command on a terminal of its own."""

    def __init__(self, engine: Engine, verb: str, *more: str, columns: int = 100, term: str = "xterm-256color") -> None:
        argv = engine.argv(verb, *more)
        env = {**engine.environment(), "TERM": term}
        self.child = pexpect.spawn(
            argv[0], argv[1:], env=env, cwd=str(ROOT), encoding="utf-8", timeout=PATIENCE, dimensions=(30, columns)
        )
        self.text = ""

    def expect(self, pattern: str) -> None:
        self.child.expect(pattern)
        self.text += self.child.before + self.child.after

    def end(self) -> int:
        """Wait for the command's end and return its exit code; the text is whole then."""
        self.child.expect(pexpect.EOF)
        self.text += self.child.before
        self.child.close()
        assert "Traceback" not in self.text, self.text
        assert self.child.exitstatus is not None, f"ended by signal {self.child.signalstatus}"
        return int(self.child.exitstatus)

    def close_window(self) -> int:
        """Close the terminal: the kernel sends SIGHUP, and what is written afterwards fails. Return the exit code."""
        os.close(self.child.child_fd)
        self.child.closed = True
        ended: list[int] = []

        def reap() -> bool:
            pid, status = os.waitpid(self.child.pid, os.WNOHANG)
            ended.extend([os.waitstatus_to_exitcode(status)] if pid else [])
            return bool(pid)

        wait_until(reap, "the command has ended")
        return ended[0]
