"""Filling of a mirror: missing files are fetched and verified, broken ones fetched anew, right ones left
alone.

The truth is the lock, not what an earlier run left behind: wheels are hashed, sources are written out of
the mirror and their trees hashed. Nothing is written through a symbolic link.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field

from deepep_bootstrap.core import filetree
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.text import size
from deepep_bootstrap.fetch.download import PARTIAL, Transfer
from deepep_bootstrap.fetch.git import Pin
from deepep_bootstrap.fetch.locations import GIT, WHEELS, Mirrors, repository_path, wheel_path
from deepep_bootstrap.fetch.mirror.git import modules, pinned, served, write_repository
from deepep_bootstrap.fetch.mirror.index import (
    PAGE,
    SCRATCH,
    Held,
    MirrorIndex,
    MirrorWants,
    Record,
    differs,
    folders,
    measure,
    page,
    walk,
)
from deepep_bootstrap.fetch.sources import measure_source
from deepep_bootstrap.fetch.uv import cache_dir
from deepep_bootstrap.fetch.wheels import cached_file, fetch_each, is_cached
from deepep_bootstrap.lock.model import Source, Wheel


class FillJob(Struct, frozen=True):
    """The mirror at `root` is to hold `wanted`; what it lacks comes through `mirrors`. `old` is its index so far;
    what that has and nobody wants stays, unless `prune`."""

    root: Path
    wanted: MirrorWants
    mirrors: Mirrors
    old: MirrorIndex | None
    prune: bool
    say: Callable[[str], None]
    on_transfer: Callable[[Transfer], None] = lambda transfer: None
    """Hears about once a second how far the wheels are."""

    @property
    def carried(self) -> dict[str, Record]:
        """The files of the index so far that are still there; with `prune` none."""
        if self.old is None or self.prune:
            return {}
        return {path: record for path, record in self.old.files.items() if is_file(self.root, path)}


class Filled(Struct):
    """What is in the mirror by now. Grows while it is filled; `added` and `repaired` are paths of repositories and
    files."""

    files: dict[str, Record] = field(default_factory=dict)
    sources: list[Held] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def fill(job: FillJob) -> Filled:
    """Bring everything that is wanted into the mirror; what could not be brought is in `problems`, the rest is there
    all the same."""
    filled = Filled()
    for folder in (GIT, WHEELS):
        make_folder(job.root, folder)
    fill_sources(job, filled)
    fill_wheels(job, filled)
    write_pages(job, filled)
    return filled


def fill_sources(job: FillJob, filled: Filled) -> None:
    """Bring the repositories of all sources and, where their hash covers them, of their submodules; then verify each
    source."""
    placed: dict[str, set[str]] = {}
    waiting = by_repository([_pin(source) for source in job.wanted.sources])
    while waiting:
        for path, pins in waiting.items():
            placed.setdefault(path, set()).update(pin.rev for pin in pins)
        submodules = place_repositories(job, filled, waiting)
        waiting = by_repository(pin for pin in submodules if pin.rev not in placed.get(repository_path(pin.url), ()))
    for path in placed:
        filled.files |= {name: measure(job.root, name) for name in walk_below(job.root, path)}
    verify_sources(job, filled)


def place_repositories(job: FillJob, filled: Filled, wanted: Mapping[str, Sequence[Pin]]) -> list[Pin]:
    """Bring repositories by their path, and return the submodules that their pins cover."""
    submodules: list[Pin] = []
    for path, pins in wanted.items():
        try:
            place_repository(job, filled, path, pins)
            submodules += submodules_of(job.root, pins)
        except Trouble as trouble:
            filled.problems.extend(trouble.problems)
    return submodules


def by_repository(pins: Iterable[Pin]) -> dict[str, list[Pin]]:
    """Return pins by the path of their repository in the mirror; of several with one commit the last."""
    found: dict[str, dict[str, Pin]] = {}
    for pin in pins:
        found.setdefault(repository_path(pin.url), {})[pin.rev] = pin
    return {path: list(commits.values()) for path, commits in found.items()}


def submodules_of(root: Path, pins: Sequence[Pin]) -> list[Pin]:
    """Return the submodules of those pins whose hash covers them. Raises Trouble where the mirror at `root` does not
    give out a commit."""
    return [module for pin in pins if pin.submodules for module in modules(pin, root)]


def verify_sources(job: FillJob, filled: Filled) -> None:
    """Verify every wanted source. Where a repository could not be had, that was said; what it keeps from being written
    out is no news."""
    was_said = bool(filled.problems)
    for source in job.wanted.sources:
        try:
            verify_source(job, filled, source)
        except Trouble as trouble:
            filled.problems.extend(() if was_said else trouble.problems)


def place_repository(job: FillJob, filled: Filled, path: str, pins: Sequence[Pin]) -> None:
    """See to it that the repository at `path` keeps the commits of `pins`: one that is as recorded stays or grows,
    any other is made anew."""
    there = os.path.lexists(job.root / path)
    made = path in {*filled.added, *filled.repaired}
    have = pinned(job.root, path) if made or (there and is_intact(job, path)) else ()
    missing = [pin for pin in pins if pin.rev not in have]
    if not missing:
        return
    make_folder(job.root, path.rpartition("/")[0])
    if (job.root / path).is_symlink() or (there and not (job.root / path).is_dir()):
        (job.root / path).unlink()
    write_repository(missing if have else pins, job.mirrors, job.root, have)
    job.say(f"{path}: {', '.join(f'{pin.name} {pin.rev[:12]}' for pin in missing)}")
    known = there and any(name.startswith(f"{path}/") for name in (job.old.files if job.old else ()))
    if not made:
        (filled.repaired if known and not have else filled.added).append(path)


def is_intact(job: FillJob, path: str) -> bool:
    """Return whether the repository at `path` has exactly the files that the index so far says, each with its hash."""
    recorded = {
        name: record for name, record in (job.old.files if job.old else {}).items() if name.startswith(f"{path}/")
    }
    there = walk_below(job.root, path)
    if not recorded or set(there) != set(recorded):
        return False
    return not any(differs(job.root, name, status, recorded[name]) for name, status in there.items())


def walk_below(root: Path, path: str) -> dict[str, os.stat_result]:
    """Return the files below the folder `path` of a mirror by their paths from its root; none where there is no such
    folder."""
    if not is_plain(root, path) or not (root / path).is_dir():
        return {}
    return {f"{path}/{name}": status for name, status in walk(root / path).items()}


def verify_source(job: FillJob, filled: Filled, source: Source) -> None:
    """Write a source out of the mirror, with nothing else in reach, and compare its hash with the lock. Raises
    Trouble."""
    found = measure_source(source, served(job.root))
    if found.hash != source.hash:
        what = f"the tree of {source.rev[:12]} is not the locked one"
        filled.problems.append(Problem(f"source {source.name}", what, found.hash, source.hash))
        return
    filled.problems.extend(found.problems)
    filled.sources.append(Held(source.name, source.url, source.rev, source.hash))
    job.say(f"source {source.name} {source.rev[:12]}: hash as locked")


def fill_wheels(job: FillJob, filled: Filled) -> None:
    """Bring every wheel that is not there as locked."""
    by_path: dict[str, Wheel] = {}
    for wheel in job.wanted.wheels:
        path = wheel_path(wheel.index, wheel.name, wheel.file)
        if by_path.setdefault(path, wheel).hash != wheel.hash:
            what = "the lock has two files of this name from one index"
            filled.problems.append(Problem(f"wheel {wheel.file}", what, by_path[path].hash, wheel.hash))
    missing: dict[str, Wheel] = {}
    for path, wheel in by_path.items():
        if is_file(job.root, path) and (found := measure(job.root, path)).hash == wheel.hash:
            filled.files[path] = found
        else:
            missing[path] = wheel
    bytes_ = sum(wheel.size for wheel in missing.values())
    job.say(f"wheels: {len(by_path) - len(missing)} are there, {len(missing)} to fetch ({size(bytes_)})")
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=job.root) as name:
        scratch = Path(name)
        for path, wheel in missing.items():
            if is_cached(wheel, cache_dir()):
                place_cached(job, filled, path, wheel, scratch)
        fetch_missing(
            job, filled, {path: wheel for path, wheel in missing.items() if path not in filled.files}, scratch
        )


def place_cached(job: FillJob, filled: Filled, path: str, wheel: Wheel, scratch: Path) -> None:
    """Put a wheel into its place that the cache of downloads has; one that is damaged there comes as all others."""
    file = cached_file(wheel, cache_dir())
    if filetree.hash_file(file) == wheel.hash:
        place_wheel(job, filled, path, wheel, Path(shutil.copyfile(file, scratch / wheel.file)))


def fetch_missing(job: FillJob, filled: Filled, missing: Mapping[str, Wheel], scratch: Path) -> None:
    """Fetch wheels of all stacks side by side, each put into its place as it comes. What has come of one whose
    connection broke stays in the mirror's folder PARTIAL until a run gets all of them."""
    # Two indexes may have one and the same file: it is fetched once.
    paths: dict[tuple[str, str], list[str]] = {}
    for path, wheel in missing.items():
        paths.setdefault((wheel.hash, wheel.file), []).append(path)
    wanted = [missing[first] for first, *_ in paths.values()]
    partial = job.root / PARTIAL
    tried = 0
    failed = False
    for wheel, file in fetch_each(wanted, job.mirrors, scratch, partial, job.on_transfer):
        tried += 1
        if isinstance(file, Trouble):
            failed = True
            filled.problems.extend(file.problems)
            continue
        job.say(f"{wheel.file} ({file.stat().st_size / 1e6:.1f} MB)")
        first, *others = paths[wheel.hash, wheel.file]
        for path in others:
            place_wheel(job, filled, path, wheel, Path(shutil.copyfile(file, scratch / wheel.file)))
        place_wheel(job, filled, first, wheel, file)
    if left := len(wanted) - tried:
        filled.problems.append(Problem("wheels", f"{left} more were not tried", try_="the same command again"))
    if not failed and partial.is_dir() and not partial.is_symlink():
        shutil.rmtree(partial)


