"""Building of store entries on one host: a session there, sources sent once, every entry's recipe as soon as
its dependencies are there.
"""

from __future__ import annotations

import io
import json
import secrets
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from deepep_bootstrap.bootstrap.orphans import OrphanRequest, remove_orphans
from deepep_bootstrap.core import records
from deepep_bootstrap.core.errors import INTERRUPTED, TROUBLE, Problem, Trouble
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.core.recipes import compose, last_lines
from deepep_bootstrap.inventory import forms
from deepep_bootstrap.lock.model import Wheel
from deepep_bootstrap.prefix import entries
from deepep_bootstrap.prefix.entries import Entry
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import BackgroundJob, Job, Reply, Transport
from deepep_bootstrap.slurm import commands

SESSION = (
    "lib.sh",
    "prefix/lib/owner.sh",
    "prefix/lib/lock.sh",
    "prefix/lib/share.sh",
    "prefix/lib/living.sh",
    "prefix/lib/scratch.sh",
    "prefix/session.sh",
)
STEP = ("lib.sh", "prefix/lib/owner.sh", "prefix/step.sh")
RECEIVE = ("lib.sh", "prefix/receive.sh")
LONGEST_FIRST = ("nvshmem", "python", "deepep", "toolkit", "nccl", "gdrcopy")
SESSION_STEP = "build session"
INSTALLED = "installed into the store"
AGAIN = "the same command again goes on from what is published"
LOOK_EVERY = 1.0
"""Seconds between two looks whether the session still lives."""
NOISE = ("phase=", "state=", "waiting=")
STATES = {"waiting=": "waiting", "waiting for ": "waits"}
"""What an entry does that prints a line with such a beginning."""

NOTHING_NEW = ("srun: cluster configuration lacks support for cpu binding",)
"""Beginnings of lines that say nothing of a build; the log has them."""

TIMES = "timing "
"""What lines begin with that say how long compile units took, and at the end of a log the whole entry."""


class Event(Struct, frozen=True):
    """Something to show while entries are built: `state` is "running", "waiting", "waits" (it said so once more, or
    waits for another entry), "done", "unchanged", "failed", "skipped" or "stopped"; `line` the last line of output, or
    the reason."""

    entry: str
    state: str
    line: str = ""


class BuildRequest(Struct, frozen=True):
    """What to build and how. `recipes` are texts by path; `chunks` gives the tar stream of `src/<source>/…`, `wheels/…`
    and `bin/uv` for these entries; `wheels` is the closure of the python entry; `logs` a folder of the control machine;
    `indexes` None where the wheels are among the chunks, else the host gets them itself from these addresses, the
    default one first ("": uv's own).

    `user` builds ("" for the connection's own), `allocation` is what to ask Slurm for (None without Slurm), `jobs` a
    number of compilers (0: by processors and memory), `heartbeat` the locks' interval in seconds.
    """

    prefix: str
    entries: tuple[Entry, ...]
    recipes: Mapping[str, str]
    chunks: Callable[[], Iterable[bytes]]
    logs: Path
    wheels: tuple[Wheel, ...] = ()
    indexes: tuple[str, ...] | None = None
    user: str = ""
    allocation: commands.AllocationRequest | None = None
    jobs: int = 0
    heartbeat: float = 10.0
    token: str = field(default_factory=lambda: secrets.token_hex(8))


class Session(Struct, frozen=True):
    """A session on the build host: its scratch folder, its Slurm job ("" without Slurm), and the script that holds
    both."""

    scratch: str
    job: str
    holder: BackgroundJob

    @property
    def loss(self) -> str:
        """How the session ended by itself, "" while it lives. A lost connection is told by what else runs on it."""
        end = self.holder.end
        if not isinstance(end, Reply):
            return ""
        last = last_lines(end.err)
        return f"the build session ended by itself with exit code {end.code}{f': {last}' if last else ''}"


