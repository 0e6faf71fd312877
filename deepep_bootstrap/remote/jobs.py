"""A script for one host, what it left there, and what the rest of the program knows of connections. These words need no
library of SSH.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal, Protocol

from msgspec import Struct, field

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.core.nodeset import fold_short
from deepep_bootstrap.remote.channel import Hide, as_is
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.script import ANSWER_LIMIT, OnLine, Sink

LOG_LIMIT = 64 * 1024**2
"""Characters of a log job's lines that are given out: many times the log of a whole build, and what a disk of
logs can stand from each of 64 hosts."""


class Job(Struct, frozen=True):
    """A script for one host: bash text, its arguments and environment, who runs it, and how it ends.

    `interpreter` is what runs it: "bash", or "sh" for a text that every POSIX shell understands. Where sh is a small
    one (dash on Debian and Ubuntu), a script that starts hundreds of processes takes a third less of the processor.

    `user` is "" for the connection's own user, "root", or another user's name. `watched` keeps stdin open under a
    watcher that ends the script's process group when the control machine goes away; use it for anything that can
    outlast ten seconds. `timeout` is in seconds (None: no limit, for watched jobs). `merge` sends stderr into stdout
    in order. `sink` gets the bytes of stdout as they come, for bulk; the reply has none of them, and what the sink
    raises ends the script.

    A stream over `limit` bytes ends the script with Trouble; None is for a sink that knows how much it waits for. `log`
    is for scripts that talk much to people, on stderr (with `merge` on stdout): of that stream the reply has the end
    alone, and `on_line` gets the first LOG_LIMIT characters and a word about the rest. `anywhere` says that the script
    may also be brought to its host by another way than a session (see Many): it takes no harm from being run twice, and
    knows what to leave unsaid in a job of Slurm's. `look` says of such a script that it changes nothing and proves
    nothing: its answer may come from a gateway, which could speak for the host."""

    script: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    watched: bool = False
    timeout: float | None = 60.0
    merge: bool = False
    sink: Sink | None = None
    limit: int | None = ANSWER_LIMIT
    log: bool = False
    anywhere: bool = False
    look: bool = False
    interpreter: Literal["bash", "sh"] = "bash"

    @property
    def log_stream(self) -> str:
        """The stream that is a log: "stderr", "stdout", or "" for none."""
        return ("stdout" if self.merge else "stderr") if self.log else ""

    def __post_init__(self) -> None:
        """Refuse what is no text of ours, such as core.text.HostText: what a host said is no word of a command."""
        for value in (self.script, self.user, *self.args, *self.env, *self.env.values()):
            if type(value) is not str:
                raise TypeError(f"{value!r} can be no word and no variable of a command")


class Reply(Struct, frozen=True):
    """What a script left on one host; `code` is its exit code, `seconds` the time it took. `out` is what it printed,
    unless that is a log: secrets are taken out of what is for people."""

    host: str
    code: int
    out: str
    err: str
    seconds: float
    hide: Hide = as_is

    @property
    def said(self) -> str:
        """What it printed, for a message: stderr, or stdout where that has nothing."""
        return (self.err or self.hide(self.out)).strip()

    @property
    def last_line(self) -> str:
        """The last line of that."""
        return self.said.rpartition("\n")[2]


class BackgroundJob(Protocol):
    """A watched script that stays until it is closed: a scratch directory, a Slurm allocation."""

    def wait_for(self, key: str, timeout: float | None = None) -> str:
        """Return the value of the first `key=value` line the script printed; Trouble when it ends or `timeout`
        passes before."""

    @property
    def end(self) -> Reply | Trouble | None:
        """What the script left, or how its host was lost; None while it runs."""

    def close(self) -> Reply:
        """Close the script's stdin, wait for its clean-up, return what it left."""


class Many(Protocol):
    """A way to many hosts at once, which is tried before a session to each; `name` is what documents call it."""

    name: str

    def run_all(self, jobs: Mapping[Host, Job]) -> Mapping[str, Reply | Trouble]:
        """Run each job on its host and return what came back, by the host's name; hosts that are not in it are asked
        over sessions of their own."""


class Detours:
    """Tells which hosts are asked over SSH after all, once of each reason."""

    def __init__(self, tell: OnLine) -> None:
        self._say, self._told = tell, set[str]()

    def tell(self, why: Mapping[str, str]) -> None:
        """Tell the hosts of `why`, a reason by name of the host."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in why.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, hosts in by_reason.items():
            line = f"over SSH: {fold_short(hosts)} ({reason})"
            if line not in self._told:
                self._told.add(line)
                self._say(line)


class Transport(Protocol):
    """What the rest of the program knows of hosts. Safe to use from several threads."""

    def run(self, host: Host, job: Job, on_line: OnLine | None = None) -> Reply:
        """Run `job` on `host`, each full line to `on_line` as it comes. Trouble when the host is not there; an exit
        code is a value."""

    def send(self, host: Host, job: Job, chunks: Iterable[bytes]) -> Reply:
        """Run `job` with the concatenated `chunks` as the script's stdin (bulk: tar streams), on a channel of its
        own."""

    def hold(self, host: Host, job: Job, on_line: OnLine | None = None, *, keys: Collection[str] = ()) -> BackgroundJob:
        """Start a watched script and return while it runs; it ends on `close`, or by its watcher when we are gone.
        `keys` are those that somebody may wait for."""

    def run_all(
        self,
        hosts: Sequence[Host],
        job_for: Callable[[Host], Job],
        on_line: Callable[[str, str], None] | None = None,
        on_end: Callable[[str], None] | None = None,
    ) -> dict[str, Reply | Trouble]:
        """Run a job on every host in a bounded pool; a host that fails is a Trouble in the result and delays no other.
        `on_line` gets host name and line, `on_end` the name of each host whose script has ended, or which is lost."""

    def close(self) -> None:
        """Close every connection."""
