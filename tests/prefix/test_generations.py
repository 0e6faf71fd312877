"""The prefix as a whole: made once, proved to be shared, its generations, the logs, and the session of a build."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from deepep_bootstrap.bootstrap import build
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.prefix import generations
from deepep_bootstrap.prefix.generations import Content, PrefixHandle
from deepep_bootstrap.remote.fleet import ConnectionPool
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Job, Reply
from tests.support.build import FAST, HERE, RECIPES, make_prefix, run_bash, script, start_bash, until, values

pytestmark = pytest.mark.usefixtures("programs")

INIT = script(*generations.INIT)
OFFER = script(*generations.OFFER)
SESSION = script(*build.SESSION)
RECEIVE = script("lib.sh", "prefix/receive.sh")
NOBODY = "nobody" if os.geteuid() == 0 else ""


@pytest.fixture
def transport() -> Iterator[ConnectionPool]:
    fleet = ConnectionPool([HERE])
    yield fleet
    fleet.close()


def place(folder: Path) -> PrefixHandle:
    return PrefixHandle(HERE, str(folder), RECIPES)


def offer_tar(text: str = "one") -> bytes:
    files = [
        Content(
            "manifest.json", json.dumps({"schema": 1, "generation": 0, "offer": {"generation": 0}}, indent=2).encode()
        ),
        Content("modulefiles/deepep/1.2.1-8a07e7e-v1", text.encode()),
        Content("sbatch/internode-test.sbatch", b"#!/bin/bash\n", executable=True),
    ]
    return b"".join(generations.tar_files(files))


def offer(prefix: Path, base: int, token: str = "t", data: bytes = b"") -> subprocess.CompletedProcess[str]:
    return run_bash(
        OFFER, {"PREFIX": str(prefix), "TOKEN": token, "BASE": str(base), "HEARTBEAT": FAST}, data=data or offer_tar()
    )


def names(prefix: Path) -> set[str]:
    return {path.name for path in prefix.iterdir()} | {
        f"generations/{path.name}" for path in (prefix / "generations").iterdir()
    }


# init.sh


def test_init_makes_the_prefix_once(tmp_path: Path, transport: ConnectionPool) -> None:
    prefix = tmp_path / "a/b c/prefix"
    first = generations.prepare_prefix(transport, place(prefix))
    assert len(first) == 32
    assert names(prefix) == {".id", "store", "generations", "logs"}
    assert {path.stat().st_mode & 0o777 for path in (prefix, prefix / "store")} == {0o755}
    assert generations.prepare_prefix(transport, place(prefix)) == first


def test_init_at_the_same_time_gives_one_id(tmp_path: Path) -> None:
    def one(number: int) -> str:
        return values(run_bash(INIT, {"PREFIX": str(tmp_path / "prefix"), "TOKEN": f"t{number}"}).stdout)["id"]

    with ThreadPoolExecutor(8) as pool:
        ids = set(pool.map(one, range(8)))
    assert len(ids) == 1
    assert names(tmp_path / "prefix") == {".id", "store", "generations", "logs"}


def test_init_refuses_a_file(tmp_path: Path, transport: ConnectionPool) -> None:
    (tmp_path / "prefix").write_text("")
    with pytest.raises(Trouble, match="prefix exists and is not a directory"):
        generations.prepare_prefix(transport, place(tmp_path / "prefix"))
    with pytest.raises(Trouble, match="prefix exists and is not a directory"):
        generations.prepare_prefix(transport, place(tmp_path / "prefix/below"))


@pytest.mark.parametrize("prefix", ["relative/path", "/"])
def test_init_refuses_what_is_no_absolute_path(prefix: str) -> None:
    done = run_bash(INIT, {"PREFIX": prefix, "TOKEN": "t"})
    assert done.returncode == 1
    assert "must be an absolute path below /" in done.stderr


def test_init_says_who_may_not_write(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tmp_path, f"/tmp/init-{os.getpid()}"))
    try:
        folder.chmod(0o555)
        done = run_bash(INIT, {"PREFIX": f"{folder}/prefix", "TOKEN": "t"}, user=NOBODY)
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)
    assert done.returncode == 1
    assert f"may not write in {folder} (owner " in done.stderr
    assert "mode 555" in done.stderr


@pytest.mark.parametrize(("owner", "hint"), [("", True), ("builder", False)])
def test_root_whom_a_filesystem_refuses_is_told_of_build_user(owner: str, hint: bool, tmp_path: Path) -> None:
    # A read-only mount refuses root as an export with root_squash does.
    mounted = ("unshare", "-rm", "bash", "-c", 'mount -t tmpfs -o ro none "$0" && exec "$@"', str(tmp_path))
    done = run_bash(INIT, {"PREFIX": f"{tmp_path}/prefix", "TOKEN": "t", "OWNER": owner}, within=mounted)
    assert done.returncode == 1
    assert f"root may not write in {tmp_path} (owner root, mode 1777)" in done.stderr
    assert ("build_user=NAME in the hosts file" in done.stderr) == hint


def test_init_as_root_gives_the_folders_to_the_builder(tmp_path: Path) -> None:
    owner = NOBODY or tmp_path.owner()
    run_bash(INIT, {"PREFIX": str(tmp_path / "prefix"), "TOKEN": "t", "OWNER": owner})
    assert (tmp_path / "prefix/store").owner() == owner


# probe.sh


class TwoViews(ConnectionPool):
    """This machine under several names, each seeing the prefix where the table says."""

    def __init__(self, hosts: Sequence[Host], views: Mapping[str, Path]) -> None:
        super().__init__(hosts)
        self.views = views

    def run(self, host: Host, job: Job, on_line=None):
        return super().run(
            host, replace(job, env={**job.env, "PREFIX": str(self.views[host.name]), "SECONDS_TO_LOOK": "1"}), on_line
        )

    def run_all(self, hosts, job_for, on_line=None):
        return {host.name: self.run(host, job_for(host)) for host in hosts}


def test_probe_finds_one_directory_on_all_hosts(tmp_path: Path) -> None:
    hosts = [Host(f"n{number}", connection="local") for number in range(3)]
    prefix = make_prefix(tmp_path)
    with_views = TwoViews(hosts, {host.name: prefix for host in hosts})
    generations.probe_shared(with_views, replace(place(prefix), host=hosts[0]), hosts)
    assert names(prefix) == {".id", "store", "generations", "logs"}


def test_probe_names_hosts_that_see_another_directory_or_none(tmp_path: Path) -> None:
    hosts = [Host(f"n{number}", connection="local") for number in range(4)]
    prefix, other = make_prefix(tmp_path / "a"), make_prefix(tmp_path / "b")
    views = {"n0": prefix, "n1": other, "n2": other, "n3": tmp_path / "nothing"}
    with pytest.raises(Trouble) as caught:
        generations.probe_shared(TwoViews(hosts, views), replace(place(prefix), host=hosts[0]), hosts)
    told = {problem.where: problem.found for problem in caught.value.problems}
    assert told == {f"n[1-2] (2) {prefix}": "another directory than on n0", f"n3 {prefix}": "no such directory"}
    assert not list(prefix.glob(".probe-*"))


class HalfThere(TwoViews):
    """One host went away, another one cannot look."""

    def run_all(self, hosts, job_for, on_line=None):
        gone = Trouble(Problem("n1", "did not answer for 60 s", try_="its console"))
        cannot = Reply("n2", 1, "", "probe.sh: /p/.id: Permission denied\n", 0.1)
        return {**super().run_all(hosts, job_for, on_line), "n1": gone, "n2": cannot}


def test_probe_goes_on_without_hosts_that_cannot_be_asked(tmp_path: Path) -> None:
    hosts = [Host(f"n{number}", connection="local") for number in range(4)]
    prefix = make_prefix(tmp_path)
    transport = HalfThere(hosts, {host.name: prefix for host in hosts})
    unasked = generations.probe_shared(transport, replace(place(prefix), host=hosts[0]), hosts)
    assert unasked == {
        "n1": "did not answer for 60 s. Try: its console",
        "n2": "the prefix cannot be looked at: probe.sh: /p/.id: Permission denied",
    }


def test_probe_removes_old_probes_of_killed_runs(tmp_path: Path) -> None:
    prefix = make_prefix(tmp_path)
    for name, age in (("old", 7200), ("young", 60)):
        (prefix / f".probe-{name}").touch()
        os.utime(prefix / f".probe-{name}", (0, prefix.stat().st_mtime - age))
    run_bash(script("lib.sh", "prefix/probe.sh"), {"PREFIX": str(prefix)}, "write", "new")
    assert {path.name for path in prefix.glob(".probe-*")} == {".probe-young", ".probe-new"}


# offer.sh


def test_an_offer_becomes_current_with_its_links(tmp_path: Path, transport: ConnectionPool) -> None:
    prefix = make_prefix(tmp_path)
    files = [
        Content("manifest.json", b'{"schema": 1, "generation": 0}'),
        Content("modulefiles/x", b"text"),
        Content("sbatch/run", b"", True),
    ]
    assert generations.publish_generation(transport, place(prefix), files, 0) == generations.Published(1, stale=False)
    assert generations.publish_generation(transport, place(prefix), files, 1) == generations.Published(2, stale=False)
    assert os.readlink(prefix / "current") == "generations/2"
    assert (prefix / "modulefiles/x").read_text() == "text"
    assert os.access(prefix / "sbatch/run", os.X_OK)
    assert json.loads((prefix / "current/manifest.json").read_text())["generation"] == 2
    assert names(prefix) == {
        ".id",
        "store",
        "generations",
        "logs",
        "current",
        "modulefiles",
        "sbatch",
        "bin",
        "examples",
        "generations/1",
        "generations/2",
    }


def test_the_number_is_written_once_into_the_manifest(tmp_path: Path) -> None:
    prefix = make_prefix(tmp_path)
    offer(prefix, 0)
    assert json.loads((prefix / "current/manifest.json").read_text()) == {
        "schema": 1,
        "generation": 1,
        "offer": {"generation": 0},
    }


def test_an_offer_made_from_an_older_generation_changes_nothing(tmp_path: Path) -> None:
    prefix = make_prefix(tmp_path)
    offer(prefix, 0)
    before = names(prefix)
    late = offer(prefix, 0)
    assert values(late.stdout) == {"state": "stale", "generation": "1"}
    assert names(prefix) == before


def test_after_a_rollback_numbers_go_on(tmp_path: Path) -> None:
    prefix = make_prefix(tmp_path)
    offer(prefix, 0)
    offer(prefix, 1)
    (prefix / "current").unlink()
    (prefix / "current").symlink_to("generations/1")
    assert values(offer(prefix, 1).stdout) == {"state": "published", "generation": "3"}


@pytest.mark.parametrize("recipe", ["OFFER", "ROLLBACK", "GC"])
def test_names_are_read_after_a_network_filesystem_was_made_to_forget_them(tmp_path: Path, recipe: str) -> None:
    """Nothing here caches names; what makes NFS forget them is a name that the host itself makes, which shows in the
    folder's time."""
    prefix, seen, program = make_prefix(tmp_path), tmp_path / "seen", tmp_path / "bin/readlink"
    offer(prefix, 0)
    program.parent.mkdir()
    look = f'case "$*" in */current) stat -c %Y {prefix} {prefix}/store >>{seen} ;; esac'
    program.write_text(f'#!/bin/sh\n{look}\nexec {shutil.which("readlink")} "$@"\n')
    program.chmod(0o755)
    for folder in (prefix, prefix / "store"):
        os.utime(folder, (0, 0))
    env = {"PREFIX": str(prefix), "TOKEN": "t", "BASE": "1", "TO": "1", "SEEN": "1: 1", "HEARTBEAT": FAST}
    path = f"{program.parent}:{os.environ['PATH']}"
    done = run_bash(
        script(*getattr(generations, recipe)), {**env, "PATH": path}, data=offer_tar() if recipe == "OFFER" else b""
    )
    assert done.returncode == 0, done.stderr
    assert "0" not in seen.read_text().split()
    assert not list(prefix.rglob(".fresh-*"))


