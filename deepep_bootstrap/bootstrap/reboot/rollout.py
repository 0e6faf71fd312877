"""Changes that need a reboot, rolling over hosts: K at a time, stopped by the first reboot that goes wrong.

A drained node carries a reason of ours, and that is all the memory there is: after ^C, a lost network or
a power cut the next run reads the facts, goes on with the hosts that still need something, and resumes
those that do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from deepep_bootstrap.bootstrap.reboot.control import Cluster, Line
from deepep_bootstrap.bootstrap.reboot.host_reboot import HostRebootRun
from deepep_bootstrap.bootstrap.reboot.policy import HostReboot, Policy, RebootActions, Tell
from deepep_bootstrap.bootstrap.reboot.wave import Wave
from deepep_bootstrap.core.errors import TROUBLE, Trouble
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.remote.host import Host


def roll(
    transport: Line,
    slurm_at: Sequence[Host],
    orders: Sequence[HostReboot],
    policy: Policy,
    *,
    actions: RebootActions,
    tell: Tell,
) -> tuple[Outcome, ...]:
    """Carry out `orders`, idle nodes first, and return the outcomes of all: "done", "unchanged", "failed", and
    "skipped" for a host that was left as it was (its detail says why, its code is not 0: it still waits).

    `slurm_at` are hosts that have Slurm's clients, best first; empty without Slurm. ^C closes the connections, leaves
    what is drained drained, says so through `tell`, and goes on upwards.
    """
    wave = Wave(transport, slurm_at, policy, actions=actions, tell=tell)
    pool = ThreadPoolExecutor(policy.at_once or max(1, len(orders)))
    try:
        futures = [pool.submit(HostRebootRun(wave, order).run) for order in _idle_first(wave, orders)]
        return tuple(outcome for future in futures for outcome in future.result())
    except BaseException:
        wave.interrupt()
        pool.shutdown(wait=False, cancel_futures=True)
        transport.close()
        raise
    finally:
        pool.shutdown()


def _idle_first(wave: Wave, orders: Sequence[HostReboot]) -> list[HostReboot]:
    """Return the orders, those of nodes without jobs first: a long job must not keep idle nodes waiting."""
    nodes = [order.node for order in orders if order.node]
    jobs: Mapping[str, tuple[str, ...]] = {}
    with suppress(Trouble):  # what is wrong with a node is said when it is rebooted
        jobs = wave.cluster.look(*nodes).jobs if nodes else {}
    return sorted(orders, key=lambda order: bool(jobs.get(order.node)))


def bring_back(transport: Line, slurm_at: Sequence[Host], nodes: Sequence[str], tell: Tell) -> tuple[Outcome, ...]:
    """Resume nodes that an earlier run left drained and that need nothing any more (plan.resume_steps says which)."""
    cluster, outcomes = Cluster(transport, slurm_at), []
    for node in nodes:
        try:
            cluster.resume(node)
        except Trouble as trouble:
            outcomes.append(Outcome("resume", node, "failed", str(trouble), code=TROUBLE))
            continue
        tell(node, "resume", "back in use: nothing is left to do")
        outcomes.append(Outcome("resume", node, "done", "drained by an earlier run, nothing is left to do"))
    return tuple(outcomes)
