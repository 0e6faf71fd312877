"""An image of a stack, made of store entries: what is in its layers, its configuration, and what is said about it.

One layer for each entry, those that others need first, then one for our own programs. Everything lies below ROOT, with
the modes of the store; nothing depends on where the prefix is or when the image is made.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.filetree import hex_of
from deepep_bootstrap.core.text import moment
from deepep_bootstrap.fetch.locations import shown
from deepep_bootstrap.kubernetes import oci
from deepep_bootstrap.kubernetes.host_compiler import HostCompiler
from deepep_bootstrap.kubernetes.oci import Base, Descriptor, Layer, LayerWriter, Root
from deepep_bootstrap.lock.compatibility import numbers
from deepep_bootstrap.lock.model import Lock
from deepep_bootstrap.prefix import modulefiles, test_kinds
from deepep_bootstrap.prefix.archive import stream
from deepep_bootstrap.prefix.archive.index import FILE, FOLDER, INTERPRETER, LINK, ArchiveMember, Tree
from deepep_bootstrap.prefix.contents import Holdings
from deepep_bootstrap.prefix.offer import StackRecord
from deepep_bootstrap.prefix.test_kinds import END_MARGIN, Kind

ROOT = "/opt/deepep"
PROGRAM = "in_pod.py"
ABOUT = "image.json"
PACKAGE = Path(__file__).resolve().parents[1]
MODULES = ("inventory/natural.py", "inventory/nics.py", "kubernetes/pod_facts.py")
"""What the entry point imports, by path in this package: Python's own library is all that they need."""
OWN_MANIFEST = "manifest.json"
"""The file of each entry that says when and where it was built. Nothing loads it, and it is another one in every
store, so it stays there."""

DRIVER = "/usr/local/nvidia/lib64"
"""Where device plugins put the libraries of the node's driver."""

SBOM = "application/vnd.cyclonedx+json"
PROVENANCE = "application/vnd.in-toto+json"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "deepep-bootstrap/image/v1"


class Plan(Struct, frozen=True):
    """What an image is to hold: the record of the stack as it is inside, the trees of its entries in the order of
    their layers, and the files of the last layer by path below ROOT. `created` is the time of its newest source,
    `compiler` what nvcc calls where the base has none."""

    record: StackRecord
    trees: tuple[Tree, ...]
    files: Mapping[str, bytes]
    created: int
    architecture: str
    glibc: str
    without: tuple[str, ...] = ()
    compiler: HostCompiler | None = None


class Contents(Protocol):
    """Reads the files of one entry and gives them, one behind the other, to a sink."""

    def __call__(self, tree: Tree, sink: Callable[[bytes], object], /) -> None:
        """Read them."""


def plan_image(
    record: StackRecord, holdings: Holdings, trees: Sequence[Tree], texts: Mapping[str, str], **about: Any
) -> Plan:
    """Return what the image of a stack holds. `record` is as the prefix offers it, `trees` are its entries and what
    these need, `texts` the files of env/; `about` is the rest of a Plan."""
    without = about.get("without", ())
    inside = inside_record(record, without)
    kept = {tree.name: tree for tree in trees}
    names = [name for name in _in_order(holdings, kept) if name not in _left_out(record, without)]
    layers = tuple(replace(kept[name], things=tuple(_carried(kept[name]))) for name in names)
    return Plan(inside, layers, own_files(inside, texts), **about)


def inside_record(record: StackRecord, without: Sequence[str]) -> StackRecord:
    """Return a stack's record as it is inside the image: below ROOT, and without what was found on hosts: their toolkit
    is not in it, names in pods are others, and manifests say what the network is."""
    if "python" in without and record.nccl and record.python:
        what = "DeepEP V2 needs the environment that it was built with"
        raise Trouble(Problem("--without", what, "python", "nothing to be left out"))
    external = record.external_python or ("/usr/bin/python3" if "python" in without else "")
    python = "" if "python" in without else record.python
    found = {"cuda_home": "", "environment": {}, "by_host": {}, "by_kind": {}, "gib": ""}
    return replace(record, prefix=ROOT, python=python, external_python=external, **found)


def _left_out(record: StackRecord, without: Sequence[str]) -> set[str]:
    return {record.python} if "python" in without else set()


