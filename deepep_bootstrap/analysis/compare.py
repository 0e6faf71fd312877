"""Figures of tests compared with references and with what the hardware can carry: a verdict for each.

The limits of the hardware come from the facts of the hosts and the table of NVLink rates.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from deepep_bootstrap.analysis.reference_file import (
    ALIKE,
    CONFIG,
    PROCESSES,
    TOKENS,
    Reference,
    ReferenceSet,
    gpu_type,
    unit_of,
)
from deepep_bootstrap.analysis.results.model import (
    ABOVE,
    BELOW,
    FIGURE,
    LOW_LATENCY_PARTS,
    NONE,
    OK,
    LowLatency,
    Operation,
    Spread,
    Tested,
    Verdict,
    percent_text,
)
from deepep_bootstrap.core.text import round_number, three_digits
from deepep_bootstrap.inventory import nics
from deepep_bootstrap.inventory.facts import Facts

LONG = 64 << 20
"""Bytes of a message from which on its rate is the line's, and not that of its beginning; what our own programs send
by default."""

LEAST_US, MOST_VALUE = 1e-6, 1e12
"""Of times in microseconds, and of anything: what lies outside was not measured but misread."""

COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
GPU = "GPU"
ARGUMENT = re.compile(r"--([a-z][a-z-]*)(?:=(\d+))?$")
NAMES: Mapping[str, str] = {
    "best": "",
    "low_latency": "",
    "operations": "",
    "layout": "layout",
    "dispatch_fp8": "dispatch FP8",
    "dispatch_bf16": "dispatch BF16",
    "nvl_gbs": "NVLink",
    "rdma_gbs": "RDMA",
    "us": "time",
    "so_gbs": "between nodes",
    "su_gbs": "inside a node",
    "dispatch_combine_gbs": "dispatch and combine",
    "dispatch_us": "dispatch, time",
    "combine_us": "combine, time",
    "dispatch_gbs": "dispatch",
    "combine_gbs": "combine",
    "bus_gbs": "bus",
    "gpu_gbs": "each GPU",
    "dispatch_combine_us": "dispatch and combine, time",
    "dispatch_send_us": "dispatch, sending",
    "dispatch_recv_us": "dispatch, receiving",
    "combine_send_us": "combine, sending",
    "combine_recv_us": "combine, receiving",
}


class TestSetting(Struct, frozen=True):
    """Where figures were measured: GPU type, fabric, nodes; with the references and the limits they are judged by."""

    gpu: str
    fabric: str
    nodes: int
    references: ReferenceSet
    limits: Limits


def judge(
    tests: Sequence[Tested],
    *,
    gpu: str,
    fabric: str,
    nodes: int,
    references: ReferenceSet,
    limits: Limits | None = None,
) -> tuple[Verdict, ...]:
    """Return a verdict for every figure of the tests, in their order; but for what went between nodes where there is
    one node, and for the times of LOW_LATENCY_PARTS where nothing is known of them.

    `gpu` is a type ("H200") or a product name, `fabric` one of reference_file.FABRICS ("" where nobody knows; tests on
    one node use NVLink whatever it says), `nodes` how many took part. `limits` of the hosts are left out where nobody
    asked the hosts.
    """
    setting = TestSetting(gpu_type(gpu) or gpu, fabric, max(nodes, 1), references, limits or Limits())
    found = (
        _verdict(tested, figure, value, setting)
        for tested in tests
        for figure, value in figures_of(tested).items()
        if nodes_of(tested, nodes) > 1 or not figure.endswith(".so_gbs")
    )
    return tuple(one for one in found if one.wanted is not None or not is_part(one.subject))


def is_part(figure: str) -> bool:
    """Return whether a figure is one of the times that few references have."""
    return figure.rpartition(".")[2] in LOW_LATENCY_PARTS


def figures_of(tested: Tested) -> dict[str, float]:
    """Return the figures of a test by their path in the document of `invoke results`; where ranks differ, the middle
    one's."""
    found: dict[str, float | None] = {}
    for name, best in tested.best.items():
        found |= {f"best.{name}.{part}": getattr(best, part) for part in ("nvl_gbs", "rdma_gbs", "us")}
    if low := tested.low_latency:
        found |= _medians("low_latency", low, ("dispatch_combine_gbs", "dispatch_gbs", "combine_gbs"))
        times = ("dispatch_us", "combine_us", *LOW_LATENCY_PARTS)
        found |= {f"low_latency.{part}": getattr(low, part) for part in times}
    for name, operation in tested.operations.items():
        found |= _medians(f"operations.{name}", operation, ("so_gbs", "su_gbs", "us", "bus_gbs", "gpu_gbs"))
    return {figure: value for figure, value in found.items() if value is not None}


