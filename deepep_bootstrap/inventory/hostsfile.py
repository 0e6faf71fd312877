"""The hosts file: node sets and settings, one entry a line, read into frozen values; every fault of the file
reported at once.
"""

from __future__ import annotations

import difflib
import os
import posixpath
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from deepep_bootstrap.core import nodeset
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.text import HOSTS, other_than
from deepep_bootstrap.remote.host import Host

DEFAULTS = "defaults"
SAFE_PATH = re.compile(r"/[A-Za-z0-9._/+-]*")
USER = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.@+-]*")
WORD = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.,:@+-]*")
GRES = re.compile(r"auto|none|gpu(:[A-Za-z0-9_.-]+)?(:[1-9][0-9]{0,8})?")
JUMP = re.compile(r"none|[A-Za-z0-9_.][A-Za-z0-9_.@:,+-]*")


DEFAULT_PREFIX = "/opt/deepep"
"""The prefix of one machine alone where none is named."""

LONGEST_LINE = 64 * 1024
"""Characters of a line: the names of 3,000 hosts, one by one. Splitting one into words takes more than its share
of time the longer it is."""

MOST_PROBLEMS = 10_000
"""Faults of a file that are kept; of more there is the count."""


class Settings(Struct, frozen=True):
    """Cluster-wide settings of the `defaults` line; a field that stays empty has its default worked out from the
    facts. `archs` are compute capabilities to build for besides those of the GPUs that are seen; `kubeconfig` and
    `context` lead to the cluster of Kubernetes whose nodes the hosts are."""

    prefix: str = ""
    build_host: str = ""
    prefix_host: str = ""
    slurm_host: str = ""
    build_user: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    gres: str = "auto"
    sbatch_args: tuple[str, ...] = ()
    profile: str = "auto"
    archs: tuple[str, ...] = ()
    contact: str = ""
    kubeconfig: str = ""
    context: str = ""


class Inventory(Struct, frozen=True):
    """What a hosts file (or a node set, `path` is "--hosts" then) says, in its order; --limit leaves `left_out` out."""

    path: str
    hosts: tuple[Host, ...]
    settings: Settings
    left_out: tuple[Host, ...] = ()

    def built_for(self, archs: str) -> Inventory:
        """Return the inventory with the compute capabilities of `--archs` in place of its own; as it is for ""."""
        if not archs:
            return self
        return replace(self, settings=replace(self.settings, archs=read_archs(archs, "--archs")))


def read_hosts(value: str, limit: str = "") -> Inventory:
    """Return the inventory that `--hosts=value` means: a file, or a node set such as `b200-[001-016]` or
    `user@host:port`.

    `limit` is the node set of `--limit` ("" for all). Raises Trouble for anything that is neither, and for names
    unknown to the file.
    """
    if os.path.exists(path := Path(os.path.expanduser(value))) and not os.path.isdir(path):
        inventory = parse_hosts_file(_read(path), value)
    elif "/" in nodeset.outside_brackets(value) or value.endswith(".txt") or os.path.isdir(path):
        found = "a directory" if os.path.isdir(path) else "nothing there"
        raise Trouble(
            Problem(f"--hosts={value}", "not a hosts file", found, "a file, or a node set such as b200-[001-016]")
        )
    else:
        hosts, problems = _expand(value, "--hosts")
        if problems := [*problems, *_repeated(hosts)]:
            raise Trouble(*problems)
        inventory = Inventory("--hosts", tuple(hosts), Settings())
    return _limited(inventory, limit) if limit else inventory


def named_hosts(entry: str, where: str, inventory: Inventory) -> tuple[Host, ...]:
    """Return the hosts that `a[1-2],user@b:22` names at `where`: those of the inventory as it has them, others by their
    names alone. Trouble with all that cannot be read."""
    hosts, problems = _expand(entry, where)
    if problems := [*problems, *_repeated(hosts)]:
        raise Trouble(*problems)
    known = {host.name: host for host in (*inventory.hosts, *inventory.left_out)}
    return tuple(known.get(host.name, host) for host in hosts)


class Entry(Struct, frozen=True):
    """A line of hosts: the hosts that it names, and its own settings of them."""

    hosts: tuple[Host, ...]
    values: Mapping[str, str]


class Default(Struct, frozen=True):
    """A setting of the `defaults` line, and the line (`file:line`) that it is on."""

    value: str
    where: str


