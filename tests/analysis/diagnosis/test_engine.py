"""Causes named from logs: faults in rules, what ends well and what does not, what hides what, what is told as a state,
healthy logs, and the verb. test_recorded_logs.py has what is told of all recorded logs."""

from __future__ import annotations

import functools
import itertools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from deepep_bootstrap.analysis.diagnosis import outcomes
from deepep_bootstrap.analysis.diagnosis.engine import LIKELY_MOST, SHARED_MOST, SURE, advice, as_json, brief, diagnose
from deepep_bootstrap.analysis.diagnosis.log import Log
from deepep_bootstrap.analysis.diagnosis.rules import compile_pattern, join, load_causes, shipped_causes
from deepep_bootstrap.cli.commands.diagnose import diagnose as verb
from deepep_bootstrap.core.errors import OK, Trouble
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.plan.host_recipes import TITLES
from deepep_bootstrap.testing.run_folder import Judgement, RunVerdict, judgement_text
from tests.support.diagnosis import A_CAUSE, BOOK, CONFIDENT, RULES, SLUGS, diagnosed, slug_of
from tests.support.examples import most, spread
from tests.support.paths import ROOT

CASES = ROOT / "tests" / "cases" / "diagnosis" / "rules"
MINIMAL = """
[[cause]]
slug = "a-cause"
title = "something"
why = "because"
fix = "do it"
source = "seen"
sign = [{ find = "it broke in two", weight = 0.9 }]
"""


@functools.cache
def cases(kind: str) -> list[Path]:
    return sorted((CASES / kind).glob("*.log"))


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


CASES_OF: dict[str, list[Path]] = {slug: [] for slug in SLUGS}
for case in cases("failing"):
    CASES_OF.setdefault(slug_of(case), []).append(case)


def told(text: str, **logs: str) -> list[str]:
    found = diagnose({"log": text, **logs}, BOOK) if logs else diagnosed("log", text)
    return [finding.cause for finding in found.known]


def test_there_are_a_hundred_causes_each_with_its_source() -> None:
    assert len(SLUGS) >= 100
    assert [cause.slug for cause in BOOK.causes if len(cause.source) < len("PEP 668")] == []


OF_ONE_CASE = re.compile(
    r"(?:\d{1,3}\\?\.){3}\d|[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\\?\.|/home/\w|/root/\w|/workspace/|/sgl-|(?<![\d{,])\d{5,}(?!\})"
)
CODES = {"764216", "16384", "65536", "20013"}
"""A syndrome of a NIC, the same on every machine, limits of locked memory that distributions set, a warning of nvcc."""


def test_every_shipped_pattern_can_be_used() -> None:
    """They are not tried when they are read; the same text under another name is."""
    own = [load_causes(text, name, BOOK) for name, text in RULES.items()]
    assert functools.reduce(join, own) == BOOK


@pytest.mark.parametrize(("mark", "first"), [("", "effect"), ("effect = true", "root")])
def test_what_others_bring_about_is_told_after_what_is_as_likely(mark: str, first: str) -> None:
    effect = MINIMAL.replace("a-cause", "effect").replace('source = "seen"', f'source = "seen"\n{mark}')
    root = MINIMAL.replace("a-cause", "root").replace("it broke in two", "no oil was left")
    found = diagnose(
        {"log": "error: it broke in two\nerror: no oil was left\n"}, load_causes(effect + root, "own", BOOK)
    )
    assert [each.cause for each in found.known] == [first, *({"effect", "root"} - {first})]


@pytest.mark.parametrize(
    ("above", "told"), [("", 0.9), ("ValueError: the odd engine wants another oil\n", LIKELY_MOST)]
)
def test_what_others_bring_about_is_less_than_sure_after_an_error(above: str, told: float) -> None:
    effect = MINIMAL.replace('source = "seen"', 'source = "seen"\neffect = true')
    rules = join(BOOK, load_causes(effect, "own", BOOK))
    (finding,) = diagnose({"log": f"{above}error: it broke in two\n"}, rules).known
    assert finding.confidence == told


def test_the_files_of_a_folder_are_one_set_of_rules() -> None:
    """What is wrong between two files is told with the file that came second."""
    hiding = MINIMAL.replace("a-cause", "b-cause").replace('source = "seen"', 'source = "seen"\nhides = ["a-cause"]')
    both = shipped_causes(
        {"rules/causes/a.toml": MINIMAL, "rules/causes/b.toml": hiding, "rules/passes.toml": "no TOML"}
    )
    assert [cause.slug for cause in both.causes] == ["a-cause", "b-cause"]
    with pytest.raises(Trouble, match=r"env/rules/causes/b\.toml: cause: two causes have the same slug"):
        shipped_causes({"rules/causes/a.toml": MINIMAL, "rules/causes/b.toml": MINIMAL})
    with pytest.raises(Trouble, match=r"env/rules/causes/b\.toml: cause: b-cause hides a cause that is not there"):
        shipped_causes({"rules/causes/b.toml": hiding})
    with pytest.raises(Trouble, match="env/rules/causes: has no rules"):
        shipped_causes({})


def test_a_shipped_pattern_that_somebody_broke_is_told() -> None:
    broken = load_causes(MINIMAL.replace("it broke in two", "it broke in (two"), "env/rules/causes/own.toml")
    with pytest.raises(Trouble, match="no regular expression"):
        diagnose({"log": "it broke in two\nsegmentation fault, it broke in two\n"}, broken)


def test_no_pattern_quotes_what_only_one_case_has() -> None:
    patterns = {
        (cause.slug, pattern.regex.pattern)
        for cause in BOOK.causes
        for pattern in (*cause.needs, *cause.never, *(rule.find for rule in (*cause.signs, *cause.contexts)))
    }
    found = {(slug, match[0]) for slug, source in patterns for match in OF_ONE_CASE.finditer(source)}
    assert {(slug, text) for slug, text in found if text not in CODES} == set()


def test_no_rule_fires_on_its_near_miss() -> None:
    """Logs that fail too, with words of the cause and without the cause."""
    found = {path.stem: diagnosed(path.name, read(path)) for path in cases("near")}
    assert set(found) <= set(SLUGS)
    assert [slug for slug, diagnosis in found.items() if not diagnosis.failure] == []
    assert [slug for slug, diagnosis in found.items() if slug in [each.cause for each in diagnosis.findings]] == []


