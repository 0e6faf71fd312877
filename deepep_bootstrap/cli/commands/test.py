"""`invoke test`: one test on the hosts, through Slurm where it runs, followed to its end, brought back and
judged.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from deepep_bootstrap.analysis import assess, limits, reference_file, site_references
from deepep_bootstrap.analysis.assess import Assessment, Books
from deepep_bootstrap.analysis.diagnosis import engine
from deepep_bootstrap.analysis.diagnosis.engine import Diagnosis
from deepep_bootstrap.analysis.results import model, wording
from deepep_bootstrap.analysis.tuning import shelf, sweep
from deepep_bootstrap.analysis.verdict import BELOW
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import OK, TROUBLE, VERDICT, Problem, Trouble, worst
from deepep_bootstrap.core.outcome import Outcome, outcome_json
from deepep_bootstrap.core.text import parse_time
from deepep_bootstrap.inventory.facts import Facts, facts_json
from deepep_bootstrap.inventory.survey import Flags, Survey, gather, number, open_door, read_inventory, read_tree
from deepep_bootstrap.prefix import test_kinds
from deepep_bootstrap.prefix.generations import PrefixHandle
from deepep_bootstrap.prefix.offer import offered_stack
from deepep_bootstrap.remote.fleet import ConnectionPool
from deepep_bootstrap.report import summary
from deepep_bootstrap.testing import collect, run_folder, slurm_run, ssh_run
from deepep_bootstrap.testing.collect import RunFiles
from deepep_bootstrap.testing.placement import Placement, find_spot
from deepep_bootstrap.testing.run_folder import TestRun
from deepep_bootstrap.testing.slurm_run import TestRequest, TestRunResult

UNSAID = 124
"""The exit code of a run that reached its time limit before it could say one; that of timeout(1)."""

NOTHING = Assessment((), (), (), Diagnosis((), ()), failed=True)


@dataclass(frozen=True)
class TestFlags:
    """The flags of the verb, read: the kind's name, words for the script, "slurm", "ssh" or "" for whichever there
    is, nodes (0: the kind's own number), seconds to wait for nodes and to run (0: the kind's own), and whether the
    figures become the site's references."""

    kind: str
    args: tuple[str, ...]
    via: str
    nodes: int
    start_limit: int
    time_limit: int
    save: bool


@dataclass(frozen=True)
class TestContext:
    """What following a test needs: the door, the hosts, where it runs, and what people see of it."""

    flags: Flags
    screen: Screen
    door: ConnectionPool
    survey: Survey
    spot: Placement
    recipes: Mapping[str, str]
    templates: Mapping[str, str]


@dataclass(frozen=True)
class KeptResult:
    """What of a run stays for later ones: documents of tuned settings by path, and how many figures became
    references."""

    tuned: tuple[str, ...] = ()
    references: int = 0


@dataclass(frozen=True)
class Result:
    """A run that was brought back and judged: the run, what its nodes are, what was found, the books, the site's own
    files."""

    run: TestRun
    facts: Mapping[str, Facts]
    found: Assessment
    books: Books
    site: Mapping[str, str]


