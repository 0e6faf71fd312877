"""A hostile user of the hosts: folders and files made beforehand, or changed, where others look for their own."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepep_bootstrap.cli.commands.export import export
from deepep_bootstrap.cli.commands.verify import verify
from deepep_bootstrap.core.errors import OK, TROUBLE, VERDICT, Trouble
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.prefix import access, generations, history, modulefiles
from deepep_bootstrap.prefix.archive import index
from deepep_bootstrap.prefix.archive.stream import read_index
from deepep_bootstrap.prefix.contents import rollback_target
from deepep_bootstrap.prefix.gc import Garbage
from deepep_bootstrap.prefix.generations import PrefixHandle
from tests.support import module_systems
from tests.support import modules as support
from tests.support.build import RECIPES, run_bash
from tests.support.e2e import Engine
from tests.support.paths import ROOT
from tests.support.store import RECORD, Prefix, entry_name

pytest_plugins = ["tests.support.lab", "tests.support.e2e", "tests.support.store"]
pytestmark = pytest.mark.usefixtures("namespaces")

SYSTEMS = ("lmod", "environment-modules", "")
MALLORY = "nobody"
"""Who attacks; the user of the module is root, the worst case."""


class Machine:
    """A prefix with DeepEP V2, outside /tmp, and sessions in which /tmp, /var/tmp and /dev/shm are new and empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.chmod(0o755)
        self.record = support.v2_record(str(path))
        files = modulefiles.render_offer(support.offer(str(path), self.record), support.templates())
        support.write(path / "generations/1", files)
        (path / "current").symlink_to("generations/1")
        (path / "modulefiles").symlink_to("current/modulefiles")
        (path / "session").mkdir()

    def load(self, system: str, before: str = "", after: str = "") -> module_systems.Session:
        """Load the module, or read env.sh, after `before`; the environment is saved as `loaded`."""
        script = "for folder in /tmp /var/tmp /dev/shm; do mount -t tmpfs -o mode=1777 tmpfs $folder; done\n"
        script += f"{before}\n"
        use = f"module use {self.path}/modulefiles; module load deepep" if system else f". {self.path}/current/env.sh"
        script += f"{use} || echo refused\nsnapshot loaded\n{after}\n"
        return module_systems.run(script, self.path / "session", system=system)


@pytest.fixture
def machine(programs: None) -> Iterator[Machine]:
    path = Path(tempfile.mkdtemp(prefix="deepep-hostile-", dir="/run"))
    yield Machine(path)
    shutil.rmtree(path)


PLANTED = f"""
as() {{ runuser -u {MALLORY} -- "$@"; }}
digest=$1
as mkdir -m 777 /tmp/deepep-jit-0-$digest /tmp/deepep-0.0000000000 /tmp/deepep-0.AAAAAAAAAA
as mkdir -m 700 /tmp/deepep-0.BBBBBBBBBB
as mkdir -p /tmp/deepep-0.CCCCCCCCCC/jit-$digest /tmp/mine/jit-$digest
as touch /tmp/mine/jit-$digest/planted.so /tmp/deepep-jit-0-$digest/planted.so /tmp/deepep-0.DDDDDDDDDD
as ln -s /tmp/mine /tmp/deepep-0.EEEEEEEEEE
as ln -s /root /tmp/deepep-0.FFFFFFFFFF
mkdir -m 755 /tmp/deepep-0.GGGGGGGGGG   # root's own, but open to others
"""
WITNESS = """
echo "owner $(stat -c '%u %a %F' -- "$EP_JIT_CACHE_DIR")"
echo "above $(stat -c '%u %a %F' -- "${EP_JIT_CACHE_DIR%/*}")"
echo "holds $(ls -A -- "$EP_JIT_CACHE_DIR")."
"""


@pytest.mark.sample
@pytest.mark.parametrize("system", SYSTEMS)
def test_compiled_kernels_go_to_no_folder_that_somebody_else_made(machine: Machine, system: str) -> None:
    digest = machine.record.deepep[:12]
    planted = PLANTED.replace("$1", digest)
    again = machine.load(system, planted, WITNESS + "first=$EP_JIT_CACHE_DIR\n" + reload(machine, system))
    found = again.environments["loaded"]["EP_JIT_CACHE_DIR"]
    assert again.out.splitlines()[:3] == ["owner 0 700 directory", "above 0 700 directory", "holds ."], again.err
    assert found.startswith("/tmp/deepep-0.")
    assert found.rpartition("/")[2] == f"jit-{digest}"
    assert again.out.splitlines()[3:] == ["the same folder"], "jobs of one user share it"


