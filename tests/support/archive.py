"""Archives of made-up entries, and hostile ones, for the tests of export and import."""

from __future__ import annotations

import io
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from deepep_bootstrap.core import filetree
from deepep_bootstrap.prefix.archive import index, stream, transfer
from deepep_bootstrap.prefix.archive.index import (
    FILE,
    FOLDER,
    ArchiveIndex,
    ArchiveMember,
    Built,
    Tree,
    parse_index,
    render_index,
)
from deepep_bootstrap.prefix.archive.stream import read_index, read_trees
from deepep_bootstrap.remote.fleet import ConnectionPool
from tests.support.build import HERE, make_prefix
from tests.support.store import RECORD, Prefix, entry_name, run_bash

BASE, TOP = entry_name("nvshmem", "3.4.5"), entry_name("deepep", "1.2.1")
LONG = "a" * 90 + "/" + "b" * 90
INPUTS = {
    "os": ["debian", "12", "x86_64"],
    "cuda": "12.9",
    "archs": ["9.0"],
    "compiler": {"gcc": "12.2.0", "g++": ""},
    "recipes": {"build/x.sh": "0123"},
    "interpreter": "/usr/bin/python3.12",
    "python": "3.12",
}


def add_rich_entry(prefix: Prefix, name: str, needs: Sequence[str] = ()) -> Path:
    """Put an entry into the store that has one of everything an entry may have."""
    folder = prefix.entry(name, needs, os.urandom(1000), INPUTS)
    (folder / "files.sha256").unlink()
    for path in ("bin", LONG, "lib/empty"):
        (folder / path).mkdir(parents=True, exist_ok=True)
    (folder / "bin/python").symlink_to("/usr/bin/python3.11")
    (folder / "lib/back\\slash").write_bytes(b"x")
    (folder / "lib/späce name").write_bytes(b"")
    (folder / LONG / "long").symlink_to(f"../../{LONG}/" + "c" * 120)
    (folder / "lib/big").write_bytes(os.urandom(filetree.TAR_CHUNK + 7))
    (folder / "bin/tool").write_bytes(b"#!/bin/sh\n")
    if needs:
        (folder / "lib/other").symlink_to(f"../../{needs[0]}/lib")
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(0o555 if path.name == "tool" else 0o444)
    done = run_bash(RECORD, {"PREFIX": str(prefix.path)}, str(folder))
    assert done.returncode == 0, done.stderr
    return folder


def pack(prefix: Prefix, *names: str) -> tuple[bytes, ArchiveIndex]:
    """Return an archive of entries, and its index."""
    trees = transfer.list_trees(prefix.transport, prefix.place, names)
    index = ArchiveIndex(Built("debian", "12", "x86_64", "2.36", ("12.9",), ("9.0",)), trees, "digest", {"schema": 1})
    out = io.BytesIO()
    packer = stream.Packer(out, index, render_index(index))
    transfer.pull(prefix.transport, prefix.place, trees, packer.feed)
    packer.finish()
    return out.getvalue(), index


def unpack(prefix: Prefix, data: bytes) -> transfer.Arrived:
    """Import an archive into a prefix as the verb does it, without the questions around it."""
    stream = io.BytesIO(data)
    index = parse_index(read_index(stream, "FILE"), "FILE")
    names = [tree.name for tree in index.trees]
    return transfer.push(prefix.transport, prefix.place, index.trees, read_trees(stream, index, "FILE", names))


def made_up(*trees: Tree) -> ArchiveIndex:
    """Return an index of trees that need not be good."""
    return ArchiveIndex(Built("debian", "12", "x86_64", "2.36"), trees)


def small_tree(*things: ArchiveMember, name: str = TOP) -> Tree:
    """Return a tree with a manifest and these things, in order; contents of files are empty."""
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    every = [ArchiveMember("manifest.json", FILE, sha256=empty), *things]
    return Tree(name, tuple(sorted(every, key=lambda thing: index.order(thing.path))))


def document(index: ArchiveIndex) -> dict[str, Any]:
    """Return an index as JSON values, to be spoiled."""
    return json.loads(render_index(index))


def spoiled(index: ArchiveIndex, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Return the text of an index after a change to its values."""
    values = document(index)
    change(values)
    return json.dumps(values).encode()


def everything_below(folder: Path) -> set[tuple[str, int]]:
    """Return every path below a folder with the time of its last change: what differs afterwards was written to."""
    return {(str(path), path.lstat().st_mtime_ns) for path in folder.rglob("*")}


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Prefix]:
    """A second, empty prefix elsewhere."""
    fleet = ConnectionPool([HERE])
    (tmp_path / "elsewhere").mkdir()
    yield Prefix(make_prefix(tmp_path / "elsewhere"), fleet)
    fleet.close()


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, ArchiveIndex]:
    """An archive of two entries, and its index; not to be changed."""
    fleet = ConnectionPool([HERE])
    prefix = Prefix(make_prefix(tmp_path_factory.mktemp("packed")), fleet)
    add_rich_entry(prefix, BASE)
    add_rich_entry(prefix, TOP, [BASE])
    found = pack(prefix, BASE, TOP)
    fleet.close()
    return found


def folder_thing(path: str) -> ArchiveMember:
    return ArchiveMember(path, FOLDER)


def tar(*words: str, data: bytes) -> str:
    """Run GNU tar on an archive and return what it prints."""
    done = subprocess.run(["tar", *words], input=data, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()
