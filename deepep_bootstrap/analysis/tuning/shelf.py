"""Tuned settings in a prefix: documents read, a run's own kept beside them, and the module `deepep_tuned`
that gives them to programs.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from collections.abc import Sequence

from msgspec import Struct

from deepep_bootstrap.analysis.tuning import document, sweep
from deepep_bootstrap.analysis.tuning.document import Document
from deepep_bootstrap.core import records
from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.recipes import compose
from deepep_bootstrap.inventory.forms import DOCUMENTS, DOCUMENTS_KEPT
from deepep_bootstrap.prefix.generations import Content, PrefixHandle, read_answer, tar_files
from deepep_bootstrap.remote.jobs import Job, Transport

TUNING = (
    "lib.sh",
    "prefix/lib/owner.sh",
    "prefix/lib/lock.sh",
    "prefix/lib/share.sh",
    "prefix/lib/trust.sh",
    "prefix/tuning.sh",
)
ATTEMPTS = 8
"""How often documents are merged anew where other runs keep their own at the same moment; each attempt that fails
means that one of them has ended."""

HEARTBEAT = "3"
"""Seconds between two signs of life of who holds the lock, a third of the store's: what is done under it takes
milliseconds."""

PYTHON_FOLDER = "tuning/python"
"""Where the module is, below the prefix: what a modulefile puts on PYTHONPATH."""

MODULE = "tuned/deepep_tuned.py"
"""The module's text below env/."""


class Shelf(Struct, frozen=True):
    """The documents of a prefix by file name, their texts' SHA-256 in hex, and what is wrong with files that are
    none."""

    documents: dict[str, Document]
    hashes: dict[str, str]
    problems: tuple[Problem, ...] = ()


class Kept(Struct, frozen=True):
    """A run's document as it was kept, what became of the run (sweep.Merged) and where the file is."""

    document: Document
    state: str
    path: str


class Stored(Struct, frozen=True):
    """What `store` did: the documents, and files in their place that could not be read and were replaced."""

    kept: tuple[Kept, ...]
    problems: tuple[Problem, ...] = ()


def read_shelf(connections: Transport, place: PrefixHandle) -> Shelf:
    """Return the documents in the prefix; a file that is none is left out and named in `problems`."""
    where = f"{place.host.name} {place.prefix}"
    job = Job(
        compose(place.recipes, *TUNING), args=("look",), env=_env(place), user=place.user, watched=True, timeout=None
    )
    reply = connections.run(place.host, job)
    if reply.code:
        read_answer(reply, place, "tuning.sh", DOCUMENTS)
    documents: dict[str, Document] = {}
    hashes: dict[str, str] = {}
    problems: list[Problem] = []
    for name, packed in records.read_records(reply.out, DOCUMENTS, where, "tuning.sh").rows("document"):
        try:
            data = base64.b64decode(packed, validate=True)
        except binascii.Error:
            raise Trouble(records.disagreement(where, "tuning.sh", f"{name} is not in base 64")) from None
        hashes[name] = hashlib.sha256(data).hexdigest()
        try:
            documents[name] = document.parse_document(data.decode("utf-8", "replace"), f"{where}/tuning/{name}")
        except Trouble as trouble:
            problems.extend(trouble.problems)
    return Shelf(documents, hashes, tuple(problems))


def store(connections: Transport, place: PrefixHandle, new: Sequence[Document], module: str) -> Stored:
    """Keep the documents of a run (sweep.documents), each merged with the one of the same key, and the module's
    text (env/tuned/deepep_tuned.py). Trouble where the user who works there may not write in the prefix; without
    documents nothing is touched."""
    if not new:
        return Stored(())
    for _ in range(ATTEMPTS):
        shelf = read_shelf(connections, place)
        merged = [sweep.merge(shelf.documents.get(each.key.file), each) for each in new]
        if _write(connections, place, shelf, merged, module):
            return _stored(place, shelf, merged)
    what = "settings cannot be kept: other runs keep theirs all the time"
    raise Trouble(
        Problem(f"{place.host.name} {place.prefix}/tuning", what, f"{ATTEMPTS} attempts", try_="the same command again")
    )


def _stored(place: PrefixHandle, shelf: Shelf, merged: Sequence[sweep.Merged]) -> Stored:
    """Return the documents as they were kept, with what was wrong with the files that they replaced."""
    folder = f"{place.prefix}/tuning"
    kept = tuple(Kept(one.document, one.state, f"{folder}/{one.document.key.file}") for one in merged)
    replaced = {f"{place.host.name} {each.path}" for each in kept}
    return Stored(kept, tuple(problem for problem in shelf.problems if problem.where in replaced))


def _write(
    connections: Transport, place: PrefixHandle, shelf: Shelf, merged: Sequence[sweep.Merged], module: str
) -> bool:
    """Write merged documents and the module; False where another run has changed what `shelf` was read from."""
    files = []
    bases = []
    for one in merged:
        name = one.document.key.file
        files.append(Content(name, document.render_document(one.document).encode()))
        bases.append(f"{name} {shelf.hashes.get(name, 'none')}")
    files.append(Content("python/deepep_tuned.py", module.encode()))
    env = {**_env(place), "BASES": "\n".join(bases)}
    job = Job(compose(place.recipes, *TUNING), args=("keep",), env=env, user=place.user, timeout=None)
    reply = connections.send(place.host, job, tar_files(files))
    return read_answer(reply, place, "tuning.sh", DOCUMENTS_KEPT).text("state") == "kept"


def _env(place: PrefixHandle) -> dict[str, str]:
    return {"PREFIX": place.prefix, "TOKEN": secrets.token_hex(8), "HEARTBEAT": HEARTBEAT}
