"""Parts of the phases of bootstrap that need no hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepep_bootstrap.errors import Trouble
from deepep_bootstrap.generations import Content
from deepep_bootstrap.phases import copy_tests

FILES = [
    Content("sbatch/internode-test.sbatch", b"#!/bin/bash\n"),
    Content("sbatch/v1/internode-test.sbatch", b"the same for one stack\n"),
    Content("env.sh", b"export X=1\n"),
]


def test_a_slurm_client_gets_the_default_stacks_tests_where_it_stands(tmp_path: Path) -> None:
    assert copy_tests(FILES, tmp_path) == ["internode-test.sbatch"]
    assert [path.name for path in tmp_path.iterdir()] == ["internode-test.sbatch"]
    assert (tmp_path / "internode-test.sbatch").read_bytes() == b"#!/bin/bash\n"


def test_a_folder_that_is_gone_is_trouble(tmp_path: Path) -> None:
    with pytest.raises(Trouble, match=r"none: sbatch files cannot be written here — found No such file or directory"):
        copy_tests(FILES, tmp_path / "none")
