"""Sources from real git repositories: what is fetched, what attributes and settings cannot change, and what is
refused."""

from __future__ import annotations

import base64
import contextlib
import functools
import http.server
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from deepep_bootstrap.core import filetree, process
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.core.process import Completed
from deepep_bootstrap.fetch import locations, sources
from deepep_bootstrap.fetch.git import absolute as absolute_address
from deepep_bootstrap.fetch.locations import Mirrors
from deepep_bootstrap.lock.model import Source, Substitute

pytestmark = pytest.mark.usefixtures("programs")

BASE = "https://host.invalid/"
WRONG = "sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="
# Every attribute that makes git write something else than what was committed.
ATTRIBUTES = """*.bin filter=lfs diff=lfs merge=lfs -text
*.txt text eol=crlf
*.bat text
version export-subst
hidden export-ignore
id ident
wide text working-tree-encoding=UTF-16
"""
FILES = {
    ".gitattributes": ATTRIBUTES,
    "pointer.bin": "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "text.txt": "one\ntwo\n",
    "dos.bat": "one\ntwo\n",
    "version": "$Format:%H$\n",
    "hidden": "here\n",
    "id": "$Id$\n",
    "wide": "w\n",
    "src/main.cpp": "int old;\nint old;\n",
    "src/.gitattributes": "main.cpp text eol=crlf ident\n",
}


def git(where: Path, *words: str | Path) -> str:
    argv = (
        "git",
        "-c",
        "user.name=Nobody",
        "-c",
        "user.email=nobody@host.invalid",
        "-c",
        "protocol.file.allow=always",
        *words,
    )
    return subprocess.run(argv, cwd=where, check=True, capture_output=True, text=True).stdout.strip()


def write(tree: Path) -> None:
    """Write the tree as it was committed, byte for byte."""
    for name, text in FILES.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    (tree / "run").write_text("#!/bin/sh\n")
    (tree / "run").chmod(0o755)
    (tree / "link").symlink_to("src/nowhere")
    Path(os.fsdecode(os.fsencode(tree) + b"/n\xff")).write_text("x")


@dataclass(frozen=True)
class Upstream:
    """A directory of bare repositories with one of them, and the pin of a commit that only refs/pull/7/head reaches."""

    folder: Path
    source: Source

    @property
    def bare(self) -> Path:
        return self.folder / "owner/engine.git"

    @property
    def mirrors(self) -> Mirrors:
        return locations.read_mirrors([f"{BASE}={self.folder}"], {}, {})


@pytest.fixture
def upstream(tmp_path: Path) -> Upstream:
    work, plain = tmp_path / "work", tmp_path / "plain"
    work.mkdir()
    git(work, "init", "--quiet", "--initial-branch=main")
    write(work)
    (work / ".git/info/attributes").write_text("* -text -filter -ident -working-tree-encoding\n")
    git(work, "add", "--all", "--force")
    git(work, "commit", "--quiet", "--message=first")
    rev = git(work, "rev-parse", "HEAD")
    git(work, "tag", "v1")
    (work / "later").write_text("later")
    git(work, "add", "--all")
    git(work, "commit", "--quiet", "--message=second")
    bare = tmp_path / "mirror/owner/engine.git"
    git(tmp_path, "clone", "--quiet", "--mirror", work, bare)
    git(bare, "update-ref", "refs/pull/7/head", rev)
    write(plain)
    return Upstream(
        tmp_path / "mirror",
        Source("engine", f"{BASE}owner/engine", "refs/pull/7/head", rev, filetree.hash_path(plain), 0, "1"),
    )


def left_in(cache: Path) -> list[str]:
    return sorted(os.listdir(cache / "sources"))


def refused(source: Source, mirrors: Mirrors, cache: Path) -> str:
    """Fetch what cannot be fetched; return the message, having made sure that nothing is left."""
    with pytest.raises(Trouble) as caught:
        sources.fetch_source(source, mirrors, cache)
    assert left_in(cache) == []
    return str(caught.value)


