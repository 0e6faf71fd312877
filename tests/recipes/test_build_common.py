"""What the recipes of all entries share: the driver's library, how many compilers at once, what is forgotten of the
environment."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.build import RECIPES, run_bash, script

pytestmark = pytest.mark.usefixtures("programs")


def run_function(script: str, tmp_path: Path, **environment: str) -> str:
    """Return what a few lines of bash print after the shared recipes were read."""
    text = "\n".join((RECIPES["lib.sh"], RECIPES["build/common.sh"], script))
    given = {
        "PATH": f"{tmp_path}/bin:/usr/bin:/bin",
        "SCRATCH": str(tmp_path / "scratch"),
        "PREFIX": str(tmp_path / "prefix"),
        **environment,
    }
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, env=given, check=True).stdout.strip()


def fake(tmp_path: Path, name: str, prints: str) -> None:
    """Put a program that prints `prints` first on PATH."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    (tmp_path / "bin" / name).write_text(f"#!/bin/sh\ncat <<'END'\n{prints}\nEND\n")
    (tmp_path / "bin" / name).chmod(0o755)


@pytest.fixture
def no_driver(tmp_path: Path) -> None:
    fake(tmp_path, "ldconfig", "\tlibc.so.6 (libc6,x86-64) => /lib/libc.so.6")


def library(folder: Path) -> str:
    """Make a folder with something of the driver's name in it."""
    folder.mkdir(parents=True)
    (folder / "libcuda.so.1").write_text("")
    return str(folder)


def test_the_driver_is_found_in_the_loaders_cache(tmp_path: Path) -> None:
    fake(
        tmp_path,
        "ldconfig",
        "\tlibcuda.so.1 (libc6,x86-64) => /usr/lib/libcuda.so.1\n\tlibcuda.so (libc6,x86-64) => /usr/lib/libcuda.so",
    )
    assert run_function("find_driver", tmp_path) == "/usr/lib/libcuda.so.1"


@pytest.mark.usefixtures("no_driver")
def test_the_driver_is_found_where_only_the_library_path_leads_to_it(tmp_path: Path) -> None:
    driver = library(tmp_path / "nvidia" / "lib64")
    assert run_function("find_driver", tmp_path, LD_LIBRARY_PATH=f"/nowhere::{driver}/") == f"{driver}/libcuda.so.1"


@pytest.mark.usefixtures("no_driver")
def test_a_stub_in_the_library_path_is_no_driver(tmp_path: Path) -> None:
    stubs = library(tmp_path / "lib64" / "stubs")
    own = library(tmp_path / "scratch" / "stub")
    assert run_function("find_driver", tmp_path, LD_LIBRARY_PATH=f"{stubs}:{stubs}/:{own}:") == ""


@pytest.mark.usefixtures("no_driver")
def test_a_driver_in_the_library_path_is_not_hidden_by_the_stub(tmp_path: Path) -> None:
    driver = library(tmp_path / "nvidia" / "lib64")
    (tmp_path / "cuda/lib64/stubs").mkdir(parents=True)
    (tmp_path / "cuda/lib64/stubs/libcuda.so").write_text("")
    script = "with_driver_stub printenv LD_LIBRARY_PATH"
    home = str(tmp_path / "cuda")
    assert run_function(script, tmp_path, LD_LIBRARY_PATH=driver, CUDA_HOME=home) == driver
    assert (
        run_function(script, tmp_path, LD_LIBRARY_PATH="/nowhere", CUDA_HOME=home)
        == f"{tmp_path}/scratch/stub:/nowhere"
    )


@pytest.mark.parametrize(
    ("processors", "free", "lines", "jobs"),
    [
        ("128", 549 * 1024**2, "", "128"),
        ("128", 62 * 1024**2, "", "31"),
        ("128", 62 * 1024**2, "COMPILER_MEMORY_KIB=$((1024 * 1024))", "62"),
        ("4", 1024**2, "", "1"),
    ],
)
def test_compilers_at_once_fit_processors_and_memory(
    tmp_path: Path, processors: str, free: int, lines: str, jobs: str
) -> None:
    fake(tmp_path, "nproc", processors)
    script = f"awk() {{ command awk \"$1\" <<<'MemAvailable: {free} kB'; }}\n{lines}\ncount_jobs"
    assert run_function(script, tmp_path) == jobs


