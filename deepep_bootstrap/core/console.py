"""The output of one command: plans, progress, outcomes and next commands, with rich on a terminal, as plain
lines elsewhere, or one JSON document.

Two doors lead to a terminal, and both take away what one would obey: what anybody prints goes through a PlainStream,
what rich draws through a PlainConsole, whose own colours stay.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from msgspec import Struct
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from deepep_bootstrap.core.errors import REMEDY, Problem
from deepep_bootstrap.core.guard import plain_streams, raw_stream
from deepep_bootstrap.core.nodeset import fold, fold_short
from deepep_bootstrap.core.outcome import Outcome, WorkClock
from deepep_bootstrap.core.program import as_called
from deepep_bootstrap.core.text import duration, plain, shortened

STYLES = {"done": "green", "unchanged": "dim", "failed": "red", "skipped": "yellow", "stopped": "yellow"}
STATE_WIDTH = max(map(len, STYLES))
VERDICT_STYLES = {"passed": "green", "below reference": "yellow"}
"""Of the other states: verdicts on runs of tests."""

TABLE_WIDTH = 80
"""Columns a terminal needs to show a plan as a table; a narrower one gets the lines that a pipe gets."""

LOG_EVERY = 60.0
"""Seconds between two lines on a long step where there is no terminal."""

ASK_EVERY = 1.0
"""Seconds after which a terminal says whom we wait for, and says it anew."""

SHORT_WAIT = 1.0
"""Seconds of waiting that nobody wants to know of."""

COUNTER = re.compile(r"\[([0-9]{1,6})/([0-9]{1,6})\] *")
"""What ninja begins its lines with: commands that ended, and all."""

MOST_ALIKE = 5
"""Lines of one kind on a screen; of more there is the number."""

PIPE_WIDTH = 120
"""Columns of a table that goes into a file or a pipe."""


BAR_WIDTH = 12
"""Columns of a bar in the live table."""

HOSTS_WIDTH = 24
"""Columns for the names of hosts; a set that folds badly is cut."""


class PlainConsole(Console):
    """A console of rich for stdout, or stderr, in which texts are texts: no markup, no names of emoji, and nothing that
    a terminal would obey but what rich itself draws with."""

    def __init__(self, *, stderr: bool = False, **options: Any) -> None:
        file = raw_stream(sys.stderr if stderr else sys.stdout)
        super().__init__(file=file, markup=False, emoji=False, highlight=False, **options)

    def on_broken_pipe(self) -> None:
        """Let the guard end the command where the reader has gone; rich would end the program with 1."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

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
        self._progress = _Progress()
        self._drawn = False
        self.log_every = LOG_EVERY
        self._lock = threading.Lock()
        self.ended_outcomes: list[Outcome] = []

    def say(self, text: str = "", *, style: str = "") -> None:
        """Print one line for a person."""
        with self._lock:
            self._console.print(as_called(text), style=style or None)

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
            self._errors.print(Text(as_called(str(problem)), style="red" if self._errors.is_terminal else ""))

    def problems(self, problems: Sequence[Problem]) -> None:
        """Print problems, of many that say the same of many hosts the first and how many there are."""
        for line in () if self.as_json else alike_shortened((problem.what, str(problem)) for problem in problems):
            self._errors.print(Text(as_called(line), style="red" if self._errors.is_terminal else ""))

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

    def expect(self, steps: Sequence[str], seconds: Mapping[str, float]) -> None:
        """Say which steps are to come, in order, to number them, and how long they took on an earlier run."""
        self._progress.expect(steps, seconds)

    @contextmanager
    def progress(self) -> Iterator[None]:
        """Show a live table of running steps on a terminal while the body runs; plain lines elsewhere, with one every
        LOG_EVERY seconds for each step that takes so long."""
        self._progress.clear()
        if self.live:
            self._drawn = True
            try:
                live = Live(self._progress, console=self._console, refresh_per_second=8, transient=True)
                # rich takes what is printed meanwhile and reads colours and links in it: not in what a host said.
                with live, plain_streams():
                    yield
            finally:
                self._drawn = False
            return
        ended = threading.Event()
        reporter = threading.Thread(target=self._report, args=(ended,), daemon=True)
        reporter.start()
        try:
            yield
        finally:
            ended.set()
            reporter.join()

    def _report(self, ended: threading.Event) -> None:
        """Print how far long steps are, until `ended`."""
        while not ended.wait(self.log_every):
            for text in self._progress.lines(self.log_every):
                self.say(text)

    @property
    def running(self) -> Mapping[str, Sequence[str]]:
        """The steps that run, with their hosts."""
        return self._progress.running()

    def started(self, step: str, hosts: Sequence[str]) -> None:
        """A step began on some hosts."""
        number = self._progress.start(step, hosts)
        if not self._drawn:
            self.say(f"{number}{fold(hosts)}: {step} …")

    def waiting(self, host: str, step: str, text: str) -> None:
        """A step waits for somebody; a person should know for whom."""
        self._progress.line(step, host, f"waiting for {shortened(text)}", waits=True)
        if not self._drawn:
            self.say(f"{host}: {step} waits for {shortened(text)}")

    def line(self, host: str, step: str, text: str, *, waits: bool = False) -> None:
        """A running step printed a line, which may say that it waits (live table only; logs have them all)."""
        self._progress.line(step, host, shortened(text), waits=waits)

    def measured(self, host: str, step: str, share: float, text: str) -> None:
        """A running step knows how far it is: which part is done, 0 to 1, and figures for a person."""
        self._progress.measure(step, host, share, text)

    def ended(self, *outcomes: Outcome) -> None:
        """A step ended on some hosts; equal ends are one line. `outcomes` prints the details of failures at
        the end. All of them stay in `ended_outcomes`: a phase that is cut short has no other record of itself."""
        self.ended_outcomes.extend(outcomes)
        for outcome in outcomes:
            self.finished(outcome.step, outcome.host)
        for group in folded(outcomes):
            first, names = group[0], fold(outcome.host for outcome in group)
            detail = f" — {shortened(first.detail)}" if first.detail and first.state != "failed" else ""
            took = f" ({took_by(group)})" if took_by(group) else ""
            self._mark(first.state, f"{first.state} {first.step} on {names}{took}{detail}")

    def finished(self, step: str, host: str) -> None:
        """A step runs no longer on a host; how it ended is told later."""
        self._progress.end(step, host)

    def outcomes(self, outcomes: Iterable[Outcome]) -> None:
        """Print the outcome table, equal outcomes folded over hosts, the bad ones last, with their last lines and
        their logs. What was told when it ended and is no failure is not told again."""
        told = {(outcome.step, outcome.host, outcome.state) for outcome in self.ended_outcomes}
        news = [each for each in outcomes if each.state == "failed" or (each.step, each.host, each.state) not in told]
        groups = sorted(folded(news), key=lambda group: group[0].state == "failed")
        steps = max((len(group[0].step) for group in groups), default=0)
        times = max((len(took_by(group)) for group in groups), default=0)
        for group in groups:
            self._outcome(group, steps, times)

    def _outcome(self, group: Sequence[Outcome], steps: int, times: int) -> None:
        """Print equal outcomes; `steps` and `times` are the widths of their columns."""
        first, names = group[0], fold(outcome.host for outcome in group)
        failed = first.state == "failed"
        beside = f"  {shortened(first.detail)}" if first.detail and not failed else ""
        self._mark(
            first.state,
            f"{first.state:<{STATE_WIDTH}}  {first.step:<{steps}}  {took_by(group):>{times}}  {names}{beside}",
        )
        for text in filter(None, (first.detail, first.log and f"full log: {first.log}")) if failed else ():
            self.say(textwrap.indent(text, "    "))

    def next_commands(self, commands: Sequence[str]) -> None:
        """Print what to type next."""
        self.say("\nNext:")
        for command in commands:
            self.say(f"    {command}")

    def _mark(self, state: str, line: str) -> None:
        """Print a line whose leading word is a state, in the colour of that state."""
        with self._lock:
            style = STYLES.get(state) or VERDICT_STYLES[state]
            self._console.print(Text.assemble((line[: len(state)], style), line[len(state) :]))


