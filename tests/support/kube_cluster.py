"""What the controllers, the scheduler and the kubelets of a cluster do for Jobs and JobSets, beside the emulated API:
the objects, labels, conditions and events that the real ones make, in their words. A container is run by the test.

After kubernetes 1.34 (pkg/controller/job, pkg/scheduler, pkg/kubelet, pkg/controller/nodelifecycle) and jobset 0.8
(pkg/controllers/jobset_controller.go): no retries, no second start of a container, no eviction.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.kube import names
from deepep_bootstrap.kube.client import Cluster, Object
from tests.support.kube_api import Api, LiveApi

TICK = 0.05
GPUS = "8"
"""Of each node."""

TRACKING = "batch.kubernetes.io/job-tracking"
"""The finalizer by which a pod of a Job stays until its end was seen."""

KINDS = ("jobsets", "jobs", "services", "pods", "nodes")
PATHS = {"jobsets": "/apis/jobset.x-k8s.io/v1alpha2", "jobs": "/apis/batch/v1"}
OVER = ("Succeeded", "Failed")
UNREACHABLE = {"key": "node.kubernetes.io/unreachable", "effect": "NoSchedule"}


class Container(Protocol):
    """A container that runs."""

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""

    def terminate(self) -> None:
        """End it."""


Start = Callable[[Object, str, Callable[..., None]], Container]
"""Starts the container of a pod on a node; lines that it prints go to the callback."""

Pull = Callable[[str, str], str]
"""Has a node fetch an image; returns "" or why it could not, in the words of its container runtime."""


@dataclass
class Emulated:
    """One cluster. Its nodes are objects of the API with `labels` and eight GPUs each; `is_on` says whether the machine
    of one runs. Without `pull` every image is on all nodes. `names_changed` is told the names of the pods that headless
    Services give, with their nodes."""

    live: LiveApi
    cluster: Cluster
    nodes: Sequence[str]
    start: Start
    pull: Pull | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    is_on: Callable[[str], bool] = lambda _: True
    names_changed: Callable[[Mapping[str, str]], None] = lambda _: None
    containers: dict[str, Container] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    unnoticed: set[str] = field(default_factory=set)
    errors: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._pulls: dict[str, Future[str]] = {}
        self._lost: set[str] = set()
        self._names: dict[str, str] = {}
        self._pool = ThreadPoolExecutor(4, "kubelet")
        there = {node["metadata"]["name"] for node in self.live.objects("nodes")}
        for name in self.nodes:
            if name not in there:
                self.cluster.create("/api/v1/nodes", self._node(name))

    def _node(self, name: str) -> Object:
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": {names.HOSTNAME: name, **self.labels}},
            "spec": {},
            "status": {"allocatable": {names.NVIDIA_GPU: GPUS}, "conditions": [{"type": "Ready", "status": "True"}]},
        }

    def work(self, ends: threading.Event) -> None:
        """Do what there is to do until `ends`."""
        while not ends.wait(TICK):
            try:
                self._tick()
            except Trouble:
                continue
            except BaseException as error:
                self.errors.append(error)
                raise

    def end(self) -> None:
        """End what still runs, and the logs that are followed."""
        for container in self.containers.values():
            stop(container)
        self._pool.shutdown(cancel_futures=True)
        self.live.inside(lambda api: api.running.clear())

    def _tick(self) -> None:
        there = self._look()
        self._collect_garbage(there)
        for jobset in there["jobsets"]:
            self._control_jobset(jobset, there)
        for job in there["jobs"]:
            self._control_job(job, owned(job, there["pods"]))
        self._watch_nodes(there)
        there = self._look()
        self._tell_names(there)
        for pod in there["pods"]:
            self._place_or_run(pod)
        for uid in self.containers.keys() - {pod["metadata"]["uid"] for pod in there["pods"]}:
            stop(self.containers.pop(uid))

    def _look(self) -> dict[str, list[Object]]:
        def read(api: Api) -> dict[str, list[Object]]:
            found: dict[str, list[Object]] = {kind: [] for kind in KINDS}
            for (resource, _, _), each in api.objects.items():
                if resource.plural in found and not each.deleted:
                    found[resource.plural].append(each.raw)
            return found

        looked: dict[str, list[Object]] = self.live.inside(read)
        return looked

    # The garbage collector.

    def _collect_garbage(self, there: Mapping[str, list[Object]]) -> None:
        uids = {each["metadata"].get("uid") for kind in KINDS for each in there[kind]}
        for kind in ("jobs", "services", "pods"):
            for each in there[kind]:
                meta = each["metadata"]
                # An owner without uid is a controller that is not emulated: what it has stays.
                owners = [one for one in meta.get("ownerReferences") or [] if "uid" in one]
                if owners and not meta.get("deletionTimestamp") and not any(one["uid"] in uids for one in owners):
                    self.cluster.delete(path_of(kind, meta))

    # The JobSet controller.

    def _control_jobset(self, jobset: Object, there: Mapping[str, list[Object]]) -> None:
        spec, meta = jobset["spec"], jobset["metadata"]
        status = jobset.get("status") or {}
        if status.get("terminalState") or spec.get("suspend"):
            return
        jobs = {job["metadata"]["name"]: job for job in owned(jobset, there["jobs"])}
        self._make_service(jobset, there["services"])
        for replicated in spec["replicatedJobs"]:
            for index in range(replicated.get("replicas", 1)):
                if f"{meta['name']}-{replicated['name']}-{index}" not in jobs:
                    self.cluster.create(path_of("jobs", meta, ""), child_job(jobset, replicated, index))
        if not status:
            self._patch("jobsets", jobset, status={"restarts": 0})
        ended = {name: condition(job, "Complete", "Failed") for name, job in jobs.items()}
        if failed := [name for name, type_ in ended.items() if type_ == "Failed"]:
            # Without failurePolicy.rules, maxRestarts: 0.
            words = f"jobset failed due to reaching max number of restarts (first failed job: {failed[0]})"
            self._finish("jobsets", jobset, "Failed", "ReachedMaxRestarts", words)
        elif jobs and all(type_ == "Complete" for type_ in ended.values()):
            self._finish("jobsets", jobset, "Completed", "AllJobsCompleted", "jobset completed successfully")

    def _make_service(self, jobset: Object, services: Sequence[Object]) -> None:
        meta, network = jobset["metadata"], jobset["spec"].get("network") or {}
        name = network.get("subdomain") or meta["name"]
        if not network.get("enableDNSHostnames") or any(each["metadata"]["name"] == name for each in services):
            return
        spec = {
            "clusterIP": "None",
            "selector": {"jobset.sigs.k8s.io/jobset-name": meta["name"]},
            "publishNotReadyAddresses": network.get("publishNotReadyAddresses", True),
        }
        own = {"name": name, "ownerReferences": [owner("JobSet", jobset)]}
        self.cluster.create(path_of("services", meta, ""), {"kind": "Service", "metadata": own, "spec": spec})

    # The Job controller.

    def _control_job(self, job: Object, pods: Sequence[Object]) -> None:
        wanted, meta = job["spec"].get("completions", 1), job["metadata"]
        for pod in pods:
            # The end of one that was deleted is counted, then it goes.
            if pod["metadata"].get("deletionTimestamp") and phase_of(pod) in OVER:
                self._patch("pods", pod, metadata={"finalizers": []})
        if condition(job, "Complete", "Failed"):
            return
        phases = Counter(map(phase_of, pods))
        if phases["Failed"]:
            words = "Job has reached the specified backoff limit"
            self._finish("jobs", job, "Failed", "BackoffLimitExceeded", words)
            for pod in pods:
                if phase_of(pod) not in OVER and not pod["metadata"].get("deletionTimestamp"):
                    self.cluster.delete(path_of("pods", pod["metadata"]))
        elif phases["Succeeded"] == wanted:
            words = "Reached expected number of succeeded pods"
            self._finish("jobs", job, "Complete", "CompletionsReached", words)
        elif not pods and not job["spec"].get("suspend") and "active" not in (job.get("status") or {}):
            for index in range(wanted):
                self.cluster.create(path_of("pods", meta, ""), child_pod(job, index))
            self._patch("jobs", job, status={"active": wanted})

    def _finish(self, kind: str, each: Object, type_: str, reason: str, message: str) -> None:
        """Set the last condition of a Job or a JobSet."""
        said = {"type": type_, "status": "True", "reason": reason, "message": message}
        terminal = {"terminalState": type_} if kind == "jobsets" else {}
        self._patch(kind, each, status={"conditions": [said], **terminal})

    # The node lifecycle controller.

    def die(self, node: str, *, noticed: bool = True) -> None:
        """The machine of a node ends, and what runs on it; the cluster knows at once, or when `unnoticed` is empty."""
        self.dead.add(node)
        self.unnoticed |= set() if noticed else {node}
        for pod in self.live.objects("pods"):
            container = self.containers.get(pod["metadata"]["uid"])
            if pod["spec"].get("nodeName") == node and container is not None:
                stop(container)

    def _watch_nodes(self, there: Mapping[str, list[Object]]) -> None:
        """Say of a node that reports no more that nothing is known of it: its pods stay as they were."""
        for node in there["nodes"]:
            name = node["metadata"]["name"]
            on = self._reports(name)
            if on and name in self._lost:
                self._lost.discard(name)
                said = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
                self._patch("nodes", node, spec={"taints": []}, status={"conditions": [said]})
            if on or name in self._lost | self.unnoticed:
                continue
            self._lost.add(name)
            said = {
                "type": "Ready",
                "status": "Unknown",
                "reason": "NodeStatusUnknown",
                "message": "Kubelet stopped posting node status.",
            }
            taints = [*(node["spec"].get("taints") or []), UNREACHABLE]
            self._patch("nodes", node, spec={"taints": taints}, status={"conditions": [said]})
            for pod in there["pods"]:
                if pod["spec"].get("nodeName") == name and phase_of(pod) not in OVER:
                    others = [each for each in pod["status"].get("conditions") or [] if each["type"] != "Ready"]
                    self._patch("pods", pod, status={"conditions": [*others, {"type": "Ready", "status": "False"}]})
                    self.event(pod, "NodeNotReady", "Node is not ready")

    def _reports(self, node: str) -> bool:
        return node not in self.dead and self.is_on(node)

    # The scheduler.

    def _place_or_run(self, pod: Object) -> None:
        node = pod["spec"].get("nodeName")
        if node:
            if self._reports(node):
                self._run(pod, node)
        elif pod["metadata"].get("deletionTimestamp"):
            self._patch("pods", pod, metadata={"finalizers": []})
        else:
            self._schedule(pod)

    def _schedule(self, pod: Object) -> None:
        there = self._look()
        placed = [each for each in there["pods"] if each["spec"].get("nodeName")]
        why = {node["metadata"]["name"]: why_not(pod, node, placed) for node in there["nodes"]}
        fits = next((name for name, reason in why.items() if not reason), "")
        if fits:
            said = {"type": "PodScheduled", "status": "True"}
            self._patch("pods", pod, spec={"nodeName": fits}, status={"conditions": [said]})
            return
        message = fit_error(list(why.values()))
        if message != next((each.get("message") for each in pod["status"].get("conditions") or []), ""):
            said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            self._patch("pods", pod, status={"conditions": [said]})
            self.event(pod, "FailedScheduling", message)

    # The kubelets.

    def _run(self, pod: Object, node: str) -> None:
        """Do the next thing on a pod's node."""
        meta, phase = pod["metadata"], phase_of(pod)
        container = self.containers.get(meta["uid"])
        if container is not None and phase == "Running":
            if (code := container.poll()) is not None:
                self._end(pod, code)
            elif meta.get("deletionTimestamp"):
                container.terminate()
        elif meta.get("deletionTimestamp"):
            self._patch("pods", pod, metadata={"finalizers": []})
        elif phase == "Pending":
            self._bring_up(pod, node)

    def _bring_up(self, pod: Object, node: str) -> None:
        """Have the image fetched, then start the container; an image that cannot be had is not asked for again."""
        meta, image = pod["metadata"], pod["spec"]["containers"][0]["image"]
        waiting = reason_of(pod)
        if waiting in {"ErrImagePull", "ImagePullBackOff"}:
            if waiting == "ErrImagePull":
                words = f'Back-off pulling image "{image}"'
                self._waits(pod, "ImagePullBackOff", words)
                self.event(pod, "BackOff", words, "Normal")
            return
        if self.pull is not None and meta["uid"] not in self._pulls:
            self._pulls[meta["uid"]] = self._pool.submit(self.pull, node, image)
            self._waits(pod, "ContainerCreating", "")
            self.event(pod, "Pulling", f'Pulling image "{image}"', "Normal")
        pulled = self._pulls.get(meta["uid"])
        if pulled is not None and not pulled.done():
            return
        if pulled is not None and (words := pulled.result()):
            self.event(pod, "Failed", f'Failed to pull image "{image}": {words}')
            self.event(pod, "Failed", "Error: ErrImagePull")
            self._waits(pod, "ErrImagePull", words)
            return
        namespace, name = meta["namespace"], meta["name"]
        self.live.inside(lambda api: (api.running.add((namespace, name)), api.say(namespace, name)))
        self.containers[meta["uid"]] = self.start(
            pod, node, lambda *lines: self.live.inside(lambda api: api.say(namespace, name, *lines))
        )
        statuses = status_of(pod, {"running": {}})
        conditions = [{"type": each, "status": "True"} for each in ("PodScheduled", "Ready")]
        self._patch("pods", pod, status={"phase": "Running", "conditions": conditions, "containerStatuses": statuses})

    def _waits(self, pod: Object, reason: str, message: str) -> None:
        statuses = status_of(pod, {"waiting": {"reason": reason, "message": message}})
        self._patch("pods", pod, status={"phase": "Pending", "containerStatuses": statuses})

    def _end(self, pod: Object, code: int) -> None:
        meta = pod["metadata"]
        self.live.inside(lambda api: api.running.discard((meta["namespace"], meta["name"])))
        ended = {"terminated": {"exitCode": code, "finishedAt": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}}
        statuses = status_of(pod, ended)
        self._patch("pods", pod, status={"phase": "Failed" if code else "Succeeded", "containerStatuses": statuses})

    # The name server.

    def _tell_names(self, there: Mapping[str, list[Object]]) -> None:
        """Tell the names of the pods that have a node and that a headless Service chooses."""
        found: dict[str, str] = {}
        for service in there["services"]:
            name, chosen = service["metadata"]["name"], (service.get("spec") or {}).get("selector")
            for pod in there["pods"]:
                spec, labels = pod["spec"], pod["metadata"].get("labels") or {}
                fits = chosen and all(labels.get(key) == value for key, value in chosen.items())
                if fits and spec.get("subdomain") == name and spec.get("nodeName"):
                    found[f"{spec['hostname']}.{name}"] = spec["nodeName"]
        if found != self._names:
            self._names = found
            self.names_changed(found)

    def event(self, pod: Object, reason: str, message: str, type_: str = "Warning") -> None:
        """Record an event of a pod."""
        meta = pod["metadata"]
        self.cluster.create(
            f"/api/v1/namespaces/{meta['namespace']}/events",
            {
                "metadata": {"name": f"{meta['name']}.{time.monotonic_ns():x}"},
                "type": type_,
                "reason": reason,
                "message": message,
                "involvedObject": {"kind": "Pod", "name": meta["name"]},
                "lastTimestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            },
        )

    def _patch(self, kind: str, each: Object, **changes: Mapping[str, Any]) -> None:
        self.cluster.patch(path_of(kind, each["metadata"]), changes)


def stop(container: Container) -> None:
    """End a container that may have ended."""
    if container.poll() is None:
        container.terminate()


def path_of(kind: str, meta: Mapping[str, Any], name: str | None = None) -> str:
    """Return the path of an object; with `name` "" that of the list it is in."""
    within = f"/namespaces/{meta['namespace']}" if meta.get("namespace") else ""
    tail = meta["name"] if name is None else name
    return f"{PATHS.get(kind, '/api/v1')}{within}/{kind}" + (f"/{tail}" if tail else "")


def owner(kind: str, each: Object) -> Object:
    """Return the reference to an object that controls another one."""
    meta = each["metadata"]
    return {"kind": kind, "name": meta["name"], "uid": meta["uid"], "controller": True}


def owned(by: Object, things: Sequence[Object]) -> list[Object]:
    """Return the objects that another one controls."""
    uid = by["metadata"]["uid"]
    return [
        each for each in things if any(one.get("uid") == uid for one in each["metadata"].get("ownerReferences") or [])
    ]


def condition(each: Object, *types: str) -> str:
    """Return which of some conditions is true, "" for none."""
    found = (each.get("status") or {}).get("conditions") or []
    return next((one["type"] for one in found if one["type"] in types and one["status"] == "True"), "")


def phase_of(pod: Object) -> str:
    """Return the phase of a pod; whoever makes one says none."""
    return str((pod.get("status") or {}).get("phase") or "Pending")


def status_of(pod: Object, state: Object) -> list[Object]:
    """Return what a kubelet says of the one container of a pod."""
    return [{"name": pod["spec"]["containers"][0]["name"], "state": state}]


def reason_of(pod: Object) -> str:
    """Return why the container of a pod waits, as its kubelet says it."""
    (status,) = (pod.get("status") or {}).get("containerStatuses") or [{}]
    return str(((status.get("state") or {}).get("waiting") or {}).get("reason") or "")


def child_job(jobset: Object, replicated: Object, index: int) -> Object:
    """Return a Job of a JobSet with what the controller puts on it and on its pods."""
    meta, template = jobset["metadata"], replicated["template"]
    name = f"{meta['name']}-{replicated['name']}-{index}"
    own = {
        "jobset.sigs.k8s.io/jobset-name": meta["name"],
        "jobset.sigs.k8s.io/replicatedjob-name": replicated["name"],
        "jobset.sigs.k8s.io/restart-attempt": "0",
        "jobset.sigs.k8s.io/replicatedjob-replicas": str(replicated.get("replicas", 1)),
        "jobset.sigs.k8s.io/global-replicas": "1",
        "jobset.sigs.k8s.io/job-index": str(index),
        "jobset.sigs.k8s.io/job-key": hashlib.sha1(f"{meta['namespace']}/{name}".encode()).hexdigest(),
        "jobset.sigs.k8s.io/job-global-index": str(index),
    }

    def marked(given: Object) -> Object:
        return {**given, **{key: {**(given.get(key) or {}), **own} for key in ("labels", "annotations")}}

    pod = template["spec"]["template"]
    network = jobset["spec"].get("network") or {}
    inside = {"subdomain": network.get("subdomain") or meta["name"]} if network.get("enableDNSHostnames") else {}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            **marked(template.get("metadata") or {}),
            "name": name,
            "ownerReferences": [owner("JobSet", jobset)],
        },
        "spec": {
            **template["spec"],
            "suspend": False,
            "template": {"metadata": marked(pod.get("metadata") or {}), "spec": {**pod["spec"], **inside}},
        },
    }


