"""Package repositories of the lock through `--mirror PREFIX=REPLACEMENT`: what a plan says, and that real apt installs
from a copy of a vendor's repository."""

from __future__ import annotations

import dataclasses
import functools
import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import structs

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.fetch import locations
from deepep_bootstrap.fetch.locations import Mirrors
from deepep_bootstrap.plan import host_recipes, steps
from deepep_bootstrap.plan.host_recipes import BLOCKED, TO_APPLY, Check, Preparation
from tests.recipes.test_packages import Machine, machine, toolkit
from tests.support import plan as plan_support
from tests.support.repos import Package, Signer, make_apt_repository, signer

__all__ = ["machine"]  # a fixture

pytestmark = pytest.mark.usefixtures("programs")


@pytest.fixture(scope="module")
def key() -> Iterator[Signer]:
    with signer() as made:
        yield made


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        """Say nothing."""


@pytest.fixture
def serve() -> Iterator[Callable[[Path], str]]:
    """Serve a folder as any plain web server does; returns its address."""
    servers = []

    def begin(folder: Path) -> str:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield begin
    for server in servers:
        server.shutdown()
        server.server_close()


def test_the_plan_says_from_where(tmp_path: Path) -> None:
    facts = {"n001": plan_support.changed(plan_support.READY, {"os_id": "debian", "os_version": "12", "toolkits": ()})}
    nvidia = "https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64"
    wanted = plan_support.request(
        "defaults prefix=/shared/deepep\nn001\n",
        mirrors=locations.read_mirrors(["https://developer.download.nvidia.com/=http://m/"], {}, {}),
    )
    inputs = host_recipes.wanted(wanted, facts)
    fields = inputs["n001"]["cuda-toolkit"]["REPOSITORIES"].split()
    plain = host_recipes.wanted(structs.replace(wanted, mirrors=Mirrors()), facts)["n001"]["cuda-toolkit"][
        "REPOSITORIES"
    ].split()
    assert [fields[1], fields[4]] == [
        each.replace("https://developer.download.nvidia.com/", "http://m/") for each in (plain[1], plain[4])
    ]
    assert (plain[1], fields[5]) == (nvidia, plain[5]), "the fingerprint is the lock's"
    for state, noted in ((TO_APPLY, True), (BLOCKED, True), (host_recipes.OK, False)):
        checks = {"n001": {"cuda-toolkit": Check("cuda-toolkit", state, "no toolkit", "CUDA 12 with nvcc")}}
        made = steps.make_plan(wanted, facts, Preparation(inputs, checks), anyhow=True)
        told = f"n001: repository cuda from http://m/compute/cuda/repos/debian12/x86_64, instead of {nvidia}"
        assert (told in made.notes) == noted


def test_a_mirror_that_no_host_sees_is_the_reason_that_is_told() -> None:
    bare = {"os_id": "debian", "os_version": "12", "toolkits": ()}
    facts = {name: plan_support.changed(plan_support.READY, bare) for name in ("n001", "n002")}
    unseen = Check(
        "cuda-toolkit",
        BLOCKED,
        "no toolkit",
        "CUDA 12 with nvcc",
        "the repository cuda is mirrored in the directory /srv/x",
    )
    with pytest.raises(Trouble) as caught:
        steps.make_plan(
            plan_support.request("defaults prefix=/shared/deepep\nn[001-002]\n"),
            facts,
            Preparation({}, {n: {"cuda-toolkit": unseen} for n in facts}),
        )
    said = [str(problem) for problem in caught.value.problems]
    assert said[0].startswith("n001: no CUDA toolkit fits the stack")
    assert said[1:] == [
        (
            "n[001-002] (2): CUDA toolkit: the repository cuda is mirrored in the directory /srv/x — found no toolkit, "
            "wanted CUDA 12 with nvcc"
        )
    ]


# --- with real apt -----------------------------------------------------------------------------------------------------------------------