class _Row(Struct):
    """A running step: the hosts that it runs on, how many it has `begun` on, its last line, its clock, and the counter
    that its lines begin with (`[3/903]`, as ninja's) since when and where it was first seen. `share` and `figures` are
    those of a step that measures itself."""

    clock: WorkClock
    hosts: dict[str, None]
    begun: int = 0
    text: str = ""
    done: int = 0
    total: int = 0
    first_done: int = 0
    first_seen: float = 0.0
    share: float | None = None
    figures: str = ""

    def take(self, text: str) -> None:
        """Take the last line, without a counter at its head."""
        if match := COUNTER.match(text):
            self.done, total, text = int(match[1]), int(match[2]), text[match.end() :]
            if total != self.total:
                self.total, self.first_done, self.first_seen = total, self.done, self.clock.worked
        self.text = text

    def seconds_left(self, before: float | None) -> float | None:
        """Return how long it will still work: by what it took `before`, else by its counter; None where nobody
        knows."""
        worked = self.clock.worked
        if before is not None and before > worked:
            return before - worked
        since, steps = worked - self.first_seen, self.done - self.first_done
        return since / steps * (self.total - self.done) if steps > 0 and self.total > self.done else None

    def told(self, before: float | None) -> list[str]:
        """Return how many hosts have ended it, counter, and how long it will still work, as far as they are known;
        figures where it has some."""
        if self.figures:
            return [self.figures]
        left, ended = self.seconds_left(before), self.begun - len(self.hosts)
        return [
            *([f"{ended} of {self.begun} hosts ended"] if ended else []),
            *([f"{self.done}/{self.total}"] if self.total else []),
            *([f"about {roughly(left)} left"] if left is not None else []),
        ]


