"""`invoke test`: upstream's tests, through Slurm where it runs, followed to their end."""

from __future__ import annotations

import shlex

from deepep_bootstrap import verify
from deepep_bootstrap.errors import TROUBLE, Problem, Trouble, worst
from deepep_bootstrap.plan import Outcome
from deepep_bootstrap.report import Screen, outcome_json
from deepep_bootstrap.survey import Flags, Survey, gather, number, offered_stack, open_door, read_inventory, read_tree


def test(flags: Flags, *, kind: str, args: str, start_timeout: str) -> int:
    """Run one test and pass its verdict on: 0 passed, 4 failed, 1 could not be run. `args` go to upstream's test.

    With --dry-run it only says what would run where.
    """
    screen = Screen("test", as_json=flags.json)
    if kind not in verify.KINDS:
        raise Trouble(Problem("--kind", "no such test", found=kind, wanted=", ".join(verify.KINDS)))
    patience, words = number("--start-timeout", start_timeout), split(args)
    inventory, prefix = read_inventory(flags)
    with open_door(flags, inventory) as door:
        survey = gather(flags, door, inventory, prefix)
        record = offered_stack(survey, flags.stack)
        name, slurm = where_to_run(survey, kind)
        wish = verify.Test(kind, record, words, slurm, patience)
        command = shlex.join(["sbatch" if slurm else "bash", wish.file, *words])
        screen.say(f"{kind} test of {record.module}: {name} {'would run' if flags.dry_run else 'runs'} {command}")
        outcome = Outcome(f"{kind} test", name, "skipped", "--dry-run")
        if not flags.dry_run:
            shown: list[str] = []

            def show(line: str) -> None:
                shown.append(line)
                screen.say(line)

            outcome = verify.run_test(door, survey.host(name), wish, read_tree(flags.root / "recipes"), on_line=show)
            if outcome.log and not shown:
                screen.say(f"{name} does not see the job's output: {outcome.log} on the node that ran it")
            screen.say()
            screen.outcomes([outcome])
    for problem in survey.problems:
        screen.problem(problem)
    code = worst([outcome.code, *(TROUBLE for _ in survey.problems)])
    screen.document(code, survey.problems, kind=kind, module=record.module, command=command, outcome=outcome_json(outcome))
    return code


def split(args: str) -> tuple[str, ...]:
    """Return the words of --args."""
    try:
        return tuple(shlex.split(args))
    except ValueError:
        raise Trouble(Problem("--args", "a quotation mark is not closed", found=args)) from None


def where_to_run(survey: Survey, kind: str) -> tuple[str, bool]:
    """Return the host that submits or runs the test, and whether Slurm does it."""
    wanted = survey.inventory.settings.slurm_host
    if wanted and wanted not in survey.facts:
        raise Trouble(Problem(f"{survey.inventory.path}: slurm_host", "this host did not answer", found=wanted), *survey.problems)
    clients = [name for name, seen in survey.facts.items() if seen.slurm.works and seen.slurm.sbatch]
    if wanted or clients:
        logins = [host.name for host in survey.reached if host.role == "login" and host.name in clients]
        return wanted or (logins or clients)[0], True
    if kind == "internode":
        raise Trouble(
            Problem(survey.inventory.path, "no Slurm client on any host", wanted="sbatch for a test across nodes", try_="--kind=intranode")
        )
    gpu_hosts = [host.name for host in survey.reached if host.role == "gpu"]
    if not gpu_hosts:
        raise Trouble(Problem(survey.inventory.path, "no GPU host answered", wanted="a host with role=gpu to run the test on"))
    return gpu_hosts[0], False
