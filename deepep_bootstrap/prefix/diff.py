"""Differences between two generations, or between two locks: both sides as flat tables of facts.

A fact has a place: what it is about (`source`, `wheel`, `variable` …), whose it is, and its key; and a
text. Everything that one side says and the other does not, or says differently, is one change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from msgspec import Struct
from msgspec.structs import fields

from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.text import day
from deepep_bootstrap.fetch.renew import compare_link
from deepep_bootstrap.lock.model import Lock, Source, Stack
from deepep_bootstrap.prefix.contents import ENTRY_NAME, Generation, Holdings, StoreEntry
from deepep_bootstrap.prefix.offer import Offer, offer_document

Place = tuple[str, str, str]
Facts = Mapping[Place, str]
SHOWN_LENGTH = 100
"""Characters of a text that a line for a person shows; the JSON document has it whole."""

RECORD_WORDS = {
    "deepep",
    "nvshmem",
    "gdrcopy",
    "python",
    "own_nccl",
    "toolkit",
    "prefix",
    "stack",
    "environment",
    "by_host",
    "by_kind",
    "site",
}
"""Fields of a stack's record that are told in their own way, or not at all."""


class OfferChange(Struct, frozen=True):
    """One difference: `what` kind of fact, `name` whose, `key` which; `old` and `new` are "" where a side does not
    have it. `link` shows the difference of two commits in a browser, "" where there is none."""

    what: str
    name: str
    key: str
    old: str
    new: str
    link: str = ""


def difference(old: Facts, new: Facts) -> tuple[OfferChange, ...]:
    """Return what differs, in the order of the places; of what only one side has at all, that it was added or
    removed comes first."""
    places = sorted({*old, *new})
    return tuple(
        OfferChange(*place, old=old.get(place, ""), new=new.get(place, ""), link=_link(place, old, new))
        for place in places
        if old.get(place) != new.get(place)
    )


def _link(place: Place, old: Facts, new: Facts) -> str:
    what, name, key = place
    url = (what, name, "url")
    if what != "source" or key != "rev" or place not in old or place not in new or old.get(url) != new.get(url):
        return ""
    return compare_link(new.get(url, ""), old[place], new[place])


def lock_facts(lock: Lock) -> Facts:
    """Return everything a lock pins as facts."""
    found: dict[Place, str] = {("lock", "", "default_stack"): lock.default_stack}
    for source in lock.sources.values():
        found |= source_facts(source.name, source)
    for name, stack in lock.stacks.items():
        found |= stack_facts(name, stack)
    for name, system in lock.systems.items():
        found |= _placed("system", name, _flat(system))
    for name, files in _lists(lock):
        found |= wheel_facts(name, files)
    for name, url in lock.indexes.items():
        found["index", name, "url"] = url
    return found


