"""`invoke rollback`: an older (or any other) generation becomes the current one."""

from __future__ import annotations

from msgspec import to_builtins
from msgspec.structs import replace

from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import OK
from deepep_bootstrap.core.text import shortened
from deepep_bootstrap.inventory.survey import Flags, number, read_tree
from deepep_bootstrap.prefix import history
from deepep_bootstrap.prefix.access import reach
from deepep_bootstrap.prefix.contents import rollback_target
from deepep_bootstrap.prefix.defects import defects
from deepep_bootstrap.prefix.offer import command_for


def rollback(flags: Flags, *, to: str = "") -> int:
    """Make the generation before the current one, or number --to, the current one; running jobs keep what they
    loaded.

    `current` is switched by one rename. Files of a generation
    name absolute store entries, so what runs keeps what it has. Known defects of what it offers are named before the
    switch; they do not keep anybody from it."""
    screen = Screen("rollback", as_json=flags.json)
    wanted = number("--to", to) if to else 0
    with reach(flags) as reached:
        holdings, prefix = reached.holdings, reached.place.prefix
        target = rollback_target(holdings, wanted)
        change = target.number != holdings.current
        command = command_for(replace(flags, stack="", python=""))
        found = defects(holdings, target, read_tree(flags.root / "env"), command)
        for defect in found:
            screen.say(f"blocking in generation {target.number}: {shortened(str(defect))}", style="red")
        if change and not flags.dry_run:
            history.roll_back(reached.transport, reached.place, holdings, target)
    modules = [str(record.get("module", "")) for record in target.stacks.values()]
    made = "would make" if flags.dry_run else "made"
    if change:
        screen.say(
            f"{prefix}: {made} generation {target.number} the current one instead of {holdings.current}: "
            f"{', '.join(modules)}"
        )
        screen.say(
            "Jobs that run keep what they loaded. `invoke bootstrap` offers what the lock says again, as a new "
            "generation."
        )
    else:
        screen.say(f"{prefix}: generation {target.number} is the current one already: {', '.join(modules)}")
    for problem in reached.problems:
        screen.problem(problem)
    changed = change and not flags.dry_run
    switch = {"before": holdings.current, "to": target.number, "changed": changed, "modules": modules}
    screen.document(OK, reached.problems, prefix=prefix, **switch, defects=[to_builtins(defect) for defect in found])
    return OK
