"""Decisions before a plan: hosts to build and submit on, Python, CUDA toolkit, network settings, entries and
the offer; with a note for what is absent and not needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from deepep_bootstrap.core import recipes
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.fetch.locations import Mirrors
from deepep_bootstrap.inventory import network_env
from deepep_bootstrap.inventory.facts import Facts, Python, Toolkit, TorchLibrary
from deepep_bootstrap.inventory.hostsfile import Inventory
from deepep_bootstrap.inventory.network_env import AUTO, GPUS_PER_NODE, Derived, ascending, read_profile, short_name
from deepep_bootstrap.kube.nodes import NodeLook
from deepep_bootstrap.lock import compatibility
from deepep_bootstrap.lock.compatibility import Judgement, RuleSet, numbers, read_rules
from deepep_bootstrap.lock.model import Lock, Stack, Wheel, deepep_release
from deepep_bootstrap.prefix.entries import V25, Entry, EntryInputs, deepep_recipe, name_entries
from deepep_bootstrap.prefix.offer import (
    X86,
    Offer,
    SiteSettings,
    StackRecord,
    check_manifests,
    machine_of,
    mixed_machines,
    of_machine,
    read_offer,
)
from deepep_bootstrap.prefix.test_kinds import COPIED
from deepep_bootstrap.slurm import commands
from deepep_bootstrap.slurm.identity import choose_slurm_host

ANY = "any"
"""In `PlanRequest.take_over`: whatever prefix the hook is of."""


class PlanRequest(Struct, frozen=True):
    """What is wanted, from the lock, the hosts file and the flags; texts of recipes, templates and profiles by
    relative path. `skip` names host recipes to leave alone ("all" for every one); `mirrors` say from where hosts get
    the lock's package repositories; `take_over` names the modulefiles directories of other prefixes whose hook ours
    may replace (ANY for every one); `own_nccl`: beside an external Python DeepEP V2 takes the lock's NCCL; `kubernetes`
    is what a cluster says of the hosts that are its nodes."""

    lock: Lock
    stack: Stack
    inventory: Inventory
    prefix: str
    recipes: Mapping[str, str]
    templates: Mapping[str, str]
    external_python: str = ""
    own_nccl: bool = False
    on_busy_host: str = "leave"
    control_has_slurm: bool = False
    skip: tuple[str, ...] = ()
    mirrors: Mirrors = field(default_factory=Mirrors)
    take_over: tuple[str, ...] = ()
    kubernetes: NodeLook = field(default_factory=NodeLook)


class Decisions(Struct, frozen=True):
    """What was decided. `entries` are in build order; `slurm_host` is "" without Slurm, and THIS_MACHINE's name for
    the control machine; `absent` are hosts that the offer is for and that this run does not see."""

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
    elsewhere: tuple[str, ...] = ()
    """Hosts of other kinds of machine that the prefix has builds for."""

    def entry(self, kind: str) -> Entry | None:
        """Return the entry of one kind, or None."""
        return next((entry for entry in self.entries if entry.kind == kind), None)


def make_decisions(request: PlanRequest, facts: Mapping[str, Facts]) -> Decisions:
    """Decide everything a plan needs, or raise Trouble with every reason why it cannot be decided."""
    gpu_hosts = hosts_to_build_for(request.inventory, facts)
    if not gpu_hosts:
        wanted = "at least one host with role=gpu, or archs=9.0 to build where no GPU is"
        raise Trouble(Problem(request.inventory.path, "no GPU host answered", fold(facts), wanted))
    check_shared(request.prefix, facts)
    check_one_machine(request, gpu_hosts)

    notes: list[str] = []
    build_host = choose_build_host(request, gpu_hosts, notes)
    prefix_host = named_host(request.inventory, "prefix_host", facts) or build_host
    slurm_host = choose_slurm_host(request.inventory, facts, control_has_slurm=request.control_has_slurm)
    here = facts[build_host]
    check_manifests(request.prefix, facts, prefix_host)

    previous = earlier(
        request.inventory, facts, facts[prefix_host].prefix.manifest, request.stack.name, machine_of(here)
    )
    network = choose_network(request, gpu_hosts, previous)
    load = f"{request.prefix}/current/env-{request.stack.name}.sh"
    notes += (f"profile {network.profile}: {network.why}", *network.notes)
    notes += absences(load, build_host, request.inventory, facts)

    check_own_nccl(request)
    target, python = choose_python(request, gpu_hosts, here, previous)
    libraries = () if target else here.external_libraries
    compilers = choose_compilers(
        request,
        ToolkitRequest(
            request.stack.cuda,
            build_host,
            gpu_hosts,
            judge_by(request, network, target, python, libraries),
            compiles=deepep_recipe(request.lock.sources[request.stack.deepep]) != "deepep",
            path=previous.record.cuda_home if previous.record and previous.decides else "",
        ),
    )
    toolkit = compilers.builds
    notes += compilers.notes

    entries = name_entries(
        EntryInputs(
            request.lock,
            request.stack,
            request.recipes,
            network.archs,
            here,
            toolkit,
            python,
            target,
            libraries,
            request.own_nccl,
        )
    )
    notes += own_nccl_notes(request, libraries)
    site = make_site(request, gpu_hosts)
    record = make_record(request, network, entries, compilers.compiles, python, site, libraries)
    gpus = previous.record.gpus if previous.record and previous.decides else gpus_of_a_node(gpu_hosts)
    record = replace(record, gpus=gpus)
    if machine_of(here) != X86:
        hosts = tuple(dict.fromkeys((*gpu_hosts, *previous.absent)))
        record = replace(record, machine=machine_of(here), hosts=hosts)
    return Decisions(
        build_host=build_host,
        prefix_host=prefix_host,
        slurm_host=slurm_host,
        slurm_node=here.slurm.node if here.slurm.works else "",
        target=target,
        python=python,
        toolkit=toolkit,
        wheels=() if request.external_python else request.stack.wheels[target],
        entries=entries,
        record=record,
        offer=merge_offer(request, previous.offer, record),
        notes=tuple(notes),
        absent=previous.absent,
        elsewhere=previous.elsewhere,
    )


def answering_gpu_hosts(inventory: Inventory, facts: Mapping[str, Facts]) -> dict[str, Facts]:
    """Return the facts of the GPU hosts that answered, in the order of the hosts file."""
    names = [host.name for host in inventory.hosts if host.role == "gpu" and host.name in facts]
    return {name: facts[name] for name in names}


def hosts_to_build_for(inventory: Inventory, facts: Mapping[str, Facts]) -> dict[str, Facts]:
    """Return the facts of the GPU hosts that answered; where the inventory has none and says for which architectures
    to build (an image, a build farm), of all hosts that answered."""
    if inventory.settings.archs and all(host.role != "gpu" for host in (*inventory.hosts, *inventory.left_out)):
        return {host.name: facts[host.name] for host in inventory.hosts if host.name in facts}
    return answering_gpu_hosts(inventory, facts)


def without_gpu(inventory: Inventory, facts: Mapping[str, Facts]) -> frozenset[str]:
    """Return the hosts that cannot load a GPU library and are not expected to: those without a GPU, where the
    inventory says for which architectures to build."""
    if not inventory.settings.archs:
        return frozenset()
    return frozenset(host.name for host in inventory.hosts if host.name in facts and not facts[host.name].gpus)


def choose_network(request: PlanRequest, gpu_hosts: Mapping[str, Facts], previous: PreviousOffer) -> Derived:
    """Return the network settings: what the GPU hosts suggest, in the words of the stack's DeepEP, and what was
    offered before where hosts that are not seen now depend on it."""
    profile, inventory = request.inventory.settings.profile, request.inventory
    known = (host.name for host in (*inventory.hosts, *inventory.left_out))
    believed, notes = network_env.with_own_names(gpu_hosts, (*previous.absent, *known))
    suggested = network_env.derive(profile, believed, request.templates, inventory.settings.archs)
    release = deepep_release(request.lock.sources[request.stack.deepep].version)
    suggested = network_env.for_release(suggested, release)
    found = keep(suggested, previous, believed, profile)
    return replace(found, notes=(*found.notes, *notes))


def compiles_on_nodes(request: PlanRequest) -> bool:
    """Return whether the stack is DeepEP V2, which compiles its kernels on each node."""
    return deepep_recipe(request.lock.sources[request.stack.deepep]) == "deepep-v2"


def judge_by(
    request: PlanRequest, network: Derived, target: str, python: Python, libraries: Sequence[TorchLibrary] = ()
) -> Callable[[Toolkit], Judgement]:
    """Return what says of a toolkit why the stack cannot work with it on these hosts, and remarks. `libraries` are
    those that the torch of an external Python brings."""
    link = read_profile(network.profile, request.templates).link
    nic_map = any(network_env.MAP in values for values in (network.environment, *network.by_host.values()))

    def judge(toolkit: Toolkit) -> Judgement:
        site = compatibility.SiteFacts(
            toolkit.version,
            network.archs,
            link,
            "" if target else python.torch,
            nic_map,
            versions_of(request, libraries),
            request.own_nccl,
        )
        return compatibility.check_site(request.lock, request.stack, target, site=site, texts=request.templates)

    return judge


def check_shared(prefix: str, facts: Mapping[str, Facts]) -> None:
    """Raise Trouble when some hosts see another prefix, or none, where others see one."""
    ids: dict[str, list[str]] = {}
    for name, seen in facts.items():
        ids.setdefault(seen.prefix.id, []).append(name)
    if len(ids) > 1:
        views = "; ".join(
            f"{marker[:8] or 'nothing'} on {fold(names)}"
            for marker, names in sorted(ids.items(), key=lambda item: -len(item[1]))
        )
        odd = min(ids.values(), key=len)
        raise Trouble(
            Problem(
                fold(odd),
                f"{prefix} is not the same directory everywhere",
                views,
                "one shared directory",
                "mounting it there, or --limit",
            )
        )


def check_one_machine(request: PlanRequest, gpu_hosts: Mapping[str, Facts]) -> None:
    """Raise Trouble where the hosts to build for are of several kinds of machine, with where each would be built."""
    groups: dict[str, list[str]] = {}
    for name, seen in gpu_hosts.items():
        groups.setdefault(machine_of(seen), []).append(name)
    if len(groups) < 2:
        return
    said = {}
    for machine, names in groups.items():
        try:
            said[machine] = f"built on {choose_build_host(request, {name: gpu_hosts[name] for name in names}, [])}"
        except Trouble as trouble:
            said[machine] = f"no build host of this kind ({trouble.problems[0].what})"
    raise mixed_machines(groups, said)


def gpus_of_a_node(gpu_hosts: Mapping[str, Facts]) -> int:
    """Return how many GPUs each host has, where that is not the eight that DeepEP's tests start by themselves; 0 where
    it is, or hosts differ. A host of whose GPUs one does not answer says nothing of it."""
    whole = (seen for seen in gpu_hosts.values() if len(seen.gpus) >= seen.prepared.gpu_devices)
    counts = {len(seen.gpus) for seen in whole} - {0}
    return counts.pop() if len(counts) == 1 and counts != {GPUS_PER_NODE} else 0


def named_host(inventory: Inventory, key: str, facts: Mapping[str, Facts]) -> str:
    """Return the host a setting of the hosts file names, or "" where it names none."""
    name: str = getattr(inventory.settings, key)
    if name and name not in facts:
        raise Trouble(Problem(f"{inventory.path}: {key}", "this host did not answer", found=name))
    return name


def choose_build_host(request: PlanRequest, gpu_hosts: Mapping[str, Facts], notes: list[str]) -> str:
    """Return the host to build on: the one the hosts file names, else the first free GPU host."""
    if name := named_host(request.inventory, "build_host", gpu_hosts):
        return name
    reservation = commands.reservation_of(request.inventory.settings.sbatch_args)
    why_busy = {name: busy_with(facts, reservation) for name, facts in gpu_hosts.items()}
    free = [name for name, why in why_busy.items() if not why]
    busy = {name: why for name, why in why_busy.items() if why}
    if busy and request.on_busy_host == "leave":
        notes.extend(f"{name} is busy ({why}) and is left alone" for name, why in busy.items())
    if free:
        return free[0]
    able = [name for name, facts in gpu_hosts.items() if not commands.out_of_service(facts, reservation)]
    if not able:
        raise Trouble(commands.no_job_starts(gpu_hosts, reservation, "nothing can be built"))
    if request.on_busy_host == "use":
        return able[0]
    raise Trouble(
        Problem(
            fold(busy),
            "every GPU host is busy",
            next(iter(busy.values())),
            "one free host to build on",
            "later, or --on-busy-host=use",
        )
    )


def busy_with(facts: Facts, reservation: str = "") -> str:
    """Return what keeps a host from being used now, or "" for a free host. Under Slurm the allocation decides: jobs
    make it wait, on a drained node it would wait for ever, on a reserved one unless jobs name its `reservation`."""
    if waits := commands.out_of_service(facts, reservation):
        return waits
    if facts.slurm.works and facts.slurm.node:
        return f"Slurm jobs {', '.join(facts.slurm.jobs)}" if facts.slurm.jobs else ""
    if facts.slurm.slurmd or (facts.prepared.slurmd_memlock and facts.slurm.version and not facts.slurm.works):
        answer = "Slurm does not answer" if facts.slurm.version else "Slurm's clients are not found"
        why = "Slurm knows no node of that name" if facts.slurm.works else answer
        return f"slurmd runs there, but {why}, so its jobs cannot be seen"
    count = sum(gpu.processes for gpu in facts.gpus)
    return f"{count} GPU processes" if count else ""


def choose_python(
    request: PlanRequest, gpu_hosts: Mapping[str, Facts], here: Facts, known: PreviousOffer
) -> tuple[str, Python]:
    """Return target (`cp312-x86_64`; "" for an external Python) and interpreter: the newest that all hosts have, or
    the one that `known` hosts, which cannot be asked now, are known to have."""
    if request.external_python:
        return "", check_external(request, gpu_hosts, here)
    theirs = known.record.python_version if known.record and known.decides else ""
    targets = sorted(
        request.stack.wheels, key=lambda target: (theirs == f"3.{minor_of(target)}", minor_of(target)), reverse=True
    )
    for target in targets:
        path = f"/usr/bin/python3.{minor_of(target)}"
        fits = target.endswith(f"-{here.machine}") and all(
            path in [python.path for python in seen.pythons] for seen in gpu_hosts.values()
        )
        if fits:
            return target, next(python for python in here.pythons if python.path == path)
    wanted = " or ".join(dict.fromkeys(f"/usr/bin/python3.{minor_of(target)}" for target in targets))
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


def make_site(request: PlanRequest, gpu_hosts: Mapping[str, Facts]) -> SiteSettings:
    """Return what the sbatch files take from the hosts file."""
    settings = request.inventory.settings
    gres = commands.resolve_gres(settings.gres, [seen.slurm.gres for seen in gpu_hosts.values() if seen.slurm.node])
    return SiteSettings(
        settings.partition, settings.account, settings.qos, gres, settings.sbatch_args, settings.contact
    )


def make_record(
    request: PlanRequest,
    network: Derived,
    entries: Sequence[Entry],
    toolkit: Toolkit,
    python: Python,
    site: SiteSettings,
    libraries: Sequence[TorchLibrary] = (),
) -> StackRecord:
    """Return what a generation says of the stack; `libraries` are those that the torch of an external Python brings."""
    names = {entry.kind: entry.name for entry in entries}
    torch = next((entry.version for entry in entries if entry.kind == "python"), python.torch)
    deepep = entries[-1].env
    versions = {each.kind: each.version for each in libraries if deepep.get(f"TORCH_{each.kind.upper()}")}
    source = request.lock.sources[request.stack.deepep]
    return StackRecord(
        stack=request.stack.name,
        module=f"deepep/{source.version}-{source.rev[:7]}-{request.stack.name}",
        prefix=request.prefix,
        deepep=names["deepep"],
        nvshmem=names.get("nvshmem", ""),
        gdrcopy=names.get("gdrcopy", ""),
        python=names.get("python", ""),
        external_python=request.external_python,
        python_version=minor_version(python),
        cuda_home=toolkit.path,
        archs=network.archs,
        profile=network.profile,
        environment=network.environment,
        site=site,
        by_host=network.by_host,
        by_kind=network.by_kind,
        gib=network.gib,
        nccl=deepep.get("NCCL_VERSION", ""),
        torch=torch,
        cuda=toolkit.version,
        torch_nccl=deepep.get("TORCH_NCCL", ""),
        torch_nvshmem=deepep.get("TORCH_NVSHMEM", ""),
        nvshmem_version=versions.get("nvshmem", ""),
        own_nccl=names.get("nccl", ""),
        toolkit=names.get("toolkit", ""),
    )


def merge_offer(request: PlanRequest, current: Offer | None, record: StackRecord) -> Offer:
    """Return the current offer with the record's stack replaced or added; a prefix that was moved starts afresh."""
    kept = {
        name: replace(old, prefix=request.prefix)
        for name, old in (current.stacks.items() if current else ())
        if name != record.key
    }
    stacks = {**kept, record.key: record}
    wanted = [key for key, one in sorted(stacks.items()) if one.stack == request.lock.default_stack]
    default = wanted[0] if wanted else default_of(current, stacks, record)
    rendered = {
        name: text for name, text in request.templates.items() if name.endswith(".j2") or name.startswith(COPIED)
    }
    return Offer(default, dict(sorted(stacks.items())), recipes.digest(rendered))


