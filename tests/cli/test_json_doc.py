"""docs/json.md says what `--json` prints: the keys of its examples are those of today's documents, and every key is
explained."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.e2e import Engine
from tests.support.paths import ROOT

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]

TEXT = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
EXAMPLES: dict[str, dict[str, Any]] = {
    heading: json.loads(block)
    for heading, block in re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?```json\n(.*?)```", TEXT, re.MULTILINE | re.DOTALL)
}
FREE_KEYS = {
    "facts": {"hosts", "via"},
    "env": {"left_out"},
    "doctor": {"users"},
    "status": {"stacks", "environment", "hooks", "waiting", "drained", "cordoned", "records"},
    "remove": {"files"},
    "nodes": {"nodes"},
    "lock": {"uses", "before", "after"},
    "bootstrap": set(),
    "plan": set(),
    "version": {"pins"},
    "results": {"config", "best", "operations", "figures"},
    "test": {"values", "config", "best", "operations", "figures", "errors"},
}
"""Objects whose keys are names of hosts, stacks, variables or paths."""


def shape(value: Any, free: set[str], name: str = "") -> Any:
    """Return the keys of a document, all the way down; of a list the shape of its elements, which must be one."""
    if isinstance(value, dict):
        if name in free:
            return {"*": one([shape(each, free) for each in value.values()])}
        return {key: shape(each, free, key) for key, each in value.items()}
    if isinstance(value, list):
        return [one([shape(each, free) for each in value])]
    return "value"


def one(shapes: list[Any]) -> Any:
    """Return what all shapes have in common where some are of empty lists or of nothing."""
    merged: Any = None
    for each in shapes:
        merged = each if merged is None else merge(merged, each)
    return merged


def merge(left: Any, right: Any) -> Any:
    if isinstance(left, dict) and isinstance(right, dict):
        assert set(left) == set(right)
        return {key: merge(left[key], right[key]) for key in left}
    if isinstance(left, list) and isinstance(right, list):
        return [merge(left[0], right[0])]
    return right if left is None else left if right is None else merge_values(left, right)


def merge_values(left: Any, right: Any) -> Any:
    assert left == right
    return left


def keys(value: Any, free: set[str], name: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            if name not in free:
                yield key
            yield from keys(each, free, key)
    elif isinstance(value, list):
        for each in value:
            yield from keys(each, free)


@pytest.mark.usefixtures("programs")
def test_there_is_an_example_for_every_verb_that_reports() -> None:
    listing = subprocess.run(
        [sys.executable, "-m", "invoke", "--list", "--list-format=json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    verbs = {task["name"] for task in json.loads(listing.stdout)["tasks"]}
    assert set(EXAMPLES) - {"Every document"} == verbs - {"completion"}
    assert all(document["verb"] == verb for verb, document in EXAMPLES.items() if verb in verbs)


@pytest.mark.parametrize("verb", EXAMPLES)
def test_every_key_is_explained(verb: str) -> None:
    explained = set(re.findall(r"`([a-z_]+)`", re.sub(r"```json.*?```", "", TEXT, flags=re.DOTALL)))
    assert set(keys(EXAMPLES[verb], FREE_KEYS.get(verb, set()))) - explained == set()


@pytest.mark.usefixtures("programs")
def test_a_failure_has_the_keys_of_every_document() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "invoke", "plan", "--json"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert shape(json.loads(done.stdout), set()) == shape(EXAMPLES["Every document"], set())


@pytest.mark.usefixtures("programs")
def test_the_version_has_the_keys_of_its_example() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "invoke", "version", "--json"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    document = json.loads(done.stdout)
    assert set(keys(document, {"pins"})) == set(keys(EXAMPLES["version"], {"pins"}))
    assert (document["data"], document["lock"]) == (str(ROOT), str(ROOT / "deepep.lock.toml"))
    assert re.fullmatch("[0-9a-f]{7,}(-dirty)?", document["commit"])


@pytest.mark.e2e
def test_examples_have_exactly_the_keys_that_the_program_prints(engine: Engine) -> None:
    lab = subprocess.run(
        [sys.executable, "-m", "invoke", "lab", "status", "--json", f"--dir={engine.lab.dir}"],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=True,
    )
    engine.use_built(without="deepep")
    printed = {"lab": json.loads(lab.stdout), "plan": engine.json("plan"), "bootstrap": engine.json("bootstrap")}
    printed |= {verb: engine.json(verb) for verb in ("doctor", "facts", "verify", "env")}
    printed["test"] = engine.json("test", "--kind=intranode")
    printed["status"] = engine.json("status")
    (listed,) = [run for run in printed["status"]["tests"] if run["kind"] == "intranode"]
    told = engine.json("report")
    assert told["run"]["name"] == listed["run"] == printed["test"]["run"]["name"]
    same = {(document["verdict"], document["why"]) for document in (printed["test"], listed, told)}
    assert len(same) == 1, same
    assert next(iter(same))[0] == printed["test"]["outcome"]["state"] == "passed"
    printed["remove"] = engine.json("remove", "--yes")
    for verb, document in printed.items():
        free = FREE_KEYS.get(verb, set())
        # Nothing was rolled back here: tests/cli/test_rollback.py has what status says then.
        example = EXAMPLES[verb] | ({"rolled_back": []} if verb == "status" else {})
        merge(shape(document, free), shape(example, free))
        assert set(keys(document, free)) == set(keys(example, free)), verb
