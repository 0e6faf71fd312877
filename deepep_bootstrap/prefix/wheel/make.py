"""A wheel made of a stack's entries in the store: what goes into it, what it takes from its surroundings, and its bytes
(docs/decisions/046).

The same entries give the same bytes: members have one order, one time and no compression, whose result differs between
versions of zlib.
"""

from __future__ import annotations

import ast
import base64
import csv
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from email import message_from_string
from typing import Any

from msgspec import Struct, field
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from deepep_bootstrap.core import program
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.fetch.locations import shown
from deepep_bootstrap.lock.model import Source
from deepep_bootstrap.prefix.archive.index import LINK, ArchiveMember, Tree
from deepep_bootstrap.prefix.contents import StoreEntry
from deepep_bootstrap.prefix.wheel.elf import Relocator, platform_tag

NAME = "deep_ep"
PACKAGE = "lib/python/"
"""Where an entry of DeepEP has what Python imports."""
EXTENSION = re.compile(r".*\.cpython-(3)(\d+)(t?)-(x86_64|aarch64)-linux-gnu\.so")
LIBS = f"{NAME}.libs"
"""Where libraries that came along lie, as with auditwheel."""
TRANSPORT = re.compile(r"lib/nvshmem_transport_ibgda\.so[.0-9]*")
TORCH = re.compile(r"lib/[^/]+/site-packages/torch-[^/]+\.dist-info/METADATA")
TRANSPORT_SOURCE = "src/modules/transport/ibgda/"
LINKED_IN = ("src/device/", "src/include/")
"""Parts of NVSHMEM that are in the extension itself: its device side is linked statically."""
GUARD, GUARD_VALUES = "_built_for.py", "_built_for.json"
GUARD_SOURCE = "wheel/built_for.py"
GUARD_LINE = "from . import _built_for as _built_for  # first of all: is this the torch that it was made for?\n"
TIME = (1980, 1, 1, 0, 0, 0)
"""The earliest that a zip file can say."""
BUILD_DIGITS = 8
"""Characters of the entry's name that tell builds of one commit apart: 40 bits."""

Read = Callable[[Mapping[str, Sequence[ArchiveMember]]], Mapping[tuple[str, str], bytes]]
"""Gives the contents of files by entry and path, for the files wanted of each entry."""


class Library(Struct, frozen=True):
    """A library that deep_ep calls and that lies in the same environment: the wheel that brings it, in which version,
    and its path in site-packages."""

    name: str
    distribution: str
    version: str
    file: str

    @property
    def requirement(self) -> str:
        """The line of the metadata."""
        return f"{self.distribution}=={self.version}"


class Fence(Struct, frozen=True):
    """Text of upstream that this build replaced: of which project and file, how often, and why ("" where no lock
    says)."""

    project: str
    file: str
    count: int
    reason: str

    def __str__(self) -> str:
        places = "1 place" if self.count == 1 else f"{self.count} places"
        return f"{self.project}, {self.file}, {places}" + (f": {self.reason}" if self.reason else "")


