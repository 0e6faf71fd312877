"""A plan in a file is done as it is there or not at all: what changed since is named, and a file that somebody changed
is refused."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from deepep_bootstrap.bootstrap.saved_plan import check_rest, check_same, flags_of, read_plan, save_plan
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.plan.decisions import PlanRequest
from deepep_bootstrap.plan.steps import Plan, make_plan
from tests.support.paths import ROOT
from tests.support.plan import PREFIX, READY, cluster, request

FLAGS = Flags(ROOT, hosts="hosts.txt", prefix=PREFIX, mirror=("https://a/=https://b/",))
OWN = {"skip": "smoke", "archs": ""}
BARE = {"modules.hook": ""}


def saved_at(tmp_path: Path, facts: dict[str, Facts], wanted: PlanRequest | None = None) -> str:
    """Write the plan for a cluster and return its path."""
    wanted = wanted or request()
    path = str(tmp_path / "plan.json")
    save_plan(path, FLAGS, OWN, wanted, make_plan(wanted, facts))
    return path


def test_what_is_written_is_read_again_and_is_the_same_plan(tmp_path: Path) -> None:
    facts = cluster(n001=BARE)
    path = saved_at(tmp_path, facts)
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    saved = read_plan(path)
    check_same(saved, path, request(), make_plan(request(), facts))
    check_rest(saved, path, make_plan(request(), cluster()))
    flags, own = flags_of(saved, Flags(ROOT, yes=True, forks=3), {"skip": "", "archs": ""})
    assert (flags, own) == (replace(FLAGS, yes=True, forks=3), OWN)
    assert list(tmp_path.iterdir()) == [Path(path)]


def test_a_file_that_exists_is_no_word_of_the_folder_it_is_named_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.txt").write_text("n001\n")
    saved = read_plan(saved_at(tmp_path, cluster()))
    assert saved.flags["hosts"] == str(tmp_path / "hosts.txt")


def newer_recipes(wanted: PlanRequest) -> PlanRequest:
    return replace(wanted, recipes={**wanted.recipes, "host/limits.sh": "true\n"})


@pytest.mark.parametrize(
    ("wanted", "facts", "said"),
    [
        (newer_recipes(request()), cluster(n001=BARE), ["recipes/ of this program changed since"]),
        (replace(request(), lock=replace(request().lock, text="x")), cluster(n001=BARE), ["the lock changed since"]),
        (
            request(f"defaults prefix={PREFIX}\nn001\nlogin1 role=login\n"),
            {name: seen for name, seen in cluster(n001=BARE).items() if name != "n002"},
            ["the hosts file changed since", "prefix: in the plan, and not needed any more"],
        ),
        (request(), cluster(), ["n001: MODULEPATH hook: in the plan, and not needed any more"]),
        (
            request(),
            cluster(n001=BARE, n002=BARE),
            [
                "n001: MODULEPATH hook: in the plan, and not needed any more",
                "n[001-002] (2): MODULEPATH hook: needed now",
            ],
        ),
        (
            request(),
            cluster(n001={"modules.hook": "/other/modulefiles"}),
            ["n001: MODULEPATH hook: is for another reason now, or with other inputs — found /other/modulefiles"],
        ),
        (
            request(),
            cluster(n001={**BARE, "slurm.jobs": ("7",)}),
            [
                "build gdrcopy 2.5.1: in the plan, and not needed any more",
                "build host is another now — found n002, wanted n001",
            ],
        ),
    ],
    ids=["recipes", "lock", "host gone", "done already", "more hosts", "another reason", "busy"],
)
def test_what_changed_since_is_named(
    wanted: PlanRequest, facts: dict[str, Facts], said: list[str], tmp_path: Path
) -> None:
    path = saved_at(tmp_path, cluster(n001=BARE))
    with pytest.raises(Trouble) as caught:
        check_same(read_plan(path), path, wanted, make_plan(wanted, facts))
    text = str(caught.value)
    assert [part for part in said if part not in text] == [], text
    assert text.endswith(f"Try: invoke plan --out={path}, and read it again")


def test_what_is_left_after_the_hosts_were_prepared_must_be_in_the_plan_too(tmp_path: Path) -> None:
    path = saved_at(tmp_path, cluster(n001=BARE))
    newer = make_plan(request(), cluster(n001={"gpus": tuple(replace(gpu, capability="10.0") for gpu in READY.gpus)}))
    with pytest.raises(Trouble, match=r"build nvshmem .*: needed now, and not in the plan"):
        check_rest(read_plan(path), path, newer)


def test_a_flag_that_says_something_else_is_refused(tmp_path: Path) -> None:
    saved = read_plan(saved_at(tmp_path, cluster()))
    assert flags_of(saved, Flags(ROOT, prefix=PREFIX), OWN)[0].prefix == PREFIX
    with pytest.raises(
        Trouble, match=r"--prefix: is another than the plan was made with — found /x, wanted /shared"
    ) as caught:
        flags_of(saved, Flags(ROOT, prefix="/x"), {"skip": "all", "archs": ""})
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda text: text.replace("n001", "n003"), "somebody changed it since it was written"),
        (lambda text: text.replace('"schema": 1', '"schema": 2'), "is no plan of this version"),
        (lambda text: text[:100], "is no plan"),
        (lambda text: json.dumps([text]), "is no plan"),
    ],
    ids=["host", "schema", "cut", "no object"],
)
def test_a_file_that_is_not_as_it_was_written_is_refused(edit: Callable[[str], str], said: str, tmp_path: Path) -> None:
    path = Path(saved_at(tmp_path, cluster()))
    path.write_text(edit(path.read_text()))
    with pytest.raises(Trouble, match=said):
        read_plan(str(path))


def test_a_plan_that_is_not_whole_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(Trouble, match="hosts must be prepared before the rest can be planned — found n001: no toolkit"):
        save_plan(str(path), FLAGS, {}, request(), Plan((), None, undecided=(Problem("n001", "no toolkit"),)))
    with pytest.raises(Trouble, match="cannot be written — found No such file"):
        save_plan(str(tmp_path / "no" / "plan"), FLAGS, {}, request(), make_plan(request(), cluster()))
    with pytest.raises(Trouble, match="cannot be read — found No such file"):
        read_plan(str(path))
    assert list(tmp_path.iterdir()) == []