def as_recipe(url: str, fingerprint: str, priority: int = 0, suite: str = "./") -> dict[str, str]:
    line = f"cuda {url} {suite} {'-' if suite.endswith('/') else 'main'} {url}/key.asc {fingerprint} {priority}"
    return {"MANAGER": "apt", "PACKAGES": "cuda-toolkit-12-9=12.9.1-1", "REPOSITORIES": line, "CUDA_MAJOR": "12"}


REAL = (
    dataclasses.replace(
        toolkit("12.9.1"), depends="cuda-nvcc (>= 12.9), cuda-common, no-such-thing | cuda-docs, libc6 (>= 2)"
    ),
    toolkit("12.9.2"),
    Package("cuda-nvcc", "12.9.1-1", {"/opt/nvcc": "1"}),
    Package("cuda-nvcc", "12.9.3-1", {"/opt/nvcc": "3"}),
    Package("cuda-config", "1:2.0", {"/opt/config": "x"}, provides="cuda-common"),
    Package("cuda-docs", "1+b~2", {"/opt/docs": "x"}),
    Package("nsight", "9", {"/opt/nsight": "x"}),
)


def copied(machine: Machine, key: Signer) -> Path:
    """A copy of a repository with real packages, in the folder that the machine shares with the test."""
    copy = machine.shared / "mirror"
    make_apt_repository(copy, REAL, key)
    return copy


@pytest.mark.parametrize("over", ["folder", "http"])
def test_apt_installs_from_a_copy_with_no_other_source(
    over: str, machine: Machine, tmp_path: Path, key: Signer, serve: Callable[[Path], str]
) -> None:
    copy = copied(machine, key)
    url = f"file://{copy}" if over == "folder" else serve(copy)
    after = machine.says("cuda-toolkit", "apply", as_recipe(url, key.fingerprint, 100))
    assert (after["state"], after["found"]) == ("ok", "12.9.1 in /usr/local/cuda-12.9")
    assert machine.out("cat /opt/nvcc; ls /opt/docs /opt/config; ls /etc/apt/sources.list.d") == (
        "3/opt/config\n/opt/docs\ndeepep-cuda.sources\n"
    )


def test_a_pin_does_not_reach_other_repositories_of_the_same_server(
    machine: Machine, tmp_path: Path, key: Signer
) -> None:
    """A site serves its distribution's mirror from the same host or directory: that keeps its own priority."""
    copy = copied(machine, key)
    make_apt_repository(machine.shared / "distribution", [Package("own-tool", "1", {"/opt/own": "x"})], key)
    text = (machine.shared / "distribution/InRelease").read_text()
    release = text.partition("\n\n")[2].partition("-----BEGIN PGP SIG")[0].replace("Label: Test", "Label: Distribution")
    signed = key.gpg("--local-user", key.fingerprint, "--clearsign", given=release.encode())
    (machine.shared / "distribution/InRelease").write_bytes(signed)
    (machine.shared / "site.gpg").write_bytes(key.gpg("--export", key.fingerprint))
    line = f"deb [signed-by={machine.shared}/site.gpg] file://{machine.shared}/distribution ./"
    machine.out(f"echo '{line}' >/etc/apt/sources.list.d/site.list; apt-get -qq update")
    machine.says("cuda-toolkit", "apply", as_recipe(f"file://{copy}", key.fingerprint, 100))
    assert " 500 file:" in machine.out("apt-cache policy own-tool").replace(" *** ", "     ")
    assert " 100 file:" in machine.out("apt-cache policy nsight")


def test_a_host_that_does_not_see_the_mirror_says_so_before_anything_is_written(machine: Machine, key: Signer) -> None:
    env = as_recipe("file:///srv/nowhere", key.fingerprint)
    told = (
        "the repository cuda is mirrored in the directory /srv/nowhere, which this host does not see: give "
        "--mirror a path"
    )
    check = machine.says("cuda-toolkit", "check", env)
    assert check["state"] == "blocked"
    assert check["note"].startswith(told)
    assert told in machine.refuses("cuda-toolkit", env)
    assert machine.written == ""