def _medians(path: str, figures: LowLatency | Operation, parts: Iterable[str]) -> dict[str, float | None]:
    """Return the middle of each spread over the ranks, by its path."""
    spreads: dict[str, Spread | None] = {part: getattr(figures, part) for part in parts}
    return {f"{path}.{part}": spread.median for part, spread in spreads.items() if spread}


def configured(tested: Tested, args: Sequence[str]) -> Tested:
    """Return the test with the settings that the words given to its script say (`--num-tokens 64`,
    `--num-tokens=64`), where its log does not say them itself."""
    given: dict[str, int] = {}
    for word, after in zip(args, (*args[1:], ""), strict=False):
        if match := ARGUMENT.match(word):
            value = match[2] or after
            name = match[1].replace("-", "_")
            if name in CONFIG and value.isdecimal():
                given[name] = int(value)
    return replace(tested, config={**given, **tested.config})


def nodes_of(tested: Tested, nodes: int) -> int:
    """Return on how many of so many nodes a test ran: an intranode test stays on one, each node for itself."""
    return 1 if tested.test == "intranode" else max(nodes, 1)


def settings_of(tested: Tested, nodes: int, references: ReferenceSet, limits: Limits) -> dict[str, float]:
    """Return the settings of a test: its own output's, else what its ranks and the hosts' GPUs say, else upstream's
    defaults."""
    found: dict[str, float] = dict(references.defaults.get(tested.test, {}))
    if limits.gpus:
        found[PROCESSES] = min(found.get(PROCESSES, limits.gpus), limits.gpus)
    stated = {
        name: value
        for name, value in tested.config.items()
        if isinstance(value, int | float) and abs(value) <= MOST_VALUE
    }
    if ranks := stated.get("num_ranks", len(tested.ranks)):
        found[PROCESSES] = ranks / nodes_of(tested, nodes)
    return found | stated


def title(figure: str) -> str:
    """Return what people call a figure: "dispatch FP8, NVLink" for best.dispatch_fp8.nvl_gbs."""
    words = [NAMES.get(part, part.replace("_", " ")) for part in figure.split(".")]
    return ", ".join(filter(None, words))


def _verdict(tested: Tested, figure: str, value: float, setting: TestSetting) -> Verdict:
    unit, larger = unit_of(figure)
    bare = Verdict(FIGURE, figure, NONE, "", title(figure), test=tested.title, log=tested.log, unit=unit)
    if not (0 if larger else LEAST_US) <= value <= MOST_VALUE:
        return replace(bare, text=f"{bare.title}: {value:g} {unit} is nothing that can be measured")
    if tested.is_later_pass:
        text = f"{bare.title}: {three_digits(value)} {unit}; only figures of the first pass are compared"
        return replace(bare, value=value, text=text)
    nodes = nodes_of(tested, setting.nodes)
    here = settings_of(tested, nodes, setting.references, setting.limits)
    same = [one for one in setting.references.references if (one.test, one.figure) == (tested.test, figure)]
    apart = [(_differences(one, here, nodes, setting), one) for one in same]
    holds = sorted(
        (one for differences, one in reversed(apart) if not differences), key=lambda one: _rank(one, tested, setting)
    )
    aim = next((one for one in holds if not one.fault), None)
    most = ceiling(figure, nodes, here.get(PROCESSES, 0), setting.limits)
    found = replace(bare, value=value)
    if most:
        found = replace(
            found, limit=most.counted, of_limit=100 * value / most.counted, impossible=value > most.counted * most.slack
        )
    found = _compared(found, aim) if aim else replace(found, text=f"{three_digits(value)} {unit}, {_without(apart)}")
    about = (
        f", {percent_text(found.of_limit)} % of what {most.of} can do" if most and found.of_limit is not None else ""
    )
    if most and not aim and value < most.least and _is_long(tested, figure):
        found, about = (
            replace(found, state=BELOW),
            f"{about}, and {100 * most.least / most.counted:.0f} % is the least on healthy hardware",
        )
    means = (*_meanings(found, holds, nodes, setting), *_remarks(found, most))
    return replace(found, text=f"{found.title}: {found.text}{about}", means=means)


