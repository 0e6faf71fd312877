"""`invoke wheel`: a stack of the prefix as one wheel, for containers and environments that have their torch."""

from __future__ import annotations

import os
import shlex
from functools import partial
from pathlib import Path

from msgspec import to_builtins

from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import OK, Problem, Trouble
from deepep_bootstrap.core.filetree import whole_file
from deepep_bootstrap.core.text import shortened, size
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.survey import read_tree
from deepep_bootstrap.prefix import defects
from deepep_bootstrap.prefix.access import Reached, reach
from deepep_bootstrap.prefix.archive import transfer
from deepep_bootstrap.prefix.bill import provenance
from deepep_bootstrap.prefix.contents import Generation, find_generation
from deepep_bootstrap.prefix.wheel.elf import Relocator
from deepep_bootstrap.prefix.wheel.make import GUARD_SOURCE, BuiltStack, WheelFile, make_wheel


def wheel(flags: Flags, *, output: str = "") -> int:
    """Make a wheel of a stack that the prefix offers: deep_ep for the very torch that it was built for.

    It is read through the prefix's host and written on this machine, into the folder `output` ("" is the current one).
    The same store entries give the same bytes. Nothing is changed in the prefix.
    """
    screen = Screen("wheel", as_json=flags.json)
    folder = Path(os.path.expanduser(output or ".")).absolute()
    if not folder.is_dir():
        raise Trouble(Problem(f"--output {output}", "this folder is not there", wanted="a directory to write to"))
    with reach(flags, locks=True) as reached:
        generation = current_generation(reached)
        stack = choose_stack(flags, generation)
        refuse_defects(flags, reached, stack)
        built = read_stack(reached, generation, stack)
        made = make_wheel(
            built,
            partial(transfer.read_files, reached.transport, reached.place),
            Relocator(flags.root),
            read_tree(flags.root / "env")[GUARD_SOURCE],
        )
    path = folder / made.file
    written = keep(path, made)
    show(screen, built, made)
    screen.say(f"{path} {'is complete' if written else 'is there already, the same'}: {size(len(made.data))}")
    screen.say(f"  sha256:{made.sha256}", style="dim")
    for problem in reached.problems:
        screen.problem(problem)
    screen.next_commands([f"pip install {shlex.quote(made.file)}    # into an environment with torch {built.torch}"])
    screen.document(
        OK,
        reached.problems,
        file=str(path),
        bytes=len(made.data),
        hash=f"sha256:{made.sha256}",
        stack=stack,
        generation=generation.number,
        entry=built.deepep,
        version=made.version,
        tag=made.tag,
        requires=list(made.requires),
        bundled=list(made.bundled),
        fences=to_builtins(made.fences),
    )
    return OK


def current_generation(reached: Reached) -> Generation:
    """Return what the prefix offers; Trouble where that is nothing, or nothing that can be read."""
    where = f"{reached.place.host.name} {reached.place.prefix}"
    if not reached.holdings.current:
        raise Trouble(Problem(where, "nothing is offered there", "no generation", "one", "invoke bootstrap"))
    found = find_generation(reached.holdings, reached.holdings.current)
    if not found.stacks:
        raise Trouble(Problem(where, "the manifest of what is offered cannot be read", try_="invoke bootstrap"))
    return found


def choose_stack(flags: Flags, generation: Generation) -> str:
    """Return the stack that is meant, by default the one of `module load deepep`; Trouble where it was not built."""
    stack = flags.stack or generation.default_stack
    if stack not in generation.stacks:
        words = ["invoke bootstrap", f"--stack={shlex.quote(stack)}"]
        words += [f"--{name}={shlex.quote(value)}" for name in ("hosts", "prefix") if (value := getattr(flags, name))]
        raise Trouble(
            Problem(
                "--stack",
                "this stack was not built in the prefix",
                stack,
                " or ".join(sorted(generation.stacks)),
                " ".join(words),
            )
        )
    return stack


def refuse_defects(flags: Flags, reached: Reached, stack: str) -> None:
    """Trouble where the stack was built with a known defect: a wheel goes where no `doctor` looks."""
    found = [each for each in defects.current_defects(flags, reached.holdings) if each.stack == stack]
    if found:
        what = "its build has a known defect, which a wheel would carry away"
        raise Trouble(
            *(Problem(f"stack {stack}", f"{what}: {each.why}", each.found, each.wanted, each.fix) for each in found)
        )


def read_stack(reached: Reached, generation: Generation, stack: str) -> BuiltStack:
    """Return what the store holds of a stack; Trouble where an entry is gone, or not as it was published."""
    record, holdings, place = generation.stacks[stack], reached.holdings, reached.place
    names = [str(record.get(kind)) for kind in ("deepep", "nvshmem", "python") if record.get(kind)]
    if missing := [name for name in names if name not in holdings.entries]:
        remedy = f"invoke bootstrap --stack={shlex.quote(stack)}, which builds it"
        raise Trouble(
            *(Problem(f"stack {stack}", "a store entry it needs is gone", each, try_=remedy) for each in missing)
        )
    trees, _ = transfer.published_trees(reached.transport, place, holdings, names)
    sources = {each.hash: each for lock in provenance.locks_of(holdings) for each in lock.sources.values()}
    return BuiltStack(
        stack, record, {name: holdings.entries[name] for name in names}, {tree.name: tree for tree in trees}, sources
    )


def keep(path: Path, made: WheelFile) -> bool:
    """Write the wheel, whole or not at all; return False where it is there already. Trouble where another file has its
    name."""
    if os.path.lexists(path):
        if path.is_file() and path.read_bytes() == made.data:
            return False
        raise Trouble(
            Problem(str(path), "is there already with other contents and is not overwritten", try_="--output=DIR")
        )
    try:
        with whole_file(path) as stream:
            stream.write(made.data)
    except OSError as error:
        raise Trouble(Problem(str(path), f"cannot be written: {error.strerror}")) from None
    return True


def show(screen: Screen, built: BuiltStack, made: WheelFile) -> None:
    """Say what the wheel is, what it brings and what it wants."""
    screen.say(f"deep_ep {made.version} of stack {built.stack}", style="bold")
    archs = ", ".join(map(str, built.inputs(built.deepep).get("archs") or ())) or "unknown"
    screen.say(f"  store entry  {shortened(built.deepep)}")
    screen.say(f"  fits         {made.tag}, GPUs of compute capability {archs}")
    screen.say(f"  takes along  {', '.join(made.bundled) or 'no library'}")
    screen.say(f"  wants        {', '.join(made.requires)}")
    for fence in made.fences:
        screen.paragraph(f"  replaced     {fence}")
