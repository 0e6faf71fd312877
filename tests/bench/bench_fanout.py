"""Fan-out on loopback: one trivial script on N hosts, Fabric as it comes against the fleet, in one run. Read the ratio,
not the seconds.

python tests/bench/bench_fanout.py [N] [ROUNDS]
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]

from fabric import Connection

from deepep_bootstrap.remote.fleet import ConnectionPool
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Job, Reply
from tests.support.sshd import Lab, Sshd

FORKS = 64
# Fabric as it comes knows this key exchange by its older name only. Without a HOME no shell's start-up files are measured.
LINES = "KexAlgorithms curve25519-sha256,curve25519-sha256@libssh.org\nSetEnv HOME=/nonexistent"


def with_fabric(hosts: list[Host]) -> None:
    def one(host: Host) -> None:
        with Connection(
            host.name, user="root", port=host.port, connect_kwargs={"key_filename": host.identity}
        ) as connection:
            connection.run("true", hide=True)

    with ThreadPoolExecutor(FORKS) as pool:
        list(pool.map(one, hosts))


def with_fleet(lab: Lab, hosts: list[Host]) -> None:
    fleet = ConnectionPool(hosts, lab.options(forks=FORKS))
    replies = fleet.run_all(hosts, lambda host: Job("true"))
    fleet.close()
    failed = [str(reply) for reply in replies.values() if not isinstance(reply, Reply) or reply.code]
    if failed:
        sys.exit("\n".join(failed))


def measured(body: Callable[[], None]) -> tuple[float, float]:
    """Return wall and own CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    body()
    return time.perf_counter() - wall, time.process_time() - cpu


def main(count: int, rounds: int) -> None:
    lab = Lab(Path(tempfile.mkdtemp(prefix="fanout-")))
    try:
        # One sshd stands for all hosts of 127/8.
        server: Sshd = lab.start("0.0.0.0", known=False, lines=LINES)
        names = [f"127.1.{number // 250}.{number % 250 + 1}" for number in range(count)]
        lab.known_hosts.write_text("".join(server.known(f"[{name}]:{server.port}") for name in names))
        hosts = [lab.host(server, name) for name in names]
        ways = {"Fabric as it comes": lambda: with_fabric(hosts), "the fleet": lambda: with_fleet(lab, hosts)}
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, body in ways.items():
                taken[name].append(measured(body))
        medians = {
            name: [statistics.median(column) * 1000 / count for column in zip(*rows, strict=True)]
            for name, rows in taken.items()
        }
        for name, (wall, cpu) in medians.items():
            print(f"{name:20} {wall:7.2f} ms wall and {cpu:6.2f} ms CPU a host, {count} hosts, {FORKS} at a time")
        base, ours = medians.values()
        print(f"{'the fleet / Fabric':20} {ours[0] / base[0]:7.2f}         and {ours[1] / base[1]:6.2f}")
    finally:
        lab.stop()
        shutil.rmtree(lab.folder)


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:3]]
    main(*(numbers + [64, 3][len(numbers) :]))
