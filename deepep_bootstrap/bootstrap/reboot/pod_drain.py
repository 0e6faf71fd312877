"""One node of Kubernetes taken out of use around a reboot and given back: cordoned by us or, before, by somebody else
whose cordon then stays.
"""

from __future__ import annotations

from contextlib import suppress

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.kube import nodes
from deepep_bootstrap.kube.client import Cluster
from deepep_bootstrap.slurm.nodes import BACK_IN_USE, our_reason

KEEPS_IT = "somebody has cordoned it in Kubernetes, and it stays so"


class PodDrain:
    """The node `node` around a reboot; `run` names the run in its annotation. `ours` is the reason we cordoned it
    with, "" as long as we did not; `kept`: somebody else had. An earlier run may have left it cordoned: that is ours
    too."""

    def __init__(self, cluster: Cluster, node: str, run: str) -> None:
        self.node, self.ours, self.kept = node, "", False
        self._cluster, self._run, self._left = cluster, run, ""

    def take_out(self, why: str) -> None:
        """Cordon the node, unless somebody else has done so already. Raises Trouble."""
        node = nodes.read(self._cluster, self.node)
        if node.cordoned and not node.reason:
            self.kept = True
            return
        self._left = node.reason if node.cordoned else ""
        self._cordon(node, why)

    def _cordon(self, node: nodes.Node, why: str) -> None:
        reason = our_reason(why, self._run)
        nodes.cordon(self._cluster, node, reason)
        self.ours = reason

    def departure(self) -> nodes.Departure:
        """Return what is to become of the pods that are on the node now. Raises Trouble."""
        return nodes.sort_pods(nodes.pods_of(self._cluster, self.node))

    def evict(self, departure: nodes.Departure) -> str:
        """Ask all pods away that may go; return whom we wait for, "" for nobody."""
        waits = [nodes.evict(self._cluster, pod) for pod in departure.evict]
        held = [words for words in waits if words]
        waiting = (*departure.running, *departure.evict)
        if not waiting:
            return ""
        return f"pod {nodes.some(waiting)}" + (f" ({held[0]})" if held else "")

    def lost(self) -> str:
        """Return what somebody made of the node since it was taken out, "" for nothing. It is theirs then."""
        if not self.ours and not self.kept:
            return ""
        node = nodes.read(self._cluster, self.node)
        taken = "" if node.cordoned else BACK_IN_USE
        if self.ours and not taken and node.reason != self.ours:
            taken = f"another run keeps it out of use now: {node.reason}" if node.reason else KEEPS_IT
        if taken:
            self.ours, self.kept = "", False
        return taken

    def missing(self, boot_id: str) -> str:
        """Return what is wrong with a node that returned in the boot `boot_id`, "" for nothing."""
        node = nodes.read(self._cluster, self.node)
        if node.boot_id != boot_id:
            return f"kubelet has not reported since (node {self.node})"
        return "" if node.ready else f"node {self.node} of Kubernetes is not ready"

    def bring_back(self) -> str:
        """Uncordon a node that we cordoned, leave any other as it was; return what is to be said of that, "" for
        nothing."""
        if self.kept:
            return KEEPS_IT
        if self.ours:
            if taken := self.lost():
                return taken
            nodes.uncordon(self._cluster, nodes.read(self._cluster, self.node))
            self.ours = ""
        return ""

    def put_back(self) -> None:
        """Leave the node as it was found: in use, cordoned by somebody else, or left cordoned by an earlier run."""
        if self.ours and self._left:
            if not self.lost():
                nodes.cordon(self._cluster, nodes.read(self._cluster, self.node), self._left)
        else:
            self.bring_back()

    def leave(self, why: str) -> None:
        """Leave a node that we cordoned so, with a reason that says why, as far as the cluster can be told."""
        with suppress(Trouble):  # the outcome says why in any case
            if self.ours and not self.lost():
                self._cordon(nodes.read(self._cluster, self.node), why)
