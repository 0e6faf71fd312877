"""The signed indexes of a package repository, fetched and verified: the signature by the lock's key, then
the hash of each file. A file that is in the mirror as signed is not fetched again.
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

from deepep_bootstrap.core import filetree, process
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.fetch.files import copy_from
from deepep_bootstrap.fetch.locations import Mirrors, packages_path
from deepep_bootstrap.fetch.mirror.apt_parts import RepositoryPart
from deepep_bootstrap.fetch.mirror.apt_solver import Deb, Listed, Release, read_packages, read_release
from deepep_bootstrap.fetch.mirror.fill import is_file
from deepep_bootstrap.fetch.mirror.index import Record, measure

LONGEST_UNSIGNED = 16 << 20
"""Bytes of a key or a Release file that are read at most; Debian's own, with all of its indexes, has a fifth of a
megabyte."""
LONGEST_INDEX = 1 << 30
"""Bytes of an unpacked index that are read at most; that of all of Debian has fifty megabytes."""
READABLE = ("", ".xz", ".gz", ".bz2")
"""Ends of the names of indexes that can be read here."""
FORMS = (*READABLE, ".zst", ".lzma", ".lz4")
"""All forms that apt reads; it takes one that it likes best among those that are signed and there."""
CHANGING = "the same command again, later: the repository may just be changing"


@dataclass(frozen=True)
class Shelf:
    """Where files of a part come from: the mirror at `root`, else the repository's address through `mirrors`;
    fetched into `scratch`. With `local`, what no hash vouches for (the key, the signed Release) is taken from the
    mirror as well."""

    root: Path
    part: RepositoryPart
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
        if (
            (self.local or wanted)
            and is_file(self.root, path)
            and (not wanted or not _differs(self.root / path, wanted))
        ):
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
    """A part whose indexes were verified: its packages, the index files by their paths in a mirror in the order in
    which they are put there (the signature last), and what the Release file says."""

    part: RepositoryPart
    debs: tuple[Deb, ...]
    files: Mapping[str, Path]
    release: Release


def open_part(shelf: Shelf) -> Opened:
    """Fetch and verify the indexes of a part. Raises Trouble when anything is not signed by the lock's key."""
    part, folder = shelf.part, release_folder(shelf.part)
    where = f"packages {part.name}"
    home = Path(tempfile.mkdtemp(dir=shelf.scratch), "gpg")
    key = shelf.key()
    make_keyring(key, part.repository.key_fingerprint, home, f"{where}: {part.repository.key_url}")
    signed = _signed_files(shelf, folder)
    try:
        text = signed_text(
            home, signed[0][1], part.repository.key_fingerprint, signed[1][1] if len(signed) > 1 else None
        )
    except Trouble as trouble:
        raise Trouble(
            *(Problem(f"{where}: {each.where}", each.what, each.found, each.wanted) for each in trouble.problems)
        ) from None
    release = read_release(text, f"{where}: {signed[0][0]}")
    if release.valid_until and _aware(release.valid_until) < datetime.now(timezone.utc):
        raise Trouble(
            Problem(
                where, "its index is out of date, apt does not take it", f"valid until {release.valid_until:%Y-%m-%d}"
            )
        )
    indexes = dict(_indexes(shelf, folder, release))
    debs = [
        deb
        for file in indexes.values()
        if _form(file) in READABLE
        for deb in read_packages(_unpacked(file), f"{where}: {file.name}")
    ]
    files = {f"{part.folder}/{path}": file for path, file in indexes.items()}
    files[packages_path(part.repository.key_url)] = key
    files |= {f"{part.folder}/{path}": file for path, file in reversed(signed)}
    return Opened(part, tuple(dict.fromkeys(debs)), files, release)


def release_folder(part: RepositoryPart) -> str:
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
    """Yield the lists of packages for the part's architectures, in every form that is signed and there, at least one
    that can be read."""
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
            raise (
                missing
                if not found
                else Trouble(Problem(f"packages {part.name}", f"{place} is there in no form that can be read here"))
            )
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


