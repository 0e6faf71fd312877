"""The lock: what is pinned, read from TOML into frozen values; every fault of the file reported at once."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from deepep_bootstrap.errors import Problem, Trouble
from deepep_bootstrap.system import System, read_system
from deepep_bootstrap.tables import ANY, NAME, SOME, Form, Table, load

FORMAT = 1
OWN_INDEX = "pypi"
WHEEL_NAME = Form(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", "the name of a distribution")
URL = Form(r"(https?|ssh|git|file)://[^\s/]*/\S+", "an address such as https://host/owner/name")
INDEX_URL = Form(r"(https?|file)://\S+", "an address such as https://host/simple")
REF = Form(r"[A-Za-z0-9][^\s~^:?*\[\\\x00-\x1f\x7f]*", "a branch, a tag or a full ref")
REV = Form(r"[0-9a-f]{40}|[0-9a-f]{64}", "a full commit id (40 hexadecimal digits)")
HASH = Form(r"sha256-[A-Za-z0-9+/]{43}=", "an SRI hash: sha256- and 44 characters of base 64")
VERSION = Form(r"[A-Za-z0-9][A-Za-z0-9._+!-]*", "a version")
OPTION = Form(r"[A-Za-z_][A-Za-z0-9_]*=[^\x00-\x1f\x7f]*", "NAME=VALUE")
WHEEL_FILE = Form(r"[A-Za-z0-9._+!]+(-[A-Za-z0-9._+!]+){4,5}\.whl", "a wheel's file name: name-version-python-abi-platform.whl")
CUDA = Form(r"[1-9][0-9]*", 'a CUDA major such as "12"')
TARGET = Form(r"cp3[0-9]+-(x86_64|aarch64)", "a target such as cp312-x86_64")


@dataclass(frozen=True)
class Substitute:
    """One exact text replacement in a source after its hash was checked; `count` occurrences or it is an error."""

    file: str
    text: str
    replacement: str
    count: int


@dataclass(frozen=True)
class Source:
    """A git tree pinned by full commit `rev` and NAR `hash` (SRI); `ref` is what was asked for.

    `last_modified` is the commit's time (seconds since 1970), `version` the project's own version, `options` build options handed
    to its recipe, `checks` the health checks of the built entry.
    """

    name: str
    url: str
    ref: str
    rev: str
    hash: str
    last_modified: int
    version: str
    submodules: bool = False
    options: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    substitutes: tuple[Substitute, ...] = ()


@dataclass(frozen=True)
class Wheel:
    """One wheel file: distribution name and version, the index's *name*, file name, SRI hash of the file, size in bytes."""

    name: str
    version: str
    index: str
    file: str
    hash: str
    size: int

    @property
    def tags(self) -> tuple[str, str, tuple[str, ...]]:
        """Return the file name's Python tag, ABI tag and platform tags; the lock has checked that it has them."""
        python, abi, platforms = self.file[: -len(".whl")].split("-")[-3:]
        return python, abi, tuple(platforms.split("."))


@dataclass(frozen=True)
class Stack:
    """A validated set. `deepep`, `nvshmem`, `gdrcopy` name sources; `cuda` is the CUDA major; wheels by target (`cp312-x86_64`)."""

    name: str
    deepep: str
    nvshmem: str
    gdrcopy: str
    cuda: str
    wheels: Mapping[str, tuple[Wheel, ...]]


@dataclass(frozen=True)
class Lock:
    """The whole lock file. `tools` are wheels of programs we run on hosts (uv), by name; `indexes` maps index names to addresses."""

    path: str
    version: int
    default_stack: str
    sources: Mapping[str, Source]
    stacks: Mapping[str, Stack]
    systems: Mapping[str, System]
    tools: Mapping[str, tuple[Wheel, ...]]
    indexes: Mapping[str, str]


def read(path: str | Path) -> Lock:
    """Read the lock file at `path`. Raises Trouble with every fault of the file, or when it cannot be read."""
    try:
        text = Path(path).read_bytes().decode()
    except OSError as error:
        raise Trouble(Problem(str(path), f"the lock cannot be read: {error.strerror}", try_="--lock=FILE")) from None
    except UnicodeDecodeError as error:
        raise Trouble(Problem(str(path), f"is not UTF-8 at byte {error.start}")) from None
    return parse(text, str(path))


def parse(text: str, path: str) -> Lock:
    """Return the lock in TOML `text`; `path` names it in messages. Raises Trouble with every fault at once."""
    problems: list[Problem] = []
    top = Table(load(text, path), path, problems)
    version = top.take("version", int)
    if not problems and version != FORMAT:
        top.complain("version", "this lock has another format: update the tool", version, str(FORMAT))
    if problems:
        raise Trouble(*problems)
    lock = Lock(
        path=path,
        version=version,
        default_stack=top.text("default_stack", NAME),
        sources={name: _source(name, table) for name, table in top.named("source")},
        stacks={name: _stack(name, table) for name, table in top.named("stack")},
        systems={name: read_system(name, table) for name, table in top.named("system")},
        tools={name: _tool(table) for name, table in top.named("tool")},
        indexes={name: _index(name, table) for name, table in top.named("indexes")},
    )
    top.close()
    _check_references(lock, top)
    if problems:
        raise Trouble(*problems)
    return lock


