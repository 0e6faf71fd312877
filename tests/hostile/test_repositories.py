"""Package repositories that somebody changed on their way or on their server, and packages that are not what the lock's
key signed: the real apt and dnf refuse them, the recipe's words name the repository, and nothing of them is installed."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.recipes.test_packages import SYS, Machine, apt, machine, nvcc
from tests.support.repos import Package, Signer, build_rpm, make_apt_repository, make_dnf_repository, run, signer, spoil

__all__ = ["machine"]

pytestmark = pytest.mark.usefixtures("programs")

MARK = "/opt/of-the-attacker"
"""A file that each package here would leave."""
CUDA = Package("cuda-toolkit-12-9", "12.9.1-1", {"/usr/local/cuda-12.9/bin/nvcc": nvcc("12.9.1")}, f"touch {MARK}")
OFED = Package("doca-ofed", "3.2.1-044000", {MARK: "of the lock"})

Attack = Callable[[Path, Signer], None]


@pytest.fixture(scope="module")
def key() -> Iterator[Signer]:
    with signer() as made:
        yield made


@pytest.fixture(scope="module")
def stranger() -> Iterator[Signer]:
    """A key that the lock does not know."""
    with signer("Somebody else") as made:
        yield made


def sign(folder: Path, text: str, by: Signer) -> None:
    """Sign a text as the Release of an apt repository."""
    (folder / "InRelease").write_bytes(by.gpg("--local-user", by.fingerprint, "--clearsign", given=text.encode()))


def signed_text(folder: Path) -> str:
    """Return what the Release of an apt repository says."""
    content = (folder / "InRelease").read_text(encoding="utf-8")
    return content.split("\n\n", 1)[1].split("-----BEGIN PGP SIGNATURE", 1)[0]


# --- apt ---------------------------------------------------------------------------------------------------------


def change_release(folder: Path, _: Signer) -> None:
    """One word of what was signed."""
    file = folder / "InRelease"
    file.write_bytes(file.read_bytes().replace(b"Label: Test", b"Label: Tost"))


def take_signature_away(folder: Path, _: Signer) -> None:
    (folder / "InRelease").write_text(signed_text(folder), encoding="utf-8")


def take_signature_apart(folder: Path, _: Signer) -> None:
    """A Release whose signature, in a file of its own, belongs to another text."""
    text = signed_text(folder)
    file = folder / "InRelease"
    (folder / "Release").write_text(text.replace("Label: Test", "Label: Tost"), encoding="utf-8")
    signature = file.read_text(encoding="utf-8")
    (folder / "Release.gpg").write_text(signature[signature.index("-----BEGIN PGP SIGNATURE") :], encoding="utf-8")
    file.unlink()


def sign_as_stranger(folder: Path, stranger: Signer) -> None:
    """All of it right, by a key that is not the lock's."""
    sign(folder, signed_text(folder), stranger)


def add_unsigned_text(folder: Path, _: Signer) -> None:
    """Fields in front of what is signed."""
    file = folder / "InRelease"
    file.write_bytes(b"Origin: Attacker\n\n" + file.read_bytes())


def change_index(folder: Path, _: Signer) -> None:
    """The index names a package of the attacker's with its right hash; what is signed names the index that was."""
    file = folder / "Packages"
    file.write_text(file.read_text(encoding="utf-8").replace("12.9.1-1", "12.9.1-2"), encoding="utf-8")


def cut_index(folder: Path, _: Signer) -> None:
    (folder / "Packages").write_text("", encoding="utf-8")


def spoil_package(folder: Path, _: Signer) -> None:
    for file in [*folder.glob("*.deb"), *folder.glob("*.rpm")]:
        spoil(file)


def lengthen_package(folder: Path, _: Signer) -> None:
    for file in folder.glob("*.deb"):
        file.write_bytes(file.read_bytes() + b"x" * 512)


