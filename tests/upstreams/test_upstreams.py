"""The stand-in sources: the same bytes every time, built by hand with every toolkit at hand, and run across two
nodes on loopback."""

from __future__ import annotations

import ctypes
import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.build import until
from tests.support.paths import ROOT, TESTS
from tests.support.upstreams import (
    FAKE_CUDA,
    NO_REAL_NVCC,
    QUIET,
    UV,
    Built,
    Sources,
    Toolkit,
    build_all,
    configure,
    free_port,
    must,
    real_toolkit,
    run,
)
from tests.upstreams import make

pytestmark = [pytest.mark.usefixtures("programs"), pytest.mark.long]

LINES = TESTS / "cases" / "upstreams" / "lines.json"  # upstream's line formats, as patterns
SMOKE = ROOT / "env" / "programs" / "smoke.py"
TESTS = ("test_intranode", "test_internode", "test_low_latency")


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    outdir = tmp_path_factory.mktemp("standin")
    make.make_all(outdir)
    return Sources(outdir)


@pytest.fixture(scope="session")
def built_by(sources: Sources, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Built]:
    """Everything built so far, by the toolkit's name."""
    return {}


@pytest.fixture(params=["fake-12.9.86", "fake-13.0.88", pytest.param("real", marks=NO_REAL_NVCC)])
def built(
    request: pytest.FixtureRequest,
    sources: Sources,
    built_by: dict[str, Built],
    tmp_path_factory: pytest.TempPathFactory,
) -> Built:
    return _built(request.param, sources, built_by, tmp_path_factory)


@pytest.fixture
def standard(sources: Sources, built_by: dict[str, Built], tmp_path_factory: pytest.TempPathFactory) -> Built:
    return _built("fake-12.9.86", sources, built_by, tmp_path_factory)


def _built(name: str, sources: Sources, built_by: dict[str, Built], factory: pytest.TempPathFactory) -> Built:
    if name not in built_by:
        root = factory.mktemp(name)
        if name == "real":
            toolkit = real_toolkit(root / "cuda")
        else:
            version = name.removeprefix("fake-")
            must(FAKE_CUDA / "install", root / "cuda", version)
            toolkit = Toolkit(root / "cuda", "v1" if version.startswith("12") else "v1-cu13")
        built_by[name] = build_all(sources, root, toolkit, factory.getbasetemp() / "downloads")
    return built_by[name]


# The same bytes every time


def test_repositories_and_wheels_are_the_same_bytes_every_time(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gitconfig").write_text(
        "[core]\n\tautocrlf = true\n[user]\n\tname = Somebody\n\temail = somebody@example.invalid\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_AUTHOR_DATE", "2001-02-03T04:05:06")
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    again = make.make_all(tmp_path / "again")
    # A submodule is pinned by the tree that has it.
    assert {name: rev for name, rev in again.items() if name not in {"fmt", "deep_jit"}} == {
        name: pin.rev for name, pin in sources.lock().sources.items()
    }
    wheels = {path.name: path.read_bytes() for path in (sources.outdir / "wheels").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "again" / "wheels").iterdir()} == wheels
    assert len(wheels) == 4


def test_making_again_into_the_same_folder_changes_nothing(tmp_path: Path) -> None:
    assert make.make_all(tmp_path) == make.make_all(tmp_path)


def test_the_demo_lock_is_fresh(sources: Sources) -> None:
    text = make.LOCK.read_text(encoding="utf-8")
    revisions = make.make_all(sources.outdir)
    assert make.lock_text(text, revisions, sources.outdir) == text, "run: python tests/upstreams/make.py OUTDIR --lock"


def test_a_stale_lock_is_renewed_and_keeps_its_comments(sources: Sources) -> None:
    fresh = make.LOCK.read_text(encoding="utf-8")
    pins = sources.lock()
    stale = fresh
    for old in (*(pin.rev for pin in pins.sources.values()), *(pin.hash for pin in pins.sources.values())):
        stale = stale.replace(old, "0" * len(old))
    torch = next(wheel for wheel in pins.stacks["v1"].wheels["cp311-x86_64"] if wheel.name == "torch")
    stale = stale.replace(f'hash = "{torch.hash}", size = {torch.size}', 'hash = "", size = 1')
    assert stale.count("size = 1 ") == 4
    revisions = {name: pin.rev for name, pin in pins.sources.items()}
    assert make.lock_text(stale, revisions, sources.outdir) == fresh


def test_refs_lead_to_the_locked_commit(sources: Sources) -> None:
    for name, pin in sources.lock().sources.items():
        listing = must("git", "ls-remote", sources.outdir / "git" / "standin" / f"{name}.git", pin.ref)
        assert listing.split()[0] == pin.rev