def _is_long(tested: Tested, figure: str) -> bool:
    """Return whether a figure of a program of ours was measured with messages long enough for the line to count, and
    on GPUs."""
    operation = tested.operations.get(figure.split(".")[1])
    return operation is not None and (operation.bytes or 0) >= LONG and tested.config.get("library") != "gloo"


def _rank(one: Reference, tested: Tested, setting: TestSetting) -> tuple[bool, bool, bool, bool]:
    """Return how far a reference that holds is from home: a site's own first, then those for this very generation, GPU
    type and fabric.

    V2 keeps V1's tests with their kernels, so V1's figures hold for it. Among equals what comes later in the file
    stands over what came before."""
    elsewhere = one.fabric not in ("nvlink", setting.fabric)
    return not one.site, one.generation != tested.generation, one.gpu != setting.gpu, elsewhere


def _differences(one: Reference, here: Mapping[str, float], nodes: int, setting: TestSetting) -> tuple[str, ...]:
    """Return in what a reference was measured otherwise than `here`, each as "num_tokens 4096 (here 64)"; none if it
    holds."""
    used = "nvlink" if nodes == 1 else setting.fabric
    links = setting.references.gpus.get(setting.gpu)
    found = []
    if one.gpu != setting.gpu and not (links and one.gpu == f"sm_{links.arch.replace('.', '')}"):
        found.append(f"{GPU} {one.gpu} (here {setting.gpu or 'unknown'})")
    if one.fabric != used and not (one.fabric == "roce" and used == "gib"):
        found.append(f"fabric {one.fabric} (here {used or 'unknown'})")
    if one.nodes != nodes:
        found.append(f"nodes {one.nodes} (here {nodes})")
    for name, values in one.config.items():
        near = ALIKE if name == TOKENS else 0.0
        if name in here and not any(abs(here[name] - each) <= near * each for each in values):
            found.append(f"{name} {' or '.join(map(str, values))} (here {here[name]:g})")
    return tuple(found)


def _compared(bare: Verdict, aim: Reference) -> Verdict:
    """Return the verdict of a figure against its reference, without what it means."""
    percent = aim.percent(bare.value or 0.0)
    state = BELOW if percent < 100 * (1 - aim.lower) else ABOVE if percent > 100 * (1 + aim.upper) else OK
    found = replace(bare, state=state, wanted=aim.value, low=aim.low, high=aim.high, percent=percent, source=aim.source)
    text = f"{three_digits(bare.value or 0.0)} {bare.unit}, {found.beside}, allowed {found.allowed} ({aim.source})"
    return replace(found, text=text)


def _without(apart: Sequence[tuple[tuple[str, ...], Reference]]) -> str:
    """Return what to say of a figure without a reference: how the nearest one for its GPU was measured."""
    others = [
        (differences, one)
        for differences, one in apart
        if differences and not one.fault and not differences[0].startswith(GPU)
    ]
    if not others:
        return "no reference"
    differences, one = min(others, key=lambda other: len(other[0]))
    return f"no reference; the nearest, {round_number(one.value)} {one.unit}, is for {', '.join(differences)}"


