"""What the files of a run say together: when it failed, which logs are asked for a cause, what our own programs say."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from deepep_bootstrap.analysis import assess
from deepep_bootstrap.analysis.assess import AssessmentRules, failure
from deepep_bootstrap.analysis.diagnosis.engine import SURE
from deepep_bootstrap.analysis.results.model import Verdict
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.inventory.facts import Facts, Gpu, Port, Rdma, Slurm
from deepep_bootstrap.inventory.survey import read_tree
from deepep_bootstrap.report import summary
from deepep_bootstrap.testing import run_folder
from deepep_bootstrap.testing.run_folder import parse_counters
from tests.support.paths import ROOT

ENV = read_tree(ROOT / "env")
PASSED = """\
[config] num_tokens=4096, hidden=7168, num_topk=8
[layout] Kernel performance: 0.110 ms

[testing] Running with BF16, without top-k (async=False, previous=False) ... passed

[tuning] SMs 24, NVL chunk 4: 300.00 GB/s (NVL), 500.00 us
[tuning] Best dispatch (FP8): SMs 24, NVL chunk 4, 300.00 GB/s (NVL), t: 500.00 us

[tuning] SMs 24, NVL chunk 4: 300.00 GB/s (NVL), 500.00 us
[tuning] Best dispatch (BF16): SMs 24, NVL chunk 4, 300.00 GB/s (NVL), t: 500.00 us

