"""Environment variables of the network for DeepEP, NVSHMEM and NCCL, derived from the hosts' hardware and a
profile; for V2 and V2.5 the variables that they read instead of V1's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet
from msgspec import Struct, field
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.toml import load_toml
from deepep_bootstrap.inventory import nics
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.inventory.forms import GIB
from deepep_bootstrap.inventory.nics import DRIVER, Nic, Sorted, active_nics
from deepep_bootstrap.inventory.nics import cards as cards_of
from deepep_bootstrap.lock.model import is_v25

SINGLE = "single-node"
BY_LINK = {"Ethernet": "roce", "InfiniBand": "infiniband"}
GCP_B200 = "gcp-b200"
RACKS = {"GB200": "gb200", "GB300": "gb300"}
"""Profiles of NVLink racks on InfiniBand, by what their GPUs are called."""

MAP = "DEEP_EP_DEVICE_TO_HCA_MAPPING"
INTERFACES = ("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
GIB_UNSETS = "TORCH_NCCL_USE_COMM_NONBLOCKING"
"""gIB's shim warns when this is set, whatever its value; container images set it."""

GPUS_PER_NODE = 8
"""What the kernels of DeepEP V1 between nodes are written for (NUM_MAX_NVL_PEERS of its csrc/kernels/configs.cuh)."""

LOW_LATENCY = "low-latency"
MOST_TOLD = 4
"""Layouts that a note spells out, the most frequent ones first."""


class Derived(Struct, frozen=True):
    """What was derived. `why` says how `profile` was chosen, `environment` holds the variables in the order to write
    them, `by_host` those that differ, by the nodes' short names, `by_kind` those that are other for one kind of
    traffic, `gib` the script that sets up NCCL on Google's network ("" for none), `archs` the compute capabilities
    of all GPUs ("9.0"), `notes` what a person should know."""

    profile: str
    why: str
    environment: Mapping[str, str]
    archs: tuple[str, ...]
    notes: tuple[str, ...] = ()
    by_host: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    by_kind: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    gib: str = ""


class Settings(Struct, frozen=True):
    """Variables alike on all hosts, those that differ by the nodes' short names, and what could not be decided."""

    environment: Mapping[str, str] = field(default_factory=dict)
    by_host: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def derive(profile: str, facts: Mapping[str, Facts], texts: Mapping[str, str], archs: Sequence[str] = ()) -> Derived:
    """Return profile, environment and architectures for the GPU hosts in `facts` (by name).

    `profile` is "auto" or a profile's name; `texts` are the files of env/ by relative path; `archs` are compute
    capabilities that are wanted besides those of the GPUs. Trouble: an unknown profile, a variable that nobody reads
    or that must stay the caller's, no GPU on any host and none wanted."""
    name, why, notes = choose_profile(profile, facts)
    chosen = read_profile(name, texts)
    ports = {host: nics.sort_out(seen, chosen.link) for host, seen in facts.items()} if chosen.link else {}
    found = network_settings(facts, ports, chosen)
    gib, about_gib = choose_gib(chosen, facts)
    # What a person wrote into a profile stands over what was found.
    environment = {**chosen.environment, **({GIB_UNSETS: ""} if gib else {}), **found.environment, **chosen.environment}
    by_host = {
        node: {key: value for key, value in values.items() if key not in chosen.environment}
        for node, values in found.by_host.items()
    }
    capabilities, without = architectures(facts, archs)
    choice_notes = chosen.notes if len(facts) > 1 or chosen.handler == "cpu" else ()
    return Derived(
        name,
        why,
        environment,
        capabilities,
        (*notes, *found.notes, *about_gib, *choice_notes, *gpu_notes(facts), *without),
        {node: values for node, values in by_host.items() if values},
        {LOW_LATENCY: chosen.low_latency} if chosen.low_latency else {},
        gib,
    )


