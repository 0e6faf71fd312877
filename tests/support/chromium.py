"""A real Chromium without a window, spoken to over two pipes (DevTools protocol), and its screenshots as pixels.
Nothing but Python."""

from __future__ import annotations

import base64
import json
import os
import shutil
import struct
import subprocess
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--force-color-profile=srgb"),
)


@dataclass
class Page:
    """One page of a browser. `requests` are addresses that it wanted, `refused` why some were not even asked for,
    `complaints` what the console and the engine said."""

    browser: Browser
    session: str
    requests: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    loaded: int = 0

    def tell(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.tell(method, self.session, **params)

    def show(self, address: str, width: int, *, dark: bool = False, media: str = "screen", height: int = 900) -> None:
        """Load an address in a window of this width, until it is all there."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.tell("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.tell(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        before = self.loaded
        self.tell("Page.navigate", url=address)
        while self.loaded == before:
            self.browser.listen()

    def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; the page's own policy does not hold for it."""
        answer = self.tell("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, clip: Mapping[str, float]) -> Image:
        """Return a part of the page as pixels: x, y, width and height, from the page's own corner."""
        area = {key: clip[key] for key in ("x", "y", "width", "height")} | {"scale": 1}
        answer = self.tell("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=area)
        return read_png(base64.b64decode(answer["data"]))

    def heard(self, method: str, params: Mapping[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Network.loadingFailed":
            self.refused.append(params.get("blockedReason", ""))
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str(params["args"]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"]["text"])
        elif method == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif method == "Page.loadEventFired":
            self.loaded += 1


class Browser:
    """A running Chromium; `listen` blocks until it says something."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._rest, self._number = b"", 0
        self.pages: dict[str, Page] = {}

    def tell(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Send a command and return its answer; what comes before it goes to the pages."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        while True:
            answer = self.listen()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return answer["result"]

    def listen(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._answers, 1 << 16)
            assert data, "the browser has gone"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        page = self.pages.get(message.get("sessionId", ""))
        if page and "method" in message:
            page.heard(message["method"], message["params"])
        return message

    def page(self) -> Page:
        target = self.tell("Target.createTarget", url="about:blank")["targetId"]
        session = self.tell("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self.pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.tell(f"{domain}.enable")
        return page


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """Yield a browser whose profile is in `folder`; it has ended on the way out."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    assert program, "no Chromium on this machine: tests/setup.sh test installs one"
    (ours, theirs_out), (theirs_in, mine) = os.pipe(), os.pipe()
    command = [program, *FLAGS, f"--user-data-dir={folder}", "--remote-debugging-pipe"]
    # The browser reads commands from 3 and writes answers to 4.
    shell = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", *command]
    with (folder / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            shell, pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL, stdout=errors, stderr=errors
        )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(mine, ours)
    finally:
        os.close(mine)
        os.close(ours)
        process.terminate()
        process.wait()


@dataclass(frozen=True)
class Image:
    """Pixels of three bytes, row by row."""

    width: int
    height: int
    rows: tuple[bytes, ...]

    def pixel(self, x: int, y: int) -> tuple[int, int, int]:
        red, green, blue = self.rows[y][3 * x : 3 * x + 3]
        return red, green, blue

    def colours(self) -> set[bytes]:
        """Return all colours."""
        return {row[at : at + 3] for row in self.rows for at in range(0, len(row), 3)}


def read_png(data: bytes) -> Image:
    """Return the pixels of a PNG of 8 bits a colour, with or without transparency."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    assert (depth, kind) in {(8, 2), (8, 6)}
    size, body, at = (3 if kind == 2 else 4), b"", 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            body += data[at + 8 : at + 8 + length]
        at += 12 + length
    raw, stride = zlib.decompress(body), width * size
    rows, above = [], bytearray(stride)
    for y in range(height):
        start = y * (stride + 1)
        above = _unfiltered(raw[start], bytearray(raw[start + 1 : start + 1 + stride]), above, size)
        rows.append(bytes(above) if size == 3 else b"".join(above[i : i + 3] for i in range(0, stride, 4)))
    return Image(width, height, tuple(rows))


def _unfiltered(kind: int, line: bytearray, above: bytearray, size: int) -> bytearray:
    """Undo one of PNG's five filters (PNG specification, section 9)."""
    for i in range(len(line) if kind else 0):
        left = line[i - size] if i >= size else 0
        up, corner = above[i], above[i - size] if i >= size else 0
        guess = left + up - corner
        nearest = min((left, up, corner), key=lambda each: abs(guess - each))
        line[i] = (line[i] + (0, left, up, (left + up) // 2, nearest)[kind]) & 255
    return line
