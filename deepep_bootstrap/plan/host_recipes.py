"""Host recipes: the hosts each one is meant for, its inputs, and the answers of its checks.

A rolling reboot may last days, and repositories move on meanwhile. So where the lock names driver
packages without a version, all hosts get that of the hosts which run the same packages already, else the
one that most hosts would get now: the lock's names, and nothing of a host but a version.

Hosts that are nodes of Kubernetes: which are drained before a reboot, which are left alone and why, and which an
earlier run left cordoned for nothing more to do.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.recipes import compose
from deepep_bootstrap.core.records import read_records
from deepep_bootstrap.core.text import HostText, Words
from deepep_bootstrap.fetch.locations import shown
from deepep_bootstrap.inventory import network_env, nics
from deepep_bootstrap.inventory.facts import Facts, Python
from deepep_bootstrap.inventory.forms import CHECK
from deepep_bootstrap.inventory.machine import FABRIC_WELL
from deepep_bootstrap.kube.nodes import Node, NodeLook
from deepep_bootstrap.lock.compatibility import numbers
from deepep_bootstrap.lock.packages import TOOLKIT, System, recipe_env, toolkit_purpose
from deepep_bootstrap.plan import decisions
from deepep_bootstrap.plan.decisions import PlanRequest

OK, TO_APPLY, REBOOT, STUCK, BLOCKED = "ok", "todo", "reboot", "stuck", "blocked"
STATES = (OK, TO_APPLY, REBOOT, STUCK, BLOCKED)

LIBRARIES = (
    "lib.sh",
    "host/lib/files.sh",
    "host/lib/packages.sh",
    "host/lib/repositories.sh",
    "host/lib/keys.sh",
    "host/lib/kernel-modules.sh",
    "host/lib/hook.sh",
)
"""Texts in front of every host recipe, in this order."""

CMAKE_FLOOR = (3, 19)
"""NVSHMEM's own minimum (cmake_minimum_required of its CMakeLists.txt)."""

SHM_MIB = 1024
"""NCCL's and NVSHMEM's bootstrap take tens of MiB a rank of /dev/shm; a container's default of 64 MiB is too little
for eight."""

TOOLS_OF_V2 = "ibstat"
"""What DeepEP V2 runs to ask how fast a NIC is. It divides by the answer, and 0 is what it takes for no answer."""

INBOX_NAME = "rocep"
"""How the names of RoCE devices begin that the kernel's own driver made; those of DOCA-OFED are called mlx5_*."""


@dataclasses.dataclass(frozen=True)
class Check:
    """What a host recipe found on one host. `state` is "ok", "todo" (applying changes something), "reboot" (written,
    works after a reboot), "stuck" (rebooted since it was written, and still not so) or "blocked" (nothing this
    program can do; `note` says what to do by hand). With `needs_reboot`, applying it ends in a reboot. `candidate`:
    its packages in the versions that the host would get now. `fault`: why an answer is not believed, which makes it
    "blocked"."""

    recipe: str
    state: str
    found: Words
    wanted: Words
    note: Words = ""
    needs_reboot: bool = False
    candidate: str = dataclasses.field(default="", compare=False)
    fault: Problem | None = None


class Preparation(Struct, frozen=True):
    """What is known of the preparation of all hosts: the inputs of each recipe that is meant for a host, and what
    its check said."""

    inputs: Mapping[str, Mapping[str, Mapping[str, str]]] = field(default_factory=dict)
    checks: Mapping[str, Mapping[str, Check]] = field(default_factory=dict)

    def of(self, *states: str) -> tuple[tuple[str, Check], ...]:
        """Return host and check of everything in one of `states`, recipes in their order."""
        found = [
            (host, check)
            for host, by_recipe in self.checks.items()
            for check in by_recipe.values()
            if check.state in states
        ]
        return tuple(sorted(found, key=lambda pair: list(TITLES).index(pair[1].recipe)))

    @property
    def at_once(self) -> tuple[tuple[str, Check], ...]:
        """What can be done without disturbing anybody."""
        return tuple((host, check) for host, check in self.of(TO_APPLY) if not check.needs_reboot)

    @property
    def with_reboot(self) -> tuple[tuple[str, Check], ...]:
        """What works only after a reboot, be it written already or not."""
        return tuple(
            (host, check) for host, check in self.of(TO_APPLY, REBOOT) if check.needs_reboot or check.state == REBOOT
        )

    @property
    def changes(self) -> bool:
        """Whether anything is to be done on a host."""
        return bool(self.of(TO_APPLY, REBOOT))