def test_of_offers_at_the_same_time_one_wins_and_the_others_hear_of_it(tmp_path: Path) -> None:
    prefix = make_prefix(tmp_path)
    with ThreadPoolExecutor(5) as pool:
        answers = list(
            pool.map(lambda number: values(offer(prefix, 0, f"t{number}", offer_tar(str(number))).stdout), range(5))
        )
    assert sorted(answer["state"] for answer in answers) == ["published", *["stale"] * 4]
    assert os.readlink(prefix / "current") == "generations/1"
    assert {name for name in names(prefix) if name.startswith("generations/")} == {"generations/1"}


def test_offers_one_after_the_other_never_lose_one(tmp_path: Path) -> None:
    """Every builder composes again when it was late: as many generations as builders, whoever is first."""
    prefix = make_prefix(tmp_path)

    def insist(number: int) -> None:
        base = 0
        while True:
            done = offer(prefix, base, f"t{number}-{base}")
            assert done.returncode == 0, done.stderr
            answer = values(done.stdout)
            if answer["state"] == "published":
                return
            base = int(answer["generation"])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(insist, range(4)))
    assert os.readlink(prefix / "current") == "generations/4"


def test_an_offer_without_a_manifest_is_refused(tmp_path: Path) -> None:
    prefix = make_prefix(tmp_path)
    buffer = io.BytesIO()
    tarfile.open(fileobj=buffer, mode="w").close()
    done = offer(prefix, 0, data=buffer.getvalue())
    assert done.returncode == 1
    assert "holds no manifest.json" in done.stderr
    assert names(prefix) == {".id", "store", "generations", "logs"}


