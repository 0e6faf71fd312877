"""The phases of a bootstrap on the prefix: share it, build, publish the offer, prove it. Each returns
outcomes.
"""

from __future__ import annotations

import getpass
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from msgspec.structs import replace

from deepep_bootstrap.bootstrap import build, supply, verify
from deepep_bootstrap.bootstrap.planning import BootstrapContext, show_outcomes
from deepep_bootstrap.core import recipes
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import OK, TROUBLE, Problem, Trouble
from deepep_bootstrap.core.outcome import Outcome, WorkClock
from deepep_bootstrap.fetch.download import Transfer
from deepep_bootstrap.inventory.hostsfile import Settings
from deepep_bootstrap.inventory.survey import Survey
from deepep_bootstrap.plan import decisions
from deepep_bootstrap.plan.screen import FETCH
from deepep_bootstrap.plan.steps import HOOK
from deepep_bootstrap.prefix import entries, generations, modulefiles
from deepep_bootstrap.prefix.bill import provenance
from deepep_bootstrap.prefix.generations import Content
from deepep_bootstrap.prefix.offer import Offer, named_entries, read_offer
from deepep_bootstrap.remote.host import THIS_MACHINE
from deepep_bootstrap.slurm import commands

VERIFY = "verify"

BUILD_MINUTES = 120
"""Time limit of a build's allocation, since a partition's default may be minutes. All sources took 195 s on 128
cores (one by one, and without --split-compile), so less than 7 hours of one core: two hours do for 4 cores."""

STALE_TRIES = 3
"""How often an offer is composed again because another run published one meanwhile."""


def build_entries(context: BootstrapContext) -> tuple[Outcome, ...]:
    """Fetch and verify what the missing entries are made of, then build them on the build host."""
    names = [step.name for step in context.plan.of_kind("build")]
    entries = tuple(entry for entry in context.plan.choice.entries if entry.name in names)
    if not entries:
        return ()
    host = context.survey.host(context.plan.choice.build_host)
    supplies = fetch_supplies(context, entries)
    request = build.BuildRequest(
        prefix=context.request.prefix,
        entries=entries,
        recipes=context.request.recipes,
        chunks=supplies.supply.chunks,
        logs=context.run.folder / host.name,
        wheels=context.plan.choice.wheels,
        indexes=supplies.indexes,
        user=context.build_user,
        allocation=allocation(context.plan.choice.slurm_node, context.survey.inventory.settings),
    )
    if context.survey.facts[context.prefix_host.name].prefix.generation:
        # A generation keeps the sums of what it was offered with: whatever ends this run, the next offer says new ones.
        generations.note_proof(context.transport, context.place, names, proved=False)
    shown = _BuildScreen(context.screen, host.name, {step.name: step.title for step in context.plan.of_kind("build")})
    outcomes = build.build_all(context.transport, host, request, shown.show)
    context.screen.ended(*(outcome for outcome in outcomes if outcome.step == build.SESSION_STEP))
    return tuple(map(shown.as_told, outcomes))


