"""`--via=kubernetes` of the verbs that look: a cluster's GPU nodes as its API tells of them, and, where debug pods are
asked for, as the nodes themselves are.
"""

from __future__ import annotations

import os
import sys

from msgspec import Struct

from deepep_bootstrap.core import nodeset
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.inventory import hostsfile
from deepep_bootstrap.inventory.facts import facts_script
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.survey import read_tree
from deepep_bootstrap.kube import node_facts
from deepep_bootstrap.kube.client import connect
from deepep_bootstrap.kube.node_facts import ClusterFacts
from deepep_bootstrap.kube.runs import ClusterRun
from deepep_bootstrap.kubernetes.debug_pods import DebugPods, NodesSeen, ask_nodes, image_of

KUBERNETES = "kubernetes"
"""The value of --via."""


class ClusterFlags(Struct, frozen=True):
    """Which cluster, and whether its nodes are looked at from inside: `debug_pods` is the image for that, `namespace`
    where its pods are made."""

    kubeconfig: str = ""
    context: str = ""
    namespace: str = ""
    debug_pods: str = ""


def through_kubernetes(flags: Flags, asked: ClusterFlags) -> bool:
    """Return whether nodes are looked at through the API of Kubernetes. Trouble where a cluster is named and hosts are
    meant."""
    if flags.via == KUBERNETES:
        return True
    given = [f"--{name.replace('_', '-')}" for name in asked.__struct_fields__ if getattr(asked, name)]
    if given:
        what = "a cluster of Kubernetes is named, and the hosts are asked"
        raise Trouble(Problem(given[0], what, f"--via={flags.via}", "--via=kubernetes, or no cluster"))
    return False


def look_at_nodes(flags: Flags, asked: ClusterFlags) -> ClusterFacts:
    """Return what the cluster says of its GPU nodes, of those of --limit where it is given. Trouble where there are
    none."""
    if asked.debug_pods:
        image_of(asked.debug_pods)
    only = nodeset.expand(flags.limit) if flags.limit else []
    if isinstance(only, str):
        raise Trouble(Problem("--limit", "not a node set", flags.limit[:80], only))
    cluster = connect(asked.context, kubeconfig=os.path.expanduser(asked.kubeconfig))
    try:
        found = node_facts.gather(cluster, frozenset(only))
    finally:
        cluster.close()
    if not found.nodes:
        wanted = f"nodes named {flags.limit}" if flags.limit else "nodes with nvidia.com/gpu, or a label of GPUs"
        raise Trouble(
            Problem(found.context, "no GPU node is there", wanted=wanted, try_="kubectl get nodes --show-labels")
        )
    return found


def look_inside(flags: Flags, asked: ClusterFlags, found: ClusterFacts) -> NodesSeen:
    """Return what the nodes that are ready say of themselves; nothing where no debug pods are asked for. Trouble where
    the cluster takes no such pods."""
    if not asked.debug_pods:
        return NodesSeen({})
    # Reading runs of tests takes as long as all else here, and only a run's name is wanted.
    from deepep_bootstrap.testing.slurm_run import run_name

    ready = [node.name for node in found.nodes if node.ready]
    absent = [
        Problem(node.name, "is not ready: no debug pod starts there", try_=f"kubectl describe node {node.name}")
        for node in found.nodes
        if not node.ready
    ]
    script = facts_script(read_tree(flags.root / "recipes"))
    pods = DebugPods(image_of(asked.debug_pods), script, (flags.prefix or hostsfile.DEFAULT_PREFIX, flags.python))
    kubeconfig = os.path.expanduser(asked.kubeconfig)
    cluster = connect(asked.context, kubeconfig=kubeconfig, namespace=asked.namespace)
    try:
        run = ClusterRun(cluster, cluster.namespace, run_name("facts"))
        seen = ask_nodes(run, ready, pods, tell=lambda text: print(text, file=sys.stderr))
    finally:
        cluster.close()
    return NodesSeen(seen.facts, (*absent, *seen.problems))
