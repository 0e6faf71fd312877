"""Which packages of some apt repositories an installation takes: what was asked for, and what that depends on there. Pure.

apt takes the newest version that it may, and without recommended packages, as recipes/host/packages.sh asks for it. Of several
packages that stand for one that is none, apt's choice follows from what a host has: all of them are taken, unless one comes along anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from deepep_bootstrap.core.errors import Problem
from deepep_bootstrap.fetch.mirror.apt_solver import ANY_ARCHITECTURE, Deb, Relation, order

ALL = "all"
"""The architecture of packages for every machine."""


@dataclass(frozen=True)
class Pool:
    """The packages of some repositories for machines of one architecture (Debian's name: amd64)."""

    debs: tuple[Deb, ...]
    arch: str

    @cached_property
    def by_name(self) -> Mapping[str, tuple[Deb, ...]]:
        """The versions of each package, the newest first."""
        found: dict[str, list[Deb]] = {}
        for deb in self.debs:
            if deb.arch in {self.arch, ALL}:
                found.setdefault(deb.name, []).append(deb)
        return {name: tuple(sorted(debs, key=lambda deb: order(deb.version), reverse=True)) for name, debs in found.items()}

    def named(self, wish: Relation) -> Deb | None:
        """Return the newest version of a package that is wished for."""
        if wish.arch not in {"", ANY_ARCHITECTURE, self.arch}:
            return None
        return next((deb for deb in self.by_name.get(wish.name, ()) if wish.fits(deb.version)), None)

    def providers(self, wish: Relation) -> tuple[Deb, ...]:
        """Return of each other package that stands for what is wished the newest version that does."""
        if wish.arch not in {"", ANY_ARCHITECTURE, self.arch}:
            return ()
        newest = (next((deb for deb in debs if wish.name in deb.provides and deb.stands_for(wish)), None) for debs in self.by_name.values())
        return tuple(deb for deb in newest if deb)


@dataclass(frozen=True)
class Closure:
    """The packages to have, in the order of their names; `elsewhere` is what has to come from other repositories, as it was asked for."""

    debs: tuple[Deb, ...]
    elsewhere: tuple[str, ...]
    problems: tuple[Problem, ...] = ()


class _Taking:
    """A closure in the making."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.taken: set[Deb] = set()
        self.todo: list[Deb] = []
        self.virtual: list[tuple[Deb, ...]] = []
        self.elsewhere: set[str] = set()

    def take(self, deb: Deb) -> None:
        if deb not in self.taken:
            self.taken.add(deb)
            self.todo.append(deb)

    def ask(self, group: Sequence[Relation]) -> None:
        """Take the first of alternatives that the pool has; else it has to come from elsewhere."""
        for wish in group:
            if deb := self.pool.named(wish):
                return self.take(deb)
            if providers := self.pool.providers(wish):
                return self.virtual.append(providers)
        return self.elsewhere.add(" | ".join(map(str, group)))

    def finish(self) -> None:
        """Follow what is taken until nothing new is asked for."""
        while self.todo or self.virtual:
            while self.todo:
                for group in self.todo.pop().wants:
                    self.ask(group)
            if self.virtual:
                providers = self.virtual.pop(0)
                if self.taken.isdisjoint(providers):
                    for deb in providers:
                        self.take(deb)


def close(pool: Pool, words: Iterable[str], where: str) -> Closure:
    """Return what installing `words` (NAME or NAME=VERSION, where VERSION may be a glob) takes out of `pool`.

    A name without version that the pool has not comes from elsewhere; a version that it has not is a problem, said of `where`. Raises
    Trouble where an index cannot be read.
    """
    taking, problems = _Taking(pool), []
    for word in words:
        name, equals, glob = word.partition("=")
        there = pool.by_name.get(name, ())
        found = next((deb for deb in there if not equals or fnmatchcase(deb.version, glob)), None)
        if found:
            taking.take(found)
        elif there or equals:
            versions = ", ".join(deb.version for deb in there[:5])
            problems.append(Problem(where, f"has no package {name} in that version", versions or "no version at all", glob))
        else:
            taking.ask([Relation(name)])
    taking.finish()
    debs = sorted(taking.taken, key=lambda deb: (deb.name, order(deb.version), deb.path))
    return Closure(tuple(debs), tuple(sorted(taking.elsewhere)), tuple(problems))
