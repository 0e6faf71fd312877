"""`invoke image`: a container image of a stack's store entries, as an image layout, without daemon and root."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from deepep_bootstrap.core import program
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import OK, Problem, Trouble
from deepep_bootstrap.core.filetree import whole_folder
from deepep_bootstrap.core.text import shortened, size
from deepep_bootstrap.fetch.images import fetch_image, fetch_packages, push_image
from deepep_bootstrap.fetch.locations import read_mirrors
from deepep_bootstrap.fetch.uv import cache_dir
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.survey import gather_one, read_tree
from deepep_bootstrap.kube import names
from deepep_bootstrap.kubernetes import host_compiler, oci
from deepep_bootstrap.kubernetes import image as made
from deepep_bootstrap.kubernetes.host_compiler import HostCompiler
from deepep_bootstrap.kubernetes.image import Plan
from deepep_bootstrap.kubernetes.oci import Base
from deepep_bootstrap.lock import model as locks
from deepep_bootstrap.lock.model import Lock
from deepep_bootstrap.prefix.access import Reached, reach
from deepep_bootstrap.prefix.archive import transfer
from deepep_bootstrap.prefix.archive.index import Tree
from deepep_bootstrap.prefix.bill import provenance
from deepep_bootstrap.prefix.contents import Generation, choose_generation
from deepep_bootstrap.prefix.offer import X86, Offer, StackRecord, named_entries, read_offer

PYTHON = "python"
SBOM = "sbom.cdx.json"
PROVENANCE = "provenance.json"


class _Order(Struct, frozen=True):
    """What was asked for."""

    flags: Flags
    screen: Screen
    out: Path
    base: str
    without: tuple[str, ...]


def image(
    flags: Flags, *, out: str = "", base: str = "", without: str = "", containerfile: bool = False, push: str = ""
) -> int:
    """Write a container image of what a prefix offers: a layer for each store entry on a base by digest, with its bill
    of materials and where it comes from.

    The same entries on the same base are the same image, whenever and wherever it is made.

    Exit 1 where there is no base by digest, or one on which the entries could not run."""
    screen = Screen("image", as_json=flags.json)
    order = _Order(flags, screen, new_folder(out), base, parts_left_out(without))
    if push and (containerfile or not names.TAGGED.fits(push)):
        found = "--containerfile" if containerfile else push
        raise Trouble(Problem("--push", "there is nothing to push so", found, names.TAGGED.words))
    lock = locks.read_lock_file(flags.lock or flags.root / "deepep.lock.toml")
    with reach(flags, locks=True, metadata=True) as reached:
        generation = choose_generation(reached.holdings, 0)
        record = choose_record(generation, flags.stack)
        plan = look(order, reached, generation, record)
        start = find_base(order, lock, plan.architecture)
        root = oci.read_root(start)
        made.check_base(plan, start, root)
        plan = replace(plan, compiler=find_compiler(order, lock, plan, start, root))
        contents = reader(order, reached, plan)
        with whole(order.out) as folder:
            if containerfile:
                digest, attached = "", write_containerfile(folder, plan, start, contents)
            else:
                digest, attached = write_image(folder, plan, start, contents, bill(reached, generation, plan))
    tell(screen, order.out, plan, digest)
    pushed = push_to(order, plan, push) if push else ""
    for problem in reached.problems:
        screen.problem(problem)
    document: dict[str, object] = {"folder": str(order.out), "stack": record.stack, "digest": digest}
    document |= {"base": start.name, "base_digest": start.digest, "without": list(order.without), "pushed": pushed}
    entries = [{"name": tree.name, "files": len(tree.files), "bytes": tree.size} for tree in plan.trees]
    screen.document(OK, reached.problems, **document, entries=entries, attached=attached)
    return OK


def new_folder(out: str) -> Path:
    """Return the folder to write; Trouble where it is there already, or cannot be."""
    if not out:
        raise Trouble(Problem("--out", "no folder named", wanted="the folder to write", try_="--out image"))
    path = Path(os.path.expanduser(out)).absolute()
    if os.path.lexists(path):
        raise Trouble(
            Problem(str(path), "is there already and is not overwritten", try_="another name, or removing it")
        )
    if not path.parent.is_dir():
        raise Trouble(Problem(f"--out {out}", "its folder is not there", wanted=f"a directory {path.parent}"))
    return path


def parts_left_out(without: str) -> tuple[str, ...]:
    """Return what --without names; Trouble for what cannot be left out."""
    if without not in {"", PYTHON}:
        raise Trouble(Problem("--without", "this cannot be left out", without, PYTHON))
    return (without,) if without else ()


def choose_record(generation: Generation, stack: str) -> StackRecord:
    """Return the record of the stack that was asked for, else of the default one."""
    offer = read_offer(json.dumps(generation.manifest))
    if offer is None or (stack and stack not in offer.stacks):
        found = " or ".join(offer.stacks) if offer else "a generation"
        raise Trouble(Problem("--stack", "this stack is not offered", found=stack, wanted=found))
    return offer.stacks[stack or offer.default_stack]


def look(order: _Order, reached: Reached, generation: Generation, record: StackRecord) -> Plan:
    """Return what the image is to hold; Trouble where an entry is not as it was published."""
    holdings, place = reached.holdings, reached.place
    closure = holdings.closure(named_entries(offer_of(record)))
    trees, _ = transfer.published_trees(reached.transport, place, holdings, sorted(closure))
    facts = gather_one(order.flags, reached.transport, place.host, place.prefix)
    return made.plan_image(
        record,
        holdings,
        trees,
        read_tree(order.flags.root / "env"),
        created=newest_source(generation, reached, closure),
        # The host that is asked may be of another kind than those that the stack was built for.
        architecture=oci.ARCHITECTURES[record.machine or X86],
        glibc=facts.glibc,
        without=order.without,
    )


def offer_of(record: StackRecord) -> Offer:
    """Return an offer of one stack alone."""
    return Offer(record.key, {record.key: record}, "")


def newest_source(generation: Generation, reached: Reached, entries: frozenset[str]) -> int:
    """Return the time of the newest source that entries were built from, by the lock of their generation; 0 where
    that is not known."""
    try:
        lock = locks.parse_lock(generation.lock, f"generations/{generation.number}/deepep.lock.toml")
    except Trouble:
        return 0
    known = (reached.holdings.entries[name].manifest.get("inputs") or {} for name in entries)
    hashes = {inputs.get("source") for inputs in known}
    return max((each.last_modified for each in lock.sources.values() if each.hash in hashes), default=0)


def find_base(order: _Order, lock: Lock, architecture: str) -> Base:
    """Return the base of the image: a layout that was named, or the lock's, fetched by its digest."""
    folder, _, digest = order.base.partition("@")
    if folder and ("/" in folder or Path(folder).is_dir()):
        return oci.read_base(Path(os.path.expanduser(folder)).absolute(), "", digest, architecture)
    known = {name.removeprefix("base."): pin for name, pin in lock.images.items() if name.startswith("base.")}
    name = order.base or next(iter(known), "")
    if name not in known:
        wanted = f"{' or '.join(known) or 'a table [image.base.NAME]'}, or the folder of an image layout"
        raise Trouble(Problem("--base", "no such base in the lock", name or "none", wanted))
    pin = known[name]
    if not pin.digest:
        what, remedy = "the base has no digest", f"invoke lock --update=image.base.{name}, or --base=FOLDER"
        raise Trouble(Problem(f"{lock.path}: image.base.{name}", what, pin.reference, "sha256:…", remedy))
    place = cache_dir() / "images" / f"{pin.digest.partition(':')[2]}-{architecture}"
    if not place.is_dir():
        order.screen.say(f"fetching {pin.reference} by its digest")
        fetch_image(names.with_digest(pin.reference, pin.digest), place, architecture, f"image.base.{name}")
    found = oci.read_base(place, pin.reference, "", architecture)
    return replace(found, digest=pin.digest)


