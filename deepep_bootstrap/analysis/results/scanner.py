"""Tokens of upstream's tests, found in a log whatever stands around them: task labels, time stamps, colours,
other ranks' lines.

A line may hold texts of several ranks and a text may go on in another line, so nothing here is anchored
at a line's begin but errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

UNFINISHED = "\x04"
"""Stands behind a last line without its newline: `$` does not match there, so that a value cut in two is no value."""

ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
DROPPED = dict.fromkeys(map(ord, "\x00\x04\r"))
FRONT = re.compile(r"(?:\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,:+Z-]*\]?:? ?)?(?: *(\d{1,5}): ?)?")
"""A time stamp and the number that `srun --label` puts in front, both optional."""

NUMBER = r"(\d{1,12}(?:\.\d{1,17})?)"
WHOLE = r"(\d{1,15})"
CHUNK = r"(\d{1,6}|default)"
END = r"(?= *(?:$|\[))"
CONFIG = r"\[config\] (\w+=\w+(?:, \w+=\w+)*)" + END
CASE = r"\[testing\] ([^\[\]]{1,200}?)(?= ?\.\.\.)"
PASSED = r"(?:^|\.\.\.) *(passed(?: *passed)*)(?= *(?:$|\x04|\[))"
TUNING = (
    r"\[tuning\] (?:Best (dispatch \(FP8\)|dispatch \(BF16\)|combine): )?SMs (\d{1,6}), NVL chunk "
    rf"{CHUNK}(?:, RDMA chunk {CHUNK}(?:[:,] (?:{NUMBER} \+ {NUMBER} us, |transmit: {NUMBER} us, notify: {NUMBER} "
    rf"us, BW: )?"
    rf"{NUMBER} GB/s \(RDMA\), {NUMBER} GB/s \(NVL\))"
    rf"|[:,] {NUMBER} GB/s \(NVL\)(?:, (?:t: )?{NUMBER} us|{END}))"
)
RANK = r"\[rank (\d{1,6})\] "
BOTH = rf"{RANK}Dispatch \+ combine bandwidth: {NUMBER} GB/s, avg_t={NUMBER} us, min_t={NUMBER} us, max_t={NUMBER} us"
EACH = (
    rf"{RANK}Dispatch bandwidth: {NUMBER} GB/s, avg_t={NUMBER} us \| Combine bandwidth: {NUMBER} GB/s, "
    rf"avg_t={NUMBER} us"
)
HALVES = (
    rf"{RANK}Dispatch send/recv time: {NUMBER}(?: \+ {NUMBER})? us \| Combine send/recv time: {NUMBER}(?: \+ "
    rf"{NUMBER})? us"
)
EP = (
    r"EP: +(\d{1,6})/(\d{1,6}) \| (expanded |cached |reduced |)(dispatch|combine): "
    rf"{NUMBER} GB/s \(SO\), {NUMBER} GB/s \(SU\), {NUMBER} us, {WHOLE} bytes"
    rf"(?: \| (copy|reduce): {NUMBER} GB/s, {NUMBER} us|{END})"
)
EP_SETUP = (
    rf" > (?:Ranks: {WHOLE} x {WHOLE}|Experts: {WHOLE}/{WHOLE}|Tokens: {WHOLE} \(max: {WHOLE}\), hidden: {WHOLE}"
    rf"|#SM: {WHOLE}, #QPs: {WHOLE}/{WHOLE})(?= *$)"
)
RUN_LINE = (
    r"deepep: pass (\d{1,3}) of (\d{1,3}) on node (\d{1,4}): "
    r"(?:(\d{1,7}) tokens, run (\d{1,5}) of (\d{1,5}), (\d{1,9}) combine calls to check"
    r"|run (\d{1,5}) of (\d{1,5}) ended with exit code (\d{1,3}))(?= *$)"
)
HEADER = r"deepep: (\S+) test of (\S+): (\S+)([^\x04\[]*)"

PATTERNS = (
    (
        "GB/s",
        ("tuning", "[tuning]", TUNING),
        ("ep", "EP:", EP),
        ("both", "Dispatch + combine", BOTH),
        ("each", "Dispatch bandwidth", EACH),
    ),
    (
        "...",
        ("case", "[testing]", CASE),
        ("ep_case", "> Testing with", r"> Testing with (\w+=\w+(?:, \w+=\w+)*) \.\.\."),
        ("seed", "Testing with seed", r"Testing with seed([ =])(\d{1,15}) \.\.\."),
        ("allocating", "Allocating", rf"Allocating buffer size: {NUMBER} MB"),
    ),
    ("passed", ("passed", "passed", PASSED)),
    ("[layout]", ("layout", "[layout]", rf"\[layout\] Kernel performance: {NUMBER} ms")),
    ("send/recv", ("halves", "send/recv", HALVES)),
    ("[config]", ("config", "[config]", CONFIG)),
    ("Config:", ("ep_config", "Config:", r"(?:^|: )Config:(?= *$)")),
    (" > ", ("ep_setup", " > ", EP_SETUP)),
    ("ref_hash=", ("hash", "ref_hash=", r"^ref_hash=")),
    (
        "deepep: ",
        ("header", " test of ", HEADER),
        ("pass", "deepep: pass ", RUN_LINE),
        ("job", " node", r"deepep: (?:job \S+ on (\d{1,6}) node\(s\)|node \d+ of (\d{1,6});)"),
        ("exit", " ended with ", r"deepep: (\S+) ended with exit code (\d{1,6})"),
    ),
)
"""Families of tokens: a text that a line must hold to have any of them, then for each its kind, a text of its own,
and its grammar. `in` is far faster than a search, so it comes first."""

FAMILIES = tuple(
    (gate, tuple((text, kind, re.compile(pattern)) for kind, text, pattern in family)) for gate, *family in PATTERNS
)

BLOCK = 1 << 20
"""Characters of a log that are cut into lines at once."""

TRACEBACK = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)(?::|$)")
FAILURE = re.compile(
    r"DeepEP (?:error|timeout|.{0,200}(?:timeout|check failed))|^(?:(?:srun|slurmstepd|sbatch): )?error: |\[rank "
    r"\d+\] FAILED"
    r"|Assertion (?:failed|error)|^Segmentation fault|^Killed$|terminate called|CANCELLED AT|Watchdog caught"
    r"|oom[-_]kill|Out of memory"
    r"|^[\w.-]+\.py: error: "  # argparse's
    r"|line \d+: +\d+ (?:Segmentation fault|Killed|Aborted|Bus error|Illegal instruction)|^Fatal Python error|\(core "
    r"dumped\)"
    # A transport that NVSHMEM could not use is no failure by itself, as on one node without network cards: if it was
    # needed, others say so.
    r"|^(?!.*(?:modules/transport/|\bib(?:rc|gda|devx)\.cpp:)).*non-zero status: -?\d"
)
LAUNCHER = re.compile(r"(?:srun|slurmstepd|sbatch|torchrun|prterun|mpirun): |.*\bended with exit code \d+$|Killed$")
"""An error that only says that a program failed."""

LEADS = (
    *("rror", "xception", "Interrupt", "DeepEP", "FAILED", "ssertion", "fault", "Killed", "error: ", "terminate "),
    *("CANCELLED", "Watchdog", "oom", "memory", "Aborted", "Illegal", "core dumped", "non-zero status"),
)
"""Texts without which a line is no error."""

OF_RANK = re.compile(r"^\[rank ?(\d{1,6})\]:? ?")
TEXT_MAX = 300
"""Characters of an error that are kept: more is no help in a summary, the log has it whole."""


def is_launchers(text: str) -> bool:
    """Return whether an error only says that something else failed."""
    return LAUNCHER.match(text) is not None


class Token(NamedTuple):
    """One thing that a test printed: its kind (of PATTERNS; `error` and `blank` besides), the number of its line, the
    label in front of that line ("" without one), and the groups of its grammar. An error's words are the text and
    the rank it names."""

    kind: str
    line: int
    label: str
    words: tuple[str | None, ...]


def tokens(text: str) -> Iterator[Token]:
    """Yield the tokens of a log, in its order. Never fails; time and memory grow with the longest line, not with the
    log."""
    errors = _ErrorScanner()
    for number, (raw, whole) in enumerate(_lines(text), 1):
        label, line = _line(raw, whole=whole)
        if not line:
            yield Token("blank", number, label, ())
        elif found := _test_tokens(line, number, label):
            yield from found
        elif any(map(line.__contains__, LEADS)) and (error := errors.scan(line)):
            yield Token("error", number, label, (error.text, error.rank))


def _test_tokens(line: str, number: int, label: str) -> list[Token]:
    """Return the tokens of a test in a line, in the order of the line."""
    found: list[tuple[int, Token]] = []
    for gate, family in FAMILIES:
        if gate not in line:
            continue
        for own, kind, pattern in family:
            if own in line:
                matches = pattern.finditer(line)
                found += [(match.start(), Token(kind, number, label, match.groups())) for match in matches]
    if not found:
        return []  # most lines of a log: nothing is built for them
    if len(found) > 1:
        found.sort(key=lambda one: one[0])
    return [token for _, token in found]


def _lines(text: str) -> Iterator[tuple[str, bool]]:
    """Yield lines and whether they have their end. A log of gigabytes is not to be there twice, so it is cut into
    blocks first."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + BLOCK) + 1 or len(text)
        *whole, last = text[start:end].split("\n")
        yield from ((line, True) for line in whole)
        if last:
            yield last, False
        start = end


