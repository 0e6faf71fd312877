"""What is sent to a host, and how its output is cut into lines."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepep_bootstrap.remote import channel
from deepep_bootstrap.remote.script import Lines
from tests.support.paths import TESTS
from tests.support.sshd import alive

pytestmark = pytest.mark.usefixtures("programs")


def test_what_goes_to_a_host_is_as_recorded() -> None:
    body = channel.compose('echo "$WHO $1"', ("it's",), {"WHO": "me"})
    own = channel.payload(body, watched=True)
    other = channel.payload(body, user="root", password="secret", merge=True)
    assert own == (TESTS / "golden/loader/own-account.txt").read_bytes()
    assert other == (TESTS / "golden/loader/other-user.txt").read_bytes()


def started(data: bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["sh", "-c", channel.COMMAND], input=data, capture_output=True, check=False)


@pytest.mark.parametrize("watched", [False, True])
def test_a_script_is_run_by_the_interpreter_that_it_is_for(watched: bool) -> None:
    body = channel.compose('echo "${BASH_VERSION:+bash}"; readlink /proc/$$/exe', (), {})
    shells = {}
    for name in ("bash", "sh"):
        data = channel.payload(body, interpreter=name, watched=watched)
        pipe = subprocess.PIPE
        with subprocess.Popen(["sh", "-c", channel.COMMAND], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as run:
            assert run.stdin
            assert run.stdout
            run.stdin.write(data)
            run.stdin.flush()  # and left open: the end of it would end a watched script
            shells[name] = run.stdout.read().split()[-2:]
    programs = {name: os.fsencode(os.path.realpath(shutil.which(name) or "")) for name in shells}
    assert {name: words[-1] for name, words in shells.items()} == programs
    assert shells["bash"][0] == b"bash"


@pytest.mark.parametrize("cut", [1, 2, 20])
def test_a_script_that_did_not_arrive_whole_does_not_run(cut: int, tmp_path: Path) -> None:
    body = channel.compose(f"touch {tmp_path}/ran\n# the rest of the script", (), {})
    assert started(channel.payload(body)).returncode == 0
    (tmp_path / "ran").unlink()
    done = started(channel.payload(body)[:-cut])
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"did not arrive whole" in done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("length", [0, 1, 3, 40, 400])
def test_what_is_cut_even_earlier_does_nothing(length: int, tmp_path: Path) -> None:
    data = channel.payload(channel.compose(f"touch {tmp_path}/ran", (), {}))
    assert b"starts" not in started(data[:length]).stdout
    assert not (tmp_path / "ran").exists()


def test_names_and_values_that_cannot_be() -> None:
    for env in ({"A B": "x"}, {"1A": "x"}, {"": "x"}, {"A": "a\0b"}, {"$(id)": ""}):
        with pytest.raises(ValueError, match="not an environment variable"):
            channel.compose("true", (), env)
    with pytest.raises(ValueError, match="one line"):
        channel.payload(b"", user="root", password="a\nb")


@pytest.mark.parametrize("shell", ["dash", "bash", "tcsh"])
def test_the_command_means_the_same_in_each_shell(shell: str) -> None:
    data = channel.payload(channel.compose("echo $1", ("it's",), {}))
    done = subprocess.run(
        [shell, *(["-f"] if shell == "tcsh" else []), "-c", channel.COMMAND],
        input=data,
        capture_output=True,
        check=False,
    )
    assert done.stdout == channel.MARK + b"it's\n"


@pytest.mark.parametrize("shell", ["dash", "bash --posix", "busybox sh"])
def test_watching_works_in_each_shell_that_can_be_sh(shell: str, tmp_path: Path) -> None:
    command = channel.COMMAND.replace("/bin/sh", shell)
    env = {"TMPDIR": str(tmp_path), "PATH": os.environ["PATH"]}

    def start(script: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            ["sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
        )
        assert process.stdin is not None
        process.stdin.write(channel.payload(channel.compose(script, (), {}), watched=True))
        process.stdin.flush()
        return process

    own = start("echo said; exit 6")
    assert own.stdout is not None
    assert own.stdout.read() == channel.MARK + b"said\n"
    assert own.wait() == 6
    for handler, code in (("", 143), ("trap 'exit 9' TERM; ", 9)):
        ended = start(f"{handler}timeout 600 sleep 600 & echo $!; wait")
        assert ended.stdout is not None
        assert ended.stdout.readline() == channel.MARK
        pid = int(ended.stdout.readline())
        out, err = ended.communicate()
        assert (ended.returncode, out, err.removeprefix(channel.MARK)) == (code, b"", b"")
        assert not alive(pid)
    own.communicate()
    assert list(tmp_path.iterdir()) == []


def fed(chunks: list[bytes], mark: bytes = b"@m@\n") -> tuple[list[str], Lines]:
    said: list[str] = []
    lines = Lines(mark, said.append)
    for chunk in chunks:
        lines.feed(chunk)
    lines.end()
    return said, lines


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a", ["a"]),
        (b"a\r\nb\n", ["a", "b"]),
        (b"1%\r2%\rdone\n", ["1%", "2%", "done"]),
        (b"a\n\nb", ["a", "", "b"]),
        (b"a\r\r\nb", ["a", "", "b"]),
        (b"\xc3\xa9\xff", ["é\ufffd"]),
        (b"\xc3", ["\ufffd"]),
    ],
)
def test_lines(data: bytes, lines: list[str]) -> None:
    assert fed([b"@m@\n" + data])[0] == lines


@given(st.lists(st.sampled_from([b"a", b"\r", b"\n", b"\xc3", b"\xa9", b"@m@\n", b"@", b" "])), st.data())
def test_how_the_bytes_are_cut_does_not_matter(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"noise@m@\n" + b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    pieces = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    said, lines = fed(pieces)
    assert said == fed([whole])[0]
    assert lines.text == whole.partition(b"@m@\n")[2].decode(errors="replace")
    assert (lines.started, lines.early) == (True, "noise")
