"""Hosts whose key changes between two connections, hosts that show the key of another one, and a `sudo` that wants the
password for somebody else."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tomlkit

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.remote import fleet, script
from deepep_bootstrap.remote.channel import Secret
from deepep_bootstrap.remote.fleet import ConnectionPool
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Job, Reply
from tests.support.e2e import Engine
from tests.support.kills import sessions
from tests.support.paths import CASES
from tests.support.sshd import Lab, Sshd, with_accounts
from tests.support.terminal import Terminal

pytest_plugins = ["tests.support.sshd", "tests.support.lab", "tests.support.e2e"]
pytestmark = [pytest.mark.usefixtures("programs")]

PASSWORD = "correct horse 'battery' \\ $staple"


# Keys of hosts


def replies_of(pool: ConnectionPool, *hosts: Host) -> dict[str, Reply | Trouble]:
    return pool.run_all(hosts, lambda host: Job("echo here"))


def refused(reply: Reply | Trouble, host: Host) -> str:
    assert isinstance(reply, Trouble)
    (problem,) = reply.problems
    assert problem.where == host.name
    return str(problem)


@pytest.mark.sample
@pytest.mark.parametrize("accept", [False, True])
def test_a_key_that_changes_between_two_connections_is_refused(ssh_lab: Lab, accept: bool) -> None:
    changes, stays = ssh_lab.start("127.0.4.1"), ssh_lab.start("127.0.4.2")
    hosts = ssh_lab.host(changes), ssh_lab.host(stays)
    pool = ConnectionPool(hosts, ssh_lab.options(accept_new_host_keys=accept))
    assert all(isinstance(reply, Reply) for reply in replies_of(pool, *hosts).values())
    changes.stop()
    ssh_lab.start(changes.address, port=changes.port, known=False)
    pool.forget(hosts[0])  # what is open to a host that rebooted is closed
    replies = replies_of(pool, *hosts)
    pool.close()
    assert "its host key has changed since" in refused(replies[changes.address], hosts[0])
    assert isinstance(replies[stays.address], Reply)
    assert ssh_lab.known_hosts.read_text().count(f"[{changes.address}]:{changes.port} ") == 1


@pytest.mark.sample
def test_a_host_that_shows_the_key_of_another_is_refused(ssh_lab: Lab) -> None:
    other = ssh_lab.start("127.0.4.3")
    lies, new = ssh_lab.start("127.0.4.4"), ssh_lab.start("127.0.4.5", known=False, key_of=other)
    lies.stop()
    ssh_lab.start(lies.address, port=lies.port, known=False, key_of=other)
    hosts = ssh_lab.host(other), ssh_lab.host(lies), ssh_lab.host(new)
    pool = ConnectionPool(hosts, ssh_lab.options())
    replies = replies_of(pool, *hosts)
    pool.close()
    assert isinstance(replies[other.address], Reply)
    assert "its host key has changed since" in refused(replies[lies.address], hosts[1])
    assert "its host key is not in known_hosts" in refused(replies[new.address], hosts[2])


def replace_key(engine: Engine, host: str, make: str) -> None:
    """Give a host of the lab another key, and end every connection to it."""
    key = "/etc/ssh/ssh_host_ed25519_key"
    changed = engine.lab.nsenter(host, f"{make.format(key=key)} && kill $(cat /run/sshd.pid)")
    assert changed.returncode == 0, changed.stderr
    if found := sessions(engine.lab, host):
        engine.lab.nsenter(host, f"kill -KILL {' '.join(found)}")
    assert engine.lab.nsenter(host, "until /usr/sbin/sshd; do sleep 0.1; done").returncode == 0


@pytest.mark.e2e
def test_a_key_that_changes_while_somebody_reads_the_plan_costs_its_host_alone(engine: Engine) -> None:
    engine.use_built()
    terminal = Terminal(engine, "bootstrap", columns=240)
    terminal.expect(r"Go on\? \[y/N\] ")
    replace_key(engine, "n002", "rm {key} && ssh-keygen -q -t ed25519 -N '' -f {key}")
    before = set(engine.lab.disk("n002").rglob("*"))
    try:
        terminal.child.send("y\r")
        assert terminal.end() == 1, terminal.text
        assert set(engine.lab.disk("n002").rglob("*")) == before, "nothing was done on a host that nobody knows"
    finally:
        mine = (engine.lab.lab.identity.parent / "n002").read_text()
        replace_key(engine, "n002", f"cat >{{key}} <<'END'\n{mine}END\ntrue")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.text)
    assert re.search(r"failed +prefix .*n002\s+its host key has changed since", plain), plain
    assert "done verify on " in plain, plain  # behind what stands for a spinner
    assert "with failures on n002" in plain
    ended = engine.run("bootstrap")
    assert ended.code == 0, ended.text


# A hostile sudo

SUDO = """#!/bin/bash
all=("$@")
ask() {{ answer=$("$SUDO_ASKPASS" "password: "); }}
go() {{
  local -i at
  for at in "${{!all[@]}}"; do [[ ${{all[at]}} != -- ]] || break; done
  "${{all[@]:at+1}}"
}}
{does}
"""
"""Runs what sudo was to run as the account itself: root of that host would do it as root."""

SAID = "echo state=ok; echo talk >&2"
JOBS = {
    "answer": Job(SAID, user="root", timeout=None),
    "watched": Job(SAID, user="root", timeout=None, watched=True, log=True),
    "merged": Job(SAID, user="root", timeout=None, watched=True, log=True, merge=True),
}


def hostile_sudos() -> list[dict[str, str]]:
    return list(tomlkit.parse((CASES / "hostile" / "sudo.toml").read_text(encoding="utf-8")).unwrap()["case"])


@pytest.fixture(scope="module")
def account(open_ssh_lab: Lab) -> tuple[Sshd, Path]:
    """A server with an account `asks` that finds its sudo in a folder, which is empty at first."""
    folder = open_ssh_lab.folder
    home, programs, number = folder / "home", folder / "programs", 100_000 + os.getpid()
    for each in (home, programs):
        each.mkdir()
        os.chown(each, number, number)
    prefix = with_accounts(folder, [f"asks:x:{number}:{number}::{home}:/bin/bash"])
    lines = f"SetEnv PATH={programs}:/usr/bin:/bin HEARD={home}/heard"
    return open_ssh_lab.start("127.0.4.6", prefix=prefix, lines=lines), folder


@pytest.fixture
def password_pool(
    open_ssh_lab: Lab, account: tuple[Sshd, Path]
) -> Iterator[Callable[[str], tuple[ConnectionPool, Host]]]:
    pools: list[ConnectionPool] = []

    def make(password: str) -> tuple[ConnectionPool, Host]:
        pools.append(ConnectionPool([], open_ssh_lab.options(sudo_password=Secret(password))))
        return pools[-1], open_ssh_lab.host(account[0], user="asks")

    yield make
    for pool in pools:
        pool.close()


def put_sudo(folder: Path, does: str) -> None:
    sudo = folder / "programs" / "sudo"
    sudo.write_text(SUDO.format(does=does))
    sudo.chmod(0o755)


Pools = Callable[[str], tuple[ConnectionPool, Host]]


@pytest.mark.sample
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("case", hostile_sudos(), ids=lambda case: case["name"].replace(" ", "_"))
def test_a_hostile_sudo_holds_nobody_up_and_its_password_is_not_told(
    case: dict[str, str], job: str, account: tuple[Sshd, Path], password_pool: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "START_LIMIT", 3.0)
    put_sudo(account[1], case["does"])
    pool, host = password_pool(PASSWORD)
    lines: list[str] = []
    reply = pool.run_all([host], lambda _: JOBS[job], lambda _, line: lines.append(line))[host.name]
    if isinstance(reply, Trouble):
        told = [*lines, str(reply)]
        assert case["said"], told
        assert case["said"] in str(reply)
    else:
        told = [*lines, reply.err, reply.said, reply.out if JOBS[job].merge else ""]
        assert case["said"] == "", told
        assert reply.code == 0
        assert reply.out.startswith("state=ok\n")
    assert "horse" not in "\n".join(told)
    heard = account[1] / "home" / "heard"
    assert not heard.exists() or heard.read_text() == "", "what asks once more gets nothing"


@pytest.mark.parametrize(("password", "shown"), [("not", "not"), ("word", "[removed]")])
def test_a_short_password_is_a_part_of_words(
    password: str, shown: str, account: tuple[Sshd, Path], password_pool: Pools
) -> None:
    put_sudo(account[1], 'ask; echo "sudo: $answer" >&2; exit 1')
    pool, host = password_pool(password)
    with pytest.raises(Trouble) as caught:
        pool.run(host, JOBS["answer"])
    assert caught.value.problems[0].found == f"sudo: {shown}"


@pytest.mark.parametrize("password", ["password", "incorrect"])
def test_what_sudo_says_is_understood_where_the_password_is_one_of_its_words(
    password: str, account: tuple[Sshd, Path], password_pool: Pools
) -> None:
    put_sudo(account[1], 'echo "sudo: 1 incorrect password attempt" >&2; exit 1')
    pool, host = password_pool(password)
    with pytest.raises(Trouble, match="sudo does not take the password"):
        pool.run(host, JOBS["answer"])


@pytest.mark.parametrize("kind", ["ssh", "local"])
def test_a_shell_that_closes_its_streams_and_stays_is_given_up(
    kind: str, ssh_lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host("here", connection="local") if kind == "local" else ssh_lab.host(ssh_lab.start("127.0.4.7"))
    monkeypatch.setattr(script, "START_LIMIT", 2.0)
    monkeypatch.setattr(fleet, "COMMAND", "exec >&- 2>&-; exec sleep 600")
    pool = ConnectionPool([host], ssh_lab.options())
    try:
        with pytest.raises(Trouble, match="no script has begun there after 2 s"):
            pool.run(host, Job("true", timeout=None))
    finally:
        pool.close()


def test_a_log_without_a_pause_does_not_outlast_its_time(ssh_lab: Lab) -> None:
    pool = ConnectionPool([], ssh_lab.options())
    job = Job("exec yes >&2", timeout=1.0, watched=True, log=True)
    try:
        with pytest.raises(Trouble, match="no end of the script after 1 s"):
            pool.run(Host("here", connection="local"), job)
    finally:
        pool.close()


@pytest.fixture
def with_password(engine: Engine, tmp_path: Path) -> Engine:
    """Connections are those of keeper, whose sudo asks for a password on every host."""
    text = engine.lab.hosts_file.read_text()
    changed, count = re.subn(r"^defaults .*$", r"\g<0> user=keeper build_user=root", text, flags=re.MULTILINE)
    assert count == 1, text
    engine.hosts = tmp_path / "hosts.txt"
    engine.hosts.write_text(changed)
    for host in engine.lab.hosts:
        done = engine.lab.nsenter(
            host, "echo 'keeper:open-sesame' | chpasswd && echo 'keeper ALL=(ALL) ALL' >/etc/sudoers.d/lab"
        )
        assert done.returncode == 0, done.stderr
    return engine


def run_with_password(engine: Engine, *words: str) -> tuple[int, str]:
    terminal = Terminal(engine, *words, "--sudo-password-prompt", term="dumb", columns=240)
    terminal.expect("sudo password on the hosts: ")
    terminal.child.send("open-sesame\r")
    code = terminal.end()
    return code, terminal.text


@pytest.mark.e2e
def test_no_log_and_no_document_holds_the_password_that_one_host_tells(with_password: Engine, tmp_path: Path) -> None:
    engine, lab = with_password, with_password.lab
    engine.use_built()
    state = tmp_path / "state"
    engine.env["XDG_STATE_HOME"] = str(state)
    tells = SUDO.format(does='ask; go; code=$?; echo "sudo: $answer" >&2; exit "$code"')
    refuses = SUDO.format(does='ask; echo "sudo: $answer is not for you" >&2; exit 1')
    for text, verb in ((tells, "doctor"), (refuses, "plan")):
        put = f"cat >/usr/local/bin/sudo <<'END_OF_TOOL'\n{text}END_OF_TOOL\nchmod 755 /usr/local/bin/sudo"
        assert lab.nsenter("n002", put).returncode == 0
        for words, allowed in (((verb, "--json"), {0, 1, 4}), (("bootstrap", "--yes"), {1})):
            code, said = run_with_password(engine, *words)
            assert code in allowed, said
            assert "open-sesame" not in said
    logs = [path for folder in (state, engine.on_disk / "logs") for path in folder.rglob("*") if path.is_file()]
    assert logs
    assert [path for path in logs if b"open-sesame" in path.read_bytes()] == []
    lab.nsenter("n002", "rm /usr/local/bin/sudo")
    code, said = run_with_password(engine, "bootstrap", "--yes")
    assert code == 0, said
