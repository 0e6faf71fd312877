"""The stand-in sources built for real, with gcc, cmake and the fake CUDA toolkit, through the engine's transport to this
machine."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from msgspec import structs

from deepep_bootstrap.bootstrap import build
from deepep_bootstrap.bootstrap.build import Event
from deepep_bootstrap.core import recipes
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.filetree import hash_path
from deepep_bootstrap.lock.model import Wheel
from deepep_bootstrap.prefix import entries
from deepep_bootstrap.remote.fleet import ConnectionPool
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Job, Reply
from deepep_bootstrap.remote.script import OnLine
from tests.support import standins
from tests.support.build import HERE, RECIPES, health, make_prefix, store_names, until, walk
from tests.support.standins import Prepared

pytestmark = pytest.mark.usefixtures("programs")

Built = tuple[Path, dict[str, str]]
Again = tuple[Path, list[dict[str, str]]]
KINDS = ("gdrcopy", "nvshmem", "python", "deepep")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return standins.prepare(tmp_path_factory.mktemp("standins"))


@pytest.fixture(scope="module")
def built(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A prefix with the demo's four entries, and their names by kind."""
    prefix = make_prefix(tmp_path_factory.mktemp("built"))
    request = prepared.request(prefix, prepared.wanted(prepared.toolkit()))
    outcomes = standins.run(request)
    assert {kind: outcome.state for kind, outcome in outcomes.items()} == dict.fromkeys(KINDS, "done"), outcomes
    shutil.copytree(request.logs, prefix.parent / "first-logs")  # another run over the same entries has logs of its own
    return prefix, {entry.kind: entry.name for entry in request.entries}


