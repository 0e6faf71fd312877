"""The rules of what fits together: the shipped ones against the shipped lock and against pairs known to break, and
faults of the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from deepep_bootstrap.bootstrap.planning import read_wanted
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.lock import compatibility
from deepep_bootstrap.lock.model import Lock, Stack
from deepep_bootstrap.plan import decisions, steps
from tests.support import doctor as doctor_support
from tests.support import plan as plan_support
from tests.support.paths import ROOT
from tests.support.shipped import demo_lock, shipped_env, shipped_lock

TEXTS = shipped_env()
SHIPPED = shipped_lock()
CLOSURE = SHIPPED.stacks["v1"].wheels["cp312-x86_64"]
PARENT = "29d31c095796f3c8ece47ee9cdcc167051bbeed9"
D4F41E4 = "d4f41e4e93602a15e95f55f6ee8df8f1aaa0e4bb"
NEWER_V2, LAST_V2 = "01dc3aaac82068020353dce2c302e38153c0bfaa", "a56d6156febcd9976e55adc85b5155bfac9f28f8"


def stack(name: str, **changes: Any) -> Lock:
    """Return the shipped lock with one stack alone, changed."""
    return replace(SHIPPED, stacks={name: replace(SHIPPED.stacks[name], **changes)})


def source(found: Lock, name: str, **changes: Any) -> Lock:
    return replace(found, sources={**found.sources, name: replace(found.sources[name], **changes)})


def wheel(found: Lock, name: str, version: str | None) -> Lock:
    """Return the lock with another version of a wheel in every closure, or without it."""

    def changed(one: Stack) -> Stack:
        closures = {
            target: tuple(
                replace(each, version=version or "") if each.name == name else each
                for each in closure
                if version or each.name != name
            )
            for target, closure in one.wheels.items()
        }
        return replace(one, wheels=closures)

    return replace(found, stacks={key: changed(one) for key, one in found.stacks.items()})


BROKEN: dict[str, tuple[Callable[[], Lock], str, str]] = {
    "a newer NVSHMEM with a DeepEP nobody has looked at": (
        lambda: source(stack("v1-wheel"), "deepep-v1", rev="f" * 40),
        "queue pairs",
        (
            "nobody has recorded whether DeepEP 1.2.1 at ffffffffffff has pull-564, which NVSHMEM 3.5.19 from its wheel "
            "needs: NVSHMEM lays"
        ),
    ),
    "a newer NVSHMEM for the legacy half of V2": (
        lambda: wheel(stack("v2"), "nvidia-nvshmem-cu13", "3.5.19"),
        "queue pairs",
        "found DeepEP 2.1.0 at dd758caf4518, NVSHMEM 3.5.19 from its wheel, wanted deepep has pull-696",
    ),
    "a newer NVSHMEM from source": (
        lambda: source(source(stack("v1"), "nvshmem", version="3.5.21"), "deepep-v1", rev="e" * 40),
        "queue pairs",
        "NVSHMEM 3.5.21 from its source",
    ),
    "an NVSHMEM of old": (
        lambda: source(stack("v1"), "nvshmem", version="3.2.5"),
        "since 3.3.9",
        "wanted nvshmem >= 3.3.9",
    ),
    "torch's own NCCL for V2": (
        lambda: wheel(stack("v2"), "nvidia-nccl-cu13", "2.28.9"),
        "NCCL's device side",
        "found nccl 2.28.9, DeepEP 2.1.0",
    ),
    "V2 without an NCCL": (lambda: stack("v2", nccl_wheel=""), "NCCL's device side", "found nccl none"),
    "an old torch for V2": (lambda: wheel(stack("v2"), "torch", "2.9.1"), "torch 2.10", "found torch 2.9.1"),
    "V2.5 with the NCCL of V2": (
        lambda: source(stack("v2"), "deepep-v2", version="2.5.0"),
        "NCCL's headers have since 2.32.3",
        "found nccl 2.30.4, DeepEP 2.5.0 at dd758caf4518, wanted nccl >= 2.32.3",
    ),
    "wheels of another CUDA": (
        lambda: stack("v1", cuda="13"),
        "share one process",
        "found wheels_cuda 12, wanted wheels_cuda is 13",
    ),
    "wheels without CUDA": (
        lambda: stack("v1", wheels={"cp312-aarch64": tuple(each for each in CLOSURE if "nvidia" not in each.name)}),
        "share one process",
        "found wheels_cuda none",
    ),
    "a setuptools too new for torch": (
        lambda: wheel(stack("v2"), "setuptools", "82.0"),
        "before 82",
        "found setuptools 82.0, torch 2.11.0",
    ),
    "V2 without the fence between nodes": (
        lambda: source(stack("v2"), "deepep-v2", substitutes=()),
        "stale rows",
        "DeepEP pull request 715) — found DeepEP 2.1.0 at dd758caf4518, wanted deepep has gin-world-fence",
    ),
    "vLLM's commit of V2 without the fence between nodes": (
        lambda: source(stack("v2-vllm"), "deepep-v2-vllm", substitutes=()),
        "stale rows",
        "DeepEP pull request 715) — found DeepEP 2.0.0 at d4f41e4e9360, wanted deepep has gin-world-fence",
    ),
    "a V2 that nobody has looked at, without the fence": (
        lambda: source(stack("v2"), "deepep-v2", rev="f" * 40, substitutes=()),
        "stale rows",
        "nobody has recorded whether DeepEP 2.1.0 at ffffffffffff has gin-world-fence, which it needs: ",
    ),
    "a setuptools too old for a newer torch": (
        lambda: wheel(wheel(stack("v2"), "torch", "2.14.1"), "setuptools", "77.0.2"),
        "2.13 and newer want",
        "found setuptools 77.0.2, torch 2.14.1, wanted setuptools >= 77.0.3",
    ),
    "no setuptools": (
        lambda: wheel(stack("v1"), "setuptools", None),
        "setup.py needs setuptools",
        "found setuptools none",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_pair_that_breaks_is_refused_with_its_reason(name: str) -> None:
    make, reason, values = BROKEN[name]
    problems = [str(problem) for problem in compatibility.check_lock(make(), TEXTS)]
    found = [text for text in problems if reason in text]
    assert len(found) == 1, problems
    assert values in found[0]
    assert found[0].startswith(f"{SHIPPED.path}: stack.")


def test_what_is_shipped_breaks_no_rule() -> None:
    assert compatibility.check_lock(SHIPPED, TEXTS) == ()
    assert compatibility.check_lock(demo_lock(), TEXTS) == ()


def test_a_commit_that_nobody_has_read_is_told_as_that_and_refused_only_where_it_matters() -> None:
    unread = source(SHIPPED, "deepep-v1", rev="f" * 40)
    (problem,) = compatibility.check_lock(unread, TEXTS)
    assert problem.where == f"{SHIPPED.path}: stack.v1-wheel"
    assert (problem.found, problem.wanted) == ("", "")
    assert (
        problem.try_
        == f"reading it, then writing what it has under [commit.{'f' * 40}] in env/rules/compatibility.toml"
    )
    read = recorded("f" * 40, "pull-564")
    assert compatibility.check_lock(unread, read) == ()
    assert compatibility.unrecorded("f" * 40, read) == compatibility.unrecorded(PARENT, TEXTS) == ""
    assert compatibility.unrecorded("f" * 40, {compatibility.FILE: ""}) == ""
    said = compatibility.unrecorded("f" * 40, TEXTS)
    assert said.startswith("nobody has recorded what this commit has of what the rules ask for (ll-combine-fence, ")


def recorded(rev: str, *has: str) -> dict[str, str]:
    """Return the texts of env/ with one more commit."""
    return {
        **TEXTS,
        compatibility.FILE: f"{TEXTS[compatibility.FILE]}\n[commit.{rev}]\nof = 'another head'\nhas = {list(has)}\n",
    }


@pytest.mark.parametrize("rev", [D4F41E4, NEWER_V2, LAST_V2, SHIPPED.sources["deepep-v2"].rev, "f" * 40])
def test_a_feature_may_come_from_the_commit_or_from_a_substitution(rev: str) -> None:
    (fence,) = [each for each in SHIPPED.sources["deepep-v2"].substitutes if "fence_acq_rel_sys" in each.replacement]
    assert compatibility.check_lock(source(stack("v2"), "deepep-v2", rev=rev, substitutes=(fence,)), TEXTS) == ()
    broken = compatibility.check_lock(source(stack("v2"), "deepep-v2", rev=rev, substitutes=()), TEXTS)
    assert bool(broken) == (rev not in {NEWER_V2, LAST_V2})
    bare = source(stack("v2"), "deepep-v2", rev="f" * 40, substitutes=())
    assert compatibility.check_lock(bare, recorded("f" * 40, "gin-world-fence")) == ()


def test_a_legacy_half_that_knows_the_queue_pairs_suits_a_newer_nvshmem() -> None:
    changed = source(wheel(stack("v2"), "nvidia-nvshmem-cu13", "3.5.19"), "deepep-v2", rev="f" * 40)
    assert compatibility.check_lock(changed, recorded("f" * 40, "pull-696")) == ()
    assert len(compatibility.check_lock(changed, recorded("f" * 40, "pull-564"))) == 1


@pytest.mark.parametrize(
    ("torch", "setuptools", "fits"),
    [
        ("2.10.0", "82.0", True),
        ("2.11.0", "81.0.0", True),
        ("2.12.1", "82.0", False),
        ("2.13.0", "82.0", True),
        ("2.13.0", "77.0.3", True),
        ("2.15.0", "76.1", False),
    ],
)
def test_which_setuptools_suits_which_torch(torch: str, setuptools: str, fits: bool) -> None:
    assert (
        compatibility.check_lock(wheel(wheel(stack("v2"), "torch", torch), "setuptools", setuptools), TEXTS) == ()
    ) == fits


def test_only_the_named_stacks_are_judged() -> None:
    broken = source(SHIPPED, "deepep-v2", version="3.0")
    assert compatibility.check_lock(broken, TEXTS, ("v1",)) == ()
    assert compatibility.check_lock(broken, TEXTS, ("v2", "v1"))


def test_known_commits_work_with_both_kinds_of_queue_pairs() -> None:
    for rev in (PARENT, SHIPPED.sources["deepep-v1"].rev):
        for version in ("3.4.5", "3.5.19", "3.6.5"):
            assert (
                compatibility.check_lock(
                    wheel(source(stack("v1-wheel"), "deepep-v1", rev=rev), "nvidia-nvshmem-cu12", version), TEXTS
                )
                == ()
            )


def site(
    name: str, changed: Lock = SHIPPED, target: str = "cp312-x86_64", **changes: Any
) -> tuple[list[str], tuple[str, ...]]:
    """Judge a stack on hosts that suit it but for `changes`."""
    one = changed.stacks[name]
    given = compatibility.SiteFacts(
        **{"toolkit": {"12": "12.9.86", "13": "13.0.88"}[one.cuda], "archs": ("9.0",), "link_layer": "InfiniBand"}
        | changes
    )
    problems, remarks = compatibility.check_site(changed, one, target, site=given, texts=TEXTS)
    return [str(problem) for problem in problems], remarks


@pytest.mark.parametrize("name", SHIPPED.stacks)
@pytest.mark.parametrize("link", ["", "InfiniBand", "Ethernet"])
def test_every_stack_suits_hosts_of_every_network(name: str, link: str) -> None:
    problems, remarks = site(name, archs=("9.0", "10.0"), link_layer=link)
    assert problems == []
    assert bool(remarks) == (name in {"v2", "v2-vllm"} and link == "Ethernet")


def test_roce_needs_the_substitution() -> None:
    bare = source(SHIPPED, "nvshmem", substitutes=())
    (problem,), _ = site("v1", bare, link_layer="Ethernet")
    assert "Unable to create ah" in problem
    assert (
        "NVSHMEM 3.4.5 from its source, link_layer Ethernet, DeepEP 1.2.1 at 8a07e7e7ed57, wanted nvshmem has ah-attr"
        in problem
    )
    assert site("v1", bare) == site("v1", bare, link_layer="") == ([], ())
    assert site("v1", source(bare, "nvshmem", version="3.5.19"), link_layer="Ethernet") == ([], ())


@pytest.mark.parametrize("archs", [("9.0",), ("9.0", "10.0"), ("10.3",), ("12.0",)])
@pytest.mark.parametrize("name", ["v1", "v1-wheel", "v1-cu13"])
def test_blackwell_needs_the_fence_of_the_low_latency_combine(name: str, archs: tuple[str, ...]) -> None:
    bare = source(SHIPPED, "deepep-v1", substitutes=())
    problems, _ = site(name, bare, archs=archs)
    assert site(name, archs=archs)[0] == []
    unread = source(SHIPPED, "deepep-v1", rev="f" * 40)
    assert not [text for text in site(name, unread, archs=archs)[0] if "fence" in text]
    if archs == ("9.0",):
        assert problems == []
        return
    (problem,) = problems
    assert "(DeepEP issues 700 and 621, pull request 642)" in problem
    assert f"found DeepEP 1.2.1 at 8a07e7e7ed57, compute capability {' and '.join(archs)}, wanted " in problem
    assert "wanted deepep has ll-combine-fence" in problem


def test_the_legacy_half_of_v2_needs_that_fence_too() -> None:
    without = recorded("f" * 40, "gin-world-fence")
    changed = source(SHIPPED, "deepep-v2", rev="f" * 40)
    hosts = compatibility.SiteFacts("13.0.88", ("10.0",), "InfiniBand")
    (problem,), _ = compatibility.check_site(changed, changed.stacks["v2"], "cp312-x86_64", site=hosts, texts=without)
    assert "V2's legacy half returns wrong rows" in str(problem)
    has = recorded("f" * 40, "ll-combine-fence")
    assert compatibility.check_site(changed, changed.stacks["v2"], "cp312-x86_64", site=hosts, texts=has)[0] == ()
    assert site("v2", archs=("10.0",)) == site("v2", changed) == ([], ())
    problems, (remark,) = site("v2", changed, archs=("10.0",))
    assert problems == []
    assert "nobody has recorded whether DeepEP 2.1.0 at ffffffffffff has ll-combine-fence" in remark


def test_a_barrier_that_signals_on_one_context_is_a_remark() -> None:
    fences = SHIPPED.sources["deepep-v2"].substitutes
    alone = tuple(each for each in fences if "num_barrier_slots" not in each.replacement)
    problems, (remark,) = site("v2", source(SHIPPED, "deepep-v2", substitutes=alone))
    assert (problems, site("v2")) == ([], ([], ()))
    assert remark.startswith("stack v2: V2's barrier between nodes signals on one GIN context alone")


def test_a_map_that_deepep_does_not_understand_is_told() -> None:
    assert site("v1", nic_map=True) == site("v1") == ([], ())
    problems, (remark,) = site("v1", source(SHIPPED, "deepep-v1", rev=PARENT), nic_map=True)
    assert (problems, site("v1", source(SHIPPED, "deepep-v1", rev=PARENT))) == ([], ([], ()))
    assert remark.startswith("stack v1: a DeepEP without pull request 466 ignores the map from GPU to NIC")
    _, (remark,) = site("v1", source(SHIPPED, "deepep-v1", rev="f" * 40), nic_map=True)
    told = "nobody has recorded whether DeepEP 1.2.1 at ffffffffffff has pull-466, which the map from GPU to NIC needs"
    assert told in remark


@pytest.mark.parametrize(
    ("archs", "toolkit", "wanted"),
    [
        (("9.0",), "12.3.52", None),
        (("9.0",), "12.2.140", "toolkit >= 12.3"),
        (("9.0", "10.0"), "12.8.93", None),
        (("9.0", "10.0"), "12.6.85", "toolkit >= 12.8"),
        (("12.0",), "12.4.1", "toolkit >= 12.8"),
        (("10.3",), "12.8.93", "toolkit >= 12.9"),
        (("9.0",), "13.0.88", "toolkit_major is 12"),
    ],
)
def test_what_the_toolkit_must_know(archs: tuple[str, ...], toolkit: str, wanted: str | None) -> None:
    problems, _ = site("v1", archs=archs, toolkit=toolkit)
    assert [text.rpartition("wanted ")[2].partition(". Try")[0] for text in problems] == ([wanted] if wanted else [])


def test_an_external_python_is_judged_by_its_torch() -> None:
    assert site("v1-wheel", target="", external_torch="2.4.0") == ([], ())
    problems, _ = site("v2", target="", external_torch="2.9.0+cu130")
    assert [text for text in problems if "found torch 2.9.0+cu130" in text]


@pytest.mark.parametrize("name", ["v2", "v2-vllm"])
@pytest.mark.parametrize(
    ("libraries", "own", "wrong"),
    [
        ({"nccl": "2.30.7", "nvshmem": "3.4.5"}, False, []),
        ({"nccl": "2.31.2", "nvshmem": "3.4.5"}, False, []),
        ({"nccl": "2.29.7", "nvshmem": "3.4.5"}, False, ["NCCL 2.29.7 of the external Python"]),
        ({"nvshmem": "3.4.5"}, False, ["NCCL none of the external Python"]),
        ({"nccl": "2.29.7", "nvshmem": "3.4.5"}, True, []),
        ({"nvshmem": "3.4.5"}, True, []),
        ({"nccl": "2.30.7", "nvshmem": "3.7.2"}, False, ["NVSHMEM 3.7.2 of the external Python"]),
        ({"nccl": "2.29.7", "nvshmem": "3.7.2"}, True, ["NVSHMEM 3.7.2 of the external Python"]),
    ],
)
def test_v2_takes_the_nccl_and_nvshmem_of_an_external_torch(
    name: str, libraries: dict[str, str], own: bool, wrong: list[str]
) -> None:
    """Where they are new enough, and not too new: V2's legacy half does not know NVSHMEM 3.5.19 and newer."""
    problems, _ = site(name, target="", external_torch="2.14.0", external_libraries=libraries, own_nccl=own)
    assert len(problems) == len(wrong), problems
    assert all(each in problem for each, problem in zip(wrong, problems, strict=True))
    if wrong and "NCCL" in wrong[0]:
        assert "wanted torch_nccl >= 2.30.4. Try: a torch of 2.14 or newer in that Python" in problems[0]
        assert problems[0].endswith("or --nccl=own")


