"""The objects of one run in a cluster: made, looked at, followed, and deleted again; nothing else is touched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.kube import names
from deepep_bootstrap.kube.client import EXTRA, Cluster, Object, Refused

PLURALS = {
    ("v1", "Pod"): "pods",
    ("v1", "Service"): "services",
    ("v1", "ServiceAccount"): "serviceaccounts",
    ("batch/v1", "Job"): "jobs",
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): "jobsets",
    ("resource.k8s.io/v1", "ResourceClaimTemplate"): "resourceclaimtemplates",
}
OWNERS = ("Job", "JobSet")
"""Kinds that make pods."""

CONTAINER = "test"
EVENTS_ASKED = 8
"""Pods whose events are asked for: those that wait, wait for the same reason."""

AGAIN = 1.0
"""Seconds between two looks, and before a log is asked for again."""


def read_objects(text: str) -> list[Object]:
    """Return the objects in a YAML text of manifests. Trouble where the client library is not installed, which brings
    the reader of YAML."""
    try:
        import yaml
    except ImportError:
        raise Trouble(Problem("kubernetes", "the client library of Kubernetes is not installed", try_=EXTRA)) from None
    return [each for each in yaml.safe_load_all(text) if each]


def path_of(made: Object, namespace: str) -> str:
    """Return the path of the list that an object belongs to."""
    version = made["apiVersion"]
    root = "/api" if version == "v1" else "/apis"
    return f"{root}/{version}/namespaces/{namespace}/{PLURALS[version, made['kind']]}"


class _Made(Struct, frozen=True):
    """An object that was asked for: its own path, and its uid ("" where the answer did not come)."""

    kind: str
    path: str
    uid: str = ""


class ClusterRun:
    """One run: `name` is the value of the label names.RUN that all its objects have, `namespace` where they are."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self.cluster, self.namespace, self.name = cluster, namespace, name
        self._made: list[_Made] = []

    def make(self, objects: Sequence[Object]) -> None:
        """Make the objects, each with the run's label. Where one is refused, those before it are deleted again."""
        self._check_namespace()
        try:
            for each in objects:
                path = path_of(each, self.namespace)
                labels = {**(each["metadata"].get("labels") or {}), names.RUN: self.name}
                body = {**each, "metadata": {**each["metadata"], "labels": labels, "namespace": self.namespace}}
                # It is noted before it is there: whoever is interrupted in between finds it by its label.
                made = _Made(each["kind"], f"{path}/{each['metadata']['name']}")
                self._made.append(made)
                there = self.cluster.create(path, body)
                self._made[-1] = _Made(made.kind, made.path, there["metadata"]["uid"])
        except BaseException:
            self.remove()
            raise

    def _check_namespace(self) -> None:
        try:
            self.cluster.get(f"/api/v1/namespaces/{self.namespace}")
        except Refused as refused:
            if refused.is_absent:
                what = f"the cluster has no namespace {self.namespace}"
                remedy = "invoke manifests, then kubectl apply -k on its base; or --namespace"
                raise Trouble(Problem(self.cluster.context, what, try_=remedy)) from None
            # Who may work in a namespace may be forbidden to look at it.
            if refused.status != 403:
                raise

    def remove(self) -> list[Problem]:
        """Delete what was made and is still the same object; return why something is left."""
        left: list[Problem] = []
        for made in reversed(self._made):
            try:
                if uid := made.uid or self._own_uid(made):
                    self.cluster.delete(made.path, uid=uid)
            except Trouble as trouble:
                if isinstance(trouble, Refused) and trouble.status == 409:  # another object of this name
                    continue
                what = f"{made.path} could not be deleted: {trouble.problems[0].message}"
                left.append(Problem(self.cluster.context, what, try_=self.by_hand))
        self._made.clear()
        return left

    def _own_uid(self, made: _Made) -> str:
        """Return the uid of an object whose making was not answered, "" where it is not there or another's."""
        try:
            there = self.cluster.get(made.path)["metadata"]
        except Refused as refused:
            if refused.is_absent:
                return ""
            raise
        return str(there["uid"]) if (there.get("labels") or {}).get(names.RUN) == self.name else ""

    @property
    def by_hand(self) -> str:
        """Return the command that deletes what is left."""
        kinds = "job,pod,service,serviceaccount"
        return f"kubectl --context={self.cluster.context} -n {self.namespace} delete {kinds} -l {names.RUN}={self.name}"

    def pods(self) -> list[Object]:
        """Return the run's pods in the order of their index."""
        found = self.cluster.all(f"/api/v1/namespaces/{self.namespace}/pods", labelSelector=f"{names.RUN}={self.name}")
        return sorted(found, key=lambda pod: (index_of(pod), pod["metadata"]["name"]))

    def owner(self) -> Object | None:
        """Return the object that makes the pods, None where it is gone."""
        for made in self._made:
            if made.kind in OWNERS:
                try:
                    return self.cluster.get(made.path)
                except Refused as refused:
                    if not refused.is_absent:
                        raise
        return None

    def events(self, pods: Sequence[Object]) -> list[Object]:
        """Return what the cluster says of some pods and of what makes them; [] for whoever may not read it."""
        owners = [made.path.rpartition("/")[2] for made in self._made if made.kind in OWNERS]
        wanted = [*owners, *(f"{name}-nodes-0" for name in owners), *(pod["metadata"]["name"] for pod in pods)]
        found: list[Object] = []
        try:
            for name in wanted[: EVENTS_ASKED + 2]:
                path = f"/api/v1/namespaces/{self.namespace}/events"
                found += self.cluster.all(path, fieldSelector=f"involvedObject.name={name}")
        except Refused as refused:
            if refused.status != 403:
                raise
        return found

    def follow(self, pod: str, on_line: Callable[[str], None], stop: threading.Event) -> None:
        """Give the lines of a pod's log to `on_line` until the pod has ended or is gone, or `stop` is set. A connection
        that breaks is made again, and no line comes twice."""
        path, mark = f"/api/v1/namespaces/{self.namespace}/pods/{pod}", _Mark()
        while not stop.is_set():
            was_over = self._is_over(path)
            try:
                for line in self._lines(path, mark):
                    if stop.is_set():
                        return
                    on_line(line)
            except Refused as refused:
                if refused.is_absent:
                    return
            except Trouble:  # the connection broke, or nothing was said for long
                stop.wait(AGAIN)
                continue
            if was_over:
                return
            stop.wait(AGAIN / 4)

    def _lines(self, path: str, mark: _Mark) -> Iterator[str]:
        since = {"sinceTime": mark.since} if mark.since else {}
        mark.begin()
        for line in self.cluster.lines(f"{path}/log", container=CONTAINER, follow="true", timestamps="true", **since):
            if mark.is_new(line):
                yield line.partition(" ")[2]

    def _is_over(self, path: str) -> bool:
        """Whether a pod has ended, so that the log which is read next is whole."""
        try:
            return (self.cluster.get(path).get("status") or {}).get("phase") in {"Succeeded", "Failed"}
        except Refused as refused:
            return refused.is_absent
        except Trouble:
            return False


