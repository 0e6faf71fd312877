"""Invoke tasks: the front door of deepep-bootstrap. Declarations only; `invoke --list` shows them, `invoke VERB --help` their flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepep_bootstrap.front import verb
from deepep_bootstrap.survey import Flags
from deepep_bootstrap.verbs import bootstrap as _bootstrap
from deepep_bootstrap.verbs import facts as _facts
from deepep_bootstrap.verbs import lab as _lab
from deepep_bootstrap.verbs import plan as _plan
from deepep_bootstrap.verbs import status as _status
from deepep_bootstrap.verbs import test as _test
from deepep_bootstrap.verbs import verify as _verify

ROOT = Path(__file__).resolve().parent


@verb
def bootstrap(
    c: Any,
    hosts: str = "",
    limit: str = "",
    lock: str = "",
    stack: str = "",
    prefix: str = "",
    mirror: list[str] | None = None,
    python: str = "",
    dry_run: bool = False,
    yes: bool = False,
    json: bool = False,
    accept_new_host_keys: bool = False,
    sudo_password_prompt: bool = False,
    on_busy_host: str = "leave",
    forks: int = 64,
) -> int:
    """Make the hosts ready, build what is missing once into the shared prefix, offer it as modules, prove that it loads."""
    return _bootstrap.bootstrap(Flags.of(ROOT, locals()), dry_run=dry_run, yes=yes)


@verb
def plan(
    c: Any,
    hosts: str = "",
    limit: str = "",
    lock: str = "",
    stack: str = "",
    prefix: str = "",
    mirror: list[str] | None = None,
    python: str = "",
    check: bool = False,
    json: bool = False,
    accept_new_host_keys: bool = False,
    sudo_password_prompt: bool = False,
    on_busy_host: str = "leave",
    forks: int = 64,
) -> int:
    """Say what bootstrap would do and why; change nothing."""
    return _plan.plan(Flags.of(ROOT, locals()), check=check)


@verb
def facts(
    c: Any,
    hosts: str = "",
    limit: str = "",
    prefix: str = "",
    python: str = "",
    json: bool = False,
    accept_new_host_keys: bool = False,
    sudo_password_prompt: bool = False,
    forks: int = 64,
) -> int:
    """Look at the hosts and say what they are."""
    return _facts.facts(Flags.of(ROOT, locals()))


@verb
def status(
    c: Any,
    hosts: str = "",
    limit: str = "",
    prefix: str = "",
    json: bool = False,
    accept_new_host_keys: bool = False,
    sudo_password_prompt: bool = False,
    forks: int = 64,
) -> int:
    """Say what is installed: generation, stacks, modules, and which hosts have the MODULEPATH hook."""
    return _status.status(Flags.of(ROOT, locals()))


@verb
def verify(
    c: Any,
    hosts: str = "",
    limit: str = "",
    stack: str = "",
    prefix: str = "",
    json: bool = False,
    accept_new_host_keys: bool = False,
    sudo_password_prompt: bool = False,
    forks: int = 64,
) -> int:
    """Load the module and import deep_ep through a login shell of every host; say which NVSHMEM is really used."""
    return _verify.verify(Flags.of(ROOT, locals()))


@verb
def test(
    c: Any,
    kind: str = "internode",
    hosts: str = "",
    limit: str = "",
    stack: str = "",
    prefix: str = "",
    args: str = "",
    start_timeout: int = 600,
    json: bool = False,
    accept_new_host_keys: bool = False,
    sudo_password_prompt: bool = False,
    forks: int = 64,
) -> int:
    """Run upstream's internode, intranode or low-latency test (through Slurm where it runs) and pass its verdict on."""
    return _test.test(Flags.of(ROOT, locals()), kind=kind, args=args, start_timeout=start_timeout)


@verb
def lab(c: Any, action: str, layer: str = "lmod", dir: str = "", json: bool = False) -> int:
    """Bring the embedded cluster up or down (`invoke lab up`, `status`, `down`): hosts, sshd and Slurm in namespaces."""
    return _lab.lab(action, layer=layer, dir=dir, json=json)
