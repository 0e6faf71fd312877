"""What changed between two sides: every difference once, nothing else, and in words that a person understands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from deepep_bootstrap.cli.commands.diff import in_short
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.core.text import shortened
from deepep_bootstrap.inventory.facts import Facts, Toolkit
from deepep_bootstrap.lock import model
from deepep_bootstrap.plan.decisions import PlanRequest, make_decisions, merge_offer
from deepep_bootstrap.prefix import diff, modulefiles
from deepep_bootstrap.prefix.contents import Generation, Holdings, StoreEntry, find_generation, rollback_target
from deepep_bootstrap.prefix.diff import OfferChange, brief, difference, lock_facts
from deepep_bootstrap.prefix.entries import Entry
from deepep_bootstrap.prefix.offer import Offer
from tests.support.paths import ROOT, TESTS
from tests.support.plan import cluster, request
from tests.support.shipped import demo_lock
from tests.support.store import Prefix, entry_name

pytest_plugins = ["tests.support.store"]

DEMO = ROOT / "tests/upstreams/demo.lock.toml"
PLACES = st.tuples(
    st.sampled_from(["source", "wheel", "variable"]), st.sampled_from("ab"), st.sampled_from(["rev", "url", "x"])
)
FACTS = st.dictionaries(PLACES, st.sampled_from(["1", "2", "https://host/a/b"]), max_size=8)


@given(old=FACTS, new=FACTS)
def test_the_difference_is_exactly_what_turns_one_side_into_the_other(old: dict, new: dict) -> None:
    changes = difference(old, new)
    rebuilt = dict(old)
    for change in changes:
        place = (change.what, change.name, change.key)
        assert old.get(place, "") == change.old != change.new
        rebuilt[place] = change.new
    assert {place: text for place, text in rebuilt.items() if text} == new
    assert difference(old, old) == ()
    assert [replace(each, old=each.new, new=each.old, link="") for each in changes] == [
        replace(each, link="") for each in difference(new, old)
    ]
    assert len(list(diff.lines(changes))) >= len(changes)


def changed_lock(tmp_path: Path, *edits: tuple[str, str]) -> tuple[OfferChange, ...]:
    """Return what differs between the demo's lock and an edited one."""
    text = DEMO.read_text()
    for pattern, replacement in edits:
        text, count = re.subn(pattern, replacement, text, count=1, flags=re.DOTALL)
        assert count == 1
    (tmp_path / "new.toml").write_text(text)
    return difference(lock_facts(demo_lock()), lock_facts(model.read_lock_file(tmp_path / "new.toml")))


def test_equal_locks_do_not_differ_whatever_their_comments_say(tmp_path: Path) -> None:
    assert changed_lock(tmp_path, (r"^", "# another comment\n")) == ()


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        ((r'(ref = ")v2\.5\.1', r"\g<1>v2.5.2"), ("source", "gdrcopy", "ref", "v2.5.1", "v2.5.2")),
        (("NVSHMEM_USE_NCCL=OFF", "NVSHMEM_USE_NCCL=ON"), ("option", "nvshmem", "NVSHMEM_USE_NCCL", "OFF", "ON")),
        (
            ("last_modified = 1767225600", "last_modified = 1767312000"),
            ("source", "gdrcopy", "date", "2026-01-01", "2026-01-02"),
        ),
        (('default_stack = "v1"', 'default_stack = "v1-cu13"'), ("lock", "", "default_stack", "v1", "v1-cu13")),
        (("submodules = false", "submodules = true"), ("source", "gdrcopy", "submodules", "False", "True")),
    ],
    ids=["ref", "option", "date", "default", "submodules"],
)
def test_one_edit_of_a_lock_is_one_change(tmp_path: Path, edit: tuple[str, str], expected: tuple[str, ...]) -> None:
    assert changed_lock(tmp_path, edit) == (OfferChange(*expected),)


def test_another_commit_has_a_link_and_another_hash(tmp_path: Path) -> None:
    url = ("https://example.invalid/standin/gdrcopy", "https://example.invalid/standin/gdrcopy")
    old = demo_lock().sources["gdrcopy"]
    new = replace(old, rev="f" * 40, hash="sha256-" + "A" * 43 + "=")
    changes = difference(diff.source_facts("gdrcopy", old), diff.source_facts("gdrcopy", new))
    assert [change.key for change in changes] == ["hash", "rev"]
    assert changes[1].link == f"{url[0]}/compare/{old.rev}...{'f' * 40}"
    elsewhere = difference(
        diff.source_facts("g", old), diff.source_facts("g", replace(new, url="https://example.invalid/other/x"))
    )
    assert {change.link for change in elsewhere} == {""}, "commits of two repositories have no common page"