def choose_profile(profile: str, facts: Mapping[str, Facts]) -> tuple[str, str, tuple[str, ...]]:
    """Return the profile's name, why it was chosen, and notes; with "auto" the link layer with the most bandwidth
    decides."""
    if profile != AUTO:
        return profile, "named in the hosts file", ()
    active = {host: active_nics(seen) for host, seen in facts.items()}
    speeds = _speeds(active)
    if not speeds:
        return SINGLE, f"no active {DRIVER} port on any GPU host", ()
    link = max(speeds, key=lambda name: speeds[name])
    why = f"active {DRIVER} ports with link layer {link}"
    notes = tuple(_link_notes(link, speeds, active))
    if link == "Ethernet" and _all_are("B200", facts) and any(seen.prepared.gib for seen in facts.values()):
        return GCP_B200, f"{why}, B200 GPUs and Google's gIB", notes
    rack = next((name for kind, name in RACKS.items() if _all_are(kind, facts)), "")
    if link == "InfiniBand" and rack:
        return rack, f"{why}, {rack.upper()} GPUs", notes
    return BY_LINK[link], why, notes


def _speeds(active: Mapping[str, Sequence[Nic]]) -> dict[str, float]:
    """Return the bandwidth of all hosts' active ports by link layer, of those that there is a profile for."""
    speeds: dict[str, float] = {}
    for nic in (nic for found in active.values() for nic in found):
        if nic.link in BY_LINK:
            speeds[nic.link] = speeds.get(nic.link, 0.0) + nic.rate
    return speeds


def _link_notes(link: str, speeds: Mapping[str, float], active: Mapping[str, Sequence[Nic]]) -> Iterator[str]:
    """Yield which hosts have no port of the chosen link layer, and which other link layers are left alone."""
    without = [host for host, found in active.items() if not any(nic.link == link for nic in found)]
    if without:
        yield f"{_fold(without)}: no active {link} port, cannot take part in runs over several nodes"
    others = [other for other in speeds if other != link]
    if others:
        yield f"NICs of another kind ({', '.join(others)}) are left alone: {link} has more bandwidth"


def _all_are(kind: str, facts: Mapping[str, Facts]) -> bool:
    names = [gpu.name for seen in facts.values() for gpu in seen.gpus]
    return bool(names) and all(re.search(rf"\b{kind}\b", name) for name in names)


class HostNetwork(Struct, frozen=True):
    """What one host's hardware decides: `node` is the name that it calls itself, `nics` the port of each GPU by its
    index, `hca_prefix` what NVSHMEM must be told of the ports' names, `interface` the one toward the other hosts, and
    `interface_word` the same for who reads names as beginnings. Empty where nothing is to be set."""

    node: str
    nics: Mapping[int, Nic]
    hca_prefix: str
    interface: str
    interface_word: str

    @property
    def map(self) -> str:
        """The ports of the GPUs as DeepEP reads them."""
        return ",".join(f"{gpu}:{nic}" for gpu, nic in self.nics.items())

    def environment(self, gid_index: int | None) -> dict[str, str]:
        """Return the variables of this host, "" for those that are left unset."""
        nvshmem, nccl, gloo = INTERFACES
        return {
            MAP: self.map,
            "NVSHMEM_HCA_PREFIX": self.hca_prefix,
            "NVSHMEM_IB_GID_INDEX": "" if gid_index is None else str(gid_index),
            nvshmem: self.interface_word,
            nccl: self.interface_word,
            gloo: self.interface,
        }