def reload(machine: Machine, system: str) -> str:
    """Return what loads once more and says whether the same folder comes out."""
    more = "module purge; module load deepep" if system else f". {machine.path}/current/env.sh"
    return f'{more}; [ "$EP_JIT_CACHE_DIR" = "$first" ] && echo "the same folder"'


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize(
    "before",
    [
        pytest.param("chmod 777 /tmp", id="others may rename what is there"),
        pytest.param(f"chown {MALLORY} /tmp", id="it belongs to somebody else"),
        pytest.param("mount -o remount,ro /tmp", id="read-only"),
    ],
)
def test_a_place_that_is_not_safe_is_passed_over(machine: Machine, system: str, before: str) -> None:
    loaded = machine.load(system, before, WITNESS)
    assert loaded.environments["loaded"]["EP_JIT_CACHE_DIR"].startswith("/var/tmp/deepep-0."), loaded.err
    assert loaded.out.splitlines()[0] == "owner 0 700 directory"


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_network_filesystem_is_passed_over(machine: Machine, system: str) -> None:
    # No network filesystem can be had here: stat says of /tmp what it says of NFS.
    fake = f"""
mkdir {machine.path}/bin
cat >{machine.path}/bin/stat <<'END'
#!/bin/sh
case "$*" in *"/tmp/"*) case "$*" in *"/var/"*) ;; *) echo 6969; exit ;; esac ;; esac
exec /usr/bin/stat "$@"
END
chmod 755 {machine.path}/bin/stat
export PATH={machine.path}/bin:$PATH
"""
    loaded = machine.load(system, fake)
    assert loaded.environments["loaded"]["EP_JIT_CACHE_DIR"].startswith("/var/tmp/deepep-0."), loaded.err


@pytest.mark.sample
@pytest.mark.parametrize("system", SYSTEMS)
def test_without_any_place_the_module_is_not_loaded(machine: Machine, system: str) -> None:
    loaded = machine.load(system, "chmod 777 /tmp /var/tmp /dev/shm")
    assert "refused" in loaded.out
    assert f"no folder on {os.uname().nodename} for compiled kernels" in loaded.err
    assert "EP_JIT_CACHE_DIR" not in loaded.environments["loaded"]
    if system:
        assert "DEEPEP_STACK" not in loaded.environments["loaded"]


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_site_names_another_place(machine: Machine, system: str) -> None:
    place = "mkdir -m 700 /dev/shm/fast; export DEEPEP_CACHE_BASE=/dev/shm/fast"
    loaded = machine.load(system, place)
    assert loaded.environments["loaded"]["EP_JIT_CACHE_DIR"].startswith("/dev/shm/fast/deepep-0."), loaded.err
    place = "mkdir -m 777 /dev/shm/fast; export DEEPEP_CACHE_BASE=/dev/shm/fast"
    loaded = machine.load(system, place)
    assert loaded.environments["loaded"]["EP_JIT_CACHE_DIR"].startswith("/tmp/deepep-0."), loaded.err
    assert "nothing can be kept in DEEPEP_CACHE_BASE=/dev/shm/fast" in loaded.err


# Entries, and the record of their files.

NAME, BASE = entry_name("deepep"), entry_name("nvshmem")


def flags(prefix: Prefix, **more: object) -> Flags:
    return Flags(root=ROOT, prefix=str(prefix.path), **more)


def record_anew(folder: Path) -> None:
    """Make the record of an entry again, as whoever changed a file would."""
    (folder / "files.sha256").unlink()
    done = run_bash(RECORD, {"PREFIX": str(folder.parent.parent)}, str(folder))
    assert done.returncode == 0, done.stderr


def change(folder: Path) -> None:
    """Change a file of an entry and its record with it."""
    file = folder / "lib/content"
    file.chmod(0o644)
    file.write_text("import os; os.system('id')\n")
    file.chmod(0o444)
    record_anew(folder)


def give_away(path: Path) -> None:
    shutil.chown(path, MALLORY)


