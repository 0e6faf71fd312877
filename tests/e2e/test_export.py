"""The binary cache on the embedded cluster: what one prefix built comes into another, and nothing is built there."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest
from e2e_support import Engine, wait_until

pytest_plugins = ["lab_support", "e2e_support"]
pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("lab")]


def spoil_last_file(archive: Path, spoiled: Path) -> None:
    """Copy an archive and its signature with one bit flipped in the contents of its last file."""
    data = bytearray(archive.read_bytes())
    data[len(data.rstrip(b"\0")) - 2] ^= 1
    spoiled.write_bytes(data)
    Path(f"{spoiled}.sig").write_bytes(Path(f"{archive}.sig").read_bytes())


def test_what_was_built_once_is_imported_elsewhere(engine: Engine, tmp_path: Path) -> None:
    assert engine.run("bootstrap").code == 0
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    allowed = tmp_path / "allowed"
    allowed.write_text(f"builder@example.com {(tmp_path / 'key.pub').read_text()}")
    archive = tmp_path / "deepep.tar"
    exported = engine.json("export", f"--out={archive}", f"--sign={tmp_path / 'key'}")
    assert exported["exit"] == 0, exported
    assert archive.stat().st_size == exported["bytes"]
    assert sorted(each["name"] for each in exported["entries"]) == engine.store()

    other = dataclasses.replace(engine, prefix="/shared/elsewhere/and deeper".replace(" ", "-"))
    spoil_last_file(archive, tmp_path / "spoiled.tar")
    refused = other.run("import", str(tmp_path / "spoiled.tar"), f"--allowed-signers={allowed}")
    assert refused.code == 1
    assert "its contents are not what the index says" in refused.err
    wait_until(lambda: other.store() == [], "the host removed what had come")

    imported = other.json("import", str(archive), f"--allowed-signers={allowed}")
    assert imported["exit"] == 0, imported
    assert imported["signer"] == "builder@example.com"
    assert {each["state"] for each in imported["entries"]} == {"imported"}
    assert other.store() == engine.store()

    offered = other.json("bootstrap")
    assert offered["exit"] == 0, offered
    assert [outcome["step"] for outcome in offered["outcomes"] if outcome["step"] in other.store()] == []
    assert other.run("verify", "--store").code == 0
    module = f"module use {other.prefix}/modulefiles && module load deepep && python -c 'import deep_ep; print(deep_ep.__file__)'"
    loaded = engine.lab.ssh("n002", f'bash -lc "{module}"')
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.startswith(f"{other.prefix}/store/")
