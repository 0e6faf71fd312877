"""A build whose controller, session, step or Slurm is killed or falls silent, on the embedded cluster: whatever happens,
no allocation is left that `status` does not name, the next bootstrap finishes, the store is valid, and a user's job and
files are as they were."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.e2e import Engine, wait_until
from tests.support.kills import (
    Where,
    builds,
    compiles,
    kill,
    owner_of_scratch,
    pids,
    scratches,
    silent_slurm,
    start_until,
)

if TYPE_CHECKING:
    from tests.support.lab import LiveLab

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]
pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def cluster(lab: LiveLab, standin_sources: Path, built_entries: Path) -> Iterator[Engine]:
    """One lab for all tests of this file: they leave it as they found it, which is what they are about. A user's job
    runs on n002 all the time."""
    lab.reset()
    engine = Engine(lab, standin_sources, built=built_entries)
    engine.use_built()
    job = lab.start_job("n002")
    ended = engine.run("bootstrap")
    assert ended.code == 0, ended.text
    yield engine
    assert lab.job_state(job) == "RUNNING", "a user's job was touched"
    (lab.shared / "go").touch()


@pytest.fixture
def engine(cluster: Engine) -> Iterator[Engine]:
    """A cluster on which DeepEP is to be built anew, slowly; afterwards it is as before: see the module's first
    line."""
    lab = cluster.lab
    for entry in (cluster.on_disk / "store").glob("*-deepep-*"):
        subprocess.run(["rm", "-rf", entry], check=True)
    cluster.slow_nvcc(4)
    try:
        yield cluster
    finally:
        cluster.slow_nvcc(None)
    left = set(builds(lab))
    named = {each["name"] for each in cluster.json("status")["orphans"] if each["kind"] == "allocation"}
    assert left <= named, "an allocation is left that status does not name"
    ended = cluster.run("bootstrap")
    assert ended.code == 0, ended.text
    wait_until(lambda: not builds(lab), "no allocation of a build is left")
    assert cluster.run("verify", "--store").code == 0
    assert [name for name in cluster.store() if name.startswith(".")] == []
    assert scratches(lab) == []
    assert cluster.json("status")["orphans"] == []


POINTS: dict[str, Where] = {
    "the prefix is there": r"^done prefix ",
    "sources are there": r"^done fetch ",
    "Slurm gave the node": lambda engine: builds(engine.lab),
    "the build begins": r"^\[\d+/\d+\] n001: build deepep ",
    "nvcc runs": compiles,
    "it is built and not offered": r"^done build deepep ",
}


@pytest.mark.parametrize("point", POINTS)
def test_kill_9_of_the_controller(engine: Engine, point: str) -> None:
    lab = engine.lab
    kill(start_until(engine, POINTS[point]))
    wait_until(lambda: not builds(lab), "the allocation is cancelled")
    wait_until(lambda: not scratches(lab), "scratch is gone")


def test_kill_9_of_the_controller_while_slurm_is_silent(engine: Engine) -> None:
    lab = engine.lab
    process = start_until(engine, compiles)
    session = owner_of_scratch(lab)
    with silent_slurm(lab):
        kill(process)
        wait_until(lambda: session not in pids(lab, "."), "the session was killed while Slurm did not answer")
    wait_until(lambda: not builds(lab), "the allocation is cancelled once Slurm answers")
    wait_until(lambda: not scratches(lab), "scratch is gone")


def test_kill_9_of_the_session_fails_the_run(engine: Engine) -> None:
    lab = engine.lab
    process = start_until(engine, compiles)
    lab.nsenter("n001", f"kill -KILL {owner_of_scratch(lab)}")
    out, _ = process.communicate()
    assert process.returncode == 1, out
    assert "the build session ended by itself with exit code 137" in out
    wait_until(lambda: not builds(lab), "its allocation is cancelled")
    assert scratches(lab) == []


def test_a_slurmstepd_that_dies_holds_nobody_up(engine: Engine) -> None:
    lab = engine.lab
    process = start_until(engine, compiles)
    for pid in pids(lab, r"^slurmstepd: \[\d+\.\d+\]"):
        lab.nsenter("n001", f"kill -KILL {pid}")
    wait_until(lambda: process.poll() is not None, "the end of the bootstrap")
    out, _ = process.communicate()
    assert process.returncode == 1, out
    assert "Slurm lost this step" in out
    wait_until(lambda: not builds(lab), "its allocation is cancelled")


def orphan(engine: Engine) -> str:
    """Kill controller and everything that it has on n001, but for the allocation, and return that one's number."""
    lab = engine.lab
    process = start_until(engine, compiles)
    (job,) = builds(lab)
    session = owner_of_scratch(lab)
    os.killpg(process.pid, signal.SIGSTOP)  # else it sees that the session ended, and takes away what that held
    # All are stopped before any dies: who is stopped starts nobody that is not in the list, and who sees another of them
    # dead takes the allocation away.
    lab.nsenter(
        "n001",
        f'parent=$(ps -o ppid= -p {session}) && kill -STOP $parent && all="$parent $(ps -o pid= --ppid $parent) {session}"'
        " && kill -STOP $all && kill -KILL $all",
    )
    with suppress(ProcessLookupError):
        kill(process)
    wait_until(lambda: not pids(lab, "nvcc"), "the builds were ended by their own watchers")
    assert builds(lab) == [job]
    return job


def told(document: dict[str, Any]) -> set[tuple[str, str]]:
    return {(each["kind"], each["host"]) for each in document["orphans"]}


LEFT = {("allocation", "n001"), ("scratch", "n001"), ("owner", "n001")}


def test_what_is_left_is_named_and_taken_away(engine: Engine) -> None:
    """Both nodes are busy: n002 with a user's job, n001 with our own that is dead."""
    lab = engine.lab
    job = orphan(engine)
    status = engine.run("status")
    assert f"left by a build that is gone, on n001: Slurm job {job} (RUNNING on n001, of n001 pid" in status.out
    assert "Try: invoke gc --hosts=" in status.out
    assert told(engine.json("status")) >= LEFT
    doctor = engine.json("doctor")
    found = [each for each in doctor["findings"] if each["check"] == "dead-build"]
    assert any(f"Slurm job {job} " in each["found"] for each in found)
    assert all(each["fix"].startswith("invoke gc ") for each in found)
    would = engine.json("gc", "--dry-run")
    assert told(would) >= LEFT
    assert builds(lab) == [job], "looking changes nothing"
    assert engine.json("gc", "--yes")["exit"] == 0
    wait_until(lambda: not builds(lab), "gc cancelled it")
    assert scratches(lab) == []
    assert engine.json("status")["orphans"] == []


def test_the_next_bootstrap_takes_a_dead_allocation_away(engine: Engine) -> None:
    job = orphan(engine)
    plan = engine.run("plan")
    assert plan.code == 0, plan.text
    assert f"Slurm job {job}" in plan.out
    ended = engine.run("bootstrap")
    assert ended.code == 0, ended.text
    assert "every GPU host is busy" not in ended.text
    assert engine.lab.job_state(job) in {"", "CANCELLED"}
