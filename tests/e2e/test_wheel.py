"""A wheel of what the embedded cluster has built, in the empty environment of a user who has no rights there."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from deepep_bootstrap.fetch import locations, wheels
from deepep_bootstrap.lock import model
from tests.support import stacks
from tests.support.e2e import LOCK, PREFIX, Engine

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]
pytestmark = [pytest.mark.e2e, pytest.mark.long]

WHEELS = "/shared/wheels"
TEST = "python ~/tests/test_intranode.py --num-processes 2 --num-tokens 128"
LOADED = "import deep_ep; print(*sorted({line.split()[-1] for line in open('/proc/self/maps') if '.so' in line}))"


def as_user(engine: Engine, command: str, code: int = 0) -> str:
    """Run a command line as a plain user who has just logged in to a GPU node, and return what it prints."""
    done = engine.lab.nsenter("n001", f"runuser -l builder -c {shlex.quote(command)}", timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def offer_wheels(engine: Engine, cache: Path) -> None:
    """Put what pip would find on an index into a folder that users see: the stand-in torch, the NVSHMEM that it
    requires, as a library that can be loaded, and numpy."""
    folder = engine.lab.shared / "wheels"
    folder.mkdir()
    demo = model.read_lock_file(LOCK).stacks["v1"].wheels[f"cp3{sys.version_info.minor}-x86_64"]
    wanted = [each for each in demo if each.name in {"numpy", "setuptools"}]
    for path in wheels.fetch_wheels(wanted, locations.read_mirrors([], {}, {}), cache, print).values():
        shutil.copy(path, folder)
    for path in (engine.sources / "wheels").glob("torch-*.whl"):
        shutil.copy(path, folder)
    (entry,) = engine.on_disk.glob("store/*-nvshmem-*")
    stacks.pack(folder, "nvidia-nvshmem-cu12", "3.4.5", stacks.nvshmem_files(entry))


def test_another_user_installs_it_with_pip(engine: Engine, tmp_path: Path) -> None:
    engine.use_built()
    ended = engine.run("bootstrap")
    assert ended.code == 0, ended.text
    made = engine.json("wheel", f"--output={tmp_path}")
    (tmp_path / "again").mkdir()
    assert engine.json("wheel", f"--output={tmp_path / 'again'}")["hash"] == made["hash"]
    offer_wheels(engine, tmp_path / "cache")
    name = Path(made["file"]).name
    shutil.copy(made["file"], engine.lab.shared / "wheels")
    as_user(
        engine,
        "python3 -m venv ~/env && ~/env/bin/python -m pip install -q --disable-pip-version-check --no-index "
        f"--find-links {WHEELS} {WHEELS}/{name} && ~/env/bin/python -m pip check && cp -r {PREFIX}/store/"
        f"{made['entry']}/tests ~/tests",
    )
    # The same test as with the module, and as many cases.
    loaded = as_user(engine, f"module load deepep && {TEST}")
    installed = as_user(engine, f". ~/env/bin/activate && {TEST}")
    cases = [len(re.findall(r"\.\.\. passed", text)) for text in (loaded, installed)]
    assert cases[0] == cases[1] >= 24, installed
    libraries = as_user(engine, f'. ~/env/bin/activate && cd / && python -c "{LOADED}"')
    assert "/env/lib/" in libraries
    assert "deep_ep.libs/nvshmem_transport_ibgda.so.3" in libraries
    assert PREFIX not in libraries, "nothing of the store is used"
    # pip knows which torch it is for; who overrides that is told at import.
    refused = as_user(
        engine,
        f"~/env/bin/python -m pip install -q --no-index --find-links {WHEELS} --no-deps torch==2.11.0 && "
        "~/env/bin/python -c 'import deep_ep'",
        code=1,
    )
    last = refused.strip().splitlines()[-1]
    assert last == (
        f"ImportError: deep_ep {made['version']} wants torch 2.10.0, CUDA 12, NVSHMEM 3.4.5; found torch "
        "2.11.0+standin for CUDA 13.0. Try: pip install torch==2.10.0, or a wheel of deep_ep that was made for this torch"
    )
