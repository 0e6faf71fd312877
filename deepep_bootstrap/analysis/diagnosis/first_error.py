"""What can be said of a failure whose cause nobody knows: the first error in time, the rank and node it came from,
whose it is, how processes ended in words, and what one needs to know to get further.
"""

from __future__ import annotations

import functools
import itertools
import re
import signal
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from deepep_bootstrap.analysis.diagnosis.log import Evidence, Hit, Log, bare
from deepep_bootstrap.analysis.diagnosis.pasted import SOURCE, is_answer, is_command, is_echoed, is_of_ping, is_row
from deepep_bootstrap.analysis.diagnosis.rules import CauseSet, Ending, Pattern

BUNDLE = "invoke report --bundle"
"""The command that packs versions, facts, plan and logs for whoever helps."""

REACH = 12
"""Lines around the first error in which a program or library may name itself."""

LONGEST, LONGEST_AROUND = 600, 200
"""Characters that are shown of the line, and of each of those around it."""

END = 200
"""Characters of its end that are shown of a longer line: a launcher puts the exit status behind the whole command."""

ABOVE, BELOW = 2, 3
"""Lines of the same process that are shown around the first error: one line of a message is often not the one that
tells the reason."""

FRAMES = 400
"""Lines of one process that a traceback may have."""

BACK = 200
"""Lines above an error in which its process may have said the time."""

LAST_ERROR = 5
"""Lines of its own process below an exception of NCCL's in which it says its last error."""

BETWEEN = 40
"""Lines of other processes that may stand between two of one traceback."""

SPAWNED = re.compile(r"-- Process \d+ terminated with the following error:")
"""What torch.multiprocessing puts above the traceback of a process that it started."""

CHAIN = 60
"""Lines above an exception in which it may be said that another one was its cause."""

AT_ONCE = 10.0
"""Seconds within which the order of a log's lines says more than their times: clocks and buffers differ by as much."""

REASON_ABOVE = 40
"""Lines above a vague error among which its process may have said the reason."""

MOST_ENDS, MOST_ASKS = 4, 3

FRAME_FILE = re.compile(r'File "([^"]+)\.py", line \d+')
INSTALLED = ("site-packages", "dist-packages", "src", "python")
"""Folders right in which packages lie: where they are installed, and in checkouts."""

FRAME = re.compile(r'(?:> )?File "[^"]+", line \d+|\^\^\^\s*$')
CODE_BELOW = re.compile(r'File "[^"]+", line \d+, in ')
"""A frame with the line of code that it stands at below it."""

WRAPPED = re.compile(r'File$|"/[^"]+",$|line \d+, in \S+$')
"""A line of a frame that was broken at a narrow width, as uv does."""

HEAD = "Traceback (most recent call last)"
THROWN = re.compile(r"Traceback \(most recent|[\w.]*(?:Error|Exception|Exit|Interrupt|Failure)\b")
"""How a traceback or an exception begins; what stands below it may be the words of a compiler."""

CALLS = re.compile(r'/(?:lib/python[\d.]+/[\w.]+"|(?:torch|triton|asyncio|concurrent|multiprocessing)/)')
"""Frames of what runs other code: a module of Python's own, or of a package that calls what it was given."""

LEVELLED = re.compile(r"\b(?:ERROR|CRITICAL) \d\d-\d\d \d\d:|\b(?:ERROR|CRITICAL)\b.{0,40}\]  ")

LOGGED = re.compile(r"(?:^|[ \t\[])(?:ERROR|CRITICAL|E)[\] :]")
"""What a logger puts before a message of an error."""

CAUSED_BY = "Caused by:"
"""How programs in Rust begin the reason of the line above."""

NUMBERED = re.compile(r"\d{1,2}: \S")
"""A reason of several, the outermost first."""

OS_ERROR = re.compile(r"(?:Caused by|\d{1,2}): [A-Z][a-z ]+ \(os error \d+\)")
"""A reason that names nothing: the line above it says what was not there or not allowed."""

ASSERTS = re.compile(r"assert[\s(]")
WORDLESS = re.compile(r"[\w.]+(?:Error|Exception):\s*$|[\w.]+(?:Error|Exception|Failed): .{0,300}\braised:\s*$")
"""An exception whose words, or whose own reason, begin on the next line."""

INVALID = re.compile(r"\d+ validation errors? for \w")
"""pydantic's heading: the line below says what is wrong."""

FAULTY = re.compile(r"(?:Value|Assertion) error, |\[type=")
"""That line, below the name of the field: its words may go over several lines, `[type=` stands behind the last one."""

