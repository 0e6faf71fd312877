"""What a pod sees of its GPUs and NICs: as facts in the data lines of recipes/facts.sh, and as the settings of the
network that follow. Names of devices, interfaces and GIDs are those of the pod, which the node may call otherwise.

It is copied into the image, with inventory/nics.py: there is Python's own library, hence dataclasses, and often no
shell.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any

from deepep_bootstrap.inventory import nics

SMI_LIMIT = 30
"""Seconds for nvidia-smi; the driver may need many to wake eight GPUs."""

DRIVER_FOLDER = "/usr/local/nvidia/bin"
"""Where Google's clusters show the driver's programs to pods."""

QUERY = "index,name,memory.total,compute_cap,driver_version,pci.bus_id"
GIB = "/usr/local/gib/scripts/set_nccl_env.sh"
NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
MAP, NIC = "DEEP_EP_DEVICE_TO_HCA_MAPPING", "EP_NIC_NAME"
INTERFACES = ("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""As inventory/network_env.py has them."""


@dataclass(frozen=True)
class Gpu:
    """A GPU, as inventory.facts.Gpu has its place."""

    index: int
    name: str
    memory: str
    capability: str
    driver: str
    pci: str
    pci_path: str
    numa: int


@dataclass(frozen=True)
class Gid:
    """An entry of a port's GID table."""

    index: int
    gid: str
    kind: str
    netdev: str


@dataclass(frozen=True)
class Port:
    """A port of an RDMA device."""

    number: int
    state: str
    link_layer: str
    rate_gbps: float
    gids: tuple[Gid, ...]


@dataclass(frozen=True)
class Rdma:
    """An RDMA device."""

    name: str
    driver: str
    pci_path: str
    numa: int
    firmware: str
    ports: tuple[Port, ...]
    virtual: bool


@dataclass(frozen=True)
class Seen:
    """What a pod sees. `problem` is why no GPU is seen."""

    gpus: tuple[Gpu, ...]
    rdma: tuple[Rdma, ...]
    problem: str = ""


def look(root: str = "") -> Seen:
    """Return what this pod sees; `root`, for tests, stands before /sys and /proc."""
    gpus, problem = _ask_driver(root)
    return Seen(gpus, tuple(_devices(root)), problem)


def settings(seen: Seen, link: str, root: str = "") -> dict[str, str]:
    """Return the variables that this pod's hardware decides, for NICs of a link layer (Ethernet or InfiniBand); {}
    without NICs. The functions are those that decide on hosts."""
    facts: Any = seen  # what these functions read of a host's facts, it has as well
    assigned = nics.assign_nics(facts.gpus, nics.sort_out(facts, link).used)
    if not assigned:
        return {}
    index = nics.gid_index(assigned.values()) if link == "Ethernet" else None
    values = {
        MAP: ",".join(f"{gpu}:{nic}" for gpu, nic in assigned.items()),
        NIC: next(iter(assigned.values())).name,
        "NVSHMEM_HCA_PREFIX": nics.name_prefix(nic.name for nic in assigned.values()),
        "NVSHMEM_IB_GID_INDEX": "" if index is None else str(index),
        **dict.fromkeys(INTERFACES, interface(root)),
    }
    return {name: value for name, value in values.items() if value}


