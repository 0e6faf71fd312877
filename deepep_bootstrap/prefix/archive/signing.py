"""Detached signatures with the keys that administrators have anyway: `ssh-keygen -Y`, with a namespace of
our own.

    ssh-keygen -Y verify -f ALLOWED_SIGNERS -I WHO -n deepep-bootstrap -s FILE.sig <INDEX
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from msgspec import Struct

from deepep_bootstrap.core import process
from deepep_bootstrap.core.errors import Problem, Trouble

NAMESPACE = "deepep-bootstrap"
"""A signature made for anything else (a git commit, a mail) does not count, and ours count nowhere else."""
LARGEST = 64 * 1024
"""Bytes of a signature; one by the longest RSA key has less than six thousand."""


class Signer(Struct, frozen=True):
    """Whose signature it is: the name that the allowed signers file gives, and the key's fingerprint."""

    name: str
    key: str

    def __str__(self) -> str:
        return f"{self.name} ({self.key})"


def need_key(key: str) -> Path:
    """Return the path of a key's file; Trouble where it cannot be read."""
    path = Path(os.path.expanduser(key))
    _need_file(path, "--sign", "the file of a private key, or of a public key that ssh-agent knows")
    return path


def sign(key: str, data: bytes) -> bytes:
    """Return the signature of `data` by `key`: the file of a private key without a passphrase, or of a public key
    whose private one an ssh-agent or a hardware token has. Nobody is asked for anything."""
    path = need_key(key)
    done = process.run_program(["ssh-keygen", "-Y", "sign", "-n", NAMESPACE, "-f", path], data=data)
    if done.code or not done.out.startswith("-----BEGIN SSH SIGNATURE-----"):
        remedy = f"ssh-add {path}, then --sign {path}.pub, where it has a passphrase"
        raise Trouble(
            Problem(
                f"--sign {key}",
                "this key cannot sign",
                _last(done.tail),
                "an SSH key that can be used without a question",
                remedy,
            )
        )
    return done.out.encode()


def verify(allowed: str, signature: bytes, data: bytes, where: str) -> Signer:
    """Return whose signature of `data` it is. Trouble where it is not one of `data`, made for another purpose, by a
    key that the file `allowed` (ALLOWED SIGNERS in ssh-keygen's manual) does not name or allow. `where` names what
    is signed."""
    signers = Path(os.path.expanduser(allowed))
    _need_file(signers, "--allowed-signers", "a file in the format ALLOWED SIGNERS of ssh-keygen's manual")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "signature")
        file.write_bytes(signature)
        checked = process.run_program(["ssh-keygen", "-Y", "check-novalidate", "-n", NAMESPACE, "-s", file], data=data)
        if checked.code:
            what = "the signature does not belong to this archive"
            raise Trouble(
                Problem(
                    where,
                    what,
                    _last(checked.tail),
                    f"one of its index, for {NAMESPACE}",
                    "both files from where they were made",
                )
            )
        key = checked.out.strip().rpartition(" with ")[2]
        matched = process.run_program(["ssh-keygen", "-Y", "find-principals", "-f", signers, "-s", file])
        names = [name for name in matched.out.replace(",", "\n").splitlines() if name and not name.startswith("!")]
        if matched.code or not names:
            remedy = f"asking who made it, before a line for that key goes into {allowed}"
            raise Trouble(
                Problem(
                    where,
                    "it is signed by somebody who is not among the allowed signers",
                    key,
                    f"a key of {allowed}",
                    remedy,
                )
            )
        for name in names:
            words: list[str | Path] = [
                "ssh-keygen",
                "-Y",
                "verify",
                "-n",
                NAMESPACE,
                "-f",
                signers,
                "-I",
                name,
                "-s",
                file,
            ]
            done = process.run_program(words, data=data)
            if not done.code:
                return Signer(name, key)
    what = "its signer is known, but not allowed to sign this, or not now"
    raise Trouble(
        Problem(
            where,
            what,
            f"{names[0]}, {key}: {_last(done.tail)}",
            f"a key valid today for {NAMESPACE}",
            f"its line in {allowed}",
        )
    )


def read_signature(path: Path) -> bytes:
    """Return the bytes of a signature's file; Trouble where there is none."""
    try:
        with path.open("rb") as stream:
            return stream.read(LARGEST)
    except FileNotFoundError:
        remedy = "the .sig file from where the archive was made, or --insecure-unsigned"
        raise Trouble(Problem(str(path), "the archive is not signed: there is no such file", try_=remedy)) from None
    except OSError as error:
        raise Trouble(Problem(str(path), f"cannot be read: {error.strerror}")) from None


def _need_file(path: Path, flag: str, wanted: str) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise Trouble(Problem(f"{flag} {path}", f"cannot be read: {error.strerror}", wanted=wanted)) from None


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]
