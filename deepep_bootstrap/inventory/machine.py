"""The state of a host's preparation: driver, RDMA stack, limits and network, as recipes/facts/machine.sh
prints it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise

from msgspec import Struct

from deepep_bootstrap.core.records import Records, decimal, number
from deepep_bootstrap.inventory.natural import natural


class Library(Struct, frozen=True):
    """One file of the RDMA user space: `kind` is "libibverbs" or "provider" (libmlx5), `abi` the private ABI it
    states or needs ("34" of `IBVERBS_PRIVATE_34`, of `libmlx5-rdmav34.so`), `package` the package that owns it (""
    for none; dpkg's are asked only where they are named after verbs, mlx5 or rdma), `symbols` the newest symbol version
    of a libmlx5 ("1.25" of MLX5_1.25; "" where it does not say)."""

    kind: str
    path: str
    version: str
    abi: str
    package: str
    symbols: str = ""


class FlowControl(Struct, frozen=True):
    """How a RoCE port keeps others from losing its packets: `pfc`, `ecn_receiver` (it reports marked packets) and
    `ecn_sender` (it slows down on reports) have a digit 0 or 1 for each of the priorities 0 to 7, "" where the host
    does not tell; `adaptive_routing` is "1" where all packets are sent as ones that switches may route apart, "0"
    where not, "" where only root could tell or the tool (mlxreg) is missing."""

    device: str
    pfc: str = ""
    ecn_receiver: str = ""
    ecn_sender: str = ""
    adaptive_routing: str = ""


class Address(Struct, frozen=True):
    """An IPv4 or IPv6 address of an interface with its prefix length, e.g. "10.8.0.7/24"."""

    interface: str
    cidr: str


class Route(Struct, frozen=True):
    """One route of the main table: destination ("0.0.0.0/0" for the default) and interface, with its metric."""

    destination: str
    interface: str
    metric: int = 0


class ReachedPort(Struct, frozen=True):
    """How two GPUs reach each other, as `nvidia-smi topo -m` says it: "NV18", "PIX", "SYS"."""

    gpu: int
    other: int
    by: str


class Stamp(Struct, frozen=True):
    """What a host recipe left when it changed something that works after a reboot only: the boot during which it
    did."""

    recipe: str
    boot_id: str


class Machine(Struct, frozen=True):
    """What a host shows of its preparation. Nothing here is an error; empty and 0 mean that there is nothing of the
    kind.

    - `nvidia_flavor` of the loaded driver is "open", "proprietary" or "" (not loaded), `nvidia_version` e.g.
      "580.159.04".
    - `gpu_devices`, `mellanox_devices`, `nvswitches` count PCI functions, bound to a driver or not: NVIDIA's of class
      0300 or 0302,
      Mellanox's of class 0200 or 0207, NVIDIA's of class 0680. Virtual functions (they have a `physfn`) do not count
      where their physical
      one is seen too.
    - `ofed` is the version of a loaded mlx5_core that did not come with the kernel, "" for the kernel's own or none.
    - `headers`: those of the running kernel are there. `secure_boot`: unsigned modules will not load.
    - `iommu` says how the kernel translates what those devices read and write: "" not at all, "identity" (passed
      through), "DMA" or
      "DMA-FQ" (translated: GPU and NIC then do not reach each other directly), several joined by commas; "on"
      where it does not say.
    - `dmabuf`: GPU memory can be registered with RDMA devices as a dma-buf.
    - `packages`: installed ones of a short list in recipes/facts/machine.sh, with versions; `verbs`: the RDMA user
      space, see Library. `verbs_devices` are the RDMA devices that programs see, as far as `ibv_devices` was there to
      say it (`verbs_asked`). `flow_control` is what RoCE ports tell, see FlowControl.
    - `address` is what the host's own name resolves to; `addresses` and `routes` are without loopback and link-local
      ones,
      `mtus` of the interfaces that have a device, and of bonds.
    - `memlock` (of this session) and `slurmd_memlock` are "unlimited" or KiB.
    - `gdrdrv_major` is the kernel's, `gdrdrv_node_major` that of /dev/gdrdrv.
    - `fabric_manager` is systemd's word ("active", "inactive", "failed"), "absent" without such a unit; `fabric_state`
      what the GPUs say
      of their NVLink fabric: "Completed/Success", "In Progress", different ones joined by commas.
    - On Grace machines `imex` is systemd's word for the service of that name ("absent" without such a unit, "" where
      nobody can say), `imex_channels` counts its channel devices, `cliques` are the NVLink domain and clique of the
      GPUs, each pair once. `page_kib` is the size of a memory page in KiB, 0 where it is not known.
    - `gib` is the path of Google's script of NCCL settings, `reboot_required` the distribution's own flag.
    - `slurm_reason` is the node's Reason with the "[user@time]" that Slurm puts behind it.
    """

    nvidia_flavor: str = ""
    nvidia_version: str = ""
    gpu_devices: int = 0
    mellanox_devices: int = 0
    nvswitches: int = 0
    ofed: str = ""
    headers: bool = False
    secure_boot: bool = False
    iommu: str = ""
    dmabuf: bool = False
    packages: tuple[tuple[str, str], ...] = ()
    verbs: tuple[Library, ...] = ()
    verbs_asked: bool = False
    verbs_devices: tuple[str, ...] = ()
    flow_control: tuple[FlowControl, ...] = ()
    address: str = ""
    addresses: tuple[Address, ...] = ()
    routes: tuple[Route, ...] = ()
    mtus: tuple[tuple[str, int], ...] = ()
    memlock: str = ""
    slurmd_memlock: str = ""
    shm_mib: int = 0
    gdrdrv_major: int = 0
    gdrdrv_node_major: int = 0
    fabric_manager: str = ""
    fabric_state: str = ""
    nvlinks: tuple[ReachedPort, ...] = ()
    page_kib: int = 0
    imex: str = ""
    imex_channels: int = 0
    cliques: tuple[tuple[str, str], ...] = ()
    gib: str = ""
    uptime_s: int = 0
    reboot_required: bool = False
    stamps: tuple[Stamp, ...] = ()
    slurm_reason: str = ""


DMABUF_KERNEL = (5, 12)
"""First kernel whose RDMA stack registers dma-bufs (ib_umem_dmabuf_get, merged in February 2021); NVIDIA's GPU
Operator states the same minimum for GPUDirect RDMA, together with the open kernel modules."""

FABRIC_WELL = frozenset(("", "completed", "completed/success", "not supported"))
"""States of the NVSwitch fabric, in small letters, that keep nobody from using the GPUs (`nvidia-smi -q`: Fabric,
State and Status)."""

UNREACHABLE = {"unreachable", "blackhole", "prohibit", "throw", "broadcast", "multicast", "anycast", "local"}
"""First words of lines of `ip route` that lead to no other host."""


def parse_machine(records: Records) -> Machine:
    """Return how far a host is prepared; ValueError for a value that recipes/facts/machine.sh does not print."""
    driver = records.text("nvidia_module")
    version = re.search(r"Module(?: for \S+)? +([0-9]+(?:\.[0-9]+)+)", driver)
    flavor = ("open" if "Open Kernel Module" in driver else "proprietary") if version else ""
    kinds = records.words("device")
    addresses, routes = _network(records)
    return Machine(
        nvidia_flavor=flavor,
        nvidia_version=version[1] if version else "",
        gpu_devices=kinds.count("gpu"),
        mellanox_devices=kinds.count("mellanox"),
        nvswitches=kinds.count("nvswitch"),
        ofed=_ofed(records.text("ofed")),
        headers=records.truth("kernel_headers"),
        secure_boot=records.truth("secure_boot"),
        iommu=",".join(sorted({domain for kind, _, domain in records.rows("device") if domain and kind != "nvswitch"})),
        dmabuf=flavor == "open" and _kernel(records.text("kernel")) >= DMABUF_KERNEL,
        packages=tuple(sorted((name, installed) for name, installed in records.rows("package"))),
        verbs=_verbs(records),
        verbs_asked=records.truth("verbs_asked"),
        verbs_devices=tuple(sorted(records.words("verbs_device"), key=natural)),
        flow_control=tuple(FlowControl(*row) for row in sorted(records.rows("flow_control"))),
        address=next(
            (str(found) for found in map(ipaddress.ip_address, records.words("resolved")) if _routable(found)), ""
        ),
        addresses=addresses,
        routes=routes,
        mtus=tuple(
            sorted(((name, number(mtu)) for name, mtu in records.rows("mtu")), key=lambda pair: natural(pair[0]))
        ),
        memlock=_limit(records.text("memlock"), 1),
        slurmd_memlock=_limit(records.text("slurmd_memlock"), 1024),
        shm_mib=records.number("shm_mib"),
        gdrdrv_major=records.number("gdrdrv_major"),
        gdrdrv_node_major=int(_hex(records.text("gdrdrv_node") or "0", "1,8"), 16),
        fabric_manager=_fabric_manager(_pairs(records, "fabric_manager")),
        fabric_state=_fabric_state(records),
        nvlinks=tuple(
            sorted((_reached(*row) for row in records.rows("reached")), key=lambda pair: (pair.gpu, pair.other))
        ),
        page_kib=records.number("page_kib"),
        imex=_fabric_manager(_pairs(records, "imex")),
        imex_channels=records.number("imex_channels"),
        cliques=tuple(
            sorted({(domain, clique) for domain, clique in records.rows("clique") if domain[:1] not in {"", "[", "N"}})
        ),
        gib=records.text("gib"),
        uptime_s=int(decimal(records.text("uptime"))),
        reboot_required=records.truth("reboot_required"),
        stamps=tuple(Stamp(recipe, boot_id) for recipe, boot_id in sorted(records.rows("stamp"))),
        slurm_reason=records.text("slurm_reason").strip(),
    )


def _pairs(records: Records, key: str) -> dict[str, str]:
    return {fields[0]: fields[1] for fields in records.rows(key)}


def _kernel(release: str) -> tuple[int, int]:
    found = re.match(r"([0-9]{1,4})\.([0-9]{1,4})", release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _ofed(text: str) -> str:
    """Return the version in `OFED-internal-25.10-1.7.1:`, `MLNX_OFED_LINUX-5.8-1.1.2.1:` or of the module alone."""
    found = re.search(r"[0-9]+\.[0-9][0-9A-Za-z.-]*", text)
    return found[0] if found else ""


def _hex(text: str, digits: str) -> str:
    """Return a hexadecimal number of so many `digits` ("8", "1,8") as it is."""
    if not re.fullmatch(rf"[0-9a-fA-F]{{{digits}}}", text):
        raise ValueError(f"{text[:80]!r} where a hexadecimal number should be")
    return text


def _limit(text: str, unit: int) -> str:
    """Return a resource limit in KiB; `unit` is how many of its own make one."""
    return text if text in ("", "unlimited") else str(number(text) // unit)


def _reached(gpu: str, other: str, by: str) -> ReachedPort:
    pair = ReachedPort(number(gpu), number(other), by)
    if not 0 <= pair.gpu < pair.other:
        raise ValueError(f"GPUs {gpu[:80]!r} and {other[:80]!r} in this order")
    return pair


def _fabric_manager(unit: Mapping[str, str]) -> str:
    return "absent" if unit.get("LoadState") == "not-found" else unit.get("ActiveState", "")


def _fabric_state(records: Records) -> str:
    """Return what the GPUs say of their fabric, each different answer once."""
    unknown = ("", "N/A", "[N/A]", "[Not Supported]")
    states = {"/".join(word for word in row if word not in unknown) for row in records.rows("fabric_state")}
    return ", ".join(sorted(states - {""}))


def _verbs(records: Records) -> tuple[Library, ...]:
    """Return libraries by path. A libmlx5.so.1 that is also there under a provider's name is not said twice."""
    real, abi, owner, mlx5 = (
        _pairs(records, key) for key in ("library", "library_abi", "library_owner", "library_mlx5")
    )
    named = {target for path, target in real.items() if "-rdmav" in path}
    found = []
    for path, target in sorted(real.items()):
        if path.endswith("/libmlx5.so.1") and target in named:
            continue
        version = re.search(r"\.so\.([0-9]+(?:\.[0-9]+)+)$", target)
        stated = re.search(r"-rdmav([0-9]+)\.so$", path)
        package = next((owner[name] for name in (path, path.removeprefix("/usr")) if name in owner), "")
        kind = "libibverbs" if path.endswith("/libibverbs.so.1") else "provider"
        found.append(
            Library(
                kind,
                path,
                version[1] if version else "",
                abi.get(path) or (stated[1] if stated else ""),
                package,
                mlx5.get(path, ""),
            )
        )
    return tuple(found)


