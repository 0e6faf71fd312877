"""`invoke generations`: the offers of the prefix over time, and the current one."""

from __future__ import annotations

from typing import Any

from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import OK
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.text import size
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.prefix.access import reach
from deepep_bootstrap.prefix.contents import Generation, Holdings

DIGEST_SHOWN = 7


def generations(flags: Flags) -> int:
    """List what the prefix offered over time and what it offers now: number, date, stacks, hosts, size.

    Newest first; with who made it, its lock, its modules, its folder and its own size.
    """
    screen = Screen("generations", as_json=flags.json)
    with reach(flags) as reached:
        holdings, prefix = reached.holdings, reached.place.prefix
    rows = [row_of(holdings, generation, prefix) for generation in reversed(holdings.generations)]
    screen.say(
        f"prefix {prefix}: {len(rows)} generation{'' if len(rows) == 1 else 's'}, "
        f"{len(holdings.entries)} store entries",
        style="bold",
    )
    if not rows:
        screen.say("  nothing is offered yet: `invoke bootstrap` builds and offers")
    for row in rows:
        show(screen, row)
    for problem in reached.problems:
        screen.problem(problem)
    screen.document(OK, reached.problems, prefix=prefix, current=holdings.current, generations=rows)
    return OK


def row_of(holdings: Holdings, generation: Generation, prefix: str) -> dict[str, Any]:
    """Return one generation for the JSON document."""
    manifest = generation.manifest
    return {
        "number": generation.number,
        "current": generation.number == holdings.current,
        "readable": generation.readable,
        "created": str(manifest.get("created", "")),
        "by": str(manifest.get("by", "")),
        "lock_digest": str(manifest.get("lock_digest", "")),
        "stacks": [
            {"stack": name, "module": str(record.get("module", "")), "default": name == generation.default_stack}
            for name, record in generation.stacks.items()
        ],
        "hosts": [str(name) for name in manifest.get("hosts", ())],
        "folder": f"{prefix}/generations/{generation.number}",
        "entries": sorted(holdings.closure(generation.names)),
        "missing": list(holdings.missing(generation)),
        "own_bytes": holdings.own_bytes(generation),
    }


def show(screen: Screen, row: dict[str, Any]) -> None:
    """Print one generation in a few lines."""
    mark, note = ("*", " (current)") if row["current"] else (" ", "")
    if not row["readable"]:
        screen.say(f"{mark} {row['number']}{note}  {row['folder']}: its manifest cannot be read", style="yellow")
        return
    lock = row["lock_digest"][:DIGEST_SHOWN]
    screen.say(
        f"{mark} {row['number']}{note}  {row['created']}  {row['by']}  lock {lock}",
        style="bold" if row["current"] else "",
    )
    for stack in row["stacks"]:
        screen.say(
            f"      module {stack['module']}" + (" (what `module load deepep` gives)" if stack["default"] else "")
        )
    screen.say(f"      {row['folder']}, {size(row['own_bytes'])} in the store that no other generation needs")
    screen.say(f"      hosts {fold(row['hosts']) if row['hosts'] else 'unknown'}")
    for name in row["missing"]:
        screen.say(f"      missing in the store: {name}", style="red")
