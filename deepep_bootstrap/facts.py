"""Facts of one host: the data lines of recipes/facts.sh parsed into frozen values, against a list of known keys."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi and sysfs show it. `capability` is "9.0", `memory_mib` MiB, `processes` how many use it now."""

    index: int
    name: str
    memory_mib: int
    capability: str
    driver: str
    pci: str
    pci_path: str
    numa: int
    processes: int


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit: its directory and the version nvcc states, e.g. "13.0.88"; `stubs`: has lib64/stubs/libcuda.so."""

    path: str
    version: str
    split_compile: bool
    stubs: bool


@dataclass(frozen=True)
class Python:
    """An interpreter: path and version "3.12.3"; for the one asked about with --python also its torch (empty when absent)."""

    path: str
    version: str
    soabi: str = ""
    torch: str = ""
    torch_git: str = ""
    torch_cuda: str = ""
    torch_abi: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Gid:
    """One entry of a port's GID table; `kind` is "IB/RoCE v1" or "RoCE v2", `netdev` the network device behind it."""

    index: int
    gid: str
    kind: str
    netdev: str


@dataclass(frozen=True)
class Port:
    """One port of an RDMA device: `state` such as "ACTIVE", `link_layer` "InfiniBand" or "Ethernet", `rate_gbps` in Gb/s."""

    number: int
    state: str
    link_layer: str
    rate_gbps: float
    gids: tuple[Gid, ...] = ()


@dataclass(frozen=True)
class Rdma:
    """One RDMA device by kernel driver (mlx5_core), not by name."""

    name: str
    driver: str
    pci_path: str
    numa: int
    firmware: str
    ports: tuple[Port, ...] = ()


@dataclass(frozen=True)
class Modules:
    """The module system of a host: `kind` "lmod", "environment-modules" or "none", version, init script for bash, MODULEPATH of a
    login shell, and `hook`: the modulefiles directory our own MODULEPATH hook names ("" without a hook)."""

    kind: str = "none"
    version: str = ""
    init: str = ""
    paths: tuple[str, ...] = ()
    hook: str = ""


@dataclass(frozen=True)
class Slurm:
    """Slurm as this host sees it. `works` when sinfo answers; `node` is this host's node name ("" when it is no compute node),
    `state` its state word, `jobs` the ids of jobs on it, `version` e.g. "22.05.8", `sbatch` whether the client is there."""

    works: bool = False
    version: str = ""
    sbatch: bool = False
    node: str = ""
    state: str = ""
    jobs: tuple[str, ...] = ()
    gres: str = ""


@dataclass(frozen=True)
class Prefix:
    """The prefix as this host sees it: `fs` its filesystem type, `free_mib` free space (of the nearest existing parent), `id` the
    content of PREFIX/.id, `entries` the names in PREFIX/store, `generation` the number `current` points at (0: none), `manifest`
    the JSON text of that generation's manifest."""

    path: str = ""
    exists: bool = False
    writable: bool = False
    fs: str = ""
    free_mib: int = 0
    id: str = ""
    entries: tuple[str, ...] = ()
    generation: int = 0
    manifest: str = ""


@dataclass(frozen=True)
class Facts:
    """Everything the fact script says of one host. A missing tool is an empty value, never an error."""

    os_id: str = ""
    os_version: str = ""
    os_name: str = ""
    kernel: str = ""
    machine: str = ""
    hostname: str = ""
    boot_id: str = ""
    user: str = ""
    uid: int = -1
    cpus: int = 0
    memory_mib: int = 0
    gpus: tuple[Gpu, ...] = ()
    nvidia_params: tuple[tuple[str, str], ...] = ()
    toolkits: tuple[Toolkit, ...] = ()
    tools: tuple[tuple[str, str], ...] = ()
    headers: tuple[str, ...] = ()
    pythons: tuple[Python, ...] = ()
    external_python: Python | None = None
    rdma: tuple[Rdma, ...] = ()
    kernel_modules: tuple[str, ...] = ()
    gdrdrv: bool = False
    modules: Modules = Modules()
    slurm: Slurm = Slurm()
    prefix: Prefix = Prefix()