class _Mark:
    """How far a log was read. Its lines begin with their time, as RFC 3339 with up to nine digits behind the second;
    several may have one time, and the API gives lines since a second only."""

    def __init__(self) -> None:
        self._last = ("", "")
        self._count, self._again = 0, 0

    @property
    def since(self) -> str:
        """Return the second of the last line as the API takes it, "" before there was one."""
        return f"{self._last[0]}Z" if self._last[0] else ""

    def begin(self) -> None:
        """Begin to read anew."""
        self._again = 0

    def is_new(self, line: str) -> bool:
        """Whether a line was not read before."""
        second, _, fraction = line.partition(" ")[0].rstrip("Z").partition(".")
        time = (second, fraction.ljust(9, "0"))
        if time < self._last:
            return False
        if time == self._last:
            self._again += 1
            if self._again <= self._count:
                return False
            self._count += 1
            return True
        self._last, self._count, self._again = time, 1, 1
        return True


def index_of(pod: Object) -> int:
    """Return the number of a pod among those of its Job, 0 where it is alone."""
    meta = pod["metadata"]
    value = (meta.get("annotations") or {}).get(names.COMPLETION_INDEX) or (meta.get("labels") or {}).get(
        names.COMPLETION_INDEX, "0"
    )
    return int(value) if str(value).isdecimal() else 0


def exit_code(pod: Object) -> int | None:
    """Return the exit code of a pod's test, None where it has none (yet)."""
    for container in (pod.get("status") or {}).get("containerStatuses") or []:
        ended = (container.get("state") or {}).get("terminated")
        if container.get("name") == CONTAINER and ended:
            return int(ended.get("exitCode", 1))
    return None


def ended_at(pod: Object) -> str:
    """Return when a pod's test ended, "" where it has not."""
    for container in (pod.get("status") or {}).get("containerStatuses") or []:
        ended = (container.get("state") or {}).get("terminated")
        if ended:
            return str(ended.get("finishedAt") or "")
    return ""
