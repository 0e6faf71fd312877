"""Tuning: what a sweep found best, what a run changes in a document, heat maps, and documents in a prefix under
several writers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from deepep_bootstrap.analysis.results.model import OPERATIONS, Point
from deepep_bootstrap.analysis.tuning import shelf, sweep
from deepep_bootstrap.analysis.tuning.document import NAME, Document, parse_document, render_document
from deepep_bootstrap.analysis.tuning.shelf import read_shelf, store
from deepep_bootstrap.analysis.tuning.sweep import heat_maps
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.prefix.generations import PrefixHandle
from deepep_bootstrap.remote.fleet import ConnectionPool
from deepep_bootstrap.testing import run_folder
from tests.support.build import HERE, RECIPES, make_prefix
from tests.support.examples import most
from tests.support.tuning import MADE, MODULE, ROOT, document, point, real_document, real_sweep, swept

GOLDEN = ROOT / "tests/golden/tuning-h200.json"


# documents


def test_a_real_sweep_gives_exactly_this_document() -> None:
    assert render_document(real_document()) == GOLDEN.read_text()


def test_the_settings_are_what_upstream_called_best() -> None:
    (tested,) = real_sweep()
    for name, setting in real_document().settings.items():
        best = tested.best[name]
        found = (setting.sms, setting.nvl_chunk, setting.rdma_chunk, setting.nvl_gbs, setting.rdma_gbs, setting.us)
        assert found == (best.sms, best.nvl_chunk, best.rdma_chunk, best.nvl_gbs, best.rdma_gbs, best.us)


FLOATS = st.floats(0.001, 1e6)
NAMES = st.text(max_size=12)
POINTS = st.builds(
    Point,
    st.sampled_from(["", *OPERATIONS]),
    st.integers(0, 148),
    st.none() | st.integers(1, 64),
    st.none() | st.integers(1, 64),
    st.none() | FLOATS,
    st.none() | FLOATS,
    FLOATS,
    st.booleans(),
)


@settings(max_examples=most(40))
@given(st.builds(document, us=FLOATS, run=NAMES, deepep=NAMES, stack=NAMES), st.lists(POINTS, max_size=5))
def test_a_document_reads_back_as_it_was_written(written: Document, sweep: list[Point]) -> None:
    written = replace(written, sweep=tuple(sweep))
    assert parse_document(render_document(written), "x") == written


def test_names_of_documents_are_plain_whatever_the_stack_is_called() -> None:
    assert document().key.file == "h200-1n-8r-4096x7168-top8of256-v1.json"
    strange = document(stack="../V 1\n/x", gpu="rtx-pro-6000").key.file
    assert NAME.fullmatch(strange), strange


def test_a_document_cut_anywhere_is_refused_by_its_name() -> None:
    text = render_document(document())
    for end in range(len(text) - 2):
        with pytest.raises(Trouble, match=r"PREFIX/tuning/a\.json"):
            parse_document(text[:end], "PREFIX/tuning/a.json")


BROKEN: dict[str, tuple[Any, ...]] = {
    "another schema": ("schema", 2),
    "nodes as a truth": ("nodes", True),
    "ranks as text": ("ranks", "8"),
    "negative tokens": ("tokens", -4096),
    "no GPU": ("gpu", None),
    "settings as a list": ("settings", []),
    "one operation missing": ("settings", "combine", None),
    "a time of no number": ("settings", "combine", "us", "970"),
    "a sweep of numbers": ("sweep", [1, 2]),
    "a sweep of nothing": ("sweep", None),
    "history of text": ("history", "none"),
    "infinite time": ("settings", "combine", "us", float("inf")),
    "NaN": ("settings", "combine", "nvl_gbs", float("nan")),
}


@pytest.mark.parametrize("steps", BROKEN.values(), ids=BROKEN.keys())
def test_a_document_with_a_wrong_value_is_refused(steps: tuple[Any, ...]) -> None:
    found = json.loads(render_document(document()))
    *path, last, value = steps
    inner = found
    for step in path:
        inner = inner[step]
    inner[last] = value
    with pytest.raises(Trouble, match="no tuning document"):
        parse_document(json.dumps(found), "a.json")


@pytest.mark.parametrize("text", ["", "[]", "null", "7", '"x"', "[" * 100_000, '{"schema": 1}', "\0"])
def test_texts_that_are_no_documents_are_refused(text: str) -> None:
    with pytest.raises(Trouble):
        parse_document(text, "a.json")


# what becomes of a test


def test_dispatch_and_combine_get_one_number_of_sms() -> None:
    # The best of each alone: dispatch with 24 SMs, combine with 20. Together 20 is faster.
    times = {
        ("dispatch_fp8", 24): 500,
        ("dispatch_fp8", 20): 510,
        ("dispatch_bf16", 24): 900,
        ("dispatch_bf16", 20): 905,
        ("combine", 24): 1000,
        ("combine", 20): 950,
    }
    chosen = sweep.choose_settings(
        swept([point(name, sms, 8, us) for (name, sms), us in times.items()], test="intranode"), 8
    )
    assert {name: (setting.sms, setting.us) for name, setting in chosen.items()} == {
        "dispatch_fp8": (20, 510),
        "dispatch_bf16": (20, 905),
        "combine": (20, 950),
    }


def internode(us: float = 1000.0) -> list[Point]:
    """Return a small sweep of all operations: NVL chunk 8 and RDMA chunk 16 are best."""
    return [
        point(name, 24, nvl, us + abs(nvl - 8) + abs(rdma - 16), rdma)
        for name in OPERATIONS
        for nvl in (4, 8, 12)
        for rdma in (8, 16)
    ]


@pytest.mark.parametrize(
    ("nodes", "buffer"), [(2, 512), (3, 720), (4, 512), (6, 720), (8, 512), (12, 720), (16, 512), (18, 720), (20, 720)]
)
def test_internode_settings_have_the_buffers_of_the_test(nodes: int, buffer: int) -> None:
    (found,), _ = sweep.documents([swept(internode())], replace(MADE, nodes=nodes))
    assert (found.key.nodes, found.key.ranks) == (nodes, 8 * nodes)
    for setting in found.settings.values():
        assert (setting.nvl_chunk, setting.nvl_buffer, setting.rdma_chunk, setting.rdma_buffer) == (8, buffer, 16, 128)
        assert buffer % nodes == 0, "the kernels would refuse it"


def test_what_arguments_and_output_say_of_the_shape_is_in_the_key() -> None:
    made = replace(
        MADE, args=("--num-experts=128", "--num-processes", "4", "--num-topk", "6", "--flag", "--test-name", "8x")
    )
    (found,), _ = sweep.documents([swept(internode(), config={"num_tokens": 512, "hidden": 4096, "num_topk": 4})], made)
    key = found.key
    assert (key.ranks, key.tokens, key.hidden, key.topk, key.experts) == (4, 512, 4096, 4, 128), (
        "the output goes before the arguments"
    )


def test_a_default_is_no_setting_and_logs_of_several_nodes_count_once() -> None:
    points = [*internode(), point("combine", 24, None, 1.0)]
    first, second = swept(points), swept([replace(each, us=each.us * 2) for each in points])
    (found,), reasons = sweep.documents([first, second], MADE)
    assert found.settings["combine"].us == 1000.0
    assert not reasons


def test_what_two_ranks_measured_of_a_setting_is_averaged() -> None:
    points = [point("combine", 24, 4, us, 8) for us in (100.0, 300.0)] + [
        point("combine", 24, 8, us, 8) for us in (150.0, 170.0)
    ]
    others = [point(name, 24, 8, 100.0, 8) for name in ("dispatch_fp8", "dispatch_bf16")]
    tested = swept([*points, *others])
    chosen = sweep.choose_settings(replace(tested, best={}), 16)
    assert (chosen["combine"].nvl_chunk, chosen["combine"].us) == (8, 160.0)


NOT_KEPT = {
    "failed": (swept(internode(), ok=False), "failed or did not end"),
    "without settings": (swept(internode(), config={"num_topk": 8}), "does not say num_tokens and hidden"),
    "without combine": (swept([each for each in internode() if each.operation != "combine"]), "no number of SMs"),
}


@pytest.mark.parametrize("name", NOT_KEPT)
def test_half_a_test_gives_no_document_but_a_reason(name: str) -> None:
    tested, words = NOT_KEPT[name]
    found, (reason,) = sweep.documents([tested], MADE)
    assert not found
    assert words in reason


def test_tests_without_a_sweep_are_passed_over() -> None:
    low, second = replace(swept([]), test="low-latency"), replace(swept(internode()), generation="v2")
    assert sweep.documents([low, second], MADE) == ((), ())


def test_how_a_run_was_made_is_read_from_its_folder() -> None:
    values = {"nodes": "n1,n2", "ended": "1700000000.5", "stack": "v1", "deepep": "8a07", "args": "--num-tokens 64"}
    made = sweep.made_by(run_folder.TestRun("r", values, {}), "H200")
    assert made == sweep.Made("H200", 2, "v1", "8a07", "r", 1_700_000_000, ("--num-tokens", "64"))
    assert sweep.made_by(run_folder.TestRun("r", {"ended": "soon"}, {}), "H200").measured == 0


# a document and the runs after it


def merged(*runs: Document) -> tuple[Document, list[str]]:
    kept, states = None, []
    for run in runs:
        one = sweep.merge(kept, run)
        kept = one.document
        states.append(one.state)
    assert kept
    return kept, states


RUNS = {
    "the newest counts": ([(500, 1), (510, 2)], ["new", "replaced"], 510),
    "noise is no slowness": ([(500, 1), (549, 2)], ["new", "replaced"], 549),
    "a disturbed run is only remembered": ([(500, 1), (560, 2)], ["new", "slower"], 500),
    "a faster one after it counts": ([(500, 1), (560, 2), (501, 3)], ["new", "slower", "replaced"], 501),
    "the second slow one proves it": ([(500, 1), (560, 2), (570, 3)], ["new", "slower", "replaced"], 570),
    "and is the measure from then on": (
        [(500, 1), (560, 2), (570, 3), (580, 4)],
        ["new", "slower", "replaced", "replaced"],
        580,
    ),
    "an older run does not count": ([(500, 5), (400, 2)], ["new", "older"], 500),
    "an older run proves nothing": ([(500, 5), (600, 2), (600, 6)], ["new", "older", "slower"], 500),
    "the same run again replaces itself": ([(500, 1), (600, 1)], ["new", "replaced"], 600),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_after_others(name: str) -> None:
    runs, wanted, us = RUNS[name]
    kept, states = merged(*(document(us, f"r{time}", time) for us, time in runs))
    assert states == wanted
    assert kept.settings["combine"].us == us
    assert [past.measured for past in kept.history] == sorted({time for _, time in runs})


def test_the_first_run_of_another_deepep_counts_even_if_slower() -> None:
    _, states = merged(document(500, "r1", 1, "aaa"), document(900, "r2", 2, "bbb"))
    assert states == ["new", "replaced"]


def test_history_stays_small_and_has_the_newest() -> None:
    kept, _ = merged(*(document(500, f"r{time}", time) for time in range(1, 40)))
    assert [past.run for past in kept.history] == [f"r{time}" for time in range(28, 40)]


# heat maps


def test_sms_by_nvl_chunk_where_the_sweep_has_several_sms() -> None:
    points = [point("combine", sms, nvl, 100 + sms + nvl) for sms in (16, 24) for nvl in (2, 4)][:-1]
    (found,) = sweep.heat_maps([*points, point("combine", 24, None, 200.0), point("", 24, 4, 1.0)])
    assert (found.rows_are, found.rows, found.columns, found.fabric) == ("SMs", (16, 24), (2, 4), "NVLink")
    assert found.values == ((100_000 / 118, 100_000 / 120), (100_000 / 126, None))
    assert (found.best, found.default, found.fixed) == ((16, 2), 500.0, "")


def test_rdma_chunk_by_nvl_chunk_where_the_sweep_has_one_number_of_sms() -> None:
    maps = sweep.heat_maps(internode())
    assert [each.operation for each in maps] == list(OPERATIONS)
    for each in maps:
        assert (each.rows_are, each.rows, each.columns, each.fixed) == ("RDMA chunk", (8, 16), (4, 8, 12), "24 SMs")
        assert (each.fabric, each.best, each.values[1][1]) == ("RDMA", (16, 8), 25.0)


def test_one_map_for_each_rdma_chunk_where_both_vary() -> None:
    maps = sweep.heat_maps([point("combine", sms, 4, 100.0 + sms + rdma, rdma) for sms in (16, 24) for rdma in (8, 16)])
    assert [(each.fixed, each.rows, each.best) for each in maps] == [
        ("RDMA chunk 8", (16, 24), (16, 4)),
        ("RDMA chunk 16", (16, 24), (16, 4)),
    ]


@settings(max_examples=most(60))
@given(st.lists(POINTS, max_size=20))
def test_any_sweep_has_maps_without_holes_in_their_form(sweep: list[Point]) -> None:
    for each in heat_maps(sweep):
        assert len(each.values) == len(each.rows)
        assert {len(row) for row in each.values} == {len(each.columns)}
        assert each.best is None or (each.best[0] in each.rows and each.best[1] in each.columns)


# in a prefix


@pytest.fixture
def transport() -> Iterator[ConnectionPool]:
    fleet = ConnectionPool([HERE])
    yield fleet
    fleet.close()


@pytest.fixture
def place(tmp_path: Path) -> PrefixHandle:
    return PrefixHandle(HERE, str(make_prefix(tmp_path)), RECIPES)


def files(place: PrefixHandle) -> set[str]:
    folder = Path(place.prefix) / "tuning"
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} if folder.exists() else set()


@pytest.mark.usefixtures("programs")
def test_the_first_document_brings_the_module_and_without_one_nothing_is_touched(
    transport: ConnectionPool, place: PrefixHandle
) -> None:
    assert shelf.store(transport, place, (), MODULE) == shelf.Stored(())
    assert shelf.read_shelf(transport, place) == shelf.Shelf({}, {})
    assert not (Path(place.prefix) / "tuning").exists()
    new = real_document()
    (kept,) = shelf.store(transport, place, [new], MODULE).kept
    assert (kept.state, kept.document, kept.path) == ("new", new, f"{place.prefix}/tuning/{new.key.file}")
    assert files(place) == {new.key.file, "python/deepep_tuned.py"}
    assert shelf.read_shelf(transport, place).documents == {new.key.file: new}
    modes = {path.stat().st_mode & 0o777 for path in (Path(place.prefix) / "tuning").rglob("*") if path.is_file()}
    assert modes == {0o644}


@pytest.mark.usefixtures("programs")
def test_the_next_run_is_merged_and_the_module_stays_while_it_is_the_same(
    transport: ConnectionPool, place: PrefixHandle
) -> None:
    shelf.store(transport, place, [document(500, "r1", 1)], MODULE)
    module = Path(place.prefix) / "tuning/python/deepep_tuned.py"
    before = module.stat()
    (kept,) = shelf.store(transport, place, [document(600, "r2", 2)], MODULE).kept
    assert (kept.state, kept.document.settings["combine"].us, len(kept.document.history)) == ("slower", 500, 2)
    assert module.stat().st_ino == before.st_ino
    shelf.store(transport, place, [document(500, "r3", 3)], MODULE + "# newer\n")
    assert module.read_text().endswith("# newer\n")


@pytest.mark.usefixtures("programs")
def test_a_file_that_is_no_document_is_named_and_replaced(transport: ConnectionPool, place: PrefixHandle) -> None:
    new = document()
    folder = Path(place.prefix) / "tuning"
    folder.mkdir()
    (folder / new.key.file).write_text('{"schema": 1, "gpu": ')
    (folder / "other.json").write_bytes(b"\xff\xfe")
    for name in ("a\tb.json", "a\nb.json", "-rf.json", "._x.json", "X.json"):
        (folder / name).write_text("{")
    shelf = read_shelf(transport, place)
    assert not shelf.documents
    assert {problem.where.rpartition("/")[2] for problem in shelf.problems} == {new.key.file, "other.json"}
    stored = store(transport, place, [new], MODULE)
    assert [problem.where.rpartition("/")[2] for problem in stored.problems] == [new.key.file]
    assert read_shelf(transport, place).documents == {new.key.file: new}
    assert (folder / "other.json").read_bytes() == b"\xff\xfe", "what is not ours stays"


@pytest.mark.usefixtures("programs")
def test_writers_at_the_same_time_lose_nothing(transport: ConnectionPool, place: PrefixHandle) -> None:
    runs = [document(500 + time, f"r{time}", time) for time in range(1, 7)]
    with ThreadPoolExecutor(len(runs)) as pool:
        states = [
            stored.kept[0].state for stored in pool.map(lambda run: shelf.store(transport, place, [run], MODULE), runs)
        ]
    assert states.count("new") == 1
    (kept,) = shelf.read_shelf(transport, place).documents.values()
    assert {past.run for past in kept.history} == {run.run for run in runs}
    assert kept.run == "r6"
    assert files(place) == {kept.key.file, "python/deepep_tuned.py"}, "no locks and stages are left"


@pytest.mark.usefixtures("programs")
def test_who_may_not_write_is_told_so(transport: ConnectionPool, tmp_path: Path) -> None:
    # Below /tmp itself, since nobody but us may enter the folders of a test.
    folder = Path(shutil.copytree(make_prefix(tmp_path), f"/tmp/tuning-{os.getpid()}"))
    try:
        folder.chmod(0o555)
        place = PrefixHandle(HERE, str(folder), RECIPES, user="nobody" if os.geteuid() == 0 else "")
        with pytest.raises(Trouble, match="settings cannot be kept there"):
            shelf.store(transport, place, [document()], MODULE)
        assert not (folder / "tuning").exists()
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)
