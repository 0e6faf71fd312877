"""What `facts`, `plan` and a `bootstrap` with nothing to do cost the machine they are typed on, beside plain Fabric running `true` on as
many hosts with a pool of the same size: milliseconds of its CPU a host, and their ratio. Read the ratio: the machine is shared. Each is
measured in a process of its own, so none finds what another has left in memory.

One sshd stands for all hosts of 127/8. Its command reads what it is sent and answers as a recorded host does (tests/support/crowd.py), so
that hosts cost next to nothing; HOME is a folder that is not there, so that no shell's start-up files are measured.

python tests/bench/bench_controller.py [N …]
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]

from fabric import Connection

from deepep_bootstrap.cli.app import collect_less_often
from deepep_bootstrap.cli.commands.bootstrap import bootstrap
from deepep_bootstrap.cli.commands.facts import facts
from deepep_bootstrap.cli.commands.plan import plan
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.remote.channel import MARK
from tests.support import crowd
from tests.support.paths import ROOT
from tests.support.sshd import Lab, Sshd

COUNTS = (1, 64, 256, 1000)
FORKS = 64
NOTHING = "Nothing to do"
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
    *'data recipe '*) cat "$1/checks" ;;
    *find_unsafe*) printf 'unsafe_count=0\nend=1\n' ;;
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
        (folder / "checks").write_text(
            crowd.checks_of(10, "".join(f"data recipe {name}\n" for name in crowd.RECIPES_ASKED))
        )
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


class Measured(NamedTuple):
    """The own CPU of a process, without that of its children, in ms a host, and its memory at most in MiB."""

    cpu: float
    memory: int


def apart(body: Callable[[], object]) -> object:
    """Return what `body` returns, called in a process of its own, which keeps nothing."""
    here, there = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            there.send(body())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    there.close()
    try:
        return here.recv()
    except EOFError:
        sys.exit("the bench has failed: see above")
    finally:
        os.waitpid(child, 0)


def measured(body: Callable[[], object], count: int) -> Measured:
    """Return what `body` costs."""

    def timed() -> Measured:
        before = time.process_time()
        body()
        taken = time.process_time() - before
        return Measured(taken * 1000 / count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)

    result = apart(timed)
    assert isinstance(result, Measured)
    return result


def verb(run: Callable[[Flags], int], flags: Flags, says: str) -> None:
    """Run a verb as a person does, and end where a host did not answer, or where it does not say what it should."""
    collect_less_often()
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = run(flags)
    if code or says not in said.getvalue():
        raise RuntimeError(said.getvalue()[-4000:])


def answers(lab: Lab, flags: Flags, count: int, *, all_built: bool) -> None:
    """Let the hosts answer as they do before or after a bootstrap of all of them."""
    facts = {address(number): crowd.sound_facts_of(number) for number in range(count)}
    for name, text in (crowd.with_all_built(flags, facts) if all_built else facts).items():
        (lab.folder / "answers" / f"{name}.facts").write_text(text)


def compared(lab: Lab, server: Sshd, count: int) -> str:
    """Return the line of this many hosts."""
    hosts = lab.folder / f"{count}.txt"
    hosts.write_text("\n".join(["defaults prefix=/shared/deepep", *map(address, range(count))]) + "\n")
    flags = Flags(root=ROOT, hosts=str(hosts), forks=FORKS)
    base = measured(lambda: with_fabric(lab, server, count), count)
    parts, memory = [f"Fabric {base.cpu:6.2f}"], 0
    for name, run, says in (("facts", facts, ""), ("plan", plan, ""), ("bootstrap", bootstrap, NOTHING)):
        apart(lambda says=says: answers(lab, flags, count, all_built=bool(says)))
        taken = measured(lambda run=run, says=says: verb(run, flags, says), count)
        parts.append(f"{name} {taken.cpu:6.2f} ({taken.cpu / base.cpu:.2f})")
        memory = max(memory, taken.memory)
    return f"{count:5} hosts: {', '.join(parts)}; {memory} MiB at most; load {os.getloadavg()[0]:.1f}"


def main(counts: list[int]) -> None:
    with hosts_of(max(counts)) as (lab, server), tempfile.TemporaryDirectory() as state:
        os.environ["XDG_STATE_HOME"] = state
        print(f"{FORKS} at a time; ms of CPU a host, and its ratio to Fabric's `true`; bootstrap has nothing to do")
        for count in counts:
            print(compared(lab, server, count), flush=True)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or list(COUNTS))
