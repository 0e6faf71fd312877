"""A small cluster made of values: a lock, hosts and facts to plan with, and changes to them by dotted path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from deepep_bootstrap.inventory import hostsfile
from deepep_bootstrap.inventory.facts import Facts, Gpu, Modules, Prefix, Python, Slurm, Toolkit
from deepep_bootstrap.plan.decisions import PlanRequest
from deepep_bootstrap.remote import host
from tests.support.shipped import shipped_env, shipped_lock, shipped_recipes

PREFIX = "/shared/deepep"
MARKER = "5f3a9c1e"

GPU = Gpu(
    0, "NVIDIA H100 80GB HBM3", 81559, "9.0", "580.95.05", "0000:1b:00.0", "/sys/devices/pci0000:15/0000:1b:00.0", 0, 0
)

READY = Facts(
    os_id="ubuntu",
    os_version="24.04",
    os_name="Ubuntu 24.04.3 LTS",
    kernel="6.8.0",
    machine="x86_64",
    cpus=128,
    memory_mib=1 << 20,
    gpus=tuple(replace(GPU, index=index) for index in range(8)),
    toolkits=(Toolkit("/usr/local/cuda", "12.9.86", True, True),),
    tools=(
        ("gcc", "13.3.0"),
        ("g++", "13.3.0"),
        ("make", "4.3"),
        ("cmake", "3.28.3"),
        ("ninja", "1.11.1"),
        ("git", "2.43.0"),
    ),
    headers=("infiniband/mlx5dv.h", "infiniband/verbs.h", "python3.12/Python.h"),
    pythons=(Python("/usr/bin/python3.12", "3.12.3", header=True),),
    modules=Modules("lmod", "8.6.19", "/usr/share/lmod/lmod/init/bash", (), f"{PREFIX}/modulefiles"),
    slurm=Slurm(True, "22.05.8", True, "n001", "idle", (), "gpu:8"),
    prefix=Prefix(PREFIX, True, True, "nfs", 1 << 20, MARKER),
)
"""A free GPU node on which nothing of ours is installed but the hook."""


def changed(value: Any, changes: Mapping[str, Any]) -> Any:
    """Return `value` with fields replaced by dotted path, e.g. {"prefix.id": ""}."""
    for path, new in changes.items():
        head, _, rest = path.partition(".")
        value = replace(value, **{head: changed(getattr(value, head), {rest: new}) if rest else new})
    return value


def request(text: str = f"defaults prefix={PREFIX}\nn[001-002]\nlogin1 role=login\n", **wishes: Any) -> PlanRequest:
    """Return what `invoke bootstrap` would ask for with the shipped lock and this hosts file."""
    found = shipped_lock()
    inventory = hostsfile.parse_hosts_file(text, "hosts.txt")
    left_out = tuple(host.Host(name) for name in wishes.pop("left_out", ()))
    inventory = replace(inventory, left_out=left_out)
    stack = found.stacks[wishes.pop("stack", found.default_stack)]
    recipes, templates = shipped_recipes(), shipped_env()
    return PlanRequest(found, stack, inventory, inventory.settings.prefix, recipes, templates, **wishes)


def cluster(**changes_by_host: Mapping[str, Any]) -> dict[str, Facts]:
    """Return the facts of n001, n002 and login1, changed host by host (`n001={"gpus": ()}`)."""
    login = changed(READY, {"gpus": (), "toolkits": (), "slurm.node": "", "tools": (), "headers": ()})
    facts = {"n001": READY, "n002": changed(READY, {"slurm.node": "n002"}), "login1": login}
    return {name: changed(seen, changes_by_host.get(name, {})) for name, seen in facts.items()}
