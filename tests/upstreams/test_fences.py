"""The substitutions of the shipped lock in device code, compiled by the real nvcc from the stand-ins' kernels, which
hold the same texts: the fences are where they belong, and not there without them. V2 gets NCCL's own device headers."""

from __future__ import annotations

import os
import re
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from deepep_bootstrap.fetch.locations import Level, Mirrors
from deepep_bootstrap.fetch.sources import fetch_source
from deepep_bootstrap.fetch.wheels import fetch_wheel
from tests.support.paths import ROOT
from tests.support.shipped import demo_lock, shipped_lock
from tests.support.upstreams import NO_REAL_NVCC, REAL_CUDA, must, run
from tests.upstreams import make

SHIPPED = shipped_lock()
BARRIER = ROOT / "tests/cases/upstreams/fences/barrier.cu"
COMBINE = "csrc/kernels/internode_ll.cu"
PROXY_FENCE = "fence.proxy.async.shared::cta"
SYSTEM_FENCE = "fence.acq_rel.sys"
ARCHS = ("90a", "100a")
Tree = Callable[[str, bool], Path]
pytestmark = [NO_REAL_NVCC, pytest.mark.usefixtures("programs"), pytest.mark.long]


@dataclass(frozen=True)
class Compiler:
    """The real nvcc, with NCCL's headers, and what it has made so far."""

    headers: Path
    made: dict[tuple[Path, Path, str], str]

    def ptx(self, source: Path, include: Path, arch: str) -> str:
        """Return the PTX of a source file for one architecture, with one space between words; nobody assembles it."""
        key = (source, include, arch)
        if key not in self.made:
            code = f"arch=compute_{arch},code=compute_{arch}"
            text = must(*self._words(source, include), "-gencode", code, "-ptx", "-o", "-")
            self.made[key] = "\n".join(" ".join(line.split()) for line in text.splitlines())
        return self.made[key]

    def assemble(self, source: Path, include: Path, arch: str) -> str:
        """Return what is said while machine code is made of a source file; "" where all is well."""
        done = run(*self._words(source, include), f"-arch=sm_{arch}", "-cubin", "-o", os.devnull)
        return done.stdout if done.returncode else ""

    def _words(self, source: Path, include: Path) -> list[str | Path]:
        return [REAL_CUDA / "bin/nvcc", source, "-std=c++17", "-I", include, "-isystem", self.headers]


@pytest.fixture(scope="module")
def nccl_headers() -> Path:
    """NCCL's headers out of the wheel that the stack v2 pins; kept below .venv, since the wheel has 200 MB."""
    wheel = SHIPPED.stacks["v2"].pinned(SHIPPED.stacks["v2"].nccl_wheel, "cp312-x86_64")
    assert wheel is not None
    kept = ROOT / ".venv/nccl" / f"{wheel.version}-{wheel.requirement[-16:]}"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
            file = fetch_wheel(wheel, Mirrors(), Path(scratch, "cache"))
            with zipfile.ZipFile(file) as archive:
                names = [name for name in archive.namelist() if "/nccl/include/" in name]
                archive.extractall(Path(scratch, "tree"), names)
            Path(scratch, "tree").rename(kept)
    return kept / "nvidia/nccl/include"


@pytest.fixture(scope="module")
def compiler(nccl_headers: Path) -> Compiler:
    return Compiler(nccl_headers, {})


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """Return the tree of a stand-in as it is, or with what the shipped lock substitutes in the real one."""
    folder = tmp_path_factory.mktemp("trees")
    make.make_all(folder)
    mirrors = Mirrors((Level({"https://example.invalid/standin/": f"{folder}/git/standin/"}, {}),))
    pins = demo_lock().sources

    def get(name: str, substituted: bool) -> Path:
        substitutes = SHIPPED.sources[name].substitutes if substituted else ()
        pin = replace(pins["deepep" if name == "deepep-v1" else name], substitutes=substitutes)
        return fetch_source(pin, mirrors, folder / "cache")

    return get


def entry(ptx: str, name: str) -> list[str]:
    """Return the instructions of one kernel, one a line, without comments."""
    body = ptx.split(f".entry {name}(", 1)[1].split(".entry ", 1)[0]
    return [line for line in body.splitlines() if line and not line.startswith("//")]


def first(lines: list[str], start: str, after: int = 0) -> int:
    """Return where the first line that begins so is."""
    return next(place for place, line in enumerate(lines) if place >= after and line.startswith(start))


def memory_between(lines: list[str], begin: int, end: int) -> list[str]:
    """Return the instructions between two places that reach memory or wait for others."""
    memory = re.compile(r"(@%p\d+ )?(ld|st|atom|red|cp|mbarrier|bar|fence)\b")
    return list(filter(memory.match, lines[begin + 1 : end]))


