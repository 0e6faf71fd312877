"""The rules of env/rules/causes, and their patterns: each knows words that its matches contain, so that most of a
log is never looked at.

A pattern that cannot be searched in time linear in the length of a log is refused: a repeated group, a
reference to a group, no word to look for.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path

from msgspec import Struct
from msgspec.structs import fields, replace

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.toml import NAME, SOME, Table, ValueForm
from deepep_bootstrap.core.toml import load_toml as read_toml

WHAT = "{what}"
"""Stands in a title for the object that a line names."""

ASKER = "{asker}"
"""Stands in a title or a remedy for the package whose code failed."""

WHAT_MOST, WHAT_HEAD = 180, 60
"""Characters of that object in a title, and how many of them are its beginning where it is cut: a path or a sentence is
known by them, and an error that was passed on from one program to the next says the reason at its end."""

SOURCE_LINE = re.compile(r"\S+:\d+:\d+ \[\d+\] (?:\S+:\d+ )?NCCL WARN |(?:\[[\w./-]+:\d+\]|[\w.-]+:\d+\])\s*")
"""The process and the place in its source before a message, as NCCL and loggers of Python and C++ print them."""

FOLDERS = re.compile(r"(?<![\w:/.-])/(?:[\w.+-]+/){2,}(?=[\w.+-])")
"""The folders of a path, of which the last name says enough in a title."""

GENERAL_MOST = 0.7
"""The most that may be believed of what a first error says by itself: it tells what went wrong, not why."""

LETTERS = re.compile(r"[a-z]{3,}")
"""Letters in a row: a text that has none with those of a word in them cannot have the word."""

SHORTEST = 3
"""Letters a word must have to be worth looking for."""

WIDE = re.compile(r"(?:\.|\[\^[^\]]*\])(?:[*+]|\{\d*,(?:\d{2,})?\})")
"""Something in a pattern that goes over anything for long: `.*`, `.{0,80}`, `[^)]*`. Such a pattern is not tried
over the end of a line."""

REPEATED_GROUP = re.compile(r"(?<!\\)\)(?:[*+]|\{\d+,\})")
REFERENCE = re.compile(r"(?<!\\)(?:\\\\)*\\[1-9]")
QUANTIFIER = re.compile(r"[*+?]\??|\{(\d*),?\d*\}\??")
PLAIN = re.compile(r"[^\\\[\](){}|.^$*+?]+(?![*+?{])")
"""Letters that stand for themselves, each once."""

OPTIONS = re.compile(r"\((?:\?(?:<?[=!]|:|P<\w+>|[aiLmsux-]+:))?")


GROUP = re.compile(r"(?<!\\)\((?!\?)")
"""The beginning of a group whose text can be asked for."""

ONCE, REPEATED, OPTIONAL = "once", "repeated", "optional"
"""How often an item of a pattern occurs in a match: repeated is once or more."""

NO_ANCHOR = re.compile(r"\[\^|\\\^|\^\(\?!")
"""What has the sign of an anchor, and says nothing of how a line begins."""


class Pattern(Struct, frozen=True):
    """A pattern, without regard to case unless it begins with `(?-i:`; every match contains one of `words`
    (small letters). `tight`: it may be tried over the end of a line, where a message was wrapped or cut."""

    source: str
    words: tuple[str, ...]
    tight: bool

    @property
    def regex(self) -> re.Pattern[str]:
        """The compiled pattern: most of the rules' are never needed, since no log has their words."""
        return _compiled(self.source)

    @property
    def anchored(self) -> bool:
        """Whether it says what stands where a line begins."""
        return _is_anchored(self.source)


@functools.cache
def _is_anchored(source: str) -> bool:
    return "^" in NO_ANCHOR.sub("", source)


@functools.cache
def _compiled(source: str) -> re.Pattern[str]:
    try:
        return re.compile(source, re.IGNORECASE)
    except re.error as error:
        raise Trouble(
            Problem(f"env/{FOLDER}", f"no regular expression: {error}", source, "one that compiles")
        ) from None


