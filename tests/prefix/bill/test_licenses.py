"""Licences: what METADATA gives, read from a real prefix, and told by an export."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from deepep_bootstrap.cli.commands.export import export
from deepep_bootstrap.cli.lock_view import overview
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.core.toml import load_toml
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.lock import edit, model
from deepep_bootstrap.prefix import history
from deepep_bootstrap.prefix.archive import stream
from deepep_bootstrap.prefix.bill import licenses
from tests.support.archive import INPUTS
from tests.support.paths import ROOT
from tests.support.store import Prefix, entry_name

pytest_plugins = ["tests.support.store"]

LOCK = (ROOT / "deepep.lock.toml").read_text(encoding="utf-8")
SHIPPED = model.parse_lock(LOCK, "deepep.lock.toml")
FILE = ROOT / "tests/cases/prefix/licenses.toml"
CASES: Any = load_toml(FILE.read_text(encoding="utf-8"), str(FILE))["case"]
GDRCOPY = SHIPPED.sources["gdrcopy"]
PYTHON, TOP = entry_name("python", "2.10.0"), entry_name("gdrcopy", GDRCOPY.version)
LONG = "\n".join(f"        line {number} of a text" for number in range(2000))


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_licence_that_a_wheel_gives(case: dict[str, Any]) -> None:
    found = licenses.read_license(licenses.read_fields(case["header"]))
    assert (found.expression, found.name) == (case["expression"], case.get("written", ""))
    assert not found.expression or model.spdx(found.expression) == found.expression


def test_every_source_of_the_shipped_lock_has_one() -> None:
    found = {source.name: source.license for source in SHIPPED.sources.values()}
    both = "MIT AND LicenseRef-NVSHMEM-SLA"
    assert found["gdrcopy"] == "MIT"
    assert found["nvshmem"] == "LicenseRef-NVSHMEM-SLA"
    assert {each for key, each in found.items() if key.startswith("deepep")} == {both}


def test_a_licence_of_the_lock_is_an_spdx_expression_or_is_not_there() -> None:
    line = 'license = "MIT"\n'
    assert model.parse_lock(LOCK.replace(line, ""), "x").sources["gdrcopy"].license == ""
    for wrong in ("The MIT one", "mit", ""):
        with pytest.raises(Trouble) as caught:
            model.parse_lock(LOCK.replace(line, f'license = "{wrong}"\n'), "x")
        assert "source.gdrcopy.license" in str(caught.value)
        assert "an SPDX expression such as MIT" in str(caught.value)


METADATA = "lib/python3.12/site-packages/{}.dist-info/METADATA"


@pytest.fixture
def offered(prefix: Prefix) -> Prefix:
    """A prefix with two entries: one of a source, one of wheels, among them what is odd and what nobody knows."""
    wheels = [["torch", "2.10.0", "x"], ["nvidia-nccl-cu12", "2.27.5", "y"], ["quiet", "1", "z"], ["long", "1.0", "w"]]
    text = f"Name: long\nVersion: 1.0\nLicense: Caf\xe9\n{LONG}\nClassifier: License :: OSI Approved :: MIT License\n\n"
    said = {
        "torch-2.10.0": b"Name: torch\r\nVersion: 2.10.0\r\nLicense: BSD-3-Clause\r\n\r\nLicense: MIT\r\n",
        "nvidia_nccl_cu12-2.27.5": b"Name: nvidia-nccl-cu12\nVersion: 2.27.5\nLicense: NVIDIA Proprietary Software\n",
        "long-1.0": text.encode("latin-1"),
    }
    files = {METADATA.format(each): data for each, data in said.items()}
    files[METADATA.format("a-folder") + "/x"] = b""
    prefix.entry(PYTHON, inputs={**INPUTS, "kind": "python", "wheels": wheels}, files=files)
    prefix.entry(TOP, [PYTHON], inputs={**INPUTS, "kind": "gdrcopy", "source": GDRCOPY.hash})
    prefix.offer(TOP, PYTHON, lock=LOCK)
    return prefix


def test_what_wheels_in_a_prefix_say_is_read_where_it_is_asked_for(offered: Prefix) -> None:
    assert offered.look().entries[PYTHON].metadata == ""
    holdings = history.read_contents(offered.transport, offered.place, metadata=True)
    found = holdings.entries[PYTHON].metadata
    assert "License: BSD-3-Clause" in found
    assert "License: MIT" not in found, "that is in a description"
    assert len(found) < 500, "the beginning of a long text is enough"
    known = licenses.WheelLicenses(holdings, [PYTHON])
    assert str(known.of("Torch", "2.10")) == "BSD-3-Clause"
    assert str(known.of("long", "1")) == "MIT"
    assert str(known.of("quiet", "1")) == "unknown"


def test_an_export_tells_the_licences_of_all_that_it_holds(
    offered: Prefix, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, out = Flags(root=ROOT, prefix=str(offered.path)), tmp_path / "a.tar"
    assert export(flags, out=str(out)) == 0
    screen = capsys.readouterr()
    told = " ".join((screen.out + screen.err).split())
    assert "licences of the 5 components" in told
    for line in (
        "BSD-3-Clause: torch 2.10.0",
        "LicenseRef-NVIDIA-Proprietary-Software: nvidia-nccl-cu12 2.27.5",
        f"MIT: gdrcopy {GDRCOPY.version}, long 1.0",
        "unknown: quiet 1",
    ):
        assert line in told
    text = subprocess.run(["tar", "-xOf", out, stream.INDEX], check=True, capture_output=True).stdout
    index = json.loads(text)["generation"]["components"]
    assert {"name": "torch", "version": "2.10.0", "license": "BSD-3-Clause"} in index
    assert export(replace(flags, json=True, dry_run=True), out=str(tmp_path / "b.tar")) == 0
    assert json.loads(capsys.readouterr().out)["components"] == index


def test_an_update_of_a_pin_keeps_it() -> None:
    text = edit.rewrite(LOCK, {("source", "gdrcopy", "rev"): "0" * 40}, "deepep.lock.toml")
    source = model.parse_lock(text, "deepep.lock.toml").sources["gdrcopy"]
    assert (source.rev, source.license) == ("0" * 40, "MIT")


def test_the_pins_are_shown_with_it() -> None:
    unsaid = model.parse_lock(LOCK.replace('license = "MIT"\n', ""), "x")
    for lock, told in ((SHIPPED, True), (unsaid, False)):
        lines = [line.strip() for line in overview(lock, ["v1"], 0.0)]
        assert ("licence MIT" in lines) is told
    assert "licence MIT AND LicenseRef-NVSHMEM-SLA, with its submodules" in [
        line.strip() for line in overview(SHIPPED, ["v2"], 0.0)
    ]
