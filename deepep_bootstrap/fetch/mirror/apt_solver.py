"""Index files of apt repositories: Release, Packages, relations between packages, the order of versions, and
the closure of dependencies. The tests hold that order to `dpkg --compare-versions`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from deepep_bootstrap.core.errors import Problem, Trouble

SHA256 = re.compile(r"[0-9a-f]{64}")
FIELD = re.compile(r"([!-9;-~]+):[ \t]*(.*)")
"""A field of a stanza: printable ASCII without a colon, then its value (deb822(5))."""
VERSION = re.compile(r"(?:[0-9]+:)?[0-9A-Za-z.+~:-]+")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*")
RELATION = re.compile(
    rf"(?P<name>{NAME.pattern})(?::(?P<arch>[a-z0-9-]+))?(?:\s*\(\s*(?P<sign><<|<=|>=|>>|=|<"
    rf"|>)\s*(?P<version>[^\s()]+)\s*\))?"
)
SIGNS = {"<": "<=", ">": ">="}
"""What the two old signs mean (Debian policy 7.1)."""
ANY_ARCHITECTURE = "any"


@dataclass(frozen=True)
class Listed:
    """A file as a signed index has it: its size in bytes and its SHA-256 in hexadecimal digits."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Release:
    """What the signed file of a repository says: when it was made, until when apt takes it (None: always), and every
    index by its path beside that file."""

    date: str
    valid_until: datetime | None
    files: Mapping[str, Listed]


@dataclass(frozen=True)
class Relation:
    """One package that another one asks for or stands for, with the versions that do: `sign` is "" for any, else <<
    <= = >= >>."""

    name: str
    sign: str = ""
    version: str = ""
    arch: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.sign} {self.version})" if self.sign else self.name

    def fits(self, version: str) -> bool:
        """Return whether a version is one of those."""
        if not self.sign:
            return True
        left, right = order(version), order(self.version)
        return {"<<": left < right, "<=": left <= right, "=": left == right, ">=": left >= right, ">>": left > right}[
            self.sign
        ]


@dataclass(frozen=True)
class Deb:
    """A package of an index: where its file is below the repository, and what it asks for and stands for, as the
    index has it."""

    name: str
    version: str
    arch: str
    path: str
    size: int
    sha256: str
    depends: str = ""
    provides: str = ""

    @property
    def wants(self) -> tuple[tuple[Relation, ...], ...]:
        """What has to be there: of each group one. Raises Trouble where the index cannot be read."""
        return tuple(tuple(_relation(word, self.name) for word in group.split("|")) for group in _split(self.depends))

    def stands_for(self, wish: Relation) -> bool:
        """Return whether this package provides what is wished; one that names no version provides none in
        particular."""
        offers = [_relation(word, self.name) for word in _split(self.provides)]
        return any(
            each.name == wish.name and (not wish.sign or (each.sign == "=" and wish.fits(each.version)))
            for each in offers
        )


def order(version: str) -> tuple[Any, ...]:
    """Return a key that sorts versions as dpkg does: epoch, upstream version, revision (Debian policy 5.6.12)."""
    epoch, colon, rest = version.partition(":")
    upstream, dash, revision = (rest if colon else version).rpartition("-")
    return (_number(epoch if colon else ""), _parts(upstream if dash else revision), _parts(revision if dash else ""))


def _parts(text: str) -> tuple[Any, ...]:
    """Alternate what is no digit and numbers; the end sorts before everything but a tilde."""
    pairs = re.findall(r"([^0-9]*)([0-9]*)", text)
    # The last pair is the empty rest; of an empty text it is the only one.
    pairs = pairs[:-1] or pairs
    return (*(part for letters, digits in pairs for part in (_letters(letters), _number(digits))), (0,))


def _letters(text: str) -> tuple[int, ...]:
    weights = (-1 if letter == "~" else ord(letter) if letter.isalpha() else ord(letter) + 256 for letter in text)
    return (*weights, 0)


def _number(digits: str) -> tuple[int, str]:
    """Return a key that sorts whole numbers of any length."""
    plain = digits.lstrip("0")
    return (len(plain), plain)


def stanzas(text: str, where: str) -> Iterator[dict[str, str]]:
    """Yield the stanzas of a file of fields, names in small letters. Raises Trouble with the line that is none, or
    is there twice."""
    made: dict[str, str] = {}
    name = ""
    # Not splitlines: descriptions hold letters that Python takes for ends of lines.
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        if not line.strip():
            if made:
                yield made
            made, name = {}, ""
        elif line[0] in " \t" and name:
            made[name] += f"\n{line.strip()}"
        elif (match := FIELD.fullmatch(line)) and match[1].lower() not in made:
            name = match[1].lower()
            made[name] = match[2].rstrip()
        else:
            raise Trouble(Problem(f"{where} line {number}", "is no field of an index, or is there twice", line[:80]))
    if made:
        yield made


def read_release(text: str, where: str) -> Release:
    """Return what a Release file says; its signature is somebody else's concern. Raises Trouble where it names no
    SHA-256."""
    fields = next(stanzas(text, where), {})
    files = {}
    for line in fields.get("sha256", "").splitlines():
        words = line.split()
        if not words:
            continue
        if len(words) != 3 or not SHA256.fullmatch(words[0]) or not _is_size(words[1]):
            raise Trouble(Problem(where, "a line of SHA256 is no hash, size and path", line[:120]))
        files[words[2].removeprefix("./")] = Listed(int(words[1]), words[0])
    if not files:
        raise Trouble(Problem(where, "has no SHA-256 of any index", wanted="SHA256:"))
    until = fields.get("valid-until", "")
    try:
        return Release(fields.get("date", ""), parsedate_to_datetime(until) if until else None, files)
    except ValueError:
        raise Trouble(Problem(where, "Valid-Until is no date", until[:80])) from None


