"""Licences of what store entries are made of: of sources as the lock says, of wheels as their METADATA does; as SPDX
expressions, with LicenseRef-… for what SPDX has no name for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct
from packaging.utils import canonicalize_name, canonicalize_version

from deepep_bootstrap.core.text import shortened
from deepep_bootstrap.lock.model import Lock, Source, spdx
from deepep_bootstrap.prefix.contents import Holdings, StoreEntry

ALIASES: Mapping[str, str] = {
    "apache 2.0": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "bsd 2-clause": "BSD-2-Clause",
    "bsd 3-clause": "BSD-3-Clause",
    "3-clause bsd license": "BSD-3-Clause",
    "isc license": "ISC",
    "mit license": "MIT",
    "the mit license": "MIT",
    "mpl 2.0": "MPL-2.0",
}
"""What authors write in the field `License` for one licence and no other, in small letters."""

CLASSIFIERS: Mapping[str, str] = {
    "Boost Software License 1.0 (BSL-1.0)": "BSL-1.0",
    "GNU General Public License v3 (GPLv3)": "GPL-3.0-only",
    "GNU General Public License v3 or later (GPLv3+)": "GPL-3.0-or-later",
    "GNU Lesser General Public License v3 (LGPLv3)": "LGPL-3.0-only",
    "GNU Lesser General Public License v3 or later (LGPLv3+)": "LGPL-3.0-or-later",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "MIT No Attribution License (MIT-0)": "MIT-0",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
    "zlib/libpng License": "Zlib",
}
"""Classifiers that mean one licence. Others, "BSD License" and "Apache Software License" among them, leave open which
one of several (PEP 639)."""

REFERENCE_LENGTH = 64
"""Characters of a LicenseRef-… made of what a wheel says; what is said is kept beside it, whole."""


class License(Struct, frozen=True):
    """A licence as an SPDX `expression`, "" where it is not known. `name` is what the author wrote, where that has no
    name of SPDX."""

    expression: str = ""
    name: str = ""

    def __str__(self) -> str:
        return self.expression or "unknown"


class Part(Struct, frozen=True):
    """A source or a wheel that entries are made of, and its licence."""

    name: str
    version: str
    license: License

    def as_json(self) -> dict[str, str]:
        """Return its values for a JSON document."""
        return {"name": self.name, "version": self.version, "license": self.license.expression}


class WheelLicenses:
    """The licences of the wheels that these entries have unpacked in them."""

    def __init__(self, holdings: Holdings, names: Iterable[str]) -> None:
        self._known: dict[tuple[str, str], License] = {}
        for entry in (holdings.entries[name] for name in sorted(names) if name in holdings.entries):
            for header in filter(None, entry.metadata.split("\n\n")):
                fields = read_fields(header)
                name, version = _first(fields, "name"), _first(fields, "version")
                if name:
                    self._known[_key(name, version)] = read_license(fields)

    def of(self, name: str, version: str) -> License:
        """Return the licence of a distribution; one without an expression where nobody says it."""
        return self._known.get(_key(name, version), License())


def _key(name: str, version: str) -> tuple[str, str]:
    return canonicalize_name(name), canonicalize_version(version)


def read_fields(header: str) -> dict[str, list[str]]:
    """Return the values of each field of a header of METADATA, by its name in small letters; those of several lines
    keep their ends of lines."""
    fields: dict[str, list[str]] = {}
    values: list[str] = []
    for line in header.splitlines():
        key, colon, value = line.partition(":")
        if line[:1].isspace() and values:
            values[-1] += f"\n{line.strip()}"
        elif colon:
            values = fields.setdefault(key.lower(), [])
            values.append(value.strip())
    return fields


def read_license(fields: Mapping[str, Sequence[str]]) -> License:
    """Return the licence that these fields of METADATA give: `License-Expression`, else `License` where it names one,
    else the classifiers where each names one; else what they say as a LicenseRef-…. Of several classifiers nobody
    says whether all hold or one is enough, so all do."""
    if written := _first(fields, "license-expression"):
        return License(spdx(written)) if spdx(written) else _reference(written)
    text = _first(fields, "license")
    if known := spdx(text) or ALIASES.get(text.lower(), ""):
        return License(known)
    title, *more = ("" if text.lower() in {"unknown", "none"} else text).splitlines() or [""]
    said = sorted(set(_classified(fields)))
    if said and (more or not title or set(said) <= set(CLASSIFIERS)):
        return _of_classifiers(said)
    # Of a whole text the first line is its title, or its copyright.
    return _reference(title)


def _first(fields: Mapping[str, Sequence[str]], name: str) -> str:
    """Return the first value of a field; "" where there is none."""
    return next(iter(fields.get(name, ())), "").strip()


def _of_classifiers(said: Sequence[str]) -> License:
    expressions = sorted({CLASSIFIERS.get(each) or _reference(each).expression for each in said})
    name = "" if set(said) <= set(CLASSIFIERS) else "; ".join(said)
    return License(" AND ".join(filter(None, expressions)), name)


def _classified(fields: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the last part of each classifier of a licence; `License :: OSI Approved` alone says nothing."""
    for each in fields.get("classifier", ()):
        parts = each.split(" :: ")
        if parts[0] == "License" and len(parts) > 1 and parts[-1] != "OSI Approved":
            yield parts[-1]


def _reference(text: str) -> License:
    """Return a licence that SPDX has no name for: `NVIDIA Proprietary Software` is
    LicenseRef-NVIDIA-Proprietary-Software."""
    words = re.sub(r"[^A-Za-z0-9.]+", "-", text)[:REFERENCE_LENGTH].strip("-.")
    return License(f"LicenseRef-{words}", text) if words else License()


def parts_of(holdings: Holdings, names: Iterable[str], locks: Iterable[Lock]) -> tuple[Part, ...]:
    """Return the sources and wheels that these entries are made of, sorted by name. `locks` say the licences of
    sources, what `holdings` has of METADATA those of wheels; an unknown one is unknown."""
    sources = {source.hash: source for lock in locks for source in lock.sources.values()}
    wanted = sorted(names)
    wheels = WheelLicenses(holdings, wanted)
    found = {
        (part.name, part.version): part
        for name in wanted
        for part in _parts(holdings.entries.get(name, StoreEntry(name, 0)), sources, wheels)
    }
    return tuple(found[key] for key in sorted(found))


def _parts(entry: StoreEntry, sources: Mapping[str, Source], wheels: WheelLicenses) -> Iterator[Part]:
    inputs = entry.manifest.get("inputs")
    if not isinstance(inputs, Mapping):
        # Nobody says what it is made of, and it is in the archive all the same.
        yield Part(shortened(entry.name), "", License())
        return
    if digest := str(inputs.get("source", "")):
        source = sources.get(digest)
        name = source.name if source else str(inputs.get("kind", shortened(entry.name)))
        version = source.version if source else str(inputs.get("version", ""))
        yield Part(name, version, License(source.license) if source else License())
    for each in (*(inputs.get("wheels") or ()), *filter(None, (inputs.get("wheel"),))):
        name, version = map(str, each[:2])
        yield Part(name, version, wheels.of(name, version))


def license_lines(parts: Iterable[Part]) -> list[str]:
    """Return a line for each licence with what is under it, unknown ones last."""
    by: dict[str, list[str]] = {}
    for part in parts:
        by.setdefault(str(part.license), []).append(f"{part.name} {part.version}".strip())
    return [f"{name}: {', '.join(by[name])}" for name in sorted(by, key=lambda name: (name == str(License()), name))]


def parts_json(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Return these parts for a JSON document."""
    return [part.as_json() for part in parts]