@pytest.mark.parametrize(("name", "count"), [("nvshmem", 3), ("deepep", 1), ("deepep-v2", 4)])
def test_the_substitutions_of_the_lock_fit_once(sources: Sources, tmp_path: Path, name: str, count: int) -> None:
    tree = sources.tree(name, tmp_path / name)
    substitutes = sources.lock().sources[name].substitutes
    assert len(substitutes) == count
    for substitute in substitutes:
        assert (tree / substitute.file).read_text().count(substitute.text) == substitute.count == 1


# Built by hand


def test_nvshmem_says_how_it_was_built(built: Built) -> None:
    told = must(built.root / "nvshmem" / "bin" / "nvshmem-info", "-a")
    assert "stand-in" in told
    assert re.search(r"Build Variables .*\bNVSHMEM_IBGDA_SUPPORT=ON\b", told)
    assert "NVSHMEM_MPI_SUPPORT=OFF" in told


def test_nvshmem_has_the_names_that_its_users_link(built: Built) -> None:
    library = built.root / "nvshmem" / "lib"
    assert (library / "libnvshmem_host.so").resolve().name == "libnvshmem_host.so.3.4.5"
    assert {"libnvshmem_device.a", "nvshmem_transport_ibgda.so.3"} <= {path.name for path in library.iterdir()}
    dynamic = must("readelf", "-d", library / "libnvshmem_host.so")
    assert "soname: [libnvshmem_host.so.3]" in dynamic
    assert "runpath: [$ORIGIN]" in dynamic
    assert "nvshmem_malloc@@NVSHMEM" in must("nm", "-D", library / "libnvshmem_host.so")


def test_the_extension_calls_the_library_by_versioned_names(built: Built) -> None:
    assert "nvshmem_barrier_all@NVSHMEM" in must("nm", "-D", "--undefined-only", built.extension)
    assert "[libnvshmem_host.so.3]" in must("readelf", "-d", built.extension)


def test_the_environment_is_complete(built: Built) -> None:
    must(*UV, "pip", "check", "--python", built.python)
    told = must(
        built.python,
        "-c",
        "import deep_ep, deep_ep_cpp; print(deep_ep.__version__, deep_ep_cpp.nvshmem_version())",
        **paths(built),
    )
    assert told.split() == ["1.2.1", "3.4.5"]


def paths(built: Built) -> dict[str, str]:
    return {"PYTHONPATH": str(built.library), "PYTHONDONTWRITEBYTECODE": "1"}


def test_the_fake_toolkit_marks_the_extension_for_each_architecture(standard: Built) -> None:
    listing = must(standard.toolkit.home / "bin" / "cuobjdump", "--list-elf", standard.extension)
    found = set(re.findall(r"^ELF file +\d+: (\w+)\.(sm_\w+)\.cubin$", listing, re.MULTILINE))
    parts = ("intranode", "internode", "internode_ll", "dlink", "transfer_device")
    assert found == {(part, sm) for part in parts for sm in ("sm_90", "sm_100")}


def test_torch_refuses_the_nvshmem_wheel_of_its_own(standard: Built, sources: Sources, tmp_path: Path) -> None:
    wheels = [
        sources.outdir / "wheels" / name
        for name in ("torch-2.10.0-py3-none-any.whl", "nvidia_nvshmem_cu12-3.4.5-py3-none-any.whl")
    ]
    must(
        *UV,
        "pip",
        "install",
        "--python",
        standard.python,
        "--no-index",
        "--no-deps",
        "--target",
        tmp_path / "site",
        *wheels,
    )
    done = run(standard.python, "-c", "import torch", PYTHONPATH=str(tmp_path / "site"))
    assert done.returncode != 0
    assert "libnvshmem_host.so.3: " in done.stdout


@pytest.mark.parametrize(
    ("leave_out", "message"),
    [("NVSHMEM_DIR", "NVSHMEM_DIR is not set"), ("TORCH_CUDA_ARCH_LIST", "TORCH_CUDA_ARCH_LIST is not set")],
)
def test_deepep_needs_its_variables(standard: Built, leave_out: str, message: str) -> None:
    environment = {name: value for name, value in standard.environment.items() if name != leave_out}
    done = run(standard.python, "setup.py", "--version", cwd=standard.root / "deepep-source", **environment)
    assert done.returncode == 1
    assert message in done.stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"TORCH_CUDA_ARCH_LIST": "90"}, "'90' is not like 9.0"),
        ({"CUDA_HOME": "/nowhere"}, "no nvcc at /nowhere/bin/nvcc"),
    ],
)
def test_deepep_refuses_values_that_make_no_sense(standard: Built, change: dict[str, str], message: str) -> None:
    done = run(
        standard.python,
        "setup.py",
        "--version",
        cwd=standard.root / "deepep-source",
        **{**standard.environment, **change},
    )
    assert done.returncode == 1
    assert message in done.stdout