def read_packages(text: str, where: str) -> tuple[Deb, ...]:
    """Return the packages of an index. Raises Trouble with the first one that lacks what apt needs as well."""
    return tuple(_deb(fields, where) for fields in stanzas(text, where))


def _deb(fields: Mapping[str, str], where: str) -> Deb:
    name, version, arch = (fields.get(key, "") for key in ("package", "version", "architecture"))
    path, size, sha256 = (fields.get(key, "") for key in ("filename", "size", "sha256"))
    path = path.removeprefix("./")
    if not (
        NAME.fullmatch(name) and VERSION.fullmatch(version) and arch and _is_size(size) and SHA256.fullmatch(sha256)
    ):
        wanted = "Package, Version, Architecture, Filename, Size and SHA256"
        raise Trouble(
            Problem(
                f"{where}: {name[:80] or 'a package'} {version[:80]}".rstrip(), "is not described wholly", wanted=wanted
            )
        )
    if not path.isprintable() or {"", ".", ".."}.intersection(path.split("/")):
        raise Trouble(Problem(f"{where}: {name}", "its file leads out of the repository", path[:200]))
    depends = ", ".join(filter(None, (fields.get("pre-depends", ""), fields.get("depends", ""))))
    return Deb(name, version, arch, path, int(size), sha256, depends, fields.get("provides", ""))


def _is_size(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 16


def _split(text: str) -> list[str]:
    return [word.strip() for word in text.replace("\n", " ").split(",") if word.strip()]


def _relation(text: str, name: str) -> Relation:
    match = RELATION.fullmatch(text.strip())
    if not match:
        raise Trouble(Problem(f"package {name}", "asks for what is no package", text.strip()[:120]))
    sign = match["sign"] or ""
    return Relation(match["name"], SIGNS.get(sign, sign), match["version"] or "", match["arch"] or "")


ALL = "all"
"""The architecture of packages for every machine."""


@dataclass(frozen=True)
class Pool:
    """The packages of some repositories for machines of one architecture (Debian's name: amd64)."""

    debs: tuple[Deb, ...]
    arch: str

    @cached_property
    def by_name(self) -> Mapping[str, tuple[Deb, ...]]:
        """The versions of each package, the newest first."""
        found: dict[str, list[Deb]] = {}
        for deb in self.debs:
            if deb.arch in {self.arch, ALL}:
                found.setdefault(deb.name, []).append(deb)
        return {
            name: tuple(sorted(debs, key=lambda deb: order(deb.version), reverse=True)) for name, debs in found.items()
        }

    def named(self, wish: Relation) -> Deb | None:
        """Return the newest version of a package that is wished for."""
        if wish.arch not in {"", ANY_ARCHITECTURE, self.arch}:
            return None
        return next((deb for deb in self.by_name.get(wish.name, ()) if wish.fits(deb.version)), None)

    def providers(self, wish: Relation) -> tuple[Deb, ...]:
        """Return of each other package that stands for what is wished the newest version that does."""
        if wish.arch not in {"", ANY_ARCHITECTURE, self.arch}:
            return ()
        newest = (
            next((deb for deb in debs if wish.name in deb.provides and deb.stands_for(wish)), None)
            for debs in self.by_name.values()
        )
        return tuple(deb for deb in newest if deb)


@dataclass(frozen=True)
class Closure:
    """The packages to have, in the order of their names; `elsewhere` is what has to come from other repositories, as
    it was asked for."""

    debs: tuple[Deb, ...]
    elsewhere: tuple[str, ...]
    problems: tuple[Problem, ...] = ()


class _Taking:
    """A closure in the making."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.taken: set[Deb] = set()
        self.todo: list[Deb] = []
        self.virtual: list[tuple[Deb, ...]] = []
        self.elsewhere: set[str] = set()

    def take(self, deb: Deb) -> None:
        if deb not in self.taken:
            self.taken.add(deb)
            self.todo.append(deb)

    def ask(self, group: Sequence[Relation]) -> None:
        """Take the first of alternatives that the pool has; else it has to come from elsewhere."""
        for wish in group:
            if deb := self.pool.named(wish):
                return self.take(deb)
            if providers := self.pool.providers(wish):
                return self.virtual.append(providers)
        return self.elsewhere.add(" | ".join(map(str, group)))

    def finish(self) -> None:
        """Follow what is taken until nothing new is asked for."""
        while self.todo or self.virtual:
            while self.todo:
                for group in self.todo.pop().wants:
                    self.ask(group)
            if self.virtual:
                providers = self.virtual.pop(0)
                if self.taken.isdisjoint(providers):
                    for deb in providers:
                        self.take(deb)


def close(pool: Pool, words: Iterable[str], where: str) -> Closure:
    """Return what installing `words` (NAME or NAME=VERSION, where VERSION may be a glob) takes out of `pool`.

    A name without version that the pool has not comes from elsewhere; a version that it has not is a problem, said of
    `where`. Raises Trouble where an index cannot be read.
    """
    taking, problems = _Taking(pool), []
    for word in words:
        name, equals, glob = word.partition("=")
        there = pool.by_name.get(name, ())
        found = next((deb for deb in there if not equals or fnmatchcase(deb.version, glob)), None)
        if found:
            taking.take(found)
        elif there or equals:
            versions = ", ".join(deb.version for deb in there[:5])
            problems.append(
                Problem(where, f"has no package {name} in that version", versions or "no version at all", glob)
            )
        else:
            taking.ask([Relation(name)])
    taking.finish()
    debs = sorted(taking.taken, key=lambda deb: (deb.name, order(deb.version), deb.path))
    return Closure(tuple(debs), tuple(sorted(taking.elsewhere)), tuple(problems))
