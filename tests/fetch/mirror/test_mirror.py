"""`invoke mirror`: what it writes can be used from a folder and from a web server, is checked to the byte, and is
finished after any interruption."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import http.server
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from deepep_bootstrap.cli.commands import lock as lock_verb
from deepep_bootstrap.cli.commands import mirror as verb
from deepep_bootstrap.core import filetree, process
from deepep_bootstrap.core.errors import OK, TROUBLE, VERDICT, Trouble
from deepep_bootstrap.fetch import download, locations, sources, wheels
from deepep_bootstrap.fetch.download import PARTIAL
from deepep_bootstrap.fetch.mirror import index
from deepep_bootstrap.fetch.mirror.index import (
    MirrorIndex,
    is_inside,
    parse_mirror_index,
    read_mirror_index,
    render_mirror_index,
)
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.lock import model
from deepep_bootstrap.lock.model import Lock, Wheel
from tests.fetch.test_wheels import make_wheel
from tests.support.cutting import bad_line
from tests.support.lock import BASE, FILES, Server, commit
from tests.support.paths import ROOT

pytest_plugins = ["tests.support.lock"]

ENGINE = "git/host.invalid/owner/engine.git"
TINY = "wheels/inner/tiny/tiny-1.0-py3-none-any.whl"
LOCK = """version = 1
default_stack = "one"
{sources}
[stack.one]
deepep = "engine"
nvshmem = "old"
gdrcopy = "outer"
cuda = "12"
wheels.cp311-x86_64 = [{one}]
[stack.two]
deepep = "engine"
nvshmem = "engine"
gdrcopy = "engine"
cuda = "13"
wheels.cp312-x86_64 = [{two}]
[tool.uv]
wheels = [{tool}]
"""


@dataclass(frozen=True)
class World:
    """A lock, the servers and folders it leads to, and places for a mirror."""

    server: Server
    folder: Path

    @property
    def lock(self) -> Lock:
        return model.read_lock_file(self.folder / "lock.toml")

    @property
    def mirror(self) -> Path:
        return self.folder / "mirror"

    @property
    def flags(self) -> Flags:
        places = (self.server.flag, f"index:inner={self.folder}/made")
        return Flags(ROOT, lock=str(self.folder / "lock.toml"), mirror=places)

    def run(
        self, *, stack: str = "", check: bool = False, target: str = "", prune: bool = False, dry_run: bool = False
    ) -> int:
        flags = replace(self.flags, stack=stack, dry_run=dry_run)
        return verb.mirror(flags, str(self.mirror), check=check, target=target, prune=prune)

    def index(self) -> MirrorIndex:
        index = read_mirror_index(self.mirror)
        assert index is not None
        return index

    def states(self) -> dict[str, str]:
        """What a check finds, by path."""
        return {each.path: each.state for each in index.compare(self.mirror, self.index())}


def pin(name: str, url: str, rev: str, tree: Path, submodules: bool = False) -> str:
    keys = {"url": url, "ref": "main", "rev": rev, "hash": filetree.hash_path(tree), "version": "1.0"}
    text = "\n".join(f'{key} = "{value}"' for key, value in keys.items())
    return f"[source.{name}]\n{text}\nlast_modified = 1\nsubmodules = {'true' if submodules else 'false'}\n"


def tree_of(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def entry(wheel: Wheel) -> str:
    keys = ("name", "version", "index", "file", "hash")
    return "{ " + ", ".join(f'{key} = "{getattr(wheel, key)}"' for key in keys) + f", size = {wheel.size} }}"


def make_world(server: Server, folder: Path) -> World:
    """Two pins of one repository, a source with a submodule, wheels of two targets and a tool for two
    machines."""
    outer = server.folder / "owner/outer.git"
    shutil.copytree(server.engine, outer)
    modules = '[submodule "engine"]\n\tpath = third/engine\n\turl = ../engine.git\n'
    link = {".gitmodules": modules, "third/engine": f"link:{server.commits['pull']}"}
    made = commit(outer, [server.commits["one"]], {**FILES, **link}, 9)
    subprocess.run(["git", "-C", outer, "update-ref", "refs/heads/main", made], check=True)
    two = {**FILES, "two": "2"}
    filled = {
        **FILES,
        ".gitmodules": modules,
        **{f"third/engine/{name}": text for name, text in {**FILES, "pull": "7"}.items()},
    }
    sources = [
        pin(
            "engine",
            f"{BASE}owner/engine",
            server.commits["three"],
            tree_of(folder / "trees/three", {**two, "three": "3"}),
        ),
        pin("old", f"{BASE}owner/engine.git", server.commits["two"], tree_of(folder / "trees/two", two)),
        pin("outer", f"{BASE}owner/outer", made, tree_of(folder / "trees/outer", filled), submodules=True),
    ]
    tiny = make_wheel(folder / "made", "tiny")
    other = make_wheel(folder / "made", "Other_One", "cp312-cp312-manylinux_2_28_x86_64")
    tool = [
        make_wheel(folder / "made", "uv", f"py3-none-manylinux_2_17_{machine}") for machine in ("x86_64", "aarch64")
    ]
    text = LOCK.format(
        sources="\n".join(sources),
        one=entry(tiny),
        two=f"{entry(tiny)}, {entry(other)}",
        tool=", ".join(map(entry, tool)),
    )
    (folder / "lock.toml").write_text(text)
    return World(server, folder)


@pytest.fixture(scope="session")
def mirrored(_server_template: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The world and its mirror, made once; tests get copies. Its hash is that of what was made."""
    folder = tmp_path_factory.mktemp("mirrored")
    shutil.copytree(_server_template.folder, folder / "server")
    world = make_world(Server(folder / "server", _server_template.commits), folder)
    assert world.run() == OK
    return folder


