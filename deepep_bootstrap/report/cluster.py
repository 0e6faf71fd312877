"""The report of a whole cluster as values: its hosts and what they wait for, the NIC of each GPU, the doctor's
findings, what the prefix offers and offered, and the last run of each kind of test; and its JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Problem
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.redact import scrub
from deepep_bootstrap.doctor.examine import finding_json
from deepep_bootstrap.doctor.findings import BLOCKING, SEVERITIES, WARNING, Finding
from deepep_bootstrap.inventory import nics
from deepep_bootstrap.inventory.facts import Facts, driver_line, rdma_line, slurm_line
from deepep_bootstrap.inventory.survey import Survey
from deepep_bootstrap.prefix.contents import Generation, Holdings
from deepep_bootstrap.report.model import Report
from deepep_bootstrap.testing.run_folder import RunVerdict

SILENT, BLOCKED, DRAINED, WAITING, WARNED, READY = "silent", "blocked", "drained", "waiting", "warned", "ready"
HOST_STATES = {
    SILENT: "does not answer",
    BLOCKED: "blocked",
    DRAINED: "kept drained",
    WAITING: "waits for a reboot",
    WARNED: "warnings",
    READY: "ready",
}
"""States of a host, the worst first, and what people call them."""

PASSED, SLOW, FAILED = "passed", "below", "failed"
HEADLINES = {PASSED: "All is well", SLOW: "Usable, but not all is well", FAILED: "Something blocks"}


BAD_RUNS = {RunVerdict.FAILED: "failed", RunVerdict.BELOW: "is below its reference", RunVerdict.STOPPED: "was stopped"}
"""Verdicts on a last run that count against a cluster, the worst first, and what people say."""


class Lane(Struct, frozen=True):
    """The NIC of one GPU as `device:port`; `far`: it hangs on another NUMA node."""

    gpu: int
    nic: str
    far: bool


class NetworkMap(Struct, frozen=True):
    """Hosts whose GPUs have the same NICs, and the RDMA devices that no GPU uses, by the reason."""

    hosts: tuple[str, ...]
    lanes: tuple[Lane, ...]
    left: tuple[tuple[str, tuple[str, ...]], ...] = ()


class HostKind(Struct, frozen=True):
    """Hosts that are alike in everything that is shown of a host. `state` is one of HOST_STATES and `why` says what is
    behind it; the others are texts for people, "" where a host did not answer."""

    hosts: tuple[str, ...]
    role: str
    state: str
    why: str
    gpus: str = ""
    driver: str = ""
    nics: str = ""
    system: str = ""
    slurm: str = ""
    hook: str = ""


class Offered(Struct, frozen=True):
    """One stack that the prefix offers: its module, whether plain `module load deepep` means it, its entries of the
    store without their hashes, and what it was built and set up for."""

    stack: str
    module: str
    default: bool
    parts: tuple[str, ...]
    python: str
    cuda: str
    archs: tuple[str, ...]
    profile: str


class Past(Struct, frozen=True):
    """One generation: who made it and when, its modules, and what of it the store lacks. `bytes` are those that no
    other generation needs."""

    number: int
    current: bool
    readable: bool
    created: str
    by: str
    lock: str
    modules: tuple[str, ...]
    hosts: str
    bytes: int
    missing: tuple[str, ...]


class Unfinished(Struct, frozen=True):
    """Hosts that wait for the same thing."""

    hosts: tuple[str, ...]
    what: str


class Looked(Struct, frozen=True):
    """What a command saw of a cluster. `waiting` and `drained` say by host what works only after a reboot, and why a
    node is kept drained; `link` is the link layer that the GPUs' traffic takes, "" for none; `runs` are reports of the
    last run of each kind and stack, newest first; `problems` is what could not be looked at."""

    survey: Survey
    findings: Sequence[Finding]
    holdings: Holdings
    waiting: Mapping[str, str] = field(default_factory=dict)
    drained: Mapping[str, str] = field(default_factory=dict)
    link: str = ""
    profile: str = ""
    runs: Sequence[Report] = ()
    problems: Sequence[Problem] = ()


class ClusterReport(Struct, frozen=True):
    """Everything that is shown of a cluster. `state` is passed, below or failed; `why` says it in one sentence."""

    prefix: str
    profile: str
    hosts: tuple[str, ...]
    answered: int
    state: str
    why: str
    kinds: tuple[HostKind, ...]
    maps: tuple[NetworkMap, ...]
    waiting: tuple[Unfinished, ...]
    drained: tuple[Unfinished, ...]
    findings: tuple[Finding, ...]
    stacks: tuple[Offered, ...]
    generations: tuple[Past, ...]
    runs: tuple[Report, ...]
    problems: tuple[str, ...]

    @property
    def current(self) -> Past | None:
        """The generation that users load; None before the first one."""
        return next((each for each in self.generations if each.current), None)


def compose_cluster(looked: Looked) -> ClusterReport:
    """Return the report of a cluster out of what a command saw of it, without anybody's passwords, tokens and keys:
    reports are handed around."""
    survey, holdings = looked.survey, looked.holdings
    findings = tuple(
        replace(each, found=scrub(each.found), wanted=scrub(each.wanted), fix=scrub(each.fix))
        for each in looked.findings
    )
    looked = replace(looked, findings=findings, drained={name: scrub(why) for name, why in looked.drained.items()})
    return ClusterReport(
        prefix=survey.prefix,
        profile=looked.profile,
        hosts=tuple(host.name for host in survey.inventory.hosts),
        answered=len(survey.facts),
        state=state_of(looked),
        why="; ".join(reasons(looked)) or "no finding, no host waits, no test failed",
        kinds=kinds(looked),
        maps=maps(survey, looked.link),
        waiting=unfinished(looked.waiting),
        drained=unfinished(looked.drained),
        findings=findings,
        stacks=offered(holdings.get(holdings.current)),
        generations=tuple(past(holdings, generation) for generation in reversed(holdings.generations)),
        runs=tuple(looked.runs),
        problems=tuple(scrub(str(problem)) for problem in looked.problems),
    )


def state_of(looked: Looked) -> str:
    """Return how a cluster is: notes and runs that have not ended count for nothing."""
    worst = {finding.severity for finding in looked.findings}
    if BLOCKING in worst or len(looked.survey.facts) < len(looked.survey.inventory.hosts):
        return FAILED
    below = WARNING in worst or looked.waiting or looked.drained or looked.problems
    return SLOW if below or any(run.verdict in BAD_RUNS for run in looked.runs) else PASSED


def reasons(looked: Looked) -> Iterator[str]:
    """Yield why a cluster is as it is, the worst first."""
    facts, hosts = looked.survey.facts, looked.survey.inventory.hosts
    if silent := [host.name for host in hosts if host.name not in facts]:
        yield f"no answer from {fold(silent)}"
    counts = {severity: sum(each.severity == severity for each in looked.findings) for severity in SEVERITIES}
    told = [
        f"{count} {severity}{'s' if count > 1 and severity != BLOCKING else ''}"
        for severity, count in counts.items()
        if count
    ]
    if told:
        yield f"the doctor has {', '.join(told)}"
    if looked.waiting:
        yield f"{fold(looked.waiting)} waits for a reboot"
    if looked.drained:
        yield f"{fold(looked.drained)} is kept drained"
    for verdict, word in BAD_RUNS.items():
        for run in looked.runs:
            if run.verdict is verdict:
                yield f"the last {run.run.kind} test of {stack_of(run)} {word}"


def stack_of(run: Report) -> str:
    """Return the stack that a run tested."""
    return run.run.values.get("stack", "") or "an unknown stack"


def kinds(looked: Looked) -> tuple[HostKind, ...]:
    """Return the hosts, those that are alike together, the worst first."""
    groups: dict[HostKind, list[str]] = {}
    by_host: dict[str, list[Finding]] = {}
    for finding in looked.findings:
        for name in finding.hosts:
            by_host.setdefault(name, []).append(finding)
    for host in looked.survey.inventory.hosts:
        state, why = condition(host.name, looked, by_host.get(host.name, ()))
        kind = HostKind((), host.role, state, why)
        if (facts := looked.survey.facts.get(host.name)) is not None:
            kind = replace(kind, **described(facts, looked.survey.prefix))
        groups.setdefault(kind, []).append(host.name)
    found = (replace(kind, hosts=tuple(names)) for kind, names in groups.items())
    return tuple(sorted(found, key=lambda kind: list(HOST_STATES).index(kind.state)))


def condition(name: str, looked: Looked, mine: Sequence[Finding]) -> tuple[str, str]:
    """Return the state of a host, and what is behind it; `mine` are the findings that name it."""
    checks = {
        severity: tuple(dict.fromkeys(each.check for each in mine if each.severity == severity))
        for severity in (BLOCKING, WARNING)
    }
    told = {
        SILENT: "" if name in looked.survey.facts else "see what could not be looked at",
        BLOCKED: ", ".join(checks[BLOCKING]),
        DRAINED: looked.drained.get(name, ""),
        WAITING: looked.waiting.get(name, ""),
        WARNED: ", ".join(checks[WARNING]),
    }
    behind = {state: why for state, why in told.items() if why}
    state = next(iter(behind), READY)
    return state, "; ".join(why if each == state else f"{HOST_STATES[each]}: {why}" for each, why in behind.items())


def described(facts: Facts, prefix: str) -> dict[str, str]:
    """Return what is shown of a host that answered."""
    names = {gpu.name for gpu in facts.gpus}
    return {
        "gpus": f"{len(facts.gpus)} × {', '.join(sorted(names))}" if facts.gpus else "",
        "driver": driver_line(facts) if facts.gpus or facts.prepared.nvidia_version else "",
        "nics": rdma_line(facts) if facts.rdma else "",
        "system": f"{facts.os_name}, kernel {facts.kernel}",
        "slurm": slurm_line(facts) if facts.slurm.works else "none",
        "hook": hook_of(facts, prefix),
    }


def hook_of(facts: Facts, prefix: str) -> str:
    """Return what a login shell of a host finds of the prefix's modules."""
    if facts.modules.kind == "none":
        return "no module system"
    hook = facts.modules.hook
    return "this prefix" if hook == f"{prefix}/modulefiles" else f"another: {hook}" if hook else "not set up"


