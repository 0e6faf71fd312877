"""`invoke report`: the report of one run of a test; with --cluster that of a whole cluster; with --bundle the material
for a bug report in one archive, without secrets.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from msgspec import Struct, to_builtins

from deepep_bootstrap.bootstrap.planning import (
    asks_slurm_of,
    decide,
    look_at_hosts,
    read_lock,
    read_wanted,
    request_for,
)
from deepep_bootstrap.bootstrap.reboot.drained import drained_and_silent, drained_by_us, waiting_for_reboot
from deepep_bootstrap.cli.examination import examine_cluster
from deepep_bootstrap.core import process, program, redact
from deepep_bootstrap.core.console import Screen, more
from deepep_bootstrap.core.errors import OK, Problem, Trouble
from deepep_bootstrap.core.filetree import whole_file
from deepep_bootstrap.core.guard import state_dir
from deepep_bootstrap.core.redact import scrub
from deepep_bootstrap.core.text import REMOVED
from deepep_bootstrap.inventory.facts import facts_json
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.hostsfile import Inventory
from deepep_bootstrap.inventory.survey import Survey, gather, open_connections, read_inventory, read_tree
from deepep_bootstrap.plan.steps import plan_json
from deepep_bootstrap.prefix.access import NOTHING
from deepep_bootstrap.prefix.generations import PrefixHandle
from deepep_bootstrap.prefix.history import read_contents
from deepep_bootstrap.report import bundle, load, terminal
from deepep_bootstrap.report.build import LOGS, build_lines, find_logs, read_builds
from deepep_bootstrap.report.bundle import pack
from deepep_bootstrap.report.cluster import Looked, compose_cluster
from deepep_bootstrap.report.cluster import as_json as cluster_json
from deepep_bootstrap.report.html import render_cluster, render_html
from deepep_bootstrap.report.junit import render_junit
from deepep_bootstrap.report.model import Report, as_json

MOST_PROBLEMS = 12
"""Problems of a look at a cluster that are shown; the page and the document have all."""

RUNS, BUGS = 3, 5
"""How many of the newest runs' and bugs' logs are in a bundle."""

PROGRAM = "deepep-bootstrap"
WHAT = (
    ("README.txt", "this list, and what could not be had"),
    ("versions.json", "versions of this program, of what it is made of, and of the tools of this machine"),
    ("facts.json", "what every host is"),
    ("plan.json", "what bootstrap would do now, and why"),
    ("problems.json", "what went wrong while this was gathered"),
    ("deepep.lock.toml", "the lock"),
    ("hosts.txt", "the hosts file"),
    ("logs/", f"the logs of the last {RUNS} runs"),
    ("bugs/", f"what internal errors left, the last {BUGS}"),
)


def report(
    flags: Flags,
    *,
    run: str = "",
    html: str = "",
    junit: str = "",
    list: bool = False,  # noqa: A002 - the flag's name
    cluster: bool = False,
    force: bool = False,
    bundle: str | bool = "",
    scrub_hosts: bool = False,
    build: bool = False,
) -> int:
    """Tell how a run of a test went (figures, NIC traffic, ranks, sweep, cause, history); with --list which runs there
    are; with --cluster how all hosts, stacks and last runs are; with --build how long the builds of a bootstrap took
    and which compile units longest; or with --bundle write a bug bundle: versions, plan, facts, lock, hosts file and
    the last logs in one archive, without passwords and keys.

    Show a run (its folder here, or its name in the prefix; "" the newest) or the `cluster`, as HTML in the file `html`
    and a run as JUnit XML in the file `junit` too; or write a bug bundle to the file `bundle` (True: one named by the
    time, here). Exit 0 whatever the verdict is and whatever the hosts say."""
    screen = Screen("report", as_json=flags.json)
    others = (("--list", list), ("--cluster", cluster), ("--build", build), ("--bundle", bundle))
    asked = [flag for flag, given in others if given]
    refuse_both(asked, run, [flag for flag, name in (("--html", html), ("--junit", junit)) if name])
    if list:
        return show_list(flags, screen, run)
    if cluster:
        return show_cluster(flags, screen, html, force=force)
    if build:
        return show_build(screen, run)
    if not bundle:
        return show_run(flags, screen, run, RunFilesWanted(html, junit, force))
    now = int(time.time())
    path = new_file(bundle, now)
    files, problems, names = collect(flags)
    hosts = redact.aliases(dict.fromkeys(names, "")) if scrub_hosts else None
    secrets = redact.secrets_of(os.environ)
    files["README.txt"] = readme(files, problems)
    clean = {scrub(name, hosts=hosts): scrub(text, secrets, hosts) for name, text in files.items()}
    data = pack(clean, now)
    if not flags.dry_run:
        write_file(path, data, mode=0o600)  # for its owner alone until it was looked at
    show_bundle(screen, path, clean, dry_run=flags.dry_run)
    for problem in problems:
        screen.say(f"  not in it: {scrub(str(problem), secrets, hosts)}", style="yellow")
    missing = [json.loads(scrub(json.dumps(problem.as_json()), secrets, hosts)) for problem in problems]
    screen.document(OK, (), file=str(path), bytes=len(data), contents=sorted(clean), missing=missing)
    return OK


class OtherReport(Struct, frozen=True):
    """What is asked for in place of the report of a run: what it is, which files it cannot be written to, and whether
    a run's name is one word too many."""

    what: str
    no_files: tuple[str, ...]
    no_run: bool = True