ANSIBLE_HEAD = re.compile(r"(?:fatal|failed): \[.* => ?(?:changed=(?:false|true))?\s*$")
"""How Ansible begins the result of a task that failed, in YAML."""

CMAKE_HEAD = re.compile(r"\bCMake Error (?:at|in)\b")

RICH = r"(?:\[\d\d/\d\d/\d\d \d\d:\d\d:\d\d\]| {19}) *"
"""What rich's logger puts before a level: the time, or as much space where it is that of the line above."""

WARNING_HEAD = re.compile(rf" *CMake (?:Deprecation |Author )?Warning\b|{RICH}(?:DEBUG|INFO|WARNING) ")
"""The head of a warning whose text stands indented below it."""

ERROR_HEAD = re.compile(rf"{RICH}(?:ERROR|CRITICAL) ")

WARNING_LINES = 20
"""Lines that such a text may have."""

EVENT = re.compile(r"\bWarning +[A-Z]\w+ ")
"""An event of Kubernetes, whose message may go on below it."""

OF_ANOTHER = re.compile(r"\bRayTaskError\(|\bCaught \w+ in \w+ (?:worker|replica|thread)\b")
"""An exception that only says whose it is: its own traceback goes on below."""

DIGIT = re.compile(r"\d")

RANK = (
    re.compile(r"\[?\brank[ _:]{0,2}(\d+)\b", re.IGNORECASE),
    re.compile(r"\[default(\d+)\]"),
    re.compile(r"\[\d+,(\d+)\]<std"),
    re.compile(r"^\s*(\d{1,5}): "),
    re.compile(r"-- Process (\d+) terminated"),
    re.compile(r"\b(?:RANK|local_rank|LOCAL_RANK)\W{1,3}(\d+)\b"),
)
PLACE = re.compile(r"\b((?:DP|TP|EP|PP)\d+(?:[ _](?:DP|TP|EP|PP)\d+)*)\b|\((\w*(?:EngineCore|Worker|ApiServer)\w*)[ )]")
"""What SGLang and vLLM call the ranks of their groups."""

NODE = (
    re.compile(r"^([A-Za-z][\w.-]*):\d+:\d+ \[\d+\] "),
    re.compile(r"srun: error: ([\w.-]+): task"),
    re.compile(r"^[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)? ([A-Za-z][\w.-]*) \S{1,60}: "),
    re.compile(r"slurmstepd-([\w.-]+): "),
    re.compile(r"\bip=([\w.:-]+)\)"),
    re.compile(r"\bON ([\w.-]+) CANCELLED"),
    re.compile(r"^\s*(?:[\dT:., Z-]{15,32} )?([A-Za-z][\w.-]{0,40}\d):\s"),
    re.compile(r"\b(?:node|host|nodename)[ =]([A-Za-z][\w.-]*\d)\b"),
)
FILE_RANK, FILE_NODE = re.compile(r"\brank[-_](\d+)"), re.compile(r"\bnode-\d+-([\w.-]+?)\.(?:log|out|err)$")

STAMP = (
    re.compile(r"(?P<y>\d{4})[-/](?P<mo>\d\d)[-/](?P<d>\d\d)[T ](?P<h>\d\d):(?P<mi>\d\d):(?P<s>\d\d)(?P<f>[.,]\d+)?"),
    re.compile(r"\b[EWIF](?P<y>20\d\d)?(?P<mo>\d{1,2})(?P<d>\d\d) (?P<h>\d\d):(?P<mi>\d\d):(?P<s>\d\d)(?P<f>\.\d+)?"),
    re.compile(r"\b(?P<mo>\d\d)-(?P<d>\d\d) (?P<h>\d\d):(?P<mi>\d\d):(?P<s>\d\d)(?P<f>[.,]\d+)?"),
    re.compile(r"\b(?P<mon>[A-Z][a-z]{2}) {1,2}(?P<d>\d{1,2}) (?P<h>\d\d):(?P<mi>\d\d):(?P<s>\d\d)(?P<f>\.\d+)?"),
)
"""Times as programs print them: ISO, glog's, vLLM's, syslog's."""

CLOCK = re.compile(r"\d\d:\d\d:\d\d")
"""What all of them have: most lines have none, and are not looked at four times."""

MONTHS = {
    name: number
    for number, name in enumerate("JanFebMarAprMayJunJulAugSepOctNovDec"[i : i + 3] for i in range(0, 36, 3))
}