def other_package(folder: Path, _: Signer) -> None:
    """A whole package of another content under the name that the index has."""
    for file in folder.glob("*.deb"):
        content = file.read_bytes()
        file.write_bytes(content.replace(b"release 12.9", b"release 12.8"))
        assert file.read_bytes() != content


APT: list[tuple[Attack, str]] = [
    (change_release, "BADSIG"),
    (take_signature_away, "Clearsigned file isn't valid|NOSPLIT|is not signed|NODATA"),
    (take_signature_apart, "BADSIG"),
    (sign_as_stranger, "NO_PUBKEY"),
    (add_unsigned_text, "Clearsigned file isn't valid|NOSPLIT|does not start with"),
    (change_index, "Hash Sum mismatch|File has unexpected size"),
    (cut_index, "Hash Sum mismatch|File has unexpected size"),
    (spoil_package, "Hash Sum mismatch"),
    (lengthen_package, "Hash Sum mismatch"),
    (other_package, "Hash Sum mismatch"),
]


def named(attack: object) -> str:
    """Return the name of a case."""
    return getattr(attack, "__name__", "").replace("_", "-")


def make_cuda(machine: Machine, key: Signer) -> dict[str, str]:
    """Return the inputs of cuda-toolkit with a repository that is as it should be."""
    return apt(make_apt_repository(machine.shared / "cuda", [CUDA], key), f"{CUDA.name}={CUDA.version}")


def installed(machine: Machine) -> str:
    """Return all packages, but keys: dnf imports the lock's when it first reads a package."""
    return machine.out("dpkg-query -W; rpm -qa | grep -v ^gpg-pubkey- | sort")


def refused(machine: Machine, recipe: str, env: dict[str, str], said: str) -> None:
    """Hold what is true after every attack: one error line at the end names the repository, what the package manager
    saw stands above it, nothing was installed and nothing is half done."""
    before = installed(machine)
    text = machine.refuses(recipe, env)
    url = env["REPOSITORIES"].split()[1]
    *above, last = text.splitlines()
    assert re.search(said, text), text
    assert last.startswith("error: "), text
    assert url in last, text
    assert not [line for line in above if line.startswith("error: ")], text
    assert installed(machine) == before
    assert machine.out(f"ls -d {MARK} 2>/dev/null || true") == ""
    assert machine.out("dpkg --audit") == ""


@pytest.mark.parametrize(("attack", "said"), APT, ids=named)
def test_a_tampered_apt_repository_is_refused(
    machine: Machine, key: Signer, stranger: Signer, attack: Attack, said: str
) -> None:
    env = make_cuda(machine, key)
    attack(machine.shared / "cuda", stranger)
    refused(machine, "cuda-toolkit", env, said)
    assert machine.says("cuda-toolkit", "check", env)["state"] == "todo"
    make_cuda(machine, key)
    assert machine.says("cuda-toolkit", "apply", env)["state"] == "ok"


@pytest.mark.sample
@pytest.mark.parametrize(("attack", "said"), [APT[0], APT[3], APT[5]], ids=named)
def test_an_apt_repository_that_is_tampered_with_later_is_refused(
    machine: Machine, key: Signer, stranger: Signer, attack: Attack, said: str
) -> None:
    """The host has it already, and its lists, when a package of it is wanted."""
    other = Package("site-tool", "1.0", {"/opt/site-tool": "x"})
    env = apt(make_apt_repository(machine.shared / "cuda", [other], key), f"{CUDA.name}={CUDA.version}")
    assert "there is no nvcc of CUDA 12" in machine.refuses("cuda-toolkit", {**env, "PACKAGES": "site-tool"})
    make_cuda(machine, key)
    attack(machine.shared / "cuda", stranger)
    refused(machine, "cuda-toolkit", env, said)
    make_cuda(machine, key)
    assert machine.says("cuda-toolkit", "apply", env)["state"] == "ok"


# --- dnf ---------------------------------------------------------------------------------------------------------