def parse_hosts_file(text: str, path: str) -> Inventory:
    """Read the text of a hosts file; `path` is its name in messages. Raises Trouble with every problem at once."""
    lines, problems = _split(text, path)
    defaults: dict[str, Default] = {}
    entries: list[Entry] = []
    for where, words in lines:
        if words[0] == DEFAULTS:
            problems += _add_defaults(defaults, words[1:], where)
        else:
            values = _pairs(words[1:], where, HOST_KEYS, problems)
            named, bad = _expand(words[0], where)
            problems += bad
            entries.append(Entry(tuple(named), values))
    common = {key: default.value for key, default in defaults.items()}
    hosts = [_host(host, {**common, **entry.values}) for entry in entries for host in entry.hosts]
    if not entries and not problems:
        problems.append(
            Problem(f"{path}:1", "no host in it", wanted="one node set a line, e.g. b200-[001-016] user=root")
        )
    problems += _repeated(hosts)
    problems += _unknown_hosts(defaults, [host.name for host in hosts])
    if problems:
        ordered = sorted(problems, key=lambda problem: int(problem.where.rpartition(":")[2] or 0))
        more = len(ordered) - MOST_PROBLEMS
        last = [Problem(path, f"{more} more faults")] if more > 0 else []
        raise Trouble(*ordered[:MOST_PROBLEMS], *last, file=path, guess=other_than(text, HOSTS))
    return Inventory(path, tuple(hosts), _settings(common))


def _add_defaults(defaults: dict[str, Default], words: list[str], where: str) -> list[Problem]:
    """Add the settings of one `defaults` line; what is wrong with it is returned."""
    problems: list[Problem] = []
    values = _pairs(words, where, SETTING_KEYS | HOST_KEYS, problems)
    for key, value in values.items():
        if key in defaults:
            problems.append(Problem(where, f"{key} is set twice", f"also in {defaults[key].where}"))
        defaults[key] = Default(value, where)
    return problems


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise Trouble(Problem(str(path), "not a text file", f"no UTF-8 at byte {error.start}")) from None
    except OSError as error:
        raise Trouble(Problem(str(path), "cannot be read", error.strerror or str(error))) from None


def _split(text: str, path: str) -> tuple[list[tuple[str, list[str]]], list[Problem]]:
    """Return the words of each line that has any, with `file:line`, and what could not be split."""
    lines: list[tuple[str, list[str]]] = []
    problems: list[Problem] = []
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{path}:{number}"
        if line.lstrip().startswith("#"):
            continue
        if len(line) > LONGEST_LINE:
            problems.append(
                Problem(where, "a line too long", f"{len(line)} characters", f"at most {LONGEST_LINE}", "several lines")
            )
            continue
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            problems.append(Problem(where, "a quotation mark is not closed", line.strip()[:80]))
            continue
        if words:
            lines.append((where, words))
    return lines, problems


def _pairs(words: list[str], where: str, known: frozenset[str], problems: list[Problem]) -> dict[str, str]:
    """Return the good `key=value` words of one line; everything else is added to `problems`."""
    if re.search(r"(?:^|\0)=|=\0[^\0=]+(?:\0|$)", "\0".join(words)):
        problems.append(Problem(where, "blanks around =", " ".join(words)[:80], "key=value"))
        return {}
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            problems.append(Problem(where, "a word that is no setting", word[:80], "key=value"))
        elif key in values:
            problems.append(Problem(where, f"{key} is set twice"))
        elif key not in known and key in SETTING_KEYS:
            problems.append(
                Problem(
                    where,
                    f"{key} is for the whole cluster",
                    "it beside a host",
                    "it on a line that begins with defaults",
                )
            )
        elif key not in known:
            problems.append(_unknown(where, f"unknown key {key[:80]}", key, known))
        elif wanted := CHECKS[key](value):
            problems.append(Problem(where, f"{key} has a bad value", value[:80] or "nothing", wanted))
        else:
            values[key] = value
    return values


def _unknown(where: str, what: str, word: str, known: Iterable[str]) -> Problem:
    near = difflib.get_close_matches(word, sorted(known), n=1)
    return Problem(where, f"{what}, did you mean {near[0]}?" if near else what, wanted="" if near else _few(known))


