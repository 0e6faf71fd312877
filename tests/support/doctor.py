"""Clusters made of values for the doctor: a host that is as it should be, and changes to it by dotted path from a
data file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import tomlkit
from msgspec import Struct
from msgspec.structs import fields, replace

from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.doctor.examine import case_of, examine
from deepep_bootstrap.doctor.findings import Case, Finding, HostView
from deepep_bootstrap.doctor.user_view import UserView
from deepep_bootstrap.inventory.facts import Facts, Gid, Gpu, Port, Prefix, Python, Rdma, Toolkit, TorchLibrary
from deepep_bootstrap.inventory.machine import Address, FlowControl, Library, Machine, ReachedPort, Stamp
from deepep_bootstrap.plan.decisions import PlanRequest
from deepep_bootstrap.plan.host_recipes import Check
from deepep_bootstrap.prefix.offer import Offer, SiteSettings, StackRecord, offer_document
from tests.support.paths import ROOT
from tests.support.plan import PREFIX, READY, request

CASES = ROOT / "tests" / "cases" / "doctor"
BOOT = "8b4c3d0e-0000-4000-8000-000000000001"
LINES = {
    "verbs": Library,
    "flow_control": FlowControl,
    "nvlinks": ReachedPort,
    "stamps": Stamp,
    "addresses": Address,
    "toolkits": Toolkit,
    "pythons": Python,
    "rdma": Rdma,
    "ports": Port,
    "gids": Gid,
    "external_python": Python,
    "external_libraries": TorchLibrary,
}
"""What the rows of a list in a data file are, by the name of the field."""

NVLINKS = tuple(ReachedPort(one, other, "NV18") for one in range(8) for other in range(one + 1, 8))


RECORD = StackRecord(
    "v1",
    "deepep/1.2.1-8a07e7e-v1",
    PREFIX,
    "a-deepep",
    "a-nvshmem",
    "a-gdrcopy",
    "a-python",
    "",
    "3.12",
    "/usr/local/cuda",
    ("9.0",),
    "infiniband",
    {},
    SiteSettings(),
)
MANIFEST = json.dumps({"offer": offer_document(Offer("v1", {"v1": RECORD}, "t"))})
"""What a prefix that offers stack v1 says."""


def gpu(index: int) -> Gpu:
    place = f"0000:1{index}:00.0"
    return Gpu(
        index,
        "NVIDIA H100 80GB HBM3",
        81559,
        "9.0",
        "580.95.05",
        place,
        f"pci0000:1{index}/0000:1{index}:01.0/{place}",
        index // 4,
        0,
    )


def nic(index: int, link: str) -> Rdma:
    path = f"pci0000:1{index}/0000:1{index}:01.0/0000:1{index}:02.0"
    address = f"0000:0000:0000:0000:0000:ffff:0a08:000{index}"
    gids = (Gid(3, address, "RoCE v2", f"eth{index + 1}"),) if link == "Ethernet" else ()
    return Rdma(f"mlx5_{index}", "mlx5_core", path, index // 4, "28.43.2026", (Port(1, "ACTIVE", link, 400.0, gids),))


PREPARED = Machine(
    nvidia_flavor="open",
    nvidia_version="580.95.05",
    gpu_devices=8,
    mellanox_devices=8,
    ofed="25.10-1.7.1",
    headers=True,
    dmabuf=True,
    verbs=(
        Library("libibverbs", "/usr/lib/x86_64-linux-gnu/libibverbs.so.1", "1.14.50.0", "34", "libibverbs1"),
        Library(
            "provider",
            "/usr/lib/x86_64-linux-gnu/libibverbs/libmlx5-rdmav34.so",
            "1.25.56.0",
            "34",
            "ibverbs-providers",
            "1.25",
        ),
    ),
    verbs_asked=True,
    verbs_devices=tuple(f"mlx5_{index}" for index in range(8)),
    flow_control=tuple(FlowControl(f"mlx5_{index}", "00010000", "00010000", "00010000", "0") for index in range(8)),
    address="10.8.0.7",
    addresses=(Address("eth0", "10.8.0.7/24"),),
    mtus=(("eth0", 1500), *((f"eth{index + 1}", 9000) for index in range(8))),
    memlock="unlimited",
    slurmd_memlock="unlimited",
    shm_mib=1 << 19,
    fabric_manager="active",
    fabric_state="Completed/Success",
    nvlinks=NVLINKS,
)

WELL = replace(
    READY,
    boot_id=BOOT,
    glibc="2.39",
    gpus=tuple(gpu(index) for index in range(8)),
    nvidia_params=(("EnableStreamMemOPs", "1"), ("DmaRemapPeerMmio", "1"), ("RegistryDwords", "PeerMappingOverride=1")),
    kernel_modules=("nvidia", "nvidia_uvm", "mlx5_core", "mlx5_ib", "ib_uverbs"),
    scratch_free_mib=1 << 20,
    prepared=PREPARED,
)
"""A GPU node that lacks nothing, not even DeepEP's place to live."""