OTHER_REPORTS = {
    "--bundle": OtherReport("a bundle is not the report of a run or a cluster", ("--html", "--junit")),
    "--cluster": OtherReport("the report of a cluster is not that of a run", ("--junit",)),
    "--build": OtherReport("a build is not the run of a test", ("--html", "--junit"), no_run=False),
    "--list": OtherReport("a list of runs is not the report of one", ("--html", "--junit"), no_run=False),
}


def refuse_both(asked: Sequence[str], run: str, files: Sequence[str]) -> None:
    """Trouble where two different things are `asked` for at once (keys of OTHER_REPORTS), or one with a run or with
    files (flags) that it has no use for."""
    for flag, other in OTHER_REPORTS.items():
        also = [each for each in asked if each != flag] + [each for each in files if each in other.no_files]
        also += [run] if run and other.no_run else []
        if flag in asked and also:
            raise Trouble(Problem(flag, other.what, f"also {also[0]}", "one of the two"))


class RunFilesWanted(Struct, frozen=True):
    """Files that a run is to be written to ("" for none), and whether they may replace others."""

    html: str
    junit: str
    force: bool

    @property
    def page(self) -> Path | None:
        """Return the path of the page; Trouble where it cannot be written."""
        return new_path("--html", self.html, force=self.force) if self.html else None

    @property
    def xml(self) -> Path | None:
        """Return the path of the JUnit XML; Trouble where it cannot be written."""
        return new_path("--junit", self.junit, force=self.force) if self.junit else None


def show_run(flags: Flags, screen: Screen, name: str, wanted: RunFilesWanted) -> int:
    """Show one run, and write it as HTML and as JUnit XML where that was asked for. Readers change nothing: there is
    no file unless one is named."""
    page, xml = wanted.page, wanted.xml
    found, where = load.read_run(flags, name, read_tree(flags.root / "env"))
    if not flags.dry_run:
        if page:
            write_file(page, render_html(found, time.time()).encode())
        if xml:
            write_file(xml, render_junit(found).encode())
    terminal.show_report(screen, found)
    screen.say(f"\nLogs and counters: {where}")
    for path in filter(None, (page, xml)):
        screen.say(f"{'would write' if flags.dry_run else 'wrote'} {path}", style="bold")
    again = f"{load.rerun(flags, found.run)}    # the same test again" if found.rerun else ""
    if commands := [*filter(None, (again, "" if page or xml else load.again(flags, name or found.run.name)))]:
        screen.next_commands(commands)
    screen.document(OK, (), **as_json(found, where), html=str(page or ""), junit=str(xml or ""))
    return OK


def show_list(flags: Flags, screen: Screen, folder: str) -> int:
    """Show which runs there are, the newest first."""
    runs, where = load.list_runs(flags, folder)
    screen.say(f"{len(runs)} run{'s' * (len(runs) != 1)} in {where}", style="bold")
    terminal.show_list(screen, runs)
    if runs:
        newest = str(Path(folder, runs[0].run)) if folder else runs[0].run
        screen.next_commands([shlex.join(["invoke", "report", newest, *load.given(flags)])])
    screen.document(OK, (), where=where, runs=[to_builtins(run) for run in runs])
    return OK


def show_build(screen: Screen, run: str) -> int:
    """Show how long the builds of a bootstrap took, from the logs that it left on this machine."""
    folder = find_logs(state_dir() / "logs", run)
    found = read_builds(folder.glob(LOGS))
    screen.say(f"Builds of {folder}", style="bold")
    for line in build_lines(found):
        screen.say(line)
    screen.document(OK, (), where=str(folder), builds=[to_builtins(each) for each in found])
    return OK


