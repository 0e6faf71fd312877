"""`invoke doctor`: what is wrong with the hosts, why it matters, and the command that fixes it. Looks only; writes nothing anywhere."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace

from deepep_bootstrap import jobuser
from deepep_bootstrap.choose import Request
from deepep_bootstrap.doctor import Checks, case_of, examine, exit_code, finding_json
from deepep_bootstrap.errors import OK, TROUBLE, Problem, Trouble, worst
from deepep_bootstrap.findings import BLOCKING, NOTE, SEVERITIES, WARNING, Case, Finding, Seen
from deepep_bootstrap.hosts import USER, fold
from deepep_bootstrap.jobuser import View
from deepep_bootstrap.remote import Fleet
from deepep_bootstrap.report import Screen
from deepep_bootstrap.survey import Flags, Survey, fold_problems, gather, look, open_door, read_inventory, read_usable, request_for

STYLES = {BLOCKING: "red", WARNING: "yellow", NOTE: "dim"}


def doctor(flags: Flags, *, user: str, strict: bool) -> int:
    """Print findings, the worst first; exit 4 when something blocks (with `strict` also when something warns), 1 when hosts did not
    answer or `user` could not look there, else 0. `user` is whose view is taken ("" for the connection's own user)."""
    screen = Screen("doctor", as_json=flags.json)
    if user and not USER.fullmatch(user):
        raise Trouble(Problem("--as", "not the name of a user", found=user, wanted="a user of the hosts, e.g. --as=alice"))
    lock, stack = read_usable(flags)
    inventory, prefix = read_inventory(flags)
    with open_door(flags, inventory) as door:
        survey = gather(flags, door, inventory, prefix)
        request = request_for(flags, survey, (lock, stack))
        case = replace(case_of(request, survey.facts, command_for(flags)), as_another=bool(user))
        checks, unchecked = ask_recipes(door, survey, request)
        looks, unseen = ask_user(door, survey, request, user)
    seen = [Seen(host.name, host.role, survey.facts[host.name], looks.get(host.name), case) for host in survey.reached]
    findings = examine(request, case, seen, checks)
    problems = (*survey.problems, *fold_problems([*unchecked, *unseen], inventory))
    tell(screen, survey, case, findings)
    for problem in problems:
        screen.problem(problem)
    code = worst([exit_code(findings, strict=strict), TROUBLE if problems else OK])
    found = [finding_json(finding) for finding in findings]
    users = {name: view.user for name, view in looks.items()}
    screen.document(code, problems, stack=stack.name, profile=case.profile, users=users, findings=found)
    return code


def command_for(flags: Flags) -> str:
    """Return the command that prepares the same hosts, as a person would type it."""
    given = [(name, str(getattr(flags, name))) for name in ("hosts", "limit", "lock", "stack", "prefix", "python")]
    given += [("mirror", value) for value in flags.mirror]
    return shlex.join(["invoke", "bootstrap", *(f"--{name}={value}" for name, value in given if value)])


def ask_recipes(door: Fleet, survey: Survey, request: Request) -> tuple[Checks, tuple[Problem, ...]]:
    """Return what the checks of the host recipes say, and why some could not be asked: then the facts alone must do."""
    try:
        return look(door, survey.reached, survey.facts, request).checks, ()
    except Trouble as trouble:
        return {}, trouble.problems


def ask_user(door: Fleet, survey: Survey, request: Request, user: str) -> tuple[Mapping[str, View], list[Problem]]:
    """Return what the user of a job finds on each host, and why nobody could look on others."""
    job = jobuser.look(request.recipes, survey.prefix, user)
    looks: dict[str, View] = {}
    problems: list[Problem] = []
    for name, reply in door.run_all(survey.reached, lambda host: job).items():
        try:
            if isinstance(reply, Trouble):
                raise reply
            looks[name] = jobuser.parse(reply)
        except Trouble as trouble:
            problems.extend(trouble.problems)
    return looks, problems


def tell(screen: Screen, survey: Survey, case: Case, findings: tuple[Finding, ...]) -> None:
    """Print the findings, three lines each, and their numbers."""
    screen.say(f"{fold(survey.facts)}: stack {case.stack.name}, profile {case.profile}", style="bold")
    for finding in findings:
        screen.say(f"\n{finding.severity}: {finding.check} on {fold(finding.hosts)}", style=STYLES[finding.severity])
        screen.say(f"    found {finding.found}, wanted {finding.wanted}")
        screen.say(f"    {finding.why}")
        if finding.fix:
            screen.say(f"    Try: {finding.fix}")
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in SEVERITIES}
    said = ", ".join(
        f"{count} {severity}{'s' if count > 1 and severity != BLOCKING else ''}" for severity, count in counts.items() if count
    )
    screen.say(f"\n{said}" if said else "\nNothing to say: these hosts are as they should be.")
