"""`invoke doctor`: faults of the hosts, why they matter, and the commands that mend them. Writes nothing
anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepep_bootstrap.bootstrap.planning import look_at_hosts, read_lock
from deepep_bootstrap.cli.examination import Judged, examine_cluster
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import OK, TROUBLE, Problem, Trouble, worst
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.doctor.examine import exit_code, finding_json
from deepep_bootstrap.doctor.findings import BLOCKING, NOTE, SEVERITIES, WARNING, Finding
from deepep_bootstrap.inventory.hostsfile import USER
from deepep_bootstrap.inventory.survey import Flags, open_connections, read_inventory

STYLES = {BLOCKING: "red", WARNING: "yellow", NOTE: "dim"}


def doctor(flags: Flags, *, as_: str = "", strict: bool = False) -> int:
    """Say what is wrong with the hosts, why it matters and what to do; change nothing.

    Findings are printed with the worst first; exit 4 when something blocks (with `strict` also when something warns),
    1 when hosts did not answer or the user `as_` could not look there, else 0. `as_` is whose view is taken ("" for
    the connection's own user).

    Without --stack the hosts are judged by each stack that the prefix offers, by the lock's default one where nothing
    is offered."""
    screen = Screen("doctor", as_json=flags.json)
    user = as_
    if user and not USER.fullmatch(user):
        wanted = "a user of the hosts, e.g. --as=alice"
        raise Trouble(Problem("--as", "not the name of a user", found=user, wanted=wanted))
    lock, _ = read_lock(flags)
    inventory, prefix = read_inventory(flags)
    with open_connections(flags, inventory) as transport:
        survey = look_at_hosts(flags, transport, inventory, prefix)
        found = examine_cluster(flags, transport, survey, lock, user)
    show(screen, found.judged, found.findings)
    for problem in found.problems:
        screen.problem(problem)
    code = worst([exit_code(found.findings, strict=strict), TROUBLE if found.problems else OK])
    names = [one.request.stack.name for one in found.judged]
    by = {"stack": names[0], "stacks": names, "profile": found.judged[0].case.profile}
    users = {name: view.user for name, view in found.looks.items()}
    findings = [finding_json(finding) for finding in found.findings]
    screen.document(code, found.problems, **by, users=users, findings=findings)
    return code


def show(screen: Screen, judged: Sequence[Judged], findings: Sequence[Finding]) -> None:
    """Print the findings, three lines each, and their numbers. A finding names its stacks where the hosts are judged
    by others too."""
    names = [one.request.stack.name for one in judged]
    first = judged[0]
    stacks = f"stack {names[0]}" if len(names) < 2 else f"stacks {', '.join(names)} as offered"
    screen.say(f"{fold(first.survey.facts)}: {stacks}, profile {first.case.profile}", style="bold")
    for finding in findings:
        whose = "" if set(finding.stacks) >= set(names) else f" (stack {', '.join(finding.stacks)})"
        headline = f"{finding.severity}: {finding.check} on {fold(finding.hosts)}{whose}"
        screen.say(f"\n{headline}", style=STYLES[finding.severity])
        screen.say(f"    found {finding.found}, wanted {finding.wanted}")
        screen.say(f"    {finding.why}")
        if finding.fix:
            screen.say(f"    Try: {finding.fix}")
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in SEVERITIES}
    sums = ", ".join(
        f"{count} {severity}{'s' if count > 1 and severity != BLOCKING else ''}"
        for severity, count in counts.items()
        if count
    )
    screen.say(f"\n{sums}" if sums else "\nNothing to say: these hosts are as they should be.")
