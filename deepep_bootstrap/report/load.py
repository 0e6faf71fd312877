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
from deepep_bootstrap.core.text import moment, number, size
from deepep_bootstrap.inventory import seen
from deepep_bootstrap.inventory.facts import Facts, read_facts_json
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.prefix.access import reach
from deepep_bootstrap.prefix.generations import PrefixHandle
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Job, Transport
from deepep_bootstrap.report.compose import PAST_RUNS, compose, keyed, rerun_words
from deepep_bootstrap.report.model import Past, Report
from deepep_bootstrap.testing import run_folder
from deepep_bootstrap.testing.run_folder import (
    VALUES,
    VERDICT,
    Judgement,
    RunFiles,
    RunVerdict,
    TestRun,
    judged_by_values,
    parse_judgement,
    parse_values,
)

SITE_FILES = (assess.CAUSES, reference_file.FILE)
FOLDERS_TO_PREFIX = 3
"""A run's folder is PREFIX/logs/tests/RUN."""


def read_run(flags: Flags, name: str, texts: Mapping[str, str]) -> tuple[Report, str]:
    """Return the report of a run and where its folder is. `name` is that folder on this machine, or with --hosts (or
    --prefix) the run's name or folder there, "" for the newest. `texts` are the files of env/. Trouble where there
    is no such run, or it cannot be read."""
    folder = Path(os.path.expanduser(name))
    if name and os.path.isfile(folder / VALUES):
        folder = folder.resolve()
        local = LocalRuns(folder.parent)
        return _report(local, local.records(), str(folder), texts), str(folder)
    if not flags.hosts and not flags.prefix:
        what = "no such run on this machine" if name else "no run named"
        wanted = (
            f"the folder of a run (it has a file {VALUES}), or --hosts or --prefix and a run's name "
            f"or nothing for the newest"
        )
        remedy = shlex.join(["invoke", "report", *filter(None, [name]), "--hosts=hosts/b200.txt"])
        raise Trouble(Problem(name or "report", what, wanted=wanted, try_=remedy))
    with reach(flags, empty=True) as reached:
        store = PrefixRuns(reached.transport, reached.place)
        runs = store.records()
        found = choose_run(runs, name, store.where)
        return _report(store, runs, found, texts), f"{found} on {reached.place.host.name}"


def _report(
    store: LocalRuns | PrefixRuns, runs: Mapping[str, RunRecord], folder: str, texts: Mapping[str, str]
) -> Report:
    """Return the report of the run in a folder, over the earlier ones of `runs`, which are by folder."""
    collected = store.files(folder)
    run = run_folder.of_files(PurePosixPath(folder).name, collected.files)
    names = like(run, runs)
    logs = store.logs(names)
    earlier = tuple(past(name, runs[name], logs.get(name, {})) for name in names)
    remarks = tuple(f"{size(missing)} of {file} are left out" for file, missing in collected.cut.items())
    return made(run, texts, store.site_files(folder), past=earlier, remarks=remarks)


def choose_run(runs: Mapping[str, RunRecord], name: str, where: str) -> str:
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
    html = f"--html={file or f'{Path(name).name}.html'}"
    return shlex.join(["invoke", "report", name, *given(flags), html])


def rerun(flags: Flags, run: TestRun) -> str:
    """Return the command that runs the same test again, "" for a run that does not say what it was."""
    words = rerun_words(run)
    return shlex.join([*words, *given(flags)]) if words else ""


def given(flags: Flags) -> list[str]:
    """Return the flags that say which hosts and which prefix."""
    named = (("hosts", flags.hosts), ("limit", flags.limit), ("prefix", flags.prefix))
    return [f"--{flag}={value}" for flag, value in named if value]


HISTORY = ("lib.sh", "test/history.sh")
MOST = 1000
"""Runs that are looked at, newest first."""

LARGEST, TOTAL = 1 << 20, 32 << 20
"""Bytes of one earlier log and of all of them: a longer log is no test of the usual length."""

LIMIT = 300.0


class RunRecord(Struct, frozen=True):
    """What the list of runs knows of one: the values of its run.env, and the verdict that was kept with it."""

    values: Mapping[str, str]
    kept: Judgement | None = None

    @property
    def judgement(self) -> Judgement:
        """Return the verdict, as far as these say it."""
        return judged_by_values(self.values, self.kept)


class LocalRuns(Struct, frozen=True):
    """The runs beside each other in a folder of this machine, which need not be one of a prefix. They are read without
    a shell, so that a copied folder can be reported on any machine."""

    folder: Path

    def records(self) -> dict[str, RunRecord]:
        """Return the newest runs by folder, the newest first. A run whose values cannot be read has none."""
        try:
            paths = sorted(self.folder.glob(f"*/{VALUES}"), reverse=True)[:MOST]
            return {str(path.parent): _record(_text(path), _text(path.with_name(VERDICT))) for path in paths}
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

    def records(self, most: int = MOST) -> dict[str, RunRecord]:
        """Return the `most` newest runs by folder, the newest first. A run whose values cannot be read has none."""
        found = self._read((), most)
        folders = [path.removesuffix(f"/{VALUES}") for path in found if path.endswith(f"/{VALUES}")]
        seen.keep(seen.RUNS, self.place.prefix, (PurePosixPath(folder).name for folder in folders), add=True)
        return {
            folder: _record(found[f"{folder}/{VALUES}"], found.get(f"{folder}/{VERDICT}", "")) for folder in folders
        }

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


