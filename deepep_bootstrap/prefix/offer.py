"""The offer of a prefix: its stacks as records, the current one as hosts see it, and the checks before it
becomes files.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import fields, replace

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.recipes import digest
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.forms import GIB
from deepep_bootstrap.inventory.hostsfile import Inventory
from deepep_bootstrap.inventory.survey import Survey
from deepep_bootstrap.lock.model import deepep_release, is_v25
from deepep_bootstrap.prefix.access import candidates


def prefix_host(inventory: Inventory, facts: Collection[str]) -> str:
    """Return the host whose view of the prefix counts, of those that answered: the one that the hosts file names, else
    the first GPU host; "" where the named one did not answer."""
    return next((host.name for host in candidates(inventory) if host.name in facts), "")


def find_offer(survey: Survey) -> Offer | None:
    """Return what the prefix offers now, as its host says it; None where there is nothing yet. Trouble where another
    host sees another offer, and where the offer is of another prefix: programs are run and files read by what stands
    in it."""
    host = prefix_host(survey.inventory, survey.facts)
    if not host:
        raise Trouble(
            Problem(f"{survey.inventory.path}: prefix_host", "this host did not answer", try_="another prefix_host"),
            *survey.problems,
        )
    check_manifests(survey.prefix, survey.facts, host)
    offer = read_offer(survey.facts[host].prefix.manifest)
    for record in offer.stacks.values() if offer else ():
        if record.prefix != survey.prefix:
            where, remedy = f"{host} {survey.prefix}/current/manifest.json", "invoke bootstrap, which offers it anew"
            raise Trouble(Problem(where, "what is offered is of another prefix", record.prefix, survey.prefix, remedy))
    return offer if offer and offer.stacks else None


def check_manifests(prefix: str, facts: Mapping[str, Facts], host: str) -> None:
    """Raise Trouble where hosts see another manifest in the prefix than `host`, through which it is read. Hosts that
    see none are no matter here: nothing of them is used."""
    own = facts[host].prefix.manifest
    groups: dict[str, list[str]] = {}
    for name, seen in facts.items():
        if seen.prefix.manifest:
            groups.setdefault(seen.prefix.manifest, []).append(name)
    wanted = f"{_mark(own)} as on {fold(groups.pop(own, [host]))}"
    if groups:
        others = [name for names in groups.values() for name in names]
        found = ", ".join(f"{_mark(text)} on {fold(names)}" for text, names in groups.items())
        remedy = "the same command in a minute, where the filesystem is slow to tell; else compare that file on both"
        what = "the manifest of what is offered differs between hosts, so none is believed"
        raise Trouble(Problem(f"{fold(others)} {prefix}/current/manifest.json", what, found, wanted, remedy))


def _mark(manifest: str) -> str:
    """Return what tells manifests apart in a message."""
    return f"sha256 {hashlib.sha256(manifest.encode()).hexdigest()[:12]}" if manifest else "nothing"


def current_offer(survey: Survey) -> Offer:
    """Return what the prefix offers now; Trouble where there is nothing yet."""
    if (offer := find_offer(survey)) is not None:
        return offer
    raise Trouble(
        Problem(
            survey.prefix,
            "nothing is offered there",
            f"no generation, as {prefix_host(survey.inventory, survey.facts)} sees it",
            "one",
            "invoke bootstrap",
        )
    )


def stack_names(offer: Offer) -> tuple[str, ...]:
    """Return the names of all offered stacks, the default one first."""
    return tuple(sorted(offer.stacks, key=lambda name: (name != offer.default_stack, name)))


def offered_stacks(survey: Survey, stack: str) -> tuple[StackRecord, ...]:
    """Return the record of the stack that was asked for, or those of all that are offered, the default one first."""
    machine = gpu_machine(survey)
    records = of_machine(current_offer(survey), machine)
    if not records:
        what, remedy = "nothing is offered there for this kind of machine", "invoke bootstrap, for hosts of this kind"
        raise Trouble(Problem(survey.prefix, what, machine, try_=remedy))
    if stack and stack not in records:
        raise Trouble(Problem("--stack", "this stack is not offered", found=stack, wanted=" or ".join(records)))
    return (records[stack],) if stack else tuple(records.values())


def offered_stack(survey: Survey, stack: str) -> StackRecord:
    """Return the record of the stack that was asked for, else of the default one."""
    return offered_stacks(survey, stack)[0]


def command_for(flags: Flags) -> str:
    """Return the command that prepares the same hosts, as a person would type it."""
    given = [
        (name, str(getattr(flags, name))) for name in ("hosts", "limit", "lock", "stack", "prefix", "python", "nccl")
    ]
    given += [("mirror", value) for value in flags.mirror]
    return shlex.join(["invoke", "bootstrap", *(f"--{name}={value}" for name, value in given if value)])


X86 = "x86_64"
"""What `uname -m` says where a record, or what is known of a host, says nothing: that of all earlier versions."""


def machine_of(seen: Facts) -> str:
    """Return the kind of machine that a host is, as `uname -m` says it."""
    return seen.machine or X86


def gpu_machines(survey: Survey) -> dict[str, list[str]]:
    """Return the GPU hosts that answered, else all that did, by their kind of machine."""
    roles = {host.name: host.role for host in survey.inventory.hosts}
    names = [name for name in survey.facts if roles.get(name) == "gpu"] or list(survey.facts)
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(machine_of(survey.facts[name]), []).append(name)
    return groups


def gpu_machine(survey: Survey) -> str:
    """Return the kind of machine of the GPU hosts; Trouble where they are of several, since what is offered was built
    for one."""
    groups = gpu_machines(survey)
    if len(groups) > 1:
        raise mixed_machines(groups)
    return next(iter(groups), X86)


def mixed_machines(groups: Mapping[str, Collection[str]], said: Mapping[str, str] = {}) -> Trouble:
    """Return the Trouble of hosts that are of several kinds of machine, each with what else is `said` of it."""
    what = "hosts of several kinds of machine, each of which gets a build of its own in the same prefix"
    return Trouble(
        *(
            Problem(
                fold(names),
                what,
                machine + (f", {said[machine]}" if machine in said else ""),
                "one kind at a time",
                f"the same command with --limit={fold(names).partition(' ')[0]}",
            )
            for machine, names in sorted(groups.items())
        )
    )


class SiteSettings(Struct, frozen=True):
    """What generated files take from the hosts file; empty fields give no directive. `gres` is already resolved
    ("gpu:8" or ""), `contact` is whom users ask."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    gres: str = ""
    sbatch_args: tuple[str, ...] = ()
    contact: str = ""


