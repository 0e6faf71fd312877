"""`invoke plan`: what bootstrap would do and why."""

from __future__ import annotations

from deepep_bootstrap import plan as planning
from deepep_bootstrap.errors import CHANGES, OK
from deepep_bootstrap.report import Screen, plan_json
from deepep_bootstrap.survey import Flags, gather, open_door, read_inventory, read_lock, request_for


def plan(flags: Flags, *, check: bool = False) -> int:
    """Print the plan; exit 0, or 2 with `check` when there is something to do. Hosts that did not answer are named."""
    screen = Screen("plan", as_json=flags.json)
    lock, stack = read_lock(flags)
    inventory, prefix = read_inventory(flags)
    with open_door(flags, inventory) as door:
        survey = gather(flags, door, inventory, prefix)
    made = planning.make(request_for(flags, survey, lock, stack), survey.facts)
    screen.plan(made)
    for problem in survey.problems:
        screen.problem(problem)
    code = CHANGES if check and made.steps else OK
    screen.document(code, survey.problems, **plan_json(made))
    return code
