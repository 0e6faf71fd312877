"""`invoke facts`: the hosts as they are, equal ones once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deepep_bootstrap.cli.node_view import look_at_nodes, through_kubernetes
from deepep_bootstrap.core.console import MOST_ALIKE, Screen, more
from deepep_bootstrap.core.errors import OK, TROUBLE
from deepep_bootstrap.core.nodeset import fold_short
from deepep_bootstrap.inventory.facts import by_label, facts_json, lines
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.survey import gather, read_inventory
from deepep_bootstrap.kube import node_facts
from deepep_bootstrap.kube.node_facts import ClusterFacts
from deepep_bootstrap.slurm.fanout import open_ways


def facts(flags: Flags, *, kubeconfig: str = "", context: str = "") -> int:
    """Look at the hosts and say what they are.

    Equal hosts are told once; exit 1 when some did not answer. Facts judge nothing, so no stack matters here. With
    --via=kubernetes it is the GPU nodes of a cluster, as its API tells of them."""
    screen = Screen("facts", as_json=flags.json)
    if through_kubernetes(flags, kubeconfig, context):
        return show_nodes(screen, flags, look_at_nodes(flags, kubeconfig, context))
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


def show_nodes(screen: Screen, flags: Flags, found: ClusterFacts) -> int:
    """Print what a cluster says of its nodes, equal ones once, and which operators are there."""
    screen.say(f"{fold_short(node.name for node in found.nodes)} of {found.context}", style="bold")
    for line in folded({node.name: node_facts.lines(node) for node in found.nodes}):
        screen.say(line)
    screen.say(f"  {'there':<8} {', '.join(found.operators) or 'no operator that is known here'}")
    if flags.json:
        screen.document(OK, (), **node_facts.facts_json(found))
    return OK


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
