"""What a file is that was taken for another one; how many of its faults a person sees."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from deepep_bootstrap.core.errors import INTERRUPTED, Problem, Trouble
from deepep_bootstrap.core.guard import guarded
from deepep_bootstrap.core.text import HOSTS, LOCK, looks_like, other_than
from deepep_bootstrap.inventory.hostsfile import parse_hosts_file
from tests.support.paths import ROOT


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("deepep.lock.toml", LOCK),
        ("tests/upstreams/demo.lock.toml", LOCK),
        *((f"hosts/{path.name}", HOSTS) for path in sorted((ROOT / "hosts").glob("*.txt"))),
        ("pyproject.toml", "TOML"),
        ("tests/demo.sh", "a script"),
        ("tests/golden/entries.json", "JSON"),
        ("tests/cases/report/runs/failed/job.log", "a log"),
        ("README.md", ""),
    ],
)
def test_what_files_of_ours_look_like(file: str, kind: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    assert looks_like(text) == kind
    assert other_than(text, kind) == ""


def told(trouble: Trouble, capsys: pytest.CaptureFixture[str], *, as_json: bool = False) -> str:
    def body() -> int:
        raise trouble

    assert guarded("plan", body, as_json=as_json) == 1
    captured = capsys.readouterr()
    return captured.out if as_json else captured.err


def test_a_lock_taken_for_a_hosts_file(capsys: pytest.CaptureFixture[str]) -> None:
    """Ten faults, the number of the others, and a guess; a document has all of them."""
    text = (ROOT / "deepep.lock.toml").read_text(encoding="utf-8")
    with pytest.raises(Trouble) as caught:
        parse_hosts_file(text, "deepep.lock.toml")
    count = len(caught.value.problems)
    assert count > 1000
    lines = told(caught.value, capsys).splitlines()
    assert len(lines) == 11
    more = f"{count - 10:,}".replace(",", " ")
    assert lines[-1] == f"deepep.lock.toml: and {more} more: this looks like a lock, not a hosts file"
    errors = json.loads(told(caught.value, capsys, as_json=True))["errors"]
    assert len(errors) == count + 1
    assert errors[-1]["what"] == "this looks like a lock, not a hosts file"


def test_few_faults_are_told_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    problems = [Problem(f"hosts.txt:{number}", "odd") for number in range(1, 12)]
    assert told(Trouble(*problems[:10], file="hosts.txt"), capsys).splitlines()[-1] == "hosts.txt:10: odd"
    assert told(Trouble(*problems, file="hosts.txt"), capsys).splitlines()[-1] == "hosts.txt: and 1 more"
    assert len(told(Trouble(*problems), capsys).splitlines()) == 11, "of several hosts each is told"


def test_a_hosts_file_taken_for_a_lock(capsys: pytest.CaptureFixture[str]) -> None:
    from deepep_bootstrap.lock.model import read_lock_file

    with pytest.raises(Trouble) as caught:
        read_lock_file(ROOT / "hosts" / "b200.txt")
    assert told(caught.value, capsys).splitlines()[-1].endswith(": this looks like a hosts file, not a lock")


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("more", ["", " --json"])
def test_a_reader_that_leaves_ends_it_as_it_ends_others(more: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m invoke lock{more} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (done.stdout.splitlines()[-1], done.stderr) == ("141", "")


def test_a_terminal_that_closed_ends_it_as_its_hangup_does() -> None:
    """Which of the two is noticed first is chance."""
    control, terminal = os.openpty()

    def body() -> int:
        os.close(control)
        return os.write(terminal, b"a line")

    try:
        assert guarded("bootstrap", body) == INTERRUPTED
    finally:
        os.close(terminal)


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(("module", "code"), [("odd_package.model", 1), ("deepep_bootstrap.odd", 3)])
def test_a_package_that_is_not_there_is_told(
    module: str, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A checkout that is newer than its environment; a module of the engine itself would be a bug."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def body() -> int:
        importlib.import_module(module)
        return 0

    assert guarded("bootstrap", body) == code
    err = capsys.readouterr().err
    assert ("the Python package of `import odd_package` is not there" in err) == (code == 1)
    assert ("pip install" in err) == (code == 1)
