"""Tar streams: what tar unpacks is what went in, the bytes are the same each time, and memory is bounded."""

from __future__ import annotations

import os
import subprocess
import tracemalloc
from pathlib import Path

import pytest

from deepep_bootstrap.core import filetree
from deepep_bootstrap.core.errors import Trouble


def make(tree: Path) -> None:
    (tree / "empty").mkdir(parents=True)
    (tree / ("long" * 40)).mkdir()
    (tree / ("long" * 40) / ("name" * 50)).write_text("deep")
    (tree / "run").write_text("#!/bin/sh\n")
    (tree / "run").chmod(0o700)
    (tree / "block").write_bytes(b"x" * 512)
    (tree / "nothing").write_bytes(b"")
    (tree / "link").symlink_to("run")
    (tree / "dangling").symlink_to("far/" * 60 + "away")
    Path(os.fsdecode(os.fsencode(tree) + b"/n\xff\xfe")).write_text("bytes")


def unpack(stream: bytes, folder: Path) -> None:
    folder.mkdir()
    done = subprocess.run(["tar", "-xf", "-", "-C", folder], input=stream, capture_output=True, check=True)
    assert done.stderr == b""


@pytest.mark.usefixtures("programs")
def test_tar_unpacks_what_went_in(tmp_path: Path) -> None:
    make(tmp_path / "tree")
    (tmp_path / "file").write_text("one file")
    entries = [("src/engine", tmp_path / "tree"), ("wheels/a.whl", tmp_path / "file"), ("ln", tmp_path / "tree/link")]
    stream = b"".join(filetree.tar_tree(entries))
    assert len(stream) % 10240 == 0
    unpack(stream, tmp_path / "out")
    assert filetree.hash_path(tmp_path / "out/src/engine") == filetree.hash_path(tmp_path / "tree")
    assert (tmp_path / "out/wheels/a.whl").read_text() == "one file"
    assert os.readlink(tmp_path / "out/ln") == "run"
    assert (tmp_path / "out/src/engine/block").stat().st_mtime == filetree.MTIME


def test_the_same_tree_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make(tmp_path / name)
    os.utime(tmp_path / "two/block", (1, 1))
    (tmp_path / "two/block").chmod(0o666)
    streams = [b"".join(filetree.tar_tree([("t", tmp_path / name)], mtime=1700000000)) for name in ("one", "two")]
    assert streams[0] == streams[1]
    (tmp_path / "two/block").chmod(0o766)
    assert b"".join(filetree.tar_tree([("t", tmp_path / "two")], mtime=1700000000)) != streams[0]


@pytest.mark.usefixtures("programs")
def test_nothing_is_an_empty_archive(tmp_path: Path) -> None:
    unpack(b"".join(filetree.tar_tree([])), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_memory_is_bounded(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as stream:
        stream.truncate(96 << 20)
    tracemalloc.start()
    size = sum(len(chunk) for chunk in filetree.tar_tree([("large", tmp_path / "large")]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 96 << 20
    assert peak < 8 << 20


def test_what_cannot_be_sent(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(Trouble, match="fifo: is neither a file, a directory nor a symbolic link and cannot be sent"):
        list(filetree.tar_tree([("t", tmp_path)]))
    with pytest.raises(Trouble, match="gone: cannot be sent: No such file or directory"):
        list(filetree.tar_tree([("t", tmp_path / "gone")]))


def test_a_file_that_shrinks_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(3 << 20))
    chunks = filetree.tar_tree([("large", tmp_path / "large")])
    next(chunks)
    os.truncate(tmp_path / "large", 1 << 20)
    with pytest.raises(Trouble, match="large: became shorter while it was read"):
        list(chunks)
