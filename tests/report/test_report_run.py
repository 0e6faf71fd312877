"""`invoke report RUN`: which run is meant, what of it is told on a terminal, in a pipe and as JSON, and what is
written where."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from deepep_bootstrap.analysis.results.model import Point, Rank, Tested
from deepep_bootstrap.cli.app import as_written
from deepep_bootstrap.cli.commands.report import report
from deepep_bootstrap.cli.verbs import declared
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import OK, Trouble
from deepep_bootstrap.inventory.facts import facts_json, lines, read_facts_json
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.report import load, model, terminal
from deepep_bootstrap.testing import run_folder
from deepep_bootstrap.testing.run_folder import Judgement, RunVerdict, judgement_text
from tests.cli.test_json_doc import TEXT, keys, merge, shape
from tests.support.report import ROOT, RUNS, TEXTS, files_of, make_history, page_of, report_of

FACTORS = (0.97, 1.02, 0.8, 1.01)


def printed(capsys: pytest.CaptureFixture[str], run: str, **more: Any) -> str:
    flags = Flags(ROOT, **{name: more.pop(name) for name in ("prefix", "json", "dry_run") if name in more})
    assert report(flags, run=run, html=more.get("html", ""), bundle="", scrub_hosts=False) == OK
    return capsys.readouterr().out


def invoke(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "invoke", "report", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )


# --- what is told ----------------------------------------------------------------------------------------------------------------------


def test_a_run_with_a_frozen_nic(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, str(RUNS / "nic-frozen"))
    first, why = out.splitlines()[:2]
    assert first == "internode on b200-[001-002] (2): below reference"
    assert why.startswith("b200-002: mlx5_5/1 sent nothing of the test (1.8 kB of 2.6 TB); ")
    assert re.search(r"dispatch FP8, RDMA +█+░+│░+ +52\.1 GB/s +70\.5 \(from 59\.9\) +52 % +below, 74 %", out)
    frozen = next(line for line in out.splitlines() if line.startswith("  mlx5_5/1") and "below" in line)
    assert "█" not in frozen
    assert "52.1*" in out
    assert "best: 52.1 GB/s at NVL chunk 28, RDMA chunk 16" in out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) < 200


def test_a_run_that_failed_with_a_slow_rank(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, str(RUNS / "failed"))
    assert "queue pairs do not connect" in out.splitlines()[1].lower()
    assert "cause: queue pairs do not connect (rdma-qp-connect-gid" in out
    assert "slow: rank 5 of low-latency" in out
    assert re.search(r"low-latency dispatch, time +\S?.*▲.* 70|low-latency dispatch, time.*▲", out)


def test_the_kept_verdict_is_told_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A site's references that came after the run, or rules of today, do not change the word of a run."""
    folder = tmp_path / "run"
    shutil.copytree(RUNS / "healthy", folder)
    (folder / "verdict.json").write_text(judgement_text(Judgement(RunVerdict.BELOW, "combine, RDMA: 75.3 GB/s")))
    out = printed(capsys, str(folder), html=str(tmp_path / "r.html"))
    assert out.splitlines()[:2] == ["internode on b200-[001-002] (2): below reference", "combine, RDMA: 75.3 GB/s"]
    assert "note: judged below reference when it ran; today: passed, 16 cases passed" in out
    page = (tmp_path / "r.html").read_text()
    assert '<div class="verdict below">' in page
    assert "<strong>Below reference</strong><p>combine, RDMA: 75.3 GB/s</p>" in page
    document = json.loads(printed(capsys, str(folder), json=True))
    assert (document["verdict"], document["why"]) == ("below reference", "combine, RDMA: 75.3 GB/s")


def test_every_verdict_has_a_face(tmp_path: Path) -> None:
    for verdict in (RunVerdict.PASSED, RunVerdict.BELOW, RunVerdict.FAILED, RunVerdict.STOPPED):
        page = page_of(
            report_of(
                "healthy",
                edit=lambda files, kept=verdict: files.update(  # type: ignore[misc]
                    {"verdict.json": judgement_text(Judgement(kept, "so"))}
                ),
            )
        )
        name = verdict.name.lower()
        assert f"<strong>{verdict.value.capitalize()}</strong><p>so</p>" in page
        assert f".verdict.{name}" in page
        assert f".is-{name}" in page
    assert (
        "not ended" in page_of(report_of("healthy", edit=lambda files: files.update({"run.env": "kind=x\n"}))).lower()
    )


