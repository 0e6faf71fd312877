"""The examples as far as a machine without torch can judge them: they call DeepEP as upstream declares it, and import
little.

Whether they compute the right thing is tried on GPUs, with tests/fakes/deep_ep_torch in place of DeepEP (docs/tuning.md
says how).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from tests.prefix.test_sbatch import Prefix
from tests.support import modules as modules_support
from tests.support.paths import ROOT

EXAMPLES = sorted(path for path in (ROOT / "env/examples").glob("*.py"))
PROGRAMS = [path for path in EXAMPLES if path.stem != "together"]
FAKE = ROOT / "tests/fakes/deep_ep_torch/deep_ep/__init__.py"
API = tomlkit.parse((ROOT / "tests/cases/env/examples/api.toml").read_text()).unwrap()
Call = Mapping[str, Any]


def generation(path: Path) -> Mapping[str, Any]:
    return API["v2" if path.stem.startswith("elastic") else "v1"]


def methods(api: Mapping[str, Any]) -> dict[str, Call]:
    """Return what can be called of DeepEP by name; a class is called by its own."""
    found = {}
    for name, members in api.items():
        if isinstance(members, dict):
            found |= {name if member == "__init__" else member: call for member, call in members.items()}
    return found


def name_of(function: ast.expr) -> str:
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def spread(tree: ast.AST) -> dict[str, list[str]]:
    """Return the keys of dictionaries that calls spread with **, by the name of their variable."""
    return {
        node.targets[0].id: [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and isinstance(node.targets[0], ast.Name)
    }


def faults(tree: ast.AST, api: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the calls of DeepEP in `tree`."""
    calls, dictionaries = methods(api), spread(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (call := calls.get(name_of(node.func))):
            # A value that is spread out of something else (a Config's plain numbers) is not looked at.
            whole = all(keyword.arg or isinstance(keyword.value, ast.Name) for keyword in node.keywords)
            given = [
                name
                for key in node.keywords
                for name in ([key.arg] if key.arg else dictionaries.get(ast.unparse(key.value), []))
            ]
            given += call["parameters"][: len(node.args)]
            where = f"line {node.lineno}: {ast.unparse(node.func)}"
            if len(node.args) > len(call["parameters"]):
                yield f"{where} takes {len(call['parameters'])} values, not {len(node.args)}"
            yield from (f"{where} has no {name}" for name in given if name not in call["parameters"])
            yield from (
                f"{where} is given {name} twice" for name in sorted({name for name in given if given.count(name) > 1})
            )
            missing = [name for name in call["parameters"][: call.get("needed", 0)] if name not in given]
            yield from (f"{where} lacks {name}" for name in missing if whole)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Tuple):
            names, call = node.targets[0].elts, calls.get(name_of(node.value.func), {})
            star = any(isinstance(name, ast.Starred) for name in names)
            wanted = call.get("returns", 0)
            if wanted and (len(names) > wanted + 1 if star else len(names) != wanted):
                yield f"line {node.lineno}: {name_of(node.value.func)} returns {wanted} values, not {len(names)}"


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_an_example_calls_deepep_as_upstream_declares_it(path: Path) -> None:
    assert not list(faults(ast.parse(path.read_text()), generation(path)))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_an_example_uses_what_it_is_to_show(path: Path) -> None:
    tree = ast.parse(path.read_text())
    called = {name_of(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    wanted = {
        "moe_prefill": {
            "get_dispatch_layout",
            "dispatch",
            "combine",
            "set_num_sms",
            "get_nvl_buffer_size_hint",
            "current_stream_wait",
        },
        "moe_decode": {"get_low_latency_rdma_size_hint", "low_latency_dispatch", "low_latency_combine", "hook"},
        "elastic_prefill": {"ElasticBuffer", "dispatch", "combine", "current_stream_wait"},
        "elastic_decode": {"ElasticBuffer", "dispatch", "combine"},
    }
    assert wanted[path.stem] <= called


def test_calls_that_upstream_would_refuse_are_found() -> None:
    text = """
aside = {"async_finsh": True}
a, b, c = buffer.dispatch(x, handle=h, topk_index=i, **aside)
y, *rest, event = buffer.dispatch(x, x=x)
buffer.combine(x)
buffer.capture(1)
"""
    assert sorted(faults(ast.parse(text), API["v1"])) == [
        "line 3: buffer.dispatch has no async_finsh",
        "line 3: buffer.dispatch has no topk_index",
        "line 3: dispatch returns 6 values, not 3",
        "line 4: buffer.dispatch is given x twice",
        "line 5: buffer.combine lacks handle",
        "line 6: buffer.capture takes 0 values, not 1",
    ]


def imported(tree: ast.Module) -> dict[str, bool]:
    """Return the modules that are imported, and whether that is at the top."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found |= {name.partition(".")[0]: node in tree.body for name in names}
    return found


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_needs_torch_and_deepep_alone(path: Path) -> None:
    found = imported(ast.parse(path.read_text()))
    ours = {"together"} if path.stem != "together" else set()
    deepep = {"deep_ep"} if path.stem != "together" else set()
    tuned = {"deepep_tuned"} if path.stem == "moe_prefill" else set()
    assert set(found) - sys.stdlib_module_names == {"torch"} | ours | deepep | tuned
    assert not found.get("deepep_tuned", False), "it is there only once something was measured"


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_an_example_takes_only_what_its_generation_has(path: Path) -> None:
    names = [
        alias.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "deep_ep"
        for alias in node.names
    ]
    assert names
    assert set(names) <= set(generation(path)["names"])


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_can_be_read_in_one_sitting(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 180
    tree = ast.parse(text, feature_version=(3, 10))
    assert ast.get_docstring(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert ast.get_docstring(node) or node.name.startswith("_"), f"{path.name}: {node.name}"


def test_the_stand_in_has_no_call_that_upstream_has_not() -> None:
    known = {**API["v2"], **API["v1"]}
    checked = 0
    for node in ast.parse(FAKE.read_text()).body:
        if not isinstance(node, ast.ClassDef) or not isinstance(known.get(node.name), dict):
            continue
        for function in (
            each for each in node.body if isinstance(each, ast.FunctionDef) and each.name in known[node.name]
        ):
            if node.name == "EventOverlap":
                continue  # made by DeepEP, not by its users
            mine = [arg.arg for arg in function.args.args if arg.arg != "self"]
            upstream = known[node.name][function.name]["parameters"]
            assert [name for name in upstream if name in mine] == mine, f"{node.name}.{function.name}"
            checked += 1
    assert checked >= 15


TORCH = """\
import json, os, sys
said = [sys.argv[0].rpartition("/")[2], *sys.argv[1:], *(os.environ[name] for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR"))]
print("SEEN " + json.dumps(said))
raise SystemExit(7)
"""


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    ("stack", "kind", "script"),
    [
        ("v1", "example-prefill", "moe_prefill.py"),
        ("v1", "example-decode", "moe_decode.py"),
        ("v2", "example-prefill", "elastic_prefill.py"),
        ("v2", "example-decode", "elastic_decode.py"),
    ],
)
def test_an_example_is_started_by_its_batch_file(stack: str, kind: str, script: str, tmp_path: Path) -> None:
    """Up to `import torch`, with arguments, as one node of one; a torch that is none says so and ends with a code of
    its own."""
    prefix = Prefix(
        tmp_path / "p", modules_support.record(str(tmp_path / "p")), modules_support.v2_record(str(tmp_path / "p"))
    )
    (tmp_path / "torch.py").write_text(TORCH)
    file = kind if stack == "v1" else f"{stack}/{kind}"
    session, seen = prefix.run(f"export PYTHONPATH='{tmp_path}'", file, "--tokens 64")
    assert seen == [script, "--tokens", "64", "1", "0", "127.0.0.1"], session.out + session.err
    assert session.code == 7
