"""One pin of the lock against its server: compared with what is there, or renewed from it. Nothing here
writes the lock.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.fetch import git_refs
from deepep_bootstrap.fetch.git_refs import Found
from deepep_bootstrap.fetch.locations import Mirrors, shown
from deepep_bootstrap.fetch.sources import measure_source
from deepep_bootstrap.lock.model import REF, VERSION, Source

SOURCE_KEYS = ("ref", "rev", "hash", "last_modified", "version")
VERSION_IN_NAME = re.compile(r"\d+(?:\.\d+)+(?:(?:a|b|rc|\.post|\.dev)\d+)?")
"""A version as it stands in the name of a tag: two numbers or more, perhaps a pre- or post-release."""


class PinRequest(Struct, frozen=True):
    """What a user wants of an update: another `ref` than the lock's, the project's own `version`."""

    ref: str = ""
    version: str = ""


class CheckedPin(Struct, frozen=True):
    """What came of looking at a pin again: faults, and what is worth knowing although the pin is as locked.
    `stated`: what an index says of a file was compared, not the file."""

    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()
    stated: bool = False


class Renewal(Struct, frozen=True):
    """A pin as the lock has it and as it would be now, by key; `notes` says how one became the other, `link` shows
    the difference."""

    table: str
    name: str
    before: Mapping[str, str | int]
    after: Mapping[str, str | int]
    notes: tuple[str, ...] = ()
    link: str = ""

    @property
    def changed(self) -> dict[tuple[str, ...], str | int]:
        """The keys that differ, by their place in the lock, with their new values."""
        return {(self.table, self.name, key): value for key, value in self.after.items() if value != self.before[key]}


def check_source(source: Source, mirrors: Mirrors) -> CheckedPin:
    """Fetch a source anew and compare it with its pin; a ref that has gone elsewhere is no fault: the commit
    decides."""
    where = f"source {source.name}"
    try:
        found = measure_source(source, mirrors)
    except Trouble as trouble:
        return CheckedPin(trouble.problems)
    problems = []
    if found.hash != source.hash:
        problems.append(Problem(where, f"the tree of {source.rev[:12]} has another hash", found.hash, source.hash))
    if found.last_modified != source.last_modified:
        problems.append(
            Problem(where, "last_modified is not the commit's", str(source.last_modified), str(found.last_modified))
        )
    return CheckedPin((*problems, *found.problems), _ref_notes(source, mirrors))


def renew_source(source: Source, request: PinRequest, mirrors: Mirrors) -> Renewal:
    """Return what the pin of `source` becomes when its ref, or the one that is wished for, is followed now.

    Raises Trouble when that leads nowhere or to several commits, when the lock's own tag was moved (only `--ref` takes
    that), when the commit cannot be fetched, and when a substitution does not fit the new tree.
    """
    _check_request(request)
    asked = request.ref or source.ref
    found = git_refs.resolve(source, asked, mirrors)
    moved = git_refs.moved_tag(source, found)
    if moved and not request.ref:
        what = f"the tag {source.ref} was moved: it is not at the locked commit any more"
        raise Trouble(
            Problem(f"source {source.name}", what, found.rev, source.rev, f"--ref={source.ref} takes it on purpose")
        )
    new = replace(source, ref=found.rev if found.kind == "commit" else asked, rev=found.rev)
    tree = measure_source(new, mirrors)
    if tree.problems:
        table = f"[[source.{source.name}.substitute]]"
        remedy = (
            f"taking that {table} out of the lock where {asked} has such a change itself, else adapting it to "
            f"the new tree"
        )
        raise Trouble(*(replace(problem, try_=remedy) for problem in tree.problems))
    version, reason = _version(source, found, request)
    new = replace(new, hash=tree.hash, last_modified=tree.last_modified, version=version)
    before, after = _values(source), _values(new)
    if before == after:
        return Renewal("source", source.name, before, after)
    notes = [*_history(source, new, found, mirrors), reason, _origin(source.url, mirrors.source(source.url))]
    if moved:
        notes.insert(0, "this tag was moved, and --ref takes it")
    link = "" if new.rev == source.rev or git_refs.is_new(source) else compare_link(source.url, source.rev, new.rev)
    return Renewal("source", source.name, before, after, tuple(filter(None, notes)), link)


def compare_link(url: str, old: str, new: str) -> str:
    """Return the page that shows the commits between two, as GitHub (and those who do like it) and GitLab call it;
    "" where none is."""
    if not url.startswith(("https://", "http://")):
        return ""
    base = shown(url).rstrip("/").removesuffix(".git")
    dash = "/-" if "gitlab" in base.split("/")[2] else ""
    return f"{base}{dash}/compare/{old}...{new}"


def version_in(name: str) -> str:
    """Return the version that stands in the name of a tag, without what comes before and behind it; ""
    where none does."""
    match = VERSION_IN_NAME.search(name.rsplit("/", 1)[-1])
    return match[0] if match else ""


def _version(source: Source, found: Found, request: PinRequest) -> tuple[str, str]:
    """Return the version of the new pin and a note where it could not be known.

    It is read from the name of a tag where that way of reading gives the locked version from the locked ref, or the
    locked ref had none.
    """
    if request.version or found.rev == source.rev:
        return request.version or source.version, ""
    read = version_in(found.ref) if found.kind == "tag" else ""
    if read and version_in(source.ref) in {"", source.version}:
        return read, ""
    return source.version, _stays(source.version)


def _stays(version: str) -> str:
    return f"version stays {version}: --version=V sets another"


def _history(old: Source, new: Source, found: Found, mirrors: Mirrors) -> list[str]:
    """Return how the new pin came from the old one."""
    if git_refs.is_new(old):
        return []
    if new.rev != old.rev:
        return [git_refs.relation(old, found, mirrors)]
    return ["the commit is the same, but its tree has another hash than the locked one"] if new.hash != old.hash else []


def _ref_notes(source: Source, mirrors: Mirrors) -> tuple[str, ...]:
    """Return what has become of the ref that led to the pin, where its own server can be asked."""
    if mirrors.source(source.url) != source.url or source.ref == source.rev:
        return ()
    try:
        found = git_refs.resolve(source, source.ref, mirrors)
    except Trouble as trouble:
        return tuple(problem.what for problem in trouble.problems)
    return (f"the tag {source.ref} was moved to {found.rev[:12]}",) if git_refs.moved_tag(source, found) else ()


def _origin(url: str, place: str) -> str:
    return "" if place == url else f"from {shown(place)}"


def _check_request(request: PinRequest) -> None:
    problems = []
    if request.ref and not REF.fits(request.ref):
        problems.append(Problem("--ref", "is not what belongs here", request.ref, REF.words))
    if request.version and not VERSION.fits(request.version):
        problems.append(Problem("--version", "is not what belongs here", request.version, VERSION.words))
    if problems:
        raise Trouble(*problems)


def _values(source: Source) -> dict[str, str | int]:
    return {key: getattr(source, key) for key in SOURCE_KEYS}
