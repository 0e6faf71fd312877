"""The report of a run on a terminal, or as plain lines in a pipe: tables and bars of characters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct
from rich.table import Table
from rich.text import Text

from deepep_bootstrap.analysis.diagnosis import engine
from deepep_bootstrap.analysis.results import wording
from deepep_bootstrap.analysis.results.model import Verdict, percent_text
from deepep_bootstrap.analysis.traffic import gigabytes
from deepep_bootstrap.core.console import Screen, alike_shortened, more
from deepep_bootstrap.core.nodeset import fold, fold_short
from deepep_bootstrap.core.text import duration, moment, round_number, three_digits
from deepep_bootstrap.report import cluster, html
from deepep_bootstrap.report.cluster import ClusterReport
from deepep_bootstrap.report.html import Scale
from deepep_bootstrap.report.load import LastTest
from deepep_bootstrap.report.model import Grid, HostRow, NicRow, Report, Spread, clean
from deepep_bootstrap.testing.run_folder import RunVerdict

COLOURS = {RunVerdict.PASSED: "bold green", RunVerdict.FAILED: "bold red"}
"""Of a verdict's word; the others are yellow."""

STYLES = {
    "ok": "green",
    "above": "green",
    "below": "red",
    "failed": "red",
    "missing": "red",
    "slow": "yellow",
    "note": "yellow",
}
MOST_LISTED = 40
"""Runs of a list that a person sees."""

DRAWING = "~"
"""Heads a column of bars or marks."""

BAR, STRIP, TREND = 26, 40, 24
"""Columns of a bar, of a line of ranks, and most columns of a trend."""

SHADES = (237, 238, 24, 25, 26, 32, 38, 74, 117)
"""Background of a heat map's cell, by step; numbers of the terminal's 256 colours, growing lighter."""

DARK_FROM = 6
"""The step from which on a cell's digits are dark."""


class Glyphs(Struct, frozen=True):
    """What bars and lines are drawn with."""

    full: str
    empty: str
    tick: str
    dot: str
    slow: str
    steps: str


BLOCKS = Glyphs("█", "░", "│", "·", "▲", "▁▂▃▄▅▆▇█")
LETTERS = Glyphs("#", ".", "|", ".", "!", "_.-=+*%#")


def show_report(screen: Screen, report: Report) -> None:
    """Print a report."""
    glyphs = BLOCKS if screen.has_blocks else LETTERS
    run = report.run
    screen.say(
        clean(f"{run.kind or 'test'} on {report.nodes or 'unknown nodes'}: {report.verdict.value}"),
        style=COLOURS.get(report.verdict, "bold yellow"),
    )
    screen.say(clean(report.why))
    facts = (
        run.name,
        html.when(report.started),
        "" if report.seconds is None else duration(report.seconds),
        run.values.get("module", ""),
    )
    screen.say(clean(", ".join(filter(None, facts))), style="dim")
    if report.program_output:
        _head(screen, "What the test's program said")
        for line in report.program_output:
            screen.say(f"  {clean(line)}")
    _cause(screen, report)
    _figures(screen, report, glyphs)
    _traffic(screen, report, glyphs)
    _ranks(screen, report, glyphs)
    for grid in report.grids:
        _head(
            screen,
            f"Sweep: {grid.title}{', ' + grid.fixed if grid.fixed else ''}, GB/s by {grid.row_name} (down) and "
            f"{grid.column_name}",
        )
        screen.show(heat(grid))
        screen.say(f"  best: {grid.best_words}")
    _history(screen, report, glyphs)
    for remark in report.remarks:
        screen.say(f"note: {clean(remark)}", style="dim")


MOST_KINDS = 12
"""Kinds of hosts that are shown; the page and the document have all."""


def show_cluster(screen: Screen, report: ClusterReport) -> None:
    """Print the report of a cluster in short: hosts that are alike in a line, the last runs, findings by their names.
    `doctor`, `generations` and `report RUN` tell the rest."""
    screen.say(
        clean(f"{fold_short(report.hosts)}: {cluster.HEADLINES[report.state].lower()}"),
        style=cluster_style(report.state),
    )
    screen.say(clean(report.why))
    _head(screen, "Hosts")
    for kind in report.kinds[:MOST_KINDS]:
        parts = filter(None, (kind.gpus, kind.driver, kind.nics))
        why = f" ({kind.why})" if kind.why else ""
        screen.say(
            clean(f"  {fold_short(kind.hosts)}: {cluster.HOST_STATES[kind.state]}{why}"),
            style="" if kind.state in {cluster.READY, cluster.WARNED} else "yellow",
        )
        if told := "; ".join(parts):
            screen.say(clean(f"      {told}"), style="dim")
    if rest := report.kinds[MOST_KINDS:]:
        screen.say(f"  … {more(sum(len(kind.hosts) for kind in rest))}", style="dim")
    for what, waits in (("wait for a reboot", report.waiting), ("kept drained", report.drained)):
        lines = ((what, clean(f"  {what}: {fold_short(each.hosts)} ({each.what})")) for each in waits)
        for line in alike_shortened(lines, MOST_KINDS):
            screen.say(line, style="yellow")
    _head(screen, f"Offered in {report.prefix}")
    for stack in report.stacks:
        screen.say(clean(f"  {stack.module}{' (what `module load deepep` gives)' if stack.default else ''}"))
    if not report.stacks:
        screen.say("  nothing yet")
    _head(screen, "Last runs")
    for run in report.runs:
        words = f"{run.run.kind} of {cluster.stack_of(run)}: {run.verdict.value} ({run.run.name})"
        screen.say(clean(f"  {words}"))
    if not report.runs:
        screen.say("  none yet")


