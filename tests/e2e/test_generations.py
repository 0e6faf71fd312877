"""The later life of a prefix on the embedded cluster: two generations, back and forth, garbage, a flipped byte. One bootstrap for all."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import test_json_doc
from e2e_support import LOCK, Engine

if TYPE_CHECKING:
    from lab_support import LiveLab

pytest_plugins = ["lab_support", "e2e_support"]
pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("lab")]


@pytest.fixture(scope="module")
def engine(lab: LiveLab, standin_sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A prefix whose second generation has DeepEP built with another option; everything else is the first one's."""
    lab.reset()
    lock = tmp_path_factory.mktemp("lock") / "demo.lock.toml"
    shutil.copy(LOCK, lock)
    engine = Engine(lab, standin_sources, lock)
    bootstrap(engine)
    shutil.copy(lock, lock.with_suffix(".old"))
    lock.write_text(lock.read_text().replace("[source.deepep]\n", '[source.deepep]\noptions = ["DISABLE_AGGRESSIVE_PTX_INSTRS=1"]\n'))
    bootstrap(engine)
    return engine


def bootstrap(engine: Engine) -> None:
    ended = engine.run("bootstrap")
    assert ended.code == 0, ended.text


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
    assert rows[1]["own_bytes"] == sum(path.stat().st_size for path in files if path.name not in {"manifest.json", "files.sha256"})
    assert rows[1]["hosts"] == ["n001", "n002", "login1"]
    assert (engine.on_disk / "generations/1/deepep.lock.toml").read_bytes() == engine.lock.with_suffix(".old").read_bytes()
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
