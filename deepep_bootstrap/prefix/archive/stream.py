"""The archive of store entries: a plain tar file whose first member is its index, as a stream of bounded
memory.

    deepep-bootstrap.json          the index (prefix.archive.index); FILE.sig is a signature of its bytes
    store/<entry>/<path>           every folder, file and link of the index, in its order

An index can be written in one way only: owner 0, one time for all, GNU headers. So reading needs no tar
parser: the header of every member is compared, byte for byte, with the one that follows from the index.
Whatever else stands there (a device, a link instead of a file, another mode, a member twice or too many,
an end too early) differs.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.filetree import MTIME, TAR_CHUNK
from deepep_bootstrap.prefix.archive.index import FILE, FOLDER, LINK, ArchiveIndex, ArchiveMember, Tree

INDEX = "deepep-bootstrap.json"
STORE = "store"
SECTOR = tarfile.BLOCKSIZE
NAME_FIELD = 100
"""Bytes of a name, and of a link's target, that a header has room for."""
OCTAL_LIMIT = 8**11
"""The first size that eleven octal digits do not hold (8 GiB)."""
LARGEST_INDEX = 64 << 20
"""Bytes; 200 000 files of 300 bytes each. A torch environment has about 30 000."""
TYPES = {FILE: b"0", LINK: b"2", FOLDER: b"5"}
PACKERS = {b"\x1f\x8b": "gzip -d", b"\x28\xb5\x2f\xfd": "zstd -d", b"\xfd7zXZ\x00": "xz -d", b"BZh": "bzip2 -d"}
REMEDY = "nothing was unpacked; a copy of the archive from where it was made"


class Sink(Protocol):
    """Where an archive is written to."""

    def write(self, data: bytes, /) -> object:
        """Take the next bytes."""


def header(name: str, thing: ArchiveMember) -> bytes:
    """Return the tar header of one member, with GNU's extra members in front where name or target are too long for
    it."""
    path, target = name.encode(), thing.target.encode()
    front = b"".join(_long(kind, text) for kind, text in ((b"K", target), (b"L", path)) if len(text) > NAME_FIELD)
    mode = 0o777 if thing.kind == LINK else thing.mode
    return front + _sector(path, TYPES[thing.kind], mode, (thing.size, target))


def _long(kind: bytes, text: bytes) -> bytes:
    data = text + b"\0"
    return _sector(b"././@LongLink", kind, 0, (len(data), b"")) + data + padding(len(data))


def _sector(name: bytes, kind: bytes, mode: int, rest: tuple[int, bytes]) -> bytes:
    size, target = rest
    length = b"%011o\0" % size if size < OCTAL_LIMIT else b"\x80" + size.to_bytes(11, "big")
    mtime = 0 if kind in b"KL" else MTIME
    fields = (
        *(
            name[:NAME_FIELD].ljust(NAME_FIELD, b"\0"),
            b"%07o\0" % mode,
            b"0000000\0",
            b"0000000\0",
            length,
            b"%011o\0" % mtime,
        ),
        *(
            b" " * 8,
            kind,
            target[:NAME_FIELD].ljust(NAME_FIELD, b"\0"),
            b"ustar  \0",
            b"root".ljust(32, b"\0"),
            b"root".ljust(32, b"\0"),
        ),
    )
    block = bytearray(b"".join(fields).ljust(SECTOR, b"\0"))
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padding(size: int) -> bytes:
    """Return the zeros between contents of `size` bytes and the next header."""
    return bytes(-size % SECTOR)


def ending(size: int) -> bytes:
    """Return what stands behind the last member of a tar stream that is `size` bytes long so far."""
    end = size + 2 * SECTOR
    return bytes(2 * SECTOR + -end % tarfile.RECORDSIZE)


def small_file(name: str, data: bytes) -> bytes:
    """Return one whole member: header, contents, padding."""
    return header(name, ArchiveMember(name, FILE, size=len(data))) + data + padding(len(data))


