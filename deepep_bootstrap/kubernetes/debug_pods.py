"""Facts of nodes that only the nodes themselves know: the fact script of hosts, run on each by a pod of its own that is
deleted afterwards, as `kubectl debug node` does it by hand.

The pod has the node's root file system at /host, read-only, and the rights of the node's root: without them nvidia-smi
may not open the GPUs' devices. It is put on its node by name, so that no scheduler and no cordon decides about it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.text import duration, plain
from deepep_bootstrap.inventory.facts import Facts, parse_facts
from deepep_bootstrap.kube import names, waiting
from deepep_bootstrap.kube.client import Object, Refused
from deepep_bootstrap.kube.runs import ClusterRun

CONTAINER = "facts"
HOST = "/host"
"""Where the node's root file system is in the pod; kubectl's debug pods have it there too."""

LIMIT = 300.0
"""Seconds for all of it: an image that is pulled, and the fact script, which has 90 s over SSH."""

DEADLINE = 600
"""Seconds after which kubelet ends a pod, should this program be gone before it deleted it."""

LOOK = 1.0
"""Seconds between two looks at the pods."""

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
OVER = frozenset(("Succeeded", "Failed"))
NEEDS = "an image with chroot in it, such as busybox or debian; Google's distroless images have none"


class DebugPods(Struct, frozen=True):
    """What is run on nodes: the image by digest, the fact script and its arguments (prefix, Python)."""

    image: str
    script: str
    arguments: tuple[str, ...]
    limit: float = LIMIT


class NodesSeen(Struct, frozen=True):
    """The facts of the nodes that answered, and why others did not."""

    facts: Mapping[str, Facts]
    problems: tuple[Problem, ...] = ()


def image_of(given: str) -> str:
    """Return the image of --debug-pods; Trouble where it is not named by its digest."""
    if fault := names.image_fault(given):
        raise Trouble(Problem("--debug-pods", fault, given[:120] or "nothing", names.IMAGE.words, NEEDS))
    return given


def debug_pod(name: str, node: str, asked: DebugPods) -> Object:
    """Return the pod for one node."""
    # kubelet puts variables in for $(NAME), and $ for $$: what stands for itself is doubled.
    script = asked.script.replace("$", "$$")
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "deepep"}},
        "spec": {
            "nodeName": node,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": DEADLINE,
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            # The facts are about the node's processes and its network, not the pod's.
            "hostPID": True,
            "hostNetwork": True,
            # Also on nodes that are cordoned, or have no driver yet.
            "tolerations": [{"operator": "Exists"}],
            "containers": [
                {
                    "name": CONTAINER,
                    "image": asked.image,
                    "command": ["chroot", HOST, "/usr/bin/env", "-i", f"PATH={PATH}", "HOME=/root"],
                    "args": [
                        "/bin/sh",
                        "-c",
                        script,
                        "facts.sh",
                        *(word.replace("$", "$$") for word in asked.arguments),
                    ],
                    "resources": {"requests": {"cpu": "50m", "memory": "32Mi"}},
                    # nvidia-smi opens the GPUs' devices, which no smaller right lets a pod do without taking a GPU.
                    "securityContext": {"privileged": True, "readOnlyRootFilesystem": True},
                    "volumeMounts": [{"name": "host", "mountPath": HOST, "readOnly": True}],
                }
            ],
            "volumes": [{"name": "host", "hostPath": {"path": "/", "type": "Directory"}}],
        },
    }


def ask_nodes(
    run: ClusterRun, nodes: Sequence[str], asked: DebugPods, tell: Callable[[str], None] = lambda text: None
) -> NodesSeen:
    """Return the facts of nodes. What was made is deleted whatever happens. Trouble where the cluster takes no such
    pods."""
    pods = {f"deepep-facts-{run.name.rpartition('-')[2]}-{number}": node for number, node in enumerate(nodes)}
    try:
        run.make([debug_pod(name, node, asked) for name, node in pods.items()])
    except Refused as refused:
        if "PodSecurity" in str(refused):
            what = f"the namespace {run.namespace} lets no privileged pods in"
            found, remedy = refused.problems[0].found, "--namespace=kube-system, or one whose level is privileged"
            raise Trouble(Problem(run.cluster.context, what, found, try_=remedy)) from None
        raise
    try:
        seen = _Gathering(run, pods, asked).work(tell)
    except BaseException:
        for problem in run.remove():
            tell(str(problem))
        raise
    return NodesSeen(seen.facts, (*seen.problems, *run.remove()))


class _Gathering:
    """Waits until pods have ended and reads what each printed; `pods` are the nodes by the pod's name."""

    def __init__(self, run: ClusterRun, pods: Mapping[str, str], asked: DebugPods) -> None:
        self._run, self._pods, self._asked = run, pods, asked
        self._waiting = list(pods)
        self._facts: dict[str, Facts] = {}
        self._problems: list[Problem] = []

    def work(self, tell: Callable[[str], None]) -> NodesSeen:
        """Return what came in time."""
        end, told = time.monotonic() + self._asked.limit, ""
        while left := self._left():
            why = self._why(left)
            if why and why.text != told:
                told = why.text
                tell(told)
            if (why and why.final and self._are_hopeless(left)) or time.monotonic() > end:
                self._problems += [self._late(self._pods[pod["metadata"]["name"]], pod) for pod in left]
                break
            time.sleep(LOOK)
        return NodesSeen(self._facts, tuple(self._problems))

    def _are_hopeless(self, left: Sequence[Object]) -> bool:
        """Whether no waiting helps any of the pods."""
        return all(why is not None and why.final for why in (self._why([pod]) for pod in left))

    def _left(self) -> list[Object]:
        """Return the pods that have not ended; take what the others printed."""
        there = {pod["metadata"]["name"]: pod for pod in self._look()}
        for name in [name for name in self._waiting if name not in there or _phase(there[name]) in OVER]:
            self._waiting.remove(name)
            self._take(self._pods[name], there.get(name))
        return [there[name] for name in self._waiting]

    def _look(self) -> list[Object]:
        while True:
            try:
                return self._run.pods()
            except Trouble as trouble:
                if not trouble.may_pass:
                    raise
                time.sleep(LOOK)

    def _why(self, pods: Sequence[Object]) -> waiting.Waiting | None:
        waits = [pod for pod in pods if _phase(pod) in {"", "Pending"}]
        return waiting.explain(waits, self._run.events(waits), len(waits)) if waits else None

    def _take(self, node: str, pod: Object | None) -> None:
        """Read what a pod printed that has ended, or say why there is nothing."""
        try:
            if pod is None:
                raise Trouble(Problem(node, "the debug pod was deleted by somebody else"))
            if _phase(pod) == "Failed":
                raise Trouble(_failed(node, pod))
            path = f"/api/v1/namespaces/{self._run.namespace}/pods/{pod['metadata']['name']}/log"
            text = "".join(f"{line}\n" for line in self._run.cluster.lines(path, container=CONTAINER))
            self._facts[node] = parse_facts(text, node)
        except Trouble as trouble:
            self._problems += trouble.problems

    def _late(self, node: str, pod: Object) -> Problem:
        if why := self._why([pod]):
            return Problem(node, "the debug pod did not start", why.text, try_=why.remedy)
        what = f"the debug pod has not ended in {duration(self._asked.limit)}"
        return Problem(node, what, _phase(pod) or "kubelet says nothing", try_=f"kubectl describe node {node}")


def _phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase") or "")


def _failed(node: str, pod: Object) -> Problem:
    """Return why a pod failed: its image has no chroot, its deadline, or what kubelet says."""
    status = pod.get("status") or {}
    words = [str(status.get(key) or "") for key in ("reason", "message")]
    for container in status.get("containerStatuses") or ():
        ended = (container.get("state") or {}).get("terminated") or {}
        words += [f"exit code {ended.get('exitCode')}", *(str(ended.get(key) or "") for key in ("reason", "message"))]
    found = plain(": ".join(filter(None, words)))[:400]
    lacks = "executable file not found" in found or "exit code 127" in found
    return Problem(node, "the debug pod failed", found, try_=NEEDS if lacks else f"kubectl describe node {node}")