@pytest.mark.parametrize(
    ("path", "attack", "said"),
    [
        ("lib", lambda path: path.chmod(0o777), "lib: may be written"),
        ("", lambda path: path.chmod(0o777), ".: may be written"),
        ("lib/content", give_away, f"lib/content: belongs to another user than the entry, {MALLORY}"),
        ("lib", give_away, f"lib: belongs to another user than the entry, {MALLORY}"),
        ("", change, "files.sha256: is not the record that generation 1 names: made anew since then"),
    ],
)
def test_a_changed_entry_is_named_and_not_exported(
    prefix: Prefix,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    path: str,
    attack: Callable[[Path], object],
    said: str,
) -> None:
    folder = prefix.entry(NAME, [BASE])
    prefix.entry(BASE)
    prefix.offer(NAME)
    assert verify(flags(prefix), store=True) == OK
    assert "every file is as published" in capsys.readouterr().out
    attack(folder / path)
    assert verify(flags(prefix), store=True) == VERDICT
    assert said in capsys.readouterr().out
    with pytest.raises(Trouble, match="is not as it was published"):
        export(flags(prefix), out=str(tmp_path / "a.tar"))
    assert not (tmp_path / "a.tar").exists()


@pytest.mark.sample
def test_a_record_made_anew_does_not_become_the_right_one(prefix: Prefix) -> None:
    folder = prefix.entry(NAME)
    prefix.offer(NAME)
    change(folder)
    prefix.offer(NAME, module="deepep/2-v1")
    (verdict,) = history.hold_to_generations(history.rehash(prefix.transport, prefix.place, [NAME]), prefix.look())
    assert (verdict.state, verdict.generation) == ("changed", 2)
    # What was built anew has a new one, from the generation on that offers it.
    assert prefix.look().records([NAME], built=[NAME]) == {NAME: prefix.look().entries[NAME].record}


