"""A script started on a channel: read to its end by one thread, its output cut into lines and told to a
callback. No stream of a host is kept without a limit: a host that floods is the trouble of that host alone.
"""

from __future__ import annotations

import codecs
import re
import time
from collections.abc import Callable

from msgspec import Struct

from deepep_bootstrap.core.errors import LostError, Problem, Trouble
from deepep_bootstrap.core.text import size
from deepep_bootstrap.remote import channel
from deepep_bootstrap.remote.channel import Channel, Hide, LineLostError, as_is

OnLine = Callable[[str], None]
Sink = Callable[[bytes], object]

ANSWER_LIMIT = 8 * 1024**2
"""Bytes of a stream that is kept to be read. The facts of a host with 8 GPUs and 20 NICs have less than 64 KiB; 64
hosts that are talked to at a time, with two streams each, hold 1 GiB at most."""

TAIL = 64 * 1024
"""Bytes that are kept of a log's end, for the last lines in a message."""

EARLY_LIMIT = 1024**2
"""Bytes that an account's start-up files may print before a script starts."""

LONGEST_LINE = 64 * 1024
"""Characters after which a line is given out although its end has not come."""

START_LIMIT = 180.0
"""Seconds in which a script must begin, whatever time it has then: start-up files on a busy network file system take
some, sudo asks a server of accounts. A sudo that asks again and again never comes to it."""


class TooMuchError(Exception):
    """A stream went over its limit; the text says what came."""

    def __init__(self, what: str, limit: int) -> None:
        super().__init__(what)
        self.what, self.limit = what, limit


class Left(Struct, frozen=True):
    """What a script left: exit code, both streams, and the seconds it took."""

    code: int
    out: str
    err: str
    seconds: float


class Script:
    """One started script. `timeout` is in seconds (None: no limit); `sink` gets the bytes of stdout, which are not
    kept as text then. `limit` is in bytes of each stream (None: no limit, for a sink that has its own). With `log`
    stderr, or merged stdout, has no limit, and its end alone is kept. `hide` takes secrets out of what is for people:
    stderr, and messages."""

    def __init__(
        self,
        host: str,
        wire: Channel,
        timeout: float | None,
        *,
        on_out: OnLine | None,
        on_err: OnLine | None,
        sink: Sink | None = None,
        limit: int | None = ANSWER_LIMIT,
        log: str = "",
        hide: Hide = as_is,
    ) -> None:
        self.wire = wire
        self._host, self._timeout, self._began = host, timeout, time.monotonic()
        self._log, self._hide = log, hide
        out, err = (Tail() if log == name else Answer(name, limit) for name in ("stdout", "stderr"))
        self._out: Lines | Raw = Raw(channel.MARK, sink, limit) if sink else Lines(channel.MARK, on_out, out)
        self._err = Lines(channel.MARK, on_err, err)

    def finish(self) -> Left:
        """Read until both streams end and return what the script left. Raises Trouble when it never began, its
        host went away, or it printed more than it may; then it is ended."""
        try:
            while any(came := self.wire.read(self._rest())):
                self._out.feed(came[0])
                self._err.feed(came[1])
            code = self.wire.code(self._rest())
        except TimeoutError:
            raise Trouble(self._too_long(), may_pass=True) from None
        except LineLostError as lost:
            raise LostError(Problem(self._host, str(lost)), may_pass=True) from None
        except TooMuchError as flood:
            raise Trouble(
                Problem(
                    self._host,
                    "prints without an end, so its script was ended",
                    f"more than {size(flood.limit)} {flood.what}",
                    f"{size(flood.limit)} at most",
                    "logging in by hand: this host is broken, or somebody else's",
                )
            ) from None
        finally:
            self.wire.close()
        if not self._out.started:
            raise Trouble(Problem(self._host, *channel.explain_no_start(code, self._early, self._hide)))
        self._out.end()
        self._err.end()
        out = self._hide(self._out.text) if self._log == "stdout" else self._out.text
        return Left(code, out, self._hide(self._err.text), time.monotonic() - self._began)

    @property
    def _early(self) -> str:
        return self._err.early or self._out.early

    @property
    def _limit(self) -> float | None:
        """Seconds that the script may take, or may take to begin; None: any number."""
        if self._out.started:
            return self._timeout
        return START_LIMIT if self._timeout is None else min(START_LIMIT, self._timeout)

    def _rest(self) -> float | None:
        """Return how many seconds of the limit are left; TimeoutError when none are, also while output comes."""
        if self._limit is None:
            return None
        rest = self._began + self._limit - time.monotonic()
        if rest <= 0:
            raise TimeoutError
        return rest

    def _too_long(self) -> Problem:
        begun = self._out.started
        said = self._err.text.strip() or self._out.text.strip() if begun else self._early
        what = "no end of the script" if begun else "no script has begun there"
        last = self._hide(said.rpartition("\n")[2])[-200:]
        return Problem(self._host, f"{what} after {self._limit:g} s", last, "", "" if begun else "logging in by hand")


