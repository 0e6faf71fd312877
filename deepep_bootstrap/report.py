"""What a person sees: plans, progress, outcomes, next commands. The only module that knows rich."""

from __future__ import annotations

import json
import sys
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from deepep_bootstrap.errors import Problem
from deepep_bootstrap.hosts import fold
from deepep_bootstrap.plan import Outcome, Plan, Step

MARKS = {"done": "[green]done[/]", "unchanged": "[dim]unchanged[/]", "failed": "[red]failed[/]", "skipped": "[yellow]skipped[/]"}
GIB = 1024**3


class Screen:
    """Output of one command: rich on a terminal, plain lines elsewhere, nothing but one document with `as_json`.

    Messages for people go to stdout; problems go to stderr. Methods may be called from several threads.
    """

    def __init__(self, verb: str, *, as_json: bool = False) -> None:
        self.verb = verb
        self.as_json = as_json
        self.live = sys.stdout.isatty() and not as_json
        self._console = Console(quiet=as_json, soft_wrap=True, highlight=False)
        self._errors = Console(stderr=True, soft_wrap=True, highlight=False)
        self._progress: _Progress | None = None
        self._lock = threading.Lock()

    def say(self, text: str = "", *, style: str = "") -> None:
        """Print one line for a person."""
        with self._lock:
            self._console.print(text, style=style or None, markup=False)

    def problem(self, problem: Problem) -> None:
        """Print one problem; part of the document instead where there is one."""
        if not self.as_json:
            self._errors.print(Text(str(problem), style="red" if self._errors.is_terminal else ""))

    def document(self, exit_code: int, problems: Sequence[Problem], **content: Any) -> None:
        """Print the verb's JSON document, if that was asked for."""
        if self.as_json:
            head = {"schema": 1, "verb": self.verb, "exit": exit_code, "errors": [problem.as_json() for problem in problems]}
            print(json.dumps({**head, **content}, ensure_ascii=False, indent=2))

    def plan(self, plan: Plan) -> None:
        """Print the steps with their reasons, equal ones folded over hosts, and the estimate."""
        for note in plan.notes:
            self.say(f"note: {note}")
        if not plan.steps:
            self.say("Nothing to do: everything wanted is there.")
            return
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for heading in ("step", "hosts", "found", "wanted"):
            table.add_column(heading, overflow="fold")
        for step in plan.steps:
            table.add_row(*(escape(cell) for cell in (step.title, fold(step.hosts), step.reason.found, step.reason.wanted)))
        with self._lock:
            if self._console.is_terminal:
                self._console.print(table)
            else:
                for step in plan.steps:
                    found = f"found {step.reason.found}, wanted {step.reason.wanted}"
                    self._console.print(f"{step.title} on {fold(step.hosts)}: {found}", markup=False)
        if plan.download_bytes or plan.disk_bytes:
            self.say(f"Estimate: download up to {size(plan.download_bytes)}, about {size(plan.disk_bytes)} on the prefix.")

    @contextmanager
    def progress(self) -> Iterator[None]:
        """Show a live table of running steps on a terminal while the body runs; plain lines elsewhere."""
        if not self.live:
            yield
            return
        self._progress = _Progress()
        try:
            with Live(self._progress, console=self._console, refresh_per_second=8, transient=True):
                yield
        finally:
            self._progress = None

    def started(self, host: str, step: str) -> None:
        """A step began on a host."""
        if self._progress:
            self._progress.start((host, step))
        else:
            self.say(f"{host}: {step} …")

    def waiting(self, host: str, step: str, text: str) -> None:
        """A step waits for somebody; a person should know for whom."""
        self.line(host, step, f"waiting for {text}")
        if not self._progress:
            self.say(f"{host}: {step} waits for {text}")

    def line(self, host: str, step: str, text: str) -> None:
        """A running step printed a line (live table only; logs have them all)."""
        if self._progress:
            self._progress.line((host, step), text)

    def ended(self, outcome: Outcome) -> None:
        """A step ended on a host."""
        if self._progress:
            self._progress.end((outcome.host, outcome.step))
        detail = f" — {outcome.detail}" if outcome.detail else ""
        with self._lock:
            mark = MARKS[outcome.state]
            self._console.print(f"{mark} {escape(outcome.step)} on {escape(outcome.host)} ({outcome.seconds:.1f} s){escape(detail)}")

    def outcomes(self, outcomes: Iterable[Outcome]) -> None:
        """Print the outcome table, equal outcomes folded over hosts, the bad ones last and with their logs."""
        groups: dict[tuple[str, str, str, str], list[str]] = {}
        for outcome in outcomes:
            log = outcome.log if outcome.state == "failed" else ""
            groups.setdefault((outcome.step, outcome.state, outcome.detail, log), []).append(outcome.host)
        self.say()
        for (step, state, detail, log), names in sorted(groups.items(), key=lambda item: item[0][1] == "failed"):
            below = [detail, log and f"full log: {log}"] if state == "failed" else []
            beside = f" — {escape(detail)}" if detail and state != "failed" else ""
            with self._lock:
                self._console.print(f"{MARKS[state]} {escape(step)}: {escape(fold(names))}{beside}")
                for text in filter(None, below):
                    self._console.print(textwrap.indent(text, "    "), markup=False)

    def next_commands(self, commands: Sequence[str]) -> None:
        """Print what to type next."""
        self.say("\nNext:")
        for command in commands:
            self.say(f"    {command}")


class _Progress:
    """The live table: one row a running step with its time and last line."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], tuple[float, str]] = {}
        self._lock = threading.Lock()
        self._spinner = Spinner("dots")

    def start(self, key: tuple[str, str]) -> None:
        with self._lock:
            self._rows[key] = (time.monotonic(), "")

    def line(self, key: tuple[str, str], text: str) -> None:
        with self._lock:
            since = self._rows.get(key, (time.monotonic(), ""))[0]
            self._rows[key] = (since, text.strip())

    def end(self, key: tuple[str, str]) -> None:
        with self._lock:
            self._rows.pop(key, None)

    def __rich__(self) -> Group:
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, expand=True)
        for ratio in (0, 0, 0, 1):
            table.add_column(ratio=ratio or None, no_wrap=True, overflow="ellipsis")
        with self._lock:
            for (host, step), (since, text) in self._rows.items():
                table.add_row(escape(host), escape(step), f"{time.monotonic() - since:5.0f} s", Text(text, style="dim"))
        return Group(self._spinner, table)


def size(count: int) -> str:
    """Return `count` bytes in the unit a person would choose."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 1024**2:.0f} MiB"


def step_json(step: Step) -> dict[str, Any]:
    """Return one step of a plan for the JSON document."""
    reason = {"found": step.reason.found, "wanted": step.reason.wanted}
    return {"kind": step.kind, "name": step.name, "title": step.title, "hosts": list(step.hosts), "reason": reason}


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the keys of a plan for the JSON document."""
    estimate = {"download_bytes": plan.download_bytes, "disk_bytes": plan.disk_bytes}
    return {"steps": [step_json(step) for step in plan.steps], "notes": list(plan.notes), "estimate": estimate, "chosen": plan.chosen()}


def outcome_json(outcome: Outcome) -> Mapping[str, Any]:
    """Return one outcome for the JSON document."""
    return {key: getattr(outcome, key) for key in ("step", "host", "state", "detail", "seconds", "code", "log")}
