"""Generations and store of a prefix through its host: read, rolled back, freed of garbage, compared with the
records of their files.
"""

from __future__ import annotations

import getpass
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.recipes import compose
from deepep_bootstrap.core.records import read_records
from deepep_bootstrap.inventory import forms
from deepep_bootstrap.prefix.contents import RECORD, Generation, Holdings, RecordSum, parse_contents
from deepep_bootstrap.prefix.gc import Garbage
from deepep_bootstrap.prefix.generations import GC, LOOK, REHASH, ROLLBACK, PrefixHandle, read_answer
from deepep_bootstrap.remote.jobs import Job, Transport

CONTENTS_LIMIT = 256 * 1024**2
"""Bytes that a prefix may say of what it holds: a generation has its lock with it, 160 KiB; 1,000 of them are room
enough where nobody ever collected garbage."""

STALE = "another run changed the generations meanwhile"
MODES = {
    "executable": ("may be run", "may not be run any more"),
    "writable": ("may be written", "may not be written any more"),
    "owner": ("belongs to another user than the entry", "belongs to the user of the entry again"),
    "private": ("may not be read by everybody", "may be read by everybody"),
    "setuid": ("changes who runs it", "does not change who runs it any more"),
}
"""What a line of an entry's record about a file's mode means, when it is new and when it is gone."""


class CollectedGarbage(Struct, frozen=True):
    """What gc did: generations and entries that are gone, entries that somebody uses (with who), leftovers, what
    could not be removed."""

    generations: tuple[int, ...]
    entries: tuple[str, ...]
    kept: tuple[tuple[str, str], ...]
    leftovers: tuple[str, ...]
    stuck: tuple[str, ...]


class FileChange(Struct, frozen=True):
    """One file of an entry that is not as published: its path inside the entry, and "changed", "missing", "new", or
    what became of its mode."""

    path: str
    what: str


class EntryVerdict(Struct, frozen=True):
    """How an entry compares with the record of its files: "same", "changed", "missing" (no such entry), "unrecorded"
    (the record is gone, so nobody can tell). `record` is the SHA-256 of that record, `generation` the one that says
    what it has to be; 0 where none does, as for what earlier versions published: then the record speaks for itself."""

    name: str
    state: str
    changes: tuple[FileChange, ...] = ()
    record: str = ""
    generation: int = 0


def read_contents(
    transport: Transport, place: PrefixHandle, *, locks: bool = False, metadata: bool = False
) -> Holdings:
    """Return what the prefix holds; with `locks` also the lock of every generation, with `metadata` also what wheels in
    entries say of themselves. Changes nothing and needs no right to write."""
    env = {"PREFIX": place.prefix, "TOKEN": secrets.token_hex(8), "LOCKS": "1" if locks else ""}
    env |= {"METADATA": "1"} if metadata else {}
    script = compose(place.recipes, *LOOK)
    reply = transport.run(place.host, Job(script, env=env, watched=True, timeout=None, limit=CONTENTS_LIMIT))
    if reply.code:
        read_answer(reply, place, "generations.sh", forms.NOTHING)
    return parse_contents(reply.out, f"{place.host.name} {place.prefix}")


def roll_back(transport: Transport, place: PrefixHandle, holdings: Holdings, target: Generation) -> None:
    """Make `target` the current generation by one rename; Trouble, and nothing changed, where generations or entries
    went meanwhile."""
    names = sorted(holdings.closure(target.names))
    env = {"BASE": str(holdings.current), "TO": str(target.number), "ENTRIES": "\n".join(names)}
    env |= {"BY": f"{getpass.getuser()} by way of {place.host.name}"}
    reply = transport.run(place.host, _changing(place, ROLLBACK, env))
    answer = read_answer(reply, place, "rollback.sh", forms.SWITCHED)
    where = f"{place.host.name} {place.prefix}"
    reasons = {
        "stale": (STALE, f"generation {answer.text('generation')} is current"),
        "absent": (f"generation {target.number} was removed meanwhile", ""),
        "missing": ("store entries it needs were removed meanwhile", ", ".join(answer.words("missing"))),
    }
    if (state := answer.text("state")) in reasons:
        what, found = reasons[state]
        raise Trouble(Problem(where, what, found, try_="invoke generations, then the same command again"))


def collect(
    transport: Transport,
    place: PrefixHandle,
    holdings: Holdings,
    garbage: Garbage,
    *,
    on_line: Callable[[str], None] | None = None,
) -> CollectedGarbage:
    """Remove `garbage`, which was chosen from `holdings`, and what dead builds left; Trouble, and nothing removed,
    where generations came or went since. Each data line goes to `on_line` as it comes."""
    env = {
        "SEEN": f"{holdings.current}: {' '.join(map(str, holdings.numbers))}",
        "DROP": "\n".join(map(str, garbage.generations)),
        "ENTRIES": "\n".join(entry.name for entry in garbage.entries),
    }
    reply = transport.run(place.host, _changing(place, GC, env), on_line)
    answer = read_answer(reply, place, "gc.sh", forms.COLLECTED)
    if answer.text("state") == "stale":
        raise Trouble(
            Problem(f"{place.host.name} {place.prefix}", STALE, "nothing was removed", try_="the same command again")
        )
    return CollectedGarbage(
        generations=tuple(int(number) for number in answer.words("dropped")),
        entries=answer.words("removed"),
        kept=tuple((fields[0], str(who)) for fields, who in answer.rows_with_text("kept")),
        leftovers=answer.words("swept"),
        stuck=answer.words("stuck"),
    )


