"""The lock for people and for programs: pins with their age, stacks with what they use, the changes of an update,
and by what it is ahead of what a prefix offers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from textwrap import shorten
from typing import Any

from msgspec import Struct
from msgspec.structs import fields

from deepep_bootstrap.core import filetree
from deepep_bootstrap.core.text import day, size
from deepep_bootstrap.fetch.images import ImageRenewal
from deepep_bootstrap.fetch.renew import Renewal
from deepep_bootstrap.fetch.resolver import WheelClosure
from deepep_bootstrap.lock.model import (
    OWN_INDEX,
    Lock,
    Source,
    Stack,
    Substitute,
    Wheel,
    WheelRequest,
    requirement_name,
    roles,
    used,
    users,
)
from deepep_bootstrap.lock.packages import MACHINE
from deepep_bootstrap.prefix.offer import StackRecord

DAY = 86400
MONTH_DAYS = 30.44
REV_DIGITS = 12
SHOWN_OF_CHANGE = 160


def overview(lock: Lock, stacks: Sequence[str], now: float) -> list[str]:
    """Return the lines of `invoke lock`: the pins that `stacks` use, then these stacks. `now`: seconds since 1970."""
    sources = used(lock, stacks)
    lines = ["sources"]
    rows = [_source_cells(source, users(lock, source.name), now) for source in sources]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)] if rows else []
    for source, row in zip(sources, rows, strict=True):
        lines.append("  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
        lines += [f"      {line}" for line in _details(source)]
    lines.append("stacks")
    for name in stacks:
        lines += _stack_lines(lock.stacks[name], is_default=name == lock.default_stack)
    lines += _tool_lines(lock)
    lines += _key_lines(lock)
    return lines


def change_lines(renewal: Renewal) -> list[str]:
    """Return what an update does to a pin: old and new with dates, how one became the other, and where to look at
    the difference."""
    before, after = renewal.before, renewal.after
    if before == after:
        return [f"{renewal.name}: {_state(before)}, unchanged"]
    version = f"version {before['version']} → {after['version']}" if before["version"] != after["version"] else ""
    line = "; ".join(filter(None, (f"{renewal.name}: {_state(before)} → {_state(after)}", *renewal.notes, version)))
    return [line, *([f"    {renewal.link}"] if renewal.link else [])]


def _tool_lines(lock: Lock) -> Iterator[str]:
    """Yield the lines of toolkits, tools and images of others, where the lock has any."""
    if lock.toolkits:
        yield "toolkits, for kernels that are compiled where they run"
        yield from (f"  {name} {each.version}: for {', '.join(each.wheels)}" for name, each in lock.toolkits.items())
    if lock.compilers:
        yield "host compilers, for images whose base has none"
        yield from (
            f"  {name}: {', '.join(f'{len(each)} packages for {machine}' for machine, each in pin.packages.items())}"
            for name, pin in lock.compilers.items()
        )
    if lock.tools:
        yield "tools"
        yield from (f"  {name} {own[0].version}: {len(own)} wheels, one a platform" for name, own in lock.tools.items())
    if lock.images:
        yield "images"
        yield from (f"  {name} {pin.reference}: {pin.digest or 'no digest'}" for name, pin in lock.images.items())


def _key_lines(lock: Lock) -> Iterator[str]:
    """Yield which package repositories nobody vouches for, and how an administrator does so once."""
    untrusted = [
        (system.id, repository)
        for system in lock.systems.values()
        for repository in system.repositories
        if not repository.key_fingerprint
    ]
    if not untrusted:
        return
    yield "package repositories whose signing key nobody has noted: set up by hand on each host until then"
    for name, each in untrusted:
        yield f"  system.{name}.repository.{each.name} ({', '.join(each.purposes)}): {each.url}"
    name, example = untrusted[0]
    machine = next(iter(example.machines.values()), "")
    key = example.key_url.replace(MACHINE, machine)
    show = "gpg --show-keys --with-colons | awk -F: '$1 == \"fpr\" { print $10; exit }'"
    yield f"    curl -fsSL {key} | {show}"
    yield "    compare it with what came another way: the vendor's documents or support, or a host that trusts the key"
    yield "    (gpg --show-keys --with-fingerprint and the file that Signed-By or gpgkey names there)"
    table = f"[system.{name}.repository.{example.name}]"
    yield f'    then, in {table}: key_fingerprint = "…", its 40 digits. Repository and packages come by themselves'


def image_line(renewal: ImageRenewal) -> str:
    """Return what an update does to the pin of an image."""
    before = renewal.before or "no digest"
    change = f"{before} → {renewal.after}" if renewal.changed else f"{renewal.after}, unchanged"
    return f"{renewal.name} {renewal.reference}: {change}"


def image_json(renewal: ImageRenewal) -> Mapping[str, Any]:
    """Return the change of an image's pin for the JSON document."""
    values = ({"reference": renewal.reference, "digest": digest} for digest in (renewal.before, renewal.after))
    head = {"kind": "image", "name": renewal.name, "changed": bool(renewal.changed)}
    return {**head, "before": next(values), "after": next(values), "notes": [], "link": ""}