def _few(words: Iterable[str]) -> str:
    ordered = sorted(set(words))
    return ", ".join(ordered[:12]) + (" …" if len(ordered) > 12 else "")


def _expand(entry: str, where: str) -> tuple[list[Host], list[Problem]]:
    """Return the hosts an entry such as `b200-[001-016],root@login1:2222` names, in its order, and what is wrong
    with it."""
    hosts: list[Host] = []
    problems: list[Problem] = []
    pieces = nodeset.pieces(entry)
    if len(pieces) > nodeset.MOST_NAMES:
        return [], [Problem(where, "a bad node set", f"{len(pieces)} parts", f"at most {nodeset.MOST_NAMES} hosts")]
    if entry.partition("=")[0] in CHECKS:
        return [], [
            Problem(where, "a setting without a host", entry[:80], f"{DEFAULTS} {entry[:80]}, on a line of its own")
        ]
    for piece in pieces:
        named, wrong = _expand_piece(piece, where)
        hosts += named
        problems += [Problem(where, "a bad node set", piece[:80] or "nothing", wanted) for wanted in wrong]
    if len(hosts) > nodeset.MOST_NAMES:
        return [], [Problem(where, "a bad node set", f"{len(hosts)} hosts", f"at most {nodeset.MOST_NAMES}")]
    return hosts, problems


def _expand_piece(piece: str, where: str) -> tuple[list[Host], list[str]]:
    """Return the hosts that `user@names:port` means, and, where it cannot be read, what was wanted instead."""
    user, at, rest = piece.rpartition("@")
    is_ipv6 = rest.count(":") > 1
    names, colon, port = (rest, "", "") if is_ipv6 else rest.partition(":")
    wrong = [_user(user)] if at else []
    wrong += [_port(port)] if colon else []
    expanded = nodeset.expand(names)
    if isinstance(expanded, str):
        wrong.append(expanded)
    if any(wrong) or isinstance(expanded, str):
        return [], [wanted for wanted in wrong if wanted]
    return [Host(name, user=user, port=int(port or 0), where=where) for name in expanded], []


def _host(host: Host, values: Mapping[str, str]) -> Host:
    """Return `host` with the settings of its line over the defaults; `user@` and `:port` in its name win over both."""
    in_name = {key for key in ("user", "port") if getattr(host, key)}
    fields = {key: values[key] for key in HOST_KEYS & values.keys() - in_name}
    port = fields.pop("port", "")
    return replace(host, port=int(port) if port else host.port, **fields)


def _settings(values: Mapping[str, str]) -> Settings:
    fields = {key: value for key, value in values.items() if key in SETTING_KEYS}
    if "prefix" in fields:
        fields["prefix"] = normal_prefix(fields["prefix"])
    archs = read_archs(fields.pop("archs"), "archs") if "archs" in fields else ()
    return Settings(sbatch_args=tuple(shlex.split(fields.pop("sbatch_args", ""))), archs=archs, **fields)


def _repeated(hosts: list[Host]) -> Iterator[Problem]:
    first: dict[str, Host] = {}
    for host in hosts:
        if first.setdefault(host.name, host) is not host:
            yield Problem(host.where, f"host {host.name} is named twice", f"also in {first[host.name].where}")


def _unknown_hosts(defaults: Mapping[str, Default], names: list[str]) -> Iterator[Problem]:
    for key in ("build_host", "prefix_host", "slurm_host"):
        default = defaults.get(key)
        if default and default.value not in names:
            yield _unknown(default.where, f"{key} {default.value} is no host of this file", default.value, names)


def _limited(inventory: Inventory, limit: str) -> Inventory:
    wanted, problems = _expand(limit, "--limit")
    known = [host.name for host in inventory.hosts]
    names = {host.name for host in wanted}
    problems += [
        _unknown("--limit", f"{name} is no host of {inventory.path}", name, known)
        for name in sorted(names - set(known))
    ]
    for key in ("build_host", "prefix_host", "slurm_host"):
        needed = getattr(inventory.settings, key)
        if needed and needed not in names and not problems:
            problems.append(
                Problem("--limit", f"leaves out {needed}, which is {key}", try_=f"--limit={limit},{needed}")
            )
    if problems:
        raise Trouble(*problems)
    kept, rest = (tuple(host for host in inventory.hosts if (host.name in names) is inside) for inside in (True, False))
    return replace(inventory, hosts=kept, left_out=rest)


