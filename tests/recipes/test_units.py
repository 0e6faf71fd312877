"""Compile units: the longest ones begin first, with a real ninja and with files as torch and CMake write them, and what
ninja and nvcc noted reaches the log."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.build import RECIPES

pytestmark = pytest.mark.usefixtures("programs")

TORCH = """ninja_required_version = 1.3
cxx = c++

rule compile
  command = sleep 0.01 && touch $out

rule cuda_compile
  command = sleep 0.01 && touch $out

build {folder}/temp/csrc/kernels/layout.o: cuda_compile {folder}/csrc/kernels/layout.cu
build {folder}/temp/csrc/kernels/internode_ll.o: cuda_compile {folder}/csrc/kernels/internode_ll.cu
build {folder}/temp/csrc/kernels/internode.o: cuda_compile {folder}/csrc/kernels/internode.cu
build {folder}/temp/csrc/other_deep_ep.o: compile {folder}/csrc/other_deep_ep.cpp
build {folder}/temp/csrc/deep_ep.o: compile {folder}/csrc/deep_ep.cpp
"""
CMAKE = """cmake_minimum_required(VERSION 3.19)
project(units CXX)
add_custom_command(OUTPUT made.h COMMAND touch made.h)
add_library(host SHARED alpha.cpp sub/beta.cpp sub/reduce_and.cpp sub/reduce_sum.cpp ${CMAKE_BINARY_DIR}/made.h)
add_executable(info info.cpp)
target_link_libraries(info host)
"""


def run_units(script: str, folder: Path, **environment: str) -> str:
    """Return what lines of bash print after the recipe was read."""
    text = "\n".join((RECIPES["lib.sh"], RECIPES["build/units.sh"], script))
    given = {"PATH": "/usr/bin:/bin", "SCRATCH": str(folder), "ENTRY": "e-1", "CUDA_HOME": f"{folder}/cuda"}
    done = subprocess.run(
        ["/bin/bash", "-c", text], cwd=folder, env={**given, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def started(folder: Path) -> list[str]:
    """Return the names of the objects that ninja made, by when each began."""
    lines = (folder / ".ninja_log").read_text().splitlines()[1:]
    rows = sorted({(int(begin), Path(path).name) for begin, _, _, path, _ in (line.split("\t") for line in lines)})
    return [name for _, name in rows if name.endswith(".o")]


def test_the_longest_units_of_torchs_file_begin_first_and_the_others_stay_in_order(tmp_path: Path) -> None:
    for name in (
        "deep_ep.cpp",
        "other_deep_ep.cpp",
        *(f"kernels/{each}.cu" for each in ("layout", "internode", "internode_ll")),
    ):
        (tmp_path / "csrc" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "csrc" / name).touch()
    (tmp_path / "temp/csrc/kernels").mkdir(parents=True)
    file = tmp_path / "build.ninja"
    file.write_text(TORCH.format(folder=tmp_path))
    wanted = "first_units \"${SCRATCH}/bin\" '(deep_ep|python_api)[.]cpp' 'internode[.]cu'"
    run_units(f"{wanted}; {wanted}; ninja -v -j1; ninja -j1", tmp_path)
    assert started(tmp_path) == ["deep_ep.o", "internode.o", "layout.o", "internode_ll.o", "other_deep_ep.o"]
    before = file.stat().st_mtime_ns
    run_units(f"{wanted}; ninja -j1", tmp_path)
    assert file.stat().st_mtime_ns == before, "what is in order is not written again"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("build")) == ["build.ninja"]


def test_cmakes_file_builds_the_same_with_the_longest_units_first(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "CMakeLists.txt").write_text(CMAKE)
    for name in ("alpha", "sub/beta", "sub/reduce_and", "sub/reduce_sum"):
        (tmp_path / f"{name}.cpp").write_text(f"int {name.rpartition('/')[2]}() {{ return 1; }}\n")
    (tmp_path / "info.cpp").write_text("int alpha();\nint main() { return alpha() - 1; }\n")
    order = "first_units \"${SCRATCH}/bin\" 'reduce_(sum|max)[.]cpp' 'reduce_[a-z_]*[.]cpp'"
    run_units(f"{order}; cmake -S . -B b -G Ninja >&2; cmake --build b -j 1 >&2; b/info; ninja -C b -n", tmp_path)
    assert started(tmp_path / "b")[:2] == ["reduce_sum.cpp.o", "reduce_and.cpp.o"]
    assert "no work to do" in run_units(f"{order}; ninja -C b -n", tmp_path)
    (tmp_path / "CMakeLists.txt").write_text(
        CMAKE + "add_executable(more info.cpp)\ntarget_link_libraries(more host)\n"
    )
    run_units(f"{order}; cmake --build b -j 1 >&2; b/more", tmp_path)


def test_where_there_is_no_ninja_nothing_is_done(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    out = run_units('first_units "${SCRATCH}/folder" x[.]cu; echo "${PATH}"', tmp_path, PATH=f"{tmp_path}/bin")
    assert out == f"{tmp_path}/bin\n"
    assert not (tmp_path / "folder").exists()


NVCC = """#!/bin/sh
printf '%s\\n' 'Usage  : nvcc [options] <inputfile>' {option}
"""


@pytest.mark.parametrize(
    ("option", "flags"),
    [("'--time <file name>   (-time)'", "--split-compile=0 --time={folder}/times-e-1.csv"), ("", "--split-compile=0")],
    ids=["one that times", "one that does not"],
)
def test_nvcc_is_asked_for_its_times_where_it_knows_how(option: str, flags: str, tmp_path: Path) -> None:
    (tmp_path / "cuda/bin").mkdir(parents=True)
    (tmp_path / "cuda/bin/nvcc").write_text(NVCC.format(option=option))
    (tmp_path / "cuda/bin/nvcc").chmod(0o755)
    script = 'export NVCC_APPEND_FLAGS=--split-compile=0; time_nvcc; echo "${NVCC_APPEND_FLAGS}"'
    assert run_units(script, tmp_path).strip() == flags.format(folder=tmp_path)


def test_what_was_noted_is_told_with_a_mark(tmp_path: Path) -> None:
    for folder in ("build", "build/device", "build/CMakeFiles/scratch"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / ".ninja_log").write_text(f"# ninja log v5\n0\t9\t1\t{Path(folder).name}.o\tff\n")
    assert run_units("tell_times build", tmp_path).splitlines() == [
        "timing ninja: # ninja log v5",
        "timing ninja: 0\t9\t1\tbuild.o\tff",
        "timing ninja: # ninja log v5",
        "timing ninja: 0\t9\t1\tdevice.o\tff",
    ]
    (tmp_path / "times-e-1.csv").write_text("source file name , phase name\na.cu , ptxas\n")
    assert run_units("tell_times nowhere 2>&1 || true", tmp_path).splitlines()[-2:] == [
        "timing nvcc: source file name , phase name",
        "timing nvcc: a.cu , ptxas",
    ]
