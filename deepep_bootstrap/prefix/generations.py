"""The prefix and its generations: made once, proved to be shared, published, switched; logs of runs kept.
Recipes do the file work.
"""

from __future__ import annotations

import io
import json
import secrets
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from deepep_bootstrap.core import records
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.nodeset import fold
from deepep_bootstrap.core.recipes import compose
from deepep_bootstrap.core.records import RecordForm, Records
from deepep_bootstrap.inventory import forms
from deepep_bootstrap.prefix.contents import entry_names
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Job, Reply, Transport

INIT = ("lib.sh", "prefix/lib/share.sh", "prefix/lib/trust.sh", "prefix/init.sh")
TRUST = ("lib.sh", "prefix/lib/share.sh", "prefix/lib/trust.sh", "prefix/unsafe.sh")
PROBE = ("lib.sh", "prefix/lib/share.sh", "prefix/probe.sh")
CHANGING = (
    "lib.sh",
    "prefix/lib/owner.sh",
    "prefix/lib/lock.sh",
    "prefix/lib/share.sh",
    "prefix/lib/trust.sh",
    "prefix/lib/current.sh",
)
"""In front of every recipe that changes which generations there are."""
OFFER = (*CHANGING, "prefix/offer.sh")
ROLLBACK = (*CHANGING, "prefix/rollback.sh")
GC = (*CHANGING, "prefix/lib/living.sh", "prefix/gc.sh")
LOOK = (*CHANGING, "prefix/lib/files.sh", "prefix/lib/living.sh", "prefix/generations.sh")
REHASH = ("lib.sh", "prefix/lib/files.sh", "prefix/rehash.sh")
LOGS = ("lib.sh", "prefix/lib/share.sh", "prefix/logs.sh")
PROOF = ("lib.sh", "prefix/lib/share.sh", "prefix/proof.sh")
FAILURES = {
    "init.sh": "the prefix cannot be made",
    "unsafe.sh": "nobody can say who may change the prefix",
    "probe.sh": "the prefix cannot be used",
    "offer.sh": "the offer cannot be published",
    "logs.sh": "logs cannot be kept there",
    "generations.sh": "the prefix cannot be looked at",
    "rollback.sh": "the generation cannot be switched",
    "gc.sh": "nothing more can be removed",
    "rehash.sh": "the store cannot be compared",
    "export.sh": "the store cannot be read",
    "import.sh": "the archive cannot be imported",
    "tuning.sh": "settings cannot be kept there",
}
"""What it means when a recipe fails."""


class PrefixHandle(Struct, frozen=True):
    """Where a prefix is reached: the host that works on it for us, its path, the recipe texts, and the user who
    works there ("" for the connection's own)."""

    host: Host
    prefix: str
    recipes: Mapping[str, str]
    user: str = ""


class Content(Struct, frozen=True):
    """One file of a generation: its path inside it, its bytes, and whether it may be run."""

    path: str
    data: bytes
    executable: bool = False


class Published(Struct, frozen=True):
    """What became of an offer. `stale` means that another generation became current meanwhile and nothing was
    changed: compose again from `generation`."""

    generation: int
    stale: bool


def prepare_prefix(transport: Transport, place: PrefixHandle, owner: str = "") -> str:
    """Make the prefix and return its id. `owner` is the user who builds, given the new folders when root makes them;
    Trouble says what stands in the way."""
    env = {"PREFIX": place.prefix, "TOKEN": secrets.token_hex(8), "OWNER": owner}
    reply = transport.run(place.host, Job(compose(place.recipes, *INIT), env=env, user=place.user))
    return read_answer(reply, place, "init.sh", forms.PREFIX_STATE).text("id")


def make_prefix(transport: Transport, place: PrefixHandle) -> str:
    """Make the prefix as the user who works there, where that user may; else as root, for that user. Returns its id.

    In this order, because root may not write on many a network filesystem, and a plain user not below /opt.
    """
    if not place.user:
        return prepare_prefix(transport, place)
    try:
        return prepare_prefix(transport, place)
    except Trouble:
        return prepare_prefix(transport, replace(place, user="root"), place.user)


def probe_shared(transport: Transport, place: PrefixHandle, hosts: Sequence[Host]) -> dict[str, str]:
    """Prove that all `hosts` see the prefix of `place` as one directory: one writes a file of a fresh name, all look
    for it.

    Returns the hosts that could not be asked, and why. Trouble names those that see another directory, or none: that is
    no matter of one host, and nothing may be built before it is put right.
    """
    name = secrets.token_hex(8)
    _probe(transport, place, "write", name)
    try:
        script = compose(place.recipes, *PROBE)
        others = [host for host in hosts if host.name != place.host.name]
        look = Job(script, args=("look", name), env={"PREFIX": place.prefix}, anywhere=True)
        replies = transport.run_all(others, lambda _: look)
    finally:
        _probe(transport, place, "clean", name)
    seen: dict[str, list[str]] = {}
    unasked: dict[str, str] = {}
    for host, reply in replies.items():
        if isinstance(reply, Trouble):
            unasked[host] = reply.problems[0].message
        elif reply.code:
            unasked[host] = f"the prefix cannot be looked at: {_last(reply.err)}"
        else:
            seen.setdefault(
                records.read_records(reply.out, forms.PREFIX_STATE, host, "probe.sh").text("state"), []
            ).append(host)
    if problems := [_unshared(place, state, names) for state, names in seen.items() if state != "seen"]:
        raise Trouble(*problems)
    return unasked


