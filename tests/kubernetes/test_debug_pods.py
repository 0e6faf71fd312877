"""Debug pods: the fact script on emulated nodes, each container a real process below a root file system of its own, and
what becomes of pods that do not start, fail, or are interrupted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from deepep_bootstrap.cli.commands.doctor import doctor
from deepep_bootstrap.cli.commands.facts import facts
from deepep_bootstrap.core.errors import INTERRUPTED, OK, TROUBLE, VERDICT, Trouble
from deepep_bootstrap.doctor.nodes import INSIDE, NOT_ASKED, examine_inside
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.survey import read_tree
from deepep_bootstrap.kube import client, nodes
from deepep_bootstrap.kube.client import Cluster, Object
from deepep_bootstrap.kube.runs import ClusterRun
from deepep_bootstrap.kubernetes import debug_pods
from deepep_bootstrap.kubernetes.debug_pods import DebugPods, ask_nodes, debug_pod
from tests.doctor.test_nodes import make_gpu_node
from tests.kubernetes.test_run import Scripted, has_no_image
from tests.support.doctor import WELL, nic
from tests.support.e2e import wait_until
from tests.support.kube_api import LiveApi, live_api, refusal
from tests.support.kube_cluster import Container, Emulated, at_work, expanded
from tests.support.paths import ROOT
from tests.support.shipped import shipped_lock

pytestmark = pytest.mark.usefixtures("programs")
IMAGE = f"registry.example/busybox@sha256:{'c' * 64}"
NODES = ("gpu-a", "gpu-b")
RUN = "20261123T010000Z-facts-1a2b3c"
ASKED = DebugPods(IMAGE, "echo facts=1 $$ $(uname -n)", ("/opt/deepep", ""), limit=60)

ENTER = """\
mount --make-rprivate / && mount -t tmpfs tmpfs "$0"
for folder in usr lib lib64 bin sbin; do
    [ ! -e "/$folder" ] || { mkdir -p "$0/$folder" && mount --rbind "/$folder" "$0/$folder"; }
done
mkdir "$0/host" && mount --rbind / "$0/host" && mount -o remount,bind,ro "$0/host"
hostname "$1"; root=$0; shift
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin SECRET=of-the-pod chroot "$root" "$@"
"""
"""As a container runtime makes it: the image's own root, with the node's below it."""


class Process:
    """A pod's container as a process with a root file system and a host name of its own."""

    def __init__(self, pod: Object, node: str, say: Callable[..., None], folder: Path) -> None:
        container = pod["spec"]["containers"][0]
        words = [expanded(word, {}) for word in (*container["command"], *container["args"])]
        root = folder / pod["metadata"]["name"]
        root.mkdir()
        argv = ["unshare", "--mount", "--uts", "sh", "-euc", ENTER, str(root), node, *words]
        self._say, self._told = say, False
        self._process = subprocess.Popen(argv, stdout=(folder / node).open("wb"), stderr=subprocess.STDOUT)
        self._log = folder / node

    def poll(self) -> int | None:
        code = self._process.poll()
        if code is not None and not self._told:
            self._told = True
            self._say(*self._log.read_text().splitlines())
        return code

    def terminate(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LiveApi, Cluster, Path]]:
    monkeypatch.setattr(debug_pods, "LOOK", 0.05)
    with live_api(tmp_path, "gpu") as (api, file):
        cluster = client.connect(kubeconfig=str(file))
        for name in NODES:
            cluster.create(nodes.NODES, make_gpu_node(name))
        yield api, cluster, file
        cluster.close()


def saying(*lines: str, code: int | None = 0) -> Callable[[Object, str, Callable[..., None]], Container]:
    return lambda pod, node, say: Scripted(list(lines), code, say)


def test_a_debug_pod_fits_the_api_and_says_what_it_may() -> None:
    pod = debug_pod("deepep-facts-1a2b3c-0", "gpu-a", ASKED)
    import kubernetes_validate  # takes a second, and few need it

    kubernetes_validate.validate(pod, "1.34", strict=True)
    spec = pod["spec"]
    assert (spec["nodeName"], spec["hostPID"], spec["automountServiceAccountToken"]) == ("gpu-a", True, False)
    assert spec["containers"][0]["volumeMounts"] == [{"name": "host", "mountPath": "/host", "readOnly": True}]
    assert spec["activeDeadlineSeconds"] > debug_pods.LIMIT
    assert [expanded(word, {"uname -n": "x"}) for word in spec["containers"][0]["args"][2:]] == [
        *(ASKED.script, "facts.sh", *ASKED.arguments)
    ]


