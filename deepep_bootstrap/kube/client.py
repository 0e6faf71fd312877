"""A cluster's API as kubectl reaches it: kubeconfig, context and namespace are read alike. Objects come and go as the
API's own JSON, so that what the client library does not know (JobSet, Network) is treated like a Pod.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.text import plain

EXTRA = "pip install 'deepep-bootstrap[kubernetes]'"
DEFAULT_CONFIG = "~/.kube/config"
CONNECT_LIMIT, READ_LIMIT = 15.0, 60.0
"""Seconds until a connection stands, and until an answer comes."""

STREAM_LIMIT = 45.0
"""Seconds without a byte after which a stream is taken for dead: a pod that says nothing may say nothing for hours, so
whoever follows one asks again."""

PAGE = 500
"""Objects of one answer, kubectl's own number."""

LONGEST = 64 * 1024 * 1024
"""Bytes of one answer that are read."""

MOST_CONNECTIONS = 256
"""Connections that are kept for the next request; each pod that is followed has one."""

BUSY = frozenset((429, 500, 502, 503, 504))
"""Answers of an API server that may be another one soon."""

Object = dict[str, Any]


class Refused(Trouble):
    """The API server says no; `status` is that of HTTP, `reason` the API's own word such as NotFound."""

    def __init__(self, problem: Problem, status: int, reason: str = "") -> None:
        super().__init__(problem, may_pass=status in BUSY)
        self.status = status
        self.reason = reason

    @property
    def is_absent(self) -> bool:
        """Whether what was asked for is not there."""
        return self.status == 404


class Cluster:
    """One cluster over its API. `context` is the kubeconfig's name for it, `namespace` what objects without one are
    in."""

    def __init__(self, api: Any, context: str, namespace: str) -> None:
        self._api = api
        self.context = context
        self.namespace = namespace

    @property
    def server(self) -> str:
        """Return the address of the API server."""
        return str(self._api.configuration.host)

    def get(self, path: str, **query: str) -> Object:
        """Return the object at a path such as /api/v1/nodes/n1. Refused where the server says no, Trouble where it
        does not answer."""
        return self._object("GET", path, query)

    def all(self, path: str, **query: str) -> list[Object]:
        """Return the objects of a list, page by page; `query` may have labelSelector and fieldSelector."""
        found: list[Object] = []
        more = ""
        while True:
            page = self._object("GET", path, {**query, "limit": str(PAGE), **({"continue": more} if more else {})})
            found += page.get("items") or []
            more = (page.get("metadata") or {}).get("continue") or ""
            if not more:
                return found

    def create(self, path: str, body: Object) -> Object:
        """Create an object below the path of its list; return it as the server has it."""
        return self._object("POST", path, {}, body)

    def patch(self, path: str, body: Object) -> Object:
        """Change the object at a path by a JSON merge patch (RFC 7386); return it."""
        return self._object("PATCH", path, {}, body, "application/merge-patch+json")

    def delete(self, path: str, *, uid: str = "", grace: int | None = None) -> None:
        """Delete the object at a path and what belongs to it; with `uid` that very object alone. One that is not there
        is no fault."""
        body: Object = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        if uid:
            body["preconditions"] = {"uid": uid}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        try:
            self._object("DELETE", path, {}, body)
        except Refused as refused:
            if not refused.is_absent:
                raise

    def lines(self, path: str, **query: str) -> Iterator[str]:
        """Yield the lines of a text such as a pod's log as they come. Trouble where the connection breaks."""
        rest = b""
        with self._request("GET", path, query, limit=STREAM_LIMIT) as reply:
            try:
                for part in reply.stream(65536, decode_content=True):
                    *whole, rest = (rest + part).split(b"\n")
                    yield from (line.decode("utf-8", "replace") for line in whole)
            except self._faults() as error:
                raise self._unreached(error) from None
        if rest:
            yield rest.decode("utf-8", "replace")

    def close(self) -> None:
        """Close its connections."""
        self._api.rest_client.pool_manager.clear()

    def _object(
        self, method: str, path: str, query: Mapping[str, str], body: Object | None = None, form: str = ""
    ) -> Object:
        with self._request(method, path, query, body, form) as reply:
            try:
                data = reply.read(LONGEST)
            except self._faults() as error:
                raise self._unreached(error) from None
        try:
            found = json.loads(data)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise Trouble(
                Problem(
                    self.server,
                    f"{path} is answered by something else than JSON",
                    data[:80].decode("ascii", "replace"),
                    "an API server of Kubernetes",
                )
            )
        return found

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Object | None = None,
        form: str = "",
        limit: float = READ_LIMIT,
    ) -> Any:
        """Return the open answer of one request; Refused where it is none of success."""
        from urllib3 import Timeout

        headers = {"Accept": "application/json, */*", "User-Agent": "deepep-bootstrap"}
        auth = self._api.configuration.auth_settings().get("BearerToken") or {}
        if auth.get("value"):
            headers[auth["key"]] = auth["value"]
        if body is not None:
            headers["Content-Type"] = form or "application/json"
        url = f"{self.server}{quote(path, safe='/')}{'?' if query else ''}{urlencode(query)}"
        try:
            reply = self._api.rest_client.pool_manager.request(
                method,
                url,
                headers=headers,
                body=None if body is None else json.dumps(body).encode(),
                preload_content=False,
                redirect=False,
                retries=False,
                timeout=Timeout(connect=CONNECT_LIMIT, read=limit),
            )
        except self._faults() as error:
            raise self._unreached(error) from None
        if 200 <= reply.status < 300:
            return reply
        with reply:
            raise self._refused(method, path, reply.status, reply.read(LONGEST))

    @staticmethod
    def _faults() -> tuple[type[Exception], ...]:
        from urllib3.exceptions import HTTPError

        return (HTTPError, OSError)

    def _unreached(self, error: Exception) -> Trouble:
        words = plain(" ".join(str(error).split()))[-200:]
        problem = Problem(
            self.server,
            "the API server does not answer",
            words,
            try_=f"kubectl --context={self.context} get --raw=/readyz",
        )
        return Trouble(problem, may_pass=True)

    def _refused(self, method: str, path: str, status: int, body: bytes) -> Refused:
        try:
            said = json.loads(body)
        except ValueError:
            said = {}
        said = said if isinstance(said, dict) else {}
        words = plain(" ".join(str(said.get("message") or "").split()))[:400]
        remedy = ""
        if status == 401:
            remedy = f"kubectl --context={self.context} auth whoami: the kubeconfig's login is over, or another one's"
        elif status == 403:
            remedy = f"kubectl --context={self.context} auth can-i --list, and the cluster's owner"
        what = f"{method} {path} is refused with status {status}"
        return Refused(
            Problem(self.context or self.server, what, words, try_=remedy), status, str(said.get("reason") or "")
        )