def default_of(current: Offer | None, stacks: Mapping[str, StackRecord], record: StackRecord) -> str:
    """Return the key of the default where the lock's own is not offered: the stack of this run; beside builds for
    another kind of machine, the default of those stays."""
    others = current is not None and any(one.machine != record.machine for one in stacks.values())
    return current.default_stack if current and others and current.default_stack in stacks else record.key


def check_external(request: PlanRequest, gpu_hosts: Mapping[str, Facts], here: Facts) -> Python:
    """Return the interpreter of --python as the build host sees it; Trouble where a host lacks it or it does not fit.
    `gpu_hosts` are facts by name, `here` those of the build host."""
    path = request.external_python
    problems: list[Problem] = []
    for name, seen in gpu_hosts.items():
        problems.extend(_misfits(name, path, seen, request.stack, here))
    if not problems:
        for name, seen in gpu_hosts.items():
            problems.extend(_lacks(name, path, seen, request.templates))
            problems.extend(_lacks_libraries(name, seen, here, request) if compiles_on_nodes(request) else ())
    if problems or here.external_python is None:
        raise Trouble(*problems)
    return here.external_python


def _misfits(name: str, path: str, seen: Facts, stack: Stack, here: Facts) -> Iterator[Problem]:
    python = seen.external_python
    if python is None or python.problem:
        found = str(python.problem) if python else "not asked for"
        yield Problem(name, f"--python={path} cannot be used", found, "an interpreter with torch")
    elif python.torch_cuda.split(".")[0] != stack.cuda:
        found = f"torch {python.torch} for CUDA {python.torch_cuda or 'none'}"
        remedy = f'--stack with cuda = "{python.torch_cuda.split(".")[0]}"'
        yield Problem(name, "torch's CUDA major does not fit the stack", found, f"CUDA {stack.cuda}", remedy)
    elif here.external_python and (python.torch, python.version) != (
        here.external_python.torch,
        here.external_python.version,
    ):
        found = f"Python {python.version}, torch {python.torch}"
        wanted = f"Python {here.external_python.version}, torch {here.external_python.torch} as on the build host"
        yield Problem(name, "the external Python differs between hosts", found, wanted)