def find_compiler(order: _Order, lock: Lock, plan: Plan, base: Base, root: oci.Root) -> HostCompiler | None:
    """Return the files of the host compiler that the stack's nvcc calls, as far as a base lacks them; None for a stack
    without nvcc, and where the base has one."""
    machine = plan.record.machine or X86
    if not plan.record.toolkit or host_compiler.is_in(root):
        return None
    pin = host_compiler.choose(lock.compilers.values(), machine, base, root)
    files = fetch_packages(pin, machine, read_mirrors(order.flags.mirror, os.environ, lock.indexes), cache_dir())
    order.screen.say(f"host compiler {pin.name}: {len(files)} packages, hashes as locked", style="dim")
    return host_compiler.unpack(pin, files, root)


def reader(order: _Order, reached: Reached, plan: Plan) -> made.Contents:
    """Return what reads the files of an entry from the prefix."""
    total = sum(tree.size for tree in plan.trees)

    def contents(tree: Tree, sink: Callable[[bytes], object]) -> None:
        order.screen.line(
            reached.place.host.name, "image", f"{shortened(tree.name)}, {size(tree.size)} of {size(total)}"
        )
        transfer.pull(reached.transport, reached.place, (tree,), sink)

    return contents


@contextmanager
def whole(out: Path) -> Iterator[Path]:
    """Yield a folder that gets the name `out` at the end. Trouble where it cannot be written."""
    try:
        with whole_folder(out) as folder:
            yield folder
    except OSError as error:
        raise Trouble(Problem(str(out), f"cannot be written: {error.strerror or error}")) from None


