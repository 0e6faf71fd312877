"""Image layouts of the Open Container Initiative: read, and written the same for the same contents.

oci-layout, index.json      what is in the folder
blobs/sha256/<digits>       manifests, configurations and layers, each by the hash of its bytes
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import secrets
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.filetree import CHUNK

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
PLAIN_LAYER = "application/vnd.oci.image.layer.v1.tar"
EMPTY = "application/vnd.oci.empty.v1+json"
REF_NAME = "org.opencontainers.image.ref.name"

DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Names of machines, as `uname -m` and as images have them."""

LEVEL = 6
GZIP = 31  # window bits of zlib for gzip's form, whose header has no time then
MOST_LINKS = 40
LARGEST_DOCUMENT = 16 << 20
GLIBC = re.compile(rb"GNU C Library [^\n]{0,200}?release version ([0-9]+\.[0-9]+)")


class Descriptor(Struct, frozen=True):
    """A blob as manifests name it."""

    media_type: str
    digest: str
    size: int
    annotations: Mapping[str, str] = field(default_factory=dict)

    def as_json(self, **more: object) -> dict[str, Any]:
        """Return it as JSON values."""
        notes = {"annotations": dict(self.annotations)} if self.annotations else {}
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size, **more, **notes}


class Layer(Struct, frozen=True):
    """A layer: the blob, the digest of its tar stream (`diff_id`), and what made it, for the image's history."""

    blob: Descriptor
    diff_id: str
    created_by: str = ""


class Base(Struct, frozen=True):
    """The image that another one is built on: the digest of its manifest, its configuration, and its layers. `folder`
    is its layout, `name` what a registry calls it ("" for a layout that a person named: where it lies is no matter)."""

    folder: Path
    name: str
    digest: str
    config: Mapping[str, Any]
    layers: tuple[Layer, ...]

    @property
    def where(self) -> str:
        """What it is called in messages."""
        return self.name or str(self.folder)


def sha256(data: bytes) -> str:
    """Return the digest of bytes, as images have it."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def as_bytes(document: object) -> bytes:
    """Return JSON values as bytes, the same for the same values."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