def _in_order(holdings: Holdings, names: Iterable[str]) -> Iterator[str]:
    """Yield entries behind those that they need."""
    seen: set[str] = set()

    def visit(name: str) -> Iterator[str]:
        if name in seen:
            return
        seen.add(name)
        needs = holdings.entries[name].needs if name in holdings.entries else ()
        for each in sorted(needs):
            yield from visit(each)
        yield name

    wanted = set(names)
    for name in sorted(wanted):
        yield from (each for each in visit(name) if each in wanted)


def _carried(tree: Tree) -> Iterator[ArchiveMember]:
    yield from (thing for thing in tree.things if thing.path != OWN_MANIFEST)


def own_files(record: StackRecord, texts: Mapping[str, str]) -> dict[str, bytes]:
    """Return the files of the last layer by path below ROOT: the entry point, what it reads, programs and examples."""
    program = Path(__file__).with_name(PROGRAM).read_bytes()
    files = {PROGRAM: program, ABOUT: json.dumps(about_stack(record, texts), indent=1, sort_keys=True).encode() + b"\n"}
    carried = (name for name in texts if name.startswith(("programs/", "examples/")))
    files |= own_modules()
    return {**files, **{name: texts[name].encode() for name in sorted(carried)}}


def own_modules() -> dict[str, bytes]:
    """Return what the entry point imports, by path beside it."""
    lib = f"lib/{PACKAGE.name}"
    made = {f"{lib}/{folder}__init__.py": b"" for folder in ("", "inventory/", "kubernetes/")}
    return {**made, **{f"{lib}/{path}": (PACKAGE / path).read_bytes() for path in MODULES}}


def about_stack(record: StackRecord, texts: Mapping[str, str]) -> dict[str, Any]:
    """Return what the entry point is told of the stack, as JSON values."""
    table = test_kinds.read_passes(texts)
    return {
        "stack": record.stack,
        "module": record.module,
        "root": ROOT,
        "deepep": record.deepep,
        "python": modulefiles.interpreter(record),
        "tests": f"{modulefiles.entry(record, record.deepep)}/tests",
        "lists": {lead.name: _entries(lead, record) for lead in modulefiles.lists(record) if lead.entries},
        "variables": dict(modulefiles.variables(record)),
        "kinds": {kind.name: _about_kind(kind, record, table) for kind in modulefiles.kinds_of(record)},
    }


def _entries(lead: modulefiles.Lead, record: StackRecord) -> list[str]:
    # No prefix with commands of its own and no tuning is in the image, and no other nvcc than the stack's.
    compiler = [f"{modulefiles.cuda_folder(record)}/bin"] if lead.name == "PATH" and record.toolkit else []
    return [each for each in lead.entries if each not in {f"{ROOT}/bin", f"{ROOT}/tuning/python"}] + compiler


def _about_kind(kind: Kind, record: StackRecord, table: Sequence[test_kinds.Pass]) -> dict[str, Any]:
    run = kind.run_for(record)
    if run is None:
        raise ValueError(f"stack {record.stack} has no {kind.name} test")
    passes = [one for one in table if one.kind == kind.name and any(map(one.is_for, record.archs))]
    return {
        "script": run.script,
        "always": list(run.always),
        "instead": list(run.instead),
        "ours": kind.ours,
        "passes": [one.option for one in passes],
        "capability": test_kinds.common_capability(passes, record.archs) if passes else "",
        "seconds": kind.minutes * 60 - END_MARGIN if kind.endless else 0,
    }


def check_base(plan: Plan, base: Base, root: Root) -> None:
    """Raise Trouble where the entries could not run on a base: another interpreter, or an older glibc."""
    wanted = sorted(
        {thing.target for tree in plan.trees for thing in tree.things if thing.kind == LINK and _leads_out(thing)}
        | ({plan.record.external_python} if plan.record.external_python else set())
    )
    problems = [
        Problem(
            base.where, "the base has not the interpreter of the stack's Python", wanted=path, try_="another --base"
        )
        for path in wanted
        if not root.has(path)
    ]
    if not root.glibc or numbers(root.glibc) < numbers(plan.glibc):
        found = f"glibc {root.glibc}" if root.glibc else "none"
        what = "the base's C library is older than that of the machine which built the entries"
        problems.append(Problem(base.where, what, found, f"glibc {plan.glibc} or later", "another --base"))
    if problems:
        raise Trouble(*problems)


def _leads_out(thing: ArchiveMember) -> bool:
    return INTERPRETER.fullmatch(thing.target) is not None


