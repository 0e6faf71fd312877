"""Refs of a git server: from a branch, tag, full ref or commit id to one full commit, and the relation of
that commit to the locked one.
"""

from __future__ import annotations

import difflib
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.fetch import git
from deepep_bootstrap.fetch.git import Pin
from deepep_bootstrap.fetch.locations import Mirrors, shown
from deepep_bootstrap.lock.model import REV, Source

ABBREVIATION = re.compile(r"[0-9a-f]{7,63}")
"""Seven digits are what git itself shows; shorter ones are more often the name of something."""
NOTHING_YET = re.compile(r"0+")
"""A commit id of zeros stands for a pin that never had one."""
PLACES = ("{}", "refs/{}", "refs/tags/{}", "refs/heads/{}")
"""Where git looks for a short name; we refuse one that several places have instead of taking the first."""
KINDS = {
    "refs/tags/": "tag",
    "refs/heads/": "branch",
    "refs/pull/": "pull request",
    "refs/merge-requests/": "pull request",
}
NEAR = 3


class Found(Struct, frozen=True):
    """What was asked for is `ref` (its full name, or the commit's own id) and leads to the commit `rev`; `kind` is a
    word for it."""

    ref: str
    rev: str
    kind: str


def resolve(source: Source, asked: str, mirrors: Mirrors) -> Found:
    """Return what `asked` (a ref, a full or an abbreviated commit id) is at the repository of `source` now.

    Raises Trouble when nothing or several things are called so, or the server cannot be asked.
    """
    if REV.fits(asked):
        return Found(asked, asked, "commit")
    pin = Pin(source.name, source.url, asked, asked, submodules=False)
    with tempfile.TemporaryDirectory(prefix="deepep-bootstrap-") as scratch:
        repository = git.create(pin, mirrors, Path(scratch))
        there = parse_refs(git.listing(repository))
    found = choose_ref(asked, there, pin.where)
    if found is None and ABBREVIATION.fullmatch(asked):
        with tempfile.TemporaryDirectory(prefix="deepep-bootstrap-") as scratch:
            found = only(asked, git.expand(pin, mirrors, Path(scratch)), pin.where)
    if found is None:
        raise Trouble(absent(source, asked, there, shown(repository.place)))
    return found


def parse_refs(text: str) -> dict[str, str]:
    """Return the commit of each ref in what `git ls-remote` prints; an annotated tag counts as the commit it was put
    on."""
    there: dict[str, str] = {}
    peeled: dict[str, str] = {}
    for line in text.splitlines():
        rev, tab, ref = line.partition("\t")
        if tab and REV.fits(rev):
            (peeled if ref.endswith("^{}") else there)[ref.removesuffix("^{}")] = rev
    return there | peeled


def choose_ref(asked: str, there: Mapping[str, str], where: str) -> Found | None:
    """Return the one ref of `there` that `asked` names, or None. Raises Trouble when it names several."""
    names = [name for name in (place.format(asked) for place in PLACES) if name in there]
    if len(names) > 1:
        remedy = " or ".join(f"--ref={name}" for name in names)
        raise Trouble(Problem(where, f"{asked} is the name of several refs", ", ".join(names), "one of them", remedy))
    return Found(names[0], there[names[0]], kind_of(names[0])) if names else None


def kind_of(ref: str) -> str:
    """Return a word for what a full ref is: tag, branch, pull request or ref."""
    return next(
        (word for prefix, word in KINDS.items() if ref.startswith(prefix)), "branch" if ref == "HEAD" else "ref"
    )


def only(asked: str, commits: tuple[str, ...], where: str) -> Found | None:
    """Return the one commit that an abbreviation stands for, or None. Raises Trouble when there are several."""
    if len(commits) > 1:
        shortest = next(
            size for size in range(len(asked) + 1, 65) if len({each[:size] for each in commits}) == len(commits)
        )
        found = ", ".join(each[:shortest] for each in commits)
        raise Trouble(Problem(where, f"{asked} is the beginning of several commits", found, "more digits"))
    return Found(commits[0], commits[0], "commit") if commits else None


def absent(source: Source, asked: str, there: Mapping[str, str], place: str) -> Problem:
    """Return the problem of a ref that is not there: one that the lock has followed has vanished, another may be
    misspelt."""
    where = f"source {source.name}"
    near = nearest(asked, there)
    found = f"near names {', '.join(near)}" if near else ""
    remedy = f"--ref={near[0]}" if near else f"git ls-remote {place}"
    if asked == source.ref and not is_new(source):
        what = f"{asked} has vanished from {place}; the locked commit stays as it is"
        return Problem(where, what, found or "no ref of that name", asked, remedy)
    return Problem(where, f"{place} has no ref {asked}", found, "a branch, a tag, refs/pull/N/head or a commit", remedy)


def nearest(asked: str, there: Mapping[str, str]) -> list[str]:
    """Return the few names of `there` that are most like `asked`, the best first: those that hold it, then those
    written like it.

    Pull requests are left out: a number that differs in one digit is no misspelling.
    """
    short = {
        re.sub(r"^refs/(heads|tags)/", "", ref): ref
        for ref in there
        if kind_of(ref) != "pull request" and ref != "HEAD"
    }
    word = re.sub(r"^refs/(heads|tags)/", "", asked)
    holding = sorted((name for name in short if word.lower() in name.lower()), key=lambda name: (len(name), name))
    alike = difflib.get_close_matches(word, short, NEAR)
    return list(dict.fromkeys([*holding, *alike]))[:NEAR]


def moved_tag(source: Source, found: Found) -> bool:
    """Return whether the tag that the lock follows leads to another commit than the locked one."""
    return found.kind == "tag" and _follows(source, found) and found.rev != source.rev and not is_new(source)


def is_new(source: Source) -> bool:
    """Return whether the pin never had a commit: its `rev` is all zeros."""
    return NOTHING_YET.fullmatch(source.rev) is not None


def relation(source: Source, found: Found, mirrors: Mirrors) -> str:
    """Return in words how the commit that was found follows the locked one, after a look at its history.

    A branch or pull request that the lock follows and whose history has lost the locked commit was force-pushed; where
    another ref was asked for, its commit may just be somewhere else.
    """
    pin = Pin(source.name, source.url, found.ref, found.rev, submodules=False)
    with tempfile.TemporaryDirectory(prefix="deepep-bootstrap-") as scratch:
        count = git.commits_since(pin, source.rev, mirrors, Path(scratch))
    if count is not None:
        return f"{count} commit{'s' * (count != 1)} later"
    if _follows(source, found) and found.kind in {"branch", "pull request"}:
        return f"this {found.kind} was force-pushed: the locked commit is no longer in its history"
    return "not built on the locked commit"


def _follows(source: Source, found: Found) -> bool:
    return found.ref in {place.format(source.ref) for place in PLACES}