class StackRecord(Struct, frozen=True):
    """Everything a generation's files say of one stack: the rendered offer is a pure function of these records.

    `module` is the modulefile's name (`deepep/1.2.1-8a07e7e-v1`); `deepep`, `nvshmem`, `gdrcopy`, `python` are entry
    names (`python` is "" where `external_python` holds an interpreter's path); `environment` the profile's variables in
    order; `by_host` those that differ, by the nodes' short names, `by_kind` those that one kind of test changes, `gib`
    the script that sets up NCCL on Google's network ("" for none), `nccl` the version of NCCL that DeepEP V2 works with
    ("" for V1, which has no use for it), `torch` and `cuda` the versions of torch and of the CUDA toolkit. V2 beside an
    external Python has no `nvshmem`: `torch_nccl` and `torch_nvshmem` are the folders (include, lib) of what that torch
    brings, `nvshmem_version` the version of the latter, `own_nccl` the entry that the module loads in place of the
    former ("" for none). `machine` is what `uname -m` says on its hosts ("" for x86_64), `hosts` are its GPU hosts
    where it says one (what is offered for other kinds of machine is no matter of theirs), `gpus` those of each of them
    (0: eight). `toolkit` is the entry of the compiler that came along for kernels which are compiled where they run
    ("" for none): CUDA_HOME is in it where `cuda_home` is "". What came later has a default, so that manifests of
    earlier versions can be read.
    """

    stack: str
    module: str
    prefix: str
    deepep: str
    nvshmem: str
    gdrcopy: str
    python: str
    external_python: str
    python_version: str
    cuda_home: str
    archs: tuple[str, ...]
    profile: str
    environment: Mapping[str, str]
    site: SiteSettings
    by_host: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    by_kind: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    gib: str = ""
    nccl: str = ""
    torch: str = ""
    cuda: str = ""
    torch_nccl: str = ""
    torch_nvshmem: str = ""
    nvshmem_version: str = ""
    own_nccl: str = ""
    machine: str = ""
    hosts: tuple[str, ...] = ()
    gpus: int = 0
    toolkit: str = ""

    @property
    def key(self) -> str:
        """Its name in an offer and in files of its own: the stack's, with the machine where that is not x86_64."""
        return f"{self.stack}-{self.machine}" if self.machine else self.stack

    @property
    def is_v25(self) -> bool:
        """Return whether its DeepEP is V2.5 or newer, by the name of its entry."""
        return is_v25(deepep_release("-".join(self.deepep.split("-")[2:])))


