"""Which node of Slurm a host is: by the Slurm host's answer, never by the host's own.

A host that names another one's node would have that one drained and rebooted in its place. So the record of
a node (name, state, jobs, reason) comes from the Slurm host, and is a host's where NodeHostName or NodeAddr
say so: by the name that the hosts file gives it, or by an address that both have for the Slurm host. What a
host says of itself only tells which record to ask for, and is held against the answer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from msgspec import Struct
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.inventory.hostsfile import Inventory
from deepep_bootstrap.inventory.survey import Survey
from deepep_bootstrap.remote.host import LOCAL, THIS_MACHINE, Host
from deepep_bootstrap.remote.jobs import Job, Transport
from deepep_bootstrap.slurm import commands
from deepep_bootstrap.slurm.commands import SlurmNode
from deepep_bootstrap.slurm.nodes import ACTIVE_JOBS, KNOWN, parse_jobs

ASK_LIMIT = 110.0
"""Seconds for one script on the Slurm host: clients of 20 s each, and names to resolve."""

RECORDS = f"""
known() {{
{KNOWN}
}}
echo @nodes; (known "$1") || exit
names=$( (known "$1") | sed -n 's/^NodeName=\\([^ ]*\\) .*/\\1/p' | paste -sd, -)
echo @jobs; [ -z "$names" ] || timeout 20 squeue -h -w "$names" --states={ACTIVE_JOBS} -o '%A|%N' || exit
echo @end
"""
"""A script for the Slurm host; its argument is a folded list of names, of which it prints the nodes that
Slurm knows, and their jobs."""

ADDRESSES = """
for name in "$@"; do
    timeout 5 getent ahosts -- "$name" | while read -r address _; do echo "$name|$address"; done
