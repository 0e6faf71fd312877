"""The decisions a plan stands on: which hosts do what, which Python, which toolkit, which entries, which offer. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from deepep_bootstrap.core import recipes
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.fetch.locations import Mirrors
from deepep_bootstrap.inventory import elastic, network_env
from deepep_bootstrap.inventory.facts import Facts, Python, Toolkit
from deepep_bootstrap.inventory.hostsfile import Inventory
from deepep_bootstrap.inventory.profiles import read_profile
from deepep_bootstrap.lock import rules
from deepep_bootstrap.lock.model import Lock, Stack, Wheel
from deepep_bootstrap.plan import earlier_offer, toolkits
from deepep_bootstrap.plan.absences import absences
from deepep_bootstrap.plan.earlier_offer import Earlier
from deepep_bootstrap.plan.external import check_external
from deepep_bootstrap.prefix.entries import Entry, Wanted, deepep_recipe, name_entries
from deepep_bootstrap.prefix.offer import Offer, Site, StackRecord
from deepep_bootstrap.prefix.test_kinds import COPIED
from deepep_bootstrap.slurm import commands, service


@dataclass(frozen=True)
class Request:
    """What is wanted, from the lock, the hosts file and the flags; texts of recipes, templates and profiles by relative path.
    `skip` names host recipes to leave alone ("all" for every one); `mirrors` say from where hosts get the lock's package repositories."""

    lock: Lock
    stack: Stack
    inventory: Inventory
    prefix: str
    recipes: Mapping[str, str]
    templates: Mapping[str, str]
    external_python: str = ""
    on_busy_host: str = "leave"
    control_has_slurm: bool = False
    skip: tuple[str, ...] = ()
    mirrors: Mirrors = field(default_factory=Mirrors)


@dataclass(frozen=True)
class Choice:
    """What was decided. `entries` are in build order; `slurm_host` is "" without Slurm and "@control" for this machine; `absent` are
    hosts that the offer is for and that this run does not see."""

    build_host: str
    prefix_host: str
    slurm_host: str
    slurm_node: str
    target: str
    python: Python
    toolkit: Toolkit
    wheels: tuple[Wheel, ...]
    entries: tuple[Entry, ...]
    record: StackRecord
    offer: Offer
    notes: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()

    def entry(self, kind: str) -> Entry | None:
        """Return the entry of one kind, or None."""
        return next((entry for entry in self.entries if entry.kind == kind), None)


CONTROL = "@control"


def choose(request: Request, facts: Mapping[str, Facts]) -> Choice:
    """Decide everything a plan needs, or raise Trouble with every reason why it cannot be decided."""
    gpu_hosts = {host.name: facts[host.name] for host in request.inventory.hosts if host.role == "gpu" and host.name in facts}
    if not gpu_hosts:
        raise Trouble(Problem(request.inventory.path, "no GPU host answered", found=fold(facts), wanted="at least one host with role=gpu"))
    check_shared(request.prefix, facts)
    notes: list[str] = []
    build_host = choose_build_host(request, gpu_hosts, notes)
    prefix_host = named_host(request, "prefix_host", facts) or build_host
    slurm_host = choose_slurm_host(request, facts)
    known = earlier_offer.earlier(request.inventory, facts, facts[prefix_host].prefix.manifest, request.stack.name)
    derived = network_env.derive(request.inventory.settings.profile, gpu_hosts, request.templates)
    here, source = facts[build_host], request.lock.sources[request.stack.deepep]
    second = deepep_recipe(source) == "deepep-v2"
    derived = elastic.adapt(derived) if second else derived
    derived = earlier_offer.keep(derived, known, gpu_hosts, request.inventory.settings.profile)
    load = f"{request.prefix}/current/env-{request.stack.name}.sh"
    notes.extend((f"profile {derived.profile}: {derived.why}", *derived.notes, *absences(load, build_host, request.inventory, facts)))
    target, python = choose_python(request, gpu_hosts, here, known)
    judge = judge_by(request, derived, target, python)
    theirs = known.record.cuda_home if known.record and known.decides else ""
    toolkit, told = toolkits.choose(toolkits.Wish(request.stack.cuda, build_host, gpu_hosts, judge, compiles=second, path=theirs))
    notes.extend(told)
    wheels = () if request.external_python else request.stack.wheels[target]
    entries = name_entries(Wanted(request.lock, request.stack, request.recipes, derived.archs, here, toolkit, python, target))
    gres = commands.resolve_gres(request.inventory.settings.gres, [seen.slurm.gres for seen in gpu_hosts.values() if seen.slurm.node])
    record = replace(make_record(request, derived, entries, toolkit), python_version=minor_version(python), site=make_site(request, gres))
    return Choice(
        build_host=build_host,
        prefix_host=prefix_host,
        slurm_host=slurm_host,
        slurm_node=here.slurm.node if here.slurm.works else "",
        target=target,
        python=python,
        toolkit=toolkit,
        wheels=wheels,
        entries=entries,
        record=record,
        offer=merge_offer(request, known.offer, record),
        notes=tuple(notes),
        absent=known.absent,
    )


