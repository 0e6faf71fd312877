"""`invoke status`: installed stacks, hosts that are not finished, nodes drained by us, and the last tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from msgspec import to_builtins

from deepep_bootstrap.bootstrap.orphans import OrphanRequest, Orphans, by_hand, find_orphans, remedy
from deepep_bootstrap.bootstrap.planning import asks_slurm_of, cluster_of, look_at_hosts
from deepep_bootstrap.bootstrap.reboot.drained import drained_and_silent, drained_by_us, waiting_for_reboot
from deepep_bootstrap.cli.lock_view import Lead, find_leads
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import OK, TROUBLE, Problem, Trouble
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.text import shortened
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.survey import Survey, open_connections, read_inventory, read_tree
from deepep_bootstrap.kube.client import Cluster
from deepep_bootstrap.kube.nodes import look
from deepep_bootstrap.lock.model import read_lock_file
from deepep_bootstrap.prefix.contents import Holdings
from deepep_bootstrap.prefix.defects import current_defects, look_at_offers
from deepep_bootstrap.prefix.offer import find_offer, prefix_host
from deepep_bootstrap.report import load

TEST_STYLES = {"failed": "red", "below reference": "yellow", "stopped": "yellow"}
MISSING, NOT_NEEDED = "missing", "not needed, no module system"


def status(flags: Flags, *, kubeconfig: str = "", context: str = "") -> int:
    """Say what is installed and whether the lock is ahead of it, where MODULEPATH of the hosts leads, which wait for a
    reboot or are drained by us, what builds left that are gone, and the last test of each kind and stack. Where a
    cluster of Kubernetes is named, its nodes that we left cordoned too, whether or not their hosts are among these.

    Of the current generation its stacks, modules and their known defects are told, which change no exit code."""
    screen = Screen("status", as_json=flags.json)
    inventory, prefix = read_inventory(flags)
    cluster = cluster_of(inventory, kubeconfig, context)
    with open_connections(flags, inventory) as transport:
        survey = look_at_hosts(flags, transport, inventory, prefix)
        silent = drained_and_silent(transport, survey, asks_slurm_of(survey))
        recipes, user = read_tree(flags.root / "recipes"), inventory.settings.build_user
        holdings, unread = look_at_offers(flags, transport, survey)
        defects = current_defects(flags, holdings) if holdings else ()
        orphans = find_orphans(transport, OrphanRequest(prefix, recipes, user), survey.reached)
        tests = load.newest(transport, survey.reached, survey.facts, recipes=recipes, user=user)
    cordoned, unasked = cordoned_by_us(cluster)
    manifest, unbelieved = offered_manifest(survey)
    leads, unlocked = find_leads_of(flags, survey) if manifest else ((), ())
    hooks, waiting, drained = hooks_of(survey), waiting_for_reboot(survey), drained_by_us(survey) | silent
    screen.say(f"prefix {prefix} on {fold(survey.facts)}", style="bold")
    tell_offer(screen, manifest)
    tell_rollback(screen, holdings)
    for defect in defects:
        screen.say(f"  blocking: {shortened(str(defect))}", style="red")
    blind = [name for name, facts in survey.facts.items() if manifest and not facts.prefix.manifest]
    if blind:
        screen.say(f"  not to be seen on {fold(blind)}: is the prefix mounted there?", style="yellow")
    for lead in leads:
        screen.say(f"  {lead.line}", style="yellow")
    tell_hosts(screen, prefix, hooks, waiting, drained)
    tell_cordoned(screen, cordoned)
    tell_orphans(screen, orphans, remedy(flags))
    for test in tests:
        screen.say(f"  {test.line}", style=TEST_STYLES.get(test.verdict, ""))
    problems = (*survey.problems, *unread, *unbelieved, *unlocked, *unasked)
    screen.problems(problems)
    code = TROUBLE if problems else OK
    screen.document(
        code,
        problems,
        prefix=prefix,
        manifest=manifest,
        rolled_back=[to_builtins(holdings.rolled_back)] if holdings and holdings.rolled_back else [],
        hooks=hooks,
        waiting=waiting,
        drained=drained,
        cordoned=cordoned,
        orphans=[to_builtins(orphan) for orphan in orphans.found],
        tests=[to_builtins(test) for test in tests],
        defects=[to_builtins(defect) for defect in defects],
        behind=[to_builtins(lead) for lead in leads],
    )
    return code


def find_leads_of(flags: Flags, survey: Survey) -> tuple[tuple[Lead, ...], tuple[Problem, ...]]:
    """Return by what the lock is ahead of what is offered, and why it cannot be read."""
    try:
        offer = find_offer(survey)
        lock = read_lock_file(flags.lock or flags.root / "deepep.lock.toml")
        return find_leads(lock, offer.stacks.values() if offer else ()), ()
    except Trouble as trouble:
        return (), trouble.problems


def tell_offer(screen: Screen, manifest: Mapping[str, Any] | None) -> None:
    """Print the newest generation and its modules."""
    if manifest is None:
        screen.say("  nothing is offered yet: `invoke bootstrap` builds and offers")
        return
    screen.say(f"  generation {manifest['generation']}, made {manifest['created']} by {manifest['by']}")
    for key, record in manifest["offer"]["stacks"].items():
        is_default = key == manifest["offer"]["default_stack"]
        machine = f" for {record['machine']}" if record.get("machine") else ""
        cuda = record["cuda_home"] or shortened(record.get("toolkit", ""))
        screen.say(
            f"  module {record['module']}{machine}: CUDA in {cuda or 'no place'}, GPUs of compute "
            f"{', '.join(record['archs'])}, profile {record['profile']}"
            f"{' (what `module load deepep` gives)' if is_default else ''}"
        )


def tell_rollback(screen: Screen, holdings: Holdings | None) -> None:
    """Print that a newer generation is not the current one, and who went back to this one."""
    if not holdings or not holdings.current or holdings.current == holdings.numbers[-1]:
        return
    last = holdings.rolled_back
    who = f" (rolled back {last.at} by {shortened(last.by)})" if last else ""
    newest = holdings.numbers[-1]
    screen.say(f"  generation {holdings.current} is current; {newest} is newer{who}", style="yellow")


def hook_words(hook: str, prefix: str) -> tuple[str, str]:
    """Return what a host's MODULEPATH hook is to this prefix, and the style it is shown in."""
    if hook == MISSING:
        return "is not set up", "red"
    if hook == NOT_NEEDED:
        return hook, ""
    other = hook.removesuffix("/modulefiles")
    return (f"leads to {other}", "") if other == prefix else (f"leads to {other}, not to this prefix", "bold red")


