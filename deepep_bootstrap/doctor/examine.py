"""The examination of hosts: facts, checks and the user's view in, findings out, the worst first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from deepep_bootstrap.core.errors import OK, VERDICT, Trouble
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.doctor import gpu, grace, host, network, user
from deepep_bootstrap.doctor.consistency import compare
from deepep_bootstrap.doctor.findings import BLOCKING, NOTE, SEVERITIES, WARNING, Case, Fault, Finding, HostView, Row
from deepep_bootstrap.inventory import network_env
from deepep_bootstrap.inventory.facts import Facts, Prefix
from deepep_bootstrap.inventory.network_env import HANDLER, read_profile
from deepep_bootstrap.plan import decisions, host_recipes
from deepep_bootstrap.plan.decisions import PlanRequest
from deepep_bootstrap.plan.host_recipes import Check
from deepep_bootstrap.plan.steps import MIB, UNPACKED
from deepep_bootstrap.prefix.defects import CHECK
from deepep_bootstrap.prefix.offer import X86, machine_of, of_machine, prefix_host, read_offer
from deepep_bootstrap.slurm import commands

ROWS: tuple[Row, ...] = (*gpu.ROWS, *grace.ROWS, *network.ROWS, *host.ROWS, *user.ROWS)
"""Every check of a single host; a new one is a row in one of these tables."""

TO_DO = {
    "nvidia-driver": BLOCKING,
    "fabric-manager": BLOCKING,
    "doca-ofed": WARNING,
    "driver-options": WARNING,
    "peer-memory": BLOCKING,
    "gdrdrv": BLOCKING,
    "rdma-userspace": WARNING,
    "limits": WARNING,
    "cuda-toolkit": BLOCKING,
    "python": BLOCKING,
}
"""How bad it is that a host recipe has something to do, unless a check of the host says worse."""

LOCAL_FILESYSTEMS = frozenset(
    ("ext2", "ext3", "ext4", "ext2/ext3", "xfs", "btrfs", "zfs", "overlay", "overlayfs", "tmpfs")
)
"""What `df -T` calls filesystems of one machine."""

Checks = Mapping[str, Mapping[str, Check]]


def case_of(request: PlanRequest, facts: Mapping[str, Facts], bootstrap: str) -> Case:
    """Return what the hosts are to be looked at for. `bootstrap` is the command line that prepares them, for the
    findings' advice."""
    gpu_hosts = {
        host.name: facts[host.name] for host in request.inventory.hosts if host.role == "gpu" and host.name in facts
    }
    profile, link, handler = profile_of(request, gpu_hosts)
    via = prefix_host(request.inventory, facts)
    offer = read_offer(facts[via].prefix.manifest) if via else None
    machine = next((machine_of(seen) for seen in gpu_hosts.values()), X86)
    target = max(request.stack.wheels.values(), key=len, default=())
    try:
        build_host = decisions.choose_build_host(request, gpu_hosts, [])
    except Trouble:
        build_host = next(iter(gpu_hosts), "")
    return Case(
        stack=request.stack,
        prefix=request.prefix,
        profile=profile,
        link=link,
        handler=handler,
        build_host=build_host,
        bootstrap=bootstrap,
        external_python=request.external_python,
        own_nccl=request.own_nccl,
        offered=offer is not None and request.stack.name in of_machine(offer, machine),
        alone=len(gpu_hosts) < 2,
        gres=request.inventory.settings.gres,
        reservation=commands.reservation_of(request.inventory.settings.sbatch_args),
        need_mib=0 if request.external_python else int(sum(wheel.size for wheel in target) * UNPACKED) // MIB,
        other_stacks={name: stack.cuda for name, stack in request.lock.stacks.items() if name != request.stack.name},
    )


def profile_of(request: PlanRequest, gpu_hosts: Mapping[str, Facts]) -> tuple[str, str, str]:
    """Return the profile's name, its link layer, and who rings doorbells; for hosts without any GPU those of a
    single node."""
    try:
        derived = network_env.derive(request.inventory.settings.profile, gpu_hosts, request.templates)
    except Trouble:
        if any(seen.gpus for seen in gpu_hosts.values()):
            raise
        return network_env.SINGLE, "", ""
    link = read_profile(derived.profile, request.templates).link
    return derived.profile, link, derived.environment.get(HANDLER, "")


