"""ClusterShell's tree: who is asked through a gateway, what a gateway may say, and whose answer a line is. The gateways
of these tests are ClusterShell's own program on this machine, behind a stand-in for ssh; tests/e2e/test_tree.py has
them on hosts of their own."""

from __future__ import annotations

import base64
import os
import pickle
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ClusterShell.NodeSet import NodeSet
from ClusterShell.Propagation import PropagationTreeRouter
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.hostsfile import Inventory, Settings, named_hosts
from deepep_bootstrap.remote import channel, tree
from deepep_bootstrap.remote.fleet import ConnectionPool, Options
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Job, Reply
from deepep_bootstrap.remote.packed import Packed, read_packed
from deepep_bootstrap.remote.script import ANSWER_LIMIT
from deepep_bootstrap.remote.tree import Gateway, Tree
from tests.support.paths import ROOT

pytestmark = pytest.mark.usefixtures("programs")

GATEWAYS = (Gateway(Host("gw1"), "python3"), Gateway(Host("gw2"), "python3"))

SSH = """\
#!/bin/sh
# Stands in for a gateway's ssh: the last word is the command, the one before it the host.
for word; do before=$host host=$command command=$word; done
echo "$*" >>"$0.log"
[ ! -x "$0.$host" ] || . "$0.$host"
HOST=$host exec /bin/sh -c "$command"
"""


class Pool:
    """Stands in for the connections: who logs in where, and how."""

    def __init__(self, folder: Path, users: dict[str, str] | None = None) -> None:
        self.folder, self.users = folder, users or {}
        self.told: list[str] = []
        self.has_password = False
        self.instead: dict[str, str] = {}

    def user_of(self, host: Host) -> str:
        return self.users.get(host.name, "root")

    def payload(self, host: Host, job: Job) -> bytes:
        return channel.payload(channel.compose(job.script, job.args, job.env))

    def openssh(self, host: Host) -> tuple[str, ...]:
        path = f"PATH={self.folder}:{Path(sys.executable).parent}:$PATH; export PATH;"
        return ("/bin/sh", "-c", f'{path} {self.instead.get(host.name, "")} eval "$1"', "ssh")

    def tell(self, text: str) -> None:
        self.told.append(text)


@pytest.fixture
def pool(tmp_path: Path) -> Pool:
    program = tmp_path / "ssh"
    program.write_text(SSH)
    program.chmod(0o755)
    return Pool(tmp_path)


def on(pool: Pool, host: str, script: str) -> None:
    """Let a host do something in place of the command."""
    program = pool.folder / f"ssh.{host}"
    program.write_text(script)
    program.chmod(0o755)


def ask(pool: Pool, *hosts: Host | str, script: str = 'echo "$HOST"', **more: Any) -> dict[str, str]:
    """Ask hosts through two gateways; return what each answered, by name."""
    asked = [each if isinstance(each, Host) else Host(each) for each in hosts]
    many = Tree(cast(ConnectionPool, pool), GATEWAYS, 2)
    found = many.run_all({host: Job(script, look=True, anywhere=True, **more) for host in asked})
    return {name: reply.out if isinstance(reply, Reply) else str(reply) for name, reply in found.items()}


def test_hosts_behind_gateways_give_what_sessions_give(pool: Pool) -> None:
    names = [f"n00{number}" for number in range(1, 7)]
    script = 'printf \'%s|\' "$HOST" "$A" "$@"; printf \'\\377\\0\\r\\nend\'; echo talk >&2; exit 3'
    many = Tree(cast(ConnectionPool, pool), GATEWAYS, 2)
    job = Job(script, args=("t w o", "'"), env={"A": "x\ny"}, look=True, anywhere=True)
    found = many.run_all({Host(name): job for name in names})
    assert pool.told == []
    assert {name: reply.out for name, reply in found.items() if isinstance(reply, Reply)} == {
        name: f"{name}|x\ny|t w o|'|�\0\r\nend" for name in names
    }
    assert {(reply.code, reply.err) for reply in found.values() if isinstance(reply, Reply)} == {(3, "talk\n")}


def test_what_a_gateway_tells_its_ssh(pool: Pool) -> None:
    """Strict about host keys, asking nobody; the account and the port of the hosts file."""
    pool.users = {"n002": "alice"}
    assert ask(pool, "n001", Host("n002", port=2222)) == {"n001": "n001\n", "n002": "n002\n"}
    first, second = sorted((pool.folder / "ssh.log").read_text().splitlines(), key=lambda line: "n002" in line)
    for line in (first, second):
        assert {"-oStrictHostKeyChecking=yes", "-oBatchMode=yes", "-oConnectTimeout=8"} <= {*line.split()}
    assert ("-l root", "-p " in first) == ("-l root", False)
    assert "-l alice" in second
    assert "-p 2222" in second


