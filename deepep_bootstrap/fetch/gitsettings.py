"""Of git's settings on this machine the few that say how to reach a server; and whether this git can do without the others."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from deepep_bootstrap.core import process
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.fetch.locations import is_address, shown

OLDEST = (2, 32)
"""Since this version git knows GIT_CONFIG_GLOBAL, by which it gets our settings in place of the user's."""
NETWORK = re.compile(r"http\.(?:(.+)\.)?(proxy|proxyauthmethod|proxysslcainfo|sslcainfo|sslcapath|sslcert|sslkey)")
"""Settings for the network as `git config --list` prints their names: for all servers, or `http.ADDRESS.NAME` for some."""


@dataclass(frozen=True)
class Setting:
    """One setting `http.NAME`; `address` is the beginning of the addresses it is for, "" for all."""

    address: str
    name: str
    value: str

    def __str__(self) -> str:
        value = shown(self.value) if is_address(self.value) else self.value.rpartition("@")[2]
        return f"http.{self.address}{'.' if self.address else ''}{self.name} {value}"


def check_version() -> None:
    """Raise Trouble where git is missing or too old to be kept from settings that change what is fetched."""
    # Without settings: ones that cannot be read make even this fail.
    said = process.run(("git", "--version"), env=os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}).out
    version = re.search(r"(\d+)\.(\d+)\S*", said)
    if version is None or (int(version[1]), int(version[2])) < OLDEST:
        found, wanted = version[0] if version else said.strip(), f"{OLDEST[0]}.{OLDEST[1]} or newer"
        raise Trouble(Problem("git", "is too old to fetch sources with", found, wanted, "a newer one first in PATH"))


def network_settings(folder: Path) -> tuple[Setting, ...]:
    """Return the proxies and certificates in git's settings of this user and this machine, the strongest last; none where git cannot read
    them. `folder` is one that belongs to no repository."""
    own = {key: value for key, value in os.environ.items() if key not in {"GIT_DIR", "GIT_WORK_TREE", "GIT_CONFIG"}}
    listed = process.run(("git", "config", "--null", "--list"), env=own | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}, cwd=folder)
    pairs = [item.partition("\n")[::2] for item in listed.out.split("\0")] if listed.code == 0 else []
    found = [(NETWORK.fullmatch(name), value) for name, value in pairs if "\n" not in value]
    return tuple(Setting(match[1] or "", match[2], value) for match, value in found if match)


def text_of(settings: Iterable[Setting]) -> str:
    """Return settings as a part of a configuration file."""
    return "".join(f"[http{each.address and f' {_quoted(each.address)}'}]\n\t{each.name} = {_quoted(each.value)}\n" for each in settings)


def on_the_way(settings: Iterable[Setting], place: str) -> str:
    """Return for a message which settings had a say in reaching `place`; "" for none."""
    used = [str(each) for each in settings if place.startswith(("http://", "https://")) and place.startswith(each.address)]
    return f"git's settings {', '.join(used)}" if used else ""


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
