"""Topology: what recorded hosts become, how GPUs get their NICs, and which profiles are refused."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import tomlkit
from hypothesis import given
from hypothesis import strategies as st

from deepep_bootstrap import topology
from deepep_bootstrap.errors import Trouble
from deepep_bootstrap.facts import Facts, Gid, Gpu, parse
from deepep_bootstrap.topology import Nic, derive

ROOT = Path(__file__).resolve().parent.parent
CASES = sorted((ROOT / "tests" / "cases" / "topology").glob("*.json"))
TEXTS = {str(path.relative_to(ROOT / "env")): path.read_text(encoding="utf-8") for path in (ROOT / "env").rglob("*.toml")}


def recorded(name: str) -> Facts:
    """Return the facts of a recorded host."""
    return parse((ROOT / "tests" / "cases" / "facts" / "parse" / f"{name}.txt").read_text(encoding="utf-8"), name)


def read_host(spec: list[str]) -> Facts:
    """Return recorded facts after the replacements `old -> new` of a case."""
    text = (ROOT / "tests" / "cases" / "facts" / "parse" / f"{spec[0]}.txt").read_text(encoding="utf-8")
    for change in spec[1:]:
        old, _, new = change.partition(" -> ")
        assert old in text
        text = text.replace(old, new)
    return parse(text, spec[0])


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_recorded_hosts(path: Path) -> None:
    case = json.loads(path.read_text(encoding="utf-8"))
    got = derive(case["profile"], {host: read_host(spec) for host, spec in case["hosts"].items()}, TEXTS)
    assert {
        "profile": got.profile,
        "why": got.why,
        "environment": list(got.environment.items()),
        "archs": list(got.archs),
        "notes": list(got.notes),
    } == {**case["expected"], "environment": [tuple(item) for item in case["expected"]["environment"]]}


def test_what_belongs_to_the_caller_is_never_set() -> None:
    for path in CASES:
        case = json.loads(path.read_text(encoding="utf-8"))
        environment = derive(case["profile"], {host: read_host(spec) for host, spec in case["hosts"].items()}, TEXTS).environment
        assert not {"NCCL_NVLS_ENABLE", "NVSHMEM_DISABLE_NVLS", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_REMOTE_TRANSPORT"} & set(
            environment
        )


def test_every_derived_variable_is_a_known_one() -> None:
    rules = tomlkit.parse(TEXTS[topology.KNOWN]).unwrap()
    for path in CASES:
        case = json.loads(path.read_text(encoding="utf-8"))
        environment = derive(case["profile"], {host: read_host(spec) for host, spec in case["hosts"].items()}, TEXTS).environment
        assert set(environment) <= set(rules["known"])
    assert not set(rules["known"]) & set(rules["refused"])


# --- NICs ------------------------------------------------------------------------------------------------------------------------------


def gpu(index: int, path: str, numa: int = -1) -> Gpu:
    return Gpu(index, "NVIDIA H100", 81559, "9.0", "580", "", path, numa, 0)


def nic(name: str, path: str = "", numa: int = -1, gids: tuple[Gid, ...] = ()) -> Nic:
    return Nic(name, 1, "Ethernet", 400.0, path, numa, gids)


def test_two_gpus_and_two_nics_under_one_switch_get_one_each() -> None:
    gpus = [gpu(0, "root/a/g0"), gpu(1, "root/a/g1")]
    assigned = topology.assign_nics(gpus, [nic("mlx5_0", "root/a/n0"), nic("mlx5_1", "root/a/n1")])
    assert [found.name for found in assigned.values()] == ["mlx5_0", "mlx5_1"]


def test_the_nearer_nic_wins_over_the_order_of_names_and_numa_decides_without_a_path() -> None:
    crossed = topology.assign_nics([gpu(0, "b/s/g"), gpu(1, "a/s/g")], [nic("mlx5_0", "a/s/n"), nic("mlx5_1", "b/s/n")])
    assert [found.name for found in crossed.values()] == ["mlx5_1", "mlx5_0"]
    by_numa = topology.assign_nics([gpu(0, "", 1), gpu(1, "", 0)], [nic("mlx5_0", "", 0), nic("mlx5_1", "", 1)])
    assert [found.name for found in by_numa.values()] == ["mlx5_1", "mlx5_0"]


def test_a_name_that_begins_like_another_is_not_nearer() -> None:
    assigned = topology.assign_nics([gpu(0, "pci0000:1/x")], [nic("a", "pci0000:10/y"), nic("b", "pci0000:1/z")])
    assert assigned[0].name == "b"


paths = st.lists(st.sampled_from("abcd"), min_size=1, max_size=4).map("/".join)


@given(st.lists(st.tuples(paths, st.integers(-1, 1)), max_size=16), st.lists(st.tuples(paths, st.integers(-1, 1)), min_size=1, max_size=16))
def test_every_gpu_has_a_nic_and_no_nic_more_than_its_share(gpus: list[tuple[str, int]], nics: list[tuple[str, int]]) -> None:
    assigned = topology.assign_nics(
        [gpu(index, path, numa) for index, (path, numa) in enumerate(gpus)],
        [nic(f"mlx5_{n}", path, numa) for n, (path, numa) in enumerate(nics)],
    )
    assert list(assigned) == list(range(len(gpus)))
    share = -(-len(gpus) // len(nics))
    assert all(count <= share for count in Counter(found.name for found in assigned.values()).values())


def test_a_slow_nic_carries_no_gpu_traffic_however_near_it_is() -> None:
    slow, fast, far = replace(nic("mlx5_0", "a"), rate=25.0), nic("mlx5_1", "b"), replace(nic("mlx5_2", "c"), rate=200.0)
    other = replace(nic("mlx5_3"), link="InfiniBand", rate=800.0)
    assert topology.fabric_nics([slow, fast, far, other], "Ethernet") == (fast, far)


def test_eight_gpus_on_four_nics_use_each_twice() -> None:
    assigned = topology.assign_nics([gpu(i, f"r{i // 4}/g{i}") for i in range(8)], [nic(f"mlx5_{i}", f"r{i // 2}/n{i}") for i in range(4)])
    assert [found.name[-1] for found in assigned.values()] == ["0", "0", "1", "1", "2", "2", "3", "3"]


# --- GIDs and names --------------------------------------------------------------------------------------------------------------------


def v2(index: int, gid: str) -> Gid:
    return Gid(index, gid, "RoCE v2", "eth0")


FOUR, SIX, LOCAL = topology.IPV4 + "0a00:0001", "2001:0db8:0000:0000:0000:0000:0000:0001", "fe80:0000:0000:0000:0000:0000:0000:0001"


@pytest.mark.parametrize(
    ("tables", "index"),
    [
        ([[v2(1, LOCAL), v2(3, FOUR)], [v2(1, LOCAL), v2(3, FOUR)]], 3),
        ([[v2(3, FOUR)], [v2(5, FOUR)]], None),
        ([[v2(3, FOUR), v2(5, FOUR)], [v2(3, FOUR), v2(5, FOUR)]], None),
        ([[v2(3, FOUR), v2(5, FOUR)], [v2(5, FOUR)]], 5),
        ([[v2(3, FOUR), v2(5, SIX)], [v2(3, FOUR), v2(5, SIX)]], 3),
        ([[v2(5, SIX)], [v2(3, FOUR), v2(5, SIX)]], 5),
        ([[v2(1, LOCAL)]], None),
        ([[Gid(3, FOUR, "IB/RoCE v1", "eth0")]], None),
        ([[v2(3, FOUR)], []], None),
        ([], None),
    ],
)
def test_a_gid_index_is_one_that_all_nics_agree_on(tables: list[list[Gid]], index: int | None) -> None:
    assert topology.gid_index([nic("mlx5_0", gids=tuple(table)) for table in tables]) == index


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
    assert topology.name_prefix(names) == prefix


# --- profiles --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["single-node", "roce", "infiniband"])
def test_shipped_profiles_are_right(name: str) -> None:
    assert topology.read_profile(name, TEXTS).name == name


def site(text: str) -> dict[str, str]:
    return {**TEXTS, "profiles/site.toml": text}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[environment]\nNVSHMEM_QP_DETPH = "1024"\n', "env/profiles/site.toml: NVSHMEM_QP_DETPH: nobody is known to read this variable"),
        ('[environment]\nNVSHMEM_REMOTE_TRANSPORT = "ibgda"\n', "NVSHMEM_REMOTE_TRANSPORT: a profile must not set it"),
        ('[environment]\nNCCL_NVLS_ENABLE = "0"\n', "it belongs to the caller"),
        (
            'link_layer = "InfiniBand"\n[environment]\nNVSHMEM_IB_TRAFFIC_CLASS = "105"\n',
            "it is for Ethernet only — found InfiniBand, wanted Ethernet",
        ),
        ('link_layer = "Token Ring"\n', "unknown link layer — found Token Ring, wanted Ethernet or InfiniBand"),
        ("[environment]\nNVSHMEM_QP_DEPTH = 1024\n", "the value must be a text of one line"),
        ('[environment]\nNVSHMEM_DEBUG = "a\\nb"\n', "the value must be a text of one line"),
        ("colour = 1\n", "env/profiles/site.toml: colour: unknown key"),
        ("= broken", "env/profiles/site.toml: is not TOML"),
    ],
)
def test_a_wrong_profile_is_trouble_naming_file_and_key(text: str, said: str) -> None:
    with pytest.raises(Trouble) as caught:
        topology.read_profile("site", site(text))
    assert said in str(caught.value)


def test_all_faults_of_a_profile_are_told_at_once() -> None:
    with pytest.raises(Trouble) as caught:
        topology.read_profile("site", site('a = 1\n[environment]\nB = "1"\nC = "2"\n'))
    assert len(caught.value.problems) == 3


def test_an_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(Trouble, match="found rose, wanted auto or infiniband or roce or single-node"):
        derive("rose", {"h": recorded("roce-b200")}, TEXTS)


def test_what_a_profile_says_stands_over_what_was_found() -> None:
    texts = site('link_layer = "Ethernet"\n[environment]\nNVSHMEM_IB_GID_INDEX = "1"\nNVSHMEM_IB_TRAFFIC_CLASS = "105"\n')
    got = derive("site", {"h": recorded("roce-b200")}, texts)
    assert got.environment["NVSHMEM_IB_GID_INDEX"] == "1"
    assert list(got.environment)[:2] == ["NVSHMEM_IB_GID_INDEX", "NVSHMEM_IB_TRAFFIC_CLASS"]
    assert "DEEP_EP_DEVICE_TO_HCA_MAPPING" in got.environment


def test_no_gpu_anywhere_is_trouble_with_the_reason() -> None:
    without = replace(recorded("h200-x8"), gpus=(), gpu_problem="nvidia-smi ends with code 9")
    with pytest.raises(Trouble, match=r"n\[1-2\]: there is no GPU to build for — found nvidia-smi ends with code 9"):
        derive("auto", {"n1": without, "n2": without}, TEXTS)
