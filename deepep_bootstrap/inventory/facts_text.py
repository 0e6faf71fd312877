"""What a person wants to know of a host, as labels and sentences, and the same of many hosts with equal ones told once. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deepep_bootstrap.inventory.facts import Facts


def by_label(lines_of: Mapping[str, Sequence[tuple[str, str]]]) -> dict[str, dict[str, list[str]]]:
    """Return the lines of all hosts by label, and under each its values with the hosts that have them, in the order they came."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, pairs in lines_of.items():
        for label, value in pairs:
            found.setdefault(label, {}).setdefault(value, []).append(name)
    return found


def lines(seen: Facts) -> list[tuple[str, str]]:
    """Return what a person wants to know of one host, a label and a sentence each; nothing that differs on every host."""
    gpus = sorted({f"{gpu.name}, compute {gpu.capability}, {gpu.memory_mib // 1024} GiB, driver {gpu.driver}" for gpu in seen.gpus})
    active = [device.name for device in seen.rdma if any(port.state == "ACTIVE" for port in device.ports)]
    layers = sorted({port.link_layer for device in seen.rdma for port in device.ports if port.link_layer})
    origin = f"OFED {seen.prepared.ofed}" if seen.prepared.ofed else "the kernel's own driver"
    slurm = seen.slurm
    prefix = seen.prefix
    state = f"{prefix.fs}, {prefix.free_mib // 1024} GiB free, generation {prefix.generation or 'none'}"
    return [
        ("system", f"{seen.os_name}, kernel {seen.kernel}, {seen.machine}"),
        ("machine", f"{seen.cpus} CPUs, {seen.memory_mib // 1024} GiB"),
        ("GPUs", f"{len(seen.gpus)} × {'; '.join(gpus)}" if gpus else "none"),
        ("driver", driver_line(seen)),
        ("CUDA", ", ".join(f"{kit.version} in {kit.path}" for kit in seen.toolkits) or "none"),
        ("RDMA", f"{len(active)} of {len(seen.rdma)} devices active ({', '.join(layers)}), {origin}" if seen.rdma else "none"),
        ("Python", ", ".join(f"{python.path} {python.version}" for python in seen.pythons) or "none"),
        ("tools", ", ".join(f"{name} {version}".rstrip() for name, version in seen.tools) or "none"),
        ("modules", f"{seen.modules.kind} {seen.modules.version}".strip()),
        ("Slurm", slurm_line(seen) if slurm.works else "none"),
        ("prefix", f"{prefix.path}: {state}" if prefix.exists else f"{prefix.path}: not there yet"),
    ]


def driver_line(seen: Facts) -> str:
    """Return version and flavor of the GPU driver, and the way on which NICs reach GPU memory: dma-buf, else a module for it."""
    if not seen.prepared.nvidia_version:
        return "not loaded"
    modules = [name for name in ("nvidia_peermem", "nv_peer_mem") if name in seen.kernel_modules]
    way = "through dma-buf" if seen.prepared.dmabuf else f"through {modules[0]}" if modules else "not reached by NICs"
    return f"{seen.prepared.nvidia_version}, {seen.prepared.nvidia_flavor}; GPU memory {way}"


def slurm_line(seen: Facts) -> str:
    """Return version and state of Slurm on a host, without the host's name in it."""
    state = f"node is {seen.slurm.state.lower()}" if seen.slurm.node else "a client, no node"
    return f"{seen.slurm.version}, {state}"
