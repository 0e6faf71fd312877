"""An API server of Kubernetes over real HTTP: kmock's emulator, with what a cluster's controllers and kubelets lean on
and the emulator lacks: uids, label and field selectors, pages, preconditions of a deletion, namespaces, logs of pods.
"""

from __future__ import annotations

import asyncio
import datetime
import itertools
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp.web
import kmock
from kmock import KubernetesEmulator, KubernetesError, KubernetesResourceNotFoundError, Request

Object = dict[str, Any]
NAMESPACE = re.compile(r"/api/v1/namespaces/([^/]+)")


def refusal(status: int, message: str, reason: str = "Forbidden") -> KubernetesError:
    """An answer of the server with a status and words of its own."""
    return KubernetesError(status=status, message=message, reason=reason)


class Api(KubernetesEmulator):
    """The emulator. `namespaces` are there; `refusals` by method and path (a regular expression of both) are answered
    instead; `logs` are lines by namespace and pod, each with its time, which grow while `running` has the pod."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.namespaces = {"default"}
        self.refusals: dict[str, KubernetesError] = {}
        self.logs: dict[tuple[str, str], list[str]] = {}
        self.running: set[tuple[str, str]] = set()
        self.cut: set[tuple[str, str]] = set()  # of these the answer that is under way ends now
        self._version = itertools.count(1)

    async def _handle(self, request: Request) -> aiohttp.web.StreamResponse:
        asked = f"{request.method.value.upper()} {request.url.path}"
        for pattern, answer in self.refusals.items():
            if re.fullmatch(pattern, asked):
                raise answer
        if match := NAMESPACE.fullmatch(request.url.path):
            if match[1] not in self.namespaces:
                raise refusal(404, f'namespaces "{match[1]}" not found', "NotFound")
            return aiohttp.web.json_response({"kind": "Namespace", "metadata": {"name": match[1]}})
        if request.resource and request.resource.plural == "pods" and request.subresource == "log":
            return await self._send_log(request)
        if request.resource and request.resource.plural == "pods" and request.subresource == "eviction":
            return self._evict(request)
        if request.action == kmock.action.CREATE:
            meta = request.data.setdefault("metadata", {})
            if request.namespace:
                if request.namespace not in self.namespaces:
                    raise refusal(404, f'namespaces "{request.namespace}" not found', "NotFound")
                meta["namespace"] = request.namespace
            meta |= {"uid": str(uuid.uuid4()), "resourceVersion": str(next(self._version))}
        if request.subresource == "status" and request.method.value.upper() == "PATCH":
            return self._merge_status(request)
        if request.action == kmock.action.UPDATE:
            self._check_version(request)
        if request.action == kmock.action.DELETE:
            self._check_uid(request)
        return await super()._handle(request)

    def _evict(self, request: Request) -> aiohttp.web.StreamResponse:
        """End a pod as a cluster does whose budgets allow it; `refusals` say where they do not."""
        key = next(
            (key for key in self.objects if key[0].plural == "pods" and key[1:] == (request.namespace, request.name)),
            None,
        )
        if key is None:
            raise refusal(404, f'pods "{request.name}" not found', "NotFound")
        wanted = ((request.data or {}).get("deleteOptions") or {}).get("preconditions", {}).get("uid")
        if wanted and self.objects[key].raw["metadata"].get("uid") != wanted:
            raise refusal(409, "Precondition failed: UID in precondition", "Conflict")
        del self.objects[key]
        return aiohttp.web.json_response({"kind": "Status", "status": "Success"}, status=201)

    def _merge_status(self, request: Request) -> aiohttp.web.StreamResponse:
        """Change an object's status as a strategic merge patch does: conditions are merged by their type."""
        key = next((key for key in self.objects if key == (request.resource, request.namespace, request.name)), None)
        if key is None:
            raise refusal(404, f'"{request.name}" not found', "NotFound")
        status = self.objects[key].raw.setdefault("status", {})
        new = dict((request.data or {}).get("status") or {})
        changed = {each["type"]: each for each in new.pop("conditions", ())}
        kept = [each for each in status.get("conditions") or () if each["type"] not in changed]
        status |= {**new, "conditions": [*kept, *changed.values()]}
        return aiohttp.web.json_response(self.objects[key].raw)

    def _check_version(self, request: Request) -> None:
        """Refuse a change of an object that was changed since it was read; give it its next version."""
        meta = request.data.setdefault("metadata", {})
        for key, found in self.objects.items():
            if key == (request.resource, request.namespace, request.name) and not found.deleted:
                now = found.raw["metadata"].get("resourceVersion")
                if meta.get("resourceVersion") not in (None, now):
                    raise refusal(409, "the object has been modified", "Conflict")
        meta["resourceVersion"] = str(next(self._version))

    def _check_uid(self, request: Request) -> None:
        wanted = ((request.data or {}).get("preconditions") or {}).get("uid")
        key = (request.resource, request.namespace, request.name)
        there = key in self.objects and not self.objects[key].deleted
        if wanted and there and self.objects[key].raw["metadata"].get("uid") != wanted:
            raise refusal(409, "Precondition failed: UID in precondition", "Conflict")

    async def _serve_list(self, request: Request) -> Object:
        try:
            found = dict(await super()._serve_list(request))
        except KubernetesResourceNotFoundError:  # no object of this kind was made yet
            found = {"items": []}
        labels = [each.split("=") for each in request.params.get("labelSelector", "").split(",") if each]
        fields = [each.split("=") for each in request.params.get("fieldSelector", "").split(",") if each]
        items = [
            item
            for item in found["items"]
            if all((item["metadata"].get("labels") or {}).get(key) == value for key, value in labels)
            and all(at(item, key) == value for key, value in fields)
        ]
        first, limit = int(request.params.get("continue", "0")), int(request.params.get("limit", "0")) or len(items)
        more = {"continue": str(first + limit)} if first + limit < len(items) else {}
        return {**found, "metadata": {"resourceVersion": "1", **more}, "items": items[first : first + limit]}

    async def _send_log(self, request: Request) -> aiohttp.web.StreamResponse:
        key = (request.namespace or "", request.name or "")
        if key not in self.logs:
            raise refusal(400, f'container "test" in pod "{key[1]}" is waiting to start', "BadRequest")
        reply = aiohttp.web.StreamResponse()
        await reply.prepare(request._raw_request)
        since, stamped, sent = request.params.get("sinceTime", "")[:19], request.params.get("timestamps") == "true", 0
        while True:
            ended = key not in self.running
            lines = self.logs.get(key, [])[sent:]
            sent += len(lines)
            shown = (line if stamped else line.partition(" ")[2] for line in lines if line[:19] >= since)
            await reply.write("".join(f"{line}\n" for line in shown).encode())
            if ended or key in self.cut:
                self.cut.discard(key)
                break
            await asyncio.sleep(0.02)
        await reply.write_eof()
        return reply

    def say(self, namespace: str, pod: str, *lines: str) -> None:
        """Add lines to the log of a pod."""
        now = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f").rstrip("0") + "Z"
        self.logs.setdefault((namespace, pod), []).extend(f"{now} {line}" for line in lines)