def _lists(lock: Lock) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Yield the lists of files that belong to no stack, by what they are for: name, version and hash of each."""
    for name, wheels in lock.tools.items():
        yield f"tool {name}", [(each.file, each.version, each.hash) for each in wheels]
    for name, toolkit in lock.toolkits.items():
        for machine, wheels in toolkit.wheels.items():
            yield f"toolkit {name} {machine}", [(each.name, each.version, each.hash) for each in wheels]
    for name, compiler in lock.compilers.items():
        for machine, packages in compiler.packages.items():
            yield f"compiler {name} {machine}", [(each.name, each.version, each.hash) for each in packages]


def stack_facts(name: str, stack: Stack) -> dict[Place, str]:
    """Return what a lock says of one stack, the wheels of each target by themselves."""
    pairs = ((key, value) for key, value in _flat(stack) if not key.startswith("wheels"))
    found = _placed("stack", name, pairs)
    for target, wheels in stack.wheels.items():
        found |= wheel_facts(f"{name} {target}", ((wheel.name, wheel.version, wheel.hash) for wheel in wheels))
    return found


def _placed(what: str, name: str, pairs: Iterable[tuple[str, str]]) -> dict[Place, str]:
    """Return keys and values as facts of one thing."""
    return {(what, name, key): value for key, value in pairs}


def source_facts(name: str, source: Source) -> dict[Place, str]:
    """Return what a lock says of one source, its options and substitutions by themselves."""
    found = pin_facts(name, source) | {("source", name, "checks"): " ".join(source.checks)}
    found |= option_facts(name, source.options)
    return found | substitution_facts(name, (each.effect for each in source.substitutes))


def pin_facts(name: str, source: Source) -> dict[Place, str]:
    """Return where a source comes from and what it is, without what is done to it."""
    found = {
        ("source", name, key): str(getattr(source, key))
        for key in ("url", "ref", "rev", "hash", "version", "submodules")
    }
    return found | {("source", name, "date"): day(source.last_modified)}


def option_facts(name: str, options: Iterable[str]) -> dict[Place, str]:
    """Return build options (NAME=VALUE) as facts."""
    return {("option", name, option.partition("=")[0]): option.partition("=")[2] for option in options}


def substitution_facts(name: str, substitutes: Iterable[Mapping[str, Any]]) -> dict[Place, str]:
    """Return substitutions as facts: by file and replaced text, the replacement and how often."""
    return {
        ("substitution", name, f"{each['file']}: {each['text']}"): f"{each['replacement']} ({each['count']}x)"
        for each in substitutes
    }


def wheel_facts(name: str, wheels: Iterable[Sequence[str]]) -> dict[Place, str]:
    """Return wheels (name, version, hash) as facts of the environment `name`."""
    return {("wheel", name, wheel): f"{version} {digest}" for wheel, version, digest in wheels}


def generation_facts(holdings: Holdings, generation: Generation, sources: Mapping[str, Source]) -> Facts:
    """Return what a generation offers as facts: its stacks' records, and what their store entries say they were made
    of.

    `sources` are what locks pin, by content hash: where an entry's source is among them, its address and commit are
    known too.
    """
    found: dict[Place, str] = {("offer", "", "default_stack"): generation.default_stack}
    for stack, record in generation.stacks.items():
        found |= record_facts(stack, record)
        for kind, name in record.items():
            if isinstance(name, str) and ENTRY_NAME.fullmatch(name):
                found["entry", stack, kind] = name
                manifest = holdings.entries[name].manifest if name in holdings.entries else {}
                found |= entry_facts(f"{kind} of {stack}", _mapping(manifest.get("inputs")), sources)
    return found


def offer_facts(offer: Offer, inputs: Mapping[str, Mapping[str, object]]) -> Facts:
    """Return what an offer says as facts; `inputs` are what entries of the store are made of, by name, as far as that
    is known."""
    entries = {name: StoreEntry(name, 0, {"inputs": values}) for name, values in inputs.items()}
    return generation_facts(Holdings(0, (), entries), Generation(0, {"offer": offer_document(offer)}), {})


def record_facts(stack: str, record: Mapping[str, Any]) -> dict[Place, str]:
    """Return what the record of a stack says as facts, its variables and the site's settings by themselves."""
    words = {key: value for key, value in record.items() if key not in RECORD_WORDS and value not in ("", [], {}, 0)}
    found = _placed("stack", stack, _values(words))
    found |= _placed("site", stack, _values(record.get("site")))
    variables = ((key, value or "(unset)") for key, value in _values(record.get("environment")))
    found |= _placed("variable", stack, variables)
    for host, values in _mapping(record.get("by_host")).items():
        found |= _placed("variable", f"{stack} on {host}", _values(values))
    for kind, values in _mapping(record.get("by_kind")).items():
        found |= _placed("variable", f"{stack} for {kind}", _values(values))
    return found