CODE = re.compile(
    r"\bexit(?:ed)?(?: ?with)?(?: exit)?(?: ?(?:code|status))?\s*[:=]?\s*(-?\d{1,3})\b(?!\s*s\b)", re.IGNORECASE
)
SIGNAL = re.compile(r"\bsignal:? ?(\d{1,2})\b|\b(SIG[A-Z]{2,5})\b", re.IGNORECASE)
SIGNALS: Mapping[str, str] = {
    "SIGABRT": "it ended itself: an assertion, or an exception that nobody caught",
    "SIGBUS": "memory behind an address was gone: most often /dev/shm or a file system that is full",
    "SIGFPE": "a division by zero",
    "SIGHUP": "its terminal or launcher went away",
    "SIGILL": "an instruction that this processor has not",
    "SIGINT": "interrupted, as by ^C",
    "SIGKILL": "killed from outside: by the kernel for lack of memory, by Slurm at a limit, or by somebody",
    "SIGPIPE": "what it wrote to was closed",
    "SIGSEGV": "an access to memory that is not its own",
    "SIGTERM": "asked to end: a peer failed before, a limit of time, or scancel",
}
CODES: Mapping[int, str] = {
    2: "the program did not understand its arguments",
    124: "a limit of time was reached (timeout)",
    126: "the program may not be run, or is none",
    127: "the program was not found",
}
OF_SIGNAL = 128
"""A shell says 128 and the signal's number of a program that a signal ended."""

GENERIC = (
    "the whole log of the rank named here from its start on, and the versions in it (`invoke status`, `invoke facts`)."
)


class Ended(Struct, frozen=True):
    """How a process ended, in words, and the line that says so."""

    words: str
    evidence: Evidence


class FirstError(Struct, frozen=True):
    """The first error of a failure: its line, the time, rank and node as far as the logs say them, the program and the
    library it belongs to, how processes ended, what changed since the last good run of the kind (where runs are
    known), and what it takes to get further. Texts are empty where nobody says. `around`: its line and those next to it
    of the same process, as they stand there."""

    evidence: Evidence
    around: tuple[Evidence, ...]
    time: str
    rank: str
    node: str
    program: str
    library: str
    ended: tuple[Ended, ...]
    asks: tuple[str, ...]
    changed: tuple[str, ...] = ()


def scrubbed(first: FirstError, scrub: Callable[[str], str]) -> FirstError:
    """Return the same with `scrub` over every line that is shown."""

    def clean(evidence: Evidence) -> Evidence:
        return replace(evidence, text=scrub(evidence.text))

    return replace(
        first,
        evidence=clean(first.evidence),
        around=tuple(map(clean, first.around)),
        ended=tuple(replace(each, evidence=clean(each.evidence)) for each in first.ended),
        changed=tuple(map(scrub, first.changed)),
    )


ERROR, WAITED, SLOW, WARNED, FOLLOWED, ENDED, WENT_ON = range(7)
"""How near to the root a line is: an error of its own; the end of a wait; that something takes long, or a traceback
that ends before its exception; a warning that tells of an error; what follows from another's failure; that something
ended badly, and no more; what a program goes on after."""


class ErrorLine(Struct, frozen=True):
    """A line that tells of an error: its `grade`, one of those above; its time as numbers that order, None where nobody
    says it; the place of its log among several."""

    grade: int
    stamp: tuple[float, ...] | None
    hit: Hit
    time: str
    place: int = 0


class LogErrors:
    """The lines of one log, from `start` on, that tell of an error: looked for when they are first asked for."""

    def __init__(self, log: Log, start: int, ending: Ending) -> None:
        self.log = log
        self.start = start
        self.ending = ending

    @property
    def own(self) -> int | None:
        """The first line on which a program tells an error of its own, None where none does."""
        return next((each.hit.line for each in self.lines if each.grade == ERROR), None)

    @property
    def last(self) -> Hit | None:
        """The error that the log ends in, in a form that runs print, too, that go on; None where more is told below
        it."""
        found = {each.hit.line: each.hit for each in self.lines}
        for number in reversed(range(self.start, len(self.log.lines))):
            text = self.log.lines[number]
            if number in found and tells_error(text, self.ending):
                return found[number]
            if number not in found and bare(text, keep_indent=True)[:1].strip() and not is_command(text):
                return None
        return None

    @functools.cached_property
    def lines(self) -> tuple[ErrorLine, ...]:
        """These lines, in order."""
        log, ending = self.log, self.ending
        found: list[ErrorLine] = []
        hits = _hits(log, self.start, ending)
        for line, hit in sorted(hits.items()):
            text = log.lines[line][:2000]
            # A level and a place in the code alone are the heading of what stands below.
            if line in log.done or not bare(text) or _says(ending.noise, text) or _says(ending.fine, text):
                continue
            if _is_frame(text) or is_command(text) or _is_source(text) or _is_warned(log, line) or _is_code(log, line):
                continue
            raised = log.lines[_exception(log, line)][:2000]
            grade = max(_grade(text, ending), _grade(raised, ending))
            if grade <= WARNED and (_says(ending.mild, text) or is_answer(log.lines, line)):
                grade = WARNED
            elif _is_cut(log, line):
                grade = max(grade, SLOW)
            elif grade == ERROR and (_sums_up(log, line, hits) or _is_consequence(log, line, ending, found)):
                grade = FOLLOWED
            time, stamp = _time(log, line)
            found.append(ErrorLine(grade, stamp, hit, time))
        return tuple(found)