def _lacks(name: str, path: str, seen: Facts, texts: Mapping[str, str]) -> Iterator[Problem]:
    """Yield what stands beside torch in the wrong version, or not at all: setuptools by the rules of env/, numpy for
    upstream's tests."""
    packages, python = dict(seen.external_packages), seen.external_python
    there = (packages["setuptools"],) if "setuptools" in packages else ()
    known = compatibility.StackFacts({"setuptools": there, "torch": (python.torch,) if python else ()})
    rule_set = read_rules(texts)
    install = f"{path} -m pip install '{_setuptools(rule_set, known)}' numpy"
    # One is enough: the same command mends them all.
    for broken in list(compatibility.broken_rules(rule_set, known))[:1]:
        problem = compatibility.broken_problem(broken, known, name)
        yield Problem(name, f"--python={path}: {problem.what}", problem.found, problem.wanted, install)
    if "numpy" not in packages:
        yield Problem(name, f"--python={path}: DeepEP's tests import numpy", "no numpy", "numpy", install)


def _lacks_libraries(name: str, seen: Facts, here: Facts, request: PlanRequest) -> Iterator[Problem]:
    """Yield what DeepEP V2 needs of the libraries that the external Python's torch brings, and where they are not those
    of the build host, with which it is built."""
    for problem in lacking_libraries(request.external_python, request.stack, seen, own_nccl=request.own_nccl):
        yield replace(problem, where=name)
    others = {each.kind: each for each in here.external_libraries}
    for each in seen.external_libraries:
        other = others.get(each.kind, each)
        if each != other and not (each.kind == "nccl" and request.own_nccl):
            yield Problem(
                name,
                f"the {each.kind.upper()} of the external Python differs between hosts",
                f"{each.version} in {each.folder}",
                f"{other.version} in {other.folder} as on the build host",
            )


