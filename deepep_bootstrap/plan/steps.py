"""The steps of a plan, each with its reason: facts and a request in, steps out; and their form in the JSON document.

A step is in the plan because something wanted was not found; the reason says both. No step: nothing to
do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.inventory import regressions
from deepep_bootstrap.inventory.facts import Facts, Prefix
from deepep_bootstrap.plan import decisions, host_recipes
from deepep_bootstrap.plan.decisions import Decisions, PlanRequest, check_writable
from deepep_bootstrap.plan.host_recipes import TITLES, Check, Preparation
from deepep_bootstrap.prefix import offer
from deepep_bootstrap.prefix.diff import ADDED, CHANGED, brief, difference, offer_facts
from deepep_bootstrap.prefix.entries import Entry
from deepep_bootstrap.prefix.offer import Offer
from deepep_bootstrap.remote.host import THIS_MACHINE
from deepep_bootstrap.slurm import commands
from deepep_bootstrap.slurm.nodes import is_drained, read_reason

UNPACKED = 1.8
"""Size of an environment in the store over the size of its wheels: measured with the 30 wheels of v1-cu13 for cp311,
2.74 GB, which became 4.89 GB with their byte code."""

MIB = 1024**2

CONTROL = "@control"
"""This machine in the JSON document."""

RESUME, UNCORDON = "resume", "uncordon"
TITLES_OF_ENTRIES = {"python": "Python with torch", "toolkit": "CUDA's compiler"}
"""What kinds of entries are called where that is not their name."""
OTHER_TEXTS = "~ texts of the modulefiles or sbatch files, as this version of the program writes them"
BUILD_DEPS = "build-deps"
HOOK = "module-hook"
"""Kind and name of the step that lets login shells find our modulefiles."""


class Reason(Struct, frozen=True):
    """Why a step is in the plan: what was found and what is wanted."""

    found: str
    wanted: str


class Step(Struct, frozen=True):
    """One thing to do. `kind` is "host", "reboot" (a host recipe that works after a reboot), "prefix", "build",
    "offer" or "verify"; `name` the recipe or the store entry; `hosts` where it is done; `env` what its recipe needs
    to know. `sentence` is what the plan says of it, "" where title, hosts and reason say it best; `changes` are lines
    on what becomes of what is offered."""

    kind: str
    name: str
    title: str
    hosts: tuple[str, ...]
    reason: Reason
    env: Mapping[str, str] = field(default_factory=dict)
    sentence: str = ""
    changes: tuple[str, ...] = ()


class Plan(Struct, frozen=True):
    """The steps in order, what was chosen to arrive at them, and an upper estimate of download and of space on the
    prefix.

    Where the hosts must be prepared before anything can be decided (a CUDA toolkit is installed first), `undecided`
    says why and the steps end with that preparation; the next look decides the rest.
    """

    steps: tuple[Step, ...]
    decided: Decisions | None
    notes: tuple[str, ...] = ()
    download_bytes: int = 0
    disk_bytes: int = 0
    preparation: Preparation = field(default_factory=Preparation)
    undecided: tuple[Problem, ...] = ()

    @property
    def choice(self) -> Decisions:
        """What was chosen; Trouble where nothing could be decided yet."""
        if self.decided is None:
            raise Trouble(*self.undecided)
        return self.decided

    def of_kind(self, kind: str) -> tuple[Step, ...]:
        """Return the steps of one kind."""
        return tuple(step for step in self.steps if step.kind == kind)

    def chosen(self) -> dict[str, Any]:
        """Return the choices a reader of the plan wants to know, for JSON; none while they are open."""
        choice = self.decided
        if choice is None:
            return {}
        return {
            "build_host": choice.build_host,
            "prefix_host": choice.prefix_host,
            "slurm_host": CONTROL if choice.slurm_host == THIS_MACHINE.name else choice.slurm_host,
            "target": choice.target,
            "python": choice.python.path,
            "cuda_home": choice.toolkit.path,
            "archs": list(choice.record.archs),
            "profile": choice.record.profile,
            "module": choice.record.module,
            "entries": [entry.name for entry in choice.entries],
        }


def make_plan(
    request: PlanRequest, facts: Mapping[str, Facts], preparation: Preparation | None = None, *, anyhow: bool = False
) -> Plan:
    """Return the plan that brings the hosts of `facts` to what `request` wants; Trouble where that cannot be
    decided or done, unless hosts are to be prepared first, or `anyhow` asks for what is known all the same."""
    preparation = preparation or Preparation()
    hosts_first = (
        *preparation_steps(preparation),
        *resume_steps(request, facts, preparation),
        *uncordon_steps(request, facts, preparation),
    )
    kubernetes = host_recipes.node_notes(request.kubernetes, facts, preparation)
    notes = (
        *check_notes(preparation),
        *kubernetes,
        *host_recipes.from_mirrors(request, facts, preparation),
        *without_hook(request),
    )
    try:
        choice = decisions.make_decisions(request, facts)
        missing = missing_entries(choice, facts[choice.prefix_host].prefix.entries)
        check_service(request, choice, facts, missing)
        check_build_deps(request, choice, facts, missing)
    except Trouble as trouble:
        if not hosts_first and not anyhow:
            raise Trouble(*trouble.problems, *obstacles(preparation), code=trouble.code) from None
        return Plan(hosts_first, None, notes, preparation=preparation, undecided=trouble.problems)
    steps = [
        *hosts_first,
        *build_deps_steps(request, choice, facts, missing),
        *build_steps(choice, missing),
        *offer_steps(choice, facts, missing),
        *hook_steps(request, facts),
    ]
    if any(step.kind in {"build", "offer"} for step in steps) or not facts[choice.prefix_host].prefix.id:
        check_writable(request, choice, facts[choice.prefix_host])
        steps.insert(0, prefix_step(request, choice, facts))
    check_space(request, choice, facts, missing)
    if steps or choice.record.key in facts[choice.prefix_host].prefix.unproved:
        steps.append(verify_step(request, choice, facts))
    wheels = sum(wheel.size for entry in missing if entry.kind in {"python", "toolkit"} for wheel in entry.wheels)
    return Plan(tuple(steps), choice, (*choice.notes, *notes), wheels, int(wheels * UNPACKED), preparation)


def preparation_steps(preparation: Preparation) -> Iterator[Step]:
    """Yield what is to be done on the hosts by their own checks: at once first, then what takes a reboot."""
    for kind, pairs in (("host", preparation.at_once), ("reboot", preparation.with_reboot)):
        groups: dict[tuple[str, Reason, tuple[tuple[str, str], ...]], list[str]] = {}
        for host, check in pairs:
            env = tuple(preparation.inputs[host][check.recipe].items())
            reason = Reason(str(check.found), f"{check.wanted}{_versions(check, dict(env))}")
            groups.setdefault((check.recipe, reason, env), []).append(host)
        for (recipe, reason, env), hosts in groups.items():
            title = TITLES[recipe] if kind == "host" else f"{TITLES[recipe]} and reboot"
            yield Step(kind, recipe, title, tuple(hosts), reason, dict(env))


def _versions(check: Check, env: Mapping[str, str]) -> str:
    """Return the versions of the driver's packages where this run chose them, for the plan that is confirmed."""
    packages = env.get("PACKAGES", "")
    chosen = check.recipe == host_recipes.RECIPE and check.state == host_recipes.TO_APPLY and "=" in packages
    return f": {packages.strip()}" if chosen else ""


