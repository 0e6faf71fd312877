"""Images of store entries: the same for the same entries, with nothing that others may write, and refusals."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from deepep_bootstrap.cli.commands import image
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.errors import OK, Trouble
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.kubernetes import image as made
from deepep_bootstrap.kubernetes import oci
from deepep_bootstrap.prefix.archive.index import LINK, ArchiveMember, Tree
from deepep_bootstrap.prefix.offer import SiteSettings, StackRecord
from deepep_bootstrap.remote.fleet import ConnectionPool
from tests.support.build import HERE, make_prefix, run_bash
from tests.support.images import PYTHON, SMALL, make_layout, tar_of
from tests.support.paths import ROOT
from tests.support.shipped import shipped_lock
from tests.support.store import RECORD, Prefix, entry_name

pytestmark = pytest.mark.usefixtures("programs")

NAMES = {kind: entry_name(kind, version) for kind, version in
         (("nvshmem", "3.4.5"), ("python", "2.10.0"), ("deepep", "1.2.1"))}  # fmt: skip
TEST = b"import os, sys, deep_ep\nprint('ran', os.environ['RANK'], os.environ['NVSHMEM_HOME'], sys.argv[1:])\n"
FILES: Mapping[str, Mapping[str, bytes]] = {
    "nvshmem": {"lib/libnvshmem_host.so.3": b"library"},
    "python": {},
    "deepep": {"lib/python/deep_ep/__init__.py": b"", "tests/test_intranode.py": TEST, "tests/empty": b""},
}


def make_store(folder: Path, built: str, copied: Path | None = None, **changes: object) -> Prefix:
    """Make a prefix with a stack of three small entries; `built` stands for when it was built. `copied` is an entry of
    another store that comes along, `changes` are those of the record."""
    folder.mkdir()
    prefix = Prefix(make_prefix(folder), ConnectionPool([HERE]))
    for kind, name in NAMES.items():
        needs = {"deepep": [NAMES["nvshmem"], NAMES["python"]], "python": [NAMES["nvshmem"]]}.get(kind, [])
        entry = prefix.entry(name, needs, b"content\n", {"built": built})
        (entry / "files.sha256").unlink()
        for path, data in FILES[kind].items():
            (entry / path).parent.mkdir(parents=True, exist_ok=True)
            (entry / path).write_bytes(data)
            (entry / path).chmod(0o444)
        if kind == "python":
            (entry / "bin").mkdir()
            (entry / "bin/python").symlink_to(PYTHON)
        done = run_bash(RECORD, {"PREFIX": str(prefix.path)}, str(entry))
        assert done.returncode == 0, done.stderr
    record = {
        "stack": "v1",
        "module": "deepep/1.2.1-8a07e7e-v1",
        "prefix": str(prefix.path),
        **NAMES,
        "gdrcopy": "",
        "external_python": "",
        "python_version": "3.11",
        "cuda_home": "/usr/local/cuda-12.9",
        "archs": ["9.0"],
        "profile": "roce",
        "environment": {"NCCL_IB_SL": "3"},
        "site": {},
        "torch": "2.10.0",
        "cuda": "12.9",
        **changes,
    }
    if copied:
        shutil.copytree(copied, prefix.path / "store" / copied.name, symlinks=True)
    prefix.offer_records({record["stack"]: record}, (ROOT / "deepep.lock.toml").read_text(encoding="utf-8"))
    return prefix


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a base and a prefix, and the image of the one on the other."""
    folder = tmp_path_factory.mktemp("image")
    make_layout(folder / "base", tar_of(SMALL))
    prefix = make_store(folder / "one", "yesterday")
    assert make(prefix, folder / "image", folder / "base") == OK
    yield folder
    prefix.transport.close()


def make(prefix: Prefix | Path, out: Path, base: Path | str, mirror: tuple[str, ...] = (), **more: Any) -> int:
    path = prefix.path if isinstance(prefix, Prefix) else prefix
    return image.image(Flags(root=ROOT, prefix=str(path), mirror=mirror), out=str(out), base=str(base), **more)


def store(place: Path) -> Path:
    (found,) = (place / "one").iterdir()
    return found


