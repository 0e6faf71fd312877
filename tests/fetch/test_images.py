"""Images of others: their digests come from a registry, by skopeo. Packages of a host compiler: by hash."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from deepep_bootstrap.core import filetree
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.fetch.images import fetch_packages, renew_image
from deepep_bootstrap.fetch.locations import Level, Mirrors
from deepep_bootstrap.lock import edit
from deepep_bootstrap.lock.model import CompilerPin, ImagePin, PackagePin, parse_lock
from tests.support.paths import ROOT

pytestmark = pytest.mark.usefixtures("programs")

MANIFEST = '{"schemaVersion": 2,\n "note": "\u00e9"}\n'
DIGEST = f"sha256:{hashlib.sha256(MANIFEST.encode()).hexdigest()}"


def skopeo(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a skopeo of these words on PATH; tests/kubernetes/test_image_long.py asks a registry with the real one."""
    program = folder / "skopeo"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_the_digest_is_that_of_the_very_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "manifest").write_text(MANIFEST, encoding="utf-8")
    skopeo(tmp_path, monkeypatch, f'echo "$@" >{tmp_path}/asked; cat {tmp_path}/manifest')
    found = renew_image("image.gib", ImagePin("registry.example/gib:v1", ""))
    assert found.after == DIGEST
    assert found.changed == {("image", "gib", "digest"): DIGEST}
    assert (tmp_path / "asked").read_text() == "inspect --raw docker://registry.example/gib:v1\n"
    assert renew_image("image.gib", ImagePin("registry.example/gib:v1", DIGEST)).changed == {}


def test_the_lock_is_rewritten_in_that_place_alone() -> None:
    text = (ROOT / "deepep.lock.toml").read_text(encoding="utf-8")
    new = edit.rewrite(text, {("image", "base", "debian12", "digest"): DIGEST}, "x")
    assert parse_lock(new, "x").images["base.debian12"].digest == DIGEST
    assert sum(one != other for one, other in zip(text.split("\n"), new.split("\n"), strict=True)) == 1


def test_a_registry_without_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skopeo(tmp_path, monkeypatch, "echo 'manifest unknown' >&2; exit 1")
    with pytest.raises(Trouble, match=r"image\.gib: skopeo inspect failed — found manifest unknown"):
        renew_image("image.gib", ImagePin("registry.example/gib:v1", ""))


def test_skopeo_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Trouble, match=r"image\.gib: registries are reached through skopeo, which is not installed"):
        renew_image("image.gib", ImagePin("registry.example/gib:v1", ""))


def make_pin(folder: Path, data: bytes) -> tuple[CompilerPin, Mirrors]:
    """Return a compiler of one package, and the mirror that has its file."""
    (folder / "pool").mkdir(parents=True)
    (folder / "pool/gcc_12_amd64.deb").write_bytes(data)
    digest = filetree.sri(hashlib.sha256(b"package").digest())
    package = PackagePin("gcc", "12", "debian/pool/gcc_12_amd64.deb", digest, 7, "MIT")
    pin = CompilerPin("debian-12", "https://example.invalid", "20261122T000000Z", "2.36", (), {"x86_64": (package,)})
    return pin, Mirrors((Level({"https://example.invalid/debian/20261122T000000Z/": f"{folder}/"}, {}),))


def test_packages_come_from_a_mirror_by_hash(tmp_path: Path) -> None:
    pin, mirrors = make_pin(tmp_path / "mirror", b"package")
    ((_, file),) = fetch_packages(pin, "x86_64", mirrors, tmp_path / "cache")
    assert file.read_bytes() == b"package"
    (tmp_path / "mirror/pool/gcc_12_amd64.deb").unlink()
    assert fetch_packages(pin, "x86_64", mirrors, tmp_path / "cache")[0][1] == file, "kept"
    file.write_bytes(b"damaged")
    with pytest.raises(Trouble, match=r"package gcc 12: file://.*_amd64.deb is not there. Try: --mirror"):
        fetch_packages(pin, "x86_64", mirrors, tmp_path / "cache")


def test_a_package_that_is_not_the_locked_one_is_refused(tmp_path: Path) -> None:
    pin, mirrors = make_pin(tmp_path / "mirror", b"another")
    with pytest.raises(Trouble, match=r"is not the locked file — found sha256-.*, wanted sha256-"):
        fetch_packages(pin, "x86_64", mirrors, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.deb"))
