"""The index of a mirror directory: its files and their hashes, and what of a lock it lacks.

    mirror.json                 the index: every file's size and SRI hash; written last, by one rename
    git/HOST/OWNER/NAME.git     bare repositories that any web server can serve
    wheels/INDEX/NAME/FILE      with a page of links beside them: behind a web server an index for pip and uv

Reading only: nothing here writes, follows a symbolic link, or leaves the directory.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec import Struct

from deepep_bootstrap.core import filetree
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.toml import NAME
from deepep_bootstrap.fetch.download import PARTIAL
from deepep_bootstrap.fetch.locations import FILES, GIT, INDEX, PACKAGES, WHEELS, repository_path, wheel_path
from deepep_bootstrap.lock.model import HASH, REV, TARGET, Source, Wheel

FORMAT = 1
MARKER = ".incomplete"
"""Is there from the beginning of writing until its end."""
SCRATCH = ".tmp-"
PINS = "refs/pins/"
"""Where a repository of a mirror keeps the commits that locks name."""
PAGE = "index.html"
LONGEST_INDEX = 64 << 20
"""Bytes of an index that are read at most: a mirror of everything has some ten thousand files, a line or two each."""
CHUNK = 1 << 20
MANY = 10
"""Faults of an index that are named; one hostile file need not fill a screen."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file as the index has it: its size in bytes and the SRI hash of its content."""

    size: int
    hash: str


