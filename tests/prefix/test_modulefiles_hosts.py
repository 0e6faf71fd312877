"""What differs from host to host and what comes from Google's gIB: under real module systems, in env.sh and in
sbatch files."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.prefix import modulefiles, offer
from tests.support import module_systems
from tests.support import modules as support

pytestmark = pytest.mark.usefixtures("programs")

VARIANTS = ("lmod", "environment-modules", "environment-modules without pushenv")
MAP, INTERFACE, LEVEL = "DEEP_EP_DEVICE_TO_HCA_MAPPING", "NCCL_SOCKET_IFNAME", "NVSHMEM_IB_SL"
FIRST, THIRD = "0:mlx5_0:1,1:mlx5_1:1", "0:mlx5_1:1,1:mlx5_2:1"
GIB = """\
# Written for bash, as Google's is; it talks, and knows its machine by the host's name.
set_all() { local -a names=(NCCL_CROSS_NIC=0 "NCCL_NET=gIB"); export "${names[@]}"; }
set_all
export NCCL_TUNER_CONFIG_PATH="/gib/$(uname -n | cut -d- -f1).txt" NCCL_SOCKET_IFNAME=enp0s19 OTHER=1
echo "NCCL is ready"
echo "so it is" >&2
"""


class Prefix:
    """A prefix with a stack whose settings differ between three hosts, and gIB's script beside it."""

    def __init__(self, path: Path, variant: str = "") -> None:
        self.path, self.variant = path, variant
        self.script = path / "gib" / "scripts" / "set_nccl_env.sh"
        self.record = support.cloud_record(str(path), gib=str(self.script))
        templates = support.templates()
        if variant.endswith("without pushenv"):
            templates["templates/modulefile.tcl.j2"] = templates["templates/modulefile.tcl.j2"].replace(
                "info commands pushenv", "info commands no-such"
            )
        # The one place where gIB's script may lie is the test's own here.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(offer, "GIB", str(self.script))
            files = modulefiles.render_offer(support.offer(str(path), self.record), templates)
        support.write(path / "generations" / "1", files)
        for name, target in {
            "current": "generations/1",
            "modulefiles": "current/modulefiles",
            "sbatch": "current/sbatch",
        }.items():
            (path / name).symlink_to(target)
        (path / "session").mkdir()

    def install_gib(self) -> None:
        self.script.parent.mkdir(parents=True)
        self.script.write_text(GIB)

    def run(self, script: str, host: str, **more: object) -> module_systems.Session:
        use = f"module use {self.path}/modulefiles\n" if self.variant else ""
        session = module_systems.run(
            use + script, self.path / "session", host=host, system=self.variant.partition(" ")[0], **more
        )
        assert session.code == 0, session.out + session.err
        return session


@pytest.fixture(params=VARIANTS)
def prefix(request: pytest.FixtureRequest, tmp_path: Path) -> Prefix:
    return Prefix(tmp_path, request.param)


WANTED = {
    "b200-001": {MAP: FIRST, INTERFACE: None},
    "b200-002.example.org": {MAP: FIRST, INTERFACE: None},
    "b200-003": {MAP: THIRD, INTERFACE: "=ens3"},
    "login1": {MAP: None, INTERFACE: None},
}


def test_each_host_gets_its_own_values_when_the_module_is_loaded(prefix: Prefix) -> None:
    prior = f"export {MAP}=mine {INTERFACE}=\n"
    script = "".join(
        f"hostname {host}\n{prior}snapshot before{n}\nmodule load deepep\nsnapshot loaded{n}\nmodule unload "
        f"deepep\nsnapshot after{n}\n"
        for n, host in enumerate(WANTED)
    )
    states = prefix.run(script, "anywhere").environments
    for n, wanted in enumerate(WANTED.values()):
        assert {name: states[f"loaded{n}"].get(name) for name in wanted} == wanted
        assert states[f"after{n}"] == states[f"before{n}"]


