"""The stacks v1-wheel, v2 and v2.5 built for real from stand-ins: NVSHMEM unpacked, DeepEP V2 and V2.5 against NCCL,
side by side in one prefix."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import uv
from msgspec.structs import replace

from deepep_bootstrap.analysis.build_times import parse_build_times
from deepep_bootstrap.analysis.results import read
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.fetch import wheels
from deepep_bootstrap.fetch.locations import Level, Mirrors
from deepep_bootstrap.fetch.sources import fetch_source
from deepep_bootstrap.inventory.facts import parse_facts
from deepep_bootstrap.lock import model
from deepep_bootstrap.prefix import entries
from deepep_bootstrap.prefix.entries import Entry, EntryInputs, name_entries
from tests.support import stacks as stacks_support
from tests.support import standins
from tests.support.build import health, make_prefix, store_names
from tests.support.facts import run_script
from tests.support.paths import ROOT
from tests.support.stacks import Stacks
from tests.support.standins import Prepared
from tests.support.upstreams import free_port

pytestmark = [pytest.mark.usefixtures("programs"), pytest.mark.long]

TOOLKITS = {"v1-wheel": "12.9.86", "v2": "13.0.88"}
V25 = "v2.5"
TOOLKIT_OF_V25 = "13.2.86"
COMPILER = """\
#!/bin/sh
[ "$1" != -dumpfullversion ] || {{ echo {version}; exit; }}
exec {real} "$@"
"""
"""A g++ of another version by its own word: which one this machine has is not for a test to ask."""


def toolkit_of(stack: str) -> str:
    return TOOLKITS.get(stack, TOOLKIT_OF_V25)


@dataclass(frozen=True)
class Place:
    """A prefix with the NVSHMEM that the wheels were made of, the stacks, and what fetched the demo."""

    prefix: Path
    prepared: Prepared
    stacks: Stacks

    def of(self, stack: str, stacks: Stacks | None = None) -> Prepared:
        """Return one stack with its sources and wheels fetched through the engine's own connections."""
        given = stacks or self.stacks
        found = model.read_lock_file(given.lock)
        chosen = found.stacks[stack]
        folder = self.prepared.folder
        indexes = {"standin": f"{folder}/upstreams/wheels", stacks_support.INDEX: str(given.wheels)}
        mirrors = Mirrors((Level({standins.STANDIN: f"{folder}/upstreams/git/standin/"}, indexes),))
        sources = {
            name: fetch_source(found.sources[name], mirrors, folder / "cache")
            for name in (chosen.deepep, chosen.gdrcopy)
            if name
        }
        packages = wheels.fetch_wheels(chosen.wheels[self.prepared.target], mirrors, folder / "cache", lambda _: None)
        files = [(f"src/{name}", path) for name, path in sources.items()] + [
            (f"wheels/{path.name}", path) for path in packages.values()
        ]
        return Prepared(
            folder,
            replace(found, default_stack=stack),
            self.prepared.target,
            (*files, ("bin/uv", Path(uv.find_uv_bin()))),
        )

    def entries(self, stack: str, stacks: Stacks | None = None) -> dict[str, Entry]:
        prepared = self.of(stack, stacks)
        return {
            entry.kind: entry for entry in entries.name_entries(prepared.wanted(prepared.toolkit(toolkit_of(stack))))
        }

    def build(self, stack: str, prefix: Path | None = None, stacks: Stacks | None = None) -> Mapping[str, Outcome]:
        prepared = self.of(stack, stacks)
        return standins.run(
            prepared.request(prefix or self.prefix, prepared.wanted(prepared.toolkit(toolkit_of(stack))))
        )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The stand-in NVSHMEM is built once from its source; the wheels carry what came out."""
    folder = tmp_path_factory.mktemp("stacks")
    prepared = standins.prepare(folder / "prepared")
    prefix = make_prefix(folder)
    request = prepared.request(prefix, prepared.wanted(prepared.toolkit()))
    first = replace(request, entries=request.entries[:2], wheels=())
    assert {outcome.state for outcome in standins.run(first).values()} == {"done"}
    return Place(
        prefix, prepared, stacks_support.make_stacks(prefix / "store" / request.entries[1].name, folder / "packed")
    )


@pytest.fixture(scope="module")
def built(place: Place) -> Place:
    """Both stacks in one prefix."""
    for stack in TOOLKITS:
        outcomes = place.build(stack)
        assert {outcome.state for outcome in outcomes.values()} <= {"done", "unchanged"}, outcomes
    return place


def test_the_log_of_a_build_says_how_long_its_units_took(place: Place) -> None:
    (log,) = (place.prefix.parent / "logs").glob("build-*-nvshmem-*.log")
    with log.open(encoding="utf-8") as lines:
        times = parse_build_times(lines)
    names = [unit.name for unit in times.units]
    assert {"library.cpp", "ibgda.cpp", "transfer_device"} <= set(names), "of the project inside the project too"
    assert times.seconds is not None
    assert 0 < times.units[0].seconds <= times.seconds


def python(place: Place, stack: str, code: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run code as a user of the stack would."""
    names = {kind: entry.name for kind, entry in place.entries(stack).items()}
    folder = place.prefix / "store"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{folder}/{names['deepep']}/lib/python", **more}
    return subprocess.run(
        [folder / names["python"] / "bin/python", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def nccl(place: Place, stack: str = "v2") -> Path:
    return next(
        (place.prefix / "store" / place.entries(stack)["python"].name).glob("lib/python3*/site-packages/nvidia/nccl")
    )


def test_both_lie_side_by_side_without_an_nvshmem_build(built: Place) -> None:
    first, second = built.entries("v1-wheel"), built.entries("v2")
    assert {entry.name for entry in (*first.values(), *second.values())} <= store_names(built.prefix)
    assert "gdrcopy" not in second
    assert len({entry.name for kind in ("nvshmem", "python", "deepep") for entry in (first[kind], second[kind])}) == 6
    assert not list(built.prefix.glob(f"store/{first['nvshmem'].name}/bin"))


def test_v2_built_elsewhere_is_the_same_bit_by_bit(built: Place, tmp_path: Path) -> None:
    """In another scratch folder and in a prefix of another length; the manifest alone tells when and where."""
    prefix = make_prefix(tmp_path / "a-longer-name-than-the-other-one")
    outcomes = built.build("v2", prefix)
    assert {outcome.state for outcome in outcomes.values()} == {"done"}, outcomes
    for entry in built.entries("v2").values():
        one, two = (
            set((place / "store" / entry.name / "files.sha256").read_text().splitlines())
            for place in (built.prefix, prefix)
        )
        assert len(one) > 5
        assert {
            line for line in one ^ two if not line.endswith("  manifest.json") and not line.startswith("# sum ")
        } == set(), entry.name


def test_an_unpacked_nvshmem_has_the_names_that_linkers_ask_for(built: Place) -> None:
    folder = built.prefix / "store" / built.entries("v1-wheel")["nvshmem"].name
    links = {path.name: os.readlink(path) for path in (folder / "lib").iterdir() if path.is_symlink()}
    assert links == {
        "libnvshmem_host.so": "libnvshmem_host.so.3",
        "libnvshmem_host.so.3.4.5": "libnvshmem_host.so.3",
        "nvshmem_transport_ibgda.so": "nvshmem_transport_ibgda.so.3",
    }
    assert (folder / "include/nvshmem.h").is_file()


def test_the_unpacked_nvshmem_is_the_one_of_the_process(built: Place) -> None:
    code = (
        "import deep_ep_cpp, torch; print({line.split()[-1] for line in open('/proc/self/maps') if 'nvshmem_host' "
        "in line})"
    )
    done = python(built, "v1-wheel", code)
    assert done.stdout.strip() == str(
        {f"{built.prefix}/store/{built.entries('v1-wheel')['nvshmem'].name}/lib/libnvshmem_host.so.3"}
    )


def test_v2_uses_its_nccl_and_keeps_no_place_of_the_build(built: Place, tmp_path: Path) -> None:
    code = "import deep_ep, deep_ep._C as c; print(c.nccl_version(), deep_ep.persistent_envs)"
    cache = tmp_path / "jit"
    done = python(built, "v2", code, EP_NCCL_ROOT_DIR=str(nccl(built)), EP_JIT_CACHE_DIR=str(cache))
    assert (done.stdout.strip(), cache.is_dir()) == (f"{stacks_support.NCCL} {{}}", True), done.stderr
    found = run_paths(built, built.entries("v2")["deepep"])
    names = {kind: entry.name for kind, entry in built.entries("v2").items()}
    behind = nccl(built).relative_to(built.prefix / "store" / names["python"])
    assert found == [
        f"$ORIGIN/../../../../{names['python']}/{behind}/lib",
        f"$ORIGIN/../../../../{names['nvshmem']}/lib",
    ]


def test_the_smoke_program_uses_the_buffer_of_v2(built: Place, tmp_path: Path) -> None:
    smoke = ROOT / "env" / "programs" / "smoke.py"
    code = (
        f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, {str(smoke)!r}, '--num-processes', '2']))"
    )
    done = python(built, "v2", code, EP_NCCL_ROOT_DIR=str(nccl(built)), EP_JIT_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert ": ElasticBuffer on 2 GPUs\n" in done.stdout
    assert "[smoke] passed in " in done.stdout


def test_v2_refuses_another_nccl_in_the_process(built: Place, tmp_path: Path) -> None:
    stacks_support.nccl_files(tmp_path / "old", "2.28.9")
    more = {
        "EP_NCCL_ROOT_DIR": str(nccl(built)),
        "EP_JIT_CACHE_DIR": str(tmp_path),
        "LD_LIBRARY_PATH": str(tmp_path / "old"),
    }
    done = python(built, "v2", "import deep_ep", **more)
    assert "NCCL 2.28.9 is loaded, but deep_ep was built with 2.30.4" in done.stderr


def beside(place: Place, python: Path, *, own_nccl: bool = False) -> EntryInputs:
    """Return what is wanted of the stack v2-vllm for an external Python, as the facts of a host tell it."""
    prepared = place.of("v2-vllm")
    asked = prepared.wanted(prepared.toolkit(TOOLKITS["v2"]), str(python))
    facts = parse_facts(run_script("dash", "/nowhere", str(python)), "test")
    assert facts.external_python is not None
    assert not facts.external_python.problem
    return replace(asked, python=facts.external_python, libraries=facts.external_libraries, own_nccl=own_nccl)


def build_beside(place: Place, asked: EntryInputs) -> dict[str, Entry]:
    outcomes = standins.run(place.of("v2-vllm").request(place.prefix, asked))
    assert {outcome.state for outcome in outcomes.values()} == {"done"}, outcomes
    return {entry.kind: entry for entry in name_entries(asked)}


def run_paths(place: Place, entry: Entry) -> list[str]:
    (extension,) = (place.prefix / "store" / entry.name / "lib/python/deep_ep").glob("_C*.so")
    dynamic = subprocess.run(["readelf", "-dW", extension], capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in dynamic.splitlines() if "RUNPATH" in line]
    return line.split("[")[1].rstrip("]").split(":")


def test_v2_is_built_beside_an_external_torch_with_that_ones_libraries(built: Place, tmp_path: Path) -> None:
    """Into the environment nothing is written; in the process are the environment's NCCL and NVSHMEM alone."""
    python = stacks_support.make_environment(built.stacks, tmp_path / "vllm", "/usr/bin/python3")
    before = sorted(path for path in (tmp_path / "vllm").rglob("*") if "__pycache__" not in path.parts)
    asked = beside(built, python)
    entries = build_beside(built, asked)
    assert set(entries) == {"deepep"}
    after = sorted(path for path in (tmp_path / "vllm").rglob("*") if "__pycache__" not in path.parts)
    assert after == before
    nvidia = next((tmp_path / "vllm").glob("lib/python3*/site-packages/nvidia"))
    assert run_paths(built, entries["deepep"]) == [f"{nvidia}/nccl/lib", f"{nvidia}/nvshmem/lib"]
    code = (
        "import deep_ep._C as c; print(c.nccl_version()); "
        "print(sorted({line.split()[-1] for line in open('/proc/self/maps') if 'libnccl' in line or 'nvshmem_host' in line}))"
    )
    environment = {
        "PYTHONPATH": f"{built.prefix}/store/{entries['deepep'].name}/lib/python",
        "EP_NCCL_ROOT_DIR": f"{nvidia}/nccl",
        "EP_JIT_CACHE_DIR": str(tmp_path / "jit"),
    }
    done = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True, check=False)
    files = [f"{nvidia}/nccl/lib/libnccl.so.2", f"{nvidia}/nvshmem/lib/libnvshmem_host.so.3"]
    assert done.stdout.splitlines() == [stacks_support.NCCL_OF_VLLM, str(files)], done.stderr
    health(built.prefix, entries["deepep"], tmp_path / "scratch")


