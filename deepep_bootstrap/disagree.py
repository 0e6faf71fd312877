"""Differences between hosts that should be alike: one finding a property, the odd ones named against the majority. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from deepep_bootstrap import fabric
from deepep_bootstrap.findings import NOTE, WARNING, Finding, Seen
from deepep_bootstrap.hosts import fold


@dataclass(frozen=True)
class Property:
    """Something hosts should have in common. `value` returns it as text, "" where a host has nothing of the kind and is not asked."""

    check: str
    severity: str
    why: str
    fix: str
    value: Callable[[Seen], str]


def gpus(seen: Seen) -> str:
    """Return number and product of the GPUs, e.g. "8 NVIDIA H200"."""
    kinds = Counter(gpu.name for gpu in seen.facts.gpus)
    return " and ".join(f"{count} {name}" for name, count in sorted(kinds.items()))


def driver(seen: Seen) -> str:
    """Return version and flavour of the GPU driver."""
    versions = sorted({gpu.driver for gpu in seen.facts.gpus})
    return " ".join([*versions, seen.facts.prepared.nvidia_flavor]).strip() if versions else ""


def ofed(seen: Seen) -> str:
    """Return the version of OFED, where there are NICs that it would drive."""
    return (seen.facts.prepared.ofed or "the kernel's own driver") if seen.devices else ""


def nic_map(seen: Seen) -> str:
    """Return which NIC each GPU would use, as `0:mlx5_0:1,…`."""
    assigned = fabric.assign_nics(seen.facts.gpus, seen.nics)
    return ",".join(f"{index}:{nic}" for index, nic in assigned.items())


def packets(seen: Seen) -> str:
    """Return the sizes of packets under the NICs that GPUs use."""
    mtus = dict(seen.facts.prepared.mtus)
    sizes = {mtus[gid.netdev] for nic in seen.nics for gid in nic.gids if mtus.get(gid.netdev)}
    return " and ".join(str(size) for size in sorted(sizes))


def firmware(seen: Seen) -> str:
    """Return the firmware of the NICs that GPUs use."""
    used = {nic.name for nic in seen.nics}
    return " and ".join(sorted({device.firmware for device in seen.devices if device.name in used and device.firmware}))


def toolkits(seen: Seen) -> str:
    """Return the versions of the CUDA toolkits, oldest first."""
    found = {tuple(int(part) for part in toolkit.version.split(".") if part.isdigit()) for toolkit in seen.facts.toolkits}
    return " and ".join(".".join(map(str, version)) for version in sorted(found)) or "none"


def system(seen: Seen) -> str:
    """Return distribution and version."""
    return f"{seen.facts.os_id} {seen.facts.os_version}".strip()


def kernel(seen: Seen) -> str:
    """Return the release of the running kernel."""
    return seen.facts.kernel


SAME = "the same everywhere"
PROPERTIES = (
    Property(
        "differing-gpus",
        WARNING,
        "A job waits for its slowest node, and every kind of GPU is built for.",
        "--limit, to equal hosts",
        gpus,
    ),
    Property(
        "differing-driver",
        WARNING,
        "A fault that shows on some nodes only is hard to find.",
        "one driver on all of them, then a reboot",
        driver,
    ),
    Property(
        "differing-ofed",
        WARNING,
        "Different RDMA stacks differ in names, speed and faults.",
        "one OFED on all of them, then a reboot",
        ofed,
    ),
    Property(
        "differing-nic-map",
        WARNING,
        "A GPU talks to the same GPU of the other nodes; through NICs at other places its traffic takes other ways.",
        "nothing, if the machines are built so: each host then gets its own map",
        nic_map,
    ),
    Property(
        "differing-mtu",
        WARNING,
        "Two ends agree on the smaller packets, or drop the larger ones.",
        "ip link set DEVICE mtu …, on the odd ones",
        packets,
    ),
    Property(
        "differing-os",
        WARNING,
        "What one host builds must run on all of them.",
        "one release on all of them, or --limit",
        system,
    ),
    Property(
        "differing-kernel",
        NOTE,
        "Drivers are built for each kernel, and not every pair was tried.",
        "one kernel on all of them, then a reboot",
        kernel,
    ),
    Property(
        "differing-firmware",
        NOTE,
        "NICs with different firmware differ in speed and in faults.",
        "mlxfwmanager --online -u on the odd ones, then a reboot",
        firmware,
    ),
    Property(
        "differing-toolkits",
        NOTE,
        "Builds that move to another host would use another compiler.",
        "nothing: one host builds for all",
        toolkits,
    ),
)


def compare(hosts: Sequence[Seen]) -> Iterator[Finding]:
    """Yield a finding for every property in which some of `hosts` differ."""
    for each in PROPERTIES:
        groups: dict[str, list[str]] = {}
        for seen in hosts:
            if value := each.value(seen):
                groups.setdefault(value, []).append(seen.name)
        if len(groups) > 1:
            yield _finding(each, groups)


def _finding(each: Property, groups: dict[str, list[str]]) -> Finding:
    """Return the finding: the odd hosts against the value of the most; all hosts where no value has more than another."""
    ranked = sorted(groups.items(), key=lambda group: -len(group[1]))
    (usual, most), (_, second) = ranked[:2]
    decided = len(most) > len(second)
    odd = ranked[1:] if decided else ranked
    found = "; ".join(f"{value} on {fold(names)}" for value, names in odd)
    names = tuple(name for _, group in odd for name in group)
    return Finding(each.check, each.severity, names, found, f"{usual}, as on {fold(most)}" if decided else SAME, each.why, each.fix)
