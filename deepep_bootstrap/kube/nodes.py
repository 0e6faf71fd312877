"""Nodes of Kubernetes around a reboot: which node a host is, cordon and drain as kubectl does them, and the way back.

A host is the node whose `status.nodeInfo.bootID` is the boot that the host itself is in: names need not be the same on
both sides, and a context that leads to another cluster has no such node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from deepep_bootstrap.core.text import plain
from deepep_bootstrap.kube import names
from deepep_bootstrap.kube.client import Cluster, Object, Refused

NODES = "/api/v1/nodes"
PODS = "/api/v1/pods"

CORDONED = "deepep-bootstrap/cordoned"
"""The annotation of a node that this program cordoned: why, and in which run. What anybody else cordoned has none."""

MIRROR = "kubernetes.io/config.mirror"
"""The annotation of a pod that kubelet starts from a file of its own: it comes back with the node."""

STAYING = frozenset(("DaemonSet", "Node"))
"""Controllers whose pods belong to the node; kubectl leaves them too."""

MOVED = frozenset(("ReplicaSet", "ReplicationController", "StatefulSet"))
"""Controllers that start a pod again elsewhere. Pods of any other one, such as a Job, are work that would be lost:
they are waited for."""

TOO_MANY = 429
"""The answer to an eviction that a PodDisruptionBudget does not allow now."""

LONGEST_REASON = 400
"""Characters of another program's words that are shown."""

SHOWN = 5
"""Pods that are named; of more there is the count."""


class Node(Struct, frozen=True):
    """A node: the boot it is in as kubelet reported it, whether pods may be placed there (`cordoned`: they may not),
    the reason with which this program cordoned it ("" where it did not), whether kubelet says that it is ready, and
    the version of the object that was read. `state` is what its pod of node.yaml wrote in the boot `state_boot` ("":
    nothing), `wanting` the reason with it."""

    name: str
    boot_id: str = ""
    cordoned: bool = False
    reason: str = ""
    ready: bool = False
    version: str = ""
    state: str = ""
    state_boot: str = ""
    wanting: str = ""

    @property
    def state_now(self) -> str:
        """Its state in the boot that it is in; "" where that is not known."""
        return self.state if self.state_boot == self.boot_id else ""


class NodeLook(Struct, frozen=True):
    """What a cluster says of its nodes: `context` is its name ("" where none was asked), `by_host` the node that each
    host is, `cordoned` the reasons of all nodes that this program keeps cordoned."""

    context: str = ""
    by_host: Mapping[str, Node] = field(default_factory=dict)
    cordoned: Mapping[str, str] = field(default_factory=dict)


class Departure(Struct, frozen=True):
    """What is to become of the pods on a node that is drained: those to `evict`, those to wait for until they end by
    themselves (`running`), and those for which the node must be left alone, each with the reason (`keeping`)."""

    evict: tuple[Pod, ...] = ()
    running: tuple[Pod, ...] = ()
    keeping: tuple[str, ...] = ()


