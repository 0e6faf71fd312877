"""The output of one command: plans, progress, outcomes and next commands, with rich on a terminal, as plain
lines elsewhere, or one JSON document.

Two doors lead to a terminal, and both take away what one would obey: what anybody prints goes through a PlainStream,
what rich draws through a PlainConsole, whose own colours stay.
"""

from __future__ import annotations

import json
import sys
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO, cast

from msgspec import Struct, field
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from deepep_bootstrap.core.errors import REMEDY, Problem
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.core.text import duration, plain, shortened

STYLES = {"done": "green", "unchanged": "dim", "failed": "red", "skipped": "yellow"}
STATE_WIDTH = max(map(len, STYLES))
TABLE_WIDTH = 80
"""Columns a terminal needs to show a plan as a table; a narrower one gets the lines that a pipe gets."""

PIPE_WIDTH = 120
"""Columns of a table that goes into a file or a pipe."""


HOSTS_WIDTH = 24
"""Columns for the names of hosts; a set that folds badly is cut."""


class PlainStream:
    """stdout or stderr without what a terminal would obey."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        """Write a text as a terminal may have it."""
        self.raw.write(plain(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


@contextmanager
def plain_streams() -> Iterator[None]:
    """Let nothing through stdout and stderr that a terminal would obey, while the body runs; one that is closed stays
    so."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast("TextIO", PlainStream(each)) if each else each for each in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _raw(stream: TextIO) -> TextIO:
    while isinstance(stream, PlainStream):
        stream = stream.raw
    return stream


