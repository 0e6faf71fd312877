"""What a script left on a host, packed into lines by the program that ran it there (remote/loader/relay.sh,
recipes/slurm/step.sh): whatever carries lines carries it, and nothing that the script prints can be taken for one.
"""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from collections.abc import Sequence

from msgspec import Struct

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.text import size
from deepep_bootstrap.remote.channel import MARK
from deepep_bootstrap.remote.jobs import Reply
from deepep_bootstrap.remote.script import ANSWER_LIMIT

PACKED_LIMIT = 2 * 1024**2
"""Bytes of a host's lines: several times what ANSWER_LIMIT of its text takes."""


class Packed(Struct):
    """The lines of one host as they came; `full` when they were more than PACKED_LIMIT."""

    lines: list[bytes] = []
    size: int = 0
    full: bool = False

    def add(self, line: bytes) -> None:
        """Take one more line, unless it is full."""
        if not self.full:
            self.size += len(line)
            self.full = self.size > PACKED_LIMIT
            self.lines.append(line)

    def values(self, key: bytes) -> list[bytes]:
        """Return what the lines `key=…` say."""
        return [line[len(key) + 1 :] for line in self.lines if line.startswith(key + b"=")]


def read_packed(host: str, packed: Packed, limit: float, seconds: float) -> Reply | Trouble | None:
    """Return what a script left that had `limit` seconds and took `seconds`: Trouble where it had its time, or printed
    without an end. None where the lines are cut off, or it never began: then its host is to be asked another way."""
    if packed.values(b"late"):
        return Trouble(Problem(host, f"no end of the script after {limit:g} s"), may_pass=True)
    out, err = (unpacked(packed.values(name)) for name in (b"out", b"err"))
    code = b"".join(packed.values(b"code")).decode(errors="replace")
    if packed.full or any(text is not None and len(text) > ANSWER_LIMIT for text in (out, err)):
        found, wanted = f"more than {size(ANSWER_LIMIT)}", f"{size(ANSWER_LIMIT)} at most"
        return Trouble(Problem(host, "prints without an end, so its script was ended", found, wanted))
    if out is None or err is None or not re.fullmatch(r"[0-9]{1,3}", code):
        return None
    _, began, rest = out.partition(MARK)
    if not began:
        return None
    text, talk = (part.decode(errors="replace") for part in (rest, err.partition(MARK)[2]))
    return Reply(host, int(code), text, talk, seconds)


def unpacked(lines: Sequence[bytes]) -> bytes | None:
    """Return a stream from its lines of base64, of gzip in them; None where they are cut off or none."""
    try:
        unpacker = zlib.decompressobj(wbits=31)
        data = unpacker.decompress(base64.b64decode(b"".join(lines), validate=True), ANSWER_LIMIT + len(MARK) + 1)
    except (binascii.Error, zlib.error):
        return None
    return data if unpacker.eof or len(data) > ANSWER_LIMIT else None
