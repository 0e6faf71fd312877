"""What the prefix offers, for verbs that judge by it: records of stacks, their known defects, and the command that
offers anew."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from deepep_bootstrap import history, store
from deepep_bootstrap.defects import Defect, defects
from deepep_bootstrap.errors import Problem, Trouble
from deepep_bootstrap.generations import Place
from deepep_bootstrap.reach import candidates
from deepep_bootstrap.remote import Door
from deepep_bootstrap.store import Offer, StackRecord
from deepep_bootstrap.survey import Flags, Survey, read_tree


def find_offer(survey: Survey) -> Offer | None:
    """Return what the prefix offers now, as any host that sees it says; None where there is nothing yet."""
    offers = (store.read_offer(facts.prefix.manifest) for facts in survey.facts.values())
    return next((offer for offer in offers if offer is not None and offer.stacks), None)


def current_offer(survey: Survey) -> Offer:
    """Return what the prefix offers now; Trouble where there is nothing yet."""
    if (offer := find_offer(survey)) is not None:
        return offer
    raise Trouble(
        Problem(
            survey.prefix,
            "nothing is offered there",
            "no generation on any host that answered",
            "one",
            "invoke bootstrap",
        )
    )


def stack_names(offer: Offer) -> tuple[str, ...]:
    """Return the names of all offered stacks, the default one first."""
    return tuple(sorted(offer.stacks, key=lambda name: (name != offer.default_stack, name)))


def offered_stacks(survey: Survey, stack: str) -> tuple[StackRecord, ...]:
    """Return the record of the stack that was asked for, or those of all that are offered, the default one first."""
    offer = current_offer(survey)
    if stack and stack not in offer.stacks:
        raise Trouble(Problem("--stack", "this stack is not offered", found=stack, wanted=" or ".join(offer.stacks)))
    return tuple(offer.stacks[name] for name in ([stack] if stack else stack_names(offer)))


def offered_stack(survey: Survey, stack: str) -> StackRecord:
    """Return the record of the stack that was asked for, else of the default one."""
    return offered_stacks(survey, stack)[0]


def command_for(flags: Flags) -> str:
    """Return the command that prepares the same hosts, as a person would type it."""
    given = [(name, str(getattr(flags, name))) for name in ("hosts", "limit", "lock", "stack", "prefix", "python")]
    given += [("mirror", value) for value in flags.mirror]
    return shlex.join(["invoke", "bootstrap", *(f"--{name}={value}" for name, value in given if value)])


def find_defects(flags: Flags, door: Door, survey: Survey) -> tuple[tuple[Defect, ...], Sequence[Problem]]:
    """Return the known defects of what is offered, after a look at the prefix through one host that sees it, and why
    nobody could look."""
    hosts = [host for host in (*candidates(survey.inventory), *survey.inventory.hosts) if host.name in survey.facts]
    via = next((host for host in hosts if survey.facts[host.name].prefix.manifest), None)
    if via is None:
        return (), ()
    try:
        holdings = history.look(door, Place(via, survey.prefix, read_tree(flags.root / "recipes")))
    except Trouble as trouble:
        return (), trouble.problems
    generation = holdings.get(holdings.current)
    command = command_for(replace(flags, stack="", python=""))
    return defects(holdings, generation, read_tree(flags.root / "env"), command) if generation else (), ()
