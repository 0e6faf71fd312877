"""Checks of the GPUs of one host, their driver and their links."""

from __future__ import annotations

import re
from collections.abc import Iterator

from deepep_bootstrap.doctor.findings import BLOCKING, NOTE, WARNING, Case, Fault, HostView, Row, few
from deepep_bootstrap.doctor.grace import GRACE
from deepep_bootstrap.inventory.machine import FABRIC_WELL, Machine

GPUS_PER_NODE = 8
"""NUM_MAX_NVL_PEERS of DeepEP V1 (csrc/kernels/configs.cuh)."""

CAPABILITY_FLOOR = (9, 0)
"""V1's FP8 and TMA code is for Hopper and later; its build without them (DISABLE_SM90_FEATURES) has no NVSHMEM."""

DRIVER_CUDA = (
    (580, 13, 0),
    (575, 12, 9),
    (570, 12, 8),
    (565, 12, 7),
    (560, 12, 6),
    (555, 12, 5),
    (550, 12, 4),
    (535, 12, 2),
    (525, 12, 0),
)
"""Driver branch and the CUDA it brings, newest first: NVIDIA's CUDA Toolkit Release Notes, table "CUDA Toolkit and
Corresponding Driver Versions". A program of a CUDA major runs on any driver that brings this major."""

NVLSM = (
    "no NVSwitch is on the PCI bus. On HGX and DGX B200 and B300 the fabric manager needs NVLSM: install "
    "nvlink5-{branch} (both), "
    "libibumad3 (Red Hat: libibumad) and infiniband-diags, and load ib_umad at every boot, by hand, then {start}. "
    "In a virtual machine or a GB200 rack, whoever runs the switches starts it"
)
"""What recipes/host/fabric-manager.sh says too. NVIDIA's Fabric Manager User Guide: from NVLink 5 on, NVSwitches are
managed through InfiniBand devices by the NVLink subnet manager (NVLSM)."""

OPTIONS = {"EnableStreamMemOPs": "1"}
PEER_MAPPING = "PeerMappingOverride=1"


def has_driver(seen: HostView) -> Iterator[Fault]:
    """A GPU host shows GPUs through nvidia-smi."""
    facts, prepared = seen.facts, seen.facts.prepared
    if facts.gpus:
        return
    if not prepared.gpu_devices and not facts.gpu_problem:
        yield Fault(BLOCKING, "no NVIDIA GPU on the PCI bus", "GPUs", "role=login for this host in the hosts file")
        return
    found = str(facts.gpu_problem) or f"{prepared.gpu_devices} GPUs without a working driver"
    # A driver that is loaded is left alone by its recipe; another version of it on disk, or a GPU that hangs, takes a
    # reboot.
    fix = (
        "a reboot of this host; dmesg says more"
        if prepared.nvidia_flavor
        else f"{seen.case.bootstrap} --reboot=rolling"
    )
    yield Fault(BLOCKING, found, "a driver that nvidia-smi answers for", fix)


def shows_all_gpus(seen: HostView) -> Iterator[Fault]:
    """Every GPU on the PCI bus answers."""
    there, answering = seen.facts.prepared.gpu_devices, len(seen.facts.gpus)
    if 0 < answering < there:
        box = seen.view.container if seen.view else ""
        fix = "--gpus all for this container" if box else "dmesg | grep Xid  # then a reboot of this host"
        yield Fault(BLOCKING, f"{answering} of {there} GPUs answer", f"{there}", fix)


def has_eight(seen: HostView) -> Iterator[Fault]:
    """The normal kernels of V1 are made for eight GPUs a node; one node alone can run with fewer processes, and so can
    the low-latency kernels, and V2."""
    count = len(seen.facts.gpus)
    if not count or count == GPUS_PER_NODE or count < seen.facts.prepared.gpu_devices or seen.case.stack.nccl_wheel:
        return
    alone = f"{seen.case.command('test')} --kind=intranode --args='--num-processes {count}'"
    fix = alone if count < GPUS_PER_NODE else "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7"
    if seen.case.link and count < GPUS_PER_NODE:
        fix = f"{seen.case.with_stack('v2')}  # or V1 for low latency and single nodes alone: {alone}"
    wanted = f"{GPUS_PER_NODE} GPUs, for V1's normal mode between nodes" if seen.case.link else f"{GPUS_PER_NODE} GPUs"
    yield Fault(BLOCKING if seen.case.link else WARNING, f"{count} GPUs", wanted, fix)


