"""The lock: what is pinned, read from TOML into frozen values; every fault of the file reported at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deepep_bootstrap.errors import Problem, Trouble
from deepep_bootstrap.sources import VERSION, Archive, Source, read_archive, read_hash, read_source
from deepep_bootstrap.system import System, read_system
from deepep_bootstrap.tables import NAME, Form, Table, load

FORMAT = 1
OWN_INDEX = "pypi"
WHEEL_NAME = Form(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", "the name of a distribution")
INDEX_URL = Form(r"(https?|file)://\S+", "an address such as https://host/simple")
WHEEL_FILE = Form(r"[A-Za-z0-9._+!]+(-[A-Za-z0-9._+!]+){4,5}\.whl", "a wheel's file name: name-version-python-abi-platform.whl")
CUDA = Form(r"[1-9][0-9]*", 'a CUDA major such as "12"')
TARGET = Form(r"cp3[0-9]+-(x86_64|aarch64)", "a target such as cp312-x86_64")


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
    archives: Mapping[str, Archive] = field(default_factory=dict)


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
        sources={name: read_source(name, table) for name, table in top.named("source")},
        stacks={name: _stack(name, table) for name, table in top.named("stack")},
        systems={name: read_system(name, table) for name, table in top.named("system")},
        tools={name: _tool(table) for name, table in top.named("tool")},
        indexes={name: _index(name, table) for name, table in top.named("indexes")},
        archives={name: read_archive(name, table) for name, table in top.named("archive")},
    )
    top.close()
    _check_references(lock, top)
    if problems:
        raise Trouble(*problems)
    return lock


def _check_references(lock: Lock, top: Table) -> None:
    if lock.default_stack and lock.default_stack not in lock.stacks:
        top.complain("default_stack", "there is no such stack", lock.default_stack, ", ".join(lock.stacks) or "a table [stack.NAME]")
    for name in lock.archives:
        if name in lock.sources:
            top.complain(f"archive.{name}", "a source has this name already", wanted="a name of its own: `lock --update` takes names")
    wanted = ", ".join(lock.sources) or "a table [source.NAME]"
    for stack in lock.stacks.values():
        for role, name in (("deepep", stack.deepep), ("nvshmem", stack.nvshmem), ("gdrcopy", stack.gdrcopy)):
            if name and name not in lock.sources:
                top.complain(f"stack.{stack.name}.{role}", "there is no such source", name, wanted)


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
        hash=read_hash(table),
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