class LayerWriter:
    """Takes the tar stream of a layer, compresses it and puts it among the blobs. Not written further than `finish`:
    what was begun and not finished has no name there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._aside = folder / f".layer-{secrets.token_hex(4)}"
        self._file = self._aside.open("xb")
        self._zip = zlib.compressobj(LEVEL, zlib.DEFLATED, GZIP)
        self._tar, self._blob, self._size = hashlib.sha256(), hashlib.sha256(), 0

    def write(self, data: bytes, /) -> None:
        """Take the next bytes of the tar stream."""
        self._tar.update(data)
        self._put(self._zip.compress(data))

    def _put(self, data: bytes) -> None:
        self._blob.update(data)
        self._size += len(data)
        self._file.write(data)

    def finish(self, created_by: str) -> Layer:
        """Return the layer, complete."""
        self._put(self._zip.flush())
        self._file.close()
        digest = f"sha256:{self._blob.hexdigest()}"
        self._aside.rename(blob_path(self._folder, digest))
        return Layer(Descriptor(LAYER, digest, self._size), f"sha256:{self._tar.hexdigest()}", created_by)


def blob_path(folder: Path, digest: str) -> Path:
    """Return where a blob is in a layout."""
    return folder / "blobs" / "sha256" / digest.partition(":")[2]


def start_layout(folder: Path) -> None:
    """Make an empty layout."""
    (folder / "blobs" / "sha256").mkdir(parents=True)
    (folder / "oci-layout").write_bytes(as_bytes({"imageLayoutVersion": "1.0.0"}))


def put(folder: Path, data: bytes, media_type: str) -> Descriptor:
    """Put bytes among the blobs."""
    digest = sha256(data)
    blob_path(folder, digest).write_bytes(data)
    return Descriptor(media_type, digest, len(data))


def copy_blob(source: Path, target: Path, blob: Descriptor) -> None:
    """Copy a blob into another layout; Trouble where it is not what its name says."""
    digest, size = hashlib.sha256(), 0
    try:
        with blob_path(source, blob.digest).open("rb") as old, blob_path(target, blob.digest).open("wb") as new:
            while piece := old.read(CHUNK):
                digest.update(piece)
                size += len(piece)
                new.write(piece)
    except FileNotFoundError:
        raise Trouble(Problem(f"{source}", "the layout lacks a blob", wanted=blob.digest)) from None
    if (f"sha256:{digest.hexdigest()}", size) != (blob.digest, blob.size):
        found = f"sha256:{digest.hexdigest()}, {size} bytes"
        raise Trouble(
            Problem(f"{source}", "a blob of the layout is damaged", found, f"{blob.digest}, {blob.size} bytes")
        )


def put_image(folder: Path, config: Mapping[str, Any], layers: Sequence[Layer], notes: Mapping[str, str]) -> Descriptor:
    """Put configuration and manifest of an image whose layers are there already; return its descriptor."""
    about = put(folder, as_bytes(config), CONFIG)
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": about.as_json(),
        "layers": [layer.blob.as_json() for layer in layers],
        "annotations": dict(notes),
    }
    return put(folder, as_bytes(manifest), MANIFEST)


def attach(folder: Path, image: Descriptor, data: bytes, media_type: str, title: str) -> Descriptor:
    """Put a document about an image beside it: a manifest of its own, whose subject the image is."""
    empty = put(folder, b"{}", EMPTY)
    blob = put(folder, data, media_type)
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": media_type,
        "config": empty.as_json(),
        "layers": [blob.as_json(annotations={"org.opencontainers.image.title": title})],
        "subject": image.as_json(),
    }
    return put(folder, as_bytes(manifest), MANIFEST)


def finish_layout(folder: Path, image: Descriptor, tag: str, architecture: str, attached: Sequence[Descriptor]) -> None:
    """Write the index: the image under its tag, then what is attached to it."""
    platform = {"architecture": architecture, "os": "linux"}
    named = image.as_json(platform=platform, annotations={REF_NAME: tag})
    rest = [each.as_json(artifactType=_artifact_type(folder, each)) for each in attached]
    index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [named, *rest]}
    (folder / "index.json").write_bytes(as_bytes(index))


def _artifact_type(folder: Path, manifest: Descriptor) -> str:
    return str(json.loads(blob_path(folder, manifest.digest).read_bytes())["artifactType"])


def read_base(folder: Path, name: str, digest: str, architecture: str) -> Base:
    """Return the image in a layout: the one with `digest` ("" for the only one), of several machines' images that for
    `architecture`. Raises Trouble where there is none, where it is damaged, and for layers in another form."""
    where = str(folder)
    index = _document(folder / "index.json", where)
    chosen = [each for each in index.get("manifests", ()) if not digest or each.get("digest") == digest]
    images = [each for each in chosen if "artifactType" not in each]
    if len(images) != 1:
        found = f"{len(images)} images" if not digest else "no image with it"
        raise Trouble(Problem(where, "this layout does not say which image", found, "one", "--base=FOLDER@sha256:…"))
    manifest = _manifest(folder, images[0], architecture)
    config = _blob(folder, manifest["config"])
    if not str(manifest["config"].get("mediaType", "")).startswith("application/vnd.oci.image.config"):
        raise Trouble(Problem(where, "this is no image", str(manifest["config"].get("mediaType")), CONFIG))
    diff_ids = config["rootfs"]["diff_ids"]
    blobs = [_descriptor(each, where) for each in manifest["layers"]]
    if len(blobs) != len(diff_ids):
        raise Trouble(Problem(where, "layers and configuration differ", f"{len(blobs)} and {len(diff_ids)}"))
    if odd := [blob.media_type for blob in blobs if blob.media_type not in {LAYER, PLAIN_LAYER}]:
        remedy = "skopeo copy --dest-compress-format=gzip --format=oci"
        raise Trouble(Problem(where, "a layer is in a form that is not read here", odd[0], LAYER, remedy))
    layers = tuple(Layer(blob, str(diff_id)) for blob, diff_id in zip(blobs, diff_ids, strict=True))
    if config.get("architecture") != architecture or config.get("os") != "linux":
        found = f"{config.get('os')}/{config.get('architecture')}"
        raise Trouble(Problem(where, "the base is for another machine", found, f"linux/{architecture}"))
    return Base(folder, name, str(images[0]["digest"]), config, layers)


def _manifest(folder: Path, entry: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Return the manifest of an image; of an index with several machines that of one of them."""
    document = _blob(folder, entry)
    if "manifests" not in document:
        return document
    fitting = [each for each in document["manifests"] if each.get("platform", {}).get("architecture") == architecture]
    if not fitting:
        raise Trouble(Problem(str(folder), "the base has no image for this machine", wanted=f"linux/{architecture}"))
    return _blob(folder, fitting[0])


