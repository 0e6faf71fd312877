"""The record of an entry's files, what is found when one was touched, rollback, and a prefix that two administrators
share."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deepep_bootstrap.bootstrap import build
from deepep_bootstrap.cli.commands.verify import verify
from deepep_bootstrap.core.errors import OK, VERDICT, Trouble
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.prefix import generations, history
from deepep_bootstrap.prefix.contents import rollback_target
from deepep_bootstrap.prefix.generations import Content
from deepep_bootstrap.prefix.history import FileChange, differences
from tests.support.build import BUILD_SMALL, PUBLISH, ROOT, environment, run_bash, script, values
from tests.support.sshd import with_accounts
from tests.support.store import Prefix, entry_name

pytest_plugins = ["tests.support.store"]

NAME, OTHER = entry_name("deepep"), entry_name("nvshmem")
ODD = "a name\nwith \\ everything -> in it"


def changes(prefix: Prefix, name: str = NAME) -> list[tuple[str, str]]:
    (verdict,) = history.rehash(prefix.transport, prefix.place, [name])
    assert (verdict.state == "same") == (not verdict.changes)
    return [(change.path, change.what) for change in verdict.changes]


def flip(path: Path) -> None:
    mode = path.stat().st_mode
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    path.chmod(mode)


def move(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def relink(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


@pytest.mark.parametrize(
    ("path", "touch", "expected"),
    [
        ("lib/content", flip, [("lib/content", "changed")]),
        ("manifest.json", flip, [("manifest.json", "changed")]),
        ("lib/content", Path.unlink, [("lib/content", "missing")]),
        ("lib/content", move, [("lib/content", "missing"), ("lib/elsewhere", "new")]),
        ("lib/content", lambda path: path.chmod(0o555), [("lib/content", "may be run")]),
        ("lib/content", lambda path: path.chmod(0o644), [("lib/content", "may be written")]),
        ("lib/content", lambda path: path.chmod(0o400), [("lib/content", "may not be read by everybody")]),
        ("lib/content.so", relink, [("lib/content.so", "changed")]),
        ("lib/content.so", Path.unlink, [("lib/content.so", "missing")]),
        ("lib/new.py", Path.touch, [("lib/new.py", "may be written, new")]),
        ("lib/__pycache__", Path.mkdir, [("lib/__pycache__", "new")]),
        ("lib/pipe", os.mkfifo, [("lib/pipe", "new")]),
        ("lib", lambda path: path.chmod(0o777), [("lib", "may be written")]),
        ("lib", lambda path: path.chmod(0o750), [("lib", "may not be read by everybody")]),
        (".", lambda path: path.chmod(0o1777), [(".", "may be written")]),
        ("files.sha256", lambda path: path.chmod(0o666), [("files.sha256", "may be written")]),
        ("files.sha256", flip, [("files.sha256", "changed, so it does not tell what else is")]),
    ],
)
def test_whatever_was_touched_is_named(
    prefix: Prefix, path: str, touch: Callable[[Path], object], expected: list[tuple[str, str]]
) -> None:
    folder = prefix.entry(NAME)
    prefix.entry(OTHER)
    assert changes(prefix) == []
    touch(folder / path)
    found = changes(prefix)
    what = expected[0][1].removeprefix("may be written, ")
    assert [each for each in found if each[0] == expected[0][0]] == [(expected[0][0], what)]
    assert {path for path, _ in found} >= {path for path, _ in expected}
    assert changes(prefix, OTHER) == []


def test_names_with_everything_in_them(prefix: Prefix) -> None:
    folder = prefix.entry(NAME)
    (folder / ODD).write_text("x")
    (folder / "-n").write_text("x")
    (folder / "files.sha256").unlink()
    done = run_bash(
        script("lib.sh", "prefix/lib/files.sh", extra='record_files "$1" "$2"'),
        {},
        str(folder),
        str(prefix.path / "work"),
    )
    assert done.returncode == 0, done.stderr
    assert changes(prefix) == []
    by_hand = subprocess.run(
        ["sha256sum", "-c", "--quiet", "files.sha256"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert by_hand.returncode == 0, by_hand.stdout + by_hand.stderr
    flip(folder / ODD)
    assert changes(prefix) == [(ODD.replace("\\", "\\\\").replace("\n", "\\n"), "changed")]


def test_the_group_may_be_given_rights_without_a_difference(prefix: Prefix) -> None:
    folder = prefix.entry(NAME)
    subprocess.run(["chmod", "-R", "g+w", folder], check=True)
    assert changes(prefix) == []


def test_entries_without_a_record_and_entries_that_are_gone(prefix: Prefix, capsys: pytest.CaptureFixture[str]) -> None:
    record = prefix.entry(NAME) / "files.sha256"
    flags = Flags(root=ROOT, prefix=str(prefix.path))
    prefix.offer(NAME)
    assert verify(flags, store=True) == OK
    record.unlink()
    verdicts = history.rehash(prefix.transport, prefix.place, [NAME, OTHER])
    assert [(verdict.name, verdict.state) for verdict in verdicts] == [(NAME, "unrecorded"), (OTHER, "missing")]
    assert history.rehash(prefix.transport, prefix.place, []) == ()
    assert verify(flags, store=True) == VERDICT
    said = capsys.readouterr().err
    assert f"{record.parent}: its files.sha256 is gone" in said
    assert (
        f"generation 1 (deepep/1-v1) needs it. Try: rm -rf {record.parent} when no job uses it, then invoke bootstrap"
        in said
    )


def test_lines_of_a_record_are_told_by_path() -> None:
    lost = ["a" * 64 + "  f", "# executable g", "# link l -> x", "# folder d"]
    found = ["b" * 64 + "  f", "# link l -> y", "# special d", "# setuid g"]
    assert list(differences(lost, found)) == [
        FileChange("d", "changed"),
        FileChange("f", "changed"),
        FileChange("g", "changes who runs it, may not be run any more"),
        FileChange("l", "changed"),
    ]


def test_publishing_records_files_and_size(prefix: Prefix, tmp_path: Path) -> None:
    small = script(*PUBLISH, extra=BUILD_SMALL)
    done = run_bash(small, environment(prefix.path, tmp_path / "s", "one"))
    assert done.returncode == 0, done.stderr
    entry = prefix.path / "store/e-small-1"
    assert json.loads((entry / "manifest.json").read_text())["bytes"] == len("made by one\n")
    assert changes(prefix, "e-small-1") == []
    assert (entry / "files.sha256").stat().st_mode & 0o777 == 0o444
    assert not list((tmp_path / "s").glob("files-*"))


# Rollback


def test_rollback_switches_one_link_says_so_and_does_nothing_else(prefix: Prefix) -> None:
    for name in (NAME, OTHER):
        prefix.entry(name)
    prefix.offer(NAME)
    prefix.offer(OTHER)
    before = sorted(
        (str(path), path.lstat().st_mtime_ns)
        for path in prefix.path.rglob("*")
        if path.name not in {"current", ".rolled-back"} and path.is_file()
    )
    holdings = prefix.look()
    history.roll_back(prefix.transport, prefix.place, holdings, rollback_target(holdings, 0))
    assert os.readlink(prefix.path / "current") == "generations/1"
    after = sorted(
        (str(path), path.lstat().st_mtime_ns)
        for path in prefix.path.rglob("*")
        if path.name not in {"current", ".rolled-back"} and path.is_file()
    )
    assert before == after
    assert (prefix.path / ".rolled-back").read_text().startswith("2\t1\t")
    assert prefix.numbers() == ["1", "2"]
    assert prefix.offer(OTHER) == 3, "numbers go on"


@pytest.mark.parametrize("what", ["stale", "absent", "missing"])
def test_rollback_looks_again_under_the_lock(prefix: Prefix, what: str) -> None:
    for name in (NAME, OTHER):
        prefix.entry(name)
    prefix.offer(NAME)
    prefix.offer(OTHER)
    holdings = prefix.look()
    if what == "stale":
        prefix.offer(NAME)
    else:
        shutil.rmtree(prefix.path / ("generations/1" if what == "absent" else f"store/{NAME}"))
    told = {
        "stale": "generation 3 is current",
        "absent": "generation 1 was removed meanwhile",
        "missing": f"removed meanwhile — found {NAME}",
    }
    current = os.readlink(prefix.path / "current")
    with pytest.raises(Trouble, match=told[what]):
        history.roll_back(prefix.transport, prefix.place, holdings, rollback_target(holdings, 1))
    assert os.readlink(prefix.path / "current") == current


# Two administrators


ADMINS = ("gen-admin-a", "gen-admin-b")
GROUP = "gen-hpc"


@dataclass(frozen=True)
class Shared:
    """A prefix shared by a group, and where its administrators exist: a command prefix, and the number of each name."""

    prefix: Path
    within: list[str]
    numbers: dict[str, int]

    def run(
        self, name: str, recipes: tuple[str, ...], env: dict[str, str], data: bytes = b"", extra: str = ""
    ) -> dict[str, str]:
        """Run recipes as that user (nobody: root) and return what they print; they must succeed."""
        done = self.ask(name, recipes, env, data, extra)
        assert done.returncode == 0, f"{name}: {done.stderr}"
        return values(done.stdout)

    def ask(
        self, name: str, recipes: tuple[str, ...], env: dict[str, str], data: bytes = b"", extra: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run recipes as that user, whatever comes of it."""
        return run_bash(script(*recipes, extra=extra), env, user=name, data=data, within=self.within)