def test_a_foreign_modulefiles_folder_is_not_replaced(tmp_path: Path) -> None:
    prefix = make_prefix(tmp_path)
    (prefix / "modulefiles").mkdir()
    done = offer(prefix, 0)
    assert done.returncode == 1
    assert f"{prefix}/modulefiles exists and is not a link of ours" in done.stderr


# logs.sh


def test_logs_are_kept_by_run(tmp_path: Path, transport: ConnectionPool) -> None:
    prefix = make_prefix(tmp_path)
    folder = generations.keep_logs(
        transport, place(prefix), "20260101T000000Z-ab", generations.tar_files([Content("n001/build.log", b"text")])
    )
    assert folder == f"{prefix}/logs/20260101T000000Z-ab"
    assert (prefix / "logs/20260101T000000Z-ab/n001/build.log").read_text() == "text"
    with pytest.raises(Trouble, match="bad run name"):
        generations.keep_logs(transport, place(prefix), "../../etc", [])


# session.sh and receive.sh


def session_env(folder: Path, prefix: Path) -> dict[str, str]:
    return {"TMPDIR": str(folder), "PREFIX": str(prefix), "TOKEN": "t"}


def test_a_session_has_a_private_folder_for_as_long_as_it_lives(tmp_path: Path, transport: ConnectionPool) -> None:
    prefix = make_prefix(tmp_path)
    hold = transport.hold(
        HERE, Job(SESSION, env=session_env(tmp_path, prefix), watched=True, timeout=None), keys=("scratch", "jobid")
    )
    scratch = Path(hold.wait_for("scratch"))
    assert hold.wait_for("jobid") == "0"
    assert scratch.parent == tmp_path.resolve() / f"deepep-{os.getuid()}"
    assert scratch.parent.stat().st_mode & 0o777 == 0o700
    assert scratch.stat().st_mode & 0o777 == 0o700
    reply = transport.send(
        HERE, Job(RECEIVE, env={"SCRATCH": str(scratch)}), generations.tar_files([Content("src/a/file", b"x")])
    )
    assert reply.out == "state=received\n"
    assert (scratch / "src/a/file").read_text() == "x"
    hold.close()
    assert not scratch.exists()