@pytest.mark.parametrize("prior", ["", f"export {MAP}=mine {INTERFACE}=\n", f"export {MAP}= {INTERFACE}=a:b\n"])
def test_unloading_on_another_host_restores_too(prefix: Prefix, prior: str) -> None:
    moves = [("b200-003", "login1"), ("login1", "b200-003"), ("b200-001", "b200-003")]
    script = prior + "snapshot before\n"
    for n, (one, other) in enumerate(moves):
        script += f"hostname {one}\nmodule load deepep\nhostname {other}\nmodule unload deepep\nsnapshot after{n}\n"
    states = prefix.run(script, "anywhere").environments
    assert [states[f"after{n}"] for n in range(len(moves))] == [states["before"]] * len(moves)


def test_gib_is_asked_when_the_module_is_loaded(prefix: Prefix) -> None:
    prior = "export NCCL_CROSS_NIC=7 NCCL_DEBUG=WARN NCCL_NET= TORCH_NCCL_USE_COMM_NONBLOCKING=0 LD_LIBRARY_PATH=/a\n"
    script = f"{prior}snapshot before\nmodule load deepep\nsnapshot loaded\nmodule unload deepep\nsnapshot after\n"
    without = prefix.run(script, "b200-003").environments
    assert without["loaded"]["NCCL_CROSS_NIC"] == "7"
    prefix.install_gib()
    states = prefix.run(script, "b200-003").environments
    loaded = states["loaded"]
    found = {
        name: loaded.get(name)
        for name in ("NCCL_NET", "NCCL_CROSS_NIC", "NCCL_TUNER_CONFIG_PATH", "NCCL_DEBUG", "OTHER", INTERFACE)
    }
    assert found == {
        "NCCL_NET": "gIB",
        "NCCL_CROSS_NIC": "0",
        "NCCL_TUNER_CONFIG_PATH": "/gib/b200.txt",
        "NCCL_DEBUG": "WARN",
        "OTHER": None,
        INTERFACE: "=ens3",
    }
    assert loaded["LD_LIBRARY_PATH"].endswith(f":{prefix.path}/gib/lib64:/a")
    assert "TORCH_NCCL_USE_COMM_NONBLOCKING" not in loaded
    assert states["after"] == states["before"]
    assert without["after"] == without["before"]


def test_listing_modules_asks_nobody(prefix: Prefix) -> None:
    prefix.install_gib()
    prefix.script.write_text(f"touch {prefix.path}/asked\n")
    prefix.run("module avail deepep\nmodule whatis deepep\nmodule show deepep\nmodule help deepep\n", "b200-003")
    assert not (prefix.path / "asked").exists()


@pytest.mark.parametrize("shell", ["bash -eu", "bash --posix -eu", "dash -eu", "bash -euo pipefail"])
@pytest.mark.parametrize("gib", [True, False])
def test_env_sh_does_the_same(tmp_path: Path, shell: str, gib: bool) -> None:
    prefix = Prefix(tmp_path)
    if gib:
        prefix.install_gib()
    inner = f". {tmp_path}/current/env.sh; . {tmp_path}/current/env.sh; env; set | grep ^_deepep_; exit 0"
    script = "".join(
        f"echo host={n}; hostname {host}; {shell} -c '{inner.replace('; exit 0', ' || :')}'\n"
        for n, host in enumerate(WANTED)
    )
    out = prefix.run(f"export {MAP}=stale {LEVEL}=9\n{script}", "anywhere").out
    for part, wanted in zip(out.split("host=")[1:], WANTED.values(), strict=True):
        assert "_deepep_" not in part
        lines = [line.partition("=") for line in part.splitlines()]
        found = {name: value for name, equals, value in lines if equals}
        assert found.get(MAP) == wanted[MAP]
        assert found.get(INTERFACE) == wanted[INTERFACE]
        assert found.get("NCCL_NET") == ("gIB" if gib else None)
        assert found[LEVEL] == "1"
        assert found["LD_LIBRARY_PATH"].split(":").count(f"{tmp_path}/gib/lib64") == 1


