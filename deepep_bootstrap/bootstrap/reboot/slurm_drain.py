"""One Slurm node taken out of use and brought back: drained by us or, before, by somebody else whose drain
then stays.
"""

from __future__ import annotations

from contextlib import suppress

from deepep_bootstrap.bootstrap.reboot.control import Cluster
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.slurm import nodes
from deepep_bootstrap.slurm.commands import SlurmNode
from deepep_bootstrap.slurm.nodes import Look, read_reason


class NodeDrain:
    """The node `node` around a reboot; `run` names the run in its reason. `ours` is the reason we drained it with,
    "" as long as we did not; `kept` is the node as somebody else had it. An earlier run may have left the node
    drained: that is ours too."""

    def __init__(self, cluster: Cluster, node: str, run: str) -> None:
        self.node, self.ours = node, ""
        self.kept: SlurmNode | None = None
        self._left, self._started = "", ""
        self._cluster, self._run = cluster, run

    def look(self) -> Look:
        """Return what Slurm says of the node now. Raises Trouble where it has none of that name."""
        look = self._cluster.look(self.node)
        if self.node not in look.nodes:
            raise Trouble(Problem("Slurm", "does not know the node", self.node))
        return look

    def now(self) -> SlurmNode:
        """Return the node as it is now."""
        return self.look().nodes[self.node]

    def take_out(self, why: str, look: Look) -> None:
        """Drain the node, unless somebody else keeps it out of use already."""
        node = look.nodes[self.node]
        if nodes.set_by_somebody(node):
            self.kept = node
        else:
            self._left = read_reason(node.reason).text if nodes.is_drained(node.state) else ""
            self.drain(why)

    def drain(self, why: str) -> None:
        """Drain the node, or give it another reason."""
        self.ours = nodes.our_reason(why, self._run)
        self._cluster.tell(nodes.drain(self.node, self.ours))

    def lost(self) -> str:
        """Return why the node must not be rebooted: what somebody else made of it since it was taken out, "" for
        nothing. It is theirs then, and we change nothing of it any more."""
        if not self.ours and not self.kept:
            return ""
        node = self.now()
        if nodes.is_rebooting(node.state):
            # Another run of ours gets its reason back, by which it knows its own node again.
            self.ours, self.kept = self.ours if self._left else "", None
            return "Slurm reboots it already, for somebody else or another run"
        problem = self._taken(node)
        if problem:
            self.ours, self.kept = "", None
        return problem

    def _taken(self, node: SlurmNode) -> str:
        """Return what somebody made meanwhile of the node, be it ours or kept for somebody, "" for nothing."""
        return nodes.not_ours_any_more(node, read_reason(self.kept.reason).text if self.kept else self.ours)

    def reboot(self) -> str:
        """Reboot the node through Slurm. Return "" where Slurm took it, else why it cannot: the site must have set
        that up, its slurmd must be there to hear of it, and the account must be allowed to ask."""
        look = self.look()
        self._started = look.nodes[self.node].started
        if not look.reboot_program:
            return "Slurm has no RebootProgram"
        if not nodes.answers(look.nodes[self.node].state):
            return "slurmd does not answer there"
        try:
            self._cluster.tell(nodes.reboot(self.node))
        except Trouble as trouble:
            return trouble.problems[0].found or trouble.problems[0].what
        return ""

    def forget_reboot(self) -> None:
        """Where Slurm has not begun yet, it must not reboot the node later, when nobody expects it."""
        with suppress(Trouble):  # it has begun, or nobody had asked it
            self._cluster.tell(nodes.cancel_reboot(self.node))

    def keep_out(self, why: str) -> None:
        """Drain a node again that lost its drain while it boots: where that takes longer than ResumeTimeout, Slurm
        makes it DOWN and nothing else (seen with 22.05), and would take it back into use when its slurmd registers,
        before anybody looked at it."""
        cluster = self._cluster.impatient
        with suppress(Trouble):  # Slurm is asked again, and after the boot in any case
            now = cluster.look(self.node).nodes.get(self.node)
            if not now or nodes.is_drained(now.state) or self._taken_down(now):
                return
            if self.kept and nodes.is_drained(self.kept.state):
                cluster.tell(nodes.drain(self.node, read_reason(self.kept.reason).text))
            elif not self.kept:
                self.ours = nodes.our_reason(why, self._run)
                cluster.tell(nodes.drain(self.node, self.ours))

    def _taken_down(self, node: SlurmNode) -> bool:
        """Whether somebody has the node down for a reason of theirs."""
        return nodes.is_down(node.state) and bool(self._taken(node))

    def hold(self, why: str) -> str:
        """Look at a node that returned and return what is wrong, "" for nothing. One that Slurm has taken back into
        use is drained again at once."""
        node = self.now()
        if not self.kept and not nodes.is_drained(node.state) and not self._taken_down(node):
            self.drain(why)
        # Resumed before that, Slurm would take it down at once, with the jobs that have started there.
        known = self.kept or nodes.has_registered(node, self._started)
        return "" if known else f"its slurmd has not registered since (node {node.state})"

    def bring_back(self) -> str:
        """Resume a node that we drained, leave any other as it was; return what is to be said of that, "" for
        nothing."""
        if self.kept:
            return self._restore(self.kept) or f"stays {self.kept.state.lower()}: {read_reason(self.kept.reason).text}"
        if self.ours:
            if taken := nodes.not_ours_any_more(self.now(), self.ours):
                self.ours = ""
                return taken
            self._cluster.resume(self.node)
            self.ours = ""
        return ""

    def put_back(self) -> None:
        """Leave the node as it was found: resumed, drained by somebody else, or left drained by an earlier run of
        ours."""
        if self.ours and self._left:
            if not nodes.not_ours_any_more(self.now(), self.ours):
                self._cluster.tell(nodes.drain(self.node, self._left))
        else:
            self.bring_back()

    def leave(self, why: str) -> None:
        """Leave the node out of use with a reason that says why, as far as Slurm can be told; one that somebody else
        keeps, as it was."""
        with suppress(Trouble):  # the outcome says why in any case
            if self.kept:
                self._restore(self.kept)
            elif self.ours and not nodes.not_ours_any_more(self.now(), self.ours):
                self.drain(why)

    def _restore(self, kept: SlurmNode) -> str:
        """Give a node back its reason, and its drain: Slurm writes into the one, and takes back the other when a
        node returns. Where somebody gave it another reason meanwhile, that one stays; return what is to be said of
        that, "" for nothing."""
        reason, now = read_reason(kept.reason).text, self.now()
        taken = self._taken(now)
        if taken and taken != nodes.BACK_IN_USE:  # a node that was rebooted is back in use without anybody's doing
            return taken
        if not nodes.is_out_of_use(now.state):
            self._cluster.tell(nodes.drain(self.node, reason))
        elif read_reason(now.reason).text != reason or " : reboot " in now.reason:
            self._cluster.tell(nodes.give_reason(self.node, reason))
        return ""