def compile_pattern(source: str, *, everywhere: bool = True, tried: bool = True) -> Pattern:
    """Return the pattern; ValueError saying what is wrong with it. One that is not looked for `everywhere` needs no
    word. Not `tried`: it came with this program, whose tests have compiled it."""
    if REPEATED_GROUP.search(source):
        raise ValueError("a repeated group can take for ever on a long line")
    if REFERENCE.search(source):
        raise ValueError("a reference to a group can take for ever on a long line")
    if tried:
        _try(source)
    words, _ = _Scanner(source).alternatives(0)
    if everywhere and min(map(len, words), default=0) < SHORTEST:
        raise ValueError(f"no word of {SHORTEST} letters that every match contains, by which it could be found quickly")
    return Pattern(source, tuple(dict.fromkeys(words)), WIDE.search(source) is None)


def _try(source: str) -> None:
    """Compile a pattern; ValueError saying what is wrong with it."""
    try:
        regex = re.compile(source, re.IGNORECASE)
    except re.error as error:
        raise ValueError(f"no regular expression: {error}") from None
    if regex.search("") is not None:
        raise ValueError("it matches nothing at all, and so every line")


class _Scanner:
    """Finds in the text of a regular expression what every match must contain. Knows as much of the syntax as the
    rules use."""

    def __init__(self, source: str) -> None:
        self.source = source

    def alternatives(self, at: int) -> tuple[list[str], int]:
        """Return for each alternative from `at` on the words of which one must occur, all in one list, and where the
        group ends. An alternative without a word gives ""."""
        found: list[str] = []
        while True:
            words, at = self.sequence(at)
            found.extend(words)
            if at >= len(self.source) or self.source[at] == ")":
                return found, at
            at += 1

    def sequence(self, at: int) -> tuple[list[str], int]:
        """Return the best words of one alternative and where it ends."""
        best: list[str] = [""]
        run = ""
        while at < len(self.source) and self.source[at] not in "|)":
            letters = PLAIN.match(self.source, at)
            if letters is not None:
                run += letters[0].lower()
                at = letters.end()
                continue
            literal, words, at = self.item(at)
            quantifier, at = self.quantifier(at)
            if literal and quantifier == ONCE:
                run += literal
                continue
            if quantifier == OPTIONAL:
                literal, words = "", []
            best, run = _better(best, [run + literal]), ""
            if words:
                best = _better(best, words)
        return _better(best, [run]), at

    def quantifier(self, at: int) -> tuple[str, int]:
        """Return how often the item before `at` has to occur, and where the next item begins."""
        found = QUANTIFIER.match(self.source, at)
        if found is None:
            return ONCE, at
        optional = found[0][0] in "*?" or found[1] in {"", "0"}
        return OPTIONAL if optional else REPEATED, found.end()

    def item(self, at: int) -> tuple[str, list[str], int]:
        """Return one item: its text where it stands for itself, the words of a group, and where the next item
        begins."""
        letter = self.source[at]
        if letter == "\\":
            escaped = self.source[at + 1 : at + 2]
            return ("" if escaped.isalnum() else escaped.lower()), [], at + 2
        if letter == "[":
            end = self.source.index("]", at + (3 if self.source.startswith("[^", at) else 2))
            while self.source[end - 1] == "\\":
                end = self.source.index("]", end + 1)
            return "", [], end + 1
        if letter == "(":
            opening = OPTIONS.match(self.source, at)
            start = opening.end() if opening else at + 1
            words, end = self.alternatives(start)
            looks = opening is not None and re.match(r"\(\?<?[=!]", opening[0]) is not None
            return "", [] if looks else words, end + 1
        return ("" if letter in ".^$" else letter.lower()), [], at + 1


