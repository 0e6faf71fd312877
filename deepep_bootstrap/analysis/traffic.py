"""Traffic of the NICs during a run, from their counters before and after: the share of each, and errors that
are new.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from deepep_bootstrap.analysis.reference_file import ErrorCounter, ReferenceSet
from deepep_bootstrap.analysis.results.model import BELOW, ERROR, NIC, NONE, NOTE, OK, Verdict
from deepep_bootstrap.testing.run_folder import WORD_BYTES, Counter, Counters, TestRun

FAIR = 0.5
"""Least share of a NIC, as a fraction of an equal share of all. The tests load all GPUs alike, and a map of GPUs to
NICs gives no NIC more than one GPU more than another: with x GPUs for each NIC on average the least loaded has
floor(x), which is more than x / 2."""

IDLE = 0.01
"""Below this fraction of an equal share a NIC carried nothing of the test: what is left is other traffic."""

LEAST = 100_000
"""Bytes for each NIC below which a test did not use the NICs at all: one token (14 kB) to seven others is as much."""

SATURATED = (2**32 - 1) * WORD_BYTES
"""Where a 32-bit counter of words ends: InfiniBand's stay there (PortXmitData of the specification), wider ones
never stop there."""

FAST = 0.5
"""NICs of less than this fraction of the fastest one's rate are for management (nics.sort_out has the same)."""


class NicTraffic(Struct, frozen=True):
    """What one port of a NIC carried during a run: bytes, and its share of all GPU traffic of its host in each
    direction (0…1). `expected`: it should carry the traffic of GPUs. `problem` says why nothing is known (""
    otherwise), `gone`: it is not there any more; `errors` are new ones by name."""

    host: str
    device: str
    gbits: float = 0.0
    sent: int = 0
    received: int = 0
    share_sent: float = 0.0
    share_received: float = 0.0
    expected: bool = True
    problem: str = ""
    gone: bool = False
    errors: Mapping[str, int] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Return the share in the direction in which it is smaller."""
        return min(self.share_sent, self.share_received)


def nic_traffic(run: TestRun, expected_nics: Mapping[str, Collection[str]] | None = None) -> tuple[NicTraffic, ...]:
    """Return what each NIC of each host carried, hosts in the run's order; none for hosts without counters before or
    after.

    See `judge_traffic` for `expected_nics`."""
    return tuple(nic for host in _hosts(run) for nic in _of_host(run, host, expected_nics))


def judge_traffic(
    run: TestRun, *, expected_nics: Mapping[str, Collection[str]] | None = None, references: ReferenceSet | None = None
) -> tuple[Verdict, ...]:
    """Return verdicts on the NICs of a run's hosts and on new errors of NICs and GPUs.

    `expected_nics` are the devices that carry GPU traffic by host ("mlx5_3", or with its port "mlx5_3:1"); a host that
    is not in it, or None, means the NICs of its prevailing link layer that are at least half as fast as the fastest. On
    one node no NIC carries anything, so there only errors are judged. `references` say what error counters mean.
    """
    hosts = _hosts(run)
    is_between_nodes = len(hosts) > 1
    found: list[Verdict] = []
    for host in hosts:
        before, after = run.counters.get(host, (None, None))
        if before is None or after is None:
            found.append(_uncounted(host, before, after))
            continue
        nics = _of_host(run, host, expected_nics)
        if is_between_nodes:
            found += _traffic_verdicts(host, [nic for nic in nics if nic.expected])
        devices = [*nics, *_gpu_errors(host, before, after)]
        found += _error_verdicts(host, devices, references or ReferenceSet())
        found += _gone_gpus(host, before, after)
    return tuple(found)


def _uncounted(host: str, before: Counters | None, after: Counters | None) -> Verdict:
    """Return the verdict on a host whose counters are not there on both sides of the test."""
    when = "after"
    if before is None:
        when = "before and after" if after is None else "before"
    return Verdict(NIC, "counters", NONE, f"no counters from {when} the test", host=host)


def _hosts(run: TestRun) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*run.nodes, *run.counters)))


def _of_host(run: TestRun, host: str, expected_nics: Mapping[str, Collection[str]] | None) -> tuple[NicTraffic, ...]:
    before, after = run.counters.get(host, (None, None))
    if before is None or after is None:
        return ()
    given = (expected_nics or {}).get(host)
    wanted = _usual(before) if given is None else {_port(name, before) for name in given}
    names = dict.fromkeys((*before.nics, *after.nics, *wanted))
    nics = [_moved(host, name, before.nics.get(name), after.nics.get(name)) for name in names]
    nics = [replace(nic, expected=nic.device in wanted) for nic in nics]
    sent, received = (sum(getattr(nic, way) for nic in nics if nic.expected) for way in ("sent", "received"))
    return tuple(
        replace(
            nic,
            share_sent=nic.sent / sent if sent else 0.0,
            share_received=nic.received / received if received else 0.0,
        )
        if nic.expected
        else nic
        for nic in nics
    )


def _usual(counters: Counters) -> set[str]:
    """Return the ports that carry GPU traffic where nobody says which: of the link layer with most bandwidth, all
    but the slow ones."""
    layers: dict[str, float] = {}
    for nic in counters.nics.values():
        layers[nic.link_layer] = layers.get(nic.link_layer, 0.0) + nic.gbits
    layer = max(layers, key=lambda name: layers[name], default="")
    fastest = max((nic.gbits for nic in counters.nics.values() if nic.link_layer == layer), default=0.0)
    return {name for name, nic in counters.nics.items() if nic.link_layer == layer and nic.gbits >= FAST * fastest}


def _port(name: str, counters: Counters) -> str:
    """Return a device as counters name it ("mlx5_3/1"); without a port its first one."""
    device, _, port = name.replace(":", "/").partition("/")
    return (
        f"{device}/{port}"
        if port
        else min((one for one in counters.nics if one.startswith(f"{device}/")), default=f"{device}/1")
    )


def _moved(host: str, name: str, before: Counter | None, after: Counter | None) -> NicTraffic:
    bare = NicTraffic(host, name)
    if before is None or after is None:
        gone = after is None and before is not None
        reason = (
            "is gone since the test began"
            if gone
            else "is not there"
            if after is None
            else "was not there when the test began"
        )
        return replace(bare, problem=reason, gone=after is None)
    bare = replace(bare, gbits=after.gbits, errors=_grown(before.errors, after.errors))
    sent, received = after.sent - before.sent, after.received - before.received
    if sent < 0 or received < 0:
        return replace(bare, problem="counts less than before the test: its driver was loaded again, or it was reset")
    if SATURATED in (after.sent, after.received):
        return replace(bare, problem="has 32-bit counters, which are at their end")
    return replace(bare, sent=sent, received=received)


def _grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return by how much counters grew, those that did; one that was reset meanwhile counts from 0."""
    grown = {
        name: count - before.get(name, 0) if count >= before.get(name, 0) else count for name, count in after.items()
    }
    return {name: count for name, count in grown.items() if count > 0}


