"""Checks of what the user of a job finds: limits, devices, shared memory, the prefix, the module, a login
shell.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from deepep_bootstrap.doctor.findings import (
    BLOCKING,
    EVERYWHERE,
    NOTE,
    WARNING,
    Fault,
    HostView,
    Row,
    few,
    memlock_severity,
)
from deepep_bootstrap.inventory.machine import Library
from deepep_bootstrap.plan.host_recipes import SHM_MIB

SHM = "/dev/shm"  # noqa: S108 - it is looked at, nothing is written

SETTLED = {
    "NVSHMEM_REMOTE_TRANSPORT": (
        ("ibgda",),
        NOTE,
        "not a transport NVSHMEM knows; IBGDA is switched on by DeepEP itself",
    ),
    "NVSHMEM_IBGDA_NIC_HANDLER": (("cpu",), WARNING, "with the CPU handler DeepEP V1 hangs"),
    "NVSHMEM_DISABLE_CUDA_VMM": (
        ("1", "true", "yes", "on"),
        WARNING,
        "a heap of fixed size, NVSHMEM_SYMMETRIC_SIZE, that DeepEP's buffers may not fit into; the module sets neither",
    ),
}
"""Variables that a login shell should not set to these values, and why."""


def looks_as_a_user(seen: HostView) -> Iterator[Fault]:
    """What follows was seen as somebody who runs jobs, not as root, who may do nearly everything."""
    if seen.view and seen.view.uid == 0:
        yield Fault(NOTE, "looked as root", "the user whose jobs will run", f"{seen.case.command('doctor')} --as=USER")


def locks_memory(seen: HostView) -> Iterator[Fault]:
    """The user may lock as much memory as RDMA registers."""
    view, limit = seen.view, seen.view.memlock if seen.view else seen.facts.prepared.memlock
    if not view and seen.case.as_another:
        # The limit of the connection's own user says nothing of the one who was asked for.
        return
    if seen.networked and limit and limit != "unlimited" and not (view and view.ipc_lock):
        fix = (
            "a new log-in; ulimit -Hl there says what it gets"
            if "limits" in seen.well
            else f"{seen.case.bootstrap}  # then log in again"
        )
        if view and view.container:
            fix = "--ulimit memlock=-1 --cap-add IPC_LOCK for this container"
        yield Fault(memlock_severity(limit), f"memlock {limit} KiB", "unlimited", fix)


def submits_unlimited(seen: HostView) -> Iterator[Fault]:
    """Where jobs are submitted, no low limit goes along with them: by default Slurm gives a job the soft limits of
    that shell."""
    limit = seen.view.memlock if seen.view else seen.facts.prepared.memlock
    if seen.case.link and seen.facts.slurm.brings_memlock and limit and limit != "unlimited":
        wanted = "unlimited, or PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"
        fix = "PropagateResourceLimitsExcept=MEMLOCK in slurm.conf, then scontrol reconfigure"
        yield Fault(WARNING, f"memlock {limit} KiB, which Slurm takes along into jobs", wanted, fix)


def has_shared_memory(seen: HostView) -> Iterator[Fault]:
    """Shared memory is there, large enough, and the user may write to it."""
    size, view = seen.facts.prepared.shm_mib, seen.view
    grow = "mount -o remount,size=16G /dev/shm; the same size in /etc/fstab"
    fix = "--shm-size=16g for this container" if view and view.container else grow
    if view and view.shm in {"absent", "denied"}:
        yield Fault(BLOCKING, f"{SHM} {view.shm} for {view.user}", "writable (mode 1777)", fix)
    elif 0 < size < SHM_MIB:
        yield Fault(WARNING, f"{SHM} of {size} MiB", f"{SHM_MIB} MiB or more", fix)


def opens_devices(seen: HostView) -> Iterator[Fault]:
    """The user may open the device files of GPUs and NICs."""
    view = seen.view
    if not view:
        return
    wanted = ("/dev/nvidia", "/dev/infiniband") if seen.networked else ("/dev/nvidia",)
    refused = [f"{path}: {problem}" for path, problem in view.devices if problem and path.startswith(wanted)]
    box = view.container
    if refused:
        fix = (
            "--gpus all --device /dev/infiniband for this container"
            if box
            else "the mode or group of these files (udev rules)"
        )
        yield Fault(BLOCKING, few(refused), f"{view.user} may open them", fix)
    verbs = [path for path, _ in view.devices if path.startswith("/dev/infiniband/uverbs")]
    if box and seen.networked and not verbs:
        yield Fault(
            BLOCKING, f"no /dev/infiniband/uverbs* in this container ({box})", "one a NIC", "--device /dev/infiniband"
        )


def has_clean_environment(seen: HostView) -> Iterator[Fault]:
    """A login shell sets nothing that works against the module."""
    view = seen.view
    if not view:
        return
    variables, fix = (
        dict(view.variables),
        "removing it from the start-up files of the shell (/etc/profile.d, ~/.bashrc)",
    )
    for name, (values, severity, why) in SETTLED.items():
        if variables.get(name, "").startswith(values):
            yield Fault(severity, f"{name}={variables[name]}: {why}", f"{name} unset", fix)
    if "TORCH_NCCL_USE_COMM_NONBLOCKING" in variables and seen.facts.prepared.gib:
        yield Fault(
            NOTE,
            "TORCH_NCCL_USE_COMM_NONBLOCKING is set, which Google's gIB warns of; the module unsets it",
            "unset",
            fix,
        )
    if "NVSHMEM_IB_TRAFFIC_CLASS" in variables and seen.case.link == "InfiniBand":
        yield Fault(WARNING, "NVSHMEM_IB_TRAFFIC_CLASS is set, which ends the transport on InfiniBand", "unset", fix)
    if "libnvshmem" in variables.get("LD_PRELOAD", ""):
        yield Fault(WARNING, f"LD_PRELOAD={variables['LD_PRELOAD']}", "no NVSHMEM in every process", fix)
    yield from _brought_along(seen, view.libraries, fix)


def _brought_along(seen: HostView, libraries: tuple[str, ...], fix: str) -> Iterator[Fault]:
    """Yield what a login shell brings beside the module's own: libibverbs, NCCL, another deep_ep."""
    alone = f"`module load deepep-env/{seen.case.stack.name}` in place of deepep where that one is meant"
    for name, wanted, remedy in (
        ("libibverbs.so.1", "the system's libibverbs", fix),
        ("libnccl.so.2", "one NCCL in a process, the one that torch or the module brings", fix),
        ("deep_ep", "one deep_ep: the module's hides it", f"{alone}; else removing it"),
    ):
        if brought := [path for path in libraries if path.endswith(f"/{name}")]:
            where = "Python's path" if name == "deep_ep" else "LD_LIBRARY_PATH"
            yield Fault(WARNING, f"{where} brings {few(brought)}", wanted, remedy)


