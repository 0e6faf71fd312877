"""The network as the GPUs see it: the NIC of each GPU, the GID index, the interface between the hosts.

Of Python's own library and inventory.natural alone: images have a copy, by which a pod finds its own NICs.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from deepep_bootstrap.inventory.natural import natural

if TYPE_CHECKING:
    from deepep_bootstrap.inventory.facts import Facts, Gid, Gpu, Rdma
    from deepep_bootstrap.inventory.machine import Machine

DRIVER = "mlx5_core"
"""IBGDA drives NICs of this kernel driver only; the names of devices say nothing certain."""

SCALABLE = "/mlx5_core.sf."
"""In the path of a scalable function, the other kind of virtual device beside SR-IOV's."""

SWITCH_DEPTH = 2
"""Devices that share this much of their PCI path (host bridge, root port) are under one switch: a root port has one
link."""

ROCE_V2 = "RoCE v2"
IPV4 = "0000:0000:0000:0000:0000:ffff:"
LINK_LOCAL = ("fe80:", IPV4 + "a9fe:")
"""Addresses that no router passes on: IPv6's, and 169.254.0.0/16."""

SHAPES_KEPT = 256
"""Kinds of machines whose NICs are sorted and assigned once: hosts of one kind have devices at the same places."""

HOSTS_KEPT = 2048
"""Hosts whose ports are sorted out once for all who ask."""

Place = tuple[str, int]
"""PCI path and NUMA node of a device."""

DEFAULT_PREFIX = "mlx5"
"""NVSHMEM passes over NICs whose names begin otherwise, unless it is told."""


class Nic(NamedTuple):
    """One active port of an RDMA device that IBGDA can drive; `virtual`: a function that a physical one of this host
    lends."""

    name: str
    port: int
    link: str
    rate: float
    path: str
    numa: int
    gids: tuple[Gid, ...] = ()
    virtual: bool = False

    def __str__(self) -> str:
        return f"{self.name}:{self.port}"


class Sorted(NamedTuple):
    """The ports of a host that carry its GPUs' traffic, and its other RDMA devices by the reason why each does not."""

    used: tuple[Nic, ...] = ()
    left: Mapping[str, tuple[str, ...]] = MappingProxyType({})


def active_nics(facts: Facts) -> tuple[Nic, ...]:
    """Return the active ports of a host's mlx5 devices: all first ports in the order of names, then all second ones."""
    return _active(facts.rdma)


def _active(devices: Sequence[Rdma]) -> tuple[Nic, ...]:
    virtual = virtual_names(devices)
    found = [
        Nic(
            device.name,
            port.number,
            port.link_layer,
            port.rate_gbps,
            device.pci_path,
            device.numa,
            port.gids,
            device.name in virtual,
        )
        for device in devices
        if device.driver == DRIVER
        for port in device.ports
        if port.state == "ACTIVE"
    ]
    return tuple(sorted(found, key=lambda nic: (nic.port, natural(nic.name))))


def is_virtual(facts: Facts, name: str) -> bool:
    """Whether a device is a function that a physical one of the same host lends: by SR-IOV, or as a scalable function.

    A virtual function that was given to a virtual machine is an ordinary device in there."""
    return name in virtual_names(facts.rdma)


def virtual_names(devices: Sequence[Rdma]) -> frozenset[str]:
    """Return the names of the devices that are such functions."""
    return frozenset(device.name for device in devices if device.virtual or SCALABLE in device.pci_path)


def sort_out(facts: Facts, link: str) -> Sorted:
    """Return the ports of link layer `link` that carry the GPUs' traffic, and the rest with reasons.

    Left alone are devices of other drivers, ports that are down or of another kind, virtual functions where there
    are physical ones, ports of less than half the fastest rate (management), and, where most GPUs share a PCI switch
    with a NIC, the NICs that share one with no GPU: what is built beside the GPUs serves them, what hangs elsewhere
    serves storage or management."""
    return _sorted_out(facts.gpus, facts.rdma, link)