def _line(line: str, *, whole: bool) -> tuple[str, str]:
    """Return the label and the rest of a line as it came, "" for one without anything."""
    if not line.isprintable():
        line = ESCAPE.sub("", line).translate(DROPPED)
    label = ""
    if line[:1] in {" ", "[", *"0123456789"} and (front := FRONT.match(line)):
        label, line = front[1] or "", line[front.end() :]
    if not line or line.isspace():
        return label, ""
    return label, line if whole else line + UNFINISHED


class _Error(NamedTuple):
    text: str
    rank: str | None
    ends_traceback: bool


class _ErrorScanner:
    """The errors of one log. What follows "Exception ignored" is a traceback of the interpreter's own end, which
    changes nothing for the test: its last line is no error."""

    def __init__(self) -> None:
        self._in_ignored_traceback = False

    def scan(self, line: str) -> _Error | None:
        """Return the error in a line, None for other lines."""
        if line.startswith("Exception ignored"):
            self._in_ignored_traceback = True
            return None
        error = _error(line.rstrip(UNFINISHED))
        if error is None:
            return None
        is_ignored = self._in_ignored_traceback and error.ends_traceback
        self._in_ignored_traceback = False
        return None if is_ignored else error


def _error(line: str) -> _Error | None:
    """Return the error in a line and the rank that it names; None for other lines."""
    named = OF_RANK.match(line)
    bare = line[named.end() :] if named else line
    ends_traceback = TRACEBACK.match(bare) is not None
    if not ends_traceback and not FAILURE.search(line):
        return None
    return _Error(line.strip()[:TEXT_MAX], named[1] if named else None, ends_traceback)