def network_settings(facts: Mapping[str, Facts], ports: Mapping[str, Sorted], profile: Profile) -> Settings:
    """Return the variables that the network's hardware decides, with notes; `ports` as nics.sort_out gives them, by
    host.

    Hosts without a port for the GPUs' traffic have no say: nothing runs between them and others."""
    left = tuple(_left_notes(ports))
    facts = {host: seen for host, seen in facts.items() if host in ports and ports[host].used}
    if not facts:
        return Settings(notes=left)
    networks = _host_networks(facts, ports)
    is_ethernet = profile.link == "Ethernet"
    used = [nic for network in networks.values() for nic in network.nics.values()]
    index = nics.gid_index(used) if is_ethernet else None
    notes = [*left, *_map_notes(facts, ports, {host: network.nics for host, network in networks.items()})]
    if is_ethernet and index is None and "NVSHMEM_IB_GID_INDEX" not in profile.environment:
        notes.append(
            "no one GID index holds a routable RoCE v2 address on all NICs of all hosts: NVSHMEM finds one for each NIC"
        )
    without = [host for host, network in networks.items() if not network.interface]
    if len(facts) > 1 and without:
        notes.append(
            f"{_fold(without)}: no one interface toward the other hosts is known: NVSHMEM, NCCL and Gloo choose theirs"
        )
    spread = _spread([HostVariables(network.node, network.environment(index)) for network in networks.values()])
    return Settings(spread.environment, spread.by_host, (*notes, *spread.notes))


def _host_networks(facts: Mapping[str, Facts], ports: Mapping[str, Sorted]) -> dict[str, HostNetwork]:
    """Return what each host's hardware decides, by host. NCCL and NVSHMEM read names of interfaces as beginnings,
    unless "=" stands before them; Gloo does not."""
    machines = {host: seen.prepared for host, seen in facts.items()}
    interfaces = nics.bootstrap_interfaces(machines)
    ambiguous = {name for name in set(interfaces.values()) if nics.is_ambiguous(name, machines.values())}
    networks = {}
    for host, seen in facts.items():
        assigned = nics.assign_nics(seen.gpus, ports[host].used)
        prefix = nics.name_prefix(nic.name for nic in assigned.values())
        interface = interfaces.get(host, "")
        word = f"={interface}" if interface in ambiguous else interface
        networks[host] = HostNetwork(short_name(host, seen), assigned, prefix, interface, word)
    return networks


class HostVariables(Struct, frozen=True):
    """The variables of one host, "" for those that are left unset, and the name that it calls itself."""

    node: str
    values: Mapping[str, str]


def _spread(hosts: Sequence[HostVariables]) -> Settings:
    """Return each variable once where all hosts agree, else by node: modulefiles choose by the name that `hostname
    -s` prints."""
    environment: dict[str, str] = {}
    by_host: dict[str, dict[str, str]] = {}
    unclear: list[str] = []
    for variable in hosts[0].values:
        if len({host.values[variable] for host in hosts}) == 1:
            environment[variable] = hosts[0].values[variable]
        elif _same_by_node(hosts, variable):
            for host in hosts:
                by_host.setdefault(host.node, {})[variable] = host.values[variable]
        else:
            unclear.append(variable)
    filled = {node: _filled(values) for node, values in by_host.items()}
    return Settings(
        _filled(environment),
        {node: values for node, values in filled.items() if values},
        tuple(_spread_notes(by_host, unclear)),
    )


def _spread_notes(by_host: Mapping[str, Mapping[str, str]], unclear: Sequence[str]) -> Iterator[str]:
    """Yield which variables differ between hosts, and which are left unset for it."""
    differing = dict.fromkeys(name for values in by_host.values() for name in values)
    if differing:
        yield f"chosen by the host's name when the module is loaded: {', '.join(differing)}"
    if unclear:
        yield f"hosts of one name differ in {', '.join(unclear)}: left unset"


def _same_by_node(hosts: Sequence[HostVariables], variable: str) -> bool:
    """Return whether hosts that call themselves alike have the same value."""
    first: dict[str, str] = {}
    return all(first.setdefault(host.node, host.values[variable]) == host.values[variable] for host in hosts)


def _filled(values: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in values.items() if value}


def short_name(host: str, facts: Facts) -> str:
    """Return the name by which a node knows itself, without its domain; the hosts file may call it otherwise."""
    return (facts.hostname or host).split(".")[0]


