"""The files of a test's run, brought back from its folder over the connection, and files added to that
folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.recipes import compose, last_lines
from deepep_bootstrap.prefix.generations import Content, PrefixHandle, tar_files
from deepep_bootstrap.remote.fleet import Job, Transport
from deepep_bootstrap.testing.run_folder import LARGEST

COLLECT = ("lib.sh", "test/collect.sh")
KEEP = ("lib.sh", "prefix/lib/share.sh", "test/keep.sh")
SITE = ("lib.sh", "prefix/lib/share.sh", "test/site.sh")
TOTAL = 16 * LARGEST
"""Bytes of one run that are brought back at most."""

LIMIT = 300.0
PATIENCE = 10
"""Seconds: for all of it, and for the run's last line to be seen by another host of a network filesystem."""

HEAD = re.compile(rb"file (\S+) (\d+) (\d+)\n|end 1\n")


@dataclass(frozen=True)
class RunFiles:
    """The files of a run's folder by path in it as texts, and which of them are not here as a whole, with the bytes
    that are missing."""

    files: Mapping[str, str]
    cut: Mapping[str, int]


def collect(door: Transport, place: PrefixHandle, folder: str, *, patience: int = 0) -> RunFiles:
    """Return what is in a run's folder, which the host of `place` sees, after at most `patience` seconds in which
    its end may come into sight; Trouble where it cannot be read."""
    came = bytearray()
    env = {"PLACE": folder, "LARGEST": str(LARGEST), "TOTAL": str(TOTAL), "PATIENCE": str(patience)}
    job = Job(compose(place.recipes, *COLLECT), env=env, user=place.user, timeout=LIMIT, sink=came.extend)
    reply = door.run(place.host, job)
    if reply.code:
        raise Trouble(Problem(place.host.name, f"{folder} cannot be read", last_lines(reply.err)))
    return parse_collected(bytes(came), f"{place.host.name} {folder}")


def parse_collected(data: bytes, where: str) -> RunFiles:
    """Return the files in what collect.sh printed; Trouble where that is cut off."""
    files: dict[str, str] = {}
    cut: dict[str, int] = {}
    at = 0
    while match := HEAD.match(data, at):
        if match.group(1) is None:
            return RunFiles(files, cut)
        name = match.group(1).decode("ascii", "replace")
        size, sent = int(match.group(2)), int(match.group(3))
        at = match.end() + sent
        content = data[match.end() : at]
        if len(content) < sent:
            break
        if sent < size:
            cut[name] = size - sent
            content = b"%s\n[%d bytes left out here]\n%s" % (content[: sent // 2], size - sent, content[sent // 2 :])
        files[name] = content.decode("utf-8", "replace")
    raise Trouble(
        Problem(where, "the run came back cut off", f"{len(data)} bytes", try_="invoke report, with the run's name")
    )


def keep_files(
    door: Transport,
    place: PrefixHandle,
    folder: str,
    *,
    lines: Iterable[str] = (),
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Add to a run's folder: `lines` behind its run.env, and files by name. Trouble where that cannot be."""
    env = {"PREFIX": place.prefix, "PLACE": folder, "LINES": "\n".join(lines)}
    reply = door.send(
        place.host,
        Job(compose(place.recipes, *KEEP), env=env, user=place.user),
        tar_files([Content(name, data) for name, data in (files or {}).items()]),
    )
    if reply.code:
        raise Trouble(Problem(place.host.name, f"{folder} cannot be added to", last_lines(reply.err)))


def read_site(door: Transport, place: PrefixHandle, name: str) -> str:
    """Return the text of a site's own file in the prefix, "" where it has none; Trouble where it cannot be read."""
    env = {"PREFIX": place.prefix, "NAME": name}
    reply = door.run(place.host, Job(compose(place.recipes, *SITE), env=env, user=place.user))
    if reply.code:
        raise Trouble(Problem(place.host.name, f"{place.prefix}/{name} cannot be read", last_lines(reply.err)))
    return reply.out


def write_site(door: Transport, place: PrefixHandle, name: str, text: str) -> None:
    """Write a site's own file in the prefix; Trouble where this user may not."""
    env = {"PREFIX": place.prefix, "NAME": name}
    job = Job(compose(place.recipes, *SITE), args=("write",), env=env, user=place.user)
    reply = door.send(place.host, job, (text.encode(),))
    if reply.code:
        raise Trouble(Problem(place.host.name, f"{place.prefix}/{name} cannot be written", last_lines(reply.err)))