TITLES = {
    "nvidia-driver": "NVIDIA driver",
    "fabric-manager": "NVSwitch fabric manager",
    "doca-ofed": "DOCA-OFED",
    "driver-options": "driver options",
    "peer-memory": "peer memory",
    "gdrdrv": "GDRCopy kernel module",
    "rdma-userspace": "RDMA user space",
    "limits": "memory limits",
    "cuda-toolkit": "CUDA toolkit",
    "python": "Python",
}
"""The recipes in the order in which they build on each other, with what people call them."""


def wanted(request: PlanRequest, facts: Mapping[str, Facts]) -> dict[str, dict[str, dict[str, str]]]:
    """Return the inputs of every recipe that is meant for a host, by host and recipe."""
    if "all" in request.skip:
        return {}
    gpu_hosts = decisions.hosts_to_build_for(request.inventory, facts)
    builder = building(request, gpu_hosts)
    archs = dict.fromkeys(
        [gpu.capability for seen in gpu_hosts.values() for gpu in seen.gpus] + [*request.inventory.settings.archs]
    )
    floor = decisions.floor(request.lock, request.stack, tuple(archs), request.templates)
    python = {"python"} if needs_python(request, gpu_hosts) else set()
    found: dict[str, dict[str, dict[str, str]]] = {}
    systems: dict[tuple[str, str], System | None] = {}
    for host, seen in gpu_hosts.items():
        kind = system_id(seen), seen.machine
        if kind not in systems:
            systems[kind] = system_for(request, seen)
        meant = python | meant_for(request, seen, floor if seen is builder else request.stack.needs.get("nvcc", ""))
        names = [name for name in TITLES if name in meant and name not in request.skip]
        found[host] = {name: inputs(request, name, seen, systems[kind], floor) for name in names}
    return found


def meant_for(request: PlanRequest, seen: Facts, floor: str) -> set[str]:
    """Return the recipes that are meant for a host by its own facts; `floor` is the oldest toolkit that will do there,
    "" for any."""
    meant: set[str] = set()
    if seen.prepared.gpu_devices > 0 and not seen.gpus:
        meant.add("nvidia-driver")
    if seen.gpus and wants_fabric(seen):
        meant.add("fabric-manager")
    if lacks_toolkit(request, seen, floor):
        meant.add("cuda-toolkit")
    if request.inventory.settings.profile == network_env.SINGLE or not has_nics(seen):
        return meant
    meant |= {"rdma-userspace", "limits"}
    if seen.machine != "aarch64":  # options of the driver that NVSHMEM asks for on x86_64 alone
        meant.add("driver-options")
    if lacks_ofed(seen):
        meant.add("doca-ofed")
    if seen.gpus:
        meant.add("peer-memory")
    if wants_gdrdrv(request):
        meant.add("gdrdrv")
    return meant


def building(request: PlanRequest, gpu_hosts: Mapping[str, Facts]) -> Facts | None:
    """Return the host that builds; None where the plan will say why none can."""
    try:
        return gpu_hosts[decisions.choose_build_host(request, gpu_hosts, [])] if gpu_hosts else None
    except Trouble:
        return None