def with_own_names(facts: Mapping[str, Facts], known: Iterable[str]) -> tuple[dict[str, Facts], tuple[str, ...]]:
    """Return the facts of hosts without a word of theirs that is the name of another one, and notes; `known` are more
    names that are somebody's. A host that calls itself so would set the other one's variables."""
    names = {host.split(".")[0].lower(): host for host in (*known, *facts)}
    said = {host: short_name(host, seen) for host, seen in facts.items() if seen.hostname}
    liars = [host for host, name in said.items() if names.get(name.lower(), host) != host]
    believed = {host: replace(seen, hostname="") if host in liars else seen for host, seen in facts.items()}
    return believed, tuple(
        f"{host}: calls itself {said[host]}, which is another host: what differs between hosts is written for the name "
        f"{short_name(host, believed[host])}"
        for host in liars
    )


def _left_notes(ports: Mapping[str, Sorted]) -> Iterator[str]:
    """Yield which mlx5 ports are left alone for another reason than their kind, equal hosts together."""
    hosts_by_text: dict[str, list[str]] = {}
    for host, found in ports.items():
        reasons = {why: names for why, names in found.left.items() if not why.startswith(("driver ", "link layer "))}
        text = "; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items())
        hosts_by_text.setdefault(text, []).append(host)
    yield from (f"{_fold(hosts)}: left alone: {text}" for text, hosts in hosts_by_text.items() if text)


def _map_notes(
    facts: Mapping[str, Facts], ports: Mapping[str, Sorted], maps: Mapping[str, Mapping[int, Nic]]
) -> Iterator[str]:
    """Yield what is particular in the maps: hosts that differ, NICs that are shared, cards with several ports,
    bonds."""
    groups: dict[str, list[str]] = {}
    hosts_by_text: dict[str, list[str]] = {}
    for host, assigned in maps.items():
        groups.setdefault(",".join(f"{gpu}:{nic}" for gpu, nic in assigned.items()) or "none", []).append(host)
        for text in _host_notes(len(facts[host].gpus), ports[host].used, assigned):
            hosts_by_text.setdefault(text, []).append(host)
    if len(groups) > 1:
        each = [f"{_fold(hosts)} {text}" for text, hosts in sorted(groups.items(), key=lambda item: -len(item[1]))]
        more = f"; and {len(each) - MOST_TOLD} more" if len(each) > MOST_TOLD else ""
        yield f"the hosts' GPUs and NICs are not laid out alike: {'; '.join(each[:MOST_TOLD])}{more}"
    yield from (f"{_fold(hosts)}: {text}" for text, hosts in hosts_by_text.items())


def _host_notes(gpus: int, nics: Sequence[Nic], assigned: Mapping[int, Nic]) -> Iterator[str]:
    used = set(assigned.values())
    if nics and gpus > len(nics):
        yield f"{len(nics)} NIC ports for {gpus} GPUs: up to {-(-gpus // len(nics))} GPUs share one"
    if cards := [card for card in cards_of(nics) if set(card) & used]:
        names = ", ".join("+".join(map(str, card)) for card in cards)
        yield f"{names}: ports of one card; a GPU uses one of them, at most {max(nic.rate for nic in used):g} Gb/s"
    if slow := [nic for nic in nics if nic in used and nic.rate < max(nic.rate for nic in used)]:
        yield (
            f"{', '.join(f'{nic} ({nic.rate:g})' for nic in slow)}: slower than the others "
            f"({max(nic.rate for nic in used):g} Gb/s)"
        )
    if bonds := sorted({nic.name for nic in used if "bond" in nic.name}):
        yield (
            f"{', '.join(bonds)}: NVSHMEM's queue pairs share one UDP source port, so a bond's links carry unequal "
            f"loads"
        )