def test_an_nccl_of_ours_is_unpacked_and_stands_in_for_an_older_one(built: Place, tmp_path: Path) -> None:
    python = stacks_support.make_environment(built.stacks, tmp_path / "vllm", "/usr/bin/python3", nccl="2.28.9")
    asked = beside(built, python, own_nccl=True)
    assert asked.library("nccl").version == "2.28.9"
    entries = build_beside(built, asked)
    assert set(entries) == {"nccl", "deepep"}
    assert run_paths(built, entries["deepep"])[0] == f"$ORIGIN/../../../../{entries['nccl'].name}/lib"
    for entry in entries.values():
        health(built.prefix, entry, tmp_path / "scratch")


def test_a_moved_prefix_passes_every_health_check(built: Place, tmp_path: Path) -> None:
    moved = tmp_path / "some where/else"
    shutil.copytree(built.prefix, moved, symlinks=True)
    hidden = built.prefix.rename(built.prefix.with_name("hidden"))
    try:
        for stack in TOOLKITS:
            for entry in built.entries(stack).values():
                health(moved, entry, tmp_path / "scratch")
    finally:
        hidden.rename(built.prefix)


def test_the_health_check_names_an_nccl_of_another_version(built: Place, tmp_path: Path) -> None:
    entry = built.entries("v2")["deepep"]
    other = replace(entry, env={**entry.env, "NCCL_VERSION": "2.31.0"})
    with pytest.raises(AssertionError, match=r"NCCL's library in the process: found 2\.30\.4, wanted 2\.31\.0"):
        health(built.prefix, other, tmp_path / "scratch")


