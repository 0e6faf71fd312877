"""Why pods do not start, and why they went away before their end: out of what the API says of pods, of the objects that
make them, and of events. Texts are matched as Kubernetes, containerd and Kueue write them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from deepep_bootstrap.core.text import plain

LONGEST = 300
"""Characters of the API's own words that a message quotes."""

Object = Mapping[str, Any]


class Waiting(Struct, frozen=True):
    """Why pods wait: `cause` in a word, the sentence, what to do. `final`: no waiting will help, somebody has to change
    something."""

    cause: str
    text: str
    remedy: str
    final: bool = False


class Gone(Struct, frozen=True):
    """Why a pod ended otherwise than by itself. `taken`: somebody else wanted its place (preemption, eviction, a
    drained node); else its `node` is at fault."""

    text: str
    taken: bool
    node: str = ""


class _Rule(Struct, frozen=True):
    """A text of the API and what it means; `what` and `remedy` may name the pattern's group as {0}."""

    pattern: str
    cause: str
    what: str
    remedy: str
    final: bool = False


FREE_GPUS = "kubectl get pods -A --field-selector=status.phase=Running -o wide, for who has them"
TAINTS = "kubectl describe nodes: a taint of the cluster's owner, or of a node that is not ready or under pressure"
FEWER = "there are fewer nodes than pods: each pod gets a node of its own"
MORE_NODES = "nodes = … of the settings, or --nodes; a bigger pool"

# The first that fits is told: what nodes lack that would do otherwise says more than which nodes are of another kind.
SCHEDULING = (
    _Rule(
        r"cannot allocate all claims|resourceclaims? .*not (?:created|available|ready)|for dynamic resource",
        "claim",
        "no node has NICs left for the pod's claim",
        "kubectl get resourceclaims,resourceslices: is the DRA driver there, and which pod has the NICs?",
    ),
    _Rule(
        r"Insufficient (nvidia\.com/[^\s,.]+)",
        "gpu",
        "no node that fits has so many {0} free",
        FREE_GPUS + "; kubectl describe nodes, for a node whose device plugin offers none",
    ),
    _Rule(
        r"Insufficient ([^\s,]*(?:rdma|hca|infiniband|networking\.gke\.io|sriov)[^\s,]*?)[,.]?(?:\s|$)",
        "rdma",
        "no node that fits has so many {0} free",
        "kubectl describe nodes: allocatable has 0 where the device plugin or the Network objects (overlays/cluster) "
        "are missing, else another pod has the NICs",
    ),
    _Rule(
        r"Insufficient ([^\s,]+?)[,.]?(?:\s|$)",
        "resources",
        "no node that fits has so much {0} free",
        "kubectl describe nodes, or smaller values in the settings (shm)",
    ),
    _Rule(
        r"untolerated taint\(?s?\)? \{([^}]*)\}",
        "taint",
        "the nodes that fit have a taint that the pods do not tolerate: {0}",
        TAINTS,
    ),
    _Rule(
        r"untolerated taint",  # newer Kubernetes no longer says which
        "taint",
        "the nodes that fit have a taint that the pods do not tolerate",
        TAINTS,
    ),
    _Rule(
        r"node\(s\) were unschedulable",
        "cordoned",
        "the nodes that fit are cordoned",
        "kubectl get nodes: who cordoned them? kubectl uncordon gives them back",
    ),
    _Rule(r"didn't (?:match|satisfy) (?:existing pods |pod )?anti-affinity", "spread", FEWER, MORE_NODES),
    _Rule(
        r"didn't match Pod's node affinity/selector",
        "selector",
        "no node has the labels that the pods ask for",
        "kubectl get nodes --show-labels, beside [selector] and spot of the settings",
    ),
    _Rule(
        r"no nodes available to schedule pods",
        "selector",
        "the cluster has no node",
        "a pool of nodes: invoke manifests prints the command",
    ),
)

