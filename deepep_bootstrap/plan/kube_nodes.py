"""What a plan makes of hosts that are nodes of Kubernetes: which are drained before a reboot, which are left alone and
why, and which an earlier run left cordoned for nothing more to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.kube.nodes import Node, NodeLook
from deepep_bootstrap.plan.host_recipes import BLOCKED, REBOOT, STUCK, TO_APPLY, Preparation

HOW = "--context=NAME, or context= in the hosts file"


def refusal(look: NodeLook, host: str, facts: Facts) -> str:
    """Return why a host must not be rebooted since pods may be on it, "" where it may: it is no node, or one that can
    be drained."""
    if host in look.by_host or not facts.kubelet:
        return ""
    if not look.context:
        return f"left alone: kubelet runs there, and no cluster is named in which its node could be drained ({HOW})"
    return f"left alone: kubelet runs there, and no node of {look.context} is in this host's boot: another cluster's?"


def node_of(look: NodeLook, host: str) -> str:
    """Return the node that a host is, "" for none."""
    return look.by_host[host].name if host in look.by_host else ""


def notes(look: NodeLook, facts: Mapping[str, Facts], preparation: Preparation) -> Iterator[str]:
    """Yield what is done with the nodes of hosts that wait for a reboot, equal lines folded over hosts."""
    groups: dict[str, list[str]] = {}
    for host in dict.fromkeys(host for host, _ in preparation.with_reboot):
        if why := refusal(look, host, facts[host]):
            groups.setdefault(f"not rebooted, but {why}", []).append(host)
        elif node := look.by_host.get(host):
            groups.setdefault(_what_is_done(look, node), []).append(host)
    for line, hosts in groups.items():
        yield f"{fold(hosts)}: {line}"


def _what_is_done(look: NodeLook, node: Node) -> str:
    if node.cordoned and not node.reason:
        return f"cordoned in Kubernetes ({look.context}) by somebody: drained before its reboot, and stays cordoned"
    return f"cordoned and drained in Kubernetes ({look.context}) before its reboot, uncordoned after a good look"


def to_uncordon(look: NodeLook, facts: Mapping[str, Facts], preparation: Preparation) -> dict[str, list[str]]:
    """Return the hosts whose nodes an earlier run left cordoned and that need nothing any more, by its reason."""
    waiting = {host for host, _ in preparation.of(TO_APPLY, REBOOT, STUCK, BLOCKED)}
    found: dict[str, list[str]] = {}
    for host, node in look.by_host.items():
        if host in facts and host not in waiting and node.cordoned and node.reason:
            found.setdefault(node.reason, []).append(host)
    return found
