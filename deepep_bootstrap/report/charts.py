"""Small charts as inline SVG, drawn for any width: places across are percentages, sizes of text and marks
are pixels.

Each chart is decoration of a table row that says the same in numbers, so it is hidden from screen
readers. Colours come from classes of the page, never from here; a mark that matters has a shape of its
own as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles

from markupsafe import Markup, escape

BAR_HEIGHT, STRIP_HEIGHT, TREND_HEIGHT = 20, 34, 132
"""Pixels."""

DOT, SMALL_DOT, MANY = 4.5, 2.5, 48
"""Radius of a dot; dots of a strip get small beyond so many ranks."""

FEW = 4
"""Ranks from which on a strip shows their middle half."""

LANES = (0, -6, 6, -3, 3)
"""Pixels by which neighbours of a strip are moved apart, so that equal ones can be counted."""

MARKS = {"slow": "M0-6 6 5H-6Z", "missing": "M-4-4 4 4M4-4-4 4", "failed": "M-4-4 4 4M4-4-4 4"}
"""Paths around 0, 0: a triangle for what is slow, a cross for what failed."""


@dataclass(frozen=True)
class Dot:
    """One value of a strip or a trend; `state` is ok, slow, missing or failed, `label` what it is called ("rank 5")."""

    value: float
    label: str = ""
    state: str = "ok"


@dataclass(frozen=True)
class Scale:
    """A range of values that is drawn over the whole width or height."""

    low: float
    high: float

    @classmethod
    def around(cls, values: Sequence[float], pad: float = 0.12) -> Scale:
        """Return a range with all values and some room on both sides; never an empty one."""
        low, high = min(values), max(values)
        room = (high - low) * pad or abs(high) * pad or 1.0
        return cls(low - room, high + room)

    def share(self, value: float) -> float:
        """Return where a value lies: 0 to 1, values outside at the border."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))


