"""`invoke import`: the store entries of an archive come into the prefix, once its signature and every hash are right.

Entries only: what a generation offers (settings of the network cards, Slurm's partition, paths of toolkits) is a matter of the cluster that
has them, so the offer is made by the next bootstrap there, which then builds nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from deepep_bootstrap import archive, closure, signing, transfer
from deepep_bootstrap.closure import Built, Index, Tree
from deepep_bootstrap.errors import OK, Problem, Trouble
from deepep_bootstrap.facts import Facts
from deepep_bootstrap.generations import make_prefix
from deepep_bootstrap.hosts import Host
from deepep_bootstrap.reach import Reached, reach
from deepep_bootstrap.report import Screen, shortened, size
from deepep_bootstrap.signing import Signer
from deepep_bootstrap.survey import Flags, gather_one, read_inventory
from deepep_bootstrap.transfer import Arrived, Room

ASKED = 4
"""How many hosts are asked for their operating system before an archive for another one is refused."""
NOBODY = Arrived((), ())


def import_(flags: Flags, *, file: str, allowed_signers: str = "", insecure_unsigned: bool = False) -> int:
    """Import what the prefix does not have yet. Nothing is in the store under its name before all of it was compared."""
    screen = Screen("import", as_json=flags.json)
    choose_trust(allowed_signers, insecure=insecure_unsigned)
    with archive.open_archive(file) as stream:
        text = archive.read_index(stream, file)
        signer = signing.verify(allowed_signers, signing.read(beside(file)), text, file) if allowed_signers else None
        index = closure.read(text, file)
        need_whole(stream, file, archive.total(index, text))
        with reach(flags, empty=True) as reached:
            notes = fitting(flags, reached, index.built, file)
            room = transfer.look(reached.door, reached.place, [tree.name for tree in index.trees])
            wanted = [tree for tree in index.trees if tree.name not in room.present]
            show(screen, reached, index, (signer, room, notes))
            need_room(reached, room, wanted)
            arrived = NOBODY
            if wanted and not flags.dry_run:
                make_prefix(reached.door, reached.place)
                arrived = receive(screen, reached, (stream, index, file), wanted)
    states = {tree.name: "absent" for tree in wanted} | dict.fromkeys(arrived.imported, "imported")
    finish(screen, flags, reached, arrived)
    for problem in reached.problems:
        screen.problem(problem)
    entries = [
        {"name": each.name, "files": len(each.files), "bytes": each.size, "state": states.get(each.name, "present")} for each in index.trees
    ]
    content: dict[str, Any] = {"file": file, "prefix": reached.place.prefix, "signer": signer.name if signer else ""}
    content |= {"key": signer.key if signer else "", "lock_digest": index.lock_digest, "built": index.built.as_json()}
    screen.document(OK, reached.problems, **content, entries=entries, notes=list(notes))
    return OK


def choose_trust(allowed_signers: str, *, insecure: bool) -> None:
    """Trouble unless it is said whom to trust, in one way."""
    if allowed_signers and insecure:
        raise Trouble(Problem("--insecure-unsigned", "says the opposite of --allowed-signers", wanted="one of the two"))
    if not allowed_signers and not insecure:
        wanted = "--allowed-signers FILE, which names the keys that count"
        remedy = "a line `name ssh-ed25519 AAAA…` in a file, with the public key of who made the archive; or --insecure-unsigned"
        raise Trouble(Problem("--allowed-signers", "nobody is trusted to have built what would be run here", wanted=wanted, try_=remedy))


def beside(file: str) -> Path:
    """Return the path of an archive's signature."""
    return Path(f"{Path(os.path.expanduser(file))}.sig")


def need_whole(stream: BinaryIO, file: str, total: int) -> None:
    """Trouble where the file is shorter or longer than what its index tells."""
    found = os.fstat(stream.fileno()).st_size
    if found != total:
        what = "the archive is cut off" if found < total else "there is more in the file than its index says"
        raise Trouble(Problem(file, what, f"{found} bytes", str(total), archive.REMEDY))


