"""The bill of materials of a generation (CycloneDX), written from the manifests of store entries and the
locks of generations.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.spdx import is_supported_id
from msgspec import Struct, field
from packageurl import PackageURL

from deepep_bootstrap.core.text import moment
from deepep_bootstrap.fetch.locations import shown
from deepep_bootstrap.lock.model import Lock, PackagePin, Source, Wheel
from deepep_bootstrap.prefix.bill.licenses import License, WheelLicenses
from deepep_bootstrap.prefix.contents import Holdings, StoreEntry
from deepep_bootstrap.prefix.offer import Offer, named_entries, offer_digest

PROGRAM = "deepep-bootstrap"
VERSION = SchemaVersion.V1_6
"""The newest that widespread readers of such bills know."""

PLAIN_INPUTS = ("archs", "checks", "interpreter", "options", "python", "target")
"""Inputs of an entry that are given as they are; the others are components of their own or have a place in the
format."""

TYPES = {"python": ComponentType.PLATFORM, "deepep": ComponentType.FRAMEWORK}


TOOL_LICENSES = {
    "CUDA Toolkit": License("LicenseRef-NVIDIA-CUDA-EULA", "https://docs.nvidia.com/cuda/eula"),
    "gcc": License("GPL-3.0-or-later WITH GCC-exception-3.1"),
    "g++": License("GPL-3.0-or-later WITH GCC-exception-3.1"),
}
"""Of tools, which a store entry was made with and does not hold."""


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
            lists = [each.wheels for each in lock.stacks.values()] + [each.wheels for each in lock.toolkits.values()]
            closures = (closure for each in lists for closure in each.values())
            wheels |= {wheel.hash: wheel for closure in closures for wheel in closure}
        return cls(sources, wheels)


def make_bill(
    offer: Offer,
    holdings: Holdings,
    pins: Pins,
    records: Mapping[str, str] | None = None,
    *,
    packages: Sequence[PackagePin] = (),
) -> bytes:
    """Return the bill of what `offer` names and everything that needs, the same bytes for the same offer and entries.
    `records` are the SHA-256 of the records of the entries' files by name, `packages` what an image has besides.

    Nothing else in it depends on when or where something was built: its time is that of the newest source, its serial
    number follows from its content.
    """
    named = named_entries(offer)
    names = sorted(holdings.closure(named))
    parts = _Parts(holdings, pins, records or {}, WheelLicenses(holdings, names))
    for name in names:
        parts.add_entry(name)
    top = Component(
        name="deepep",
        version=offer_digest(offer),
        type=ComponentType.PLATFORM,
        bom_ref="offer",
        properties=[_property(f"module:{name}", record.module) for name, record in offer.stacks.items()],
    )
    parts.depend(top, [*named, *map(parts.add_package, packages)])
    stamp = moment(parts.newest)
    draft = parts.text(top, stamp, uuid.UUID(int=0))
    # Version 8 is for numbers that follow from something; version 5 says the same to readers that do not know it yet.
    return parts.text(top, stamp, uuid.UUID(bytes=hashlib.sha256(draft).digest()[:16], version=5))


class _Parts:
    """The components met so far, by reference, and which one depends on which."""

    def __init__(self, holdings: Holdings, pins: Pins, records: Mapping[str, str], wheels: WheelLicenses) -> None:
        self._holdings, self._pins, self._records, self._wheels = holdings, pins, records, wheels
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

    def _put(self, ref: str, license_: License, *, properties: Iterable[Property] = (), **values: Any) -> str:
        """Add a component that is not an entry."""
        told = [*properties, *_said(license_)]
        component = Component(bom_ref=ref, licenses=_licenses(license_), properties=told, **values)
        self._components.setdefault(ref, component)
        return ref

    def add_entry(self, name: str) -> None:
        """Add a store entry and what it was made of."""
        entry = self._holdings.entries.get(name, StoreEntry(name, 0))
        inputs = _mapping(entry.manifest.get("inputs"))
        kind, _, version = name.partition("-")[2].partition("-")
        own = self._own(inputs)
        component = Component(
            licenses=_licenses(own) if own else (),
            name=kind,
            version=version,
            type=TYPES.get(kind, ComponentType.LIBRARY),
            bom_ref=name,
            pedigree=Pedigree(patches=patches) if (patches := list(_patches(inputs))) else None,
            properties=[
                *_plain(inputs),
                *(_said(own) if own else ()),
                *([_property("record-sha256", self._records[name])] if name in self._records else []),
                *(_property(f"recipe:{path}", text) for path, text in _mapping(inputs.get("recipes")).items()),
            ],
        )
        self._components[name] = component
        self.depend(component, [*entry.needs, *self._materials(inputs)])

    def add_package(self, package: PackagePin) -> str:
        """Add a Debian package; return the reference."""
        return self._put(
            f"package:{package.hash}",
            License(package.license),
            name=package.name,
            version=package.version,
            purl=PackageURL("deb", "debian", package.name, package.version),
            hashes=list(_hashes(package.hash)),
            properties=[_property("file", package.file), _property("bytes", str(package.size))],
        )

    def _own(self, inputs: Mapping[str, Any]) -> License | None:
        """Return the licence of an entry, that of its source or wheel; None for one of many wheels."""
        if digest := inputs.get("source"):
            source = self._pins.sources.get(str(digest))
            return License(source.license) if source else License()
        if wheel := inputs.get("wheel"):
            return self._wheels.of(str(wheel[0]), str(wheel[1]))
        return None

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
                License(),
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
            License(source.license),
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
            self._wheels.of(name, version),
            name=name,
            version=version,
            purl=PackageURL("pypi", None, name, version, qualifiers),
            hashes=list(_hashes(digest)),
            properties=[_property(key, value) for key, value in attributes.items()],
        )

    def _tools(self, inputs: Mapping[str, Any]) -> Iterator[str]:
        """Add the toolchain of an entry: CUDA, compilers, the Python of somebody else, the operating system."""
        if cuda := str(inputs.get("cuda", "")):
            name = "CUDA Toolkit"
            kind, own = ComponentType.APPLICATION, TOOL_LICENSES[name]
            yield self._put(f"tool:cuda-{cuda}", own, name=name, version=cuda, type=kind, group="NVIDIA")
        for name, version in _mapping(inputs.get("compiler")).items():
            kind, own = ComponentType.APPLICATION, TOOL_LICENSES.get(str(name), License())
            yield self._put(f"tool:{name}-{version}", own, name=str(name), version=str(version), type=kind)
        if python := _mapping(inputs.get("python")):
            values = [_property(str(key), str(value)) for key, value in python.items() if value]
            version = str(python.get("version", ""))
            kind = ComponentType.PLATFORM
            yield self._put(
                f"tool:python-{version}", License(), name="python", version=version, type=kind, properties=values
            )
        if system := [str(each) for each in _list(inputs.get("os"))]:
            machine = [_property("machine", system[-1])]
            ref = f"os:{'-'.join(system)}"
            kind = ComponentType.OPERATING_SYSTEM
            yield self._put(ref, License(), name=system[0], version=system[1], type=kind, properties=machine)


def _licenses(license_: License) -> list[DisjunctiveLicense | LicenseExpression]:
    """Return a licence as CycloneDX has it: one of SPDX's by its identifier, all else as an expression."""
    if not license_.expression:
        return []
    if is_supported_id(license_.expression):
        return [DisjunctiveLicense(id=license_.expression)]
    return [LicenseExpression(license_.expression)]


def _said(license_: License) -> Iterator[Property]:
    """Yield what the author wrote where SPDX has no name for it, and that nobody knows a licence."""
    if said := license_.name or ("" if license_.expression else str(license_)):
        yield _property("license", said)


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