class _Progress:
    """Rows by step, so that 64 hosts at one step are one row. Methods may be called from several threads."""

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}
        self._lock = threading.Lock()
        self._spinner, self._idle = Spinner("dots"), Spinner("dots", text="between two steps")
        self._numbers: dict[str, int] = {}
        self._before: Mapping[str, float] = {}

    def clear(self) -> None:
        """Nothing runs any more."""
        with self._lock:
            self._rows.clear()

    def expect(self, steps: Sequence[str], seconds: Mapping[str, float]) -> None:
        """Steps to come, in order, and how long they took before."""
        with self._lock:
            self._before = seconds
            for step in steps:
                self._numbers.setdefault(step, len(self._numbers) + 1)

    def start(self, step: str, hosts: Sequence[str]) -> str:
        """A step began on some hosts. Return its number as a head of a line, "" where no steps are expected."""
        with self._lock:
            row = self._rows.setdefault(step, _Row(WorkClock(), {}))
            row.begun += len({*hosts} - {*row.hosts})
            row.hosts.update(dict.fromkeys(hosts))
            return self._number(step)

    def _number(self, step: str) -> str:
        if not self._numbers:
            return ""
        return f"[{self._numbers.setdefault(step, len(self._numbers) + 1)}/{len(self._numbers)}] "

    def line(self, step: str, host: str, text: str, *, waits: bool = False) -> None:
        """A running step printed a line, or `waits`; of a step that does not run it is no matter."""
        with self._lock:
            row = self._rows.get(step)
            printed = plain(text).strip()
            if row is None or not printed:
                return
            row.clock.wait() if waits else row.clock.work()
            row.take(printed)
            if len(row.hosts) > 1:
                row.text = f"{host}: {row.text}"

    def measure(self, step: str, host: str, share: float, figures: str) -> None:
        """How far a running step is."""
        with self._lock:
            row = self._rows.get(step)
            if row is not None and host in row.hosts:
                row.share, row.figures = share, plain(figures)

    def end(self, step: str, host: str) -> None:
        """A step ended on a host; its row goes with its last host."""
        with self._lock:
            row = self._rows.get(step)
            if row is None:
                return
            row.hosts.pop(host, None)
            if not row.hosts:
                del self._rows[step]

    def running(self) -> dict[str, list[str]]:
        """Return the steps that run, with their hosts."""
        with self._lock:
            return {step: list(row.hosts) for step, row in self._rows.items()}

    def lines(self, since: float) -> list[str]:
        """Return one line for each step that runs for `since` seconds or longer."""
        with self._lock:
            return [
                f"{self._number(step)}{fold_short(row.hosts)}: {step}: {self._how_long(step, row)}"
                for step, row in self._rows.items()
                if row.clock.seconds >= since
            ]

    def _how_long(self, step: str, row: _Row) -> str:
        if row.clock.is_waiting:
            return f"{row.text}, {duration(row.clock.waited)}"
        return ", ".join([duration(row.clock.worked), *row.told(self._before.get(step))])

    def __rich__(self) -> RenderableType:
        table = Table(box=None, padding=(0, 1, 0, 0), show_header=False, expand=True)
        table.add_column(width=1)
        table.add_column(no_wrap=True)
        table.add_column(max_width=HOSTS_WIDTH, no_wrap=True, overflow="ellipsis")
        table.add_column(no_wrap=True, overflow="ellipsis")
        table.add_column(justify="right", no_wrap=True)
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        with self._lock:
            for step, row in self._rows.items():
                time_shown = clock_time(row.clock.waited if row.clock.is_waiting else row.clock.worked)
                told = [] if row.clock.is_waiting else row.told(self._before.get(step))
                text = Text.assemble(", ".join(told), "  " if told else "", (row.text, "dim"))
                number = Text(self._number(step).strip())
                said = text if row.share is None else _beside_a_bar(row.share, text)
                table.add_row(self._spinner, number, Text(fold(row.hosts)), Text(step), time_shown, said)
            return Group(table) if self._rows else Group(self._idle)


