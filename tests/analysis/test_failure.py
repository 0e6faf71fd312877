"""Which line of a failed run is told: never the head of a traceback, and a launcher's only where nothing else is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepep_bootstrap.analysis import assess
from deepep_bootstrap.analysis.assess import failure
from deepep_bootstrap.analysis.failure import failure_line
from deepep_bootstrap.analysis.results.wording import faults
from deepep_bootstrap.cli.commands.report import report
from deepep_bootstrap.cli.commands.results import results
from deepep_bootstrap.core.toml import load_toml
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.survey import read_tree
from deepep_bootstrap.testing import run_folder
from tests.support.paths import ROOT

CASES = ROOT / "tests" / "cases" / "analysis" / "failure"
ALL = [
    pytest.param(case, id=case["name"]) for case in load_toml((CASES / "lines.toml").read_text(), "lines.toml")["case"]
]


@pytest.mark.parametrize("case", ALL)
def test_the_line_that_says_why(case: dict[str, object]) -> None:
    found = failure_line({"node-0-n001.log": str(case["log"])})
    assert (found and found.text, found and found.line) == (case["text"] or None, case["line"] or None)


def test_an_exception_counts_more_than_what_came_of_it_in_another_log() -> None:
    lost = (
        'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nConnectionResetError: reset by peer\n'
    )
    own = 'Traceback (most recent call last):\n  File "b.py", line 2, in <module>\nValueError: no such rank\n'
    found = failure_line({"node-0-a.log": lost, "node-1-b.log": own, "job.log": "srun: error: b: task 1: Exited\n"})
    assert found is not None
    assert (found.log, found.line, found.text) == ("node-1-b.log", 3, "ValueError: no such rank (b.py:2)")


SRUN = "srun: error: n002: task 1: Exited with exit code 2\n"
USAGE = "usage: test_internode.py [-h] [--num-processes N]\ntest_internode.py: error: unrecognized arguments: --bogus\n"
IMPORT = """\
Traceback (most recent call last):
  File "/shared/deepep/generations/1/examples/moe_prefill.py", line 18, in <module>
    from deep_ep import Buffer, Config
ImportError: cannot import name 'Config' from 'deep_ep' (/shared/deepep/store/x-deepep/deep_ep/__init__.py)
"""
ATTRIBUTE = """\
Traceback (most recent call last):
  File "/shared/deepep/generations/1/programs/pairs.py", line 60, in main
    store = torch.distributed.TCPStore("n001", 1)
AttributeError: module 'torch.distributed' has no attribute 'TCPStore'
"""


@pytest.mark.parametrize(
    ("kind", "args", "printed", "job", "why"),
    [
        (
            "internode",
            "--bogus",
            f"deepep: internode test of deepep/1.2.1-v1: test_internode.py\n{USAGE}",
            f"{SRUN}deepep: test_internode.py ended with exit code 2\n",
            "test_internode.py: error: unrecognized arguments: --bogus (your --args)",
        ),
        (
            "example-prefill",
            "",
            IMPORT,
            f"{SRUN}deepep: moe_prefill.py ended with exit code 1\n",
            "ImportError: cannot import name 'Config' from 'deep_ep' (moe_prefill.py:18)",
        ),
        (
            "pairs",
            "",
            f"deepep: pairs test of deepep/1.2.1-v1: pairs.py\n{ATTRIBUTE}",
            f"{SRUN}deepep: pairs.py ended with exit code 1\n",
            "AttributeError: module 'torch.distributed' has no attribute 'TCPStore' (pairs.py:60)",
        ),
        ("internode", "", "", SRUN, "exit code 1"),
    ],
)
def test_the_reason_of_a_run(
    kind: str, args: str, printed: str, job: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same line in the verdict, beside the test, in the report on a terminal, its JSON and its page."""
    files = {"run.env": f"kind={kind}\ncode=1\nnodes=n001,n002\nargs={args}\n", "node-1-n002.log": printed}
    files["job.log"] = job
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    run = run_folder.of_files("r", files)
    found = assess.assess(run, {}, assess.read_rules(read_tree(ROOT / "env"), {}, "here"))
    assert failure(run, found) == why
    assert report(Flags(ROOT), run=str(tmp_path), html=str(tmp_path / "r.html")) == 0
    told = capsys.readouterr().out
    assert told.splitlines()[:2] == [f"{kind} on n[001-002] (2): failed", why]
    assert "line 1: Traceback" not in told
    assert report(Flags(ROOT, json=True), run=str(tmp_path)) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["verdict"], document["why"]) == ("failed", why)
    assert document["failure"]["text"] == (why if printed else SRUN.strip())
    page = (tmp_path / "r.html").read_text()
    assert f"<strong>Failed</strong><p>{why.replace(chr(39), '&#39;')}</p>" in page
    if kind in {"internode", "pairs"} and printed:
        (tested,) = found.tests
        assert [fault for fault in faults(tested) if fault.startswith("error: ")] == [
            f"error: {why.removesuffix(' (your --args)')}"
        ]


def test_results_cite_argparse_and_not_srun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "slurm-4711.out"
    log.write_text(f"deepep: internode test of deepep/1.2.1-v1: test_internode.py\n{USAGE}{SRUN}")
    assert results(str(log)) == 4
    out = capsys.readouterr().out
    assert "internode test (DeepEP V1): FAILED" in out
    assert "- the log stops early\n" in out
    assert "- error: test_internode.py: error: unrecognized arguments: --bogus\n" in out
    assert "srun" not in out
