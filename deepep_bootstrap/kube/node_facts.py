"""What the API says of a cluster's GPU nodes: labels, what may be allocated, versions, conditions, and which operators
are there. Nothing is asked of the nodes themselves.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field

from deepep_bootstrap.core.text import plain
from deepep_bootstrap.kube import names
from deepep_bootstrap.kube.client import Cluster, Object, Refused
from deepep_bootstrap.kube.nodes import NODES, read_node

RDMA = re.compile(
    r"rdma/.+|networking\.gke\.io\.networks/rdma-.+|vpc\.amazonaws\.com/efa|"
    r"(?:nvidia|mellanox|openshift)\.(?:com|io)/.*(?:rdma|hostdev|sriov|mlnx|roce|hca|ib).*"
)
"""Resources of RDMA devices: of the shared device plugin, GKE's Network objects, AWS, and SR-IOV's plugin."""

DRIVER_LABELS = ("nvidia.com/cuda.driver-version.full", "nvidia.com/cuda.driver.version")
MAJOR, MINOR, REVISION = (f"nvidia.com/cuda.driver.{part}" for part in ("major", "minor", "rev"))
"""Labels of NVIDIA's GPU feature discovery; older ones have the version in parts."""

GKE_DRIVER = "cloud.google.com/gke-gpu-driver-version"
"""The label of a GKE pool whose driver Google installs; its value is a channel such as `latest`, or `disabled`."""

PRODUCTS = ("nvidia.com/gpu.product", names.GKE_ACCELERATOR)
PRESENT = "nvidia.com/gpu.present"
COUNTED = "nvidia.com/gpu.count"
PRESSURES = ("MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable")

OPERATORS: Mapping[str, re.Pattern[str]] = {
    "GPU device plugin": re.compile(r"nvidia-gpu-device-plugin|nvidia-device-plugin|nvdp-"),
    "GPU operator": re.compile(r"gpu-operator$"),
    "network operator": re.compile(r"network-operator"),
    "RDMA device plugin": re.compile(r"rdma-shared|sriov-(?:network-)?device-plugin"),
    "gIB installer": re.compile(r"nccl-rdma-installer|(?:^|-)gib(?:-|$)"),
    "DRANET": re.compile(r"dranet|networking-dra-driver"),
    "JobSet": re.compile(r"jobset-controller"),
    "LeaderWorkerSet": re.compile(r"lws-controller"),
    "Kueue": re.compile(r"kueue-controller"),
}
"""What the DaemonSets and Deployments of operators are called by their own charts and by GKE."""


class NodeFacts(Struct, frozen=True):
    """One node. `gpus` may be allocated of `gpu_capacity`; `counted` is how many its driver shows, -1 where nobody
    says; `rdma` are allocatable devices by resource; `driver` is a version, `driver_channel` GKE's word for one that
    Google chose; "" is not known. `block` is the block of machines it stands in, `pressure` conditions that are
    true."""

    name: str
    ready: bool = False
    cordoned: bool = False
    reason: str = ""
    product: str = ""
    gpus: int = 0
    gpu_capacity: int = 0
    counted: int = -1
    rdma: Mapping[str, int] = field(default_factory=dict)
    driver: str = ""
    driver_channel: str = ""
    kernel: str = ""
    system: str = ""
    runtime: str = ""
    kubelet: str = ""
    block: str = ""
    is_gke: bool = False
    spot: bool = False
    taints: tuple[str, ...] = ()
    pressure: tuple[str, ...] = ()


class ClusterFacts(Struct, frozen=True):
    """A cluster's GPU nodes, the operators that were found there, and whether NICs are claimed (DeviceClass) in place
    of being resources of nodes."""

    context: str
    nodes: tuple[NodeFacts, ...]
    operators: tuple[str, ...] = ()
    claims: bool = False


def gather(cluster: Cluster, only: Collection[str] = ()) -> ClusterFacts:
    """Return what a cluster says of its GPU nodes, of those named `only` where some are. Raises Trouble."""
    found = [each for each in cluster.all(NODES) if _has_gpus(each)]
    nodes = tuple(read_facts(each) for each in found)
    workloads = [
        str(_mapping(each.get("metadata")).get("name") or "")
        for kind in ("daemonsets", "deployments")
        for each in _optional(cluster, f"/apis/apps/v1/{kind}")
    ]
    classes = _optional(cluster, "/apis/resource.k8s.io/v1/deviceclasses")
    claims = any(_mapping(each.get("metadata")).get("name") == names.RDMA_DEVICE_CLASS for each in classes)
    return ClusterFacts(
        cluster.context or cluster.server,
        tuple(node for node in nodes if not only or node.name in only),
        operators(workloads),
        claims,
    )


