"""Git sources by exact commit, with every filter off, verified by content before anything reads them.

With wheels.py this is the only door to the network. Trees are kept in a cache and hashed again each time they are used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepep_bootstrap import command, nar
from deepep_bootstrap.errors import Problem, Trouble
from deepep_bootstrap.sources import Source, Substitute
from deepep_bootstrap.mirrors import Mirrors, shown

PROBE_SECONDS = 60.0
REMOTE = "pinned"
KEPT = ("GIT_SSL_", "GIT_SSH", "GIT_PROXY_", "GIT_EXEC_PATH")
# Attributes of the repository are read last where info/attributes has spoken: nothing converts, expands, smudges or leaves out.
ATTRIBUTES = "* -text -crlf !eol -ident -filter -working-tree-encoding -export-subst -export-ignore\n"
CONFIG = """[core]
	autocrlf = false
	eol = lf
	symlinks = true
	attributesFile = /dev/null
	hooksPath = /dev/null
[protocol "file"]
	allow = always
[safe]
	directory = *
[http]
	lowSpeedLimit = 1000
	lowSpeedTime = 60
[init]
	defaultBranch = none
[advice]
	detachedHead = false
"""


@dataclass(frozen=True)
class _Pin:
    """What `_export` needs to know of a tree: the source's name for messages, its URL, what was asked for, and the commit."""

    name: str
    url: str
    ref: str
    rev: str
    submodules: bool


def fetch_source(source: Source, mirrors: Mirrors, cache: Path) -> Path:
    """Return a directory with the tree of `source`, its substitutions applied; nothing in it may be changed.

    The tree comes from the cache where its hash is still right, else from git. Raises Trouble when it cannot be fetched, when its
    hash is not the locked one (then nothing of it is kept), or when a substitution does not fit. Runs beside others safely.
    """
    try:
        return _fetched(source, mirrors, cache / "sources")
    except OSError as error:
        raise Trouble(
            Problem(str(error.filename or cache), f"the cache cannot be used: {error.strerror}", try_="XDG_CACHE_HOME=DIR")
        ) from None


def _fetched(source: Source, mirrors: Mirrors, store: Path) -> Path:
    store.mkdir(parents=True, exist_ok=True)
    plain = store / hashlib.sha256(source.hash.encode()).hexdigest()[:32]
    if not _holds(plain, source.hash):
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=store) as scratch:
            pin = _Pin(source.name, source.url, source.ref, source.rev, source.submodules)
            tree = _export(pin, mirrors, Path(scratch))
            found = nar.hash_path(tree)
            if found != source.hash:
                what = f"the tree of {source.rev[:12]} from {shown(mirrors.source(source.url))} is not the locked one"
                raise Trouble(Problem(f"source {source.name}", what, found, source.hash))
            _publish(tree, plain, source.hash)
    return _substituted(source, plain) if source.substitutes else plain


def _holds(tree: Path, wanted: str) -> bool:
    """Return whether `tree` is there with the hash `wanted`; one that is not what it should be is taken away."""
    if not tree.is_dir():
        return False
    with contextlib.suppress(Trouble):  # a socket, an unreadable file: then it is not the tree that was put there
        if nar.hash_path(tree) == wanted:
            return True
    aside = Path(tempfile.mkdtemp(prefix=".tmp-", dir=tree.parent))
    with contextlib.suppress(FileNotFoundError):  # another run may just have taken it away
        tree.rename(aside / "tree")
    shutil.rmtree(aside, ignore_errors=True)
    return False


def _publish(tree: Path, target: Path, wanted: str) -> None:
    """Rename `tree` to `target`; where another run was first, its tree stays if it is right."""
    try:
        tree.rename(target)
    except OSError:
        # Either there is a right tree now, or a wrong one has just been taken away and the way is free.
        if not _holds(target, wanted):
            tree.rename(target)


def _substituted(source: Source, plain: Path) -> Path:
    """Return the copy of `plain` with the substitutions of `source`; it is made again where its content is not what it must be."""
    overlay = _overlay(source, plain)
    facts = [[each.file, each.text, each.replacement, each.count] for each in source.substitutes]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    target = plain.with_name(f"{plain.name}-{digest}")
    wanted = nar.hash_path(plain, overlay)
    if not _holds(target, wanted):
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=plain.parent) as scratch:
            copy = Path(scratch, "tree")
            shutil.copytree(plain, copy, symlinks=True)
            for name, content in overlay.items():
                Path(copy, os.fsdecode(name)).write_bytes(content)
            _publish(copy, target, wanted)
    return target


def _overlay(source: Source, plain: Path) -> dict[bytes, bytes]:
    """Return the new content of every file that the substitutions change. Raises Trouble with all that do not fit."""
    problems: list[Problem] = []
    overlay: dict[bytes, bytes] = {}
    for number, each in enumerate(source.substitutes, 1):
        where = f"source {source.name}, substitute {number} ({each.file})"
        name = os.fsencode(each.file)
        path = plain / each.file
        if not path.is_file() or path.resolve() != plain.resolve() / each.file:
            problems.append(Problem(where, "there is no such file in the tree"))
            continue
        before = overlay.get(name) if name in overlay else path.read_bytes()
        overlay[name] = _replaced(before or b"", each, where, problems)
    if problems:
        raise Trouble(*problems)
    return overlay


def _replaced(before: bytes, each: Substitute, where: str, problems: list[Problem]) -> bytes:
    text = each.text.encode()
    count = before.count(text)
    if count != each.count:
        problems.append(Problem(where, "the text to replace is not there as often as it should", str(count), str(each.count)))
    return before.replace(text, each.replacement.encode())


