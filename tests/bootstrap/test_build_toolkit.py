"""The compiler that comes along with DeepEP V2, unpacked from NVIDIA's own wheels as the shipped lock pins them: it is what
`nvcc -cubin` needs and nothing else, and it makes machine code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.toolkit import FLAGS, KERNEL, unpack_toolkit

pytestmark = [pytest.mark.usefixtures("programs"), pytest.mark.long]

PROGRAMS = {"bin/cuobjdump", "bin/nvcc", "bin/nvcc.profile", "bin/ptxas", "nvvm/bin/cicc"}
DEVICE_CODE = "nvvm/libdevice/libdevice.10.bc"


@pytest.fixture(scope="module")
def toolkit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_toolkit(tmp_path_factory.mktemp("toolkit"))


def test_it_holds_what_makes_kernels_and_nothing_else(toolkit: Path) -> None:
    files = {str(path.relative_to(toolkit)) for path in toolkit.rglob("*") if not path.is_dir()}
    rest = {path for path in files if not path.startswith(("include/", "share/"))}
    assert rest == {*PROGRAMS, DEVICE_CODE, "manifest.json", "files.sha256"}
    assert {"include/cuda_runtime.h", "include/cccl/cuda/barrier", "include/crt/host_config.h"} <= files
    licenses = {path for path in files if path.startswith("share/") and path.endswith("/License.txt")}
    assert len(licenses) == 6
    assert not [path for path in toolkit.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o022]


@pytest.mark.parametrize("arch", ["90a", "100f", "103a"])
def test_it_makes_kernels_as_deepep_does(toolkit: Path, tmp_path: Path, arch: str) -> None:
    """With an environment that knows no other toolkit."""
    made = tmp_path / "kernel.cubin"
    nvcc = [toolkit / "bin/nvcc", KERNEL, "-cubin", "-o", made, *FLAGS, f"--gpu-architecture=sm_{arch}"]
    done = subprocess.run(
        nvcc, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert made.read_bytes().startswith(b"\x7fELF")
    shown = subprocess.run(
        [toolkit / "bin/cuobjdump", "-symbols", made], env={}, capture_output=True, text=True, check=True
    )
    assert [line.split()[-1] for line in shown.stdout.splitlines() if "STO_ENTRY" in line] == ["copy"]
