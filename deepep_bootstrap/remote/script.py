"""A script started on a channel: read to its end by one thread, its output cut into lines and told to a
callback.
"""

from __future__ import annotations

import codecs
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.remote import channel
from deepep_bootstrap.remote.channel import Channel, LineLostError

OnLine = Callable[[str], None]
Sink = Callable[[bytes], object]


@dataclass(frozen=True)
class Left:
    """What a script left: exit code, both streams, and the seconds it took."""

    code: int
    out: str
    err: str
    seconds: float


class Script:
    """One started script. `timeout` is in seconds (None: no limit); `sink` gets the bytes of stdout, which are not
    kept as text then."""

    def __init__(
        self,
        host: str,
        wire: Channel,
        timeout: float | None,
        *,
        on_out: OnLine | None,
        on_err: OnLine | None,
        sink: Sink | None = None,
    ) -> None:
        self.wire = wire
        self._host, self._timeout, self._began = host, timeout, time.monotonic()
        self._out: Lines | Raw = Raw(channel.MARK, sink) if sink else Lines(channel.MARK, on_out)
        self._err = Lines(channel.MARK, on_err)

    def finish(self) -> Left:
        """Read until both streams end and return what the script left. Raises Trouble when it never began or its
        host went away."""
        try:
            while any(came := self.wire.read(self._rest())):
                self._out.feed(came[0])
                self._err.feed(came[1])
            code = self.wire.code()
        except TimeoutError:
            raise Trouble(
                Problem(self._host, f"no end of the script after {self._timeout:g} s", self._last_line()), may_pass=True
            ) from None
        except LineLostError as lost:
            raise Trouble(Problem(self._host, str(lost)), may_pass=True) from None
        finally:
            self.wire.close()
        if not self._out.started:
            raise Trouble(Problem(self._host, *channel.explain_no_start(code, self._err.early or self._out.early)))
        self._out.end()
        self._err.end()
        return Left(code, self._out.text, self._err.text, time.monotonic() - self._began)

    def _rest(self) -> float | None:
        return None if self._timeout is None else max(self._began + self._timeout - time.monotonic(), 0.0)

    def _last_line(self) -> str:
        text = self._err.text.strip() or self._out.text.strip()
        return text.rpartition("\n")[2][-200:]


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
