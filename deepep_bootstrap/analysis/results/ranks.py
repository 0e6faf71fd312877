"""Which ranks are slow and which are missing, and figures over all ranks. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping

from deepep_bootstrap.analysis.results.model import Rank, Spread

SLOW_RATIO = 1.25
"""A rank is slow from this multiple of all ranks' median time. Healthy ranks of one node stay within 1.15 of it (NVLink, H200)."""

SLOW_DEVIATIONS = 5.0
"""… and from so many median absolute deviations above it, so that nobody is called slow where all ranks differ widely. The median
and this deviation hold where up to half of the ranks are odd, which mean and standard deviation do not."""

FEWEST = 4
"""Among fewer ranks there is no middle that means anything."""

NOT_OWN = ("_min_us", "_max_us", "_recv_us", "_copy_us", "_reduce_us")
"""Times that tell little about a rank: extremes, waiting for others, and copies of few microseconds."""


def judge(figures: Mapping[int, Mapping[str, float]], lacking: Mapping[int, str]) -> tuple[Rank, ...]:
    """Return every rank with its state. `lacking` are ranks that are not whole, and why."""
    times: dict[str, dict[int, float]] = {}
    for rank, own in figures.items():
        for name, value in own.items():
            if name.endswith("_us") and not name.endswith(NOT_OWN):
                times.setdefault(name, {})[rank] = value
    slow: dict[int, tuple[float, str]] = {}
    for name, values in times.items():
        for rank, ratio, middle in outliers(values):
            words = f"{name.removesuffix('_us').replace('_', ' ')} {values[rank]:g} us, the median of all ranks is {middle:g} us"
            slow[rank] = max(slow.get(rank, (0.0, "")), (ratio, words))
    found = []
    for rank in sorted({*figures, *lacking}):
        state = "missing" if rank in lacking else "slow" if rank in slow else "ok"
        why = lacking.get(rank) or slow.get(rank, (0.0, ""))[1]
        found.append(Rank(rank, state, why, dict(figures.get(rank, {}))))
    return tuple(found)


def outliers(values: Mapping[int, float]) -> Iterable[tuple[int, float, float]]:
    """Yield ranks whose time is far above the median of all, with its multiple of it, and the median."""
    if len(values) < FEWEST:
        return
    middle = statistics.median(values.values())
    deviation = statistics.median(abs(value - middle) for value in values.values())
    for rank, value in values.items():
        if middle and value > SLOW_RATIO * middle and value - middle > SLOW_DEVIATIONS * deviation:
            yield rank, value / middle, tidy(middle)


def spread(figures: Mapping[int, Mapping[str, float]], name: str) -> Spread | None:
    """Return smallest, middle and largest of one figure, None where no rank has it."""
    values = [own[name] for own in figures.values() if name in own]
    return Spread(min(values), tidy(statistics.median(values)), max(values)) if values else None


def median_of(figures: Mapping[int, Mapping[str, float]], name: str) -> float | None:
    """Return the middle value of one figure over the ranks, None where no rank has it."""
    found = spread(figures, name)
    return None if found is None else found.median


def middle(values: Iterable[float]) -> float:
    """Return the middle value."""
    return tidy(statistics.median(values))


def tidy(value: float) -> float:
    """Return a mean of two printed numbers without the noise of binary fractions; nobody prints more than six places."""
    return round(value, 6)


def numbers(ranks: Collection[int]) -> str:
    """Return rank numbers as people write them: 0-3, 7."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
