"""Checks of RDMA devices, their ports and their user space, and of the addresses by which nodes find each
other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deepep_bootstrap.doctor.findings import BLOCKING, NOTE, WARNING, Fault, HostView, Row, few
from deepep_bootstrap.inventory import nics
from deepep_bootstrap.inventory.machine import FlowControl
from deepep_bootstrap.lock.compatibility import numbers

INBOX = ("rocep", "roceo", "rocex", "ibp", "ibs")
"""How rdma-core names the devices of the kernel's own driver: by kind and place. NVIDIA's OFED calls them mlx5_*."""

ETHERNET_MTU = 4192
"""Bytes a network device needs for RDMA packets of 4096: RoCE takes 96 for its headers (iboe_get_mtu in the kernel's
ib_addr.h)."""

NVSHMEM_CPU = "cpu"
ETHERNET = "Ethernet"

WHY_USER_SPACE = (
    "A provider of another libibverbs is not loaded: no NIC is seen. Without ibstat, DeepEP V2 ends between nodes."
)
"""What the row of libibverbs is for, and of the programs that belong to it."""


def has_rdma(seen: HostView) -> Iterator[Fault]:
    """A host for runs over several nodes has RDMA devices that IBGDA can drive."""
    case, prepared = seen.case, seen.facts.prepared
    if seen.devices or (prepared.mellanox_devices and not seen.facts.rdma):
        return
    others = sorted({device.driver or "an unknown driver" for device in seen.facts.rdma})
    found = f"RDMA devices of {few(others)} only" if others else "no RDMA device"
    if case.link:
        fix = "--limit, to the hosts with NICs of NVIDIA; profile=single-node to use one node at a time"
        yield Fault(BLOCKING, found, f"{nics.DRIVER} devices for profile {case.profile}", fix)
    else:
        yield Fault(WARNING if others else NOTE, found, f"{nics.DRIVER} devices for more than one node", "")


def has_ofed(seen: HostView) -> Iterator[Fault]:
    """NICs of NVIDIA have a driver, and not the kernel's own one."""
    prepared, fix = seen.facts.prepared, f"{seen.case.bootstrap} --reboot=rolling"
    if prepared.mellanox_devices and not seen.facts.rdma:
        severity = BLOCKING if seen.case.link else WARNING
        yield Fault(severity, f"{prepared.mellanox_devices} NICs of NVIDIA without an RDMA device", "DOCA-OFED", fix)
    inbox = [device.name for device in seen.devices if device.name.startswith(INBOX)]
    if inbox and not prepared.ofed:
        yield Fault(WARNING, f"{few(inbox)}: the kernel's own driver", "DOCA-OFED, which calls them mlx5_*", fix)


def has_active_ports(seen: HostView) -> Iterator[Fault]:
    """Ports are up."""
    ports = [
        (device, port)
        for device in seen.devices
        if not nics.is_virtual(seen.facts, device.name)
        for port in device.ports
    ]
    down = [
        f"{device.name} port {port.number} {port.state or 'UNKNOWN'}"
        for device, port in ports
        if port.state != "ACTIVE"
    ]
    if down:
        none = len(down) == len(ports)
        severity = BLOCKING if none and seen.case.link else WARNING
        wanted = "an active port" if none else "ACTIVE, where GPUs should use them"
        yield Fault(
            severity, few(down), wanted, "ibstat  # then the cable, the switch and (InfiniBand) the subnet manager"
        )


def has_one_link_layer(seen: HostView) -> Iterator[Fault]:
    """All active ports have one link layer."""
    links: dict[str, list[str]] = {}
    for nic in nics.active_nics(seen.facts):
        links.setdefault(nic.link, []).append(nic.name)
    if len(links) > 1:
        found = "; ".join(f"{link or 'unknown'}: {few(names)}" for link, names in sorted(links.items()))
        yield Fault(NOTE, found, "one link layer", "")


def has_large_packets(seen: HostView) -> Iterator[Fault]:
    """Network devices under RoCE leave room for RDMA packets of 4096 bytes."""
    mtus = dict(seen.facts.prepared.mtus)
    devices = dict.fromkeys(gid.netdev for nic in seen.nics for gid in nic.gids if nic.link == ETHERNET)
    small = [f"{name} {mtus[name]}" for name in devices if 0 < mtus.get(name, 0) < ETHERNET_MTU]
    if small:
        yield Fault(
            WARNING,
            f"MTU {few(small)}",
            f"{ETHERNET_MTU} or more",
            "ip link set DEVICE mtu 9000  # where the switches carry it",
        )


