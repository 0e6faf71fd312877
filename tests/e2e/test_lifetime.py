"""The whole life of a prefix where nothing leads out: a mirror made before, bootstrap, two generations, back and
forth, garbage, a flipped byte, an archive into an empty prefix. The control machine's network is the login host's:
the bridge to the others."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deepep_bootstrap.lab import hosts
from tests.cli import test_json_doc
from tests.support.e2e import LOCK, ROOT, Engine, wait_until

if TYPE_CHECKING:
    from tests.support.lab import LiveLab

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]
pytestmark = [pytest.mark.e2e, pytest.mark.long]

TARGET = f"cp3{sys.version_info.minor}-x86_64"


@pytest.fixture(scope="module")
def engine(lab: LiveLab, standin_sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A prefix whose second generation has DeepEP built with another option; everything else is the first one's."""
    lab.reset()
    folder = tmp_path_factory.mktemp("life")
    lock, mirror = folder / "demo.lock.toml", folder / "mirror"
    shutil.copy(LOCK, lock)
    made = mirrored(Engine(lab, standin_sources), mirror, f"--lock={lock}", "--stack=v1", f"--target={TARGET}")
    assert made.returncode == 0, made.stdout + made.stderr
    inside = (*hosts.enter(lab.lab, "login1")[:3], "-n", "--")
    engine = Engine(
        lab, standin_sources, lock, mirror=mirror, inside=inside, env={"XDG_CACHE_HOME": str(folder / "cache")}
    )
    assert "hashes as locked" in bootstrap(engine)
    shutil.copy(lock, lock.with_suffix(".old"))
    lock.write_text(
        lock.read_text().replace(
            "[source.deepep]\n", '[source.deepep]\noptions = ["DISABLE_AGGRESSIVE_PTX_INSTRS=1"]\n'
        )
    )
    bootstrap(engine)
    return engine


