"""`invoke import`: the store entries of an archive come into the prefix, once its signature and every hash
are right.

Entries only: a generation's offer (settings of the network cards, Slurm's partition, paths of toolkits)
is a matter of its cluster, so the next bootstrap there makes one. What that would build all the same,
because hosts, lock or recipes differ from those of the archive, is printed beforehand.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from deepep_bootstrap.bootstrap.planning import read_lock
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import OK, Problem, Trouble
from deepep_bootstrap.core.recipes import text_digest
from deepep_bootstrap.core.text import shortened, size
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.survey import Survey, gather, read_tree
from deepep_bootstrap.plan.decisions import PlanRequest, make_decisions
from deepep_bootstrap.prefix.access import Reached, reach
from deepep_bootstrap.prefix.archive import signing, transfer
from deepep_bootstrap.prefix.archive.index import ArchiveIndex, Built, Tree, parse_index
from deepep_bootstrap.prefix.archive.signing import Signer
from deepep_bootstrap.prefix.archive.stream import REMEDY, open_archive, read_index, read_trees, total
from deepep_bootstrap.prefix.archive.transfer import Arrived, Room
from deepep_bootstrap.prefix.generations import make_prefix

NOBODY = Arrived((), ())


def import_(flags: Flags, *, file: str, allowed_signers: str = "", insecure_unsigned: bool = False) -> int:
    """Bring the store entries of an archive into the prefix, once signature and hashes are right; bootstrap then
    builds nothing.

    What the prefix has already is left out. Nothing is in the store under its name before all of it was
    compared.
    """
    screen = Screen("import", as_json=flags.json)
    with open_archive(file) as stream:
        choose_trust(allowed_signers, insecure=insecure_unsigned)
        text = read_index(stream, file)
        signer = (
            signing.verify(allowed_signers, signing.read_signature(beside(file)), text, file)
            if allowed_signers
            else None
        )
        index = parse_index(text, file)
        need_whole(stream, file, total(index, text))
        with reach(flags, empty=True) as reached:
            survey, notes = fitting(flags, reached, index, file)
            room = transfer.look_for_room(reached.transport, reached.place, [tree.name for tree in index.trees])
            differs = tuple(unmet(flags, survey, index, held_in(survey)))
            wanted = [tree for tree in index.trees if tree.name not in room.present]
            show(screen, index, (signer, room, (*notes, *differs)))
            need_room(reached, room, wanted)
            arrived = NOBODY
            if wanted and not flags.dry_run:
                make_prefix(reached.transport, reached.place)
                arrived = receive(screen, reached, (stream, index, file), wanted)
    states = {tree.name: "absent" for tree in wanted} | dict.fromkeys(arrived.imported, "imported")
    finish(screen, flags, reached, (arrived, not differs))
    problems = (*reached.problems, *survey.problems)
    for problem in problems:
        screen.problem(problem)
    entries = [
        {"name": each.name, "files": len(each.files), "bytes": each.size, "state": states.get(each.name, "present")}
        for each in index.trees
    ]
    content: dict[str, Any] = {"file": file, "prefix": reached.place.prefix, "signer": signer.name if signer else ""}
    content |= {"key": signer.key if signer else "", "lock_digest": index.lock_digest, "built": index.built.as_json()}
    screen.document(OK, problems, **content, entries=entries, notes=[*notes, *differs])
    return OK


def choose_trust(allowed_signers: str, *, insecure: bool) -> None:
    """Trouble unless it is said whom to trust, in one way."""
    if allowed_signers and insecure:
        raise Trouble(Problem("--insecure-unsigned", "says the opposite of --allowed-signers", wanted="one of the two"))
    if not allowed_signers and not insecure:
        wanted = "--allowed-signers FILE, which names the keys that count"
        remedy = (
            "a line `name ssh-ed25519 AAAA…` in a file, with the public key of who made the archive; or "
            "--insecure-unsigned"
        )
        raise Trouble(
            Problem(
                "--allowed-signers",
                "nobody is trusted to have built what would be run here",
                wanted=wanted,
                try_=remedy,
            )
        )


def beside(file: str) -> Path:
    """Return the path of an archive's signature."""
    return Path(f"{Path(os.path.expanduser(file))}.sig")


def need_whole(stream: BinaryIO, file: str, total: int) -> None:
    """Trouble where the file is shorter or longer than its index says."""
    found = os.fstat(stream.fileno()).st_size
    if found != total:
        what = "the archive is cut off" if found < total else "there is more in the file than its index says"
        raise Trouble(Problem(file, what, size(found), size(total), REMEDY))


def fitting(flags: Flags, reached: Reached, index: ArchiveIndex, file: str) -> tuple[Survey, tuple[str, ...]]:
    """Return the hosts, and what differs there from where the entries were built. Trouble where no host has the
    operating system and CPU they were built for: their digests cover both, so no bootstrap would ever use them."""
    survey = gather(flags, reached.transport, reached.inventory, reached.place.prefix)
    built = index.built
    found = {system_of(facts) for facts in survey.facts.values()}
    if (built.os_id, built.os_version, built.machine) not in found:
        what = "its entries were built for another operating system or CPU, and no bootstrap here would use them"
        here = ", ".join(sorted({" ".join(system) for system in found}))
        wanted = f"{built.os_id} {built.os_version} {built.machine}"
        raise Trouble(Problem(file, what, f"{here} on the hosts", wanted, "an archive made on such a host"))
    name = reached.place.host.name if reached.place.host.name in survey.facts else next(iter(survey.facts))
    return survey, (*remarks(name, survey.facts[name], built), *other_recipes(built, reached.place.recipes))