ALICE = UserView(
    "alice",
    1000,
    "unlimited",
    False,
    "",
    tuple((f"/dev/nvidia{index}", "") for index in range(8)),
    "writable",
    "readable",
    "yes",
    1,
)

ROOTS_H200 = UserView(
    "root",
    0,
    "unlimited",
    True,
    "",
    tuple((f"/dev/nvidia{index}", "") for index in range(8)),
    "writable",
    "absent",
    "no",
)

H200 = Facts(
    os_id="ubuntu",
    os_version="24.04",
    os_name="Ubuntu 24.04.3 LTS",
    kernel="6.18.44-fc-v657-gpu",
    machine="x86_64",
    hostname="gpu1",
    boot_id=BOOT,
    user="root",
    uid=0,
    cpus=128,
    memory_mib=563200,
    glibc="2.39",
    scratch_free_mib=240000,
    gpus=tuple(
        Gpu(
            index,
            "NVIDIA H200",
            143771,
            "9.0",
            "580.159.04",
            f"0000:00:{index + 6:02x}.0",
            f"pci0000:00/0000:00:{index + 6:02x}.0",
            0,
            0,
        )
        for index in range(8)
    ),
    nvidia_params=(("EnableStreamMemOPs", "0"), ("DmaRemapPeerMmio", "1"), ("RegistryDwords", "")),
    toolkits=(Toolkit("/usr/local/cuda", "13.0.88", True, True),),
    tools=(("gcc", "13.3.0"), ("g++", "13.3.0"), ("make", "4.3"), ("git", "2.43.0")),
    headers=("infiniband/mlx5dv.h", "infiniband/verbs.h"),
    pythons=(Python("/usr/bin/python3.12", "3.12.3", header=True),),
    kernel_modules=("nvidia", "nvidia_uvm"),
    prefix=Prefix("/opt/deepep", False, True, "ext4", 240000, source="/dev/vda"),
    prepared=Machine(
        nvidia_flavor="open",
        nvidia_version="580.159.04",
        gpu_devices=8,
        dmabuf=True,
        memlock="unlimited",
        nvlinks=NVLINKS,
    ),
)
"""The machine of a real run: eight H200 with all of NVLink between them, no RDMA, no Slurm, no module system; CUDA
13.0 only."""


GRACE = replace(
    WELL,
    kernel="6.8.0-1028-nvidia-64k",
    machine="aarch64",
    gpus=tuple(replace(each, name="NVIDIA GB200", capability="10.0") for each in WELL.gpus[:4]),
    nvidia_params=(("EnableStreamMemOPs", "0"), ("RegistryDwords", "")),
    rdma=tuple(nic(index, "InfiniBand") for index in range(4)),
    toolkits=(Toolkit("/usr/local/cuda", "13.0.88", True, True),),
    slurm=replace(WELL.slurm, gres="gpu:4", slurmd=True),
    prepared=replace(
        PREPARED,
        gpu_devices=4,
        mellanox_devices=4,
        nvlinks=tuple(pair for pair in NVLINKS if pair.other < 4),
        fabric_manager="absent",
        page_kib=64,
        imex="active",
        imex_channels=1,
        cliques=(("2e3a1f7c-aaaa-4bbb-8ccc-0123456789ab", "32766"),),
    ),
)
"""A compute tray of a GB200 rack: four GPUs and four NICs."""


def base(name: str) -> tuple[Facts, UserView]:
    """Return facts and view of a kind of host: "infiniband", "ethernet", "h200", "grace" or "login"."""
    if name == "grace":
        return GRACE, ALICE
    if name == "h200":
        return H200, ROOTS_H200
    if name == "login":
        return replace(WELL, gpus=(), toolkits=(), tools=(), prepared=Machine()), replace(ALICE, devices=())
    link = {"infiniband": "InfiniBand", "ethernet": "Ethernet"}[name]
    return replace(WELL, rdma=tuple(nic(index, link) for index in range(8))), ALICE


