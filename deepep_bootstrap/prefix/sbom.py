"""The bill of materials of a generation (CycloneDX), written from the manifests of store entries and the
locks of generations.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import uuid
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from cyclonedx.model import (
    AttachedText,
    ExternalReference,
    ExternalReferenceType,
    HashAlgorithm,
    HashType,
    Property,
    XsUri,
)
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType, Diff, Patch, PatchClassification, Pedigree
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from msgspec import Struct, field
from packageurl import PackageURL

from deepep_bootstrap.core.text import moment
from deepep_bootstrap.fetch.locations import shown
from deepep_bootstrap.lock.model import Lock, Source, Wheel
from deepep_bootstrap.prefix.contents import Holdings, StoreEntry
from deepep_bootstrap.prefix.offer import Offer, named_entries, offer_digest

PROGRAM = "deepep-bootstrap"
VERSION = SchemaVersion.V1_6
"""The newest that widespread readers of such bills know."""

PLAIN_INPUTS = ("archs", "checks", "interpreter", "options", "python", "target")
"""Inputs of an entry that are given as they are; the others are components of their own or have a place in the
format."""

TYPES = {"python": ComponentType.PLATFORM, "deepep": ComponentType.FRAMEWORK}


class Pins(Struct, frozen=True):
    """What locks say of contents: sources and wheels by their hash (SRI)."""

    sources: Mapping[str, Source] = field(default_factory=dict)
    wheels: Mapping[str, Wheel] = field(default_factory=dict)

    @classmethod
    def of(cls, locks: Iterable[Lock]) -> Pins:
        """Return what these locks pin; where two speak of the same content, the later one counts."""
        sources: dict[str, Source] = {}
        wheels: dict[str, Wheel] = {}
        for lock in locks:
            sources |= {source.hash: source for source in lock.sources.values()}
            closures = (closure for stack in lock.stacks.values() for closure in stack.wheels.values())
            wheels |= {wheel.hash: wheel for closure in closures for wheel in closure}
        return cls(sources, wheels)


def make_bill(offer: Offer, holdings: Holdings, pins: Pins, records: Mapping[str, str] | None = None) -> bytes:
    """Return the bill of what `offer` names and everything that needs, the same bytes for the same offer and entries.
    `records` are the SHA-256 of the records of the entries' files by name.

    Nothing else in it depends on when or where something was built: its time is that of the newest source, its serial
    number follows from its content.
    """
    parts = _Parts(holdings, pins, records or {})
    named = named_entries(offer)
    for name in sorted(holdings.closure(named)):
        parts.add_entry(name)
    top = Component(
        name="deepep",
        version=offer_digest(offer),
        type=ComponentType.PLATFORM,
        bom_ref="offer",
        properties=[_property(f"module:{name}", record.module) for name, record in offer.stacks.items()],
    )
    parts.depend(top, named)
    stamp = moment(parts.newest)
    draft = parts.text(top, stamp, uuid.UUID(int=0))
    # Version 8 is for numbers that follow from something; version 5 says the same to readers that do not know it yet.
    return parts.text(top, stamp, uuid.UUID(bytes=hashlib.sha256(draft).digest()[:16], version=5))


class _Parts:
    """The components met so far, by reference, and which one depends on which."""

    def __init__(self, holdings: Holdings, pins: Pins, records: Mapping[str, str]) -> None:
        self._holdings, self._pins, self._records = holdings, pins, records
        self._components: dict[str, Component] = {}
        self._needs: dict[str, set[str]] = {}
        self.newest = 0
        """The time of the newest source, in seconds since 1970."""

    def text(self, top: Component, stamp: datetime, serial: uuid.UUID) -> bytes:
        """Return the document."""
        tool = Component(name=PROGRAM, type=ComponentType.APPLICATION, bom_ref=PROGRAM)
        bom = Bom(
            components=self._components.values(),
            serial_number=serial,
            metadata=BomMetaData(component=top, timestamp=stamp, tools=ToolRepository(components=[tool])),
        )
        for component in (top, *self._components.values()):
            needs = self._needs.get(str(component.bom_ref.value), set())
            bom.register_dependency(component, [self._components[ref] for ref in sorted(needs)])
        return make_outputter(bom, OutputFormat.JSON, VERSION).output_as_string(indent=2).encode() + b"\n"

    def depend(self, component: Component, refs: Iterable[str]) -> None:
        """Note what a component was made of or needs."""
        self._needs.setdefault(str(component.bom_ref.value), set()).update(refs)

    def _put(self, ref: str, **values: Any) -> str:
        self._components.setdefault(ref, Component(bom_ref=ref, **values))
        return ref

    def add_entry(self, name: str) -> None:
        """Add a store entry and what it was made of."""
        entry = self._holdings.entries.get(name, StoreEntry(name, 0))
        inputs = _mapping(entry.manifest.get("inputs"))
        kind, _, version = name.partition("-")[2].partition("-")
        component = Component(
            name=kind,
            version=version,
            type=TYPES.get(kind, ComponentType.LIBRARY),
            bom_ref=name,
            pedigree=Pedigree(patches=patches) if (patches := list(_patches(inputs))) else None,
            properties=[
                *_plain(inputs),
                *([_property("record-sha256", self._records[name])] if name in self._records else []),
                *(_property(f"recipe:{path}", text) for path, text in _mapping(inputs.get("recipes")).items()),
            ],
        )
        self._components[name] = component
        self.depend(component, [*entry.needs, *self._materials(inputs)])

    def _materials(self, inputs: Mapping[str, Any]) -> Iterator[str]:
        """Add what an entry was made of and with; yield the references."""
        if digest := str(inputs.get("source", "")):
            yield self._source(digest, inputs)
        wheels = [*_list(inputs.get("wheels")), *([inputs["wheel"]] if "wheel" in inputs else [])]
        for wheel in wheels:
            yield self._wheel(*map(str, wheel))
        yield from self._tools(inputs)

    def _source(self, digest: str, inputs: Mapping[str, Any]) -> str:
        source = self._pins.sources.get(digest)
        if source is None:
            version = str(inputs.get("version", ""))
            values = [_property("nar-hash", digest)]
            return self._put(
                f"source:{digest}",
                name=f"source of {inputs.get('kind', 'an entry')}",
                version=version,
                properties=values,
            )
        self.newest = max(self.newest, source.last_modified)
        url = shown(source.url)
        owner, _, name = urlsplit(url).path.strip("/").removesuffix(".git").rpartition("/")
        attributes = {
            "nar-hash": digest,
            "rev": source.rev,
            "ref": source.ref,
            "submodules": "true" if source.submodules else "false",
        }
        return self._put(
            f"source:{digest}",
            name=name,
            group=owner or None,
            version=source.version,
            purl=source_purl(source),
            external_references=[ExternalReference(type=ExternalReferenceType.VCS, url=XsUri(url))],
            properties=[_property(key, value) for key, value in attributes.items()],
        )

    def _wheel(self, name: str, version: str, digest: str) -> str:
        wheel = self._pins.wheels.get(digest)
        qualifiers = {"file_name": wheel.file} if wheel else None
        attributes = {"file": wheel.file, "bytes": str(wheel.size), "index": wheel.index} if wheel else {}
        return self._put(
            f"wheel:{digest}",
            name=name,
            version=version,
            purl=PackageURL("pypi", None, name, version, qualifiers),
            hashes=list(_hashes(digest)),
            properties=[_property(key, value) for key, value in attributes.items()],
        )

    def _tools(self, inputs: Mapping[str, Any]) -> Iterator[str]:
        """Add the toolchain of an entry: CUDA, compilers, the Python of somebody else, the operating system."""
        if cuda := str(inputs.get("cuda", "")):
            yield self._put(
                f"tool:cuda-{cuda}", name="CUDA Toolkit", version=cuda, type=ComponentType.APPLICATION, group="NVIDIA"
            )
        for name, version in _mapping(inputs.get("compiler")).items():
            yield self._put(
                f"tool:{name}-{version}", name=str(name), version=str(version), type=ComponentType.APPLICATION
            )
        if python := _mapping(inputs.get("python")):
            values = [_property(str(key), str(value)) for key, value in python.items() if value]
            version = str(python.get("version", ""))
            yield self._put(
                f"tool:python-{version}", name="python", version=version, type=ComponentType.PLATFORM, properties=values
            )
        if system := [str(each) for each in _list(inputs.get("os"))]:
            machine = [_property("machine", system[-1])]
            ref = f"os:{'-'.join(system)}"
            yield self._put(
                ref, name=system[0], version=system[1], type=ComponentType.OPERATING_SYSTEM, properties=machine
            )


def source_purl(source: Source) -> PackageURL:
    """Return the package URL of a pinned tree: GitHub's own form, elsewhere the generic one with the address of the
    repository."""
    parts = urlsplit(shown(source.url))
    owner, _, name = parts.path.strip("/").removesuffix(".git").rpartition("/")
    if parts.hostname == "github.com" and owner:
        return PackageURL("github", owner, name, source.rev)
    return PackageURL("generic", None, name, source.version, {"vcs_url": f"git+{shown(source.url)}@{source.rev}"})


def _patches(inputs: Mapping[str, Any]) -> Iterator[Patch]:
    """Yield what is replaced in a source, each as a difference that a person can read: its lines have no numbers."""
    for each in map(_mapping, _list(inputs.get("substitutes"))):
        sides = (("-", each.get("text", "")), ("+", each.get("replacement", "")))
        lines = [f"{sign}{line}" for sign, text in sides for line in str(text).splitlines()]
        file = each.get("file", "")
        content = "\n".join((f"--- a/{file}", f"+++ b/{file}", f"@@ {each.get('count', 1)} times @@", *lines, ""))
        yield Patch(
            type=PatchClassification.UNOFFICIAL,
            diff=Diff(text=AttachedText(content=content, content_type="text/x-diff")),
        )


def _plain(inputs: Mapping[str, Any]) -> Iterator[Property]:
    for key in PLAIN_INPUTS:
        value = inputs.get(key)
        if isinstance(value, (str, list, tuple)) and value:
            words = [value] if isinstance(value, str) else value
            yield from (_property(key, str(word)) for word in words)


def _property(name: str, value: str) -> Property:
    return Property(name=f"{PROGRAM}:{name}", value=value)


def _hashes(digest: str) -> Iterator[HashType]:
    """Yield an SRI hash as CycloneDX has it: in hexadecimal digits. A text that is none yields nothing."""
    kind, _, digits = digest.partition("-")
    algorithm = {"sha256": HashAlgorithm.SHA_256, "sha512": HashAlgorithm.SHA_512}.get(kind)
    try:
        content = base64.b64decode(digits, validate=True).hex()
    except binascii.Error:
        return
    if algorithm is not None and content:
        yield HashType(alg=algorithm, content=content)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []
