"""An index of wheels behind HTTP, for the machines that it welcomes, with a password where one is set.

A test module gets `wheel_folder` by `pytest_plugins = ["tests.support.e2e", "tests.support.index"]`.
"""

from __future__ import annotations

import base64
import functools
import http.server
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deepep_bootstrap.fetch import locations, wheels
from deepep_bootstrap.lock import model
from tests.support.e2e import LOCK


class Index(http.server.SimpleHTTPRequestHandler):
    """A plain index: a page of links for each folder, for the addresses in `welcome` that say `login` (USER:PASSWORD; ""
    for nothing to say) and nobody else."""

    welcome: frozenset[str] = frozenset()
    login = ""

    def do_GET(self) -> None:
        said = base64.b64decode(self.headers.get("Authorization", "").removeprefix("Basic ")).decode()
        if self.client_address[0] not in self.welcome:
            self.send_error(403, "not for you")
        elif self.login and said != self.login:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="wheels"')
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            super().do_GET()

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def serve(folder: Path, address: str, welcome: Collection[str], login: str = "") -> Iterator[str]:
    """Serve a folder and yield the URL, with the login in it."""
    handler = type("Here", (Index,), {"welcome": frozenset(welcome), "login": login})
    with http.server.ThreadingHTTPServer((address, 0), functools.partial(handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://{f'{login}@' if login else ''}{address}:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="session")
def wheel_folder(standin_sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every wheel of the demo's default stack, one folder a distribution: what an index is behind its pages."""
    folder, cache = tmp_path_factory.mktemp("index"), tmp_path_factory.mktemp("wheels")
    found = locations.read_mirrors([f"index:standin={standin_sources}/wheels"], {}, {})
    for target in model.read_lock_file(LOCK).stacks["v1"].wheels.values():
        for path in wheels.fetch_wheels(target, found, cache, print).values():
            place = folder / path.name.split("-")[0].lower().replace("_", "-")
            place.mkdir(exist_ok=True)
            (place / path.name).write_bytes(path.read_bytes())
    return folder
