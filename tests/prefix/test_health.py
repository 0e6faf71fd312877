"""The script for Slurm's prolog: what it says of a node that is fit, and of one that is not."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from deepep_bootstrap.plan import host_recipes
from deepep_bootstrap.prefix import modulefiles
from tests.support import modules as support

pytestmark = pytest.mark.usefixtures("programs")

OPTIONS = 'EnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;"\n'
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05\n"


class Node:
    """A node's /proc, /sys and /dev in a folder, with two GPUs and the network cards of b200-003."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, folder / "root"
        record = support.cloud_record(str(folder))
        support.write(
            folder / "current", modulefiles.render_offer(support.offer(str(folder), record), support.templates())
        )
        self.write("../current/manifest.json", "{}")
        self.write("proc/driver/nvidia/params", OPTIONS)
        self.write("proc/driver/nvidia/version", OPEN)
        (self.root / "dev" / "shm").mkdir(parents=True)
        for gpu in range(2):
            self.write(f"sys/bus/pci/devices/0000:0{gpu}:00.0/vendor", "0x10de\n")
            self.write(f"sys/bus/pci/devices/0000:0{gpu}:00.0/class", "0x030200\n")
        for nic in (1, 2):
            self.write(f"sys/class/infiniband/mlx5_{nic}/ports/1/state", "4: ACTIVE\n")
        self.program("uname", "echo b200-003.example.org")
        self.program("nvidia-smi", "echo 'GPU 0: B200'; echo 'GPU 1: B200'")
        self.program("df", "printf 'Filesystem\\ntmpfs 65536 0 65536 0%% /dev/shm\\n'")

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def program(self, name: str, text: str) -> None:
        self.write(f"../bin/{name}", f"#!/bin/sh\n{text}\n")
        (self.folder / "bin" / name).chmod(0o755)

    def look(self) -> tuple[int, list[str]]:
        """Run the script; return its exit code and the checks that say no."""
        script = self.folder / "current" / "slurm" / "deepep-health.sh"
        env = {"HOST_ROOT": str(self.root), "PATH": f"{self.folder}/bin:/usr/bin:/bin"}
        done = subprocess.run([script], capture_output=True, text=True, env=env, check=False)
        return done.returncode, [
            line.split(": ")[1] for line in done.stdout.splitlines() if line.startswith("deepep: ")
        ]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_node_that_is_fit(node: Node) -> None:
    assert node.look() == (0, [])


def limit_slurmd(node: Node) -> None:
    """A slurmd with a low limit, and forks of it, one of which has init as its parent, whose limits say nothing."""
    for pid, parent, start, limit in ((70, 1, 88, "8388608"), (16, 70, 900, "unlimited"), (17, 1, 901, "unlimited")):
        node.write(f"proc/{pid}/comm", "slurmd\n")
        node.write(f"proc/{pid}/stat", f"{pid} (slurmd) S {parent} {'0 ' * 17}{start} 0 0\n")
        node.write(f"proc/{pid}/limits", f"Max locked memory         {limit}     {limit}   bytes\n")


FAULTS: dict[str, tuple[Callable[[Node], object], str]] = {
    "a GPU that does not answer": (lambda node: node.program("nvidia-smi", "echo 'GPU 0: B200'"), "gpu-missing"),
    "no driver": (lambda node: (node.root / "proc/driver/nvidia/version").unlink(), "nvidia-driver"),
    "driver options": (
        lambda node: node.write("proc/driver/nvidia/params", 'EnableStreamMemOPs: 0\nRegistryDwords: ""\n'),
        "driver-options",
    ),
    "no way into GPU memory": (
        lambda node: node.write("proc/driver/nvidia/version", "NVRM version: x\n"),
        "peer-memory",
    ),
    "a port that is down": (
        lambda node: node.write("sys/class/infiniband/mlx5_2/ports/1/state", "1: DOWN\n"),
        "nic-ports",
    ),
    "slurmd's limit": (limit_slurmd, "slurmd-memlock"),
    "shared memory": (lambda node: node.program("df", "printf 'x\\ntmpfs 64 0 64 0%% /\\n'"), "shm"),
    "the prefix is not there": (lambda node: (node.folder / "current/manifest.json").unlink(), "prefix-access"),
}


@pytest.mark.parametrize(("change", "check"), FAULTS.values(), ids=FAULTS)
def test_each_fault_is_one_line(change: Callable[[Node], object], check: str, node: Node) -> None:
    change(node)
    assert node.look() == (1, [check])


def test_what_cannot_be_looked_at_is_no_fault(node: Node) -> None:
    node.program("nvidia-smi", "sleep 60")
    node.program("df", "exit 1")
    (node.root / "proc/driver/nvidia/params").unlink()
    assert node.look() == (0, [])


def test_the_doctor_asks_for_as_much_shared_memory() -> None:
    assert modulefiles.SHM_MIB == host_recipes.SHM_MIB
