"""The settings file of manifests: what only the cluster's owner knows, as TOML; every fault of the file reported at
once, with its line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.toml import Table, ValueForm, load_toml
from deepep_bootstrap.kube import names
from deepep_bootstrap.kubernetes.platforms import DRANET, NETWORKS, OBJECTS, PLATFORMS, PLUGIN, Platform

CLOUD_NAME = ValueForm(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", "a name of Google Cloud: lower-case letters, digits, dashes")
PROJECT = ValueForm(r"([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]", "a project id of Google Cloud")
VERSION = ValueForm(r"[0-9]+\.[0-9]+(\.[0-9]+)?(-gke\.[0-9]+)?", "a version of GKE such as 1.33.5-gke.1162000")
CAPABILITY = ValueForm(r"[1-9][0-9]?\.[0-9]", 'a compute capability such as "10.0"')
PROFILE = ValueForm(r"[a-z0-9][a-z0-9._-]*", "a file of env/profiles without .toml")
MODE = ValueForm("|".join(NETWORKS), " or ".join(NETWORKS))
GIB = ValueForm("install|there", "install or there")
FORM = ValueForm("job|jobset", "job or jobset")
SYSTEM = ValueForm(r"[a-z]+-[0-9]+(_[0-9]+)?", "a table of the lock's [system.*], such as ubuntu-24_04")

MOST_NODES = 1024
MOST_MINUTES = 24 * 60
MOST_HOURS = 24 * 30


class Pool(Struct, frozen=True):
    """The pool of nodes for which the command is printed; without `cluster` none is. Disks in GB, `local_ssd` how many
    local disks are joined for what pods keep for a while."""

    project: str = ""
    cluster: str = ""
    region: str = ""
    zone: str = ""
    name: str = "deepep"
    version: str = ""
    disk_type: str = "hyperdisk-balanced"
    disk_gb: int = 1000
    local_ssd: int = 32
    compact: bool = True


class Rdma(Struct, frozen=True):
    """The NICs: `resource` of a device plugin, `vpc` and `subnets` of the RDMA networks in the order of the NICs,
    `host_vpc` and `host_subnet` of the second Ethernet card ("" for none)."""

    resource: str = ""
    count: int = 0
    vpc: str = ""
    subnets: tuple[str, ...] = ()
    host_vpc: str = ""
    host_subnet: str = ""


class Settings(Struct, frozen=True):
    """What is asked of the manifests. `image` is the stack's, by digest; `nodes` of the tests between nodes, and
    `internode` what they are as `invoke test` makes them, job or jobset;
    `driver_options` whether the nodes' driver lets GPU threads ring the NIC's doorbell, which spares pods the rights of
    the node's root; `queue` and `topology` are Kueue's; `start_minutes` how long pods may wait for their nodes,
    `keep_hours` how long an ended Job stays; `node_system` the table of the lock with the nodes' packages ("" leaves
    the nodes alone); `selector` the labels of the nodes; `archs` the compute capabilities of their GPUs."""

    path: str
    platform: Platform
    image: str = ""
    namespace: str = "deepep"
    nodes: int = 2
    internode: str = "job"
    spot: bool = False
    networks: str = ""
    driver_options: bool = True
    profile: str = ""
    queue: str = ""
    topology: str = ""
    shm: str = "64Gi"
    start_minutes: int = 20
    keep_hours: int = 24
    node_system: str = ""
    gib: str = "install"
    gpus: int = 8
    archs: tuple[str, ...] = ()
    selector: Mapping[str, str] = field(default_factory=dict)
    rdma: Rdma = field(default_factory=Rdma)
    pool: Pool = field(default_factory=Pool)


def read_settings(file: str, platform: str) -> Settings:
    """Return the settings in `file` for a platform by name. Raises Trouble with every fault, or where it cannot be
    read."""
    if platform not in PLATFORMS:
        raise Trouble(Problem("--for", "no such kind of cluster", platform or "nothing", ", ".join(PLATFORMS)))
    path = Path(os.path.expanduser(file))
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        wanted = f"a file like hosts/{platform if PLATFORMS[platform].is_gke else 'gke-a4'}.toml"
        raise Trouble(Problem(file, f"the settings cannot be read: {error.strerror}", wanted=wanted)) from None
    except UnicodeDecodeError as error:
        raise Trouble(Problem(file, f"is not UTF-8 at byte {error.start}")) from None
    return parse_settings(text, file, PLATFORMS[platform])


def parse_settings(text: str, path: str, platform: Platform) -> Settings:
    """Return the settings in a TOML text; `path` names it in messages. Raises Trouble with every fault at once, each
    with the line of its key."""
    problems: list[Problem] = []
    top = Table(load_toml(text, path), path, problems)
    made = _top(top, platform)
    made = replace(made, rdma=_rdma(top.inner("rdma"), platform), pool=_pool(top.inner("pool")))
    top.close()
    problems += _lacking(made)
    if problems:
        lines = text.split("\n")
        raise Trouble(*(_at_line(problem, path, lines) for problem in problems), file=path)
    return made


def _at_line(problem: Problem, path: str, lines: list[str]) -> Problem:
    """Return a problem that names the line of its key, or the first one of its table; `file: table.key` as it is where
    the file has neither."""
    places = problem.where.removeprefix(f"{path}: ").partition("[")[0].split(".")
    while places:
        if line := _line_of(places, lines):
            key = problem.where.removeprefix(f"{path}: ")
            return replace(problem, where=f"{path}:{line}", what=f"{key}: {problem.what}")
        places.pop()
    return problem


def _line_of(places: list[str], lines: list[str]) -> int:
    """Return the line (from 1) of a key, or of the head of a table; 0 where it is not written so."""
    table, wanted = "", ".".join(places)
    for number, line in enumerate(lines, 1):
        head = re.match(r"\s*\[([^\[\]]+)\]", line)
        key = re.match(r"\s*([\w.\"'/-]+?)\s*=", line)
        if head:
            table = re.sub(r"[\s\"']", "", head[1])
        said = table if head else ".".join(filter(None, (table, re.sub(r"[\"']", "", key[1])))) if key else ""
        if said == wanted:
            return number
    return 0


def _if_there(table: Table, key: str, form: ValueForm, default: str = "") -> str:
    return table.text(key, form) if key in table.data else table.take(key, str, default)


def _number(table: Table, key: str, default: int, most: int, least: int = 1) -> int:
    return table.number(key, least, most) if key in table.data else table.take(key, int, default)


def _top(top: Table, platform: Platform) -> Settings:
    labels = top.inner("selector")
    selector = {key: labels.take(key, str) for key in labels.data}
    for key, value in selector.items():
        if not names.LABEL_KEY.fits(key):
            labels.complain(key, "is no key of a label", wanted=names.LABEL_KEY.words)
        if not names.LABEL_VALUE.fits(value):
            labels.complain(key, "is no value of a label", value, names.LABEL_VALUE.words)
    if platform.is_gke:
        selector = {names.GKE_ACCELERATOR: platform.accelerator, **selector}
    return Settings(
        path=top.where,
        platform=platform,
        image=top.take("image", str, ""),
        namespace=_if_there(top, "namespace", names.DNS_LABEL, "deepep"),
        nodes=_number(top, "nodes", 2, MOST_NODES, 2),
        internode=_if_there(top, "internode", FORM, "job"),
        spot=top.take("spot", bool, default=False),
        networks=_if_there(top, "networks", MODE, platform.networks),
        driver_options=top.take("driver_options", bool, default=True),
        profile=_if_there(top, "profile", PROFILE, platform.profile),
        queue=_if_there(top, "queue", names.DNS_LABEL),
        topology=_if_there(top, "topology", names.LABEL_KEY, platform.topology),
        shm=_if_there(top, "shm", names.QUANTITY, "64Gi"),
        start_minutes=_number(top, "start_minutes", 20, MOST_MINUTES),
        keep_hours=_number(top, "keep_hours", 24, MOST_HOURS),
        node_system=_if_there(top, "node_system", SYSTEM),
        gib=_if_there(top, "gib", GIB, "install"),
        gpus=_number(top, "gpus", platform.gpus, 16),
        archs=top.words("archs", CAPABILITY) or platform.archs,
        selector=selector,
    )


def _rdma(table: Table, platform: Platform) -> Rdma:
    made = Rdma(
        resource=_if_there(table, "resource", names.RESOURCE),
        count=_number(table, "count", platform.nics, 16),
        vpc=_if_there(table, "vpc", CLOUD_NAME),
        subnets=table.words("subnets", CLOUD_NAME),
        host_vpc=_if_there(table, "host_vpc", CLOUD_NAME),
        host_subnet=_if_there(table, "host_subnet", CLOUD_NAME),
    )
    table.close()
    return made


def _pool(table: Table) -> Pool:
    made = Pool(
        project=_if_there(table, "project", PROJECT),
        cluster=_if_there(table, "cluster", CLOUD_NAME),
        region=_if_there(table, "region", CLOUD_NAME),
        zone=_if_there(table, "zone", CLOUD_NAME),
        name=_if_there(table, "name", CLOUD_NAME, "deepep"),
        version=_if_there(table, "version", VERSION),
        disk_type=_if_there(table, "disk_type", CLOUD_NAME, "hyperdisk-balanced"),
        disk_gb=_number(table, "disk_gb", 1000, 65536, 100),
        local_ssd=_number(table, "local_ssd", 32, 32, 0),
        compact=table.take("compact", bool, default=True),
    )
    table.close()
    return made


def _lacking(made: Settings) -> list[Problem]:
    """Return what is missing for what was chosen."""
    rules: tuple[tuple[bool, str, str, str], ...] = (
        (not made.archs, "archs", "is missing", 'the compute capabilities of the GPUs, e.g. archs = ["9.0"]'),
        (not made.profile, "profile", "is missing", "roce, infiniband or another file of env/profiles"),
        (not made.selector, "selector", "is missing", "a label of the nodes with GPUs"),
        (made.networks == PLUGIN and not made.rdma.resource, "rdma.resource", "is missing", names.RESOURCE.words),
        (
            made.networks == OBJECTS and len(made.rdma.subnets) != made.rdma.count,
            "rdma.subnets",
            f"has {len(made.rdma.subnets)} names",
            f"one for each of {made.rdma.count} NICs",
        ),
        (made.networks == OBJECTS and not made.rdma.vpc, "rdma.vpc", "is missing", "the VPC network of the RDMA NICs"),
        (
            made.networks in {OBJECTS, DRANET} and not made.platform.is_gke,
            "networks",
            f"{made.networks} is of Google's clusters",
            "device-plugin or host",
        ),
        (
            bool(made.pool.cluster) and not (made.pool.zone and made.pool.region and made.pool.project),
            "pool",
            "names a cluster, but not where it is",
            "project, region and zone",
        ),
    )
    return [Problem(f"{made.path}: {key}", what, wanted=wanted) for holds, key, what, wanted in rules if holds]


def need_image(made: Settings) -> None:
    """Raise Trouble where the image is not named by its digest."""
    if fault := names.image_fault(made.image):
        remedy = "invoke image --push=REGISTRY/NAME, which says the digest"
        raise Trouble(Problem(f"{made.path}: image", fault, made.image[:120], names.IMAGE.words, remedy))
