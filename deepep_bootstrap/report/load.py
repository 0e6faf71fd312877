"""Runs of tests out of their folders, in a prefix or on this machine: one as a report, earlier ones of its
kind, and the newest with how they ended.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from msgspec import Struct

from deepep_bootstrap.analysis import assess, reference_file
from deepep_bootstrap.analysis.results.read import read_logs
from deepep_bootstrap.core import recipes
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.recipes import last_lines
from deepep_bootstrap.core.text import moment, number
from deepep_bootstrap.inventory import seen
from deepep_bootstrap.inventory.facts import Facts, read_facts_json
from deepep_bootstrap.inventory.survey import Flags
from deepep_bootstrap.prefix.access import reach
from deepep_bootstrap.prefix.generations import PrefixHandle
from deepep_bootstrap.remote.fleet import Job, Transport
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.report.compose import PAST_RUNS, compose, keyed
from deepep_bootstrap.report.model import Past, Report
from deepep_bootstrap.testing import run_folder
from deepep_bootstrap.testing.run_folder import RunFiles, TestRun, parse_values

SITE_FILES = (assess.CAUSES, reference_file.FILE)
FOLDERS_TO_PREFIX = 3
"""A run's folder is PREFIX/logs/tests/RUN."""


def read_run(flags: Flags, name: str, texts: Mapping[str, str]) -> tuple[Report, str]:
    """Return the report of a run and where its folder is. `name` is that folder on this machine, or with --hosts (or
    --prefix) the run's name or folder there, "" for the newest. `texts` are the files of env/. Trouble where there
    is no such run, or it cannot be read."""
    folder = Path(os.path.expanduser(name))
    if name and os.path.isfile(folder / run_folder.VALUES):
        folder = folder.resolve()
        local = LocalRuns(folder.parent)
        return _report(local, local.values(), str(folder), texts), str(folder)
    if not flags.hosts and not flags.prefix:
        what = "no such run on this machine" if name else "no run named"
        wanted = (
            f"the folder of a run (it has a file {run_folder.VALUES}), or --hosts or --prefix and a run's name "
            f"or nothing for the newest"
        )
        remedy = shlex.join(["invoke", "report", *filter(None, [name]), "--hosts=hosts/b200.txt"])
        raise Trouble(Problem(name or "report", what, wanted=wanted, try_=remedy))
    with reach(flags, empty=True) as reached:
        store = PrefixRuns(reached.transport, reached.place)
        runs = store.values()
        found = choose_run(runs, name, store.where)
        return _report(store, runs, found, texts), f"{found} on {reached.place.host.name}"


def _report(
    store: LocalRuns | PrefixRuns, runs: Mapping[str, Mapping[str, str]], folder: str, texts: Mapping[str, str]
) -> Report:
    """Return the report of the run in a folder, over the earlier ones of `runs`, which are values by folder."""
    collected = store.files(folder)
    run = run_folder.of_files(PurePosixPath(folder).name, collected.files)
    names = like(run, runs)
    logs = store.logs(names)
    earlier = tuple(past(name, runs[name], logs.get(name, {})) for name in names)
    remarks = tuple(f"{missing} bytes of {file} are left out" for file, missing in collected.cut.items())
    return made(run, texts, store.site_files(folder), past=earlier, remarks=remarks)


def choose_run(runs: Mapping[str, Mapping[str, str]], name: str, where: str) -> str:
    """Return the folder of the run called `name` (or at that path), of the newest for ""; Trouble with the newest
    ones where it is not."""
    found = next((folder for folder in runs if not name or name in {folder, PurePosixPath(folder).name}), "")
    if not found:
        newest = ", ".join(PurePosixPath(folder).name for folder in list(runs)[:3])
        what, remedy = (
            ("no such run", "invoke report without a name shows the newest") if name else ("no run yet", "invoke test")
        )
        raise Trouble(Problem(where, what, name, f"one such as {newest}" if newest else "", remedy))
    return found


def made(
    run: TestRun,
    texts: Mapping[str, str],
    site: Mapping[str, str],
    *,
    past: tuple[Past, ...] = (),
    remarks: tuple[str, ...] = (),
) -> Report:
    """Return the report of a run. Facts that cannot be read cost limits and the fabric's name, not the report: a
    remark says so."""
    facts: Mapping[str, Facts] = {}
    try:
        facts = read_facts_json(run.facts, f"{run.name}/{run_folder.FACTS}")
    except Trouble as trouble:
        remarks = (*remarks, *(str(problem) for problem in trouble.problems))
    found = assess.assess(run, facts, assess.read_rules(texts, site, run.values.get("prefix", "") or run.name))
    return compose(run, found, facts, past=past, remarks=remarks)