def build_all(
    transport: Transport, host: Host, request: BuildRequest, on_event: Callable[[Event], None]
) -> tuple[Outcome, ...]:
    """Build and publish the entries of `request` on `host` and return one outcome for each, in the order of the
    request.

    An entry that fails stops those that need it; the others finish. Where the session ended by itself, what it held is
    taken away, which ends what is still built, and one outcome more (SESSION_STEP) says so. Trouble (the host has gone,
    no allocation, no scratch) and ^C leave nothing running: the session's end removes scratch, and the watchers end the
    recipes.
    """
    if not request.entries:
        return ()
    with open_session(transport, host, request, on_event) as session:
        feed(transport, host, request, session)
        outcomes = _Run(transport, host, request, session=session, on_event=on_event).all()
        lost = session.loss
    told = tuple(outcomes[entry.name] for entry in request.entries)
    return (*told, Outcome(SESSION_STEP, host.name, "failed", f"{lost}; {AGAIN}", code=TROUBLE)) if lost else told


@contextmanager
def open_session(
    transport: Transport, host: Host, request: BuildRequest, on_event: Callable[[Event], None]
) -> Iterator[Session]:
    """Hold a session open on `host`: scratch, and an allocation where one is asked for; both are gone afterwards."""
    options = commands.request_options(request.allocation) if request.allocation else ()
    used = {name for entry in request.entries for name in (entry.name, *entry.needs)}
    env = {
        "PREFIX": request.prefix,
        "TOKEN": request.token,
        "ENTRIES": "\n".join(sorted(used)),
        "HEARTBEAT": f"{request.heartbeat:g}",
    }
    script = compose(request.recipes, *SESSION)
    job = Job(script, args=options, env=env, user=request.user, watched=True, timeout=None, log=True)

    def tell(line: str) -> None:
        if line.startswith("waiting="):
            for entry in request.entries:
                on_event(Event(entry.name, "waiting", line.partition("=")[2]))

    hold = transport.hold(host, job, tell, keys=("scratch", "jobid"))
    try:
        scratch = hold.wait_for("scratch", 60.0)
        number = hold.wait_for("jobid")
        session = records.read_records(f"scratch={scratch}\njobid={number}", forms.SESSION, host.name, "session.sh")
        yield Session(session.text("scratch"), "" if session.text("jobid") == "0" else session.text("jobid"), hold)
    except BaseException:
        with suppress(Trouble):  # what ended us is what is to be told
            hold.close()
        raise
    with suppress(Trouble):  # what was built is published, whatever becomes of the session
        hold.close()


def feed(transport: Transport, host: Host, request: BuildRequest, session: Session) -> None:
    """Send what the recipes work on into the session's scratch folder; Trouble when it cannot be unpacked there."""
    files = {
        f"bin/{Path(entries.RELOCATOR).name}": request.recipes[entries.RELOCATOR],
        "requirements.txt": requirements(request.wheels),
    }
    job = Job(compose(request.recipes, *RECEIVE), env={"SCRATCH": session.scratch}, user=request.user, timeout=None)
    for chunks in (tar_texts(files), request.chunks()):
        reply = transport.send(host, job, chunks)
        if reply.code:
            raise Trouble(
                Problem(
                    host.name,
                    "cannot unpack the sources there",
                    last_lines(reply.err),
                    try_=f"room in {session.scratch}",
                )
            )


def tar_texts(files: Mapping[str, str]) -> Iterator[bytes]:
    """Yield a tar stream of small text files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, text in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            member.mode = 0o644
            archive.addfile(member, io.BytesIO(text.encode()))
    yield buffer.getvalue()


def requirements(wheels: Iterable[Wheel]) -> str:
    """Return pip's requirements text for exactly these wheels, with their hashes."""
    return "".join(f"{wheel.requirement}\n" for wheel in wheels)


