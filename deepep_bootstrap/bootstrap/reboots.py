"""The phase of a bootstrap in which hosts are rebooted, and the problems of hosts that still wait for a
reboot.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

from msgspec.structs import replace

from deepep_bootstrap.bootstrap.hosts import run_recipe
from deepep_bootstrap.bootstrap.planning import BootstrapContext, check_hosts
from deepep_bootstrap.bootstrap.reboot import rollout
from deepep_bootstrap.bootstrap.reboot.drained import left_behind
from deepep_bootstrap.bootstrap.reboot.policy import HostReboot, HostState, Policy
from deepep_bootstrap.core.errors import Problem
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.inventory import regressions
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.inventory.survey import Survey, gather_one
from deepep_bootstrap.plan import host_recipes
from deepep_bootstrap.plan.host_recipes import BLOCKED, OK, REBOOT, STUCK, TITLES, TO_APPLY, Check, Preparation
from deepep_bootstrap.plan.steps import RESUME, UNCORDON, Step, preparation_steps
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.slurm import identity
from deepep_bootstrap.slurm.nodes import MARK, is_drained, is_ours, read_reason, reason_out_of_use

OPTIONS = "driver-options"
FILES_ONLY = frozenset((OPTIONS, "peer-memory"))
"""Recipes that write files alone where they need a reboot: nobody is disturbed when they do so long before it."""


class RebootHooks:
    """What a wave needs done on a host: recipes applied, the host looked at with fresh facts."""

    def __init__(self, context: BootstrapContext) -> None:
        self._context = context
        self._after: dict[tuple[str, str], Outcome] = {}

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """How what was done on hosts after their reboot ended, the last try of each."""
        return tuple(self._after.values())

    def apply(self, host: Host, step: Step) -> Outcome:
        """Run a host recipe."""
        self._context.screen.started(step.title, [host.name])
        try:
            return run_recipe(self._context, step, (host,))[0]
        finally:
            self._context.screen.finished(step.title, host.name)

    def reload(self, host: Host) -> Outcome:
        """Load the GPU driver anew."""
        step = next(step for step in self._context.plan.of_kind("reboot") if step.name == OPTIONS)
        step = replace(step, title="reload the driver")
        self._context.screen.started(step.title, [host.name])
        try:
            return run_recipe(self._context, step, (host,), "reload")[0]
        finally:
            self._context.screen.finished(step.title, host.name)

    def look(self, host: Host) -> HostState:
        """Look at a host; what could not be done before its reboot, and needs no further one, is done now."""
        facts, preparation = self._ask(host)
        if facts.boot_id != self._context.survey.facts[host.name].boot_id and preparation.at_once:
            for step in preparation_steps(preparation):
                if step.kind == "host":
                    self._after[host.name, step.name] = self.apply(host, step)
            facts, preparation = self._ask(host)
        processes = sum(gpu.processes for gpu in facts.gpus)
        before, checks = self._context.survey.facts[host.name], self._context.plan.preparation
        reason = read_reason(before.prepared.slurm_reason)
        left = reason.text if reason.ours else ""
        lost = regressions.since(before, facts, left)
        ordered = {check.recipe for name, check in checks.with_reboot if name == host.name}
        named = {recipe for recipe, title in TITLES.items() if title in left}
        lacks = lacking(
            done_at_once(checks.checks.get(host.name, {})), preparation.checks.get(host.name, {}), ordered | named
        )
        return HostState(facts.boot_id, (*lost, *lacks), f"{processes} GPU processes" if processes else "", lost)

    def _ask(self, host: Host) -> tuple[Facts, Preparation]:
        context = self._context
        facts = gather_one(context.flags, context.transport, host, context.request.prefix)
        return facts, check_hosts(
            context.transport, (host,), {**context.survey.facts, host.name: facts}, context.request
        )


WORSE = {OK: 0, TO_APPLY: 1, REBOOT: 1, STUCK: 2, BLOCKED: 3}
"""States of a check, from what is wanted to what this program can do nothing about."""


def done_at_once(checks: Mapping[str, Check]) -> dict[str, Check]:
    """Return the checks of a host's plan as they are when its wave begins: what needs no reboot was done, or it is
    not in the wave."""
    at_once = (name for name, check in checks.items() if check.state == TO_APPLY and not check.needs_reboot)
    return {**checks, **{name: dataclasses.replace(checks[name], state=OK) for name in at_once}}


def lacking(before: Mapping[str, Check], now: Mapping[str, Check], wanted: Collection[str]) -> Iterator[str]:
    """Yield what the checks of a host find not as wanted `now`: of the recipes `wanted`, which the reboot was for,
    and of others what was better `before` the wave. What was as bad before is no reason to keep a host."""
    for recipe, check in now.items():
        was = before[recipe].state if recipe in before else OK
        if check.state != OK and (recipe in wanted or WORSE[check.state] > WORSE[was]):
            yield f"{TITLES[recipe]}: found {check.found}, wanted {check.wanted}"


def reboot_hosts(context: BootstrapContext, unprepared: Mapping[str, str]) -> tuple[Outcome, ...]:
    """Do what works only after a reboot, on as many hosts at a time as was allowed, and give back what an earlier
    run left drained. The hosts `unprepared` are left alone: what failed on each, a title, is to be mended before a
    reboot is of use."""
    orders = permitted(tuple(_orders(context, unprepared)), context.policy)
    outcomes = [*_resume(context), *_uncordon(context)]
    if not context.policy.reboot:
        outcomes += _write_only(context, {order.host.name for order in orders})
    return (*outcomes, *_roll(context, held_up(orders, _left_behind(context, orders))))


def _left_behind(context: BootstrapContext, orders: Sequence[HostReboot]) -> Mapping[str, str]:
    """Return, by host, why nodes stay drained by this program, without those that are given back now or are part of
    the next wave."""
    part = {order.host.name for order in orders if not order.refused}
    back = {host for step in context.plan.steps if step.kind in {RESUME, UNCORDON} for host in step.hosts}
    if not part:
        return {}
    look = context.request.kubernetes
    theirs = {host_recipes.node_of(look, host) for host in part | back}
    cordoned = {node: why.removeprefix(MARK).strip() for node, why in look.cordoned.items() if node not in theirs}
    return cordoned | left_behind(context.transport, context.survey, slurm_hosts(context), but=part | back)


def held_up(orders: Sequence[HostReboot], left: Mapping[str, str]) -> tuple[HostReboot, ...]:
    """Return the orders, all refused where nodes are `left` drained by an earlier wave, with the reason of each: one
    failed wave after the other would take a cluster out of use node by node."""
    if not left:
        return tuple(orders)
    host, reason = next(iter(left.items()))
    why = f"not started: {fold(left)} stays drained ({reason[:200]}): mend {host} first, or --limit the run to others"
    return tuple(replace(order, refused=order.refused or why) for order in orders)


def permitted(orders: Sequence[HostReboot], policy: Policy) -> tuple[HostReboot, ...]:
    """Return the orders that may be carried out: without leave to reboot only those that a reload may be enough for.
    The others would leave a host between two drivers."""
    return tuple(order for order in orders if order.reload or policy.reboot)


def _roll(context: BootstrapContext, orders: Sequence[HostReboot]) -> Iterator[Outcome]:
    if not orders:
        return
    hooks = RebootHooks(context)
    context.screen.started("reboot", [order.host.name for order in orders])

    def tell(host: str, title: str, line: str) -> None:
        context.screen.line(host, title, line)
        # On a terminal too: a wave takes hours, and after ^C somebody must still be able to read what stays drained.
        context.screen.say(f"{time.strftime('%H:%M:%S')} {host}: {line}")

    outcomes = rollout.roll(
        context.transport,
        slurm_hosts(context),
        orders,
        replace(context.policy, run=context.run.name),
        actions=hooks,
        tell=tell,
        ended=lambda host: context.screen.finished("reboot", host),
        kubernetes=context.cluster,
    )
    context.screen.ended(*hooks.outcomes, *outcomes)
    yield from (*hooks.outcomes, *outcomes)


def _orders(context: BootstrapContext, unprepared: Mapping[str, str]) -> Iterator[HostReboot]:
    """Yield an order for each host that waits for a reboot."""
    waiting: dict[str, list[Check]] = {}
    for host, check in context.plan.preparation.with_reboot:
        waiting.setdefault(host, []).append(check)
    for host, checks in waiting.items():
        yield _order(context, host, checks, unprepared.get(host, ""))


def _order(context: BootstrapContext, host: str, checks: Sequence[Check], failed: str) -> HostReboot:
    """Return the order for a host; `failed` is the step that failed there before, "" for none."""
    facts = context.survey.facts[host]
    to_apply = {check.recipe for check in checks if check.state == TO_APPLY}
    steps = [step for step in context.plan.of_kind("reboot") if step.name in to_apply and host in step.hosts]
    nodes = context.request.kubernetes
    refused = refusal(facts) or host_recipes.node_refusal(nodes, host, facts)
    return HostReboot(
        host=context.survey.host(host),
        node=facts.slurm.node if facts.slurm.works else "",
        why=", ".join(TITLES[check.recipe] for check in checks),
        boot_id=facts.boot_id,
        steps=tuple(steps),
        reload=context.policy.reload and {check.recipe for check in checks} == {OPTIONS},
        refused=f"not rebooted: {failed} failed there" if failed else refused,
        kube_node=host_recipes.node_of(nodes, host),
        out_of_use=reason_out_of_use(facts.slurm.state, facts.prepared.slurm_reason),
    )


def refusal(facts: Facts) -> str:
    """Return why a host must not be rebooted whatever it needs, "" where it may. Where slurmd runs, or Slurm's client
    is there and does not answer, there may be jobs: unless Slurm says which node this is, nobody can drain it or see
    them. A slurmd that is hidden from the account is found by root on the host, before anything is changed there."""
    if facts.slurm.works and facts.slurm.node:
        return ""
    found = "Slurm knows no node of that name" if facts.slurm.works else "sinfo does not answer there"
    if facts.slurm.slurmd or facts.prepared.slurmd_memlock:
        return f"left alone: slurmd runs there, but {found}, so its jobs cannot be seen"
    if not facts.slurm.works and (facts.slurm.version or facts.slurm.path):
        return f"left alone: Slurm is installed there, but {found}, so nobody knows whether jobs run"
    return ""


def _write_only(context: BootstrapContext, others: Collection[str]) -> Iterator[Outcome]:
    """Without leave to reboot: write what only files are needed for, but for the hosts `others`, so that a reboot by
    somebody else does the rest."""
    for step in context.plan.of_kind("reboot"):
        todo = {host for host, check in context.plan.preparation.of(TO_APPLY) if check.recipe == step.name}
        hosts = tuple(host for host in step.hosts if host in todo and host not in others)
        if step.name in FILES_ONLY and hosts:
            context.screen.started(TITLES[step.name], hosts)
            outcomes = run_recipe(context, replace(step, title=TITLES[step.name]), context.hosts(hosts))
            context.screen.ended(*outcomes)
            yield from outcomes


def _resume(context: BootstrapContext) -> tuple[Outcome, ...]:
    """Give back the nodes that an earlier run left drained and that need nothing any more."""
    return give_back(context, _to_resume(context))


def _uncordon(context: BootstrapContext) -> tuple[Outcome, ...]:
    """Give back the nodes of Kubernetes that an earlier run left cordoned and that need nothing any more."""
    look, hosts = context.request.kubernetes, [host for step in context.plan.of_kind(UNCORDON) for host in step.hosts]
    if not hosts or context.cluster is None:
        return ()
    cordoned = {look.by_host[host].name: look.by_host[host].reason for host in hosts}
    outcomes = rollout.uncordon(context.cluster, cordoned, context.screen.line)
    context.screen.ended(*outcomes)
    return outcomes


def _to_resume(context: BootstrapContext) -> list[str]:
    return [host for step in context.plan.of_kind(RESUME) for host in step.hosts]


def mended(context: BootstrapContext, earlier: BootstrapContext) -> list[str]:
    """Return the hosts whose nodes an earlier run left drained, and which need nothing any more since this run did
    what takes no reboot there. `earlier` is how things stood before that: a node with another reason now is the work
    of this run's own wave, or somebody else's."""
    return [
        host
        for host in _to_resume(context)
        if host not in _to_resume(earlier) and _reason(context.survey, host) == _reason(earlier.survey, host)
    ]


def _reason(survey: Survey, host: str) -> str:
    return read_reason(survey.facts[host].prepared.slurm_reason).text if host in survey.facts else ""


def give_back(context: BootstrapContext, hosts: Sequence[str]) -> tuple[Outcome, ...]:
    """Resume the nodes of hosts as long as they are drained for the reason that was seen there."""
    if not hosts:
        return ()
    drained = {context.survey.facts[host].slurm.node: _reason(context.survey, host) for host in hosts}
    outcomes = rollout.bring_back(context.transport, slurm_hosts(context), drained, context.screen.line)
    context.screen.ended(*outcomes)
    return outcomes


def slurm_hosts(context: BootstrapContext) -> tuple[Host, ...]:
    """Return where Slurm is asked in this run. The wave waits for a Slurm host that reboots."""
    return identity.slurm_hosts(context.survey, control_has_slurm=context.request.control_has_slurm)


def unfinished(context: BootstrapContext) -> Iterator[Problem]:
    """Yield what is still not as wanted because a reboot is missing, or although there was one; equal problems
    folded over hosts."""
    preparation = context.plan.preparation
    for pairs, what, remedy in (
        (preparation.with_reboot, "waits for a reboot", "invoke bootstrap --reboot=rolling"),
        (
            preparation.of(STUCK),
            "was rebooted since it was written, and is still not as wanted",
            "invoke doctor, and dmesg there",
        ),
    ):
        groups: dict[Check, list[str]] = {}
        for host, check in pairs:
            groups.setdefault(check, []).append(host)
        for check, hosts in groups.items():
            yield Problem(fold(hosts), f"{TITLES[check.recipe]}: {what}", str(check.found), str(check.wanted), remedy)
    reasons: dict[str, list[str]] = {}
    for host, seen in context.survey.facts.items():
        if is_ours(seen.prepared.slurm_reason) and is_drained(seen.slurm.state):
            reasons.setdefault(read_reason(seen.prepared.slurm_reason).text, []).append(host)
    for host, node in context.request.kubernetes.by_host.items():
        if node.cordoned and node.reason:
            reasons.setdefault(node.reason, []).append(host)
    for reason, hosts in reasons.items():
        remedy = "mend what it says, then the same command, without --skip: it gives back what needs nothing any more"
        yield Problem(fold(hosts), "stays drained", reason, "in use", remedy)
