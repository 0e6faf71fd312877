"""Output of a script as it comes: bytes of two streams in, full lines to a callback, whole texts kept."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable

LINE_END = re.compile(r"\r\n|\r|\n")


class Raw:
    """Gives one stream out as the bytes it is, from `mark` on; keeps nothing."""

    def __init__(self, mark: bytes, sink: Callable[[bytes], object]) -> None:
        self._mark, self._sink = mark, sink
        self._early = b""
        self.started = not mark
        self.text = ""

    def feed(self, data: bytes) -> None:
        """Take more bytes of the stream."""
        if not self.started:
            head, mark, data = (self._early + data).partition(self._mark)
            self._early, self.started = head, bool(mark)
        if data:
            self._sink(data)

    def end(self) -> None:
        """Say that the stream ended."""

    @property
    def early(self) -> str:
        """What came before the mark."""
        return self._early.decode(errors="replace").strip()


class Lines:
    """Cuts one stream into lines. What stands before `mark` comes from start-up files of the account and is kept apart.

    A carriage return ends a line too, so that progress shown by overwriting is seen as it comes.
    """

    def __init__(self, mark: bytes, on_line: Callable[[str], None] | None) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._mark, self._on_line = mark, on_line
        self._early = b""
        self.started = not mark
        """Whether the mark has come, or there is none to wait for."""
        self._parts: list[str] = []
        self._rest = ""
        self._after_return = False

    def feed(self, data: bytes) -> None:
        """Take more bytes of the stream."""
        if not self.started:
            head, mark, data = (self._early + data).partition(self._mark)
            self._early, self.started = head, bool(mark)
        if data:
            self._take(self._decoder.decode(data))

    def end(self) -> None:
        """Say that the stream ended; a last line without an end is given out."""
        self._take(self._decoder.decode(b"", True))
        if self._rest and self._on_line:
            self._on_line(self._rest)
        self._rest = ""

    def _take(self, text: str) -> None:
        if not text:
            return
        self._parts.append(text)
        if self._on_line is None:
            return
        if self._after_return:
            text = text.removeprefix("\n")
        *lines, self._rest = LINE_END.split(self._rest + text)
        # The end of a line in two pieces: the return has given the line out, the newline still to come is part of it.
        self._after_return = text.endswith("\r")
        for line in lines:
            self._on_line(line)

    @property
    def text(self) -> str:
        """The whole stream so far; bytes that are no UTF-8 are replaced."""
        return "".join(self._parts)

    @property
    def early(self) -> str:
        """What came before the mark."""
        return self._early.decode(errors="replace").strip()
