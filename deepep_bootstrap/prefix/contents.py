"""Contents of a prefix: its generations, its store entries, and the references between them."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct, field

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.records import Records, read_records
from deepep_bootstrap.inventory.forms import CONTENTS

ENTRY_NAME = re.compile(r"[0-9a-z]{32}-[A-Za-z0-9][A-Za-z0-9._+-]*")
"""What the name of a store entry looks like; anything else in the store is not ours and is left alone."""

RECORD = "files.sha256"
"""The record of an entry's files (recipes/prefix/lib/files.sh)."""

NEAR = 5
"""How many existing generations a message names."""


class Generation(Struct, frozen=True):
    """One generation: its number, its manifest as JSON values ({} where that cannot be read), the text of the lock
    it was made from ("" where it was not asked for or is not there)."""

    number: int
    manifest: Mapping[str, Any]
    lock: str = ""

    @property
    def readable(self) -> bool:
        """Whether its manifest tells what it offers."""
        return isinstance(self._offer.get("stacks"), dict)

    @property
    def stacks(self) -> Mapping[str, Mapping[str, Any]]:
        """The records of its stacks by name."""
        found = self._offer.get("stacks")
        return (
            {name: record for name, record in found.items() if isinstance(record, dict)}
            if isinstance(found, dict)
            else {}
        )

    @property
    def modules(self) -> tuple[tuple[str, str], ...]:
        """The name of each module that it offers, with its stack."""
        return tuple((str(record.get("module", "")), stack) for stack, record in self.stacks.items())

    @property
    def default_stack(self) -> str:
        """What plain `module load deepep` gives in it."""
        return str(self._offer.get("default_stack", ""))

    @property
    def names(self) -> tuple[str, ...]:
        """The store entries its files name, sorted."""
        return entry_names(self.stacks)

    @property
    def records(self) -> Mapping[str, str]:
        """The SHA-256 of the record of files of each entry that it needs, by name; none in manifests of earlier
        versions."""
        found = self.manifest.get("records")
        return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}

    @property
    def _offer(self) -> Mapping[str, Any]:
        found = self.manifest.get("offer")
        return found if isinstance(found, dict) else {}


class StoreEntry(Struct, frozen=True):
    """One published entry: its name, the size of its files in bytes, its manifest ({} where that cannot be read),
    and the SHA-256 of the record of its files ("" where there is none). `metadata` are name, version and licence of
    its wheels as their METADATA has them, an empty line between two ("" where nobody asked)."""

    name: str
    size: int
    manifest: Mapping[str, Any] = field(default_factory=dict)
    record: str = ""
    metadata: str = ""

    @property
    def needs(self) -> tuple[str, ...]:
        """The entries it was built against and loads."""
        return entry_names(self.manifest.get("needs"))


class RecordSum(Struct, frozen=True):
    """What a generation says of an entry: the SHA-256 of the record of its files."""

    generation: int
    sha256: str


class Rollback(Struct, frozen=True):
    """What `rollback` did last: from which generation to which, when (UTC, as in manifests) and by whom."""

    before: int
    to: int
    at: str
    by: str


