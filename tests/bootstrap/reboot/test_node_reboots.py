"""Nodes of Kubernetes rebooted without SSH, over real HTTP: each pod on a node is a real process of the image's entry
point, whose recipes are of the test, and which ends with its node.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from deepep_bootstrap.bootstrap.reboot import node_reboots
from deepep_bootstrap.bootstrap.reboot.node_reboots import NodePolicy, reboot_nodes, reboot_pod
from deepep_bootstrap.cli.commands import nodes as command
from deepep_bootstrap.core.errors import INTERRUPTED, OK, TROUBLE, Trouble
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.kube import client, names, nodes
from deepep_bootstrap.kube.client import Cluster, Object
from tests.support.e2e import wait_until
from tests.support.kube_api import LiveApi, live_api, make_node, make_pod, refusal
from tests.support.kube_cluster import Emulated, at_work
from tests.support.paths import ROOT

pytestmark = pytest.mark.usefixtures("programs")
POLICY = NodePolicy("20261123T013000Z-nodes-1a2b3c", drain_timeout=30, boot_timeout=30, settle=0.2, pause=0.02)
PODS = "/api/v1/namespaces/moe/pods"
WANTING = "driver-options: todo: found inactive; wanted active"
RECIPES = """\
for name in ${RECIPES}; do
    echo "recipe=${name}"
    [ "${VERB}" = check ] || [ -e "PLACE/broken" ] || touch "PLACE/done"
    if [ -e "PLACE/done" ]; then echo state=reboot; else echo state=todo; echo needs=reboot; fi
    echo found=inactive; echo wanted=active
