"""One test in a cluster: its objects made, its pods waited for, their logs brought into a run's folder on this machine,
and the objects deleted again.

The folder is that of any other test (testing.run_folder). A pod's log has everything: what the test prints, and between
those lines the files of the run, since nothing else of a pod is left when it has ended (in_pod.hand_over).
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import shutil
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from deepep_bootstrap.core.errors import OK, TROUBLE, VERDICT, Problem, Trouble
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.core.text import duration, plain
from deepep_bootstrap.inventory.facts import Facts, facts_json, parse_facts
from deepep_bootstrap.kube import runs, waiting
from deepep_bootstrap.kube.client import Object
from deepep_bootstrap.kube.runs import ClusterRun
from deepep_bootstrap.kube.waiting import Gone, Waiting
from deepep_bootstrap.prefix.test_kinds import Kind
from deepep_bootstrap.remote.host import THIS_MACHINE
from deepep_bootstrap.remote.jobs import LOG_LIMIT
from deepep_bootstrap.remote.script import OnLine
from deepep_bootstrap.testing import run_folder
from deepep_bootstrap.testing.slurm_run import ENDED, HUNG, LATE, LOST, STOPPED, LastOutput, TestRunResult

VIA = "kubernetes"
OWN, SHOWN = "deepep-say: ", "deepep: "
"""What begins a line of the entry point's own, and how it stands in job.log: a node's log has the test's alone."""

HANDED = "deepep-file: "
"""What begins a line of a pod's log that is a part of a file: `deepep-file: NAME PART/PARTS BASE64`, the file deflated.
kubernetes/in_pod.py prints them."""

PART = re.compile(r"(?P<name>[a-z0-9][a-z0-9./-]{0,60}) (?P<part>\d{1,5})/(?P<parts>\d{1,5}) (?P<data>[A-Za-z0-9+/=]*)")
COPIED = re.compile(r"rank-\d{1,5}\.log")
ABOUT, FACTS, COUNTERS = "about", "facts", re.compile(r"counters/(?P<when>before|after)")
LARGEST = 64 * 1024 * 1024
"""Bytes of one file of a pod, deflated and not."""

LOOK = 1.0
"""Seconds between two looks at the pods."""

EVENTS_AGE = 5.0
"""Seconds for which events are not asked for again: each pod is a request."""

GRACE = 20.0
"""Seconds in which the other pods may end by themselves when one has failed or is lost: the Job ends them, and their
last lines say what they saw."""

SILENCE = 60.0
"""Seconds in which the other pods must be known to have ended when one has failed: a pod that is deleted has 30 s
(terminationGracePeriodSeconds), and of a node that is off a cluster says so after 50 (--node-monitor-grace-period of
kube-controller-manager), when the test may have failed for it on the others already."""

OVER = frozenset(("Succeeded", "Failed"))
BEGUN = frozenset(("Running", *OVER))
"""Phases of a pod that has ended, and of one that has begun."""

ABOUT_KEYS = ("stack", "module", "prefix", "deepep", "generation", "lock_digest", "script")
"""Of a run's values, those that the image says."""


class ClusterTest(Struct, frozen=True):
    """A test to run: its kind, the run's name, nodes, seconds to wait for them and to run, words for its script, and
    the folder for what it leaves."""

    kind: Kind
    name: str
    nodes: int
    start_limit: int
    time_limit: int
    folder: Path
    args: str = ""


class Ran(Struct, frozen=True):
    """How it went: the result as every other way of running a test has it, the facts of the nodes as their pods saw
    them, what could not be read or deleted, and the node that does not answer any more ("" for none)."""

    result: TestRunResult
    facts: Mapping[str, Facts]
    problems: tuple[Problem, ...] = ()
    lost: str = ""


class _End(Struct, frozen=True):
    """How the pods ended: a state of TestRunResult, what was seen of it ("" where all passed), the exit code, and which
    node was lost."""

    state: str
    ending: str = ""
    code: int = OK
    remedy: str = ""
    lost: str = ""