def _meanings(found: Verdict, holds: Sequence[Reference], nodes: int, setting: TestSetting) -> Iterator[str]:
    """Yield what a figure that is too low usually means: first setups with a known fault that gave the same, then
    hints."""
    if found.state not in (BELOW, NONE) or found.value is None:
        return
    yield from dict.fromkeys(
        f"{one.fault} ({one.source})" for one in holds if one.fault and one.low <= found.value <= one.high
    )
    known: dict[str, float | str | None] = {
        "percent": found.percent,
        "limit": found.of_limit,
        "value": found.value,
        "nodes": float(nodes),
        "nics": float(setting.limits.nics) if setting.limits.nics else None,
        "fabric": setting.fabric if nodes > 1 else "nvlink",
        "test": found.test,
        "unit": found.unit,
        "reference": "none" if found.wanted is None else "some",
    }
    for hint in setting.references.hints:
        low = found.state == BELOW or any(sentence.startswith(("limit", "value")) for sentence in hint.when)
        if (
            low
            and found.subject.rpartition(".")[2] in hint.figures
            and all(_holds(sentence, known) for sentence in hint.when)
        ):
            yield hint.means


def _holds(sentence: str, known: Mapping[str, float | str | None]) -> bool:
    """Return whether a sentence of a hint is true; about something unknown it is not."""
    thing, word, wanted = sentence.split(" ", 2)
    value = known[thing]
    if value is None:
        return False
    return value == wanted if isinstance(value, str) else COMPARE[word](value, float(wanted))


def _remarks(found: Verdict, most: Ceiling | None) -> Iterator[str]:
    """Yield what a reader should know of a figure that is high."""
    if found.state == ABOVE:
        yield "faster than its reference, which is old or of another setup: keep your own (--save-as-reference)"
    if most and found.impossible:
        yield (
            f"more than {most.of} can carry ({most.counted:.0f} {found.unit}, what stays local counted): something "
            f"is measured wrong"
        )
    elif most and (found.value or 0.0) > most.line and most.counted > most.line:
        yield f"more than the line's {most.line:.0f} {found.unit}: upstream counts tokens that stay local, too"


LINKS_OF_FABRICS = {"infiniband": "InfiniBand", "roce": "Ethernet", "gib": "Ethernet"}
BITS = 8


class Limits(Struct, frozen=True):
    """What one host can move at most in one direction, in GB/s (10^9 bytes per second), the least of all hosts; None
    where the facts do not say it. `nvlink_gbs` is of one GPU, `node_gbs` of all NICs of a host for GPUs together,
    `nic_gbs` the share of one GPU in it. `gpus` and `nics` are per host. `why` says how they were found, `joined`
    that NVLink joins the hosts (one clique of a GB200 rack, with IMEX): what goes between them may go over either."""

    nvlink_gbs: float | None = None
    node_gbs: float | None = None
    nic_gbs: float | None = None
    gpus: int = 0
    nics: int = 0
    why: tuple[str, ...] = ()
    joined: bool = False

    def between(self) -> tuple[float | None, str]:
        """Return the most that one GPU can send to other hosts, in GB/s, and over what."""
        if self.joined and self.nvlink_gbs:
            return max(self.nvlink_gbs, self.nic_gbs or 0.0), "NVLink between the nodes"
        return self.nic_gbs, "the NICs"


SLACK = 1.05
"""How much more than the line can carry a figure may be before it cannot be: where tokens go is drawn, not dealt
out."""

ADDED_UP = 2.1
"""The same of an all-reduce, whose bus rate is what a ring carries: a switch that adds up needs half of that."""

LEAST_SHARE = 0.5
"""Share of what the line can do that plain, long messages reach on healthy hardware at least. A choice: two H200
reach 0.69 of their NVLinks (NCCL 2.28.9, 2026-11-21); ports below half their rate, most NICs left out, and sockets
stay below half."""