# The checks of one host ask again and again.
@lru_cache(HOSTS_KEPT)
def _sorted_out(gpus: tuple[Gpu, ...], devices: tuple[Rdma, ...], link: str) -> Sorted:
    left = _unusable(devices)
    nics = list(_active(devices))

    def leave(why: str, names: Iterable[Nic]) -> None:
        for nic in names:
            left.setdefault(why, []).append(str(nic))
            nics.remove(nic)

    for nic in [nic for nic in nics if nic.link != link]:
        leave(f"link layer {nic.link}", [nic])
    if not all(nic.virtual for nic in nics):
        leave("virtual function", [nic for nic in nics if nic.virtual])
    fastest = max((nic.rate for nic in nics), default=0.0)
    for nic in [nic for nic in nics if nic.rate * 2 < fastest]:
        leave(f"{nic.rate:g} of {fastest:g} Gb/s", [nic])
    leave("under no switch with a GPU", _apart(gpus, nics))
    return Sorted(tuple(nics), {why: tuple(names) for why, names in left.items()})


def _unusable(devices: Sequence[Rdma]) -> dict[str, list[str]]:
    """Return the devices of other drivers and the ports that are not active, by reason."""
    left: dict[str, list[str]] = {}
    for device in devices:
        if device.driver != DRIVER:
            left.setdefault(f"driver {device.driver or 'none'}", []).append(device.name)
            continue
        for port in device.ports:
            if port.state != "ACTIVE":
                left.setdefault(f"port state {port.state}", []).append(f"{device.name}:{port.number}")
    return left


def _apart(gpus: Sequence[Gpu], nics: Sequence[Nic]) -> list[Nic]:
    """Return the NICs that share a switch with no GPU, where at least half of the GPUs share one with a NIC."""
    far = _far(tuple(gpu.pci_path for gpu in gpus), tuple(nic.path for nic in nics))
    return [nics[number] for number in far]


@lru_cache(SHAPES_KEPT)
def _far(gpus: tuple[str, ...], nics: tuple[str, ...]) -> tuple[int, ...]:
    """Return the places of such NICs, from the PCI paths of GPUs and NICs."""
    beside = {
        (row, number)
        for row, gpu in enumerate(gpus)
        for number, nic in enumerate(nics)
        if shared_bridges(gpu, nic) >= SWITCH_DEPTH
    }
    if 2 * len({row for row, _ in beside}) < max(len(gpus), 1):
        return ()
    near = {number for _, number in beside}
    return tuple(number for number in range(len(nics)) if number not in near)


def assign_nics(gpus: Sequence[Gpu], nics: Sequence[Nic]) -> dict[int, Nic]:
    """Return the NIC of each GPU, by GPU index; {} without NICs.

    Loads of NICs differ by one at most. Among all such assignments the one is taken in which the fewest GPUs have a
    NIC of the farthest distance that occurs, then of the next farthest, and so on: so no GPU could have a nearer NIC
    unless another one got a farther one. Distance is shared PCI path, then NUMA node. Among equals the order of GPUs
    and of the NICs' names decides, which makes equal hosts equal maps and lets the order of the facts play no part."""
    gpus = sorted(gpus, key=lambda gpu: gpu.index)
    nics = sorted(nics, key=lambda nic: (nic.port, natural(nic.name)))
    if not gpus or not nics:
        return {}
    places = _nearest(tuple((gpu.pci_path, gpu.numa) for gpu in gpus), tuple((nic.path, nic.numa) for nic in nics))
    return {gpu.index: nics[number] for gpu, number in zip(gpus, places, strict=True)}


@lru_cache(SHAPES_KEPT)
def _nearest(gpus: tuple[Place, ...], nics: tuple[Place, ...]) -> tuple[int, ...]:
    """Return the place of each GPU's NIC among `nics`, both in their order."""
    distances = [[_distance(gpu, nic) for nic in nics] for gpu in gpus]
    ranks = {distance: rank for rank, distance in enumerate(sorted({one for row in distances for one in row}))}
    many = len(gpus) + 1
    last = len(nics) ** len(gpus)
    # One number says both: how far, where one GPU farther counts more than all GPUs nearer, and then the place in the
    # order of names.
    costs = [
        [
            many ** ranks[distance] * last + number * len(nics) ** (len(gpus) - 1 - row)
            for number, distance in enumerate(line)
        ]
        for row, line in enumerate(distances)
    ]
    return tuple(_balanced(costs))