def run_in_cluster(run: ClusterRun, objects: Sequence[Object], test: ClusterTest, *, on_line: OnLine | None) -> Ran:
    """Run a test and return how it went; its output goes to `on_line` as it comes. What was made is deleted whatever
    happens; whoever interrupts it leaves a run that says so. Trouble where the objects are refused."""
    began = time.monotonic()
    follower = _Follower(run, test, on_line)
    problems: list[Problem] = []
    run.make(objects)
    try:
        end = follower.work()
    except BaseException:
        follower.give_up()
        follower.close()
        for problem in run.remove():
            (on_line or print)(f"deepep: {problem}")
        raise
    # The logs were read before the pods are deleted.
    follower.close()
    problems += run.remove()
    return follower.ran(end, time.monotonic() - began, problems)


class _PodLog:
    """What one pod says: its lines in the log of its node, and the files between them."""

    def __init__(self, index: int, pod: Object, test: ClusterTest, job: _JobLog) -> None:
        self.index, self.name = index, pod["metadata"]["name"]
        self.node = _node_of(pod)
        self.path = f"node-{index}-{self.node}.log"
        self.parts: dict[str, dict[int, str]] = {}
        self.wanted: dict[str, int] = {}
        self.count, self.last, self.when = 0, "", time.monotonic()
        self._job, self._room = job, LOG_LIMIT
        self._file, self._lock = (test.folder / self.path).open("a", encoding="utf-8"), threading.Lock()

    def take(self, line: str) -> None:
        """Take one line."""
        if line.startswith(HANDED):
            self._take_part(line.removeprefix(HANDED))
            return
        if line.startswith(OWN):
            self._job.say(line.removeprefix(OWN))
            return
        self._room -= len(line) + 1
        with self._lock:
            if self._room >= 0 and not self._file.closed:
                self._file.write(f"{line}\n")
                self._file.flush()
        if line.strip():
            self.count, self.last, self.when = self.count + 1, plain(line.strip())[:160], time.monotonic()
        self._job.show(line)

    def _take_part(self, text: str) -> None:
        match = PART.fullmatch(text)
        if match and sum(map(len, self.parts.get(match["name"], {}).values())) < LARGEST:
            self.parts.setdefault(match["name"], {})[int(match["part"])] = match["data"]
            self.wanted[match["name"]] = int(match["parts"])

    def files(self) -> dict[str, bytes]:
        """Return the files that came whole, by name."""
        found: dict[str, bytes] = {}
        for name, parts in self.parts.items():
            if sorted(parts) == list(range(1, self.wanted[name] + 1)):
                try:
                    data = base64.b64decode("".join(parts[number] for number in sorted(parts)), validate=True)
                    found[name] = zlib.decompressobj().decompress(data, LARGEST)
                except (binascii.Error, zlib.error):
                    continue
        return found

    def close(self) -> None:
        """Close its file; lines that still come are not kept."""
        with self._lock:
            self._file.close()


class _JobLog:
    """What is said about the test, in job.log: what it is, why pods waited, how it ended. What it prints is in the logs
    of its nodes alone: put together by when it came, lines of two nodes would look like two tests."""

    def __init__(self, path: Path, on_line: OnLine | None) -> None:
        self._path, self._on_line, self._lock = path, on_line, threading.Lock()

    def show(self, line: str) -> None:
        """Show one line of the test."""
        with self._lock:
            if self._on_line:
                self._on_line(line)

    def say(self, line: str) -> None:
        """Keep and show one line about the test."""
        self.show(f"{SHOWN}{line}")
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(f"{SHOWN}{line}\n")


