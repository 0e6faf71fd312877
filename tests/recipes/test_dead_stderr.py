"""Every recipe that cleans up does so when the controller is gone: nobody reads its standard error any more, and its
whole process group is told to end in the middle of its work."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deepep_bootstrap.analysis.tuning import shelf
from deepep_bootstrap.bootstrap import build
from deepep_bootstrap.prefix import generations
from deepep_bootstrap.prefix.archive import transfer
from deepep_bootstrap.testing import slurm_run, ssh_run
from tests.support.build import BUILD_SMALL, PUBLISH, RECIPES, environment, make_prefix, script, until
from tests.support.store import Prefix, entry_name

pytest_plugins = ["tests.support.store"]
pytestmark = pytest.mark.usefixtures("programs")

ENTRY = entry_name("nvshmem")


@dataclass(frozen=True)
class Case:
    """A recipe in the middle of its work: `stops_in` is the program that it calls then and that does not end, `left`
    gives what it should have removed."""

    names: tuple[str, ...]
    stops_in: str
    left: Callable[[Path], list[str]]
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    extra: str = ""
    before: str = ""


def hidden(*folders: str) -> Callable[[Path], list[str]]:
    """Return what lists the hidden names in these folders of the prefix."""
    return lambda place: [
        path.name for folder in folders for path in (place / "prefix" / folder).glob(".[!i]*") if path.name != ".id"
    ]


def temporary(place: Path) -> list[str]:
    return [str(path) for path in (place / "tmp").rglob("*") if not re.fullmatch(r"deepep-\d+", path.name)]


def not_cancelled(place: Path, job: str = "4711") -> list[str]:
    calls = place / "scancel-calls"
    return [] if calls.exists() and job in calls.read_text() else [f"job {job}"]


CASES = {
    "prefix/session.sh": Case(build.SESSION, "cat", lambda place: hidden("store")(place) + temporary(place)),
    "prefix/publish.sh": Case(PUBLISH, "hold", hidden("store"), env={"HOOK_BUILD": "hold"}, extra=BUILD_SMALL),
    "prefix/offer.sh": Case(generations.OFFER, "tar", hidden("generations"), env={"BASE": "0"}),
    "prefix/rollback.sh": Case(
        generations.ROLLBACK, "rm", hidden("generations", "store", ""), env={"BASE": "0", "TO": "1"}
    ),
    "prefix/gc.sh": Case(generations.GC, "rm", hidden("generations", "store", ""), env={"SEEN": "0: "}),
    "prefix/tuning.sh": Case(shelf.TUNING, "tar", hidden("tuning"), ("keep",), {"BASES": "x none"}),
    "prefix/import.sh": Case(transfer.IMPORT, "tar", hidden("store"), ("receive",), {"ENTRIES": ENTRY}),
    "prefix/export.sh": Case(transfer.EXPORT, "find", temporary, ("list",), {"ENTRIES": ENTRY}),
    "prefix/rehash.sh": Case(generations.REHASH, "head", temporary, env={"ENTRIES": ENTRY}),
    "prefix/probe-index.sh": Case(
        ("lib.sh", "build/common.sh", "prefix/probe-index.sh"),
        "cat",
        temporary,
        env={"REQUIREMENT": "numpy==1", "PYTHON": "python3"},
    ),
    "slurm/fanout.sh": Case(
        ("lib.sh", "slurm/fanout.sh"),
        "srun",
        lambda place: not_cancelled(place, "--name=deepep-look-1") + temporary(place),
        env={
            "NAME": "deepep-look-1",
            "LIMIT": "9999",
            "STEP": "",
            "COMMAND": "",
            "SECONDS_EACH": "1",
            "BYTES_EACH": "1",
        },
        before="payload() { echo; }\n",
    ),
    "test/submit.sh": Case(
        slurm_run.SUBMIT,
        "scontrol",
        not_cancelled,
        env={"FILE": "x", "RUN": "r", "START_LIMIT": "9999", "TIME_LIMIT": "9999"},
    ),
    "test/here.sh": Case(
        ssh_run.HERE,
        "hold",
        lambda place: [] if list(place.glob("prefix/logs/tests/r/verdict.json")) else ["a run without a verdict"],
        env={"RUN": "r", "FILE": "hold", "KEY": "code", "DEEPEP_NODE": "n1", "DEEPEP_NODES": "n1"},
    ),
    "verify/module.sh": Case(
        ("lib.sh", "verify/module.sh"),
        "hold",
        lambda place: [path for path in temporary(place) if Path(path).is_dir()],
        env={"LOAD": "deepep", "DEEPEP": "/d", "NVSHMEM": "/n", "IMPORT": "yes", "PROBE": "0", "PYTHON": "hold"},
    ),
}


def cleans_up(path: str, text: str) -> bool:
    """Return whether a recipe, not a library, sets an EXIT trap or has the library set it. The task of a step of Slurm
    is none: nobody ever reads its standard error, and slurmd ends it."""
    found = re.search(r"^\s*(trap\b.*\bEXIT\b|let_go_on_exit$)", text, re.MULTILINE)
    return path.endswith(".sh") and "/lib/" not in path and path != "slurm/step.sh" and found is not None


def test_every_recipe_that_cleans_up_has_its_case() -> None:
    assert {path for path, text in RECIPES.items() if cleans_up(path, text)} == set(CASES)


def program(place: Path, name: str, text: str) -> None:
    path = place / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def prepare(place: Path, case: Case) -> dict[str, str]:
    """Make a prefix and programs; the one that the case stops in does so at its first call, later it is the real
    one."""
    prefix = make_prefix(place)
    Prefix(prefix, None).entry(ENTRY)  # type: ignore[arg-type] # asked for nothing
    (place / "tmp").mkdir()
    program(place, "sbatch", "echo 4711")
    program(place, "squeue", "")
    program(place, "scancel", f'echo "$*" >>{place}/scancel-calls')
    program(
        place,
        case.stops_in,
        f'[ -e {place}/ready ] || {{ touch {place}/ready; exec sleep 1000; }}\nPATH=${{PATH#*:}}; exec {case.stops_in} "$@"',
    )
    # A login shell reads this file where there is no module system.
    env_file = place / "env.sh"
    env_file.touch()
    base = environment(prefix, place / "scratch", "t")
    path = f"{place}/bin:{os.environ['PATH']}"
    (place / "home").mkdir()
    (place / "home/.bash_profile").write_text(f"PATH={path}\nunset -f module\n")
    inputs = {"PATH": path, "HOME": str(place / "home"), "TMPDIR": str(place / "tmp"), "ENV_FILE": str(env_file)}
    return {**base, **inputs, **case.env}


@pytest.mark.parametrize("path", CASES)
def test_it_cleans_up_when_nobody_reads_its_standard_error(path: str, tmp_path: Path) -> None:
    case = CASES[path]
    env = prepare(tmp_path, case)
    reader, writer = os.pipe()
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(
            ["bash", "-c", case.before + script(*case.names, extra=case.extra), "script", *case.args],
            env=env,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=writer,
            start_new_session=True,
        )
    os.close(writer)
    stopped = tmp_path / "ready"
    until(lambda: stopped.exists() or process.poll() is not None, f"{path} at {case.stops_in}")
    assert process.poll() is None, os.read(reader, 10000).decode()
    assert case.left(tmp_path), "there is something to clean up"
    os.close(reader)
    os.killpg(process.pid, signal.SIGTERM)
    process.wait()
    until(lambda: not case.left(tmp_path), f"the clean-up of {path}: {case.left(tmp_path)}")
    if process.stdin:
        process.stdin.close()