def child_pod(job: Object, index: int) -> Object:
    """Return a pod of a Job."""
    template, meta = job["spec"]["template"], job["metadata"]
    place = {names.COMPLETION_INDEX: str(index)} if job["spec"].get("completionMode") == "Indexed" else {}
    own = {"batch.kubernetes.io/job-name": meta["name"], "job-name": meta["name"]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{meta['name']}-{index}-x7k2p",
            "labels": {**template["metadata"]["labels"], **own, **place},
            "annotations": {**(template["metadata"].get("annotations") or {}), **place},
            "ownerReferences": [owner("Job", job)],
            "finalizers": [TRACKING],
        },
        "spec": {**template["spec"], **({"hostname": f"{meta['name']}-{index}"} if place else {})},
        "status": {"phase": "Pending"},
    }


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """A word of a container's command as kubelet gives it: $(NAME) of a variable that is there, and $ for $$."""
    return re.sub(
        r"\$(?:(\$)|\(([^()]*)\))", lambda match: "$" if match[1] else variables.get(match[2], match[0]), text
    )


def variables_of(pod: Object, node: str) -> dict[str, str]:
    """Return the variables of a pod's container, those of its own fields worked out."""
    found = {}
    for each in pod["spec"]["containers"][0]["env"]:
        value = each.get("value", "")
        if path := each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath"):
            note = re.fullmatch(r"metadata\.annotations\['(.+)'\]", path)
            value = pod["metadata"]["annotations"][note[1]] if note else {"spec.nodeName": node}[path]
        found[each["name"]] = value
    return found


