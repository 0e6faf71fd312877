"""`invoke export`: the store entries of a generation in one archive, for a prefix elsewhere."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import OK, Problem, Trouble
from deepep_bootstrap.core.filetree import whole_file
from deepep_bootstrap.core.text import shortened, size
from deepep_bootstrap.inventory.facts import Facts
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.survey import gather_one, number
from deepep_bootstrap.prefix.access import Reached, reach
from deepep_bootstrap.prefix.archive import signing, stream, transfer
from deepep_bootstrap.prefix.archive.index import ArchiveIndex, Built, Tree, record_sum, render_index
from deepep_bootstrap.prefix.archive.stream import Packer
from deepep_bootstrap.prefix.bill import licenses, provenance
from deepep_bootstrap.prefix.contents import Generation, StoreEntry, choose_generation


def export(flags: Flags, *, out: str = "", generation: str = "", sign: str = "") -> int:
    """Write the store entries of a generation into one archive, with hashes and a signature, for another prefix to
    import.

    `generation` "" is the current one; `out` is the file; the signature by the key `sign` lies beside it.
    """
    screen = Screen("export", as_json=flags.json)
    path = new_file(out)
    if sign:
        signing.need_key(sign)
    wanted = number("--generation", generation) if generation else 0
    with reach(flags, locks=True, metadata=True) as reached:
        holdings, place = reached.holdings, reached.place
        chosen = choose_generation(holdings, wanted)
        names = sorted(holdings.closure(chosen.names))
        facts = gather_one(flags, reached.transport, place.host, place.prefix)
        trees, unrecorded = transfer.published_trees(reached.transport, place, holdings, names)
        built = built_on(chosen, holdings.entries, facts)
        parts = licenses.parts_of(holdings, names, provenance.locks_of(holdings))
        # What is signed says the sum of every record, also where an earlier version published the generation.
        manifest = {**chosen.manifest, "records": {tree.name: record_sum(tree) for tree in trees}}
        manifest["components"] = licenses.parts_json(parts)
        index = ArchiveIndex(built, trees, str(chosen.manifest.get("lock_digest", "")), manifest)
        text = render_index(index)
        total = stream.total(index, text)
        # Also where nothing is written: whether the key can sign is a part of what would be done.
        signature = signing.sign(sign, text) if sign else b""
        show_archive(screen, chosen, index, f"{'would write' if flags.dry_run else 'writing'} {path}, {size(total)}")
        show_licenses(screen, parts)
        if unrecorded:
            screen.say(
                f"  note: no generation keeps the sum of the record of {', '.join(map(shortened, unrecorded))}, since "
                f"an earlier version published it: what lies there was compared with its own record alone",
                style="dim",
            )
        if not flags.dry_run:
            need_room(path, total)
            write_archive(screen, reached, path, (index, text, signature))
    finish(screen, path, signed=bool(sign), dry_run=flags.dry_run)
    for problem in reached.problems:
        screen.problem(problem)
    document = {
        "file": str(path),
        "signature": f"{path}.sig" if sign else "",
        "bytes": total,
        "generation": chosen.number,
    }
    document |= {
        "lock_digest": index.lock_digest,
        "built": built.as_json(),
        "entries": [tree_json(tree) for tree in trees],
        "components": licenses.parts_json(parts),
    }
    screen.document(OK, reached.problems, **document)
    return OK


def new_file(out: str) -> Path:
    """Return the path to write to; Trouble where that or its signature is there already, or cannot be."""
    if not out:
        raise Trouble(Problem("--out", "no file named", wanted="the archive to write", try_="--out deepep.tar"))
    path = Path(os.path.expanduser(out)).absolute()
    if not path.parent.is_dir():
        raise Trouble(Problem(f"--out {out}", "its folder is not there", wanted=f"a directory {path.parent}"))
    for there in (path, Path(f"{path}.sig")):
        if os.path.lexists(there):
            raise Trouble(
                Problem(str(there), "is there already and is not overwritten", try_="another name, or removing it")
            )
    return path


def built_on(generation: Generation, entries: Mapping[str, StoreEntry], facts: Facts) -> Built:
    """Return what the entries of a generation were built on, as their manifests say; glibc is that of the host they
    are read on."""
    inputs = [dict(entries[name].manifest.get("inputs") or {}) for name in generation.names if name in entries]
    cuda = sorted({str(each["cuda"]) for each in inputs if each.get("cuda")})
    archs = sorted({str(arch) for each in inputs for arch in each.get("archs") or ()})
    systems = [tuple(map(str, each["os"])) for each in inputs if len(each.get("os") or ()) == 3]
    os_id, os_version, machine = systems[0] if systems else (facts.os_id, facts.os_version, facts.machine)
    by = (_pairs(inputs, "compiler"), sorted(_interpreters(inputs)), _pairs(inputs, "recipes"))
    return Built(os_id, os_version, machine, facts.glibc, tuple(cuda), tuple(archs), *map(tuple, by))


def _pairs(inputs: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    """Return the names and values of one input of all entries, each pair as one text, sorted."""
    return sorted({f"{name} {value}" for each in inputs for name, value in dict(each.get(key) or {}).items() if value})


def _interpreters(inputs: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the Python interpreters that entries were made with: the environment's own, or an external one of
    DeepEP's."""
    external = (
        each["python"]["path"] for each in inputs if isinstance(each.get("python"), dict) and each["python"].get("path")
    )
    return {str(path) for path in (*(each["interpreter"] for each in inputs if each.get("interpreter")), *external)}


