"""`invoke bootstrap`: from a lock and hosts to `module load deepep`; the conductor of the main job."""

from __future__ import annotations

import functools
import getpass
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from deepep_bootstrap import apply, build, choose, generations, mirrors, modules, slurm, store, supply, tarstream, verify
from deepep_bootstrap import plan as planning
from deepep_bootstrap.choose import Request
from deepep_bootstrap.errors import OK, TROUBLE, Problem, Trouble, worst
from deepep_bootstrap.generations import Content, Place
from deepep_bootstrap.hosts import Host, fold
from deepep_bootstrap.mirrors import Mirrors
from deepep_bootstrap.plan import Outcome, Plan
from deepep_bootstrap.remote import Fleet
from deepep_bootstrap.report import Screen, outcome_json, plan_json
from deepep_bootstrap.store import Offer
from deepep_bootstrap.survey import Flags, Run, Survey, gather, open_door, read_inventory, read_lock, request_for

PREFIX = "prefix"
STALE_TRIES = 3
"""How often an offer is composed again because another run published one meanwhile."""


@dataclass(frozen=True)
class Work:
    """What every phase of one bootstrap needs."""

    flags: Flags
    screen: Screen
    run: Run
    door: Fleet
    survey: Survey
    request: Request
    plan: Plan
    mirrors: Mirrors

    def hosts(self, names: Sequence[str]) -> tuple[Host, ...]:
        """Return the hosts of these names."""
        return tuple(self.survey.host(name) for name in names)

    @property
    def prefix_host(self) -> Host:
        """The host through which the prefix is touched."""
        return self.survey.host(self.plan.choice.prefix_host)

    @property
    def build_user(self) -> str:
        """Who builds and writes the prefix; "" for the connection's own user."""
        return self.survey.inventory.settings.build_user

    @property
    def place(self) -> Place:
        """The prefix as its host reaches it."""
        return Place(self.prefix_host, self.request.prefix, self.request.recipes, self.build_user)


def bootstrap(flags: Flags, *, dry_run: bool, yes: bool) -> int:
    """Plan, show, ask on a terminal, do, prove, say what to type next. Returns the worst exit code of all hosts."""
    screen = Screen("bootstrap", as_json=flags.json)
    lock, stack = read_lock(flags)
    inventory, prefix = read_inventory(flags)
    found_mirrors = mirrors.read(flags.mirror, os.environ, lock.indexes)
    with open_door(flags, inventory) as door:
        survey = gather(flags, door, inventory, prefix)
        request = request_for(flags, survey, lock, stack)
        made = planning.make(request, survey.facts)
        screen.plan(made)
        outcomes: tuple[Outcome, ...] = ()
        run = Run.start("bootstrap")
        if made.steps and not dry_run:
            confirm(screen, yes)
            work = Work(flags, screen, run, door, survey, request, made, found_mirrors)
            with screen.progress():
                outcomes = carry_out(work)
            screen.outcomes(outcomes)
            screen.say(f"\nLogs: {run.folder} and {prefix}/logs/{run.name}")
    for problem in survey.problems:
        screen.problem(problem)
    code = worst([*(outcome.code for outcome in outcomes), *(TROUBLE for _ in survey.problems)])
    if code == OK and not dry_run:
        screen.next_commands(next_commands(request, made))
    screen.document(code, survey.problems, **plan_json(made), outcomes=[outcome_json(outcome) for outcome in outcomes])
    return code


def confirm(screen: Screen, yes: bool) -> None:
    """Ask on a terminal; elsewhere, and with --yes, go on."""
    if yes or not (screen.live and sys.stdin.isatty()):
        return
    if input("Go on? [Y/n] ").strip().lower() not in {"", "y", "yes"}:
        raise Trouble(Problem("bootstrap", "not confirmed, nothing was changed"))


def carry_out(work: Work) -> tuple[Outcome, ...]:
    """Walk through the phases; a phase that fails where all others depend on it ends the walk. Logs go to the prefix at the end."""
    outcomes: list[Outcome] = []
    for phase, decisive in ((share_prefix, True), (prepare_hosts, False), (build_entries, True), (publish_offer, True), (prove, False)):
        ended = phase(work)
        outcomes.extend(ended)
        failed = [outcome for outcome in ended if outcome.state == "failed"]
        if failed and (decisive or any(outcome.host == work.plan.choice.build_host for outcome in failed)):
            break
    if work.run.folder.is_dir() and not any(outcome.state == "failed" for outcome in outcomes if outcome.step == PREFIX):
        keep_logs(work)
    return tuple(outcomes)