def has_one_firmware(seen: HostView) -> Iterator[Fault]:
    """The NICs that GPUs use have one firmware."""
    used = {nic.name for nic in seen.nics}
    versions: dict[str, list[str]] = {}
    for device in seen.devices:
        if device.name in used:
            versions.setdefault(device.firmware, []).append(device.name)
    if len(versions) > 1:
        found = "; ".join(f"{version or 'unknown'}: {few(names)}" for version, names in sorted(versions.items()))
        yield Fault(NOTE, found, "one firmware", "mlxfwmanager --online -u  # then a reboot")


def has_addresses(seen: HostView) -> Iterator[Fault]:
    """Every RoCE port has a RoCE v2 address that routers carry."""
    tables = {
        nic.name: [gid.gid for gid in nic.gids if gid.kind == nics.ROCE_V2] for nic in seen.nics if nic.link == ETHERNET
    }
    none = [name for name, gids in tables.items() if not gids]
    local = [name for name, gids in tables.items() if gids and all(gid.startswith(nics.LINK_LOCAL) for gid in gids)]
    fix = "an IP address for the network device behind it (show_gids)"
    if none:
        yield Fault(BLOCKING, f"no RoCE v2 address on {few(none)}", "one routable address a NIC", fix)
    if local:
        yield Fault(WARNING, f"only link-local RoCE v2 addresses on {few(local)}", "one routable address a NIC", fix)


def has_nics_for_gpus(seen: HostView) -> Iterator[Fault]:
    """There is a NIC for every GPU."""
    nics, gpus = len(seen.nics), len(seen.facts.gpus)
    if 0 < nics < gpus:
        yield Fault(NOTE, f"{nics} NICs for {gpus} GPUs", "one NIC a GPU", "")


def has_single_links(seen: HostView) -> Iterator[Fault]:
    """NICs are not bonded: all queue pairs of NVSHMEM share one source port, so a bond's second link stays idle."""
    bonded = [nic.name for nic in seen.nics if "bond" in nic.name]
    if bonded:
        yield Fault(
            WARNING,
            f"bonded NICs: {few(bonded)}",
            "single NICs",
            "single ports instead of a bond, where the switches allow it",
        )


def has_one_user_space(seen: HostView) -> Iterator[Fault]:
    """libibverbs and its providers come from one place."""
    if not seen.networked:
        return
    libraries = [each for each in seen.facts.prepared.verbs if each.kind == "libibverbs"]
    providers = [each for each in seen.facts.prepared.verbs if each.kind == "provider"]
    abis = {each.abi for each in libraries}
    found = few((f"{each.path} ({each.version or '?'}, ABI {each.abi or '?'})" for each in (*libraries, *providers)), 6)
    fix = f"{seen.case.bootstrap}  # or by hand: rdma-core and its providers from one origin"
    if not libraries:
        yield Fault(BLOCKING, "no libibverbs", "rdma-core with its mlx5 provider", seen.case.bootstrap)
    elif not any(each.abi in abis for each in providers):
        yield Fault(
            BLOCKING, found if providers else f"{found}, no mlx5 provider", "a provider with libibverbs' own ABI", fix
        )
    elif len(abis) > 1 or any(each.abi not in abis for each in providers):
        yield Fault(WARNING, found, "one libibverbs", fix)


def has_new_libmlx5(seen: HostView) -> Iterator[Fault]:
    """A libmlx5 is there that has the functions which the stack's NCCL asks for by their symbol version."""
    needed = seen.case.stack.needs.get("libmlx5", "")
    providers = [each for each in seen.facts.prepared.verbs if each.kind == "provider"]
    if not (needed and seen.networked and providers):
        return
    wanted = f"libmlx5 with MLX5_{needed}"
    if any(numbers(each.symbols) >= numbers(needed) for each in providers if each.symbols):
        return
    if any(not each.symbols for each in providers):
        silent = few(each.path for each in providers if not each.symbols)
        fix = f"grep -ao 'MLX5_[0-9.]*' {silent.split(', ')[0]}, on the host"
        yield Fault(NOTE, f"symbol versions not known of {silent}", wanted, fix)
        return
    found = few(f"{each.path} up to MLX5_{each.symbols}" for each in providers)
    fix = f"{seen.case.command('plan')}  # DOCA-OFED 3, or rdma-core 54 or later, on every host; then a reboot"
    yield Fault(BLOCKING, found, wanted, fix)


