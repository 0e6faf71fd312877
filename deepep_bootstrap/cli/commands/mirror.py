"""`invoke mirror DIR`: everything that bootstraps of some stacks fetch, in one directory; `--check`: all of
it there and unchanged.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepep_bootstrap.core import recipes
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import OK, TROUBLE, VERDICT, Problem, Trouble
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.core.text import size
from deepep_bootstrap.fetch import locations
from deepep_bootstrap.fetch.download import Transfer
from deepep_bootstrap.fetch.locations import INDEX, repository_path, wheel_path
from deepep_bootstrap.fetch.mirror import index
from deepep_bootstrap.fetch.mirror.fill import Filled, FillJob, fill, is_file
from deepep_bootstrap.fetch.mirror.index import (
    MARKER,
    PINS,
    SCRATCH,
    Held,
    MirrorFault,
    MirrorIndex,
    compare,
    lacking,
    read_mirror_index,
    render_mirror_index,
    walk,
)
from deepep_bootstrap.fetch.mirror.selection import MirrorSelection, SelectionFlags, choose_contents, with_index
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.lock import model as locks
from deepep_bootstrap.lock.model import Lock
from deepep_bootstrap.remote.host import THIS_MACHINE

FETCH = "fetch wheels"


def mirror(flags: Flags, directory: str, *, check: bool = False, target: str = "", prune: bool = False) -> int:
    """Put everything that a bootstrap fetches into one directory, for --mirror where there is no network; --check
    hashes it again.

    `target` names wheel targets joined by commas, `--stack` stacks.

    Exit 1 when something could not be fetched, 4 when a check finds the mirror incomplete, changed, or made for other
    pins.
    """
    screen = Screen("mirror", as_json=flags.json)
    if locations.is_address(directory) or not directory.strip():
        raise Trouble(
            Problem("mirror", "is written into a directory", directory, "a path", "serving that directory afterwards")
        )
    if check and (prune or flags.dry_run):
        raise Trouble(Problem("--check", "changes nothing and does not go with --prune or --dry-run"))
    root = Path(os.path.expanduser(directory)).absolute()
    lock = locks.read_lock_file(flags.lock or flags.root / "deepep.lock.toml")
    selected = SelectionFlags.of(flags.stack, target)
    if check:
        return check_mirror(screen, root, lock, selected)
    choice = choose_contents(lock, selected)
    found = locations.read_mirrors(flags.mirror, os.environ, lock.indexes)
    check_place(root)
    if flags.dry_run:
        return foretell(screen, choice, FillJob(root, choice.wanted, found, None, False, screen.say))
    with writing(root):
        shown = _Shown(screen)
        job = FillJob(root, choice.wanted, found, old_index(screen, root), prune, screen.say, shown.transfer)
        with screen.progress():
            filled = fill(job)
        shown.end()
        return write_mirror(screen, choice, job, filled)


def check_place(root: Path) -> None:
    """Raise Trouble where a directory holds other things than a mirror: --prune and repairs are not for those."""
    if root.exists() and not root.is_dir():
        raise Trouble(Problem(str(root), "is no directory"))
    if root.is_dir() and any(root.iterdir()) and not ((root / INDEX).is_file() or (root / MARKER).is_file()):
        raise Trouble(
            Problem(str(root), "is neither empty nor a mirror", wanted=f"{INDEX} in it", try_="a new directory")
        )


@contextmanager
def writing(root: Path) -> Iterator[None]:
    """Mark the mirror as incomplete while the body writes it, which takes the mark away at its end; refuse a second
    writer."""
    root.mkdir(parents=True, exist_ok=True)
    with open(os.open(root / MARKER, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644), "w", encoding="utf-8") as marker:
        try:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # A filesystem without locks is no reason to refuse; a lock that somebody holds is.
            if error.errno in {errno.EAGAIN, errno.EACCES}:
                raise Trouble(
                    Problem(str(root), "another invoke mirror is writing there", try_="waiting for its end")
                ) from None
        for each in root.glob(f"{SCRATCH}*"):
            remove(each)
        yield


def old_index(screen: Screen, root: Path) -> MirrorIndex | None:
    """Return the index so far; one that cannot be believed counts as none, and what it was for is fetched or
    verified anew."""
    try:
        return index.read_mirror_index(root)
    except Trouble as trouble:
        screen.say(f"note: {trouble.problems[0]}; everything is looked at anew")
        return None


class _Shown:
    """The step in which wheels come, as it is shown: from its first figures on."""

    def __init__(self, screen: Screen) -> None:
        self._screen, self._begin = screen, 0.0
        self._last: Transfer | None = None

    def transfer(self, transfer: Transfer) -> None:
        """Show how far it is."""
        if self._last is None:
            self._begin = time.monotonic()
            self._screen.started(FETCH, [THIS_MACHINE.name])
        self._last = transfer
        self._screen.measured(THIS_MACHINE.name, FETCH, transfer.share, transfer.text)

    def end(self) -> None:
        """Say how it went, where wheels came at all."""
        if self._last is not None:
            seconds = time.monotonic() - self._begin
            state = "done" if self._last.files == self._last.all_files else "failed"
            self._screen.ended(Outcome(FETCH, THIS_MACHINE.name, state, self._last.whole(seconds), seconds))


def write_mirror(screen: Screen, choice: MirrorSelection, job: FillJob, filled: Filled) -> int:
    """Write the index of what is there, and say what is still missing; only a complete mirror loses its mark."""
    index = new_index(choice, job, filled)
    # Contents before names: after a power cut the index must not name files that never reached the disk.
    os.sync()
    replace_text(job.root / INDEX, render_mirror_index(index))
    removed = prune_files(job.root, index) if job.prune else []
    if not filled.problems:
        (job.root / MARKER).unlink()
    for problem in filled.problems:
        screen.problem(problem)
    for path in removed:
        screen.say(f"removed {path}")
    total = sum(record.size for record in index.files.values())
    changed = f"{len(filled.added)} added, {len(filled.repaired)} repaired, {len(removed)} removed"
    state = "not complete" if filled.problems else "complete"
    screen.say(f"{job.root}: {state}, {len(index.files)} files, {size(total)}; {changed}")
    if not filled.problems:
        screen.next_commands(
            [f"invoke mirror {job.root} --check", f"invoke bootstrap --hosts=FILE --mirror={job.root}"]
        )
    code = TROUBLE if filled.problems else OK
    content = {"added": filled.added, "repaired": filled.repaired, "removed": removed, "packages": [], "findings": []}
    screen.document(code, filled.problems, **_head(job.root, index), **content)
    return code


def new_index(choice: MirrorSelection, job: FillJob, filled: Filled) -> MirrorIndex:
    """Return the index of what is wanted and there, and of what an earlier run brought and nobody took away."""
    files = job.carried | filled.files
    older = job.old.sources if job.old and not job.prune else ()
    kept = [
        each
        for each in older
        if each not in filled.sources and f"{repository_path(each.url)}/{PINS}{each.rev}" in files
    ]
    sources = sorted([*filled.sources, *kept], key=_order)
    digest = recipes.digest({"lock": choice.lock.text})
    return MirrorIndex(digest, choice.stacks, choice.targets, tuple(sources), files)


def foretell(screen: Screen, choice: MirrorSelection, job: FillJob) -> int:
    """Say what a mirror would have to fetch, as far as names and sizes tell; nothing is written."""
    root, wanted = job.root, job.wanted
    missing = [
        path
        for path in dict.fromkeys(repository_path(source.url) for source in wanted.sources)
        if not (root / path).is_dir()
    ]
    wheels = {wheel_path(wheel.index, wheel.name, wheel.file): wheel.size for wheel in wanted.wheels}
    absent = [
        path for path, bytes_ in wheels.items() if not is_file(root, path) or (root / path).stat().st_size != bytes_
    ]
    fetched = [*missing, *absent]
    for path in fetched:
        screen.say(f"would fetch {path}")
    bytes_ = size(sum(wheels[path] for path in absent))
    screen.say(f"{root}: {len(fetched)} to fetch, {bytes_} of wheels; nothing was written")
    head = _head(root, MirrorIndex("", choice.stacks, choice.targets, (), {}))
    screen.document(OK, (), **head, added=fetched, repaired=[], removed=[], packages=[], findings=[])
    return OK


def check_mirror(screen: Screen, root: Path, lock: Lock, selected: SelectionFlags) -> int:
    """Hash every file of the mirror and compare the index with the lock: with what was `selected`, else with what the
    mirror was made for. 4 unless it is complete, unchanged and what the lock wants."""
    index = _finished_index(root)
    where, remedy = f"mirror {root}", f"invoke mirror {root}"
    problems = []
    if (root / MARKER).is_file():
        problems.append(Problem(where, "is incomplete: the last writing did not come to its end", try_=remedy))
    findings = list(compare(root, index))
    problems += [
        Problem(f"{where}: {shown(each.path)}", each.state, each.found, each.wanted, _remedy(each, remedy))
        for each in findings
    ]
    for name in index.stacks:
        if not selected.stacks and name not in lock.stacks:
            what = "the mirror is for this stack, which the lock has not"
            problems.append(Problem(f"{lock.path}: stack {name}", what))
    choice = choose_contents(lock, with_index(lock, selected, index))
    problems += lacking(index, choice.wanted)
    for problem in problems:
        screen.problem(problem)
    total = sum(record.size for record in index.files.values())
    verdict = f"{len(problems)} findings" if problems else "complete and unchanged"
    screen.say(f"{root}: {len(index.files)} files, {size(total)}, stacks {', '.join(choice.stacks)}: {verdict}")
    code = VERDICT if problems else OK
    found = [
        {"path": shown(each.path), "state": each.state, "found": each.found, "wanted": each.wanted} for each in findings
    ]
    screen.document(
        code, problems, **_head(root, index), added=[], repaired=[], removed=[], packages=[], findings=found
    )
    return code


def _finished_index(root: Path) -> MirrorIndex:
    """Return the index of the mirror at `root`. Raises Trouble where there is none."""
    if not root.is_dir():
        raise Trouble(Problem(str(root), "there is no such directory", try_=f"invoke mirror {root}"))
    index = read_mirror_index(root)
    if index is not None:
        return index
    what, remedy = f"is no mirror: it has no {INDEX}", f"invoke mirror {root}"
    if (root / MARKER).is_file():
        what = "is incomplete: its first writing did not come to its end"
        remedy = f"{remedy} (it goes on from what is there)"
    raise Trouble(Problem(f"mirror {root}", what, try_=remedy), code=VERDICT)


def prune_files(root: Path, index: MirrorIndex) -> list[str]:
    """Remove what the index has not, links themselves and never what they lead to, then empty folders; return the
    paths."""
    extra = [path for path in walk(root) if path not in index.files and path not in {INDEX, MARKER}]
    for path in extra:
        (root / path).unlink()
    for folder, _, _ in os.walk(root, topdown=False):
        if Path(folder) != root:
            with contextlib.suppress(OSError):  # not empty
                Path(folder).rmdir()
    return sorted(map(shown, extra))


def remove(path: Path) -> None:
    """Remove what a run that was ended left, folder or not."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def replace_text(path: Path, text: str) -> None:
    """Put a text into the place of a file by one rename, after it reached the disk."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix=SCRATCH, dir=path.parent, delete=False) as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
        os.fchmod(stream.fileno(), 0o644)
    os.replace(stream.name, path)


def shown(path: str) -> str:
    """Return a path for a message; bytes that are not UTF-8 are escaped."""
    return path.encode(errors="backslashreplace").decode()


def _head(root: Path, index: MirrorIndex) -> dict[str, Any]:
    total = sum(record.size for record in index.files.values())
    names = {"stacks": list(index.stacks), "targets": list(index.targets)}
    return {"dir": str(root), "lock_digest": index.lock, **names, "files": len(index.files), "bytes": total}


def _order(held: Held) -> tuple[str, str]:
    return held.name, held.rev


def _remedy(finding: MirrorFault, remedy: str) -> str:
    return f"{remedy} --prune" if finding.state == "extra" else remedy