def examine(request: PlanRequest, case: Case, seen: Sequence[HostView], checks: Checks) -> tuple[Finding, ...]:
    """Return everything that was found on the hosts `seen`, equal findings folded, the worst first. `checks` are
    what the checks of the host recipes said, by host and recipe."""
    single = [(host.name, finding) for host in seen for finding in examine_host(host, checks.get(host.name, {}))]
    gpu_hosts = [host for host in seen if host.role == "gpu"]
    together = [*share_prefix(case, seen), *have_slurm(case, seen), *share_python(case, gpu_hosts)]
    together += [*grace.share_clique(gpu_hosts), *compare(gpu_hosts)]
    built = known_defects(case, gpu_hosts)
    found = ordered([*built, *folded(single), *together], [host.name for host in request.inventory.hosts])
    return tuple(replace(finding, stacks=(request.stack.name,)) for finding in found)


def join(by_stack: Iterable[Sequence[Finding]], names: Sequence[str]) -> tuple[Finding, ...]:
    """Return the findings of several stacks, those that differ in nothing but stack and fix once with all their
    stacks; the fix of the first stack stands for all. `names` are the hosts in their order."""
    groups: dict[Finding, list[Finding]] = {}
    for finding in (finding for findings in by_stack for finding in findings):
        groups.setdefault(replace(finding, fix="", stacks=()), []).append(finding)
    stacks = [tuple(dict.fromkeys(name for each in same for name in each.stacks)) for same in groups.values()]
    return ordered((replace(same[0], stacks=mine) for same, mine in zip(groups.values(), stacks, strict=True)), names)


def known_defects(case: Case, gpu_hosts: Sequence[HostView]) -> Iterator[Finding]:
    """Yield what is wrong with the offered build itself on these GPUs."""
    names = tuple(host.name for host in gpu_hosts)
    for defect in case.defects if names else ():
        yield Finding(CHECK, BLOCKING, names, defect.found, defect.wanted, defect.why, defect.fix)


def examine_host(seen: HostView, checks: Mapping[str, Check]) -> Iterator[Finding]:
    """Yield what was found on one host. Where a recipe's own check was run, it says what is found and wanted."""
    seen = replace(seen, for_reboot=_in_state(checks, host_recipes.REBOOT), well=_in_state(checks, host_recipes.OK))
    faults_of_recipe: dict[str, list[Fault]] = {}
    for row, fault in _faults(seen):
        check = checks.get(row.recipe)
        if check is None or (check.state == host_recipes.OK and row.always):
            yield Finding(row.check, fault.severity, (seen.name,), fault.found, fault.wanted, row.why, fault.fix)
        elif check.state != host_recipes.OK:
            faults_of_recipe.setdefault(row.recipe, []).append(fault)
    for recipe, check in checks.items():
        if check.state != host_recipes.OK:
            yield from_recipe(seen, check, faults_of_recipe.get(recipe, []))


def _in_state(checks: Mapping[str, Check], state: str) -> frozenset[str]:
    return frozenset(recipe for recipe, check in checks.items() if check.state == state)


def _faults(seen: HostView) -> Iterator[tuple[Row, Fault]]:
    """Yield what the checks for hosts of this role found."""
    for row in ROWS:
        if seen.role in row.roles:
            yield from ((row, fault) for fault in row.look(seen))


def from_recipe(seen: HostView, check: Check, same: Sequence[Fault]) -> Finding:
    """Return the finding that a host recipe's check is; `same` is what checks of the host saw of it."""
    rolling = f"{seen.case.bootstrap} --reboot=rolling"
    at_once = next((fault.fix for fault in same), seen.case.bootstrap)
    found, note = str(check.found), str(check.note)
    severity, found, fix = {
        "todo": (TO_DO.get(check.recipe, WARNING), found, rolling if check.needs_reboot else at_once),
        "reboot": (WARNING, f"{found}; waits for a reboot", rolling),
        "stuck": (BLOCKING, f"{found}, although the host was rebooted since the change", note or "dmesg, on the host"),
    }.get(check.state, (WARNING, found, note))
    if check.recipe == "cuda-toolkit" and check.state == "todo" and not seen.builds:
        severity = NOTE
    if check.state != "reboot":
        severity = min([severity, *(fault.severity for fault in same)], key=SEVERITIES.index)
    why = next((row.why for row in ROWS if row.recipe == check.recipe), "DeepEP needs it.")
    return Finding(check.recipe, severity, (seen.name,), found, str(check.wanted), why, fix)


