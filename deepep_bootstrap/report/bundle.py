"""The archive of a bug report: texts cut to size and packed, with nothing of this machine's users in its
headers.
"""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Mapping

FOLDER = "deepep-report"
LARGEST = 4 * 1024 * 1024
"""Bytes of one file in the bundle: a log beyond that is cut in the middle, since its beginning and its end show
most."""


def cut(data: bytes) -> bytes:
    """Return what of a file goes into the bundle: all of it, or its beginning and end with a line between."""
    if len(data) <= LARGEST:
        return data
    half = LARGEST // 2
    return data[:half] + f"\n[{len(data) - 2 * half} bytes left out]\n".encode() + data[-half:]


def pack(files: Mapping[str, str], time: int) -> bytes:
    """Return a tar.gz of these texts below one folder; nothing of this machine's users gets into it. `time` is
    seconds since 1970."""
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(filename="", fileobj=buffer, mode="wb", mtime=time) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for name, text in sorted(files.items()):
            data = text.encode(errors="backslashreplace")
            member = tarfile.TarInfo(f"{FOLDER}/{name}")
            member.size, member.mtime, member.mode = len(data), time, 0o644
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()