def tag(name: str, *inner: str, **attributes: object) -> Markup:
    """Return one element. An attribute's name loses a trailing underscore and gets hyphens for the others; None
    leaves it out. Every text that is no Markup is escaped."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{words}>{''.join(escape(each) for each in inner)}</{name}>")  # noqa: S704 - all parts were escaped


def percent(share: float) -> str:
    """Return a share as a place in a chart."""
    return f"{share * 100:.2f}%"


def chart(kind: str, height: int, *inner: str) -> Markup:
    """Return a whole chart of a class; its numbers stand beside it."""
    return tag(
        "svg", *inner, class_=f"chart {kind}", width="100%", height=height, aria_hidden="true", focusable="false"
    )


def at(share: float, y: float, *inner: str) -> Markup:
    """Return what is drawn in pixels around a place of the chart."""
    return tag("svg", *inner, x=percent(share), y=f"{y:g}", overflow="visible", width=1, height=1)


def bar(
    value: float, top: float, *, band: tuple[float, float] | None = None, tick: float | None = None, state: str = "ok"
) -> Markup:
    """Return a bar from 0 to `value` on a track that ends at `top`, with the range that is expected behind it and a
    tick at the very value that is."""
    scale = Scale(0.0, top or 1.0)
    parts = [tag("rect", class_="track", width="100%", y=4, height=BAR_HEIGHT - 8, rx=2)]
    if band is not None:
        left, right = scale.share(band[0]), scale.share(band[1])
        parts.append(tag("rect", class_="band", x=percent(left), width=percent(right - left), height=BAR_HEIGHT))
    if value > 0:
        width = max(scale.share(value), 0.002)
        parts.append(tag("rect", class_=f"bar {state}", width=percent(width), y=6, height=BAR_HEIGHT - 12, rx=1))
    if tick is not None:
        parts.append(at(scale.share(tick), 0, tag("path", class_="tick", d=f"M0 1V{BAR_HEIGHT - 1}")))
    return chart("barchart", BAR_HEIGHT, *parts)


def strip(dots: Sequence[Dot], scale: Scale | None = None) -> Markup:
    """Return one dot a rank over the box of the middle half and the line of the median; "" without values."""
    if not dots:
        return Markup("")
    values = [dot.value for dot in dots]
    scale = scale or Scale.around(values)
    middle = STRIP_HEIGHT / 2
    line = at(scale.share(median(values)), middle, tag("path", class_="median", d="M0-14V14"))
    axis = tag("line", class_="axis", x1="0", x2="100%", y1=middle, y2=middle)
    return chart("strip", STRIP_HEIGHT, axis, *_box(values, scale, middle), line, *_marks(dots, scale, middle))


def _box(values: Sequence[float], scale: Scale, middle: float) -> Iterator[Markup]:
    """Yield the box of the middle half; of a few values there is none."""
    if len(values) >= FEW:
        low, _, high = (scale.share(each) for each in quantiles(values, n=4, method="inclusive"))
        yield tag("rect", class_="box", x=percent(low), width=percent(high - low), y=middle - 11, height=22, rx=2)


def _marks(dots: Sequence[Dot], scale: Scale, middle: float) -> Iterator[Markup]:
    """Yield dots, the ones that matter last so that nothing hides them."""
    radius = DOT if len(dots) <= MANY else SMALL_DOT
    for number, dot in enumerate(dots):
        if dot.state not in MARKS:
            mark = tag("circle", tag("title", f"{dot.label} {dot.value:g}"), class_="dot", r=radius)
            yield at(scale.share(dot.value), middle + LANES[number % len(LANES)], mark)
    for dot in dots:
        if dot.state in MARKS:
            mark = tag(
                "path", tag("title", f"{dot.label} {dot.value:g}"), class_=f"mark {dot.state}", d=MARKS[dot.state]
            )
            yield at(scale.share(dot.value), middle, mark)


def trend(dots: Sequence[Dot], *, band: tuple[float, float] | None = None, tick: float | None = None) -> Markup:
    """Return values in the order of time as a line, the last one marked as today's, over the range that is expected;
    "" without values."""
    if not dots:
        return Markup("")
    inside, outside = 14.0, TREND_HEIGHT - 14.0
    seen = [dot.value for dot in dots] + list(band or ()) + ([tick] if tick is not None else [])
    scale = Scale.around(seen, 0.08)

    def height(value: float) -> float:
        return round(outside - scale.share(value) * (outside - inside), 1)

    def across(number: int) -> float:
        return 0.5 if len(dots) == 1 else 0.03 + number / (len(dots) - 1) * 0.94

    parts = []
    if band is not None:
        parts.append(
            tag("rect", class_="band", width="100%", y=height(band[1]), height=height(band[0]) - height(band[1]))
        )
    if tick is not None:
        parts.append(tag("line", class_="tick", x1="0", x2="100%", y1=height(tick), y2=height(tick)))
    places = [(across(number), height(dot.value)) for number, dot in enumerate(dots)]
    for (left, top), (right, bottom) in pairwise(places):
        parts.append(tag("line", class_="line", x1=percent(left), y1=top, x2=percent(right), y2=bottom))
    parts.extend(_points(dots, places))
    return chart("trend", TREND_HEIGHT, *parts)


def _points(dots: Sequence[Dot], places: Sequence[tuple[float, float]]) -> Iterator[Markup]:
    for number, (dot, (left, top)) in enumerate(zip(dots, places, strict=True)):
        last = number == len(dots) - 1
        title = tag("title", f"{dot.label} {dot.value:g}")
        if dot.state in MARKS:
            yield at(left, top, tag("path", title, class_=f"mark {dot.state}", d=MARKS[dot.state]))
        else:
            yield at(left, top, tag("circle", title, class_="dot now" if last else "dot", r=5 if last else 3))


def step_of(value: float, low: float, high: float, steps: int) -> int:
    """Return which of `steps` equal parts of a range a value is in, 0 first: the class of a cell of a heat map."""
    if high <= low:
        return steps - 1
    return min(steps - 1, max(0, int((value - low) / (high - low) * steps)))


ICONS = {
    "ok": "M2.5 8.5 6.5 12.5 13.5 4",
    "bad": "M3.5 3.5 12.5 12.5M12.5 3.5 3.5 12.5",
    "up": "M8 13.5V3M3.5 7.5 8 3 12.5 7.5",
    "care": "M8 1.8 15 14H1ZM8 6.2V9.6M8 11.8V12",
    "open": "M8 1.5A6.5 6.5 0 1 1 8 14.5 6.5 6.5 0 0 1 8 1.5ZM8 4.5V8L10.5 9.8",
    "none": "M4 8H12",
}
"""A drawing of 16 by 16 for each kind of state."""

ICON_OF = {
    "ok": "ok",
    "passed": "ok",
    "below": "bad",
    "failed": "bad",
    "missing": "bad",
    "above": "up",
    "note": "care",
    "slow": "care",
    "unfinished": "open",
}


def icon(state: str) -> Markup:
    """Return the sign of a state; the word stands beside it."""
    path = tag("path", d=ICONS[ICON_OF.get(state, "none")])
    return tag("svg", path, class_="icon", viewBox="0 0 16 16", aria_hidden="true", focusable="false")
