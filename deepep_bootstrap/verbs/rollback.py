"""`invoke rollback`: an older (or any other) generation becomes the current one."""

from __future__ import annotations

from deepep_bootstrap import history
from deepep_bootstrap.errors import OK
from deepep_bootstrap.holdings import rollback_target
from deepep_bootstrap.reach import reach
from deepep_bootstrap.report import Screen
from deepep_bootstrap.survey import Flags, number


def rollback(flags: Flags, *, to: str = "") -> int:
    """Switch `current` to generation `to` ("" for the one before the current) by one rename. Files of a generation name absolute store
    entries, so what runs keeps what it has."""
    screen = Screen("rollback", as_json=flags.json)
    wanted = number("--to", to) if to else 0
    with reach(flags) as reached:
        holdings, prefix = reached.holdings, reached.place.prefix
        target = rollback_target(holdings, wanted)
        change = target.number != holdings.current
        if change and not flags.dry_run:
            history.roll_back(reached.door, reached.place, holdings, target)
    modules = [str(record.get("module", "")) for record in target.stacks.values()]
    said = "would make" if flags.dry_run else "made"
    if change:
        screen.say(f"{prefix}: {said} generation {target.number} the current one instead of {holdings.current}: {', '.join(modules)}")
        screen.say("Jobs that run keep what they loaded. `invoke bootstrap` offers what the lock says again, as a new generation.")
    else:
        screen.say(f"{prefix}: generation {target.number} is the current one already: {', '.join(modules)}")
    for problem in reached.problems:
        screen.problem(problem)
    changed = change and not flags.dry_run
    screen.document(OK, reached.problems, prefix=prefix, before=holdings.current, to=target.number, changed=changed, modules=modules)
    return OK
