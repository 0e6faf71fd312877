"""A registry of container images on this machine: Debian's docker-registry."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.paths import ROOT

PROGRAM = shutil.which("docker-registry") or str(ROOT / ".venv/registry/usr/bin/docker-registry")


@contextmanager
def running(folder: Path, host: str = "127.0.0.1") -> Iterator[str]:
    """Run a registry that listens on an address of this machine; its address with port. With `folder` as HOME skopeo
    knows that it speaks plain HTTP."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    address = f"{host}:{port}"
    config, about = folder / "registry.yml", folder / ".config/containers/registries.conf"
    about.parent.mkdir(parents=True)
    config.write_text(
        f"version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: {folder}/data\nhttp:\n  addr: {address}\n"
    )
    about.write_text(f'[[registry]]\nlocation = "{address}"\ninsecure = true\n')
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([PROGRAM, "serve", config], stdout=log, stderr=log)
    try:
        while True:
            with socket.socket() as probe:
                if not probe.connect_ex((host, port)):
                    break
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait()
