"""Files and folders that are there whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from deepep_bootstrap.core.filetree import whole_file, whole_folder


def test_a_file_has_its_name_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    with whole_file(path) as stream:
        stream.write(b"half")
        assert not path.exists()
        stream.write(b" and half")
    assert path.read_bytes() == b"half and half"
    assert [*tmp_path.iterdir()] == [path]


def test_a_block_that_raises_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def write() -> None:
        with whole_file(path) as stream:
            stream.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert path.read_text() == "before"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755])
def test_nobody_else_reads_it_at_any_time(mode: int, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with whole_file(tmp_path / "file", mode) as stream:
            assert stat.S_IMODE(os.stat(stream.name).st_mode) == mode
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_a_link_is_replaced_and_what_it_leads_to_is_not(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("other")
    (tmp_path / "file").symlink_to("other")
    with whole_file(tmp_path / "file") as stream:
        stream.write(b"new")
    assert (tmp_path / "other").read_text() == "other"
    assert not (tmp_path / "file").is_symlink()


def test_a_folder_has_its_name_when_it_is_complete(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "new") as folder:
        (folder / "file").write_text("there")
        assert not (tmp_path / "new").exists()
    assert (tmp_path / "new" / "file").read_text() == "there"
    with pytest.raises(OSError, match="not empty"), whole_folder(tmp_path / "new") as folder:
        (folder / "other").write_text("there")
    with pytest.raises(ValueError, match="full"), whole_folder(tmp_path / "another"):
        raise ValueError("full")
    assert [*tmp_path.iterdir()] == [tmp_path / "new"]
