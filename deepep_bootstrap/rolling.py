"""The phase of a bootstrap in which hosts are rebooted, and what is said of those that wait for it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from deepep_bootstrap import choose, fabric, waves
from deepep_bootstrap.errors import Problem
from deepep_bootstrap.facts import Facts
from deepep_bootstrap.hosts import Host, fold
from deepep_bootstrap.hoststeps import run_recipe
from deepep_bootstrap.orders import Order, Seen
from deepep_bootstrap.plan import RESUME, Outcome, Step, preparation_steps
from deepep_bootstrap.prepare import BLOCKED, REBOOT, STUCK, TITLES, TO_APPLY, Check, Preparation
from deepep_bootstrap.reboots import NEVER, Reboots
from deepep_bootstrap.remote import LOCAL
from deepep_bootstrap.slurm_nodes import is_drained, is_ours, read_reason
from deepep_bootstrap.survey import gather_one, look
from deepep_bootstrap.work import Work

OPTIONS = "driver-options"
FILES_ONLY = frozenset((OPTIONS, "peer-memory"))
"""Recipes that write files alone where they need a reboot: nobody is disturbed when they do so long before it."""


class Crew:
    """What a wave needs done on a host: recipes applied, the host looked at with fresh facts."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.outcomes: list[Outcome] = []

    def apply(self, host: Host, step: Step) -> Outcome:
        """Run a host recipe."""
        return run_recipe(self._work, step, (host,))[0]

    def reload(self, host: Host) -> Outcome:
        """Load the GPU driver anew."""
        step = next(step for step in self._work.plan.of_kind("reboot") if step.name == OPTIONS)
        return run_recipe(self._work, replace(step, title="reload the driver"), (host,), "reload")[0]

    def look(self, host: Host) -> Seen:
        """Look at a host; what could not be done before its reboot, and needs no further one, is done now."""
        facts, preparation = self._ask(host)
        if facts.boot_id != self._work.survey.facts[host.name].boot_id and preparation.at_once:
            for step in preparation_steps(preparation):
                if step.kind == "host":
                    self.outcomes.append(self.apply(host, step))
            facts, preparation = self._ask(host)
        processes = sum(gpu.processes for gpu in facts.gpus)
        before, earlier = self._work.survey.facts[host.name], self._work.plan.preparation.checks.get(host.name, {})
        unmet = (*lost_devices(before, facts), *lacking(earlier, preparation.checks.get(host.name, {})))
        return Seen(facts.boot_id, unmet, f"{processes} GPU processes" if processes else "")

    def _ask(self, host: Host) -> tuple[Facts, Preparation]:
        work = self._work
        facts = gather_one(work.flags, work.door, host, work.request.prefix)
        return facts, look(work.door, (host,), {**work.survey.facts, host.name: facts}, work.request)


def lacking(before: Mapping[str, Check], now: Mapping[str, Check]) -> Iterator[str]:
    """Yield what the checks of a host find not as wanted, by recipe `before` the wave and `now`. What this program could do nothing
    about before is no reason to keep a host; what it can do nothing about only since then is."""
    for recipe, check in now.items():
        known = recipe in before and before[recipe].state == BLOCKED
        if check.state in {TO_APPLY, REBOOT, STUCK} or (check.state == BLOCKED and not known):
            yield f"{TITLES[recipe]}: found {check.found}, wanted {check.wanted}"


def lost_devices(before: Facts, now: Facts) -> Iterator[str]:
    """Yield which kinds of devices a host has fewer of than before: a kernel that an earlier update brought may have no drivers."""
    nics = [[device for device in facts.rdma if not fabric.is_virtual(facts, device.name)] for facts in (before, now)]
    for what, was, found in (("GPUs", len(before.gpus), len(now.gpus)), ("RDMA devices", len(nics[0]), len(nics[1]))):
        if found < was:
            yield f"{what}: found {found}, wanted {was} as before"


def reboot_hosts(work: Work) -> tuple[Outcome, ...]:
    """Do what works only after a reboot, on as many hosts at a time as was allowed, and give back what an earlier run left drained."""
    orders = permitted(tuple(_orders(work)), work.reboots)
    outcomes = list(_resume(work))
    if work.reboots.mode == NEVER:
        outcomes += _write_only(work, {order.host.name for order in orders})
    return (*outcomes, *_roll(work, orders))


def permitted(orders: Sequence[Order], reboots: Reboots) -> tuple[Order, ...]:
    """Return the orders that may be carried out: without leave to reboot only those that a reload may be enough for. The others would
    leave a host between two drivers."""
    return tuple(order for order in orders if order.reload or reboots.mode != NEVER)


