"""The image of a V2 stack for real: NVIDIA's compiler and Debian's on a base without a shell compile a kernel as DeepEP
does, in the image's own root."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepep_bootstrap.core.errors import OK
from deepep_bootstrap.kubernetes import oci
from tests.kubernetes.test_image import document, make, make_store, parts
from tests.kubernetes.test_image_long import run
from tests.support.images import make_layout, tar_of_packages
from tests.support.paths import ROOT
from tests.support.toolkit import FLAGS, KERNEL, packages_from_apt, unpack_toolkit

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("programs")]

COMPILE = """
import os, sys
kernel, flags = sys.argv[1:]
with open("/tmp/kernel.cu", "w") as file:
    file.write(kernel)
for command in (
    f"cd /tmp && {os.environ['EP_JIT_NVCC_COMPILER']} /tmp/kernel.cu -cubin -o /tmp/kernel.cubin {flags} 2>&1",
    f"{os.environ['CUDA_HOME']}/bin/cuobjdump -symbols /tmp/kernel.cubin 2>&1",
):
    pipe = os.popen(command)
    print(pipe.read(), "exit", pipe.close())
"""
PROGRAMS = {
    "usr/bin/dash",
    "usr/bin/gcc",
    "usr/bin/gcc-12",
    "usr/bin/sh",
    "usr/bin/x86_64-linux-gnu-gcc-12",
    "usr/lib/gcc/x86_64-linux-gnu/12/cc1plus",
    *(f"usr/lib/x86_64-linux-gnu/lib{name}" for name in (
        "gmp.so.10", "gmp.so.10.4.1", "isl.so.23", "isl.so.23.2.0", "mpc.so.3", "mpc.so.3.3.1",
        "mpfr.so.6", "mpfr.so.6.2.0", "zstd.so.1", "zstd.so.1.5.4",
    )),
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("jit")
    toolkit = unpack_toolkit(folder / "toolkit")
    make_layout(folder / "base", tar_of_packages())
    changes = {"stack": "v2", "module": "deepep/2.1.0-dd758ca-v2", "nccl": "2.30.4", "toolkit": toolkit.name}
    prefix = make_store(folder / "store", "today", toolkit, **changes)
    mirror = packages_from_apt(ROOT / ".venv/toolkit/debs")
    assert make(prefix, folder / "image", folder / "base", mirror) == OK
    yield folder
    prefix.transport.close()


def test_a_kernel_is_compiled_in_the_image_as_deepep_does(place: Path) -> None:
    flags = " ".join((*FLAGS, "--gpu-architecture=sm_90a"))
    done = run(place, "python3", "-c", COMPILE, KERNEL.read_text(encoding="utf-8"), flags, tag="v2")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if "STO_ENTRY" in line or line.strip().startswith("exit")]
    assert [line.split()[-1] for line in said] == ["None", "copy", "None"], done.stdout


def test_the_layer_of_the_host_compiler_is_what_nvcc_calls(place: Path) -> None:
    manifest, config, attached = parts(place / "image")
    made = [each["created_by"] for each in config["history"]]
    assert [text for text in made if "compiler" in text] == ["deepep-bootstrap host compiler debian-12"]
    blob = manifest["layers"][[text.endswith("compiler debian-12") for text in made].index(True)]
    with tarfile.open(oci.blob_path(place / "image", blob["digest"])) as archive:
        members = list(archive)
    assert not [each.name for each in members if not each.issym() and (each.mode & 0o022 or each.uid or each.gid)]
    rest = {each.name for each in members if not each.isdir()}
    plain = ("usr/include/", "usr/lib/gcc/x86_64-linux-gnu/12/include/", "usr/share/doc/")
    assert {name for name in rest if not name.startswith(plain)} == PROGRAMS
    bill = document(place / "image", attached[0]["layers"][0])
    licenses = {
        each["name"]: each["licenses"] for each in bill["components"] if each.get("purl", "").startswith("pkg:deb")
    }
    assert len(licenses) == 15
    assert all(licenses.values())