def _better(one: list[str], other: list[str]) -> list[str]:
    """Return the list whose shortest word is longer: it is found less often by chance."""
    return other if min(map(len, other)) > min(map(len, one)) else one


FOLDER = "rules/causes"
"""Below env/: one file per subject, and those that say how logs are read."""

KIND = ValueForm(r"program|library", "program or library")
PATTERN = ValueForm(r"[^\n]+", "a regular expression for one line")
ON_LINES = ("verdict", "noise", "mild", "thrown", "followed", "ended", "waited", "slow", "lesser", "fine")
"""Patterns of [ending] that are tried on lines found by others and never looked for: they need no word."""


class Sign(Struct, frozen=True):
    """A line that shows a cause, and how far it alone makes the cause believed (0…1). `near`: another line must be
    there, a few lines before or after; with `decides` that line singles the cause out. `hint`: it counts only in a log
    that also shows a failure. `noisy`: also on a line of noise. `warned`: also on a warning of a program that goes on,
    in a log that shows a failure. `alone`: only where no program told an error of its own above it. `needs`, `never`:
    it counts only where a line anywhere in the logs fits one of the first, and none fits one of the second. `state`:
    the line tells a state that other reasons than this cause bring about, too: it counts by its weight beside other
    causes, and what is told of the cause stays below 0.8 where no other sign and no context singles it out."""

    find: Pattern
    weight: float
    near: Pattern | None = None
    decides: bool = False
    hint: bool = False
    noisy: bool = False
    warned: bool = False
    alone: bool = False
    state: bool = False
    needs: tuple[Pattern, ...] = ()
    never: tuple[Pattern, ...] = ()


class Context(Struct, frozen=True):
    """A line anywhere in the logs that makes a cause more or less believable, by `add`; with `absent` it is its
    absence that does. `near`: another line must be there, a few lines before or after."""

    find: Pattern
    add: float
    absent: bool = False
    near: Pattern | None = None


class NamedKind(Struct, frozen=True):
    """How a cause or a general kind is told where its line says more: a line that fits one of `find` gives `title`, in
    which the text of that one's group stands for {what}, and the package whose code failed there for {asker}. `fix`:
    what mends this one; "" where the whole's own says it."""

    find: tuple[Pattern, ...]
    title: str
    fix: str = ""

    def told(self, line: str, asker: str = "") -> str:
        """Return the title for a line, "" where it does not fit, or says nothing in the place of {what} or {asker}."""
        if ASKER in self.title and not asker:
            return ""
        for pattern in self.find:
            found = pattern.regex.search(line)
            what = _shown(found[1] or "") if found and WHAT in self.title else ""
            if found and (what or WHAT not in self.title):
                return self.title.replace(WHAT, what).replace(ASKER, asker)
        return ""


def _shown(text: str) -> str:
    """Return text as a title shows it: on one line, and not long."""
    words = " ".join(text.split()).rstrip(" :,;")
    return words if len(words) <= WHAT_MOST else f"{words[:WHAT_HEAD]}…{words[WHAT_HEAD + 1 - WHAT_MOST :]}"


class Cause(Struct, frozen=True):
    """One cause. It is not looked for unless a line fits one of `needs` (where there are any), and ruled out by a
    line that fits one of `never`. Where it is sure, it explains the causes it `hides`. `effect`: other causes bring it
    about (no driver is loaded after its build failed), so that it is told after one as likely. `lasting`: it also
    counts where the run ended well (slowness). The first of `named` that one of its lines fits tells it more
    closely."""

    slug: str
    title: str
    signs: tuple[Sign, ...]
    why: str
    fix: str
    source: str
    checks: str = ""
    contexts: tuple[Context, ...] = ()
    needs: tuple[Pattern, ...] = ()
    never: tuple[Pattern, ...] = ()
    hides: tuple[str, ...] = ()
    effect: bool = False
    lasting: bool = False
    named: tuple[NamedKind, ...] = ()

    def told(self, lines: Sequence[str], asker: str = "") -> tuple[str, str]:
        """Return the title and the fix, as the lines that show the cause tell it; `asker`: the package whose code
        failed there, "" where nobody knows."""
        forms = ((title, form) for form in self.named for line in lines if (title := form.told(line, asker)))
        title, form = next(forms, (self.title, None))
        return title, form.fix.replace(ASKER, asker) if form and form.fix else self.fix