def test_a_step_that_a_remedy_names_is_one() -> None:
    named = set(re.findall(r"(?:\(|, )step ([a-z][a-z-]*)", "".join(RULES.values())))
    assert named <= {*TITLES, "build-deps", "module-hook"}
    assert {"fabric-manager", "peer-memory", "doca-ofed", "build-deps"} <= named


def labelled(lines: list[str]) -> str:
    return "\n".join(f"3: {line}" for line in lines)


def coloured(lines: list[str]) -> str:
    return "\n".join(f"\x1b[36m(Worker pid=77)\x1b[0m {line}" for line in lines)


def dated(lines: list[str]) -> str:
    return "\r\n".join(f"2026-11-20T10:00:0{number % 10}.123Z {line}" for number, line in enumerate(lines))


@pytest.mark.parametrize("as_others_write", [labelled, coloured, dated])
def test_labels_colours_and_times_change_nothing(as_others_write: Callable[[list[str]], str]) -> None:
    """Each rule's cases in one of these ways: which one is chance, and its further cases are in the others."""
    ways = itertools.cycle((labelled, coloured, dated))
    mine = [path for path, way in zip(cases("failing"), ways, strict=False) if way is as_others_write]
    texts = {path.name: read(path) for path in spread(mine)}
    want = {name: diagnosed(name, text).findings[0].cause for name, text in texts.items()}
    seen = {name: told(as_others_write(text.splitlines()))[:1] for name, text in texts.items()}
    assert {name: found for name, found in seen.items() if found != [want[name]]} == {}


def test_healthy_and_unrelated_logs_have_no_cause() -> None:
    found = {path.name: told(read(path)) for path in (*cases("healthy"), *cases("unrelated"))}
    assert {name: causes for name, causes in found.items() if causes} == {}


def test_expected_noise_is_told_to_be_harmless() -> None:
    notes = {note.about for path in cases("healthy") for note in diagnosed(path.name, read(path)).notes}
    assert {"ibgda-without-nic", "other-rdma-providers", "nccl-looks-around", "process-group-left-open"} <= notes
    failed = {path.stem: {note.about for note in diagnosed(path.name, read(path)).notes} for path in cases("unrelated")}
    assert all("ibgda-without-nic" in notes for name, notes in failed.items() if name.startswith("one-node-"))
    assert {name for name, notes in failed.items() if "ended-from-outside" in notes} == {
        "slurm",
        "one-node-hang",
        "time-limit-killed",
    }


def test_between_nodes_the_missing_transport_is_not_called_harmless() -> None:
    text = (
        "python tests/test_internode.py\ninit failed for transport: IBGDA\nTraceback (most recent call "
        "last):\nRuntimeError: boom\n"
    )
    assert "ibgda-without-nic" not in {note.about for note in diagnose({"log": text}, BOOK).notes}


def test_the_missing_transport_is_a_sign_where_another_log_shows_several_nodes() -> None:
    rank = "init failed for transport: IBGDA\nTraceback (most recent call last):\nRuntimeError: boom\n"
    assert told(rank) == told(rank, job="deepep: job 7 on 1 node(s): a; rendezvous a:8361\n") == []
    assert told(rank, job="deepep: job 7 on 2 node(s): a b; rendezvous a:8361\n")[0] == "ibgda-driver-config"


def test_warnings_of_torch_are_signs_only_of_what_failed() -> None:
    warning = read(CASES / "healthy" / "torch-client.log")
    assert diagnose({"log": warning}, BOOK).failure is None
    found = diagnose({"log": warning, "other": "Traceback (most recent call last):\n"}, BOOK)
    assert [finding.cause for finding in found.findings] == ["bootstrap-wrong-interface"]
    assert found.failure
    assert found.failure.log == "other"


def test_a_warning_is_a_sign_only_where_its_rule_says_so() -> None:
    own = load_causes(
        MINIMAL.replace("}]", '}, { find = "a crack was seen", weight = 0.8, warned = true }]'), "own.toml"
    )
    book = join(replace(BOOK, causes=()), own)
    for level in ("WARNING 11-12 09:00:00 [a.py:3] ", "[W1112 09:00:00.1 a.cpp:3] ", "libfabric:1:a():3<warn> "):

        def causes(words: str, end: str, level: str = level) -> list[str]:
            return [each.cause for each in diagnose({"log": f"{level}{words}\n{end}\n"}, book).findings]

        assert causes("it broke in two", "KeyError: 'a'") == []
        assert causes("a crack was seen", "KeyError: 'a'") == ["a-cause"]
        assert causes("a crack was seen", "fine") == []
    assert [each.cause for each in diagnose({"log": "n1 NCCL WARN it broke in two\n"}, book).findings] == ["a-cause"]


STEPS = "".join(f"iteration {number}/900 loss: 2.1\n" for number in range(3))


def test_three_steps_of_all_ranks_end_what_stands_before_them() -> None:
    flap = "n3:7:9 [2] NCCL WARN NET/IB : Got async event : port error\n"
    assert told(flap) == told(flap + "iteration 1/900 loss: 2.1\n") == ["nic-port-went-down"]
    assert told(flap + STEPS) == told(flap + STEPS + "KeyError: 'a'\n") == []
    assert told(STEPS + flap) == ["nic-port-went-down"]
    found = diagnose({"log": flap + STEPS}, BOOK)
    assert (found.first, [note.about for note in found.notes]) == (None, ["nic-port-went-down"])


def test_what_died_is_not_alive_by_the_lines_of_others() -> None:
    died = "Traceback (most recent call last):\nKeyError: 'a'\n"
    assert diagnose({"log": died + STEPS}, BOOK).first
    assert diagnose({"log": died + "restarting worker group\n" + STEPS}, BOOK).first is None


