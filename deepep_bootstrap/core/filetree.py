"""The Nix archive (NAR) hash of a file tree, the one writer of deterministic tar streams, and new files and folders
that are there whole or not at all.

A NAR is one stream of length-prefixed words. Names are bytes and sorted as bytes; of all permissions only
the owner's execute bit counts. `python -m deepep_bootstrap.core.filetree PATH` prints the same line as
`nix hash path PATH`.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
import shutil
import stat
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.guard import guarded

CHUNK = 1 << 20
NO_OVERLAY: Mapping[bytes, bytes] = {}


def hash_path(path: str | os.PathLike[str], overlay: Mapping[bytes, bytes] = NO_OVERLAY) -> str:
    """Return the SRI hash (`sha256-…`) of the NAR of `path`: a directory, a regular file or a symbolic link.

    `overlay` maps names of regular files below `path` (bytes, with slashes) to a content that is hashed instead of
    their own. Files are read in pieces, so memory stays constant. A socket, FIFO or device in the tree, a file that
    changes while it is read, and anything that cannot be read raise Trouble.
    """
    digest = hashlib.sha256()
    top = os.fsencode(path)
    try:
        digest.update(_word(b"nix-archive-1"))
        for piece in _pieces(top, {os.path.join(top, name): content for name, content in overlay.items()}):
            digest.update(piece)
    except OSError as error:
        where = os.fsencode(error.filename) if error.filename is not None else top
        raise Trouble(Problem(shown(where), f"cannot be hashed: {error.strerror or error}")) from None
    return sri(digest.digest())


def hash_file(file: Path) -> str:
    """Return the SRI hash of the bytes of a file, which is read in pieces. Raises OSError."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while piece := stream.read(CHUNK):
            digest.update(piece)
    return sri(digest.digest())