def test_an_nccl_of_ours_that_is_too_old_is_refused_too() -> None:
    old = wheel(SHIPPED, "nvidia-nccl-cu13", "2.29.7")
    libraries = {"nccl": "2.30.7", "nvshmem": "3.4.5"}
    problems, _ = site("v2", old, "", external_torch="2.14.0", external_libraries=libraries, own_nccl=True)
    assert ["found nccl 2.29.7" in problem for problem in problems] == [True]


def test_a_plan_is_refused_before_it_is_made() -> None:
    old = {
        "toolkits": (replace(plan_support.READY.toolkits[0], version="12.6.85"),),
        "gpus": (replace(plan_support.GPU, capability="10.0"),),
    }
    with pytest.raises(Trouble, match="nvcc knows Blackwell's architectures"):
        decisions.make_decisions(plan_support.request(), plan_support.cluster(n001=old, n002=old))


BLACKWELL = {"gpus": tuple(replace(plan_support.GPU, index=index, capability="10.0") for index in range(8))}


def test_a_plan_for_b200_without_the_fence_is_refused_and_names_the_issue() -> None:
    facts = plan_support.cluster(n001=BLACKWELL, n002=BLACKWELL)
    wanted = plan_support.request()
    assert steps.make_plan(wanted, facts).choice.record.archs == ("10.0",)
    bare = replace(wanted, lock=source(wanted.lock, "deepep-v1", substitutes=()))
    with pytest.raises(Trouble) as caught:
        steps.make_plan(bare, facts)
    assert "returns wrong rows on Blackwell" in str(caught.value)
    assert "(DeepEP issues 700 and 621, pull request 642)" in str(caught.value)
    assert steps.make_plan(bare, plan_support.cluster()).choice.record.archs == ("9.0",)