def maps(survey: Survey, link: str) -> tuple[NetworkMap, ...]:
    """Return the NIC of each GPU as the hardware has it now, hosts of one map together. A map of what is offered may
    be older; the doctor says so."""
    groups: dict[NetworkMap, list[str]] = {}
    for host in survey.reached:
        facts = survey.facts[host.name]
        if link and facts.gpus and facts.rdma:
            groups.setdefault(network_map(facts, link), []).append(host.name)
    return tuple(replace(each, hosts=tuple(names)) for each, names in groups.items())


def network_map(facts: Facts, link: str) -> NetworkMap:
    """Return the map of one host."""
    ports = nics.sort_out(facts, link)
    assigned = nics.assign_nics(facts.gpus, ports.used)
    numa = {gpu.index: gpu.numa for gpu in facts.gpus}
    lanes = tuple(
        Lane(index, str(nic), -1 not in {nic.numa, numa[index]} and nic.numa != numa[index])
        for index, nic in sorted(assigned.items())
    )
    return NetworkMap((), lanes, tuple((why, tuple(names)) for why, names in ports.left.items()))


def unfinished(by_host: Mapping[str, str]) -> tuple[Unfinished, ...]:
    """Return hosts by what they wait for."""
    groups: dict[str, list[str]] = {}
    for name, what in by_host.items():
        groups.setdefault(what, []).append(name)
    return tuple(Unfinished(tuple(names), what) for what, names in groups.items())


