"""Package repositories made on the spot and signed by a key made on the spot: real .deb and .rpm files for the real
apt and dnf."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Package:
    """A package: `files` are texts by absolute path (executable below a bin folder), `postinst`
    is shell run after installation."""

    name: str
    version: str
    files: Mapping[str, str] = field(default_factory=dict)
    postinst: str = ""
    depends: str = ""
    conflicts: str = ""
    provides: str = ""


@dataclass(frozen=True)
class Repository:
    """Where a repository is, where the key is that signed it, and that key's full fingerprint."""

    url: str
    key_url: str
    fingerprint: str

    def line(self, name: str, suite: str = "./", priority: int = 0) -> str:
        """Return it as a line of REPOSITORIES (recipes/host/lib/repositories.sh)."""
        return f"{name} {self.url} {suite} - {self.key_url} {self.fingerprint} {priority}"


@dataclass(frozen=True)
class Signer:
    """A key without passphrase in a gpg home of its own."""

    home: Path
    fingerprint: str

    def gpg(self, *arguments: str, given: bytes = b"") -> bytes:
        """Return what gpg says with this home."""
        return run("gpg", "--homedir", str(self.home), "--batch", "--quiet", "--no-tty", *arguments, given=given)

    def public(self) -> bytes:
        """Return the public key, armored."""
        return self.gpg("--armor", "--export", self.fingerprint)


def run(*command: str, given: bytes = b"", cwd: Path | None = None) -> bytes:
    """Return what a command prints; it must end well."""
    done = subprocess.run(command, input=given, capture_output=True, check=False, cwd=cwd)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


@contextmanager
def signer(name: str = "Test repository", kind: str = "ed25519") -> Iterator[Signer]:
    """Make a key that lives as long as the context. Its home is short: gpg's agent listens on a socket in it."""
    home = Path(tempfile.mkdtemp(prefix="gpg"))
    try:
        here = Signer(home, "")
        here.gpg("--passphrase", "", "--quick-generate-key", f"{name} <test@example.invalid>", kind, "sign", "never")
        lines = here.gpg("--with-colons", "--list-keys").decode().splitlines()
        yield Signer(home, next(line.split(":")[9] for line in lines if line.startswith("fpr:")))
    finally:
        run("gpgconf", "--homedir", str(home), "--kill", "all")
        # The agent that was told to end takes its sockets away at the same time.
        shutil.rmtree(home, ignore_errors=True)


def make_apt_repository(
    folder: Path, packages: Sequence[Package], by: Signer | None = None, seen_as: str = ""
) -> Repository:
    """Make a flat apt repository (suite ./) in `folder`, which hosts see as `seen_as` (the same path). What was there
    is replaced.

    It is signed by `by`, or by a key of its own; the key is folder/key.asc.
    """
    if by is None:
        with signer() as own:
            return make_apt_repository(folder, packages, own, seen_as)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    index = "".join(stanza_of(build_deb(folder, package)) for package in packages)
    (folder / "Packages").write_text(index, encoding="utf-8")
    digest, size = hashlib.sha256(index.encode()).hexdigest(), len(index.encode())
    release = (
        f"Origin: Test\nLabel: Test\nSuite: test\nDate: Thu, 01 Jan 2026 00:00:00 UTC\nSHA256:\n {digest} "
        f"{size} Packages\n"
    )
    (folder / "InRelease").write_bytes(by.gpg("--local-user", by.fingerprint, "--clearsign", given=release.encode()))
    return publish(folder, by, seen_as)


def publish(folder: Path, by: Signer, seen_as: str) -> Repository:
    """Put the public key beside the packages."""
    (folder / "key.asc").write_bytes(by.public())
    where = f"file://{seen_as or folder}"
    return Repository(where, f"{where}/key.asc", by.fingerprint)


def lay_out(root: Path, package: Package) -> None:
    """Write the files of a package below `root`."""
    for path, text in package.files.items():
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        target.chmod(0o755 if "bin" in target.parent.name else 0o644)


