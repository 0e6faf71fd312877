"""Checks of a host's software: what builds need, and what Slurm and reboots leave open."""

from __future__ import annotations

import re
from collections.abc import Iterator

from deepep_bootstrap.doctor.findings import BLOCKING, NOTE, WARNING, Fault, HostView, Row, few, memlock_severity
from deepep_bootstrap.inventory.facts import Python
from deepep_bootstrap.lock.compatibility import numbers
from deepep_bootstrap.plan import decisions, host_recipes
from deepep_bootstrap.slurm import commands, nodes

SCRATCH_MIB = 4096
"""A build tree of NVSHMEM and DeepEP takes about 2 GiB below TMPDIR; twice that leaves room for the compilers' own
files."""

WHY_COMPILER = "This stack compiles its kernels on each node when they are first used, with that node's compilers."

GLIBC_FLOOR = (2, 28)
"""The locked wheels are of platform manylinux_2_28."""


def was_rebooted(seen: HostView) -> Iterator[Fault]:
    """Nothing waits for a reboot."""
    prepared, fix = seen.facts.prepared, f"{seen.case.bootstrap} --reboot=rolling"
    waiting = waiting_recipes(seen)
    if waiting:
        yield Fault(WARNING, f"a reboot is waited for by {few(waiting)}", "a reboot since the change", fix)
    elif prepared.reboot_required and not seen.for_reboot:
        yield Fault(
            NOTE, "the distribution asks for a reboot", "a reboot since the last update", "a reboot when it suits you"
        )


def waiting_recipes(seen: HostView) -> list[str]:
    """Return the recipes whose change works after a reboot that has not come yet, but for those that say so
    themselves."""
    mine = [stamp.recipe for stamp in seen.facts.prepared.stamps if stamp.boot_id == seen.facts.boot_id]
    return [recipe for recipe in mine if recipe not in seen.for_reboot]


def is_in_service(seen: HostView) -> Iterator[Fault]:
    """Slurm would start jobs on this node."""
    state, reason, name = seen.facts.slurm.state, seen.facts.prepared.slurm_reason, seen.facts.slurm.node
    if seen.facts.slurm.works and not name:
        yield Fault(
            WARNING, "Slurm knows no node of this name", "a node", "slurm.conf, or role=login in the hosts file"
        )
    elif state and commands.is_usable(state, "any") and not commands.is_usable(state, seen.case.reservation):
        yield Fault(
            WARNING,
            state,
            "a node for everybody",
            "sbatch_args=--reservation=NAME in the hosts file, where it is yours",
        )
    elif state and not commands.is_usable(state, seen.case.reservation):
        found = f"{state}: {reason}" if reason else state
        by_hand = f"scontrol show node {name}; scontrol update nodename={name} state=resume"
        fix = seen.case.bootstrap if nodes.is_ours(reason) else by_hand
        yield Fault(WARNING, found, "a node in service", fix)


def finds_slurm(seen: HostView) -> Iterator[Fault]:
    """Where slurmd runs, Slurm's clients are found and answer."""
    slurm = seen.facts.slurm
    if slurm.slurmd and not slurm.version:
        fix = "the folder of sinfo in PATH of login shells (/etc/profile.d), or links to the clients in /usr/local/bin"
        yield Fault(
            BLOCKING,
            "slurmd runs, but its clients are not found",
            "sinfo on PATH, or in bin beside slurmd's folder",
            fix,
        )
    elif slurm.slurmd and not slurm.works:
        yield Fault(
            BLOCKING,
            "slurmd runs, but sinfo does not answer",
            "an answer of Slurm's controller",
            "scontrol ping, on the host",
        )


def slurm_locks_memory(seen: HostView) -> Iterator[Fault]:
    """slurmd, and so every job, may lock memory."""
    limit = seen.facts.prepared.slurmd_memlock
    if seen.networked and limit and limit != "unlimited":
        # Its unit is right, or it has none: what runs began before that, and a bootstrap has nothing to do.
        fix = "restarting slurmd there, when its steps have ended" if "limits" in seen.well else seen.case.bootstrap
        yield Fault(memlock_severity(limit), f"slurmd with memlock {limit} KiB", "LimitMEMLOCK=infinity", fix)


def offers_gpus(seen: HostView) -> Iterator[Fault]:
    """Slurm gives out all GPUs of the node."""
    if (
        not (seen.facts.slurm.node and seen.facts.gpus)
        or seen.case.gres == "none"
        or len(seen.facts.gpus) < seen.facts.prepared.gpu_devices
    ):
        return
    counts = re.findall(r"gpu(?::[A-Za-z][\w.-]*)?:([0-9]+)", seen.facts.slurm.gres)
    count, there = sum(int(one) for one in counts), len(seen.facts.gpus)
    if count != there:
        yield Fault(
            WARNING,
            f"Gres={seen.facts.slurm.gres or 'none'}",
            f"gpu:{there}",
            "Gres in slurm.conf, and gres.conf; or gres=none",
        )


