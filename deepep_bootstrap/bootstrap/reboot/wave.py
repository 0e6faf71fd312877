"""State shared by the hosts of one rolling reboot: the connections, the nodes that are out of use, and the
decision to go on.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from deepep_bootstrap.bootstrap.reboot.control import SLURM_PATIENCE, Cluster, Line
from deepep_bootstrap.bootstrap.reboot.pod_drain import PodDrain
from deepep_bootstrap.bootstrap.reboot.policy import HostReboot, Policy, RebootActions, Tell
from deepep_bootstrap.bootstrap.reboot.slurm_drain import NodeDrain
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.kube import client as kube
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.slurm import nodes

TITLE = "reboot"
FAILED_CHANGES = 2
"""Hosts on which a change may fail before a wave stops: two alike are hardly chance."""


class Wave:
    """What the reboots of all hosts share: the connections, and whether to go on."""

    def __init__(
        self,
        transport: Line,
        slurm_at: Sequence[Host],
        policy: Policy,
        *,
        actions: RebootActions,
        tell: Tell,
        kubernetes: kube.Cluster | None = None,
    ) -> None:
        self.transport, self.policy, self.actions = transport, policy, actions
        self._kubernetes = kubernetes
        self.cluster = Cluster(transport, slurm_at, sleep=self.sleep, patience=max(policy.boot_timeout, SLURM_PATIENCE))
        self.stopped = ""
        self._tell, self._lock, self._interrupted = tell, threading.RLock(), threading.Event()
        self._drains: dict[str, NodeDrain] = {}
        self._pod_drains: dict[str, PodDrain] = {}
        self._out: set[str] = set()
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

    def pods(self, order: HostReboot) -> PodDrain | None:
        """Return the drain of the order's node in Kubernetes, None where it is none."""
        if not order.kube_node or self._kubernetes is None:
            return None
        return self._pod_drains.setdefault(
            order.host.name, PodDrain(self._kubernetes, order.kube_node, self.policy.run)
        )

    def enter(self, node: str, *, in_use: bool) -> str:
        """Count a node among those that this wave has out of use. Return why it must wait, "" where it is counted:
        one more `in_use` would make more than `at_once` drained by this program anywhere in Slurm. One that is out of
        use already makes none more."""
        others = self._drained_by_others() if in_use else {}
        with self._lock:
            if in_use and (why := self._says_full(others, len(self._out) + 1)):
                return why
            self._out.add(node)
        return ""

    def overfull(self) -> str:
        """Return why a node that was drained just now must go back: another run drained one at the same time. ""
        where it may stay."""
        others = self._drained_by_others()
        with self._lock:
            return self._says_full(others, len(self._out))

    def leave(self, node: str) -> None:
        """Count a node no longer: it is back in use, or left to the next run."""
        with self._lock:
            self._out.discard(node)

    def _drained_by_others(self) -> dict[str, str]:
        """Return the reasons, by node, of drains that other runs of this program made. A node on which a change
        failed earlier in this wave is none of them: FAILED_CHANGES bounds those."""
        if not self.policy.at_once:
            return {}
        found = {node.name: nodes.reason_out_of_use(node.state, node.reason) for node in self.cluster.ours()}
        with self._lock:
            return {
                name: reason
                for name, reason in found.items()
                if nodes.is_ours(reason) and name not in self._out and not nodes.is_of_run(reason, self.policy.run)
            }

    def _says_full(self, others: Mapping[str, str], own: int) -> str:
        if not others or len(others) + own <= self.policy.at_once:
            return ""
        node, reason = next(iter(others.items()))
        return (
            f"other runs have {fold(others)} out of use ({node}: {reason[:200]}), and no more than "
            f"{self.policy.at_once} at a time may be"
        )

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
            for host, pods in list(self._pod_drains.items()):
                if pods.ours:
                    self._tell(host, TITLE, f"stays cordoned ({pods.ours}): the next run goes on from there")