def closure_lines(closure: WheelClosure) -> list[str]:
    """Return what an update does to the wheels of one stack and target: what is known of them, then each that
    differs."""
    count = f"{len(closure.after)} wheels, {size(sum(wheel.size for wheel in closure.after))}"
    state = (
        f"{len(closure.changes)} changed"
        if closure.changes and closure.before
        else "new"
        if closure.changes
        else "unchanged"
    )
    lines = [f"{closure.name}: {count}, {state}", *(f"    {note}" for note in closure.notes)]
    return lines + [f"    {name}: {_step(old, new)}" for name, (old, new) in closure.changes.items() if closure.before]


def _step(old: Wheel | None, new: Wheel | None) -> str:
    if old is None or new is None:
        return f"added, {new.version}" if new else f"removed, was {old.version if old else ''}"
    if old.version != new.version:
        return f"{old.version} → {new.version}"
    return (
        f"{new.version}, {old.file} → {new.file}" if old.file != new.file else f"{new.version}, {_difference(old, new)}"
    )


def _difference(old: Wheel, new: Wheel) -> str:
    """Return what differs of two wheels of one file name."""
    pairs = [(each.name, getattr(old, each.name), getattr(new, each.name)) for each in fields(old)]
    return ", ".join(f"{key} {before} → {after}" for key, before, after in pairs if before != after)


def closure_json(closure: WheelClosure) -> Mapping[str, Any]:
    """Return what an update does to the wheels of one stack and target for the JSON document: versions of what
    differs, by name."""
    before = {name: old.version for name, (old, _) in closure.changes.items() if old}
    after = {name: new.version for name, (_, new) in closure.changes.items() if new}
    head = {"kind": "wheels", "name": closure.name, "changed": bool(closure.changes)}
    return {**head, "before": before, "after": after, "notes": list(closure.notes), "link": ""}