CLEAR = b"-----BEGIN PGP SIGNED MESSAGE-----\n"
BAD = ("BADSIG", "EXPSIG", "EXPKEYSIG", "REVKEYSIG")
"""What gpg says of a signature that apt does not take either: wrong, out of date, of a key that is out of date or
was revoked."""
WEAK = {"1": "MD5", "2": "SHA1", "3": "RIPEMD160"}
"""Digests that apt takes no signature over, by number (RFC 4880, 9.4). gpg's own --weak-digest would refuse keys
that have one, too."""
TIMEOUT = 60.0
"""Seconds for one call of gpg, which reads small files and nothing of the network."""


def make_keyring(key: Path, fingerprint: str, home: Path, where: str) -> None:
    """Make `home` a gpg home with exactly the key of that full fingerprint, out of the file `key`, whatever else that
    holds.

    Raises Trouble, said of `where`, when the file has no such key.
    """
    all_of_them, picked = home.parent / f"{home.name}-all", home.parent / f"{home.name}-picked"
    for folder in (home, all_of_them):
        folder.mkdir(mode=0o700)
    _gpg(all_of_them, "--import", key)
    found = _primaries(_gpg(all_of_them, "--with-colons", "--list-keys").out)
    _gpg(all_of_them, "--output", picked, "--export", fingerprint)
    if picked.is_file():
        # Its exit code also tells of an agent that nobody needs, such as one whose socket has too long a path.
        _gpg(home, "--import", picked)
    # A key may carry the wanted one as a subkey and would come along.
    if _primaries(_gpg(home, "--with-colons", "--list-keys").out) != [fingerprint]:
        raise Trouble(Problem(where, "is not the key in the lock", " ".join(found) or "no key", fingerprint))


def signed_text(home: Path, file: Path, fingerprint: str, signature: Path | None = None) -> str:
    """Return what the key of `home` signed: the text in a clear-signed `file`, or all of `file` where `signature` is a
    file of its own.

    Raises Trouble when there is no good signature of that key, made with a digest that apt takes.
    """
    content = home.parent / f"{home.name}-content"
    if signature is None:
        if not file.read_bytes().startswith(CLEAR):
            raise Trouble(Problem(file.name, "is not clear-signed", wanted=CLEAR.decode().strip()))
        said = _gpg(home, "--status-fd", "1", "--output", content, "--decrypt", file).out
    else:
        content = file
        said = _gpg(home, "--status-fd", "1", "--verify", signature, file).out
    words = [line.split()[1:] for line in said.splitlines() if line.startswith("[GNUPG:] ")]
    kinds = [each[0] for each in words if each]
    # VALIDSIG, key, date, time, expiry, version, reserved, algorithm, digest, class, primary key (doc/DETAILS of GnuPG)
    valid = [each for each in words if each[:1] == ["VALIDSIG"] and len(each) > 10]
    by = [each[10] for each in valid]
    faults = [
        *(kind for kind in kinds if kind in BAD),
        *(f"one over {WEAK[each[8]]}" for each in valid if each[8] in WEAK),
    ]
    if faults or "GOODSIG" not in kinds or fingerprint not in by or not content.is_file():
        signers = [each[1] for each in words if each[:1] in (["NO_PUBKEY"], ["ERRSIG"])]
        found = ", ".join(dict.fromkeys([*faults, *(f"a signature of {each}" for each in signers)])) or "no signature"
        raise Trouble(Problem(file.name, "has no good signature of the key in the lock", found, fingerprint))
    try:
        return content.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise Trouble(Problem(file.name, "is no text")) from None


def _gpg(home: Path, *words: str | Path) -> process.Completed:
    """Run gpg with the keys of `home` and no agent."""
    quiet = ("--no-autostart", "--batch", "--no-tty", "--yes", "--quiet", "--no-options", "--no-auto-key-retrieve")
    return process.run_program(("gpg", "--homedir", home, *quiet, *words), timeout=TIMEOUT)


def _primaries(listing: str) -> list[str]:
    """Return the full fingerprints of the primary keys in a listing with colons."""
    found, primary = [], False
    for fields in (line.split(":") for line in listing.splitlines()):
        if fields[0] == "pub":
            primary = True
        elif fields[0] == "fpr" and primary:
            found.append(fields[9])
            primary = False
    return found
