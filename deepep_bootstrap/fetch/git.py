"""A scratch git repository with one remote: its refs, one commit of it, the tree with every filter off, the
submodules.

Of the settings of the user and the machine those for proxies and certificates have a say, of a repository
none.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from msgspec import Struct

from deepep_bootstrap.core import process
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.text import LAST_SECOND
from deepep_bootstrap.fetch.locations import Mirrors, is_address, remedy, shown
from deepep_bootstrap.lock.model import URL

PROBE_SECONDS = 60.0
REMOTE = "pinned"
REMEDY = "--mirror PREFIX=DIRECTORY with a copy of the repository"
LEAN = "--filter=tree:0"
EVERYTHING = "+refs/*:refs/fetched/*"
KEPT = ("GIT_SSL_", "GIT_SSH", "GIT_PROXY_", "GIT_EXEC_PATH")
SCP_LIKE = re.compile(r"(?!(https?|ssh|git|file):)(\w[\w.-]*@)?[A-Za-z0-9][A-Za-z0-9.-]*:[^:\s].*")
"""What git takes for an address over ssh besides URLs: `git@host:owner/name`; not what is left of a URL after too
many `../`."""
# Attributes of the repository are read last where info/attributes has spoken: nothing converts, expands, smudges or
# leaves out.
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
[gc]
	auto = 0
[maintenance]
	auto = false
[advice]
	detachedHead = false
"""


class Pin(Struct, frozen=True):
    """A tree to write out: the name for messages, the repository's URL, what was asked for, the commit, with or
    without submodules."""

    name: str
    url: str
    ref: str
    rev: str
    submodules: bool

    @property
    def where(self) -> str:
        """Where a problem with it is, for a message."""
        return f"source {self.name}"


class Repository(Struct, frozen=True):
    """A bare repository at `path` whose remote is `place`, an address or a directory; `where` names the pin in
    messages, `settings` are those of this machine for the network."""

    path: Path
    place: str
    where: str
    environment: Mapping[str, str]
    settings: tuple[Setting, ...]


class Tree(Struct, frozen=True):
    """The files of a commit below `path`, without any `.git`, and the time of the commit in seconds since 1970."""

    path: Path
    last_modified: int


def create(pin: Pin, mirrors: Mirrors, scratch: Path) -> Repository:
    """Return an empty repository below `scratch` whose remote is that of `pin`, or what the mirrors put in its
    place."""
    path, config = scratch / "repository", scratch / "gitconfig"
    place = mirrors.source(pin.url)
    check_version()
    settings = network_settings(scratch)
    # The address may hold a password: it goes into a file of ours, never onto a command line; git hands addresses to
    # its helpers.
    address, secret = _without_password(place)
    known = scratch / "credentials"
    for file, text in ((config, _config(address, known) + text_of(settings)), (known, secret)):
        file.touch(mode=0o600)
        file.write_text(text, encoding="utf-8")
    repository = Repository(path, place, pin.where, _environment(config), settings)
    _run(repository, "init", "--quiet", "--bare", "--template=", path)
    path.joinpath("info").mkdir(exist_ok=True)
    path.joinpath("info", "attributes").write_text(ATTRIBUTES, encoding="utf-8")
    return repository


def listing(repository: Repository, *patterns: str) -> str:
    """Return what `git ls-remote` prints (of refs that match `patterns`, else of all): lines of id, tab, ref.

    Raises Trouble when the remote cannot be reached or does not answer in a minute.
    """
    where, place = repository.where, repository.place
    through = on_the_way(repository.settings, place)
    try:
        reached = process.run_program(
            ("git", "-C", repository.path, "ls-remote", REMOTE, *patterns),
            env=repository.environment,
            timeout=PROBE_SECONDS,
        )
    except Trouble:
        raise Trouble(
            Problem(where, f"{shown(place)} cannot be reached: no answer in {PROBE_SECONDS:g} s", through, try_=REMEDY)
        ) from None
    if reached.code != 0:
        raise Trouble(
            Problem(where, f"{shown(place)} cannot be reached: {_reason(reached, place)}", through, try_=REMEDY)
        )
    return reached.out