def show_cluster(flags: Flags, screen: Screen, html: str, *, force: bool) -> int:
    """Show the whole cluster, and write it as HTML where that was asked for."""
    path = new_path("--html", html, force=force) if html else None
    found = compose_cluster(look_at_cluster(flags))
    if path and not flags.dry_run:
        write_file(path, render_cluster(found, time.time()).encode())
    terminal.show_cluster(screen, found)
    for line in found.problems[:MOST_PROBLEMS]:
        screen.say(line, style="yellow")
    if (rest := len(found.problems) - MOST_PROBLEMS) > 0:
        screen.say(f"… {more(rest, 'problems')}", style="yellow")
    if path:
        screen.say(f"\n{'would write' if flags.dry_run else 'wrote'} {path}", style="bold")
    else:
        screen.next_commands([load.again(flags, "--cluster", "cluster.html")])
    screen.document(OK, (), **cluster_json(found), html=str(path or ""))
    return OK


def look_at_cluster(flags: Flags) -> Looked:
    """Return what the hosts, the doctor, the prefix and its last runs say; what cannot be had is among the problems."""
    lock, _ = read_lock(flags)
    inventory, prefix = read_inventory(flags)
    with open_connections(flags, inventory) as transport:
        survey = look_at_hosts(flags, transport, inventory, prefix)
        examined = examine_cluster(flags, transport, survey, lock)
        problems = list(examined.problems)
        holdings = NOTHING
        runs: tuple[Report, ...] = ()
        via = next((host for host in survey.reached if survey.facts[host.name].prefix.exists), None)
        if via is not None:
            place = PrefixHandle(via, prefix, read_tree(flags.root / "recipes"), inventory.settings.build_user)
            try:
                holdings = read_contents(transport, place)
                runs, unread = load.last_of_each(load.PrefixRuns(transport, place), read_tree(flags.root / "env"))
                problems.extend(unread)
            except Trouble as trouble:
                problems.extend(trouble.problems)
        drained = drained_by_us(survey) | drained_and_silent(transport, survey, asks_slurm_of(survey))
    case = examined.judged[0].case
    return Looked(
        survey,
        examined.findings,
        holdings,
        waiting_for_reboot(survey),
        drained,
        case.link,
        case.profile,
        runs,
        tuple(dict.fromkeys(problems)),
    )


def new_file(bundle: str | bool, now: int) -> Path:
    """Return where to write the bundle."""
    name = (
        f"deepep-report-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(now))}.tar.gz" if bundle is True else str(bundle)
    )
    return new_path("--bundle", name)


def new_path(flag: str, name: str, *, force: bool = False) -> Path:
    """Return the path of a file to write; Trouble where no folder is or something is there already, but for a file
    with `force`."""
    path = Path(os.path.expanduser(name)).absolute()
    if not path.parent.is_dir():
        raise Trouble(Problem(f"{flag}={name}", "its folder is not there", wanted=f"a directory {path.parent}"))
    if os.path.lexists(path) and not (force and path.is_file() and not path.is_symlink()):
        remedy = "" if force or flag == "--bundle" else "--force, which replaces a file"
        raise Trouble(Problem(f"{flag}={name}", "is there already", wanted="the name of a new file", try_=remedy))
    return path


