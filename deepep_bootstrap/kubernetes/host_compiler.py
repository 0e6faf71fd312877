"""The host compiler in an image of DeepEP V2, whose nvcc calls gcc and `sh`: files of Debian's packages, as far as the
base has none.

A package is read here, and none of its scripts runs: an `ar` file whose member data.tar.* has the files.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from msgspec import Struct

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.kubernetes.oci import Base, Root
from deepep_bootstrap.lock.compatibility import numbers
from deepep_bootstrap.lock.model import CompilerPin, PackagePin
from deepep_bootstrap.prefix.archive import stream
from deepep_bootstrap.prefix.archive.index import FILE, FOLDER, LINK, ArchiveMember

GCC, SHELL = "/usr/bin/gcc", "/bin/sh"
LIBRARY_FOLDERS = ("/lib", "/usr/lib")
AR_MAGIC, AR_HEADER = b"!<arch>\n", 60
UNPACKED = ("data.tar", "data.tar.gz", "data.tar.xz")
"""Members that Python's own library reads; Debian 12 has them all as xz."""


class HostCompiler(Struct, frozen=True):
    """What is added to a base: folders, links and files by path, the contents of the latter, and the packages that they
    are from."""

    name: str
    things: tuple[ArchiveMember, ...]
    contents: Mapping[str, bytes]
    packages: tuple[PackagePin, ...]

    def pack(self, sink: stream.Sink) -> None:
        """Write the tar stream of the layer."""
        size = 0
        for thing in self.things:
            data = self.contents.get(thing.path, b"")
            for piece in (stream.header(thing.path, thing), data, stream.padding(len(data))):
                sink.write(piece)
                size += len(piece)
        sink.write(stream.ending(size))


def is_in(root: Root) -> bool:
    """Return whether an image has what nvcc calls."""
    return root.has(GCC) and root.has(SHELL)


def choose(pins: Iterable[CompilerPin], machine: str, base: Base, root: Root) -> CompilerPin:
    """Return the compiler of a lock for a base that has none. Raises Trouble where there is none for this machine, or
    it would not run there: an older glibc, or libraries that are looked for elsewhere."""
    what, remedy = "the base has no gcc and sh, which nvcc calls", "a base that has them: --base=FOLDER"
    pin = next((each for each in pins if machine in each.packages), None)
    if pin is None:
        raise Trouble(Problem(base.where, what, wanted=f"a table [compiler.NAME] for {machine}", try_=remedy))
    places = [f"{folder}/{machine}-linux-gnu/libc.so.6" for folder in LIBRARY_FOLDERS]
    if not any(map(root.has, places)):
        raise Trouble(Problem(base.where, f"{what}, and is no Debian or Ubuntu", f"no {places[1]}", try_=remedy))
    if numbers(root.glibc) < numbers(pin.glibc):
        wanted = f"glibc {pin.glibc} or later for {pin.name}"
        raise Trouble(Problem(base.where, what, f"glibc {root.glibc}", wanted, remedy))
    return pin


def unpack(pin: CompilerPin, files: Sequence[tuple[PackagePin, Path]], root: Root) -> HostCompiler:
    """Return what comes along of these packages: what `keep` matches and the image has not. Paths are those that the
    base's links lead to, so that none of its links is replaced by a folder."""
    links: dict[str, ArchiveMember] = {}
    contents: dict[str, bytes] = {}
    for package, file in files:
        for member, data in read_package(package, file):
            path = member.name.removeprefix("./")
            if not any(fnmatchcase(path, pattern) for pattern in pin.keep) or root.has(path):
                continue
            folder, _, name = path.rpartition("/")
            place = f"{root.real(folder)}/{name}"
            if member.issym():
                links[place] = ArchiveMember(place, LINK, target=member.linkname)
            else:
                contents[place] = data
                digest = hashlib.sha256(data).hexdigest()
                links[place] = ArchiveMember(place, FILE, bool(member.mode & 0o111), len(data), digest)
    there = {*root.names, *(each for name in root.names for each in _above(name))}
    folders = {each for place in links for each in _above(place)} - there
    things = {**{path: ArchiveMember(path, FOLDER) for path in folders}, **links}
    packages = tuple(package for package, _ in files)
    return HostCompiler(pin.name, tuple(things[path] for path in sorted(things)), contents, packages)


def _above(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path


def read_package(package: PackagePin, file: Path) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Yield the files and links of a package, each with its content. Raises Trouble where it cannot be read."""
    try:
        with tarfile.open(fileobj=io.BytesIO(_data_of(file.read_bytes()))) as archive:
            for member in archive:
                if member.isfile() or member.islnk():
                    content = archive.extractfile(member)
                    yield member, content.read() if content else b""
                elif member.issym():
                    yield member, b""
    except (tarfile.TarError, ValueError, EOFError) as error:
        where, what = f"package {package.name}", "this package cannot be read"
        raise Trouble(Problem(where, what, str(error)[:120], f"one of {', '.join(UNPACKED)}")) from None


def _data_of(package: bytes) -> bytes:
    """Return the member of an ar file that holds the files of the package; ValueError where there is none."""
    if not package.startswith(AR_MAGIC):
        raise ValueError("no ar file")
    at, names = len(AR_MAGIC), []
    while at + AR_HEADER <= len(package):
        head = package[at : at + AR_HEADER]
        name, size = head[:16].decode("ascii", "replace").strip().rstrip("/"), int(head[48:58])
        if name in UNPACKED:
            return package[at + AR_HEADER : at + AR_HEADER + size]
        names.append(name)
        at += AR_HEADER + size + size % 2
    raise ValueError(f"only {', '.join(names)}")
