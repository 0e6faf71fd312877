"""Slurm's command lines as argument lists, parsers of what its clients print, and what keeps jobs from a
node. Others run the commands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet
from msgspec import Struct

from deepep_bootstrap.core import nodeset
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.inventory.facts import Facts


def out_of_service(facts: Facts, reservation: str = "") -> str:
    """Return why a job would wait on this host without end, such as `idle+drain in Slurm`; "" for a node in service,
    be it full, and for a host without Slurm. Jobs may start in `reservation` ("" for none)."""
    seen = facts.slurm
    return (
        f"{seen.state.lower()} in Slurm" if seen.works and seen.node and not is_usable(seen.state, reservation) else ""
    )


def no_job_starts(hosts: Mapping[str, Facts], reservation: str, what: str) -> Problem:
    """Return the problem that nothing can be done (`what` says the consequence) on `hosts`, which are all out of
    service."""
    states = dict.fromkeys(out_of_service(facts, reservation) + _reason(facts) for facts in hosts.values())
    stopped = [facts.slurm.node for facts in hosts.values() if not is_usable(facts.slurm.state, "any")]
    remedy = f"scontrol update nodename={fold(stopped)} state=resume, once it is in order"
    if not stopped:
        remedy = "sbatch_args=--reservation=NAME on a defaults line of the hosts file"
    return Problem(
        nodeset.fold(hosts), f"Slurm starts no jobs there, so {what}", ", ".join(states), "a node in service", remedy
    )


def _reason(facts: Facts) -> str:
    return f": {facts.prepared.slurm_reason}" if facts.prepared.slurm_reason else ""


SRUN = "srun"
SQUEUE = "squeue"
SCONTROL = "scontrol"

RUNNING = frozenset(
    {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "STAGE_OUT", "SUSPENDED", "STOPPED", "REQUEUED", "REQUEUE_HOLD"}
)
"""State words of a job that will still change; every other word is an end."""

UNUSABLE = (
    "DOWN",
    "DRAIN",
    "FAIL",
    "MAINT",
    "REBOOT",
    "POWER",
    "INVAL",
    "FUTURE",
    "RESERVED",
    "NOT_RESPONDING",
    "UNKNOWN",
)
"""Parts of a node's state that keep a job from starting there now."""

RESERVATION_STATES = ("MAINT", "RESERVED")
"""Parts of a node's state that a job with the right --reservation does not mind."""

PLACE_OPTIONS = {
    "account": "A",
    "cluster-constraint": "",
    "comment": "",
    "constraint": "C",
    "exclude": "x",
    "licenses": "L",
    "mcs-label": "",
    "nice": "",
    "partition": "p",
    "prefer": "",
    "qos": "q",
    "reservation": "",
    "time": "t",
    "wckey": "",
}
"""Options of sbatch, with their letters, that say where, how long and on whose account a job runs: salloc knows them
too."""

GRES = re.compile(r"[A-Za-z_][\w.-]*(:[A-Za-z_][\w.-]*)?(:[0-9]+)?")


class AllocationRequest(Struct, frozen=True):
    """What a job asks for. Empty fields ask for nothing; `nodes` are node names, `count` how many, `minutes` a time
    limit."""

    name: str = ""
    nodes: tuple[str, ...] = ()
    count: int = 0
    partition: str = ""
    account: str = ""
    qos: str = ""
    gres: str = ""
    minutes: int = 0
    exclusive: bool = False
    extra: tuple[str, ...] = ()


class SlurmJob(Struct, frozen=True):
    """A job as `scontrol show job` shows it. `code` is its exit code, 128 + the number when a signal ended it;
    `output` the file of its standard output."""

    id: str
    state: str
    reason: str = ""
    code: int = 0
    nodes: tuple[str, ...] = ()
    output: str = ""

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self.state not in RUNNING


