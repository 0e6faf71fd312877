"""What the hardware says about the environment: the profile, each GPU's NIC, the GID index, the GPU architectures. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import tomlkit
from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet
from tomlkit.exceptions import TOMLKitError

from deepep_bootstrap.errors import Problem, Trouble
from deepep_bootstrap.facts import Facts, Gid, Gpu

AUTO = "auto"
SINGLE = "single-node"
BY_LINK = {"Ethernet": "roce", "InfiniBand": "infiniband"}
DRIVER = "mlx5_core"
"""IBGDA drives NICs of this kernel driver only; the names of devices say nothing certain."""

PROFILES = "profiles/"
KNOWN = "known-variables.toml"
ROCE_V2 = "RoCE v2"
IPV4 = "0000:0000:0000:0000:0000:ffff:"
LINK_LOCAL = "fe80:"
DEFAULT_PREFIX = "mlx5"
"""NVSHMEM passes over NICs whose names begin otherwise, unless it is told."""


@dataclass(frozen=True)
class Derived:
    """What was derived. `why` says how `profile` was chosen, `environment` holds the variables in the order to write them, `archs` the
    compute capabilities of all GPUs ("9.0"), `notes` what a person should know."""

    profile: str
    why: str
    environment: Mapping[str, str]
    archs: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Nic:
    """One active port of an RDMA device that IBGDA can drive."""

    name: str
    port: int
    link: str
    rate: float
    path: str
    numa: int
    gids: tuple[Gid, ...]


@dataclass(frozen=True)
class Profile:
    """What hardware cannot tell: a profile file's title, the link layer it is for ("" for none) and its variables."""

    name: str
    title: str
    link: str
    environment: Mapping[str, str]


def derive(profile: str, facts: Mapping[str, Facts], texts: Mapping[str, str]) -> Derived:
    """Return profile, environment and architectures for the GPU hosts in `facts` (by name).

    `profile` is "auto" or a profile's name; `texts` are the files of env/ by relative path. Trouble: an unknown profile, a variable
    that nobody reads or that must stay the caller's, no GPU on any host."""
    nics = {host: active_nics(seen) for host, seen in facts.items()}
    name, why, notes = choose_profile(profile, nics)
    chosen = read_profile(name, texts)
    fabric = {host: fabric_nics(found, chosen.link) for host, found in nics.items()} if chosen.link else {}
    found, more = _hardware_environment(facts, fabric, chosen.link)
    # What a person wrote into a profile stands over what was found.
    environment = {**chosen.environment, **{key: value for key, value in found.items() if key not in chosen.environment}}
    archs, without = architectures(facts)
    return Derived(name, why, environment, archs, (*notes, *more, *without))


def active_nics(facts: Facts) -> tuple[Nic, ...]:
    """Return the active ports of a host's mlx5 devices, in the order of their names."""
    return tuple(
        Nic(device.name, port.number, port.link_layer, port.rate_gbps, device.pci_path, device.numa, port.gids)
        for device in facts.rdma
        if device.driver == DRIVER
        for port in device.ports
        if port.state == "ACTIVE"
    )


def fabric_nics(nics: Iterable[Nic], link: str) -> tuple[Nic, ...]:
    """Return the ports of one link layer that carry the GPUs' traffic: those at least half as fast as the fastest, which leaves out
    NICs for management."""
    fitting = [nic for nic in nics if nic.link == link]
    fastest = max((nic.rate for nic in fitting), default=0.0)
    return tuple(nic for nic in fitting if nic.rate * 2 >= fastest)


