"""Confidence in named causes held against the recorded cases: with all rules, and with the rule of each case's own
cause taken away, as a failure meets them that nobody wrote a rule for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from msgspec import Struct
from msgspec.structs import replace

from deepep_bootstrap.analysis.diagnosis.engine import SHARED_MOST, SURE, diagnose
from deepep_bootstrap.analysis.diagnosis.rules import load_causes
from tests.support.diagnosis import BOOK, Case, recorded_cases

LEVELS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.6, 0.5, 0.3)
CONFIDENT, RIGHT = 0.9, 0.95
BORROWED = 0.8
LEFT = 0.01
"""Share of cases that may be given to another cause for sure where their own is unknown, and may not be more."""


class Named(Struct, frozen=True):
    """The first cause named for a case: how sure, and whether it is right (or one that a careful reader could name
    too)."""

    name: str
    cause: str
    confidence: float
    right: bool


def named(cases: Sequence[Case], *, without_own: bool) -> Iterator[Named]:
    for case in cases:
        causes = tuple(cause for cause in BOOK.causes if cause.slug != case.cause)
        book = replace(BOOK, causes=causes) if without_own else BOOK
        findings = diagnose({case.path.name: case.text}, book).findings
        if findings:
            first = findings[0]
            yield Named(case.name, first.cause, first.confidence, first.cause in (case.cause, *case.also))


def curve(found: Sequence[Named], title: str) -> str:
    rows = [
        f"  {level:.2f}  {len(above):5d}  {sum(each.right for each in above):5d}"
        for level in LEVELS
        if (above := [each for each in found if each.confidence >= level]) is not None
    ]
    return "\n".join((title, "  from  named  right", *rows))


def test_nine_tenths_of_confidence_are_right_nineteen_times_in_twenty() -> None:
    cases = recorded_cases()
    found = list(named(cases, without_own=False))
    print(curve(found, f"{len(cases)} recorded cases, all rules:"))
    confident = [each for each in found if each.confidence >= CONFIDENT]
    assert len(confident) >= len(cases) / 2
    wrong = [each for each in confident if not each.right]
    assert len(wrong) <= (1 - RIGHT) * len(confident), wrong


def test_a_cause_that_nobody_knows_is_not_given_to_its_neighbour() -> None:
    """Before symptoms were told from signs, 18 of 537 cases without their own rule were given to a wrong cause with
    0.8 and more."""
    cases = [case for case in recorded_cases() if case.cause]
    found = list(named(cases, without_own=True))
    print(curve(found, f"{len(cases)} recorded cases, each without the rule of its own cause:"))
    borrowed = [each for each in found if each.confidence >= BORROWED and not each.right]
    assert len(borrowed) <= LEFT * len(cases), borrowed


RULE = """
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
    rules = load_causes(RULE, "own.toml")
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
