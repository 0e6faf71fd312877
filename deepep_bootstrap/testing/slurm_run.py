"""One test submitted to Slurm and followed to its end."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence

from msgspec import Struct

from deepep_bootstrap.core.errors import OK, TROUBLE, VERDICT, Problem, Trouble
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.core.recipes import compose
from deepep_bootstrap.core.records import Records, read_records
from deepep_bootstrap.core.text import duration
from deepep_bootstrap.inventory.forms import SUBMITTED
from deepep_bootstrap.prefix.offer import StackRecord
from deepep_bootstrap.prefix.test_kinds import END_MARGIN, Kind
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Job, Reply, Transport
from deepep_bootstrap.remote.script import OnLine
from deepep_bootstrap.slurm import commands

START_LIMIT = 600
"""Seconds a test's job may wait for its nodes."""

LATER = 2
"""Minutes by which Slurm's time limit exceeds ours, so that ours fires first and can report from the logs."""

ASK_LIMIT = 60.0
"""Seconds for a question to Slurm; a controller that does not answer keeps sbatch for longer."""

MAY_PASS = ("node configuration is not available", "Required node not available")
"""What Slurm says of nodes that are drained or down, beside what it says of a request that no node can ever meet."""

SUBMIT = ("lib.sh", "prefix/lib/share.sh", "test/lib/place.sh", "test/submit.sh")

ENDED, REFUSED, LATE, LOST, HUNG, UNWRITTEN = "ended", "refused", "late", "lost", "hung", "unwritten"
STOPPED = "stopped"

TAKEN_AWAY = {"CANCELLED", "PREEMPTED"}
"""States of a job that somebody else ended."""

NO_OUTPUT = 128 + 53
"""The exit code of a job whose node could not open the file of its output: Slurm reports that by signal 53, which
nothing else sends."""


