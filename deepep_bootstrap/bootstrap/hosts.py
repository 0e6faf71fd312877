"""The phase of a bootstrap that prepares hosts: recipes run as root, each on all its hosts at the same time."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from deepep_bootstrap.bootstrap import apply
from deepep_bootstrap.bootstrap.context import Work, tell
from deepep_bootstrap.core import tarstream
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import TROUBLE, Trouble
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.core.recipes import compose, last_lines
from deepep_bootstrap.fetch import uv
from deepep_bootstrap.fetch.sources import fetch_source
from deepep_bootstrap.plan.host_recipes import TITLES
from deepep_bootstrap.plan.steps import HOOK, Step
from deepep_bootstrap.remote.fleet import Job
from deepep_bootstrap.remote.host import Host

NEEDS_SOURCE = frozenset(("gdrdrv",))
SOURCES = "/var/lib/deepep-bootstrap/src"
"""Where a host gets a source that one of its own recipes compiles, for as long as that runs."""


def prepare_hosts(work: Work) -> tuple[Outcome, ...]:
    """Run the host recipes of the plan that need no reboot, each on its hosts at the same time."""
    return run_recipes(work, work.plan.of_kind("host"))


def finish_hosts(work: Work) -> tuple[Outcome, ...]:
    """Run those host recipes that could not be planned before the hosts' own preparation was done."""
    return run_recipes(work, [step for step in work.plan.of_kind("host") if step.name not in TITLES])


def place_hooks(work: Work) -> tuple[Outcome, ...]:
    """Let the login shells of all hosts find the modulefiles that the prefix offers by now."""
    return run_recipes(work, work.plan.of_kind(HOOK))


def run_recipes(work: Work, steps: Sequence[Step]) -> tuple[Outcome, ...]:
    """Run host recipes one after the other, each on its hosts at the same time."""
    outcomes: list[Outcome] = []
    for step in steps:
        work.screen.started(step.title, step.hosts)
        outcomes.extend(tell(work, run_recipe(work, step, work.hosts(step.hosts))))
    return tuple(outcomes)


def run_recipe(work: Work, step: Step, hosts: Sequence[Host], verb: str = "apply") -> tuple[Outcome, ...]:
    """Run one host recipe on some hosts and log what it said; one that compiles a kernel module is sent the locked source first."""
    tell_line = functools.partial(show_line, work.screen, step.title)
    unsent: dict[str, str] = {}
    if step.name in NEEDS_SOURCE and verb == "apply":
        step, unsent = send_source(work, step, hosts)
    ready = [host for host in hosts if host.name not in unsent]
    pairs = apply.apply_step(work.door, ready, step, work.request.recipes, on_line=tell_line, verb=verb)
    if folder := step.env.get("SRC"):
        work.door.run_all(ready, lambda _: Job('rm -rf -- "$SRC"', env={"SRC": folder}, user="root"))
    lost = ((Outcome(step.title, host, "failed", why, code=TROUBLE), why) for host, why in unsent.items())
    return tuple(replace(outcome, log=str(work.run.log(outcome.host, step.name, text))) for outcome, text in (*pairs, *lost))


def send_source(work: Work, step: Step, hosts: Sequence[Host]) -> tuple[Step, dict[str, str]]:
    """Fetch and verify the stack's GDRCopy and send it to `hosts` as root's. Return the step with SRC in its inputs, and the hosts
    that could not be given it with the reason."""
    source = work.request.lock.sources[work.request.stack.gdrcopy]
    tree = fetch_source(source, work.mirrors, uv.cache_dir())
    env = {"SRC": f"{SOURCES}/{source.name}-{source.version}"}
    job = Job(compose(work.request.recipes, "lib.sh", "host/receive.sh"), env=env, user="root", timeout=apply.LIMIT)
    unsent: dict[str, str] = {}
    for host in hosts:
        try:
            reply = work.door.send(host, job, tarstream.tar_tree([(".", tree)]))
        except Trouble as trouble:
            unsent[host.name] = trouble.problems[0].said
            continue
        if reply.code:
            unsent[host.name] = f"source {source.name} cannot be put there: {last_lines(reply.err)}"
    return replace(step, env={**step.env, **env}), unsent


def show_line(screen: Screen, title: str, host: str, text: str) -> None:
    """Show the last line of a host recipe."""
    screen.line(host, title, text)