def again(flags: Flags, name: str, file: str = "") -> str:
    """Return the command that writes the same report as HTML, to a file named after the run where none is said."""
    given = [
        f"--{flag}={value}"
        for flag, value in (("hosts", flags.hosts), ("limit", flags.limit), ("prefix", flags.prefix))
        if value
    ]
    return shlex.join(["invoke", "report", name, *given, f"--html={file or f'{Path(name).name}.html'}"])


HISTORY = ("lib.sh", "test/history.sh")
MOST = 1000
"""Runs that are looked at, newest first."""

LARGEST, TOTAL = 1 << 20, 32 << 20
"""Bytes of one earlier log and of all of them: a longer log is no test of the usual length."""

LIMIT = 300.0


class LocalRuns(Struct, frozen=True):
    """The runs beside each other in a folder of this machine, which need not be one of a prefix. They are read without
    a shell, so that a copied folder can be reported on any machine."""

    folder: Path

    def values(self) -> dict[str, dict[str, str]]:
        """Return the values of the newest runs by folder, the newest first. A run whose values cannot be read has
        none."""
        try:
            paths = sorted(self.folder.glob(f"*/{run_folder.VALUES}"), reverse=True)[:MOST]
            return {str(path.parent): _values(path.read_text(encoding="utf-8", errors="replace")) for path in paths}
        except OSError as error:
            problem = Problem(str(self.folder), "runs cannot be looked at", error.strerror or str(error))
            raise Trouble(problem) from None

    def files(self, folder: str) -> RunFiles:
        """Return the files of one run."""
        return RunFiles(run_folder.of_folder(Path(folder)), {})

    def logs(self, folders: Iterable[str]) -> dict[str, dict[str, str]]:
        """Return the logs of the nodes of several runs by folder and name, but for long ones."""
        return {folder: dict(_short_logs(Path(folder))) for folder in folders}

    def site_files(self, folder: str) -> dict[str, str]:
        """Return the site's own files by name, where the run's folder is in a prefix."""
        run = Path(folder)
        if run.parts[-FOLDERS_TO_PREFIX:-1] != ("logs", "tests"):
            return {}
        paths = [run.parents[FOLDERS_TO_PREFIX - 1] / name for name in SITE_FILES]
        return {path.name: path.read_text(encoding="utf-8") for path in paths if path.is_file()}


def _short_logs(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.glob("node-*.log")):
        if path.stat().st_size <= LARGEST:
            yield path.name, path.read_bytes().decode("utf-8", "replace")


class PrefixRuns(Struct, frozen=True):
    """The runs of a prefix that a host sees."""

    transport: Transport
    place: PrefixHandle

    @property
    def where(self) -> str:
        """The place of the runs for people."""
        return f"{self.place.host.name} {self.place.prefix}/logs/tests"

    def values(self, most: int = MOST) -> dict[str, dict[str, str]]:
        """Return the values of the `most` newest runs by folder, the newest first. A run whose values cannot be read
        has none."""
        found = self._read((), most)
        seen.keep(seen.RUNS, self.place.prefix, (path.split("/")[-2] for path in found if "/" in path), add=True)
        return {path.removesuffix(f"/{run_folder.VALUES}"): _values(text) for path, text in found.items()}

    def files(self, folder: str) -> RunFiles:
        """Return the files of one run."""
        return run_folder.collect(self.transport, self.place, folder, patience=0)

    def logs(self, folders: Iterable[str]) -> dict[str, dict[str, str]]:
        """Return the logs of the nodes of several runs by folder and name, but for long ones."""
        names = tuple(folders)
        found: dict[str, dict[str, str]] = {}
        for path, text in (self._read(names, MOST) if names else {}).items():
            folder, _, name = path.rpartition("/")
            found.setdefault(folder, {})[name] = text
        return found

    def site_files(self, folder: str) -> dict[str, str]:
        """Return the site's own files by name."""
        return {name: run_folder.read_site(self.transport, self.place, name) for name in SITE_FILES}

    def _read(self, folders: Iterable[str], most: int) -> dict[str, str]:
        place = self.place
        output = bytearray()
        env = {
            "PREFIX": place.prefix,
            "RUNS": "\n".join(folders),
            "MOST": str(most),
            "LARGEST": str(LARGEST),
            "TOTAL": str(TOTAL),
        }
        script = recipes.compose(place.recipes, *HISTORY)
        job = Job(script, env=env, user=place.user, timeout=LIMIT, sink=output.extend, limit=2 * TOTAL)
        reply = self.transport.run(place.host, job)
        if reply.code:
            raise Trouble(Problem(self.where, "runs cannot be looked at", last_lines(reply.err)))
        found = run_folder.parse_collected(bytes(output), self.where)
        return {path: text for path, text in found.files.items() if path not in found.cut}


