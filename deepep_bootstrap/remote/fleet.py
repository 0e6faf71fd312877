"""Connections to all hosts of a run: scripts over one SSH session per host (Fabric), or the same scripts on
this machine. Sessions are opened, kept and closed here.
"""

from __future__ import annotations

import getpass
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress

import paramiko
from fabric import Config
from msgspec import Struct, field
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.text import size
from deepep_bootstrap.remote import channel, ssh_access
from deepep_bootstrap.remote.channel import COMMAND, Channel, Hide, LocalChannel, Secret, SshChannel, as_is
from deepep_bootstrap.remote.host import LOCAL, Host
from deepep_bootstrap.remote.jobs import LOG_LIMIT, BackgroundJob, Job, Many, Reply
from deepep_bootstrap.remote.script import Left, OnLine, Script
from deepep_bootstrap.remote.ssh import FullError, Session, Socket, Timeouts, connect
from deepep_bootstrap.remote.ssh_access import Account, HostKey, Known, KnownHosts, Resolver

CLEAN_UP = 30.0
"""Seconds a held script has to end after its stdin was closed; its watcher needs five."""

Watch = Callable[[Sequence[str]], AbstractContextManager[Callable[[str], None]]]


def watch_nothing(hosts: Sequence[str]) -> AbstractContextManager[Callable[[str], None]]:
    """Watch nobody."""
    return nullcontext(lambda host: None)


class Options(Struct, frozen=True):
    """How hosts are talked to. `forks` hosts are worked on at a time; `timeouts` bound every phase of a session.

    `ssh_config` is a file to read instead of the user's and the system's ("" for none), `known_hosts` files instead of
    theirs. With `accept_new_host_keys` the key of a host met for the first time is added to the first of them, and
    `tell` hears of it. `watch` is entered with the names of hosts that are asked at the same time, and hears of each
    that answered.
    """

    forks: int = 64
    timeouts: Timeouts = field(default_factory=Timeouts)
    ssh_config: str | None = None
    known_hosts: tuple[str, ...] = ()
    accept_new_host_keys: bool = False
    sudo_password: Secret | None = None
    tell: OnLine = print
    watch: Watch = watch_nothing


def _reply(host: str, left: Left, hide: Hide) -> Reply:
    return Reply(host, left.code, left.out, left.err, left.seconds, hide)


def _tell_lines(host: str, reply: Reply | Trouble, on_line: Callable[[str, str], None] | None) -> None:
    """Give out the lines of a reply that came as a whole."""
    if on_line and isinstance(reply, Reply):
        for line in (*reply.err.splitlines(), *reply.out.splitlines()):
            on_line(host, line)


_Start = Callable[[OnLine, OnLine | None], Script]