@dataclass(frozen=True)
class TestSummary:
    """What a person was told: how it ended, and of a test that ran what it left and what was found. `place` is its
    folder, `problems` why what it left could not be looked at."""

    outcome: Outcome
    result: Result | None = None
    place: str = ""
    silent: tuple[str, ...] = ()
    kept: KeptResult = KeptResult()
    remarks: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return the keys of the JSON document that a finished test has; empty ones without."""
        run, found = (self.result.run, self.result.found) if self.result else (None, NOTHING)
        return {
            "run": {"name": run.name if run else "", "folder": self.place, "values": dict(run.values) if run else {}},
            "tests": [model.as_json(tested) for tested in found.tests],
            "verdicts": [verdict.as_json() for verdict in found.verdicts],
            "traffic": [{**vars(nic), "errors": dict(nic.errors)} for nic in found.traffic],
            **engine.as_json(found.diagnosis),
            "silent": list(self.silent),
            "kept": {"tuned": list(self.kept.tuned), "references": self.kept.references},
            "remarks": list(self.remarks),
        }


def read_test_flags(kind: str, args: str, via: str, *, nodes: str, limits: tuple[str, str], save: bool) -> TestFlags:
    """Return the flags of the verb; `limits` are --start-timeout and --time-limit. Trouble for one that cannot be
    read."""
    test_kinds.known_kind(kind)
    count = number("--nodes", nodes) if nodes else 0
    seconds = int(parse_time("--time-limit", limits[1])) if limits[1] else 0
    return TestFlags(kind, split(args), via, count, number("--start-timeout", limits[0]), seconds, save)


def split(args: str) -> tuple[str, ...]:
    """Return the words of --args."""
    try:
        return tuple(shlex.split(args))
    except ValueError:
        raise Trouble(Problem("--args", "a quotation mark is not closed", found=args)) from None


def test(flags: Flags, asked: TestFlags) -> int:
    """Run one test and pass its verdict on: 0 passed, 4 failed or below its reference, 1 could not be run.

    With --dry-run it only says what would run where.
    """
    screen = Screen("test", as_json=flags.json)
    inventory, prefix = read_inventory(flags)
    with open_door(flags, inventory) as door:
        survey = gather(flags, door, inventory, prefix)
        record = offered_stack(survey, flags.stack)
        kind = test_kinds.find_kind(asked.kind, record)
        busy = flags.on_busy_host == "use"
        spot = find_spot(survey, kind, asked.nodes, via=asked.via, limited=bool(flags.limit), use_busy=busy)
        wish = TestRequest(
            kind,
            record,
            slurm_run.run_name(kind.name),
            spot.count,
            asked.time_limit or kind.minutes * 60,
            args=asked.args,
            named=spot.named,
            start_limit=asked.start_limit,
            user=inventory.settings.build_user,
            capability=ssh_run.capability(spot.hosts, survey.facts),
        )
        command = shlex.join(
            ["sbatch", *wish.options, wish.file, *wish.args] if spot.client else ["bash", wish.file, *wish.args]
        )
        for note in spot.notes:
            screen.say(f"note: {note}", style="dim")
        screen.say(
            f"{kind.name} test of {record.module}: {spot.where} {'would run' if flags.dry_run else 'runs'} {command}"
        )
        told = TestSummary(Outcome(f"{kind.name} test", spot.where, "skipped", "--dry-run"))
        if flags.dry_run and spot.client and (refused := slurm_run.never_runs(door, spot.client, wish)):
            told = replace(
                told,
                problems=(
                    Problem(spot.where, "Slurm would refuse this test", refused, try_="sinfo there, and --nodes"),
                ),
            )
        elif not flags.dry_run:
            scene = TestContext(
                flags, screen, door, survey, spot, read_tree(flags.root / "recipes"), read_tree(flags.root / "env")
            )
            went = follow(scene, wish)
            try:
                told = conclude(scene, wish, went, save=asked.save)
            except Trouble as trouble:
                screen.outcomes([went.outcome])
                told = TestSummary(went.outcome, place=went.place, problems=trouble.problems)
    problems = (*survey.problems, *told.problems)
    for problem in problems:
        screen.problem(problem)
    code = worst([told.outcome.code, *(TROUBLE for _ in problems)])
    head = {"kind": kind.name, "module": record.module, "command": command, "outcome": outcome_json(told.outcome)}
    screen.document(code, problems, **head, **told.document())
    return code


def follow(scene: TestContext, wish: TestRequest) -> TestRunResult:
    """Run the test and show what it prints."""
    shown: list[str] = []

    def show(line: str) -> None:
        shown.append(line)
        scene.screen.say(line)

    if scene.spot.client:
        went = slurm_run.submit(scene.door, scene.spot.client, wish, scene.recipes, on_line=show)
        if went.began and not shown:
            scene.screen.say(
                f"{went.host.name} does not see the job's output: {went.outcome.log} on the node that ran it"
            )
        return went
    address = ssh_run.meeting_address(scene.spot.hosts, scene.survey.facts) if scene.spot.count > 1 else ""
    return ssh_run.run_over_ssh(scene.door, scene.spot.hosts, wish, scene.recipes, address=address, on_line=show)


def conclude(scene: TestContext, wish: TestRequest, went: TestRunResult, *, save: bool) -> TestSummary:
    """Bring back what a test left, judge it, keep what is worth keeping, and tell all of it."""
    screen, place = scene.screen, PrefixHandle(went.host, wish.record.prefix, scene.recipes, wish.user)
    if not went.began:
        screen.say()
        screen.outcomes([went.outcome])
        return TestSummary(went.outcome)
    run, facts, collected = bring_back(scene, wish, went, place)
    site = {name: collect.read_site(scene.door, place, name) for name in (assess.CAUSES, reference_file.FILE)}
    books = assess.read_books(scene.templates, site, f"{went.host.name} {place.prefix}")
    found = assess.assess(run, facts, books)
    silent = slurm_run.silent(went.said, run.nodes)
    outcome = judged(went, found, silent)
    result = Result(run, facts, found, books, site)
    unkept = summary.unkept(went.outcome.code, found) if save else ""
    kept, remarks = keep_result(scene, place, result, save=save and not unkept)
    screen.say()
    for text, style in summary.lines(found):
        screen.say(text, style=style)
    left_out = tuple(f"{missing} bytes of {name} are left out" for name, missing in collected.cut.items())
    remarks = (*remarks, *left_out, *((f"nothing was kept as reference: {unkept}",) if unkept else ()))
    for remark in remarks:
        screen.say(f"note: {remark}", style="dim")
    for line in (
        *kept.tuned,
        *([f"{kept.references} figures are now references of this site"] if kept.references else []),
    ):
        screen.say(f"kept: {line}")
    screen.say()
    screen.outcomes([outcome])
    screen.say(f"\nLogs and counters: {went.place} on {went.host.name}")
    flags = (("hosts", scene.flags.hosts), ("limit", scene.flags.limit), ("prefix", scene.flags.prefix))
    screen.next_commands(
        [shlex.join(["invoke", "report", wish.name, *(f"--{name}={value}" for name, value in flags if value)])]
    )
    return TestSummary(outcome, result, went.place, silent, kept, remarks)


def bring_back(
    scene: TestContext, wish: TestRequest, went: TestRunResult, place: PrefixHandle
) -> tuple[TestRun, dict[str, Facts], RunFiles]:
    """Return what the run left, with what its nodes are; both are in its folder afterwards."""
    # Without Slurm the host that wrote the end is the one that is asked, and what was cut off wrote none.
    patience = collect.PATIENCE if scene.spot.client and went.state == slurm_run.ENDED else 0
    collected = collect.collect(scene.door, place, went.place, patience=patience)
    files = dict(collected.files)
    values = run_folder.parse_values(files.get(run_folder.VALUES, ""), run_folder.VALUES)
    ended = {"ended": str(int(time.time())), "code": str(UNSAID if went.state == slurm_run.HUNG else 1)}
    lines = [f"time_limit={wish.time_limit}", *(f"{key}={value}" for key, value in ended.items() if key not in values)]
    nodes = [name for name in values.get("nodes", "").split(",") if name]
    facts = assess.by_node(scene.survey.facts, nodes)
    new = {run_folder.FACTS: json.dumps({"schema": 1, "hosts": facts_json(facts)}, indent=1)}
    if went.log:
        new["job.log"] = went.log
    collect.keep_files(
        scene.door, place, went.place, lines=lines, files={name: text.encode() for name, text in new.items()}
    )
    files |= new | {
        run_folder.VALUES: "\n".join([files.get(run_folder.VALUES, "").rstrip("\n"), *lines, ""]).lstrip("\n")
    }
    return run_folder.of_files(wish.name, files), facts, replace(collected, files=files)


def judged(went: TestRunResult, found: Assessment, silent: tuple[str, ...]) -> Outcome:
    """Return the outcome of a run with what its files say: upstream's exit code alone proves nothing."""
    outcome = went.outcome
    if outcome.code != OK:
        wrong = filter(None, map(wording.wrong, found.tests))
        return replace(outcome, detail="; ".join([outcome.detail, *wrong, *found.own_words, *silent]))
    if found.failed:
        faults = [fault for tested in found.tests for fault in wording.faults(tested)] or [
            "its output says nothing of a test"
        ]
        return replace(
            outcome,
            state="failed",
            code=VERDICT,
            detail=f"{outcome.detail} as its exit code says, but {'; '.join(faults)}",
        )
    slow = [f"rank {rank.rank} is slow" for tested in found.tests for rank in tested.ranks if rank.state != "ok"]
    checked = [
        f"checked {wording.checked(tested.turn)}" for tested in found.tests if tested.turn and tested.is_later_pass
    ]
    outcome = replace(outcome, detail="; ".join([outcome.detail, *checked, *slow[:3]]))
    if low := [verdict for verdict in found.verdicts if verdict.state == BELOW]:
        named = "; ".join(dict.fromkeys(f"{verdict.host} {verdict.text}".strip() for verdict in low[:3]))
        more = f", and {len(low) - 3} more" if len(low) > 3 else ""
        return replace(outcome, state="failed", code=VERDICT, detail=f"{outcome.detail}, but {named}{more}")
    return outcome