def choose_gib(profile: Profile, facts: Mapping[str, Facts]) -> tuple[str, tuple[str, ...]]:
    """Return the script of Google's gIB that NCCL's settings come from, "" for none, and notes."""
    lacking = [host for host, seen in facts.items() if not seen.prepared.gib]
    scripts = {seen.prepared.gib for seen in facts.values() if seen.prepared.gib}
    if foreign := [host for host, seen in facts.items() if seen.prepared.gib not in {"", GIB}]:
        # Every user's shell reads it, on all hosts: no host says where it is.
        what, found = "gIB's script is at another place than Google's", facts[foreign[0]].prepared.gib
        raise Trouble(Problem(_fold(foreign), what, found, GIB))
    if profile.link != "Ethernet" or profile.gib is False or (not scripts and not profile.gib):
        return "", ()
    if lacking and (not scripts or not profile.gib):
        return "", (f"{_fold(lacking)}: gIB is not installed, so NCCL uses its own transport on all hosts",)
    notes = [f"{_fold(lacking)}: gIB is not installed, but profile {profile.name} counts on it"] if lacking else []
    return GIB, tuple(notes)


OF_V1 = "DeepEP V1 between nodes"
"""In a note: it means nothing to V2."""


def gpu_notes(facts: Mapping[str, Facts]) -> Iterator[str]:
    """Yield which hosts have GPUs that DeepEP cannot use as they are: not eight, or not all joined by NVLink."""
    counts: dict[int, list[str]] = {}
    links: dict[str, list[str]] = {}
    for host, seen in facts.items():
        if seen.gpus and len(seen.gpus) != GPUS_PER_NODE:
            counts.setdefault(len(seen.gpus), []).append(host)
        if pairs := missing_peers(seen):
            links.setdefault(", ".join(f"{one}-{other}" for one, other in pairs), []).append(host)
    for count, hosts in counts.items():
        yield f"{_fold(hosts)}: {count} GPU{'s' * (count > 1)}; {OF_V1} wants {GPUS_PER_NODE} in each"
    for text, hosts in links.items():
        yield f"{_fold(hosts)}: no NVLink between GPUs {text}: DeepEP needs it between all GPUs of a node"


def missing_peers(facts: Facts) -> tuple[tuple[int, int], ...]:
    """Return the pairs of GPUs that reach each other otherwise than over NVLink; where nothing is known, nothing is
    said."""
    return tuple(sorted({_pair(one.gpu, one.other) for one in facts.prepared.nvlinks if not re.match(r"NV\d", one.by)}))


def _pair(one: int, other: int) -> tuple[int, int]:
    return min(one, other), max(one, other)


def architectures(facts: Mapping[str, Facts], wanted: Sequence[str] = ()) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the compute capabilities of all GPUs and those that are `wanted` besides, in ascending order, and notes;
    Trouble when no host shows a GPU and none is wanted."""
    seen_ones = {
        gpu.capability
        for seen in facts.values()
        for gpu in seen.gpus
        if re.fullmatch(r"[0-9]{1,2}\.[0-9]", gpu.capability)
    }
    without = {host: str(seen.gpu_problem) or "nvidia-smi shows none" for host, seen in facts.items() if not seen.gpus}
    if not (found := {*seen_ones, *wanted}):
        reason = next(iter(without.values()), "no compute capability from nvidia-smi")
        raise Trouble(
            Problem(
                _fold(facts),
                "there is no GPU to build for",
                reason,
                "one GPU at least",
                "role=login for hosts without GPUs, or --archs=9.0 to build where none is",
            )
        )
    notes = [f"{host}: no GPU ({why})" for host, why in without.items()]
    if unseen := ascending(set(wanted) - seen_ones):
        notes.append(f"built for {' and '.join(unseen)} too, of which no GPU was seen: archs names them")
    return ascending(found), tuple(notes)


def ascending(capabilities: Iterable[str]) -> tuple[str, ...]:
    """Return compute capabilities in ascending order, "9.0" before "10.0"."""
    return tuple(sorted(capabilities, key=lambda capability: [int(part) for part in capability.split(".")]))


def _fold(hosts: Iterable[str]) -> str:
    return str(NodeSet.fromlist(list(hosts), resolver=RESOLVER_NOGROUP))


NIC = "EP_NIC_NAME"
NIC_OF_V25 = "mlx5_0"
"""V2.5 asks this NIC for its speed, and none else (get_rdma_gbs of its deep_ep/utils/envs.py)."""

CLASS, CLASS_OF_TESTS = "EP_DEFAULT_RDMA_SL", "EP_OVERRIDE_RDMA_SL"
"""The service level of buffers that say none, which V2 does not know, and the one that stands over what buffers say."""

LEVELS = ("NCCL_IB_SL", CLASS_OF_TESTS)
GIN_OFF = "EP_DISABLE_GIN"
CHECK_OFF = "EP_SUPPRESS_NCCL_CHECK"
INTRANODE = "intranode"
UPSTREAM_TESTS = ("internode", INTRANODE, "pressure", "ep")
"""The kinds of test that are DeepEP's own program, which begins by choosing a service level."""