done
echo @end
"""
"""A script for the Slurm host: the addresses that it has for names."""

LOOPBACK = re.compile(r"127\..*|::1|fe80:.*")
"""Addresses that every host has."""


class NodeRecords(Struct, frozen=True):
    """What the Slurm host says: nodes by name, the jobs on each, and the addresses that it has for names."""

    nodes: Mapping[str, SlurmNode]
    jobs: Mapping[str, tuple[str, ...]]
    addresses: Mapping[str, frozenset[str]]


def choose_slurm_host(inventory: Inventory, facts: Mapping[str, Facts], *, control_has_slurm: bool = False) -> str:
    """Return where Slurm is asked and sbatch is run: the host that the hosts file names, this machine where it is a
    client and sees the same prefix, else a host with a working client, login hosts first; "" without Slurm."""
    if name := inventory.settings.slurm_host:
        if name not in facts:
            raise Trouble(Problem(f"{inventory.path}: slurm_host", "this host did not answer", found=name))
        return name
    if control_has_slurm:
        return THIS_MACHINE.name
    working = [name for name, seen in facts.items() if seen.slurm.works and seen.slurm.sbatch]
    logins = {host.name for host in inventory.hosts if host.role == "login"}
    return next((name for name in working if name in logins), working[0] if working else "")


def slurm_hosts(survey: Survey, *, control_has_slurm: bool = False) -> tuple[Host, ...]:
    """Return where Slurm is asked, the chosen host first and login hosts after it; this machine where it is a client
    itself. Trouble as of choose_slurm_host.

    No other node is asked of a node: it may be taken over."""
    first = choose_slurm_host(survey.inventory, survey.facts, control_has_slurm=control_has_slurm)
    own = (THIS_MACHINE,) if first == THIS_MACHINE.name else ()
    clients = [
        host
        for host in survey.reached
        if survey.facts[host.name].slurm.works and (host.name == first or host.role == "login")
    ]
    return (*own, *sorted(clients, key=lambda host: (host.name != first, host.role != "login")))


def with_nodes(transport: Transport, survey: Survey, *, control_has_slurm: bool = False) -> Survey:
    """Return the survey with the Slurm host's word on the node of each host in place of the host's own. A host that
    names another one's node, and hosts that are one node, are left out and are problems; without an answer of the Slurm
    host no host has a node."""
    try:
        name = choose_slurm_host(survey.inventory, survey.facts, control_has_slurm=control_has_slurm)
    except Trouble as trouble:
        return replace(survey, facts=_without_nodes(survey.facts), problems=(*survey.problems, *trouble.problems))
    if not name:
        return replace(survey, facts=_without_nodes(survey.facts))
    via = THIS_MACHINE if name == THIS_MACHINE.name else survey.host(name)
    try:
        records = ask(transport, via, survey)
    except Trouble as trouble:
        return replace(survey, facts=_without_nodes(survey.facts), problems=(*survey.problems, *trouble.problems))
    owned = owners(survey.reached, records)
    refused = dict(refusals(survey, records, owned, name))
    facts = {host: _as_slurm_says(seen, records, owned.get(host, ())) for host, seen in survey.facts.items()}
    return replace(survey, facts=facts).without(refused, *refused.values())


def ask(transport: Transport, via: Host, survey: Survey) -> NodeRecords:
    """Return what the Slurm host `via` says of the nodes that the hosts of a survey may be. Raises Trouble."""
    names = {name for host in survey.reached for name in names_of(host)}
    names |= {seen.slurm.node for seen in survey.facts.values() if seen.slurm.node}
    records = ask_for_nodes(transport, via, names)
    nodes = records.nodes
    # Names say it nearly everywhere; addresses are looked up where they do not.
    owned = owners(survey.reached, records)
    unowned = [
        host.name
        for host in survey.reached
        if (node := survey.facts[host.name].slurm.node) and node not in owned.get(host.name, ()) and node in nodes
    ]
    if not unowned:
        return records
    claimed = [nodes[survey.facts[host].slurm.node] for host in unowned]
    wanted = sorted({*unowned, *(name for node in claimed for name in (node.host, node.address) if name)})
    found: dict[str, set[str]] = {}
    for line in _run(transport, via, "echo @addresses\n" + ADDRESSES, tuple(wanted)).get("addresses", ()):
        name, _, address = line.partition("|")
        if not LOOPBACK.fullmatch(address):
            found.setdefault(name, set()).add(address)
    return replace(records, addresses={name: frozenset(known) for name, known in found.items()})


def ask_for_nodes(transport: Transport, via: Host, names: Collection[str]) -> NodeRecords:
    """Return the nodes of these names and the jobs on them as the Slurm host `via` says it. Raises Trouble."""
    parts = _run(transport, via, RECORDS, (commands.fold(sorted(names)),))
    nodes = {node.name: node for node in commands.parse_nodes("\n".join(parts.get("nodes", ())))}
    return NodeRecords(nodes, parse_jobs("\n".join(parts.get("jobs", ()))), {})


def _run(transport: Transport, via: Host, script: str, args: tuple[str, ...]) -> dict[str, list[str]]:
    """Return what a script said on the Slurm host, by the words behind @ in front of each part."""
    reply = transport.run(via, Job(script, args=args, timeout=ASK_LIMIT))
    parts: dict[str, list[str]] = {}
    current: list[str] = []
    for line in reply.out.splitlines():
        if re.fullmatch("@[a-z]+", line):
            current = parts.setdefault(line[1:], [])
        else:
            current.append(line)
    if reply.code or "end" not in parts:
        found = reply.last_line[-200:] or f"exit code {reply.code}"
        what = "Slurm does not say which nodes the hosts are, so none is taken for one"
        raise Trouble(Problem(via.name, what, found, try_="scontrol ping there"), may_pass=True)
    return parts


def names_of(host: Host) -> set[str]:
    """Return the names by which this machine knows a host, in small letters: that of the hosts file, which
    ~/.ssh/config may lead elsewhere, and its part before the first dot."""
    own = host.name.lower()
    return set() if host.connection == LOCAL and own == THIS_MACHINE.name else {own, _short(own)}


def _short(name: str) -> str:
    return name if re.fullmatch(r"[0-9.]+|.*:.*", name) else name.partition(".")[0]


def owners(hosts: Sequence[Host], records: NodeRecords) -> dict[str, tuple[str, ...]]:
    """Return, by host, the nodes that are it: by NodeHostName or NodeAddr, as names, or as addresses that the Slurm
    host has for them. Nodes are looked up, and not compared with every host: a thousand of each are a million pairs."""
    nodes = records.nodes.values()
    by_name = _nodes_by((name, node.name) for node in nodes for name in _called(node))
    by_address = _nodes_by((address, node.name) for node in nodes for address in _addresses(node, records))
    place = {name: number for number, name in enumerate(records.nodes)}
    found: dict[str, tuple[str, ...]] = {}
    for host in hosts:
        named = (by_name.get(name, ()) for name in names_of(host))
        addressed = (by_address.get(address, ()) for address in records.addresses.get(host.name, ()))
        found[host.name] = tuple(sorted({*chain(*named, *addressed)}, key=place.__getitem__))
    return found


def _called(node: SlurmNode) -> set[str]:
    """Return the names of a node's host, in small letters, and their parts before the first dot."""
    full = [name.lower() for name in (node.host, node.address) if name]
    return {*full, *map(_short, full)}


