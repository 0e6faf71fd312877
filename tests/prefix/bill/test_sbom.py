"""The bill of materials: valid by the library's own schema, complete, and the same bytes for the same entries."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from msgspec.structs import replace
from packageurl import PackageURL

from deepep_bootstrap.bootstrap import build
from deepep_bootstrap.inventory.facts import Python, Toolkit
from deepep_bootstrap.inventory.survey import read_tree
from deepep_bootstrap.prefix import entries, offer
from deepep_bootstrap.prefix.bill import provenance, sbom
from deepep_bootstrap.prefix.contents import Holdings, StoreEntry
from tests.support.modules import offer as made_offer
from tests.support.paths import ROOT
from tests.support.shipped import shipped_lock
from tests.support.standins import FACTS
from tests.support.store import Prefix

pytest_plugins = ["tests.support.store"]

SHIPPED = shipped_lock()
RECIPES = read_tree(ROOT / "recipes")
REV = SHIPPED.sources[SHIPPED.stacks["v1"].deepep].rev


@functools.cache
def faults_of(text: str) -> object:
    """Return what is wrong with a bill by the schema; its library takes seconds to load, which only some tests need."""
    from cyclonedx.validation.json import JsonStrictValidator

    return JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)


def entries_of(stack: str, external: str = "") -> tuple[entries.Entry, ...]:
    """Return the entries of a shipped stack on a made-up host."""
    chosen = SHIPPED.stacks[stack]
    target = "" if external else "cp312-x86_64"
    python = Python(
        external or "/usr/bin/python3.12",
        "3.12.3",
        torch="2.10.0" if external else "",
        torch_cuda="12.8" if external else "",
    )
    toolkit = Toolkit("/usr/local/cuda", f"{chosen.cuda}.9.86", split_compile=True, stubs=True)
    return entries.name_entries(
        entries.EntryInputs(SHIPPED, chosen, RECIPES, ("9.0", "10.0"), FACTS, toolkit, python, target)
    )


def holdings_of(*entries: entries.Entry, **built: object) -> Holdings:
    """Return a look at a store that holds these entries, with something in their manifests that differs from build
    to build."""
    manifests = {entry.name: {**json.loads(build.manifest(entry)), "built": built} for entry in entries}
    return Holdings(1, (), {name: StoreEntry(name, 1, manifest) for name, manifest in manifests.items()})


def offer_of(**stacks: tuple[entries.Entry, ...]) -> offer.Offer:
    """Return an offer of these stacks."""
    example = made_offer()
    record = example.stacks[example.default_stack]
    records = {}
    for stack, built in stacks.items():
        names = {entry.kind: entry.name for entry in built}
        kinds = {kind: names.get(kind, "") for kind in ("deepep", "nvshmem", "gdrcopy", "python", "toolkit")}
        records[stack] = replace(record, stack=stack, module=f"deepep/1-{stack}", **kinds)
    return offer.Offer(next(iter(stacks)), records, "")


def read(text: bytes) -> dict[str, Any]:
    assert faults_of(text.decode()) is None, faults_of(text.decode())
    found: dict[str, Any] = json.loads(text)
    return found


def by_ref(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["bom-ref"]: each for each in document["components"]}


def properties(component: Mapping[str, Any]) -> dict[str, str]:
    return {each["name"].removeprefix("deepep-bootstrap:"): each["value"] for each in component["properties"]}


@pytest.fixture(scope="module")
def v1() -> tuple[entries.Entry, ...]:
    return entries_of("v1")


@pytest.mark.parametrize("stack", sorted(SHIPPED.stacks))
def test_every_shipped_stack_has_a_valid_bill_of_everything_pinned(stack: str) -> None:
    entries = entries_of(stack)
    document = read(sbom.make_bill(offer_of(**{stack: entries}), holdings_of(*entries), sbom.Pins.of([SHIPPED])))
    found = by_ref(document)
    assert {entry.name for entry in entries} <= set(found)
    purls = [PackageURL.from_string(each["purl"]) for each in found.values() if "purl" in each]
    toolkit = SHIPPED.toolkits.get(SHIPPED.stacks[stack].toolkit)
    listed = (*SHIPPED.stacks[stack].wheels["cp312-x86_64"], *(toolkit.wheels["x86_64"] if toolkit else ()))
    wanted = {wheel.name.lower().replace("_", "-") for wheel in listed}
    assert {purl.name for purl in purls if purl.type == "pypi"} == wanted
    sources = {SHIPPED.sources[entry.source] for entry in entries if entry.source}
    assert {purl.version for purl in purls if purl.type == "github"} == {source.rev for source in sources}
    needed = {each["ref"]: set(each.get("dependsOn", ())) for each in document["dependencies"]}
    for entry in entries:
        assert set(entry.needs) <= needed[entry.name]
        assert not entry.source or f"source:{SHIPPED.sources[entry.source].hash}" in needed[entry.name]


def test_the_same_entries_give_the_same_bytes_whenever_and_wherever_they_were_built(
    v1: tuple[entries.Entry, ...],
) -> None:
    pins, offer = sbom.Pins.of([SHIPPED]), offer_of(v1=v1)
    one = sbom.make_bill(offer, holdings_of(*v1, at="2026-01-01T00:00:00Z", host="n001"), pins)
    two = sbom.make_bill(offer, holdings_of(*reversed(v1), at="2026-02-02T00:00:00Z", host="n002"), pins)
    assert one == two


@pytest.mark.usefixtures("programs")
def test_the_serial_number_follows_the_content_and_the_time_the_newest_source(v1: tuple[entries.Entry, ...]) -> None:
    offer, holdings = offer_of(v1=v1), holdings_of(*v1)
    document = read(sbom.make_bill(offer, holdings, sbom.Pins.of([SHIPPED])))
    other = read(sbom.make_bill(replace(offer, templates="x"), holdings, sbom.Pins.of([SHIPPED])))
    assert document["serialNumber"] != other["serialNumber"]
    newest = max(SHIPPED.sources[entry.source].last_modified for entry in v1 if entry.source)
    stamp = subprocess.run(
        ["date", "-ud", f"@{newest}", "+%Y-%m-%dT%H:%M:%S+00:00"], capture_output=True, text=True, check=True
    )
    assert document["metadata"]["timestamp"] == stamp.stdout.strip()


def test_a_source_tells_commit_hash_and_address_and_its_entry_what_was_replaced(v1: tuple[entries.Entry, ...]) -> None:
    document = read(sbom.make_bill(offer_of(v1=v1), holdings_of(*v1), sbom.Pins.of([SHIPPED])))
    found = by_ref(document)
    source = SHIPPED.sources[SHIPPED.stacks["v1"].deepep]
    tree = found[f"source:{source.hash}"]
    assert tree["purl"] == f"pkg:github/deepseek-ai/deepep@{REV}"
    assert properties(tree)["nar-hash"] == source.hash
    assert tree["externalReferences"] == [{"type": "vcs", "url": "https://github.com/deepseek-ai/DeepEP"}]
    nvshmem = next(entry for entry in v1 if entry.kind == "nvshmem")
    substitutes = SHIPPED.sources[nvshmem.source].substitutes
    assert substitutes
    differences = [patch["diff"]["text"]["content"] for patch in found[nvshmem.name]["pedigree"]["patches"]]
    for each in substitutes:
        assert any(f"--- a/{each.file}\n" in text and f"\n-{each.text.splitlines()[0]}" in text for text in differences)


def test_wheels_have_the_hash_of_their_file_and_tools_their_version(v1: tuple[entries.Entry, ...]) -> None:
    document = read(sbom.make_bill(offer_of(v1=v1), holdings_of(*v1), sbom.Pins.of([SHIPPED])))
    found = by_ref(document)
    torch = SHIPPED.stacks["v1"].pinned("torch", "cp312-x86_64")
    assert torch
    component = found[f"wheel:{torch.hash}"]
    assert component["hashes"] == [{"alg": "SHA-256", "content": torch.requirement.rpartition("sha256:")[2]}]
    known = {"file": torch.file, "bytes": str(torch.size), "index": torch.index}
    assert properties(component) == {**known, "license": "unknown"}, "nobody has read this wheel's METADATA"
    assert {"tool:cuda-12.9.86", "tool:gcc-12.2.0", "tool:g++-12.2.0", "os:debian-12-x86_64"} <= set(found)


def test_every_component_has_its_licence_or_says_that_nobody_knows_it(v1: tuple[entries.Entry, ...]) -> None:
    holdings = holdings_of(*v1)
    python = next(entry.name for entry in v1 if entry.kind == "python")
    torch, cublas, numpy = (
        SHIPPED.stacks["v1"].pinned(name, "cp312-x86_64") for name in ("torch", "nvidia-cublas-cu12", "numpy")
    )
    assert torch
    assert cublas
    assert numpy
    metadata = (
        f"Name: torch\nVersion: {torch.version}\nLicense: BSD-3-Clause\n\n"
        f"Name: nvidia_cublas.cu12\nVersion: {cublas.version}.0\nLicense: NVIDIA Proprietary Software\n\n"
        f"Name: numpy\nVersion: 0.1\nLicense: MIT\n"
    )
    told = {**holdings.entries, python: replace(holdings.entries[python], metadata=metadata)}
    bill = sbom.make_bill(offer_of(v1=v1), replace(holdings, entries=told), sbom.Pins.of([SHIPPED]))
    found = by_ref(read(bill))
    assert found[f"wheel:{torch.hash}"]["licenses"] == [{"license": {"id": "BSD-3-Clause"}}]
    assert found[f"wheel:{cublas.hash}"]["licenses"] == [{"expression": "LicenseRef-NVIDIA-Proprietary-Software"}]
    assert properties(found[f"wheel:{cublas.hash}"])["license"] == "NVIDIA Proprietary Software"
    assert "licenses" not in found[f"wheel:{numpy.hash}"], "that METADATA is another version's"
    both = [{"expression": "MIT AND LicenseRef-NVSHMEM-SLA"}]
    deepep = next(entry for entry in v1 if entry.kind == "deepep")
    assert found[deepep.name]["licenses"] == found[f"source:{SHIPPED.sources['deepep-v1'].hash}"]["licenses"] == both
    assert found[f"source:{SHIPPED.sources['gdrcopy'].hash}"]["licenses"] == [{"license": {"id": "MIT"}}]
    assert found["tool:gcc-12.2.0"]["licenses"] == [{"expression": "GPL-3.0-or-later WITH GCC-exception-3.1"}]
    unsaid = {ref for ref, each in found.items() if "licenses" not in each and "license" not in properties(each)}
    assert unsaid == {python}, "an environment has the licences of its wheels"


def test_somebody_elses_python_is_in_the_bill() -> None:
    entries = entries_of("v1", "/opt/site/bin/python")
    found = by_ref(read(sbom.make_bill(offer_of(v1=entries), holdings_of(*entries), sbom.Pins.of([SHIPPED]))))
    assert properties(found["tool:python-3.12.3"])["torch"] == "2.10.0"


def test_what_no_lock_knows_and_an_entry_that_tells_nothing_are_named_all_the_same(
    v1: tuple[entries.Entry, ...],
) -> None:
    document = read(
        sbom.make_bill(
            offer_of(v1=v1), Holdings(1, (), {v1[0].name: holdings_of(*v1).entries[v1[0].name]}), sbom.Pins()
        )
    )
    found = by_ref(document)
    assert {entry.name for entry in v1} <= set(found)
    assert properties(found[f"source:{v1[0].inputs['source']}"]) == {
        "nar-hash": v1[0].inputs["source"],
        "license": "unknown",
    }
    assert document["metadata"]["timestamp"] == "1970-01-01T00:00:00+00:00"


def test_an_address_with_a_password_is_shown_without() -> None:
    source = replace(SHIPPED.sources["nvshmem"], url="https://me:secret@git.example.com/team/nvshmem.git")
    purl = sbom.source_purl(source).to_string()
    assert "secret" not in purl
    assert (
        PackageURL.from_string(purl).qualifiers["vcs_url"]
        == f"git+https://git.example.com/team/nvshmem.git@{source.rev}"
    )


def test_two_stacks_of_one_prefix_share_one_bill_from_the_locks_of_both(
    prefix: Prefix, v1: tuple[entries.Entry, ...]
) -> None:
    other = entries_of("v1-cu13")
    for entry in {entry.name: entry for entry in (*v1, *other)}.values():
        prefix.entry(entry.name, entry.needs, inputs=entry.inputs)
    prefix.offer(*(entry.name for entry in other), stack="v1-cu13", lock=(ROOT / "deepep.lock.toml").read_text())
    offer = offer_of(**{"v1": v1, "v1-cu13": other})
    holdings = provenance.look(prefix.transport, prefix.place, offer)
    records = holdings.records(entry.name for entry in (*v1, *other))
    (content,) = provenance.bills(holdings, offer, records=records)
    assert content.path == "sbom.cdx.json"
    found = by_ref(read(content.data))
    assert {entry.name for entry in (*v1, *other)} <= set(found)
    for name in records:
        record = (prefix.path / "store" / name / "files.sha256").read_bytes()
        assert {"name": "deepep-bootstrap:record-sha256", "value": sha256(record).hexdigest()} in found[name][
            "properties"
        ]
    assert len(records) == len({entry.name for entry in (*v1, *other)})
    assert found[f"source:{SHIPPED.sources['nvshmem'].hash}"]["purl"].startswith("pkg:github/nvidia/nvshmem@")


LIBRARY = (
    "cyclonedx-python-lib",
    "packageurl-python",
    "py-serializable",
    "sortedcontainers",
    "license-expression",
    "boolean.py",
    "defusedxml",
)


@pytest.mark.usefixtures("programs")
def test_the_library_is_imported_by_nobody_but_who_writes_a_bill() -> None:
    code = (
        "import sys; sys.argv = ['x']; import tasks; from deepep_bootstrap.cli import app, verbs; "
        "[app.load(each) for each in verbs.VERBS]; print([each for each in sys.modules if "
        "each.startswith(('cyclonedx', 'packageurl'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.usefixtures("programs")
def test_the_library_works_from_a_folder_of_packages(tmp_path: Path) -> None:
    """As `pip install --target` leaves them: modules and their data, no environment around them."""
    for name in LIBRARY:
        for file in metadata.files(name) or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(str(file.locate()), tmp_path / file)
    rest = next(folder for folder in sys.path if (Path(folder) / "typing_extensions.py").exists())
    places = [str(tmp_path), str(ROOT), rest]
    code = (
        f"import sys; sys.path[:0] = {places!r}; from deepep_bootstrap.prefix.bill import sbom; import cyclonedx; "
        f"print(cyclonedx.__file__)"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{tmp_path}/cyclonedx/")