class _HeldJob:
    """A held script: a thread reads it, `wait_for` looks at the lines it printed."""

    def __init__(
        self,
        host: str,
        start: _Start,
        finish: Callable[[Script], Left],
        *,
        on_line: OnLine | None,
        keys: Collection[str],
        hide: Hide,
    ) -> None:
        self._host, self._finish, self._on_line, self._keys = host, finish, on_line, frozenset(keys)
        self._hide = hide
        self._values: dict[str, str] = {}
        self._news = threading.Condition()
        self._end: Reply | Trouble | None = None
        self._script = start(self._take, on_line)
        self._reader = threading.Thread(target=self._read, name=f"hold {host}", daemon=True)
        self._reader.start()

    def _take(self, line: str) -> None:
        key, equals, value = line.partition("=")
        with self._news:
            if equals and key in self._keys:
                self._values.setdefault(key, value)
            self._news.notify_all()
        if self._on_line:
            self._on_line(line)

    def _read(self) -> None:
        try:
            end: Reply | Trouble = _reply(self._host, self._finish(self._script), self._hide)
        except Trouble as trouble:
            end = trouble
        with self._news:
            self._end = end
            self._news.notify_all()

    @property
    def end(self) -> Reply | Trouble | None:
        """See BackgroundJob."""
        return self._end

    def wait_for(self, key: str, timeout: float | None = None) -> str:
        """See BackgroundJob."""
        if key not in self._keys:
            raise ValueError(f"{key} is none of the keys that this script is held for")
        with self._news:
            self._news.wait_for(lambda: key in self._values or self._end, timeout)
            if key in self._values:
                return self._values[key]
        if isinstance(self._end, Trouble):
            raise self._end
        if self._end is None:
            raise Trouble(Problem(self._host, f"no {key} from a held script after {timeout:g} s"))
        what = f"a held script ended with exit code {self._end.code} before it printed {key}"
        raise Trouble(Problem(self._host, what, self._end.last_line))

    def close(self) -> Reply:
        """See BackgroundJob."""
        self._script.wire.end_input()
        self._reader.join(CLEAN_UP)
        if self._reader.is_alive():
            self._script.wire.stop()
            self._reader.join(CLEAN_UP)
        if isinstance(self._end, Reply):
            return self._end
        raise self._end or Trouble(
            Problem(self._host, f"a held script did not end within {CLEAN_UP} s after its stdin was closed")
        )