def _values(text: str) -> dict[str, str]:
    try:
        return parse_values(text, run_folder.VALUES)
    except Trouble:
        return {}


def like(run: TestRun, runs: Mapping[str, Mapping[str, str]]) -> tuple[str, ...]:
    """Return the folders of the earlier runs that can be compared with a run: of its kind, on as many nodes, with
    the same arguments."""
    start = number(run.values.get("started", ""))

    def fits(folder: str, values: Mapping[str, str]) -> bool:
        before = number(values.get("started", ""))
        nodes = len([name for name in values.get("nodes", "").split(",") if name])
        same = (values.get("kind"), TestRun("", values, {}).args, nodes) == (run.kind, run.args, len(run.nodes))
        return (
            same
            and PurePosixPath(folder).name != run.name
            and before is not None
            and (start is None or before <= start)
        )

    known = [folder for folder, values in runs.items() if fits(folder, values)]
    return tuple(sorted(known, key=lambda folder: number(runs[folder]["started"]) or 0.0)[-PAST_RUNS:])


def past(folder: str, values: Mapping[str, str], logs: Mapping[str, str]) -> Past:
    """Return what one run gave, by its logs of nodes; a run that failed may have figures too."""
    return Past(
        PurePosixPath(folder).name,
        number(values.get("started", "")) or 0.0,
        values.get("code") != "0",
        keyed(read_logs(logs)),
    )


def last_of_each(store: PrefixRuns, texts: Mapping[str, str]) -> tuple[tuple[Report, ...], tuple[Problem, ...]]:
    """Return the reports of the last run of each kind and stack, the newest first, and why some cannot be read."""
    runs = store.values()
    newest: dict[tuple[str, str], str] = {}
    for folder, values in runs.items():
        if values.get("kind"):
            newest.setdefault((values["kind"], values.get("stack", "")), folder)
    reports: list[Report] = []
    problems: list[Problem] = []
    for folder in newest.values():
        try:
            reports.append(_report(store, runs, folder, texts))
        except Trouble as trouble:
            problems.extend(trouble.problems)
    return tuple(sorted(reports, key=lambda each: -(each.started or 0.0))), tuple(problems)


SHOWN = 5
"""Runs that `invoke status` shows."""


class LastTest(Struct, frozen=True):
    """One run: the name of its folder, kind of test, stack, nodes, when it began (seconds since 1970, 0 where it
    does not say), and how it ended in words. Figures are judged by `invoke report RUN`, which reads the whole run."""

    run: str
    kind: str
    stack: str
    nodes: tuple[str, ...]
    started: float
    verdict: str

    @property
    def line(self) -> str:
        """The run for a person."""
        when = f", {moment(self.started):%Y-%m-%d %H:%M} UTC" if self.started else ""
        return f"test {self.kind} of {self.stack} on {fold(self.nodes)}{when}: {self.verdict} ({self.run})"


def newest(
    transport: Transport, hosts: Iterable[Host], facts: Mapping[str, Facts], *, recipes: Mapping[str, str], user: str
) -> tuple[LastTest, ...]:
    """Return the newest runs in the prefix, read as `user` through the first of `hosts` that sees it; none where
    nobody does. Trouble where they cannot be read."""
    host = next((host for host in hosts if facts[host.name].prefix.exists), None)
    if host is None:
        return ()
    store = PrefixRuns(transport, PrefixHandle(host, facts[host.name].prefix.path, recipes, user))
    runs = store.values(most=SHOWN)
    return tuple(last_test(PurePosixPath(folder).name, values) for folder, values in runs.items())


def last_test(run: str, values: Mapping[str, str]) -> LastTest:
    """Return a run by the values of its run.env."""
    nodes = tuple(name for name in values.get("nodes", "").split(",") if name)
    started = number(values.get("started", "")) or 0.0
    return LastTest(run, values.get("kind", "unknown"), values.get("stack", "unknown"), nodes, started, verdict(values))


def verdict(values: Mapping[str, str]) -> str:
    """Return in words how a run ended."""
    code = values.get("code", "")
    if not code:
        return "has not ended, or was cut off"
    return "ended well" if code == "0" else f"failed, exit code {code}"
