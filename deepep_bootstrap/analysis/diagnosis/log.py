"""One log to be searched: without colours, with the labels of launchers told from the text, quick also with
100 MB.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections.abc import Iterator

from msgspec import Struct

from deepep_bootstrap.analysis.diagnosis.collectors import DATE, in_done_steps, without_prefix
from deepep_bootstrap.analysis.diagnosis.pod_events import got_over
from deepep_bootstrap.analysis.diagnosis.rules import LETTERS, Pattern, Vocabulary, Word, longest_letters, threes
from deepep_bootstrap.analysis.diagnosis.tries import harmless_tries

ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]"
)
"""Colours, titles, cursor moves, bells; not what ends a line."""

LABEL = re.compile(
    r"\s*(?:\[\d+,\d+\]<std(?:out|err)>:|(?:\[?(?:rank|RANK|Rank)[ _]?\d+\]?:?"
    r"|\[(?:node|host|pod|task|worker) ?\d{1,5}\]|\d{1,5}:|\((?:[\w.=-]+,? ){0,3}(?:pid"
    r"|ip)=[^)\n]{1,40}\)|\[pod/[\w./-]{1,120}\]|[\w.-]{1,60} [\w./@-]{1,60}\[\d+\]:"
    r"|[A-Za-z][\w.-]{0,40}\d:|std(?:out|err):|[\w.-]{1,60} *\|)(?=\s|$))"
)
"""What srun -l, mpirun, torchrun, accelerate, Ray, vLLM, pdsh, compose, kubectl and the journal put before the lines
of one process."""

TIME = re.compile(
    r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d{1,9})? "
    rf"|{DATE}(?=\[\d+,\d+\]<std)"
    r"|\s*\[?\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?(?:Z|[+-]\d{2}:?\d{2})?"
    r"(?: (?:DP|TP|EP|PP)\d+){0,4}\]?[:,]?\s?"
)
LEVEL = re.compile(
    r"(?:CRITICAL|ERROR|WARNING|INFO|DEBUG)\b:?(?: \d\d-\d\d \d\d:\d\d:\d\d)?"
    r"(?:(?: \d{2,8})? (?:\[ ?(?:[A-Z]{2}\d+ )*)?[\w./-]{1,80}:\d+\])? ?"
)
"""What vLLM and others put before a message, and before each line of a traceback."""

COLUMN = re.compile(r"\| (?:CRITICAL|ERROR|WARNING|INFO|DEBUG) *\| {0,3}")
"""A level in a column of its own behind the time, as srt-slurm prints it, before lines of programs that it started,
too."""

LONGEST_LABEL = 200

LONGEST_MESSAGE, CONTINUED = 2000, 3
"""Characters of a line that a message is read from, and lines that it may go on over."""

GOES_ON = re.compile(
    r"(?:\[ *\d+\.\d+\] )?(?:NVRM: )?(?:that|which|and|or|but|to|of|for|is|are|was|were|not|with|because|in|on|by|has"
    r"|have|cannot|could|does|did|when|as|from|than|be|been|requires|installed|another) (?!.{0,20}: )"
)
"""A line that goes on with the sentence of the line above it: it begins with a word that none begins with."""

SENTENCE_ENDS = (".", ":", "!", "?", ";")

OTHERS = 200
"""Lines on each side among which those of one process are looked for: a few of each of many ranks."""

WINDOW = 1000
"""Characters on both sides of a word that are looked at where a line is longer."""

MOST_CANDIDATES = 20_000
"""Lines with the right word that are looked at for one pattern; a log with more of them says always the same."""

MOST_HITS = 50
JOINED_AT_MOST = 2_000_000
"""Characters of a log in which messages are also looked for over the ends of lines."""

CUTS = 2
"""Ends of lines that one message may go over."""

REACH = 200
"""Characters on both sides of a word in which such a message is looked for."""


class Evidence(Struct, frozen=True):
    """A line that shows something: the log's name, the line's number from 1, its text."""

    log: str
    line: int
    text: str


class Hit(Struct, frozen=True):
    """A line (counted from 0) that fits a pattern, its text, cut around what fits where the line is long, and what of
    it fits."""

    line: int
    text: str
    matched: str


class _Stream(Struct, frozen=True):
    """The lines of one process joined to one text: small letters to find words in, where each line begins, and its
    number."""

    text: str
    small: str
    starts: tuple[int, ...]
    lines: tuple[int, ...]

    def cut_hit(self, match: re.Match[str]) -> Hit | None:
        """Return the hit of a match that goes over the end of a line, or of `CUTS` lines at most; None for others."""
        first = bisect_right(self.starts, match.start()) - 1
        last = bisect_right(self.starts, match.end() - 1) - 1
        return Hit(self.lines[first], match[0], match[0]) if 0 < last - first <= CUTS else None


class Log:
    """The text of one log under the `name` it is shown by. Built once, searched many times; it only remembers where
    words begin. What a collector put before all lines stands apart, in `heads`. Warnings about pods that are well by
    now are left out: their lines are empty. `done`: lines that tell of no failure whatever they say: of steps of a
    build that ended well, of tries that did no harm, and of commands that worked when they were typed again."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        clean = ESCAPES.sub("", text) if ESCAPES.search(text) else text
        self.heads, lines = without_prefix(clean.replace("\r\n", "\n").split("\n"))
        self.done = in_done_steps(self.heads, lines) | harmless_tries(lines)
        over = got_over(lines)
        self.lines = ["" if number in over else line for number, line in enumerate(lines)] if over else lines
        self._small = "\n".join(self.lines).lower()
        self._ends = [match.start() for match in re.finditer("\n", self._small)]
        rows = self._each_letters()
        self._letters = "\n".join(rows)
        self._places: dict[str, int] = {}
        self._labels: dict[int, str] = {}
        self._streams = tuple(_joined(self.lines)) if len(self._small) <= JOINED_AT_MOST else ()
        self._joined_small = "\0".join(stream.small for stream in self._streams)
        self._joined_words: dict[str, bool] = {}
        rows.update(LETTERS.findall(self._joined_small))
        self._marks = rows.union(itertools.chain.from_iterable(map(threes, rows)))

    def words(self, vocabulary: Vocabulary) -> Iterator[Word]:
        """Yield the words that are in the log, whole or over the end of a line."""
        have = self._marks.issuperset
        for mark in ("", *(vocabulary.words.keys() & self._marks)):
            for word in vocabulary.words.get(mark, ()):
                if have(word.marks) and self._has(word.text):
                    yield word

    def _has(self, word: str) -> bool:
        return self._place(word, 0) >= 0 or self._is_joined(word)

    def find(self, pattern: Pattern, start: int = 0) -> Iterator[Hit]:
        """Yield the lines from `start` on that fit, in order; what is cut over several lines comes after those that
        are whole."""
        yield from self.find_whole(pattern, start)
        if pattern.tight:
            yield from itertools.islice(self._cut(pattern, start), MOST_HITS)

    def find_whole(self, pattern: Pattern, start: int = 0) -> Iterator[Hit]:
        """Yield the lines from `start` on that fit by themselves, in order."""
        return itertools.islice(self._whole(pattern, start), MOST_HITS)

    def has_word(self, pattern: Pattern) -> bool:
        """Return whether any word of a pattern is in the log: without one nothing fits, which is so of most rules, and
        told quickly."""
        return any(self._place(word, 0) >= 0 or (pattern.tight and self._is_joined(word)) for word in pattern.words)

    def label(self, line: int) -> str:
        """Return what tells the process of a line from others, "" where nothing does."""
        if (known := self._labels.get(line)) is None:
            label = LABEL.match(_without_time(self.lines[line][:LONGEST_LABEL]))
            known = self._labels[line] = label[0].strip() if label else ""
        return known

    def whole(self, line: int) -> str:
        """Return a line as it stands in the log."""
        return self.heads[line] + self.lines[line]

    def message(self, line: int) -> str:
        """Return what a line says without labels, with the next lines of its process where its sentence goes on there,
        or it ends in a colon."""
        text = bare(self.lines[line][:LONGEST_MESSAGE])
        for number in itertools.islice(self.own_below(line), CONTINUED):
            if not text.endswith(":") and not self._goes_on(number):
                break
            text = f"{text} {bare(self.lines[number][:LONGEST_MESSAGE])}"
        return text

    def sentence(self, line: int) -> int:
        """Return the line on which the sentence of a line begins: itself, or one above it that it goes on with."""
        for number in range(line, max(0, line - CONTINUED), -1):
            if not self._goes_on(number):
                return number
        return max(0, line - CONTINUED)

    def _goes_on(self, line: int) -> bool:
        """Return whether a line goes on with the sentence of the one above it."""
        if line == 0 or GOES_ON.match(bare(self.lines[line][:LONGEST_MESSAGE])) is None:
            return False
        above = self.lines[line - 1].rstrip()
        return bool(above) and not above.endswith(SENTENCE_ENDS) and self.label(line - 1) == self.label(line)

    def own_below(self, line: int, reach: int = OTHERS) -> Iterator[int]:
        """Yield the next lines of the same process that are not empty, among those less than `reach` away."""
        below = range(line + 1, min(len(self.lines), line + reach))
        return (number for number in below if self.lines[number].strip() and self.label(number) == self.label(line))

    def around(self, line: int, above: int, below: int) -> list[int]:
        """Return the line and those of the same process nearest to it, at most so many on each side, in order; without
        empty lines and rules of dashes."""
        own = [n for n in self._others(line) if any(map(str.isalnum, bare(self.lines[n][:LONGEST_MESSAGE])))]
        before, after = [n for n in own if n < line], [n for n in own if n > line]
        return [*before[-above:], line, *after[:below]]

    def _others(self, line: int) -> Iterator[int]:
        """Yield the lines of the same process among those near to a line, in order."""
        near = range(max(0, line - OTHERS), min(len(self.lines), line + OTHERS))
        return (number for number in near if number != line and self.label(number) == self.label(line))

    def last(self, pattern: Pattern, before: int | None = None) -> int:
        """Return the number of the last line that fits, of those `before` a line where one is given, -1 without one.
        Looks from the end."""
        found = -1
        end = len(self._small) if before is None else self._ends[before - 1] if before > 0 else 0
        for word in pattern.words:
            at, tries = end if self._place(word, 0) >= 0 else 0, 0
            while (at := self._small.rfind(word, 0, at)) >= 0 and tries < MOST_CANDIDATES:
                tries += 1
                line = bisect_right(self._ends, at)
                if line <= found:
                    break
                if pattern.regex.search(self._around(line, at)):
                    found = line
                    break
        return found

    def near(self, pattern: Pattern, line: int, reach: int) -> bool:
        """Return whether a line not more than `reach` lines away fits, or one of the same process that is as near
        among its own lines."""
        span = range(max(0, line - reach), min(len(self.lines), line + reach + 1))
        return any(
            pattern.regex.search(self.lines[number][: 2 * WINDOW])
            for number in itertools.chain(span, self._own(line, reach))
        )

    def _own(self, line: int, reach: int) -> Iterator[int]:
        """Yield up to `reach` lines of the same process on both sides of one; none where nothing names processes."""
        label = self.label(line)
        if not label:
            return
        end = len(self.lines)
        for side in (range(line - 1, max(-1, line - OTHERS), -1), range(line + 1, min(end, line + OTHERS))):
            yield from itertools.islice((number for number in side if self.label(number) == label), reach)

    def _whole(self, pattern: Pattern, start: int) -> Iterator[Hit]:
        last = -1
        for line, at in itertools.islice(self._candidates(pattern, start), MOST_CANDIDATES):
            text = self._around(line, at)
            match = pattern.regex.search(text)
            if match is None and pattern.anchored:
                text = bare(text, keep_indent=True)
                match = pattern.regex.search(text)
            if match and line != last:
                last = line
                yield Hit(line, _shortened(text, match), match[0])

    def _candidates(self, pattern: Pattern, start: int) -> Iterator[tuple[int, int]]:
        """Yield (line, place in the whole text) wherever one of the pattern's words stands, in order."""
        begin = self._ends[start - 1] + 1 if 0 < start <= len(self._ends) else 0 if start == 0 else len(self._small)
        places = {word: self._place(word, begin) for word in pattern.words}
        while places := {word: at for word, at in places.items() if at >= 0}:
            at = min(places.values())
            line = bisect_right(self._ends, at)
            yield line, at
            end = self._ends[line] if line < len(self._ends) else len(self._small)
            onward = min(end, at + WINDOW)
            for word, place in places.items():
                if place < onward:
                    places[word] = self._small.find(word, onward)

    def _place(self, word: str, begin: int) -> int:
        """Return where a word stands first from `begin` on, -1 for nowhere. Rules share words: each is looked for
        from the start once, and not at all where its letters are nowhere, as those of most errors are."""
        first = self._places.get(word)
        if first is None:
            first = self._places[word] = self._small.find(word) if longest_letters(word) in self._letters else -1
        return first if first < 0 or first >= begin else self._small.find(word, begin)

    def _is_joined(self, word: str) -> bool:
        """Return whether a word stands in the joined lines of a process."""
        found = self._joined_words.get(word)
        if found is None:
            found = self._joined_words[word] = word in self._joined_small
        return found

    def _each_letters(self) -> set[str]:
        """Return each row of letters of the text once: few, in a log that says the same again and again."""
        found: set[str] = set()
        begin = 0
        for end in (*self._ends, len(self._small)):
            found.update(LETTERS.findall(self._small, begin, end))
            begin = end
        return found

    def _around(self, line: int, at: int) -> str:
        """Return the text of a line, of a long one the part around the place `at` of the whole text."""
        text = self.lines[line]
        if len(text) <= 2 * WINDOW:
            return text
        begin = at - (self._ends[line - 1] + 1 if line else 0)
        return text[max(0, begin - WINDOW) : begin + WINDOW]

    def _cut(self, pattern: Pattern, start: int) -> Iterator[Hit]:
        """Yield messages that go over the end of a line: wrapped by a terminal or a tool, or cut by another process."""
        for stream in self._streams:
            for word in filter(self._is_joined, pattern.words):
                for begin, end in _surroundings(stream.small, word):
                    match = pattern.regex.search(stream.text, begin, end)
                    hit = stream.cut_hit(match) if match else None
                    if hit and hit.line >= start:
                        yield hit


