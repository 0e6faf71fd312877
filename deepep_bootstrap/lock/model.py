"""The lock: sources, wheels, stacks and tools, read from TOML into frozen values; every fault of the file
reported at once.
"""

from __future__ import annotations

import base64
import binascii
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from msgspec import Struct, field
from msgspec.structs import fields
from packaging import tags
from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.text import LAST_SECOND, LOCK, other_than
from deepep_bootstrap.core.toml import ANY, NAME, SOME, Table, ValueForm, load_toml
from deepep_bootstrap.lock.packages import System, read_system

URL = ValueForm(r"(https?|ssh|git|file)://[^\s/]*/\S+", "an address such as https://host/owner/name")
REF = ValueForm(r"[A-Za-z0-9][^\s~^:?*\[\\\x00-\x1f\x7f]*", "a branch, a tag or a full ref")
REV = ValueForm(r"[0-9a-f]{40}|[0-9a-f]{64}", "a full commit id (40 hexadecimal digits)")
HASH = ValueForm(r"sha256-[A-Za-z0-9+/]{43}=", "an SRI hash: sha256- and 44 characters of base 64")
VERSION = ValueForm(r"[A-Za-z0-9][A-Za-z0-9._+!-]*", "a version")
FILE = ValueForm(r"[^\x00-\x1f\x7f]+", "the name of a file")
REASON = ValueForm(
    r"[^\s\x00-\x1f\x7f][^\x00-\x1f\x7f]*", "one line of text: what is wrong upstream, and its issue there"
)


def spdx(text: str) -> str:
    """Return an SPDX licence expression in its canonical spelling; "" for a text that is none."""
    # Tables of some size, for those alone who look at licences.
    from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

    try:
        return str(canonicalize_license_expression(text)) if text.strip() else ""
    except InvalidLicenseExpression:
        return ""


class _LicenseForm(ValueForm, frozen=True):
    """What SPDX calls a licence expression."""

    def fits(self, text: str) -> bool:
        """Return whether `text` is such an expression, in the spelling that SPDX gives it."""
        return bool(text) and spdx(text) == text


LICENSE = _LicenseForm("", "an SPDX expression such as MIT or Apache-2.0 AND LicenseRef-NAME")
OPTION = ValueForm(r"[A-Za-z_][A-Za-z0-9_]*=[^\x00-\x1f\x7f]*", "NAME=VALUE")


class Substitute(Struct, frozen=True):
    """One exact text replacement in a source after its hash was checked; `count` occurrences or it is an error.

    `reason` says why, for people ("" where a lock does not say); it changes nothing that is built.
    """

    file: str
    text: str
    replacement: str
    count: int
    reason: str = ""

    @property
    def effect(self) -> dict[str, str | int]:
        """What it does to the tree, for digests: everything but the reason."""
        return {"file": self.file, "text": self.text, "replacement": self.replacement, "count": self.count}


