"""Why each network variable has its value, and which NIC each GPU was given: what `invoke env` shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.toml import load_toml
from deepep_bootstrap.inventory import network_env, nics
from deepep_bootstrap.inventory.facts import Facts, Gpu
from deepep_bootstrap.inventory.network_env import Derived, Profile
from deepep_bootstrap.inventory.nics import Nic

UNSET = "(unset)"
"""Shown for a variable that the module takes away while it is loaded."""


class Setting(Struct, frozen=True):
    """One variable that a user gets: `hosts` have this value ("" for all), and `kind` is the kind of test that alone
    has it ("" for every program)."""

    name: str
    value: str
    reason: str
    hosts: str = ""
    kind: str = ""


class GpuNic(Struct, frozen=True):
    """The NIC of one GPU: `rate` in Gb/s, `way` how the two are joined."""

    gpu: int
    pci: str
    nic: str
    rate: float
    way: str


class HostMap(Struct, frozen=True):
    """The map of hosts that are laid out alike; `hosts` is a folded node set. Hosts without a map have no rows, and
    `reason` says why."""

    hosts: str
    rows: tuple[GpuNic, ...] = ()
    reason: str = ""


class Explanation(Struct, frozen=True):
    """The network settings of a set of hosts with their reasons; `why` is the reason of the profile, `gib` the script
    that sets NCCL's variables when the module is loaded ("" for none), `left_out` variables that others set, and why
    these settings do without."""

    profile: str
    why: str
    settings: tuple[Setting, ...]
    maps: tuple[HostMap, ...]
    gib: str = ""
    notes: tuple[str, ...] = field(default=())
    left_out: Mapping[str, str] = field(default_factory=dict)


def explain(derived: Derived, facts: Mapping[str, Facts], texts: Mapping[str, str]) -> Explanation:
    """Return the settings `derived` of the hosts `facts` (by name), each with its reason; `texts` are the files of
    env/ by relative path."""
    profile = network_env.read_profile(derived.profile, texts)
    file = f"{network_env.FOLDER}{profile.name}.toml"
    written: Mapping[str, Any] = load_toml(texts[file], f"env/{file}")
    reasons = {**REASONS, **dict(_from_profile(profile, written))}
    settings = [
        Setting(name, value or UNSET, _reason(reasons, name, value))
        for name, value in sorted(derived.environment.items())
    ]
    settings += _by_host(derived, reasons)
    settings += [
        Setting(name, value or UNSET, _reason(KIND_REASONS, name, value), kind=kind)
        for kind, values in sorted(derived.by_kind.items())
        for name, value in sorted(values.items())
    ]
    maps = tuple(_maps(facts, profile))
    left_out = {name: reason for name, reason in LEFT_OUT.items() if name not in {each.name for each in settings}}
    return Explanation(derived.profile, derived.why, tuple(settings), maps, derived.gib, derived.notes, left_out)


REASONS: Mapping[str, str] = {
    network_env.MAP: "the nearest NIC of each GPU by PCI path, then NUMA node, with all NICs used equally often",
    "NVSHMEM_HCA_PREFIX": "NVSHMEM passes over NICs whose names do not begin with mlx5, unless it is told",
    "NVSHMEM_IB_GID_INDEX": "the one index at which every NIC of every host has a routable RoCE v2 address",
    **dict.fromkeys(network_env.INTERFACES, "the interface whose routes lead to all other hosts"),
    network_env.GIB_UNSETS: "Google's gIB wants it unset",
    network_env.CHECK_OFF: "it would hide that another NCCL is in the process",
    network_env.GIN_OFF: "no NIC: DeepEP V2 stops unless NCCL's device side is switched off",
    network_env.NIC: "the NIC of GPU 0: DeepEP V2 asks one NIC how fast it is",
    **dict.fromkeys(network_env.LEVELS, "the service level of the profile (0 without one), where V2's test takes 1"),
    network_env.CLASS: "the service level of the profile (0 without one), for buffers that say none",
}
"""Why a variable has the value that looking at the hosts gave it."""

LEFT_OUT: Mapping[str, str] = {
    "NVSHMEM_DISABLE_CUDA_VMM": "with it the symmetric heap has a fixed size (NVSHMEM_SYMMETRIC_SIZE, 1 GiB), which "
    "DeepEP's buffers may exceed; without, it grows with them"
}
"""Variables that instructions on the web set, and why the module does not."""

KIND_REASONS: Mapping[str, str] = {
    "NVSHMEM_IB_SL": "the profile's key service_level_low_latency",
    network_env.CLASS_OF_TESTS: "the service level of everybody else's traffic, where DeepEP's own tests take 1",
    network_env.GIN_OFF: "a test on one node needs no NIC",
}


def _reason(reasons: Mapping[str, str], name: str, value: str) -> str:
    exact = "; = since another interface's name begins with this one" if value.startswith("=") else ""
    return reasons[name] + exact


def _from_profile(profile: Profile, written: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each variable that the profile's file decides, with the place in it."""
    file = f"env/{network_env.FOLDER}{profile.name}.toml"
    if profile.handler:
        rings = "GPU threads ring" if profile.handler == "gpu" else "the CPU rings"
        place = f"handler in {file}" if "handler" in written else "the default of a profile"
        yield network_env.HANDLER, f"{rings} the NIC's doorbell: {place}"
    for key, variable in network_env.SETTING_LEVELS.items():
        if key in written and key != "service_level_low_latency":
            yield variable, f"{key} in {file}"
    yield from ((name, f"written in {file}") for name in written.get("environment", {}))


