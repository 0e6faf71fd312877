"""`invoke bootstrap`: from a lock and hosts to `module load deepep`."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from deepep_bootstrap.analysis.diagnosis.outcomes import explained
from deepep_bootstrap.bootstrap import publish, smoke
from deepep_bootstrap.bootstrap.hosts import run_recipes, share_prefix
from deepep_bootstrap.bootstrap.orphans import OrphanRequest, Orphans, remove_orphans, without_dead_jobs
from deepep_bootstrap.bootstrap.planning import (
    BootstrapContext,
    RunLogs,
    cluster_of,
    dead_builds,
    decide,
    keep_durations,
    kept_at,
    leave_out,
    look_again,
    look_at_hosts,
    look_at_nodes,
    present_plan,
    read_earlier,
    read_wanted,
    request_for,
    skipped,
    with_prefix,
)
from deepep_bootstrap.bootstrap.reboot.policy import ASK, NEVER, ROLLING, Policy, read_policy
from deepep_bootstrap.bootstrap.reboots import give_back, mended, reboot_hosts, unfinished
from deepep_bootstrap.bootstrap.saved_plan import SavedPlan, check_rest, check_same, flags_of, read_plan
from deepep_bootstrap.bootstrap.smoke import try_out
from deepep_bootstrap.core import filetree
from deepep_bootstrap.core.console import STYLES, Screen
from deepep_bootstrap.core.errors import OK, TROUBLE, Problem, ToldInterrupt, Trouble, worst
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.outcome import Outcome, outcome_json
from deepep_bootstrap.core.text import duration
from deepep_bootstrap.inventory.flags import Flags, can_ask, consent, said_yes, why_not_asked
from deepep_bootstrap.inventory.survey import read_inventory, read_tree
from deepep_bootstrap.plan.decisions import ANY, PlanRequest
from deepep_bootstrap.plan.host_recipes import TITLES, unbelieved
from deepep_bootstrap.plan.screen import FETCH, PlanView, show_plan
from deepep_bootstrap.plan.steps import HOOK, RESUME, UNCORDON, Plan, hooks_of_others, leave_hook, plan_json
from deepep_bootstrap.prefix import generations
from deepep_bootstrap.remote.host import THIS_MACHINE
from deepep_bootstrap.report.build import is_log_of_build, longest_units, read_builds
from deepep_bootstrap.slurm.fanout import open_ways


class RunState(Struct):
    """How far a run came: what ended, what went wrong beside the steps, the plan that was shown, what dead builds left
    on hosts that it counts as free, and the context as it was last planned; `kept` is the file of what earlier runs
    left, `saved` the plan that was given as the file `saved_at`, and `agreed` whether somebody said yes. Grows while
    the run goes on, so that ^C loses nothing."""

    context: BootstrapContext
    shown: Plan
    orphans: Orphans = field(default_factory=Orphans)
    outcomes: list[Outcome] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    code: int = OK
    kept: Path = Path(os.devnull)
    saved: SavedPlan | None = None
    saved_at: str = ""
    agreed: bool = False

    @property
    def failed(self) -> list[Outcome]:
        """The outcomes that keep the run from being a success."""
        return [outcome for outcome in self.outcomes if outcome.state == "failed"]


def bootstrap(
    flags: Flags,
    *,
    skip: str = "",
    reboot: str = "ask",
    reboot_window: str = "",
    reservation: str = "",
    drain_timeout: str = "4h",
    boot_timeout: str = "30m",
    reload_driver: bool = False,
    verbose: bool = False,
    archs: str = "",
    plan: str = "",
    take_over: bool = False,
    kubeconfig: str = "",
    context: str = "",
) -> int:
    """Make the hosts ready, build what is missing once into the shared prefix, offer it as modules, prove that it
    loads.

    Plan, show, ask on a terminal, do, prove, say what to type next. Returns the worst exit code of all hosts."""
    policy = read_policy(
        reboot,
        reboot_window,
        drain_timeout=drain_timeout,
        boot_timeout=boot_timeout,
        reload=reload_driver,
        reservation=reservation,
    )
    screen = Screen("bootstrap", as_json=flags.json)
    saved = read_plan(plan) if plan else None
    if saved:
        given = {"skip": skip, "archs": archs, "kubeconfig": kubeconfig, "context": context}
        flags, own = flags_of(saved, flags, given)
        skip, archs, kubeconfig, context = (own[name] for name in given)
    wanted, without = read_wanted(flags), skipped(skip)
    inventory, prefix = read_inventory(flags)
    inventory = inventory.built_for(archs)
    cluster = cluster_of(inventory, kubeconfig, context)
    with open_ways(flags, inventory) as transport:
        survey = with_prefix(look_at_hosts(flags, transport, inventory, prefix))
        survey, orphans = without_dead_jobs(transport, survey, read_tree(flags.root / "recipes"))
        request = request_for(flags, survey, wanted, without, look_at_nodes(cluster, survey))
        made = decide(transport, survey, request)
        if saved:
            check_same(saved, plan, request, made)
        kept = kept_at(flags.hosts, prefix)
        present_plan(screen, made, kept, PlanView(urgent=dead_builds(orphans), reboots=policy.plainly, verbose=verbose))
        begun = BootstrapContext(flags, screen, RunLogs.none(), transport, survey, request, made, policy, cluster)
        state = RunState(begun, made, orphans, kept=kept, saved=saved, saved_at=plan)
        if made.steps and not flags.dry_run:
            # Who agrees to a plan, and who reads the log of an hour, knows from the start whom it leaves out.
            screen.problems(survey.problems)
            agree(state, take_over=take_over)
        if state.agreed:
            state.context = replace(state.context, run=RunLogs.start("bootstrap"))
            carry_out(state)
            keep_durations(kept, state.outcomes)
    return conclude(state)


def conclude(state: RunState) -> int:
    """Say what is still wrong or what to type next, print the document, and return the exit code."""
    context, screen = state.context, state.context.screen
    looked_only = context.flags.dry_run or (bool(state.problems) and not state.agreed)
    waiting = (*unbelieved(context.plan.preparation), *(() if looked_only else unfinished(context)))
    problems = (*context.survey.problems, *state.problems, *waiting)
    told = bool(state.shown.steps) and not context.flags.dry_run and not state.agreed
    screen.problems((*(() if told else context.survey.problems), *waiting))
    trouble = [TROUBLE for _ in (*context.survey.problems, *waiting)]
    code = worst([state.code, *(outcome.code for outcome in state.failed), *trouble])
    if code == OK and not context.flags.dry_run:
        screen.next_commands(next_commands(context.request, context.plan))
    screen.document(
        code,
        problems,
        **plan_json(state.shown) | {"chosen": context.plan.chosen()},
        outcomes=[outcome_json(outcome) for outcome in state.outcomes],
    )
    return code


def agree(state: RunState, *, take_over: bool) -> None:
    """Ask for the plan, then apart for the hook of another prefix and for reboots, which --yes does not answer; keep
    the answers in the context. Where nobody can be asked, what lacks its flag is a problem and nothing is done."""
    context = state.context
    others = hooks_of_others(context.request, context.survey.facts)
    unsaid = bool(others) and not take_over and not can_ask(context.flags)
    refusals = [consent(context.flags, "bootstrap", "Go on?"), not_said(context.flags, others) if unsaid else None]
    if problems := [problem for problem in refusals if problem]:
        state.problems, state.code = problems, TROUBLE
        for problem in problems:
            context.screen.problem(problem)
        return
    request = replace(context.request, take_over=(ANY,)) if take_over else settle_hook(context, others)
    plan = leave_hook(context.plan, request)
    policy = leave_to_reboot(context.flags, plan, context.policy)
    state.context = replace(context, request=request, plan=plan, policy=policy)
    state.agreed = True


def not_said(flags: Flags, others: Mapping[str, Sequence[str]]) -> Problem:
    """Return that nobody said whether the hook of another prefix may be taken over."""
    hosts = [host for names in others.values() for host in names]
    what = f"`module load deepep` is of {prefixes(others)} there, and nobody said whether it may become this prefix's"
    remedy = "the same command with --take-over, or with --skip=module-hook, which leaves it"
    return Problem(fold(hosts), what, why_not_asked(flags), "--take-over or --skip=module-hook", remedy)


def prefixes(others: Mapping[str, Sequence[str]]) -> str:
    """Return the prefixes that hooks name, by their modulefiles directories."""
    return ", ".join(folder.removesuffix("/modulefiles") for folder in others)


def settle_hook(context: BootstrapContext, others: Mapping[str, Sequence[str]]) -> PlanRequest:
    """Return the request once a person was asked about hooks of other prefixes: their place is taken, or all hooks are
    left as they are."""
    request = context.request
    if not others:
        return request
    hosts = {host: None for names in others.values() for host in names}
    count = f"{len(hosts)} host{'' if len(hosts) == 1 else 's'}"
    question = f"`module load deepep` now gives {prefixes(others)}. Make it {request.prefix} for all users of {count}?"
    if said_yes(question):
        return replace(request, take_over=tuple(others))
    return replace(request, skip=(*request.skip, HOOK))


def leave_to_reboot(flags: Flags, made: Plan, policy: Policy) -> Policy:
    """Return what is allowed once a person was asked, on a terminal alone: elsewhere "ask" means never."""
    if policy.mode != ASK:
        return policy
    hosts = {host: None for step in made.of_kind("reboot") for host in step.hosts}
    if not hosts or not can_ask(flags):
        return replace(policy, mode=NEVER)
    question = f"Reboot {fold(hosts)}, one at a time, drained first and given back after its check?"
    return replace(policy, mode=ROLLING if said_yes(question) else NEVER)


def carry_out(state: RunState) -> None:
    """Carry out the plan and print how it ended, also when something breaks or somebody presses ^C in the middle."""
    begin = time.monotonic()
    screen = state.context.screen
    try:
        number_steps(state)
        with screen.progress():
            run_phases(state)
    except Trouble as trouble:
        state.problems.extend(trouble.problems)
        state.code = trouble.code
    except KeyboardInterrupt:
        summarize(state, f"Interrupted after {duration(time.monotonic() - begin)}: {how_far(state)}")
        raise ToldInterrupt from None
    in_prefix = keep_logs(state)
    summarize(state, how_it_ended(state, time.monotonic() - begin), in_prefix=in_prefix)
    for problem in state.problems:
        screen.problem(problem)


def run_phases(state: RunState) -> None:
    """Run the phases: prepare the hosts, look again, then share, build, offer, prove. What is decisive ends
    the run when it fails; a host that could not be prepared does not, unless it is the one to build on."""
    take_away(state)
    if state.context.plan.decided:
        share(state)
    first = state.context.plan
    before = len(state.outcomes)
    do(state, lambda context: run_recipes(context, first.of_kind("host")))
    unprepared = {outcome.host: outcome.step for outcome in state.outcomes[before:] if outcome.state == "failed"}
    do(state, lambda context: reboot_hosts(context, unprepared))
    if first.preparation.changes or first.of_kind(RESUME) or first.of_kind(UNCORDON):
        plan_again(state)
    choice = state.context.plan.choice
    if not first.decided:
        seen = frozenset(state.shown.notes)
        show_plan(state.context.screen, state.context.plan, PlanView(seen, reboots=state.context.policy.plainly))
        number_steps(state)
        share(state)
        # These could not be planned before the hosts' own preparation was done.
        finishing = [step for step in state.context.plan.of_kind("host") if step.name not in TITLES]
        do(state, lambda context: run_recipes(context, finishing))
    if any(outcome.host == choice.build_host for outcome in state.failed):
        return
    if do(state, publish.build_entries):
        offer(state)


def plan_again(state: RunState) -> None:
    """Look at the hosts and plan anew, now that they were changed: names of devices, toolkits, drivers, nodes in use
    are others than those that were planned for. Trouble where that leaves a saved plan."""
    earlier = state.context
    state.context = look_again(state.context)
    if hosts := mended(state.context, earlier):
        do(state, lambda context: give_back(context, hosts))
        state.context = look_again(state.context)
    if state.saved:
        check_rest(state.saved, state.saved_at, state.context.plan)


def take_away(state: RunState) -> None:
    """Cancel the allocations of dead builds, which the plan does not count; where that fails, ours waits for them."""
    context = state.context
    hosts = context.hosts(state.orphans.hosts)
    request = OrphanRequest(context.request.prefix, context.request.recipes, context.build_user)
    for problem in remove_orphans(context.transport, request, hosts) if hosts else ():
        context.screen.problem(problem)


def offer(state: RunState) -> None:
    """Publish and prove. The prefix keeps in mind that the stack is unproved until all proofs are passed, whatever
    ends this run."""
    context = state.context
    noted = context.is_unproved
    if context.offers_news and not noted:
        publish.note_proof(context, proved=False)
        noted = True
    good = do(state, publish.publish_offer)
    if good:
        takes = {"TAKES": ":".join(context.request.take_over)}
        hooks = [replace(step, env={**step.env, **takes}) for step in context.plan.of_kind(HOOK)]
        placed = do(state, lambda context: run_recipes(context, hooks))
        proved = do(state, publish.prove)
        good = placed and proved and do(state, try_out)
    if noted or not good:
        publish.note_proof(context, proved=good)


def share(state: RunState) -> None:
    """Share the prefix between the hosts that are still there."""
    before = len(state.outcomes)
    if not do(state, share_prefix):
        state.context = leave_out(
            state.context, {outcome.host for outcome in state.outcomes[before:] if outcome.state == "failed"}
        )


def do(state: RunState, phase: Callable[[BootstrapContext], tuple[Outcome, ...]]) -> bool:
    """Carry out one phase and keep its outcomes; False when something in it failed. Of one that is cut short, those
    that it had reported are kept."""
    ended = state.context.screen.ended_outcomes
    before = len(ended)
    try:
        outcomes = phase(state.context)
    except BaseException:
        state.outcomes.extend(ended[before:])
        raise
    state.outcomes.extend(outcomes)
    return not any(outcome.state == "failed" for outcome in outcomes)


def summarize(state: RunState, ending: str, *, in_prefix: str = "") -> None:
    """Print what failed, where the logs are, and `ending`."""
    context = state.context
    context.screen.say()
    context.screen.outcomes(explained(state.outcomes, context.flags.root))
    logs = [outcome.log for outcome in state.outcomes if outcome.state == "done" and is_log_of_build(outcome.log)]
    if longest := longest_units(read_builds(map(Path, logs))):
        context.screen.say(f"Longest to compile: {', '.join(longest)} (more: invoke report --build)")
    if any(context.run.folder.rglob("*.log")):
        context.screen.say(f"Logs: {context.run.folder}" + (f" and {in_prefix}" if in_prefix else ""))
    context.screen.paragraph(ending, style="bold")


def how_it_ended(state: RunState, seconds: float) -> str:
    """Return in one sentence how a run ended: how many steps how, and what helps where some failed."""
    counts = Counter(outcome.state for outcome in state.outcomes)
    told = ", ".join(f"{counts[name]} {name}" for name in STYLES if counts[name])
    bad = fold(outcome.host for outcome in state.failed) if state.failed else ""
    how = "Not finished" if state.failed or state.problems else "Finished"
    failed = f", with failures on {bad}; once that is mended, the same command goes on from here" if bad else ""
    return f"{how} after {duration(seconds)}{f': {told}' if told else ''}{failed}."


def number_steps(state: RunState) -> None:
    """Let the screen number the steps of the plan as it is now, and say how long each will take."""
    state.context.screen.expect(expected_steps(state), read_earlier(state.kept).seconds)


def expected_steps(state: RunState) -> list[str]:
    """Return the titles of the steps of the plan in the order in which they are done."""
    plan, skip = state.context.plan, state.context.request.skip
    news = state.context.plan.decided and state.context.offers_news
    titles = {
        "prefix": [step.title for step in plan.of_kind("prefix")],
        "host": [step.title for step in plan.of_kind("host")],
        "reboot": ["reboot"] if plan.of_kind("reboot") else [],
        "fetch": [FETCH] if plan.of_kind("build") else [],
        **{kind: [step.title for step in plan.of_kind(kind)] for kind in ("build", "offer", HOOK, "verify")},
        "smoke": [smoke.STEP] if news and smoke.SMOKE not in skip else [],
    }
    return [title for several in titles.values() for title in several]


def how_far(state: RunState) -> str:
    """Return what is built and what was stopped by ^C, and that nothing is lost."""
    planned = {step.title: step.title.removeprefix("build ") for step in state.context.plan.of_kind("build")}
    ended = {outcome.step: outcome.state for outcome in state.outcomes if outcome.step in planned}
    built = [planned[title] for title, how in ended.items() if how in {"done", "unchanged"}]
    failed = [title for title, how in ended.items() if how == "failed"]
    running = state.context.screen.running
    begun = bool(ended) or any(title in planned for title in running)
    left = len(planned) - len(built) - len(failed) if begun else 0
    parts = [
        f"{' and '.join(built)} {'is' if len(built) == 1 else 'are'} built" if built else "",
        f"{left} build{'' if left == 1 else 's'} stopped" if left else "",
        *(f"{step} on {fold(hosts)} stopped" for step, hosts in running.items() if step not in planned),
    ]
    return f"{', '.join(filter(None, parts)) or 'between two steps'}. The same command goes on."


def keep_logs(state: RunState) -> str:
    """Copy the logs of this run to the prefix and return where they are; "" when there are none, or no usable prefix.

    That the prefix has no room for them is said, and is no failure of the run.
    """
    context = state.context
    entries = [(str(path.relative_to(context.run.folder)), path) for path in sorted(context.run.folder.rglob("*.log"))]
    if not entries:
        return ""
    try:
        generations.keep_logs(context.transport, context.place, context.run.name, filetree.tar_tree(entries))
    except Trouble as trouble:
        for problem in trouble.problems:
            if problem not in state.problems:
                context.screen.problem(problem)
        return ""
    return f"{context.request.prefix}/logs/{context.run.name}"


def next_commands(request: PlanRequest, made: Plan) -> list[str]:
    """Return what a person types after a successful run."""
    choice, prefix, stack = made.choice, request.prefix, made.choice.record.stack
    by_default = choice.offer.default_stack == choice.record.key
    load = "module load deepep" if by_default else f"module load deepep/{stack}"
    if any("no module system" in note for note in made.notes):
        load = f". {prefix}/current/env-{stack}.sh"
    elif HOOK in request.skip:
        load = f"module use {prefix}/modulefiles; {load}"
    tests = "$DEEPEP_PREFIX/sbatch" if by_default else f"$DEEPEP_PREFIX/sbatch/{choice.record.key}"
    if not choice.slurm_host:
        return [load, f"bash {tests}/intranode-test.sbatch"]
    login = [] if choice.slurm_host == THIS_MACHINE.name else [f"ssh {choice.slurm_host}"]
    return [
        *login,
        load,
        f"sbatch {tests}/internode-test.sbatch    # in a directory that all nodes see: it leaves its output there",
    ]