class Source(Struct, frozen=True):
    """A git tree pinned by full commit `rev` and NAR `hash` (SRI); `ref` is what was asked for.

    `last_modified` is the commit's time (seconds since 1970), `version` the project's own version, `submodules` whether
    the hash is that of the tree with its submodules filled in, `options` build options handed to its recipe, `checks`
    the health checks of the built entry. `license` is an SPDX expression, "" where the lock does not say one; it
    changes nothing that is built.
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
    license: str = ""


def read_source(name: str, table: Table) -> Source:
    """Return the source in `table`; what is wrong with it is noted there."""
    source = Source(
        name=name,
        url=table.address("url", URL),
        ref=table.text("ref", REF),
        rev=table.text("rev", REV),
        hash=read_hash(table),
        last_modified=table.number("last_modified", 0, LAST_SECOND),
        version=table.text("version", VERSION),
        submodules=table.take("submodules", bool, default=False),
        options=table.words("options", OPTION),
        checks=table.words("checks", NAME),
        substitutes=tuple(_substitute(entry) for entry in table.tables("substitute")),
        license=table.text("license", LICENSE) if "license" in table.data else "",
    )
    table.close()
    return source


def read_hash(table: Table) -> str:
    """Return the SRI hash of `table`; one whose last character holds bits that no hash has is a problem: one
    content, one spelling."""
    value = table.text("hash", HASH)
    kind, _, digits = value.partition("-")
    if value and base64.b64encode(binascii.a2b_base64(digits)).decode() != digits:
        table.complain("hash", "ends in bits that no hash has", f"{kind}-{digits}", HASH.words)
    return value


def _substitute(table: Table) -> Substitute:
    substitute = Substitute(
        file=table.text("file", FILE),
        text=table.text("text", SOME),
        replacement=table.text("replacement", ANY),
        count=table.number("count", 1),
        reason=table.text("reason", REASON) if "reason" in table.data else table.take("reason", str, ""),
    )
    file = PurePosixPath(substitute.file)
    if substitute.file and (
        file.is_absolute() or ".." in file.parts or str(file) != substitute.file or file.parts[:1] == (".git",)
    ):
        table.complain(
            "file", "is not a file inside the tree", substitute.file, "a path relative to the top of the tree"
        )
    if substitute.text and substitute.text == substitute.replacement:
        table.complain("replacement", "is the same as text")
    table.close()
    return substitute


PYTHON = "python"
"""The key of the requirements, and what `lock --update` takes for the wheels; so no source has this name."""
OWN_INDEX = "pypi"
TARGET = ValueForm(r"cp3[0-9]{1,2}-(x86_64|aarch64)", "a target such as cp312-x86_64")
MACHINE = ValueForm(r"x86_64|aarch64", "x86_64 or aarch64")
ANY_PYTHON = "cp312"
"""The Python part of a target for wheels that have nothing of Python in them."""
NVCC = "nvidia-cuda-nvcc"
TIMESTAMP = ValueForm(r"[0-9]{8}T[0-9]{6}Z", "a time such as 20261122T000000Z")
PATTERN = ValueForm(
    r"[A-Za-z0-9*][A-Za-z0-9._+*/-]*", "a path without a slash in front, in which * stands for anything"
)
PACKAGE_NAME = ValueForm(r"[a-z0-9][a-z0-9.+-]+", "the name of a Debian package")
PACKAGE_VERSION = ValueForm(r"[0-9][A-Za-z0-9.+~:-]*", "the version of a Debian package")
PACKAGE_FILE = ValueForm(
    r"[a-z-]+(/[A-Za-z0-9][A-Za-z0-9._+~-]*)+\.deb", "a path such as debian/pool/main/d/dash/….deb"
)


class _RequirementForm(ValueForm, frozen=True):
    """What PEP 508 calls a requirement, of a name and versions: no address in place of them, and no marker, because
    targets decide."""

    def fits(self, text: str) -> bool:
        """Return whether `text` is such a requirement, on one line."""
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            return False
        return text.isprintable() and not requirement.url and not requirement.marker


REQUIREMENT = _RequirementForm("", "a requirement such as torch==2.10.0 or setuptools<82")


class WheelRequest(Struct, frozen=True):
    """What the wheels of a stack are resolved from: requirements, and `overrides` of what distributions require of
    each other, for each of `targets`. `indexes` names the index of a requirement that does not come from `index`.
    Without requirements, nobody resolves."""

    python: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    index: str = OWN_INDEX
    indexes: Mapping[str, str] = field(default_factory=dict)

    def index_of(self, name: str) -> str:
        """Return the name of the index that answers for a distribution."""
        return self.indexes.get(canonicalize_name(name), self.index)


def read_asked(table: Table) -> WheelRequest:
    """Read what the table of a stack asks for; it may ask for nothing."""
    names = table.inner("indexes")
    asked = WheelRequest(
        python=table.words(PYTHON, REQUIREMENT),
        overrides=table.words("overrides", REQUIREMENT),
        targets=table.words("targets", TARGET),
        index=table.text("index", NAME) if "index" in table.data else table.take("index", str, OWN_INDEX),
        indexes={canonicalize_name(name): names.text(name, NAME) for name in names.data},
    )
    if asked.python and not asked.targets:
        table.complain("targets", "is missing or empty", wanted=TARGET.words)
    wanted = [requirement_name(each) for each in asked.python if REQUIREMENT.fits(each)]
    for name in names.data:
        if canonicalize_name(name) not in wanted:
            what = f"only what `{PYTHON}` names can have an index of its own"
            names.complain(name, what, wanted=" or ".join(wanted) or f"{PYTHON} = [...]")
    return asked


def requirement_name(requirement: str) -> str:
    """Return the plain name of the distribution that a requirement is about. Raises InvalidRequirement."""
    return canonicalize_name(Requirement(requirement).name)


FORMAT = 1
WHEEL_NAME = ValueForm(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", "the name of a distribution")
INDEX_URL = ValueForm(r"(https?|file)://\S+", "an address such as https://host/simple")


parse_wheel_file = functools.cache(parse_wheel_filename)
"""Name, version, build and tags of a wheel by its file's name; a lock has each name for several targets."""