def document(folder: Path, blob: Mapping[str, Any]) -> Any:
    return json.loads(oci.blob_path(folder, blob["digest"]).read_bytes())


def parts(folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """Return manifest and configuration of the image of a layout, and the manifests of what is attached to it."""
    index = json.loads((folder / "index.json").read_bytes())
    manifest, *attached = (document(folder, each) for each in index["manifests"])
    return manifest, document(folder, manifest["config"]), attached


def test_every_blob_is_what_its_name_says(place: Path) -> None:
    blobs = list((place / "image" / "blobs" / "sha256").iterdir())
    assert blobs
    for blob in blobs:
        assert hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name
    manifest, config, _ = parts(place / "image")
    data = [oci.blob_path(place / "image", layer["digest"]).read_bytes() for layer in manifest["layers"]]
    plain = [gzip.decompress(each) if each[:2] == b"\x1f\x8b" else each for each in data]
    assert config["rootfs"]["diff_ids"] == [oci.sha256(each) for each in plain]
    assert all(each[4:8] == bytes(4) for each in data if each[:2] == b"\x1f\x8b")
    assert len(config["history"]) == len(plain) == 5


def test_nothing_in_it_can_be_written_by_others(place: Path) -> None:
    manifest, _, _ = parts(place / "image")
    seen = set()
    for layer in manifest["layers"][1:]:
        with tarfile.open(oci.blob_path(place / "image", layer["digest"])) as archive:
            for member in archive:
                seen.add(member.name)
                assert member.issym() or not member.mode & 0o022, member.name
                assert (member.uid, member.gid) == (0, 0)
                assert member.name.startswith("opt")
                assert not member.name.endswith("manifest.json")
    assert f"opt/deepep/store/{NAMES['deepep']}/tests/test_intranode.py" in seen
    assert {"opt/deepep/in_pod.py", "opt/deepep/image.json", "opt/deepep/programs/ranks.py"} <= seen


def test_what_it_says_of_itself(place: Path) -> None:
    manifest, config, attached = parts(place / "image")
    assert manifest["annotations"]["org.opencontainers.image.version"] == "1.2.1-8a07e7e-v1"
    base = json.loads((place / "base" / "index.json").read_bytes())["manifests"][0]["digest"]
    assert manifest["annotations"]["org.opencontainers.image.base.digest"] == base
    python = f"/opt/deepep/store/{NAMES['python']}/bin/python"
    assert config["config"]["Entrypoint"] == [python, "/opt/deepep/in_pod.py"]
    env = dict(each.split("=", 1) for each in config["config"]["Env"])
    assert env["PATH"] == f"{python.rpartition('/')[0]}:/usr/bin:/bin"
    assert env["LD_LIBRARY_PATH"].endswith(":/usr/local/nvidia/lib64")
    assert "NCCL_IB_SL" not in env  # of the hosts: manifests say what it is in a cluster
    assert "CUDA_HOME" not in env
    assert not any(str(place) in text for text in (json.dumps(config), json.dumps(manifest["layers"])))
    kinds = [each["artifactType"] for each in attached]
    assert kinds == ["application/vnd.cyclonedx+json", "application/vnd.in-toto+json"]
    digest = json.loads((place / "image" / "index.json").read_bytes())["manifests"][0]["digest"]
    assert {each["subject"]["digest"] for each in attached} == {digest}
    origin = document(place / "image", attached[1]["layers"][0])
    assert f"sha256:{origin['subject'][0]['digest']['sha256']}" == digest
    assert document(place / "image", attached[0]["layers"][0])["bomFormat"] == "CycloneDX"


def test_another_day_and_place_give_the_same_digest(place: Path, tmp_path: Path) -> None:
    other = make_store(tmp_path / "elsewhere", "today")
    shutil.copytree(place / "base", tmp_path / "base")
    assert make(other, tmp_path / "image", tmp_path / "base") == OK
    other.transport.close()
    assert (tmp_path / "image/index.json").read_bytes() == (place / "image/index.json").read_bytes()


def test_a_containerfile_adds_the_same_layers(place: Path, tmp_path: Path) -> None:
    assert make(store(place), tmp_path / "build", place / "base", containerfile=True) == OK
    text = (tmp_path / "build/Containerfile").read_text(encoding="utf-8")
    added = [line.split()[1] for line in text.splitlines() if line.startswith("ADD ")]
    _, config, _ = parts(place / "image")
    tars = [(tmp_path / "build" / name).read_bytes() for name in added]
    assert [oci.sha256(each) for each in tars] == config["rootfs"]["diff_ids"][1:]
    assert f"ENTRYPOINT {json.dumps(config['config']['Entrypoint'])}" in text
    assert f"ENV NVSHMEM_HOME=/opt/deepep/store/{NAMES['nvshmem']}" in text


def test_without_python_the_base_has_it(place: Path, tmp_path: Path) -> None:
    assert make(store(place), tmp_path / "image", place / "base", without="python") == OK
    manifest, config, _ = parts(tmp_path / "image")
    assert config["config"]["Entrypoint"] == ["/usr/bin/python3", "/opt/deepep/in_pod.py"]
    assert manifest["annotations"]["deepep-bootstrap.without"] == "python"
    assert len(manifest["layers"]) == 4


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([{k: v for k, v in SMALL.items() if "3.11" not in k}], f"has not the interpreter .* wanted {PYTHON}"),
        ([SMALL, {"usr/bin/.wh.python3.11": b""}], f"has not the interpreter .* wanted {PYTHON}"),
        ([SMALL, {"usr/bin/.wh..wh..opq": b""}], f"has not the interpreter .* wanted {PYTHON}"),
        (
            [{**SMALL, "usr/lib/x86_64-linux-gnu/libc.so.6": b"GNU C Library release version 2.17"}],
            "C library is older .* found glibc 2.17, wanted glibc",
        ),
        ([{k: v for k, v in SMALL.items() if "libc" not in k}], "C library is older .* found none"),
    ],
)
def test_a_base_on_which_nothing_would_run_is_refused(
    tmp_path: Path, layers: list[Mapping[str, bytes | str]], message: str
) -> None:
    make_layout(tmp_path, *map(tar_of, layers))
    base = oci.read_base(tmp_path, "", "", "amd64")
    record = StackRecord(
        **dict.fromkeys(("stack", "module", "prefix", "deepep", "nvshmem", "gdrcopy", "external_python"), ""),
        python="p",
        python_version="3.11",
        cuda_home="",
        archs=(),
        profile="",
        environment={},
        site=SiteSettings(),
    )
    tree = Tree("p", (ArchiveMember("bin/python", LINK, target=PYTHON), ArchiveMember("lib64", LINK, target="lib")))
    plan = made.Plan(record, (tree,), {}, 0, "amd64", "2.36")
    with pytest.raises(Trouble, match=message):
        made.check_base(plan, base, oci.read_root(base))


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("", r"image\.base\.debian12: the base has no digest .*Try: invoke lock --update=image\.base\.debian12"),
        ("slim", "no such base in the lock — found slim, wanted debian12"),
        ("{}/none", "is no image layout — found no index"),
        ("{}/base@sha256:" + "0" * 64, "does not say which image — found no image with it"),
        ("{}/arm", "the base is for another machine — found linux/arm64"),
    ],
)
def test_a_base_that_is_not_there_is_refused(tmp_path: Path, base: str, message: str) -> None:
    make_layout(tmp_path / "base", tar_of(SMALL))
    make_layout(tmp_path / "arm", tar_of(SMALL), architecture="arm64")
    order = image._Order(Flags(root=ROOT), Screen("image"), tmp_path, base.format(tmp_path), ())
    with pytest.raises(Trouble, match=message):
        image.find_base(order, shipped_lock(), "amd64")