def test_wheels_that_came_went_and_changed(tmp_path: Path) -> None:
    old = diff.wheel_facts(
        "v1 cp312", [("torch", "2.10.0", "sha256-a"), ("numpy", "2.2.6", "sha256-b"), ("six", "1", "sha256-c")]
    )
    new = diff.wheel_facts(
        "v1 cp312", [("torch", "2.11.0", "sha256-d"), ("numpy", "2.2.6", "sha256-e"), ("sympy", "1.14", "sha256-f")]
    )
    assert list(diff.lines(difference(old, new))) == [
        "wheel v1 cp312",
        "    numpy: 2.2.6 sha256-b → 2.2.6 sha256-e",
        "    six: removed, was 1",
        "    sympy: added, 1.14",
        "    torch: 2.10.0 → 2.11.0",
    ]


def test_generations_differ_in_what_their_entries_were_made_of(prefix: Prefix) -> None:
    source = demo_lock().sources["deepep"]
    inputs = {
        "source": source.hash,
        "version": "1.2.1",
        "options": ["A=1"],
        "archs": ["9.0"],
        "compiler": {"gcc": "12.2.0"},
        "cuda": "12.9",
    }
    old, new = entry_name("deepep", "1"), entry_name("deepep", "2")
    prefix.entry(old, inputs=inputs)
    prefix.entry(
        new,
        inputs=inputs
        | {"archs": ["9.0", "10.0"], "options": ["B=2"], "source": "sha256-unknown", "recipes": {"lib.sh": "1"}},
    )
    prefix.offer(old, profile="h200", environment={"X": "1"}, lock=DEMO.read_text())
    prefix.offer(new, profile="b200", environment={"X": "2"}, by_host={"n1": {"Y": "3"}}, site={"partition": "gpu"})
    holdings = prefix.look(locks=True)
    pinned = {source.hash: source}
    sides = [diff.generation_facts(holdings, find_generation(holdings, number), pinned) for number in (1, 2)]
    found = {(change.what, change.name, change.key): (change.old, change.new) for change in difference(*sides)}
    expected = {
        ("entry", "v1", "deepep"): (old, new),
        ("option", "deepep of v1", "A"): ("1", ""),
        ("option", "deepep of v1", "B"): ("", "2"),
        ("recipe", "deepep of v1", "lib.sh"): ("", "1"),
        ("site", "v1", "partition"): ("", "gpu"),
        ("stack", "v1", "profile"): ("h200", "b200"),
        ("toolchain", "deepep of v1", "archs"): ("9.0", "9.0 10.0"),
        ("variable", "v1", "X"): ("1", "2"),
        ("variable", "v1 on n1", "Y"): ("", "3"),
    }
    assert {place: texts for place, texts in found.items() if place[0] != "source"} == expected
    assert found["source", "deepep of v1", "rev"] == (source.rev, ""), (
        "the lock of generation 1 tells the commit, nothing that of generation 2"
    )
    assert found["source", "deepep of v1", "hash"] == (source.hash, "sha256-unknown")


# In short


def generation(number: int, offer: Offer, entries: dict[str, Entry]) -> tuple[Generation, dict[str, StoreEntry]]:
    manifest = modulefiles.manifest(
        offer, generation=number, created="2026-01-01T00:00:00Z", by="root", lock_digest="0", hosts=("n001",)
    )
    stored = {name: StoreEntry(name, 1, {"inputs": entry.inputs}) for name, entry in entries.items()}
    return Generation(number, json.loads(manifest)), stored


def between(old: PlanRequest, new: PlanRequest, facts: dict[str, Facts]) -> tuple[OfferChange, ...]:
    """Return what differs between a generation that holds what `old` wants and the one that `new` makes of it."""
    first = make_decisions(old, facts)
    second = make_decisions(new, facts)
    offers = (first.offer, merge_offer(new, first.offer, second.record))
    entries = {entry.name: entry for entry in (*first.entries, *second.entries)}
    made = [generation(number, offer, entries) for number, offer in enumerate(offers, 1)]
    holdings = Holdings(2, tuple(each for each, _ in made), made[0][1])
    sources = {source.hash: source for wanted in (old, new) for source in wanted.lock.sources.values()}
    return difference(*(diff.generation_facts(holdings, each, sources) for each in holdings.generations))


