"""Files sent to a build host: sources, wheels and uv, fetched and verified on the control machine, as one
tar stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.filetree import tar_tree
from deepep_bootstrap.core.recipes import compose
from deepep_bootstrap.fetch.download import Transfer
from deepep_bootstrap.fetch.locations import Mirrors, is_address
from deepep_bootstrap.fetch.sources import fetch_source
from deepep_bootstrap.fetch.uv import cache_dir, find_uv
from deepep_bootstrap.fetch.wheels import fetch_wheels, is_cached
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.lock.model import Lock, Wheel
from deepep_bootstrap.prefix.entries import Entry
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Job, Transport


class Supply(Struct, frozen=True):
    """Files by the name they get below the build host's scratch folder; everything in it was compared with the lock."""

    files: tuple[tuple[str, Path], ...]

    def chunks(self) -> Iterator[bytes]:
        """Yield the tar stream."""
        return tar_tree(self.files)


class Environment(Struct, frozen=True):
    """A Python environment to provide on `host` (its facts beside it): the locked `wheels`, `python` the interpreter
    they are for, `user` who builds there."""

    lock: Lock
    wheels: tuple[Wheel, ...]
    mirrors: Mirrors
    recipes: Mapping[str, str]
    host: Host
    facts: Facts
    python: str
    user: str = ""


class EnvironmentSupply(Struct, frozen=True):
    """What is sent for an environment; `indexes` None: the wheels are in it, else the host gets them from there and
    uv's own. `remark` says which uv it is where that is not the locked one."""

    supply: Supply
    indexes: tuple[str, ...] | None
    remark: str = ""


def fetch_sources(lock: Lock, entries: Iterable[Entry], mirrors: Mirrors, on_line: Callable[[str], None]) -> Supply:
    """Fetch and verify the sources of `entries`; Trouble names every one that is not what the lock says."""
    files: list[tuple[str, Path]] = []
    problems: list[Problem] = []
    for name in dict.fromkeys(entry.source for entry in entries if entry.source):
        try:
            files.append((f"src/{name}", fetch_source(lock.sources[name], mirrors, cache_dir())))
            on_line(f"source {name} {lock.sources[name].rev[:12]}: hash as locked")
        except Trouble as trouble:
            problems.extend(trouble.problems)
    if problems:
        raise Trouble(*problems)
    return Supply(tuple(files))


def fetch_environment(
    transport: Transport, want: Environment, on_line: Callable[[str], None], on_transfer: Callable[[Transfer], None]
) -> EnvironmentSupply:
    """Provide uv and the wheels of a Python environment from whichever machine reaches the index.

    The build host is asked first, where it might: its network is the better one for gigabytes. What the control machine
    has already, and what a directory serves, is sent from here; `on_transfer` hears how far its downloads are. Raises
    Trouble when neither machine gets at the wheels.
    """
    program = find_uv(want.facts.machine, want.lock, want.mirrors, on_line)
    uv = Supply((("bin/uv", program.path),))
    addresses = index_addresses(want)
    asked = addresses is not None and may_ask(want, addresses)
    if asked and addresses is not None and host_reaches_index(transport, want, program.path, addresses):
        on_line(f"{want.host.name} reaches the index: it gets {len(want.wheels)} wheels itself, by hash")
        return EnvironmentSupply(uv, addresses, program.remark)
    try:
        found = fetch_wheels(want.wheels, want.mirrors, cache_dir(), on_line, on_transfer)
    except Trouble as trouble:
        if asked:
            raise Trouble(*trouble.problems, Problem(want.host.name, "does not reach the index either")) from None
        raise
    return EnvironmentSupply(
        join(Supply(tuple((f"wheels/{path.name}", path) for path in found.values())), uv), None, program.remark
    )


def index_addresses(want: Environment) -> tuple[str, ...] | None:
    """Return the addresses of the indexes a host would ask, the default one first ("" for uv's own); None where a
    directory serves one of them."""
    places = {want.mirrors.index(wheel.index) for wheel in want.wheels}
    if any(place and not is_address(place) for place in places):
        return None
    default = "" if "" in places else min(places, default="")
    return (default, *sorted(places - {default}))


def may_ask(want: Environment, addresses: Sequence[str]) -> bool:
    """Return whether asking the build host makes sense: another machine, a way out of its network, something to get."""
    away = want.host.connection != "local" and (want.facts.default_route or any(addresses))
    return away and not all(is_cached(wheel, cache_dir()) for wheel in want.wheels)


def host_reaches_index(transport: Transport, want: Environment, uv: Path, addresses: Sequence[str]) -> bool:
    """Return whether the build host can resolve the smallest of the wheels on its own."""
    wheel = min(want.wheels, key=lambda wheel: wheel.size)
    env = {"REQUIREMENT": f"{wheel.name}=={wheel.version}", "INDEXES": "\n".join(addresses), "PYTHON": want.python}
    script = compose(want.recipes, "lib.sh", "build/common.sh", "prefix/probe-index.sh")
    reply = transport.send(want.host, Job(script, env=env, user=want.user, timeout=120), _content(uv))
    return reply.code == 0 and "index=yes" in reply.out.split()


def _content(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            yield block


def join(*supplies: Supply) -> Supply:
    """Return one supply with the files of all."""
    return Supply(tuple(file for supply in supplies for file in supply.files))
