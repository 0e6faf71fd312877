"""A machine without a GPU builds for the GPUs that it is told of, and nodes that have such GPUs use what it built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.e2e import Engine

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]
pytestmark = [pytest.mark.e2e, pytest.mark.long]

LOAD = (
    "module use /shared/deepep/modulefiles; module load deepep; python -c 'import deep_ep as d; print(d.__version__)'"
)


def test_a_login_node_builds_for_the_gpu_nodes(engine: Engine, tmp_path: Path) -> None:
    lab = engine.lab
    # The toolkit, as a build farm has it: without any GPU or driver.
    assert lab.nsenter("n001", "cp -a /usr/local/cuda /shared/toolkit").returncode == 0
    assert lab.nsenter("login1", "mv /shared/toolkit /usr/local/cuda").returncode == 0
    hosts = tmp_path / "farm.txt"
    hosts.write_text("defaults prefix=/shared/deepep\nlogin1 role=login\n")
    farm = replace(engine, hosts=hosts)
    refused = farm.run("bootstrap", "--yes")
    assert refused.code == 1, refused.text
    assert "no GPU host answered" in refused.text
    assert "archs=9.0" in refused.text
    assert not engine.store()
    built = farm.json("bootstrap", "--yes", "--archs=9.0,10.0")
    assert built["exit"] == 0, built
    # A node with a GPU loads what was built, and a bootstrap of the whole cluster finds nothing left to build.
    loaded = lab.ssh("n001", f'bash -lc "{LOAD}"')
    assert loaded.stdout.strip() == "1.2.1", loaded.stderr
    entries = engine.store()
    whole = replace(engine, smoke=True).json("bootstrap", "--yes", "--archs=9.0,10.0")
    assert whole["exit"] == 0, whole
    assert engine.store() == entries
    assert [each["state"] for each in whole["outcomes"] if each["step"] == "smoke test"] == ["done"]