@contextmanager
def whole_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a new file in the folder of `path` (`name` is its own path until then) that gets the name `path` by one
    rename, in place of whatever file has it, when the block ends and its bytes are on the disk. A block that raises
    leaves nothing. `mode` is less the umask. Raises OSError."""
    aside = beside(path)
    try:
        with open(aside, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder beside `path` that gets this name when the block ends; nothing but an empty folder may have
    it. A block that raises leaves nothing. Raises OSError."""
    aside = beside(path)
    try:
        aside.mkdir()
        yield aside
        aside.rename(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def beside(path: Path) -> Path:
    """Return a name in the folder of `path` that nobody has: hidden, and short enough however long that of `path`."""
    return path.with_name(f".{path.name[:60]}.{secrets.token_hex(4)}")


def sri(digest: bytes) -> str:
    """Return the SRI form of a raw SHA-256 digest."""
    return f"sha256-{base64.b64encode(digest).decode()}"


def hex_of(sri_hash: str) -> str:
    """Return the digits of an SRI hash in hexadecimal."""
    return base64.b64decode(sri_hash.partition("-")[2]).hex()


def shown(name: bytes) -> str:
    """Return a file name for a message; bytes that are not UTF-8 are escaped."""
    return name.decode(errors="backslashreplace")


def main(arguments: list[str]) -> int:
    """Print the hash of the one path in `arguments`; return the exit code."""

    def body() -> int:
        if len(arguments) != 1:
            raise Trouble(
                Problem(
                    "nar",
                    "takes one path",
                    found=f"{len(arguments)} arguments",
                    try_="python -m deepep_bootstrap.core.filetree DIR",
                )
            )
        print(hash_path(Path(arguments[0])))
        return 0

    return guarded("nar", body)


def _word(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data + bytes(-len(data) % 8)


def _pieces(top: bytes, overlay: Mapping[bytes, bytes]) -> Iterator[bytes]:
    # A stack instead of recursion: a tree may be deeper than the interpreter's recursion limit. It holds nodes still to
    # be written (None and a path) and words that stand between them (the words, and an unused path).
    todo: list[tuple[bytes | None, bytes]] = [(None, top)]
    while todo:
        words, path = todo.pop()
        if words is not None:
            yield words
            continue
        mode = os.lstat(path).st_mode
        if stat.S_ISREG(mode):
            yield from _file(path, overlay.get(path))
        elif stat.S_ISLNK(mode):
            yield _words(b"(", b"type", b"symlink", b"target", os.readlink(path), b")")
        elif stat.S_ISDIR(mode):
            yield _words(b"(", b"type", b"directory")
            todo.append((_word(b")"), b""))
            for name in sorted(os.listdir(path), reverse=True):
                todo.append((_word(b")"), b""))
                todo.append((None, os.path.join(path, name)))
                todo.append((_words(b"entry", b"(", b"name", name, b"node"), b""))
        else:
            raise Trouble(
                Problem(shown(path), "is neither a file, a directory nor a symbolic link; such a tree has no hash")
            )


def _words(*words: bytes) -> bytes:
    return b"".join(map(_word, words))


def _file(path: bytes, instead: bytes | None) -> Iterator[bytes]:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as stream:
        status = os.fstat(stream.fileno())
        yield _words(b"(", b"type", b"regular")
        if status.st_mode & stat.S_IXUSR:
            yield _words(b"executable", b"")
        if instead is not None:
            yield _words(b"contents", instead, b")")
            return
        yield _word(b"contents") + status.st_size.to_bytes(8, "little")
        size = 0
        while chunk := stream.read(CHUNK):
            size += len(chunk)
            yield chunk
    if size != status.st_size:
        raise Trouble(
            Problem(shown(path), "changed while it was read", found=f"{size} bytes", wanted=f"{status.st_size} bytes")
        )
    yield bytes(-size % 8) + _word(b")")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


TAR_CHUNK = 1 << 20
MTIME = 315532800  # 1980-01-01: the same for everybody, late enough for zip files, early enough for every clock


def tar_tree(entries: Iterable[tuple[str, Path]], mtime: int = MTIME) -> Iterator[bytes]:
    """Yield a tar stream of `entries`, each a name in the archive and a file, symbolic link or directory (with all
    below it).

    The same trees give the same bytes: sorted names, owner 0, `mtime` (seconds since 1970), mode 0755 or 0644 by the
    owner's execute bit. Memory stays bounded. Raises Trouble for anything that is neither file, link nor directory.
    """
    size = 0
    try:
        for name, path in entries:
            for piece in _members(os.fsencode(name), os.fsencode(path), mtime):
                size += len(piece)
                yield piece
    except OSError as error:
        raise Trouble(Problem(shown(os.fsencode(error.filename)), f"cannot be sent: {error.strerror}")) from None
    end = size + 2 * tarfile.BLOCKSIZE
    yield bytes(2 * tarfile.BLOCKSIZE + -end % tarfile.RECORDSIZE)


def _members(name: bytes, path: bytes, mtime: int) -> Iterator[bytes]:
    status = os.lstat(path)
    member = tarfile.TarInfo(os.fsdecode(name))
    member.mtime = mtime
    member.mode = 0o755 if stat.S_ISDIR(status.st_mode) or status.st_mode & stat.S_IXUSR else 0o644
    if stat.S_ISREG(status.st_mode):
        member.size = status.st_size
        yield _header(member)
        yield from _content(path, status.st_size)
    elif stat.S_ISLNK(status.st_mode):
        member.type, member.mode, member.linkname = tarfile.SYMTYPE, 0o777, os.fsdecode(os.readlink(path))
        yield _header(member)
    elif stat.S_ISDIR(status.st_mode):
        member.type = tarfile.DIRTYPE
        yield _header(member)
        for each in sorted(os.listdir(path)):
            yield from _members(name + b"/" + each, os.path.join(path, each), mtime)
    else:
        raise Trouble(Problem(shown(path), "is neither a file, a directory nor a symbolic link and cannot be sent"))


def _header(member: tarfile.TarInfo) -> bytes:
    return member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _content(path: bytes, size: int) -> Iterator[bytes]:
    left = size
    with open(path, "rb") as stream:
        while left and (chunk := stream.read(min(TAR_CHUNK, left))):
            left -= len(chunk)
            yield chunk
    if left:
        raise Trouble(Problem(shown(path), "became shorter while it was read"))
    yield bytes(-size % tarfile.BLOCKSIZE)