class _WheelForm(ValueForm, frozen=True):
    """What the binary distribution format calls the name of a wheel's file."""

    def fits(self, text: str) -> bool:
        """Return whether `text` is such a name."""
        try:
            parse_wheel_file(text)
        except InvalidWheelFilename:
            return False
        return text.isascii() and text.isprintable()


WHEEL_FILE = _WheelForm("", "a wheel's file name: name-version-python-abi-platform.whl")
CUDA = ValueForm(r"[1-9][0-9]*", 'a CUDA major such as "12"')
NEEDS = ("gcc", "nvcc", "libmlx5")
"""What a stack can need of every GPU host in a lowest version: the host compiler, the CUDA compiler (both for kernels
that are compiled where they run), and the newest symbol version of libmlx5 ("1.25" of MLX5_1.25)."""
LOWEST = ValueForm(r"[0-9]{1,4}(\.[0-9]{1,4}){0,2}", 'a version of numbers such as "13.1"')


def deepep_release(version: str) -> tuple[int, ...]:
    """Return (2, 1, 0) for DeepEP's version "2.1.0+local"; () where it does not begin with a number."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def is_v25(release: Sequence[int]) -> bool:
    """Return whether a release of DeepEP is V2.5 or newer: on NCCL alone, without V1's kernels and tests."""
    return tuple(release[:2]) >= (2, 5)


class Wheel(Struct, frozen=True):
    """One wheel file: distribution name and version, the index's *name*, file name, SRI hash of the file, size in
    bytes."""

    name: str
    version: str
    index: str
    file: str
    hash: str
    size: int

    @property
    def tags(self) -> frozenset[Tag]:
        """The tags of interpreter, ABI and platform in the file's name; the lock has checked that it has them."""
        return parse_wheel_file(self.file)[3]

    @property
    def platforms(self) -> frozenset[str]:
        """The platforms that the file is for."""
        return frozenset(tag.platform for tag in self.tags)

    @property
    def requirement(self) -> str:
        """Return the line of pip's requirements that allows this very file, with its hash in the form pip knows."""
        return f"{self.name}=={self.version} --hash=sha256:{base64.b64decode(self.hash.partition('-')[2]).hex()}"


class ToolkitPin(Struct, frozen=True):
    """NVIDIA's compiler for kernels that are compiled where they run: the version of its nvcc, and by machine the
    wheels that its entry is unpacked from. It needs no host toolkit; the host compiler is not in it."""

    name: str
    version: str
    wheels: Mapping[str, tuple[Wheel, ...]]


