"""How many examples a property is held to: all that it asks for, and no more than the profile of `make quick` takes
there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import settings

T = TypeVar("T")

QUICK = 20
"""Examples that `make quick` takes of a property; other runs take what each asks for."""

PATIENT = 100
"""Examples of a property that asks for no number."""


def most(count: int) -> int:
    """Return how many of `count` examples this run takes."""
    return min(count, QUICK) if _is_quick() else count


def spread(every: Sequence[T]) -> Sequence[T]:
    """Return the examples that this run takes of a list in order: `make quick` each fifth, from the first on."""
    return every[::5] if _is_quick() else every


def _is_quick() -> bool:
    profile = settings.default
    return profile is not None and profile.max_examples == QUICK