def test_the_health_check_names_an_nvshmem_without_ibgda(place: Place, tmp_path: Path) -> None:
    mine = stacks_support.copy_of(place.stacks, tmp_path)
    nvshmem = next(path for path in (place.prefix / "store").glob("*-nvshmem-*") if (path / "bin").is_dir())
    files = stacks_support.nvshmem_files(nvshmem)
    name = "nvidia/nvshmem/lib/libnvshmem_host.so.3"
    files[name] = files[name].replace(b"NVSHMEM_IBGDA_SUPPORT=ON", b"NVSHMEM_IBGDA_SUPPORT=NO")
    before = stacks_support.pin_of(mine, "nvidia-nvshmem-cu12")
    stacks_support.put_pin(
        mine, stacks_support.pack(mine.wheels, "nvidia-nvshmem-cu12", stacks_support.NVSHMEM, files), before
    )
    prepared = place.of("v1-wheel", mine)
    request = prepared.request(make_prefix(tmp_path), prepared.wanted(prepared.toolkit(TOOLKITS["v1-wheel"])))
    outcomes = standins.run(
        replace(request, entries=tuple(entry for entry in request.entries if entry.kind == "nvshmem"))
    )
    assert outcomes["nvshmem"].state == "failed"
    assert "found NVSHMEM_IBGDA_SUPPORT=NO, wanted NVSHMEM_IBGDA_SUPPORT=ON" in outcomes["nvshmem"].detail