class _Follower:
    """Waits for the pods of a run, follows their logs, and notices how they end."""

    def __init__(self, run: ClusterRun, test: ClusterTest, on_line: OnLine | None) -> None:
        self._run, self._test = run, test
        self._stop = threading.Event()
        self._logs: dict[str, _PodLog] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._pods: dict[int, Object] = {}
        self._started = 0.0
        self._known_events: Sequence[Object] = ()
        self._events_until = 0.0
        test.folder.mkdir(parents=True, exist_ok=True)
        (test.folder / "counters").mkdir(exist_ok=True)
        self._job = _JobLog(test.folder / "job.log", on_line)

    def work(self) -> _End:
        """Wait until all pods run, and then until they have ended."""
        late = self._await_start()
        if late is not None:
            return late
        self._started = time.time()
        self._note({"started": str(int(self._started))})
        end = self._await_end()
        self._await_last_lines()
        return end

    def _await_last_lines(self) -> None:
        """Wait until the logs are read to their end, but for those of pods that still run, which have none."""
        run = {pod["metadata"]["name"] for pod in self._look() if _phase(pod) not in OVER}
        limit = time.monotonic() + GRACE
        for name, thread in self._threads.items():
            if name not in run:
                thread.join(max(0.0, limit - time.monotonic()))

    def _look(self) -> list[Object]:
        """Return the newest pod of each index, and follow those that begin to run; [] where the API is away."""
        try:
            pods = self._run.pods()
        except Trouble as trouble:
            if not trouble.may_pass:
                raise
            return list(self._pods.values())
        for pod in pods:
            self._pods[runs.index_of(pod)] = pod
            name = pod["metadata"]["name"]
            if name not in self._logs and _phase(pod) in BEGUN:
                log = self._logs[name] = _PodLog(runs.index_of(pod), pod, self._test, self._job)
                thread = threading.Thread(
                    target=self._run.follow, args=(name, log.take, self._stop), name=f"log {name}", daemon=True
                )
                thread.start()
                self._threads[name] = thread
        return pods

    def _await_start(self) -> _End | None:
        """Return None when all pods run or one has failed, else why they never did."""
        end = time.monotonic() + self._test.start_limit
        told = ""
        while True:
            pods = self._look()
            phases = [_phase(pod) for pod in pods]
            if "Failed" in phases or sum(phase in BEGUN for phase in phases) >= self._test.nodes:
                return None
            why = self._explain(pods)
            if why and why.text != told:
                told = why.text
                self._job.say(told)
            if (why and why.final) or time.monotonic() > end:
                return _never(why, pods, self._test)
            self._stop.wait(LOOK)

    def _explain(self, pods: Sequence[Object]) -> Waiting | None:
        try:
            waits = [pod for pod in pods if _phase(pod) == "Pending"]
            owner = self._run.owner() if len(pods) < self._test.nodes else None
            return waiting.explain(pods, self._events(waits), self._test.nodes, owner)
        except Trouble as trouble:
            if not trouble.may_pass:
                raise
            return None

    def _events(self, pods: Sequence[Object]) -> Sequence[Object]:
        if time.monotonic() > self._events_until:
            self._known_events = self._run.events(pods)
            self._events_until = time.monotonic() + EVENTS_AGE
        return self._known_events

    def _await_end(self) -> _End:
        limit, since = time.monotonic() + self._test.time_limit, 0.0
        while True:
            there = {pod["metadata"]["name"] for pod in self._look()}
            pods = list(self._pods.values())
            lost = self._lost(pods, there)
            if lost or _first_failed(pods) is not None:
                since = since or time.monotonic()
            if self._is_over(there, since, GRACE if lost else SILENCE):
                return _ended(pods, lost)
            if time.monotonic() > limit:
                return _End(HUNG, f"no end after {duration(self._test.time_limit)}", VERDICT)
            self._stop.wait(LOOK)

    def _is_over(self, there: set[str], since: float, patience: float) -> bool:
        """Whether all pods have ended; when one is lost or has failed `since` then (0: none), those that are there, or
        they had their time."""
        over = {pod["metadata"]["name"] for pod in self._pods.values() if _phase(pod) in OVER}
        if len(over) == self._test.nodes:
            return True
        return bool(since) and (there <= over or time.monotonic() > since + patience)

    def _lost(self, pods: Sequence[Object], there: set[str]) -> Gone | None:
        """Return why a pod was ended by others, is lost with its node, or is not there any more."""
        try:
            events = self._events([pod for pod in pods if _phase(pod) == "Running"])
        except Trouble:
            events = []
        found = [gone for pod in pods for gone in [waiting.gone(pod, events)] if gone]
        # The Job deletes the others after the first one.
        deleted = sorted((pod for pod in pods if _is_deleted(pod, there)), key=_deletion)
        # When one has failed, the Job deletes the others.
        failed = any(_phase(pod) == "Failed" and not _deletion(pod) for pod in pods)
        if deleted and not found and not failed:
            found.append(Gone(f"pod {deleted[0]['metadata']['name']} was deleted by somebody else", taken=True))
        # What took the first one is why the others ended.
        return next((gone for gone in found if not gone.taken), found[0] if found else None)

    def close(self) -> None:
        """Follow no pod any more."""
        self._stop.set()

    def give_up(self) -> None:
        """Say in the run's folder that whoever followed it was stopped."""
        self._stop.set()
        if not self._logs:
            shutil.rmtree(self._test.folder)
            return
        self._write_files()
        self._judge(run_folder.RunVerdict.STOPPED, "whoever followed it was stopped")

    def _judge(self, verdict: run_folder.RunVerdict, why: str) -> None:
        """Write the verdict on a run that nobody judges by its figures."""
        text = run_folder.judgement_text(run_folder.Judgement(verdict, why))
        (self._test.folder / run_folder.VERDICT).write_text(text, encoding="utf-8")

    def ran(self, end: _End, seconds: float, problems: list[Problem]) -> Ran:
        """Return how it went, and write the rest of the folder."""
        began = bool(self._started)
        facts: dict[str, Facts] = {}
        if began:
            code = _code(list(self._pods.values()), end)
            facts, faults = self._write_files(code)
            problems = [*faults, *problems]
            self._note({"ended": str(int(time.time())), "code": str(code)})
        elif self._logs:
            # Some pods started and others never did: what those printed is kept, with the reason.
            facts, faults = self._write_files()
            problems = [*faults, *problems]
            self._judge(run_folder.RunVerdict.FAILED, end.ending)
        else:
            shutil.rmtree(self._test.folder)
        nodes = fold(log.node for log in self._logs.values()) if self._logs else "no node"
        where = f"{self._run.name} on {nodes}"
        detail = f"{where}: {end.ending}" if end.code else f"passed on {nodes}"
        if end.remedy:
            detail += f". Try: {end.remedy}"
        title = f"{self._test.kind.name} test"
        state = "failed" if end.code else "done"
        log = str(self._test.folder / "job.log") if self._logs else ""
        place = str(self._test.folder) if began else ""
        outcome = Outcome(title, self._run.cluster.context, state, detail, seconds, end.code, log)
        last = tuple(self._last_output()) if end.state == HUNG else ()
        result = TestRunResult(outcome, end.state, THIS_MACHINE, place, log, last, where, end.ending)
        return Ran(result, facts, tuple(problems), end.lost)

    def _last_output(self) -> list[LastOutput]:
        now = time.monotonic()
        return [LastOutput(log.path, int(now - log.when), log.count, log.last) for log in self._logs.values()]

    def _note(self, values: Mapping[str, str]) -> None:
        """Add values to run.env."""
        lines = [f"{key}={plain(' '.join(value.split()))[:4096]}\n" for key, value in values.items()]
        with (self._test.folder / run_folder.VALUES).open("a", encoding="utf-8") as file:
            file.writelines(lines)

    def _write_files(self, code: int | None = None) -> tuple[dict[str, Facts], list[Problem]]:
        """Write the files that pods handed over, and what the run was and its exit code; return the facts of the nodes,
        and what cannot be read."""
        facts: dict[str, Facts] = {}
        faults: list[Problem] = []
        about: dict[str, str] = {}
        logs = sorted(self._logs.values(), key=lambda log: log.index)
        for log in logs:
            log.close()
            files = log.files()
            self._place_files(files, log.node)
            about |= _about(files.get(ABOUT, b"")) if log.index == 0 else {}
            try:
                if FACTS in files:
                    facts[log.node] = parse_facts(files[FACTS].decode("utf-8", "replace"), log.node)
            except Trouble as trouble:
                faults += trouble.problems
        values = {
            "kind": self._test.kind.name,
            **about,
            "via": VIA,
            "job": self._run.name,
            "nodes": ",".join(log.node for log in logs),
            "args": self._test.args,
            "time_limit": str(self._test.time_limit),
        }
        self._note(values)
        script = about.get("script", self._test.kind.name)
        if code is not None:
            self._job.say(f"{script} ended with exit code {code}")
        document = {"schema": 1, "hosts": facts_json(facts)}
        (self._test.folder / run_folder.FACTS).write_text(json.dumps(document, indent=1), encoding="utf-8")
        return facts, faults

    def _place_files(self, files: Mapping[str, bytes], node: str) -> None:
        for name, data in files.items():
            if path := _place(name, node):
                (self._test.folder / path).write_bytes(data)