@pytest.mark.parametrize(
    ("pid", "lines", "died"), [("(Worker pid=91) ", 3, False), ("(Worker pid=91) ", 2, True), ("rank 3: ", 3, True)]
)
def test_a_process_that_went_on_after_its_traceback_did_not_die(pid: str, lines: int, died: bool) -> None:
    """It caught an optional library's failure. Only a label with a process number tells it from one started anew."""
    text = f"{pid}Traceback (most recent call last):\n{pid}OSError: libodd.so: cannot open shared object file\n"
    text += "".join(f"{pid}INFO 11-20 10:00:0{n} [layer.py:9] loading\n" for n in range(lines))
    assert (diagnose({"log": text + "Application startup complete.\n"}, BOOK).first is not None) == died


def test_what_a_person_ran_in_a_pod_ends_nothing_else() -> None:
    text = "ERROR: test 7 is odd\ncommand terminated with exit code 1\nApplication startup complete.\n"
    assert diagnose({"log": text}, BOOK).first is None
    assert diagnose({"log": text.replace("command terminated", "server ended")}, BOOK).first


@pytest.mark.parametrize(
    ("end", "failed"),
    [
        ("8 COMPLETED 0:0", False),
        ("8            ep-smoke  COMPLETED      0:0", False),
        ("8.extern COMPLETED 0:0", True),
        ("7 FAILED 1:0\n8 COMPLETED 0:0", True),
        ("7 OUT_OF_ME+ 0:125\n8 COMPLETED 0:0", True),
        ("8 COMPLETED 0:0\nFAIL: bandwidth 0.26 GB/s is below 40", True),
        ("8 COMPLETED 0:0\nFAIL: 0", False),
    ],
)
def test_what_slurm_says_of_a_job_is_how_it_ended(end: str, failed: bool) -> None:
    text = f"[n18:8214] PMIX ERROR: OUT-OF-RESOURCE in file a.c at line 750\nbandwidth 24340.77\n{end}\n"
    assert (diagnose({"log": text}, BOOK).first is not None) == failed


@pytest.mark.parametrize(
    ("below", "failed"),
    [
        ("checkpoint /ckpt/step_200 is saved", False),
        ("[userx@n1 ~]$ echo $?\n0", False),
        ("checkpoint /ckpt/step_200 is saved\n[userx@n1 ~]$ mpirun ./odd\n[userx@n1 ~]$ echo $?\n213", True),
        ("[userx@n1 ~]$ for h in n1 n2; do ssh $h hostname; done", True),
        ("error: [job 23] prolog failed status=1:0\n_job_complete: JobId=23 done", True),
        ("error: [job 23] epilog failed status=1:0\n$ sacct -j 23\n23  odd  COMPLETED  0:0  00:22:51", True),
        ("[n1:9] TCP SHUTDOWN done\n", True),
    ],
)
def test_a_good_end_is_what_a_program_says_or_an_exit_code_of_0(below: str, failed: bool) -> None:
    text = f"ERROR: odd could not be done\n{below}\n"
    assert (diagnose({"log": text}, BOOK).first is not None) == failed


def test_a_typed_command_is_no_sign_where_nothing_failed() -> None:
    text = "[userx@n1 ~]$ nvidia-smi --query-remapped-rows=remapped_rows.pending,remapped_rows.failure --format=csv\nNo, No\n"
    assert diagnose({"log": text}, BOOK).findings == ()


def test_a_command_that_only_looks_is_no_sign() -> None:
    died = "RuntimeError: odd\n"
    for typed in ("docker inspect -f '{{.State.OOMKilled}}' odd", "dmesg -T | grep 'Out of memory: Killed process'"):
        assert told(f"{died}$ {typed}\n") == told(f"{died}[root@n1 ~]# {typed}\n") == []
    assert told(f"{died}n1 kernel: Out of memory: Killed process 77 (python)\n") == ["host-oom-kill"]


@pytest.mark.parametrize(
    ("end", "failed"),
    [
        ("/bin/sh: 1: oddcc: not found", True),
        ("level=ERROR the odd library is not there", True),
        ("level=ERROR the odd library is not there\n    at its place\n\n[userx@n1 ~]$ ls", True),
        ("level=ERROR the odd library is not there\nlistening", False),
        ("thread 'main' panicked at src/odd.rs:5:9:\nno odd server\nlistening", True),
        ("Fatal error in PMPI_Init: Other MPI error, error stack:\nlistening", True),
        ("python: can't open file '/odd.py': [Errno 2] No such file or directory", True),
        ("level=ERROR the odd library is not there\nlevel=WARN odd", False),
        ("saved checkpoint 3\n==== job 7 end 2024-02-19T02:11:52 rc=213 ====", True),
    ],
)
def test_a_log_that_ends_in_an_error_has_failed(end: str, failed: bool) -> None:
    """The same line is none where more is told below it: a server prints it and goes on."""
    assert (diagnose({"log": f"starting\n{end}\n"}, BOOK).first is not None) == failed


def test_what_a_run_got_over_is_a_note() -> None:
    text = read(CASES / "failing" / "ibgda-driver-config.log").replace("Fatal Python error: Segmentation fault", "")
    well = "[tuning] Best combine: SMs 24, NVL chunk 2, RDMA chunk 12: 57.02 GB/s (RDMA), 186.10 GB/s (NVL)\n"
    found = diagnose({"log": text + well}, BOOK)
    assert not found.findings
    assert "ibgda-driver-config" in {note.about for note in found.notes}
    assert told(text + well + "Fatal Python error: Segmentation fault\n")[0] == "ibgda-driver-config"


def test_whoever_runs_the_whole_job_is_believed_that_it_went_well() -> None:
    """A process may die of something at its exit; another program's good end takes back nothing."""
    died = "Traceback (most recent call last):\nBrokenPipeError: [Errno 32] Broken pipe\n"
    assert diagnose({"log": died + "Job 'raysubmit_8Hq2' succeeded\n"}, BOOK).first is None
    assert diagnose({"log": died + "Successfully installed odd-1.0\n"}, BOOK).first
    assert diagnose({"log": "Job 'raysubmit_8Hq2' succeeded\n" + died}, BOOK).first


