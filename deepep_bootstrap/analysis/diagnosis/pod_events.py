"""Warnings among Kubernetes' events that a pod got over: it was scheduled after all, or runs and is ready.

Events stay for an hour, so those of a node that joins or of an image that was pulled late stand beside pods that are
well. What a log says last of a pod counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from msgspec import Struct

WARNING = re.compile(r"(?:^|\s)Warning\s+(?P<reason>[A-Z]\w+)\s")
"""An event as `kubectl get events` and `kubectl describe` print it."""

OBJECT = re.compile(r"\s[Pp]od/(?P<pod>[a-z0-9][a-z0-9.-]*)(?=\s|$)")
LISTED = re.compile(
    r"^(?:\S+ +)?(?P<pod>[a-z0-9][a-z0-9.-]*) +(?P<ready>\d+)/(?P<all>\d+) +(?P<state>[A-Z][A-Za-z:]*)\s"
)
"""A row of `kubectl get pods`, with or without the namespace."""

DESCRIBED = re.compile(r"^Name: +(?P<pod>[a-z0-9][a-z0-9.-]*)\s*$")
"""The first line of `kubectl describe pod`."""

CONDITION = re.compile(r"^ +Ready +(?P<ready>True|False)\s*$")
ASSIGNED = re.compile(r"Successfully assigned (?:[\w.-]+/)?(?P<pod>[a-z0-9][a-z0-9.-]*) to ")
ENDED = {"Completed", "Succeeded"}


class _Warning(Struct, frozen=True):
    line: int
    pod: str
    reason: str


def got_over(lines: Sequence[str]) -> frozenset[int]:
    """Return the lines, counted from 0, with warnings about pods that are well by what the lines say last."""
    if not any("Warning" in line for line in lines):
        return frozenset()
    warnings, ready, assigned = _read(lines)
    return frozenset(
        each.line
        for each in warnings
        if ready.get(each.pod) or (each.reason == "FailedScheduling" and assigned.get(each.pod, -1) > each.line)
    )


def _read(lines: Sequence[str]) -> tuple[list[_Warning], dict[str, bool], dict[str, int]]:
    """Return the warnings with their pods; which pods are ready at last; and where pods were assigned to nodes."""
    warnings: list[_Warning] = []
    ready: dict[str, bool] = {}
    assigned: dict[str, int] = {}
    described = ""
    for number, line in enumerate(lines):
        if begins := DESCRIBED.match(line):
            described = begins["pod"]
        elif line.startswith("$ "):
            described = ""
        ready.update(_states(line, described))
        if to := ASSIGNED.search(line):
            assigned[to["pod"]] = number
        if warning := WARNING.search(line):
            named = OBJECT.search(line)
            warnings.append(_Warning(number, named["pod"] if named else described, warning["reason"]))
    return warnings, ready, assigned


def _states(line: str, described: str) -> Iterator[tuple[str, bool]]:
    """Yield a pod and whether it is ready where a line says it."""
    if row := LISTED.match(line):
        yield row["pod"], row["state"] in ENDED or (row["state"] == "Running" and row["ready"] == row["all"])
    elif described and (condition := CONDITION.match(line)):
        yield described, condition["ready"] == "True"
