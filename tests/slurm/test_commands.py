"""Slurm: parsers on what a real Slurm 22.05 printed, command lines, and both together on the embedded cluster."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.slurm import commands
from tests.support.paths import TESTS

if TYPE_CHECKING:
    from tests.support.lab import LiveLab

pytest_plugins = ["tests.support.lab"]

CASES = sorted((TESTS / "cases" / "slurm" / "commands").glob("*.json"))


def plain(value: Any) -> Any:
    """Return what JSON would make of a parser's result."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value)
    elif isinstance(value, tuple):
        value = [plain(item) for item in value]
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_recorded_output(path: Path) -> None:
    case = json.loads(path.read_text(encoding="utf-8"))
    assert plain(getattr(commands, case["parser"])(case["input"])) == case["expected"]


@pytest.mark.parametrize("parser", ["parse_job", "parse_nodes", "parse_exit", "unfold", "gpus_of"])
@given(
    text=st.text()
    | st.from_regex(r"(JobId=1 (JobState|NodeList|ExitCode)=\S*)|NodeName=\S* Gres=\S*|\d+\|\w+\|n\[\d-\d+\]\|")
)
def test_any_text_is_a_value_or_trouble(parser: str, text: str) -> None:
    with contextlib.suppress(Trouble):
        getattr(commands, parser)(text)


@given(st.lists(st.integers(0, 300), unique=True, max_size=40))
def test_folding_comes_back(numbers: list[int]) -> None:
    names = [f"b200-{number:03d}" for number in numbers]
    assert sorted(commands.unfold(commands.fold(names))) == sorted(names)


def test_a_huge_node_list_is_refused_and_not_unfolded() -> None:
    with pytest.raises(Trouble, match="10000"):
        commands.unfold("n[1-999999999]")


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:8", 8),
        ("gpu:h100:8(S:0-1)", 8),
        ("gpu:a100:4,gpu:v100:2", 6),
        ("gpu:tesla:2(IDX:0-1),nic:4", 2),
        ("gpu", 1),
        ("shard:8", 0),
        ("(null)", 0),
        ("", 0),
    ],
)
def test_gpus_of_a_node(gres: str, gpus: int) -> None:
    assert commands.gpus_of(gres) == gpus


@pytest.mark.parametrize(
    ("setting", "nodes", "wanted"),
    [
        ("auto", ["gpu:8", "gpu:8"], "gpu:8"),
        ("auto", ["gpu:h100:8(S:0-1)", "gpu:h200:8"], "gpu:8"),
        ("auto", ["gpu:8", "gpu:4"], "gpu:4"),
        ("auto", ["(null)", ""], ""),
        ("auto", [], ""),
        ("none", ["gpu:8"], ""),
        ("gpu:h100:4", ["gpu:8"], "gpu:h100:4"),
        ("gpu:8,nic:2", [], "gpu:8,nic:2"),
    ],
)
def test_what_a_job_asks_for(setting: str, nodes: list[str], wanted: str) -> None:
    assert commands.resolve_gres(setting, nodes) == wanted


@pytest.mark.parametrize(
    ("setting", "nodes"), [("auto", ["gpu:8", "(null)"]), ("8", ["gpu:8"]), ("gpu:8 --wrap=x", []), ("", [])]
)
def test_a_request_that_nobody_can_fill_is_trouble(setting: str, nodes: list[str]) -> None:
    with pytest.raises(Trouble, match="gres"):
        commands.resolve_gres(setting, nodes)


@pytest.mark.parametrize(
    ("state", "usable"),
    [
        ("IDLE", True),
        ("MIXED+PLANNED", True),
        ("ALLOCATED", True),
        ("COMPLETING", True),
        ("IDLE+DRAIN", False),
        ("DOWN*", False),
        ("idle*", False),
        ("IDLE+NOT_RESPONDING", False),
        ("DOWN+DRAIN", False),
        ("IDLE+REBOOT_REQUESTED", False),
        ("INVAL", False),
    ],
)
def test_usable_nodes(state: str, usable: bool) -> None:
    assert commands.is_usable(state) is usable