def entry_facts(name: str, inputs: Mapping[str, Any], sources: Mapping[str, Source]) -> dict[Place, str]:
    """Return what the manifest of a store entry says it was made of; `name` is how a person calls the entry."""
    found: dict[Place, str] = {}
    if (digest := str(inputs.get("source", ""))) in sources:
        # Its options and substitutions are the entry's own: another lock may say others of the same tree.
        found |= pin_facts(name, sources[digest])
    elif digest:
        found |= {("source", name, "hash"): digest, ("source", name, "version"): str(inputs.get("version", ""))}
    if "checks" in inputs:
        found[("source", name, "checks")] = _word(inputs["checks"])
    found |= option_facts(name, map(str, inputs.get("options", ())))
    found |= substitution_facts(name, inputs.get("substitutes", ()))
    found |= wheel_facts(name, inputs.get("wheels", ()))
    found |= {
        ("toolchain", name, key): _word(inputs[key])
        for key in ("cuda", "archs", "os", "python", "interpreter")
        if key in inputs
    }
    found |= {("toolchain", name, key): value for key, value in _values(inputs.get("compiler"))}
    return found | {("recipe", name, key): value for key, value in _values(inputs.get("recipes"))}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _values(value: object) -> Iterator[tuple[str, str]]:
    """Yield the keys of a JSON object with their values as texts."""
    for key, inner in _mapping(value).items():
        yield str(key), _word(inner)


