"""A hostile user of the build host: he reads every command line there while a build fetches wheels from an index that
wants a password."""

from __future__ import annotations

import base64
import functools
import http.server
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deepep_bootstrap.fetch import locations, wheels
from deepep_bootstrap.lab import hosts
from deepep_bootstrap.lock import model
from tests.support.e2e import LOCK, Engine

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]
pytestmark = pytest.mark.e2e

USER, PASSWORD = "admin", "S3cr3tPW"
MALLORY = "nobody"
# As ps does it, over and over: the command line of every process that he can see.
WATCH = "while :; do cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '; echo; done"


class Index(http.server.SimpleHTTPRequestHandler):
    """A plain index, a page of links for each folder, for the one machine that says the password."""

    welcome = ""

    def do_GET(self) -> None:
        said = self.headers.get("Authorization", "").removeprefix("Basic ")
        if self.client_address[0] != self.welcome:
            self.send_error(403, "not for you")
        elif base64.b64decode(said) != f"{USER}:{PASSWORD}".encode():
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
def serve(folder: Path, address: str, welcome: str) -> Iterator[str]:
    handler = type("Here", (Index,), {"welcome": welcome})
    with http.server.ThreadingHTTPServer((address, 0), functools.partial(handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://{USER}:{PASSWORD}@{address}:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def watch(engine: Engine, host: str, seen: Path) -> Iterator[None]:
    """Write every command line that MALLORY sees on a host into `seen`."""
    argv = [*hosts.enter(engine.lab.lab, host), "runuser", "-u", MALLORY, "--", "bash", "-c", WATCH]
    with seen.open("wb") as file:
        process = subprocess.Popen(argv, stdout=file, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            engine.lab.nsenter(host, f"for pid in $(ps -o pid= -u {MALLORY}); do kill $pid; done; true")
            process.wait()


@pytest.fixture
def wheel_folder(standin_sources: Path, tmp_path: Path) -> Path:
    """Every wheel of the demo's default stack, one folder a distribution: what an index is behind its pages."""
    folder = tmp_path / "index"
    found = locations.read_mirrors([f"index:standin={standin_sources}/wheels"], {}, {})
    for target in model.read_lock_file(LOCK).stacks["v1"].wheels.values():
        for path in wheels.fetch_wheels(target, found, tmp_path / "wheels", print).values():
            place = folder / path.name.split("-")[0].lower().replace("_", "-")
            place.mkdir(parents=True, exist_ok=True)
            (place / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.sample
def test_nobody_reads_the_password_of_an_index(engine: Engine, wheel_folder: Path, tmp_path: Path) -> None:
    engine.env["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    engine.wheels_from_folder = False
    control, builder = f"{engine.lab.lab.subnet}.1", engine.lab.hosts["n001"]
    seen = tmp_path / "seen"
    with serve(wheel_folder, control, builder) as url, watch(engine, "n001", seen):
        engine.env["DEEPEP_MIRRORS"] = f"index:pypi={url}\nindex:standin={url}"
        ended = engine.run("bootstrap")
    assert ended.code == 0, ended.text
    assert "the build host gets the wheels itself" in ended.text
    lines = seen.read_text(errors="replace")
    assert re.search(r"/bin/uv pip install .*--require-hashes", lines), "the watcher saw uv at work"
    assert [line for line in lines.splitlines() if PASSWORD in line] == []
    assert PASSWORD not in ended.text
    kept = [path for path in engine.on_disk.rglob("*") if path.is_file() and not path.is_symlink()]
    assert any(path.name == "manifest.json" for path in kept)
    assert [path for path in kept if PASSWORD.encode() in path.read_bytes()] == [], "neither logs nor manifests hold it"