def _unshared(place: PrefixHandle, state: str, names: Sequence[str]) -> Problem:
    found = "no such directory" if state == "absent" else f"another directory than on {place.host.name}"
    wanted = "one directory shared by all hosts (NFS or similar), at the same path"
    return Problem(
        f"{fold(names)} {place.prefix}", "the prefix is not shared", found, wanted, "mounting it there, or --limit"
    )


def _probe(transport: Transport, place: PrefixHandle, verb: str, name: str) -> Records:
    job = Job(compose(place.recipes, *PROBE), args=(verb, name), env={"PREFIX": place.prefix}, user=place.user)
    return read_answer(transport.run(place.host, job), place, "probe.sh", forms.PREFIX_STATE)


def publish_generation(transport: Transport, place: PrefixHandle, files: Iterable[Content], base: int) -> Published:
    """Publish `files` as the next generation, composed from generation `base` (0 for none), and make it current.

    `manifest.json` must be among them with a key "generation", which gets its number there. Trouble where store entries
    that it names are gone: somebody removed them since they were seen or built, so the same command has to look, and
    build, again.
    """
    files = tuple(files)
    texts = [content.data for content in files if content.path == "manifest.json"]
    names = entry_names([json.loads(text) for text in texts])
    env = {"PREFIX": place.prefix, "TOKEN": secrets.token_hex(8), "BASE": str(base), "ENTRIES": "\n".join(names)}
    reply = transport.send(
        place.host, Job(compose(place.recipes, *OFFER), env=env, user=place.user, timeout=None), tar_files(files)
    )
    answer = read_answer(reply, place, "offer.sh", forms.SWITCHED)
    if missing := answer.words("missing"):
        remedy = "the same command again: it builds what is missing"
        what = "a store entry that was to be offered was removed meanwhile"
        raise Trouble(*(Problem(f"{place.host.name} {place.prefix}", what, name, try_=remedy) for name in missing))
    return Published(answer.number("generation"), answer.text("state") == "stale")


def current(transport: Transport, place: PrefixHandle) -> int:
    """Return the number of the generation that is current now as the prefix's host sees it, 0 without one."""
    reply = transport.run(
        place.host, Job('readlink -- "$1/current" || true # no generation yet', args=(place.prefix,), user=place.user)
    )
    number = reply.out.strip().removeprefix("generations/")
    return int(number) if number.isdecimal() else 0


def keep_logs(transport: Transport, place: PrefixHandle, run: str, chunks: Iterable[bytes]) -> str:
    """Unpack the tar stream `chunks` as PREFIX/logs/`run` and return that folder."""
    job = Job(compose(place.recipes, *LOGS), env={"PREFIX": place.prefix, "RUN": run}, user=place.user, timeout=None)
    return read_answer(transport.send(place.host, job, chunks), place, "logs.sh", forms.LOGS).text("logs")


def note_proof(transport: Transport, place: PrefixHandle, names: Iterable[str], *, proved: bool) -> None:
    """Say in the prefix whether stacks were seen to work since they were last built or offered, or that entries are
    built again, until they are offered; facts tell it to the next plan."""
    args = ("proved" if proved else "unproved", *names)
    job = Job(compose(place.recipes, *PROOF), args=args, env={"PREFIX": place.prefix}, user=place.user)
    read_answer(transport.run(place.host, job), place, "proof.sh", forms.PREFIX_STATE)


def tar_files(files: Iterable[Content]) -> Iterator[bytes]:
    """Yield a tar stream of a generation's files, the same bytes for the same files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for content in sorted(files, key=lambda each: each.path):
            member = tarfile.TarInfo(content.path)
            member.size = len(content.data)
            member.mode = 0o755 if content.executable else 0o644
            archive.addfile(member, io.BytesIO(content.data))
    yield buffer.getvalue()


def read_answer(reply: Reply, place: PrefixHandle, recipe: str, form: RecordForm) -> Records:
    """Return the data lines that `recipe` printed at `place`; Trouble where it failed, with its last word."""
    where = f"{place.host.name} {place.prefix}"
    if reply.code:
        raise Trouble(Problem(where, FAILURES[recipe], _last(reply.err) or f"exit code {reply.code}"))
    return records.read_records(reply.out, form, where, recipe)


def _last(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].removeprefix("error: ")
