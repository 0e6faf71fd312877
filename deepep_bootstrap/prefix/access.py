"""The prefix reached for commands that work on it alone: through one of the hosts, or on this machine; and the paths
that somebody may change who must not (docs/decisions/034).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgspec import Struct

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.recipes import compose
from deepep_bootstrap.inventory import forms, seen
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.hostsfile import Inventory, Settings
from deepep_bootstrap.inventory.survey import open_connections, read_inventory, read_tree
from deepep_bootstrap.prefix import history
from deepep_bootstrap.prefix.contents import Holdings
from deepep_bootstrap.prefix.generations import TRUST, PrefixHandle, read_answer
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Job, Transport

if TYPE_CHECKING:
    from deepep_bootstrap.remote.fleet import ConnectionPool

HERE = Host("localhost", connection="local")
"""This machine, where only --prefix is given."""
HERE_ALONE = Inventory("--prefix", (HERE,), Settings())
NOTHING = Holdings(0, (), {})
WANTED = "owned by root or the build user, and written by nobody else"


class Reached(Struct, frozen=True):
    """A prefix that answered: the transport, the place, what the prefix holds, and the hosts that were named (this
    machine, where none were). `problems` are hosts that did not answer before it."""

    transport: ConnectionPool
    place: PrefixHandle
    holdings: Holdings
    inventory: Inventory = HERE_ALONE
    problems: tuple[Problem, ...] = ()


@contextmanager
def reach(flags: Flags, *, locks: bool = False, metadata: bool = False, empty: bool = False) -> Iterator[Reached]:
    """Yield the prefix that the flags mean, looked at just now (with `locks`, the locks of its generations too; with
    `metadata`, what the wheels in its entries say of themselves). With `empty` there may be no prefix yet, and nobody
    looks.

    With --hosts it is reached through prefix_host, else build_host, else the first host that answers; with --prefix
    alone on this machine. Trouble where neither is given, where no host answers, and where there is no prefix.
    """
    inventory, prefix = _inventory(flags)
    recipes = read_tree(flags.root / "recipes")
    with open_connections(flags, inventory) as transport:
        problems: list[Problem] = []
        for host in candidates(inventory):
            place = PrefixHandle(host, prefix, recipes, inventory.settings.build_user)
            if (trouble := _unreachable(transport, host)) is None:
                holdings = NOTHING if empty else history.read_contents(transport, place, locks=locks, metadata=metadata)
                if not empty:
                    seen.keep(seen.GENERATIONS, prefix, (str(each.number) for each in holdings.generations))
                yield Reached(transport, place, holdings, inventory, tuple(problems))
                return
            problems.extend(trouble.problems)
    raise Trouble(*problems)


def _inventory(flags: Flags) -> tuple[Inventory, str]:
    if flags.hosts:
        return read_inventory(flags)
    if not flags.prefix:
        remedy = "--hosts=hosts/b200.txt, or --prefix=/shared/deepep on a machine that sees it"
        raise Trouble(
            Problem("--prefix", "no prefix named", wanted="--hosts, or --prefix for this machine", try_=remedy)
        )
    return Inventory("--prefix", (HERE,), Settings(prefix=flags.prefix)), flags.prefix


def candidates(inventory: Inventory) -> Sequence[Host]:
    """Return the hosts through which the prefix may be reached, in order: the named one alone, else all, GPU hosts
    first."""
    named = inventory.settings.prefix_host or inventory.settings.build_host
    if named:
        return [host for host in inventory.hosts if host.name == named]
    return sorted(inventory.hosts, key=lambda host: host.role != "gpu")


def _unreachable(transport: Transport, host: Host) -> Trouble | None:
    """Return why a host cannot be talked to; None where it answers. It is asked as many are, so that a person hears
    whom we wait for."""
    reply = transport.run_all([host], lambda each: Job("true"))[host.name]
    return reply if isinstance(reply, Trouble) else None


class UnsafePath(Struct, frozen=True):
    """A path that somebody else may change: what is wrong with it, and the command that mends it."""

    path: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.path} {self.what}"


def find_unsafe(transport: Transport, place: PrefixHandle) -> tuple[UnsafePath, ...]:
    """Return what somebody else could change of the prefix, the first few paths of many; a look that changes
    nothing."""
    job = Job(compose(place.recipes, *TRUST), env={"PREFIX": place.prefix, "OWNER": place.user})
    answer = read_answer(transport.run(place.host, job), place, "unsafe.sh", forms.UNSAFE)
    return tuple(UnsafePath(*row) for row in answer.rows("unsafe"))


def unsafe_problems(place: PrefixHandle, unsafe: tuple[UnsafePath, ...]) -> tuple[Problem, ...]:
    """Return what to say of each of these paths."""
    return tuple(Problem(f"{place.host.name} {each.path}", each.what, wanted=WANTED, try_=each.fix) for each in unsafe)


def refuse_unsafe(transport: Transport, place: PrefixHandle) -> None:
    """Raise Trouble where somebody else could change what users of the prefix load, root among them."""
    if problems := unsafe_problems(place, find_unsafe(transport, place)):
        raise Trouble(*problems)
