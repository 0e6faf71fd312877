"""One GPU machine with nothing but CUDA, compilers and a torch of its own: no network, no SSH, no Slurm, no module
system.

The program runs on the lab's n001 itself, out of a folder filled by `pip install --target`, with `connection=local`.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deepep_bootstrap.core.toml import load_toml
from deepep_bootstrap.fetch import locations, wheels
from deepep_bootstrap.lock import model
from tests.support.e2e import LOCK, ROOT

if TYPE_CHECKING:
    from tests.support.lab import LiveLab

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]
pytestmark = [pytest.mark.e2e, pytest.mark.long]

PREFIX = "/opt/some-dir"
NEEDS = load_toml((ROOT / "pyproject.toml").read_text(), "pyproject.toml")["project"]["dependencies"]
BUNDLED = "/opt/own/lib/python3.*/site-packages/nvidia/nvshmem/lib/libnvshmem_host.so.3"
SLURM = "sinfo squeue scontrol sbatch srun salloc scancel"


@pytest.fixture
def machine(fresh_lab: LiveLab, standin_sources: Path, tmp_path: Path) -> LiveLab:
    """The lab's n001 without Slurm and modules, with the program, its dependencies and an interpreter that has torch
    in /shared."""
    shared = fresh_lab.shared
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listing.stdout.splitlines():
        if (ROOT / name).is_file():
            (shared / "repo" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, shared / "repo" / name)
    subprocess.run([sys.executable, "-m", "pip", "install", "-qq", "--target", shared / "site", *NEEDS], check=True)
    shutil.copytree(standin_sources, shared / "standin")
    (shared / "wheels").mkdir()
    demo = model.read_lock_file(LOCK).stacks["v1-cu13"].wheels[f"cp3{sys.version_info.minor}-x86_64"]
    found = locations.read_mirrors([f"index:standin={standin_sources}/wheels"], {}, {})
    # With the NVSHMEM that torch's wheel brings: without LD_PRELOAD of ours, DeepEP gets that one.
    wanted = [wheel for wheel in demo if wheel.name in {"torch", "numpy", "setuptools", "nvidia-nvshmem-cu13"}]
    for path in wheels.fetch_wheels(wanted, found, tmp_path / "cache", print).values():
        shutil.copy(path, shared / "wheels")
    run(
        fresh_lab,
        'pid=$(cat /run/slurmd.pid); kill "$pid"; while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done; '
        "rm -rf /usr/sbin/sshd /usr/share/lmod /etc/profile.d/*lmod* /etc/profile.d/*modules*"
        f' && for name in {SLURM}; do rm -f "/usr/bin/$name"; done'
        " && bash /usr/local/cuda/install /tmp/cuda-13 13.0.88 && rm -r /usr/local/cuda && mv /tmp/cuda-13 "
        "/usr/local/cuda"
        " && python3 -m venv /opt/own"
        " && /opt/own/bin/python -m pip install -q --no-index --no-deps --find-links /shared/wheels torch numpy "
        "setuptools"
        " nvidia-nvshmem-cu13"
        # The stand-in's wheel has text where the real one has a library, which torch opens.
        f" && echo 'int of_the_wheel;' | gcc -shared -Wl,-soname,libnvshmem_host.so.3 -x c - -o $(echo {BUNDLED})"
        # A node with a driver, or nothing is preloaded.
        " && echo 'int of_the_driver;' | gcc -shared -Wl,-soname,libcuda.so.1 -x c - -o "
        "/usr/lib/x86_64-linux-gnu/libcuda.so.1 && ldconfig",
    )
    return fresh_lab


def run(lab: LiveLab, command: str, code: int = 0) -> str:
    done = lab.nsenter("n001", command, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def invoke(lab: LiveLab, words: str, code: int = 0) -> str:
    return run(lab, f"cd /shared/repo && PYTHONPATH=/shared/site HOME=/root python3 -m invoke {words}", code)


def test_a_machine_with_nothing_around_it(machine: LiveLab) -> None:
    flags = (
        f"--hosts=hosts/local.txt --lock=tests/upstreams/demo.lock.toml --stack=v1-cu13 --python=/opt/own/bin/python "
        f"--prefix={PREFIX}"
        " --mirror https://example.invalid/standin/=/shared/standin/git/standin/"
    )
    said = invoke(machine, f"bootstrap {flags} --yes")
    for absence in ("no Slurm", "no module system", "no way out of the local network", "no sshd"):
        assert said.count(f"note: {absence}") == 1, f"each absence is reported once: {said}"
    run(machine, f"grep -q CycloneDX {PREFIX}/current/sbom.cdx.json")
    before = run(machine, "find /opt/own -newer /shared/repo/tasks.py -name '*.py' -o -name deep_ep* | head").split()
    assert not [name for name in before if "deep_ep" in name], "nothing is written into somebody else's environment"
    # A node with the driver: the image's libcuda is a stand-in's business, /proc tells the scripts.
    ran = run(machine, f"bash {PREFIX}/sbatch/intranode-test.sbatch --num-processes 2")
    assert len(re.findall(r"\.\.\. passed", ran)) >= 24
    assert "exit code 0" in ran
    kept = "NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1"
    seen = run(machine, f"{kept} bash -c {shlex.quote(f'. {PREFIX}/current/env.sh && env')}")
    for setting in kept.split():
        assert f"\n{setting}\n" in seen, "what the caller set stays set"
    assert "Nothing to do" in invoke(machine, f"bootstrap {flags} --yes")
    assert "passed" in invoke(machine, f"test --hosts=hosts/local.txt --prefix={PREFIX} --kind=low-latency")
    assert "NVSHMEM store/" in invoke(machine, f"verify --hosts=hosts/local.txt --prefix={PREFIX}")
    run(
        machine,
        f"cp {PREFIX}/store/*-nvshmem-*/lib/libnvshmem_host.so.3 {BUNDLED}; echo 'unset LD_PRELOAD' | tee -a "
        f"{PREFIX}/current/env*.sh",
    )
    without = invoke(machine, f"verify --hosts=hosts/local.txt --prefix={PREFIX}", code=4)
    assert "DeepEP would call another NVSHMEM — found /opt/own/lib" in without, "nothing but LD_PRELOAD puts ours first"
