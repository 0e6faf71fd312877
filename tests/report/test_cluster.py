"""The report of a whole cluster: what of hosts, NICs, findings, generations and runs it says, as values, as a page, as
JSON and on a terminal; and the command that looks at all of it."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from deepep_bootstrap.cli.commands.report import report
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.doctor.findings import Finding
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.report import cluster, load, terminal
from deepep_bootstrap.report.cluster import compose_cluster
from tests.cli.test_json_doc import TEXT, keys, merge, shape
from tests.report.test_html import HOSTILE, Reader
from tests.support.cluster import BYTES, FINDINGS, cluster_page, facts, generation, holdings, looked
from tests.support.e2e import Engine
from tests.support.paths import ROOT
from tests.support.report import TEXTS, make_history, report_of

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]


# --- values ----------------------------------------------------------------------------------------------------------------------------


def test_hosts_that_are_alike_stand_together_the_worst_first() -> None:
    found = compose_cluster(looked())
    assert [(kind.hosts, kind.state, kind.why) for kind in found.kinds] == [
        (("n006",), "silent", "see what could not be looked at"),
        (("n004",), "blocked", "ports"),
        (("n005",), "drained", "deepep-bootstrap: reboot for doca-ofed"),
        (("n002",), "waiting", "doca-ofed; warnings: limits"),
        (("n001",), "warned", "limits"),
        (("n003",), "ready", ""),
        (("login1",), "ready", ""),
    ]
    alike = compose_cluster(looked(findings=(), waiting={}, drained={}))
    assert [kind.hosts for kind in alike.kinds if kind.role == "gpu"][1:] == [
        ("n001", "n002", "n003", "n005"),
        ("n004",),
    ]
    node = next(kind for kind in found.kinds if kind.hosts == ("n003",))
    assert node.gpus == "8 × NVIDIA H100 80GB HBM3"
    assert node.driver == "580.95.05, open; GPU memory through dma-buf"
    assert node.nics == "8 of 8 devices active (InfiniBand), OFED 25.10-1.7.1"
    assert node.hook == "this prefix"


@pytest.mark.parametrize(
    ("hook", "said"), [("", "not set up"), ("/shared/other/modulefiles", "another: /shared/other/modulefiles")]
)
def test_a_hook_of_another_prefix_is_said(hook: str, said: str) -> None:
    found = compose_cluster(looked(seen=facts(n001={"modules.hook": hook})))
    assert next(kind.hook for kind in found.kinds if kind.hosts == ("n001",)) == said


def test_the_nic_of_each_gpu_by_hosts_with_the_same_map() -> None:
    first, swapped, down = compose_cluster(looked()).maps
    assert first.hosts == ("n001", "n002", "n005")
    assert [str(lane.nic) for lane in first.lanes] == [f"mlx5_{index}:1" for index in range(8)]
    assert swapped.hosts == ("n003",)
    assert [lane.nic for lane in swapped.lanes][6:] == ["mlx5_7:1", "mlx5_6:1"]
    assert down.left == (("port state DOWN", ("mlx5_7:1",)),)
    assert not any(lane.far for lane in (*first.lanes, *swapped.lanes))
    assert compose_cluster(looked(link="")).maps == ()


def test_a_nic_on_another_numa_node_is_marked() -> None:
    seen = facts()
    gpus = tuple(replace(gpu, numa=1 - gpu.numa) for gpu in seen["n001"].gpus)
    maps = compose_cluster(looked(seen=facts(n001={"gpus": gpus}))).maps
    assert {lane.far for each in maps if each.hosts == ("n001",) for lane in each.lanes} == {True}


def test_generations_and_what_the_store_lacks() -> None:
    found = compose_cluster(looked())
    newest, oldest = found.generations
    assert (newest.number, newest.current, oldest.current) == (2, True, False)
    assert newest.modules == ("deepep/1.2.2-v1", "deepep/1.2.2-v1-cu13")
    assert len(newest.missing) == 1
    assert newest.missing[0].endswith("-nvshmem-3.4.5")
    assert [(each.stack, each.default, each.parts[:2]) for each in found.stacks] == [
        ("v1", True, ("deepep-1.2.1", "nvshmem-3.4.5")),
        ("v1-cu13", False, ("deepep-1.2.1", "nvshmem-3.4.5")),
    ]
    one = compose_cluster(looked(holdings=holdings(generation(1))))
    assert one.generations[0].bytes == BYTES
    nothing = compose_cluster(looked(holdings=holdings()))
    assert (nothing.stacks, nothing.generations, nothing.current) == ((), (), None)
    assert "Nothing is offered yet" in cluster_page(looked(holdings=holdings()))


def test_a_manifest_with_values_of_other_kinds_costs_its_words_alone() -> None:
    odd = replace(generation(1, archs=7), manifest={**generation(1, archs=7).manifest, "hosts": 5, "by": None})
    found = compose_cluster(looked(holdings=holdings(odd)))
    assert (found.stacks[0].archs, found.generations[0].hosts) == ((), "")
    broken = replace(odd, manifest={})
    assert "its manifest cannot be read" in cluster_page(looked(holdings=holdings(broken)))


@pytest.mark.parametrize(
    ("changes", "state", "words"),
    [
        ({}, "passed", "no finding, no host waits, no test failed"),
        ({"findings": FINDINGS[2:]}, "passed", "the doctor has 1 note"),
        ({"findings": FINDINGS[1:]}, "below", "the doctor has 1 warning, 1 note"),
        ({"findings": FINDINGS}, "failed", "the doctor has 1 blocking, 1 warning, 1 note"),
        ({"waiting": {"n002": "x"}}, "below", "n002 waits for a reboot"),
        ({"runs": (report_of("failed"),)}, "below", "the last low-latency test of v1 failed"),
        ({"problems": (Problem("p", "cannot be read"),)}, "below", "no finding"),
    ],
)
def test_one_verdict_of_all(changes: dict[str, Any], state: str, words: str) -> None:
    nothing = {"findings": (), "waiting": {}, "drained": {}, "problems": ()}
    every = {**facts(), "n006": facts()["n001"]}
    found = compose_cluster(looked(seen=every, **{**nothing, **changes}))
    assert found.state == state
    assert found.why.startswith(words)


def test_a_host_that_does_not_answer_is_the_first_thing_said() -> None:
    found = compose_cluster(looked())
    assert found.state == "failed"
    assert found.why.startswith("no answer from n006; ")


def test_passwords_of_addresses_are_nowhere() -> None:
    token = "hf_" + "a1B2" * 8
    secret = f"invoke bootstrap --mirror=https://me:{token}@example.invalid/"
    finding = Finding("x", "warning", ("n001",), secret, secret, "why", secret)
    what = looked(findings=(finding,), drained={"n005": secret}, problems=(Problem("n006", secret),))
    found = compose_cluster(what)
    assert token not in cluster_page(what) + json.dumps(cluster.as_json(found))
    assert "[removed]" in cluster_page(what)


# --- the page --------------------------------------------------------------------------------------------------------------------------


def test_the_page_is_whole_loads_nothing_and_says_everything() -> None:
    page = cluster_page(looked(runs=(report_of("failed"), report_of("healthy"))))
    read = Reader(page)
    assert (read.wrong, read.open) == ([], [])
    assert not {"script", "link", "img", "iframe", "object", "form"} & {tag for tag, _ in read.elements}
    for tag, attributes in read.elements:
        assert not {"src", "srcset", "style", "action"} & set(attributes), (tag, attributes)
        assert attributes.get("href", "#").startswith("#"), (tag, attributes)
    policies = [each["content"] for tag, each in read.elements if each.get("http-equiv") == "Content-Security-Policy"]
    assert re.fullmatch(r"default-src 'none'; style-src 'sha256-[^']+'; base-uri 'none'; form-action 'none'", *policies)
    ids = Counter(attributes["id"] for _, attributes in read.elements if "id" in attributes)
    assert set(ids.values()) == {1}
    assert {each["href"].removeprefix("#") for _, each in read.elements if "href" in each} <= set(ids)
    for words in (
        "Something blocks",
        "6 of 7",
        "generation 2, 2 stacks",
        "n[001-002,005] (3)",
        "mlx5_7:1 (port state DOWN)",
        "mlx5_7:1 is DOWN",
        "Try: the cable",
        "deepep/1.2.2-v1-cu13",
        "queue pairs do not connect",
        "not in the store",
        "n006: does not answer",
    ):
        assert words in read.text, words


def test_every_text_of_a_host_is_escaped() -> None:
    record = {
        "module": HOSTILE,
        "python_version": HOSTILE,
        "cuda_home": HOSTILE,
        "archs": [HOSTILE],
        "profile": HOSTILE,
    }
    finding = Finding(HOSTILE, "warning", ("n001",), HOSTILE, HOSTILE, HOSTILE, HOSTILE, (HOSTILE,))
    seen = facts(n001={"os_name": HOSTILE, "kernel": HOSTILE, "modules.hook": HOSTILE, "slurm.state": HOSTILE})
    run = report_of(
        "failed", edit=lambda files: files.update({"run.env": f"kind={HOSTILE}\nstack={HOSTILE}\ncode=1\n"})
    )
    page = cluster_page(
        looked(
            seen=seen,
            runs=(run,),
            findings=(finding,),
            holdings=holdings(generation(1, **record)),
            waiting={"n002": HOSTILE},
            drained={"n005": HOSTILE},
            profile=HOSTILE,
            problems=(Problem("n006", HOSTILE),),
        )
    )
    read = Reader(page)
    assert (read.wrong, read.open) == ([], [])
    assert not {"script", "img"} & {tag for tag, _ in read.elements}
    assert "\u202e" not in page
    assert page.count("&lt;script&gt;") >= 15


# --- JSON and terminal -----------------------------------------------------------------------------------------------------------------


def test_the_document_is_as_docs_say() -> None:
    found = compose_cluster(looked(runs=(report_of("failed"),)))
    document = json.loads(json.dumps(cluster.as_json(found)))
    example = json.loads(
        re.findall(r"```json\n(.*?)```", TEXT.partition("### The report of a cluster")[2], re.DOTALL)[0]
    )
    free = {"nics", "unused"}
    assert set(document) | {"schema", "verb", "exit", "errors", "html"} == set(example)
    for key in document:
        merge(shape(document[key], free), shape(example[key], free))
    explained = set(re.findall(r"`([a-z_]+)`", re.sub(r"```json.*?```", "", TEXT, flags=re.DOTALL)))
    assert set(keys(example, free)) - explained == set()


def test_the_terminal_has_it_in_short(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.show_cluster(Screen("report"), compose_cluster(looked(runs=(report_of("failed"),))))
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "login1,n[001-006] (7): something blocks"
    assert "  n004: blocked (ports)" in out
    assert "  wait for a reboot: n002 (doca-ofed)" in out
    assert "  deepep/1.2.2-v1 (what `module load deepep` gives)" in out
    assert re.search(r"  low-latency of v1: failed \(failed\)", out)
    assert "\x1b" not in out


# --- the command -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"run": "x"}, "is not that of a run"),
        ({"bundle": True}, "a bundle is not the report of a run or a cluster"),
        ({}, "no hosts named"),
        ({"html": "/nonexistent/x.html"}, "its folder is not there"),
    ],
)
def test_what_does_not_go_together_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(Trouble, match=words):
        report(Flags(ROOT), cluster=True, **given)


@pytest.mark.usefixtures("programs")
def test_the_last_run_of_each_kind_and_stack(tmp_path: Path) -> None:
    from deepep_bootstrap.inventory.survey import open_connections, read_tree
    from deepep_bootstrap.prefix.access import HERE, HERE_ALONE
    from deepep_bootstrap.prefix.generations import PrefixHandle

    runs = tmp_path / "logs" / "tests"
    runs.mkdir(parents=True)
    make_history(runs, "healthy", (0.97, 1.02))
    for number, name in enumerate(sorted(path.name for path in runs.glob("healthy-*"))):
        (runs / name).rename(runs / f"2026110{number}T0000Z-internode")
    (runs / "healthy").rename(runs / "20261120T1840Z-internode")
    make_history(runs, "failed", ())
    (runs / "failed").rename(runs / "20261122T0000Z-low-latency")
    broken = runs / "20261123T0000Z-pairs"
    broken.mkdir()
    (broken / "run.env").write_text("kind=pairs\nstack=v1\n")
    with open_connections(Flags(ROOT), HERE_ALONE) as transport:
        store = load.PrefixRuns(transport, PrefixHandle(HERE, str(tmp_path), read_tree(ROOT / "recipes")))
        found, problems = load.last_of_each(store, TEXTS)
    assert problems == ()
    assert [(each.run.name, each.verdict.value, len(each.past)) for each in found] == [
        ("20261122T0000Z-low-latency", "failed", 0),
        ("20261120T1840Z-internode", "passed", 2),
        ("20261123T0000Z-pairs", "not ended", 0),
    ]


@pytest.mark.e2e
def test_the_embedded_cluster_as_a_page(engine: Engine, tmp_path: Path) -> None:
    empty = engine.run("report", "--cluster", f"--lock={engine.lock}", f"--html={tmp_path}/before.html")
    assert empty.code == 0, empty.text
    assert "Nothing is offered yet" in (tmp_path / "before.html").read_text()
    engine.use_built()
    done = engine.run("bootstrap")
    assert done.code == 0, done.text
    tested = engine.run("test", "--kind=intranode")
    assert tested.code == 0, tested.text
    ended = engine.run("report", "--cluster", f"--lock={engine.lock}", f"--html={tmp_path}/after.html")
    assert ended.code == 0, ended.text
    read = Reader((tmp_path / "after.html").read_text())
    assert (read.wrong, read.open) == ([], [])
    for words in ("3 of 3", "login1", "n[001-002] (2)", "mlx5_", "intranode", "passed", "generation 1"):
        assert words in read.text, words
    document = engine.json("report", "--cluster", f"--lock={engine.lock}")
    assert [run["kind"] for run in document["runs"]] == ["intranode"]
    assert {name for kind in document["kinds"] for name in kind["hosts"]} == {"n001", "n002", "login1"}
