"""Files from a server whose connections break: what has come is kept where nobody takes it for the file, the rest is
asked for, and the hash of the whole decides."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deepep_bootstrap.core import filetree
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.fetch import download, locations, wheels
from deepep_bootstrap.fetch.download import PARTIAL, Meter, Transfer
from deepep_bootstrap.fetch.locations import Mirrors
from deepep_bootstrap.lock.model import Wheel
from tests.support.cutting import Line, bad_line, noise
from tests.support.paths import ROOT

SIZE = 1 << 20
CONTENT = noise(SIZE)


def wheel_of(content: bytes, name: str = "big", version: str = "1.0") -> Wheel:
    digest = filetree.sri(hashlib.sha256(content).digest())
    return Wheel(name, version, "inner", f"{name}-{version}-py3-none-any.whl", digest, len(content))


WHEEL = wheel_of(CONTENT)


@pytest.fixture(autouse=True)
def own_settings_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the machine's pip takes part, and nothing waits between two tries."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setattr(download, "PAUSE", 0.0)


@contextmanager
def served(content: bytes = CONTENT, **line: object) -> Iterator[tuple[Line, Mirrors]]:
    with bad_line({WHEEL.file: content}, **line) as told:
        yield told, locations.read_mirrors([f"index:inner={told.address}/simple"], {}, {})


def partial_of(cache: Path, wheel: Wheel = WHEEL) -> Path:
    return cache / PARTIAL / hashlib.sha256(CONTENT if wheel is WHEEL else b"").hexdigest()


def leave(cache: Path, content: bytes) -> None:
    """Leave what an earlier run had."""
    download.make_private(cache / PARTIAL)
    partial_of(cache).write_bytes(content)


def is_gone(cache: Path) -> bool:
    return list((cache / PARTIAL).iterdir()) == []


@pytest.mark.usefixtures("programs")
def test_what_a_cut_connection_brought_is_not_asked_for_again(tmp_path: Path) -> None:
    with served(breaks=[300_000, 500_000]) as (line, mirrors):
        file = wheels.fetch_wheel(WHEEL, mirrors, tmp_path)
    assert file.read_bytes() == CONTENT
    assert line.asked == ["", "bytes=300000-", "bytes=800000-"]
    assert line.sent == SIZE
    assert is_gone(tmp_path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


@pytest.mark.usefixtures("programs")
def test_a_later_run_goes_on_where_the_line_went_dead(tmp_path: Path) -> None:
    with served(breaks=[400_000] + [0] * 100) as (line, mirrors), pytest.raises(Trouble) as caught:
        wheels.fetch_wheel(WHEEL, mirrors, tmp_path)
    assert str(caught.value) == (
        f"index inner ({line.address}/simple): the connection broke while {WHEEL.file} came: 391 KiB of 1 MiB are kept "
        "— found cut off after 391 KiB of 1 MiB. Try: the same command again, which goes on from there"
    )
    assert len(line.asked) == 1 + download.TRIES
    assert partial_of(tmp_path).read_bytes() == CONTENT[:400_000]
    assert stat.S_IMODE((tmp_path / PARTIAL).stat().st_mode) == 0o700
    assert not list(tmp_path.rglob("*.whl")), "nothing has the name of the file before it is the file"
    with served() as (line, mirrors):
        assert wheels.fetch_wheel(WHEEL, mirrors, tmp_path).read_bytes() == CONTENT
    assert line.asked == ["bytes=400000-"]
    assert is_gone(tmp_path)


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    ("left", "line", "asked"),
    [
        (CONTENT[:5000], {"ranges": "whole"}, ["bytes=5000-"]),
        (CONTENT[:5000], {"ranges": "other"}, ["bytes=5000-", ""]),
        (CONTENT[:5000], {"ranges": "unsaid"}, ["bytes=5000-", ""]),
        (CONTENT[:5000], {"ranges": "refused"}, ["bytes=5000-", ""]),
        (CONTENT + b"more", {}, [f"bytes={SIZE + 4}-", ""]),
        (b"evil" * 1000, {}, ["bytes=4000-", ""]),
        (CONTENT[:-1] + b"\0", {}, [""]),
        (CONTENT, {}, []),
    ],
    ids=["200", "another part", "a part unsaid", "416", "too long", "wrong bytes", "a wrong last byte", "all of it"],
)
def test_what_an_earlier_run_left_helps_or_is_dropped(
    left: bytes, line: dict[str, object], asked: list[str], tmp_path: Path
) -> None:
    leave(tmp_path, left)
    with served(**line) as (told, mirrors):
        assert wheels.fetch_wheel(WHEEL, mirrors, tmp_path).read_bytes() == CONTENT
    assert told.asked == asked
    assert is_gone(tmp_path)


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("left", [b"", CONTENT[:5000]], ids=["nothing", "a beginning"])
def test_another_content_of_the_same_size_is_refused_and_not_kept(left: bytes, tmp_path: Path) -> None:
    if left:
        leave(tmp_path, left)
    other = noise(SIZE, seed=8)
    with (
        served(other) as (_, mirrors),
        pytest.raises(
            Trouble,
            match=f"does not give {WHEEL.file} with the locked hash — found sha256-.*, wanted {re.escape(WHEEL.hash)}",
        ),
    ):
        wheels.fetch_wheel(WHEEL, mirrors, tmp_path)
    assert is_gone(tmp_path)
    assert not list(tmp_path.rglob("*.whl"))


@pytest.mark.usefixtures("programs")
def test_a_file_that_another_run_fetches_is_fetched_apart(tmp_path: Path) -> None:
    leave(tmp_path, b"of the other run")
    with partial_of(tmp_path).open("rb") as held, served() as (line, mirrors):
        fcntl.flock(held, fcntl.LOCK_EX)
        assert wheels.fetch_wheel(WHEEL, mirrors, tmp_path).read_bytes() == CONTENT
        assert line.asked == [""]
        assert partial_of(tmp_path).read_bytes() == b"of the other run"


def link_away(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir()
    folder.symlink_to("elsewhere")


@pytest.mark.parametrize("make", [link_away, Path.touch], ids=["a link", "a file"])
def test_a_folder_that_is_not_ours_is_refused(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / PARTIAL)
    with pytest.raises(Trouble, match=r"is no folder of this account.* Try: rm -r "):
        download.make_private(tmp_path / PARTIAL)


def test_a_folder_that_others_may_enter_is_closed(tmp_path: Path) -> None:
    (tmp_path / PARTIAL).mkdir(mode=0o755)
    download.make_private(tmp_path / PARTIAL)
    assert stat.S_IMODE((tmp_path / PARTIAL).stat().st_mode) == 0o700


@pytest.mark.usefixtures("programs")
def test_a_link_in_place_of_what_has_come_is_not_written_through(tmp_path: Path) -> None:
    leave(tmp_path, b"")
    partial_of(tmp_path).unlink()
    (tmp_path / "target").write_bytes(b"precious")
    partial_of(tmp_path).symlink_to(tmp_path / "target")
    with served() as (_, mirrors), pytest.raises(Trouble, match="the cache cannot be used"):
        wheels.fetch_wheel(WHEEL, mirrors, tmp_path)
    assert (tmp_path / "target").read_bytes() == b"precious"


@pytest.mark.usefixtures("programs")
def test_several_are_counted_together_and_one_that_broke_does_not_lose_the_others(tmp_path: Path) -> None:
    contents = [noise(200_000, seed=seed) for seed in range(6)]
    several = [wheel_of(content, f"big{number}") for number, content in enumerate(contents)]
    heard: list[Transfer] = []
    with bad_line({each.file: content for each, content in zip(several, contents, strict=True)}) as line:
        mirrors = locations.read_mirrors([f"index:inner={line.address}/simple"], {}, {})
        line.breaks = [100_000]
        found = wheels.fetch_wheels(several, mirrors, tmp_path, lambda text: None, heard.append)
    assert [path.read_bytes() for path in found.values()] == contents
    assert line.sent == 1_200_000
    assert (heard[-1].files, heard[-1].all_files, heard[-1].done, heard[-1].total) == (6, 6, 1_200_000, 1_200_000)


@pytest.mark.usefixtures("programs")
def test_an_interrupt_does_not_wait_for_a_server_that_says_nothing(tmp_path: Path) -> None:
    with served(ranges="silent") as (line, _):
        program = f"""