def test_attributes_and_settings_change_nothing(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = tmp_path / "template/hooks/post-checkout"
    hook.parent.mkdir(parents=True)
    hook.write_text("#!/bin/sh\ntouch hooked\n")
    hook.chmod(0o755)
    (tmp_path / "attributes").write_text("* filter=lfs ident\n")
    (tmp_path / "config").write_text(
        '[filter "lfs"]\n\tsmudge = echo smudged\n\trequired = true\n'
        f"[core]\n\tautocrlf = true\n\tattributesFile = {tmp_path}/attributes\n\thooksPath = {hook.parent}\n"
        f'[init]\n\ttemplateDir = {tmp_path}/template\n[url "/nowhere/"]\n\tinsteadOf = /\n'
    )
    settings = {
        "GIT_CONFIG_GLOBAL": f"{tmp_path}/config",
        "GIT_TEMPLATE_DIR": f"{tmp_path}/template",
        "GIT_DIR": "/nowhere",
    }
    for name, value in {
        **settings,
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "core.eol",
        "GIT_CONFIG_VALUE_0": "crlf",
    }.items():
        monkeypatch.setenv(name, value)
    tree = sources.fetch_source(upstream.source, upstream.mirrors, tmp_path / "cache")
    assert filetree.hash_path(tree) == upstream.source.hash
    assert not (tree / ".git").exists()
    monkeypatch.undo()
    git(tmp_path, "clone", "--quiet", "--branch=v1", upstream.bare, tmp_path / "checkout")
    shutil.rmtree(tmp_path / "checkout/.git")
    assert filetree.hash_path(tmp_path / "checkout") != upstream.source.hash, (
        "the attributes have no effect: this test would prove nothing"
    )
    assert left_in(tmp_path / "cache") == [tree.name]


@pytest.mark.parametrize("ref", ["refs/pull/7/head", "v1", "main", "gone"])
def test_the_commit_decides_and_not_the_ref(ref: str, upstream: Upstream, tmp_path: Path) -> None:
    tree = sources.fetch_source(replace(upstream.source, ref=ref), upstream.mirrors, tmp_path / "cache")
    assert filetree.hash_path(tree) == upstream.source.hash


def test_a_commit_that_no_ref_reaches(upstream: Upstream, tmp_path: Path) -> None:
    for ref in ("refs/pull/7/head", "refs/tags/v1"):
        git(upstream.bare, "update-ref", "-d", ref)
    git(upstream.bare, "update-ref", "refs/heads/main", git(upstream.bare, "commit-tree", "-m", "other", "main^{tree}"))
    assert sources.fetch_source(upstream.source, upstream.mirrors, tmp_path / "cache").is_dir()


def test_a_repository_with_its_work_tree_and_of_another_owner(upstream: Upstream, tmp_path: Path) -> None:
    git(tmp_path, "clone", "--quiet", upstream.bare, tmp_path / "other/owner/engine")
    for folder, _, files in os.walk(tmp_path / "other"):
        for name in (folder, *(os.path.join(folder, file) for file in files)):
            if os.geteuid() == 0:
                os.chown(name, 65534, 65534, follow_symlinks=False)
    other = locations.read_mirrors([f"{BASE}={tmp_path}/other"], {}, {})
    assert sources.fetch_source(upstream.source, other, tmp_path / "cache").is_dir()


@pytest.fixture
def plain_server(upstream: Upstream) -> Iterator[str]:
    """The repositories over the simple HTTP protocol, which gives out neither shallow copies nor bare commits."""
    git(upstream.bare, "update-server-info")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(upstream.folder))
    ) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


@pytest.mark.parametrize("ref", ["refs/pull/7/head", "v1", "gone"])
def test_a_server_that_gives_out_refs_only(ref: str, upstream: Upstream, plain_server: str, tmp_path: Path) -> None:
    over_http = locations.read_mirrors([f"{BASE}owner/engine={plain_server}owner/engine.git"], {}, {})
    tree = sources.fetch_source(replace(upstream.source, ref=ref), over_http, tmp_path / "cache")
    assert filetree.hash_path(tree) == upstream.source.hash


def test_a_wrong_hash_leaves_nothing(upstream: Upstream, tmp_path: Path) -> None:
    message = refused(replace(upstream.source, hash=WRONG), upstream.mirrors, tmp_path / "cache")
    assert message == (
        f"source engine: the tree of {upstream.source.rev[:12]} from {upstream.bare} is not the locked one"
        f" — found {upstream.source.hash}, wanted {WRONG}"
    )


