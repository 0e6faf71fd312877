"""The collector that ranks.py starts: writes what the ranks of this node print into their files and to the shared
output.

Not for use by hand. It gets the pipes of the ranks through a socket (see rank_logs.py), writes what comes to the rank's
file at once, and to the shared output as whole lines, so that lines of different ranks are never mixed within a line.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator

ANSWER = b"k"
PATIENCE = 0.5  # seconds that an unfinished line is held back from the shared output, waiting for its end
WAIT_FOR_RANK = 5.0  # seconds for a message that is one packet
CHUNK = 65536  # what a pipe holds: one read takes all that was there when the rank wrote to its next pipe
PIPE_BUF = 4096  # writes up to this size reach a pipe in one piece (pipe(7))
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid (socket(7), SO_PEERCRED)


class LogFile:
    """A rank's file, opened for adding: a script may start its ranks more than once. DEEPEP_TEST_HEADING is a line
    to begin with."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.descriptor: int | None = None
        with self.telling():
            self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if heading := os.environ.get("DEEPEP_TEST_HEADING"):
            self.write(f"{heading}\n".encode())

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Say once that the file cannot be written, and do without it from then on."""
        try:
            yield
        except OSError as error:
            self.descriptor = None
            with contextlib.suppress(OSError):
                os.write(2, f"ranks.py: {self.path} is not complete: {error.strerror}\n".encode())

    def write(self, content: bytes) -> None:
        """Add `content`."""
        if self.descriptor is not None:
            with self.telling():
                write_all(self.descriptor, content)


class Shared:
    """An output that all ranks share. `open` is the stream whose line has no end yet."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.open: Stream | None = None

    def write(self, stream: Stream, lines: bytes) -> None:
        """Write for a stream, as many lines at once as reach a pipe in one piece; another one's unfinished line is
        ended first."""
        if self.open not in (None, stream):
            lines = b"\n" + lines
        self.open = None if lines.endswith(b"\n") else stream
        start = 0
        with contextlib.suppress(OSError):  # whoever closed this output stops nobody
            while start < len(lines):
                end = lines.rfind(b"\n", start, start + PIPE_BUF) + 1 or lines.find(b"\n", start) + 1 or len(lines)
                write_all(self.descriptor, lines[start:end])
                start = end


class Stream:
    """One pipe of a rank: its file, and the shared output it belongs to (None: for the file alone). `number` is its
    place among all."""

    def __init__(self, number: int, file: LogFile, shared: Shared | None) -> None:
        self.number, self.file, self.shared = number, file, shared
        self.unfinished, self.since = b"", 0.0

    def take(self, content: bytes) -> None:
        """Write what came: to the file as it is, to the shared output as far as lines are complete."""
        self.file.write(content)
        if self.shared is None:
            return
        lines, newline, rest = content.rpartition(b"\n")
        if newline:
            self.shared.write(self, self.unfinished + lines + newline)
            self.unfinished = b""
        if rest:
            self.since = self.since if self.unfinished else time.monotonic()
            self.unfinished += rest

    def show_overdue(self) -> None:
        """Show an unfinished line whose end does not come."""
        if self.shared is not None and self.unfinished and time.monotonic() - self.since >= PATIENCE:
            self.shared.write(self, self.unfinished)
            self.unfinished = b""

    def end(self) -> None:
        """Show what is left, and leave the next line to others."""
        if self.shared is not None and (self.unfinished or self.shared.open is self):
            self.shared.write(self, self.unfinished + b"\n")


def write_all(descriptor: int, content: bytes) -> None:
    """Write everything, also where somebody made the shared output non-blocking."""
    view = memoryview(content)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            time.sleep(0.01)


class Collecting:
    """The collector's loop."""

    def __init__(self, logs: str, listener: socket.socket, lifeline: int) -> None:
        self.logs, self.listener, self.lifeline = logs, listener, lifeline
        self.selector = selectors.DefaultSelector()
        self.files: dict[int, LogFile] = {}
        self.streams: dict[int, Stream] = {}
        self.numbers = itertools.count()
        self.shared = Shared(1), Shared(2)
        for descriptor in (listener.fileno(), lifeline):
            self.selector.register(descriptor, selectors.EVENT_READ)

    def run(self) -> None:
        """Go on until the launcher is done, or gone, and the last rank has closed its pipes."""
        while self.selector.get_map():
            waiting = any(stream.unfinished for stream in self.streams.values())
            ready = {key.fd for key, _ in self.selector.select(PATIENCE if waiting else None)}
            if self.listener.fileno() in ready:
                self.welcome()
            # A rank's pipes in the order in which it wrote to them last: stdout, stderr, then its last words.
            for descriptor in sorted(ready & self.streams.keys(), key=lambda each: self.streams[each].number):
                self.read(descriptor)
            if self.lifeline in ready:
                self.launcher_is_done()
            for stream in self.streams.values():
                stream.show_overdue()

    def launcher_is_done(self) -> None:
        """Take those who stand in the queue; nobody comes after them."""
        self.listener.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self.welcome()
        for descriptor in (self.listener.fileno(), self.lifeline):
            self.selector.unregister(descriptor)
        self.listener.close()
        self.lifeline = -1

    def welcome(self) -> None:
        """Take the pipes of a new rank, if it is a process of the same user; BlockingIOError if nobody waits."""
        connection = self.listener.accept()[0]
        with connection, contextlib.suppress(ValueError, ConnectionError, TimeoutError):
            connection.settimeout(WAIT_FOR_RANK)
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            if CREDENTIALS.unpack(credentials)[1] != os.getuid():
                return
            message, descriptors, _, _ = socket.recv_fds(connection, 32, 3)
            rank = int(message)
            if rank not in self.files:
                self.files[rank] = LogFile(os.path.join(self.logs, f"rank-{rank}.log"))
            for descriptor, shared in zip(descriptors, (*self.shared[: len(descriptors) - 1], None), strict=True):
                self.streams[descriptor] = Stream(next(self.numbers), self.files[rank], shared)
                self.selector.register(descriptor, selectors.EVENT_READ)
            connection.sendall(ANSWER)

    def read(self, descriptor: int) -> None:
        """Take what a pipe has, or its end."""
        content = os.read(descriptor, CHUNK)
        if content:
            self.streams[descriptor].take(content)
            return
        self.selector.unregister(descriptor)
        os.close(descriptor)
        self.streams.pop(descriptor).end()


def main(logs: str, listening: int) -> None:
    """Be the collector. ^C and Slurm's SIGTERM go to the whole job: the ranks end by them, this process when they
    have ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    Collecting(logs, socket.socket(fileno=listening), lifeline=0).run()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