def test_what_would_change_the_result_is_forgotten(tmp_path: Path) -> None:
    changes = (
        "LIBRARY_PATH",
        "CUDAHOSTCXX",
        "TORCH_CUDA_ARCH_LIST",
        "TOPK_IDX_BITS",
        "DISABLE_SM90_FEATURES",
        "NVSHMEM_PREFIX",
        "LDSHARED",
        "OMP_NUM_THREADS",
        "OMP_THREAD_LIMIT",
        "UV_INDEX_URL",
        "PIP_INDEX_URL",
    )
    network = {"https_proxy": "http://proxy:3128", "SSL_CERT_FILE": "/etc/site.pem", "UV_NATIVE_TLS": "1"}
    kept = {"NVSHMEM_DISABLE_NVLS": "1", "NCCL_NVLS_ENABLE": "0", "LD_LIBRARY_PATH": "/nvidia", **network}
    given = {
        **dict.fromkeys(changes, "9"),
        **kept,
        "SOURCE_DATE_EPOCH": "1",
        "CUDA_HOME": "/cuda",
        "PYTHON": "/own/bin/python",
    }
    left = dict(
        line.partition("=")[::2] for line in run_function("clear_environment; env", tmp_path, **given).splitlines()
    )
    assert not set(changes) & set(left)
    assert kept.items() <= left.items()


def test_an_index_is_asked_in_the_environment_of_the_build(tmp_path: Path) -> None:
    network = {"ALL_PROXY": "http://proxy:3128", "SSL_CERT_FILE": "/etc/site.pem", "UV_SYSTEM_CERTS": "1"}
    given = {
        **network,
        "UV_DEFAULT_INDEX": "https://elsewhere.invalid/simple",
        "REQUIREMENT": "small==1",
        "PYTHON": "/own/bin/python",
    }
    done = run_bash(script("lib.sh", "build/common.sh", "prefix/probe-index.sh"), given, data=b"#!/bin/sh\nenv >&2\n")
    assert done.stdout == "index=yes\n", done.stderr
    seen = done.stderr.splitlines()
    assert {f"{name}={value}" for name, value in network.items()} <= set(seen)
    assert not [line for line in seen if line.startswith("UV_DEFAULT_INDEX=")]


ADDRESSES = "https://me:S3cr3tPW@a.example/simple\n\nhttps://me:S3cr3tPW@b.example/x\nhttps://c.example/y"


@pytest.mark.parametrize(
    ("addresses", "first", "others"),
    [
        (ADDRESSES, "https://me:S3cr3tPW@a.example/simple", "https://me:S3cr3tPW@b.example/x https://c.example/y"),
        ("\nhttps://c.example/y", None, "https://c.example/y"),
        ("https://c.example/y", "https://c.example/y", None),
        ("", None, None),
    ],
)
def test_indexes_are_named_in_the_environment_alone(
    addresses: str, first: str | None, others: str | None, tmp_path: Path
) -> None:
    # What is traced ends up in the entry's manifest, as it does for a build.
    text = 'exec {BASH_XTRACEFD}>"${SCRATCH}/trace"; set -x; name_indexes "${INDEXES}"; printf "and on\\n"; env'
    (tmp_path / "scratch").mkdir()
    out = run_function(text, tmp_path, INDEXES=addresses)
    seen = dict(line.partition("=")[::2] for line in out.splitlines())
    assert (seen.get("UV_DEFAULT_INDEX"), seen.get("UV_INDEX")) == (first, others)
    trace = (tmp_path / "scratch/trace").read_text()
    assert "and on" in trace
    assert "UV_" not in trace


def test_no_index_stands_on_the_command_line_of_uv(tmp_path: Path) -> None:
    given = {"REQUIREMENT": "small==1", "PYTHON": "/own/bin/python", "INDEXES": ADDRESSES}
    text = b'#!/bin/sh\nprintf "argument %s\\n" "$@" >&2\nenv >&2\n'
    done = run_bash(script("lib.sh", "build/common.sh", "prefix/probe-index.sh"), given, data=text)
    assert done.stdout == "index=yes\n", done.stderr
    lines = done.stderr.splitlines()
    assert not [line for line in lines if line.startswith("argument") and "example" in line]
    assert f"UV_DEFAULT_INDEX={ADDRESSES.splitlines()[0]}" in lines
