"""The place of a test: the Slurm client that submits it, or without Slurm the hosts it runs on."""

from __future__ import annotations

from msgspec import Struct

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.inventory.survey import Survey
from deepep_bootstrap.plan import decisions
from deepep_bootstrap.prefix.offer import control_has_slurm
from deepep_bootstrap.prefix.test_kinds import Kind
from deepep_bootstrap.remote.host import THIS_MACHINE, Host
from deepep_bootstrap.slurm import commands
from deepep_bootstrap.slurm.identity import choose_slurm_host

SLURM, SSH = "slurm", "ssh"
VIAS = (SLURM, SSH)
EVERY = frozenset(("pairs",))
"""Kinds that take every node there is unless told how many."""


class Placement(Struct, frozen=True):
    """Where a test runs. `client` is the host whose sbatch submits it, None without Slurm; `hosts` are those it runs
    on then, `count` how many nodes it takes, and `named` the nodes Slurm has to take ("" for any). `notes` are for
    people."""

    client: Host | None
    count: int
    hosts: tuple[Host, ...] = ()
    named: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """Return the host or hosts that begin it."""
        return self.client.name if self.client else fold(host.name for host in self.hosts)


def find_placement(
    survey: Survey, kind: Kind, nodes: int, *, via: str = "", limited: bool = False, use_busy: bool = False
) -> Placement:
    """Return where a test of `kind` runs on `nodes` nodes (0: as many as it takes by default). Slurm does it where
    it runs, unless `via` says otherwise; with `limited` it may take the hosts of the survey only. Trouble where it
    cannot run."""
    if via and via not in VIAS:
        raise Trouble(Problem("--via", "unknown value", via, " or ".join(VIAS)))
    client = None if via == SSH else slurm_client(survey)
    if client is not None:
        return _with_slurm(survey, kind, nodes, client, limited=limited)
    if via == SLURM:
        raise Trouble(Problem(survey.inventory.path, "no Slurm client on any host", wanted="sbatch", try_="--via=ssh"))
    return _without_slurm(survey, kind, nodes, use_busy=use_busy)


def _gpu_hosts(survey: Survey) -> dict[str, Facts]:
    return {host.name: survey.facts[host.name] for host in survey.reached if host.role == "gpu"}


def _count_nodes(kind: Kind, nodes: int, most: int) -> int:
    """Return how many of `most` nodes a test takes; Trouble where its kind cannot run on so many."""
    by_default = max(most, kind.fewest) if kind.name in EVERY else kind.nodes
    count = nodes or by_default
    kind.check_nodes(count)
    return count


def _with_slurm(survey: Survey, kind: Kind, nodes: int, client: Host, *, limited: bool) -> Placement:
    reservation = _reservation(survey)
    states = [seen.slurm for seen in _gpu_hosts(survey).values()]
    known = [slurm.node for slurm in states if slurm.node and commands.is_usable(slurm.state, reservation)]
    count = _count_nodes(kind, nodes, len(known))
    if limited and len(known) < count:
        raise Trouble(
            Problem("--limit", f"too few nodes of Slurm for the {kind.name} test", str(len(known)), str(count))
        )
    return Placement(client, count, named=tuple(known[:count]) if limited else ())


def slurm_client(survey: Survey) -> Host | None:
    """Return the host that submits jobs, as a plan chooses it; None without Slurm."""
    markers = {seen.prefix.id for seen in survey.facts.values()}
    on_control = control_has_slurm(survey.prefix, markers.pop() if len(markers) == 1 else "")
    try:
        name = choose_slurm_host(survey.inventory, survey.facts, control_has_slurm=on_control)
    except Trouble as trouble:
        raise Trouble(*trouble.problems, *survey.problems) from None
    if name == THIS_MACHINE.name:
        return THIS_MACHINE
    return survey.host(name) if name else None


def _reservation(survey: Survey) -> str:
    return commands.reservation_of(survey.inventory.settings.sbatch_args)


def _busy(survey: Survey, seen: Facts) -> str:
    return decisions.busy_with(seen, _reservation(survey))


def _without_slurm(survey: Survey, kind: Kind, nodes: int, *, use_busy: bool) -> Placement:
    busy = {name: _busy(survey, seen) for name, seen in _gpu_hosts(survey).items()}
    left = {} if use_busy else {name: why for name, why in busy.items() if why}
    free = busy.keys() - left.keys()
    hosts = tuple(host for host in survey.reached if host.name in free)
    notes = tuple(f"{name} is busy ({why}) and is left alone" for name, why in left.items())
    if not busy:
        raise Trouble(
            Problem(survey.inventory.path, "no GPU host answered", wanted="a host with role=gpu to run the test on")
        )
    count = _count_nodes(kind, nodes, len(hosts))
    if len(hosts) >= count:
        return Placement(None, count, hosts[:count], notes=notes)
    found = "; ".join([f"{len(hosts)} of {len(busy)}", *notes])
    fewer = f"--nodes={len(hosts)}, " if kind.fewest <= len(hosts) and hosts else ""
    remedy = "later, or --on-busy-host=use" if left else f"{fewer}more hosts, or another --kind"
    raise Trouble(Problem(fold(busy), f"too few free hosts for the {kind.name} test", found, str(count), remedy))
