"""The two ways to a running shell: a channel of an SSH session, and a process on this machine, behind one small interface."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Protocol

import paramiko

from deepep_bootstrap.core.process import end_group

BLOCK = 256 * 1024
GRACE = 8.0
"""Seconds a watched process on this machine has to end after its stdin was closed: the watcher's own five, and some."""


class LineLostError(Exception):
    """The connection went away while something ran on it."""


class Wire(Protocol):
    """A started shell command with its three streams. `read` and `code` are for one thread, `offer` may be another's."""

    def offer(self, data: bytes) -> bool:
        """Send `data` to stdin, waiting for room; False when the other side no longer reads."""

    def end_input(self) -> None:
        """Close stdin."""

    def read(self, timeout: float | None) -> tuple[bytes, bytes]:
        """Wait for output and return what came on stdout and stderr; both empty: they ended. TimeoutError after `timeout` s."""

    def code(self) -> int:
        """Wait for the exit code. LineLostError when the connection went first."""

    def stop(self) -> None:
        """End it from any thread; a waiting `read` returns."""

    def close(self) -> None:
        """End it if it still runs, and give its streams back; for the thread that reads."""


class _Bell:
    """Rings when a paramiko buffer gets data or closes. Buffers clear their event when read empty; with two on one bell, we do."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def set(self) -> None:
        self.event.set()

    def clear(self) -> None:
        """Leave the bell alone."""


class ChannelWire:
    """A command on an exec channel of an open SSH session: no thread of its own and no polling."""

    def __init__(self, channel: paramiko.Channel, command: str, lost: Callable[[], str]) -> None:
        """`lost` says how the connection ended, when it did."""
        self._channel, self._lost = channel, lost
        self._bell = _Bell()
        channel.in_buffer.set_event(self._bell)  # type: ignore[arg-type]
        channel.in_stderr_buffer.set_event(self._bell)  # type: ignore[arg-type]
        channel.exec_command(command)

    def offer(self, data: bytes) -> bool:
        """See Wire."""
        try:
            # In blocks: paramiko copies what is left after each packet.
            for start in range(0, len(data), BLOCK):
                self._channel.sendall(data[start : start + BLOCK])
        except (OSError, EOFError):
            return False
        return True

    def end_input(self) -> None:
        """See Wire."""
        with contextlib.suppress(OSError, EOFError):
            self._channel.shutdown_write()

    def read(self, timeout: float | None) -> tuple[bytes, bytes]:
        """See Wire."""
        while True:
            self._bell.event.clear()
            ended = self._channel.eof_received or self._channel.closed
            out = self._channel.recv(BLOCK) if self._channel.recv_ready() else b""
            err = self._channel.recv_stderr(BLOCK) if self._channel.recv_stderr_ready() else b""
            if out or err or ended:
                return out, err
            if not self._bell.event.wait(timeout):
                raise TimeoutError

    def code(self) -> int:
        """See Wire."""
        code = self._channel.recv_exit_status()
        if code == -1 and not self._channel.get_transport().is_active():
            raise LineLostError(self._lost())
        return code

    def stop(self) -> None:
        """See Wire."""
        with contextlib.suppress(OSError, EOFError):
            self._channel.close()

    close = stop


class LocalWire:
    """The same command on this machine, in a session of its own."""

    def __init__(self, command: str, *, watched: bool) -> None:
        self._watched = watched
        pipe = subprocess.PIPE
        words = ["/bin/sh", "-c", command]
        self._process = subprocess.Popen(words, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        if self._process.stdin is None or self._process.stdout is None or self._process.stderr is None:
            raise AssertionError("all three streams are pipes")
        self._stdin, self._stdout, self._stderr = self._process.stdin, self._process.stdout, self._process.stderr
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stdout, selectors.EVENT_READ)
        self._selector.register(self._stderr, selectors.EVENT_READ)

    def offer(self, data: bytes) -> bool:
        """See Wire."""
        rest = memoryview(data)
        try:
            while rest:
                if self._stdin.closed:
                    return False
                rest = rest[self._stdin.write(rest) or 0 :]
        except OSError:
            return False
        return True

    def end_input(self) -> None:
        """See Wire."""
        with contextlib.suppress(OSError):
            self._stdin.close()

    def read(self, timeout: float | None) -> tuple[bytes, bytes]:
        """See Wire."""
        while self._selector.get_map():
            came = {self._stdout: b"", self._stderr: b""}
            ready = self._selector.select(timeout)
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                data = os.read(key.fd, BLOCK)
                if data:
                    came[key.fileobj] = data  # type: ignore[index]
                else:
                    self._selector.unregister(key.fileobj)
            if any(came.values()):
                return came[self._stdout], came[self._stderr]
        return b"", b""

    def code(self) -> int:
        """See Wire. A shell ended by a signal has 128 and the signal's number, as shells say it themselves."""
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def stop(self) -> None:
        """See Wire."""
        self.end_input()
        if self._watched:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
        if self._process.poll() is None:
            # A shell that sudo started is not ours to signal; it ends with its streams.
            with contextlib.suppress(PermissionError):
                end_group(self._process.pid, signal.SIGTERM)

    def close(self) -> None:
        """See Wire."""
        if self._process.poll() is None:
            self.stop()
        self.end_input()
        self._selector.close()
        self._stdout.close()
        self._stderr.close()