class SlurmNode(Struct, frozen=True):
    """A node as `scontrol show node` shows it: its name, the host's own name, state word, gres, partitions, why it
    is drained, since when the slurmd runs that registered last ("" where Slurm does not say), and at which name or
    address slurmctld finds it (NodeAddr)."""

    name: str
    host: str
    state: str
    gres: str
    partitions: tuple[str, ...]
    reason: str
    started: str = ""
    address: str = ""

    @property
    def usable(self) -> bool:
        """Whether a job could start there now, or once other jobs have ended."""
        return is_usable(self.state)


def request_options(request: AllocationRequest) -> tuple[str, ...]:
    """Return the options that salloc, sbatch and srun share, in a stable order; the site's own words come last and
    so win."""
    named = (
        ("job-name", request.name),
        ("nodes", str(request.count or "")),
        ("nodelist", fold(request.nodes)),
        ("partition", request.partition),
        ("account", request.account),
        ("qos", request.qos),
        ("gres", request.gres),
        ("time", str(request.minutes or "")),
    )
    options = tuple(f"--{option}={value}" for option, value in named if value)
    return (*options, *(("--exclusive",) if request.exclusive else ()), *request.extra)


def srun(job: str, command: Sequence[str], *, node: str = "", tasks: int = 1) -> tuple[str, ...]:
    """Return the command that runs a step beside other steps in allocation `job`, each task with its own copy of the
    inputs."""
    placed = (f"--nodelist={node}",) if node else ()
    return (SRUN, f"--jobid={job}", "--overlap", f"--ntasks={tasks}", f"--nodes={tasks}", *placed, *command)


def fold(nodes: Iterable[str]) -> str:
    """Return node names as one folded list, `n[001-002]`; "" for none."""
    return str(NodeSet.fromlist(list(nodes), resolver=RESOLVER_NOGROUP))


def unfold(text: str) -> tuple[str, ...]:
    """Return the node names of a folded list; Trouble for one that cannot be read."""
    names: list[str] = []
    for piece in nodeset.pieces(text) if text else ():
        found = nodeset.expand(piece)
        if isinstance(found, str):
            raise Trouble(Problem("Slurm", "a node list that cannot be read", text[:80], found))
        names += found
    return tuple(names)


def is_usable(state: str, reservation: str = "") -> bool:
    """Return whether a node in this state (`IDLE`, `MIXED+PLANNED`, `idle*`) could run a job, now or after others. A
    star after the word means that the node does not answer. Where the job names a `reservation`, a reserved node may
    well be in that one."""
    passed_over = RESERVATION_STATES if reservation else ()
    return not state.endswith("*") and not any(word in state.upper() for word in UNUSABLE if word not in passed_over)


def place_words(words: Sequence[str]) -> tuple[str, ...]:
    """Return those of a site's words for sbatch that salloc is to have too (PLACE_OPTIONS), each option with its
    value: salloc stops at an option that it does not know, and how many nodes or CPUs a test wants is nothing to a
    build."""
    return tuple(word for name, option in _options(words) if name for word in option)


def reservation_of(words: Sequence[str]) -> str:
    """Return the reservation that a site's words for sbatch name, "" for none."""
    found = [option for name, option in _options(words) if name == "reservation"]
    return (found[-1][-1] if len(found[-1]) > 1 else found[-1][0].partition("=")[2]) if found else ""


