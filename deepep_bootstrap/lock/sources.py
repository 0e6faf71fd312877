"""What the lock pins by content: git trees with their substitutions, and single files from an address (archives)."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from pathlib import PurePosixPath

from deepep_bootstrap.core.toml import ANY, NAME, SOME, Form, Table

URL = Form(r"(https?|ssh|git|file)://[^\s/]*/\S+", "an address such as https://host/owner/name")
FILE_URL = Form(r"(https?|file)://[^\s/]*/\S*[^\s/]", "the address of a file such as https://host/path/name.tar.gz")
REF = Form(r"[A-Za-z0-9][^\s~^:?*\[\\\x00-\x1f\x7f]*", "a branch, a tag or a full ref")
REV = Form(r"[0-9a-f]{40}|[0-9a-f]{64}", "a full commit id (40 hexadecimal digits)")
HASH = Form(r"sha256-[A-Za-z0-9+/]{43}=", "an SRI hash: sha256- and 44 characters of base 64")
FILE_HASH = Form(
    r"sha256-[A-Za-z0-9+/]{43}=|sha512-[A-Za-z0-9+/]{86}==",
    "an SRI hash: sha256- and 44, or sha512- and 88 characters of base 64",
)
VERSION = Form(r"[A-Za-z0-9][A-Za-z0-9._+!-]*", "a version")
FILE = Form(r"[^\x00-\x1f\x7f]+", "the name of a file")
REASON = Form(r"[^\s\x00-\x1f\x7f][^\x00-\x1f\x7f]*", "one line of text: what is wrong upstream, and its issue there")
OPTION = Form(r"[A-Za-z_][A-Za-z0-9_]*=[^\x00-\x1f\x7f]*", "NAME=VALUE")


@dataclass(frozen=True)
class Substitute:
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


@dataclass(frozen=True)
class Source:
    """A git tree pinned by full commit `rev` and NAR `hash` (SRI); `ref` is what was asked for.

    `last_modified` is the commit's time (seconds since 1970), `version` the project's own version, `submodules` whether the hash is
    that of the tree with its submodules filled in, `options` build options handed to its recipe, `checks` the health checks of the
    built entry.
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
class Archive:
    """One file at an address, pinned by the SRI `hash` of its bytes (sha256 or sha512) and its `size` in bytes."""

    name: str
    url: str
    hash: str
    size: int
    version: str

    @property
    def file(self) -> str:
        """The file's name: the last part of the address."""
        return self.url.split("?", 1)[0].rsplit("/", 1)[-1]


def read_source(name: str, table: Table) -> Source:
    """Return the source in `table`; what is wrong with it is noted there."""
    source = Source(
        name=name,
        url=table.address("url", URL),
        ref=table.text("ref", REF),
        rev=table.text("rev", REV),
        hash=read_hash(table),
        last_modified=table.number("last_modified", 0),
        version=table.text("version", VERSION),
        submodules=table.take("submodules", bool, default=False),
        options=table.words("options", OPTION),
        checks=table.words("checks", NAME),
        substitutes=tuple(_substitute(entry) for entry in table.tables("substitute")),
    )
    table.close()
    return source


def read_archive(name: str, table: Table) -> Archive:
    """Return the archive in `table`; what is wrong with it is noted there."""
    archive = Archive(
        name=name,
        url=table.address("url", FILE_URL),
        hash=read_hash(table, FILE_HASH),
        size=table.number("size", 0),
        version=table.text("version", VERSION),
    )
    if archive.url and archive.file in {"", ".", ".."}:
        table.complain("url", "names no file", archive.url, FILE_URL.words)
    table.close()
    return archive


def read_hash(table: Table, form: Form = HASH) -> str:
    """Return the SRI hash of `table`; one whose last character holds bits that no hash has is a problem: one content, one spelling."""
    value = table.text("hash", form)
    kind, _, digits = value.partition("-")
    if value and base64.b64encode(binascii.a2b_base64(digits)).decode() != digits:
        table.complain("hash", "ends in bits that no hash has", f"{kind}-{digits}", form.words)
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
    if substitute.file and (file.is_absolute() or ".." in file.parts or str(file) != substitute.file or file.parts[:1] == (".git",)):
        table.complain("file", "is not a file inside the tree", substitute.file, "a path relative to the top of the tree")
    if substitute.text and substitute.text == substitute.replacement:
        table.complain("replacement", "is the same as text")
    table.close()
    return substitute