def names_drivers(seen: HostView) -> Iterator[Fault]:
    """RDMAV_DRIVERS names providers that libibverbs can load. It loads them beside the configured ones: `mlx5`, or a
    path to which it adds `-rdmav34.so`; a folder it does not search (rdma-core's libibverbs/dynamic_driver.c)."""
    variables = dict(seen.view.variables) if seen.view else {}
    name = next((each for each in ("RDMAV_DRIVERS", "IBV_DRIVERS") if each in variables), "")
    if not name:
        return
    wanted = f"{name} unset"
    fix = "removing it from the start-up files of the shell; providers belong into the system's own folder"
    for word in filter(None, re.split("[:;]", variables[name])):
        severity, says = judge_driver(word, seen.facts.prepared.verbs)
        if severity:
            yield Fault(severity, f"{name}={variables[name]}: {says}", wanted, fix)


def judge_driver(word: str, verbs: Sequence[Library]) -> tuple[str, str]:
    """Return how bad one driver of RDMAV_DRIVERS is, and what it is; empty texts where libibverbs can load it, or
    where no library of RDMA is known at all."""
    abis = {each.abi for each in verbs if each.kind == "libibverbs"}
    providers = [each for each in verbs if each.kind == "provider"]
    named = [each for each in providers if f"/lib{word}-rdmav" in each.path]
    named += [each for each in providers if each.path.startswith(f"{word}-rdmav")]
    if not verbs or any(each.abi in abis for each in named):
        return "", ""
    if any(each.path.startswith(f"{word.rstrip('/')}/") for each in verbs):
        return WARNING, "a folder, which libibverbs does not search"
    if named:
        return WARNING, "a provider of another libibverbs"
    return NOTE, "not known whether there is such a provider"