def test_flags_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Trouble, match="--without: this cannot be left out — found nvshmem"):
        make(tmp_path, tmp_path / "image", "x", without="nvshmem")
    with pytest.raises(Trouble, match="is there already and is not overwritten"):
        make(tmp_path, tmp_path, "x")
    with pytest.raises(Trouble, match="--push: there is nothing to push so — found Bad Name"):
        make(tmp_path, tmp_path / "image", "x", push="Bad Name")


def test_a_damaged_base_is_refused_and_nothing_is_left(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "base", tmp_path / "base")
    manifest, _, _ = parts(tmp_path / "base")
    layer = oci.blob_path(tmp_path / "base", manifest["layers"][0]["digest"])
    layer.write_bytes(layer.read_bytes().replace(b"no program", b"mo program"))
    with pytest.raises(Trouble, match="a blob of the layout is damaged"):
        make(store(place), tmp_path / "image", tmp_path / "base")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_an_entry_that_was_changed_is_refused(place: Path, tmp_path: Path) -> None:
    prefix = make_store(tmp_path / "changed", "today")
    file = prefix.path / "store" / NAMES["nvshmem"] / "lib/libnvshmem_host.so.3"
    file.chmod(0o644)
    file.write_bytes(b"LIBRARY")
    file.chmod(0o444)
    with pytest.raises(Trouble, match=r"libnvshmem_host\.so\.3: changed since it was published"):
        make(prefix, tmp_path / "image", place / "base")
    prefix.transport.close()
    assert [path.name for path in tmp_path.iterdir()] == ["changed"]