def lacking_libraries(path: str, stack: Stack, seen: Facts, *, own_nccl: bool) -> Iterator[Problem]:
    """Yield what DeepEP V2 is built against and the torch of the external Python at `path` does not bring."""
    there = [each.kind for each in seen.external_libraries]
    for kind in ("nvshmem",) if own_nccl else ("nccl", "nvshmem"):
        if kind not in there:
            what, wheel = kind.upper(), f"nvidia-{kind}-cu{stack.cuda}"
            remedy = f"a torch from PyPI, which brings {wheel}"
            if kind == "nccl":
                remedy = f"{remedy}, or --nccl=own, the NCCL {_locked_nccl(stack)} of the lock"
            problem = f"--python={path}: DeepEP V2 is built against torch's {what}, headers and library"
            yield Problem("", problem, f"no wheel of {what} beside torch", wheel, remedy)


def versions_of(request: PlanRequest, libraries: Sequence[TorchLibrary]) -> dict[str, str]:
    """Return the versions of the libraries that DeepEP V2 takes from an external Python, by kind; V1 takes none."""
    return {each.kind: each.version for each in libraries} if compiles_on_nodes(request) else {}


def check_own_nccl(request: PlanRequest) -> None:
    """Raise Trouble where --nccl=own means nothing: the stack's own Python has the lock's NCCL, V1 uses none."""
    if not request.own_nccl:
        return
    if not compiles_on_nodes(request) or not request.stack.nccl_wheel:
        found = f"stack {request.stack.name}"
        raise Trouble(Problem("--nccl=own", "is for stacks of DeepEP V2", found, "--stack=v2 or --stack=v2-vllm"))
    if not request.external_python:
        what = "is for --python: the stack's own Python has the lock's NCCL anyway"
        raise Trouble(Problem("--nccl=own", what, wanted="--python=/path/to/python, or no --nccl"))