def test_a_tampered_repository(upstream: Upstream, tmp_path: Path) -> None:
    """Somebody put another blob in the place of one: git's own check or ours says so, and nothing is left."""
    blob = git(upstream.bare, "rev-parse", f"{upstream.source.rev}:run")
    loose = upstream.bare / "objects" / blob[:2] / blob[2:]
    pack = next((upstream.bare / "objects/pack").glob("*.pack"), None)
    if pack:
        pack.with_suffix(".idx").unlink()
        moved = pack.rename(tmp_path / "pack")
        with moved.open("rb") as stream:
            subprocess.run(["git", "unpack-objects", "-q"], cwd=upstream.bare, stdin=stream, check=True)
    evil = subprocess.run(
        ["git", "hash-object", "-w", "--stdin"], cwd=upstream.bare, input=b"evil", capture_output=True, check=True
    )
    name = evil.stdout.decode().strip()
    loose.unlink()
    shutil.copy(upstream.bare / "objects" / name[:2] / name[2:], loose)
    assert "source engine: " in refused(upstream.source, upstream.mirrors, tmp_path / "cache")


def test_a_repository_of_the_same_name_with_another_history(upstream: Upstream, tmp_path: Path) -> None:
    shutil.rmtree(upstream.bare)
    git(tmp_path, "init", "--quiet", "--bare", upstream.bare)
    message = refused(upstream.source, upstream.mirrors, tmp_path / "cache")
    assert message.startswith(f"source engine: {upstream.bare} does not give out the locked commit: ")
    assert f" — wanted {upstream.source.rev}. Try: --mirror PREFIX=DIRECTORY" in message


def test_a_missing_repository(upstream: Upstream, plain_server: str, tmp_path: Path) -> None:
    gone = replace(upstream.source, url=f"{BASE}owner/gone")
    assert "has no repository for https://host.invalid/owner/gone" in refused(
        gone, upstream.mirrors, tmp_path / "cache"
    )
    (upstream.folder / "owner/gone").mkdir()
    assert f"{upstream.folder}/owner/gone cannot be reached: " in refused(gone, upstream.mirrors, tmp_path / "cache")
    over_http = locations.read_mirrors([f"{BASE}={plain_server}"], {}, {})
    assert f"{plain_server}owner/gone cannot be reached: " in refused(gone, over_http, tmp_path / "cache")


