"""A hostile user of the build host: he reads every command line there while a build fetches wheels from an index that
wants a password."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deepep_bootstrap.lab import hosts
from tests.support.e2e import Engine
from tests.support.index import serve

pytest_plugins = ["tests.support.lab", "tests.support.e2e", "tests.support.index"]
pytestmark = pytest.mark.e2e

USER, PASSWORD = "admin", "S3cr3tPW"
MALLORY = "nobody"
# As ps does it, over and over: the command line of every process that he can see.
WATCH = "while :; do cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '; echo; done"


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


@pytest.mark.sample
@pytest.mark.long
def test_nobody_reads_the_password_of_an_index(engine: Engine, wheel_folder: Path, tmp_path: Path) -> None:
    engine.env["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    engine.wheels_from_folder = False
    control, builder = f"{engine.lab.lab.subnet}.1", engine.lab.hosts["n001"]
    seen = tmp_path / "seen"
    with serve(wheel_folder, control, {builder}, f"{USER}:{PASSWORD}") as url, watch(engine, "n001", seen):
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