def test_v2_without_its_submodule_says_what_the_pin_lacks(built: Place, tmp_path: Path) -> None:
    prepared = built.of("v2")
    bare = tmp_path / "bare"
    shutil.copytree(dict(prepared.files)["src/deepep-v2"], bare, ignore=shutil.ignore_patterns("fmt"))
    lacking = dataclasses.replace(
        prepared, files=tuple((name, bare if name == "src/deepep-v2" else path) for name, path in prepared.files)
    )
    request = lacking.request(built.prefix, lacking.wanted(lacking.toolkit(TOOLKITS["v2"])))
    other = replace(request.entries[-1], inputs={"another": "tree"})
    outcomes = standins.run(replace(request, entries=(other,), wheels=()))
    assert "the lock's pin must say submodules = true" in outcomes["deepep"].detail


def test_a_wheel_serves_an_external_python_too(place: Place) -> None:
    prepared = place.of("v1-wheel")
    toolkit = prepared.toolkit(TOOLKITS["v1-wheel"])
    entries = {entry.kind: entry for entry in name_entries(prepared.wanted(toolkit, "/opt/torch/bin/python"))}
    assert set(entries) == {"gdrcopy", "nvshmem", "deepep"}
    assert entries["nvshmem"].name == place.entries("v1-wheel")["nvshmem"].name