def test_a_session_also_ends_with_its_standard_input(tmp_path: Path) -> None:
    prefix = make_prefix(tmp_path)
    session = start_bash(SESSION, session_env(tmp_path, prefix), stdin=subprocess.PIPE)
    assert session.stdout is not None
    scratch = Path(session.stdout.readline().strip().removeprefix("scratch="))
    assert scratch.is_dir()
    session.communicate("")
    assert not scratch.exists()
    assert session.returncode == 0


def test_a_new_session_removes_what_killed_ones_left_and_nothing_else(tmp_path: Path) -> None:
    prefix = make_prefix(tmp_path)
    dead, alive, new = (start_bash(SESSION, session_env(tmp_path, prefix), stdin=subprocess.PIPE) for _ in range(3))
    folders = []
    for session in (dead, alive):
        assert session.stdout is not None
        folders.append(Path(session.stdout.readline().strip().removeprefix("scratch=")))
    new.communicate("")
    (tmp_path / "deepep-scratch-foreign").mkdir()
    os.killpg(dead.pid, 9)
    dead.wait()
    assert folders[0].is_dir()
    last = start_bash(SESSION, session_env(tmp_path, prefix), stdin=subprocess.PIPE)
    last.communicate("")
    assert not folders[0].exists()
    assert folders[1].is_dir()
    assert (tmp_path / "deepep-scratch-foreign").is_dir()
    alive.communicate("")
    until(lambda: not folders[1].exists(), "the end of the living session")


def test_scratch_inside_the_prefix_is_refused(tmp_path: Path) -> None:
    prefix = make_prefix(tmp_path)
    done = run_bash(SESSION, session_env(prefix / "logs", prefix))
    assert done.returncode == 1
    assert "lies in the prefix" in done.stderr


def test_receive_takes_only_a_sessions_folder(tmp_path: Path) -> None:
    done = run_bash(RECEIVE, {"SCRATCH": str(tmp_path)}, data=offer_tar())
    assert done.returncode == 1
    assert "not the scratch folder of a session" in done.stderr