def interface(root: str = "") -> str:
    """Return the interface of the way out of the pod where it has others too, over which ranks must not meet; "" for
    one alone."""
    others = [name for name in _names(f"{root}/sys/class/net") if name != "lo"]
    rows = (line.split() for line in _text(f"{root}/proc/net/route").splitlines()[1:])
    ways = [row[0] for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"]
    return ways[0] if len(others) > 1 and len(set(ways)) == 1 else ""


def lines(seen: Seen, name: str, root: str = "") -> Iterator[str]:
    """Yield the facts as recipes/facts.sh prints them; `name` is what the node is called."""
    yield _line("facts", "1")
    yield _line("hostname", name)
    yield _line("kernel", os.uname().release)
    yield _line("machine", os.uname().machine)
    yield _line("cpus", str(len(os.sched_getaffinity(0))))
    if memory := re.search(r"^MemTotal: +(\d+) kB", _text(f"{root}/proc/meminfo"), re.MULTILINE):
        yield _line("memory_mib", str(int(memory[1]) // 1024))
    yield _line("nvidia_module", _text(f"{root}/proc/driver/nvidia/version").partition("\n")[0])
    for parameter in _text(f"{root}/proc/driver/nvidia/params").splitlines():
        key, _, value = parameter.partition(": ")
        yield _line("nvidia_param", key, value)
    yield _line("memlock", _limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]))
    if os.path.isdir(f"{root}/dev/shm"):  # noqa: S108 - its size is looked at
        shm = os.statvfs(f"{root}/dev/shm")  # noqa: S108
        yield _line("shm_mib", str(shm.f_blocks * shm.f_frsize // 2**20))
    if os.path.exists(f"{root}{GIB}"):
        yield _line("gib", GIB)
    if seen.problem:
        yield _line("gpu_problem", seen.problem)
    for gpu in seen.gpus:
        yield _line("gpu", *map(str, astuple(gpu)))
    for device in seen.rdma:
        yield from _device_lines(device)
    yield _line("end", "1")


def _device_lines(device: Rdma) -> Iterator[str]:
    yield _line("rdma", device.name, device.driver, device.pci_path, str(device.numa), device.firmware)
    if device.virtual:
        yield _line("rdma_virtual", device.name)
    for port in device.ports:
        yield _line("port", device.name, str(port.number), port.state, port.link_layer, f"{port.rate_gbps:g}")
        for gid in port.gids:
            yield _line("gid", device.name, str(port.number), str(gid.index), gid.gid, gid.kind, gid.netdev)


def _line(key: str, *fields: str) -> str:
    return f"{key}=" + "\t".join(re.sub(r"[\t\n]", " ", field) for field in fields)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value // 1024)


def smi() -> str:
    """Return where nvidia-smi is, "" where it is not."""
    return shutil.which("nvidia-smi", path=f"{os.environ.get('PATH', '')}:{DRIVER_FOLDER}") or ""


def _ask_driver(root: str) -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs and why there are none: nvidia-smi's, or without it what the driver's files say."""
    program = smi()
    if not program:
        return tuple(_from_files(root)), ""
    words = [program, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=SMI_LIMIT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return tuple(_from_files(root)), f"nvidia-smi: {error}"
    if done.returncode:
        return (), f"nvidia-smi ends with code {done.returncode}: {done.stdout.strip()}"
    rows = [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines()]
    return tuple(_gpu(row, root) for row in rows if len(row) == 6 and row[0].isdecimal()), ""


def _gpu(row: list[str], root: str) -> Gpu:
    # nvidia-smi writes the domain with 8 digits and capitals, sysfs with 4 and small letters.
    pci = re.sub(r"^0000(?=[0-9a-f]{4}:)", "", row[5].lower())
    path, numa = _place(f"{root}/sys/bus/pci/devices/{pci}", root)
    return Gpu(int(row[0]), row[1], row[2], row[3], row[4], pci, path, numa)


def _from_files(root: str) -> Iterator[Gpu]:
    """Yield the GPUs by /proc/driver/nvidia/gpus, in the order of their buses, as CUDA and nvidia-smi number them."""
    folder = f"{root}/proc/driver/nvidia/gpus"
    version = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", _text(f"{root}/proc/driver/nvidia/version"))
    for index, pci in enumerate(sorted(_names(folder))):
        said = dict(line.partition(":")[::2] for line in _text(f"{folder}/{pci}/information").splitlines())
        path, numa = _place(f"{root}/sys/bus/pci/devices/{pci}", root)
        yield Gpu(index, said.get("Model", "").strip(), "", "", version[0] if version else "", pci.lower(), path, numa)


def _devices(root: str) -> Iterator[Rdma]:
    folder = f"{root}/sys/class/infiniband"
    for name in sorted(_names(folder)):
        place = f"{folder}/{name}"
        if not os.path.isdir(f"{place}/ports"):
            continue
        driver = f"{place}/device/driver"
        path, numa = _place(f"{place}/device", root)
        ports = tuple(_port(f"{place}/ports/{number}") for number in sorted(_names(f"{place}/ports"), key=int))
        yield Rdma(
            name,
            os.path.basename(os.path.realpath(driver)) if os.path.exists(driver) else "",
            path,
            numa,
            _first(f"{place}/fw_ver"),
            ports,
            os.path.exists(f"{place}/device/physfn"),
        )


def _port(place: str) -> Port:
    rate = re.match(r"[0-9.]+", _first(f"{place}/rate"))
    return Port(
        int(os.path.basename(place)),
        _first(f"{place}/state").rpartition(": ")[2],
        _first(f"{place}/link_layer"),
        float(rate[0]) if rate else 0.0,
        tuple(_gids(place)),
    )


def _gids(place: str) -> Iterator[Gid]:
    """Yield the entries of a port's table that are used, of 256 mostly."""
    for index in sorted(int(name) for name in _names(f"{place}/gids") if name.isdecimal()):
        gid = _first(f"{place}/gids/{index}")
        if gid and gid != NO_GID:
            kind, netdev = (_first(f"{place}/gid_attrs/{each}/{index}") for each in ("types", "ndevs"))
            yield Gid(index, gid, kind, netdev)


def _place(path: str, root: str) -> tuple[str, int]:
    """Return a device's path below /sys/devices and its NUMA node."""
    if not os.path.exists(path):
        return "", -1
    numa = _first(f"{path}/numa_node")
    real = os.path.realpath(path)
    return real.removeprefix(f"{os.path.realpath(root or '/').rstrip('/')}/sys/devices/"), int(numa or -1)


COUNTED: Mapping[str, tuple[str, ...]] = {
    "counters": (
        *("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "port_rcv_remote_physical_errors"),
        *("port_xmit_discards", "local_link_integrity_errors", "excessive_buffer_overrun_errors", "VL15_dropped"),
    ),
    "hw_counters": (
        *("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err", "implied_nak_seq_err"),
        *("duplicate_request", "out_of_buffer", "req_cqe_error", "req_remote_access_errors", "resp_cqe_error"),
        "roce_adp_retrans_to",
    ),
}
"""Names of sysfs that count what should not happen, as env/programs/node.sh has them."""


def counters(now: float, root: str = "") -> Iterator[str]:
    """Yield the counters of the NICs, as env/programs/node.sh writes them; those of GPUs are not there."""
    yield f"time={now:.9f}"
    for device in _devices(root):
        for port in device.ports:
            if device.driver == nics.DRIVER and port.state == "ACTIVE":
                yield from _count(port, device.name, f"{root}/sys/class/infiniband/{device.name}/ports/{port.number}")


def _count(port: Port, device: str, place: str) -> Iterator[str]:
    sent, received = (_first(f"{place}/counters/port_{each}_data") for each in ("xmit", "rcv"))
    if not (sent.isdecimal() and received.isdecimal()):
        return
    read = ((name, _first(f"{place}/{folder}/{name}")) for folder, names in COUNTED.items() for name in names)
    errors = "".join(f" {name}:{value}" for name, value in read if value.isdecimal())
    yield f"nic={device} {port.number} {port.link_layer} {port.rate_gbps:g} {sent} {received}{errors}"


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _first(path: str) -> str:
    return _text(path).partition("\n")[0].strip()


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