def has_python(seen: HostView) -> Iterator[Fault]:
    """A Python that the stack has wheels for is there, or the one that was named."""
    facts, case = seen.facts, seen.case
    if case.external_python:
        yield from _has_named_python(seen)
        return
    targets = [target for target in case.stack.wheels if target.endswith(f"-{facts.machine}")]
    paths = [f"/usr/bin/python3.{decisions.minor_of(target)}" for target in sorted(targets, key=decisions.minor_of)]
    if not targets:
        machines = sorted({target.split("-")[1] for target in case.stack.wheels})
        yield Fault(
            BLOCKING,
            f"a machine of type {facts.machine or 'unknown'}",
            " or ".join(machines),
            "--python=/path/to/python with torch",
        )
    elif not any(python.path in paths for python in facts.pythons):
        found = few(python.path for python in facts.pythons) or "no Python"
        yield Fault(
            BLOCKING, found, " or ".join(paths), f"{case.bootstrap}  # or with --python=/path/to/python that has torch"
        )


def _has_named_python(seen: HostView) -> Iterator[Fault]:
    """The Python that was named is there, with a torch, and for DeepEP V2 with the libraries that this torch brings."""
    case, python = seen.case, seen.facts.external_python
    if python is None or python.problem:
        found = str(python.problem) if python else "not found"
        yield Fault(
            BLOCKING, f"{case.external_python}: {found}", "an interpreter with torch", "--python=/another/python"
        )
    elif case.stack.nccl_wheel and case.stack.nvshmem_wheel:
        for each in decisions.lacking_libraries(python.path, case.stack, seen.facts, own_nccl=case.own_nccl):
            yield Fault(BLOCKING, f"{python.path}: {each.found}", each.wanted, each.try_)


def has_glibc(seen: HostView) -> Iterator[Fault]:
    """The system is new enough for the wheels."""
    parts = [int(part) for part in seen.facts.glibc.split(".") if part.isdigit()]
    if not seen.case.external_python and parts and tuple(parts[:2]) < GLIBC_FLOOR:
        yield Fault(
            BLOCKING,
            f"glibc {seen.facts.glibc}",
            "glibc 2.28 or later",
            "a newer distribution, or --python=/path/to/python",
        )


def has_toolkit(seen: HostView) -> Iterator[Fault]:
    """The build host has a CUDA toolkit of the stack's major."""
    case = seen.case
    majors = {toolkit.version.split(".")[0] for toolkit in seen.facts.toolkits}
    if seen.builds and case.stack.cuda not in majors:
        found = few(f"CUDA {toolkit.version} in {toolkit.path}" for toolkit in seen.facts.toolkits) or "no CUDA toolkit"
        fitting = next((name for name, cuda in case.other_stacks.items() if cuda in majors), "")
        fix = f"{case.bootstrap}  # or with --stack={fitting}" if fitting else case.bootstrap
        yield Fault(BLOCKING, found, f"CUDA {case.stack.cuda} with nvcc", fix)


def has_host_compiler(seen: HostView) -> Iterator[Fault]:
    """The host compiler is as new as the stack's kernels want it, where they are compiled on every node."""
    needed, tools = seen.case.stack.needs.get("gcc", ""), dict(seen.facts.tools)
    if not needed or ("g++" not in tools and seen.builds):
        return
    wanted = f"g++ {needed} or later on PATH"
    fix = f"g++-{needed.split('.')[0]} or a newer toolset, first on PATH of login shells; or a newer distribution"
    version = tools.get("g++", "")
    if "g++" not in tools:
        yield Fault(BLOCKING, "no g++", wanted, fix)
    elif not version:
        yield Fault(NOTE, "a g++ that does not say its version", wanted, "g++ --version, on the host")
    elif numbers(version) < numbers(needed):
        yield Fault(BLOCKING, f"g++ {version}", wanted, fix)


def has_cuda_compiler(seen: HostView) -> Iterator[Fault]:
    """A CUDA compiler as new as the stack's kernels want it is there, where they are compiled on every node."""
    case, needed = seen.case, seen.case.stack.needs.get("nvcc", "")
    if not needed:
        return
    wanted = f"nvcc {needed} or later of CUDA {case.stack.cuda}"
    mine = [each for each in seen.facts.toolkits if not each.version or each.version.split(".")[0] == case.stack.cuda]
    if any(numbers(each.version) >= numbers(needed) for each in mine):
        return
    silent = few(each.path for each in mine if not each.version)
    if silent:
        fix = f"{silent.split(', ')[0]}/bin/nvcc --version, on the host"
        yield Fault(NOTE, f"an nvcc that does not say its version: {silent}", wanted, fix)
        return
    found = few(f"nvcc {each.version} in {each.path}" for each in seen.facts.toolkits) or "no nvcc"
    yield Fault(BLOCKING, found, wanted, f"a CUDA toolkit {needed} or later in /usr/local on this host")


