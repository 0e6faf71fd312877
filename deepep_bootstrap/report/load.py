"""Which run is meant and what is in it: a folder of this machine, or a run in a prefix that is reached through its host."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from deepep_bootstrap.analysis import assess, reference_file
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.inventory import facts_json
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.inventory.survey import Flags
from deepep_bootstrap.prefix.access import reach
from deepep_bootstrap.prefix.generations import Place
from deepep_bootstrap.remote.fleet import Door
from deepep_bootstrap.report import pastruns
from deepep_bootstrap.report.compose import compose
from deepep_bootstrap.report.model import Past, Report
from deepep_bootstrap.testing import collect, runfiles
from deepep_bootstrap.testing.run_folder import TestRun

SITE_FILES = (assess.CAUSES, reference_file.FILE)
FOLDERS_TO_PREFIX = 3
"""A run's folder is PREFIX/logs/tests/RUN."""


def read_run(flags: Flags, name: str, texts: Mapping[str, str]) -> tuple[Report, str]:
    """Return the report of a run and where its folder is. `name` is that folder on this machine, or with --hosts (or --prefix) the run's
    name or folder there, "" for the newest. `texts` are the files of env/. Trouble where there is no such run, or it cannot be read."""
    folder = Path(os.path.expanduser(name))
    if name and os.path.isfile(folder / runfiles.VALUES):
        return _read_here(folder.resolve(), texts), str(folder.resolve())
    if not flags.hosts and not flags.prefix:
        what = "no such run on this machine" if name else "no run named"
        wanted = f"the folder of a run (it has a file {runfiles.VALUES}), or --hosts or --prefix and a run's name or nothing for the newest"
        remedy = shlex.join(["invoke", "report", *filter(None, [name]), "--hosts=hosts/b200.txt"])
        raise Trouble(Problem(name or "report", what, wanted=wanted, try_=remedy))
    with reach(flags, empty=True) as reached:
        return _read_there(reached.door, reached.place, name, texts)


def _read_there(door: Door, place: Place, name: str, texts: Mapping[str, str]) -> tuple[Report, str]:
    runs = pastruns.listed(door, place)
    folder = choose(runs, name, f"{place.host.name} {place.prefix}/logs/tests")
    collected = collect.collect(door, place, folder, patience=0)
    site = {file: collect.read_site(door, place, file) for file in SITE_FILES}
    run = runfiles.of_files(PurePosixPath(folder).name, collected.files)
    past = pastruns.earlier(door, place, runs, pastruns.like(run, runs))
    remarks = tuple(f"{missing} bytes of {file} are left out" for file, missing in collected.cut.items())
    return made(run, texts, site, past=past, remarks=remarks), f"{folder} on {place.host.name}"


def _read_here(folder: Path, texts: Mapping[str, str]) -> Report:
    run = runfiles.of_files(folder.name, runfiles.of_folder(folder))
    runs = pastruns.listed_here(folder.parent)
    past = pastruns.earlier_here(runs, pastruns.like(run, runs))
    site = {}
    if folder.parts[-FOLDERS_TO_PREFIX:-1] == ("logs", "tests"):
        paths = [folder.parents[FOLDERS_TO_PREFIX - 1] / file for file in SITE_FILES]
        site = {path.name: path.read_text(encoding="utf-8") for path in paths if path.is_file()}
    return made(run, texts, site, past=past)


def choose(runs: Mapping[str, Mapping[str, str]], name: str, where: str) -> str:
    """Return the folder of the run called `name` (or at that path), of the newest for ""; Trouble with the newest ones where it is not."""
    found = next((folder for folder in runs if not name or name in {folder, PurePosixPath(folder).name}), "")
    if not found:
        newest = ", ".join(PurePosixPath(folder).name for folder in list(runs)[:3])
        what, remedy = ("no such run", "invoke report without a name shows the newest") if name else ("no run yet", "invoke test")
        raise Trouble(Problem(where, what, name, f"one such as {newest}" if newest else "", remedy))
    return found


def made(
    run: TestRun, texts: Mapping[str, str], site: Mapping[str, str], *, past: tuple[Past, ...] = (), remarks: tuple[str, ...] = ()
) -> Report:
    """Return the report of a run. Facts that cannot be read cost limits and the fabric's name, not the report: a remark says so."""
    facts: Mapping[str, Facts] = {}
    try:
        facts = facts_json.read(run.facts, f"{run.name}/{runfiles.FACTS}")
    except Trouble as trouble:
        remarks = (*remarks, *(str(problem) for problem in trouble.problems))
    found = assess.assess(run, facts, assess.read_books(texts, site, run.values.get("prefix", "") or run.name))
    return compose(run, found, facts, past=past, remarks=remarks)


def again(flags: Flags, name: str) -> str:
    """Return the command that writes the same report as HTML."""
    given = [f"--{flag}={value}" for flag, value in (("hosts", flags.hosts), ("limit", flags.limit), ("prefix", flags.prefix)) if value]
    return shlex.join(["invoke", "report", name, *given, f"--html={Path(name).name}.html"])