def _without_time(line: str) -> str:
    time = TIME.match(line)
    return line[time.end() :] if time else line


def bare(line: str, *, keep_indent: bool = False) -> str:
    """Return a line without labels of processes, times and levels before its text; with its indent where asked."""
    text = line
    for _ in range(3):
        before = text
        text = _without_time(text)
        if label := LABEL.match(text):
            text = text[label.end() :].removeprefix(" ")
        text = text[level.end() :] if (level := LEVEL.match(text) or COLUMN.match(text)) else text
        if text == before:
            break
    return text if keep_indent else text.strip()


def _surroundings(text: str, word: str) -> Iterator[tuple[int, int]]:
    """Yield the span of text around each place of a word in which a message is looked for."""
    at = text.find(word)
    while at >= 0:
        end = at + len(word)
        yield max(0, at - 2 * len(word) - REACH), end + REACH
        at = text.find(word, end)


def _joined(lines: list[str]) -> Iterator[_Stream]:
    """Yield the lines of each process as one text, once without anything between them and once with a space."""
    streams: dict[str, list[tuple[int, str]]] = {}
    for number, line in enumerate(lines):
        text = _without_time(line)
        label = LABEL.match(text)
        streams.setdefault(label[0].strip() if label else "", []).append(
            (number, text[label.end() if label else 0 :].strip())
        )
    for stream in streams.values():
        if len(stream) < 2:
            continue
        numbers = tuple(number for number, _ in stream)
        for between in ("", " "):
            text = between.join(line for _, line in stream)
            starts = tuple(itertools.accumulate((len(line) + len(between) for _, line in stream[:-1]), initial=0))
            small = text.lower()
            # Letters whose small form has another length would shift every place after them.
            yield _Stream(text, small if len(small) == len(text) else text, starts, numbers)


def _shortened(text: str, match: re.Match[str], most: int = 240) -> str:
    """Return the text stripped, of a long one the part around the match."""
    if len(text) <= most:
        return text.strip()
    begin = max(0, min(match.start() - most // 4, len(text) - most))
    end = begin + most
    return ("…" if begin else "") + text[begin:end].strip() + ("…" if end < len(text) else "")