def test_an_answer_is_that_of_its_host(pool: Pool) -> None:
    """Whatever start-up files and scripts print, also another host's name, and ends of lines of all kinds."""
    on(pool, "n001", "printf 'n002: code=0\\nout=x\\n<channel>\\r</message>\\0no end'; echo n002 >&2")
    lies = "printf '@deepep-bootstrap starts@\\ncode=0\\n</message></channel>\\n'"
    assert ask(pool, "n001", "n002", "n003", script=f"{lies}; echo mine") == dict.fromkeys(
        ("n001", "n002", "n003"), "@deepep-bootstrap starts@\ncode=0\n</message></channel>\nmine\n"
    )


def test_a_host_that_its_gateway_cannot_reach_is_left_to_ssh(pool: Pool) -> None:
    on(pool, "n002", "echo 'Host key verification failed.\033[2J' >&2; exit 255")
    on(pool, "n003", "exit 0")
    on(pool, "n004", 'HOST=n004 /bin/sh -c "$command" | head -c 3000; exit')
    assert [*ask(pool, "n001", "n002", "n003", "n004", script="seq 4000")] == ["n001"]
    assert [line.replace("gw2", "gw1") for line in pool.told] == [
        "over SSH: n002 (gateway gw1: Host key verification failed.)",
        "over SSH: n003 (gateway gw1 brought no whole answer)",
        "over SSH: n004 (gateway gw1 brought no whole answer)",
    ]


def test_the_hosts_of_a_lost_gateway_are_left_to_ssh_and_it_is_named(pool: Pool) -> None:
    """One that does not come up, and one that dies in the middle."""
    pool.instead["gw2"] = "echo 'gw2: No route to host' >&2; exit 255;"
    found = ask(pool, "n001", "n002", "n003", "n004")
    assert len(found) == 2
    assert [line.partition("(")[2] for line in pool.told] == ["2) (gateway gw2: gw2: No route to host)"]
    pool.told.clear()
    pool.instead["gw2"] = ""
    on(pool, "n001", "kill -KILL $PPID; exit 1")
    found = ask(pool, "n001", "n002", "n003", "n004")
    assert len(found) == 2
    assert "the connection was lost" in pool.told[0]


def test_a_script_without_an_end_is_the_trouble_of_its_host(pool: Pool) -> None:
    found = ask(pool, "n001", "n002", script='[ "$HOST" = n001 ] || sleep 60; echo 1', timeout=1)
    assert found == {"n001": "1\n", "n002": "n002: no end of the script after 1 s"}


def test_a_gateway_that_holds_on_is_given_up(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "BEGIN_LIMIT", 1.0)
    pool.instead = {"gw1": "exec sleep 1000;", "gw2": "exec sleep 1000;"}
    assert ask(pool, "n001", timeout=1) == {}
    assert pool.told == ["over SSH: n001 (gateway gw1: no end in its time)"]


def gateway_says(*messages: str) -> str:
    """A gateway that says a text in place of what ClusterShell would, once it has been told what to do."""
    text = '<?xml version="1.0" encoding="utf-8"?>\n<channel version="1.9.1">\n<message msgid="0" type="ACK" ack="0"></message>\n'
    program = f"""
        import re, sys, time
        seen = ""
        print({text!r}, flush=True)
        while "srcid" not in seen:
            seen += sys.stdin.readline()
        srcid = re.search(r'srcid="(\\d+)"', seen)[1]
        for message in {messages!r}:
            print(message.replace("SRCID", srcid), flush=True)
        time.sleep(1000)
    """
    return f"exec {sys.executable} -c {shlex.quote(textwrap.dedent(program))};"


def message(kind: str, nodes: str, data: bytes = b"", more: str = "") -> str:
    coded = base64.b64encode(data).decode()
    return f'<message type="{kind}" msgid="1" srcid="SRCID" nodes="{nodes}" {more}>{coded}</message>'


class Bomb:
    """Makes a file when somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    ("kind", "nodes", "data", "more"),
    [
        ("OUT", "n001", b"bomb", ""),
        ("OUT", "n001", pickle.dumps(["code=0"]), ""),
        ("OUT", "n001", b"no pickle", ""),
        ("OUT", "n002", pickle.dumps(b"code=0"), ""),
        ("OUT", "n[000-999999999]", pickle.dumps(b"code=0"), ""),
        ("OUT", "n[001", pickle.dumps(b"code=0"), ""),
        ("RET", "n002", b"", 'retcode="0"'),
        ("RET", "elsewhere", b"", 'retcode="0"'),
        ("ERR", "", b"", 'reason="no reason"'),
        ("NEW", "n001", b"", ""),
    ],
)
def test_what_no_gateway_says_ends_its_channel(
    pool: Pool, kind: str, nodes: str, data: bytes, more: str, tmp_path: Path
) -> None:
    """Nothing of it is run, and no other gateway's host is spoken for."""
    bomb = tmp_path / "bomb"
    pool.instead["gw1"] = gateway_says(
        message(kind, nodes, pickle.dumps(Bomb(bomb)) if data == b"bomb" else data, more)
    )
    assert ask(pool, "n001", "n002") == {"n002": "n002\n"}
    (said,) = pool.told
    assert said.startswith("over SSH: n001 (gateway gw1: ")
    assert not bomb.exists()