def test_a_healthy_run_and_its_past(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = printed(capsys, str(make_history(tmp_path, "healthy", FACTORS)))
    assert out.splitlines()[0] == "internode on b200-[001-002] (2): passed"
    assert "16 cases passed" in out.splitlines()[1]
    assert "Against 4 earlier runs of the kind" in out
    row = re.search(r"dispatch FP8, RDMA +([▁-█]{5}) +71\.4 +70\.\d +\+\d\.\d %", out)
    assert row
    assert (row[1][2], row[1][1]) == ("▁", "█")
    assert f"invoke report {tmp_path}/healthy --html=healthy.html" in out


def without_counters(files: dict[str, str]) -> None:
    del files["counters/b200-002.after"]


def without_nics(files: dict[str, str]) -> None:
    for name in [name for name in files if name.startswith("counters/") or name == "facts.json"]:
        files[name] = "" if name == "facts.json" else re.sub("nic=.*\n", "", files[name])


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda files: None, "; every NIC carried its share"),
        (without_counters, "; what NICs carried was not measured on b200-002"),
        (without_nics, "; no RDMA NIC on b200-[001-002] (2): what nodes sent each other went over sockets"),
    ],
)
def test_nics_are_praised_where_they_were_measured(edit: Callable[[dict[str, str]], None], why: str) -> None:
    found = report_of("healthy", edit=edit)
    assert (found.verdict.value, found.why.count("NIC")) == ("passed", 1), found.why
    assert found.why.endswith(why)


def test_a_terminal_that_has_no_blocks_and_a_narrow_one() -> None:
    run = report_of("nic-frozen")
    for width, encoding in ((60, "ascii"), (100, "utf-8")):
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding=encoding, errors="strict", write_through=True)
        screen = Screen("report")
        screen._console = Console(
            file=stream, width=width, force_terminal=True, color_system="256", soft_wrap=True, highlight=False
        )
        if encoding == "ascii":
            run = report_of("nic-frozen", edit=lambda files: files.update({"facts.json": ""}))
        terminal.show_report(screen, run)
        lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in raw.getvalue().decode(encoding).splitlines()]
        assert ("#####" if encoding == "ascii" else "█████") in "\n".join(lines)
        tables = [line for line in lines if re.match(r"  mlx5_\d/1 +[#█.]|  +\d+ +[\d.]+ ", line)]
        assert len(tables) > 10
        assert max(map(len, tables)) <= width


@pytest.mark.parametrize("best", [0.0123, 8.25, 153.0])
def test_the_name_of_a_row_stands_apart_from_its_first_value(best: float, capsys: pytest.CaptureFixture[str]) -> None:
    grid = model.Grid(
        "combine, RDMA", "", "RDMA chunk", "NVL chunk", (8, 128), (1, 2), ((best, 0.0), (None, best)), best=(8, 1)
    )
    Screen("report").show(terminal.heat(grid))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["1", "8", "128"]
    assert float(rows[1][1].rstrip("*")) == best


def test_passwords_and_tokens_are_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    shutil.copytree(RUNS / "failed", folder)
    token = "hf_" + "a1B2" * 8
    with (folder / "run.env").open("a") as env:
        env.write(f"args=--api-key {token}\n")
    with (folder / "node-1-b200-002.log").open("a") as log:
        log.write(f"RuntimeError: DeepEP error: GET https://me:{token}@example.invalid/ failed, HF_TOKEN={token}\n")
    out = printed(capsys, str(folder), html=str(tmp_path / "r.html")) + printed(capsys, str(folder), json=True)
    assert "[removed]" in out
    assert token not in out + (tmp_path / "r.html").read_text()


def test_escape_sequences_of_logs_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "run\x1b[31m"
    shutil.copytree(RUNS / "failed", folder)
    with (folder / "run.env").open("a") as env:
        env.write("kind=\x1b]0;title\x07low\x1b[2Jlatency\n")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f]", printed(capsys, str(folder)))


