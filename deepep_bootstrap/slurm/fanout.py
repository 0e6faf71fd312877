"""One srun over the free nodes in place of a session to each: the way to many hosts that --via=slurm takes.

Only nodes that Slurm calls idle, and that no job uses, are asked so, each as a whole with its GPUs. All others, those
that did not start in time, and those where a job would hide something, are asked over SSH in the same run. Whose answer
a line is, srun says: by the number before each line of a task, and by its own words on which node that task is.
"""

from __future__ import annotations

import base64
import math
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING

from msgspec import Struct

from deepep_bootstrap.core import records
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.recipes import compose
from deepep_bootstrap.inventory import forms, hostsfile
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.hostsfile import Inventory
from deepep_bootstrap.inventory.survey import open_connections, read_tree
from deepep_bootstrap.remote.channel import COMMAND, MARK
from deepep_bootstrap.remote.host import LOCAL, THIS_MACHINE, Host
from deepep_bootstrap.remote.jobs import Detours, Job, Reply
from deepep_bootstrap.remote.packed import PACKED_LIMIT, Packed, read_packed
from deepep_bootstrap.remote.script import ANSWER_LIMIT
from deepep_bootstrap.slurm import commands
from deepep_bootstrap.slurm.commands import AllocationRequest, SlurmNode
from deepep_bootstrap.slurm.identity import NodeRecords, ask_for_nodes, names_of, owners

if TYPE_CHECKING:
    from deepep_bootstrap.remote.fleet import ConnectionPool

AUTO, SLURM, SSH = "auto", "slurm", "ssh"
WAYS = (AUTO, SLURM, SSH)

START_LIMIT = 20
"""Seconds that srun waits for the nodes: they were free a moment ago, and Slurm's schedulers look every few seconds."""

PROLOG_LIMIT = 60
"""Seconds for a prolog before a task starts; sites let it look at the GPUs."""

END_LIMIT = 90.0
"""Seconds for the script on the Slurm host to cancel what is left and to wait for free nodes."""

LATE = 30
"""Seconds that srun waits for the other tasks once the first has ended, or a third of the script's own time where that
is more: a node that died is noticed by slurmctld after minutes alone (SlurmdTimeout)."""

TRIES = 2
"""How often nodes are asked for: where one of them was taken since Slurm was asked, all others wait with it."""

LONGEST_SCRIPT = 600.0
"""Seconds of a script without a limit of its own."""

FREE = re.compile(r"IDLE(\+(CLOUD|DYNAMIC_NORM|DYNAMIC_FUTURE))*")
"""States of a node on which a job starts at once, and which Slurm plans for no other job."""

LABELLED = re.compile(rb" *([0-9]{1,6}): (.*)")
LAUNCHED = re.compile(r"srun: launching \S+ on host (\S+), 1 tasks: \[?([0-9]{1,6})\]?")
"""srun's own words, from 17.11 to 25.05, on the task that it starts on a node."""


@contextmanager
def open_ways(flags: Flags, inventory: Inventory) -> Iterator[ConnectionPool]:
    """Yield the connections to the hosts, with Slurm as the way to many of them where --via says so, or gateways where
    --tree names some. Trouble for a flag that means nothing, and where Slurm is wanted and no host is its client."""
    if flags.via not in WAYS:
        raise Trouble(Problem("--via", "unknown value", flags.via or "nothing", f"one of {', '.join(WAYS)}"))
    with open_connections(flags, inventory) as pool:
        if flags.tree:
            _prefer_tree(flags, inventory, pool)
        elif flags.via == SLURM or (flags.via == AUTO and len(inventory.hosts) > flags.ssh_limit):
            recipes = read_tree(flags.root / "recipes")
            if via := find_client(pool, inventory, recipes):
                pool.prefer(Fanout(pool, inventory, via, recipes))
            elif flags.via == SLURM:
                found = "neither this machine nor slurm_host nor a login host has a working srun"
                remedy = "--via=ssh, or slurm_host= in the hosts file"
                raise Trouble(Problem("--via=slurm", "there is no client of Slurm to ask", found, try_=remedy))
        yield pool


def _prefer_tree(flags: Flags, inventory: Inventory, pool: ConnectionPool) -> None:
    # ClusterShell's engine is imported by nobody else.
    from deepep_bootstrap.remote import tree

    wanted = hostsfile.named_hosts(flags.tree, "--tree", inventory)
    if gateways := tree.find_gateways(pool, wanted):
        pool.prefer(tree.Tree(pool, gateways, flags.forks))


def find_client(pool: ConnectionPool, inventory: Inventory, recipes: Mapping[str, str]) -> Host | None:
    """Return the host from which nodes are asked: the hosts file's slurm_host, else this machine or a login host where
    srun works. None without one. No other node is asked: it may be taken over."""
    named = [host for host in inventory.hosts if host.name == inventory.settings.slurm_host]
    here = [THIS_MACHINE] if shutil.which("srun") else []
    clients = named or [*here, *(host for host in inventory.hosts if host.role == "login")]
    return next((host for host in clients if _is_client(pool, host, recipes)), None)


