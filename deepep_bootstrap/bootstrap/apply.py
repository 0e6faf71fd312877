"""Host recipes on many hosts: what a step of kind "host" does, with one outcome per host."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from deepep_bootstrap.core.errors import TROUBLE, Trouble
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.core.recipes import compose, last_lines
from deepep_bootstrap.core.records import read_records
from deepep_bootstrap.plan.host_recipes import LIBRARIES, REBOOT, STATE_FORM
from deepep_bootstrap.plan.steps import Step
from deepep_bootstrap.remote.fleet import Door, Job, Reply
from deepep_bootstrap.remote.host import Host

LIMIT = 20 * 60.0
"""Seconds for a host recipe. A host that hangs would hold all others up, which are done with theirs; the package manager alone may have
to wait five minutes for another program, more than once. What is cut off there, the next run finishes."""

SLOW_LIMIT = 60 * 60.0
"""Seconds for the recipes of SLOW: up to 5 GB from a distant repository, and kernel modules compiled for every kernel there is."""

SLOW = frozenset(("nvidia-driver", "doca-ofed", "cuda-toolkit"))


def apply_step(
    door: Door, hosts: Sequence[Host], step: Step, recipes: Mapping[str, str], *, on_line: Callable[[str, str], None], verb: str = "apply"
) -> tuple[tuple[Outcome, str], ...]:
    """Run a host recipe as root on `hosts` at the same time; return outcome and log text for each, in their order.

    The recipe looks first, acts only where something is missing, and looks again; so an outcome is "done", or "failed" with the last
    lines the recipe said. A host that goes away is a failed outcome and delays no other; one that hangs is one after `limit`. `verb` may
    also be "remove", and "reload" for a recipe that knows how to do without a reboot.
    """
    job = Job(
        compose(recipes, *LIBRARIES, f"host/{step.name}.sh"),
        args=(verb,), env={**step.env, "RECIPE": f"host/{step.name}.sh"}, user="root", watched=True, timeout=limit(step.name),
    )  # fmt: skip
    begin = time.monotonic()
    replies = door.run_all(hosts, lambda host: job, on_line)
    return tuple(judge(step, host.name, replies[host.name], time.monotonic() - begin) for host in hosts)


def limit(name: str) -> float:
    """Return how many seconds the host recipe `name` may take."""
    return SLOW_LIMIT if name in SLOW else LIMIT


def judge(step: Step, host: str, reply: Reply | Trouble, seconds: float) -> tuple[Outcome, str]:
    """Return the outcome of a host recipe's reply, and what it said."""
    if isinstance(reply, Trouble):
        return Outcome(step.title, host, "failed", reply.problems[0].said, seconds, TROUBLE), str(reply)
    said = reply.out + reply.err
    if reply.code:
        last = last_lines(reply.err or reply.out)
        return Outcome(step.title, host, "failed", last, reply.seconds, TROUBLE), said
    try:
        records = read_records(reply.out, STATE_FORM, host, f"host/{step.name}.sh")
    except Trouble as trouble:
        return Outcome(step.title, host, "failed", str(trouble), reply.seconds, TROUBLE), said
    detail = "; ".join(filter(None, ("works after a reboot" if records.text("state") == REBOOT else "", records.text("note"))))
    return Outcome(step.title, host, "done", detail, reply.seconds), said
