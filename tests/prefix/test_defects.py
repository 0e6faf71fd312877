"""Known defects of what a prefix offers, by the manifests of its entries: judged, told by four verbs, named before a
rollback."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from deepep_bootstrap.cli.commands.doctor import doctor
from deepep_bootstrap.cli.commands.rollback import rollback
from deepep_bootstrap.cli.commands.status import status
from deepep_bootstrap.cli.commands.verify import verify
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.prefix.contents import Generation, Holdings, StoreEntry
from deepep_bootstrap.prefix.defects import Defect, defects
from tests.support.doctor import RECORD
from tests.support.paths import ROOT
from tests.support.shipped import shipped_env, shipped_lock
from tests.support.store import Prefix, entry_name

pytest_plugins = ["tests.support.store"]

Capture = pytest.CaptureFixture[str]

TEXTS = shipped_env()
SHIPPED = shipped_lock()
MODULES = {"v1": "deepep/1.2.1-8a07e7e-v1", "v1-cu13": "deepep/1.2.1-8a07e7e-v1-cu13", "v2": "deepep/2.1.0-dd758ca-v2"}
ST_BULK = "static_cast<uint64_t>(kNumBytes)"
FENCED, BARE, NVSHMEM = entry_name("deepep", "1.2.1"), entry_name("deepep", "1.2.1.old"), entry_name("nvshmem", "3.4.5")
PYTHON = entry_name("python", "2.10.0")


def substitutes(source: str, *, before: bool = False) -> list[dict[str, Any]]:
    """Return what manifests of entries record of the shipped lock's substitutions; `before`: as they were before the
    fences."""
    made = [to_builtins(each) for each in SHIPPED.sources[source].substitutes]
    return [each for each in made if ST_BULK in each["replacement"]] if before else made


def offered(
    stack: str, archs: tuple[str, ...], made: object, *, module: str = "", deepep: str = "", nvshmem: str = "3.4.5"
) -> tuple[Holdings, Generation]:
    """Return a prefix that offers one stack, whose DeepEP was made with the substitutions `made`."""
    version = MODULES[stack].split("/")[1].split("-")[0]
    names = {"deepep": entry_name("deepep", deepep or version), "nvshmem": entry_name("nvshmem", nvshmem)}
    entries = {
        names["deepep"]: StoreEntry(names["deepep"], 1, {"inputs": {"kind": "deepep", "substitutes": made}}),
        names["nvshmem"]: StoreEntry(
            names["nvshmem"], 1, {"inputs": {"kind": "nvshmem", "wheel": ["n", nvshmem, "x"]}}
        ),
    }
    record = {**to_builtins(RECORD), "stack": stack, "module": module or MODULES[stack], "archs": list(archs), **names}
    generation = Generation(1, {"offer": {"default_stack": stack, "stacks": {stack: record}, "templates": ""}})
    return Holdings(1, (generation,), entries), generation


def found(*what: Any, **more: Any) -> tuple[Defect, ...]:
    return defects(*offered(*what, **more), TEXTS, "invoke bootstrap --hosts=h")


@pytest.mark.parametrize("archs", [("10.0",), ("9.0", "10.0"), ("10.3",), ("12.0",)])
@pytest.mark.parametrize("stack", ["v1", "v1-cu13"])
def test_a_v1_built_before_the_fence_is_named_on_blackwell_alone(stack: str, archs: tuple[str, ...]) -> None:
    (defect,) = found(stack, archs, substitutes("deepep-v1", before=True))
    assert (defect.stack, defect.module, defect.entry) == (stack, MODULES[stack], entry_name("deepep", "1.2.1"))
    assert defect.found == f"DeepEP 1.2.1 at 8a07e7e, compute capability {' and '.join(archs)}"
    assert defect.wanted == "deepep has ll-combine-fence"
    assert defect.why.startswith("Without this fence the low-latency combine returns wrong rows on Blackwell")
    assert defect.why.endswith("(DeepEP issues 700 and 621, pull request 642).")
    assert defect.fix == f"invoke bootstrap --hosts=h --stack={stack}"
    assert found(stack, archs, substitutes("deepep-v1")) == ()
    assert found(stack, ("9.0",), []) == ()


@pytest.mark.parametrize("archs", [("9.0",), ("10.0",)])
def test_a_v2_built_before_the_fence_is_named_on_every_gpu(archs: tuple[str, ...]) -> None:
    (defect,) = found("v2", archs, substitutes("deepep-v2", before=True))
    assert defect.wanted == "deepep has gin-world-fence"
    assert "DeepEP pull request 715" in defect.why
    assert found("v2", archs, substitutes("deepep-v2")) == ()
    assert found("v2", archs, [], module="deepep/2.1.0-01dc3aa-v2") == ()


def test_other_rules_about_what_a_source_contains_are_judged_too() -> None:
    (defect,) = found("v2", ("9.0",), substitutes("deepep-v2"), nvshmem="3.5.19")
    assert defect.found == "DeepEP 2.1.0 at dd758ca, NVSHMEM 3.5.19 from its wheel"


def test_a_commit_that_nobody_has_recorded_is_told_as_that() -> None:
    (defect,) = found("v1", ("10.0",), [], module="deepep/1.2.1-fffffff-v1")
    assert defect.why.startswith("Nobody has recorded whether DeepEP 1.2.1 at fffffff has ll-combine-fence")
    assert (bool(defect.found), bool(defect.wanted)) == (True, True)
    assert found("v1", ("10.0",), substitutes("deepep-v1"), module="deepep/1.2.1-fffffff-v1") == ()
    assert found("v1", ("9.0",), [], module="odd") == ()


@pytest.mark.parametrize("manifest", [{}, {"inputs": []}, {"inputs": {}}])
def test_nothing_is_said_of_an_entry_whose_manifest_tells_nothing(manifest: Mapping[str, Any]) -> None:
    holdings, generation = offered("v1", ("10.0",), [])
    broken = {name: replace(entry, manifest=manifest) for name, entry in holdings.entries.items()}
    assert defects(replace(holdings, entries=broken), generation, TEXTS) == ()
    assert defects(replace(holdings, entries={}), generation, TEXTS) == ()


@pytest.mark.parametrize("made", [None, {}, [1, {"file": 3}]])
def test_substitutions_that_cannot_be_read_give_nothing(made: object) -> None:
    assert len(found("v1", ("10.0",), made)) == 1


def test_an_external_python_stays_part_of_the_remedy() -> None:
    holdings, generation = offered("v1", ("10.0",), [])
    generation.manifest["offer"]["stacks"]["v1"]["external_python"] = "/opt/my venv/bin/python"
    (defect,) = defects(holdings, generation, TEXTS)
    assert defect.fix == "invoke bootstrap --stack=v1 '--python=/opt/my venv/bin/python'"


# The verbs, on this machine, with a prefix as recipes publish it.


@pytest.fixture
def old(prefix: Prefix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prefix:
    """Generation 1 as a bootstrap before the fences left it, generation 2 as one does now: on B200, stacks v1 and
    v1-cu13."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name, made in ((BARE, substitutes("deepep-v1", before=True)), (FENCED, substitutes("deepep-v1"))):
        prefix.entry(name, [NVSHMEM], inputs={"kind": "deepep", "archs": ["10.0"], "substitutes": made})
    prefix.entry(NVSHMEM, inputs={"kind": "nvshmem", "substitutes": substitutes("nvshmem")})
    prefix.entry(PYTHON, inputs={"kind": "python"})
    put(prefix, BARE, BARE)
    put(prefix, FENCED, FENCED)
    return prefix


