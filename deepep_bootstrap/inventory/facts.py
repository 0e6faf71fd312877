"""Facts of one host: the data lines of recipes/facts.sh parsed into frozen values, read from `invoke facts`
documents, and shown as lines for people.

Records that msgspec reads have slots: without them it leaves out of the next document what had its default in this one.
"""

from __future__ import annotations

import base64
import posixpath
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Struct, field

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.records import Records, decimal, disagreement, driver_value, number, read_records
from deepep_bootstrap.core.text import NO_TEXT, HostText
from deepep_bootstrap.inventory.forms import FACTS
from deepep_bootstrap.inventory.machine import Machine
from deepep_bootstrap.inventory.machine import parse_machine as prepared
from deepep_bootstrap.inventory.natural import natural

MANIFESTS_KEPT = 8
"""Manifests that are kept once they were read: all hosts of a prefix show the same one, which names all of them."""


class Prefix(Struct, frozen=True):
    """The prefix as this host sees it: `fs` its filesystem type, `free_mib` free space (of the nearest existing
    parent), `id` the content of PREFIX/.id, `entries` the names in PREFIX/store, `generation` the number `current`
    points at (0: none), `manifest` the JSON text of that generation's manifest, `source` what is mounted there,
    `problem` why nothing more is known, `unproved` the stacks that were not seen to work since they were last built
    or offered, and the store entries that were built again and not offered since."""

    path: str = ""
    exists: bool = False
    writable: bool = False
    fs: str = ""
    free_mib: int = 0
    id: str = ""
    entries: tuple[str, ...] = ()
    generation: int = 0
    manifest: str = ""
    source: str = ""
    problem: str = ""
    unproved: tuple[str, ...] = ()


def parse_prefix(records: Records) -> Prefix:
    """Return what the fact script says of the prefix."""
    fs, free, source = next(iter(records.rows("prefix_fs")), ("", "", ""))
    return Prefix(
        path=records.text("prefix_path"),
        exists=records.truth("prefix_exists"),
        writable=records.truth("prefix_writable"),
        fs=fs,
        free_mib=number(free),
        id=records.text("prefix_id"),
        entries=tuple(sorted(records.words("prefix_entry"))),
        generation=records.number("prefix_generation"),
        manifest=_manifest(records.text("prefix_manifest")),
        source=source,
        problem=records.text("prefix_problem"),
        unproved=tuple(sorted(records.words("prefix_unproved"))),
    )


@lru_cache(MANIFESTS_KEPT)
def _manifest(coded: str) -> str:
    return base64.b64decode(coded, validate=True).decode()


class Gpu(Struct, frozen=True, cache_hash=True):
    """One GPU as nvidia-smi and sysfs show it. `capability` is "9.0", `memory_mib` MiB, `processes` how many use it
    now."""

    index: int
    name: str
    memory_mib: int
    capability: str
    driver: str
    pci: str
    pci_path: str
    numa: int
    processes: int


class Toolkit(Struct, frozen=True):
    """A CUDA toolkit: its directory and the version nvcc states, e.g. "13.0.88"; `stubs`: has lib64/stubs/libcuda.so;
    `real` is the directory behind a link such as /usr/local/cuda."""

    path: str
    version: str
    split_compile: bool
    stubs: bool
    real: str = ""


class Python(Struct, frozen=True):
    """An interpreter: path, version "3.12.3", `header`: Python.h is there; for the one asked about with --python
    also its torch (empty when absent) and `problem`, why it cannot be used ("" when it can)."""

    path: str
    version: str
    soabi: str = ""
    torch: str = ""
    torch_git: str = ""
    torch_cuda: str = ""
    torch_abi: str = ""
    problem: HostText = NO_TEXT
    header: bool = False


class TorchLibrary(Struct, frozen=True):
    """A library that torch finds beside itself, with its headers: `kind` is "nccl" or "nvshmem", `name` the
    distribution that brought it ("" where nobody says), `version` that of its headers, `folder` holds include and
    lib."""

    kind: str
    name: str
    version: str
    folder: str


class Gid(Struct, frozen=True, cache_hash=True):
    """One entry of a port's GID table; `kind` is "IB/RoCE v1" or "RoCE v2", `netdev` the network device behind it."""

    index: int
    gid: str
    kind: str
    netdev: str


