"""The report of a run, or of a cluster, as one HTML file: nothing is loaded from anywhere, no script runs, every text
of a log or a host is escaped.

Charts are inline SVG, drawn for any width: places across are percentages, sizes of text and marks are pixels. Each
chart is decoration of a table row that says the same in numbers, so it is hidden from screen readers. Colours come
from classes of the page, never from here; a mark that matters has a shape of its own as well.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

import jinja2
from markupsafe import Markup, escape
from msgspec import Struct

from deepep_bootstrap.analysis.diagnosis import engine
from deepep_bootstrap.analysis.results import wording
from deepep_bootstrap.analysis.results.model import Tested, Verdict, percent_text
from deepep_bootstrap.analysis.traffic import gigabytes
from deepep_bootstrap.core import text as core_text
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.text import duration, round_number, three_digits
from deepep_bootstrap.report import cluster
from deepep_bootstrap.report.cluster import ClusterReport
from deepep_bootstrap.report.model import Grid, HostRow, NicRow, Report, Series, Spread, clean

TEMPLATE, CLUSTER_TEMPLATE, STYLE = "report.html.j2", "cluster.html.j2", "report.css"
"""In the folder `templates` beside this module."""

STEPS = 9
"""Classes h0 … h8 of the heat map; report.css gives them colours of evenly growing lightness (OKLCH)."""

MANY_HOSTS = 4
"""Beyond so many hosts the traffic is one table of hosts by NICs, with details of the hosts that have trouble alone."""

WORDS = {
    "ok": "ok",
    "below": "below",
    "above": "above reference",
    "none": "no reference",
    "note": "note",
    "idle": "not used",
    "slow": "slow",
    "missing": "missing",
    "failed": "failed",
    "passed": "passed",
}


FIGURES_A_RUN = 4
"""Trends of each run that the page of a cluster shows; the run's own report has all."""

HOST_ICONS = {"silent": "failed", "blocked": "failed", "ready": "ok"}
SEVERITY_ICONS = {"blocking": "failed", "warning": "slow", "note": "none"}
"""States of the page's icons for states of hosts (the others are `slow`) and severities of findings."""


def render_html(report: Report, made: float) -> str:
    """Return the page of a run; `made` is now in seconds since 1970, no other clock is read."""
    return _page(
        TEMPLATE,
        made,
        r=report,
        headline=report.verdict.value.capitalize(),
        verdict_class=report.verdict.name.lower(),
        many=len(report.hosts) > MANY_HOSTS,
    )


def render_cluster(report: ClusterReport, made: float) -> str:
    """Return the page of a cluster."""
    return _page(
        CLUSTER_TEMPLATE,
        made,
        c=report,
        headline=cluster.HEADLINES[report.state],
        host_states=cluster.HOST_STATES,
        host_icons=HOST_ICONS,
        severity_icons=SEVERITY_ICONS,
    )


def _page(template: str, made: float, **values: object) -> str:
    environment = jinja2.Environment(
        loader=jinja2.DictLoader({template: read_text(template)}),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.filters |= {
        "amount": amount,
        "round_number": round_number,
        "bytes": gigabytes,
        "size": core_text.size,
        "shortened": core_text.shortened,
        "trends": trends,
        "when": when,
        "day": day,
        "duration": duration,
        "marked": marked,
        "first_large": first_large,
        "fold": fold,
    }
    environment.globals |= {
        "bar": bar,
        "nic_bar": nic_bar,
        "strip": strip,
        "trend": trend,
        "trends": trends,
        "icon": icon,
        "step": step,
        "share_step": share_step,
        "config": config,
        "has_slow": has_slow,
        "has_box": has_box,
        "fresh": once(),
        "percent_text": percent_text,
        "advice": engine.advice,
        "checked": wording.checked,
    }
    style = read_text(STYLE)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return environment.get_template(template).render(
        **values,
        words=WORDS,
        style=Markup(style),  # noqa: S704 - our own file, without a word of a host
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        made=made,
    )


def read_text(name: str) -> str:
    """Return the text of a template, or of STYLE."""
    return (files("deepep_bootstrap.report") / "templates" / name).read_text(encoding="utf-8")


def once() -> Callable[[Sequence[str]], list[str]]:
    """Return a function that leaves out of its sentences those it was given before: a page gives each advice once."""
    told: set[str] = set()

    def fresh(sentences: Sequence[str]) -> list[str]:
        found = [sentence for sentence in sentences if sentence not in told]
        told.update(found)
        return found

    return fresh


def _finalize(value: Any) -> Any:
    """Return what a template prints: texts without characters that hide or turn what is written, and nothing for
    None."""
    if value is None:
        return ""
    if isinstance(value, str) and not isinstance(value, Markup):
        return "\n".join(map(clean, value.split("\n")))
    return value


def marked(text: str) -> Markup:
    """Return a sentence of ours, escaped, with what stands between back quotes as code."""
    parts = clean(text).split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if number % 2 else escape(part) for number, part in enumerate(parts)
    )


def first_large(text: str) -> str:
    """Return a sentence with a capital at its beginning."""
    return text[:1].upper() + text[1:]


def amount(value: float | None) -> str:
    """Return a number with three digits, an en dash for none."""
    return "–" if value is None else three_digits(value)