def keep_logs(work: Work) -> None:
    """Copy the logs of this run to the prefix; that the prefix has no room for them is said, and is no failure of the run."""
    entries = [(str(path.relative_to(work.run.folder)), path) for path in sorted(work.run.folder.rglob("*.log"))]
    try:
        generations.keep_logs(work.door, work.place, work.run.name, tarstream.tar_tree(entries))
    except Trouble as trouble:
        for problem in trouble.problems:
            work.screen.problem(problem)


def share_prefix(work: Work) -> tuple[Outcome, ...]:
    """Make the prefix and prove by writing that it is one directory on all hosts."""
    steps = work.plan.of_kind("prefix")
    if not steps:
        return ()
    host, begin = work.prefix_host, time.monotonic()
    work.screen.started(host.name, PREFIX)
    marker = generations.prepare_prefix(work.door, replace(work.place, user=""), work.build_user)
    generations.probe_shared(work.door, work.place, work.hosts(steps[0].hosts))
    seen = f"{work.request.prefix}, id {marker[:8]}, one directory on {fold(steps[0].hosts)}"
    return tell(work, (Outcome(PREFIX, host.name, "done", seen, time.monotonic() - begin),))


def prepare_hosts(work: Work) -> tuple[Outcome, ...]:
    """Run the host recipes of the plan, each on its hosts at the same time."""
    outcomes: list[Outcome] = []
    for step in work.plan.of_kind("host"):
        for name in step.hosts:
            work.screen.started(name, step.title)
        tell_line = functools.partial(show_line, work.screen, step.title)
        pairs = apply.apply_step(work.door, work.hosts(step.hosts), step, work.request.recipes, on_line=tell_line)
        logged = tuple(replace(outcome, log=str(work.run.log(outcome.host, step.name, text))) for outcome, text in pairs)
        outcomes.extend(tell(work, logged))
    return tuple(outcomes)


def show_line(screen: Screen, title: str, host: str, text: str) -> None:
    """Show the last line of a host recipe."""
    screen.line(host, title, text)


def build_entries(work: Work) -> tuple[Outcome, ...]:
    """Fetch and verify what the missing entries are made of, then build them on the build host."""
    names = [step.name for step in work.plan.of_kind("build")]
    entries = tuple(entry for entry in work.plan.choice.entries if entry.name in names)
    if not entries:
        return ()
    host = work.survey.host(work.plan.choice.build_host)
    supplies = fetch_supplies(work, entries)
    request = build.BuildRequest(
        prefix=work.request.prefix,
        entries=entries,
        recipes=work.request.recipes,
        chunks=supplies.supply.chunks,
        logs=work.run.folder / host.name,
        wheels=work.plan.choice.wheels,
        indexes=supplies.indexes,
        user=work.build_user,
        allocation=allocation(work),
    )
    titles = {step.name: step.title for step in work.plan.of_kind("build")}
    begun: set[str] = set()

    def show(event: build.Event) -> None:
        title = titles[event.entry]
        if event.entry not in begun:
            begun.add(event.entry)
            work.screen.started(host.name, title)
        if event.state == "waiting":
            work.screen.waiting(host.name, title, event.line)
        elif event.line:
            work.screen.line(host.name, title, event.line)

    outcomes = build.build_all(work.door, host, request, show)
    return tell(work, tuple(replace(outcome, step=titles[outcome.step]) for outcome in outcomes))


