"""`invoke gc`: remove generations beyond the newest few, and store entries that nobody needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import to_builtins

from deepep_bootstrap.bootstrap.orphans import ALLOCATION, OrphanRequest, Orphans, by_hand, find_orphans, remove_orphans
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import OK, TROUBLE, Problem
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.text import shortened, size
from deepep_bootstrap.inventory.flags import Flags, consent
from deepep_bootstrap.inventory.survey import number
from deepep_bootstrap.prefix import history
from deepep_bootstrap.prefix.access import Reached, reach
from deepep_bootstrap.prefix.contents import Holdings
from deepep_bootstrap.prefix.gc import Garbage, Holders, choose_garbage, find_holders, remarks
from deepep_bootstrap.prefix.history import CollectedGarbage

NOTHING = CollectedGarbage((), (), (), (), ())
SHOWN = 10
"""How many waiting jobs are named."""


def gc(flags: Flags, *, keep: str = "5", ignore_unreachable: bool = False) -> int:
    """Remove generations beyond the newest few, and store entries that no generation, running build or process of
    the hosts needs.

    Keep the `keep` newest generations and the current one, what they need, and what running builds and processes
    of the hosts use; remove the rest once that is confirmed. Nothing goes while a host is unseen that may use it,
    unless `ignore_unreachable` says so. What builds left that are gone goes without a question.
    Exit 1 where something could not be removed or a host could not be asked.
    """
    screen = Screen("gc", as_json=flags.json)
    count = number("--keep", keep)
    with reach(flags) as reached:
        garbage, users = find_garbage(reached, count)
        orphans = find_orphans(reached.transport, request_for(reached), reached.inventory.hosts)
        show_choice(screen, reached, (garbage, users), count)
        show_orphans(screen, orphans)
        done, left = NOTHING, tuple[Problem, ...]()
        refusal = refuse(flags, garbage, () if ignore_unreachable else unseen(reached, users))
        if not flags.dry_run and not refusal:
            done = history.collect(reached.transport, reached.place, reached.holdings, garbage)
            hosts = [host for host in reached.inventory.hosts if host.name in orphans.hosts]
            left = remove_orphans(reached.transport, request_for(reached), hosts)
    sizes = {entry.name: entry.size for entry in garbage.entries} | dict(reached.holdings.leftovers)
    gone = [*sizes] if flags.dry_run else [*done.entries, *done.leftovers]
    total = sum(sizes.get(name, 0) for name in gone)
    for name, who in done.kept:
        screen.say(f"  kept {shortened(name)}: in use since just now by {who}")
    if not refusal:
        screen.say(f"{'would free' if flags.dry_run else 'freed'} {size(total)}", style="bold")
    unasked = () if ignore_unreachable else users.unasked
    problems = [*reached.problems, *unasked, *refusal, *left, *(_stuck(reached, path) for path in done.stuck)]
    for problem in problems:
        screen.problem(problem)
    code = TROUBLE if done.stuck or unasked or refusal or left else OK
    content = document(reached.holdings, (garbage, users), done, dry_run=flags.dry_run)
    content |= {"orphans": [to_builtins(orphan) for orphan in orphans.found]}
    screen.document(code, problems, **content, keep=count, bytes=total)
    return code


def find_garbage(reached: Reached, keep: int) -> tuple[Garbage, Holders]:
    """Return what goes, and who uses some of what would have gone: that stays."""
    garbage = choose_garbage(reached.holdings, keep)
    names = [*(f"generations/{number}" for number in garbage.generations), *(entry.name for entry in garbage.entries)]
    users = find_holders(reached.transport, reached.place, reached.inventory.hosts, names) if names else Holders()
    return choose_garbage(reached.holdings, keep, users.by), users


def unseen(reached: Reached, users: Holders) -> tuple[Problem, ...]:
    """Return why nothing may go: hosts that may use some of it and could not be looked at."""
    silent = [problem.where for problem in users.unasked]
    if not silent:
        return ()
    others = fold(host.name for host in reached.inventory.hosts if host.name not in silent)
    what = "nobody can see what runs there, and it may use what goes, so nothing was removed"
    remedy = f"--limit={others.partition(' ')[0]}, or --ignore-unreachable" if others else "--ignore-unreachable"
    return (Problem(fold(silent), what, try_=f"the same command with {remedy}"),)


def refuse(flags: Flags, garbage: Garbage, unseen: tuple[Problem, ...]) -> tuple[Problem, ...]:
    """Return why nothing is removed: hosts that are unseen, or no yes; none where nothing goes that anybody may
    need."""
    if flags.dry_run or not (garbage.generations or garbage.entries):
        return ()
    if unseen:
        return unseen
    refusal = consent(flags, "gc", "Remove all this?")
    return (refusal,) if refusal else ()


def show_choice(screen: Screen, reached: Reached, choice: tuple[Garbage, Holders], keep: int) -> None:
    """Say what goes, what stays although nobody asked for it to stay, and what jobs lose."""
    prefix, holdings = reached.place.prefix, reached.holdings
    garbage, users = choice
    kept = [each for each in holdings.numbers if each not in garbage.generations]
    screen.say(prefix, style="bold")
    named = ", ".join(f"{each} (current)" if each == holdings.current else str(each) for each in kept)
    screen.say(f"  keep: {counted_generations(kept)} {named}" if kept else "  keep: no generation")
    for name, who in _in_use(holdings, garbage, users).items():
        screen.say(f"  keep: {shortened(name)}, in use by {who}")
    if not (garbage.generations or garbage.entries or holdings.leftovers):
        screen.say(f"  delete: nothing; the newest {keep} generations and the current one stay")
    for name, bytes_ in holdings.leftovers:
        screen.say(f"  delete: {name}  {size(bytes_)}, left by a build that is gone")
    if garbage.generations or garbage.entries:
        for line in delete_lines(garbage):
            screen.say(line)
        show_losers(screen, reached, users)


def delete_lines(garbage: Garbage) -> Iterator[str]:
    """Yield what goes: in one line how much, then the entries."""
    count, total = len(garbage.entries), sum(entry.size for entry in garbage.entries)
    numbers = ", ".join(map(str, garbage.generations))
    going = f"{counted_generations(garbage.generations)} {numbers}; " if numbers else ""
    entries = f"{count} store {'entry' if count == 1 else 'entries'}"
    yield f"  delete: {going}{entries}, {size(total)}{':' if count else ''}"
    yield from (f"    {shortened(entry.name)}  {size(entry.size)}" for entry in garbage.entries)


def counted_generations(numbers: Sequence[int]) -> str:
    """Return the word for one or several."""
    return "generation" if len(numbers) == 1 else "generations"


def request_for(reached: Reached) -> OrphanRequest:
    """Return where to look for what dead builds left."""
    return OrphanRequest(reached.place.prefix, reached.place.recipes, reached.place.user)


def show_orphans(screen: Screen, orphans: Orphans) -> None:
    """Say what dead builds left outside the store, which goes, and what nobody can judge."""
    for orphan in orphans.found:
        if orphan.dead:
            screen.say(f"  left by a build that is gone, on {orphan.host}: {orphan}")
        elif orphan.kind == ALLOCATION:
            screen.say(f"  stays: {orphan}. Try: {by_hand(orphan)}", style="yellow")
    for problem in orphans.unasked:
        screen.say(f"  {problem}", style="yellow")


def show_losers(screen: Screen, reached: Reached, users: Holders) -> None:
    """Print who may lose files that are still in use: jobs that no look at processes finds."""
    seen = fold(host.name for host in reached.inventory.hosts)
    screen.say(
        f"  Jobs that were submitted or started with what goes lose its files. Looked at: processes on {seen}.",
        style="yellow",
    )
    for remark in remarks(users):
        screen.say(f"  {remark}", style="yellow")
    if users.waiting:
        some = f"{', '.join(users.waiting[:SHOWN])}{' …' if len(users.waiting) > SHOWN else ''}"
        screen.say(
            f"  Jobs that wait in Slurm's queue, {len(users.waiting)}: {some}. Nobody can see what they will want.",
            style="yellow",
        )


def _in_use(holdings: Holdings, garbage: Garbage, users: Holders) -> dict[str, str]:
    """Return who uses what stays for that alone, by name: `generations/NUMBER`, then entries."""
    by = {**holdings.used, **users.by}
    numbers = {name: who for name, who in users.by.items() if name.startswith("generations/")}
    return numbers | {entry.name: by.get(entry.name, "what needs it") for entry in garbage.busy}


def document(
    holdings: Holdings, choice: tuple[Garbage, Holders], done: CollectedGarbage, *, dry_run: bool
) -> dict[str, Any]:
    """Return the keys of the JSON document: what is gone, or with `dry_run` what would go."""
    garbage, users = choice
    entries = [entry for entry in garbage.entries if dry_run or entry.name in done.entries]
    in_use = _in_use(holdings, garbage, users) | dict(done.kept)
    leftovers = dict(holdings.leftovers)
    names = [*leftovers] if dry_run else [*done.leftovers]
    return {
        "generations": list(garbage.generations if dry_run else done.generations),
        "entries": [{"name": entry.name, "bytes": entry.size} for entry in entries],
        "leftovers": [{"name": name, "bytes": leftovers.get(name, 0)} for name in names],
        "in_use": [{"name": name, "by": who} for name, who in in_use.items()],
        "queued": list(users.waiting),
    }


def _stuck(reached: Reached, path: str) -> Problem:
    what = "cannot be removed; it is out of use and can be tried again"
    return Problem(f"{reached.place.host.name} {path}", what, try_="invoke gc as its owner or root")