class _BuildScreen:
    """What is told of builds on one host; `titles` are those of their steps by entry."""

    def __init__(self, screen: Screen, host: str, titles: Mapping[str, str]) -> None:
        self._screen, self._host, self._titles = screen, host, titles
        self._clocks: dict[str, WorkClock] = {}
        self._told: dict[str, Outcome] = {}

    def show(self, event: build.Event) -> None:
        """Show what happens to an entry."""
        title, begins = self._titles[event.entry], event.state in {"running", "waiting", "waits"}
        if event.entry not in self._clocks and begins:
            self._clocks[event.entry] = WorkClock()
            self._screen.started(title, [self._host])
        if event.state == "waiting":
            self._clocks[event.entry].wait()
            self._screen.waiting(self._host, title, event.line)
        elif event.state == "waits":
            self._clocks[event.entry].wait()
            self._screen.line(self._host, title, event.line, waits=True)
        elif event.state == "running":
            self._clocks[event.entry].work()
            self._screen.line(self._host, title, event.line)
        elif "was not built" not in event.line:
            # An entry that waited for one that failed ends as skipped, which is told when all is known.
            self._end(event, Outcome(title, self._host, event.state, event.line))

    def _end(self, event: build.Event, outcome: Outcome) -> None:
        if clock := self._clocks.get(event.entry):
            outcome = replace(outcome, seconds=clock.seconds, waited=clock.waited)
        self._told[event.entry] = outcome
        self._screen.ended(outcome)

    def as_told(self, outcome: Outcome) -> Outcome:
        """Return an outcome with the title of its step and the times that were told. What a compiler exits with is its
        own business; ours is that the step failed."""
        told = self._told.get(outcome.step, outcome)
        return replace(
            outcome,
            step=self._titles.get(outcome.step, outcome.step),
            code=TROUBLE if outcome.state == "failed" else OK,
            seconds=told.seconds,
            waited=told.waited,
        )


def fetch_supplies(context: BootstrapContext, entries: Sequence[entries.Entry]) -> supply.EnvironmentSupply:
    """Fetch sources, and see to the wheels where an environment is to be built."""

    def say(text: str) -> None:
        context.screen.line(THIS_MACHINE.name, FETCH, text)

    def measure(transfer: Transfer) -> None:
        context.screen.measured(THIS_MACHINE.name, FETCH, transfer.share, transfer.text)

    context.screen.started(FETCH, [THIS_MACHINE.name])
    begin = time.monotonic()
    sources = supply.fetch_sources(context.request.lock, entries, context.request.mirrors, say)
    indexes, remark = None, ""
    wheels = tuple(dict.fromkeys(wheel for entry in entries for wheel in entry.wheels))
    if wheels:
        choice = context.plan.choice
        host = context.survey.host(choice.build_host)
        want = supply.Environment(
            context.request.lock,
            wheels,
            context.request.mirrors,
            context.request.recipes,
            host,
            context.survey.facts[host.name],
            choice.python.path,
            context.build_user,
        )
        environment = supply.fetch_environment(context.transport, want, say, measure)
        sources, indexes = supply.join(sources, environment.supply), environment.indexes
        remark = environment.remark
    detail = f"{len(sources.files) - bool(remark)} files, hashes as locked" + (
        "" if indexes is None else "; the build host gets the wheels itself"
    )
    if remark:
        context.screen.say(f"note: {remark}", style="yellow")
    context.screen.ended(Outcome(FETCH, THIS_MACHINE.name, "done", detail, time.monotonic() - begin))
    return supply.EnvironmentSupply(sources, indexes)


def allocation(node: str, settings: Settings) -> commands.AllocationRequest | None:
    """Return what the build asks of Slurm: the whole of one node, with what the site's words for sbatch say of place
    and account (their --time goes before BUILD_MINUTES). None where the build host is no node of a cluster."""
    if not node:
        return None
    # Without --exclusive it would get one CPU, and another job beside it would take the rest.
    return commands.AllocationRequest(
        nodes=(node,),
        count=1,
        partition=settings.partition,
        account=settings.account,
        qos=settings.qos,
        minutes=BUILD_MINUTES,
        exclusive=True,
        extra=commands.place_words(settings.sbatch_args),
    )