def test_deepep_refuses_a_toolkit_of_another_major_than_torch(standard: Built, tmp_path: Path) -> None:
    must(FAKE_CUDA / "install", tmp_path / "cuda", "13.0.88")
    environment = {**standard.environment, "CUDA_HOME": str(tmp_path / "cuda")}
    done = run(standard.python, "setup.py", "--version", cwd=standard.root / "deepep-source", **environment)
    assert done.returncode == 1
    assert "torch was built for CUDA 12.8" in done.stdout


def test_cuda_13_needs_the_cccl_headers_for_host_code(built: Built, tmp_path: Path) -> None:
    environment = {name: value for name, value in built.environment.items() if name != "CPLUS_INCLUDE_PATH"}
    command = [built.python, "setup.py", "build", "--build-base", tmp_path / "build"]
    done = run(*command, cwd=built.root / "deepep-source", **environment)
    assert (done.returncode != 0) == (built.toolkit.stack == "v1-cu13")
    assert ("cuda/std/tuple" in done.stdout) == (built.toolkit.stack == "v1-cu13")


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ("NVSHMEM_BUILD_TESTS=ON", "NVSHMEM_BUILD_TESTS=ON: the CPU stand-in cannot build that"),
        ("CMAKE_CUDA_ARCHITECTURES=", "configure with -DCMAKE_CUDA_ARCHITECTURES=90"),
        ("GDRCOPY_HOME=/nowhere", "no gdrapi.h in GDRCOPY_HOME (/nowhere)"),
        ("NVSHMEM_MPI_SUPPORT=ON", "Could NOT find MPI"),
    ],
)
def test_nvshmem_refuses_what_upstream_refuses(
    standard: Built, sources: Sources, tmp_path: Path, definition: str, message: str
) -> None:
    given = [f"CMAKE_CUDA_COMPILER={standard.toolkit.home / 'bin' / 'nvcc'}", "CMAKE_CUDA_ARCHITECTURES=90"]
    given += [f"GDRCOPY_HOME={standard.root / 'gdrcopy'}", *sources.lock().sources["nvshmem"].options]
    # An MPI that happens to be installed on the machine must not count.
    given += [
        "CMAKE_DISABLE_FIND_PACKAGE_MPI=OFF",
        "MPI_CXX_COMPILER=/nowhere",
        "MPI_C_COMPILER=/nowhere",
        "MPI_SKIP_GUESSING=ON",
    ]
    tree = standard.root / "nvshmem-source"
    assert configure(tree, tmp_path / "good", *given).returncode == 0
    done = configure(tree, tmp_path / "bad", *given, definition)
    assert done.returncode != 0
    assert message in " ".join(done.stdout.split())


def test_the_library_refuses_headers_of_another_version(standard: Built) -> None:
    library = ctypes.CDLL(str(standard.root / "nvshmem" / "lib" / "libnvshmem_host.so.3"))
    library.nvshmemx_standin_error.restype = ctypes.c_char_p
    assert library.nvshmemid_hostlib_init_attr(ctypes.create_string_buffer(1024), 3, 5, 19) == -1
    assert (
        library.nvshmemx_standin_error() == b"NVSHMEM device library version 3.5.19 does not match host library 3.4.5"
    )


# Run across two nodes


