"""What `invoke env` shows: every variable that hosts can get has a reason, and recorded clusters' screens are kept."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from deepep_bootstrap.cli.commands import env
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.inventory import explain, network_env
from deepep_bootstrap.inventory.explain import Explanation
from deepep_bootstrap.inventory.explain import explain as explained
from deepep_bootstrap.inventory.network_env import Derived
from tests.cli.test_json_doc import EXAMPLES
from tests.inventory.test_network_env import CASES, TEXTS, every_variable, read_host
from tests.support.paths import ROOT

GOLDEN = ROOT / "tests" / "golden" / "env"


RELEASES = {"v1": (1, 2, 1), "v2": (2, 1, 0), "v25": (2, 5, 0)}


def found(path: Path, release: tuple[int, ...] = RELEASES["v1"]) -> tuple[Derived, Explanation]:
    case = json.loads(path.read_text(encoding="utf-8"))
    facts = {host: read_host(host, spec) for host, spec in case["hosts"].items()}
    derived = network_env.derive(case["profile"], facts, TEXTS)
    derived = network_env.for_release(derived, release)
    return derived, explained(derived, facts, TEXTS)


@pytest.mark.parametrize("release", RELEASES.values(), ids=RELEASES)
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_every_variable_of_every_cluster_has_its_value_and_a_reason(path: Path, release: tuple[int, ...]) -> None:
    derived, seen = found(path, release)
    assert {setting.name for setting in seen.settings} == every_variable(derived)
    assert all(setting.reason for setting in seen.settings)
    everywhere = {setting.name: setting.value for setting in seen.settings if not setting.hosts and not setting.kind}
    assert everywhere == {name: value or explain.UNSET for name, value in derived.environment.items()}


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_the_maps_are_those_that_deepep_reads(path: Path) -> None:
    derived, seen = found(path)
    maps = {",".join(f"{row.gpu}:{row.nic}" for row in each.rows) for each in seen.maps if each.rows}
    told = {
        values[network_env.MAP]
        for values in (derived.environment, *derived.by_host.values())
        if network_env.MAP in values
    }
    # A map that hosts of one name do not share is told to nobody; it is shown all the same.
    assert told <= maps
    assert all(each.rows or each.reason for each in seen.maps)


def test_the_document_has_the_keys_of_its_description() -> None:
    _, seen = found(CASES[0].with_name("oci-like-two-ports-a-gpu.json"))
    document, example = msgspec.to_builtins(seen), EXAMPLES["env"]
    assert {"schema", "verb", "exit", "errors", "stack", *document} == set(example)
    for name in ("settings", "maps"):
        assert {*document[name][0]} == {*example[name][0]}
    assert {*document["maps"][0]["rows"][0]} == {*example["maps"][0]["rows"][0]}


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_screens_of_recorded_clusters(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, seen = found(CASES[0].with_name(f"{path.stem}.json"))
    env.show(Screen("env"), "v1", "the hosts", seen)
    assert capsys.readouterr().out == path.read_text(encoding="utf-8")
