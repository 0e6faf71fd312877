"""`invoke verify`: what a user gets on every host."""

from __future__ import annotations

from deepep_bootstrap import verify as proof
from deepep_bootstrap.errors import TROUBLE, worst
from deepep_bootstrap.report import Screen, outcome_json
from deepep_bootstrap.survey import Flags, current_offer, gather, offered_stack, open_door, read_inventory, read_tree


def verify(flags: Flags) -> int:
    """Load the module and import deep_ep through a login shell of every host; exit 4 where that does not give what was built."""
    screen = Screen("verify", as_json=flags.json)
    inventory, prefix = read_inventory(flags)
    with open_door(flags, inventory) as door:
        survey = gather(flags, door, inventory, prefix)
        record = offered_stack(survey, flags.stack)
        load = "deepep" if current_offer(survey).default_stack == record.stack else record.module
        outcomes = proof.verify_all(door, survey.reached, record, read_tree(flags.root / "recipes"), load=load)
    screen.outcomes(outcomes)
    for problem in survey.problems:
        screen.problem(problem)
    code = worst([*(outcome.code for outcome in outcomes), *(TROUBLE for _ in survey.problems)])
    screen.document(code, survey.problems, module=record.module, outcomes=[outcome_json(outcome) for outcome in outcomes])
    return code