def bill(reached: Reached, generation: Generation, plan: Plan) -> tuple[bytes, Lock | None]:
    """Return the bill of materials of the image's entries, and the lock that they are from (None where it cannot be
    read)."""
    # The CycloneDX library is needed here alone, and every verb would wait for it.
    from deepep_bootstrap.prefix.bill import sbom

    found = tuple(provenance.locks_of(reached.holdings))
    packages = plan.compiler.packages if plan.compiler else ()
    text = sbom.make_bill(offer_of(plan.record), reached.holdings, sbom.Pins.of(found), packages=packages)
    try:
        return text, locks.parse_lock(generation.lock, "the generation's lock")
    except Trouble:
        return text, None


def write_image(
    folder: Path, plan: Plan, base: Base, contents: made.Contents, about: tuple[bytes, Lock | None]
) -> tuple[str, list[str]]:
    """Write the layout; return the image's digest and those of what is attached to it."""
    image, _ = made.make_image(folder, plan, base, contents)
    text, lock = about
    origin = made.provenance(plan, base, image, lock, f"{program.NAME} {program.version()}")
    attached = [
        oci.attach(folder, image, text, made.SBOM, SBOM),
        oci.attach(folder, image, origin, made.PROVENANCE, PROVENANCE),
    ]
    oci.finish_layout(folder, image, plan.record.key, plan.architecture, attached)
    return image.digest, [each.digest for each in attached]


def write_containerfile(folder: Path, plan: Plan, base: Base, contents: made.Contents) -> list[str]:
    """Write a Containerfile and the tar files that it adds; nothing is attached."""
    files = []
    for number, tree in enumerate(plan.trees, 1):
        files.append(f"{number:02}-{tree.name.partition('-')[2]}.tar")
        with (folder / files[-1]).open("xb") as stream:
            made.pack_entry(stream, tree, contents)
    if plan.compiler:
        files.append(f"{len(plan.trees) + 1:02}-compiler.tar")
        with (folder / files[-1]).open("xb") as stream:
            plan.compiler.pack(stream)
    files.append(f"{len(files) + 1:02}-programs.tar")
    with (folder / files[-1]).open("xb") as stream:
        made.pack_own(stream, plan.files)
    (folder / "Containerfile").write_text(made.containerfile(plan, base, files), encoding="utf-8")
    return []


def tell(screen: Screen, out: Path, plan: Plan, digest: str) -> None:
    """Say what was written."""
    what = f"image {digest}" if digest else "a Containerfile and its layers"
    screen.say(f"stack {plan.record.stack}: {what} in {out}", style="bold")
    for tree in plan.trees:
        screen.say(f"  {shortened(tree.name)}  {len(tree.files)} files, {size(tree.size)}")
    if not digest:
        screen.next_commands([f"podman build -t deepep {out}"])


def push_to(order: _Order, plan: Plan, reference: str) -> str:
    """Put the image into a registry; return its name there by digest."""
    digest = push_image(order.out, plan.record.key, reference)
    pushed = names.with_digest(reference, digest)
    order.screen.say(f"pushed: image = {json.dumps(pushed)}")
    order.screen.say("  bill of materials and origin stay in the folder: skopeo copies the image alone", style="dim")
    return pushed