class Port(Struct, frozen=True, cache_hash=True):
    """One port of an RDMA device: `state` such as "ACTIVE", `link_layer` "InfiniBand" or "Ethernet", `rate_gbps` in
    Gb/s."""

    number: int
    state: str
    link_layer: str
    rate_gbps: float
    gids: tuple[Gid, ...] = ()


class Rdma(Struct, frozen=True, cache_hash=True):
    """One RDMA device by kernel driver (mlx5_core), not by name; `virtual`: a function that a physical one of this
    host lends (SR-IOV)."""

    name: str
    driver: str
    pci_path: str
    numa: int
    firmware: str
    ports: tuple[Port, ...] = ()
    virtual: bool = False


class Modules(Struct, frozen=True):
    """The module system of a host: `kind` "lmod", "environment-modules" or "none", version, init script for bash,
    MODULEPATH of a login shell, and `hook`: the modulefiles directory our own MODULEPATH hook names ("" without one,
    or with half of one)."""

    kind: str = "none"
    version: str = ""
    init: str = ""
    paths: tuple[str, ...] = ()
    hook: str = ""


class Slurm(Struct, frozen=True):
    """Slurm as this host sees it. `works` when sinfo answers; `node` is this host's node name ("" when it is no
    compute node), `state` its state word, `jobs` the ids of jobs on it, `version` e.g. "22.05.8", `sbatch` whether
    the client is there, `gres` and `partitions` as scontrol shows them. `path` and `conf`: the folder of the
    clients, which the PATH of root or of another user may lack, and SLURM_CONF where it is set; `brings_memlock`: a
    job gets the memlock of the shell that submitted it. `slurmd`: the host itself runs one."""

    works: bool = False
    version: str = ""
    sbatch: bool = False
    node: str = ""
    state: str = ""
    jobs: tuple[str, ...] = ()
    gres: str = ""
    partitions: tuple[str, ...] = ()
    path: str = ""
    conf: str = ""
    brings_memlock: bool = False
    slurmd: bool = False


class Facts(Struct, frozen=True):
    """Everything the fact script says of one host. A missing tool is an empty value, never an error. Memory and free
    space are in MiB; `scratch_free_mib` is that of TMPDIR; `gpu_problem` says why nvidia-smi, although installed,
    gave no list. Whole numbers among `nvidia_params` are decimal whatever the driver's spelling. `machine` is
    "x86_64"; `prepared` how far the host is prepared. `external_packages` are name and version of setuptools and
    numpy beside the external Python's torch, as far as they are there, `external_libraries` the NCCL and NVSHMEM of
    that torch. `kubelet`: the host itself runs one, and so is a node of Kubernetes; `managed`: which of
    "driver" and "gib" GKE keeps there in places of its own."""

    os_id: str = ""
    os_version: str = ""
    os_name: HostText = NO_TEXT
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
    prefix: Prefix = field(default_factory=Prefix)
    cpu_model: HostText = NO_TEXT
    glibc: str = ""
    memory_free_mib: int = 0
    scratch_free_mib: int = 0
    default_route: bool = False
    external_packages: tuple[tuple[str, str], ...] = ()
    external_libraries: tuple[TorchLibrary, ...] = ()
    gpu_problem: HostText = NO_TEXT
    prepared: Machine = field(default_factory=Machine)
    kubelet: bool = False
    managed: tuple[str, ...] = ()


SCRIPT, PARTS = "facts.sh", "facts/"
"""The fact script and its parts, below recipes/."""

TOOLS = ("gcc", "g++", "clang", "cmake", "ninja", "git", "make", "curl", "uv", "sshd")
"""The tools that facts.sh asks for, in the order in which they are shown."""

VERSION = "1"
"""Of the data lines: facts.sh says which one it prints."""


def facts_script(recipes: Mapping[str, str]) -> str:
    """Return the fact script as it is sent: its parts, then facts.sh, which calls them. `recipes` are texts by
    relative path."""
    parts = [text for name, text in sorted(recipes.items()) if name.startswith(PARTS)]
    return "\n".join([*parts, recipes[SCRIPT]])


