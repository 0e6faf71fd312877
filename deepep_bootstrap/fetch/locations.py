"""Mirrors: URL prefixes and indexes replaced by other addresses or by directories, and the paths of a
written mirror.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import SplitResult, quote, unquote, urlsplit

from msgspec import Struct, field
from packaging.utils import canonicalize_name

from deepep_bootstrap.core.errors import Problem, Trouble

VARIABLE = "DEEPEP_MIRRORS"
HELP = "--mirror PREFIX=URL_OR_DIRECTORY, --mirror index:NAME=URL_OR_DIRECTORY or --mirror DIRECTORY_OR_URL"
INDEX = "mirror.json"
"""The file that `invoke mirror` writes last; a directory without it is no mirror, or one that was not finished."""
REMEDY = "invoke mirror DIRECTORY, on a machine with a network"
GIT, FILES, WHEELS, PACKAGES = "git", "files", "wheels", "packages"
SCP_LIKE = re.compile(r"(?:[^/@:]+@)?([^/@:]+):([^/].*)")
"""What git takes for an address over ssh besides URLs: `git@host:owner/name`."""
HOST_PATH = re.compile(r"/[A-Za-z0-9/._+:@,=~-]*")
"""A path that apt, dnf and cp read alike where it stands in a file:// address."""
NO_STEP = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]")
"""What no part of a path in a mirror holds; half a character (JSON and TOML can spell it) has no bytes."""


class Level(Struct, frozen=True):
    """The mirrors of one origin, such as the command line: replacements by URL prefix and by index name. `written`
    is the directory or address of what `invoke mirror` wrote, which answers for everything that neither of them
    names; "" where there is none."""

    prefixes: Mapping[str, str] = field(default_factory=dict)
    indexes: Mapping[str, str] = field(default_factory=dict)
    written: str = ""


class Mirrors(Struct, frozen=True):
    """All mirrors, the strongest level first: command line, environment, lock. A replacement is an address or an
    absolute directory."""

    levels: tuple[Level, ...] = ()

    def source(self, url: str) -> str:
        """Return where the git repository of `url` is fetched from: an address, or the directory of a (bare)
        repository.

        The first level with a matching prefix or a written mirror decides, in it the longest prefix. Below a directory
        the rest of the URL is the path, with or without `.git`. Raises Trouble when the directory has no such
        repository.
        """
        replaced = self._replaced(url)
        if isinstance(replaced, str):
            return _inside(replaced, url)
        return _below(*replaced, url) if replaced else url

    def packages(self, url: str) -> str:
        """Return from where hosts get the package repository, or the key of one, that the lock has at `url`: an address
        of http, https or file.

        The first level with a matching prefix decides, in it the longest prefix; a written mirror has no packages.
        Whether a host sees a directory, it says itself. Raises Trouble for a directory whose path does not go into an
        address.
        """
        replaced = next(filter(None, (_by_prefix(level, url) for level in self.levels)), None)
        if replaced is None:
            return url
        place, rest = replaced
        return place + rest if is_address(place) else _for_hosts(f"{place.rstrip('/')}/{rest.strip('/')}".rstrip("/"))

    def _replaced(self, url: str) -> tuple[str, str] | str | None:
        """Return the replacement for the longest matching prefix of `url` and the rest of the URL behind it; the
        place of a written mirror; None where nothing answers for `url`."""
        for level in self.levels:
            if replaced := _by_prefix(level, url):
                return replaced
            if level.written:
                return level.written
        return None

    def index(self, name: str) -> str:
        """Return the address or the directory that serves the index `name`; "" when nothing names one."""
        for level in self.levels:
            if name in level.indexes:
                return level.indexes[name]
            if level.written:
                return f"{level.written}/{WHEELS}/{name}"
        return ""

    def is_written(self, name: str) -> bool:
        """Return whether what `invoke mirror` wrote serves the index `name`."""
        deciding = next((level for level in self.levels if name in level.indexes or level.written), Level())
        return name not in deciding.indexes and bool(deciding.written)


def _by_prefix(level: Level, url: str) -> tuple[str, str] | None:
    """Return the replacement for the longest prefix of `url` that a level names, and the rest of the URL; None where
    it names none."""
    matching = [prefix for prefix in level.prefixes if url.startswith(prefix)]
    if not matching:
        return None
    prefix = max(matching, key=len)
    return level.prefixes[prefix], url[len(prefix) :]


def repository_path(url: str) -> str:
    """Return where a written mirror keeps the git repository of `url`: git/HOST/OWNER/NAME.git. Raises Trouble for
    an address that leads out of it."""
    return f"{GIT}/{_local(url).removesuffix('.git')}.git"


def wheel_path(index: str, name: str, file: str) -> str:
    """Return where a written mirror keeps a wheel: wheels/INDEX/NAME/FILE, which behind any web server is an index
    for pip and uv."""
    return f"{WHEELS}/{index}/{canonicalize_name(name)}/{file}"


def _local(url: str) -> str:
    """Return host and path of an address as a relative path; anything but http and https is told apart by its
    scheme."""
    scp_like = None if is_address(url) else SCP_LIKE.fullmatch(url)
    parts = _split(f"ssh://{scp_like[1]}/{scp_like[2]}" if scp_like else url)
    host = parts.netloc.rpartition("@")[2].lower()
    top = host if parts.scheme in {"https", "http"} else f"{parts.scheme}+{host}"
    steps = [top, *(step for step in unquote(parts.path).split("/") if step)]
    if parts.query:
        steps[-1] += f"?{quote(parts.query, safe='=&', errors='replace')}"
    if not parts.scheme or len(steps) == 1 or any(step in {".", ".."} or NO_STEP.search(step) for step in steps):
        raise Trouble(
            Problem(shown(url), "has no place in a mirror", wanted="an address such as https://host/owner/name")
        )
    return "/".join(steps)


