"""Garbage of a prefix: generations and entries that nobody needs, and processes on the hosts that use some
of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct, field

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.recipes import compose
from deepep_bootstrap.core.records import RecordForm, Records, read_records
from deepep_bootstrap.inventory.forms import PROCESSES, QUEUE
from deepep_bootstrap.prefix.contents import ENTRY_NAME, Holdings, StoreEntry
from deepep_bootstrap.prefix.generations import PrefixHandle
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Job, Reply, Transport

RECIPE = ("lib.sh", "prefix/held.sh")
LOOK_LIMIT = 120.0
"""Seconds for the look: a busy host has thousands of processes with thousands of mappings each."""


class Holders(Struct, frozen=True):
    """Who uses store entries and generations. `by` says it by name (an entry's, or `generations/NUMBER`), `waiting`
    are jobs in Slurm's queue ("4711 of alice"), `partly` are hosts where only our own processes could be looked at,
    `unasked` why a host could not be."""

    by: Mapping[str, str] = field(default_factory=dict)
    waiting: tuple[str, ...] = ()
    partly: tuple[str, ...] = ()
    unasked: tuple[Problem, ...] = ()


def find_holders(transport: Transport, place: PrefixHandle, hosts: Sequence[Host], names: Iterable[str]) -> Holders:
    """Return who uses `names` (entries, and `generations/NUMBER`) on `hosts`: as root, since a job is anybody's,
    else as far as we see."""
    wanted = "\n".join(name if "/" in name else f"store/{name}" for name in names)
    replies = _ask(transport, place, hosts, wanted)
    by: dict[str, str] = {}
    partly, queues = list[str](), list[Host]()
    unasked: list[Problem] = []
    for host in hosts:
        try:
            records = _read(replies[host.name], PROCESSES, host.name)
        except Trouble as trouble:
            unasked.extend(trouble.problems)
            continue
        for name, pid, program, user in records.rows("held"):
            by.setdefault(name.removeprefix("store/"), f"{program} of {user}, pid {pid} on {host.name}")
        partly.extend([host.name] if records.text("sees") != "all" else [])
        queues.extend([host] if records.text("squeue") == "yes" else [])
    waiting = _queue(transport, place, queues[0], wanted) if queues else ()
    return Holders(by, waiting, tuple(partly), tuple(unasked))


def _ask(transport: Transport, place: PrefixHandle, hosts: Sequence[Host], wanted: str) -> dict[str, Reply | Trouble]:
    jobs = {user: _job(place, "processes", wanted, user=user) for user in ("root", "")}
    replies = transport.run_all(hosts, lambda _: jobs["root"])
    again = [host for host in hosts if isinstance(replies[host.name], Trouble)]
    return {**replies, **(transport.run_all(again, lambda _: jobs[""]) if again else {})}


def _queue(transport: Transport, place: PrefixHandle, host: Host, wanted: str) -> tuple[str, ...]:
    """Return the jobs that wait; none where Slurm does not answer: nothing of it could be kept on their account
    anyway."""
    try:
        records = _read(transport.run(host, _job(place, "queue", wanted)), QUEUE, host.name)
    except Trouble:
        return ()
    return tuple(f"{job} of {user}" for job, user in records.rows("job"))


def _job(place: PrefixHandle, what: str, wanted: str, *, user: str = "") -> Job:
    env = {"PREFIX": place.prefix, "NAMES": wanted}
    return Job(compose(place.recipes, *RECIPE), args=(what,), env=env, user=user, watched=True, timeout=LOOK_LIMIT)


def _read(reply: Reply | Trouble, form: RecordForm, host: str) -> Records:
    if isinstance(reply, Trouble):
        raise reply
    if reply.code:
        raise Trouble(Problem(host, "its processes cannot be looked at", reply.said[-400:]))
    return read_records(reply.out, form, host, "held.sh")


def remarks(holders: Holders) -> tuple[str, ...]:
    """Return what could not be seen, each a sentence."""
    lines = (
        [f"{fold(holders.partly)}: only processes of our own account can be seen there, root sees all"]
        if holders.partly
        else []
    )
    return (*lines, *(f"{problem.where}: its processes could not be looked at" for problem in holders.unasked))


class Garbage(Struct, frozen=True):
    """What may go: numbers of generations, entries, and entries that no generation needs but a running build or
    process (`busy`)."""

    generations: tuple[int, ...]
    entries: tuple[StoreEntry, ...]
    busy: tuple[StoreEntry, ...] = ()


def choose_garbage(holdings: Holdings, keep: int, held: Collection[str] = ()) -> Garbage:
    """Return what nobody needs when the `keep` newest generations and the current one stay, and what processes use:
    `held` names entries and `generations/NUMBER`.

    Trouble where the manifest of one that stays cannot be read: what it needs is not known then.
    """
    newest = (
        set(holdings.numbers[-keep:])
        | {holdings.current}
        | {each for each in holdings.numbers if f"generations/{each}" in held}
    )
    kept = [generation for generation in holdings.generations if generation.number in newest]
    unread = [generation.number for generation in kept if not generation.readable]
    if unread:
        what = "its manifest cannot be read, so nobody knows what it needs"
        raise Trouble(
            *(Problem(f"generation {number}", what, try_=f"removing generations/{number} by hand") for number in unread)
        )
    needed = holdings.closure(name for generation in kept for name in generation.names)
    in_use = holdings.closure({*holdings.used, *held})
    idle = [
        entry for name, entry in sorted(holdings.entries.items()) if name not in needed and ENTRY_NAME.fullmatch(name)
    ]
    return Garbage(
        generations=tuple(number for number in holdings.numbers if number not in newest),
        entries=tuple(entry for entry in idle if entry.name not in in_use),
        busy=tuple(entry for entry in idle if entry.name in in_use),
    )
