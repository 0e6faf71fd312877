"""The index of an archive of store entries, read strictly, and the record of files that follows from it.

The index says everything about the archive: entries by name, in each its folders, files and links, in the
order in which they stand there. Whoever has checked the index knows every byte of the archive but the
contents of the files, and of those the SHA-256.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import fields

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.prefix.contents import ENTRY_NAME, RECORD

FORMAT = "deepep-bootstrap-archive"
VERSION = 1
FILE, FOLDER, LINK = "file", "folder", "link"
EXECUTABLE, PLAIN, FOLDER_MODE = 0o555, 0o444, 0o755
"""The only modes a published entry has; a shared prefix gives its group the folders by itself."""

MODES: Mapping[str, tuple[str, ...]] = {FILE: ("0444", "0555"), FOLDER: ("0755",), LINK: ("",)}
"""The modes that an index may say of each type; links have none."""

LARGEST_FILE = 1 << 42
LONGEST_PATH, LONGEST_NAME = 1024, 255
"""Bytes: 255 is what Linux filesystems take for one name; the deepest path of a torch wheel has less than 250."""

BLOCK = 4096
CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
SHA256 = re.compile(r"[0-9a-f]{64}")
INTERPRETER = re.compile(r"/(?!.*//)(?:(?!\.\.?/)[A-Za-z0-9._+-]+/)*python3(\.[0-9]+)?")
"""What a link to the system's interpreter points at: the one thing outside the store that entries need (as
bin/python)."""


class ArchiveMember(Struct, frozen=True):
    """A folder, file or link of an entry; `path` is relative to it. `size` in bytes and `sha256` are a file's,
    `target` is a link's."""

    path: str
    kind: str
    executable: bool = False
    size: int = 0
    sha256: str = ""
    target: str = ""

    @property
    def mode(self) -> int:
        """The permission bits it is unpacked with."""
        return FOLDER_MODE if self.kind == FOLDER else EXECUTABLE if self.executable else PLAIN