def has_equal_gpus(seen: HostView) -> Iterator[Fault]:
    """All GPUs of a host are of one kind."""
    kinds = {f"{gpu.name} ({gpu.capability})" for gpu in seen.facts.gpus}
    if len(kinds) > 1:
        yield Fault(WARNING, few(sorted(kinds)), "one kind of GPU", "CUDA_VISIBLE_DEVICES, to use one kind only")


def has_hopper(seen: HostView) -> Iterator[Fault]:
    """V1's kernels can be built for the GPU."""
    old = sorted({gpu.capability for gpu in seen.facts.gpus if below_floor(gpu.capability)})
    if old:
        yield Fault(
            BLOCKING, f"compute capability {few(old)}", "9.0 (Hopper) or later", "--limit, to the hosts with newer GPUs"
        )


def below_floor(capability: str) -> bool:
    """Return whether "8.0" is too old; what nvidia-smi did not say is not."""
    return (
        bool(re.fullmatch(r"[0-9]+\.[0-9]", capability))
        and tuple(int(part) for part in capability.split(".")) < CAPABILITY_FLOOR
    )


def runs_cuda(seen: HostView) -> Iterator[Fault]:
    """The driver brings the stack's CUDA major."""
    for driver in sorted({gpu.driver for gpu in seen.facts.gpus}):
        branch = driver_branch(driver)
        major, minor = cuda_of(branch)
        if branch and major < int(seen.case.stack.cuda):
            brings = f"CUDA {major}.{minor}" if major else "no CUDA 12"
            yield too_old(seen.case, f"driver {driver} ({brings})", major)


def too_old(case: Case, found: str, major: int) -> Fault:
    """Return the fault of a driver that brings no more than CUDA `major`: another stack fits it, or a newer driver."""
    floor = min(floor for floor, brought, _ in DRIVER_CUDA if brought >= int(case.stack.cuda))
    fitting = next((name for name, cuda in case.other_stacks.items() if int(cuda) <= major), "")
    fix = case.with_stack(fitting) if fitting else f"installing driver {floor} or later, then a reboot"
    return Fault(BLOCKING, found, f"driver {floor} or later for CUDA {case.stack.cuda}", fix)


def driver_branch(driver: str) -> int:
    """Return 580 of "580.159.04"; 0 for what is no version."""
    branch = driver.split(".")[0]
    return int(branch) if branch.isdigit() else 0


def cuda_of(branch: int) -> tuple[int, int]:
    """Return major and minor of the CUDA that a driver branch brings; zeros before CUDA 12."""
    return next(((major, minor) for floor, major, minor in DRIVER_CUDA if branch >= floor), (0, 0))


def has_nvlink(seen: HostView) -> Iterator[Fault]:
    """Every pair of GPUs is joined by NVLink."""
    pairs = {
        (min(one.gpu, one.other), max(one.gpu, one.other)): one.by
        for one in seen.facts.prepared.nvlinks
        if one.gpu != one.other
    }
    without = {pair: by for pair, by in sorted(pairs.items()) if not by.startswith("NV")}
    if without:
        found = few(f"GPU {one} and {other} over {by}" for (one, other), by in without.items())
        yield Fault(
            BLOCKING,
            found,
            "NVLink between every two GPUs",
            "nvidia-smi nvlink --status  # then drain and reboot this host",
        )


def has_fabric(seen: HostView) -> Iterator[Fault]:
    """On NVSwitch machines the fabric is configured; until then CUDA refuses to start (error 802)."""
    prepared = seen.facts.prepared
    if prepared.fabric_state.lower() not in FABRIC_WELL:
        found = f"fabric {prepared.fabric_state}, fabric manager {prepared.fabric_manager or 'not there'}"
        yield Fault(BLOCKING, found, "fabric state Completed", fabric_fix(prepared))


def fabric_fix(prepared: Machine) -> str:
    """Return what to do about a fabric that is not well. Programs run on the GPUs that have joined it, and a fabric
    manager that starts below them breaks their NVLink multicast."""
    version = prepared.nvidia_version or "the driver's version"
    joined = FABRIC_WELL.intersection(prepared.fabric_state.lower().split(", "))
    start = (
        "systemctl enable nvidia-fabricmanager, a drain and a reboot"
        if joined
        else "systemctl enable --now nvidia-fabricmanager"
    )
    if prepared.fabric_manager == "active":
        return "journalctl -u nvidia-fabricmanager; nvidia-smi -q"
    if not prepared.nvswitches:
        return NVLSM.format(branch=version.split(".")[0] if prepared.nvidia_version else "BRANCH", start=start)
    if prepared.fabric_manager in {"", "absent"}:
        return f"installing nvidia-fabricmanager {version}, then {start}"
    return f"{start if joined else 'systemctl restart nvidia-fabricmanager'}  # it must be {version} like the driver"


