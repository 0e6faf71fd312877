"""`invoke nodes`: how far the nodes of a cluster of Kubernetes are prepared, and the reboots that they wait for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace

from deepep_bootstrap.bootstrap.reboot import node_reboots
from deepep_bootstrap.bootstrap.reboot.node_reboots import NodePolicy
from deepep_bootstrap.bootstrap.reboot.rollout import uncordon
from deepep_bootstrap.core import nodeset
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import OK, TROUBLE, Problem, Trouble, worst
from deepep_bootstrap.core.nodeset import fold_short
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.core.text import parse_time
from deepep_bootstrap.inventory.flags import Flags, consent
from deepep_bootstrap.kube import names
from deepep_bootstrap.kube import nodes as kube_nodes
from deepep_bootstrap.kube.client import Cluster, connect
from deepep_bootstrap.kube.nodes import Node
from deepep_bootstrap.testing.slurm_run import run_name

NEVER, ROLLING = "never", "rolling"
WORDS = {
    names.READY: "as wanted",
    names.PREPARING: "being prepared",
    names.PENDING: "wait for a reboot",
    names.FAILED: "not as wanted",
    "": "not looked at in their present boot",
}
STYLES = {names.PENDING: "yellow", names.FAILED: "red"}


def nodes(
    flags: Flags,
    *,
    kubeconfig: str = "",
    context: str = "",
    reboot: str = "never",
    drain_timeout: str = "4h",
    boot_timeout: str = "30m",
) -> int:
    """Say how far the nodes of a cluster are prepared, and reboot those that wait for it, one at a time.

    What node.yaml of `manifests` wrote on each node is told. With --reboot=rolling the nodes that wait for a reboot are
    cordoned, drained with budgets kept and Jobs waited for, rebooted by a pod on the node, looked at and given back,
    and what an earlier run left cordoned and is as wanted is given back. Without it nothing is changed."""
    screen = Screen("nodes", as_json=flags.json)
    policy = read_policy(reboot, drain_timeout, boot_timeout)
    cluster = connect(context, kubeconfig=os.path.expanduser(kubeconfig))
    try:
        daemon = node_reboots.find_daemon(cluster)
        found = read_nodes(cluster, flags.limit)
        show(screen, cluster, found)
        pending, back = node_reboots.waiting_nodes(found), node_reboots.to_give_back(found)
        outcomes: tuple[Outcome, ...] = ()
        problems: tuple[Problem, ...] = ()
        if policy and (pending or back):
            show_plan(screen, pending, sorted(back))
            refusal = None if flags.dry_run else consent(flags, "nodes", "Go on?")
            problems = (refusal,) if refusal else ()
            if not flags.dry_run and not refusal:
                outcomes = uncordon(cluster, back, lambda node, title, line: screen.say(f"  {node}: {line}"))
                outcomes += node_reboots.reboot_nodes(
                    cluster, daemon, pending, policy, lambda node, line: screen.say(f"  {node}: {line}")
                )
                found = read_nodes(cluster, flags.limit)
    finally:
        cluster.close()
    for problem in problems:
        screen.problem(problem)
    code = worst([OK, *(each.code for each in outcomes), *(TROUBLE for _ in problems)])
    about = {"context": cluster.context, "nodes": {node.name: node_json(node) for node in found}}
    screen.document(code, problems, **about, outcomes=[to_builtins(each) for each in outcomes])
    return code


def read_policy(reboot: str, drain_timeout: str, boot_timeout: str) -> NodePolicy | None:
    """Return how nodes are rebooted, None where they are not. Raises Trouble."""
    if reboot not in {NEVER, ROLLING}:
        raise Trouble(Problem("--reboot", "unknown value for nodes", reboot[:40] or "nothing", f"{NEVER} or {ROLLING}"))
    drain, boot = parse_time("--drain-timeout", drain_timeout), parse_time("--boot-timeout", boot_timeout)
    policy = NodePolicy(run_name("nodes"), drain_timeout=drain, boot_timeout=boot)
    return replace(policy, settle=min(policy.settle, boot)) if reboot == ROLLING else None


def read_nodes(cluster: Cluster, limit: str) -> list[Node]:
    """Return the nodes that node.yaml prepares or this program left cordoned, of those that --limit names. Trouble
    where there are none."""
    only = nodeset.expand(limit) if limit else []
    if isinstance(only, str):
        raise Trouble(Problem("--limit", "not a node set", limit[:80], only))
    every = [kube_nodes.read_node(each) for each in cluster.all(kube_nodes.NODES)]
    found = [node for node in every if (node.state or node.reason) and (not only or node.name in only)]
    if not found:
        wanted = f"nodes named {limit}" if limit else f"nodes with the label {names.STATE}"
        remedy = "kubectl get pods -n kube-system -l app.kubernetes.io/component=deepep-node -o wide"
        raise Trouble(Problem(cluster.context, "no node says how it is", wanted=wanted, try_=remedy))
    return sorted(found, key=lambda node: node.name)


def show(screen: Screen, cluster: Cluster, found: Sequence[Node]) -> None:
    """Print the nodes by how they are, equal reasons once, and which we keep cordoned."""
    screen.say(f"{fold_short(node.name for node in found)} of {cluster.context}", style="bold")
    for state, those in node_reboots.states(found).items():
        by_reason: dict[str, list[str]] = {}
        for node in those:
            by_reason.setdefault("" if state == names.READY else node.wanting, []).append(node.name)
        for reason, who in by_reason.items():
            text = f"  {WORDS[state]}: {fold_short(who)}" + (f" ({reason})" if reason else "")
            screen.say(text, style=STYLES.get(state, ""))
    for node in found:
        if node.cordoned and node.reason:
            screen.say(f"  cordoned by us: {node.name} ({node.reason})", style="yellow")


def show_plan(screen: Screen, pending: Sequence[Node], back: Sequence[str]) -> None:
    """Print what is done."""
    if back:
        screen.say(f"  give back: {fold_short(back)}, as wanted since")
    if pending:
        who = fold_short(node.name for node in pending)
        screen.say(f"  REBOOT {who}: one at a time, each cordoned and drained before, given back after a good look")


def node_json(node: Node) -> dict[str, Any]:
    """Return a node as JSON values."""
    return {
        "state": node.state_now,
        "why": node.wanting,
        "ready": node.ready,
        "cordoned": node.cordoned,
        "reason": node.reason,
    }