def for_release(derived: Derived, release: Sequence[int]) -> Derived:
    """Return `derived`, which is in the variables of V1, in those of a release of DeepEP, (2, 1, 0) for 2.1.0."""
    if is_v25(release):
        return adapt_to_v25(derived)
    return adapt_to_v2(derived) if tuple(release) >= (2,) else derived


def adapt_to_v2(derived: Derived) -> Derived:
    """Return `derived` for DeepEP V2.

    V2 reads no map from GPU to NIC; it asks one NIC for its speed, mlx5_0 unless told. Its test chooses service level 1
    where none is set, so that the level of the profile (0 without one) is said to the test and to everybody else alike.
    Nodes with other than eight GPUs are as good to it: notes on what V1 wants go. Without a NIC it stops unless
    NCCL's device side is switched off; a test on one node needs none. Its look at the NCCL of the process stays on.
    """
    environment = {**_named(derived.environment), CHECK_OFF: ""}
    if derived.profile == SINGLE:
        environment[GIN_OFF] = "1"
    else:
        environment = {**dict.fromkeys(LEVELS, _level(derived)), **environment}
    by_host = {node: _named(values) for node, values in derived.by_host.items()}
    by_kind = {**derived.by_kind, INTRANODE: {**derived.by_kind.get(INTRANODE, {}), GIN_OFF: "1"}}
    return replace(
        derived, environment=environment, by_host=by_host, by_kind=by_kind, notes=_without_notes_of_v1(derived)
    )


def adapt_to_v25(derived: Derived) -> Derived:
    """Return `derived` for DeepEP V2.5.

    As for V2, with three differences: there is no NVSHMEM to read its variables; the NIC whose speed is asked for
    cannot be chosen; and a buffer may say its own service level, so that the profile's is a default for everybody and
    stands over the 1 that upstream's tests would take.
    """
    environment = {**_of_v25(derived.environment), CHECK_OFF: ""}
    by_kind = {kind: values for kind, each in derived.by_kind.items() if (values := _of_v25(each))}
    if derived.profile == SINGLE:
        environment[GIN_OFF] = "1"
    else:
        level = _level(derived)
        environment = {LEVELS[0]: level, CLASS: level, **environment}
        if CLASS_OF_TESTS not in environment:
            said = {CLASS_OF_TESTS: environment[CLASS]}
            by_kind |= {kind: {**said, **by_kind.get(kind, {})} for kind in UPSTREAM_TESTS}
    by_kind[INTRANODE] = {**by_kind.get(INTRANODE, {}), GIN_OFF: "1"}
    by_host = {node: values for node, each in derived.by_host.items() if (values := _of_v25(each))}
    notes = (*_without_notes_of_v1(derived), *_speed_notes(derived))
    return replace(derived, environment=environment, by_host=by_host, by_kind=by_kind, notes=notes)


def _level(derived: Derived) -> str:
    """Return the service level of the profile, "0" without one."""
    return derived.environment.get("NVSHMEM_IB_SL", "0")