def test_a_plan_tells_of_a_map_that_this_deepep_does_not_read() -> None:
    with_nic = {"rdma": (doctor_support.nic(0, "InfiniBand"),)}
    facts = plan_support.cluster(n001=with_nic, n002=with_nic)
    wanted = plan_support.request()
    told = "ignores the map from GPU to NIC"
    assert told not in "\n".join(steps.make_plan(wanted, facts).notes)
    older = replace(wanted, lock=source(wanted.lock, "deepep-v1", rev=PARENT))
    assert told in "\n".join(steps.make_plan(older, facts).notes)
    assert told not in "\n".join(steps.make_plan(older, plan_support.cluster()).notes)


def test_a_broken_stack_is_refused_when_the_lock_is_read(tmp_path: Path) -> None:
    text = (ROOT / "deepep.lock.toml").read_text(encoding="utf-8").replace(SHIPPED.sources["deepep-v1"].rev, "f" * 40)
    (tmp_path / "lock.toml").write_text(text, encoding="utf-8")
    flags = Flags(root=ROOT, lock=str(tmp_path / "lock.toml"), stack="v1-wheel")
    with pytest.raises(Trouble, match="time out between nodes"):
        read_wanted(flags)
    assert read_wanted(replace(flags, stack="v1")).stack.name == "v1"