def lacks_toolkit(request: PlanRequest, seen: Facts, floor: str) -> bool:
    """Return whether a host has no toolkit of the stack's major, or none as new as `floor` ("" for any)."""
    fitting = [toolkit for toolkit in seen.toolkits if decisions.major(toolkit) == request.stack.cuda]
    return not any(numbers(toolkit.version) >= numbers(floor) for toolkit in fitting)


def has_nics(seen: Facts) -> bool:
    """Return whether a host has a NIC that NVSHMEM's IBGDA can drive, with a driver or still without."""
    return seen.prepared.mellanox_devices > 0 or any(device.driver == nics.DRIVER for device in seen.rdma)


def wants_fabric(seen: Facts) -> bool:
    """Return whether a host has an NVLink fabric to look after: NVSwitches on the PCI bus or, where they are none of
    its PCI devices (HGX B200 and B300), GPUs that wait for it."""
    return seen.prepared.nvswitches > 0 or seen.prepared.fabric_state.lower() not in FABRIC_WELL


def lacks_ofed(seen: Facts) -> bool:
    """Return whether RDMA devices are missing, or bear the names that the kernel's own driver gives to RoCE devices."""
    return not seen.rdma or any(device.name.startswith(INBOX_NAME) for device in seen.rdma)


def wants_gdrdrv(request: PlanRequest) -> bool:
    """Return whether the profile asks for the CPU handler, the only one that needs GDRCopy's kernel module; a stack
    may have none."""
    name = request.inventory.settings.profile
    if name == network_env.AUTO or not request.stack.gdrcopy:
        return False
    return network_env.read_profile(name, request.templates).handler == "cpu"


def needs_python(request: PlanRequest, gpu_hosts: Mapping[str, Facts]) -> bool:
    """Return whether no Python that the stack has wheels for is on every GPU host."""
    if request.external_python:
        return False
    paths = [f"/usr/bin/python3.{decisions.minor_of(target)}" for target in request.stack.wheels]
    return not any(
        all(path in [python.path for python in seen.pythons] for seen in gpu_hosts.values()) for path in paths
    )


def inputs(request: PlanRequest, name: str, seen: Facts, system: System | None, floor: str) -> dict[str, str]:
    """Return the environment of a recipe on a host: packages and repositories of its distribution (`system`, see
    system_for), and what the recipe alone asks; `floor` is the oldest toolkit that will do, "" for any."""
    source = request.lock.sources[request.stack.gdrcopy] if request.stack.gdrcopy else None
    own = {
        "cuda-toolkit": {"CUDA_MAJOR": request.stack.cuda},
        "gdrdrv": {"GDRDRV_WANTED": "yes", "GDRCOPY_VERSION": source.version if source else ""},
    }
    if name == "limits" and 0 < seen.prepared.shm_mib < SHM_MIB:
        own[name] = {"SHM_MIB": str(SHM_MIB)}
    if name == "rdma-userspace" and request.stack.nccl_wheel:
        own[name] = {"TOOLS": TOOLS_OF_V2}
    purpose = toolkit_purpose(system, request.stack.cuda, floor) if name == TOOLKIT else name
    if name == "fabric-manager":
        driver = recipe_env(system, "nvidia-driver", seen.kernel).get("PACKAGES", "")
        own[name] = {"DRIVER_PACKAGES": driver, "NVSWITCHES": str(seen.prepared.nvswitches)}
    if name == "cuda-toolkit" and floor:
        own[name]["CUDA_FLOOR"] = floor
    return {**recipe_env(system, purpose, seen.kernel), **own.get(name, {})}


def system_for(request: PlanRequest, seen: Facts) -> System | None:
    """Return the lock's row for the distribution of a host, its repositories and their keys from where mirrors have
    them; the key's fingerprint stays the lock's."""
    system = request.lock.systems.get(system_id(seen))
    if system is None:
        return None
    place = request.mirrors.packages
    system = system.on(seen.machine)
    moved = (replace(entry, url=place(entry.url), key_url=place(entry.key_url)) for entry in system.repositories)
    return replace(system, repositories=tuple(moved))


