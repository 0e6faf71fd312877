"""The purpose of a mirror: stacks, wheel targets and distributions of a lock, as flags name them or as its
index records them.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.fetch.mirror import apt_parts
from deepep_bootstrap.fetch.mirror.apt_parts import RepositoryPart
from deepep_bootstrap.fetch.mirror.index import MirrorIndex, MirrorWants
from deepep_bootstrap.lock.model import Lock, Wheel, used


@dataclass(frozen=True)
class MirrorSelection:
    """What a mirror is for: stacks of a lock and wheel targets, all of the lock's where none are named, and the
    `systems` (distributions) whose package repositories it is to have."""

    lock: Lock
    stacks: tuple[str, ...]
    targets: tuple[str, ...]
    systems: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[RepositoryPart, ...]:
        """What it is to have of package repositories."""
        return apt_parts.parts(self.lock, self.systems, self.stacks, self.targets)

    @property
    def wanted(self) -> MirrorWants:
        """Everything that bootstraps of it fetch: sources, archives, the wheels of the targets, and the tools for
        their machines."""
        sources, archives = used(self.lock, self.stacks)
        machines = {target.rpartition("-")[2] for target in self.targets}
        wheels = [
            wheel
            for name in self.stacks
            for target in self.targets
            for wheel in self.lock.stacks[name].wheels.get(target, ())
        ]
        tools = [wheel for each in self.lock.tools.values() for wheel in each if _runs_on(wheel, machines)]
        return MirrorWants(tuple(sources), tuple(archives), tuple(dict.fromkeys([*wheels, *tools])))


@dataclass(frozen=True)
class Named:
    """What the flags name: stacks, wheel targets, and distributions whose package repositories are meant."""

    stacks: tuple[str, ...]
    targets: tuple[str, ...]
    systems: tuple[str, ...]

    @classmethod
    def of(cls, stack: str, target: str, packages: str | bool) -> Named:
        """Read names joined by commas; `--packages` without any means all."""
        return cls(_words(stack), _words(target), (apt_parts.EVERY,) if packages is True else _words(packages or ""))


def choose_contents(lock: Lock, named: Named, screen: Screen) -> MirrorSelection:
    """Return what is meant by what was named. Raises Trouble for what the lock has not."""
    known = tuple(dict.fromkeys(target for stack in lock.stacks.values() for target in stack.wheels))
    problems = [
        Problem(flag, what, name, " or ".join(there))
        for flag, what, names, there in (
            ("--stack", "no such stack in the lock", named.stacks, tuple(lock.stacks)),
            ("--target", "no wheels for it in the lock", named.targets, known),
        )
        for name in names
        if name not in there
    ]
    if problems:
        raise Trouble(*problems)
    systems, unable = apt_parts.choose_systems(lock, named.systems)
    if unable:
        screen.say(f"note: without {', '.join(unable)}: repositories of dnf are not copied; dnf reposync does that")
    return MirrorSelection(lock, named.stacks or tuple(lock.stacks), named.targets or known, systems)


def with_index(lock: Lock, named: Named, index: MirrorIndex) -> Named:
    """Return what is named, and for what is not what a mirror was made for, as far as the lock has it."""
    stacks = tuple(name for name in index.stacks if name in lock.stacks)
    targets = tuple(target for target in index.targets if any(target in stack.wheels for stack in lock.stacks.values()))
    able = apt_parts.choose_systems(lock, (apt_parts.EVERY,))[0]
    systems = tuple(dict.fromkeys(system for name in index.packages if (system := name.partition("/")[0]) in able))
    return Named(named.stacks or stacks, named.targets or targets, named.systems or systems)


def _runs_on(wheel: Wheel, machines: set[str]) -> bool:
    platform = wheel.file.removesuffix(".whl")
    return platform.endswith("-any") or any(platform.endswith(machine) for machine in machines)


def _words(value: str) -> tuple[str, ...]:
    return tuple(word for word in value.split(",") if word)
