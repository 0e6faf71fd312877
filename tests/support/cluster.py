"""A cluster of values for its report: six GPU nodes and a login host, of which most have something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Problem
from deepep_bootstrap.doctor.findings import Finding
from deepep_bootstrap.inventory import hostsfile
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.inventory.survey import Survey
from deepep_bootstrap.prefix.contents import Generation, Holdings, StoreEntry
from deepep_bootstrap.report import html
from deepep_bootstrap.report.cluster import Looked, compose_cluster
from deepep_bootstrap.report.model import Report
from tests.support.doctor import RECORD, WELL, nic
from tests.support.plan import PREFIX, changed
from tests.support.report import NOW
from tests.support.store import entry_name

TEXT = f"defaults prefix={PREFIX}\nn[001-006]\nlogin1 role=login\n"
RDMA = tuple(nic(index, "InfiniBand") for index in range(8))
NODE = changed(
    WELL, {"rdma": RDMA, "prefix.exists": True, "modules.hook": f"{PREFIX}/modulefiles", "slurm.state": "IDLE"}
)
SWAPPED = (*RDMA[:6], replace(RDMA[7], name="mlx5_6"), replace(RDMA[6], name="mlx5_7"))
"""The RDMA devices of a node whose last two cards stand in each other's slots."""

ONE_DOWN = (*RDMA[:7], changed(RDMA[7], {"ports": (replace(RDMA[7].ports[0], state="DOWN"),)}))
LOGIN = changed(NODE, {"gpus": (), "rdma": (), "slurm.node": "", "prepared.nvidia_version": ""})

FINDINGS = (
    Finding("ports", "blocking", ("n004",), "mlx5_7:1 is DOWN", "8 active ports", "Its GPU has no NIC.", "the cable"),
    Finding(
        "limits", "warning", ("n001", "n002"), "64 KiB", "unlimited", "RDMA pins memory.", "invoke bootstrap", ("v1",)
    ),
    Finding("slurm", "note", ("login1",), "a client", "a client", "Only that it is said.", ""),
)
NAMES = {kind: entry_name(kind, version) for kind, version in (("deepep", "1.2.1"), ("nvshmem", "3.4.5"))}
BYTES = 3 << 20


def facts(**changes_by_host: Mapping[str, Any]) -> dict[str, Facts]:
    """Return the facts of all hosts but n006, which is silent."""
    own: dict[str, Mapping[str, Any]] = {"n003": {"rdma": SWAPPED}, "n004": {"rdma": ONE_DOWN}, **changes_by_host}
    gpu_nodes = {f"n00{number}": NODE for number in range(1, 6)}
    return {name: changed(seen, own.get(name, {})) for name, seen in {**gpu_nodes, "login1": LOGIN}.items()}


def generation(number: int, **record: Any) -> Generation:
    """Return a generation with the stacks v1 and v1-cu13, changed by `record`."""
    stacks = {
        name: {**to_builtins(RECORD), "stack": name, "module": f"deepep/1.2.{number}-{name}", **NAMES, **record}
        for name in ("v1", "v1-cu13")
    }
    offer = {"default_stack": "v1", "stacks": stacks, "templates": ""}
    made = {
        "created": f"2026-11-{number:02}T12:00:00Z",
        "by": "admin",
        "lock_digest": "0f3c9d2b7a6e",
        "hosts": ["n001"],
    }
    return Generation(number, {**made, "offer": offer})


def holdings(*generations: Generation) -> Holdings:
    """Return a prefix with these generations, the last one current; DeepEP is in its store, NVSHMEM is not."""
    entries = {NAMES["deepep"]: StoreEntry(NAMES["deepep"], BYTES)}
    return Holdings(generations[-1].number if generations else 0, generations, entries)


def looked(*, runs: Sequence[Report] = (), seen: Mapping[str, Facts] | None = None, **given: Any) -> Looked:
    """Return what was seen of this cluster, changed by `given`."""
    survey = Survey(hostsfile.parse_hosts_file(TEXT, "hosts.txt"), PREFIX, facts() if seen is None else seen)
    values: dict[str, Any] = {
        "findings": FINDINGS,
        "holdings": holdings(generation(1), generation(2)),
        "waiting": {"n002": "doca-ofed"},
        "drained": {"n005": "deepep-bootstrap: reboot for doca-ofed"},
        "link": "InfiniBand",
        "profile": "infiniband",
        "problems": (Problem("n006", "does not answer", "no route to host"),),
        **given,
    }
    return Looked(survey, runs=tuple(runs), **values)


def cluster_page(what: Looked) -> str:
    return html.render_cluster(compose_cluster(what), NOW)