class Held(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A git source that was verified in the mirror: what the lock called it, its address, its commit and the hash of
    its tree."""

    name: str
    url: str
    rev: str
    hash: str


class MirrorIndex(Struct, frozen=True):
    """mirror.json: the digest of the lock it was last made for, for which stacks and wheel targets, and what is
    there: the sources, and every file by path."""

    lock: str
    stacks: tuple[str, ...]
    targets: tuple[str, ...]
    sources: tuple[Held, ...]
    files: Mapping[str, Record]


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """mirror.json as it is written. What versions before this one kept of single files and of package repositories
    is taken in whatever form it has, and left out."""

    format: int
    lock: str
    stacks: tuple[str, ...]
    targets: tuple[str, ...]
    sources: tuple[Held, ...]
    files: dict[str, Record]
    archives: Any = None
    packages: Any = None


class MirrorWants(Struct, frozen=True):
    """What a mirror has to hold for some stacks and targets of a lock."""

    sources: tuple[Source, ...]
    wheels: tuple[Wheel, ...]


class MirrorFault(Struct, frozen=True):
    """A path whose `state` is missing, changed or extra; `found` and `wanted` are the difference."""

    path: str
    state: str
    found: str = ""
    wanted: str = ""


def render_mirror_index(index: MirrorIndex) -> str:
    """Return the text of an index; equal indexes give equal texts."""
    document = {
        "format": FORMAT,
        "lock": index.lock,
        "stacks": list(index.stacks),
        "targets": list(index.targets),
        "sources": [{"name": each.name, "url": each.url, "rev": each.rev, "hash": each.hash} for each in index.sources],
        "files": {path: {"size": each.size, "hash": each.hash} for path, each in sorted(index.files.items())},
    }
    return json.dumps(document, indent=1) + "\n"


def read_mirror_index(root: Path) -> MirrorIndex | None:
    """Return the index of the mirror at `root`, None where there is none. Raises Trouble when it is damaged or
    hostile."""
    path = root / INDEX
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as stream:
            data = stream.read(LONGEST_INDEX + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Trouble(Problem(str(path), f"the index cannot be read: {error.strerror}")) from None
    if len(data) > LONGEST_INDEX:
        raise Trouble(Problem(str(path), "is too long for an index", f"more than {LONGEST_INDEX} bytes"))
    return parse_mirror_index(data, str(path))


def parse_mirror_index(data: bytes, where: str) -> MirrorIndex:
    """Return the index in `data`; `where` names it in messages. Raises Trouble with what is wrong, for any bytes
    whatever."""
    try:
        document = json.loads(data.decode(), object_pairs_hook=_pairs)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Trouble(Problem(where, "is no index of a mirror", found=reason[:200])) from None
    if not isinstance(document, dict) or type(document.get("format")) is not int:
        raise Trouble(Problem(where, "is no index of a mirror", wanted='an object with "format"'))
    if document["format"] != FORMAT:
        what = "this index has another format: update the tool"
        raise Trouble(Problem(where, what, found=str(document["format"]), wanted=str(FORMAT)))
    try:
        read = msgspec.convert(document, _Document)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise Trouble(Problem(where, "is no index of a mirror", found=_printable(str(error)))) from None
    faults = [*_list_faults(read), *_source_faults(read.sources), *_file_faults(read.files)]
    if faults:
        more = [f"and {len(faults) - MANY} more"] if len(faults) > MANY else []
        raise Trouble(*(Problem(where, _printable(fault)) for fault in (*faults[:MANY], *more)))
    return MirrorIndex(read.lock, read.stacks, read.targets, read.sources, read.files)


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of JSON; one that names a key twice means different things to different readers."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key is there twice")
    return made


def _printable(text: str) -> str:
    """Return a text of somebody else for a message: in ASCII, and not too long."""
    return text.encode("ascii", "backslashreplace").decode()[:400]


def _list_faults(document: _Document) -> Iterator[str]:
    """Yield what is no name of a stack and no target."""
    for key, values, form in (("stacks", document.stacks, NAME), ("targets", document.targets, TARGET)):
        for value in values:
            if not form.fits(value):
                yield f"{key}: {value!r:.80} is not {form.words}"


def _source_faults(sources: Sequence[Held]) -> Iterator[str]:
    """Yield what sources cannot be: names, commits and hashes of another form, and addresses that lead out of a
    mirror."""
    for each in sources:
        for value, form in ((each.name, NAME), (each.rev, REV), (each.hash, HASH)):
            if not form.fits(value):
                yield f"sources: {value!r:.80} is not {form.words}"
        try:
            repository_path(each.url)
        except Trouble:
            yield f"sources: {each.url!r:.80} has no place in a mirror"


def _file_faults(files: Mapping[str, Record]) -> Iterator[str]:
    """Yield paths that lead out of a mirror, and files without a size or a hash."""
    for path, record in files.items():
        if not is_inside(path):
            yield f"files: {path!r:.200} is no path inside a mirror"
        if record.size < 0 or not HASH.fits(record.hash):
            yield f"files: {path!r:.200} has no size in bytes or no SRI hash"


def is_inside(path: str) -> bool:
    """Return whether `path` is the relative path of a file below one of a mirror's folders, written in the one plain
    way."""
    steps = path.split("/")
    return (
        len(steps) > 1
        and steps[0] in {GIT, FILES, WHEELS, PACKAGES}
        and path.isprintable()
        and not {"", ".", ".."}.intersection(steps)
    )


def walk(root: Path) -> dict[str, os.stat_result]:
    """Return everything below `root` that is no directory, by relative path, with what it is. Links are named and
    not followed. What lies in the folder of incomplete downloads is no part of a mirror."""
    found: dict[str, os.stat_result] = {}
    folders = [""]
    while folders:
        folder = folders.pop()
        with os.scandir(root / folder) as entries:
            for entry in entries:
                path = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir(follow_symlinks=False):
                    if path != PARTIAL:
                        folders.append(path)
                else:
                    found[path] = entry.stat(follow_symlinks=False)
    return found


def measure(root: Path, path: str, limit: int | None = None) -> Record:
    """Return size and hash of a file; of one longer than `limit` bytes no more than one piece too many is read.
    Raises Trouble."""
    digest, size = hashlib.sha256(), 0
    try:
        with open(os.open(root / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as stream:
            while (limit is None or size <= limit) and (piece := stream.read(CHUNK)):
                digest.update(piece)
                size += len(piece)
    except OSError as error:
        raise Trouble(Problem(str(root / path), f"cannot be read: {error.strerror}")) from None
    return Record(size, filetree.sri(digest.digest()))


def compare(root: Path, index: MirrorIndex) -> Iterator[MirrorFault]:
    """Hash every file of the index and yield what is missing, changed or extra, by path."""
    there = walk(root)
    for path in sorted({*index.files, *there} - {INDEX, MARKER}):
        if path not in index.files:
            yield MirrorFault(path, "extra", "left by a run that was ended" if path.startswith(SCRATCH) else "")
        elif path not in there:
            yield MirrorFault(path, "missing")
        elif difference := differs(root, path, there[path], index.files[path]):
            yield MirrorFault(path, "changed", *difference)


def differs(root: Path, path: str, status: os.stat_result, wanted: Record) -> tuple[str, str] | None:
    """Return how a file that is there is not the one that the index has, found and wanted; None where it is. Sizes
    are compared first."""
    if not stat.S_ISREG(status.st_mode):
        return ("a symbolic link" if stat.S_ISLNK(status.st_mode) else "no regular file"), "a file"
    if status.st_size != wanted.size:
        return f"{status.st_size} bytes", f"{wanted.size} bytes"
    try:
        found = measure(root, path, wanted.size)
    except Trouble as trouble:
        return trouble.problems[0].what, "a file that can be read"
    return None if found == wanted else (found.hash, wanted.hash)


def lacking(index: MirrorIndex, wanted: MirrorWants) -> list[Problem]:
    """Return what of a lock is not in the mirror as the index describes it, a problem for each pin."""
    held = {(each.url, each.rev, each.hash) for each in index.sources}
    problems = [
        Problem(f"source {each.name}", "the mirror does not have the locked commit", wanted=each.rev)
        for each in wanted.sources
        if (each.url, each.rev, each.hash) not in held
    ]
    for wheel in wanted.wheels:
        record = index.files.get(wheel_path(wheel.index, wheel.name, wheel.file))
        if record is None or record.hash != wheel.hash:
            problems.append(
                Problem(
                    f"wheel {wheel.file}",
                    "the mirror does not have the locked file",
                    record.hash if record else "",
                    wheel.hash,
                )
            )
    return problems


def page(files: Mapping[str, Record]) -> str:
    """Return the page of an index for the wheels of one distribution, by file name: what pip and uv read (the simple
    repository API)."""
    digests = {file: base64.b64decode(record.hash.partition("-")[2]).hex() for file, record in files.items()}
    links = [
        f'<a href="{quote(file)}#sha256={digest}">{html.escape(file)}</a><br>'
        for file, digest in sorted(digests.items())
    ]
    return "\n".join(
        ("<!DOCTYPE html>", "<html><head><title>wheels</title></head><body>", *links, "</body></html>", "")
    )


def folders(paths: Sequence[str]) -> dict[str, list[str]]:
    """Return the wheels among `paths` by their folder."""
    found: dict[str, list[str]] = {}
    for path in paths:
        if path.startswith(f"{WHEELS}/") and path.endswith(".whl"):
            found.setdefault(path.rpartition("/")[0], []).append(path)
    return found
