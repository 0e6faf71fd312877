"""ClusterShell's tree in place of a session to each host: this machine, gateways, and all other hosts behind them. It
is the way to many hosts that --tree takes. Nothing else imports these parts of ClusterShell.

A gateway is reached by OpenSSH's client with our own files of known hosts, and reaches the others with its own keys and
its own known hosts. So it speaks for them, and only looks go this way (Job.look). What it writes is not believed beyond
that: ClusterShell's messages carry pickles, of which one string of bytes is read and nothing is executed, and a
gateway names only hosts that are behind it.
"""

from __future__ import annotations

import base64
import functools
import math
import pickletools
import re
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ClusterShell.Communication import MessageProcessingError
from ClusterShell.Defaults import Defaults
from ClusterShell.Event import EventHandler
from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException
from ClusterShell.Propagation import PropagationChannel, RouteResolvingError
from ClusterShell.Task import Task
from ClusterShell.Task import TimeoutError as TooLateError
from ClusterShell.Topology import TopologyError, TopologyGraph, TopologyTree
from ClusterShell.Worker.EngineClient import EngineClientEOF
from ClusterShell.Worker.Ssh import SshClient, WorkerSsh
from ClusterShell.Worker.Tree import TreeWorker
from msgspec import Struct
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.nodeset import expand, pieces
from deepep_bootstrap.core.text import plain
from deepep_bootstrap.remote import channel
from deepep_bootstrap.remote.channel import COMMAND, MARK
from deepep_bootstrap.remote.host import LOCAL, Host
from deepep_bootstrap.remote.jobs import Detours, Job, Reply
from deepep_bootstrap.remote.packed import Packed, read_packed
from deepep_bootstrap.remote.script import ANSWER_LIMIT

if TYPE_CHECKING:
    from deepep_bootstrap.remote.fleet import ConnectionPool

ROOT, GATEWAY = "_controller", "_gateway{}"
"""The names of this machine and of the gateways in the tree: in DNS no host's name begins so."""

OLDEST = (1, 9)
"""The oldest ClusterShell of a gateway that was tried."""

PYTHONS = ("python3", "/usr/libexec/platform-python")
"""Where a gateway's ClusterShell may be; the second is that of the system in RHEL 8."""

LOOK = """
command -v ssh >/dev/null || echo no_ssh=1
for python in "$@"; do
    version="$("$python" -c 'import ClusterShell.Gateway; print(ClusterShell.__version__)' 2>/dev/null)" || continue
    echo "found=$python $version"
done
"""

BEGIN_LIMIT = 60.0
"""Seconds for a gateway to reach a host and for the script to begin there, besides the script's own time."""

CONNECT_LIMIT = 8
"""Seconds for a gateway to connect to a host: those of our own sessions (remote.ssh.Timeouts)."""

LONGEST_SCRIPT = 600.0
"""Seconds of a script without a limit of its own."""

GATEWAY_LIMIT = 256 * 1024**2
"""Bytes that one gateway may send in a look. Facts of a thousand hosts, packed as they are, have 30 MiB."""

LINE_LIMIT = 4 * 1024**2
"""Bytes of a gateway's line: ClusterShell breaks them at 64 KiB, and copies what it has of one with each piece."""

SSH_OPTIONS = (
    *("StrictHostKeyChecking=yes", "UpdateHostKeys=no", "BatchMode=yes", "ControlMaster=no", "ControlPath=none"),
    *("ClearAllForwardings=yes", "PermitLocalCommand=no", "RequestTTY=no", "LogLevel=ERROR"),
    *("ServerAliveInterval=15", "ServerAliveCountMax=3"),
)
"""What a gateway's ssh is told. Keys and known hosts are the gateway's own."""