def _word(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_word(inner)}" for key, inner in value.items())
    return " ".join(map(_word, value)) if isinstance(value, (list, tuple)) else str(value)


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the fields of a frozen dataclass, all the way down, with dotted keys; its name is no fact of its own."""
    parts = _parts(value)
    if parts is None:
        yield path, _word(value)
        return
    for name, inner in parts:
        if path:
            yield from _flat(inner, f"{path}.{name}")
        elif name != "name":
            yield from _flat(inner, name)


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """Return the named parts of a record, a table, or a list of records; None for what has none."""
    if isinstance(value, Struct):
        return [(each.name, getattr(value, each.name)) for each in fields(value)]
    if isinstance(value, Mapping):
        return [(str(key), inner) for key, inner in value.items()]
    if isinstance(value, tuple) and any(isinstance(inner, Struct) for inner in value):
        return [(str(getattr(inner, "name", position)), inner) for position, inner in enumerate(value)]
    return None


def lines(changes: Sequence[OfferChange]) -> Iterator[str]:
    """Yield the changes for a person: those of one thing together, what was added or removed as a whole in one line."""
    for (what, name), group in groupby(changes, key=lambda change: (change.what, change.name)):
        several = list(group)
        yield f"{what} {name}".rstrip()
        for change in several:
            yield f"    {change.key}: {_change_text(change)}"
            if change.link:
                yield f"        {change.link}"


def _change_text(change: OfferChange) -> str:
    old, new = change.old, change.new
    if change.what == "wheel":
        # The hash matters to a person only where it is all that differs.
        versions = old.partition(" ")[0], new.partition(" ")[0]
        old, new = versions if versions[0] != versions[1] else (old, new)
    if change.what == "recipe":
        return "changed" if old and new else "added" if new else "removed"
    if not old:
        return f"added, {_cut(new)}" if new else "added, empty"
    return f"{_cut(old)} → {_cut(new)}" if new else f"removed, was {_cut(old)}"


def _cut(text: str) -> str:
    shown = text.replace("\n", "\\n")
    return shown if len(shown) <= SHOWN_LENGTH else f"{shown[:SHOWN_LENGTH]}…"


# In short

ADDED, CHANGED, REMOVED = "+", "~", "-"
PROJECTS = {
    "deepep": "DeepEP",
    "nvshmem": "NVSHMEM",
    "gdrcopy": "GDRCopy",
    "nccl": "NCCL",
    "python": "Python environment",
}
"""Entries of the store and sources of a lock as a person calls them, by the first word of their names."""

COUNTED = {"option": "build options", "substitution": "substitutions", "recipe": "recipes", "toolchain": "toolchain"}
"""Facts that are counted where they are many: what they are says enough, --verbose says the rest."""

NAMED = 3
"""Wheels, and facts of the toolchain, that a short line names."""

SHORT_REV = 7


def brief(changes: Sequence[OfferChange], why: str = "") -> list[str]:
    """Return the changes as a person asks for them first: whole stacks in one line each, then modules, commits,
    variables and settings of jobs one by one, and the rest counted. `why` is added to each line of a variable."""
    whole = whole_stacks(changes)
    rest = [change for change in changes if stack_of(change) not in whole]
    several = len({stack_of(change) for change in rest} - {""}) > 1
    return [
        *(_whole(name, mark, changes) for name, mark in whole.items()),
        *(line for change in rest for line in _single(change, several=several)),
        *_variables(rest, why, several=several),
        *_counted(rest),
        *_wheels(rest),
    ]


def whole_stacks(changes: Iterable[OfferChange]) -> dict[str, str]:
    """Return the stacks that only one side has, with ADDED or REMOVED."""
    modules = [change for change in changes if change.what == "stack" and change.key in {"module", "deepep"}]
    return {change.name: REMOVED if change.old else ADDED for change in modules if not (change.old and change.new)}


def stack_of(change: OfferChange) -> str:
    """Return the stack whose fact a change is, "" for a source of a lock and for what all stacks share."""
    if change.what in {"stack", "site", "entry"}:
        return change.name
    if change.what in {"variable", "wheel"} and " of " not in change.name:
        return change.name.partition(" ")[0]
    return change.name.partition(" of ")[2]


def _whole(name: str, mark: str, changes: Sequence[OfferChange]) -> str:
    """Return what a stack that came or went consists of, as far as the changes say it."""
    told = {(change.what, change.key): change.new or change.old for change in changes if stack_of(change) == name}
    module = told.get(("stack", "module"), "").removeprefix("deepep/").removesuffix(f"-{name}")
    nvshmem = told.get(("entry", "nvshmem"), "").partition("-nvshmem-")[2]
    torch = told.get(("wheel", "torch"), "").partition(" ")[0]
    parts = [
        f"DeepEP {module or told.get(('stack', 'deepep'), '?')}",
        f"NVSHMEM {nvshmem}" if nvshmem else "",
        f"torch {torch}" if torch else told.get(("stack", "external_python"), ""),
        f"CUDA {cuda}" if (cuda := told.get(("toolchain", "cuda")) or told.get(("stack", "cuda"), "")) else "",
    ]
    return f"{mark} stack {name}: {', '.join(filter(None, parts))}"


def _single(change: OfferChange, *, several: bool) -> Iterator[str]:
    """Yield the line of a change that is told by itself, and the link of a commit's."""
    if change.what == "source" and change.key == "rev" and not (change.old and change.new):
        yield f"{REMOVED if change.old else ADDED} source {change.name}: {(change.old or change.new)[:SHORT_REV]}"
        return
    label = _label(change, several=several)
    if not label:
        return
    old, new = change.old, change.new
    if change.key == "rev":
        old, new = old[:SHORT_REV], new[:SHORT_REV]
    if change.what == "entry":
        old, new = _build(old), _build(new)
        if old.partition(" ")[0] == new.partition(" ")[0]:
            new = f"another build of {new.partition(' ')[0]}"
            yield f"{CHANGED} {label}: {new}"
            return
        old, new = old.partition(" ")[0], new.partition(" ")[0]
    yield f"{CHANGED} {label}: {_cut(old) or '(none)'} → {_cut(new) or '(none)'}"
    if change.link:
        yield f"    {change.link}"