class Stack(Struct, frozen=True):
    """A validated set. `deepep`, `nvshmem`, `gdrcopy` name sources ("" for none); `cuda` is the CUDA major; wheels
    by target (`cp312-x86_64`). `nvshmem_wheel` and `nccl_wheel` name distributions among these wheels: the NVSHMEM
    that is not built from a source, and the NCCL that DeepEP V2 is built against ("" for none). `asked` is what the
    wheels were resolved from, `needs` the lowest version of each of NEEDS that every GPU host must have. `toolkit`
    names the compiler that comes along for kernels which are compiled where they run ("" for none)."""

    name: str
    deepep: str
    nvshmem: str
    gdrcopy: str
    cuda: str
    wheels: Mapping[str, tuple[Wheel, ...]]
    nvshmem_wheel: str = ""
    nccl_wheel: str = ""
    asked: WheelRequest = field(default_factory=WheelRequest)
    needs: Mapping[str, str] = field(default_factory=dict)
    toolkit: str = ""

    def pinned(self, name: str, target: str = "") -> Wheel | None:
        """Return the wheel of the distribution `name` for `target` ("": for any), or None."""
        closures = (self.wheels.get(target, ()),) if target else self.wheels.values()
        return next(
            (
                wheel
                for closure in closures
                for wheel in closure
                if canonicalize_name(wheel.name) == canonicalize_name(name)
            ),
            None,
        )

    def nccl_version(self, target: str) -> str:
        """Return the version of the NCCL that DeepEP V2 is built with and runs with; "" for a stack without."""
        wheel = self.pinned(self.nccl_wheel, target) if self.nccl_wheel else None
        return wheel.version if wheel else ""


IMAGE_REFERENCE = ValueForm(r"[A-Za-z0-9][A-Za-z0-9._:/-]*", "an image such as registry.example/name:tag")
IMAGE_DIGEST = ValueForm(r"(sha256:[0-9a-f]{64})?", 'sha256: and 64 hexadecimal digits, or ""')


class ImagePin(Struct, frozen=True):
    """A container image of others: what is asked for (a tag), and the digest that a registry answered ("" while none
    was asked)."""

    reference: str
    digest: str


class PackagePin(Struct, frozen=True):
    """One file of a distribution's archive: package name and version, its path there, SRI hash, size in bytes, and its
    licence as an SPDX expression."""

    name: str
    version: str
    file: str
    hash: str
    size: int
    license: str


class CompilerPin(Struct, frozen=True):
    """The host compiler and the shell that nvcc calls, for images whose base has none: packages by machine, unpacked
    without their scripts. Of their files those come along that `keep` matches (fnmatch; `*` is also for slashes), and
    they run where glibc is `glibc` or newer. The archive is that of `url` at the time `at`, which keeps old files."""

    name: str
    url: str
    at: str
    glibc: str
    keep: tuple[str, ...]
    packages: Mapping[str, tuple[PackagePin, ...]]

    def address(self, package: PackagePin) -> str:
        """Return the address of a package's file: that of the archive, with the time behind its first part."""
        archive, _, rest = package.file.partition("/")
        return f"{self.url}/{archive}/{self.at}/{rest}"