@pytest.mark.parametrize(
    ("end", "failed"),
    [
        ("==== job 60211 done, exit 0 ====", False),
        ("acceptance n[1-2]: PASS (exit 0)", False),
        ("+ exit 0", False),
        ("==== job 60211 done, exit 0 ====\nlistening", True),
        ("==== job 60211 done, exit 3 ====", True),
        ("200 0.714203", False),
        ("n2 : ok=4 changed=1 unreachable=0 failed=1 skipped=0", True),
        ("[testing] case 4 ... passed", True),
    ],
)
def test_the_last_line_of_a_log_is_a_verdict_on_all_of_it(end: str, failed: bool) -> None:
    died = "Traceback (most recent call last):\nOddError: odd\nsrun: error: n1: task 0: Exited with exit code 1\n"
    assert bool(diagnose({"log": f"{died}{end}\n\n"}, BOOK).first) == failed


@pytest.mark.parametrize(
    ("before", "after", "failed"), [("odd: attempt 2\n", "", True), ("", "odd: attempt 2\n", False), ("", "", True)]
)
def test_what_died_is_tried_again_only_by_what_comes_after_it(before: str, after: str, failed: bool) -> None:
    log = (
        f"error: odd could not be done\n{before}n1 : ok=9 changed=3 unreachable=0 failed=1 skipped=1\n"
        f"{after}n2 : ok=7 changed=3 unreachable=0 failed=0 skipped=1\n"
    )
    assert bool(diagnose({"log": log}, BOOK).first) == failed


def test_a_line_that_tells_a_cause_is_the_first_error_where_nothing_says_how_the_log_ended() -> None:
    marked = "there are not enough slots available in the system to satisfy the 20\nlistening\n"
    found = diagnose({"log": f"starting\n{marked}"}, BOOK)
    assert [each.cause for each in found.findings] == ["openmpi-slots"]
    assert found.failure
    assert found.failure.line == 2
    assert diagnose({"log": f"{marked}all tests passed\n"}, BOOK).first is None
    assert diagnose({"log": "level=ERROR the odd library is not there\nlistening\n"}, BOOK).first is None


PODS = "NAME        READY   STATUS    RESTARTS   AGE\n"


@pytest.mark.parametrize(
    ("later", "failed"),
    [
        (f"{PODS}worker-a    2/2     Running   0          6m\nother-b     1/1     Running   0          3h\n", False),
        (f"{PODS}pod/worker-a    2/2     Running   1 (5m ago)     6m\n", False),
        (f"{PODS}worker-a    1/2     Running   0          6m\n", True),
        (f"{PODS}worker-a    2/2     Running   0          6m\nother-b     0/1     Error     0          3h\n", True),
        (f"{PODS}other-b     1/1     Running   0          3h\n", True),
    ],
)
def test_pods_that_became_ready_are_a_good_end(later: str, failed: bool) -> None:
    """Where those that were not ready before are ready at last, and no other fails."""
    log = (
        f"{PODS}worker-a    0/2     Init:0/1  0          6s\n"
        f"E0102 03:04:05.000000  7 odd.go:9] failed to be odd\n{later}"
    )
    assert bool(diagnose({"log": log}, BOOK).first) == failed


@pytest.mark.parametrize(
    ("later", "failed"),
    [
        ("root@n1:~# modprobe odd\nroot@n1:~# lsmod\n", False),
        ("root@n1:~# modprobe odd\nmodprobe: FATAL: Module odd not found in directory /lib/modules/6.8\n", True),
        ("root@n1:~# modprobe even\n", True),
        ("", True),
    ],
)
def test_a_command_that_went_well_when_it_was_typed_again_did_not_fail(later: str, failed: bool) -> None:
    log = (
        "root@n1:~# modprobe odd\nmodprobe: FATAL: Module odd not found in directory /lib/modules/6.8\n"
        f"root@n1:~# depmod -a\n{later}"
    )
    assert bool(diagnose({"log": log}, BOOK).first) == failed


@pytest.mark.parametrize(
    ("between", "failed"),
    [("+ sleep 5\n", False), ("+ sleep 5\n+ echo again\nagain\n", False), ("+ scp odd n2:\n", True)],
)
def test_a_command_that_a_script_tries_again_at_once_did_not_fail(between: str, failed: bool) -> None:
    """The same command elsewhere in a script is another use of it, mostly of another host or file."""
    log = f"+ ib_write_bw n2\nCouldn't connect to n2:18515\n{between}+ ib_write_bw n2\n65536 5000 391.84\n"
    assert bool(diagnose({"log": log}, BOOK).first) == failed


def test_a_command_that_only_looks_takes_no_failure_back() -> None:
    log = "root@n1:~# dmesg | tail\nCUDA error: an illegal memory access\nroot@n1:~# dmesg | tail\nquiet\n"
    assert diagnose({"log": log}, BOOK).first


def test_an_exit_code_of_0_that_somebody_asked_for_is_a_good_end() -> None:
    log = "n1:1:2 [0] UCX  ERROR send(fd=-1) failed: Bad file descriptor\nuserx@n1:~$ echo $?\n"
    assert diagnose({"log": f"{log}0\n"}, BOOK).first is None
    assert diagnose({"log": f"{log}1\n"}, BOOK).first
    assert diagnose({"log": f"{log}0\nsrun: error: n1: task 0: Exited with exit code 1\n"}, BOOK).first


def test_a_warning_tells_the_cause_where_nothing_else_tells_of_an_error() -> None:
    rules = load_causes(A_CAUSE + "sign = [{ find = 'could not load odd', weight = 0.95 }]\n", "own.toml", BOOK)
    rules = join(BOOK, rules)
    warned = "W0819 07:02:54.757556 1 rm.go:109] could not load odd.so\n"
    ended = "Back-off restarting failed container\n"
    (finding,) = diagnose({"log": warned + ended}, rules).findings
    assert (finding.cause, finding.confidence) == ("a-cause", SHARED_MOST)
    assert diagnose({"log": warned + "RuntimeError: 7 is no number of ours\n" + ended}, rules).known == ()


def test_a_first_error_with_an_object_goes_before_what_only_followed() -> None:
    log = (
        "slurmstepd: error: pyxis: child 185257 failed with error code: 1\n"
        "slurmstepd: error: pyxis:     zstd: /raid/layers/d9270b9c: Permission denied\n"
        "slurmstepd: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1\n"
    )
    found = diagnose({"log": log}, BOOK).findings
    assert [each.cause for each in found][:2] == ["not-permitted", "slurm-spank-plugin"]
    assert found[0].title == "a process may not use a path: /raid/layers/d9270b9c"