def has_build_tools(seen: HostView) -> Iterator[Fault]:
    """The build host has compilers, cmake, ninja and the headers."""
    if not seen.builds:
        return
    lacking = host_recipes.lacking_build_tools(seen.facts, python_of(seen))
    if lacking:
        wanted = "compiler, cmake ≥ 3.19, ninja, git, make, mlx5 and Python headers"
        yield Fault(BLOCKING, f"no {', '.join(lacking)}", wanted, seen.case.bootstrap)


def python_of(seen: HostView) -> Python:
    """Return the interpreter that a build on this host would use; where there is none, one that lacks nothing:
    another check says so."""
    if seen.case.external_python:
        return seen.facts.external_python or Python("", "", header=True)
    paths = [
        f"/usr/bin/python3.{minor}" for minor in sorted(map(decisions.minor_of, seen.case.stack.wheels), reverse=True)
    ]
    mine = [python for path in paths for python in seen.facts.pythons if python.path == path]
    return mine[0] if mine else Python("", "", header=True)


def has_space(seen: HostView) -> Iterator[Fault]:
    """What is to be built fits."""
    prefix, scratch = seen.facts.prefix, seen.facts.scratch_free_mib
    if not seen.builds or prefix.problem:
        return
    if prefix.free_mib < seen.case.need_mib:
        fix = "another --prefix, or free space there"
        yield Fault(
            BLOCKING, f"{prefix.free_mib} MiB free for {seen.case.prefix}", f"{seen.case.need_mib} MiB or more", fix
        )
    if 0 < scratch < SCRATCH_MIB:
        yield Fault(
            WARNING, f"{scratch} MiB free for temporary files", f"{SCRATCH_MIB} MiB or more", "TMPDIR on a larger disk"
        )


def needs_modules_built(seen: HostView) -> bool:
    """Return whether a kernel module is missing that DKMS would build on this host."""
    facts, prepared = seen.facts, seen.facts.prepared
    no_driver = prepared.gpu_devices > 0 and not facts.gpus
    no_ofed = bool(seen.case.link) and prepared.mellanox_devices > 0 and not prepared.ofed
    return no_driver or (
        no_ofed and (not facts.rdma or any(device.name.startswith(host_recipes.INBOX_NAME) for device in facts.rdma))
    )


def has_headers(seen: HostView) -> Iterator[Fault]:
    """DKMS finds the headers of the running kernel where it has something to build."""
    if needs_modules_built(seen) and not seen.facts.prepared.headers:
        yield Fault(
            WARNING,
            f"no headers of kernel {seen.facts.kernel}",
            "the headers of the running kernel",
            seen.case.bootstrap,
        )


def may_load_modules(seen: HostView) -> Iterator[Fault]:
    """Secure Boot does not keep out what DKMS builds."""
    if needs_modules_built(seen) and seen.facts.prepared.secure_boot:
        fix = "mokutil --import of DKMS's key, or Secure Boot off in the firmware"
        yield Fault(WARNING, "Secure Boot is on", "a key of this host for the modules that DKMS builds", fix)


ROWS = (
    Row("reboot", "A change of driver or kernel modules works after a reboot only.", was_rebooted),
    Row("slurm-node", "Jobs do not start on it.", is_in_service),
    Row(
        "slurm-clients",
        "Without Slurm's word nobody sees whose jobs run there, and the host is left alone.",
        finds_slurm,
    ),
    Row("slurmd-memlock", "Jobs inherit the limit of slurmd.", slurm_locks_memory, recipe="limits", always=True),
    Row("slurm-gres", "A job gets the GPUs that Slurm knows of, no more.", offers_gpus),
    Row("python", "torch and DeepEP run with the Python that they were built for.", has_python, recipe="python"),
    Row("glibc", "The locked wheels do not load on an older system.", has_glibc),
    Row(
        "cuda-toolkit",
        "NVSHMEM and DeepEP are compiled with the toolkit of torch's CUDA major.",
        has_toolkit,
        recipe="cuda-toolkit",
    ),
    Row("host-compiler", WHY_COMPILER, has_host_compiler),
    Row("cuda-compiler", WHY_COMPILER, has_cuda_compiler),
    Row("build-deps", "NVSHMEM and DeepEP are built from source on this host.", has_build_tools),
    Row("space", "A build that runs out of space is lost.", has_space),
    Row("kernel-headers", "DKMS builds kernel modules against them.", has_headers),
    Row("secure-boot", "The kernel refuses modules without a signature it knows.", may_load_modules),
)