def judge_by(request: Request, derived: network_env.Derived, target: str, python: Python) -> Callable[[Toolkit], rules.Judgement]:
    """Return what says of a toolkit why the stack cannot work with it on these hosts, and remarks."""
    link = read_profile(derived.profile, request.templates).link
    nic_map = any(network_env.MAP in values for values in (derived.environment, *derived.by_host.values()))

    def judge(toolkit: Toolkit) -> rules.Judgement:
        site = rules.Site(toolkit.version, derived.archs, link, "" if target else python.torch, nic_map)
        return rules.check_site(request.lock, request.stack, target, site=site, texts=request.templates)

    return judge


def check_shared(prefix: str, facts: Mapping[str, Facts]) -> None:
    """Raise Trouble when some hosts see another prefix, or none, where others see one."""
    ids: dict[str, list[str]] = {}
    for name, seen in facts.items():
        ids.setdefault(seen.prefix.id, []).append(name)
    if len(ids) > 1:
        views = "; ".join(
            f"{marker[:8] or 'nothing'} on {fold(names)}" for marker, names in sorted(ids.items(), key=lambda item: -len(item[1]))
        )
        odd = min(ids.values(), key=len)
        raise Trouble(
            Problem(
                fold(odd), f"{prefix} is not the same directory everywhere", views, "one shared directory", "mounting it there, or --limit"
            )
        )


def named_host(request: Request, key: str, facts: Mapping[str, Facts]) -> str:
    """Return the host a setting of the hosts file names, or "" where it names none."""
    name: str = getattr(request.inventory.settings, key)
    if name and name not in facts:
        raise Trouble(Problem(f"{request.inventory.path}: {key}", "this host did not answer", found=name))
    return name


def choose_build_host(request: Request, gpu_hosts: Mapping[str, Facts], notes: list[str]) -> str:
    """Return the host to build on: the one the hosts file names, else the first free GPU host."""
    if name := named_host(request, "build_host", gpu_hosts):
        return name
    reservation = commands.reservation_of(request.inventory.settings.sbatch_args)
    free = [name for name, facts in gpu_hosts.items() if not busy_with(facts, reservation)]
    busy = {name: busy_with(facts, reservation) for name, facts in gpu_hosts.items() if name not in free}
    if busy and request.on_busy_host == "leave":
        notes.extend(f"{name} is busy ({why}) and is left alone" for name, why in busy.items())
    if free:
        return free[0]
    able = [name for name, facts in gpu_hosts.items() if not service.out_of_service(facts, reservation)]
    if not able:
        raise Trouble(service.no_job_starts(gpu_hosts, reservation, "nothing can be built"))
    if request.on_busy_host == "use":
        return able[0]
    raise Trouble(
        Problem(
            fold(busy), "every GPU host is busy", next(iter(busy.values())), "one free host to build on", "later, or --on-busy-host=use"
        )
    )


def busy_with(facts: Facts, reservation: str = "") -> str:
    """Return what keeps a host from being used now, or "" for a free host. Under Slurm the allocation decides: jobs make it wait, on a
    drained node it would wait for ever, on a reserved one unless jobs name its `reservation`."""
    if waits := service.out_of_service(facts, reservation):
        return waits
    if facts.slurm.works and facts.slurm.node:
        return f"Slurm jobs {', '.join(facts.slurm.jobs)}" if facts.slurm.jobs else ""
    if facts.slurm.slurmd or (facts.prepared.slurmd_memlock and facts.slurm.version and not facts.slurm.works):
        answer = "Slurm does not answer" if facts.slurm.version else "Slurm's clients are not found"
        why = "Slurm knows no node of that name" if facts.slurm.works else answer
        return f"slurmd runs there, but {why}, so its jobs cannot be seen"
    count = sum(gpu.processes for gpu in facts.gpus)
    return f"{count} GPU processes" if count else ""