def start(built: Built, test: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    script = built.root / "deepep-source" / "tests" / f"{test}.py"
    command = [str(built.python), str(script), "--num-processes", "2", *arguments]
    everything = QUIET | paths(built) | environment
    return subprocess.Popen(command, env=everything, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run_nodes(built: Built, test: str, *arguments: str, **environment: str) -> list[tuple[int, str]]:
    """Run a test as two nodes; return each node's exit code and output."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), **environment}
    nodes = [start(built, test, *arguments, **shared, RANK=str(rank)) for rank in (0, 1)]
    outputs = [node.communicate()[0] for node in nodes]
    return [(node.returncode, output) for node, output in zip(nodes, outputs, strict=True)]


@pytest.mark.parametrize("test", TESTS)
def test_two_nodes_pass(built: Built, test: str) -> None:
    for code, output in run_nodes(built, test):
        assert code == 0, output
        assert output.startswith("[stand-in] CPU stand-in of DeepEP")


@pytest.mark.parametrize("test", TESTS)
def test_output_has_upstreams_lines(standard: Built, test: str) -> None:
    wanted = json.loads(LINES.read_text(encoding="utf-8"))[test]
    output = run_nodes(standard, test)[0][1]
    for pattern in wanted["lines"]:
        assert re.search(f"^{pattern}$", output, re.MULTILINE), f"no line like {pattern} in\n{output}"
    passed = re.findall(
        r"^\[testing\] Running with (?:BF16|FP8), with(?:out)? top-k \(async=\w+, previous=\w+\) \.\.\. passed$",
        output,
        re.MULTILINE,
    )
    assert len(passed) == wanted["passed_cases"]


def test_one_wrong_token_is_found(standard: Built) -> None:
    results = run_nodes(standard, "test_internode", STANDIN_CORRUPT="1")
    assert [code for code, _ in results] == [1, 1]
    assert "of rank 1 arrived wrong" in results[0][1] + results[1][1]


def test_a_node_that_fails_fails_the_other(standard: Built) -> None:
    results = run_nodes(standard, "test_internode", STANDIN_FAIL_NODE="1", STANDIN_TIMEOUT="1")
    assert [code for code, _ in results] == [1, 1]
    assert "missing: 2 3" in results[0][1]


def test_a_rank_that_hangs_fails_the_others(standard: Built) -> None:
    results = run_nodes(standard, "test_low_latency", STANDIN_HANG="3", STANDIN_TIMEOUT="1")
    assert [code for code, _ in results] == [1, 1]
    assert "waiting for rank 3" in results[0][1]
    assert "still running and ended: [3]" in results[1][1]


def test_a_late_rank_is_waited_for(standard: Built) -> None:
    before = time.monotonic()
    assert [code for code, _ in run_nodes(standard, "test_low_latency", STANDIN_DELAY="2:1.5")] == [0, 0]
    assert time.monotonic() - before > 1.5


def smoke(built: Built, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(built.python, SMOKE, "--num-processes", *words, **paths(built), **environment)


def test_the_smoke_program_passes(standard: Built) -> None:
    done = smoke(standard, "4")
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert re.fullmatch(
        r"\[smoke\] deep_ep 1\.2\.1 of .*/deep_ep/__init__\.py, torch 2\.10\.0\+standin: Buffer on 4 GPUs", lines[0]
    )
    assert lines[1:3] == ["[smoke] dispatch: right on rank 0", "[smoke] combine: right on rank 0"]
    assert re.fullmatch(r"\[smoke\] passed in [\d.]+ s", lines[3])


def test_the_smoke_program_finds_one_wrong_number(standard: Built) -> None:
    done = smoke(standard, "2", STANDIN_CORRUPT="1")
    assert done.returncode == 1
    assert "dispatch: token 0 of rank 1.0078" in done.stdout
    assert "[smoke] failed: process" in done.stdout


def test_internode_needs_two_nodes(standard: Built) -> None:
    node = start(standard, "test_internode", MASTER_PORT=free_port())
    output = node.communicate()[0]
    assert node.returncode == 1
    assert "at least two nodes" in output


def test_experts_must_be_shared_equally(standard: Built) -> None:
    node = start(standard, "test_intranode", "--num-experts", "7", MASTER_PORT=free_port())
    assert "7 experts cannot be shared equally by 2 ranks" in node.communicate()[0]
    assert node.returncode == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stopped_launcher_leaves_no_rank_behind(standard: Built, ranks: int) -> None:
    """Stopped as soon as so many of its two ranks are there, which is while it starts them."""
    node = start(standard, "test_intranode", MASTER_PORT=free_port(), STANDIN_HANG="0", STANDIN_TIMEOUT="600")
    assert node.stdout is not None
    node.stdout.readline()
    children: list[int] = []
    while len(children) < ranks:
        children = [int(pid) for pid in Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()]
    node.send_signal(signal.SIGTERM)
    node.communicate()
    assert node.returncode == 143
    # The kernel ends the ranks when their launcher has gone, a moment later; by themselves they would hang for ten
    # minutes.
    until(lambda: not any(map(is_running, children)), "the end of every rank")


def is_running(pid: int) -> bool:
    """Say whether a process is there and more than a killed one that nobody has collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_transport_is_asked_for_and_does_without_a_nic(standard: Built) -> None:
    node = start(standard, "test_low_latency", MASTER_PORT=free_port(), NVSHMEM_IB_ENABLE_IBGDA="1")
    output = node.communicate()[0]
    assert node.returncode == 0, output
    assert output.count("init failed for transport: IBGDA") == 2
