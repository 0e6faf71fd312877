"""Flags that were not given, from elsewhere: the environment, a deepep.toml, and the lock from where it lies; and what
of them a person should know.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from deepep_bootstrap.core import toml
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.fetch import locations
from deepep_bootstrap.inventory.hostsfile import check_prefix

FILE = "deepep.toml"
LOCK = "deepep.lock.toml"
VARIABLES = {"hosts": "DEEPEP_HOSTS", "lock": "DEEPEP_LOCK", "prefix": "DEEPEP_PREFIX"}
WRITABLE_BY_OTHERS = 0o002
STATED_PREFIX = re.compile(r"(?m)^[^#\n]*\bprefix=(\S+)")
"""`prefix=` in a hosts file, outside a comment."""


class Settled(Struct, frozen=True):
    """The values of a verb's flags, and a line for each that comes from somewhere else than the command line."""

    values: Mapping[str, Any]
    notes: tuple[str, ...] = ()


class Settings(Struct, frozen=True):
    """The keys of one deepep.toml; "" and () for those that it has not."""

    path: Path
    hosts: str = ""
    lock: str = ""
    prefix: str = ""
    mirror: tuple[str, ...] = ()


def settle(given: Mapping[str, Any], root: Path, environment: Mapping[str, str]) -> Settled:
    """Return the flags `given` to a verb, and of those that it knows and that were not given the environment's, else
    those of the deepep.toml beside the hosts file, else of the one in ~/.config/deepep-bootstrap. A lock that nobody
    names is ./deepep.lock.toml, else that of `root`, which stays unnamed.

    The prefix of a hosts file counts before the environment's, which every user of our module has, and before that of
    a deepep.toml. Trouble for a file with unknown keys, and for one that somebody else may have written."""
    if given.keys().isdisjoint(("hosts", "lock")):
        return Settled(given)
    of_user = read(config_folder(environment) / FILE)
    found = Found(given, (of_user,) if of_user else (), environment)
    hosts = found.elsewhere("hosts")
    hosts_file = file_of(hosts.value if hosts else given.get("hosts", ""))
    if hosts_file and (beside := read(hosts_file.parent / FILE)):
        found = Found(given, (beside, *found.files), environment)
    taken = [hosts, found.elsewhere("lock") or found.lock(root), found.prefix(hosts_file), found.mirrors()]
    values = {each.key: each.value for each in taken if each and each.value}
    return Settled({**given, **values}, tuple(each.note for each in taken if each))


class Taken(Struct, frozen=True):
    """The value of a flag that was not given, and what a person should know of it; a value of "" is none to take."""

    key: str
    value: Any
    note: str


class Found(Struct, frozen=True):
    """Where flags are found: the command line, files of settings (the nearest first), the environment."""

    given: Mapping[str, Any]
    files: tuple[Settings, ...]
    environment: Mapping[str, str]

    def wants(self, key: str) -> bool:
        """Whether the verb knows a flag and nobody gave it."""
        return key in self.given and not self.given[key]

    def elsewhere(self, key: str) -> Taken | None:
        """Return the value of a key that the environment has, else the nearest file."""
        if not self.wants(key):
            return None
        variable = VARIABLES[key]
        if value := self.environment.get(variable, ""):
            return Taken(key, value, f"{key}: {value} ({variable})")
        file = next((each for each in self.files if getattr(each, key)), None)
        return Taken(key, getattr(file, key), f"{key}: {getattr(file, key)} ({file.path})") if file else None

    def prefix(self, hosts_file: Path | None) -> Taken | None:
        """Return the prefix, where the hosts file states none; else no more than that another one does not count."""
        taken = self.elsewhere("prefix")
        if taken is None:
            return None
        check_prefix(taken.value, taken.note.rpartition("(")[2].rstrip(")"))
        if not (stated := stated_prefix(hosts_file)):
            return taken
        if stated == taken.value:
            return None
        other = taken.note.removeprefix("prefix: ")
        return Taken("prefix", "", f"prefix: {stated} ({hosts_file}), not {other}: that is for hosts that state none")

    def mirrors(self) -> Taken | None:
        """Return the mirrors of the nearest file beside those of the command line, where the environment has none."""
        file = next((each for each in self.files if each.mirror), None)
        if "mirror" not in self.given or self.environment.get(locations.VARIABLE) or file is None:
            return None
        note = f"mirror: {', '.join(file.mirror)} ({file.path})"
        return Taken("mirror", (*(self.given["mirror"] or ()), *file.mirror), note)

    def lock(self, root: Path) -> Taken | None:
        """Return the lock of the current directory; that of `root` stays unnamed, and is told where it is the packaged
        one."""
        if not self.wants("lock"):
            return None
        here, own = Path(LOCK).absolute(), root / LOCK
        if here.is_file() and not (own.is_file() and here.samefile(own)):
            refuse_foreign(here, "--lock=./deepep.lock.toml takes it all the same")
            return Taken("lock", str(here), f"lock: {here} (of this directory)")
        if (root / "tasks.py").is_file():
            return None
        return Taken("lock", "", f"lock: {own} (packaged; no --lock, DEEPEP_LOCK, {FILE} or ./{LOCK} names another)")


