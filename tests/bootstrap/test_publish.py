"""Parts of the phases of bootstrap that need no hosts."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from deepep_bootstrap.bootstrap import publish
from deepep_bootstrap.bootstrap.build import Event
from deepep_bootstrap.bootstrap.planning import BootstrapContext, RunLogs
from deepep_bootstrap.bootstrap.publish import copy_tests, publish_offer
from deepep_bootstrap.bootstrap.reboot.policy import NEVER, Policy
from deepep_bootstrap.cli.commands.bootstrap import next_commands
from deepep_bootstrap.core import recipes
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.inventory.facts import Modules, Slurm
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.hostsfile import parse_hosts_file
from deepep_bootstrap.inventory.survey import Survey
from deepep_bootstrap.lock import model
from deepep_bootstrap.plan import steps
from deepep_bootstrap.prefix.generations import Content
from tests.support.paths import ROOT
from tests.support.plan import cluster, request
from tests.support.store import Prefix

pytest_plugins = ["tests.support.store"]

WHERE = "    # in a directory that all nodes see: it leaves its output there"
FILES = [
    Content("sbatch/internode-test.sbatch", b"#!/bin/bash\n"),
    Content("sbatch/v1/internode-test.sbatch", b"the same for one stack\n"),
    Content("env.sh", b"export X=1\n"),
]


def test_a_slurm_client_gets_the_default_stacks_tests_where_it_stands(tmp_path: Path) -> None:
    assert copy_tests(FILES, tmp_path) == ["internode-test.sbatch"]
    assert [path.name for path in tmp_path.iterdir()] == ["internode-test.sbatch"]
    assert (tmp_path / "internode-test.sbatch").read_bytes() == b"#!/bin/bash\n"


def test_a_folder_that_is_gone_is_trouble(tmp_path: Path) -> None:
    with pytest.raises(Trouble, match=r"none: sbatch files cannot be written here — found No such file or directory"):
        copy_tests(FILES, tmp_path / "none")


@pytest.mark.parametrize(
    ("default", "changes", "said"),
    [
        (
            "v1-wheel",
            {},
            ["ssh login1", "module load deepep", f"sbatch $DEEPEP_PREFIX/sbatch/internode-test.sbatch{WHERE}"],
        ),
        (
            "v1",
            {},
            [
                "ssh login1",
                "module load deepep/v1-wheel",
                f"sbatch $DEEPEP_PREFIX/sbatch/v1-wheel/internode-test.sbatch{WHERE}",
            ],
        ),
        (
            "v1",
            {"slurm": Slurm(), "modules": Modules()},
            [". {}/current/env-v1-wheel.sh", "bash $DEEPEP_PREFIX/sbatch/v1-wheel/intranode-test.sbatch"],
        ),
    ],
)
def test_what_to_type_next_is_for_the_stack_that_was_bootstrapped(
    default: str, changes: dict[str, object], said: list[str]
) -> None:
    wanted = request(stack="v1-wheel")
    planned = steps.make_plan(wanted, cluster(n001=changes, n002=changes, login1=changes))
    offer = replace(planned.choice.offer, default_stack=default)
    made = replace(planned, decided=replace(planned.choice, offer=offer))
    assert next_commands(wanted, made) == [command.format(wanted.prefix) for command in said]


def test_a_generation_keeps_the_lock_it_was_built_from_whatever_became_of_the_file(
    prefix: Prefix, tmp_path: Path
) -> None:
    file = tmp_path / "deepep.lock.toml"
    read = shutil.copyfile(ROOT / "deepep.lock.toml", file).read_bytes()
    inventory = parse_hosts_file(f"defaults prefix={prefix.path} connection=local\nn001\n", "hosts.txt")
    wanted = replace(request(), lock=model.read_lock_file(file), inventory=inventory, prefix=str(prefix.path))
    facts = {"n001": cluster(n001={"prefix.path": str(prefix.path), "slurm.node": ""})["n001"]}
    planned = steps.make_plan(wanted, facts)
    for entry in planned.choice.entries:
        prefix.entry(entry.name)
    survey = Survey(inventory, str(prefix.path), facts)
    work = BootstrapContext(
        Flags(ROOT),
        Screen("bootstrap", as_json=True),
        RunLogs.none(),
        prefix.transport,
        survey,
        wanted,
        planned,
        Policy(NEVER),
    )
    file.write_bytes(read.replace(b"\n", b"\n# edited meanwhile\n", 1))
    assert [outcome.state for outcome in publish_offer(work)] == ["done"]
    (generation,) = prefix.look(locks=True).generations
    assert generation.lock.encode() == read
    assert generation.manifest["lock_digest"] == recipes.digest({"lock": read.decode()})


def test_what_a_build_waits_for_others_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    screen = Screen("bootstrap")
    shown = publish._BuildScreen(screen, "n001", {"e": "build deepep"})
    lines = [
        (0, Event("e", "running")),
        (2, Event("e", "waiting", "n002 pid 7")),
        (0, Event("e", "waits", "waiting for e: held by n002 pid 7")),
        (10, Event("e", "running", "compiles")),
        (1, Event("e", "waits", "waiting for nvshmem")),
        (4, Event("e", "done", "installed into the store")),
    ]
    for seconds, event in lines:
        now[0] += seconds
        shown.show(event)
    assert capsys.readouterr().out.splitlines() == [
        "n001: build deepep …",
        "n001: build deepep waits for n002 pid 7",
        "done build deepep on n001 (3 s, waited 14 s) — installed into the store",
    ]
    now[0] += 60
    outcome = shown.as_told(Outcome("e", "n001", "done", code=0, seconds=99))
    assert (outcome.step, outcome.seconds, outcome.waited) == ("build deepep", 17, 14)