@pytest.mark.parametrize(
    ("state", "usable"),
    [("IDLE+RESERVED", True), ("IDLE+MAINTENANCE+RESERVED", True), ("maint", True), ("IDLE+DRAIN+RESERVED", False)],
)
def test_reserved_nodes_are_usable_for_whoever_names_a_reservation(state: str, usable: bool) -> None:
    assert commands.is_usable(state, reservation="maint") is usable
    assert not commands.is_usable(state)


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["--exclusive", "--reservation=maint", "--requeue"], ["--reservation=maint"]),
        (["-t", "10", "-C", "h200&ib", "-x", "n1", "-N", "4"], ["-t", "10", "-C", "h200&ib", "-x", "n1"]),
        (["-th", "--reserv", "maint", "-Lcuda:2"], ["-th", "--reserv", "maint", "-Lcuda:2"]),
        (["--output=x", "--open-mode", "append", "--mem=4G", "--nodelist=n1", "--", "--"], []),
        ([], []),
    ],
)
def test_what_a_build_takes_over_of_the_sites_words_for_sbatch(words: list[str], kept: list[str]) -> None:
    assert commands.place_words(words) == tuple(kept)
    assert commands.reservation_of(words) == ("maint" if any("maint" in word for word in kept) else "")


def test_command_lines_are_argument_lists_with_the_sites_words_last() -> None:
    request = commands.AllocationRequest(
        name="deepep build",
        nodes=("n002", "n001"),
        partition="gpu",
        account="ml",
        qos="high",
        gres="gpu:8",
        minutes=60,
        exclusive=True,
        extra=("--reservation=deepep", "--time=10"),
    )
    wanted = (
        "--job-name=deepep build",
        "--nodelist=n[001-002]",
        "--partition=gpu",
        "--account=ml",
        "--qos=high",
        "--gres=gpu:8",
    )
    assert commands.request_options(request) == (
        *wanted,
        "--time=60",
        "--exclusive",
        "--reservation=deepep",
        "--time=10",
    )
    assert (
        commands.request_options(commands.AllocationRequest(count=2)),
        commands.request_options(commands.AllocationRequest()),
    ) == (("--nodes=2",), ())


@pytest.mark.e2e
def test_a_real_job_from_submission_to_its_end(lab: LiveLab) -> None:
    def run(*argv: str) -> str:
        done = lab.ssh("login1", " ".join(f"'{word}'" for word in argv))
        assert done.returncode == 0, done
        return done.stdout

    lab.ssh("login1", "printf '#!/bin/bash\\nsrun hostname; exit 7\\n' >/shared/seven.sh")
    request = commands.AllocationRequest(
        name="JobState=FAILED UserId=x(0)",
        count=2,
        gres="gpu:8",
        extra=("--output=/shared/seven.out", "--wait-all-nodes=1"),
    )
    job = run("sbatch", "--parsable", *commands.request_options(request), "/shared/seven.sh").strip()
    while True:
        seen = commands.parse_job(run("scontrol", "show", "job", "-o", job))
        assert seen is not None
        if seen.ended:
            break
    assert (seen.state, seen.code, seen.output, seen.nodes) == ("FAILED", 7, "/shared/seven.out", ("n001", "n002"))
    nodes = commands.parse_nodes(run("scontrol", "show", "node", "-o"))
    assert [(node.name, node.usable, commands.gpus_of(node.gres)) for node in nodes] == [
        ("n001", True, 8),
        ("n002", True, 8),
    ]


@pytest.mark.e2e
def test_a_real_step_inside_a_held_allocation(lab: LiveLab) -> None:
    step = " ".join(commands.srun("$SLURM_JOB_ID", ["hostname"], node="n002"))
    request = commands.AllocationRequest(nodes=("n002",), gres="gpu:8")
    done = lab.ssh("login1", f"salloc {' '.join(commands.request_options(request))} sh -c '{step}'")
    assert (done.returncode, done.stdout) == (0, "n002\n"), done
