"""`invoke diff`: the changes between two generations, or between two locks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import to_builtins

from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import OK, Problem, Trouble
from deepep_bootstrap.core.text import shortened
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.lock import model
from deepep_bootstrap.lock.model import Source
from deepep_bootstrap.prefix.access import reach
from deepep_bootstrap.prefix.contents import Generation, Holdings, find_generation
from deepep_bootstrap.prefix.diff import OfferChange, brief, difference, generation_facts, lines, lock_facts

LINES = 10
"""Lines that tell what changed without --verbose."""


def diff(flags: Flags, *, old: str, new: str, verbose: bool = False) -> int:
    """Say what changed between two generations (numbers) or two lock files (paths), in about ten lines; all of it
    with --verbose.

    Exit 0 whatever that is.
    """
    screen = Screen("diff", as_json=flags.json)
    numbers = [text for text in (old, new) if text.isascii() and text.isdigit()]
    problems: Sequence[Problem] = ()
    if len(numbers) == 2:
        changes, problems = of_generations(flags, int(old), int(new))
        names = (f"generation {int(old)}", f"generation {int(new)}")
    elif not numbers:
        changes = difference(lock_facts(model.read_lock_file(old)), lock_facts(model.read_lock_file(new)))
        names = (old, new)
    else:
        found = f"{old} and {new}"
        raise Trouble(
            Problem(
                "invoke diff", "a generation and a lock cannot be compared", found, "two numbers, or two lock files"
            )
        )
    screen.say(f"{names[0]} → {names[1]}" + ("" if changes else ": no difference"), style="bold")
    for line in lines(changes) if verbose else in_short(changes):
        screen.say(shortened(line))
    for problem in problems:
        screen.problem(problem)
    screen.document(OK, problems, old=names[0], new=names[1], changes=[to_builtins(change) for change in changes])
    return OK


def in_short(changes: Sequence[OfferChange]) -> Iterator[str]:
    """Yield LINES lines of what changed, and how much more there is."""
    told = brief(changes)
    yield from (f"  {line}" for line in told[:LINES])
    if len(told) > LINES:
        yield f"  and {len(told) - LINES} lines more"
    if changes:
        yield f"{len(changes)} facts differ; --verbose tells each."


def of_generations(flags: Flags, old: int, new: int) -> tuple[tuple[OfferChange, ...], Sequence[Problem]]:
    """Return what differs between two generations of the prefix, and which hosts did not answer before one did."""
    with reach(flags, locks=True) as reached:
        holdings = reached.holdings
    both = [find_generation(holdings, number) for number in (old, new)]
    sides = [generation_facts(holdings, each, sources_by_hash(holdings, each)) for each in both]
    return difference(*sides), reached.problems


def sources_by_hash(holdings: Holdings, own: Generation) -> dict[str, Source]:
    """Return what the locks of all generations pin, by content hash; what its `own` lock says counts most, and a
    lock of another version of this program is left out. A generation may offer a stack that was built from an
    earlier one's lock."""
    found: dict[str, Source] = {}
    for generation in (*holdings.generations, own):
        try:
            pinned = model.parse_lock(generation.lock, f"generations/{generation.number}/deepep.lock.toml")
        except Trouble:
            continue
        found |= {source.hash: source for source in pinned.sources.values()}
    return found