def _addresses(node: SlurmNode, records: NodeRecords) -> set[str]:
    return {address for name in (node.host, node.address) for address in records.addresses.get(name, ())}


def _nodes_by(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, node in pairs:
        found.setdefault(key, []).append(node)
    return found


def refusals(
    survey: Survey, records: NodeRecords, owned: Mapping[str, Sequence[str]], via: str
) -> Iterator[tuple[str, Problem]]:
    """Yield the hosts of which nobody can say which node they are, each with its problem."""
    hosts_of: dict[str, list[str]] = {}
    for host, nodes in owned.items():
        for node in nodes:
            hosts_of.setdefault(node, []).append(host)
    for host, seen in survey.facts.items():
        claimed = seen.slurm.node if seen.slurm.works else ""
        mine = owned.get(host, ())
        shared = next(((node, other) for node in mine for other in hosts_of[node] if other != host), None)
        if shared:
            what, remedy = f"is Slurm's node {shared[0]}, and so is {shared[1]}", "one name a host in the hosts file"
            yield host, Problem(host, what, _said(records.nodes[shared[0]]), "one host a node", remedy)
        elif claimed not in mine:
            yield from ((host, problem) for problem in _foreign(host, claimed, mine, records.nodes.get(claimed), via))


def _foreign(host: str, claimed: str, mine: Sequence[str], node: SlurmNode | None, via: str) -> Iterator[Problem]:
    """Yield what is wrong with a host that says it is the node `claimed` ("" for none), and is `mine`."""
    if node:
        what = f"says that it is Slurm's node {claimed}, which is another host as {via} says"
        remedy = f"look at scontrol on {host}; or name the host as Slurm does, with its address in ~/.ssh/config"
        yield Problem(host, what, _said(node), f"NodeHostName or NodeAddr of {host}", remedy)
    elif len(mine) > 1:
        what, wanted = "is several nodes of Slurm", "one of them as its own word"
        yield Problem(host, what, ", ".join(mine), wanted, "invoke facts for this host")


def _said(node: SlurmNode) -> str:
    return f"NodeHostName={node.host} NodeAddr={node.address or '(nothing)'}"


def _without_nodes(facts: Mapping[str, Facts]) -> dict[str, Facts]:
    return {host: _as_slurm_says(seen, NodeRecords({}, {}, {}), ()) for host, seen in facts.items()}


def _as_slurm_says(seen: Facts, records: NodeRecords, mine: Sequence[str]) -> Facts:
    """Return the facts of a host with the record of its node; of several the one that it calls itself."""
    name = seen.slurm.node if seen.slurm.node in mine else next(iter(mine), "")
    node = records.nodes.get(name)
    slurm = replace(
        seen.slurm,
        node=name,
        state=node.state if node else "",
        jobs=records.jobs.get(name, ()),
        gres=node.gres if node else "",
        partitions=node.partitions if node else (),
    )
    prepared = replace(seen.prepared, slurm_reason=node.reason if node else "")
    return replace(seen, slurm=slurm, prepared=prepared)
