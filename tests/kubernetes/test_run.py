"""A test followed in an emulated cluster, over real HTTP: its folder, its end, and what is left behind (nothing)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepep_bootstrap.core.errors import OK, TROUBLE, VERDICT, Trouble
from deepep_bootstrap.kube import client, runs
from deepep_bootstrap.kube.client import Cluster, Object
from deepep_bootstrap.kube.runs import ClusterRun
from deepep_bootstrap.kubernetes import in_pod
from deepep_bootstrap.kubernetes import run as made
from deepep_bootstrap.kubernetes.run import ClusterTest, Ran, run_in_cluster
from deepep_bootstrap.prefix.test_kinds import KINDS
from deepep_bootstrap.testing import run_folder, slurm_run
from tests.kubernetes.test_manifests import followed
from tests.support.e2e import PATIENCE, wait_until
from tests.support.kube_api import LiveApi, live_api, refusal
from tests.support.kube_cluster import Emulated, at_work, variables_of

pytestmark = pytest.mark.usefixtures("programs")
NAME = "20261122T210000Z-internode-1a2b3c"
JOB = """\
apiVersion: v1
kind: ServiceAccount
metadata: {name: deepep-internode-1a2b3c}
---
apiVersion: v1
kind: Service
metadata: {name: deepep-internode-1a2b3c, labels: {app.kubernetes.io/name: deepep}}
spec: {clusterIP: None}
---
apiVersion: batch/v1
kind: Job
metadata: {name: deepep-internode-1a2b3c}
spec:
  completionMode: Indexed
  completions: 2
  parallelism: 2
  template:
    metadata: {labels: {app.kubernetes.io/instance: 20261122T210000Z-internode-1a2b3c}}
    spec:
      subdomain: deepep-internode-1a2b3c
      containers:
        - {name: test, image: "registry.example/deepep@sha256:00", resources: {limits: {nvidia.com/gpu: 8}}}
