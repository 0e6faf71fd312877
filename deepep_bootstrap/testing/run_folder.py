"""One run of a test in its folder: values, verdict, logs, and the counters of NICs and GPUs; the folder brought back
over the connection, and files added to it.

<run>/run.env                     data lines: the test and its exit code (RUN_KEYS)
<run>/verdict.json                the verdict on the run and why (Judgement), where somebody followed it to its end
<run>/passing_nodes.txt           nodes that are well, and failing_nodes.txt, those at fault: for sbatch
<run>/job.log                     output of the job itself
<run>/node-<index>-<host>.log     output of one node's test
<run>/rank-<number>.log           output of one rank, where the test starts its ranks through torch
<run>/counters/<host>.before      data lines (Counter, GpuCounter), and <host>.after
<run>/facts.json                  `invoke facts` of the nodes, where `invoke test` ran it
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path

import msgspec
from msgspec import Struct, field

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.recipes import compose, last_lines
from deepep_bootstrap.core.redact import scrub
from deepep_bootstrap.core.text import plain
from deepep_bootstrap.prefix.generations import Content, PrefixHandle, tar_files
from deepep_bootstrap.remote.jobs import Job, Transport

RUN_KEYS = (
    *("kind", "stack", "module", "prefix", "deepep", "generation", "lock_digest", "via", "job", "nodes"),
    *("started", "ended", "code", "args", "script", "time_limit"),
)
"""`nodes` are host names in the order of their index, joined by commas; `started` and `ended` are seconds since
1970, `code` is the exit code ("" while it runs, or if nobody was left to say it), `args` the words for the script as
a shell would read them."""


class RunVerdict(Enum):
    """The verdict on a run, the same word wherever it is told. `STOPPED`: somebody ended it before it could end.

    The last two are none yet: nobody saw it end, or it ended with exit code 0 and nobody compared its figures."""

    PASSED = "passed"
    BELOW = "below reference"
    FAILED = "failed"
    STOPPED = "stopped"
    OPEN = "not ended"
    UNJUDGED = "not judged"


class Judgement(Struct, frozen=True):
    """The verdict on a run and the reason in one sentence; what of it lies in the run's folder."""

    verdict: RunVerdict
    why: str = ""


WORD_BYTES = 4
"""`port_xmit_data` and `port_rcv_data` count words of four bytes (kernel documentation, sysfs-class-infiniband)."""


class Counter(Struct, frozen=True):
    """One port of a NIC at one moment: bytes sent and received since the driver was loaded, its rate in Gb/s, its
    link layer (InfiniBand or Ethernet), and its error counters by sysfs name."""

    device: str
    port: int
    link_layer: str
    gbits: float
    sent: int
    received: int
    errors: Mapping[str, int] = field(default_factory=dict)


class GpuCounter(Struct, frozen=True):
    """One GPU at one moment: errors by name (`ecc`: uncorrected, volatile; `nvlink`: of all links together)."""

    index: int
    errors: Mapping[str, int] = field(default_factory=dict)


class Counters(Struct, frozen=True):
    """All counters of one host at one moment (seconds since 1970)."""

    time: float
    nics: Mapping[str, Counter]
    gpus: Mapping[int, GpuCounter]