class TestRequest(Struct, frozen=True):
    """One test to run: its kind, the stack, words for its script, nodes by number, and by name where not just any
    will do. `name` is the run's, `start_limit` and `time_limit` are seconds that it may wait for nodes and run,
    `user` who runs it ("" for the connection's own user): whoever may write in the prefix, as root may not on many a
    network filesystem. `capability`: the largest compute capability of the hosts it runs on, where they are known;
    the file asks the GPUs else."""

    kind: Kind
    record: StackRecord
    name: str
    nodes: int
    time_limit: int
    args: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    start_limit: int = START_LIMIT
    user: str = ""
    capability: str = ""

    @property
    def file(self) -> str:
        """Return the sbatch file on the prefix."""
        return f"{self.record.prefix}/sbatch/{self.record.key}/{self.kind.name}-test.sbatch"

    @property
    def env(self) -> dict[str, str]:
        """Return what every way of running it has to know: the file, the prefix, the run, and when a test without an
        end is to end."""
        env = {"FILE": self.file, "PREFIX": self.record.prefix, "RUN": self.name}
        if self.capability:
            env["DEEPEP_TEST_CAPABILITY"] = self.capability
        if self.kind.endless:
            env["DEEPEP_TEST_SECONDS"] = str(max(self.time_limit - END_MARGIN, self.time_limit // 2, 1))
        return env

    @property
    def options(self) -> tuple[str, ...]:
        """Return the options for sbatch; those of a command line win over those in the file."""
        minutes = -(-self.time_limit // 60) + LATER
        named = (f"--nodelist={commands.fold(self.named)}",) if self.named else ()
        return (f"--nodes={self.nodes}", f"--time={minutes}", *named)


class LastOutput(Struct, frozen=True):
    """The state of one log of a node or a rank when the time was over: its name, seconds since its last line, lines,
    and that line."""

    log: str
    age: int
    lines: int
    last: str


class TestRunResult(Struct, frozen=True):
    """The result of running a test. `state` is ended, refused, late (never started), hung (the time was over),
    stopped (by somebody else), unwritten (its node does not see its folder) or lost; `outcome` says it for people;
    `host` sees the run's folder at `place` ("" where nothing was begun); `log` is what the job printed, where that is
    not in the folder by itself; `last_output` the last lines of its logs when the time was over. `where` is the job
    and its nodes, `ending` what whoever followed it saw of its end ("" of one that passed)."""

    outcome: Outcome
    state: str
    host: Host
    place: str = ""
    log: str = ""
    last_output: tuple[LastOutput, ...] = ()
    where: str = ""
    ending: str = ""

    @property
    def began(self) -> bool:
        """Whether a test ran at all, so that it left something."""
        return bool(self.place) and self.state in {ENDED, HUNG, LOST, STOPPED}


def run_name(kind: str) -> str:
    """Return a fresh name for a run: UTC time, kind, random part."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{kind}-{secrets.token_hex(3)}"


def submit(
    transport: Transport, host: Host, request: TestRequest, recipes: Mapping[str, str], *, on_line: OnLine | None = None
) -> TestRunResult:
    """Submit a test on `host`, a client of Slurm, and follow it to its end; its output goes to `on_line` line by line.

    An interrupt ends the job as well: the script on the host is watched. Trouble where it could not be followed.
    """
    env = {
        **request.env,
        "START_LIMIT": str(request.start_limit),
        "TIME_LIMIT": str(request.time_limit),
        "OPTIONS": "\n".join(request.options),
    }
    job = Job(compose(recipes, *SUBMIT), request.args, env, request.user, watched=True, timeout=None, log=True)
    reply = transport.run(host, job, _without_data(on_line))
    if reply.code:
        raise Trouble(
            Problem(host.name, f"the {request.kind.name} test could not be followed", reply.err.strip()[-400:])
        )
    return submitted(reply, request, host)


def never_runs(transport: Transport, host: Host, request: TestRequest) -> str:
    """Return why Slurm would refuse a test, in its own words, "" where it takes it: sbatch asks and submits nothing.
    Nodes that are drained or down keep it waiting, which is no refusal."""
    reply = transport.run(
        host,
        Job(
            'sbatch --test-only "$@" 2>&1',
            (*request.options, request.file, *request.args),
            user=request.user,
            timeout=ASK_LIMIT,
        ),
    )
    answer = reply.out.strip().rpartition("\n")[2]
    return answer[-200:] if reply.code and not any(words in answer for words in MAY_PASS) else ""


def submitted(reply: Reply, request: TestRequest, host: Host) -> TestRunResult:
    """Return the result, from what test/submit.sh printed; Trouble for an answer that cannot be read."""
    records = read_records(reply.out, SUBMITTED, reply.host, "test/submit.sh")
    place = records.text("place")
    outputs = tuple(
        LastOutput(log, int(age), int(lines), str(last))
        for (log, age, lines), last in records.rows_with_text("said")
        if age.isdecimal() and lines.isdecimal()
    )
    end = _end_of(records, request)
    log = f"{place}/job.log" if end.state in {ENDED, HUNG, STOPPED} else ""
    state = "failed" if end.code else "done"
    detail = ": ".join(filter(None, (end.where, end.ending))) if end.code else f"{end.where} passed"
    outcome = Outcome(f"{request.kind.name} test", reply.host, state, detail, reply.seconds, end.code, log)
    return TestRunResult(outcome, end.state, host, place, last_output=outputs, where=end.where, ending=end.ending)


class _End(Struct, frozen=True):
    """The end of a test: one of the states of a TestRunResult, the job, what was seen of its end ("" where it passed),
    and the exit code."""

    state: str
    where: str
    ending: str
    code: int = TROUBLE


def _end_of(records: Records, request: TestRequest) -> _End:
    """Return how a submitted test ended, by the records of test/submit.sh."""
    if refused := str(records.shown("refused")):
        return _End(REFUSED, "", refused if refused.startswith("sbatch: ") else f"sbatch: {refused}")
    job = commands.parse_job(records.text("record"))
    name = f"job {records.text('job')}"
    if job is None:
        return _End(LOST, name, "Slurm has lost sight of it")
    if records.text("late"):
        limit = duration(request.start_limit)
        return _End(LATE, name, f"did not start in {limit}: {job.reason or job.state}")
    where = f"{name} on {commands.fold(job.nodes) or 'no node'}"
    if records.text("hung") or job.state == "TIMEOUT":
        return _End(HUNG, where, f"no end after {duration(request.time_limit)}", VERDICT)
    if job.state == "FAILED" and job.code == NO_OUTPUT:
        place = records.text("place")
        problem = Problem("", f"the node cannot write {place}", wanted="a folder that all nodes see")
        return _End(UNWRITTEN, where, problem.message)
    if job.state in TAKEN_AWAY:
        return _End(STOPPED, where, f"the job was {job.state.lower()} by somebody else", VERDICT)
    if job.state == "COMPLETED" and job.code == 0:
        return _End(ENDED, where, "", OK)
    code = f"exit code {job.code}"
    return _End(ENDED, where, code if job.state == "FAILED" else f"{job.state}, {code}", VERDICT)


def _without_data(on_line: OnLine | None) -> OnLine | None:
    """Return a callback for the job's own lines alone."""
    if on_line is None:
        return None
    keys = tuple(f"{key}=" for key in (*SUBMITTED.single, *SUBMITTED.many))
    return lambda line: None if line.startswith(keys) else on_line(line)


def silent(last_output: Sequence[LastOutput], nodes: Sequence[str]) -> tuple[str, ...]:
    """Return what to say of a test that did not end: what each node said last, the one that is silent longest first,
    then ranks that are behind those with the same place on other nodes (the first rank of a node prints, the others
    mostly do not)."""
    found = []
    for one in sorted((one for one in last_output if one.log.startswith("node-")), key=lambda one: (-one.age, one.log)):
        index, _, host = one.log.removeprefix("node-").removesuffix(".log").partition("-")
        words = f"said last, {duration(one.age)} before: {one.last}" if one.last else "said nothing at all"
        found.append(f"node {index} ({host}) {words}")
    ranks = {
        int(name): one
        for one in last_output
        if (name := one.log.removeprefix("rank-").removesuffix(".log")).isdecimal()
    }
    local = max(len(ranks) // max(len(nodes), 1), 1)
    for rank, one in sorted(ranks.items()):
        most = max((other.lines for number, other in ranks.items() if number % local == rank % local), default=0)
        if one.lines < most:
            found.append(f"rank {rank} is {most - one.lines} lines behind; it said last: {one.last or 'nothing'}")
    return tuple(found)
