"""Nodes of Kubernetes that wait for a reboot, rebooted one at a time through the cluster's API alone, for nodes that
nobody reaches over SSH: cordoned and drained from here, changed and rebooted by a pod on the node, looked at by its own
pod of node.yaml afterwards, and given back.

The pod is that of the DaemonSet with other arguments, so that nothing runs on a node with more rights than what
prepares it; it may not cordon, and nothing on a node reboots it unasked.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct

from deepep_bootstrap.bootstrap.reboot.pod_drain import PodDrain
from deepep_bootstrap.core.errors import TROUBLE, Problem, Trouble
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.core.text import duration, plain
from deepep_bootstrap.kube import names, nodes, waiting
from deepep_bootstrap.kube.client import Cluster, Object, Refused
from deepep_bootstrap.kube.nodes import Node
from deepep_bootstrap.kube.runs import ClusterRun
from deepep_bootstrap.slurm.nodes import is_of_run

TITLE = "reboot"
NAMESPACE, DAEMON, PREPARE = "kube-system", "deepep-node", "prepare"
"""Where node.yaml of the manifests is, and which of its containers prepares a node."""

BEGINS, CHANGES = "deepep: reboots now", "deepep: to do: "
"""What the pod says before it reboots, and before it changes anything (kubernetes/in_pod.py)."""

START = 300.0
"""Seconds until the pod on an empty node runs: its image is there, since the DaemonSet's pod uses it."""

Tell = Callable[[str, str], None]
"""Where it is told what is done: node, line."""


class NodePolicy(Struct, frozen=True):
    """How nodes are rebooted; times in seconds. `run` names the run in annotations and objects, `settle` is how long a
    node that is back may not be as wanted, `pause` lies between two looks."""

    run: str
    drain_timeout: float = 4 * 3600.0
    boot_timeout: float = 1800.0
    settle: float = 120.0
    pause: float = 3.0


class LeftAloneError(Exception):
    """A node was not changed; the text says why."""


class StoppedError(Exception):
    """A node stays cordoned, and no other is begun; the text says why."""


def find_daemon(cluster: Cluster) -> Object:
    """Return the DaemonSet of node.yaml. Trouble where it is not there, or is of an older version of this program."""
    path = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/{DAEMON}"
    remedy = "invoke manifests with node_system in the settings, then kubectl apply -k on its overlays/cluster"
    try:
        daemon = cluster.get(path)
    except Refused as refused:
        if refused.is_absent:
            what = f"nothing prepares its nodes: there is no DaemonSet {DAEMON} in {NAMESPACE}"
            raise Trouble(Problem(cluster.context, what, try_=remedy)) from None
        raise
    _prepare_container(daemon, remedy)
    return daemon


def _prepare_container(daemon: Object, remedy: str = "") -> Object:
    for container in daemon["spec"]["template"]["spec"].get("initContainers") or ():
        if container.get("name") == PREPARE and (container.get("args") or [""])[0] == "node":
            found: Object = container
            return found
    raise Trouble(Problem(f"DaemonSet {DAEMON}", f"has no container {PREPARE} as this version has it", try_=remedy))