def change_metadata(folder: Path, _: Signer) -> None:
    """The list of packages is another one than the list of lists says."""
    for file in (folder / "repodata").glob("*primary.xml*"):
        spoil(file)


def replace_metadata(folder: Path, _: Signer) -> None:
    """The list of packages is whole, and another one."""
    found = next(iter((folder / "repodata").glob("*-primary.xml.gz")))
    found.write_bytes(gzip.compress(gzip.decompress(found.read_bytes()).replace(b"3.2.1", b"3.2.2")))


def replace_list_of_lists(folder: Path, _: Signer) -> None:
    (folder / "repodata/repomd.xml").write_text("<html>log in first</html>\n", encoding="utf-8")


def sign_packages_as_stranger(folder: Path, stranger: Signer) -> None:
    """All of it right, by a key that is not the lock's; the key beside it is the lock's."""
    known = (folder / "key.asc").read_bytes()
    make_dnf_repository(folder, [OFED], stranger)
    (folder / "key.asc").write_bytes(known)


def do_not_sign_packages(folder: Path, _: Signer) -> None:
    for file in folder.glob("*.rpm"):
        file.unlink()
    build_rpm(folder, OFED)
    run("createrepo_c", "--quiet", str(folder))


def change_and_list(folder: Path, _: Signer) -> None:
    """The list names the tampered package with its right hash: only the package itself speaks."""
    for file in folder.glob("*.rpm"):
        content = file.read_bytes()
        file.write_bytes(content.replace(b"of the lock", b"of somebody"))
        assert file.read_bytes() != content
    run("createrepo_c", "--quiet", str(folder))


def list_what_is_not(folder: Path, _: Signer) -> None:
    """A list of lists that goes with a list in which the package has another hash."""
    found = next(iter((folder / "repodata").glob("*-primary.xml.gz")))
    text = gzip.decompress(found.read_bytes()).decode()
    text = re.sub(r'(<checksum type="sha256" pkgid="YES">)[0-9a-f]{64}', rf"\g<1>{'0' * 64}", text)
    plain = folder / "primary.xml"
    plain.write_text(text, encoding="utf-8")
    run("modifyrepo_c", "--remove", "primary", str(folder / "repodata"))
    run("modifyrepo_c", "--mdtype=primary", str(plain), str(folder / "repodata"))
    assert hashlib.sha256(plain.read_bytes()).hexdigest() not in found.name


DNF: list[tuple[Attack, str]] = [
    (change_metadata, "hecksum|Failed to download metadata"),
    (replace_metadata, "hecksum|Failed to download metadata"),
    (replace_list_of_lists, "repomd.xml"),
    (sign_packages_as_stranger, "not installed|GPG check FAILED|GPG"),
    (do_not_sign_packages, "is not signed"),
    (spoil_package, "hecksum|GPG|FAILED"),
    (change_and_list, "GPG|digest|BAD|ailed"),
    (list_what_is_not, "hecksum|Error downloading|ailed"),
]


def make_ofed(machine: Machine, key: Signer) -> dict[str, str]:
    """Return the inputs of doca-ofed with a repository that is as it should be."""
    repository = make_dnf_repository(machine.shared / "doca", [OFED], key)
    lines = {"REPOSITORIES": repository.line("doca", suite="-"), "PACKAGES": "doca-ofed=3.2.1*"}
    return {"MANAGER": "dnf", "HOLD": "doca-*", **lines}


@pytest.mark.parametrize(("attack", "said"), DNF, ids=named)
def test_a_tampered_dnf_repository_is_refused(
    machine: Machine, key: Signer, stranger: Signer, attack: Attack, said: str
) -> None:
    env = make_ofed(machine, key)
    machine.out(f"{SYS} add 0000:0c:00.0 0x15b3 0x020000")
    attack(machine.shared / "doca", stranger)
    refused(machine, "doca-ofed", env, said)
    make_ofed(machine, key)
    machine.out("dnf -q clean all")
    assert machine.says("doca-ofed", "apply", env)["state"] == "reboot"