def _optional(cluster: Cluster, path: str) -> list[Object]:
    """Return the objects of a list that this cluster may not have, or not show to us."""
    try:
        return cluster.all(path)
    except Refused as refused:
        if refused.status in {403, 404}:
            return []
        raise


def operators(workloads: Sequence[str]) -> tuple[str, ...]:
    """Return which operators the names of DaemonSets and Deployments tell of."""
    return tuple(name for name, form in OPERATORS.items() if any(form.search(each) for each in workloads))


def _has_gpus(node: Object) -> bool:
    labels = _mapping(_mapping(node.get("metadata")).get("labels"))
    capacity = _mapping(_mapping(node.get("status")).get("capacity"))
    return labels.get(PRESENT) == "true" or names.GKE_ACCELERATOR in labels or _number(capacity, names.NVIDIA_GPU) > 0


def read_facts(node: Object) -> NodeFacts:
    """Return the facts of a node as the API has it."""
    meta, spec, status = (_mapping(node.get(key)) for key in ("metadata", "spec", "status"))
    labels = {str(key): plain(str(value)) for key, value in _mapping(meta.get("labels")).items()}
    capacity, allocatable = _mapping(status.get("capacity")), _mapping(status.get("allocatable"))
    info, basis = _mapping(status.get("nodeInfo")), read_node(node)
    conditions = [_mapping(each) for each in status.get("conditions") or ()]
    return NodeFacts(
        name=basis.name,
        ready=basis.ready,
        cordoned=basis.cordoned,
        reason=basis.reason,
        product=next((labels[key] for key in PRODUCTS if labels.get(key)), ""),
        gpus=_number(allocatable, names.NVIDIA_GPU),
        gpu_capacity=_number(capacity, names.NVIDIA_GPU),
        counted=int(labels[COUNTED]) if labels.get(COUNTED, "").isdecimal() else -1,
        rdma={str(key): _number(allocatable, key) for key in sorted(capacity) if RDMA.fullmatch(str(key))},
        driver=_driver(labels),
        driver_channel=labels.get(GKE_DRIVER, ""),
        kernel=plain(str(info.get("kernelVersion") or "")),
        system=plain(str(info.get("osImage") or "")),
        runtime=plain(str(info.get("containerRuntimeVersion") or "")),
        kubelet=plain(str(info.get("kubeletVersion") or "")),
        block=labels.get(names.GCE_BLOCK, ""),
        is_gke=any(key.startswith("cloud.google.com/gke-") for key in labels),
        spot=labels.get(names.GKE_SPOT) == "true",
        taints=tuple(_taints(spec)),
        pressure=tuple(
            str(each.get("type")) for each in conditions if each.get("type") in PRESSURES and each["status"] == "True"
        ),
    )


def _driver(labels: Mapping[str, str]) -> str:
    if full := next((labels[key] for key in DRIVER_LABELS if labels.get(key)), ""):
        return full
    parts = [labels[key] for key in (MAJOR, MINOR, REVISION) if labels.get(key)]
    return ".".join(parts)


def _taints(spec: Mapping[str, Any]) -> Iterator[str]:
    for taint in spec.get("taints") or ():
        each = _mapping(taint)
        value = f"={each['value']}" if each.get("value") else ""
        yield plain(f"{each.get('key')}{value}:{each.get('effect')}")


def lines(node: NodeFacts) -> list[tuple[str, str]]:
    """Return what a person wants to know of a node, a label and a sentence each."""
    gpus = f"{node.gpus} of {node.gpu_capacity} × {node.product or 'unknown'} may be allocated"
    driver = node.driver or (f"GKE's own, {node.driver_channel}" if node.driver_channel else "not told by the API")
    state = "ready" if node.ready else "not ready"
    return [
        ("system", f"{node.system}, kernel {node.kernel}, {node.runtime}, kubelet {node.kubelet}"),
        ("state", ", ".join([state, *(["cordoned"] if node.cordoned else []), *node.pressure])),
        ("GPUs", gpus),
        ("driver", driver),
        ("boot", "Secure Boot is not told by the API"),
        ("RDMA", ", ".join(f"{count} × {name}" for name, count in node.rdma.items()) or "no resource"),
        ("block", node.block or "none"),
        ("taints", ", ".join(node.taints) or "none"),
        ("price", "spot" if node.spot else "not spot"),
    ]


def facts_json(found: ClusterFacts) -> dict[str, Any]:
    """Return the facts as JSON values: `context`, `nodes` by name, `operators`, `claims`."""
    nodes = {node.name: msgspec.to_builtins(node) for node in found.nodes}
    return {"context": found.context, "nodes": nodes, "operators": list(found.operators), "claims": found.claims}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(quantities: Mapping[str, Any], name: str) -> int:
    """Return a count of devices, 0 where there is none."""
    text = str(quantities.get(name, "0"))
    return int(text) if text.isdecimal() and len(text) < 10 else 0