# --- V2.5 ---------------------------------------------------------------------------------------------------------


def compiler(folder: Path, version: str) -> Path:
    """Return a folder with a g++ that calls itself `version`, to stand first on PATH."""
    folder.mkdir(parents=True)
    (folder / "g++").write_text(COMPILER.format(version=version, real=shutil.which("g++")))
    (folder / "g++").chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def newest(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """V2.5 in the same prefix, built by a compiler that is new enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{compiler(tmp_path_factory.mktemp('gcc') / '13', '13.3.0')}:{os.environ['PATH']}")
        outcomes = place.build(V25)
    assert {outcome.state for outcome in outcomes.values()} <= {"done", "unchanged"}, outcomes
    return place


def test_v25_is_built_without_nvshmem_gpu_and_architectures(newest: Place, tmp_path: Path) -> None:
    deepep, environment = newest.entries(V25)["deepep"], newest.entries(V25)["python"]
    assert deepep.needs == (environment.name,)
    assert "archs" not in deepep.inputs
    entry = newest.prefix / "store" / deepep.name
    (extension,) = (entry / "lib/python/deep_ep").glob("_C*.so")
    dynamic = subprocess.run(["readelf", "-dW", extension], capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in dynamic.splitlines() if "RUNPATH" in line]
    behind = nccl(newest, V25).relative_to(newest.prefix / "store" / environment.name)
    assert line.split("[")[1].rstrip("]") == f"$ORIGIN/../../../../{environment.name}/{behind}/lib"
    code = "import deep_ep, deep_ep._C as c; print(c.nccl_version(), deep_ep.persistent_envs)"
    done = python(
        newest, V25, code, EP_NCCL_ROOT_DIR=str(nccl(newest, V25)), EP_JIT_CACHE_DIR=f"{tmp_path}/a:{tmp_path}/b"
    )
    assert (done.stdout.strip(), (tmp_path / "a").is_dir()) == (f"{stacks_support.NCCL_OF_V25} {{}}", True), done.stderr


def test_the_programs_of_v25_run(newest: Place, tmp_path: Path) -> None:
    """The smoke program on its EPBuffer, and upstream's own test, whose lines `invoke results` reads."""
    entry = newest.prefix / "store" / newest.entries(V25)["deepep"].name
    given = {"EP_NCCL_ROOT_DIR": str(nccl(newest, V25)), "EP_JIT_CACHE_DIR": str(tmp_path)}
    for script, words in ((ROOT / "env/programs/smoke.py", []), (entry / "tests/ep/test_ep.py", ["--test-first-only"])):
        call = [str(script), "--num-processes", "2", *words]
        code = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, *{call!r}]))"
        done = python(newest, V25, code, **given, MASTER_PORT=str(free_port()))
        assert done.returncode == 0, done.stdout + done.stderr
        if not words:
            assert ": EPBuffer on 2 GPUs\n" in done.stdout
    header = f"deepep: ep test of deepep/2.5.0-0000000-{V25}: {entry}/tests/ep/test_ep.py --test-first-only\n"
    (found,) = read.read_logs({"job.log": f"{header}{done.stdout}deepep: ep ended with exit code 0\n"})
    assert (found.test, found.generation, found.ok) == ("ep", "v2.5", True), found
    assert set(found.operations) == {"dispatch", "combine"}


