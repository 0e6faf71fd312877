"""Log files of single ranks, for ranks.py: what it does to torch, and to the ranks.

The launcher starts one collector (rank_files.py) before torch starts the ranks. Each rank makes pipes, puts them in
place of its stdout and stderr, and hands their reading ends to the collector through a socket. Being a process of its
own, the collector sees everything that a dying rank has written.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib.abc
import importlib.machinery
import os
import secrets
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType
from typing import Any

HERE = os.path.dirname(os.path.realpath(__file__))
HOOKED = "torch.multiprocessing.spawn"
ANSWER = b"k"
WAIT_FOR_COLLECTOR = 20.0  # seconds, for a node that is starting many processes at once
# seconds that the launcher waits for output still on its way; a process that a rank left behind may keep a pipe
WAIT_FOR_END = 5.0
LINE_BUFFERED = 1  # _IOLBF of glibc and musl


def install(logs: str) -> None:
    """Make every later start through torch.multiprocessing write rank logs into the folder `logs` (a full path)."""
    try:
        os.makedirs(logs, exist_ok=True)
        if not os.access(logs, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied", logs)
    except OSError as error:
        warn(f"no rank logs: {logs}: {error.strerror}")
        return
    # torch is not imported here: whether and when is the script's business, and variables it sets before count.
    sys.meta_path.insert(0, Hook(logs))


def warn(text: str) -> None:
    """Say something on stderr, in one write."""
    with contextlib.suppress(OSError):
        os.write(2, f"ranks.py: {text}\n".encode())


class Hook(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets the module HOOKED be imported as ever and then replaces the one function in it that starts processes."""

    def __init__(self, logs: str) -> None:
        self.logs = logs
        self.loader: Any = None
        self.collector: Collector | None = None
        # Registered before multiprocessing registers its own, so it runs after the script's processes were waited for.
        atexit.register(self.finish_at_exit)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of HOOKED with this object as its loader, None for anything else."""
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name == HOOKED else None
        if spec is None or spec.loader is None:
            return None
        self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Leave it to the real loader."""
        made: ModuleType | None = self.loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code, step back from it, and replace its function."""
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        if callable(getattr(module, "start_processes", None)):
            module.start_processes = self.replace(module.start_processes)  # type: ignore[attr-defined] # that is the point

    def replace(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a start_processes that wraps what the processes run."""

        @functools.wraps(original)
        def start_processes(
            fn: Callable[..., Any], args: Any = (), nprocs: int = 1, join: bool = True, *others: Any, **named: Any
        ) -> Any:
            self.collector = self.collector or Collector.start(self.logs)
            if self.collector is None:
                return original(fn, args, nprocs, join, *others, **named)
            sys.path.append(
                HERE
            )  # fresh interpreters find the class of `wrapped` by it; at the end, where it hides nothing
            try:
                wrapped = Logged(fn, self.collector.address, node_index() * nprocs)
                return original(wrapped, args, nprocs, join, *others, **named)
            finally:
                remove_last(sys.path, HERE)
                if join:
                    self.finish()

        return start_processes

    def finish_at_exit(self) -> None:
        """Finish when the launcher ends. An interrupt ends only the waiting: whoever ends a job may signal twice."""
        with contextlib.suppress(KeyboardInterrupt):
            self.finish()

    def finish(self) -> None:
        """Wait for the last output of the ranks; whoever was forked off the launcher has nothing to do with it."""
        if self.collector is not None and self.collector.owner == os.getpid():
            self.collector.finish()
            self.collector = None


def node_index() -> int:
    """Return RANK, 0 where it is no number."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isascii() and rank.isdigit() else 0


def remove_last(items: list[str], item: str) -> None:
    """Take the last `item` out of the list, if there is one."""
    if item in items:
        del items[len(items) - 1 - items[::-1].index(item)]


class Collector:
    """The launcher's side of the process that writes the files."""

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self.process, self.address, self.owner = process, address, os.getpid()

    @classmethod
    def start(cls, logs: str) -> Collector | None:
        """Start it; None, and a warning, where that is impossible."""
        address = "\0deepep-ranks-" + secrets.token_hex(
            16
        )  # no file: nothing to clean up, no folder whose name may be too long
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(1024)
            command = [sys.executable, "-I", "-S", os.path.join(HERE, "rank_files.py"), logs, str(listener.fileno())]
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, pass_fds=(listener.fileno(),), env=environment
                )
            except OSError as error:
                warn(f"no rank logs: {error}")
                return None
        return cls(process, address)

    def finish(self) -> None:
        """Tell it that no rank comes any more, and give it time to write what is on its way."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(WAIT_FOR_END)


class Logged:
    """What a process runs instead of `fn`: the same, after its output was led through the collector."""

    def __init__(self, fn: Callable[..., Any], address: str, first: int) -> None:
        self.fn, self.address, self.first = fn, address, first

    def __call__(self, index: int, *args: Any) -> Any:
        """Run `fn`; the traceback of an exception that ends it goes into the rank's file too."""
        remove_last(sys.path, HERE)
        with LastWords(redirect(self.address, self.first + index)):
            return self.fn(index, *args)


class LastWords:
    """Writes the traceback of an exception that passes by to a descriptor; torch shows it on the shared output
    already."""

    def __init__(self, descriptor: int | None) -> None:
        self.descriptor = descriptor

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.descriptor is None or error is None or isinstance(error, (SystemExit, KeyboardInterrupt)):
            return
        flush()
        text = "".join(traceback.format_exception(kind, error, trace)).encode(errors="replace")
        with contextlib.suppress(OSError), open(self.descriptor, "wb", closefd=False) as file:
            file.write(text)


def redirect(address: str, rank: int) -> int | None:
    """Lead this process's stdout and stderr through the collector; return a descriptor of which only the rank's file
    gets to know.

    Where stdout and stderr are the same file they stay one stream, so that their lines keep their order. None, and a
    warning, where the collector does not answer; then the output stays as it was.
    """
    try:
        pipes = [os.pipe() for _ in range(2 if is_one_file() else 3)]
        hand_over(address, rank, [reading for reading, _ in pipes])
    except OSError as error:
        warn(f"no log of rank {rank}: {error}")
        return None
    flush()
    for target, (_, writing) in zip((1, 2), (pipes[0], pipes[-2])):  # noqa: B905 - two of each
        os.dup2(writing, target)
    for _, writing in pipes[:-1]:
        os.close(writing)
    buffer_by_lines()
    return pipes[-1][1]


def is_one_file() -> bool:
    """Say whether stdout and stderr are the same file, pipe or terminal; OSError where one is closed."""
    one, two = os.fstat(1), os.fstat(2)
    return (one.st_dev, one.st_ino) == (two.st_dev, two.st_ino)


def hand_over(address: str, rank: int, reading: list[int]) -> None:
    """Give the collector the reading ends of a rank's pipes; OSError where it does not take them."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WAIT_FOR_COLLECTOR)
        connection.connect(address)
        socket.send_fds(connection, [b"%d" % rank], reading)
        if connection.recv(1) != ANSWER:
            raise ConnectionError("the collector hung up")
    for descriptor in reading:
        os.close(descriptor)


def flush() -> None:
    """Write what Python has buffered."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def buffer_by_lines() -> None:
    """Hand over each line when it is complete: what is left in a buffer is lost when the rank is killed."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
    with contextlib.suppress(AttributeError, ValueError, OSError):  # a C library that has other names
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, LINE_BUFFERED, 0)