def _options(words: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each option with its own words, and its name in PLACE_OPTIONS, "" where it has none. Slurm takes
    `--opt=value`, `--opt value`, the beginning of a long name, and a letter before its value."""
    starts = [number for number, word in enumerate(words) if word.startswith("-")]
    for begin, end in pairwise((*starts, len(words))):
        name = words[begin].partition("=")[0]
        long = (known for known in PLACE_OPTIONS if re.match("--.", name) and known.startswith(name[2:]))
        short = (known for known, letter in PLACE_OPTIONS.items() if letter and name[1:2] == letter)
        yield next(chain(long, short), ""), tuple(words[begin:end])


def parse_job(text: str) -> SlurmJob | None:
    """Return the job in the output of `scontrol show job -o`; None when Slurm no longer knows it."""
    line = next((line for line in text.splitlines() if line.startswith("JobId=")), "")
    # A job's name is free text and stands before everything that counts.
    pairs = _pairs(re.sub(r" JobName=.*? (?=UserId=\S+\([0-9]+\) GroupId=)", " ", line))
    if not pairs:
        return None
    return SlurmJob(
        id=pairs["JobId"],
        state=pairs.get("JobState", ""),
        reason=_said(pairs.get("Reason", "")),
        code=parse_exit(pairs.get("ExitCode", "0:0")),
        nodes=unfold(_said(pairs.get("NodeList", ""))),
        output=_said(pairs.get("StdOut", "")),
    )


def parse_exit(text: str) -> int:
    """Return the exit code in Slurm's `code:signal`: the code, or 128 + the signal's number as shells say it."""
    match = re.fullmatch(r"([0-9]{1,5}):([0-9]{1,3})", text)
    if not match:
        raise Trouble(Problem("Slurm", "an exit code that cannot be read", text[:40], "code:signal"))
    code, signal = int(match.group(1)), int(match.group(2))
    return 128 + signal if signal else code


def parse_nodes(text: str) -> tuple[SlurmNode, ...]:
    """Return the nodes in the output of `scontrol show node -o`; what is no node's line is passed over."""
    nodes = []
    for line in text.splitlines():
        # An administrator's reason is free text and stands last.
        node_line, _, reason = line.partition(" Reason=")
        if pairs := _pairs(node_line) if line.startswith("NodeName=") else {}:
            partitions = tuple(name for name in pairs.get("Partitions", "").split(",") if name)
            host, state, gres = (
                pairs.get("NodeHostName", pairs["NodeName"]),
                pairs.get("State", ""),
                _said(pairs.get("Gres", "")),
            )
            started = _said(pairs.get("SlurmdStartTime", ""))
            address = _said(pairs.get("NodeAddr", ""))
            nodes.append(SlurmNode(pairs["NodeName"], host, state, gres, partitions, reason.strip(), started, address))
    return tuple(nodes)


def _pairs(line: str) -> dict[str, str]:
    """Split `Key=value Other=a b` where a value may hold spaces; of a key that comes twice the first counts."""
    found: dict[str, str] = {}
    for match in re.finditer(r"(?:^|\s)([A-Za-z][\w:/]*)=(.*?)(?=\s+[A-Za-z][\w:/]*=|\s*$)", line):
        found.setdefault(match.group(1), match.group(2))
    return found


def _said(text: str) -> str:
    return "" if text in {"(null)", "None", "N/A"} else text


def gpus_of(gres: str) -> int:
    """Return how many GPUs a node's gres has: 8 for `gpu:8`, `gpu:h100:8(S:0-1)` and `gpu:a100:4,gpu:v100:4`; 0 for
    `(null)`."""
    bare = re.sub(r"\([^)]*\)", "", gres)
    counts = [re.fullmatch(r"gpu(?::[^:]*?)??(?::([0-9]+))?", part.strip()) for part in bare.split(",")]
    return sum(int(match.group(1) or 1) for match in counts if match)


def resolve_gres(setting: str, nodes: Iterable[str]) -> str:
    """Return what a job of one node asks for: "" for nothing, else such as `gpu:8`.

    `setting` is that of the hosts file; `nodes` the gres of each GPU node. `auto` asks for every GPU of the node
    that has the fewest, without a type, since a count fits every type. Where only some nodes have GPUs for Slurm,
    no count fits all: Trouble."""
    if setting == "none":
        return ""
    if setting != "auto":
        if not all(GRES.fullmatch(part) for part in setting.split(",")):
            raise Trouble(
                Problem(
                    "hosts file: gres", "not a request that Slurm knows", setting[:80], "auto, none or such as gpu:8"
                )
            )
        return setting
    counts = [gpus_of(gres) for gres in nodes]
    if any(counts) and not all(counts):
        found = f"gres of {', '.join(str(count) for count in counts)} GPUs"
        raise Trouble(
            Problem(
                "hosts file: gres",
                "only some of the nodes have GPUs for Slurm",
                found,
                "the same on all",
                "gres=gpu:8 or --limit",
            )
        )
    return f"gpu:{min(counts)}" if any(counts) else ""
