"""Two classes of tests: `system` tests start processes or open sockets, all others do neither.

Nobody writes the mark. A test is `system` when it asks for the fixture `programs`, itself or through another fixture,
or lies in tests/e2e or tests/lab. `make quick` runs all others, and any of them that starts a process or connects or
binds a socket fails and says so.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable

import pytest

from tests.support.paths import TESTS

FIXTURE = "programs"
FOLDERS = (TESTS / "e2e", TESTS / "lab")
EVENTS = frozenset(
    {
        "subprocess.Popen",
        "os.posix_spawn",
        "os.fork",
        "os.forkpty",
        "os.exec",
        "os.system",
        "socket.connect",
        "socket.bind",
        "socket.sendto",
    }
)
"""Audit events of Python (docs.python.org/3/library/audit_events.html)."""


class NotQuick(AssertionError):
    """A test that is not `system` started a process or opened a socket."""


def is_system(item: pytest.Item) -> bool:
    """Return whether a test may start processes and open sockets."""
    asked_for: Iterable[str] = getattr(item, "fixturenames", ())
    return FIXTURE in asked_for or any(item.path.is_relative_to(folder) for folder in FOLDERS)


class Guard:
    """An audit hook that refuses EVENTS between `start` and `stop`.

    Threads that were there before are left alone: they belong to an earlier test.
    """

    def __init__(self) -> None:
        self.refused: list[str] = []
        self._watching = False
        self._process = os.getpid()
        self._older: frozenset[int | None] = frozenset()
        sys.addaudithook(self._hook)  # stays until the interpreter ends: there is no way to remove one

    def start(self) -> None:
        self.refused = []
        self._older = frozenset(thread.ident for thread in threading.enumerate()) - {threading.get_ident()}
        self._watching = True

    def stop(self) -> None:
        self._watching = False

    def check(self) -> None:
        """Fail for what was refused, in case the code under test caught the exception or ran in a thread."""
        if self.refused:
            raise NotQuick(_message(self.refused[0]))

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self._watching or event not in EVENTS:
            return
        if os.getpid() != self._process or threading.get_ident() in self._older:
            return
        what = f"{event}: {arguments[-1] if event.startswith('socket.') else arguments[:2]}"
        self.refused.append(what)
        raise NotQuick(_message(what))


def _message(what: str) -> str:
    return (
        f"this test is not `system` but starts a process or opens a socket ({what}); "
        f'let it or its fixture ask for `{FIXTURE}`: @pytest.mark.usefixtures("{FIXTURE}")'
    )
