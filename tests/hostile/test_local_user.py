"""A user of a host who makes files where everybody may: root follows none of their links, believes none of their words,
and waits for none of their names."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deepep_bootstrap.bootstrap import build
from deepep_bootstrap.remote import channel
from tests.support.build import make_prefix, run_bash, script, until

pytestmark = [pytest.mark.usefixtures("programs"), pytest.mark.sample]

MALLORY = 65534
DEAD = "host={host}\nboot={boot}\npidns={pidns}\npid=4194304\nstart=1\ntoken=x\nsince=x\nbeat=0000000000\n"


@pytest.fixture
def tmp(tmp_path: Path) -> Path:
    """A folder like /tmp, in which mallory can get."""
    if os.geteuid() != 0:
        pytest.skip("needs root, who follows links of others (make test uses sudo)")
    for folder in (tmp_path, *tmp_path.parents):
        if folder == Path(tempfile.gettempdir()):
            break
        folder.chmod(0o755)
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def as_mallory(command: str) -> None:
    subprocess.run(["bash", "-ec", command], user=MALLORY, group=MALLORY, extra_groups=[], check=True)


def dead_owner() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return DEAD.format(host=os.uname().nodename, boot=boot, pidns=os.readlink("/proc/self/ns/pid"))


def victim(tmp_path: Path, mode: int) -> Path:
    """A folder of root's with what makes it look like the scratch of a dead session, and files of others."""
    folder = tmp_path / "victim"
    folder.mkdir(mode=0o700)
    for name, text in {".owner": dead_owner(), ".job": "--name=victimjob", "precious": "x"}.items():
        (folder / name).write_text(text)
    (folder / ".salloc").write_text("salloc: Granted job allocation --name=victimjob\n")
    folder.chmod(mode)
    return folder


LINKS = {
    "the scratch of before": "ln -s {victim} {tmp}/deepep-scratch-mallory",
    "a room of mallory's": "mkdir -m 700 {tmp}/deepep-0; ln -s {victim} {tmp}/deepep-0/deepep-scratch-AAAAAAAA",
    "a room that is a link": "ln -s {parent} {tmp}/deepep-0",
    "another room": "mkdir -m 700 {tmp}/deepep-0.AAAAAAAA; ln -s {victim} {tmp}/deepep-0.AAAAAAAA/deepep-scratch-AAAAAAAA",
}


@pytest.mark.parametrize("mode", [0o1777, 0o700], ids=["open", "private"])
@pytest.mark.parametrize("how", LINKS)
def test_a_session_follows_no_link_and_cancels_nothing(how: str, mode: int, tmp: Path, tmp_path: Path) -> None:
    folder = victim(tmp_path, mode)
    parent = tmp_path / "parent"
    parent.mkdir(mode=0o700)
    (parent / "deepep-scratch-BBBBBBBB").symlink_to(folder)
    as_mallory(LINKS[how].format(victim=folder, tmp=tmp, parent=parent))
    before = sorted(path.name for path in folder.iterdir())
    done, calls = run_session(tmp_path, tmp)
    assert done.returncode == 0, done.stderr
    assert "jobid=0" in done.stdout
    assert sorted(path.name for path in folder.iterdir()) == before
    assert calls == ""
    (scratch,) = [line.removeprefix("scratch=") for line in done.stdout.splitlines() if line.startswith("scratch=")]
    assert not Path(scratch).exists()


def run_session(tmp_path: Path, tmp: Path) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run a session to its end with Slurm's clients replaced; return what it left and the calls of scancel."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"scancel": f'echo "$*" >>{tmp_path}/calls', "squeue": f"cat {tmp_path}/queue"}.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "queue").touch()
    env = {"TMPDIR": str(tmp), "PREFIX": str(make_prefix(tmp_path)), "TOKEN": "t", "HEARTBEAT": "0.2"}
    done = run_bash(script(*build.SESSION), {**env, "PATH": f"{programs}:{os.environ['PATH']}"})
    calls = tmp_path / "calls"
    return done, calls.read_text() if calls.exists() else ""


def test_only_a_number_is_cancelled(tmp: Path, tmp_path: Path) -> None:
    """Also where the words of salloc are somebody else's: in a folder that is root's own, and truly dead."""
    room = tmp / "deepep-0"
    room.mkdir(mode=0o700)
    for folder in (room / "deepep-scratch-AAAAAAAA", tmp / "deepep-scratch-AAAAAAAA"):
        victim(tmp_path, 0o700).rename(folder)
    done, calls = run_session(tmp_path, tmp)
    assert done.returncode == 0, done.stderr
    assert calls == ""
    assert not (room / "deepep-scratch-AAAAAAAA").exists()


def test_a_base_in_which_others_rename_is_not_used(tmp: Path, tmp_path: Path) -> None:
    tmp.chmod(0o777)
    done, _ = run_session(tmp_path, tmp)
    assert done.returncode == 0, done.stderr
    assert f"no scratch in {tmp}: others may rename what is made there" in done.stderr
    assert "scratch=/var/tmp/deepep-0/" in done.stdout


@contextmanager
def loader(tmp: Path, text: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a watched script as the engine does it; its standard input stays open."""
    process = subprocess.Popen(
        ["sh", "-c", channel.COMMAND],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"TMPDIR": str(tmp), "PATH": os.environ["PATH"]},
    )
    assert process.stdin
    process.stdin.write(channel.payload(channel.compose(text, (), {}), watched=True))
    process.stdin.flush()
    try:
        yield process
    finally:
        process.communicate()


@contextmanager
def mallory_beside(tmp: Path, command: str) -> Iterator[None]:
    """Let mallory run a command beside every file and folder of ours, again and again, and in them."""
    beside = f'for f in {tmp}/deepep-bootstrap.????????; do n="$f.end"; {command}; n="$f/end"; {command}; done'
    process = subprocess.Popen(
        ["bash", "-c", f"while :; do {beside}; sleep 0.02; done"],
        user=MALLORY,
        group=MALLORY,
        extra_groups=[],
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def test_nobody_holds_a_script_up_with_a_file_beside_it(tmp: Path) -> None:
    with mallory_beside(tmp, ': >>"$n"'), loader(tmp, "sleep 1; exit 7") as running:
        until(lambda: running.poll() is not None, "the end of the script, with standard input open")
        assert running.returncode == 7


def test_a_link_beside_the_script_empties_no_file(tmp: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("content")
    with mallory_beside(tmp, f'ln -s {precious} "$n"'), loader(tmp, "echo ready; sleep 600") as running:
        assert running.stdout
        assert running.stdout.readline() + running.stdout.readline() == channel.MARK + b"ready\n"
        subprocess.run(["sleep", "0.5"], check=True)  # for mallory
        running.communicate()
    assert precious.read_text() == "content"