def first_error(
    errors: Sequence[LogErrors], rules: CauseSet, roots: Sequence[tuple[int, Hit]] = (), *, state: bool = False
) -> FirstError | None:
    """Return the first error in the logs; None where nothing failed, or nothing but what a program went on after.
    `roots` are lines of a cause that is sure, each with its log's place: errors whatever their words. With `state`
    they only tell a state: where a program tells an error of its own, those are none that follow from another
    failure."""
    logs = [each.log for each in errors]
    found = [replace(each, place=place) for place, log in enumerate(errors) for each in log.lines]
    grade = min((each.grade for each in found), default=WENT_ON)
    if grade == WENT_ON and not roots:
        return None
    lower = state and grade in {ERROR, WAITED, SLOW}
    known = [*_roots_as_errors(logs, roots, rules.ending, lower=lower)]
    candidates = [*known, *(each for each in found if each.grade == (ERROR if known else grade))]
    if not candidates:
        return None
    first = _earliest(candidates)
    log = logs[first.place]
    last = _reason_above(log, _innermost(log, _exception(log, first.hit.line)), rules)
    line = log.sentence(last)
    own = bare(log.lines[line])
    goes_on_below = line != last or own.endswith(":")
    text = (log.message(line) if goes_on_below else own) or first.hit.text
    evidence = Evidence(log.name, line + 1, _shortened(text))
    near = _own_lines(log, line, REACH)
    rank, node = _who(log, line)
    return FirstError(
        evidence,
        _around(log, last),
        first.time,
        rank,
        node,
        _owner("program", text, near, logs, rules),
        _owner("library", text, near, (), rules),
        tuple(itertools.islice(_ends(errors, rules), MOST_ENDS)),
        tuple(dict.fromkeys(_asks(text, near, rules)))[:MOST_ASKS],
    )


def _shortened(text: str) -> str:
    """Return a text, without its middle where it is longer than `LONGEST`."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - END - 1]}…{text[-END:]}"


def _roots_as_errors(
    logs: Sequence[Log], roots: Sequence[tuple[int, Hit]], ending: Ending, *, lower: bool
) -> Iterator[ErrorLine]:
    """Yield the lines of a sure cause as errors: not commands that somebody typed, rows of tables, what ping
    prints, and programs that are shown; with `lower` none that follows from another failure."""
    for place, root in roots:
        log, text = logs[place], logs[place].lines[root.line]
        looked_up = is_command(text) or is_row(log.lines, root.line) or is_of_ping(text)
        if looked_up or (lower and follows(text, ending)):
            continue
        hit = _raised(log, root)
        if not _is_source(log.lines[hit.line]):
            time, stamp = _time(log, hit.line)
            yield ErrorLine(ERROR, stamp, hit, time, place)


def _around(log: Log, line: int) -> tuple[Evidence, ...]:
    """Return a line and those next to it of the same process, as they stand there."""
    shown = log.around(line, ABOVE, BELOW)
    return tuple(Evidence(log.name, number + 1, log.lines[number].rstrip()[:LONGEST_AROUND]) for number in shown)


def tells_error(line: str, ending: Ending) -> bool:
    """Return whether a line tells an error by its own words, and none that something went on after."""
    fine = (*ending.mild, *ending.noise, *ending.fine)
    return _says((*ending.badly, *ending.errors), line) and not _says(fine, line) and _grade(line, ending) == ERROR


def goes_on(line: str, ending: Ending) -> bool:
    """Return whether a line tells of what a program goes on after."""
    return _grade(line, ending) == WENT_ON


def follows(line: str, ending: Ending) -> bool:
    """Return whether a line tells of what came of another failure."""
    return _says(ending.followed, line)


def _hits(log: Log, start: int, ending: Ending) -> dict[int, Hit]:
    """Return the lines that fit a pattern of errors by their numbers."""
    hits: dict[int, Hit] = {}
    for pattern in (*ending.badly, *ending.errors, *ending.words):
        # What goes over the end of a line is looked for in words of causes, not in those of any error.
        for hit in log.find_whole(pattern, start):
            if hit.line not in hits and _says((pattern,), log.lines[hit.line][:2000]):
                hits[hit.line] = hit
    return hits


def _is_frame(line: str) -> bool:
    """Return whether a line is of a traceback's frames, whatever level stands before it."""
    text = bare(line, keep_indent=True)
    return FRAME.search(line) is not None or (text.startswith("  ") and LEVELLED.search(line) is not None)


