"""`invoke results LOG`: figures and verdict out of logs of upstream's tests; no host and no network."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from deepep_bootstrap.analysis.results import model, wording
from deepep_bootstrap.analysis.results.read import RUN_LOG, read_logs
from deepep_bootstrap.cli.logs import Sought, names, read_log
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import OK, VERDICT, Problem, Trouble

SOUGHT = Sought(
    patterns=("*.log", "*.out", "*/*.log", "*/*.out"),
    called="*.log or *.out",
    remedy="the log of a test, the folder of a run, or a glob in quotation marks",
)


def results(logs: str, log: Sequence[str] | None = None, *, json: bool = False) -> int:
    """Say what logs of DeepEP's tests tell: cases, best figures, slow and missing ranks, and whether all is well.

    `logs` and each of `log` is a file, a folder, a glob or `-`. Exit 4 unless every test is ok.
    """
    screen = Screen("results", as_json=json)
    words = (logs, *(log or ()))
    texts = {name: read_log(name, SOUGHT.remedy) for name in files(words)}
    tests = read_logs(texts)
    if not tests:
        found = f"{len(texts)} log{'' if len(texts) == 1 else 's'} without a line of one"
        wanted = (
            "output of test_intranode.py, test_internode.py, test_low_latency.py or test_ep.py, or of our nccl, "
            "pairs or smoke"
        )
        raise Trouble(Problem(", ".join(words), "no test of DeepEP in it", found, wanted, SOUGHT.remedy))
    for number, tested in enumerate(tests):
        if number:
            screen.say()
        for line in wording.lines(tested):
            screen.say(line)
    problems = [wording.problem(tested) for tested in tests if not tested.ok]
    code = VERDICT if problems else OK
    screen.document(code, problems, **document(tests))
    return code


def document(tests: Sequence[model.Tested]) -> dict[str, Any]:
    """Return the document without the first test's own errors: `errors` at the top are those of every document."""
    content = model.document(tests)
    content.pop("errors", None)
    return content


def files(words: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the logs that `words` mean, each file once. Trouble for a word that means none."""
    found: dict[str, str] = {}
    for file, name in names(words, SOUGHT):
        # A run's folder links to what its job printed: the name there says more than the other one.
        known = found.setdefault(file, name)
        if RUN_LOG.fullmatch(os.path.basename(name)) and not RUN_LOG.fullmatch(os.path.basename(known)):
            found[file] = name
    return tuple(found.values())
