"""Checks of RDMA devices, their ports and their user space, and of the addresses by which nodes find each
other.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepep_bootstrap.doctor.findings import BLOCKING, NOTE, WARNING, Fault, HostView, Row, few
from deepep_bootstrap.inventory import nics

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
    Row("nic-handler", "With the CPU handler DeepEP V1 hangs (pull request 677 upstream).", has_gpu_handler),
    Row("gdrdrv", "The CPU handler writes doorbells through GDRCopy's kernel module.", has_gdrdrv, recipe="gdrdrv"),
    Row(
        "host-address",
        "The first node of a job tells the others its address; with a wrong one they wait in vain.",
        has_an_address,
    ),
    Row("iommu", "Translation sends traffic between NIC and GPU through the processor.", has_no_translation),
)