def place_wheel(job: FillJob, filled: Filled, path: str, wheel: Wheel, file: Path) -> None:
    """Put a verified wheel into its place."""
    there = os.path.lexists(job.root / path)
    place(job.root, path, file)
    filled.files[path] = Record((job.root / path).stat().st_size, wheel.hash)
    (filled.repaired if there else filled.added).append(path)


def write_pages(job: FillJob, filled: Filled) -> None:
    """Write the page of links of every distribution; one that is right is left alone."""
    files = job.carried | filled.files
    for folder, paths in folders([*files]).items():
        text = page({path.rpartition("/")[2]: files[path] for path in paths})
        path = f"{folder}/{PAGE}"
        if not is_file(job.root, path) or (job.root / path).read_bytes() != text.encode():
            with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=job.root) as scratch:
                (Path(scratch) / PAGE).write_text(text, encoding="utf-8")
                place(job.root, path, Path(scratch) / PAGE)
        filled.files[path] = measure(job.root, path)


def place(root: Path, path: str, file: Path) -> None:
    """Rename `file` to `path` of the mirror, whatever stood there. Raises Trouble where that is a folder."""
    make_folder(root, path.rpartition("/")[0])
    target = root / path
    if target.is_dir() and not target.is_symlink():
        raise Trouble(Problem(str(target), "is a folder where a file belongs", try_=f"rm -r {target}"))
    file.chmod(stat.S_IRUSR | stat.S_IWUSR | stat.S_IRGRP | stat.S_IROTH)
    os.replace(file, target)


def make_folder(root: Path, path: str) -> None:
    """Make the folder `path` of the mirror. Raises Trouble where a symbolic link or a file is in the way: nothing is
    written elsewhere."""
    folder = root
    for step in path.split("/"):
        folder = folder / step
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise Trouble(
                Problem(
                    str(folder), "is no plain folder; a mirror is written through nothing else", try_=f"rm {folder}"
                )
            )
        if not folder.exists():
            folder.mkdir()
            # Web servers, and apt on hosts, read as users of their own, whatever the umask of who writes the mirror.
            folder.chmod(stat.S_IMODE(folder.stat().st_mode) | 0o055)


def is_file(root: Path, path: str) -> bool:
    """Return whether `path` of the mirror is a regular file, reached through no symbolic link."""
    return is_plain(root, path) and (root / path).is_file()


def is_plain(root: Path, path: str) -> bool:
    """Return whether no step of `path` is a symbolic link."""
    steps = path.split("/")
    return not any((root / "/".join(steps[:count])).is_symlink() for count in range(1, len(steps) + 1))


def _pin(source: Source) -> Pin:
    return Pin(source.name, source.url, source.ref, source.rev, source.submodules)
