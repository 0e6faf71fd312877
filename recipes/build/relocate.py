"""Make an installed tree independent of where it lies: relative RUNPATHs, no build paths in text, a list of what is left.

    relocate.py ENTRY_FOLDER STORE SCRATCH

ENTRY_FOLDER is `STORE/.tmp-…`, at the depth it will have for good. Only the standard library is used.
RUNPATHs are rewritten inside the string table they stand in, so a new one must not be longer than the old one.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import sys
from collections.abc import Callable, Iterator

DT_NULL, DT_NEEDED, DT_STRTAB, DT_STRSZ, DT_SONAME, DT_RPATH, DT_RUNPATH = 0, 1, 5, 10, 14, 15, 29
PT_LOAD, PT_DYNAMIC, PT_NOTE = 1, 2, 4
NT_GNU_BUILD_ID = 3
SHT_DYNSYM, SHT_GNU_VERDEF, SHT_GNU_VERNEED = 11, 0x6FFFFFFD, 0x6FFFFFFE
ARCHIVE = b"!<arch>\n"
LARGEST_TEXT = 16 * 1024 * 1024


class Elf:
    """The dynamic section of one 64-bit little-endian ELF file."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        header = struct.unpack_from("<16sHHIQQQIHHHHHH", data)
        self.segments = [struct.unpack_from("<IIQQQQQQ", data, header[5] + i * header[9]) for i in range(header[10])]
        self.sections = [struct.unpack_from("<IIQQQQIIQQ", data, header[6] + i * header[11]) for i in range(header[12])]
        self.entries = list(self._dynamic())
        values = dict(self.entries)
        self.strings = self._offset(values[DT_STRTAB]) if DT_STRTAB in values else 0

    def _dynamic(self) -> Iterator[tuple[int, int]]:
        for kind, _, offset, _, _, size, _, _ in self.segments:
            if kind == PT_DYNAMIC:
                for place in range(offset, offset + size, 16):
                    tag, value = struct.unpack_from("<qQ", self.data, place)
                    if tag == DT_NULL:
                        return
                    yield tag, value

    def _offset(self, address: int) -> int:
        for kind, _, offset, start, _, size, _, _ in self.segments:
            if kind == PT_LOAD and start <= address < start + size:
                return int(address - start + offset)
        raise ValueError(f"address {address:#x} is in no segment")

    def string(self, index: int) -> bytes:
        """Return the bytes of the dynamic string table from `index` to its NUL."""
        start = self.strings + index
        return self.data[start : self.data.index(b"\0", start)]

    def values(self, *tags: int) -> list[int]:
        """Return the string table indexes that dynamic entries with one of `tags` hold."""
        return [value for tag, value in self.entries if tag in tags]

    def names(self) -> Iterator[int]:
        """Yield every other index into the string table: symbols, needed libraries, versions."""
        yield from self.values(DT_NEEDED, DT_SONAME)
        for _, kind, _, _, offset, size, _, info, _, step in self.sections:
            if kind == SHT_DYNSYM:
                for place in range(offset, offset + size, step or 24):
                    yield struct.unpack_from("<I", self.data, place)[0]
            elif kind in (SHT_GNU_VERDEF, SHT_GNU_VERNEED):
                yield from self._version_names(kind, offset, info)

    def _version_names(self, kind: int, place: int, count: int) -> Iterator[int]:
        for _ in range(count):
            if kind == SHT_GNU_VERDEF:
                _, _, _, inner, _, aux, following = struct.unpack_from("<HHHHIII", self.data, place)
            else:
                _, inner, file, aux, following = struct.unpack_from("<HHIII", self.data, place)
                yield file
            spot = place + aux
            for _ in range(inner):
                if kind == SHT_GNU_VERDEF:
                    name, after = struct.unpack_from("<II", self.data, spot)
                else:
                    _, _, _, name, after = struct.unpack_from("<IHHII", self.data, spot)
                yield name
                spot += after
            place += following


def with_build_id(data: bytes) -> bytes:
    """Return an ELF file's bytes with a build ID that follows from them: the linker's covers paths that are gone by now."""
    place = size = 0
    for kind, _, offset, _, _, length, _, _ in Elf(data).segments:
        spot = offset
        while kind == PT_NOTE and spot + 12 <= offset + length:
            name, content, note = struct.unpack_from("<III", data, spot)
            start = spot + 12 + (name + 3 & ~3)
            if note == NT_GNU_BUILD_ID and data[spot + 12 : spot + 16] == b"GNU\0":
                place, size = start, content
            spot = start + (content + 3 & ~3)
    blank = data[:place] + bytes(size) + data[place + size :]
    return data[:place] + hashlib.sha256(blank).digest()[:size].ljust(size, b"\0") + data[place + size :]


def is_elf(start: bytes) -> bool:
    """Return whether a file with these first bytes is a 64-bit little-endian ELF file."""
    return start[:6] == b"\x7fELF\x02\x01"


def run_paths(data: bytes) -> list[str]:
    """Return the RPATH and RUNPATH strings of an ELF file."""
    elf = Elf(data)
    return [os.fsdecode(elf.string(index)) for index in elf.values(DT_RPATH, DT_RUNPATH)]


