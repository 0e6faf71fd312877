"""What a collector of logs put before every line: the journal, kubectl, stern, docker and its builds, GitHub, or a
launcher that ran one process. Behind it the lines are those of the program, with the indents of its tracebacks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:?\d\d)"
DATE = r"[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}"
"""What mpirun --timestamp-output puts before its label."""

BUILD = re.compile(r"(?P<who>)#(?P<step>\d+) \d+\.\d+ ?")
"""A step of a build of docker: nothing else begins so, and lines of its own steps have no time."""

STEP_DONE = re.compile(r"#(?P<step>\d+) DONE \d+\.\d+s\s*$")

FORMS = (
    re.compile(rf"(?P<who>){STAMP} "),
    re.compile(rf"(?:[A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)?|{STAMP}) (?P<who>[\w.-]+ [\w./@-]+\[\d+\]): ?"),
    re.compile(r"(?P<who>\[pod/[\w.-]+/[\w.-]+\]) ?"),
    re.compile(rf"(?P<who>[^\t\n]{{1,80}}\t[^\t\n]{{1,80}}\t){STAMP} ?"),
    re.compile(rf"(?:{DATE})?(?P<who>\[\d+,\d+\]<std(?:out|err)>:)"),
    re.compile(r"(?P<who>\d{1,5}: )"),
    re.compile(r"(?P<who>\((?:[\w.]+ )?pid=\d+(?:, ip=[\w.:]+)?\) )"),
    re.compile(r"(?P<who>[\w.-]{1,60} *\| ?)"),
    re.compile(r"(?P<who>[a-z0-9]+(?:-[a-z0-9]+)+ [a-z][a-z0-9-]{0,40} )"),
)
"""Times and counters of a build are no part of `who`: a prefix is one of a collector where `who` is always the same."""

SHARE = 0.9
"""Share of the lines that have the prefix; the others are wrapped, or the collector's own."""

LEAST, SAMPLE = 4, 2000
"""Lines that it takes to tell a prefix, and those that are looked at."""

NESTED = 3
"""Collectors that one log may have gone through: a launcher in a pod whose lines kubectl wrote with their times."""


def without_prefix(lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what collectors put before each line ("" for nothing), and the lines without it."""
    heads, rest = [""] * len(lines), list(lines)
    for _ in range(NESTED):
        form = _form(rest)
        if form is None:
            break
        for number, line in enumerate(rest):
            if match := form.match(line):
                heads[number] += match[0]
                rest[number] = line[match.end() :]
    return heads, rest


def in_done_steps(heads: Sequence[str], lines: Sequence[str]) -> frozenset[int]:
    """Return the lines, counted from 0, of steps of a docker build that ended well, by what stood before each line and
    the lines without it: whatever they say was got over."""
    done = {match["step"] for line in lines if (match := STEP_DONE.match(line))}
    if not done:
        return frozenset()
    found = ((number, BUILD.search(head)) for number, head in enumerate(heads))
    return frozenset(number for number, match in found if match and match["step"] in done)


def _form(lines: Sequence[str]) -> re.Pattern[str] | None:
    """Return the form that nearly all lines have, of one and the same writer; None for none."""
    seen = [line for line in lines[: 2 * SAMPLE] if line.strip()][:SAMPLE]
    if len(seen) < LEAST:
        return None
    if sum(BUILD.match(line) is not None for line in seen) >= LEAST:
        return BUILD
    for form in FORMS:
        writers = Counter(match["who"] for line in seen if (match := form.match(line)))
        if writers and writers.most_common(1)[0][1] >= SHARE * len(seen):
            return form
    return None