def _check_references(lock: Lock, top: Table) -> None:
    if lock.default_stack and lock.default_stack not in lock.stacks:
        top.complain("default_stack", "there is no such stack", lock.default_stack, ", ".join(lock.stacks) or "a table [stack.NAME]")
    wanted = ", ".join(lock.sources) or "a table [source.NAME]"
    for stack in lock.stacks.values():
        for role, name in (("deepep", stack.deepep), ("nvshmem", stack.nvshmem), ("gdrcopy", stack.gdrcopy)):
            if name and name not in lock.sources:
                top.complain(f"stack.{stack.name}.{role}", "there is no such source", name, wanted)


def _source(name: str, table: Table) -> Source:
    source = Source(
        name=name,
        url=table.text("url", URL),
        ref=table.text("ref", REF),
        rev=table.text("rev", REV),
        hash=_hash(table),
        last_modified=table.number("last_modified", 0),
        version=table.text("version", VERSION),
        submodules=table.take("submodules", bool, default=False),
        options=table.words("options", OPTION),
        checks=table.words("checks", NAME),
        substitutes=tuple(_substitute(entry) for entry in table.tables("substitute")),
    )
    table.close()
    return source


def _substitute(table: Table) -> Substitute:
    substitute = Substitute(table.text("file", SOME), table.text("text", SOME), table.text("replacement", ANY), table.number("count", 1))
    file = PurePosixPath(substitute.file)
    if substitute.file and (file.is_absolute() or ".." in file.parts or str(file) != substitute.file or file.parts[:1] == (".git",)):
        table.complain("file", "is not a file inside the tree", substitute.file, "a path relative to the top of the tree")
    if substitute.text and substitute.text == substitute.replacement:
        table.complain("replacement", "is the same as text")
    table.close()
    return substitute


def _hash(table: Table) -> str:
    value = table.text("hash", HASH)
    # 43 characters of base 64 hold two bits more than 32 bytes: one content must not have four spellings.
    if value and base64.b64encode(binascii.a2b_base64(value[7:])).decode() != value[7:]:
        table.complain("hash", "ends in bits that no hash has", value, HASH.words)
    return value


def _stack(name: str, table: Table) -> Stack:
    wheels = table.inner("wheels")
    stack = Stack(
        name=name,
        deepep=table.text("deepep", NAME),
        nvshmem=table.text("nvshmem", NAME),
        gdrcopy=table.text("gdrcopy", NAME),
        cuda=table.text("cuda", CUDA),
        wheels={target: _closure(target, wheels) for target in wheels.data},
    )
    table.close()
    return stack


def _closure(target: str, wheels: Table) -> tuple[Wheel, ...]:
    """Read the wheels of one target: one of each distribution, each of which that target can install."""
    if not TARGET.fits(target):
        wheels.complain(target, "is no target", wanted=TARGET.words)
    seen: set[str] = set()
    closure = []
    for entry in wheels.tables(target):
        wheel = _wheel(entry)
        if wheel.name and _plain(wheel.name) in seen:
            entry.complain("name", "this distribution is listed twice for one target", wheel.name)
        if wheel.file and TARGET.fits(target) and not _installs_on(wheel, target):
            entry.complain("file", f"this wheel does not install on {target}", wheel.file)
        seen.add(_plain(wheel.name))
        closure.append(wheel)
    return tuple(closure)


def _tool(table: Table) -> tuple[Wheel, ...]:
    """Read the wheels of one program: one per platform."""
    seen: set[tuple[str, ...]] = set()
    wheels = []
    for entry in table.tables("wheels"):
        wheel = _wheel(entry)
        if wheel.file and wheel.tags[2] in seen:
            entry.complain("file", "there is a wheel for this platform already", wheel.file)
        seen.add(wheel.tags[2] if wheel.file else ())
        wheels.append(wheel)
    if not wheels:
        table.complain("wheels", "is empty", wanted="one wheel per platform")
    table.close()
    return tuple(wheels)


def _wheel(table: Table) -> Wheel:
    wheel = Wheel(
        name=table.text("name", WHEEL_NAME),
        version=table.text("version", VERSION),
        index=table.text("index", NAME),
        file=table.text("file", WHEEL_FILE),
        hash=_hash(table),
        size=table.number("size", 0),
    )
    table.close()
    if wheel.file and wheel.name and wheel.version:
        name, version = wheel.file.split("-")[:2]
        if (_plain(name), version.replace("_", "-")) != (_plain(wheel.name), wheel.version.replace("_", "-")):
            table.complain("file", "is another wheel than name and version say", f"{name} {version}", f"{wheel.name} {wheel.version}")
    return wheel


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _installs_on(wheel: Wheel, target: str) -> bool:
    interpreter, machine = target.split("-", 1)
    python, abi, platforms = wheel.tags
    pythons = python.split(".")
    stable = abi == "abi3" and any(re.fullmatch(r"cp3[0-9]+", tag) and int(tag[3:]) <= int(interpreter[3:]) for tag in pythons)
    pure = abi == "none" and any(tag in ("py3", interpreter, interpreter.replace("cp", "py")) for tag in pythons)
    native = abi == interpreter and interpreter in pythons
    system = any(tag == "any" or re.fullmatch(rf"(manylinux\w*|linux)_{machine}", tag) for tag in platforms)
    return system and (stable or pure or native)


def _index(name: str, table: Table) -> str:
    if name == OWN_INDEX:
        table.complain("url", "this index is whatever pip is set up to use and takes no address", wanted="another name")
    url = table.text("url", INDEX_URL)
    table.close()
    return url
