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
    """Return what lines of bash print after the recipes were read."""
    text = "\n".join((RECIPES["lib.sh"], RECIPES["build/units.sh"], RECIPES["build/deepep-setup.sh"], script))
    given = {"PATH": "/usr/bin:/bin", "SCRATCH": str(folder), "ENTRY": "e-1", "CUDA_HOME": f"{folder}/cuda"}
    given |= {"PREFIX": f"{folder}/prefix"}
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


CCACHE = """#!/bin/sh
[ -z "{broken}" ] || exit 1
printf '%s|%s|%s|%s\\n' "$PWD" "$CCACHE_DIR" "${{CCACHE_REMOTE_STORAGE-none}}" "$*" >>{log}
exec "$@"
"""


def compiled(folder: Path, *words: str, cache: str = "", home: Path | None = None) -> tuple[bytes, str]:
    """Compile a unit in the scratch folder `folder` by the wrapper of g++; return the object and what the wrappers'
    making said. `cache` is a fake ccache ("works", "broken"), "" for none."""
    source = folder / "src/deepep/csrc"
    source.mkdir(parents=True)
    (folder / "build/temp").mkdir(parents=True)
    (source / "unit.h").write_text("inline const char *where() { return __FILE__; }\n")
    (source / "unit.cpp").write_text(
        '#include "unit.h"\nconst char *both() { return *where() ? where() : __FILE__; }\n'
    )
    (folder / "tools").mkdir()
    if cache:
        text = CCACHE.format(broken="yes" if cache == "broken" else "", log=folder / "ccache.log")
        (folder / "tools/ccache").write_text(text)
        (folder / "tools/ccache").chmod(0o755)
    command = " ".join(("g++", "-g", "-O2", f"-I{source}", "-c", *words, "-o", str(folder / "build/temp/unit.o")))
    script = f'write_compilers "${{WORK}}/bin" "" 2>&1; cd {folder}/src/deepep; {command}'
    said = run_units(
        script,
        folder,
        PATH=f"{folder}/tools:/usr/bin:/bin",
        HOME=str(home or folder / "home"),
        CCACHE_REMOTE_STORAGE="http://elsewhere.invalid",
    )
    return (folder / "build/temp/unit.o").read_bytes(), said


def test_an_object_is_the_same_with_ccache_and_without_wherever_the_scratch_folder_is(tmp_path: Path) -> None:
    made: list[bytes] = []
    for name, cache in (("a", ""), ("some/longer/name", "works"), ("b", "broken")):
        folder = tmp_path / name
        depends = folder / "build/temp/unit.d"
        words = (str(folder / "src/deepep/csrc/unit.cpp"), "-MMD", "-MF", str(depends))
        made.append(compiled(folder, *words, cache=cache, home=tmp_path)[0])
        assert depends.read_text().replace("\\\n", " ").split() == [
            f"{folder}/build/temp/unit.o:",
            f"{folder}/src/deepep/csrc/unit.cpp",
            f"{folder}/src/deepep/csrc/unit.h",
        ]
    assert made[0] == made[1] == made[2]
    assert b"./src/deepep/csrc/unit.h" in made[0]
    assert str(tmp_path).encode() not in made[0]
    probe, used = (tmp_path / "some/longer/name/ccache.log").read_text().splitlines()
    place, folder, storage, command = used.split("|")
    assert place == str(tmp_path / "some/longer/name")
    assert folder == f"{tmp_path}/.cache/deepep-bootstrap/ccache"
    assert storage == "none", "what the site's own settings lead to is not asked"
    assert command.startswith("/usr/bin/g++ -ffile-prefix-map=")
    assert command.endswith(
        "-g -O2 -I./src/deepep/csrc -c ./src/deepep/csrc/unit.cpp -MMD -MF ./build/temp/unit.d -o ./build/temp/unit.o"
    )
    assert Path(folder).stat().st_mode & 0o777 == 0o700
    assert "ccache-e-1.c" in probe


def test_a_unit_with_a_relative_name_is_compiled_where_it_is(tmp_path: Path) -> None:
    compiled(tmp_path / "s", "csrc/unit.cpp", cache="works")
    assert len((tmp_path / "s/ccache.log").read_text().splitlines()) == 1, "the probe alone"


def test_a_folder_of_objects_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    (tmp_path / ".cache/deepep-bootstrap/ccache").mkdir(parents=True, mode=0o777)
    (tmp_path / ".cache/deepep-bootstrap/ccache").chmod(0o777)
    unit = str(tmp_path / "s/src/deepep/csrc/unit.cpp")
    _, said = compiled(tmp_path / "s", unit, cache="works", home=tmp_path)
    assert (
        said.strip()
        == f"ccache is not used: {tmp_path}/.cache/deepep-bootstrap/ccache is not a folder of this account alone"
    )
    assert not (tmp_path / "s/ccache.log").exists()
    _, said = compiled(tmp_path / "t", unit.replace("/s/", "/t/"), cache="broken", home=tmp_path / "other")
    assert said.strip() == f"ccache is not used: {tmp_path}/t/tools/ccache does not compile here"