PASSES = {"rules/passes.toml": (ROOT / "env/rules/passes.toml").read_text(encoding="utf-8")}


def made_record(**more: Any) -> StackRecord:
    values = {
        "python_version": "3.11",
        "archs": ("10.0",),
        "profile": "roce",
        "environment": {},
        "site": SiteSettings(),
    }
    values |= {"stack": "v2", "module": "deepep/2.1.0-dd758ca-v2", "prefix": "/shared", "external_python": ""}
    values |= {"deepep": "d", "nvshmem": "n", "gdrcopy": "", "python": "p", "cuda_home": "/usr/local/cuda-13.0"}
    return StackRecord(**values | more)


def test_the_compiler_of_an_image_is_the_one_that_came_along() -> None:
    """Never the hosts' own, whose path means nothing there."""
    inside = made.inside_record(made_record(nccl="2.30.4", toolkit="t-toolkit-13.2.86"), ())
    about = made.about_stack(inside, PASSES)
    home = "/opt/deepep/store/t-toolkit-13.2.86"
    assert about["variables"]["CUDA_HOME"] == home
    assert about["variables"]["EP_JIT_NVCC_COMPILER"] == f"{home}/bin/nvcc"
    assert about["lists"]["PATH"] == ["/opt/deepep/store/p/bin", f"{home}/bin"]


def test_an_image_without_a_compiler_names_none() -> None:
    about = made.about_stack(made.inside_record(made_record(), ()), PASSES)
    assert not {"CUDA_HOME", "EP_JIT_NVCC_COMPILER"} & about["variables"].keys()
    assert about["lists"]["PATH"] == ["/opt/deepep/store/p/bin"]


def test_links_are_followed_as_a_container_does() -> None:
    root = oci.Root(
        frozenset({"usr/bin/python3.11", "usr/bin/python3", "bin", "a", "loop"}),
        {"bin": "usr/bin", "usr/bin/python3": "python3.11", "a": "/usr/bin/../bin/python3", "loop": "loop"},
    )
    assert root.has("/bin/python3")
    assert root.has("/a")
    assert not root.has("/loop")
    assert not root.has("/usr/bin/python3.12")


def test_layers_are_the_same_in_pieces_of_any_size(tmp_path: Path) -> None:
    data, found = bytes(range(256)) * 4096, []
    for number, step in enumerate((1 << 20, 999)):
        oci.start_layout(tmp_path / str(number))
        writer = oci.LayerWriter(tmp_path / str(number))
        for at in range(0, len(data), step):
            writer.write(data[at : at + step])
        found.append(writer.finish("x"))
    assert found[0] == found[1]
    stored = oci.blob_path(tmp_path / "0", found[0].blob.digest).read_bytes()
    assert gzip.decompress(stored) == data
    assert gzip.GzipFile(fileobj=io.BytesIO(stored)).read(1) == data[:1]
