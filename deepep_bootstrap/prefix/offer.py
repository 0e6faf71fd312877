"""What a prefix offers: the record of each stack and the whole offer, read from and written to a generation's manifest."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.json import made
from deepep_bootstrap.core.recipes import digest
from deepep_bootstrap.inventory.survey import Flags, Survey


def find_offer(survey: Survey) -> Offer | None:
    """Return what the prefix offers now, as any host that sees it says; None where there is nothing yet."""
    offers = (read_offer(facts.prefix.manifest) for facts in survey.facts.values())
    return next((offer for offer in offers if offer is not None and offer.stacks), None)


def current_offer(survey: Survey) -> Offer:
    """Return what the prefix offers now; Trouble where there is nothing yet."""
    if (offer := find_offer(survey)) is not None:
        return offer
    raise Trouble(
        Problem(
            survey.prefix,
            "nothing is offered there",
            "no generation on any host that answered",
            "one",
            "invoke bootstrap",
        )
    )


def stack_names(offer: Offer) -> tuple[str, ...]:
    """Return the names of all offered stacks, the default one first."""
    return tuple(sorted(offer.stacks, key=lambda name: (name != offer.default_stack, name)))


def offered_stacks(survey: Survey, stack: str) -> tuple[StackRecord, ...]:
    """Return the record of the stack that was asked for, or those of all that are offered, the default one first."""
    offer = current_offer(survey)
    if stack and stack not in offer.stacks:
        raise Trouble(Problem("--stack", "this stack is not offered", found=stack, wanted=" or ".join(offer.stacks)))
    return tuple(offer.stacks[name] for name in ([stack] if stack else stack_names(offer)))


def offered_stack(survey: Survey, stack: str) -> StackRecord:
    """Return the record of the stack that was asked for, else of the default one."""
    return offered_stacks(survey, stack)[0]


def command_for(flags: Flags) -> str:
    """Return the command that prepares the same hosts, as a person would type it."""
    given = [(name, str(getattr(flags, name))) for name in ("hosts", "limit", "lock", "stack", "prefix", "python")]
    given += [("mirror", value) for value in flags.mirror]
    return shlex.join(["invoke", "bootstrap", *(f"--{name}={value}" for name, value in given if value)])


@dataclass(frozen=True)
class Site:
    """What sbatch files take from the hosts file; empty fields give no directive. `gres` is already resolved ("gpu:8" or "")."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    gres: str = ""
    sbatch_args: tuple[str, ...] = ()


@dataclass(frozen=True)
class StackRecord:
    """Everything a generation's files say of one stack: the rendered offer is a pure function of these records.

    `module` is the modulefile's name (`deepep/1.2.1-8a07e7e-v1`); `deepep`, `nvshmem`, `gdrcopy`, `python` are entry names
    (`python` is "" where `external_python` holds an interpreter's path); `environment` the profile's variables in order; `by_host`
    those that differ, by the nodes' short names, `by_kind` those that one kind of test changes, `gib` the script that sets up NCCL on
    Google's network ("" for none), `nccl` the version of NCCL that DeepEP V2 works with ("" for V1, which has no use for it). What came
    later has a default, so that manifests of earlier versions can be read.
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
    site: Site
    by_host: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    by_kind: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    gib: str = ""
    nccl: str = ""


@dataclass(frozen=True)
class Offer:
    """The whole offer of a prefix: the stacks by name, and which one plain `module load deepep` means."""

    default_stack: str
    stacks: Mapping[str, StackRecord]
    templates: str
    """Digest of the template texts, so that a changed template is a changed offer."""


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
    return asdict(offer)


def offer_digest(offer: Offer) -> str:
    """Return the digest that tells whether two offers are equal."""
    return digest(offer_document(offer))


def read_offer(manifest: str) -> Offer | None:
    """Return the offer recorded in a generation's manifest.json text (its key "offer"); None for an empty text.

    A text that is no manifest of ours, or one of another version of this program, raises Trouble.
    """
    if not manifest.strip():
        return None
    try:
        found = json.loads(manifest)["offer"]
        stacks = {name: _read_record(record) for name, record in found["stacks"].items()}
        return made(Offer, {**found, "stacks": stacks})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = "this generation's manifest cannot be read"
        reason = f"{type(error).__name__}: {error}"
        remedy = "invoke rollback, or the version of this program that wrote it"
        raise Trouble(Problem("manifest.json", what, reason, "a manifest of schema 1", remedy)) from error


def _read_record(found: Mapping[str, Any]) -> StackRecord:
    return made(StackRecord, {**found, "site": made(Site, found["site"])})