IMAGES = (
    _Rule(
        r"no match for platform|exec format error|no matching manifest",
        "image-platform",
        "the image is for another kind of machine",
        "invoke image on a prefix for the nodes' machine (x86_64, aarch64)",
        final=True,
    ),
    _Rule(
        r"no such host|i/o timeout|connection re(?:fused|set)|deadline exceeded|TLS handshake|server misbehaving",
        "registry",
        "the node does not reach the registry",
        "a registry that the nodes reach: their DNS, proxy and firewall",
    ),
    _Rule(
        r"toomanyrequests|rate limit",
        "registry",
        "the registry answers too many requests",
        "a registry of your own: invoke image --push",
    ),
    _Rule(
        r"no space left on device",
        "disk",
        "the node has no space for the image",
        "kubectl describe node, for DiskPressure; a bigger disk of the pool",
    ),
    _Rule(
        r"unauthorized|authentication required|denied|forbidden|\b40[13]\b",  # not within a digest
        "image-access",
        "the registry does not let the node have the image",
        "kubectl get serviceaccount -o yaml, for imagePullSecrets; on Google's clusters the node's service account "
        "needs Artifact Registry's reader",
        final=True,
    ),
    _Rule(
        r"not found|manifest unknown|name unknown|does not exist|no such manifest",
        "image",
        "the image is not there",
        "image of the settings, beside what invoke image --push printed",
        final=True,
    ),
)

CREATING = (
    _Rule(
        r"hostPath type check failed: (\S+)",
        "host-path",
        "the node has no {0}, which the pods mount",
        "its driver (/home/kubernetes/bin/nvidia) or gIB (kubectl apply -k overlays/cluster) is not there yet",
    ),
    _Rule(
        r"(?:network|Network|NetworkAttachmentDefinition|multus|networking\.gke\.io|failed to set ?up network|CNI|cni)",
        "network",
        "the node cannot give the pod its networks",
        "kubectl get networks.networking.gke.io,gkenetworkparamsets (overlays/cluster), kubectl describe pod",
    ),
    _Rule(
        r"(?:MountVolume|mount|volume)", "volume", "the node cannot mount what the pod asks for", "kubectl describe pod"
    ),
    _Rule(
        r"(?:device plugin|UnexpectedAdmissionError|Allocate failed|no healthy devices)",
        "device-plugin",
        "the node's device plugin does not hand out what it offers",
        "kubectl get pods -A -o wide, for the device plugin on that node: its log says why",
    ),
)

MAKING = (
    _Rule(
        r"exceeded quota: ([^,\s]+)",
        "quota",
        "the namespace's quota {0} has no room for the pods",
        "kubectl describe resourcequota, beside who else runs there",
    ),
    _Rule(
        r"failed quota: ([^,\s:]+)",
        "quota",
        "the namespace's quota {0} wants requests that the pods do not have",
        "kubectl describe resourcequota; a namespace of its own for the tests",
        final=True,
    ),
    _Rule(
        r"violates PodSecurity",
        "pod-security",
        "the namespace does not let such pods in",
        "kubectl apply -k manifests/base, which sets its level of pod-security.kubernetes.io/enforce",
        final=True,
    ),
    _Rule(
        r"admission webhook \"?([^\s\"]+)",
        "webhook",
        "a rule of the cluster ({0}) refuses the pods",
        "the cluster's owner",
        final=True,
    ),
    _Rule(
        r"no PriorityClass|serviceaccount|forbidden",
        "refused",
        "the API refuses the pods",
        "kubectl describe job",
        final=True,
    ),
)