class Harmless(Struct, frozen=True):
    """Lines that look bad and are not, as long as no line fits one of `unless`."""

    slug: str
    find: tuple[Pattern, ...]
    why: str
    unless: tuple[Pattern, ...] = ()


class Ending(Struct, frozen=True):
    """The lines by which the end of a run is known: lines that say that it went `well`, those of whoever runs the
    `whole` job, the `verdict` that is the last line of a log, those of a run that is `going` on, those that it prints
    when all ranks have done a step `together`, and lines that say it did not; among these the `fatal` ones, after which
    nothing goes on but what is tried `again`; the `noise` of programs that print what they look for; and how `mild`
    lines look, warnings of a program that goes on: none shows a failure, and none is a sign unless the sign is
    `warned`, or nothing else tells why. For the first error of a failure also lines that tell `errors`, and `words`
    that do where there was one; lines that `followed` from another one's, those of them that only say that something
    `ended` badly, the message of what was `thrown` and not caught, lines of a process that only `waited` or are `slow`,
    `lesser` ones that a program goes on after, and such as are `fine` although they have the words."""

    well: tuple[Pattern, ...] = ()
    whole: tuple[Pattern, ...] = ()
    verdict: tuple[Pattern, ...] = ()
    going: tuple[Pattern, ...] = ()
    together: tuple[Pattern, ...] = ()
    badly: tuple[Pattern, ...] = ()
    fatal: tuple[Pattern, ...] = ()
    again: tuple[Pattern, ...] = ()
    noise: tuple[Pattern, ...] = ()
    mild: tuple[Pattern, ...] = ()
    errors: tuple[Pattern, ...] = ()
    words: tuple[Pattern, ...] = ()
    thrown: tuple[Pattern, ...] = ()
    followed: tuple[Pattern, ...] = ()
    ended: tuple[Pattern, ...] = ()
    waited: tuple[Pattern, ...] = ()
    slow: tuple[Pattern, ...] = ()
    lesser: tuple[Pattern, ...] = ()
    fine: tuple[Pattern, ...] = ()


class Symptom(Struct, frozen=True):
    """How a failure shows that many causes share: by itself it singles out none of them. `ask`: what one needs to know
    to get further."""

    name: str
    find: tuple[Pattern, ...]
    ask: str


class Origin(Struct, frozen=True):
    """A program or a library (`kind`), by the lines that are its own, and what one asks of a failure in it."""

    name: str
    kind: str
    find: tuple[Pattern, ...]
    ask: str = ""


class Meaning(Struct, frozen=True):
    """What a code of a device means in words, with what to do."""

    find: Pattern
    words: str


class Vague(Struct, frozen=True):
    """An error that says no more than that something failed (`find`), and how the line above looks on which its process
    `said` the reason."""

    find: tuple[Pattern, ...]
    said: tuple[Pattern, ...]