BYTES, FRAMING = (
    frozenset(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8")),
    frozenset(("PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP")),
)
"""The instructions of a pickle that is a string of bytes: those with the bytes, and what may stand around them."""

WRONG = (ValueError, LookupError, TypeError, MessageProcessingError, TopologyError, NodeSetException)
"""What ClusterShell raises over a gateway's message that makes no sense."""


class Gateway(Struct, frozen=True):
    """A gateway, and the python there that has ClusterShell."""

    host: Host
    python: str


class Group(Struct, frozen=True):
    """Hosts that one look is run on: what each reads, how long its script may take, the account, and the port (0: what
    the gateway's own configuration says)."""

    payload: bytes
    seconds: float
    user: str
    port: int
    hosts: tuple[Host, ...]


def find_gateways(pool: ConnectionPool, hosts: Sequence[Host]) -> tuple[Gateway, ...]:
    """Return the gateways that answer; each that does not is told. Trouble for one that cannot be one: no such name,
    a key that is not its own, no ClusterShell."""
    replies = pool.run_all(hosts, lambda host: Job(LOOK, args=PYTHONS))
    found: list[Gateway] = []
    problems: list[Problem] = []
    for host in hosts:
        reply = replies[host.name]
        if isinstance(reply, Trouble):
            problem = reply.problems[0]
            if reply.may_pass:
                pool.tell(f"gateway {host.name} is left out: {problem.what}")
            else:
                problems.append(replace(problem, where="--tree", what=f"gateway {host.name}: {problem.what}"))
            continue
        python = python_of(reply.out)
        if python and "no_ssh=1" not in reply.out.splitlines():
            found.append(Gateway(host, python))
        else:
            problems.append(lacking(host.name, reply.out))
    if problems:
        raise Trouble(*problems)
    return tuple(found)


def python_of(text: str) -> str:
    """Return which of PYTHONS has a ClusterShell that is new enough, by what LOOK printed; "" for none."""
    for line in text.splitlines():
        python, _, version = line.removeprefix("found=").partition(" ")
        numbers = re.match(r"([0-9]{1,4})\.([0-9]{1,4})", version)
        if python in PYTHONS and numbers and (int(numbers[1]), int(numbers[2])) >= OLDEST:
            return python
    return ""


def lacking(name: str, text: str) -> Problem:
    """Return what a gateway lacks by what LOOK printed."""
    versions = re.findall(r"(?m)^found=\S+ ([0-9.]{1,20})$", text)
    found = "no ssh" if re.search(r"(?m)^no_ssh=1$", text) else f"ClusterShell {versions[0]}" if versions else "none"
    wanted = f"ssh, ClusterShell {'.'.join(map(str, OLDEST))} or later for python3, and keys for the hosts behind it"
    remedy = "apt-get install python3-clustershell, dnf install python3-clustershell (EPEL), or another gateway"
    return Problem(name, "no gateway for --tree: it has no ClusterShell", found, wanted, remedy)


class Tree:
    """Brings looks to hosts behind gateways; see remote.fleet.Many. `forks` hosts are worked on at a time by each."""

    name = "tree"

    def __init__(self, pool: ConnectionPool, gateways: Sequence[Gateway], forks: int) -> None:
        self._pool, self._forks = pool, forks
        self._gateways = tuple(gateways)
        self._are_gateways = frozenset(gateway.host.name for gateway in gateways)
        self._detours = Detours(pool.tell)

    def run_all(self, jobs: Mapping[Host, Job]) -> Mapping[str, Reply | Trouble]:
        """See Many. Whoever is asked over SSH in the end is named, with the reason, once."""
        replies: dict[str, Reply | Trouble] = {}
        groups, why = self.groups({host: job for host, job in jobs.items() if job.look})
        for group in groups:
            if self._gateways:
                found, missing = self._look(group)
                replies |= found
                why |= missing
            else:
                why |= dict.fromkeys((host.name for host in group.hosts), "no gateway is left")
        self._detours.tell(why)
        return replies

    def groups(self, jobs: Mapping[Host, Job]) -> tuple[list[Group], dict[str, str]]:
        """Return the hosts that can share a look, the largest group first, and why others go over SSH."""
        found: dict[tuple[bytes, float, str, int], list[Host]] = {}
        why: dict[str, str] = {}
        for host, job in jobs.items():
            try:
                reason, user = self._unfit(host, job), self._pool.user_of(host)
            except Trouble as trouble:
                reason, user = trouble.problems[0].what, ""
            if reason:
                why[host.name] = reason
            else:
                key = (self._pool.payload(host, job), job.timeout or LONGEST_SCRIPT, user, host.port)
                found.setdefault(key, []).append(host)
        groups = [Group(*key, tuple(hosts)) for key, hosts in found.items()]
        return sorted(groups, key=lambda group: -len(group.hosts)), why

    def _unfit(self, host: Host, job: Job) -> str:
        """Return why a look cannot come to a host by a gateway; "" where it can."""
        if host.connection == LOCAL:
            return "this machine"
        if host.name in self._are_gateways:
            return "a gateway"
        return "the password of sudo goes over SSH alone" if job.user and self._pool.has_password else ""

    def _look(self, group: Group) -> tuple[dict[str, Reply | Trouble], dict[str, str]]:
        """Run one look; return the replies that came, and why others did not. A gateway that was lost is asked no
        more."""
        begin = time.monotonic()
        look = _Look(group, {GATEWAY.format(n): gateway for n, gateway in enumerate(self._gateways)}, self._forks)
        look.run({key: self._pool.openssh(gateway.host) for key, gateway in look.gateways.items()})
        self._gateways = tuple(gateway for key, gateway in look.gateways.items() if key not in look.lost)
        replies: dict[str, Reply | Trouble] = {}
        why: dict[str, str] = {}
        for host in group.hosts:
            answer = read_packed(host.name, look.answers[host.name], group.seconds, time.monotonic() - begin)
            if answer:
                replies[host.name] = answer
            else:
                why[host.name] = look.reason(host.name)
        return replies, why


def topology(gateways: Collection[str], hosts: Iterable[str]) -> TopologyTree:
    """Return ClusterShell's tree: this machine, the gateways, the hosts behind all of them."""
    between = _nodes(gateways)
    graph = TopologyGraph()
    graph.add_route(_nodes((ROOT,)), between)
    graph.add_route(between, _nodes(hosts))
    return graph.to_tree(ROOT)


def _nodes(names: Iterable[str]) -> NodeSet:
    return NodeSet.fromlist(list(names), resolver=RESOLVER_NOGROUP)


def bytes_in(data: bytes) -> bytes:
    """Return the string of bytes that is all of a message's pickle. ValueError where it is anything else: to read it
    as Python does would be to run it."""
    found: list[bytes] = []
    for operation, argument, _ in pickletools.genops(base64.b64decode(data)):
        if operation.name in BYTES and isinstance(argument, bytes):
            found.append(argument)
        elif operation.name not in FRAMING:
            raise ValueError(f"a pickle with {operation.name} in it")
    if len(found) != 1:
        raise ValueError(f"a pickle with {len(found)} strings of bytes")
    return found[0]


class _Look(EventHandler):  # type: ignore[misc]
    """One run of ClusterShell's engine: the hosts of a group, and what came back of each. `lost` are the gateways that
    went away, by their names in the tree."""

    def __init__(self, group: Group, gateways: Mapping[str, Gateway], forks: int) -> None:
        super().__init__()
        self.group, self.gateways, self._forks = group, gateways, forks
        self.answers = {host.name: Packed() for host in group.hosts}
        self.commands: Mapping[str, tuple[str, ...]] = {}
        self.clients: list[_GatewayClient] = []
        self.lost: set[str] = set()
        self.late: set[str] = set()
        self._begun: set[str] = set()
        self._said: dict[str, str] = {}
        self._codes: dict[str, int] = {}
        self._behind: dict[str, str] = {}
        self._longest = 64 + sum(len(name) + 1 for name in (*self.answers, *gateways))

    def run(self, ssh: Mapping[str, Sequence[str]]) -> None:
        """Do it, and return when all hosts have answered or are given up. `ssh` are the words that log in on each
        gateway. Nothing that was started here is left, whatever happens."""
        # Its log: the default is a file of a name that everybody can guess, in /tmp.
        self.commands = {
            key: (*ssh[key], f"exec env CLUSTERSHELL_GW_LOG_DIR=/dev/null {gateway.python} -m ClusterShell.Gateway -Bu")
            for key, gateway in self.gateways.items()
        }
        each = self.group.seconds + BEGIN_LIMIT
        rounds = math.ceil(math.ceil(len(self.answers) / len(self.gateways)) / self._forks)
        # Settings of ClusterShell on this machine are for other programs.
        task = Task(threading.current_thread(), Defaults([]))
        try:
            self._prepare(task)
            tree = topology(self.gateways, self.answers)
            task.topology = tree
            worker = _Worker(
                _nodes(self.answers), self, each, command=COMMAND, topology=tree, newroot=ROOT, stderr=True
            )
            task.schedule(worker)
            worker.write(channel.relayed(self.group.payload, self.group.seconds, ANSWER_LIMIT + len(MARK) + 1))
            worker.set_write_eof()
            with suppress(TooLateError, RouteResolvingError):
                task.resume(each * rounds + BEGIN_LIMIT)
        finally:
            for client in self.clients:
                client.end()
            task.abort(kill=True)

    def _prepare(self, task: Task) -> None:
        options = [f"-o{option}" for option in SSH_OPTIONS]
        options += ["-p", str(self.group.port)] if self.group.port else []
        settings = {
            "fanout": self._forks,
            "connect_timeout": CONNECT_LIMIT,
            "ssh_path": "ssh",
            "ssh_user": self.group.user,
            "ssh_options": " ".join(options),
            # Those of a gateway are for other programs too.
            "tree_default:distant_workername": "ssh",
        }
        for key, value in settings.items():
            task.set_info(key, value)
        for stream in ("stdout_msgtree", "stderr_msgtree"):
            task.set_default(stream, False)
        task.set_default("distant_worker", functools.partial(_GatewayWorker, self))

    # Events of the engine.

    def ev_read(self, worker: object, node: str, sname: str, msg: bytes) -> None:
        """Take a line of a host, or of the ssh to a gateway."""
        del worker
        if sname == "stdout" and node in self.answers:
            if node in self._begun:
                self.answers[node].add(msg)
            elif msg == MARK.rstrip():
                self._begun.add(node)
        elif sname == "stderr" and msg.strip():
            self._said[node] = plain(msg.decode(errors="replace")).strip()[:200]

    def ev_hup(self, worker: object, node: str, rc: int) -> None:
        """Take how the ssh to a host ended."""
        del worker
        self._codes[node] = rc

    def ev_close(self, worker: TreeWorker, timedout: bool) -> None:
        """Take which hosts had their time."""
        if timedout:
            self.late.update(str(node) for node in worker.iter_keys_timeout())

    # What gateways may do.

    def admit(self, key: str, message: object, targets: Collection[str]) -> None:
        """Look at a message of a gateway before ClusterShell reads it. ValueError for one that names a host which is
        not behind it, or that carries more than bytes."""
        nodes = getattr(message, "nodes", "")
        if nodes:
            text = str(nodes)
            if len(text) > self._longest:
                raise ValueError("a list of hosts that is too long")
            for piece in pieces(text):
                names = expand(piece)
                if isinstance(names, str) or not {*names} <= {*targets, key}:
                    raise ValueError("hosts that are not behind it")
        if getattr(message, "has_payload", False):
            data = bytes_in(getattr(message, "data", None) or b"")
            vars(message)["data_decode"] = lambda: data

    def assigned(self, node: str, key: str) -> None:
        """Hear which gateway a host is asked through."""
        self._behind[node] = key

    def drop(self, key: str, why: str) -> None:
        """Hear that a gateway is no more."""
        self.lost.add(key)
        self._said.setdefault(key, why)

    def reason(self, name: str) -> str:
        """Return why a host has no answer, with the gateway's name."""
        key = self._behind.get(name, "")
        if key not in self.gateways:
            return "no gateway took it"
        gateway = f"gateway {self.gateways[key].host.name}"
        if key in self.lost:
            return f"{gateway}: {self._said.get(key) or 'the connection was lost'}"
        if name in self.late:
            return f"{gateway} gave it up after {self.group.seconds + BEGIN_LIMIT:g} s"
        if self._codes.get(name) == 255:
            return f"{gateway}: {self._said.get(name) or 'ssh could not reach it'}"
        return f"{gateway} brought no whole answer"


class _Worker(TreeWorker):  # type: ignore[misc]
    """ClusterShell's worker for a tree. Hosts whose gateway did not come up go over SSH: another gateway would start
    the command and get no standard input, which ClusterShell has sent by then."""

    def _execute_remote(self, cmd: str, targets: NodeSet, gateway: NodeSet, timeout: float) -> None:
        for node in targets:
            self.eh.assigned(str(node), str(gateway))
        super()._execute_remote(cmd, targets, gateway, timeout)

    def _relaunch(self, previous_gateway: str) -> None:
        """Leave them to the end of the gateway's channel, which closes them."""


class _GatewayClient(SshClient):  # type: ignore[misc]
    """The ssh to a gateway."""

    came = 0

    def _build_cmd(self) -> tuple[list[str], None]:
        return list(self.worker.command_line), None

    def _start(self) -> object:
        self.worker.look.clients.append(self)
        return super()._start()

    def _read(self, sname: str, size: int = 65536) -> bytes:
        data: bytes = super()._read(sname, size)
        self.came += len(data)
        if self.came > GATEWAY_LIMIT or len(self.streams[sname].rbuf) > LINE_LIMIT:
            self.worker.look.drop(str(self.key), "it sends without an end")
            self.popen.kill()
            raise EngineClientEOF
        return data

    def end(self) -> None:
        """Let no process run on."""
        if self.popen and self.popen.poll() is None:
            with suppress(ProcessLookupError):
                self.popen.kill()
            self.popen.wait()


class _GatewayWorker(WorkerSsh):  # type: ignore[misc]
    """Starts ClusterShell on a gateway; what that says is taken by a channel of ours."""

    SHELL_CLASS = _GatewayClient

    def __init__(
        self, look: _Look, nodes: NodeSet, handler: EventHandler, timeout: float | None = None, **more: object
    ) -> None:
        self.look = look
        self.command_line = look.commands[str(nodes)]
        super().__init__(nodes, _Channel(look, handler.task, nodes), timeout, **more)


class _Channel(PropagationChannel):  # type: ignore[misc]
    """ClusterShell's channel to a gateway, behind a look at what comes."""

    def __init__(self, look: _Look, task: Task, gateway: NodeSet) -> None:
        super().__init__(task, gateway)
        self._look, self._key = look, str(gateway)

    @property
    def _behind(self) -> set[str]:
        """The hosts of which the gateway has not said how they ended."""
        return {node for worker in self.workers.values() for node in worker.gwtargets.get(self._key, ())}

    def recv(self, msg: object) -> None:
        """Take a message."""
        if self._key in self._look.lost:
            return
        try:
            self._look.admit(self._key, msg, self._behind)
            super().recv(msg)
        except WRONG as error:
            self._look.drop(self._key, f"it said what no gateway says ({plain(str(error))[:100]})")
            self.worker.abort()

    def ev_close(self, worker: WorkerSsh, timedout: bool) -> None:
        """Take the end of the ssh to the gateway."""
        if self._behind:
            self._look.drop(self._key, "no end in its time" if timedout else "the connection was lost")
        super().ev_close(worker, timedout)
