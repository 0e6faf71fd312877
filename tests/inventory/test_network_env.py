"""Topology: what recorded hosts become, how GPUs get their NICs, and which profiles are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.inventory import network_env
from deepep_bootstrap.inventory.facts import Facts, Gid, Gpu, Port, Rdma, parse_facts
from deepep_bootstrap.inventory.forms import GIB
from deepep_bootstrap.inventory.machine import Address, Machine, ReachedPort, Route
from deepep_bootstrap.inventory.network_env import Derived, derive, missing_peers
from deepep_bootstrap.plan import decisions
from tests.support import plan as plan_support
from tests.support.paths import ROOT

CASES = sorted((ROOT / "tests" / "cases" / "inventory" / "topology").glob("*.json"))
TEXTS = {
    str(path.relative_to(ROOT / "env")): path.read_text(encoding="utf-8") for path in (ROOT / "env").rglob("*.toml")
}


def recorded(name: str) -> Facts:
    """Return the facts of a recorded host."""
    return parse_facts(
        (ROOT / "tests" / "cases" / "inventory" / "facts" / "parse" / f"{name}.txt").read_text(encoding="utf-8"), name
    )


def read_host(name: str, spec: list[str] | dict[str, Any]) -> Facts:
    """Return the facts of a host of a case: recorded ones after replacements `old -> new`, or what the case itself
    constructs."""
    if isinstance(spec, dict):
        return built(name, spec)
    text = (ROOT / "tests" / "cases" / "inventory" / "facts" / "parse" / f"{spec[0]}.txt").read_text(encoding="utf-8")
    for change in spec[1:]:
        old, _, new = change.partition(" -> ")
        assert old in text
        text = text.replace(old, new)
    return parse_facts(text, spec[0])


def built(name: str, spec: dict[str, Any]) -> Facts:
    """Return constructed facts: GPUs as `path numa`, NICs as `name path numa link rate state`, each but the first
    few words optional."""
    gpus = [line.split() for line in spec["gpus"]]
    kind, capability = spec.get("gpu", "NVIDIA H100 80GB HBM3 9.0").rsplit(" ", 1)
    prepared = spec.get("prepared", {})
    return Facts(
        hostname=spec.get("hostname", name),
        gpus=tuple(
            Gpu(i, kind, 81559, capability, "580", "", path, int(numa), 0) for i, (path, numa) in enumerate(gpus)
        ),
        rdma=tuple(device(line.split()) for line in spec["nics"]),
        prepared=Machine(
            address=prepared.get("address", ""),
            addresses=tuple(Address(*one) for one in prepared.get("addresses", [])),
            routes=tuple(Route(*one) for one in prepared.get("routes", [])),
            nvlinks=tuple(ReachedPort(*one) for one in prepared.get("nvlinks", [])),
            gib=prepared.get("gib", ""),
        ),
    )


def device(words: list[str]) -> Rdma:
    name, path, numa, link, rate = words[:5]
    gids = tuple(
        Gid(int(index), gid, "RoCE v2", "eth0")
        for index, _, gid in (word.partition("=") for word in words[6:] if "=" in word)
    )
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
    return {
        *found.environment,
        *(name for values in (*found.by_host.values(), *found.by_kind.values()) for name in values),
    }


def test_what_belongs_to_the_caller_is_never_set() -> None:
    for path in CASES:
        environment = every_variable(derived(path))
        assert (
            not {
                "NCCL_NVLS_ENABLE",
                "NVSHMEM_DISABLE_NVLS",
                "TORCH_SYMM_MEM_DISABLE_MULTICAST",
                "NVSHMEM_REMOTE_TRANSPORT",
            }
            & environment
        )


def test_every_derived_variable_is_a_known_one() -> None:
    rules = tomlkit.parse(TEXTS[network_env.KNOWN]).unwrap()
    for path in CASES:
        environment = every_variable(derived(path))
        assert environment <= set(rules["known"])
    assert not set(rules["known"]) & set(rules["refused"])


# --- profiles --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["single-node", "roce", "infiniband", "gb200", "gb300", "gcp-b200", "gcp-roce-cpu-handler"]
)
def test_shipped_profiles_are_right(name: str) -> None:
    assert network_env.read_profile(name, TEXTS).name == name


ETHERNET = 'link_layer = "Ethernet"\n'


def site(text: str) -> dict[str, str]:
    return {**TEXTS, "profiles/site.toml": text}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '[environment]\nNVSHMEM_QP_DETPH = "1024"\n',
            "env/profiles/site.toml: NVSHMEM_QP_DETPH: nobody is known to read this variable",
        ),
        ('[environment]\nNVSHMEM_REMOTE_TRANSPORT = "ibgda"\n', "NVSHMEM_REMOTE_TRANSPORT: a profile must not set it"),
        ('[environment]\nNCCL_NVLS_ENABLE = "0"\n', "it belongs to the caller"),
        (
            'link_layer = "InfiniBand"\n[environment]\nNVSHMEM_IB_TRAFFIC_CLASS = "105"\n',
            "it is for Ethernet only — found InfiniBand, wanted Ethernet",
        ),
        ('link_layer = "Token Ring"\n', "unknown link layer — found Token Ring, wanted Ethernet or InfiniBand"),
        ("[environment]\nNVSHMEM_QP_DEPTH = 1024\n", "the value must be a text of one line"),
        ('[environment]\nNVSHMEM_DEBUG = "a\\nb"\n', "the value must be a text of one line"),
        ('[environment]\nNVSHMEM_IBGDA_NUM_DCI = "2"\n', "NVSHMEM_IBGDA_NUM_DCI: it has no effect without a network"),
        (
            ETHERNET + '[environment]\nNVSHMEM_IBGDA_NIC_HANDLER = "cpu"\n',
            "it is written from a key of the profile — wanted handler = …",
        ),
        (
            ETHERNET + '[environment]\nNVSHMEM_IB_SL = "1"\n',
            "it is written from a key of the profile — wanted service_level = …",
        ),
        (ETHERNET + 'handler = "auto"\n', "handler: unknown NIC handler — found auto, wanted gpu or cpu"),
        (
            ETHERNET + "service_level = 8\n",
            "service_level: not a service level — found 8, wanted a whole number from 0 to 7",
        ),
        (
            'link_layer = "InfiniBand"\nservice_level_other = 16\n',
            "not a service level — found 16, wanted a whole number from 0 to 15",
        ),
        (ETHERNET + 'service_level_low_latency = "1"\n', "not a service level"),
        (ETHERNET + "service_level = true\n", "not a service level"),
        ("service_level = 1\n", "service_level: it has no effect without a network"),
        ('handler = "gpu"\n', "handler: it has no effect without a network"),
        (ETHERNET + 'gib = "yes"\n', "gib: neither true nor false"),
        (ETHERNET + 'notes = "one"\n', "notes: not a list of texts"),
        (ETHERNET + 'environment = "one"\n', "environment: not a table of variables"),
        ("colour = 1\n", "env/profiles/site.toml: colour: unknown key"),
        ("= broken", "env/profiles/site.toml:1: is not TOML"),
    ],
)
def test_a_wrong_profile_is_trouble_naming_file_and_key(text: str, said: str) -> None:
    with pytest.raises(Trouble) as caught:
        network_env.read_profile("site", site(text))
    assert said in str(caught.value)


def test_all_faults_of_a_profile_are_told_at_once() -> None:
    with pytest.raises(Trouble) as caught:
        network_env.read_profile("site", site('a = 1\n[environment]\nB = "1"\nC = "2"\n'))
    assert len(caught.value.problems) == 3


def test_an_unknown_profile_names_the_known_ones() -> None:
    with pytest.raises(
        Trouble,
        match="found rose, wanted auto or gb200 or gb300 or gcp-b200 or gcp-roce-cpu-handler or infiniband or roce or single-node",
    ):
        derive("rose", {"h": recorded("roce-b200")}, TEXTS)


def test_what_a_profile_says_stands_over_what_was_found() -> None:
    texts = site(
        'link_layer = "Ethernet"\n[environment]\nNVSHMEM_IB_GID_INDEX = "1"\nNVSHMEM_IB_TRAFFIC_CLASS = "105"\n'
    )
    got = derive("site", {"h": recorded("roce-b200")}, texts)
    assert got.environment["NVSHMEM_IB_GID_INDEX"] == "1"
    assert list(got.environment)[:3] == [
        "NVSHMEM_IBGDA_NIC_HANDLER",
        "NVSHMEM_IB_GID_INDEX",
        "NVSHMEM_IB_TRAFFIC_CLASS",
    ]
    assert "DEEP_EP_DEVICE_TO_HCA_MAPPING" in got.environment


def test_what_a_profile_says_stands_over_what_differs_between_hosts() -> None:
    hosts = json.loads(
        (ROOT / "tests/cases/inventory/topology/dgx-h100-one-nic-down.json").read_text(encoding="utf-8")
    )["hosts"]
    facts = {host: read_host(host, spec) for host, spec in hosts.items()}
    texts = site('link_layer = "InfiniBand"\n[environment]\nDEEP_EP_DEVICE_TO_HCA_MAPPING = "0:mlx5_0:1"\n')
    assert (
        derive("site", facts, TEXTS | {"profiles/site.toml": TEXTS["profiles/infiniband.toml"]}).by_host.keys()
        == facts.keys()
    )
    got = derive("site", facts, texts)
    assert got.by_host == {}
    assert got.environment["DEEP_EP_DEVICE_TO_HCA_MAPPING"] == "0:mlx5_0:1"


def test_three_kinds_of_traffic_have_service_levels_of_their_own() -> None:
    text = 'link_layer = "InfiniBand"\nservice_level = 1\nservice_level_low_latency = 2\nservice_level_other = 3\n'
    got = derive("site", {"h": recorded("infiniband-h100")}, site(text))
    assert (got.environment["NVSHMEM_IB_SL"], got.environment["NCCL_IB_SL"]) == ("1", "3")
    assert got.by_kind == {"low-latency": {"NVSHMEM_IB_SL": "2"}}
    assert "NVSHMEM_IB_SL" not in derive("infiniband", {"h": recorded("infiniband-h100")}, TEXTS).environment


def test_the_cpu_handler_comes_only_when_it_is_asked_for_and_with_its_warning() -> None:
    hosts = {"h": recorded("roce-b200")}
    asked = derive("gcp-roce-cpu-handler", hosts, TEXTS)
    assert asked.environment["NVSHMEM_IBGDA_NIC_HANDLER"] == "cpu"
    assert any("pull request 677" in note for note in asked.notes)
    found = derive("auto", hosts, TEXTS)
    assert found.environment["NVSHMEM_IBGDA_NIC_HANDLER"] == "gpu"
    assert not any("677" in note for note in found.notes)


def with_gib(facts: Facts) -> Facts:
    return replace(facts, prepared=replace(facts.prepared, gib="/usr/local/gib/scripts/set_nccl_env.sh"))


def test_gibs_script_is_googles_or_none() -> None:
    plain = recorded("roce-b200")
    evil = replace(plain, prepared=replace(plain.prepared, gib="/home/mallory/gib/scripts/x.sh"))
    with pytest.raises(Trouble) as caught:
        derive("roce", {"h1": with_gib(plain), "h2": evil}, TEXTS)
    (problem,) = caught.value.problems
    assert problem.where == "h2"
    assert (problem.found, problem.wanted) == ("/home/mallory/gib/scripts/x.sh", GIB)


def test_gib_is_used_where_all_hosts_have_it_unless_the_profile_says_otherwise() -> None:
    plain = recorded("roce-b200")
    have, lack = {"h1": with_gib(plain), "h2": with_gib(plain)}, {"h1": with_gib(plain), "h2": plain}
    used = derive("roce", have, TEXTS)
    assert used.gib.startswith("/usr/local/gib/")
    assert used.environment["TORCH_NCCL_USE_COMM_NONBLOCKING"] == ""
    for profile, facts, texts in (
        ("roce", lack, TEXTS),
        ("site", have, site(ETHERNET + "gib = false\n")),
        ("single-node", have, TEXTS),
    ):
        found = derive(profile, facts, texts)
        assert found.gib == ""
        assert "TORCH_NCCL_USE_COMM_NONBLOCKING" not in found.environment
    assert "h2: gIB is not installed, so NCCL uses its own transport on all hosts" in derive("roce", lack, TEXTS).notes


def test_other_gpus_with_gib_are_no_b200() -> None:
    other = with_gib(recorded("roce-b200"))
    other = replace(other, gpus=tuple(replace(gpu, name="NVIDIA H200") for gpu in other.gpus))
    assert derive("auto", {"h": other}, TEXTS).profile == "roce"
    assert derive("auto", {"h": with_gib(recorded("roce-b200"))}, TEXTS).profile == "gcp-b200"


def test_nvlink_is_judged_only_where_it_is_known() -> None:
    pairs = (
        ReachedPort(0, 1, "NV18"),
        ReachedPort(1, 0, "NV18"),
        ReachedPort(2, 0, "PIX"),
        ReachedPort(0, 2, "PIX"),
        ReachedPort(1, 2, "NODE"),
    )
    seen = Facts(prepared=Machine(nvlinks=pairs))
    assert missing_peers(seen) == ((0, 2), (1, 2))
    assert missing_peers(Facts()) == ()


def two_nodes() -> dict[str, Facts]:
    """A small cluster whose two nodes have NICs of different names."""
    facts = plan_support.cluster()
    roce = with_gib(recorded("roce-b200"))
    for number, node in enumerate(("n001", "n002")):
        nics = [replace(one, name=f"mlx5_{n + number}") for n, one in enumerate(roce.rdma)]
        facts[node] = replace(
            facts[node], rdma=tuple(nics), gpus=roce.gpus, prepared=roce.prepared, hostname=f"{node}.example.org"
        )
    return facts


@pytest.mark.parametrize("seen", [("n001", "n002", "login1"), ("n001", "login1")])
def test_a_host_that_calls_itself_another_one_sets_nothing_for_it(seen: tuple[str, ...]) -> None:
    facts = two_nodes()
    honest = decisions.make_decisions(plan_support.request(), facts).record.by_host
    assert set(honest) == {"n001", "n002"}
    facts["n001"] = replace(facts["n001"], hostname="N002.example.org")
    made = decisions.make_decisions(plan_support.request(), {host: facts[host] for host in seen})
    assert made.record.by_host == (honest if "n002" in seen else {})
    said = "n001: calls itself N002, which is another host: what differs between hosts is written for the name n001"
    assert said in made.notes


def test_an_offer_takes_what_was_derived() -> None:
    profile = 'link_layer = "Ethernet"\nservice_level_low_latency = 2\ngib = true\n'
    facts = two_nodes()
    request = plan_support.request()
    request = replace(
        request,
        templates={**request.templates, "profiles/site.toml": profile},
        inventory=replace(request.inventory, settings=replace(request.inventory.settings, profile="site")),
    )
    record = decisions.make_decisions(request, facts).record
    assert record.by_host["n002"]["DEEP_EP_DEVICE_TO_HCA_MAPPING"].startswith("0:mlx5_1:1,1:mlx5_2:1,")
    assert record.by_kind == {"low-latency": {"NVSHMEM_IB_SL": "2"}}
    assert record.gib == "/usr/local/gib/scripts/set_nccl_env.sh"


def test_no_gpu_anywhere_is_trouble_with_the_reason() -> None:
    without = replace(recorded("h200-x8"), gpus=(), gpu_problem="nvidia-smi ends with code 9")
    with pytest.raises(Trouble, match=r"n\[1-2\]: there is no GPU to build for — found nvidia-smi ends with code 9"):
        derive("auto", {"n1": without, "n2": without}, TEXTS)
