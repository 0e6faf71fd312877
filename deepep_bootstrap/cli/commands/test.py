"""`invoke test`: one test on the hosts, through Slurm where it runs, followed to its end, brought back and
judged.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct, structs
from msgspec.structs import replace

from deepep_bootstrap.analysis import assess, compare, reference_file, site_references
from deepep_bootstrap.analysis.assess import Assessment, AssessmentRules, judge_run
from deepep_bootstrap.analysis.diagnosis import engine
from deepep_bootstrap.analysis.diagnosis.engine import Diagnosis
from deepep_bootstrap.analysis.node_lists import FAILING, NodeLists, list_nodes
from deepep_bootstrap.analysis.results import model
from deepep_bootstrap.analysis.tuning import shelf, sweep
from deepep_bootstrap.bootstrap.planning import look_at_hosts
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import OK, TROUBLE, VERDICT, Problem, Trouble, worst
from deepep_bootstrap.core.guard import state_dir
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.outcome import Outcome, outcome_json
from deepep_bootstrap.core.text import parse_time, size
from deepep_bootstrap.inventory.facts import Facts, facts_json
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.survey import Survey, number, open_connections, read_inventory, read_tree
from deepep_bootstrap.kube.client import connect
from deepep_bootstrap.kube.runs import ClusterRun, read_objects
from deepep_bootstrap.kubernetes import manifests as made
from deepep_bootstrap.kubernetes import run as cluster_run
from deepep_bootstrap.kubernetes.run import ClusterTest, Ran
from deepep_bootstrap.kubernetes.settings import read_settings
from deepep_bootstrap.lock import model as locks
from deepep_bootstrap.prefix import test_kinds
from deepep_bootstrap.prefix.generations import PrefixHandle
from deepep_bootstrap.prefix.offer import offered_stack
from deepep_bootstrap.report import load, summary
from deepep_bootstrap.testing import run_folder, slurm_run, ssh_run
from deepep_bootstrap.testing.placement import Placement, find_placement
from deepep_bootstrap.testing.run_folder import Judgement, RunFiles, RunVerdict, TestRun
from deepep_bootstrap.testing.slurm_run import TestRequest, TestRunResult

if TYPE_CHECKING:
    from deepep_bootstrap.remote.fleet import ConnectionPool

UNSAID = 124
"""The exit code of a run that reached its time limit before it could say one; that of timeout(1)."""

NOTHING = Assessment((), (), (), Diagnosis((), ()), failed=True)


class TestFlags(Struct, frozen=True):
    """The flags of the verb, read: the kind's name, words for the script, "slurm", "ssh", "kubernetes" or "" for
    whichever of the first two there is, nodes (0: the kind's own number), seconds to wait for nodes (0: the usual) and
    to run (0: the kind's own), and whether the figures become the site's references."""

    kind: str
    args: tuple[str, ...]
    via: str
    nodes: int
    start_limit: int
    time_limit: int
    save: bool


class ClusterFlags(Struct, frozen=True):
    """The flags that say which cluster of Kubernetes, and how pods are made there; "" for those not given."""

    platform: str = ""
    settings: str = ""
    context: str = ""
    kubeconfig: str = ""
    namespace: str = ""

    def named(self) -> tuple[tuple[str, str], ...]:
        """Return them as a person types them."""
        names = ("--for", "--settings", "--context", "--kubeconfig", "--namespace")
        values = (self.platform, self.settings, self.context, self.kubeconfig, self.namespace)
        return tuple(zip(names, values, strict=True))


class TestContext(Struct, frozen=True):
    """What following a test needs: the connections, the hosts, where it runs, and what people see of it."""

    flags: Flags
    screen: Screen
    transport: ConnectionPool
    survey: Survey
    spot: Placement
    recipes: Mapping[str, str]
    templates: Mapping[str, str]


class KeptResult(Struct, frozen=True):
    """What of a run stays for later ones: documents of tuned settings by path, and how many figures became
    references."""

    tuned: tuple[str, ...] = ()
    references: int = 0


class Result(Struct, frozen=True):
    """A run that was brought back and judged: the run, the facts of its nodes, what was found, the rules it was judged
    by, the site's own files."""

    run: TestRun
    facts: Mapping[str, Facts]
    found: Assessment
    rules: AssessmentRules
    site: Mapping[str, str]


class TestSummary(Struct, frozen=True):
    """The summary of a test for people and as JSON: how it ended, and of a test that ran what it left and what was
    found. `place` is its folder, `problems` why what it left could not be looked at."""

    outcome: Outcome
    result: Result | None = None
    place: str = ""
    silent: tuple[str, ...] = ()
    kept: KeptResult = KeptResult()
    remarks: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    judgement: Judgement | None = None
    nodes: NodeLists = NodeLists()

    def document(self) -> dict[str, Any]:
        """Return the keys of the JSON document that a finished test has; empty ones without."""
        run, found = (self.result.run, self.result.found) if self.result else (None, NOTHING)
        judgement = self.judgement
        return {
            "verdict": judgement.verdict.value if judgement else "",
            "why": judgement.why if judgement else "",
            "failure": engine.line_json(found.failure),
            "run": {"name": run.name if run else "", "folder": self.place, "values": dict(run.values) if run else {}},
            "tests": [model.as_json(tested) for tested in found.tests],
            "verdicts": [verdict.as_json() for verdict in found.verdicts],
            "traffic": [{**structs.asdict(nic), "errors": dict(nic.errors)} for nic in found.traffic],
            **engine.as_json(found.diagnosis),
            "silent": list(self.silent),
            "nodes": {"passing": list(self.nodes.passing), "failing": list(self.nodes.failing)},
            "kept": {"tuned": list(self.kept.tuned), "references": self.kept.references},
            "remarks": list(self.remarks),
        }


def read_test_flags(
    kind: str, args: str, via: str, *, nodes: str, start_timeout: str, time_limit: str, save: bool
) -> TestFlags:
    """Return the flags of the verb; Trouble for one that cannot be read."""
    test_kinds.known_kind(kind)
    count = number("--nodes", nodes) if nodes else 0
    seconds = int(parse_time("--time-limit", time_limit)) if time_limit else 0
    start = number("--start-timeout", start_timeout) if start_timeout else 0
    return TestFlags(kind, split(args), via, count, start, seconds, save)


def split(args: str) -> tuple[str, ...]:
    """Return the words of --args."""
    try:
        return tuple(shlex.split(args))
    except ValueError:
        raise Trouble(Problem("--args", "a quotation mark is not closed", found=args)) from None


def test(
    flags: Flags,
    *,
    kind: str = "internode",
    args: str = "",
    via: str = "",
    nodes: str = "",
    start_timeout: str = "",
    time_limit: str = "",
    save_as_reference: bool = False,
    for_: str = "",
    settings: str = "",
    context: str = "",
    kubeconfig: str = "",
    namespace: str = "",
) -> int:
    """Run a test (through Slurm where it runs), compare its figures and traffic with references, say what is wrong
    and why.

    The verdict is passed on: 0 passed, 4 failed or below its reference, 1 could not be run. With --dry-run it only says
    what would run where.
    """
    options = read_test_flags(
        kind, args, via, nodes=nodes, start_timeout=start_timeout, time_limit=time_limit, save=save_as_reference
    )
    place = ClusterFlags(for_, settings, context, kubeconfig, namespace)
    if via == cluster_run.VIA:
        return run_on_kubernetes(flags, options, place)
    if given := [name for name, value in place.named() if value]:
        raise Trouble(Problem(given[0], "is for tests on Kubernetes", try_=f"--via={cluster_run.VIA}"))
    return run_test(flags, options)


def run_test(flags: Flags, options: TestFlags) -> int:
    """Run one test and return the exit code of its verdict."""
    screen = Screen("test", as_json=flags.json)
    inventory, prefix = read_inventory(flags)
    with open_connections(flags, inventory) as transport:
        survey = look_at_hosts(flags, transport, inventory, prefix)
        record = offered_stack(survey, flags.stack)
        kind = test_kinds.find_kind(options.kind, record)
        busy = flags.on_busy_host == "use"
        spot = find_placement(survey, kind, options.nodes, via=options.via, limited=bool(flags.limit), use_busy=busy)
        request = TestRequest(
            kind,
            record,
            slurm_run.run_name(kind.name),
            spot.count,
            options.time_limit or kind.minutes * 60,
            args=options.args,
            named=spot.named,
            start_limit=options.start_limit or slurm_run.START_LIMIT,
            user=inventory.settings.build_user,
            capability=ssh_run.capability(spot.hosts, survey.facts),
        )
        command = shlex.join(
            ["sbatch", *request.options, request.file, *request.args]
            if spot.client
            else ["bash", request.file, *request.args]
        )
        for note in spot.notes:
            screen.say(f"note: {note}", style="dim")
        screen.say(
            f"{kind.name} test of {record.module}: {spot.where} {'would run' if flags.dry_run else 'runs'} {command}"
        )
        conclusion = TestSummary(Outcome(f"{kind.name} test", spot.where, "skipped", "--dry-run"))
        if flags.dry_run and spot.client and (refused := slurm_run.never_runs(transport, spot.client, request)):
            conclusion = replace(
                conclusion,
                problems=(
                    Problem(spot.where, "Slurm would refuse this test", refused, try_="sinfo there, and --nodes"),
                ),
            )
        elif not flags.dry_run:
            context = TestContext(
                flags, screen, transport, survey, spot, read_tree(flags.root / "recipes"), read_tree(flags.root / "env")
            )
            run_result = follow(context, request)
            try:
                conclusion = conclude(context, request, run_result, save=options.save)
            except Trouble as trouble:
                screen.outcomes([run_result.outcome])
                conclusion = TestSummary(run_result.outcome, place=run_result.place, problems=trouble.problems)
    problems = (*survey.problems, *conclusion.problems)
    for problem in problems:
        screen.problem(problem)
    code = worst([conclusion.outcome.code, *(TROUBLE for _ in problems)])
    head = {"kind": kind.name, "module": record.module, "command": command, "outcome": outcome_json(conclusion.outcome)}
    screen.document(code, problems, **head, **conclusion.document())
    return code


def follow(context: TestContext, request: TestRequest) -> TestRunResult:
    """Run the test and show what it prints."""
    shown = False

    def show(line: str) -> None:
        nonlocal shown
        shown = True
        context.screen.say(line)

    if context.spot.client:
        run_result = slurm_run.submit(context.transport, context.spot.client, request, context.recipes, on_line=show)
        if run_result.began and not shown:
            place = f"{run_result.outcome.log} on the node that ran it"
            context.screen.say(f"{run_result.host.name} does not see the job's output: {place}")
        return run_result
    address = ssh_run.meeting_address(context.spot.hosts, context.survey.facts) if context.spot.count > 1 else ""
    return ssh_run.run_over_ssh(
        context.transport, context.spot.hosts, request, context.recipes, address=address, on_line=show
    )


def conclude(context: TestContext, request: TestRequest, run_result: TestRunResult, *, save: bool) -> TestSummary:
    """Bring back what a test left, judge it, keep what is worth keeping, and print all of it."""
    screen, place = context.screen, PrefixHandle(run_result.host, request.record.prefix, context.recipes, request.user)
    if not run_result.began:
        screen.say()
        screen.outcomes([run_result.outcome])
        return TestSummary(run_result.outcome)
    run, facts, collected = bring_back(context, request, run_result, place)
    site = {name: run_folder.read_site(context.transport, place, name) for name in (assess.CAUSES, reference_file.FILE)}
    rules = assess.read_rules(context.templates, site, f"{run_result.host.name} {place.prefix}")
    found = assess.assess(run, facts, rules)
    silent = slurm_run.silent(run_result.last_output, run.nodes)
    judgement = judged(run, run_result, found, silent)
    outcome = outcome_of(run_result, judgement)
    nodes = list_nodes(run, facts, found, judgement, rules.causes)
    run_folder.keep_judgement(context.transport, place, run_result.place, judgement, nodes.files())
    result = Result(run, facts, found, rules, site)
    unkept = summary.unkept(run_result.outcome.code, found) if save else ""
    kept, remarks = keep_result(context, place, result, save=save and not unkept)
    show_findings(screen, found, request.kind.name)
    left_out = tuple(f"{size(missing)} of {name} are left out" for name, missing in collected.cut.items())
    remarks = (*remarks, *left_out, *((f"nothing was kept as reference: {unkept}",) if unkept else ()))
    for remark in remarks:
        screen.say(f"note: {remark}", style="dim")
    for document in kept.tuned:
        screen.say(tuning_line(document))
    if kept.references:
        screen.say(f"kept: {kept.references} figures are now references of this site")
    screen.say()
    screen.outcomes([outcome])
    screen.say(f"\nLogs and counters: {run_result.place} on {run_result.host.name}")
    if nodes.failing:
        screen.say(f"At fault: {fold(nodes.failing)}; without: sbatch --exclude={run_result.place}/{FAILING} …")
    flags = (("hosts", context.flags.hosts), ("limit", context.flags.limit), ("prefix", context.flags.prefix))
    report = shlex.join(["invoke", "report", request.name, *(f"--{name}={value}" for name, value in flags if value)])
    again = "" if judgement.verdict is RunVerdict.PASSED else load.rerun(context.flags, run)
    screen.next_commands([report, *([f"{again}    # the same test again"] if again else [])])
    return TestSummary(outcome, result, run_result.place, silent, kept, remarks, judgement=judgement, nodes=nodes)


def show_findings(screen: Screen, found: Assessment, kind: str) -> None:
    """Show what was found."""
    screen.say()
    for text, style in summary.lines(found, kind):
        screen.say(text, style=style)


def run_on_kubernetes(flags: Flags, options: TestFlags, place: ClusterFlags) -> int:
    """Run one test in a cluster of Kubernetes and return the exit code of its verdict; its folder is on this
    machine."""
    screen = Screen("test", as_json=flags.json)
    texts = read_tree(flags.root / "env")
    test, inputs, work, command = plan_in_cluster(flags, options, place, texts)
    namespace = place.namespace or inputs.settings.namespace
    where = f"{place.context or 'the current context'}, namespace {namespace}"
    said = "would run" if flags.dry_run else "runs"
    screen.say(f"{test.kind.name} test of stack {inputs.stack.name}: {where} {said} {command}")
    conclusion = TestSummary(Outcome(f"{test.kind.name} test", place.context, "skipped", "--dry-run"))
    problems: tuple[Problem, ...] = ()
    if not flags.dry_run:
        cluster = connect(place.context, kubeconfig=place.kubeconfig, namespace=namespace)
        try:
            run = ClusterRun(cluster, namespace, test.name)
            ran = cluster_run.run_in_cluster(
                run, read_objects(made.render_test(inputs, work)), test, on_line=screen.say
            )
        finally:
            cluster.close()
        conclusion, problems = conclude_in_cluster(screen, test, ran, texts, (command, place)), ran.problems
    for problem in problems:
        screen.problem(problem)
    code = worst([conclusion.outcome.code, *(TROUBLE for _ in problems)])
    head = {"kind": test.kind.name, "module": "", "command": command, "outcome": outcome_json(conclusion.outcome)}
    screen.document(code, problems, **head, **conclusion.document())
    return code


def plan_in_cluster(
    flags: Flags, options: TestFlags, place: ClusterFlags, texts: Mapping[str, str]
) -> tuple[ClusterTest, made.Inputs, made.Workload, str]:
    """Return the test, what its objects are made of, and what is run in words. Trouble for flags that lack or do not
    fit, and for what is wrong with the settings."""
    wanted = (("--for", place.platform, "gke-a4, gke-a3 or generic"), ("--settings", place.settings, "a settings file"))
    if lacking := [Problem(flag, "is missing", wanted=words) for flag, value, words in wanted if not value]:
        raise Trouble(*lacking)
    if options.save:
        what = "references are kept in a prefix, which a test on Kubernetes has not"
        raise Trouble(Problem("--save-as-reference", what))
    asked = read_settings(place.settings, place.platform)
    lock = locks.read_lock_file(flags.lock or flags.root / "deepep.lock.toml")
    name = flags.stack or lock.default_stack
    if name not in lock.stacks:
        raise Trouble(Problem("--stack", "no such stack in the lock", name, " or ".join(lock.stacks)))
    kind = test_kinds.KINDS[options.kind]
    nodes = options.nodes or (asked.nodes if kind.nodes > 1 else kind.nodes)
    run = slurm_run.run_name(kind.name)
    seconds = options.time_limit or kind.minutes * 60
    start = options.start_limit or asked.start_minutes * 60
    # The Job's own deadline counts the wait for nodes too.
    asked = replace(asked, start_minutes=-(-start // 60))
    inputs = made.Inputs(asked, lock, lock.stacks[name], {}, texts)
    work = made.followed(inputs, kind, run, nodes=nodes, seconds=seconds, words=options.args)
    folder = state_dir() / "tests" / run
    test = ClusterTest(kind, run, nodes, start, seconds, folder, shlex.join(options.args))
    return test, inputs, work, f"{work.form} {work.name} on {nodes} node{'s' * (nodes > 1)}"


def conclude_in_cluster(
    screen: Screen, test: ClusterTest, ran: Ran, texts: Mapping[str, str], place: tuple[str, ClusterFlags]
) -> TestSummary:
    """Judge what a test in a cluster left, keep the verdict in its folder, and print all of it."""
    result = ran.result
    if not result.began:
        screen.say()
        screen.outcomes([result.outcome])
        return TestSummary(result.outcome)
    run = run_folder.of_files(test.name, run_folder.of_folder(test.folder))
    rules = assess.read_rules(texts, {}, test.name)
    found = assess.assess(run, ran.facts, rules)
    silent = slurm_run.silent(result.last_output, run.nodes)
    judgement = judged(run, result, found, silent)
    outcome = outcome_of(result, judgement)
    nodes = list_nodes(run, ran.facts, found, judgement, rules.causes, ran.lost)
    kept = {run_folder.VERDICT: run_folder.judgement_text(judgement).encode(), **nodes.files()}
    for name, data in kept.items():
        (test.folder / name).write_bytes(data)
    show_findings(screen, found, test.kind.name)
    screen.say()
    screen.outcomes([outcome])
    screen.say(f"\nLogs and counters: {test.folder}")
    if nodes.failing:
        screen.say(f"At fault: {fold(nodes.failing)}; without: kubectl cordon {' '.join(nodes.failing)}")
    again = "" if judgement.verdict is RunVerdict.PASSED else again_in_cluster(test, place[1])
    report = shlex.join(["invoke", "report", str(test.folder)])
    screen.next_commands([report, *([f"{again}    # the same test again"] if again else [])])
    kept_result = Result(run, ran.facts, found, rules, {})
    return TestSummary(outcome, kept_result, str(test.folder), silent, judgement=judgement, nodes=nodes)


def again_in_cluster(test: ClusterTest, place: ClusterFlags) -> str:
    """Return the command that runs the same test again."""
    flags = [f"{name}={value}" for name, value in place.named() if value]
    args = [f"--args={test.args}"] if test.args else []
    kind = f"--kind={test.kind.name}"
    return shlex.join(["invoke", "test", f"--via={cluster_run.VIA}", kind, f"--nodes={test.nodes}", *args, *flags])


def bring_back(
    context: TestContext, request: TestRequest, run_result: TestRunResult, place: PrefixHandle
) -> tuple[TestRun, dict[str, Facts], RunFiles]:
    """Return what the run left, with what its nodes are; both are in its folder afterwards."""
    # Without Slurm the host that wrote the end is the one that is asked, and what was cut off wrote none.
    patience = run_folder.PATIENCE if context.spot.client and run_result.state == slurm_run.ENDED else 0
    collected = run_folder.collect(context.transport, place, run_result.place, patience=patience)
    files = dict(collected.files)
    values = run_folder.parse_values(files.get(run_folder.VALUES, ""), run_folder.VALUES)
    ended = {"ended": str(int(time.time())), "code": str(UNSAID if run_result.state == slurm_run.HUNG else 1)}
    lines = [
        f"time_limit={request.time_limit}",
        *(f"{key}={value}" for key, value in ended.items() if key not in values),
    ]
    nodes = [name for name in values.get("nodes", "").split(",") if name]
    facts = assess.by_node(context.survey.facts, nodes)
    new = {run_folder.FACTS: json.dumps({"schema": 1, "hosts": facts_json(facts)}, indent=1)}
    if run_result.log:
        new["job.log"] = run_result.log
    run_folder.keep_files(
        context.transport,
        place,
        run_result.place,
        lines=lines,
        files={name: text.encode() for name, text in new.items()},
    )
    files |= new | {
        run_folder.VALUES: "\n".join([files.get(run_folder.VALUES, "").rstrip("\n"), *lines, ""]).lstrip("\n")
    }
    return run_folder.of_files(request.name, files), facts, replace(collected, files=files)


def judged(run: TestRun, run_result: TestRunResult, found: Assessment, silent: tuple[str, ...]) -> Judgement:
    """Return the verdict on a run. Whoever followed it knows what its files do not say: that it was stopped, that its
    time was over, that Slurm counts it as failed."""
    if run_result.state == slurm_run.STOPPED:
        return Judgement(RunVerdict.STOPPED, run_result.ending)
    if run_result.state in {slurm_run.HUNG, slurm_run.LOST}:
        return Judgement(RunVerdict.FAILED, "; ".join([run_result.ending, *silent[:1]]))
    judgement = judge_run(run, found)
    if run_result.outcome.code != OK and judgement.verdict is not RunVerdict.FAILED:
        return Judgement(RunVerdict.FAILED, run_result.ending)
    return judgement


def outcome_of(run_result: TestRunResult, judgement: Judgement) -> Outcome:
    """Return the outcome of a run with its verdict: upstream's exit code alone proves nothing."""
    code = OK if judgement.verdict is RunVerdict.PASSED else run_result.outcome.code or VERDICT
    detail = f"{run_result.where}: {judgement.why}"
    return replace(run_result.outcome, state=judgement.verdict.value, code=code, detail=detail)


def tuning_line(document: str) -> str:
    """Return for a person what became of settings that a sweep found best: "PATH (new)" says which."""
    path, _, state = document.removesuffix(")").rpartition(" (")
    if state in {"slower", "older"}:
        return f"tuning: {state} than before, settings unchanged ({path})"
    return f"tuning: {state} settings in {path}"


def keep_result(
    context: TestContext, place: PrefixHandle, result: Result, *, save: bool
) -> tuple[KeptResult, tuple[str, ...]]:
    """Keep what a run is worth to later ones: settings that its sweep found best, and with `save` its figures as
    references.

    Where the user may not write in the prefix, settings are not kept, and a remark says so; references were asked for:
    Trouble.
    """
    run, found = result.run, result.found
    hosts = list(result.facts.values())
    gpu, nodes = compare.gpu_of(hosts), len(run.nodes) or 1
    remarks: list[str] = []
    kept: tuple[str, ...] = ()
    if not found.failed:
        documents, why_not = sweep.documents(found.tests, sweep.made_by(run, gpu))
        remarks += why_not
        try:
            stored = shelf.store(context.transport, place, documents, context.templates[shelf.MODULE])
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
            references=result.rules.references,
            where=f"{place.prefix}/{reference_file.FILE}",
        )
        saved, remarks = (
            made.count,
            [*remarks, *([f"nothing was kept as reference: {made.why_not}"] if made.why_not else [])],
        )
        if saved:
            run_folder.write_site(context.transport, place, reference_file.FILE, made.text)
    return KeptResult(kept, saved), tuple(remarks)