def choose_profile(profile: str, nics: Mapping[str, Sequence[Nic]]) -> tuple[str, str, tuple[str, ...]]:
    """Return the profile's name, why it was chosen, and notes; with "auto" the link layer with the most bandwidth decides."""
    if profile != AUTO:
        return profile, "named in the hosts file", ()
    speeds: dict[str, float] = {}
    for nic in (nic for found in nics.values() for nic in found):
        speeds[nic.link] = speeds.get(nic.link, 0.0) + nic.rate
    usable = {link: speed for link, speed in speeds.items() if link in BY_LINK}
    if not usable:
        return SINGLE, f"no active {DRIVER} port on any GPU host", ()
    link = max(usable, key=lambda name: usable[name])
    name = BY_LINK[link]
    without = [host for host, found in nics.items() if not any(nic.link == link for nic in found)]
    notes = [f"{_fold(without)}: no active {link} port, cannot take part in runs over several nodes"] if without else []
    others = [other for other in usable if other != link]
    notes += [f"NICs of another kind ({', '.join(others)}) are left alone: {link} has more bandwidth"] if others else []
    return name, f"active {DRIVER} ports with link layer {link}", tuple(notes)


def read_profile(name: str, texts: Mapping[str, str]) -> Profile:
    """Return profile `name` of the files of env/, every variable of it checked; Trouble names all faults at once."""
    file = f"{PROFILES}{name}.toml"
    if file not in texts:
        known = sorted(path.removeprefix(PROFILES).removesuffix(".toml") for path in texts if path.startswith(PROFILES))
        raise Trouble(Problem("profile", "there is no such profile", name, " or ".join([AUTO, *known]), f"writing env/{file}"))
    table, rules = _read_toml(f"env/{file}", texts[file]), _read_toml(f"env/{KNOWN}", texts[KNOWN])
    link, environment = table.get("link_layer", ""), table.get("environment", {})
    faults = [Problem(f"env/{file}: {key}", "unknown key") for key in table if key not in {"title", "link_layer", "environment"}]
    if link not in {"", *BY_LINK}:
        faults.append(Problem(f"env/{file}: link_layer", "unknown link layer", str(link), " or ".join(BY_LINK)))
    for variable, value in environment.items():
        if fault := _variable_fault(variable, value, link, rules):
            faults.append(Problem(f"env/{file}: {variable}", *fault))
    if faults:
        raise Trouble(*faults)
    return Profile(name, table.get("title", ""), link, {key: str(value) for key, value in environment.items()})


def _variable_fault(variable: str, value: object, link: str, rules: Mapping[str, Any]) -> tuple[str, str, str] | None:
    if variable in rules["refused"]:
        return "a profile must not set it", rules["refused"][variable], ""
    if variable not in rules["known"]:
        return "nobody is known to read this variable", "", f"a name in env/{KNOWN}"
    only = rules["known"][variable].get("link_layer", link)
    if only != link:
        return f"it is for {only} only", link or "no network", only
    if not isinstance(value, str) or "\n" in value:
        return "the value must be a text of one line", repr(value), '"…"'
    return None


def _read_toml(where: str, text: str) -> dict[str, Any]:
    try:
        return tomlkit.parse(text).unwrap()
    except TOMLKitError as error:
        raise Trouble(Problem(where, "is not TOML", str(error))) from None