def bring(repository: Repository, rev: str, ref: str, *, history: bool = False) -> None:
    """Bring the commit `rev` into the repository: alone (or with its whole `history`), else with the ref `ref`, else
    with everything there. Raises Trouble."""
    listing(repository, "HEAD")
    _fetch(repository, rev, ((*(() if history else ("--depth=1",)), REMOTE, rev), (REMOTE, ref), (REMOTE, EVERYTHING)))


def commits_since(pin: Pin, base: str, mirrors: Mirrors, scratch: Path) -> int | None:
    """Return how many commits the commit of `pin` has in its history that `base` has not; None where `base` is not in
    it.

    Contents are left where they are if the server can do that.
    """
    repository = create(pin, mirrors, scratch)
    lean = _lean(pin, mirrors, scratch)
    _fetch(repository, pin.rev, [(*lean, REMOTE, what) for what in (pin.rev, pin.ref, EVERYTHING)])
    if base not in _run(repository, "rev-list", pin.rev).split():
        return None
    return int(_run(repository, "rev-list", "--count", f"{base}..{pin.rev}"))


def expand(pin: Pin, mirrors: Mirrors, scratch: Path) -> tuple[str, ...]:
    """Return the full ids of all commits of the remote that begin with `pin.rev`, an abbreviated one."""
    repository = create(pin, mirrors, scratch)
    words = ("fetch", "--quiet", "--no-tags", *_lean(pin, mirrors, scratch), REMOTE, EVERYTHING)
    fetched = process.run_program(("git", "-C", repository.path, *words), env=repository.environment)
    if fetched.code != 0:
        raise Trouble(
            Problem(
                pin.where,
                f"{shown(repository.place)} cannot be read: {_reason(fetched, repository.place)}",
                try_=REMEDY,
            )
        )
    ids = _run(repository, "rev-list", "--all").split()
    return tuple(sorted(each for each in ids if each.startswith(pin.rev)))


def _lean(pin: Pin, mirrors: Mirrors, scratch: Path) -> tuple[str, ...]:
    """Return the option that leaves contents on the server, where it can do that.

    Tried on one commit in a repository of its own: from a server of plain files git fetches what was left out at once,
    and from within that fetch again, without an end. Such a server refuses the depth first.
    """
    probe = scratch / "probe"
    probe.mkdir()
    repository = create(pin, mirrors, probe)
    words = ("fetch", "--quiet", "--no-tags", "--depth=1", LEAN, REMOTE, "HEAD")
    return (
        (LEAN,)
        if process.run_program(("git", "-C", repository.path, *words), env=repository.environment).code == 0
        else ()
    )


def export(pin: Pin, mirrors: Mirrors, scratch: Path) -> Tree:
    """Fetch the commit of `pin` into a repository below `scratch` and write out its tree there, byte for byte as it
    was committed."""
    repository = create(pin, mirrors, scratch)
    bring(repository, pin.rev, pin.ref)
    tree = scratch / "tree"
    write_out(repository, pin.rev, tree)
    if pin.submodules:
        for number, (module, target) in enumerate(submodules(pin, repository, tree)):
            inner = scratch / f"module-{number}"
            inner.mkdir()
            filled = export(module, mirrors, inner)
            target.rmdir()
            filled.path.rename(target)
    return Tree(tree, _commit_time(repository, pin.rev))


def _commit_time(repository: Repository, rev: str) -> int:
    """Return when a commit was made, in seconds since 1970: what its author's machine said, whatever that is."""
    seconds = _run(repository, "show", "--no-patch", "--format=%ct", rev).split()[0]
    return min(int(seconds), LAST_SECOND) if re.fullmatch(r"[0-9]{1,20}", seconds) else 0


def write_out(repository: Repository, rev: str, tree: Path) -> None:
    """Write the files of a commit that the repository has into the new directory `tree`; submodules are empty
    directories there."""
    tree.mkdir()
    at = (f"--git-dir={repository.path}", f"--work-tree={tree}", "-c", "core.bare=false")
    _run(repository, *at, "read-tree", rev)
    _run(repository, *at, "checkout-index", "--all", "--force", f"--prefix={tree}/")


