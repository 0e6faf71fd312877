"""The view of a job's user on a host: the data lines of recipes/doctor/user.sh as a value."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.recipes import compose
from deepep_bootstrap.core.records import read_records
from deepep_bootstrap.core.text import HostText
from deepep_bootstrap.inventory.forms import USER_VIEW
from deepep_bootstrap.remote.jobs import Job, Reply

RECIPE = "doctor/user.sh"
LIMIT = 90.0
"""Seconds for looking: waking the GPUs of a host without a persistence daemon takes tens of them, a login shell has
20."""


class UserView(Struct, frozen=True):
    """What one user finds. `memlock` is "unlimited" or KiB, `ipc_lock` whether the limit does not bind this user
    anyway, `container` what kind of one we are in ("" for none).

    `devices` are device files with the reason why each cannot be opened ("" when it can), `shm` and `prefix` are
    "absent", "denied" or "writable" / "readable". Of a login shell: `module` is "yes" or "no" ("" when it did not
    answer, and `login` says why), `visible` counts the modules called deepep, `variables` are those that NVSHMEM,
    DeepEP or NCCL read, `libraries` the libibverbs and NCCL of LD_LIBRARY_PATH, and each other deep_ep."""

    user: str = ""
    uid: int = -1
    memlock: str = ""
    ipc_lock: bool = False
    container: str = ""
    devices: tuple[tuple[str, HostText], ...] = ()
    shm: str = ""
    prefix: str = ""
    module: str = ""
    visible: int = 0
    login: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    libraries: tuple[str, ...] = ()


def user_job(recipes: Mapping[str, str], prefix: str, user: str = "") -> Job:
    """Return the job that looks as `user` ("" for the connection's own); its reply is for `parse`."""
    # sudo leaves behind what tells the script that it is in a job.
    mine = not user
    script, env = compose(recipes, "lib.sh", RECIPE), {"PREFIX": prefix}
    return Job(script, env=env, user=user, timeout=LIMIT, anywhere=mine, look=mine)


def parse_user_view(reply: Reply) -> UserView:
    """Return what the user finds on a host; Trouble when the script failed there or its answer cannot be read."""
    if reply.code:
        found = reply.said[-400:]
        raise Trouble(Problem(reply.host, "looking as the user of a job failed", found))
    records = read_records(reply.out, USER_VIEW, reply.host, RECIPE)
    words = {key: records.text(key) for key in ("user", "memlock", "container", "shm", "prefix", "module", "login")}
    try:
        uid, visible = records.number("uid", -1), records.number("visible")
    except ValueError as error:
        raise Trouble(
            Problem(reply.host, f"{RECIPE} and this program disagree", str(error), try_="a fresh checkout")
        ) from None
    return UserView(
        **words,
        uid=uid,
        ipc_lock=records.truth("ipc_lock"),
        devices=tuple(
            sorted(((row[0], problem) for row, problem in records.rows_with_text("device")), key=lambda one: one[0])
        ),
        visible=visible,
        variables=tuple(sorted((name, value) for name, value in records.rows("variable"))),
        libraries=records.words("library"),
    )