LINE_END = re.compile(r"\r\n|\r|\n")


class _Beginning:
    """What stands on a stream before `mark`: the output of the account's start-up files."""

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self._early = bytearray()
        self.started = not mark

    def skip(self, data: bytes) -> bytes:
        """Take more bytes of the stream and return those behind the mark. TooMuchError where it does not come."""
        if self.started:
            return data
        # The mark may lie across two pieces; what was searched before is not searched again.
        since = max(0, len(self._early) - len(self._mark) + 1)
        self._early += data
        at = self._early.find(self._mark, since)
        if at < 0:
            if len(self._early) > EARLY_LIMIT:
                raise TooMuchError("from start-up files of the account, before the script began", EARLY_LIMIT)
            return b""
        self.started = True
        rest = bytes(self._early[at + len(self._mark) :])
        del self._early[at:]
        return rest

    @property
    def text(self) -> str:
        return self._early.decode(errors="replace").strip()


class Answer:
    """Keeps a whole stream of at most `limit` bytes (None: any number); `name` is the stream's in the message."""

    def __init__(self, name: str = "stdout", limit: int | None = ANSWER_LIMIT) -> None:
        self._name, self._limit = name, limit
        self.data = bytearray()

    def add(self, data: bytes) -> None:
        """Keep more bytes. TooMuchError beyond the limit."""
        if self._limit is not None and len(self.data) + len(data) > self._limit:
            raise TooMuchError(f"on {self._name}", self._limit)
        self.data += data


class Tail:
    """Keeps the last TAIL bytes of a stream, and at times as many more."""

    def __init__(self) -> None:
        self.data = bytearray()

    def add(self, data: bytes) -> None:
        """Keep more bytes, and let older ones go."""
        self.data += data
        if len(self.data) > 2 * TAIL:
            del self.data[:-TAIL]


class Raw:
    """Gives one stream out as the bytes it is, from `mark` on; keeps nothing. `limit` is in bytes (None: no limit)."""

    def __init__(self, mark: bytes, sink: Sink, limit: int | None = None) -> None:
        self._sink, self._limit = sink, limit
        self._beginning = _Beginning(mark)
        self._came = 0
        self.text = ""

    def feed(self, data: bytes) -> None:
        """Take more bytes of the stream. TooMuchError beyond the limit."""
        data = self._beginning.skip(data)
        self._came += len(data)
        if self._limit is not None and self._came > self._limit:
            raise TooMuchError("on stdout", self._limit)
        if data:
            self._sink(data)

    def end(self) -> None:
        """Say that the stream ended."""

    @property
    def started(self) -> bool:
        """Whether the mark has come, or there is none to wait for."""
        return self._beginning.started

    @property
    def early(self) -> str:
        """What came before the mark."""
        return self._beginning.text


class Lines:
    """Cuts one stream into lines, and keeps of it what `kept` keeps. What stands before `mark` comes from start-up
    files of the account and is kept apart.

    A carriage return ends a line too, so that progress shown by overwriting is seen as it comes, and so do LONGEST_LINE
    characters.
    """

    def __init__(self, mark: bytes, on_line: OnLine | None, kept: Answer | Tail | None = None) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._on_line = on_line
        self._beginning = _Beginning(mark)
        self._kept = kept or Answer()
        self._rest: list[str] = []
        self._rest_size = 0
        self._after_return = False

    def feed(self, data: bytes) -> None:
        """Take more bytes of the stream. TooMuchError beyond a limit."""
        if data := self._beginning.skip(data):
            self._kept.add(data)
            self._take(self._decoder.decode(data))

    def end(self) -> None:
        """Say that the stream ended; a last line without an end is given out."""
        self._take(self._decoder.decode(b"", True))
        if self._rest_size and self._on_line:
            self._on_line("".join(self._rest))
        self._rest, self._rest_size = [], 0

    def _take(self, text: str) -> None:
        if not text or self._on_line is None:
            return
        if self._after_return:
            text = text.removeprefix("\n")
        # The end of a line in two pieces: the return has given the line out, the newline still to come is part of it.
        self._after_return = text.endswith("\r")
        *lines, rest = LINE_END.split(text)
        for line in lines:
            self._on_line("".join((*self._rest, line)))
            self._rest, self._rest_size = [], 0
        self._rest.append(rest)
        self._rest_size += len(rest)
        if self._rest_size > LONGEST_LINE:
            self._on_line("".join(self._rest))
            self._rest, self._rest_size = [], 0

    @property
    def started(self) -> bool:
        """Whether the mark has come, or there is none to wait for."""
        return self._beginning.started

    @property
    def text(self) -> str:
        """What is kept of the stream so far; bytes that are no UTF-8 are replaced."""
        return self._kept.data.decode(errors="replace")

    @property
    def early(self) -> str:
        """What came before the mark."""
        return self._beginning.text
