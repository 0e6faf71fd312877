"""Wheel files by exact name and hash: from a directory, from the server of their index, or through pip with the
caller's own index, proxy, certificates and accounts.
"""

from __future__ import annotations

import base64
import os
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from pathlib import Path

from deepep_bootstrap.core import filetree
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.text import size
from deepep_bootstrap.fetch import pip
from deepep_bootstrap.fetch.download import PARTIAL, CutError, Download, Meter, Refused, RemoteFile, Transfer
from deepep_bootstrap.fetch.index import Offered, PackageIndex, find_file, find_index, offered
from deepep_bootstrap.fetch.locations import Mirrors, is_address
from deepep_bootstrap.lock.model import Wheel

AT_ONCE = 4
TELL_EVERY = 1.0
"""Seconds between two looks at how far a download is."""


def fetch_wheel(wheel: Wheel, mirrors: Mirrors, cache: Path) -> Path:
    """Return the file of `wheel` in the cache, under its own name, with the locked hash; fetch it where it is not
    there.

    Raises Trouble when its index cannot give it or gives another content; nothing is kept then but the beginning of
    a file whose connection broke. Runs beside others safely.
    """
    return _Fetcher(mirrors, cache, cache / PARTIAL, Meter(1, wheel.size)).fetch(wheel)


def is_cached(wheel: Wheel, cache: Path) -> bool:
    """Return whether the cache has a file for `wheel`; its hash is compared when it is used."""
    return cached_file(wheel, cache).is_file()


def cached_file(wheel: Wheel, cache: Path) -> Path:
    """Return where the cache keeps the file of `wheel` when it has it."""
    return cache / "files" / base64.b64decode(wheel.hash.partition("-")[2]).hex()[:32] / wheel.file


def fetch_wheels(
    wheels: Sequence[Wheel],
    mirrors: Mirrors,
    cache: Path,
    on_line: Callable[[str], None],
    on_transfer: Callable[[Transfer], None] = lambda transfer: None,
) -> dict[str, Path]:
    """Fetch several wheels side by side; return their files by distribution name, in the order given.

    `on_line` gets one line for each wheel that is there, `on_transfer` about once a second how far it is. Raises
    Trouble with every wheel that failed.
    """
    found: dict[Wheel, Path] = {}
    failed: dict[Wheel, Trouble] = {}
    for wheel, file in fetch_each(wheels, mirrors, cache, cache / PARTIAL, on_transfer):
        if isinstance(file, Trouble):
            failed[wheel] = file
        else:
            on_line(f"{wheel.file} ({file.stat().st_size / 1e6:.1f} MB)")
            found[wheel] = file
    if failed:
        raise Trouble(*(problem for wheel in wheels if wheel in failed for problem in failed[wheel].problems))
    return {wheel.name: found[wheel] for wheel in wheels}


def fetch_each(
    wheels: Sequence[Wheel], mirrors: Mirrors, cache: Path, partial: Path, on_transfer: Callable[[Transfer], None]
) -> Iterator[tuple[Wheel, Path | Trouble]]:
    """Fetch several wheels side by side and yield each with its file in `cache`, or with why it cannot be had, as they
    come. What has come of a file whose connection breaks lies in the folder `partial`.

    All that a directory lacks is told; an index that fails once is not asked again for what has not begun, so that not
    every wheel need be yielded. What runs when the caller goes away (^C) is ended: pip has a process group of its own,
    which ^C on the terminal does not reach.
    """
    fetcher = _Fetcher(mirrors, cache, partial, Meter(len(wheels), sum(wheel.size for wheel in wheels)))
    network = any(not place or is_address(place) for place in (mirrors.index(wheel.index) for wheel in wheels))
    waiting: dict[Future[Path], Wheel] = {Future(): wheel for wheel in wheels}
    _start(fetcher, waiting)
    try:
        while waiting:
            done, _ = wait(waiting, timeout=TELL_EVERY, return_when=FIRST_COMPLETED)
            on_transfer(fetcher.meter.read())
            for future in sorted(done, key=[*waiting].index):
                wheel = waiting.pop(future)
                if not future.cancelled():
                    yield wheel, _result(future, waiting if network else ())
    finally:
        _cancel(waiting)
        fetcher.end()


def _cancel(futures: Iterable[Future[Path]]) -> None:
    """What has not begun does not begin."""
    for future in futures:
        future.cancel()


def _result(future: Future[Path], others: Iterable[Future[Path]]) -> Path | Trouble:
    """Return the file that has come, or the trouble, after which `others` do not begin; any other exception is
    raised."""
    try:
        return future.result()
    except Trouble as trouble:
        _cancel(others)
        return trouble


def _start(fetcher: _Fetcher, waiting: Mapping[Future[Path], Wheel]) -> None:
    """Start threads that fetch. They are daemons: what they read from a server may say nothing for a minute, for
    which a program that ends does not wait."""
    jobs = deque(waiting.items())

    def work() -> None:
        with suppress(IndexError):  # nothing is left to do
            while True:
                _settle(fetcher, *jobs.popleft())

    for number in range(min(AT_ONCE, len(jobs))):
        threading.Thread(target=work, name=f"wheel-{number}", daemon=True).start()