def loads_provider(seen: HostView) -> Iterator[Fault]:
    """libibverbs has loaded its provider: programs see each device that the kernel has."""
    if not seen.networked or not any(each.kind == "libibverbs" for each in seen.facts.prepared.verbs):
        return
    prepared, names = seen.facts.prepared, [device.name for device in seen.devices]
    wanted = "each RDMA device of the kernel, in a program"
    if not prepared.verbs_asked:
        fix = f"{seen.case.bootstrap}  # or by hand: ibverbs-utils (Red Hat: libibverbs-utils)"
        yield Fault(NOTE, "which devices programs see is not known: no ibv_devices", wanted, fix)
        return
    unseen = [name for name in names if name not in prepared.verbs_devices]
    if unseen:
        severity = BLOCKING if len(unseen) == len(names) else WARNING
        fix = "ibv_devices, on the host, which says what it misses; then rdma-core and its providers from one origin"
        yield Fault(severity, f"programs do not see {few(unseen)}", wanted, fix)


def keeps_packets(seen: HostView) -> Iterator[Fault]:
    """The RoCE ports that GPUs use keep packets from being lost in one way: flow control, reports of congestion."""
    used = {nic.name for nic in seen.nics if nic.link == ETHERNET}
    told = [each for each in seen.facts.prepared.flow_control if each.device in used]
    groups: dict[str, list[str]] = {}
    for each in told:
        if says := flow_control_words(each):
            groups.setdefault(says, []).append(each.device)
    if len(groups) > 1:
        ranked = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
        found = "; ".join(f"{says} on {few(names)}" for says, names in ranked)
        fix = "the site's own set-up of RoCE for these ports (mlnx_qos, /sys/class/net/*/ecn), and why it left some out"
        yield Fault(WARNING, found, "the same on every NIC", fix)
    elif told and all(is_unprotected(told)):
        fix = "PFC or ECN as the switches have it (mlnx_qos -i DEVICE); nothing where the fabric has its own way"
        yield Fault(NOTE, "neither PFC nor ECN on any priority", "one of them, as on the switches", fix)


def is_unprotected(told: Sequence[FlowControl]) -> Iterator[bool]:
    """Yield of each port whether it says that it has neither flow control nor reports of congestion."""
    for each in told:
        known = each.pfc and each.ecn_receiver and each.ecn_sender
        yield bool(known) and "1" not in each.pfc + each.ecn_receiver + each.ecn_sender


def flow_control_words(each: FlowControl) -> str:
    """Return what a port tells, e.g. "PFC 3, ECN 3, routing forced"; "" where it tells nothing."""
    ecn = "".join("1" if "1" in pair else "0" for pair in zip(each.ecn_receiver, each.ecn_sender, strict=False))
    half = (
        ", one side of it only"
        if each.ecn_receiver and each.ecn_sender and each.ecn_receiver != each.ecn_sender
        else ""
    )
    words = [f"PFC {_priorities(each.pfc)}" if each.pfc else "", f"ECN {_priorities(ecn)}{half}" if ecn else ""]
    words += [{"1": "adaptive routing forced", "0": "adaptive routing not forced"}.get(each.adaptive_routing, "")]
    return ", ".join(word for word in words if word)


def _priorities(digits: str) -> str:
    return " and ".join(str(place) for place, digit in enumerate(digits) if digit == "1") or "off"


def maps_peers(seen: HostView) -> Iterator[Fault]:
    """Where the IOMMU translates, the driver tells it of each GPU's memory that a NIC may reach (its option
    DmaRemapPeerMmio, on by default; kernel-open/nvidia/nv-reg.h)."""
    params, kinds = dict(seen.facts.nvidia_params), seen.facts.prepared.iommu.split(",")
    if not (seen.networked and params) or params.get("DmaRemapPeerMmio") == "1":
        return
    fix = "NVreg_DmaRemapPeerMmio=0 out of /etc/modprobe.d, or iommu=pt on the kernel's command line, then a reboot"
    there = "DmaRemapPeerMmio" in params
    found = f"DmaRemapPeerMmio={params['DmaRemapPeerMmio']}" if there else "a driver without DmaRemapPeerMmio"
    if any(kind.startswith("DMA") for kind in kinds):
        yield Fault(
            WARNING if there else NOTE,
            f"{found} while the IOMMU translates",
            "DmaRemapPeerMmio=1, or no translation",
            fix,
        )
    elif "on" in kinds and params.get("DmaRemapPeerMmio") == "0":
        what = f"{found}, and the kernel does not say whether its IOMMU translates"
        yield Fault(NOTE, what, "DmaRemapPeerMmio=1, or no translation", fix)