def parse_facts(text: str, host: str) -> Facts:
    """Return the facts in the output of facts.sh; Trouble that names `host` for anything the script of this version
    does not print.

    Nothing in `text` is trusted: numbers are checked, and an answer that was cut off is refused. A program that did not
    answer in time makes Trouble too: what is not known is not taken for absent."""
    records = read_records(text, FACTS, host, SCRIPT)
    if unanswered := dict.fromkeys(records.rows("unanswered")):
        raise Trouble(*(_unanswered(host, name, seconds) for name, seconds in unanswered))
    try:
        if records.text("facts") != VERSION:
            raise ValueError(f"version {records.text('facts')[:20]!r}")
        return _facts(records)
    except ValueError as error:
        raise Trouble(disagreement(host, SCRIPT, str(error))) from None


def _tool_place(tool: tuple[str, str]) -> tuple[int, str]:
    """Return where a tool stands: as TOOLS has them, since the answers come in any order."""
    name = tool[0]
    return TOOLS.index(name) if name in TOOLS else len(TOOLS), name


def _unanswered(host: str, name: str, seconds: str) -> Problem:
    """Return that a program is there and did not answer, twice asked, in so many seconds."""
    ways = {"login-shell": "bash -l", "scontrol": "scontrol show node", "squeue": "squeue"}
    command = ways.get(name, f"{name} --version")
    what = f"{name} is there, but did not answer in {seconds} s"
    return Problem(host, what, wanted="an answer", try_=f"{command} there, or --limit without this host")


def _facts(records: Records) -> Facts:
    words = ("os_id", "os_version", "kernel", "machine", "hostname", "boot_id", "user", "glibc")
    numbers = ("cpus", "memory_mib", "memory_free_mib", "scratch_free_mib")
    return Facts(
        **{key: records.text(key) for key in words},  # type: ignore[arg-type]
        **{key: records.number(key) for key in numbers},  # type: ignore[arg-type]
        uid=records.number("uid", -1),
        gpus=_gpus(records),
        os_name=records.shown("os_name"),
        cpu_model=records.shown("cpu_model"),
        gpu_problem=HostText("; ".join(str(text) for _, text in records.rows_with_text("gpu_problem"))),
        nvidia_params=tuple((name, driver_value(value)) for name, value in records.rows("nvidia_param")),
        toolkits=tuple(
            Toolkit(f[0], f[1], f[2] == "1", f[3] == "1", f[4])
            for f in sorted(records.rows("toolkit"), key=lambda f: f[0])
        ),
        tools=tuple(sorted(((name, version) for name, version in records.rows("tool")), key=_tool_place)),
        headers=records.words("header"),
        pythons=tuple(
            Python(f[0], f[1], header=f[2] == "1") for f in sorted(records.rows("python"), key=lambda f: natural(f[0]))
        ),
        external_python=next((_external(f, text) for f, text in records.rows_with_text("external_python")), None),
        external_packages=tuple(sorted((name, version) for name, version in records.rows("external_package"))),
        external_libraries=tuple(TorchLibrary(*fields) for fields in sorted(records.rows("external_library"))),
        rdma=_rdma(records),
        kernel_modules=records.words("kernel_module"),
        gdrdrv=records.truth("gdrdrv"),
        default_route=records.truth("default_route"),
        modules=_modules(records),
        slurm=_slurm(records),
        prefix=parse_prefix(records),
        prepared=prepared(records),
        kubelet=records.truth("kubelet"),
        managed=tuple(sorted(records.words("managed"))),
    )


def _external(f: Sequence[str], problem: HostText) -> Python:
    return Python(f[0], f[1], f[2], f[3], f[4], f[5], f[6], problem, f[7] == "1")


def _gpus(records: Records) -> tuple[Gpu, ...]:
    users = records.words("gpu_process")
    gpus = [
        Gpu(
            number(f[0]),
            f[1],
            number(f[2]),
            "" if f[3].startswith("[") else f[3],
            f[4],
            f[5],
            f[6],
            number(f[7], -1),
            users.count(f[5]),
        )
        for f in records.rows("gpu")
    ]
    return tuple(sorted(gpus, key=lambda gpu: gpu.index))