def _roll(work: Work, orders: Sequence[Order]) -> Iterator[Outcome]:
    if not orders:
        return
    crew = Crew(work)
    work.screen.started("reboot", [order.host.name for order in orders])

    def tell(host: str, title: str, line: str) -> None:
        work.screen.line(host, title, line)
        # On a terminal too: a wave takes hours, and after ^C somebody must still be able to read what stays drained.
        work.screen.say(f"{host}: {line}")

    outcomes = waves.roll(work.door, slurm_hosts(work), orders, work.reboots.policy(work.run.name), hands=crew, tell=tell)
    work.screen.ended(*crew.outcomes, *outcomes)
    yield from (*crew.outcomes, *outcomes)


def _orders(work: Work) -> Iterator[Order]:
    steps = work.plan.of_kind("reboot")
    waiting: dict[str, list[Check]] = {}
    for host, check in work.plan.preparation.with_reboot:
        waiting.setdefault(host, []).append(check)
    for host, checks in waiting.items():
        facts = work.survey.facts[host]
        todo = [check.recipe for check in checks if check.state == TO_APPLY]
        own = tuple(step for step in steps if step.name in todo and host in step.hosts)
        reload = work.reboots.reload and {check.recipe for check in checks} == {OPTIONS}
        node = facts.slurm.node if facts.slurm.works else ""
        why = ", ".join(TITLES[check.recipe] for check in checks)
        yield Order(work.survey.host(host), node, why, facts.boot_id, own, reload, refusal(facts))


def refusal(facts: Facts) -> str:
    """Return why a host must not be rebooted whatever it needs, "" where it may. Where slurmd runs there may be jobs: unless Slurm says
    which node this is, nobody can drain it or see them."""
    if not facts.prepared.slurmd_memlock or (facts.slurm.works and facts.slurm.node):
        return ""
    found = "Slurm knows no node of that name" if facts.slurm.works else "sinfo does not answer there"
    return f"left alone: slurmd runs there, but {found}, so its jobs cannot be seen"


def _write_only(work: Work, others: Collection[str]) -> Iterator[Outcome]:
    """Without leave to reboot: write what only files are needed for, but for the hosts `others`, so that a reboot by somebody else does
    the rest."""
    for step in work.plan.of_kind("reboot"):
        todo = {host for host, check in work.plan.preparation.of(TO_APPLY) if check.recipe == step.name}
        hosts = tuple(host for host in step.hosts if host in todo and host not in others)
        if step.name in FILES_ONLY and hosts:
            work.screen.started(TITLES[step.name], hosts)
            outcomes = run_recipe(work, replace(step, title=TITLES[step.name]), work.hosts(hosts))
            work.screen.ended(*outcomes)
            yield from outcomes


def _resume(work: Work) -> tuple[Outcome, ...]:
    """Give back the nodes that an earlier run left drained and that need nothing any more."""
    nodes = [work.survey.facts[host].slurm.node for step in work.plan.of_kind(RESUME) for host in step.hosts]
    if not nodes:
        return ()
    outcomes = waves.bring_back(work.door, slurm_hosts(work), nodes, work.screen.line)
    work.screen.ended(*outcomes)
    return outcomes


def slurm_hosts(work: Work) -> tuple[Host, ...]:
    """Return the hosts that have Slurm's clients, the chosen one first; this machine where it is a client itself."""
    first = choose.choose_slurm_host(work.request, work.survey.facts)
    own: Sequence[Host] = (Host("this machine", connection=LOCAL),) if first == choose.CONTROL else ()
    clients = [host for host in work.survey.reached if work.survey.facts[host.name].slurm.works]
    return (*own, *sorted(clients, key=lambda host: (host.name != first, host.role != "login")))


def unfinished(work: Work) -> Iterator[Problem]:
    """Yield what is still not as wanted because a reboot is missing, or although there was one; equal problems folded over hosts."""
    preparation = work.plan.preparation
    for pairs, what, remedy in (
        (preparation.with_reboot, "waits for a reboot", "invoke bootstrap --reboot=rolling"),
        (preparation.of(STUCK), "was rebooted since it was written, and is still not as wanted", "invoke doctor, and dmesg there"),
    ):
        groups: dict[Check, list[str]] = {}
        for host, check in pairs:
            groups.setdefault(check, []).append(host)
        for check, hosts in groups.items():
            yield Problem(fold(hosts), f"{TITLES[check.recipe]}: {what}", check.found, check.wanted, remedy)
    reasons: dict[str, list[str]] = {}
    for host, seen in work.survey.facts.items():
        if is_ours(seen.prepared.slurm_reason) and is_drained(seen.slurm.state):
            reasons.setdefault(read_reason(seen.prepared.slurm_reason).text, []).append(host)
    for reason, hosts in reasons.items():
        remedy = "the same command again: it gives back what needs nothing any more"
        yield Problem(fold(hosts), "stays drained", reason, "in use", remedy)
