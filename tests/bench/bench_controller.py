"""What `facts` and `plan` cost the machine they are typed on, beside plain Fabric running `true` on as many hosts with a pool of the
same size: milliseconds of its CPU a host, and their ratio. Read the ratio: the machine is shared.

One sshd stands for all hosts of 127/8. Its command reads what it is sent and answers as a recorded host does (tests/support/crowd.py), so
that hosts cost next to nothing; HOME is a folder that is not there, so that no shell's start-up files are measured.

python tests/bench/bench_controller.py [N …]
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]

from fabric import Connection

from deepep_bootstrap.cli.commands.facts import facts
from deepep_bootstrap.cli.commands.plan import plan
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.remote.channel import MARK
from tests.support import crowd
from tests.support.paths import ROOT
from tests.support.sshd import Lab, Sshd

COUNTS = (1, 64, 256, 1000)
FORKS = 64
# Fabric as it comes knows this key exchange by its older name only.
KEX = "KexAlgorithms curve25519-sha256,curve25519-sha256@libssh.org"

ANSWER = """#!/bin/sh
# A recorded host behind an sshd: $1 has its answers, by the address that was called.
[ "$SSH_ORIGINAL_COMMAND" != true ] || exit 0
set -- "$1" $SSH_CONNECTION
asked=$(cat)
echo '{mark}'
echo '{mark}' >&2
case $asked in
    *'data recipe '*) cat "$1/$4.checks" ;;
    *) cat "$1/$4.facts" ;;
esac
"""


def address(number: int) -> str:
    return f"127.1.{number // 250}.{number % 250 + 1}"


@contextlib.contextmanager
def hosts_of(count: int) -> Iterator[tuple[Lab, Sshd]]:
    """Start the sshd of this many hosts, with what they answer."""
    lab = Lab(Path(tempfile.mkdtemp(prefix="controller-")))
    try:
        folder = lab.folder / "answers"
        folder.mkdir()
        for number in range(count):
            # None of those that have a fault in their answer.
            (folder / f"{address(number)}.facts").write_text(crowd.facts_of(40 * number + 14))
        program = lab.folder / "answer"
        program.write_text(ANSWER.format(mark=MARK.decode().rstrip()))
        program.chmod(0o755)
        lines = f"{KEX}\nSetEnv HOME=/nonexistent\nForceCommand {program} {folder}"
        server = lab.start("0.0.0.0", known=False, lines=lines)
        names = [address(number) for number in range(count)]
        lab.known_hosts.write_text("".join(server.known(f"[{name}]:{server.port}") for name in names))
        identity = lab.host(server, names[0]).identity
        (lab.folder / "ssh_config").write_text(
            f"Host *\nPort {server.port}\nUser root\nIdentityFile {identity}\nUserKnownHostsFile {lab.known_hosts}\n"
        )
        os.environ["DEEPEP_SSH_CONFIG"] = str(lab.folder / "ssh_config")
        (lab.folder / "hosts.txt").write_text("\n".join(["defaults prefix=/shared/deepep", *names]) + "\n")
        yield lab, server
    finally:
        lab.stop()
        shutil.rmtree(lab.folder)


def with_fabric(lab: Lab, server: Sshd, count: int) -> None:
    identity = str(lab.host(server, address(0)).identity)

    def one(name: str) -> None:
        keys = {"key_filename": identity}
        with Connection(name, user="root", port=server.port, connect_kwargs=keys) as connection:
            connection.run("true", hide=True)

    with ThreadPoolExecutor(FORKS) as pool:
        list(pool.map(one, [address(number) for number in range(count)]))


def milliseconds(body: Callable[[], object], count: int) -> float:
    """Return the own CPU of `body`, without that of children, a host."""
    before = time.process_time()
    body()
    return (time.process_time() - before) * 1000 / count


def verb(run: Callable[[Flags], int], flags: Flags) -> None:
    """Run a verb as a person does, and end where a host did not answer."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = run(flags)
    if code:
        sys.exit(said.getvalue()[-4000:])


def main(counts: list[int]) -> None:
    verbs: dict[str, Callable[[Flags], int]] = {"facts": facts, "plan": plan}
    with hosts_of(max(counts)) as (lab, server), tempfile.TemporaryDirectory() as state:
        os.environ["XDG_STATE_HOME"] = state
        every = lab.folder / "hosts.txt"
        checks = crowd.checks_of(1, "".join(f"data recipe {name}\n" for name in crowd.RECIPES_ASKED))
        for number in range(max(counts)):
            (lab.folder / "answers" / f"{address(number)}.checks").write_text(checks)
        print(f"load {os.getloadavg()[0]:.1f}, {FORKS} at a time; ms of CPU a host, and its ratio to Fabric's `true`")
        for count in counts:
            hosts = lab.folder / f"{count}.txt"
            hosts.write_text("\n".join(every.read_text().splitlines()[: count + 1]) + "\n")
            flags = Flags(root=ROOT, hosts=str(hosts), forks=FORKS)
            base = milliseconds(lambda count=count: with_fabric(lab, server, count), count)
            parts = [f"Fabric {base:6.2f}"]
            for name, run in verbs.items():
                taken = milliseconds(lambda run=run, flags=flags: verb(run, flags), count)
                parts.append(f"{name} {taken:6.2f} ({taken / base:.2f})")
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            print(f"{count:5} hosts: {', '.join(parts)}; {memory} MiB at most", flush=True)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or list(COUNTS))
