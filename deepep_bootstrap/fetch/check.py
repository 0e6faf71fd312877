"""The wheels of a lock compared with their indexes: still offered, and the same. Nothing is written, and
little is downloaded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct
from packaging.utils import canonicalize_name

from deepep_bootstrap.core import filetree
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.fetch.index import Offered, PackageIndex, find_file, find_index, offered, size_of
from deepep_bootstrap.fetch.locations import Mirrors, is_address
from deepep_bootstrap.fetch.pip import own_settings
from deepep_bootstrap.fetch.renew import CheckedPin
from deepep_bootstrap.fetch.wheels import cached_file, fetch_wheel
from deepep_bootstrap.lock.model import Wheel

AT_ONCE = 8


class Ways(Struct, frozen=True):
    """How wheels are looked at: through `mirrors`, with files in `cache` where an index does not answer; `download`
    fetches each anew."""

    mirrors: Mirrors
    cache: Path
    download: bool = False


def check_wheels(
    wheels: Iterable[Wheel], ways: Ways, on_done: Callable[[Wheel, CheckedPin], None]
) -> dict[Wheel, CheckedPin]:
    """Compare wheels with what their indexes have: a directory's files are hashed, a server is asked for hash and size
    of its files.

    `on_done` gets each wheel with what was found, in the order given.
    """
    several = list(dict.fromkeys(wheels))
    names = list(dict.fromkeys(wheel.index for wheel in several))
    places = [ways.mirrors.index(name) for name in names]
    settings = own_settings() if any(not place or is_address(place) for place in places) else {}
    indexes: dict[str, PackageIndex | Trouble] = {}
    for name in names:
        try:
            indexes[name] = find_index(name, ways.mirrors, settings)
        except Trouble as trouble:
            indexes[name] = trouble
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="index") as pool:
        pages = {} if ways.download else _pages(several, indexes, pool)

        def one(wheel: Wheel) -> CheckedPin:
            try:
                return _check(wheel, indexes[wheel.index], pages.get(_page_of(wheel)), ways)
            except Trouble as trouble:
                return CheckedPin(trouble.problems)

        found: dict[Wheel, CheckedPin] = {}
        for wheel, checked in zip(several, (map if ways.download else pool.map)(one, several), strict=True):
            found[wheel] = checked
            on_done(wheel, checked)
    return found


Page = Mapping[str, Offered] | Trouble


def _page_of(wheel: Wheel) -> tuple[str, str]:
    return wheel.index, canonicalize_name(wheel.name)


def _pages(
    wheels: Sequence[Wheel], indexes: Mapping[str, PackageIndex | Trouble], pool: ThreadPoolExecutor
) -> dict[tuple[str, str], Page]:
    """Read the pages of all distributions that a server offers, each once."""

    def read(where: tuple[str, str]) -> Page:
        index = indexes[where[0]]
        if isinstance(index, Trouble):
            return index
        try:
            return offered(index, where[1])
        except Trouble as trouble:
            return trouble

    asked = [
        where
        for where in dict.fromkeys(map(_page_of, wheels))
        if isinstance(index := indexes[where[0]], Trouble) or not index.folder
    ]
    return dict(zip(asked, pool.map(read, asked), strict=True))


def _check(wheel: Wheel, index: PackageIndex | Trouble, page: Page | None, ways: Ways) -> CheckedPin:
    if isinstance(index, PackageIndex) and index.folder:
        return _compare_file(wheel, find_file(wheel, index.folder))
    if ways.download:
        with tempfile.TemporaryDirectory(prefix="deepep-bootstrap-") as scratch:
            return _compare_file(wheel, fetch_wheel(wheel, ways.mirrors, Path(scratch)))
    if isinstance(index, Trouble) or page is None or isinstance(page, Trouble):
        file = cached_file(wheel, ways.cache)
        trouble = index if isinstance(index, Trouble) else page
        if not file.is_file():
            return CheckedPin(trouble.problems if isinstance(trouble, Trouble) else ())
        note = f"index {wheel.index} does not answer; the file that was downloaded before is as locked"
        return CheckedPin(_compare_file(wheel, file).problems, (note,))
    return _compare_offer(wheel, index, page)


def _compare_file(wheel: Wheel, file: Path) -> CheckedPin:
    return CheckedPin(tuple(_differences(wheel, str(file), filetree.hash_file(file), file.stat().st_size)))


def _compare_offer(wheel: Wheel, index: PackageIndex, page: Mapping[str, Offered]) -> CheckedPin:
    """Compare a wheel with the page of its distribution."""
    offer = page.get(wheel.file)
    if offer is None:
        same = [each.file for each in page.values() if each.hash == wheel.hash]
        what = f"{wheel.file} has vanished from {index.where}"
        found = (
            f"{len(page)} other files of {wheel.name}" if page and not same else (same or ["nothing of this name"])[0]
        )
        remedy = "invoke lock --update python, or --mirror with a directory that has it"
        return CheckedPin((Problem(f"wheel {wheel.name} {wheel.version}", what, found, try_=remedy),))
    if not offer.hash:
        remedy = "--download, which fetches every wheel and hashes it"
        return CheckedPin(
            (Problem(f"wheel {wheel.file}", f"{index.where} gives no hash for it", wanted=wheel.hash, try_=remedy),)
        )
    notes = (
        ()
        if offer.yanked is None
        else (f"was withdrawn (yanked){': ' if offer.yanked else ''}{offer.yanked}; it is still offered",)
    )
    size = wheel.size
    if offer.hash == wheel.hash and wheel.size:
        size = offer.size or size_of(index, offer.url)
    return CheckedPin(tuple(_differences(wheel, f"what {index.where} offers", offer.hash, size)), notes, stated=True)


def _differences(wheel: Wheel, what: str, found: str, size: int) -> list[Problem]:
    where = f"wheel {wheel.file}"
    if found != wheel.hash:
        return [Problem(where, f"{what} is another file under the same name", found, wheel.hash)]
    if wheel.size and size != wheel.size:
        return [Problem(where, f"{what} has another size", f"{size} bytes", f"{wheel.size} bytes")]
    return []
