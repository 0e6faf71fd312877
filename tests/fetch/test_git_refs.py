"""From what is asked to one commit: every kind of ref on real git servers, and what became of the ref that a pin
follows."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.fetch import git_refs, locations
from deepep_bootstrap.fetch.git_refs import Found
from deepep_bootstrap.lock import model
from tests.support.lock import BASE, FILES, Server, commit, git

pytest_plugins = ["tests.support.lock"]

A, B, C = "a" * 40, "b" * 40, "c" * 40


@pytest.mark.parametrize(
    ("asked", "ref", "rev", "kind"),
    [
        ("main", "refs/heads/main", "three", "branch"),
        ("refs/heads/main", "refs/heads/main", "three", "branch"),
        ("heads/both", "refs/heads/both", "two", "branch"),
        ("tags/both", "refs/tags/both", "one", "tag"),
        ("HEAD", "HEAD", "three", "branch"),
        ("v1.0", "refs/tags/v1.0", "one", "tag"),
        ("v1.1", "refs/tags/v1.1", "two", "tag"),
        ("nested", "refs/tags/nested", "two", "tag"),
        ("refs/pull/7/head", "refs/pull/7/head", "pull", "pull request"),
        ("pull/7/head", "refs/pull/7/head", "pull", "pull request"),
    ],
)
def test_every_kind_of_ref(asked: str, ref: str, rev: str, kind: str, server: Server) -> None:
    assert git_refs.resolve(server.source("main", "one"), asked, server.mirrors) == Found(
        ref, server.commits[rev], kind
    )


def test_commits(server: Server) -> None:
    source, rev = server.source("main", "one"), server.commits["pull"]
    assert git_refs.resolve(source, rev, server.mirrors) == Found(rev, rev, "commit")
    assert git_refs.resolve(source, rev[:7], server.mirrors) == Found(rev, rev, "commit")
    assert git_refs.resolve(source, rev[:39], server.mirrors) == Found(rev, rev, "commit")
    # A commit that is no tip of any ref, and the name of a branch that looks like the beginning of one.
    assert git_refs.resolve(source, server.commits["two"][:10], server.mirrors).rev == server.commits["two"]
    server.point(f"refs/heads/{rev[:8]}", "one")
    assert git_refs.resolve(source, rev[:8], server.mirrors) == Found(
        f"refs/heads/{rev[:8]}", server.commits["one"], "branch"
    )


def refused(source: model.Source, asked: str, server: Server) -> str:
    with pytest.raises(Trouble) as caught:
        git_refs.resolve(source, asked, server.mirrors)
    return str(caught.value)


def test_a_name_of_two_refs_is_refused(server: Server) -> None:
    assert refused(server.source("main", "one"), "both", server) == (
        "source engine: both is the name of several refs — found refs/tags/both, refs/heads/both, wanted one of them."
        " Try: --ref=refs/tags/both or --ref=refs/heads/both"
    )


def test_a_ref_that_is_not_there(server: Server) -> None:
    source = server.source("main", "one")
    wanted = "wanted a branch, a tag, refs/pull/N/head or a commit. Try:"
    near = "found near names v1.2.0rc1, v1.0"
    assert (
        refused(source, "1.2.0", server)
        == f"source engine: {server.engine} has no ref 1.2.0 — {near}, {wanted} --ref=v1.2.0rc1"
    )
    assert f"has no ref mian — found near names main, {wanted} --ref=main" in refused(source, "mian", server)
    assert f"has no ref refs/pull/8/head — {wanted} git ls-remote {server.engine}" in refused(
        source, "refs/pull/8/head", server
    )
    assert f"has no ref abcdef0 — {wanted} git ls-remote" in refused(source, "abcdef0", server)


def test_a_ref_that_has_vanished(server: Server) -> None:
    git(server.engine, "update-ref", "-d", "refs/pull/7/head")
    assert refused(server.source("refs/pull/7/head", "pull"), "refs/pull/7/head", server) == (
        f"source engine: refs/pull/7/head has vanished from {server.engine}; the locked commit stays as it is"
        f" — found no ref of that name, wanted refs/pull/7/head. Try: git ls-remote {server.engine}"
    )
    assert "release has vanished" in refused(server.source("release", "one"), "release", server)
    # A pin that never had a commit cannot have lost its ref.
    assert "has no ref release" in refused(server.source("release", "0" * 40), "release", server)


def test_a_server_that_is_not_there(server: Server) -> None:
    gone = replace(server.source("main", "one"), url=f"{BASE}owner/gone")
    assert "has no repository for https://host.invalid/owner/gone" in refused(gone, "main", server)
    (server.folder / "owner/gone").mkdir()
    assert f"{server.folder}/owner/gone cannot be reached: " in refused(gone, "main", server)


@pytest.fixture
def plain_server(server: Server) -> Iterator[str]:
    """The repositories over the simple HTTP protocol, which knows nothing of filters and bare commits."""
    git(server.engine, "update-server-info")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(server.folder))
    ) as listening:
        threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"http://user:secret@127.0.0.1:{listening.server_address[1]}/"
        listening.shutdown()


def test_a_simple_server(server: Server, plain_server: str) -> None:
    over_http = locations.read_mirrors([f"{BASE}owner/engine={plain_server}owner/engine.git"], {}, {})
    source = server.source("main", "one")
    assert git_refs.resolve(source, "v1.1", over_http).rev == server.commits["two"]
    assert git_refs.resolve(source, server.commits["two"][:9], over_http).rev == server.commits["two"]
    assert (
        git_refs.relation(source, Found("refs/heads/main", server.commits["three"], "branch"), over_http)
        == "2 commits later"
    )
    with pytest.raises(Trouble) as caught:
        git_refs.resolve(source, "nothing", over_http)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("followed", "locked", "asked", "words"),
    [
        ("main", "two", "main", "1 commit later"),
        ("main", "one", "main", "2 commits later"),
        ("refs/pull/7/head", "one", "refs/pull/7/head", "1 commit later"),
        ("main", "pull", "main", "this branch was force-pushed: the locked commit is no longer in its history"),
        (
            "pull/7/head",
            "two",
            "refs/pull/7/head",
            "this pull request was force-pushed: the locked commit is no longer in its history",
        ),
        ("v1.1", "two", "v1.0", "not built on the locked commit"),
        ("v1.0", "one", "v1.1", "1 commit later"),
        ("main", "three", "pull/7/head", "not built on the locked commit"),
    ],
)
def test_how_the_new_commit_follows_the_old(followed: str, locked: str, asked: str, words: str, server: Server) -> None:
    source = server.source(followed, locked)
    assert git_refs.relation(source, git_refs.resolve(source, asked, server.mirrors), server.mirrors) == words


def test_commits_of_both_sides_of_a_merge_count(server: Server) -> None:
    server.point("refs/heads/main", "merge")
    source = server.source("main", "two")
    assert (
        git_refs.relation(source, git_refs.resolve(source, "main", server.mirrors), server.mirrors) == "3 commits later"
    )


def test_a_locked_commit_that_was_collected(server: Server) -> None:
    """The server has forgotten the old commit altogether: that is a push by force too."""
    other = commit(server.engine, [], {**FILES, "new": "1"}, 9)
    server.point("refs/pull/7/head", other)
    git(server.engine, "reflog", "expire", "--expire=now", "--all")
    git(server.engine, "gc", "--quiet", "--prune=now")
    source = server.source("refs/pull/7/head", "pull")
    assert "force-pushed" in git_refs.relation(
        source, git_refs.resolve(source, source.ref, server.mirrors), server.mirrors
    )


def test_moved_tags(server: Server) -> None:
    server.point("refs/tags/v1.0", "three")
    for follows, moved in (
        ("v1.0", True),
        ("refs/tags/v1.0", True),
        ("tags/v1.0", True),
        ("v1.1", False),
        ("main", False),
    ):
        source = server.source(follows, "one")
        assert git_refs.moved_tag(source, git_refs.resolve(source, "v1.0", server.mirrors)) is moved, follows
    assert not git_refs.moved_tag(
        server.source("v1.0", "three"), Found("refs/tags/v1.0", server.commits["three"], "tag")
    )
    assert not git_refs.moved_tag(
        server.source("v1.0", "0" * 40), Found("refs/tags/v1.0", server.commits["three"], "tag")
    )
    assert not git_refs.moved_tag(
        server.source("main", "one"), Found("refs/heads/main", server.commits["three"], "branch")
    )


def test_beginnings_of_several_commits() -> None:
    commits = (f"1234567a{'0' * 32}", f"1234567ab{'0' * 31}", f"1234567b{'0' * 32}")
    with pytest.raises(Trouble) as caught:
        git_refs.only("1234567", commits, "source x")
    assert str(caught.value) == (
        "source x: 1234567 is the beginning of several commits — found 1234567a0, 1234567ab, 1234567b0, wanted more "
        "digits"
    )
    assert git_refs.only("1234567", commits[:1], "x") == Found(commits[0], commits[0], "commit")
    assert git_refs.only("1234567", (), "x") is None


def test_listing() -> None:
    text = (
        f"{A}\tHEAD\n{A}\trefs/tags/v1\n{B}\trefs/tags/v1^{{}}\n{C}\trefs/heads/x\nwarning: "
        f"odd\nabc\trefs/heads/short\n\n"
    )
    assert git_refs.parse_refs(text) == {"HEAD": A, "refs/tags/v1": B, "refs/heads/x": C}


@given(st.text(alphabet=f"ab\t\n^{{}}refs/heads/tags/v{A[:1]}", max_size=200), st.text(max_size=20))
def test_any_listing_and_any_question(text: str, asked: str) -> None:
    there = git_refs.parse_refs(f"{A}\t{asked}\n{text}")
    names = [name for name in (asked, f"refs/{asked}", f"refs/tags/{asked}", f"refs/heads/{asked}") if name in there]
    if len(names) > 1:
        with pytest.raises(Trouble, match="is the name of several refs"):
            git_refs.choose_ref(asked, there, "x")
    else:
        found = git_refs.choose_ref(asked, there, "x")
        assert ([(found.ref, found.rev)] if found else []) == [(name, there[name]) for name in names]
    assert len(git_refs.nearest(asked, there)) <= git_refs.NEAR
