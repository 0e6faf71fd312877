"""Store entries between a prefix and an archive, through the prefix's host, in one pass each way and in
bounded memory.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from msgspec import Struct
from msgspec.structs import replace

from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.recipes import compose
from deepep_bootstrap.core.text import size
from deepep_bootstrap.inventory import forms
from deepep_bootstrap.prefix.archive import index, stream
from deepep_bootstrap.prefix.archive.index import (
    FILE,
    FOLDER,
    LINK,
    ArchiveIndex,
    ArchiveMember,
    Built,
    Tree,
    check_index,
)
from deepep_bootstrap.prefix.contents import Holdings
from deepep_bootstrap.prefix.generations import PrefixHandle, read_answer
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Job, Transport

EXPORT = ("lib.sh", "prefix/lib/files.sh", "prefix/export.sh")
IMPORT = (
    "lib.sh",
    "prefix/lib/owner.sh",
    "prefix/lib/lock.sh",
    "prefix/lib/share.sh",
    "prefix/lib/trust.sh",
    "prefix/lib/files.sh",
    "prefix/import.sh",
)
KIB = 1024
STEP = 16 << 20
"""Bytes between two lines of progress."""
LIST_LIMIT = 256 << 20
"""Bytes of the list of what is in a store's entries: 100 for each of 2.5 million files."""

SUM = b"\n# sum "
REMEDY = "invoke verify --store"


class Room(Struct, frozen=True):
    """What the prefix of an import has: free bytes on its filesystem, and which of the archive's entries are there
    already."""

    free: int
    present: tuple[str, ...]


class Arrived(Struct, frozen=True):
    """What became of the entries that were sent: published now, or by somebody else meanwhile."""

    imported: tuple[str, ...]
    present: tuple[str, ...]


