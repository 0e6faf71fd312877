"""Wheels come from whichever machine reaches the index: a real index on the lab's bridge that answers some machines
only."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deepep_bootstrap.fetch import locations, wheels
from deepep_bootstrap.lock import model
from tests.support.e2e import LOCK, Engine

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]
pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.fixture(scope="session")
def wheel_folder(standin_sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every wheel of the demo's default stack, one folder a distribution: what an index is behind its pages."""
    folder = tmp_path_factory.mktemp("index")
    cache = tmp_path_factory.mktemp("wheels")
    found = locations.read_mirrors([f"index:standin={standin_sources}/wheels"], {}, {})
    demo = model.read_lock_file(LOCK)
    for target in demo.stacks["v1"].wheels.values():
        for path in wheels.fetch_wheels(target, found, cache, print).values():
            name = path.name.split("-")[0].lower().replace("_", "-")
            (folder / name).mkdir(exist_ok=True)
            (folder / name / path.name).write_bytes(path.read_bytes())
    return folder


class Index(http.server.SimpleHTTPRequestHandler):
    """A plain index: a page of links for each folder, for the machines in `welcome` and nobody else."""

    welcome: frozenset[str] = frozenset()

    def do_GET(self) -> None:
        if self.client_address[0] in self.welcome:
            super().do_GET()
        else:
            self.send_error(403, "not for you")

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def serve(folder: Path, address: str, welcome: set[str]) -> Iterator[str]:
    handler = type("Here", (Index,), {"welcome": frozenset(welcome)})
    with http.server.ThreadingHTTPServer((address, 0), functools.partial(handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://{address}:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


def bootstrap(engine: Engine, url: str) -> tuple[int, str]:
    ended = engine.run("bootstrap", f"--mirror=index:pypi={url}", f"--mirror=index:standin={url}")
    return ended.code, ended.text


@pytest.mark.parametrize("who", ["the build host", "the control machine", "nobody"])
def test_the_machine_that_reaches_the_index_gets_the_wheels(
    engine: Engine, wheel_folder: Path, tmp_path: Path, who: str
) -> None:
    engine.env["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    engine.wheels_from_folder = False
    control = f"{engine.lab.lab.subnet}.1"
    welcome = {"the build host": {engine.lab.hosts["n001"]}, "the control machine": {control}, "nobody": set()}[who]
    if welcome:
        engine.use_built(without="python")
    with serve(wheel_folder, control, welcome) as url:
        code, text = bootstrap(engine, url)
    if who == "nobody":
        assert code == 1
        assert "n001: does not reach the index either" in text
        assert [name for name in engine.store() if not name.startswith(".")] == []
        return
    assert code == 0, text
    assert ("the build host gets the wheels itself" in text) == (who == "the build host")
    cached = {path.name.split("-")[0] for path in (tmp_path / "cache").rglob("*.whl")}
    assert ("numpy" in cached) == (who == "the control machine")