def reboot_pod(daemon: Object, node: Node, name: str) -> Object:
    """Return the pod that changes and reboots a node: the one that prepares nodes, told so, without its account."""
    spec = copy.deepcopy(daemon["spec"]["template"]["spec"])
    container = copy.deepcopy(_prepare_container(daemon))
    container["name"], container["args"] = TITLE, ["reboot-node", node.boot_id, *container["args"][1:]]
    container["env"] = []
    scripts = [volume for volume in spec.get("volumes") or () if "configMap" in volume]
    kept = {volume["name"] for volume in scripts}
    container["volumeMounts"] = [mount for mount in container.get("volumeMounts") or () if mount["name"] in kept]
    for key in ("initContainers", "serviceAccountName", "serviceAccount", "nodeSelector", "affinity"):
        spec.pop(key, None)
    spec |= {"containers": [container], "volumes": scripts, "nodeName": node.name, "restartPolicy": "Never"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def waiting_nodes(found: Sequence[Node]) -> list[Node]:
    """Return the nodes that wait for a reboot, those first that an earlier run left cordoned."""
    pending = [node for node in found if node.state_now == names.PENDING]
    return sorted(pending, key=lambda node: (not node.reason, node.name))


def to_give_back(found: Sequence[Node]) -> dict[str, str]:
    """Return the nodes that an earlier run left cordoned and that are as wanted, with its reasons."""
    return {
        node.name: node.reason
        for node in found
        if node.cordoned and node.reason and node.ready and node.state_now == names.READY
    }


def reboot_nodes(
    cluster: Cluster, daemon: Object, found: Sequence[Node], policy: NodePolicy, tell: Tell
) -> tuple[Outcome, ...]:
    """Reboot nodes, one after the other; return the outcome of each. What goes wrong after a change leaves its node
    cordoned with the reason, and no other is begun. ^C leaves a node that is out of use so, and says it."""
    outcomes: list[Outcome] = []
    stopped = ""
    for node in found:
        began = time.monotonic()
        state, detail = "skipped", f"not started: {stopped}"
        if not stopped:
            one = _NodeReboot(cluster, daemon, node, found, policy, tell)
            try:
                state, detail = "done", one.run()
            except LeftAloneError as left:
                state, detail = "skipped", str(left)
            except StoppedError as problem:
                state, detail = "failed", str(problem)
                stopped = f"{node.name} {detail}"
        tell(node.name, detail)
        code = 0 if state == "done" else TROUBLE
        outcomes.append(Outcome(TITLE, node.name, state, detail, time.monotonic() - began, code))
    return tuple(outcomes)


class _NodeReboot:
    """The reboot of one node; `wave` are all nodes that this run reboots, as they were when it began."""

    def __init__(
        self, cluster: Cluster, daemon: Object, node: Node, wave: Sequence[Node], policy: NodePolicy, tell: Tell
    ) -> None:
        self._cluster, self._daemon, self._node = cluster, daemon, node
        self._number = [each.name for each in wave].index(node.name)
        self._left = {each.name: each.reason for each in wave if each.reason}
        self._policy, self._tell = policy, tell
        self._drain = PodDrain(cluster, node.name, policy.run)

    def run(self) -> str:
        """Reboot the node; return what is to be said of it."""
        try:
            self._free()
        except (LeftAloneError, Trouble) as problem:
            self._put_back(str(problem))
            raise LeftAloneError(str(problem)) from None
        except BaseException:
            self._say_what_stays()
            raise
        try:
            self._await_wanted(self._reboot())
        except Trouble as trouble:
            first = trouble.problems[0]
            why = f"{first.what}: {first.found}" if first.found else first.what
            self._drain.leave(why)
            raise StoppedError(f"{why}; stays cordoned") from None
        except BaseException:
            self._say_what_stays()
            raise
        try:
            stays = self._drain.bring_back()
        except Trouble as trouble:
            raise StoppedError(f"was rebooted and is as wanted, and could not be given back: {trouble}") from None
        return f"rebooted: {self._node.wanting or 'as wanted now'}; {stays or 'back in use'}"

    def _free(self) -> None:
        """Return when the node is ours and empty; LeftAloneError where it must not be."""
        now = nodes.read(self._cluster, self._node.name)
        if now.state_now != names.PENDING or now.boot_id != self._node.boot_id:
            raise LeftAloneError(f"does not wait for a reboot any more: {now.state_now or 'it is being looked at'}")
        if not now.ready:
            raise LeftAloneError("kubelet does not say that it is ready")
        if now.cordoned and not now.reason:
            raise LeftAloneError("somebody has cordoned it")
        if now.cordoned and now.reason != self._node.reason:
            raise LeftAloneError(f"another run keeps it out of use now: {now.reason}")
        self._check_alone()
        if keeping := self._drain.departure().keeping:
            raise LeftAloneError(f"left alone: {keeping[0]}")
        self._drain.take_out(f"reboot for {self._node.wanting}")
        self._check_alone()  # another run may have begun at the same time
        self._empty()

    def _check_alone(self) -> None:
        """Raise LeftAloneError where another run has nodes out of use: one that is at work, or left nodes behind that
        are no part of this one."""
        others = {
            name: reason
            for name, reason in nodes.look(self._cluster, {}).cordoned.items()
            if name != self._node.name and not is_of_run(reason, self._policy.run) and self._left.get(name) != reason
        }
        if others:
            raise LeftAloneError(f"waits: {fold(others)} is cordoned by another run ({next(iter(others.values()))})")

    def _empty(self) -> None:
        """Return when no pod is on the node that would be ended."""
        end, told = time.monotonic() + self._policy.drain_timeout, ""
        while True:
            if taken := self._drain.lost():
                raise LeftAloneError(taken)
            departure = self._drain.departure()
            if departure.keeping:
                raise LeftAloneError(f"left alone: {departure.keeping[0]}")
            waits = self._drain.evict(departure)
            if not waits:
                return
            if waits != told:
                told = waits
                self._tell(self._node.name, f"waits for {waits}")
            if time.monotonic() > end:
                raise LeftAloneError(f"not empty after {duration(self._policy.drain_timeout)}: {waits}")
            time.sleep(self._policy.pause)

    def _put_back(self, why: str) -> None:
        """Leave the node as it was found; StoppedError where that cannot be done."""
        try:
            self._drain.put_back()
        except Trouble as trouble:
            raise StoppedError(f"{why}; stays cordoned: {trouble}") from None

    def _say_what_stays(self) -> None:
        if self._drain.ours:
            self._tell(self._node.name, f"stays cordoned ({self._drain.ours}): the next run goes on from there")

    def _reboot(self) -> str:
        """Let the pod change and reboot the node; return the id of the boot that the node is in then."""
        run = ClusterRun(self._cluster, NAMESPACE, self._policy.run)
        # A name of its own on each node: what the pod of another node said must not be taken for this one's.
        name = f"deepep-reboot-{self._policy.run.rpartition('-')[2]}-{self._number}"
        try:
            run.make([reboot_pod(self._daemon, self._node, name)])
        except Trouble as trouble:
            self._put_back(str(trouble))
            raise StoppedError(f"not rebooted: {trouble}") from None
        try:
            self._tell(self._node.name, "empty; is changed and rebooted")
            self._follow(run)
            # The pod is not taken away before: it may be about to reboot the node.
            return self._await_boot()
        finally:
            for problem in run.remove():
                self._tell(self._node.name, str(problem))

    def _follow(self, run: ClusterRun) -> None:
        """Return when the pod has said that it reboots the node, or the node is in another boot. A pod that ends
        otherwise has not rebooted it: StoppedError, and the node is as before where nothing was changed."""
        start, end = time.monotonic() + START, time.monotonic() + self._policy.boot_timeout
        for pod, said in self._looks(run):
            if pod is None or BEGINS in said:
                return
            phase = str((pod.get("status") or {}).get("phase") or "")
            over, late = phase in {"Succeeded", "Failed"}, time.monotonic() > end
            if not over and not late and (phase == "Running" or time.monotonic() < start):
                continue
            why = _last_words(said) or _why(pod, run) or phase or "kubelet says nothing of its pod"
            if CHANGES in said:
                raise Trouble(Problem(self._node.name, "was changed and not rebooted", why))
            self._put_back(why)
            raise StoppedError(f"not rebooted: {why}")

    def _looks(self, run: ClusterRun) -> Iterator[tuple[Object | None, str]]:
        """Yield the pod and what it said so far, again and again; None for it when the node is in another boot. While
        the API does not answer, or kubelet does not hand out the log, there is nothing to see."""
        while True:
            try:
                if nodes.read(self._cluster, self._node.name).boot_id != self._node.boot_id:
                    yield None, ""
                    return
                for pod in run.pods():
                    yield pod, self._log(run, pod)
            except Trouble as trouble:
                if not trouble.may_pass:
                    raise
            time.sleep(self._policy.pause)

    def _log(self, run: ClusterRun, pod: Object) -> str:
        """Return what the pod said; "" where kubelet does not answer, or the pod does not run yet."""
        path = f"/api/v1/namespaces/{run.namespace}/pods/{pod['metadata']['name']}/log"
        try:
            return "\n".join(run.cluster.lines(path, container=TITLE))
        except Trouble:
            return ""

    def _await_boot(self) -> str:
        """Return the id of the boot that the node is in after this one. Raises Trouble."""
        end = time.monotonic() + self._policy.boot_timeout
        while time.monotonic() < end:
            try:
                boot = nodes.read(self._cluster, self._node.name).boot_id
                if boot and boot != self._node.boot_id:
                    return boot
            except Trouble as trouble:
                if not trouble.may_pass:
                    raise
            time.sleep(self._policy.pause)
        what = f"did not come back in {duration(self._policy.boot_timeout)}"
        raise Trouble(Problem(self._node.name, what, try_="its console"))

    def _await_wanted(self, boot: str) -> None:
        """Return when kubelet is ready in this boot, and the node's own pod found it as wanted. Raises Trouble."""
        end, settled, lacks = time.monotonic() + self._policy.boot_timeout, 0.0, ""
        while time.monotonic() < end:
            lacks, state, wanting = self._what_lacks(boot)
            if not lacks and state == names.READY:
                return
            if not lacks and state in {names.PENDING, names.FAILED}:
                settled = settled or time.monotonic() + self._policy.settle
                if time.monotonic() > settled:
                    raise Trouble(Problem(self._node.name, "came back without what was wanted", wanting))
            lacks = lacks or f"its pod of {DAEMON} has not found it as wanted yet"
            time.sleep(self._policy.pause)
        raise Trouble(Problem(self._node.name, "came back", lacks))

    def _what_lacks(self, boot: str) -> tuple[str, str, str]:
        """Return what Kubernetes lacks of the node in this boot ("" for nothing), its state and the words with it."""
        try:
            lacks = self._drain.missing(boot)
            now = nodes.read(self._cluster, self._node.name)
        except Trouble as trouble:
            if not trouble.may_pass:
                raise
            return trouble.problems[0].what, "", ""
        return lacks, now.state_now, now.wanting


def _last_words(said: str) -> str:
    """Return the last lines that the pod said of itself."""
    own = [line.removeprefix("deepep: ") for line in said.splitlines() if line.startswith("deepep: ")]
    return plain("; ".join(own[-3:]))[:400]


def _why(pod: Object, run: ClusterRun) -> str:
    """Return what the API says of a pod that does not run, "" for nothing."""
    found = waiting.explain([pod], run.events([pod]), 1)
    return found.text if found else ""


def states(found: Sequence[Node]) -> Mapping[str, list[Node]]:
    """Return the nodes by their state, in the order in which one looks at them; "" for those of which nothing is known
    in their present boot."""
    by_state: dict[str, list[Node]] = {state: [] for state in (*reversed(names.STATES), "")}
    for node in found:
        by_state[node.state_now if node.state_now in by_state else ""].append(node)
    return {state: each for state, each in by_state.items() if each}
