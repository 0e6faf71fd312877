"""Git sources by exact commit, with every filter off, verified by content before anything reads them.

Trees are kept in a cache and hashed again each time they are used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from msgspec import Struct

from deepep_bootstrap.core import filetree
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.fetch.git import Pin, export
from deepep_bootstrap.fetch.locations import Mirrors, shown
from deepep_bootstrap.lock.model import Source, Substitute


class Measured(Struct, frozen=True):
    """What a source is right now: the hash of its tree, the time of its commit, and the substitutions that do not
    fit."""

    hash: str
    last_modified: int
    problems: tuple[Problem, ...]


def fetch_source(source: Source, mirrors: Mirrors, cache: Path) -> Path:
    """Return a directory with the tree of `source`, its substitutions applied; nothing in it may be changed.

    The tree comes from the cache where its hash is still right, else from git. Raises Trouble when it cannot be
    fetched, when its hash is not the locked one (then nothing of it is kept), or when a substitution does not fit. Runs
    beside others safely.
    """
    try:
        return _fetched(source, mirrors, cache / "sources")
    except OSError as error:
        raise Trouble(
            Problem(
                str(error.filename or cache), f"the cache cannot be used: {error.strerror}", try_="XDG_CACHE_HOME=DIR"
            )
        ) from None


def measure_source(source: Source, mirrors: Mirrors) -> Measured:
    """Fetch the commit of `source` anew, past the cache, and say what it is; whatever its hash should be, nothing is
    kept.

    Raises Trouble when it cannot be fetched or hashed.
    """
    with tempfile.TemporaryDirectory(prefix="deepep-bootstrap-") as scratch:
        tree = export(_pin(source), mirrors, Path(scratch))
        found = filetree.hash_path(tree.path)
        try:
            _overlay(source, tree.path)
        except Trouble as trouble:
            return Measured(found, tree.last_modified, trouble.problems)
        return Measured(found, tree.last_modified, ())


def _pin(source: Source) -> Pin:
    return Pin(source.name, source.url, source.ref, source.rev, source.submodules)


def _fetched(source: Source, mirrors: Mirrors, store: Path) -> Path:
    store.mkdir(parents=True, exist_ok=True)
    plain = store / hashlib.sha256(source.hash.encode()).hexdigest()[:32]
    if not _holds(plain, source.hash):
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=store) as scratch:
            tree = export(_pin(source), mirrors, Path(scratch)).path
            found = filetree.hash_path(tree)
            if found != source.hash:
                what = f"the tree of {source.rev[:12]} from {shown(mirrors.source(source.url))} is not the locked one"
                raise Trouble(Problem(f"source {source.name}", what, found, source.hash))
            _publish(tree, plain, source.hash)
    return _substituted(source, plain) if source.substitutes else plain


def _holds(tree: Path, wanted: str) -> bool:
    """Return whether `tree` is there with the hash `wanted`; one that is not what it should be is taken away."""
    if not tree.is_dir():
        return False
    with contextlib.suppress(Trouble):  # a socket, an unreadable file: then it is not the tree that was put there
        if filetree.hash_path(tree) == wanted:
            return True
    aside = Path(tempfile.mkdtemp(prefix=".tmp-", dir=tree.parent))
    with contextlib.suppress(FileNotFoundError):  # another run may just have taken it away
        tree.rename(aside / "tree")
    shutil.rmtree(aside, ignore_errors=True)
    return False


def _publish(tree: Path, target: Path, wanted: str) -> None:
    """Rename `tree` to `target`; where another run was first, its tree stays if it is right."""
    try:
        tree.rename(target)
    except OSError:
        # Either there is a right tree now, or a wrong one has just been taken away and the way is free.
        if not _holds(target, wanted):
            tree.rename(target)


def _substituted(source: Source, plain: Path) -> Path:
    """Return the copy of `plain` with the substitutions of `source`; it is made again where its content is not what
    it must be."""
    overlay = _overlay(source, plain)
    facts = [list(each.effect.values()) for each in source.substitutes]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    target = plain.with_name(f"{plain.name}-{digest}")
    wanted = filetree.hash_path(plain, overlay)
    if not _holds(target, wanted):
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=plain.parent) as scratch:
            copy = Path(scratch, "tree")
            shutil.copytree(plain, copy, symlinks=True)
            for name, content in overlay.items():
                Path(copy, os.fsdecode(name)).write_bytes(content)
            _publish(copy, target, wanted)
    return target


def _overlay(source: Source, plain: Path) -> dict[bytes, bytes]:
    """Return the new content of every file that the substitutions change. Raises Trouble with all that do not fit."""
    problems: list[Problem] = []
    overlay: dict[bytes, bytes] = {}
    for number, each in enumerate(source.substitutes, 1):
        where = f"source {source.name}, substitute {number} ({each.file})"
        name = os.fsencode(each.file)
        path = plain / each.file
        if not path.is_file() or path.resolve() != plain.resolve() / each.file:
            problems.append(Problem(where, "there is no such file in the tree"))
            continue
        before = overlay.get(name) if name in overlay else path.read_bytes()
        overlay[name] = _replaced(before or b"", each, where, problems)
    if problems:
        raise Trouble(*problems)
    return overlay


def _replaced(before: bytes, each: Substitute, where: str, problems: list[Problem]) -> bytes:
    text = each.text.encode()
    count = before.count(text)
    if count != each.count:
        problems.append(
            Problem(where, "the text to replace is not there as often as it should", str(count), str(each.count))
        )
    return before.replace(text, each.replacement.encode())