def members(trees: Iterable[Tree]) -> Iterator[tuple[str, ArchiveMember]]:
    """Yield every thing of `trees` with its name in the archive, in order."""
    for tree in trees:
        yield f"{STORE}/{tree.name}", ArchiveMember("", FOLDER)
        for thing in tree.things:
            yield f"{STORE}/{tree.name}/{thing.path}", thing


def total(index: ArchiveIndex, text: bytes) -> int:
    """Return the size of the archive in bytes."""
    size = len(small_file(INDEX, text))
    for name, thing in members(index.trees):
        size += len(header(name, thing)) + thing.size + len(padding(thing.size))
    return size + len(ending(size))


class MemberPacker:
    """Writes a tar stream while the contents of its files come, one behind the other in the order of the members, in
    pieces of any size."""

    def __init__(self, sink: Sink, members: Iterator[tuple[str, ArchiveMember]], front: bytes = b"") -> None:
        """`members` are things by their names in the stream; `front` are whole members before them."""
        self._sink, self._members = sink, members
        self._size = self._left = 0
        self._hash = hashlib.sha256()
        self._now: tuple[str, ArchiveMember] | None = None
        self._put(front)
        self._next_file()

    def feed(self, data: bytes) -> None:
        """Take more contents; Trouble for a file that is not what the index says."""
        rest = memoryview(data)
        while rest:
            if self._now is None:
                raise Trouble(
                    Problem(STORE, "more than the files that were asked for came", try_="the same command again")
                )
            piece, rest = rest[: self._left], rest[self._left :]
            self._hash.update(piece)
            self._put(piece)
            self._left -= len(piece)
            if not self._left:
                self._end_file(*self._now)
                self._next_file()

    def finish(self) -> None:
        """Write the end; Trouble where contents are missing."""
        if self._now is not None:
            raise Trouble(
                Problem(
                    self._now[0], "became shorter while it was read, or could not be read", try_="invoke verify --store"
                )
            )
        self._put(ending(self._size))

    def _put(self, data: bytes | memoryview) -> None:
        self._sink.write(bytes(data))
        self._size += len(data)

    def _next_file(self) -> None:
        """Write headers up to that of the next file that has contents."""
        self._now = None
        for name, thing in self._members:
            self._put(header(name, thing))
            self._hash = hashlib.sha256()
            if thing.kind == FILE and thing.size:
                self._now, self._left = (name, thing), thing.size
                return
            if thing.kind == FILE:
                self._end_file(name, thing)

    def _end_file(self, name: str, thing: ArchiveMember) -> None:
        if self._hash.hexdigest() != thing.sha256:
            found = f"SHA-256 {self._hash.hexdigest()}"
            raise Trouble(Problem(name, "changed since it was published", found, thing.sha256, "invoke verify --store"))
        self._put(padding(thing.size))


class Packer(MemberPacker):
    """Writes an archive: its index, then the members that this names."""

    def __init__(self, sink: Sink, index: ArchiveIndex, text: bytes) -> None:
        """`text` is the index as it is written and signed."""
        super().__init__(sink, members(index.trees), small_file(INDEX, text))


def open_archive(file: str) -> BinaryIO:
    """Return the archive opened; Trouble where it is not a plain file or cannot be read."""
    path = Path(os.path.expanduser(file))
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise Trouble(Problem(file, "is not a plain file", wanted="a file of `invoke export`"))
        return path.open("rb")
    except OSError as error:
        raise Trouble(Problem(file, f"cannot be read: {error.strerror}", wanted="a file of `invoke export`")) from None