class GeneralCause(Struct, frozen=True):
    """What kind of thing went wrong by the words of a first error alone, where no cause shows: `find` in its line, and
    nothing of `never`; where `frame` is given, one of it in the frame of the traceback that the error was raised in.
    The first of `named` that fits the line tells it with its object."""

    slug: str
    title: str
    confidence: float
    find: tuple[Pattern, ...]
    why: str
    fix: str
    checks: str
    never: tuple[Pattern, ...] = ()
    frame: tuple[Pattern, ...] = ()
    named: tuple[NamedKind, ...] = ()

    def told(self, line: str) -> tuple[str, str]:
        """Return the title and the fix for a line of this kind: with the object that the line names, or else with what
        the line says."""
        for form in self.named:
            if title := form.told(line):
                return title, form.fix or self.fix
        return f"{self.title}: {_shown(FOLDERS.sub('', SOURCE_LINE.sub('', line)))}", self.fix

    def fits(self, line: str, frame: str = "") -> bool:
        """Return whether a line is of this kind, raised in `frame` ("" where no traceback stands above it)."""
        found = any(pattern.regex.search(line) for pattern in self.find)
        if self.frame:
            found = found and any(pattern.regex.search(frame) for pattern in self.frame)
        return found and not any(pattern.regex.search(line) for pattern in self.never)


class Word(Struct, frozen=True):
    """A word that patterns begin their search with: its `marks`, all of which a text has that has the word, the sources
    of those patterns, and the places of the causes whose signs they are."""

    text: str
    marks: frozenset[str]
    sources: frozenset[str]
    causes: frozenset[int]


class Vocabulary(Struct, frozen=True):
    """The words of all patterns, under a mark of each that few others have ("" for a word without marks): a log has few
    of the words, and this tells quickly which. `wordless`: the sources of the patterns that have none."""

    words: dict[str, tuple[Word, ...]]
    wordless: frozenset[str]


class CauseSet(Struct, frozen=True):
    """All that is known: causes, harmless lines, how runs end, symptoms that many causes share, whose lines are whose,
    what codes of devices mean, what a first error says by itself, and which say it on another line."""

    causes: tuple[Cause, ...]
    harmless: tuple[Harmless, ...]
    ending: Ending
    symptoms: tuple[Symptom, ...] = ()
    origins: tuple[Origin, ...] = ()
    meanings: tuple[Meaning, ...] = ()
    general: tuple[GeneralCause, ...] = ()
    vague: tuple[Vague, ...] = ()
    vocabulary: Vocabulary = Vocabulary({}, frozenset())

    @property
    def slugs(self) -> frozenset[str]:
        """The names of all causes, and of what is said in general."""
        return frozenset(cause.slug for cause in self.causes).union(each.slug for each in self.general)

    def within(self, sources: Set[str], causes: Set[int]) -> CauseSet:
        """Return the rules without the patterns that fit no line of some logs, given the sources of those whose words
        the logs have, and the places of the causes that such a pattern is a sign of."""

        def left(patterns: Sequence[Pattern]) -> tuple[Pattern, ...]:
            return tuple(pattern for pattern in patterns if pattern.source in sources)

        ending = Ending(*(left(getattr(self.ending, each)) for each in Ending.__struct_fields__))
        spoken = tuple(
            replace(cause, signs=tuple(sign for sign in cause.signs if sign.find.source in sources))
            for cause in (self.causes[place] for place in sorted(causes))
        )
        harmless = tuple(replace(each, find=found) for each in self.harmless if (found := left(each.find)))
        symptoms = tuple(replace(each, find=left(each.find)) for each in self.symptoms)
        origins = tuple(replace(each, find=left(each.find)) for each in self.origins)
        return replace(self, causes=spoken, harmless=harmless, ending=ending, symptoms=symptoms, origins=origins)


def vocabulary_of(rules: CauseSet) -> Vocabulary:
    """Return the words of what `CauseSet.within` leaves out where a log has none of them."""
    sources: dict[str, set[str]] = {}
    causes: dict[str, set[int]] = {}
    for place, cause in enumerate(rules.causes):
        for word in itertools.chain.from_iterable(sign.find.words for sign in cause.signs):
            causes.setdefault(word, set()).add(place)
    for pattern in _searched(rules):
        for word in pattern.words:
            sources.setdefault(word, set()).add(pattern.source)
    wordless = frozenset(sources.pop("", ()))
    words = [
        Word(text, frozenset(_marks(text)), frozenset(found), frozenset(causes.get(text, ())))
        for text, found in sources.items()
    ]
    often = Counter(itertools.chain.from_iterable(word.marks for word in words))
    under: dict[str, list[Word]] = {}
    for each in words:
        under.setdefault(min(each.marks, key=lambda mark: (often[mark], mark), default=""), []).append(each)
    return Vocabulary({mark: tuple(found) for mark, found in under.items()}, wordless)