def own_nccl_notes(request: PlanRequest, libraries: Sequence[TorchLibrary]) -> Iterator[str]:
    """Yield what an NCCL of ours means for whatever else runs in a process of the external Python."""
    if request.own_nccl:
        theirs = versions_of(request, libraries).get("nccl", "another")
        yield (
            f"--nccl=own: with the module loaded every process of {request.external_python} has NCCL "
            f"{_locked_nccl(request.stack)} in place of the {theirs} that its torch was made with, torch.distributed "
            f"and what else brings an NCCL too; a program that finds two of them may refuse to start (SGLang does)"
        )


def _locked_nccl(stack: Stack) -> str:
    wheel = stack.pinned(stack.nccl_wheel) if stack.nccl_wheel else None
    return wheel.version if wheel else ""


def _setuptools(rule_set: RuleSet, known: compatibility.StackFacts) -> str:
    """Return the setuptools that the rules want beside a torch, as pip is told."""
    meant = [
        rule for rule in rule_set.rules if all(compatibility.holds(sentence, known, any) for sentence in rule.when)
    ]
    wanted = [need for rule in meant for need in rule.needs if need.thing == "setuptools" and need.value != "0"]
    return "setuptools" + ",".join(f"{need.operator}{need.value}" for need in wanted)


def absences(load: str, build_host: str, inventory: Inventory, facts: Mapping[str, Facts]) -> Iterator[str]:
    """Yield one note for each absence. `load` is the file that a shell reads where no module system is; a way out of
    the network matters on `build_host` alone, and there only as long as this machine has none either."""
    if not any(seen.slurm.works for seen in facts.values()):
        yield "no Slurm: tests run with `bash` on one node, `sbatch` is not checked"
    bare = [name for name, seen in facts.items() if seen.modules.kind == "none"]
    if bare:
        yield f"no module system on {fold(bare)}: load with `. {load}` there"
    local = [host.name for host in inventory.hosts if host.connection == "local"]
    if not facts[build_host].default_route:
        others = "" if build_host in local else " or through this machine"
        yield f"no way out of the local network on {build_host}: sources and wheels come from --mirror{others}"
    without = [name for name in local if name in facts and "sshd" not in dict(facts[name].tools)]
    if without:
        yield f"no sshd on {fold(without)}: not needed with connection=local"


