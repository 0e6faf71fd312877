"""Signatures by ssh-keygen, and whom the verbs trust."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.prefix.archive import signing

pytestmark = pytest.mark.usefixtures("programs")

DATA = b'{"format": "deepep-bootstrap-archive"}\n'


def make_key(path: Path, kind: str = "ed25519", passphrase: str = "") -> str:
    """Make a key pair and return its public half without the comment."""
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-f", path], check=True, stdin=subprocess.DEVNULL)
    return " ".join(Path(f"{path}.pub").read_text().split()[:2])


def signers(folder: Path, *lines: str) -> str:
    path = folder / "allowed signers"
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("keys")
    return folder, {name: make_key(folder / name) for name in ("good", "other")}


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    socket = tmp_path / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
    yield
    process.terminate()
    process.wait()


def test_a_signature_by_an_allowed_key_counts(keys: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    folder, public = keys
    signature = signing.sign(str(folder / "good"), DATA)
    allowed = signers(tmp_path, "# who may", f"other@example.com {public['other']}", f"ci@example.com {public['good']}")
    signer = signing.verify(allowed, signature, DATA, "FILE")
    assert signer.name == "ci@example.com"
    assert signer.key.startswith("ED25519 key SHA256:")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("*@example.com {good}", "*@example.com"),
        ("!root@example.com,ci@example.com {good}", "ci@example.com"),
        ('ci@example.com namespaces="git,deepep-bootstrap" {good}', "ci@example.com"),
        ('ci@example.com valid-after="20200101" {good}', "ci@example.com"),
    ],
)
def test_forms_of_allowed_signers(keys: tuple[Path, dict[str, str]], tmp_path: Path, line: str, name: str) -> None:
    folder, public = keys
    signature = signing.sign(str(folder / "good"), DATA)
    assert signing.verify(signers(tmp_path, line.format(**public)), signature, DATA, "FILE").name == name


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ci@example.com {other}", "not among the allowed signers — found ED25519 key SHA256:"),
        ("", "not among the allowed signers"),
        ("nonsense", "not among the allowed signers"),
        ('ci@example.com namespaces="git" {good}', "not allowed to sign this"),
        ('ci@example.com valid-before="20200101" {good}', "not allowed to sign this|not among the allowed signers"),
    ],
)
def test_who_is_not_allowed_is_refused(
    keys: tuple[Path, dict[str, str]], tmp_path: Path, line: str, message: str
) -> None:
    folder, public = keys
    signature = signing.sign(str(folder / "good"), DATA)
    with pytest.raises(Trouble, match=message):
        signing.verify(signers(tmp_path, line.format(**public)), signature, DATA, "FILE")


def test_a_signature_of_something_else_is_refused(keys: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    folder, public = keys
    allowed = signers(tmp_path, f"ci@example.com {public['good']}")
    good = signing.sign(str(folder / "good"), DATA)
    words = ["ssh-keygen", "-Y", "sign", "-n", "git", "-f", folder / "good"]
    for_git = subprocess.run(words, input=DATA, capture_output=True, check=True).stdout
    for signature, data in (
        (good, DATA + b" "),
        (for_git, DATA),
        (b"", DATA),
        (b"nonsense", DATA),
        (good[:100], DATA),
        (os.urandom(500), DATA),
    ):
        with pytest.raises(Trouble, match="FILE: the signature does not belong to this archive"):
            signing.verify(allowed, signature, data, "FILE")


def test_a_public_key_signs_through_the_agent(keys: tuple[Path, dict[str, str]], tmp_path: Path, agent: None) -> None:
    public = make_key(tmp_path / "locked", passphrase="secret words")
    with pytest.raises(Trouble, match=r"this key cannot sign.*ssh-add .*locked, then --sign .*locked\.pub"):
        signing.sign(str(tmp_path / "locked"), DATA)
    folder, keyed = keys
    with pytest.raises(Trouble, match="this key cannot sign"):
        signing.sign(str(folder / "good.pub"), DATA) if (folder / "good").rename(tmp_path / "aside") else None
    subprocess.run(["ssh-add", "-q", tmp_path / "aside"], check=True)
    signature = signing.sign(str(folder / "good.pub"), DATA)
    (tmp_path / "aside").rename(folder / "good")
    allowed = signers(tmp_path, f"me {keyed['good']}", f"locked {public}")
    assert signing.verify(allowed, signature, DATA, "FILE").name == "me"


def test_files_that_are_not_there(keys: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    signature = signing.sign(str(keys[0] / "good"), DATA)
    with pytest.raises(Trouble, match=r"--sign .*cannot be read: No such file"):
        signing.sign(str(tmp_path / "absent"), DATA)
    with pytest.raises(Trouble, match=r"--sign .*cannot be read: Is a directory"):
        signing.sign(str(tmp_path), DATA)
    with pytest.raises(Trouble, match=r"--allowed-signers .*cannot be read: No such file"):
        signing.verify(str(tmp_path / "absent"), signature, DATA, "FILE")
    with pytest.raises(Trouble, match="the archive is not signed"):
        signing.read_signature(tmp_path / "absent.sig")
    (tmp_path / "text").write_text("no key")
    with pytest.raises(Trouble, match="this key cannot sign"):
        signing.sign(str(tmp_path / "text"), DATA)