def at(item: Object, path: str) -> str:
    """The value of a field by its path."""
    for key in path.split("."):
        item = item.get(key) or {} if isinstance(item, dict) else {}
    return item if isinstance(item, str) else ""


class LiveApi:
    """A server in a thread of its own. What changes its objects runs in there."""

    def __init__(self) -> None:
        self.api: Api
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready, self._ended = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self.api = Api()
        async with self.api, kmock.Server(self.api, hostnames=None) as server:
            self.url = str(server.url).rstrip("/")
            self._ready.set()
            await self._ended.wait()

    def __enter__(self) -> LiveApi:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        # A server that ends waits for its answers: logs that are followed have to end first.
        self.inside(lambda api: api.running.clear())
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(30)

    def inside(self, action: Callable[[Api], Any]) -> Any:
        """Run a function in the server's thread and return what it returns."""

        async def run() -> Any:
            return action(self.api)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(30)

    def objects(self, plural: str) -> list[Object]:
        """The objects of one kind that are there, such as pods."""
        return self.inside(
            lambda api: [
                found.raw
                for (resource, _, _), found in api.objects.items()
                if resource.plural == plural and not found.deleted
            ]
        )

    def asked(self) -> list[str]:
        """Method and path of each request so far."""
        return self.inside(lambda api: [f"{each.method.value.upper()} {each.url.path}" for each in api._requests])


@contextmanager
def live_api(folder: Path, *namespaces: str, context: str = "lab") -> Iterator[tuple[LiveApi, Path]]:
    """A server, and the kubeconfig that leads to it; its context's namespace is the first one given."""
    with LiveApi() as live:
        live.inside(lambda api: api.namespaces.update(namespaces))
        yield live, write_kubeconfig(folder / "kubeconfig", live.url, context, *namespaces[:1])


def write_kubeconfig(path: Path, url: str, context: str = "lab", namespace: str = "") -> Path:
    """A kubeconfig with one context."""
    within = f", namespace: {namespace}" if namespace else ""
    path.write_text(
        f"""apiVersion: v1
kind: Config
current-context: {context}
clusters: [{{name: here, cluster: {{server: "{url}"}}}}]
users: [{{name: me, user: {{token: secret-token}}}}]
contexts: [{{name: {context}, context: {{cluster: here, user: me{within}}}}}]
"""
    )
    return path


def make_node(name: str, boot: str, *, cordoned: str = "", ready: bool = True) -> Object:
    """A node in the boot `boot`; `cordoned` is the reason of this program."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, **({"annotations": {"deepep-bootstrap/cordoned": cordoned}} if cordoned else {})},
        **({"spec": {"unschedulable": True}} if cordoned else {}),
        "status": {
            "nodeInfo": {"bootID": boot},
            "conditions": [{"type": "Ready", "status": "True" if ready else "Unknown"}],
        },
    }


def make_pod(name: str, node: str, owner: str) -> Object:
    """A pod on a node that an object of the kind `owner` controls."""
    controller = [{"kind": owner, "name": f"{name}-owner", "controller": True}] if owner else []
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "ownerReferences": controller},
        "spec": {"nodeName": node},
        "status": {"phase": "Running"},
    }
