"""By what the lock is ahead of what a prefix offers."""

from __future__ import annotations

from deepep_bootstrap.cli.lock_view import find_leads, overview, pins_json
from deepep_bootstrap.lock.model import parse_lock
from tests.support import modules as support
from tests.support.paths import ROOT

LOCK = parse_lock((ROOT / "deepep.lock.toml").read_text(encoding="utf-8"), "deepep.lock.toml")
V1 = LOCK.sources["deepep-v1"]
NVSHMEM = LOCK.sources["nvshmem"]


def test_a_stack_behind_the_lock() -> None:
    entry = "1f7yb5rz4skcnq3f7nyghx6l2as8wd9j-nvshmem-{}"
    old = support.record(module=f"deepep/{V1.version}-fb97a68-v1", nvshmem=entry.format("3.4.0"))
    assert [lead.line for lead in find_leads(LOCK, [old])] == [
        f"behind the lock: DeepEP fb97a68 → {V1.rev[:7]} (invoke plan --stack=v1)",
        f"behind the lock: NVSHMEM 3.4.0 → {NVSHMEM.version} (invoke plan --stack=v1)",
    ]
    same = support.record(module=f"deepep/{V1.version}-{V1.rev[:7]}-v1", nvshmem=entry.format(NVSHMEM.version))
    assert find_leads(LOCK, [same]) == ()


def test_what_the_lock_does_not_have_is_behind_nothing() -> None:
    assert find_leads(LOCK, [support.record(stack="of-old", module="deepep/1-fb97a68-of-old")]) == ()
    assert find_leads(LOCK, [support.record(module="another name", nvshmem="")]) == ()


def test_how_to_note_the_fingerprint_of_a_key_is_said_until_it_is_noted() -> None:
    told = "\n".join(overview(LOCK, ["v1"], 0.0))
    assert "system.debian-12.repository.doca (doca-ofed): https://linux.mellanox.com/" in told
    assert "x86_64/GPG-KEY-Mellanox.pub | gpg --show-keys --with-colons | awk" in told
    assert "{machine}/GPG" not in told, "a command to be typed"
    assert 'then, in [system.ubuntu-22_04.repository.doca]: key_fingerprint = "…"' in told
    fingerprint = "0123456789ABCDEF0123456789ABCDEF01234567"
    noted = parse_lock(LOCK.text.replace('key_fingerprint = ""', f'key_fingerprint = "{fingerprint}"'), "x.toml")
    assert "key_fingerprint" not in "\n".join(overview(noted, ["v1"], 0.0))
    keys = {
        (each["system"], each["name"]): each["key_fingerprint"] for each in pins_json(noted, ["v1"])["repositories"]
    }
    assert keys["debian-12", "doca"] == fingerprint
