"""Nodes of Kubernetes around a reboot: decisions on pods as a function, cordon and eviction over real HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.core.toml import load_toml
from deepep_bootstrap.kube import client, nodes
from deepep_bootstrap.kube.client import Cluster, Refused
from deepep_bootstrap.kube.nodes import CORDONED, Node, NodeLook, Pod
from tests.support.kube_api import LiveApi, live_api, make_node, make_pod, refusal
from tests.support.paths import ROOT

PODS = load_toml((ROOT / "tests/cases/kube/pods.toml").read_text(encoding="utf-8"), "pods.toml")


@pytest.mark.parametrize("name", PODS)
def test_what_becomes_of_a_pod_when_its_node_is_drained(name: str) -> None:
    case = PODS[name]
    pod: dict[str, Any] = case["pod"]
    pod["metadata"] = {"namespace": "moe", "name": name, "uid": "u1"} | pod.get("metadata", {})
    found = nodes.sort_pods([pod])
    counted = {"evict": len(found.evict), "wait": len(found.running), "keep": len(found.keeping)}
    assert counted == {key: int(key == case["becomes"]) for key in counted}
    assert all(f"moe/{name}" in words for words in found.keeping)


def test_pods_are_named_and_many_are_counted() -> None:
    many = [Pod("moe", f"p{number}", "") for number in range(9)]
    assert nodes.some(many[:2]) == "moe/p0, moe/p1"
    assert nodes.some(many) == "moe/p0, moe/p1, moe/p2, moe/p3, moe/p4 and 4 more"


@pytest.fixture
def live(tmp_path: Path, programs: None) -> Iterator[tuple[LiveApi, Cluster]]:
    with live_api(tmp_path, "moe") as (api, file):
        cluster = client.connect(kubeconfig=str(file))
        yield api, cluster
        cluster.close()


def test_a_host_is_the_node_that_is_in_its_boot(live: tuple[LiveApi, Cluster]) -> None:
    _, cluster = live
    assert nodes.look(cluster, {"n001": "b1"}) == NodeLook("lab")
    cluster.create(nodes.NODES, make_node("gpu-a", "b1"))
    cluster.create(nodes.NODES, make_node("gpu-b", "b2", cordoned="deepep-bootstrap: x (run r)"))
    cluster.create(nodes.NODES, make_node("n001", "b3"))
    found = nodes.look(cluster, {"n001": "b1", "n002": "b2", "n003": "elsewhere"})
    assert {host: node.name for host, node in found.by_host.items()} == {"n001": "gpu-a", "n002": "gpu-b"}
    assert found.cordoned == {"gpu-b": "deepep-bootstrap: x (run r)"}
    assert found.by_host["n001"].ready


def test_a_cordon_says_why_and_goes_without_a_trace(live: tuple[LiveApi, Cluster]) -> None:
    api, cluster = live
    cluster.create(nodes.NODES, make_node("gpu-a", "b1"))
    before = nodes.read(cluster, "gpu-a")
    nodes.cordon(cluster, before, "deepep-bootstrap: options (run r)")
    node = nodes.read(cluster, "gpu-a")
    assert (node.cordoned, node.reason) == (True, "deepep-bootstrap: options (run r)")
    # Somebody changed it since it was read: it may be theirs.
    with pytest.raises(Refused) as refused:
        nodes.uncordon(cluster, before)
    assert refused.value.status == 409
    nodes.uncordon(cluster, node)
    node = nodes.read(cluster, "gpu-a")
    assert (node.cordoned, node.reason) == (False, "")
    (raw,) = api.objects("nodes")
    assert CORDONED not in raw["metadata"]["annotations"]


def test_pods_leave_through_the_eviction_api_as_budgets_allow(live: tuple[LiveApi, Cluster]) -> None:
    api, cluster = live
    for name in ("web", "other"):
        cluster.create("/api/v1/namespaces/moe/pods", make_pod(name, "gpu-a", "ReplicaSet"))
    cluster.create("/api/v1/namespaces/moe/pods", make_pod("far", "gpu-b", "ReplicaSet"))
    web, other = nodes.sort_pods(nodes.pods_of(cluster, "gpu-a")).evict
    path = r"POST /api/v1/namespaces/moe/pods/web/eviction"
    api.inside(lambda each: each.refusals.update({path: refusal(429, "Cannot evict pod", "TooManyRequests")}))
    assert nodes.evict(cluster, web) == "the budget of moe/web does not allow it now"
    assert [nodes.evict(cluster, pod) for pod in (other, other)] == ["", ""]  # the second time it is gone
    assert nodes.evict(cluster, Pod("moe", "far", "another")) == ""
    assert {pod["metadata"]["name"] for pod in api.objects("pods")} == {"web", "far"}
    api.inside(lambda each: each.refusals.update({path: refusal(403, "may not create evictions")}))
    with pytest.raises(Trouble, match="may not create evictions"):
        nodes.evict(cluster, web)
    assert not [asked for asked in api.asked() if asked.startswith("DELETE")]


def test_odd_objects_are_read() -> None:
    assert nodes.read_node({}) == Node("")
    assert nodes.read_node(
        {"metadata": {"name": "a", "annotations": None}, "spec": None, "status": {"conditions": None}}
    )
    assert nodes.sort_pods([{}]).keeping == ("pod / is controlled by nothing: nobody would start it again",)