def resume_steps(request: PlanRequest, facts: Mapping[str, Facts], preparation: Preparation) -> Iterator[Step]:
    """Yield one step for the nodes that an earlier run left drained and that need nothing any more: the recipes were
    asked and content, and what the reason says a node has lost is there again."""
    waiting = {
        host
        for host, _ in (
            *preparation.of(host_recipes.TO_APPLY, host_recipes.REBOOT, host_recipes.STUCK, host_recipes.BLOCKED),
        )
    }
    groups: dict[str, list[str]] = {}
    for host, seen in facts.items():
        reason = read_reason(seen.prepared.slurm_reason)
        left = reason.ours and is_drained(seen.slurm.state)
        if (
            left
            and host not in waiting
            and not unasked(request.skip, reason.text)
            and not regressions.still(reason.text, seen)
        ):
            groups.setdefault(reason.text, []).append(host)
    for text, hosts in groups.items():
        yield Step(
            RESUME,
            RESUME,
            "resume in Slurm",
            tuple(hosts),
            Reason(f"drained: {text}", "in use, as nothing is left to do"),
        )


def uncordon_steps(request: PlanRequest, facts: Mapping[str, Facts], preparation: Preparation) -> Iterator[Step]:
    """Yield one step for each reason with which an earlier run left nodes of Kubernetes cordoned that need nothing any
    more."""
    for text, hosts in host_recipes.nodes_to_uncordon(request.kubernetes, facts, preparation).items():
        if not unasked(request.skip, text) and not any(regressions.still(text, facts[host]) for host in hosts):
            reason = Reason(f"cordoned: {text}", "in use, as nothing is left to do")
            yield Step(UNCORDON, UNCORDON, "uncordon in Kubernetes", tuple(hosts), reason)


