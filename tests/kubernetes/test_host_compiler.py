"""The host compiler of an image: read from packages that dpkg-deb made, put where the base's links lead, nothing that the
base has already."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.kubernetes import host_compiler, oci
from deepep_bootstrap.lock.model import CompilerPin, PackagePin
from tests.support.images import SMALL, make_layout, tar_of

pytestmark = pytest.mark.usefixtures("programs")

PACKAGE = PackagePin("gcc", "12", "debian/pool/main/g/gcc_12_amd64.deb", "sha256-", 1, "MIT")
KEEP = ("bin/*", "usr/bin/gcc*", "usr/include/*")
PIN = CompilerPin(
    "debian-12", "https://example.invalid/archive", "20261122T000000Z", "2.36", KEEP, {"x86_64": (PACKAGE,)}
)
FILES: Mapping[str, str] = {
    "bin/dash": "shell",
    "usr/bin/gcc-12": "compiler",
    "usr/bin/gcov": "left out",
    "usr/include/stdio.h": "header",
    "usr/include/zlib.h": "that of the base stays",
}
BASE = {**SMALL, "bin": "usr/bin", "usr/include/zlib.h": b"base"}


def make_package(folder: Path, compression: str = "xz") -> Path:
    tree = folder / "tree"
    for path, text in {**FILES, "DEBIAN/control": CONTROL, "DEBIAN/postinst": "#!/bin/sh\nexit 1\n"}.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
        (tree / path).chmod(0o755 if "bin/" in path or path.endswith("postinst") else 0o666)
    (tree / "bin/sh").symlink_to("dash")
    (tree / "usr/bin/gcc").symlink_to("gcc-12")
    made = folder / "gcc.deb"
    words = ["dpkg-deb", f"-Z{compression}", "--root-owner-group", "--build", tree, made]
    subprocess.run(words, check=True, capture_output=True)
    return made


CONTROL = "Package: gcc\nVersion: 12\nArchitecture: amd64\nMaintainer: nobody <a@example.invalid>\nDescription: x\n"


def base_of(folder: Path, files: Mapping[str, bytes | str] = BASE) -> tuple[oci.Base, oci.Root]:
    make_layout(folder, tar_of(files))
    base = oci.read_base(folder, "", "", "amd64")
    return base, oci.read_root(base)


@pytest.mark.parametrize("compression", ["xz", "gzip", "none"])
def test_a_layer_has_what_is_kept_and_the_base_lacks(tmp_path: Path, compression: str) -> None:
    _, root = base_of(tmp_path / "base")
    made = host_compiler.unpack(PIN, [(PACKAGE, make_package(tmp_path, compression))], root)
    layer = io.BytesIO()
    made.pack(layer)
    layer.seek(0)
    with tarfile.open(fileobj=layer) as archive:
        found = {member.name: member for member in archive}
    # The base's /bin is a link, and stays one; its folders stay as they are.
    assert list(found) == ["usr/bin/dash", "usr/bin/gcc", "usr/bin/gcc-12", "usr/bin/sh", "usr/include/stdio.h"]
    assert {name: found[name].linkname for name in found if found[name].issym()} == {
        "usr/bin/gcc": "gcc-12",
        "usr/bin/sh": "dash",
    }
    assert not [name for name, member in found.items() if not member.issym() and member.mode & 0o222]
    assert [found[name].mode & 0o111 for name in ("usr/bin/gcc-12", "usr/include/stdio.h")] == [0o111, 0]


def test_a_base_with_a_compiler_needs_none(tmp_path: Path) -> None:
    _, root = base_of(tmp_path / "one", {**BASE, "usr/bin/gcc": b"", "usr/bin/sh": b""})
    assert host_compiler.is_in(root)
    _, root = base_of(tmp_path / "two", {**BASE, "usr/bin/gcc": b""})
    assert not host_compiler.is_in(root)


@pytest.mark.parametrize(
    ("pins", "files", "message"),
    [
        ([], BASE, r"no gcc and sh, which nvcc calls — wanted a table \[compiler.NAME\] for x86_64"),
        (
            [PIN],
            {k: v for k, v in BASE.items() if "libc" not in k},
            "is no Debian or Ubuntu — found no /usr/lib/x86_64",
        ),
        (
            [PIN],
            {**BASE, "usr/lib/x86_64-linux-gnu/libc.so.6": b"GNU C Library release version 2.35"},
            "found glibc 2.35, wanted glibc 2.36 or later for debian-12",
        ),
    ],
)
def test_a_base_on_which_it_would_not_run_is_refused(
    tmp_path: Path, pins: list[CompilerPin], files: Mapping[str, bytes | str], message: str
) -> None:
    base, root = base_of(tmp_path / "base", files)
    with pytest.raises(Trouble, match=message):
        host_compiler.choose(pins, "x86_64", base, root)


def test_a_package_in_a_form_that_is_not_read_is_refused(tmp_path: Path) -> None:
    _, root = base_of(tmp_path / "base")
    for file, found in ((make_package(tmp_path, "zstd"), "data.tar.zst"), (Path(__file__), "no ar file")):
        with pytest.raises(Trouble, match=f"package gcc: this package cannot be read — found .*{found}"):
            host_compiler.unpack(PIN, [(PACKAGE, file)], root)


def test_the_address_of_a_package_names_the_time() -> None:
    wanted = "https://example.invalid/archive/debian/20261122T000000Z/pool/main/g/gcc_12_amd64.deb"
    assert PIN.address(PACKAGE) == wanted