def check_writable(request: PlanRequest, choice: Decisions, seen: Facts) -> None:
    """Raise Trouble where the account that writes the prefix may not, which `seen`, the facts of its host, say of
    the connection's own account: nothing is said of another one that the hosts file names as build_user."""
    if seen.prefix.writable or request.inventory.settings.build_user:
        return
    where = f"{choice.prefix_host} {request.prefix}"
    # Root is refused by a mount that is read-only, and by a server that takes root for nobody (root_squash, the default
    # of NFS).
    refused = "a read-only mount, or a server that squashes root" if seen.uid == 0 else "no right to write there"
    wanted = "a folder that it may write in, or may make"
    remedy = "build_user=NAME in the hosts file, with an account that may; or another --prefix"
    raise Trouble(
        Problem(
            where, f"{seen.user} may not write the prefix", f"{refused} ({seen.prefix.fs or 'unknown'})", wanted, remedy
        )
    )


DEFAULT = "/usr/local/cuda"
OR_OTHERS = "another build_host, or --limit"


class ToolkitRequest(Struct, frozen=True):
    """What a toolkit is chosen for: the stack's CUDA major, the build host, the GPU hosts' facts by name, and
    `judge`, which says of a toolkit the rules it breaks, and remarks. `compiles`: every GPU host compiles
    kernels with it (DeepEP V2); `path` is then where it has to be because hosts that this run does not see have it
    there ("" where it may be anywhere)."""

    cuda: str
    build_host: str
    hosts: Mapping[str, Facts]
    judge: Callable[[Toolkit], Judgement]
    compiles: bool = False
    path: str = ""


def choose_toolkit(request: ToolkitRequest) -> tuple[Toolkit, tuple[str, ...]]:
    """Return the toolkit and notes on it: /usr/local/cuda where that breaks no rule, else the newest that
    breaks none; where nodes compile with it, first of all one that all of them have at its path. Trouble where there
    is none."""
    fitting = _fitting(request)
    judged = {kit.path: request.judge(kit) for kit in fitting}
    allowed = [kit for kit in fitting if not judged[kit.path][0]]
    if not allowed:
        newest = max(fitting, key=lambda kit: numbers(kit.version))
        raise Trouble(*judged[newest.path][0])
    elsewhere = {kit.path: _elsewhere(request, kit) if request.compiles else ((), ()) for kit in allowed}
    chosen = min(allowed, key=lambda kit: [len(each) > 0 for each in elsewhere[kit.path]])
    if problems := elsewhere[chosen.path][0]:
        raise Trouble(*problems)
    return chosen, (
        *_passed_over(fitting[0], chosen, judged[fitting[0].path][0]),
        *elsewhere[chosen.path][1],
        *judged[chosen.path][1],
    )


