"""`invoke facts`: look at the hosts and say what they are."""

from __future__ import annotations

from dataclasses import asdict

from deepep_bootstrap.errors import OK, TROUBLE
from deepep_bootstrap.facts import Facts
from deepep_bootstrap.hosts import fold
from deepep_bootstrap.report import Screen
from deepep_bootstrap.survey import Flags, gather, open_door, read_inventory


def facts(flags: Flags) -> int:
    """Print what every host is, equal hosts once; exit 1 when some did not answer."""
    screen = Screen("facts", as_json=flags.json)
    inventory, prefix = read_inventory(flags)
    with open_door(flags, inventory) as door:
        survey = gather(flags, door, inventory, prefix)
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, seen in survey.facts.items():
        groups.setdefault(tuple(lines(seen)), []).append(name)
    for facts_of, names in groups.items():
        screen.say(fold(names), style="bold")
        for key, value in facts_of:
            screen.say(f"  {key:<12} {value}")
    for problem in survey.problems:
        screen.problem(problem)
    code = TROUBLE if survey.problems else OK
    screen.document(code, survey.problems, hosts={name: asdict(seen) for name, seen in survey.facts.items()})
    return code


def lines(seen: Facts) -> list[tuple[str, str]]:
    """Return what a person wants to know of one host, a label and a sentence each."""
    gpus = sorted({f"{gpu.name}, compute {gpu.capability}, {gpu.memory_mib // 1024} GiB, driver {gpu.driver}" for gpu in seen.gpus})
    active = [device.name for device in seen.rdma if any(port.state == "ACTIVE" for port in device.ports)]
    layers = sorted({port.link_layer for device in seen.rdma for port in device.ports if port.link_layer})
    slurm = seen.slurm
    prefix = seen.prefix
    state = f"{prefix.fs}, {prefix.free_mib // 1024} GiB free, generation {prefix.generation or 'none'}"
    return [
        ("system", f"{seen.os_name}, kernel {seen.kernel}, {seen.machine}"),
        ("machine", f"{seen.cpus} CPUs, {seen.memory_mib // 1024} GiB"),
        ("GPUs", f"{len(seen.gpus)} × {'; '.join(gpus)}" if gpus else "none"),
        ("CUDA", ", ".join(f"{kit.version} in {kit.path}" for kit in seen.toolkits) or "none"),
        ("RDMA", f"{len(active)} of {len(seen.rdma)} devices active ({', '.join(layers)})" if seen.rdma else "none"),
        ("Python", ", ".join(f"{python.path} {python.version}" for python in seen.pythons) or "none"),
        ("tools", ", ".join(f"{name} {version}" for name, version in seen.tools) or "none"),
        ("modules", f"{seen.modules.kind} {seen.modules.version}".strip()),
        ("Slurm", f"{slurm.version}, node {slurm.node or 'none'} {slurm.state}".rstrip() if slurm.works else "none"),
        ("prefix", f"{prefix.path}: {state}" if prefix.exists else f"{prefix.path}: not there yet"),
    ]
