"""One verified SSH session to one host: Fabric's connection with strict host keys, every timeout set, and
errors in plain words.
"""

from __future__ import annotations

import errno
import logging
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

import paramiko
from fabric import Config, Connection
from msgspec import Struct
from msgspec.structs import replace
from paramiko.kex_curve25519 import KexCurve25519
from paramiko.packet import Packetizer

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.process import end_group
from deepep_bootstrap.remote.ssh_access import Account, HostKey, Known, LogIn, Verifier

MISSED_ANSWERS = 3
CURVE25519, OLD_CURVE25519 = "curve25519-sha256", "curve25519-sha256@libssh.org"
RSA_NAMES = re.compile("rsa-sha2-(256|512)")
NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL)
CONNECT_FAILED = 2  # RFC 4254, 5.1: the code of a channel that could not reach its destination
# paramiko reports what it raises to its log as well, tracebacks included; without a handler Python prints that on
# stderr.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


Socket = socket.socket | paramiko.Channel


class Timeouts(Struct, frozen=True):
    """Limits of one session in seconds: TCP and key exchange, first line, log-in, opening a channel; how often
    silence is probed."""

    connect: int = 8
    banner: int = 12
    auth: int = 12
    channel: int = 15
    keepalive: int = 15


class _Packets(Packetizer):
    """Packets of one session; knows when the host last said anything."""

    heard = 0.0

    def read_message(self) -> tuple[int, paramiko.Message]:
        packet = super().read_message()
        self.heard = time.monotonic()
        return packet


class _Transport(paramiko.Transport):
    """paramiko's transport thread, waking rarely, which gives a host up that stops answering. `served`: it carried a
    channel."""

    _active_check_timeout = 1.0
    served = False

    def __init__(self, sock: socket.socket, **options: object) -> None:
        super().__init__(sock, packetizer_class=_Packets, **options)  # type: ignore[arg-type]
        self.went_silent = False
        # RFC 8731 gave this key exchange a second name, the only one that some servers offer; paramiko knows the first.
        names = list(self._preferred_kex)  # type: ignore[has-type]
        if CURVE25519 not in names and OLD_CURVE25519 in names:
            names.insert(names.index(OLD_CURVE25519), CURVE25519)
        self._preferred_kex = tuple(names)
        self._kex_info = {CURVE25519: KexCurve25519, **self._kex_info}  # type: ignore[has-type]

    def probe_every(self, seconds: int) -> None:
        """Ask a quiet host for an answer every `seconds`; after three questions without one the session ends."""
        self._patience = MISSED_ANSWERS * seconds
        self.packetizer.set_keepalive(seconds, self._probe)

    def _probe(self) -> None:
        if isinstance(self.packetizer, _Packets) and time.monotonic() - self.packetizer.heard > self._patience:
            self.went_silent = True
            raise EOFError
        if not self.in_kex:
            message = paramiko.Message()
            message.add_byte(paramiko.common.cMSG_GLOBAL_REQUEST)
            message.add_string("keepalive@openssh.com")
            message.add_boolean(True)
            self._send_message(message)  # type: ignore[attr-defined]


class _Link(Connection):  # type: ignore[misc]
    """Fabric's connection. As a class attribute this one is not written into the Config that all threads share."""

    inline_ssh_env = True


class FullError(Exception):
    """A host opens no further channel on this session: its sshd allows so many at a time (MaxSessions, 10 where
    nobody set it)."""


class Session(Struct, frozen=True):
    """An open session: Fabric's connection, and the process of a ProxyCommand beneath it."""

    account: Account
    link: Connection
    proxy: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        """Whether commands can still be started on it."""
        return bool(self.link.is_connected)

    @property
    def ending(self) -> str:
        """How it ended, for a message."""
        silent = getattr(self.link.transport, "went_silent", False)
        return "stopped answering while a script ran" if silent else "the connection was lost while a script ran"

    def open_channel(self) -> paramiko.Channel:
        """Return a new channel for one command. Raises Trouble, and FullError where another session has room."""
        transport = self.link.transport
        try:
            channel: paramiko.Channel = self.link.create_session()
        except paramiko.ChannelException:
            if transport.served:
                raise FullError from None
            raise Trouble(
                Problem(
                    self.account.name, "opens no session at all", wanted="MaxSessions of 1 or more in its sshd_config"
                )
            ) from None
        except (paramiko.SSHException, EOFError, OSError):
            raise Trouble(Problem(self.account.name, "the connection was lost"), may_pass=True) from None
        transport.served = True
        return channel

    def close(self) -> None:
        """End the session and everything that runs on it."""
        self.link.close()
        if self.proxy:
            end_group(self.proxy.pid)
            self.proxy.wait()


