"""Where things are fetched from instead: URL prefixes and indexes replaced by other addresses or by directories. Pure but for looks
at whether a directory is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from deepep_bootstrap.errors import Problem, Trouble

VARIABLE = "DEEPEP_MIRRORS"
EVERY = "*"
HELP = "--mirror PREFIX=URL_OR_DIRECTORY, --mirror index:NAME=URL_OR_DIRECTORY or --mirror DIRECTORY"


@dataclass(frozen=True)
class Level:
    """The mirrors of one origin, such as the command line: replacements by URL prefix, and by index name (`*`: every index)."""

    prefixes: Mapping[str, str] = field(default_factory=dict)
    indexes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Mirrors:
    """All mirrors, the strongest level first: command line, environment, lock. A replacement is an address or an absolute directory."""

    levels: tuple[Level, ...] = ()

    def source(self, url: str) -> str:
        """Return where the git repository of `url` is fetched from: an address, or the directory of a (bare) repository.

        The first level with a matching prefix decides, in it the longest one. Below a directory the rest of the URL is the path,
        with or without `.git`. Raises Trouble when the directory has no such repository.
        """
        replaced = self._replaced(url)
        return _below(*replaced, url) if replaced else url

    def file(self, url: str) -> str:
        """Return where the file at `url` is fetched from: an address, or a path below a directory. Raises Trouble where it is not."""
        place, rest = self._replaced(url) or (url, "")
        if is_address(place):
            return place + rest
        path = Path(place, rest.strip("/"))
        if ".." in path.parts or not path.is_file():
            raise Trouble(Problem(f"mirror {place}", f"has no file for {url}", wanted=str(path), try_=f"fetching {url} to that place"))
        return str(path)

    def _replaced(self, url: str) -> tuple[str, str] | None:
        """Return the replacement for the longest matching prefix of `url` and the rest of the URL behind it; None where none matches."""
        for level in self.levels:
            matching = [prefix for prefix in level.prefixes if url.startswith(prefix)]
            if matching:
                prefix = max(matching, key=len)
                return level.prefixes[prefix], url[len(prefix) :]
        return None

    def index(self, name: str) -> str:
        """Return the address or the directory that serves the index `name`; "" when nothing names one."""
        for level in self.levels:
            for key in (name, EVERY):
                if key in level.indexes:
                    return level.indexes[key]
        return ""


def is_address(place: str) -> bool:
    """Return whether a replacement is an address; otherwise it is a directory."""
    return re.match(r"[a-z][a-z0-9+.-]*://", place) is not None


def shown(place: str) -> str:
    """Return a replacement for a message: without user and password."""
    return re.sub(r"^([a-z][a-z0-9+.-]*://)[^/]*@", r"\1", place)


def read(flags: Iterable[str], environment: Mapping[str, str], lock_indexes: Mapping[str, str]) -> Mirrors:
    """Return the mirrors of the `--mirror` values, of the lines of DEEPEP_MIRRORS in `environment`, and of the lock's indexes.

    Raises Trouble with every value that is no mirror or names a directory that is not there.
    """
    problems: list[Problem] = []
    lines = [line.strip() for line in environment.get(VARIABLE, "").splitlines()]
    levels = (
        _level("--mirror", flags, problems),
        _level(VARIABLE, [line for line in lines if line and not line.startswith("#")], problems),
        Level({}, {name: _place(address) for name, address in lock_indexes.items()}),
    )
    if problems:
        raise Trouble(*problems)
    return Mirrors(levels)


def _level(origin: str, values: Iterable[str], problems: list[Problem]) -> Level:
    prefixes: dict[str, str] = {}
    indexes: dict[str, str] = {}
    for value in values:
        key, equals, text = value.partition("=") if value.startswith("index:") else value.rpartition("=")
        where = f"{origin} {key}={shown(text)}" if equals else f"{origin} {value}"
        place = _place(text)
        if not equals:
            problems += _written(where, place, prefixes, indexes)
        elif not key or not text or key == "index:":
            problems.append(Problem(where, "is no mirror", try_=HELP))
        elif not is_address(place) and not Path(place).is_dir():
            problems.append(Problem(where, "there is no such directory", found=place))
        elif key.startswith("index:"):
            indexes.setdefault(key[len("index:") :], place)
        else:
            prefixes.setdefault(key, place)
    return Level(prefixes, indexes)


def _written(where: str, place: str, prefixes: dict[str, str], indexes: dict[str, str]) -> list[Problem]:
    """Take a directory of `invoke mirror`: git/HOST/OWNER/NAME.git serves every source, wheels/FILE every index."""
    git, wheels = Path(place, "git"), Path(place, "wheels")
    if is_address(place) or not (git.is_dir() and wheels.is_dir()):
        return [Problem(where, "is no mirror: a plain directory has to hold git/ and wheels/", try_=HELP)]
    prefixes.setdefault("https://", str(git))
    indexes.setdefault(EVERY, str(wheels))
    return []


def _place(text: str) -> str:
    if text.startswith("file://"):
        return unquote(urlsplit(text).path)
    return text if is_address(text) else str(Path(text).expanduser().absolute())


def _below(place: str, rest: str, url: str) -> str:
    if is_address(place):
        return place + rest
    path = rest.strip("/").removesuffix(".git")
    candidates = [Path(place, path), Path(place, f"{path}.git")] if path and ".." not in path.split("/") else []
    for candidate in candidates:
        if candidate.is_dir():
            return str(candidate)
    wanted = " or ".join(map(str, candidates)) or "a path below it"
    raise Trouble(Problem(f"mirror {place}", f"has no repository for {url}", wanted=wanted, try_=f"git clone --mirror {url} there"))
