"""Parts of the lock's package repositories that a mirror is to have, and their record in its index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.toml import ValueForm
from deepep_bootstrap.fetch.locations import packages_path
from deepep_bootstrap.lock.model import Lock
from deepep_bootstrap.lock.packages import FINGERPRINT, KERNEL, NEED_HEADERS, Repository, System

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""What Debian calls the machines of wheel targets."""
TOOLKIT = "cuda-toolkit-"
EVERY = "all"
"""What stands for every distribution of the lock that has repositories."""


@dataclass(frozen=True)
class RepositoryPart:
    """A repository of one distribution and, by purpose, the packages that host recipes install with it, for machines
    of `archs`."""

    system: str
    repository: Repository
    wanted: Mapping[str, tuple[str, ...]]
    archs: tuple[str, ...]

    @property
    def name(self) -> str:
        """What the index of a mirror calls it: DISTRIBUTION/REPOSITORY."""
        return f"{self.system}/{self.repository.name}"

    @property
    def folder(self) -> str:
        """Where a mirror keeps it."""
        return packages_path(self.repository.url)

    @property
    def copied(self) -> MirroredRepository:
        """What the index of a mirror says once it is there."""
        entry, words = self.repository, {word for words in self.wanted.values() for word in words}
        return MirroredRepository(
            entry.url,
            entry.suite,
            entry.components,
            entry.key_url,
            entry.key_fingerprint,
            tuple(sorted(words)),
            self.archs,
        )


def choose_systems(lock: Lock, named: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the distributions that are meant, and those of "all" that cannot be had, because dnf's repositories are
    not copied.

    Raises Trouble for names that the lock has not, or has without a repository, or that dnf installs on.
    """
    able = tuple(name for name, system in lock.systems.items() if system.repositories)
    apt = tuple(name for name in able if lock.systems[name].manager == "apt")
    if tuple(named) == (EVERY,):
        return apt, tuple(name for name in able if name not in apt)
    problems = [_unable(lock, name, apt) for name in named if name not in apt]
    if problems:
        raise Trouble(*problems)
    return tuple(dict.fromkeys(named)), ()


def _unable(lock: Lock, name: str, apt: Sequence[str]) -> Problem:
    system = lock.systems.get(name)
    if system is None:
        return Problem("--packages", "the lock has no such distribution", name, " or ".join((EVERY, *apt)))
    if not system.repositories:
        return Problem(
            "--packages", f"the lock has no repository for {name}: its packages come from the distribution's own mirror"
        )
    example = system.repositories[0]
    into = f"of {example.url} into a directory, with the key {example.key_url} beside the packages"
    remedy = f"dnf reposync --download-metadata {into}, and --mirror {example.url}=DIRECTORY"
    return Problem("--packages", f"repositories of dnf are not copied, and {name} has no other", try_=remedy)


def parts(
    lock: Lock, systems: Sequence[str], stacks: Sequence[str], targets: Sequence[str]
) -> tuple[RepositoryPart, ...]:
    """Return what a mirror for these is to have; of toolkits only those whose CUDA one of the stacks has."""
    majors = {lock.stacks[name].cuda for name in stacks}
    machines = dict.fromkeys(ARCHITECTURES[target.rpartition("-")[2]] for target in targets)
    archs = tuple(sorted(machines)) or ("amd64",)
    made = []
    for name in systems:
        system = lock.systems[name]
        for entry in system.repositories:
            wanted = {purpose: words for purpose in entry.purposes if (words := tuple(_words(system, purpose, majors)))}
            if wanted:
                made.append(RepositoryPart(name, entry, wanted, archs))
    return tuple(made)


def _words(system: System, purpose: str, majors: set[str]) -> Iterator[str]:
    """Yield what a recipe installs for a purpose, but for what is named after a host's kernel: only the distribution
    has that."""
    if purpose.startswith(TOOLKIT) and purpose.removeprefix(TOOLKIT) not in majors:
        return
    headers = system.packages.get("kernel-headers", ()) if purpose in NEED_HEADERS else ()
    yield from (word for word in (*system.packages.get(purpose, ()), *headers) if KERNEL not in word)


def lacking(held: Mapping[str, MirroredRepository], wanted: Sequence[RepositoryPart], remedy: str) -> list[Problem]:
    """Return which parts a mirror does not have, or has for another lock."""
    problems = []
    for part in wanted:
        where, again = f"packages {part.name}", f"{remedy} --packages={part.system}"
        there = held.get(part.name)
        if there is None:
            problems.append(Problem(where, "the mirror does not have this repository", try_=again))
        elif difference := there.lacks(part.copied):
            problems.append(Problem(where, "the mirror has not what this lock wants of it", *difference, again))
    return problems


NAME = ValueForm(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+", "DISTRIBUTION/REPOSITORY of a lock")


@dataclass(frozen=True)
class MirroredRepository:
    """A repository of which a mirror has a part: as the lock names it and its key, for which packages of the lock
    (`wanted`), and for which architectures."""

    url: str
    suite: str
    components: tuple[str, ...]
    key_url: str
    fingerprint: str
    wanted: tuple[str, ...]
    archs: tuple[str, ...]

    def lacks(self, wish: MirroredRepository) -> tuple[str, str] | None:
        """Return how this is not what is wished, found and wanted; None where it is. It may have more packages."""
        for name in ("url", "suite", "key_url", "fingerprint"):
            if getattr(self, name) != getattr(wish, name):
                return getattr(self, name) or "none", getattr(wish, name) or "none"
        for name in ("components", "wanted", "archs"):
            if missing := [word for word in getattr(wish, name) if word not in getattr(self, name)]:
                return " ".join(getattr(self, name)) or "none", " ".join(missing)
        return None


KEYS = {field.name for field in fields(MirroredRepository)}
LISTS = ("components", "wanted", "archs")


def render_repositories(copied: Mapping[str, MirroredRepository]) -> dict[str, dict[str, Any]]:
    """Return what the index has of them, for JSON."""
    return {
        name: {key: list(value) if key in LISTS else value for key, value in asdict(each).items()}
        for name, each in copied.items()
    }


def read_repositories(document: Mapping[str, Any]) -> dict[str, MirroredRepository]:
    """Return what `render` wrote, after `faults` found none."""
    return {
        name: MirroredRepository(
            url=each["url"],
            suite=each["suite"],
            components=tuple(each["components"]),
            key_url=each["key_url"],
            fingerprint=each["fingerprint"],
            wanted=tuple(each["wanted"]),
            archs=tuple(each["archs"]),
        )
        for name, each in document.items()
    }


def faults(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with it, for any JSON object whatever."""
    for name, each in document.items():
        if not NAME.fits(name):
            yield f"packages: {name!r:.80} is not {NAME.words}"
        elif type(each) is not dict or set(each) != KEYS or not all(_fits(key, value) for key, value in each.items()):
            yield f"packages: {name!r:.80} is no repository"


def _fits(key: str, value: object) -> bool:
    if key in LISTS:
        return type(value) is list and all(isinstance(word, str) and word.isprintable() for word in value)
    if not isinstance(value, str):
        return False
    if key == "fingerprint":
        return FINGERPRINT.fits(value)
    if key == "suite":
        return value.isprintable()
    with suppress(Trouble):
        return packages_path(value) != ""
    return False
