"""Digests and entry names: what counts, what does not, and values that must never change."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from deepep_bootstrap.core import recipes
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.core.recipes import strip_comments
from deepep_bootstrap.inventory.facts import Facts, Python, Toolkit, TorchLibrary
from deepep_bootstrap.lock.model import Lock, Source, Stack, Substitute, Wheel
from deepep_bootstrap.prefix import entries, offer
from deepep_bootstrap.prefix.entries import EntryInputs, name_entries
from deepep_bootstrap.prefix.offer import Offer, SiteSettings, StackRecord, offer_digest
from tests.support.build import RECIPES
from tests.support.paths import ROOT
from tests.support.shipped import shipped_lock

WHEELS = (
    Wheel("torch", "2.10.0", "pypi", "torch.whl", "sha256-a", 1),
    Wheel("numpy", "2.3.0", "pypi", "numpy.whl", "sha256-b", 2),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=8,
)
INPUTS = st.dictionaries(st.text(), JSON, max_size=5)


def source(name: str) -> Source:
    return Source(
        name,
        f"https://example.invalid/{name}",
        "main",
        "0" * 40,
        f"sha256-{name}",
        1,
        "1.0",
        options=("A=1",),
        checks=("import",),
    )


def wanted(**changes: Any) -> EntryInputs:
    """Return what is wanted of a made-up lock; `changes` replace fields of Wanted."""
    stack = Stack("v1", "deepep", "nvshmem", "gdrcopy", "12", {"cp312-x86_64": WHEELS})
    sources = {name: source(name) for name in ("deepep", "nvshmem", "gdrcopy")}
    given_lock = Lock("lock", 1, "v1", sources, {"v1": stack}, {}, {}, {})
    facts = Facts(
        os_id="ubuntu",
        os_version="24.04",
        machine="x86_64",
        tools=(("gcc", "13.3.0"), ("g++", "13.3.0"), ("cmake", "3.28")),
    )
    toolkit = Toolkit("/usr/local/cuda", "12.9.86", True, True)
    python = Python("/usr/bin/python3.12", "3.12.3")
    base = EntryInputs(
        given_lock,
        stack,
        {name: f"text of {name}\n" for name in RECIPES},
        ("9.0",),
        facts,
        toolkit,
        python,
        "cp312-x86_64",
    )
    return replace(base, **changes)


def external(**changes: str) -> EntryInputs:
    python = Python("/opt/torch/bin/python", "3.12.3", "cpython-312-x86_64-linux-gnu", "2.11.0", "abc", "13.0", "1")
    return wanted(target="", python=replace(python, **changes))


LIBRARIES = (
    TorchLibrary("nccl", "nvidia-nccl-cu13", "2.30.7", "/opt/torch/site-packages/nvidia/nccl"),
    TorchLibrary("nvshmem", "nvidia-nvshmem-cu13", "3.4.5", "/opt/torch/site-packages/nvidia/nvshmem"),
)
NCCL = Wheel("nvidia-nccl-cu13", "2.30.8", "pypi", "nccl.whl", f"sha256-{'A' * 43}=", 3)


def beside_torch(*libraries: TorchLibrary, own_nccl: bool = False) -> EntryInputs:
    """Return what is wanted of a DeepEP V2 for an external Python whose torch brings `libraries`."""
    base = external()
    sources = {**base.lock.sources, "deepep": replace(base.lock.sources["deepep"], version="2.1.0")}
    stack = Stack(
        "v2", "deepep", "", "", "13", {"cp312-x86_64": (*WHEELS, NCCL)}, "nvidia-nvshmem-cu13", "nvidia-nccl-cu13"
    )
    lock = replace(base.lock, sources=sources, stacks={"v2": stack})
    return replace(base, lock=lock, stack=stack, libraries=libraries or LIBRARIES, own_nccl=own_nccl)


def names(asked: EntryInputs) -> dict[str, str]:
    return {entry.kind: entry.name for entry in entries.name_entries(asked)}


def with_source(name: str, **changes: Any) -> EntryInputs:
    base = wanted()
    sources = {**base.lock.sources, name: replace(base.lock.sources[name], **changes)}
    return replace(base, lock=replace(base.lock, sources=sources))


def with_recipe(name: str, text: str) -> EntryInputs:
    base = wanted()
    return replace(base, recipes={**base.recipes, name: text})


def with_facts(**changes: Any) -> EntryInputs:
    base = wanted()
    return replace(base, facts=replace(base.facts, **changes))


def with_wheels(*wheels: Wheel) -> EntryInputs:
    base = wanted()
    return replace(base, stack=replace(base.stack, wheels={"cp312-x86_64": wheels}))


ALL = {"gdrcopy", "nvshmem", "python", "deepep"}
AFTER_NVSHMEM = {"nvshmem", "python", "deepep"}
CHANGES: Mapping[str, tuple[EntryInputs, set[str]]] = {
    "gdrcopy's tree": (with_source("gdrcopy", hash="sha256-other"), ALL),
    "nvshmem's tree": (with_source("nvshmem", hash="sha256-other"), AFTER_NVSHMEM),
    "deepep's tree": (with_source("deepep", hash="sha256-other"), {"deepep"}),
    "deepep's version": (with_source("deepep", version="1.1"), {"deepep"}),
    "deepep's submodules": (with_source("deepep", submodules=True), {"deepep"}),
    "deepep's checks": (with_source("deepep", checks=()), {"deepep"}),
    "a substitute": (with_source("nvshmem", substitutes=(Substitute("f", "a", "b", 1),)), AFTER_NVSHMEM),
    "an option": (with_source("nvshmem", options=("A=2",)), AFTER_NVSHMEM),
    "architectures": (wanted(archs=("9.0", "10.0")), AFTER_NVSHMEM),
    "CUDA": (wanted(toolkit=Toolkit("/usr/local/cuda", "12.8.93", True, True)), ALL),
    "the C compiler": (with_facts(tools=(("gcc", "14.1"), ("g++", "13.3.0"))), ALL),
    "the C++ compiler": (with_facts(tools=(("gcc", "13.3.0"), ("g++", "14.1"))), ALL),
    "the operating system": (with_facts(os_version="22.04"), ALL),
    "the distribution": (with_facts(os_id="debian"), ALL),
    "the machine": (with_facts(machine="aarch64"), ALL),
    "Python": (wanted(python=Python("/usr/bin/python3.12", "3.13.0")), {"python", "deepep"}),
    "Python's path": (wanted(python=Python("/opt/python", "3.12.3")), {"python", "deepep"}),
    "a wheel's hash": (with_wheels(WHEELS[0], replace(WHEELS[1], hash="sha256-c")), {"python", "deepep"}),
    "one wheel less": (with_wheels(WHEELS[0]), {"python", "deepep"}),
    "lib.sh": (with_recipe("lib.sh", "other\n"), ALL),
    "publish.sh": (with_recipe("prefix/publish.sh", "other\n"), ALL),
    "lock.sh": (with_recipe("prefix/lib/lock.sh", "other\n"), ALL),
    "relocate.py": (with_recipe("build/relocate.py", "other\n"), ALL),
    "gdrcopy.sh": (with_recipe("build/gdrcopy.sh", "other\n"), ALL),
    "nvshmem.sh": (with_recipe("build/nvshmem.sh", "other\n"), AFTER_NVSHMEM),
    "python.sh": (with_recipe("build/python.sh", "other\n"), {"python", "deepep"}),
    "deepep.sh": (with_recipe("build/deepep.sh", "other\n"), {"deepep"}),
    "deepep-checks.sh": (with_recipe("build/deepep-checks.sh", "other\n"), {"deepep"}),
}
SAME: Mapping[str, EntryInputs] = {
    "a comment in a recipe": with_recipe(
        "build/nvshmem.sh", "# why\n\n  text of build/nvshmem.sh  # because\n\n".replace("  text", "text")
    ),
    "facts.sh": with_recipe("facts.sh", "other\n"),
    "another tool": with_facts(tools=(("gcc", "13.3.0"), ("g++", "13.3.0"), ("cmake", "4.0"))),
    "the kernel": with_facts(kernel="6.9"),
    "where CUDA lies": wanted(toolkit=Toolkit("/opt/cuda", "12.9.86", True, True)),
    "a patch release of Python": wanted(python=Python("/usr/bin/python3.12", "3.12.9")),
    "the order of wheels": with_wheels(*reversed(WHEELS)),
    "where a tree came from": with_source("deepep", url="https://elsewhere.invalid/deepep", ref="v2"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_an_input_that_counts_changes_these_entries_and_no_others(what: str) -> None:
    asked, changed = CHANGES[what]
    before, after = names(wanted()), names(asked)
    assert {kind for kind in before if before[kind] != after[kind]} == changed


@pytest.mark.parametrize("what", SAME)
def test_an_input_that_does_not_count_changes_no_entry(what: str) -> None:
    assert names(SAME[what]) == names(wanted())


def test_the_reason_of_a_substitution_changes_no_entry() -> None:
    each = Substitute("f", "a", "b", 1, "it is wrong")
    told = with_source("nvshmem", substitutes=(each,))
    untold = with_source("nvshmem", substitutes=(replace(each, reason=""),))
    assert names(told) == names(untold)
    assert "it is wrong" not in json.dumps([dict(entry.inputs) for entry in entries.name_entries(told)])


@pytest.mark.parametrize("key", ["path", "version", "soabi", "torch", "torch_git", "torch_cuda", "torch_abi"])
def test_everything_of_an_external_python_counts(key: str) -> None:
    before, after = names(external()), names(external(**{key: "other"}))
    assert {kind for kind in before if before[kind] != after[kind]} == {"deepep"}


def test_an_external_python_makes_no_python_entry() -> None:
    entries = name_entries(external())
    assert [entry.kind for entry in entries] == ["gdrcopy", "nvshmem", "deepep"]
    assert entries[-1].needs == (entries[1].name,)
    assert "PYTHON_ENTRY" not in entries[-1].env


def test_v2_beside_an_external_python_takes_both_libraries_from_its_torch() -> None:
    """Nothing is built but DeepEP; the places of the libraries go to its recipe."""
    (deepep,) = name_entries(beside_torch())
    assert (deepep.kind, deepep.recipe, deepep.needs) == ("deepep", "deepep-v2", ())
    places = {name: value for name, value in deepep.env.items() if value and name.startswith(("TORCH_", "NCCL"))}
    assert places == {
        "NCCL_VERSION": "2.30.7",
        "TORCH_NCCL": "/opt/torch/site-packages/nvidia/nccl",
        "TORCH_NVSHMEM": "/opt/torch/site-packages/nvidia/nvshmem",
    }


def test_an_nccl_of_ours_is_an_entry_that_v2_needs() -> None:
    nccl, deepep = name_entries(beside_torch(own_nccl=True))
    assert (nccl.kind, nccl.recipe, nccl.version, nccl.wheels) == ("nccl", "nccl-wheel", "2.30.8", (NCCL,))
    assert deepep.needs == (nccl.name,)
    assert (deepep.env["NCCL"], deepep.env["NCCL_VERSION"]) == (nccl.name, "2.30.8")
    assert deepep.env["TORCH_NCCL"] == ""


@pytest.mark.parametrize("key", ["name", "version", "folder"])
@pytest.mark.parametrize("kind", ["nccl", "nvshmem"])
def test_the_libraries_of_an_external_torch_count(kind: str, key: str) -> None:
    """But for the NCCL where ours stands in its place. V1 takes none of them."""
    other = tuple(replace(each, **{key: "other"}) if each.kind == kind else each for each in LIBRARIES)
    assert names(beside_torch(*other)) != names(beside_torch())
    counts = names(beside_torch(*other, own_nccl=True)) != names(beside_torch(own_nccl=True))
    assert counts == (kind == "nvshmem")
    assert names(replace(external(), libraries=other)) == names(external())


def test_entries_come_after_what_they_need() -> None:
    seen: set[str] = set()
    for entry in entries.name_entries(wanted()):
        assert set(entry.needs) <= seen
        assert set(entry.early) <= set(entry.needs)
        seen.add(entry.name)


def test_the_prefix_is_in_no_digest() -> None:
    text = json.dumps([dict(entry.inputs) for entry in entries.name_entries(wanted())])
    assert "prefix/publish.sh" in text
    assert '"prefix"' not in text


def test_recorded_digests() -> None:
    """Stores on disk carry these names: a change here makes every site build everything again."""
    assert recipes.digest({}) == "q97zp54ycklgg72jxh6pq1vk8lh13x2v"
    assert (
        recipes.digest({"b": [1, "é"], "a": None})
        == recipes.digest({"a": None, "b": [1, "é"]})
        == "6rvh0lhf5d246gww7yygl61f2nzih0jr"
    )


@given(INPUTS)
def test_digests_do_not_depend_on_the_order_of_keys(inputs: dict[str, Any]) -> None:
    assert recipes.digest(dict(reversed(inputs.items()))) == recipes.digest(inputs)


@given(INPUTS, INPUTS)
def test_different_inputs_have_different_digests(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert (recipes.digest(one) == recipes.digest(two)) == (
        json.dumps(one, sort_keys=True) == json.dumps(two, sort_keys=True)
    )


@given(INPUTS)
def test_digests_are_32_characters_of_nix_base32(inputs: dict[str, Any]) -> None:
    found = recipes.digest(inputs)
    assert len(found) == 32
    assert set(found) <= set(recipes.NIX_BASE32)


@pytest.mark.parametrize(
    ("text", "stripped"),
    [
        ("a # b\n", "a"),
        ("# whole line\n\n   \n  code  \n", "  code"),
        ("x='# kept' # gone", "x='# kept'"),
        ('x="a # kept" #gone', 'x="a # kept"'),
        ('x="it\'s # kept"', 'x="it\'s # kept"'),
        ("${#array[@]} ${x#y} $# $((16#ff))", "${#array[@]} ${x#y} $# $((16#ff))"),
        ("say \\' # gone", "say \\'"),
        ("x='two\n# kept lines'", "x='two\n# kept lines'"),
        ("#!/bin/sh\n# gone\ncode", "#!/bin/sh\ncode"),
        ("# don't\ncode # isn't\nmore", "code\nmore"),
        ("", ""),
    ],
)
def test_comments_and_blank_lines_are_left_out(text: str, stripped: str) -> None:
    assert strip_comments(text) == stripped


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    "name", [*entries.COMMON_RECIPES, *(name for own in entries.OWN_RECIPES.values() for name in own)]
)
def test_stripped_recipes_still_are_the_same_program(name: str) -> None:
    """Bash prints a function as it understood it: with and without comments it must print the same."""

    def functions(text: str) -> str:
        show = "set +e; PREFIX=/p SCRATCH=/s ENTRY=e TOKEN=t; main() { :; }\n" + text + "\ndeclare -f"
        return subprocess.run(["bash", "-c", show], capture_output=True, text=True, check=False).stdout

    assert functions(RECIPES[name]).count("\n") > 10
    assert functions(strip_comments(RECIPES[name])) == functions(RECIPES[name])


def test_v25_needs_neither_nvshmem_nor_architectures() -> None:
    shipped = shipped_lock()
    sources = {**shipped.sources, "deepep-v2": replace(shipped.sources["deepep-v2"], version="2.5.0")}
    lock = replace(shipped, sources=sources)
    asked = replace(wanted(), lock=lock, stack=shipped.stacks["v2"], recipes=RECIPES, target="cp312-x86_64")
    *_, environment, toolkit, deepep = name_entries(asked)
    assert (toolkit.kind, toolkit.needs, toolkit.recipe) == ("toolkit", (), "")
    assert (deepep.recipe, deepep.needs, deepep.early) == ("deepep-v25", (environment.name,), (environment.name,))
    assert deepep.env["NCCL_VERSION"] == "2.30.4"
    other = name_entries(replace(asked, archs=("9.0",)))[-1]
    assert other.name == deepep.name, "nothing for a GPU is compiled"


def test_every_recipe_of_an_entry_is_in_the_tree() -> None:
    for kind in entries.OWN_RECIPES:
        assert set(entries.recipe_names(kind)) <= set(RECIPES)
    assert entries.RELOCATOR in RECIPES
    assert len({path.replace("/lib/", "/") for path in RECIPES}) == len(RECIPES)


def shipped_names() -> dict[str, list[str]]:
    """Return the entries of the shipped lock by stack and target on one made-up build host; without a target, those
    beside an external Python, of V2 also with --nccl=own."""
    shipped, found = shipped_lock(), {}
    for stack in shipped.stacks.values():
        for target in (*stack.wheels, ""):
            base = wanted() if target else replace(external(), libraries=LIBRARIES)
            machine = target.partition("-")[2] or base.facts.machine
            base = replace(base, facts=replace(base.facts, machine=machine))
            asked = replace(base, lock=shipped, stack=stack, recipes=RECIPES, target=target)
            found[f"{stack.name} {target}".rstrip()] = [entry.name for entry in name_entries(asked)]
            if asked.joins_torch:
                own = name_entries(replace(asked, own_nccl=True))
                found[f"{stack.name} --nccl=own"] = [entry.name for entry in own]
    return found


def test_the_entries_of_the_shipped_lock_have_the_recorded_names() -> None:
    """Another name makes each site build the entry again. A change of the lock or of a recipe's code has new names
    recorded (the JSON text of shipped_names, indent 1); a move of files never does."""
    assert shipped_names() == json.loads((ROOT / "tests/golden/entries.json").read_text(encoding="utf-8"))


def test_each_kind_of_machine_has_entries_of_its_own() -> None:
    names = shipped_names()
    for stack in ("v1-cu13", "v2", "v2-vllm"):
        mine, theirs = (set(names[f"{stack} cp312-{machine}"]) for machine in ("x86_64", "aarch64"))
        assert mine.isdisjoint(theirs)
    assert not any(name.endswith("aarch64") for name in names if name.startswith(("v1 ", "v1-wheel"))), "CUDA 12"


def test_the_shipped_lock_gives_entries_for_every_stack_and_target() -> None:
    shipped = shipped_lock()
    for stack in shipped.stacks.values():
        for target in stack.wheels:
            entries = name_entries(replace(wanted(), lock=shipped, stack=stack, recipes=RECIPES, target=target))
            assert [entry.kind for entry in entries] == [
                *(["gdrcopy"] if stack.gdrcopy else []),
                "nvshmem",
                "python",
                *(["toolkit"] if stack.toolkit else []),
                "deepep",
            ]
            recipes = {entry.kind: entry.recipe or entry.kind for entry in entries}
            assert recipes["nvshmem"] == ("nvshmem-wheel" if stack.nvshmem_wheel else "nvshmem")
            assert recipes["deepep"] == ("deepep-v2" if stack.nccl_wheel else "deepep")


RECORD = StackRecord(
    "v1",
    "deepep/1.2.1-8a07e7e-v1",
    "/p",
    "d",
    "n",
    "g",
    "py",
    "",
    "3.12",
    "/usr/local/cuda",
    ("9.0",),
    "h100",
    {"B": "2", "A": "1"},
    SiteSettings("gpu", "", "", "gpu:8", ("--exclusive",)),
)
OFFER = Offer("v1", {"v1": RECORD}, "templates")


def test_an_offer_survives_its_manifest() -> None:
    text = json.dumps({"schema": 1, "generation": 3, "offer": offer.offer_document(OFFER)})
    found = offer.read_offer(text)
    assert found == OFFER
    assert list(found.stacks["v1"].environment) == ["B", "A"]
    assert offer.offer_digest(found) == offer.offer_digest(OFFER)


def test_any_change_of_an_offer_changes_its_digest() -> None:
    changes = [replace(OFFER, default_stack="v2"), replace(OFFER, templates="other"), replace(OFFER, stacks={})]
    changes += [
        replace(OFFER, stacks={"v1": replace(RECORD, **{key: value})})
        for key, value in (("deepep", "x"), ("archs", ("10.0",)))
    ]
    changes.append(replace(OFFER, stacks={"v1": replace(RECORD, site=SiteSettings("other"))}))
    digests = {offer_digest(offer) for offer in [OFFER, *changes]}
    assert len(digests) == len(changes) + 1


def test_no_manifest_is_no_offer() -> None:
    assert offer.read_offer("") is None
    assert offer.read_offer("\n") is None


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"offer": {}}',
        '{"offer": {"default_stack": "v1", "stacks": {"v1": {}}, "templates": ""}}',
        '{"offer": null}',
    ],
)
def test_a_broken_manifest_is_trouble(text: str) -> None:
    with pytest.raises(Trouble, match="this generation's manifest cannot be read"):
        offer.read_offer(text)
