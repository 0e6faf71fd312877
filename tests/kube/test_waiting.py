"""Why pods do not start: cases in the form of the API. No cluster was at hand: their texts are those that the sources of
Kubernetes, containerd and Kueue print and that people quote in their issues."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepep_bootstrap.kube import waiting
from tests.support.paths import TESTS

CASES = TESTS / "cases/kube"


@pytest.mark.parametrize("file", sorted((CASES / "waiting").iterdir()), ids=lambda file: file.stem)
def test_why_pods_wait(file: Path) -> None:
    case = json.loads(file.read_text())
    found = waiting.explain(case["pods"], case["events"], case["wanted"], case.get("owner"))
    assert (found.cause if found else "") == case["cause"], found
    if found:
        assert case["says"] in found.text
        assert found.final == case["final"]
        assert found.remedy


@pytest.mark.parametrize("file", sorted((CASES / "gone").iterdir()), ids=lambda file: file.stem)
def test_why_a_pod_is_gone(file: Path) -> None:
    case = json.loads(file.read_text())
    found = waiting.gone(case["pod"], case.get("events", []))
    assert bool(found) == bool(case["says"]), found
    if found:
        assert case["says"] in found.text
        assert found.taken == case["taken"]


def test_what_the_api_says_obeys_no_terminal_and_has_an_end() -> None:
    said = "0/1 nodes are available: \x1b[31m" + "x" * 10000
    pod = {"metadata": {"name": "a"}, "status": {"phase": "Pending", "conditions": [
        {"type": "PodScheduled", "status": "False", "message": said}]}}  # fmt: skip
    found = waiting.explain([pod], [], 1)
    assert found is not None
    assert "\x1b" not in found.text
    assert len(found.text) < 2 * waiting.LONGEST
