"""A plan on the screen: its steps in groups, what an offer changes, the notes, and one line that counts it all.

On a terminal of 80 columns and more hosts and reason stand on a second line, below 80 and in a pipe each step is one
line.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from deepep_bootstrap.core.console import MOST_ALIKE, Screen, more
from deepep_bootstrap.core.nodeset import fold_short
from deepep_bootstrap.core.text import duration, shortened, size
from deepep_bootstrap.plan.steps import HOOK, RESUME, UNCORDON, Plan, Step

GROUPS = {
    "prefix": "Look",
    "build": "Build",
    "offer": "Publish",
    "verify": "Publish",
    "host": "Hosts",
    HOOK: "Hosts",
    RESUME: "Hosts",
    UNCORDON: "Hosts",
    "reboot": "Reboots",
}
"""The heading under which a plan has the steps of a kind, in the order of the screen: what disturbs users most stands
last, above the question. It is not the order in which they are done."""

BESIDE = 120
"""Columns from which hosts and reason have room beside their step."""


MOST_NOTES = 12
"""New notes that are shown; --verbose shows all."""

FETCH = "fetch"
"""The step before builds that is in no plan."""


class PlanView(Struct, frozen=True):
    """How a plan is to be shown. `seen` are notes that this account was shown before, `urgent` those that are always
    told; `seconds` says how long steps took on earlier runs, by title; `reboots` is how hosts would be rebooted."""

    seen: Collection[str] = frozenset()
    urgent: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    reboots: str = "one at a time, asked apart"
    verbose: bool = False


PLAIN_VIEW = PlanView()


def show_plan(screen: Screen, plan: Plan, view: PlanView = PLAIN_VIEW) -> None:
    """Print steps, then notes, then what it all comes to."""
    if screen.is_wide:
        for heading, steps in grouped(plan.steps):
            screen.say(heading, style="bold")
            screen.show(plan_table(steps, beside=screen.width >= BESIDE))
    else:
        for heading, steps in grouped(plan.steps):
            screen.say(heading)
            for step in steps:
                for line in plan_lines(step):
                    screen.say(f"  {line}")
    show_notes(screen, plan.notes, view)
    done = "Nothing to do: everything wanted is there."
    screen.paragraph(summary_line(plan, view) if plan.steps else done, style="bold")


def grouped(steps: Iterable[Step]) -> list[tuple[str, list[Step]]]:
    """Return the steps by heading, in the order of GROUPS."""
    groups: dict[str, list[Step]] = {heading: [] for heading in GROUPS.values()}
    for step in steps:
        groups[GROUPS[step.kind]].append(step)
    return [(heading, few_alike(several)) for heading, several in groups.items() if several]


def few_alike(steps: Sequence[Step]) -> list[Step]:
    """Return steps for a screen: of many with one title, each with a reason of its own, the first, and one that counts
    the hosts of the others."""
    titles: dict[str, list[Step]] = {}
    for step in steps:
        titles.setdefault(step.title, []).append(step)
    found: list[Step] = []
    for title, same in titles.items():
        found += same[:MOST_ALIKE]
        if rest := same[MOST_ALIKE:]:
            hosts = tuple(dict.fromkeys(host for step in rest for host in step.hosts))
            found.append(replace(rest[0], hosts=hosts, sentence=f"{title}: … {more(len(hosts))}", changes=()))
    return found


def reason_text(step: Step) -> str:
    """Return where a step is done and why, "" where its sentence says so."""
    if step.sentence:
        return ""
    hosts, found, wanted = fold_short(step.hosts), shortened(step.reason.found), shortened(step.reason.wanted)
    return f"{hosts}: {wanted} is {found}" if step.kind == "build" else f"{hosts}: found {found}, wanted {wanted}"


def headline(step: Step) -> str:
    """Return what a step does."""
    title = step.title.replace("and reboot", "and REBOOT") if step.kind == "reboot" else step.title
    return shortened(step.sentence) or title


def plan_lines(step: Step) -> list[str]:
    """Return a step as one line, and a line for each thing that it changes of the offer."""
    reason = reason_text(step)
    return [f"{headline(step)} on {reason}" if reason else headline(step), *(f"  {line}" for line in step.changes)]


def plan_table(steps: Sequence[Step], *, beside: bool = False) -> Table:
    """Return steps for a terminal: hosts and reason on a second line, or `beside` their steps."""
    table = Table(box=None, padding=(0, 2, 0, 2), show_header=False)
    table.add_column(overflow="fold")
    if beside and any(reason_text(step) for step in steps):
        table.add_column(overflow="fold", style="dim")
    for step in steps:
        rows = [reason_text(step), *map(shortened, step.changes)]
        table.add_row(Text(headline(step)), *([Text(rows[0])] if len(table.columns) > 1 else []))
        for index, row in enumerate(rows):
            if row and not (index == 0 and len(table.columns) > 1):
                table.add_row(Padding(Text(row, style="dim" if index == 0 else ""), (0, 0, 0, 4)))
    return table


def show_notes(screen: Screen, notes: Sequence[str], view: PlanView) -> None:
    """Print what is always told, the notes that are new, and how many there are beside these."""
    new = [note for note in notes if view.verbose or note not in view.seen]
    for note in view.urgent:
        screen.paragraph(f"note: {note}", style="yellow")
    told = new if view.verbose else new[:MOST_NOTES]
    for note in told:
        screen.paragraph(f"note: {note}", style="dim")
    if rest := len(new) - len(told):
        screen.say(f"… {more(rest, 'notes')}; --verbose shows all", style="dim")
    if known := len(notes) - len(new):
        screen.say(
            f"{counted(known, 'note')} as before (--verbose shows {'it' if known == 1 else 'them'})", style="dim"
        )


def counted(number: int, what: str) -> str:
    """Return `1 build`, `2 builds`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def summary_line(plan: Plan, view: PlanView) -> str:
    """Return the line that counts what the plan does: builds, hosts, reboots, bytes, and the time that is expected."""
    parts = [*_counts(plan, view.reboots)]
    if plan.download_bytes:
        parts.append(f"up to {size(plan.download_bytes)} to download")
    if plan.disk_bytes:
        parts.append(f"about {size(plan.disk_bytes)} on the prefix")
    if (seconds := expected_seconds(plan, view.seconds)) is not None:
        parts.append(f"about {duration(max(1, round(seconds)))} without waiting")
    return f"Plan: {', '.join(parts)}."