class BuiltStack(Struct, frozen=True):
    """A stack of a generation as the store holds it. `record` is the generation's, `entries` and `trees` are those of
    DeepEP, NVSHMEM and the Python environment (none with an external Python) by name, `sources` what locks of this
    prefix pin, by hash."""

    stack: str
    record: Mapping[str, Any]
    entries: Mapping[str, StoreEntry]
    trees: Mapping[str, Tree]
    sources: Mapping[str, Source] = field(default_factory=dict)

    @property
    def deepep(self) -> str:
        """The name of DeepEP's entry."""
        return str(self.record.get("deepep", ""))

    @property
    def nvshmem(self) -> str:
        """The name of NVSHMEM's entry."""
        return str(self.record.get("nvshmem", ""))

    @property
    def python(self) -> str:
        """The name of the environment's entry, "" with an external Python."""
        return str(self.record.get("python", ""))

    @property
    def torch(self) -> str:
        """The version of torch that DeepEP was compiled for, without a local part."""
        external = _mapping(self.inputs(self.deepep).get("python"))
        found = str(self.record.get("torch") or external.get("torch") or version_of(self.python))
        return found.partition("+")[0]

    @property
    def nvshmem_beside_torch(self) -> str:
        """The version of the NVSHMEM of an external torch that V2 was built against, "" for none."""
        return str(self.record.get("nvshmem_version") or "")

    @property
    def toolkit(self) -> str:
        """The version of the CUDA toolkit that compiled it."""
        return str(self.inputs(self.deepep).get("cuda", ""))

    def inputs(self, entry: str) -> Mapping[str, Any]:
        """Return what an entry was made of, by its manifest."""
        return _mapping(self.entries[entry].manifest.get("inputs")) if entry in self.entries else {}

    def source(self, entry: str) -> Source | None:
        """Return the pin of an entry's source, None where no lock of the prefix has it."""
        return self.sources.get(str(self.inputs(entry).get("source", "")))

    def fences(self, entry: str, project: str) -> tuple[Fence, ...]:
        """Return what was replaced in an entry's source, with the reasons that locks give."""
        source = self.source(entry)
        reasons = {_json(each.effect): each.reason for each in source.substitutes} if source else {}
        found = self.inputs(entry).get("substitutes")
        effects = [_mapping(each) for each in found] if isinstance(found, list) else []
        return tuple(
            Fence(project, str(each.get("file", "")), int(each.get("count", 1)), reasons.get(_json(each), ""))
            for each in effects
        )


class WheelFile(Struct, frozen=True):
    """A finished wheel: its file name and bytes, and what it says of itself. `bundled` are libraries of the store that
    came along, `fences` what differs from upstream's text."""

    file: str
    data: bytes
    version: str
    tag: str
    requires: tuple[str, ...]
    bundled: tuple[str, ...]
    fences: tuple[Fence, ...]

    @property
    def sha256(self) -> str:
        """Its hash, in hexadecimal digits."""
        return hashlib.sha256(self.data).hexdigest()


def version_of(entry: str) -> str:
    """Return 1.2.1 for the entry HASH-deepep-1.2.1."""
    return "-".join(entry.split("-")[2:])


def make_wheel(built: BuiltStack, read: Read, relocator: Relocator, guard: str) -> WheelFile:
    """Return the wheel of a stack. `read` brings the files of the store, `guard` is the text of env/wheel/built_for.py.
    Trouble where the stack needs a library that no pip can put beside its torch."""
    contents = read(_wanted(built))
    package = {path[len(PACKAGE) :]: data for (_, path), data in contents.items() if path.startswith(PACKAGE)}
    extensions = {path: data for path, data in package.items() if path.endswith(".so")}
    python, machine = _python_tag(built, extensions)
    libraries = tuple(_libraries(built, relocator, extensions))
    _check_torch_agrees(built, libraries, _torch_requirements(contents))
    bundled = dict(_transports(built, relocator, contents))
    for path, data in extensions.items():
        package[path] = relocator.with_run_path(data, _run_path(path, libraries), f"{built.deepep}/{PACKAGE}{path}")
    found = [each for data in (*extensions.values(), *bundled.values()) for each in relocator.versions(data)]
    identity = _Identity(built, libraries, tuple(bundled), (python, python, platform_tag(found, machine)))
    files = {
        **package,
        **{f"{LIBS}/{name}": data for name, data in bundled.items()},
        f"{NAME}/__init__.py": guarded(package[f"{NAME}/__init__.py"]),
        f"{NAME}/{GUARD}": guard.encode(),
        f"{NAME}/{GUARD_VALUES}": _json(identity.guard_values()),
    }
    info = f"{NAME}-{identity.version}.dist-info"
    files |= {f"{info}/{name}": data for name, data in identity.metadata_files().items()}
    return WheelFile(
        f"{NAME}-{identity.version}-{identity.tag}.whl",
        pack(files, f"{info}/RECORD"),
        identity.version,
        identity.tag,
        identity.requires,
        tuple(bundled),
        identity.fences,
    )


