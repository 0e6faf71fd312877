"""`invoke plan`: the steps that bootstrap would take, with their reasons."""

from __future__ import annotations

from deepep_bootstrap.bootstrap.orphans import without_dead_jobs
from deepep_bootstrap.bootstrap.planning import (
    cluster_of,
    dead_builds,
    decide,
    kept_at,
    look_at_hosts,
    look_at_nodes,
    present_plan,
    read_wanted,
    request_for,
    skipped,
    with_prefix,
)
from deepep_bootstrap.bootstrap.saved_plan import save_plan
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import CHANGES, OK, TROUBLE, worst
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.survey import read_inventory, read_tree
from deepep_bootstrap.plan.host_recipes import unbelieved
from deepep_bootstrap.plan.screen import PlanView
from deepep_bootstrap.plan.steps import plan_json
from deepep_bootstrap.slurm.fanout import open_ways


def plan(
    flags: Flags,
    *,
    check: bool = False,
    skip: str = "",
    verbose: bool = False,
    archs: str = "",
    out: str = "",
    kubeconfig: str = "",
    context: str = "",
) -> int:
    """Say what bootstrap would do and why; change nothing. With --out the plan goes into a file too, which
    bootstrap --plan carries out as it is.

    Exit 0, or 2 with `check` when there is something to do; 1 when hosts did not answer, or
    answered what cannot be: they are named."""
    screen = Screen("plan", as_json=flags.json)
    wanted = read_wanted(flags)
    inventory, prefix = read_inventory(flags)
    inventory = inventory.built_for(archs)
    cluster = cluster_of(inventory, kubeconfig, context)
    with open_ways(flags, inventory) as transport:
        survey = with_prefix(look_at_hosts(flags, transport, inventory, prefix))
        survey, orphans = without_dead_jobs(transport, survey, read_tree(flags.root / "recipes"))
        request = request_for(flags, survey, wanted, skipped(skip), look_at_nodes(cluster, survey))
        made = decide(transport, survey, request)
    if out:
        own = {"skip": skip, "archs": archs, "kubeconfig": kubeconfig, "context": context}
        save_plan(out, flags, own, request, made)
    view = PlanView(urgent=dead_builds(orphans), verbose=verbose)
    present_plan(screen, made, kept_at(flags.hosts, prefix), view)
    problems = (*survey.problems, *unbelieved(made.preparation))
    screen.problems(problems)
    code = worst([CHANGES if check and made.steps else OK, *(TROUBLE for _ in problems)])
    if flags.json:
        screen.document(code, problems, **plan_json(made))
    return code