def from_mirrors(request: PlanRequest, facts: Mapping[str, Facts], preparation: Preparation) -> tuple[str, ...]:
    """Return from where hosts would get repositories that are not at the lock's address, for those where something
    is to be installed from them; equal ones folded over hosts."""
    groups: dict[str, list[str]] = {}
    for host, check in preparation.of(TO_APPLY, BLOCKED):
        lines = preparation.inputs.get(host, {}).get(check.recipe, {}).get("REPOSITORIES", "").splitlines()
        system = request.lock.systems.get(system_id(facts[host])) if lines else None
        addresses = {line.split()[0]: line.split()[1] for line in lines}
        for entry in system.on(facts[host].machine).repositories if system else ():
            address = addresses.get(entry.name, entry.url)
            if address != entry.url:
                groups.setdefault(f"repository {entry.name} from {shown(address)}, instead of {entry.url}", []).append(
                    host
                )
    return tuple(f"{fold(dict.fromkeys(hosts))}: {text}" for text, hosts in groups.items())


def lacking_build_tools(facts: Facts, python: Python) -> list[str]:
    """Return which build tools and headers a host lacks."""
    tools = dict(facts.tools)
    lacking = [name for name in ("gcc", "g++", "make", "ninja", "git") if not tools.get(name)]
    cmake = tuple(int(part) for part in tools.get("cmake", "0").split(".")[:2] if part.isdigit())
    if cmake < CMAKE_FLOOR:
        lacking.append(f"cmake ≥ 3.19 (found {tools['cmake']})" if tools.get("cmake") else "cmake")
    lacking.extend(header for header in ("infiniband/mlx5dv.h",) if header not in facts.headers)
    if not python.header:
        lacking.append(f"Python.h of {python.path}")
    return lacking


def system_id(facts: Facts) -> str:
    """Return the lock's `[system.<id>]` key of a host, e.g. `ubuntu-24_04`."""
    version = facts.os_version.replace(".", "_")
    major = facts.os_version.split(".")[0]
    return f"{facts.os_id}-{version if facts.os_id == 'ubuntu' else major}"


def build_deps_env(request: PlanRequest, here: Facts, python: Python) -> dict[str, str]:
    """Return what the recipe of the build dependencies needs to know; without a row for the distribution it can only
    say what lacks."""
    return {**recipe_env(system_for(request, here), "build-deps", here.kernel), "PYTHON": python.path}


def check_script(texts: Mapping[str, str], inputs: Mapping[str, Mapping[str, str]], verb: str = "check") -> str:
    """Return the one script that checks every recipe of `inputs` (by recipe) on a host; `parse_checks` reads what it
    prints. With `verb` "remove" it takes back what they wrote, in the order of `inputs`.

    Each recipe runs in a subshell: their names do not meet, and one that fails does not keep the others from answering.
    """
    parts = [compose(texts, *LIBRARIES), "set +e"]
    for name, env in inputs.items():
        exports = "\n".join(
            f"export {key}={shlex.quote(value)}" for key, value in {**env, "RECIPE": f"host/{name}.sh"}.items()
        )
        text = compose(texts, f"host/{name}.sh")
        parts.append(
            f'data recipe {name}\nsay recipe={name}\n(\nset -e\n{exports}\nset -- {verb}\n{text}\n)\ndata code "$?"'
        )
    return "\n".join(parts) + "\n"


def parse_checks(out: str, err: str, names: Sequence[str], host: str) -> dict[str, Check]:
    """Return the results of the checks of `names` on `host`; a check that failed, or whose answer cannot be read, is
    "blocked"."""
    answers, logs = _sections(out), _sections(err)
    return {name: _check(name, answers.get(name, ""), logs.get(name, ""), host) for name in names}


