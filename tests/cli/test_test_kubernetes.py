"""`invoke test --via=kubernetes` as a person types it, against an emulated cluster whose containers repeat a recorded run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deepep_bootstrap.core.errors import INTERRUPTED, OK, TROUBLE, VERDICT
from deepep_bootstrap.kube import client, runs
from deepep_bootstrap.kube.client import Cluster, Object
from deepep_bootstrap.kubernetes import in_pod
from tests.kubernetes.test_run import Scripted, has_no_image, left
from tests.support.e2e import wait_until
from tests.support.kube_api import LiveApi, live_api
from tests.support.kube_cluster import Emulated, Start, at_work
from tests.support.paths import CASES, ROOT

pytestmark = pytest.mark.usefixtures("programs")
RECORDED = CASES / "analysis/results/internode-run-folder"
SETTINGS = CASES / "kubernetes/generic-host.toml"
NODES = ("gpu-001", "gpu-002")
LABELS = {"gpu": "h100"}
"""The label that the settings choose nodes by."""


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[LiveApi, Cluster, Path]]:
    with live_api(tmp_path, "deepep") as (api, file):
        cluster = client.connect(kubeconfig=str(file))
        yield api, cluster, file
        cluster.close()


def words(file: Path, *more: str) -> list[str]:
    flags = ["--via=kubernetes", "--for=generic", f"--settings={SETTINGS}", f"--kubeconfig={file}", "--context=lab"]
    return [sys.executable, "-m", "invoke", "test", *flags, *more]


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}


def document(file: Path, tmp_path: Path, *more: str) -> dict[str, Any]:
    argv = words(file, "--json", *more)
    done = subprocess.run(argv, cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, check=False)
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["exit"] == done.returncode, done.stderr
    return found


def repeating(capsys: pytest.CaptureFixture[str], code: int = 0) -> Start:
    """Containers that print what the nodes of a recorded run printed, and hand over what a pod does."""
    gpus = "".join(f"gpu={index}\tNVIDIA H800\t81559\t9.0\t580.1\t0000:{index}8:00.0\t\t-1\n" for index in range(8))
    for name, data in (
        ("about", json.dumps({"stack": "v1", "module": "deepep/1-v1", "script": "test_internode.py"}).encode()),
        ("facts", f"facts=1\n{gpus}end=1\n".encode()),
        ("rank-0.log", (RECORDED / "rank-0.log").read_bytes()),
    ):
        in_pod.hand_over(name, data)
    handed = capsys.readouterr().out.splitlines()

    def start(pod: Object, node: str, say: Callable[..., None]) -> Scripted:
        index = runs.index_of(pod)
        lines = (RECORDED / f"node-{index}-{NODES[index]}.log").read_text().splitlines()
        if index == 0:
            head = "deepep-say: internode test of deepep/1-v1: test_internode.py"
            lines = [head, *lines, *handed]
        return Scripted(lines, code, say)

    return start


def test_it_is_judged_and_reported_like_any_other(
    live: tuple[LiveApi, Cluster, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api, cluster, file = live
    with at_work(Emulated(api, cluster, NODES, repeating(capsys), labels=LABELS)):
        found = document(file, tmp_path, "--kind=internode")
    assert (found["exit"], found["verdict"]) == (OK, "passed"), (found["why"], found["failure"])
    assert found["tests"][0]["ok"]
    assert found["run"]["values"]["nodes"] == "gpu-001,gpu-002"
    assert found["run"]["values"]["via"] == "kubernetes"
    assert found["command"].startswith("job deepep-internode-")
    assert found["nodes"]["passing"] == list(NODES)
    assert not left(api)
    folder = found["run"]["folder"]
    assert folder.startswith(str(tmp_path / "state"))
    argv = [sys.executable, "-m", "invoke", "report", folder, "--json"]
    told = json.loads(subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert (told["verdict"], told["why"]) == (found["verdict"], found["why"])
    assert told["results"]["tests"] == found["tests"]


def test_an_exit_code_is_a_verdict(
    live: tuple[LiveApi, Cluster, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api, cluster, file = live
    with at_work(Emulated(api, cluster, NODES, repeating(capsys, 9), labels=LABELS)):
        found = document(file, tmp_path)
    assert (found["exit"], found["verdict"]) == (VERDICT, "failed")
    assert found["run"]["values"]["code"] == "9"
    assert not left(api)


def test_one_that_never_starts_has_a_reason_and_no_folder(
    live: tuple[LiveApi, Cluster, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api, cluster, file = live
    with at_work(Emulated(api, cluster, NODES, repeating(capsys), has_no_image, LABELS)):
        found = document(file, tmp_path)
    assert (found["exit"], found["outcome"]["state"]) == (TROUBLE, "failed")
    assert "2 of 2 pods wait: the image is not there (" in found["outcome"]["detail"]
    assert found["run"]["folder"] == ""
    assert not left(api)


def test_one_of_which_some_pods_start_leaves_what_these_said_and_the_reason(
    live: tuple[LiveApi, Cluster, Path], tmp_path: Path
) -> None:
    api, cluster, file = live

    def start(pod: Object, node: str, say: Callable[..., None]) -> Scripted:
        return Scripted([f"{node} waits for its peer"], None, say)

    def pull(node: str, image: str) -> str:
        return has_no_image(node, image) if node == NODES[1] else ""

    with at_work(Emulated(api, cluster, NODES, start, pull, LABELS)):
        found = document(file, tmp_path)
    assert (found["exit"], found["outcome"]["state"]) == (TROUBLE, "failed")
    assert "1 of 2 pods wait: the image is not there (" in found["outcome"]["detail"]
    (folder,) = (tmp_path / "state/deepep-bootstrap/tests").iterdir()
    assert found["outcome"]["log"] == str(folder / "job.log")
    assert f"{NODES[0]} waits for its peer" in (folder / f"node-0-{NODES[0]}.log").read_text()
    argv = [sys.executable, "-m", "invoke", "report", str(folder), "--json"]
    told = json.loads(subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False).stdout)
    assert told["verdict"] == "failed"
    assert "the image is not there" in told["why"]
    assert not left(api)


def test_an_interrupt_takes_away_what_it_made_and_nothing_else(
    live: tuple[LiveApi, Cluster, Path], tmp_path: Path
) -> None:
    api, cluster, file = live
    other = {"kind": "Service", "metadata": {"name": "other", "labels": {"app.kubernetes.io/name": "deepep"}}}
    cluster.create("/api/v1/namespaces/deepep/services", other)

    def start(pod: Object, node: str, say: Callable[..., None]) -> Scripted:
        return Scripted([f"{node} runs"], None, say)

    with at_work(Emulated(api, cluster, NODES, start, labels=LABELS)):
        process = subprocess.Popen(
            words(file),
            cwd=ROOT,
            env=environment(tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        tests = tmp_path / "state/deepep-bootstrap/tests"
        wait_until(lambda: list(tests.glob("*/node-1-gpu-002.log")), "both nodes run")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=120)
        assert process.returncode == INTERRUPTED, out
        wait_until(lambda: not api.objects("pods"), "the pods are gone with their Job")
    assert left(api) == ["other"]
    deleted = [path for path in api.asked() if path.startswith("DELETE") and "/pods/" not in path]
    assert len(deleted) == 3
    (folder,) = tests.iterdir()
    assert json.loads((folder / "verdict.json").read_text())["verdict"] == "stopped"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--settings="], "--settings: is missing"),
        (["--for="], "--for: is missing — wanted gke-a4, gke-a3 or generic"),
        (["--kind=ep"], "--kind: the stack v1 has no such test"),
        (["--nodes=1"], "--nodes: the internode test cannot run on that many nodes"),
        (["--save-as-reference"], "--save-as-reference: references are kept in a prefix"),
        (["--context=prod"], "no such context — found prod, wanted lab"),
        (["--kubeconfig=/nowhere"], "/nowhere: there is no kubeconfig"),
        (["--namespace=absent"], "lab: the cluster has no namespace absent"),
        (["--via=ssh"], "--for: is for tests on Kubernetes. Try: --via=kubernetes"),
    ],
    ids=lambda value: value[0].strip("-") if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused(
    flags: list[str], message: str, live: tuple[LiveApi, Cluster, Path], tmp_path: Path
) -> None:
    api, _, file = live
    given = [word for word in words(file) if not any(word.startswith(f"{flag.partition('=')[0]}=") for flag in flags)]
    argv = [*given, *(flag for flag in flags if not flag.endswith("="))]
    done = subprocess.run(argv, cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == TROUBLE
    assert message in done.stderr
    assert not [path for path in api.asked() if not path.startswith("GET")]


def test_a_dry_run_asks_no_cluster(live: tuple[LiveApi, Cluster, Path], tmp_path: Path) -> None:
    api, _, file = live
    argv = words(file, "--dry-run", "--args=--num-tokens 64")
    done = subprocess.run(argv, cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == OK, done.stderr
    assert "internode test of stack v1: lab, namespace deepep would run job deepep-internode-" in done.stdout
    assert not api.asked()
    assert not (tmp_path / "state/deepep-bootstrap/tests").exists()
