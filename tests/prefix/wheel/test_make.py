"""A wheel out of store entries that were compiled here: what is in it, what it says of itself, and which stacks cannot
be one."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import parse_wheel_filename

from deepep_bootstrap.cli.commands.wheel import wheel
from deepep_bootstrap.core.errors import OK, Trouble
from deepep_bootstrap.core.toml import load_toml
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.prefix.wheel.elf import Relocator
from deepep_bootstrap.prefix.wheel.make import guarded
from tests.support.paths import ROOT
from tests.support.store import Prefix, entry_name
from tests.support.wheel import PYTHON, SUFFIX, build_stack, lock

pytest_plugins = ["tests.support.store"]
pytestmark = pytest.mark.usefixtures("programs")

FILE = ROOT / "tests/cases/prefix/wheels.toml"
CASES: list[dict[str, Any]] = load_toml(FILE.read_text(encoding="utf-8"), str(FILE))["case"]
V1, V2 = CASES[0], next(case for case in CASES if case.get("nccl") and "refused" not in case)


def make(prefix: Prefix, folder: Path) -> Path:
    """Make the wheel of the offered stack in `folder` and return its path."""
    folder.mkdir(exist_ok=True)
    assert wheel(Flags(root=ROOT, prefix=str(prefix.path)), output=str(folder)) == OK
    (path,) = folder.iterdir()
    return path


def member(path: Path, pattern: str) -> str:
    """Return the text of the one member whose name matches."""
    with zipfile.ZipFile(path) as archive:
        (name,) = (each for each in archive.namelist() if re.search(pattern, each))
        return archive.read(name).decode()


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_which_stacks_can_be_a_wheel(prefix: Prefix, tmp_path: Path, case: dict[str, Any]) -> None:
    build_stack(prefix, case)
    if "refused" in case:
        with pytest.raises(Trouble) as caught:
            wheel(Flags(root=ROOT, prefix=str(prefix.path)), output=str(tmp_path))
        assert [str(each) for each in caught.value.problems] == [case["refused"]]
        assert not list(tmp_path.glob("*.whl"))
        return
    path = make(prefix, tmp_path / "dist")
    source = lock().sources[case["source"]]
    name, version, _, tags = parse_wheel_filename(path.name)
    build = entry_name("deepep", source.version)[:8]
    assert (name, str(version)) == ("deep-ep", f"{source.version}+{case['local']}.b{build}")
    assert {(tag.interpreter, tag.abi) for tag in tags} == {(PYTHON, PYTHON)}
    metadata = message_from_string(member(path, r"/METADATA$"))
    assert metadata.get_all("Requires-Dist") == case["requires"]
    assert metadata["Requires-Python"] == f"==3.{sys.version_info.minor}.*"
    with zipfile.ZipFile(path) as archive:
        libs = [each.partition("/")[2] for each in archive.namelist() if each.startswith("deep_ep.libs/")]
    assert libs == case["bundled"]


def test_what_a_wheel_of_v1_holds(prefix: Prefix, tmp_path: Path) -> None:
    build_stack(prefix, V1)
    path = make(prefix, tmp_path / "dist")
    relocator = Relocator(ROOT)
    with zipfile.ZipFile(path) as archive:
        files = {each: archive.read(each) for each in archive.namelist()}
        modes = {each.filename: each.external_attr >> 16 for each in archive.infolist()}
    info = re.sub(r"-cp3.*", ".dist-info", path.name)
    assert set(files) == {
        f"deep_ep_cpp{SUFFIX}",
        "deep_ep/__init__.py",
        "deep_ep/_built_for.py",
        "deep_ep/_built_for.json",
        "deep_ep.libs/nvshmem_transport_ibgda.so.3",
        *(f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "top_level.txt", "deepep-bootstrap.json")),
    }
    # The loader looks where torch's NVSHMEM lies, and nowhere in the store.
    extension = files[f"deep_ep_cpp{SUFFIX}"]
    assert b"$ORIGIN/nvidia/nvshmem/lib\0" in extension
    transport = files["deep_ep.libs/nvshmem_transport_ibgda.so.3"]
    assert relocator.with_run_path(transport, "", "it") == transport
    for data in (extension, transport):
        assert entry_name("nvshmem", "3.4.5").encode() not in data
    assert modes[f"deep_ep_cpp{SUFFIX}"] == 0o100755
    assert modes["deep_ep/__init__.py"] == 0o100644
    tag = "-".join(path.stem.split("-")[-3:])
    assert f"Root-Is-Purelib: false\nTag: {tag}\n" in files[f"{info}/WHEEL"].decode()
    rows = {row[0]: row[1:] for row in csv.reader(files[f"{info}/RECORD"].decode().splitlines())}
    assert rows.pop(f"{info}/RECORD") == ["", ""]
    assert rows == {
        name: [f"sha256={_digest(data)}", str(len(data))] for name, data in files.items() if name != f"{info}/RECORD"
    }


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def test_metadata_tells_where_it_comes_from_and_what_was_replaced(prefix: Prefix, tmp_path: Path) -> None:
    build_stack(prefix, V1)
    path = make(prefix, tmp_path / "dist")
    text = member(path, r"/METADATA$")
    deepep, nvshmem = lock().sources["deepep-v1"], lock().sources["nvshmem"]
    (fence,) = deepep.substitutes
    roce = next(each for each in nvshmem.substitutes if "ibgda" in each.file)
    assert f"from {deepep.url} at {deepep.rev}" in text
    assert f"- DeepEP, {fence.file}, 1 place: {fence.reason}\n" in text
    assert f"- NVSHMEM, {roce.file}, 1 place: {roce.reason}\n" in text
    assert "CMakeLists" not in text, "how NVSHMEM was built is not in the wheel"
    told = json.loads(member(path, r"deepep-bootstrap\.json$"))
    built = told["entries"][entry_name("deepep", "1.2.1")]
    assert (built["pin"]["rev"], built["inputs"]["source"]) == (deepep.rev, deepep.hash)
    assert [each["file"] for each in told["fences"]] == [fence.file, roce.file]


def test_a_wheel_of_v2_looks_for_nccl_and_nvshmem_from_its_own_folder(prefix: Prefix, tmp_path: Path) -> None:
    build_stack(prefix, V2)
    path = make(prefix, tmp_path / "dist")
    with zipfile.ZipFile(path) as archive:
        data = archive.read(f"deep_ep/_C{SUFFIX}")
        assert "deep_ep/include/elastic.cuh" in archive.namelist()
    assert b"$ORIGIN/../nvidia/nccl/lib:$ORIGIN/../nvidia/nvshmem/lib\0" in data


def test_two_makes_give_one_digest(prefix: Prefix, tmp_path: Path) -> None:
    build_stack(prefix, V1)
    first, second = (make(prefix, tmp_path / name) for name in ("one", "two"))
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()
    # Once more into the same folder: it is there, and is not written again.
    before = first.stat().st_mtime_ns
    assert make(prefix, tmp_path / "one").stat().st_mtime_ns == before


def test_auditwheel_finds_the_same_platform(prefix: Prefix, tmp_path: Path) -> None:
    build_stack(prefix, V1)
    path = make(prefix, tmp_path / "dist")
    done = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    # NVSHMEM is torch's and not of the system: auditwheel promises nothing for what lies outside the wheel.
    assert 'consistent with the following platform tag: "linux_x86_64"' in said
    constrained = re.search(r'constrains the platform tag to "manylinux_2_(\d+)_x86_64"', said)
    ours = re.search(r"manylinux_2_(\d+)_x86_64", path.name)
    assert ours is not None
    assert int(ours[1]) == max(17, int(constrained[1]) if constrained else 0), said


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('"""Doc."""\nimport torch\n', 2),
        ('"""Doc\nof two lines."""\nfrom __future__ import annotations\n\nimport torch\n', 4),
        ("# a comment\nimport torch\n", 1),
        ('"""Nothing but this."""', 2),
    ],
)
def test_the_guard_is_the_first_import(text: str, line: int) -> None:
    made = guarded(text.encode()).decode()
    compile(made, "__init__.py", "exec")
    assert made.splitlines()[line - 1].startswith("from . import _built_for")
    assert made.replace("\n" + made.splitlines()[line - 1], "").strip() == text.strip() or line == 1