class ConnectionPool:
    """The connections to all hosts of a run: SSH sessions for those with connection=ssh, shells on this machine for
    connection=local. `ways` says of each host by which way it was asked last: "ssh", "local", or that of `prefer`."""

    def __init__(self, hosts: Iterable[Host], options: Options | None = None) -> None:
        """Read ssh_config, known_hosts and keys for `hosts` once; what is wrong for one host is raised when that
        host is used."""
        self._options = options or Options()
        resolver = Resolver(self._options.ssh_config, self._options.known_hosts)
        remote, opts = [host for host in hosts if host.connection != LOCAL], self._options
        self._sessions = Sessions(
            remote, resolver, timeouts=opts.timeouts, accept=opts.accept_new_host_keys, tell=opts.tell
        )
        self._hide: Hide = opts.sudo_password.cut_from if opts.sudo_password else as_is
        self._wires: set[Channel] = set()
        self._closed = False
        self._places: dict[str, tuple[str, Mapping[str, str]]] = {}
        self._many: Many | None = None
        self.ways: dict[str, str] = {}

    def prefer(self, many: Many) -> None:
        """Bring later jobs that many hosts are given, and that may come `anywhere`, there by `many` where it can."""
        self._many = many

    def user_of(self, host: Host) -> str:
        """Return the name of the account that scripts without a user of their own run as on `host`. Trouble where
        ~/.ssh/config cannot be read."""
        return getpass.getuser() if host.connection == LOCAL else self._sessions.user_of(host)

    def payload(self, host: Host, job: Job) -> bytes:
        """Return what the loader reads on standard input to run `job` on `host`, without the password of sudo."""
        folder, env = self._places.get(host.name, ("", {}))
        body = channel.compose(job.script, job.args, {**env, **job.env}, folder)
        return channel.payload(body, user=job.user, merge=job.merge, interpreter=job.interpreter)

    def openssh(self, host: Host) -> tuple[str, ...]:
        """Return the words that start OpenSSH's client to log in on `host` as our sessions do, a command to follow.
        Trouble where it cannot be resolved."""
        return self._sessions.openssh(host, self._options.ssh_config)

    @property
    def has_password(self) -> bool:
        """Whether sudo gets a password, which goes over sessions alone."""
        return self._options.sudo_password is not None

    def tell(self, text: str) -> None:
        """Say something to the person who waits."""
        self._options.tell(text)

    def run(self, host: Host, job: Job, on_line: OnLine | None = None) -> Reply:
        """See Transport."""
        on_line = self._for_people(host, job, on_line)
        script = self._start(host, job, on_line, on_line)
        if not job.watched:
            script.wire.end_input()
        return _reply(host.name, self._finish(script), self._hide)

    def send(self, host: Host, job: Job, chunks: Iterable[bytes]) -> Reply:
        """See Transport. An error while `chunks` are made is passed on; the script then sees its stdin end too
        early."""
        script = self._start(host, replace(job, watched=False), None, None)
        with ThreadPoolExecutor(1) as reader:
            left = reader.submit(self._finish, script)
            try:
                for chunk in chunks:
                    if not script.wire.offer(chunk):
                        # A script that ended early no longer reads: what it left says why.
                        break
                script.wire.end_input()
                return _reply(host.name, left.result(), self._hide)
            except BaseException:
                script.wire.stop()
                raise

    def hold(self, host: Host, job: Job, on_line: OnLine | None = None, *, keys: Collection[str] = ()) -> BackgroundJob:
        """See Transport."""
        held = replace(job, watched=True)
        return _HeldJob(
            host.name,
            lambda on_out, on_err: self._start(host, held, on_out, on_err),
            self._finish,
            on_line=self._for_people(host, job, on_line),
            keys=keys,
            hide=self._hide,
        )

    def run_all(
        self,
        hosts: Sequence[Host],
        job_for: Callable[[Host], Job],
        on_line: Callable[[str, str], None] | None = None,
        on_end: Callable[[str], None] | None = None,
    ) -> dict[str, Reply | Trouble]:
        """See Transport. `on_line` is called by one thread at a time, `on_end` by several."""
        # Who gets lines shows them.
        watch = watch_nothing if on_line else self._options.watch
        with watch([host.name for host in hosts]) as answered:

            def ended(host: str) -> None:
                answered(host)
                if on_end:
                    on_end(host)

            return self._run_all(hosts, job_for, on_line, ended)

    def _run_all(
        self,
        hosts: Sequence[Host],
        job_for: Callable[[Host], Job],
        on_line: Callable[[str, str], None] | None,
        ended: Callable[[str], None],
    ) -> dict[str, Reply | Trouble]:
        one_at_a_time = threading.Lock()

        def one(host: Host) -> Reply | Trouble:
            def tell(line: str) -> None:
                with one_at_a_time:
                    if on_line:
                        on_line(host.name, line)

            try:
                return self.run(host, job_for(host), tell if on_line else None)
            except Trouble as trouble:
                return trouble
            finally:
                ended(host.name)

        found = dict(self._ask_many(hosts, job_for))
        for name, reply in found.items():
            ended(name)
            _tell_lines(name, reply, on_line)
        rest = [host for host in hosts if host.name not in found]
        pool = ThreadPoolExecutor(max(1, min(self._options.forks, len(rest))))
        try:
            found |= zip([host.name for host in rest], pool.map(one, rest), strict=True)
            return {host.name: found[host.name] for host in hosts}
        except BaseException:
            # ^C: the threads wait on their hosts, so the connections go first.
            pool.shutdown(wait=False, cancel_futures=True)
            self.close()
            raise
        finally:
            pool.shutdown()

    def _ask_many(self, hosts: Sequence[Host], job_for: Callable[[Host], Job]) -> Mapping[str, Reply | Trouble]:
        """Return the replies that came by the other way, where there is one."""
        self.ways |= {host.name: host.connection for host in hosts}
        if self._many is None:
            return {}
        jobs = {host: job for host in hosts if (job := job_for(host)).anywhere and job.sink is None}
        try:
            found = self._many.run_all(jobs) if jobs else {}
        except BaseException:
            self.close()
            raise
        self.ways |= dict.fromkeys(found, self._many.name)
        return found

    def equip(self, host: str, folder: str, env: Mapping[str, str]) -> None:
        """Run every later script on the host called `host` with `folder` at the end of PATH and with `env`: for
        tools that are not on the PATH which sshd gives."""
        self._places[host] = (folder, env)

    def forget(self, host: Host) -> None:
        """Drop the session to a host that reboots, which may look alive for a minute after it; the next script opens
        another."""
        self._sessions.forget(host)

    def close(self) -> None:
        """See Transport. Threads that wait for a script go on with Trouble, and watched scripts are ended by their
        watchers."""
        self._closed = True
        for wire in list(self._wires):
            wire.stop()
        self._sessions.close()

    def _for_people(self, host: Host, job: Job, on_line: OnLine | None) -> OnLine | None:
        """Return `on_line` for lines without the password of sudo, of a log job for its first LOG_LIMIT characters, and
        for a word about the rest; the person who watches gets it too."""
        if on_line is None:
            return None
        if not job.log:
            return lambda line: on_line(self._hide(line))
        left = LOG_LIMIT

        def limited(line: str) -> None:
            nonlocal left
            if left < 0:
                return
            left -= len(line) + 1
            if left >= 0:
                on_line(self._hide(line))
                return
            word = f"prints more than {size(LOG_LIMIT)}: the log has no more than that"
            on_line(f"[{word}]")
            self._options.tell(f"{host.name}: {word}")

        return limited

    def _finish(self, script: Script) -> Left:
        try:
            return script.finish()
        finally:
            self._wires.discard(script.wire)

    def _start(self, host: Host, job: Job, on_out: OnLine | None, on_err: OnLine | None) -> Script:
        if self._closed:
            raise Trouble(Problem(host.name, "not reached: the run is ending"))
        password = self._options.sudo_password
        folder, env = self._places.get(host.name, ("", {}))
        data = channel.payload(
            channel.compose(job.script, job.args, {**env, **job.env}, folder),
            user=job.user,
            password=password.reveal() if password else "",
            watched=job.watched,
            merge=job.merge,
            interpreter=job.interpreter,
        )
        wire = self._wire(host, watched=job.watched)
        self._wires.add(wire)
        try:
            if self._closed:
                # close() came between the first look and the line above, and has not seen this wire.
                raise Trouble(Problem(host.name, "not reached: the run is ending"))
            # A shell that ended at once does not read either.
            wire.offer(data)
        except BaseException:
            self._wires.discard(wire)
            wire.close()
            raise
        return Script(
            host.name,
            wire,
            job.timeout,
            on_out=on_out,
            on_err=on_err,
            sink=job.sink,
            limit=job.limit,
            log=job.log_stream,
            hide=self._hide,
        )

    def _wire(self, host: Host, *, watched: bool) -> Channel:
        if host.connection == LOCAL:
            return LocalChannel(COMMAND, watched=watched)
        session, channel = self._sessions.channel(host)
        try:
            return SshChannel(channel, COMMAND, lambda: session.ending)
        except (paramiko.SSHException, EOFError, OSError):
            channel.close()
            remedy = "logging in by hand"
            if session.alive:
                raise Trouble(Problem(host.name, "does not start a shell for us", try_=remedy)) from None
            raise Trouble(Problem(host.name, session.ending, try_=remedy), may_pass=True) from None