def _hardware_environment(
    facts: Mapping[str, Facts], fabric: Mapping[str, Sequence[Nic]], link: str
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the variables that the hardware decides, in order, and notes on what could not be decided."""
    if not any(fabric.values()):
        return {}, ()
    maps = {host: assign_nics(seen.gpus, fabric[host]) for host, seen in facts.items()}
    used = [nic for assigned in maps.values() for nic in assigned.values()]
    mapping, notes = agree(maps)
    prefix = name_prefix(nic.name for nic in used)
    index = gid_index(used) if link == "Ethernet" else None
    found = {
        "DEEP_EP_DEVICE_TO_HCA_MAPPING": mapping,
        "NVSHMEM_HCA_PREFIX": prefix,
        "NVSHMEM_IB_GID_INDEX": "" if index is None else str(index),
    }
    return {key: value for key, value in found.items() if value}, notes


def assign_nics(gpus: Sequence[Gpu], nics: Sequence[Nic]) -> dict[int, Nic]:
    """Return the NIC of each GPU, by GPU index: nearest by shared PCI path, then by NUMA node, no NIC used more often than needed.

    The order of names decides among equals, so two GPUs and two NICs under one switch get one each, and equal hosts equal maps."""
    if not nics:
        return {}
    room = {number: -(-len(gpus) // len(nics)) for number in range(len(nics))}
    pairs = sorted(
        (-_shared(gpu.pci_path, nic.path), gpu.numa != nic.numa, gpu.index, number) for gpu in gpus for number, nic in enumerate(nics)
    )
    assigned: dict[int, Nic] = {}
    for _, _, index, number in pairs:
        if index not in assigned and room[number]:
            assigned[index] = nics[number]
            room[number] -= 1
    return dict(sorted(assigned.items()))


def _shared(one: str, other: str) -> int:
    """Return how many bridges two devices share from the root of the PCI tree down."""
    return len(_common([one.split("/"), other.split("/")])) if one and other else 0


def _common(sequences: Sequence[Sequence[str]]) -> list[str]:
    """Return the leading items that all sequences share."""
    return [items[0] for items in takewhile(lambda items: len(set(items)) == 1, zip(*sequences, strict=False))]


def agree(maps: Mapping[str, Mapping[int, Nic]]) -> tuple[str, tuple[str, ...]]:
    """Return the map of all hosts as `0:mlx5_0:1,…`; "" with a note where they differ, since all nodes share one modulefile."""
    groups: dict[str, list[str]] = {}
    for host, assigned in maps.items():
        groups.setdefault(",".join(f"{index}:{nic.name}:{nic.port}" for index, nic in assigned.items()), []).append(host)
    if len(groups) == 1:
        return next(iter(groups)), ()
    told = "; ".join(f"{_fold(hosts)} would use {text or 'none'}" for text, hosts in groups.items())
    return "", (f"the hosts' GPUs and NICs are not laid out alike, so DeepEP chooses NICs itself: {told}",)


def name_prefix(names: Iterable[str]) -> str:
    """Return what NVSHMEM must be told of the NICs' names: "" when all begin with mlx5, else the letters they share."""
    found = list(names)
    if all(name.startswith(DEFAULT_PREFIX) for name in found):
        return ""
    letters = re.match(r"[A-Za-z_]*", "".join(_common(found)))
    return letters.group() if letters else ""


def gid_index(nics: Iterable[Nic]) -> int | None:
    """Return the one index at which every NIC of every host has a routable RoCE v2 address (IPv4 first); None when there is no such
    index or more than one, where NVSHMEM chooses for each NIC better than we could for all."""
    tables = [[gid for gid in nic.gids if gid.kind == ROCE_V2 and not gid.gid.startswith(LINK_LOCAL)] for nic in nics]
    for beginning in (IPV4, ""):
        found = [{gid.index for gid in table if gid.gid.startswith(beginning)} for table in tables]
        common = set.intersection(*found) if found else set()
        if common:
            return common.pop() if len(common) == 1 else None
    return None


def architectures(facts: Mapping[str, Facts]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the compute capabilities of all GPUs in ascending order, and notes; Trouble when no host shows a GPU."""
    found = {gpu.capability for seen in facts.values() for gpu in seen.gpus if re.fullmatch(r"[0-9]{1,2}\.[0-9]", gpu.capability)}
    without = {host: seen.gpu_problem or "nvidia-smi shows none" for host, seen in facts.items() if not seen.gpus}
    if not found:
        told = next(iter(without.values()), "no compute capability from nvidia-smi")
        raise Trouble(Problem(_fold(facts), "there is no GPU to build for", told, "one GPU at least", "role=login for hosts without GPUs"))
    notes = tuple(f"{host}: no GPU ({why})" for host, why in without.items())
    return tuple(sorted(found, key=lambda capability: [int(part) for part in capability.split(".")])), notes


def _fold(hosts: Iterable[str]) -> str:
    return str(NodeSet.fromlist(list(hosts), resolver=RESOLVER_NOGROUP))
