"""Files of servers, fetched so that a cut costs only what was on its way.

What has come of a file lies in a folder of ours, under its hash and never under its name, until it is complete; the
next try, of this run or of a later one, asks for the rest (RFC 9110, range requests). Whatever a server sends as the
rest, the hash of the whole decides.
"""

from __future__ import annotations

import base64
import fcntl
import os
import re
import shutil
import stat
import threading
import time
import urllib.error
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from deepep_bootstrap.core import filetree
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.text import duration, size
from deepep_bootstrap.fetch.index import PackageIndex, open_url

PARTIAL = ".partial"
"""The folder of files that have not come as a whole, below a cache or a mirror."""
BLOCK = 1 << 18
LONGEST_FILE = 64 << 30
"""Bytes of a file whose size nobody says."""
TRIES = 4
"""How often in a row a server may send nothing."""
PAUSE = 1.0
"""Seconds before the next try; twice as long after each that brought nothing."""
PLAIN_MODE = stat.S_IRUSR | stat.S_IWUSR | stat.S_IRGRP | stat.S_IROTH
WINDOW = 15.0
"""Seconds over which bytes per second are counted."""
ASKED_TO_WAIT = frozenset((408, 425, 429))
"""Answers of 4xx after which asking again makes sense."""
CONTENT_RANGE = re.compile(r"bytes (\d{1,15})-\d{1,15}/(\d{1,15}|\*)")


class RemoteFile(Struct, frozen=True):
    """A file at `url` of an index, whose content has the SRI `hash` and `size` bytes (0: not known)."""

    index: PackageIndex
    url: str
    hash: str
    size: int

    @property
    def partial(self) -> str:
        """The name under which lies what has come."""
        return base64.b64decode(self.hash.partition("-")[2]).hex()


class Refused(Exception):
    """The server does not give the file to us."""


class CutError(Exception):
    """The connection broke, again and again; `have` bytes have come by now."""

    def __init__(self, reason: str, have: int) -> None:
        super().__init__(reason)
        self.have = have


class Transfer(Struct, frozen=True):
    """How far a download of several files is: files and bytes that are here and that are wanted, and bytes per second
    over the last WINDOW seconds (0.0 where nothing came)."""

    files: int
    all_files: int
    done: int
    total: int
    rate: float

    @property
    def share(self) -> float:
        """The part that is here, 0 to 1."""
        return min(1.0, self.done / self.total) if self.total else 0.0

    @property
    def text(self) -> str:
        """The figures for a person."""
        bytes_ = f"{size(self.done)} of {size(self.total)}" if self.total else size(self.done)
        left = max(0, self.total - self.done)
        words = [f"{self.files}/{self.all_files} files", bytes_]
        if self.rate:
            words.append(f"{size(int(self.rate))}/s")
        if self.rate and left:
            words.append(f"{duration(max(1, round(left / self.rate)))} left")
        return ", ".join(words)

    def whole(self, seconds: float) -> str:
        """Return what came in `seconds`, for a person."""
        rate = f", {size(int(self.done / seconds))}/s" if seconds >= 1 else ""
        return f"{self.files} files, {size(self.done)}{rate}"