def rule(needs: str) -> str:
    return f"[[rule]]\nname = 'a'\nneeds = {needs}\nreason = 'r'\nsource = 's'\n"


FAULTS = {
    "[feature.new]\n": "feature.new.of: is missing",
    rule("['nvshmen >= 1']"): "rule[1].needs: is about something unknown — found nvshmen >= 1",
    rule("['nvshmem => 1']"): "rule[1].needs: holds something that does not belong there",
    rule("['deepep lacks pull-1']"): "rule[1].needs: asks for something that nothing here has",
    rule("['deepep has pull-1']"): "rule[1].needs: asks for something that nothing here has",
    rule("['cuda is {x}']"): "rule[1].needs: names something unknown — found cuda is {x}",
    rule("[]"): "rule[1].needs: is missing or empty",
    "[[rule]]\nname = 'a'\nneeds = ['cuda is 12']\nsource = 's'\n": "rule[1].reason: is missing",
    "[commit.abc]\nof = 'x'\n": "commit.abc: this name cannot be used",
    "[other]\n": "other: unknown key",
    "rule = 3\n": "rule: is of the wrong type",
    "[[rule\n": "is not TOML",
}


@pytest.mark.parametrize("text", FAULTS)
def test_a_fault_of_the_file_is_named(text: str) -> None:
    with pytest.raises(Trouble) as caught:
        compatibility.read_rules({compatibility.FILE: text})
    assert any(FAULTS[text] in str(problem) for problem in caught.value.problems), [
        str(problem) for problem in caught.value.problems
    ]
    assert all(problem.where.startswith("env/rules/compatibility.toml") for problem in caught.value.problems)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(Trouble, match=r"env/rules/compatibility\.toml: this file is missing"):
        compatibility.check_lock(SHIPPED, {})


def test_every_shipped_rule_has_a_name_of_its_own_a_reason_and_a_source() -> None:
    rule_set = compatibility.read_rules(TEXTS)
    names = [rule.name for rule in rule_set.rules]
    assert len(set(names)) == len(names)
    for rule in rule_set.rules:
        assert len(rule.reason) > 20, rule.name
        assert len(rule.source) > 5, rule.name


VERSIONS = st.lists(st.integers(0, 99), min_size=1, max_size=4)


@given(VERSIONS, VERSIONS)
def test_versions_compare_as_numbers_do(one: list[int], other: list[int]) -> None:
    def text(parts: list[int]) -> str:
        return ".".join(map(str, parts))

    longest = max(len(one), len(other))
    padded = [parts + [0] * (longest - len(parts)) for parts in (one, other)]
    assert (compatibility.numbers(text(one)) >= compatibility.numbers(text(other))) == (padded[0] >= padded[1])
    assert compatibility.numbers(text(one) + "+cu129") == compatibility.numbers(text(one))
