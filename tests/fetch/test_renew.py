"""`invoke lock`: what it shows, what --check finds, and what --update makes of the file, byte for byte, with real
git servers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from deepep_bootstrap.cli import lock_view
from deepep_bootstrap.cli.commands import lock as verb
from deepep_bootstrap.core import filetree
from deepep_bootstrap.core.errors import OK, TROUBLE, Problem, Trouble
from deepep_bootstrap.fetch.renew import compare_link, renew_source, version_in
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.lock import edit
from deepep_bootstrap.lock import model as locks
from deepep_bootstrap.lock.model import Substitute
from tests.cli.test_json_doc import EXAMPLES, FREE_KEYS, keys, merge, shape
from tests.support.examples import most
from tests.support.lock import BASE, DAY, FILES, FIRST, Server, commit, git
from tests.support.paths import ROOT, TESTS

pytest_plugins = ["tests.support.lock"]

GOLDEN = TESTS / "golden" / "lock"


def tree_hash(server: Server, rev: str, scratch: Path) -> str:
    """Return the hash of a commit's tree as git itself checks it out."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    git(server.engine, f"--work-tree={scratch}", "-c", "core.bare=false", "checkout", "--force", rev, "--", ".")
    return filetree.hash_path(scratch)


@pytest.fixture
def path(server: Server, tmp_path: Path) -> Path:
    """The lock of this test: before.toml with the commits and hashes of the server."""
    text = (GOLDEN / "before.toml").read_text()
    for name, rev in server.commits.items():
        text = text.replace(f"@{name}@", rev)
        if f"@hash-{name}@" in text:
            text = text.replace(f"@hash-{name}@", tree_hash(server, rev, tmp_path / "checkout"))
    target = tmp_path / "deepep.lock.toml"
    target.write_text(text)
    return target


@pytest.fixture
def without_rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in place of the repository whose rules no made-up stack can break."""
    root = tmp_path_factory.mktemp("root")
    (root / "env/rules").mkdir(parents=True)
    (root / "env/rules/compatibility.toml").write_text("")
    return root


@pytest.fixture
def run(server: Server, path: Path, without_rules: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the verb on that lock with that server as the mirror; return exit code, stdout, stderr."""

    def call(**words: Any) -> tuple[int, str, str]:
        own = {key: words.pop(key) for key in ("check", "update", "ref", "version") if key in words}
        root = words.pop("root", without_rules)
        flags = Flags(root=root, lock=str(path), mirror=words.pop("mirror", (server.flag,)), **words)
        try:
            code = verb.lock(flags, **own)
        except Trouble as trouble:
            return (TROUBLE, capsys.readouterr().out, str(trouble))
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def masked(text: str, server: Server, path: Path) -> str:
    """Return text with what differs from run to run by name."""
    for old, new in ((str(path), "LOCK"), (str(server.folder), "SERVER")):
        text = text.replace(old, new)
    return text


def test_what_is_pinned(run: Any, path: Path) -> None:
    lock = locks.read_lock_file(path)
    assert lock_view.overview(lock, ["one"], FIRST + 800 * DAY) == [
        "sources",
        f"  engine 1.0   v1.0              {lock.sources['engine'].rev[:12]}  2023-11-14, 2 years old  for one",
        "      substitute in a.txt, 1 time: old → new (sha256-MbRtttcjc0GEY…)",
        '          The "old" was wrong (issue 3).',
        f"  transport 7  refs/pull/7/head  {lock.sources['transport'].rev[:12]}  2023-11-17, 2 years old  for one",
        "stacks",
        "  one (default): deepep engine, nvshmem transport, gdrcopy transport, cuda 12",
    ]
    code, out, err = run()
    assert (code, err) == (OK, "")
    assert out.startswith(f"{path}: default stack one\nsources\n  engine 1.0 ")