def choose_slurm_host(request: Request, facts: Mapping[str, Facts]) -> str:
    """Return where sbatch is run: the named host, this machine, the first host with a working Slurm client, or ""."""
    if name := named_host(request, "slurm_host", facts):
        return name
    if request.control_has_slurm:
        return CONTROL
    working = [name for name, seen in facts.items() if seen.slurm.works and seen.slurm.sbatch]
    logins = {host.name for host in request.inventory.hosts if host.role == "login"}
    return next((name for name in working if name in logins), working[0] if working else "")


def choose_python(request: Request, gpu_hosts: Mapping[str, Facts], here: Facts, known: Earlier) -> tuple[str, Python]:
    """Return target (`cp312-x86_64`; "" for an external Python) and interpreter: the newest that all hosts have, or the one that `known`
    hosts, which cannot be asked now, are known to have."""
    if request.external_python:
        return "", check_external(request.external_python, request.stack, (gpu_hosts, here), request.templates)
    machines = {seen.machine for seen in gpu_hosts.values()}
    if len(machines) > 1:
        raise Trouble(Problem(fold(gpu_hosts), "hosts of different architectures", " and ".join(sorted(machines)), "one", "--limit"))
    theirs = known.record.python_version if known.record and known.decides else ""
    targets = sorted(request.stack.wheels, key=lambda target: (theirs == f"3.{minor_of(target)}", minor_of(target)), reverse=True)
    for target in targets:
        path = f"/usr/bin/python3.{minor_of(target)}"
        fits = target.endswith(f"-{here.machine}") and all(path in [python.path for python in seen.pythons] for seen in gpu_hosts.values())
        if fits:
            return target, next(python for python in here.pythons if python.path == path)
    wanted = " or ".join(f"/usr/bin/python3.{minor_of(target)}" for target in targets)
    raise Trouble(
        *(
            Problem(
                fold([name]),
                f"no Python that stack {request.stack.name} has wheels for is on every host",
                ", ".join(python.path for python in seen.pythons) or "none",
                f"{wanted} ({seen.machine})",
                "installing one of them, or --python=/path/to/python with torch in it",
            )
            for name, seen in gpu_hosts.items()
        )
    )


def minor_of(target: str) -> int:
    """Return 12 for the target `cp312-x86_64`."""
    return int(target.split("-")[0].removeprefix("cp3"))


def minor_version(python: Python) -> str:
    """Return "3.12" for 3.12.3."""
    return ".".join(python.version.split(".")[:2])


def make_site(request: Request, gres: str) -> Site:
    """Return what the sbatch files take from the hosts file."""
    settings = request.inventory.settings
    return Site(settings.partition, settings.account, settings.qos, gres, settings.sbatch_args)


def make_record(request: Request, derived: network_env.Derived, entries: Sequence[Entry], toolkit: Toolkit) -> StackRecord:
    """Return what a generation says of the stack, but for the site and the Python's version."""
    names = {entry.kind: entry.name for entry in entries}
    nccl = next((entry.env["NCCL_VERSION"] for entry in entries if "NCCL_VERSION" in entry.env), "")
    source = request.lock.sources[request.stack.deepep]
    return StackRecord(
        stack=request.stack.name,
        module=f"deepep/{source.version}-{source.rev[:7]}-{request.stack.name}",
        prefix=request.prefix,
        deepep=names["deepep"],
        nvshmem=names["nvshmem"],
        gdrcopy=names.get("gdrcopy", ""),
        python=names.get("python", ""),
        external_python=request.external_python,
        python_version="",
        cuda_home=toolkit.path,
        archs=derived.archs,
        profile=derived.profile,
        environment=derived.environment,
        site=Site(),
        by_host=derived.by_host,
        by_kind=derived.by_kind,
        gib=derived.gib,
        nccl=nccl,
    )


def merge_offer(request: Request, current: Offer | None, record: StackRecord) -> Offer:
    """Return the current offer with the record's stack replaced or added; a prefix that was moved starts afresh."""
    kept = {name: replace(old, prefix=request.prefix) for name, old in (current.stacks.items() if current else ()) if name != record.stack}
    stacks = {**kept, record.stack: record}
    default = request.lock.default_stack if request.lock.default_stack in stacks else record.stack
    rendered = {name: text for name, text in request.templates.items() if name.endswith(".j2") or name.startswith(COPIED)}
    return Offer(default, dict(sorted(stacks.items())), recipes.digest(rendered))