class _Line:
    """The sessions of one account, and the lock under which they are opened."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sessions: tuple[Session, ...] = ()


class Sessions:
    """Sessions by host. `accept` allows the key of a host that known_hosts does not have, and `tell` hears of each
    such key."""

    def __init__(
        self,
        hosts: Iterable[Host],
        resolver: Resolver,
        *,
        timeouts: Timeouts,
        accept: bool,
        tell: Callable[[str], None],
    ) -> None:
        """Resolve `hosts` now; what is wrong with one of them is raised when that one is used."""
        self._resolver, self._timeouts, self._accept, self._tell = resolver, timeouts, accept, tell
        # Shared by all threads, and safe for that: no files behind it, and our connections write nothing into it.
        self._config = Config(ssh_config=paramiko.SSHConfig(), lazy=True)
        self._lock = threading.RLock()
        self._accounts: dict[Host, Account | Trouble] = {}
        self._known: dict[tuple[str, ...], KnownHosts] = {}
        self._lines: dict[Account, _Line] = {}
        self._opening: set[Socket] = set()
        self._closed = False
        for host in hosts:
            self._resolve(host)

    def user_of(self, host: Host) -> str:
        """Return the account's name on `host`; Trouble where it cannot be resolved."""
        account = self._resolve(host)
        if isinstance(account, Trouble):
            raise account
        return account.user

    def openssh(self, host: Host, config: str | None) -> tuple[str, ...]:
        """See ConnectionPool; `config` is Options.ssh_config."""
        account = self._resolve(host)
        if isinstance(account, Trouble):
            raise account
        return ssh_access.client_words(account, host, config)

    def channel(self, host: Host) -> tuple[Session, paramiko.Channel]:
        """Return a new channel to `host` and its session: one that is open and has room, else a new one. Raises
        Trouble with the host's name."""
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
        """End the sessions to `host` if there are any; whoever waits for something on one of them goes on with an
        error."""
        account = self._resolve(host)
        for session in () if isinstance(account, Trouble) else self._lines[account].sessions:
            session.close()

    def close(self) -> None:
        """End all sessions; threads that wait for something on one of them go on with an error."""
        with self._lock:
            self._closed = True
            lines, opening = list(self._lines.values()), list(self._opening)
        for sock in opening:
            # Somebody waits for the answer of a host that may never come.
            with suppress(OSError, EOFError):
                sock.shutdown(socket.SHUT_RDWR)
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
                self._known[account.known_hosts] = ssh_access.read_known_hosts(account.known_hosts)
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
            self._check_open(account)
            via = self._open_jump(account) if account.via else None
            known = self._look_up(account)
            accept = (lambda key: self._add(account, key)) if self._accept else None
            mine: list[Socket] = []

            def opening(sock: Socket) -> None:
                with self._lock:
                    self._check_open(account)
                    mine.append(sock)
                    self._opening.add(sock)

            try:
                session = connect(
                    account, known, accept, config=self._config, timeouts=self._timeouts, via=via, opening=opening
                )
            finally:
                with self._lock:
                    self._opening.difference_update(mine)
            line.sessions = (*line.sessions, session)
            if self._closed:
                session.close()
            return session

    def _check_open(self, account: Account) -> None:
        """Raise Trouble when all sessions were ended."""
        if self._closed:
            raise Trouble(Problem(account.name, "not reached: the run is ending"))

    def _open_jump(self, account: Account) -> Session | None:
        if account.via is None:
            return None
        try:
            return self._open(account.via)
        except Trouble as trouble:
            problems = [
                replace(one, where=account.name, what=f"jump host {one.where}: {one.what}") for one in trouble.problems
            ]
            raise Trouble(*problems, may_pass=trouble.may_pass) from None

    def _look_up(self, account: Account) -> Known:
        known_hosts = self._known[account.known_hosts]
        known = known_hosts.lookup(account.key_name)
        if known.keys or known.revoked or not account.key_name.startswith("["):
            return known
        # Like ssh: a line without a port speaks for every port, as long as its key is right; else the host is simply
        # not known.
        plain = known_hosts.lookup(account.address)
        return replace(known, other_ports=plain.keys)

    def _add(self, account: Account, key: HostKey) -> None:
        path = account.known_hosts[0]
        with self._lock:
            try:
                ssh_access.add_host_key(path, account.key_name, key, hashed=account.hash_names)
            except OSError as error:
                raise Trouble(
                    Problem(path, f"the key of {account.name} cannot be added", error.strerror or str(error))
                ) from None
            self._known[account.known_hosts].plain.setdefault(account.key_name.lower(), []).append(
                replace(key, where=path)
            )
            self._tell(f"{account.name}: new host key {ssh_access.fingerprint(key.blob)} ({key.kind}) added to {path}")