@pytest.mark.parametrize(
    ("text", "replacement", "shown"),
    [
        ("a;\n    b;", "a;\n    fence();\n    b;", "adds fence();"),
        ("    b;", "    fence();\n    b;\n", "adds fence();"),
        ("}\n  }", "}\n  }\n  if (x)\n      y();", "adds if (x) y();"),
        ("after(a b)", "", "removes after(a b)"),
        ("one\n  two\n  three", "one\n  2\n  and\n  three", "two → 2 and"),
        ("a  b", "a b", "'a  b' → 'a b'"),
        ("x " * 200, "y", f"{'x ' * 79}… → y"),
    ],
)
def test_a_substitution_on_one_line(path: Path, text: str, replacement: str, shown: str) -> None:
    lock = locks.read_lock_file(path)
    engine = replace(lock.sources["engine"], substitutes=(Substitute("a.txt", text, replacement, 1),))
    line = lock_view.overview(replace(lock, sources={**lock.sources, "engine": engine}), ["one"], 0)[2]
    assert line.rpartition(" (sha256-")[0] == f"      substitute in a.txt, 1 time: {shown}"


@pytest.mark.parametrize(
    ("days", "words"),
    [
        (-3, "0 days old"),
        (0, "0 days old"),
        (1, "1 day old"),
        (60, "60 days old"),
        (61, "2 months old"),
        (729, "23 months old"),
        (731, "2 years old"),
    ],
)
def test_ages(days: int, words: str) -> None:
    assert lock_view.age(days * DAY) == words


# Every update on its own golden file: name, what is done to the server first, and the flags.
UPDATES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "tag": ({}, {"update": "engine", "ref": "v1.1"}),
    "full-tag": ({}, {"update": "engine", "ref": "refs/tags/nested"}),
    "branch": ({}, {"update": "engine", "ref": "main"}),
    "branch-with-version": ({}, {"update": "engine", "ref": "main", "version": "1.3.dev0"}),
    "commit": ({}, {"update": "engine", "ref": "three"}),
    "abbreviated": ({}, {"update": "engine", "ref": "three:8"}),
    "pull-request": ({}, {"update": "engine", "ref": "refs/pull/7/head"}),
    "version-only": ({}, {"update": "transport", "version": "7.1"}),
    "pull-request-goes-on": ({"refs/pull/7/head": "merge"}, {"update": "transport"}),
    "pull-request-force-pushed": ({"refs/pull/7/head": "pushed"}, {"update": "transport"}),
    "moved-tag-on-purpose": ({"refs/tags/v1.0": "two"}, {"update": "engine", "ref": "v1.0"}),
    "all": ({"refs/pull/7/head": "merge"}, {"update": "all"}),
    "nothing": ({}, {"update": "all"}),
}


@pytest.mark.parametrize("name", UPDATES)
def test_updates(name: str, server: Server, path: Path, run: Any) -> None:
    moves, flags = UPDATES[name]
    for ref, rev in moves.items():
        server.point(ref, rev)
    if flags.get("ref", "").partition(":")[0] in server.commits:
        asked, _, digits = flags["ref"].partition(":")
        flags = {**flags, "ref": server.commits[asked][: int(digits or 40)]}
    before = path.read_bytes()
    code, dry, err = run(dry_run=True, **flags)
    assert (code, err) == (OK, "")
    assert path.read_bytes() == before, "a dry run wrote"
    code, out, err = run(**flags)
    assert (code, err) == (OK, "")
    assert [line for line in out.splitlines() if "LOCK" not in line][:1] == dry.splitlines()[:1]
    difference = edit.diff(before.decode(), path.read_bytes().decode(), "lock")
    assert f"{masked(out, server, path)}---\n{difference}" == (GOLDEN / f"{name}.txt").read_text()
    # What was written holds: the check finds nothing, and the same update again finds nothing to do.
    assert run(check=True)[0] == OK
    again = {key: value for key, value in flags.items() if key != "version"}
    assert "nothing to change" in run(**again)[1]


def test_nothing_else_changes(server: Server, path: Path, run: Any) -> None:
    """Line ends, a link to the lock, its mode: all as before."""
    real = path.with_name("real.toml")
    real.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    real.chmod(0o640)
    path.unlink()
    path.symlink_to(real)
    before = real.read_bytes().splitlines(keepends=True)
    assert run(update="engine", ref="main")[0] == OK
    after = real.read_bytes().splitlines(keepends=True)
    changed = [old.split()[0] for old, new in zip(before, after, strict=True) if old != new]
    assert changed == [b"ref", b"rev", b"hash", b"last_modified=1_700_000_000"]
    assert path.is_symlink()
    assert real.stat().st_mode & 0o7777 == 0o640
    assert sorted(os.listdir(path.parent)) == ["checkout", "deepep.lock.toml", "real.toml", "server"]


