"""The compiler that comes along with DeepEP V2, unpacked from NVIDIA's own wheels as the shipped lock pins them: it is what
`nvcc -cubin` needs and nothing else, and it makes machine code."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import uv

from deepep_bootstrap.bootstrap.build import BuildRequest
from deepep_bootstrap.core import filetree
from deepep_bootstrap.fetch.locations import Mirrors
from deepep_bootstrap.fetch.wheels import fetch_wheels
from deepep_bootstrap.inventory.facts import Python, Toolkit
from deepep_bootstrap.prefix.entries import EntryInputs, name_entries
from tests.support import standins
from tests.support.build import FAST, RECIPES, make_prefix
from tests.support.paths import ROOT
from tests.support.shipped import shipped_lock

pytestmark = [pytest.mark.usefixtures("programs"), pytest.mark.long]

KERNEL = ROOT / "tests/cases/recipes/jit-kernel.cu"
FLAGS = (  # those of DeepEP V2, csrc/jit/compiler.hpp
    "-std=c++20",
    "--diag-suppress=39,161,174,177,186,940,3012",
    "--ptxas-options=--register-usage-level=10",
    "--compiler-options=-fPIC,-O3,-fconcepts,-Wno-deprecated-declarations,-Wno-abi",
    "-O3",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
)
PROGRAMS = {"bin/cuobjdump", "bin/nvcc", "bin/nvcc.profile", "bin/ptxas", "nvvm/bin/cicc"}
DEVICE_CODE = "nvvm/libdevice/libdevice.10.bc"


@dataclass(frozen=True)
class Unpacked:
    """The entry in its prefix."""

    path: Path
    name: str


@pytest.fixture(scope="module")
def toolkit(tmp_path_factory: pytest.TempPathFactory) -> Unpacked:
    """The wheels are kept below .venv: they have 120 MB."""
    lock = shipped_lock()
    python = Python("/usr/bin/python3.11", "3.11.2")
    none = Toolkit("/nowhere", "", split_compile=False, stubs=False)
    asked = EntryInputs(lock, lock.stacks["v2"], RECIPES, ("9.0", "10.0"), standins.FACTS, none, python, "cp311-x86_64")
    entry = next(each for each in name_entries(asked) if each.kind == "toolkit")
    found = fetch_wheels(entry.wheels, Mirrors(), ROOT / ".venv/toolkit", lambda _: None)
    files = [*((f"wheels/{path.name}", path) for path in found.values()), ("bin/uv", Path(uv.find_uv_bin()))]

    def chunks() -> Iterator[bytes]:
        yield from filetree.tar_tree(tuple(files))

    prefix = make_prefix(tmp_path_factory.mktemp("toolkit"))
    request = BuildRequest(
        str(prefix), (entry,), RECIPES, chunks, prefix.parent / "logs", heartbeat=float(FAST), jobs=2
    )
    outcomes = standins.run(request)
    assert {kind: outcome.state for kind, outcome in outcomes.items()} == {"toolkit": "done"}, outcomes
    return Unpacked(prefix / "store" / entry.name, entry.name)


def test_it_holds_what_makes_kernels_and_nothing_else(toolkit: Unpacked) -> None:
    files = {str(path.relative_to(toolkit.path)) for path in toolkit.path.rglob("*") if not path.is_dir()}
    rest = {path for path in files if not path.startswith(("include/", "share/"))}
    assert rest == {*PROGRAMS, DEVICE_CODE, "manifest.json", "files.sha256"}
    assert {"include/cuda_runtime.h", "include/cccl/cuda/barrier", "include/crt/host_config.h"} <= files
    licenses = {path for path in files if path.startswith("share/") and path.endswith("/License.txt")}
    assert len(licenses) == 6
    assert not [path for path in toolkit.path.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o022]


@pytest.mark.parametrize("arch", ["90a", "100f", "103a"])
def test_it_makes_kernels_as_deepep_does(toolkit: Unpacked, tmp_path: Path, arch: str) -> None:
    """With an environment that knows no other toolkit."""
    made = tmp_path / "kernel.cubin"
    nvcc = [toolkit.path / "bin/nvcc", KERNEL, "-cubin", "-o", made, *FLAGS, f"--gpu-architecture=sm_{arch}"]
    done = subprocess.run(
        nvcc, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert made.read_bytes().startswith(b"\x7fELF")
    shown = subprocess.run(
        [toolkit.path / "bin/cuobjdump", "-symbols", made], env={}, capture_output=True, text=True, check=True
    )
    assert [line.split()[-1] for line in shown.stdout.splitlines() if "STO_ENTRY" in line] == ["copy"]
