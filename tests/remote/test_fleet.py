"""Connections to hosts against real sshds on loopback, and the same scripts on this machine: one suite for both where
they agree."""

from __future__ import annotations

import getpass
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.inventory.hostsfile import read_hosts
from deepep_bootstrap.inventory.survey import fold_problems
from deepep_bootstrap.remote.channel import Secret
from deepep_bootstrap.remote.fleet import ConnectionPool, Options
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Job, Reply
from deepep_bootstrap.remote.ssh import Timeouts
from tests.support.paths import ROOT
from tests.support.sshd import SAFETY, Lab, Sshd, alive, cutting_relay, free_port, make_key, silent_listener, wait_until

pytest_plugins = ["tests.support.sshd"]
pytestmark = pytest.mark.usefixtures("programs")


@pytest.fixture(scope="module")
def server(ssh_lab: Lab) -> Sshd:
    return ssh_lab.start("127.0.0.2")


@pytest.fixture(params=["ssh", "local"])
def host(request: pytest.FixtureRequest) -> Host:
    if request.param == "local":
        return Host("here", connection="local")
    ssh_lab, server = request.getfixturevalue("ssh_lab"), request.getfixturevalue("server")
    return ssh_lab.host(server)


@pytest.fixture
def fleet(ssh_lab: Lab, host: Host) -> Iterator[ConnectionPool]:
    fleet = ConnectionPool([host], ssh_lab.options())
    yield fleet
    fleet.close()


def test_who_has_ended_is_told_while_others_still_run(tmp_path: Path) -> None:
    hosts = [Host(f"n{number}", connection="local") for number in range(3)]
    heard: list[str] = []

    def ended(host: str) -> None:
        heard.append(host)
        if {*heard} == {"n1", "n2"}:
            (tmp_path / "go").touch()  # the first host waits for that

    def job(host: Host) -> Job:
        return Job(f"until [ {host.name} != n0 ] || [ -e {tmp_path}/go ]; do sleep 0.05; done", timeout=SAFETY)

    fleet = ConnectionPool(hosts)
    replies = fleet.run_all(hosts, job, on_end=ended)
    fleet.close()
    assert [type(reply) for reply in replies.values()] == [Reply] * 3
    assert heard[2:] == ["n0"]


def trouble_of(fleet: ConnectionPool, host: Host, job: Job | None = None) -> str:
    """Return the message of a run that cannot work. It must name the host, and hold nothing of paramiko's own."""
    try:
        with pytest.raises(Trouble) as caught:
            fleet.run(host, job or Job("true"))
    finally:
        fleet.close()
    (problem,) = caught.value.problems
    assert problem.where == host.name
    for word in ("paramiko", "Exception", "Errno", "[Err", "Traceback", "No existing session"):
        assert word not in str(problem)
    return str(problem)


# What both kinds of connection do.


def test_arguments_and_environment_arrive_as_they_are(fleet: ConnectionPool, host: Host) -> None:
    args = ("plain", "a b", "it's", '"', "$HOME", "`id`", "new\nline", "", "-n", "*", "é")
    env = {"A": "x y'\"$\n", "B_1": ""}
    script = """for word in "$@" "$A" "$B_1"; do printf '<%s>' "$word"; done"""
    reply = fleet.run(host, Job(script, args=args, env=env))
    assert reply == structs.replace(reply, host=host.name, code=0, err="")
    assert reply.out == "".join(f"<{word}>" for word in (*args, *env.values()))


def test_nothing_of_a_job_stands_on_a_command_line(fleet: ConnectionPool, host: Host) -> None:
    look = (
        "for file in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$file; echo; done 2>/dev/null; echo $SECRET $1 >/dev/null"
    )
    reply = fleet.run(host, Job(look, args=("argument-7261",), env={"SECRET": "environment-9182"}))
    assert "bash" in reply.out
    assert "argument-7261" not in reply.out
    assert "environment-9182" not in reply.out


def test_exit_codes_and_streams(fleet: ConnectionPool, host: Host) -> None:
    reply = fleet.run(host, Job("echo out; echo err >&2; exit 7"))
    assert (reply.code, reply.out, reply.err) == (7, "out\n", "err\n")
    assert fleet.run(host, Job("kill -KILL $$")).code == 137


def test_merged_streams_keep_their_order(fleet: ConnectionPool, host: Host) -> None:
    reply = fleet.run(host, Job("for i in 1 2 3; do echo out$i; echo err$i >&2; done", merge=True))
    assert reply.out.split() == ["out1", "err1", "out2", "err2", "out3", "err3"]
    assert reply.err == ""


def test_stdin_of_a_script_is_empty(fleet: ConnectionPool, host: Host) -> None:
    for watched in (False, True):
        assert fleet.run(host, Job("wc -c", watched=watched)).out.strip() == "0"


@pytest.mark.parametrize("watched", [False, True])
def test_large_output_on_both_streams_at_once(fleet: ConnectionPool, host: Host, watched: bool) -> None:
    script = "head -c 5000000 /dev/zero | tr '\\0' a & head -c 5000000 /dev/zero | tr '\\0' b >&2; wait"
    reply = fleet.run(host, Job(script, watched=watched))
    assert (len(reply.out), len(reply.err)) == (5_000_000, 5_000_000)