def refused(run: Any, path: Path, **words: Any) -> str:
    """Run what must fail and change nothing; return the messages."""
    before = path.read_bytes()
    code, _, err = run(**words)
    assert code == TROUBLE
    assert path.read_bytes() == before
    return str(err).strip()


def test_a_moved_tag_is_taken_on_purpose_only(server: Server, path: Path, run: Any) -> None:
    server.point("refs/tags/v1.0", "three")
    assert refused(run, path, update="engine") == (
        "source engine: the tag v1.0 was moved: it is not at the locked commit any more"
        f" — found {server.commits['three']}, wanted {server.commits['one']}. Try: --ref=v1.0 takes it on purpose"
    )


def test_all_failures_at_once_and_nothing_written(server: Server, path: Path, run: Any) -> None:
    server.point("refs/tags/v1.0", "three")
    git(server.engine, "update-ref", "-d", "refs/pull/7/head")
    message = refused(run, path, update="all")
    assert message.splitlines()[0].startswith("source engine: the tag v1.0 was moved")
    assert message.splitlines()[1].startswith(f"source transport: refs/pull/7/head has vanished from {server.engine}")
    server.point("refs/tags/v1.0", "one")
    code, out, _ = run(update="all", version="")
    assert code == TROUBLE
    assert f"{path}: not written, because not every pin could be renewed" in out


TOOLKIT = """
[toolkit.cuda-13_2]
version = "13.2.86"
wheels.x86_64 = [
  { name = "nvidia-cuda-nvcc", version = "13.2.86", index = "own", file = "nvidia_cuda_nvcc-13.2.86-py3-none-any.whl", hash = "sha256-qSRPMgAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=", size = 1 },
]
"""


def test_compilers_are_left_and_said_to_be(path: Path, run: Any) -> None:
    path.write_text(path.read_text() + TOOLKIT, encoding="utf-8")
    code, out, err = run(update="all")
    assert (code, err) == (OK, "")
    hand = 'renewed by hand, see "The compiler that comes along" in docs/lock.md'
    assert f"left    toolkit.cuda-13_2 of 13.2.86: {hand}" in " ".join(out.split("\n")), out
    assert refused(run, path, update="toolkit.cuda-13_2") == f"--update: this pin is {hand} — found toolkit.cuda-13_2"


def test_a_substitution_that_no_longer_fits(server: Server, path: Path, run: Any) -> None:
    server.point("refs/heads/main", commit(server.engine, [server.commits["three"]], {"a.txt": "other\n"}, 8))
    assert refused(run, path, update="engine", ref="main") == (
        "source engine, substitute 1 (a.txt): the text to replace is not there as often as it should — found 0, "
        "wanted 1."
        " Try: taking that [[source.engine.substitute]] out of the lock where main has such a change itself,"
        " else adapting it to the new tree"
    )
    block = path.read_text().index("[[source.engine.substitute]]"), path.read_text().index("[stack.one]")
    path.write_text(path.read_text()[: block[0]] + path.read_text()[block[1] :])
    assert run(update="engine", ref="main")[0] == OK, "the remedy helps"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            {"update": "engin"},
            "--update: no such pin in the lock — found engin, wanted engine, transport or all. Try: --update=engine",
        ),
        ({"update": "all", "ref": "main"}, "--ref: is for one pin — wanted --update=NAME --ref=main"),
        ({"version": "1"}, "--version: is for one pin — wanted --update=NAME --version=1"),
        ({"update": "engine", "check": True}, "--check: checks the lock as it is and does not go with --update"),
        ({"stack": "two"}, "--stack: no such stack in the lock — found two, wanted one"),
        (
            {"update": "engine", "ref": "-x"},
            "--ref: is not what belongs here — found -x, wanted a branch, a tag or a full ref",
        ),
        ({"update": "engine", "version": "a b"}, "--version: is not what belongs here — found a b, wanted a version"),
    ],
)
def test_bad_questions(words: dict[str, Any], message: str, path: Path, run: Any) -> None:
    assert refused(run, path, **words) == message


