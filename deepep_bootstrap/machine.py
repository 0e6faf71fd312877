"""How far a host is prepared: driver, RDMA stack, limits, network, as recipes/facts/machine.sh says it. Values and their parser, pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Library:
    """One file of the RDMA user space: `kind` is "libibverbs" or "provider" (libmlx5), `abi` the private ABI it states or needs
    ("34" of `IBVERBS_PRIVATE_34`, of `libmlx5-rdmav34.so`), `package` the package that owns it ("" for none)."""

    kind: str
    path: str
    version: str
    abi: str
    package: str


@dataclass(frozen=True)
class Address:
    """An IPv4 or IPv6 address of an interface with its prefix length, e.g. "10.8.0.7/24"."""

    interface: str
    cidr: str


@dataclass(frozen=True)
class Route:
    """One route of the main table: destination ("0.0.0.0/0" for the default) and interface, with its metric."""

    destination: str
    interface: str
    metric: int = 0


@dataclass(frozen=True)
class Reached:
    """How two GPUs reach each other, as `nvidia-smi topo -m` says it: "NV18", "PIX", "SYS"."""

    gpu: int
    other: int
    by: str


@dataclass(frozen=True)
class Stamp:
    """What a host recipe left when it changed something that works after a reboot only: the boot during which it did."""

    recipe: str
    boot_id: str


@dataclass(frozen=True)
class Machine:
    """What a host shows of its preparation. Nothing here is an error; empty and 0 mean that there is nothing of the kind.

    `nvidia_flavor` is "open", "proprietary" or "" (not loaded), `gpu_devices` and `mellanox_devices` count PCI functions by vendor and
    class, whether a driver is bound or not. `memlock` and `slurmd_memlock` are "unlimited" or KiB. `headers`: those of the running
    kernel are there. `gdrdrv_major` is the kernel's, `gdrdrv_node_major` that of /dev/gdrdrv (0: none). `reboot_required` is the
    distribution's own flag. `address` is what the host's own name resolves to, loopback left out.
    """

    nvidia_flavor: str = ""
    nvidia_version: str = ""
    gpu_devices: int = 0
    mellanox_devices: int = 0
    ofed: str = ""
    headers: bool = False
    secure_boot: bool = False
    iommu: str = ""
    dmabuf: bool = False
    packages: tuple[tuple[str, str], ...] = ()
    verbs: tuple[Library, ...] = ()
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
    nvlinks: tuple[Reached, ...] = ()
    gib: str = ""
    uptime_s: int = 0
    reboot_required: bool = False
    stamps: tuple[Stamp, ...] = ()
    slurm_reason: str = ""