def _without_notes_of_v1(derived: Derived) -> tuple[str, ...]:
    return tuple(note for note in derived.notes if OF_V1 not in note)


def _named(values: Mapping[str, str]) -> dict[str, str]:
    """Return variables with the first NIC of the map in place of the map."""
    kept = {key: value for key, value in values.items() if key != MAP}
    if names := _names(values):
        kept.setdefault(NIC, names[0])
    return kept


def _of_v25(values: Mapping[str, str]) -> dict[str, str]:
    """Return variables without those that nothing reads beside V2.5."""
    return {key: value for key, value in values.items() if key not in {MAP, NIC} and not key.startswith("NVSHMEM_")}


def _names(values: Mapping[str, str]) -> list[str]:
    """Return the names of the NICs in the map of some variables, the first GPU's first."""
    return [entry.split(":")[1] for entry in values.get(MAP, "").split(",") if entry]


def _speed_notes(derived: Derived) -> Iterator[str]:
    """Yield where the NIC that V2.5 asks for its speed is none that a GPU uses."""
    names = {"": _names(derived.environment), **{node: _names(values) for node, values in derived.by_host.items()}}
    others = [node for node, found in names.items() if found and NIC_OF_V25 not in found]
    if others:
        where = "" if "" in others else f"{_fold(others)}: "
        yield (
            f"{where}DeepEP V2.5 counts SMs and queue pairs by the speed of {NIC_OF_V25}, and no GPU uses that NIC "
            f"here: say num_sms and num_qps (--num-sms, --num-qps) yourself, or give the name to one of the GPUs' NICs"
        )


AUTO = "auto"
LINKS = ("Ethernet", "InfiniBand")
HANDLERS = ("gpu", "cpu")
FOLDER = "profiles/"
KNOWN = "rules/known-variables.toml"

HANDLER = "NVSHMEM_IBGDA_NIC_HANDLER"
SETTING_LEVELS = {
    "service_level": "NVSHMEM_IB_SL",
    "service_level_low_latency": "NVSHMEM_IB_SL",
    "service_level_other": "NCCL_IB_SL",
}
"""The three kinds of traffic that DeepEP's authors keep apart, and the variable of each: normal kernels, low
latency, the rest."""

MOST_LEVELS = {"InfiniBand": 15, "Ethernet": 7}
"""InfiniBand has 16 service levels (one for the subnet manager's own use), Ethernet 8 priorities."""

FROM_KEYS = {HANDLER: "handler", "NVSHMEM_IB_SL": "service_level", "NCCL_IB_SL": "service_level_other"}
KEYS = {"title", "link_layer", "handler", "gib", "notes", "environment", *SETTING_LEVELS}
ONE_LINE = "a text of one line in quotes"


class Profile(Struct, frozen=True):
    """The settings that hardware does not show. `link` is the link layer it is for ("" for one node alone), `handler`
    who rings the NIC's doorbell ("" without a network), `gib` whether NCCL goes through Google's gIB (None: where
    every host has it), `notes` what its user should know, `low_latency` the variables that are other for low-latency
    traffic."""

    name: str
    title: str
    link: str
    environment: Mapping[str, str]
    handler: str = ""
    gib: bool | None = None
    notes: tuple[str, ...] = ()
    low_latency: Mapping[str, str] = field(default_factory=dict)


