"""What is done on the hosts themselves: the prefix made and proved to be shared, and host recipes on many hosts at the
same time, with one outcome per host."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from deepep_bootstrap.bootstrap.planning import BootstrapContext, RunLogs, show_outcomes
from deepep_bootstrap.bootstrap.reboot.policy import ACTIVE_LATER
from deepep_bootstrap.core import filetree
from deepep_bootstrap.core.errors import TROUBLE, Trouble
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.core.recipes import compose, last_lines
from deepep_bootstrap.core.records import read_records
from deepep_bootstrap.fetch import uv
from deepep_bootstrap.fetch.sources import fetch_source
from deepep_bootstrap.inventory.forms import CHECK
from deepep_bootstrap.plan.host_recipes import LIBRARIES, REBOOT
from deepep_bootstrap.plan.steps import HOOK, Step
from deepep_bootstrap.prefix import generations
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Job, Reply, Transport

PREFIX = "prefix"

BLOCK = 64 * 1024
"""Characters of all hosts' lines that wait to be written into logs."""

RESULT = re.compile(r"[a-z_]+=")
"""How a recipe's lines of results begin, which are no talk for people."""

NEEDS_SOURCE = frozenset(("gdrdrv",))
SOURCES = "/var/lib/deepep-bootstrap/src"
"""Where a host gets a source that one of its own recipes compiles, for as long as that runs."""


def share_prefix(context: BootstrapContext) -> tuple[Outcome, ...]:
    """Make the prefix and prove by writing that it is one directory on all hosts; one that went away meanwhile is a
    failed outcome."""
    steps = context.plan.of_kind("prefix")
    if not steps:
        return ()
    host, begin = context.prefix_host, time.monotonic()
    context.screen.started(PREFIX, [host.name])
    marker = generations.make_prefix(context.transport, context.place)
    gone = generations.probe_shared(context.transport, context.place, context.hosts(steps[0].hosts))
    took = time.monotonic() - begin
    seen = (
        f"{context.request.prefix}, id {marker[:8]}, one directory on "
        f"{fold(name for name in steps[0].hosts if name not in gone)}"
    )
    lost = (Outcome(PREFIX, name, "failed", why, took, TROUBLE) for name, why in gone.items())
    return show_outcomes(context, (Outcome(PREFIX, host.name, "done", seen, took), *lost))


def run_recipes(context: BootstrapContext, steps: Sequence[Step]) -> tuple[Outcome, ...]:
    """Run host recipes one after the other, each on its hosts at the same time."""
    outcomes: list[Outcome] = []
    for step in steps:
        context.screen.started(step.title, step.hosts)
        outcomes.extend(show_outcomes(context, run_recipe(context, step, context.hosts(step.hosts))))
    return tuple(outcomes)


def run_recipe(
    context: BootstrapContext, step: Step, hosts: Sequence[Host], verb: str = "apply"
) -> tuple[Outcome, ...]:
    """Run one host recipe on some hosts and log what it says as it comes; one that compiles a kernel module is sent the
    locked source first."""

    log = _StepLog(context.run, step.name)

    def show(host: str, line: str) -> None:
        log.line(host, line)
        if not RESULT.match(line):
            context.screen.line(host, step.title, line)

    unsent: dict[str, str] = {}
    if step.name in NEEDS_SOURCE and verb == "apply":
        step, unsent = send_source(context, step, hosts)
    ready = [host for host in hosts if host.name not in unsent]

    def ended(host: str) -> None:
        context.screen.finished(step.title, host)

    recipes = context.request.recipes
    pairs = apply_step(context.transport, ready, step, recipes, on_line=show, on_end=ended, verb=verb)
    if folder := step.env.get("SRC"):
        context.transport.run_all(ready, lambda _: Job('rm -rf -- "$SRC"', env={"SRC": folder}, user="root"))
    lost = ((Outcome(step.title, host, "failed", why, code=TROUBLE), why) for host, why in unsent.items())
    return tuple(replace(outcome, log=str(log.end(outcome.host, text))) for outcome, text in (*pairs, *lost))


class _StepLog:
    """The logs of one step on its hosts, written while it runs. For one thread at a time."""

    def __init__(self, run: RunLogs, step: str) -> None:
        self._run, self._step = run, step
        self._lines: dict[str, list[str]] = {}
        self._size = 0

    def line(self, host: str, line: str) -> None:
        """Take a line of a host; what has come goes to disk in pieces of BLOCK."""
        self._lines.setdefault(host, []).append(f"{line}\n")
        self._size += len(line) + 1
        if self._size > BLOCK:
            for each in list(self._lines):
                self.end(each)
            self._size = 0

    def end(self, host: str, text: str = "") -> Path:
        """Write what is still to be written of a host, and `text`; return the file."""
        return self._run.log(host, self._step, "".join((*self._lines.pop(host, ()), text)))