def why_not(pod: Object, node: Object, placed: Sequence[Object]) -> str:
    """Return why a node does not take a pod beside those that are `placed`, "" for one that does: what the first of the
    scheduler's filters says, in their order."""
    spec, labels, name = pod["spec"], node["metadata"].get("labels") or {}, node["metadata"]["name"]
    here = [each for each in placed if each["spec"]["nodeName"] == name and phase_of(each) not in OVER]
    if node["spec"].get("unschedulable"):
        return "node(s) were unschedulable"
    for taint in node["spec"].get("taints") or []:
        if taint["key"] not in {each.get("key") for each in spec.get("tolerations") or []}:
            return f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"
    if any(labels.get(key) != value for key, value in (spec.get("nodeSelector") or {}).items()):
        return "node(s) didn't match Pod's node affinity/selector"
    for resource, wanted in limits(pod).items():
        used = sum(limits(each).get(resource, 0) for each in here)
        if used + wanted > int(node["status"]["allocatable"].get(resource, "0")):
            return f"Insufficient {resource}"
    apart = ((spec.get("affinity") or {}).get("podAntiAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    for rule in apart or []:
        wanted_labels = rule["labelSelector"]["matchLabels"].items()
        if any(wanted_labels <= (each["metadata"].get("labels") or {}).items() for each in here):
            return "node(s) didn't match pod anti-affinity rules"
    return ""


def limits(pod: Object) -> dict[str, int]:
    """Return how much of each device a pod asks for."""
    found = (pod["spec"]["containers"][0].get("resources") or {}).get("limits") or {}
    return {resource: int(value) for resource, value in found.items() if "/" in resource}


def fit_error(reasons: Sequence[str]) -> str:
    """Return what the scheduler says of a pod that no node takes (FitError, with DefaultPreemption behind it)."""
    nodes = f"0/{len(reasons)} nodes are available:"
    helps = Counter(
        "No preemption victims found for incoming pod"
        if re.match(r"Insufficient|.* anti-affinity", reason)
        else "Preemption is not helpful for scheduling"
        for reason in reasons
    )
    said, after = (
        ", ".join(sorted(f"{count} {reason}" for reason, count in each.items())) for each in (Counter(reasons), helps)
    )
    return f"{nodes} {said}. no new claims to deallocate, preemption: {nodes} {after}."


@contextmanager
def at_work(emulated: Emulated) -> Iterator[Emulated]:
    """Let a cluster work beside a test; what went wrong in it fails the test."""
    ends = threading.Event()
    thread = threading.Thread(target=emulated.work, args=(ends,), daemon=True)
    thread.start()
    try:
        yield emulated
    finally:
        ends.set()
        thread.join(30)
        emulated.end()
    assert not emulated.errors
