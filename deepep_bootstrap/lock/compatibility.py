"""The rules of compatibility.toml, evaluated for a lock and for the hosts of a site.

A thing may be unknown: what the hosts say is not known while only a lock is read. A rule about it is then
left for later.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace
from packaging.version import InvalidVersion, Version

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.toml import NAME, SOME, Table, ValueForm, load_toml
from deepep_bootstrap.lock.model import Lock, Source, Stack, Wheel

FILE = "rules/compatibility.toml"
"""Below env/."""

OF_LOCK = ("deepep", "nvshmem", "nccl", "torch", "setuptools", "cuda", "wheels_cuda", "target")
OF_HOSTS = ("toolkit", "toolkit_major", "archs", "link_layer", "python", "torch_nccl", "nic_map")
CONTAINS = ("has", "lacks")
SENTENCE = ValueForm(r"[a-z_]+ (>=|>|<=|<|is|has|lacks) \S+", "THING OPERATOR VALUE, such as `nvshmem >= 3.5.19`")
REV = ValueForm(r"[0-9a-f]{40}", "a full commit id")


class Sentence(Struct, frozen=True):
    """One sentence about a thing, as the file has it."""

    thing: str
    operator: str
    value: str

    def __str__(self) -> str:
        return f"{self.thing} {self.operator} {self.value}"


class Rule(Struct, frozen=True):
    """Where every sentence of `when` is true, every sentence of `needs` must be; `refuse` says whether breaking it
    ends a run, `remedy` what to try ("" for what is usual)."""

    name: str
    when: tuple[Sentence, ...]
    needs: tuple[Sentence, ...]
    reason: str
    source: str
    refuse: bool
    remedy: str = ""


class Contents(Struct, frozen=True):
    """What a source contains: features that its commit or a substitution gives. `complete` says whether somebody has
    recorded what the commit `rev` ("" for no source) has; otherwise there may be more."""

    has: tuple[str, ...] = ()
    complete: bool = True
    rev: str = ""


class RuleSet(Struct, frozen=True):
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


def read_rules(texts: Mapping[str, str]) -> RuleSet:
    """Return the rules in the texts of env/; Trouble with every fault of the file."""
    problems: list[Problem] = []
    where = f"env/{FILE}"
    if FILE not in texts:
        raise Trouble(Problem(where, "this file is missing", try_="a fresh checkout"))
    top = Table(load_toml(texts[FILE], where), where, problems)
    commits = {name: _commit(table) for name, table in top.named("commit", REV)}
    substitutions = {name: _substitution(table) for name, table in top.named("substitution", NAME)}
    named = {name for name, table in top.named("feature", NAME) if _feature(table)}
    features = {*named, *substitutions, *(feature for has in commits.values() for feature in has)}
    rules = tuple(_rule(table, features) for table in top.tables("rule"))
    top.close()
    if problems:
        raise Trouble(*problems)
    return RuleSet(rules, commits, substitutions)


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
        remedy=table.text("remedy", SOME) if "remedy" in table.data else table.take("remedy", str, ""),
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


COMPARISONS: Mapping[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
}
OWN, EXTERNAL = "own", "external"
NEWER = "a newer CUDA toolkit on the build host, which may stand beside the old one, or another --stack"
Judgement: TypeAlias = tuple[tuple[Problem, ...], tuple[str, ...]]
"""Why a stack cannot work on some hosts, and remarks."""


class StackFacts(Struct, frozen=True):
    """What is known of one stack: the values of things (a thing that is not a key is unknown, one without values is
    not there) and what `deepep` and `nvshmem` contain. `names` says what a person calls a thing (`NVSHMEM 3.5.19
    from its wheel`)."""

    values: Mapping[str, tuple[str, ...]]
    contents: Mapping[str, Contents] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)


class SiteFacts(Struct, frozen=True):
    """What the hosts say: version of the CUDA toolkit, architectures ("9.0"), link layer of the profile ("" without a
    network), for an external Python its torch ("" otherwise), whether a map from GPU to NIC is set, and for DeepEP V2
    beside an external Python the versions of "nccl" and "nvshmem" that this torch brings, and whether the lock's NCCL
    is taken in place of the former."""

    toolkit: str
    archs: tuple[str, ...]
    link_layer: str
    external_torch: str = ""
    nic_map: bool = False
    external_libraries: Mapping[str, str] = field(default_factory=dict)
    own_nccl: bool = False


def check_lock(lock: Lock, texts: Mapping[str, str], stacks: Sequence[str] = ()) -> tuple[Problem, ...]:
    """Return why stacks of the lock (all, or those named) cannot work, as far as a lock alone shows.

    `texts` are the files of env/ by relative path. Trouble when the rules themselves cannot be read.
    """
    rule_set = read_rules(texts)
    found: list[Problem] = []
    for name in stacks or lock.stacks:
        for target in lock.stacks[name].wheels or ("",):
            known = stack_facts(rule_set, lock, lock.stacks[name], target)
            refusing = (broken for broken in broken_rules(rule_set, known) if broken.rule.refuse)
            found += [broken_problem(broken, known, f"{lock.path}: stack.{name}") for broken in refusing]
    return tuple(dict.fromkeys(found))


def check_site(lock: Lock, stack: Stack, target: str, *, site: SiteFacts, texts: Mapping[str, str]) -> Judgement:
    """Return why the stack cannot work on these hosts, and remarks. `target` is "" for an external Python, whose
    wheels nobody knows."""
    rule_set = read_rules(texts)
    of_lock = stack_facts(rule_set, lock, stack, target)
    values = {
        **of_lock.values,
        "toolkit": (site.toolkit,),
        "toolkit_major": (site.toolkit.split(".")[0],),
        "archs": site.archs,
        "link_layer": (site.link_layer,) if site.link_layer else (),
        "nic_map": ("set",) if site.nic_map else (),
        "python": (OWN if target else EXTERNAL,),
        **({} if target else _external_values(stack, site)),
    }
    names = {
        **of_lock.names,
        "archs": capabilities(site.archs),
        "nic_map": "the map from GPU to NIC",
        "torch_nccl": f"NCCL {site.external_libraries.get('nccl') or 'none'} of the external Python",
    }
    if "nvshmem" in site.external_libraries:
        names["nvshmem"] = f"NVSHMEM {site.external_libraries['nvshmem']} of the external Python"
    known, where = replace(of_lock, values=values, names=names), f"stack {stack.name}"
    problems: list[Problem] = []
    remarks: list[str] = []
    for broken in broken_rules(rule_set, known):
        problem = broken_problem(broken, known, where)
        if broken.rule.refuse:
            problems.append(problem)
        else:
            remarks.append(f"{where}: {problem.what}")
    return tuple(problems), tuple(remarks)


def _external_values(stack: Stack, site: SiteFacts) -> dict[str, tuple[str, ...]]:
    """Return what is known of an external Python in place of wheels: its torch, for DeepEP V2 also the NVSHMEM that
    this torch brings, and the NCCL that is used: that torch's, or the lock's, which is `nccl` as in a lock."""
    found = site.external_libraries
    values = {"torch": (site.external_torch,), **({"nvshmem": (found["nvshmem"],)} if "nvshmem" in found else {})}
    own = stack.pinned(stack.nccl_wheel) if site.own_nccl and stack.nccl_wheel else None
    return {**values, **({"nccl": (own.version,)} if own else {"torch_nccl": _value_or_none(found.get("nccl", ""))})}


def stack_facts(rule_set: RuleSet, lock: Lock, stack: Stack, target: str) -> StackFacts:
    """Return what the lock says of one stack for one target; "" leaves out what only the wheels of a target
    decide."""
    deepep = lock.sources[stack.deepep]
    source = lock.sources[stack.nvshmem] if stack.nvshmem else None
    wheel = stack.pinned(stack.nvshmem_wheel, target) if stack.nvshmem_wheel else None
    pinned = source or wheel
    nvshmem = pinned.version if pinned else ""
    values = {"deepep": (deepep.version,), "nvshmem": _value_or_none(nvshmem), "cuda": (stack.cuda,)}
    if target:
        values |= _target_values(stack, target)
    contents = {"deepep": _contents(rule_set, deepep), "nvshmem": _contents(rule_set, source) if source else Contents()}
    return StackFacts(values, contents, names_of(deepep.version, deepep.rev, nvshmem, wheel=source is None))


def _target_values(stack: Stack, target: str) -> dict[str, tuple[str, ...]]:
    """Return the values that the wheels of a target decide."""
    torch, setuptools = stack.pinned("torch", target), stack.pinned("setuptools", target)
    return {
        "target": (target,),
        "nccl": _value_or_none(stack.nccl_version(target)),
        "wheels_cuda": _cuda_majors(stack.wheels.get(target, ())),
        "torch": (torch.version,) if torch else (),
        "setuptools": (setuptools.version,) if setuptools else (),
    }


def _value_or_none(value: str) -> tuple[str, ...]:
    return (value,) if value else ()


class BrokenRule(Struct, frozen=True):
    """A rule that does not hold: `wrong` are its needs that are false. Where none is, `unrecorded` are those about
    features of which nobody has recorded whether they are there."""

    rule: Rule
    wrong: tuple[Sentence, ...]
    unrecorded: tuple[Sentence, ...]


def broken_rules(rule_set: RuleSet, known: StackFacts) -> Iterator[BrokenRule]:
    """Yield the rules that `known` breaks; also those that ask for what a commit or substitutions give and of which
    nobody has recorded it: that is no promise kept, and no fault."""
    for rule in rule_set.rules:
        if not all(holds(sentence, known, any) for sentence in rule.when):
            continue
        held = [(sentence, holds(sentence, known, all)) for sentence in rule.needs]
        wrong = tuple(sentence for sentence, is_held in held if is_held is False)
        unrecorded = tuple(sentence for sentence, is_held in held if is_held is None and sentence.operator == "has")
        if wrong or unrecorded:
            yield BrokenRule(rule, wrong, unrecorded)


def broken_problem(broken: BrokenRule, known: StackFacts, where: str) -> Problem:
    """Return the problem of a rule that does not hold."""
    return _wrong_problem(broken, known, where) if broken.wrong else _unrecorded_problem(broken, known, where)


def _wrong_problem(broken: BrokenRule, known: StackFacts, where: str) -> Problem:
    rule, wrong = broken.rule, broken.wrong
    things = dict.fromkeys(sentence.thing for sentence in (*wrong, *rule.when))
    found = ", ".join(_shown(thing, known) for thing in things)
    wanted = " and ".join(str(replace(sentence, value=_value(sentence, known))) for sentence in wrong)
    is_toolkit = all(sentence.thing == "toolkit" for sentence in wrong)
    remedy = rule.remedy or (NEWER if is_toolkit else "invoke lock, or another --stack")
    return Problem(where, f"{rule.reason} ({rule.source})", found, wanted, remedy)


def _unrecorded_problem(broken: BrokenRule, known: StackFacts, where: str) -> Problem:
    rule = broken.rule
    features = " and ".join(dict.fromkeys(sentence.value for sentence in broken.unrecorded))
    thing = broken.unrecorded[0].thing
    others = dict.fromkeys(_shown(sentence.thing, known) for sentence in rule.when if sentence.thing != thing)
    needing = ", ".join(others) or "it"
    what = f"nobody has recorded whether {_shown(thing, known)} has {features}, which {needing} needs"
    remedy = _recording(known.contents[thing].rev) if thing in known.contents else ""
    return Problem(where, f"{what}: {rule.reason} ({rule.source})", try_=remedy)


def unrecorded(rev: str, texts: Mapping[str, str]) -> str:
    """Return what to know of a commit of DeepEP that the rules in `texts` ask about and nobody has recorded; ""
    where that is not so."""
    rule_set = read_rules(texts)
    sentences = (each for rule in rule_set.rules for each in (*rule.when, *rule.needs))
    asked = dict.fromkeys(each.value for each in sentences if each.operator == "has" and each.thing == "deepep")
    if rev in rule_set.commits or not asked:
        return ""
    return f"nobody has recorded what this commit has of what the rules ask for ({', '.join(asked)}): {_recording(rev)}"


def holds(sentence: Sentence, known: StackFacts, several: Callable[[Iterator[bool]], bool]) -> bool | None:
    """Return whether a sentence is true, None where that cannot be known. `several` decides over several values; no
    value is false."""
    if sentence.operator in CONTAINS:
        contents = known.contents.get(sentence.thing, Contents(complete=False))
        there = sentence.value in contents.has
        return (sentence.operator == "has") == there if there or contents.complete else None
    values = known.values.get(sentence.thing)
    if values is None:
        return None
    value = _value(sentence, known)
    compare = COMPARISONS.get(sentence.operator)
    return bool(values) and several(
        (compare(numbers(one), numbers(value)) if compare else one == value) for one in values
    )


def names_of(deepep: str, rev: str, nvshmem: str, *, wheel: bool) -> dict[str, str]:
    """Return what a person calls a DeepEP and an NVSHMEM of these versions."""
    return {
        "deepep": f"DeepEP {deepep} at {rev[:12] or 'an unknown commit'}",
        "nvshmem": f"NVSHMEM {nvshmem} from its {'wheel' if wheel else 'source'}",
    }


def capabilities(archs: Sequence[str]) -> str:
    """Return what a person calls GPUs of these architectures."""
    return f"compute capability {' and '.join(archs)}"


def numbers(version: str) -> tuple[int, ...]:
    """Return the release of a version as numbers to compare: without what follows it, and without zeros at its end.
    What is no version has none."""
    try:
        release = list(Version(version).release)
    except InvalidVersion:
        return ()
    while release and release[-1] == 0:
        release.pop()
    return tuple(release)


def _value(sentence: Sentence, known: StackFacts) -> str:
    """Return the value of a sentence, with what `{thing}` is in its place."""
    if sentence.value.startswith("{"):
        return next(iter(known.values.get(sentence.value.strip("{}"), ())), "")
    return sentence.value


def _recording(rev: str) -> str:
    return f"reading it, then writing what it has under [commit.{rev}] in env/{FILE}"


def _shown(thing: str, known: StackFacts) -> str:
    return known.names.get(thing) or f"{thing} {' '.join(known.values.get(thing, ())) or 'none'}"


def _cuda_majors(wheels: Sequence[Wheel]) -> tuple[str, ...]:
    """Return the CUDA majors that wheels are made for: a suffix of their name, or the version of the runtime that
    has none."""
    found = {match[1] for wheel in wheels if (match := re.search(r"-cu(\d+)$", wheel.name))}
    found |= {wheel.version.split(".")[0] for wheel in wheels if wheel.name in ("nvidia-cuda-runtime", "cuda-toolkit")}
    return tuple(sorted(found))


def _contents(rule_set: RuleSet, source: Source) -> Contents:
    return rule_set.contents(source.rev, ((each.file, each.replacement) for each in source.substitutes))