@pytest.fixture(scope="module")
def again(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Again:
    """Another prefix with the same entries, made by two processes at once in a scratch folder with a longer name;
    and the last word of each process on each entry."""
    prefix = make_prefix(tmp_path_factory.mktemp("built-once-more-somewhere-else"))
    scratch = prefix.parent / "scratch-of-another-length"
    scratch.mkdir()
    words = [sys.executable, standins.__file__, str(prepared.folder), str(prefix)]
    env = {**os.environ, "TMPDIR": str(scratch)}
    runs = [
        subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    ends = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [0, 0], ends
    assert f"{scratch}/deepep-{os.getuid()}/deepep-scratch-" in "".join(out for out, _ in ends)
    return prefix, [{line.split(" ", 2)[0]: line.split(" ", 2)[1] for line in out.splitlines()} for out, _ in ends]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return make_prefix(tmp_path)


@pytest.fixture
def knobs(prepared: Prepared) -> Iterator[Path]:
    """The folder of a fake toolkit of its own, whose nvcc reads settings from files there."""
    folder = Path(prepared.toolkit("12.8.93").path) / "bin"
    yield folder
    for knob in folder.glob("FAKE_*"):
        knob.unlink()


def test_the_store_holds_the_entries_and_nothing_else(built: Built) -> None:
    prefix, names = built
    assert store_names(prefix) == set(names.values())


def test_what_is_tried_before_its_time_leaves_no_traceback(built: Built) -> None:
    """torch comes with an NVSHMEM that these wheels only pretend to have: DeepEP's build asks it once and waits for
    ours."""
    prefix, _ = built
    logs = "".join(path.read_text() for path in (prefix.parent / "first-logs").rglob("*") if path.is_file())
    assert "torch serves for building once its NVSHMEM is ours; by now: OSError: " in logs
    assert "Traceback" not in logs


def test_a_second_run_changes_nothing(built: Built, prepared: Prepared) -> None:
    prefix, _ = built
    # The session's description comes and goes in the store.
    before = [(path, path.lstat().st_mtime_ns if path != prefix / "store" else 0) for path in walk(prefix)]
    outcomes = standins.run(prepared.request(prefix, prepared.wanted(prepared.toolkit())))
    assert {outcome.state for outcome in outcomes.values()} == {"unchanged"}
    assert [(path, path.lstat().st_mtime_ns if path != prefix / "store" else 0) for path in walk(prefix)] == before


COMPILERS = ("cc", "c++", "gcc", "g++", *(f"{os.uname().machine}-linux-gnu-{name}" for name in ("gcc", "g++")))
COUNTED = """#!/bin/sh
echo "$ENTRY $*" >>{calls}
exec {compiler} "$@"
"""
"""A compiler that writes down for which entry it is called, and with what."""


@dataclass(frozen=True)
class Counted:
    """A prefix that has the demo's entries, and every call of a compiler since it is there."""

    prefix: Path
    calls: Path

    @property
    def entries(self) -> Counter[str]:
        """How often a compiler was called for each entry."""
        return Counter(line.split(" ")[0] for line in self.calls.read_text().splitlines())

    def compiled(self, suffixes: tuple[str, ...]) -> set[str]:
        """The names of the source files that were compiled; CMake tries its compilers with files of its own."""
        words = [word for line in self.calls.read_text().splitlines() for word in line.split(" ")[1:]]
        return {Path(word).name for word in words if word.endswith(suffixes)}


@pytest.fixture
def counted(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counted:
    prefix, calls = tmp_path / "prefix", tmp_path / "calls"
    shutil.copytree(built[0], prefix, symlinks=True)
    calls.touch()
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in COMPILERS:
        (folder / name).write_text(COUNTED.format(calls=calls, compiler=shutil.which(name)))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return Counted(prefix, calls)


def with_another_pin(prepared: Prepared, name: str, pinned: str, file: str, folder: Path) -> Prepared:
    """Return what is prepared with one more source, `pinned`: that called `name` with one more line in a file."""
    tree = folder / pinned
    shutil.copytree(dict(prepared.files)[f"src/{name}"], tree, symlinks=True)
    (tree / file).chmod(0o644)
    (tree / file).write_text((tree / file).read_text() + "\n// the next commit\n")
    source = structs.replace(prepared.lock.sources[name], name=pinned, rev="1" * 40, hash=hash_path(tree))
    files = [(path, place) for path, place in prepared.files if path != f"src/{pinned}"]
    lock = structs.replace(prepared.lock, sources={**prepared.lock.sources, pinned: source})
    return replace(prepared, lock=lock, files=(*files, (f"src/{pinned}", tree)))


@pytest.mark.long
def test_a_change_of_deepeps_pin_compiles_deepep_alone(counted: Counted, prepared: Prepared, tmp_path: Path) -> None:
    moved = with_another_pin(prepared, "deepep", "deepep", "csrc/deep_ep.cpp", tmp_path)
    request = moved.request(counted.prefix, moved.wanted(moved.toolkit()))
    outcomes = standins.run(request)
    assert {kind: outcome.state for kind, outcome in outcomes.items()} == {
        **dict.fromkeys(KINDS, "unchanged"),
        "deepep": "done",
    }
    (deepep,) = [entry.name for entry in request.entries if entry.kind == "deepep"]
    assert {*counted.entries} == {deepep}
    sources = {path.name for path in (tmp_path / "deepep" / "csrc").rglob("*") if path.suffix in {".cpp", ".cu"}}
    assert sources <= counted.compiled((".cpp", ".cu"))


@pytest.mark.long
def test_a_second_stack_compiles_what_it_does_not_share(counted: Counted, prepared: Prepared, tmp_path: Path) -> None:
    """It differs in its NVSHMEM, and so in Python, whose torch is given that one, and in DeepEP; GDRCopy is that of the
    first."""
    file = "src/modules/transport/ibgda/ibgda.cpp"
    both = with_another_pin(prepared, "nvshmem", "nvshmem-next", file, tmp_path)
    first = both.lock.stacks[both.lock.default_stack]
    second = structs.replace(first, name="second", nvshmem="nvshmem-next")
    lock = structs.replace(both.lock, stacks={**both.lock.stacks, "second": second}, default_stack="second")
    both = replace(both, lock=lock)
    request = both.request(counted.prefix, both.wanted(both.toolkit()))
    outcomes = standins.run(request)
    assert {kind: outcome.state for kind, outcome in outcomes.items()} == {
        **dict.fromkeys(KINDS, "done"),
        "gdrcopy": "unchanged",
    }
    compiled = {entry.kind for entry in request.entries if counted.entries[entry.name]}
    assert {"nvshmem", "deepep"} <= compiled
    assert {*counted.entries} <= {entry.name for entry in request.entries if entry.kind != "gdrcopy"}
    calls = counted.calls.read_text()
    assert {outcome.state for outcome in standins.run(request).values()} == {"unchanged"}
    assert counted.calls.read_text() == calls, "a second run calls no compiler"


def test_no_entry_names_a_place_of_its_build(built: Built) -> None:
    prefix, _ = built
    for path in walk(prefix / "store"):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            assert b"deepep-scratch-" not in content, path
            assert os.fsencode(prefix) not in content, path


def test_files_are_read_only_and_folders_can_be_entered(built: Built) -> None:
    prefix, names = built
    for path in walk(prefix / "store"):
        mode = path.lstat().st_mode
        assert (
            path.is_symlink()
            or (mode & 0o222 == 0 and mode & 0o444 == 0o444)
            or (path.is_dir() and mode & 0o055 == 0o055)
        ), path
    assert (prefix / "store" / names["deepep"] / "tests/test_internode.py").is_file()


def test_manifests_say_what_the_name_stands_for(built: Built) -> None:
    prefix, names = built
    for kind, name in names.items():
        found = json.loads((prefix / "store" / name / "manifest.json").read_text())
        assert (found["schema"], found["kind"], found["name"]) == (1, kind, name)
        assert name.startswith(recipes.digest(found["inputs"]) + "-")
        assert set(found["built"]) == {"host", "at", "seconds"}


def test_links_inside_the_store_are_relative_and_lead_somewhere(built: Built) -> None:
    prefix, names = built
    for path in walk(prefix / "store"):
        if path.is_symlink():
            target = os.readlink(path)
            assert path.exists(), path
            assert not target.startswith("/") or target.startswith("/usr/bin/python3"), (path, target)
    library = next(
        (prefix / "store" / names["python"]).glob("lib/python3*/site-packages/nvidia/nvshmem/lib/libnvshmem_host.so.3")
    )
    assert library.resolve().parent == prefix / "store" / names["nvshmem"] / "lib"


def test_a_moved_prefix_passes_every_health_check_and_is_not_written_to(
    built: Built, prepared: Prepared, tmp_path: Path
) -> None:
    """As root, for whom read-only files are no hindrance, and with Python free to write byte code."""
    prefix, names = built
    moved = tmp_path / "some where/else"
    shutil.copytree(prefix, moved, symlinks=True)
    hidden = prefix.rename(prefix.with_name("hidden"))
    try:
        before = list(walk(moved))
        for entry in entries.name_entries(prepared.wanted(prepared.toolkit())):
            health(moved, entry, tmp_path / "scratch")
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{moved}/store/{names['deepep']}/lib/python"}
        code = "import torch, deep_ep, setuptools, numpy; print(deep_ep.__file__)"
        python = moved / "store" / names["python"] / "bin/python"
        done = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.startswith(f"{moved}/store/")
        assert list(walk(moved)) == before
    finally:
        hidden.rename(prefix)


def test_scripts_of_the_environment_find_their_own_python(built: Built, tmp_path: Path) -> None:
    prefix, names = built
    moved = tmp_path / "elsewhere"
    shutil.copytree(prefix, moved, symlinks=True)
    # What an environment says of itself tells nothing of the uv that made it: that is not in the digest.
    says = {
        line.partition(" = ")[0]
        for line in (prefix / "store" / names["python"] / "pyvenv.cfg").read_text().splitlines()
    }
    assert "home" in says
    assert "uv" not in says
    script_file = moved / "store" / names["python"] / "bin/numpy-config"
    done = subprocess.run([script_file, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout[0].isdigit()


def test_an_external_python_builds_beside_nvshmem(built: Built, prepared: Prepared, prefix: Path, knobs: Path) -> None:
    """DeepEP's own files compile while NVSHMEM is not there yet; only its link waits."""
    other, names = built
    external = f"{other}/store/{names['python']}/bin/python"
    (knobs / "FAKE_NVCC_SLEEP").write_text("0.5")
    events: list[Event] = []
    request = prepared.request(prefix, prepared.wanted(prepared.toolkit("12.8.93"), external))
    outcomes = standins.run(request, events.append)
    assert {outcome.state for outcome in outcomes.values()} == {"done"}, [
        outcome.detail for outcome in outcomes.values()
    ]
    assert set(outcomes) == {"gdrcopy", "nvshmem", "deepep"}
    nvshmem, deepep = request.entries[1].name, request.entries[2].name
    ready = next(place for place, event in enumerate(events) if (event.entry, event.state) == (nvshmem, "done"))
    compiled = [place for place, event in enumerate(events) if event.entry == deepep and " -dc " in event.line]
    assert compiled
    assert max(compiled) < ready
    assert not [event for event in events if "once more when NVSHMEM is there" in event.line]
    extension = next((prefix / "store" / deepep / "lib/python").glob("deep_ep_cpp*.so"))
    dynamic = subprocess.run(["readelf", "-dW", extension], capture_output=True, text=True, check=True).stdout
    assert f"[$ORIGIN/../../../{nvshmem}/lib]" in dynamic


def test_a_failing_build_keeps_what_was_good(prepared: Prepared, prefix: Path, knobs: Path) -> None:
    (knobs / "FAKE_NVCC_FAIL").write_text("transfer_device")
    request = prepared.request(prefix, prepared.wanted(prepared.toolkit("12.8.93")))
    outcomes = standins.run(request)
    assert {kind: outcome.state for kind, outcome in outcomes.items()} == {
        "gdrcopy": "done",
        "nvshmem": "failed",
        "python": "skipped",
        "deepep": "skipped",
    }
    assert store_names(prefix) == {request.entries[0].name}
    failed = outcomes["nvshmem"]
    assert 'identifier "fake_failure" is undefined' in failed.detail
    assert 'identifier "fake_failure" is undefined' in Path(failed.log).read_text()
    assert outcomes["deepep"].detail.startswith("needs ")
    (knobs / "FAKE_NVCC_FAIL").unlink()
    again = standins.run(request)
    assert {kind: outcome.state for kind, outcome in again.items()} == {
        "gdrcopy": "unchanged",
        "nvshmem": "done",
        "python": "done",
        "deepep": "done",
    }


class GoesAway(ConnectionPool):
    """A host that is lost as soon as GDRCopy is published."""

    def run(self, host: Host, job: Job, on_line: OnLine | None = None) -> Reply:
        if job.env.get("RECIPE") in {"nvshmem.sh", "python.sh", "deepep.sh"}:
            raise Trouble(Problem(host.name, "stopped answering while a script ran"))
        return super().run(host, job, on_line)


def test_a_host_that_goes_away_costs_what_it_had_not_published(prepared: Prepared, prefix: Path) -> None:
    request = prepared.request(prefix, prepared.wanted(prepared.toolkit()))
    outcomes = build.build_all(GoesAway([HERE]), HERE, request, lambda event: None)
    assert [outcome.state for outcome in outcomes] == ["done", "failed", "failed", "failed"]
    assert {outcome.detail for outcome in outcomes[1:]} == {"stopped answering while a script ran"}
    assert store_names(prefix) == {request.entries[0].name}


def test_an_architecture_without_code_is_found(built: Built, prepared: Prepared, tmp_path: Path) -> None:
    prefix, _ = built
    entry = entries.name_entries(prepared.wanted(prepared.toolkit()))[-1]
    lacking = entries.Entry(entry.kind, entry.version, entry.inputs, env={**entry.env, "ARCHS": "9.0 12.0"})
    with pytest.raises(AssertionError, match="device code: found sm_100 sm_90 , wanted sm_120"):
        health(prefix, lacking, tmp_path / "scratch")


def test_a_toolkit_that_cannot_be_asked_for_its_code_is_named_at_once(prepared: Prepared, prefix: Path) -> None:
    toolkit = prepared.toolkit("12.6.85")
    Path(toolkit.path, "bin/cuobjdump").unlink()
    events: list[Event] = []
    outcomes = standins.run(prepared.request(prefix, prepared.wanted(toolkit)), events.append)
    assert outcomes["deepep"].state == "failed"
    assert f"not installed on this machine: {toolkit.path}/bin/cuobjdump" in outcomes["deepep"].detail
    assert not [event for event in events if event.entry == outcomes["deepep"].step and " -dc " in event.line]


def test_an_unknown_check_word_is_named(built: Built, prepared: Prepared, tmp_path: Path) -> None:
    prefix, _ = built
    entry = entries.name_entries(prepared.wanted(prepared.toolkit()))[-1]
    wrong = entries.Entry(entry.kind, entry.version, entry.inputs, env={**entry.env, "CHECKS": "import symbols"})
    with pytest.raises(AssertionError, match="unknown check 'symbols': known are import, device-code, nvshmem-symbols"):
        health(prefix, wrong, tmp_path / "scratch")


@pytest.mark.long
def test_when_the_control_process_is_killed_nothing_goes_on_and_a_rerun_finishes(
    prepared: Prepared, prefix: Path
) -> None:
    words = [sys.executable, standins.__file__, str(prepared.folder), str(prefix)]
    running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert running.stdout is not None
    scratch = ""
    for line in running.stdout:
        if "deepep-scratch-" in line:
            scratch = "deepep-scratch-" + line.split("deepep-scratch-")[1][:8]
        if "Building" in line:
            break
    assert scratch
    running.send_signal(signal.SIGKILL)  # ^C as well is tried over SSH, in tests/e2e/test_faults.py
    running.communicate()
    assert running.returncode != 0
    until(lambda: not working_in(scratch), "the end of everything in scratch")
    assert all(name.startswith(".") or "-gdrcopy-" in name for name in store_names(prefix))
    outcomes = standins.run(prepared.request(prefix, prepared.wanted(prepared.toolkit())))
    assert {outcome.state for outcome in outcomes.values()} <= {"done", "unchanged"}, outcomes
    assert not [name for name in store_names(prefix) if name.startswith(".")]


def working_in(scratch: str) -> list[str]:
    """Return the command lines of processes that name this scratch folder; what is gone meanwhile does not count."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(scratch.encode() in word for word in words):
            found.append(words[0].decode())
    return found


def test_two_bootstraps_at_once_make_one_store(again: Again, prepared: Prepared) -> None:
    prefix, told = again
    names = {entry.name for entry in entries.name_entries(prepared.wanted(prepared.toolkit()))}
    assert store_names(prefix) == names
    for name in names:
        assert sorted(run[name] for run in told) == ["done", "unchanged"], name


def test_the_same_digest_built_elsewhere_and_later_is_the_same_bit_by_bit(built: Built, again: Again) -> None:
    """In scratch and in a prefix of another length, by another process; the manifest alone tells when and where."""
    prefix, names = built
    for name in names.values():
        one, two = (
            [
                line
                for line in (place / "store" / name / "files.sha256").read_text().splitlines()
                if not line.startswith("# sum ")
            ]
            for place in (prefix, again[0])
        )
        assert len(one) > 5
        assert {line for line in {*one} ^ {*two} if not line.endswith("  manifest.json")} == set(), name
        first, second = (
            json.loads((place / "store" / name / "manifest.json").read_text()) for place in (prefix, again[0])
        )
        assert first["inputs"] == second["inputs"]


def test_manifests_tell_commands_without_places_and_the_hash_of_the_log(built: Built) -> None:
    prefix, names = built
    for kind, name in names.items():
        found = json.loads((prefix / "store" / name / "manifest.json").read_text())
        assert any(
            word in " ".join(found["commands"])
            for word in ("make -C $SCRATCH/src", "cmake --build", "uv pip install", "setup.py build")
        )
        assert not [
            command for command in found["commands"] if "deepep-scratch-" in command or str(prefix) in command
        ], kind
        # The log on the control machine: what lies between the two marks is what was hashed, data lines left out.
        lines = (prefix.parent / "first-logs" / f"build-{name}.log").read_text().splitlines()
        begin = lines.index(f"== build of {name}") + 1
        end = next(place for place, line in enumerate(lines) if line.startswith(f"== log of {name}: "))
        log = [line for line in lines[begin:end] if not line.startswith(build.NOISE)]
        assert found["log"] == {
            "sha256": hashlib.sha256("".join(f"{line}\n" for line in log).encode()).hexdigest(),
            "lines": len(log),
        }
        assert lines[end].endswith(found["log"]["sha256"])


def test_requirements_name_hashes_as_pip_does() -> None:
    wheel = Wheel("numpy", "2.2.6", "pypi", "numpy.whl", "sha256-AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAE=", 1)
    assert build.requirements([wheel]) == f"numpy==2.2.6 --hash=sha256:{'0' * 63}1\n"


def test_a_missing_recipe_is_named() -> None:
    with pytest.raises(Trouble, match=r"recipes/no/such\.sh: this recipe is missing"):
        recipes.compose(RECIPES, "lib.sh", "no/such.sh")
