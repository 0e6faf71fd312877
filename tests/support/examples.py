"""How many examples a property is held to: all that it asks for, and no more than the profile of `make quick` takes
there."""

from __future__ import annotations

from hypothesis import settings

QUICK = 20
"""Examples that `make quick` takes of a property; other runs take what each asks for."""

PATIENT = 100
"""Examples of a property that asks for no number."""


def most(count: int) -> int:
    """Return how many of `count` examples this run takes."""
    profile = settings.default
    return min(count, QUICK) if profile is not None and profile.max_examples == QUICK else count
