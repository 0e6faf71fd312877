"""Checks of Grace machines (GB200, GB300): NVLink between nodes by IMEX, and the kernel's pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.doctor.findings import NOTE, WARNING, Fault, Finding, HostView, Row, few

GRACE = "aarch64"
PAGE_KIB = 64
"""Pages of NVIDIA's kernels for Grace; its tuning guide of Grace recommends them, fewer entries of the IOMMU and TLB
serve the same memory."""

CLIQUE = "imex-clique"
WHY_CLIQUE = "GPUs of one NVLink domain reach each other's memory only within one clique."


def is_grace(seen: HostView) -> bool:
    """Return whether the host is a Grace machine with GPUs."""
    return seen.facts.machine == GRACE and bool(seen.facts.gpus)


def joins_nodes(seen: HostView) -> bool:
    """Return whether NVLink between nodes is a matter of this host: a Grace machine for runs over several nodes whose
    GPUs do not say that they belong to no domain."""
    return is_grace(seen) and bool(seen.case.link)


def has_imex(seen: HostView) -> Iterator[Fault]:
    """The service that hands memory over between nodes runs."""
    if not joins_nodes(seen) or seen.facts.prepared.imex == "active":
        return
    state, wanted = seen.facts.prepared.imex, "nvidia-imex active on every node of the domain"
    branch = seen.facts.prepared.nvidia_version.split(".")[0] or "BRANCH"
    if not state:
        yield Fault(NOTE, "whether nvidia-imex runs is not known", wanted, "nvidia-imex-ctl -N, on the host")
    elif state == "absent":
        yield Fault(WARNING, "no nvidia-imex", wanted, f"installing nvidia-imex-{branch}, the driver's branch")
    else:
        nodes = "every node of the domain in /etc/nvidia-imex/nodes_config.cfg"
        yield Fault(WARNING, f"nvidia-imex {state}", wanted, f"{nodes}, then systemctl enable --now nvidia-imex")


def has_channels(seen: HostView) -> Iterator[Fault]:
    """A channel device is there: programs open it to map memory of other nodes. Slurm's switch/nvidia_imex makes one
    for each job, so that outside of jobs there may be none."""
    prepared = seen.facts.prepared
    if not joins_nodes(seen) or prepared.imex_channels or prepared.imex in {"", "absent"}:
        return
    fix = "NVreg_CreateImexChannel0=1 for the driver and a reload, or SwitchType=switch/nvidia_imex in slurm.conf"
    severity = NOTE if seen.facts.slurm.slurmd else WARNING
    yield Fault(severity, "no /dev/nvidia-caps-imex-channels/channel*", "a channel for each job", fix)


def has_one_clique(seen: HostView) -> Iterator[Fault]:
    """All GPUs of a node are in one clique of one domain."""
    if joins_nodes(seen) and len(seen.facts.prepared.cliques) > 1:
        found = few(f"clique {clique} of domain {domain[:8]}" for domain, clique in seen.facts.prepared.cliques)
        yield Fault(WARNING, found, "one clique for all GPUs", "nvidia-smi -q -d FABRIC  # whoever runs the switches")
    elif joins_nodes(seen) and not seen.facts.prepared.cliques:
        found = "which NVLink domain and clique the GPUs belong to is not known"
        yield Fault(NOTE, found, "one clique for all GPUs", "nvidia-smi -q | grep -A 6 Fabric, on the host")


def share_clique(hosts: Sequence[HostView]) -> Iterator[Finding]:
    """Yield a finding for each domain whose hosts are in several cliques."""
    domains: dict[str, dict[str, list[str]]] = {}
    whole = (seen for seen in hosts if joins_nodes(seen) and len(seen.facts.prepared.cliques) == 1)
    for seen in whole:
        domain, clique = seen.facts.prepared.cliques[0]
        domains.setdefault(domain, {}).setdefault(clique, []).append(seen.name)
    yield from (parted(domain, cliques) for domain, cliques in domains.items() if len(cliques) > 1)


def parted(domain: str, cliques: Mapping[str, Sequence[str]]) -> Finding:
    """Return the finding of a domain whose hosts are in several cliques; the hosts of the smaller ones are named."""
    ranked = sorted(cliques.items(), key=lambda pair: -len(pair[1]))
    found = "; ".join(f"clique {clique} on {fold(names)}" for clique, names in ranked)
    odd = tuple(name for _, names in ranked[1:] for name in names)
    fix = "the same partition for them by whoever runs the switches, or --limit to one of the two"
    return Finding(CLIQUE, WARNING, odd, found, f"one clique in the domain {domain[:8]}", WHY_CLIQUE, fix)


def has_large_pages(seen: HostView) -> Iterator[Fault]:
    """The kernel has pages of 64 KiB."""
    size = seen.facts.prepared.page_kib
    if is_grace(seen) and not size:
        yield Fault(NOTE, "the size of memory pages is not known", f"{PAGE_KIB} KiB", "getconf PAGESIZE, on the host")
    elif is_grace(seen) and size != PAGE_KIB:
        fix = "a 64k kernel (Ubuntu: linux-nvidia-64k, Red Hat: kernel-64k), then a reboot"
        yield Fault(NOTE, f"memory pages of {size} KiB", f"{PAGE_KIB} KiB", fix)


ROWS = (
    Row("imex", "Without it GPUs of different nodes do not reach each other over NVLink, only over NICs.", has_imex),
    Row("imex-channels", "Programs map memory of other nodes through such a device.", has_channels),
    Row(CLIQUE, WHY_CLIQUE, has_one_clique),
    Row(
        "page-size",
        "Grace is tuned for pages of 64 KiB; with smaller ones registering memory costs more.",
        has_large_pages,
    ),
)