def cluster_style(state: str) -> str:
    """Return the style of a cluster's state."""
    return {cluster.PASSED: "bold green", cluster.FAILED: "bold red"}.get(state, "bold yellow")


def show_list(screen: Screen, runs: Sequence[LastTest]) -> None:
    """Print runs as a table, the newest first."""
    rows = table("  began (UTC)", "verdict", "kind", "stack", "nodes", "run")
    for run in runs[:MOST_LISTED]:
        began = f"{moment(run.started):%Y-%m-%d %H:%M}" if run.started else "unknown"
        verdict = Text(run.verdict, style=COLOURS.get(RunVerdict(run.verdict), "bold yellow"))
        texts = (run.kind, run.stack, fold(run.nodes) if run.nodes else "", run.run)
        rows.add_row(Text(f"  {began}"), verdict, *(Text(clean(text)) for text in texts))
    if runs:
        screen.show(rows)
    if len(runs) > MOST_LISTED:
        screen.say(f"  and {len(runs) - MOST_LISTED} older ones (--json has them)", style="dim")


def _head(screen: Screen, text: str) -> None:
    screen.say()
    screen.say(clean(text), style="bold")


def _cause(screen: Screen, report: Report) -> None:
    if lines := engine.brief(report.diagnosis):
        _head(screen, "Why it failed")
        for line in lines:
            screen.say(f"  {clean(line)}")
    if more := report.diagnosis.findings[1:]:
        screen.say(f"  also possible: {', '.join(finding.cause for finding in more)}", style="dim")