class Ceiling(Struct, frozen=True):
    """The most that one figure can be, in its unit: what the `line` carries, and the same as upstream counts it.
    `of` says which line; more than `counted` times `slack` cannot be, less than `least` (0: nobody knows) is slow
    whatever is wrong."""

    line: float
    counted: float
    of: str
    slack: float = SLACK
    least: float = 0.0


def ceiling(figure: str, nodes: int, ranks: float, limits: Limits) -> Ceiling | None:
    """Return the most that a figure of a test on so many nodes with so many ranks each can be; None where nobody knows.

    Upstream's tests count tokens that stay on their GPU (NVLink) or their node (RDMA) like others
    (test_internode.py: the sum over all nodes; V2's SO). Tokens go everywhere alike, so of n peers one is the sender
    itself, and figures are up to n / (n - 1) times what the line carried: 100 GB/s on two nodes with 50 GB/s for
    each GPU."""
    part = figure.rpartition(".")[2]
    if not part.endswith("_gbs"):
        return None
    if part in ("bus_gbs", "gpu_gbs"):
        return _plain_ceiling(figure, nodes, ranks, limits)
    up = part in ("nvl_gbs", "su_gbs") or (part not in ("rdma_gbs", "so_gbs") and nodes == 1)
    line, of = (limits.nvlink_gbs, "NVLink") if up else limits.between()
    peers = ranks if up else nodes
    return Ceiling(line, line * peers / (peers - 1), of) if line and peers > 1 else None


def _plain_ceiling(figure: str, nodes: int, ranks: float, limits: Limits) -> Ceiling | None:
    """Return the most that a figure of our own programs can be. Between two nodes each GPU has its share of the NICs
    (pairs)."""
    slack = SLACK
    slow: float | None = None
    if figure.endswith("all_reduce.bus_gbs"):
        slack = ADDED_UP
    if nodes == 1:
        most, of = limits.nvlink_gbs, "NVLink"
    elif figure.endswith("gpu_gbs") or (limits.joined and limits.nvlink_gbs):
        (most, of), slow = limits.between(), limits.nic_gbs
    elif figure.endswith("all_reduce.bus_gbs"):
        most, of = _all_reduce_most(ranks, limits)
    else:
        most, of = _all_to_all_most(nodes, ranks, limits), "the NICs"
    # NCCL may take the NICs although NVLink is there: slow is what is slow for them.
    return Ceiling(most, most, of, slack, LEAST_SHARE * (slow or most)) if most else None


def _all_reduce_most(ranks: float, limits: Limits) -> tuple[float | None, str]:
    """Return the most of a ring's all-reduce and the line: it passes through all NICs of a node, and through the
    NVLinks of each GPU."""
    if not limits.nic_gbs:
        return None, "the NICs"
    of_nics = limits.nic_gbs * ranks
    if limits.nvlink_gbs and (limits.nvlink_gbs <= of_nics or not of_nics):
        return limits.nvlink_gbs, "NVLink"
    return of_nics, "the NICs"


def _all_to_all_most(nodes: int, ranks: float, limits: Limits) -> float | None:
    """Return the most of an all-to-all: it sends 1 - 1 / nodes of all bytes through the NICs and counts 1 - 1 / ranks
    of them."""
    world = nodes * ranks
    if not limits.nic_gbs or not world:
        return None
    return limits.nic_gbs * nodes / (nodes - 1) * (world - 1) / world


def fabric_of(facts: Iterable[Facts], nodes: int) -> str:
    """Return the fabric that a test on so many nodes uses: "nvlink" on one; "infiniband", "gib" (RoCE with Google's
    gIB) or "roce" by the NICs of the hosts, "" where they have none."""
    hosts = list(facts)
    if nodes < 2:
        return "nvlink"
    rates = {
        link: sum(nic.rate for host in hosts for nic in nics.sort_out(host, link).used)
        for link in ("InfiniBand", "Ethernet")
    }
    if not any(rates.values()):
        return ""
    if rates["InfiniBand"] >= rates["Ethernet"]:
        return "infiniband"
    return "gib" if hosts and all(host.prepared.gib for host in hosts) else "roce"