@pytest.mark.parametrize(
    ("lacking", "said"),
    [
        (
            "gcc",
            "gcc is too old for DeepEP V2.5: found 12.2.0, wanted 13 or newer, since its sources are C++20 with std::format",
        ),
        ("nvcc", "nvcc is too old for DeepEP V2.5: found 13.0.88, wanted 13.1 or newer, since "),
        ("NCCL", "NCCL is too old for DeepEP V2.5: found 2.30.4, wanted 2.32.3 or newer, since "),
        ("submodule", "the source has no third-party/deep_jit: the lock's pin must say submodules = true"),
    ],
)
def test_v25_names_what_is_too_old_or_missing(
    built: Place, newest: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str, said: str
) -> None:
    version = "12.2.0" if lacking == "gcc" else "13.3.0"
    monkeypatch.setenv("PATH", f"{compiler(tmp_path / 'gcc', version)}:{os.environ['PATH']}")
    prepared = newest.of(V25)
    if lacking == "submodule":
        bare = tmp_path / "bare"
        shutil.copytree(dict(prepared.files)["src/deepep-v25"], bare, ignore=shutil.ignore_patterns("deep_jit"))
        files = tuple((name, bare if name == "src/deepep-v25" else path) for name, path in prepared.files)
        prepared = dataclasses.replace(prepared, files=files)
    toolkit = "13.0.88" if lacking == "nvcc" else TOOLKIT_OF_V25
    request = prepared.request(newest.prefix, prepared.wanted(prepared.toolkit(toolkit)))
    entry = replace(request.entries[-1], inputs={"another": lacking})
    if lacking == "NCCL":  # an environment with that of V2
        older = built.entries("v2")["python"].name
        entry = replace(entry, needs=(older,), env={**entry.env, "PYTHON_ENTRY": older})
    outcomes = standins.run(replace(request, entries=(entry,), wheels=()))
    assert (outcomes["deepep"].state, said in outcomes["deepep"].detail) == ("failed", True), outcomes["deepep"].detail
    assert not list(newest.prefix.glob(f"store/*{entry.name}*"))


def test_v25_is_built_with_an_old_toolkit_where_a_compiler_comes_along(
    newest: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its build compiles no kernel: nvcc 13.0 of the build host is refused only where nodes would use it."""
    monkeypatch.setenv("PATH", f"{compiler(tmp_path / 'gcc', '13.3.0')}:{os.environ['PATH']}")
    prepared = newest.of(V25)
    request = prepared.request(newest.prefix, prepared.wanted(prepared.toolkit("13.0.88")))
    entry = request.entries[-1]
    entry = replace(entry, inputs={"another": "compiler"}, env={**entry.env, "KERNEL_NVCC": "13.2.86"})
    outcomes = standins.run(replace(request, entries=(entry,), wheels=()))
    assert outcomes["deepep"].state == "done", outcomes["deepep"].detail