def test_an_exception_of_a_cpp_program_is_told_without_what_stands_before_it() -> None:
    log = "terminate called after throwing an instance of 'std::runtime_error'\n  what():  cudaMalloc failed: out of memory\n"
    (found,) = diagnose({"log": log}, BOOK).findings
    assert found.title == "a program asked for more GPU memory than is left: cudaMalloc failed: out of memory"


def test_slowness_counts_in_a_run_that_ended_well() -> None:
    slow = read(CASES / "failing" / "nic-mapping-single-nic.log")
    assert told(slow) == ["nic-mapping-single-nic"]
    assert told(re.sub(r"(: |BW: )6\.", r"\g<1>56.", slow)) == []


def test_the_root_is_told_before_what_follows_from_it() -> None:
    killed = read(CASES / "failing" / "host-oom-kill.log")
    waiting = "Global rank: 9, num_recv_tokens: -1\nRuntimeError: DeepEP error: timeout (dispatch CPU)\n"
    assert told(waiting + killed)[0] == "host-oom-kill"
    assert told(waiting, other=killed)[0] == "host-oom-kill"


def test_the_first_of_two_sure_causes_is_told_first() -> None:
    one, other = (read(CASES / "failing" / f"{slug}.log") for slug in ("mpi-not-found", "libstdcxx-too-old"))
    assert told(one + other)[:2] == ["mpi-not-found", "libstdcxx-too-old"]
    assert told(other + one)[:2] == ["libstdcxx-too-old", "mpi-not-found"]


def test_context_decides_between_causes_of_one_message() -> None:
    wait = (
        "Global rank: 1, num_recv_tokens: -1, num_rdma_recv_tokens: -1\nRuntimeError: DeepEP error: timeout "
        "(dispatch CPU)\n"
    )
    assert told("NVSHMEM version 3.5.19\n" + wait)[0] == "deepep-too-old-for-nvshmem-3-5"
    assert (
        told(" > NVSHMEM path: /v/lib/python3.12/site-packages/nvidia/nvshmem\n" + wait)[0]
        == "nvshmem-built-without-ibgda"
    )
    assert told("Entering DeepGEMM JIT Pre-Compile session\n" + wait)[0] == "peer-late-jit-compile"
    assert told("NVSHMEM_IBGDA_NIC_HANDLER=cpu\n" + wait)[0] == "ibgda-driver-config"


def test_where_nothing_decides_the_checks_are_named() -> None:
    found = diagnose({"log": "RuntimeError: DeepEP error: timeout (dispatch CPU)\n"}, BOOK).findings
    assert len(found) >= 3
    assert all(finding.confidence < SURE for finding in found)
    assert all("To be sure first" in advice(finding) for finding in found)


def test_a_message_cut_or_wrapped_is_found() -> None:
    assert told("Failed: CUDA error internode.cu:133 'named symb\nol not found'\n") == ["arch-mismatch-build"]
    assert told(
        "1: the detected CUDA version mismatches the version that\n2: [layout] ok\n1: was used to compile PyTorch\n"
    ) == ["torch-cuda-mismatch"]
    assert told("a.cpp:3: named symbol not founda.cpp:3: named symbol not found\n\n") == ["arch-mismatch-build"]


def test_evidence_names_the_file_of_several_logs() -> None:
    first, second = (read(CASES / "failing" / f"{slug}.log") for slug in ("mpi-not-found", "libstdcxx-too-old"))
    found = as_json(diagnose({"a.log": first, "b.log": second}, BOOK))["findings"]
    assert {evidence["file"] for finding in found for evidence in finding["evidence"]} == {"a.log", "b.log"}
    assert "file" not in as_json(diagnose({"a.log": first}, BOOK))["findings"][0]["evidence"][0]


def test_in_brief() -> None:
    lines = brief(diagnose({"build.log": read(CASES / "failing" / "mpi-not-found.log")}, BOOK))
    assert lines[0].startswith("cause: MPI is wanted, and its headers")
    assert lines[1].startswith("build.log, line ")
    assert brief(diagnose({"build.log": "all well\n"}, BOOK)) == ()


GOT_OVER = {"benchmark-no-failed-request", "elastic-restart", "megatron-port-flap", "pods-ready", "unittest-teardown"}
"""Their lines are benign only because the run went on after them."""

BENIGN = [
    line
    for path in cases("healthy")
    for line in read(path).splitlines()
    # A traffic class is well on Ethernet; beside `link_layer: InfiniBand` of another log it is a cause of its own.
    if line and "Best " not in line and "TRAFFIC_CLASS" not in line and path.stem not in GOT_OVER
]
GOES_WELL = (*BOOK.ending.well, *BOOK.ending.going, *BOOK.ending.together)
WELL = re.compile("|".join(pattern.regex.pattern for pattern in GOES_WELL), re.IGNORECASE)
QUIET = [line for line in BENIGN if not WELL.search(line)]
DECIDING = re.compile(
    "|".join(
        pattern.regex.pattern
        for cause in BOOK.causes
        for rule in (cause, *cause.signs)
        for pattern in (*rule.needs, *rule.never, *(context.find for context in cause.contexts))
    ),
    re.IGNORECASE,
)
"""What decides between causes, such as a limit that is high enough: it is to change what is told."""

INDIFFERENT = [line for line in QUIET if not DECIDING.search(line)]