def changed(value: Any, path: list[str], new: Any) -> Any:
    """Return `value` with what stands at `path` replaced; in a tuple a step is a place, "first N" or "*", and a
    number as the new value of a tuple cuts it to this length."""
    if not path:
        return value[:new] if isinstance(value, tuple) and isinstance(new, int) else new
    head, *rest = path
    if isinstance(value, tuple):
        chosen = (
            range(len(value)) if head == "*" else range(int(head[6:])) if head.startswith("first ") else [int(head)]
        )
        return tuple(changed(each, rest, new) if place in chosen else each for place, each in enumerate(value))
    assert isinstance(value, Struct), path
    assert head in [field.name for field in fields(value)], f"{type(value).__name__} has no {head}"
    return replace(value, **{head: changed(getattr(value, head), rest, typed(head, new) if not rest else new)})  # type: ignore[type-var]


def typed(name: str, new: Any) -> Any:
    """Return a value of a data file as the field `name` has it."""
    if isinstance(new, list):
        kind = LINES.get(name)
        return tuple(
            kind(*each) if kind and isinstance(each, list) else tuple(each) if isinstance(each, list) else each
            for each in new
        )
    return LINES[name](**new) if isinstance(new, dict) else new


def read(path: Path) -> dict[str, Any]:
    """Return the data of a case."""
    return tomlkit.parse(path.read_text(encoding="utf-8")).unwrap()


def cluster(data: Mapping[str, Any]) -> tuple[dict[str, Facts], dict[str, UserView], dict[str, dict[str, Check]]]:
    """Return facts, views and checks of the case's hosts: each of a kind, with the changes that name it."""
    facts: dict[str, Facts] = {}
    views: dict[str, UserView] = {}
    for name, kind in data["hosts"].items():
        facts[name], views[name] = base(kind)
        facts[name] = changed(facts[name], ["hostname"], name)
        if data.get("offered"):
            facts[name] = changed(facts[name], ["prefix", "manifest"], MANIFEST)
    checks: dict[str, dict[str, Check]] = {}
    named: set[str] = set()
    for change in data.get("change", []):
        for name in change["hosts"]:
            for path, new in change.get("facts", {}).items():
                facts[name] = changed(facts[name], path.split("."), new)
            for path, new in change.get("view", {}).items():
                views[name] = changed(views[name], path.split("."), new)
            for recipe, row in change.get("checks", {}).items():
                checks.setdefault(name, {})[recipe] = Check(recipe, **row)
            named.update(name for path in change.get("facts", {}) if path == "prepared.verbs_devices")
    for name in facts.keys() - named:  # programs see what the kernel has, however a case renames it
        facts[name] = changed(facts[name], ["prepared", "verbs_devices"], tuple(each.name for each in facts[name].rdma))
    return facts, views, checks


@cache
def request_of(text: str, stack: str, python: str) -> PlanRequest:
    """Return what is wanted; reading the lock takes a while."""
    return request(text, **({"stack": stack} if stack else {}), external_python=python)


def examined(data: Mapping[str, Any]) -> tuple[PlanRequest, Case, list[HostView], dict[str, dict[str, Check]]]:
    """Return everything that the doctor looks at in a case."""
    facts, views, checks = cluster(data)
    roles = {name: "login" if kind == "login" else "gpu" for name, kind in data["hosts"].items()}
    lines = [f"defaults prefix={data.get('prefix', PREFIX)} profile={data.get('profile', 'auto')}"]
    lines += [f"defaults sbatch_args='{data['sbatch_args']}'"] if "sbatch_args" in data else []
    text = "\n".join([*lines, *(f"{name} role={role}" for name, role in roles.items())])
    wanted = request_of(text, data.get("stack", ""), data.get("external_python", ""))
    case = case_of(wanted, facts, "invoke bootstrap")
    if "needs" in data:
        case = replace(case, stack=replace(case.stack, needs=data["needs"]))
    blind = data.get("blind", [])
    seen = [HostView(name, roles[name], facts[name], None if name in blind else views[name], case) for name in facts]
    return wanted, case, seen, checks


def findings(data: Mapping[str, Any]) -> tuple[Finding, ...]:
    """Return what the doctor finds in a case."""
    return examine(*examined(data))


def told(finding: Finding) -> list[str]:
    """Return a finding as cases write it."""
    return [finding.severity, finding.check, fold(finding.hosts), finding.found]
