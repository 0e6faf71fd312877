"""What is not there and not needed: one note for each, so that nobody looks for it in vain. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.inventory.hostsfile import Inventory


def absences(load: str, build_host: str, inventory: Inventory, facts: Mapping[str, Facts]) -> Iterator[str]:
    """Yield one note for each absence. `load` is the file that a shell reads where no module system is; a way out of the network
    matters on `build_host` alone, and there only as long as this machine has none either."""
    if not any(seen.slurm.works for seen in facts.values()):
        yield "no Slurm: tests run with `bash` on one node, `sbatch` is not checked"
    bare = [name for name, seen in facts.items() if seen.modules.kind == "none"]
    if bare:
        yield f"no module system on {fold(bare)}: load with `. {load}` there"
    local = [host.name for host in inventory.hosts if host.connection == "local"]
    if not facts[build_host].default_route:
        others = "" if build_host in local else " or through this machine"
        yield f"no way out of the local network on {build_host}: sources and wheels come from --mirror{others}"
    without = [name for name in local if name in facts and "sshd" not in dict(facts[name].tools)]
    if without:
        yield f"no sshd on {fold(without)}: not needed with connection=local"
