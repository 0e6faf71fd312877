"""Hosts that are not finished: those that wait for a reboot, and the nodes that this program left drained, as Slurm
reports them, also those whose hosts do not answer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

from deepep_bootstrap.bootstrap.reboot.control import Cluster, Line
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.inventory.survey import Survey
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.slurm.nodes import MARK, is_drained, is_ours, is_out_of_use, read_reason


def waiting_for_reboot(survey: Survey) -> dict[str, str]:
    """Return, by host, what works only after a reboot: host recipes that changed something since the last one, or
    what the distribution asks one for."""
    found = {}
    for name, facts in survey.facts.items():
        recipes = [stamp.recipe for stamp in facts.prepared.stamps if stamp.boot_id == facts.boot_id]
        if recipes or facts.prepared.reboot_required:
            found[name] = ", ".join(recipes) or "the distribution asks for it"
    return found


def drained_by_us(survey: Survey) -> dict[str, str]:
    """Return, by host, the reason with which this program drained its node."""
    return {
        name: facts.prepared.slurm_reason
        for name, facts in survey.facts.items()
        if is_ours(facts.prepared.slurm_reason)
    }


def drained_and_silent(transport: Line, survey: Survey, slurm_at: Sequence[Host]) -> dict[str, str]:
    """Return, by host, the reasons of nodes that this program left drained and whose host does not answer, as after
    a reboot from which it did not return. Slurm is asked on the first host of `slurm_at` that reaches it; it knows a
    host by its name or the part before the first dot, and can say nothing of one that it knows otherwise, or not at
    all."""
    names = [host.name for host in survey.inventory.hosts if host.role == "gpu" and host.name not in survey.facts]
    silent = {name.partition(".")[0]: name for name in names} | {name: name for name in names}
    if not silent or not slurm_at:
        return {}
    with suppress(Trouble):  # the hosts themselves are told as those that do not answer
        nodes = Cluster(transport, slurm_at, patience=0).known(*silent)
        # Without its drain too: Slurm takes that from a node whose boot takes longer than ResumeTimeout.
        ours = [node for node in nodes if is_out_of_use(node.state) and is_ours(node.reason)]
        return {silent.get(node.name) or silent.get(node.host, node.name): node.reason for node in ours}
    return {}


def left_behind(transport: Line, survey: Survey, slurm_at: Sequence[Host], *, but: Collection[str]) -> dict[str, str]:
    """Return, by host, why this program keeps nodes drained, but for the hosts `but`: those on which an earlier wave
    failed, or which another run works on."""
    known = {
        host: reason for host, reason in drained_by_us(survey).items() if is_drained(survey.facts[host].slurm.state)
    }
    found = known | drained_and_silent(transport, survey, slurm_at)
    return {
        host: read_reason(reason).text.removeprefix(MARK).strip() for host, reason in found.items() if host not in but
    }