"""


def has_no_image(_node: str, image: str) -> str:
    """What containerd says of an image that a registry has not."""
    return (
        f'rpc error: code = NotFound desc = failed to pull and unpack image "{image}": failed to resolve reference '
        f'"{image}": {image}: not found'
    )


class Scripted:
    """A container that prints lines, then waits until it is told to go on, and ends with a code."""

    def __init__(self, lines: list[str], code: int | None, say: Callable[..., None]) -> None:
        self.code: int | None = None
        self._ends = code
        self._lines, self._say = lines, say
        self.told = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self._say(*self._lines)
        if self._ends is None:
            self.told.wait()
            self.code = 143
        else:
            self.code = self._ends

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.told.set()

    def fail(self, code: int) -> None:
        """End by itself."""
        self.code = code


def handed(capsys: pytest.CaptureFixture[str], name: str, data: bytes) -> list[str]:
    """The lines by which a pod hands over a file."""
    in_pod.hand_over(name, data)
    return capsys.readouterr().out.splitlines()


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LiveApi, Cluster]]:
    monkeypatch.setattr(made, "LOOK", 0.05)
    monkeypatch.setattr(made, "GRACE", 2.0)
    monkeypatch.setattr(made, "SILENCE", PATIENCE)
    monkeypatch.setattr(made, "EVENTS_AGE", 0.2)
    monkeypatch.setattr(runs, "AGAIN", 0.1)
    with live_api(tmp_path, "gpu") as (api, file):
        cluster = client.connect(kubeconfig=str(file))
        yield api, cluster
        cluster.close()


def the_test(folder: Path, **more: int) -> ClusterTest:
    limits = {"start_limit": 60, "time_limit": 60, **more}
    return ClusterTest(KINDS["internode"], NAME, 2, folder=folder / NAME, **limits)


def follow(cluster: Cluster, test: ClusterTest, lines: list[str] | None = None) -> Ran:
    said: list[str] = [] if lines is None else lines
    run = ClusterRun(cluster, "gpu", NAME)
    return run_in_cluster(run, runs.read_objects(JOB), test, on_line=said.append)


def followed_while(action: Callable[[], None], cluster: Cluster, place: Path, lines: list[str]) -> Ran:
    """What a run comes to while something is done to it."""
    beside = threading.Thread(target=action)
    beside.start()
    ran = follow(cluster, the_test(place), lines)
    beside.join()
    return ran


def assert_second_node_lost(ran: Ran, api: LiveApi) -> None:
    assert (ran.result.state, ran.result.outcome.code) == (slurm_run.LOST, VERDICT)
    assert ran.result.ending == "gpu-2 does not answer any more: pod deepep-internode-1a2b3c-1-x7k2p is lost"
    assert ran.lost == "gpu-2"
    assert not left(api)


def left(api: LiveApi) -> list[str]:
    """What is there of what a run makes."""
    kinds = ("jobsets", "jobs", "services", "serviceaccounts")
    return [each["metadata"]["name"] for plural in kinds for each in api.objects(plural)]


FACTS = "facts=1\nhostname=gpu-1\ngpu=0\tNVIDIA B200\t183359\t10.0\t580.1\t0000:18:00.0\t\t-1\nend=1\n"
COUNTERS = "time=1.0\nnic=mlx5_0 1 Ethernet 400 1000 2000 symbol_error:0\n"


def test_one_that_passes_leaves_the_folder_of_any_run(
    live: tuple[LiveApi, Cluster], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api, cluster = live
    about = json.dumps({"stack": "v1", "module": "deepep/1-v1", "unknown": "x", "deepep": "d"}).encode()
    files = [
        *handed(capsys, "about", about),
        *handed(capsys, "facts", FACTS.encode()),
        *handed(capsys, "counters/before", COUNTERS.encode()),
        *handed(capsys, "counters/after", COUNTERS.encode()),
        *handed(capsys, "rank-0.log", b"rank \xff said\n" * 3000),
        *handed(capsys, "../../etc/passwd", b"no file of a run"),
    ]
    assert max(map(len, files)) < 16000
    other = cluster.create(
        "/api/v1/namespaces/gpu/services", {"kind": "Service", "metadata": {"name": "somebody-elses"}}
    )

    def start(pod: Object, node: str, say: Callable[..., None]) -> Scripted:
        index = runs.index_of(pod)
        own = "deepep-say: a line of the launcher"
        return Scripted([f"node {index} prints this", *([own, *files] if index == 0 else [])], 0, say)

    lines: list[str] = []
    with at_work(Emulated(api, cluster, ("gpu-1", "gpu-2"), start)):
        ran = follow(cluster, the_test(tmp_path), lines)
    assert (ran.result.state, ran.result.outcome.code, ran.problems) == (slurm_run.ENDED, OK, ())
    assert lines[-1] == "deepep: internode ended with exit code 0"
    assert sorted(lines[:-1]) == ["deepep: a line of the launcher", "node 0 prints this", "node 1 prints this"]
    assert left(api) == [other["metadata"]["name"]]
    folder = tmp_path / NAME
    run = run_folder.of_files(NAME, run_folder.of_folder(folder))
    assert sorted(path.name for path in folder.iterdir()) == [
        *("counters", "facts.json", "job.log", "node-0-gpu-1.log", "node-1-gpu-2.log", "rank-0.log", "run.env")
    ]
    assert (run.nodes, run.code, run.kind) == (("gpu-1", "gpu-2"), 0, "internode")
    assert (run.values["via"], run.values["stack"], run.values["deepep"]) == ("kubernetes", "v1", "d")
    assert run.logs["node-0-gpu-1.log"] == "node 0 prints this\n"
    said = ["deepep: a line of the launcher", "deepep: internode ended with exit code 0"]
    assert run.logs["job.log"].splitlines() == said
    assert len(run.logs["rank-0.log"].splitlines()) == 3000
    before, after = run.counters["gpu-1"]
    assert before is not None
    assert before == after
    assert ran.facts["gpu-1"].gpus[0].name == "NVIDIA B200"


def test_a_log_whose_connection_breaks_is_read_once(live: tuple[LiveApi, Cluster], tmp_path: Path) -> None:
    api, cluster = live

    def start(pod: Object, node: str, say: Callable[..., None]) -> Scripted:
        name = pod["metadata"]["name"]

        def cutting(*lines: str) -> None:
            for at in range(0, len(lines), 10):
                say(*lines[at : at + 10])
                time.sleep(0.1)
                api.inside(lambda each: each.cut.add(("gpu", name)))

        return Scripted([f"line {number}" for number in range(50)], 0, cutting)

    with at_work(Emulated(api, cluster, ("gpu-1", "gpu-2"), start)):
        follow(cluster, the_test(tmp_path))
    wanted = [f"line {number}" for number in range(50)]
    for name in ("node-0-gpu-1.log", "node-1-gpu-2.log"):
        assert (tmp_path / NAME / name).read_text().splitlines() == wanted
    assert sum("/log" in path for path in api.asked()) > 4


def test_one_that_fails_is_told_by_its_first_node(live: tuple[LiveApi, Cluster], tmp_path: Path) -> None:
    api, cluster = live

    def start(pod: Object, node: str, say: Callable[..., None]) -> Scripted:
        return Scripted([node], 7 if node == "gpu-2" else None, say)

    with at_work(Emulated(api, cluster, ("gpu-1", "gpu-2"), start)):
        ran = follow(cluster, the_test(tmp_path))
        assert (ran.result.state, ran.result.outcome.code) == (slurm_run.ENDED, VERDICT)
        assert ran.result.ending == "gpu-2: exit code 7"
        assert run_folder.of_files(NAME, run_folder.of_folder(tmp_path / NAME)).code == 7
        wait_until(lambda: not api.objects("pods"), "the pods are gone with their Job")
    assert not left(api)


@pytest.mark.parametrize("what", ["unschedulable", "no image"])
def test_one_that_never_starts_says_why(what: str, live: tuple[LiveApi, Cluster], tmp_path: Path) -> None:
    api, cluster = live

    def start(pod: Object, node: str, say: Callable[..., None]) -> Scripted:
        return Scripted([], None, say)

    nodes = ("gpu-1",) if what == "unschedulable" else ("gpu-1", "gpu-2")
    pull = None if what == "unschedulable" else has_no_image
    lines: list[str] = []
    with at_work(Emulated(api, cluster, nodes, start, pull)):
        ran = follow(cluster, the_test(tmp_path, start_limit=1 if what == "unschedulable" else 60), lines)
        wait_until(lambda: not api.objects("pods"), "the pods are gone with their Job")
    assert (ran.result.state, ran.result.outcome.code, ran.result.began) == (slurm_run.LATE, TROUBLE, False)
    said = {
        "unschedulable": "did not start in 1 s: 1 of 2 pods wait: there are fewer nodes than pods: each pod gets a node of its own (0/1",
        "no image": "2 of 2 pods wait: the image is not there (",
    }
    assert ran.result.ending.startswith(said[what])
    assert ". Try: " in ran.result.outcome.detail
    assert any(line.startswith("deepep: ") and "pods wait: " in line for line in lines)
    assert not left(api)
    assert (tmp_path / NAME).exists() == (what == "unschedulable"), "a folder is kept where a pod ran"


def test_a_node_that_dies_is_named(live: tuple[LiveApi, Cluster], tmp_path: Path) -> None:
    api, cluster = live

    def start(pod: Object, node: str, say: Callable[..., None]) -> Scripted:
        return Scripted([node], None, say)

    emulated = Emulated(api, cluster, ("gpu-1", "gpu-2"), start)
    lines: list[str] = []
    with at_work(emulated):

        def kill() -> None:
            wait_until(lambda: len(lines) == 2, "both nodes run")
            emulated.die("gpu-2")

        ran = followed_while(kill, cluster, tmp_path, lines)
    assert_second_node_lost(ran, api)


def test_a_node_that_is_silent_is_named_though_another_one_says_that_it_failed(
    live: tuple[LiveApi, Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster says so later than the other ranks, whose connections break."""
    api, cluster = live
    monkeypatch.setattr(made, "GRACE", 0.1)
    containers: dict[str, Scripted] = {}

    def start(pod: Object, node: str, say: Callable[..., None]) -> Scripted:
        containers[node] = Scripted([node], None, say)
        return containers[node]

    emulated = Emulated(api, cluster, ("gpu-1", "gpu-2"), start)
    lines: list[str] = []
    with at_work(emulated):

        def kill() -> None:
            wait_until(lambda: len(lines) == 2, "both nodes run")
            emulated.die("gpu-2", noticed=False)
            containers["gpu-1"].fail(1)
            deleted = lambda: [one for one in api.objects("pods") if one["metadata"].get("deletionTimestamp")]  # noqa: E731
            wait_until(deleted, "the Job deletes the pod of the node that is off")
            time.sleep(2)  # longer than GRACE, and several looks
            emulated.unnoticed.clear()

        ran = followed_while(kill, cluster, tmp_path, lines)
    assert_second_node_lost(ran, api)


