"""A verdict: one per figure, NIC or counter, as a line for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

OK, BELOW, ABOVE, NONE, NOTE = "ok", "below", "above", "none", "note"
STATES = (BELOW, ABOVE, NOTE, NONE, OK)
"""In the order in which they deserve a look. Only `below` says no; `none`: there was nothing to compare with, or it
could not be read."""

FIGURE, NIC, ERROR = "figure", "nic", "error"


@dataclass(frozen=True)
class Verdict:
    """What one thing was found to be.

    - `kind` is figure, nic or error; `subject` the figure's path in the document of `invoke results`
      ("best.dispatch_fp8.nvl_gbs"), or
      the NIC ("mlx5_3/1") or GPU ("gpu 4") of `host`; `test` and `log` say where a figure is from.
    - `value` in `unit`; `wanted` is the reference's value, `low` and `high` what counts as ok around it, `percent` the
      performance in
      percent of the reference (for times too: twice as slow is 50), `source` where the reference is from.
    - `limit` is what the hardware can move at most, in `unit`, `of_limit` the value in percent of it; `impossible`:
      more than can be.
    - `text` is the verdict in one sentence, `means` what a figure like this usually comes from, the likeliest first.
    """

    kind: str
    subject: str
    state: str
    text: str
    title: str = ""
    host: str = ""
    test: str = ""
    log: str = ""
    value: float | None = None
    unit: str = ""
    wanted: float | None = None
    low: float | None = None
    high: float | None = None
    percent: float | None = None
    source: str = ""
    limit: float | None = None
    of_limit: float | None = None
    impossible: bool = False
    means: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the verdict as a JSON value with the keys that docs/json.md promises."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    def lines(self) -> tuple[str, ...]:
        """Return the verdict for people: one line, and one more for each thing it usually means."""
        where = f"{self.host}: " if self.host else f"{self.test} " if self.test else ""
        return f"{self.state:<5}  {where}{self.text}", *(f"       {meaning}" for meaning in self.means)


def worst_first(verdicts: Iterable[Verdict]) -> tuple[Verdict, ...]:
    """Return the verdicts in the order of STATES, and as they came within each."""
    return tuple(sorted(verdicts, key=lambda verdict: STATES.index(verdict.state)))
