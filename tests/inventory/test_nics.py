"""The network as the GPUs see it: how GPUs get their NICs, checked against every possible assignment, GIDs,
interfaces, routes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from deepep_bootstrap.inventory import nics
from deepep_bootstrap.inventory.facts import Facts, Gid, Gpu, Port, Rdma
from deepep_bootstrap.inventory.machine import Address, Machine, Route
from deepep_bootstrap.inventory.nics import Nic, assign_nics


def gpu(index: int, path: str, numa: int = -1) -> Gpu:
    return Gpu(index, "NVIDIA H100", 81559, "9.0", "580", "", path, numa, 0)


def nic(name: str, path: str = "", numa: int = -1, gids: tuple[Gid, ...] = ()) -> Nic:
    return Nic(name, 1, "Ethernet", 400.0, path, numa, gids)


# --- which NIC a GPU uses --------------------------------------------------------------------------------------------------------------

paths = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map("/".join)
places = st.tuples(paths, st.integers(-1, 1))


def layouts(most_gpus: int, most_nics: int) -> st.SearchStrategy[tuple[list[Gpu], list[Nic]]]:
    gpus = st.lists(places, min_size=1, max_size=most_gpus).map(
        lambda found: [gpu(n, *place) for n, place in enumerate(found)]
    )
    nics = st.lists(places, min_size=1, max_size=most_nics).map(
        lambda found: [nic(f"mlx5_{n}", *place) for n, place in enumerate(found)]
    )
    return st.tuples(gpus, nics)


def distance(one: Gpu, other: Nic) -> tuple[int, int]:
    """Say independently of the program how far a NIC is: bridges not shared count, then the NUMA node."""
    same = 0
    for mine, its in zip(one.pci_path.split("/"), other.path.split("/"), strict=False):
        if mine != its:
            break
        same += 1
    return -same, 1 if -1 in (one.numa, other.numa) else 2 * (one.numa != other.numa)


def farthest_first(gpus: Sequence[Gpu], found: Sequence[Nic]) -> list[tuple[int, int]]:
    return sorted((distance(one, other) for one, other in zip(gpus, found, strict=True)), reverse=True)


def is_balanced(found: Sequence[Nic], nics: Sequence[Nic]) -> bool:
    loads = Counter(other.name for other in found)
    return max(loads[other.name] for other in nics) - min(loads[other.name] for other in nics) <= 1


@given(layouts(16, 16))
def test_every_gpu_has_a_nic_and_loads_differ_by_one_at_most(layout: tuple[list[Gpu], list[Nic]]) -> None:
    gpus, nics = layout
    assigned = assign_nics(gpus, nics)
    assert list(assigned) == list(range(len(gpus)))
    assert is_balanced(list(assigned.values()), nics)


@given(layouts(16, 16), st.randoms(use_true_random=False))
def test_the_order_of_devices_changes_nothing(layout: tuple[list[Gpu], list[Nic]], random: object) -> None:
    gpus, nics = layout
    wanted = assign_nics(gpus, nics)
    random.shuffle(gpus)
    random.shuffle(nics)
    assert assign_nics(gpus, nics) == wanted


@given(layouts(5, 4))
def test_of_all_balanced_assignments_none_is_nearer(layout: tuple[list[Gpu], list[Nic]]) -> None:
    """Every assignment there is, tried out: none has fewer GPUs at the farthest distance, nor, with as many, at the
    next one."""
    gpus, nics = layout
    assigned = list(assign_nics(gpus, nics).values())
    balanced = [found for found in product(nics, repeat=len(gpus)) if is_balanced(found, nics)]
    best = min(farthest_first(gpus, found) for found in balanced)
    assert farthest_first(gpus, assigned) == best
    # Among the equally near ones: the first in the order of GPUs and names.
    equal = [[other.name for other in found] for found in balanced if farthest_first(gpus, found) == best]
    assert [other.name for other in assigned] == min(equal)


@given(layouts(5, 4))
def test_the_nearest_nic_is_never_passed_over(layout: tuple[list[Gpu], list[Nic]]) -> None:
    """Where some balanced assignment gives every GPU a NIC as near as it has any, so does ours; and where a GPU
    could have a nearer NIC than it got, with loads balanced, another GPU would get a farther one."""
    gpus, nics = layout
    assigned = list(assign_nics(gpus, nics).values())
    nearest = [min(distance(one, other) for other in nics) for one in gpus]
    mine = [distance(one, other) for one, other in zip(gpus, assigned, strict=True)]
    for found in product(nics, repeat=len(gpus)):
        if is_balanced(found, nics):
            its = [distance(one, other) for one, other in zip(gpus, found, strict=True)]
            assert its != nearest or mine == nearest
            assert its == mine or any(theirs > ours for theirs, ours in zip(its, mine, strict=True))


def test_a_greedy_choice_would_pass_a_nearest_over() -> None:
    # GPU 0 is equally near to both; taking the first name would leave GPU 1 with the far one.
    assigned = nics.assign_nics(
        [gpu(0, "r/s/g"), gpu(1, "r/s/t/g")], [nic("mlx5_0", "r/s/t/n"), nic("mlx5_1", "r/s/n")]
    )
    assert [found.name for found in assigned.values()] == ["mlx5_1", "mlx5_0"]


def test_two_gpus_and_two_nics_under_one_switch_get_one_each() -> None:
    assigned = nics.assign_nics(
        [gpu(0, "r/a/g0"), gpu(1, "r/a/g1")], [nic("mlx5_0", "r/a/n0"), nic("mlx5_1", "r/a/n1")]
    )
    assert [found.name for found in assigned.values()] == ["mlx5_0", "mlx5_1"]


def test_numa_decides_where_paths_say_nothing() -> None:
    assigned = nics.assign_nics([gpu(0, "", 1), gpu(1, "", 0)], [nic("mlx5_0", "", 0), nic("mlx5_1", "", 1)])
    assert [found.name for found in assigned.values()] == ["mlx5_1", "mlx5_0"]


def test_a_bridge_whose_name_begins_like_another_is_not_nearer() -> None:
    assert nics.assign_nics([gpu(0, "pci0000:1/x")], [nic("a", "pci0000:10/y"), nic("b", "pci0000:1/z")])[0].name == "b"


def test_names_are_ordered_by_their_numbers_and_first_ports_come_first() -> None:
    nics = [nic(f"mlx5_{n}") for n in (10, 9, 2)]
    assert [str(found) for found in assign_nics([gpu(0, ""), gpu(1, "")], nics).values()] == ["mlx5_2:1", "mlx5_9:1"]
    ports = [nic(f"mlx5_{n}")._replace(port=port) for n in (0, 1) for port in (1, 2)]
    assert [str(found) for found in assign_nics([gpu(0, ""), gpu(1, "")], ports).values()] == ["mlx5_0:1", "mlx5_1:1"]


def test_without_nics_or_gpus_there_is_no_map() -> None:
    assert nics.assign_nics([gpu(0, "a")], []) == {}
    assert nics.assign_nics([], [nic("mlx5_0")]) == {}


# --- which ports serve the GPUs --------------------------------------------------------------------------------------------------------

SWITCHED = [gpu(n, f"pci{n}/port/up/down{n}/gpu") for n in range(4)]


def rdma(
    name: str, path: str, rate: float = 400.0, link: str = "Ethernet", state: str = "ACTIVE", **more: object
) -> Rdma:
    return Rdma(name, str(more.pop("driver", "mlx5_core")), path, 0, "", (Port(1, state, link, rate),), **more)


def sort_out(devices: list[Rdma], gpus: Sequence[Gpu] = SWITCHED) -> tuple[list[str], Mapping[str, tuple[str, ...]]]:
    found = nics.sort_out(Facts(gpus=tuple(gpus), rdma=tuple(devices)), "Ethernet")
    return [one.name for one in found.used], found.left


BESIDE = [rdma(f"mlx5_{n}", f"pci{n}/port/up/down9/nic") for n in range(4)]


def test_every_port_left_alone_has_its_reason() -> None:
    others = [
        rdma("irdma0", "pci0/port/up/down8/nic", driver="irdma"),
        rdma("mlx5_10", "pci0/port/up/down7/nic", state="DOWN"),
        rdma("mlx5_11", "pci0/port/up/down6/nic", link="InfiniBand"),
        rdma("mlx5_12", "pci0/port/up/down5/nic", virtual=True),
        rdma("mlx5_13", "pci0/port/up/down5/nic/mlx5_core.sf.2"),
        rdma("mlx5_14", "pci0/port/up/down4/nic", rate=100.0),
        rdma("mlx5_15", "pci8/port/nic"),
    ]
    used, left = sort_out([*others, *BESIDE])
    assert used == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]
    assert left == {
        "driver irdma": ("irdma0",),
        "port state DOWN": ("mlx5_10:1",),
        "link layer InfiniBand": ("mlx5_11:1",),
        "virtual function": ("mlx5_12:1", "mlx5_13:1"),
        "100 of 400 Gb/s": ("mlx5_14:1",),
        "under no switch with a GPU": ("mlx5_15:1",),
    }


def test_virtual_functions_serve_where_there_is_nothing_else() -> None:
    assert sort_out([replace(one, virtual=True) for one in BESIDE])[0] == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]


def test_half_the_rate_is_fast_enough() -> None:
    assert sort_out([*BESIDE[:3], replace(BESIDE[3], ports=(Port(1, "ACTIVE", "Ethernet", 200.0),))])[1] == {}


def test_nics_apart_serve_where_no_gpu_has_one_beside_it() -> None:
    apart = [rdma(f"mlx5_{n}", f"pci{n + 8}/port/nic") for n in range(4)]
    assert len(sort_out(apart)[0]) == 4
    assert len(sort_out([BESIDE[0], *apart[1:]])[0]) == 4
    assert sort_out([*BESIDE[:2], *apart[2:]])[0] == ["mlx5_0", "mlx5_1"]


def test_devices_on_a_virtual_machines_one_bridge_are_under_no_switch() -> None:
    flat = [gpu(n, f"pci0000:00/0000:00:0{n}.0") for n in range(4)]
    assert len(sort_out([rdma(f"mlx5_{n}", f"pci0000:00/0000:00:1{n}.0") for n in range(4)], flat)[0]) == 4


def test_ports_of_one_card_are_found_by_device_and_by_slot() -> None:
    single, one, two = nic("mlx5_0", "a/0000:1d:00.0"), nic("mlx5_1", "a/0000:29:00.0"), nic("mlx5_2", "a/0000:29:00.1")
    ports = [nic("mlx5_3", "a/0000:30:00.0")._replace(port=port) for port in (1, 2)]
    assert nics.cards([single, one, *ports, two]) == [(one, two), tuple(ports)]


# --- GIDs and names --------------------------------------------------------------------------------------------------------------------


def v2(index: int, gid: str) -> Gid:
    return Gid(index, gid, "RoCE v2", "eth0")


FOUR, SIX, LOCAL = (
    nics.IPV4 + "0a00:0001",
    "2001:0db8:0000:0000:0000:0000:0000:0001",
    "fe80:0000:0000:0000:0000:0000:0000:0001",
)
LOCAL_FOUR = nics.IPV4 + "a9fe:0102"


@pytest.mark.parametrize(
    ("tables", "index"),
    [
        ([[v2(1, LOCAL), v2(3, FOUR)], [v2(1, LOCAL), v2(3, FOUR)]], 3),
        ([[v2(3, FOUR)], [v2(5, FOUR)]], None),
        ([[v2(3, FOUR), v2(5, FOUR)], [v2(3, FOUR), v2(5, FOUR)]], None),
        ([[v2(3, FOUR), v2(5, FOUR)], [v2(5, FOUR)]], 5),
        ([[v2(3, LOCAL_FOUR), v2(5, FOUR)], [v2(3, FOUR), v2(5, FOUR)]], 5),
        ([[v2(3, FOUR), v2(5, SIX)], [v2(3, FOUR), v2(5, SIX)]], 3),
        ([[v2(5, SIX)], [v2(3, FOUR), v2(5, SIX)]], 5),
        ([[v2(1, LOCAL)]], None),
        ([[Gid(3, FOUR, "IB/RoCE v1", "eth0")]], None),
        ([[v2(3, FOUR)], []], None),
        ([], None),
    ],
)
def test_a_gid_index_is_one_that_all_nics_agree_on(tables: list[list[Gid]], index: int | None) -> None:
    assert nics.gid_index([nic("mlx5_0", gids=tuple(table)) for table in tables]) == index


@pytest.mark.parametrize(
    ("names", "prefix"),
    [
        (["mlx5_0", "mlx5_bond_0"], ""),
        (["rocep145s0", "rocep206s0"], "rocep"),
        (["ibp24s0"], "ibp"),
        (["mlx5_0", "rocep1s0"], ""),
        ([], ""),
    ],
)
def test_nvshmem_is_told_of_other_names_only(names: list[str], prefix: str) -> None:
    assert nics.name_prefix(names) == prefix


# --- the interface between the hosts ---------------------------------------------------------------------------------------------------


def machine(address: str, *routes: Route, addresses: tuple[Address, ...] = ()) -> Machine:
    return Machine(address=address, routes=routes, addresses=addresses)


DEFAULT = Route("0.0.0.0/0", "eth0")


@pytest.mark.parametrize(
    ("machines", "wanted"),
    [
        ([machine("10.0.0.1", DEFAULT), machine("10.0.0.2", DEFAULT)], ["eth0", "eth0"]),
        ([machine("10.0.0.1", DEFAULT, Route("10.0.0.0/24", "ens3")), machine("10.0.0.2", DEFAULT)], ["ens3", "eth0"]),
        # The most exact route, and of equal ones that of the smallest metric.
        (
            [
                machine(
                    "10.0.0.1", Route("10.0.0.0/8", "a"), Route("10.0.0.0/24", "b", 9), Route("10.0.0.0/24", "c", 5)
                ),
                machine("10.0.0.2", DEFAULT),
            ],
            ["c", "eth0"],
        ),
        # One address is reached one way, another one another way: no one name.
        (
            [
                machine("10.0.0.1", DEFAULT, Route("10.1.0.0/16", "ens9")),
                machine("10.0.0.2", DEFAULT),
                machine("10.1.0.3", DEFAULT),
            ],
            ["", "eth0", "eth0"],
        ),
        # Without a route, and with one of another address family only.
        ([machine("10.0.0.1"), machine("10.0.0.2", Route("::/0", "eth6"))], ["", ""]),
        (
            [machine("2001:db8::1", Route("2001:db8::/64", "eth6")), machine("2001:db8::2", Route("::/0", "eth7"))],
            ["eth6", "eth7"],
        ),
        # A host whose name stands for nothing is reached where its default route leaves; link-local addresses are no
        # way to it.
        (
            [
                machine(
                    "",
                    DEFAULT,
                    addresses=(
                        Address("eth0", "fe80::1/64"),
                        Address("eth0", "10.0.0.1/24"),
                        Address("ib0", "10.9.0.1/24"),
                    ),
                ),
                machine("10.0.0.2", Route("10.0.0.0/24", "ens3")),
            ],
            ["eth0", "ens3"],
        ),
        ([machine("", DEFAULT), machine("10.0.0.2", DEFAULT)], ["", ""]),
        # Two hosts with one address are not told apart.
        ([machine("10.0.0.1", DEFAULT), machine("10.0.0.1", DEFAULT)], ["", ""]),
        ([machine("10.0.0.1", DEFAULT)], [""]),
        ([], []),
    ],
)
def test_the_interface_is_that_of_the_route_to_the_others(machines: list[Machine], wanted: list[str]) -> None:
    found = nics.bootstrap_interfaces({f"n{number}": one for number, one in enumerate(machines)})
    assert [found.get(f"n{number}", "") for number in range(len(machines))] == wanted


def test_a_name_that_begins_another_is_ambiguous() -> None:
    machines = [machine("", addresses=(Address("eth1", "10.0.0.1/24"), Address("eth10", "10.1.0.1/24")))]
    assert nics.is_ambiguous("eth1", machines)
    assert not nics.is_ambiguous("eth10", machines)