SEEN = 'import json, os\nprint("SEEN " + json.dumps(dict(os.environ)), flush=True)\n'
SRUN = """\
#!/bin/bash
# Each node in turn, by name, with the environment of the first.
while [[ $1 == --* ]]; do shift; done
for host in b200-001 b200-003; do hostname "$host"; SLURM_NODEID=0 "$@" || exit; done
"""

SCONTROL = """\
#!/bin/sh
case "$*" in
    "show hostnames x") echo b200-001; echo b200-003 ;;
    "--oneliner show node b200-001") echo "NodeName=b200-001 Arch=x86_64 NodeAddr=${NODE_ADDR:?} NodeHostName=b200-001 Version=23.11" ;;
    *) exit 1 ;;
esac
"""


def batch(prefix: Prefix, kind: str, host: str, *, slurm: bool, more: str = "") -> list[dict[str, str]]:
    """Return what the processes of a test saw, one for each node."""
    tests, python = (
        prefix.path / "store" / prefix.record.deepep / "tests",
        prefix.path / "store" / prefix.record.python / "bin" / "python",
    )
    for folder in (tests, python.parent, prefix.path / "bin"):
        folder.mkdir(parents=True, exist_ok=True)
    (tests / f"test_{kind.replace('-', '_')}.py").write_text(SEEN)
    programs = {
        python: f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} "$@"\n',
        prefix.path / "bin" / "srun": SRUN,
    }
    programs[prefix.path / "bin" / "scontrol"] = SCONTROL
    for path, text in programs.items():
        path.write_text(text)
        path.chmod(0o755)
    before = f"export PATH={prefix.path}/bin:$PATH SLURM_JOB_ID=7 SLURM_JOB_NODELIST=x {more}\n" if slurm else ""
    session = prefix.run(f"{before}bash {prefix.path}/sbatch/{kind}-test.sbatch", host)
    return [json.loads(line.removeprefix("SEEN ")) for line in session.out.splitlines() if line.startswith("SEEN ")]


@pytest.mark.parametrize("variant", ["", "lmod", "environment-modules"])
def test_each_node_of_a_job_gets_its_own_values(tmp_path: Path, variant: str) -> None:
    seen = batch(Prefix(tmp_path, variant), "internode", "b200-001", slurm=True)
    assert [(one.get(MAP), one.get(INTERFACE)) for one in seen] == [(FIRST, None), (THIRD, "=ens3")]


@pytest.mark.parametrize(("known", "wanted"), [("b200-001", "b200-001"), ("10.8.0.7", "10.8.0.7"), ("", "b200-001")])
def test_nodes_meet_where_slurm_reaches_the_first(tmp_path: Path, known: str, wanted: str) -> None:
    seen = batch(Prefix(tmp_path), "internode", "b200-001", slurm=True, more=f"NODE_ADDR={known}")
    assert [one["MASTER_ADDR"] for one in seen] == [wanted, wanted]


@pytest.mark.parametrize(("kind", "level"), [("intranode", "1"), ("low-latency", "2")])
def test_low_latency_has_its_own_service_level(tmp_path: Path, kind: str, level: str) -> None:
    assert [one[LEVEL] for one in batch(Prefix(tmp_path), kind, "b200-002", slurm=False)] == [level]


BAD = {
    "a host with a pattern in its name": {"by_host": {"b200-*": {MAP: "x"}}},
    "one of ours by host": {"by_host": {"b200-001": {"DEEPEP_STACK": "x"}}},
    "one of ours by kind": {"by_kind": {"low-latency": {"PATH": "/bin"}}},
    "a script at another place": {"gib": "/usr/local/my gib/scripts/set.sh"},
}


@pytest.mark.parametrize("changes", BAD.values(), ids=BAD)
def test_what_cannot_be_written_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(Trouble) as caught:
        modulefiles.render_offer(support.offer("/opt/deepep", support.cloud_record(**changes)), support.templates())
    assert len(caught.value.problems) == 1, caught.value
