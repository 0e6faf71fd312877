"""The purpose of a mirror: stacks and wheel targets of a lock, as flags name them or as its index records them."""

from __future__ import annotations

from msgspec import Struct

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.fetch.mirror.index import MirrorIndex, MirrorWants
from deepep_bootstrap.lock.model import Lock, ToolkitPin, Wheel, used


class MirrorSelection(Struct, frozen=True):
    """What a mirror is for: stacks of a lock and wheel targets, all of the lock's where none are named."""

    lock: Lock
    stacks: tuple[str, ...]
    targets: tuple[str, ...]

    @property
    def wanted(self) -> MirrorWants:
        """Everything that bootstraps of it fetch: sources, wheels of the targets, toolkits and tools for their
        machines."""
        machines = {target.rpartition("-")[2] for target in self.targets}
        wheels = [
            wheel
            for name in self.stacks
            for target in self.targets
            for wheel in self.lock.stacks[name].wheels.get(target, ())
        ]
        wheels += [wheel for each in self._toolkits for name in sorted(machines) for wheel in each.wheels.get(name, ())]
        tools = [wheel for each in self.lock.tools.values() for wheel in each if _runs_on(wheel, machines)]
        return MirrorWants(tuple(used(self.lock, self.stacks)), tuple(dict.fromkeys([*wheels, *tools])))

    @property
    def _toolkits(self) -> list[ToolkitPin]:
        names = dict.fromkeys(self.lock.stacks[name].toolkit for name in self.stacks)
        return [self.lock.toolkits[name] for name in names if name]


class SelectionFlags(Struct, frozen=True):
    """What the flags name: stacks and wheel targets."""

    stacks: tuple[str, ...]
    targets: tuple[str, ...]

    @classmethod
    def of(cls, stack: str, target: str) -> SelectionFlags:
        """Read names joined by commas."""
        return cls(_words(stack), _words(target))


def choose_contents(lock: Lock, flags: SelectionFlags) -> MirrorSelection:
    """Return what the flags mean. Raises Trouble for what the lock has not."""
    known = tuple(dict.fromkeys(target for stack in lock.stacks.values() for target in stack.wheels))
    problems = [
        Problem(flag, what, name, " or ".join(there))
        for flag, what, names, there in (
            ("--stack", "no such stack in the lock", flags.stacks, tuple(lock.stacks)),
            ("--target", "no wheels for it in the lock", flags.targets, known),
        )
        for name in names
        if name not in there
    ]
    if problems:
        raise Trouble(*problems)
    return MirrorSelection(lock, flags.stacks or tuple(lock.stacks), flags.targets or known)


def with_index(lock: Lock, flags: SelectionFlags, index: MirrorIndex) -> SelectionFlags:
    """Return the flags, and in place of those that were not given what a mirror was made for, as far as the lock has
    it."""
    stacks = tuple(name for name in index.stacks if name in lock.stacks)
    targets = tuple(target for target in index.targets if any(target in stack.wheels for stack in lock.stacks.values()))
    return SelectionFlags(flags.stacks or stacks, flags.targets or targets)


def _runs_on(wheel: Wheel, machines: set[str]) -> bool:
    platform = wheel.file.removesuffix(".whl")
    return platform.endswith("-any") or any(platform.endswith(machine) for machine in machines)


def _words(value: str) -> tuple[str, ...]:
    return tuple(word for word in value.split(",") if word)
