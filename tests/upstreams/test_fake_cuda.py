"""The fake CUDA toolkit answers, compiles, marks and refuses as far as the stand-ins and the engine look."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.support.upstreams import FAKE_CUDA, must, run

pytestmark = pytest.mark.usefixtures("programs")

NVCC = FAKE_CUDA / "bin" / "nvcc"
CUOBJDUMP = FAKE_CUDA / "bin" / "cuobjdump"


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    path = tmp_path / "kernel.cu"
    path.write_text('extern "C" __global__ void kernel(int *value) { *value = threadIdx.x + EXTRA; }\n')
    return path


@pytest.fixture
def toolkit(tmp_path: Path) -> Path:
    """A copy, so that a test may put files beside nvcc."""
    must(FAKE_CUDA / "install", tmp_path / "cuda")
    return tmp_path / "cuda"


def listed(path: Path, option: str = "--list-elf") -> list[str]:
    return must(CUOBJDUMP, option, path).splitlines()


def test_version_has_nvidias_form() -> None:
    assert "\nCuda compilation tools, release 12.9, V12.9.86\n" in must(NVCC, "--version")


def test_help_mentions_split_compile() -> None:
    assert "--split-compile" in must(NVCC, "--help")


@pytest.mark.parametrize("version", ["12.9.86", "12.4.131", "13.0.88", "13.1.80"])
def test_another_release(tmp_path: Path, version: str) -> None:
    must(FAKE_CUDA / "install", tmp_path / "cuda", version)
    short = ".".join(version.split(".")[:2])
    assert f"release {short}, V{version}" in must(tmp_path / "cuda" / "bin" / "nvcc", "--version")
    assert json.loads((tmp_path / "cuda" / "version.json").read_text())["cuda"]["version"].startswith(short + ".")
    major, minor = short.split(".")
    assert f"#define CUDA_VERSION {major}0{minor}0\n" in (tmp_path / "cuda" / "include" / "cuda.h").read_text()
    assert (tmp_path / "cuda" / "include" / "cuda" / "std" / "tuple").exists() == (major == "12")
    assert (tmp_path / "cuda" / "include" / "cccl" / "cuda" / "std" / "tuple").exists()


@pytest.mark.parametrize(
    ("flags", "elf", "ptx"),
    [
        (["-gencode", "arch=compute_90,code=sm_90"], ["sm_90"], []),
        (["-gencode=arch=compute_90a,code=sm_90a", "-gencode=arch=compute_100,code=sm_100"], ["sm_90a", "sm_100"], []),
        (["--generate-code=arch=compute_90,code=[sm_90,compute_90]"], ["sm_90"], ["sm_90"]),
        (["-gencode", "arch=compute_120,code=compute_120"], [], ["sm_120"]),
        (["-arch=sm_80"], ["sm_80"], ["sm_80"]),
        (["-arch", "sm_80"], ["sm_80"], ["sm_80"]),
        ([], ["sm_52"], []),
    ],
)
def test_objects_carry_the_architectures_asked_for(
    kernel: Path, flags: list[str], elf: list[str], ptx: list[str]
) -> None:
    target = kernel.with_suffix(".o")
    must(NVCC, "-c", "-DEXTRA=1", *flags, kernel, "-o", target)
    for option, kind, suffix, wanted in (("--list-elf", "ELF", "cubin", elf), ("--list-ptx", "PTX", "ptx", ptx)):
        found = [
            re.fullmatch(rf"{kind} file +\d+: kernel\.(sm_\w+)\.{suffix}", line) for line in listed(target, option)
        ]
        if wanted:
            assert sorted(match.group(1) for match in found if match) == sorted(wanted)
        else:
            assert "does not contain device code" in must(CUOBJDUMP, option, target)


def test_default_architecture_follows_the_release(kernel: Path, tmp_path: Path) -> None:
    must(FAKE_CUDA / "install", tmp_path / "cuda", "13.0.88")
    must(tmp_path / "cuda" / "bin" / "nvcc", "-dc", "-DEXTRA=1", kernel, "-o", kernel.with_suffix(".o"))
    assert listed(kernel.with_suffix(".o")) == ["ELF file    1: kernel.sm_75.cubin"]


def test_marks_survive_archives_and_libraries(kernel: Path, tmp_path: Path) -> None:
    flags = ["-O3", "-std=c++17", "-Xcompiler", "-fPIC,-Wall", "--split-compile=0", "-t", "2", "-DEXTRA=1"]
    must(NVCC, "-dc", *flags, "-gencode=arch=compute_90,code=sm_90", kernel, "-o", tmp_path / "kernel.o")
    must(
        NVCC,
        "-dlink",
        "-Xcompiler",
        "-fPIC",
        "-arch=sm_90",
        tmp_path / "kernel.o",
        "-L/nowhere",
        "-lnone",
        "-o",
        tmp_path / "dlink.o",
    )
    must("ar", "rcs", tmp_path / "libkernel.a", tmp_path / "kernel.o")
    must("g++", "-shared", "-s", tmp_path / "kernel.o", tmp_path / "dlink.o", "-o", tmp_path / "libkernel.so")
    assert listed(tmp_path / "libkernel.a") == ["ELF file    1: kernel.sm_90.cubin"]
    assert sorted(line.split()[-1] for line in listed(tmp_path / "libkernel.so")) == [
        "dlink.sm_90.cubin",
        "kernel.sm_90.cubin",
    ]


def test_flags_come_from_the_environment_too(kernel: Path) -> None:
    target = kernel.with_suffix(".o")
    must(
        NVCC,
        "-c",
        kernel,
        "-o",
        target,
        NVCC_PREPEND_FLAGS="-DEXTRA=1",
        NVCC_APPEND_FLAGS="-gencode=arch=compute_90,code=sm_90",
    )
    assert listed(target) == ["ELF file    1: kernel.sm_90.cubin"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-c", "-arch=sm_999", "kernel.cu"], "Unsupported gpu architecture 'sm_999'"),
        (["-c", "-gencode", "arch=compute_110,code=sm_110", "kernel.cu"], "Unsupported gpu architecture 'compute_110'"),
        (["-c", "-arch=hopper", "kernel.cu"], "Unsupported gpu architecture 'hopper'"),
        (["-c", "--fastest", "kernel.cu"], "Unknown option '--fastest'"),
        (["-c"], "No input files specified"),
        (["-c", "other.cu"], "Could not open input file 'other.cu'"),
        (["-c", "kernel.cu", "-o"], "Expected an argument to option '-o'"),
    ],
)
def test_refusals(kernel: Path, arguments: list[str], message: str) -> None:
    done = run(NVCC, *arguments, cwd=kernel.parent)
    assert done.returncode == 1
    assert done.stdout.startswith("nvcc fatal   : ")
    assert message in done.stdout


def test_an_error_in_the_source_fails(kernel: Path) -> None:
    done = run(NVCC, "-c", kernel, "-o", kernel.with_suffix(".o"))
    assert done.returncode != 0
    assert "EXTRA" in done.stdout


@pytest.mark.parametrize("text", ["1", "kernel"])
@pytest.mark.parametrize("beside", [False, True], ids=["environment", "file"])
def test_failing_on_demand(kernel: Path, toolkit: Path, text: str, *, beside: bool) -> None:
    if beside:
        (toolkit / "bin" / "FAKE_NVCC_FAIL").write_text(text + "\n")
    environment = {} if beside else {"FAKE_NVCC_FAIL": text}
    done = run(toolkit / "bin" / "nvcc", "-c", "-DEXTRA=1", kernel, "-o", kernel.with_suffix(".o"), **environment)
    assert done.returncode == 2
    assert f"{kernel}(12): error: " in done.stdout
    assert not kernel.with_suffix(".o").exists()


def test_failing_on_demand_spares_other_files(kernel: Path) -> None:
    must(NVCC, "-c", "-DEXTRA=1", kernel, "-o", kernel.with_suffix(".o"), FAKE_NVCC_FAIL="internode")


@pytest.mark.parametrize("beside", [False, True], ids=["environment", "file"])
def test_slow_on_demand(kernel: Path, toolkit: Path, *, beside: bool) -> None:
    if beside:
        (toolkit / "bin" / "FAKE_NVCC_SLEEP").write_text("0.5\n")
    environment = {} if beside else {"FAKE_NVCC_SLEEP": "0.5"}
    before = time.monotonic()
    must(toolkit / "bin" / "nvcc", "-c", "-DEXTRA=1", kernel, "-o", kernel.with_suffix(".o"), **environment)
    assert time.monotonic() - before >= 0.5


def test_the_driver_stub_links_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "main.c").write_text("int main(void) { return 0; }\n")
    must("gcc", tmp_path / "main.c", f"-L{FAKE_CUDA / 'lib64' / 'stubs'}", "-lcuda", "-o", tmp_path / "program")
    assert "libcuda" not in must("readelf", "-d", tmp_path / "program")


def test_cuobjdump_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    assert run(CUOBJDUMP, "--dump-sass", NVCC).returncode == 1
    assert run(CUOBJDUMP, "--list-elf", tmp_path / "none").returncode == 1


def test_install_refuses_to_overwrite(toolkit: Path) -> None:
    assert run(FAKE_CUDA / "install", toolkit, "13.0.88").returncode != 0
    assert "12.9.86" in (toolkit / "version.json").read_text()
