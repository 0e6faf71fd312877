"""The examination of a cluster for the verbs that show its findings, `doctor` and `report --cluster`: the hosts looked
at for each stack, as the offer, the recipes, a user and Slurm see them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from deepep_bootstrap.bootstrap.orphans import OrphanRequest, Orphans, by_hand, find_orphans, remedy
from deepep_bootstrap.bootstrap.planning import Wanted, check_hosts, look_at_hosts, request_for
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.doctor import user_view
from deepep_bootstrap.doctor.examine import Checks, case_of, examine, join, ordered
from deepep_bootstrap.doctor.findings import BLOCKING, NOTE, WARNING, Case, Finding, HostView
from deepep_bootstrap.doctor.user_view import UserView
from deepep_bootstrap.inventory.flags import OWN_NCCL, Flags
from deepep_bootstrap.inventory.survey import Survey, fold_problems, read_tree
from deepep_bootstrap.lock import compatibility
from deepep_bootstrap.lock.model import Lock
from deepep_bootstrap.plan.decisions import PlanRequest
from deepep_bootstrap.prefix.access import WANTED, candidates, find_unsafe
from deepep_bootstrap.prefix.defects import Defect, find_defects
from deepep_bootstrap.prefix.generations import PrefixHandle
from deepep_bootstrap.prefix.offer import command_for, find_offer, gpu_machines, of_machine, stack_names

if TYPE_CHECKING:
    from deepep_bootstrap.remote.fleet import ConnectionPool


class Judged(Struct, frozen=True):
    """One stack that the hosts are judged by: the flags that would bootstrap it, what was seen for it, what it is
    looked at for, and what the checks of the host recipes say."""

    flags: Flags
    survey: Survey
    request: PlanRequest
    case: Case
    checks: Checks


class Examination(Struct, frozen=True):
    """What an examination found: the stacks that the hosts were judged by, the findings with the worst first, what the
    users of jobs saw by host, and what could not be looked at."""

    judged: tuple[Judged, ...]
    findings: tuple[Finding, ...]
    looks: Mapping[str, UserView]
    problems: tuple[Problem, ...]


def examine_cluster(flags: Flags, transport: ConnectionPool, survey: Survey, lock: Lock, user: str = "") -> Examination:
    """Return what is wrong with the hosts for each stack that is meant, as `user` sees it ("" for the connection's
    own). Changes nothing.

    Without --stack the hosts are judged by each stack that the prefix offers, by the lock's default one where nothing
    is offered."""
    defects, unread = find_defects(flags, transport, survey)
    asked = list(stacks_to_judge(flags, lock, survey))
    problems = [*survey.problems, *unread]
    judged = tuple(judge(one, transport, survey, (lock, defects, problems)) for one in asked)
    recipes, builder = judged[0].request.recipes, survey.inventory.settings.build_user
    orphans = find_orphans(transport, OrphanRequest(survey.prefix, recipes, builder), survey.reached)
    exposed, unlooked = who_may_change(transport, survey, judged)
    problems.extend(unlooked)
    looks, unseen = ask_user(transport, survey, judged[0].request, user)
    findings = findings_of(judged, looks, as_another=bool(user)) + not_in_lock(survey, lock, flags)
    findings += exposed + left_behind(orphans, flags, [one.request.stack.name for one in judged])
    findings = ordered(findings, [host.name for host in survey.inventory.hosts])
    return Examination(judged, findings, looks, (*dict.fromkeys(problems), *fold_problems(unseen, survey.inventory)))


def stacks_to_judge(flags: Flags, lock: Lock, survey: Survey) -> Iterator[Flags]:
    """Yield the flags with which each stack that the hosts are judged by would be bootstrapped: with the Python that
    it was made with, where it came from outside."""
    offer = find_offer(survey)
    each = [of_machine(offer, machine) for machine in gpu_machines(survey)] if offer else []
    records = {name: record for known in reversed(each) for name, record in known.items()}
    offered = [name for name in records if name in lock.stacks]
    names = [flags.stack] if flags.stack else offered
    for name in names or [lock.default_stack]:
        record = records.get(name)
        python = flags.python or (record.external_python if record else "")
        nccl = flags.nccl or (OWN_NCCL if record and record.own_nccl and python == record.external_python else "")
        # Where there is nothing to tell apart, the advice stays as short as what was typed.
        plain = not flags.stack and name == lock.default_stack and len(names) < 2
        yield replace(flags, stack="" if plain else name, python=python, nccl=nccl)


def judge(
    flags: Flags, transport: ConnectionPool, survey: Survey, known: tuple[Lock, Sequence[Defect], list[Problem]]
) -> Judged:
    """Return what is seen and wanted of one stack; what goes wrong on the way is added to the problems. Trouble where
    the lock's stack breaks a rule. Hosts are asked again where the stack's Python is an external one that they were
    not asked about."""
    lock, defects, problems = known
    stack = lock.stacks[flags.stack or lock.default_stack]
    if broken := compatibility.check_lock(lock, read_tree(flags.root / "env"), (stack.name,)):
        raise Trouble(*broken)
    if flags.python and not any(seen.external_python for seen in survey.facts.values()):
        survey = look_at_hosts(flags, transport, survey.inventory, survey.prefix)
        problems.extend(survey.problems)
    request = request_for(flags, survey, Wanted.of(flags, lock, stack))
    case = case_of(request, survey.facts, command_for(flags))
    checks, unchecked = ask_recipes(transport, survey, request)
    problems.extend(fold_problems(unchecked, survey.inventory))
    return Judged(
        flags,
        survey,
        request,
        replace(case, defects=tuple(each for each in defects if each.stack == stack.name)),
        checks,
    )


def findings_of(judged: Sequence[Judged], looks: Mapping[str, UserView], *, as_another: bool) -> tuple[Finding, ...]:
    """Return what was found for all stacks, what they share once."""
    by_stack = []
    for one in judged:
        case = replace(one.case, as_another=as_another)
        facts, hosts = one.survey.facts, one.survey.reached
        seen = [HostView(host.name, host.role, facts[host.name], looks.get(host.name), case) for host in hosts]
        by_stack.append(examine(one.request, case, seen, one.checks))
    return join(by_stack, [host.name for host in judged[0].survey.inventory.hosts])


def not_in_lock(survey: Survey, lock: Lock, flags: Flags) -> tuple[Finding, ...]:
    """Return a note for the offered stacks that this lock does not have, by which nobody can judge the hosts."""
    offer = find_offer(survey)
    missing = (
        []
        if offer is None or flags.stack
        else [record.stack for key in stack_names(offer) if (record := offer.stacks[key]).stack not in lock.stacks]
    )
    why = "The hosts are judged by what the lock says of a stack."
    wanted, fix = (
        f"a lock that has it, not {lock.path}",
        f"--lock={survey.prefix}/current/deepep.lock.toml, from a host that sees it",
    )
    hosts = tuple(host.name for host in survey.reached)
    found = {name: f"stack {name} is offered" for name in missing}
    return tuple(Finding("offered-stack", NOTE, hosts, found[name], wanted, why, fix, (name,)) for name in missing)


def left_behind(orphans: Orphans, flags: Flags, stacks: Sequence[str]) -> tuple[Finding, ...]:
    """Return a warning for each thing that a build left which is gone, or which nobody who was asked knows."""
    why = "An allocation keeps jobs from its node until Slurm's time limit; the rest takes room."
    return tuple(
        Finding(
            "dead-build",
            WARNING,
            (orphan.host,),
            str(orphan),
            "nothing left of a build that is gone",
            why,
            remedy(flags) if orphan.dead else by_hand(orphan),
            tuple(stacks),
        )
        for orphan in orphans.found
    )


def who_may_change(
    transport: ConnectionPool, survey: Survey, judged: Sequence[Judged]
) -> tuple[tuple[Finding, ...], tuple[Problem, ...]]:
    """Return a finding for each path by which somebody else could change what users of the prefix load, as one host
    that sees it says; and why nobody could look."""
    seats = (*candidates(survey.inventory), *survey.reached)
    via = next((host for host in seats if host.name in survey.facts and survey.facts[host.name].prefix.exists), None)
    if via is None:
        return (), ()
    place = PrefixHandle(via, survey.prefix, judged[0].request.recipes, survey.inventory.settings.build_user)
    try:
        unsafe = find_unsafe(transport, place)
    except Trouble as trouble:
        return (), trouble.problems
    why = "Whoever may change the prefix decides what all users load, root's login shell too; bootstrap refuses it."
    stacks = tuple(one.request.stack.name for one in judged)
    hosts = (via.name,)
    found = (Finding("prefix-owner", BLOCKING, hosts, str(each), WANTED, why, each.fix, stacks) for each in unsafe)
    return tuple(found), ()


def ask_recipes(transport: ConnectionPool, survey: Survey, request: PlanRequest) -> tuple[Checks, tuple[Problem, ...]]:
    """Return what the checks of the host recipes say, and why some could not be asked: then the facts alone must do."""
    try:
        return check_hosts(transport, survey.reached, survey.facts, request).checks, ()
    except Trouble as trouble:
        return {}, trouble.problems


def ask_user(
    transport: ConnectionPool, survey: Survey, request: PlanRequest, user: str
) -> tuple[Mapping[str, UserView], list[Problem]]:
    """Return what the user of a job finds on each host, and why nobody could look on others."""
    job = user_view.user_job(request.recipes, survey.prefix, user)
    looks: dict[str, UserView] = {}
    problems: list[Problem] = []
    for name, reply in transport.run_all(survey.reached, lambda host: job).items():
        try:
            if isinstance(reply, Trouble):
                raise reply
            looks[name] = user_view.parse_user_view(reply)
        except Trouble as trouble:
            problems.extend(trouble.problems)
    return looks, problems
