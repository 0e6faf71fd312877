"""Image layouts to build on, made here: a small one whose files are names alone, and one of this machine's own Debian
packages that runs."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepep_bootstrap.kubernetes import oci
from deepep_bootstrap.kubernetes.oci import Descriptor

PYTHON = "/usr/bin/python3.11"
GLIBC = "GNU C Library (Debian GLIBC 2.99-1) stable release version 2.99.\n"
PACKAGES = (
    "python3.11-minimal",
    "libpython3.11-minimal",
    "libpython3.11-stdlib",
    "libc6",
    "libexpat1",
    "libffi8",
    "zlib1g",
)
"""What Python 3.11 of Debian 12 needs to start and to open sockets; no shell."""

SMALL: Mapping[str, bytes | str] = {
    "lib": "usr/lib",
    "usr/bin/python3": "python3.11",
    "usr/bin/python3.11": b"no program",
    "usr/lib/x86_64-linux-gnu/libc.so.6": GLIBC.encode(),
}
"""Files by path; a text is the target of a link."""


def tar_of(files: Mapping[str, bytes | str]) -> bytes:
    """Return a tar stream."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for path, content in files.items():
            member = tarfile.TarInfo(path)
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                archive.addfile(member)
            else:
                member.size, member.mode = len(content), 0o755
                archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def make_layout(folder: Path, *tars: bytes, architecture: str = "amd64", env: tuple[str, ...] = ()) -> Descriptor:
    """Write a layout with one image of these layers."""
    oci.start_layout(folder)
    layers = []
    for data in tars:
        blob = oci.put(folder, data, oci.PLAIN_LAYER)
        layers.append(oci.Layer(blob, f"sha256:{hashlib.sha256(data).hexdigest()}"))
    config = {
        "architecture": architecture,
        "os": "linux",
        "config": {"Env": ["PATH=/usr/bin:/bin", *env]},
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
    }
    image = oci.put_image(folder, config, layers, {})
    oci.finish_layout(folder, image, "base", architecture, [])
    return image


def tar_of_packages(packages: Sequence[str] = PACKAGES) -> bytes:
    """Return the files of packages on this machine, and of what they need to start, as a tar stream."""
    listed = subprocess.run(["dpkg", "-L", *packages], capture_output=True, text=True, check=True).stdout
    top = {"/bin", "/lib", "/lib64", "/sbin"}  # folders to the packages, links on this machine
    paths = sorted({path for path in listed.splitlines() if Path(path).is_file() or Path(path).is_symlink()} - top)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, target in (
            ("lib", "usr/lib"),
            ("lib64", "usr/lib64"),
            ("bin", "usr/bin"),
            ("usr/bin/python3", "python3.11"),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
        for path in paths:
            # Debian's /lib is a link to /usr/lib; the packages still say /lib.
            name = path if path.startswith(("/usr/", "/etc/", "/var/")) else f"/usr{path}"
            if "/share/doc/" not in name and "/share/man/" not in name:
                archive.add(path, name.lstrip("/"), recursive=False)
    return out.getvalue()