class TestRun(Struct, frozen=True):
    """A run: its name (the folder's), the values of run.env, logs by file name, counters before and after by host,
    facts as JSON text, and the verdict that was kept with it."""

    name: str
    values: Mapping[str, str]
    logs: Mapping[str, str]
    counters: Mapping[str, tuple[Counters | None, Counters | None]] = field(default_factory=dict)
    facts: str = ""
    kept: Judgement | None = None

    @property
    def kind(self) -> str:
        """Return the kind of the test."""
        return self.values.get("kind", "")

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the hosts in the order of their index."""
        return tuple(filter(None, self.values.get("nodes", "").split(",")))

    @property
    def args(self) -> tuple[str, ...]:
        """Return the words given to the script."""
        try:
            return tuple(shlex.split(self.values.get("args", "")))
        except ValueError:
            return (self.values.get("args", ""),)

    @property
    def code(self) -> int | None:
        """Return the exit code, None where nobody said it."""
        code = self.values.get("code", "")
        return int(code) if re.fullmatch(r"\d{1,3}", code) else None


def parse_values(text: str, where: str) -> dict[str, str]:
    """Return the values of a run.env; Trouble for a line that is none of RUN_KEYS, later lines replace earlier ones."""
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        key, equal, value = line.partition("=")
        if not equal or key not in RUN_KEYS:
            raise Trouble(
                Problem(f"{where}:{number}", "no line of a run", line[:80], wanted=f"one of {', '.join(RUN_KEYS)}")
            )
        found[key] = value
    return found


def parse_counters(text: str, where: str) -> Counters:
    """Return the counters of one file.

    Its lines are `time=SECONDS`, `nic=DEVICE PORT LINK_LAYER GBITS XMIT_WORDS RCV_WORDS [NAME:COUNT…]` (words as the
    kernel counts them, see WORD_BYTES) and `gpu=INDEX [NAME:COUNT…]`. Trouble for any other line.
    """
    time, nics, gpus = 0.0, {}, {}
    for number, line in enumerate(text.splitlines(), 1):
        key, _, value = line.partition("=")
        try:
            if key == "time":
                time = _finite(value)
            elif key == "nic":
                device, port, layer, gbits, sent, received, *errors = value.split()
                sizes = _count(sent) * WORD_BYTES, _count(received) * WORD_BYTES
                nics[f"{device}/{port}"] = Counter(
                    device, _count(port), layer, _finite(gbits), *sizes, dict(_counts(errors))
                )
            elif key == "gpu":
                index, *errors = value.split()
                gpus[_count(index)] = GpuCounter(_count(index), dict(_counts(errors)))
            else:
                raise ValueError(key)
        except ValueError:
            raise Trouble(
                Problem(f"{where}:{number}", "no line of counters", line[:80], "time=, nic= or gpu=")
            ) from None
    return Counters(time, nics, gpus)


def _counts(words: list[str]) -> Iterator[tuple[str, int]]:
    for word in words:
        name, _, count = word.partition(":")
        yield name, _count(count)


def _count(text: str) -> int:
    """Return a whole number as the kernel counts, in 64 bits; ValueError for anything else."""
    if not re.fullmatch(r"[0-9]{1,20}", text):
        raise ValueError(text[:80])
    return int(text)


def _finite(text: str) -> float:
    """Return a number of at most 64 bits; ValueError for anything else."""
    value = float(text)
    if not 0 <= value < 2**64:
        raise ValueError(text[:80])
    return value


VALUES, VERDICT, FACTS, RESULTS = "run.env", "verdict.json", "facts.json", "results.json"
COUNTERS = re.compile(r"counters/(?P<host>[^/]+)\.(?P<when>before|after)")
LOG = re.compile(r"[^/]+\.log")
LARGEST = 8 * 1024 * 1024
"""Bytes of a log that are read: its first and its last half of that, where it has more."""

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
"""What the name of a run may be: it becomes a part of a path."""


def of_files(name: str, files: Mapping[str, str]) -> TestRun:
    """Return the run whose folder holds these texts, by path in it; files that belong to no run are left alone.
    Trouble where run.env is missing or where a line of it, or of counters, cannot be read."""
    if VALUES not in files:
        found = ", ".join(sorted(files)[:4]) or "nothing"
        raise Trouble(
            Problem(
                name, "this is no run of a test", found, f"a folder with {VALUES}", "invoke test, then invoke report"
            )
        )
    return TestRun(
        name=name,
        values=parse_values(files[VALUES], f"{name}/{VALUES}"),
        logs={path: text for path, text in sorted(files.items()) if LOG.fullmatch(path)},
        counters=_counters(name, files),
        facts=files.get(FACTS, ""),
        kept=parse_judgement(files.get(VERDICT, "")),
    )


LONGEST_WHY = 1000
"""Characters of a reason that are read."""


def judgement_text(judgement: Judgement) -> str:
    """Return the text of verdict.json, without anybody's passwords."""
    content = {"schema": 1, "verdict": judgement.verdict.value, "why": scrub(judgement.why)}
    return json.dumps(content, indent=1) + "\n"