def layer_members(tree: Tree) -> Iterator[tuple[str, ArchiveMember]]:
    """Yield everything of an entry's layer with its name in the tar stream, folders above it first."""
    yield from _folders(f"{ROOT}/store")
    place = f"{ROOT}/store/{tree.name}".lstrip("/")
    yield place, ArchiveMember("", FOLDER)
    yield from ((f"{place}/{thing.path}", thing) for thing in tree.things)


def _folders(path: str) -> Iterator[tuple[str, ArchiveMember]]:
    parts = path.strip("/").split("/")
    yield from (("/".join(parts[:count]), ArchiveMember("", FOLDER)) for count in range(1, len(parts) + 1))


def pack_entry(sink: stream.Sink, tree: Tree, contents: Contents) -> None:
    """Write the tar stream of an entry's layer."""
    packer = stream.MemberPacker(sink, layer_members(tree))
    contents(tree, packer.feed)
    packer.finish()


def pack_own(sink: stream.Sink, files: Mapping[str, bytes]) -> None:
    """Write the tar stream of the last layer."""
    folders = {name: None for path in sorted(files) for name, _ in _folders(f"{ROOT}/{path}".rpartition("/")[0])}
    size = 0
    pieces = [stream.header(name, ArchiveMember("", FOLDER)) for name in folders]
    for path, data in sorted(files.items()):
        thing = ArchiveMember(path, FILE, executable=data.startswith(b"#!"), size=len(data))
        pieces += [stream.header(f"{ROOT}/{path}".lstrip("/"), thing), data, stream.padding(len(data))]
    for piece in pieces:
        sink.write(piece)
        size += len(piece)
    sink.write(stream.ending(size))


def make_config(plan: Plan, base: Base, layers: Sequence[Layer]) -> dict[str, Any]:
    """Return the configuration of the image: that of the base, the environment of the stack, and the entry point."""
    inherited = dict(base.config.get("config") or {})
    about = json.loads(plan.files[ABOUT])
    env = dict(each.split("=", 1) for each in inherited.get("Env") or () if "=" in each)
    env |= about["variables"] | environment(about["lists"], env)
    created = moment(plan.created).strftime("%Y-%m-%dT%H:%M:%SZ")
    entries = [f"deepep-bootstrap {layer.created_by}" for layer in layers]
    return {
        "architecture": plan.architecture,
        "os": "linux",
        "created": created,
        "config": {
            **{key: value for key, value in inherited.items() if key not in {"Cmd", "Labels"}},
            "Env": [f"{name}={value}" for name, value in sorted(env.items())],
            "Entrypoint": entry_point(plan),
            "Cmd": ["wait"],
            "WorkingDir": "/tmp",  # noqa: S108 - torch writes beside where it is; a pod's /tmp is its own
            "Labels": notes_of(plan, base),
        },
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in (*base.layers, *layers)]},
        "history": [
            *(base.config.get("history") or [{"created_by": base.digest} for _ in base.layers]),
            *({"created": created, "created_by": text} for text in entries),
        ],
    }


def environment(lists: Mapping[str, Sequence[str]], before: Mapping[str, str]) -> dict[str, str]:
    """Return the path lists of the image, for commands that are run past the entry point. LD_PRELOAD is left to that:
    it needs the driver's libraries."""
    found = {}
    for name, entries in lists.items():
        if name != "LD_PRELOAD":
            last = [DRIVER] if name == "LD_LIBRARY_PATH" else []
            found[name] = ":".join([*entries, *filter(None, before.get(name, "").split(":")), *last])
    return {**found, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}


def entry_point(plan: Plan) -> list[str]:
    """Return the command that a container begins with."""
    return [modulefiles.interpreter(plan.record), f"{ROOT}/{PROGRAM}"]


def notes_of(plan: Plan, base: Base) -> dict[str, str]:
    """Return what the image says of itself, by the names of the OCI's specification."""
    front = "org.opencontainers.image."
    record = plan.record
    return {
        f"{front}title": "deepep",
        f"{front}description": modulefiles.SUMMARY,
        f"{front}version": record.module.removeprefix("deepep/"),
        f"{front}created": moment(plan.created).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **({f"{front}base.name": base.name} if base.name else {}),
        f"{front}base.digest": base.digest,
        "deepep-bootstrap.stack": record.stack,
        "deepep-bootstrap.archs": " ".join(record.archs),
        **({"deepep-bootstrap.without": " ".join(plan.without)} if plan.without else {}),
    }


