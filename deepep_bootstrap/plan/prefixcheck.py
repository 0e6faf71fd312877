"""Whether what is planned can be written into the prefix, as far as facts tell before anything is changed. Pure."""

from __future__ import annotations

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.plan.decisions import Choice, Request


def check_writable(request: Request, choice: Choice, seen: Facts) -> None:
    """Raise Trouble where the account that writes the prefix may not, which `seen`, the facts of its host, say of the connection's own
    account: nothing is said of another one that the hosts file names as build_user."""
    if seen.prefix.writable or request.inventory.settings.build_user:
        return
    where = f"{choice.prefix_host} {request.prefix}"
    # Root is refused by a mount that is read-only, and by a server that takes root for nobody (root_squash, the default of NFS).
    refused = "a read-only mount, or a server that squashes root" if seen.uid == 0 else "no right to write there"
    wanted = "a folder that it may write in, or may make"
    remedy = "build_user=NAME in the hosts file, with an account that may; or another --prefix"
    raise Trouble(Problem(where, f"{seen.user} may not write the prefix", f"{refused} ({seen.prefix.fs or 'unknown'})", wanted, remedy))
