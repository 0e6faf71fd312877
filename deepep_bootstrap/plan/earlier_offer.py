"""A run that sees only some of the hosts that an offer is for: what depends on all of them stays as it was. Pure.

One node that is repaired with --limit, or one that is down, must not change the modulefiles of the others: an interface between hosts,
a GID index that all have, the architectures of all GPUs cannot be derived from a part of them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.inventory.hostsfile import Inventory
from deepep_bootstrap.inventory.network_env import Derived, ascending, short_name
from deepep_bootstrap.inventory.profiles import AUTO
from deepep_bootstrap.prefix.offer import Offer, StackRecord, read_offer


@dataclass(frozen=True)
class Earlier:
    """What the prefix offers now, and a stack's record in it (None where there is none yet), the hosts that the offer was made for,
    and those of them that this run does not see."""

    offer: Offer | None = None
    record: StackRecord | None = None
    hosts: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()

    @property
    def decides(self) -> bool:
        """Return whether what depends on all hosts has to stay as it is."""
        return self.record is not None and bool(self.absent)


def earlier(inventory: Inventory, facts: Collection[str], manifest: str, stack: str) -> Earlier:
    """Return what is offered of a stack by the generation whose manifest.json has the text `manifest` ("" for none yet).

    A host that is no longer in the hosts file is not absent but gone. A node set on the command line says nothing about the others.
    """
    offer = read_offer(manifest)
    if offer is None:
        return Earlier()
    made_for = tuple(str(name) for name in json.loads(manifest).get("hosts", ()))
    roles = {host.name: host.role for host in (*inventory.hosts, *inventory.left_out)}
    others = "gpu" if inventory.path == "--hosts" else ""
    absent = tuple(name for name in made_for if name not in facts and roles.get(name, others) == "gpu")
    return Earlier(offer, offer.stacks.get(stack), made_for, absent)


def keep(derived: Derived, known: Earlier, facts: Mapping[str, Facts], profile: str) -> Derived:
    """Return `derived` with what the earlier offer says in place of what a part of the hosts suggests; `facts` are the GPU hosts seen now,
    `profile` is the setting of the hosts file, which decides where it names another profile than before.

    A host that is new adds what is particular to it, and its architecture.
    """
    record = known.record
    if record is None or not known.decides or profile not in {AUTO, record.profile}:
        return derived
    new = {short_name(name, seen) for name, seen in facts.items() if name not in known.hosts}
    own = {node: {**derived.environment, **derived.by_host.get(node, {})} for node in new}
    particular = {
        node: {name: value for name, value in values.items() if value and record.environment.get(name) != value}
        for node, values in own.items()
    }
    return replace(
        derived,
        profile=record.profile,
        why=f"as it was: {fold(known.absent)} cannot be asked now",
        environment=record.environment,
        by_host={**record.by_host, **{node: values for node, values in particular.items() if values}},
        by_kind=record.by_kind,
        gib=record.gib,
        archs=ascending({*record.archs, *derived.archs}),
        notes=(*derived.notes, f"{fold(known.absent)}: not seen by this run, so the settings of all hosts stay as they are offered now"),
    )
