"""A terminal in tmux that a script types into, and what it shows as an SVG picture: light and dark in one file, in the
reader's own font, with nothing that is loaded from elsewhere."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.segment import Segment

PATIENCE = 300.0
"""Seconds after which a wait is given up; a safety net, not an expectation."""

PROMPT, AT_PROMPT = "$ ", r"^\$\s*\Z"
"""What the shell asks with, and the end of a screen on which it does; tmux leaves blanks at the end of a line out."""

CELL, LINE, SIZE, PAD = 8.4, 18.0, 14, 14
"""Width of a column, height of a line, size of the letters and margin, in pixels: 0.6 em is what monospaced fonts are
wide, and `textLength` makes it so for all others."""

LIGHT = ("#383a42", "#c0392b", "#2f7d32", "#8a6100", "#2456a6", "#8e3a9d", "#0b7285", "#6b7280")
DARK = ("#d7dae0", "#ff7b72", "#7ee787", "#e3b341", "#79c0ff", "#d2a8ff", "#56d4dd", "#9aa4b2")
"""Colours of letters: the page's own in the place of black, then red, green, yellow, blue, magenta, cyan, and grey."""

GREY = 7


@dataclass
class Terminal:
    """One window of a tmux server of its own, with a shell."""

    socket: Path
    columns: int
    rows: int

    def tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", str(self.socket), "-f", "/dev/null", *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def open(self, folder: Path, environment: Mapping[str, str]) -> None:
        shell = ["env", *(f"{name}={value}" for name, value in environment.items()), f"PS1={PROMPT}"]
        command = shlex.join([*shell, "bash", "--norc", "--noprofile", "-i"])
        size = ["-x", str(self.columns), "-y", str(self.rows)]
        self.tmux("new-session", "-d", *size, "-c", str(folder), command)
        self.tmux("set", "-g", "status", "off")
        self.wait(AT_PROMPT)

    def close(self) -> None:
        self.tmux("kill-server")

    def type(self, line: str) -> None:
        """Empty the screen and type a command."""
        self.tmux("send-keys", "clear", "Enter")
        self.wait(r"\A\$\s*\Z")
        self.tmux("send-keys", "-l", line)
        # Until it stands there the screen looks as if the command had ended.
        self.wait(re.escape(line[:20]))
        self.tmux("send-keys", "Enter")

    def keys(self, *names: str) -> None:
        self.tmux("send-keys", *names)

    @property
    def text(self) -> str:
        """What is on the screen, without colours."""
        return self.tmux("capture-pane", "-p").rstrip("\n")

    @property
    def drawn(self) -> str:
        """What is on the screen, with the escape sequences of its colours."""
        return self.tmux("capture-pane", "-p", "-e").rstrip("\n")

    def wait(self, pattern: str) -> None:
        """Wait until the screen has a pattern, however slow the machine is today."""
        end = time.monotonic() + PATIENCE
        while not re.search(pattern, self.text, re.MULTILINE):
            assert time.monotonic() < end, f"waited in vain for {pattern}:\n{self.text}"
            time.sleep(0.2)

    def wait_while_running(self, pattern: str) -> None:
        """Wait until the screen has a pattern while a command runs; a command that ends first will never show it."""
        self.wait(f"(?:{pattern})|{AT_PROMPT}")
        assert re.search(pattern, self.text, re.MULTILINE), f"ended without {pattern}:\n{self.text}"

    def wait_for_prompt(self) -> None:
        self.wait(AT_PROMPT)


STEADY = (
    (r"20\d\d-\d\d-\d\d([T ])\d\d:\d\d(:\d\d)?", r"2026-11-22\g<1>12:34\g<2>"),
    (r"(2026-11-22[T ]12:34):\d\d", r"\1:56"),
    (r"20\d{6}T\d{6}Z", "20261122T123456Z"),
    (r"(?<=123456Z-)([a-z-]+)-[0-9a-f]{6}\b", r"\1-3fa9c1"),
    (r"(?<![\d:.])\d\d:\d\d:\d\d(?![\d:])", "12:34:56"),
    (r"(?<![\d:])\d:\d\d(?![\d:])", "0:08"),
    (r"(?<![\d.])\d\.\d( ?)(?=s\b)", r"1.2\1"),
    (r"(?<![\d.])\d\d( ?)(?=s\b)", r"12\1"),
    (r"(?<![\d.])\d( ?)(?=s\b)", r"8\1"),
    (r"(?<=\bid )[0-9a-f]{8}\b", "5f3a9c1e"),
    (r"(?<=[ /])boot-?id [0-9a-f-]+", "boot id 8b4c3d0e"),
    (r"[⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏]", "⠋"),
)
"""What differs from run to run, and what stands for it: as many characters, so that tables stay tables."""


