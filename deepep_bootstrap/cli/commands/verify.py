"""`invoke verify`: the module as a user gets it on every host; with --store, the store compared with its
records.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

from deepep_bootstrap.analysis.diagnosis.outcomes import explained
from deepep_bootstrap.bootstrap import verify as proof
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import OK, TROUBLE, VERDICT, Problem, worst
from deepep_bootstrap.core.outcome import Outcome, outcome_json
from deepep_bootstrap.core.text import shortened
from deepep_bootstrap.inventory.survey import Flags, gather, open_connections, read_inventory, read_tree
from deepep_bootstrap.prefix import history
from deepep_bootstrap.prefix.access import candidates, reach
from deepep_bootstrap.prefix.archive import index, transfer
from deepep_bootstrap.prefix.archive.index import Tree
from deepep_bootstrap.prefix.archive.stream import open_archive, read_index
from deepep_bootstrap.prefix.contents import Holdings
from deepep_bootstrap.prefix.defects import find_defects
from deepep_bootstrap.prefix.history import EntryVerdict, FileChange
from deepep_bootstrap.prefix.offer import current_offer, offered_stacks


def verify(flags: Flags, *, store: bool = False, against: str = "") -> int:
    """Load the module of each offered stack (with --stack of that one) and import deep_ep through a login shell of
    every host; exit 4 where that does not give what was built, and where what was built has a known defect on its
    GPUs.

    With `store` read every file of the store instead; exit 4 where one is not as published. With `against`, an
    archive of `invoke export`, name the files of entries that came out otherwise where the archive was made; exit 4
    where one did."""
    if against:
        return compare_builds(flags, against)
    if store:
        return verify_store(flags)
    screen = Screen("verify", as_json=flags.json)
    inventory, prefix = read_inventory(flags)
    with open_connections(flags, inventory) as door:
        survey = gather(flags, door, inventory, prefix)
        records, default = offered_stacks(survey, flags.stack), current_offer(survey).default_stack
        found, unread = find_defects(flags, door, survey)
        generation = next(
            (survey.facts[host.name].prefix.generation for host in candidates(inventory) if host.name in survey.facts),
            0,
        )
        recipes = read_tree(flags.root / "recipes")
        outcomes: list[Outcome] = []
        for record in records:
            load = proof.Load("deepep" if default == record.stack else record.module)
            done = proof.verify_all(door, survey.reached, record, recipes, load=load, generation=generation)
            outcomes += done if len(records) == 1 else (replace(each, step=f"verify {record.stack}") for each in done)
    defects = [defect for defect in found if defect.stack in {record.stack for record in records}]
    problems = (*survey.problems, *unread)
    screen.outcomes(explained(outcomes, flags.root))
    for defect in defects:
        screen.say(f"blocking: {shortened(str(defect))}", style="red")
    for problem in problems:
        screen.problem(problem)
    code = worst([*(outcome.code for outcome in outcomes), *(VERDICT for _ in defects), *(TROUBLE for _ in problems)])
    modules = [record.module for record in records]
    told = {"outcomes": list(map(outcome_json, outcomes)), "defects": [asdict(defect) for defect in defects]}
    screen.document(code, problems, module=modules[0], modules=modules, **told)
    return code


def verify_store(flags: Flags) -> int:
    """Compare every entry with the record of its files, and what generations need with what is there; name each
    difference."""
    screen = Screen("verify", as_json=flags.json)
    with reach(flags) as reached:
        holdings = reached.holdings
        names = sorted({*holdings.entries, *(name for each in holdings.generations for name in holdings.missing(each))})
        screen.say(
            f"{reached.place.prefix}: reading {len(holdings.entries)} store entries on {reached.place.host.name}",
            style="bold",
        )
        verdicts = history.rehash(reached.door, reached.place, names)
    for verdict in verdicts:
        screen.say(f"  {shortened(verdict.name)}: {told(verdict)}", style="red" if is_bad(verdict) else "")
        for change in verdict.changes:
            screen.say(f"      {change.path}: {change.what}")
    bad = [verdict for verdict in verdicts if is_bad(verdict)]
    problems = [*reached.problems, *(remedy(verdict, holdings, reached.place.prefix) for verdict in bad)]
    if bad:
        screen.say(f"{len(bad)} of {len(verdicts)} entries are not as published.", style="red")
    elif verdicts:
        screen.say("every file is as published", style="bold")
    for problem in problems:
        screen.problem(problem)
    code = VERDICT if bad else OK
    screen.document(code, problems, prefix=reached.place.prefix, entries=[asdict(verdict) for verdict in verdicts])
    return code


def compare_builds(flags: Flags, against: str) -> int:
    """Compare entries of the same name with those in an archive: they were built from the same inputs, by another
    run or elsewhere."""
    screen = Screen("verify", as_json=flags.json)
    with open_archive(against) as stream:
        theirs = {tree.name: tree for tree in index.parse_index(read_index(stream, against), against).trees}
    with reach(flags) as reached:
        common = sorted(theirs.keys() & reached.holdings.entries.keys())
        ours = {tree.name: tree for tree in transfer.list_trees(reached.door, reached.place, common)} if common else {}
    verdicts = [EntryVerdict(name, "absent") for name in sorted(theirs.keys() - ours.keys())]
    for name, tree in sorted(ours.items()):
        changes = tuple(_changes(theirs[name], tree))
        verdicts.append(EntryVerdict(name, "changed" if changes else "same", changes))
    for verdict in verdicts:
        said = {
            "same": "the same in both",
            "absent": "not in this store",
            "changed": f"{len(verdict.changes)} files came out otherwise",
        }
        screen.say(
            f"  {shortened(verdict.name)}: {said[verdict.state]}", style="yellow" if verdict.state == "changed" else ""
        )
        for change in verdict.changes:
            screen.say(f"      {change.path}: {change.what}")
    differ = [verdict for verdict in verdicts if verdict.state == "changed"]
    if not common:
        screen.say(
            f"no entry of {against} is in {reached.place.prefix}: nothing was built from the same inputs in both",
            style="bold",
        )
    for problem in reached.problems:
        screen.problem(problem)
    code = VERDICT if differ or not common else OK
    screen.document(
        code, list(reached.problems), prefix=reached.place.prefix, entries=[asdict(verdict) for verdict in verdicts]
    )
    return code


def _changes(theirs: Tree, ours: Tree) -> Iterator[FileChange]:
    """Yield what differs between two builds, but for the manifest, which says when and where each was made."""
    was, now = (set(index.record(tree).decode(errors="backslashreplace").splitlines()[:-1]) for tree in (theirs, ours))
    for change in history.differences(sorted(was - now), sorted(now - was)):
        if change.path != "manifest.json":
            yield change


def is_bad(verdict: EntryVerdict) -> bool:
    """Return whether an entry is not what it has to be."""
    return verdict.state != "same"


def told(verdict: EntryVerdict) -> str:
    """Return the verdict on one entry for a person."""
    return {
        "same": "as published",
        "changed": f"{len(verdict.changes)} files are not as published",
        "missing": "is not there",
        "unrecorded": f"its {index.RECORD} is gone, and nothing else tells whether it is as published",
    }.get(verdict.state, verdict.state)


def remedy(verdict: EntryVerdict, holdings: Holdings, prefix: str) -> Problem:
    """Return what to do about an entry that is not what it has to be: where it lies, and who needs it."""
    path = f"{prefix}/store/{verdict.name}"
    users = [each for each in holdings.generations if verdict.name in holdings.closure(each.names)]
    modules = sorted({str(record.get("module", name)) for each in users for name, record in each.stacks.items()})
    if not users:
        return Problem(path, f"{told(verdict)}; no generation needs it", try_="invoke gc, which removes it")
    what = (
        f"{told(verdict)}; generation {', '.join(str(each.number) for each in users)} ({', '.join(modules)}) needs it"
    )
    away = "" if verdict.state == "missing" else f"rm -rf {path} when no job uses it, then "
    return Problem(path, what, try_=f"{away}invoke bootstrap with the lock of that generation, which builds it")