def put(prefix: Prefix, first: str, second: str) -> None:
    """Publish a generation that offers v1 of the entry `first` and v1-cu13 of `second`."""
    base = {
        **to_builtins(RECORD),
        "prefix": str(prefix.path),
        "archs": ["10.0"],
        "nvshmem": NVSHMEM,
        "gdrcopy": "",
        "python": PYTHON,
    }
    names = {"v1": first, "v1-cu13": second}
    own = {stack: {"stack": stack, "module": MODULES[stack], "deepep": name} for stack, name in names.items()}
    prefix.offer_records({stack: {**base, **values} for stack, values in own.items()})


def flags(prefix: Prefix, tmp_path: Path, **more: Any) -> Flags:
    hosts = tmp_path / "hosts.txt"
    hosts.write_text(f"defaults prefix={prefix.path}\nhere connection=local\n")
    return Flags(ROOT, hosts=str(hosts), **more)


def test_status_calls_a_prefix_built_before_the_fences_so(old: Prefix, tmp_path: Path, capsys: Capture) -> None:
    assert status(flags(old, tmp_path)) == 0
    assert "blocking" not in capsys.readouterr().out
    put(old, BARE, FENCED)
    assert status(flags(old, tmp_path)) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "blocking" in line]
    assert line.startswith("  blocking: deepep/1.2.1-8a07e7e-v1 (")
    assert "returns wrong rows on Blackwell" in line
    assert line.endswith(f"Try: invoke bootstrap --hosts={tmp_path}/hosts.txt --stack=v1")
    assert status(flags(old, tmp_path, json=True)) == 0
    (told,) = json.loads(capsys.readouterr().out)["defects"]
    assert (told["stack"], told["entry"]) == ("v1", BARE)


