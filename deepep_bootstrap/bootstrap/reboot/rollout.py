"""Changes that need a reboot, rolling over hosts: K at a time, stopped by the first reboot that goes wrong.

A drained node carries a reason of ours, and that is all the memory there is: after ^C, a lost network or
a power cut the next run reads the facts, goes on with the hosts that still need something, and resumes
those that do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from deepep_bootstrap.bootstrap.reboot.control import Cluster, Line
from deepep_bootstrap.bootstrap.reboot.host_reboot import HostRebootRun
from deepep_bootstrap.bootstrap.reboot.policy import HostReboot, Policy, RebootActions, Tell
from deepep_bootstrap.bootstrap.reboot.wave import Wave
from deepep_bootstrap.core.errors import TROUBLE, Problem, Trouble
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.kube import client as kube
from deepep_bootstrap.kube import nodes as kube_nodes
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.slurm.nodes import is_ours, not_to_resume


def roll(
    transport: Line,
    slurm_at: Sequence[Host],
    orders: Sequence[HostReboot],
    policy: Policy,
    *,
    actions: RebootActions,
    tell: Tell,
    ended: Callable[[str], None] = lambda host: None,
    kubernetes: kube.Cluster | None = None,
) -> tuple[Outcome, ...]:
    """Carry out `orders`, idle nodes first, and return the outcomes of all: "done", "unchanged", "failed", and
    "skipped" for a host that was left as it was (its detail says why, its code is not 0: it still waits).

    `ended` hears of each host as soon as nothing more is done on it.

    `slurm_at` are hosts that have Slurm's clients, best first; empty without Slurm. `kubernetes` is the cluster whose
    nodes some of them are. ^C closes the connections, leaves
    what is drained drained, says so through `tell`, and goes on upwards.
    """
    wave = Wave(transport, slurm_at, policy, actions=actions, tell=tell, kubernetes=kubernetes)
    pool = ThreadPoolExecutor(policy.at_once or max(1, len(orders)))
    try:
        futures = [pool.submit(_one, HostRebootRun(wave, order), ended) for order in _idle_first(wave, orders)]
        return tuple(outcome for future in futures for outcome in future.result())
    except BaseException:
        wave.interrupt()
        pool.shutdown(wait=False, cancel_futures=True)
        transport.close()
        raise
    finally:
        pool.shutdown()


def _one(run: HostRebootRun, ended: Callable[[str], None]) -> tuple[Outcome, ...]:
    """Reboot one host."""
    try:
        return run.run()
    finally:
        ended(run.host)


def _idle_first(wave: Wave, orders: Sequence[HostReboot]) -> list[HostReboot]:
    """Return the orders: first those of nodes that an earlier run left drained, which count as out of use as long as
    they wait; then those of nodes without jobs, since a long job must not keep idle nodes waiting."""
    nodes = [order.node for order in orders if order.node]
    jobs: Mapping[str, tuple[str, ...]] = {}
    with suppress(Trouble):  # what is wrong with a node is said when it is rebooted
        jobs = wave.cluster.look(*nodes).jobs if nodes else {}
    return sorted(orders, key=lambda order: (not is_ours(order.out_of_use), bool(jobs.get(order.node))))


def bring_back(
    transport: Line, slurm_at: Sequence[Host], drained: Mapping[str, str], tell: Tell
) -> tuple[Outcome, ...]:
    """Resume nodes that an earlier run left drained and that need nothing any more (plan.resume_steps says which);
    `drained` has their reasons by node. One that somebody has taken over since, as while a question was shown, is
    theirs."""
    cluster, outcomes = Cluster(transport, slurm_at), []
    for node, reason in drained.items():
        try:
            taken = _resume(cluster, node, reason)
        except Trouble as trouble:
            outcomes.append(Outcome("resume", node, "failed", str(trouble), code=TROUBLE))
            continue
        if taken:
            tell(node, "resume", f"left alone: {taken}")
            outcomes.append(Outcome("resume", node, "skipped", f"left alone: {taken}", code=TROUBLE))
        else:
            tell(node, "resume", "back in use: nothing is left to do")
            outcomes.append(Outcome("resume", node, "done", "drained by an earlier run, nothing is left to do"))
    return tuple(outcomes)


def _resume(cluster: Cluster, node: str, reason: str) -> str:
    """Resume a node that was drained for `reason` and still is. Return what somebody made of it instead, "" for
    nothing."""
    now = cluster.look(node).nodes.get(node)
    if now is None:
        raise Trouble(Problem("Slurm", "does not know the node", node))
    taken = not_to_resume(now, reason)
    if not taken:
        cluster.resume(node)
    return taken


def uncordon(cluster: kube.Cluster, cordoned: Mapping[str, str], tell: Tell) -> tuple[Outcome, ...]:
    """Uncordon nodes of Kubernetes that an earlier run left so and that need nothing any more; `cordoned` has their
    reasons by node. One that somebody has taken over since is theirs."""
    outcomes = []
    for name, reason in cordoned.items():
        try:
            node = kube_nodes.read(cluster, name)
            if node.cordoned and node.reason == reason:
                kube_nodes.uncordon(cluster, node)
                tell(name, "uncordon", "back in use: nothing is left to do")
                outcomes.append(Outcome("uncordon", name, "done", "cordoned by an earlier run, nothing is left to do"))
                continue
        except Trouble as trouble:
            outcomes.append(Outcome("uncordon", name, "failed", str(trouble), code=TROUBLE))
            continue
        taken = "it is not as this program left it"
        tell(name, "uncordon", f"left alone: {taken}")
        outcomes.append(Outcome("uncordon", name, "skipped", f"left alone: {taken}", code=TROUBLE))
    return tuple(outcomes)