[tuning] SMs 24, NVL chunk 4: 300.00 GB/s (NVL), 500.00 us
[tuning] Best combine: SMs 24, NVL chunk 4: 300.00 GB/s (NVL), t: 500.00 us
"""


@pytest.fixture(scope="module")
def shipped() -> AssessmentRules:
    return assess.read_rules(ENV, {}, "here")


def made(kind: str, code: str, nodes: str = "a", **logs: str) -> run_folder.TestRun:
    values = {"kind": kind, "code": code, "nodes": nodes}
    return run_folder.TestRun("r", values, {f"{name.replace('_', '-')}.log": text for name, text in logs.items()})


def test_a_good_run(shipped: AssessmentRules) -> None:
    found = assess.assess(made("intranode", "0", node_0_a=PASSED), {}, shipped)
    assert (found.failed, found.own_words, found.diagnosis.findings) == (False, (), ())
    assert [tested.ok for tested in found.tests] == [True]


@pytest.mark.parametrize(
    ("why", "run"),
    {
        "its exit code": made("intranode", "1", node_0_a=PASSED),
        "no exit code": made("intranode", "", node_0_a=PASSED),
        "cut off, in spite of its exit code": made("intranode", "0", node_0_a=PASSED[:-60]),
        "nothing of a test in it": made("intranode", "0", node_0_a="hello\n"),
        "no log at all": made("internode", "0"),
    }.items(),
)
def test_a_run_that_failed(why: str, run: run_folder.TestRun, shipped: AssessmentRules) -> None:
    assert assess.assess(run, {}, shipped).failed, why


@pytest.mark.parametrize("kind", ["smoke", "nccl", "pairs"])
def test_our_own_programs_need_no_results(kind: str, shipped: AssessmentRules) -> None:
    assert not assess.assess(made(kind, "0", node_0_a=f"[{kind}] passed\n"), {}, shipped).failed


def test_a_network_that_is_slow_for_everybody_does_not_pass_without_a_word(shipped: AssessmentRules) -> None:
    gpus = tuple(Gpu(number, "NVIDIA H200", 143771, "9.0", "580", "", "", -1, 0) for number in range(8))
    nics = tuple(
        Rdma(f"mlx5_{n}", "mlx5_core", "", -1, "", (Port(1, "ACTIVE", "InfiniBand", 400.0),)) for n in range(8)
    )
    seen = dict.fromkeys(("a", "b"), Facts(gpus=gpus, rdma=nics))
    said = (
        "[nccl] 2 nodes x 8 ranks, NCCL 2.28.9, torch 2.11.0\n[nccl] {} 1073741824 bytes: 3.00 GB/s (algorithm), "
        "{} GB/s (bus), 9.0 us\n"
    )
    for rate, state in (("23.10", "below"), ("71.50", "none")):
        run = made(
            "nccl", "0", "a,b", node_0_a=said.format("all_to_all", rate) + "[nccl] passed\n", node_1_b="[nccl] passed\n"
        )
        found = assess.assess(run, seen, shipped)
        assert (found.failed, [verdict.state for verdict in found.verdicts if verdict.kind == "figure"]) == (
            False,
            [state],
        )


def test_what_our_own_programs_say(shipped: AssessmentRules) -> None:
    said = "[pairs] round 1: a b 3.00 GB/s\n[pairs] slow: node b: all its pairs, 3.00 GB/s a GPU\n[pairs] failed\n"
    found = assess.assess(made("pairs", "1", "a,b", node_0_a=said, job=said), {}, shipped)
    assert found.own_words == ("slow: node b: all its pairs, 3.00 GB/s a GPU",)


def test_one_that_was_stopped_as_planned_has_ended(shipped: AssessmentRules) -> None:
    cut = "Testing with seed 0 ...\n" + PASSED[:-60]
    assert assess.assess(made("pressure", "0", node_0_a=cut), {}, shipped).failed is False
    assert assess.assess(made("pressure", "1", node_0_a=cut), {}, shipped).failed


def test_what_nics_did_not_carry_is_no_verdict_on_a_failed_run(shipped: AssessmentRules) -> None:
    counters = parse_counters("time=1\nnic=mlx5_0 1 InfiniBand 400 0 0 link_downed:0\n", "before")
    after = parse_counters("time=2\nnic=mlx5_0 1 InfiniBand 400 0 0 link_downed:1\n", "after")
    run = replace(made("nccl", "1", "a,b", node_0_a="x\n"), counters={"a": (counters, after), "b": (counters, after)})
    assert {verdict.kind for verdict in assess.assess(run, {}, shipped).verdicts} == {"error"}
    passed = replace(run, values={**run.values, "code": "0"})
    assert {verdict.kind for verdict in assess.assess(passed, {}, shipped).verdicts} == {"nic", "error"}


def test_figures_below_a_published_reference_can_be_the_sites_own(shipped: AssessmentRules) -> None:
    seen = {
        "a": Facts(gpus=tuple(Gpu(number, "NVIDIA H200", 143771, "9.0", "580", "", "", -1, 0) for number in range(8)))
    }
    slow = made("intranode", "0", node_0_a=PASSED.replace("300.00 GB/s", "200.00 GB/s"))
    found = assess.assess(slow, seen, shipped)
    assert [verdict.state for verdict in found.verdicts if verdict.unit == "GB/s"] == ["below"] * 3
    assert summary.unkept(0, found) == ""
    assert summary.unkept(4, found) == summary.unkept(0, replace(found, failed=True)) == "the test did not pass"
    frozen = Verdict("nic", "mlx5_3/1", "below", "mlx5_3/1 sent nothing of the test", host="a")
    assert (
        summary.unkept(0, replace(found, verdicts=(*found.verdicts, frozen))) == "a: mlx5_3/1 sent nothing of the test"
    )


def test_a_cause_is_shown_once(shipped: AssessmentRules) -> None:
    line = "RuntimeError: CUDA error: no kernel image is available for execution on the device"
    run = made(
        "internode",
        "1",
        "a,b",
        job=f"deepep: job 1\n{line}\n",
        node_1_b=f"{line}\n",
        rank_8=f"{line}\n",
        node_0_a="x\n",
    )
    assert list(assess.failure_logs(run)) == ["node-1-b.log", "node-0-a.log", "job.log"]
    finding = assess.assess(run, {}, shipped).diagnosis.findings[0]
    assert finding.cause == "arch-mismatch-build"
    assert [(one.log, one.line) for one in finding.evidence if one.text == line] == [("node-1-b.log", 1)]


def test_the_reason_of_a_failure_is_a_cause_only_if_it_is_sure(shipped: AssessmentRules) -> None:
    nodes, line = "deepep: job 1 on 2 node(s): a b\n", "init failed for transport: IBGDA\n"
    run = made("low-latency", "1", "a,b", job=nodes, node_0_a=line + "RuntimeError: the numbers differ\n")
    found = assess.assess(run, {}, shipped)
    assert [(each.cause, each.confidence < SURE) for each in found.diagnosis.findings[:1]] == [
        ("ibgda-driver-config", True)
    ]
    assert "the numbers differ" in failure(run, found)
    sure = made(
        "low-latency", "1", "a,b", job=nodes, node_0_a="WARN: GPU cannot map UAR of device mlx5_0. Skipping...\n" + line
    )
    found = assess.assess(sure, {}, shipped)
    assert (
        failure(sure, found)
        == found.diagnosis.findings[0].title
        == "the driver does not let the GPU ring the NIC's doorbell"
    )


def test_nodes_have_the_names_that_slurm_has_for_them() -> None:
    facts = {"10.0.0.1": Facts(hostname="x", slurm=Slurm(node="n1")), "n2": Facts(hostname="y")}
    assert {name: seen.hostname for name, seen in assess.by_node(facts, ("n1", "n2", "n3")).items()} == {
        "n1": "x",
        "n2": "y",
    }


def test_a_sites_own_rules_are_read_too() -> None:
    with pytest.raises(Trouble, match=r"there/references\.toml"):
        assess.read_rules(ENV, {"references.toml": "["}, "there")
    with pytest.raises(Trouble, match=r"there/causes\.toml"):
        assess.read_rules(ENV, {"causes.toml": "["}, "there")