def write_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a page, a table or a bundle, whole or not at all."""
    with whole_file(path, mode) as file:
        file.write(data)


def collect(flags: Flags) -> tuple[dict[str, str], tuple[Problem, ...], tuple[str, ...]]:
    """Return the files of the bundle as far as they can be had, why others cannot, and the names of the hosts."""
    files = {"versions.json": document(versions()), **logs()}
    problems: list[Problem] = []
    names: tuple[str, ...] = ()
    lock, file = Path(flags.lock or flags.root / "deepep.lock.toml"), os.path.expanduser(flags.hosts)
    files |= read_file(lock, "deepep.lock.toml", problems)
    try:
        inventory, prefix = read_inventory(flags, apart=True)
    except Trouble as trouble:
        problems.extend(trouble.problems)
        files |= read_file(Path(file), "hosts.txt", problems) if os.path.isfile(file) else {}
    else:
        names = tuple(host.name for host in inventory.hosts)
        files |= (
            read_file(Path(file), "hosts.txt", problems) if os.path.isfile(file) else {"hosts.txt": f"{flags.hosts}\n"}
        )
        files |= ask_hosts(flags, inventory, prefix, problems)
    files["problems.json"] = document([problem.as_json() for problem in problems])
    return files, tuple(problems), names


def ask_hosts(flags: Flags, inventory: Inventory, prefix: str, problems: list[Problem]) -> dict[str, str]:
    """Return the facts of the hosts and the plan for them, as far as hosts answer and a plan can be made; the rest
    is noted."""
    files: dict[str, str] = {}
    try:
        with open_connections(flags, inventory) as transport:
            survey: Survey = gather(flags, transport, inventory, prefix)
            problems.extend(survey.problems)
            files["facts.json"] = document(facts_json(survey.facts))
            files["plan.json"] = document(
                plan_json(decide(transport, survey, request_for(flags, survey, read_wanted(flags)), anyhow=True))
            )
    except Trouble as trouble:
        problems.extend(problem for problem in trouble.problems if problem not in problems)
    return files


def read_file(path: Path, name: str, problems: list[Problem]) -> dict[str, str]:
    """Return one file of this machine under its name in the bundle; nothing, and a note, where it cannot be read."""
    try:
        return {name: bundle.cut(path.read_bytes()).decode(errors="backslashreplace")}
    except OSError as error:
        problems.append(Problem(str(path), "cannot be read", error.strerror or str(error)))
        return {}


def logs() -> dict[str, str]:
    """Return the newest logs of this machine by their name in the bundle; what went away meanwhile is left out."""
    found: dict[str, str] = {}
    for kind, count in (("logs", RUNS), ("bugs", BUGS)):
        folder = state_dir() / kind
        # Names begin with the time: the last ones are the newest.
        for top in sorted(filter(files_of, folder.iterdir()))[-count:] if folder.is_dir() else ():
            for path in files_of(top):
                found |= read_file(path, f"{kind}/{path.relative_to(folder)}", [])
    return found


def files_of(top: Path) -> list[Path]:
    """Return the files of a run's folder, or the file itself. A run that was stopped early has none."""
    return [
        path for path in (sorted(top.rglob("*")) if top.is_dir() else [top]) if path.is_file() and not path.is_symlink()
    ]


def versions() -> dict[str, Any]:
    """Return what is running: this program with its commit, its packages, Python, the system, and the tools it
    calls."""
    tools = {name: first_line(words) for name, words in (("git", ("git", "--version")), ("ssh", ("ssh", "-V")))}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "commit": program.commit(),
        "packages": dict(sorted(packages())),
        "tools": tools,
    }


def packages() -> Iterator[tuple[str, str]]:
    """Yield name and version of this program's package and of those it asks for; "" for one that is not installed as
    a package."""
    try:
        wanted = [
            re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]
            for line in metadata.requires(PROGRAM) or ()
            if "extra ==" not in line
        ]
    except metadata.PackageNotFoundError:
        wanted = ["invoke", "fabric", "paramiko", "rich", "tomlkit", "uv"]
    for name in (PROGRAM, *wanted):
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, ""


def first_line(words: tuple[str, ...]) -> str:
    """Return the first line that a tool prints; "" where it is not here."""
    try:
        done = process.run_program(words)
    except (OSError, Trouble):
        return ""
    return ((done.out or done.err).strip().splitlines() or [""])[0]


def readme(files: Mapping[str, str], problems: tuple[Problem, ...]) -> str:
    """Return the text on what is in the bundle and what is not."""
    there = [
        f"  {name:<18} {what}"
        for name, what in WHAT
        if name == "README.txt" or any(each.startswith(name) for each in files)
    ]
    lost = [f"  {problem}" for problem in problems]
    secrets = f"Passwords, tokens and private keys were replaced by {REMOVED}. Look through it before you give it away."
    return "\n".join(
        ["Made by `invoke report --bundle`.", secrets, "", *there, *(["", "Not to be had:", *lost] if lost else []), ""]
    )


def document(value: object) -> str:
    """Return a JSON text for people."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def show_bundle(screen: Screen, path: Path, files: Mapping[str, str], *, dry_run: bool) -> None:
    """Say where the bundle is and what is in it."""
    screen.say(f"{'would write' if dry_run else 'wrote'} {path}", style="bold")
    for name, what in WHAT:
        inside = [each for each in files if each.startswith(name)]
        if inside:
            count = f" ({len(inside)} files)" if name.endswith("/") else ""
            screen.say(f"  {name:<18} {what}{count}")
    screen.say(
        f"Passwords, tokens and private keys are replaced by {REMOVED}; look through it before you give it away."
    )
