"""Causes of a failure named from logs by the rules of env/rules/causes, the most likely one first."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from deepep_bootstrap.analysis.diagnosis.first_error import (
    BELOW,
    BUNDLE,
    FirstError,
    LogErrors,
    first_error,
    fits,
    follows,
    goes_on,
    package_of,
    raised_in,
    tells_error,
)
from deepep_bootstrap.analysis.diagnosis.log import WINDOW, Evidence, Hit, Log
from deepep_bootstrap.analysis.diagnosis.pasted import (
    ExitCode,
    asked_code,
    is_command,
    is_row,
    only_looks,
    worked_at_last,
)
from deepep_bootstrap.analysis.diagnosis.pod_events import came_up
from deepep_bootstrap.analysis.diagnosis.rules import Cause, CauseSet, Ending, Pattern, Sign, Symptom
from deepep_bootstrap.core.redact import scrub

NEAR = 12
"""Lines on both sides of a sign in which its neighbour is looked for: about one traceback."""

FLOOR = 0.3
"""Least confidence of a cause that is named."""

SURE = 0.75
"""From here on a cause is taken for sure and explains others."""

ALIKE = 0.1
"""Sure causes that differ by less in confidence are shown in the order of time: what came first is the root more
often."""

HIDDEN = 0.4
"""What is left of the confidence in a cause that a sure one explains."""

MOST = 0.98
"""The most that is believed of a cause one of whose signs is its own."""

TELLS, LIKELY_MOST = 0.8, 0.79
"""A sign of this weight tells its cause by itself: nothing else prints its line. The most that is believed of a cause
of which there is no such sign, whatever adds to it, unless a context decides."""

KIND_FIRST = 0.5
"""From here on what a first error says by itself goes before a cause that only lines tell which followed from it."""

SHARED_MOST, SHARED_IN_CONTEXT, DECIDES = 0.7, 0.88, 0.3
"""The most that is believed of a cause of which there are only symptoms that many causes share (a timeout, an abort,
an illegal access): alone, below `SURE`; beside a context that adds `DECIDES` or more, and so singles the cause out.
Choices: logs whose own cause was taken out of the rules (tests/analysis/diagnosis/test_recorded_logs.py) are then given
to no other with 0.8 and more, but for what those tests name."""

RELAYED = re.compile(r"(?:slurmstepd: error: )?pyxis: {2,}|^\s*what\(\):\s+")
"""What stands before a line that one program prints out of another one's log, and before an exception's text in C++."""

WORD = re.compile(r"[^\W\d_]{3}")
"""What is left of a match beside a symptom in it is words of its own where there are three letters."""

SECOND_SIGN, SECOND_SIGNS = 0.03, 2
"""What every further sign of a cause adds, and how many of them count."""

GOES_ON = 3
"""Lines of progress after which a run has got over what stands before them: fewer come from processes that had not
heard of it yet."""

OF_PROCESS = re.compile(r"pid=\d")
"""A label of one process: another one that is started in its place has another number."""

LIVES = 1000
"""Lines below a traceback in which its process must be heard of again: a few of each of many ranks."""

SHOWN = 3
"""Signs shown as evidence, beside one line of context."""


class Finding(Struct, frozen=True):
    """One cause found, with the confidence in it (0…1), the lines that show it, why it is so, what mends it, and
    where this is from. `checks` would tell it from other causes of the same lines. `general`: no cause is known, and
    this is what the first error says by itself."""

    cause: str
    title: str
    confidence: float
    evidence: tuple[Evidence, ...]
    why: str
    fix: str
    source: str
    checks: str = ""
    general: bool = False


class Note(Struct, frozen=True):
    """Lines that look like a cause and are none here, and why."""

    about: str
    evidence: tuple[Evidence, ...]
    why: str


class Diagnosis(Struct, frozen=True):
    """The result of reading logs: causes, the most likely first; remarks; and the first error in time with what can be
    said of it whatever its cause, None where nothing failed."""

    findings: tuple[Finding, ...]
    notes: tuple[Note, ...]
    first: FirstError | None = None

    @property
    def known(self) -> tuple[Finding, ...]:
        """The causes that rules know, without what the first error says by itself."""
        return tuple(finding for finding in self.findings if not finding.general)

    @property
    def failure(self) -> Evidence | None:
        """The line of the first error."""
        return self.first.evidence if self.first else None


class _LogEnd(Struct, frozen=True):
    """One log with the line from which on it counts: after the last line that says all went well, where nothing
    failed later; the line before which all its ranks got over whatever it tells, -1 for none; and its errors from the
    start on."""

    log: Log
    start: int
    failure: Hit | None
    over: int
    errors: LogErrors


class _Found(Struct, frozen=True):
    """A cause with its signs as found, the strongest first: (weight, part's place among the logs, hit). `follows`: all
    its lines are of kinds that other failures end in. `state`: all of its strong lines tell a state that other reasons
    bring about, too, and no context singles it out."""

    cause: Cause
    signs: tuple[tuple[float, int, Hit], ...]
    confidence: float
    context: tuple[int, Hit] | None
    follows: bool = False
    state: bool = False

    @property
    def told(self) -> float:
        """The confidence in the cause as a user is told it."""
        return min(self.confidence, LIKELY_MOST) if self.state else self.confidence

    @property
    def first(self) -> tuple[int, int]:
        """Where it first shows in the log that shows it most: the log's place, the line."""
        _, part, hit = self.signs[0]
        return part, min((each.line for _, other, each in self.signs if other == part), default=hit.line)

    @property
    def roots(self) -> list[tuple[int, Hit]]:
        """Where its strongest sign first stands in each log."""
        most = self.signs[0][0]
        return [(place, hit) for weight, place, hit in self.signs if weight == most]


class Looked(Struct, frozen=True):
    """The ends of the logs, and the causes that something in them shows, before one is held against the other; `rules`
    are those of which the logs have a word."""

    parts: tuple[_LogEnd, ...]
    found: tuple[_Found, ...]
    failed: bool
    rules: CauseSet


def look_at(logs: Mapping[str, str], rules: CauseSet) -> Looked:
    """Return what shows in the logs (name → text, in the order in which they count), by `rules`."""
    read = [Log(name, text) for name, text in logs.items()]
    spoken = _spoken_of(read, rules)
    parts = tuple(_log_end(log, spoken.ending) for log in read)
    failed = any(part.failure for part in parts)
    look = _Look(parts, spoken.ending, spoken.symptoms, failed)
    found = tuple(each for cause in spoken.causes if (each := look.at(cause)))
    if failed and not found and all(part.errors.own is None for part in parts):
        # Nothing else tells why: then a warning may, and is believed as little as what many causes show alike.
        look = replace(look, ending=replace(spoken.ending, mild=()))
        warned = (each for cause in spoken.causes if (each := look.at(cause)))
        own = (each for each in warned if not each.follows)
        found = tuple(replace(each, confidence=min(each.confidence, SHARED_MOST)) for each in own)
    return Looked(parts, found, failed, spoken)


def _spoken_of(logs: Sequence[Log], rules: CauseSet) -> CauseSet:
    """Return the rules of which the logs have a word: few of many, and found much faster than by asking for each."""
    sources, causes = set(rules.vocabulary.wordless), set[int]()
    for word in itertools.chain.from_iterable(log.words(rules.vocabulary) for log in logs):
        sources |= word.sources
        causes |= word.causes
    return rules.within(sources, causes)


def findings_of(looked: Looked) -> tuple[Finding, ...]:
    """Return the causes that are left when all that show are held against each other, the most likely first."""
    return tuple(_finding(each, looked.parts) for each in _rank(looked.found))


def diagnose(logs: Mapping[str, str], rules: CauseSet) -> Diagnosis:
    """Return the causes of a failure in the logs (name → text, in the order in which they count), by `rules`."""
    return conclude(look_at(logs, rules))


def conclude(looked: Looked) -> Diagnosis:
    """Return what follows from what shows in the logs."""
    parts, rules = looked.parts, looked.rules
    notes = (*_harmless(parts, rules), *_survived(parts, rules, {each.cause.slug for each in looked.found}))
    ranked = _rank(looked.found)
    roots = _roots(ranked, looked.found, rules.ending)
    if not looked.failed and any(part.start for part in parts):
        # What shows below the last good end came after it. What counts whatever the end is an error of a run that ended
        # well where its line says so. Logs that do not say how they ended, ended or hang by the cause.
        lasting = bool(ranked) and ranked[0].cause.lasting
        roots = [
            (place, hit)
            for place, hit in roots
            if hit.line >= parts[place].start > 0 or (lasting and tells_error(hit.text, rules.ending))
        ]
    state = bool(ranked) and ranked[0].told < TELLS
    errors = [part.errors for part in parts]
    unfinished = bool(ranked) and not any(part.start for part in parts)
    first = first_error(errors, rules, roots, state=state) if looked.failed or roots or unfinished else None
    return Diagnosis(_told(ranked, first, looked), notes, first)


def _told(ranked: Sequence[_Found], first: FirstError | None, looked: Looked) -> tuple[Finding, ...]:
    """Return the causes, the most likely first; before them, or where none is known, what the first error says by
    itself."""
    if not ranked:
        return _in_general(first, looked.parts, looked.rules)
    kinds: tuple[Finding, ...] = ()
    if first is not None:
        if _only_follows(ranked[0], first, looked.rules.ending):
            said = _in_general(first, looked.parts, looked.rules)
            kinds = tuple(each for each in said if each.confidence >= KIND_FIRST)
        if _is_far_below(ranked[0], first, looked.parts):
            ranked = [replace(each, state=True) for each in ranked]
    return (*kinds, *(_finding(each, looked.parts) for each in ranked))


def _is_far_below(found: _Found, first: FirstError, parts: Sequence[_LogEnd]) -> bool:
    """Return whether all lines of a cause stand below the first error of their log and those shown around it. Of the
    causes named with TELLS and more on unseen logs 7 of 19 were wrong or not enough there, 61 of 414 elsewhere."""
    lines = [hit.line + 1 for _, place, hit in found.signs if parts[place].log.name == first.evidence.log]
    return len(lines) == len(found.signs) and min(lines) > first.evidence.line + BELOW


def _only_follows(found: _Found, first: FirstError, ending: Ending) -> bool:
    """Return whether a cause is told by lines alone that follow from another failure (a launcher's, a plugin's), while
    a program told an error of its own before, in other words: that says more."""
    own = first.evidence
    if not found.follows or found.told >= TELLS or not tells_error(own.text, ending):
        return False
    in_its_words = fits([sign.find for sign in found.cause.signs], own.text)
    return not in_its_words and all(hit.line + 1 != own.line for _, _, hit in found.signs)


def _in_general(first: FirstError | None, parts: Sequence[_LogEnd], rules: CauseSet) -> tuple[Finding, ...]:
    """Return what kind of thing went wrong by the words of the first error, where they say it and nothing got over
    it."""
    if first is None:
        return ()
    line = first.evidence
    part = next(each for each in parts if each.log.name == line.log)
    if line.line <= part.over:
        return ()
    frame = raised_in(part.log, line.line - 1)
    text = RELAYED.sub("", part.log.message(line.line - 1))
    found = next((each for each in rules.general if each.fits(text, frame)), None)
    if found is None:
        return ()
    title, fix = found.told(scrub(text))
    source = "the program's own words"
    return (Finding(found.slug, title, found.confidence, (line,), found.why, fix, source, found.checks, general=True),)


def _roots(ranked: Sequence[_Found], found: Sequence[_Found], ending: Ending) -> list[tuple[int, Hit]]:
    """Return the lines of the first cause, where it is sure, and those of sure ones that it explains that tell an error
    of their own."""
    if not ranked or ranked[0].confidence < SURE:
        return []
    explained = [each for each in found if each.confidence >= SURE and each.cause.slug in ranked[0].cause.hides]
    own = [
        (place, hit)
        for each in explained
        for place, hit in each.roots
        if not any(pattern.regex.search(hit.text) for pattern in ending.followed)
    ]
    return [*ranked[0].roots, *own]


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return `findings`, `notes` and `first_errors` as docs/json.md promises them; lines have their `file` where there
    are several logs."""
    items: tuple[Finding | Note, ...] = (*diagnosis.findings, *diagnosis.notes)
    several = len({each.log for item in items for each in item.evidence}) > 1
    findings = [
        {
            "cause": finding.cause,
            "title": finding.title,
            "confidence": round(finding.confidence, 2),
            "evidence": _lines(finding.evidence, several=several),
            "why": finding.why,
            "fix": advice(finding),
            "source": finding.source,
            "general": finding.general,
        }
        for finding in diagnosis.findings
    ]
    notes = [
        {"about": note.about, "evidence": _lines(note.evidence, several=several), "why": note.why}
        for note in diagnosis.notes
    ]
    return {"findings": findings, "notes": notes, "first_errors": _first_errors(diagnosis.first)}


def _first_errors(first: FirstError | None) -> list[dict[str, Any]]:
    """Return the first error as docs/json.md promises it; none where nothing failed."""
    if first is None:
        return []
    return [
        {
            "file": first.evidence.log,
            "line": first.evidence.line,
            "text": first.evidence.text,
            "around": [{"line": each.line, "text": each.text} for each in first.around],
            "time": first.time,
            "rank": first.rank,
            "node": first.node,
            "program": first.program,
            "library": first.library,
            "ended": [
                {"words": each.words, "file": each.evidence.log, "line": each.evidence.line} for each in first.ended
            ],
            "changed": list(first.changed),
            "asks": list(first.asks),
            "bundle": BUNDLE,
        }
    ]


def advice(finding: Finding) -> str:
    """Return what mends it; where another cause may be meant, with the checks that would decide."""
    return (
        f"{finding.fix} To be sure first: {finding.checks}"
        if finding.checks and finding.confidence < SURE
        else finding.fix
    )


def brief(diagnosis: Diagnosis) -> tuple[str, ...]:
    """Return the first cause as lines to print below a failure: what it is, the line that shows it, why, and what
    mends it; where none is known what kind of failure it is and what can be said of the first error."""
    if not diagnosis.findings:
        return unknown(diagnosis.first) if diagnosis.first else ()
    first = diagnosis.findings[0]
    shown = first.evidence[0]
    return (
        f"{'kind of failure' if first.general else 'cause'}: {first.title} ({first.cause}, {first.confidence:.0%})",
        f"{shown.log + ', ' if shown.log else ''}line {shown.line}: {shown.text}",
        f"why: {first.why}",
        f"fix: {advice(first)}",
        *(unknown(diagnosis.first)[2:] if first.general and diagnosis.first else ()),
    )


def unknown(first: FirstError) -> tuple[str, ...]:
    """Return what can be said of a failure whose cause nobody knows, as lines to print."""
    owner = " in ".join(filter(None, (first.library, first.program)))
    return (
        "no known cause; the first error in time is:",
        *where_it_began(first),
        *([f"belongs to: {owner}"] if owner else []),
        *(f"ended: {each.words} (line {each.evidence.line})" for each in first.ended),
        *(f"changed: {each}" for each in first.changed),
        *(f"needed: {each}" for each in first.asks),
        f"to hand on: {BUNDLE}",
    )


def where_it_began(first: FirstError) -> tuple[str, ...]:
    """Return the line of a first error, those around it, and whose it is, as lines to print."""
    shown = first.evidence
    where = ", ".join(filter(None, (first.node, first.rank, first.time)))
    return (
        f"{shown.log + ', ' if shown.log else ''}line {shown.line}: {shown.text}",
        *(["around it:"] if len(first.around) > 1 else []),
        *(f"  {each.line}: {each.text}" for each in first.around if len(first.around) > 1),
        *([f"from: {where}"] if where else []),
    )


def _lines(evidence: Sequence[Evidence], *, several: bool) -> list[dict[str, Any]]:
    return [{**({"file": each.log} if several else {}), "line": each.line, "text": each.text} for each in evidence]


def line_json(line: Evidence | None) -> dict[str, Any] | None:
    """Return a line with its log as docs/json.md promises it; None for none."""
    return None if line is None else {"file": line.log, "line": line.line, "text": line.text}


def _log_end(log: Log, ending: Ending) -> _LogEnd:
    """Return the log with the part of it that counts: what stands before a good end is over, unless something died
    before it and was not tried again."""
    log.done |= worked_at_last(log.lines, lambda run: _fails_within(log, ending, run))
    asked = asked_code(log.lines)
    start = _after_good_end(log, ending, asked)
    errors = LogErrors(log, start, ending)
    failure = _failure(log, ending, start)
    if failure is None and not start:
        failure = errors.last
    if failure is None and asked and asked.code:
        failure = Hit(asked.line, log.lines[asked.line].strip(), "")
    return _LogEnd(log, start, failure, _got_over(log, ending.together), errors)


def _after_good_end(log: Log, ending: Ending, asked: ExitCode | None) -> int:
    """Return the line after the last good end, 0 where none holds: something failed below it, or died before it. An
    exit code that somebody asked for is a good end where it is 0, and a failure where it is not. Pods that somebody
    looked at until they were ready have come up."""
    whole = max(_last(log, ending.whole), _verdict(log, ending)) + 1
    answered = asked.line + 1 if asked and not asked.code else 0
    said = max(_last_said(log, ending.well) + 1, _went_on(log, ending) + 1)
    start = max(said, came_up(log.lines), answered, whole)
    refused = asked is not None and asked.code != 0 and asked.line >= start
    failed = refused or _failure(log, ending, start) or (start > whole and _died(log, ending, start))
    return 0 if failed else start


def _verdict(log: Log, ending: Ending) -> int:
    """Return the last line of a log where it says of all that stands above it that it went well, -1 where it does
    not."""
    last = next((line for line in range(len(log.lines) - 1, -1, -1) if log.lines[line].strip()), -1)
    return last if last >= 0 and _is(ending.verdict, log, last) and not _failure(log, ending, last) else -1


def _went_on(log: Log, ending: Ending) -> int:
    """Return the last line of a run that went on to the end of its log, -1 where it did not, or told too little."""
    going = (*ending.going, *ending.together)
    failed = _last(log, ending.badly)
    return _last(log, going) if _got_over(log, going) > failed else -1


def _got_over(log: Log, patterns: Sequence[Pattern]) -> int:
    """Return the line after which enough lines of progress stand, -1 where they are fewer."""
    line: int | None = None
    for _ in range(GOES_ON):
        line = _last(log, patterns, line)
        if line < 0:
            break
    return -1 if line is None else line


def _last_said(log: Log, patterns: Sequence[Pattern]) -> int:
    """Return the last line that fits and is no command that somebody typed, -1 without one."""
    line = _last(log, patterns)
    while line >= 0 and is_command(log.lines[line]):
        line = _last(log, patterns, line)
    return line


def _last(log: Log, patterns: Sequence[Pattern], before: int | None = None) -> int:
    return max((log.last(pattern, before) for pattern in patterns), default=-1)


def _failure(log: Log, ending: Ending, start: int) -> Hit | None:
    return _earliest(log, ending.badly, start, but=(*ending.mild, *ending.fine))


def _fails_within(log: Log, ending: Ending, lines: range) -> bool:
    """Return whether one of these lines of a log tells of a failure. A log may have many commands that ran twice: so
    only their own lines are looked at, one by one."""
    but = (*ending.mild, *ending.fine)
    own = (line for line in lines if line not in log.done)
    return any(fits(ending.badly, log.lines[line][: 2 * WINDOW]) and not _is(but, log, line) for line in own)


def _earliest(log: Log, patterns: Sequence[Pattern], start: int = 0, *, but: Sequence[Pattern] = ()) -> Hit | None:
    """Return the first line that fits one of `patterns` and none of `but`, of no step that ended well."""
    each = ((hit for hit in log.find(pattern, start) if hit.line not in log.done) for pattern in patterns)
    hits = (next((hit for hit in found if not _is(but, log, hit.line)), None) for found in each)
    return min((hit for hit in hits if hit), key=lambda hit: hit.line, default=None)


def _is(patterns: Sequence[Pattern], log: Log, line: int) -> bool:
    """Return whether a line, of a long one its beginning, fits one of `patterns`."""
    return any(pattern.regex.search(log.lines[line], 0, 2 * WINDOW) for pattern in patterns)


def _died(log: Log, ending: Ending, before: int) -> bool:
    """Return whether something ended for good before a line, and was not tried again."""
    hits = (hit for pattern in ending.fatal for hit in log.find(pattern) if not _is(ending.mild, log, hit.line))
    died = [hit.line for hit in hits if hit.line < before and not _lived_on(log, ending, hit.line)]
    return bool(died) and not _earliest(log, ending.again, min(died))


def _lived_on(log: Log, ending: Ending, line: int) -> bool:
    """Return whether the process of a line went on with its work: it caught what it printed. Its label, with the number
    of the process, stands before enough quiet lines further down."""
    label = log.label(line)
    if OF_PROCESS.search(label) is None:
        return False
    below = range(line + 1, min(len(log.lines), line + LIVES))
    own = (number for number in below if log.label(number) == label)
    quiet = (number for number in own if any(pattern.regex.search(log.lines[number]) for pattern in ending.mild))
    return len(list(itertools.islice(quiet, GOES_ON))) == GOES_ON


class _Look(Struct, frozen=True):
    """All logs while causes are looked for in them; `failed`: one of them shows a failure."""

    parts: tuple[_LogEnd, ...]
    ending: Ending
    symptoms: tuple[Symptom, ...]
    failed: bool

    def at(self, cause: Cause) -> _Found | None:
        """Return the cause with what shows it, None where nothing does or something rules it out."""
        signs = [(sign, place, hit) for sign in cause.signs for place, hit in self._hits(sign, lasting=cause.lasting)]
        signs = [each for each in signs if self._fits(each[0])]
        if not signs or not self._fits(cause):
            return None
        ordered = sorted(signs, key=lambda each: (-each[0].weight, each[1], each[2].line))
        confidence = ordered[0][0].weight + SECOND_SIGN * min(SECOND_SIGNS, len({id(sign) for sign, _, _ in signs}) - 1)
        most = MOST if ordered[0][0].weight >= TELLS else LIKELY_MOST
        if all(self._is_shared(sign, hit) for sign, _, hit in signs):
            most = SHARED_MOST
        added, decided, shown = self._context(cause)
        confidence += added
        if confidence < FLOOR:
            return None
        held = _held(confidence, _most_decided(most) if decided else most)
        late = all(follows(self.parts[place].log.lines[hit.line], self.ending) for _, place, hit in ordered)
        state = not decided and self._is_a_state(cause, ordered)
        return _Found(cause, tuple((sign.weight, place, hit) for sign, place, hit in ordered), held, shown, late, state)

    def _context(self, cause: Cause) -> tuple[float, bool, tuple[int, Hit] | None]:
        """Return what the context of a cause adds, whether some of it decides, and the first line of it that adds."""
        added, decided = 0.0, False
        shown: tuple[int, Hit] | None = None
        for context in cause.contexts:
            seen = _first(context.find, self.parts, context.near)
            if (seen is None) == context.absent:
                added += context.add
                decided = decided or context.add >= DECIDES
                shown = shown or (seen if context.add > 0 else None)
        return added, decided, shown

    def _is_a_state(self, cause: Cause, signs: Sequence[tuple[Sign, int, Hit]]) -> bool:
        """Return whether no sign tells the cause by itself, or it is an effect, and an error stands before it."""
        brought_about = cause.effect and self._is_after_an_error(signs)
        return brought_about or all(itertools.starmap(self._tells_state, signs))

    def _is_after_an_error(self, signs: Sequence[tuple[Sign, int, Hit]]) -> bool:
        """Return whether a program told an error of its own before the first of the signs."""
        _, place, hit = min(signs, key=lambda each: (each[1], each[2].line))
        own = self.parts[place].errors.own
        return own is not None and own < hit.line

    def _tells_state(self, sign: Sign, place: int, hit: Hit) -> bool:
        """Return whether a sign that was found does not tell its cause by itself: it is weak or a state, or its line is
        a row of a table, or one that a program goes on after, which a run that failed by something else prints, too."""
        lines = self.parts[place].log.lines
        weak = sign.weight < TELLS or sign.state
        return weak or is_row(lines, hit.line) or goes_on(lines[hit.line], self.ending)

    def _is_shared(self, sign: Sign, hit: Hit) -> bool:
        """Return whether what fitted a sign is nothing but a symptom of many causes."""
        if sign.decides:
            return False
        text = hit.matched
        found = (pattern.regex.search(text) for symptom in self.symptoms for pattern in symptom.find)
        return any(match and not WORD.search(f"{text[: match.start()]} {text[match.end() :]}") for match in found)

    def _fits(self, rule: Cause | Sign) -> bool:
        """Return whether the logs have what the rule needs, and nothing that rules it out."""
        return (not rule.needs or _anywhere(rule.needs, self.parts)) and not _anywhere(rule.never, self.parts)

    def _hits(self, sign: Sign, *, lasting: bool) -> Iterator[tuple[int, Hit]]:
        """Yield where a sign first stands in each log."""
        if sign.hint and not self.failed:
            return
        for place, part in enumerate(self.parts):
            if not part.log.has_word(sign.find):
                continue
            hits = part.log.find(sign.find, 0 if lasting else part.start)
            error = part.errors.own if sign.alone else None
            hits = (each for each in hits if error is None or each.line <= error)
            if hit := next((each for each in hits if self._counts(sign, part, each, lasting=lasting)), None):
                yield place, hit

    def _counts(self, sign: Sign, part: _LogEnd, hit: Hit, *, lasting: bool) -> bool:
        """Return whether the line that fits a sign is one: no noise, no warning, nothing that the run got over, no
        command that only looks, and where nothing failed none that somebody typed."""
        line = part.log.lines[hit.line]
        if only_looks(line) or (not self.failed and is_command(line)):
            return False
        if not sign.noisy and any(pattern.regex.search(hit.text) for pattern in self.ending.noise):
            return False
        if not (sign.warned and self.failed) and _is(self.ending.mild, part.log, hit.line):
            return False
        if hit.line in part.log.done or (self.failed and not lasting and hit.line < part.over):
            return False
        return sign.near is None or part.log.near(sign.near, hit.line, NEAR)


def _most_decided(most: float) -> float:
    """Return the most that is believed of a cause that a context decides, given the most without it."""
    return SHARED_IN_CONTEXT if most == SHARED_MOST else MOST


def _held(confidence: float, most: float) -> float:
    """Return the confidence held below `most`; of a shared symptom's causes what was believed more before still is."""
    shared = most in {SHARED_MOST, SHARED_IN_CONTEXT}
    return min(confidence, most - 0.1 + 0.1 * min(confidence, 1.0) if shared else most)


def _first(pattern: Pattern, parts: Sequence[_LogEnd], near: Pattern | None = None) -> tuple[int, Hit] | None:
    for place, part in enumerate(parts):
        for hit in part.log.find(pattern):
            if near is None or part.log.near(near, hit.line, NEAR):
                return place, hit
    return None


def _anywhere(patterns: Sequence[Pattern], parts: Sequence[_LogEnd]) -> bool:
    return any(_first(pattern, parts) for pattern in patterns)


def _rank(found: Sequence[_Found]) -> list[_Found]:
    """Return the causes in the order in which they are shown: sure ones by time, the others by confidence, without
    what a sure one explains, and without faint ones beside sure ones."""
    found = _doubted(found)
    sure = [each for each in found if each.confidence >= SURE]
    hidden = {slug for each in sure for slug in each.cause.hides}
    weighed = [
        replace(each, confidence=each.confidence * (HIDDEN if each.cause.slug in hidden else 1.0)) for each in found
    ]
    least = SURE - 0.25 if any(each.confidence >= SURE for each in weighed) else FLOOR
    top = max((each.confidence for each in weighed), default=0.0)

    def order(each: _Found) -> tuple[float, bool, bool, tuple[int, int], str]:
        alike = each.confidence >= max(SURE, top - ALIKE)
        tier = 0.0 if alike else 1 - each.confidence
        return tier, each.cause.effect, each.told < TELLS, each.first, each.cause.slug

    return sorted((each for each in weighed if each.confidence >= least), key=order)


def _doubted(found: Sequence[_Found]) -> Sequence[_Found]:
    """Return the causes; what is only told by lines that follow from other failures, as those of Kubernetes and of
    launchers do, tells nothing by itself beside a cause with a line of its own."""
    if not any(each.confidence >= TELLS and not each.follows for each in found):
        return found
    return [replace(each, confidence=min(each.confidence, LIKELY_MOST)) if each.follows else each for each in found]


def _finding(found: _Found, parts: Sequence[_LogEnd]) -> Finding:
    cause = found.cause
    lines = dict.fromkeys((place, hit.line, hit.text) for _, place, hit in found.signs)
    chosen = list(lines)[:SHOWN]
    if found.context:
        place, hit = found.context
        chosen += [(place, hit.line, hit.text)] if (place, hit.line) not in {(p, line) for p, line, _ in chosen} else []
    evidence = tuple(Evidence(parts[place].log.name, line + 1, text) for place, line, text in chosen)
    title, fix = cause.title, cause.fix
    if cause.named:
        # A long line is shown cut around its sign; what it names may stand elsewhere in it.
        texts = [text for place, line, hit in lines for text in (hit, parts[place].log.lines[line][: 2 * WINDOW])]
        _, place, hit = found.signs[0]
        title, fix = cause.told(list(map(scrub, texts)), package_of(raised_in(parts[place].log, hit.line)))
    return Finding(cause.slug, title, found.told, evidence, cause.why, fix, cause.source, cause.checks)


def _shown(log: Log, hit: Hit) -> Evidence:
    return Evidence(log.name, hit.line + 1, hit.text)


def _harmless(parts: Sequence[_LogEnd], rules: CauseSet) -> Iterator[Note]:
    """Yield a note for each kind of line that looks bad and is not here."""
    for rule in rules.harmless:
        if _anywhere(rule.unless, parts):
            continue
        for pattern in rule.find:
            if seen := _first(pattern, parts):
                yield Note(rule.slug, (_shown(parts[seen[0]].log, seen[1]),), rule.why)
                break


def _survived(parts: Sequence[_LogEnd], rules: CauseSet, found: set[str]) -> Iterator[Note]:
    """Yield a note for each cause that showed and that the run got over."""
    if not any(part.start for part in parts):
        return
    whole = tuple(replace(part, start=0, errors=LogErrors(part.log, 0, rules.ending)) for part in parts)
    look = _Look(whole, rules.ending, rules.symptoms, failed=False)
    for cause in rules.causes:
        if cause.slug not in found and (seen := look.at(cause)) and seen.confidence >= SURE:
            _, place, hit = seen.signs[0]
            yield Note(
                cause.slug,
                (_shown(parts[place].log, hit),),
                f"{cause.title}: shown here, and the run went well after it",
            )