def _label(change: OfferChange, *, several: bool) -> str:
    """Return how a person calls what changed; "" for what is counted, or said by another change."""
    of = f" of {stack_of(change)}" if several and stack_of(change) else ""
    if change.key == "default_stack":
        return "default stack" if change.old and change.new else ""
    if change.what == "site":
        return f"sbatch {change.key}{of}"
    if change.what == "stack" and not change.key.startswith("asked."):
        return f"{change.key.replace('_', ' ')}{of}"
    if change.what == "entry":
        return f"{PROJECTS.get(change.key, change.key)}{of}"
    if change.what == "source" and change.key in {"rev", "ref", "url"} and change.old and change.new:
        first = change.name.partition(" of ")[0]
        return f"{PROJECTS.get(first, first)} {'commit' if change.key == 'rev' else change.key}{of}"
    return ""


def _build(name: str) -> str:
    """Return version and hash of a store entry's name."""
    digest, _, rest = name.partition("-")
    return f"{rest.partition('-')[2]} {digest}" if rest else name


class _Variable(Struct, frozen=True):
    """A change of a variable, for all hosts that have it alike: `kind` is "for KIND" of one kind of test, else ""."""

    key: str
    old: str
    new: str
    stack: str
    kind: str

    @property
    def text(self) -> str:
        """What changed."""
        if not self.old:
            return f"{ADDED} {self.key}={self.new}"
        return f"{CHANGED} {self.key}: {self.old} → {self.new}" if self.new else f"{REMOVED} {self.key}={self.old}"


def _variables(changes: Sequence[OfferChange], why: str, *, several: bool) -> Iterator[str]:
    """Yield one line for each variable that changed, those of hosts folded."""
    groups: dict[_Variable, list[str]] = {}
    for change in (change for change in changes if change.what == "variable"):
        stack, _, rest = change.name.partition(" ")
        of_host = rest.startswith("on ")
        variable = _Variable(change.key, change.old, change.new, stack, "" if of_host else rest)
        groups.setdefault(variable, []).extend([rest.removeprefix("on ")] if of_host else [])
    for variable, hosts in groups.items():
        stack, on = f"stack {variable.stack}" if several else "", f"on {fold(hosts)}" if hosts else ""
        where = ", ".join(filter(None, (stack, on, variable.kind, why)))
        yield _cut(variable.text) + (f" ({where})" if where else "")


def _counted(changes: Sequence[OfferChange]) -> Iterator[str]:
    """Yield one line for each thing of which options, recipes, substitutions or the toolchain changed."""
    groups: dict[str, dict[str, list[str]]] = {}
    for change in changes:
        if change.what in COUNTED:
            groups.setdefault(change.name, {}).setdefault(change.what, []).append(change.key)
    for name, kinds in groups.items():
        counts = [
            f"toolchain ({', '.join(keys[:NAMED])})" if what == "toolchain" else f"{len(keys)} {COUNTED[what]}"
            for what, keys in kinds.items()
        ]
        yield f"{CHANGED} {name}: {', '.join(counts)}"


def _wheels(changes: Sequence[OfferChange]) -> Iterator[str]:
    """Yield one line for each environment whose wheels changed, torch first."""
    groups: dict[str, list[OfferChange]] = {}
    for change in changes:
        if change.what == "wheel":
            groups.setdefault(change.name, []).append(change)
    for name, several in groups.items():
        named = sorted(several, key=lambda change: change.key != "torch")[:NAMED]
        told = ", ".join(f"{change.key} {_wheel(change)}" for change in named)
        more = f" and {len(several) - NAMED} more" if len(several) > NAMED else ""
        yield f"{CHANGED} {len(several)} wheel{'s' if len(several) > 1 else ''} of {name}: {_cut(told)}{more}"


def _wheel(change: OfferChange) -> str:
    """Return how the version of a wheel changed."""
    old, new = change.old.partition(" ")[0], change.new.partition(" ")[0]
    if old == new:
        return f"{new} (another file)"
    return f"{old} → {new}" if old and new else f"{new} added" if new else f"{old} removed"
