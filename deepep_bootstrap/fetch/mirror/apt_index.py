"""The signed indexes of a package repository, fetched and verified: signature by the lock's key, then the hash of each, then its text.

What a mirror has already and what is as the signature says is not fetched again.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO
from urllib.parse import quote

from deepep_bootstrap.core import filetree
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.fetch.files import copy_from
from deepep_bootstrap.fetch.locations import Mirrors, packages_path
from deepep_bootstrap.fetch.mirror import pgp
from deepep_bootstrap.fetch.mirror.apt_parts import Part
from deepep_bootstrap.fetch.mirror.apt_solver import Deb, Listed, Release, read_packages, read_release
from deepep_bootstrap.fetch.mirror.fill import is_file
from deepep_bootstrap.fetch.mirror.index import Record, measure

LONGEST_UNSIGNED = 16 << 20
"""Bytes of a key or a Release file that are read at most; Debian's own, with all of its indexes, has a fifth of a megabyte."""
LONGEST_INDEX = 1 << 30
"""Bytes of an unpacked index that are read at most; that of all of Debian has fifty megabytes."""
READABLE = ("", ".xz", ".gz", ".bz2")
"""Ends of the names of indexes that can be read here."""
FORMS = (*READABLE, ".zst", ".lzma", ".lz4")
"""All forms that apt reads; it takes one that it likes best among those that are signed and there."""
CHANGING = "the same command again, later: the repository may just be changing"


@dataclass(frozen=True)
class Shelf:
    """Where files of a part come from: the mirror at `root`, else the repository's address through `mirrors`; fetched into `scratch`.
    With `local`, what no hash vouches for (the key, the signed Release) is taken from the mirror as well."""

    root: Path
    part: Part
    mirrors: Mirrors
    scratch: Path
    local: bool

    def get(self, path: str, wanted: Listed | None = None) -> Path:
        """Return the file at `path` of the repository, as `wanted`. Raises Trouble where it is not to be had."""
        base = self.mirrors.packages(self.part.repository.url).rstrip("/")
        return self.get_from(f"{base}/{quote(path)}", f"{self.part.folder}/{path}", wanted)

    def key(self) -> Path:
        """Return the file with the key. Raises Trouble where it is not to be had."""
        url = self.part.repository.key_url
        return self.get_from(self.mirrors.packages(url), packages_path(url), None)

    def get_from(self, address: str, path: str, wanted: Listed | None) -> Path:
        """Return the file that is `path` in the mirror, else what is at `address`."""
        if (self.local or wanted) and is_file(self.root, path) and (not wanted or not _differs(self.root / path, wanted)):
            return self.root / path
        file = Path(tempfile.mkdtemp(dir=self.scratch), path.rpartition("/")[2])
        where = f"packages {self.part.name}"
        copy_from(address, file, where, wanted.size if wanted else LONGEST_UNSIGNED)
        if wanted and (difference := _differs(file, wanted)):
            file.unlink()
            raise Wrong(Problem(where, f"{path} is not the file that the signed index names", *difference, CHANGING))
        return file

    def has_release(self) -> bool:
        """Return whether the mirror has a signed Release of the part."""
        folder = f"{self.part.folder}/{release_folder(self.part)}"
        return any(is_file(self.root, f"{folder}{name}") for name in ("InRelease", "Release"))


class Wrong(Trouble):
    """A file is there, and not the one that was signed."""


@dataclass(frozen=True)
class Opened:
    """A part whose indexes were verified: its packages, the index files by their paths in a mirror in the order in which they are put
    there (the signature last), and what the Release file says."""

    part: Part
    debs: tuple[Deb, ...]
    files: Mapping[str, Path]
    release: Release