def unanswered(names: Iterable[str], trouble: Trouble) -> dict[str, Check]:
    """Return the checks of a host that was lost before it answered."""
    return {
        name: Check(name, BLOCKED, "the host did not answer", "an answer", trouble.problems[0].what) for name in names
    }


def _sections(text: str) -> dict[str, str]:
    """Split output at its `recipe=NAME` lines."""
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in f"\n{text}".split("\nrecipe=")[1:]}


def _check(name: str, text: str, log: str, host: str) -> Check:
    body, _, code = text.strip().rpartition("\n")
    if code != "code=0":
        ended = f"exit code {code.removeprefix('code=')}" if code.startswith("code=") else "the answer is cut off"
        errors = [line for line in log.splitlines() if line.startswith("error: ")] or [ended]
        return Check(name, BLOCKED, "its check failed", "an answer", errors[0].removeprefix("error: "))
    try:
        records = read_records(body, CHECK, host, f"host/{name}.sh")
    except Trouble as trouble:
        fault = trouble.problems[0]
        return Check(name, BLOCKED, "its check cannot be read", "an answer", str(trouble), fault=fault)
    state, needs = records.text("state"), records.text("needs") == "reboot"
    if not state:
        return Check(name, BLOCKED, "its check says no state", f"one of {', '.join(STATES)}")
    return Check(
        name,
        state,
        records.shown("found"),
        records.shown("wanted"),
        records.shown("note"),
        needs,
        records.text("candidate"),
    )


RECIPE = "nvidia-driver"

VERSION = re.compile(r"[0-9][0-9A-Za-z.+:~-]*")
"""What a version of a package may be, of dpkg and of rpm."""


def settle(preparation: Preparation, facts: Mapping[str, Facts]) -> Preparation:
    """Return the same with one version in the driver packages of all hosts of a distribution that are to get them.
    What has a version in the lock keeps it, and modules of dnf (@NAME) have none; where nothing is known yet, the
    newest is installed as before.

    A host whose candidate is anything but the lock's names with versions is "blocked"."""
    waiting: dict[str, list[str]] = {}
    checks = dict(preparation.checks)
    for host, check, packages in _without_version(preparation):
        if is_candidate(check.candidate, packages):
            waiting.setdefault(packages, []).append(host)
        else:
            checks[host] = {**checks[host], RECIPE: _unbelieved(host, check, packages)}
    inputs = dict(preparation.inputs)
    for packages, hosts in waiting.items():
        candidates = Counter(filter(None, (checks[host][RECIPE].candidate.strip() for host in hosts)))
        common = candidates.most_common(1)[0][0] if candidates else ""
        for host in hosts:
            if chosen := in_use(packages, facts[host], facts) or common:
                inputs[host] = {**inputs[host], RECIPE: {**inputs[host][RECIPE], "PACKAGES": chosen}}
    return replace(preparation, inputs=inputs, checks=checks)


def _without_version(preparation: Preparation) -> Iterator[tuple[str, Check, str]]:
    """Yield the hosts that are to get the driver in whatever version, with check and packages."""
    for host, check in preparation.of(TO_APPLY):
        packages = preparation.inputs[host].get(check.recipe, {}).get("PACKAGES", "")
        if check.recipe == RECIPE and packages and "=" not in packages:
            yield host, check, packages


def is_candidate(candidate: str, packages: str) -> bool:
    """Return whether a host's candidate is, word by word, the lock's `packages`, each with a version or without; ""
    is one, of a host that cannot say."""
    names, found = packages.split(), candidate.split()
    if not found:
        return True
    return len(names) == len(found) and all(
        word == name or (word.startswith(f"{name}=") and VERSION.fullmatch(word.removeprefix(f"{name}=")))
        for name, word in zip(names, found, strict=True)
    )