class Holdings(Struct, frozen=True):
    """What a look at a prefix found. `current` is 0 without a generation, `generations` ascend, `used` says by entry
    name which running build needs it, `leftovers` are trees that nobody will finish, with their bytes. `last_rollback`
    may lie long ago."""

    current: int
    generations: tuple[Generation, ...]
    entries: Mapping[str, StoreEntry]
    used: Mapping[str, str] = field(default_factory=dict)
    leftovers: tuple[tuple[str, int], ...] = ()
    last_rollback: Rollback | None = None

    @property
    def rolled_back(self) -> Rollback | None:
        """The rollback that made the current generation what it is; None where none did, as after a newer offer."""
        last = self.last_rollback
        return last if last and last.to == self.current and last.to != self.numbers[-1] else None

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of all generations, ascending."""
        return tuple(generation.number for generation in self.generations)

    def get(self, number: int) -> Generation | None:
        """Return the generation with this number, or None."""
        return next((generation for generation in self.generations if generation.number == number), None)

    def closure(self, names: Iterable[str]) -> frozenset[str]:
        """Return `names` and everything they need, as far as the entries' manifests tell; names that are missing are
        among them."""
        seen: set[str] = set()
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting.extend(self.entries[name].needs if name in self.entries else ())
        return frozenset(seen)

    def missing(self, generation: Generation) -> tuple[str, ...]:
        """Return what a generation needs and the store does not have, sorted."""
        return tuple(sorted(self.closure(generation.names) - set(self.entries)))

    def record_sum(self, name: str) -> RecordSum | None:
        """Return what the newest generation that knows says of the record of an entry; None where none does, as for
        what earlier versions published. An entry that was built again has another record from then on, since its
        manifest says when that was."""
        for generation in reversed(self.generations):
            if name in generation.records:
                return RecordSum(generation.number, generation.records[name])
        return None

    def records(self, names: Iterable[str], built: Collection[str] = ()) -> dict[str, str]:
        """Return what a new generation says of the records of the entries that `names` need: for those in `built`
        (since the last offer) what lies there, for others what an earlier generation said, so that a record made anew
        since does not become the right one."""
        found: dict[str, str] = {}
        for name in sorted(self.closure(names)):
            known = None if name in built else self.record_sum(name)
            there = self.entries[name].record if name in self.entries else ""
            if text := known.sha256 if known else there:
                found[name] = text
        return found

    def own_bytes(self, generation: Generation) -> int:
        """Return the bytes of the entries that this generation alone refers to."""
        others = self.closure(
            name for other in self.generations if other.number != generation.number for name in other.names
        )
        return sum(self.entries[name].size for name in self.closure(generation.names) - others if name in self.entries)


def parse_contents(out: str, where: str) -> Holdings:
    """Return what recipes/prefix/generations.sh printed; Trouble for lines it does not print."""
    records = read_records(out, CONTENTS, where, "generations.sh")
    metadata = {row[0]: row[1] for row in records.rows("metadata")}
    return Holdings(
        current=records.number("current"),
        generations=tuple(sorted(_generations(records), key=lambda each: each.number)),
        entries={
            name: StoreEntry(name, int(size or 0), _json(text), record, _lenient(metadata.get(name, "")))
            for name, size, text, record in records.rows("entry")
        },
        used={fields[0]: str(who) for fields, who in records.rows_with_text("used")},
        leftovers=tuple((name, int(size or 0)) for name, size in records.rows("leftover")),
        last_rollback=next(_rollbacks(records), None),
    )


def _rollbacks(records: Records) -> Iterator[Rollback]:
    for (before, to, at), by in records.rows_with_text("rolled_back"):
        yield Rollback(int(before), int(to), at, str(by))


def _generations(records: Records) -> Iterator[Generation]:
    for number, manifest, lock in records.rows("generation"):
        yield Generation(int(number), _json(manifest), _text(lock))


def _text(encoded: str) -> str:
    try:
        return base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _lenient(encoded: str) -> str:
    """Return text that others wrote: METADATA of old wheels is not all UTF-8, and is cut anywhere."""
    try:
        return base64.b64decode(encoded, validate=True).decode("utf-8", "replace")
    except binascii.Error:
        return ""


def _json(encoded: str) -> Mapping[str, Any]:
    try:
        found = json.loads(_text(encoded))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def entry_names(value: object) -> tuple[str, ...]:
    """Return every name of a store entry among JSON values (an offer, a manifest), however deep, sorted."""
    return tuple(sorted(set(_strings(value))))


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        if ENTRY_NAME.fullmatch(value):
            yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _strings(inner)


def rollback_target(holdings: Holdings, wanted: int) -> Generation:
    """Return the generation to go back to: `wanted`, or for 0 the newest before the current one. Trouble where there
    is none, where it cannot be read, and where entries that it needs are missing."""
    numbers = holdings.numbers
    before = [number for number in numbers if number < holdings.current]
    number = wanted or (before[-1] if before else 0)
    found = holdings.get(number)
    if found is None:
        raise Trouble(_no_generation(numbers, holdings.current, wanted))
    if not found.readable:
        raise Trouble(
            Problem(
                f"generation {number}",
                "its manifest cannot be read",
                wanted="one that bootstrap wrote",
                try_="another one",
            )
        )
    if missing := holdings.missing(found):
        many = "a store entry it needs is missing" if len(missing) == 1 else "store entries it needs are missing"
        remedy = "invoke bootstrap with the lock it was made from, which builds what is missing"
        raise Trouble(*(Problem(f"generation {number}", many, name, try_=remedy) for name in missing))
    return found


def _no_generation(numbers: tuple[int, ...], current: int, wanted: int) -> Problem:
    if not wanted:
        found = f"generation {current}, the oldest there is" if current else "no generation at all"
        return Problem("rollback", "there is nothing before the current generation", found, try_="invoke generations")
    return Problem("--to", "there is no such generation", str(wanted), _near(numbers, wanted))


def _near(numbers: tuple[int, ...], wanted: int) -> str:
    near = sorted(numbers, key=lambda number: (abs(number - wanted), number))[:NEAR]
    return ", ".join(map(str, sorted(near))) or "one; there are none"


def find_generation(holdings: Holdings, number: int) -> Generation:
    """Return a generation by its number; Trouble that names near ones."""
    found = holdings.get(number)
    if found is None:
        raise Trouble(
            Problem(f"generation {number}", "there is no such generation", wanted=_near(holdings.numbers, number))
        )
    return found


def choose_generation(holdings: Holdings, wanted: int) -> Generation:
    """Return the generation whose entries are taken elsewhere, `wanted` or the current one (0); Trouble where it is not
    complete."""
    if not wanted and not holdings.current:
        raise Trouble(Problem("prefix", "nothing is offered in this prefix", try_="invoke bootstrap"))
    found = find_generation(holdings, wanted or holdings.current)
    if not found.stacks:
        raise Trouble(
            Problem(
                f"generation {found.number}",
                "its manifest cannot be read",
                wanted="one that bootstrap wrote",
                try_="another one",
            )
        )
    if missing := holdings.missing(found):
        remedy = "invoke bootstrap with the lock it was made from, which builds what is missing"
        raise Trouble(
            *(
                Problem(f"generation {found.number}", "a store entry it needs is missing", name, try_=remedy)
                for name in missing
            )
        )
    return found