@pytest.fixture
def shared() -> Iterator[Shared]:
    """Two users with primary groups of their own, both in one more group, and a prefix that this group shares."""
    if os.geteuid() != 0:
        pytest.skip("needs root to make users")
    folder = Path(tempfile.mkdtemp(prefix="shared-"))
    folder.chmod(0o755)
    # Numbers of this process alone, as in test_sudo.py.
    numbers = {name: 20_000_000 + 3 * os.getpid() + place for place, name in enumerate((*ADMINS, GROUP))}
    accounts = [f"{name}:*:{numbers[name]}:{numbers[name]}::/nonexistent:/bin/bash" for name in ADMINS]
    groups = [f"{name}:x:{number}:{','.join(ADMINS) if name == GROUP else ''}\n" for name, number in numbers.items()]
    try:
        within = with_accounts(folder, accounts, {"group": Path("/etc/group").read_text() + "".join(groups)})
        prefix = folder / "prefix"
        prefix.mkdir()
        os.chown(prefix, -1, numbers[GROUP])
        prefix.chmod(0o2775)
        yield Shared(prefix, within, numbers)
    finally:
        shutil.rmtree(folder)


@pytest.mark.usefixtures("programs")
def test_a_second_administrator_of_the_group_can_do_everything(shared: Shared) -> None:
    first, second = ADMINS
    prefix, scratch = shared.prefix, shared.prefix.parent

    def run(name: str, recipes: tuple[str, ...], extra: str = "", data: bytes = b"", **more: str) -> dict[str, str]:
        return shared.run(
            name, recipes, {"PREFIX": str(prefix), "TOKEN": name, "HEARTBEAT": "0.2", **more}, data, extra
        )

    def publish(name: str, entry: str) -> None:
        place = scratch / name
        shutil.rmtree(place, ignore_errors=True)
        env = environment(prefix, place, name)
        for path in (place, place / "bin"):
            os.chown(path, shared.numbers[name], -1)
        # A build whose tools copy modes, groups and a folder that nobody may write.
        hook = f"install -d -m 755 -g {name} {prefix}/store/.tmp-{entry}-{name}/copied"
        found = run(name, PUBLISH, BUILD_SMALL, **{**env, "ENTRY": entry, "HOOK_BUILD": hook})
        assert found["state"] == "published"

    def offer(name: str, base: int, entry: str) -> None:
        manifest = json.dumps({"generation": 0, "offer": {"stacks": {"v1": {"deepep": entry}}}}, indent=2).encode()
        data = b"".join(
            generations.tar_files([Content("manifest.json", manifest), Content("modulefiles/deepep/1", b"x")])
        )
        assert run(name, generations.OFFER, data=data, BASE=str(base), ENTRIES=entry)["state"] == "published"

    for name in ADMINS:
        run(name, generations.INIT)
    publish(first, NAME)
    offer(first, 0, NAME)
    publish(second, OTHER)
    offer(second, 1, OTHER)
    assert run(first, generations.ROLLBACK, BASE="2", TO="1", ENTRIES=NAME)["state"] == "switched"
    assert run(second, generations.ROLLBACK, BASE="1", TO="2", ENTRIES=OTHER)["state"] == "switched"
    run(second, generations.LOGS, RUN="two", data=b"".join(generations.tar_files([])))
    for folder in (path.stat() for path in prefix.rglob("*") if path.is_dir()):
        assert (folder.st_gid, folder.st_mode & 0o2775) == (shared.numbers[GROUP], 0o2775), folder
    assert not [path for path in (prefix / "store").rglob("*") if path.is_file() and path.stat().st_mode & 0o222]
    # What a killed build of the first one leaves, the second one can take away, and what the first one published.
    left = run_bash(
        f"umask 002; mkdir {prefix}/store/.tmp-{OTHER}-x && touch $_/f", {}, user=first, within=shared.within
    )
    assert left.returncode == 0, left.stderr
    done = run(second, generations.GC, SEEN="2: 1 2", DROP="1", ENTRIES=NAME)
    assert (done["state"], done["removed"], done["dropped"]) == ("collected", NAME, "1")
    assert {path.name for path in (prefix / "store").iterdir()} == {OTHER}
    assert {path.name for path in (prefix / "generations").iterdir()} == {"2"}