def open_part(shelf: Shelf) -> Opened:
    """Fetch and verify the indexes of a part. Raises Trouble when anything is not signed by the lock's key."""
    part, folder = shelf.part, release_folder(shelf.part)
    where = f"packages {part.name}"
    home = Path(tempfile.mkdtemp(dir=shelf.scratch), "gpg")
    key = shelf.key()
    pgp.make_keyring(key, part.repository.key_fingerprint, home, f"{where}: {part.repository.key_url}")
    signed = _signed_files(shelf, folder)
    try:
        text = pgp.signed_text(home, signed[0][1], part.repository.key_fingerprint, signed[1][1] if len(signed) > 1 else None)
    except Trouble as trouble:
        raise Trouble(*(Problem(f"{where}: {each.where}", each.what, each.found, each.wanted) for each in trouble.problems)) from None
    release = read_release(text, f"{where}: {signed[0][0]}")
    if release.valid_until and _aware(release.valid_until) < datetime.now(timezone.utc):
        raise Trouble(Problem(where, "its index is out of date, apt does not take it", f"valid until {release.valid_until:%Y-%m-%d}"))
    indexes = dict(_indexes(shelf, folder, release))
    debs = [deb for file in indexes.values() if _form(file) in READABLE for deb in read_packages(_unpacked(file), f"{where}: {file.name}")]
    files = {f"{part.folder}/{path}": file for path, file in indexes.items()}
    files[packages_path(part.repository.key_url)] = key
    files |= {f"{part.folder}/{path}": file for path, file in reversed(signed)}
    return Opened(part, tuple(dict.fromkeys(debs)), files, release)


def release_folder(part: Part) -> str:
    """Return where the Release file is below the repository: "" or a folder with a slash at its end."""
    suite = part.repository.suite
    return suite.removeprefix("./").lstrip("/") if suite.endswith("/") else f"dists/{suite}/"


def record(listed: Listed) -> Record:
    """Return what the index of a mirror has of a file."""
    return Record(listed.size, filetree.sri(bytes.fromhex(listed.sha256)))


def _signed_files(shelf: Shelf, folder: str) -> list[tuple[str, Path]]:
    """Return InRelease, or Release and its signature, by path."""
    try:
        return [(f"{folder}InRelease", shelf.get(f"{folder}InRelease"))]
    except Trouble as trouble:
        try:
            return [(path, shelf.get(path)) for path in (f"{folder}Release", f"{folder}Release.gpg")]
        except Trouble:
            raise trouble from None


def _indexes(shelf: Shelf, folder: str, release: Release) -> Iterator[tuple[str, Path]]:
    """Yield the lists of packages for the part's architectures, in every form that is signed and there, at least one that can be read."""
    part = shelf.part
    places = [f"{name}/binary-{arch}/Packages" for name in part.repository.components for arch in (*part.archs, "all")]
    listed = [place for place in places or ["Packages"] if any(f"{place}{form}" in release.files for form in FORMS)]
    if not listed:
        wanted = f"Packages of {' or '.join(part.archs)}"
        raise Trouble(Problem(f"packages {part.name}", "the signed Release names no list of packages", wanted=wanted))
    for place in listed:
        found = []
        for path in (f"{place}{form}" for form in FORMS if f"{place}{form}" in release.files):
            try:
                found.append((f"{folder}{path}", shelf.get(f"{folder}{path}", release.files[path])))
            except Wrong:
                raise
            except Trouble as trouble:
                missing = trouble
        if not any(_form(file) in READABLE for _, file in found):
            raise missing if not found else Trouble(Problem(f"packages {part.name}", f"{place} is there in no form that can be read here"))
        yield from found


def _form(file: Path) -> str:
    return file.suffix if file.suffix in FORMS else ""


def _plain(stream: IO[bytes], form: str) -> IO[bytes] | gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile:
    if form == ".xz":
        return lzma.LZMAFile(stream)
    if form == ".gz":
        return gzip.GzipFile(fileobj=stream)
    return bz2.BZ2File(stream) if form == ".bz2" else stream


def _unpacked(file: Path) -> str:
    """Return the text of an index. Raises Trouble where it is damaged, or without end."""
    try:
        with file.open("rb") as raw, _plain(raw, _form(file)) as stream:
            data = stream.read(LONGEST_INDEX + 1)
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise Trouble(Problem(file.name, f"cannot be unpacked: {error}")) from None
    if len(data) > LONGEST_INDEX:
        raise Trouble(Problem(file.name, "is too long", f"more than {LONGEST_INDEX} bytes"))
    return data.decode(errors="replace")


def _differs(file: Path, wanted: Listed) -> tuple[str, str] | None:
    """Return how a file is not the one that was signed, found and wanted."""
    found = measure(file.parent, file.name, wanted.size)
    if found.size != wanted.size:
        more = "more than " if found.size > wanted.size else ""
        return f"{more}{min(found.size, wanted.size)} bytes", f"{wanted.size} bytes"
    return None if found == record(wanted) else (found.hash, record(wanted).hash)


def _aware(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
