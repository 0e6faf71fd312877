"""What the controllers, the scheduler and the kubelets of a cluster do for Jobs, beside the emulated API: pods with
their index, conditions and events as the real ones have them, and a container of each that is run by the test.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.kube import names
from deepep_bootstrap.kube.client import Cluster, Object
from tests.support.kube_api import LiveApi

TICK = 0.05


class Container(Protocol):
    """A container that runs."""

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""

    def terminate(self) -> None:
        """End it."""


Start = Callable[[Object, str, Callable[..., None]], Container]
"""Starts the container of a pod on a node; lines that it prints go to the callback."""


@dataclass
class Emulated:
    """One cluster: its nodes, each of which takes one pod, and the images that its registry has (None: any).
    `unschedulable` is what the scheduler says of a pod for which no node is left."""

    live: LiveApi
    cluster: Cluster
    nodes: Sequence[str]
    start: Start
    images: frozenset[str] | None = None
    unschedulable: str = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
    busy: dict[str, str] = field(default_factory=dict)
    containers: dict[str, Container] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)
    errors: list[BaseException] = field(default_factory=list)

    def work(self, stop: threading.Event) -> None:
        """Do what there is to do until `stop`."""
        while not stop.wait(TICK):
            try:
                self._tick()
            except Trouble:
                continue
            except BaseException as error:
                self.errors.append(error)
                raise

    def _tick(self) -> None:
        jobs = {job["metadata"]["uid"]: job for job in self.live.objects("jobs")}
        pods = self.live.objects("pods")
        for uid, job in jobs.items():
            if uid not in self.known and not job["spec"].get("suspend"):
                self.known.add(uid)
                self._make_pods(job)
        for pod in pods:
            if not pod["metadata"].get("ownerReferences"):
                self._run_alone(pod)
                continue
            owner = pod["metadata"]["ownerReferences"][0]["uid"]
            phase = pod["status"]["phase"]
            if pod["spec"].get("nodeName") in self.dead:
                continue
            if owner not in jobs:
                self._delete(pod)
            elif phase == "Pending" and not pod["spec"].get("nodeName"):
                self._schedule(pod)
            elif phase == "Running" and (code := self.containers[pod["metadata"]["name"]].poll()) is not None:
                self._end(pod, code)
            elif phase == "Running" and self._has_failed(owner):
                self._delete(pod)  # backoffLimit: 0

    def _run_alone(self, pod: Object) -> None:
        """Do with a pod that nothing controls, and whose maker put it on its node, what the kubelet there does."""
        phase, name = (pod.get("status") or {}).get("phase"), pod["metadata"]["name"]
        if phase is None:
            self._begin(pod, pod["spec"]["nodeName"])
        elif phase == "Running" and (code := self.containers[name].poll()) is not None:
            self._end(pod, code)

    def _has_failed(self, owner: str) -> bool:
        return any(
            pod["status"]["phase"] == "Failed" and pod["metadata"]["ownerReferences"][0]["uid"] == owner
            for pod in self.live.objects("pods")
        )

    def _make_pods(self, job: Object) -> None:
        template, meta = job["spec"]["template"], job["metadata"]
        for index in range(job["spec"].get("completions", 1)):
            place = {names.COMPLETION_INDEX: str(index)} if job["spec"].get("completionMode") == "Indexed" else {}
            self.cluster.create(
                f"/api/v1/namespaces/{meta['namespace']}/pods",
                {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {
                        "name": f"{meta['name']}-{index}-x7k2p",
                        "labels": {**template["metadata"]["labels"], "job-name": meta["name"], **place},
                        "annotations": {**template["metadata"].get("annotations", {}), **place},
                        "ownerReferences": [{"kind": "Job", "name": meta["name"], "uid": meta["uid"]}],
                    },
                    "spec": {**template["spec"], "hostname": f"{meta['name']}-{index}"},
                    "status": {"phase": "Pending"},
                },
            )

    def _schedule(self, pod: Object) -> None:
        free = [node for node in self.nodes if node not in self.busy and node not in self.dead]
        if not free:
            said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": self.unschedulable}
            self._patch(pod, status={"conditions": [said]})
            return
        self.busy[free[0]] = pod["metadata"]["name"]
        self._begin(pod, free[0])

    def _begin(self, pod: Object, node: str) -> None:
        """Start a pod's container on a node, if its image is there."""
        name = pod["metadata"]["name"]
        scheduled = {"conditions": [{"type": "PodScheduled", "status": "True"}]}
        image = pod["spec"]["containers"][0]["image"]
        if self.images is not None and image not in self.images:
            words = f'failed to resolve reference "{image}": {image}: not found'
            self.event(pod, "Failed", f'Failed to pull image "{image}": {words}')
            waits = {"waiting": {"reason": "ErrImagePull", "message": words}}
            scheduled["containerStatuses"] = [{"name": pod["spec"]["containers"][0]["name"], "state": waits}]
            self._patch(pod, spec={"nodeName": node}, status={"phase": "Pending", **scheduled})
            return
        namespace = pod["metadata"]["namespace"]
        self.live.inside(lambda api: (api.running.add((namespace, name)), api.say(namespace, name)))
        placed = {**pod, "spec": {**pod["spec"], "nodeName": node}}
        self.containers[name] = self.start(
            placed, node, lambda *lines: self.live.inside(lambda api: api.say(namespace, name, *lines))
        )
        scheduled["containerStatuses"] = [{"name": pod["spec"]["containers"][0]["name"], "state": {"running": {}}}]
        self._patch(pod, spec={"nodeName": node}, status={"phase": "Running", **scheduled})

    def _end(self, pod: Object, code: int) -> None:
        meta = pod["metadata"]
        self.live.inside(lambda api: api.running.discard((meta["namespace"], meta["name"])))
        ended = {"terminated": {"exitCode": code, "finishedAt": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}}
        statuses = [{"name": pod["spec"]["containers"][0]["name"], "state": ended}]
        self._patch(pod, status={"phase": "Failed" if code else "Succeeded", "containerStatuses": statuses})

    def _delete(self, pod: Object) -> None:
        meta = pod["metadata"]
        container = self.containers.get(meta["name"])
        if container is not None and container.poll() is None:
            container.terminate()
            return  # it is gone when its container is
        self.live.inside(lambda api: api.running.discard((meta["namespace"], meta["name"])))
        self.cluster.delete(f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}")
        self.busy = {node: name for node, name in self.busy.items() if name != meta["name"]}

    def die(self, node: str) -> None:
        """A node does not answer any more: its pod stays as it was, and the controllers say so in an event."""
        self.dead.add(node)
        pod = next(pod for pod in self.live.objects("pods") if pod["spec"].get("nodeName") == node)
        self.containers[pod["metadata"]["name"]].terminate()
        self.event(pod, "NodeNotReady", "Node is not ready")

    def event(self, pod: Object, reason: str, message: str) -> None:
        """Record a warning about a pod."""
        meta = pod["metadata"]
        self.cluster.create(
            f"/api/v1/namespaces/{meta['namespace']}/events",
            {
                "metadata": {"name": f"{meta['name']}.{time.monotonic_ns():x}"},
                "type": "Warning",
                "reason": reason,
                "message": message,
                "involvedObject": {"kind": "Pod", "name": meta["name"]},
                "lastTimestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            },
        )

    def _patch(self, pod: Object, **changes: Mapping[str, Any]) -> None:
        self.cluster.patch(f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}", changes)


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """A word of a container's command as kubelet gives it: $(NAME) of a variable that is there, and $ for $$."""
    return re.sub(
        r"\$(?:(\$)|\(([^()]*)\))", lambda match: "$" if match[1] else variables.get(match[2], match[0]), text
    )


@contextmanager
def at_work(emulated: Emulated) -> Iterator[Emulated]:
    """Let a cluster work beside a test; what went wrong in it fails the test."""
    stop = threading.Event()
    thread = threading.Thread(target=emulated.work, args=(stop,), daemon=True)
    thread.start()
    try:
        yield emulated
    finally:
        stop.set()
        thread.join(30)
        for container in emulated.containers.values():
            if container.poll() is None:
                container.terminate()
    assert not emulated.errors
