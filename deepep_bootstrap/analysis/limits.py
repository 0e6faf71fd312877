"""Limits of the hardware: the most that hosts can move, from their facts and the table of NVLink rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from deepep_bootstrap.analysis.reference_file import ReferenceSet, gpu_type
from deepep_bootstrap.inventory import nics
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.inventory.nics import sort_out

LINKS_OF_FABRICS = {"infiniband": "InfiniBand", "roce": "Ethernet", "gib": "Ethernet"}
BITS = 8


@dataclass(frozen=True)
class Limits:
    """What one host can move at most in one direction, in GB/s (10^9 bytes per second), the least of all hosts; None
    where the facts do not say it. `nvlink_gbs` is of one GPU, `node_gbs` of all NICs of a host for GPUs together,
    `nic_gbs` the share of one GPU in it. `gpus` and `nics` are per host. `why` says how they were found."""

    nvlink_gbs: float | None = None
    node_gbs: float | None = None
    nic_gbs: float | None = None
    gpus: int = 0
    nics: int = 0
    why: tuple[str, ...] = ()


SLACK = 1.05
"""How much more than the line can carry a figure may be before it cannot be: where tokens go is drawn, not dealt
out."""

ADDED_UP = 2.1
"""The same of an all-reduce, whose bus rate is what a ring carries: a switch that adds up needs half of that."""

LEAST = 0.5
"""Share of what the line can do that plain, long messages reach on healthy hardware at least. A choice: two H200
reach 0.69 of their NVLinks (NCCL 2.28.9, 2026-11-21); ports below half their rate, most NICs left out, and sockets
stay below half."""


@dataclass(frozen=True)
class Ceiling:
    """The most that one figure can be, in its unit: what the `line` carries, and the same as upstream counts it.
    `of` says which line; more than `counted` times `slack` cannot be, less than `least` (0: nobody knows) is slow
    whatever is wrong."""

    line: float
    counted: float
    of: str
    slack: float = SLACK
    least: float = 0.0


def ceiling(figure: str, nodes: int, ranks: float, limits: Limits) -> Ceiling | None:
    """Return the most that a figure of a test on so many nodes with so many ranks each can be; None where nobody knows.

    Upstream's tests count tokens that stay on their GPU (NVLink) or their node (RDMA) like others
    (test_internode.py: the sum over all nodes; V2's SO). Tokens go everywhere alike, so of n peers one is the sender
    itself, and figures are up to n / (n - 1) times what the line carried: 100 GB/s on two nodes with 50 GB/s for
    each GPU."""
    part = figure.rpartition(".")[2]
    if not part.endswith("_gbs"):
        return None
    if part in ("bus_gbs", "gpu_gbs"):
        return _plain(figure, nodes, ranks, limits)
    up = part in ("nvl_gbs", "su_gbs") or (part not in ("rdma_gbs", "so_gbs") and nodes == 1)
    line, peers, of = (limits.nvlink_gbs, ranks, "NVLink") if up else (limits.nic_gbs, nodes, "the NICs")
    return Ceiling(line, line * peers / (peers - 1), of) if line and peers > 1 else None


def _plain(figure: str, nodes: int, ranks: float, limits: Limits) -> Ceiling | None:
    """Return the most that a figure of our own programs can be. Between two nodes each GPU has its share of the NICs
    (pairs). An all-to-all sends 1 - 1 / nodes of all bytes through the NICs and counts 1 - 1 / ranks of them; a
    ring's all-reduce passes through all NICs of a node, and through the NVLinks of each GPU."""
    nvlink, nic = limits.nvlink_gbs, limits.nic_gbs
    reduces = figure.endswith("all_reduce.bus_gbs")
    if nodes == 1:
        most, of = nvlink, "NVLink"
    elif figure.endswith("gpu_gbs"):
        most, of = nic, "the NICs"
    elif reduces:
        rates = [rate for rate in (nic and nic * ranks, nvlink) if nic and rate]
        most, of = min(rates, default=None), "NVLink" if rates and min(rates) == nvlink else "the NICs"
    else:
        world = nodes * ranks
        most, of = nic * nodes / (nodes - 1) * (world - 1) / world if nic and world else None, "the NICs"
    return Ceiling(most, most, of, ADDED_UP if reduces else SLACK, LEAST * most) if most else None


def fabric_of(facts: Iterable[Facts], nodes: int) -> str:
    """Return the fabric that a test on so many nodes uses: "nvlink" on one; "infiniband", "gib" (RoCE with Google's
    gIB) or "roce" by the NICs of the hosts, "" where they have none."""
    hosts = list(facts)
    if nodes < 2:
        return "nvlink"
    rates = {
        link: sum(nic.rate for host in hosts for nic in nics.sort_out(host, link).used)
        for link in ("InfiniBand", "Ethernet")
    }
    if not any(rates.values()):
        return ""
    if rates["InfiniBand"] >= rates["Ethernet"]:
        return "infiniband"
    return "gib" if hosts and all(host.prepared.gib for host in hosts) else "roce"


def gpu_nics(facts: Mapping[str, Facts]) -> dict[str, tuple[str, ...]]:
    """Return the NICs that GPUs use, as "mlx5_3:1", by host: what `traffic.judge_traffic` expects. Hosts without
    GPUs are left out."""
    link = LINKS_OF_FABRICS.get(fabric_of(facts.values(), 2), "")
    hosts = {
        name: nics.assign_nics(host.gpus, nics.sort_out(host, link).used) for name, host in facts.items() if host.gpus
    }
    return {name: tuple(dict.fromkeys(map(str, nics.values()))) for name, nics in hosts.items()}


def gpu_of(facts: Iterable[Facts]) -> str:
    """Return the type of the hosts' GPUs ("H200"), "" where they have none or several types."""
    types = {gpu_type(gpu.name) or gpu.name for host in facts for gpu in host.gpus}
    return types.pop() if len(types) == 1 else ""


def limits(facts: Sequence[Facts], book: ReferenceSet) -> Limits:
    """Return what hosts can move at most; those without a GPU do not count."""
    hosts = [host for host in facts if host.gpus]
    if not hosts:
        return Limits()
    used = fabric_of(hosts, 2)
    nics = [sort_out(host, LINKS_OF_FABRICS[used]).used if used else () for host in hosts]
    nodes = [sum(nic.rate for nic in mine) / BITS for mine in nics]
    slowest = min(range(len(hosts)), key=lambda index: nodes[index] / len(hosts[index].gpus))
    links = [_nvlink(host, book) for host in hosts]
    known = [found for found in links if found is not None]
    nvlink, how = min(known) if len(known) == len(links) else (None, "")
    said = [how] if how else []
    if node := nodes[slowest]:
        said.append(
            f"{len(nics[slowest])} NICs of {node * BITS / len(nics[slowest]):g} Gb/s for {len(hosts[slowest].gpus)} "
            f"GPUs"
        )
    return Limits(
        nvlink_gbs=nvlink,
        node_gbs=node or None,
        nic_gbs=node / len(hosts[slowest].gpus) if node else None,
        gpus=len(hosts[slowest].gpus),
        nics=len(nics[slowest]),
        why=tuple(said),
    )


def _nvlink(host: Facts, book: ReferenceSet) -> tuple[float, str] | None:
    """Return GB/s of one GPU's NVLinks in one direction and how it was found; None where the GPU or its links are not
    known.

    Behind an NVSwitch `nvidia-smi topo` shows all links of a GPU for each of its peers, without one those to that
    peer. The links of all peers together are more than a GPU has only in the first case."""
    known = book.gpus.get(gpu_of([host]))
    if known is None or not known.links or not host.prepared.nvlinks:
        return None
    counts: dict[int, list[int]] = {gpu.index: [] for gpu in host.gpus}
    for pair in host.prepared.nvlinks:
        links = int(pair.by[2:]) if pair.by[:2] == "NV" and pair.by[2:].isdecimal() else 0
        for index in (pair.gpu, pair.other):
            counts.setdefault(index, []).append(links)
    least = min(sum(each) if sum(each) <= known.links else max(each) for each in counts.values())
    return (least * known.gbs, f"{least} NVLinks of {known.gbs:g} GB/s") if least else None