def fetch_supplies(work: Work, entries: Sequence[store.Entry]) -> supply.EnvironmentSupply:
    """Fetch sources, and see to the wheels where an environment is to be built."""

    def say(text: str) -> None:
        work.screen.line("control", "fetch", text)

    work.screen.started("control", "fetch")
    begin = time.monotonic()
    sources = supply.fetch_sources(work.request.lock, entries, work.mirrors, say)
    indexes = None
    if any(entry.kind == "python" for entry in entries):
        choice = work.plan.choice
        host = work.survey.host(choice.build_host)
        want = supply.Environment(
            work.request.lock, choice.wheels, work.mirrors, work.request.recipes, host, work.survey.facts[host.name],
            choice.python.path, work.build_user,
        )  # fmt: skip
        environment = supply.fetch_environment(work.door, want, say)
        sources, indexes = supply.join(sources, environment.supply), environment.indexes
    detail = f"{len(sources.files)} files, hashes as locked" + ("" if indexes is None else "; the build host gets the wheels itself")
    work.screen.ended(Outcome("fetch", "control", "done", detail, time.monotonic() - begin))
    return supply.EnvironmentSupply(sources, indexes)


def allocation(work: Work) -> slurm.Request | None:
    """Return what the build asks of Slurm, or None where the build host is no node of a cluster."""
    node = work.plan.choice.slurm_node
    if not node:
        return None
    settings = work.survey.inventory.settings
    return slurm.Request(
        nodes=(node,), count=1, partition=settings.partition, account=settings.account, qos=settings.qos, extra=settings.sbatch_args
    )


def publish_offer(work: Work) -> tuple[Outcome, ...]:
    """Render the offer and publish it as the next generation; compose again when another run was quicker."""
    if not work.plan.of_kind("offer"):
        return ()
    host = work.prefix_host
    title = work.plan.of_kind("offer")[0].title
    work.screen.started(host.name, title)
    survey, begin = work.survey, time.monotonic()
    for _ in range(STALE_TRIES):
        prefix = survey.facts[host.name].prefix
        offer = choose.merge_offer(work.request, store.read_offer(prefix.manifest), work.plan.choice.record)
        files = [Content(path, file.content, file.executable) for path, file in modules.render(offer, work.request.templates).items()]
        files.append(Content("manifest.json", manifest(work, offer, survey).encode()))
        published = generations.publish_generation(work.door, work.place, files, prefix.generation)
        if not published.stale:
            detail = f"generation {published.generation}: {work.plan.choice.record.module}"
            return tell(work, (Outcome(title, host.name, "done", detail, time.monotonic() - begin),))
        survey = gather(work.flags, work.door, work.survey.inventory, work.request.prefix)
    raise Trouble(
        Problem(work.request.prefix, "other runs publish generations all the time", try_="invoke bootstrap, when they have ended")
    )


def manifest(work: Work, offer: Offer, survey: Survey) -> str:
    """Return the text of the new generation's manifest."""
    here = survey.facts[work.prefix_host.name]
    return modules.manifest(
        offer,
        generation=here.prefix.generation + 1,
        created=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        by=f"{getpass.getuser()} as {here.user}@{work.prefix_host.name}",
        lock_digest=store.digest({"lock": Path(work.request.lock.path).read_text(encoding="utf-8")}),
        hosts=tuple(survey.facts),
    )


def prove(work: Work) -> tuple[Outcome, ...]:
    """Load the module and import deep_ep on every host."""
    hosts = work.hosts(work.plan.of_kind("verify")[0].hosts)
    for host in hosts:
        work.screen.started(host.name, "verify")
    record = work.plan.choice.record
    load = "deepep" if work.plan.choice.offer.default_stack == record.stack else record.module
    return tell(work, verify.verify_all(work.door, hosts, record, work.request.recipes, load=load))


def tell(work: Work, outcomes: tuple[Outcome, ...]) -> tuple[Outcome, ...]:
    """Show outcomes and hand them on."""
    for outcome in outcomes:
        work.screen.ended(outcome)
    return outcomes


def next_commands(request: Request, made: Plan) -> list[str]:
    """Return what a person types after a successful run."""
    choice, prefix = made.choice, request.prefix
    bare = any("no module system" in note for note in made.notes)
    load = f". {prefix}/current/env-{choice.record.stack}.sh" if bare else f"module load {choice.record.module}"
    if choice.offer.default_stack == choice.record.stack and not bare:
        load = "module load deepep"
    if not choice.slurm_host:
        return [load, f"bash {prefix}/sbatch/intranode-test.sbatch"]
    login = [] if choice.slurm_host == choose.CONTROL else [f"ssh {choice.slurm_host}"]
    return [*login, load, f"sbatch {prefix}/sbatch/internode-test.sbatch"]