def when(seconds: float | None) -> str:
    """Return a moment in UTC."""
    return "" if seconds is None else f"{core_text.moment(seconds):%Y-%m-%d %H:%M} UTC"


def day(seconds: float) -> str:
    """Return a day in UTC."""
    return core_text.day(seconds) if seconds else "unknown day"


def config(tested: Tested) -> str:
    """Return the settings of a test in one line."""
    return ", ".join(
        f"{name.replace('_', ' ')} {value:g}" if isinstance(value, int | float) else f"{name} {value}"
        for name, value in tested.config.items()
    )


def bar(verdict: Verdict) -> Markup:
    """Return a figure on its way to what the hardware can move, or where that is not known, to a little more than is
    wanted; nothing for one that cannot be compared."""
    if verdict.limit is None and verdict.wanted is None:
        return Markup("")
    value = verdict.value or 0.0
    band = (verdict.low, verdict.high) if verdict.low is not None and verdict.high is not None else None
    return chart_bar(value, top_of(verdict), band=band, tick=verdict.wanted, state=verdict.state)


def top_of(verdict: Verdict) -> float:
    """Return where the track of a figure ends."""
    value = verdict.value or 0.0
    return verdict.limit if verdict.limit and verdict.limit >= value else max(value, verdict.high or 0.0) * 1.12


def nic_bar(host: HostRow, row: NicRow) -> Markup:
    """Return a NIC's share of its host's traffic; the tick is an equal share, and all bars of a host have one scale."""
    return chart_bar(
        row.traffic.share_sent, top_share(host), tick=host.fair if row.traffic.expected else None, state=row.state
    )


def top_share(host: HostRow) -> float:
    """Return the share at which the tracks of a host's NICs end: twice an equal one, where none has more."""
    return max([row.traffic.share_sent for row in host.nics] + [host.fair * 2])


def strip(spread: Spread) -> Markup:
    """Return the values of all ranks on a line."""
    return chart_strip([Dot(each.value, f"rank {each.rank}", each.state) for each in spread.values])


def has_slow(group: Sequence[Spread]) -> bool:
    """Return whether a slow rank is among those of a table."""
    return any(each.state == "slow" for spread in group for each in spread.values)


def has_box(group: Sequence[Spread]) -> bool:
    """Return whether the ranks of a table are enough for a box."""
    return any(len(spread.values) >= FEW for spread in group)


def trend(series: Series) -> Markup:
    """Return a figure over the runs, this one last."""
    verdict = series.verdict
    dots = [
        Dot(value, f"{clean(past.name)} {day(past.started)}", "failed" if past.failed else "ok")
        for past, value in series.values
    ]
    band = (verdict.low, verdict.high) if verdict.low is not None and verdict.high is not None else None
    return chart_trend(dots, band=band, tick=verdict.wanted)


def trends(report: Report) -> tuple[Series, ...]:
    """Return the figures of a run whose course the page of a cluster shows: those that earlier runs have too."""
    return tuple(series for series in report.series if len(series.values) > 1)[:FIGURES_A_RUN]


def step(grid: Grid, value: float) -> str:
    """Return the class of a cell of a heat map."""
    low, high = grid.span
    return f"h{step_of(value, low, high, STEPS)}"


def share_step(host: HostRow, row: NicRow) -> str:
    """Return the class of a NIC in the table of hosts by NICs: from nothing to twice an equal share."""
    return f"h{step_of(row.traffic.share_sent, 0.0, host.fair * 2, STEPS)}"


BAR_HEIGHT, STRIP_HEIGHT, TREND_HEIGHT = 20, 34, 132
"""Pixels."""

DOT, SMALL_DOT, MANY_RANKS = 4.5, 2.5, 48
"""Radius of a dot; dots of a strip get small beyond so many ranks."""

FEW = 4
"""Ranks from which on a strip shows their middle half."""

LANES = (0, -6, 6, -3, 3)
"""Pixels by which neighbours of a strip are moved apart, so that equal ones can be counted."""

MARKS = {"slow": "M0-6 6 5H-6Z", "missing": "M-4-4 4 4M4-4-4 4", "failed": "M-4-4 4 4M4-4-4 4"}
"""Paths around 0, 0: a triangle for what is slow, a cross for what failed."""


class Dot(Struct, frozen=True):
    """One value of a strip or a trend; `state` is ok, slow, missing or failed, `label` what it is called ("rank 5")."""

    value: float
    label: str = ""
    state: str = "ok"


class Scale(Struct, frozen=True):
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


def chart_bar(
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


def chart_strip(dots: Sequence[Dot], scale: Scale | None = None) -> Markup:
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
    radius = DOT if len(dots) <= MANY_RANKS else SMALL_DOT
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


def chart_trend(dots: Sequence[Dot], *, band: tuple[float, float] | None = None, tick: float | None = None) -> Markup:
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
    "stopped": "open",
    "open": "open",
}


def icon(state: str) -> Markup:
    """Return the sign of a state; the word stands beside it."""
    path = tag("path", d=ICONS[ICON_OF.get(state, "none")])
    return tag("svg", path, class_="icon", viewBox="0 0 16 16", aria_hidden="true", focusable="false")
