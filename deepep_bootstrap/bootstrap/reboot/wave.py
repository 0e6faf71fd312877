"""State shared by the hosts of one rolling reboot: the connections, the nodes that are out of use, and the
decision to go on.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from deepep_bootstrap.bootstrap.reboot.control import SLURM_PATIENCE, Cluster, Line
from deepep_bootstrap.bootstrap.reboot.policy import HostReboot, Policy, RebootActions, Tell
from deepep_bootstrap.bootstrap.reboot.slurm_drain import NodeDrain
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.remote.host import Host

TITLE = "reboot"
FAILED_CHANGES = 2
"""Hosts on which a change may fail before a wave stops: two alike are hardly chance."""


class Wave:
    """What the reboots of all hosts share: the connections, and whether to go on."""

    def __init__(
        self, transport: Line, slurm_at: Sequence[Host], policy: Policy, *, actions: RebootActions, tell: Tell
    ) -> None:
        self.transport, self.policy, self.actions = transport, policy, actions
        self.cluster = Cluster(transport, slurm_at, sleep=self.sleep, patience=max(policy.boot_timeout, SLURM_PATIENCE))
        self.stopped = ""
        self._tell, self._lock, self._interrupted = tell, threading.RLock(), threading.Event()
        self._drains: dict[str, NodeDrain] = {}
        self._failed_changes: list[str] = []

    @property
    def interrupted(self) -> bool:
        """Whether somebody pressed ^C: Slurm is told nothing any more."""
        return self._interrupted.is_set()

    def drain(self, order: HostReboot) -> NodeDrain | None:
        """Return the drain of the order's node, None where it is no node of Slurm."""
        if not order.node:
            return None
        return self._drains.setdefault(order.host.name, NodeDrain(self.cluster, order.node, self.policy.run))

    def tell(self, host: str, line: str) -> None:
        """Tell a line, one thread at a time; after ^C nothing that follows from it."""
        with self._lock:
            if not self._interrupted.is_set():
                self._tell(host, TITLE, line)

    def sleep(self, seconds: float) -> None:
        """Wait, but not longer than until ^C."""
        if self._interrupted.wait(seconds):
            raise Trouble(Problem("wave", "interrupted"))

    def stop(self, why: str) -> None:
        """Let nothing else be drained or rebooted; what reboots already is looked at and given back. The first
        reason counts."""
        with self._lock:
            self.stopped = self.stopped or why

    def count_failed_change(self, why: str) -> None:
        """Keep in mind that a change failed before a reboot. One is its host's own trouble; when it is
        `FAILED_CHANGES`, what they wait for is nowhere, and the others would be taken out of use for nothing."""
        with self._lock:
            self._failed_changes.append(why)
            if len(self._failed_changes) >= FAILED_CHANGES:
                self.stop(f"{len(self._failed_changes)} hosts could not be changed, the last one {why}")

    def interrupt(self) -> None:
        """Wake everybody who waits, and say what stays drained."""
        self._interrupted.set()
        with self._lock:
            for host, drain in list(self._drains.items()):
                if drain.ours:
                    self._tell(host, TITLE, f"stays drained ({drain.ours}): the next run goes on from there")