def newer_deepep(request: PlanRequest) -> PlanRequest:
    """Return the request with another commit of DeepEP in the lock, and with another partition for jobs."""
    name = request.stack.deepep
    source = replace(request.lock.sources[name], rev="f" * 40, hash="sha256-" + "A" * 43 + "=", version="1.2.2")
    settings = replace(request.inventory.settings, partition="batch")
    inventory = replace(request.inventory, settings=settings)
    return replace(
        request, lock=replace(request.lock, sources={**request.lock.sources, name: source}), inventory=inventory
    )


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("diff-one-stack-more", request(stack="v1-cu13")), ("diff-another-commit", newer_deepep(request()))],
    ids=["one stack more", "another commit"],
)
def test_what_differs_is_told_in_about_ten_lines(name: str, wanted: PlanRequest) -> None:
    if wanted.stack.name == "v1-cu13":
        kit = (Toolkit("/usr/local/cuda", "12.9.86", True, True), Toolkit("/usr/local/cuda-13", "13.0.88", True, True))
        facts = cluster(n001={"toolkits": kit}, n002={"toolkits": kit})
    else:
        facts = cluster()
    changes = between(request(), wanted, facts)
    told = list(in_short(changes))
    assert len(told) < len(list(diff.lines(changes)))
    assert len(told) <= 12
    golden = TESTS / "golden" / "report" / f"{name}.txt"
    # How many facts differ changes with every text of a recipe.
    found = re.sub(r"^[1-9]\d* facts", "N facts", "".join(f"{shortened(line)}\n" for line in told), flags=re.MULTILINE)
    assert found == golden.read_text(encoding="utf-8")


def test_the_same_variable_of_many_hosts_is_one_short_line() -> None:
    old = {("variable", f"v1 on n{number:03}", "NCCL_SOCKET_IFNAME"): "eth0" for number in range(1, 65)}
    new = dict.fromkeys(old, "eth1")
    assert brief(difference(old, new)) == ["~ NCCL_SOCKET_IFNAME: eth0 → eth1 (on n[001-064] (64))"]
    assert brief(difference({}, {("variable", "v1", "X"): "1"}), "n002 joined") == ["+ X=1 (n002 joined)"]


# Which generation is meant


def holdings(*numbers: int, current: int = 0) -> Holdings:
    made = tuple(Generation(number, {"offer": {"stacks": {"v1": {"deepep": entry_name("d")}}}}) for number in numbers)
    return Holdings(current, made, {entry_name("d"): StoreEntry(entry_name("d"), 1)})


@pytest.mark.parametrize(
    ("numbers", "current", "wanted", "target"),
    [((1, 2, 3), 3, 0, 2), ((1, 4, 7), 7, 0, 4), ((1, 2, 3), 2, 3, 3), ((1, 2), 1, 1, 1)],
)
def test_the_generation_that_rollback_means(numbers: tuple[int, ...], current: int, wanted: int, target: int) -> None:
    assert rollback_target(holdings(*numbers, current=current), wanted).number == target


@pytest.mark.parametrize(
    ("numbers", "current", "wanted", "told"),
    [
        (
            (1, 2),
            1,
            0,
            "rollback: there is nothing before the current generation — found generation 1, the oldest there is",
        ),
        ((), 0, 0, "rollback: there is nothing before the current generation — found no generation at all"),
        ((1, 2, 9), 9, 4, "--to: there is no such generation — found 4, wanted 1, 2, 9"),
        (tuple(range(1, 40)), 39, 77, "--to: there is no such generation — found 77, wanted 35, 36, 37, 38, 39"),
        ((), 0, 4, "--to: there is no such generation — found 4, wanted one; there are none"),
    ],
)
def test_a_generation_that_is_not_there_is_told_with_near_ones(
    numbers: tuple[int, ...], current: int, wanted: int, told: str
) -> None:
    with pytest.raises(Trouble) as caught:
        rollback_target(holdings(*numbers, current=current), wanted)
    assert told in str(caught.value)


def test_rollback_names_every_entry_that_is_missing() -> None:
    lost = Holdings(2, holdings(1, 2).generations, {})
    with pytest.raises(Trouble, match=f"generation 1: a store entry it needs is missing — found {entry_name('d')}"):
        rollback_target(lost, 0)


def test_rollback_refuses_a_manifest_it_cannot_read() -> None:
    with pytest.raises(Trouble, match="generation 1: its manifest cannot be read"):
        rollback_target(Holdings(2, (Generation(1, {"offer": []}), Generation(2, {})), {}), 0)