class Pod(Struct, frozen=True):
    """A pod on a node. `uid` is that of this very pod: another one of the same name may follow it."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def path(self) -> str:
        """Return where the API has it."""
        return f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"


def read_node(found: Object) -> Node:
    """Return a node as the API has it."""
    meta, spec, status = (_mapping(found.get(key)) for key in ("metadata", "spec", "status"))
    conditions = [_mapping(each) for each in status.get("conditions") or ()]
    return Node(
        name=str(meta.get("name") or ""),
        boot_id=str(_mapping(status.get("nodeInfo")).get("bootID") or ""),
        cordoned=bool(spec.get("unschedulable")),
        reason=plain(str(_mapping(meta.get("annotations")).get(CORDONED) or ""))[:LONGEST_REASON],
        ready=any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions),
        version=str(meta.get("resourceVersion") or ""),
        state=plain(str(_mapping(meta.get("labels")).get(names.STATE) or "")),
        state_boot=str(_mapping(meta.get("annotations")).get(names.STATE_BOOT) or ""),
        wanting=_words_with(conditions),
    )


def _words_with(conditions: Sequence[Mapping[str, Any]]) -> str:
    """Return the words of our own condition."""
    found = (str(each.get("message") or "") for each in conditions if each.get("type") == names.CONDITION)
    return plain(next(found, ""))[:LONGEST_REASON]


def look(cluster: Cluster, boots: Mapping[str, str]) -> NodeLook:
    """Return which nodes the hosts are; `boots` has the boot id that each host is in. Raises Trouble."""
    nodes = [read_node(each) for each in cluster.all(NODES)]
    by_boot = {node.boot_id: node for node in nodes if node.boot_id}
    by_host = {host: by_boot[boot] for host, boot in boots.items() if boot in by_boot}
    ours = {node.name: node.reason for node in nodes if node.cordoned and node.reason}
    return NodeLook(cluster.context or cluster.server, by_host, ours)


def read(cluster: Cluster, name: str) -> Node:
    """Return a node as it is now. Raises Trouble."""
    return read_node(cluster.get(f"{NODES}/{name}"))


def cordon(cluster: Cluster, node: Node, reason: str) -> None:
    """Let no further pod be placed on a node, and say why; of one that is ours only the reason is changed. Raises
    Trouble, also where somebody changed the node since it was read: it may be theirs now."""
    meta = {"annotations": {CORDONED: reason}, "resourceVersion": node.version}
    cluster.patch(f"{NODES}/{node.name}", {"metadata": meta, "spec": {"unschedulable": True}})


def uncordon(cluster: Cluster, node: Node) -> None:
    """Let pods be placed again on a node that this program cordoned. Raises Trouble as `cordon`."""
    meta = {"annotations": {CORDONED: None}, "resourceVersion": node.version}
    cluster.patch(f"{NODES}/{node.name}", {"metadata": meta, "spec": {"unschedulable": None}})


def pods_of(cluster: Cluster, node: str) -> list[Object]:
    """Return the pods on a node, of all namespaces. Raises Trouble."""
    return cluster.all(PODS, fieldSelector=f"spec.nodeName={node}")


def sort_pods(found: Sequence[Object]) -> Departure:
    """Return what is to become of the pods on a node. What kubectl drains only when it is forced to, keeps the node:
    a pod that nobody would start again, and data in an emptyDir that is on the node's disk."""
    evict: list[Pod] = []
    running: list[Pod] = []
    keeping: list[str] = []
    for each in found:
        meta, spec = _mapping(each.get("metadata")), _mapping(each.get("spec"))
        owner, pod = _owner(meta), Pod(*(str(meta.get(key) or "") for key in ("namespace", "name", "uid")))
        if _has_ended(each) or owner in STAYING or MIRROR in _mapping(meta.get("annotations")):
            continue
        if meta.get("deletionTimestamp"):
            running.append(pod)
        elif not owner:
            keeping.append(f"pod {pod} is controlled by nothing: nobody would start it again")
        elif owner not in MOVED:
            running.append(pod)
        elif volume := next(_on_disk(spec), ""):
            keeping.append(f"pod {pod} has data on this node (emptyDir {volume})")
        else:
            evict.append(pod)
    return Departure(tuple(evict), tuple(running), tuple(keeping))


def _has_ended(pod: Object) -> bool:
    return _mapping(pod.get("status")).get("phase") in {"Succeeded", "Failed"}


def _owner(meta: Mapping[str, Any]) -> str:
    """Return the kind of what controls a pod, "" for nothing."""
    owners = [_mapping(each) for each in meta.get("ownerReferences") or ()]
    return next((str(each.get("kind")) for each in owners if each.get("controller")), "")


def _on_disk(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of a pod's emptyDir volumes that are not in memory."""
    for volume in spec.get("volumes") or ():
        if "emptyDir" in volume and _mapping(volume["emptyDir"]).get("medium") != "Memory":
            yield str(volume.get("name") or "?")


def evict(cluster: Cluster, pod: Pod) -> str:
    """Ask for the end of a pod through the eviction API, which keeps the budgets of its owner. Return why it may not
    end now, "" where it is on its way out or gone. Raises Trouble for any other answer."""
    body: Object = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod.name, "namespace": pod.namespace},
        "deleteOptions": {"preconditions": {"uid": pod.uid}},
    }
    try:
        cluster.create(f"{pod.path}/eviction", body)
    except Refused as refused:
        if refused.status == TOO_MANY:
            return f"the budget of {pod} does not allow it now"
        # 409: another pod of that name is there meanwhile, on which node the next look says.
        if not refused.is_absent and refused.status != 409:
            raise
    return ""


def some(pods: Sequence[Pod]) -> str:
    """Return the names of pods, of many the first."""
    names = ", ".join(str(pod) for pod in pods[:SHOWN])
    return f"{names} and {len(pods) - SHOWN} more" if len(pods) > SHOWN else names


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