class Tree(Struct, frozen=True):
    """One store entry: its name, and what is in it, every folder before what lies in it."""

    name: str
    things: tuple[ArchiveMember, ...]

    @property
    def files(self) -> tuple[ArchiveMember, ...]:
        """Its files, in the order of the archive."""
        return tuple(thing for thing in self.things if thing.kind == FILE)

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(thing.size for thing in self.things)

    @property
    def on_disk(self) -> int:
        """Bytes it may need on a filesystem: every file in whole blocks, and a block for every name."""
        return sum(BLOCK * (2 + thing.size // BLOCK) for thing in self.things)


class Built(Struct, frozen=True):
    """What the entries were built on, for and by: operating system, CPU architecture, glibc of the host that
    exported, CUDA versions, GPU architectures ("9.0"), compilers ("gcc 12.2.0"), paths of Python interpreters, and
    recipes ("build/nvshmem.sh", a blank, and the SHA-256 of its text without comments). The last three are empty in
    archives of earlier versions."""

    os_id: str = ""
    os_version: str = ""
    machine: str = ""
    glibc: str = ""
    cuda: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()
    compilers: tuple[str, ...] = ()
    pythons: tuple[str, ...] = ()
    recipes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return its values for a JSON document, but for the recipes, which say nothing to a person."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        del found["recipes"]
        return found

    def __str__(self) -> str:
        gpus = f", GPU architectures {', '.join(self.archs)}" if self.archs else ""
        by = f", {', '.join(self.compilers)}" if self.compilers else ""
        return (
            f"{self.os_id} {self.os_version} {self.machine}, glibc {self.glibc}, CUDA "
            f"{', '.join(self.cuda) or 'none'}{gpus}{by}"
        )


class ArchiveIndex(Struct, frozen=True):
    """The table of contents of an archive. `generation` is the manifest of the generation it was made from, as JSON
    values."""

    built: Built
    trees: tuple[Tree, ...]
    lock_digest: str = ""
    generation: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(tree.size for tree in self.trees)

    @property
    def stacks(self) -> tuple[str, ...]:
        """The names of the stacks that its generation offered."""
        offer = self.generation.get("offer")
        found = offer.get("stacks") if isinstance(offer, dict) else None
        return tuple(map(str, found)) if isinstance(found, dict) else ()

    @property
    def records(self) -> Mapping[str, str]:
        """The SHA-256 of the record of each entry's files, as the generation says it; none in archives of earlier
        versions."""
        found = self.generation.get("records")
        return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}


def order(path: str) -> tuple[str, ...]:
    """Return the key by which things are sorted: a folder comes before what lies in it, and that before its next
    neighbour."""
    return tuple(path.split("/"))


def render_index(index: ArchiveIndex) -> bytes:
    """Return the text of an index, the same bytes for the same values."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "lock_digest": index.lock_digest,
        "built": {**index.built.as_json(), "recipes": list(index.built.recipes)},
        "generation": index.generation,
        "entries": [{"name": tree.name, "things": [_written(thing) for thing in tree.things]} for tree in index.trees],
    }
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def _written(thing: ArchiveMember) -> dict[str, Any]:
    if thing.kind == FILE:
        return {
            "path": thing.path,
            "type": FILE,
            "mode": f"{thing.mode:04o}",
            "size": thing.size,
            "sha256": thing.sha256,
        }
    if thing.kind == LINK:
        return {"path": thing.path, "type": LINK, "target": thing.target}
    return {"path": thing.path, "type": FOLDER, "mode": f"{thing.mode:04o}"}


class _MemberForm(Struct, frozen=True):
    """A folder, file or link as JSON has it; which keys it has depends on its `type`."""

    path: str
    type: str
    mode: str = ""
    size: int = -1
    sha256: str = ""
    target: str = ""


class _EntryForm(Struct, frozen=True):
    """An entry as JSON has it."""

    name: str
    things: tuple[_MemberForm, ...]


class _BuiltForm(Struct, frozen=True):
    """Built as JSON has it: archives of earlier versions lack what has a default."""

    os_id: str
    os_version: str
    machine: str
    glibc: str
    cuda: tuple[str, ...]
    archs: tuple[str, ...]
    compilers: tuple[str, ...] = ()
    pythons: tuple[str, ...] = ()
    recipes: tuple[str, ...] = ()


class _IndexForm(Struct, frozen=True):
    """An index as JSON has it."""

    built: _BuiltForm
    entries: tuple[_EntryForm, ...]
    lock_digest: str
    generation: Any


def parse_index(text: bytes, where: str) -> ArchiveIndex:
    """Return the index that `text` is, checked: nothing in it can lie, or point, outside its store. Trouble with the
    first thing that is wrong; `where` names the archive in it."""
    try:
        # Not msgspec's decoder: it refuses half a character before the name that has it can be said.
        found = json.loads(text)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise Trouble(_refusal(where, "this is not the index of an archive of ours", "", f'"format": "{FORMAT}"'))
        if found["version"] != VERSION:
            raise Trouble(_refusal(where, "its format is not of this version", _shown(found["version"]), str(VERSION)))
        index = _index_of(msgspec.convert(found, _IndexForm))
    except (ValueError, KeyError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise Trouble(
            _refusal(where, "its index cannot be read", _shown(reason), f"an index of version {VERSION}")
        ) from None
    for problem in check_index(index, where):
        raise Trouble(problem)
    return index


def _index_of(form: _IndexForm) -> ArchiveIndex:
    """Return the index that a form means; ValueError for a member that no entry can have."""
    trees = tuple(Tree(entry.name, tuple(map(_member, entry.things))) for entry in form.entries)
    built = Built(**{each.name: getattr(form.built, each.name) for each in fields(Built)})
    generation = form.generation if isinstance(form.generation, dict) else {}
    return ArchiveIndex(built, trees, form.lock_digest, generation)


def _member(form: _MemberForm) -> ArchiveMember:
    if form.mode not in MODES.get(form.type, ()):
        raise ValueError(f"{form.path}: type {form.type!r} with mode {form.mode!r}")
    if form.type == LINK:
        return ArchiveMember(form.path, LINK, target=form.target)
    if form.type == FOLDER:
        return ArchiveMember(form.path, FOLDER)
    if not 0 <= form.size <= LARGEST_FILE:
        raise ValueError(f"{form.path}: size {form.size!r}")
    if not SHA256.fullmatch(form.sha256):
        raise ValueError(f"{form.path}: sha256 {form.sha256!r}")
    return ArchiveMember(form.path, FILE, form.mode == "0555", form.size, form.sha256)


def check_index(index: ArchiveIndex, where: str) -> Iterator[Problem]:
    """Yield what must not be in an archive."""
    names = [tree.name for tree in index.trees]
    if not names:
        yield _refusal(where, "there are no entries in it")
    for tree in index.trees:
        if not ENTRY_NAME.fullmatch(tree.name) or len(tree.name) > LONGEST_NAME:
            yield _refusal(where, "this is not the name of a store entry", _shown(tree.name))
            return
    for before, name in itertools.pairwise(names):
        if before >= name:
            yield _refusal(where, "its entries are not in order, or one is in it twice", name)
    for tree in index.trees:
        yield from (
            _refusal(
                where,
                what,
                _shown(f"{tree.name}/{thing.path}") + (f" -> {_shown(thing.target)}" if thing.kind == LINK else ""),
            )
            for thing, what in _faults(tree, frozenset(names))
        )
        recorded = index.records.get(tree.name, "")
        if recorded and recorded != record_sum(tree):
            yield _refusal(where, "its files are not those that its generation recorded", tree.name, recorded)
        if not any(thing.path == "manifest.json" and thing.kind == FILE for thing in tree.things):
            yield _refusal(where, "this entry has no manifest.json", tree.name)


def _faults(tree: Tree, names: frozenset[str]) -> Iterator[tuple[ArchiveMember, str]]:
    folders = {""}
    last: tuple[str, ...] = ()
    for thing in tree.things:
        parts = order(thing.path)
        if CONTROL.search(thing.path) or len(thing.path.encode("utf-8", "replace")) > LONGEST_PATH:
            yield thing, "this name cannot be unpacked"
        elif any(part in {"", ".", ".."} or len(part.encode("utf-8", "replace")) > LONGEST_NAME for part in parts):
            yield thing, "this name leads out of its entry"
        elif parts <= last:
            yield thing, "it is not in order, or in the archive twice"
        elif posixpath.dirname(thing.path) not in folders:
            yield thing, "it does not lie in a folder of its entry"
        elif thing.path == RECORD:  # it follows from the index
            yield thing, "the record of files is not part of an archive"
        elif thing.kind == LINK and not stays(tree.name, thing, names):
            yield thing, "this link points out of the store"
        if thing.kind == FOLDER:
            folders.add(thing.path)
        last = parts


def stays(entry: str, link: ArchiveMember, names: Iterable[str]) -> bool:
    """Return whether a link of `entry` points at something in it, or in another of the entries `names`; or is the
    interpreter's."""
    if not link.target or CONTROL.search(link.target) or len(link.target.encode("utf-8", "replace")) > LONGEST_PATH:
        return False
    if link.target.startswith("/"):
        return link.path == "bin/python" and INTERPRETER.fullmatch(link.target) is not None
    # Only at its beginning, where it leaves real folders, `..` means the same to us as to the kernel: behind another
    # link it would not.
    if ".." in re.sub(r"^(\.\./+)*(\.\.$)?", "", link.target).split("/"):
        return False
    # As if the store were two levels below the root: a path that climbs over the store ends elsewhere than below it.
    end = posixpath.normpath(posixpath.join("/above/store", entry, posixpath.dirname(link.path), link.target))
    return any(end == f"/above/store/{name}" or end.startswith(f"/above/store/{name}/") for name in (entry, *names))


def record(tree: Tree) -> bytes:
    """Return the record of an entry's files, byte for byte as recipes/prefix/lib/files.sh writes it."""
    lines = sorted(line for thing in tree.things for line in _record_lines(thing))
    text = b"".join(line + b"\n" for line in lines)
    return text + b"# sum %s\n" % hashlib.sha256(text).hexdigest().encode()


def record_sum(tree: Tree) -> str:
    """Return the SHA-256 of the record of an entry's files, in hexadecimal digits."""
    return hashlib.sha256(record(tree)).hexdigest()


def _record_lines(thing: ArchiveMember) -> Iterator[bytes]:
    path, target = (text.replace("\\", "\\\\").encode() for text in (thing.path, thing.target))
    if thing.kind == FILE:
        yield (b"\\" if b"\\" in path else b"") + b"%s  %s" % (thing.sha256.encode(), path)
        if thing.executable:
            yield b"# executable " + path
    elif thing.kind == LINK:
        yield b"# link %s -> %s" % (path, target)
    else:
        yield b"# folder " + path


def _refusal(where: str, what: str, found: str = "", wanted: str = "") -> Problem:
    return Problem(where, what, found, wanted, "nothing was unpacked; a copy of the archive from where it was made")


def _shown(value: object) -> str:
    """Return a hostile text as a message may show it: short, and without control characters."""
    return ascii(value)[1:-1][:120] if isinstance(value, str) else ascii(value)[:120]