def test_nodes_say_what_they_are(
    live: tuple[LiveApi, Cluster, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api, cluster, file = live
    other = cluster.create(
        "/api/v1/namespaces/gpu/pods", {**debug_pod("other", "gpu-a", ASKED), "status": {"phase": "x"}}
    )
    with at_work(Emulated(api, cluster, NODES, lambda pod, node, say: Process(pod, node, say, tmp_path))):
        flags = Flags(ROOT, via="kubernetes", json=True)
        assert facts(flags, kubeconfig=str(file), debug_pods=IMAGE) == OK
    found = json.loads(capsys.readouterr().out)
    assert {name: seen["hostname"] for name, seen in found["hosts"].items()} == {name: name for name in NODES}
    assert found["via"] == dict.fromkeys(NODES, "kubernetes")
    assert list(found["nodes"]) == list(NODES)
    for seen in found["hosts"].values():
        assert seen["kernel"] == os.uname().release
        assert seen["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert (seen["prefix"]["path"], seen["uid"]) == ("/opt/deepep", 0)
    assert [each["metadata"]["uid"] for each in api.objects("pods")] == [other["metadata"]["uid"]]
    made = [asked for asked in api.asked() if not asked.startswith("GET")]
    assert all("/namespaces/gpu/pods" in asked or "/nodes" in asked or "/api/v1/namespaces" in asked for asked in made)


def test_doctor_judges_what_the_nodes_say(
    live: tuple[LiveApi, Cluster, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    api, cluster, file = live
    gpus = "".join(f"gpu={index}\tNVIDIA B200\t183359\t10.0\t570.1\t0000:{index}8:00.0\t\t-1\n" for index in range(8))
    version = "nvidia_module=NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build\n"
    lines = f"facts=1\n{gpus}{version}secure_boot=1\nend=1".splitlines()
    with at_work(Emulated(api, cluster, NODES, saying(*lines))):
        flags = Flags(ROOT, via="kubernetes", json=True, stack="v1-cu13")
        assert doctor(flags, kubeconfig=str(file), debug_pods=IMAGE) == VERDICT
        by_check = {each["check"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
        assert by_check["node-driver"]["found"] == "driver 570.124.06", "the node says what the API does not"
        assert by_check["rdma"]["hosts"] == list(NODES)
        assert facts(replace(flags, json=False), kubeconfig=str(file), debug_pods=IMAGE) == OK
        said = capsys.readouterr().out
    assert "gpu-a,gpu-b (2) from inside\n" in said
    assert "not told by the API" not in said
    assert "Secure Boot is on: only signed kernel modules load" in said


def test_checks_of_hosts_hold_inside() -> None:
    checks = {row.check for row in INSIDE}
    assert {"secure-boot", "driver-options", "peer-memory", "rdma-ports", "nvlink"} <= checks
    assert not checks & NOT_ASKED
    lock, texts = shipped_lock(), read_tree(ROOT / "env")
    well = replace(WELL, rdma=tuple(nic(index, "InfiniBand") for index in range(8)))
    assert examine_inside({"gpu-a": well, "gpu-b": well}, lock.stacks["v1"], texts) == ()
    closed = replace(well, nvidia_params=(("DmaRemapPeerMmio", "1"), ("EnableStreamMemOPs", "0")))
    (finding,) = examine_inside({"gpu-a": closed, "gpu-b": well}, lock.stacks["v1"], texts)
    assert (finding.check, finding.hosts) == ("driver-options", ("gpu-a",))
    assert finding.fix == "invoke bootstrap --hosts=… --context=… --reboot=rolling"
    assert examine_inside({}, lock.stacks["v1"], texts) == ()


@pytest.mark.parametrize("image", ["busybox", "registry.example/busybox:1.37", "registry.example/busybox@sha256:12"])
def test_an_image_without_a_digest_is_refused_before_anything_is_asked(
    image: str, live: tuple[LiveApi, Cluster, Path]
) -> None:
    api, _, file = live
    before = api.asked()
    with pytest.raises(Trouble, match="--debug-pods: "):
        facts(Flags(ROOT, via="kubernetes"), kubeconfig=str(file), debug_pods=image)
    assert api.asked() == before
    with pytest.raises(Trouble, match="--debug-pods: a cluster of Kubernetes is named, and the hosts are asked"):
        facts(Flags(ROOT, via="ssh"), debug_pods=IMAGE)


def test_a_namespace_that_lets_no_such_pods_in(live: tuple[LiveApi, Cluster, Path]) -> None:
    api, cluster, _ = live
    words = 'pods "x" is forbidden: violates PodSecurity "baseline:latest": host namespaces (hostPID=true)'
    api.inside(lambda each: each.refusals.update({"POST .*/pods": refusal(403, words)}))
    with pytest.raises(Trouble, match=r"the namespace gpu lets no privileged pods in.*Try: --namespace=kube-system"):
        ask_nodes(ClusterRun(cluster, "gpu", RUN), NODES, ASKED)
    assert not api.objects("pods")


def test_pods_that_fail_or_say_something_else(live: tuple[LiveApi, Cluster, Path]) -> None:
    api, cluster, _ = live

    def start(pod: Object, node: str, say: Callable[..., None]) -> Scripted:
        return Scripted(["facts=1", "gpu=what"], 0 if node == "gpu-a" else 127, say)

    with at_work(Emulated(api, cluster, NODES, start)):
        seen = ask_nodes(ClusterRun(cluster, "gpu", RUN), NODES, ASKED)
    assert not seen.facts
    by_node = {problem.where: problem for problem in seen.problems}
    assert (by_node["gpu-b"].what, by_node["gpu-b"].try_) == ("the debug pod failed", debug_pods.NEEDS)
    assert set(by_node) == set(NODES)
    assert not api.objects("pods")


def test_an_image_that_is_not_there_is_told_at_once(live: tuple[LiveApi, Cluster, Path]) -> None:
    api, cluster, _ = live
    told: list[str] = []
    with at_work(Emulated(api, cluster, NODES, saying(), has_no_image)):
        seen = ask_nodes(ClusterRun(cluster, "gpu", RUN), NODES, ASKED, told.append)
    assert [(each.where, each.what) for each in seen.problems] == [
        (node, "the debug pod did not start") for node in NODES
    ]
    assert all("the image is not there" in str(each.found) for each in seen.problems)
    assert told
    assert not api.objects("pods")


def test_one_that_has_no_end_is_left_at_the_limit(live: tuple[LiveApi, Cluster, Path]) -> None:
    api, cluster, _ = live
    with at_work(Emulated(api, cluster, NODES, saying(code=None))):
        seen = ask_nodes(ClusterRun(cluster, "gpu", RUN), NODES, replace(ASKED, limit=0.5))
    assert [each.what.partition(" in ")[0] for each in seen.problems] == ["the debug pod has not ended"] * 2
    assert not api.objects("pods")


def test_a_node_that_is_not_ready_is_not_waited_for(
    live: tuple[LiveApi, Cluster, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    api, cluster, file = live
    cluster.patch(f"{nodes.NODES}/gpu-b", {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}})
    with at_work(Emulated(api, cluster, NODES, saying("facts=1", "end=1"))):
        code = facts(Flags(ROOT, via="kubernetes", json=True), kubeconfig=str(file), debug_pods=IMAGE)
    found = json.loads(capsys.readouterr().out)
    assert (code, list(found["hosts"])) == (TROUBLE, ["gpu-a"])
    assert "gpu-b" in json.dumps(found["errors"])


def test_an_interrupt_takes_the_pods_away_and_nothing_else(live: tuple[LiveApi, Cluster, Path], tmp_path: Path) -> None:
    api, cluster, file = live
    cluster.create("/api/v1/namespaces/gpu/pods", {**debug_pod("other", "gpu-a", ASKED), "status": {"phase": "x"}})
    argv = [
        sys.executable,
        "-m",
        "invoke",
        "facts",
        "--via=kubernetes",
        f"--debug-pods={IMAGE}",
        f"--kubeconfig={file}",
    ]
    with at_work(Emulated(api, cluster, NODES, saying(code=None))):
        process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

        def all_run() -> bool:
            return sum((pod.get("status") or {}).get("phase") == "Running" for pod in api.objects("pods")) == 2

        wait_until(all_run, "both pods run")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate()
    assert process.returncode == INTERRUPTED, out
    assert [each["metadata"]["name"] for each in api.objects("pods")] == ["other"]