@pytest.mark.sample
def test_a_prefix_of_an_earlier_version_works_and_says_what_it_lacks(
    prefix: Prefix, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix.keeps_records = False
    folder = prefix.entry(NAME)
    prefix.offer(NAME)
    assert verify(flags(prefix), store=True) == OK
    assert "For 1 of 1 entries only the record in themselves says so" in capsys.readouterr().out
    assert export(flags(prefix), out=str(tmp_path / "a.tar")) == OK
    assert "no generation keeps the sum of the record of " in re.sub(r"\s+", " ", capsys.readouterr().out)
    with (tmp_path / "a.tar").open("rb") as file:
        found = index.parse_index(read_index(file, "a.tar"), "a.tar")
    assert found.records == {NAME: prefix.look().entries[NAME].record}, "what is signed says it all the same"
    assert found.records == {NAME: index.record_sum(found.trees[0])}
    # The next generation keeps it.
    prefix.keeps_records = True
    prefix.offer(NAME, module="deepep/2-v1")
    change(folder)
    assert verify(flags(prefix), store=True) == VERDICT


@pytest.mark.sample
def test_an_archive_whose_files_are_not_those_of_its_generation_is_refused(prefix: Prefix, tmp_path: Path) -> None:
    prefix.entry(NAME)
    prefix.offer(NAME)
    assert export(flags(prefix), out=str(tmp_path / "a.tar")) == OK
    with (tmp_path / "a.tar").open("rb") as file:
        text = read_index(file, "a.tar")
    values = json.loads(text)
    values["generation"]["records"][NAME] = "0" * 64
    with pytest.raises(Trouble, match="its files are not those that its generation recorded"):
        index.parse_index(json.dumps(values).encode(), "a.tar")


# Who may change a prefix.

PLACES = {
    "a folder above": "..",
    "the prefix": ".",
    "the store": "store",
    "an entry": f"store/{NAME}",
    "the generations": "generations",
    "modulefiles": "generations/1/modulefiles",
    "a modulefile": "generations/1/modulefiles/deepep/1",
}


def refused(prefix: Prefix) -> set[str]:
    """Try everything that writes in the prefix; return what each was told. Nothing may have changed after it."""
    before = {(str(path), path.lstat().st_mtime_ns) for path in prefix.path.rglob("*")}
    holdings = prefix.look()
    target = rollback_target(holdings, 1)
    importing = ("lib.sh", *(f"prefix/lib/{name}.sh" for name in ("owner", "lock", "share", "trust", "files")))
    env = {"PREFIX": str(prefix.path), "TOKEN": "t", "ENTRIES": NAME}
    script = "\n".join(RECIPES[name] for name in (*importing, "prefix/import.sh"))
    tries: tuple[Callable[[], object], ...] = (
        lambda: generations.make_prefix(prefix.transport, prefix.place),
        lambda: prefix.offer(NAME),
        lambda: history.roll_back(prefix.transport, prefix.place, holdings, target),
        lambda: history.collect(prefix.transport, prefix.place, holdings, Garbage((), ())),
    )
    said = {run_bash(script, env, "receive").stderr}
    for attempt in tries:
        with pytest.raises(Trouble) as caught:
            attempt()
        said.add(str(caught.value))
    assert {(str(path), path.lstat().st_mtime_ns) for path in prefix.path.rglob("*")} == before
    return said


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", ["everybody may write", "somebody else's"])
def test_a_prefix_that_somebody_else_may_change_is_refused_and_named(
    prefix: Prefix, capsys: pytest.CaptureFixture[str], place: str, how: str
) -> None:
    prefix.entry(NAME)
    prefix.offer(NAME)
    prefix.offer(NAME, module="deepep/2-v1")
    path = prefix.path / PLACES[place].replace("/1/", "/2/")
    path = path.parent.parent if place == "a folder above" else path
    assert access.find_unsafe(prefix.transport, prefix.place) == ()
    mode = path.stat().st_mode
    path.chmod(0o777) if how == "everybody may write" else give_away(path)
    what = "may be written by everybody" if how == "everybody may write" else f"belongs to {MALLORY}"
    try:
        for said in refused(prefix):
            assert f"{path} {what}" in said
        assert verify(flags(prefix), store=True) == VERDICT
        assert f"{path}: {what}" in capsys.readouterr().err
        (found,) = access.find_unsafe(prefix.transport, prefix.place)
        subprocess.run(shlex.split(found.fix.partition(", or")[0]), check=True)
        assert access.find_unsafe(prefix.transport, prefix.place) == ()
    finally:
        path.chmod(mode)
        os.chown(path, 0, -1)


@pytest.mark.sample
def test_who_may_own_a_prefix(tmp_path_factory: pytest.TempPathFactory, prefix: Prefix) -> None:
    def found(user: str = "") -> list[str]:
        return [each.what for each in access.find_unsafe(prefix.transport, PrefixHandle(*place, user))]

    place = (prefix.place.host, str(prefix.path), RECIPES)
    give_away(prefix.path)
    assert found() == [f"belongs to {MALLORY}"]
    assert found(MALLORY) == [], "the build user may own it"
    os.chown(prefix.path, 0, 0)
    prefix.path.chmod(0o2775)
    assert found() == [], "its owner gave its group the right to write in it"
    (prefix.path / "store").chmod(0o2775)
    assert found() == []
    shutil.chown(prefix.path / "store", group="nogroup")
    assert [what.partition(" (")[0] for what in found()] == ["may be written by the group nogroup"]
    os.chown(prefix.path / "store", 0, 0)
    # A sticky folder above, as /tmp is, is fine; a link that somebody else can point elsewhere is not.
    folder = Path(tempfile.mkdtemp(dir="/run"))
    try:
        folder.chmod(0o1777)
        (folder / "link").symlink_to(prefix.path)
        place = (prefix.place.host, str(folder / "link"), RECIPES)
        assert found() == []
        os.lchown(folder / "link", 65534, -1)
        assert found() == [f"belongs to {MALLORY}"]
    finally:
        shutil.rmtree(folder)


@pytest.mark.e2e
def test_no_verb_takes_a_prefix_that_a_user_made(engine: Engine) -> None:
    made = engine.lab.nsenter("n001", "cd /shared && runuser -u builder -- mkdir pre && echo 0123 >pre/.id")
    assert made.returncode == 0, made.stderr
    engine.prefix = "/shared/pre"
    for verb in ("plan", "bootstrap"):
        ended = engine.run(verb)
        assert ended.code == TROUBLE, ended.text
        assert "/shared/pre: belongs to builder" in ended.text
        assert "chown -h root /shared/pre, or build_user=builder in the hosts file" in ended.text
    assert {path.name for path in engine.on_disk.iterdir()} == {".id"}
    assert engine.lab.nsenter("n001", "ls /etc/profile.d/zz-deepep.sh").returncode != 0
    ended = engine.run("doctor")
    assert ended.code == VERDICT, ended.text
    assert "blocking: prefix-owner on n001" in ended.text