def _routable(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return not (address.is_loopback or address.is_link_local)


def _network(records: Records) -> tuple[tuple[Address, ...], tuple[Route, ...]]:
    """Return addresses and routes: from the lines of `ip` or, where a host has none, from the kernel's tables."""
    routes = [*_routes(records), *_kernel_routes(records)]
    pairs = [(name, ipaddress.ip_interface(text)) for name, text in records.rows("address")]
    pairs += [_placed(ipaddress.IPv4Address(text), routes) for text in records.words("local_address")]
    for name, digits, bits in records.rows("kernel_address"):
        pairs.append((name, ipaddress.IPv6Interface((int(_hex(digits, "32"), 16), int(_hex(bits, "2"), 16)))))
    addresses = tuple(Address(name, str(found)) for name, found in pairs if name and _routable(found.ip))
    return addresses, tuple(
        route for route in routes if _routable(ipaddress.ip_network(route.destination).network_address)
    )


def _routes(records: Records) -> Iterator[Route]:
    """Yield the routes in lines of `ip -o route`; one with several next hops leads through several interfaces."""
    for family, line in records.rows("route"):
        words = line.split()
        if not words or words[0] in UNREACHABLE:
            continue
        everything = "::/0" if family == "6" else "0.0.0.0/0"
        destination = everything if words[0] == "default" else str(ipaddress.ip_network(words[0], strict=False))
        after = list(pairwise(words))
        metric = next((number(value) for key, value in after if key == "metric"), 0)
        yield from (Route(destination, name, metric) for key, name in after if key == "dev")


def _kernel_routes(records: Records) -> Iterator[Route]:
    """Yield the routes in /proc/net/route, whose addresses are the bytes of memory read as a little-endian number."""
    for name, target, mask, metric in records.rows("kernel_route"):
        start, width = (
            ipaddress.IPv4Address(int.from_bytes(bytes.fromhex(_hex(text, "8")), "little")) for text in (target, mask)
        )
        yield Route(str(ipaddress.IPv4Network(f"{start}/{width}", strict=False)), name, number(metric))


def _placed(address: ipaddress.IPv4Address, routes: list[Route]) -> tuple[str, ipaddress.IPv4Interface]:
    """Return the interface of an address and its network: those of the narrowest route that leads there. An address
    that only the default route leads to stands alone, as clouds give them out."""
    networks = [(ipaddress.ip_network(route.destination), route.interface) for route in routes]
    fitting = [(network.prefixlen, name) for network, name in networks if address in network]
    bits, name = max(fitting, key=lambda pair: pair[0], default=(0, ""))
    return name, ipaddress.IPv4Interface((address, bits or 32))
