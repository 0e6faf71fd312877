"""The hosts file: node sets and settings, one entry a line, read into frozen values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """One machine. `name` is what the file calls it and what messages say; empty fields are left to ~/.ssh/config.

    `connection` is "ssh" or "local", `role` "gpu" or "login", `where` the file and line it came from.
    """

    name: str
    user: str = ""
    port: int = 0
    jump: str = ""
    identity: str = ""
    connection: str = "ssh"
    role: str = "gpu"
    where: str = ""


@dataclass(frozen=True)
class Settings:
    """Cluster-wide settings of the `defaults` line; the defaults of DESIGN 6 apply where a field is empty."""

    prefix: str = "/opt/deepep"
    build_host: str = ""
    prefix_host: str = ""
    slurm_host: str = ""
    build_user: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    gres: str = "auto"
    sbatch_args: tuple[str, ...] = ()
    profile: str = "auto"


@dataclass(frozen=True)
class Inventory:
    """What a hosts file (or a node set on the command line) says. `hosts` keeps the file's order; names are unique."""

    path: str
    hosts: tuple[Host, ...]
    settings: Settings
