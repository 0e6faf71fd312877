"""Which nodes of a run are written down as well, and which as at fault."""

from __future__ import annotations

from typing import Any

import pytest
import tomllib

from deepep_bootstrap.analysis import assess
from deepep_bootstrap.analysis.node_lists import NodeLists, list_nodes
from deepep_bootstrap.inventory.facts import Facts, Slurm
from deepep_bootstrap.inventory.survey import read_tree
from deepep_bootstrap.testing.run_folder import Judgement, RunVerdict, TestRun, parse_counters
from tests.support.paths import ROOT, TESTS

CASES = tomllib.loads((TESTS / "cases" / "analysis" / "node-lists.toml").read_text(encoding="utf-8"))["case"]
COUNTED = "time={}\nnic=mlx5_0 1 InfiniBand 400 {} {} link_downed:{}\n"


@pytest.fixture(scope="module")
def shipped() -> assess.AssessmentRules:
    return assess.read_rules(read_tree(ROOT / "env"), {}, "here")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_nodes_that_are_listed(case: dict[str, Any], shipped: assess.AssessmentRules) -> None:
    code = "0" if case["verdict"] == "below reference" else "1"
    values = {"kind": case["kind"], "code": code, "nodes": ",".join(case["nodes"]), "args": case.get("args", "")}
    logs = {f"{name}.log": text for name, text in case.get("logs", {}).items()}
    before = parse_counters(COUNTED.format(1, 0, 0, 0), "before")
    counters = {
        node: (before, parse_counters(COUNTED.format(2, 10**9, 10**9, int(node in case.get("errors", ()))), "after"))
        for node in case["nodes"]
    }
    run = TestRun("r", values, logs, counters)
    facts = {node: Facts(slurm=Slurm(node=case.get("slurm", {}).get(node, ""))) for node in case["nodes"]}
    found = assess.assess(run, facts, shipped)
    judgement = Judgement(RunVerdict(case["verdict"]))
    listed = list_nodes(run, facts, found, judgement, shipped.causes, case.get("lost", ""))
    assert listed == NodeLists(tuple(case.get("passing", ())), tuple(case.get("failing", ())))


def test_a_file_without_a_node_is_not_written() -> None:
    # sbatch refuses it: "Hostlist is empty!"
    assert NodeLists(failing=("n1", "n3")).files() == {"failing_nodes.txt": b"n1\nn3\n"}
