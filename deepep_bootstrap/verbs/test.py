"""`invoke test`: one test on the hosts, through Slurm where it runs, followed to its end; what it left is brought back and judged."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace

from deepep_bootstrap import collecting, kinds, onhosts, runfiles, testing
from deepep_bootstrap.collecting import Collected
from deepep_bootstrap.errors import TROUBLE, Problem, Trouble, worst
from deepep_bootstrap.generations import Place
from deepep_bootstrap.plan import Outcome
from deepep_bootstrap.reboots import parse_time
from deepep_bootstrap.remote import Fleet
from deepep_bootstrap.report import Screen, outcome_json
from deepep_bootstrap.survey import Flags, Survey, gather, number, offered_stack, open_door, read_inventory, read_tree
from deepep_bootstrap.testing import Went, Wish
from deepep_bootstrap.testplace import Spot, find_spot
from deepep_bootstrap.testruns import TestRun


@dataclass(frozen=True)
class Asked:
    """The flags of the verb, read: the kind's name, words for the script, "slurm", "ssh" or "" for whichever there is, nodes (0: the
    kind's own number), seconds to wait for nodes and to run (0: the kind's own), and whether the figures become the site's references."""

    kind: str
    args: tuple[str, ...]
    via: str
    nodes: int
    start_limit: int
    time_limit: int
    save: bool


@dataclass(frozen=True)
class Scene:
    """What following a test needs: the door, the hosts, where it runs, and what people see of it."""

    screen: Screen
    door: Fleet
    survey: Survey
    spot: Spot
    recipes: dict[str, str]


def read(kind: str, args: str, via: str, *, nodes: str, limits: tuple[str, str], save: bool) -> Asked:
    """Return the flags of the verb; `limits` are --start-timeout and --time-limit. Trouble for one that cannot be read."""
    kinds.known_kind(kind)
    count = number("--nodes", nodes) if nodes else 0
    seconds = int(parse_time("--time-limit", limits[1])) if limits[1] else 0
    return Asked(kind, split(args), via, count, number("--start-timeout", limits[0]), seconds, save)


def split(args: str) -> tuple[str, ...]:
    """Return the words of --args."""
    try:
        return tuple(shlex.split(args))
    except ValueError:
        raise Trouble(Problem("--args", "a quotation mark is not closed", found=args)) from None


def test(flags: Flags, asked: Asked) -> int:
    """Run one test and pass its verdict on: 0 passed, 4 failed or below its reference, 1 could not be run.

    With --dry-run it only says what would run where.
    """
    screen = Screen("test", as_json=flags.json)
    inventory, prefix = read_inventory(flags)
    with open_door(flags, inventory) as door:
        survey = gather(flags, door, inventory, prefix)
        record = offered_stack(survey, flags.stack)
        kind = kinds.find_kind(asked.kind, record)
        spot = find_spot(
            survey, kind, asked.nodes, via=asked.via, limited=bool(flags.limit), use_busy=flags.on_busy_host == "use"
        )  # fmt: skip
        wish = Wish(
            kind, record, testing.run_name(kind.name), spot.count, asked.time_limit or kind.minutes * 60,
            args=asked.args, named=spot.named, start_limit=asked.start_limit,
        )  # fmt: skip
        command = shlex.join(["sbatch", *wish.options, wish.file, *wish.args] if spot.client else ["bash", wish.file, *wish.args])
        for note in spot.notes:
            screen.say(f"note: {note}", style="dim")
        screen.say(f"{kind.name} test of {record.module}: {spot.where} {'would run' if flags.dry_run else 'runs'} {command}")
        outcome = Outcome(f"{kind.name} test", spot.where, "skipped", "--dry-run")
        if not flags.dry_run:
            scene = Scene(screen, door, survey, spot, read_tree(flags.root / "recipes"))
            went = follow(scene, wish)
            run = bring_back(scene, wish, went)
            outcome = went.outcome
            if run:
                screen.say(f"{len(run[0].logs)} logs in {went.place}")
            screen.outcomes([outcome])
    for problem in survey.problems:
        screen.problem(problem)
    code = worst([outcome.code, *(TROUBLE for _ in survey.problems)])
    screen.document(code, survey.problems, kind=kind.name, module=record.module, command=command, outcome=outcome_json(outcome))
    return code


def follow(scene: Scene, wish: Wish) -> Went:
    """Run the test and show what it prints."""
    shown: list[str] = []

    def show(line: str) -> None:
        shown.append(line)
        scene.screen.say(line)

    if scene.spot.client:
        went = testing.submit(scene.door, scene.spot.client, wish, scene.recipes, on_line=show)
        if went.began and not shown:
            scene.screen.say(f"{went.host.name} does not see the job's output: {went.outcome.log} on the node that ran it")
        return went
    address = onhosts.meeting_address(scene.spot.hosts, scene.survey.facts) if scene.spot.count > 1 else ""
    return onhosts.run(scene.door, scene.spot.hosts, wish, scene.recipes, address=address, on_line=show)


def bring_back(scene: Scene, wish: Wish, went: Went) -> tuple[TestRun, Collected] | None:
    """Return what the run left, None where it left nothing."""
    if not went.began:
        return None
    place = Place(went.host, wish.record.prefix, scene.recipes)
    collected = collecting.collect(scene.door, place, went.place)
    files = dict(collected.files)
    if went.log:
        files["job.log"] = went.log
    return runfiles.of_files(wish.name, files), replace(collected, files=files)