@given(
    st.sampled_from(cases("failing")),
    st.lists(st.sampled_from(INDIFFERENT), max_size=6),
    st.lists(st.sampled_from(INDIFFERENT), max_size=6),
)
@example(
    CASES / "failing" / "bootstrap-wrong-interface-4.log",
    [
        "memory.events: oom_kill=0",
        "WARN: device mlx5_3 cannot allocate buffer on the specified memory type. Skipping...",
    ],
    [],
)
@settings(max_examples=most(80), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_lines_of_healthy_logs_around_change_nothing(path: Path, before: list[str], after: list[str]) -> None:
    text = read(path)
    # A cause that is not quite sure may give way to another one that a further line is a sign of.
    assume(diagnosed("log", text).findings[0].confidence >= CONFIDENT)
    assert told("\n".join([*before, text.rstrip("\n"), *after]) + "\n")[0] == told(text)[0]


def test_a_line_of_a_healthy_log_names_no_cause_in_a_failure_that_nobody_knows() -> None:
    texts = [text for line in dict.fromkeys(QUIET) for text in (f"{line}\n{UNKNOWN}", f"{UNKNOWN}{line}\n")]
    found = {text: diagnose({"log": text}, BOOK).findings for text in texts}
    assert {text: each for text, each in found.items() if any(one.confidence >= SURE for one in each)} == {}


ALL_LINES = sorted({line for path in cases("failing") for line in read(path).splitlines()})


@given(st.lists(st.one_of(st.sampled_from(ALL_LINES), st.text(max_size=80)), max_size=30))
@settings(max_examples=most(100), deadline=None)
def test_any_mixture_of_lines_is_diagnosed(lines: list[str]) -> None:
    text = "\n".join(lines)
    found = diagnose({"log": text}, BOOK)
    total = len(text.replace("\r\n", "\n").split("\n"))
    for finding in found.findings:
        assert 0 < finding.confidence <= 1
        assert all(1 <= evidence.line <= total for evidence in finding.evidence)
    json.dumps(as_json(found))


@given(st.binary(max_size=400))
@example(b"\xff\xfe\x00\x1b[31mError\x1b")
@example("İİİ named symbol not found İ".encode())
@settings(max_examples=most(150), deadline=None)
def test_any_bytes_are_diagnosed(data: bytes) -> None:
    as_json(diagnose({"log": data.decode("utf-8", "replace")}, BOOK))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("named symbol not found", {"named symbol not found"}),
        (r"(?:foo bar|baz+quux) x?", {"foo bar", "quux"}),
        (r"libmlx5-rdmav\d+\.so", {"libmlx5-rdmav"}),
        (r"(?-i:\bKilled\b)", {"killed"}),
        (r"colou?r of it", {"r of it"}),
        (r"[)(|]+ three [^]]*words\]", {"words]", " three "}),
    ],
)
def test_words_that_every_match_contains(source: str, words: set[str]) -> None:
    assert set(compile_pattern(source).words) <= words


def test_every_match_of_a_rule_contains_one_of_its_words() -> None:
    """In its own cases, some of which each matches."""
    silent, wordless = [], []
    for cause in BOOK.causes:
        lines = [line for path in CASES_OF[cause.slug] for line in read(path).splitlines()]
        matches = [(sign, match) for sign in cause.signs for line in lines if (match := sign.find.regex.search(line))]
        silent += [] if matches else [cause.slug]
        wordless += [
            (cause.slug, match[0])
            for sign, match in matches
            if not any(word in match[0].lower() for word in sign.find.words)
        ]
    assert (silent, wordless) == ([], [])


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (r"(a+)+b", "repeated group"),
        (r"(foo)\1 barbar", "reference"),
        (r"a.b", "no word"),
        (r"foo|", "matches nothing"),
        (r"foo(", "no regular expression"),
        (r"foo[", "no regular expression"),
    ],
)
def test_patterns_that_cannot_be_searched_quickly_are_refused(source: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        compile_pattern(source)


def test_a_long_line_is_searched_around_its_words() -> None:
    text = "x" * 300_000 + " named symbol not found " + "y" * 300_000
    hit = next(Log("log", text).find(compile_pattern("named symbol not found")))
    assert hit.line == 0
    assert "named symbol not found" in hit.text
    assert len(hit.text) < 300


def test_a_rule_of_the_users_own() -> None:
    own = load_causes(MINIMAL, "own.toml")
    assert [finding.cause for finding in diagnose({"log": "so it broke in two\n"}, join(BOOK, own)).findings] == [
        "a-cause"
    ]
    replaced = load_causes(MINIMAL.replace("a-cause", "mpi-not-found"), "own.toml")
    assert len(join(BOOK, replaced).causes) == len(BOOK.causes)
    assert told("so it broke in two\n") == []
    load_causes(MINIMAL.replace('source = "seen"', 'source = "seen"\nhides = ["mpi-not-found"]'), "own.toml", BOOK)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("weight = 0.9", 'weight = 0.9, never = ["ab"]'), r"sign\[1\]\.never: cannot be used: no word"),
        (('slug = "a-cause"', 'slug = "A cause"'), r"cause\[1\]\.slug: is not what belongs here"),
        (('why = "because"', ""), r"cause\[1\]\.why: is missing"),
        (("weight = 0.9", "weight = 9.5"), r"sign\[1\]\.weight: is out of range"),
        (("weight = 0.9", 'weight = "much"'), r"sign\[1\]\.weight: is of the wrong type"),
        (("it broke in two", "(it+)+"), r"sign\[1\]\.find: cannot be used: a repeated group"),
        (('fix = "do it"', 'fix = "do it"\nfixx = 3'), "unknown key, did you mean fix"),
        (('sign = [{ find = "it broke in two", weight = 0.9 }]', ""), r"cause\[1\]\.sign: is missing or empty"),
        (('source = "seen"', 'source = "seen"\nhides = ["nobody"]'), "hides a cause that is not there"),
    ],
)
def test_faults_in_rules_are_told_with_their_place(change: tuple[str, str], said: str) -> None:
    with pytest.raises(Trouble, match=said):
        load_causes(MINIMAL.replace(*change), "own.toml")


def test_a_sign_has_conditions_of_its_own() -> None:
    text = MINIMAL.replace("weight = 0.9", 'weight = 0.9, needs = ["with force"], never = ["by itself"]')
    rules = load_causes(text.replace("}]", '}, { find = "a crack", weight = 0.8 }]'), "own.toml")

    def seen(other: str) -> list[float]:
        return [
            finding.confidence
            for finding in diagnose({"log": "it broke in two, a crack", "other": other}, rules).findings
        ]

    assert (seen(""), seen("with force"), seen("with force, by itself")) == ([0.8], [0.93], [0.8])


def test_two_rules_of_one_name_are_refused() -> None:
    with pytest.raises(Trouble, match="two causes have the same slug"):
        load_causes(MINIMAL + MINIMAL, "own.toml")