def _export(pin: _Pin, mirrors: Mirrors, scratch: Path) -> Path:
    """Fetch the commit of `pin` into a repository below `scratch` and write out its tree; return that tree's directory."""
    repository, tree, config = scratch / "repository", scratch / "tree", scratch / "gitconfig"
    where, place = f"source {pin.name}", mirrors.source(pin.url)
    # The address may hold a password: it goes into a file of ours, never onto a command line.
    quoted = place.replace("\\", "\\\\").replace('"', '\\"')
    config.touch(mode=0o600)
    config.write_text(f'{CONFIG}[remote "{REMOTE}"]\n\turl = "{quoted}"\n', encoding="utf-8")
    environment = _environment(config)
    _git(("init", "--quiet", "--bare", "--template=", repository), environment, where)
    repository.joinpath("info").mkdir(exist_ok=True)
    repository.joinpath("info", "attributes").write_text(ATTRIBUTES, encoding="utf-8")
    _fetch(pin, place, repository, environment)
    tree.mkdir()
    at = (f"--git-dir={repository}", f"--work-tree={tree}", "-c", "core.bare=false")
    _git((*at, "read-tree", pin.rev), environment, where)
    _git((*at, "checkout-index", "--all", "--force", f"--prefix={tree}/"), environment, where)
    if pin.submodules:
        _export_submodules(pin, mirrors, scratch, environment)
    return tree


def _fetch(pin: _Pin, place: str, repository: Path, environment: Mapping[str, str]) -> None:
    """Bring the commit into `repository` from `place`: alone, else with what was asked for, else with everything there."""
    where = f"source {pin.name}"
    remedy = "--mirror PREFIX=DIRECTORY with a copy of the repository"
    at = ("git", "-C", repository)
    try:
        reached = command.run((*at, "ls-remote", REMOTE, "HEAD"), env=environment, timeout=PROBE_SECONDS)
    except Trouble:
        raise Trouble(Problem(where, f"{shown(place)} cannot be reached: no answer in {PROBE_SECONDS:g} s", try_=remedy)) from None
    if reached.code != 0:
        raise Trouble(Problem(where, f"{shown(place)} cannot be reached: {_reason(reached, place)}", try_=remedy))
    said = ""
    for words in (("--depth=1", REMOTE, pin.rev), (REMOTE, pin.ref), (REMOTE, "+refs/*:refs/fetched/*")):
        fetched = command.run((*at, "fetch", "--quiet", "--no-tags", *words), env=environment)
        there = command.run((*at, "cat-file", "-e", f"{pin.rev}^{{commit}}"), env=environment)
        if fetched.code == 0 and there.code == 0:
            return
        said = _reason(fetched, place) or said
    what = f"{shown(place)} does not give out the locked commit" + (f": {said}" if said else "")
    raise Trouble(Problem(where, what, wanted=pin.rev, try_=remedy))


def _export_submodules(pin: _Pin, mirrors: Mirrors, scratch: Path, environment: Mapping[str, str]) -> None:
    """Fill in the submodules of a tree, each by the commit that the tree records."""
    where = f"source {pin.name}"
    at = ("-C", str(scratch / "repository"))
    listed = _git((*at, "ls-tree", "-r", "-z", "--full-tree", pin.rev), environment, where)
    links = [line.split(maxsplit=3) for line in listed.split("\0") if line.startswith("160000 ")]
    if not links:
        return
    settings = _git((*at, "config", "--null", "--list", "--blob", f"{pin.rev}:.gitmodules"), environment, where)
    pairs = dict(item.split("\n", 1) for item in settings.split("\0") if "\n" in item)
    urls = {path: pairs.get(f"{key[: -len('.path')]}.url", "") for key, path in pairs.items() if key.endswith(".path")}
    for number, (_, _, rev, path) in enumerate(links):
        target = scratch / "tree" / path
        if not urls.get(path) or target.resolve() != (scratch / "tree").resolve() / path:
            raise Trouble(Problem(where, f"its submodule {path} has no address"))
        inner = scratch / f"module-{number}"
        inner.mkdir()
        module = _Pin(f"{pin.name}, submodule {path}", _absolute(urls[path], pin.url), "HEAD", rev, submodules=True)
        tree = _export(module, mirrors, inner)
        target.rmdir()
        tree.rename(target)


def _absolute(url: str, parent: str) -> str:
    """Return the address of a submodule whose `url` may be relative to its parent's."""
    base = parent.rstrip("/")
    while url.startswith(("./", "../")):
        step, url = url.split("/", 1)
        base = base.rsplit("/", 1)[0] if step == ".." else base
        if not url.startswith(("./", "../")):
            return f"{base}/{url}"
    return url


def _git(words: Sequence[str | Path], environment: Mapping[str, str], where: str) -> str:
    done = command.run(("git", *words), env=environment)
    if done.code != 0:
        raise Trouble(Problem(where, f"git could not write out the tree: {_reason(done, '')}"))
    return done.out


def _reason(done: command.Completed, place: str) -> str:
    """Return the line in which git says why it failed, without the password that `place` may hold."""
    lines = [line for line in done.tail.splitlines() if line.startswith(("fatal: ", "error: "))] or done.tail.splitlines()
    reason = lines[0].split(": ", 1)[-1] if lines else ""
    return reason.replace(place, shown(place)) if place else reason


def _environment(config: Path) -> dict[str, str]:
    """Return the caller's environment with its proxies and certificates, but without any other setting of git's."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GIT_") or key.startswith(KEPT)}
    if "GIT_SSH" not in kept:
        kept.setdefault("GIT_SSH_COMMAND", "ssh -o BatchMode=yes -o ConnectTimeout=20")
    own = {"GIT_CONFIG_GLOBAL": str(config), "GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1", "GIT_NO_REPLACE_OBJECTS": "1"}
    return kept | own | {"GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1", "LC_ALL": "C"}