def keep_result(
    scene: TestContext, place: PrefixHandle, result: Result, *, save: bool
) -> tuple[KeptResult, tuple[str, ...]]:
    """Keep what a run is worth to later ones: settings that its sweep found best, and with `save` its figures as
    references.

    Where the user may not write in the prefix, settings are not kept, and a remark says so; references were asked for:
    Trouble.
    """
    run, found = result.run, result.found
    hosts = list(result.facts.values())
    gpu, nodes = limits.gpu_of(hosts), len(run.nodes) or 1
    remarks: list[str] = []
    kept: tuple[str, ...] = ()
    if not found.failed:
        documents, why_not = sweep.documents(found.tests, sweep.made_by(run, gpu))
        remarks += why_not
        try:
            stored = shelf.store(scene.door, place, documents, scene.templates[shelf.MODULE])
            kept = tuple(f"{one.path} ({one.state})" for one in stored.kept)
            remarks += [str(problem) for problem in stored.problems]
        except Trouble as trouble:
            remarks += [str(problem) for problem in trouble.problems]
    saved = 0
    if save:
        made = site_references.saved(
            result.site.get(reference_file.FILE, ""),
            found.tests,
            hosts,
            run=run.name,
            date=time.strftime("%Y-%m-%d", time.gmtime()),
            nodes=nodes,
            book=result.books.references,
            where=f"{place.prefix}/{reference_file.FILE}",
        )
        saved, remarks = (
            made.count,
            [*remarks, *([f"nothing was kept as reference: {made.why_not}"] if made.why_not else [])],
        )
        if saved:
            collect.write_site(scene.door, place, reference_file.FILE, made.text)
    return KeptResult(kept, saved), tuple(remarks)
