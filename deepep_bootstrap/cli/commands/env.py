"""`invoke env`: the network settings that a user of the module gets, and why."""

from __future__ import annotations

from msgspec import to_builtins

from deepep_bootstrap.bootstrap.planning import read_lock
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import OK, TROUBLE, Problem, Trouble
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.inventory.explain import Explanation, HostMap, Setting, explain
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.survey import gather, open_connections, read_inventory, read_tree
from deepep_bootstrap.plan.decisions import PlanRequest, PreviousOffer, choose_network, hosts_to_build_for

HEAD = ("GPU", "PCI address", "NIC", "Gb/s", "joined by")


def env(flags: Flags) -> int:
    """Show the network settings and the map from GPU to NIC that a stack's users would get from the hosts as they are
    now, each value with its reason; change nothing.

    Values that differ between hosts stand with the hosts that have them. Exit 1 when some hosts did not answer."""
    screen = Screen("env", as_json=flags.json)
    lock, stack = read_lock(flags)
    inventory, prefix = read_inventory(flags)
    with open_connections(flags, inventory) as connections:
        survey = gather(flags, connections, inventory, prefix)
    facts = hosts_to_build_for(inventory, survey.facts)
    if not facts:
        raise Trouble(
            Problem(inventory.path, "no GPU host answered", fold(survey.facts), "at least one host with role=gpu"),
            *survey.problems,
        )
    texts = read_tree(flags.root / "env")
    request = PlanRequest(lock, stack, inventory, prefix, recipes={}, templates=texts)
    derived = choose_network(request, facts, PreviousOffer())
    found = explain(derived, facts, texts)
    show(screen, stack.name, fold(facts), found)
    screen.problems(survey.problems)
    code = TROUBLE if survey.problems else OK
    screen.document(code, survey.problems, stack=stack.name, **to_builtins(found))
    return code


def show(screen: Screen, stack: str, hosts: str, found: Explanation) -> None:
    """Show settings, maps and notes."""
    screen.say(f"stack {stack} on {hosts}", style="bold")
    screen.paragraph(f"profile {found.profile}: {found.why}")
    if found.gib:
        screen.paragraph(f"NCCL's own variables: read from {found.gib} when the module is loaded")
    for setting in found.settings:
        _show_setting(screen, setting)
    for name, reason in found.left_out.items():
        screen.paragraph(f"{name} is left out: {reason}")
    for each in found.maps:
        screen.say()
        _show_map(screen, each)
    for note in found.notes:
        screen.paragraph(f"note: {note}")


def _show_setting(screen: Screen, each: Setting) -> None:
    """Show one variable as a line that can be copied, and its reason below it."""
    whose = ", ".join(word for word in (each.hosts, f"{each.kind} test" if each.kind else "") if word)
    screen.say(f"{each.name}={each.value}" + (f"  [{whose}]" if whose else ""))
    screen.say(f"    {each.reason}", style="dim")


def _show_map(screen: Screen, each: HostMap) -> None:
    if not each.rows:
        screen.paragraph(f"{each.hosts}: no map from GPU to NIC: {each.reason}")
        return
    screen.say(each.hosts, style="bold")
    rows = [HEAD, *((str(row.gpu), row.pci, row.nic, f"{row.rate:g}", row.way) for row in each.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD) - 1)]
    for *numbers, way in rows:
        cells = (text.rjust(width) for text, width in zip(numbers, widths, strict=True))
        screen.say(f"{'  '.join(cells)}  {way}")
