"""`invoke doctor`: faults of the hosts, why they matter, and the commands that mend them. Writes nothing
anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepep_bootstrap.bootstrap.planning import look_at_hosts, read_lock
from deepep_bootstrap.cli.examination import Judged, examine_cluster
from deepep_bootstrap.cli.node_view import ClusterFlags, look_at_nodes, look_inside, through_kubernetes
from deepep_bootstrap.core.console import Screen, more
from deepep_bootstrap.core.errors import OK, TROUBLE, Problem, Trouble, worst
from deepep_bootstrap.core.nodeset import fold_short
from deepep_bootstrap.doctor.examine import exit_code, finding_json, ordered
from deepep_bootstrap.doctor.findings import BLOCKING, NOTE, SEVERITIES, WARNING, Finding
from deepep_bootstrap.doctor.nodes import examine_inside, examine_nodes, known_inside
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.hostsfile import USER
from deepep_bootstrap.inventory.survey import read_inventory, read_tree
from deepep_bootstrap.kube.node_facts import ClusterFacts
from deepep_bootstrap.kubernetes.debug_pods import NodesSeen
from deepep_bootstrap.slurm.fanout import open_ways

STYLES = {BLOCKING: "red", WARNING: "yellow", NOTE: "dim"}


def doctor(
    flags: Flags,
    *,
    as_: str = "",
    strict: bool = False,
    kubeconfig: str = "",
    context: str = "",
    namespace: str = "",
    debug_pods: str = "",
) -> int:
    """Say what is wrong with the hosts, why it matters and what to do; change nothing.

    Findings are printed with the worst first; exit 4 when something blocks (with `strict` also when something warns),
    1 when hosts did not answer or the user `as_` could not look there, else 0. `as_` is whose view is taken ("" for
    the connection's own user).

    Without --stack the hosts are judged by each stack that the prefix offers, by the lock's default one where nothing
    is offered. With --via=kubernetes the GPU nodes of a cluster are judged by what its API tells of them, and
    with debug pods by their own facts too."""
    screen = Screen("doctor", as_json=flags.json)
    asked = ClusterFlags(kubeconfig, context, namespace, debug_pods)
    if through_kubernetes(flags, asked):
        nodes = look_at_nodes(flags, asked)
        return doctor_nodes(screen, flags, nodes, look_inside(flags, asked, nodes), strict=strict)
    user = as_
    if user and not USER.fullmatch(user):
        wanted = "a user of the hosts, e.g. --as=alice"
        raise Trouble(Problem("--as", "not the name of a user", found=user, wanted=wanted))
    lock, _ = read_lock(flags)
    inventory, prefix = read_inventory(flags)
    with open_ways(flags, inventory) as transport:
        survey = look_at_hosts(flags, transport, inventory, prefix)
        found = examine_cluster(flags, transport, survey, lock, user)
    show(screen, found.judged, found.findings)
    screen.problems(found.problems)
    code = worst([exit_code(found.findings, strict=strict), TROUBLE if found.problems else OK])
    names = [one.request.stack.name for one in found.judged]
    by = {"stack": names[0], "stacks": names, "profile": found.judged[0].case.profile}
    users = {name: view.user for name, view in found.looks.items()}
    findings = [finding_json(finding) for finding in found.findings]
    screen.document(code, found.problems, **by, users=users, findings=findings)
    return code


def doctor_nodes(screen: Screen, flags: Flags, found: ClusterFacts, inside: NodesSeen, *, strict: bool) -> int:
    """Print what is wrong with the nodes of a cluster, and return the exit code."""
    _, stack = read_lock(flags)
    findings = examine_nodes(known_inside(found, inside.facts), stack.cuda)
    texts = read_tree(flags.root / "env")
    findings = ordered([*findings, *examine_inside(inside.facts, stack, texts)], [node.name for node in found.nodes])
    names = fold_short(node.name for node in found.nodes)
    screen.say(f"{names} of {found.context}: stack {stack.name}", style="bold")
    show_findings(screen, findings, ())
    screen.problems(inside.problems)
    code = worst([exit_code(findings, strict=strict), TROUBLE if inside.problems else OK])
    by = {"stack": stack.name, "stacks": [stack.name], "profile": "", "users": {}, "context": found.context}
    screen.document(code, inside.problems, **by, findings=[finding_json(finding) for finding in findings])
    return code


MOST_TOLD = 3
"""Findings of one kind that are told in full, and of more of them those that are named in one line."""

LONGEST = 300
"""Characters of what was found: of hosts that all differ there is no end."""


def alike(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Return the findings in their order, those of a kind that has more than MOST_TOLD together."""
    kinds: dict[tuple[str, str, str, tuple[str, ...]], list[Finding]] = {}
    for each in findings:
        kinds.setdefault((each.severity, each.check, each.why, each.stacks), []).append(each)
    many = {id(same[0]): same for same in kinds.values() if len(same) > MOST_TOLD}
    rest = {id(each) for same in many.values() for each in same[1:]}
    return [many.get(id(each), [each]) for each in findings if id(each) not in rest]


def also(findings: Sequence[Finding]) -> str:
    """Return what is said of further findings of a kind: what the first of them found, and how many hosts more."""
    told = [f"{shown(each.found)} on {fold_short(each.hosts)}" for each in findings[:MOST_TOLD]]
    rest = dict.fromkeys(name for each in findings[MOST_TOLD:] for name in each.hosts)
    return "; ".join([*told, *([f"… {more(len(rest))}"] if rest else [])])


def shown(text: str) -> str:
    """Return a text as far as a screen has room for it."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST].rpartition(' ')[0]} … (--json has all of it)"


def show(screen: Screen, judged: Sequence[Judged], findings: Sequence[Finding]) -> None:
    """Print the findings, three lines each, and their numbers. A finding names its stacks where the hosts are judged
    by others too. Of many that differ in what was found alone the first is told, and of the others a few in a line."""
    names = [one.request.stack.name for one in judged]
    first = judged[0]
    stacks = f"stack {names[0]}" if len(names) < 2 else f"stacks {', '.join(names)} as offered"
    screen.say(f"{fold_short(first.survey.facts)}: {stacks}, profile {first.case.profile}", style="bold")
    show_findings(screen, findings, names)


def show_findings(screen: Screen, findings: Sequence[Finding], names: Sequence[str]) -> None:
    """Print findings of hosts that are judged by the stacks `names`, and their numbers."""
    for finding, *others in alike(findings):
        whose = "" if set(finding.stacks) >= set(names) else f" (stack {', '.join(finding.stacks)})"
        headline = f"{finding.severity}: {finding.check} on {fold_short(finding.hosts)}{whose}"
        screen.say(f"\n{headline}", style=STYLES[finding.severity])
        screen.say(f"    found {shown(finding.found)}, wanted {shown(finding.wanted)}")
        screen.say(f"    {finding.why}")
        if finding.fix:
            screen.say(f"    Try: {finding.fix}")
        if others:
            screen.say(f"    Also {also(others)}")
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in SEVERITIES}
    sums = ", ".join(
        f"{count} {severity}{'s' if count > 1 and severity != BLOCKING else ''}"
        for severity, count in counts.items()
        if count
    )
    screen.say(f"\n{sums}" if sums else "\nNothing to say: these hosts are as they should be.")
