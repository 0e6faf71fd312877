"""Failed outcomes with the first cause that their log shows, for the table that ends a run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from deepep_bootstrap.analysis.diagnosis import rules
from deepep_bootstrap.analysis.diagnosis.engine import brief, diagnose
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.core.redact import scrub, secrets_of


def explained(outcomes: Iterable[Outcome], root: Path) -> tuple[Outcome, ...]:
    """Return the outcomes; the detail of a failed one goes on with its likeliest cause, the line that shows it, why,
    and what mends it, as far as the rules in env/ under `root` know. Without a log its detail is what they are asked
    about."""
    given = tuple(outcomes)
    if not any(outcome.state == "failed" for outcome in given):
        return given
    try:
        causes = rules.read_shipped_causes(root)
    except Trouble as trouble:
        # What failed is reported all the same; a fault in the rules is a remark beside it.
        return tuple(_longer(outcome, [f"no cause was looked for: {trouble}"]) for outcome in given)
    return tuple(
        _longer(outcome, _cause(outcome, causes)) if outcome.state == "failed" else outcome for outcome in given
    )


def _cause(outcome: Outcome, causes: rules.CauseSet) -> tuple[str, ...]:
    """Return the cause of a failed step in lines; nothing where none is known, since the step told its last lines."""
    found = diagnose(_logs(outcome), causes)
    return brief(found) if found.known else ()


def _logs(outcome: Outcome) -> dict[str, str]:
    """Return what a failed step printed, by the name it is reported under."""
    log = Path(outcome.log)
    if outcome.log and log.is_file():
        return {log.name: log.read_text(encoding="utf-8", errors="replace")}
    return {"": outcome.detail}


def _longer(outcome: Outcome, lines: Iterable[str]) -> Outcome:
    if outcome.state != "failed":
        return outcome
    secrets = secrets_of(os.environ)
    return replace(outcome, detail="\n".join((outcome.detail, *(scrub(line, secrets) for line in lines))))
