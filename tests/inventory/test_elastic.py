"""What DeepEP V2 and V2.5 are told of the hardware, in place of what V1 is told."""

from __future__ import annotations

import pytest

from deepep_bootstrap.inventory import network_env
from deepep_bootstrap.inventory.network_env import MAP, Derived


def test_a_network_gives_a_nic_to_ask_and_the_service_level() -> None:
    found = {MAP: "0:mlx5_3:1,1:mlx5_4:1", "NVSHMEM_IB_GID_INDEX": "3", "NVSHMEM_IB_SL": "2"}
    derived = network_env.adapt_to_v2(
        Derived("roce", "", found, ("9.0",), by_kind={"low-latency": {"NVSHMEM_IB_SL": "4"}})
    )
    assert derived.environment == {
        "NCCL_IB_SL": "2",
        "EP_OVERRIDE_RDMA_SL": "2",
        "NVSHMEM_IB_GID_INDEX": "3",
        "NVSHMEM_IB_SL": "2",
        "EP_NIC_NAME": "mlx5_3",
        "EP_SUPPRESS_NCCL_CHECK": "",
    }
    assert derived.by_kind == {"low-latency": {"NVSHMEM_IB_SL": "4"}, "intranode": {"EP_DISABLE_GIN": "1"}}


def test_without_a_service_level_test_and_production_share_level_0() -> None:
    environment = network_env.adapt_to_v2(Derived("infiniband", "", {}, ("9.0",))).environment
    assert (environment["NCCL_IB_SL"], environment["EP_OVERRIDE_RDMA_SL"]) == ("0", "0")


def test_what_a_profile_says_stands() -> None:
    said = {MAP: "0:mlx5_3:1", "EP_NIC_NAME": "mlx5_9", "EP_OVERRIDE_RDMA_SL": "5", "NCCL_IB_SL": "6"}
    environment = network_env.adapt_to_v2(Derived("roce", "", said, ("9.0",))).environment
    assert {name: environment[name] for name in ("EP_NIC_NAME", "EP_OVERRIDE_RDMA_SL", "NCCL_IB_SL")} == {
        "EP_NIC_NAME": "mlx5_9",
        "EP_OVERRIDE_RDMA_SL": "5",
        "NCCL_IB_SL": "6",
    }


def test_hosts_that_differ_keep_their_own_nic() -> None:
    by_host = {"n001": {MAP: "0:mlx5_0:1"}, "n002": {MAP: "0:mlx5_2:1", "NVSHMEM_HCA_PREFIX": "x"}}
    derived = network_env.adapt_to_v2(Derived("roce", "", {}, ("9.0",), by_host=by_host))
    assert derived.by_host == {
        "n001": {"EP_NIC_NAME": "mlx5_0"},
        "n002": {"NVSHMEM_HCA_PREFIX": "x", "EP_NIC_NAME": "mlx5_2"},
    }


def test_without_a_nic_the_device_side_of_nccl_is_off() -> None:
    environment = network_env.adapt_to_v2(Derived("single-node", "", {}, ("9.0",))).environment
    assert environment == {"EP_DISABLE_GIN": "1", "EP_SUPPRESS_NCCL_CHECK": ""}


def test_what_v1_wants_of_nodes_is_no_remark() -> None:
    notes = ("n1: 4 GPUs; DeepEP V1 between nodes wants 8 in each", "n1: no NVLink between GPUs 0-1: DeepEP needs it")
    assert network_env.adapt_to_v2(Derived("roce", "", {}, ("9.0",), notes=notes)).notes == notes[1:]


def test_v25_has_no_nvshmem_and_cannot_choose_the_nic_that_it_asks() -> None:
    found = {MAP: "0:mlx5_0:1,1:mlx5_4:1", "NVSHMEM_IB_SL": "2", "NCCL_IB_GID_INDEX": "3", "EP_NIC_NAME": "mlx5_9"}
    derived = network_env.adapt_to_v25(
        Derived("roce", "", found, ("9.0",), by_kind={"low-latency": {"NVSHMEM_IB_SL": "4"}})
    )
    assert derived.environment == {
        "NCCL_IB_SL": "2",
        "EP_DEFAULT_RDMA_SL": "2",
        "NCCL_IB_GID_INDEX": "3",
        "EP_SUPPRESS_NCCL_CHECK": "",
    }
    assert derived.by_kind == {
        "internode": {"EP_OVERRIDE_RDMA_SL": "2"},
        "intranode": {"EP_OVERRIDE_RDMA_SL": "2", "EP_DISABLE_GIN": "1"},
        "pressure": {"EP_OVERRIDE_RDMA_SL": "2"},
        "ep": {"EP_OVERRIDE_RDMA_SL": "2"},
    }
    assert not derived.notes


def test_a_service_level_that_stands_over_all_of_v25_is_the_tests_own_too() -> None:
    said = {"EP_OVERRIDE_RDMA_SL": "5", "EP_DEFAULT_RDMA_SL": "4"}
    derived = network_env.adapt_to_v25(Derived("roce", "", said, ("9.0",)))
    assert derived.environment == {"NCCL_IB_SL": "0", **said, "EP_SUPPRESS_NCCL_CHECK": ""}
    assert derived.by_kind == {"intranode": {"EP_DISABLE_GIN": "1"}}


def test_without_a_nic_v25_asks_for_no_service_level() -> None:
    derived = network_env.adapt_to_v25(Derived("single-node", "", {"NVSHMEM_REMOTE_TRANSPORT": "none"}, ("9.0",)))
    assert derived.environment == {"EP_DISABLE_GIN": "1", "EP_SUPPRESS_NCCL_CHECK": ""}
    assert derived.by_kind == {"intranode": {"EP_DISABLE_GIN": "1"}}


@pytest.mark.parametrize(
    ("everywhere", "by_host", "where"),
    [
        ({MAP: "0:mlx5_3:1,1:mlx5_4:1"}, {}, ""),
        ({}, {"n001": {MAP: "0:mlx5_0:1"}, "n002": {MAP: "0:mlx5_2:1"}, "n003": {MAP: "0:mlx5_3:1"}}, "n[002-003]: "),
    ],
)
def test_the_nic_whose_speed_v25_asks_for_may_be_no_gpus(
    everywhere: dict[str, str], by_host: dict[str, dict[str, str]], where: str
) -> None:
    derived = network_env.adapt_to_v25(Derived("roce", "", everywhere, ("9.0",), by_host=by_host))
    (note,) = derived.notes
    assert note.startswith(f"{where}DeepEP V2.5 counts SMs and queue pairs by the speed of mlx5_0, and no GPU uses")
    assert not derived.by_host


@pytest.mark.parametrize(
    ("release", "name"),
    [((1, 2, 1), MAP), ((2, 1, 0), "EP_NIC_NAME"), ((2, 5, 0), "EP_DEFAULT_RDMA_SL"), ((), MAP)],
    ids=["v1", "v2", "v25", "unknown"],
)
def test_a_release_gets_its_own_variables(release: tuple[int, ...], name: str) -> None:
    derived = network_env.for_release(Derived("roce", "", {MAP: "0:mlx5_3:1"}, ("9.0",)), release)
    assert [each for each in (MAP, "EP_NIC_NAME", "EP_DEFAULT_RDMA_SL") if each in derived.environment] == [name]