def test_a_large_script_and_one_that_reads_itself_slowly(fleet: ConnectionPool, host: Host) -> None:
    filler = "# " + "x" * 98 + "\n"
    reply = fleet.run(host, Job(filler * 40_000 + "echo end"))
    assert reply.out == "end\n"


def test_lines_come_one_by_one_while_the_script_runs(fleet: ConnectionPool, host: Host, tmp_path: Path) -> None:
    """Each line must arrive before the script is allowed to go on."""
    go = tmp_path / "go"
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        go.with_name(f"go{len(lines)}").touch()

    wait = 'next() { while [ ! -e "$1" ]; do sleep 0.02; done; }'
    script = f"""{wait}
    echo one; next {go}1
    echo two >&2; next {go}2
    printf '10%%\\r'; next {go}3
    printf '20%%\\r\\n'; next {go}4
    printf 'caf\\303'; printf '\\251 \\377 end'"""
    reply = fleet.run(host, Job(script, timeout=SAFETY), on_line)
    assert lines == ["one", "two", "10%", "20%", "café \ufffd end"]
    assert reply.out.endswith("caf\u00e9 \ufffd end")


def test_the_script_file_is_gone_afterwards(fleet: ConnectionPool, host: Host, tmp_path: Path) -> None:
    for watched in (False, True):
        reply = fleet.run(host, Job('export; echo "$0"', env={"TMPDIR": str(tmp_path)}, watched=watched))
        path = reply.out.splitlines()[-1]
        assert "deepep-bootstrap." in path
        assert not Path(path).exists()


def test_a_script_that_takes_too_long(fleet: ConnectionPool, host: Host, tmp_path: Path) -> None:
    pids = tmp_path / "pid"
    with pytest.raises(Trouble, match=r"no end of the script after 1 s — found last words"):
        fleet.run(host, Job(f"echo $$ >{pids}; echo last words; sleep 600", watched=True, timeout=1))
    wait_until(lambda: not alive(int(pids.read_text())), "the script has ended")


def test_send_streams_into_the_script(fleet: ConnectionPool, host: Host) -> None:
    chunk = os.urandom(100_000)
    reply = fleet.send(host, Job("sha256sum; echo done >&2"), (chunk for _ in range(50)))
    assert reply.out.split()[0] == hashlib.sha256(chunk * 50).hexdigest()
    assert reply.err == "done\n"


def test_send_to_a_script_that_does_not_read(fleet: ConnectionPool, host: Host) -> None:
    reply = fleet.send(host, Job("echo no >&2; exit 3"), (bytes(100_000) for _ in range(100)))
    assert (reply.code, reply.err) == (3, "no\n")


def test_send_while_the_script_talks_more_than_a_pipe_holds(fleet: ConnectionPool, host: Host) -> None:
    reply = fleet.send(host, Job("cat"), (bytes(100_000) for _ in range(80)))
    assert len(reply.out) == 8_000_000


def test_send_does_not_take_an_error_of_its_source_for_the_end(fleet: ConnectionPool, host: Host) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        fleet.send(host, Job("cat >/dev/null"), chunks())


def test_send_passes_an_error_of_its_source_on(fleet: ConnectionPool, host: Host) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"x"
        raise Trouble

    with pytest.raises(Trouble) as caught:
        fleet.send(host, Job("cat >/dev/null; sleep 1"), chunks())
    assert not caught.value.problems
    assert fleet.run(host, Job("echo on")).out == "on\n"


def test_hold_until_closed(fleet: ConnectionPool, host: Host) -> None:
    lines: list[str] = []
    script = "trap 'echo cleaned; exit 5' TERM; echo dir=/a=b; echo dir=later; echo ready=; sleep 600 & wait"
    hold = fleet.hold(host, Job(script, timeout=None), lines.append, keys=("dir", "ready"))
    assert hold.wait_for("dir", SAFETY) == "/a=b"
    assert hold.wait_for("ready", SAFETY) == ""
    reply = hold.close()
    assert (reply.code, reply.out.splitlines()) == (5, ["dir=/a=b", "dir=later", "ready=", "cleaned"])
    assert lines[0] == "dir=/a=b"
    assert hold.close() == reply


def test_hold_of_a_script_that_ends_or_says_nothing(fleet: ConnectionPool, host: Host) -> None:
    hold = fleet.hold(host, Job("echo no nodes >&2; exit 4"), keys=("job",))
    with pytest.raises(Trouble, match=r"exit code 4 before it printed job — found no nodes"):
        hold.wait_for("job", SAFETY)
    assert hold.close().code == 4
    quiet = fleet.hold(host, Job("sleep 600", timeout=None), keys=("job",))
    with pytest.raises(Trouble, match=r"no job from a held script after 0.1 s"):
        quiet.wait_for("job", 0.1)
    assert quiet.close().code == 143


