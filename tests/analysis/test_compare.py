"""References, limits and verdicts on figures: cases from data, the shipped file, faults of such files, a site's own."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from deepep_bootstrap.analysis import compare, site_references
from deepep_bootstrap.analysis.compare import Limits
from deepep_bootstrap.analysis.reference_file import (
    Reference,
    ReferenceSet,
    gpu_type,
    joined,
    load_references,
    read_references,
)
from deepep_bootstrap.analysis.results import read
from deepep_bootstrap.analysis.results.model import Best, LowLatency, Operation, Rank, Spread, Verdict, worst_first
from deepep_bootstrap.analysis.results.model import Tested as Found
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.inventory.facts import Facts, Gpu, Port, Rdma
from deepep_bootstrap.inventory.machine import Machine, ReachedPort
from tests.support.examples import most
from tests.support.paths import ROOT

SHIPPED = load_references((ROOT / "env/rules/references.toml").read_text(encoding="utf-8"), "env/rules/references.toml")
CASES = sorted((ROOT / "tests/cases/analysis/references").glob("*.toml"))
H200 = {"num_tokens": 4096, "hidden": 7168, "num_topk": 8}


def run_of(given: dict[str, Any]) -> Found:
    """Return a test as a case has it."""
    low = {
        name: Spread(**value) if isinstance(value, dict) else value
        for name, value in given.get("low_latency", {}).items()
    }
    return Found(
        given["test"],
        given["generation"],
        ok=True,
        ended=True,
        config=given.get("config", {}),
        best={name: Best(**values) for name, values in given.get("best", {}).items()},
        low_latency=LowLatency(**low) if low else None,
        operations={
            name: Operation(
                **{part: Spread(**value) if isinstance(value, dict) else value for part, value in parts.items()}
            )
            for name, parts in given.get("operations", {}).items()
        },
        ranks=tuple(Rank(number) for number in range(given.get("ranks", 0))),
    )


def judged(tests: list[Found], **changes: Any) -> tuple[Verdict, ...]:
    return compare.judge(tests, **{"gpu": "H200", "fabric": "", "nodes": 1, "references": SHIPPED, **changes})


# --- cases -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case(path: Path) -> None:
    case = tomlkit.parse(path.read_text(encoding="utf-8")).unwrap()
    args = shlex.split(case.get("args", ""))
    tests = [compare.configured(run_of(given), args) for given in case["test"]]
    setting = {name: case[name] for name in ("gpu", "fabric", "nodes")}
    found = {one.subject: one for one in judged(tests, **setting, limits=Limits(**case.get("limits", {})))}
    assert {figure: one.state for figure, one in found.items()} == case["states"]
    for figure, texts in case.get("says", {}).items():
        for text in texts:
            assert text in "\n".join(found[figure].lines())
    for figure, texts in case.get("unsaid", {}).items():
        for text in texts:
            assert text not in "\n".join(found[figure].lines())


def test_a_verdict_says_all_of_it_as_json() -> None:
    [found] = judged(
        [Found("intranode", "v1", True, True, config=H200, best={"combine": Best(nvl_gbs=160.1)}, log="job.log")]
    )
    said = json.loads(json.dumps(found.as_json()))
    assert said["percent"] == pytest.approx(50)
    assert {
        name: said[name]
        for name in ("kind", "subject", "state", "unit", "wanted", "test", "log", "impossible", "limit")
    } == {
        "kind": "figure",
        "subject": "best.combine.nvl_gbs",
        "state": "below",
        "unit": "GB/s",
        "wanted": 320.2,
        "test": "intranode",
        "log": "job.log",
        "impossible": False,
        "limit": None,
    }
    assert said["low"] == pytest.approx(320.2 * 0.92)
    assert said["high"] == pytest.approx(320.2 * 1.1)
    assert "H200" in said["source"]
    assert said["means"]


def test_the_worst_comes_first() -> None:
    mixed = [
        Verdict("figure", str(number), state, "")
        for number, state in enumerate(("ok", "none", "below", "note", "above", "below"))
    ]
    assert [one.subject for one in worst_first(mixed)] == ["2", "5", "4", "3", "1", "0"]


# --- the shipped file ------------------------------------------------------------------------------------------------------------------


def test_every_shipped_reference_says_where_it_is_from() -> None:
    assert SHIPPED.references
    for one in SHIPPED.references:
        assert re.match(r"(measured on|published (with|for)) ", one.source), one
        assert one.config or one.fault, f"{one.figure} of {one.source} does not say what it was measured with"
    for name, links in SHIPPED.gpus.items():
        assert links.source, name


def test_shipped_figures_fit_into_their_own_hardware() -> None:
    """Published figures are no more than the NVLinks and one 400 Gb/s NIC for each GPU carry: or one of the three is
    wrong."""
    for one in SHIPPED.references:
        links = SHIPPED.gpus.get(one.gpu) or next(
            found for found in SHIPPED.gpus.values() if f"sm_{found.arch.replace('.', '')}" == one.gpu
        )
        most = compare.ceiling(one.figure, one.nodes, 8, Limits(nvlink_gbs=links.links * links.gbs, nic_gbs=50.0))
        assert most is None or one.value <= most.counted, one


def test_figures_of_a_known_fault_are_below_those_of_a_well_setup() -> None:
    aims = [one for one in SHIPPED.references if not one.fault]
    compared = 0
    for fault in (one for one in SHIPPED.references if one.fault):
        for aim in aims:
            if (aim.gpu, aim.nodes, aim.test, aim.figure) == (fault.gpu, fault.nodes, fault.test, fault.figure):
                assert aim.percent(fault.value) < 100 * (1 - aim.lower), (aim.source, fault.source)
                compared += 1
    assert compared > 20


def test_every_hint_can_be_said() -> None:
    """Each hint is about figures there are, and some value makes each of its sentences true."""
    things = {"nodes": 2.0, "nics": 8.0, "fabric": "roce", "test": "internode", "unit": "GB/s"}
    for hint in SHIPPED.hints:
        words = {sentence.split()[0]: sentence.split()[2] for sentence in hint.when if " is " in sentence}
        numbers = [value / 2 for value in range(400)]
        free = [sentence for sentence in hint.when if sentence.split()[0] in ("percent", "limit", "value")]
        known = {**things, **words}
        fixed = [sentence for sentence in hint.when if sentence not in free]
        assert all(compare._holds(sentence, known) for sentence in fixed), hint.name
        for thing in {sentence.split()[0] for sentence in free}:
            mine = [sentence for sentence in free if sentence.startswith(thing)]
            assert any(all(compare._holds(sentence, {thing: number}) for sentence in mine) for number in numbers), (
                hint.name
            )


def test_the_runs_on_h200_are_as_expected() -> None:
    """The figures of the two recorded logs, and of the three other builds that ran on the same machine."""
    high = [
        {"dispatch_fp8": (324.57, 493.59), "dispatch_bf16": (331.29, 937.87), "combine": (320.20, 970.34)},
        {"dispatch_fp8": (322.26, None), "dispatch_bf16": (335.37, None), "combine": (322.69, None)},
        {"dispatch_fp8": (325.63, None), "dispatch_bf16": (336.59, None), "combine": (323.78, None)},
        {"dispatch_fp8": (322.85, None), "dispatch_bf16": (335.11, None), "combine": (320.80, None)},
    ]
    runs = [
        Found(
            "intranode",
            "v1",
            True,
            True,
            config=H200,
            best={name: Best(nvl_gbs=gbs, us=us) for name, (gbs, us) in one.items()},
        )
        for one in high
    ]
    low = LowLatency(
        Spread(199.81, 200.165, 200.32), 36.03, 67.89, Spread(181.99, 208.485, 217.40), Spread(211.67, 214.125, 216.21)
    )
    ranks = tuple(Rank(number) for number in range(8))
    runs.append(Found("low-latency", "v1", True, True, low_latency=low, ranks=ranks))
    operations = {
        "dispatch": Operation(su_gbs=Spread(302, 302, 302)),
        "combine": Operation(su_gbs=Spread(352, 352, 352)),
    }
    runs.append(Found("ep", "v2", True, True, config={"num_tokens": 8192, "num_topk": 6}, operations=operations))
    found = judged(runs, gpu="NVIDIA H200", limits=Limits(nvlink_gbs=478.116, gpus=8))
    assert len(found) == 6 + 3 * 3 + 5 + 2
    assert {one.state for one in found} == {"ok"}


def test_the_logs_of_h200_are_as_expected() -> None:
    """What the parser calls figures and settings is what references call them."""
    logs = {
        path.name: path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "tests/cases/analysis/references/h200").glob("*.log"))
    }
    found = judged(list(read.read_logs(logs)), gpu="NVIDIA H200", limits=compare.limits_of([host()], SHIPPED))
    assert [(one.test, one.state) for one in found] == [("intranode", "ok")] * 7 + [("low-latency", "ok")] * 10
    assert [one.percent for one in found] == pytest.approx([100] * 17)
    assert all(0 < one.of_limit < 100 for one in found if one.of_limit is not None)


def test_settings_of_v2_have_the_names_that_its_log_gives_them() -> None:
    lines = [
        "Config:",
        " > Ranks: 2 x 8",
        " > Experts: 8/256",
        " > Tokens: 8192 (max: 8192), hidden: 7168",
        " > #SM: 12, #QPs: 13/13",
    ]
    lines += [f"EP: {rank}/16 | dispatch: 85.0 GB/s (SO), 300.0 GB/s (SU), 900.0 us, 9 bytes" for rank in range(16)]
    tests = read.read_logs({"node-0-n1.log": "\n".join(lines) + "\n"})
    found = {one.subject: one for one in judged(list(tests), gpu="H100", fabric="infiniband", nodes=2)}
    assert found["operations.dispatch.so_gbs"].state == "ok"
    few = read.read_logs({"node-0-n1.log": "\n".join(lines).replace("8/256", "6/256") + "\n"})
    assert "num_topk 8 (here 6)" in judged(list(few), gpu="H100", fabric="infiniband", nodes=2)[0].text


# --- properties ------------------------------------------------------------------------------------------------------------------------

ORDER = {"below": 0, "ok": 1, "above": 2}
values = st.floats(0, 1e6, allow_nan=False).map(lambda value: round(value, 3))


@settings(deadline=None)
@given(values, values)
def test_a_better_figure_never_gets_a_worse_verdict(one: float, other: float) -> None:
    less, more = sorted((one, other))
    gbs = [
        judged([Found("intranode", "v1", True, True, config=H200, best={"combine": Best(nvl_gbs=value)})])[0]
        for value in (less, more)
    ]
    assert ORDER[gbs[0].state] <= ORDER[gbs[1].state]
    if less > 0:
        times = [
            judged([Found("low-latency", "v1", True, True, low_latency=LowLatency(combine_us=value))])[0]
            for value in (more, less)
        ]
        assert ORDER[times[0].state] <= ORDER[times[1].state]


@settings(deadline=None)
@given(
    st.floats(0.001, 1e5),
    st.floats(0, 0.99),
    st.floats(0, 5),
    st.sampled_from(["best.combine.nvl_gbs", "best.combine.us"]),
)
def test_bounds_are_where_the_verdict_changes(value: float, lower: float, upper: float, figure: str) -> None:
    one = Reference("H200", "nvlink", 1, "intranode", "v1", figure, value, lower, upper, "a test")
    assert one.low <= one.value <= one.high
    worst, best = (one.low, one.high) if one.larger else (one.high, one.low)
    assert one.percent(worst) == pytest.approx(100 * (1 - lower))
    assert one.percent(best) == pytest.approx(100 * (1 + upper))


numbers = st.one_of(st.none(), st.floats(), st.floats(0, 1000), st.just(0.0))
spreads = st.one_of(st.none(), st.builds(Spread, st.floats(), st.floats(), st.floats()))
configs = st.dictionaries(
    st.sampled_from(["num_tokens", "hidden", "num_processes", "num_topk", "mode"]),
    st.one_of(st.integers(-1, 10**9), st.just(10**400), st.floats(), st.text(max_size=3)),
)
tests = st.builds(
    Found,
    test=st.sampled_from(["intranode", "internode", "low-latency", "ep", "else"]),
    generation=st.sampled_from(["v1", "v2", ""]),
    ok=st.booleans(),
    ended=st.booleans(),
    config=configs,
    best=st.dictionaries(
        st.sampled_from(["dispatch_fp8", "combine", "odd"]), st.builds(Best, numbers, numbers, numbers), max_size=2
    ),
    low_latency=st.one_of(st.none(), st.builds(LowLatency, spreads, numbers, numbers, spreads, spreads)),
    operations=st.dictionaries(
        st.sampled_from(["dispatch", "a b"]), st.builds(Operation, spreads, spreads, spreads), max_size=2
    ),
    ranks=st.lists(st.builds(Rank, st.integers(0, 9)), max_size=3),
)


@settings(deadline=None)
@given(
    st.lists(tests, max_size=3),
    st.sampled_from(["NVIDIA H200", "B200", "H800", "", "Tesla \x00"]),
    st.sampled_from(["roce", "gib", "infiniband", "nvlink", "", "?"]),
    st.integers(-1, 40),
    st.sampled_from([None, Limits(), Limits(478.0, 400.0, 50.0, 8, 8), Limits(nvlink_gbs=0.0, nic_gbs=50.0, gpus=1)]),
)
def test_whatever_was_measured_there_is_a_verdict(
    many: list[Found], gpu: str, fabric: str, nodes: int, most: Limits | None
) -> None:
    found = judged(many, gpu=gpu, fabric=fabric, nodes=nodes, limits=most)
    alone = [one for one in many if compare.nodes_of(one, nodes) == 1]
    between = sum(figure.endswith("so_gbs") for one in alone for figure in compare.figures_of(one))
    assert len(found) == sum(len(compare.figures_of(one)) for one in many) - between
    for one in found:
        assert one.state in ("ok", "below", "above", "none")
        assert one.lines()[0].startswith(one.state)
        json.dumps(one.as_json(), allow_nan=False)


# --- settings --------------------------------------------------------------------------------------------------------------------------


def test_words_for_the_script_are_settings_unless_the_log_says_otherwise() -> None:
    bare = Found("intranode", "v1", True, True, config={"num_tokens": 4096})
    found = compare.configured(
        bare, ["--num-tokens", "64", "--hidden=2048", "--num-topk", "--num-experts", "x", "--num-processes", "2"]
    )
    assert found.config == {"num_tokens": 4096, "hidden": 2048, "num_processes": 2}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA H800", "H800"),
        ("H20", "H20"),
        ("NVIDIA GeForce RTX 4090", ""),
        ("Tesla V100-SXM2-32GB", ""),
        ("", ""),
    ],
)
def test_the_type_of_a_gpu(name: str, kind: str) -> None:
    assert gpu_type(name) == kind


# --- limits ----------------------------------------------------------------------------------------------------------------------------


def host(name: str = "NVIDIA H200", links: str = "NV18", gpus: int = 8, nics: int = 8, **changes: Any) -> Facts:
    """Return facts of a host with GPUs all linked alike, and a NIC for each."""
    rate, layer = changes.pop("rate", 400.0), changes.pop("layer", "InfiniBand")
    pairs = tuple(ReachedPort(one, other, links) for one in range(gpus) for other in range(one + 1, gpus))
    return Facts(
        gpus=tuple(Gpu(number, name, 143771, "9.0", "580", "", "", -1, 0) for number in range(gpus)),
        rdma=tuple(Rdma(f"mlx5_{n}", "mlx5_core", "", -1, "", (Port(1, "ACTIVE", layer, rate),)) for n in range(nics)),
        prepared=Machine(nvlinks=pairs, gib=changes.pop("gib", "")),
    )


def test_limits_of_a_node() -> None:
    found = compare.limits_of([host()], SHIPPED)
    assert found.nvlink_gbs == pytest.approx(478.116)
    assert (found.node_gbs, found.nic_gbs, found.gpus, found.nics) == (400.0, 50.0, 8, 8)
    assert found.why == ("18 NVLinks of 26.562 GB/s", "8 NICs of 400 Gb/s for 8 GPUs")


@pytest.mark.parametrize(
    ("facts", "links"),
    [
        (host(links="NV16"), 16),  # behind a switch with two links down
        (host(gpus=2), 18),
        (host("NVIDIA A100-SXM4-80GB", "NV4", gpus=4), 12),  # no switch: four links to each of three others
        (host("NVIDIA A100-SXM4-80GB", "NV12"), 12),
        (host("NVIDIA H800", "NV8"), 8),
    ],
)
def test_links_of_a_gpu_with_and_without_a_switch(facts: Facts, links: int) -> None:
    rate = SHIPPED.gpus[compare.gpu_of([facts])].gbs
    assert compare.limits_of([facts], SHIPPED).nvlink_gbs == pytest.approx(links * rate)


@pytest.mark.parametrize(
    "facts", [host(links="SYS"), host("NVIDIA H100 PCIe"), host("Other"), replace(host(), prepared=Machine())]
)
def test_no_limit_where_links_or_gpus_are_not_known(facts: Facts) -> None:
    assert compare.limits_of([facts], SHIPPED).nvlink_gbs is None


def test_the_slowest_host_is_the_limit() -> None:
    found = compare.limits_of([host(), host(nics=4, links="NV16"), Facts()], SHIPPED)
    assert (found.nic_gbs, found.nics, found.nvlink_gbs) == (25.0, 4, pytest.approx(16 * 26.562))
    assert compare.limits_of([], SHIPPED) == Limits()
    assert compare.limits_of([host(), host(nics=0)], SHIPPED).nic_gbs is None


def test_a_figure_just_above_the_limit_is_not_impossible_yet() -> None:
    """Which tokens stay on their node is drawn, so a figure may be a little more than what an even spread allows."""
    found = [
        judged(
            [Found("internode", "v1", True, True, best={"combine": Best(rdma_gbs=value)})],
            nodes=2,
            limits=Limits(nic_gbs=50.0),
        )[0]
        for value in (104.0, 106.0)
    ]
    assert [one.impossible for one in found] == [False, True]
    assert [one.of_limit for one in found] == pytest.approx([104, 106])
    assert ["measured wrong" in "".join(one.means) for one in found] == [False, True]


def test_what_a_figure_can_be_at_most() -> None:
    most = Limits(nvlink_gbs=480.0, nic_gbs=50.0)

    def counted(figure: str, nodes: int, ranks: int = 8) -> float | None:
        found = compare.ceiling(figure, nodes, ranks, most)
        return found and found.counted

    assert counted("best.combine.rdma_gbs", 2) == 100
    assert counted("operations.dispatch.so_gbs", 4) == pytest.approx(66.67, abs=0.01)
    assert counted("best.combine.nvl_gbs", 2) == pytest.approx(480 * 8 / 7)
    assert counted("low_latency.dispatch_gbs", 1, 2) == 960
    assert counted("low_latency.dispatch_gbs", 2) == 100
    assert counted("best.combine.rdma_gbs", 1) is None
    assert counted("best.combine.us", 2) is None
    assert counted("best.combine.nvl_gbs", 1, 1) is None
    assert compare.ceiling("best.combine.rdma_gbs", 2, 8, Limits()) is None


@pytest.mark.parametrize(
    ("facts", "nodes", "fabric"),
    [
        ([host()], 1, "nvlink"),
        ([host()], 2, "infiniband"),
        ([host(layer="Ethernet")], 2, "roce"),
        ([host(layer="Ethernet", gib="/usr/local/gib/scripts/set_nccl_env.sh")], 2, "gib"),
        ([host(nics=0)], 2, ""),
        ([], 2, ""),
    ],
)
def test_the_fabric_of_a_test(facts: list[Facts], nodes: int, fabric: str) -> None:
    assert compare.fabric_of(facts, nodes) == fabric


def test_the_nics_that_gpus_use() -> None:
    few = replace(host(gpus=2), gpus=(*host(gpus=1).gpus, replace(host(gpus=1).gpus[0], index=1)))
    assert compare.gpu_nics({"n1": host(gpus=4, nics=2), "n2": few, "n3": host(nics=0), "login": Facts()}) == {
        "n1": ("mlx5_0:1", "mlx5_1:1"),
        "n2": ("mlx5_0:1", "mlx5_1:1"),
        "n3": (),
    }
    assert compare.gpu_nics({}) == {}


def tray(**changes: Any) -> Facts:
    """Return facts of a compute tray of a GB200 rack: four GPUs, four NICs, IMEX runs."""
    seen = host("NVIDIA GB200", gpus=4, nics=4)
    clique = {"imex": "active", "cliques": (("2e3a1f7c", "32766"),), **changes}
    return replace(seen, prepared=replace(seen.prepared, **clique))


def test_limits_of_trays_that_nvlink_joins() -> None:
    found = compare.limits_of([tray(), tray()], SHIPPED)
    assert (found.nvlink_gbs, found.node_gbs, found.nic_gbs) == (pytest.approx(956.25), 200.0, 50.0)
    assert (found.gpus, found.nics, found.joined) == (4, 4, True)
    assert found.why[-1] == "NVLink between the nodes: one clique, IMEX runs"
    most = compare.ceiling("best.dispatch.so_gbs", 2, 4, found)
    assert most is not None
    assert (most.line, most.of) == (pytest.approx(956.25), "NVLink between the nodes")
    pairs = compare.ceiling("pairs.gpu_gbs", 2, 4, found)
    assert pairs is not None
    assert (pairs.counted, pairs.least) == (pytest.approx(956.25), 25.0), "NCCL may take the NICs all the same"
    assert compare.gpu_nics({"t1": tray(), "t2": tray()}) == {"t1": (), "t2": ()}


@pytest.mark.parametrize(
    "other",
    [tray(imex="failed"), tray(cliques=(("2e3a1f7c", "32767"),)), tray(cliques=()), host(), None],
    ids=["failed", "clique", "unknown", "x86", "alone"],
)
def test_trays_that_nvlink_does_not_join_have_their_nics(other: Facts | None) -> None:
    hosts = [tray(), *([other] if other else [])]
    found = compare.limits_of(hosts, SHIPPED)
    assert (found.joined, found.between()[1]) == (False, "the NICs")
    assert all(compare.gpu_nics({str(number): each for number, each in enumerate(hosts)}).values())


def test_every_error_that_a_node_counts_is_explained() -> None:
    node = (ROOT / "env/programs/node.sh").read_text(encoding="utf-8")
    found = re.search(r"FAULTS=\(([^)]*)\)", node)
    assert found
    assert {*found[1].split(), "ecc", "nvlink"} <= set(SHIPPED.counters)


def test_several_types_of_gpus_have_no_type() -> None:
    assert compare.gpu_of([host(), host()]) == "H200"
    assert compare.gpu_of([host(), host("NVIDIA H100 80GB HBM3")]) == ""
    assert compare.gpu_of([host("NVIDIA L4")]) == "NVIDIA L4"


# --- faults of a file ------------------------------------------------------------------------------------------------------------------

GOOD = {
    "gpu": "H200",
    "fabric": "nvlink",
    "nodes": 1,
    "test": "intranode",
    "generation": "v1",
    "lower": 0.1,
    "upper": 0.1,
    "source": "a test",
    "config": {"num_tokens": 4096},
    "figures": {"best.combine.nvl_gbs": 320.2},
}


def problems_of(reference: dict[str, Any], **others: Any) -> str:
    with pytest.raises(Trouble) as caught:
        load_references(tomlkit.dumps({"reference": [reference], **others}), "site.toml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"gpu": "NVIDIA H200"},
            "site.toml: reference[1].gpu: is not what belongs here — found NVIDIA H200, wanted a GPU type such as H200",
        ),
        ({"gpu": []}, "reference[1].gpu: is empty"),
        (
            {"fabric": ["roce", "ethernet"]},
            "reference[1].fabric: holds something that does not belong there — found ethernet",
        ),
        ({"nodes": 0}, "reference[1].nodes: is too small"),
        ({"test": "intra"}, "reference[1].test: is not what belongs here"),
        ({"generation": "v3"}, "reference[1].generation: is not what belongs here — found v3, wanted v1, v2 or v2.5"),
        ({"source": ""}, "reference[1].source: is not what belongs here"),
        ({"fault": ""}, "reference[1].fault: is not what belongs here"),
        (
            {"lower": 1.0},
            "reference[1].lower: is no fraction of the value — found 1.0, wanted a number from 0 on and below 1",
        ),
        ({"upper": -0.1}, "reference[1].upper: is no fraction of the value — found -0.1, wanted a number from 0 on"),
        ({"lower": "10 %"}, "reference[1].lower: is of the wrong type — found 10 %, wanted a number"),
        ({"upper": True}, "reference[1].upper: is of the wrong type — found True, wanted a number"),
        ({"lowr": 0.1}, "reference[1].lowr: unknown key, did you mean lower?"),
        ({"figures": {}}, "reference[1].figures: is missing or empty"),
        ({"figures": {"best.combine.nvl_gbits": 1}}, "is no figure — wanted a figure of `invoke results`"),
        ({"figures": {"best.combine.nvl_gbs": 0}}, "must be more than 0"),
        ({"figures": {"best.combine.nvl_gbs": math.nan}}, "must be more than 0"),
        ({"figures": {"best.combine.nvl_gbs": "320"}}, "is of the wrong type — found 320, wanted a number"),
        ({"config": {"tokens": 1}}, "reference[1].config.tokens: is no setting that figures depend on"),
        ({"config": {"num_tokens": [1, "2"]}}, "reference[1].config.num_tokens: is of the wrong type"),
        ({"config": {"num_tokens": []}}, "reference[1].config.num_tokens: is of the wrong type"),
    ],
)
def test_a_fault_names_its_place(change: dict[str, Any], said: str) -> None:
    assert said in problems_of({**GOOD, **change})


@pytest.mark.parametrize("key", ["gpu", "fabric", "nodes", "test", "generation", "lower", "upper", "source", "figures"])
def test_what_a_reference_must_have(key: str) -> None:
    assert f"reference[1].{key}: is missing" in problems_of(
        {name: value for name, value in GOOD.items() if name != key}
    )


def test_all_faults_are_told_at_once() -> None:
    said = problems_of(
        {**GOOD, "nodes": 0, "test": "x"},
        hint=[
            {"name": "h", "figures": ["gbs"], "when": ["percent = 5", "percentage < 5"], "means": ""},
            {"name": "i", "means": "so"},
        ],
        gpu={"H200": {"arch": "9", "links": -1, "link_gbs": "26", "source": "s"}},
        counter={
            "ecc": {"means": "x", "fails": "yes"},
            "crc": {"means": "x", "per_tb": "8"},
            "bit": {"means": "x", "per_tb": 8},
        },
        defaults={"everything": {}},
        other=1,
    )
    for place in (
        *(
            "reference[1].nodes",
            "reference[1].test",
            "hint[1].figures",
            "hint[1].when",
            "hint[1].means",
            "hint[2].figures",
            "gpu.H200.arch",
        ),
        *(
            "gpu.H200.links",
            "gpu.H200.link_gbs",
            "counter.ecc.fails",
            "counter.crc.per_tb",
            "counter.bit.source",
            "defaults.everything",
            "site.toml: other",
        ),
    ):
        assert place in said, place
    assert said.count("hint[1].when") == 2


def test_text_that_is_no_toml_names_its_line() -> None:
    with pytest.raises(Trouble, match=r"site.toml:2: is not TOML"):
        load_references("a = 1\n]", "site.toml")


# --- a site's own ----------------------------------------------------------------------------------------------------------------------

RUN = Found("intranode", "v1", True, True, config=H200, best={"combine": Best(nvl_gbs=250.0, us=1200.0, sms=24)})


def saved(existing: str, *tests: Found, **changes: Any) -> str:
    run = changes.pop("run", "r1")
    made = site_references.recorded(
        tests,
        run,
        "2026-11-21",
        **{"gpu": "NVIDIA H200", "fabric": "roce", "nodes": 2, "references": SHIPPED, **changes},
    )
    return site_references.site_text(existing, made)


def test_a_site_keeps_no_time_of_the_layout_kernel() -> None:
    spread = Spread(40.0, 40.0, 40.0)
    kept = saved("", replace(RUN, operations={"layout": Operation(us=spread)}))
    assert "layout" not in kept
    assert kept == saved("", RUN)


def test_a_sites_own_reference_wins() -> None:
    assert judged([RUN])[0].state == "below"
    both = joined(SHIPPED, load_references(saved("", RUN), "references.toml", site=True))
    for found in compare.judge([RUN], gpu="H200", fabric="roce", nodes=2, references=both):
        assert (found.state, found.percent, found.source) == ("ok", pytest.approx(100), "this site, 2026-11-21, run r1")
    few = replace(RUN, config={**H200, "num_tokens": 64})
    assert {one.state for one in compare.judge([few], gpu="H200", fabric="", nodes=1, references=both)} == {"none"}


def test_saving_the_same_again_changes_nothing() -> None:
    once = saved("", RUN)
    assert saved(once, RUN) == once
    assert "num_experts = 256" in once


def test_saving_replaces_what_it_measured_and_keeps_the_rest() -> None:
    low = Found("low-latency", "v1", True, True, low_latency=LowLatency(combine_us=70.0))
    text = saved("", RUN, low).replace("lower = 0.1\n", "lower = 0.2  # ours is old\n", 1)
    text += '\n[[hint]]\nname = "mine"\nfigures = ["us"]\nwhen = []\nmeans = "my own"\n'
    newer = replace(RUN, best={"combine": Best(nvl_gbs=260.0)})
    again = saved(text, newer, run="r2")
    references = load_references(again, "references.toml", site=True)
    found = {(one.figure, one.value, one.source.rpartition(" ")[2]) for one in references.references}
    assert found == {
        ("best.combine.nvl_gbs", 260.0, "r2"),
        ("best.combine.us", 1200.0, "r1"),
        ("low_latency.combine_us", 70.0, "r1"),
    }
    assert "# ours is old" in again
    assert again.startswith(site_references.HEAD)
    assert references.hints[0].means == "my own"
    assert judged([RUN], references=joined(SHIPPED, references), nodes=1)[1].state == "ok"


def test_what_a_person_wrote_stays_and_what_was_saved_later_counts() -> None:
    mine = tomlkit.dumps(
        {"reference": [{**GOOD, "gpu": ["H200", "H100"], "config": {}}, {**GOOD, "config": {}, "fault": "a fault"}]}
    )
    text = saved(mine, replace(RUN, config={}))
    references = load_references(text, "references.toml", site=True)
    assert [one.value for one in references.references if one.figure == "best.combine.nvl_gbs"] == [
        320.2,
        320.2,
        320.2,
        250.0,
    ]
    assert judged([RUN], references=references)[0].wanted == 250.0


def test_a_network_below_the_least_can_be_the_sites_own() -> None:
    run = Found(
        "nccl", "v1", True, True, operations={"all_to_all": Operation(bus_gbs=Spread(20, 20, 20), bytes=1 << 30)}
    )
    setting = {"gpu": "H200", "fabric": "roce", "nodes": 2, "limits": Limits(nic_gbs=50.0, gpus=8)}
    assert judged([run], **setting)[0].state == "below"
    references = load_references(saved("", run, **setting), "references.toml", site=True)
    assert judged([run], **setting | {"references": joined(SHIPPED, references)})[0].state == "ok"
    assert judged([replace(run, config={"library": "gloo"})], **setting)[0].state == "none"


def test_only_tests_that_are_well_are_kept() -> None:
    assert saved("", replace(RUN, ok=False)) == site_references.HEAD
    assert saved("", replace(RUN, best={"combine": Best(nvl_gbs=0.0)})) == site_references.HEAD


def test_between_nodes_the_fabric_is_kept() -> None:
    run = Found("internode", "v1", True, True, config=H200, best={"combine": Best(rdma_gbs=70.0)})
    [one] = load_references(saved("", run), "references.toml").references
    assert (one.fabric, one.nodes, one.gpu) == ("roce", 2, "H200")


@pytest.mark.parametrize(
    ("hosts", "why"),
    [
        ([host()], ""),
        ([host(nics=0)], "none was found between these nodes"),
        ([host("NVIDIA L40S")], "this one's is not known: NVIDIA L40S"),
        ([host(), host("NVIDIA H100")], "this one's is not known: none, or several types"),
    ],
)
def test_a_sites_file_can_always_be_read_again(hosts: list[Facts], why: str) -> None:
    run = Found("internode", "v1", True, True, config=H200, best={"combine": Best(rdma_gbs=12.0)})
    made = site_references.saved("", [run], hosts, run="r1", date="2026-11-21", nodes=2, references=SHIPPED)
    assert len(load_references(made.text, "references.toml", site=True).references) == made.count == (0 if why else 1)
    assert why in made.why_not


def test_a_site_with_four_gpus_a_node_finds_its_own_again() -> None:
    run = Found(
        "low-latency",
        "v1",
        True,
        True,
        low_latency=LowLatency(combine_us=90.0),
        ranks=tuple(Rank(number) for number in range(8)),
    )
    setting = {"gpu": "H200", "fabric": "roce", "nodes": 2, "limits": Limits(gpus=4)}
    references = load_references(saved("", run, **setting), "references.toml", site=True)
    assert references.references[0].config["num_processes"] == (4,)
    assert compare.judge([run], references=joined(SHIPPED, references), **setting)[0].state == "ok"


def test_figures_of_v1_hold_for_its_tests_in_v2_until_there_are_others() -> None:
    legacy = replace(RUN, generation="v2", best={"combine": Best(nvl_gbs=320.0)})
    assert judged([legacy])[0].state == "ok"
    references = load_references(saved("", replace(legacy, best={"combine": Best(nvl_gbs=400.0)})), "references.toml")
    assert judged([legacy], references=ReferenceSet((*SHIPPED.references, *references.references)))[0].wanted == 400
    assert judged([RUN], references=ReferenceSet((*SHIPPED.references, *references.references)))[0].wanted == 320.2


def test_a_site_file_that_cannot_be_read_is_not_written_over() -> None:
    with pytest.raises(Trouble, match="unknown key"):
        saved("[references]\n", RUN)


@settings(deadline=None, max_examples=most(30))
@given(
    st.lists(
        st.tuples(st.sampled_from(["intranode", "low-latency"]), st.integers(1, 3), st.floats(0.1, 1000)), max_size=6
    )
)
def test_what_is_saved_is_read_back(many: list[tuple[str, int, float]]) -> None:
    text, last = "", {}
    for test, tokens, value in many:
        run = Found(test, "v1", True, True, config={"num_tokens": tokens}, best={"combine": Best(nvl_gbs=value)})
        text = saved(text, run)
        last[test, tokens] = value
    found = load_references(text, "references.toml", site=True).references
    assert {(one.test, one.config["num_tokens"][0]): one.value for one in found} == last
    assert len(found) == len(last)


def test_the_book_of_a_checkout_and_a_site() -> None:
    texts = {"rules/references.toml": (ROOT / "env/rules/references.toml").read_text(encoding="utf-8")}
    assert read_references(texts) == SHIPPED
    assert read_references(texts, saved("", RUN), "/shared/references.toml").references[0].site
    with pytest.raises(Trouble, match=r"/shared/references.toml: oops: unknown key"):
        read_references(texts, "oops = 1", "/shared/references.toml")
    with pytest.raises(Trouble, match=r"env/rules/references.toml: this file is missing"):
        read_references({})


def test_joining_books_replaces_tables_of_one_name() -> None:
    other = load_references('[gpu.H200]\narch = "9.0"\nlinks = 16\nlink_gbs = 25\nsource = "mine"\n', "references.toml")
    both = joined(SHIPPED, other)
    assert both.gpus["H200"].links == 16
    assert both.gpus["B200"] == SHIPPED.gpus["B200"]
    assert both.references == SHIPPED.references
    assert joined(ReferenceSet()) == ReferenceSet()
