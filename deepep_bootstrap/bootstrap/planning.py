"""The way from flags to a plan: the lock and its stack read and held to the rules, the hosts' checks asked,
the plan made.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.fetch import locations
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.inventory.survey import FACTS_TIMEOUT, Flags, Survey, fold_problems, read_tree
from deepep_bootstrap.lock import compatibility, model
from deepep_bootstrap.lock.model import Lock, Stack
from deepep_bootstrap.plan import host_recipes, steps
from deepep_bootstrap.plan.decisions import PlanRequest
from deepep_bootstrap.plan.host_recipes import Preparation
from deepep_bootstrap.plan.steps import Plan
from deepep_bootstrap.prefix.offer import control_has_slurm
from deepep_bootstrap.remote.fleet import ConnectionPool, Job, Transport
from deepep_bootstrap.remote.host import Host


def skipped(value: str) -> tuple[str, ...]:
    """Return what --skip names: host recipes, and the smoke test at the end."""
    names = tuple(name for name in value.split(",") if name)
    known = ("all", "smoke", steps.HOOK, *host_recipes.TITLES)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise Trouble(Problem("--skip", "no such host recipe", ", ".join(unknown), f"some of {', '.join(known)}"))
    return names


def read_lock(flags: Flags) -> tuple[Lock, Stack]:
    """Return the lock and the stack the flags choose."""
    found = model.read_lock_file(flags.lock or flags.root / "deepep.lock.toml")
    name = flags.stack or found.default_stack
    if name not in found.stacks:
        raise Trouble(Problem("--stack", "no such stack in the lock", found=name, wanted=" or ".join(found.stacks)))
    return found, found.stacks[name]


def read_usable(flags: Flags) -> tuple[Lock, Stack]:
    """Return the lock and the stack the flags choose; Trouble with the reason where that stack breaks a rule of
    env/compatibility.toml."""
    found, stack = read_lock(flags)
    if problems := compatibility.check_lock(found, read_tree(flags.root / "env"), (stack.name,)):
        raise Trouble(*problems)
    return found, stack


def decide(door: ConnectionPool, survey: Survey, request: PlanRequest, *, anyhow: bool = False) -> Plan:
    """Return the plan for what is wanted, after one more look at the hosts: the checks of the recipes that prepare
    them. Trouble, with equal reasons of several hosts said once, where there can be no plan; with `anyhow` the plan
    then says so itself."""
    try:
        return steps.make_plan(
            request, survey.facts, check_hosts(door, survey.reached, survey.facts, request), anyhow=anyhow
        )
    except Trouble as trouble:
        # Hosts that did not answer may well be why: they are named too.
        raise Trouble(*fold_problems(trouble.problems, survey.inventory), *survey.problems, code=trouble.code) from None


def check_hosts(
    door: Transport, hosts: Sequence[Host], facts: Mapping[str, Facts], request: PlanRequest
) -> Preparation:
    """Return what the checks of the host recipes say on `hosts`, all asked at the same time by one script each; they
    change nothing."""
    inputs = host_recipes.wanted(request, facts)
    asked = [host for host in hosts if inputs.get(host.name)]
    jobs = {
        host.name: Job(host_recipes.check_script(request.recipes, inputs[host.name]), timeout=FACTS_TIMEOUT)
        for host in asked
    }
    checks = {}
    for name, reply in door.run_all(asked, lambda host: jobs[host.name]).items():
        checks[name] = (
            host_recipes.unanswered(inputs[name], reply)
            if isinstance(reply, Trouble)
            else host_recipes.parse_checks(reply.out, reply.err, list(inputs[name]), name)
        )
    return host_recipes.settle(Preparation(inputs, checks), facts)


def request_for(flags: Flags, survey: Survey, wish: tuple[Lock, Stack], skip: Sequence[str] = ()) -> PlanRequest:
    """Return what is wanted, with the texts of recipes and templates read from the repository."""
    markers = {facts.prefix.id for facts in survey.facts.values()}
    return PlanRequest(
        lock=wish[0],
        stack=wish[1],
        inventory=survey.inventory,
        prefix=survey.prefix,
        recipes=read_tree(flags.root / "recipes"),
        templates=read_tree(flags.root / "env"),
        external_python=flags.python,
        on_busy_host=flags.on_busy_host,
        control_has_slurm=control_has_slurm(survey.prefix, markers.pop() if len(markers) == 1 else ""),
        skip=tuple(skip),
        mirrors=locations.read_mirrors(flags.mirror, os.environ, wish[0].indexes),
    )