def reads_prefix(seen: HostView) -> Iterator[Fault]:
    """The prefix answers, and the user may read it."""
    prefix, view = seen.facts.prefix, seen.view
    if prefix.problem:
        yield Fault(
            BLOCKING,
            f"{seen.case.prefix} {prefix.problem}",
            "the shared directory",
            f"mounting {seen.case.prefix} there",
        )
    elif view and prefix.exists and view.prefix in {"absent", "denied"}:
        fix = f"chmod a+rX of {seen.case.prefix} and every directory above it"
        yield Fault(BLOCKING, f"{view.user} cannot read {seen.case.prefix}", "readable by every user", fix)


def has_module_system(seen: HostView) -> Iterator[Fault]:
    """There is a module command to load DeepEP with."""
    if seen.facts.modules.kind == "none":
        load = f". {seen.case.prefix}/current/env.sh"
        yield Fault(NOTE, "no module system", "Lmod or environment-modules", f"`{load}` in place of `module load`")
    elif seen.view and seen.view.module == "no" and seen.view.login == "":
        yield Fault(
            WARNING,
            f"no module command in a login shell of {seen.view.user}",
            "module",
            "the shell's start-up files of this user",
        )
    elif seen.view and seen.view.login:
        yield Fault(
            WARNING,
            f"{seen.view.user}: {seen.view.login}",
            "a login shell within seconds",
            "the shell's start-up files of this user",
        )


def has_hook(seen: HostView) -> Iterator[Fault]:
    """Login shells look for modules in the prefix."""
    modules, wanted = seen.facts.modules, f"{seen.case.prefix}/modulefiles"
    if seen.case.offered and modules.kind != "none" and modules.hook != wanted:
        fix = f"{seen.case.bootstrap} --take-over" if modules.hook else seen.case.bootstrap
        yield Fault(BLOCKING, modules.hook or "no MODULEPATH hook", wanted, fix)


def sees_module(seen: HostView) -> Iterator[Fault]:
    """`module avail` of the user shows what the prefix offers."""
    view, modules = seen.view, seen.facts.modules
    hooked = modules.kind != "none" and modules.hook == f"{seen.case.prefix}/modulefiles"
    if (
        seen.case.offered
        and hooked
        and view
        and view.module == "yes"
        and view.prefix == "readable"
        and not view.visible
    ):
        fix = "the shell's start-up files of this user, which may set MODULEPATH anew"
        yield Fault(BLOCKING, f"`module avail deepep` of {view.user} shows nothing", "deepep/…", fix)


ROWS = (
    Row("job-user", "Root may do what users may not, so limits and rights of devices were not tried.", looks_as_a_user),
    Row(
        "memlock",
        "RDMA locks the memory it works on; a limit makes that fail.",
        locks_memory,
        recipe="limits",
        always=True,
    ),
    Row(
        "submit-memlock",
        "Our tests raise the limit again where they may; jobs of users run with it.",
        submits_unlimited,
        roles=("login",),
    ),
    Row("shm", "The ranks of a node meet in shared memory.", has_shared_memory, recipe="limits", always=True),
    Row("device-access", "Jobs open the device files of GPUs and NICs as their user.", opens_devices),
    Row(
        "environment",
        "What a login shell sets reaches every job and stands over the module's own choice.",
        has_clean_environment,
    ),
    Row(
        "rdma-drivers",
        "What RDMAV_DRIVERS names and libibverbs cannot load leaves a warning in every log, and helps nobody.",
        names_drivers,
    ),
    Row("prefix-access", "Everything a job runs is read from the prefix.", reads_prefix, roles=EVERYWHERE),
    Row("module-system", "Users load DeepEP with `module load deepep`.", has_module_system, roles=EVERYWHERE),
    Row("module-hook", "Without it `module load deepep` finds nothing.", has_hook, roles=EVERYWHERE),
    Row("module-visible", "This user's `module load deepep` finds nothing.", sees_module, roles=EVERYWHERE),
)
