"""Subprocesses on the control machine: what comes back, what is streamed, and that nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deepep_bootstrap.core import process
from deepep_bootstrap.core.errors import Trouble
from tests.support.paths import ROOT
from tests.support.sshd import SAFETY, alive, wait_until

pytestmark = pytest.mark.usefixtures("programs")


def test_a_code_is_a_value_and_both_streams_come_back() -> None:
    done = process.run_program(["sh", "-c", "cat; echo err >&2; exit 3"], data=b"in\xff")
    assert (done.code, done.out, done.err, done.tail) == (3, "in\ufffd", "err\n", "err")
    assert process.run_program(["sh", "-c", "kill -KILL $$"]).code == -signal.SIGKILL
    assert process.run_program(["seq", "30"]).tail.split() == [str(number) for number in range(21, 31)]


def test_environment_and_directory_are_what_is_given(tmp_path: Path) -> None:
    done = process.run_program(
        ["sh", "-c", 'echo "$A-$HOME"; pwd'], env={"A": "x", "PATH": os.environ["PATH"]}, cwd=tmp_path
    )
    assert done.out.split() == ["x-", str(tmp_path)]


def test_large_input_and_output_at_once() -> None:
    data = bytes(3_000_000)
    assert len(process.run_program(["cat"], data=data).out) == len(data)


def test_a_missing_program_is_trouble() -> None:
    with pytest.raises(Trouble, match="no-such-program: this program is not installed here"):
        process.run_program(["no-such-program", "x"])


def test_a_program_without_permission_and_a_missing_directory_are_trouble(tmp_path: Path) -> None:
    (tmp_path / "program").write_text("#!/bin/sh\n")
    with pytest.raises(Trouble, match="no permission to run it"):
        process.run_program([tmp_path / "program"])
    with pytest.raises(Trouble, match="no directory to run true in"):
        process.run_program(["true"], cwd=tmp_path / "none")


def test_a_timeout_ends_the_whole_group(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(Trouble, match=r"sh -c .*: no end after 0.5 s"):
        process.run_program(["sh", "-c", f"sleep 600 & echo $! >{pid_file}; wait"], timeout=0.5)
    wait_until(lambda: not alive(int(pid_file.read_text())), "the sleep has ended")


INTERRUPTED = """
import os, signal, subprocess
from deepep_bootstrap.core import process


class Interrupted(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGINT)


subprocess.Popen = Interrupted
process.run_program(%r)
"""


def test_an_interrupt_while_a_program_begins_ends_it(tmp_path: Path) -> None:
    """What began before anybody knew its number went on for ever."""
    pid_file = tmp_path / "pid"
    words = ["sh", "-c", f"echo $$ >{pid_file}; sleep 600; :"]
    done = subprocess.run([sys.executable, "-c", INTERRUPTED % words], cwd=ROOT, capture_output=True, check=False)
    assert done.stderr.rstrip().endswith(b"KeyboardInterrupt")
    if pid_file.exists() and pid_file.read_text():
        wait_until(lambda: not alive(int(pid_file.read_text())), "the program has ended")
    assert str(pid_file) not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


def test_an_interrupt_ends_the_whole_group(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    words = ["sh", "-c", f"sleep 600 & echo $! >{pid_file}; wait"]
    code = f"from deepep_bootstrap.core import process\nprocess.run_program({words!r})"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL) as controller:
        wait_until(lambda: pid_file.exists() and pid_file.read_text(), "the sleep runs")
        controller.send_signal(signal.SIGINT)
        controller.wait(SAFETY)
    wait_until(lambda: not alive(int(pid_file.read_text())), "the sleep has ended")