def with_run_path(data: bytes, change: Callable[[str], str]) -> bytes:
    """Return `data` with every RPATH and RUNPATH replaced by `change(old)`; ValueError where the new one does not fit."""
    elf = Elf(data)
    for index in elf.values(DT_RPATH, DT_RUNPATH):
        old = elf.string(index)
        new = os.fsencode(change(os.fsdecode(old)))
        if new == old:
            continue
        if len(new) > len(old):
            raise ValueError(f"RUNPATH {new!r} does not fit in the place of {old!r}")
        sharing = [name for name in elf.names() if index <= name < index + len(old)]
        if sharing:
            raise ValueError(f"RUNPATH {old!r} shares its bytes with {elf.string(sharing[0])!r}")
        start = elf.strings + index
        data = data[:start] + new.ljust(len(old), b"\0") + data[start + len(old) :]
    return data


class Places:
    """The paths of this build, and what stands for them in a tree that can be moved."""

    def __init__(self, entry: str, store: str, scratch: str) -> None:
        self.entry, self.store, self.scratch = entry, store, scratch
        self.stores = sorted({store, os.path.realpath(store)})
        self.scratches = sorted({scratch, os.path.realpath(scratch)})

    def of_build(self) -> list[str]:
        """Return every spelling of a path that must not stay behind."""
        name = os.path.basename(self.entry)
        return [os.path.join(store, name) for store in self.stores] + self.scratches

    def relative(self, file: str, component: str) -> str | None:
        """Return one RUNPATH component as it should be in `file`, or None to drop it."""
        folder = os.path.dirname(file)
        for scratch in self.scratches:
            early = os.path.join(scratch, "early") + os.sep
            if component.startswith(early):
                component = os.path.join(self.store, component[len(early) :])
            elif component == scratch or component.startswith(scratch + os.sep):
                return None
        for store in self.stores:
            if component.startswith(store + os.sep):
                target = os.path.join(self.store, component[len(store) + 1 :])
                return os.path.join("$ORIGIN", os.path.relpath(target, folder)).rstrip("/.") or "$ORIGIN"
        return component

    def run_path(self, file: str, old: str) -> str:
        """Return the whole RUNPATH of `file`, without build paths and repetitions."""
        kept: list[str] = []
        for component in old.split(":"):
            new = self.relative(file, component)
            if new and new not in kept:
                kept.append(new)
        return ":".join(kept)

    def blank(self, data: bytes) -> bytes:
        """Return a binary file's bytes with build paths replaced by a path of the same length: nvlink keeps its command line in what
        it links, and nvcc the names of sources; nobody opens these."""
        for path in self.of_build():
            old = os.fsencode(path)
            data = data.replace(old, b"/build".ljust(len(old), b"/"))
        return data

    def text(self, file: str, data: bytes) -> bytes:
        """Return a text file's bytes with build paths replaced: relative to the file in CMake and pkg-config files, nameless elsewhere."""
        anchor = {".cmake": "${CMAKE_CURRENT_LIST_DIR}", ".pc": "${pcfiledir}"}.get(os.path.splitext(file)[1])
        here = os.path.join(anchor, os.path.relpath(self.entry, os.path.dirname(file))) if anchor else "/entry"
        for path in self.of_build():
            data = data.replace(os.fsencode(path), os.fsencode("/build" if path in self.scratches else here))
        return data


def relocate_file(path: str, places: Places) -> str:
    """Rewrite one file in place where it names a build path; return what remains to be said of it, or an empty string. Links and
    special files stay as they are."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        return ""
    with open(path, "rb") as file:
        start = file.read(64)
        binary = is_elf(start) or start.startswith(ARCHIVE)
        if not binary and os.fstat(file.fileno()).st_size > LARGEST_TEXT:
            return ""
        data = start + file.read()
    if is_elf(start):
        new = places.blank(with_run_path(data, lambda old: places.run_path(path, old)))
        new = new if new == data else with_build_id(new)
    elif b"\0" in data:
        new = data if path.endswith(".pyc") else places.blank(data)
    else:
        new = places.text(path, data)
    if new != data:
        replace(path, new)
    left = [spelling for spelling in places.of_build() if os.fsencode(spelling) in new]
    if left and path.endswith(".pyc"):
        raise ValueError(f"byte code that names {left[0]}")
    return f"names {left[0]}" if left else ""


def replace(path: str, data: bytes) -> None:
    """Write a file anew under the same name and mode; other hard links to the old one keep what they had."""
    mode = os.stat(path).st_mode & 0o777
    os.unlink(path)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
    os.chmod(path, mode)


def wanted(folder: str, entry: str) -> bool:
    """Return whether the files of `folder` can name a build path: what wheels brought into site-packages cannot."""
    parts = os.path.relpath(folder, entry).split(os.sep)
    return "site-packages" not in parts or parts[-1].endswith(".dist-info") or parts[-1] == "site-packages"


def main(entry: str, store: str, scratch: str) -> int:
    """Relocate the tree; exit non-zero with one line a problem."""
    places = Places(entry, store, scratch)
    problems: list[str] = []

    def fail(path: str, error: Exception) -> None:
        problems.append(path)
        why = error.strerror if isinstance(error, OSError) else error
        print(f"{os.path.relpath(path, entry)}: cannot be made relocatable: {why}", file=sys.stderr)

    for folder, _, names in os.walk(entry, onerror=lambda error: fail(error.filename, error)):
        for name in sorted(names) if wanted(folder, entry) else ():
            path = os.path.join(folder, name)
            try:
                remark = relocate_file(path, places)
            except (ValueError, OverflowError, IndexError, struct.error, OSError) as error:
                fail(path, error)
                continue
            if remark:
                print(f"{os.path.relpath(path, entry)}: {remark}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
