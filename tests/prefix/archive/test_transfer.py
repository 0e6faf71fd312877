"""The verbs export and import on prefixes of this machine: what is asked for, refused, said, and left behind."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from deepep_bootstrap.cli.commands import export as export_verb
from deepep_bootstrap.cli.commands import import_ as import_verb
from deepep_bootstrap.cli.commands.export import export
from deepep_bootstrap.cli.commands.import_ import import_
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.core.recipes import text_digest
from deepep_bootstrap.inventory.facts import Facts, Gpu, Python, Toolkit
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.survey import Survey
from deepep_bootstrap.plan.decisions import make_decisions
from deepep_bootstrap.prefix import access
from deepep_bootstrap.prefix.archive import index, stream, transfer
from deepep_bootstrap.prefix.archive.index import ArchiveIndex, Tree, parse_index, render_index
from deepep_bootstrap.prefix.archive.stream import Packer, header, members, padding, read_index
from deepep_bootstrap.prefix.archive.transfer import Room
from tests.support import plan as plan_support
from tests.support.archive import BASE, INPUTS, TOP, add_rich_entry
from tests.support.build import ROOT
from tests.support.store import Prefix

pytest_plugins = ["tests.support.store", "tests.support.archive"]

UNTOLD = ("manifest.json", "files.sha256")


def flags(prefix: Path, **more: object) -> Flags:
    return Flags(root=ROOT, prefix=str(prefix), **more)


@pytest.fixture
def offered(prefix: Prefix) -> Prefix:
    """A prefix that offers two entries built on this machine's system, and holds a third."""
    add_rich_entry(prefix, BASE)
    add_rich_entry(prefix, TOP, [BASE])
    prefix.entry(BASE.replace("3.4.5", "9.9.9"))
    prefix.offer(TOP)
    return prefix


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Path]:
    """The path of a prefix that does not exist, and stays so unless something is imported."""
    return tmp_path / "new/prefix"