class Lock(Struct, frozen=True):
    """The whole lock file. `tools` are wheels of programs we run on hosts (uv), by name; `indexes` maps index names
    to addresses, `images` the names of images (`gib`, `base.NAME`) to pins. `text` is what was read: whoever keeps or
    hashes the lock of a run takes it from here, because the file may change while that run goes on."""

    path: str
    version: int
    default_stack: str
    sources: Mapping[str, Source]
    stacks: Mapping[str, Stack]
    systems: Mapping[str, System]
    tools: Mapping[str, tuple[Wheel, ...]]
    indexes: Mapping[str, str]
    text: str = ""
    images: Mapping[str, ImagePin] = field(default_factory=dict)
    toolkits: Mapping[str, ToolkitPin] = field(default_factory=dict)
    compilers: Mapping[str, CompilerPin] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return where it is from: its text is no help in a message."""
        return f"Lock({self.path!r})"


def read_lock_file(path: str | Path) -> Lock:
    """Read the lock file at `path`. Raises Trouble with every fault of the file, or when it cannot be read."""
    try:
        text = Path(path).read_bytes().decode()
    except OSError as error:
        raise Trouble(Problem(str(path), f"the lock cannot be read: {error.strerror}", try_="--lock=FILE")) from None
    except UnicodeDecodeError as error:
        raise Trouble(Problem(str(path), f"is not UTF-8 at byte {error.start}")) from None
    try:
        return parse_lock(text, str(path))
    except Trouble as trouble:
        raise Trouble(*trouble.problems, file=str(path), guess=other_than(text, LOCK)) from None


def parse_lock(text: str, path: str) -> Lock:
    """Return the lock in TOML `text`; `path` names it in messages. Raises Trouble with every fault at once."""
    problems: list[Problem] = []
    top = Table(load_toml(text, path), path, problems)
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
        text=text,
        images=_images(top.inner("image")),
        toolkits={name: _toolkit(name, table) for name, table in top.named("toolkit")},
        compilers={name: _compiler(name, table) for name, table in top.named("compiler")},
    )
    top.close()
    _check_references(lock, top)
    if problems:
        raise Trouble(*problems)
    return lock


def _images(table: Table) -> dict[str, ImagePin]:
    """Return the images of others: gIB's installer, and those that an image of ours is built on."""
    found = {f"base.{name}": _image(inner) for name, inner in table.named("base")}
    if "gib" in table.data:
        found["gib"] = _image(table.inner("gib"))
    else:
        table.known.append("gib")
    table.close()
    return found


def _image(table: Table) -> ImagePin:
    pin = ImagePin(table.text("reference", IMAGE_REFERENCE), table.text("digest", IMAGE_DIGEST))
    table.close()
    return pin


def _check_references(lock: Lock, top: Table) -> None:
    if lock.default_stack and lock.default_stack not in lock.stacks:
        top.complain(
            "default_stack",
            "there is no such stack",
            lock.default_stack,
            ", ".join(lock.stacks) or "a table [stack.NAME]",
        )
    if PYTHON in lock.sources:
        what = "this name is taken: `lock --update python` is about wheels"
        top.complain(f"source.{PYTHON}", what, wanted="another name")
    for stack in lock.stacks.values():
        _check_sources(stack, lock.sources, top)
        _check_wheel_roles(stack, top)
        _check_toolkit(stack, lock.toolkits, top)


def _check_sources(stack: Stack, sources: Mapping[str, Source], top: Table) -> None:
    """What a stack is built from must be a source of the lock."""
    wanted = ", ".join(sources) or "a table [source.NAME]"
    for role, name in (("deepep", stack.deepep), ("nvshmem", stack.nvshmem), ("gdrcopy", stack.gdrcopy)):
        if name and name not in sources:
            top.complain(f"stack.{stack.name}.{role}", "there is no such source", name, wanted)


def _check_wheel_roles(stack: Stack, top: Table) -> None:
    """What a stack takes from a wheel must be in every one of its closures."""
    for role, name in (("nvshmem_wheel", stack.nvshmem_wheel), ("nccl_wheel", stack.nccl_wheel)):
        lacking = [target for target in stack.wheels if name and stack.pinned(name, target) is None]
        if lacking or (name and not stack.wheels):
            top.complain(
                f"stack.{stack.name}.{role}",
                "this wheel is not listed",
                name,
                f"one for {', '.join(lacking) or 'a target'}",
            )
    if stack.nvshmem and stack.nvshmem_wheel:
        top.complain(
            f"stack.{stack.name}.nvshmem_wheel",
            "NVSHMEM comes from a source already",
            stack.nvshmem_wheel,
            "one of the two",
        )
    if stack.nvshmem and not stack.gdrcopy:
        top.complain(
            f"stack.{stack.name}.gdrcopy", "is missing", wanted="a source: NVSHMEM is compiled against its header"
        )