def table(*columns: str) -> Table:
    """Return an empty table; a heading that begins with ">" is of a column of numbers."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for heading in columns:
        numbers = heading.startswith(">")
        drawing = heading == DRAWING
        made.add_column(
            "" if drawing else heading.removeprefix(">"),
            justify="right" if numbers else "left",
            no_wrap=numbers or drawing,
            overflow="crop" if drawing else "fold",
        )
    return made


def _figures(screen: Screen, report: Report, glyphs: Glyphs) -> None:
    for tested, verdicts in report.by_test:
        cases = (
            f", {tested.passed} of {tested.passed + tested.failed} cases passed"
            if tested.passed or tested.failed
            else ""
        )
        cases += f", {wording.checked(tested.test_pass)}" if tested.test_pass else ""
        _head(
            screen,
            f"Figures of {tested.title} {tested.generation}{cases}{'' if tested.ended else ', did not reach its end'}",
        )
        if not verdicts:
            continue
        rows = table("  figure", DRAWING, ">measured", ">reference", ">of the limit", "verdict")
        for verdict in verdicts:
            rows.add_row(*_figure(verdict, glyphs))
        screen.show(rows)


def _figure(verdict: Verdict, glyphs: Glyphs) -> Iterator[Text]:
    value = verdict.value or 0.0
    style = STYLES.get(verdict.state, "")
    yield Text(f"  {verdict.title}")
    known = verdict.limit is not None or verdict.wanted is not None
    yield bar(value, html.top_of(verdict), verdict.wanted, glyphs, style=style or "blue") if known else Text("")
    yield Text(f"{three_digits(value)} {verdict.unit}")
    yield Text("" if verdict.wanted is None else f"{round_number(verdict.wanted)} ({verdict.allowed})")
    yield Text("" if verdict.of_limit is None else f"{percent_text(verdict.of_limit)} %")
    word = f"{verdict.state}, {verdict.performance}" if verdict.performance else html.WORDS[verdict.state]
    yield Text(word, style=style)


def bar(value: float, top: float, tick: float | None, glyphs: Glyphs, *, style: str) -> Text:
    """Return a bar from 0 to `value` where the whole width is `top`, with a tick at another value."""
    scale = Scale(0.0, top or 1.0)
    filled = round(scale.share(value) * BAR)
    drawn = Text(glyphs.full * filled, style=style) + Text(glyphs.empty * (BAR - filled), style="dim")
    if tick is not None:
        at = min(BAR - 1, round(scale.share(tick) * BAR))
        drawn = drawn[:at] + Text(glyphs.tick, style="bold") + drawn[at + 1 :]
    return drawn


def _traffic(screen: Screen, report: Report, glyphs: Glyphs) -> None:
    if report.no_traffic:
        _head(screen, report.no_traffic)
        return
    hosts = [host for host in report.hosts if len(report.hosts) <= html.MANY_HOSTS or host.state != "ok"]
    for host in hosts:
        _host_traffic(screen, host, glyphs)
    if left := len(report.hosts) - len(hosts):
        _head(screen, f"NIC traffic of {left} more hosts: nothing against it")


def _host_traffic(screen: Screen, host: HostRow, glyphs: Glyphs) -> None:
    _head(screen, f"NIC traffic of {host.host}, share of what it sent")
    rows = table("  NIC", DRAWING, ">share", ">sent", ">received", "")
    for row in host.nics:
        rows.add_row(*_nic(host, row, glyphs))
    if host.nics:
        screen.show(rows)
    remarks = [(row.state, row.text) for row in host.nics if row.text]
    remarks += [(verdict.state, f"{verdict.state}: {verdict.text}") for verdict in host.verdicts]
    for state, text in remarks:
        screen.say(f"  {clean(text)}", style=STYLES.get(state, ""))


def _nic(host: HostRow, row: NicRow, glyphs: Glyphs) -> Iterator[Text]:
    nic = row.traffic
    style = STYLES.get(row.state, "") if row.state == "below" else "blue"
    yield Text(f"  {clean(nic.device)}")
    yield bar(nic.share_sent, html.top_share(host), host.fair if nic.expected else None, glyphs, style=style)
    yield Text(f"{100 * nic.share_sent:.1f} %" if nic.expected else "")
    yield Text(gigabytes(nic.sent))
    yield Text(gigabytes(nic.received))
    yield Text(
        row.state if row.state == "below" else "" if nic.expected else "not used", style=STYLES.get(row.state, "dim")
    )


def _ranks(screen: Screen, report: Report, glyphs: Glyphs) -> None:
    if not report.spreads and not report.slow_ranks:
        return
    _head(screen, "Spread of the ranks")
    for state, text in report.slow_ranks:
        screen.say(f"  {state}: {clean(text)}", style=STYLES.get(state, ""))
    rows = table("  figure", DRAWING, ">least", ">median", ">most", "")
    for spread in report.spreads:
        low, middle, high = map(three_digits, spread.numbers)
        rows.add_row(Text(f"  {spread.test} {spread.title}"), strip(spread, glyphs), low, middle, high, spread.unit)
    if report.spreads:
        screen.show(rows)


def strip(spread: Spread, glyphs: Glyphs) -> Text:
    """Return one mark a rank on a line from the least to the most, slow ranks over the others."""
    scale = Scale.around([each.value for each in spread.values], 0.02)
    cells = [" "] * STRIP
    for each in sorted(spread.values, key=lambda value: value.state == "slow"):
        cells[round(scale.share(each.value) * (STRIP - 1))] = glyphs.slow if each.state == "slow" else glyphs.dot
    drawn = Text("".join(cells))
    drawn.highlight_words([glyphs.slow], style="bold yellow")
    return drawn


def heat(grid: Grid) -> Table:
    """Return a sweep as a table with a background by value; the best value has a star."""
    made = Table(box=None, padding=0, header_style="dim", pad_edge=False)
    made.add_column("", justify="right", min_width=6)
    made.add_column("", width=1)  # a space at the end of the row's name would be cut off
    for column in grid.columns:
        made.add_column(str(column), justify="right", min_width=7)
    low, high = grid.span
    for number, row in enumerate(grid.rows):
        made.add_row(Text(str(row), style="dim"), "", *_cells(grid, number, (low, high)))
    return made


def _cells(grid: Grid, number: int, span: tuple[float, float]) -> Iterator[Text]:
    for column, value in zip(grid.columns, grid.values[number], strict=True):
        if value is None:
            yield Text("")
            continue
        step = html.step_of(value, *span, len(SHADES))
        ink = "black" if step >= DARK_FROM else "white"
        star = "*" if grid.best == (grid.rows[number], column) else " "
        text = f"{three_digits(value):>6}"
        yield Text(f"{' ' * (len(text) > 6)}{text}{star}", style=f"{ink} on color({SHADES[step]})")


def _history(screen: Screen, report: Report, glyphs: Glyphs) -> None:
    if not report.past:
        return
    _head(screen, f"Against {len(report.past)} earlier runs of the kind")
    rows = table("  figure", "oldest to this run", ">now", ">median before", ">change", "")
    for series in report.series:
        if series.before is not None:
            values = [value for _, value in series.values][-TREND:]
            drawn = sparkline(values, glyphs)
            rows.add_row(
                Text(f"  {series.verdict.title}"),
                drawn,
                three_digits(values[-1]),
                three_digits(series.before),
                f"{series.change:+.1f} %",
                "GB/s",
            )
    screen.show(rows)


def sparkline(values: Sequence[float], glyphs: Glyphs) -> Text:
    """Return values as columns of eight heights, the least the lowest."""
    return Text("".join(_heights(values, glyphs)))


def _heights(values: Sequence[float], glyphs: Glyphs) -> Iterable[str]:
    low, high = min(values), max(values)
    return (glyphs.steps[html.step_of(value, low, high, len(glyphs.steps))] for value in values)