def _fetch(repository: Repository, rev: str, attempts: Sequence[Sequence[str]]) -> None:
    where, place = repository.where, repository.place
    at = ("git", "-C", repository.path)
    reason = ""
    for words in attempts:
        fetched = process.run_program((*at, "fetch", "--quiet", "--no-tags", *words), env=repository.environment)
        kind = process.run_program((*at, "cat-file", "-t", rev), env=repository.environment)
        if fetched.code == 0 and kind.out.strip() == "commit":
            return
        if fetched.code == 0 and kind.code == 0:
            raise Trouble(Problem(where, f"{rev[:12]} is no commit", kind.out.strip(), "the id of a commit"))
        reason = _reason(fetched, place) or reason
    what = f"{shown(place)} does not give out the locked commit" + (f": {reason}" if reason else "")
    raise Trouble(Problem(where, what, wanted=rev, try_=remedy(place, REMEDY)))


def submodules(pin: Pin, repository: Repository, tree: Path) -> list[tuple[Pin, Path]]:
    """Return the submodules of a tree, each by the commit that the tree records, with the empty directory it belongs
    into.

    One with `update = none` stays empty, as after `git submodule update --init`.
    """
    lines = _run(repository, "ls-tree", "-r", "-z", "--full-tree", pin.rev).split("\0")
    links = [line.split(maxsplit=3) for line in lines if line.startswith("160000 ")]
    if not links:
        return []
    if not (tree / ".gitmodules").is_file():
        raise Trouble(
            Problem(pin.where, f"its submodule {links[0][3]} has no address", "no file .gitmodules in the tree")
        )
    settings = _run(repository, "config", "--null", "--list", "--blob", f"{pin.rev}:.gitmodules")
    pairs = dict(item.split("\n", 1) for item in settings.split("\0") if "\n" in item)
    sections = {path: key[: -len(".path")] for key, path in pairs.items() if key.endswith(".path")}
    found = []
    for _, _, rev, path in links:
        section = sections.get(path, "")
        if pairs.get(f"{section}.update") == "none":
            continue
        url, target = absolute(pairs.get(f"{section}.url", ""), pin.url), tree / path
        if not _may_lead_to(url, pin.url) or target.resolve() != tree.resolve() / path:
            raise Trouble(
                Problem(
                    pin.where, f"its submodule {path} has no address that can be used", url, "https://host/owner/name"
                )
            )
        found.append((Pin(f"{pin.name}, submodule {path}", url, "HEAD", rev, submodules=True), target))
    return found


def _may_lead_to(url: str, parent: str) -> bool:
    """Return whether a tree of `parent` may name the submodule address `url`: files of this machine are not for
    others to name."""
    if ".." in url.split("/"):
        return False
    if is_address(url):
        return URL.fits(url) and (not url.startswith("file://") or parent.startswith("file://"))
    return SCP_LIKE.fullmatch(url) is not None


def absolute(url: str, parent: str) -> str:
    """Return the address of a submodule whose `url` may be relative to its parent's."""
    base = parent.rstrip("/")
    while url.startswith(("./", "../")):
        step, url = url.split("/", 1)
        base = base.rsplit("/", 1)[0] if step == ".." else base
        if not url.startswith(("./", "../")):
            return f"{base}/{url}"
    return url


def _without_password(place: str) -> tuple[str, str]:
    """Return an address over http without user and password, and the line of git's credential store that has them;
    "" where none are."""
    parts = urlsplit(place)
    account, _, host = parts.netloc.rpartition("@")
    if not account or parts.scheme not in {"http", "https"}:
        return place, ""
    return urlunsplit(
        parts._replace(netloc=host)
    ), f"{parts.scheme}://{account if ':' in account else f'{account}:'}@{host}\n"


def _config(address: str, known: Path) -> str:
    remote = address.replace("\\", "\\\\").replace('"', '\\"')
    helper = f"store --file={shlex.quote(str(known))}".replace("\\", "\\\\").replace('"', '\\"')
    return f'{CONFIG}[credential]\n\thelper = "{helper}"\n[remote "{REMOTE}"]\n\turl = "{remote}"\n'


