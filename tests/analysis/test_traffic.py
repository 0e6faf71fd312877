"""What NICs carried during a run and errors that are new: cases of counters before and after, and what holds for all
of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import given, settings
from hypothesis import strategies as st

from deepep_bootstrap.analysis import traffic
from deepep_bootstrap.analysis.reference_file import load_references
from deepep_bootstrap.analysis.results.model import STATES
from deepep_bootstrap.testing import run_folder
from deepep_bootstrap.testing.run_folder import Counter, Counters, GpuCounter
from deepep_bootstrap.testing.run_folder import TestRun as Run
from tests.support.paths import ROOT

SHIPPED = load_references((ROOT / "env/rules/references.toml").read_text(encoding="utf-8"), "env/rules/references.toml")
CASES = sorted((ROOT / "tests/cases/analysis/traffic").glob("*.toml"))


def run_of(case: Mapping[str, Any]) -> Run:
    """Return the run of a case: counters as their files have them."""
    hosts = [name for name, value in case.items() if isinstance(value, dict) and name != "expected"]
    counters = {
        host: (
            run_folder.parse_counters(case[host]["before"].strip(), f"{host}.before"),
            run_folder.parse_counters(case[host]["after"].strip(), f"{host}.after") if "after" in case[host] else None,
        )
        for host in hosts
    }
    return Run("r1", {"kind": case["kind"], "nodes": case["nodes"]}, {}, counters)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case(path: Path) -> None:
    case = tomlkit.parse(path.read_text(encoding="utf-8")).unwrap()
    found = traffic.judge_traffic(run_of(case), expected_nics=case.get("expected"), references=SHIPPED)
    wanted = case.get("verdict", [])
    assert [(one.host, one.state, one.text) for one in found] == [
        (one["host"], one["state"], one.get("text", seen.text)) for one, seen in zip(wanted, found, strict=True)
    ]
    for one, seen in zip(wanted, found, strict=True):
        assert seen.kind == one.get("kind", "nic")
        assert seen.subject == one.get("subject", seen.subject)
        assert one.get("means", "") in "\n".join(seen.means)
        assert seen.lines()[0] == f"{seen.state:<5}  {seen.host}: {seen.text}"
        json.dumps(seen.as_json())


def nics(values: Sequence[int], **changes: Any) -> Counters:
    """Return counters of NICs that sent and received so many bytes."""
    return Counters(
        0.0,
        {f"mlx5_{n}/1": Counter(f"mlx5_{n}", 1, "InfiniBand", 400.0, value, value) for n, value in enumerate(values)},
        {},
        **changes,
    )


def pair(before: Counters, after: Counters) -> Run:
    return Run("r1", {"kind": "internode", "nodes": "n1,n2"}, {}, {"n1": (before, after), "n2": (before, after)})


def test_a_host_that_ran_but_left_no_counters_is_named() -> None:
    found = traffic.judge_traffic(Run("r1", {"nodes": "n1"}, {}, {}))
    assert [(one.host, one.state, one.text) for one in found] == [
        ("n1", "none", "no counters from before and after the test")
    ]
    half = traffic.judge_traffic(Run("r1", {"nodes": "n1"}, {}, {"n1": (None, nics([1]))}))
    assert half[0].text == "no counters from before the test"


def test_shares_are_of_the_nics_that_should_carry() -> None:
    before, after = nics([0, 0, 0]), nics([3 * 10**9, 10**9, 4 * 10**9])
    found = traffic.nic_traffic(pair(before, after), {"n1": ["mlx5_0", "mlx5_1"]})
    ours = [(nic.device, nic.share, nic.expected, nic.sent) for nic in found if nic.host == "n1"]
    assert ours == [
        ("mlx5_0/1", 0.75, True, 3 * 10**9),
        ("mlx5_1/1", 0.25, True, 10**9),
        ("mlx5_2/1", 0.0, False, 4 * 10**9),
    ]
    assert sum(nic.share for nic in found if nic.host == "n2") == pytest.approx(1)


def test_no_nic_of_a_map_is_expected_where_it_names_none() -> None:
    found = traffic.judge_traffic(pair(nics([0]), nics([10**9])), expected_nics={"n1": [], "n2": ["mlx5_0"]})
    assert [one.state for one in found] == ["none", "ok"]


def test_second_ports_are_nics_of_their_own() -> None:
    before = Counters(0.0, {"mlx5_0/2": Counter("mlx5_0", 2, "InfiniBand", 400.0, 0, 0)}, {})
    after = Counters(0.0, {"mlx5_0/2": Counter("mlx5_0", 2, "InfiniBand", 400.0, 10**9, 10**9)}, {})
    for name in ("mlx5_0", "mlx5_0:2", "mlx5_0/2"):
        found = traffic.judge_traffic(pair(before, after), expected_nics={"n1": [name], "n2": [name]})
        assert [one.state for one in found] == ["ok", "ok"]
    assert (
        traffic.judge_traffic(pair(before, after), expected_nics={"n1": ["mlx5_0:1"]})[0].text
        == "mlx5_0/1 is not there"
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (12_345_678_901, "12.3 GB"), (2 * 10**12, "2.0 TB")],
)
def test_bytes_as_people_read_them(count: int, text: str) -> None:
    assert traffic.gigabytes(count) == text


# --- properties ------------------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(10**6, 10**12))
def test_a_balanced_map_is_always_ok(gpus: int, count: int, size: int) -> None:
    """However many GPUs share however many NICs: where loads differ by one GPU at most, no NIC is called idle."""
    loads = [len(range(n, gpus, count)) for n in range(min(gpus, count))]
    found = traffic.judge_traffic(pair(nics([0] * len(loads)), nics([load * size for load in loads])))
    assert {one.state for one in found} == {"ok"}


@settings(deadline=None)
@given(st.integers(2, 12), st.data(), st.integers(10**7, 10**12))
def test_an_idle_nic_is_always_named(count: int, data: st.DataObject, size: int) -> None:
    idle = data.draw(st.integers(0, count - 1))
    moved = [0 if n == idle else size for n in range(count)]
    found = traffic.judge_traffic(pair(nics([5] * count), nics([5 + one for one in moved])))
    assert [(one.host, one.subject, one.state) for one in found] == [
        (host, f"mlx5_{idle}/1", "below") for host in ("n1", "n2")
    ]


counts = st.integers(0, 2**64)
errors = st.dictionaries(st.sampled_from(["symbol_error", "out_of_sequence", "odd"]), counts, max_size=2)
counters = st.builds(
    Counters,
    st.floats(0, 1e10),
    st.dictionaries(
        st.sampled_from(["mlx5_0/1", "mlx5_1/1", "mlx5_1/2", "eth/1"]),
        st.builds(
            Counter,
            st.just("d"),
            st.just(1),
            st.sampled_from(["InfiniBand", "Ethernet"]),
            st.sampled_from([0.0, 100.0, 400.0]),
            counts,
            counts,
            errors,
        ),
    ),
    st.dictionaries(st.integers(0, 3), st.builds(GpuCounter, st.just(0), errors), max_size=2),
)
maps = st.dictionaries(
    st.sampled_from(["n1", "n2", "n3"]), st.lists(st.sampled_from(["mlx5_0", "mlx5_1:2", "x", "", ":"]), max_size=3)
)


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(["n1", "n2"]), st.tuples(st.none() | counters, st.none() | counters)),
    st.sampled_from(["", "n1", "n1,n2", "n3,n1"]),
    st.none() | maps,
)
def test_whatever_was_counted_there_is_a_verdict(
    found: dict[str, tuple[Counters | None, Counters | None]], nodes: str, expected: dict[str, list[str]] | None
) -> None:
    run = Run("r1", {"kind": "internode", "nodes": nodes}, {}, found)
    said = traffic.judge_traffic(run, expected_nics=expected, references=SHIPPED)
    hosts = {*filter(None, nodes.split(",")), *found}
    for host in hosts:
        assert len(hosts) == 1 or any(one.host == host for one in said), host
    assert all(one.state in STATES and one.text for one in said)
    for nic in traffic.nic_traffic(run, expected):
        assert 0 <= nic.share <= 1
        assert not nic.problem or nic.sent == nic.received == 0