def tell_hosts(
    screen: Screen, prefix: str, hooks: Mapping[str, list[str]], waiting: Mapping[str, str], drained: Mapping[str, str]
) -> None:
    """Print where MODULEPATH of the hosts leads, which wait for a reboot, and which this program keeps drained."""
    for hook, names in hooks.items():
        what, style = hook_words(hook, prefix)
        screen.say(f"  MODULEPATH {what}: {fold(names)}", style=style)
    for what, names in by_value(waiting).items():
        screen.say(f"  waits for a reboot ({what}): {fold(names)}", style="yellow")
    for reason, names in by_value(drained).items():
        screen.say(f"  drained by us, resumed by the next successful run: {fold(names)} ({reason})", style="yellow")


def cordoned_by_us(cluster: Cluster | None) -> tuple[dict[str, str], tuple[Problem, ...]]:
    """Return, by node of Kubernetes, the reason with which this program cordoned it and has not given it back yet, and
    why the cluster could not be asked. Nothing without a cluster."""
    if cluster is None:
        return {}, ()
    try:
        return dict(look(cluster, {}).cordoned), ()
    except Trouble as trouble:
        return {}, trouble.problems
    finally:
        cluster.close()


def tell_cordoned(screen: Screen, cordoned: Mapping[str, str]) -> None:
    """Print the nodes of Kubernetes that this program keeps cordoned."""
    for reason, names in by_value(cordoned).items():
        line = f"cordoned by us in Kubernetes, given back by the next successful run: {fold(names)} ({reason})"
        screen.say(f"  {line}", style="yellow")


def tell_orphans(screen: Screen, orphans: Orphans, command: str) -> None:
    """Print what builds left that are gone, and the command that takes it away."""
    for orphan in orphans.found:
        if orphan.dead:
            screen.say(f"  left by a build that is gone, on {orphan.host}: {orphan}", style="yellow")
        else:
            screen.say(f"  of a build that nobody asked knows: {orphan}. Try: {by_hand(orphan)}", style="yellow")
    if orphans.dead:
        screen.say(f"  Try: {command}", style="yellow")
    for problem in orphans.unasked:
        screen.say(f"  {problem}", style="yellow")


def offered_manifest(survey: Survey) -> tuple[dict[str, Any] | None, tuple[Problem, ...]]:
    """Return the manifest of what is offered as the prefix's host sees it, or None, and why it cannot be believed."""
    try:
        find_offer(survey)
        host = prefix_host(survey.inventory, survey.facts)
        text = survey.facts[host].prefix.manifest
        return _manifest(host, text) if text.strip() else None, ()
    except Trouble as trouble:
        return None, trouble.problems


def _manifest(host: str, text: str) -> dict[str, Any]:
    """Return the manifest that a host sees; Trouble where it has not what is shown of it."""
    found: dict[str, Any] = json.loads(text)
    if type(found.get("generation")) is not int or not all(
        isinstance(found.get(key), str) for key in ("created", "by")
    ):
        wanted = "a manifest of schema 1"
        raise Trouble(
            Problem(
                f"{host} manifest.json",
                "this generation's manifest cannot be read",
                wanted=wanted,
                try_="invoke rollback",
            )
        )
    return found


def hooks_of(survey: Survey) -> dict[str, list[str]]:
    """Return the hosts by what their MODULEPATH hook names."""
    hooks: dict[str, list[str]] = {}
    for name, facts in survey.facts.items():
        absent = NOT_NEEDED if facts.modules.kind == "none" else MISSING
        hooks.setdefault(facts.modules.hook or absent, []).append(name)
    return hooks


def by_value(values: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the hosts by what is said of them."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(value, []).append(name)
    return groups