def test_a_failed_step_is_explained_by_its_log(tmp_path: Path) -> None:
    log = tmp_path / "build-x.log"
    log.write_text(
        read(CASES / "failing" / "mlx5-header-missing.log") + "url: https://me:secret@host/\n", encoding="utf-8"
    )
    build = Outcome("build nvshmem", "n1", "failed", "exit code 1", log=str(log))
    seen = Outcome(
        "verify",
        "n2",
        "failed",
        "import deep_ep fails — found libstdc++.so.6: version `GLIBCXX_3.4.32' not found, wanted no error",
    )
    fine = Outcome("verify", "n3", "done", "fine")
    first, second, third = outcomes.explained((build, seen, fine), ROOT)
    assert first.detail.startswith("exit code 1\ncause: the development files of libibverbs and mlx5 are missing")
    assert "build-x.log, line 1: " in first.detail
    assert "libstdcxx-too-old" in second.detail
    assert third == fine
    assert "no cause was looked for" in outcomes.explained((build,), broken(tmp_path))[0].detail


def broken(folder: Path) -> Path:
    (folder / "env" / "rules" / "causes").mkdir(parents=True)
    (folder / "env" / "rules" / "causes" / "own.toml").write_text("[[cause]]\n", encoding="utf-8")
    return folder


def invoke(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "invoke", "diagnose", *words],
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )


UNKNOWN = """\
hello
Traceback (most recent call last):
  File "/home/me/a.py", line 3, in <module>
    raise ValueError("7 is no number of ours")
ValueError: 7 is no number of ours
"""


def said(capsys: pytest.CaptureFixture[str], *logs: Path, code: int = OK, as_json: bool = False) -> str:
    assert verb(str(logs[0]), [str(log) for log in logs[1:]], json=as_json) == code
    return capsys.readouterr().out


def test_a_test_that_passed_has_no_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Slow figures are a remark, and a cause below what is sure where the kept verdict is below its reference."""
    log = tmp_path / "node-0-n001.log"
    shutil.copy(CASES.parent / "known" / "nic-mapping-single-nic-1.log", log)
    out = said(capsys, log)
    assert out.splitlines()[0] == "nothing failed: internode test passed"
    assert "cause" not in out
    assert "%" not in out
    assert (
        "      the test passed; maybe traffic between nodes is far below the NICs' rate: all ranks share one NIC, or GPUDirect or the fabric is slow: port_xmit_data of every NIC"
        in out
    )
    document = json.loads(said(capsys, log, as_json=True))
    assert (document["exit"], document["findings"], document["failure"]) == (0, [], None)
    assert [note["about"] for note in document["notes"]] == ["nic-mapping-single-nic"]
    kept = judgement_text(Judgement(RunVerdict.BELOW, "combine, RDMA: 6.1 GB/s"))
    (tmp_path / "verdict.json").write_text(kept)
    (finding,) = json.loads(said(capsys, log, as_json=True))["findings"]
    assert (finding["cause"], finding["confidence"] < SURE) == ("nic-mapping-single-nic", True)
    assert "Nothing decides whether this is it; the checks would." in said(capsys, log)


def test_the_first_error_stands_below_a_cause_that_shows_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "job.log"
    log.write_text("KeyError: 'odd'\nOSError: [Errno 122] Disk quota exceeded: '/home/a/odd'\n")
    out = said(capsys, log).splitlines()
    assert "(disk-full, 93%)" in out[0]
    told = out.index("The first error in time:")
    assert out[told + 1] == f"  {log}, line 1: KeyError: 'odd'"
    log.write_text("OSError: [Errno 122] Disk quota exceeded: '/home/a/odd'\n")
    assert "The first error in time:" not in said(capsys, log)


def test_a_cause_is_told_closely_by_what_stands_far_from_its_sign_in_a_long_line() -> None:
    line = (
        "ValueError: To serve at least one request with the models's max seq len (4242), (24.0 GiB KV cache is needed"
    )
    line += ", which is larger than the available KV cache memory (3.18 GiB)" + ", odd" * 200
    (finding, *_) = diagnosed("log", line).findings
    assert finding.title == "the KV cache has no room for one request of the full length (4242 tokens)"
    assert "To serve" not in finding.evidence[0].text


def test_slow_figures_alone_are_never_sure() -> None:
    slow = read(CASES.parent / "known" / "nic-mapping-single-nic-1.log")
    assert [finding.confidence < SURE for finding in diagnose({"log": slow}, BOOK).findings] == [True]
    mapped = slow + "every rank uses mlx5_0\n"
    assert diagnose({"log": mapped}, BOOK).findings[0].confidence >= SURE


def test_what_stopped_early_and_what_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = re.sub(r"([:,]) [3-9]\.", r"\1 56.", read(CASES.parent / "known" / "nic-mapping-single-nic-1.log"))
    (tmp_path / "cut.log").write_text(whole[: whole.index("[tuning] Best")])
    assert said(capsys, tmp_path / "cut.log", code=4).splitlines() == [
        "no known cause in it",
        "  internode test: the log stops early",
    ]
    (tmp_path / "other.log").write_text("nothing of note\n")
    assert said(capsys, tmp_path / "other.log").splitlines() == ["nothing failed"]


@pytest.mark.usefixtures("programs")
def test_the_verb(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(MINIMAL, encoding="utf-8")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rank-0.log").write_text("all well\n", encoding="utf-8")
    (tmp_path / "run" / "rank-1.err").write_text("token=abcdefgh1 it broke in two\n", encoding="utf-8")
    done = invoke(str(tmp_path / "run"), "--causes", str(tmp_path / "own.toml"), "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["verb"], document["exit"], document["errors"]) == (0, "diagnose", 0, [])
    (finding,) = document["findings"]
    assert set(finding) == {"cause", "title", "confidence", "evidence", "why", "fix", "source", "general"}
    assert finding["evidence"] == [{"line": 1, "text": "token=[removed] it broke in two"}]
    shown = invoke("--logs=-", stdin=read(CASES / "failing" / "mpi-not-found.log"))
    assert shown.returncode == 0
    assert shown.stdout.startswith("1. MPI is wanted, and its headers")
    unknown = invoke("--logs=-", stdin=UNKNOWN)
    assert unknown.returncode == 4
    assert unknown.stdout.splitlines()[:3] == [
        "no known cause in it",
        "The first error in time:",
        "  -, line 5: ValueError: 7 is no number of ours",
    ]
    missing = invoke(str(tmp_path / "nothing-*.log"))
    assert missing.returncode == 1
    assert "no log there" in missing.stderr


LIKELY = (
    A_CAUSE
    + """sign = [
  { find = 'the pump stopped', weight = 0.78 },
  { find = 'pressure fell', weight = 0.6 },
  { find = 'the fuse of the pump blew', weight = 0.9 },
]
context = [{ find = 'voltage high', add = 0.05 }, { find = 'fuse found open', add = 0.3 }]
"""
)


@pytest.mark.parametrize(
    ("text", "confidence"),
    [
        ("error: the pump stopped", 0.78),
        ("error: the pump stopped\npressure fell, voltage high", LIKELY_MOST),
        ("error: the pump stopped\nfuse found open", 0.98),
        ("error: the pump stopped\nthe fuse of the pump blew", 0.93),
    ],
)
def test_only_a_line_that_tells_a_cause_by_itself_is_believed_with_four_fifths(text: str, confidence: float) -> None:
    (found,) = diagnose({"log": text}, load_causes(LIKELY, "own.toml")).findings
    assert found.confidence == pytest.approx(confidence)


SLOW_DISK = """
[[symptom]]
name = "a wait"
find = ['gave up waiting']
ask = "who waits"

