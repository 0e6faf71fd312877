"""What build sessions left that are gone: Slurm allocations, scratch folders on hosts, descriptions in the store. Each
host judges its own; recipes/prefix/orphans.sh looks and removes there."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.recipes import compose, last_lines
from deepep_bootstrap.core.records import RecordForm, Records, read_records
from deepep_bootstrap.inventory import forms
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.survey import Survey
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Job, Reply, Transport

RECIPE = ("lib.sh", "prefix/lib/owner.sh", "prefix/lib/living.sh", "prefix/lib/scratch.sh", "prefix/orphans.sh")
LIMIT = 300.0
"""Seconds for a look or a removal: three heartbeats of silence, three questions to a Slurm that may not answer, and the
removal of gigabytes."""

ALLOCATION, SCRATCH, OWNER = "allocation", "scratch", "owner"


class Orphan(Struct, frozen=True):
    """One thing that a session left. `kind` is "allocation", "scratch" or "owner", `host` the one that says so, `name`
    the number of a Slurm job, a folder of the host, or a file in PREFIX/store; `detail` whose it is and what becomes of
    it. `dead` is whether that host knows that the session is gone; else nobody who was asked knows."""

    kind: str
    host: str
    name: str
    detail: str
    dead: bool = True

    def __str__(self) -> str:
        what = {ALLOCATION: "Slurm job", SCRATCH: "scratch", OWNER: "store"}[self.kind]
        return f"{what} {self.name} ({self.detail})"


class Orphans(Struct, frozen=True):
    """What was found on some hosts; `ending` are numbers of cancelled jobs whose nodes are not free yet, `unasked` says
    which hosts, or whose Slurm, did not answer."""

    found: tuple[Orphan, ...] = ()
    ending: tuple[str, ...] = ()
    unasked: tuple[Problem, ...] = ()

    @property
    def dead(self) -> tuple[Orphan, ...]:
        """What may be taken away."""
        return tuple(orphan for orphan in self.found if orphan.dead)

    def jobs_on(self, host: str) -> set[str]:
        """The numbers of the dead allocations of `host`, which speaks for itself alone."""
        return {orphan.name for orphan in self.dead if (orphan.kind, orphan.host) == (ALLOCATION, host)}

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts on which there is something to take away."""
        return tuple(dict.fromkeys(orphan.host for orphan in self.dead if orphan.kind != OWNER))


class OrphanRequest(Struct, frozen=True):
    """Where to look: the prefix, the texts of recipes, and the user who builds ("" for the connection's own)."""

    prefix: str
    recipes: Mapping[str, str]
    user: str = ""

    def job(self, word: str) -> Job:
        """Return the recipe as a job: `look`, `jobs` or `remove`."""
        env, script = {"PREFIX": self.prefix}, compose(self.recipes, *RECIPE)
        looks = word == "look"
        return Job(script, args=(word,), env=env, user=self.user, watched=True, timeout=LIMIT, anywhere=looks)


def find_orphans(transport: Transport, request: OrphanRequest, hosts: Sequence[Host]) -> Orphans:
    """Return what dead sessions left on `hosts`; changes nothing. What is on no host that was asked is told as such."""
    answers: dict[str, Records] = {}
    unasked: list[Problem] = []
    for name, reply in transport.run_all(hosts, lambda _: request.job("look")).items():
        try:
            answers[name] = _read(reply, forms.ORPHANS, name)
        except Trouble as trouble:
            unasked.extend(trouble.problems)
    if silent := [name for name, records in answers.items() if records.text("slurm")]:
        what = "Slurm does not answer, so no allocation of a dead build can be seen"
        unasked.append(Problem(fold(silent), what, try_="scontrol ping"))
    found = [orphan for name, records in answers.items() for orphan in _dead(name, records)]
    ending = {number for records in answers.values() for number in records.words("ending")}
    return Orphans((*found, *_unknown(answers, found)), tuple(sorted(ending)), tuple(unasked))


def _dead(host: str, records: Records) -> Iterable[Orphan]:
    for number, state, nodes, who in records.rows("job"):
        yield Orphan(ALLOCATION, host, number, f"{_state(state, nodes)}, of {who}")
    for folder, who in records.rows("scratch"):
        yield Orphan(SCRATCH, host, folder, f"of {who}")
    for name, who in records.rows("owner"):
        yield Orphan(OWNER, host, name, f"of {who}")


