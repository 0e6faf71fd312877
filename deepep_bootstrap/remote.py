"""The only door to a host: scripts over one SSH session per host (Fabric), or the same scripts on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from deepep_bootstrap.errors import Trouble
from deepep_bootstrap.hosts import Host

OnLine = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """A script for one host: bash text, its arguments and environment, who runs it, and how it ends.

    `user` is "" for the connection's own user, "root", or another user's name. `watched` keeps stdin open under a watcher that
    ends the script's process group when the control machine goes away; use it for anything that can outlast ten seconds.
    `timeout` is in seconds (None: no limit, for watched jobs). `merge` sends stderr into stdout in order.
    """

    script: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    watched: bool = False
    timeout: float | None = 60.0
    merge: bool = False


@dataclass(frozen=True)
class Reply:
    """What a script left on one host; `code` is its exit code, `seconds` the time it took."""

    host: str
    code: int
    out: str
    err: str
    seconds: float


class Hold(Protocol):
    """A watched script that stays until it is closed: a scratch directory, a Slurm allocation."""

    def wait_for(self, key: str, timeout: float | None = None) -> str:
        """Return the value of the first `key=value` line the script printed; Trouble when it ends or `timeout` passes before."""

    def close(self) -> Reply:
        """Close the script's stdin, wait for its clean-up, return what it left."""


class Door(Protocol):
    """What the rest of the program knows of hosts. Safe to use from several threads."""

    def run(self, host: Host, job: Job, on_line: OnLine | None = None) -> Reply:
        """Run `job` on `host`; each full line of output goes to `on_line` as it comes. Raises Trouble when the host cannot be
        reached or goes away; a non-zero exit code is a value."""

    def send(self, host: Host, job: Job, chunks: Iterable[bytes]) -> Reply:
        """Run `job` with the concatenated `chunks` as the script's stdin (bulk: tar streams), on a channel of its own."""

    def hold(self, host: Host, job: Job, on_line: OnLine | None = None) -> Hold:
        """Start a watched script and return while it runs; it ends on `close`, or by its watcher when we are gone."""

    def run_all(self, hosts: Sequence[Host], job_for: Callable[[Host], Job], on_line: Callable[[str, str], None] | None = None) -> dict[str, Reply | Trouble]:
        """Run a job on every host in a bounded pool; a host that fails is a Trouble in the result and delays no other.
        `on_line` gets host name and line."""

    def close(self) -> None:
        """Close every connection."""
