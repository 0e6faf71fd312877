"""The report of a run as one HTML file: nothing is loaded from anywhere, no script runs, every text of a log
is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from markupsafe import Markup, escape

from deepep_bootstrap.analysis.diagnosis import engine
from deepep_bootstrap.analysis.results import wording
from deepep_bootstrap.analysis.results.model import Tested, Verdict
from deepep_bootstrap.analysis.traffic import gigabytes
from deepep_bootstrap.report import charts
from deepep_bootstrap.report.charts import Dot
from deepep_bootstrap.report.model import HEADLINES, Grid, HostRow, NicRow, Report, Series, Spread, clean

TEMPLATE, STYLE = "report.html.j2", "report.css"
"""Below env/."""

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


def render_html(report: Report, texts: Mapping[str, str], made: float) -> str:
    """Return the page. `texts` are the files of env/ by path, `made` is now in seconds since 1970; no other clock is
    read."""
    environment = jinja2.Environment(
        loader=jinja2.DictLoader({TEMPLATE: texts[TEMPLATE]}),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.filters |= {
        "amount": amount,
        "bytes": gigabytes,
        "when": when,
        "day": day,
        "took": took,
        "marked": marked,
        "first_large": first_large,
    }
    environment.globals |= {
        "bar": bar,
        "nic_bar": nic_bar,
        "strip": strip,
        "trend": trend,
        "icon": charts.icon,
        "step": step,
        "share_step": share_step,
        "config": config,
        "has_slow": has_slow,
        "has_box": has_box,
        "advice": engine.advice,
        "checked": wording.checked,
    }
    style = texts[STYLE]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return environment.get_template(TEMPLATE).render(
        r=report,
        headline=HEADLINES[report.state],
        words=WORDS,
        many=len(report.hosts) > MANY_HOSTS,
        style=Markup(style),  # noqa: S704 - our own file, without a word of a host
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        made=made,
    )


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
    """Return a number with one decimal, an en dash for none."""
    return "–" if value is None else f"{value:.1f}"


def when(seconds: float | None) -> str:
    """Return a moment in UTC."""
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def day(seconds: float) -> str:
    """Return a day in UTC."""
    return time.strftime("%Y-%m-%d", time.gmtime(seconds)) if seconds else "unknown day"


def took(seconds: float | None) -> str:
    """Return a duration for people."""
    if seconds is None:
        return ""
    whole = round(seconds)
    return (
        f"{whole} s"
        if whole < 120
        else f"{whole // 60} min {whole % 60:02} s"
        if whole < 7200
        else f"{whole / 3600:.1f} h"
    )


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
    return charts.bar(value, top_of(verdict), band=band, tick=verdict.wanted, state=verdict.state)


def top_of(verdict: Verdict) -> float:
    """Return where the track of a figure ends."""
    value = verdict.value or 0.0
    return verdict.limit if verdict.limit and verdict.limit >= value else max(value, verdict.high or 0.0) * 1.12


def nic_bar(host: HostRow, row: NicRow) -> Markup:
    """Return a NIC's share of its host's traffic; the tick is an equal share, and all bars of a host have one scale."""
    return charts.bar(
        row.traffic.share_sent, top_share(host), tick=host.fair if row.traffic.expected else None, state=row.state
    )


def top_share(host: HostRow) -> float:
    """Return the share at which the tracks of a host's NICs end: twice an equal one, where none has more."""
    return max([row.traffic.share_sent for row in host.nics] + [host.fair * 2])


def strip(spread: Spread) -> Markup:
    """Return the values of all ranks on a line."""
    return charts.strip([Dot(each.value, f"rank {each.rank}", each.state) for each in spread.values])


def has_slow(group: Sequence[Spread]) -> bool:
    """Return whether a slow rank is among those of a table."""
    return any(each.state == "slow" for spread in group for each in spread.values)


def has_box(group: Sequence[Spread]) -> bool:
    """Return whether the ranks of a table are enough for a box."""
    return any(len(spread.values) >= charts.FEW for spread in group)


def trend(series: Series) -> Markup:
    """Return a figure over the runs, this one last."""
    verdict = series.verdict
    dots = [
        Dot(value, f"{clean(past.name)} {day(past.started)}", "failed" if past.failed else "ok")
        for past, value in series.values
    ]
    band = (verdict.low, verdict.high) if verdict.low is not None and verdict.high is not None else None
    return charts.trend(dots, band=band, tick=verdict.wanted)


def step(grid: Grid, value: float) -> str:
    """Return the class of a cell of a heat map."""
    low, high = grid.span
    return f"h{charts.step_of(value, low, high, STEPS)}"


def share_step(host: HostRow, row: NicRow) -> str:
    """Return the class of a NIC in the table of hosts by NICs: from nothing to twice an equal share."""
    return f"h{charts.step_of(row.traffic.share_sent, 0.0, host.fair * 2, STEPS)}"
