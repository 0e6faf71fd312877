"""How NVSHMEM is built: what the lock's substitutions do with both generators of CMake, and what the recipe demands."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from deepep_bootstrap.fetch.locations import Level, Mirrors
from deepep_bootstrap.fetch.sources import fetch_source
from deepep_bootstrap.lock.model import Source, Substitute
from tests.support.build import RECIPES, run_bash
from tests.support.upstreams import FAKE_CUDA, Sources, must, run
from tests.upstreams import make

pytestmark = [pytest.mark.usefixtures("programs"), pytest.mark.long]

NINJA, MAKEFILES = "Ninja", "Unix Makefiles"
CMAKE = "src/CMakeLists.txt"
HOST_SOURCES = ("bootstrap.cpp", "exchange.cpp", "library.cpp", "torch.cpp", "variables.cpp")
INSTALLED = {
    "bin/nvshmem-info",
    "include/nvshmem.h",
    "include/nvshmem_version.h",
    "include/nvshmemx.h",
    "lib/libnvshmem.a",
    "lib/libnvshmem_device.a",
    "lib/libnvshmem_host.so",
    "lib/libnvshmem_host.so.3",
    "lib/libnvshmem_host.so.3.4.5",
    "lib/nvshmem_transport_ibgda.so",
    "lib/nvshmem_transport_ibgda.so.3",
    "lib/nvshmem_transport_ibgda.so.3.4.5",
}
ARCHIVE_OF_HOST = "'src/lib/libnvshmem_device.a', needed by 'src/lib/libnvshmem_host.so.3.4.5'"
# In place of nvcc. What it compiles for the device project counts the objects that the host library has by then. With a
# file `wait` beside this program it waits until they are all there, and then a while longer, so that the link of that
# library comes too early unless it waits for the device project.
COUNTING_NVCC = f"""#!/bin/bash
shopt -s nullglob
if [[ "${{PWD}}" == */src/device && " $* " == *" -dc "* ]]; then
    for ((tick = 0; tick < 1200; tick++)); do
        objects=(../CMakeFiles/nvshmem_host.dir/host/*.o)
        [[ -e "${{0%/*}}/wait" ]] && ((${{#objects[@]}} < {len(HOST_SOURCES)})) || break
        sleep 0.1
    done
    [[ ! -e "${{0%/*}}/wait" ]] || sleep 1
    echo "${{#objects[@]}}" >objects-of-the-host-library
fi
exec "${{0%/*}}/nvcc-itself" "$@"
"""


@dataclass(frozen=True)
class Project:
    """The stand-in NVSHMEM as the demo's lock pins it, a toolkit, and where trees are kept."""

    pin: Source
    mirrors: Mirrors
    toolkit: Path
    gdrcopy: Path
    folder: Path

    @property
    def once(self) -> tuple[Substitute, ...]:
        """The lock's substitutions without the one that takes away the ordering."""
        return tuple(each for each in self.pin.substitutes if not each.text.startswith("add_dependencies("))

    def tree(self, substitutes: tuple[Substitute, ...]) -> Path:
        """Return the tree with these substitutions, made by the program's own code."""
        return fetch_source(replace(self.pin, substitutes=substitutes), self.mirrors, self.folder / "cache")

    def configure(self, build: Path, substitutes: tuple[Substitute, ...], generator: str = NINJA) -> Path:
        """Configure into `build` as the recipe does and return it."""
        given = {
            "CMAKE_INSTALL_PREFIX": f"{build}-installed",
            "CMAKE_INSTALL_LIBDIR": "lib",
            "CMAKE_CUDA_ARCHITECTURES": "90;100",
            "CMAKE_CUDA_COMPILER": f"{self.toolkit}/bin/nvcc",
            "GDRCOPY_HOME": str(self.gdrcopy),
            "CMAKE_EXPORT_COMPILE_COMMANDS": "ON",
        }
        words = [*(f"-D{name}={value}" for name, value in given.items()), *(f"-D{each}" for each in self.pin.options)]
        must("cmake", "-G", generator, "-S", self.tree(substitutes), "-B", build, *words)
        return build


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("nvshmem")
    make.make_all(folder / "standin")
    sources = Sources(folder / "standin")
    must(FAKE_CUDA / "install", folder / "cuda", "12.9.86")
    nvcc = folder / "cuda/bin/nvcc"
    nvcc.rename(nvcc.with_name("nvcc-itself"))
    nvcc.write_text(COUNTING_NVCC)
    nvcc.chmod(0o755)
    mirrors = Mirrors((Level({"https://example.invalid/standin/": f"{folder}/standin/git/standin/"}, {}),))
    gdrcopy = sources.tree("gdrcopy", folder / "gdrcopy")
    return Project(sources.lock().sources["nvshmem"], mirrors, folder / "cuda", gdrcopy, folder)


@pytest.fixture(scope="module")
def plain(project: Project) -> Path:
    """The project as upstream has it, built and installed: what its build folder is called."""
    return install(project.configure(project.folder / "plain", ()))


@pytest.fixture
def patient(project: Project) -> Path:
    """The device project waits for the objects of the host library."""
    knob = project.toolkit / "bin/wait"
    knob.touch()
    yield knob
    knob.unlink()


def compile_all(build: Path, *words: str, jobs: int = 2) -> subprocess.CompletedProcess[str]:
    return run("cmake", "--build", build, "--parallel", str(jobs), *words)


def install(build: Path, jobs: int = 2) -> Path:
    """Build and install what is configured in `build`; return that folder."""
    done = compile_all(build, jobs=jobs)
    assert done.returncode == 0, done.stdout
    must("cmake", "--install", build)
    return build


def installed(build: Path) -> set[str]:
    folder = Path(f"{build}-installed")
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def commands(build: Path) -> Counter[str]:
    """Return how often each host source is to be compiled."""
    files = [Path(each["file"]) for each in json.loads((build / "compile_commands.json").read_text())]
    return Counter(file.name for file in files if file.parent.name == "host")


def compiled(build: Path) -> Counter[str]:
    """Return how often Ninja compiled each host source."""
    outputs = [Path(line.split("\t")[3]) for line in (build / ".ninja_log").read_text().splitlines()[1:]]
    return Counter(output.stem for output in outputs if output.parent.name == "host" and output.suffix == ".o")


def objects_seen(build: Path) -> int:
    """Return how many objects the host library had when the device project compiled."""
    return int((build / "src/device/objects-of-the-host-library").read_text())


def members(build: Path) -> tuple[list[str], set[str]]:
    """Return the objects of the static library that was installed, and the names that they define."""
    library = Path(f"{build}-installed/lib/libnvshmem.a")
    symbols = {line.split()[-1] for line in must("nm", "--defined-only", library).splitlines() if " T " in line}
    return sorted(must("ar", "t", library).split()), symbols


def change(text: str, replacement: str) -> Substitute:
    return Substitute(CMAKE, text, replacement, 1)


# What the substitutions of the lock do


def test_upstream_compiles_each_host_source_twice(plain: Path) -> None:
    assert commands(plain) == compiled(plain) == dict.fromkeys(HOST_SOURCES, 2)
    assert objects_seen(plain) == 0
    assert installed(plain) == INSTALLED


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("jobs", [2, 4, 8])
def test_with_ninja_the_host_library_compiles_beside_a_slow_device_project(
    project: Project, plain: Path, tmp_path: Path, jobs: int
) -> None:
    """From a clean tree each time. Its link waits for the archive, which is all that is between the two."""
    build = install(project.configure(tmp_path / "build", project.pin.substitutes), jobs)
    assert commands(build) == compiled(build) == dict.fromkeys(HOST_SOURCES, 1)
    assert objects_seen(build) == len(HOST_SOURCES)
    assert installed(build) == INSTALLED
    assert members(build) == members(plain)
    assert "NVSHMEM_IBGDA_SUPPORT=ON" in must(f"{build}-installed/bin/nvshmem-info", "-a")


def test_with_ninja_one_job_at_a_time_is_enough(project: Project, tmp_path: Path) -> None:
    build = install(project.configure(tmp_path / "build", project.pin.substitutes), jobs=1)
    assert installed(build) == INSTALLED


@pytest.mark.parametrize("generator", [NINJA, MAKEFILES])
def test_where_the_ordering_stays_both_build(project: Project, plain: Path, tmp_path: Path, generator: str) -> None:
    build = install(project.configure(tmp_path / "build", project.once, generator))
    assert commands(build) == dict.fromkeys(HOST_SOURCES, 1)
    assert objects_seen(build) == 0
    assert installed(build) == INSTALLED
    assert members(build) == members(plain)


def test_the_host_library_alone_finds_its_archive_with_ninja(project: Project, tmp_path: Path) -> None:
    build = project.configure(tmp_path / "build", project.pin.substitutes)
    done = compile_all(build, "--target", "nvshmem_host")
    assert done.returncode == 0, done.stdout


def test_without_the_ordering_makefiles_do_not_build(project: Project, tmp_path: Path) -> None:
    """They know no byproducts: this is why the recipe builds with Ninja alone."""
    build = project.configure(tmp_path / "build", project.pin.substitutes, MAKEFILES)
    done = compile_all(build, "--target", "nvshmem_host")
    assert done.returncode != 0
    assert f"No rule to make target {ARCHIVE_OF_HOST}" in done.stdout


# Wrong substitutions of this kind are seen


SOURCES_OF_BOTH = "target_sources(nvshmem PRIVATE ${NVSHMEM_HOST_SOURCES} ${NVSHMEM_HOST_SOURCES_NOMAXREGCOUNT}"
ORDERING = change("add_dependencies(nvshmem_host nvshmem_device_project-build)", "")
WRONG: Mapping[str, tuple[tuple[Substitute, ...], str]] = {
    "the static library without the host's objects": (
        (change(SOURCES_OF_BOTH, "target_sources(nvshmem PRIVATE"),),
        "undefined reference to `standin::build_variables()'",
    ),
    "nvshmem-info linked with the shared library": (
        (change("${STANDIN_CUDA_DRIVER} nvshmem)", "${STANDIN_CUDA_DRIVER} nvshmem_host)"),),
        "undefined reference to `standin::build_variables()'",
    ),
    "no ordering and no byproduct": (
        (ORDERING, change("BUILD_BYPRODUCTS ${device_library}", "")),
        f"{ARCHIVE_OF_HOST}, missing and no known rule to make it",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_substitution_breaks_the_build(project: Project, tmp_path: Path, what: str) -> None:
    substitutes, message = WRONG[what]
    done = compile_all(project.configure(tmp_path / "build", substitutes))
    assert done.returncode != 0
    assert message in done.stdout


def test_the_installation_wants_the_static_library(project: Project, tmp_path: Path) -> None:
    build = install(project.configure(tmp_path / "build", project.pin.substitutes))
    (build / "src/lib/libnvshmem.a").unlink()
    done = run("cmake", "--install", build)
    assert done.returncode != 0
    assert "libnvshmem.a" in done.stdout


def test_a_static_library_left_out_of_the_installation_is_seen(project: Project, tmp_path: Path) -> None:
    wrong = change("install(TARGETS nvshmem nvshmem_host", "install(TARGETS nvshmem_host")
    build = install(project.configure(tmp_path / "build", (*project.pin.substitutes, wrong)))
    assert INSTALLED - installed(build) == {"lib/libnvshmem.a"}


# What the recipe asks of the host and of the result


def run_recipe(call: str, tmp_path: Path, path: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Call one function of the recipe with the inputs that every one has."""
    recipe = RECIPES["build/nvshmem.sh"].replace('main "$@"', call)
    text = "\n".join((RECIPES["lib.sh"], RECIPES["build/common.sh"], RECIPES["build/units.sh"], recipe))
    places = {"PREFIX": f"{tmp_path}/prefix", "SCRATCH": f"{tmp_path}/scratch", "OUT": f"{tmp_path}/out", "SRC": "/src"}
    inputs = {**places, "ENTRY": "e-nvshmem-1", "GDRCOPY": "e-gdrcopy-1", "VERSION": "3.4.5", "ARCHS": "9.0 10.0"}
    (tmp_path / "prefix/store/e-gdrcopy-1").mkdir(parents=True, exist_ok=True)
    (tmp_path / "scratch/build/e-nvshmem-1").mkdir(parents=True, exist_ok=True)
    return run_bash(text, {**inputs, "CUDA_HOME": "/nowhere", "JOBS": "1", "PATH": path, **more})


def programs(folder: Path, *names: str) -> Path:
    """Make a folder with programs that say how they were called, and with the few real ones that bash scripts need."""
    folder.mkdir()
    for name in names:
        (folder / name).write_text(f'#!/bin/bash\necho {name} "$@"\n')
        (folder / name).chmod(0o755)
    for name in ("bash", "mkdir", "ln", "touch", "cat", "awk", "nproc", "sleep", "chmod", "cmp", "find", "mv", "rm"):
        (folder / name).symlink_to(str(shutil.which(name)))
    return folder


def test_a_host_without_ninja_is_told_so(tmp_path: Path) -> None:
    done = run_recipe("build_entry", tmp_path, str(programs(tmp_path / "bin", "cmake", "gcc", "g++", "make")))
    assert done.returncode != 0
    assert "not installed on this machine: ninja\n" in done.stderr
    assert done.stdout == ""


def test_the_recipe_builds_with_ninja(tmp_path: Path) -> None:
    done = run_recipe("build_entry", tmp_path, str(programs(tmp_path / "bin", "cmake", "ninja", "gcc", "g++", "make")))
    assert done.returncode == 0, done.stderr
    assert "cmake -S /src" in done.stdout
    assert " -G Ninja " in done.stdout


@pytest.fixture
def out(plain: Path, tmp_path: Path) -> Path:
    """An installation of its own for a test that changes it."""
    return shutil.copytree(f"{plain}-installed", tmp_path / "out", symlinks=True)


@pytest.mark.parametrize("lacking", ["nvshmem_transport_ibgda.so", "libnvshmem_device.a", "libnvshmem_host.so"])
@pytest.mark.parametrize("how", ["absent", "empty"])
def test_an_installation_that_lacks_a_library_is_refused(project: Project, out: Path, lacking: str, how: str) -> None:
    path, cuda = "/usr/bin:/bin:/usr/sbin", str(project.toolkit)
    assert run_recipe("check_entry", out.parent, path, CUDA_HOME=cuda).returncode == 0
    (out / "lib" / lacking).unlink()
    if how == "empty":
        (out / "lib" / lacking).touch()
    done = run_recipe("check_entry", out.parent, path, CUDA_HOME=cuda)
    assert done.returncode != 0
    assert f"NVSHMEM's install tree: no lib/{lacking}\n" in done.stderr
