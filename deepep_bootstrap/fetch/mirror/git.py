"""Git repositories of a mirror: bare, one pack with the whole history of the pinned commits, and the few
files by which a client finds them behind any web server as well as in a directory. Whole histories,
because that simple protocol knows no shallow ones.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from deepep_bootstrap.core import process
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.fetch import git
from deepep_bootstrap.fetch.git import Pin, Repository
from deepep_bootstrap.fetch.locations import Level, Mirrors, repository_path, shown
from deepep_bootstrap.fetch.mirror.index import PINS, SCRATCH

CONFIG = "[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = true\n"


def served(root: Path) -> Mirrors:
    """Return the mirrors of somebody who has nothing but the mirror at `root`."""
    return Mirrors((Level(written=str(root)),))


def pinned(root: Path, path: str) -> tuple[str, ...]:
    """Return the commits that the repository at `path` of a mirror keeps."""
    folder = root / path / PINS
    return tuple(sorted(each.name for each in folder.iterdir())) if folder.is_dir() else ()


def write_repository(pins: Sequence[Pin], mirrors: Mirrors, root: Path, old: Sequence[str] = ()) -> None:
    """Put the commits of `pins`, all of one repository, into the mirror at `root`, by one rename; the commits `old` of
    the repository that is there stay. Raises Trouble when a commit cannot be had with its history.
    """
    path = repository_path(pins[0].url)
    target = root / path
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=root) as name:
        scratch = Path(name)
        made = scratch / "made"
        (made / "objects/pack").mkdir(parents=True)
        for number, pin in enumerate(pins):
            inner = scratch / f"pin-{number}"
            inner.mkdir()
            repository = git.create(pin, mirrors, inner)
            _borrow(
                repository,
                [*(scratch / f"pin-{each}/repository" for each in range(number)), *([target] if old else [])],
            )
            git.bring(repository, pin.rev, pin.ref, history=True)
        _pack(repository, made, sorted({*old, *(pin.rev for pin in pins)}))
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            target.rename(scratch / "before")
        made.rename(target)


def _borrow(repository: Repository, others: Iterable[Path]) -> None:
    """Let a repository use the objects of others: what is there is not fetched again."""
    places = "".join(f"{other / 'objects'}\n" for other in others)
    if places:
        (repository.path / "objects/info").mkdir(exist_ok=True)
        (repository.path / "objects/info/alternates").write_text(places, encoding="utf-8")


def _pack(repository: Repository, made: Path, revs: Sequence[str]) -> None:
    """Write a bare repository with the whole history of `revs` into `made`.

    Each commit is a ref in a file of its own: a repository without a file below refs/ is none after a copy that leaves
    empty directories out. The two lists under info/ are what clients of a plain web server read.
    """
    words = ("git", "-C", repository.path, "pack-objects", "--quiet", "--revs", made / "objects/pack/pack")
    done = process.run_program(words, env=repository.environment, data="".join(f"{rev}\n" for rev in revs).encode())
    if done.code != 0 or (repository.path / "shallow").is_file():
        what = f"{shown(repository.place)} does not have the whole history of the locked commit, which a mirror needs"
        raise Trouble(
            Problem(repository.where, what, done.tail, try_="a mirror made from a repository that is no shallow clone")
        )
    refs = {f"{PINS}{rev}": rev for rev in revs}
    texts = {
        "HEAD": f"ref: {PINS}{revs[0]}\n",
        "config": CONFIG,
        "info/refs": "".join(f"{rev}\t{ref}\n" for ref, rev in refs.items()),
        "objects/info/packs": "".join(f"P {pack.name}\n" for pack in sorted(made.glob("objects/pack/*.pack"))) + "\n",
        **{ref: f"{rev}\n" for ref, rev in refs.items()},
    }
    for name, text in texts.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(text, encoding="utf-8")


def modules(pin: Pin, root: Path) -> tuple[Pin, ...]:
    """Return the submodules of a pin that the mirror at `root` has; Trouble where it does not give out its commit."""
    with tempfile.TemporaryDirectory(prefix="deepep-bootstrap-") as name:
        tree = Path(name, "tree")
        repository = git.create(pin, served(root), Path(name))
        git.bring(repository, pin.rev, pin.ref)
        git.write_out(repository, pin.rev, tree)
        return tuple(module for module, _ in git.submodules(pin, repository, tree))