def _rdma(records: Records) -> tuple[Rdma, ...]:
    virtual = frozenset(records.words("rdma_virtual"))
    gids: dict[tuple[str, str], list[Gid]] = {}
    for device, port, index, gid, kind, netdev in records.rows("gid"):
        gids.setdefault((device, port), []).append(Gid(number(index), gid, kind, netdev))
    ports: dict[str, list[Port]] = {}
    for device, port, state, link, rate in sorted(records.rows("port"), key=lambda f: natural(f[1])):
        table = tuple(sorted(gids.get((device, port), []), key=lambda gid: gid.index))
        ports.setdefault(device, []).append(Port(number(port), state, link, decimal(rate), table))
    return tuple(
        Rdma(name, driver, path, number(numa, -1), firmware, tuple(ports.get(name, [])), name in virtual)
        for name, driver, path, numa, firmware in sorted(records.rows("rdma"), key=lambda f: natural(f[0]))
    )


def _modules(records: Records) -> Modules:
    kind, version, init, paths = next(iter(records.rows("modules")), ("none", "", "", ""))
    hooks = {fields[0]: fields[1] for fields in records.rows("hook")}
    hook = hooks.get("sh", "") if hooks.get("sh") == hooks.get("csh") else ""
    # Earlier versions wrote /shared/deepep//modulefiles where the prefix was given with a slash at its end.
    hook = posixpath.normpath(hook) if hook else ""
    return Modules(kind, version, init, tuple(path for path in paths.split(":") if path), hook)


def _slurm(records: Records) -> Slurm:
    works, version, sbatch = next(iter(records.rows("slurm")), ("0", "", "0"))
    node, state, gres, partitions = next(iter(records.rows("slurm_node")), ("", "", "", ""))
    path, conf = next(iter(records.rows("slurm_path")), ("", ""))
    return Slurm(
        works=works == "1",
        version=version,
        sbatch=sbatch == "1",
        node=node,
        state=state,
        jobs=records.words("slurm_job"),
        gres="" if gres == "(null)" else gres,
        partitions=tuple(name for name in partitions.split(",") if name),
        path=path,
        conf=conf,
        brings_memlock=_brings_memlock({fields[0]: fields[1] for fields in records.rows("slurm_limits")}),
        slurmd=records.truth("slurmd"),
    )


def _brings_memlock(limits: Mapping[str, str]) -> bool:
    """Return whether slurm.conf lets a job have the memlock of the shell that submitted it: `limits` are
    PropagateResourceLimits and PropagateResourceLimitsExcept as `scontrol show config` says them, names with or
    without RLIMIT_; ALL is Slurm's default."""
    settings = {
        name: value.upper().replace("RLIMIT_", "").replace(" ", "").split(",")
        for name, value in limits.items()
        if value != "(null)"
    }
    if excepted := settings.get("PropagateResourceLimitsExcept"):
        return not {"ALL", "MEMLOCK"}.intersection(excepted)
    return not {"ALL", "MEMLOCK"}.isdisjoint(settings.get("PropagateResourceLimits", []))


SCHEMA = 1


def facts_json(facts: Mapping[str, Facts]) -> dict[str, Any]:
    """Return the facts of hosts as JSON values, by host: `hosts` in the document of `invoke facts`."""
    values: dict[str, Any] = msgspec.to_builtins(facts, enc_hook=_said)
    return values


def read_facts_json(text: str, where: str) -> dict[str, Facts]:
    """Return the facts of every host in a document of `invoke facts`; {} for no text. Trouble for a text that is
    none, naming the host and the place. Keys that are missing have their defaults, unknown ones are passed over:
    facts grow from version to version."""
    if not text.strip():
        return {}
    try:
        document = msgspec.json.decode(text)
        hosts = document["hosts"] if document["schema"] == SCHEMA else None
    except (ValueError, KeyError, TypeError, RecursionError):
        hosts = None
    if not isinstance(hosts, dict):
        raise Trouble(
            Problem(
                where, "these are no facts of hosts", wanted=f"the document of `invoke facts --json`, schema {SCHEMA}"
            )
        )
    return {name: _facts_of(name, values, where) for name, values in hosts.items()}


def _said(value: object) -> str:
    """Return a host's text as JSON has it."""
    if isinstance(value, HostText):
        return str(value)
    raise NotImplementedError(type(value).__name__)


