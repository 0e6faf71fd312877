"""The lock's `[system.<id>]` tables: what a good one becomes, every fault with its table and key, what recipes are
told."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Problem
from deepep_bootstrap.core.toml import Table, load_toml
from deepep_bootstrap.lock import model, packages
from deepep_bootstrap.lock.packages import Repository, System, recipe_env
from tests.support.paths import ROOT
from tests.support.shipped import shipped_lock

REAL = ROOT / "deepep.lock.toml"
PRINT = "0123456789ABCDEF0123456789ABCDEF01234567"
GOOD = f"""
manager = "apt"
build-deps = ["g++", "libc6-dev"]
doca-ofed = ["doca-ofed=3.2.1*"]
python = ["python3.12", "python3.12-dev"]
kernel-headers = ["linux-headers-{{kernel}}"]
cuda-toolkit-12 = ["cuda-toolkit-12-9=12.9.1-1"]
hold = ["linux-image-*"]
by-hand.cuda-toolkit-12 = "the repository of CUDA"

[repository.doca]
url = "https://example.invalid/doca/3.2.1"
suite = "./"
key_url = "https://example.invalid/doca/key.pub"
key_fingerprint = "{PRINT}"
purposes = ["doca-ofed"]

[repository.inner]
url = "file:///srv/debian"
suite = "stable"
components = ["main", "extra"]
key_url = "file:///srv/key.gpg"
key_fingerprint = "{PRINT}"
purposes = ["python", "doca-ofed"]
priority = 100
"""
DOCA = Repository(
    "doca", "https://example.invalid/doca/3.2.1", "https://example.invalid/doca/key.pub", PRINT, ("doca-ofed",), "./"
)
INNER = Repository(
    "inner",
    "file:///srv/debian",
    "file:///srv/key.gpg",
    PRINT,
    ("python", "doca-ofed"),
    "stable",
    ("main", "extra"),
    100,
)


def read(text: str) -> tuple[System, list[str]]:
    problems: list[Problem] = []
    found = packages.read_system("debian-12", Table(load_toml(text, "x.toml"), "x.toml: system.debian-12", problems))
    return found, [str(problem) for problem in problems]


def good() -> System:
    found, problems = read(GOOD)
    assert problems == []
    return found


def test_a_good_table() -> None:
    assert good() == System(
        "debian-12",
        "apt",
        {
            "build-deps": ("g++", "libc6-dev"),
            "cuda-toolkit-12": ("cuda-toolkit-12-9=12.9.1-1",),
            "doca-ofed": ("doca-ofed=3.2.1*",),
            "python": ("python3.12", "python3.12-dev"),
            "kernel-headers": ("linux-headers-{kernel}",),
        },
        ("linux-image-*",),
        (DOCA, INNER),
        {"cuda-toolkit-12": "the repository of CUDA"},
    )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('hold = ["linux', 'hodl = ["linux', "hodl: unknown key, did you mean hold?"),
        ('suite = "./"', 'suite = "./"\nsiute = 1', "repository.doca.siute: unknown key, did you mean suite?"),
        (
            f'"{PRINT}"\npurposes = ["doca-ofed"]',
            '"89ABCDEF"\npurposes = ["doca-ofed"]',
            ".key_fingerprint: is not what belongs here",
        ),
        (
            PRINT,
            "0123 4567 89AB CDEF 0123  4567 89AB CDEF 0123 4567",
            "repository.doca.key_fingerprint: is not what belongs here",
        ),
        (PRINT, PRINT.lower(), "key_fingerprint: is not what belongs here"),
        ('purposes = ["doca-ofed"]', "", "repository.doca.purposes: is empty"),
        (
            'purposes = ["doca-ofed"]',
            'purposes = ["doca"]',
            "repository.doca.purposes: holds something that does not belong there",
        ),
        (
            'suite = "./"',
            'suite = "stable"',
            "repository.doca.components: do not fit the suite — found none, wanted at least one",
        ),
        (
            'suite = "stable"',
            'suite = "/"',
            "repository.inner.components: do not fit the suite — found main extra, wanted none: the suite",
        ),
        ('suite = "./"', "", "repository.doca.suite: is missing"),
        (
            "priority = 100",
            "priority = 1001",
            "repository.inner.priority: is out of range — found 1001, wanted 1 to 1000",
        ),
        (
            "https://example.invalid/doca/3.2.1",
            "ftp://example.invalid/a b",
            "repository.doca.url: is not what belongs here",
        ),
        ("file:///srv/key.gpg", "https://a b/c", "repository.inner.key_url: is not what belongs here"),
        ('"g++"', '"@nvidia:580"', "build-deps: modules (@NAME:STREAM) exist in dnf only"),
        ('"g++"', '"g++ make"', "build-deps: holds something that does not belong there"),
        ('"g++"', '"g++=--force"', "build-deps: holds something that does not belong there"),
        (
            '"linux-headers-{kernel}"',
            '"linux-headers-{release}"',
            "kernel-headers: holds something that does not belong there",
        ),
        ('["linux-image-*"]', '["$(id)"]', "hold: holds something that does not belong there"),
        (
            "by-hand.cuda-toolkit-12",
            "by-hand.doca-ofed",
            "by-hand.doca-ofed: there is a repository for this purpose already",
        ),
        ("by-hand.cuda-toolkit-12", "by-hand.cuda", "by-hand.cuda: unknown key"),
        ('manager = "apt"', 'manager = "dnf"', "repository.doca.suite: unknown key"),
        (
            'suite = "./"',
            'suite = "./"\nmachines = { x86_64 = "x86_64" }',
            "repository.doca.machines: do not fit the addresses, where {machine} stands for it",
        ),
        (
            "example.invalid/doca/3.2.1",
            "example.invalid/doca/3.2.1/{machine}",
            "repository.doca.machines: do not fit the addresses",
        ),
        (
            "example.invalid/doca/3.2.1",
            'example.invalid/{machine}"\nmachines = { arm64 = "sbsa" }\nx = "',
            "repository.doca.machines.arm64: unknown key",
        ),
    ],
)
def test_faults_name_table_and_key(old: str, new: str, said: str) -> None:
    assert old in GOOD
    _, problems = read(GOOD.replace(old, new))
    assert any(problem.startswith(f"x.toml: system.debian-12.{said}") or said in problem for problem in problems), (
        problems
    )


def test_recipes_get_packages_and_repositories_of_their_purpose() -> None:
    assert recipe_env(good(), "doca-ofed", "6.1.0-9-amd64") == {
        "MANAGER": "apt",
        "PACKAGES": "doca-ofed=3.2.1*",
        "HEADERS": "linux-headers-6.1.0-9-amd64",
        "HOLD": "linux-image-*",
        "REPOSITORIES": f"doca https://example.invalid/doca/3.2.1 ./ - https://example.invalid/doca/key.pub {PRINT} 0\n"
        f"inner file:///srv/debian stable main,extra file:///srv/key.gpg {PRINT} 100",
    }
    assert recipe_env(good(), "build-deps", "") == {
        "MANAGER": "apt",
        "PACKAGES": "g++ libc6-dev",
        "HOLD": "linux-image-*",
    }
    assert recipe_env(good(), "python", "")["PYTHON_WANTED"] == "3.12"
    toolkit = recipe_env(good(), "cuda-toolkit-12", "")
    assert (toolkit["CUDA_MAJOR"], toolkit["PACKAGES"], toolkit["BY_HAND"]) == (
        "12",
        "cuda-toolkit-12-9=12.9.1-1",
        "the repository of CUDA",
    )
    assert "HEADERS" not in recipe_env(good(), "doca-ofed", ""), "headers of a kernel that is not known"
    assert "REPOSITORIES" not in recipe_env(replace(good(), repositories=()), "doca-ofed", "")


CUDA = "https://developer.download.nvidia.com/compute/cuda/repos"


@pytest.mark.parametrize(
    ("system", "machine", "address"),
    [
        ("ubuntu-22_04", "x86_64", f"{CUDA}/ubuntu2204/x86_64"),
        ("ubuntu-24_04", "x86_64", f"{CUDA}/ubuntu2404/x86_64"),
        ("ubuntu-24_04", "aarch64", f"{CUDA}/ubuntu2404/sbsa"),
        ("rhel-9", "x86_64", f"{CUDA}/rhel9/x86_64"),
        ("rhel-9", "aarch64", f"{CUDA}/rhel9/sbsa"),
        ("debian-12", "x86_64", f"{CUDA}/debian12/x86_64"),
        ("debian-12", "aarch64", ""),
        ("ubuntu-24_04", "riscv64", ""),
    ],
)
def test_a_host_gets_the_repositories_of_its_kind_of_machine(system: str, machine: str, address: str) -> None:
    row = shipped_lock().systems[system].on(machine)
    lines = [line.split() for line in recipe_env(row, "cuda-toolkit-13", "").get("REPOSITORIES", "").splitlines()]
    assert [line[1] for line in lines] == ([address] if address else [])
    assert all(line[4].startswith(f"{address}/") and "{" not in " ".join(line) for line in lines)
    assert good().on(machine) == good(), "a repository that says nothing of machines is for all"


def test_a_repository_whose_key_nobody_has_noted_is_set_up_by_hand() -> None:
    """And comes like any other as soon as the fingerprint is there."""
    found, problems = read(GOOD.replace(f'"{PRINT}"\npurposes = ["doca-ofed"]', '""\npurposes = ["doca-ofed"]'))
    assert problems == []
    env = recipe_env(found, "doca-ofed", "")
    assert env["REPOSITORIES"].splitlines() == [
        f"inner file:///srv/debian stable main,extra file:///srv/key.gpg {PRINT} 100"
    ]
    assert env["BY_HAND"] == (
        "the repository https://example.invalid/doca/3.2.1 with its signing key https://example.invalid/doca/key.pub "
        "(or note that key's fingerprint in the lock, once: `invoke lock` says how)"
    )
    assert "BY_HAND" not in recipe_env(good(), "doca-ofed", "")


def test_the_shipped_repository_of_doca_waits_for_its_fingerprint() -> None:
    text = REAL.read_text(encoding="utf-8")
    noted = model.parse_lock(text.replace('key_fingerprint = ""', f'key_fingerprint = "{PRINT}"'), "x.toml")
    for name, row in shipped_lock().systems.items():
        for machine, folder in (("x86_64", "x86_64"), ("aarch64", "arm64-sbsa")):
            waiting = recipe_env(row.on(machine), "doca-ofed", "6.8.0")
            assert f"/{folder} with its signing key https://linux.mellanox.com/" in waiting["BY_HAND"], name
            assert "REPOSITORIES" not in waiting
            ready = recipe_env(noted.systems[name].on(machine), "doca-ofed", "6.8.0")
            assert f"/{folder}/GPG-KEY-Mellanox.pub {PRINT} 0" in ready["REPOSITORIES"], name
            assert "BY_HAND" not in ready


def test_without_a_row_a_recipe_knows_nothing_of_packages() -> None:
    assert recipe_env(None, "doca-ofed", "6.1") == {}
    assert recipe_env(None, "cuda-toolkit-13", "6.1") == {"CUDA_MAJOR": "13"}


@pytest.mark.parametrize(
    ("floor", "purpose"),
    [("", "cuda-toolkit-13"), ("13.0", "cuda-toolkit-13"), ("13.1", "cuda-toolkit-13-2"), ("13.9", "cuda-toolkit-13")],
)
def test_a_stack_that_needs_a_newer_toolkit_gets_its_packages(floor: str, purpose: str) -> None:
    """Where none is new enough it is the plain one, which then says what it has not."""
    for row in shipped_lock().systems.values():
        assert packages.toolkit_purpose(row, "13", floor) == purpose
        assert recipe_env(row, purpose, "6.8.0")["CUDA_MAJOR"] == "13"
        assert "REPOSITORIES" in recipe_env(row, purpose, "6.8.0")
    assert packages.toolkit_purpose(None, "13", floor) == "cuda-toolkit-13"


def test_the_rows_that_are_shipped() -> None:
    systems = shipped_lock().systems
    assert set(systems) == {"ubuntu-22_04", "ubuntu-24_04", "debian-12", "rocky-9", "rhel-9"}
    for row in systems.values():
        assert set(row.packages) == set(packages.PURPOSES), row.id
        assert row.manager == ("dnf" if row.id in ("rocky-9", "rhel-9") else "apt")
        for purpose in ("cuda-toolkit-12", "cuda-toolkit-13"):
            env = recipe_env(row, purpose, "6.8.0-50-generic")
            assert "=" in env["PACKAGES"], f"{row.id}: {purpose} has no version"
            assert "REPOSITORIES" in env, f"{row.id}: {purpose} has no repository"
        env = recipe_env(row, "doca-ofed", "6.8.0-50-generic")
        assert env["HEADERS"].endswith("-6.8.0-50-generic")
        assert env["PACKAGES"].startswith("doca-ofed=3.2.1")
        assert ("REPOSITORIES" in env) != ("BY_HAND" in env), row.id
