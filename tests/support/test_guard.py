"""The guards of conftest.py hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import REAL_HOME
from tests.support.order import longest_first
from tests.support.paths import ROOT


def test_home_is_not_the_developers(private_home: Path) -> None:
    assert Path.home() == private_home
    assert Path(os.path.expanduser("~/.ssh")) != REAL_HOME / ".ssh"
    assert not list(private_home.glob(".ssh/*"))


TESTS = """
import os, socket, subprocess, threading
import pytest

def test_quiet():
    os.getpid()

def test_process():
    subprocess.run(["true"], check=True)

def test_caught():
    try:
        os.system("true")
    except AssertionError:
        pass

def test_thread():
    thread = threading.Thread(target=lambda: socket.socket().bind(("127.0.0.1", 0)))
    thread.start()
    thread.join()

@pytest.fixture
def started():
    subprocess.run(["true"], check=True)

def test_fixture(started):
    pass

@pytest.fixture
def allowed(programs):
    subprocess.run(["true"], check=True)

def test_system_by_fixture(allowed):
    os.system("true")

@pytest.mark.usefixtures("programs")
def test_system():
    os.system("true")
"""


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    ("chosen", "passed", "refused"),
    [
        ("not system", {"quiet"}, {"process", "caught", "thread", "fixture"}),
        ("system", {"system", "system_by_fixture"}, set()),
    ],
)
def test_only_system_tests_start_processes_and_open_sockets(
    chosen: str, passed: set[str], refused: set[str], tmp_path: Path
) -> None:
    (tmp_path / "test_made_up.py").write_text(TESTS)
    words = ["-p", "tests.conftest", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "-rA", "-m", chosen]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, tmp_path], cwd=ROOT, capture_output=True, text=True, check=False
    )
    ends = {"PASSED": set(), "FAILED": set(), "ERROR": set()}
    for line in done.stdout.split("short test summary info")[1].splitlines():
        word, _, rest = line.partition(" ")
        if word in ends:
            ends[word].add(rest.split("::test_")[1].split()[0])
    assert (ends["PASSED"], ends["FAILED"] | ends["ERROR"]) == (passed, refused), done.stdout
    assert done.stdout.count("this test is not `system` but starts a process or opens a socket") >= len(refused)


def test_the_files_that_take_longest_come_first() -> None:
    names = ["a.py::1", "b.py::1", "b.py::2", "c.py::1", "d.py::1", "d.py::2"]
    items = [SimpleNamespace(nodeid=name) for name in names]
    ordered = longest_first(items, {"c.py": 9, "b.py": 90}, lambda item: item.nodeid == "d.py::2")  # type: ignore[arg-type,list-item]
    assert [item.nodeid for item in ordered] == ["b.py::1", "b.py::2", "c.py::1", "d.py::1", "d.py::2", "a.py::1"]