class Compilers(Struct, frozen=True):
    """The toolkit that DeepEP is built with, and the one that compiles its kernels on nodes, whose path is "" where
    that is the one that came along; and notes on them."""

    builds: Toolkit
    compiles: Toolkit
    notes: tuple[str, ...]


def choose_compilers(request: PlanRequest, wanted: ToolkitRequest) -> Compilers:
    """Return the toolkits for the build host and for nodes. Where the hosts' own cannot compile kernels on every node,
    the compiler that comes along with the stack does, if any; else Trouble. The build of V2.5 compiles no kernel, so
    that any toolkit of the major will do for it then."""
    try:
        toolkit, notes = choose_toolkit(wanted)
    except Trouble as trouble:
        pin = request.lock.toolkits.get(request.stack.toolkit)
        if pin is None:
            raise
        own = Toolkit("", pin.version, split_compile=False, stubs=False)
        v25 = deepep_recipe(request.lock.sources[request.stack.deepep]) == V25
        judge = (lambda kit: wanted.judge(replace(kit, version=own.version))) if v25 else wanted.judge
        try:
            toolkit, notes = choose_toolkit(replace(wanted, judge=judge, compiles=False))
        except Trouble:
            raise trouble from None
        first = trouble.problems[0]
        note = f"CUDA {own.version}, which comes along, compiles kernels on nodes: {first.where}: {first.what}"
        return Compilers(toolkit, own, (*notes, note))
    return Compilers(toolkit, toolkit, notes)


def floor(lock: Lock, stack: Stack, archs: tuple[str, ...], texts: Mapping[str, str]) -> str:
    """Return the oldest version that the rules allow a stack for these GPUs, "12.8"; "" where any of its CUDA major
    is new enough."""
    rule_set = read_rules(texts)
    known = compatibility.stack_facts(rule_set, lock, stack, next(iter(stack.wheels), ""))
    known = replace(known, values={**known.values, "archs": archs})
    meant = [
        rule
        for rule in rule_set.rules
        if rule.refuse and all(compatibility.holds(sentence, known, any) for sentence in rule.when)
    ]
    needs = [need.value for rule in meant for need in rule.needs if (need.thing, need.operator) == ("toolkit", ">=")]
    oldest = max(needs, key=numbers, default="")
    own = lock.toolkits.get(stack.toolkit)
    if own and deepep_recipe(lock.sources[stack.deepep]) == V25 and numbers(own.version) >= numbers(oldest):
        return ""  # no other compiler makes its kernels
    return oldest if numbers(oldest) > numbers(stack.cuda) else ""


def major(toolkit: Toolkit) -> str:
    """Return "12" for 12.9.86; "" where nvcc did not say its version."""
    return toolkit.version.split(".")[0]


def _fitting(request: ToolkitRequest) -> list[Toolkit]:
    """Return the toolkits of the wanted major, /usr/local/cuda first, then the newest first; Trouble where there is
    none."""
    here = request.hosts[request.build_host]
    of_major = [kit for kit in here.toolkits if major(kit) == request.cuda]
    if not of_major:
        remedy = f"installing cuda-toolkit {request.cuda}, or a stack of another CUDA major"
        raise Trouble(
            Problem(
                request.build_host,
                "no CUDA toolkit fits the stack",
                _all(here),
                f"CUDA {request.cuda} with nvcc",
                remedy,
            )
        )
    fitting = [kit for kit in of_major if kit.path == request.path or not (request.compiles and request.path)]
    if not fitting:
        raise Trouble(
            *_lacking(
                request,
                request.path,
                f"CUDA {request.cuda} in {request.path}, as the hosts have it that this run does not see",
            )
        )
    return sorted(
        sorted(fitting, key=lambda kit: numbers(kit.version), reverse=True), key=lambda kit: kit.path != DEFAULT
    )


