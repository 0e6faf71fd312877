"""Differences between hosts that should be alike: one finding a property, the odd ones named against the
majority.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.doctor.findings import NOTE, WARNING, Finding, HostView, few
from deepep_bootstrap.doctor.network import flow_control_words
from deepep_bootstrap.inventory import nics


class Property(Struct, frozen=True):
    """Something hosts should have in common. `value` returns it as text, "" where a host has nothing of the kind and
    is not asked; where that is long, `apart` returns what of it differs from the usual."""

    check: str
    severity: str
    why: str
    fix: str
    value: Callable[[HostView], str]
    apart: Callable[[str, str], str] | None = None


def is_whole(seen: HostView) -> bool:
    """Return whether all GPUs answer and all ports are up; where not, another check names the cause of any
    difference."""
    ports = [port for device in seen.devices if not nics.is_virtual(seen.facts, device.name) for port in device.ports]
    return len(seen.facts.gpus) >= seen.facts.prepared.gpu_devices and all(port.state == "ACTIVE" for port in ports)


def gpus(seen: HostView) -> str:
    """Return number and product of the GPUs, e.g. "8 NVIDIA H200"."""
    if len(seen.facts.gpus) < seen.facts.prepared.gpu_devices:
        return ""
    kinds = Counter(gpu.name for gpu in seen.facts.gpus)
    return " and ".join(f"{count} {name}" for name, count in sorted(kinds.items()))


def driver(seen: HostView) -> str:
    """Return version and flavour of the GPU driver."""
    versions = sorted({gpu.driver for gpu in seen.facts.gpus})
    return " ".join([*versions, seen.facts.prepared.nvidia_flavor]).strip() if versions else ""


def ofed(seen: HostView) -> str:
    """Return the version of OFED, where there are NICs that it would drive."""
    return (seen.facts.prepared.ofed or "the kernel's own driver") if seen.devices else ""


def nic_map(seen: HostView) -> str:
    """Return which NIC each GPU would use, as `0:mlx5_0:1,…`."""
    assigned = nics.assign_nics(seen.facts.gpus, seen.nics) if is_whole(seen) else {}
    return ",".join(f"{index}:{nic}" for index, nic in assigned.items())


def other_places(value: str, usual: str) -> str:
    """Return the places of a map that are not so in the usual one."""
    return few(place for place in value.split(",") if place not in usual.split(",")) or "fewer GPUs"


def packets(seen: HostView) -> str:
    """Return the sizes of packets under the NICs that GPUs use."""
    mtus = dict(seen.facts.prepared.mtus)
    sizes = {mtus[gid.netdev] for nic in seen.nics for gid in nic.gids if mtus.get(gid.netdev)}
    return " and ".join(str(size) for size in sorted(sizes))


def firmware(seen: HostView) -> str:
    """Return the firmware of the NICs that GPUs use."""
    used = {nic.name for nic in seen.nics}
    found = {device.firmware for device in seen.devices if device.name in used and device.firmware}
    return found.pop() if len(found) == 1 else ""


def flow_control(seen: HostView) -> str:
    """Return how the RoCE ports that GPUs use keep packets, where all of them tell the same."""
    used = {nic.name for nic in seen.nics}
    told = {flow_control_words(each) for each in seen.facts.prepared.flow_control if each.device in used}
    return told.pop() if len(told) == 1 else ""


def toolkits(seen: HostView) -> str:
    """Return the versions of the CUDA toolkits, oldest first."""
    found = {
        tuple(int(part) for part in toolkit.version.split(".") if part.isdigit()) for toolkit in seen.facts.toolkits
    }
    return " and ".join(".".join(map(str, version)) for version in sorted(found)) or "none"


def system(seen: HostView) -> str:
    """Return distribution and version."""
    return f"{seen.facts.os_id} {seen.facts.os_version}".strip()


def kernel(seen: HostView) -> str:
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
        "",
        nic_map,
        other_places,
    ),
    Property(
        "differing-mtu",
        WARNING,
        "Two ends agree on the smaller packets, or drop the larger ones.",
        "ip link set DEVICE mtu …  # on the odd ones",
        packets,
    ),
    Property(
        "differing-flow-control",
        WARNING,
        "A host that does not take part in flow control or reports of congestion makes losses for those that do.",
        "the site's own set-up of RoCE, on the odd ones",
        flow_control,
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
        "mlxfwmanager --online -u  # on the odd ones, then a reboot",
        firmware,
    ),
    Property(
        "differing-toolkits",
        NOTE,
        "One host builds for all; on another one it would use another compiler.",
        "",
        toolkits,
    ),
)


def compare(hosts: Sequence[HostView]) -> Iterator[Finding]:
    """Yield a finding for every property in which some of `hosts` differ."""
    for each in PROPERTIES:
        groups: dict[str, list[str]] = {}
        for seen in hosts:
            if value := each.value(seen):
                groups.setdefault(value, []).append(seen.name)
        if len(groups) > 1:
            yield _finding(each, groups)


def _finding(each: Property, groups: dict[str, list[str]]) -> Finding:
    """Return the finding: the odd hosts against the value of the most; all hosts where no value has more than
    another."""
    ranked = sorted(groups.items(), key=lambda group: -len(group[1]))
    (usual, most), (_, second) = ranked[:2]
    decided = len(most) > len(second)
    odd = ranked[1:] if decided else ranked
    wanted = f"{usual}, as on {fold(most)}" if decided else SAME
    if each.apart and decided:
        odd, wanted = [(each.apart(value, usual), names) for value, names in odd], f"as on {fold(most)}"
    found = "; ".join(f"{value} on {fold(names)}" for value, names in odd)
    names = tuple(name for _, group in odd for name in group)
    return Finding(each.check, each.severity, names, found, wanted, each.why, each.fix)