def _heard(kind: type, value: object) -> object:
    """Return a host's text from JSON."""
    if kind is HostText and isinstance(value, str):
        return HostText(value)
    raise NotImplementedError(kind.__name__)


def _facts_of(name: str, values: object, where: str) -> Facts:
    try:
        return msgspec.convert(values, Facts, dec_hook=_heard)
    except msgspec.ValidationError as error:
        raise Trouble(
            Problem(where, "facts of a host cannot be read", f"{name}: {error}", "what `invoke facts --json` prints")
        ) from None


def by_label(lines_of: Mapping[str, Sequence[tuple[str, str]]]) -> dict[str, dict[str, list[str]]]:
    """Return the lines of all hosts by label, and under each its values with the hosts that have them, in the order
    they came."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, pairs in lines_of.items():
        for label, value in pairs:
            found.setdefault(label, {}).setdefault(value, []).append(name)
    return found


def lines(facts: Facts) -> list[tuple[str, str]]:
    """Return what a person wants to know of one host, a label and a sentence each; nothing that differs on every
    host."""
    return [
        ("system", f"{facts.os_name}, kernel {facts.kernel}, {facts.machine}"),
        ("machine", f"{facts.cpus} CPUs, {facts.memory_mib // 1024} GiB"),
        ("GPUs", gpu_line(facts.gpus)),
        ("driver", driver_line(facts)),
        ("CUDA", ", ".join(f"{kit.version} in {kit.path}" for kit in facts.toolkits) or "none"),
        ("RDMA", rdma_line(facts)),
        ("Python", ", ".join(f"{python.path} {python.version}" for python in facts.pythons) or "none"),
        ("tools", ", ".join(f"{name} {version}".rstrip() for name, version in facts.tools) or "none"),
        ("modules", f"{facts.modules.kind} {facts.modules.version}".strip()),
        ("Slurm", slurm_line(facts) if facts.slurm.works else "none"),
        ("prefix", prefix_line(facts.prefix)),
    ]


def gpu_line(gpus: Sequence[Gpu]) -> str:
    """Return number and kinds of a host's GPUs."""
    kinds = {f"{gpu.name}, compute {gpu.capability}, {gpu.memory_mib // 1024} GiB, driver {gpu.driver}" for gpu in gpus}
    return f"{len(gpus)} × {'; '.join(sorted(kinds))}" if gpus else "none"


def rdma_line(facts: Facts) -> str:
    """Return how many RDMA devices are active, on which link layers, and where their driver comes from."""
    if not facts.rdma:
        return "none"
    active = [device.name for device in facts.rdma if any(port.state == "ACTIVE" for port in device.ports)]
    layers = sorted({port.link_layer for device in facts.rdma for port in device.ports if port.link_layer})
    origin = f"OFED {facts.prepared.ofed}" if facts.prepared.ofed else "the kernel's own driver"
    return f"{len(active)} of {len(facts.rdma)} devices active ({', '.join(layers)}), {origin}"


def prefix_line(prefix: Prefix) -> str:
    """Return filesystem, free space and generation of the prefix."""
    if not prefix.exists:
        return f"{prefix.path}: not there yet"
    generation = prefix.generation or "none"
    return f"{prefix.path}: {prefix.fs}, {prefix.free_mib // 1024} GiB free, generation {generation}"


def driver_line(facts: Facts) -> str:
    """Return version and flavor of the GPU driver, and the way on which NICs reach GPU memory: dma-buf, else a
    module for it."""
    if not facts.prepared.nvidia_version:
        return "not loaded"
    modules = [name for name in ("nvidia_peermem", "nv_peer_mem") if name in facts.kernel_modules]
    way = "through dma-buf" if facts.prepared.dmabuf else f"through {modules[0]}" if modules else "not reached by NICs"
    return f"{facts.prepared.nvidia_version}, {facts.prepared.nvidia_flavor}; GPU memory {way}"


def slurm_line(facts: Facts) -> str:
    """Return version and state of Slurm on a host, without the host's name in it."""
    state = f"node is {facts.slurm.state.lower()}" if facts.slurm.node else "a client, no node"
    return f"{facts.slurm.version}, {state}"
