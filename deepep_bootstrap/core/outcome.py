"""The outcome of a step on one host, and its form in the JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct


class Outcome(Struct, frozen=True):
    """How a step ended on one host: `state` is "done", "unchanged", "failed", "skipped"; `detail` one line; `code`
    an exit code."""

    step: str
    host: str
    state: str
    detail: str = ""
    seconds: float = 0.0
    code: int = 0
    log: str = ""


def outcome_json(outcome: Outcome) -> Mapping[str, Any]:
    """Return one outcome for the JSON document."""
    values = {key: getattr(outcome, key) for key in ("step", "host", "state", "detail", "seconds", "code", "log")}
    return {**values, "seconds": round(outcome.seconds, 3)}