def build_deb(folder: Path, package: Package) -> Path:
    """Build a .deb of `package` in `folder`."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "root"
        control = root / "DEBIAN"
        control.mkdir(parents=True)
        root.chmod(0o755)
        lay_out(root, package)
        depends = f"Depends: {package.depends}\n" if package.depends else ""
        depends += f"Conflicts: {package.conflicts}\n" if package.conflicts else ""
        depends += f"Provides: {package.provides}\n" if package.provides else ""
        (control / "control").write_text(
            f"Package: {package.name}\nVersion: {package.version}\nArchitecture: all\nMaintainer: Test "
            f"<test@example.invalid>\n"
            f"{depends}Description: made by a test\n",
            encoding="utf-8",
        )
        if package.postinst:
            (control / "postinst").write_text(f"#!/bin/sh\nset -e\n{package.postinst}\n", encoding="utf-8")
            (control / "postinst").chmod(0o755)
        target = folder / f"{package.name}_{package.version.replace(':', '%3a')}_all.deb"
        run("dpkg-deb", "--root-owner-group", "-Znone", "--build", str(root), str(target))
    return target


def stanza_of(deb: Path) -> str:
    """Return a package's entry in the index: its own control fields, and where and what the file is."""
    control = run("dpkg-deb", "--field", str(deb)).decode()
    content = deb.read_bytes()
    return f"{control}Filename: ./{deb.name}\nSize: {len(content)}\nSHA256: {hashlib.sha256(content).hexdigest()}\n\n"


def make_dnf_repository(
    folder: Path, packages: Sequence[Package], by: Signer | None = None, seen_as: str = ""
) -> Repository:
    """Make a dnf repository like make_apt_repository; its packages are signed, their versions are `VERSION-RELEASE`."""
    if by is None:
        with signer() as own:
            return make_dnf_repository(folder, packages, own, seen_as)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for package in packages:
        build_rpm(folder, package)
    rpms = sorted(str(path) for path in folder.glob("*.rpm"))
    signing = {"__gpg": shutil.which("gpg"), "_gpg_path": by.home, "_gpg_name": by.fingerprint}
    run(
        "rpmsign",
        "--addsign",
        *(word for name, value in signing.items() for word in ("--define", f"{name} {value}")),
        *rpms,
    )
    run("createrepo_c", "--quiet", str(folder))
    return publish(folder, by, seen_as)


def build_rpm(folder: Path, package: Package) -> None:
    """Build an .rpm of `package` in `folder`."""
    version, release = package.version.rsplit("-", 1)
    with tempfile.TemporaryDirectory() as scratch:
        staged, spec = Path(scratch) / "staged", Path(scratch) / "package.spec"
        staged.mkdir()
        lay_out(staged, package)
        requires = f"Requires: {package.depends}\n" if package.depends else ""
        requires += f"Conflicts: {package.conflicts}\n" if package.conflicts else ""
        post = f"%post\n{package.postinst}\n" if package.postinst else ""
        spec.write_text(
            f"Name: {package.name}\nVersion: {version}\nRelease: {release}\nSummary: made by a test\nLicense: "
            f"none\nBuildArch: noarch\n"
            f"{requires}%description\nmade by a test\n%install\ncp -a {staged}/. %{{buildroot}}/\n{post}%files\n"
            + "".join(f"{path}\n" for path in package.files),
            encoding="utf-8",
        )
        where = (
            "--define",
            f"_topdir {scratch}",
            "--define",
            f"_rpmdir {folder}",
            "--define",
            "_build_name_fmt %%{NAME}-%%{VERSION}-%%{RELEASE}.rpm",
        )
        run("rpmbuild", "-bb", "--quiet", *where, "--define", "_binary_payload w0.gzdio", str(spec))


def spoil(package: Path) -> None:
    """Change one byte of a package file, and nothing of its size."""
    content = bytearray(package.read_bytes())
    content[len(content) // 2] ^= 0xFF
    package.write_bytes(content)
