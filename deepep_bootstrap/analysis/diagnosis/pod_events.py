"""What pods got over: warnings among Kubernetes' events of one that was scheduled after all, or runs and is ready, and
whatever stands before the table in which the last of them came up.

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
    r"^(?:\S+ +)?(?:pods?/)?(?P<pod>[a-z0-9][a-z0-9.-]*) +(?P<ready>\d+)/(?P<all>\d+) +(?P<state>[A-Z]\S*)\s"
)
"""A row of `kubectl get pods`, with or without the namespace, and the kind before the name."""

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


def came_up(lines: Sequence[str]) -> int:
    """Return the line after the last row of a pod that was not ready in a table above and is now, where every pod in
    the tables is ready at last; 0 where some pod is not, or all were from the start."""
    ready: dict[str, bool] = {}
    waited = set[str]()
    end = 0
    for number, line in enumerate(lines):
        for pod, is_ready in _states(line, ""):
            ready[pod] = is_ready
            if not is_ready:
                waited.add(pod)
            elif pod in waited:
                end = number + 1
    return end if all(ready.values()) else 0


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