done
"""
"""Recipes that are done only with a reboot, where nothing is broken."""

PROGRAM = """\
import sys
from deepep_bootstrap.kubernetes import in_pod
in_pod.enter_node = lambda: None
in_pod.slurm_processes = lambda: ""
in_pod.BOOT_ID, in_pod.REBOOT = sys.argv[1], ("touch", sys.argv[2])
sys.exit(in_pod.main(sys.argv[3:]))
"""


@dataclass
class Machines:
    """The machines below the nodes: each has a boot, and its pod of node.yaml looks at it when it is back. `after` is
    what that pod finds then, and `returns` whether they come back at all."""

    live: LiveApi
    folder: Path
    after: str = names.READY
    returns: bool = True
    broken: bool = False
    booted: list[str] = field(default_factory=list)
    cordoned_then: list[list[str]] = field(default_factory=list)

    def start(self, pod: Object, node: str, say: Callable[..., None]) -> Machine:
        return Machine(self, pod, node, say)

    def boot(self, name: str) -> None:
        """A machine is off, and on again."""
        self.booted.append(name)
        raws = {each["metadata"]["name"]: each for each in self.live.objects("nodes")}
        self.cordoned_then.append(
            sorted(each for each, raw in raws.items() if raw.get("spec", {}).get("unschedulable"))
        )
        if self.returns:
            boot = f"{raws[name]['status']['nodeInfo']['bootID']}+"
            self.live.inside(lambda api: look_at(raws[name], boot, self.after))


def look_at(raw: Object, boot: str, state: str) -> None:
    """What kubelet and the pod of node.yaml write when a node is back."""
    raw["status"]["nodeInfo"]["bootID"] = boot
    raw["metadata"].setdefault("labels", {})[names.STATE] = state
    raw["metadata"].setdefault("annotations", {})[names.STATE_BOOT] = boot
    about = {"type": names.CONDITION, "status": str(state == names.READY), "message": "as wanted"}
    if state != names.READY:
        about["message"] = WANTING
    raw["status"]["conditions"] = [each for each in raw["status"]["conditions"] if each["type"] == "Ready"] + [about]


class Machine:
    """The pod that reboots a machine, as a process; the machine takes it along."""

    def __init__(self, machines: Machines, pod: Object, node: str, say: Callable[..., None]) -> None:
        self._machines, self._node, self._say = machines, node, say
        place = machines.folder / node
        place.mkdir(exist_ok=True)
        raw = next(each for each in machines.live.objects("nodes") if each["metadata"]["name"] == node)
        (place / "boot").write_text(raw["status"]["nodeInfo"]["bootID"])
        (place / "node.sh").write_text(RECIPES.replace("PLACE", str(place)))
        if machines.broken:
            (place / "broken").touch()
        args = pod["spec"]["containers"][0]["args"]
        words = [each.replace("/etc/deepep/node.sh", str(place / "node.sh")) for each in args]
        self._off = place / "off"
        argv = [sys.executable, "-c", PROGRAM, str(place / "boot"), str(self._off), *words]
        self._process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._say(line.rstrip("\n"))

    def poll(self) -> int | None:
        if self._off.exists() and self._process.poll() is None:
            self._off.unlink()
            self.terminate()
            self._machines.boot(self._node)
        code = self._process.poll()
        if code is not None:
            self._reader.join()
        return code

    def terminate(self) -> None:
        self._process.kill()
        self._process.wait()


def daemon() -> Object:
    """The DaemonSet as it is rendered."""
    text = (ROOT / "tests/golden/kubernetes/gke-a4/overlays/cluster/node.yaml").read_text()
    found: Object = yaml.safe_load(text)
    return found


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[LiveApi, Cluster, Machines]]:
    with live_api(tmp_path, "moe", "kube-system") as (api, file):
        cluster = client.connect(kubeconfig=str(file))
        cluster.create("/apis/apps/v1/namespaces/kube-system/daemonsets", daemon())
        for name in ("gpu-a", "gpu-b"):
            add_node(cluster, name)
        machines = Machines(api, tmp_path)
        with at_work(Emulated(api, cluster, ("gpu-a", "gpu-b"), machines.start)):
            yield api, cluster, machines
        cluster.close()


def add_node(cluster: Cluster, name: str, state: str = names.PENDING) -> None:
    raw = make_node(name, f"boot-of-{name}")
    look_at(raw, f"boot-of-{name}", state)
    cluster.create(nodes.NODES, raw)


def run(cluster: Cluster, lines: list[str] | None = None, **policy: float) -> dict[str, Outcome]:
    """Reboot what waits; the outcomes by node."""
    said: list[str] = [] if lines is None else lines
    found = node_reboots.waiting_nodes([nodes.read_node(each) for each in cluster.all(nodes.NODES)])
    told = reboot_nodes(
        cluster,
        node_reboots.find_daemon(cluster),
        found,
        replace(POLICY, **policy),
        lambda node, line: said.append(f"{node}: {line}"),
    )
    return {each.host: each for each in told}


def alive(api: LiveApi) -> list[str]:
    """The pods of kube-system that are there."""
    return [pod["metadata"]["name"] for pod in api.objects("pods") if pod["metadata"]["namespace"] == "kube-system"]


def test_the_pod_is_that_which_prepares_nodes_told_to_reboot_one() -> None:
    pod = reboot_pod(daemon(), nodes.Node("gpu-a", "b1"), "deepep-reboot-1a2b3c")
    import kubernetes_validate  # takes a second, and few need it

    kubernetes_validate.validate(pod, "1.34", strict=True)
    spec = pod["spec"]
    (container,) = spec["containers"]
    assert container["args"][:3] == ["reboot-node", "b1", "/etc/deepep/node.sh"]
    assert container["args"][3:] == ["nvidia-driver", "doca-ofed", "driver-options", "peer-memory"]
    assert (spec["nodeName"], spec["hostPID"], spec["automountServiceAccountToken"]) == ("gpu-a", True, False)
    assert [volume["name"] for volume in spec["volumes"]] == ["script"], "no account on a node that is rebooted"
    assert "serviceAccountName" not in spec
    assert container["image"] == daemon()["spec"]["template"]["spec"]["initContainers"][0]["image"]


def test_nodes_are_rebooted_one_after_the_other(live: tuple[LiveApi, Cluster, Machines]) -> None:
    api, cluster, machines = live
    cluster.create(PODS, make_pod("web", "gpu-a", "ReplicaSet"))
    cluster.create(PODS, make_pod("plugin", "gpu-a", "DaemonSet"))
    add_node(cluster, "gpu-c", names.READY)
    lines: list[str] = []
    outcomes = run(cluster, lines)
    assert [(each.host, each.state, each.code) for each in outcomes.values()] == [
        ("gpu-a", "done", OK),
        ("gpu-b", "done", OK),
    ], lines
    assert machines.booted == ["gpu-a", "gpu-b"]
    assert machines.cordoned_then == [["gpu-a"], ["gpu-b"]], "the second one waits for the first"
    for raw in api.objects("nodes"):
        node = nodes.read_node(raw)
        assert (node.cordoned, node.reason, node.state_now) == (False, "", names.READY)
    assert outcomes["gpu-a"].detail == f"rebooted: {WANTING}; back in use"
    assert {pod["metadata"]["name"] for pod in api.objects("pods")} == {"plugin"}
    assert not alive(api)


def test_a_budget_that_refuses_leaves_the_node_as_it_was(live: tuple[LiveApi, Cluster, Machines]) -> None:
    api, cluster, machines = live
    cluster.create(PODS, make_pod("web", "gpu-a", "ReplicaSet"))
    path = f"POST {PODS}/web/eviction"
    api.inside(lambda each: each.refusals.update({path: refusal(429, "Cannot evict pod", "TooManyRequests")}))
    lines: list[str] = []
    outcomes = run(cluster, lines, drain_timeout=0.3)
    assert (outcomes["gpu-a"].state, outcomes["gpu-a"].code) == ("skipped", TROUBLE)
    assert "pod moe/web (the budget of moe/web does not allow it now)" in outcomes["gpu-a"].detail
    assert lines[0] == "gpu-a: waits for pod moe/web (the budget of moe/web does not allow it now)"
    assert outcomes["gpu-b"].state == "done", "it waits for nobody's budget"
    assert machines.booted == ["gpu-b"]
    assert nodes.read(cluster, "gpu-a").cordoned is False
    assert [pod["metadata"]["name"] for pod in api.objects("pods")] == ["web"]


@pytest.mark.parametrize(
    ("owner", "told"), [("Job", "not empty after 1s: pod moe/work"), ("", "controlled by nothing")]
)
def test_work_that_would_be_lost_keeps_the_node(owner: str, told: str, live: tuple[LiveApi, Cluster, Machines]) -> None:
    api, cluster, machines = live
    cluster.create(PODS, make_pod("work", "gpu-a", owner))
    outcomes = run(cluster, drain_timeout=1)
    assert outcomes["gpu-a"].state == "skipped"
    assert told.replace("1s", "1 s") in outcomes["gpu-a"].detail
    assert (machines.booted, nodes.read(cluster, "gpu-a").cordoned) == (["gpu-b"], False)
    assert [pod["metadata"]["name"] for pod in api.objects("pods")] == ["work"]


def test_what_somebody_else_has_out_of_use_is_left_alone(live: tuple[LiveApi, Cluster, Machines]) -> None:
    _, cluster, machines = live
    cluster.patch(f"{nodes.NODES}/gpu-a", {"spec": {"unschedulable": True}})
    assert run(cluster)["gpu-a"].detail == "somebody has cordoned it"
    assert (machines.booted, nodes.read(cluster, "gpu-a").cordoned) == (["gpu-b"], True)


def test_nothing_is_begun_while_another_run_has_a_node_out_of_use(live: tuple[LiveApi, Cluster, Machines]) -> None:
    _, cluster, machines = live
    left = "deepep-bootstrap: came back without what was wanted (run other)"
    cluster.create(nodes.NODES, make_node("gpu-c", "b3", cordoned=left))
    outcomes = run(cluster)
    assert {each.state for each in outcomes.values()} == {"skipped"}
    assert outcomes["gpu-a"].detail == f"waits: gpu-c is cordoned by another run ({left})"
    assert machines.booted == []
    assert not nodes.read(cluster, "gpu-a").cordoned


def test_a_run_that_begins_at_the_same_time_is_not_joined(live: tuple[LiveApi, Cluster, Machines]) -> None:
    _, cluster, machines = live
    found = [nodes.read_node(each) for each in cluster.all(nodes.NODES)]
    theirs = "deepep-bootstrap: reboot for x (run other)"
    nodes.cordon(cluster, nodes.read(cluster, "gpu-a"), theirs)
    told = reboot_nodes(cluster, node_reboots.find_daemon(cluster), found, POLICY, lambda node, line: None)
    assert [each.detail for each in told] == [
        f"another run keeps it out of use now: {theirs}",
        f"waits: gpu-a is cordoned by another run ({theirs})",
    ]
    assert (machines.booted, nodes.read(cluster, "gpu-a").reason) == ([], theirs)


def test_a_node_that_is_not_as_wanted_stays_cordoned_and_stops_the_rest(
    live: tuple[LiveApi, Cluster, Machines],
) -> None:
    api, cluster, machines = live
    machines.after = names.FAILED
    outcomes = run(cluster)
    assert outcomes["gpu-a"].state == "failed"
    assert outcomes["gpu-a"].detail == f"came back without what was wanted: {WANTING}; stays cordoned"
    assert outcomes["gpu-b"].detail.startswith("not started: gpu-a came back without what was wanted")
    node = nodes.read(cluster, "gpu-a")
    assert (node.cordoned, "came back without what was wanted" in node.reason) == (True, True)
    assert machines.booted == ["gpu-a"]
    assert not alive(api)
    # Somebody mends it, its own pod sees it, and the next run gives it back.
    (raw,) = (each for each in api.objects("nodes") if each["metadata"]["name"] == "gpu-a")
    api.inside(lambda _: look_at(raw, raw["status"]["nodeInfo"]["bootID"], names.READY))
    assert node_reboots.to_give_back([nodes.read(cluster, "gpu-a")]) == {"gpu-a": node.reason}


def test_a_node_that_does_not_come_back_stays_cordoned(live: tuple[LiveApi, Cluster, Machines]) -> None:
    _, cluster, machines = live
    machines.returns = False
    outcomes = run(cluster, boot_timeout=1.0)
    assert outcomes["gpu-a"].detail == "did not come back in 1 s; stays cordoned"
    assert nodes.read(cluster, "gpu-a").cordoned
    assert outcomes["gpu-b"].state == "skipped"


def test_a_change_that_fails_reboots_nothing(live: tuple[LiveApi, Cluster, Machines]) -> None:
    api, cluster, machines = live
    machines.broken = True
    outcomes = run(cluster)
    assert outcomes["gpu-a"].state == "failed"
    assert outcomes["gpu-a"].detail.startswith("was changed and not rebooted: ")
    assert "not rebooted: nvidia-driver, doca-ofed, driver-options, peer-memory could not be done" in (
        outcomes["gpu-a"].detail
    )
    assert (machines.booted, nodes.read(cluster, "gpu-a").cordoned) == ([], True)
    assert not alive(api)


def test_a_cluster_that_takes_no_such_pod_leaves_the_node_in_use(live: tuple[LiveApi, Cluster, Machines]) -> None:
    api, cluster, machines = live
    words = "pods is forbidden: may not create pods in kube-system"
    api.inside(lambda each: each.refusals.update({"POST /api/v1/namespaces/kube-system/pods": refusal(403, words)}))
    outcomes = run(cluster)
    assert outcomes["gpu-a"].state == "failed"
    assert words in outcomes["gpu-a"].detail
    assert (machines.booted, nodes.read(cluster, "gpu-a").cordoned) == ([], False)


def test_a_cluster_without_the_daemon_set_is_refused(tmp_path: Path) -> None:
    with live_api(tmp_path, "kube-system") as (_, file):
        cluster = client.connect(kubeconfig=str(file))
        with pytest.raises(Trouble, match=r"there is no DaemonSet deepep-node in kube-system.*Try: invoke manifests"):
            node_reboots.find_daemon(cluster)
        cluster.close()


def invoked(live: tuple[LiveApi, Cluster, Machines], *words: str) -> list[str]:
    file = live[2].folder / "kubeconfig"
    return [sys.executable, "-m", "invoke", "nodes", f"--kubeconfig={file}", *words]


def test_the_verb_shows_asks_and_says_what_it_did(
    live: tuple[LiveApi, Cluster, Machines], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api, cluster, machines = live
    monkeypatch.setattr(command, "NodePolicy", lambda run, **times: NodePolicy(run, pause=POLICY.pause, **times))

    def document(**flags: Any) -> dict[str, Any]:
        own = {key: flags.pop(key) for key in ("reboot",) if key in flags}
        kubeconfig = str(machines.folder / "kubeconfig")
        code = command.nodes(Flags(ROOT, json=True, **flags), kubeconfig=kubeconfig, **own)
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert found["exit"] == code
        return found

    seen = document()
    assert {name: each["state"] for name, each in seen["nodes"].items()} == dict.fromkeys(
        ("gpu-a", "gpu-b"), names.PENDING
    )
    assert (seen["exit"], seen["outcomes"], seen["nodes"]["gpu-a"]["why"]) == (OK, [], WANTING)
    unasked = document(reboot="rolling")
    assert (unasked["exit"], unasked["errors"][0]["try"]) == (TROUBLE, "the same command with --yes")
    assert document(reboot="rolling", dry_run=True)["outcomes"] == []
    assert machines.booted == []
    assert not [asked for asked in api.asked() if asked.startswith("PATCH") and "/nodes/" in asked]
    done = document(reboot="rolling", yes=True, limit="gpu-b")
    assert [(each["host"], each["state"]) for each in done["outcomes"]] == [("gpu-b", "done")]
    assert done["nodes"]["gpu-b"]["state"] == names.READY
    nodes.cordon(cluster, nodes.read(cluster, "gpu-b"), "deepep-bootstrap: x (run earlier)")
    back = document(reboot="rolling", yes=True, limit="gpu-b")
    assert [(each["step"], each["host"], each["state"]) for each in back["outcomes"]] == [("uncordon", "gpu-b", "done")]
    assert machines.booted == ["gpu-b"]
    with pytest.raises(Trouble, match="--reboot: unknown value for nodes — found all"):
        command.nodes(Flags(ROOT), reboot="all")


def test_an_interrupt_leaves_the_node_to_the_next_run(live: tuple[LiveApi, Cluster, Machines]) -> None:
    _, cluster, machines = live
    cluster.create(PODS, make_pod("work", "gpu-a", "Job"))
    process = subprocess.Popen(
        invoked(live, "--reboot=rolling", "--yes"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "400"},
    )
    wait_until(lambda: nodes.read(cluster, "gpu-a").cordoned, "the node is cordoned")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode == INTERRUPTED, out
    node = nodes.read(cluster, "gpu-a")
    assert (node.cordoned, machines.booted) == (True, [])
    assert f"gpu-a: stays cordoned ({node.reason}): the next run goes on from there" in out
    cluster.delete(f"{PODS}/work")
    assert {name: each.state for name, each in run(cluster).items()} == {"gpu-a": "done", "gpu-b": "done"}
    assert not nodes.read(cluster, "gpu-a").cordoned
