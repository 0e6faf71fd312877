"""`invoke facts`: the hosts as they are, equal ones once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deepep_bootstrap.cli.node_view import KUBERNETES, ClusterFlags, look_at_nodes, look_inside, through_kubernetes
from deepep_bootstrap.core.console import MOST_ALIKE, Screen, more
from deepep_bootstrap.core.errors import OK, TROUBLE
from deepep_bootstrap.core.nodeset import fold_short
from deepep_bootstrap.inventory.facts import Facts, by_label, facts_json, lines
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.survey import gather, read_inventory
from deepep_bootstrap.kube import node_facts
from deepep_bootstrap.kube.node_facts import ClusterFacts
from deepep_bootstrap.kubernetes.debug_pods import NodesSeen
from deepep_bootstrap.slurm.fanout import open_ways


def facts(flags: Flags, *, kubeconfig: str = "", context: str = "", namespace: str = "", debug_pods: str = "") -> int:
    """Look at the hosts and say what they are.

    Equal hosts are told once; exit 1 when some did not answer. Facts judge nothing, so no stack matters here. With
    --via=kubernetes it is the GPU nodes of a cluster, as its API tells of them, and with debug pods as they are."""
    screen = Screen("facts", as_json=flags.json)
    asked = ClusterFlags(kubeconfig, context, namespace, debug_pods)
    if through_kubernetes(flags, asked):
        found = look_at_nodes(flags, asked)
        return show_nodes(screen, flags, found, look_inside(flags, asked, found))
    inventory, prefix = read_inventory(flags, apart=True)
    with open_ways(flags, inventory) as transport:
        survey = gather(flags, transport, inventory, prefix)
        ways = {name: transport.ways[name] for name in survey.facts}
    screen.say(fold_short(survey.facts), style="bold")
    for line in folded({name: lines(seen) for name, seen in survey.facts.items()}):
        screen.say(line)
    screen.problems(survey.problems)
    code = TROUBLE if survey.problems else OK
    if flags.json:
        screen.document(code, survey.problems, hosts=facts_json(survey.facts), via=ways)
    return code


def show_nodes(screen: Screen, flags: Flags, found: ClusterFacts, inside: NodesSeen) -> int:
    """Print what a cluster says of its nodes, equal ones once, and which operators are there; then what the nodes say
    of themselves. Exit 1 where one was asked and did not answer."""
    screen.say(f"{fold_short(node.name for node in found.nodes)} of {found.context}", style="bold")
    for line in folded(known_outside(found, inside)):
        screen.say(line)
    screen.say(f"  {'there':<8} {', '.join(found.operators) or 'no operator that is known here'}")
    tell_inside(screen, inside)
    screen.problems(inside.problems)
    code = TROUBLE if inside.problems else OK
    if flags.json:
        hosts, ways = facts_json(inside.facts), dict.fromkeys(inside.facts, KUBERNETES)
        more_of_it = {"hosts": hosts, "via": ways} if inside.facts or inside.problems else {}
        screen.document(code, inside.problems, **node_facts.facts_json(found), **more_of_it)
    return code


def tell_inside(screen: Screen, inside: NodesSeen) -> None:
    """Print what nodes say of themselves, equal ones once."""
    if inside.facts:
        screen.say(f"{fold_short(inside.facts)} from inside", style="bold")
        own = {name: [*lines(seen), ("boot", boot_line(seen))] for name, seen in inside.facts.items()}
        for line in folded(own):
            screen.say(line)


def known_outside(found: ClusterFacts, inside: NodesSeen) -> dict[str, list[tuple[str, str]]]:
    """Return the lines of nodes as the API tells of them, without what they themselves say better."""
    better = {"driver", "boot"} if inside.facts else set()
    return {node.name: [pair for pair in node_facts.lines(node) if pair[0] not in better] for node in found.nodes}


def boot_line(seen: Facts) -> str:
    """Return what Secure Boot does on a node."""
    return "Secure Boot is on: only signed kernel modules load" if seen.prepared.secure_boot else "Secure Boot is off"


def folded(lines_of: Mapping[str, Sequence[tuple[str, str]]]) -> list[str]:
    """Return the lines of all hosts by label: a value that all hosts share once, others each with the hosts that
    have it; of many values those that most hosts have."""
    text = []
    for label, hosts_by_value in by_label(lines_of).items():
        ranked = sorted(hosts_by_value.items(), key=lambda pair: -len(pair[1]))
        told = ranked[:MOST_ALIKE] if len(ranked) > MOST_ALIKE else list(hosts_by_value.items())
        for number, (value, names) in enumerate(told):
            whose = "" if len(hosts_by_value) == 1 else f"  [{fold_short(names)}]"
            text.append(f"  {'' if number else label:<8} {value}{whose}")
        if rest := sum(len(names) for _, names in ranked[len(told) :]):
            text.append(f"  {'':<8} … {more(rest)}")
    return text
