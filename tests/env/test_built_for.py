"""What `import deep_ep` says when a wheel of ours meets another torch, CUDA, NVSHMEM or NCCL, with libraries that were
compiled here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepep_bootstrap.cli.commands.wheel import wheel
from deepep_bootstrap.core.toml import load_toml
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.remote.fleet import ConnectionPool
from tests.support import wheel as support
from tests.support.build import HERE, make_prefix
from tests.support.paths import ROOT
from tests.support.store import Prefix

pytestmark = pytest.mark.usefixtures("programs")

FILE = ROOT / "tests/cases/env/built_for.toml"
CASES: list[dict[str, Any]] = load_toml(FILE.read_text(encoding="utf-8"), str(FILE))["case"]
STACKS = {
    "v1": {"source": "deepep-v1", "nvshmem": "source"},
    "v2": {"source": "deepep-v2", "nvshmem": "wheel", "nccl": "2.30.7"},
}
COMMON = {"nvshmem_version": "3.4.5", "cuda": "12.9.86", "torch": "2.10.0"}
SHOW = """
import os, deep_ep
print(os.environ.get("EP_NCCL_ROOT_DIR", ""))
print(*sorted({line.split()[-1] for line in open("/proc/self/maps") if ".so" in line and "nvshmem" in line}))
"""


@pytest.fixture(scope="module")
def wheels(programs: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel of each generation."""
    made = {}
    for name, stack in STACKS.items():
        folder = tmp_path_factory.mktemp(name)
        fleet = ConnectionPool([HERE])
        prefix = Prefix(make_prefix(folder), fleet)
        support.build_stack(prefix, {**COMMON, **stack})
        fleet.close()
        (folder / "dist").mkdir()
        wheel(Flags(root=ROOT, prefix=str(prefix.path)), output=str(folder / "dist"))
        (made[name],) = (folder / "dist").iterdir()
    return made


def run(site: Path, code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", **env},
        cwd=site,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_import_says_what_is_wanted(wheels: dict[str, Path], tmp_path: Path, case: dict[str, Any]) -> None:
    path = wheels[case["generation"]]
    site = tmp_path / "site"
    support.install(path, site)
    if case.get("torch") != "none":
        support.add_torch(site, case.get("torch", "2.10.0+cu128"), case.get("cuda", "12.8"))
    if (version := case.get("nvshmem", "3.4.5")) != "none":
        support.nvshmem(site / "nvidia/nvshmem/lib", version)
    if case["generation"] == "v2":
        support.nccl(site / "nvidia/nccl/lib", case.get("nccl", "2.30.7"))
    env = {}
    if preload := case.get("preload"):
        env["LD_PRELOAD"] = str(support.nvshmem(tmp_path / "other", preload))
    done = run(site, SHOW, **env)
    if case["says"]:
        name = f"deep_ep {path.name.split('-')[1]}"
        assert done.returncode == 1
        wanted = case["says"].replace("@V1@", name).replace("@V2@", name)
        assert done.stderr.splitlines()[-1] == f"ImportError: {wanted}"
        assert "During handling" not in done.stderr
        return
    assert done.returncode == 0, done.stderr
    headers, loaded = done.stdout.splitlines()
    libraries = {Path(each) for each in loaded.split()}
    mine = {site / "nvidia/nvshmem/lib/libnvshmem_host.so.3"}
    if case["generation"] == "v1":
        mine.add(site / "deep_ep.libs/nvshmem_transport_ibgda.so.3")
    assert libraries == mine, "one NVSHMEM, torch's, with the transport that came along"
    assert headers == (str(site / "nvidia/nccl") if case["generation"] == "v2" else "")


def test_nvshmem_gets_the_transport_that_came_along(wheels: dict[str, Path], tmp_path: Path) -> None:
    site = tmp_path / "site"
    support.install(wheels["v1"], site)
    support.add_torch(site, "2.10.0", "12.8")
    host = support.nvshmem(site / "nvidia/nvshmem/lib", "3.4.5")
    # torch's own, without the fix; NVSHMEM asks for it by this name, as its sources do.
    flags = ("-Wl,-soname,nvshmem_transport_ibgda.so.3",)
    support.shared("int nvshmemt_init(void) { return 1; }", host.with_name("nvshmem_transport_ibgda.so.3"), *flags)
    ask = "import ctypes; print(ctypes.CDLL('nvshmem_transport_ibgda.so.3').nvshmemt_init())"
    path = {"LD_LIBRARY_PATH": str(host.parent)}
    assert run(site, ask, **path).stdout == "1\n"
    assert run(site, f"import deep_ep\n{ask}", **path).stdout == "45\n"


def test_a_transport_that_cannot_be_loaded_is_no_matter(wheels: dict[str, Path], tmp_path: Path) -> None:
    site = tmp_path / "site"
    support.install(wheels["v1"], site)
    support.add_torch(site, "2.10.0", "12.8")
    support.nvshmem(site / "nvidia/nvshmem/lib", "3.4.5")
    (site / "deep_ep.libs/nvshmem_transport_ibgda.so.3").unlink()
    done = run(site, "import deep_ep; print(deep_ep.__version__)")
    assert (done.returncode, done.stdout) == (0, "1.2.1\n"), done.stderr