def _is_code(log: Log, line: int) -> bool:
    """Return whether a line is the code that a traceback's frame stands at."""
    text, label = bare(log.lines[line], keep_indent=True), log.label(line)
    if not text.startswith("  "):
        return False
    above = next((n for n in range(line - 1, max(-1, line - BETWEEN), -1) if log.label(n) == label), None)
    return above is not None and CODE_BELOW.search(log.lines[above]) is not None


def _raised(log: Log, hit: Hit) -> Hit:
    """Return the hit; of a line of a traceback the exception that this one ends in."""
    if not _is_code(log, hit.line) and not _is_frame(log.lines[hit.line]):
        return hit
    label = log.label(hit.line)
    above = range(hit.line - 1, max(-1, hit.line - FRAMES), -1)
    head = next((n for n in above if HEAD in log.lines[n] and log.label(n) == label), hit.line)
    line = _exception(log, head)
    return hit if line <= hit.line else Hit(line, log.lines[line].strip(), hit.matched)


def raised_in(log: Log, line: int) -> str:
    """Return the frame in which the exception of a line was raised, without those of Python, of PyTorch and of Triton
    that only call; "" where no traceback stands above the line."""
    label = log.label(line)
    for number in range(line - 1, max(-1, line - FRAMES), -1):
        if log.label(number) != label:
            continue
        if HEAD in log.lines[number]:
            break
        if CODE_BELOW.search(log.lines[number]) and not CALLS.search(log.lines[number]):
            return bare(log.lines[number])
    return ""


def package_of(frame: str) -> str:
    """Return the Python package whose file a frame of a traceback is in: one that is installed, or that of a checkout,
    which has its name but for what follows it (Megatron-LM/megatron). "" for a script, and where the frame does not
    say."""
    found = FRAME_FILE.search(frame)
    parents = Path(found[1]).parent.parts if found else ()
    for above, folder in itertools.pairwise(parents):
        own, holder = (re.sub(r"[-_.]", "", name).lower() for name in (folder, above))
        if folder.isidentifier() and (above in INSTALLED or holder.startswith(own)):
            return folder
    return ""


def _is_source(line: str) -> bool:
    """Return whether a line is one of a program that is shown, not run."""
    return SOURCE.match(bare(line, keep_indent=True)) is not None


def _sums_up(log: Log, line: int, hits: Collection[int]) -> bool:
    """Return whether a line only sums up what others tell: the heading of an error on the next line, what was logged
    with a traceback, what a script says of it, a row of a table."""
    said = is_echoed(log.lines, line) or is_row(log.lines, line)
    return said or _is_heading(log, line, hits) or _is_logged_above(log, line)


def _is_logged_above(log: Log, line: int) -> bool:
    """Return whether a line is what a program logged with a traceback, which stands right below and tells the
    error."""
    if HEAD in log.lines[line] or LOGGED.search(log.lines[line][:LONGEST_AROUND]) is None:
        return False
    below = next(log.own_below(line), None)
    return below is not None and HEAD in log.lines[below] and _exception(log, below) != below


def _is_heading(log: Log, line: int, hits: Collection[int]) -> bool:
    """Return whether a line is the heading of what stands below it: it ends in a colon, and the next line of its
    process tells the error, or it is one of CMake's or Ansible's, and one of the indented lines below does."""
    text = log.lines[line]
    if ANSIBLE_HEAD.search(text):
        return any(each in hits for each in _indented_below(log, line))
    if not text.rstrip().endswith(":") or HEAD in text or EVENT.search(text):
        return False
    if CMAKE_HEAD.search(text):
        return any(each in hits for each in _indented_below(log, line))
    return next(log.own_below(line, BETWEEN), -1) in hits


def _indented_below(log: Log, line: int) -> Iterator[int]:
    """Yield the lines below one that belong to it: with more indent, or empty."""
    indent = _indent(log.lines[line])
    for number in range(line + 1, min(len(log.lines), line + FRAMES)):
        if log.lines[number].strip() and _indent(log.lines[number]) <= indent:
            return
        yield number


def _indent(line: str) -> int:
    text = bare(line, keep_indent=True)
    return len(text) - len(text.lstrip())