def test_a_pin_without_a_commit_yet(server: Server, path: Path, run: Any) -> None:
    """A new source is written by hand with zeros and filled in by the update."""
    path.write_text(path.read_text().replace(server.commits["one"], "0" * 40))
    code, out, _ = run(update="engine")
    assert code == OK
    assert out.splitlines()[0] == (
        f"engine: v1.0 000000000000 (2023-11-14) → v1.0 {server.commits['one'][:12]} (2023-11-14); from {server.engine}"
    )
    assert run(check=True)[0] == OK


def test_a_hash_that_was_wrong_or_now_includes_submodules(server: Server, path: Path, run: Any) -> None:
    right = locks.read_lock_file(path).sources["engine"].hash
    path.write_text(path.read_text().replace(right, filetree.sri(bytes(32))))
    message = refused(run, path, check=True)
    assert (
        message == f"source engine: the tree of {server.commits['one'][:12]} has another hash — found {right}, wanted "
        f"{filetree.sri(bytes(32))}"
    )
    code, out, _ = run(update="engine")
    assert code == OK
    assert "the commit is the same, but its tree has another hash than the locked one" in out
    assert locks.read_lock_file(path).sources["engine"].hash == right


def test_a_lock_that_changes_meanwhile(server: Server, path: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    renew = renew_source

    def edit_meanwhile(*words: Any) -> Any:
        path.write_text(path.read_text() + "# mine\n")
        return renew(*words)

    monkeypatch.setattr(verb, "renew_source", edit_meanwhile)
    before = path.read_text()
    code, _, err = run(update="engine", ref="main")
    assert code == TROUBLE
    assert err == f"{path}: was changed by somebody else while the pins were fetched. Try: the same command again"
    assert path.read_text() == before + "# mine\n"
    assert sorted(os.listdir(path.parent)) == ["checkout", "deepep.lock.toml", "server"]


def test_check_names_every_failure(server: Server, path: Path, run: Any, tmp_path: Path) -> None:
    code, out, err = run(check=True)
    assert (code, err) == (OK, "")
    assert [line for line in out.splitlines() if line.startswith("ok")] == [
        f"ok      source engine {server.commits['one'][:12]}: as locked",
        f"ok      source transport {server.commits['pull'][:12]}: as locked",
    ]
    # A mirror that was made before the pull request, and a time and a substitution that are wrong.
    old = tmp_path / "old/owner"
    old.mkdir(parents=True)
    git(
        old, "clone", "--quiet", "--no-local", "--bare", "--single-branch", "--branch=main", server.engine, "engine.git"
    )
    path.write_text(path.read_text().replace("1_700_000_000", "1_700_000_001").replace('text = "old"', 'text = "gone"'))
    message = refused(run, path, check=True, mirror=(f"{BASE}={tmp_path}/old",))
    lines = message.splitlines()
    assert lines[0] == "source engine: last_modified is not the commit's — found 1700000001, wanted 1700000000"
    assert lines[1].startswith("source engine, substitute 1 (a.txt): the text to replace is not there")
    assert lines[2].startswith(f"source transport: {old}/engine.git does not give out the locked commit: ")
    assert f"wanted {server.commits['pull']}. Try: --mirror PREFIX=DIRECTORY" in lines[2]
    assert len(lines) == 3


def test_check_of_a_tampered_mirror_and_of_none(server: Server, path: Path, run: Any) -> None:
    blob = git(server.engine, "rev-parse", f"{server.commits['one']}:src/main.c")
    loose = server.engine / "objects" / blob[:2] / blob[2:]
    evil = subprocess.run(
        ["git", "hash-object", "-w", "--stdin"], cwd=server.engine, input=b"evil", capture_output=True, check=True
    )
    name = evil.stdout.decode().strip()
    loose.unlink()
    shutil.copy(server.engine / "objects" / name[:2] / name[2:], loose)
    message = refused(run, path, check=True)
    assert [line.split(": ")[0] for line in message.splitlines()] == ["source engine", "source transport"]
    shutil.rmtree(server.engine)
    message = refused(run, path, check=True)
    assert all("has no repository for https://host.invalid/owner/engine" in line for line in message.splitlines())
    assert len(message.splitlines()) == 2


def test_check_does_not_trust_the_cache(
    server: Server, path: Path, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert run(check=True)[0] == OK
    shutil.rmtree(server.engine)
    assert run(check=True)[0] == TROUBLE
    assert not (tmp_path / "cache").exists()


def test_check_tells_what_became_of_refs(server: Server, path: Path, run: Any) -> None:
    """Only the pin's own server can tell; that is no failure, because the commit decides."""
    path.write_text(path.read_text().replace(f"{BASE}owner/engine", f"file://{server.engine}"))
    server.point("refs/tags/v1.0", "three")
    git(server.engine, "update-ref", "-d", "refs/pull/7/head")
    code, out, _ = run(check=True, mirror=())
    assert code == OK
    assert f"as locked; the tag v1.0 was moved to {server.commits['three'][:12]}" in out
    assert (
        f"as locked; refs/pull/7/head has vanished from file://{server.engine}; the locked commit stays as it is" in out
    )


def submodules(server: Server, tmp_path: Path) -> str:
    """Make owner/outer: a submodule with a relative address that has one with an absolute address, one that is never
    filled, and branches of the same repositories that lead elsewhere; return the commit."""
    for name in ("inner", "middle", "outer"):
        git(server.folder, "init", "--quiet", "--bare", server.folder / f"owner/{name}.git")

    def section(path: str, url: str, more: str = "") -> str:
        return f'[submodule "{path}"]\n\tpath = {path}\n\turl = {url}\n\tbranch = main\n{more}'

    repositories = {name: server.folder / f"owner/{name}.git" for name in ("inner", "middle", "outer")}
    inner = commit(repositories["inner"], [], {"leaf": "1\n"}, 1)
    middle = commit(
        repositories["middle"],
        [],
        {".gitmodules": section("third/inner", f"{BASE}owner/inner.git"), "third/inner": f"link:{inner}"},
        2,
    )
    text = section("deps/middle", "../middle") + section("deps/off", "../inner.git", "\tupdate = none\n")
    outer = commit(
        repositories["outer"],
        [],
        {".gitmodules": text, "deps/middle": f"link:{middle}", "deps/off": f"link:{inner}", "top": "1\n"},
        3,
    )
    for name, rev in (("inner", inner), ("middle", middle), ("outer", outer)):
        git(repositories[name], "update-ref", "refs/heads/main", rev)
        later = commit(repositories[name], [rev], {"later": name}, 4)
        git(repositories[name], "update-ref", "refs/heads/main" if name != "outer" else "refs/heads/next", later)
        # Only what a ref holds is kept for clones; the recorded commits stay reachable as ancestors.
    return outer


def test_submodules_are_in_the_hash_as_git_fills_them(server: Server, path: Path, run: Any, tmp_path: Path) -> None:
    outer = submodules(server, tmp_path)
    text = (
        path.read_text()
        .replace(f"{BASE}owner/engine", f"{BASE}owner/outer")
        .replace("submodules = false", "submodules = true")
    )
    start, end = text.index("[[source.engine"), text.index("[stack.one]")
    path.write_text(text[:start] + text[end:])
    assert run(update="engine", ref="main")[0] == OK
    assert run(update="transport", ref="main")[0] == OK
    assert run(check=True)[0] == OK
    found = locks.read_lock_file(path).sources
    plain = tmp_path / "plain"
    settings = ("-c", f"url.{server.folder}/.insteadOf={BASE}")
    git(tmp_path, *settings, "clone", "--quiet", f"{BASE}owner/outer", plain)
    git(plain, "checkout", "--quiet", outer)
    shutil.copytree(plain, tmp_path / "empty")
    shutil.rmtree(tmp_path / "empty/.git")
    git(plain, *settings, "submodule", "--quiet", "update", "--init", "--recursive")
    for name in [*plain.rglob(".git"), plain / ".git"]:
        if name.exists():
            shutil.rmtree(name) if name.is_dir() else name.unlink()
    assert (plain / "deps/middle/third/inner/leaf").read_text() == "1\n"
    assert list((plain / "deps/off").iterdir()) == []
    assert found["engine"].rev == found["transport"].rev == outer
    assert found["engine"].hash == filetree.hash_path(plain)
    assert found["transport"].hash == filetree.hash_path(tmp_path / "empty")


@pytest.mark.parametrize(
    "url", ["/etc", "file:///etc", "../../../../../../etc", "ext::sh -c touch% here", "", "-x", "../../../..", "./.."]
)
def test_submodules_cannot_name_this_machine(url: str, server: Server, path: Path, run: Any) -> None:
    other = commit(server.engine, [], {"leaf": "1"}, 1)
    settings = f'[submodule "s"]\n\tpath = s\n\turl = {url}\n'
    server.point(
        "refs/heads/main", commit(server.engine, [], {**FILES, ".gitmodules": settings, "s": f"link:{other}"}, 2)
    )
    path.write_text(path.read_text().replace("submodules = false", "submodules = true"))
    message = refused(run, path, update="engine", ref="main")
    assert message.startswith("source engine: its submodule s has no address that can be used")


def test_a_submodule_that_nothing_describes(server: Server, path: Path, run: Any) -> None:
    server.point("refs/heads/main", commit(server.engine, [], {**FILES, "s": f"link:{server.commits['one']}"}, 2))
    path.write_text(path.read_text().replace("submodules = false", "submodules = true"))
    assert "its submodule s has no address — found no file .gitmodules in the tree" in refused(
        run, path, update="engine", ref="main"
    )


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("refs/tags/v2.5.1", "2.5.1"),
        ("v3.4.5-0", "3.4.5"),
        ("v3.5.19-1", "3.5.19"),
        ("release-2.0rc1", "2.0rc1"),
        ("nvshmem_src_3.2.5-1.txz", "3.2.5"),
        ("1.0.post2", "1.0.post2"),
        ("main", ""),
        ("refs/pull/466/head", ""),
        ("v2", ""),
    ],
)
def test_versions_in_names(name: str, version: str) -> None:
    assert version_in(name) == version