def rehash(
    transport: Transport, place: PrefixHandle, names: Iterable[str], on_line: Callable[[str], None] | None = None
) -> tuple[EntryVerdict, ...]:
    """Read every file of these entries and compare it with the record made when they were published, which may take
    minutes. Each data line goes to `on_line` as it comes."""
    wanted = tuple(names)
    if not wanted:
        return ()
    job = Job(
        compose(place.recipes, *REHASH),
        env={"PREFIX": place.prefix, "ENTRIES": "\n".join(wanted)},
        watched=True,
        timeout=None,
    )
    reply = transport.run(place.host, job, on_line)
    if reply.code:
        read_answer(reply, place, "rehash.sh", forms.NOTHING)
    where = f"{place.host.name} {place.prefix}"
    # Lines belong to the entry before them, so each entry's part is read by itself.
    parts = re.split(r"^entry=", reply.out.removesuffix("end=1\n"), flags=re.MULTILINE)[1:]
    read_records(reply.out, forms.COMPARED, where, "rehash.sh")
    return tuple(_verdict(part, where) for part in parts)


def _verdict(part: str, where: str) -> EntryVerdict:
    name, _, lines = part.partition("\n")
    records = read_records(lines, forms.COMPARED_ENTRY, where, "rehash.sh")
    changes = tuple(differences(records.words("lost"), records.words("found")))
    return EntryVerdict(name, records.text("state"), changes, "".join(records.words("record")))


def hold_to_generations(verdicts: Iterable[EntryVerdict], holdings: Holdings) -> tuple[EntryVerdict, ...]:
    """Return the verdicts with those changed whose record is not the one that a generation names: whoever may write
    an entry can make its record anew."""
    return tuple(_held(verdict, holdings.record_sum(verdict.name)) for verdict in verdicts)


def _held(verdict: EntryVerdict, known: RecordSum | None) -> EntryVerdict:
    if known is None or not verdict.record:
        return verdict
    if verdict.record == known.sha256:
        return replace(verdict, generation=known.generation)
    change = FileChange(RECORD, f"is not the record that generation {known.generation} names: made anew since then")
    return replace(verdict, state="changed", changes=(*verdict.changes, change), generation=known.generation)


def differences(lost: Sequence[str], found: Sequence[str]) -> Iterator[FileChange]:
    """Yield what lines of a record that are not true any more, and those that are true instead, say of files; sorted by
    path.

    A line that is gone and one that came for the same path are one change.
    """
    was, now = _by_path(lost), _by_path(found)
    for path in sorted({*was, *now}):
        before, after = was.get(path, {}), now.get(path, {})
        had, has = _things(before), _things(after)
        if had and has:
            yield FileChange(path, "changed")
        elif had:
            yield FileChange(path, "missing")
        elif has:
            yield FileChange(path, "new")
        elif "record" in before:
            yield FileChange(path, "changed, so it does not tell what else is")
        else:
            yield FileChange(path, ", ".join((*_now(after), *(MODES[kind][1] for kind in before if kind in MODES))))


def _now(lines: dict[str, str]) -> Iterator[str]:
    """Yield what new lines about a path's mode and owner mean; the owner is named."""
    for kind, value in lines.items():
        if kind in MODES:
            yield f"{MODES[kind][0]}, {value}" if value else MODES[kind][0]


def _things(lines: dict[str, str]) -> bool:
    return any(kind in {"file", "folder", "link", "special"} for kind in lines)


def _by_path(lines: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return what lines of a record say, by path and kind."""
    paths: dict[str, dict[str, str]] = {}
    for line in lines:
        if line.startswith("# "):
            _, kind, rest = line.split(" ", 2)
            path, _, value = rest.partition(" -> ") if kind in {"link", "owner"} else (rest, "", "")
        else:
            # sha256sum puts a backslash in front of a line whose name it had to write differently.
            value, _, path = line.removeprefix("\\").partition("  ")
            kind = "file"
        paths.setdefault(path, {})[kind] = value
    return paths


def _changing(place: PrefixHandle, recipe: Sequence[str], env: dict[str, str]) -> Job:
    """Return the job of a recipe that changes generations; it may wait for a lock and for a slow filesystem, so it
    is watched."""
    values = {"PREFIX": place.prefix, "TOKEN": secrets.token_hex(8), **env}
    return Job(compose(place.recipes, *recipe), env=values, user=place.user, watched=True, timeout=None)
