"""Output of a script as it comes: bytes of two streams in, full lines to a callback, whole texts kept."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable

LINE_END = re.compile(r"\r\n|\r|\n")


class Lines:
    """Cuts one stream into lines. A carriage return ends a line too, so that progress shown by overwriting is seen as it comes."""

    def __init__(self, on_line: Callable[[str], None] | None) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._on_line = on_line
        self._parts: list[str] = []
        self._rest = ""
        self._after_return = False

    def feed(self, data: bytes, *, final: bool = False) -> None:
        """Take more bytes of the stream; `final` also gives out a last line without an end."""
        text = self._decoder.decode(data, final)
        if text:
            self._parts.append(text)
        if self._on_line is None:
            return
        if self._after_return and text.startswith("\n"):
            text = text[1:]
            self._after_return = False
        elif text:
            self._after_return = False
        *lines, self._rest = LINE_END.split(self._rest + text)
        self._after_return = self._after_return or (text.endswith("\r") and not self._rest)
        for line in lines:
            self._on_line(line)
        if final and self._rest:
            self._on_line(self._rest)
            self._rest = ""

    @property
    def text(self) -> str:
        """The whole stream so far; bytes that are no UTF-8 are replaced."""
        return "".join(self._parts)


class Transcript:
    """Both streams of a script. What stands on stdout before `mark` comes from start-up files of the account and is dropped."""

    def __init__(self, mark: bytes, on_out: Callable[[str], None] | None, on_err: Callable[[str], None] | None) -> None:
        self._mark = mark
        self._before = b""
        self.started = not mark
        """Whether the script has begun."""
        self.out = Lines(on_out)
        self.err = Lines(on_err)
        self._early = Lines(None)

    def feed(self, out: bytes, err: bytes) -> None:
        """Take what arrived. stderr that came before the script began is kept apart, for the message when it never does."""
        if not self.started:
            self._before += out
            head, found, out = self._before.partition(self._mark)
            self.started = bool(found)
            if not found:
                self._before = head
                out = b""
        if out:
            self.out.feed(out)
        if err:
            (self.err if self.started else self._early).feed(err)

    def end(self) -> None:
        """Say that both streams ended."""
        self.out.feed(b"", final=True)
        self.err.feed(b"", final=True)

    @property
    def early(self) -> str:
        """What the host said on stderr before the script began, or on stdout when stderr is empty."""
        return self._early.text.strip() or self._before.decode(errors="replace").strip()