def show_archive(screen: Screen, generation: Generation, index: ArchiveIndex, what: str) -> None:
    """Say what goes into the archive."""
    screen.say(f"generation {generation.number}: {what}", style="bold")
    for tree in index.trees:
        screen.say(f"  {shortened(tree.name)}  {len(tree.files)} files, {size(tree.size)}")
    screen.say(f"  built on {index.built}")
    for name, record in generation.stacks.items():
        if python := record.get("external_python"):
            screen.say(
                f"  note: stack {name} uses {python}, which is not in the store: it has to be the same where this is "
                f"imported",
                style="dim",
            )


def show_licenses(screen: Screen, parts: Sequence[licenses.Part]) -> None:
    """Say under which licences its content is, for whoever passes the archive on."""
    screen.say(f"  licences of the {len(parts)} components (sources by the lock, wheels by their METADATA):")
    for line in licenses.license_lines(parts):
        screen.say(f"    {line}")


def need_room(path: Path, total: int) -> None:
    """Trouble where the archive does not fit on this machine's filesystem."""
    free = shutil.disk_usage(path.parent).free
    if free < total:
        raise Trouble(
            Problem(
                str(path.parent),
                "the archive does not fit there",
                f"{size(free)} free",
                size(total),
                "--out on another filesystem",
            )
        )


def write_archive(screen: Screen, reached: Reached, path: Path, content: tuple[ArchiveIndex, bytes, bytes]) -> None:
    """Write archive and signature; both names appear when everything is right, and nothing is left where it is not."""
    index, text, signature = content
    sig = Path(f"{path}.sig")
    done = False
    try:
        with whole_file(path) as stream, transfer.telling(screen, reached.place.host, "export", index.size) as tell:
            packer = Packer(stream, index, text)

            def feed(data: bytes) -> None:
                packer.feed(data)
                tell(len(data))

            transfer.pull(reached.transport, reached.place, index.trees, feed)
            packer.finish()
            if signature:
                sig.write_bytes(signature)
        done = True
    except OSError as error:
        raise Trouble(Problem(str(path), f"cannot be written: {error.strerror}")) from None
    finally:
        if not done:
            sig.unlink(missing_ok=True)


def finish(screen: Screen, path: Path, *, signed: bool, dry_run: bool) -> None:
    """Say what to do with the archive."""
    if dry_run:
        return
    screen.say(f"{path} is complete" + (f", {path}.sig signs it" if signed else "; it is not signed (--sign KEY)"))
    trust = "--allowed-signers=FILE" if signed else "--insecure-unsigned"
    screen.next_commands([f"invoke import {path.name} {trust} --hosts=hosts/other.txt    # where the other prefix is"])


def tree_json(tree: Tree) -> dict[str, Any]:
    """Return one entry for the JSON document."""
    return {"name": tree.name, "files": len(tree.files), "bytes": tree.size}
