"""A node of Kubernetes that is taken out of use and given back, and what a plan says of it: over real HTTP."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from deepep_bootstrap.bootstrap.planning import cluster_of
from deepep_bootstrap.bootstrap.reboot import rollout
from deepep_bootstrap.bootstrap.reboot.pod_drain import KEEPS_IT, PodDrain
from deepep_bootstrap.core.errors import TROUBLE, Trouble
from deepep_bootstrap.inventory.hostsfile import parse_hosts_file
from deepep_bootstrap.kube import client, nodes
from deepep_bootstrap.kube.client import Cluster
from deepep_bootstrap.kube.nodes import Node, NodeLook
from deepep_bootstrap.plan import host_recipes
from deepep_bootstrap.plan.host_recipes import OK, REBOOT, Check, Preparation
from deepep_bootstrap.plan.steps import UNCORDON, make_plan
from tests.support.kube_api import LiveApi, live_api, make_node, make_pod, refusal, write_kubeconfig
from tests.support.plan import cluster as facts_of
from tests.support.plan import request

PODS = "/api/v1/namespaces/moe/pods"
OLD = "deepep-bootstrap: did not come back (run earlier)"


@pytest.fixture
def live(tmp_path: Path, programs: None) -> Iterator[tuple[LiveApi, Cluster]]:
    with live_api(tmp_path, "moe") as (api, file):
        cluster = client.connect(kubeconfig=str(file))
        cluster.create(nodes.NODES, make_node("gpu-a", "b1"))
        yield api, cluster
        cluster.close()


def test_a_node_is_cordoned_emptied_and_given_back(live: tuple[LiveApi, Cluster]) -> None:
    api, cluster = live
    cluster.create(PODS, make_pod("web", "gpu-a", "ReplicaSet"))
    cluster.create(PODS, make_pod("test", "gpu-a", "Job"))
    cluster.create(PODS, make_pod("plugin", "gpu-a", "DaemonSet"))
    path = f"POST {PODS}/web/eviction"
    api.inside(lambda each: each.refusals.update({path: refusal(429, "Cannot evict", "TooManyRequests")}))
    drain = PodDrain(cluster, "gpu-a", "run-7")
    drain.take_out("driver options")
    assert nodes.read(cluster, "gpu-a").reason == drain.ours == "deepep-bootstrap: driver options (run run-7)"
    held = "pod moe/test, moe/web (the budget of moe/web does not allow it now)"
    assert drain.evict(drain.departure()) == held
    api.inside(lambda each: each.refusals.clear())
    assert drain.evict(drain.departure()) == "pod moe/test, moe/web"
    assert drain.evict(drain.departure()) == "pod moe/test"  # a Job's pod is never ended
    cluster.delete(f"{PODS}/test")
    assert (drain.evict(drain.departure()), drain.lost()) == ("", "")
    assert drain.missing("b2") == "kubelet has not reported since (node gpu-a)"
    cluster.patch(f"{nodes.NODES}/gpu-a", make_node("gpu-a", "b2", ready=False))
    assert drain.missing("b2") == "node gpu-a of Kubernetes is not ready"
    cluster.patch(f"{nodes.NODES}/gpu-a", make_node("gpu-a", "b2"))
    assert (drain.missing("b2"), drain.bring_back()) == ("", "")
    node = nodes.read(cluster, "gpu-a")
    assert (node.cordoned, node.reason) == (False, "")
    assert [pod["metadata"]["name"] for pod in api.objects("pods")] == ["plugin"]


def test_a_node_that_somebody_else_cordoned_stays_theirs(live: tuple[LiveApi, Cluster]) -> None:
    _, cluster = live
    cluster.patch(f"{nodes.NODES}/gpu-a", {"spec": {"unschedulable": True}})
    drain = PodDrain(cluster, "gpu-a", "run-7")
    drain.take_out("driver options")
    assert (drain.kept, drain.ours, drain.lost()) == (True, "", "")
    drain.leave("came back without what was wanted")
    assert drain.bring_back() == KEEPS_IT
    node = nodes.read(cluster, "gpu-a")
    assert (node.cordoned, node.reason) == (True, "")
    cluster.patch(f"{nodes.NODES}/gpu-a", {"spec": {"unschedulable": None}})
    assert drain.lost() == "somebody brought it back into use"


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ({"spec": {"unschedulable": None}}, "somebody brought it back into use"),
        ({"metadata": {"annotations": {nodes.CORDONED: None}}}, KEEPS_IT),
        (
            {"metadata": {"annotations": {nodes.CORDONED: "deepep-bootstrap: x (run other)"}}},
            "another run keeps it out of use now: deepep-bootstrap: x (run other)",
        ),
    ],
)
def test_a_node_that_somebody_takes_over_is_theirs(
    live: tuple[LiveApi, Cluster], change: client.Object, lost: str
) -> None:
    _, cluster = live
    drain = PodDrain(cluster, "gpu-a", "run-7")
    drain.take_out("driver options")
    cluster.patch(f"{nodes.NODES}/gpu-a", change)
    before = nodes.read(cluster, "gpu-a")
    assert drain.lost() == lost
    drain.leave("whatever")
    drain.put_back()
    assert (drain.bring_back(), nodes.read(cluster, "gpu-a")) == ("", before)


def test_what_an_earlier_run_left_goes_back_to_its_reason_or_into_use(live: tuple[LiveApi, Cluster]) -> None:
    _, cluster = live
    nodes.cordon(cluster, nodes.read(cluster, "gpu-a"), OLD)
    drain = PodDrain(cluster, "gpu-a", "run-8")
    drain.take_out("driver options")
    assert drain.ours.endswith("(run run-8)")
    drain.put_back()
    assert nodes.read(cluster, "gpu-a").reason == OLD
    lines: list[str] = []
    back = rollout.uncordon(cluster, {"gpu-a": OLD, "gone": OLD}, lambda node, title, line: lines.append(line))
    assert [(each.host, each.state, each.code) for each in back] == [("gpu-a", "done", 0), ("gone", "failed", TROUBLE)]
    assert not nodes.read(cluster, "gpu-a").cordoned
    (again,) = rollout.uncordon(cluster, {"gpu-a": OLD}, lambda node, title, line: None)
    assert (again.state, again.detail) == ("skipped", "left alone: it is not as this program left it")
    assert lines == ["back in use: nothing is left to do"]


@pytest.mark.usefixtures("programs")
def test_a_cluster_is_asked_where_it_is_named_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_kubeconfig(tmp_path / "config", "http://127.0.0.1:1", "prod")
    monkeypatch.setenv("KUBECONFIG", str(file))
    plain = parse_hosts_file("n001\n", "hosts.txt")
    assert cluster_of(plain, "", "") is None  # a configuration that lies there says nothing of these hosts
    named = parse_hosts_file(f"defaults context=prod kubeconfig={file}\nn001\n", "hosts.txt")
    monkeypatch.delenv("KUBECONFIG")
    for inventory, kubeconfig, context in ((named, "", ""), (plain, str(file), ""), (plain, str(file), "prod")):
        cluster = cluster_of(inventory, kubeconfig, context)
        assert cluster
        assert cluster.context == "prod"
    with pytest.raises(Trouble, match="no such context — found dev"):
        cluster_of(named, "", "dev")
    commands = ", ".join(f"deepep_bootstrap.cli.commands.{name}" for name in ("plan", "bootstrap", "doctor", "facts"))
    code = f"import sys, {commands}; sys.exit('kubernetes' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- what a plan says ------------------------------------------------------------------------------------------------------------------

OPTIONS = {"driver-options": Check("driver-options", REBOOT, "not set", "set")}
DONE = {"driver-options": Check("driver-options", OK, "set", "set")}


def prepared(**states: dict[str, Check]) -> Preparation:
    return Preparation({host: {recipe: {} for recipe in checks} for host, checks in states.items()}, states)


@pytest.mark.parametrize(
    ("look", "kubelet", "refused"),
    [
        (NodeLook(), False, ""),
        (NodeLook(), True, "no cluster is named in which its node could be drained (--context=NAME, or context= in"),
        (NodeLook("prod"), True, "no node of prod is in this host's boot: another cluster's?"),
        (NodeLook("prod", {"n001": Node("gpu-a", "b1")}), True, ""),
        (NodeLook("prod", {"n001": Node("gpu-a", "b1")}), False, ""),  # kubelet is hidden from this account
    ],
)
def test_a_host_with_a_kubelet_is_drained_or_left_alone(look: NodeLook, kubelet: bool, refused: str) -> None:
    facts = facts_of(n001={"kubelet": kubelet})
    found = host_recipes.node_refusal(look, "n001", facts["n001"])
    assert (refused in found, bool(found)) == (True, bool(refused))
    notes = make_plan(request(kubernetes=look), facts, prepared(n001=OPTIONS)).notes
    told = [note for note in notes if "Kubernetes" in note or "kubelet" in note]
    assert len(told) == int(kubelet or bool(look.by_host))
    assert all(note.startswith("n001: ") and ("left alone" in note) == bool(refused) for note in told)


def test_a_plan_says_what_becomes_of_nodes() -> None:
    by_host = {"n001": Node("a", "b1"), "n002": Node("b", "b2", cordoned=True)}
    facts = facts_of(n001={"kubelet": True}, n002={"kubelet": True})
    notes = make_plan(request(kubernetes=NodeLook("prod", by_host)), facts, prepared(n001=OPTIONS, n002=OPTIONS)).notes
    assert "n001: cordoned and drained in Kubernetes (prod) before its reboot, uncordoned after a good look" in notes
    assert "n002: cordoned in Kubernetes (prod) by somebody: drained before its reboot, and stays cordoned" in notes


def test_what_was_left_cordoned_is_given_back_once_nothing_is_left_to_do() -> None:
    node = Node("a", "b1", cordoned=True, reason=OLD)
    look, facts = NodeLook("prod", {"n001": node}, {"a": OLD}), facts_of(n001={"kubelet": True})
    (step,) = make_plan(request(kubernetes=look), facts, prepared(n001=DONE)).of_kind(UNCORDON)
    assert (step.hosts, step.reason.found) == (("n001",), f"cordoned: {OLD}")
    for other, state, skip in (
        (look, OPTIONS, ()),
        (look, DONE, ("driver-options",)),
        (NodeLook("prod", {"n001": replace(node, reason="")}), DONE, ()),
    ):
        plan = make_plan(request(kubernetes=other, skip=skip), facts, prepared(n001=state))
        assert plan.of_kind(UNCORDON) == ()
