"""`invoke lock`: the pins of the lock; `--check`: each still there and the same; `--update`: follow the refs
anew and rewrite the pins.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from deepep_bootstrap.cli.lock_view import (
    change_json,
    change_lines,
    closure_json,
    closure_lines,
    image_json,
    image_line,
    overview,
    pins_json,
)
from deepep_bootstrap.core import program
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import OK, TROUBLE, Problem, Trouble
from deepep_bootstrap.core.filetree import whole_file
from deepep_bootstrap.fetch import check, locations, resolver
from deepep_bootstrap.fetch.images import ImageRenewal, renew_image
from deepep_bootstrap.fetch.locations import Mirrors
from deepep_bootstrap.fetch.renew import CheckedPin, PinRequest, Renewal, check_source, renew_source
from deepep_bootstrap.fetch.resolver import WheelClosure
from deepep_bootstrap.fetch.uv import cache_dir
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.survey import read_tree
from deepep_bootstrap.lock import compatibility, edit
from deepep_bootstrap.lock import model as locks
from deepep_bootstrap.lock.model import PYTHON, Lock, Wheel, used

EVERY = "all"
IMAGE = "image."
"""What stands before the name of an image's pin. `all` leaves images out: they want a program of their own."""


class _Work(Struct, frozen=True):
    flags: Flags
    screen: Screen
    lock: Lock
    mirrors: Mirrors
    stacks: tuple[str, ...]


def lock(
    flags: Flags, *, check: bool = False, update: str = "", ref: str = "", version: str = "", download: bool = False
) -> int:
    """Say what is pinned and how old it is; check that it is still there and the same; update pins.

    `update` is a pin or `all`, perhaps with another `ref` or another `version` to follow. `python` is the pin
    of all wheels. `download` makes the check fetch every wheel instead of asking its index.

    Exit 1 when a pin is not what it should be or could not be renewed.
    """
    screen = Screen("lock", as_json=flags.json)
    request = PinRequest(ref, version)
    problems = _contradictions(check, update, request)
    if download and not check:
        problems.append(Problem("--download", "is a way to check wheels", wanted="--check --download"))
    if problems:
        raise Trouble(*problems)
    if update and not (flags.lock or flags.dry_run or program.is_source_tree()):
        what = "the lock that came along with the program is not rewritten"
        raise Trouble(
            Problem(
                "--update", what, str(_path(flags)), "a copy", f"cp {_path(flags)} . && invoke lock --update={update}"
            )
        )
    found = locks.read_lock_file(_path(flags))
    if flags.stack and flags.stack not in found.stacks:
        raise Trouble(Problem("--stack", "no such stack in the lock", flags.stack, " or ".join(found.stacks)))
    stacks = (flags.stack,) if flags.stack else tuple(found.stacks)
    work = _Work(flags, screen, found, locations.read_mirrors(flags.mirror, os.environ, found.indexes), stacks)
    if update:
        return renew(work, update, request)
    return check_pins(work, download) if check else show(work)


def show(work: _Work) -> int:
    """Print the pins, their age, and what each stack uses."""
    work.screen.say(f"{work.lock.path}: default stack {work.lock.default_stack}", style="bold")
    for line in overview(work.lock, work.stacks, time.time()):
        work.screen.say(line)
    work.screen.document(OK, (), **pins_json(work.lock, work.stacks), checks=[], changes=[])
    return OK