def are_joined(hosts: Iterable[Facts]) -> bool:
    """Return whether NVLink joins several hosts: their GPUs are in one clique of one domain, and IMEX runs."""
    known = [host.prepared for host in hosts if host.gpus]
    cliques = {each.cliques for each in known}
    return (
        len(known) > 1
        and len(cliques) == 1
        and len(next(iter(cliques))) == 1
        and all(each.imex == "active" for each in known)
    )


def gpu_nics(facts: Mapping[str, Facts]) -> dict[str, tuple[str, ...]]:
    """Return the NICs that GPUs use, as "mlx5_3:1", by host: what `traffic.judge_traffic` expects. Hosts without
    GPUs are left out; those that NVLink joins have none, since nothing says that NICs carry anything there."""
    if are_joined(facts.values()):
        return {name: () for name, host in facts.items() if host.gpus}
    link = LINKS_OF_FABRICS.get(fabric_of(facts.values(), 2), "")
    hosts = {
        name: nics.assign_nics(host.gpus, nics.sort_out(host, link).used) for name, host in facts.items() if host.gpus
    }
    return {name: tuple(dict.fromkeys(map(str, own.values()))) for name, own in hosts.items()}


def gpu_of(facts: Iterable[Facts]) -> str:
    """Return the type of the hosts' GPUs ("H200"), "" where they have none or several types."""
    types = {gpu_type(gpu.name) or gpu.name for host in facts for gpu in host.gpus}
    return types.pop() if len(types) == 1 else ""


def limits_of(facts: Sequence[Facts], references: ReferenceSet) -> Limits:
    """Return what hosts can move at most; those without a GPU do not count."""
    hosts = [host for host in facts if host.gpus]
    if not hosts:
        return Limits()
    used = fabric_of(hosts, 2)
    used_nics = [nics.sort_out(host, LINKS_OF_FABRICS[used]).used if used else () for host in hosts]
    rates = [sum(nic.rate for nic in own) / BITS for own in used_nics]
    slowest = min(range(len(hosts)), key=lambda index: rates[index] / len(hosts[index].gpus))
    links = [_nvlink(host, references) for host in hosts]
    known = [found for found in links if found is not None]
    nvlink, how = min(known) if len(known) == len(links) else (None, "")
    why = [how] if how else []
    rate, gpus, count = rates[slowest], len(hosts[slowest].gpus), len(used_nics[slowest])
    if rate:
        why.append(f"{count} NICs of {rate * BITS / count:g} Gb/s for {gpus} GPUs")
    joined = are_joined(hosts)
    if joined:
        why.append("NVLink between the nodes: one clique, IMEX runs")
    return Limits(
        nvlink_gbs=nvlink,
        node_gbs=rate or None,
        nic_gbs=rate / gpus if rate else None,
        gpus=gpus,
        nics=count,
        why=tuple(why),
        joined=joined,
    )


def _nvlink(host: Facts, references: ReferenceSet) -> tuple[float, str] | None:
    """Return GB/s of one GPU's NVLinks in one direction and how it was found; None where the GPU or its links are not
    known.

    Behind an NVSwitch `nvidia-smi topo` shows all links of a GPU for each of its peers, without one those to that
    peer. The links of all peers together are more than a GPU has only in the first case."""
    known = references.gpus.get(gpu_of([host]))
    if known is None or not known.links or not host.prepared.nvlinks:
        return None
    counts: dict[int, list[int]] = {gpu.index: [] for gpu in host.gpus}
    for pair in host.prepared.nvlinks:
        links = int(pair.by[2:]) if pair.by[:2] == "NV" and pair.by[2:].isdecimal() else 0
        for index in (pair.gpu, pair.other):
            counts.setdefault(index, []).append(links)
    least = min(sum(each) if sum(each) <= known.links else max(each) for each in counts.values())
    return (least * known.gbs, f"{least} NVLinks of {known.gbs:g} GB/s") if least else None
