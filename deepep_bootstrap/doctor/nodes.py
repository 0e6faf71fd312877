"""Checks of a cluster's GPU nodes by what the Kubernetes API says of them, and by their own facts where debug pods
brought these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.doctor import gpu, grace, host, network
from deepep_bootstrap.doctor.examine import folded, ordered
from deepep_bootstrap.doctor.findings import BLOCKING, NOTE, WARNING, Case, Fault, Finding, HostView
from deepep_bootstrap.inventory import network_env
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.kube.node_facts import ClusterFacts, NodeFacts
from deepep_bootstrap.lock.model import Stack

OLDEST_DRIVER = {"12": 525, "13": 580}
"""The first driver branch on which programs of a CUDA major run: CUDA Compatibility Guide."""


class NodeView(Struct, frozen=True):
    """A node as the checks see it, its cluster, and the CUDA major of the stack that it is looked at for."""

    node: NodeFacts
    cluster: ClusterFacts
    cuda: str

    @property
    def several(self) -> bool:
        """Whether there are nodes to go between."""
        return len(self.cluster.nodes) > 1


class NodeRow(Struct, frozen=True):
    """One check."""

    check: str
    why: str
    look: Callable[[NodeView], Iterable[Fault]]


def is_ready(seen: NodeView) -> Iterator[Fault]:
    """kubelet says that the node is ready."""
    if not seen.node.ready:
        yield Fault(BLOCKING, "not ready", "ready", "kubectl describe node NODE")


def is_in_use(seen: NodeView) -> Iterator[Fault]:
    """Pods may be placed on the node."""
    if seen.node.cordoned:
        found = f"cordoned: {seen.node.reason}" if seen.node.reason else "cordoned"
        fix = "invoke bootstrap --context=…" if seen.node.reason else "kubectl uncordon NODE, if it is yours"
        yield Fault(WARNING, found, "in use", fix)


def has_room(seen: NodeView) -> Iterator[Fault]:
    """Memory, disk and processes are not short."""
    if seen.node.pressure:
        yield Fault(WARNING, ", ".join(seen.node.pressure), "none of these", "kubectl describe node NODE")


def offers_gpus(seen: NodeView) -> Iterator[Fault]:
    """All GPUs of the node may be allocated."""
    node = seen.node
    if not node.gpu_capacity:
        has_plugin = "GPU device plugin" in seen.cluster.operators or "GPU operator" in seen.cluster.operators
        fix = (
            "the log of the device plugin's pod on that node" if has_plugin else "NVIDIA's device plugin, and a driver"
        )
        if node.driver_channel == "disabled":
            fix = "a driver on the nodes (gpu-driver-version=latest, or node_system of invoke manifests)"
        yield Fault(BLOCKING, "no nvidia.com/gpu", "every GPU as nvidia.com/gpu", fix)
    elif node.gpus < node.gpu_capacity:
        found = f"{node.gpus} of {node.gpu_capacity} may be allocated"
        yield Fault(WARNING, found, "all of them", "dmesg -T | grep -E 'NVRM|Xid' there, then its device plugin's log")
    elif node.counted > node.gpu_capacity:
        found = f"{node.gpu_capacity} offered, {node.counted} there"
        yield Fault(WARNING, found, "all of them", "the device plugin's configuration, and its log")


def offers_rdma(seen: NodeView) -> Iterator[Fault]:
    """Pods can ask for the node's RDMA devices."""
    rdma, wanted = seen.node.rdma, "rdma/…, networking.gke.io.networks/rdma-N, or NICs that are claimed"
    if seen.cluster.claims:
        return
    if not rdma:
        gke = "a pool with the RDMA networks, and networks.yaml of invoke manifests"
        fix = gke if seen.node.is_gke else "an RDMA device plugin (NVIDIA's network operator)"
        yield Fault(WARNING if seen.several else NOTE, "no resource of RDMA devices", wanted, fix)
    elif empty := [name for name, count in rdma.items() if not count]:
        fix = "the device plugin's log on that node, and `rdma link` there"
        yield Fault(BLOCKING if seen.several else WARNING, f"none left of {', '.join(empty)}", "devices", fix)


def drives_cuda(seen: NodeView) -> Iterator[Fault]:
    """The driver is new enough for the stack's CUDA."""
    oldest, node = OLDEST_DRIVER.get(seen.cuda, 0), seen.node
    branch = node.driver.partition(".")[0]
    if branch.isdecimal():
        if int(branch) < oldest:
            fix = "a newer driver, or a stack of its CUDA: --stack=v1"
            yield Fault(BLOCKING, f"driver {node.driver}", f"{oldest} or newer, for CUDA {seen.cuda}", fix)
    elif node.driver_channel != "disabled":
        found = f"GKE's own, {node.driver_channel}" if node.driver_channel else "not told by the API"
        fix = "nvidia-smi in a pod there, or NVIDIA's GPU feature discovery"
        yield Fault(NOTE, found, f"{oldest} or newer, for CUDA {seen.cuda}", fix)


def stands_in_a_block(seen: NodeView) -> Iterator[Fault]:
    """GKE says in which block of machines the node stands."""
    if seen.node.is_gke and seen.several and not seen.node.block:
        fix = "a pool with --placement-type=COMPACT, or a reservation"
        yield Fault(WARNING, "no topology block", "cloud.google.com/gce-topology-block", fix)