def _wanted(built: BuiltStack) -> dict[str, list[ArchiveMember]]:
    """Return the files to read of each entry: Python's and the extension's, NVSHMEM's transport where this build
    changed it, and what torch says of its own needs."""
    wanted = {built.deepep: [each for each in built.trees[built.deepep].files if _is_package(each.path)]}
    if not any(each.path == f"{PACKAGE}{NAME}/__init__.py" for each in wanted[built.deepep]):
        raise Trouble(Problem(built.deepep, "there is no Python package deep_ep in it", try_="invoke verify --store"))
    if links := [
        each.path for each in built.trees[built.deepep].things if each.kind == LINK and _is_package(each.path)
    ]:
        raise Trouble(Problem(f"{built.deepep}/{links[0]}", "a wheel holds no links", wanted="a file"))
    if any(each.file.startswith(TRANSPORT_SOURCE) for each in built.fences(built.nvshmem, "NVSHMEM")):
        files = built.trees[built.nvshmem].files
        wanted[built.nvshmem] = [each for each in files if TRANSPORT.fullmatch(each.path)]
    if built.python:
        files = built.trees[built.python].files
        wanted[built.python] = [each for each in files if TORCH.fullmatch(each.path)]
    return wanted


def _is_package(path: str) -> bool:
    # Byte code is the business of whoever installs.
    return path.startswith(PACKAGE) and "/__pycache__/" not in path and not path.endswith(".pyc")


def _python_tag(built: BuiltStack, extensions: Collection[str]) -> tuple[str, str]:
    """Return the tag of the Python that the extension is for, and its machine: ("cp311", "x86_64")."""
    found = [match for path in extensions if (match := EXTENSION.fullmatch(path))]
    if not found or len(found) != len(extensions):
        wanted = "extensions called like deep_ep_cpp.cpython-312-x86_64-linux-gnu.so"
        raise Trouble(Problem(built.deepep, "no wheel's name fits it", ", ".join(extensions) or "none", wanted))
    return f"cp{found[0][1]}{found[0][2]}{found[0][3]}", found[0][4]


def _libraries(built: BuiltStack, relocator: Relocator, extensions: Mapping[str, bytes]) -> Iterator[Library]:
    """Yield the libraries of torch's wheels that the extension is linked with."""
    needed = sorted({name for data in extensions.values() for name in relocator.needed(data)})
    major = built.toolkit.split(".")[0]
    versions = {"nccl": built.record.get("nccl"), "nvshmem": version_of(built.nvshmem) or built.nvshmem_beside_torch}
    for kind, stem in (("nccl", "libnccl.so"), ("nvshmem", "libnvshmem_host.so")):
        for soname in needed:
            if soname.startswith(stem):
                file = f"nvidia/{kind}/lib/{soname}"
                yield Library(kind.upper(), f"nvidia-{kind}-cu{major}", str(versions[kind]), file)


def _run_path(path: str, libraries: Iterable[Library]) -> str:
    """Return the RUNPATH of an extension at `path` in site-packages: the folders of torch's libraries beside it."""
    up = "../" * path.count("/")
    return ":".join(f"$ORIGIN/{up}{each.file.rpartition('/')[0]}" for each in libraries)


def _torch_requirements(contents: Mapping[tuple[str, str], bytes]) -> dict[str, Requirement]:
    """Return what the environment's torch requires, by canonical name; nothing where that is not known."""
    text = next((data.decode("utf-8", "replace") for (_, path), data in contents.items() if "/torch-" in path), "")
    found: dict[str, Requirement] = {}
    for line in message_from_string(text).get_all("Requires-Dist") or []:
        try:
            requirement = Requirement(str(line))
        except InvalidRequirement:
            continue
        found[canonicalize_name(requirement.name)] = requirement
    return found


def _check_torch_agrees(built: BuiltStack, libraries: Iterable[Library], required: Mapping[str, Requirement]) -> None:
    """Trouble where the stack's own environment has another NVSHMEM or NCCL than its torch requires: a module can do
    that, but pip keeps to what torch says, and a process has each of them once."""
    if built.record.get("own_nccl"):
        raise Trouble(
            Problem(
                f"stack {built.stack}",
                "it cannot be a wheel: its NCCL is one of ours, which the module loads before torch's",
                f"--nccl=own, NCCL {built.record.get('nccl')}",
                "an NCCL that torch brings",
                "its module, or --python with torch 2.14 or newer",
            )
        )
    problems = [
        Problem(
            f"stack {built.stack}",
            f"it cannot be a wheel: in one environment pip puts the {each.name} that torch {built.torch} requires",
            f"{each.distribution} {each.version} in DeepEP's build",
            f"{wish.name}{wish.specifier}",
            "its module, or a stack that takes torch's own",
        )
        for each in libraries
        if (wish := required.get(canonicalize_name(each.distribution))) and each.version not in wish.specifier
    ]
    if problems:
        raise Trouble(*problems)


