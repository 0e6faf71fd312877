"""The way from flags to a plan (the lock and its stack held to the rules, the hosts' checks asked, the plan made),
and the context that the phases of one bootstrap share: hosts as they were seen, plan, connections and logs.

What earlier runs on this machine leave for later ones (the notes that were shown with a plan, how long steps took) is
kept for each hosts file and prefix in the account's state folder, beside the logs: it is about what a person has read
and what this machine has seen, so it is no state of the prefix, and losing it costs nothing but a note that is shown
again and an estimate.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from deepep_bootstrap.bootstrap.orphans import Orphans, without_dead_jobs
from deepep_bootstrap.bootstrap.reboot.policy import Policy
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.filetree import whole_file
from deepep_bootstrap.core.guard import state_dir
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.core.recipes import digest
from deepep_bootstrap.fetch import locations
from deepep_bootstrap.fetch.locations import Mirrors
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.inventory.flags import OWN_NCCL, Flags
from deepep_bootstrap.inventory.hostsfile import Inventory
from deepep_bootstrap.inventory.survey import FACTS_TIMEOUT, Survey, fold_problems, gather, read_tree
from deepep_bootstrap.kube import client as kube
from deepep_bootstrap.kube import nodes as kube_nodes
from deepep_bootstrap.kube.nodes import NodeLook
from deepep_bootstrap.lock import compatibility, model
from deepep_bootstrap.lock.model import Lock, Stack
from deepep_bootstrap.plan import host_recipes, steps
from deepep_bootstrap.plan.decisions import PlanRequest
from deepep_bootstrap.plan.host_recipes import Check, Preparation
from deepep_bootstrap.plan.screen import PlanView, show_plan
from deepep_bootstrap.plan.steps import Plan
from deepep_bootstrap.prefix.access import refuse_unsafe
from deepep_bootstrap.prefix.generations import PrefixHandle
from deepep_bootstrap.prefix.offer import control_has_slurm
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Job, Transport
from deepep_bootstrap.slurm.identity import slurm_hosts, with_nodes

if TYPE_CHECKING:
    from deepep_bootstrap.remote.fleet import ConnectionPool

ALL = "all"
"""What --skip calls all that it knows."""


def look_at_hosts(flags: Flags, transport: ConnectionPool, inventory: Inventory, prefix: str) -> Survey:
    """Return the hosts of a command and their facts, and which nodes of Slurm they are as the Slurm host says it."""
    survey = gather(flags, transport, inventory, prefix)
    return with_nodes(transport, survey, control_has_slurm=asks_slurm_here(survey))


def cluster_of(inventory: Inventory, kubeconfig: str, context: str) -> kube.Cluster | None:
    """Return the cluster of Kubernetes that the flags or the hosts file name, None where neither does: a configuration
    that merely lies there is no word on these hosts. Trouble where it cannot be used."""
    file, name = kubeconfig or inventory.settings.kubeconfig, context or inventory.settings.context
    return kube.connect(name, kubeconfig=os.path.expanduser(file)) if file or name else None


def look_at_nodes(cluster: kube.Cluster | None, survey: Survey) -> NodeLook:
    """Return which nodes of Kubernetes the hosts are. Raises Trouble."""
    if cluster is None:
        return NodeLook()
    return kube_nodes.look(cluster, {name: facts.boot_id for name, facts in survey.facts.items() if facts.boot_id})


def asks_slurm_here(survey: Survey) -> bool:
    """Return whether this machine is a client of Slurm and sees the prefix that all hosts see."""
    markers = {facts.prefix.id for facts in survey.facts.values()}
    return control_has_slurm(survey.prefix, markers.pop() if len(markers) == 1 else "")


def asks_slurm_of(survey: Survey) -> tuple[Host, ...]:
    """Return the hosts that Slurm is asked on; none without the one that the hosts file names, which look_at_hosts
    tells."""
    try:
        return slurm_hosts(survey, control_has_slurm=asks_slurm_here(survey))
    except Trouble:
        return ()


def skipped(value: str) -> tuple[str, ...]:
    """Return what --skip names: host recipes, the packages that a build needs, the module hook, and the smoke test at
    the end; "all" is every one of them."""
    names = tuple(name for name in value.split(",") if name)
    known = (ALL, "smoke", steps.HOOK, steps.BUILD_DEPS, *host_recipes.TITLES)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise Trouble(Problem("--skip", "no such host recipe", ", ".join(unknown), f"some of {', '.join(known)}"))
    return known if ALL in names else names


def read_lock(flags: Flags) -> tuple[Lock, Stack]:
    """Return the lock and the stack the flags choose."""
    found = model.read_lock_file(flags.lock or flags.root / "deepep.lock.toml")
    name = flags.stack or found.default_stack
    if name not in found.stacks:
        raise Trouble(Problem("--stack", "no such stack in the lock", found=name, wanted=" or ".join(found.stacks)))
    return found, found.stacks[name]


class Wanted(Struct, frozen=True):
    """What the flags choose before any host is asked: the lock, one of its stacks, and the mirrors to fetch from."""

    lock: Lock
    stack: Stack
    mirrors: Mirrors

    @classmethod
    def of(cls, flags: Flags, lock: Lock, stack: Stack) -> Wanted:
        """Return what is wanted of a lock that was read already."""
        return cls(lock, stack, locations.read_mirrors(flags.mirror, os.environ, lock.indexes))


def read_wanted(flags: Flags) -> Wanted:
    """Return what the flags choose; Trouble with the reason where the stack breaks a rule of
    env/rules/compatibility.toml."""
    lock, stack = read_lock(flags)
    if problems := compatibility.check_lock(lock, read_tree(flags.root / "env"), (stack.name,)):
        raise Trouble(*problems)
    return Wanted.of(flags, lock, stack)


def decide(transport: ConnectionPool, survey: Survey, request: PlanRequest, *, anyhow: bool = False) -> Plan:
    """Return the plan for what is wanted, after one more look at the hosts: the checks of the recipes that prepare
    them. Trouble, with equal reasons of several hosts said once, where there can be no plan (with `anyhow` the plan
    then says so itself), and where somebody else may change what lies in the prefix."""
    try:
        plan = steps.make_plan(
            request, survey.facts, check_hosts(transport, survey.reached, survey.facts, request), anyhow=anyhow
        )
        if plan.decided:
            builder = survey.inventory.settings.build_user
            place = PrefixHandle(survey.host(plan.decided.prefix_host), request.prefix, request.recipes, builder)
            refuse_unsafe(transport, place)
        return plan
    except Trouble as trouble:
        # Hosts that did not answer may well be why: they are named too.
        raise Trouble(*fold_problems(trouble.problems, survey.inventory), *survey.problems, code=trouble.code) from None


def check_hosts(
    transport: Transport, hosts: Sequence[Host], facts: Mapping[str, Facts], request: PlanRequest
) -> Preparation:
    """Return what the checks of the host recipes say on `hosts`, all asked at the same time by one script each; they
    change nothing."""
    inputs = host_recipes.wanted(request, facts)
    asked = [host for host in hosts if inputs.get(host.name)]
    # Hosts of one kind get one script, and equal answers are read once.
    kinds = {host.name: json.dumps(inputs[host.name]) for host in asked}
    scripts = {
        kind: Job(
            host_recipes.check_script(request.recipes, inputs[name]), timeout=FACTS_TIMEOUT, anywhere=True, look=True
        )
        for kind, name in {kind: name for name, kind in kinds.items()}.items()
    }
    checks: dict[str, Mapping[str, Check]] = {}
    known: dict[tuple[str, str, tuple[str, ...]], Mapping[str, Check]] = {}
    for name, reply in transport.run_all(asked, lambda host: scripts[kinds[host.name]]).items():
        if isinstance(reply, Trouble):
            checks[name] = host_recipes.unanswered(inputs[name], reply)
            continue
        answer = (reply.out, reply.err, tuple(inputs[name]))
        found = known.get(answer) or host_recipes.parse_checks(reply.out, reply.err, list(inputs[name]), name)
        if not any(check.fault for check in found.values()):  # a fault names its host
            known[answer] = found
        checks[name] = found
    return host_recipes.settle(Preparation(inputs, checks), facts)


def request_for(
    flags: Flags, survey: Survey, wanted: Wanted, skip: Sequence[str] = (), nodes: NodeLook | None = None
) -> PlanRequest:
    """Return what is wanted, with the texts of recipes and templates read from the repository; `nodes` is what
    Kubernetes says of the hosts."""
    return PlanRequest(
        lock=wanted.lock,
        stack=wanted.stack,
        inventory=survey.inventory,
        prefix=survey.prefix,
        recipes=read_tree(flags.root / "recipes"),
        templates=read_tree(flags.root / "env"),
        external_python=flags.python,
        own_nccl=flags.nccl == OWN_NCCL,
        on_busy_host=flags.on_busy_host,
        control_has_slurm=asks_slurm_here(survey),
        skip=tuple(skip),
        mirrors=wanted.mirrors,
        kubernetes=nodes or NodeLook(),
    )


class BootstrapContext(Struct, frozen=True):
    """What every phase of one bootstrap needs; `cluster` is that of Kubernetes, None where no host is said to be in
    one."""

    flags: Flags
    screen: Screen
    run: RunLogs
    transport: ConnectionPool
    survey: Survey
    request: PlanRequest
    plan: Plan
    policy: Policy
    cluster: kube.Cluster | None = None

    def look(self) -> Survey:
        """Return the hosts of the run as they are now. One that could not be asked before stays out of it, with the
        reason: nobody was shown what would be changed on it, and nobody waits for it a second time."""
        inventory = replace(self.survey.inventory, hosts=self.survey.reached)
        now = look_at_hosts(self.flags, self.transport, inventory, self.request.prefix)
        problems = dict.fromkeys((*self.survey.problems, *now.problems))
        return replace(now, inventory=self.survey.inventory, problems=tuple(problems))

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
    def place(self) -> PrefixHandle:
        """The prefix as its host reaches it."""
        return PrefixHandle(self.prefix_host, self.request.prefix, self.request.recipes, self.build_user)

    @property
    def offers_news(self) -> bool:
        """Whether something is built or offered."""
        return bool(self.plan.of_kind("build") or self.plan.of_kind("offer"))

    @property
    def is_unproved(self) -> bool:
        """Whether an earlier run offered this stack and did not see it work."""
        choice = self.plan.choice
        return choice.record.key in self.survey.facts[choice.prefix_host].prefix.unproved


def look_again(context: BootstrapContext) -> BootstrapContext:
    """Return the context as it stands now that the hosts were changed: facts and plan anew."""
    survey, _ = without_dead_jobs(context.transport, with_prefix(context.look()), context.request.recipes)
    request = replace(context.request, kubernetes=look_at_nodes(context.cluster, survey))
    made = decide(context.transport, survey, request, anyhow=True)
    return replace(context, survey=survey, request=request, plan=made)


def leave_out(context: BootstrapContext, gone: Collection[str]) -> BootstrapContext:
    """Return the context without hosts that went away since they were looked at: the others are planned for anew.
    Trouble where there is no plan without them."""
    survey = context.survey.without(gone)
    return replace(context, survey=survey, plan=decide(context.transport, survey, context.request))


def dead_builds(orphans: Orphans) -> tuple[str, ...]:
    """Return, as notes, which hosts count as free although an allocation of a dead build is on them."""
    return tuple(
        f"{orphan.host}: left by a build that is gone: {orphan}; bootstrap takes it away" for orphan in orphans.dead
    )


def show_outcomes(context: BootstrapContext, outcomes: tuple[Outcome, ...]) -> tuple[Outcome, ...]:
    """Show outcomes and return them."""
    context.screen.ended(*outcomes)
    return outcomes


def with_prefix(survey: Survey) -> Survey:
    """Return the survey without hosts that do not see the prefix which most others see; they are problems from here on.

    The survey stays as it was where that is no matter of a few hosts: nobody has the prefix yet, half of them or more
    lack it, or two different ones are seen. What to say then is decided when the plan is made.
    """
    ids = {facts.prefix.id for facts in survey.facts.values() if facts.prefix.id}
    lost: dict[str, list[str]] = {}
    for name, facts in survey.facts.items():
        if why := _lack(facts, wanted=len(ids) == 1):
            lost.setdefault(why, []).append(name)
    names = [name for group in lost.values() for name in group]
    if len(ids) > 1 or 2 * len(names) >= len(survey.facts):
        return survey
    wanted = f"what {len(survey.facts) - len(names)} other hosts see there"
    remedy = "mounting it there; the others go on without"
    problems = (
        Problem(f"{fold(group)} {survey.prefix}", "the prefix is not to be had", why, wanted, remedy)
        for why, group in lost.items()
    )
    return survey.without(names, *problems)


def _lack(facts: Facts, *, wanted: bool) -> str:
    """Return what keeps a host from the prefix, "" where nothing does, or where it need not exist yet."""
    return facts.prefix.problem or ("nothing" if wanted and not facts.prefix.id else "")


class RunLogs(Struct, frozen=True):
    """One run that changes something: its name (time, verb, random part) and the folder its logs go to on the
    control machine."""

    name: str
    folder: Path

    @classmethod
    def start(cls, verb: str) -> RunLogs:
        """Return a new run with its folder; Trouble where that cannot be made, before anything is done that nobody
        could look up."""
        name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{verb}-{secrets.token_hex(3)}"
        folder = state_dir() / "logs" / name
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            remedy = "XDG_STATE_HOME=/a/directory/you/may/write"
            raise Trouble(
                Problem(str(folder.parent), "logs cannot be written there", error.strerror or str(error), try_=remedy)
            ) from None
        return cls(name, folder)

    @classmethod
    def none(cls) -> RunLogs:
        """Return what stands for a run where nothing is done and nothing logged."""
        return cls("", Path(os.devnull))

    def log(self, host: str, step: str, text: str) -> Path:
        """Append `text` to the log of one step on one host and return the file's path."""
        path = self.folder / host / f"{step}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
        return path