def _check_toolkit(stack: Stack, toolkits: Mapping[str, ToolkitPin], top: Table) -> None:
    """The compiler that comes along must be one of the lock, of the stack's CUDA major, for each of its machines."""
    where, toolkit = f"stack.{stack.name}.toolkit", toolkits.get(stack.toolkit)
    if toolkit is None:
        if stack.toolkit:
            wanted = ", ".join(toolkits) or "a table [toolkit.NAME]"
            top.complain(where, "there is no such toolkit", stack.toolkit, wanted)
        return
    if toolkit.version.split(".")[0] != stack.cuda:
        top.complain(where, "is of another CUDA major than the stack", toolkit.version, f"CUDA {stack.cuda}")
    lacking = sorted({target.split("-")[1] for target in stack.wheels} - set(toolkit.wheels))
    if lacking:
        top.complain(where, "has no wheels for a machine of the stack", stack.toolkit, f"those for {lacking[0]}")


def _toolkit(name: str, table: Table) -> ToolkitPin:
    wheels = table.inner("wheels")
    toolkit = ToolkitPin(
        name, table.text("version", VERSION), {machine: _of_machine(machine, wheels) for machine in wheels.data}
    )
    for machine, listed in toolkit.wheels.items():
        if toolkit.version and not any((each.name, each.version) == (NVCC, toolkit.version) for each in listed):
            wheels.complain(machine, "has no nvcc of this toolkit's version", wanted=f"{NVCC} {toolkit.version}")
    table.close()
    return toolkit


def _compiler(name: str, table: Table) -> CompilerPin:
    packages = table.inner("packages")
    for machine in packages.data:
        if not MACHINE.fits(machine):
            packages.complain(machine, "is no machine", wanted=MACHINE.words)
    compiler = CompilerPin(
        name=name,
        url=table.address("url", INDEX_URL),
        at=table.text("at", TIMESTAMP),
        glibc=table.text("glibc", LOWEST),
        keep=table.words("keep", PATTERN),
        packages={machine: tuple(map(_package, packages.tables(machine))) for machine in packages.data},
    )
    table.close()
    return compiler


def _package(table: Table) -> PackagePin:
    package = PackagePin(
        name=table.text("name", PACKAGE_NAME),
        version=table.text("version", PACKAGE_VERSION),
        file=table.text("file", PACKAGE_FILE),
        hash=read_hash(table),
        size=table.number("size", 1),
        license=table.text("license", LICENSE),
    )
    table.close()
    return package


def _of_machine(machine: str, wheels: Table) -> tuple[Wheel, ...]:
    """Read a toolkit's wheels for one machine. They serve every Python, so any of its targets judges them."""
    return _closure(machine, wheels, f"{ANY_PYTHON}-{machine}")


def _stack(name: str, table: Table) -> Stack:
    def unless(other: str, key: str) -> str:
        """Return the name of a source that may be absent where `other` stands."""
        return table.text(key, NAME) if key in table.data or other not in table.data else table.take(key, str, "")

    wheels = table.inner("wheels")
    stack = Stack(
        name=name,
        deepep=table.text("deepep", NAME),
        nvshmem=unless("nvshmem_wheel", "nvshmem"),
        gdrcopy=unless("nvshmem_wheel", "gdrcopy"),
        cuda=table.text("cuda", CUDA),
        wheels={target: _closure(target, wheels) for target in wheels.data},
        nvshmem_wheel=table.text("nvshmem_wheel", WHEEL_NAME)
        if "nvshmem_wheel" in table.data
        else table.take("nvshmem_wheel", str, ""),
        nccl_wheel=table.text("nccl_wheel", WHEEL_NAME)
        if "nccl_wheel" in table.data
        else table.take("nccl_wheel", str, ""),
        asked=read_asked(table),
        needs=_needs(table.inner("needs")),
        toolkit=table.text("toolkit", NAME) if "toolkit" in table.data else table.take("toolkit", str, ""),
    )
    table.close()
    return stack


def _needs(table: Table) -> dict[str, str]:
    """Read the lowest versions that a stack needs of every GPU host; it may need none."""
    found = {name: table.text(name, LOWEST) for name in NEEDS if name in table.data}
    table.known[:] = NEEDS
    table.close()
    return found


