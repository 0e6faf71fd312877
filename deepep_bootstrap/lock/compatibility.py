"""The rules of env/compatibility.toml as values: what must fit together, and what commits and substitutions contain.
Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.toml import NAME, SOME, Form, Table, load

FILE = "compatibility.toml"
OF_LOCK = ("deepep", "nvshmem", "nccl", "torch", "setuptools", "cuda", "wheels_cuda", "target")
OF_HOSTS = ("toolkit", "toolkit_major", "archs", "link_layer", "python", "nic_map")
CONTAINS = ("has", "lacks")
SENTENCE = Form(r"[a-z_]+ (>=|>|<=|<|is|has|lacks) \S+", "THING OPERATOR VALUE, such as `nvshmem >= 3.5.19`")
REV = Form(r"[0-9a-f]{40}", "a full commit id")


@dataclass(frozen=True)
class Sentence:
    """One sentence about a thing, as the file has it."""

    thing: str
    operator: str
    value: str

    def __str__(self) -> str:
        return f"{self.thing} {self.operator} {self.value}"


@dataclass(frozen=True)
class Rule:
    """Where every sentence of `when` is true, every sentence of `needs` must be; `refuse` says whether breaking it
    ends a run."""

    name: str
    when: tuple[Sentence, ...]
    needs: tuple[Sentence, ...]
    reason: str
    source: str
    refuse: bool


@dataclass(frozen=True)
class Contents:
    """What a source contains: features that its commit or a substitution gives. `complete` says whether somebody has
    recorded what the commit `rev` ("" for no source) has; otherwise there may be more."""

    has: tuple[str, ...] = ()
    complete: bool = True
    rev: str = ""


@dataclass(frozen=True)
class Book:
    """All rules; what commits contain by full id; what substitutions give: (file, part of the replacement) by
    feature."""

    rules: tuple[Rule, ...]
    commits: Mapping[str, tuple[str, ...]]
    substitutions: Mapping[str, tuple[str, str]]

    def contents(self, rev: str, changes: Iterable[tuple[str, str]]) -> Contents:
        """Return what a source contains. `rev` is its commit or the beginning of one, `changes` are file and
        replacement of every substitution made in it."""
        recorded = [has for name, has in self.commits.items() if rev and name.startswith(rev)]
        made = tuple(changes)
        given = (
            feature
            for feature, (file, part) in self.substitutions.items()
            if any(name == file and part in replacement for name, replacement in made)
        )
        had = (feature for has in recorded for feature in has)
        return Contents(tuple(dict.fromkeys((*given, *had))), bool(recorded), rev)


def read_book(texts: Mapping[str, str]) -> Book:
    """Return the rules in the texts of env/; Trouble with every fault of the file."""
    problems: list[Problem] = []
    where = f"env/{FILE}"
    if FILE not in texts:
        raise Trouble(Problem(where, "this file is missing", try_="a fresh checkout"))
    top = Table(load(texts[FILE], where), where, problems)
    commits = {name: _commit(table) for name, table in top.named("commit", REV)}
    substitutions = {name: _substitution(table) for name, table in top.named("substitution", NAME)}
    named = {name for name, table in top.named("feature", NAME) if _feature(table)}
    features = {*named, *substitutions, *(feature for has in commits.values() for feature in has)}
    rules = tuple(_rule(table, features) for table in top.tables("rule"))
    top.close()
    if problems:
        raise Trouble(*problems)
    return Book(rules, commits, substitutions)


def _commit(table: Table) -> tuple[str, ...]:
    table.text("of", SOME)
    has = table.words("has", NAME)
    table.close()
    return has


def _substitution(table: Table) -> tuple[str, str]:
    found = table.text("file", SOME), table.text("replacement", SOME)
    table.close()
    return found


def _feature(table: Table) -> str:
    what = table.text("of", SOME)
    table.close()
    return what


def _rule(table: Table, features: set[str]) -> Rule:
    rule = Rule(
        name=table.text("name", NAME),
        when=tuple(_sentences(table, "when", features)),
        needs=tuple(_sentences(table, "needs", features)),
        reason=table.text("reason", SOME),
        source=table.text("source", SOME),
        refuse=table.take("refuse", bool, default=True),
    )
    if not rule.needs:
        table.complain("needs", "is missing or empty", wanted=SENTENCE.words)
    table.close()
    return rule


def _sentences(table: Table, key: str, features: set[str]) -> Iterator[Sentence]:
    """Yield the sentences of a rule; a thing or a feature that nobody knows would make it true or false for ever."""
    things = (*OF_LOCK, *OF_HOSTS)
    for text in table.words(key, SENTENCE):
        sentence = Sentence(*text.split(" ", 2)) if SENTENCE.fits(text) else None
        if sentence is None:
            continue
        if sentence.thing not in things:
            table.complain(key, "is about something unknown", text, ", ".join(things))
        if sentence.operator in CONTAINS and sentence.value not in features:
            table.complain(key, "asks for something that nothing here has", text, ", ".join(sorted(features)))
        if sentence.value.startswith("{") and sentence.value.strip("{}") not in things:
            table.complain(key, "names something unknown", text, ", ".join(things))
        yield sentence