def unasked(skip: Sequence[str], reason: str) -> bool:
    """Return whether recipes are skipped that a node's reason names, or which it may mean where it names none."""
    skipped = TITLES if "all" in skip else skip
    named = [recipe for recipe, title in TITLES.items() if title in reason]
    return any(recipe in skipped for recipe in named or TITLES)


def check_notes(preparation: Preparation) -> tuple[str, ...]:
    """Return what a person should know of the hosts' preparation beside the steps: notes of checks, equal ones
    folded over hosts."""
    groups: dict[Check, list[str]] = {}
    for host, check in preparation.of(*host_recipes.STATES):
        if (check.state == host_recipes.BLOCKED or check.note) and not check.fault:
            groups.setdefault(check, []).append(host)
    return tuple(_note(check, hosts) for check, hosts in groups.items())


def obstacles(preparation: Preparation) -> tuple[Problem, ...]:
    """Return what keeps hosts from being prepared, which may well be why nothing can be decided; equal ones folded
    over hosts."""
    groups: dict[Check, list[str]] = {}
    for host, check in preparation.of(host_recipes.BLOCKED):
        groups.setdefault(check, []).append(host)
    return tuple(
        check.fault
        or Problem(
            fold(hosts),
            f"{TITLES[check.recipe]}: {check.note or 'cannot be prepared'}",
            str(check.found),
            str(check.wanted),
        )
        for check, hosts in groups.items()
    )


def _note(check: Check, hosts: Iterable[str]) -> str:
    difference = f" found {check.found}, wanted {check.wanted}." if check.state == host_recipes.BLOCKED else ""
    return f"{fold(hosts)}: {TITLES[check.recipe]}:{difference} {check.note}".rstrip()


def missing_entries(choice: Decisions, present: Sequence[str]) -> tuple[Entry, ...]:
    """Return the entries the store does not hold, dependencies first."""
    return tuple(entry for entry in choice.entries if entry.name not in present)


def prefix_step(request: PlanRequest, choice: Decisions, facts: Mapping[str, Facts]) -> Step:
    """Return the step that makes the prefix and proves by writing that all hosts share it."""
    marker = facts[choice.prefix_host].prefix.id
    found = f"id {marker[:8]}, not tried by writing" if marker else "nothing there"
    hosts = tuple(host.name for host in request.inventory.hosts if host.name in facts)
    shared = f" and the same directory on all {len(hosts)} hosts" if len(hosts) > 1 else f" on {fold(hosts)}"
    what = f"check that {request.prefix}" if marker else f"make {request.prefix}, and check that it"
    sentence = f"{what} is writable{shared}"
    reason = Reason(found, f"{request.prefix} writable and one directory for all hosts")
    return Step("prefix", "prefix", "prefix", hosts, reason, sentence=sentence)


def build_deps_steps(
    request: PlanRequest, choice: Decisions, facts: Mapping[str, Facts], missing: Sequence[Entry]
) -> Iterator[Step]:
    """Yield the step that installs what a build needs, on the build host alone."""
    here = facts[choice.build_host]
    if missing and (reason := lacking_build_deps(choice, here)):
        env = host_recipes.build_deps_env(request, here, choice.python)
        yield Step("host", BUILD_DEPS, "install build dependencies", (choice.build_host,), reason, env)


def check_build_deps(
    request: PlanRequest, choice: Decisions, facts: Mapping[str, Facts], missing: Sequence[Entry]
) -> None:
    """Raise Trouble where the build host lacks packages that are to be left alone."""
    reason = lacking_build_deps(choice, facts[choice.build_host]) if missing else None
    if reason and BUILD_DEPS in request.skip:
        what = "lacks what a build needs, and --skip leaves packages alone"
        remedy = "to install it there, or the same command without --skip=build-deps and without --skip=all"
        raise Trouble(Problem(choice.build_host, what, reason.found, reason.wanted, remedy))