def parse_judgement(text: str) -> Judgement | None:
    """Return the verdict in a verdict.json; None for a text that is none: the run is judged by its other files then."""
    try:
        found = msgspec.json.decode(text, type=Judgement)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None
    return Judgement(found.verdict, plain(" ".join(found.why.split()))[:LONGEST_WHY])


def judged_by_values(values: Mapping[str, str], kept: Judgement | None) -> Judgement:
    """Return the verdict on a run of which only run.env is at hand, and the verdict that was kept (None: nobody did,
    as before this was done, and of jobs that were submitted by hand). An exit code of 0 alone is no verdict."""
    if kept is not None:
        return kept
    code = values.get("code", "")
    if not code:
        return Judgement(RunVerdict.OPEN, "it runs, or nobody was left to see its end")
    if code != "0":
        return Judgement(RunVerdict.FAILED, f"exit code {code}")
    return Judgement(RunVerdict.UNJUDGED, "exit code 0; invoke report judges its figures")


def _counters(name: str, files: Mapping[str, str]) -> dict[str, tuple[Counters | None, Counters | None]]:
    """Return the counters before and after by host; None for a file that is not there, or that a node could not
    write to its end: a run that was cut off is what a report is for."""
    found: dict[str, dict[str, Counters]] = {}
    for path, text in sorted(files.items()):
        if match := COUNTERS.fullmatch(path):
            times = found.setdefault(match["host"], {})
            if text.endswith("\n"):
                times[match["when"]] = parse_counters(text, f"{name}/{path}")
    return {host: (both.get("before"), both.get("after")) for host, both in found.items()}


def is_part(path: str) -> bool:
    """Return whether a file of a run's folder is one that says something."""
    return path in {VALUES, VERDICT, FACTS, RESULTS} or bool(LOG.fullmatch(path) or COUNTERS.fullmatch(path))


def cut(data: bytes) -> str:
    """Return a file's text; of one over LARGEST the beginning and the end, with a line between that says how much is
    left out."""
    if len(data) > LARGEST:
        half = LARGEST // 2
        left_out = f"\n[{len(data) - LARGEST} bytes left out here]\n".encode()
        data = data[:half] + left_out + data[-half:]
    return data.decode("utf-8", errors="replace")


def of_folder(folder: Path) -> dict[str, str]:
    """Return the files of a run's folder on this machine by path in it; Trouble where it cannot be read."""
    try:
        paths = [path for path in (*folder.iterdir(), *_inside(folder / "counters")) if path.is_file()]
        names = {path.relative_to(folder).as_posix(): path for path in paths}
        return {name: cut(path.read_bytes()) for name, path in names.items() if is_part(name)}
    except OSError as error:
        raise Trouble(
            Problem(str(folder), "this run cannot be read", error.strerror or str(error), "a run's folder")
        ) from None


def _inside(folder: Path) -> Iterable[Path]:
    return folder.iterdir() if folder.is_dir() else ()


COLLECT = ("lib.sh", "test/collect.sh")
KEEP = ("lib.sh", "prefix/lib/share.sh", "test/keep.sh")
SITE = ("lib.sh", "prefix/lib/share.sh", "test/site.sh")
TOTAL = 16 * LARGEST
"""Bytes of one run that are brought back at most."""

LIMIT = 300.0
PATIENCE = 10
"""Seconds: for all of it, and for the run's last line to be seen by another host of a network filesystem."""

HEAD = re.compile(rb"file (\S{1,4096}) (\d{1,15}) (\d{1,15})\n|end 1\n")


