"""A thousand hosts out of one recorded answer of facts.sh: each with what only it has (name, boot, addresses, free
space), and some with a fault, of which many are told in words of their own. A stand-in of ConnectionPool answers for
them, so whole verbs run; what they print and what they cost is theirs alone."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from deepep_bootstrap.bootstrap.planning import read_wanted, request_for
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.inventory.facts import parse_facts
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.survey import Survey, read_inventory, read_tree
from deepep_bootstrap.plan.decisions import make_decisions
from deepep_bootstrap.prefix import modulefiles
from deepep_bootstrap.remote.fleet import Options
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Job, Reply
from tests.support.paths import ROOT

COUNT = 1000
RECORDED = ROOT / "tests" / "cases" / "inventory" / "facts" / "parse" / "infiniband-h100.txt"
RECIPES = read_tree(ROOT / "recipes")

RECIPES_ASKED = ("doca-ofed", "driver-options", "peer-memory", "rdma-userspace", "limits", "cuda-toolkit")
"""Host recipes that are meant for some of them."""

VIEW = """user=root
uid=0
memlock={memlock}
ipc_lock={bound}
container=
device=/dev/nvidia0\t
shm=writable
prefix=absent
module=no
visible=0
end=1
"""


def hosts_file(folder: Path, count: int = COUNT) -> Path:
    """Write the hosts file of this many hosts and return its path."""
    path = folder / "crowd.txt"
    path.write_text(f"defaults prefix=/shared/deepep\nn[0001-{count:04}]\n", encoding="utf-8")
    return path


def every(number: int, step: int, rest: int) -> bool:
    """Return whether this host is one of those that have a fault: each `step`th of them."""
    return number % step == rest


@cache
def facts_of(number: int) -> str:
    """Return what the fact script prints on one host. 37 of a thousand have another driver, 40 a port that is down, 20
    a firmware that nobody else has, 25 a kernel's name that cannot be one."""
    text = RECORDED.read_text(encoding="utf-8")
    changes: list[tuple[str, str]] = [
        (r"^hostname=.*", f"hostname=n{number:04}"),
        (r"^boot_id=.*", f"boot_id=11111111-2222-4333-8444-{number:012}"),
        (r"^memory_free_mib=.*", f"memory_free_mib={1953125 - number}"),
        (r"^scratch_free_mib=.*", f"scratch_free_mib={900000 - 7 * number}"),
        (r":0012:", f":{number:04x}:"),
    ]
    if every(number, 27, 0):
        changes.append((r"\t550\.90\.07\t", "\t550.54.15\t"))
    if every(number, 25, 3):
        changes.append(
            (rf"^port=mlx5_{3 + number // 25 % 4}\t1\tACTIVE", rf"port=mlx5_{3 + number // 25 % 4}\t1\tDOWN")
        )
    if every(number, 50, 7):
        changes.append((r"28\.39\.3004", f"28.39.{4000 + number}"))
    if every(number, 40, 13):
        changes.append((r"^kernel=.*", f"kernel=5.14 of host {number}"))
    for pattern, new in changes:
        text = re.sub(pattern, new, text, flags=re.MULTILINE)
    return text


def sound_facts_of(number: int) -> str:
    """Return what the fact script prints on one host that has no fault, but a CUDA toolkit, and whose GPUs nobody
    uses."""
    free = re.sub(r"(?m)^gpu_process=.*\n", "", facts_of(40 * number + 14))
    return free.replace("end=1\n", "toolkit=/usr/local/cuda\t12.9.86\t1\t1\t/usr/local/cuda\nend=1\n")


def with_all_built(flags: Flags, answers: Mapping[str, str]) -> dict[str, str]:
    """Return what the fact script prints on sound hosts once a bootstrap of them has ended: their prefix has
    the entries and offers what would be built and offered now, and login shells find it. `answers` are those of hosts
    that have no prefix yet, by name."""
    inventory, prefix = read_inventory(flags)
    survey = Survey(inventory, prefix, {name: parse_facts(text, name) for name, text in answers.items()})
    choice = make_decisions(request_for(flags, survey, read_wanted(flags)), survey.facts)
    manifest = modulefiles.manifest(
        choice.offer, generation=1, created="2026-11-22T00:00:00Z", by="", lock_digest="", hosts=tuple(answers)
    )
    there = [
        "prefix_exists=1",
        "prefix_id=1d1d1d1d1d1d1d1d",
        *(f"prefix_entry={entry.name}" for entry in choice.entries),
        "prefix_generation=1",
        f"prefix_manifest={base64.b64encode(manifest.encode()).decode()}",
        *(f"hook={shell}\t{prefix}/modulefiles" for shell in ("sh", "csh")),
    ]
    old = re.compile(r"(?m)^(?:prefix_exists|prefix_id|hook)=.*\n")
    return {
        name: old.sub("", text).replace("end=1\n", "\n".join([*there, "end=1\n"])) for name, text in answers.items()
    }