def steady(text: str) -> str:
    """Return a screen with times, durations and identities that are always the same."""
    for pattern, value in STEADY:
        text = re.sub(pattern, value, text)
    return text


def picture(drawn: str, columns: int, rows: int, title: str) -> str:
    """Return what a terminal shows as SVG. `drawn` are its lines with escape sequences."""
    console = Console(width=columns, color_system="standard", force_terminal=True, legacy_windows=False)
    lines = [list(text.render(console)) for text in AnsiDecoder().decode(drawn)][:rows]
    width, height = columns * CELL + 2 * PAD, rows * LINE + 2 * PAD
    inner = [part for number, line in enumerate(lines) for part in _line(line, PAD + number * LINE)]
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label={quoteattr(title)}>'
    page = '<rect class="page" x=".5" y=".5" width="99.9%" height="99.9%" rx="8"/>'
    return "\n".join([head, f"<style>{_style()}</style>", page, *inner, "</svg>\n"])


def _style() -> str:
    def colours(palette: Sequence[str]) -> str:
        return "".join(
            f".f{number}{{fill:{colour}}}.b{number}{{fill:{colour}}}" for number, colour in enumerate(palette)
        )

    font = "ui-monospace,'SF Mono',Menlo,Consolas,'DejaVu Sans Mono',monospace"
    return (
        f"text{{font:{SIZE}px {font};white-space:pre}}.bold{{font-weight:700}}.under{{text-decoration:underline}}"
        f".page{{fill:#fbfbfc;stroke:#d5d9e0}}.inverse{{fill:#fbfbfc}}{colours(LIGHT)}"
        f"@media(prefers-color-scheme:dark){{.page{{fill:#15181d;stroke:#343a44}}.inverse{{fill:#15181d}}{colours(DARK)}}}"
    )


def _line(segments: Sequence[Segment], top: float) -> Iterator[str]:
    """Yield the elements of one line: letters of one style together, without blanks at its end."""
    column = 0
    for look, group in itertools.groupby(segments, key=_look):
        text = "".join(segment.text for segment in group)
        left, wide = PAD + column * CELL, len(text) * CELL
        column += len(text)
        letters, ground = look
        if ground:
            yield f'<rect class="{ground}" x="{left:g}" y="{top:g}" width="{wide:g}" height="{LINE:g}"/>'
        start = len(text) - len(text.lstrip())
        if shown := text.strip():
            yield (
                f'<text class="{letters}" x="{left + start * CELL:g}" y="{top + LINE - 5:g}" '
                f'textLength="{len(shown) * CELL:g}" lengthAdjust="spacingAndGlyphs">{escape(shown)}</text>'
            )


def _look(segment: Segment) -> tuple[str, str]:
    """Return the classes of a segment's letters, and that of what is behind them, "" for nothing."""
    style = segment.style
    if style is None:
        return "f0", ""
    letters = GREY if style.dim else _number(style.color)
    more = f"{' bold' if style.bold else ''}{' under' if style.underline else ''}"
    if style.reverse:
        return f"inverse{more}", f"b{letters}"
    behind = f"b{_number(style.bgcolor)}" if style.bgcolor and style.bgcolor.number is not None else ""
    return (f"inverse{more}" if behind else f"f{letters}{more}"), behind


def _number(colour: object) -> int:
    """Return which of our colours one of the terminal's is; bright ones are the same, white and what is no colour of
    the sixteen is the page's own."""
    number = getattr(colour, "number", None)
    if number is None or number > 15:
        return 0
    return GREY if number == 8 else 0 if number % 8 in {0, 7} else number % 8


def shell_environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a shell on a screen."""
    keep = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return {**keep, "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", **more}
