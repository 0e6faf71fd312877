"""Archives: what goes in comes out the same, and a hostile one is refused before anything stands in the store."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.prefix import history
from deepep_bootstrap.prefix.archive import index, stream, transfer
from deepep_bootstrap.prefix.archive.index import (
    FILE,
    FOLDER,
    LINK,
    ArchiveIndex,
    ArchiveMember,
    Tree,
    parse_index,
    render_index,
)
from deepep_bootstrap.prefix.archive.stream import read_index, read_trees
from tests.support.archive import (
    BASE,
    TOP,
    add_rich_entry,
    everything_below,
    folder_thing,
    made_up,
    pack,
    small_tree,
    spoiled,
    tar,
    unpack,
)
from tests.support.build import run_bash, script
from tests.support.examples import most
from tests.support.store import Prefix, entry_name

pytest_plugins = ["tests.support.store", "tests.support.archive"]
pytestmark = pytest.mark.usefixtures("programs")

EMPTY = small_tree().things[0].sha256
LOOSE = settings(deadline=None, suppress_health_check=list(HealthCheck))


def refusal(action) -> str:
    with pytest.raises(Trouble) as caught:
        action()
    assert len(caught.value.problems) == 1
    return str(caught.value)


# Round trip


def test_what_goes_in_comes_out(packed: tuple[bytes, ArchiveIndex], other: Prefix) -> None:
    data, index = packed
    assert len(data) == stream.total(index, render_index(index))
    arrived = unpack(other, data)
    assert arrived == transfer.Arrived((BASE, TOP) if BASE < TOP else (TOP, BASE), ())
    assert other.names() == {BASE, TOP}
    assert {verdict.state for verdict in history.rehash(other.transport, other.place, [BASE, TOP])} == {"same"}
    again, same = pack(other, BASE, TOP)
    assert again == data
    assert same == index
    tool, content = other.path / "store" / TOP / "bin/tool", other.path / "store" / TOP / "lib/content"
    assert [path.stat().st_mode & 0o7777 for path in (tool, content, content.parent)] == [0o555, 0o444, 0o755]


def test_tar_reads_it(packed: tuple[bytes, ArchiveIndex]) -> None:
    data, index = packed
    wanted = [stream.INDEX, *(name for name, _ in stream.members(index.trees))]
    with tarfile.open(fileobj=io.BytesIO(data)) as found:
        members = found.getmembers()
        assert [member.name for member in members] == wanted
        assert {oct(member.mode) for member in members} == {"0o444", "0o555", "0o755", "0o777"}
        assert {member.uid for member in members} == {0}
        assert found.extractfile(stream.INDEX).read() == render_index(index)
    assert [line.rstrip("/") for line in tar("-t", "--quoting-style=literal", data=data).splitlines()] == wanted


def test_a_file_of_more_than_eight_gib_has_a_header_that_tar_understands() -> None:
    big = ArchiveMember("x", FILE, size=stream.OCTAL_LIMIT + 5)
    assert tarfile.TarInfo.frombuf(stream.header("x", big), "utf-8", "strict").size == big.size


def test_index_is_read_as_it_was_written(packed: tuple[bytes, ArchiveIndex]) -> None:
    assert index.parse_index(index.render_index(packed[1]), "FILE") == packed[1]


def test_what_is_there_is_left_alone(packed: tuple[bytes, ArchiveIndex], other: Prefix) -> None:
    mine = other.entry(BASE, content=b"mine\n")
    assert unpack(other, packed[0]) == transfer.Arrived((TOP,), (BASE,))
    assert (mine / "lib/content").read_bytes() == b"mine\n"
    room = transfer.look_for_room(other.transport, other.place, [BASE, entry_name("gdrcopy")])
    assert room.present == (BASE,)
    assert room.free > 0


def test_entries_that_are_not_wanted_are_not_sent_but_compared(packed: tuple[bytes, ArchiveIndex]) -> None:
    data, index = packed
    stream = io.BytesIO(data)
    read_index(stream, "FILE")
    sent = b"".join(read_trees(stream, index, "FILE", [TOP]))
    assert BASE.encode() + b"/manifest.json" not in sent
    damaged = data.replace(f'"name": "{BASE}"'.encode(), f'"name": "{BASE[:-1]}9"'.encode())
    stream = io.BytesIO(damaged)
    read_index(stream, "FILE")
    assert "its contents are not what the index says" in refusal(lambda: list(read_trees(stream, index, "FILE", [TOP])))


def test_an_entry_without_a_record_gets_one(prefix: Prefix, other: Prefix) -> None:
    folder = add_rich_entry(prefix, TOP)
    (folder / "files.sha256").unlink()
    unpack(other, pack(prefix, TOP)[0])
    assert [verdict.state for verdict in history.rehash(other.transport, other.place, [TOP])] == ["same"]


def test_a_shared_prefix_stays_shared(packed: tuple[bytes, ArchiveIndex], other: Prefix) -> None:
    other.path.chmod(0o2775)
    unpack(other, packed[0])
    modes = {
        path.stat().st_mode & 0o7777
        for path in (other.path / "store" / TOP).rglob("*")
        if path.is_dir() and not path.is_symlink()
    }
    assert modes == {0o2775}
    assert [verdict.state for verdict in history.rehash(other.transport, other.place, [TOP])] == ["same"]


# Export refuses what is not as published


def spoil_content(folder: Path) -> None:
    (folder / "lib/content").chmod(0o644)
    (folder / "lib/content").write_bytes(b"y" * 1000)
    (folder / "lib/content").chmod(0o444)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_content, "changed since it was published"),
        (lambda folder: (folder / "lib/new").touch(mode=0o444), "is not as it was published — found .*lib/new"),
        (lambda folder: (folder / "lib/content").unlink(), "is not as it was published — found .*lib/content"),
        (lambda folder: (folder / "bin/tool").chmod(0o444), "is not as it was published — found # executable bin/tool"),
        (lambda folder: (folder / "bin/tool").chmod(0o4555), "found bin/tool: type f, mode 4555"),
        (lambda folder: (folder / "bin/tool").chmod(0o757), "found bin/tool: type f, mode 0757"),
        (lambda folder: os.mkfifo(folder / "lib/fifo"), "found lib/fifo: type p"),
    ],
)
def test_export_refuses_a_changed_entry(prefix: Prefix, spoil, message: str) -> None:
    spoil(add_rich_entry(prefix, TOP))
    with pytest.raises(Trouble, match=message):
        pack(prefix, TOP)


def test_export_of_what_is_not_there(prefix: Prefix) -> None:
    with pytest.raises(Trouble, match="there is no entry"):
        pack(prefix, TOP)


def test_contents_of_another_size_are_refused(packed: tuple[bytes, ArchiveIndex]) -> None:
    index = made_up(small_tree(ArchiveMember("x", FILE, size=3, sha256="0" * 64)))
    packer = stream.Packer(io.BytesIO(), index, render_index(index))
    packer.feed(b"ab")
    assert "became shorter" in refusal(packer.finish)
    assert "changed since" in refusal(lambda: packer.feed(b"c"))
    empty = stream.Packer(io.BytesIO(), made_up(small_tree()), b"")
    assert "more than the files" in refusal(lambda: empty.feed(b"x"))


@LOOSE
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30))
def test_pieces_of_any_size_make_the_same_archive(sizes: list[int]) -> None:
    import hashlib

    contents = [b"first" * 700, b"", b"x", b"last" * 500]
    things = [
        ArchiveMember(f"f{number}", FILE, False, len(data), hashlib.sha256(data).hexdigest())
        for number, data in enumerate(contents)
    ]
    index = made_up(small_tree(*things))
    whole = b"".join(contents)

    def packed_by(cuts: Iterable[int]) -> bytes:
        out, start = io.BytesIO(), 0
        packer = stream.Packer(out, index, render_index(index))
        for cut in cuts:
            packer.feed(whole[start : start + cut])
            start += cut
        packer.feed(whole[start:])
        packer.finish()
        return out.getvalue()

    assert packed_by(sizes) == packed_by([])


# Hostile indexes


def link(path: str, target: str) -> ArchiveMember:
    return ArchiveMember(path, LINK, target=target)


HOSTILE_TREES = {
    "absolute path": (small_tree(ArchiveMember("/etc/passwd", FILE, sha256=EMPTY)), "leads out of its entry"),
    "dots": (small_tree(ArchiveMember("../x", FILE, sha256=EMPTY)), "leads out of its entry"),
    "dots inside": (
        small_tree(folder_thing("a"), ArchiveMember("a/../../x", FILE, sha256=EMPTY)),
        "leads out of its entry",
    ),
    "empty part": (small_tree(folder_thing("a"), ArchiveMember("a//x", FILE, sha256=EMPTY)), "leads out of its entry"),
    "newline": (small_tree(ArchiveMember("a\nb", FILE, sha256=EMPTY)), "cannot be unpacked"),
    "NUL": (small_tree(ArchiveMember("a\0b", FILE, sha256=EMPTY)), "cannot be unpacked"),
    "surrogate": (small_tree(ArchiveMember("a\ud800b", FILE, sha256=EMPTY)), "cannot be unpacked"),
    "long name": (small_tree(ArchiveMember("a" * 256, FILE, sha256=EMPTY)), "leads out of its entry"),
    "long path": (small_tree(ArchiveMember("a/" * 600 + "b", FILE, sha256=EMPTY)), "cannot be unpacked"),
    "twice": (Tree(TOP, (*small_tree().things, *small_tree().things)), "in the archive twice"),
    "file as folder": (
        small_tree(ArchiveMember("a", FILE, sha256=EMPTY), ArchiveMember("a/b", FILE, sha256=EMPTY)),
        "does not lie in a folder",
    ),
    "below a link": (small_tree(link("a", "."), ArchiveMember("a/b", FILE, sha256=EMPTY)), "does not lie in a folder"),
    "no folder": (small_tree(ArchiveMember("a/b", FILE, sha256=EMPTY)), "does not lie in a folder"),
    "unsorted": (Tree(TOP, tuple(reversed(small_tree(ArchiveMember("a", FILE, sha256=EMPTY)).things))), "not in order"),
    "own record": (small_tree(ArchiveMember("files.sha256", FILE, sha256=EMPTY)), "not part of an archive"),
    "link out": (small_tree(link("a", "../../x")), "points out of the store"),
    "link to the store": (small_tree(link("a", "..")), "points out of the store"),
    "link to a stranger": (small_tree(link("a", f"../{BASE}")), "points out of the store"),
    "absolute link": (small_tree(link("a", "/etc/passwd")), "points out of the store"),
    "empty link": (small_tree(link("a", "")), "points out of the store"),
    "through a link": (
        small_tree(folder_thing("d"), folder_thing("d/e"), link("b", "d/e/f/../../.."), link("d/e/f", "../..")),
        "out of",
    ),
    "interpreter elsewhere": (small_tree(link("python", "/usr/bin/python3")), "points out of the store"),
    "not an interpreter": (
        small_tree(folder_thing("bin"), link("bin/python", "/usr/bin/../../tmp/python3")),
        "points out of the store",
    ),
    "no manifest": (Tree(TOP, (ArchiveMember("a", FILE, sha256=EMPTY),)), "has no manifest.json"),
    "name": (replace(small_tree(), name="../../etc"), "not the name of a store entry"),
    "dot name": (replace(small_tree(), name="." + TOP[1:]), "not the name of a store entry"),
}


@pytest.mark.parametrize("case", HOSTILE_TREES)
def test_hostile_trees_are_refused(case: str) -> None:
    tree, message = HOSTILE_TREES[case]
    assert message in refusal(lambda: index.parse_index(index.render_index(made_up(tree)), "FILE"))


HOSTILE_INDEXES = {
    "not JSON": (b"\xff\x00", "its index cannot be read"),
    "nested": (b"[" * 100_000, "its index cannot be read"),
    "a list": (b"[]", "not the index of an archive of ours"),
    "another format": (b'{"format": "other"}', "not the index of an archive of ours"),
    "no entries": (index.render_index(made_up()), "there are no entries in it"),
    "entries twice": (index.render_index(made_up(small_tree(), small_tree())), "one is in it twice"),
    "version": (
        spoiled(made_up(small_tree()), lambda found: found.update(version=2)),
        "not of this version — found 2, wanted 1",
    ),
    "number as name": (
        spoiled(made_up(small_tree()), lambda found: found["entries"][0].update(name=5)),
        "cannot be read",
    ),
    "device": (
        spoiled(made_up(small_tree()), lambda found: found["entries"][0]["things"][0].update(type="device")),
        "type 'device'",
    ),
    "setuid": (
        spoiled(made_up(small_tree()), lambda found: found["entries"][0]["things"][0].update(mode="4555")),
        "mode '4555'",
    ),
    "writable": (
        spoiled(made_up(small_tree()), lambda found: found["entries"][0]["things"][0].update(mode="0666")),
        "mode '0666'",
    ),
    "negative": (
        spoiled(made_up(small_tree()), lambda found: found["entries"][0]["things"][0].update(size=-1)),
        "size -1",
    ),
    "huge": (
        spoiled(made_up(small_tree()), lambda found: found["entries"][0]["things"][0].update(size=1 << 70)),
        "size 118059",
    ),
    "float": (
        spoiled(made_up(small_tree()), lambda found: found["entries"][0]["things"][0].update(size=1.5)),
        "Expected `int`, got `float` - at `$.entries[0].things[0].size`",
    ),
    "true": (
        spoiled(made_up(small_tree()), lambda found: found["entries"][0]["things"][0].update(size=True)),
        "Expected `int`, got `bool` - at `$.entries[0].things[0].size`",
    ),
    "hash": (
        spoiled(made_up(small_tree()), lambda found: found["entries"][0]["things"][0].update(sha256="x")),
        "sha256 'x'",
    ),
    "type a list": (
        spoiled(made_up(small_tree()), lambda found: found["entries"][0]["things"][0].update(type=[])),
        "cannot be read",
    ),
    "terminal": (spoiled(made_up(small_tree()), lambda found: found["entries"][0].update(name="\x1b[2J")), r"\x1b[2J"),
}


@pytest.mark.parametrize("case", HOSTILE_INDEXES)
def test_hostile_indexes_are_refused(case: str) -> None:
    text, message = HOSTILE_INDEXES[case]
    said = refusal(lambda: index.parse_index(text, "FILE"))
    assert message in said
    assert said.isprintable()


@LOOSE
@given(st.data())
def test_no_index_ends_in_a_traceback(data: st.DataObject) -> None:
    """One value of a good index becomes any other: refused, or an index."""
    values = json.loads(render_index(made_up(small_tree(folder_thing("a"), link("b", "a")))))
    spots: list[tuple[object, object]] = []

    def collect(found: object) -> None:
        for key, inner in (
            found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
        ):
            spots.append((found, key))
            collect(inner)

    collect(values)
    anything = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=4,
    )
    place, key = data.draw(st.sampled_from(spots))
    place[key] = data.draw(anything)
    try:
        index = parse_index(json.dumps(values).encode(), "FILE")
    except Trouble as trouble:
        said = str(trouble)
    else:
        said = ""
        assert parse_index(render_index(index), "FILE") == index
    assert said.isprintable()


PARTS = st.sampled_from(["a", "b", "..", ".", "", "x"])
TARGETS = st.lists(PARTS, min_size=1, max_size=5).map("/".join)


@LOOSE
@given(st.dictionaries(st.sampled_from(["l1", "d/l2", "d/e/l3", "d/e/l4"]), TARGETS, min_size=1))
@example({"d/e/l3": "../..", "l1": "d/e/l3/../../.."})
def test_links_that_are_allowed_stay_in_the_store_for_the_kernel_too(
    tmp_path_factory: pytest.TempPathFactory, links: dict[str, str]
) -> None:
    tree = small_tree(
        folder_thing("d"), folder_thing("d/e"), folder_thing("a"), *(link(*each) for each in links.items())
    )
    if list(index.check_index(made_up(tree), "FILE")):
        return
    store = tmp_path_factory.mktemp("links").resolve() / "deep/store"
    for thing in tree.things:
        path = store / TOP / thing.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(exist_ok=True) if thing.kind == FOLDER else path.touch() if thing.kind == FILE else path.symlink_to(
            thing.target
        )
    for name in links:
        assert (store / TOP) in (
            Path(os.path.realpath(store / TOP / name)),
            *Path(os.path.realpath(store / TOP / name)).parents,
        )


# Hostile files


def members_of(data: bytes) -> list[tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data)) as found:
        return found.getmembers()


def first_file(data: bytes) -> tarfile.TarInfo:
    return next(member for member in members_of(data) if member.size > 600 and member.name != stream.INDEX)


def foreign(name: str, kind: bytes = tarfile.REGTYPE, mode: int = 0o444, target: str = "") -> bytes:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.linkname = kind, mode, target
    return member.tobuf(tarfile.GNU_FORMAT)


def with_other_header(data: bytes, **changes: object) -> bytes:
    member = first_file(data)
    start = member.offset_data - 512
    for key, value in changes.items():
        setattr(member, key, value)
    return data[:start] + member.tobuf(tarfile.GNU_FORMAT)[:512] + data[start + 512 :]


def inserted(data: bytes, block: bytes) -> bytes:
    start = first_file(data).offset
    return data[:start] + block + data[start:]


HOSTILE_FILES = {
    "empty": (lambda data: b"", "not an archive of ours"),
    "text": (lambda data: b"x" * 5000, "not an archive of ours"),
    "another tar": (lambda data: data[first_file(data).offset :], "not an archive of ours"),
    "gzip": (lambda data: b"\x1f\x8b" + data, "is compressed"),
    "cut in the index": (lambda data: data[:2000], "cut off or damaged in deepep-bootstrap.json"),
    "cut in a file": (lambda data: data[: first_file(data).offset_data + 5], "cut off or damaged in store/"),
    "cut between": (lambda data: data[: first_file(data).offset], "the archive is cut off"),
    "cut at the end": (
        lambda data: data[:-10240].rstrip(b"\0")[: -(-len(data[:-10240].rstrip(b"\0")) % 512) or None],
        "",
    ),
    "a byte": (
        lambda data: data[: first_file(data).offset_data] + b"\xfe\xfe" + data[first_file(data).offset_data + 2 :],
        "contents",
    ),
    "setuid": (lambda data: with_other_header(data, mode=0o4555), "mode 4555"),
    "device": (lambda data: with_other_header(data, type=tarfile.CHRTYPE), "found a device or FIFO"),
    "hard link": (
        lambda data: with_other_header(data, type=tarfile.LNKTYPE, linkname="/etc/passwd"),
        "found a hard link",
    ),
    "link": (lambda data: with_other_header(data, type=tarfile.SYMTYPE, linkname="/etc"), "found a link"),
    "longer": (lambda data: with_other_header(data, size=10**9), "not what its index says"),
    "extra": (lambda data: inserted(data, foreign("../../evil")), "found a file ../../evil"),
    "extra absolute": (lambda data: inserted(data, foreign("/etc/evil")), "found a file /etc/evil"),
    "twice": (lambda data: inserted(data, foreign(first_file(data).name)), "not what its index says"),
    "at the end": (lambda data: data + foreign("store/evil"), "does not end where its index says"),
    "instead of the end": (
        lambda data: data.rstrip(b"\0") + bytes(-len(data.rstrip(b"\0")) % 512) + foreign("evil") + bytes(1024),
        "",
    ),
}


@pytest.mark.parametrize("case", HOSTILE_FILES)
def test_hostile_files_leave_nothing(
    packed: tuple[bytes, ArchiveIndex], other: Prefix, tmp_path: Path, case: str
) -> None:
    change, message = HOSTILE_FILES[case]
    before = everything_below(tmp_path)
    said = refusal(lambda: unpack(other, change(packed[0])))
    assert message in said
    assert said.isprintable()
    assert other.names() == set()
    assert {path for path, _ in everything_below(tmp_path)} == {path for path, _ in before}


def test_an_index_that_claims_to_be_huge_is_not_read() -> None:
    start = stream.header(stream.INDEX, ArchiveMember(stream.INDEX, FILE, size=stream.LARGEST_INDEX + 1))
    assert "larger than any real one" in refusal(lambda: stream.read_index(io.BytesIO(start), "FILE"))


@settings(LOOSE, max_examples=most(300))
@given(st.data())
def test_every_changed_byte_is_seen(packed: tuple[bytes, ArchiveIndex], data: st.DataObject) -> None:
    """Behind the index, whose bytes are what the signature signs, nothing can change, come or go but zeros at the
    very end."""
    good, index = packed
    start = members_of(good)[1].offset
    position = data.draw(
        st.integers(start, len(good) - tarfile.RECORDSIZE)
        | st.sampled_from([member.offset for member in members_of(good)[1:]])
    )
    length, piece = data.draw(st.integers(0, 600)), data.draw(st.binary(max_size=600))
    changed = good[:position] + piece + good[position + length :]
    stream = io.BytesIO(changed)
    read_index(stream, "FILE")
    try:
        got = b"".join(read_trees(stream, index, "FILE", [TOP, BASE]))
    except Trouble as trouble:
        said = str(trouble)
    else:
        said = ""
        assert changed.rstrip(b"\0") == good.rstrip(b"\0")
        assert good[start : start + len(got)] == got
    assert said.isprintable()


# The second line of defence: what the prefix's host does with a stream that is not what was announced


def stream_of(*blocks: bytes) -> list[bytes]:
    return [b"".join(blocks)]


ROOTS = stream.header(f"store/{TOP}", folder_thing("")) + stream.small_file(f"store/{TOP}/manifest.json", b"")
EVIL_STREAMS = {
    "changed": [
        stream.header(f"store/{TOP}", folder_thing("")) + stream.small_file(f"store/{TOP}/manifest.json", b"x")
    ],
    "more": stream_of(ROOTS, stream.small_file(f"store/{TOP}/more", b"")),
    "less": stream_of(stream.header(f"store/{TOP}", folder_thing(""))),
    "another mode": stream_of(ROOTS, foreign(f"store/{TOP}/manifest.json", mode=0o4755)),
    "upwards": stream_of(ROOTS, foreign("../../../evil"), foreign(f"store/{TOP}/../../../evil")),
    "through a link": stream_of(foreign("store", tarfile.SYMTYPE, target="/tmp/evil-of-archive"), ROOTS),
    "entry is a link": stream_of(foreign(f"store/{TOP}", tarfile.SYMTYPE, target="/tmp")),
    "device": stream_of(ROOTS, foreign(f"store/{TOP}/device", tarfile.FIFOTYPE)),
    "no tar": stream_of(ROOTS, b"x" * 512),
    "nothing": [],
}


@pytest.mark.parametrize("case", EVIL_STREAMS)
def test_the_host_believes_nobody(other: Prefix, tmp_path: Path, case: str) -> None:
    before = {path for path, _ in everything_below(tmp_path)}
    with pytest.raises(Trouble, match="cannot be imported"):
        transfer.push(other.transport, other.place, [small_tree()], EVIL_STREAMS[case])
    assert {path for path, _ in everything_below(tmp_path)} == before
    assert not Path("/tmp/evil-of-archive").exists()


def test_a_good_stream_passes_the_same_way(other: Prefix) -> None:
    assert transfer.push(other.transport, other.place, [small_tree()], [ROOTS]).imported == (TOP,)


def test_without_the_last_member_nothing_counts(other: Prefix) -> None:
    data = stream.small_file(f"records/{TOP}", index.record(small_tree())) + ROOTS
    env = {"PREFIX": str(other.path), "TOKEN": "t", "ENTRIES": TOP}
    done = run_bash(script(*transfer.IMPORT), env, "receive", data=data + stream.ending(len(data)))
    assert done.returncode == 1
    assert "did not come whole" in done.stderr
    assert other.names() == set()


@pytest.mark.parametrize("reason", [KeyboardInterrupt(), Trouble()])
def test_an_import_that_is_ended_in_its_middle_leaves_nothing(
    packed: tuple[bytes, ArchiveIndex], other: Prefix, reason: BaseException
) -> None:
    data, index = packed
    stream = io.BytesIO(data)
    read_index(stream, "FILE")

    def half() -> Iterator[bytes]:
        for number, piece in enumerate(read_trees(stream, index, "FILE", [BASE, TOP])):
            if number == 20:
                raise reason
            yield piece

    with pytest.raises(type(reason)):
        transfer.push(other.transport, other.place, index.trees, half())
    assert other.names() == set()


def test_what_a_dead_import_left_goes_with_the_next(packed: tuple[bytes, ArchiveIndex], other: Prefix) -> None:
    (other.path / "store/.tmp-import-dead/store").mkdir(parents=True)
    unpack(other, packed[0])
    assert other.names() == {BASE, TOP}


# Records


@settings(LOOSE, max_examples=most(15))
@given(
    st.dictionaries(
        st.text(
            st.characters(blacklist_characters="/\0\n", blacklist_categories=("Cs", "Cc")), min_size=1, max_size=20
        ),
        st.sampled_from("flxd"),
        max_size=8,
    )
)
def test_the_record_is_the_one_that_the_recipe_writes(
    tmp_path_factory: pytest.TempPathFactory, names: dict[str, str]
) -> None:
    folder = tmp_path_factory.mktemp("record")
    things = []
    for name, kind in names.items():
        if name in {".", "..", "files.sha256"}:
            continue
        if kind == "d":
            (folder / name).mkdir()
        elif kind == "l":
            (folder / name).symlink_to(name)
        else:
            (folder / name).touch(mode=0o444)
            (folder / name).chmod(0o555 if kind == "x" else 0o444)
        kinds = {"d": FOLDER, "l": LINK}
        things.append(
            ArchiveMember(
                name, kinds.get(kind, FILE), kind == "x", 0, EMPTY if kind in "fx" else "", name if kind == "l" else ""
            )
        )
    done = run_bash(
        script("lib.sh", "prefix/lib/files.sh", extra='record_files "$1" "$(mktemp -d)/work"'), {}, str(folder)
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "files.sha256").read_bytes() == index.record(Tree(TOP, tuple(things)))