def _beside_a_bar(share: float, text: Text) -> RenderableType:
    """Return a bar of which `share` (0 to 1) is full, and a text behind it."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=BAR_WIDTH)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    grid.add_row(ProgressBar(total=1.0, completed=share, width=BAR_WIDTH), text)
    return grid


def clock_time(seconds: float) -> str:
    """Return `6:10`, `1:02:03` for a time that goes on."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def roughly(seconds: float) -> str:
    """Return a time that is only expected: whole minutes from one on, else tens of seconds."""
    return f"{round(seconds / 60)} min" if seconds >= 60 else f"{max(10, round(seconds, -1)):.0f} s"


class _Asking:
    """The line that says which hosts did not answer yet."""

    def __init__(self, hosts: Iterable[str], stream: TextIO) -> None:
        self._open = dict.fromkeys(hosts)
        self._all = len(self._open)
        self._stream = stream
        self._is_live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._every = ASK_EVERY if self._is_live else LOG_EVERY
        self._begin = time.monotonic()
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._tell, daemon=True)
        self._thread.start()

    def answered(self, host: str) -> None:
        """A host answered, or will not."""
        with self._lock:
            self._open.pop(host, None)

    def end(self) -> None:
        """Nobody is waited for any more; nothing of the line stays on a terminal."""
        self._ended.set()
        self._thread.join()

    def _tell(self) -> None:
        told = False
        with suppress(OSError, ValueError):  # nobody reads it any more
            while not self._ended.wait(self._every):
                self._write(self._text())
                told = True
            if told and self._is_live:
                self._write("")

    def _text(self) -> str:
        with self._lock:
            left, answered = list(self._open), self._all - len(self._open)
        who = f", waiting for {fold(left)}" if left else ""
        what = f"asking {self._all} host{'' if self._all == 1 else 's'} … {answered} answered{who}"
        return plain(f"{what} ({duration(round(time.monotonic() - self._begin))})")

    def _write(self, text: str) -> None:
        if self._is_live:
            width = shutil.get_terminal_size().columns - 1
            text = text if len(text) <= width else f"{text[: width - 1]}…"
            self._stream.write(f"\r\x1b[K{text}")
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()


@contextmanager
def asking(hosts: Iterable[str]) -> Iterator[Callable[[str], None]]:
    """Say on stderr whom we wait for as long as the body runs and asks `hosts`: on a terminal after one second, as a
    line that changes and goes; elsewhere one line every LOG_EVERY seconds. Yield what hears of each host that
    answered. Where steps are shown live they say it themselves."""
    stream = raw_stream(sys.stderr) if sys.stderr else None
    if stream is None or isinstance(stream, FileProxy):
        yield lambda host: None
        return
    line = _Asking(hosts, stream)
    try:
        yield line.answered
    finally:
        line.end()


def alike_shortened(lines: Iterable[tuple[str, str]], most: int = MOST_ALIKE) -> list[str]:
    """Return lines, each given with its kind: of a kind with more than `most` of them the first, and behind these how
    many more there are. So a thousand hosts make no thousand lines."""
    kinds: dict[str, list[str]] = {}
    for kind, line in lines:
        kinds.setdefault(kind, []).append(line)
    found: list[str] = []
    for kind, several in kinds.items():
        found += several[:most]
        if len(several) > most:
            found.append(f"… {kind}: {more(len(several) - most)}")
    return found


def more(count: int, what: str = "hosts") -> str:
    """Return what stands for the rest of many: `and 37 hosts more: --json has them`."""
    named = what.removesuffix("s") if count == 1 else what
    return f"and {count} {named} more: --json has {'it' if count == 1 else 'them'}"


def folded(outcomes: Iterable[Outcome]) -> list[list[Outcome]]:
    """Return outcomes in groups that differ in nothing but host and time; two failures are equal when they say the
    same, whatever host or address their remedies name: the first one's stands for all."""
    groups: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.step, outcome.state, outcome.detail.partition(REMEDY)[0]), []).append(outcome)
    return list(groups.values())


def took_by(group: Sequence[Outcome]) -> str:
    """Return how long the slowest of some equal outcomes worked, and waited for others where it did; "" for what was
    never begun."""
    if group[0].state == "skipped":
        return ""
    slowest = max(group, key=lambda outcome: outcome.seconds)
    waited = f", waited {duration(slowest.waited)}" if slowest.waited >= SHORT_WAIT else ""
    return f"{duration(slowest.seconds - slowest.waited)}{waited}"
