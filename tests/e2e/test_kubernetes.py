"""Tests between nodes out of an image of the demo's store, on hosts of the embedded cluster that stand for nodes of
Kubernetes: `invoke image --push` into a registry, `invoke test --via=kubernetes`, pods as processes in the root file
system that each node fetched from there, and what can go wrong with them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from deepep_bootstrap.core.errors import INTERRUPTED, OK, TROUBLE, VERDICT
from deepep_bootstrap.kube import client, names
from deepep_bootstrap.kube.client import Cluster, Object
from deepep_bootstrap.lab import cluster_lab, hosts
from tests.support import registry
from tests.support.e2e import LOCK, Engine, wait_until
from tests.support.images import PACKAGES, make_layout, tar_of_packages
from tests.support.kube_api import LiveApi, live_api
from tests.support.kube_cluster import Emulated, at_work, variables_of
from tests.support.lab import LiveLab
from tests.support.paths import ROOT

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]
pytestmark = [pytest.mark.e2e, pytest.mark.long]

KUBECTL = Path(sys.executable).parent / "kubectl"
NODES = ("n001", "n002")
SETTINGS = """\
image = "{image}"
archs = ["9.0"]
profile = "infiniband"
networks = "host"
internode = "{form}"
[selector]
gpu = "h100"
"""
SIZES = "--args=--num-processes 2 --num-experts 8"
HANGS = ("STANDIN_HANG=1", "STANDIN_TIMEOUT=3600")
"""The second rank of the first node does nothing when all have met, and the others wait for it."""

SMI = """\
#!/usr/bin/python3
# What the host's own nvidia-smi answered: the image has no shell for it.
print(open("/usr/local/nvidia/gpus").read(), end="")
"""
ENTER = """\
mount --bind "$0" "$0" && mount -o remount,bind,ro "$0"
mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && mount --rbind /sys "$0/sys"
for folder in tmp run; do mount -t tmpfs tmpfs "$0/$folder"; done
mkdir -p "$0/run/deepep" "$0/run/lab/fake"
mount --bind "$1" "$0/etc/hosts"
root=$0; shift
exec env -i "$@"
"""
"""As a container runtime makes it: read-only, with folders of its own for what is written, and names of the pods. By
/run/lab/fake the stand-ins know that counters of NICs are theirs to move."""


class Container:
    """A pod's container as a process in a host of the lab."""

    def __init__(self, words: list[str], say: Callable[..., None], log: Path) -> None:
        self._say, self._log, self._sent = say, log, 0
        with log.open("wb") as out:
            self._process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    def poll(self) -> int | None:
        code = self._process.poll()
        data = self._log.read_bytes()[self._sent :]
        whole = data if code is not None else data[: data.rfind(b"\n") + 1]
        self._sent += len(whole)
        if whole:
            self._say(*whole.decode("utf-8", "replace").rstrip("\n").split("\n"))
        return code

    def terminate(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@dataclass
class Nodes:
    """The kubelets and container runtimes of the lab's hosts; `variables` are put into each container."""

    lab: LiveLab
    logs: Path
    variables: tuple[str, ...] = ()

    def pull(self, node: str, image: str) -> str:
        """Fetch an image over the node's own network and unpack it for it; return why it cannot be had."""
        place = self._bundle(node, image)
        if place.exists():
            return ""
        copy = ["skopeo", "copy", "--quiet", "--src-tls-verify=false", f"docker://{image}", f"oci:{place}.oci:it"]
        network = ["nsenter", "-t", str(cluster_lab.alive(self.lab.lab, node)), "-n", "--"]
        place.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run([*network, *copy], capture_output=True, text=True, check=False)
        if done.returncode:
            said = re.search(r'level=fatal msg=("(?:[^"\\]|\\.)*")', done.stderr)
            return str(json.loads(said[1])) if said else done.stderr
        subprocess.run(["umoci", "unpack", "--image", f"{place}.oci:it", place], check=True, capture_output=True)
        self._give_gpus(node, place / "rootfs")
        return ""

    def _bundle(self, node: str, image: str) -> Path:
        return self.lab.shared / "images" / node / image.rpartition(":")[2]

    def _give_gpus(self, node: str, root: Path) -> None:
        """Put into a root what the container toolkit of NVIDIA mounts there, and what the runtime mounts on."""
        for folder in ("proc", "dev", "sys", "tmp", "run", "etc", "usr/local/nvidia/bin"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        (root / "etc/hosts").touch()
        (root / "usr/local/nvidia/bin/nvidia-smi").write_text(SMI)
        (root / "usr/local/nvidia/bin/nvidia-smi").chmod(0o755)
        fields = "index,name,memory.total,compute_cap,driver_version,pci.bus_id"
        found = self.lab.nsenter(node, f"nvidia-smi --query-gpu={fields} --format=csv,noheader,nounits").stdout
        (root / "usr/local/nvidia/gpus").write_text(found)

    def tell_names(self, pods: Mapping[str, str]) -> None:
        """Let pods find each other by name: /etc/hosts of each is this file."""
        lines = [f"{self.lab.hosts[node]} {name}\n" for name, node in pods.items()]
        (self.lab.shared / "names").write_text("127.0.0.1 localhost\n" + "".join(lines))

    def start(self, pod: Object, node: str, say: Callable[..., None]) -> Container:
        """Start the container of a pod as its image says."""
        (container,) = pod["spec"]["containers"]
        bundle = self._bundle(node, container["image"])
        config = config_of(Path(f"{bundle}.oci"))
        inside = f"/shared/{bundle.relative_to(self.lab.shared)}/rootfs"
        own = [f"{name}={value}" for name, value in variables_of(pod, node).items()]
        variables = [*config["Env"], *own, *self.variables]
        command = ["/usr/sbin/chroot", inside, *config["Entrypoint"], *container["args"]]
        spaces = ["unshare", "--mount", "--pid", "--fork", "--ipc", "sh", "-euc", ENTER, inside, "/shared/names"]
        return Container([*hosts.enter(self.lab.lab, node), *spaces, *variables, *command], say, self._log(pod))

    def _log(self, pod: Object) -> Path:
        return self.logs / f"{pod['metadata']['name']}.log"

    def processes(self, node: str) -> list[str]:
        """What runs on a node of a test."""
        listing = self.lab.nsenter(node, "ps -ww -eo args").stdout
        return [line for line in listing.splitlines() if re.search(r"in_pod|test_internode|ranks\.py", line)]


def config_of(layout: Path) -> dict[str, Any]:
    """What the one image of a layout says of its containers."""
    (listed,) = json.loads((layout / "index.json").read_bytes())["manifests"]
    manifest = json.loads((layout / f"blobs/{listed['digest'].replace(':', '/')}").read_bytes())
    config = json.loads((layout / f"blobs/{manifest['config']['digest'].replace(':', '/')}").read_bytes())
    return dict(config["config"])


@dataclass
class Place:
    """The cluster with the image in its registry, and the program that is pointed at it."""

    engine: Engine
    api: LiveApi
    cluster: Cluster
    nodes: Nodes
    folder: Path
    image: str
    kubeconfig: Path

    def settings(self, form: str = "job", image: str = "") -> Path:
        path = self.folder / "settings.toml"
        path.write_text(SETTINGS.format(image=image or self.image, form=form))
        return path

    def words(self, settings: Path, *more: str) -> list[str]:
        flags = ["--via=kubernetes", "--for=generic", f"--settings={settings}", f"--kubeconfig={self.kubeconfig}"]
        return [sys.executable, "-m", "invoke", "test", *flags, f"--lock={LOCK}", SIZES, *more]

    def begin(self, settings: Path, *more: str) -> subprocess.Popen[str]:
        """Start a test whose ranks do not come to an end, and return when they run on both nodes."""
        self.nodes.variables, before = HANGS, self.folder_of_run()
        process = subprocess.Popen(
            self.words(settings, *more),
            cwd=ROOT,
            env=self.engine.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_until(lambda: process.poll() is not None or self._both_run(before), "both nodes run")
        assert process.poll() is None, process.communicate()
        return process

    def _both_run(self, before: Path) -> bool:
        """Whether a run after the one `before` has the first lines of the test of each node."""
        folder = self.folder_of_run()
        logs = [folder / f"node-{index}-{node}.log" for index, node in enumerate(NODES)]
        return folder != before and all(log.is_file() and "stand-in" in log.read_text() for log in logs)

    def folder_of_run(self) -> Path:
        """The folder of the newest run."""
        return max((self.folder / "state/deepep-bootstrap/tests").glob("*"), default=Path("/nowhere"))

    def finish(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        out, err = process.communicate()
        assert "Traceback" not in err, err
        found: dict[str, Any] = json.loads(out)
        assert found["exit"] == process.returncode, err
        return found

    def run(self, settings: Path, *more: str) -> dict[str, Any]:
        process = subprocess.Popen(
            self.words(settings, "--json", *more),
            cwd=ROOT,
            env=self.engine.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self.finish(process)

    def made(self) -> list[Object]:
        """What the newest run had the API make; pods are made by its Job."""
        sent = self.api.inside(
            lambda api: [each.data for each in api._requests if each.method.value.upper() == "POST" and each.data]
        )
        run = self.folder_of_run().name
        own = [each for each in sent if (each["metadata"].get("labels") or {}).get(names.RUN) == run]
        return [each for each in own if each["kind"] != "Pod"]

    def left(self) -> list[str]:
        """Names of what is there of what tests make, but for what is being deleted."""
        kinds = ("jobs", "jobsets", "services", "serviceaccounts", "pods")
        there = [each["metadata"] for kind in kinds for each in self.api.objects(kind)]
        return [meta["name"] for meta in there if not meta.get("deletionTimestamp")]

    def is_clean(self, *nodes: str) -> None:
        """Nothing that a test made is on the API server, and nothing of it runs on the nodes."""
        wait_until(lambda: not self.left(), "the API server has nothing of the test")
        for node in nodes or NODES:
            wait_until(lambda node=node: not self.nodes.processes(node), f"nothing of the test runs on {node}")


@pytest.fixture(scope="module")
def place(
    lab: LiveLab, standin_sources: Path, built_entries: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    """A cluster of two nodes, and an image of what a bootstrap of the lab offers, pushed to a registry that both
    reach."""
    lab.reset()
    folder = tmp_path_factory.mktemp("kubernetes")
    engine = Engine(lab, standin_sources, built=built_entries, env={"XDG_STATE_HOME": str(folder / "state")})
    engine.use_built()
    ended = engine.run("bootstrap")
    assert ended.code == OK, ended.text
    make_layout(folder / "base", tar_of_packages((*PACKAGES, "libstdc++6", "libgcc-s1")))
    nodes = Nodes(lab, folder)
    with registry.running(folder / "registry", f"{lab.lab.subnet}.1") as address:
        flags = [f"--out={folder}/image", f"--base={folder}/base", f"--push={address}/team/deepep:v1"]
        pusher = replace(engine, env={**engine.env, "HOME": str(folder / "registry")})
        made = pusher.json("image", *flags, f"--lock={LOCK}")
        assert made["exit"] == OK, made
        with live_api(folder, "deepep") as (api, file):
            cluster = client.connect(kubeconfig=str(file))
            emulated = Emulated(
                api,
                cluster,
                NODES,
                nodes.start,
                nodes.pull,
                {"gpu": "h100"},
                lambda node: bool(lab.boot_id(node)),
                nodes.tell_names,
            )
            with at_work(emulated):
                yield Place(engine, api, cluster, nodes, folder, made["pushed"], file)
            cluster.close()


@pytest.fixture(autouse=True)
def no_faults(place: Place) -> None:
    place.nodes.variables = ()


@pytest.mark.parametrize("form", ["job", "jobset"])
def test_between_two_pods(form: str, place: Place, tmp_path: Path) -> None:
    found = place.run(place.settings(form))
    said = json.dumps(found, indent=1)
    assert found["exit"] == OK, said
    assert (found["verdict"], found["run"]["values"]["nodes"]) == ("passed", "n001,n002"), said
    assert found["command"].startswith(f"{form} deepep-internode-")
    assert found["tests"][0]["ok"]
    assert [rank["rank"] for rank in found["tests"][0]["ranks"]] == [0, 2], "the first rank of each node prints"
    assert {each["host"] for each in found["traffic"]} == set(NODES)
    folder = Path(found["run"]["folder"])
    facts = json.loads((folder / "facts.json").read_text())["hosts"]
    assert {name: len(seen["gpus"]) for name, seen in facts.items()} == dict.fromkeys(NODES, 8)
    log = (folder / "job.log").read_text()
    assert "DEEP_EP_DEVICE_TO_HCA_MAPPING=0:mlx5_" in log, log
    told = place.engine.json("report", str(folder))
    assert (told["verdict"], told["why"]) == (found["verdict"], found["why"])
    place.is_clean()
    assert plain(place.made()) == plain(overlay(place, form, tmp_path))


def overlay(place: Place, form: str, folder: Path) -> list[Object]:
    """What kubectl would apply of the manifests that the same settings give."""
    flags = [f"--settings={place.settings(form)}", f"--out={folder}/manifests", f"--lock={LOCK}"]
    words = [sys.executable, "-m", "invoke", "manifests", "--for=generic", *flags]
    subprocess.run(words, cwd=ROOT, env=place.engine.environment(), capture_output=True, check=True)
    built = [KUBECTL, "kustomize", folder / f"manifests/overlays/internode-{form}"]
    done = subprocess.run(built, capture_output=True, text=True, check=True)
    return [each for each in yaml.safe_load_all(done.stdout) if each["kind"] != "Namespace"]


def plain(objects: list[Object]) -> dict[str, Object]:
    """Objects by kind, without their names and labels, and without what a test has more that is followed: the words
    of whoever runs it, its name and its node for the folder, and two minutes until its deadline."""
    found: dict[str, Object] = {}
    for each in objects:
        own = "" if each["kind"] == "ServiceAccount" else each["metadata"]["name"]
        made = json.loads(json.dumps(each).replace(own, "NAME")) if own else dict(each)
        made["metadata"] = {"namespace": each["metadata"]["namespace"]}
        outer = made.get("spec", {})
        job = outer["replicatedJobs"][0]["template"]["spec"] if each["kind"] == "JobSet" else outer
        if template := job.get("template"):
            followed = template["metadata"]["labels"].pop(names.RUN, "")
            job["activeDeadlineSeconds"] -= 120 if followed else 0
            template["spec"]["serviceAccountName"] = "ACCOUNT"
            (container,) = template["spec"]["containers"]
            container["args"] = container["args"][:2]
            container["env"] = [one for one in container["env"] if one["name"] not in {"DEEPEP_RUN", "DEEPEP_NODE"}]
        found[each["kind"]] = made
    return found


def test_a_pod_that_cannot_be_scheduled(place: Place) -> None:
    taint = {"key": "team", "value": "training", "effect": "NoSchedule"}
    place.cluster.patch("/api/v1/nodes/n002", {"spec": {"taints": [taint]}})
    try:
        found = place.run(place.settings(), "--start-timeout=10")
    finally:
        place.cluster.patch("/api/v1/nodes/n002", {"spec": {"taints": []}})
    assert (found["exit"], found["outcome"]["state"]) == (TROUBLE, "failed")
    wanted = (
        "did not start in 10 s: 1 of 2 pods wait: the nodes that fit have a taint that the pods do not tolerate: "
        "team: training (0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) had untolerated taint"
    )
    assert wanted in found["outcome"]["detail"], "the node of the first pod is no reason"
    place.is_clean()


def test_an_image_that_is_not_there(place: Place) -> None:
    absent = f"{place.image.partition('@')[0]}@sha256:{'40301' * 12}0123"
    found = place.run(place.settings(image=absent))
    assert (found["exit"], found["outcome"]["state"], found["run"]["folder"]) == (TROUBLE, "failed", "")
    detail = found["outcome"]["detail"]
    assert "2 of 2 pods wait: the image is not there (" in detail
    assert "manifest unknown" in detail, "what the registry said"
    place.is_clean()


def test_an_interrupt_ends_what_runs_and_leaves_what_is_of_others(place: Place) -> None:
    other = {"kind": "Service", "metadata": {"name": "other", "labels": {"app.kubernetes.io/name": "deepep"}}}
    place.cluster.create("/api/v1/namespaces/deepep/services", other)
    process = place.begin(place.settings("jobset"))
    assert place.nodes.processes("n001")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == INTERRUPTED, out + err
    wait_until(lambda: place.left() == ["other"], "what it made is gone")
    place.cluster.delete("/api/v1/namespaces/deepep/services/other")
    place.is_clean()
    verdict = json.loads((place.folder_of_run() / "verdict.json").read_text())
    assert verdict["verdict"] == "stopped"


def test_a_node_that_dies(place: Place) -> None:
    """The last one: the node comes back, which takes seconds."""
    process = place.begin(place.settings(), "--json")
    place.engine.lab.power_cut("n002")
    found = place.finish(process)
    assert (found["exit"], found["verdict"]) == (VERDICT, "failed")
    assert re.search(r"n002 does not answer any more: pod deepep-internode-\w+-1-x7k2p is lost", found["why"])
    assert found["nodes"]["failing"] == ["n002"]
    place.is_clean("n001")
    (pod,) = place.api.objects("pods")
    assert pod["spec"]["nodeName"] == "n002", "until its node is back nobody knows that it has ended"
    place.engine.lab.boot("n002")
    wait_until(lambda: not place.api.objects("pods"), "the node that is back has ended it")
