"""An HTTP server of files that breaks connections in the middle, as a bad line does, and answers Range requests in good
and in bad ways."""

from __future__ import annotations

import http.server
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate


@dataclass
class Line:
    """What the server does: the `files` it has, after how many bytes of content each of the next answers breaks, and
    how it answers a Range: "rest" (as asked), "whole" (200), "other" (206 of another part), "unsaid" (206 without
    Content-Range), "refused" (416), "silent" (nothing, for good). `asked` has the Range of each request for a file."""

    files: dict[str, bytes]
    breaks: list[int] = field(default_factory=list)
    ranges: str = "rest"
    asked: list[str] = field(default_factory=list)
    sent: int = 0
    address: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    line: Line

    def do_GET(self) -> None:
        folder, _, name = self.path.rpartition("/")
        if not name:
            # One page of links for whatever distribution: pip and we take the file of our name.
            links = "".join(f'<a href="/files/{each}">{each}</a>' for each in sorted(self.line.files))
            self.answer(200, links.encode(), {"Content-Type": "text/html"})
        elif folder != "/files" or name not in self.line.files:
            self.answer(404, b"")
        else:
            self.give(self.line.files[name])

    def give(self, content: bytes) -> None:
        wanted = self.headers.get("Range", "")
        with self.line.lock:
            self.line.asked.append(wanted)
        match = re.fullmatch(r"bytes=(\d+)-", wanted)
        begin = int(match[1]) if match else 0
        if self.line.ranges == "silent":
            self.line.ended.wait()
        elif not match or self.line.ranges == "whole":
            self.answer(200, content)
        elif self.line.ranges == "refused" or begin >= len(content):
            self.answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
        elif self.line.ranges == "other":
            self.answer(206, content[1:], {"Content-Range": f"bytes 1-{len(content) - 1}/{len(content)}"})
        elif self.line.ranges == "unsaid":
            self.answer(206, content[begin:])
        else:
            self.answer(206, content[begin:], {"Content-Range": f"bytes {begin}-{len(content) - 1}/{len(content)}"})

    def answer(self, code: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        end = len(content)
        if self.path.startswith("/files/"):
            # Counted before it goes out: who has the last byte may look at once.
            with self.line.lock:
                end = self.line.breaks.pop(0) if self.line.breaks else end
                self.line.sent += min(end, len(content))
        self.send_response(code)
        for name, value in {**(headers or {}), "Content-Length": str(len(content)), "Date": formatdate()}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content[:end])
        if end < len(content):
            self.wfile.flush()
            # A reset could take back what has been sent: an orderly end in the middle is what a proxy makes of it.
            self.connection.shutdown(socket.SHUT_WR)
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def bad_line(files: dict[str, bytes], **line: object) -> Iterator[Line]:
    """Serve `files` on the loopback as `line` says."""
    told = Line(files, **line)  # type: ignore[arg-type]
    handler = type("Here", (_Handler,), {"line": told})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        told.address = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield told
        finally:
            told.ended.set()
            server.shutdown()


def noise(count: int, seed: int = 7) -> bytes:
    """Return `count` bytes that repeat nowhere nearby."""
    return b"".join(struct.pack(">Q", (number * 2654435761 + seed) % 2**64) for number in range(count // 8 + 1))[:count]
