"""The control machine's program killed, interrupted, terminated or hung up on at each named point of a bootstrap:
whatever happens, what is left is gone or named by `status`, the next bootstrap finishes, the store is valid, and a user's
job and files are as they were."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.e2e import Engine
from tests.support.kills import POINTS, assert_only_ours_changed, assert_recovers, come_to, disks, end, make_ready

if TYPE_CHECKING:
    from tests.support.lab import LiveLab

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]
pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.fixture(scope="module")
def cluster(lab: LiveLab, standin_sources: Path, built_entries: Path) -> Iterator[Engine]:
    """One lab for all kills: each leaves it as it found it, which is what they are about. A user's job runs on n002 all
    the time."""
    lab.reset()
    job = lab.start_job("n002")
    before = disks(lab)
    yield make_ready(lab, standin_sources, built_entries)
    assert lab.job_state(job) == "RUNNING", "a user's job was touched"
    assert_only_ours_changed(before, disks(lab), r"shared:slurm-\d+\.out")
    (lab.shared / "go").touch()


@pytest.fixture
def engine(cluster: Engine) -> Iterator[Engine]:
    yield cluster
    assert_recovers(cluster)


# The others are cases of test_orphans.py.
KILLED = [
    "hosts are looked at",
    "the prefix is tried",
    "sources are fetched",
    "the build of GDRCopy begins",
    "an entry is filled",
    "GDRCopy is published",
    "DeepEP is published",
    "modules are offered",
    "modules are there",
    "the hook is written",
    "hosts are verified",
    "a host is verified",
]


@pytest.mark.parametrize("point", KILLED)
def test_kill_9_of_the_controller_at_a_step(engine: Engine, point: str) -> None:
    process = come_to(engine, POINTS[point])
    os.killpg(process.pid, signal.SIGKILL)
    assert end(process)[0] == -signal.SIGKILL


@pytest.mark.parametrize(
    "point",
    [
        "hosts are looked at",
        "Slurm gave the node",
        "nvcc runs",
        pytest.param("modules are offered", marks=pytest.mark.sample),
        "the hook is written",
        "hosts are verified",
    ],
)
def test_control_c_in_the_terminal_of_the_controller(engine: Engine, point: str) -> None:
    process = come_to(engine, POINTS[point])
    os.killpg(process.pid, signal.SIGINT)
    assert end(process)[0] == 130


@pytest.mark.parametrize("point", ["sources are there", "modules are offered", "the hook is written"])
def test_sigterm_to_the_controller(engine: Engine, point: str) -> None:
    process = come_to(engine, POINTS[point])
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 130


@pytest.mark.parametrize("point", ["the plan is told", "an entry is filled", "hosts are verified"])
def test_the_terminal_of_the_controller_is_gone(engine: Engine, point: str) -> None:
    """SIGHUP, and nobody reads what it says: it may notice that first."""
    process = come_to(engine, POINTS[point])
    assert process.stdout
    process.send_signal(signal.SIGHUP)
    process.stdout.close()
    assert process.wait() in {1, 130}
