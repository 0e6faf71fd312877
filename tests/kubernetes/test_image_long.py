"""The image for real: unpacked by umoci and run on a base of Debian packages, pushed to a registry and read back."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepep_bootstrap.core.errors import OK
from deepep_bootstrap.fetch.images import digest_in_registry, fetch_image
from deepep_bootstrap.kubernetes import oci
from tests.kubernetes.test_image import NAMES, make, make_store, parts
from tests.support.images import make_layout, tar_of_packages
from tests.support.registry import running

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("programs")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("real")
    make_layout(folder / "base", tar_of_packages())
    prefix = make_store(folder / "store", "today")
    assert make(prefix, folder / "image", folder / "base") == OK
    yield folder
    prefix.transport.close()


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A registry on this machine, and skopeo told that it speaks plain HTTP."""
    monkeypatch.setenv("HOME", str(tmp_path / "registry"))
    with running(tmp_path / "registry") as address:
        yield address


ENTER = """\
for folder in proc dev tmp; do mkdir -p "$0/$folder"; done
mount --bind "$0" "$0" && mount -o remount,bind,ro "$0"
mount -t proc proc "$0/proc" && mount --bind /dev "$0/dev" && mount -t tmpfs tmpfs "$0/tmp"
exec env -i "$@"
"""


def run(folder: Path, *words: str, tag: str = "v1") -> subprocess.CompletedProcess[str]:
    """Unpack the image with umoci and run its entry point with these words in it: read-only, as an ordinary user, in
    namespaces of its own. (A container engine wants cgroups of one kind, which not every machine of tests has.)"""
    bundle = folder / "bundle"
    if not bundle.exists():
        unpack = ["umoci", "unpack", "--image", f"{folder / 'image'}:{tag}", bundle]
        subprocess.run(unpack, check=True, capture_output=True)
    _, config, _ = parts(folder / "image")
    inside = ["/usr/sbin/chroot", "--userspec=65532:65532", bundle / "rootfs", *config["config"]["Entrypoint"], *words]
    spaces = ["unshare", "--mount", "--pid", "--fork", "--ipc", "--uts", "sh", "-euc", ENTER, bundle / "rootfs"]
    return subprocess.run([*spaces, *config["config"]["Env"], *inside], capture_output=True, text=True, check=False)


def test_a_test_runs_out_of_the_image(place: Path) -> None:
    done = run(place, "test", "intranode", "--num-processes", "2")
    assert done.returncode == 0, done.stderr + done.stdout
    lines = done.stdout.splitlines()
    assert "deepep: intranode test of deepep/1.2.1-8a07e7e-v1: test_intranode.py --num-processes 2" in lines
    home = f"/opt/deepep/store/{NAMES['nvshmem']}"
    assert [line for line in lines if line.startswith(f"ran 0 {home} ") and "'--num-processes', '2'" in line], lines
    assert lines[-1] == "deepep: test_intranode.py ended with exit code 0"


def test_it_has_no_shell_and_no_pip(place: Path) -> None:
    done = run(place, "sh", "-c", "true")
    assert (done.returncode, done.stderr) == (1, "deepep: sh: No such file or directory\n")
    assert run(place, "python3", "-m", "pip").returncode != 0
    assert run(place, "python3", "-c", "import deep_ep").returncode == 0


def test_a_registry_gives_back_what_was_pushed(place: Path, registry: str, tmp_path: Path) -> None:
    (prefix,) = (place / "store").iterdir()
    reference = f"{registry}/team/deepep:v1"
    assert make(prefix, tmp_path / "image", place / "base", push=reference) == OK
    digest = json.loads((place / "image/index.json").read_bytes())["manifests"][0]["digest"]
    assert digest_in_registry(reference, "x") == digest
    fetch_image(f"{registry}/team/deepep@{digest}", tmp_path / "back", "amd64", "x")
    found = oci.read_base(tmp_path / "back", "back", "", "amd64")
    assert found.digest == digest
    assert oci.read_root(found).has(f"/opt/deepep/store/{NAMES['python']}/bin/python")
