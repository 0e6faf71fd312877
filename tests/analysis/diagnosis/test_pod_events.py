"""Warnings about pods that are well by now are no failure; those about others are."""

from __future__ import annotations

import pytest

from deepep_bootstrap.analysis.diagnosis.engine import diagnose
from deepep_bootstrap.analysis.diagnosis.pod_events import got_over
from tests.support.diagnosis import BOOK

EVENTS = """\
LAST SEEN   TYPE      REASON                   OBJECT             MESSAGE
5m58s       Warning   FailedCreatePodSandBox   pod/plugin-8xk4m   Failed to create pod sandbox: no runtime for "nvidia" is configured
1m40s       Normal    Started                  pod/plugin-8xk4m   Started container plugin
$ kubectl get pods -n gpu-operator
NAME           READY   STATUS    RESTARTS   AGE
"""
DESCRIBED = """\
$ kubectl describe pod ep-0
Name:             ep-0
Conditions:
  Type              Status
  Ready             {ready}
Events:
  Warning  FailedScheduling               2m11s   default-scheduler  0/9 nodes are available: 9 Insufficient nvidia.com/gpu.
  Warning  FailedPrepareDynamicResources  3s      kubelet            Failed to prepare dynamic resources: driver odd
"""
ASSIGNED = (
    "  Normal   Scheduled                      2m5s    default-scheduler  Successfully assigned default/ep-0 to n7\n"
)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (EVENTS, set()),
        (EVENTS + "plugin-8xk4m   1/1   Running   0   6m\n", {1}),
        (EVENTS + "default   plugin-8xk4m   1/1   Running   0   6m\n", {1}),
        (EVENTS + "plugin-8xk4m   0/1   Completed   0   6m\n", {1}),
        (EVENTS + "plugin-8xk4m   1/2   Running   7   6m\n", set()),
        (EVENTS + "plugin-8xk4m   0/1   CrashLoopBackOff   7   6m\n", set()),
        (EVENTS + "plugin-9zz9z   1/1   Running   0   6m\n", set()),
        (EVENTS + "plugin-8xk4m   1/1   Running   0   6m\nplugin-8xk4m   0/1   Error   0   7m\n", set()),
        (DESCRIBED.format(ready="True"), {6, 7}),
        (DESCRIBED.format(ready="False"), set()),
        (DESCRIBED.format(ready="False") + ASSIGNED, {6}),
        (ASSIGNED + DESCRIBED.format(ready="False"), set()),
        ("Name:   ep-0\n  Ready   True\n$ kubectl get events\n3s   Warning   Failed   odd\n", set()),
    ],
)
def test_what_a_pod_got_over(text: str, lines: set[int]) -> None:
    assert got_over(text.split("\n")) == lines


def test_an_event_counts_until_its_pod_is_ready() -> None:
    def causes(end: str) -> list[str]:
        return [each.cause for each in diagnose({"log": EVENTS + end}, BOOK).findings]

    assert causes("plugin-8xk4m   0/1   ContainerCreating   0   6m\n") == ["k8s-nvidia-runtime"]
    assert causes("plugin-8xk4m   1/1   Running   0   6m\n") == []


def test_the_first_error_of_a_pod_is_not_the_wait_for_a_node() -> None:
    found = diagnose({"log": DESCRIBED.format(ready="False") + ASSIGNED}, BOOK).first
    assert found
    assert "FailedPrepareDynamicResources" in found.evidence.text
