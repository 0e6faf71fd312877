"""Container images of others in registries, through skopeo: the digest that a tag has now."""

from __future__ import annotations

import hashlib
import secrets
import shutil
from pathlib import Path

from msgspec import Struct

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.process import run_program
from deepep_bootstrap.lock.model import ImagePin

SKOPEO = "skopeo"
PATIENCE = 120.0
"""Seconds for the answer of a registry."""


class ImageRenewal(Struct, frozen=True):
    """The pin of an image as the lock has it and as it would be now: two digests, the first "" where none was there.
    `name` is its place in the lock, such as image.gib."""

    name: str
    reference: str
    before: str
    after: str

    @property
    def changed(self) -> dict[tuple[str, ...], str | int]:
        """The digest by its place in the lock, where it differs."""
        return {(*self.name.split("."), "digest"): self.after} if self.after != self.before else {}


def renew_image(name: str, pin: ImagePin) -> ImageRenewal:
    """Return what the pin of an image becomes when its registry is asked now. Raises Trouble where skopeo is missing or
    the registry has no answer."""
    return ImageRenewal(name, pin.reference, pin.digest, digest_in_registry(pin.reference, name))


def digest_in_registry(reference: str, where: str) -> str:
    """Return the digest of what a registry has under a name: of its index where it has one for several machines."""
    done = run_skopeo(["inspect", "--raw", f"docker://{reference}"], where, timeout=PATIENCE)
    # A manifest is JSON, so its text has the very bytes that came.
    return f"sha256:{hashlib.sha256(done.encode()).hexdigest()}"


def fetch_image(reference: str, folder: Path, architecture: str, where: str) -> None:
    """Put an image by digest into the layout `folder`, which must not be there yet; of several machines' images that
    for `architecture`."""
    aside = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    machine = [f"--override-arch={architecture}", "--override-os=linux"]
    try:
        # Layers stay as the registry has them: another compression would be another image of ours.
        copy = ["copy", "--quiet", "--dest-oci-accept-uncompressed-layers"]
        run_skopeo([*machine, *copy, f"docker://{reference}", f"oci:{aside}:base"], where)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def push_image(folder: Path, tag: str, reference: str) -> str:
    """Push an image of a layout as it is, byte for byte; return the digest that the registry has then."""
    run_skopeo(["copy", "--quiet", "--preserve-digests", f"oci:{folder}:{tag}", f"docker://{reference}"], "--push")
    return digest_in_registry(reference, "--push")


def run_skopeo(words: list[str], where: str, timeout: float | None = None) -> str:
    """Run skopeo and return what it printed; Trouble where it is missing or fails, `where` says for what."""
    try:
        done = run_program([SKOPEO, *words], timeout=timeout)
    except Trouble as trouble:
        what = "registries are reached through skopeo, which is not installed here"
        if "no end after" in str(trouble):
            raise
        raise Trouble(Problem(where, what, try_="apt-get install skopeo, or dnf install skopeo")) from None
    if done.code:
        verb = next(word for word in words if not word.startswith("-"))
        raise Trouble(Problem(where, f"skopeo {verb} failed", done.tail, try_="skopeo login, or another name"))
    return done.out