def check_pins(work: _Work, download: bool = False) -> int:
    """Fetch every pin anew and compare it, ask indexes for every wheel (with `download` fetch these too), and hold
    stacks to the rules; print all that is not as locked. What reads the lock has checked its schema."""
    done: dict[str, CheckedPin] = {}
    for source in used(work.lock, work.stacks):
        done[source.name] = check_source(source, work.mirrors)
        _tell(work.screen, f"source {source.name} {source.rev[:12]}", done[source.name])
    done |= _check_wheels(work, download)
    problems = [problem for each in done.values() for problem in each.problems]
    unfit = [*_unresolved(work), *compatibility.check_lock(work.lock, read_tree(work.flags.root / "env"), work.stacks)]
    work.screen.say(f"{len(work.stacks)} stacks: {'not all fit together' if unfit else 'consistent'}")
    problems += unfit
    for problem in problems:
        work.screen.problem(problem)
    code = TROUBLE if problems else OK
    checks = [
        {"name": name, "ok": not each.problems, "hashed": not each.stated, "notes": list(each.notes)}
        for name, each in done.items()
    ]
    work.screen.document(code, problems, **pins_json(work.lock, work.stacks), checks=checks, changes=[])
    return code


def _all_wheels(work: _Work) -> dict[Wheel, None]:
    """Return every wheel of the stacks that are meant, of their toolkits, and of the tools, once."""
    stacks = [work.lock.stacks[name] for name in work.stacks]
    lists = [closure for stack in stacks for closure in stack.wheels.values()]
    for name in dict.fromkeys(stack.toolkit for stack in stacks if stack.toolkit):
        lists += work.lock.toolkits[name].wheels.values()
    return dict.fromkeys(wheel for closure in (*lists, *work.lock.tools.values()) for wheel in closure)


def _check_wheels(work: _Work, download: bool) -> dict[str, CheckedPin]:
    """Compare every wheel once; of those that are as locked only their number is shown, unless they are downloaded
    for it."""
    wheels = _all_wheels(work)

    def on_done(wheel: Wheel, checked: CheckedPin) -> None:
        if download or checked.problems or checked.notes:
            _tell(work.screen, f"wheel {wheel.file}", checked)

    found = check.check_wheels(wheels, check.Ways(work.mirrors, cache_dir(), download), on_done)
    if not download:
        states = Counter(
            _wheel_state(work.mirrors, wheel, checked) for wheel, checked in found.items() if not checked.problems
        )
        for state, count in states.items():
            work.screen.say(f"ok      {count} wheels: {state}")
    return {wheel.file: checked for wheel, checked in found.items()}


def _wheel_state(mirrors: Mirrors, wheel: Wheel, checked: CheckedPin) -> str:
    """Return what is known of a wheel without a problem: whether the file was hashed, else whose word it is."""
    if not checked.stated:
        return "as locked"
    whose = "their indexes state"
    if mirrors.is_written(wheel.index):
        whose = "the mirror's own pages state, which invoke mirror wrote"
    return f"as {whose} (--download fetches and hashes them)"


def _unresolved(work: _Work) -> list[Problem]:
    """Return where the targets that a stack names are not those it has wheels for."""
    problems = []
    for stack in (work.lock.stacks[name] for name in work.stacks):
        found, wanted = list(stack.wheels), list(stack.asked.targets)
        if stack.asked.python and sorted(found) != sorted(wanted):
            where, remedy = (
                f"{work.lock.path}: stack.{stack.name}.wheels",
                "invoke lock --update python, or removing a list that nobody wants",
            )
            problems.append(
                Problem(where, "is not for the targets of this stack", " ".join(found), " ".join(wanted), remedy)
            )
    return problems