def manifest(entry: Entry) -> str:
    """Return the JSON text of an entry's manifest; the recipe adds where and when it was built."""
    document = {
        "schema": 1,
        "name": entry.name,
        "kind": entry.kind,
        "version": entry.version,
        "inputs": entry.inputs,
        "needs": entry.needs,
    }
    return json.dumps(document, ensure_ascii=False)


class _Run:
    """One run of the recipes of a request: which entries have ended, which can begin."""

    def __init__(
        self,
        transport: Transport,
        host: Host,
        request: BuildRequest,
        *,
        session: Session,
        on_event: Callable[[Event], None],
    ) -> None:
        self.transport, self.host, self.request, self.session, self.on_event = (
            transport,
            host,
            request,
            session,
            on_event,
        )
        self.outcomes: dict[str, Outcome] = {}
        self.started: set[str] = set()
        self.writing = threading.Lock()
        self.told_lost = False
        self.stopping = False

    def all(self) -> dict[str, Outcome]:
        """Run every entry as soon as it can begin; return the outcomes by entry name."""
        order = sorted(self.request.entries, key=lambda entry: LONGEST_FIRST.index(entry.kind))
        running: set[Future[Outcome]] = set()
        with ThreadPoolExecutor(max_workers=len(order)) as pool:
            try:
                while len(self.outcomes) < len(order):
                    running |= self.begin(pool, order)
                    if not running:
                        continue
                    done, running = wait(running, LOOK_EVERY, FIRST_COMPLETED)
                    self.end_if_lost()
                    for outcome in [future.result() for future in done]:
                        self.outcomes[outcome.step] = outcome
            except BaseException:
                # The threads end when their scripts do, and those only when nobody holds their connections any more.
                self.stopping = True
                self.transport.close()
                raise
        for entry in self.request.entries:
            self.blame_what_was_needed(entry)
        return self.outcomes

    def end_if_lost(self) -> None:
        """Take away what a session held that ended by itself: nobody would keep its allocation, scratch and
        description from being taken for a dead one's while its builds go on."""
        if self.told_lost or not self.session.loss:
            return
        self.told_lost = True
        request = OrphanRequest(self.request.prefix, self.request.recipes, self.request.user)
        for entry in self.request.entries:
            if entry.name in self.started - set(self.outcomes):
                self.on_event(Event(entry.name, "running", self.session.loss))
        with suppress(Trouble):  # the session is what is to be told
            remove_orphans(self.transport, request, [self.host])

    def blame_what_was_needed(self, entry: Entry) -> None:
        """Turn the failure of an entry that began beside one it needs into a skip, when that one failed."""
        outcome = self.outcomes[entry.name]
        lost = self.lost(entry)
        if outcome.state == "failed" and any(f"{name} was not built" in outcome.detail for name in lost):
            self.outcomes[entry.name] = replace(outcome, state="skipped", detail=f"needs {lost[0]}", code=0)
            self.on_event(Event(entry.name, "skipped", f"needs {lost[0]}"))

    def lost(self, entry: Entry) -> list[str]:
        """Return what `entry` needs and will never get in this run."""
        return [
            name for name in entry.needs if name in self.outcomes and self.outcomes[name].state in {"failed", "skipped"}
        ]

    def begin(self, pool: ThreadPoolExecutor, order: Iterable[Entry]) -> set[Future[Outcome]]:
        """Start what can begin now, and skip what never can; return the started ones."""
        begun: set[Future[Outcome]] = set()
        for entry in order:
            if entry.name in self.started or entry.name in self.outcomes:
                continue
            if lost := self.lost(entry):
                self.outcomes[entry.name] = Outcome(entry.name, self.host.name, "skipped", f"needs {lost[0]}")
                self.on_event(Event(entry.name, "skipped", f"needs {lost[0]}"))
            elif all(self.is_ready(name, entry) for name in entry.needs):
                self.started.add(entry.name)
                begun.add(pool.submit(self.one, entry))
        return begun

    def is_ready(self, name: str, entry: Entry) -> bool:
        """Return whether what `entry` needs of the entry `name` is there, or will be while it waits."""
        if name not in {other.name for other in self.request.entries}:
            return True
        return name in self.outcomes or (name in entry.early and name in self.started)

    def one(self, entry: Entry) -> Outcome:
        """Run one entry's recipe to its end and return its outcome."""
        log = self.request.logs / f"build-{entry.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        self.on_event(Event(entry.name, "running"))
        with log.open("w", encoding="utf-8") as file:

            def tell(line: str) -> None:
                with self.writing:
                    file.write(line + "\n")
                    file.flush()
                if line.startswith((*NOTHING_NEW, TIMES)):
                    return
                state = next((state for start, state in STATES.items() if line.startswith(start)), "running")
                self.on_event(Event(entry.name, state, line.partition("=")[2] if line.startswith(NOISE) else line))

            try:
                reply = self.transport.run(self.host, self.job(entry), tell)
            except Trouble as trouble:
                # The host went away: what was published before is an outcome of this run all the same.
                reply = Reply(self.host.name, 1, "", trouble.problems[0].message, 0.0)
            seconds = time.monotonic() - start
            file.write(f"{TIMES}seconds: {seconds:.1f}\n")
        if reply.code and self.stopping:
            # Its end is ours: what its log says last is no reason.
            outcome = Outcome(entry.name, self.host.name, "stopped", "", seconds, INTERRUPTED, str(log))
        elif reply.code:
            outcome = Outcome(
                entry.name, self.host.name, "failed", last_lines(reply.err), seconds, reply.code, str(log)
            )
        else:
            found = records.read_records(reply.out, forms.PUBLISHED, self.host.name, "publish.sh").text("state")
            state, detail = ("unchanged", "already installed") if found == "present" else ("done", INSTALLED)
            outcome = Outcome(entry.name, self.host.name, state, detail, seconds, 0, str(log))
        self.on_event(Event(entry.name, outcome.state, outcome.detail))
        return outcome

    def job(self, entry: Entry) -> Job:
        """Return the recipe of one entry as a job; in an allocation, one that runs it as a step there."""
        scratch = self.session.scratch
        env = {
            **entry.env,
            "PREFIX": self.request.prefix,
            "ENTRY": entry.name,
            "TOKEN": self.request.token,
            "SCRATCH": scratch,
            "SRC": f"{scratch}/src/{entry.source}" if entry.source else "",
            "JOBS": str(self.request.jobs),
            "HEARTBEAT": f"{self.request.heartbeat:g}",
            "MANIFEST": manifest(entry),
            "RECIPE": f"{entry.recipe or entry.kind}.sh",
        }
        if self.request.indexes is not None:
            env |= {"ONLINE": "1", "INDEXES": "\n".join(self.request.indexes)}
        script = compose(self.request.recipes, *entry.recipes)
        if self.session.job:
            path = f"{scratch}/step-{entry.name}.sh"
            script = as_step(self.request.recipes, script, job=self.session.job, path=path, token=self.request.token)
        return Job(script, env=env, user=self.request.user, watched=True, timeout=None, log=True)


def as_step(recipes: Mapping[str, str], script: str, *, job: str, path: str, token: str) -> str:
    """Return a script that writes `script` to `path` and runs it as a step of the Slurm allocation `job`, with all
    its processors, under the eyes of prefix/step.sh."""
    end = f"END_{token}"
    command = " ".join(commands.srun(job, ("--cpu-bind=none", "bash", path)))
    begin = f'read -ra stat </proc/$$/stat; echo "$$ ${{stat[21]}} $(readlink /proc/self/ns/pid)" >{path}.pid'
    watch = compose(recipes, *STEP)
    return f"cat >{path} <<'{end}'\n{begin}\n{script}\n{end}\nexport STEP={path}\nset -- {command}\n{watch}\n"