def read_profile(name: str, texts: Mapping[str, str]) -> Profile:
    """Return profile `name` of the files of env/, every key and variable of it checked; Trouble names all faults at
    once."""
    file = f"{FOLDER}{name}.toml"
    if file not in texts:
        known = sorted(path.removeprefix(FOLDER).removesuffix(".toml") for path in texts if path.startswith(FOLDER))
        raise Trouble(
            Problem("profile", "there is no such profile", name, " or ".join([AUTO, *known]), f"writing env/{file}")
        )
    table: dict[str, Any] = load_toml(texts[file], f"env/{file}")
    rules: dict[str, Any] = load_toml(texts[KNOWN], f"env/{KNOWN}")
    if faults := [*_key_faults(f"env/{file}", table), *_environment_faults(f"env/{file}", table, rules)]:
        raise Trouble(*faults)
    link = table.get("link_layer", "")
    handler = table.get("handler", HANDLERS[0]) if link else ""
    levels = {
        variable: str(table[key])
        for key, variable in SETTING_LEVELS.items()
        if key in table and key != "service_level_low_latency"
    }
    environment = {**({HANDLER: handler} if handler else {}), **levels, **table.get("environment", {})}
    low = {SETTING_LEVELS[key]: str(table[key]) for key in ("service_level_low_latency",) if key in table}
    return Profile(
        name, table.get("title", ""), link, environment, handler, table.get("gib"), tuple(table.get("notes", ())), low
    )


def _key_faults(where: str, table: Mapping[str, Any]) -> Iterator[Problem]:
    link = table.get("link_layer", "")
    yield from (
        Problem(f"{where}: {key}", "unknown key", wanted=" or ".join(sorted(KEYS))) for key in table if key not in KEYS
    )
    if link not in ("", *LINKS):
        yield Problem(f"{where}: link_layer", "unknown link layer", str(link), " or ".join(LINKS))
    if table.get("handler", HANDLERS[0]) not in HANDLERS:
        yield Problem(f"{where}: handler", "unknown NIC handler", str(table["handler"]), " or ".join(HANDLERS))
    if not isinstance(table.get("gib", True), bool):
        yield Problem(f"{where}: gib", "neither true nor false", repr(table["gib"]))
    notes = table.get("notes", [])
    if not isinstance(notes, list) or not all(_is_line(note) for note in notes):
        yield Problem(f"{where}: notes", "not a list of texts", repr(notes), f"[{ONE_LINE}, …]")
    if not isinstance(table.get("environment", {}), dict):
        yield Problem(f"{where}: environment", "not a table of variables", repr(table["environment"]))
    most = MOST_LEVELS.get(str(link), 15)
    if not _is_line(table.get("title", "")):
        yield Problem(f"{where}: title", "not a text of one line", repr(table["title"]), ONE_LINE)
    for key in SETTING_LEVELS:
        level = table.get(key, 0)
        if not isinstance(level, int) or isinstance(level, bool) or not 0 <= level <= most:
            yield Problem(f"{where}: {key}", "not a service level", repr(level), f"a whole number from 0 to {most}")
    if not link:
        network = [key for key in ("handler", "gib", *SETTING_LEVELS) if key in table]
        yield from (
            Problem(f"{where}: {key}", "it has no effect without a network", wanted="link_layer") for key in network
        )


def _environment_faults(where: str, table: Mapping[str, Any], rules: Mapping[str, Any]) -> Iterator[Problem]:
    environment = table.get("environment", {})
    for variable, value in environment.items() if isinstance(environment, dict) else ():
        if fault := _variable_fault(variable, value, str(table.get("link_layer", "")), rules):
            yield Problem(f"{where}: {variable}", *fault)


def _variable_fault(variable: str, value: object, link: str, rules: Mapping[str, Any]) -> tuple[str, str, str] | None:
    if variable in rules["refused"]:
        return "a profile must not set it", rules["refused"][variable], ""
    if variable not in rules["known"]:
        return "nobody is known to read this variable", "", f"a name in env/{KNOWN}"
    if variable in FROM_KEYS:
        return "it is written from a key of the profile", "", f"{FROM_KEYS[variable]} = …"
    only = rules["known"][variable].get("link_layer", "")
    if only == "any" and not link:
        return "it has no effect without a network", "no link_layer", " or ".join(LINKS)
    if only in LINKS and only != link:
        return f"it is for {only} only", link or "no network", only
    return None if _is_line(value) else ("the value must be a text of one line", repr(value), '"…"')


def _is_line(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()