LARGEST = 1024**2
"""Bytes of a file of ours that is read; it has some ten lines."""


class EarlierRuns(Struct, frozen=True):
    """What is kept: notes that the last plan had, and seconds of work by the title of a step, its last time."""

    notes: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)


def kept_at(hosts: str, prefix: str) -> Path:
    """Return the file for a hosts file (or node set) and a prefix."""
    where = hosts if not os.path.exists(hosts) else os.path.realpath(hosts)
    return state_dir() / "earlier" / f"{digest({'hosts': where, 'prefix': prefix})}.json"


def read_earlier(path: Path) -> EarlierRuns:
    """Return what is kept; nothing where that cannot be read."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(LARGEST), type=EarlierRuns)
    except (OSError, msgspec.MsgspecError):
        return EarlierRuns()


def keep_earlier(path: Path, earlier: EarlierRuns) -> None:
    """Write what is to be kept; where nothing can be written, nothing is."""
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(msgspec.json.encode(earlier))


def present_plan(screen: Screen, plan: Plan, path: Path, view: PlanView) -> EarlierRuns:
    """Show a plan with the notes that are new since the last one, keep those of this one, and return what earlier runs
    left. Nobody has read the notes of a document."""
    earlier = read_earlier(path)
    show_plan(screen, plan, replace(view, seen=frozenset(earlier.notes), seconds=earlier.seconds))
    if not screen.as_json and plan.notes != earlier.notes:
        earlier = replace(earlier, notes=plan.notes)
        keep_earlier(path, earlier)
    return earlier


def keep_durations(path: Path, outcomes: Iterable[Outcome]) -> None:
    """Keep how long the steps that were done worked, the slowest host of each."""
    took: dict[str, float] = {}
    for outcome in outcomes:
        if outcome.state == "done":
            took[outcome.step] = max(took.get(outcome.step, 0.0), outcome.seconds - outcome.waited)
    if took:
        earlier = read_earlier(path)
        keep_earlier(path, replace(earlier, seconds={**earlier.seconds, **took}))
