"""`invoke test`: upstream's tests, through Slurm where it runs, followed to their end."""

from __future__ import annotations

import shlex

from deepep_bootstrap import verify
from deepep_bootstrap.errors import Problem, Trouble
from deepep_bootstrap.report import Screen, outcome_json
from deepep_bootstrap.survey import Flags, Survey, gather, offered_stack, open_door, read_inventory, read_tree


def test(flags: Flags, *, kind: str, args: str, start_timeout: int) -> int:
    """Run one test and pass its verdict on: 0 passed, 4 failed, 1 could not be run. `args` go to upstream's test."""
    screen = Screen("test", as_json=flags.json)
    if kind not in verify.KINDS:
        raise Trouble(Problem("--kind", "no such test", found=kind, wanted=", ".join(verify.KINDS)))
    inventory, prefix = read_inventory(flags)
    with open_door(flags, inventory) as door:
        survey = gather(flags, door, inventory, prefix)
        record = offered_stack(survey, flags.stack)
        name, slurm = where_to_run(survey, kind)
        wish = verify.Test(kind, record, tuple(shlex.split(args)), slurm, start_timeout)
        screen.say(f"{kind} test of {record.module}, {'submitted' if slurm else 'run'} on {name}")
        recipes = read_tree(flags.root / "recipes")
        outcome = verify.run_test(door, survey.host(name), wish, recipes, on_line=screen.say)
    screen.ended(outcome)
    for problem in survey.problems:
        screen.problem(problem)
    screen.document(outcome.code, survey.problems, kind=kind, module=record.module, outcome=outcome_json(outcome))
    return outcome.code


def where_to_run(survey: Survey, kind: str) -> tuple[str, bool]:
    """Return the host that submits or runs the test, and whether Slurm does it."""
    wanted = survey.inventory.settings.slurm_host
    clients = [name for name, seen in survey.facts.items() if seen.slurm.works and seen.slurm.sbatch]
    if wanted or clients:
        logins = [host.name for host in survey.reached if host.role == "login" and host.name in clients]
        return wanted or (logins or clients)[0], True
    if kind == "internode":
        raise Trouble(
            Problem(survey.inventory.path, "no Slurm client on any host", wanted="sbatch for a test across nodes", try_="--kind=intranode")
        )
    return next(host.name for host in survey.reached if host.role == "gpu"), False
