"""`invoke lab up|down|status`: the embedded cluster on this machine, for the demo and the tests."""

from __future__ import annotations

import json as json_text
import sys

from deepep_bootstrap.core import errors
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.lab import cluster, first_steps
from deepep_bootstrap.lab import cluster_lab as labs


def lab(
    action: str,
    *,
    layer: str = "lmod",
    light: int = 0,
    dir: str = "",  # noqa: A002 - names of flags
    json: bool = False,
) -> int:
    """Bring the embedded cluster up or down (`invoke lab up`, `status`, `down`): hosts, sshd and Slurm in
    namespaces.

    `dir` is its folder, `layer` its module system ("lmod" or "environment-modules"), `light` how many hosts without
    Slurm it has in place of its three (0). Prints for people, or one JSON document.
    """
    folder = labs.folder_of(dir)
    if action == "up":
        first_steps.write_try_file(cluster.up(folder, layer, _say, light))
    elif action == "down":
        cluster.down(folder)
    elif action != "status":
        raise Trouble(Problem("lab", "no such action", found=action, wanted="up, down or status"))
    state = cluster.state(folder)
    if json:
        print(json_text.dumps({"schema": 1, "verb": "lab", "exit": errors.OK, "errors": [], **state}, indent=2))
    else:
        print("\n".join(_lines(state)))
        if action == "up":
            _say_next(folder)
    return errors.OK


def _say(text: str) -> None:
    print(f"lab: {text}", file=sys.stderr)


def _lines(state: dict[str, object]) -> list[str]:
    lines = [f"lab in {state['dir']}: {state['state']}"]
    if state["state"] == "down":
        return lines
    if state["kind"] == labs.LOOPBACK:
        lines.append(
            "without root: hosts are sshd processes of this user; they share hostname, /etc, ports, devices and "
            "module system"
        )
    hosts = state["hosts"]
    for host in hosts if isinstance(hosts, list) else []:
        power = f"boot {host['boot_id']}" if host["boot_id"] else "off"
        slurm = f"  slurm {host['slurm']}" if host["slurm"] else ""
        lines.append(f"  {host['name']:<7} {host['address']}:{host['port']}  {host['role']:<5}  {power}{slurm}")
    if state["kind"] != labs.LOOPBACK:
        lines.append(f"modules by {state['layer']}")
    return lines


def _say_next(folder: str) -> None:
    found = labs.load(folder)
    if found is not None:
        _say("next:")
        print(f"    . {found.try_file}; invoke plan", file=sys.stderr)
        print(f"    ssh -F {found.ssh_config} n001", file=sys.stderr)