def _is_client(pool: ConnectionPool, host: Host, recipes: Mapping[str, str]) -> bool:
    """Return whether srun works on a host; later scripts find it there, wherever it is."""
    recipe = "slurm/client.sh"
    try:
        reply = pool.run(host, Job(compose(recipes, "lib.sh", recipe)))
        said = records.read_records(reply.out, forms.SLURM_CLIENT, host.name, recipe)
    except Trouble:
        return False
    if folder := said.text("path"):
        conf = said.text("conf")
        pool.equip(host.name, folder, {"SLURM_CONF": conf} if conf else {})
    return said.truth("works")


class Group(Struct, frozen=True):
    """Nodes that one step is run on: what each task reads and how long it may take, the partition, the GPUs that each
    node has for Slurm, and the hosts by node."""

    payload: bytes
    seconds: float
    partition: str
    gpus: int
    hosts: Mapping[str, Host]


class Tasks:
    """Takes srun's labelled output as it comes. Lines of tasks beyond `count` are dropped, and so is what one task
    prints beyond PACKED_LIMIT."""

    def __init__(self, count: int) -> None:
        self.tasks = [Packed() for _ in range(count)]
        self.nodes: dict[str, int] = {}
        self.said: list[str] = []
        self._rest = b""

    def take(self, data: bytes) -> None:
        """Take more bytes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line)
        if len(self._rest) > PACKED_LIMIT:
            self._rest = b""

    def _line(self, line: bytes) -> None:
        if match := LABELLED.fullmatch(line):
            number = int(match[1])
            if number < len(self.tasks):
                self.tasks[number].add(match[2])
        elif line.startswith(b"srun: "):
            self._say(line.decode(errors="replace"))

    def _say(self, text: str) -> None:
        if match := LAUNCHED.fullmatch(text):
            self.nodes[match[1]] = int(match[2])
        else:
            self.said.append(text.removeprefix("srun: "))

    def of(self, node: str) -> Packed | None:
        """Return the task that srun says it started on a node."""
        number = self.nodes.get(node, len(self.tasks))
        return self.tasks[number] if number < len(self.tasks) else None

    @property
    def trouble(self) -> str:
        """The last error that srun itself told, "" for none."""
        errors = [text.removeprefix("error: ") for text in self.said if text.startswith("error: ")]
        return errors[-1][:200] if errors else ""


class Fanout:
    """Brings jobs to free nodes through one srun; see remote.fleet.Many."""

    name = SLURM

    def __init__(self, pool: ConnectionPool, inventory: Inventory, via: Host, recipes: Mapping[str, str]) -> None:
        self._pool, self._inventory, self._via, self._recipes = pool, inventory, via, recipes
        self._detours = Detours(pool.tell)

    def run_all(self, jobs: Mapping[Host, Job]) -> Mapping[str, Reply | Trouble]:
        """See Many. Whoever is asked over SSH in the end is named, with the reason, once."""
        replies: dict[str, Reply | Trouble] = {}
        why: dict[str, str] = {}
        for attempt in range(TRIES):
            left = {host: job for host, job in jobs.items() if host.name not in replies}
            if attempt and not any(reason == NOT_STARTED for reason in why.values()):
                break
            found, why = self._try(left, why)
            replies |= found
        self._detours.tell(why)
        return replies

    def _try(
        self, jobs: Mapping[Host, Job], before: Mapping[str, str]
    ) -> tuple[dict[str, Reply | Trouble], dict[str, str]]:
        """Return the replies that came, and why others did not. Who was refused `before` for another reason than the
        time is not asked again."""
        why = {name: reason for name, reason in before.items() if reason != NOT_STARTED}
        mine: dict[Host, Job] = {}
        for host, job in jobs.items():
            if host.name in why:
                continue
            if reason := self._unfit(host, job):
                why[host.name] = reason
            else:
                mine[host] = job
        replies: dict[str, Reply | Trouble] = {}
        try:
            records = ask_for_nodes(self._pool, self._via, {name for host in mine for name in names_of(host)})
        except Trouble as trouble:
            return {}, {**why, **dict.fromkeys((host.name for host in mine), trouble.problems[0].what)}
        free, busy = free_nodes(tuple(mine), records)
        why |= busy
        for group in self._groups({host: (node, mine[host]) for host, node in free.items()}):
            found, missing = self._step(group)
            replies |= found
            why |= missing
        return replies, why

    def _unfit(self, host: Host, job: Job) -> str:
        """Return why a job cannot come to a host by Slurm, whatever its node does; "" where it can."""
        if host.connection == LOCAL:
            return "this machine"
        if job.user and self._pool.has_password:
            return "the password of sudo goes over SSH alone"
        try:
            own = self._pool.user_of(self._via)
            return "" if self._pool.user_of(host) == own else f"another account than {own}, which asks Slurm"
        except Trouble as trouble:
            return trouble.problems[0].what

    def _groups(self, free: Mapping[Host, tuple[SlurmNode, Job]]) -> list[Group]:
        """Return the nodes that can share a step, the largest group first."""
        found: dict[tuple[bytes, float, str, int], dict[str, Host]] = {}
        wanted = self._inventory.settings.partition
        for host, (node, job) in free.items():
            partition = wanted if wanted in node.partitions else node.partitions[0]
            seconds = job.timeout or LONGEST_SCRIPT
            key = (self._pool.payload(host, job), seconds, partition, commands.gpus_of(node.gres))
            found.setdefault(key, {})[node.name] = host
        return sorted((Group(*key, hosts) for key, hosts in found.items()), key=lambda group: -len(group.hosts))

    def options(self, group: Group) -> tuple[str, ...]:
        """Return srun's options for a group: its very nodes, each alone and with all that it has, at once or not at
        all, and a node that dies ends no other's task."""
        settings = self._inventory.settings
        gres = group.gpus and settings.gres != "none"
        request = AllocationRequest(
            nodes=tuple(group.hosts),
            count=len(group.hosts),
            partition=group.partition,
            account=settings.account,
            qos=settings.qos,
            gres=f"gpu:{group.gpus}" if gres else "",
            exclusive=True,
            extra=commands.place_words(settings.sbatch_args),
        )
        minutes = math.ceil((group.seconds + PROLOG_LIMIT) / 60) + 1
        return (
            *commands.request_options(request),
            f"--time={minutes}",
            *("--mem=0", "--ntasks-per-node=1", f"--ntasks={len(group.hosts)}", f"--immediate={START_LIMIT}"),
            *("--no-kill", "--kill-on-bad-exit=0", f"--wait={max(LATE, math.ceil(group.seconds / 3))}"),
            *("--mpi=none", "--cpu-bind=none", "--export=NONE", "--chdir=/"),
        )

    def _step(self, group: Group) -> tuple[dict[str, Reply | Trouble], dict[str, str]]:
        """Run one step; return the replies that came, and why others did not."""
        names = [host.name for host in group.hosts.values()]
        limit = START_LIMIT + PROLOG_LIMIT + group.seconds
        coded = base64.encodebytes(group.payload).decode()
        script = (
            f"payload() {{\nbase64 -d <<'END'\n{coded}END\n}}\n{compose(self._recipes, 'lib.sh', 'slurm/fanout.sh')}"
        )
        env = {
            "NAME": f"deepep-look-{secrets.token_hex(6)}",
            "LIMIT": str(math.ceil(limit)),
            "STEP": self._recipes["slurm/step.sh"],
            "COMMAND": COMMAND,
            "SECONDS_EACH": str(math.ceil(group.seconds)),
            "BYTES_EACH": str(ANSWER_LIMIT + len(MARK) + 1),
        }
        tasks = Tasks(len(group.hosts))
        job = Job(
            script,
            args=self.options(group),
            env=env,
            watched=True,
            timeout=limit + END_LIMIT,
            sink=tasks.take,
            limit=None,
        )
        try:
            reply = self._pool.run(self._via, job)
        except Trouble as trouble:
            return {}, dict.fromkeys(names, trouble.problems[0].what)
        if not tasks.nodes:
            refused = tasks.trouble or reply.last_line[:200]
            in_time = re.search(r"immediate|busy|not available|revoked", refused, re.IGNORECASE)
            return {}, dict.fromkeys(names, NOT_STARTED if in_time else refused)
        replies: dict[str, Reply | Trouble] = {}
        why: dict[str, str] = {}
        for node, host in group.hosts.items():
            task = tasks.of(node)
            answer = read_answer(host.name, task, group, reply.seconds) if task else NO_ANSWER
            if isinstance(answer, str):
                why[host.name] = answer
            else:
                replies[host.name] = answer
        return replies, why