def has_gpu_handler(seen: HostView) -> Iterator[Fault]:
    """Doorbells are rung by the GPU."""
    if seen.networked and seen.case.handler.startswith(NVSHMEM_CPU):
        fix = "profile=auto, or NVSHMEM_IBGDA_NIC_HANDLER=gpu in the profile"
        yield Fault(WARNING, f"NVSHMEM_IBGDA_NIC_HANDLER={seen.case.handler}", "gpu", fix)


def has_gdrdrv(seen: HostView) -> Iterator[Fault]:
    """The CPU handler finds GDRCopy's kernel module and its device."""
    prepared = seen.facts.prepared
    if not (seen.networked and seen.case.handler == NVSHMEM_CPU):
        return
    if not seen.facts.gdrdrv or not prepared.gdrdrv_major:
        found = "gdrdrv is not loaded" if not prepared.gdrdrv_major else "gdrdrv is loaded, /dev/gdrdrv is not there"
        yield Fault(BLOCKING, found, "gdrdrv and /dev/gdrdrv", seen.case.bootstrap)
    elif prepared.gdrdrv_node_major != prepared.gdrdrv_major:
        found = f"/dev/gdrdrv with major {prepared.gdrdrv_node_major}"
        yield Fault(BLOCKING, found, f"major {prepared.gdrdrv_major}, the kernel's", seen.case.bootstrap)


def has_an_address(seen: HostView) -> Iterator[Fault]:
    """Other nodes can find this one by its own name."""
    prepared = seen.facts.prepared
    if not seen.case.alone and prepared.addresses and not prepared.address:
        found = f"the name {seen.facts.hostname or seen.name} leads nowhere, or to loopback"
        yield Fault(WARNING, found, "an address that the other nodes reach", "DNS, or /etc/hosts on every node")


def has_no_translation(seen: HostView) -> Iterator[Fault]:
    """Traffic between NICs and GPUs does not go through the IOMMU."""
    translating = [kind for kind in seen.facts.prepared.iommu.split(",") if kind.startswith("DMA")]
    if seen.networked and translating:
        found = f"the IOMMU translates what GPUs and NICs access ({', '.join(translating)})"
        yield Fault(WARNING, found, "identity, or no IOMMU", "iommu=pt on the kernel's command line, then a reboot")


ROWS = (
    Row("rdma", "Between nodes DeepEP V1 drives NICs itself (IBGDA), mlx5 only; jobs of one node need none.", has_rdma),
    Row(
        "doca-ofed",
        "DeepEP over RoCE was validated with NVIDIA's driver, not with the kernel's own.",
        has_ofed,
        recipe="doca-ofed",
    ),
    Row("rdma-ports", "A GPU whose NIC is down sends through another one, or not at all.", has_active_ports),
    Row(
        "link-layers",
        "The ports of the link layer with more bandwidth are used, the others are left alone.",
        has_one_link_layer,
    ),
    Row("mtu", "Small packets cost RDMA bandwidth.", has_large_packets),
    Row("nic-firmware", "NICs of one host with different firmware differ in speed and in faults.", has_one_firmware),
    Row("gid", "RoCE packets between nodes need a routable RoCE v2 address on every NIC.", has_addresses),
    Row("nic-count", "GPUs share the NICs evenly, and their bandwidth.", has_nics_for_gpus),
    Row(
        "nic-bond",
        "NVSHMEM sends from one source port, so one link of a bond carries all and the other stays idle.",
        has_single_links,
    ),
    Row("rdma-userspace", WHY_USER_SPACE, has_one_user_space, recipe="rdma-userspace"),
    Row(
        "libmlx5",
        "NCCL's GIN asks libmlx5 for functions by symbol version; without them it finds no NIC (NCCL_GIN_TYPE_NONE).",
        has_new_libmlx5,
    ),
    Row(
        "rdma-provider",
        "A provider that is on disk and does not load leaves programs without NICs, whatever the kernel has.",
        loads_provider,
    ),
    Row(
        "flow-control",
        "RoCE answers a lost packet with a second's wait or less bandwidth; ports that differ make one rail slow.",
        keeps_packets,
    ),
    Row(
        "dma-remap",
        "Untold, an IOMMU that translates stops what NICs read from and write to GPU memory (faults in dmesg).",
        maps_peers,
    ),
    Row("nic-handler", "With the CPU handler DeepEP V1 hangs (pull request 677 upstream).", has_gpu_handler),
    Row("gdrdrv", "The CPU handler writes doorbells through GDRCopy's kernel module.", has_gdrdrv, recipe="gdrdrv"),
    Row(
        "host-address",
        "The first node of a job tells the others its address; with a wrong one they wait in vain.",
        has_an_address,
    ),
    Row("iommu", "Translation sends traffic between NIC and GPU through the processor.", has_no_translation),
)