class Meter:
    """Counts files and bytes as they come. Methods may be called from several threads."""

    def __init__(self, files: int, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._all_files, self._total, self._clock = files, total, clock
        self._files = self._done = self._received = 0
        self._lock = threading.Lock()
        self._marks = deque([(clock(), 0)])

    def receive(self, count: int) -> None:
        """Bytes have come."""
        with self._lock:
            self._done += count
            self._received += count

    def keep(self, count: int) -> None:
        """Bytes that had come before count as done; with less than 0, bytes that turned out to be wrong do not."""
        with self._lock:
            self._done += count

    def end_file(self) -> None:
        """A file is complete."""
        with self._lock:
            self._files += 1

    def read(self) -> Transfer:
        """Return how far it is; to be called about once a second."""
        with self._lock:
            now = self._clock()
            self._marks.append((now, self._received))
            while len(self._marks) > 2 and now - self._marks[0][0] > WINDOW:
                self._marks.popleft()
            since, before = self._marks[0]
            rate = (self._received - before) / (now - since) if now > since else 0.0
            return Transfer(self._files, self._all_files, self._done, self._total, rate)


class Download(Struct, frozen=True):
    """How a file is fetched: what has come lies in `folder`, `meter` hears of each block, `stop` ends it."""

    folder: Path
    meter: Meter
    stop: threading.Event

    def fetch(self, wanted: RemoteFile, target: Path) -> None:
        """Bring a file to `target`, which is new, going on from what an earlier try left.

        Raises Refused where the server does not give the file to us, CutError where the connection breaks again and
        again, and OSError of `target` or the folder. The hash of what is at `target` is for the caller to compare:
        only where it went on from an earlier run's bytes was that done here, since they may be what is wrong.
        """
        with self._open_partial(wanted, target) as (file, path):
            before = file.seek(0, os.SEEK_END)
            self.meter.keep(before)
            self._fill(wanted, file)
            file.flush()
            if before and filetree.hash_file(path) != wanted.hash:
                self._forget(file)
                self._fill(wanted, file)
                file.flush()
            if path != target:
                _move(path, target)
            target.chmod(PLAIN_MODE)

    @contextmanager
    def _open_partial(self, wanted: RemoteFile, target: Path) -> Iterator[tuple[BinaryIO, Path]]:
        """Give the file of what has come, locked; where another run holds it (or locks do not work) `target` itself,
        from its beginning on."""
        make_private(self.folder)
        path = self.folder / wanted.partial
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        with open(os.open(path, flags, stat.S_IRUSR | stat.S_IWUSR), "r+b") as file:
            if _is_ours(file, path):
                try:
                    yield file, path
                finally:
                    _drop_empty(file, path)
                return
        with open(os.open(target, flags | os.O_EXCL, stat.S_IRUSR | stat.S_IWUSR), "r+b") as file:
            yield file, target

    def _fill(self, wanted: RemoteFile, file: BinaryIO) -> None:
        """Ask for what is missing until the file is complete."""
        silent = 0
        begin = file.seek(0, os.SEEK_END)
        while reason := self._go_on(wanted, file):
            silent = 0 if file.tell() > begin else silent + 1
            if silent >= _tries(wanted.index) or self.stop.wait(PAUSE * 2 ** max(0, silent - 1)):
                raise CutError(reason, file.tell())
            begin = file.tell()

    def _go_on(self, wanted: RemoteFile, file: BinaryIO) -> str:
        """Ask once for the rest; return "" when the file is complete, else why it is not."""
        have = file.tell()
        headers = {"Accept": "*/*", **({"Range": f"bytes={have}-"} if have else {})}
        if wanted.size and have == wanted.size:
            return ""
        try:
            with open_url(wanted.index, wanted.url, headers) as answer:
                return self._take(wanted, file, answer)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416:
                self._forget(file)
            elif 400 <= error.code < 500 and error.code not in ASKED_TO_WAIT:
                raise Refused(f"{error.code} {error.reason}") from None
            return f"{error.code} {error.reason}"
        except _DiskError as error:
            raise error.reason from None
        except (OSError, HTTPException) as error:
            return str(getattr(error, "reason", error)) or type(error).__name__
        except ValueError as error:
            raise Refused(str(error)) from None

    def _take(self, wanted: RemoteFile, file: BinaryIO, answer: HTTPResponse) -> str:
        """Write the content of an answer behind what has come, or in its place where it is the whole file."""
        begin, total = _part(answer)
        if begin != file.tell():
            self._forget(file)
        if begin != file.tell():
            return "the server sent another part of the file than it was asked for"
        if wanted.size and total and total != wanted.size:
            raise Refused(f"a file of {total} bytes, wanted {wanted.size}")
        longest = wanted.size or total or LONGEST_FILE
        while (have := file.tell()) < longest and not self.stop.is_set():
            block = answer.read(min(BLOCK, longest - have))
            if not block:
                break
            try:
                file.write(block)
                file.flush()
            except OSError as error:
                raise _DiskError(error) from None
            self.meter.receive(len(block))
        whole = wanted.size or total
        return "" if have == whole or not whole else f"cut off after {size(have)} of {size(whole)}"

    def _forget(self, file: BinaryIO) -> None:
        """Begin anew."""
        self.meter.keep(-file.seek(0, os.SEEK_END))
        file.seek(0)
        file.truncate()


class _DiskError(Exception):
    """Writing failed, which is no matter of the server."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _tries(index: PackageIndex) -> int:
    """Return how often in a row a server may send nothing: fewer where the caller's pip is set to."""
    retries = index.settings.get("retries", "")
    return min(TRIES, int(retries) + 1) if retries.isdecimal() else TRIES


def make_private(folder: Path) -> None:
    """Make a folder that nobody else may enter. Raises Trouble where something else stands in its place."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=stat.S_IRWXU)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        what = "is no folder of this account, and downloads that are not complete lie there"
        raise Trouble(Problem(str(folder), what, try_=f"rm -r {folder}"))
    if stat.S_IMODE(status.st_mode) != stat.S_IRWXU:
        folder.chmod(stat.S_IRWXU)


def _is_ours(file: BinaryIO, path: Path) -> bool:
    """Return whether `file`, which was opened at `path`, is locked by us and still lies there: another run that was
    faster has renamed it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except OSError:
        return False


def _drop_empty(file: BinaryIO, path: Path) -> None:
    """Remove what holds nothing to go on from."""
    with suppress(OSError):
        if os.fstat(file.fileno()).st_size == 0 and os.path.samestat(os.fstat(file.fileno()), path.lstat()):
            path.unlink()


def _part(answer: HTTPResponse) -> tuple[int, int]:
    """Return where the content of an answer begins in the file (-1: a part that does not say which), and the size of
    the whole file (0: not said)."""
    if answer.status == 206:
        match = CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", "").strip())
        return (int(match[1]), 0 if match[2] == "*" else int(match[2])) if match else (-1, 0)
    length = answer.headers.get("Content-Length", "")
    return 0, int(length) if length.isdecimal() else 0


def _move(path: Path, target: Path) -> None:
    """Rename, or where `target` is on another file system copy and remove."""
    try:
        os.replace(path, target)
    except OSError:
        shutil.copyfile(path, target)
        path.unlink()