def connect(
    account: Account,
    known: Known,
    accept: Callable[[HostKey], None] | None,
    *,
    config: Config,
    timeouts: Timeouts,
    via: Session | None,
    opening: Callable[[Socket], None] = lambda sock: None,
) -> Session:
    """Open a session to `account`, through the session `via` when given. A host key that `known` lacks is given to
    `accept`, or refused when that is None. `opening` gets each socket before anybody waits for it, to shut it down
    where nobody wants to wait any more. Raises Trouble for everything that can go wrong."""
    began = time.monotonic()
    proxy: subprocess.Popen[bytes] | None = None
    sock: Socket | None = None
    try:
        if via:
            sock = _through(via, account, timeouts)
        elif account.proxy:
            sock, proxy = _proxied(account.proxy)
        else:
            sock = _dial(account, timeouts, opening)
        opening(sock)
        link = _Link(
            account.address,
            user=account.user,
            port=account.port,
            config=config,
            connect_timeout=timeouts.connect,
            connect_kwargs=_arguments(account, known, sock, timeouts),
        )
        link.client.set_missing_host_key_policy(Verifier(account, known, accept))
        link.open()
        link.transport.probe_every(timeouts.keepalive)
    except (Trouble, OSError, EOFError, paramiko.SSHException) as error:
        if sock:
            sock.close()
        if proxy:
            end_group(proxy.pid)
            proxy.wait()
        if isinstance(error, Trouble):
            raise
        problem = _explain(error, account, timeouts, time.monotonic() - began)
        for_good = isinstance(error, socket.gaierror | paramiko.ssh_exception.IncompatiblePeer)
        raise Trouble(problem, may_pass=not for_good) from None
    return Session(account, link, proxy)


def _arguments(account: Account, known: Known, sock: object, timeouts: Timeouts) -> Mapping[str, object]:
    kinds = {key.kind for key in known.keys + known.other_ports}

    def make(sock: socket.socket, **options: object) -> paramiko.Transport:
        # The host is asked for a key of a kind that known_hosts has, so that a second key of its own does not look like
        # a change.
        transport = _Transport(sock, **options)
        offered = transport.get_security_options()
        offered.key_types = sorted(offered.key_types, key=lambda name: RSA_NAMES.sub("ssh-rsa", name) not in kinds)
        return transport

    return {
        "sock": sock,
        "banner_timeout": timeouts.banner,
        "auth_timeout": timeouts.auth,
        "channel_timeout": timeouts.channel,
        "transport_factory": make,
        "auth_strategy": LogIn(account),
    }


def _dial(account: Account, timeouts: Timeouts, opening: Callable[[Socket], None]) -> socket.socket:
    """Return a TCP connection: socket.create_connection, with each socket given to `opening` before it waits."""
    refused: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(
        account.address, account.port, type=socket.SOCK_STREAM
    ):
        sock = socket.socket(family, kind, protocol)
        try:
            opening(sock)
            sock.settimeout(timeouts.connect)
            sock.connect(address)
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError):
                raise
            refused = error
        else:
            return _tuned(sock, timeouts)
    raise refused or OSError("getaddrinfo returns an empty list")


def _tuned(sock: socket.socket, timeouts: Timeouts) -> socket.socket:
    """Return a connection with our options set."""
    # What we send and the host's kernel does not acknowledge ends the session as well, also while our own sending
    # waits. Linux alone has this limit; elsewhere the probes of a quiet session end it.
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, MISSED_ANSWERS * timeouts.keepalive * 1000)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _proxied(command: str) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    with theirs:
        words = ["/bin/sh", "-c", f"exec {command}"]
        proxy = subprocess.Popen(
            words, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL, start_new_session=True
        )
    return ours, proxy


def _through(via: Session, account: Account, timeouts: Timeouts) -> paramiko.Channel:
    jump = via.account.name
    try:
        transport: paramiko.Transport = via.link.transport
        channel = transport.open_channel(
            "direct-tcpip", (account.address, account.port), ("", 0), timeout=timeouts.connect
        )
    except paramiko.ChannelException as error:
        if error.code == CONNECT_FAILED:
            what = f"jump host {jump} cannot reach it on port {account.port}"
            raise Trouble(Problem(account.name, what)) from None
        what = f"jump host {jump} does not forward connections"
        raise Trouble(Problem(account.name, what), may_pass=True) from None
    except paramiko.SSHException:
        raise Trouble(
            Problem(account.name, f"no answer through jump host {jump} within {timeouts.connect} s"), may_pass=True
        ) from None
    return channel


def _explain(error: Exception, account: Account, timeouts: Timeouts, seconds: float) -> Problem:
    """Return what an error of the socket or of paramiko means to an admin; its own words are never shown. The
    address is in the remedy alone, so that hosts with the same trouble are told as one."""
    port = f"port {account.port}"
    login = f"ssh -v -p {account.port} {account.user}@{shlex.quote(account.address)}"
    waited = seconds >= min(timeouts.connect, timeouts.banner) - 0.5
    problem = Problem(account.name, f"the SSH handshake on {port} failed", try_=login)
    if isinstance(error, socket.gaierror):
        named = (
            f"the name {account.name}" if account.address == account.name else "the name that ~/.ssh/config has for it"
        )
        return replace(
            problem,
            what=f"{named} is not known",
            try_=f"getent hosts {account.address}; the hosts file, ~/.ssh/config or DNS",
        )
    if isinstance(error, ConnectionRefusedError):
        return replace(problem, what=f"refuses connections on {port}", try_=f"whether sshd runs there; {login}")
    if isinstance(error, TimeoutError):
        return replace(
            problem,
            what=f"no answer on {port} within {timeouts.connect} s",
            try_=f"whether {account.address} is up, and firewalls in between",
        )
    if isinstance(error, OSError) and error.errno in NO_ROUTE:
        return replace(problem, what=f"no route to {port}")
    if isinstance(error, paramiko.ssh_exception.IncompatiblePeer):
        return replace(problem, what="has no key exchange, cipher or host key kind in common with this program")
    if waited:
        return replace(problem, what=f"takes connections on {port} but says nothing within {timeouts.connect} s")
    if isinstance(error, EOFError | ConnectionError) or "banner" in str(error):
        return replace(problem, what=f"closes connections on {port} before the SSH handshake")
    return problem
