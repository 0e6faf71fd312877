"""known_hosts files: which keys a host may show, loaded once, and adding a key that was accepted."""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HASHED = "|1|"
NEGATED = "!"
MARKERS = ("@revoked", "@cert-authority")


@dataclass(frozen=True)
class HostKey:
    """One key of a known_hosts line: its type, its bytes, the line's marker ("" without) and where the line stands."""

    kind: str
    blob: bytes
    marker: str = ""
    where: str = ""


@dataclass(frozen=True)
class Known:
    """What the files say of one host name. `other_ports` are keys of the name without its port: good when shown, else no matter."""

    keys: tuple[HostKey, ...] = ()
    revoked: tuple[HostKey, ...] = ()
    authorities: tuple[HostKey, ...] = ()
    other_ports: tuple[HostKey, ...] = ()


@dataclass(frozen=True)
class KnownHosts:
    """The lines of some known_hosts files, by plain name; hashed names and patterns apart."""

    plain: dict[str, list[HostKey]] = field(default_factory=dict)
    hashed: list[tuple[bytes, bytes, HostKey]] = field(default_factory=list)
    patterns: list[tuple[tuple[str, ...], HostKey]] = field(default_factory=list)

    def lookup(self, name: str) -> Known:
        """Return what is known of `name`, a host name, or `[name]:port` where the port is not 22."""
        found = list(self._matching(name.lower()))
        return Known(
            tuple(key for key in found if not key.marker),
            tuple(key for key in found if key.marker == "@revoked"),
            tuple(key for key in found if key.marker == "@cert-authority"),
        )

    def _matching(self, name: str) -> Iterator[HostKey]:
        yield from self.plain.get(name, [])
        yield from (key for patterns, key in self.patterns if _matches(patterns, name))
        data = name.encode()
        yield from (key for salt, digest, key in self.hashed if hmac.digest(salt, data, "sha1") == digest)


def load(paths: Iterable[str]) -> KnownHosts:
    """Read known_hosts files; one that is missing or cannot be read knows nobody, and a line that cannot be read is passed over."""
    known = KnownHosts()
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            _add(known, line.split(), f"{path}:{number}")
    return known


def _add(known: KnownHosts, words: list[str], where: str) -> None:
    marker = words.pop(0) if words and words[0] in MARKERS else ""
    if len(words) < 3 or words[0].startswith(("#", "@")):
        return
    names, kind, text = words[:3]
    try:
        key = HostKey(kind, base64.b64decode(text, validate=True), marker, where)
        if names.startswith(HASHED):
            salt, digest = (base64.b64decode(part, validate=True) for part in names[len(HASHED) :].split("|"))
            known.hashed.append((salt, digest, key))
            return
    except (ValueError, binascii.Error):
        return
    patterns = tuple(names.lower().split(","))
    if any(character in names for character in "*?!"):
        known.patterns.append((patterns, key))
        return
    for name in patterns:
        known.plain.setdefault(name, []).append(key)


def _matches(patterns: Sequence[str], name: str) -> bool:
    """Return whether `name` is one of `patterns` with * and ?, and none of those with ! in front."""
    hit = False
    for pattern in patterns:
        # In fnmatch a bracket opens a class; in known_hosts it is itself, as in [host]:2222.
        literal = pattern.removeprefix(NEGATED).replace("[", "[[]")
        if fnmatch.fnmatchcase(name, literal):
            if pattern.startswith(NEGATED):
                return False
            hit = True
    return hit


def fingerprint(blob: bytes) -> str:
    """Return a key's fingerprint as `ssh-keygen -l` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def append(path: str, name: str, key: HostKey, *, hashed: bool) -> None:
    """Add one line to a known_hosts file, which is made when missing; with `hashed` the name cannot be read from it. OSError."""
    file = Path(path)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hashed:
        salt = os.urandom(20)
        digest = hmac.digest(salt, name.encode(), "sha1")
        name = HASHED + "|".join(base64.b64encode(part).decode() for part in (salt, digest))
    line = f"{name} {key.kind} {base64.b64encode(key.blob).decode()}\n"
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    with open(descriptor, "r+b", buffering=0) as stream:
        size = stream.seek(0, os.SEEK_END)
        if size:
            stream.seek(size - 1)
            line = line if stream.read(1) == b"\n" else "\n" + line
        stream.write(line.encode())