ENTRY_FIELDS = ("deepep", "nvshmem", "gdrcopy", "python", "own_nccl", "toolkit")
"""The fields of a record that name store entries."""


class Offer(Struct, frozen=True):
    """The whole offer of a prefix: the records of its stacks by their keys, and the key of the one that plain `module
    load deepep` means."""

    default_stack: str
    stacks: Mapping[str, StackRecord]
    templates: str
    """Digest of the template texts, so that a changed template is a changed offer."""


def of_machine(offer: Offer, machine: str) -> dict[str, StackRecord]:
    """Return what an offer has for one kind of machine, by stack; the default one first, then by name."""
    records = [offer.stacks[key] for key in stack_names(offer)]
    return {record.stack: record for record in records if (record.machine or X86) == machine}


def control_has_slurm(prefix: str, prefix_id: str) -> bool:
    """Return whether this machine is a client of Slurm and sees the very same prefix (by its id)."""
    marker = Path(prefix) / ".id"
    try:
        same = bool(prefix_id) and marker.read_text(encoding="utf-8").strip() == prefix_id
    except OSError:
        same = False
    return same and shutil.which("sbatch") is not None


def offer_document(offer: Offer) -> dict[str, Any]:
    """Return the offer as JSON values, for the key "offer" of a generation's manifest."""
    values: dict[str, Any] = msgspec.to_builtins(offer)
    return values


def named_entries(offer: Offer) -> tuple[str, ...]:
    """Return the store entries that an offer names, sorted; what these need is not among them."""
    return tuple(
        sorted({name for each in offer.stacks.values() for kind in ENTRY_FIELDS if (name := getattr(each, kind))})
    )


def offer_digest(offer: Offer) -> str:
    """Return the digest that tells whether two offers are equal."""
    return digest(offer_document(offer))


class _ManifestForm(Struct, frozen=True):
    """What is read of a generation's manifest; `status` shows the rest as it is."""

    offer: Offer


def read_offer(manifest: str) -> Offer | None:
    """Return the offer recorded in a generation's manifest.json text (its key "offer"); None for an empty text.

    A text that is no manifest of ours, one of another version of this program, or an offer that its files could not
    say safely, raises Trouble.
    """
    if not manifest.strip():
        return None
    try:
        found = msgspec.json.decode(manifest)
        offer = msgspec.convert(found, _ManifestForm).offer
        _check_keys(found["offer"])
    except (ValueError, RecursionError) as error:
        what = "this generation's manifest cannot be read"
        reason = f"{type(error).__name__}: {error}"
        remedy = "invoke rollback, or the version of this program that wrote it"
        raise Trouble(Problem("manifest.json", what, reason, "a manifest of schema 1", remedy)) from error
    if offer.stacks and (problems := tuple(check_offer(offer))):
        raise Trouble(*(replace(problem, where=f"manifest.json: {problem.where}") for problem in problems))
    return offer