def normal_prefix(value: str) -> str:
    """Return a prefix in the one form that everything compares: no slash at its end, none doubled."""
    return "/" + posixpath.normpath(value).strip("/")


def prefix_of(inventory: Inventory) -> str:
    """Return the prefix that the hosts file names, or for one host alone DEFAULT_PREFIX. Trouble for several hosts
    without one: each would get a directory of its own, and a hook that leads there."""
    if inventory.settings.prefix:
        return inventory.settings.prefix
    names = [host.name for host in (*inventory.hosts, *inventory.left_out)]
    if len(names) > 1:
        remedy = "--prefix=/shared/deepep, or `defaults prefix=/shared/deepep` in the hosts file"
        what = f"no prefix is named, and {DEFAULT_PREFIX} would be another directory on each host"
        found, wanted = nodeset.fold(names), "a directory that all hosts share"
        raise Trouble(Problem(inventory.path, what, found, wanted, remedy))
    return DEFAULT_PREFIX


def check_prefix(value: str, where: str) -> None:
    """Raise Trouble unless `value` may be a prefix; `where` is what gave it, such as `--prefix`."""
    if wanted := _prefix(value):
        raise Trouble(Problem(where, "not a usable prefix", found=value[:80], wanted=wanted))


def _matches(pattern: re.Pattern[str], wanted: str) -> Callable[[str], str]:
    """Return a check of one value: "" when it matches, otherwise what was wanted."""
    return lambda value: "" if pattern.fullmatch(value) else wanted


def _port(value: str) -> str:
    return "" if re.fullmatch(r"[1-9]\d{0,4}", value, re.ASCII) and int(value) < 65536 else "a port from 1 to 65535"


def _prefix(value: str) -> str:
    if not SAFE_PATH.fullmatch(value) or ".." in value.split("/"):
        return "an absolute path of letters, digits and . _ / + -"
    return "" if value.strip("/") else "a directory below /"


def _arguments(value: str) -> str:
    wanted = "sbatch options, e.g. sbatch_args='--exclusive --reservation=maint'"
    try:
        words = shlex.split(value)
    except ValueError:
        return wanted
    return "" if words and words[0].startswith("-") and value.isprintable() else wanted


def read_archs(value: str, where: str) -> tuple[str, ...]:
    """Return the compute capabilities of `archs=9.0,10.0`, without repeats; `where` is its place in messages."""
    if wanted := _archs(value):
        raise Trouble(Problem(where, "no list of compute capabilities", value[:80] or "nothing", wanted))
    return tuple(dict.fromkeys(value.split(",")))


def _archs(value: str) -> str:
    found = all(re.fullmatch(r"[1-9][0-9]?\.[0-9]", word, re.ASCII) for word in value.split(","))
    return "" if found else "compute capabilities joined by commas, e.g. 9.0,10.0"


_user = _matches(USER, "a user name")
CHECKS: Mapping[str, Callable[[str], str]] = {
    "user": _user,
    "port": _port,
    "jump": _matches(JUMP, "a host, [user@]host[:port], or none"),
    "identity": lambda value: "" if value and value.isprintable() else "the path of a private key",
    "connection": _matches(re.compile("ssh|local"), "ssh or local"),
    "role": _matches(re.compile("gpu|login"), "gpu or login"),
    "prefix": _prefix,
    **dict.fromkeys(("build_host", "prefix_host", "slurm_host"), _matches(nodeset.NAME, "a host of this file")),
    "build_user": _user,
    "partition": _matches(WORD, "a partition of Slurm"),
    "account": _matches(WORD, "an account of Slurm"),
    "qos": _matches(WORD, "a quality of service of Slurm"),
    "gres": _matches(GRES, "auto, none or gpu:8"),
    "sbatch_args": _arguments,
    "contact": _matches(WORD, "whom users ask: an address or URL without spaces"),
    "kubeconfig": lambda value: "" if value and value.isprintable() else "the file of kubectl's configuration",
    "context": lambda value: "" if value and value.isprintable() else "a context of kubectl's configuration",
    "profile": _matches(re.compile(r"[a-z0-9][a-z0-9._-]*"), "auto or the name of a profile"),
    "archs": _archs,
}
HOST_KEYS = frozenset(("user", "port", "jump", "identity", "connection", "role"))
SETTING_KEYS = frozenset(CHECKS) - HOST_KEYS