def _unbelieved(host: str, check: Check, packages: str) -> Check:
    found, wanted = HostText(check.candidate), f"{packages}, each with a version or without"
    what = "the candidate of the driver is not what the lock names, so nothing of it is believed"
    fault = Problem(host, what, repr(check.candidate), wanted, f"a look at apt or dnf on {host}")
    return dataclasses.replace(check, state=BLOCKED, found=found, wanted=wanted, note=what, candidate="", fault=fault)


def unbelieved(preparation: Preparation) -> tuple[Problem, ...]:
    """Return the problems of hosts whose checks answered what cannot be."""
    return tuple(check.fault for _, check in preparation.of(BLOCKED) if check.fault)


def in_use(packages: str, like: Facts, facts: Mapping[str, Facts]) -> str:
    """Return `packages` in the version that most hosts of the same distribution run, of those whose driver is of the
    same branch and came as packages; "" where there is none."""
    branches = set(re.findall(r"(?<![0-9])[0-9]{3}(?![0-9])", packages))
    versions = [
        seen.prepared.nvidia_version
        for seen in facts.values()
        if (seen.os_id, seen.os_version) == (like.os_id, like.os_version)
        and seen.prepared.nvidia_flavor == "open"
        and is_packaged(seen)
    ]
    fitting = Counter(version for version in versions if version.split(".")[0] in branches)
    if not fitting:
        return ""
    version = fitting.most_common(1)[0][0]
    return " ".join(name if name.startswith("@") else f"{name}={version}-*" for name in packages.split())


def is_packaged(seen: Facts) -> bool:
    """Return whether the loaded driver is that of a package."""
    version = seen.prepared.nvidia_version
    return bool(version) and any(installed.startswith(f"{version}-") for _, installed in seen.prepared.packages)


NAMED_BY = "--context=NAME, or context= in the hosts file"


def node_refusal(look: NodeLook, host: str, facts: Facts) -> str:
    """Return why a host must not be rebooted since pods may be on it, "" where it may: it is no node, or one that can
    be drained."""
    if host in look.by_host or not facts.kubelet:
        return ""
    if not look.context:
        return (
            f"left alone: kubelet runs there, and no cluster is named in which its node could be drained ({NAMED_BY})"
        )
    return f"left alone: kubelet runs there, and no node of {look.context} is in this host's boot: another cluster's?"


def node_of(look: NodeLook, host: str) -> str:
    """Return the node that a host is, "" for none."""
    return look.by_host[host].name if host in look.by_host else ""


def node_notes(look: NodeLook, facts: Mapping[str, Facts], preparation: Preparation) -> Iterator[str]:
    """Yield what is done with the nodes of hosts that wait for a reboot, equal lines folded over hosts."""
    groups: dict[str, list[str]] = {}
    for host in dict.fromkeys(host for host, _ in preparation.with_reboot):
        if why := node_refusal(look, host, facts[host]):
            groups.setdefault(f"not rebooted, but {why}", []).append(host)
        elif node := look.by_host.get(host):
            groups.setdefault(_what_is_done(look, node), []).append(host)
    for line, hosts in groups.items():
        yield f"{fold(hosts)}: {line}"


def _what_is_done(look: NodeLook, node: Node) -> str:
    if node.cordoned and not node.reason:
        return f"cordoned in Kubernetes ({look.context}) by somebody: drained before its reboot, and stays cordoned"
    return f"cordoned and drained in Kubernetes ({look.context}) before its reboot, uncordoned after a good look"


def nodes_to_uncordon(look: NodeLook, facts: Mapping[str, Facts], preparation: Preparation) -> dict[str, list[str]]:
    """Return the hosts whose nodes an earlier run left cordoned and that need nothing any more, by its reason."""
    waiting = {host for host, _ in preparation.of(TO_APPLY, REBOOT, STUCK, BLOCKED)}
    found: dict[str, list[str]] = {}
    for host, node in look.by_host.items():
        if host in facts and host not in waiting and node.cordoned and node.reason:
            found.setdefault(node.reason, []).append(host)
    return found
