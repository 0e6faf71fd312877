"""Fixtures for tests on the embedded cluster: one lab per test run, a reset between tests that change hosts.

A test module gets the fixtures by `pytest_plugins = ["tests.support.lab"]`, not by importing them: `lab` (Lmod) and
`modules_lab` (Environment Modules), both shared by the whole run, and `fresh_lab`: `lab` with fresh disks and an empty
/shared.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deepep_bootstrap.lab import clean, cluster, hosts, slurm
from deepep_bootstrap.lab.cluster_lab import Lab
from deepep_bootstrap.lab.hosts import PREPARED, boot, enter, logs
from deepep_bootstrap.slurm import commands, nodes

TEST_LABS = Path("/run")
TEST_PREFIX = "deepep-lab-test-"


@dataclass(frozen=True)
class LiveLab:
    """A running lab as a test sees it."""

    lab: Lab

    @property
    def dir(self) -> Path:
        return self.lab.path

    @property
    def hosts(self) -> dict[str, str]:
        """Addresses by host name."""
        return {host.name: host.address for host in self.lab.hosts}

    @property
    def hosts_file(self) -> Path:
        return self.lab.hosts_file

    @property
    def shared(self) -> Path:
        """The folder that hosts see as /shared, from outside."""
        return self.lab.shared

    @property
    def env(self) -> dict[str, str]:
        """What to add to the environment of `invoke` so that it finds the hosts."""
        return {"DEEPEP_SSH_CONFIG": str(self.lab.ssh_config)}

    def disk(self, host: str) -> Path:
        """What a host's disk holds beyond image and machine: exactly the files that it wrote; deletions are 0/0
        devices."""
        return self.lab.home(host) / "disk"

    def ssh(self, host: str, command: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command line on a host over SSH, as a person would; stdin is empty."""
        argv = ["ssh", "-F", str(self.lab.ssh_config), "-o", "ConnectTimeout=10", host, command]
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False
        )

    def nsenter(self, host: str, command: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command line in a host as root without SSH, e.g. to break its sshd."""
        argv = [*hosts.enter(self.lab, host), "bash", "-c", command]
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False
        )

    def fake(self, host: str, name: str, value: str | None) -> None:
        """Change one answer of a host's fakes (names: tests/lab/nvidia-smi, tests/lab/fakes.sh); None takes the
        change back. nvidia-smi follows at once, files below /proc and /sys at the host's next boot."""
        file = self.lab.home(host) / "lab" / "fake" / name
        if value is None:
            file.unlink(missing_ok=True)
        else:
            file.write_text(f"{value}\n")

    def bare(self, *hosts: str) -> None:
        """Make GPU nodes as they are before anybody prepared them: no driver options, no module loaded at boot. They
        boot anew."""
        for host in hosts:
            self.nsenter(host, "rm -f " + " ".join(f"/{file}" for file in PREPARED))
        self.reboot(*hosts)

    def reboot(self, *hosts: str) -> None:
        """Switch hosts off and on again, so that changed fakes count; returns when their sshd runs and Slurm's nodes
        are idle."""
        self.boot(*hosts)
        slurm.wait_idle(self.lab, enter(self.lab, self.lab.controller.name), logs(self.lab))

    def tools_log(self, host: str) -> str:
        """The calls of modprobe, update-initramfs and their like on a host since its disk was made, one a line."""
        file = self.lab.home(host) / "lab" / "tools.log"
        return file.read_text() if file.exists() else ""

    def on_login(self, command: str) -> str:
        """Run a command line as root on the login host, where Slurm's clients are, and return what it prints."""
        done = self.nsenter("login1", command)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def node(self, host: str) -> commands.SlurmNode:
        """The node as Slurm shows it."""
        return commands.parse_nodes(self.on_login(f"scontrol show node -o {host}"))[0]

    def reason(self, host: str) -> str:
        """Why the node is drained or down, "" for neither."""
        return nodes.read_reason(self.node(host).reason).text

    def start_job(self, host: str) -> str:
        """Start a user's job on a node and return its number when it runs; it ends when somebody writes /shared/go."""
        go, began = self.shared / "go", self.shared / "began"
        for file in (go, began):
            file.unlink(missing_ok=True)
        script = "touch /shared/began; until [ -e /shared/go ]; do sleep 0.1; done"
        job = self.on_login(f"cd /shared && sbatch --parsable -w {host} --wrap '{script}'").strip()
        # Slurm calls a job running before its script has begun: until then a second slurmstepd may be seen, which
        # becomes the script.
        while not began.exists():
            time.sleep(0.05)
        began.unlink()
        return job

    def job_state(self, job: str) -> str:
        """The state of a job, "" for one that Slurm does not know."""
        found = commands.parse_job(self.on_login(f"scontrol show job -o {job}"))
        return found.state if found else ""

    def boot_id(self, host: str) -> str:
        """The host's boot id, empty while it is off."""
        return hosts.boot_id(self.lab, host)

    def power_cut(self, host: str) -> None:
        """Switch a host off without warning: its TCP connections stay half open. `boot` brings it back."""
        clean.end_processes(self.lab.dir, str(self.lab.home(host)))

    def boot(self, *hosts: str) -> None:
        """Boot hosts, which are switched off first if they are not; their disks are as they were."""
        for host in hosts:
            self.power_cut(host)  # a supervisor that was about to boot its host again would do so beside the new one
        boot(self.lab, *(host for host in self.lab.hosts if host.name in hosts))

    def reset(self) -> None:
        """Fresh disks for all hosts, nothing in /shared, fakes as at first, Slurm idle."""
        cluster.reset(self.lab)


def open_lab(folder: Path, layer: str = "lmod", light: int = 0) -> Iterator[LiveLab]:
    """Bring a lab up, hand it over, take it down."""
    try:
        yield LiveLab(cluster.up(str(folder), layer, print, light))
    finally:
        cluster.down(str(folder))


def new_folder(what: str) -> Path:
    """Return the folder of a lab of this test run."""
    _take_down_orphans()
    return TEST_LABS / f"{TEST_PREFIX}{os.getpid()}-{what}"


def _take_down_orphans() -> None:
    """Take down labs of test runs that were killed: their folders name the run's process."""
    for folder in TEST_LABS.glob(f"{TEST_PREFIX}*"):
        owner = folder.name.removeprefix(TEST_PREFIX).partition("-")[0]
        if not Path("/proc", owner).exists():
            cluster.down(str(folder))


@pytest.fixture(scope="session")
def namespaces(programs: None) -> None:
    """Skip where hosts of their own cannot be made: the loopback lab is tested by test_lab.py and is too different
    for e2e tests."""
    if not hosts.possible():
        pytest.skip("needs root and namespaces (make test uses sudo)")


@pytest.fixture(scope="session")
def lab(namespaces: None) -> Iterator[LiveLab]:
    """The run's lab with Lmod. Tests that change hosts take `fresh_lab`."""
    yield from open_lab(new_folder("lmod"))


@pytest.fixture(scope="session")
def modules_lab(namespaces: None) -> Iterator[LiveLab]:
    """The run's lab with Environment Modules."""
    yield from open_lab(new_folder("em"), "environment-modules")


@pytest.fixture
def fresh_lab(lab: LiveLab) -> LiveLab:
    """The run's lab, reset just now."""
    lab.reset()
    return lab