def _closure(key: str, wheels: Table, target: str = "") -> tuple[Wheel, ...]:
    """Read the wheels of one target, which the list's key is where no `target` is named: one of each distribution, each
    of which that target can install."""
    target, form = target or key, MACHINE if target else TARGET
    if not form.fits(key):
        wheels.complain(key, f"is no {'machine' if form is MACHINE else 'target'}", wanted=form.words)
    seen: set[str] = set()
    closure = []
    for entry in wheels.tables(key):
        wheel = _wheel(entry)
        if wheel.name and canonicalize_name(wheel.name) in seen:
            entry.complain("name", "this distribution is listed twice for one target", wheel.name)
        if wheel.file and TARGET.fits(target) and not installs_on(wheel, target):
            entry.complain("file", f"this wheel does not install on {key}", wheel.file)
        seen.add(canonicalize_name(wheel.name))
        closure.append(wheel)
    return tuple(closure)


def _tool(table: Table) -> tuple[Wheel, ...]:
    """Read the wheels of one program: one per platform."""
    seen: set[frozenset[str]] = set()
    wheels = []
    for entry in table.tables("wheels"):
        wheel = _wheel(entry)
        if wheel.file and wheel.platforms in seen:
            entry.complain("file", "there is a wheel for this platform already", wheel.file)
        seen.add(wheel.platforms if wheel.file else frozenset())
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
    if wheel.file and wheel.name and wheel.version and not _is_named(wheel):
        name, version = wheel.file.split("-")[:2]
        what = "is another wheel than name and version say"
        table.complain("file", what, f"{name} {version}", f"{wheel.name} {wheel.version}")
    return wheel


def _is_named(wheel: Wheel) -> bool:
    """Return whether the file is called like the distribution and its version."""
    name, version, _, _ = parse_wheel_file(wheel.file)
    try:
        return (name, version) == (canonicalize_name(wheel.name), Version(wheel.version))
    except InvalidVersion:
        return False


def installs_on(wheel: Wheel, target: str) -> bool:
    """Return whether pip takes this wheel for a target, whatever glibc it asks for."""
    machine = target.split("-", 1)[1]
    glibc = re.compile(rf"manylinux\w*_{machine}")
    found = {Tag(tag.interpreter, tag.abi, glibc.sub(f"linux_{machine}", tag.platform)) for tag in wheel.tags}
    return not found.isdisjoint(_tags_of(target))


@functools.cache
def _tags_of(target: str) -> frozenset[Tag]:
    """Return the tags that an interpreter takes on a target, without a glibc."""
    interpreter, machine = target.split("-", 1)
    version, platforms = (3, int(interpreter.removeprefix("cp3"))), [f"linux_{machine}"]
    own = tags.cpython_tags(version, [interpreter], platforms)
    return frozenset((*own, *tags.compatible_tags(version, interpreter, platforms)))


def _index(name: str, table: Table) -> str:
    if name == OWN_INDEX:
        table.complain("url", "this index is whatever pip is set up to use and takes no address", wanted="another name")
    url = table.address("url", INDEX_URL)
    table.close()
    return url


def used(lock: Lock, stacks: Sequence[str]) -> list[Source]:
    """Return the sources that `stacks` use; with all stacks also those that none does."""
    everything = set(stacks) == set(lock.stacks)
    return [source for name, source in lock.sources.items() if everything or set(users(lock, name)) & set(stacks)]


def users(lock: Lock, name: str) -> list[str]:
    """Return the stacks that use the pin called `name`."""
    return [stack.name for stack in lock.stacks.values() if name in roles(stack, lock).values()]


def roles(stack: Stack, lock: Lock) -> dict[str, str]:
    """Return the pins that a stack uses by what it uses them for."""
    values = {each.name: getattr(stack, each.name) for each in fields(stack) if each.name != "name"}
    return {role: name for role, name in values.items() if isinstance(name, str) and name in lock.sources}