def _traffic_verdicts(host: str, nics: Sequence[NicTraffic]) -> Iterator[Verdict]:
    """Yield one verdict for a host where all NICs carried their share, else one for each that did not."""
    if not nics:
        yield Verdict(NIC, "nics", NONE, "no RDMA NIC: what the nodes sent each other went over sockets", host=host)
        return
    yield from _problem_verdicts(host, nics)
    known = [nic for nic in nics if not nic.problem]
    if not known:
        return
    sent, received = sum(nic.sent for nic in known), sum(nic.received for nic in known)
    both = f"{gigabytes(sent)} sent, {gigabytes(received)} received"
    if max(sent, received) < LEAST * len(known):
        text = f"no NIC carried the test's traffic: {both} by {_count(known)}"
        means = ("the nodes reached each other another way, such as sockets, or this driver does not count RDMA",)
        yield Verdict(NIC, "nics", BELOW, text, host=host, means=means)
        return
    low = [nic for nic in known if nic.share < FAIR / len(known)]
    yield from (_low(nic, known, sent, received) for nic in low)
    if not low and len(known) == len(nics):
        yield Verdict(NIC, "nics", OK, f"{_count(known)} carried traffic: {both}{_span(known)}", host=host)


def _problem_verdicts(host: str, nics: Iterable[NicTraffic]) -> Iterator[Verdict]:
    """Yield a verdict for each NIC of which nothing is known."""
    for nic in nics:
        if nic.problem:
            yield Verdict(NIC, nic.device, BELOW if nic.gone else NONE, f"{nic.device} {nic.problem}", host=host)