@contextmanager
def telling(screen: Screen, host: Host, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that is told how many bytes passed; on a terminal it is shown, of how many."""
    passed = shown = 0

    def tell(count: int) -> None:
        nonlocal passed, shown
        passed += count
        if passed - shown >= STEP:
            shown = passed
            screen.line(host.name, what, f"{size(passed)} of {size(total)}")

    with screen.progress():
        screen.started(what, [host.name])
        yield tell


def published_trees(
    transport: Transport, place: PrefixHandle, holdings: Holdings, names: Sequence[str]
) -> tuple[tuple[Tree, ...], list[str]]:
    """Return what is in these entries, sorted by name, and those of them whose record no generation knows. Trouble
    where one is not as it was published. A host is not believed: paths that it names become names in what is made of
    them, and one that no archive may hold is Trouble too."""
    trees = list_trees(transport, place, names)
    for problem in check_index(ArchiveIndex(Built(), trees), f"{place.host.name} {place.prefix}"):
        raise Trouble(replace(problem, try_=REMEDY))
    return trees, check_records(trees, holdings, place.prefix)


def list_trees(transport: Transport, place: PrefixHandle, names: Sequence[str]) -> tuple[Tree, ...]:
    """Return what is in these entries, as their records say, sorted by name. Trouble where an entry is not as it was
    published (contents are compared later, while they come), and where it holds what an archive does not."""
    came = bytearray()
    env = {"PREFIX": place.prefix, "ENTRIES": "\n".join(sorted(names))}
    job = Job(
        compose(place.recipes, *EXPORT),
        args=("list",),
        env=env,
        user=place.user,
        watched=True,
        timeout=None,
        sink=came.extend,
        limit=LIST_LIMIT,
    )
    read_answer(transport.run(place.host, job), place, "export.sh", forms.NOTHING)
    return tuple(parse_list(bytes(came), f"{place.host.name} {place.prefix}"))


def parse_list(data: bytes, where: str) -> Iterator[Tree]:
    """Yield the trees that `export.sh list` printed."""
    fields = iter(data.split(b"\0"))
    name, things = "", list[ArchiveMember]()
    try:
        while (word := next(fields)) != b"end":
            if word == b"entry":
                name, things = next(fields).decode(), []
            elif word == b"record":
                yield _recorded(name, things, next(fields), where)
            else:
                mode, size, path, target = (next(fields) for _ in range(4))
                things.append(_thing(f"{where}: {name}", word, int(mode, 8), (int(size), path, target)))
    except StopIteration:
        raise Trouble(
            Problem(where, "the list of what is in the store is cut off", try_="the same command again")
        ) from None


def _thing(where: str, letter: bytes, mode: int, rest: tuple[int, bytes, bytes]) -> ArchiveMember:
    size, path, target = rest
    kind = {b"f": FILE, b"d": FOLDER, b"l": LINK}.get(letter, "")
    name = ascii(path)[2:-1]
    odd_file = kind == FILE and (mode & 0o7202 or mode & 0o444 != 0o444)
    if not kind or odd_file or (kind == FOLDER and mode & 0o002):
        found = f"type {letter.decode()}, mode {mode:04o}"
        wanted = "a folder that others may not write" if kind == FOLDER else "a file that nobody may write"
        raise Trouble(Problem(where, "it is not as it was published", f"{name}: {found}", wanted, REMEDY))
    try:
        return ArchiveMember(
            path.decode(),
            kind,
            kind == FILE and bool(mode & 0o111),
            size if kind == FILE else 0,
            target=target.decode(),
        )
    except UnicodeDecodeError:
        raise Trouble(Problem(where, "this name cannot stand in an archive", name, "a name in UTF-8")) from None


def _recorded(name: str, things: Iterable[ArchiveMember], text: bytes, where: str) -> Tree:
    """Return the tree of an entry with the hashes of its record; Trouble where the record does not say what is
    there."""
    hashes = {}
    lines = text.split(b"\n")
    for line in lines:
        value, _, path = line.removeprefix(b"\\").partition(b"  ")
        if not line.startswith(b"#"):
            hashes[path.replace(b"\\\\", b"\\") if line.startswith(b"\\") else path] = value.decode("ascii", "replace")
    sorted_ = sorted(things, key=lambda thing: index.order(thing.path))
    tree = Tree(name, tuple(_with_hash(thing, hashes) for thing in sorted_))
    wanted = index.record(tree)
    if text not in {wanted, wanted.rpartition(SUM)[0] + b"\n"}:
        odd = sorted(set(lines) ^ set(wanted.split(b"\n")))
        found = next((ascii(line)[2:-1] for line in odd if not line.startswith(b"# sum ")), "another record")
        raise Trouble(Problem(f"{where}: {name}", "it is not as it was published", found, try_=REMEDY))
    return tree


def _with_hash(thing: ArchiveMember, hashes: dict[bytes, str]) -> ArchiveMember:
    if thing.kind != FILE:
        return thing
    return ArchiveMember(thing.path, FILE, thing.executable, thing.size, hashes.get(thing.path.encode(), ""))


def pull(transport: Transport, place: PrefixHandle, trees: Iterable[Tree], sink: Callable[[bytes], object]) -> None:
    """Give the contents of all files of `trees` to `sink`, one behind the other; what `sink` raises ends it."""
    names = (f"./{tree.name}/{thing.path}\0".encode() for tree in trees for thing in tree.files)
    job = Job(
        compose(place.recipes, *EXPORT),
        args=("read",),
        env={"PREFIX": place.prefix},
        user=place.user,
        timeout=None,
        sink=sink,
        limit=None,
    )
    read_answer(transport.send(place.host, job, _pieces(names)), place, "export.sh", forms.NOTHING)


def _pieces(names: Iterable[bytes]) -> Iterator[bytes]:
    """Join short texts, so that none goes in a packet of its own."""
    piece = bytearray()
    for name in names:
        piece += name
        if len(piece) > 64 * KIB:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece)


def check_records(trees: Sequence[Tree], holdings: Holdings, prefix: str) -> list[str]:
    """Return the entries whose record no generation knows; Trouble for those whose record was made anew since a
    generation named it."""
    known = {tree.name: holdings.record_sum(tree.name) for tree in trees}
    problems = [
        Problem(
            f"{prefix}/store/{tree.name}",
            f"it is not as it was published: its record was made anew since generation {record.generation}",
            index.record_sum(tree),
            record.sha256,
            REMEDY,
        )
        for tree in trees
        if (record := known[tree.name]) and record.sha256 != index.record_sum(tree)
    ]
    if problems:
        raise Trouble(*problems)
    return [name for name, record in known.items() if record is None]


def read_files(
    transport: Transport, place: PrefixHandle, wanted: Mapping[str, Sequence[ArchiveMember]]
) -> dict[tuple[str, str], bytes]:
    """Return the contents of some files, by the name of the entry and the path in it; Trouble where one is not what the
    entry's record says. They are held in memory."""
    trees = [Tree(name, tuple(files)) for name, files in wanted.items() if files]
    came = bytearray()
    pull(transport, place, trees, came.extend)
    found: dict[tuple[str, str], bytes] = {}
    at = 0
    for tree in trees:
        for thing in tree.files:
            data = bytes(came[at : at + thing.size])
            at += thing.size
            if hashlib.sha256(data).hexdigest() != thing.sha256:
                where = f"{place.host.name} {place.prefix}/store/{tree.name}/{thing.path}"
                raise Trouble(Problem(where, "it is not as it was published", try_=REMEDY))
            found[tree.name, thing.path] = data
    return found


def look_for_room(transport: Transport, place: PrefixHandle, names: Iterable[str]) -> Room:
    """Return what the prefix has room for and already holds; there may be no prefix yet. Trouble where its store may
    not be written."""
    reply = transport.run(place.host, _importing(place, "look", names))
    answer = read_answer(reply, place, "import.sh", forms.ROOM)
    return Room(answer.number("free") * KIB, answer.words("present"))


def push(transport: Transport, place: PrefixHandle, trees: Sequence[Tree], members: Iterable[bytes]) -> Arrived:
    """Unpack `members` (the tar stream of `trees`, without its end) aside on the prefix's host, compare every file
    there with its record, and publish the entries. What `members` raises, and any difference, leaves nothing behind."""
    reply = transport.send(
        place.host, _importing(place, "receive", (tree.name for tree in trees)), _stream(trees, members)
    )
    answer = read_answer(reply, place, "import.sh", forms.ARRIVED)
    return Arrived(answer.words("imported"), answer.words("present"))


def _stream(trees: Iterable[Tree], members: Iterable[bytes]) -> Iterator[bytes]:
    """Yield what `import.sh receive` reads. The file `complete` comes last: an end before it, wherever, is no end of
    ours."""
    for tree in trees:
        yield stream.small_file(f"records/{tree.name}", index.record(tree))
    yield from members
    yield stream.small_file("complete", b"") + stream.ending(0)


def _importing(place: PrefixHandle, word: str, names: Iterable[str]) -> Job:
    env = {"PREFIX": place.prefix, "TOKEN": secrets.token_hex(8), "ENTRIES": "\n".join(names)}
    return Job(compose(place.recipes, *IMPORT), args=(word,), env=env, user=place.user, timeout=None)
