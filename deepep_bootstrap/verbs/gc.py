"""`invoke gc`: remove generations beyond the newest few, and store entries that nobody needs."""

from __future__ import annotations

from typing import Any

from deepep_bootstrap import history
from deepep_bootstrap.errors import OK, TROUBLE, Problem
from deepep_bootstrap.history import Collected
from deepep_bootstrap.holdings import Garbage, Holdings, choose_garbage
from deepep_bootstrap.reach import Reached, confirm, reach
from deepep_bootstrap.report import Screen, shortened, size
from deepep_bootstrap.survey import Flags, number

NOTHING = Collected((), (), (), (), ())


def gc(flags: Flags, *, keep: str = "5") -> int:
    """Keep the `keep` newest generations and the current one, what they need and what running builds need; remove the rest of store and
    generations. Exit 1 where something could not be removed."""
    screen = Screen("gc", as_json=flags.json)
    count = number("--keep", keep)
    with reach(flags) as reached:
        garbage = choose_garbage(reached.holdings, count)
        show_choice(screen, reached, garbage, count)
        done = NOTHING
        if not flags.dry_run:
            if garbage.generations or garbage.entries:
                confirm("gc", silent=flags.yes or flags.json)
            done = history.collect(reached.door, reached.place, reached.holdings, garbage)
    sizes = {entry.name: entry.size for entry in garbage.entries} | dict(reached.holdings.leftovers)
    gone = [*sizes] if flags.dry_run else [*done.entries, *done.leftovers]
    total = sum(sizes.get(name, 0) for name in gone)
    for name, who in done.kept:
        screen.say(f"  kept {shortened(name)}: in use since just now by {who}")
    screen.say(f"{'would free' if flags.dry_run else 'freed'} {total} bytes ({size(total)})", style="bold")
    problems = [*reached.problems, *(_stuck(reached, path) for path in done.stuck)]
    for problem in problems:
        screen.problem(problem)
    code = TROUBLE if done.stuck else OK
    screen.document(code, problems, **document(reached.holdings, garbage, done, dry_run=flags.dry_run), keep=count, bytes=total)
    return code


def show_choice(screen: Screen, reached: Reached, garbage: Garbage, keep: int) -> None:
    """Say what goes and what stays although no generation needs it."""
    prefix, holdings = reached.place.prefix, reached.holdings
    kept = [each for each in holdings.numbers if each not in garbage.generations]
    screen.say(f"{prefix}: the newest {keep} generations stay, and the current one: {', '.join(map(str, kept)) or 'none'}", style="bold")
    for each in garbage.generations:
        screen.say(f"  generation {each}")
    for entry in garbage.entries:
        screen.say(f"  {shortened(entry.name)}  {entry.size} bytes ({size(entry.size)})")
    for name, bytes_ in holdings.leftovers:
        screen.say(f"  {name}  {bytes_} bytes, left by a build that is gone")
    for entry in garbage.busy:
        screen.say(f"  stays: {shortened(entry.name)}, a running build needs it ({holdings.used.get(entry.name, 'through another entry')})")
    if not (garbage.generations or garbage.entries or holdings.leftovers):
        screen.say("  nothing to remove")


def document(holdings: Holdings, garbage: Garbage, done: Collected, *, dry_run: bool) -> dict[str, Any]:
    """Return the keys of the JSON document: what is gone, or with `dry_run` what would go."""
    entries = [entry for entry in garbage.entries if dry_run or entry.name in done.entries]
    in_use = {entry.name: holdings.used.get(entry.name, "") for entry in garbage.busy} | dict(done.kept)
    leftovers = dict(holdings.leftovers)
    names = [*leftovers] if dry_run else [*done.leftovers]
    return {
        "generations": list(garbage.generations if dry_run else done.generations),
        "entries": [{"name": entry.name, "bytes": entry.size} for entry in entries],
        "leftovers": [{"name": name, "bytes": leftovers.get(name, 0)} for name in names],
        "in_use": [{"name": name, "by": who} for name, who in in_use.items()],
    }


def _stuck(reached: Reached, path: str) -> Problem:
    what = "cannot be removed; it is out of use and can be tried again"
    return Problem(f"{reached.place.host.name} {path}", what, try_="invoke gc as its owner or root")
