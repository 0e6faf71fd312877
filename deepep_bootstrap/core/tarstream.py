"""Trees and files as one tar stream of bounded memory, the same bytes for the same content: what Door.send takes."""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from deepep_bootstrap.core import filetree
from deepep_bootstrap.core.errors import Problem, Trouble

CHUNK = 1 << 20
MTIME = 315532800  # 1980-01-01: the same for everybody, late enough for zip files, early enough for every clock


def tar_tree(entries: Iterable[tuple[str, Path]], mtime: int = MTIME) -> Iterator[bytes]:
    """Yield a tar stream of `entries`, each a name in the archive and a file, symbolic link or directory (with all below it).

    The same trees give the same bytes: sorted names, owner 0, `mtime` (seconds since 1970), mode 0755 or 0644 by the owner's
    execute bit. Memory stays bounded. Raises Trouble for anything that is neither file, link nor directory.
    """
    size = 0
    try:
        for name, path in entries:
            for piece in _members(os.fsencode(name), os.fsencode(path), mtime):
                size += len(piece)
                yield piece
    except OSError as error:
        raise Trouble(Problem(filetree.shown(os.fsencode(error.filename)), f"cannot be sent: {error.strerror}")) from None
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
        raise Trouble(Problem(filetree.shown(path), "is neither a file, a directory nor a symbolic link and cannot be sent"))


def _header(member: tarfile.TarInfo) -> bytes:
    return member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _content(path: bytes, size: int) -> Iterator[bytes]:
    left = size
    with open(path, "rb") as stream:
        while left and (chunk := stream.read(min(CHUNK, left))):
            left -= len(chunk)
            yield chunk
    if left:
        raise Trouble(Problem(filetree.shown(path), "became shorter while it was read"))
    yield bytes(-size % tarfile.BLOCKSIZE)
