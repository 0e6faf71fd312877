"""Known defects of what a prefix offers: what the manifests of its entries record, judged by the rules of
env/rules/compatibility.toml.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.survey import Survey, read_tree
from deepep_bootstrap.lock.compatibility import (
    Contents,
    RuleSet,
    StackFacts,
    broken_problem,
    broken_rules,
    capabilities,
    names_of,
    read_rules,
)
from deepep_bootstrap.prefix import history
from deepep_bootstrap.prefix.access import candidates
from deepep_bootstrap.prefix.contents import Generation, Holdings
from deepep_bootstrap.prefix.generations import PrefixHandle
from deepep_bootstrap.prefix.offer import command_for
from deepep_bootstrap.remote.jobs import Transport

CHECK = "known-defect"
BOOTSTRAP = "invoke bootstrap"
Offered: TypeAlias = tuple[str, Mapping[str, Any]]
"""A stack's name and its record in a generation's manifest."""


class Defect(Struct, frozen=True):
    """A rule about what a source contains that an offered stack breaks: which module and store entry have it, what
    was `found` there and what the rule `wanted`, `why` as one sentence with its source, and the command `fix` that
    builds and offers the stack anew."""

    stack: str
    module: str
    entry: str
    found: str
    wanted: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.module} ({self.entry}): found {self.found}, wanted {self.wanted}. {self.why} Try: {self.fix}"


def defects(
    holdings: Holdings, generation: Generation, texts: Mapping[str, str], bootstrap: str = BOOTSTRAP
) -> tuple[Defect, ...]:
    """Return the known defects of what a generation offers. `texts` are the files of env/ by relative path,
    `bootstrap` is the command that prepares the same hosts. Of an entry that is gone, or whose manifest cannot be
    read, nothing is known and nothing is said."""
    rule_set = read_rules(texts)
    asking = tuple(
        rule for rule in rule_set.rules if rule.refuse and any(need.operator == "has" for need in rule.needs)
    )
    rule_set = replace(rule_set, rules=asking)
    found = (_of_stack(holdings, offered, rule_set, bootstrap) for offered in generation.stacks.items())
    return tuple(defect for each in found for defect in each)


def _of_stack(holdings: Holdings, offered: Offered, rule_set: RuleSet, bootstrap: str) -> Iterator[Defect]:
    key, record = offered
    stack = str(record.get("stack") or key)
    entry, module = str(record.get("deepep", "")), str(record.get("module", ""))
    if not _inputs(holdings, entry):
        return
    known = _known(holdings, stack, record, rule_set)
    external = str(record.get("external_python") or "")
    python = [shlex.quote(f"--python={external}")] if external else []
    nccl = ["--nccl=own"] if record.get("own_nccl") else []
    fix = " ".join([bootstrap, f"--stack={stack}", *python, *nccl])
    for broken in broken_rules(rule_set, known):
        problem = broken_problem(broken, known, f"stack {stack}")
        found, wanted = _difference(problem, known)
        yield Defect(stack, module, entry, found, wanted, f"{problem.what[0].upper()}{problem.what[1:]}.", fix)


def _difference(problem: Problem, known: StackFacts) -> tuple[str, str]:
    """Return what was found and what is wanted; a problem about a commit that nobody has recorded says neither."""
    if problem.found:
        return problem.found, problem.wanted
    return (
        f"{known.names['deepep']} and substitutions that do not tell",
        "a commit or a substitution that is known to have it",
    )


def _known(holdings: Holdings, stack: str, record: Mapping[str, Any], rule_set: RuleSet) -> StackFacts:
    """Return what is known of an offered stack: versions, contents and GPU architectures; what else the hosts say
    stays unknown.

    Manifests of entries hold no commit; the module's name ends in the first digits of it."""
    deepep, nvshmem = str(record.get("deepep", "")), str(record.get("nvshmem", ""))
    commit = re.search(r"-([0-9a-f]{7,40})$", str(record.get("module", "")).removesuffix(f"-{stack}"))
    rev = commit[1] if commit else ""
    archs = tuple(str(each) for each in _list(record.get("archs")))
    inputs = {name: _inputs(holdings, name) for name in (deepep, nvshmem)}
    contents = {"deepep": rule_set.contents(rev, _changes(inputs[deepep])), "nvshmem": Contents(complete=False)}
    if inputs[nvshmem]:
        contents["nvshmem"] = rule_set.contents("", _changes(inputs[nvshmem]))
    values = {"deepep": (_version(deepep),), "archs": archs, **({"nvshmem": (_version(nvshmem),)} if nvshmem else {})}
    names = names_of(_version(deepep), rev, _version(nvshmem), wheel="wheel" in inputs[nvshmem])
    return StackFacts(values, contents, {**names, "archs": capabilities(archs)})


def _version(entry: str) -> str:
    """Return 1.2.1 for the entry HASH-deepep-1.2.1."""
    return "-".join(entry.split("-")[2:])


def _inputs(holdings: Holdings, entry: str) -> Mapping[str, Any]:
    found = holdings.entries[entry].manifest.get("inputs") if entry in holdings.entries else None
    return found if isinstance(found, dict) else {}


def _changes(inputs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield file and replacement of every substitution that an entry's manifest records."""
    for each in _list(inputs.get("substitutes")):
        if isinstance(each, dict):
            yield str(each.get("file", "")), str(each.get("replacement", ""))


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def find_defects(flags: Flags, transport: Transport, survey: Survey) -> tuple[tuple[Defect, ...], Sequence[Problem]]:
    """Return the known defects of what is offered, after a look at the prefix through one host that sees it, and why
    nobody could look."""
    holdings, problems = look_at_offers(flags, transport, survey)
    return current_defects(flags, holdings) if holdings else (), problems


def look_at_offers(flags: Flags, transport: Transport, survey: Survey) -> tuple[Holdings | None, Sequence[Problem]]:
    """Return what the prefix holds as one host sees it that sees an offer, None without one, and why nobody could
    look."""
    hosts = [host for host in (*candidates(survey.inventory), *survey.inventory.hosts) if host.name in survey.facts]
    via = next((host for host in hosts if survey.facts[host.name].prefix.manifest), None)
    if via is None:
        return None, ()
    try:
        return history.read_contents(transport, PrefixHandle(via, survey.prefix, read_tree(flags.root / "recipes"))), ()
    except Trouble as trouble:
        return None, trouble.problems


def current_defects(flags: Flags, holdings: Holdings) -> tuple[Defect, ...]:
    """Return the known defects of the current generation."""
    generation = holdings.get(holdings.current)
    command = command_for(replace(flags, stack="", python="", nccl=""))
    return defects(holdings, generation, read_tree(flags.root / "env"), command) if generation else ()