def _settle(fetcher: _Fetcher, future: Future[Path], wheel: Wheel) -> None:
    """Fetch a wheel, where that was not cancelled, and tell how it went."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(fetcher.fetch(wheel))
    except Trouble as trouble:
        future.set_exception(trouble)
    except BaseException as error:
        future.set_exception(error)
        raise


class _Fetcher:
    """Wheels into the folder `cache`, with what has come of them in `partial`. Methods may be called from several
    threads."""

    def __init__(self, mirrors: Mirrors, cache: Path, partial: Path, meter: Meter) -> None:
        self.meter = meter
        self._mirrors, self._cache = mirrors, cache
        self._download = Download(partial, meter, threading.Event())
        self._running = pip.Programs()
        self._lock = threading.Lock()
        self._settings: Mapping[str, str] | None = None
        self._indexes: dict[str, PackageIndex] = {}
        self._pages: dict[tuple[str, str], Mapping[str, Offered]] = {}

    def end(self) -> None:
        """End what runs."""
        self._download.stop.set()
        self._running.end()

    def fetch(self, wheel: Wheel) -> Path:
        """Return the file of `wheel` in the cache, with the locked hash. Raises Trouble."""
        target = cached_file(wheel, self._cache)
        folder = target.parent
        try:
            if not target.is_file() or filetree.hash_file(target) != wheel.hash:
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(prefix=".tmp-", dir=folder) as scratch:
                    file = self._get(wheel, Path(scratch))
                    found = filetree.hash_file(file)
                    if found != wheel.hash:
                        raise Trouble(self._not_locked(wheel, found))
                    os.replace(file, target)
            else:
                self.meter.keep(wheel.size)
        except OSError as error:
            what = f"the cache cannot be used: {error.strerror}"
            where = str(error.filename or folder)
            raise Trouble(Problem(where, what, try_="XDG_CACHE_HOME=DIR")) from None
        self.meter.end_file()
        return target

    def _not_locked(self, wheel: Wheel, found: str) -> Problem:
        """Return that a file has another hash than the lock's."""
        place = self._mirrors.index(wheel.index)
        if place and not is_address(place):
            return Problem(f"wheel {wheel.file}", "this file is not the locked one", found, wheel.hash)
        return pip.not_given(wheel, place, found, wheel.hash)

    def _get(self, wheel: Wheel, scratch: Path) -> Path:
        place = self._mirrors.index(wheel.index)
        if place and not is_address(place):
            file = _copy(wheel, Path(place), scratch)
        elif own := self._get_from_server(wheel, scratch):
            return own
        else:
            file = pip.download(wheel, place, scratch, self._running)
        self.meter.receive(wheel.size)
        return file

    def _get_from_server(self, wheel: Wheel, scratch: Path) -> Path | None:
        """Fetch a wheel from the server of its index, going on where an earlier try was cut; None where that is
        nothing for us: pip knows more ways to ask, and what to say of an index that does not have it."""
        try:
            index = self._index(wheel.index)
            if index.folder is not None:
                return None
            offer = self._page(index, wheel).get(wheel.file)
        except Trouble:
            return None
        if offer is None or offer.hash not in {"", wheel.hash}:
            return None
        file = scratch / "file"
        try:
            self._download.fetch(RemoteFile(index, offer.url, wheel.hash, wheel.size), file)
        except Refused:
            return None
        except CutError as error:
            if not error.have:
                return None
            come = f"{size(error.have)} of {size(wheel.size)}" if wheel.size else size(error.have)
            what = f"the connection broke while {wheel.file} came: {come} are kept"
            again = "the same command again, which goes on from there"
            raise Trouble(Problem(index.where, what, str(error), try_=again)) from None
        return file

    def _index(self, name: str) -> PackageIndex:
        """Return an index; the caller's pip is asked for its settings once."""
        with self._lock:
            if name not in self._indexes:
                if self._settings is None:
                    self._settings = pip.own_settings()
                self._indexes[name] = find_index(name, self._mirrors, self._settings)
            return self._indexes[name]

    def _page(self, index: PackageIndex, wheel: Wheel) -> Mapping[str, Offered]:
        """Return what an index offers of a distribution; a page is kept for the other wheels on it."""
        key = index.name, wheel.name
        if key not in self._pages:
            self._pages[key] = offered(index, wheel.name)
        return self._pages[key]


def _copy(wheel: Wheel, place: Path, scratch: Path) -> Path:
    """Copy the wheel out of a directory. One of another size is not even read."""
    candidate = find_file(wheel, place)
    if wheel.size and (found := candidate.stat().st_size) != wheel.size:
        what = f"{candidate} is not the locked file"
        raise Trouble(Problem(f"wheel {wheel.file}", what, f"{found} bytes", f"{wheel.size} bytes"))
    return shutil.copyfile(candidate, scratch / wheel.file)
