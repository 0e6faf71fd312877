"""`invoke verify`: the module as a user gets it on every host; with --store, the store compared with its
records.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import to_builtins
from msgspec.structs import replace

from deepep_bootstrap.analysis.diagnosis.outcomes import explained
from deepep_bootstrap.bootstrap import verify as proof
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import OK, TROUBLE, VERDICT, Problem, worst
from deepep_bootstrap.core.outcome import Outcome, outcome_json
from deepep_bootstrap.core.text import shortened
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.survey import Survey, gather, read_inventory, read_tree
from deepep_bootstrap.plan.decisions import without_gpu
from deepep_bootstrap.prefix import history
from deepep_bootstrap.prefix.access import candidates, find_unsafe, reach, unsafe_problems
from deepep_bootstrap.prefix.contents import RECORD, Holdings
from deepep_bootstrap.prefix.defects import find_defects
from deepep_bootstrap.prefix.history import EntryVerdict
from deepep_bootstrap.prefix.offer import StackRecord, current_offer, offered_stacks
from deepep_bootstrap.remote.jobs import Transport
from deepep_bootstrap.slurm.fanout import open_ways


def verify(flags: Flags, *, store: bool = False) -> int:
    """Load the module and import deep_ep through a login shell of every host; say which NVSHMEM is really used.

    The module of each offered stack (with --stack of that one); exit 4 where that does not give what was built, and
    where what was built has a known defect on its GPUs.

    With `store` read every file of the store instead; exit 4 where one is not as published.
    """
    if store:
        return verify_store(flags)
    screen = Screen("verify", as_json=flags.json)
    inventory, prefix = read_inventory(flags)
    with open_ways(flags, inventory) as connections:
        survey = gather(flags, connections, inventory, prefix)
        records = offered_stacks(survey, flags.stack)
        found, unread = find_defects(flags, connections, survey)
        outcomes = _load_modules(flags, connections, survey, records)
    stacks = {record.stack for record in records}
    defects = [defect for defect in found if defect.stack in stacks]
    problems = (*survey.problems, *unread)
    screen.outcomes(explained(outcomes, flags.root))
    for defect in defects:
        screen.say(f"blocking: {shortened(str(defect))}", style="red")
    screen.problems(problems)
    codes = [outcome.code for outcome in outcomes]
    codes += [VERDICT] * len(defects) + [TROUBLE] * len(problems)
    code = worst(codes)
    modules = [record.module for record in records]
    screen.document(
        code,
        problems,
        module=modules[0],
        modules=modules,
        outcomes=[outcome_json(outcome) for outcome in outcomes],
        defects=[to_builtins(defect) for defect in defects],
    )
    return code


def _load_modules(
    flags: Flags, connections: Transport, survey: Survey, records: Sequence[StackRecord]
) -> list[Outcome]:
    """Load the module of each stack on every host that answered; with several stacks each outcome names its own."""
    offer = current_offer(survey)
    default = offer.stacks[offer.default_stack].module
    generation = _current_generation(survey)
    recipes = read_tree(flags.root / "recipes")
    outcomes: list[Outcome] = []
    for record in records:
        load = proof.Load("deepep" if default == record.module else record.module)
        done = proof.verify_all(
            connections,
            proof.of_machine(survey, record),
            record,
            recipes,
            load=load,
            generation=generation,
            without_gpu=without_gpu(survey.inventory, survey.facts),
        )
        if len(records) > 1:
            outcomes += [replace(each, step=f"verify {record.stack}") for each in done]
        else:
            outcomes += done
    return outcomes


def _current_generation(survey: Survey) -> int:
    """Return the number of the current generation as the first host with the prefix says it; 0 where none does."""
    for host in candidates(survey.inventory):
        if host.name in survey.facts:
            return survey.facts[host.name].prefix.generation
    return 0


def verify_store(flags: Flags) -> int:
    """Compare every entry with the record of its files, that record with its sum in the generations, and what
    generations need with what is there; name each difference, and each path that somebody else may change."""
    screen = Screen("verify", as_json=flags.json)
    with reach(flags) as reached:
        holdings = reached.holdings
        names = sorted({*holdings.entries, *(name for each in holdings.generations for name in holdings.missing(each))})
        screen.say(
            f"{reached.place.prefix}: reading {len(holdings.entries)} store entries on {reached.place.host.name}",
            style="bold",
        )
        verdicts = history.hold_to_generations(history.rehash(reached.transport, reached.place, names), holdings)
        unsafe = find_unsafe(reached.transport, reached.place)
    for verdict in verdicts:
        screen.say(f"  {shortened(verdict.name)}: {describe(verdict)}", style="red" if is_bad(verdict) else "")
        for change in verdict.changes:
            screen.say(f"      {change.path}: {change.what}")
    bad = [verdict for verdict in verdicts if is_bad(verdict)]
    problems = [*reached.problems, *(remedy(verdict, holdings, reached.place.prefix) for verdict in bad)]
    problems += unsafe_problems(reached.place, unsafe)
    if bad:
        screen.say(f"{len(bad)} of {len(verdicts)} entries are not as published.", style="red")
    elif verdicts and not unsafe:
        screen.say("every file is as published", style="bold")
    if alone := [verdict for verdict in verdicts if verdict.state == "same" and not verdict.generation]:
        screen.say(
            f"For {len(alone)} of {len(verdicts)} entries only the record in themselves says so: no generation keeps "
            f"its sum, since none names them, or an earlier version published it. The next generation will.",
            style="dim",
        )
    screen.problems(problems)
    code = VERDICT if bad or unsafe else OK
    document = {
        "entries": [to_builtins(verdict) for verdict in verdicts],
        "unsafe": [to_builtins(each) for each in unsafe],
    }
    screen.document(code, problems, prefix=reached.place.prefix, **document)
    return code


def is_bad(verdict: EntryVerdict) -> bool:
    """Return whether an entry is not what it has to be."""
    return verdict.state != "same"


def describe(verdict: EntryVerdict) -> str:
    """Return the verdict on one entry for a person."""
    return {
        "same": "as published",
        "changed": f"{len(verdict.changes)} files are not as published",
        "missing": "is not there",
        "unrecorded": f"its {RECORD} is gone, and nothing else tells whether it is as published",
    }.get(verdict.state, verdict.state)


def remedy(verdict: EntryVerdict, holdings: Holdings, prefix: str) -> Problem:
    """Return what to do about an entry that is not what it has to be: where it lies, and who needs it."""
    path = f"{prefix}/store/{verdict.name}"
    users = [each for each in holdings.generations if verdict.name in holdings.closure(each.names)]
    modules = sorted({str(record.get("module", name)) for each in users for name, record in each.stacks.items()})
    if not users:
        return Problem(path, f"{describe(verdict)}; no generation needs it", try_="invoke gc, which removes it")
    numbers = ", ".join(str(each.number) for each in users)
    what = f"{describe(verdict)}; generation {numbers} ({', '.join(modules)}) needs it"
    away = "" if verdict.state == "missing" else f"rm -rf {path} when no job uses it, then "
    return Problem(path, what, try_=f"{away}invoke bootstrap with the lock of that generation, which builds it")