def _split(url: str) -> SplitResult:
    """Return the parts of an address; none where it is no address, such as one whose host begins with a bracket and
    never closes it."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


def _for_hosts(path: str) -> str:
    """Return the address of a directory as apt and dnf take it, each in its own way to escape; so nothing may need
    that."""
    if not HOST_PATH.fullmatch(path):
        raise Trouble(
            Problem(
                f"mirror {path}",
                "package managers do not take this path",
                wanted="no blanks, % or special letters in it",
                try_="another directory, or the http:// address of a web server with it",
            )
        )
    return f"file://{path}"


def _inside(root: str, url: str) -> str:
    """Return the place of the repository of `url` in the written mirror at `root`; a directory is asked whether it has
    it, a server when it is used."""
    path = repository_path(url)
    if is_address(root):
        return f"{root}/{quote(path)}"
    place = Path(root, path)
    if not place.is_dir():
        raise Trouble(
            Problem(f"mirror {root}", f"has no repository for {url}", wanted=str(place), try_=_complaint(root))
        )
    if place.resolve() != Path(root).resolve() / path:
        raise Trouble(
            Problem(
                f"mirror {root}",
                f"a symbolic link leads to another repository for {url}",
                str(place.resolve()),
                str(place),
                _complaint(root),
            )
        )
    return str(place)


def remedy(place: str, otherwise: str) -> str:
    """Return what helps where `place` lacks something: where it is inside of a written mirror a look at that, else
    `otherwise`."""
    parents = [] if is_address(place) else Path(place).parents
    return next((_complaint(str(folder)) for folder in parents if os.path.isfile(folder / INDEX)), otherwise)


def _complaint(root: str) -> str:
    return f"invoke mirror {root} --check, which names all that it lacks"


def is_address(place: str) -> bool:
    """Return whether a replacement is an address; otherwise it is a directory."""
    return re.match(r"[a-z][a-z0-9+.-]*://", place) is not None


def shown(place: str) -> str:
    """Return a replacement for a message: without user and password."""
    return re.sub(r"^([a-z][a-z0-9+.-]*://)[^/]*@", r"\1", place)


def read_mirrors(flags: Iterable[str], environment: Mapping[str, str], lock_indexes: Mapping[str, str]) -> Mirrors:
    """Return the mirrors of the `--mirror` values, of the words of DEEPEP_MIRRORS in `environment`, and of the lock's
    indexes. In the variable a line that begins with # is a comment.

    Raises Trouble with every value that is no mirror or names a directory that is not there.
    """
    problems: list[Problem] = []
    lines = [line.strip() for line in environment.get(VARIABLE, "").splitlines()]
    words = [word for line in lines if not line.startswith("#") for word in line.split()]
    levels = (
        _level("--mirror", flags, problems),
        _level(VARIABLE, words, problems),
        Level({}, {name: _place(address) for name, address in lock_indexes.items()}),
    )
    if problems:
        raise Trouble(*problems)
    return Mirrors(levels)


def _level(origin: str, values: Iterable[str], problems: list[Problem]) -> Level:
    prefixes: dict[str, str] = {}
    indexes: dict[str, str] = {}
    written = ""
    for value in values:
        key, equals, text = value.partition("=") if value.startswith("index:") else value.rpartition("=")
        where = f"{origin} {key}={shown(text)}" if equals else f"{origin} {shown(value)}"
        place = _place(text)
        if not equals:
            problems += _not_written(where, place)
            written = written or place.rstrip("/")
        elif not key or not text or key == "index:":
            problems.append(Problem(where, "is no mirror", try_=HELP))
        elif not is_address(place) and not os.path.isdir(place):
            problems.append(Problem(where, "there is no such directory", found=place))
        elif key.startswith("index:"):
            indexes.setdefault(key[len("index:") :], place)
        else:
            prefixes.setdefault(key, place)
    return Level(prefixes, indexes, written)


def _not_written(where: str, place: str) -> list[Problem]:
    """Return why what a value without "=" names was not written by `invoke mirror`; an address is believed, its
    content is verified."""
    if place.startswith(("http://", "https://")) or os.path.isfile(Path(place, INDEX)):
        return []
    if is_address(place):
        return [Problem(where, "is no address of a mirror", wanted="http:// or https://", try_=HELP)]
    if os.path.isdir(Path(place, GIT)) or os.path.isdir(Path(place, WHEELS)):
        return [Problem(where, f"is a mirror that was not finished: it has no {INDEX}", try_=REMEDY)]
    return [Problem(where, "is no mirror: a plain directory has to be one that invoke mirror wrote", try_=HELP)]


def _place(text: str) -> str:
    if text.startswith("file://"):
        return unquote(_split(text).path)
    return text if is_address(text) else str(Path(os.path.expanduser(text)).absolute())


def _below(place: str, rest: str, url: str) -> str:
    if is_address(place):
        return place + rest
    path = rest.strip("/").removesuffix(".git")
    candidates = [Path(place, path), Path(place, f"{path}.git")] if path and ".." not in path.split("/") else []
    for candidate in candidates:
        if os.path.isdir(candidate):
            return str(candidate)
    wanted = " or ".join(map(str, candidates)) or "a path below it"
    raise Trouble(
        Problem(
            f"mirror {place}", f"has no repository for {url}", wanted=wanted, try_=f"git clone --mirror {url} there"
        )
    )