def test_closing_ends_the_whole_session_of_a_script(fleet: ConnectionPool, host: Host, tmp_path: Path) -> None:
    """Also programs in a process group of their own, and one that does not care about TERM."""
    pids = tmp_path / "pids"
    script = f"""
    timeout 600 sleep 600 & echo $! >>{pids}
    bash -c 'trap "" TERM; echo $$ >>{pids}; while :; do sleep 1; done' &
    echo $$ >>{pids}
    echo ready=1
    wait"""
    hold = fleet.hold(host, Job(script, timeout=None), keys=("ready",))
    hold.wait_for("ready", SAFETY)
    wait_until(lambda: len(pids.read_text().split()) == 3, "all three run")
    hold.close()
    assert not [pid for pid in map(int, pids.read_text().split()) if alive(pid)]


def test_a_script_that_ended_leaves_what_it_started_on_purpose(
    fleet: ConnectionPool, host: Host, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    fleet.run(host, Job(f"sleep 600 >/dev/null 2>&1 & echo $! >{pid_file}", watched=True))
    pid = int(pid_file.read_text())
    assert alive(pid)
    os.kill(pid, signal.SIGKILL)


def test_close_frees_every_waiting_thread(ssh_lab: Lab, host: Host, tmp_path: Path) -> None:
    fleet = ConnectionPool([host], ssh_lab.options())
    ended: list[object] = []

    def wait(job: Job) -> None:
        try:
            ended.append(fleet.run(host, job))
        except Trouble as trouble:
            ended.append(trouble)

    jobs = [Job(f"echo $$ >{tmp_path}/{number}; sleep 600", watched=number > 0, timeout=None) for number in range(2)]
    jobs[0] = structs.replace(jobs[0], script=f"echo $$ >{tmp_path}/0; exec sleep 600")
    threads = [threading.Thread(target=wait, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "both scripts run")
    fleet.close()
    for thread in threads:
        thread.join(SAFETY)
    assert len(ended) == 2
    with pytest.raises(Trouble, match="the run is ending"):
        fleet.run(host, jobs[0])
    wait_until(lambda: not alive(int((tmp_path / "1").read_text())), "the watched script has ended")
    for number in range(2):
        if alive(pid := int((tmp_path / str(number)).read_text())):
            os.kill(pid, signal.SIGKILL)


CONTROLLER = """
import sys, json
from deepep_bootstrap.remote.fleet import ConnectionPool, Options
from deepep_bootstrap.remote.jobs import Job
from deepep_bootstrap.remote.host import Host
host = Host(**json.loads(sys.argv[1]))
fleet = ConnectionPool([host], Options(ssh_config=sys.argv[2]))
try:
    fleet.run_all([host], lambda host: Job(sys.argv[3], watched=True, timeout=None), lambda name, line: print(line, flush=True))
except KeyboardInterrupt:
    fleet.close()
    sys.exit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_watched_script_ends_with_its_controller(ssh_lab: Lab, host: Host, number: signal.Signals) -> None:
    script = "echo $$; sleep 600 & echo $!; wait"
    words = [
        sys.executable,
        "-c",
        CONTROLLER,
        json.dumps(msgspec.to_builtins(host)),
        str(ssh_lab.folder / "config"),
        script,
    ]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        pids = [int(controller.stdout.readline()) for _ in range(2)]
        assert all(alive(pid) for pid in pids)
        controller.send_signal(number)
        controller.wait(SAFETY)
        wait_until(lambda: not any(alive(pid) for pid in pids), "nothing of the script is left")


# Reaching a host, or not.


def test_a_changed_host_key(ssh_lab: Lab) -> None:
    first, second = ssh_lab.start("127.0.0.4"), ssh_lab.start("127.0.0.4", known=False)
    with ssh_lab.known_hosts.open("a") as file:
        file.write(second.known().replace(second.host_key.split()[1], first.host_key.split()[1]))
    message = trouble_of(ConnectionPool([], ssh_lab.options(accept_new_host_keys=True)), ssh_lab.host(second))
    assert "its host key has changed since" in message
    assert f"{ssh_lab.known_hosts}:" in message
    assert f"ssh-keygen -R '[127.0.0.4]:{second.port}'" in message
    assert message.count("SHA256:") == 2


def fingerprint(server: Sshd) -> str:
    return subprocess.run(
        ["ssh-keygen", "-lf", server.folder / "hk.pub"], check=True, capture_output=True, text=True
    ).stdout.split()[1]


def test_an_unknown_host_key_and_accepting_it(ssh_lab: Lab) -> None:
    server = ssh_lab.start("127.0.0.5", known=False)
    host = ssh_lab.host(server)
    before = ssh_lab.known_hosts.read_text()
    message = trouble_of(ConnectionPool([host], ssh_lab.options()), host)
    assert f"its host key is not in known_hosts — found {fingerprint(server)} (ssh-ed25519)" in message
    assert "--accept-new-host-keys" in message
    assert ssh_lab.known_hosts.read_text() == before
    said: list[str] = []
    fleet = ConnectionPool([host], ssh_lab.options(accept_new_host_keys=True, tell=said.append))
    assert fleet.run(host, Job("echo in")).out == "in\n"
    fleet.close()
    assert said == [f"127.0.0.5: new host key {fingerprint(server)} (ssh-ed25519) added to {ssh_lab.known_hosts}"]
    assert ssh_lab.known_hosts.read_text() == before + server.known()
    again = ConnectionPool([host], ssh_lab.options())
    assert again.run(host, Job("echo in")).out == "in\n"
    again.close()


def test_a_new_key_goes_after_a_line_without_end_and_hashed_where_that_is_wished(ssh_lab: Lab, tmp_path: Path) -> None:
    server = ssh_lab.start("127.0.0.5", known=False)
    known = tmp_path / "new" / "known_hosts"
    config = tmp_path / "config"
    config.write_text(f"Host *\n HashKnownHosts yes\n GlobalKnownHostsFile none\n UserKnownHostsFile {known}\n")
    host = ssh_lab.host(server)
    fleet = ConnectionPool(
        [host], ssh_lab.options(ssh_config=str(config), accept_new_host_keys=True, tell=lambda line: None)
    )
    fleet.run(host, Job("true"))
    fleet.close()
    assert known.read_text().startswith("|1|")
    assert known.parent.stat().st_mode & 0o777 == 0o700
    found = subprocess.run(
        ["ssh-keygen", "-F", f"[127.0.0.5]:{server.port}", "-f", known], capture_output=True, text=True, check=False
    )
    assert "found" in found.stdout
    known.write_text(known.read_text().rstrip("\n"))
    other = ssh_lab.start("127.0.0.6", known=False)
    fleet = ConnectionPool(
        [], ssh_lab.options(ssh_config=str(config), accept_new_host_keys=True, tell=lambda line: None)
    )
    fleet.run(ssh_lab.host(other), Job("true"))
    fleet.run(host, Job("true"))
    fleet.close()
    assert len(known.read_text().splitlines()) == 2


def test_hashed_known_hosts(ssh_lab: Lab, tmp_path: Path) -> None:
    server = ssh_lab.start("127.0.0.7", known=False)
    known = tmp_path / "known"
    known.write_text(server.known())
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", known], check=True, capture_output=True)
    assert known.read_text().startswith("|1|")
    host = ssh_lab.host(server)
    fleet = ConnectionPool([host], ssh_lab.options(known_hosts=(str(known),)))
    assert fleet.run(host, Job("echo in")).code == 0
    fleet.close()
    known.write_text(known.read_text().replace("|1|", "|1|AAAA"))
    assert "not in known_hosts" in trouble_of(ConnectionPool([host], ssh_lab.options(known_hosts=(str(known),))), host)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{name} {key}", ""),
        ("*,!{name},!{address} {key}", "not in known_hosts"),
        ("127.0.0.* {key}", ""),
        ("{address} {key}", ""),
        ("@revoked * {key}\n{name} {key}", "marks as revoked"),
        ("@cert-authority * {key}", "certificates of hosts are not checked here"),
        ("{address} {other}", "not in known_hosts"),
        ("{name} {other}\n{name} {key}", ""),
        ("{name} ssh-rsa AAAAB3NzaC1yc2E=\n{name} broken\n# {name} {key}", "has changed"),
    ],
)
def test_lines_of_known_hosts(ssh_lab: Lab, server: Sshd, tmp_path: Path, line: str, message: str) -> None:
    key = " ".join(server.host_key.split()[:2])
    other = " ".join(make_key(tmp_path / "other").split()[:2])
    known = tmp_path / "known"
    known.write_text(
        line.format(name=f"[{server.address}]:{server.port}", address=server.address, key=key, other=other) + "\n"
    )
    host = ssh_lab.host(server)
    fleet = ConnectionPool([host], ssh_lab.options(known_hosts=(str(known),)))
    if message:
        assert message in trouble_of(fleet, host)
    else:
        assert fleet.run(host, Job("true")).code == 0
        fleet.close()


def test_the_kind_of_key_that_is_known_is_asked_for(ssh_lab: Lab, tmp_path: Path) -> None:
    second = make_key(tmp_path / "rsa", "rsa")
    server = ssh_lab.start("127.0.0.8", known=False, lines=f"HostKey {tmp_path}/rsa")
    known = tmp_path / "known"
    known.write_text(f"[127.0.0.8]:{server.port} {' '.join(second.split()[:2])}\n")
    host = ssh_lab.host(server)
    fleet = ConnectionPool([host], ssh_lab.options(known_hosts=(str(known),)))
    assert fleet.run(host, Job("true")).code == 0
    fleet.close()


def test_a_refused_port(ssh_lab: Lab) -> None:
    port = free_port("127.0.0.9")
    assert f"refuses connections on port {port}" in trouble_of(
        ConnectionPool([], ssh_lab.options()), Host("127.0.0.9", port=port)
    )


def test_hosts_that_refuse_are_one_line_whatever_their_addresses(ssh_lab: Lab, tmp_path: Path) -> None:
    config, port = tmp_path / "config", free_port("127.0.0.9")
    config.write_text(
        "".join(f"Host n{number}\n  HostName 127.0.0.{number}\n  Port {port}\n" for number in (9, 10, 11))
    )
    inventory = read_hosts("n[9-11]")
    replies = ConnectionPool(inventory.hosts, ssh_lab.options(ssh_config=str(config))).run_all(
        inventory.hosts, lambda host: Job("true")
    )
    (problem,) = fold_problems([problem for reply in replies.values() for problem in reply.problems], inventory)
    assert (problem.where, problem.what) == ("n[9-11] (3)", f"refuses connections on port {port}")
    assert problem.try_ == f"whether sshd runs there; ssh -v -p {port} {getpass.getuser()}@127.0.0.9"


def test_a_name_that_does_not_exist(ssh_lab: Lab) -> None:
    assert "the name no-such-host.invalid is not known" in trouble_of(
        ConnectionPool([], ssh_lab.options()), Host("no-such-host.invalid")
    )


def test_a_silent_listener(ssh_lab: Lab) -> None:
    with silent_listener() as port:
        message = trouble_of(
            ConnectionPool([], ssh_lab.options(timeouts=Timeouts(connect=1))), Host("127.0.0.3", port=port)
        )
    assert f"takes connections on port {port} but says nothing within 1 s" in message


def test_nobody_waits_for_a_silent_host_when_the_run_ends(ssh_lab: Lab) -> None:
    fleet = ConnectionPool([], ssh_lab.options(timeouts=Timeouts(connect=int(SAFETY), banner=int(SAFETY))))
    with silent_listener() as port, ThreadPoolExecutor(1) as pool:
        silent = Host("127.0.0.3", port=port)
        begun = time.monotonic()
        waiting = pool.submit(fleet.run_all, [silent], lambda host: Job("true"))
        wait_until(lambda: fleet._sessions._opening, "somebody waits for the host")
        fleet.close()
        assert isinstance(waiting.result(SAFETY / 2)[silent.name], Trouble)
    assert time.monotonic() - begun < SAFETY / 2
    assert not fleet._sessions._opening


def test_who_is_asked_and_has_answered_is_told_to_whoever_watches(ssh_lab: Lab, server: Sshd) -> None:
    asked: list[object] = []

    @contextmanager
    def watch(hosts: Sequence[str]) -> Iterator[Callable[[str], None]]:
        asked.append(list(hosts))
        yield asked.append
        asked.append("end")

    fleet = ConnectionPool([], ssh_lab.options(watch=watch))
    hosts = [ssh_lab.host(server), Host("no-such-host.invalid")]
    fleet.run_all(hosts, lambda host: Job("true"))
    assert asked[0] == [host.name for host in hosts]
    assert sorted(map(str, asked[1:-1])) == sorted(host.name for host in hosts)
    assert asked[-1] == "end"
    fleet.run_all(hosts[:1], lambda host: Job("true"), lambda host, line: None)
    assert asked[-1] == "end", "who gets the lines shows them"
    fleet.close()


def test_a_listener_that_is_no_sshd(ssh_lab: Lab, server: Sshd) -> None:
    with cutting_relay(server, 0) as port:
        assert "closes connections on port" in trouble_of(
            ConnectionPool([], ssh_lab.options()), Host("127.0.0.3", port=port)
        )


def test_closed_in_the_middle_of_the_log_in(ssh_lab: Lab) -> None:
    """The server closes after the first refused key, which is what it does when too many keys were tried."""
    server = ssh_lab.start("127.0.0.9", lines="MaxAuthTries 1")
    (server.folder / "authorized_keys").write_text("")
    assert "closed the connection during the log-in" in trouble_of(
        ConnectionPool([], ssh_lab.options()), ssh_lab.host(server)
    )


def test_cut_anywhere_on_the_way_in(ssh_lab: Lab, server: Sshd) -> None:
    """However far the handshake came: a message in our own words, and never a wait for something that cannot come."""
    messages = set()
    for after in range(0, 2400, 100):
        with ssh_lab.known_hosts.open("a") as known, cutting_relay(server, after) as port:
            known.write(server.known(f"[127.0.0.3]:{port}"))
            known.flush()
            host = structs.replace(ssh_lab.host(server), name="127.0.0.3", port=port)
            message = trouble_of(ConnectionPool([host], ssh_lab.options()), host)
            messages.add(message.partition(" — ")[0].partition(". Try")[0].replace(str(port), "PORT"))
    assert messages <= {
        "127.0.0.3: closes connections on port PORT before the SSH handshake",
        "127.0.0.3: the SSH handshake on port PORT failed",
        "127.0.0.3: closed the connection during the log-in",
        "127.0.0.3: the connection was lost",
        "127.0.0.3: the connection was lost while a script ran",
    }
    assert len(messages) > 1


def test_a_key_the_host_does_not_know(ssh_lab: Lab, server: Sshd, tmp_path: Path) -> None:
    make_key(tmp_path / "stranger")
    host = ssh_lab.host(server, identity=str(tmp_path / "stranger"))
    message = trouble_of(ConnectionPool([host], ssh_lab.options()), host)
    assert f"does not let {getpass.getuser()} in" in message
    assert "1 key tried" in message


def test_no_key_at_all(ssh_lab: Lab, server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    host = ssh_lab.host(server, identity="")
    assert f"there is no key to log in with as {getpass.getuser()}" in trouble_of(
        ConnectionPool([host], ssh_lab.options()), host
    )


def test_the_agent_is_asked_when_no_key_is_named(
    ssh_lab: Lab, server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    agent = agent_of(monkeypatch, tmp_path)
    subprocess.run(["ssh-add", "-q", ssh_lab.folder / "id"], check=True)
    host = ssh_lab.host(server, identity="")
    fleet = ConnectionPool([host], ssh_lab.options())
    assert fleet.run(host, Job("true")).code == 0
    fleet.close()
    agent.terminate()
    agent.wait()


@pytest.mark.parametrize("content", ["", "nonsense\n", None])
def test_a_key_file_that_cannot_be_used(ssh_lab: Lab, server: Sshd, tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content)
    host = ssh_lab.host(server, identity=str(path))
    with pytest.raises(Trouble, match=r"is no private key|cannot be read"):
        ConnectionPool([host], ssh_lab.options()).run(host, Job("true"))


def agent_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> subprocess.Popen[bytes]:
    socket = tmp_path / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.DEVNULL)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
    wait_until(
        lambda: subprocess.run(["ssh-add", "-l"], capture_output=True, check=False).returncode != 2, "the agent answers"
    )
    return agent


def test_a_locked_key_comes_from_the_agent(
    ssh_lab: Lab, server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    key = tmp_path / "locked"
    key.write_bytes((ssh_lab.folder / "id").read_bytes())
    key.chmod(0o600)
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", key], check=True, capture_output=True)
    host = ssh_lab.host(server, identity=str(key))
    assert f"{key} needs a passphrase" in trouble_of(ConnectionPool([host], ssh_lab.options()), host)
    agent = agent_of(monkeypatch, tmp_path)
    subprocess.run(["ssh-add", "-q", ssh_lab.folder / "id"], check=True)
    fleet = ConnectionPool([host], ssh_lab.options())
    assert fleet.run(host, Job("true")).code == 0
    fleet.close()
    agent.terminate()
    agent.wait()


def test_a_jump_host(ssh_lab: Lab, server: Sshd) -> None:
    behind = ssh_lab.start("127.0.0.10", lines="AllowUsers *@127.0.0.2 *@127.0.0.1")
    host = ssh_lab.host(behind, jump=f"{server.address}:{server.port}")
    fleet = ConnectionPool([host], ssh_lab.options())
    reply = fleet.run(host, Job("echo $SSH_CONNECTION"))
    assert reply.out.split()[2:] == ["127.0.0.10", str(behind.port)]
    fleet.close()
    nowhere = structs.replace(host, port=free_port("127.0.0.10"))
    assert "jump host 127.0.0.2 cannot reach it" in trouble_of(ConnectionPool([], ssh_lab.options()), nowhere)
    dead = structs.replace(host, jump=f"127.0.0.9:{free_port('127.0.0.9')}")
    assert "jump host 127.0.0.9: refuses connections" in trouble_of(ConnectionPool([], ssh_lab.options()), dead)


def test_many_hosts_share_one_session_to_their_jump_host(ssh_lab: Lab, tmp_path: Path) -> None:
    jump = ssh_lab.start("127.0.0.11")
    targets = [ssh_lab.start(f"127.0.0.{20 + number}") for number in range(4)]
    hosts = [ssh_lab.host(target, jump=f"{jump.address}:{jump.port}") for target in targets]
    fleet = ConnectionPool(hosts, ssh_lab.options())
    replies = fleet.run_all(hosts, lambda host: Job(f"echo {host.name}"))
    fleet.close()
    said = {name: reply.out for name, reply in replies.items() if isinstance(reply, Reply)}
    assert said == {host.name: f"{host.name}\n" for host in hosts}
    assert jump.log().count("Accepted publickey") == 1


def test_ssh_config(ssh_lab: Lab, server: Sshd, tmp_path: Path) -> None:
    (tmp_path / "inner").write_text("Host gpu-*\n  HostKeyAlias cluster\n  IdentityFile %d/none\n")
    known = tmp_path / "known"
    known.write_text(server.known("cluster"))
    config = tmp_path / "config"
    config.write_text(f"""
Include {tmp_path}/inn*
UserKnownHostsFile "{known}"
Host gpu-1 other
  HostName {server.address}
  Port {server.port}
  IdentityFile {ssh_lab.folder}/id
Host gpu-2
  HostName 192.0.2.1
  ProxyCommand {sys.executable} -u {tmp_path}/proxy.py %h %p 2>/dev/null
  IdentityFile {ssh_lab.folder}/id
""")
    (tmp_path / "proxy.py").write_text(f"""
import socket, sys, threading
assert sys.argv[1:] == ["192.0.2.1", "22"]
line = socket.create_connection(("{server.address}", {server.port}))
def back():
    while data := line.recv(65536):
        sys.stdout.buffer.write(data); sys.stdout.flush()
threading.Thread(target=back, daemon=True).start()
while data := sys.stdin.buffer.raw.read(65536):
    line.sendall(data)
""")
    hosts = [Host("gpu-1"), Host("gpu-2")]
    fleet = ConnectionPool(hosts, ssh_lab.options(ssh_config=str(config)))
    replies = fleet.run_all(hosts, lambda host: Job(f"echo {host.name}"))
    fleet.close()
    assert [reply.out if isinstance(reply, Reply) else str(reply) for reply in replies.values()] == [
        "gpu-1\n",
        "gpu-2\n",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Host n1\n  Port 99999\n", "Port 99999"),
        ("Host n1\n ProxyJump a\nHost a\n ProxyJump b\nHost b\n ProxyJump a\n", "in a circle"),
    ],
)
def test_an_ssh_config_that_cannot_be_used_for_a_host(ssh_lab: Lab, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config").write_text(text)
    host = Host("n1")
    with pytest.raises(Trouble, match=message):
        ConnectionPool([host], ssh_lab.options(ssh_config=str(tmp_path / "config"))).run(host, Job("true"))


def test_an_ssh_config_that_cannot_be_read(ssh_lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(Trouble, match="cannot be read"):
        ConnectionPool([], ssh_lab.options(ssh_config=str(tmp_path / "none")))
    (tmp_path / "config").write_text("Host\n")
    with pytest.raises(Trouble, match="cannot be read"):
        ConnectionPool([], ssh_lab.options(ssh_config=str(tmp_path / "config")))


def test_a_pattern_that_also_matches_the_jump_host(ssh_lab: Lab, server: Sshd, tmp_path: Path) -> None:
    behind = ssh_lab.start("127.0.0.12")
    (tmp_path / "config").write_text(f"""
Host jump
  HostName {server.address}
  Port {server.port}
Host *
  ProxyJump jump
  UserKnownHostsFile {ssh_lab.known_hosts}
""")
    host = ssh_lab.host(behind)
    fleet = ConnectionPool([host], ssh_lab.options(ssh_config=str(tmp_path / "config")))
    assert fleet.run(host, Job("true")).code == 0
    fleet.close()


# Many hosts, and hosts that go away.


def test_twenty_hosts_at_once_and_five_that_fail(ssh_lab: Lab) -> None:
    servers = [ssh_lab.start(f"127.0.1.{number}") for number in range(1, 21)]
    hosts = [ssh_lab.host(server) for server in servers]
    refused = [
        Host(f"127.0.2.{number}", port=free_port("127.0.2.1"), identity=str(ssh_lab.folder / "id"))
        for number in range(1, 4)
    ]
    with silent_listener("127.0.2.9") as port:
        silent = Host("127.0.2.9", port=port)
        local = Host("here", connection="local")
        everyone = [*refused, silent, *hosts, local]
        lines: list[tuple[str, str]] = []
        fleet = ConnectionPool(everyone, ssh_lab.options(forks=8, timeouts=Timeouts(connect=2)))
        say = 'echo "$1"; echo "$1" >&2'
        replies = fleet.run_all(
            everyone, lambda host: Job(say, args=(host.name,)), lambda name, line: lines.append((name, line))
        )
        fleet.close()
    assert list(replies) == [host.name for host in everyone]
    good = {name: reply.out for name, reply in replies.items() if isinstance(reply, Reply)}
    assert good == {host.name: f"{host.name}\n" for host in [*hosts, local]}
    assert sorted(lines) == sorted([(name, name) for name in good] * 2)
    assert {type(replies[host.name]) for host in [*refused, silent]} == {Trouble}


def test_one_session_serves_many_scripts_and_a_lost_one_is_replaced(ssh_lab: Lab) -> None:
    server = ssh_lab.start("127.0.0.13")
    host = ssh_lab.host(server)
    fleet = ConnectionPool([host], ssh_lab.options())
    both = [threading.Thread(target=fleet.run, args=(host, Job("sleep 0.2"))) for _ in range(5)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(SAFETY)
    assert server.log().count("Accepted publickey") == 1
    with pytest.raises(Trouble, match="the connection was lost while a script ran"):
        # The script ends the sshd process of its own session.
        fleet.run(host, Job("kill -KILL $(ps -o ppid= -p $(ps -o ppid= -p $$)); sleep 5"))
    assert fleet.run(host, Job("echo back")).out == "back\n"
    fleet.close()


def test_a_host_that_stops_answering(ssh_lab: Lab, tmp_path: Path) -> None:
    server = ssh_lab.start("127.0.0.14")
    host = ssh_lab.host(server)
    fleet = ConnectionPool([host], ssh_lab.options(timeouts=Timeouts(connect=3, keepalive=1)))
    stopped: list[int] = []

    def freeze(line: str) -> None:
        stopped.append(int(line))
        os.kill(stopped[0], signal.SIGSTOP)

    # The script's parent is the shell that sshd started; that one's is the sshd of the session.
    script = f"echo $$ >{tmp_path}/pid; ps -o ppid= -p $(ps -o ppid= -p $$) | tr -d ' '; sleep 600"
    try:
        with pytest.raises(Trouble, match="stopped answering while a script ran"):
            fleet.run(host, Job(script, watched=True, timeout=SAFETY), freeze)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        fleet.close()
    wait_until(lambda: not alive(int((tmp_path / "pid").read_text())), "the script has ended too")


def test_a_quiet_host_is_not_given_up(ssh_lab: Lab, server: Sshd) -> None:
    host = ssh_lab.host(server)
    fleet = ConnectionPool([host], ssh_lab.options(timeouts=Timeouts(connect=3, keepalive=1)))
    assert fleet.run(host, Job("sleep 6; echo still")).out == "still\n"
    fleet.close()


@pytest.mark.parametrize(
    ("address", "lines", "at_once"),
    [("127.0.0.15", "", 24), ("127.0.0.18", "MaxSessions 1", 3)],
    ids=["sshd's default of 10", "one"],
)
def test_more_scripts_at_once_than_one_session_may_carry(ssh_lab: Lab, address: str, lines: str, at_once: int) -> None:
    host = ssh_lab.host(ssh_lab.start(address, lines=lines))
    fleet = ConnectionPool([host], ssh_lab.options())
    holds = []
    for _ in range(at_once):
        holds.append(fleet.hold(host, Job("echo ready=1; sleep 600"), keys=("ready",)))
        holds[-1].wait_for("ready", SAFETY)
    assert fleet.run(host, Job("echo one more")).out == "one more\n"
    for hold in holds:
        hold.close()
    fleet.close()


def test_an_sshd_that_opens_no_session_at_all(ssh_lab: Lab) -> None:
    host = ssh_lab.host(ssh_lab.start("127.0.0.19", lines="MaxSessions 0"))
    assert "opens no session at all — wanted MaxSessions of 1 or more" in trouble_of(
        ConnectionPool([host], ssh_lab.options()), host
    )


def test_an_account_that_talks_or_has_no_shell(ssh_lab: Lab, server: Sshd) -> None:
    noisy = ssh_lab.start(
        "127.0.0.16", lines='ForceCommand echo welcome; echo be kind >&2; eval "$SSH_ORIGINAL_COMMAND"'
    )
    fleet = ConnectionPool([], ssh_lab.options())
    reply = fleet.run(ssh_lab.host(noisy), Job("echo out; echo err >&2"))
    assert (reply.out, reply.err) == ("out\n", "err\n")
    fleet.close()
    closed = ssh_lab.start("127.0.0.17", lines="ForceCommand echo This account is closed.; exit 1")
    message = trouble_of(ConnectionPool([], ssh_lab.options()), ssh_lab.host(closed))
    assert "did not start a script — found This account is closed." in message


def test_paramiko_says_nothing_on_stderr(ssh_lab: Lab) -> None:
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("paramiko").handlers)
    with silent_listener() as port:
        code = (
            "from deepep_bootstrap.remote.fleet import ConnectionPool, Options\n"
            "from deepep_bootstrap.remote.jobs import Job\n"
            "from deepep_bootstrap.remote.host import Host\nfrom deepep_bootstrap.remote.ssh import Timeouts\n"
            f"hosts=[Host('127.0.0.3', port={port}), Host('127.0.0.3', port=1)]\n"
            "fleet = ConnectionPool(hosts, Options(ssh_config='', timeouts=Timeouts(connect=1, banner=1)))\n"
            "print(len(fleet.run_all(hosts, lambda host: Job('true'))))"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_what_a_host_has_elsewhere_is_found_by_every_later_script(tmp_path: Path) -> None:
    tool = tmp_path / "a folder" / "sinfo"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho $SLURM_CONF\n", encoding="ascii")
    tool.chmod(0o755)
    fleet, here, other = ConnectionPool([]), Host("here", connection="local"), Host("other", connection="local")
    fleet.equip("here", str(tool.parent), {"SLURM_CONF": "/etc/a.conf"})
    said = [
        fleet.run(host, Job("command -v sinfo; sinfo; true", env={"A": "1"})).out.split("\n") for host in (here, other)
    ]
    assert said[0][-3:] == [str(tool), "/etc/a.conf", ""]
    assert str(tool) not in said[1]


def test_a_secret_does_not_show() -> None:
    secret = Secret("hunter2")
    assert "hunter2" not in f"{secret} {secret!r} {Options(sudo_password=secret)}"
    assert secret.reveal() == "hunter2"


class OtherWay:
    """A way that reaches one host of all, and remembers whom it was offered."""

    name = "other"

    def __init__(self) -> None:
        self.offered: list[str] = []

    def run_all(self, jobs: Mapping[Host, Job]) -> Mapping[str, Reply | Trouble]:
        self.offered += [host.name for host in jobs]
        return {"second": Reply("second", 0, "by the other\n", "talk\n", 0.1)}


def test_who_is_not_reached_by_another_way_is_asked_over_a_session() -> None:
    hosts, other = [Host(name, connection="local") for name in ("first", "second")], OtherWay()
    told: list[tuple[str, str]] = []
    with closing(ConnectionPool(hosts)) as pool:
        pool.prefer(other)
        job = Job("echo by a session", anywhere=True)
        replies = pool.run_all(hosts, lambda _: job, lambda host, line: told.append((host, line)))
        ways = dict(pool.ways)
        bound = pool.run_all(hosts, lambda _: structs.replace(job, anywhere=False))
    assert list(replies) == ["first", "second"]
    assert [reply.out for reply in replies.values() if isinstance(reply, Reply)] == ["by a session\n", "by the other\n"]
    assert sorted(told) == [("first", "by a session"), ("second", "by the other"), ("second", "talk")]
    assert ways == {"first": "local", "second": "other"}
    # What does not say that it may come by any way is not offered to it.
    assert other.offered == ["first", "second"]
    assert pool.ways == {"first": "local", "second": "local"}
    assert {reply.out for reply in bound.values() if isinstance(reply, Reply)} == {"by a session\n"}