def _counts(plan: Plan, reboots: str) -> Iterator[str]:
    def hosts(*kinds: str) -> list[str]:
        return list(dict.fromkeys(host for step in plan.steps if step.kind in kinds for host in step.hosts))

    if builds := plan.of_kind("build"):
        yield counted(len(builds), "build")
    if plan.of_kind("offer"):
        yield "1 new generation"
    if changed := hosts("host", HOOK, "reboot"):
        yield f"{counted(len(changed), 'host')} {'changes' if len(changed) == 1 else 'change'} files"
    if resumed := hosts(RESUME, UNCORDON):
        yield f"{counted(len(resumed), 'node')} back into use"
    if rebooted := hosts("reboot"):
        yield f"{counted(len(rebooted), 'node')} REBOOT{'S' if len(rebooted) == 1 else ''} ({reboots})"
    if not plan.decided:
        yield "the rest is planned after that"
    elif not builds and not plan.of_kind("offer") and not changed and not resumed:
        yield counted(len(plan.steps), "check")


def expected_seconds(plan: Plan, seconds: Mapping[str, float]) -> float | None:
    """Return how long the plan takes by what its steps took before: builds beside each other as far as they can,
    all else one after the other; None where something was never done before, and where hosts reboot, which wait for
    their jobs."""
    if plan.decided is None or plan.of_kind("reboot"):
        return None
    known = {step.title: seconds.get(step.title) for step in plan.steps}
    if any(value is None for value in known.values()):
        return None
    builds = {step.name: step.title for step in plan.of_kind("build")}
    ends: dict[str, float] = {}
    for entry in plan.decided.entries:
        if entry.name in builds:
            ends[entry.name] = seconds[builds[entry.name]] + max(
                (ends.get(name, 0.0) for name in entry.needs), default=0
            )
    others = sum(seconds[step.title] for step in plan.steps if step.kind != "build")
    others += seconds.get(FETCH, 0.0) if builds else 0.0
    return others + max(ends.values(), default=0.0)
