"""A whole bootstrap out of one directory: the control machine sits in a network without a way out, its cache is empty, and everything
is built and proven all the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from e2e_support import LOCK, ROOT, Engine

from deepep_bootstrap import lab_hosts

pytest_plugins = ["lab_support", "e2e_support"]
pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("lab")]

TARGET = f"cp3{sys.version_info.minor}-x86_64"


def test_a_bootstrap_out_of_a_mirror_without_a_way_out(engine: Engine, tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    git = f"--mirror=https://example.invalid/standin/={engine.sources}/git/standin/"
    what = [f"--lock={LOCK}", "--stack=v1", f"--target={TARGET}"]
    made = run(engine, ["mirror", str(mirror), *what, git, f"--mirror=index:standin={engine.sources}/wheels"])
    assert made.returncode == 0, made.stdout + made.stderr
    # The login host's network: the bridge to the other hosts, and nothing else.
    inside = [*lab_hosts.enter(engine.lab.lab, "login1")[:3], "-n", "--"]
    routes = json.loads(subprocess.run([*inside, "ip", "-json", "route"], capture_output=True, text=True, check=True).stdout)
    assert routes
    assert not [route for route in routes if route["dst"] == "default"]
    flags = [f"--hosts={engine.lab.hosts_file}", f"--prefix={engine.prefix}", f"--lock={LOCK}", f"--mirror={mirror}"]
    engine.env["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    ended = run(engine, ["bootstrap", *flags], inside)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "hashes as locked" in ended.stdout
    kinds = {name.split("-")[1] for name in engine.store() if not name.startswith(".")}
    assert kinds == {"gdrcopy", "nvshmem", "python", "deepep"}
    checked = run(engine, ["mirror", str(mirror), f"--lock={LOCK}", "--check"], inside)
    assert checked.returncode == 0, "using a mirror must not change it: " + checked.stderr


def run(engine: Engine, words: list[str], inside: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    argv = [*(inside or []), sys.executable, "-m", "invoke", *words]
    done = subprocess.run(
        argv, cwd=ROOT, env=engine.environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, check=False
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    return done
