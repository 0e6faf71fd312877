"""`invoke report --list`, `--junit`, `--force`, and the line that runs a test again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from junitparser import Error, Failure, JUnitXml, Skipped

from deepep_bootstrap.cli.commands.report import report
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.report import load
from deepep_bootstrap.report.junit import render_junit
from deepep_bootstrap.testing.run_folder import Judgement, RunVerdict, judgement_text
from tests.support.paths import ROOT
from tests.support.report import RUNS, page_of, report_of


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A prefix with three runs: below its reference by a kept verdict, failed by its exit code, not judged."""
    folder = tmp_path / "prefix" / "logs" / "tests"
    folder.mkdir(parents=True)
    names = {
        "nic-frozen": "20261121T194000Z-internode-aaaaaa",
        "failed": "20261122T204000Z-low-latency-bbbbbb",
        "healthy": "20261120T184000Z-internode-cccccc",
    }
    for name, run in names.items():
        shutil.copytree(RUNS / name, folder / run)
    kept = judgement_text(Judgement(RunVerdict.BELOW, "b200-002: mlx5_5/1 sent nothing of the test"))
    (folder / names["nic-frozen"] / "verdict.json").write_text(kept)
    return folder


LISTED = [
    "  began (UTC)       verdict          kind         stack  nodes               run",
    "  2026-11-22 20:40  failed           low-latency  v1     b200-[001-002] (2)  20261122T204000Z-low-latency-bbbbbb",
    "  2026-11-21 19:40  below reference  internode    v1     b200-[001-002] (2)  20261121T194000Z-internode-aaaaaa",
    "  2026-11-20 18:40  not judged       internode    v1     b200-[001-002] (2)  20261120T184000Z-internode-cccccc",
]


@pytest.mark.usefixtures("programs")
def test_which_runs_there_are(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a prefix through a host and of a folder here, newest first, each with its verdict."""
    prefix = runs.parents[1]
    assert report(Flags(ROOT, prefix=str(prefix)), list=True) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == f"3 runs in localhost {runs}"
    assert lines[1:5] == LISTED
    assert lines[-1] == f"    invoke report 20261122T204000Z-low-latency-bbbbbb --prefix={prefix}"
    assert report(Flags(ROOT), run=str(runs), list=True) == 0
    here = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert here[1:5] == LISTED
    assert here[-1] == f"    invoke report {runs}/20261122T204000Z-low-latency-bbbbbb"
    assert report(Flags(ROOT, json=True), run=str(runs), list=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(run["kind"], run["verdict"], run["why"][:8]) for run in document["runs"]] == [
        ("low-latency", "failed", "exit cod"),
        ("internode", "below reference", "b200-002"),
        ("internode", "not judged", "exit cod"),
    ]


def test_a_list_of_nothing_and_of_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(Flags(ROOT), run=str(tmp_path), list=True) == 0
    assert capsys.readouterr().out == f"0 runs in {tmp_path}\n"
    for words, wanted in (
        ({}, "--list: "),
        ({"run": str(tmp_path / "none")}, "no such folder"),
        ({"html": "x.html"}, "a list of runs is not the report of one"),
    ):
        with pytest.raises(Trouble, match=wanted):
            report(Flags(ROOT), list=True, **words)  # type: ignore[arg-type]


def test_a_file_is_replaced_where_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, xml = tmp_path / "r.html", tmp_path / "r.xml"
    page.write_text("old")
    run = str(RUNS / "healthy")
    with pytest.raises(Trouble, match=r"is there already — wanted the name of a new file\. Try: --force, which"):
        report(Flags(ROOT), run=run, html=str(page))
    assert page.read_text() == "old"
    assert report(Flags(ROOT), run=run, html=str(page), junit=str(xml), force=True) == 0
    assert f"wrote {page}\nwrote {xml}\n" in capsys.readouterr().out
    assert page.read_text().startswith("<!doctype html>")
    for there in (tmp_path, tmp_path / "link"):
        if there != tmp_path:
            there.symlink_to(page)
        with pytest.raises(Trouble, match="is there already"):
            report(Flags(ROOT), run=run, html=str(there), force=True)


@pytest.mark.parametrize(("name", "failed", "errors"), [("healthy", 0, 0), ("nic-frozen", 9, 0), ("failed", 2, 0)])
def test_a_run_as_junit(name: str, failed: int, errors: int, tmp_path: Path) -> None:
    """Read back by a library of others: every verdict is a case, and the counts are those of the cases."""
    found = report_of(name)
    path = tmp_path / "r.xml"
    path.write_text(render_junit(found), encoding="utf-8")
    xml = JUnitXml.fromfile(str(path))
    (suite,) = xml
    cases = list(suite)
    results = [result for case in cases for result in case.result]
    assert suite.tests == xml.tests == len(cases) == 1 + len(found.tests) + len(found.verdicts)
    assert suite.failures == xml.failures == sum(isinstance(result, Failure) for result in results) == failed
    assert suite.errors == xml.errors == sum(isinstance(result, Error) for result in results) == errors
    assert suite.skipped == sum(isinstance(result, Skipped) for result in results)
    assert suite.hostname == "b200-[001-002] (2)"
    assert {each.name: each.value for each in suite.properties()}["verdict"] == found.verdict.value
    run = cases[0]
    assert (run.classname, run.name) == (f"deepep.{found.run.kind}.run", name)
    assert [result.message for result in run.result] == ([found.why] if failed else [])
    before = [(case.classname, case.name, [result.message for result in case.result]) for case in cases]
    suite.update_statistics()
    assert (suite.tests, suite.failures, suite.errors) == (len(cases), failed, errors)
    assert len(set(map(str, before))) == len(before)


def test_a_stopped_run_is_an_error_and_what_a_log_says_breaks_no_xml() -> None:
    def hostile(files: dict[str, str]) -> None:
        files["run.env"] += "args=\x01<]]>&\ufffe\x1b[31m\n"
        files["verdict.json"] = judgement_text(Judgement(RunVerdict.STOPPED, "<stopped> \x00by & me"))

    xml = JUnitXml.fromstring(render_junit(report_of("healthy", edit=hostile)).partition("?>\n")[2])
    (suite,) = xml
    assert (suite.errors, suite.failures) == (1, 0)
    assert [result.message for result in next(iter(suite)).result] == ["<stopped> by & me"]


def test_the_line_that_runs_it_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under a run that did not pass, with the words it was given; on its page and in its JSON without the hosts."""
    folder = tmp_path / "run"
    shutil.copytree(RUNS / "failed", folder)
    with (folder / "run.env").open("a") as env:
        env.write("args=--num-tokens 64 --note 'a b'\n")
    assert report(Flags(ROOT), run=str(folder)) == 0
    words = """invoke test --kind=low-latency --stack=v1 --nodes=2 '--args=--num-tokens 64 --note '"'"'a b'"'"''"""
    assert f"Next:\n    {words}    # the same test again\n" in capsys.readouterr().out
    assert report(Flags(ROOT, json=True), run=str(folder)) == 0
    assert json.loads(capsys.readouterr().out)["rerun"] == words
    failed, healthy = report_of("failed"), report_of("healthy")
    assert (failed.rerun, healthy.rerun) == ("invoke test --kind=low-latency --stack=v1 --nodes=2", "")
    assert f"Run it again: <code>{failed.rerun}</code>" in page_of(failed)
    assert "Run it again" not in page_of(healthy)
    flags = Flags(ROOT, hosts="hosts/b200.txt", limit="b200-[001-002]")
    assert load.rerun(flags, failed.run) == f"{failed.rerun} --hosts=hosts/b200.txt '--limit=b200-[001-002]'"