def _state(state: str, nodes: str) -> str:
    return f"{state} on {nodes}" if nodes else state


def _unknown(answers: Mapping[str, Records], found: Iterable[Orphan]) -> Iterable[Orphan]:
    """Return what no host that was asked can judge, each once."""
    known = {orphan.name for orphan in found}
    known |= {number for records in answers.values() for key in ("living", "ending") for number in records.words(key)}
    names = {records.text("host") for records in answers.values()}
    left: dict[str, Orphan] = {}
    for host, records in answers.items():
        for number, state, nodes, folder in records.rows("unknown"):
            detail = f"{_state(state, nodes)}, asked for in {folder}, which is on no host that was asked"
            left.setdefault(number, Orphan(ALLOCATION, host, number, detail, dead=False))
        for name, whose, who in records.rows("elsewhere"):
            detail = f"of {who}, a host that was not asked"
            left.setdefault(name, Orphan(OWNER, host, name, detail, dead=False))
            known |= {name} if whose in names else set()
    return [orphan for name, orphan in left.items() if name not in known]


def remove_orphans(transport: Transport, request: OrphanRequest, hosts: Sequence[Host]) -> tuple[Problem, ...]:
    """Cancel the allocations and remove the scratch folders of dead sessions on `hosts`; return what could not be done.
    What they left in the store goes with `invoke gc`."""
    problems: list[Problem] = []
    for name, reply in transport.run_all(hosts, lambda _: request.job("remove")).items():
        try:
            stuck = _read(reply, forms.ORPHANS_REMOVED, name).words("stuck")
        except Trouble as trouble:
            problems.extend(trouble.problems)
            continue
        what = "what a dead build left cannot be removed"
        reason = last_lines(reply.err) if isinstance(reply, Reply) else ""
        problems += [Problem(f"{name} {folder}", what, reason, try_="invoke gc once Slurm answers") for folder in stuck]
    return tuple(problems)


def without_dead_jobs(transport: Transport, survey: Survey, recipes: Mapping[str, str]) -> tuple[Survey, Orphans]:
    """Return the survey with the allocations of our dead builds left out of the hosts' jobs, so that such a host counts
    as free; and what they are. Hosts are asked only where Slurm knows of a build's allocation on them."""
    request = OrphanRequest(survey.prefix, recipes, survey.inventory.settings.build_user)
    clients = [host for host in survey.reached if survey.facts[host.name].slurm.works]
    busy = [host for host in clients if survey.facts[host.name].slurm.jobs]
    if not busy:
        return survey, Orphans()
    try:
        ours = set(
            _read(transport.run(clients[0], request.job("jobs")), forms.ORPHAN_JOBS, clients[0].name).words("job")
        )
    except Trouble:
        return survey, Orphans()  # Slurm does not answer: its jobs count
    hosts = [host for host in busy if ours & {*survey.facts[host.name].slurm.jobs}]
    orphans = find_orphans(transport, request, hosts) if hosts else Orphans()
    left = {
        host.name: _without_jobs(survey.facts[host.name], ours & ({*orphans.ending} | orphans.jobs_on(host.name)))
        for host in hosts
    }
    return replace(survey, facts={**survey.facts, **left}), orphans


def _without_jobs(facts: Facts, gone: Collection[str]) -> Facts:
    left = tuple(job for job in facts.slurm.jobs if job not in gone)
    return replace(facts, slurm=replace(facts.slurm, jobs=left))


def remedy(flags: Flags) -> str:
    """Return the command that takes away what dead builds left on the same hosts."""
    given = [(name, str(getattr(flags, name))) for name in ("hosts", "limit", "prefix")]
    return shlex.join(["invoke", "gc", *(f"--{name}={value}" for name, value in given if value)])


def by_hand(orphan: Orphan) -> str:
    """Return what a person may do about something that nobody who was asked can judge."""
    if orphan.kind == ALLOCATION:
        return f"scancel {orphan.name}, if nobody builds there"
    return "the same command with that host, or invoke gc, which waits whether its owner is silent"


def _read(reply: Reply | Trouble, form: RecordForm, host: str) -> Records:
    if isinstance(reply, Trouble):
        raise reply
    if reply.code:
        raise Trouble(Problem(host, "what dead builds left cannot be seen there", last_lines(reply.said)))
    return read_records(reply.out, form, host, "orphans.sh")
