"""A build session where Slurm owns the host: the allocation is there as long as the session, whatever ends it. Real
Slurm, in the lab."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from deepep_bootstrap.bootstrap import build, publish
from deepep_bootstrap.bootstrap.build import BuildRequest, Event
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.inventory.hostsfile import Settings
from deepep_bootstrap.prefix import entries
from deepep_bootstrap.remote.fleet import ConnectionPool, Options
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Job
from tests.support.build import RECIPES, until
from tests.support.lab import LiveLab

pytest_plugins = ["tests.support.lab"]

NODE = Host("n001", user="root")
SMALL = entries.Entry("gdrcopy", "1", {"made": "up"})


@pytest.fixture
def transport(fresh_lab: LiveLab) -> Iterator[ConnectionPool]:
    fleet = ConnectionPool([NODE], Options(ssh_config=str(fresh_lab.lab.ssh_config)))
    script = "\n".join(
        RECIPES[name] for name in ("lib.sh", "prefix/lib/share.sh", "prefix/lib/trust.sh", "prefix/init.sh")
    )
    fleet.run(NODE, Job(script, env={"PREFIX": "/shared/p", "TOKEN": "init"}))
    yield fleet
    fleet.close()


def request(tmp_path: Path, settings: Settings | None = None) -> BuildRequest:
    asked = publish.allocation("n001", settings or Settings())
    return BuildRequest("/shared/p", (SMALL,), RECIPES, lambda: iter(()), tmp_path, allocation=asked)


def jobs(lab: LiveLab) -> list[str]:
    return lab.ssh("login1", "squeue --noheader --format='%i %j %T %N'").stdout.splitlines()


def scratches(lab: LiveLab) -> str:
    return lab.ssh("n001", "ls -d /var/tmp/deepep-*/deepep-scratch-* 2>/dev/null").stdout


def test_a_session_holds_an_allocation_and_steps_run_in_it_with_all_processors(
    fresh_lab: LiveLab, transport: ConnectionPool, tmp_path: Path
) -> None:
    # What sbatch alone knows stays with sbatch, and so does the size of a test.
    tests_want = (
        "--requeue",
        "--open-mode=append",
        "-o",
        "/dev/null",
        "--nodes=2",
        "--exclusive=user",
        "--comment",
        "two words",
    )
    with build.open_session(
        transport, NODE, request(tmp_path, Settings(sbatch_args=tests_want)), lambda _: None
    ) as session:
        assert jobs(fresh_lab) == [f"{session.job} deepep-build RUNNING n001"]
        shown = fresh_lab.ssh("login1", f"scontrol show job -o {session.job}; scontrol show node -o n001").stdout
        asked, given, there = (re.findall(rf" {key}=(\S+)", shown) for key in ("TimeLimit", "NumCPUs", "CPUTot"))
        assert (asked, given) == (["02:00:00"], there), "the whole node, for long enough"
        assert " Comment=two words " in shown
        script = (
            'printf "node=%s\\njob=%s\\ncpus=%s\\nword=%s\\n" "$SLURMD_NODENAME" "$SLURM_JOB_ID" "$(nproc)" "$WORD"'
        )
        step = build.as_step(RECIPES, script, job=session.job, path=f"{session.scratch}/step.sh", token="token")
        reply = transport.run(NODE, Job(step, env={"WORD": 'it\'s "quoted" $x'}, watched=True, timeout=None))
        assert reply.code == 0, reply.err
        cpus = fresh_lab.ssh("n001", "nproc").stdout.strip()
        assert reply.out.splitlines() == ["node=n001", f"job={session.job}", f"cpus={cpus}", 'word=it\'s "quoted" $x']
    until(lambda: not jobs(fresh_lab), "the end of the allocation")
    assert scratches(fresh_lab) == ""


def test_a_busy_node_is_waited_for_and_the_wait_is_said(
    fresh_lab: LiveLab, transport: ConnectionPool, tmp_path: Path
) -> None:
    fresh_lab.ssh(
        "login1", "sbatch --nodelist=n001 --exclusive --job-name=other --wrap='sleep 1000' --output=/dev/null"
    )
    until(lambda: any("other RUNNING" in job for job in jobs(fresh_lab)), "the other job")
    events: list[Event] = []
    until_waiting = replace(request(tmp_path), entries=(SMALL,))

    def on_event(event: Event) -> None:
        events.append(event)
        fresh_lab.ssh("login1", "scancel --name=other")

    with build.open_session(transport, NODE, until_waiting, on_event) as session:
        assert session.job
    assert [event.state for event in events] == ["waiting"]
    assert re.fullmatch(rf"Slurm job {session.job}( \(\w+\))?", events[0].line)


def test_why_slurm_lets_a_build_wait_is_told(fresh_lab: LiveLab, transport: ConnectionPool, tmp_path: Path) -> None:
    fresh_lab.ssh("login1", "scontrol update nodename=n001 state=drain reason=fans")
    events: list[Event] = []

    def on_event(event: Event) -> None:
        events.append(event)
        if "(" in event.line:
            fresh_lab.ssh("login1", "scontrol update nodename=n001 state=resume")

    with build.open_session(transport, NODE, request(tmp_path), on_event) as session:
        assert session.job
    assert "(ReqNodeNotAvail" in "".join(event.line for event in events)


def test_slurms_refusal_is_trouble_and_leaves_nothing(
    fresh_lab: LiveLab, transport: ConnectionPool, tmp_path: Path
) -> None:
    wrong = request(tmp_path, Settings(partition="no-such"))
    said = r"Slurm gives no allocation \(.*--partition=no-such --time=120 --exclusive\): .*partition"
    with pytest.raises(Trouble, match=said), build.open_session(transport, NODE, wrong, lambda _: None):
        pass
    assert jobs(fresh_lab) == []
    assert scratches(fresh_lab) == ""


def test_root_whom_slurm_refuses_is_told_of_build_user(
    fresh_lab: LiveLab, transport: ConnectionPool, tmp_path: Path
) -> None:
    fresh_lab.ssh("login1", "scontrol update partitionname=batch disablerootjobs=yes")
    try:
        with (
            pytest.raises(Trouble, match=r"Invalid user id.*build_user=NAME"),
            build.open_session(transport, NODE, request(tmp_path), print),
        ):
            pass
    finally:
        fresh_lab.ssh("login1", "scontrol update partitionname=batch disablerootjobs=no")


def test_a_killed_sessions_allocation_and_scratch_go_with_the_next_session(
    fresh_lab: LiveLab, transport: ConnectionPool, tmp_path: Path
) -> None:
    with build.open_session(transport, NODE, request(tmp_path), lambda _: None) as session:
        pid = fresh_lab.ssh("n001", f"sed -n 's/^pid=//p' {session.scratch}/.owner").stdout.strip()
        fresh_lab.ssh("n001", f"kill -KILL {pid}")
    assert jobs(fresh_lab) == [f"{session.job} deepep-build RUNNING n001"]
    assert session.scratch in scratches(fresh_lab)
    with build.open_session(transport, NODE, request(tmp_path), lambda _: None) as second:
        assert session.scratch not in scratches(fresh_lab)
        assert [job.split()[0] for job in jobs(fresh_lab)] == [second.job]
    until(lambda: not jobs(fresh_lab), "the end of the allocation")