PULLING = frozenset(("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "RegistryUnavailable"))
BROKEN = frozenset(("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError"))
TAKEN = {
    "PreemptionByScheduler": "it was preempted for a pod of a higher priority",
    "PreemptionByKubeScheduler": "it was preempted for a pod of a higher priority",
    "EvictionByEvictionAPI": "it was evicted: its node is being drained",
    "TerminationByKubelet": "its node ended it",
}
LOST = {"DeletionByTaintManager": "its node does not answer, or is not ready", "DeletionByPodGC": "its node is gone"}
"""Reasons of the condition DisruptionTarget (kubernetes.io/docs/concepts/workloads/pods/disruptions)."""


def explain(
    pods: Sequence[Object], events: Sequence[Object], wanted: int, owner: Object | None = None
) -> Waiting | None:
    """Return why not all of `wanted` pods run; None where nothing says so. `events` are those of the pods and of their
    `owner`, the Job that makes them."""
    pending = [pod for pod in pods if (pod.get("status") or {}).get("phase") in {"Pending", None}]
    placed = sum(1 for pod in pods if (pod.get("spec") or {}).get("nodeName"))
    found = [why for pod in pending for why in [_of_pod(pod, events, placed)] if why]
    if found:
        first = next((why for why in found if why.final), found[0])
        return Waiting(first.cause, f"{len(pending)} of {wanted} pods wait: {first.text}", first.remedy, first.final)
    if len(pods) < wanted:
        return _of_owner(len(pods), events, wanted, owner)
    return None


def _of_owner(there: int, events: Sequence[Object], wanted: int, owner: Object | None) -> Waiting | None:
    """Return why pods are not made at all."""
    head = f"{wanted - there} of {wanted} pods are not made"
    for event in _newest(events):
        if event.get("reason") == "FailedCreate":
            return _told(
                MAKING, _said(event.get("message")), "refused", "the API refuses the pods", "kubectl describe job", head
            )
    if owner is not None and (owner.get("spec") or {}).get("suspend"):
        queue = ((owner.get("metadata") or {}).get("labels") or {}).get("kueue.x-k8s.io/queue-name", "")
        what = f"the Job waits in the queue {queue}" if queue else "the Job is suspended"
        said = next((event.get("message") for event in _newest(events) if event.get("reason") in QUEUED), "")
        said = _brief(_said(said))
        text = f"{head}: {what}" + (f": {said}" if said else "")
        return Waiting(
            "queue", text, "kubectl get workloads, kubectl describe localqueue: is there room for all pods at once?"
        )
    return None


QUEUED = frozenset(("Pending", "QuotaReserved", "Suspended", "Inadmissible", "CreatedWorkload"))
"""Reasons of Kueue's events on a Job."""


def _of_pod(pod: Object, events: Sequence[Object], placed: int) -> Waiting | None:
    status = pod.get("status") or {}
    own = [event for event in events if (event.get("involvedObject") or {}).get("name") == pod["metadata"]["name"]]
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return _unscheduled(condition, placed)
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if why := _of_container(waiting, own):
            return why
    return _creating(own)


def _unscheduled(condition: Object, placed: int) -> Waiting:
    """Return why no node takes a pod, while `placed` pods of the same test have theirs."""
    said = _said(condition.get("message"))
    if condition.get("reason") == "SchedulingGated":
        return Waiting(
            "queue", "the queue has not let them start yet", "kubectl get workloads, kubectl describe localqueue"
        )
    telling = _telling(said, placed)
    if said and not telling:
        return Waiting("spread", f"{FEWER} ({_brief(said)})", MORE_NODES)
    return _told(SCHEDULING, said, "unschedulable", "no node takes them", "kubectl describe pod", telling=telling)


FULL = re.compile(r"(\d+) (?:Insufficient |node\(s\) didn't (?:match|satisfy) (?:existing pods |pod )?anti-affinity)")
"""Nodes that would do, but that others are on; by it the scheduler counts those too that have a pod of this test."""

OTHER_KIND = re.compile(r"node affinity/selector|taint \{node-role\.kubernetes\.io/(?:control-plane|master)[:} ]")
"""Nodes of which nobody expects that they take such pods."""


def _telling(said: str, placed: int) -> str:
    """Return those of the scheduler's reasons that keep a pod away from more nodes than the `placed` that this test
    itself is on; "" where no other node is of the kind that is asked for."""
    _, found, body = said.partition(" nodes are available: ")
    if not (placed and found):
        return said
    reasons = re.split(r", (?=\d+ )", body.rstrip("."))
    others = [each for each in reasons if not ((full := FULL.match(each)) and int(full[1]) <= placed)]
    if len(others) == len(reasons):
        return said
    return ", ".join(each for each in others if not OTHER_KIND.search(each))


def _of_container(waiting: Object, events: Sequence[Object]) -> Waiting | None:
    reason, said = str(waiting.get("reason") or ""), _said(waiting.get("message"))
    if reason == "InvalidImageName":
        return Waiting("image", f"this names no image: {_brief(said)}", "image of the settings", final=True)
    if reason in PULLING:
        # ImagePullBackOff says only that it waits: the event before it says why.
        failed = [_said(event.get("message")) for event in _newest(events) if event.get("reason") == "Failed"]
        words = next(
            (each for each in [said, *failed] if any(re.search(rule.pattern, each, re.I) for rule in IMAGES)), said
        )
        return _told(IMAGES, words, "image", "the image cannot be pulled", "kubectl describe pod")
    if reason in BROKEN:
        return Waiting(
            "container", f"the container cannot be made: {_brief(said) or reason}", "kubectl describe pod", final=True
        )
    return None


def _creating(events: Iterable[Object]) -> Waiting | None:
    """Return why a pod that has its node does not get on, by its warnings; a pull that is on its way is told too."""
    newest = list(_newest(events))
    for event in newest:
        if event.get("type") == "Warning" and event.get("reason") != "FailedScheduling":
            return _told(
                CREATING, _said(event.get("message")), "starting", "the node cannot start them", "kubectl describe pod"
            )
    if newest and newest[0].get("reason") == "Pulling":
        return Waiting("pulling", "the image is being pulled", "more time: --start-timeout")
    return None


def _told(
    rules: Iterable[_Rule], said: str, cause: str, what: str, remedy: str, head: str = "", telling: str = ""
) -> Waiting:
    """Return what the first rule that fits makes of a text, with the text itself; without one what stands behind it.
    `telling` is the part of the text that rules look at, where not all of it."""
    front, quoted = f"{head}: " if head else "", _brief(said)
    for rule in rules:
        if match := re.search(rule.pattern, telling or said, re.IGNORECASE):
            words = rule.what.format(*match.groups())
            return Waiting(rule.cause, f"{front}{words} ({quoted})", rule.remedy, rule.final)
    return Waiting(cause, f"{front}{what} ({quoted})" if said else f"{front}{what}", remedy)


def _newest(events: Iterable[Object]) -> Iterator[Object]:
    def when(event: Object) -> str:
        return str(event.get("lastTimestamp") or event.get("eventTime") or "")

    yield from sorted(events, key=when, reverse=True)


def _said(text: object) -> str:
    """Return words of the API on one line, as a terminal may have them."""
    words = plain(" ".join(str(text or "").split()))
    # What preemption would not help repeats why no node fits.
    return re.sub(r" (?:[a-z ]{1,60}, )?preemption: .*", "", words)


def _brief(words: str) -> str:
    """Return a text that is not too long to be read, without its middle: the cause of an error stands at its end,
    behind names that are repeated."""
    half = LONGEST // 2
    return words if len(words) <= LONGEST else f"{words[:half]} … {words[-half:]}"


def gone(pod: Object, events: Sequence[Object] = ()) -> Gone | None:
    """Return why a pod was ended, or is lost with its node; None for one that runs or ended by itself."""
    status = pod.get("status") or {}
    where = (pod.get("spec") or {}).get("nodeName") or "its node"
    name = pod["metadata"]["name"]
    for condition in status.get("conditions") or []:
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return _disrupted(f"pod {name} on {where}", condition, where)
    reason = str(status.get("reason") or "")
    if reason in ENDED_BY_NODE:
        return Gone(f"pod {name} on {where}: {reason.lower()} ({_brief(_said(status.get('message')))})", taken=True)
    if status.get("phase") == "Unknown" or reason == "NodeLost" or _is_lost(pod, events):
        return Gone(f"{where} does not answer any more: pod {name} is lost", taken=False, node=where)
    return None


ENDED_BY_NODE = frozenset(("Evicted", "Preempting", "Preempted", "NodeShutdown", "Shutdown", "Terminated"))
"""Reasons of a pod that its kubelet ended."""


def _disrupted(pod: str, condition: Object, node: str) -> Gone:
    reason, said = str(condition.get("reason") or ""), _brief(_said(condition.get("message")))
    words = TAKEN.get(reason) or LOST.get(reason) or reason
    return Gone(f"{pod}: {words} ({said})" if said else f"{pod}: {words}", reason not in LOST, node)


def _is_lost(pod: Object, events: Sequence[Object]) -> bool:
    """Whether a pod that runs, as far as is known, is on a node of which nothing is heard. Its condition Ready comes
    back when the node does; the event stays."""
    names = {
        (event.get("involvedObject") or {}).get("name") for event in events if event.get("reason") == "NodeNotReady"
    }
    status = pod.get("status") or {}
    ready = any(each.get("type") == "Ready" and each.get("status") == "True" for each in status.get("conditions") or [])
    return status.get("phase") == "Running" and not ready and pod["metadata"]["name"] in names