NOT_STARTED = "a job did not start there in time"
NO_ANSWER = "its job gave no answer"


def free_nodes(hosts: Sequence[Host], records: NodeRecords) -> tuple[dict[Host, SlurmNode], dict[str, str]]:
    """Return the free node that each host is, by the Slurm host's word, and why others are none."""
    owned = owners(hosts, records)
    count = Counter(chain.from_iterable(owned.values()))
    free: dict[Host, SlurmNode] = {}
    why: dict[str, str] = {}
    for host in hosts:
        mine = owned[host.name]
        if len(mine) != 1 or count[mine[0]] != 1:
            why[host.name] = "not one node of Slurm" if mine else "no node of Slurm"
        elif reason := not_free(node := records.nodes[mine[0]], records):
            why[host.name] = reason
        else:
            free[host] = node
    return free, why


def not_free(node: SlurmNode, records: NodeRecords) -> str:
    """Return why no job of ours starts at once on a node, "" where one does."""
    if jobs := records.jobs.get(node.name, ()):
        return "has a job" if len(jobs) == 1 else "has jobs"
    return "" if FREE.fullmatch(node.state) and node.partitions else f"{node.state.lower()} in Slurm"


def read_answer(host: str, task: Packed, group: Group, seconds: float) -> Reply | Trouble | str:
    """Return what a task's lines say of its script, or Trouble (see read_packed); why its host is to be asked over SSH
    instead, as a text."""
    if hidden := task.values(b"hidden"):
        return f"a job hides its {hidden[0].decode(errors='replace')[:20]}"
    return read_packed(host, task, group.seconds, seconds) or NO_ANSWER