def _searched(rules: CauseSet) -> Iterator[Pattern]:
    """Yield the patterns that are left out where a log has none of their words."""
    for ending in Ending.__struct_fields__:
        yield from getattr(rules.ending, ending)
    for cause in rules.causes:
        yield from (sign.find for sign in cause.signs)
    kinds: tuple[Harmless | Symptom | Origin, ...] = (*rules.harmless, *rules.symptoms, *rules.origins)
    yield from itertools.chain.from_iterable(kind.find for kind in kinds)


def _marks(word: str) -> Iterator[str]:
    """Yield what a text has that has a word of the rules: the letters of its longest row in threes, and each row that
    neither begins nor ends the word, which stands so in the text."""
    yield from threes(longest_letters(word))
    yield from (row[0] for row in LETTERS.finditer(word) if row.start() > 0 and row.end() < len(word))


@functools.cache
def longest_letters(word: str) -> str:
    """Return the longest row of letters of a word of the rules, of which there are some thousand."""
    return max(LETTERS.findall(word), key=len, default="")


def threes(row: str) -> Iterator[str]:
    """Yield every three letters in a row."""
    return (row[at : at + 3] for at in range(len(row) - 2))


def load_causes(text: str, where: str, base: CauseSet | None = None) -> CauseSet:
    """Return the rules in `text`, the TOML that `where` names; Trouble with everything that is wrong with them.
    Their causes may hide those of `base` too."""
    return _load(((where, text),), base.slugs if base else frozenset())


def shipped_causes(texts: Mapping[str, str]) -> CauseSet:
    """Return the rules that come with this program; `texts` are those of the files of env/ by path below it, and may
    have others. Trouble with everything that is wrong with them."""
    ours = sorted(path for path in texts if path.startswith(f"{FOLDER}/") and path.endswith(".toml"))
    if not ours:
        raise Trouble(Problem(f"env/{FOLDER}", "has no rules", wanted="one or more .toml files, as in a fresh clone"))
    return _load(tuple((f"env/{path}", texts[path]) for path in ours), frozenset())


def read_shipped_causes(root: Path) -> CauseSet:
    """Return the rules in env/ below `root`; Trouble with a file that cannot be read."""
    return shipped_causes({f"{FOLDER}/{path.name}": text_of(path) for path in (root / "env" / FOLDER).glob("*.toml")})