def _by_host(derived: Derived, reasons: Mapping[str, str]) -> Iterator[Setting]:
    """Yield the variables that differ between hosts, equal values once with the hosts that have them."""
    names = sorted({name for values in derived.by_host.values() for name in values})
    for name in names:
        hosts_by_value: dict[str, list[str]] = {}
        for host, values in derived.by_host.items():
            hosts_by_value.setdefault(values.get(name, ""), []).append(host)
        for value, hosts in hosts_by_value.items():
            yield Setting(name, value or UNSET, _reason(reasons, name, value), fold(hosts))


def _maps(facts: Mapping[str, Facts], profile: Profile) -> Iterator[HostMap]:
    """Yield the map of each group of hosts that are laid out alike, hosts in their order."""
    groups: dict[tuple[tuple[GpuNic, ...], str], list[str]] = {}
    for host, seen in facts.items():
        used = nics.sort_out(seen, profile.link).used if profile.link else ()
        groups.setdefault((map_of(seen.gpus, used), _why_none(seen, used, profile)), []).append(host)
    yield from (HostMap(fold(hosts), rows, reason) for (rows, reason), hosts in groups.items())


def map_of(gpus: Sequence[Gpu], used: Sequence[Nic]) -> tuple[GpuNic, ...]:
    """Return the NIC of each GPU of one host, in the order of the GPUs; () without NICs."""
    assigned = nics.assign_nics(gpus, used)
    shared = {str(nic): sum(str(other) == str(nic) for other in assigned.values()) for nic in assigned.values()}
    return tuple(
        GpuNic(
            gpu.index,
            gpu.pci or gpu.pci_path.rpartition("/")[2],
            str(assigned[gpu.index]),
            assigned[gpu.index].rate,
            _way(gpu, assigned[gpu.index], shared[str(assigned[gpu.index])]),
        )
        for gpu in sorted(gpus, key=lambda gpu: gpu.index)
        if gpu.index in assigned
    )


def _way(gpu: Gpu, nic: Nic, users: int) -> str:
    """Return in words how a GPU and its NIC are joined, and how many GPUs share the NIC."""
    bridges = nics.shared_bridges(gpu.pci_path, nic.path)
    if not gpu.pci_path or not nic.path:
        way = "place on the PCI bus not known"
    elif bridges >= nics.SWITCH_DEPTH:
        way = "same PCIe switch"
    elif gpu.numa < 0 or nic.numa < 0:
        way = "NUMA nodes not known"
    else:
        way = "same NUMA node" if gpu.numa == nic.numa else "other NUMA node"
    return f"{way}, shared by {users} GPUs" if users > 1 else way


def _why_none(facts: Facts, used: Sequence[Nic], profile: Profile) -> str:
    if not facts.gpus:
        return "no GPU"
    if not profile.link:
        return f"profile {profile.name} is for one node: no NIC is used"
    return "" if used else f"no active {nics.DRIVER} port with link layer {profile.link}"