def config_files(given: str = "") -> str:
    """Return where kubectl would read its configuration, files joined by the path separator: `given`, else KUBECONFIG,
    else the file in the home directory."""
    return given or os.environ.get("KUBECONFIG") or DEFAULT_CONFIG


def has_config(given: str = "") -> bool:
    """Whether there is any such file, so that a cluster may be asked at all. Imports nothing."""
    return any(Path(os.path.expanduser(each)).is_file() for each in config_files(given).split(os.pathsep) if each)


def connect(context: str = "", *, kubeconfig: str = "", namespace: str = "") -> Cluster:
    """Return the cluster of a context ("" for the current one) of kubectl's configuration; objects are in `namespace`,
    else in the context's, else in `default`. Nothing is asked yet. Trouble where the client library is not installed,
    or the configuration lacks or has faults."""
    if not has_config(kubeconfig):
        remedy = "--kubeconfig=FILE, or KUBECONFIG"
        raise Trouble(
            Problem(
                config_files(kubeconfig), "there is no kubeconfig", wanted="the file that kubectl reads", try_=remedy
            )
        )
    try:
        from kubernetes.client import Configuration
        from kubernetes.config import ConfigException, kube_config
    except ImportError:
        raise Trouble(Problem("kubernetes", "the client library of Kubernetes is not installed", try_=EXTRA)) from None
    from yaml import YAMLError

    files = config_files(kubeconfig)
    try:
        contexts, current = kube_config.list_kube_config_contexts(files)  # type: ignore[no-untyped-call]
        known = {each["name"]: each.get("context") or {} for each in contexts}
        name = context or (current or {}).get("name", "")
        if name not in known:
            raise Trouble(
                Problem(
                    files,
                    "no such context",
                    name or "none is current",
                    ", ".join(sorted(known)) or "a context",
                    "--context",
                )
            )
        configuration = Configuration()
        configuration.connection_pool_maxsize = MOST_CONNECTIONS
        api = kube_config.new_client_from_config(  # type: ignore[no-untyped-call]
            files, name, persist_config=False, client_configuration=configuration
        )
    except (ConfigException, YAMLError, OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise Trouble(
            Problem(files, "this kubeconfig cannot be used", plain(" ".join(str(error).split()))[:200])
        ) from None
    return Cluster(api, name, namespace or known[name].get("namespace") or "default")
