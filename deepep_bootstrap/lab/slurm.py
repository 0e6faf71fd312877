"""Slurm of a lab: its configuration for both kinds of lab, and waiting until its nodes are idle."""

from __future__ import annotations

import string
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepep_bootstrap.core import process
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.lab import cluster_lab

IDLE_LIMIT = 60.0
NODE = "CPUs=16 RealMemory=64000 Gres=gpu:8 State=UNKNOWN"


def write_config(folder: Path, values: Mapping[str, str], version: tuple[int, int], gpu_files: str) -> None:
    """Write slurm.conf (from its template and `values`), cgroup.conf and gres.conf into `folder`.

    `version` is Slurm's year and month; `gpu_files` what gres.conf names as the GPUs' device files.
    """
    template = string.Template((cluster_lab.data_folder() / "lab" / "slurm.conf").read_text(encoding="utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "slurm.conf").write_text(template.substitute(values), encoding="utf-8")
    # Without cgroups mounted slurmd refuses to start, even with no cgroup plugin in use; only from 23.11 on can it be
    # told so.
    plugin = "disabled" if version >= (23, 11) else "cgroup/v1"
    (folder / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n", encoding="utf-8")
    (folder / "gres.conf").write_text(f"Name=gpu File={gpu_files}\n", encoding="utf-8")


def node_states(enter: Sequence[str]) -> dict[str, str]:
    """Return the state of every node as sinfo says it; `enter` is the command prefix that runs something on the
    controller. Empty while the controller does not answer."""
    done = process.run_program([*enter, "sinfo", "-h", "-N", "-o", "%N %T"], env=cluster_lab.CLEAN_ENV, timeout=20)
    pairs = [line.split(maxsplit=1) for line in done.out.splitlines()] if done.code == 0 else []
    return {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2}


def wait_idle(the_lab: cluster_lab.Lab, enter: Sequence[str], logs: Sequence[Path]) -> None:
    """Wait until every GPU node is idle; after a minute raise Trouble with what sinfo says and the last lines of
    `logs`."""
    wanted = {host.name for host in the_lab.hosts if host.role == "gpu"}
    deadline = time.monotonic() + IDLE_LIMIT
    states = node_states(enter)
    while any(states.get(name) not in ("idle", "mixed", "allocated") for name in wanted):
        if time.monotonic() > deadline:
            found = ", ".join(f"{name} {state}" for name, state in sorted(states.items())) or "no answer from sinfo"
            late = Problem("lab", f"Slurm is not ready after {IDLE_LIMIT:g} s", found=found, wanted="idle nodes")
            raise Trouble(late, *_last_lines(logs))
        time.sleep(0.05)
        states = node_states(enter)


def _last_lines(logs: Sequence[Path]) -> list[Problem]:
    tails = [(log, log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]) for log in logs if log.exists()]
    return [Problem(str(log), "last lines", found="\n".join(lines)) for log, lines in tails]
