"""What a bootstrap has on hosts killed, silent or without power at points of it: connections, the build's session, Slurm's
step, the script that publishes, a compiler, slurmctld, slurmd, a host as a whole. Whatever happens, what is left is gone
or named by `status`, the next bootstrap finishes, the store is valid, and a user's job and files are as they were."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.e2e import Engine, wait_until
from tests.support.kills import (
    POINTS,
    assert_only_ours_changed,
    assert_recovers,
    come_to,
    disks,
    end,
    make_ready,
    owner_of_scratch,
    pids,
    sessions,
    silent_slurm,
    stopped,
)

if TYPE_CHECKING:
    from tests.support.lab import LiveLab

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]
pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.fixture(scope="module")
def cluster(lab: LiveLab, standin_sources: Path, built_entries: Path) -> Iterator[Engine]:
    """One lab for all tests of this file: they leave it as they found it, which is what they are about."""
    lab.reset()
    before = disks(lab)
    yield make_ready(lab, standin_sources, built_entries)
    assert_only_ours_changed(before, disks(lab), r"shared:slurm-\d+\.out", r"shared:go")


@pytest.fixture(scope="module")
def users_job(cluster: Engine) -> Iterator[str]:
    """The number of a user's job that runs on n002 from the first test that asks for it to the last of the file."""
    lab = cluster.lab
    job = lab.start_job("n002")
    yield job
    assert lab.job_state(job) == "RUNNING", "a user's job was touched"
    assert "Restarts=0" in lab.on_login(f"scontrol show job {job}")
    (lab.shared / "go").touch()


@pytest.fixture
def engine(cluster: Engine, users_job: str) -> Iterator[Engine]:
    yield cluster
    assert_recovers(cluster)


def cut_power(engine: Engine, host: str) -> None:
    """Switch a host off and on again, and wait until its slurmd has registered. Its node may still be taken: Slurm
    keeps an allocation without a script."""
    before = engine.lab.node(host).started
    engine.lab.power_cut(host)
    engine.lab.boot(host)
    wait_until(lambda: engine.lab.node(host).started != before, f"{host} is back")


# First, since the user's job runs on this host later


@pytest.mark.parametrize("point", ["nvcc runs", pytest.param("the hook is written", marks=pytest.mark.sample)])
def test_power_cut_of_a_host_that_does_not_build(cluster: Engine, point: str) -> None:
    process = come_to(cluster, POINTS[point])
    cut_power(cluster, "n002")
    code, out = end(process)
    assert code in {0, 1}, out
    assert code == 0 or "n002" in out, out
    assert_recovers(cluster)


@pytest.mark.parametrize("point", ["nvcc runs", "modules are offered"])
def test_power_cut_of_the_build_host(engine: Engine, point: str) -> None:
    process = come_to(engine, POINTS[point])
    cut_power(engine, "n001")
    code, out = end(process)
    assert code in {0, 1}, out
    assert code == 0 or "n001" in out, out


@pytest.mark.parametrize(
    "point",
    [
        "hosts are looked at",
        "Slurm gave the node",
        "an entry is filled",
        "nvcc runs",
        "modules are offered",
        "hosts are verified",
    ],
)
def test_every_connection_to_the_build_host_is_cut(engine: Engine, point: str) -> None:
    process = come_to(engine, POINTS[point])
    engine.lab.nsenter("n001", f"kill -KILL {' '.join(sessions(engine.lab))}")
    code, out = end(process)
    assert code in {0, 1}, out
    assert code == 0 or "n001" in out, out


BUILDING = {
    name: replace(POINTS[name], missing=missing, slow=2)
    for name, missing in {
        "an entry is filled": "deepep",
        "GDRCopy is published": "gdrcopy|deepep",
        "nvcc runs": "deepep",
    }.items()
}
"""Points at which the build of DeepEP is still long under way."""


@pytest.mark.parametrize(
    "point", ["an entry is filled", pytest.param("GDRCopy is published", marks=pytest.mark.sample)]
)
def test_kill_9_of_the_session_of_a_build(engine: Engine, point: str) -> None:
    process = come_to(engine, BUILDING[point])
    engine.lab.nsenter("n001", f"kill -KILL {owner_of_scratch(engine.lab)}")
    code, out = end(process)
    assert code == 1, out
    assert "the build session ended by itself with exit code 137" in out


@pytest.mark.parametrize("point", ["an entry is filled"])
def test_kill_9_of_every_slurmstepd(engine: Engine, point: str) -> None:
    process = come_to(engine, BUILDING[point])
    kill_all(engine, r"^slurmstepd: \[\d+\.\d+\]")
    code, out = end(process)
    assert code == 1, out
    assert "Slurm lost this step" in out


@pytest.mark.parametrize("point", ["an entry is filled", "nvcc runs"])
def test_kill_9_of_the_script_that_publishes(engine: Engine, point: str) -> None:
    process = come_to(engine, BUILDING[point])
    lab = engine.lab
    script = lab.nsenter("n001", "cut -d ' ' -f 1 /var/tmp/deepep-0/deepep-scratch-*/early/*.builder").stdout.split()
    assert script
    lab.nsenter("n001", f"kill -KILL {' '.join(script)}")
    code, out = end(process)
    assert code == 1, out
    assert "deepep" in out


def test_kill_9_of_a_compiler(engine: Engine) -> None:
    """As the kernel does where memory is short."""
    process = come_to(engine, BUILDING["nvcc runs"])
    kill_all(engine, r"nvcc.*\.cu")
    code, out = end(process)
    assert code == 1, out
    assert re.search(r"^failed +build deepep", out, re.MULTILINE), out


SILENCE = 6.0
"""Seconds: Slurm's clients wait longer for an answer, our looks before and after do not see it all."""


@pytest.mark.parametrize("point", ["sources are there", "Slurm gave the node", "nvcc runs", "DeepEP is published"])
def test_slurmctld_is_silent_for_a_while(engine: Engine, point: str) -> None:
    process = come_to(engine, POINTS[point])
    with silent_slurm(engine.lab):
        time.sleep(SILENCE)
    code, out = end(process)
    assert code == 0, out


@pytest.mark.parametrize("point", ["sources are there", "nvcc runs"])
def test_slurmd_is_silent_for_a_while(engine: Engine, point: str) -> None:
    process = come_to(engine, POINTS[point])
    with stopped(engine.lab, r"^\S*slurmd( |$)", "n001"):
        time.sleep(SILENCE)
    code, out = end(process)
    assert code == 0, out


def kill_all(engine: Engine, pattern: str) -> None:
    """Kill the processes of n001 whose command line matches, once there are some."""
    found: list[str] = []

    def search() -> list[str]:
        found[:] = pids(engine.lab, pattern)
        return found

    wait_until(search, f"{pattern} runs")
    engine.lab.nsenter("n001", f"kill -KILL {' '.join(found)}")