def test_gits_own_proxy_is_used_and_named_where_it_does_not_help(
    upstream: Upstream, plain_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is its own proxy here: it gets whole addresses then, and finds them as paths."""
    through = f'[http]\n\tproxy = {plain_server}\n\tsslCAInfo = ~/"site ca.pem"\n'
    (tmp_path / "config").write_text(f'[url "/nowhere/"]\n\tinsteadOf = http://host.invalid/\n{through}')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    (upstream.folder / "http:").mkdir()
    (upstream.folder / "http:/host.invalid").symlink_to(upstream.folder)
    source = replace(upstream.source, url="http://host.invalid/owner/engine.git")
    assert sources.fetch_source(source, Mirrors(), tmp_path / "cache").is_dir()
    closed = (
        '[http "http://host.invalid"]\n\tproxy = "http://user:se;cret@127.0.0.1:9"\n[http '
        '"http://other.invalid"]\n\tsslCert = x\n'
    )
    with (tmp_path / "config").open("a") as file:
        file.write(closed)
    message = refused(source, Mirrors(), tmp_path / "cache2")
    settings = (
        f"http.proxy {plain_server}, http.sslcainfo ~/site ca.pem, http.http://host.invalid.proxy http://127.0.0.1:9"
    )
    assert f" — found git's settings {settings}. Try: --mirror" in message
    assert (
        "cannot be reached: unable to access 'http://host.invalid/owner/engine.git/': Failed to connect to 127.0.0.1 "
        "port 9" in message
    )


def test_a_git_that_is_too_old(upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/git").write_text("#!/bin/sh\necho git version 2.30.2\n")
    (tmp_path / "bin/git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    message = refused(upstream.source, upstream.mirrors, tmp_path / "cache")
    assert (
        message
        == "git: is too old to fetch sources with — found 2.30.2, wanted 2.32 or newer. Try: a newer one first in PATH"
    )


def test_a_password_in_an_address_stays_hidden(
    upstream: Upstream, plain_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    run = process.run_program

    def record(argv: Sequence[str | Path], **rest: Any) -> Completed:
        seen.extend(map(str, argv))
        return run(argv, **rest)

    monkeypatch.setattr(process, "run_program", record)
    secret = plain_server.replace("http://", "http://user:secret@")
    over_http = locations.read_mirrors(
        [f"{BASE}owner/engine={secret}owner/engine.git", f"{BASE}owner/gone={secret}gone"], {}, {}
    )
    assert "secret" not in refused(replace(upstream.source, url=f"{BASE}owner/gone"), over_http, tmp_path / "cache")
    assert "secret" not in refused(replace(upstream.source, hash=WRONG), over_http, tmp_path / "cache")
    assert "secret" not in refused(replace(upstream.source, rev="0" * 40), over_http, tmp_path / "cache")
    assert sources.fetch_source(upstream.source, over_http, tmp_path / "cache").is_dir()
    assert seen
    assert "secret" not in " ".join(seen)


def test_a_server_that_asks_for_a_password(upstream: Upstream, tmp_path: Path) -> None:
    """It gets user and password, and while it answers no process of this machine shows the password on its command
    line."""
    git(upstream.bare, "update-server-info")
    shown: list[bytes] = []

    class Private(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            pass

        def do_GET(self) -> None:
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):  # it has just ended
                    line = path.read_bytes()
                    shown.extend([line] if b"se%20cret" in line or b"se cret" in line else [])
            if self.headers["Authorization"] == f"Basic {base64.b64encode(b'user:se cret').decode()}":
                super().do_GET()
            else:
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="sources"')
                self.send_header("Content-Length", "0")
                self.end_headers()

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Private, directory=str(upstream.folder))
    ) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        address = f"http://user:se%20cret@127.0.0.1:{server.server_address[1]}/owner/engine.git"
        try:
            over_http = locations.read_mirrors([f"{BASE}owner/engine={address}"], {}, {})
            assert sources.fetch_source(upstream.source, over_http, tmp_path / "cache").is_dir()
            wrong = locations.read_mirrors([f"{BASE}owner/engine={address.replace('user', 'other')}"], {}, {})
            assert "cannot be reached: " in refused(upstream.source, wrong, tmp_path / "other")
        finally:
            server.shutdown()
    assert shown == []


def test_a_cache_that_cannot_be_written(upstream: Upstream, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(
        Trouble, match=r"cache/sources: the cache cannot be used: Not a directory\. Try: XDG_CACHE_HOME=DIR"
    ):
        sources.fetch_source(upstream.source, upstream.mirrors, tmp_path / "cache")


SUBSTITUTES = (Substitute("src/main.cpp", "int old;\n", "int new_;\n", 2), Substitute("src/main.cpp", "new_", "new", 2))


def test_substitutions(upstream: Upstream, tmp_path: Path) -> None:
    source = replace(upstream.source, substitutes=(*SUBSTITUTES, Substitute("run", "#!/bin/sh", "#!/bin/bash", 1)))
    tree = sources.fetch_source(source, upstream.mirrors, tmp_path / "cache")
    assert (tree / "src/main.cpp").read_text() == "int new;\nint new;\n"
    assert (tree / "run").read_text() == "#!/bin/bash\n"
    assert os.access(tree / "run", os.X_OK)
    assert (tree / "link").is_symlink()
    plain = sources.fetch_source(upstream.source, upstream.mirrors, tmp_path / "cache")
    assert filetree.hash_path(plain) == upstream.source.hash
    assert left_in(tmp_path / "cache") == sorted([plain.name, tree.name])


def test_substitutions_that_do_not_fit(upstream: Upstream, tmp_path: Path) -> None:
    wrong = (
        Substitute("src/main.cpp", "int old;", "x", 1),
        Substitute("src/gone.cpp", "a", "b", 1),
        Substitute("link", "a", "b", 1),
        Substitute("src", "a", "b", 1),
        Substitute("run", "absent", "b", 1),
    )
    with pytest.raises(Trouble) as caught:
        sources.fetch_source(replace(upstream.source, substitutes=wrong), upstream.mirrors, tmp_path / "cache")
    often = "the text to replace is not there as often as it should"
    assert [str(problem) for problem in caught.value.problems] == [
        f"source engine, substitute 1 (src/main.cpp): {often} — found 2, wanted 1",
        "source engine, substitute 2 (src/gone.cpp): there is no such file in the tree",
        "source engine, substitute 3 (link): there is no such file in the tree",
        "source engine, substitute 4 (src): there is no such file in the tree",
        f"source engine, substitute 5 (run): {often} — found 0, wanted 1",
    ]


def test_the_cache_serves_without_the_repository(upstream: Upstream, tmp_path: Path) -> None:
    source = replace(upstream.source, substitutes=SUBSTITUTES)
    tree = sources.fetch_source(source, upstream.mirrors, tmp_path / "cache")
    shutil.rmtree(upstream.folder)
    assert sources.fetch_source(source, Mirrors(), tmp_path / "cache") == tree


def test_the_reason_of_a_substitution_changes_no_tree(upstream: Upstream, tmp_path: Path) -> None:
    source = replace(upstream.source, substitutes=SUBSTITUTES)
    tree = sources.fetch_source(source, upstream.mirrors, tmp_path / "cache")
    told = replace(source, substitutes=tuple(replace(each, reason="because") for each in SUBSTITUTES))
    assert sources.fetch_source(told, upstream.mirrors, tmp_path / "cache") == tree


def test_a_tampered_cache_is_fetched_again(upstream: Upstream, tmp_path: Path) -> None:
    source = replace(upstream.source, substitutes=SUBSTITUTES)
    tree = sources.fetch_source(source, upstream.mirrors, tmp_path / "cache")
    plain = tree.with_name(tree.name.split("-")[0])
    for damaged in (tree, plain):
        (damaged / "src/main.cpp").write_text("evil")
        os.mkfifo(damaged / "fifo")
        assert sources.fetch_source(source, upstream.mirrors, tmp_path / "cache") == tree
        assert filetree.hash_path(plain) == upstream.source.hash
        assert (tree / "src/main.cpp").read_text() == "int new;\nint new;\n"
    assert left_in(tmp_path / "cache") == sorted([plain.name, tree.name])


def test_many_at_once(upstream: Upstream, tmp_path: Path) -> None:
    source = replace(upstream.source, substitutes=SUBSTITUTES)
    with ThreadPoolExecutor(6) as pool:
        trees = set(pool.map(lambda _: sources.fetch_source(source, upstream.mirrors, tmp_path / "cache"), range(6)))
    (tree,) = trees
    assert (tree / "src/main.cpp").read_text() == "int new;\nint new;\n"
    assert len(left_in(tmp_path / "cache")) == 2


def test_submodules(upstream: Upstream, tmp_path: Path) -> None:
    """A module with a relative address in a module with an absolute one; without `submodules` it is an empty
    directory."""
    work = tmp_path / "outer"
    work.mkdir()
    for name, inner, url in (("middle", "engine", "../engine"), ("outer", "middle", f"{BASE}owner/middle.git")):
        folder = tmp_path / f"make-{name}"
        folder.mkdir()
        git(folder, "init", "--quiet", "--initial-branch=main")
        git(folder, "submodule", "--quiet", "add", upstream.folder / f"owner/{inner}.git", f"third/{inner}")
        pinned = upstream.source.rev if inner == "engine" else "HEAD"
        git(folder / "third" / inner, "checkout", "--quiet", pinned)
        git(folder, "config", "--file", ".gitmodules", f"submodule.third/{inner}.url", url)
        git(folder, "add", "--all")
        git(folder, "commit", "--quiet", f"--message={name}")
        git(tmp_path, "clone", "--quiet", "--bare", folder, upstream.folder / f"owner/{name}.git")
    rev = git(upstream.folder / "owner/outer.git", "rev-parse", "HEAD")
    expected = tmp_path / "expected"
    for name, inner in (("make-outer", "third/middle"), ("make-middle", "third/middle/third/engine")):
        (expected / inner).mkdir(parents=True)
        shutil.copy(tmp_path / name / ".gitmodules", (expected / inner).parents[1] / ".gitmodules")
    source = Source("outer", f"{BASE}owner/outer", "main", rev, "", 0, "1")
    shutil.rmtree(expected / "third/middle")
    (expected / "third/middle").mkdir()
    empty = replace(source, hash=filetree.hash_path(expected))
    assert list((sources.fetch_source(empty, upstream.mirrors, tmp_path / "cache") / "third/middle").iterdir()) == []
    shutil.copytree(
        tmp_path / "make-middle",
        expected / "third/middle",
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns(".git", "third"),
    )
    write(expected / "third/middle/third/engine")
    filled = replace(source, hash=filetree.hash_path(expected), submodules=True)
    assert (
        sources.fetch_source(filled, upstream.mirrors, tmp_path / "cache") / "third/middle/third/engine/run"
    ).is_file()


@pytest.mark.parametrize(
    ("url", "absolute"),
    [
        ("https://other.invalid/x", "https://other.invalid/x"),
        ("../fmt.git", "https://host.invalid/owner/fmt.git"),
        ("../../else/fmt", "https://host.invalid/else/fmt"),
        ("./inner", "https://host.invalid/owner/engine/inner"),
    ],
)
def test_addresses_of_submodules(url: str, absolute: str) -> None:
    assert absolute_address(url, f"{BASE}owner/engine") == absolute