@pytest.mark.parametrize(
    ("limit", "flood"),
    [("LINE_LIMIT", "head -c 300000 /dev/zero"), ("GATEWAY_LIMIT", "yes '<!-- -->' | head -n 30000")],
)
def test_a_gateway_that_sends_without_an_end_is_ended(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, limit: str, flood: str
) -> None:
    monkeypatch.setattr(tree, limit, 100_000)
    pool.instead["gw1"] = f"echo '<channel>'; {flood}; exec sleep 1000;"
    assert ask(pool, "n001", "n002") == {"n002": "n002\n"}
    assert pool.told == ["over SSH: n001 (gateway gw1: it sends without an end)"]


@pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("size", [0, 10, 1000, 100_000])
def test_bytes_are_read_as_every_python_pickles_them(protocol: int, size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    assert tree.bytes_in(base64.b64encode(pickle.dumps(data, protocol))) == data


@pytest.mark.parametrize("value", ["text", 1, None, [b"x"], (b"x", b"y"), {b"x": 1}, b"x" * 3 and bytearray(b"x")])
def test_nothing_else_is_read(value: object) -> None:
    with pytest.raises(ValueError, match="a pickle with"):
        tree.bytes_in(base64.b64encode(pickle.dumps(value)))


def test_the_tree_is_this_machine_gateways_and_the_hosts_behind() -> None:
    hosts = [f"n{number:03}" for number in range(1, 8)]
    made = tree.topology(["_gateway0", "_gateway1"], hosts)
    assert str(made).splitlines() == ["_controller", "`- _gateway[0-1]", "   `- n[001-007]"]
    hops = [str(gateway) for gateway, _ in PropagationTreeRouter("_controller", made).dispatch(NodeSet.fromlist(hosts))]
    assert sorted(map(hops.count, {*hops})) == [3, 4]


def test_who_goes_over_ssh_from_the_start(pool: Pool) -> None:
    """A gateway, this machine, what needs sudo's password; and, without a word, what is no look."""
    pool.has_password = True
    many = Tree(cast(ConnectionPool, pool), GATEWAYS, 2)
    look = Job("echo 1", anywhere=True, look=True)
    jobs = {
        Host("gw1"): look,
        Host("here", connection="local"): look,
        Host("n001"): replace(look, user="root"),
        Host("n002"): replace(look, look=False),
    }
    assert many.run_all(jobs) == {}
    assert pool.told == [
        "over SSH: gw1 (a gateway)",
        "over SSH: here (this machine)",
        "over SSH: n001 (the password of sudo goes over SSH alone)",
    ]


@pytest.mark.parametrize(
    ("said", "python"),
    [
        ("found=python3 1.9.1\n", "python3"),
        ("found=python3 1.8.4\nfound=/usr/libexec/platform-python 1.9\n", "/usr/libexec/platform-python"),
        ("found=python3 1.10.1\n", "python3"),
        ("found=python3 1.8.4\n", ""),
        ("found=/tmp/evil; 1.9.1\n", ""),
        ("found=python3 two\nfound=python3\n", ""),
        ("", ""),
    ],
)
def test_the_python_of_a_gateway(said: str, python: str) -> None:
    assert tree.python_of(said) == python


@pytest.mark.parametrize(
    ("said", "found"),
    [("", "none"), ("found=python3 1.8.4\n", "ClusterShell 1.8.4"), ("no_ssh=1\nfound=python3 1.9.1\n", "no ssh")],
)
def test_what_a_gateway_lacks(said: str, found: str) -> None:
    text = str(tree.lacking("gw1", said))
    assert text.startswith(f"gw1: no gateway for --tree: it has no ClusterShell — found {found}, wanted ssh, Clus")


def test_what_looks_for_clustershell_finds_it(tmp_path: Path) -> None:
    """Here, by the python of these tests."""
    done = subprocess.run(
        ["bash", "-c", tree.LOOK, "look", sys.executable, "/nonexistent"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"found={sys.executable} 1.")


def relayed(script: str, *, seconds: float = 60, limit: int = ANSWER_LIMIT) -> list[bytes]:
    """Run a script as on a host behind a gateway; return the lines after the mark."""
    data = channel.relayed(channel.payload(channel.compose(script, (), {})), seconds, limit)
    done = subprocess.run(["/bin/sh", "-c", channel.COMMAND], input=data, capture_output=True, check=False)
    assert done.stderr == b""
    return done.stdout.partition(b"\n" + channel.MARK)[2].splitlines()


def answer(lines: Iterable[bytes]) -> Reply | Trouble | None:
    packed = Packed()
    for line in lines:
        packed.add(line)
    return read_packed("n001", packed, 90, 1.5)


def test_an_answer_that_was_cut_off_is_none() -> None:
    whole = relayed("seq 400; exit 5")
    reply = answer(whole)
    assert isinstance(reply, Reply)
    assert (reply.code, reply.out.count("\n")) == (5, 400)
    for cut in (whole[:-1], whole[1:], [whole[0][:-9], *whole[1:]], []):
        assert answer(cut) is None


def test_a_stream_without_an_end_is_cut_on_the_host() -> None:
    reply = answer(relayed("yes abcdefgh", limit=5000))
    assert isinstance(reply, Reply)
    assert 4900 < len(reply.out) < 5000


# The flag.


def names(text: str) -> list[Host]:
    inventory = Inventory("hosts.txt", (Host("n001", user="root", port=23), Host("n002")), Settings())
    return [*named_hosts(text, "--tree", inventory)]


def test_gateways_are_hosts_of_the_file_or_any_others() -> None:
    assert names("n[001-002],alice@gw:22") == [
        Host("n001", user="root", port=23),
        Host("n002"),
        Host("gw", user="alice", port=22, where="--tree"),
    ]
    for wrong, what in {"": "a bad node set", "gw1,gw1": "host gw1 is named twice", "a b": "a bad node set"}.items():
        with pytest.raises(Trouble, match=what):
            names(wrong)


@pytest.mark.parametrize("via", ["slurm", "kubernetes"])
def test_a_tree_is_no_way_beside_another(via: str) -> None:
    with pytest.raises(Trouble, match=f"--tree: hosts are asked either .* found --via={via}"):
        Flags.of(ROOT, {"tree": "gw1", "via": via})
    assert Flags.of(ROOT, {"tree": "gw1", "via": "ssh"}).tree == "gw1"


def test_openssh_holds_to_the_same_files_as_our_sessions(tmp_path: Path) -> None:
    config = tmp_path / "config"
    known = tmp_path / "known hosts"
    config.write_text(
        f'Host gw1\n    HostName 127.0.0.1\n    Port 2200\n    User keeper\n    UserKnownHostsFile "{known}"\n'
    )
    host = Host("gw1", jump="alice@jump:22", identity=str(ROOT / "tests/none"))
    connections = ConnectionPool([], Options(ssh_config=str(config)))
    try:
        words = connections.openssh(replace(host, identity=""))
    finally:
        connections.close()
    assert words[:3] == ("ssh", "-F", str(config))
    done = subprocess.run([*words[:-2], "-G", *words[-2:]], capture_output=True, text=True, check=True)
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    wanted = {
        "user": "keeper",
        "port": "2200",
        "hostname": "127.0.0.1",
        "stricthostkeychecking": "true",
        "batchmode": "yes",
        "globalknownhostsfile": "/dev/null",
        "proxyjump": "alice@jump:22",
        "forwardagent": "no",
    }
    assert {key: found.get(key) for key in wanted} == wanted
    assert str(known) in found["userknownhostsfile"]


def test_a_gateway_that_is_down_is_left_out_and_one_that_cannot_be_one_is_refused() -> None:
    down = Trouble(tree.Problem("gw1", "no answer on port 22 within 8 s"), may_pass=True)
    unknown = Trouble(tree.Problem("gw2", "the name gw2 is not known", try_="getent hosts gw2"))
    good = Reply("gw3", 0, "found=python3 1.9.1\n", "", 0.1)
    told: list[str] = []
    hosts = [Host("gw1"), Host("gw2"), Host("gw3")]

    def connections(**replies: object) -> ConnectionPool:
        return cast(ConnectionPool, SimpleNamespace(run_all=lambda hosts, job_for: replies, tell=told.append))

    assert tree.find_gateways(connections(gw1=down, gw3=good), [hosts[0], hosts[2]]) == (Gateway(hosts[2], "python3"),)
    assert told == ["gateway gw1 is left out: no answer on port 22 within 8 s"]
    with pytest.raises(Trouble, match="--tree: gateway gw2: the name gw2 is not known"):
        tree.find_gateways(connections(gw1=down, gw2=unknown, gw3=good), hosts)