@pytest.mark.parametrize("arch", ARCHS)
def test_the_combine_has_no_fence_as_upstream_has_it(tree: Tree, compiler: Compiler, arch: str) -> None:
    assert PROXY_FENCE not in compiler.ptx(tree("deepep-v1", False) / COMBINE, ROOT, arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_combine_fences_between_reading_and_handing_back(tree: Tree, compiler: Compiler, arch: str) -> None:
    source = tree("deepep-v1", True) / COMBINE
    lines = entry(compiler.ptx(source, ROOT, arch), "standin_combine")
    (fence,) = (place for place, line in enumerate(lines) if line.startswith(PROXY_FENCE))
    reads = [place for place, line in enumerate(lines) if line.startswith("ld.shared")]
    arrives = first(lines, "mbarrier.arrive.shared", fence)
    wait = max(place for place, line in enumerate(lines[:fence]) if "mbarrier.try_wait" in line)
    assert reads
    assert all(wait < place < fence for place in reads)
    assert memory_between(lines, fence, arrives) == []
    assert compiler.assemble(source, ROOT, arch) == ""


def barrier(tree: Tree, compiler: Compiler, arch: str, *, substituted: bool) -> str:
    return compiler.ptx(BARRIER, tree("deepep-v2", substituted) / "deep_ep/include", arch)


def before_the_signals(lines: list[str]) -> list[str]:
    """Return what lies between the end of the loop of flushes and the point where the block's threads meet."""
    meet = first(lines, "bar.sync")
    loop = max(place for place, line in enumerate(lines[:meet]) if line.startswith("bar.warp.sync"))
    assert [line for line in lines[loop:meet] if re.match(r"@%p\d+ bra", line)], "the loop goes back from here"
    return lines[loop:meet]


@pytest.mark.parametrize("arch", ARCHS)
def test_the_barrier_of_v2_has_no_fence_as_upstream_has_it(tree: Tree, compiler: Compiler, arch: str) -> None:
    ptx = barrier(tree, compiler, arch, substituted=False)
    for name in ("barrier_of_world", "barrier_of_rail"):
        assert not [line for line in before_the_signals(entry(ptx, name)) if line.startswith("fence")]


@pytest.mark.parametrize("arch", ARCHS)
def test_the_barrier_of_v2_fences_between_flushes_and_signals(tree: Tree, compiler: Compiler, arch: str) -> None:
    """For the team of all ranks alone, as upstream's own change: only there does data go over NVLink."""
    ptx = barrier(tree, compiler, arch, substituted=True)
    world = before_the_signals(entry(ptx, "barrier_of_world"))
    (fence,) = (place for place, line in enumerate(world) if line.startswith(SYSTEM_FENCE))
    assert not [line for line in world[fence:] if " bra" in line], "every thread comes by"
    assert memory_between(world, fence, len(world)) == []
    assert not [line for line in before_the_signals(entry(ptx, "barrier_of_rail")) if line.startswith("fence")]


@pytest.mark.parametrize("arch", ARCHS)
def test_the_barrier_of_v2_signals_on_every_context(tree: Tree, compiler: Compiler, arch: str) -> None:
    """Its loops end at ranks × contexts, not at the ranks: thirteen is a factor there, and no bound any more."""
    bound, factor = re.compile(r"setp\.\w+\.[su]32 %p\d+, %r\d+, 1[23];"), re.compile(r"mul\.lo\.s32 %r\d+, %r\d+, 13;")
    for name in ("barrier_of_world", "barrier_of_rail"):
        before, after = (entry(barrier(tree, compiler, arch, substituted=done), name) for done in (False, True))
        told = [[bool(any(map(form.match, lines))) for form in (bound, factor)] for lines in (before, after)]
        assert told == [[True, False], [False, True]]


@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_made_of_v2_can_be_assembled(tree: Tree, compiler: Compiler, arch: str) -> None:
    assert compiler.assemble(BARRIER, tree("deepep-v2", True) / "deep_ep/include", arch) == ""


def test_st_bulk_gets_a_size_of_64_bits(tree: Tree, compiler: Compiler) -> None:
    """With 32 bits ptxas before 13.1 refuses it. sm_90 has no such instruction."""
    size = re.compile(r"mov\.u64 size, (%rd?)\d+")
    assert size.findall(barrier(tree, compiler, "100a", substituted=False)) == ["%r"]
    assert size.findall(barrier(tree, compiler, "100a", substituted=True)) == ["%rd"]
    assert "st.bulk" not in barrier(tree, compiler, "90a", substituted=True)
    major, minor = re.search(r"release (\d+)\.(\d+)", must(REAL_CUDA / "bin/nvcc", "--version")).groups()
    said = compiler.assemble(BARRIER, tree("deepep-v2", False) / "deep_ep/include", "100a")
    assert ("Arguments mismatch for instruction 'mov'" in said) == ((int(major), int(minor)) < (13, 1))
