"""Topology: what recorded hosts become, how GPUs get their NICs, and which profiles are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from deepep_bootstrap import profiles
from deepep_bootstrap.errors import Trouble
from deepep_bootstrap.facts import Facts, Gid, Gpu, Port, Rdma, parse
from deepep_bootstrap.machine import Address, Machine, Reached, Route
from deepep_bootstrap.topology import Derived, derive

ROOT = Path(__file__).resolve().parent.parent
CASES = sorted((ROOT / "tests" / "cases" / "topology").glob("*.json"))
TEXTS = {str(path.relative_to(ROOT / "env")): path.read_text(encoding="utf-8") for path in (ROOT / "env").rglob("*.toml")}


def recorded(name: str) -> Facts:
    """Return the facts of a recorded host."""
    return parse((ROOT / "tests" / "cases" / "facts" / "parse" / f"{name}.txt").read_text(encoding="utf-8"), name)


def read_host(name: str, spec: list[str] | dict[str, Any]) -> Facts:
    """Return the facts of a host of a case: recorded ones after replacements `old -> new`, or what the case itself constructs."""
    if isinstance(spec, dict):
        return built(name, spec)
    text = (ROOT / "tests" / "cases" / "facts" / "parse" / f"{spec[0]}.txt").read_text(encoding="utf-8")
    for change in spec[1:]:
        old, _, new = change.partition(" -> ")
        assert old in text
        text = text.replace(old, new)
    return parse(text, spec[0])


def built(name: str, spec: dict[str, Any]) -> Facts:
    """Return constructed facts: GPUs as `path numa`, NICs as `name path numa link rate state`, each but the first few words optional."""
    gpus = [line.split() for line in spec["gpus"]]
    kind, capability = spec.get("gpu", "NVIDIA H100 80GB HBM3 9.0").rsplit(" ", 1)
    prepared = spec.get("prepared", {})
    return Facts(
        hostname=spec.get("hostname", name),
        gpus=tuple(Gpu(i, kind, 81559, capability, "580", "", path, int(numa), 0) for i, (path, numa) in enumerate(gpus)),
        rdma=tuple(device(line.split()) for line in spec["nics"]),
        prepared=Machine(
            address=prepared.get("address", ""),
            addresses=tuple(Address(*one) for one in prepared.get("addresses", [])),
            routes=tuple(Route(*one) for one in prepared.get("routes", [])),
            nvlinks=tuple(Reached(*one) for one in prepared.get("nvlinks", [])),
            gib=prepared.get("gib", ""),
        ),
    )


def device(words: list[str]) -> Rdma:
    name, path, numa, link, rate = words[:5]
    gids = tuple(Gid(int(index), gid, "RoCE v2", "eth0") for index, _, gid in (word.partition("=") for word in words[6:] if "=" in word))
    ports = tuple(Port(n + 1, words[5], link, float(rate), gids) for n in range(2 if "two-ports" in words else 1))
    return Rdma(name, "mlx5_core", path, int(numa), "28.43", ports, "virtual" in words)


def derived(path: Path) -> Derived:
    case = json.loads(path.read_text(encoding="utf-8"))
    return derive(case["profile"], {host: read_host(host, spec) for host, spec in case["hosts"].items()}, TEXTS)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_hosts_become_settings(path: Path) -> None:
    got = derived(path)
    wanted = json.loads(path.read_text(encoding="utf-8"))["expected"]
    assert {
        "profile": got.profile,
        "why": got.why,
        "environment": [list(item) for item in got.environment.items()],
        "archs": list(got.archs),
        "notes": list(got.notes),
        "by_host": got.by_host,
        "gib": got.gib,
    } == {"by_host": {}, "gib": "", **wanted}


def every_variable(found: Derived) -> set[str]:
    return {*found.environment, *(name for values in (*found.by_host.values(), *found.by_kind.values()) for name in values)}


def test_what_belongs_to_the_caller_is_never_set() -> None:
    for path in CASES:
        environment = every_variable(derived(path))
        assert (
            not {"NCCL_NVLS_ENABLE", "NVSHMEM_DISABLE_NVLS", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_REMOTE_TRANSPORT"} & environment
        )


def test_every_derived_variable_is_a_known_one() -> None:
    rules = tomlkit.parse(TEXTS[profiles.KNOWN]).unwrap()
    for path in CASES:
        environment = every_variable(derived(path))
        assert environment <= set(rules["known"])
    assert not set(rules["known"]) & set(rules["refused"])


# --- profiles --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["single-node", "roce", "infiniband", "gcp-b200", "gcp-roce-cpu-handler"])
def test_shipped_profiles_are_right(name: str) -> None:
    assert profiles.read_profile(name, TEXTS).name == name


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
        profiles.read_profile("site", site(text))
    assert said in str(caught.value)


def test_all_faults_of_a_profile_are_told_at_once() -> None:
    with pytest.raises(Trouble) as caught:
        profiles.read_profile("site", site('a = 1\n[environment]\nB = "1"\nC = "2"\n'))
    assert len(caught.value.problems) == 3


def test_an_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(Trouble, match="found rose, wanted auto or gcp-b200 or gcp-roce-cpu-handler or infiniband or roce or single-node"):
        derive("rose", {"h": recorded("roce-b200")}, TEXTS)


def test_what_a_profile_says_stands_over_what_was_found() -> None:
    texts = site('link_layer = "Ethernet"\n[environment]\nNVSHMEM_IB_GID_INDEX = "1"\nNVSHMEM_IB_TRAFFIC_CLASS = "105"\n')
    got = derive("site", {"h": recorded("roce-b200")}, texts)
    assert got.environment["NVSHMEM_IB_GID_INDEX"] == "1"
    assert list(got.environment)[:3] == ["NVSHMEM_IBGDA_NIC_HANDLER", "NVSHMEM_IB_GID_INDEX", "NVSHMEM_IB_TRAFFIC_CLASS"]
    assert "DEEP_EP_DEVICE_TO_HCA_MAPPING" in got.environment


def test_no_gpu_anywhere_is_trouble_with_the_reason() -> None:
    without = replace(recorded("h200-x8"), gpus=(), gpu_problem="nvidia-smi ends with code 9")
    with pytest.raises(Trouble, match=r"n\[1-2\]: there is no GPU to build for — found nvidia-smi ends with code 9"):
        derive("auto", {"n1": without, "n2": without}, TEXTS)
