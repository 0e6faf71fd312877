"""What is to be done and why: facts and wishes in, steps out. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Reason:
    """Why a step is in the plan: what was found and what is wanted."""

    found: str
    wanted: str


@dataclass(frozen=True)
class Step:
    """One thing to do. `kind` is "prefix", "host", "build", "offer" or "verify"; `name` the recipe or the store entry;
    `hosts` where; `after` names of steps that must have ended well before."""

    kind: str
    name: str
    title: str
    hosts: tuple[str, ...]
    reason: Reason
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """How a step ended on one host: `state` is "done", "unchanged", "failed", "skipped"; `detail` one line; `code` an exit code."""

    step: str
    host: str
    state: str
    detail: str = ""
    seconds: float = 0.0
    code: int = 0
    log: str = ""