def _is_warned(log: Log, line: int) -> bool:
    """Return whether a line is of the indented text below the head of a warning, which may be indented itself."""
    label, indent = log.label(line), _indent(log.lines[line])
    for number in range(line, max(-1, line - WARNING_LINES), -1):
        text = bare(log.lines[number], keep_indent=True)
        if indent == 0 or (log.label(number) == label and ERROR_HEAD.match(text)):
            return False
        if log.label(number) != label or not text.strip() or _indent(log.lines[number]) >= indent:
            continue
        if WARNING_HEAD.match(text):
            return True
        indent = _indent(log.lines[number])
    return False


def _is_chained(log: Log, line: int) -> bool:
    """Return whether an exception was made from another one above it, which says more."""
    if THROWN.match(bare(log.lines[line])) is None:
        return False
    above = range(line, max(-1, line - CHAIN), -1)
    label = log.label(line)
    return any("was the direct cause of the following" in log.lines[n] for n in above if log.label(n) == label)


def _is_handed_on(log: Log, line: int) -> bool:
    """Return whether an exception hands on that of a process it started, whose traceback stands below it."""
    below = next(log.own_below(_exception(log, line)), None)
    return below is not None and SPAWNED.match(bare(log.lines[below])) is not None


def _is_cut(log: Log, line: int) -> bool:
    """Return whether a traceback that begins on a line ends before its exception: most often its program was ended."""
    return log.lines[line][:2000].rstrip(" :\r\n").endswith(HEAD) and _exception(log, line) == line


def _is_consequence(log: Log, line: int, ending: Ending, found: Sequence[ErrorLine]) -> bool:
    """Return whether an error on a line followed from another one in its log, told before it."""
    if _is_chained(log, line) or _is_handed_on(log, line):
        return True
    return fits(ending.thrown, log.lines[line][:2000]) and any(each.grade <= WAITED for each in found)


def _grade(line: str, ending: Ending) -> int:
    """Return how far a line is from being the first error: one of the grades above."""
    grades = (
        (ENDED, ending.ended),
        (FOLLOWED, ending.followed),
        (WAITED, ending.waited),
        (SLOW, ending.slow),
        (WENT_ON, ending.lesser),
    )
    return next((grade for grade, patterns in grades if _says(patterns, line)), ERROR)


def _says(patterns: Sequence[Pattern], line: str) -> bool:
    """Return whether a line fits one of the patterns, with or without what its launcher put before it."""
    text = bare(line, keep_indent=True)
    return fits(patterns, line) or (text != line and fits(patterns, text))


def fits(patterns: Sequence[Pattern], line: str) -> bool:
    """Return whether a line fits one of the patterns, which have words to look for."""
    small = line.lower()
    return any(pattern.regex.search(line) for pattern in patterns if any(word in small for word in pattern.words))


def _earliest(found: Sequence[ErrorLine]) -> ErrorLine:
    """Return the first of them: by time where all say it, of those of one log at about that time the first line; else
    in the order of the logs and lines."""
    timed = all(each.stamp is not None for each in found)
    years = {len(each.stamp or ()) for each in found}
    if not timed or len(years) != 1:
        return min(found, key=lambda each: (each.place, each.hit.line))
    first = min(found, key=lambda each: (each.stamp or (), each.place, each.hit.line))
    until = _seconds(first.stamp or ()) + AT_ONCE
    alike = [each for each in found if each.place == first.place and _seconds(each.stamp or ()) <= until]
    return min(alike, key=lambda each: each.hit.line)


def _seconds(stamp: tuple[float, ...]) -> float:
    """Return a time as seconds, months being of 31 days: good for short differences."""
    *_, month, day, hour, minute, second = (0.0, *stamp)
    return (((month * 31 + day) * 24 + hour) * 60 + minute) * 60 + second


def _time(log: Log, line: int) -> tuple[str, tuple[float, ...] | None]:
    """Return the time of a line as it stands there, and as numbers; of the lines above it where it says none."""
    for number in range(line, max(-1, line - BACK), -1):
        # A collector's clock is the same for all lines; a program has a time of its own on some.
        heads = [head for head in (log.heads[number], log.lines[number][:120]) if CLOCK.search(head)]
        for match in (pattern.search(head) for head in heads for pattern in STAMP):
            if match:
                return match[0], _numbers(match)
    return "", None


def _numbers(match: re.Match[str]) -> tuple[float, ...]:
    parts = match.groupdict()
    month = int(parts["mo"]) if parts.get("mo") else MONTHS.get(parts.get("mon") or "", 0) + 1
    second = float(parts["s"]) + float((parts["f"] or "0").replace(",", "."))
    year = (float(parts["y"]),) if parts.get("y") else ()
    return (*year, float(month), float(parts["d"]), float(parts["h"]), float(parts["mi"]), second)


