"""The outcome of a step on one host, and its form in the JSON document."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from msgspec import Struct


class Outcome(Struct, frozen=True):
    """How a step ended on one host: `state` is "done", "unchanged", "failed", "skipped", or "stopped" by ^C; `detail`
    one line; `code` an exit code; `waited` how many of the `seconds` it waited for others."""

    step: str
    host: str
    state: str
    detail: str = ""
    seconds: float = 0.0
    code: int = 0
    log: str = ""
    waited: float = 0.0


class WorkClock:
    """The time of one step, with what it waits for others apart; from its making on, in seconds."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._waited, self._waits_since = 0.0, 0.0

    def wait(self) -> None:
        """From now on the step waits."""
        self._waits_since = self._waits_since or time.monotonic()

    def work(self) -> None:
        """From now on the step works."""
        self._waited, self._waits_since = self.waited, 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether the step waits now."""
        return self._waits_since > 0

    @property
    def waited(self) -> float:
        """How long it waited so far."""
        return self._waited + (time.monotonic() - self._waits_since if self._waits_since else 0.0)

    @property
    def seconds(self) -> float:
        """How long ago it began."""
        return time.monotonic() - self._begin

    @property
    def worked(self) -> float:
        """How long it worked so far."""
        return self.seconds - self.waited


def outcome_json(outcome: Outcome) -> Mapping[str, Any]:
    """Return one outcome for the JSON document."""
    values = {key: getattr(outcome, key) for key in ("step", "host", "state", "detail", "seconds", "code", "log")}
    return {**values, "seconds": round(outcome.seconds, 3), "waited": round(outcome.waited, 3)}
