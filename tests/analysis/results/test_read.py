"""Logs of upstream's tests: figures exactly as printed, whole or cut, one file or many; and `invoke results`.

Each folder of cases/results has logs and expected.json: for every test in them, in order, the keys of its document that
matter there. Beside the document's keys: `sweep_counts` (settings by operation), `sweep_has`, `figures` (by rank),
`slow` and `missing` (ranks).
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepep_bootstrap.analysis.results import collectors, model, wording
from deepep_bootstrap.analysis.results.model import as_json, document
from deepep_bootstrap.analysis.results.read import read_logs
from deepep_bootstrap.analysis.results.wording import faults, lines
from deepep_bootstrap.cli import logs
from deepep_bootstrap.cli.commands import results as verb
from deepep_bootstrap.core.errors import Trouble
from tests.cli.test_json_doc import EXAMPLES, FREE_KEYS, keys
from tests.support.examples import most, spread
from tests.support.paths import ROOT

CASES = ROOT / "tests" / "cases" / "analysis" / "results"
NAMES = sorted(path.name for path in CASES.iterdir())
H200 = ("h200-intranode", "h200-low-latency")


def logs_of(name: str) -> dict[str, str]:
    return {
        path.name: path.read_bytes().decode("utf-8", "replace")
        for path in sorted((CASES / name).iterdir())
        if path.name != "expected.json"
    }


LOGS = {name: logs_of(name) for name in NAMES}
EXPECTED: dict[str, list[dict[str, Any]]] = {
    name: json.loads((CASES / name / "expected.json").read_text("utf-8")) for name in NAMES
}


def seen(tested: model.Tested, key: str) -> Any:
    """Return what expected.json calls `key`."""
    if key == "sweep_counts":
        return dict(Counter(point.operation for point in tested.sweep))
    if key in {"slow", "missing"}:
        return [rank.rank for rank in tested.ranks if rank.state == key]
    if key == "figures":
        return {str(rank.rank): rank.figures for rank in tested.ranks}
    return as_json(tested)[key]


@pytest.mark.parametrize("name", NAMES)
def test_logs_say_what_they_say(name: str) -> None:
    tests = read_logs(LOGS[name])
    assert [tested.test for tested in tests] == [wanted["test"] for wanted in EXPECTED[name]]
    for tested, wanted in zip(tests, EXPECTED[name], strict=True):
        for key, value in wanted.items():
            if key == "sweep_has":
                assert [point for point in as_json(tested)["sweep"] if point in value] == value
            elif key == "figures":
                assert {rank: own for rank, own in seen(tested, key).items() if rank in value} == value
            else:
                assert seen(tested, key) == value, f"{name}: {key}"


@pytest.mark.parametrize("name", [*H200, "nccl-h200-one-node"])
def test_a_log_cut_anywhere_is_never_ok(name: str) -> None:
    """At the end of each line, a byte before and behind it, in the middle of it, and of its last lines at every byte: a
    line that is cut within is read as one that is not whole, wherever that is."""
    ((log, text),) = LOGS[name].items()
    text = text.rstrip()
    assert read_logs({log: text})[0].ok
    ends = [match.start() for match in re.finditer("\n", text)]
    middles = [(begin + end) // 2 for begin, end in itertools.pairwise([0, *ends])]
    near = {end + beside for end in ends for beside in (-1, 0, 1)}
    for end in spread(sorted({*near, *middles, *range(ends[-3], len(text))})):
        assert not any(tested.ok for tested in read_logs({log: text[:end]})), text[end - 200 : end]


def places_to_cut(text: str) -> list[int]:
    """Return the ends of all lines, and places within those of our own."""
    found, at = [0], 0
    for line in text.splitlines(keepends=True):
        step = 31 if line.startswith("deepep: ") else len(line)
        found += [*range(at + step, at + len(line), step), at + len(line) - 1, at + len(line)]
        at += len(line)
    return sorted(set(found))


@pytest.mark.parametrize("name", ["low-latency-two-passes", "low-latency-two-nodes-two-passes"])
def test_a_run_that_lacks_a_part_of_a_pass_is_never_ok(name: str) -> None:
    """Also where the first pass is whole, or one run of the second one."""
    assert document(read_logs(LOGS[name]))["ok"]
    for log in (log for log in LOGS[name] if not log.startswith("rank-")):
        text = LOGS[name][log].rstrip()
        for end in spread(places_to_cut(text)[:-1]):
            found = read_logs({**LOGS[name], log: text[:end]})
            assert not document(found)["ok"], text[:end][-300:]
            assert all(
                tested.ok == (tested.test_pass is not None and tested.test_pass.number == 1)
                for tested in found
                if tested.ok
            )


def test_figures_of_two_passes_do_not_mix_where_one_node_is_behind() -> None:
    name = "low-latency-two-nodes-two-passes"
    alone = read_logs({"job.log": LOGS[name]["job.log"]})
    whole = read_logs(LOGS[name])
    assert [tested.low_latency for tested in alone] == [tested.low_latency for tested in whole]
    for tested in (*alone, *whole):
        assert tested.test_pass
        assert all(rank.figures["dispatch_us"] < 45 for rank in tested.ranks) == (tested.test_pass.tokens == 128)


def test_people_read_at_which_tokens_results_were_wrong() -> None:
    first, second = read_logs(LOGS["low-latency-second-pass-wrong"])
    assert (first.ok, wording.wrong(first)) == (True, "")
    lines = list(wording.lines(second))
    assert lines[0].startswith("low-latency test (DeepEP V1), 256 tokens: FAILED")
    assert "wrong results at 256 tokens a rank, in run 2 of 4: the test ran, and its own comparison" in lines[1]
    assert any("128 combine calls at 256 tokens, in 1 of 4 runs" in line for line in lines)


def test_the_head_names_the_kind_that_was_asked_for() -> None:
    tested = read_logs(LOGS["pressure"])[0]
    of = f"DeepEP {tested.generation.upper()}"
    heads = [next(wording.lines(tested, kind)).partition(":")[0] for kind in ("", tested.test, "pressure")]
    assert heads == [f"{tested.test} test ({of})"] * 2 + [f"pressure test ({tested.test}, {of})"]


WHOLE = [
    name
    for name in NAMES
    if all(wanted.get("ok") for wanted in EXPECTED[name])
    # Lines of old versions end where newer ones go on; of a host whose log is empty, another one's log does not know.
    and name not in {"intranode-without-times", "low-latency-two-hosts"}
]


@given(data=st.data())
@settings(max_examples=most(100), deadline=None)
def test_several_logs_of_which_one_is_cut_are_never_ok(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(WHOLE))
    logs = dict(LOGS[name])
    cut = data.draw(st.sampled_from([log for log in logs if not log.startswith("rank-")]))
    whole = re.sub(r"(?:\s|\n\d+: )+$", "", logs[cut])
    logs[cut] = whole[: data.draw(st.integers(0, len(whole) - 1))]
    assert not all(tested.ok for tested in read_logs(logs)) or len(read_logs(logs)) < len(EXPECTED[name])


@given(data=st.data())
@settings(max_examples=most(40), deadline=None)
def test_a_job_prints_its_nodes_lines_in_any_order(data: st.DataObject) -> None:
    """srun writes lines of several nodes as they come: each node's own keep their order, and one node may be some
    lines behind."""
    logs = LOGS["internode-run-folder"]
    head = "".join(line for line in logs["job.log"].splitlines(keepends=True) if line.startswith("deepep: "))
    begin, _, end = head.rpartition("deepep: ")
    ahead, behind = (logs[name].splitlines(keepends=True) for name in ("node-0-gpu-001.log", "node-1-gpu-002.log"))
    merged: list[str] = []
    lag = 0
    while ahead or behind:
        take = bool(ahead) and (not behind or (lag < 12 and data.draw(st.booleans())))
        merged.append((ahead if take else behind).pop(0))
        lag += 1 if take else -1
    (tested,) = read_logs({"slurm-1.out": begin + "".join(merged) + "deepep: " + end})
    assert (tested.ok, tested.passed, tested.failed) == (True, 32, 0)


@given(data=st.data())
@settings(max_examples=most(100), deadline=None)
def test_damaged_logs_are_read_all_the_same(data: st.DataObject) -> None:
    logs = dict(LOGS[data.draw(st.sampled_from(NAMES))])
    log = data.draw(st.sampled_from(sorted(logs)))
    text = logs[log]
    for _ in range(data.draw(st.integers(1, 6))):
        at, length = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 400))
        text = text[:at] + data.draw(st.text(max_size=12)) + text[at + length :]
    found = document(read_logs({**logs, log: text}))
    json.loads(json.dumps(found, allow_nan=False))


CRASHES = (
    "./run.sh: line 12: 48121 Segmentation fault      (core dumped) python tests/test_intranode.py",
    "./run.sh: line 12: 48121 Killed                  python tests/test_intranode.py",
    "/tmp/job/slurm_script: line 9:   811 Aborted                 python tests/test_intranode.py",
    "bash: line 1:   811 Bus error               python tests/test_intranode.py",
    "Fatal Python error: Segmentation fault",
    "Aborted (core dumped)",
    "/src/nvshmem/src/host/init/init.cu:1181: non-zero status: 7 nvshmem_finalize failed",
)
NO_CRASHES = (
    (
        "/src/nvshmem/src/modules/transport/ibgda/ibgda.cpp:3693: non-zero status: 3 NVSHMEM_IBGDA_NIC_HANDLER=cpu "
        "requires GDRCopy"
    ),
    "ibgda.cpp:1203: non-zero status: 7 ibgda_mobject_nic_map failed",
    "./run.sh: line 12: no tuning was killed",
)


@pytest.mark.parametrize(("line", "ok"), [*((line, False) for line in CRASHES), *((line, True) for line in NO_CRASHES)])
def test_a_crash_behind_the_last_figure_is_none_the_less_one(line: str, ok: bool) -> None:
    (tested,) = read_logs({"a.log": f"{LOGS['h200-intranode']['test_intranode.log'].rstrip()}\n{line}\n"})
    assert (tested.ok, tested.errors) == (ok, () if ok else (line,))


@pytest.mark.parametrize(("silent", "missing"), [((7,), [7]), ((4, 5, 6, 7), []), ((5, 6, 7), [5, 6, 7])])
def test_the_last_ranks_may_be_the_silent_ones(silent: tuple[int, ...], missing: list[int]) -> None:
    """Without a header nobody says how many ranks there are: as many as a node has GPUs."""
    own = rf"\[rank [{''.join(map(str, silent))}]\] [^\[\n]*"
    text = re.sub(own, "", LOGS["h200-low-latency"]["test_low_latency.log"])
    (tested,) = read_logs({"a.log": text})
    assert ([rank.rank for rank in tested.ranks if rank.state == "missing"], tested.ok) == (missing, not missing)


def test_other_texts_hold_no_test() -> None:
    for text in (
        "",
        "\n",
        "passed\n",
        "0: \n",
        "[rank 3] hello\n",
        "\x00" * 50,
        "RuntimeError: something else\n",
        "EP: none\n",
    ):
        assert read_logs({"a.log": text}) == ()
    assert document(()) == {"test": None, "ok": False, "tests": []}


def test_numbers_that_nobody_means_are_no_world_and_no_end() -> None:
    figures_of = (
        "[rank {}] Dispatch + combine bandwidth: 1.00 GB/s, avg_t=1.00 us, min_t=1.00 us, max_t=1.00 us\n".format
    )
    many = read_logs({"a": figures_of(999_999) + figures_of(0)})[0]
    assert len(many.ranks) == 2
    assert read_logs({"a": figures_of("9" * 5000)}) == ()
    huge = (
        "deepep: job 1 on 999999 node(s): a; rendezvous a:1\n"
        + figures_of(0)
        + "[rank"
        + "9" * 5000
        + "]: ValueError: x\n"
    )
    assert not read_logs({"a": huge})[0].ok
    assert len(read_logs({"a": huge})[0].ranks) <= 4096


def test_the_first_test_of_throughput_is_at_the_top_with_low_latency_of_any() -> None:
    both = read_logs(LOGS["h200-low-latency"] | LOGS["h200-intranode"])
    found = document(both)
    assert (found["test"], found["ok"]) == ("intranode", True)
    assert found["best"]["dispatch_fp8"]["nvl_gbs"] == 324.57
    assert found["low_latency"]["dispatch_combine_gbs"] == {"min": 199.81, "median": 200.165, "max": 200.32}
    assert [each["test"] for each in found["tests"]] == ["low-latency", "intranode"]


def test_line_ends_holes_and_bytes_of_no_alphabet_change_nothing() -> None:
    ((log, text),) = LOGS["h200-low-latency"].items()
    wanted = read_logs({log: text})
    assert read_logs({log: text.replace("\n", "\r\n")}) == wanted
    assert read_logs({log: text.replace("[rank 3]", "\x00\x00\x1b[1m[rank 3]\x1b[0m")}) == wanted
    assert read_logs({log: text.replace("Allocating", "\ufffd\ufffdAllocating")}) == wanted


def test_a_rank_is_slow_by_median_and_deviation() -> None:
    def slow(*values: float) -> list[int]:
        return [rank for rank, _, _ in collectors.outliers(dict(enumerate(values)))]

    assert slow(36, 36, 37, 35, 36, 60) == [5]
    assert slow(36, 36, 37, 35, 36, 41) == []  # within a quarter
    assert slow(20, 36, 55, 70, 38, 90) == []  # all differ widely
    assert slow(36, 36, 80) == []  # too few
    assert slow(36, 36, 36, 36, 80, 90) == [4, 5]
    assert slow(0, 0, 0, 0, 5) == []


def test_the_layout_kernel_is_told_with_tokens_a_second() -> None:
    text = (
        "[config] num_tokens=4096, hidden=7168, num_topk_groups=2, num_topk=8\n"
        "[layout] Kernel performance: 0.042 ms\n\n[testing] Running with BF16, with top-k (async=False, previous=False) ... passed\n"
    )
    (tested,) = read_logs({"node-0-n1.log": text})
    assert tested.operations["layout"].us == model.Spread(42.0, 42.0, 42.0)
    assert [line.split() for line in lines(tested) if "layout" in line] == [
        ["layout", "42.0", "us,", "97.5", "M", "tokens/s"]
    ]


def test_numbers_are_folded() -> None:
    assert collectors.numbers([7, 0, 1, 2, 4]) == "0-2, 4, 7"


def test_people_read_why_a_test_is_not_ok() -> None:
    tested = read_logs(LOGS["ep-16-missing-ranks"])[0]
    text = "\n".join(lines(tested))
    assert "FAILED" in text
    assert "figures are missing of ranks 6, 13" in text
    assert "missing 6: printed no figures" in text
    assert "missing 13: printed no reduced combine in case 3" in text
    assert faults(read_logs(LOGS["h200-intranode"])[0]) == ()
    slow = "\n".join(lines(read_logs(LOGS["low-latency-slow-rank"])[0]))
    assert "7 ok, 1 slow" in slow
    assert "slow 5: dispatch 5" in slow


def invoke(*words: str, text: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "invoke", "results", *words], cwd=ROOT, input=text, capture_output=True, check=False
    )


@pytest.mark.usefixtures("programs")
def test_the_verb_reads_files_folders_globs_and_standard_input(tmp_path: Path) -> None:
    folder = "tests/cases/analysis/results/h200-intranode"
    done = invoke(
        folder, "--log=tests/cases/analysis/results/h200-low-*/*.log", f"{folder}/test_intranode.log", "--json"
    )
    found = json.loads(done.stdout)
    assert (done.returncode, found["exit"], found["verb"], found["schema"], found["errors"]) == (0, 0, "results", 1, [])
    assert found["low_latency"]["dispatch_us"] == 36.03
    assert [each["log"] for each in found["tests"]] == [
        f"{folder}/test_intranode.log",
        f"{folder[:-9]}low-latency/test_low_latency.log",
    ]
    assert invoke("-", text=b"\xff\xfe\n" + (ROOT / folder / "test_intranode.log").read_bytes()).returncode == 0


def test_the_verb_says_no_to_what_is_not_ok(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ((_, text),) = LOGS["h200-intranode"].items()
    (tmp_path / "cut.log").write_text(text[:4000], encoding="utf-8")
    assert verb.results(str(tmp_path)) == 4
    assert "the log stops early" in capsys.readouterr().out
    assert verb.results(str(tmp_path), json=True) == 4
    found = json.loads(capsys.readouterr().out)
    assert (found["exit"], found["ok"], found["errors"][0]["where"]) == (4, False, f"{tmp_path}/cut.log:2")
    (tmp_path / "cut.log").write_bytes(b"")
    with pytest.raises(Trouble, match="no test of DeepEP in it"):
        verb.results(str(tmp_path))


def test_a_run_folder_counts_each_log_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name, text in LOGS["internode-run-folder"].items():
        (run / name).write_text(text, encoding="utf-8")
    (run / "job.log").rename(tmp_path / "slurm-7.out")
    (run / "job.log").symlink_to(tmp_path / "slurm-7.out")
    names = verb.files([str(tmp_path), str(run / "job.log")])
    assert sorted(Path(name).name for name in names) == sorted(LOGS["internode-run-folder"])
    tests = read_logs({name: logs.read_log(name, "") for name in names})
    assert [(tested.ok, tested.passed, tested.log) for tested in tests] == [(True, 32, str(run / "node-0-gpu-001.log"))]


def test_what_cannot_be_read_is_trouble(tmp_path: Path) -> None:
    for words in (
        [str(tmp_path / "none")],
        [str(tmp_path)],
        [""],
        [str(tmp_path / "*.log")],
        ["x" * 300],
        ["~no such user/log"],
    ):
        with pytest.raises(Trouble, match="no log there"):
            verb.files(words)
    with pytest.raises(Trouble, match="cannot be read"):
        logs.read_log(str(tmp_path), "")


NAMES_OF_ALL_KEYS = ("ep-16-missing-ranks", "two-tests", "internode-merged", "low-latency-two-passes")


def test_the_document_has_the_keys_that_its_description_has() -> None:
    frame = {"schema": 1, "verb": "results", "exit": 0, "errors": []}
    printed = [{**frame, **verb.document(read_logs(LOGS[name]))} for name in NAMES_OF_ALL_KEYS]
    free = FREE_KEYS["results"]
    assert {key for found in printed for key in keys(found, free)} == set(keys(EXAMPLES["results"], free))
    assert all(set(found) == set(EXAMPLES["results"]) for found in printed)
    assert all(set(each) == set(EXAMPLES["results"]["tests"][0]) for found in printed for each in found["tests"])
