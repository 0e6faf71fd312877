"""The lock: what a good one becomes, the exact message of every fault, and that nothing else can ever happen."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.utils import canonicalize_name

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.lock import model
from deepep_bootstrap.lock.compatibility import numbers
from deepep_bootstrap.lock.model import Lock, Source, Stack, Substitute, Wheel
from deepep_bootstrap.lock.packages import System
from tests.support.examples import most
from tests.support.paths import TESTS
from tests.support.shipped import demo_lock, shipped_lock

HERE = TESTS
REAL = HERE.parent / "deepep.lock.toml"
DEMO = HERE / "upstreams/demo.lock.toml"
BASE = (HERE / "cases/lock/base.toml").read_text()
CASES = sorted(HERE.glob("cases/lock/*.json"))
EMPTY = "sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="
ABC = "sha256-ungWv48Bz+pBQUDeXa4iI7ADYaOWF3qctBD/YfIAFa0="


def messages(text: str) -> tuple[tuple[Problem, ...], Lock | None]:
    try:
        return (), model.parse_lock(text, "x.toml")
    except Trouble as trouble:
        return trouble.problems, None


def test_a_good_lock() -> None:
    wheels = (
        Wheel("torch", "2.0", "pypi", "torch-2.0-1-cp311-cp311-manylinux_2_28_x86_64.whl", ABC, 7),
        Wheel("typing-extensions", "4.1", "inner", "typing_extensions-4.1-py3-none-any.whl", EMPTY, 0),
    )
    uv = Wheel("uv", "0.9", "pypi", "uv-0.9-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", EMPTY, 1)
    engine = Source(
        name="engine",
        url="https://example.invalid/owner/engine",
        ref="v1.0",
        rev="0123456789abcdef0123456789abcdef01234567",
        hash=EMPTY,
        last_modified=1700000000,
        version="1.0",
        submodules=True,
        options=("WITH_IB=ON", "EMPTY="),
        checks=("import", "device-code"),
        substitutes=(Substitute("src/a.cpp", "old", "new", 2),),
    )
    url, rev = "https://example.invalid/owner/transport", "89abcdef0123456789abcdef0123456789abcdef"
    transport = Source("transport", url, "refs/pull/1/head", rev, ABC, 0, "2.0")
    assert model.parse_lock(BASE, "x.toml") == Lock(
        path="x.toml",
        version=1,
        default_stack="one",
        sources={"engine": engine, "transport": transport},
        stacks={"one": Stack("one", "engine", "transport", "transport", "12", {"cp311-x86_64": wheels})},
        systems={"debian-12": System("debian-12", "apt", {"build-deps": ("g++", "libibverbs-dev")})},
        tools={"uv": (uv,)},
        indexes={"inner": "https://example.invalid/simple"},
        text=BASE,
    )
    assert {str(tag) for tag in wheels[0].tags} == {"cp311-cp311-manylinux_2_28_x86_64"}
    assert {str(tag) for tag in uv.tags} == {"py3-none-manylinux_2_17_x86_64", "py3-none-manylinux2014_x86_64"}
    assert uv.platforms == {"manylinux_2_17_x86_64", "manylinux2014_x86_64"}


def test_a_substitution_may_say_its_reason() -> None:
    text = BASE.replace("count = 2", 'count = 2\nreason = "The old value was never set (issue 7)."')
    (each,) = model.parse_lock(text, "x.toml").sources["engine"].substitutes
    assert each == Substitute("src/a.cpp", "old", "new", 2, reason="The old value was never set (issue 7).")
    assert each.effect == {"file": "src/a.cpp", "text": "old", "replacement": "new", "count": 2}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_faults(case: Path) -> None:
    recorded = json.loads(case.read_text())
    text = BASE
    for old, new in recorded["replace"].items():
        assert old in text, f"{case.name} changes a text that is not in base.toml: {old}"
        text = text.replace(old, new)
    problems, _ = messages(text)
    assert [str(problem) for problem in problems] == recorded["problems"]


def test_faults_of_the_file_itself(tmp_path: Path) -> None:
    with pytest.raises(
        Trouble, match=r"nowhere\.toml: the lock cannot be read: No such file or directory\. Try: --lock=FILE"
    ):
        model.read_lock_file(tmp_path / "nowhere.toml")
    with pytest.raises(Trouble, match="the lock cannot be read: Is a directory"):
        model.read_lock_file(tmp_path)
    (tmp_path / "x.toml").write_bytes(b"version = 1 # \xff")
    with pytest.raises(Trouble, match=r"x\.toml: is not UTF-8 at byte 14"):
        model.read_lock_file(tmp_path / "x.toml")
    (tmp_path / "x.toml").write_text(BASE)
    assert model.read_lock_file(tmp_path / "x.toml") == model.read_lock_file(str(tmp_path / "x.toml"))


@pytest.mark.parametrize(
    ("file", "fits"),
    [
        ("a-1-cp311-cp311-manylinux_2_28_x86_64.whl", True),
        ("a-1-cp311-cp311-linux_x86_64.whl", True),
        ("a-1-cp311-none-any.whl", True),
        ("a-1-py3-none-any.whl", True),
        ("a-1-py2.py3-none-any.whl", True),
        ("a-1-py311-none-manylinux1_x86_64.whl", True),
        ("a-1-cp39-abi3-manylinux_2_17_x86_64.musllinux_1_1_x86_64.whl", True),
        ("a-1-7-cp311-cp311-manylinux2014_x86_64.whl", True),
        ("a-1-cp312-abi3-manylinux_2_17_x86_64.whl", False),
        ("a-1-cp310-cp310-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp311-cp311t-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp311-cp311-musllinux_1_2_x86_64.whl", False),
        ("a-1-cp311-cp311-manylinux_2_28_aarch64.whl", False),
        ("a-1-cp311-cp311-win_amd64.whl", False),
        ("a-1-py2-none-any.whl", False),
    ],
)
def test_which_wheels_install_on_a_target(file: str, fits: bool) -> None:
    entry = f'[{{ name = "a", version = "1", index = "pypi", file = "{file}", hash = "{EMPTY}", size = 1 }}]'
    head, rest = BASE.split("wheels.cp311-x86_64 = [", 1)
    text = f"{head}wheels.cp311-x86_64 = {entry}\n{rest.split(']', 1)[1]}"
    if fits:
        assert model.parse_lock(text, "x.toml").stacks["one"].wheels["cp311-x86_64"][0].file == file
    else:
        with pytest.raises(Trouble) as caught:
            model.parse_lock(text, "x.toml")
        assert (
            str(caught.value)
            == f"x.toml: stack.one.wheels.cp311-x86_64[1].file: this wheel does not install on cp311-x86_64 — found "
            f"{file}"
        )


def every_wheel() -> list[Wheel]:
    """Every wheel file of the shipped lock once."""
    real = shipped_lock()
    closures = [closure for stack in real.stacks.values() for closure in stack.wheels.values()]
    return list(dict.fromkeys(wheel for wheels in (*closures, *real.tools.values()) for wheel in wheels))


def installs_by_name(file: str, target: str) -> bool:
    """Whether a wheel installs on a target, read off its file's name by hand: the meaning that the lock always had."""
    interpreter, machine = target.split("-", 1)
    python, abi, platforms = file.removesuffix(".whl").split("-")[-3:]
    pythons = python.split(".")
    stable = abi == "abi3" and any(
        re.fullmatch(r"cp3[0-9]+", tag) and int(tag[3:]) <= int(interpreter[3:]) for tag in pythons
    )
    pure = abi == "none" and any(tag in ("py3", interpreter, interpreter.replace("cp", "py")) for tag in pythons)
    native = abi == interpreter and interpreter in pythons
    linux = re.compile(rf"(manylinux\w*|linux)_{machine}")
    system = any(tag == "any" or linux.fullmatch(tag) for tag in platforms.split("."))
    return system and (stable or pure or native)


