"""Signatures of package repositories, checked by gpg against the one key that the lock names; gpg knows no other key meanwhile.

With `recipes/host/repositories.sh`, which does the same on hosts. Nothing of a file is to be used before it was checked here.
"""

from __future__ import annotations

from pathlib import Path

from deepep_bootstrap.core import process
from deepep_bootstrap.core.errors import Problem, Trouble

CLEAR = b"-----BEGIN PGP SIGNED MESSAGE-----\n"
BAD = ("BADSIG", "EXPSIG", "EXPKEYSIG", "REVKEYSIG")
"""What gpg says of a signature that apt does not take either: wrong, out of date, of a key that is out of date or was revoked."""
WEAK = {"1": "MD5", "2": "SHA1", "3": "RIPEMD160"}
"""Digests that apt takes no signature over, by number (RFC 4880, 9.4). gpg's own --weak-digest would refuse keys that have one, too."""
TIMEOUT = 60.0
"""Seconds for one call of gpg, which reads small files and nothing of the network."""


def make_keyring(key: Path, fingerprint: str, home: Path, where: str) -> None:
    """Make `home` a gpg home with exactly the key of that full fingerprint, out of the file `key`, whatever else that holds.

    Raises Trouble, said of `where`, when the file has no such key.
    """
    all_of_them, picked = home.parent / f"{home.name}-all", home.parent / f"{home.name}-picked"
    for folder in (home, all_of_them):
        folder.mkdir(mode=0o700)
    _gpg(all_of_them, "--import", key)
    found = _primaries(_gpg(all_of_them, "--with-colons", "--list-keys").out)
    _gpg(all_of_them, "--output", picked, "--export", fingerprint)
    if picked.is_file():
        # Its exit code also tells of an agent that nobody needs, such as one whose socket has too long a path.
        _gpg(home, "--import", picked)
    # A key may carry the wanted one as a subkey and would come along.
    if _primaries(_gpg(home, "--with-colons", "--list-keys").out) != [fingerprint]:
        raise Trouble(Problem(where, "is not the key in the lock", " ".join(found) or "no key", fingerprint))


def signed_text(home: Path, file: Path, fingerprint: str, signature: Path | None = None) -> str:
    """Return what the key of `home` signed: the text in a clear-signed `file`, or all of `file` where `signature` is a file of its own.

    Raises Trouble when there is no good signature of that key, made with a digest that apt takes.
    """
    content = home.parent / f"{home.name}-content"
    if signature is None:
        if not file.read_bytes().startswith(CLEAR):
            raise Trouble(Problem(file.name, "is not clear-signed", wanted=CLEAR.decode().strip()))
        said = _gpg(home, "--status-fd", "1", "--output", content, "--decrypt", file).out
    else:
        content = file
        said = _gpg(home, "--status-fd", "1", "--verify", signature, file).out
    words = [line.split()[1:] for line in said.splitlines() if line.startswith("[GNUPG:] ")]
    kinds = [each[0] for each in words if each]
    # VALIDSIG, key, date, time, expiry, version, reserved, algorithm, digest, class, primary key (doc/DETAILS of GnuPG)
    valid = [each for each in words if each[:1] == ["VALIDSIG"] and len(each) > 10]
    by = [each[10] for each in valid]
    faults = [*(kind for kind in kinds if kind in BAD), *(f"one over {WEAK[each[8]]}" for each in valid if each[8] in WEAK)]
    if faults or "GOODSIG" not in kinds or fingerprint not in by or not content.is_file():
        signers = [each[1] for each in words if each[:1] in (["NO_PUBKEY"], ["ERRSIG"])]
        found = ", ".join(dict.fromkeys([*faults, *(f"a signature of {each}" for each in signers)])) or "no signature"
        raise Trouble(Problem(file.name, "has no good signature of the key in the lock", found, fingerprint))
    try:
        return content.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise Trouble(Problem(file.name, "is no text")) from None


def _gpg(home: Path, *words: str | Path) -> process.Completed:
    """Run gpg with the keys of `home` and no agent."""
    quiet = ("--no-autostart", "--batch", "--no-tty", "--yes", "--quiet", "--no-options", "--no-auto-key-retrieve")
    return process.run(("gpg", "--homedir", home, *quiet, *words), timeout=TIMEOUT)


def _primaries(listing: str) -> list[str]:
    """Return the full fingerprints of the primary keys in a listing with colons."""
    found, primary = [], False
    for fields in (line.split(":") for line in listing.splitlines()):
        if fields[0] == "pub":
            primary = True
        elif fields[0] == "fpr" and primary:
            found.append(fields[9])
            primary = False
    return found
