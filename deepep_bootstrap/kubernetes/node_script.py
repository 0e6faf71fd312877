"""The script that a node's pod runs on the node: host recipes of the lock, as check and apply."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.recipes import compose
from deepep_bootstrap.lock.model import Lock
from deepep_bootstrap.lock.packages import recipe_env
from deepep_bootstrap.plan.host_recipes import LIBRARIES

RECIPES = ("nvidia-driver", "doca-ofed", "driver-options", "peer-memory")
"""What nodes need of the host recipes. Toolkit and Python are in the image; limits are the container runtime's; gdrdrv
and what fabric-manager wants to know of the hardware are for hosts that are looked at first."""

KERNEL = "{KERNEL}"
"""Stands for the release of the running kernel, which the node says. No plain word for a shell, so it is quoted."""


def node_script(lock: Lock, system: str, texts: Mapping[str, str]) -> str:
    """Return the script for nodes with the lock's packages of `system`; `texts` are the recipes by path. VERB says what
    is done, RECIPES which ones. Trouble where the lock has no such system."""
    if system not in lock.systems:
        wanted = ", ".join(lock.systems)
        raise Trouble(Problem("node_system", "the lock has no packages for this system", system, wanted))
    parts = [compose(texts, *LIBRARIES), "set +e"]
    for name in RECIPES:
        env = {**recipe_env(lock.systems[system], name, KERNEL), "RECIPE": f"host/{name}.sh"}
        exports = "\n".join(f"export {key}={_word(value)}" for key, value in env.items())
        text = compose(texts, f"host/{name}.sh")
        run = f'data recipe {name}\n(\nset -e\n{exports}\nset -- "${{VERB}}"\n{text}\n)\ndata code "$?"'
        parts.append(f'if [[ " ${{RECIPES}} " == *" {name} "* ]]; then\n{run}\nfi')
    return "\n".join(parts) + "\n"


def _word(value: str) -> str:
    return shlex.quote(value).replace(KERNEL, "'\"$(uname -r)\"'")