def _text(path: Path) -> str:
    """Return the text of a file, "" for one that is not there."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _record(values: str, kept: str) -> RunRecord:
    """Return a run by the texts of its run.env and its verdict.json."""
    try:
        return RunRecord(parse_values(values, VALUES), parse_judgement(kept))
    except Trouble:
        return RunRecord({})


def like(run: TestRun, runs: Mapping[str, RunRecord]) -> tuple[str, ...]:
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

    known = [folder for folder, record in runs.items() if fits(folder, record.values)]
    return tuple(sorted(known, key=lambda folder: number(runs[folder].values["started"]) or 0.0)[-PAST_RUNS:])


def past(folder: str, record: RunRecord, logs: Mapping[str, str]) -> Past:
    """Return what one run gave, by its logs of nodes; a run that failed may have figures too."""
    started = number(record.values.get("started", "")) or 0.0
    bad = record.judgement.verdict in {RunVerdict.FAILED, RunVerdict.STOPPED, RunVerdict.OPEN}
    return Past(PurePosixPath(folder).name, started, bad, keyed(read_logs(logs)))


def last_of_each(store: PrefixRuns, texts: Mapping[str, str]) -> tuple[tuple[Report, ...], tuple[Problem, ...]]:
    """Return the reports of the last run of each kind and stack, the newest first, and why some cannot be read."""
    runs = store.records()
    newest: dict[tuple[str, str], str] = {}
    for folder, record in runs.items():
        if kind := record.values.get("kind"):
            newest.setdefault((kind, record.values.get("stack", "")), folder)
    reports: list[Report] = []
    problems: list[Problem] = []
    for folder in newest.values():
        try:
            reports.append(_report(store, runs, folder, texts))
        except Trouble as trouble:
            problems.extend(trouble.problems)
    return tuple(sorted(reports, key=lambda each: -(each.started or 0.0))), tuple(problems)


class LastTest(Struct, frozen=True):
    """One run: the name of its folder, kind of test, stack, nodes, when it began (seconds since 1970, 0 where it
    does not say), the word of its verdict, and why."""

    run: str
    kind: str
    stack: str
    nodes: tuple[str, ...]
    started: float
    verdict: str
    why: str

    @property
    def line(self) -> str:
        """The run for a person."""
        when = f", {moment(self.started):%Y-%m-%d %H:%M} UTC" if self.started else ""
        test = f"test {self.kind} of {self.stack} on {fold(self.nodes)}{when}"
        return f"{test}: {self.verdict} ({self.why}; {self.run})"


def newest(
    transport: Transport, hosts: Iterable[Host], facts: Mapping[str, Facts], *, recipes: Mapping[str, str], user: str
) -> tuple[LastTest, ...]:
    """Return the last run of each kind and stack in the prefix, the newest first, read as `user` through the first of
    `hosts` that sees it; none where nobody does. Trouble where they cannot be read."""
    host = next((host for host in hosts if facts[host.name].prefix.exists), None)
    if host is None:
        return ()
    store = PrefixRuns(transport, PrefixHandle(host, facts[host.name].prefix.path, recipes, user))
    runs = [last_test(PurePosixPath(folder).name, record) for folder, record in store.records().items()]
    last = {(run.kind, run.stack): run for run in reversed(runs)}
    return tuple(run for run in runs if last[run.kind, run.stack] is run)


def list_runs(flags: Flags, folder: str) -> tuple[tuple[LastTest, ...], str]:
    """Return the runs, newest first, and where they are: of a folder of this machine that holds runs, else of the
    prefix of --hosts or --prefix. Trouble where neither is named."""
    if folder:
        path = Path(os.path.expanduser(folder)).absolute()
        if not path.is_dir():
            wanted = "a folder of runs on this machine, or --hosts or --prefix"
            raise Trouble(Problem(folder, "no such folder", wanted=wanted, try_="invoke report --list --hosts=…"))
        return _listed(LocalRuns(path).records()), str(path)
    if not flags.hosts and not flags.prefix:
        wanted = "--hosts or --prefix, or a folder of runs on this machine"
        raise Trouble(
            Problem("--list", "whose runs?", wanted=wanted, try_="invoke report --list --hosts=hosts/b200.txt")
        )
    with reach(flags, empty=True) as reached:
        store = PrefixRuns(reached.transport, reached.place)
        return _listed(store.records()), store.where


def _listed(records: Mapping[str, RunRecord]) -> tuple[LastTest, ...]:
    return tuple(last_test(PurePosixPath(folder).name, record) for folder, record in records.items())


def last_test(run: str, record: RunRecord) -> LastTest:
    """Return a run as the list of runs knows it."""
    values, judgement = record.values, record.judgement
    nodes = tuple(name for name in values.get("nodes", "").split(",") if name)
    started = number(values.get("started", "")) or 0.0
    words = judgement.verdict.value, judgement.why
    return LastTest(run, values.get("kind", "unknown"), values.get("stack", "unknown"), nodes, started, *words)
