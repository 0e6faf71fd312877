"""The stand-in sources built by hand, the way their users would: shared by the tests of the stand-ins."""

from __future__ import annotations

import base64
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from deepep_bootstrap.lock import model as locks
from tests.support.paths import TESTS
from tests.support.shipped import demo_lock
from tests.upstreams import make

FAKE_CUDA = TESTS / "fakes" / "cuda"
REAL_CUDA = Path("/usr/local/cuda")
NO_REAL_NVCC = pytest.mark.skipif(
    not (REAL_CUDA / "bin/nvcc").exists(), reason="no CUDA toolkit in /usr/local/cuda here"
)
UV = (sys.executable, "-m", "uv", "--no-config", "--no-cache", "--quiet")
TARGET = f"cp3{sys.version_info.minor}-x86_64"
QUIET = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "LC_ALL": "C"}


def run(*command: str | Path, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a clean environment; both outputs in one text, the exit code for the caller to judge."""
    argv = [str(word) for word in command]
    return subprocess.run(
        argv, cwd=cwd, env=QUIET | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


def must(*command: str | Path, cwd: Path | None = None, **environment: str) -> str:
    """Run a command that has to succeed and return its output."""
    done = run(*command, cwd=cwd, **environment)
    assert done.returncode == 0, f"{command[0]}: exit {done.returncode}\n{done.stdout}"
    return done.stdout


def free_port() -> str:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@dataclass(frozen=True)
class Sources:
    """What make.py made: git repositories and wheels below `outdir`."""

    outdir: Path

    def tree(self, name: str, target: Path) -> Path:
        """Put a fresh checkout of a source into `target`."""
        target.mkdir(parents=True)
        make.export_tree(name, self.outdir, target)
        return target

    def lock(self) -> locks.Lock:
        """Return the demo lock."""
        return demo_lock()


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit and the stack of the demo lock that goes with it."""

    home: Path
    stack: str


def real_toolkit(target: Path) -> Toolkit:
    """Return the machine's toolkit seen through links, with the driver stub that a toolkit without it needs."""
    (target / "lib64" / "stubs").mkdir(parents=True)
    for name in ("bin", "include"):
        (target / name).symlink_to((REAL_CUDA / name).resolve())
    for library in (REAL_CUDA / "lib64").resolve().iterdir():
        if library.name != "stubs":
            (target / "lib64" / library.name).symlink_to(library)
    shutil.copy(FAKE_CUDA / "lib64" / "stubs" / "libcuda.so", target / "lib64" / "stubs")
    major = must(target / "bin" / "nvcc", "--version").split("release ")[1].split(".")[0]
    return Toolkit(target, {"12": "v1", "13": "v1-cu13"}[major])


@dataclass(frozen=True)
class Built:
    """The three projects installed below `root`, and the interpreter that runs them."""

    root: Path
    toolkit: Toolkit
    python: Path

    @property
    def environment(self) -> dict[str, str]:
        """What the extension's build and its tests need around them."""
        home = self.toolkit.home
        cccl = {"CPLUS_INCLUDE_PATH": str(home / "include" / "cccl")} if self.toolkit.stack == "v1-cu13" else {}
        fixed = {
            "TORCH_CUDA_ARCH_LIST": "9.0 10.0",
            "CUDA_HOME": str(home),
            "LIBRARY_PATH": str(home / "lib64" / "stubs"),
        }
        return {"NVSHMEM_DIR": str(self.root / "nvshmem"), **fixed, **cccl}

    @property
    def library(self) -> Path:
        """The folder to import from."""
        return next((self.root / "deepep-source" / "build").glob("lib.*"))

    @property
    def extension(self) -> Path:
        """The extension's file."""
        return next(self.library.glob("deep_ep_cpp*.so"))


def configure(sources: Path, build: Path, *definitions: str) -> subprocess.CompletedProcess[str]:
    """Run CMake over the NVSHMEM tree."""
    return run("cmake", "-GNinja", "-S", sources, "-B", build, *(f"-D{definition}" for definition in definitions))


def build_nvshmem(sources: Sources, root: Path, toolkit: Toolkit) -> None:
    """GDRCopy, then NVSHMEM with the options of the demo lock, into root/gdrcopy and root/nvshmem."""
    must(
        "make",
        "-C",
        sources.tree("gdrcopy", root / "gdrcopy-source"),
        f"prefix={root / 'gdrcopy'}",
        "lib",
        "lib_install",
    )
    tree, build = sources.tree("nvshmem", root / "nvshmem-source"), root / "nvshmem-build"
    definitions = [f"CMAKE_INSTALL_PREFIX={root / 'nvshmem'}", "CMAKE_CUDA_ARCHITECTURES=90;100"]
    definitions += [f"CMAKE_CUDA_COMPILER={toolkit.home / 'bin' / 'nvcc'}", f"GDRCOPY_HOME={root / 'gdrcopy'}"]
    done = configure(tree, build, *definitions, *sources.lock().sources["nvshmem"].options)
    assert done.returncode == 0, done.stdout
    assert {path.name for path in (build / "src" / "include").iterdir()} == {
        "nvshmem.h",
        "nvshmemx.h",
        "nvshmem_version.h",
    }
    must("cmake", "--build", build)
    must("cmake", "--install", build)


def make_environment(sources: Sources, target: Path, downloads: Path, stack: str) -> Path:
    """Install the closure of the demo lock for the running interpreter into an empty environment; return its python."""
    wheels = sources.lock().stacks[stack].wheels[TARGET]
    real = [wheel for wheel in wheels if wheel.index == "pypi"]
    downloads.mkdir(parents=True, exist_ok=True)
    pins = [f"{wheel.name}=={wheel.version} --hash=sha256:{_hexadecimal(wheel.hash)}" for wheel in real]
    (target.parent / "real-wheels.txt").write_text("\n".join(pins) + "\n")
    if not all((downloads / wheel.file).exists() for wheel in real):
        given = ("--require-hashes", "--no-deps", "-d", downloads, "-r", target.parent / "real-wheels.txt")
        must(sys.executable, "-m", "pip", "download", "-q", *given, **_pip())
    must(*UV, "venv", "--no-python-downloads", "--python", sys.executable, target)
    files = [(downloads if wheel in real else sources.outdir / "wheels") / wheel.file for wheel in wheels]
    must(*UV, "pip", "install", "--python", target / "bin" / "python", "--no-index", "--no-deps", *files)
    return target / "bin" / "python"


def _hexadecimal(sri: str) -> str:
    return base64.b64decode(sri.removeprefix("sha256-")).hex()


def _pip() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name.endswith("_proxy")}


def link_nvshmem(python: Path, nvshmem: Path) -> None:
    """Put links to our NVSHMEM where torch looks for its own."""
    library = next((python.parent.parent / "lib").glob("python3.*")) / "site-packages" / "nvidia" / "nvshmem" / "lib"
    shutil.rmtree(library)
    library.symlink_to(nvshmem / "lib")


def build_all(sources: Sources, root: Path, toolkit: Toolkit, downloads: Path) -> Built:
    """Build the three projects and the environment below `root`."""
    build_nvshmem(sources, root, toolkit)
    python = make_environment(sources, root / "python", downloads, toolkit.stack)
    link_nvshmem(python, root / "nvshmem")
    built = Built(root, toolkit, python)
    must(python, "setup.py", "build", cwd=sources.tree("deepep", root / "deepep-source"), **built.environment)
    return built