class _Renewed(Struct):
    """What came of renewing pins: sources, images, closures of wheels, and what could not be renewed. Grows while it
    is filled."""

    sources: list[Renewal] = field(default_factory=list)
    images: list[ImageRenewal] = field(default_factory=list)
    closures: list[WheelClosure] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def renew(work: _Work, pin: str, request: PinRequest) -> int:
    """Follow what pins ask for anew and rewrite the lock; with --dry-run only say how. All pins can be renewed, or
    nothing is written."""
    path = _path(work.flags)
    text = work.lock.text
    renewed = _renew_pins(work, _names(work, pin), request)
    problems = renewed.problems
    new = text if problems else _rewritten(text, renewed, str(path))
    if new != text:
        problems += _broken(work, locks.parse_lock(new, str(path)), renewed.closures)
        if not problems and not work.flags.dry_run:
            _replace(path, text, new)
    for problem in problems:
        work.screen.problem(problem)
    if pin == EVERY and (left := _by_hand(work.lock)):
        work.screen.say(f"left    {', '.join(f'{name} of {of}' for name, of in left.items())}: {BY_HAND}")
    _sum_up(work, new != text, bool(problems))
    code = TROUBLE if problems else OK
    changes = [*map(change_json, renewed.sources), *map(image_json, renewed.images)]
    changes += map(closure_json, renewed.closures)
    work.screen.document(
        code, problems, **pins_json(locks.read_lock_file(path), work.stacks), checks=[], changes=changes
    )
    return code


def _renew_pins(work: _Work, names: Sequence[str], request: PinRequest) -> _Renewed:
    """Renew pins one after the other, and say what becomes of each that can be renewed."""
    renewed = _Renewed()
    for name in names:
        try:
            if name == PYTHON:
                closures = _resolved(work)
                renewed.closures += closures
                lines = [line for closure in closures for line in closure_lines(closure)]
            elif name.startswith(IMAGE):
                image = renew_image(name, work.lock.images[name.removeprefix(IMAGE)])
                renewed.images.append(image)
                lines = [image_line(image)]
            else:
                renewal = _renewed_source(work, name, request)
                renewed.sources.append(renewal)
                lines = change_lines(renewal)
        except Trouble as trouble:
            renewed.problems.extend(trouble.problems)
            continue
        for line in lines:
            work.screen.say(line)
    return renewed


def _resolved(work: _Work) -> list[WheelClosure]:
    """Resolve what the chosen stacks ask for; Trouble with everything that has no answer."""
    found: list[WheelClosure] = []
    problems: list[Problem] = []
    with resolver.tools(work.lock, work.mirrors, work.screen.say) as tools:
        for name in work.stacks:
            try:
                found += resolver.renew(work.lock, work.lock.stacks[name], tools)
            except Trouble as trouble:
                problems += trouble.problems
    if problems:
        raise Trouble(*problems)
    return found


def _broken(work: _Work, new: Lock, resolved: Sequence[WheelClosure]) -> Sequence[Problem]:
    """Return the rules that stacks break with their new wheels. Sources are not held to them here: they change one
    by one."""
    stacks = list(dict.fromkeys(closure.stack for closure in resolved))
    return compatibility.check_lock(new, read_tree(work.flags.root / "env"), stacks) if stacks else ()


def _rewritten(text: str, renewed: _Renewed, path: str) -> str:
    """Return the text of the lock with what has changed."""
    changed = {place: value for renewal in renewed.sources for place, value in renewal.changed.items()}
    changed |= {place: value for image in renewed.images for place, value in image.changed.items()}
    lists = {(each.stack, each.target): each.after for each in renewed.closures if each.changes}
    new = edit.rewrite(text, changed, path) if changed else text
    return edit.put_wheels(new, lists, path) if lists else new


def _renewed_source(work: _Work, name: str, request: PinRequest) -> Renewal:
    """Return the renewal of a source; for a DeepEP also what the rules ask of its new commit and nobody recorded."""
    renewal = renew_source(work.lock.sources[name], request, work.mirrors)
    rev = str(renewal.after["rev"])
    if rev == renewal.before["rev"] or name not in {stack.deepep for stack in work.lock.stacks.values()}:
        return renewal
    note = compatibility.unrecorded(rev, read_tree(work.flags.root / "env"))
    return replace(renewal, notes=(*renewal.notes, note)) if note else renewal


