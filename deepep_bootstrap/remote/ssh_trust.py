"""Verification of host keys against known_hosts files, log-in with a user's keys, and adding a host key that
was accepted.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import paramiko
from paramiko.agent import AgentSSH

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.remote.ssh_config import Account


class _Agent(AgentSSH):
    """The keys of the agent behind one socket; each session has its own, for they answer one question at a time."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(10)
        try:
            self._socket.connect(path)
            self._connect(self._socket)  # type: ignore[attr-defined]
        except (OSError, paramiko.SSHException):
            self._socket.close()


class Verifier(paramiko.MissingHostKeyPolicy):
    """Compares the key a host shows with what known_hosts says. Asked for every host: paramiko's own table stays
    empty."""

    def __init__(self, account: Account, known: Known, accept: Callable[[HostKey], None] | None) -> None:
        self._account, self._known, self._accept = account, known, accept

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        """Raise Trouble unless the host may show `key`."""
        del client, hostname
        shown = HostKey(key.get_name(), key.asbytes())
        name, print_ = self._account.name, fingerprint(shown.blob)
        if any(other.blob == shown.blob for other in self._known.revoked):
            raise Trouble(
                Problem(name, "shows a host key that known_hosts marks as revoked", print_, "a key that is not")
            )
        if any(other.blob == shown.blob for other in self._known.keys + self._known.other_ports):
            return
        if self._known.keys:
            old = self._known.keys[0]
            raise Trouble(
                Problem(
                    name,
                    f"its host key has changed since {old.where} was written: it was installed anew, or something "
                    f"stands in between",
                    f"{print_} ({shown.kind})",
                    f"{fingerprint(old.blob)} ({old.kind})",
                    f"asking its owner, then ssh-keygen -R '{self._account.key_name}'",
                )
            )
        if self._accept:
            self._accept(shown)
            return
        reason = "its host key is not in known_hosts"
        if self._known.authorities:
            reason += (
                f", only a certificate authority ({self._known.authorities[0].where}), and certificates of "
                f"hosts are not checked here"
            )
        raise Trouble(
            Problem(
                name, reason, f"{print_} ({shown.kind})", try_="--accept-new-host-keys, after comparing the fingerprint"
            )
        )


class LogIn:
    """Tries the keys of an account one after the other; stands where paramiko expects an authentication strategy."""

    def __init__(self, account: Account) -> None:
        self._account = account

    def authenticate(self, transport: paramiko.Transport) -> None:
        """Log in, or raise Trouble saying what the host answered."""
        account, tried, began = self._account, 0, time.monotonic()
        for key in self._keys():
            tried += 1
            try:
                if not transport.auth_publickey(account.user, key):
                    return
                raise self._refused(tried, "a second factor, which cannot be given here")
            except paramiko.BadAuthenticationType as error:
                raise self._refused(tried, f"only {', '.join(error.allowed_types)}") from None
            except paramiko.SSHException:
                # This key was refused; a server that has closed the connection would refuse the others too.
                if not transport.is_active():
                    raise self._problem("closed the connection during the log-in", tried) from None
                if time.monotonic() - began > (transport.auth_timeout or 0):
                    raise self._problem("the log-in was not answered in time", tried) from None
        raise (
            self._refused(tried, "")
            if tried
            else self._problem(f"there is no key to log in with as {account.user}", tried)
        )

    def _keys(self) -> Iterator[paramiko.PKey]:
        yield from self._account.keys
        if self._account.agent:
            yield from _Agent(self._account.agent).get_keys()

    def _refused(self, tried: int, accepts: str) -> Trouble:
        return self._problem(
            f"does not let {self._account.user} in" + (f", accepts {accepts}" if accepts else ""), tried
        )

    def _problem(self, what: str, tried: int) -> Trouble:
        account = self._account
        locked = f"; {', '.join(account.locked)} needs a passphrase" if account.locked else ""
        by_hand = f"ssh -p {account.port} {account.user}@{account.address}"
        try_ = (
            f"ssh-add {account.locked[0]}" if account.locked else f"{by_hand}, or user= and identity= in the hosts file"
        )
        return Trouble(
            Problem(
                account.name,
                what,
                f"{tried} key{'' if tried == 1 else 's'} tried{locked}",
                "a key that the host knows",
                try_,
            )
        )


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
    """What the files say of one host name. `other_ports` are keys of the name without its port: good when shown,
    else no matter."""

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
    """Read known_hosts files; one that is missing or cannot be read knows nobody, and a line that cannot be read is
    passed over."""
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
    """Add one line to a known_hosts file, which is made when missing; with `hashed` the name cannot be read from it.
    OSError."""
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
