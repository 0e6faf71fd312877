"""Documents of facts: written with every key in the order of the record, read with the place of what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.core.text import HostText
from deepep_bootstrap.inventory.facts import facts_json, parse_facts, read_facts_json
from tests.support.paths import ROOT

CASES = ROOT / "tests" / "cases"


def by_hand(value: Any) -> Any:
    """Return a value of a record as JSON has it, without msgspec's own encoder."""
    if isinstance(value, Struct):
        return {name: by_hand(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {name: by_hand(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return [by_hand(each) for each in value]
    return str(value) if isinstance(value, HostText) else value


def document(hosts: object) -> str:
    return json.dumps({"schema": 1, "verb": "facts", "exit": 0, "errors": [], "hosts": hosts})


@pytest.mark.parametrize("path", sorted((CASES / "inventory/facts/parse").glob("*.txt")), ids=lambda path: path.stem)
def test_facts_are_written_to_the_byte_as_by_hand_and_read_back(path: Path) -> None:
    facts = {"n1": parse_facts(path.read_text(encoding="utf-8"), "n1")}
    assert json.dumps(facts_json(facts), indent=2) == json.dumps(by_hand(facts), indent=2)
    assert read_facts_json(document(facts_json(facts)), "f") == facts


@pytest.mark.parametrize(
    "path", sorted((CASES / "report/runs").glob("*/facts.json")), ids=lambda path: path.parent.name
)
def test_recorded_documents_are_written_with_all_keys_of_this_version(path: Path) -> None:
    """Documents of earlier versions lack keys; msgspec alone would leave their defaults out again."""
    facts = read_facts_json(path.read_text(encoding="utf-8"), "f")
    assert facts
    assert json.dumps(facts_json(facts), indent=2) == json.dumps(by_hand(facts), indent=2)


def test_keys_come_in_the_order_of_the_record_whatever_the_document_has() -> None:
    facts = read_facts_json(document({"n1": {"prepared": {"gib": "/g", "address": "a"}, "new": 1, "cpus": 2}}), "f")
    assert json.dumps(facts_json(facts)) == json.dumps(by_hand({"n1": facts["n1"]}))
    assert (facts["n1"].cpus, facts["n1"].prepared.gib, facts["n1"].prepared.ofed) == (2, "/g", "")


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ([], "n2: Expected `object`, got `array`"),
        ({"cpus": "2"}, "n2: Expected `int`, got `str` - at `$.cpus`"),
        ({"cpus": True}, "n2: Expected `int`, got `bool` - at `$.cpus`"),
        ({"gpus": [{"index": "x"}]}, "n2: Expected `int`, got `str` - at `$.gpus[0].index`"),
        ({"gpus": [{"index": 0}]}, "n2: Object missing required field `name` - at `$.gpus[0]`"),
        ({"tools": [["gcc"]]}, "n2: Expected `array` of length 2, got 1 - at `$.tools[0]`"),
        ({"prefix": {"entries": "abc"}}, "n2: Expected `array`, got `str` - at `$.prefix.entries`"),
        ({"external_python": 1}, "n2: Expected `object | null`, got `int` - at `$.external_python`"),
    ],
)
def test_what_is_wrong_is_named_with_host_and_place(host: object, reason: str) -> None:
    with pytest.raises(Trouble) as caught:
        read_facts_json(document({"n1": {}, "n2": host}), "run/facts.json")
    (problem,) = caught.value.problems
    assert (problem.where, problem.what, problem.found) == ("run/facts.json", "facts of a host cannot be read", reason)


def test_half_a_character_is_no_text() -> None:
    with pytest.raises(Trouble, match="these are no facts of hosts"):
        read_facts_json(document({"n1": {"kernel": "\ud800"}}), "f")
