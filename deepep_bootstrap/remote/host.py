"""One host as the hosts file names it: address, user, port, role, and the kind of connection."""

from __future__ import annotations

from msgspec import Struct


class Host(Struct, frozen=True):
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


LOCAL = "local"
THIS_MACHINE = Host("this machine", connection=LOCAL)
"""The control machine, where it is no host of the run; its name stands where a host's name would."""
