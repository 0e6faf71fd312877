"""GPU nodes judged by what the Kubernetes API says of them: each row with a healthy, a faulty and an unknown node, and
the verbs over real HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from deepep_bootstrap.cli.commands.doctor import doctor
from deepep_bootstrap.cli.commands.facts import facts
from deepep_bootstrap.core.errors import OK, VERDICT, Trouble
from deepep_bootstrap.doctor.findings import BLOCKING, NOTE, WARNING
from deepep_bootstrap.doctor.nodes import ROWS, examine_nodes
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.kube import client, nodes
from deepep_bootstrap.kube.node_facts import ClusterFacts, NodeFacts, operators, read_facts
from tests.support.kube_api import live_api
from tests.support.paths import ROOT

WELL = NodeFacts(
    "gpu-a",
    ready=True,
    product="nvidia-b200",
    gpus=8,
    gpu_capacity=8,
    counted=8,
    rdma={"networking.gke.io.networks/rdma-0": 1},
    driver="580.95.05",
    kernel="6.8.0-1030-gke",
    block="block-1",
    is_gke=True,
)
THERE = ("GPU device plugin", "gIB installer")


def found(
    *changes: Mapping[str, Any], operators: tuple[str, ...] = THERE, claims: bool = False
) -> list[tuple[str, str]]:
    """Check and severity of what is found on nodes, one for each change of a healthy one."""
    several = [replace(WELL, name=f"gpu-{number}", **change) for number, change in enumerate(changes)]
    findings = examine_nodes(ClusterFacts("lab", tuple(several), operators, claims), "13")
    assert all(finding.why and finding.wanted for finding in findings)
    return [(finding.check, finding.severity) for finding in findings]


def test_there_is_nothing_to_say_of_healthy_nodes() -> None:
    assert found({}, {}) == []
    assert found({"is_gke": False, "block": ""}, {"is_gke": False, "block": ""}, operators=()) == []
    assert found({"rdma": {}}, {"rdma": {}}, claims=True) == []


CASES = [
    ({"ready": False}, ("node-ready", BLOCKING)),
    ({"cordoned": True}, ("node-in-use", WARNING)),
    ({"cordoned": True, "reason": "deepep-bootstrap: options (run r)"}, ("node-in-use", WARNING)),
    ({"pressure": ("DiskPressure",)}, ("node-pressure", WARNING)),
    ({"gpus": 0, "gpu_capacity": 0, "counted": -1}, ("node-gpus", BLOCKING)),
    ({"gpus": 7}, ("node-gpus", WARNING)),
    ({"gpus": 7, "gpu_capacity": 7, "counted": -1}, None),  # nobody says how many there are
    ({"gpus": 4, "gpu_capacity": 4}, ("node-gpus", WARNING)),
    ({"rdma": {}}, ("node-rdma", WARNING)),
    ({"rdma": {"rdma/hca": 0}}, ("node-rdma", BLOCKING)),
    ({"driver": "570.124.06"}, ("node-driver", BLOCKING)),
    ({"driver": ""}, ("node-driver", NOTE)),
    ({"driver": "", "driver_channel": "latest"}, ("node-driver", NOTE)),
    ({"block": ""}, ("topology-block", WARNING)),
]


@pytest.mark.parametrize(("change", "told"), CASES)
def test_what_is_wrong_or_not_known_is_told(change: Mapping[str, Any], told: tuple[str, str] | None) -> None:
    assert found(change, change) == ([told] if told else [])


def test_every_row_has_a_case() -> None:
    assert {row.check for row in ROWS} == {told[0] for _, told in CASES if told} | {"gib"}
    assert found({}, {}, operators=("GPU device plugin",)) == [("gib", WARNING)]
    assert found({"driver": "570.1"}, operators=THERE) == [("node-driver", BLOCKING)]


def test_nodes_that_differ_are_named_with_what_most_have() -> None:
    findings = examine_nodes(
        ClusterFacts(
            "lab",
            tuple(replace(WELL, name=f"n{i}", kernel="6.8.1" if i == 2 else WELL.kernel) for i in range(3)),
            THERE,
        ),
        "13",
    )
    ((check, hosts, text, wanted),) = [(each.check, each.hosts, each.found, each.wanted) for each in findings]
    assert (check, hosts, text, wanted) == ("nodes-alike", ("n2",), "kernel 6.8.1", "kernel 6.8.0-1030-gke")
    assert found({}, {"block": "block-2"}) == [("topology-block", NOTE)]


def make_gpu_node(name: str, **labels: str) -> client.Object:
    found = {"cloud.google.com/gke-accelerator": "nvidia-b200", "cloud.google.com/gce-topology-block": "b1", **labels}
    devices = {
        "nvidia.com/gpu": "8",
        "networking.gke.io.networks/rdma-0": "1",
        "networking.gke.io.networks/gvnic-1": "1",
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": found},
        "spec": {"taints": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]},
        "status": {
            "capacity": {"cpu": "224", **devices},
            "allocatable": {"cpu": "223", **devices, "nvidia.com/gpu": "7"},
            "nodeInfo": {
                "bootID": name,
                "kernelVersion": "6.8.0",
                "osImage": "Ubuntu 24.04",
                "kubeletVersion": "v1.34",
            },
            "conditions": [{"type": "Ready", "status": "True"}, {"type": "DiskPressure", "status": "True"}],
        },
    }


def test_a_node_is_read_as_the_api_has_it() -> None:
    parts = {
        f"nvidia.com/cuda.driver.{part}": value for part, value in (("major", "580"), ("minor", "95"), ("rev", "05"))
    }
    node = read_facts(
        make_gpu_node("gpu-a", **parts, **{"cloud.google.com/gke-spot": "true", "nvidia.com/gpu.count": "8"})
    )
    assert (node.product, node.gpus, node.gpu_capacity, node.counted) == ("nvidia-b200", 7, 8, 8)
    assert (node.rdma, node.driver, node.block) == ({"networking.gke.io.networks/rdma-0": 1}, "580.95.05", "b1")
    assert (node.taints, node.pressure, node.spot) == (("nvidia.com/gpu=present:NoSchedule",), ("DiskPressure",), True)
    assert read_facts({"status": {"capacity": {"nvidia.com/gpu": "many"}}}) == NodeFacts("")
    assert operators(
        ["nccl-rdma-installer", "nvidia-gpu-device-plugin-medium-ubuntu", "jobset-controller-manager"]
    ) == ("GPU device plugin", "gIB installer", "JobSet")


@pytest.mark.usefixtures("programs")
def test_doctor_and_facts_of_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with live_api(tmp_path) as (_, file):
        cluster = client.connect(kubeconfig=str(file))
        flags = Flags(ROOT, via="kubernetes", json=True)
        with pytest.raises(Trouble, match="lab: no GPU node is there"):
            facts(flags, kubeconfig=str(file))
        for name in ("gpu-a", "gpu-b"):
            cluster.create(nodes.NODES, make_gpu_node(name))
        cluster.create(nodes.NODES, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "cpu-1"}})
        daemon = {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "nccl-rdma-installer"}}
        cluster.create("/apis/apps/v1/namespaces/default/daemonsets", daemon)
        assert facts(flags, kubeconfig=str(file), context="lab") == OK
        document = json.loads(capsys.readouterr().out)
        assert (list(document["nodes"]), document["context"]) == (["gpu-a", "gpu-b"], "lab")
        assert document["operators"] == ["gIB installer"]
        assert facts(replace(flags, json=False, limit="gpu-b"), kubeconfig=str(file)) == OK
        said = capsys.readouterr().out
        assert "gpu-b of lab" in said
        assert "7 of 8 × nvidia-b200 may be allocated" in said
        assert doctor(flags, kubeconfig=str(file)) == OK
        checks = [
            (each["check"], each["severity"], each["hosts"]) for each in json.loads(capsys.readouterr().out)["findings"]
        ]
        both = ["gpu-a", "gpu-b"]
        assert checks == [("node-pressure", WARNING, both), ("node-gpus", WARNING, both), ("node-driver", NOTE, both)]
        cluster.patch(f"{nodes.NODES}/gpu-a", {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}})
        assert doctor(replace(flags, json=False), kubeconfig=str(file)) == VERDICT
        assert "blocking: node-ready on gpu-a" in capsys.readouterr().out
        cluster.close()
    with pytest.raises(Trouble, match="--context: a cluster of Kubernetes is named, and the hosts are asked"):
        doctor(replace(flags, via="ssh"), context="lab")
