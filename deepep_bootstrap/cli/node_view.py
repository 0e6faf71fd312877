"""`--via=kubernetes` of the verbs that look: a cluster's GPU nodes as its API tells of them; no host is asked."""

from __future__ import annotations

import os

from deepep_bootstrap.core import nodeset
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.kube import node_facts
from deepep_bootstrap.kube.client import connect
from deepep_bootstrap.kube.node_facts import ClusterFacts

KUBERNETES = "kubernetes"
"""The value of --via."""


def through_kubernetes(flags: Flags, kubeconfig: str, context: str) -> bool:
    """Return whether nodes are looked at through the API of Kubernetes. Trouble where a cluster is named and hosts are
    meant."""
    if flags.via == KUBERNETES:
        return True
    if given := [name for name, value in (("--context", context), ("--kubeconfig", kubeconfig)) if value]:
        what = "a cluster of Kubernetes is named, and the hosts are asked"
        raise Trouble(Problem(given[0], what, f"--via={flags.via}", "--via=kubernetes, or no cluster"))
    return False


def look_at_nodes(flags: Flags, kubeconfig: str, context: str) -> ClusterFacts:
    """Return what the cluster says of its GPU nodes, of those of --limit where it is given. Trouble where there are
    none."""
    only = nodeset.expand(flags.limit) if flags.limit else []
    if isinstance(only, str):
        raise Trouble(Problem("--limit", "not a node set", flags.limit[:80], only))
    cluster = connect(context, kubeconfig=os.path.expanduser(kubeconfig))
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