def _sum_up(work: _Work, changed: bool, failed: bool) -> None:
    if failed:
        work.screen.say(f"{work.lock.path}: not written, because not every pin could be renewed", style="yellow")
    elif not changed:
        work.screen.say(f"{work.lock.path}: nothing to change")
    elif work.flags.dry_run:
        work.screen.say(f"{work.lock.path}: not written (dry run)")
    else:
        work.screen.say(f"{work.lock.path}: written")
        work.screen.next_commands(["invoke lock --check", "invoke plan --hosts=FILE"])


def _contradictions(check: bool, update: str, request: PinRequest) -> list[Problem]:
    problems = []
    if check and update:
        problems.append(Problem("--check", "checks the lock as it is and does not go with --update"))
    for flag, value in (("--ref", request.ref), ("--version", request.version)):
        if value and (update in {"", EVERY, PYTHON} or update.startswith(IMAGE)):
            problems.append(Problem(flag, "is for one pin", wanted=f"--update=NAME {flag}={value}"))
    return problems


BY_HAND = 'renewed by hand, see "The compiler that comes along" in docs/lock.md'


def _by_hand(lock: Lock) -> dict[str, str]:
    """Return the pins that no update renews, with the version or time that each is of: a compiler is changed together
    with what its kernels were tried with."""
    toolkits = {f"toolkit.{name}": toolkit.version for name, toolkit in lock.toolkits.items()}
    return toolkits | {f"compiler.{name}": compiler.at for name, compiler in lock.compilers.items()}


def _names(work: _Work, pin: str) -> list[str]:
    resolvable = [name for name in work.stacks if work.lock.stacks[name].asked.python]
    names = [*work.lock.sources, *([PYTHON] if resolvable else [])]
    if pin == EVERY:
        return names
    if pin == PYTHON and not resolvable:
        remedy = 'python = ["torch==2.10.0", ...] and targets = ["cp312-x86_64", ...] in the table of a stack'
        raise Trouble(
            Problem(
                "--update", "no stack here says what its wheels are resolved from", ", ".join(work.stacks), try_=remedy
            )
        )
    names += [f"{IMAGE}{name}" for name in work.lock.images]
    if pin in _by_hand(work.lock):
        raise Trouble(Problem("--update", f"this pin is {BY_HAND}", pin))
    if pin not in names:
        near = get_close_matches(pin, names, 1)
        remedy = f"--update={near[0]}" if near else ""
        raise Trouble(Problem("--update", "no such pin in the lock", pin, f"{', '.join(names)} or {EVERY}", remedy))
    return [pin]


def _tell(screen: Screen, what: str, checked: CheckedPin) -> None:
    if checked.problems:
        screen.say(f"failed  {what}", style="red")
    else:
        screen.say(f"ok      {what}: {'; '.join(('as locked', *checked.notes))}")


def _path(flags: Flags) -> Path:
    return Path(flags.lock or flags.root / "deepep.lock.toml")


def _replace(path: Path, old: str, new: str) -> None:
    """Put `new` into the place of the lock by one rename, after it was read back; a lock that is no longer `old` is
    left alone."""
    target = path.resolve()  # a link to the lock stays a link
    try:
        with whole_file(target, mode=0o600) as stream:
            stream.write(new.encode())
            stream.flush()
            status = target.stat()
            os.fchmod(stream.fileno(), status.st_mode & 0o7777)
            with suppress(PermissionError):  # only root can give a file away
                os.fchown(stream.fileno(), status.st_uid, status.st_gid)
            if replace(locks.read_lock_file(Path(stream.name)), path=str(path)) != locks.parse_lock(new, str(path)):
                raise Trouble(
                    Problem(str(target), "what was written reads back as something else", try_="the same command again")
                )
            if target.read_bytes() != old.encode():
                raise Trouble(
                    Problem(
                        str(target),
                        "was changed by somebody else while the pins were fetched",
                        try_="the same command again",
                    )
                )
    except OSError as error:
        raise Trouble(
            Problem(str(target), f"cannot be rewritten: {error.strerror}", try_="--dry-run shows the new values")
        ) from None