def _deletion(pod: Object) -> str:
    """Return when somebody deleted a pod that is still there, "" for one that nobody did."""
    return str(pod["metadata"].get("deletionTimestamp") or "")


def _is_deleted(pod: Object, there: set[str]) -> bool:
    """Whether a pod is being deleted, or is gone without an end of its own."""
    if _deletion(pod):
        return _phase(pod) != "Succeeded"
    return pod["metadata"]["name"] not in there and runs.exit_code(pod) is None


def _phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase") or "")


def _node_of(pod: Object) -> str:
    """Return the name of a pod's node as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", str((pod.get("spec") or {}).get("nodeName") or "")) or "unknown"


def _place(name: str, node: str) -> str:
    """Return where a file that a pod handed over belongs, "" for one that does not."""
    if COPIED.fullmatch(name):
        return name
    match = COUNTERS.fullmatch(name)
    return f"counters/{node}.{match['when']}" if match else ""


def _about(data: bytes) -> dict[str, str]:
    """Return what the image says it is."""
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: found[key] for key in ABOUT_KEYS if isinstance(found.get(key), str)}


def _never(why: Waiting | None, pods: Sequence[Object], test: ClusterTest) -> _End:
    """Return the end of a test whose pods did not all start."""
    if why is not None:
        waited = "" if why.final else f"did not start in {duration(test.start_limit)}: "
        return _End(LATE, f"{waited}{why.text}", TROUBLE, why.remedy)
    running = sum(_phase(pod) == "Running" for pod in pods)
    words = f"did not start in {duration(test.start_limit)}: {running} of {test.nodes} pods run, and nothing says why"
    return _End(LATE, words, TROUBLE, "kubectl describe job, kubectl describe pod")


def _ended(pods: Sequence[Object], lost: Gone | None = None) -> _End:
    """Return how pods ended that have all ended, or of which one is `lost`."""
    if lost is not None:
        return _End(STOPPED, lost.text, VERDICT) if lost.taken else _End(LOST, lost.text, VERDICT, lost=lost.node)
    failed = _first_failed(pods)
    if failed is None:
        return _End(ENDED)
    code = runs.exit_code(failed)
    said = f"exit code {code}" if code is not None else "its container never ran"
    return _End(ENDED, f"{_node_of(failed)}: {said}", VERDICT)


def _first_failed(pods: Sequence[Object]) -> Object | None:
    """Return the pod that failed first; those that the Job ended for it have 143."""
    failed = [pod for pod in pods if _phase(pod) == "Failed"]
    by_itself = [pod for pod in failed if runs.exit_code(pod) not in {137, 143}]
    return min(by_itself or failed, key=runs.ended_at, default=None)


def _code(pods: Sequence[Object], end: _End) -> int:
    """Return the exit code of the run."""
    if end.state == HUNG:
        return 124
    failed = _first_failed(pods)
    code = runs.exit_code(failed) if failed is not None else None
    return code or (0 if end.code == OK else 1)