@pytest.mark.parametrize(
    ("url", "link"),
    [
        ("https://github.com/NVIDIA/gdrcopy", "https://github.com/NVIDIA/gdrcopy/compare/a...b"),
        ("https://user:secret@github.com/NVIDIA/gdrcopy.git/", "https://github.com/NVIDIA/gdrcopy/compare/a...b"),
        ("https://gitlab.example.invalid/x/y", "https://gitlab.example.invalid/x/y/-/compare/a...b"),
        ("ssh://git@host.invalid/x/y", ""),
        ("file:///srv/x", ""),
    ],
)
def test_compare_links(url: str, link: str) -> None:
    assert compare_link(url, "a", "b") == link


def test_documents(server: Server, path: Path, run: Any) -> None:
    """The example in docs/json.md has exactly the keys of what is printed."""
    shown = json.loads(run(json=True)[1])
    checked = json.loads(run(json=True, check=True)[1])
    server.point("refs/pull/7/head", "pushed")
    dry = json.loads(run(json=True, dry_run=True, update="all")[1])
    server.point("refs/tags/v1.0", "two")
    failed = json.loads(run(json=True, update="all")[1])
    assert [document["exit"] for document in (shown, checked, dry, failed)] == [0, 0, 0, 1]
    assert [each["ok"] for each in checked["checks"]] == [True, True]
    assert [each["changed"] for each in dry["changes"]] == [False, True]
    assert dry["changes"][1]["before"]["rev"] == server.commits["pull"]
    assert dry["changes"][1]["after"]["rev"] == server.commits["pushed"]
    assert failed["errors"][0]["where"] == "source engine"
    free = FREE_KEYS["lock"]
    for document in (shown, checked, dry, failed):
        merge(shape(document, free), shape(EXAMPLES["lock"], free))
    assert {key for document in (shown, checked, dry) for key in keys(document, free)} | {
        *("target", "files", "bytes"),
        *("system", "purposes", "key_url", "key_fingerprint"),
    } == set(keys(EXAMPLES["lock"], free))


