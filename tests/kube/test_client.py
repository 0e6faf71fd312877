"""The API as kubectl reaches it: real HTTP, the official client's kubeconfig."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.kube import client
from deepep_bootstrap.kube.client import Cluster, Refused
from tests.support.kube_api import LiveApi, live_api, refusal, write_kubeconfig

pytestmark = pytest.mark.usefixtures("programs")
PODS = "/api/v1/namespaces/gpu/pods"


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[LiveApi, Cluster]]:
    with live_api(tmp_path, "gpu") as (api, file):
        cluster = client.connect(kubeconfig=str(file))
        yield api, cluster
        cluster.close()


def pod(name: str, **labels: str) -> client.Object:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}}


def test_objects_come_and_go(live: tuple[LiveApi, Cluster], monkeypatch: pytest.MonkeyPatch) -> None:
    api, cluster = live
    assert (cluster.context, cluster.namespace) == ("lab", "gpu")
    made = cluster.create(PODS, pod("a", run="1"))
    cluster.create(PODS, pod("b", run="1"))
    cluster.create(PODS, pod("c", run="2"))
    monkeypatch.setattr(client, "PAGE", 1)
    assert [each["metadata"]["name"] for each in cluster.all(PODS, labelSelector="run=1")] == ["a", "b"]
    assert cluster.patch(f"{PODS}/a", {"metadata": {"labels": {"new": "x"}}})["metadata"]["labels"] == {
        "run": "1",
        "new": "x",
    }
    with pytest.raises(Refused, match="UID in precondition") as refused:
        cluster.delete(f"{PODS}/a", uid="another")
    assert refused.value.status == 409
    cluster.delete(f"{PODS}/a", uid=made["metadata"]["uid"])
    cluster.delete(f"{PODS}/a")  # what is gone already is no fault
    with pytest.raises(Refused) as absent:
        cluster.get(f"{PODS}/a")
    assert absent.value.is_absent
    header = api.inside(
        lambda each: {
            request.headers.get("authorization") or request.headers.get("Authorization") for request in each._requests
        }
    )
    assert header == {"Bearer secret-token"}


def test_lines_of_a_log_come_as_they_are_written(live: tuple[LiveApi, Cluster]) -> None:
    api, cluster = live
    api.inside(lambda each: (each.running.add(("gpu", "a")), each.say("gpu", "a", "one", "two")))
    lines = cluster.lines(f"{PODS}/a/log", follow="true")
    assert [next(lines), next(lines)] == ["one", "two"]
    api.inside(lambda each: (each.say("gpu", "a", "three"), each.running.clear()))
    assert list(lines) == ["three"]


def test_what_the_server_says_is_told(live: tuple[LiveApi, Cluster]) -> None:
    api, cluster = live
    words = 'pods is forbidden: User "me" cannot create resource "pods" in the namespace "gpu"'
    api.inside(lambda each: each.refusals.update({f"POST {PODS}": refusal(403, words)}))
    with pytest.raises(Refused, match="cannot create resource") as refused:
        cluster.create(PODS, pod("a"))
    (problem,) = refused.value.problems
    assert (problem.where, refused.value.may_pass) == ("lab", False)
    assert "kubectl --context=lab auth can-i" in problem.try_
    api.inside(lambda each: each.refusals.update({f"GET {PODS}": refusal(503, "etcd is away")}))
    with pytest.raises(Refused) as busy:
        cluster.all(PODS)
    assert busy.value.may_pass


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    cluster = client.connect(kubeconfig=str(write_kubeconfig(tmp_path / "config", "http://127.0.0.1:1")))
    with pytest.raises(Trouble, match="the API server does not answer") as trouble:
        cluster.get("/api/v1/nodes")
    assert trouble.value.may_pass
    assert cluster.namespace == "default"


def test_faults_of_a_kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_kubeconfig(tmp_path / "config", "http://127.0.0.1:1", "prod")
    with pytest.raises(Trouble, match=r"no such context — found test, wanted prod. Try: --context"):
        client.connect("test", kubeconfig=str(file))
    (tmp_path / "bad").write_text("{")
    with pytest.raises(Trouble, match="this kubeconfig cannot be used"):
        client.connect(kubeconfig=str(tmp_path / "bad"))
    (tmp_path / "other").write_text("a: 1\n")
    with pytest.raises(Trouble, match="this kubeconfig cannot be used"):
        client.connect(kubeconfig=str(tmp_path / "other"))
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/absent:{file}")
    assert client.connect(namespace="mine").namespace == "mine"
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/absent")
    with pytest.raises(Trouble, match="there is no kubeconfig"):
        client.connect()


def test_without_the_extra_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_kubeconfig(tmp_path / "config", "http://127.0.0.1:1")
    for name in [each for each in sys.modules if each.partition(".")[0] == "kubernetes"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(Trouble, match=r"is not installed. Try: pip install 'deepep-bootstrap\[kubernetes\]'"):
        client.connect(kubeconfig=str(file))