def share_prefix(case: Case, seen: Sequence[HostView]) -> Iterator[Finding]:
    """Yield what keeps the prefix from being one directory for all hosts."""
    prefixes = {host.name: host.facts.prefix for host in seen if not host.facts.prefix.problem}
    hosts_by_id: dict[str, list[str]] = {}
    for name, prefix in prefixes.items():
        hosts_by_id.setdefault(prefix.id, []).append(name)
    if len(hosts_by_id) > 1:
        ranked = sorted(hosts_by_id.items(), key=lambda group: -len(group[1]))
        found = "; ".join(f"{marker[:8] or 'nothing'} on {fold(names)}" for marker, names in ranked)
        odd = tuple(name for _, names in ranked[1:] for name in names)
        yield not_shared(case, odd, found, f"one {case.prefix} for all hosts")
        return
    local = tuple(name for name, prefix in prefixes.items() if is_local(prefix))
    if "" in hosts_by_id and len(prefixes) > 1 and local:
        found = f"{case.prefix} would be on a disk of each host's own ({prefixes[local[0]].fs})"
        yield not_shared(case, local, found, "a filesystem that the hosts share")


def not_shared(case: Case, hosts: tuple[str, ...], found: str, wanted: str) -> Finding:
    """Return the finding of hosts that see another prefix than the others do."""
    why = "One host builds, all others read what it built."
    fix = f"mounting one shared {case.prefix} everywhere, or --limit"
    return Finding("prefix-shared", BLOCKING, hosts, found, wanted, why, fix)


def is_local(prefix: Prefix) -> bool:
    """Whether a prefix is on a disk of the host's own."""
    return prefix.fs in LOCAL_FILESYSTEMS and prefix.source.startswith(("/dev/", "overlay"))


def have_slurm(case: Case, seen: Sequence[HostView]) -> Iterator[Finding]:
    """Yield a note where no host has anything to do with Slurm."""
    if not any(host.facts.slurm.works or host.facts.slurm.slurmd for host in seen):
        why = "Tests over several nodes are started by Slurm; those of one node run without."
        names = tuple(host.name for host in seen)
        yield Finding(
            "slurm", NOTE, names, "no Slurm", "a client of Slurm", why, f"{case.command('test')} --kind=intranode"
        )


def share_python(case: Case, gpu_hosts: Sequence[HostView]) -> Iterator[Finding]:
    """Yield what keeps the hosts from running with one Python: each has one of the stack's, but no two the same."""
    paths = {f"/usr/bin/python3.{decisions.minor_of(target)}" for target in case.stack.wheels}
    by_host = {host.name: {python.path for python in host.facts.pythons} & paths for host in gpu_hosts}
    if case.external_python or not by_host or not all(by_host.values()) or set.intersection(*by_host.values()):
        return
    found = "; ".join(f"{', '.join(sorted(mine))} on {name}" for name, mine in list(by_host.items())[:4])
    why = "One environment is built for all hosts, and runs with each host's own Python."
    fix = f"{case.bootstrap}  # or by hand: one of them everywhere"
    yield Finding(
        "python", BLOCKING, tuple(by_host), found, f"one of {' or '.join(sorted(paths))} on all hosts", why, fix
    )


def folded(single: Iterable[tuple[str, Finding]]) -> Iterator[Finding]:
    """Yield findings of single hosts, those that say the same once with all their hosts."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, finding in single:
        key = (finding.check, finding.severity, finding.found, finding.wanted, finding.why, finding.fix)
        groups.setdefault(key, []).append(name)
    for (check, severity, found, wanted, why, fix), names in groups.items():
        yield Finding(check, severity, tuple(names), found, wanted, why, fix)


def ordered(findings: Iterable[Finding], names: Sequence[str]) -> tuple[Finding, ...]:
    """Return findings by severity, then by their hosts in the order of `names`, then as they came."""
    place = {name: number for number, name in enumerate(names)}
    return tuple(
        sorted(
            findings,
            key=lambda finding: (
                SEVERITIES.index(finding.severity),
                [place.get(name, len(place)) for name in finding.hosts],
            ),
        )
    )


def exit_code(findings: Iterable[Finding], *, strict: bool) -> int:
    """Return 4 when something blocks, with `strict` also when something warns; 0 otherwise."""
    bad = {BLOCKING, WARNING} if strict else {BLOCKING}
    return VERDICT if any(finding.severity in bad for finding in findings) else OK


def finding_json(finding: Finding) -> dict[str, Any]:
    """Return one finding for the JSON document."""
    keys = ("check", "severity", "found", "wanted", "why", "fix")
    return {
        **{key: getattr(finding, key) for key in keys[:2]},
        "hosts": list(finding.hosts),
        **{key: getattr(finding, key) for key in keys[2:]},
        "stacks": list(finding.stacks),
    }
