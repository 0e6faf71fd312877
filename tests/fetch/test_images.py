"""Images of others: their digests come from a registry, by skopeo."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.fetch.images import renew_image
from deepep_bootstrap.lock import edit
from deepep_bootstrap.lock.model import ImagePin, parse_lock
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