class PlainConsole(Console):
    """A console of rich for stdout, or stderr, in which texts are texts: no markup, no names of emoji, and nothing that
    a terminal would obey but what rich itself draws with."""

    def __init__(self, *, stderr: bool = False, **options: Any) -> None:
        file = _raw(sys.stderr if stderr else sys.stdout)
        super().__init__(file=file, markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the segments of what is shown; every text that is drawn passes here."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=plain(segment.text))


class Screen:
    """Output of one command: rich on a terminal, plain lines elsewhere, nothing but one document with `as_json`.

    Messages for people go to stdout; problems go to stderr. Methods may be called from several threads.
    """

    def __init__(self, verb: str, *, as_json: bool = False) -> None:
        self.verb = verb
        self.as_json = as_json
        self._console = PlainConsole(quiet=as_json, soft_wrap=True)
        self._errors = PlainConsole(stderr=True, soft_wrap=True)
        self.live = sys.stdout.isatty() and not as_json and not self._console.is_dumb_terminal
        self._progress: _Progress | None = None
        self._lock = threading.Lock()
        self.ended_outcomes: list[Outcome] = []

    def say(self, text: str = "", *, style: str = "") -> None:
        """Print one line for a person."""
        with self._lock:
            self._console.print(text, style=style or None)

    def show(self, renderable: RenderableType) -> None:
        """Print a table or another thing of rich's, whose texts are plain; without a terminal as wide as PIPE_WIDTH."""
        with self._lock:
            console = self._console if self._console.is_terminal else PlainConsole(quiet=self.as_json, width=PIPE_WIDTH)
            console.print(renderable, soft_wrap=False)

    def paragraph(self, text: str, *, style: str = "") -> None:
        """Print a sentence: on a terminal with its words whole on each line, elsewhere as one line."""
        if self._console.is_terminal:
            self.show(Text(text, style=style))
        else:
            self.say(text, style=style)

    @property
    def width(self) -> int:
        """The columns of the terminal."""
        return self._console.width

    @property
    def is_wide(self) -> bool:
        """Whether a table has room: a terminal of at least TABLE_WIDTH columns."""
        return self._console.is_terminal and self._console.width >= TABLE_WIDTH

    @property
    def has_blocks(self) -> bool:
        """Whether bars can be drawn with characters for them."""
        return (self._console.encoding or "").lower().startswith("utf")

    def problem(self, problem: Problem) -> None:
        """Print one problem; part of the document instead where there is one."""
        if not self.as_json:
            self._errors.print(Text(str(problem), style="red" if self._errors.is_terminal else ""))

    def document(self, exit_code: int, problems: Sequence[Problem], **content: Any) -> None:
        """Print the verb's JSON document, if that was asked for."""
        if self.as_json:
            head = {
                "schema": 1,
                "verb": self.verb,
                "exit": exit_code,
                "errors": [problem.as_json() for problem in problems],
            }
            print(json.dumps({**head, **content}, indent=2))

    @contextmanager
    def progress(self) -> Iterator[None]:
        """Show a live table of running steps on a terminal while the body runs; plain lines elsewhere."""
        if not self.live:
            yield
            return
        self._progress = _Progress()
        try:
            live = Live(self._progress, console=self._console, refresh_per_second=8, transient=True)
            # rich takes what is printed meanwhile and reads colours and links in it: not in what a host said.
            with live, plain_streams():
                yield
        finally:
            self._progress = None

    def started(self, step: str, hosts: Sequence[str]) -> None:
        """A step began on some hosts."""
        if self._progress:
            self._progress.start(step, hosts)
        else:
            self.say(f"{fold(hosts)}: {step} …")

    def waiting(self, host: str, step: str, text: str) -> None:
        """A step waits for somebody; a person should know for whom."""
        self.line(host, step, f"waiting for {text}")
        if not self._progress:
            self.say(f"{host}: {step} waits for {shortened(text)}")

    def line(self, host: str, step: str, text: str) -> None:
        """A running step printed a line (live table only; logs have them all)."""
        if self._progress:
            self._progress.line(step, host, shortened(text))

    def ended(self, *outcomes: Outcome) -> None:
        """A step ended on some hosts; equal ends are one line. `outcomes` prints the details of failures at
        the end. All of them stay in `ended_outcomes`: a phase that is cut short has no other record of itself."""
        self.ended_outcomes.extend(outcomes)
        for outcome in outcomes:
            if self._progress:
                self._progress.end(outcome.step, outcome.host)
        for group in folded(outcomes):
            first, names = group[0], fold(outcome.host for outcome in group)
            detail = f" — {shortened(first.detail)}" if first.detail and first.state != "failed" else ""
            took = f" ({took_by(group)})" if took_by(group) else ""
            self._mark(first.state, f"{first.state} {first.step} on {names}{took}{detail}")

    def outcomes(self, outcomes: Iterable[Outcome]) -> None:
        """Print the outcome table, equal outcomes folded over hosts, the bad ones last, with their last lines and
        their logs."""
        groups = sorted(folded(outcomes), key=lambda group: group[0].state == "failed")
        if not groups:
            return
        steps, times = max(len(group[0].step) for group in groups), max(len(took_by(group)) for group in groups)
        for group in groups:
            first, names = group[0], fold(outcome.host for outcome in group)
            failed = first.state == "failed"
            beside = f"  {shortened(first.detail)}" if first.detail and not failed else ""
            self._mark(
                first.state,
                f"{first.state:<{STATE_WIDTH}}  {first.step:<{steps}}  {took_by(group):>{times}}  {names}{beside}",
            )
            if failed:
                for text in filter(None, (first.detail, first.log and f"full log: {first.log}")):
                    self.say(textwrap.indent(text, "    "))

    def next_commands(self, commands: Sequence[str]) -> None:
        """Print what to type next."""
        self.say("\nNext:")
        for command in commands:
            self.say(f"    {command}")

    def _mark(self, state: str, line: str) -> None:
        """Print a line whose leading word is a state, in the colour of that state."""
        with self._lock:
            self._console.print(Text.assemble((line[: len(state)], STYLES[state]), line[len(state) :]))


class _Row(Struct):
    since: float
    hosts: dict[str, None] = field(default_factory=dict)
    text: str = ""


class _Progress:
    """Rows by step, so that 64 hosts at one step are one row. Methods may be called from several threads."""

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}
        self._lock = threading.Lock()
        self._spinner = Spinner("dots")

    def start(self, step: str, hosts: Sequence[str]) -> None:
        """A step began on some hosts."""
        with self._lock:
            self._rows.setdefault(step, _Row(time.monotonic())).hosts.update(dict.fromkeys(hosts))

    def line(self, step: str, host: str, text: str) -> None:
        """A running step printed a line."""
        with self._lock:
            row = self._rows.setdefault(step, _Row(time.monotonic(), {host: None}))
            printed = plain(text).strip()
            if printed:
                row.text = printed if len(row.hosts) < 2 else f"{host}: {printed}"

    def end(self, step: str, host: str) -> None:
        """A step ended on a host; its row goes with its last host."""
        with self._lock:
            row = self._rows.get(step)
            if row is None:
                return
            row.hosts.pop(host, None)
            if not row.hosts:
                del self._rows[step]

    def __rich__(self) -> RenderableType:
        table = Table(box=None, padding=(0, 1, 0, 0), show_header=False, expand=True)
        table.add_column(width=1)
        table.add_column(max_width=HOSTS_WIDTH, no_wrap=True, overflow="ellipsis")
        table.add_column(no_wrap=True, overflow="ellipsis")
        table.add_column(justify="right", no_wrap=True)
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        with self._lock:
            for step, row in self._rows.items():
                elapsed = duration(round(time.monotonic() - row.since))
                table.add_row(self._spinner, Text(fold(row.hosts)), Text(step), elapsed, Text(row.text, style="dim"))
            return Group(table) if self._rows else Group(self._spinner)


def folded(outcomes: Iterable[Outcome]) -> list[list[Outcome]]:
    """Return outcomes in groups that differ in nothing but host and time; two failures are equal when they say the
    same, whatever host or address their remedies name: the first one's stands for all."""
    groups: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.step, outcome.state, outcome.detail.partition(REMEDY)[0]), []).append(outcome)
    return list(groups.values())


def took_by(group: Sequence[Outcome]) -> str:
    """Return how long the slowest of some equal outcomes took; "" for what was never begun."""
    return "" if group[0].state == "skipped" else duration(max(outcome.seconds for outcome in group))
