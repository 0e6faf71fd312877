"""`invoke report --build`: how long the builds of a bootstrap took, out of the logs that it left."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from deepep_bootstrap.cli.commands.report import report
from deepep_bootstrap.core.errors import OK, Trouble
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.report.build import LOGS, is_log_of_build, longest_units, read_builds
from tests.support.paths import ROOT, TESTS

CASES = TESTS / "cases/analysis/build_times"
HASH = "0123456789abcdfghijklmnpqrsvwxyz"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folder's runs: an older one that built two entries, and a newer one that built nothing."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "deepep-bootstrap/logs"
    host = folder / "20260101T120000Z-bootstrap-aaaaaa/n001"
    host.mkdir(parents=True)
    shutil.copy(CASES / "cmake-nvcc-13.0.log", host / f"build-{HASH}-nvshmem-3.4.5.log")
    shutil.copy(CASES / "torch.log", host / f"build-{HASH}-deepep-1.2.1.log")
    (folder / "20260102T120000Z-bootstrap-bbbbbb/n001").mkdir(parents=True)
    (folder / "20260102T120000Z-bootstrap-bbbbbb/n001/limits.log").touch()
    return folder


def test_the_newest_run_that_built_something_is_told(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(Flags(ROOT), build=True) == OK
    assert capsys.readouterr().out.splitlines() == [
        f"Builds of {runs}/20260101T120000Z-bootstrap-aaaaaa",
        "  nvshmem-3.4.5  13 s",
        "  deepep-1.2.1   no end",
        "Longest to compile: deep_ep 43 s of deepep-1.2.1",
        "                    internode.cu 27 s (ptxas 19 s) of deepep-1.2.1",
        "                    internode_ll 21 s of deepep-1.2.1",
    ]


@pytest.mark.parametrize("whole", [True, False], ids=["a path", "a name"])
def test_a_run_may_be_named(whole: bool, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "20260101T120000Z-bootstrap-aaaaaa"
    assert report(Flags(ROOT, json=True), run=str(runs / name) if whole else name, build=True) == OK
    told = json.loads(capsys.readouterr().out)
    assert told["where"] == str(runs / name)
    assert [(each["entry"], each["seconds"]) for each in told["builds"]] == [
        ("nvshmem-3.4.5", 13.2),
        ("deepep-1.2.1", None),
    ]
    assert told["builds"][1]["units"][1] == {
        "name": "internode.cu",
        "seconds": 27.099,
        "phase": "ptxas",
        "phase_seconds": 19.0,
    }


def test_a_run_that_built_nothing_says_so(runs: Path) -> None:
    with pytest.raises(Trouble, match=r"bbbbbb: has no log of a build — found of the last runs 20260102.*, 20260101"):
        report(Flags(ROOT), run="20260102T120000Z-bootstrap-bbbbbb", build=True)
    shutil.rmtree(runs)
    with pytest.raises(Trouble, match="no run has left a log of a build there"):
        report(Flags(ROOT), build=True)


@pytest.mark.parametrize("more", [{"html": "x.html"}, {"list": True}, {"cluster": True}, {"bundle": True}])
def test_it_goes_with_no_other_report(more: dict[str, object], runs: Path) -> None:
    with pytest.raises(Trouble):
        report(Flags(ROOT), build=True, **more)


def test_only_logs_of_builds_count(runs: Path) -> None:
    files = sorted((runs / "20260101T120000Z-bootstrap-aaaaaa").glob(LOGS))
    assert all(is_log_of_build(str(file)) for file in files)
    assert not any(map(is_log_of_build, ("", "/x/limits.log", "/x/build-short-nvshmem.log")))
    assert longest_units(read_builds([])) == []