def _check_keys(offer: Mapping[str, Any]) -> None:
    """Raise ValueError for a key that this version does not know: what a later one wrote there would be lost in the
    next generation. `offer` has the form of an Offer."""
    _refuse_unknown(Offer, offer, "$.offer")
    for stack, record in offer["stacks"].items():
        _refuse_unknown(StackRecord, record, f"$.offer.stacks.{stack}")
        _refuse_unknown(SiteSettings, record["site"], f"$.offer.stacks.{stack}.site")


def _refuse_unknown(kind: type[Offer | StackRecord | SiteSettings], found: Mapping[str, Any], place: str) -> None:
    if unknown := sorted(found.keys() - {each.name for each in fields(kind)}):
        raise ValueError(f"Unknown key {', '.join(unknown)} - at `{place}`")


# DeepEP's Buffer sets these itself before NVSHMEM starts: exporting them would look like a setting and be none.
OVERWRITTEN = (
    "NVSHMEM_DISABLE_P2P",
    "NVSHMEM_IB_ENABLE_IBGDA",
    "NVSHMEM_IBGDA_NUM_RC_PER_PE",
    "NVSHMEM_MAX_TEAMS",
    "NVSHMEM_CUMEM_GRANULARITY",
    "NVSHMEM_DISABLE_MNNVL",
)
# Sites set these on purpose, often because their machines need them.
CALLERS_OWN = ("NCCL_NVLS_ENABLE", "NVSHMEM_DISABLE_NVLS", "TORCH_SYMM_MEM_DISABLE_MULTICAST")
# What the module says of itself.
OURS = ("DEEPEP_PREFIX", "DEEPEP_STACK", "DEEPEP_TESTS", "DEEPEP_PYTHON")
# DeepEP V2's own places.
OF_V2 = ("EP_NCCL_ROOT_DIR", "EP_NVSHMEM_ROOT_DIR", "EP_JIT_CACHE_DIR", "EP_JIT_NVCC_COMPILER")
# Changed by adding to them, never by setting them.
LISTS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD")

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PATH = re.compile(r"/[A-Za-z0-9._+@%=,/-]*")
_MODULE = re.compile(r"deepep/[A-Za-z0-9][A-Za-z0-9._+-]*")
_STACK = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_WORD = re.compile(r"[A-Za-z0-9_.,:;=+@%/()*&|!\[\]^~-]+")
_VERSION = re.compile(r"[A-Za-z0-9._+!-]*")
_CAPABILITY = re.compile(r"[0-9]{1,3}(\.[0-9]{1,3})?")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def check_offer(offer: Offer) -> Iterator[Problem]:
    """Yield everything in an offer that its files could not say safely, or must not say."""
    if offer.default_stack not in offer.stacks:
        yield Problem(
            "offer", "the default stack is not in it", offer.default_stack, "one of " + ", ".join(sorted(offer.stacks))
        )
    for stack, record in sorted(offer.stacks.items()):
        where = f"stack {stack}"
        if stack != record.key:
            yield Problem(where, "the record is of another stack", record.key, stack)
        yield from _check_names(where, record)
        for environment in (record.environment, *record.by_host.values(), *record.by_kind.values()):
            yield from _check_environment(f"profile {record.profile} of {where}", environment)
        yield from _check_site(where, record)