def publish_offer(context: BootstrapContext) -> tuple[Outcome, ...]:
    """Render the offer and publish it as the next generation; compose again when another run was quicker."""
    if not context.plan.of_kind("offer"):
        return ()
    host = context.prefix_host
    title = context.plan.of_kind("offer")[0].title
    context.screen.started(title, [host.name])
    survey, begin = context.survey, time.monotonic()
    for _ in range(STALE_TRIES):
        prefix = survey.facts[host.name].prefix
        offer = decisions.merge_offer(context.request, read_offer(prefix.manifest), context.plan.choice.record)
        files = [
            Content(path, file.content, file.executable)
            for path, file in modulefiles.render_offer(offer, context.request.templates).items()
        ]
        lock = context.request.lock
        holdings = provenance.look(context.transport, context.place, offer, lock)
        built = [*(step.name for step in context.plan.of_kind("build")), *prefix.unproved]
        records = holdings.records(named_entries(offer), built)
        files.append(Content("manifest.json", manifest(context, offer, survey, records).encode()))
        files.append(Content("deepep.lock.toml", lock.text.encode()))
        files.extend(provenance.bills(holdings, offer, lock, records))
        published = generations.publish_generation(context.transport, context.place, files, prefix.generation)
        if not published.stale:
            if context.plan.choice.slurm_host == THIS_MACHINE.name:
                context.screen.say(f"sbatch files are in {Path.cwd()} too: {', '.join(copy_tests(files, Path.cwd()))}")
            detail = f"generation {published.generation}: {context.plan.choice.record.module}"
            return show_outcomes(context, (Outcome(title, host.name, "done", detail, time.monotonic() - begin),))
        survey = context.look()
    raise Trouble(
        Problem(
            context.request.prefix,
            "other runs publish generations all the time",
            try_="invoke bootstrap, when they have ended",
        )
    )


def copy_tests(files: Sequence[Content], folder: Path) -> list[str]:
    """Write the default stack's sbatch files into `folder`, where this machine is a client of Slurm; return their
    names."""
    tests = [content for content in files if content.path.startswith("sbatch/") and content.path.count("/") == 1]
    try:
        for content in tests:
            (folder / Path(content.path).name).write_bytes(content.data)
    except OSError as error:
        raise Trouble(
            Problem(
                str(folder), "sbatch files cannot be written here", error.strerror or str(error), try_="another folder"
            )
        ) from None
    return [Path(content.path).name for content in tests]


def manifest(context: BootstrapContext, offer: Offer, survey: Survey, records: Mapping[str, str]) -> str:
    """Return the text of the new generation's manifest; `records` are the sums of its entries' records by name."""
    here = survey.facts[context.prefix_host.name]
    return modulefiles.manifest(
        offer,
        generation=here.prefix.generation + 1,
        created=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        by=f"{getpass.getuser()} as {here.user}@{context.prefix_host.name}",
        lock_digest=recipes.digest({"lock": context.request.lock.text}),
        hosts=tuple(dict.fromkeys((*survey.facts, *context.plan.choice.absent, *context.plan.choice.elsewhere))),
        records=records,
    )


def note_proof(context: BootstrapContext, *, proved: bool) -> None:
    """Say in the prefix whether the stack was seen to work."""
    generations.note_proof(context.transport, context.place, [context.plan.choice.record.key], proved=proved)


def prove(context: BootstrapContext) -> tuple[Outcome, ...]:
    """Load the module and import deep_ep on every host that answered. Whatever changed, also where nothing is left
    to do after it."""
    record = context.plan.choice.record
    hosts = verify.of_machine(context.survey, record)
    context.screen.started(VERIFY, [host.name for host in hosts])
    default = context.plan.choice.offer.stacks[context.plan.choice.offer.default_stack]
    name = "deepep" if default.module == record.module else record.module
    load = verify.Load(name, without_hook=HOOK in context.request.skip)

    generation = generations.current(context.transport, context.place)

    def keep(host: str, output: str) -> Path:
        return context.run.log(host, "verify", output)

    return show_outcomes(
        context,
        verify.verify_all(
            context.transport,
            hosts,
            record,
            context.request.recipes,
            load=load,
            generation=generation,
            keep=keep,
            without_gpu=decisions.without_gpu(context.survey.inventory, context.survey.facts),
            on_end=lambda host: context.screen.finished(VERIFY, host),
        ),
    )