def _exception(log: Log, line: int) -> int:
    """Return the line of the exception whose traceback begins on a line; of any other line that line."""
    if HEAD not in log.lines[line]:
        return line
    head, _, _ = log.lines[line].partition(HEAD)
    above, frame = line, False
    for number in _own_traceback(log, line, head):
        text = _behind(head, log.lines[number])
        # Where indents were lost the code of a frame looks like the end of the frames.
        if _ends_frames(text) and not (frame and THROWN.match(text) is None):
            return _with_words(log, number, above, log.label(line))
        above, frame = number, FRAME.match(text) is not None
    return line


def _own_traceback(log: Log, line: int, head: str) -> Iterator[int]:
    """Yield the lines below the head of a traceback that are of the same process; where a logger put `head` before each
    line of it, those alone."""
    first = next(log.own_below(line, FRAMES), None)
    logged = first is not None and bool(head.strip()) and _begins(head, log.lines[first])
    return (number for number in log.own_below(line, FRAMES) if not logged or _begins(head, log.lines[number]))


def _innermost(log: Log, line: int) -> int:
    """Return the last of the reasons that stand below an error, as programs in Rust print them: a line each, or
    numbered ones below a bare heading; without any its own line."""
    for number in log.own_below(line):
        text = bare(log.lines[number])
        if not text:
            continue
        if not text.startswith(CAUSED_BY) and NUMBERED.match(text) is None:
            break
        if OS_ERROR.fullmatch(text):
            continue
        line = number if text != CAUSED_BY else line
    return line


def _reason_above(log: Log, line: int, rules: CauseSet) -> int:
    """Return the line on which the process of a vague error said the reason before, the first of several next to each
    other; without one, and for any other error, its own line."""
    text, label, found = log.lines[line][:2000], log.label(line), line
    said = [pattern for each in rules.vague if _says(each.find, text) for pattern in each.said]
    for number in range(line - 1, max(-1, line - REASON_ABOVE), -1) if said else ():
        if log.label(number) != label or not bare(log.lines[number]):
            continue
        if _says(said, log.lines[number][:2000]):
            found = number
        elif found != line:
            break
    return found


def _ends_frames(text: str) -> bool:
    """Return whether a line ends the frames of a traceback: it is its exception."""
    frame = not text.strip() or text.startswith((" ", "\t")) or set(text.strip()) <= set("^~ ")
    frame = frame or FRAME.match(text) is not None or WRAPPED.match(text) is not None
    return not frame and HEAD not in text and OF_ANOTHER.search(text) is None


def _behind(head: str, line: str) -> str:
    """Return a line with its indent, without what stood before `Traceback` in the same process: the same text, but
    for digits of the time; without labels where it is another one."""
    return line[len(head) :] if head and _begins(head, line) else bare(line, keep_indent=True)


def _begins(head: str, line: str) -> bool:
    """Return whether a line begins with a text, but for digits."""
    return DIGIT.sub("0", line[: len(head)]) == DIGIT.sub("0", head)


def _with_words(log: Log, line: int, above: int, label: str) -> int:
    """Return the line that says most of an exception: what was asserted where it has no words of its own, what is
    wrong below a heading, its first words below its name, its `Last error:`, else its own line."""
    text = bare(log.lines[line])
    if text.rstrip().endswith("AssertionError") and ASSERTS.match(bare(log.lines[above])):
        return above
    below = [n for n in range(line + 1, min(len(log.lines), line + 5)) if log.label(n) == label]
    if INVALID.search(text):
        return next((n for n in below if FAULTY.search(log.lines[n])), line)
    if WORDLESS.match(text):
        return _first_words(log, below, line)
    return _last_error(log, line, label)


def _first_words(log: Log, lines: Sequence[int], otherwise: int) -> int:
    """Return the first of the lines that is not empty; another line where that one has no letters."""
    first = next((number for number in lines if bare(log.lines[number])), otherwise)
    return first if any(map(str.isalpha, log.lines[first])) else otherwise


def _last_error(log: Log, line: int, label: str) -> int:
    """Return the line on which an exception says its `Last error:`, as NCCL's do, else its own line."""
    own = (n for n in range(line + 1, min(len(log.lines), line + FRAMES)) if log.label(n) == label)
    below = list(itertools.islice(own, LAST_ERROR))
    for number, following in itertools.pairwise([*below, line]):
        text = bare(log.lines[number])
        if text == "Last error:" and following != line:
            return following
        if text != "Last error:" and text.startswith("Last error:"):
            return number
    return line


