"""Which CUDA toolkit of the build host a stack is built with, and whether nodes that compile with it at run time have it too. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.inventory.facts import Facts, Toolkit
from deepep_bootstrap.lock import rules
from deepep_bootstrap.lock.compatibility import read_book
from deepep_bootstrap.lock.model import Lock, Stack
from deepep_bootstrap.lock.rules import Judgement, numbers

DEFAULT = "/usr/local/cuda"
OR_OTHERS = "another build_host, or --limit"


@dataclass(frozen=True)
class Wish:
    """What a toolkit is chosen for: the stack's CUDA major, the build host, the GPU hosts' facts by name, and `judge`, which says of a
    toolkit what rules it breaks and what else to tell. `compiles`: every GPU host compiles kernels with it (DeepEP V2); `path` is then
    where it has to be because hosts that this run does not see have it there ("" where it may be anywhere)."""

    cuda: str
    build_host: str
    hosts: Mapping[str, Facts]
    judge: Callable[[Toolkit], Judgement]
    compiles: bool = False
    path: str = ""


def choose(wish: Wish) -> tuple[Toolkit, tuple[str, ...]]:
    """Return the toolkit and what to tell of it: /usr/local/cuda where that breaks no rule, else the newest that breaks none; where
    nodes compile with it, first of all one that all of them have at its path. Trouble where there is none."""
    fitting = _fitting(wish)
    judged = {kit.path: wish.judge(kit) for kit in fitting}
    allowed = [kit for kit in fitting if not judged[kit.path][0]]
    if not allowed:
        newest = max(fitting, key=lambda kit: numbers(kit.version))
        raise Trouble(*judged[newest.path][0])
    elsewhere = {kit.path: _elsewhere(wish, kit) if wish.compiles else ((), ()) for kit in allowed}
    chosen = min(allowed, key=lambda kit: [len(each) > 0 for each in elsewhere[kit.path]])
    if problems := elsewhere[chosen.path][0]:
        raise Trouble(*problems)
    return chosen, (*_passed_over(fitting[0], chosen, judged[fitting[0].path][0]), *elsewhere[chosen.path][1], *judged[chosen.path][1])


def floor(lock: Lock, stack: Stack, archs: tuple[str, ...], texts: Mapping[str, str]) -> str:
    """Return the oldest version that the rules allow a stack for these GPUs, "12.8"; "" where any of its CUDA major is new enough."""
    book = read_book(texts)
    known = rules.know(book, lock, stack, next(iter(stack.wheels), ""))
    known = replace(known, values={**known.values, "archs": archs})
    meant = [rule for rule in book.rules if rule.refuse and all(rules.holds(sentence, known, any) for sentence in rule.when)]
    needs = [need.value for rule in meant for need in rule.needs if (need.thing, need.operator) == ("toolkit", ">=")]
    oldest = max(needs, key=numbers, default="")
    return oldest if numbers(oldest) > numbers(stack.cuda) else ""


def major(toolkit: Toolkit) -> str:
    """Return "12" for 12.9.86; "" where nvcc did not say its version."""
    return toolkit.version.split(".")[0]


def _fitting(wish: Wish) -> list[Toolkit]:
    """Return the toolkits of the wanted major, /usr/local/cuda first, then the newest first; Trouble where there is none."""
    here = wish.hosts[wish.build_host]
    of_major = [kit for kit in here.toolkits if major(kit) == wish.cuda]
    if not of_major:
        remedy = f"installing cuda-toolkit {wish.cuda}, or a stack of another CUDA major"
        raise Trouble(Problem(wish.build_host, "no CUDA toolkit fits the stack", _all(here), f"CUDA {wish.cuda} with nvcc", remedy))
    fitting = [kit for kit in of_major if kit.path == wish.path or not (wish.compiles and wish.path)]
    if not fitting:
        raise Trouble(*_lacking(wish, wish.path, f"CUDA {wish.cuda} in {wish.path}, as the hosts have it that this run does not see"))
    return sorted(sorted(fitting, key=lambda kit: numbers(kit.version), reverse=True), key=lambda kit: kit.path != DEFAULT)


def _elsewhere(wish: Wish, kit: Toolkit) -> Judgement:
    """Return why nodes cannot compile with a toolkit of the build host, and where one of another version stands in its place."""
    others: dict[str, list[str]] = {}
    for name, seen in wish.hosts.items():
        for there in seen.toolkits:
            if there.path == kit.path and major(there) == wish.cuda and there.version != kit.version:
                others.setdefault(there.version, []).append(name)
    notes = (
        f"{fold(names)}: {kit.path} is CUDA {version}, {kit.version} on {wish.build_host}; DeepEP V2 compiles kernels with it on each node"
        for version, names in others.items()
    )
    return tuple(_lacking(wish, kit.path, f"CUDA {kit.version} in {kit.path}, as on {wish.build_host}")), tuple(notes)


def _lacking(wish: Wish, path: str, wanted: str) -> Iterator[Problem]:
    """Yield a problem for the hosts that have no toolkit of the major at `path`, those that have the same in one."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, seen in wish.hosts.items():
        if not any(there.path == path and major(there) == wish.cuda for there in seen.toolkits):
            groups.setdefault((_all(seen), _remedy(wish.cuda, path, seen)), []).append(name)
    for (found, remedy), names in groups.items():
        yield Problem(fold(names), "DeepEP V2 compiles kernels on every node, and this toolkit is not there", found, wanted, remedy)


def _remedy(cuda: str, path: str, seen: Facts) -> str:
    """Return how a host comes to a toolkit at `path`."""
    same = [kit.path for kit in seen.toolkits if major(kit) == cuda]
    if not same:
        return f"invoke bootstrap, which installs one (step cuda-toolkit), {OR_OTHERS}"
    if any(kit.path == path for kit in seen.toolkits):
        return f"CUDA {cuda} at one path on all hosts (a link will do), {OR_OTHERS}"
    return f"ln -s {same[-1]} {path} there, {OR_OTHERS}"


def _passed_over(first: Toolkit, chosen: Toolkit, problems: tuple[Problem, ...]) -> Iterator[str]:
    """Yield why the toolkit that comes first by its path was not taken."""
    if chosen != first:
        why = problems[0].what if problems else "not all GPU hosts have the same one there"
        yield f"CUDA {chosen.version} in {chosen.path} and not {first.version} in {first.path}: {why}"


def _all(seen: Facts) -> str:
    return ", ".join(f"{kit.version or 'unknown'} in {kit.path}" for kit in seen.toolkits) or "none"