def _distance(gpu: Place, nic: Place) -> tuple[int, int]:
    (gpu_path, gpu_numa), (nic_path, nic_numa) = gpu, nic
    unknown = gpu_numa < 0 or nic_numa < 0
    return -shared_bridges(gpu_path, nic_path), 1 if unknown else 2 * (gpu_numa != nic_numa)


def _balanced(costs: Sequence[Sequence[int]]) -> list[int]:
    """Return the column of each row so that the sum is smallest and columns are used equally often, or once more.

    Each column has as many places as every one must fill, and one more. Rows that stand for nobody fill the places
    that stay free; only those last places are open to them."""
    rows, columns = len(costs), len(costs[0])
    must = rows // columns
    never = 1 + sum(max(row) for row in costs)
    real = [[cost for cost in row for _ in range(must + 1)] for row in costs]
    nobody = [never if place < must else 0 for _ in range(columns) for place in range(must + 1)]
    return [place // (must + 1) for place in _cheapest([*real, *[nobody] * (columns * (must + 1) - rows)])[:rows]]


def _cheapest(costs: Sequence[Sequence[int]]) -> list[int]:
    """Return the column of each row of a square matrix for the smallest sum of costs.

    The Hungarian method with potentials, O(n³), here n ≤ 32: H. W. Kuhn, "The Hungarian method for the assignment
    problem", Naval Research Logistics Quarterly 2 (1955); in this form, one shortest augmenting path a row, R. Jonker
    and A. Volgenant, "A shortest augmenting path algorithm for dense and sparse linear assignment problems", Computing
    38 (1987)."""
    matching = _Matching(costs)
    for row in range(len(costs)):
        matching.add(row)
    return sorted(range(len(costs)), key=lambda column: matching.row_of[column])


class _Matching:
    """An assignment of rows to columns that grows row by row, the cheapest one for the rows that it has.

    `row_of[column]` is the row assigned to a column, NOBODY for none; the last column is no column of the matrix: the
    row to be assigned stands there while its path is searched. Potentials of rows and columns keep every reduced cost
    (cost - potentials of its row and column) at 0 or above, and that of every assigned pair at 0."""

    NOBODY = -1

    def __init__(self, costs: Sequence[Sequence[int]]) -> None:
        self.costs = costs
        self.size = len(costs)
        self.row_of = [self.NOBODY] * (self.size + 1)
        self.row_potential = [0] * self.size
        self.column_potential = [0] * (self.size + 1)

    def add(self, row: int) -> None:
        """Assign `row`: find the cheapest path from it to a free column, and move every row on it one column on."""
        start = self.size
        self.row_of[start] = row
        least: list[float] = [math.inf] * self.size  # the cheapest way to each column that was found so far
        before = [start] * self.size  # the column before it on this way
        reached: list[int] = []
        column = start
        while self.row_of[column] != self.NOBODY:
            reached.append(column)
            open_columns = [other for other in range(self.size) if other not in reached]
            self._relax(column, open_columns, least, before)
            column = min(open_columns, key=least.__getitem__)
            self._lower(int(least[column]), reached, open_columns, least)
        while column != start:
            self.row_of[column] = self.row_of[before[column]]
            column = before[column]

    def _relax(self, column: int, open_columns: Iterable[int], least: list[float], before: list[int]) -> None:
        """Note the columns that are reached cheaper by the row of `column`."""
        row = self.row_of[column]
        for other in open_columns:
            cost = self.costs[row][other] - self.row_potential[row] - self.column_potential[other]
            if cost < least[other]:
                least[other], before[other] = cost, column

    def _lower(self, step: int, reached: Iterable[int], open_columns: Iterable[int], least: list[float]) -> None:
        """Change potentials by `step`, so that the way to the nearest open column costs nothing."""
        for column in reached:
            self.row_potential[self.row_of[column]] += step
            self.column_potential[column] -= step
        for column in open_columns:
            least[column] -= step


def shared_bridges(one: str, other: str) -> int:
    """Return how many bridges two devices share from the root of the PCI tree down."""
    return len(common([one.split("/"), other.split("/")])) if one and other else 0


def common(sequences: Sequence[Sequence[str]]) -> list[str]:
    """Return the leading items that all sequences share."""
    return [items[0] for items in takewhile(lambda items: len(set(items)) == 1, zip(*sequences, strict=False))]


def cards(nics: Iterable[Nic]) -> list[tuple[Nic, ...]]:
    """Return the ports of each card that has more than one of them: of one device, or of functions of one PCI slot."""
    slots: dict[str, list[Nic]] = {}
    for nic in nics:
        slots.setdefault(re.sub(r"\.[0-7]$", "", nic.path) or nic.name, []).append(nic)
    return [tuple(ports) for ports in slots.values() if len(ports) > 1]


def name_prefix(names: Iterable[str]) -> str:
    """Return what NVSHMEM must be told of the NICs' names: "" when all begin with mlx5, else the letters they share."""
    found = list(names)
    if all(name.startswith(DEFAULT_PREFIX) for name in found):
        return ""
    letters = re.match(r"[A-Za-z_]*", "".join(common(found)))
    return letters.group() if letters else ""


def gid_index(nics: Iterable[Nic]) -> int | None:
    """Return the one index at which every NIC of every host has a routable RoCE v2 address (IPv4 first); None when
    there is no such index or more than one, where NVSHMEM chooses for each NIC better than we could for all."""
    tables = [_routable(nic) for nic in nics]
    for beginning in (IPV4, ""):
        shared = _shared_indexes(tables, beginning)
        if shared:
            return shared.pop() if len(shared) == 1 else None
    return None


def _routable(nic: Nic) -> list[Gid]:
    return [gid for gid in nic.gids if gid.kind == ROCE_V2 and not gid.gid.startswith(LINK_LOCAL)]


def _shared_indexes(tables: Iterable[Sequence[Gid]], beginning: str) -> set[int]:
    """Return the indexes at which every table has an address that begins so."""
    indexes = [{gid.index for gid in table if gid.gid.startswith(beginning)} for table in tables]
    return set.intersection(*indexes) if indexes else set()


def bootstrap_interfaces(machines: Mapping[str, Machine]) -> dict[str, str]:
    """Return, for each host whose way to all the others is known and one, the interface it takes.

    A host is reached at the address its name stands for; where that is not known, at the one of its default route's
    interface."""
    addresses = {host: address_of(machine) for host, machine in machines.items()}
    known = [address for address in addresses.values() if address]
    if len(known) < len(machines) or len(set(known)) < len(known) or len(known) < 2:
        return {}
    targets = {host: ipaddress.ip_address(address) for host, address in addresses.items()}
    tables = {host: _table(machine) for host, machine in machines.items()}
    ways = {
        host: {_way(table, target) for other, target in targets.items() if other != host}
        for host, table in tables.items()
    }
    return {host: next(iter(found)) for host, found in ways.items() if len(found) == 1 and "" not in found}


def address_of(machine: Machine) -> str:
    """Return the address other hosts reach a host at, or ""."""
    if machine.address:
        return machine.address
    table = _table(machine)
    # Two destinations that only a default route covers.
    outward = _way(table, ipaddress.IPv4Address(0)) or _way(table, ipaddress.IPv6Address(0))
    found = [ipaddress.ip_interface(one.cidr).ip for one in machine.addresses if outward and one.interface == outward]
    return str(min((ip for ip in found if not ip.is_link_local), key=lambda ip: ip.version, default=""))


def _table(machine: Machine) -> tuple[tuple[int, int, int, str], ...]:
    """Return a host's routes as version, network, mask and interface: the most exact first, the smallest metric
    among equals. As numbers, since a thousand hosts look for their ways to a thousand."""
    routes = [
        (ipaddress.ip_network(route.destination, strict=False), route.metric, route.interface)
        for route in machine.routes
    ]
    routes.sort(key=lambda route: (-route[0].prefixlen, route[1], route[2]))
    return tuple(
        (network.version, int(network.network_address), int(network.netmask), name) for network, _, name in routes
    )


def _way(table: Sequence[tuple[int, int, int, str]], target: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """Return the interface of the first route of a `_table` that leads to an address; "" without one."""
    version, number = target.version, int(target)
    return next((name for kind, network, mask, name in table if kind == version and number & mask == network), "")


def is_ambiguous(interface: str, machines: Iterable[Machine]) -> bool:
    """Whether a name means more than itself where names are read as beginnings: eth1 where there is an eth10."""
    names = {one.interface for machine in machines for one in machine.addresses}
    return any(name != interface and name.startswith(interface) for name in names)