import sys, pathlib
sys.path.insert(0, {str(ROOT)!r})
from deepep_bootstrap.fetch import wheels, locations
from deepep_bootstrap.lock.model import Wheel
wheel = Wheel("big", "1.0", "inner", {WHEEL.file!r}, {WHEEL.hash!r}, {SIZE})
mirrors = locations.read_mirrors(["index:inner={line.address}/simple"], {{}}, {{}})
wheels.fetch_wheels([wheel], mirrors, pathlib.Path({str(tmp_path)!r}), print)
"""
        process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE)
        while not line.asked:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert b"KeyboardInterrupt" in process.communicate()[1]
        assert not line.ended.is_set()


def test_figures_of_a_transfer() -> None:
    now = [0.0]
    meter = Meter(3, 4 << 30, clock=lambda: now[0])
    assert meter.read().text == "0/3 files, 0 bytes of 4.0 GiB"
    meter.keep(1 << 30)
    for _ in range(60):
        now[0] += 1
        meter.receive(10 << 20)
        last = meter.read()
    meter.end_file()
    assert last.rate == 10 << 20, "what had come before is no speed"
    assert meter.read().text == "1/3 files, 1.6 GiB of 4.0 GiB, 10 MiB/s, 4 min 07 s left"
    assert round(last.share, 2) == 0.4
    now[0] += 2 * download.WINDOW
    meter.read()
    now[0] += 1
    assert meter.read().text == "1/3 files, 1.6 GiB of 4.0 GiB", "a line that went dead has no time left"