def test_one_without_an_end_is_stopped_at_its_time(
    live: tuple[LiveApi, Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, cluster = live
    monkeypatch.setattr(made, "GRACE", PATIENCE)  # who waited for the last lines of each pod would wait that long

    def start(pod: Object, node: str, say: Callable[..., None]) -> Scripted:
        return Scripted([f"{node} hangs"], None, say)

    with at_work(Emulated(api, cluster, ("gpu-1", "gpu-2"), start)):
        ran = follow(cluster, the_test(tmp_path, time_limit=1))
    assert (ran.result.state, ran.result.ending) == (slurm_run.HUNG, "no end after 1 s")
    assert [one.last for one in ran.result.last_output] == ["gpu-1 hangs", "gpu-2 hangs"]
    assert not left(api)


def test_a_pod_that_somebody_deletes_stops_it(live: tuple[LiveApi, Cluster], tmp_path: Path) -> None:
    api, cluster = live

    def start(pod: Object, node: str, say: Callable[..., None]) -> Scripted:
        return Scripted([node], None, say)

    lines: list[str] = []
    with at_work(Emulated(api, cluster, ("gpu-1", "gpu-2"), start)):

        def delete() -> None:
            wait_until(lambda: len(lines) == 2, "both nodes run")
            cluster.delete("/api/v1/namespaces/gpu/pods/deepep-internode-1a2b3c-0-x7k2p")

        deleter = threading.Thread(target=delete)
        deleter.start()
        ran = follow(cluster, the_test(tmp_path), lines)
        deleter.join()
    assert (ran.result.state, ran.result.ending) == (
        slurm_run.STOPPED,
        "pod deepep-internode-1a2b3c-0-x7k2p was deleted by somebody else",
    )


class Process:
    """A container as a process of this machine; what it prints is said when it has ended."""

    def __init__(self, program: str, variables: dict[str, str], say: Callable[..., None]) -> None:
        words = [sys.executable, "-c", program]
        self._process = subprocess.Popen(words, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True)
        self._say: Callable[..., None] | None = say

    def poll(self) -> int | None:
        code = self._process.poll()
        if code is not None and self._say:
            self._say(*self._process.communicate()[0].splitlines())
            self._say = None
        return code

    def terminate(self) -> None:
        self._process.kill()


@pytest.mark.parametrize("code", [0, 3])
def test_a_jobset_makes_a_job_and_a_service_and_says_how_it_ended(
    code: int, live: tuple[LiveApi, Cluster], tmp_path: Path
) -> None:
    api, cluster = live
    known: dict[str, str] = {}
    program = f"""\
import os, sys
print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"], os.environ["DEEPEP_NODE"])
sys.exit({code})
"""

    def start(pod: Object, node: str, say: Callable[..., None]) -> Process:
        assert variables_of(pod, node)["MASTER_ADDR"] in known, "the first node has its name before any of them runs"
        return Process(program, variables_of(pod, node), say)

    _, objects = followed("generic-host", "internode", 2, internode="jobset")
    run = ClusterRun(cluster, "gpu", NAME)
    labels = {"gpu": "h100"}
    with at_work(Emulated(api, cluster, ("gpu-1", "gpu-2"), start, labels=labels, names_changed=known.update)):
        run.make(objects)
        wait_until(lambda: api.objects("jobsets")[0].get("status", {}).get("terminalState"), "the JobSet has ended")
        pods = run.pods()
        own = "deepep-internode-1a2b3c"
        assert [pod["metadata"]["name"] for pod in pods] == [f"{own}-nodes-0-{index}-x7k2p" for index in (0, 1)]
        (jobset,), (job,), (service,) = (api.objects(kind) for kind in ("jobsets", "jobs", "services"))
        said = [(each["type"], each["reason"]) for thing in (jobset, job) for each in thing["status"]["conditions"]]
        assert (
            said == [("Failed", "ReachedMaxRestarts"), ("Failed", "BackoffLimitExceeded")]
            if code
            else [*(("Completed", "AllJobsCompleted"), ("Complete", "CompletionsReached"))]
        )
        assert jobset["status"]["restarts"] == 0
        assert job["metadata"]["labels"]["jobset.sigs.k8s.io/jobset-name"] == own
        assert service["metadata"]["name"] == own
        assert service["spec"]["publishNotReadyAddresses"] is True
        if not code:
            lines = [line.partition(" ")[2] for pod in pods for line in api.api.logs["gpu", pod["metadata"]["name"]]]
            assert lines == [f"{rank} 2 {own}-nodes-0-0.{own} gpu-{rank + 1}" for rank in (0, 1)]
        assert run.remove() == []
        wait_until(lambda: not [*left(api), *api.objects("pods")], "what the controllers made is gone with the JobSet")


def test_a_refusal_in_the_middle_leaves_nothing(live: tuple[LiveApi, Cluster], tmp_path: Path) -> None:
    api, cluster = live
    answer = refusal(403, 'jobs.batch is forbidden: User "me" cannot create resource "jobs"')
    api.inside(lambda each: each.refusals.update({"POST .*/jobs": answer}))
    with pytest.raises(Trouble, match='cannot create resource "jobs"'):
        follow(cluster, the_test(tmp_path))
    assert not left(api)
    assert any(path.startswith("DELETE") and "serviceaccounts" in path for path in api.asked())


def test_objects_of_the_same_name_are_not_touched(live: tuple[LiveApi, Cluster], tmp_path: Path) -> None:
    api, cluster = live
    path = "/api/v1/namespaces/gpu/services"
    cluster.create(path, {"kind": "Service", "metadata": {"name": "deepep-internode-1a2b3c"}})
    with pytest.raises(Trouble, match="409"):
        follow(cluster, the_test(tmp_path))
    assert left(api) == ["deepep-internode-1a2b3c"]


def test_a_namespace_that_is_not_there(live: tuple[LiveApi, Cluster], tmp_path: Path) -> None:
    api, cluster = live
    run = ClusterRun(cluster, "absent", NAME)
    with pytest.raises(Trouble, match="the cluster has no namespace absent"):
        run_in_cluster(run, runs.read_objects(JOB), the_test(tmp_path), on_line=None)
    assert not any(path.startswith("POST") for path in api.asked())
