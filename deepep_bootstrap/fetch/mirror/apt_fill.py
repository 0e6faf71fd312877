"""Packages of the lock's apt repositories for a mirror: the vendor's signed indexes byte for byte, and the
packages that host recipes ask for, with their dependencies there.
"""

from __future__ import annotations

import filecmp
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.text import size
from deepep_bootstrap.fetch.mirror.apt_index import Opened, Shelf, open_part, record
from deepep_bootstrap.fetch.mirror.apt_parts import RepositoryPart
from deepep_bootstrap.fetch.mirror.apt_solver import Closure, Deb, Listed, Pool, close
from deepep_bootstrap.fetch.mirror.fill import Filled, FillJob, is_file, make_folder, place
from deepep_bootstrap.fetch.mirror.index import SCRATCH, measure


@dataclass(frozen=True)
class Brought:
    """What is taken from one repository: of which `date` its index is, the `debs`, and `elsewhere` what they ask for
    besides, which the distribution's own mirror has to bring."""

    opened: Opened
    debs: tuple[Deb, ...]
    elsewhere: tuple[str, ...]

    @property
    def name(self) -> str:
        """What the index of the mirror calls the repository."""
        return self.opened.part.name

    @property
    def date(self) -> str:
        """The date in the signed index."""
        return self.opened.release.date

    @property
    def bytes(self) -> int:
        """The size of all its packages."""
        return sum(deb.size for deb in self.debs)

    def path(self, deb: Deb) -> str:
        """Return the path of a package in the mirror."""
        return f"{self.opened.part.folder}/{deb.path}"


def fill_packages(job: FillJob, filled: Filled, parts: Sequence[RepositoryPart]) -> tuple[Brought, ...]:
    """Bring all parts into the mirror, and say what else hosts will need; what could not be brought is in the
    problems of `filled`."""
    made: list[Brought] = []

    def bring(found: Sequence[Brought], shelves: Sequence[Shelf]) -> None:
        for brought, shelf in zip(found, shelves, strict=True):
            place_part(job, filled, brought, shelf)
        made.extend(found)

    with _scratch(job.root) as scratch:
        for mine in _systems(parts):
            try:
                _look(job, mine, scratch, bring)
            except Trouble as trouble:
                filled.problems.extend(trouble.problems)
    for brought in made:
        filled.packages[brought.name] = brought.opened.part.copied
        tell(job.say, brought)
    return tuple(made)


def foretell_packages(job: FillJob, parts: Sequence[RepositoryPart]) -> tuple[tuple[Brought, ...], dict[str, int]]:
    """Return what would be brought, and by path the sizes of the packages that are not there yet; indexes are
    fetched and verified, nothing is written into the mirror. Raises Trouble when they cannot be had."""
    made: list[Brought] = []
    with tempfile.TemporaryDirectory(prefix="deepep-bootstrap-") as scratch:
        for mine in _systems(parts):
            _look(job, mine, Path(scratch), lambda found, _: made.extend(found))
    for brought in made:
        tell(job.say, brought)
    sizes = {brought.path(deb): deb.size for brought in made for deb in brought.debs}
    absent = {
        path: bytes_
        for path, bytes_ in sizes.items()
        if not is_file(job.root, path) or (job.root / path).stat().st_size != bytes_
    }
    return tuple(made), absent


def tell(say: Callable[[str], None], brought: Brought) -> None:
    """Say what of a repository is, or would be, in the mirror, and what is not."""
    key = brought.opened.part.repository.key_fingerprint
    say(
        f"packages {brought.name}: {len(brought.debs)} packages, {size(brought.bytes)}; index of {brought.date}, "
        f"signed by {key}"
    )
    if brought.elsewhere:
        say(f"packages {brought.name}: hosts get from their distribution's own mirror: {', '.join(brought.elsewhere)}")


def place_part(job: FillJob, filled: Filled, brought: Brought, shelf: Shelf) -> None:
    """Put packages, then lists, then key and signature into their places, so that no list there names a package that
    is not."""
    make_folder(job.root, "packages")
    for deb in brought.debs:
        listed = Listed(deb.size, deb.sha256)
        _put(job, filled, brought.path(deb), shelf.get(deb.path, listed))
        filled.files[brought.path(deb)] = record(listed)
    for path, file in brought.opened.files.items():
        _put(job, filled, path, file)
        filled.files[path] = measure(job.root, path)


def _put(job: FillJob, filled: Filled, path: str, file: Path) -> None:
    if file == job.root / path or (is_file(job.root, path) and filecmp.cmp(file, job.root / path, shallow=False)):
        return
    there = os.path.lexists(job.root / path)
    place(job.root, path, file)
    if path not in {*filled.added, *filled.repaired}:
        (filled.repaired if there else filled.added).append(path)


def _look(
    job: FillJob,
    parts: Sequence[RepositoryPart],
    scratch: Path,
    act: Callable[[Sequence[Brought], Sequence[Shelf]], None],
) -> None:
    """Open the repositories of one distribution and act on what is wanted of them: on the indexes that the mirror
    has, where these are whole and do; else on those of today. Raises Trouble when neither does."""
    there = all(Shelf(job.root, part, job.mirrors, scratch, local=True).has_release() for part in parts)
    for local in (True, False) if there else (False,):
        shelves = [Shelf(job.root, part, job.mirrors, scratch, local) for part in parts]
        try:
            return act(_brought([open_part(shelf) for shelf in shelves]), shelves)
        except Trouble:
            if not local:
                raise
    return None


def _brought(opened: Sequence[Opened]) -> list[Brought]:
    """Return what is wanted of each repository: by purpose, out of all repositories that a host gets for it. Raises
    Trouble where one has not what the lock names."""
    debs: list[set[Deb]] = [set() for _ in opened]
    elsewhere: list[set[str]] = [set() for _ in opened]
    problems: list[Problem] = []
    for purpose in dict.fromkeys(purpose for each in opened for purpose in each.part.wanted):
        numbers = [number for number, each in enumerate(opened) if purpose in each.part.wanted]
        for closure in _closures([opened[number] for number in numbers], purpose):
            problems += closure.problems
            for number in numbers:
                debs[number] |= set(closure.debs).intersection(opened[number].debs)
                elsewhere[number] |= set(closure.elsewhere)
    if problems:
        raise Trouble(*dict.fromkeys(problems))
    return [
        Brought(each, tuple(sorted(mine, key=lambda deb: deb.path)), tuple(sorted(rest)))
        for each, mine, rest in zip(opened, debs, elsewhere, strict=True)
    ]


def _closures(opened: Sequence[Opened], purpose: str) -> Iterator[Closure]:
    """Yield what a purpose takes on each architecture that these repositories have packages for; on the first in any
    case."""
    part, debs = opened[0].part, tuple(deb for each in opened for deb in each.debs)
    where = f"packages {', '.join(each.part.name for each in opened)}"
    for number, arch in enumerate(part.archs):
        if number == 0 or any(deb.arch == arch for deb in debs):
            yield close(Pool(debs, arch), part.wanted[purpose], where)


def _systems(parts: Iterable[RepositoryPart]) -> list[list[RepositoryPart]]:
    groups: dict[str, list[RepositoryPart]] = {}
    for part in parts:
        groups.setdefault(part.system, []).append(part)
    return list(groups.values())


@contextmanager
def _scratch(root: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=root) as name:
        yield Path(name)