def text_of(path: Path) -> str:
    """Return the text of a file of rules; Trouble where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise Trouble(Problem(str(path), f"cannot be read: {why}", wanted="a file of rules in TOML")) from None


@functools.lru_cache(maxsize=8)
def _load(files: tuple[tuple[str, str], ...], others: frozenset[str]) -> CauseSet:
    """Return the rules in `files`, each where it is and its text; `others` are causes beside them. Kept: whoever judges
    many runs asks for each."""
    problems: list[Problem] = []
    read: list[tuple[Table, CauseSet]] = []
    for where, text in files:
        top = Table(read_toml(text, where), where, problems)
        read.append((top, _rules(top)))
    _compare_names(read, others)
    if problems:
        raise Trouble(*problems)
    return _with_vocabulary(functools.reduce(_joined, (rules for _, rules in read)))


def _rules(top: Table) -> CauseSet:
    """Return the rules of one file."""
    ending = top.inner("ending")
    found = CauseSet(
        tuple(map(_cause, top.tables("cause"))),
        tuple(map(_harmless, top.tables("harmless"))),
        Ending(*(_patterns(ending, each.name, everywhere=each.name not in ON_LINES) for each in fields(Ending))),
        tuple(map(_symptom, top.tables("symptom"))),
        tuple(map(_origin, top.tables("origin"))),
        tuple(map(_meaning, top.tables("meaning"))),
        tuple(map(_general, top.tables("general"))),
        tuple(map(_vague, top.tables("vague"))),
    )
    ending.close()
    top.close()
    return found


def join(first: CauseSet, second: CauseSet) -> CauseSet:
    """Return the rules of both; a cause of the second replaces one of the same slug of the first."""
    replaced = {cause.slug for cause in second.causes}
    kept = tuple(cause for cause in first.causes if cause.slug not in replaced)
    return _with_vocabulary(_joined(replace(first, causes=kept), second))


def _joined(first: CauseSet, second: CauseSet) -> CauseSet:
    """Return the rules of both, without a vocabulary."""
    return CauseSet(
        first.causes + second.causes,
        first.harmless + second.harmless,
        Ending(*(getattr(first.ending, each.name) + getattr(second.ending, each.name) for each in fields(Ending))),
        first.symptoms + second.symptoms,
        first.origins + second.origins,
        first.meanings + second.meanings,
        first.general + second.general,
        first.vague + second.vague,
    )


def _with_vocabulary(rules: CauseSet) -> CauseSet:
    return replace(rules, vocabulary=vocabulary_of(rules))


def _cause(table: Table) -> Cause:
    cause = Cause(
        slug=table.text("slug", NAME),
        title=table.text("title", SOME),
        signs=tuple(map(_sign, table.tables("sign"))),
        why=table.text("why", SOME),
        fix=table.text("fix", SOME),
        source=table.text("source", SOME),
        checks=table.take("checks", str, ""),
        contexts=tuple(map(_context, table.tables("context"))),
        needs=_patterns(table, "needs"),
        never=_patterns(table, "never"),
        hides=table.words("hides", NAME),
        effect=table.take("effect", bool, default=False),
        lasting=table.take("lasting", bool, default=False),
        named=tuple(map(_named, table.tables("named"))),
    )
    if not cause.signs:
        table.complain("sign", "is missing or empty", wanted="at least one [[cause.sign]] by which the cause is found")
    table.close()
    return cause


def _sign(table: Table) -> Sign:
    sign = Sign(
        find=next(_pattern(table, "find"), NOTHING),
        weight=_number(table, "weight", 0.0),
        near=_near(table),
        decides=table.take("decides", bool, default=False),
        state=table.take("state", bool, default=False),
        hint=table.take("hint", bool, default=False),
        alone=table.take("alone", bool, default=False),
        noisy=table.take("noisy", bool, default=False),
        warned=table.take("warned", bool, default=False),
        needs=_patterns(table, "needs"),
        never=_patterns(table, "never"),
    )
    table.close()
    return sign


def _near(table: Table) -> Pattern | None:
    return next(_pattern(table, "near", everywhere=False), None) if "near" in table.data else None


def _context(table: Table) -> Context:
    absent = "without" in table.data
    context = Context(
        next(_pattern(table, "without" if absent else "find"), NOTHING),
        _number(table, "add", -1.0),
        absent,
        _near(table),
    )
    table.close()
    return context


def _harmless(table: Table) -> Harmless:
    found = Harmless(
        table.text("slug", NAME), _patterns(table, "find"), table.text("why", SOME), _patterns(table, "unless")
    )
    table.close()
    return found


def _symptom(table: Table) -> Symptom:
    found = Symptom(table.text("name", SOME), _patterns(table, "find"), table.text("ask", SOME))
    table.close()
    return found


def _origin(table: Table) -> Origin:
    found = Origin(
        table.text("name", SOME), table.text("kind", KIND), _patterns(table, "find"), table.take("ask", str, "")
    )
    table.close()
    return found


def _meaning(table: Table) -> Meaning:
    found = Meaning(next(_pattern(table, "find"), NOTHING), table.text("words", SOME))
    table.close()
    return found


def _vague(table: Table) -> Vague:
    found = Vague(_patterns(table, "find", everywhere=False), _patterns(table, "said", everywhere=False))
    table.close()
    return found


def _general(table: Table) -> GeneralCause:
    found = GeneralCause(
        table.text("slug", NAME),
        table.text("title", SOME),
        _number(table, "confidence", 0.0),
        _patterns(table, "find", everywhere=False),
        table.text("why", SOME),
        table.text("fix", SOME),
        table.take("checks", str, ""),
        _patterns(table, "never", everywhere=False),
        _patterns(table, "frame", everywhere=False),
        tuple(_named(each, of_object=True) for each in table.tables("named")),
    )
    if found.confidence > GENERAL_MOST:
        table.complain("confidence", "is out of range", str(found.confidence), f"{GENERAL_MOST} at most")
    table.close()
    return found


def _named(table: Table, *, of_object: bool = False) -> NamedKind:
    """Return how something is told by its line; with `of_object` always with what the line names."""
    found = NamedKind(_patterns(table, "find", everywhere=False), table.text("title", SOME), table.take("fix", str, ""))
    if of_object and WHAT not in found.title:
        table.complain("title", f"does not say {WHAT}", found.title, f"a title with {WHAT}, the object of the line")
    for pattern in found.find:
        if WHAT in found.title and len(GROUP.findall(pattern.source)) != 1:
            table.complain(
                "find", "needs one group, the object of the line", pattern.source, "one (…); others as (?:…)"
            )
    table.close()
    return found


NOTHING = compile_pattern("nothing of this kind")
"""Stands for a pattern that cannot be used; a problem reports it, and it is never searched for."""


def _pattern(table: Table, key: str, *, everywhere: bool = True) -> Iterator[Pattern]:
    """Yield the pattern of `key`, which must be there."""
    source = table.text(key, PATTERN)
    if source:
        yield from _made(table, key, source, everywhere=everywhere)


def _patterns(table: Table, key: str, *, everywhere: bool = True) -> tuple[Pattern, ...]:
    """Return the list of patterns of `key`, which may be absent."""
    return tuple(
        made for source in table.words(key, PATTERN) for made in _made(table, key, source, everywhere=everywhere)
    )


def _made(table: Table, key: str, source: str, *, everywhere: bool = True) -> Iterator[Pattern]:
    # Compiling all of ours takes longer than looking through a log for them. Those of a user are tried now.
    ours = f"env/{FOLDER}/" in table.where.partition(": ")[0]
    try:
        yield compile_pattern(source, everywhere=everywhere, tried=not ours)
    except ValueError as error:
        table.complain(key, f"cannot be used: {error}", source)


def _number(table: Table, key: str, least: float) -> float:
    """Return the number of `key`, more than `least` and 1.0 at most."""
    value = table.take(key, float)
    if type(table.data.get(key)) is float and not least < value <= 1.0:
        table.complain(key, "is out of range", str(value), f"more than {least} and 1.0 at most")
    return value


def _compare_names(read: Sequence[tuple[Table, CauseSet]], known: Set[str]) -> None:
    """Note slugs that stand twice, in whatever files, and causes that hide one which is in none of them."""
    there: set[str] = set()
    for top, rules in read:
        slugs = [*(cause.slug for cause in rules.causes), *(each.slug for each in rules.general)]
        for slug in slugs:
            if slug in there:
                top.complain("cause", "two causes have the same slug", slug)
            there.add(slug)
    for top, rules in read:
        _compare_hidden(top, rules, there | known)


def _compare_hidden(top: Table, rules: CauseSet, known: Set[str]) -> None:
    """Note causes that hide one which is not there."""
    for cause in rules.causes:
        for slug in cause.hides:
            if slug not in known:
                top.complain("cause", f"{cause.slug} hides a cause that is not there", slug)