def hook_steps(request: PlanRequest, facts: Mapping[str, Facts]) -> Iterator[Step]:
    """Yield the steps through which login shells find our modulefiles. They come after the offer: a hook that leads
    nowhere yet, or away from another prefix, takes `module load deepep` from everybody."""
    groups: dict[Reason, list[str]] = {}
    for host in request.inventory.hosts:
        if host.name in facts and HOOK not in request.skip and (reason := lacking_hook(request, facts[host.name])):
            groups.setdefault(reason, []).append(host.name)
    wanted = f"{request.prefix}/modulefiles"
    for reason, hosts in groups.items():
        before = facts[hosts[0]].modules.hook or "(none)"
        sentence = f"MODULEPATH on {fold(hosts)}: {before} → {wanted} (all users)"
        yield Step(HOOK, HOOK, "MODULEPATH hook", tuple(hosts), reason, {"MODULEFILES": wanted}, sentence)


def hooks_of_others(request: PlanRequest, facts: Mapping[str, Facts]) -> dict[str, list[str]]:
    """Return the hosts whose hook names another prefix's modulefiles and would name ours, by that directory; none
    where the hook is left alone."""
    found: dict[str, list[str]] = {}
    for host in request.inventory.hosts:
        seen = facts.get(host.name)
        if seen and seen.modules.hook and HOOK not in request.skip and lacking_hook(request, seen):
            found.setdefault(seen.modules.hook, []).append(host.name)
    return found


def leave_hook(made: Plan, request: PlanRequest) -> Plan:
    """Return a plan without the steps of the hook, where `request` leaves it now that a person answered."""
    if HOOK not in request.skip:
        return made
    notes = tuple(dict.fromkeys((*made.notes, *without_hook(request))))
    return replace(made, steps=tuple(step for step in made.steps if step.kind != HOOK), notes=notes)


def lacking_build_deps(choice: Decisions, facts: Facts) -> Reason | None:
    """Return why the build host needs packages, or None."""
    lacking = host_recipes.lacking_build_tools(facts, choice.python)
    return (
        Reason(f"no {', '.join(lacking)}", "compiler, cmake ≥ 3.19, ninja, git, make, mlx5 and Python headers")
        if lacking
        else None
    )


def without_hook(request: PlanRequest) -> Iterator[str]:
    """Yield what users have to type where the hook is left out."""
    if HOOK in request.skip:
        yield f"no MODULEPATH hook: `module use {request.prefix}/modulefiles` before `module load`"


def lacking_hook(request: PlanRequest, facts: Facts) -> Reason | None:
    """Return why a host needs the MODULEPATH hook, or None (also where no module system would read it)."""
    wanted = f"{request.prefix}/modulefiles"
    if facts.modules.kind == "none" or facts.modules.hook == wanted:
        return None
    return Reason(f"{facts.modules.hook}, which it takes the place of" if facts.modules.hook else "no hook", wanted)


def build_steps(choice: Decisions, missing: Sequence[Entry]) -> Iterator[Step]:
    """Yield one step for each entry to build."""
    for entry in missing:
        title = f"build {TITLES_OF_ENTRIES.get(entry.kind, entry.kind)} {entry.version}"
        yield Step("build", entry.name, title, (choice.build_host,), Reason("not in the store", entry.name))


def offer_steps(choice: Decisions, facts: Mapping[str, Facts], missing: Sequence[Entry]) -> Iterator[Step]:
    """Yield the step that publishes a new generation, unless the current one offers the same, and nothing of it is
    built again, or was by a run that did not come to its offer: a generation keeps the sums of its entries' records."""
    prefix = facts[choice.prefix_host].prefix
    current = offer.read_offer(prefix.manifest)
    if current is None or offer.offer_digest(current) != offer.offer_digest(choice.offer):
        found = f"generation {prefix.generation}, which offers something else" if current else "nothing offered"
        wanted = (
            f"{choice.record.module} as {'default' if choice.offer.default_stack == choice.record.key else 'one more'}"
        )
    elif missing or any(entry.name in prefix.unproved for entry in choice.entries):
        found = f"generation {prefix.generation}, which keeps the records of what was there before"
        wanted = f"a generation with the records of what {'is built now' if missing else 'was built since'}"
    else:
        return
    yield Step(
        "offer",
        "offer",
        "publish modules",
        (choice.prefix_host,),
        Reason(found, wanted),
        sentence=offer_sentence(choice, current),
        changes=tuple(offer_changes(choice, current, prefix, facts)),
    )


def offer_sentence(choice: Decisions, current: Offer | None) -> str:
    """Return what becomes of the modules: added beside others, or changed."""
    record, default = choice.record, choice.offer.stacks[choice.offer.default_stack]
    stays = "the default" if record.key == default.key else f"default stays {default.module}"
    new = current is None or record.key not in current.stacks
    machine = f" for {record.machine}" if record.machine else ""
    return f"publish modules: {'add' if new else 'change'} {record.module}{machine} ({stays})"


