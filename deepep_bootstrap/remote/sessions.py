"""The SSH sessions of a run: one for each account, and more where its sshd limits what one may carry; shared by threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

import paramiko
from fabric import Config

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.remote import hostkeys
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.hostkeys import HostKey, Known, KnownHosts
from deepep_bootstrap.remote.ssh import FullError, Session, Timeouts, connect
from deepep_bootstrap.remote.ssh_config import Account, Resolver


class _Line:
    """The sessions of one account, and the lock under which they are opened."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sessions: tuple[Session, ...] = ()


class Sessions:
    """Sessions by host. `accept` allows the key of a host that known_hosts does not have, and `tell` hears of each such key."""

    def __init__(self, hosts: Iterable[Host], resolver: Resolver, *, timeouts: Timeouts, accept: bool, tell: Callable[[str], None]) -> None:
        """Resolve `hosts` now; what is wrong with one of them is raised when that one is used."""
        self._resolver, self._timeouts, self._accept, self._tell = resolver, timeouts, accept, tell
        # Shared by all threads, and safe for that: no files behind it, and our connections write nothing into it.
        self._config = Config(ssh_config=paramiko.SSHConfig(), lazy=True)
        self._lock = threading.RLock()
        self._accounts: dict[Host, Account | Trouble] = {}
        self._known: dict[tuple[str, ...], KnownHosts] = {}
        self._lines: dict[Account, _Line] = {}
        self._closed = False
        for host in hosts:
            self._resolve(host)

    def channel(self, host: Host) -> tuple[Session, paramiko.Channel]:
        """Return a new channel to `host` and its session: one that is open and has room, else a new one. Raises Trouble with the
        host's name."""
        account = self._resolve(host)
        if isinstance(account, Trouble):
            raise account
        full: set[int] = set()
        while True:
            session = self._open(account, full)
            try:
                return session, session.open_channel()
            except FullError:
                full.add(id(session))

    def forget(self, host: Host) -> None:
        """End the sessions to `host` if there are any; whoever waits for something on one of them goes on with an error."""
        account = self._resolve(host)
        for session in () if isinstance(account, Trouble) else self._lines[account].sessions:
            session.close()

    def close(self) -> None:
        """End all sessions; threads that wait for something on one of them go on with an error."""
        with self._lock:
            self._closed = True
            lines = list(self._lines.values())
        for line in lines:
            for session in line.sessions:
                session.close()

    def _resolve(self, host: Host) -> Account | Trouble:
        with self._lock:
            if host not in self._accounts:
                try:
                    account = self._resolver.account(host)
                    self._accounts[host] = account
                    self._load_known(account)
                except Trouble as trouble:
                    self._accounts[host] = trouble
            return self._accounts[host]

    def _load_known(self, account: Account | None) -> None:
        while account:
            if account.known_hosts not in self._known:
                self._known[account.known_hosts] = hostkeys.load(account.known_hosts)
            self._lines.setdefault(account, _Line())
            account = account.via

    def _open(self, account: Account, full: Collection[int] = ()) -> Session:
        """Return a live session that is not among `full`."""
        line = self._lines[account]
        with line.lock:
            line.sessions = tuple(session for session in line.sessions if session.alive)
            for session in line.sessions:
                if id(session) not in full:
                    return session
            if self._closed:
                raise Trouble(Problem(account.name, "not reached: the run is ending"))
            via = self._open_jump(account) if account.via else None
            known = self._look_up(account)
            accept = (lambda key: self._add(account, key)) if self._accept else None
            session = connect(account, known, accept, config=self._config, timeouts=self._timeouts, via=via)
            line.sessions = (*line.sessions, session)
            if self._closed:
                session.close()
            return session

    def _open_jump(self, account: Account) -> Session | None:
        if account.via is None:
            return None
        try:
            return self._open(account.via)
        except Trouble as trouble:
            problems = [replace(one, where=account.name, what=f"jump host {one.where}: {one.what}") for one in trouble.problems]
            raise Trouble(*problems) from None

    def _look_up(self, account: Account) -> Known:
        book = self._known[account.known_hosts]
        known = book.lookup(account.key_name)
        if known.keys or known.revoked or not account.key_name.startswith("["):
            return known
        # Like ssh: a line without a port speaks for every port, as long as its key is right; else the host is simply not known.
        plain = book.lookup(account.address)
        return replace(known, other_ports=plain.keys)

    def _add(self, account: Account, key: HostKey) -> None:
        path = account.known_hosts[0]
        with self._lock:
            try:
                hostkeys.append(path, account.key_name, key, hashed=account.hash_names)
            except OSError as error:
                raise Trouble(Problem(path, f"the key of {account.name} cannot be added", error.strerror or str(error))) from None
            self._known[account.known_hosts].plain.setdefault(account.key_name.lower(), []).append(replace(key, where=path))
            self._tell(f"{account.name}: new host key {hostkeys.fingerprint(key.blob)} ({key.kind}) added to {path}")