def _transports(
    built: BuiltStack, relocator: Relocator, contents: Mapping[tuple[str, str], bytes]
) -> Iterator[tuple[str, bytes]]:
    """Yield the transports of NVSHMEM that come along, by the name that NVSHMEM asks for. Trouble where other parts
    of the host library were changed: in a process with torch it is torch's own that runs."""
    fences = built.fences(built.nvshmem, "NVSHMEM")
    lost = [
        each
        for each in fences
        if not each.file.startswith((TRANSPORT_SOURCE, *LINKED_IN)) and not each.file.endswith((".txt", ".cmake"))
    ]
    if lost:
        raise Trouble(
            Problem(
                f"stack {built.stack}",
                "it cannot be a wheel: its NVSHMEM was changed in the host library, and torch brings its own",
                str(lost[0]),
                "changes in the IBGDA transport or on the device side alone",
                "its module",
            )
        )
    for (entry, path), data in contents.items():
        if entry == built.nvshmem:
            if not (name := relocator.soname(data)):
                raise Trouble(Problem(f"{entry}/{path}", "it has no SONAME, so NVSHMEM would not find it by name"))
            yield name, relocator.with_run_path(data, "", f"{entry}/{path}")


class _Identity(Struct, frozen=True):
    """What a wheel says of itself. `tags` are those of Python, ABI and platform."""

    built: BuiltStack
    libraries: tuple[Library, ...]
    bundled: tuple[str, ...]
    tags: tuple[str, str, str]

    @property
    def tag(self) -> str:
        return "-".join(self.tags)

    @property
    def version(self) -> str:
        """DeepEP's version with what tells builds apart: the commit, CUDA's release, the store entry."""
        built = self.built
        source = built.source(built.deepep)
        # Letters first: of digits alone a version's part would lose its zeros.
        parts = [f"g{source.rev[:7]}"] if source else []
        parts += [f"cu{''.join(built.toolkit.split('.')[:2])}", f"b{built.deepep[:BUILD_DIGITS]}"]
        return f"{Version(version_of(built.deepep)).public}+{'.'.join(parts)}"

    @property
    def requires(self) -> tuple[str, ...]:
        return (f"torch=={self.built.torch}", *(each.requirement for each in self.libraries))

    @property
    def fences(self) -> tuple[Fence, ...]:
        """What differs from upstream's text in what is in the wheel: DeepEP, and of NVSHMEM what came along or is
        linked in."""
        built = self.built
        ours = (TRANSPORT_SOURCE, *LINKED_IN)
        nvshmem = (each for each in built.fences(built.nvshmem, "NVSHMEM") if each.file.startswith(ours))
        return (*built.fences(built.deepep, "DeepEP"), *nvshmem)

    def guard_values(self) -> dict[str, Any]:
        """Return what the import holds its surroundings against."""
        built = self.built
        return {
            "build": f"{NAME} {self.version}",
            "torch": built.torch,
            "cuda": built.toolkit.split(".")[0],
            "libraries": [
                {"name": each.name, "distribution": each.distribution, "version": each.version, "file": each.file}
                for each in self.libraries
            ],
            "transports": list(self.bundled),
        }

    def metadata_files(self) -> dict[str, bytes]:
        """Return the files of the wheel's own folder but RECORD."""
        wheel = [
            "Wheel-Version: 1.0",
            f"Generator: {program.NAME} {program.version()}",
            "Root-Is-Purelib: false",
            f"Tag: {self.tag}",
        ]
        return {
            "METADATA": self._metadata().encode(),
            "WHEEL": "\n".join([*wheel, ""]).encode(),
            "top_level.txt": f"{NAME}\n".encode(),
            f"{program.NAME}.json": _json(self._provenance()),
        }

    def _metadata(self) -> str:
        source = self.built.source(self.built.deepep)
        python = re.fullmatch(r"cp(3)(\d+)t?", self.tags[0])
        lines = [
            "Metadata-Version: 2.1",
            f"Name: {NAME}",
            f"Version: {self.version}",
            f"Summary: DeepEP for torch {self.built.torch} and CUDA {self.built.toolkit.split('.')[0]}",
            *([f"Project-URL: Source, {shown(source.url)}"] if source else []),
            *([f"Requires-Python: =={python[1]}.{python[2]}.*"] if python else []),
            *(f"Requires-Dist: {each}" for each in self.requires),
            "Description-Content-Type: text/markdown",
            "",
            self._description(),
        ]
        return "\n".join(lines)

    def _description(self) -> str:
        built = self.built
        source = built.source(built.deepep)
        origin = f"{shown(source.url)} at {source.rev}" if source else f"a tree with the hash {self._tree_hash}"
        archs = ", ".join(map(str, built.inputs(built.deepep).get("archs") or ()))
        text = [
            f"DeepEP {version_of(built.deepep)}, built by {program.NAME} from {origin}",
            f"for GPUs of compute capability {archs}: store entry {built.deepep}.",
            "",
            "Text of upstream that was replaced before the build:",
            "",
            *([f"- {each}" for each in self.fences] or ["- none"]),
            "",
            f"Taken along: {', '.join(self.bundled) or 'no library'}.",
            f"Taken from the environment: {', '.join(self.requires)}.",
            "",
        ]
        return "\n".join(text)

    @property
    def _tree_hash(self) -> str:
        return str(self.built.inputs(self.built.deepep).get("source", ""))

    def _provenance(self) -> dict[str, Any]:
        """Return where the wheel comes from, for programs. Neither hosts nor times are in it: a wheel leaves the
        site."""
        built = self.built
        entries = [built.deepep, *([built.nvshmem] if built.nvshmem in built.entries else [])]
        return {
            "stack": built.stack,
            "entries": {
                name: {
                    "inputs": built.inputs(name),
                    "record_sha256": built.entries[name].record,
                    "pin": {"url": shown(source.url), "rev": source.rev, "ref": source.ref}
                    if (source := built.source(name))
                    else {},
                }
                for name in entries
            },
            "fences": [
                {"project": each.project, "file": each.file, "count": each.count, "reason": each.reason}
                for each in self.fences
            ],
            "bundled": list(self.bundled),
        }