def _elsewhere(request: ToolkitRequest, kit: Toolkit) -> Judgement:
    """Return why nodes cannot compile with a toolkit of the build host, and where one of another version stands in
    its place."""
    others: dict[str, list[str]] = {}
    for name, seen in request.hosts.items():
        for there in seen.toolkits:
            if there.path == kit.path and major(there) == request.cuda and there.version != kit.version:
                others.setdefault(there.version, []).append(name)
    notes = (
        f"{fold(names)}: {kit.path} is CUDA {version}, {kit.version} on {request.build_host}; DeepEP V2 compiles "
        f"kernels with it on each node"
        for version, names in others.items()
    )
    return tuple(_lacking(request, kit.path, f"CUDA {kit.version} in {kit.path}, as on {request.build_host}")), tuple(
        notes
    )


def _lacking(request: ToolkitRequest, path: str, wanted: str) -> Iterator[Problem]:
    """Yield a problem for the hosts that have no toolkit of the major at `path`, those that have the same in one."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, seen in request.hosts.items():
        if not any(there.path == path and major(there) == request.cuda for there in seen.toolkits):
            groups.setdefault((_all(seen), _remedy(request.cuda, path, seen)), []).append(name)
    for (found, remedy), names in groups.items():
        yield Problem(
            fold(names),
            "DeepEP V2 compiles kernels on every node, and this toolkit is not there",
            found,
            wanted,
            remedy,
        )


def _remedy(cuda: str, path: str, seen: Facts) -> str:
    """Return how a host comes to a toolkit at `path`."""
    same = [kit.path for kit in seen.toolkits if major(kit) == cuda]
    if not same:
        return f"invoke bootstrap, which installs one (step cuda-toolkit), {OR_OTHERS}"
    if any(kit.path == path for kit in seen.toolkits):
        return f"CUDA {cuda} at one path on all hosts (a link will do), {OR_OTHERS}"
    return f"ln -s {same[-1]} {path} there, {OR_OTHERS}"


def _passed_over(first: Toolkit, chosen: Toolkit, problems: tuple[Problem, ...]) -> Iterator[str]:
    """Yield why the toolkit that comes first by its path was not taken."""
    if chosen != first:
        why = problems[0].what if problems else "not all GPU hosts have the same one there"
        yield f"CUDA {chosen.version} in {chosen.path} and not {first.version} in {first.path}: {why}"


def _all(seen: Facts) -> str:
    return ", ".join(f"{kit.version or 'unknown'} in {kit.path}" for kit in seen.toolkits) or "none"


class PreviousOffer(Struct, frozen=True):
    """What the prefix offers now, and a stack's record in it (None where there is none yet), the hosts that the
    offer was made for, and those of them that this run does not see. Hosts of other kinds of machine are `elsewhere`
    and decide nothing."""

    offer: Offer | None = None
    record: StackRecord | None = None
    hosts: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()

    @property
    def decides(self) -> bool:
        """Return whether what depends on all hosts has to stay as it is."""
        return self.record is not None and bool(self.absent)


def earlier(
    inventory: Inventory, facts: Collection[str], manifest: str, stack: str, machine: str = X86
) -> PreviousOffer:
    """Return what is offered of a stack for one kind of machine by the generation whose manifest.json has the text
    `manifest` ("" for none yet).

    A host that is no longer in the hosts file is not absent but gone. A node set on the command line says nothing about
    the others.
    """
    offer = read_offer(manifest)
    if offer is None:
        return PreviousOffer()
    told = tuple(str(name) for name in json.loads(manifest).get("hosts", ()))
    theirs = hosts_by_machine(offer, told)
    made_for = theirs.get(machine, ())
    roles = {host.name: host.role for host in (*inventory.hosts, *inventory.left_out)}
    others = "gpu" if inventory.path == "--hosts" else ""
    absent = tuple(name for name in made_for if name not in facts and roles.get(name, others) == "gpu")
    elsewhere = tuple(name for name in told if name not in made_for and name not in facts)
    return PreviousOffer(offer, of_machine(offer, machine).get(stack), made_for, absent, elsewhere)


def hosts_by_machine(offer: Offer, told: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the hosts of a manifest by kind of machine: a record of another kind than x86_64 names its own."""
    theirs: dict[str, tuple[str, ...]] = {}
    for record in offer.stacks.values():
        if record.machine:
            theirs[record.machine] = tuple(dict.fromkeys((*theirs.get(record.machine, ()), *record.hosts)))
    named = {name for names in theirs.values() for name in names}
    return {**theirs, X86: tuple(name for name in told if name not in named)}


def keep(derived: Derived, known: PreviousOffer, facts: Mapping[str, Facts], profile: str) -> Derived:
    """Return `derived` with what the earlier offer says in place of what a part of the hosts suggests; `facts` are the
    GPU hosts seen now, `profile` is the setting of the hosts file, which decides where it names another profile than
    before.

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
        notes=(
            *derived.notes,
            f"{fold(known.absent)}: not seen by this run, so the settings of all hosts stay as they are offered now",
        ),
    )
