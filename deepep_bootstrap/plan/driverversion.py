"""One version of the NVIDIA driver for all hosts of a run, where the lock names packages without one. Pure.

A wave may last days, and repositories move on meanwhile: each host would get what is newest on its day. State lies on the hosts, so the
version is that of hosts which run the same packages already, else the one that the first host would get now.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.plan.host_recipes import TO_APPLY, Preparation

RECIPE = "nvidia-driver"


def settle(preparation: Preparation, facts: Mapping[str, Facts]) -> Preparation:
    """Return the same with one version in the driver packages of all hosts of a distribution that are to get them. What has a version
    in the lock keeps it, and modules of dnf (@NAME) have none; where nothing is known yet, the newest is installed as before."""
    inputs = dict(preparation.inputs)
    chosen: dict[str, str] = {}
    for host, check in preparation.of(TO_APPLY):
        packages = preparation.inputs[host].get(check.recipe, {}).get("PACKAGES", "")
        if check.recipe != RECIPE or not packages or "=" in packages:
            continue
        if packages not in chosen:
            chosen[packages] = in_use(packages, facts[host], facts) or check.candidate
        if chosen[packages]:
            inputs[host] = {**inputs[host], RECIPE: {**inputs[host][RECIPE], "PACKAGES": chosen[packages]}}
    return replace(preparation, inputs=inputs)


def in_use(packages: str, like: Facts, facts: Mapping[str, Facts]) -> str:
    """Return `packages` in the version that most hosts of the same distribution run, of those whose driver is of the same branch and came
    as packages; "" where there is none."""
    branches = set(re.findall(r"(?<![0-9])[0-9]{3}(?![0-9])", packages))
    versions = [seen.prepared.nvidia_version for seen in facts.values() if (seen.os_id, seen.os_version) == (like.os_id, like.os_version)
                and seen.prepared.nvidia_flavor == "open" and is_packaged(seen)]  # fmt: skip
    fitting = Counter(version for version in versions if version.split(".")[0] in branches)
    if not fitting:
        return ""
    version = fitting.most_common(1)[0][0]
    return " ".join(name if name.startswith("@") else f"{name}={version}-*" for name in packages.split())


def is_packaged(seen: Facts) -> bool:
    """Return whether the loaded driver is that of a package."""
    version = seen.prepared.nvidia_version
    return bool(version) and any(installed.startswith(f"{version}-") for _, installed in seen.prepared.packages)