def system_of(facts: Facts) -> tuple[str, str, str]:
    """Return what the digest of every entry covers of a host."""
    return facts.os_id, facts.os_version, facts.machine


def remarks(name: str, facts: Facts, built: Built) -> Iterator[str]:
    """Yield what differs on a host and makes a bootstrap there build anew; hosts without GPUs say nothing of their
    architectures."""
    archs = sorted({gpu.capability for gpu in facts.gpus})
    if archs and archs != sorted(built.archs):
        yield f"built for GPU architectures {', '.join(built.archs)}, {name} has {', '.join(archs)}"
    tools = [f"{tool} {version}" for tool, version in facts.tools if tool in {"gcc", "g++"}]
    for what, wanted, found in (
        ("built with CUDA", built.cuda, [toolkit.version for toolkit in facts.toolkits]),
        ("compiled by", built.compilers, tools),
        ("made with", built.pythons, [python.path for python in (*facts.pythons, facts.external_python) if python]),
    ):
        if missing := sorted(set(wanted) - set(found)):
            yield f"{what} {', '.join(missing)}, {name} has {', '.join(sorted(set(found))) or 'none'}"


def other_recipes(built: Built, recipes: Mapping[str, str]) -> Iterator[str]:
    """Yield which recipes have another text here than those the entries were built by."""
    theirs = dict(line.rpartition(" ")[::2] for line in built.recipes)
    if changed := sorted(name for name, digest in theirs.items() if digest != text_digest(recipes.get(name, ""))):
        yield f"built by other recipes than those here: {', '.join(changed)}"


def unmet(flags: Flags, survey: Survey, index: ArchiveIndex, held: Collection[str]) -> Iterator[str]:
    """Yield for each stack of the archive what a bootstrap with today's lock would build all the same, because
    neither the archive nor the store (whose entries are `held`) has it; and why that cannot be told, where the hosts
    are not ready for a bootstrap."""
    lock, stack = read_lock(flags)
    recipes, templates = read_tree(flags.root / "recipes"), read_tree(flags.root / "env")
    there = {*held, *(tree.name for tree in index.trees)}
    for each in [lock.stacks[name] for name in index.stacks if name in lock.stacks] or [stack]:
        request = PlanRequest(
            lock,
            each,
            survey.inventory,
            survey.prefix,
            recipes,
            templates,
            external_python=flags.python,
            on_busy_host="use",
        )
        try:
            missing = [
                f"{entry.kind} {entry.version}"
                for entry in make_decisions(request, survey.facts).entries
                if entry.name not in there
            ]
        except Trouble as trouble:
            yield f"what a bootstrap of stack {each.name} would build cannot be told yet: {trouble.problems[0]}"
        else:
            if missing:
                own = ", ".join(missing)
                yield (
                    f"stack {each.name} of {lock.path} is not what was built for these hosts: a bootstrap builds "
                    f"its own {own}"
                )


def held_in(survey: Survey) -> frozenset[str]:
    """Return the entries that the prefix has already, as its hosts see them."""
    return frozenset(name for facts in survey.facts.values() for name in facts.prefix.entries)


def show(screen: Screen, index: ArchiveIndex, more: tuple[Signer | None, Room, Sequence[str]]) -> None:
    """Say whose archive it is, what is in it and what of that is here already."""
    signer, room, notes = more
    screen.say(
        f"signed by {signer}" if signer else "not signed, or its signature not looked at",
        style="bold" if signer else "yellow",
    )
    screen.say(f"  built on {index.built}")
    for tree in index.trees:
        there = ", already in the store" if tree.name in room.present else ""
        screen.say(f"  {shortened(tree.name)}  {len(tree.files)} files, {size(tree.size)}{there}")
    for note in notes:
        screen.say(f"  note: {note}", style="yellow")


def need_room(reached: Reached, room: Room, trees: Sequence[Tree]) -> None:
    """Trouble where what is to come does not fit on the filesystem of the prefix."""
    need = sum(tree.on_disk for tree in trees)
    if need > room.free:
        where = f"{reached.place.host.name} {reached.place.prefix}"
        raise Trouble(
            Problem(where, "the archive's entries do not fit there", f"{size(room.free)} free", size(need), "invoke gc")
        )


def receive(
    screen: Screen, reached: Reached, source: tuple[BinaryIO, ArchiveIndex, str], trees: Sequence[Tree]
) -> Arrived:
    """Send what is wanted of the archive while all of it is compared with its index; return what became of it."""
    stream, index, file = source
    names = frozenset(tree.name for tree in trees)
    with transfer.telling(screen, reached.place.host, "import", sum(tree.size for tree in trees)) as tell:

        def members() -> Iterator[bytes]:
            for piece in read_trees(stream, index, file, names):
                tell(len(piece))
                yield piece

        return transfer.push(reached.transport, reached.place, trees, members())


def finish(screen: Screen, flags: Flags, reached: Reached, result: tuple[Arrived, bool]) -> None:
    """Print what is new in the store, and what offers it; the second of `result`: a bootstrap then has nothing to
    build."""
    prefix = reached.place.prefix
    arrived, whole = result
    if flags.dry_run:
        return
    screen.say(
        f"{prefix}: {len(arrived.imported)} entries imported" if arrived.imported else f"{prefix}: nothing to import"
    )
    hosts = f"--hosts={flags.hosts or 'hosts/….txt'} --prefix={prefix}"
    does = "builds nothing, offers them" if whole else "builds what differs (see the notes), offers that and what fits"
    screen.next_commands([f"invoke bootstrap {hosts}    # {does}; until then `invoke gc` removes them"])
