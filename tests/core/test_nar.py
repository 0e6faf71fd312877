"""The NAR hash: recorded values of Nix, Nix itself where it is installed, random trees against a second
implementation."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepep_bootstrap.core import filetree
from deepep_bootstrap.core.errors import Trouble
from tests.support.examples import most
from tests.support.paths import ROOT, TESTS

CASES = sorted(TESTS.glob("cases/core/nar/*.json"))
NIX = shutil.which("nix")


def make(path: bytes, node: Any) -> None:
    """Make what a case describes: a dictionary is a directory, a list [kind, …] a file or link; names are
    percent-encoded bytes."""
    if isinstance(node, dict):
        os.mkdir(path)
        for name, inner in node.items():
            make(os.path.join(path, unquote_to_bytes(name)), inner)
        return
    kind, value, *more = node
    if kind == "link":
        os.symlink(unquote_to_bytes(value), path)
        return
    with open(path, "wb") as stream:
        stream.write(unquote_to_bytes(value) * (more[0] if more else 1))
    os.chmod(path, int(kind, 8))


def hash_with_nix(*paths: Path) -> list[str]:
    """Return what `nix hash path` says of all paths, in one process."""
    argv = [str(NIX), "--extra-experimental-features", "nix-command", "hash", "path", *map(str, paths)]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()


def words(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(8, "little") + part + bytes(-len(part) % 8) for part in parts)


def directory(*entries: tuple[bytes, bytes]) -> bytes:
    body = b"".join(
        words(b"entry", b"(", b"name", name, b"node") + node + words(b")") for name, node in sorted(entries)
    )
    return words(b"(", b"type", b"directory") + body + words(b")")


def archive(node: Any) -> bytes:
    """A second, simple implementation on the description itself: everything in memory, by recursion."""
    if isinstance(node, dict):
        return directory(*((unquote_to_bytes(name), archive(inner)) for name, inner in node.items()))
    kind, value, *more = node
    data = unquote_to_bytes(value) * (more[0] if more else 1)
    if kind == "link":
        return words(b"(", b"type", b"symlink", b"target", data, b")")
    executable = words(b"executable", b"") if int(kind, 8) & 0o100 else b""
    return words(b"(", b"type", b"regular") + executable + words(b"contents", data, b")")


def sri_of(node: bytes) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(words(b'nix-archive-1') + node).digest()).decode()}"


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_recorded_values_of_nix(case: Path, tmp_path: Path) -> None:
    recorded = json.loads(case.read_text())
    make(os.fsencode(tmp_path / "tree"), recorded["tree"])
    assert filetree.hash_path(tmp_path / "tree") == recorded["hash"]
    assert NIX is None or hash_with_nix(tmp_path / "tree") == [recorded["hash"]]


NAMES = st.binary(min_size=1, max_size=6).filter(
    lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b"..")
)
QUOTED = NAMES.map(lambda name: "".join(f"%{byte:02x}" for byte in name))
DATA = st.binary(max_size=40).map(lambda data: "".join(f"%{byte:02x}" for byte in data))
FILES = st.tuples(st.sampled_from(["644", "755", "600", "700", "611", "655", "444"]), DATA)
LINKS = st.tuples(st.just("link"), QUOTED)
TREES = st.recursive(st.one_of(FILES, LINKS), lambda inner: st.dictionaries(QUOTED, inner, max_size=5), max_leaves=12)


@given(TREES)
@settings(deadline=None)
def test_random_trees(tree: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        make(os.fsencode(Path(folder, "tree")), tree)
        assert filetree.hash_path(Path(folder, "tree")) == sri_of(archive(tree))


@pytest.mark.usefixtures("programs")
@pytest.mark.skipif(NIX is None, reason="nix is not installed here; the recorded values stand for it")
def test_two_hundred_random_trees_against_nix(tmp_path: Path) -> None:
    ours: list[str] = []

    @given(TREES)
    @settings(deadline=None, max_examples=most(200))
    def hash_tree(tree: Any) -> None:
        path = tmp_path / str(len(ours))
        make(os.fsencode(path), tree)
        ours.append(filetree.hash_path(path))

    hash_tree()
    assert len(ours) >= 200
    assert hash_with_nix(*(tmp_path / str(number) for number in range(len(ours)))) == ours


def test_only_content_counts(tmp_path: Path) -> None:
    tree = {"a": ["755", "x"], "d": {"b": ["644", "y"]}}
    for name in ("one", "two"):
        make(os.fsencode(tmp_path / name), tree)
    os.chmod(tmp_path / "two/d/b", 0o677)
    os.chmod(tmp_path / "two/d", 0o700)
    os.utime(tmp_path / "two/a", (1, 1))
    assert filetree.hash_path(tmp_path / "one") == filetree.hash_path(tmp_path / "two")
    os.chmod(tmp_path / "two/d/b", 0o744)
    assert filetree.hash_path(tmp_path / "one") != filetree.hash_path(tmp_path / "two")


def test_overlay_hashes_as_if_the_file_had_that_content(tmp_path: Path) -> None:
    for name, text in (("old", "before"), ("new", "the text after")):
        make(os.fsencode(tmp_path / name), {"d": {"f": ["755", text]}, "f": ["644", "same"]})
    assert filetree.hash_path(tmp_path / "old", {b"d/f": b"the text after"}) == filetree.hash_path(tmp_path / "new")
    assert filetree.hash_path(tmp_path / "old", {b"d/f": b"other"}) != filetree.hash_path(tmp_path / "new")


def test_large_files_in_constant_memory(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as stream:
        stream.truncate(96 << 20)
    tracemalloc.start()
    filetree.hash_path(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.usefixtures("programs")
def test_deeper_than_the_recursion_limit(tmp_path: Path) -> None:
    here = os.getcwd()
    node = directory()
    os.chdir(tmp_path)
    try:
        for _ in range(sys.getrecursionlimit() + 50):
            os.mkdir("d")
            os.chdir("d")
            node = directory((b"d", node))
        os.chdir(tmp_path)
        assert filetree.hash_path(".") == sri_of(node)
    finally:
        os.chdir(here)
        # shutil.rmtree of older Pythons recurses; pytest would fail to clean up.
        subprocess.run(["rm", "-rf", tmp_path / "d"], check=True)


@pytest.mark.usefixtures("programs")
def test_special_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    os.mkfifo(tmp_path / "d/fifo")
    with pytest.raises(Trouble, match="d/fifo: is neither a file, a directory nor a symbolic link"):
        filetree.hash_path(tmp_path)
    (tmp_path / "d/fifo").unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "d/socket"))
        with pytest.raises(Trouble, match="d/socket: is neither"):
            filetree.hash_path(tmp_path)
    with pytest.raises(Trouble, match="/dev/null: is neither"):
        filetree.hash_path("/dev/null")


def test_a_file_that_grows_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "log").write_bytes(b"12345")
    real = os.fstat

    def grow(descriptor: int) -> os.stat_result:
        status = real(descriptor)
        with (tmp_path / "log").open("ab") as stream:
            stream.write(b"more")
        return status

    monkeypatch.setattr(os, "fstat", grow)
    with pytest.raises(Trouble, match="log: changed while it was read — found 9 bytes, wanted 5 bytes"):
        filetree.hash_path(tmp_path / "log")


def run_module(*arguments: str | bytes) -> subprocess.CompletedProcess[str]:
    root = ROOT
    return subprocess.run(
        [sys.executable, "-m", "deepep_bootstrap.core.filetree", *arguments],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.usefixtures("programs")
def test_command_line_prints_the_hash(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(folder)
    done = run_module(folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == filetree.hash_path(os.fsdecode(folder)) + "\n"
    assert len(base64.b64decode(done.stdout.strip().removeprefix("sha256-"))) == 32


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nar: takes one path — found 0 arguments. Try: python -m deepep_bootstrap.core.filetree DIR\n"),
        (["a", "b"], "nar: takes one path — found 2 arguments. Try: python -m deepep_bootstrap.core.filetree DIR\n"),
        (["/nowhere/at all"], "/nowhere/at all: cannot be hashed: No such file or directory\n"),
    ],
)
def test_command_line_says_what_is_wrong(arguments: list[str], message: str) -> None:
    done = run_module(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", message)