def read_index(stream: BinaryIO, where: str) -> bytes:
    """Read an archive up to the end of its index and return the bytes of that, unread; Trouble where this is no
    archive of ours."""
    start = stream.read(SECTOR)
    packer = next((program for magic, program in PACKERS.items() if start.startswith(magic)), "")
    if packer:
        raise Trouble(
            Problem(where, "this file is compressed, archives of ours are not", try_=f"{packer} on a copy of it")
        )
    digits = start[124:135]
    size = int(digits, 8) if digits.isdigit() and not digits.strip(b"01234567") else 0
    if start != header(INDEX, ArchiveMember(INDEX, FILE, size=size)):
        raise Trouble(
            Problem(
                where,
                "this is not an archive of ours",
                _describe(start),
                f"{INDEX} as its first member",
                "a file of `invoke export`",
            )
        )
    if size > LARGEST_INDEX:
        raise Trouble(
            Problem(where, "its index is larger than any real one", f"{size} bytes", f"at most {LARGEST_INDEX}", REMEDY)
        )
    text = stream.read(size)
    if len(text) < size or stream.read(len(padding(size))) != padding(size):
        raise _cut_off(where, INDEX)
    return text


def read_trees(stream: BinaryIO, index: ArchiveIndex, where: str, wanted: Container[str]) -> Iterator[bytes]:
    """Read the rest of an archive behind its index and yield the members of the entries called `wanted`, as a tar
    stream without its end.

    Everything is compared with the index, also what is not wanted. What was yielded of a file is good only when the
    iterator has come to its end: Trouble says otherwise.
    """
    for tree in index.trees:
        for name, thing in members((tree,)):
            for piece in _member(stream, where, name, thing):
                if tree.name in wanted:
                    yield piece
    end = stream.read(SECTOR)
    if end != bytes(SECTOR):
        raise Trouble(_stranger(where, end, "its end"))
    rest = stream.read(tarfile.RECORDSIZE + 1)
    if len(rest) > tarfile.RECORDSIZE or rest.strip(b"\0") or len(rest) < SECTOR:
        raise Trouble(Problem(where, "it does not end where its index says", wanted="its end", try_=REMEDY))


def _member(stream: BinaryIO, where: str, name: str, thing: ArchiveMember) -> Iterator[bytes]:
    wanted = header(name, thing)
    found = stream.read(len(wanted))
    if found != wanted:
        raise Trouble(_stranger(where, found, name))
    yield found
    if thing.kind != FILE:
        return
    digest, left = hashlib.sha256(), thing.size
    while left:
        chunk = stream.read(min(TAR_CHUNK, left))
        if not chunk:
            raise _cut_off(where, name)
        digest.update(chunk)
        left -= len(chunk)
        yield chunk
    if digest.hexdigest() != thing.sha256:
        raise Trouble(
            Problem(
                f"{where}: {name}", "its contents are not what the index says", digest.hexdigest(), thing.sha256, REMEDY
            )
        )
    if stream.read(len(padding(thing.size))) != padding(thing.size):
        raise _cut_off(where, name)
    yield padding(thing.size)


def _cut_off(where: str, name: str) -> Trouble:
    return Trouble(Problem(where, f"the archive is cut off or damaged in {name}", try_=REMEDY))


def _stranger(where: str, block: bytes, wanted: str) -> Problem:
    if not block:
        return Problem(where, "the archive is cut off", wanted=wanted, try_=REMEDY)
    return Problem(where, "the archive is not what its index says", _describe(block), wanted, REMEDY)


def _describe(block: bytes) -> str:
    """Return what a foreign header is, for a message."""
    try:
        member = tarfile.TarInfo.frombuf(block[:SECTOR], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return "something that is no tar header" if block else "an empty file"
    kinds = {
        "isreg": "a file",
        "isdir": "a folder",
        "issym": "a link",
        "islnk": "a hard link",
        "isdev": "a device or FIFO",
    }
    kind = next((text for test, text in kinds.items() if getattr(member, test)()), "a member")
    return f"{kind} {ascii(member.name)[1:-1][:NAME_FIELD]}, mode {member.mode & 0o7777:04o}"