def guarded(text: bytes) -> bytes:
    """Return the package's __init__.py with the guard as its first import: behind the docstring and what Python wants
    to stand first."""
    lines = text.decode().splitlines(keepends=True)
    at = _first_statement(text)
    if at and not lines[at - 1].endswith("\n"):
        lines[at - 1] += "\n"
    return "".join([*lines[:at], GUARD_LINE, *lines[at:]]).encode()


def _first_statement(text: bytes) -> int:
    """Return how many lines stand before the first statement that does something."""
    at = 0
    for number, node in enumerate(ast.parse(text).body):
        is_doc = number == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_doc and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            break
        at = node.end_lineno or at
    return at


def pack(files: Mapping[str, bytes], record: str) -> bytes:
    """Return a wheel of these files, with the RECORD of their hashes at the path `record`: the same bytes for the same
    files. Its own folder comes last, as readers of such archives like it."""
    info = record.rpartition("/")[0] + "/"
    order = sorted(files, key=lambda path: (path.startswith(info), path))
    rows = [(path, f"sha256={_digest(files[path])}", str(len(files[path]))) for path in order]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([*rows, (record, "", "")])
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for path in order:
            _add(archive, path, files[path])
        _add(archive, record, text.getvalue().encode())
    return out.getvalue()


def _add(archive: zipfile.ZipFile, path: str, data: bytes) -> None:
    member = zipfile.ZipInfo(path, TIME)
    member.create_system = 3  # Unix, whose modes these are
    member.external_attr = (0o100755 if re.search(r"\.so(\.\d+)*$", path) else 0o100644) << 16
    archive.writestr(member, data)


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True).encode() + b"\n"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
