"""The newest runs of tests that lie in a prefix: what was run, where, when, and how it ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import PurePosixPath

from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.text import number
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.prefix.generations import Place
from deepep_bootstrap.remote.fleet import Door
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.report import pastruns

SHOWN = 5
"""Runs that are told."""


@dataclass(frozen=True)
class LastTest:
    """One run: the name of its folder, kind of test, stack, nodes, when it began (seconds since 1970, 0 where it does not say), and how
    it ended in words. Figures are judged by `invoke report RUN`, which reads the whole run."""

    run: str
    kind: str
    stack: str
    nodes: tuple[str, ...]
    started: float
    verdict: str

    @property
    def line(self) -> str:
        """The run for a person."""
        when = f", {datetime.fromtimestamp(self.started, timezone.utc):%Y-%m-%d %H:%M} UTC" if self.started else ""
        return f"test {self.kind} of {self.stack} on {fold(self.nodes)}{when}: {self.verdict} ({self.run})"


def newest(door: Door, hosts: Iterable[Host], facts: Mapping[str, Facts], *, recipes: Mapping[str, str], user: str) -> tuple[LastTest, ...]:
    """Return the newest runs in the prefix, read as `user` through the first of `hosts` that sees it; none where nobody does. Trouble
    where they cannot be read."""
    host = next((host for host in hosts if facts[host.name].prefix.exists), None)
    if host is None:
        return ()
    runs = pastruns.listed(door, Place(host, facts[host.name].prefix.path, recipes, user), most=SHOWN)
    return tuple(told(PurePosixPath(folder).name, values) for folder, values in runs.items())


def told(run: str, values: Mapping[str, str]) -> LastTest:
    """Return what the values of a run's run.env say."""
    nodes = tuple(name for name in values.get("nodes", "").split(",") if name)
    started = number(values.get("started", "")) or 0.0
    return LastTest(run, values.get("kind", "unknown"), values.get("stack", "unknown"), nodes, started, verdict(values))


def verdict(values: Mapping[str, str]) -> str:
    """Return in words how a run ended."""
    code = values.get("code", "")
    if not code:
        return "has not ended, or was cut off"
    return "ended well" if code == "0" else f"failed, exit code {code}"