def test_names_versions_and_tags_of_the_shipped_wheels_read_as_they_always_did() -> None:
    wheels = every_wheel()
    assert len(wheels) > 70
    targets = [f"cp3{minor}-{machine}" for minor in range(8, 16) for machine in ("x86_64", "aarch64")]
    for wheel in wheels:
        name, version = wheel.file.split("-")[:2]
        assert canonicalize_name(name) == re.sub(r"[-_.]+", "-", wheel.name).lower(), wheel.file
        assert version == wheel.version, wheel.file
        for target in targets:
            assert model.installs_on(wheel, target) == installs_by_name(wheel.file, target), (wheel.file, target)


def test_versions_of_the_shipped_lock_compare_as_they_always_did() -> None:
    """By the numbers in front, whatever follows; every pair."""

    def by_hand(version: str) -> tuple[int, ...]:
        match = re.match(r"\d+(\.\d+)*", version)
        parts = [int(part) for part in match[0].split(".")] if match else []
        while parts and not parts[-1]:
            parts.pop()
        return tuple(parts)

    real = shipped_lock()
    versions = {each.version for each in (*every_wheel(), *real.sources.values())}
    assert {version: numbers(version) for version in versions} == {each: by_hand(each) for each in versions}


def test_requirements_of_the_shipped_lock_have_their_names() -> None:
    for stack in shipped_lock().stacks.values():
        for requirement in (*stack.asked.python, *stack.asked.overrides):
            assert model.REQUIREMENT.fits(requirement)
            name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
            assert model.requirement_name(requirement) == re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize(
    "text", ["", "a @ https://x/y", "a; python_version > '3'", "-r x", "a==1\n", "a==1\nb", "a ==", "a b", "./a", "a#b"]
)
def test_what_is_no_requirement(text: str) -> None:
    assert not model.REQUIREMENT.fits(text)