def test_through_the_front_door(server: Server, path: Path) -> None:
    """Invoke has a --version of its own; behind our verb it is ours."""
    argv = ["lock", f"--lock={path}", f"--mirror={server.flag}", "--update=engine", "--ref=main", "--version=2.0"]
    done = subprocess.run(
        [sys.executable, "-m", "invoke", *argv], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (OK, "")
    assert locks.read_lock_file(path).sources["engine"].version == "2.0"


KEYS = ("ref", "rev", "hash", "last_modified", "version")
SPACE = st.sampled_from(["", " ", "   ", "\t"])


@st.composite
def layouts(draw: st.DrawFn) -> str:
    """A table [source.a] among others, laid out in one of the ways TOML has: order, quotes, spaces, comments,
    inline, dotted."""
    values = {"ref": "x", "rev": "y", "hash": "z", "version": "1", "last_modified": 5}
    order = draw(st.permutations(KEYS))
    quoted = {
        key: str(value) if isinstance(value, int) else draw(st.sampled_from(['"{}"', "'{}'"])).format(value)
        for key, value in values.items()
    }
    end = draw(st.sampled_from(["\n", "\r\n"]))
    comment = st.sampled_from(["", " # c", "# 'ref' = \"x\"", " #\t"])
    style = draw(st.sampled_from(["table", "inline", "dotted"]))
    if style == "inline":
        lines = ["[source]", "a = {" + ", ".join(f"{key} = {quoted[key]}" for key in order) + "}" + draw(comment)]
    else:
        lines = ["[source.a]"] if style == "table" else ["[source]"]
        prefix = "" if style == "table" else "a."
        lines += [f"{draw(SPACE)}{prefix}{key}{draw(SPACE)}={draw(SPACE)}{quoted[key]}{draw(comment)}" for key in order]
    others = ["[other] # o", 'ref = "x"', "", "# free", 'list = ["x", # why', ' "y",]']
    around = draw(st.booleans())
    return end.join(
        [*others, "", *lines, "[[source.b.sub]]", "k = 1"]
        if around
        else [*lines, "", *others, "[source.b]", 'rev="y"', ""]
    )


@given(layouts(), st.dictionaries(st.sampled_from(KEYS), st.text(max_size=8), max_size=5))
@settings(deadline=None, max_examples=most(150))
def test_a_rewritten_text_differs_in_nothing_else(text: str, new: dict[str, str]) -> None:
    values: dict[tuple[str, ...], str | int] = {
        ("source", "a", key): 7 if key == "last_modified" else value for key, value in new.items()
    }
    rewritten = edit.rewrite(text, values, "x")
    back = {
        place: {"ref": "x", "rev": "y", "hash": "z", "version": "1", "last_modified": 5}[place[-1]] for place in values
    }
    again = edit.rewrite(rewritten, back, "x")
    # Quotes may have changed from single to double where a value changed; nothing else may have.
    assert again.replace("'", '"') == text.replace("'", '"')


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (("source", "b", "rev"), "x: has no such key to rewrite — wanted source.b"),
        (("source", "a", "hash"), "x: has no such key to rewrite — wanted source.a.hash"),
        (("source", "a", "rev", "deep"), "x: has no such key to rewrite — wanted source.a.rev.deep"),
    ],
)
def test_what_is_not_there_is_not_rewritten(place: tuple[str, ...], message: str) -> None:
    with pytest.raises(Trouble) as caught:
        edit.rewrite('[source.a]\nrev = "x"\n', {place: "y"}, "x")
    assert caught.value.problems == (Problem("x", "has no such key to rewrite", wanted=message.split("wanted ")[1]),)