class RunFiles(Struct, frozen=True):
    """The files of a run's folder by path in it as texts, and which of them are not here as a whole, with the bytes
    that are missing."""

    files: Mapping[str, str]
    cut: Mapping[str, int]


def collect(transport: Transport, place: PrefixHandle, folder: str, *, patience: int = 0) -> RunFiles:
    """Return what is in a run's folder, which the host of `place` sees, after at most `patience` seconds in which
    its end may come into sight; Trouble where it cannot be read."""
    came = bytearray()
    env = {"PLACE": folder, "LARGEST": str(LARGEST), "TOTAL": str(TOTAL), "PATIENCE": str(patience)}
    job = Job(
        compose(place.recipes, *COLLECT), env=env, user=place.user, timeout=LIMIT, sink=came.extend, limit=2 * TOTAL
    )
    reply = transport.run(place.host, job)
    if reply.code:
        raise Trouble(Problem(place.host.name, f"{folder} cannot be read", last_lines(reply.err)))
    return parse_collected(bytes(came), f"{place.host.name} {folder}")


def parse_collected(data: bytes, where: str) -> RunFiles:
    """Return the files in what collect.sh printed; Trouble where that is cut off."""
    files: dict[str, str] = {}
    cut: dict[str, int] = {}
    at = 0
    while match := HEAD.match(data, at):
        if match.group(1) is None:
            return RunFiles(files, cut)
        name = match.group(1).decode("ascii", "replace")
        size, sent = int(match.group(2)), int(match.group(3))
        at = match.end() + sent
        content = data[match.end() : at]
        if len(content) < sent:
            break
        if sent < size:
            cut[name] = size - sent
            content = b"%s\n[%d bytes left out here]\n%s" % (content[: sent // 2], size - sent, content[sent // 2 :])
        files[name] = content.decode("utf-8", "replace")
    raise Trouble(
        Problem(where, "the run came back cut off", f"{len(data)} bytes", try_="invoke report, with the run's name")
    )


def keep_files(
    transport: Transport,
    place: PrefixHandle,
    folder: str,
    *,
    lines: Iterable[str] = (),
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Add to a run's folder: `lines` behind its run.env, and files by name. Trouble where that cannot be."""
    env = {"PREFIX": place.prefix, "PLACE": folder, "LINES": "\n".join(lines)}
    reply = transport.send(
        place.host,
        Job(compose(place.recipes, *KEEP), env=env, user=place.user),
        tar_files([Content(name, data) for name, data in (files or {}).items()]),
    )
    if reply.code:
        raise Trouble(Problem(place.host.name, f"{folder} cannot be added to", last_lines(reply.err)))


def keep_judgement(
    transport: Transport,
    place: PrefixHandle,
    folder: str,
    judgement: Judgement,
    more: Mapping[str, bytes] | None = None,
) -> None:
    """Add the verdict to a run's folder, and more files by name; Trouble where that cannot be."""
    keep_files(transport, place, folder, files={VERDICT: judgement_text(judgement).encode(), **(more or {})})


def read_site(transport: Transport, place: PrefixHandle, name: str) -> str:
    """Return the text of a site's own file in the prefix, "" where it has none; Trouble where it cannot be read."""
    env = {"PREFIX": place.prefix, "NAME": name}
    reply = transport.run(place.host, Job(compose(place.recipes, *SITE), env=env, user=place.user))
    if reply.code:
        raise Trouble(Problem(place.host.name, f"{place.prefix}/{name} cannot be read", last_lines(reply.err)))
    return reply.out


def write_site(transport: Transport, place: PrefixHandle, name: str, text: str) -> None:
    """Write a site's own file in the prefix; Trouble where this user may not."""
    env = {"PREFIX": place.prefix, "NAME": name}
    job = Job(compose(place.recipes, *SITE), args=("write",), env=env, user=place.user)
    reply = transport.send(place.host, job, (text.encode(),))
    if reply.code:
        raise Trouble(Problem(place.host.name, f"{place.prefix}/{name} cannot be written", last_lines(reply.err)))