def check(text: str) -> None:
    """Whatever the text: a lock, or problems that can be printed."""
    problems, read = messages(text)
    assert isinstance(read, Lock) != bool(problems)
    for problem in problems:
        assert problem.where.startswith("x.toml")
        assert "\n" not in problem.where + problem.found
        str(problem).encode()


@given(st.one_of(st.text(max_size=60), st.text(alphabet="[]{}=\"'.,#\n\\ \t+-_:TZ01ex\r\x00versionu", max_size=60)))
@settings(deadline=None)
def test_any_text(text: str) -> None:
    check(text)


@given(st.lists(st.tuples(st.integers(0, len(BASE)), st.integers(0, 30), st.text(max_size=8)), min_size=1, max_size=3))
@settings(deadline=None, max_examples=most(60))
def test_a_damaged_lock(damages: list[tuple[int, int, str]]) -> None:
    text = BASE
    for start, length, instead in damages:
        text = text[:start] + instead + text[start + length :]
    check(text)


VALUES: Any = st.recursive(
    st.one_of(st.text(max_size=8), st.integers(), st.booleans(), st.floats(), st.dates(), st.just({}), st.just([])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)


def paths_of(value: Any, path: tuple[str | int, ...]) -> list[tuple[str | int, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(each for key, below in inner for each in paths_of(below, (*path, key)))]


@given(st.data())
@settings(deadline=None, max_examples=most(100))
def test_any_value_anywhere(data: st.DataObject) -> None:
    tree = tomlkit.parse(BASE).unwrap()
    *path, last = data.draw(st.sampled_from([path for path in paths_of(tree, ()) if path]))
    inside: Any = tree
    for key in path:
        inside = inside[key]
    inside[last] = data.draw(VALUES)
    check(tomlkit.dumps(tree))


def test_the_lock_that_is_shipped() -> None:
    real = shipped_lock()
    assert set(real.stacks) == {"v1", "v1-wheel", "v1-cu13", "v2", "v2-vllm"}
    assert real.default_stack == "v1"
    assert not real.indexes
    for stack in real.stacks.values():
        assert set(stack.wheels) >= {"cp311-x86_64", "cp312-x86_64", "cp313-x86_64"}
        for target, wheels in stack.wheels.items():
            versions = {wheel.name: wheel.version for wheel in wheels}
            assert {"torch", "numpy", "setuptools", f"nvidia-nvshmem-cu{stack.cuda}"} <= set(versions), target
            assert int(versions["setuptools"].split(".")[0]) < 82
            assert all(wheel.size > 0 for wheel in wheels)
    machines = {
        machine
        for wheel in real.tools["uv"]
        for machine in ("x86_64", "aarch64")
        if wheel.file.endswith(f"{machine}.whl")
    }
    assert machines == {"x86_64", "aarch64"}
    assert {"ubuntu-22_04", "ubuntu-24_04", "debian-12", "rocky-9", "rhel-9"} == set(real.systems)
    for system in real.systems.values():  # NVSHMEM is built with Ninja alone
        assert "ninja-build" in system.packages["build-deps"], system.name


@pytest.mark.parametrize("path", [REAL, DEMO], ids=["shipped", "demo"])
def test_every_substitution_says_its_reason_and_where_it_can_be_read(path: Path) -> None:
    """Its issue, pull request, patch or measurement upstream; for people who read `invoke lock`."""
    for source in model.read_lock_file(path).sources.values():
        for each in source.substitutes:
            where = (source.name, each.file, each.reason)
            assert re.search(r"\b(issues?|pull request) [1-9]|\.patch\b|measured", each.reason), where
            assert each.reason.endswith("."), where


def test_the_stack_for_vllm_is_what_vllm_takes() -> None:
    """torch and its own NCCL and NVSHMEM with nothing put in their place, for both machines; vLLM's commit of DeepEP
    has no st.bulk (counted), and for the barrier the same text as the other pin of V2."""
    real = shipped_lock()
    stack, source = real.stacks["v2-vllm"], real.sources["deepep-v2-vllm"]
    assert stack.asked.overrides == ()
    assert {(target[:5], target[6:]) for target in stack.wheels} == {
        (python, machine) for python in ("cp311", "cp312", "cp313") for machine in ("x86_64", "aarch64")
    }
    for target, wheels in stack.wheels.items():
        versions = {wheel.name: wheel.version for wheel in wheels}
        wanted = {"torch": "2.14.0", "nvidia-nccl-cu13": "2.30.7", "nvidia-nvshmem-cu13": "3.4.5"}
        assert {name: versions[name] for name in wanted} == wanted, target
    of_barrier = tuple(each for each in real.sources["deepep-v2"].substitutes if each.file.endswith("comm.cuh"))
    assert source.substitutes == of_barrier
    assert len(of_barrier) == 3


def test_the_demo_makes_the_substitutions_of_the_shipped_lock() -> None:
    """The stand-in sources hold the same texts; but for one, which names a structure that is NVSHMEM's own."""
    real, demo = shipped_lock().sources, demo_lock().sources
    for name, theirs in (("nvshmem", "nvshmem"), ("deepep", "deepep-v1"), ("deepep-v2", "deepep-v2")):
        other = [each for each in real[theirs].substitutes if not each.file.endswith("ibgda.cpp")]
        assert [each for each in demo[name].substitutes if not each.file.endswith("ibgda.cpp")] == other


def test_a_wheel_shared_by_targets_is_one_file() -> None:
    real = shipped_lock()
    hashes: dict[str, set[str]] = {}
    for wheels in (wheels for stack in real.stacks.values() for wheels in stack.wheels.values()):
        for wheel in wheels:
            hashes.setdefault(wheel.file, set()).add(wheel.hash)
    assert all(len(found) == 1 for found in hashes.values())
