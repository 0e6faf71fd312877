"""The verb wheel: what it says and refuses, what it leaves behind, its JSON document."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import pytest
from msgspec.structs import replace

from deepep_bootstrap.cli.commands.wheel import wheel
from deepep_bootstrap.core.errors import OK, Trouble
from deepep_bootstrap.inventory.flags import Flags
from tests.support.paths import ROOT
from tests.support.store import Prefix, entry_name
from tests.support.wheel import build_stack

pytest_plugins = ["tests.support.store"]
pytestmark = pytest.mark.usefixtures("programs")

V1 = {
    "source": "deepep-v1",
    "nvshmem": "source",
    "nvshmem_version": "3.4.5",
    "cuda": "12.9.86",
    "torch": "2.10.0",
    "torch_requires": ["nvidia-nvshmem-cu12==3.4.5"],
}


@pytest.fixture
def flags(prefix: Prefix) -> Flags:
    """The flags for a prefix that offers stack v1."""
    build_stack(prefix, V1)
    return Flags(root=ROOT, prefix=str(prefix.path))


def refusal(flags: Flags, folder: Path) -> str:
    """Return the one message with which the verb ends; nothing is left in the folder."""
    before = sorted(folder.iterdir())
    with pytest.raises(Trouble) as caught:
        wheel(flags, output=str(folder))
    assert sorted(folder.iterdir()) == before
    (problem,) = caught.value.problems
    return str(problem)


def test_a_stack_that_was_not_built(flags: Flags, tmp_path: Path) -> None:
    said = refusal(replace(flags, stack="v2-vllm"), tmp_path)
    assert said == (
        "--stack: this stack was not built in the prefix — found v2-vllm, wanted v1. Try: invoke bootstrap "
        f"--stack=v2-vllm --prefix={flags.prefix}"
    )


def test_a_prefix_that_offers_nothing(prefix: Prefix, tmp_path: Path) -> None:
    said = refusal(Flags(root=ROOT, prefix=str(prefix.path)), tmp_path)
    assert "nothing is offered there — found no generation, wanted one. Try: invoke bootstrap" in said


def test_a_folder_that_is_not_there(flags: Flags, tmp_path: Path) -> None:
    with pytest.raises(Trouble, match=r"--output .*/none: this folder is not there"):
        wheel(flags, output=str(tmp_path / "none"))


def test_another_file_of_that_name_stays(flags: Flags, tmp_path: Path) -> None:
    folder = tmp_path / "dist"
    folder.mkdir()
    assert wheel(flags, output=str(folder)) == OK
    (made,) = folder.iterdir()
    made.write_bytes(b"somebody's")
    assert "is there already with other contents and is not overwritten" in refusal(flags, folder)
    assert made.read_bytes() == b"somebody's"


def test_what_was_changed_in_the_store_does_not_leave_it(prefix: Prefix, flags: Flags, tmp_path: Path) -> None:
    file = prefix.path / "store" / entry_name("deepep", "1.2.1") / "lib/python/deep_ep/__init__.py"
    file.chmod(0o644)
    file.write_text(file.read_text().replace("1.2.1", "6.6.6"))
    file.chmod(0o444)
    said = refusal(flags, tmp_path)
    assert "lib/python/deep_ep/__init__.py: it is not as it was published" in said
    assert "invoke verify --store" in said


@pytest.mark.parametrize(
    ("target", "what"),
    [("/etc/passwd", "this link points out of the store"), ("__init__.py", "a wheel holds no links")],
)
def test_a_link_in_the_package_is_not_followed(prefix: Prefix, tmp_path: Path, target: str, what: str) -> None:
    build_stack(prefix, {**V1, "link": target})
    said = refusal(Flags(root=ROOT, prefix=str(prefix.path)), tmp_path)
    assert "lib/python/deep_ep/linked.py" in said
    assert what in said


def test_a_build_with_a_known_defect_does_not_leave_the_prefix(prefix: Prefix, tmp_path: Path) -> None:
    build_stack(prefix, {**V1, "unfenced": True, "archs": ["10.0"]})
    said = refusal(Flags(root=ROOT, prefix=str(prefix.path)), tmp_path)
    assert said.startswith("stack v1: its build has a known defect, which a wheel would carry away: ")
    assert "Try: invoke bootstrap" in said


def test_the_document_has_the_keys_of_its_example(
    flags: Flags, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert wheel(replace(flags, json=True), output=str(tmp_path)) == OK
    document = json.loads(capfd.readouterr().out)
    section = (ROOT / "docs/json.md").read_text(encoding="utf-8").split("\n## wheel\n")[1]
    example = json.loads(re.search(r"```json\n(.*?)```", section, re.DOTALL)[1])
    assert set(document) == set(example)
    assert {key for each in document["fences"] for key in each} == {key for each in example["fences"] for key in each}
    assert Path(document["file"]).stat().st_size == document["bytes"]
    assert document["requires"] == ["torch==2.10.0", "nvidia-nvshmem-cu12==3.4.5"]


def test_a_person_reads_what_it_is_and_how_to_install_it(
    flags: Flags, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert wheel(flags, output=str(tmp_path)) == OK
    said = capfd.readouterr().out
    (made,) = tmp_path.glob("*.whl")
    assert zipfile.is_zipfile(made)
    assert f"pip install {made.name}" in said
    assert "takes along  nvshmem_transport_ibgda.so.3" in said
    assert "wants        torch==2.10.0, nvidia-nvshmem-cu12==3.4.5" in said
    assert "pull request 642" in said