def config_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of the user's own settings (XDG base directory specification)."""
    base = environment.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(base) / "deepep-bootstrap"


def file_of(hosts: str) -> Path | None:
    """Return the hosts file that --hosts names, None where that is a node set or nothing."""
    path = Path(os.path.expanduser(hosts)).absolute()
    return path if hosts and path.is_file() else None


def stated_prefix(hosts_file: Path | None) -> str:
    """Return the prefix that a hosts file states, "" for none."""
    try:
        text = hosts_file.read_text(encoding="utf-8") if hosts_file else ""
    except (OSError, UnicodeDecodeError):
        return ""  # who reads the hosts says what is wrong with the file
    found = STATED_PREFIX.search(text)
    return found[1].strip("\"'") if found else ""


def read(path: Path) -> Settings | None:
    """Return the settings of a deepep.toml, None where there is none. Relative paths are meant from its folder."""
    if not path.is_file():
        return None
    refuse_foreign(path, f"chown root {path}, or another folder for the hosts file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise Trouble(Problem(str(path), f"cannot be read: {why}")) from None
    problems: list[Problem] = []
    table = toml.Table(toml.load_toml(text, str(path)), str(path), problems)
    hosts, lock, prefix = (table.take(key, str, "") for key in ("hosts", "lock", "prefix"))
    mirror = table.words("mirror", toml.SOME)
    table.close()
    if problems:
        raise Trouble(*(_with_line(each, str(path), text) for each in problems))
    if prefix:
        check_prefix(prefix, f"{path}: prefix")
    for value in mirror:
        place = value.rpartition("=")[2]
        if not (locations.is_address(place) or place.startswith(("/", "~"))):
            raise Trouble(Problem(f"{path}: mirror", "is no address and no absolute directory", value))
    return Settings(path, _from(path.parent, hosts, is_hosts=True), _from(path.parent, lock), prefix, mirror)


def _from(folder: Path, value: str, *, is_hosts: bool = False) -> str:
    """Return a path of a file in `folder` as seen from here; a node set as it is."""
    path = folder / os.path.expanduser(value)
    return value if not value or (is_hosts and "/" not in value and not path.is_file()) else str(path)


def _with_line(problem: Problem, path: str, text: str) -> Problem:
    """Return a problem with a key that names the key's line too."""
    key = problem.where.rpartition(": ")[2]
    for number, line in enumerate(text.splitlines(), 1):
        if line.split("=")[0].strip(" \t\"'[]") == key:
            return Problem(f"{path}:{number}: {key}", problem.what, problem.found, problem.wanted, problem.try_)
    return problem


def refuse_foreign(path: Path, remedy: str) -> None:
    """Raise Trouble where somebody else wrote a file that nobody named, or may write it: it decides what is built and
    run as root."""
    status = path.stat()
    ours = {0, os.geteuid(), int(os.environ.get("SUDO_UID") or 0)}
    if status.st_uid not in ours:
        found = f"user {status.st_uid}"
        raise Trouble(Problem(str(path), "belongs to somebody else", found, "you or root", remedy))
    if status.st_mode & WRITABLE_BY_OTHERS:
        raise Trouble(Problem(str(path), "may be written by everybody", try_=f"chmod o-w {path}"))