def has_options(seen: HostView) -> Iterator[Fault]:
    """The driver runs with the options that let a GPU ring a NIC's doorbell. They are for x86_64: on Grace GPU and NIC
    are coherent with the processor's memory, and NVSHMEM's notes ask for them on x86 alone."""
    params = dict(seen.facts.nvidia_params)
    if not (seen.networked and params) or seen.case.handler.startswith("cpu") or seen.facts.machine == GRACE:
        return
    lacking = [f"{name}={value}" for name, value in OPTIONS.items() if params.get(name) != value]
    dwords = params.get("RegistryDwords", "")
    lacking += [PEER_MAPPING] if PEER_MAPPING not in dwords.split(";") else []
    if lacking:
        found = f"EnableStreamMemOPs={params.get('EnableStreamMemOPs', '?')}, RegistryDwords={dwords or 'empty'}"
        yield Fault(WARNING, found, " and ".join(lacking), f"{seen.case.bootstrap} --reboot=rolling")


def reaches_gpu_memory(seen: HostView) -> Iterator[Fault]:
    """NICs can read and write GPU memory: by dma-buf, or by nvidia_peermem; never with the old module beside it."""
    if not (seen.networked and seen.facts.gpus):
        return
    loaded, prepared = seen.facts.kernel_modules, seen.facts.prepared
    if not prepared.dmabuf and "nvidia_peermem" not in loaded and "nv_peer_mem" not in loaded:
        found = f"{prepared.nvidia_flavor or 'unknown'} driver, no dma-buf, nvidia_peermem not loaded"
        yield Fault(BLOCKING, found, "dma-buf (open driver), or nvidia_peermem", seen.case.bootstrap)
    elif "nv_peer_mem" in loaded:
        beside = "beside nvidia_peermem" if "nvidia_peermem" in loaded else "instead of nvidia_peermem"
        yield Fault(
            WARNING, f"the old module nv_peer_mem is loaded {beside}", "nv_peer_mem removed", seen.case.bootstrap
        )


def is_free(seen: HostView) -> Iterator[Fault]:
    """Nobody computes on the GPUs outside Slurm's knowledge."""
    slurm, count = seen.facts.slurm, sum(gpu.processes for gpu in seen.facts.gpus)
    if not count or slurm.jobs:
        return
    found = "1 GPU process" if count == 1 else f"{count} GPU processes"
    if slurm.works and slurm.node:
        yield Fault(WARNING, f"{found} without a job", "none", "nvidia-smi  # then ask whose they are")
    else:
        yield Fault(NOTE, found, "free GPUs", "later, or --on-busy-host=use")


ROWS = (
    Row(
        "nvidia-driver",
        "Without a driver there is no GPU to build for or to run on.",
        has_driver,
        recipe="nvidia-driver",
        always=True,
    ),
    Row("gpu-missing", "A GPU that does not answer keeps every job of this node from starting.", shows_all_gpus),
    Row(
        "gpu-count",
        "DeepEP V1's normal kernels between nodes are compiled for eight GPUs a node and count nodes by it.",
        has_eight,
    ),
    Row(
        "gpu-models",
        "The ranks of a node wait for the slowest GPU, and kernels are tuned for one kind.",
        has_equal_gpus,
    ),
    Row("gpu-capability", "DeepEP V1 with NVSHMEM is written for Hopper and later.", has_hopper),
    Row("driver-cuda", "A driver runs programs of its own CUDA major and older ones only.", runs_cuda),
    Row(
        "nvlink",
        "DeepEP writes into every other GPU of the node directly; one pair without NVLink stops it.",
        has_nvlink,
    ),
    Row(
        "nvlink-fabric",
        "CUDA does not start (error 802) before the fabric is configured.",
        has_fabric,
        "fabric-manager",
        always=True,
    ),
    Row(
        "driver-options",
        "With them the GPU may ring a NIC's doorbell itself; without, NVSHMEM falls back to a slower way or fails "
        "with error 800.",
        has_options,
        recipe="driver-options",
    ),
    Row(
        "peer-memory",
        "NICs must reach GPU memory themselves (GPUDirect RDMA).",
        reaches_gpu_memory,
        recipe="peer-memory",
    ),
    Row("gpu-busy", "Builds and checks leave a host with running GPU processes alone.", is_free),
)