def provenance(plan: Plan, base: Base, image: Descriptor, lock: Lock | None, program: str) -> bytes:
    """Return where the image comes from, as an in-toto statement with a SLSA predicate. It has no times: the same
    image has the same statement."""
    records = [{"name": tree.name, "digest": {"sha256": _tree_sum(tree)}} for tree in plan.trees]
    sources = [
        {"uri": f"git+{shown(source.url)}@{source.rev}", "digest": {"gitCommit": source.rev}}
        for _, source in sorted(lock.sources.items() if lock else ())
    ]
    packages = [
        {"uri": f"pkg:deb/debian/{each.name}@{each.version}", "digest": {"sha256": hex_of(each.hash)}}
        for each in (plan.compiler.packages if plan.compiler else ())
    ]
    start = {"uri": f"oci:{base.name or base.digest}", "digest": {"sha256": base.digest.partition(":")[2]}}
    asked = {"stack": plan.record.stack, "archs": list(plan.record.archs), "without": list(plan.without)}
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "deepep", "digest": {"sha256": image.digest.partition(":")[2]}}],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": asked,
                "resolvedDependencies": [start, *records, *sources, *packages],
            },
            "runDetails": {"builder": {"id": program}},
        },
    }
    return oci.as_bytes(statement)


def _tree_sum(tree: Tree) -> str:
    """Return what stands for the contents of an entry, whatever its layer is compressed with."""
    words = [[thing.path, thing.kind, thing.mode, thing.sha256, thing.target] for thing in tree.things]
    return oci.sha256(oci.as_bytes(words)).partition(":")[2]


def make_image(folder: Path, plan: Plan, base: Base, contents: Contents) -> tuple[Descriptor, tuple[Layer, ...]]:
    """Write the layers of an image, its configuration and its manifest into an empty layout."""
    oci.start_layout(folder)
    for layer in base.layers:
        oci.copy_blob(base.folder, folder, layer.blob)
    layers = []
    for tree in plan.trees:
        writer = LayerWriter(folder)
        pack_entry(writer, tree, contents)
        layers.append(writer.finish(tree.name))
    if plan.compiler:
        writer = LayerWriter(folder)
        plan.compiler.pack(writer)
        layers.append(writer.finish(f"host compiler {plan.compiler.name}"))
    writer = LayerWriter(folder)
    pack_own(writer, plan.files)
    layers.append(writer.finish("programs and settings"))
    config = make_config(plan, base, layers)
    image = oci.put_image(folder, config, [*base.layers, *layers], notes_of(plan, base))
    return image, tuple(layers)


def containerfile(plan: Plan, base: Base, names: Sequence[str]) -> str:
    """Return the text of a Containerfile that copies the same layers, `names` tar files beside it in their order."""
    empty = replace(base, layers=())
    config = make_config(plan, empty, ())["config"]
    before = {each.split("=", 1)[0] for each in (base.config.get("config") or {}).get("Env") or ()}
    env = dict(each.split("=", 1) for each in config["Env"])
    own = {name: value for name, value in env.items() if name not in before or name in {"PATH", "LD_LIBRARY_PATH"}}
    lines = [
        "# Generated by deepep-bootstrap: the same layers as `invoke image` writes, for a build of your own.",
        *([f"FROM {base.name}@{base.digest}"] if base.name else _named_by_hand(base)),
        "",
        "# One layer for each store entry; tar files are unpacked.",
        *(f"ADD {name} /" for name in names),
        "",
        *(f"ENV {name}={_quoted(value)}" for name, value in sorted(own.items())),
        *(f"LABEL {name}={_quoted(value)}" for name, value in sorted(notes_of(plan, base).items())),
        "",
        "WORKDIR /tmp",
        f"ENTRYPOINT {json.dumps(entry_point(plan))}",
        'CMD ["wait"]',
        "",
    ]
    return "\n".join(lines)


def _named_by_hand(base: Base) -> list[str]:
    return [
        f"# The base was an image layout with the digest {base.digest}: --build-arg=BASE=…",
        "ARG BASE",
        "FROM ${BASE}",
    ]


def _quoted(value: str) -> str:
    return value if shlex.quote(value) == value else json.dumps(value, ensure_ascii=False)
