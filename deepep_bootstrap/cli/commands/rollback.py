"""`invoke rollback`: an older (or any other) generation becomes the current one."""

from __future__ import annotations

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import OK, TROUBLE
from deepep_bootstrap.core.text import shortened
from deepep_bootstrap.inventory.flags import Flags, consent
from deepep_bootstrap.inventory.survey import number, read_tree
from deepep_bootstrap.prefix import history
from deepep_bootstrap.prefix.access import reach
from deepep_bootstrap.prefix.contents import Generation, Holdings, rollback_target
from deepep_bootstrap.prefix.defects import defects
from deepep_bootstrap.prefix.diff import OfferChange, difference, generation_facts
from deepep_bootstrap.prefix.offer import command_for

TOLD = frozenset(("site", "variable"))
"""Differences that users of a module see at once: where its sbatch files go, and what it sets."""
SHOWN = 10
"""How many of them are told."""


def rollback(flags: Flags, *, to: str = "") -> int:
    """Make the generation before the current one, or number --to, the current one; running jobs keep what they
    loaded.

    `current` is switched by one rename. Files of a generation
    name absolute store entries, so what runs keeps what it has. What users lose and gain, and known defects of what it
    offers, are named before the question."""
    screen = Screen("rollback", as_json=flags.json)
    wanted = number("--to", to) if to else 0
    with reach(flags) as reached:
        holdings, prefix = reached.holdings, reached.place.prefix
        target = rollback_target(holdings, wanted)
        change = target.number != holdings.current
        command = command_for(replace(flags, stack="", python=""))
        found = defects(holdings, target, read_tree(flags.root / "env"), command)
        switch = Switch.between(holdings, target)
        modules = [module for module, _ in target.modules]
        if change:
            tell_switch(screen, prefix, switch)
        else:
            screen.say(f"{prefix}: generation {target.number} is the current one already: {', '.join(modules)}")
        for defect in found:
            screen.say(f"blocking in generation {target.number}: {shortened(str(defect))}", style="red")
        doing = change and not flags.dry_run
        refusal = consent(flags, "rollback", "Roll back?") if doing else None
        if doing and not refusal:
            history.roll_back(reached.transport, reached.place, holdings, target)
            screen.say(f"generation {target.number} is the current one")
    problems = (*reached.problems, *([refusal] if refusal else []))
    for problem in problems:
        screen.problem(problem)
    code = TROUBLE if refusal else OK
    content = {"before": holdings.current, "to": target.number, "changed": doing and not refusal, "modules": modules}
    content |= {"lost": list(switch.lost), "gained": list(switch.gained)}
    screen.document(code, problems, prefix=prefix, **content, defects=[to_builtins(defect) for defect in found])
    return code


class Switch(Struct, frozen=True):
    """What another current generation means to users: modules `lost` and `gained`, `settings` that change (each a
    sentence), and how many differences there are `more`."""

    before: int
    to: int
    lost: tuple[str, ...]
    gained: tuple[str, ...]
    settings: tuple[str, ...]
    more: int

    @classmethod
    def between(cls, holdings: Holdings, target: Generation) -> Switch:
        """Return what going from the current generation to `target` means."""
        current = holdings.get(holdings.current) or Generation(0, {})
        had, has = dict(current.modules), dict(target.modules)
        sides = (generation_facts(holdings, each, {}) for each in (current, target))
        both = current.stacks.keys() & target.stacks.keys()
        changes = [
            change
            for change in difference(*sides)
            if change.name.partition(" ")[0] in both and (change.what, change.key) != ("stack", "module")
        ]
        told = [change for change in changes if change.what in TOLD]
        loaded, loads = had_by(current), had_by(target)
        default = (f"`module load deepep`: {loaded} → {loads}",) if loaded != loads and current.stacks else ()
        settings = (*default, *(f"{each.name} {each.key}: {old_and_new(each)}" for each in told))
        return cls(
            current.number,
            target.number,
            tuple(module for module in had if module not in has),
            tuple(module for module in has if module not in had),
            settings[:SHOWN],
            len(changes) - len(told) + len(settings[SHOWN:]),
        )


def had_by(generation: Generation) -> str:
    """Return the module that `module load deepep` gives in a generation."""
    return next((module for module, stack in generation.modules if stack == generation.default_stack), "nothing")


def old_and_new(change: OfferChange) -> str:
    """Return both sides of a change; that a side has none is said."""
    return f"{shortened(change.old) or '(none)'} → {shortened(change.new) or '(none)'}"


def tell_switch(screen: Screen, prefix: str, switch: Switch) -> None:
    """Print what users lose and gain."""
    before = switch.before or "none"
    screen.say(f"{prefix}: generation {before} → {switch.to} for every new `module load`", style="bold")
    for module in switch.lost:
        screen.say(f"  - {module} (gone)", style="red")
    for module in switch.gained:
        screen.say(f"  + {module} (again)", style="green")
    for line in switch.settings:
        screen.say(f"  ~ {line}")
    if switch.more:
        screen.say(f"  and {switch.more} more: invoke diff {switch.before} {switch.to}")
    screen.say(
        "Jobs that run keep what they loaded. `invoke bootstrap` offers what the lock says again, as a new generation."
    )