def _descriptor(values: Mapping[str, Any], where: str) -> Descriptor:
    digest, size = values.get("digest"), values.get("size")
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest) or not isinstance(size, int):
        raise Trouble(Problem(where, "a manifest names no blob", repr(digest)[:90], "sha256:… and its size"))
    return Descriptor(str(values.get("mediaType", "")), digest, size)


def _blob(folder: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document among the blobs; Trouble where it is not what its name says."""
    blob = _descriptor(values, str(folder))
    path = blob_path(folder, blob.digest)
    document = _document(path, str(folder))
    if sha256(path.read_bytes()) != blob.digest:
        raise Trouble(Problem(str(folder), "a blob of the layout is damaged", path.name, blob.digest))
    return document


def _document(path: Path, where: str) -> dict[str, Any]:
    try:
        if path.stat().st_size > LARGEST_DOCUMENT:
            raise Trouble(Problem(where, "a document is larger than any real one", path.name))
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise Trouble(Problem(where, "is no image layout", f"no {path.name}", "index.json and blobs/sha256")) from None
    except (OSError, ValueError, RecursionError) as error:
        raise Trouble(Problem(where, f"{path.name} cannot be read", str(error)[:120])) from None
    if not isinstance(found, dict):
        raise Trouble(Problem(where, f"{path.name} is no document of an image"))
    return found


class Root(Struct, frozen=True):
    """The files of an image without their contents: names, links with their targets, and the version of its glibc (""
    where there is none)."""

    names: frozenset[str]
    links: Mapping[str, str]
    glibc: str = ""

    def has(self, path: str) -> bool:
        """Return whether there is a file at an absolute path, links followed."""
        return self.real(path) in self.names

    def real(self, path: str) -> str:
        """Return where a path leads, links followed, without a slash in front; "" where links go in a circle."""
        left, at = path.strip("/").split("/"), ""
        for _ in range(MOST_LINKS * 8):
            if not left:
                return at
            word = left.pop(0)
            if word == "..":
                at = os.path.dirname(at)
            elif word not in {"", "."}:
                step = f"{at}/{word}".lstrip("/")
                if (target := self.links.get(step)) is None:
                    at = step
                    continue
                left = [*target.split("/"), *left]
                at = "" if target.startswith("/") else at
        return ""


def read_root(base: Base) -> Root:
    """Return what files a base has; each layer may hide what is below it."""
    names: set[str] = set()
    links: dict[str, str] = {}
    glibc = ""
    for layer in base.layers:
        try:
            with tarfile.open(blob_path(base.folder, layer.blob.digest), "r:*") as archive:
                for member in archive:
                    path = os.path.normpath(member.name).strip("/")
                    _apply(member, path, names, links)
                    if os.path.basename(path) == "libc.so.6" and member.isreg():
                        found = GLIBC.search((archive.extractfile(member) or io.BytesIO()).read())
                        glibc = found[1].decode() if found else glibc
        except (OSError, tarfile.TarError, zlib.error, EOFError) as error:
            raise Trouble(Problem(str(base.folder), "a layer cannot be read", str(error)[:120])) from None
    return Root(frozenset(names), links, glibc)


def _apply(member: tarfile.TarInfo, path: str, names: set[str], links: dict[str, str]) -> None:
    folder, name = os.path.split(path)
    if name.startswith(".wh."):
        hidden = f"{folder}/" if name == ".wh..wh..opq" else os.path.join(folder, name.removeprefix(".wh."))
        gone = {each for each in names if each == hidden or each.startswith(f"{hidden.rstrip('/')}/")}
        names -= gone
        for each in gone & links.keys():
            del links[each]
        return
    names.add(path)
    links.pop(path, None)
    if member.issym():
        links[path] = member.linkname
