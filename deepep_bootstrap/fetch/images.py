"""What images are made of: images of others in registries, through skopeo, by the digest that a tag has now; and
package files of a distribution's archive, by address and hash."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import tempfile
import threading
from pathlib import Path
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from deepep_bootstrap.core import filetree
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.process import run_program
from deepep_bootstrap.fetch.download import PARTIAL, CutError, Download, Meter, Refused, RemoteFile
from deepep_bootstrap.fetch.index import PackageIndex
from deepep_bootstrap.fetch.locations import Mirrors, shown
from deepep_bootstrap.lock.model import CompilerPin, ImagePin, PackagePin

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


def fetch_packages(
    pin: CompilerPin, machine: str, mirrors: Mirrors, cache: Path
) -> tuple[tuple[PackagePin, Path], ...]:
    """Return the packages of a host compiler for one kind of machine, each with its file, which has the locked hash;
    what the cache lacks is fetched. Raises Trouble with every one that cannot be had."""
    found: list[tuple[PackagePin, Path]] = []
    problems: list[Problem] = []
    for package in pin.packages[machine]:
        try:
            found.append((package, _fetch(package, mirrors.packages(pin.address(package)), cache)))
        except Trouble as trouble:
            problems += trouble.problems
    if problems:
        raise Trouble(*problems)
    return tuple(found)


def _fetch(package: PackagePin, address: str, cache: Path) -> Path:
    target = cache / "files" / filetree.hex_of(package.hash)[:32] / package.file.rpartition("/")[2]
    try:
        if target.is_file() and filetree.hash_file(target) == package.hash:
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=target.parent) as scratch:
            file = Path(scratch, "file")
            _get(package, address, file, cache / PARTIAL)
            if (found := filetree.hash_file(file)) != package.hash:
                what = f"{shown(address)} is not the locked file"
                raise Trouble(Problem(f"package {package.name}", what, found, package.hash))
            os.replace(file, target)
    except OSError as error:
        where, what = str(error.filename or target), f"the cache cannot be used: {error.strerror}"
        raise Trouble(Problem(where, what, try_="XDG_CACHE_HOME=DIR")) from None
    return target


def _get(package: PackagePin, address: str, file: Path, partial: Path) -> None:
    """Bring the file of a package from a directory or a server. Raises Trouble."""
    where, remedy = f"package {package.name} {package.version}", "--mirror PREFIX=REPLACEMENT for where it is to be had"
    try:
        if address.startswith("file://"):
            shutil.copyfile(unquote(urlsplit(address).path), file)
            return
        index = PackageIndex(package.name, address, {})
        remote = RemoteFile(index, address, package.hash, package.size)
        Download(partial, Meter(1, package.size), threading.Event()).fetch(remote, file)
    except FileNotFoundError:
        raise Trouble(Problem(where, f"{address} is not there", try_=remedy)) from None
    except (Refused, CutError) as error:
        raise Trouble(Problem(where, f"{shown(address)} cannot be fetched", str(error), try_=remedy)) from None