def mirrored(engine: Engine, mirror: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `invoke mirror`, which takes no hosts."""
    argv = [*engine.inside, sys.executable, "-m", "invoke", "mirror", str(mirror), *words]
    more = [] if engine.inside else engine.standin_mirrors()
    return subprocess.run(
        [*argv, *more], cwd=ROOT, env=engine.environment(), capture_output=True, text=True, check=False
    )


def bootstrap(engine: Engine) -> str:
    ended = engine.run("bootstrap")
    assert ended.code == 0, ended.text
    return ended.out


def test_nothing_leads_out_and_the_mirror_is_as_it_was(engine: Engine) -> None:
    shown = subprocess.run([*engine.inside, "ip", "-json", "route"], capture_output=True, text=True, check=True)
    routes = json.loads(shown.stdout)
    assert routes
    assert not [route for route in routes if route["dst"] == "default"]
    assert {name.split("-")[1] for name in engine.store()} == {"gdrcopy", "nvshmem", "python", "deepep"}
    assert engine.mirror
    checked = mirrored(engine, engine.mirror, f"--lock={engine.lock}", "--check")
    assert checked.returncode == 0, checked.stderr


def document(engine: Engine, verb: str, *flags: str) -> dict[str, Any]:
    """Return a JSON document; its keys are those of the example in docs/json.md."""
    found = engine.json(verb, *flags)
    free = test_json_doc.FREE_KEYS.get(verb, set())
    test_json_doc.merge(test_json_doc.shape(found, free), test_json_doc.shape(test_json_doc.EXAMPLES[verb], free))
    return found


def current(engine: Engine) -> str:
    return os.readlink(engine.on_disk / "current")


def test_generations_are_listed_with_what_they_alone_need(engine: Engine) -> None:
    rows = {row["number"]: row for row in document(engine, "generations")["generations"]}
    assert [rows[number]["current"] for number in (1, 2)] == [False, True]
    assert set(rows[1]["entries"]) & set(rows[2]["entries"]), "they share NVSHMEM, GDRCopy and Python"
    (old,) = set(rows[1]["entries"]) - set(rows[2]["entries"])
    files = [path for path in (engine.on_disk / "store" / old).rglob("*") if path.is_file() and not path.is_symlink()]
    assert rows[1]["own_bytes"] == sum(
        path.stat().st_size for path in files if path.name not in {"manifest.json", "files.sha256"}
    )
    assert rows[1]["hosts"] == ["n001", "n002", "login1"]
    assert (engine.on_disk / "generations/1/deepep.lock.toml").read_bytes() == engine.lock.with_suffix(
        ".old"
    ).read_bytes()
    bill = json.loads((engine.on_disk / "generations/2/sbom.cdx.json").read_text())
    assert {each["bom-ref"] for each in bill["components"]} >= set(rows[2]["entries"])
    text = engine.run("generations")
    assert "* 2 (current)" in text.out
    assert "/shared/deepep/generations/1" in text.out


def test_diff_names_the_option_between_generations_and_between_locks(engine: Engine) -> None:
    of_generations = document(engine, "diff", "1", "2")["changes"]
    option = {"key": "DISABLE_AGGRESSIVE_PTX_INSTRS", "new": "1", "old": "", "what": "option", "link": ""}
    assert {**option, "name": "deepep of v1"} in of_generations
    assert [change["key"] for change in of_generations if change["what"] == "entry"] == ["deepep"]
    of_locks = document(engine, "diff", str(engine.lock.with_suffix(".old")), str(engine.lock))["changes"]
    assert of_locks == [{**option, "name": "deepep"}]


def test_back_forth_and_out(engine: Engine) -> None:
    # A job that loaded generation 2 keeps what it has: its paths name store entries.
    done = document(engine, "rollback")
    assert (done["before"], done["to"], done["changed"], current(engine)) == (2, 1, True, "generations/1")
    assert engine.run("verify").code == 0
    again = engine.run("rollback", "--to=1")
    assert (again.code, "is the current one already" in again.out) == (0, True)
    nowhere = engine.run("rollback")
    assert (nowhere.code, "there is nothing before the current generation" in nowhere.err) == (1, True)
    # The unchanged lock is wanted still: the next bootstrap builds nothing and offers it again.
    before = engine.store()
    bootstrap(engine)
    assert (current(engine), engine.store()) == ("generations/3", before)
    assert engine.run("plan", "--check").code == 0
    # Of three generations the newest stays, and what it needs.
    would = document(engine, "gc", "--keep=1", "--dry-run")
    assert would["generations"] == [1, 2]
    assert len(engine.store()) == 5
    done = document(engine, "gc", "--keep=1", "--yes")
    assert (done["entries"], done["bytes"]) == (would["entries"], would["bytes"])
    assert len(done["entries"]) == 1
    assert done["bytes"] > 0
    assert len(engine.store()) == 4
    assert sorted(path.name for path in (engine.on_disk / "generations").iterdir()) == ["3"]
    assert engine.run("verify").code == 0
    assert engine.run("plan", "--check").code == 0


def test_a_flipped_byte_is_named(engine: Engine) -> None:
    clean = engine.run("verify", "--store")
    assert clean.code == 0, clean.text
    library = next((engine.on_disk / "store").glob("*-nvshmem-*/lib/libnvshmem_host.so.3.*"))
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 1
    library.write_bytes(data)
    changed = engine.json("verify", "--store")
    assert changed["exit"] == 4
    (entry,) = [entry for entry in changed["entries"] if entry["state"] != "same"]
    assert entry["changes"] == [{"path": f"lib/{library.name}", "what": "changed"}]
    data[len(data) // 2] ^= 1
    library.write_bytes(data)


def spoil_last_file(archive: Path, spoiled: Path) -> None:
    """Copy an archive and its signature with one bit flipped in the contents of its last file."""
    data = bytearray(archive.read_bytes())
    data[len(data.rstrip(b"\0")) - 2] ^= 1
    spoiled.write_bytes(data)
    Path(f"{spoiled}.sig").write_bytes(Path(f"{archive}.sig").read_bytes())


def test_what_was_built_once_is_imported_elsewhere(engine: Engine, tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    allowed = tmp_path / "allowed"
    allowed.write_text(f"builder@example.com {(tmp_path / 'key.pub').read_text()}")
    archive = tmp_path / "deepep.tar"
    exported = engine.json("export", f"--out={archive}", f"--sign={tmp_path / 'key'}")
    assert exported["exit"] == 0, exported
    assert archive.stat().st_size == exported["bytes"]
    assert sorted(each["name"] for each in exported["entries"]) == engine.store()

    other = dataclasses.replace(engine, prefix="/shared/elsewhere/and-deeper")
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

    offered = other.json("bootstrap", "--take-over")
    assert offered["exit"] == 0, offered
    assert [outcome["step"] for outcome in offered["outcomes"] if outcome["step"] in other.store()] == []
    assert other.run("verify", "--store").code == 0
    module = (
        f"module use {other.prefix}/modulefiles && module load deepep && python -c 'import deep_ep; "
        f"print(deep_ep.__file__)'"
    )
    loaded = engine.lab.ssh("n002", f'bash -lc "{module}"')
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.startswith(f"{other.prefix}/store/")