@pytest.fixture(scope="module")
def trust(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A key that signs, and a file that allows it."""
    folder = tmp_path_factory.mktemp("trust")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True)
    (folder / "allowed").write_text(f"me@example.com {(folder / 'key.pub').read_text()}")
    return str(folder / "key"), str(folder / "allowed")


def test_from_one_prefix_to_another(
    offered: Prefix, target: Path, trust: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.tar"
    assert export(flags(offered.path, dry_run=True), out=str(out), sign=trust[0]) == 0
    assert not list(tmp_path.glob("*a.tar*"))
    assert export(flags(offered.path), out=str(out), sign=trust[0]) == 0
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"a.tar", "a.tar.sig"}
    capsys.readouterr()
    assert import_(flags(target, dry_run=True, json=True), file=str(out), allowed_signers=trust[1]) == 0
    assert {entry["state"] for entry in json.loads(capsys.readouterr().out)["entries"]} == {"absent"}
    assert not target.parent.exists()
    for state in ("imported", "present"):
        assert import_(flags(target, json=True), file=str(out), allowed_signers=trust[1]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["signer"] == "me@example.com"
        assert {entry["name"]: entry["state"] for entry in document["entries"]} == {TOP: state, BASE: state}
    assert {path.name for path in (target / "store").iterdir()} == {TOP, BASE}
    # A person can do by hand what import does first.
    text = subprocess.run(["tar", "-xOf", out, stream.INDEX], check=True, capture_output=True).stdout
    words = [
        "ssh-keygen",
        "-Y",
        "verify",
        "-f",
        trust[1],
        "-I",
        "me@example.com",
        "-n",
        "deepep-bootstrap",
        "-s",
        f"{out}.sig",
    ]
    assert subprocess.run(words, input=text, capture_output=True, check=False).returncode == 0
    manifest = json.loads(text)["generation"]
    assert (manifest["generation"], manifest["lock_digest"]) == (1, "abcdefghijklmn")


@pytest.fixture
def packed_file(offered: Prefix, trust: tuple[str, str], tmp_path: Path) -> Path:
    out = tmp_path / "a.tar"
    assert export(flags(offered.path), out=str(out), sign=trust[0]) == 0
    return out


def refused(target: Path, file: Path | str, **more: object) -> str:
    """Return why an import is refused; the prefix was not touched."""
    with pytest.raises(Trouble) as caught:
        import_(flags(target), file=str(file), **more)
    assert len(caught.value.problems) == 1
    assert not target.parent.exists() or not list((target / "store").iterdir())
    return str(caught.value)


def test_import_refuses_whom_nobody_vouches_for(
    packed_file: Path, target: Path, trust: tuple[str, str], tmp_path: Path
) -> None:
    assert "cannot be read: No such file" in refused(target, f"{packed_file}-none")
    assert "nobody is trusted" in refused(target, packed_file)
    assert "says the opposite" in refused(target, packed_file, allowed_signers=trust[1], insecure_unsigned=True)
    stranger = tmp_path / "stranger"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", stranger], check=True)
    (tmp_path / "others").write_text(f"other@example.com {Path(f'{stranger}.pub').read_text()}")
    assert "not among the allowed signers" in refused(target, packed_file, allowed_signers=str(tmp_path / "others"))
    data = packed_file.read_bytes()
    packed_file.write_bytes(data.replace(b'"lock_digest":"a', b'"lock_digest":"b', 1))
    assert "signature does not belong" in refused(target, packed_file, allowed_signers=trust[1])
    packed_file.write_bytes(data)
    Path(f"{packed_file}.sig").unlink()
    assert "is not signed" in refused(target, packed_file, allowed_signers=trust[1])
    assert import_(flags(target), file=str(packed_file), insecure_unsigned=True) == 0


def test_import_refuses_damage(packed_file: Path, target: Path, trust: tuple[str, str], tmp_path: Path) -> None:
    data = packed_file.read_bytes()
    for change, message in (
        (data[:-1], "the archive is cut off"),
        (data[: len(data) // 2], "the archive is cut off"),
        (data + bytes(512), "there is more in the file"),
        (data[:-200_000] + b"\xfe\xfe" + data[-199_998:], "its contents are not what the index says"),
        (b"", "not an archive of ours"),
    ):
        packed_file.write_bytes(change)
        assert message in refused(target, packed_file, allowed_signers=trust[1])
    assert "is not a plain file" in refused(target, tmp_path, insecure_unsigned=True)
    assert "No such file" in refused(target, tmp_path / "absent", insecure_unsigned=True)


def test_import_refuses_another_system(packed_file: Path, target: Path, tmp_path: Path) -> None:
    with packed_file.open("rb") as stream:
        index = parse_index(read_index(stream, "FILE"), "FILE")
    other = replace(index, built=replace(index.built, os_id="someos", machine="riscv64"))
    file = tmp_path / "other.tar"
    packed = io.BytesIO()
    packer = Packer(packed, other, render_index(other))
    with packed_file.open("rb") as stream:
        read_index(stream, "FILE")
        for name, thing in members(index.trees):
            stream.read(len(header(name, thing)))
            packer.feed(stream.read(thing.size))
            stream.read(len(padding(thing.size)))
    packer.finish()
    file.write_bytes(packed.getvalue())
    assert "built for another operating system or CPU" in refused(target, file, insecure_unsigned=True)


def test_remarks_on_what_entries_were_built_with() -> None:
    recipe = "build/nvshmem.sh"
    by = {"compilers": ("g++ 12.2.0", "gcc 12.2.0"), "pythons": ("/usr/bin/python3.12",)}
    built = index.Built(
        "debian", "12", "x86_64", "2.36", ("12.9.86",), ("9.0",), **by, recipes=(f"{recipe} {text_digest('make')}",)
    )

    def gpu(capability: str) -> Gpu:
        return Gpu(0, "GPU", 1, capability, driver="", pci="", pci_path="", numa=0, processes=0)

    there = Toolkit("/usr/local/cuda", "12.9.86", split_compile=True, stubs=True)
    tools, pythons = (("g++", "12.2.0"), ("gcc", "12.2.0"), ("make", "4.3")), (Python("/usr/bin/python3.12", "3.12.3"),)
    alike = Facts(toolkits=(there,), tools=tools, pythons=pythons)
    assert list(import_verb.remarks("n1", replace(alike, gpus=(gpu("9.0"),)), built)) == []
    assert list(import_verb.remarks("n1", alike, built)) == []
    assert list(import_verb.remarks("n1", Facts(gpus=(gpu("10.0"),), tools=(("gcc", "13.2.0"),)), built)) == [
        "built for GPU architectures 9.0, n1 has 10.0",
        "built with CUDA 12.9.86, n1 has none",
        "compiled by g++ 12.2.0, gcc 12.2.0, n1 has gcc 13.2.0",
        "made with /usr/bin/python3.12, n1 has none",
    ]
    assert list(import_verb.other_recipes(built, {recipe: "make # with a word on it"})) == []
    assert list(import_verb.other_recipes(built, {recipe: "make all"})) == [
        f"built by other recipes than those here: {recipe}"
    ]


def test_what_a_bootstrap_would_build_all_the_same_is_told() -> None:
    request, seen = plan_support.request(), plan_support.cluster()
    entries = make_decisions(request, seen).entries
    flags = Flags(root=ROOT)
    offered = {"offer": {"stacks": {"v1": {}}}}
    survey = Survey(request.inventory, request.prefix, seen)
    half = ArchiveIndex(index.Built(), tuple(Tree(entry.name, ()) for entry in entries[:2]), generation=offered)
    assert list(import_verb.unmet(flags, survey, half, [entry.name for entry in entries[2:]])) == []
    whole = replace(half, trees=tuple(Tree(entry.name, ()) for entry in entries))
    newer = tuple((name, "13.4.0" if name == "gcc" else version) for name, version in seen["n001"].tools)
    other = replace(survey, facts={**seen, "n001": replace(seen["n001"], tools=newer)})
    (said,) = import_verb.unmet(flags, other, whole, ())
    assert said.startswith(
        f"stack v1 of {request.lock.path} is not what was built for these hosts: a bootstrap builds its own gdrcopy 2"
    )
    (said,) = import_verb.unmet(flags, replace(survey, facts={"login1": seen["login1"]}), whole, ())
    assert said.startswith(
        "what a bootstrap of stack v1 would build cannot be told yet: hosts.txt: no GPU host answered"
    )


def test_what_does_not_fit_is_not_begun(packed: tuple[bytes, ArchiveIndex], offered: Prefix, tmp_path: Path) -> None:
    reached = access.Reached(offered.transport, offered.place, offered.look())
    trees = packed[1].trees
    need = sum(tree.on_disk for tree in trees)
    import_verb.need_room(reached, Room(need, ()), trees)
    with pytest.raises(Trouble, match="do not fit there"):
        import_verb.need_room(reached, Room(need - 1, ()), trees)
    with pytest.raises(Trouble, match="the archive does not fit there"):
        export_verb.need_room(tmp_path / "a", 1 << 60)


def test_export_refuses(
    offered: Prefix, tmp_path: Path, trust: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    def said(dry_run: bool = False, **more: str) -> str:
        with pytest.raises(Trouble) as caught:
            export(flags(offered.path, dry_run=dry_run), **{"out": str(tmp_path / "a.tar"), **more})
        assert not list(tmp_path.glob("*a.tar"))
        return str(caught.value)

    assert "no file named" in said(out="")
    assert "its folder is not there" in said(out=str(tmp_path / "none/a.tar"))
    assert "there is no such generation" in said(generation="7")
    assert "not a number" in said(generation="x")
    for dry_run in (False, True):
        assert "this key cannot sign" in said(dry_run, sign=trust[1])
        assert "--sign /no/key: cannot be read" in said(dry_run, sign="/no/key")
    assert capsys.readouterr().out == "", "nothing is announced before the key is known to do"
    (tmp_path / "a.tar.sig").touch()
    assert "is there already" in said()
    (tmp_path / "a.tar.sig").unlink()
    content = offered.path / "store" / BASE / "lib/content"
    content.chmod(0o644)
    content.write_bytes(b"z" * 1000)
    content.chmod(0o444)
    assert "changed since it was published" in said(sign=trust[0])
    assert not list(tmp_path.glob("*a.tar.sig"))
    content.unlink()
    assert "it is not as it was published" in said()


def test_export_of_a_generation_that_is_not_complete(prefix: Prefix, tmp_path: Path) -> None:
    with pytest.raises(Trouble, match="nothing is offered in this prefix"):
        export(flags(prefix.path), out=str(tmp_path / "a.tar"))
    add_rich_entry(prefix, BASE)
    add_rich_entry(prefix, TOP, [BASE])
    prefix.offer(TOP)
    (prefix.path / "store" / BASE).rename(tmp_path / "gone")
    with pytest.raises(Trouble, match=f"a store entry it needs is missing — found {BASE}"):
        export(flags(prefix.path), out=str(tmp_path / "a.tar"))


def test_what_entries_were_built_on(offered: Prefix) -> None:
    holdings = offered.look()
    built = export_verb.built_on(holdings.generations[0], holdings.entries, Facts(os_id="other", glibc="2.36"))
    assert (built.os_id, built.os_version, built.machine) == tuple(INPUTS["os"])
    assert (built.glibc, built.cuda, built.archs) == ("2.36", ("12.9",), ("9.0",))
    assert (built.compilers, built.recipes) == (("gcc 12.2.0",), ("build/x.sh 0123",))
    assert built.pythons == ("/usr/bin/python3.12",)


def test_a_failing_disk_is_said_and_leaves_nothing(
    offered: Prefix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "full"
    folder.mkdir()
    pull = transfer.pull

    def full(transport, place, trees, sink):
        def broken(data: bytes) -> None:
            sink(data)
            raise OSError(28, "No space left on device")

        pull(transport, place, trees, broken)

    monkeypatch.setattr(transfer, "pull", full)
    with pytest.raises(Trouble, match=r"a\.tar: cannot be written: No space left on device"):
        export(flags(offered.path), out=str(folder / "a.tar"))
    assert not list(folder.iterdir())