@pytest.mark.usefixtures("programs")
def test_a_prefix_of_one_administrator_stays_hers(shared: Shared) -> None:
    prefix, number = shared.prefix, shared.numbers[ADMINS[0]]
    prefix.chmod(0o755)
    os.chown(prefix, number, number)
    shared.run(ADMINS[0], generations.INIT, {"PREFIX": str(prefix), "TOKEN": "a"})
    assert {path.stat().st_mode & 0o7777 for path in prefix.iterdir() if path.is_dir()} == {0o755}
    done = shared.ask(ADMINS[1], generations.GC, {"PREFIX": str(prefix), "TOKEN": "b", "SEEN": "0: "})
    assert f"{ADMINS[1]} may not write in {prefix}/generations (owner {ADMINS[0]}, mode 755)" in done.stderr


@pytest.mark.usefixtures("programs")
def test_the_builder_gets_the_folders_and_the_group_stays(shared: Shared) -> None:
    """Root makes the prefix for a user who builds, in a folder that a group shares already."""
    shared.run("", generations.INIT, {"PREFIX": str(shared.prefix), "TOKEN": "r", "OWNER": ADMINS[0]})
    store = (shared.prefix / "store").stat()
    assert (store.st_uid, store.st_gid) == (shared.numbers[ADMINS[0]], shared.numbers[GROUP])
    assert store.st_mode & 0o7777 == 0o2775


def test_sessions_know_the_recipes_they_need() -> None:
    libraries = ("owner", "lock", "share", "living", "scratch")
    assert build.SESSION[:-1] == ("lib.sh", *(f"prefix/lib/{name}.sh" for name in libraries))
