"""The steps of a plan and their reasons, as lines, as a table for a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.text import shortened, size
from deepep_bootstrap.plan.steps import Plan, Step


def show_plan(screen: Screen, plan: Plan) -> None:
    """Print the steps with their reasons, equal ones folded over hosts, and the estimate."""
    for note in plan.notes:
        screen.say(f"note: {note}", style="dim")
    if not plan.steps:
        screen.say("Nothing to do: everything wanted is there.")
        return
    if screen.is_wide:
        screen.show(plan_table(plan.steps))
    else:
        for step in plan.steps:
            screen.say(plan_line(step))
    if plan.download_bytes or plan.disk_bytes:
        screen.say(
            f"Estimate: download up to {size(plan.download_bytes)}, about {size(plan.disk_bytes)} on the prefix."
        )


def plan_line(step: Step) -> str:
    """Return a step and its reason as one line."""
    return (
        f"{step.title} on {fold(step.hosts)}: found {shortened(step.reason.found)}, wanted "
        f"{shortened(step.reason.wanted)}"
    )


def plan_table(steps: Sequence[Step]) -> Table:
    """Return the steps and their reasons as a table for a terminal."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("step", "hosts", "found", "wanted"):
        table.add_column(heading, overflow="fold")
    for step in steps:
        cells = (step.title, fold(step.hosts), shortened(step.reason.found), shortened(step.reason.wanted))
        table.add_row(*(escape(cell) for cell in cells))
    return table


def step_json(step: Step) -> dict[str, Any]:
    """Return one step of a plan for the JSON document."""
    reason = {"found": step.reason.found, "wanted": step.reason.wanted}
    return {"kind": step.kind, "name": step.name, "title": step.title, "hosts": list(step.hosts), "reason": reason}


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the keys of a plan for the JSON document."""
    estimate = {"download_bytes": plan.download_bytes, "disk_bytes": plan.disk_bytes}
    return {
        "steps": [step_json(step) for step in plan.steps],
        "notes": list(plan.notes),
        "estimate": estimate,
        "chosen": plan.chosen(),
    }