def age(seconds: float) -> str:
    """Return how long ago something was, in the unit a person would choose."""
    days = int(seconds // DAY)
    for count, unit in ((int(days / MONTH_DAYS / 12), "year"), (int(days / MONTH_DAYS), "month"), (days, "day")):
        if count > 1 or unit == "day":
            return f"{max(count, 0)} {unit}{'s' * (count != 1)} old"
    raise ValueError(seconds)


def pins_json(lock: Lock, stacks: Sequence[str]) -> dict[str, Any]:
    """Return the keys `pins`, `stacks`, `default_stack` and `repositories` of the JSON document."""
    pins = [
        {
            **{key: getattr(pin, key) for key in ("name", "url", "ref", "rev", "hash", "last_modified", "version")},
            "kind": "source",
            "submodules": pin.submodules,
            "substitutes": [_substitute_json(each) for each in pin.substitutes],
            "license": pin.license,
            "used_by": users(lock, pin.name),
        }
        for pin in used(lock, stacks)
    ]
    return {
        "default_stack": lock.default_stack,
        "pins": pins,
        "stacks": [_stack_json(lock, lock.stacks[name]) for name in stacks],
        "repositories": [
            {
                "system": system.id,
                "name": each.name,
                "url": each.url,
                "purposes": list(each.purposes),
                "key_url": each.key_url,
                "key_fingerprint": each.key_fingerprint,
            }
            for system in lock.systems.values()
            for each in system.repositories
        ],
    }


def _substitute_json(each: Substitute) -> dict[str, Any]:
    return {"file": each.file, "count": each.count, "hash": _digest(each), "reason": each.reason}


def change_json(renewal: Renewal) -> Mapping[str, Any]:
    """Return one change for the JSON document."""
    head = {"kind": renewal.table, "name": renewal.name, "changed": bool(renewal.changed)}
    return {
        **head,
        "before": renewal.before,
        "after": renewal.after,
        "notes": list(renewal.notes),
        "link": renewal.link,
    }


def _source_cells(source: Source, stacks: Sequence[str], now: float) -> tuple[str, ...]:
    old = f"{day(source.last_modified)}, {age(now - source.last_modified)}"
    ref = "" if source.ref == source.rev else source.ref
    return f"{source.name} {source.version}", ref, source.rev[:REV_DIGITS], old, _by(stacks)


def _by(stacks: Sequence[str]) -> str:
    return f"for {', '.join(stacks)}" if stacks else "for no stack"


def _details(source: Source) -> list[str]:
    words = [f"licence {source.license}"] if source.license else []
    if source.submodules:
        words.append("with its submodules")
    lines = [", ".join(words)] if words else []
    for each in source.substitutes:
        change = f"{_difference_of(each)} ({_digest(each)[:20]}…)"
        lines.append(f"substitute in {each.file}, {each.count} time{'s' * (each.count != 1)}: {change}")
        lines += [f"    {each.reason}"] if each.reason else []
    return lines


def _difference_of(each: Substitute) -> str:
    """Return what a substitution changes on one line: the lines that both texts begin and end with are left out."""
    old, new = each.text.splitlines(), each.replacement.splitlines()
    while old and new and old[0] == new[0]:
        del old[0], new[0]
    while old and new and old[-1] == new[-1]:
        del old[-1], new[-1]
    before, after = (shorten(" ".join(lines), SHOWN_OF_CHANGE, placeholder=" …") for lines in (old, new))
    if before == after:  # they differ in white space
        return f"{each.text!r} → {each.replacement!r}"
    return f"{before} → {after}" if before and after else f"adds {after}" if after else f"removes {before}"


def _digest(each: Substitute) -> str:
    """Return the SRI hash of both texts of a substitution, with a zero byte between them."""
    return filetree.sri(hashlib.sha256(f"{each.text}\0{each.replacement}".encode()).digest())


def _stack_lines(stack: Stack, *, is_default: bool) -> list[str]:
    values = {each.name: getattr(stack, each.name) for each in fields(stack) if each.name != "name"}
    words = ", ".join(f"{role} {value}" for role, value in values.items() if isinstance(value, str) and value)
    lines = [f"  {stack.name}{' (default)' if is_default else ''}: {words}"]
    lines += [f"      asks for {each}" for each in [_wanted(stack.asked)] if each]
    for target, wheels in stack.wheels.items():
        torch = next((f", torch {wheel.version}" for wheel in wheels if wheel.name == "torch"), "")
        lines.append(f"      {target}: {len(wheels)} wheels, {size(sum(wheel.size for wheel in wheels))}{torch}")
    return lines


def _wanted(asked: WheelRequest) -> str:
    """Return what the wheels of a stack were resolved from, each with its index where that is not the stack's."""
    places = [(each, asked.index_of(requirement_name(each))) for each in asked.python]
    words = [each if index == OWN_INDEX else f"{each} from {index}" for each, index in places]
    return ", ".join(words) + (f"; in any case {', '.join(asked.overrides)}" if asked.overrides else "")


def _stack_json(lock: Lock, stack: Stack) -> dict[str, Any]:
    wheels = [
        {"target": target, "files": len(closure), "bytes": sum(wheel.size for wheel in closure)}
        for target, closure in stack.wheels.items()
    ]
    return {"name": stack.name, "cuda": stack.cuda, "uses": roles(stack, lock), "wheels": wheels}


def _state(values: Mapping[str, str | int]) -> str:
    """Return what a pin is, in short: its ref, and its commit with the date."""
    ref = "" if values["ref"] == values["rev"] else f"{values['ref']} "
    return f"{ref}{str(values['rev'])[:REV_DIGITS]} ({day(int(values['last_modified']))})"


MODULE = re.compile(r"deepep/.+-(?P<rev>[0-9a-f]{7})-.+")
"""A modulefile's name: the version, seven digits of the commit, the stack."""


class Lead(Struct, frozen=True):
    """What a stack of the lock has anew: DeepEP's commit or NVSHMEM's version, as it is offered and as it is locked."""

    stack: str
    what: str
    offered: str
    locked: str

    @property
    def line(self) -> str:
        """The lead for a person."""
        return f"behind the lock: {self.what} {self.offered} → {self.locked} (invoke plan --stack={self.stack})"


def find_leads(lock: Lock, records: Iterable[StackRecord]) -> tuple[Lead, ...]:
    """Return by what the lock is ahead of the offered stacks; a stack that it does not have is nobody's to renew."""
    return tuple(
        Lead(record.stack, what, offered, locked)
        for record in records
        if record.stack in lock.stacks
        for what, offered, locked in _pins(lock, lock.stacks[record.stack], record)
        if offered and locked and offered != locked
    )


def _pins(lock: Lock, stack: Stack, record: StackRecord) -> Iterator[tuple[str, str, str]]:
    """Yield what is pinned, as it is offered and as it is locked, "" where either is not known."""
    module = MODULE.fullmatch(record.module)
    deepep = lock.sources.get(stack.deepep)
    yield "DeepEP", module["rev"] if module else "", deepep.rev[:7] if deepep else ""
    nvshmem = lock.sources.get(stack.nvshmem) or stack.pinned(stack.nvshmem_wheel)
    yield "NVSHMEM", record.nvshmem.rpartition("-")[2], nvshmem.version if nvshmem else ""