def has_gib(seen: NodeView) -> Iterator[Fault]:
    """Where GKE's RDMA networks are, Google's plugin for NCCL is installed too."""
    networked = seen.cluster.claims or bool(seen.node.rdma)
    if seen.node.is_gke and networked and "gIB installer" not in seen.cluster.operators:
        yield Fault(WARNING, "no installer of gIB", "nccl-rdma-installer", "gib.yaml of invoke manifests")


ROWS: tuple[NodeRow, ...] = (
    NodeRow("node-ready", "Nothing starts on a node whose kubelet does not say that it is ready.", is_ready),
    NodeRow("node-in-use", "No pod is placed on a cordoned node.", is_in_use),
    NodeRow("node-pressure", "kubelet ends pods on a node that runs short, and takes no new ones.", has_room),
    NodeRow("node-gpus", "A test asks for all GPUs of a node; one that lacks some is never chosen.", offers_gpus),
    NodeRow("node-rdma", "Between nodes DeepEP needs RDMA devices in the pod.", offers_rdma),
    NodeRow("node-driver", "CUDA runs on drivers from a branch on that knows its major.", drives_cuda),
    NodeRow(
        "topology-block", "Nodes of different blocks are farther apart, and slower between them.", stands_in_a_block
    ),
    NodeRow("gib", "NCCL goes over RDMA on A3 Ultra and A4 through gIB alone.", has_gib),
)
"""Every check of a single node."""

ALIKE = {"driver": "driver", "kernel": "kernel", "product": "GPUs", "gpu_capacity": "number of GPUs"}
"""What should be the same on all nodes."""


def examine_nodes(found: ClusterFacts, cuda: str) -> tuple[Finding, ...]:
    """Return what is wrong with the nodes, equal findings folded, the worst first."""
    single = [
        (node.name, Finding(row.check, fault.severity, (), fault.found, fault.wanted, row.why, fault.fix))
        for node in found.nodes
        for row in ROWS
        for fault in row.look(NodeView(node, found, cuda))
    ]
    return ordered([*folded(single), *differences(found)], [node.name for node in found.nodes])


def differences(found: ClusterFacts) -> Iterator[Finding]:
    """Yield what fewer nodes have than most: ranks of one test run on all of them."""
    why = "A test, and a job, runs on several of these nodes at once."
    for key, title in ALIKE.items():
        ranked = ranked_values({node.name: str(getattr(node, key)) for node in found.nodes if getattr(node, key)})
        for value, hosts in ranked[1:]:
            yield Finding("nodes-alike", WARNING, hosts, f"{title} {value}", f"{title} {ranked[0][0]}", why, "")
    blocks = ranked_values({node.name: node.block for node in found.nodes if node.block})
    if len(blocks) > 1:
        text = ", ".join(f"{len(hosts)} in {block}" for block, hosts in blocks[:4])
        why = "Traffic between blocks takes a longer way; Kueue's topology keeps a test in one."
        everywhere = tuple(name for _, hosts in blocks for name in hosts)
        yield Finding("topology-block", NOTE, everywhere, text, "one block", why, "")


def ranked_values(values: Mapping[str, str]) -> list[tuple[str, tuple[str, ...]]]:
    """Return each value with the nodes that have it, the most frequent first; `values` are by node."""
    nodes: dict[str, list[str]] = {}
    for name, value in values.items():
        nodes.setdefault(value, []).append(name)
    return sorted(((value, tuple(names)) for value, names in nodes.items()), key=lambda pair: -len(pair[1]))


NOT_ASKED = frozenset(
    ("gpu-busy", "rdma-userspace", "libmlx5", "rdma-provider", "nic-handler", "gdrdrv", "host-address")
)
"""Checks of hosts that say nothing of a node: pods compute there, with user space, handler and name of their own."""

INSIDE = tuple(
    row
    for row in (*gpu.ROWS, *grace.ROWS, *network.ROWS, *host.ROWS)
    if row.check not in NOT_ASKED and (row not in host.ROWS or row.check == "secure-boot")
)
"""Checks of hosts that hold for nodes too: GPUs, driver and its options, NICs, links, firmware."""


BY_SSH = "invoke bootstrap --hosts=… --context=…"
"""What prepares a node; node.yaml of invoke manifests does so too, but for reboots."""


def known_inside(found: ClusterFacts, facts: Mapping[str, Facts]) -> ClusterFacts:
    """Return the nodes with the driver that they themselves say they have."""
    versions = {name: seen.prepared.nvidia_version for name, seen in facts.items() if seen.prepared.nvidia_version}
    nodes = tuple(replace(node, driver=versions.get(node.name, node.driver)) for node in found.nodes)
    return replace(found, nodes=nodes)


def examine_inside(facts: Mapping[str, Facts], stack: Stack, texts: Mapping[str, str]) -> tuple[Finding, ...]:
    """Return what the nodes' own facts say; `texts` are the files of env/ by path."""
    if not facts:
        return ()
    try:
        derived = network_env.derive(network_env.AUTO, facts, texts)
        profile, handler = derived.profile, derived.environment.get(network_env.HANDLER, "")
        link = network_env.read_profile(profile, texts).link
    except Trouble:  # no GPU on any of them, which has a row of its own
        profile, link, handler = network_env.SINGLE, "", ""
    case = Case(stack, "", profile, link, handler, bootstrap=BY_SSH, alone=len(facts) < 2)
    single = [
        (name, Finding(row.check, fault.severity, (), fault.found, fault.wanted, row.why, fault.fix))
        for name, seen in facts.items()
        for row in INSIDE
        for fault in row.look(HostView(name, "gpu", seen, None, case))
    ]
    return ordered(folded(single), list(facts))