def fitting(flags: Flags, reached: Reached, built: Built, file: str) -> tuple[str, ...]:
    """Return what to know before entries that were built elsewhere are used here. Trouble where no host asked has the operating system
    and CPU they were built for: their digests cover both, so no bootstrap would ever use them."""
    first = gather_one(flags, reached.door, reached.place.host, reached.place.prefix)
    found = [system_of(first)]
    for host in others(flags, reached.place.host):
        if (built.os_id, built.os_version, built.machine) in found:
            break
        found.append(system_of(gather_one(flags, reached.door, host, reached.place.prefix)))
    if (built.os_id, built.os_version, built.machine) not in found:
        what = "its entries were built for another operating system or CPU, and no bootstrap here would use them"
        here = ", ".join(sorted({" ".join(system) for system in found}))
        wanted = f"{built.os_id} {built.os_version} {built.machine}"
        raise Trouble(Problem(file, what, f"{here} on the hosts", wanted, "an archive made on such a host"))
    return tuple(remarks(first, built))


def others(flags: Flags, asked: Host) -> Sequence[Host]:
    """Return some more hosts of the hosts file: the one that works on the prefix may be a file server."""
    if not flags.hosts:
        return ()
    inventory, _ = read_inventory(flags)
    return [host for host in inventory.hosts if host.role == "gpu" and host.name != asked.name][: ASKED - 1]


def system_of(facts: Facts) -> tuple[str, str, str]:
    """Return what the digest of every entry covers of a host."""
    return facts.os_id, facts.os_version, facts.machine


def remarks(facts: Facts, built: Built) -> Iterator[str]:
    """Yield what differs on the host that was asked first and makes a bootstrap there build anew; hosts without GPUs say nothing of it."""
    archs = sorted({gpu.capability for gpu in facts.gpus})
    if archs and archs != sorted(built.archs):
        yield f"built for GPU architectures {', '.join(built.archs)}, this host has {', '.join(archs)}"
    toolkits = {toolkit.version for toolkit in facts.toolkits}
    if missing := sorted(set(built.cuda) - toolkits):
        yield f"built with CUDA {', '.join(missing)}, this host has {', '.join(sorted(toolkits)) or 'none'}"


def show(screen: Screen, reached: Reached, index: Index, more: tuple[Signer | None, Room, Sequence[str]]) -> None:
    """Say whose archive it is, what is in it and what of that is here already."""
    signer, room, notes = more
    screen.say(f"signed by {signer}" if signer else "not signed, or its signature not looked at", style="bold" if signer else "yellow")
    screen.say(f"  built on {index.built}")
    for tree in index.trees:
        there = ", already in the store" if tree.name in room.present else ""
        screen.say(f"  {shortened(tree.name)}  {len(tree.files)} files, {size(tree.size)}{there}")
    for note in notes:
        screen.say(f"  note: {reached.place.host.name}: {note}; a bootstrap there builds its own", style="yellow")


def need_room(reached: Reached, room: Room, trees: Sequence[Tree]) -> None:
    """Trouble where what is to come does not fit on the filesystem of the prefix."""
    need = sum(tree.on_disk for tree in trees)
    if need > room.free:
        where = f"{reached.place.host.name} {reached.place.prefix}"
        raise Trouble(Problem(where, "the archive's entries do not fit there", f"{size(room.free)} free", size(need), "invoke gc"))


def receive(screen: Screen, reached: Reached, source: tuple[BinaryIO, Index, str], trees: Sequence[Tree]) -> Arrived:
    """Send what is wanted of the archive while all of it is compared with its index; return what became of it."""
    stream, index, file = source
    names = frozenset(tree.name for tree in trees)
    with transfer.telling(screen, reached.place.host, "import", sum(tree.size for tree in trees)) as tell:

        def members() -> Iterator[bytes]:
            for piece in archive.read_trees(stream, index, file, names):
                tell(len(piece))
                yield piece

        return transfer.push(reached.door, reached.place, trees, members())


def finish(screen: Screen, flags: Flags, reached: Reached, arrived: Arrived) -> None:
    """Say what is new in the store, and what offers it."""
    prefix = reached.place.prefix
    if flags.dry_run:
        return
    screen.say(f"{prefix}: {len(arrived.imported)} entries imported" if arrived.imported else f"{prefix}: nothing to import")
    hosts = f"--hosts={flags.hosts or 'hosts/….txt'} --prefix={prefix}"
    screen.next_commands(
        [f"invoke bootstrap {hosts}    # with the same lock: builds nothing, offers them; until then `invoke gc` removes them"]
    )
