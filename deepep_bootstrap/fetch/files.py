"""Single files: copied or downloaded from an address, and measured."""

from __future__ import annotations

import base64
import hashlib
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.fetch.locations import is_address, shown

CHUNK = 1 << 20
SILENCE_SECONDS = 60.0
"""How long a server may say nothing; a slow download is fine."""
KINDS = ("sha256", "sha512")
REMEDY = "--mirror PREFIX=DIRECTORY with this file below it"


@dataclass(frozen=True)
class MeasuredFile:
    """What a file is: its SRI hashes by kind, and its size in bytes."""

    hashes: dict[str, str]
    size: int


def measured(file: Path) -> MeasuredFile:
    """Return hashes and size of a file; it is read in pieces."""
    digests = {kind: hashlib.new(kind) for kind in KINDS}
    size = 0
    with file.open("rb") as stream:
        for piece in _pieces(stream):
            size += len(piece)
            for digest in digests.values():
                digest.update(piece)
    return MeasuredFile(
        {kind: f"{kind}-{base64.b64encode(digest.digest()).decode()}" for kind, digest in digests.items()}, size
    )


def copy_from(place: str, file: Path, where: str, limit: int | None = None) -> None:
    """Copy or download what is at `place`, an address or a path, to `file`; of more than `limit` bytes no more than one
    piece too many.

    Raises Trouble, said of `where`. Nothing is verified here.
    """
    if not is_address(place) or place.startswith("file://"):
        local = Path(unquote(urlsplit(place).path)) if is_address(place) else Path(place)
        try:
            shutil.copyfile(local, file)
        except OSError as error:
            raise Trouble(Problem(where, f"{local} cannot be read: {error.strerror}", try_=REMEDY)) from None
        return
    with file.open("wb") as out:
        for piece in _download(place, where):
            out.write(piece)
            if limit is not None and out.tell() > limit:
                break


def _download(place: str, where: str) -> Iterator[bytes]:
    """Yield the bytes at an http address; proxies and certificates are those of the environment. Raises Trouble."""
    parts = urlsplit(place)
    account, _, host = parts.netloc.rpartition("@")
    address = urlunsplit(parts._replace(netloc=host, path=quote(parts.path, safe="/%:@!$&'()*+,;=~")))
    request = urllib.request.Request(address, headers={"User-Agent": "deepep-bootstrap"})  # noqa: S310 - the lock has checked the scheme
    if account:
        request.add_unredirected_header(
            "Authorization", f"Basic {base64.b64encode(unquote(account).encode()).decode()}"
        )
    try:
        with urllib.request.urlopen(request, timeout=SILENCE_SECONDS) as stream:  # noqa: S310
            length, size = stream.headers.get("Content-Length"), 0
            for piece in _pieces(stream):
                size += len(piece)
                yield piece
            if length is not None and int(length) != size:
                raise HTTPException(f"the connection ended after {size} of {length} bytes")
    except (OSError, HTTPException, ValueError) as error:
        # HTTPError and URLError are OSErrors; a proxy or a certificate that is refused is one of them too.
        reason = (
            f"{error.code} {error.reason}"
            if isinstance(error, urllib.error.HTTPError)
            else str(getattr(error, "reason", error))
        )
        raise Trouble(Problem(where, f"{shown(place)} cannot be fetched: {reason}", try_=REMEDY)) from None


def _pieces(stream: IO[bytes]) -> Iterator[bytes]:
    while piece := stream.read(CHUNK):
        yield piece
