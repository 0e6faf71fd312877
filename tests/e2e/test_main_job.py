"""The main job on the embedded cluster: everything a person of the README does, seen to work."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deepep_bootstrap.core.filetree import hash_path
from tests.support.e2e import Engine

if TYPE_CHECKING:
    from tests.support.lab import LiveLab

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]
pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def ready(lab: LiveLab, standin_sources: Path) -> Engine:
    """One bootstrap for the tests of what it leaves; the last of them moves the prefix."""
    lab.reset()
    engine = Engine(lab, standin_sources)
    ended = engine.run("bootstrap")
    assert ended.code == 0, ended.text
    return engine


def load_by_stack(engine: Engine) -> str:
    """The name of the stack, and the beginning of the name that a login shell loads by it."""
    script = 'module load deepep/$0 && echo "deepep/$0 ${LOADEDMODULES%-*-*}-"'
    done = engine.lab.ssh("login1", f"bash -lc '{script}' v1")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_from_nothing_to_a_passing_test(ready: Engine) -> None:
    # Every host loads the module in a login shell; the one without GPUs too.
    for host in ready.lab.hosts:
        loaded = ready.lab.ssh(
            host,
            'bash -lc "module load deepep && echo $LOADEDMODULES" 2>&1 | cat; bash -lc "module load deepep && which '
            'python"',
        )
        assert loaded.returncode == 0, loaded.stderr
        assert "/shared/deepep/store/" in loaded.stdout
    assert load_by_stack(ready) == "deepep/v1 deepep/1.2.1-"
    examined = ready.json("doctor")
    assert (examined["exit"], [each for each in examined["findings"] if each["severity"] == "blocking"]) == (0, [])
    verified = ready.json("verify")
    assert [outcome["state"] for outcome in verified["outcomes"]] == ["done"] * 3
    # A user's own sbatch, with an argument for upstream's test.
    done = ready.lab.ssh(
        "login1",
        'cd /shared && bash -lc "sbatch --wait --output=job.out /shared/deepep/sbatch/internode-test.sbatch '
        '--num-tokens 128"',
    )
    log = (ready.lab.shared / "job.out").read_text()
    assert done.returncode == 0, log
    assert "num_tokens=128" in log
    assert log.count("passed") >= 32
    assert "n001 n002" in log
    # Nothing is left to do, and the second run says so.
    again = ready.run("bootstrap")
    assert again.code == 0
    assert "Nothing to do" in again.out
    assert ready.run("plan", "--check").code == 0
    assert sorted(path.name for path in (ready.on_disk / "generations").iterdir()) == ["1"]
    # No file in the store tells of the folder it was built in.
    scratch = ready.lab.ssh(
        "n001", "grep -rlaF deepep-scratch /shared/deepep/store --include='*' || true"
    ).stdout.split()
    assert scratch == []


def test_what_was_not_seen_to_work_is_tried_again(ready: Engine) -> None:
    broken = "/etc/profile.d/zz-broken.sh"
    ready.lab.ssh("n002", f"echo 'export PYTHONHOME=/nonexistent' >{broken}; rm /etc/profile.d/*deepep*")
    for _ in range(2):
        ended = ready.run("bootstrap")
        assert ended.code == 4, ended.text
        assert "import deep_ep fails" in ended.out
        # What the interpreter said is in the verdict, and whole in a log.
        assert "No module named 'encodings'" in ended.out, ended.out
        log = re.search(r"^Logs: (\S+)", ended.out, re.MULTILINE)
        assert log is not None
        assert "PYTHONHOME = '/nonexistent'" in (Path(log[1]) / "n002" / "verify.log").read_text()
    ready.lab.ssh("n002", f"rm {broken}")
    assert ready.run("plan", "--check").code == 2
    assert ready.run("bootstrap").code == 0
    assert "Nothing to do" in ready.run("bootstrap").out


def test_a_moved_prefix_works_and_nothing_in_it_changes(ready: Engine, tmp_path: Path) -> None:
    moved = Engine(ready.lab, ready.sources, prefix="/shared/elsewhere")
    ready.on_disk.rename(moved.on_disk)
    store = hash_path(moved.on_disk / "store")
    ended = moved.run("bootstrap", "--take-over")
    assert ended.code == 0, ended.text
    assert "build" not in ended.out.split("\n\n")[0], "a move is no reason to build anything"
    entries = [name for name in moved.store() if not name.startswith(".")]
    assert len(entries) == 4
    # As root, with bytecode allowed: an import must not write into the store.
    done = moved.lab.ssh(
        "n001",
        "unset PYTHONDONTWRITEBYTECODE; bash -lc \"module load deepep && python -c 'import deep_ep, torch, numpy, "
        "setuptools'\"",
    )
    assert done.returncode == 0, done.stderr
    deepep = next(name for name in entries if "-deepep-" in name)
    unbound = moved.lab.ssh("n001", f"ldd /shared/elsewhere/store/{deepep}/lib/python/*.so")
    assert "not found" not in unbound.stdout
    assert "/shared/deepep/" not in unbound.stdout
    assert hash_path(moved.on_disk / "store") == store


def test_what_plan_says_and_that_it_writes_nothing(engine: Engine) -> None:
    before = {
        host: hash_path(engine.lab.disk(host) / "etc") if (engine.lab.disk(host) / "etc").is_dir() else ""
        for host in engine.lab.hosts
    }
    planned = engine.json("plan")
    kinds = [step["kind"] for step in planned["steps"]]
    assert kinds == ["prefix", "host", "build", "build", "build", "build", "offer", "module-hook", "verify"]
    assert [step["name"] for step in planned["steps"] if step["kind"] == "host"] == ["limits"]
    assert all(step["reason"]["found"] and step["reason"]["wanted"] for step in planned["steps"])
    assert engine.run("plan", "--check").code == 2
    assert engine.run("bootstrap", "--dry-run").code == 0
    assert not engine.on_disk.exists()
    after = {
        host: hash_path(engine.lab.disk(host) / "etc") if (engine.lab.disk(host) / "etc").is_dir() else ""
        for host in engine.lab.hosts
    }
    assert after == before


def test_environment_modules_instead_of_lmod(modules_lab, standin_sources: Path, built_entries: Path) -> None:
    engine = Engine(modules_lab, standin_sources, built=built_entries)
    shutil.rmtree(engine.on_disk, ignore_errors=True)
    engine.use_built()
    ended = engine.run("bootstrap")
    assert ended.code == 0, ended.text
    assert load_by_stack(engine) == "deepep/v1 deepep/1.2.1-"
    tested = engine.run("test", "--kind=internode")
    assert tested.code == 0, tested.text