def send_source(context: BootstrapContext, step: Step, hosts: Sequence[Host]) -> tuple[Step, dict[str, str]]:
    """Fetch and verify the stack's GDRCopy and send it to `hosts` as root's. Return the step with SRC in its inputs,
    and the hosts that could not be given it with the reason."""
    source = context.request.lock.sources[context.request.stack.gdrcopy]
    tree = fetch_source(source, context.request.mirrors, uv.cache_dir())
    env = {"SRC": f"{SOURCES}/{source.name}-{source.version}"}
    job = Job(compose(context.request.recipes, "lib.sh", "host/receive.sh"), env=env, user="root", timeout=LIMIT)
    unsent: dict[str, str] = {}
    for host in hosts:
        try:
            reply = context.transport.send(host, job, filetree.tar_tree([(".", tree)]))
        except Trouble as trouble:
            unsent[host.name] = trouble.problems[0].message
            continue
        if reply.code:
            unsent[host.name] = f"source {source.name} cannot be put there: {last_lines(reply.err)}"
    return replace(step, env={**step.env, **env}), unsent


LIMIT = 20 * 60.0
"""Seconds for a host recipe. A host that hangs would hold all others up, which are done with theirs; the package
manager alone may have to wait five minutes for another program, more than once. What is cut off there, the next run
finishes."""

SLOW_LIMIT = 60 * 60.0
"""Seconds for the recipes of SLOW: up to 5 GB from a distant repository, and kernel modules compiled for every
kernel there is."""

SLOW = frozenset(("nvidia-driver", "doca-ofed", "cuda-toolkit"))


def apply_step(
    transport: Transport,
    hosts: Sequence[Host],
    step: Step,
    recipes: Mapping[str, str],
    *,
    on_line: Callable[[str, str], None],
    on_end: Callable[[str], None] = lambda _: None,
    verb: str = "apply",
) -> tuple[tuple[Outcome, str], ...]:
    """Run a host recipe as root on `hosts` at the same time; return the outcome for each, in their order, with what
    belongs into its log beside the lines that went to `on_line`. `on_end` hears of each host that has ended.

    The recipe looks first, acts only where something is missing, and looks again; so an outcome is "done", or "failed"
    with the last lines the recipe said. A host that goes away is a failed outcome and delays no other; one that hangs
    is one after `limit`. `verb` may also be "remove", and "reload" for a recipe that knows how to do without a reboot.
    """
    job = Job(
        compose(recipes, *LIBRARIES, f"host/{step.name}.sh"),
        args=(verb,),
        env={**step.env, "RECIPE": f"host/{step.name}.sh"},
        user="root",
        watched=True,
        timeout=limit(step.name),
        log=True,
        # It writes two small files; others install packages, and load modules that a job may use.
        anywhere=step.kind == HOOK,
    )
    begin = time.monotonic()
    replies = transport.run_all(hosts, lambda host: job, on_line, on_end)
    return tuple(judge(step, host.name, replies[host.name], time.monotonic() - begin) for host in hosts)


def limit(name: str) -> float:
    """Return how many seconds the host recipe `name` may take."""
    return SLOW_LIMIT if name in SLOW else LIMIT


def judge(step: Step, host: str, reply: Reply | Trouble, seconds: float) -> tuple[Outcome, str]:
    """Return the outcome of a host recipe's reply, and why the host was lost where it was, for its log."""
    if isinstance(reply, Trouble):
        return Outcome(step.title, host, "failed", reply.problems[0].message, seconds, TROUBLE), str(reply)
    if reply.code:
        last = last_lines(reply.said)
        return Outcome(step.title, host, "failed", last, reply.seconds, TROUBLE), ""
    try:
        records = read_records(reply.out, CHECK, host, f"host/{step.name}.sh")
    except Trouble as trouble:
        return Outcome(step.title, host, "failed", str(trouble), reply.seconds, TROUBLE), ""
    detail = "; ".join(
        filter(None, (ACTIVE_LATER if records.text("state") == REBOOT else "", str(records.shown("note"))))
    )
    return Outcome(step.title, host, "done", detail, reply.seconds), ""