@pytest.fixture
def world(mirrored: Path, _server_template: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A complete mirror and what it was made from, for one test to do with it what it likes; no cache helps."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(mirrored, tmp_path / "world", symlinks=True)
    return World(Server(tmp_path / "world/server", _server_template.commits), tmp_path / "world")


@pytest.fixture
def bare(world: World) -> World:
    """A world whose mirror was not made yet."""
    shutil.rmtree(world.mirror)
    return world


@pytest.fixture
def served(world: World) -> Iterator[str]:
    """The mirror behind the plain web server that `python -m http.server` is."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(world.mirror))
    ) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Which files are there, and which of them anybody wrote again."""
    return {path: (status.st_ino, status.st_mtime_ns) for path, status in index.walk(folder).items()}


def test_what_a_mirror_holds_and_that_a_second_run_writes_nothing_again(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    index = world.index()
    assert {each.name for each in index.sources} == {"engine", "old", "outer"}
    assert {TINY, "wheels/inner/other-one/Other_One-1.0-cp312-cp312-manylinux_2_28_x86_64.whl"} <= set(index.files)
    pins = {path.rpartition("/")[2] for path in index.files if path.startswith(f"{ENGINE}/refs/pins/")}
    assert pins == {world.server.commits[name] for name in ("two", "three", "pull")}
    assert world.states() == {}
    for folder in (world.server.folder, world.folder / "made"):
        shutil.rmtree(folder)
        folder.mkdir()
    before, text = snapshot(world.mirror), (world.mirror / "mirror.json").read_text()
    assert world.run() == OK, "a complete mirror needs nothing from elsewhere"
    assert "0 added, 0 repaired, 0 removed" in capsys.readouterr().out
    after = snapshot(world.mirror)
    assert (world.mirror / "mirror.json").read_text() == text
    assert {path for path in after if after[path] != before.get(path)} == {"mirror.json"}
    assert world.run(check=True) == OK
    assert snapshot(world.mirror) == after


def take_everything(world: World, place: str, cache: Path) -> None:
    """Fetch all that the lock names with nothing but `place` in reach."""
    shutil.rmtree(world.server.folder)
    found = locations.read_mirrors([place], {}, {})
    for source in world.lock.sources.values():
        assert filetree.hash_path(sources.fetch_source(source, found, cache)) == source.hash
        assert sources.measure_source(source, found).hash == source.hash
    closures = [closure for stack in world.lock.stacks.values() for closure in stack.wheels.values()]
    for closure in (*closures, world.lock.tools["uv"][:1]):
        for file in wheels.fetch_wheels(closure, found, cache, print).values():
            assert file.read_bytes() == (world.folder / "made" / file.name).read_bytes()


def test_everything_comes_out_of_a_folder(world: World, tmp_path: Path) -> None:
    """Also of one that was copied by a program that leaves empty folders out, and that nobody may write."""
    for path in index.walk(world.mirror):
        (tmp_path / "copy" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(world.mirror / path, tmp_path / "copy" / path)
    before = snapshot(tmp_path / "copy")
    take_everything(world, str(tmp_path / "copy"), tmp_path / "cache")
    assert snapshot(tmp_path / "copy") == before


def test_everything_comes_from_a_plain_web_server(
    world: World, served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    take_everything(world, served, tmp_path / "cache")
    # What a build host does that reaches the server itself.
    words = (
        "pip",
        "install",
        "--no-deps",
        "--no-cache",
        "--target",
        tmp_path / "site",
        "--default-index",
        f"{served}/wheels/inner",
        "tiny==1.0",
    )
    subprocess.run([sys.executable, "-m", "uv", "--quiet", "--no-config", *words], check=True)
    assert (tmp_path / "site/tiny.py").is_file()
    # A check says that the hashes it saw there are those that we wrote, which proves nothing of the files.
    there = f"{BASE}={world.mirror}/git/host.invalid/"
    lock_verb.lock(replace(world.flags, mirror=(there, served)), check=True)
    said = capsys.readouterr().out
    assert (
        "ok      3 wheels: as the mirror's own pages state, which invoke mirror wrote (--download fetches and hashes "
        "them)" in said
    )


def pack_of(world: World) -> str:
    return next(path for path in world.index().files if path.startswith(ENGINE) and path.endswith(".pack"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)


def link(path: Path) -> None:
    path.rename(path.with_name("real"))
    path.symlink_to("real")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("damage", "state"),
    [
        (flip, "changed"),
        (Path.unlink, "missing"),
        (link, "changed"),
        (fifo, "changed"),
        (lambda path: os.truncate(path, 1), "changed"),
    ],
)
def test_every_damage_is_named_and_repaired(
    damage: Callable[[Path], None], state: str, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = [TINY, "wheels/inner/tiny/index.html", f"{ENGINE}/HEAD", pack_of(world)]
    for path in damaged:
        (world.mirror / path).chmod(0o644)
        damage(world.mirror / path)
    assert {path: found for path, found in world.states().items() if found != "extra"} == dict.fromkeys(damaged, state)
    capsys.readouterr()
    assert world.run(check=True) == VERDICT
    said = capsys.readouterr().err
    assert all(f"mirror {world.mirror}: {path}: {state}" in said for path in damaged)
    assert world.run() == OK
    assert set(world.states().values()) <= {"extra"}
    assert world.run(prune=True) == OK
    assert world.run(check=True) == OK


def test_what_is_extra_stays_until_it_is_pruned(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").touch()
    (world.mirror / "wheels/linked").symlink_to(tmp_path / "outside")
    (world.mirror / "wheels/inner/gone/deep").mkdir(parents=True)
    (world.mirror / "wheels/inner/gone/deep/x").touch()
    (world.mirror / os.fsdecode(b"git/\xff")).touch()
    extra = {"wheels/linked", "wheels/inner/gone/deep/x", os.fsdecode(b"git/\xff")}
    assert world.run() == OK
    assert world.states() == dict.fromkeys(extra, "extra")
    assert world.run(check=True) == VERDICT
    assert "git/\\udcff: extra" in capsys.readouterr().err
    assert world.run(prune=True) == OK
    assert world.states() == {}
    assert not (world.mirror / "wheels/inner/gone").exists()
    assert (tmp_path / "outside/file").exists()


def cut_at(world: World, line: int) -> bool:
    """Run `invoke mirror` in a process that dies, as of kill -9, when it is about to say its line number `line`;
    False: it never did."""
    program = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.inventory.survey import Flags
from deepep_bootstrap.cli.commands import mirror
lines = iter(range(1, {line}))
Screen.say = lambda self, text="", style="": next(lines, None) or os._exit(9)
mirror.mirror(Flags(Path({str(ROOT)!r}), lock={world.flags.lock!r}, mirror={world.flags.mirror!r}), {str(world.mirror)!r})
"""
    return subprocess.run([sys.executable, "-c", program], check=False).returncode == 9


@pytest.mark.parametrize("line", [1, 6, 10])
def test_a_mirror_whose_writing_was_killed_is_incomplete_and_the_next_run_completes_it(
    line: int, bare: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cut_at(bare, line)
    with pytest.raises(
        Trouble, match=r"is incomplete: its first writing did not come to its end\. Try: invoke mirror "
    ) as caught:
        bare.run(check=True)
    assert caught.value.code == VERDICT
    with pytest.raises(Trouble, match=r"is a mirror that was not finished: it has no mirror\.json"):
        locations.read_mirrors([str(bare.mirror)], {}, {})
    (bare.mirror / ".tmp-left").mkdir()
    assert bare.run() == OK
    assert bare.run(check=True) == OK
    assert bare.states() == {}
    assert not list(bare.mirror.glob(".*"))


def test_a_later_writing_that_was_killed_is_told_too(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    (world.mirror / TINY).unlink()
    assert cut_at(world, 5)
    assert world.run(check=True) == VERDICT
    assert "is incomplete: the last writing did not come to its end" in capsys.readouterr().err
    assert world.run() == OK
    assert world.run(check=True) == OK


def test_wheels_of_all_stacks_come_side_by_side_and_the_next_run_goes_on_where_the_line_broke(
    bare: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wheel in two versions for two stacks, one of them cut off in the middle until the server gives up."""
    monkeypatch.setattr(download, "PAUSE", 0.0)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    lock = bare.folder / "lock.toml"
    newer = make_wheel(bare.folder / "made", "tiny", "cp312-cp312-manylinux_2_28_x86_64", version="2.0")
    old = bare.lock.stacks["two"].wheels["cp312-x86_64"][0]
    head, second = lock.read_text().split("[stack.two]")
    lock.write_text(f"{head}[stack.two]{second.replace(entry(old), entry(newer))}")
    files = {path.name: path.read_bytes() for path in (bare.folder / "made").iterdir()}
    with bad_line(files) as line:
        flags = replace(bare.flags, mirror=(bare.server.flag, f"index:inner={line.address}/simple"))
        line.breaks = [100, *[0] * 100]
        line.ranges = "rest"
        assert verb.mirror(flags, str(bare.mirror)) == TROUBLE
        said = capsys.readouterr()
        assert "the connection broke while" in said.err
        assert "Try: the same command again, which goes on from there" in said.err
        (left,) = (bare.mirror / PARTIAL).iterdir()
        assert left.stat().st_size == 100
        assert stat.S_IMODE(left.parent.stat().st_mode) == 0o700
        assert not any(path.startswith(PARTIAL) for path in index.walk(bare.mirror)), "no part of the mirror"
        line.breaks, line.asked = [], []
        assert verb.mirror(flags, str(bare.mirror)) == OK
        assert "bytes=100-" in line.asked
        assert "done fetch wheels on this machine" in capsys.readouterr().out
    assert not (bare.mirror / PARTIAL).exists()
    assert bare.states() == {}


def test_what_cannot_be_fetched_is_named_and_the_rest_is_there(bare: World, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (bare.server.folder / "owner/outer.git", bare.folder / "made/tiny-1.0-py3-none-any.whl"):
        path.rename(path.with_name("away"))
    assert bare.run() == TROUBLE
    said = capsys.readouterr()
    assert [line.split(":")[0] for line in said.err.splitlines()] == [
        f"mirror {bare.server.folder}",
        "index inner (" + str(bare.folder / "made") + ")",
    ]
    assert "not complete" in said.out
    assert bare.run(check=True) == VERDICT
    said = capsys.readouterr()
    for what in ("is incomplete", "source outer: the mirror does not have", "wheel tiny-1.0-py3-none-any.whl: the"):
        assert what in said.err
    assert "engine" not in said.err
    for path, name in (
        (bare.server.folder / "owner", "outer.git"),
        (bare.folder / "made", "tiny-1.0-py3-none-any.whl"),
    ):
        (path / "away").rename(path / name)
    before = snapshot(bare.mirror / ENGINE)
    assert bare.run() == OK
    assert bare.run(check=True) == OK
    assert set(before) <= set(snapshot(bare.mirror / ENGINE)) | {name for name in before if "objects" in name}


def test_a_tree_that_is_not_the_locked_one_is_no_part_of_the_mirror(
    bare: World, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (bare.folder / "lock.toml").read_text()
    wanted = bare.lock.sources["old"].hash
    wrong = filetree.sri(bytes(32))
    (bare.folder / "lock.toml").write_text(text.replace(wanted, wrong))
    assert bare.run() == TROUBLE
    assert (
        f"source old: the tree of {bare.server.commits['two'][:12]} is not the locked one — found {wanted}, wanted "
        f"{wrong}" in capsys.readouterr().err
    )
    assert {each.name for each in bare.index().sources} == {"engine", "outer"}


def test_a_mirror_for_another_lock(world: World, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It says which pins it lacks, grows by them, keeps what it had, and drops that with --prune."""
    text = (world.folder / "lock.toml").read_text()
    new = commit(world.server.engine, [world.server.commits["three"]], {**FILES, "four": "4"}, 11)
    changed = text.replace(world.server.commits["three"], new).replace(
        world.lock.sources["engine"].hash, filetree.hash_path(tree_of(tmp_path / "four", {**FILES, "four": "4"}))
    )
    wheel = make_wheel(world.folder / "made", "tiny", version="2.0")
    old = world.lock.stacks["one"].wheels["cp311-x86_64"][0]
    (world.folder / "lock.toml").write_text(changed.replace(entry(old), entry(wheel)))
    assert world.run(check=True) == VERDICT
    lacks = [line for line in capsys.readouterr().err.splitlines() if "the mirror does not have" in line]
    assert [line.split(":")[0] for line in lacks] == ["source engine", "wheel tiny-2.0-py3-none-any.whl"]
    with pytest.raises(Trouble, match=rf"Try: invoke mirror {world.mirror} --check, which names all that it lacks"):
        sources.fetch_source(
            world.lock.sources["engine"], locations.read_mirrors([str(world.mirror)], {}, {}), tmp_path / "c"
        )
    with pytest.raises(Trouble, match=rf"wanted tiny-2\.0\S+\. Try: invoke mirror {world.mirror} --check"):
        wheels.fetch_wheel(wheel, locations.read_mirrors([str(world.mirror)], {}, {}), tmp_path / "c")
    assert world.run() == OK
    assert world.run(check=True) == OK
    new_text = (world.folder / "lock.toml").read_text()
    (world.folder / "lock.toml").write_text(text)
    assert world.run(check=True) == OK, "what the lock before needs is still there"
    (world.folder / "lock.toml").write_text(new_text)
    assert world.run(prune=True) == OK
    assert TINY not in world.index().files
    assert "tiny-1.0" not in (world.mirror / "wheels/inner/tiny/index.html").read_text()
    assert world.run(check=True) == OK


def test_stacks_and_targets(bare: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert bare.run(stack="two", target="cp312-x86_64") == OK
    index = bare.index()
    assert [each.name for each in index.sources] == ["engine"]
    assert (index.stacks, index.targets) == (("two",), ("cp312-x86_64",))
    assert not [path for path in index.files if "outer" in path or path.endswith("aarch64.whl")]
    assert bare.run(check=True) == OK, "what a mirror was not made for is no finding"
    assert bare.run(check=True, stack="one,two") == VERDICT
    assert "source outer: the mirror does not have the locked commit" in capsys.readouterr().err
    with pytest.raises(Trouble) as caught:
        bare.run(stack="two,three", target="cp313-x86_64")
    assert [str(problem) for problem in caught.value.problems] == [
        "--stack: no such stack in the lock — found three, wanted one or two",
        "--target: no wheels for it in the lock — found cp313-x86_64, wanted cp311-x86_64 or cp312-x86_64",
    ]


def test_a_dry_run_writes_nothing(bare: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert bare.run(dry_run=True) == OK
    said = capsys.readouterr().out
    assert f"would fetch {ENGINE}\n" in said
    assert f"would fetch {TINY}\n" in said
    assert not bare.mirror.exists()


def test_only_a_mirror_is_written_into(bare: World, tmp_path: Path) -> None:
    bare.mirror.mkdir()
    (bare.mirror / "thesis.tex").touch()
    with pytest.raises(Trouble, match=r"is neither empty nor a mirror"):
        bare.run(prune=True)
    assert [path.name for path in bare.mirror.iterdir()] == ["thesis.tex"]
    for place in ("https://host.invalid/mirror", " "):
        with pytest.raises(Trouble, match="is written into a directory"):
            verb.mirror(bare.flags, place)
    with pytest.raises(Trouble, match="there is no such directory"):
        verb.mirror(bare.flags, str(tmp_path / "none"), check=True)
    with pytest.raises(Trouble, match="does not go with --prune or --dry-run"):
        bare.run(check=True, prune=True)
    with pytest.raises(Trouble, match=r"is no mirror: it has no mirror\.json"):
        bare.run(check=True)


def test_a_second_writer_is_refused(world: World) -> None:
    with (world.mirror / ".incomplete").open("w") as marker:
        fcntl.flock(marker, fcntl.LOCK_EX)
        with pytest.raises(Trouble, match="another invoke mirror is writing there"):
            world.run()


def test_nothing_is_written_through_a_symbolic_link(world: World, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (world.mirror / "git/host.invalid/owner").rename(tmp_path / "moved")
    (world.mirror / "git/host.invalid/owner").symlink_to(tmp_path / "moved")
    moved = snapshot(tmp_path / "moved")
    assert world.run() == TROUBLE, "right files in another place are not in the mirror"
    assert snapshot(tmp_path / "moved") == moved
    (world.mirror / "git/host.invalid/owner").unlink()
    (tmp_path / "moved").rename(world.mirror / "git/host.invalid/owner")
    for path in ("wheels/inner/tiny", "git/host.invalid/owner"):
        shutil.rmtree(world.mirror / path)
        (world.mirror / path).symlink_to(tmp_path / "outside")
        try:
            assert world.run() == TROUBLE
        except Trouble as trouble:
            assert "is no plain folder" in str(trouble)  # noqa: PT017 - either way is right, writing outside is not
        assert list((tmp_path / "outside").iterdir()) == []
        assert world.run(check=True) == VERDICT
        (world.mirror / path).unlink()
        assert world.run() == OK


CASES = json.loads((ROOT / "tests/cases/fetch/mirror/hostile.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=[case["why"] for case in CASES])
def test_a_hostile_index_is_refused(case: dict[str, Any], mirrored: Path) -> None:
    document = json.loads((mirrored / "mirror/mirror.json").read_text())
    index.parse_mirror_index(json.dumps(document).encode(), "mirror.json")
    document.update(case["change"])
    with pytest.raises(Trouble) as caught:
        index.parse_mirror_index(json.dumps(document).encode(), "mirror.json")
    assert case["says"] in str(caught.value)


def test_an_index_of_a_version_with_single_files_and_packages_is_read(world: World) -> None:
    document = json.loads((world.mirror / "mirror.json").read_text())
    document |= {"archives": {"files/host.invalid/a": "x"}, "packages": {"debian-12/cuda": {}}}
    (world.mirror / "packages/host.invalid").mkdir(parents=True)
    (world.mirror / "packages/host.invalid/Packages").write_bytes(b"")
    record = {"size": 0, "hash": filetree.sri(hashlib.sha256().digest())}
    document["files"]["packages/host.invalid/Packages"] = record
    (world.mirror / "mirror.json").write_text(json.dumps(document))
    assert world.run(check=True) == OK
    assert world.run() == OK
    assert world.run(prune=True) == OK
    assert not (world.mirror / "packages").exists()
    assert {"archives", "packages"}.isdisjoint(json.loads((world.mirror / "mirror.json").read_text()))


def test_an_index_that_cannot_be_believed_is_made_anew(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads((world.mirror / "mirror.json").read_text())
    document["files"]["wheels/../../x"] = document["files"][TINY]
    (world.mirror / "mirror.json").write_text(json.dumps(document))
    with pytest.raises(Trouble, match="is no path inside a mirror"):
        world.run(check=True)
    assert world.run() == OK
    assert "everything is looked at anew" in capsys.readouterr().out
    assert world.run(check=True) == OK
    assert not (world.folder.parent / "x").exists()


RAW = [
    b"",
    b"\xff",
    b"[" * 100_000,
    b"{}",
    b"[]",
    b"null",
    b'{"format": 1}',
    b'{"format": 1, "format": 1}',
    b'{"format": ' + b"9" * 5000 + b"}",
]


@pytest.mark.parametrize("data", RAW, ids=range(len(RAW)))
def test_bytes_that_are_no_index(data: bytes) -> None:
    with pytest.raises(Trouble):
        index.parse_mirror_index(data, "mirror.json")


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from(["git/a/b", "../x", filetree.sri(bytes(32)), "size", "hash"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["git/a", "size", "hash", "name", "url", "rev", "/etc/x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["lock", "stacks", "targets", "sources", "files", "archives", "more"]), values, max_size=5
    )
)
def test_any_index_is_read_or_refused(changes: dict[str, object]) -> None:
    document = {"format": 1, "lock": "", "stacks": [], "targets": [], "sources": [], "files": {}, **changes}
    try:
        index = parse_mirror_index(json.dumps(document).encode(), "mirror.json")
    except Trouble:
        return
    assert all(is_inside(path) for path in index.files)
    assert parse_mirror_index(render_mirror_index(index).encode(), "again") == index


@settings(deadline=None)
@given(
    st.text(max_size=30)
    | st.lists(
        st.sampled_from(["git", "files", "wheels", "..", ".", "", "a", "\0", "\n", "\ud800", "/"]), max_size=5
    ).map("/".join)
)
def test_a_path_of_an_index_stays_inside(path: str) -> None:
    if index.is_inside(path):
        assert os.path.normpath(f"/mirror/{path}") == f"/mirror/{path}"


def test_a_file_that_grows_while_it_is_read_is_not_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "endless").symlink_to("/dev/zero")
    with pytest.raises(Trouble, match="cannot be read"):
        index.measure(tmp_path, "endless")
    with (tmp_path / "sparse").open("wb") as stream:
        stream.truncate(1 << 30)
    assert index.measure(tmp_path, "sparse", 10).size == index.CHUNK


def test_a_shallow_repository_is_no_source_of_a_mirror(
    bare: World, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shallow = tmp_path / "shallow.git"
    words = ("git", "clone", "--quiet", "--bare", "--depth=1", "--branch=main", f"file://{bare.server.engine}", shallow)
    assert process.run_program(words).code == 0
    shutil.rmtree(bare.server.engine)
    shallow.rename(bare.server.engine)
    assert bare.run(stack="two") == TROUBLE
    assert "source engine: " in capsys.readouterr().err


def test_wheels_that_were_fetched_before_are_not_fetched_again(bare: World, tmp_path: Path) -> None:
    found = locations.read_mirrors([f"index:inner={bare.folder}/made"], {}, {})
    for wheel in (*bare.lock.stacks["two"].wheels["cp312-x86_64"], *bare.lock.tools["uv"]):
        wheels.fetch_wheel(wheel, found, tmp_path / "cache/deepep-bootstrap")
    shutil.rmtree(bare.folder / "made")
    (bare.folder / "made").mkdir()
    assert bare.run(stack="two") == OK
    assert bare.run(check=True) == OK
    assert len(list((tmp_path / "cache").rglob("*.whl"))) == 4, "the cache keeps what it had"