def test_doctor_judges_by_each_offered_stack_and_names_the_one_that_is_blocked(
    old: Prefix, tmp_path: Path, capsys: Capture
) -> None:
    put(old, FENCED, BARE)
    before = {path: path.lstat().st_mtime_ns for path in old.path.rglob("*")}
    doctor(flags(old, tmp_path, json=True), as_="", strict=False)
    document = json.loads(capsys.readouterr().out)
    assert (document["exit"], document["stack"], document["stacks"]) == (4, "v1", ["v1", "v1-cu13"])
    (finding,) = [each for each in document["findings"] if each["check"] == "known-defect"]
    assert (finding["severity"], finding["hosts"], finding["stacks"]) == ("blocking", ["here"], ["v1-cu13"])
    assert finding["fix"] == f"invoke bootstrap --hosts={tmp_path}/hosts.txt --stack=v1-cu13"
    shared = [tuple(each["stacks"]) for each in document["findings"] if each["check"] != "known-defect"]
    assert ("v1", "v1-cu13") in shared, "what both stacks share is said once"
    assert {path: path.lstat().st_mtime_ns for path in old.path.rglob("*")} == before
    doctor(flags(old, tmp_path), as_="", strict=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "here: stacks v1, v1-cu13 as offered, profile single-node"
    assert "blocking: known-defect on here (stack v1-cu13)" in lines
    doctor(flags(old, tmp_path, json=True, stack="v1"), as_="", strict=False)
    document = json.loads(capsys.readouterr().out)
    assert (document["stacks"], [each for each in document["findings"] if each["check"] == "known-defect"]) == (
        ["v1"],
        [],
    )


def test_verify_tries_each_offered_stack_and_says_no_to_a_known_defect(
    old: Prefix, tmp_path: Path, capsys: Capture
) -> None:
    put(old, BARE, FENCED)
    assert verify(flags(old, tmp_path, json=True)) == 4
    document = json.loads(capsys.readouterr().out)
    assert (document["module"], document["modules"]) == (MODULES["v1"], [MODULES["v1"], MODULES["v1-cu13"]])
    assert [each["step"] for each in document["outcomes"]] == ["verify v1", "verify v1-cu13"]
    assert [each["stack"] for each in document["defects"]] == ["v1"]
    assert verify(flags(old, tmp_path, json=True, stack="v1-cu13")) == 4
    document = json.loads(capsys.readouterr().out)
    assert ([each["step"] for each in document["outcomes"]], document["defects"]) == (["verify"], [])


def test_a_rollback_names_the_defects_before_it_switches(old: Prefix, tmp_path: Path, capsys: Capture) -> None:
    assert rollback(replace(flags(old, tmp_path), yes=True)) == 0
    lines = capsys.readouterr().out.splitlines()
    told = [f"blocking in generation 1: {MODULES[stack]}" for stack in ("v1", "v1-cu13")]
    assert [line.partition(" (")[0] for line in lines[-3:-1]] == told
    assert lines[-1] == "generation 1 is the current one"
    assert os.readlink(old.path / "current") == "generations/1"
    assert rollback(flags(old, tmp_path, json=True, yes=True), to="2") == 0
    assert json.loads(capsys.readouterr().out)["defects"] == []
    assert rollback(flags(old, tmp_path, json=True, dry_run=True), to="1") == 0
    assert [each["entry"] for each in json.loads(capsys.readouterr().out)["defects"]] == [BARE, BARE]
