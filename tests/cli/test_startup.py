"""What a command imports, and which verbs' files it reads, before it does its work. No times: they are the machine's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deepep_bootstrap.cli import app
from deepep_bootstrap.cli.verbs import VERBS
from tests.support.paths import ROOT

pytestmark = pytest.mark.usefixtures("programs")

INVOKE = Path(sys.executable).with_name("invoke")
SSH = ("paramiko", "fabric", "deepep_bootstrap.remote.fleet")
OURS = ("deepep_bootstrap.bootstrap", "deepep_bootstrap.doctor", "deepep_bootstrap.report", "deepep_bootstrap.analysis")
LOOKS = ("deepep_bootstrap.lock", "deepep_bootstrap.plan", "deepep_bootstrap.prefix", "deepep_bootstrap.fetch.mirror")


@pytest.mark.parametrize(
    ("words", "never"),
    [
        (["--list"], (*SSH, "rich", "tomli", "ClusterShell", "deepep_bootstrap.inventory")),
        (["plan", "--help"], (*SSH, "rich", "tomli", "ClusterShell", "deepep_bootstrap.inventory")),
        (["plan", "--hots=x"], (*SSH, "rich", "tomli", "ClusterShell", "deepep_bootstrap.inventory")),
        (["completion", "bash"], (*SSH, "rich", "tomli", "ClusterShell", "deepep_bootstrap.inventory")),
        (["version"], (*SSH, *OURS, "deepep_bootstrap.inventory.facts")),
        (["facts", "--hosts="], (*OURS, *LOOKS)),
        (["facts", "--hosts=no-such-host.invalid"], (*OURS, *LOOKS, "deepep_bootstrap.core.redact")),
    ],
    ids=" ".join,
)
def test_a_command_imports_nothing_that_it_does_not_need(words: list[str], never: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", INVOKE, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert "deepep_bootstrap.cli.app" in lines
    assert [name for name in lines if any(name == each or name.startswith(f"{each}.") for each in never)] == []


def test_only_the_verbs_of_the_command_line_are_read() -> None:
    invoke = "/usr/bin/invoke"
    assert list(app.verbs_of([invoke, "plan", "--help"])) == ["plan"]
    assert sorted(app.verbs_of([invoke, "facts", "--hosts=x", "doctor"])) == ["doctor", "facts"]
    # Nobody knows which one is meant, or Invoke itself asks for all.
    for words in ([invoke], [invoke, "plann"], [invoke, "--list"], [invoke, "--complete", "--", "plan"]):
        assert list(app.verbs_of(words)) == list(VERBS)
    # A test runner that has a verb's name among its words.
    assert list(app.verbs_of(["/usr/bin/pytest", "plan"])) == list(VERBS)


def test_a_wrong_verb_behind_a_right_one_is_told_the_nearest_of_all() -> None:
    done = subprocess.run([INVOKE, "version", "dcotor"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    done = subprocess.run([INVOKE, "dcotor"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "invoke doctor" in done.stderr


def test_a_clone_without_its_packages_says_so(tmp_path: Path) -> None:
    """Somebody has Invoke, and has not installed what the clone needs."""
    for name in ("tasks.py", "deepep_bootstrap"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "msgspec.py").write_text("raise ModuleNotFoundError('No module named msgspec', name='msgspec')\n")
    done = subprocess.run([INVOKE, "plan", "mine.txt"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("invoke: the Python package of `import msgspec` is not there")
    assert done.stderr.count("\n") == 1


def test_a_clone_is_compiled_once(tmp_path: Path) -> None:
    """Invoke keeps Python from writing what it compiled while it loads tasks.py."""
    shutil.copytree(ROOT / "deepep_bootstrap", tmp_path / "deepep_bootstrap", ignore=shutil.ignore_patterns("*.pyc"))
    for name in ("tasks.py", "pyproject.toml", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([INVOKE, "plan", "--help"], cwd=tmp_path, env=clean, capture_output=True, check=True)
    cached = {path.name.partition(".")[0] for path in tmp_path.glob("deepep_bootstrap/cli/__pycache__/*.pyc")}
    assert {"app", "usage", "verbs"} <= cached
    for path in tmp_path.glob("deepep_bootstrap/**/*.pyc"):
        path.unlink()
    forbidden = {**clean, "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([INVOKE, "plan", "--help"], cwd=tmp_path, env=forbidden, capture_output=True, check=True)
    assert list(tmp_path.glob("deepep_bootstrap/**/*.pyc")) == []
