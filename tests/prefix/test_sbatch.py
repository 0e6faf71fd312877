"""The sbatch files outside Slurm, under real module systems and without one, with a stand-in for upstream's test
script."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from deepep_bootstrap.prefix import modulefiles, test_kinds
from deepep_bootstrap.prefix.offer import StackRecord
from deepep_bootstrap.testing import run_folder
from tests.support import module_systems
from tests.support import modules as support

pytestmark = pytest.mark.usefixtures("programs")

MODULE = "deepep/1.2.1-8a07e7e-v1"
SYSTEMS = ("lmod", "environment-modules")
UTILS = "NAME = 'utils beside the test'\n"
SCRIPT = """\
import json, os, sys
import utils
print("SEEN " + json.dumps({"args": sys.argv[1:], "utils": utils.NAME, "env": dict(os.environ)}))
sys.exit(int(os.environ.get("WANTED_CODE", "0")))
"""


class Prefix:
    """A prefix with a generation and store entries that hold just enough to run."""

    def __init__(self, path: Path, *records: StackRecord) -> None:
        self.path = path
        self.offer = support.offer(str(path), *records)
        support.write(path / "generations" / "1", modulefiles.render_offer(self.offer, support.templates()))
        for name, target in {
            "current": "generations/1",
            "modulefiles": "current/modulefiles",
            "sbatch": "current/sbatch",
        }.items():
            (path / name).symlink_to(target)
        for record in self.offer.stacks.values():
            tests = path / "store" / record.deepep / "tests"
            for name in {
                run.script for kind in test_kinds.KINDS.values() if not kind.ours and (run := kind.run_for(record))
            }:
                (tests / name).parent.mkdir(parents=True, exist_ok=True)
                (tests / name).write_text(SCRIPT)
                (tests / name).with_name("utils.py").write_text(UTILS)
            python = (
                path / "store" / record.python / "bin" / "python" if record.python else Path(record.external_python)
            )
            python.parent.mkdir(parents=True, exist_ok=True)
            python.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} "$@"\n')
            python.chmod(0o755)

    def run(
        self, before: str, kind: str = "intranode", args: str = "", **more: object
    ) -> tuple[module_systems.Session, dict]:
        """Run a test file as a batch job would be, after `before` in the submitting shell; also what the script saw."""
        folder = self.path / "session"
        folder.mkdir(exist_ok=True)
        more["env"] = {"DEEPEP_CACHE_BASE": str(folder), **more.get("env", {})}
        session = module_systems.run(f"{before}\nbash '{self.path}/sbatch/{kind}-test.sbatch' {args}", folder, **more)
        lines = [line for line in session.out.splitlines() if line.startswith("SEEN ")]
        return session, json.loads(lines[0].removeprefix("SEEN ")) if lines else {}


@pytest.fixture
def prefix(tmp_path: Path) -> Prefix:
    return Prefix(tmp_path)


def lists(record: StackRecord) -> dict[str, str]:
    return {
        lead.name: ":".join(lead.entries) for lead in modulefiles.lists(record) if lead.entries and not lead.driver_only
    }


def check_environment(seen: dict, record: StackRecord) -> None:
    for name, value in modulefiles.variables(record):
        assert seen["env"].get(name) == (value or None)
    for name, first in lists(record).items():
        assert seen["env"][name].startswith(first)
        assert seen["env"][name].count("/store/") == first.count("/store/")


SHELLS = {
    "clean environment": {"login": False},
    "login shell": {"login": True},
    "login shell without HOME": {"login": True, "before": "unset HOME USER"},
    "strict shell": {"login": True, "before": "export SHELLOPTS; set -eu"},
    "another stack loaded": {
        "login": True,
        "before": "module use {prefix}/modulefiles; module load deepep/1.2.1-8a07e7e-v1-cu13",
    },
}


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("shell", SHELLS)
def test_the_module_is_found(system: str, shell: str, prefix: Prefix) -> None:
    how = dict(SHELLS[shell])
    before = str(how.pop("before", "")).format(prefix=prefix.path)
    session, seen = prefix.run(before, args="--num-tokens 2048 'a b'", system=system, **how)
    assert session.code == 0, session.out + session.err
    assert f"environment: module {MODULE}" in session.out, session.out
    assert seen["args"] == ["--num-tokens", "2048", "a b"]
    values = Path(session.out.partition("logs and counters: ")[2].partition("\n")[0], "run.env").read_text()
    assert run_folder.of_files("r", {"run.env": values}).args == ("--num-tokens", "2048", "a b")
    assert seen["utils"] == "utils beside the test"
    check_environment(seen, support.record(str(prefix.path)))


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("before", [". {prefix}/current/env.sh", ". {prefix}/current/env-v1-cu13.sh"])
def test_after_an_env_file(system: str, before: str, prefix: Prefix) -> None:
    session, seen = prefix.run(before.format(prefix=prefix.path), system=system, driver=True)
    assert session.code == 0, session.err
    assert "env.sh was read before" in session.out
    check_environment(seen, support.record(str(prefix.path)))
    assert "/store/" not in seen["env"].get("LD_PRELOAD", "")


@pytest.mark.parametrize("login", [False, True])
@pytest.mark.parametrize("before", ["", ". {prefix}/current/env-v1-cu13.sh", "set -eu; export SHELLOPTS"])
def test_without_a_module_system(login: bool, before: str, prefix: Prefix) -> None:
    session, seen = prefix.run(before.format(prefix=prefix.path), login=login)
    assert session.code == 0, session.err
    assert "set by this file" in session.out
    check_environment(seen, support.record(str(prefix.path)))


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_module_of_another_build_is_not_used(system: str, prefix: Prefix) -> None:
    # After a rollback the same name may stand for another build; the batch file in the user's folder keeps to its own.
    record = support.record(str(prefix.path))
    for file in (prefix.path / "generations" / "1" / "modulefiles" / "deepep").glob("1*"):
        file.write_text(
            file.read_text().replace(record.deepep, "another-deepep-1.2.1").replace(record.nvshmem, "another-nvshmem")
        )
    session, seen = prefix.run("", system=system)
    assert "set by this file" in session.out
    check_environment(seen, record)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_module_that_is_gone(system: str, prefix: Prefix) -> None:
    (prefix.path / "modulefiles").unlink()
    session, seen = prefix.run("", system=system)
    assert session.code == 0
    assert "set by this file" in session.out
    check_environment(seen, support.record(str(prefix.path)))


@pytest.mark.parametrize("kind", ["intranode", "low-latency"])
@pytest.mark.parametrize("code", [0, 1, 42])
def test_exit_code_and_rendezvous(kind: str, code: int, prefix: Prefix) -> None:
    session, seen = prefix.run(f"export WANTED_CODE={code}", kind=kind, login=False)
    assert session.code == code
    assert f"ended with exit code {code}" in session.out.splitlines()[-1]
    rendezvous = {name: seen["env"][name] for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR")}
    assert rendezvous == {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    assert 1024 < int(seen["env"]["MASTER_PORT"]) < 65536


def test_intranode_ignores_a_rendezvous_of_others(prefix: Prefix) -> None:
    _, seen = prefix.run("export WORLD_SIZE=4 RANK=3 MASTER_ADDR=elsewhere MASTER_PORT=1", login=False)
    assert (seen["env"]["WORLD_SIZE"], seen["env"]["MASTER_ADDR"]) == ("1", "127.0.0.1")


def test_internode_needs_nodes(prefix: Prefix) -> None:
    session, seen = prefix.run("", kind="internode", login=False)
    assert session.code == 1
    assert "sbatch -N 2 internode-test.sbatch" in session.err
    assert not seen


@pytest.mark.parametrize("kind", ["internode", "low-latency"])
def test_nodes_without_slurm(kind: str, prefix: Prefix) -> None:
    session, seen = prefix.run("export WORLD_SIZE=2 RANK=1 MASTER_ADDR=n1 MASTER_PORT=20001", kind=kind, login=False)
    assert session.code == 0
    assert [seen["env"][name] for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")] == [
        "2",
        "1",
        "n1",
        "20001",
    ]


def test_store_is_not_written_to(prefix: Prefix) -> None:
    prefix.run("", login=False)
    assert not list((prefix.path / "store").rglob("__pycache__"))


@pytest.fixture
def external(tmp_path: Path) -> Prefix:
    record = support.external_record(str(tmp_path), external_python=str(tmp_path / "venv" / "bin" / "python"))
    return Prefix(tmp_path, record)


@pytest.mark.parametrize("system", [*SYSTEMS, ""])
@pytest.mark.parametrize("driver", [False, True])
def test_preload_follows_the_driver(system: str, driver: bool, external: Prefix) -> None:
    record = external.offer.stacks["v1-cu13"]
    session, seen = external.run("", system=system, driver=driver)
    assert session.code == 0, session.out + session.err
    library = f"{external.path}/store/{record.nvshmem}/lib/libnvshmem_host.so.3"
    assert seen["env"].get("LD_PRELOAD") == (library if driver else None)


@pytest.mark.parametrize("system", [*SYSTEMS, ""])
def test_job_from_a_login_node_without_a_driver(system: str, external: Prefix) -> None:
    # The submitting shell has the module loaded, but on a node where nothing is preloaded; the job's node has a driver.
    load = (
        f"module use {external.path}/modulefiles; module load deepep" if system else f". {external.path}/current/env.sh"
    )
    session, seen = external.run(
        f'{load}\n[ -z "${{LD_PRELOAD-}}" ] || exit 9\nmkdir /proc/driver/nvidia', system=system
    )
    assert session.code == 0, session.out + session.err
    assert seen["env"]["LD_PRELOAD"].endswith("/libnvshmem_host.so.3")


@pytest.mark.parametrize("system", [*SYSTEMS, ""])
def test_v2_runs_its_own_test_with_a_cache_on_the_node(tmp_path: Path, system: str) -> None:
    record = support.v2_record(str(tmp_path))
    prefix = Prefix(tmp_path, record)
    session, seen = prefix.run("", system=system)
    assert session.code == 0, session.err
    check_environment(seen, record)
    assert seen["args"] == ["--test-first-only"]
    folder = Path(seen["env"]["EP_JIT_CACHE_DIR"])
    assert (seen["env"]["EP_DISABLE_GIN"], folder.name) == ("1", modulefiles.jit_cache(record))
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]
    session, seen = prefix.run("", args="--num-tokens 128", system=system)
    assert (session.code, seen["args"]) == (0, ["--num-tokens", "128"])
    assert seen["env"]["EP_JIT_CACHE_DIR"] == str(folder), "jobs of one user share it"


@pytest.mark.parametrize("system", [*SYSTEMS, ""])
def test_caches_of_others_are_each_nodes_own(prefix: Prefix, tmp_path: Path, system: str) -> None:
    # The submitting shell was on another node: what the module named there says nothing here, what its user named does.
    home = tmp_path / "home"
    home.mkdir()
    there = f"/tmp/deepep-{os.getuid()}.0123456789/caches"
    before = f"export TRITON_CACHE_DIR={there}/triton DG_JIT_CACHE_DIR=/mine\n"
    session, seen = prefix.run(before + module_systems.on_network_fs(tmp_path, str(home)), system=system)
    assert session.code == 0, session.err
    assert seen["env"]["DG_JIT_CACHE_DIR"] == "/mine"
    folders = {Path(seen["env"][name]) for name in modulefiles.OTHER_CACHES if name != "DG_JIT_CACHE_DIR"}
    assert {folder.parent.name for folder in folders} == {"caches"}
    assert all(folder.is_relative_to(tmp_path / "session") for folder in folders), folders