@cache
def recipes_in(script: str) -> list[str]:
    """Return the recipes that a script of checks asks."""
    return re.findall(r"(?m)^data recipe (\S+)$", script)


def checks_of(number: int, script: str) -> str:
    """Return what the checks of a script print: 50 of a thousand lack a limit and 33 have driver options that nobody
    can mend, each in words of its own."""
    parts = []
    for name in recipes_in(script):
        state, found, note = "ok", "as wanted", ""
        if name == "limits" and every(number, 20, 1):
            state, found = "todo", f"memlock {64 + number} KiB"
        if name == "driver-options" and every(number, 30, 2):
            state, found, note = "blocked", f"a file of the site's own, line {number}", "look at /etc/modprobe.d"
        parts.append(f"recipe={name}\nstate={state}\nfound={found}\nwanted=what the lock says\nnote={note}\ncode=0\n")
    return "".join(parts)


def view_of(number: int) -> str:
    """Return what the user of a job finds: on 62 of a thousand hosts a limit that nobody else has."""
    odd = every(number, 16, 5)
    return VIEW.format(memlock=64 + number if odd else "unlimited", bound=0 if odd else 1)


class Crowd:
    """The connections to such hosts, in place of a ConnectionPool. Ten of a thousand do not answer."""

    def __init__(self, hosts: Iterable[Host], options: Options | None = None) -> None:
        self.ways = {host.name: "ssh" for host in hosts}
        self.answers: Mapping[str, Callable[[int, Job], str]] = {
            RECIPES["facts.sh"]: lambda number, job: facts_of(number),
            RECIPES["doctor/user.sh"]: lambda number, job: view_of(number),
            RECIPES["prefix/orphans.sh"]: lambda number, job: "end=1\n",
            RECIPES["prefix/unsafe.sh"]: lambda number, job: "unsafe_count=0\nend=1\n",
        }

    def run(self, host: Host, job: Job, on_line: object = None) -> Reply:
        number = int(host.name.lstrip("n"))
        if every(number, 100, 11):
            found = f"no answer of 10.0.{number // 250}.{number % 250} in 10 s"
            raise Trouble(Problem(host.name, "not reached", found, try_=f"ssh {host.name}"))
        answer = next((make for text, make in self.answers.items() if text.rstrip() in job.script), None)
        out = answer(number, job) if answer else checks_of(number, job.script)
        if not out:
            raise AssertionError(f"no answer for {job.script[-2000:]}")
        return Reply(host.name, 0, out, "", 0.1)

    def run_all(
        self, hosts: Sequence[Host], job_for: Callable[[Host], Job], on_line: object = None, on_end: object = None
    ) -> dict[str, Reply | Trouble]:
        found: dict[str, Reply | Trouble] = {}
        for host in hosts:
            try:
                found[host.name] = self.run(host, job_for(host))
            except Trouble as trouble:
                found[host.name] = trouble
        return found

    def equip(self, host: str, folder: str, env: Mapping[str, str]) -> None:
        """Nothing is run anywhere."""

    def close(self) -> None:
        """There are no connections."""


class SoundCrowd(Crowd):
    """Hosts of which each is as a bootstrap of all of them has left it; `asked` are the hosts in the order of questions."""

    def __init__(self, hosts: Iterable[Host], options: Options | None = None) -> None:
        super().__init__(hosts, options)
        self.asked: list[str] = []

    @classmethod
    def of(cls, flags: Flags, count: int) -> SoundCrowd:
        """Return the connections to this many hosts of `flags`."""
        answers = with_all_built(flags, {f"n{number:04}": sound_facts_of(number) for number in range(1, count + 1)})
        crowd = cls(())
        crowd.answers = {**crowd.answers, RECIPES["facts.sh"]: lambda number, job: answers[f"n{number:04}"]}
        return crowd

    def run(self, host: Host, job: Job, on_line: object = None) -> Reply:
        self.asked.append(host.name)
        number = int(host.name.lstrip("n"))
        answer = next((make for text, make in self.answers.items() if text.rstrip() in job.script), None)
        return Reply(host.name, 0, answer(number, job) if answer else checks_of(10, job.script), "", 0.1)