def offered(generation: Generation | None) -> tuple[Offered, ...]:
    """Return the stacks of a generation, the default one first."""
    found = [
        Offered(
            stack=name,
            module=text(record, "module"),
            default=generation is not None and name == generation.default_stack,
            parts=tuple(
                entry_title(text(record, kind))
                for kind in ("deepep", "nvshmem", "gdrcopy", "own_nccl", "toolkit")
                if record.get(kind)
            ),
            python=text(record, "external_python") or text(record, "python_version"),
            cuda=text(record, "cuda_home") or entry_title(text(record, "toolkit")),
            archs=words(record, "archs"),
            profile=text(record, "profile"),
        )
        for name, record in (generation.stacks if generation else {}).items()
    ]
    return tuple(sorted(found, key=lambda each: (not each.default, each.stack)))


def text(record: Mapping[str, Any], key: str) -> str:
    """Return a text of a manifest, which need not have it."""
    return str(record.get(key, ""))


def words(record: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return a list of texts of a manifest, which need not have it."""
    found = record.get(key)
    return tuple(map(str, found)) if isinstance(found, list | tuple) else ()


def entry_title(name: str) -> str:
    """Return the name of a store entry without its hash."""
    return name.partition("-")[2] or name


DIGEST_SHOWN = 7
"""Letters of a lock's digest, as `generations` shows them."""


def past(holdings: Holdings, generation: Generation) -> Past:
    """Return one generation as it is shown."""
    manifest = generation.manifest
    names = words(manifest, "hosts")
    return Past(
        number=generation.number,
        current=generation.number == holdings.current,
        readable=generation.readable,
        created=text(manifest, "created"),
        by=text(manifest, "by"),
        lock=text(manifest, "lock_digest")[:DIGEST_SHOWN],
        modules=tuple(text(record, "module") for record in generation.stacks.values()),
        hosts=fold(names) if names else "",
        bytes=holdings.own_bytes(generation),
        missing=holdings.missing(generation),
    )


def as_json(report: ClusterReport) -> dict[str, Any]:
    """Return the same content as the keys that docs/json.md promises."""
    return {
        "prefix": report.prefix,
        "profile": report.profile,
        "hosts": list(report.hosts),
        "state": report.state,
        "why": report.why,
        "kinds": msgspec.to_builtins(report.kinds),
        "maps": [
            {
                "hosts": list(each.hosts),
                "nics": {str(lane.gpu): lane.nic for lane in each.lanes},
                "unused": {why: list(names) for why, names in each.left},
            }
            for each in report.maps
        ],
        "waiting": msgspec.to_builtins(report.waiting),
        "drained": msgspec.to_builtins(report.drained),
        "findings": [finding_json(finding) for finding in report.findings],
        "stacks": msgspec.to_builtins(report.stacks),
        "generations": msgspec.to_builtins(report.generations),
        "runs": [run_json(run) for run in report.runs],
        "unseen": list(report.problems),
    }


def run_json(report: Report) -> dict[str, Any]:
    """Return one run as a JSON value; `invoke report RUN --json` has all of it."""
    run = report.run
    return {
        "name": run.name,
        "kind": run.kind,
        "stack": run.values.get("stack", ""),
        "nodes": list(run.nodes),
        "started": report.started,
        "verdict": report.verdict.value,
        "why": report.why,
        "earlier": {"runs": len(report.past), "failed": sum(each.failed for each in report.past)},
    }
