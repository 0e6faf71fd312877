"""A script that was started behind a wire: read to its end by one thread, told to a callback line by line."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.remote import loader
from deepep_bootstrap.remote.channel import LineLostError, Wire
from deepep_bootstrap.remote.transcript import Lines, Raw

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
    """One started script. `timeout` is in seconds (None: no limit); `sink` gets the bytes of stdout, which are not kept as text then."""

    def __init__(
        self, host: str, wire: Wire, timeout: float | None, *, on_out: OnLine | None, on_err: OnLine | None, sink: Sink | None = None
    ) -> None:
        self.wire = wire
        self._host, self._timeout, self._began = host, timeout, time.monotonic()
        self._out: Lines | Raw = Raw(loader.MARK, sink) if sink else Lines(loader.MARK, on_out)
        self._err = Lines(loader.MARK, on_err)

    def finish(self) -> Left:
        """Read until both streams end and return what the script left. Raises Trouble when it never began or its host went away."""
        try:
            while any(came := self.wire.read(self._rest())):
                self._out.feed(came[0])
                self._err.feed(came[1])
            code = self.wire.code()
        except TimeoutError:
            raise Trouble(Problem(self._host, f"no end of the script after {self._timeout:g} s", self._last_line())) from None
        except LineLostError as lost:
            raise Trouble(Problem(self._host, str(lost))) from None
        finally:
            self.wire.close()
        if not self._out.started:
            raise Trouble(Problem(self._host, *loader.explain_no_start(code, self._err.early or self._out.early)))
        self._out.end()
        self._err.end()
        return Left(code, self._out.text, self._err.text, time.monotonic() - self._began)

    def _rest(self) -> float | None:
        return None if self._timeout is None else max(self._began + self._timeout - time.monotonic(), 0.0)

    def _last_line(self) -> str:
        text = self._err.text.strip() or self._out.text.strip()
        return text.rpartition("\n")[2][-200:]