def test_the_document_is_as_docs_say(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    document = json.loads(printed(capsys, str(make_history(tmp_path, "failed", FACTORS)), json=True))
    example = json.loads(re.findall(r"```json\n(.*?)```", TEXT.partition("### The report of a run")[2], re.DOTALL)[0])
    free = {"values", "errors_by_name", "figures", "config", "best", "operations"}
    for part in (document, example):
        for nic in part["traffic"]:
            nic["errors_by_name"] = nic.pop("errors")
    assert set(document) == set(example)
    for key in ("run", "verdicts", "traffic", "findings", "notes", "facts", "history"):
        merge(shape(document[key], free), shape(example[key], free))
    explained = set(re.findall(r"`([a-z_]+)`", re.sub(r"```json.*?```", "", TEXT, flags=re.DOTALL)))
    assert set(keys(example, free)) - explained - {"errors_by_name"} == set()
    assert document["verdict"] == "failed"
    assert document["findings"][0]["cause"] == "rdma-qp-connect-gid"


# --- which run ---------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """A prefix with runs, reached through a connection to this machine: the real recipes read it."""
    runs = tmp_path / "prefix" / "logs" / "tests"
    runs.mkdir(parents=True)
    make_history(runs, "healthy", FACTORS)
    shutil.copytree(RUNS / "nic-frozen", runs / "20261121T0000Z-internode")
    shutil.copytree(RUNS / "failed", runs / "20261122T0000Z-low-latency")
    (runs / "healthy").rename(runs / "20261120T1840Z-internode")
    (runs / "empty").mkdir()
    (runs / "a name with blanks").mkdir()
    (runs / "a name with blanks" / "run.env").write_text("kind=internode\n")
    return tmp_path / "prefix"


@pytest.mark.usefixtures("programs")
def test_runs_of_a_prefix(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = json.loads(printed(capsys, "20261120T1840Z-internode", prefix=str(prefix), json=True))
    assert (named["verdict"], len(named["history"])) == ("passed", 4)
    assert [round(run["figures"]["internode best.dispatch_fp8.rdma_gbs"] / 71.42, 2) for run in named["history"]] == [
        *FACTORS
    ]
    assert named["run"]["folder"] == f"{prefix}/logs/tests/20261120T1840Z-internode on localhost"
    later = json.loads(printed(capsys, f"{prefix}/logs/tests/20261121T0000Z-internode", prefix=str(prefix), json=True))
    assert later["history"][-1]["name"] == "20261120T1840Z-internode", "earlier runs of the same kind"


@pytest.mark.usefixtures("programs")
def test_without_a_name_it_is_the_newest_run(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Names begin with the time; those of make_history do not, so they are put away.
    for folder in (prefix / "logs" / "tests").glob("healthy-*"):
        shutil.rmtree(folder)
    for name in ("a name with blanks", "empty"):
        shutil.rmtree(prefix / "logs" / "tests" / name)
    document = json.loads(printed(capsys, "", prefix=str(prefix), json=True))
    assert document["run"]["name"] == "20261122T0000Z-low-latency"


@pytest.mark.usefixtures("programs")
def test_here_and_through_a_host_a_run_is_told_alike(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = json.loads(printed(capsys, f"{prefix}/logs/tests/20261120T1840Z-internode", json=True))
    there = json.loads(printed(capsys, "20261120T1840Z-internode", prefix=str(prefix), json=True))
    assert here["run"].pop("folder") != there["run"].pop("folder")
    assert here == there


@pytest.mark.usefixtures("programs")
def test_references_of_the_site_count_here_and_there(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (prefix / "references.toml").write_text(
        '[[reference]]\ngpu = "B200"\nfabric = "gib"\nnodes = 2\ntest = "internode"\ngeneration = "v1"\nlower = '
        "0.02\nupper = 0.1\n"
        'source = "this site"\n[reference.figures]\n"best.combine.rdma_gbs" = 90.0\n'
    )
    for run, more in (
        (f"{prefix}/logs/tests/20261120T1840Z-internode", {}),
        ("20261120T1840Z-internode", {"prefix": str(prefix)}),
    ):
        document = json.loads(printed(capsys, run, json=True, **more))
        assert document["verdict"] == "below reference"
        assert document["why"] == "combine, RDMA: 75.3 GB/s, 84 % of 90 GB/s"


@pytest.mark.usefixtures("programs")
def test_a_run_that_is_not_there(prefix: Path) -> None:
    for run, more, words in (
        ("20991231-none", {"prefix": str(prefix)}, "no such run"),
        ("20991231-none", {}, "no such run on this machine"),
        ("", {}, "no run named"),
        ("x" * 300, {}, "no such run on this machine"),
        ("~no such user/run", {}, "no such run on this machine"),
        ("", {"prefix": f"{prefix}-none"}, "no run yet"),
    ):
        with pytest.raises(Trouble, match=words):
            report(Flags(ROOT, **more), run=run, html="", bundle="", scrub_hosts=False)


def test_a_run_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "run.env").write_text("nonsense\n")
    with pytest.raises(Trouble, match="no line of a run"):
        report(Flags(ROOT), run=str(tmp_path), html="", bundle="", scrub_hosts=False)


def test_facts_that_cannot_be_read_do_not_keep_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(RUNS / "healthy", tmp_path / "run")
    (tmp_path / "run" / "facts.json").write_text('{"schema": 1, "hosts": {"b200-001": {"gpus": [{"index": "x"}]}}}')
    out = printed(capsys, str(tmp_path / "run"))
    assert (
        "note: run/facts.json: facts of a host cannot be read — found b200-001: Expected `int`, got `str` - at `$.gpus[0].index`"
        in out
    )


# --- what is written ------------------------------------------------------------------------------------------------------------------


def test_html_is_written_where_asked_and_never_over_something(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.html"
    assert f"would write {path}" in printed(capsys, str(RUNS / "healthy"), html=str(path), dry_run=True)
    assert not path.exists()
    assert f"wrote {path}" in printed(capsys, str(RUNS / "healthy"), html=str(path))
    assert path.read_text().startswith("<!doctype html>")
    for name, words in ((str(path), "is there already"), (f"{tmp_path}/none/r.html", "its folder is not there")):
        with pytest.raises(Trouble, match=words):
            report(Flags(ROOT), run=str(RUNS / "healthy"), html=name, bundle="", scrub_hosts=False)
    with pytest.raises(Trouble, match="a bundle is not the report of a run"):
        report(Flags(ROOT), run="x", html="", bundle=True, scrub_hosts=False)


@pytest.mark.usefixtures("programs")
def test_the_command_line(tmp_path: Path) -> None:
    done = invoke(str(RUNS / "healthy"), f"--html={tmp_path}/r.html")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "r.html").is_file()
    failed = invoke("--prefix", str(tmp_path / "none"))
    assert failed.returncode == 1
    assert "no run yet" in failed.stderr


@pytest.mark.parametrize(
    ("words", "bare"),
    [
        ([], False),
        (["--json"], False),
        (["--hosts", "hosts/b200.txt"], False),
        (["--hosts=h", "--json"], False),
        (["r1"], True),
        (["--json", "r1"], True),
        (["--hosts", "h", "r1"], True),
        (["r1", "--html", "x.html"], True),
        (["--run", "r1"], False),
        (["--bundle", "file.tar.gz"], False),
    ],
)
def test_a_name_needs_no_flag(words: list[str], bare: bool) -> None:
    given = as_written(declared("report"), ["report", *words])
    assert (given[0].name, given[0].is_argument) == ("run", bare)


# --- parts -----------------------------------------------------------------------------------------------------------------------------


def test_facts_come_back_as_they_were_written() -> None:
    text = files_of("healthy")["facts.json"]
    facts = read_facts_json(text, "f")
    assert json.loads(json.dumps(facts_json(facts))) == json.loads(text)["hosts"]
    assert dict(lines(facts["b200-001"]))["RDMA"] == "8 of 8 devices active (Ethernet), OFED 25.10-1.7.1"
    assert read_facts_json("", "f") == {}
    for wrong in (
        "{",
        "[]",
        '{"schema": 2, "hosts": {}}',
        '{"schema": 1, "hosts": {"a": []}}',
        '{"schema": 1, "hosts": {"a": {"cpus": "2"}}}',
    ):
        with pytest.raises(Trouble):
            read_facts_json(wrong, "f")


def test_a_long_log_is_cut_in_its_middle() -> None:
    text = run_folder.cut(b"a" * run_folder.LARGEST + b"b" * 100)
    assert (text[0], text[-1]) == ("a", "b")
    assert "[100 bytes left out here]" in text


def test_what_a_program_of_ours_says_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = "[pairs] 1 of 28 pairs is slow\n[pairs] slow: pair b200-003 b200-007: 12.0 GB/s, the others 43.1\nnoise\n"
    (tmp_path / "run.env").write_text("kind=pairs\ncode=1\nnodes=b200-003,b200-007\n")
    (tmp_path / "node-0-b200-003.log").write_text(log)
    out = printed(capsys, str(tmp_path))
    assert out.splitlines()[:2] == [
        "pairs on b200-[003,007] (2): failed",
        "slow: pair b200-003 b200-007: 12.0 GB/s, the others 43.1",
    ]
    assert "1 of 28 pairs is slow" in out
    assert "noise" not in out


@pytest.mark.parametrize("name", ["healthy", "failed"])
def test_a_run_that_was_cut_off_anywhere_can_be_told(name: str) -> None:
    # Whatever a node could still write before it died: never the end of the report, and never a run that passed.
    for part in (1, 4, 7, 10, 11):

        def cut(files: dict[str, str], part: int = part) -> None:
            for path in files:
                if path not in {"run.env", "facts.json"}:
                    files[path] = files[path][: len(files[path]) * part // 12]

        found = report_of(name, edit=cut)
        assert found.verdict is RunVerdict.FAILED, part
        assert page_of(found)


def test_ends_of_logs_are_shown_once() -> None:
    files = {
        "run.env": "kind=x\n",
        "node-0-a.log": "same\n",
        "rank-0.log": "same\n",
        "rank-1.log": "",
        "job.log": "".join(f"{n}\n" for n in range(99)),
    }
    ends = model.log_ends(run_folder.of_files("r", files), ["rank-0.log"])
    assert [(tail.name, tail.first, tail.count, tail.open_, tail.same) for tail in ends] == [
        ("job.log", 60, 99, False, ()),
        ("node-0-a.log", 1, 1, True, ("rank-0.log",)),
    ]


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("dispatch_fp8_nvl_gbs", "dispatch FP8, NVLink"),
        ("dispatch_combine_gbs", "dispatch and combine"),
        ("combine_us", "combine, time"),
        ("dispatch_send_us", "dispatch, send time"),
        ("dispatch_combine_min_us", "dispatch and combine, least time"),
    ],
)
def test_names_of_ranks_figures(name: str, title: str) -> None:
    assert model.rank_title(name) == title


def test_a_sweep_lies_upright() -> None:
    points = tuple(Point("combine", 24, chunk, None, 100.0 + chunk, 0.0 + chunk, 9.0) for chunk in range(1, 17))
    points = tuple(Point(p.operation, p.sms, p.nvl_chunk, None, p.nvl_gbs, None, p.us) for p in points)
    default = Point("combine", 24, None, None, 110.0, None, 9.0, default=True)
    (grid,) = model.grids([Tested("intranode", "v1", ok=True, ended=True, sweep=(*points, default), ranks=(Rank(0),))])
    assert (grid.row_name, grid.rows, grid.column_name, grid.columns) == (
        "NVL chunk",
        tuple(range(1, 17)),
        "SMs",
        (24,),
    )
    assert (grid.best, grid.span) == ((16, 24), (101.0, 116.0))
    assert grid.best_words == "116 GB/s at NVL chunk 16, SMs 24, 5.5 % more than upstream's default"
    assert replace(grid, default=None).best_words == "116 GB/s at NVL chunk 16, SMs 24"
    worse = replace(grid, default=120.0).best_words
    assert worse == "upstream's default, 120 GB/s; of those tried 116 GB/s at NVL chunk 16, SMs 24"


def test_only_runs_alike_and_earlier_are_compared() -> None:
    base = {"kind": "internode", "nodes": "a,b", "args": "--num-tokens 4", "started": "100"}
    others = {
        "before": {"started": "90"},
        "later": {"started": "101"},
        "three": {"nodes": "a,b,c"},
        "args": {"args": "--num-tokens 8"},
        "kind": {"kind": "pairs"},
        "other": {"nodes": "c,d", "started": "80"},
        "quoted": {"args": "'--num-tokens' '4'", "started": "70"},
    }
    values = {"/t/now": base, "/t/broken": {}, **{f"/t/{name}": {**base, **change} for name, change in others.items()}}
    runs = {folder: load.RunRecord(each) for folder, each in values.items()}
    run = run_folder.of_files("now", {"run.env": "".join(f"{key}={value}\n" for key, value in base.items())})
    assert load.like(run, runs) == ("/t/quoted", "/t/other", "/t/before")


def test_texts_of_env_are_all_that_a_report_needs() -> None:
    assert (
        load.made(run_folder.of_files("r", {"run.env": "kind=smoke\ncode=0\n"}), TEXTS, {}).verdict is RunVerdict.PASSED
    )