def _run(repository: Repository, *words: str | Path) -> str:
    at: tuple[str | Path, ...] = ("-C", repository.path) if repository.path.is_dir() else ()
    done = process.run_program(("git", *at, *words), env=repository.environment)
    if done.code != 0:
        raise Trouble(Problem(repository.where, f"git could not write out the tree: {_reason(done, '')}"))
    return done.out


def _reason(done: process.Completed, place: str) -> str:
    """Return the line in which git says why it failed, without the password that `place` may hold."""
    lines = [
        line for line in done.tail.splitlines() if line.startswith(("fatal: ", "error: "))
    ] or done.tail.splitlines()
    reason = lines[0].split(": ", 1)[-1] if lines else ""
    return reason.replace(place, shown(place)) if place else reason


def _environment(config: Path) -> dict[str, str]:
    """Return the caller's environment with its proxies and certificates, but without any other of git's own
    variables."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GIT_") or key.startswith(KEPT)}
    if "GIT_SSH" not in kept:
        kept.setdefault("GIT_SSH_COMMAND", "ssh -o BatchMode=yes -o ConnectTimeout=20")
    own = {
        "GIT_CONFIG_GLOBAL": str(config),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
    }
    return kept | own | {"GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1", "LC_ALL": "C"}


OLDEST = (2, 32)
"""Since this version git knows GIT_CONFIG_GLOBAL, by which it gets our settings in place of the user's."""
NETWORK = re.compile(r"http\.(?:(.+)\.)?(proxy|proxyauthmethod|proxysslcainfo|sslcainfo|sslcapath|sslcert|sslkey)")
"""Settings for the network as `git config --list` prints their names: for all servers, or `http.ADDRESS.NAME` for
some."""


class Setting(Struct, frozen=True):
    """One setting `http.NAME`; `address` is the beginning of the addresses it is for, "" for all."""

    address: str
    name: str
    value: str

    def __str__(self) -> str:
        value = shown(self.value) if is_address(self.value) else self.value.rpartition("@")[2]
        return f"http.{self.address}{'.' if self.address else ''}{self.name} {value}"


def check_version() -> None:
    """Raise Trouble where git is missing or too old to be kept from settings that change what is fetched."""
    # Without settings: ones that cannot be read make even this fail.
    printed = process.run_program(
        ("git", "--version"), env=os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    ).out
    version = re.search(r"(\d+)\.(\d+)\S*", printed)
    if version is None or (int(version[1]), int(version[2])) < OLDEST:
        found, wanted = version[0] if version else printed.strip(), f"{OLDEST[0]}.{OLDEST[1]} or newer"
        raise Trouble(Problem("git", "is too old to fetch sources with", found, wanted, "a newer one first in PATH"))


def network_settings(folder: Path) -> tuple[Setting, ...]:
    """Return the proxies and certificates in git's settings of this user and this machine, the strongest last; none
    where git cannot read them. `folder` is one that belongs to no repository."""
    own = {key: value for key, value in os.environ.items() if key not in {"GIT_DIR", "GIT_WORK_TREE", "GIT_CONFIG"}}
    listed = process.run_program(
        ("git", "config", "--null", "--list"), env=own | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}, cwd=folder
    )
    pairs = [item.partition("\n")[::2] for item in listed.out.split("\0")] if listed.code == 0 else []
    found = [(NETWORK.fullmatch(name), value) for name, value in pairs if "\n" not in value]
    return tuple(Setting(match[1] or "", match[2], value) for match, value in found if match)


def text_of(settings: Iterable[Setting]) -> str:
    """Return settings as a part of a configuration file."""
    return "".join(
        f"[http{each.address and f' {_quoted(each.address)}'}]\n\t{each.name} = {_quoted(each.value)}\n"
        for each in settings
    )


def on_the_way(settings: Iterable[Setting], place: str) -> str:
    """Return for a message which settings had a say in reaching `place`; "" for none."""
    used = [
        str(each) for each in settings if place.startswith(("http://", "https://")) and place.startswith(each.address)
    ]
    return f"git's settings {', '.join(used)}" if used else ""


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