[[cause]]
slug = "slow-disk"
title = "t"
why = "w"
fix = "f"
source = "s"
sign = [
  { find = 'the rank gave up waiting', weight = 0.9 },
  { find = '\\W+gave up waiting', weight = 0.9 },
  { find = 'the disk is slow', weight = 0.9 },
]
context = [{ find = 'iowait', add = 0.35 }, { find = 'uptime', add = 0.05 }]
"""


STATE = (
    A_CAUSE
    + """sign = [
  { find = 'the pump is not ready', weight = 0.9, state = true },
  { find = 'the pump was never switched on', weight = 0.9 },
]
context = [{ find = 'voltage high', add = 0.05 }, { find = 'switch found open', add = 0.3 }]

[[cause]]
slug = "another-cause"
title = "t"
why = "w"
fix = "f"
source = "s"
sign = [{ find = 'the valve is stuck', weight = 0.85 }]
"""
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Error: the pump is not ready\n", [("a-cause", 0.79)]),
        ("Error: the pump is not ready\nvoltage high\n", [("a-cause", 0.79)]),
        ("Error: the pump is not ready\nswitch found open\n", [("a-cause", 0.98)]),
        ("Error: the pump is not ready\nError: the pump was never switched on\n", [("a-cause", 0.93)]),
        ("Error: the pump is not ready\nError: the valve is stuck\n", [("another-cause", 0.85), ("a-cause", 0.79)]),
    ],
)
def test_a_state_that_other_reasons_bring_about_is_told_below_four_fifths(
    text: str, told: list[tuple[str, float]]
) -> None:
    """It keeps its place among other causes, which is by its weight and by time."""
    found = diagnose({"log": text}, load_causes(STATE, "own.toml"))
    assert [(each.cause, round(each.confidence, 2)) for each in found.findings if not each.general] == told


@pytest.mark.parametrize(
    ("text", "confidence"),
    [
        ("3: gave up waiting", 0.69),
        ("3: gave up waiting, uptime 3", 0.695),
        ("3: gave up waiting, iowait 90 %", 0.88),
        ("3: gave up waiting\nthe disk is slow", 0.93),
        ("the rank gave up waiting", 0.93),
    ],
)
def test_a_shared_symptom_is_sure_of_nothing_by_itself(text: str, confidence: float) -> None:
    rules = load_causes(SLOW_DISK, "own.toml")
    (found,) = diagnose({"log": text}, rules).findings
    assert found.confidence == pytest.approx(confidence)
    assert (found.confidence >= SURE) == (confidence > SHARED_MOST)


@pytest.mark.parametrize(
    "line",
    [
        "E0901 10:02:40.400210 1 main.go:301] check: IMEX daemon not ready: connect: connection refused",
        "Warning  Unhealthy  pod/ep-0  Startup probe failed: exit code 1",
    ],
)
def test_a_service_that_does_not_answer_is_a_symptom(line: str) -> None:
    """Both named a cause with 0.8 and more, whatever kept the service from getting ready."""
    found = diagnose({"log": line + "\n"}, BOOK).findings
    assert all(each.confidence <= SHARED_MOST for each in found)
    assert found


@pytest.mark.parametrize(
    ("line", "beside"),
    [
        (
            "TimeoutError: Timed out waiting for engine core processes to start.",
            "(EngineCore_DP0 pid=6) DeepGEMM warmup:  37%|#   | 7178/19432 [04:12<12:40, 19.80it/s]",
        ),
        (
            "torch.AcceleratorError: CUDA error: operation failed due to a previous error during capture",
            "CUDA error: operation not permitted when stream is capturing",
        ),
    ],
)
def test_what_an_earlier_error_leads_to_is_a_symptom(line: str, beside: str) -> None:
    """Both named a cause with 0.86 and more where the log told of another one, or of none."""
    (alone,) = diagnose({"log": line + "\n"}, BOOK).findings
    (both,) = diagnose({"log": f"{beside}\n{line}\n"}, BOOK).findings
    assert alone.confidence <= SHARED_MOST
    assert both.cause == alone.cause
    assert both.confidence >= SURE


def test_a_folder_that_may_not_be_made_is_of_a_build_only_beside_one() -> None:
    """Anything may fail so: enroot's run folder was taken for a build's with 0.88 where its own rule was away."""
    refused = "mkdir: cannot create directory '/srv/run/deep_ep': Permission denied\n"
    (alone,) = diagnose({"log": refused}, BOOK).findings
    (beside,) = diagnose({"log": "cmake -S . -B out\n" + refused}, BOOK).findings
    assert (alone.cause, beside.cause) == ("build-permission", "build-permission")
    assert alone.confidence <= SHARED_MOST
    assert beside.confidence >= SURE