def _span(nics: Sequence[NicTraffic]) -> str:
    """Return the least and the largest share of several NICs in words."""
    if len(nics) == 1:
        return ""
    shares = sorted(100 * share for nic in nics for share in (nic.share_sent, nic.share_received))
    least, most = f"{shares[0]:.1f}", f"{shares[-1]:.1f}"
    return f", {least} % each" if least == most else f", {least} to {most} % each"


def _low(nic: NicTraffic, known: Sequence[NicTraffic], sent: int, received: int) -> Verdict:
    way = "sent" if nic.share_sent <= nic.share_received else "received"
    done, total = (nic.sent, sent) if way == "sent" else (nic.received, received)
    others = [getattr(one, f"share_{way}") for one in known if one is not nic]
    usual = 100 * sum(others) / max(len(others), 1)
    if nic.share < IDLE / len(known):
        text = f"{nic.device} {way} nothing of the test ({gigabytes(done)} of {gigabytes(total)})"
        means = (
            "no GPU uses it: is it in DEEP_EP_DEVICE_TO_HCA_MAPPING, its port up, and reachable from the other nodes?",
        )
    else:
        text = f"{nic.device} {way} {100 * nic.share:.1f} % of the traffic where the others have {usual:.1f} %"
        means = ("GPUs share another NIC, or this one is slower: compare rate, PCIe width and errors of its port",)
    return Verdict(
        NIC,
        nic.device,
        BELOW,
        text,
        host=nic.host,
        value=100 * nic.share,
        unit="%",
        wanted=100 / len(known),
        means=means,
    )


def _count(nics: Sequence[NicTraffic]) -> str:
    return f"all {len(nics)} NICs" if len(nics) != 1 else f"the one NIC ({nics[0].device})"


def _gpu_errors(host: str, before: Counters, after: Counters) -> Iterator[NicTraffic]:
    for index, gpu in sorted(after.gpus.items()):
        yield NicTraffic(
            host, f"gpu {index}", errors=_grown(before.gpus[index].errors, gpu.errors) if index in before.gpus else {}
        )


def _gone_gpus(host: str, before: Counters, after: Counters) -> Iterator[Verdict]:
    for index in sorted(set(before.gpus) - set(after.gpus)):
        means = ("the driver lost it (look for Xid in the kernel's log), or nvidia-smi did not answer",)
        yield Verdict(ERROR, f"gpu {index}", BELOW, f"gpu {index} is gone since the test began", host=host, means=means)


def _error_verdicts(host: str, devices: Iterable[NicTraffic], references: ReferenceSet) -> Iterator[Verdict]:
    """Yield a verdict for each NIC or GPU with new errors; those of NICs that carry no GPU traffic are only noted,
    and so are as many as a healthy link may have for what it carried."""
    for device in devices:
        if device.errors:
            yield _error_verdict(host, device, references.counters)


def _error_verdict(host: str, device: NicTraffic, counters: Mapping[str, ErrorCounter]) -> Verdict:
    known = {name: counters[name] for name in device.errors if name in counters}
    failing = {name: counter for name, counter in known.items() if counter.fails}
    usual = [name for name, counter in failing.items() if device.errors[name] <= counter.usual(device.received)]
    means = [counter.means for counter in sorted(known.values(), key=lambda counter: not counter.fails)]
    for name in usual:
        counter = known[name]
        means.append(f"{name}: no more than links may have ({counter.per_tb:g} for 10^12 bytes: {counter.source})")
    is_bad = device.expected and len(usual) < len(failing)
    counts = ", ".join(f"{name} {count}" for name, count in sorted(device.errors.items()))
    return Verdict(
        ERROR,
        device.device,
        BELOW if is_bad else NOTE,
        f"{device.device} has new errors: {counts}",
        host=host,
        means=tuple(dict.fromkeys(means)),
    )


def gigabytes(count: int) -> str:
    """Return bytes as people read them, in units of 1000: "12.3 GB", "870 kB", "0 bytes"."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