def offer_changes(
    choice: Decisions, current: Offer | None, prefix: Prefix, facts: Mapping[str, Facts]
) -> Iterator[str]:
    """Yield what the new generation has that the current one has not, a line each. That hosts joined or left is the
    reason of a variable that changed where profile and DeepEP are the same."""
    yield f"{CHANGED} generation {prefix.generation} → a new one" if current else f"{ADDED} the first generation"
    inputs = {entry.name: entry.inputs for entry in choice.entries}
    old_facts = {} if current is None else offer_facts(current, {})
    added = current is None or choice.record.key not in current.stacks
    changes = difference(old_facts, offer_facts(choice.offer, inputs if added else {}))
    yield from brief(changes, "" if current is None else hosts_since(choice, current, prefix.manifest, facts))
    if current and not changes:
        prefixes = {record.prefix for record in current.stacks.values()} - {choice.record.prefix}
        yield f"{CHANGED} prefix: {', '.join(prefixes)} → {choice.record.prefix}" if prefixes else OTHER_TEXTS


def hosts_since(choice: Decisions, current: Offer, manifest: str, facts: Mapping[str, Facts]) -> str:
    """Return which hosts joined or left since the manifest of the current offer, where that may be why a variable
    changed; else ""."""
    before = current.stacks.get(choice.record.key)
    if before is None or (before.profile, before.deepep) != (choice.record.profile, choice.record.deepep):
        return ""
    earlier = set(json.loads(manifest).get("hosts", ()))
    seen = {*facts, *choice.absent, *choice.elsewhere}
    parts = ((seen - earlier, "joined"), (earlier - seen, "left"))
    return ", ".join(f"{fold(sorted(hosts))} {how}" for hosts, how in parts if hosts)


def verify_step(request: PlanRequest, choice: Decisions, facts: Mapping[str, Facts]) -> Step:
    """Return the check at the end of every run that changed something, and of the next one where it was not passed."""
    machine = choice.record.machine or offer.X86
    hosts = tuple(
        host.name
        for host in request.inventory.hosts
        if host.name in facts and offer.machine_of(facts[host.name]) == machine
    )
    reason = Reason("not seen to work since the last change", f"{choice.record.module} loads and deep_ep imports")
    sentence = f"load {choice.record.module} and import deep_ep on {fold(hosts)}"
    return Step("verify", "verify", "verify", hosts, reason, sentence=sentence)


def check_service(
    request: PlanRequest, choice: Decisions, facts: Mapping[str, Facts], missing: Sequence[Entry]
) -> None:
    """Raise Trouble when something is to be built where Slurm would never begin: on a host that the hosts file names
    for it."""
    reservation = commands.reservation_of(request.inventory.settings.sbatch_args)
    if missing and commands.out_of_service(facts[choice.build_host], reservation):
        here = {choice.build_host: facts[choice.build_host]}
        raise Trouble(commands.no_job_starts(here, reservation, "nothing can be built on this build_host"))


def check_space(request: PlanRequest, choice: Decisions, facts: Mapping[str, Facts], missing: Sequence[Entry]) -> None:
    """Raise Trouble when the prefix has less room than the wheels alone need."""
    if not any(entry.kind == "python" for entry in missing):
        return
    needed = int(sum(wheel.size for wheel in choice.wheels) * UNPACKED) // MIB
    free = facts[choice.prefix_host].prefix.free_mib
    if free < needed:
        remedy = "another --prefix, or free space there"
        raise Trouble(
            Problem(
                f"{fold([choice.prefix_host])} {request.prefix}",
                "not enough space",
                f"{free} MiB",
                f"{needed} MiB or more",
                remedy,
            )
        )


def step_json(step: Step) -> dict[str, Any]:
    """Return one step of a plan for the JSON document."""
    reason = {"found": step.reason.found, "wanted": step.reason.wanted}
    named = {"kind": step.kind, "name": step.name, "title": step.title, "hosts": list(step.hosts)}
    return {**named, "reason": reason, "changes": list(step.changes)}


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the keys of a plan for the JSON document."""
    estimate = {"download_bytes": plan.download_bytes, "disk_bytes": plan.disk_bytes}
    return {
        "steps": [step_json(step) for step in plan.steps],
        "notes": list(plan.notes),
        "estimate": estimate,
        "chosen": plan.chosen(),
    }
