"""Which nodes Slurm starts jobs on now, and what to do about the others. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from deepep_bootstrap.core.errors import Problem
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.slurm import commands


def out_of_service(facts: Facts, reservation: str = "") -> str:
    """Return why a job would wait on this host without end, such as `idle+drain in Slurm`; "" for a node in service, be it full, and for
    a host without Slurm. Jobs may start in `reservation` ("" for none)."""
    seen = facts.slurm
    return f"{seen.state.lower()} in Slurm" if seen.works and seen.node and not commands.is_usable(seen.state, reservation) else ""


def no_job_starts(hosts: Mapping[str, Facts], reservation: str, what: str) -> Problem:
    """Return the problem that nothing can be done (`what` says the consequence) on `hosts`, which are all out of service."""
    states = dict.fromkeys(out_of_service(facts, reservation) + _reason(facts) for facts in hosts.values())
    stopped = [facts.slurm.node for facts in hosts.values() if not commands.is_usable(facts.slurm.state, "any")]
    remedy = f"scontrol update nodename={commands.fold(stopped)} state=resume, once it is in order"
    if not stopped:
        remedy = "sbatch_args=--reservation=NAME on a defaults line of the hosts file"
    return Problem(fold(hosts), f"Slurm starts no jobs there, so {what}", ", ".join(states), "a node in service", remedy)


def _reason(facts: Facts) -> str:
    return f": {facts.prepared.slurm_reason}" if facts.prepared.slurm_reason else ""