def _check_names(where: str, record: StackRecord) -> Iterator[Problem]:
    if not _STACK.fullmatch(record.stack):
        yield Problem(where, "a stack's name is used in file names", repr(record.stack), "letters, digits and ._+-")
    if record.machine not in {"", "aarch64"}:
        yield Problem(where, "not a kind of machine that DeepEP is built for", repr(record.machine), "aarch64")
    if not _MODULE.fullmatch(record.module):
        yield Problem(where, "not a module name", repr(record.module), "deepep/ and letters, digits and ._+-")
    yield from _check_paths(where, record)
    hosts = [name for name in record.by_host if not _HOST.fullmatch(name)]
    yield from (Problem(where, "not the short name of a host", repr(name)) for name in hosts)
    if record.nccl and not record.python and not ((record.torch_nccl or record.own_nccl) and record.torch_nvshmem):
        what = "DeepEP V2 beside an external Python needs the NCCL and NVSHMEM of its torch"
        yield Problem(where, what, record.external_python, "the folders of both")
    numbers = (record.python_version, record.nccl, record.torch, record.cuda, record.nvshmem_version)
    versions = [text for text in numbers if not _VERSION.fullmatch(text)]
    versions += [text for text in record.archs if not _CAPABILITY.fullmatch(text)]
    yield from (Problem(where, "not a version", repr(text)) for text in versions)
    entries = filter(None, (getattr(record, kind) for kind in ENTRY_FIELDS))
    yield from (Problem(where, "not the name of a store entry", repr(n)) for n in entries if not _STACK.fullmatch(n))


def _check_paths(where: str, record: StackRecord) -> Iterator[Problem]:
    """Yield the paths that path lists and files cannot hold, and those that are missing: the prefix always, the
    Python where the store has none."""
    paths = {
        "prefix": record.prefix,
        "python": record.external_python,
        "CUDA_HOME": record.cuda_home,
        "torch's NCCL": record.torch_nccl,
        "torch's NVSHMEM": record.torch_nvshmem,
    }
    needed = {"prefix"} if record.python else {"prefix", "python"}
    for what, path in paths.items():
        if not _PATH.fullmatch(path) and (path or what in needed):
            wanted = "an absolute path without spaces, colons and quotes"
            yield Problem(where, f"the path of {what} cannot be written into path lists", repr(path), wanted)
    if record.gib not in {"", GIB}:
        yield Problem(where, "gIB's script is at another place than Google's", repr(record.gib), GIB)


def _check_environment(where: str, environment: Mapping[str, str]) -> Iterator[Problem]:
    ours = ("CUDA_HOME", "NVSHMEM_DIR", "NVSHMEM_HOME", *OF_V2, *LISTS)
    for name, value in environment.items():
        if not _VARIABLE.fullmatch(name):
            yield Problem(where, "not a variable name", repr(name))
        elif name in OVERWRITTEN:
            yield Problem(where, f"{name} has no effect: DeepEP sets it itself", value, "no such line")
        elif name in CALLERS_OWN:
            yield Problem(where, f"{name} is the caller's own", value, "no such line")
        elif name in ours or name.startswith((*OURS, "__DEEPEP_")):
            yield Problem(where, f"{name} is set by the module itself", value, "no such line")
        elif name == "NVSHMEM_REMOTE_TRANSPORT" and value == "ibgda":
            yield Problem(
                where, "NVSHMEM knows no remote transport of that name and would load none", value, "no such line"
            )
        if not (value.isascii() and value.isprintable()) or "~" in value:
            # Environment Modules leaves a tilde to the shell, and reads files in the encoding of the moment.
            yield Problem(
                where, f"the value of {name} would not arrive to the letter", repr(value), "printable ASCII without ~"
            )


def _check_site(where: str, record: StackRecord) -> Iterator[Problem]:
    site = record.site
    fields = {
        "partition": site.partition,
        "account": site.account,
        "qos": site.qos,
        "gres": site.gres,
        "contact": site.contact,
    }
    for name, value in (*fields.items(), *(("sbatch_args", word) for word in site.sbatch_args)):
        if value and not _WORD.fullmatch(value):
            what = f"{name} cannot stand in a generated file"
            yield Problem(where, what, repr(value), "one word without quotes")