def test_a_value_over_several_lines_is_left_to_a_person() -> None:
    with pytest.raises(
        Trouble, match=r"x: cannot be rewritten without touching other lines\. Try: writing by hand: a\.rev = 'y'"
    ):
        edit.rewrite('[a]\nrev = """\nlong\n"""\n', {("a", "rev"): "y"}, "x")


def test_an_update_to_a_commit_that_nobody_has_read_says_so(server: Server, run: Any) -> None:
    server.point("refs/pull/7/head", "merge")
    remedy = (
        f"reading it, then writing what it has under [commit.{server.commits['three']}] in env/rules/compatibility.toml"
    )
    asked = "ll-combine-fence, gin-world-fence, gin-all-contexts, pull-466, pull-564, pull-696"
    note = f"nobody has recorded what this commit has of what the rules ask for ({asked}): {remedy}"
    assert note in run(update="engine", ref="main", root=ROOT, dry_run=True)[1]
    assert "nobody has recorded" not in run(update="transport", root=ROOT, dry_run=True)[1], (
        "no stack takes its DeepEP from there"
    )
    assert (
        json.loads(run(update="engine", ref="main", root=ROOT, dry_run=True, json=True)[1])["changes"][0]["notes"][-1]
        == note
    )


def test_check_judges_stacks_by_the_rules(run: Any) -> None:
    code, out, err = run(check=True, root=ROOT)
    assert code == TROUBLE
    assert "1 stacks: not all fit together" in out
    assert "NVSHMEM lays out its queue pairs in another way" in out + err
    assert run(check=True)[0] == OK