def _own_lines(log: Log, line: int, reach: int) -> list[str]:
    """Return the lines around one, the nearest first, those above before those below."""
    order = sorted(range(max(0, line - reach), min(len(log.lines), line + reach + 1)), key=lambda n: (abs(n - line), n))
    return [log.lines[number][:2000] for number in order if number != line]


def _who(log: Log, line: int) -> tuple[str, str]:
    """Return the rank and the node of a line: from the line, else from the same process's lines above, else from the
    log's name."""
    label = log.label(line)
    above = [n for n in range(line, max(-1, line - REACH), -1) if n == line or log.label(n) == label]
    said = [text[:400] for n in above for text in (log.lines[n], log.whole(n))]
    rank = next(filter(None, map(_rank, said)), "")
    node = next(filter(None, map(_node, said)), "")
    if not rank and (named := FILE_RANK.search(log.name)):
        rank = f"rank {named[1]}"
    if not node and (named := FILE_NODE.search(log.name)):
        node = named[1]
    return rank, node


def _rank(line: str) -> str:
    if match := PLACE.search(line):
        return match[1] or match[2]
    return next((f"rank {match[1]}" for pattern in RANK if (match := pattern.search(line))), "")


def _node(line: str) -> str:
    return next((match[1] for pattern in NODE if (match := pattern.search(line))), "")


def _owner(kind: str, text: str, around: Sequence[str], logs: Sequence[Log], rules: CauseSet) -> str:
    """Return the program or library that a line belongs to: by the line, else by the nearest one that names one, else
    (a program) by any line of the logs."""
    origins = [origin for origin in rules.origins if origin.kind == kind]
    named = (origin.name for line in (text, *around) for origin in origins if fits(origin.find, line))
    elsewhere = (origin.name for log in logs for origin in origins if any(_stands(log, each) for each in origin.find))
    return next(itertools.chain(named, elsewhere), "")


def _stands(log: Log, pattern: Pattern) -> bool:
    return next(log.find(pattern), None) is not None


def _asks(text: str, around: Sequence[str], rules: CauseSet) -> Iterator[str]:
    """Yield what one needs to know of such a failure."""
    for symptom in rules.symptoms:
        if any(fits(symptom.find, line) for line in (text, *around[:4])):
            yield symptom.ask
    owner = _owner("library", text, around, (), rules)
    yield from (origin.ask for origin in rules.origins if origin.name == owner and origin.ask)
    yield GENERIC


def _ends(errors: Sequence[LogErrors], rules: CauseSet) -> Iterator[Ended]:
    """Yield how processes ended and what devices said, each once, in words."""
    told: set[str] = set()
    for each in errors:
        for number, line in enumerate(each.log.lines[each.start :], each.start):
            for words in _words(line[:2000], rules):
                if words not in told:
                    told.add(words)
                    yield Ended(words, Evidence(each.log.name, number + 1, line.strip()[:240]))


def _words(line: str, rules: CauseSet) -> Iterator[str]:
    small = line.lower()
    if "exit" in small or "signal" in small or "SIG" in line:
        if match := CODE.search(line):
            yield from filter(None, [code_words(int(match[1]))])
        elif match := SIGNAL.search(line):
            yield from filter(None, [_signal_words(match[1] or match[2])])
    if "xid" in small:
        yield from (meaning.words for meaning in rules.meanings if meaning.find.regex.search(line))


def code_words(code: int) -> str:
    """Return what an exit code means, "" for one that says nothing (0, 1, and a program's own)."""
    number = -code if code < 0 else code - OF_SIGNAL if code > OF_SIGNAL else 0
    if number:
        named = _signal_words(str(number))
        return f"exit code {code}: {named}" if named else ""
    return f"exit code {code}: {CODES[code]}" if code in CODES else ""


def _signal_words(signal_: str) -> str:
    """Return a signal, given by its number or name, with what it means."""
    try:
        name = signal.Signals(int(signal_)).name if signal_.isdecimal() else signal.Signals[signal_.upper()].name
    except (ValueError, KeyError):
        return ""
    return f"{name}, {SIGNALS[name]}" if name in SIGNALS else ""


CHANGES = ("stack", "module", "deepep", "lock_digest", "via", "args", "script", "time_limit", "nodes")
"""Values of a run that are compared with those of another one of its kind."""


def changes(run: Mapping[str, str], good: Mapping[str, str], name: str) -> tuple[str, ...]:
    """Return what differs between the values of a run and those of a good one called `name`, in sentences."""
    found = [
        f"{key}: {good.get(key) or 'none'} before, {run.get(key) or 'none'} now"
        for key in CHANGES
        if run.get(key, "") != good.get(key, "")
    ]
    return tuple(f"since {name}: {each}" for each in found) or (f"nothing that a run notes, since {name}",)
