"""The bug bundle: what is in it, what never gets into it, and that it is made where hosts do not answer."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepep_bootstrap.core import redact
from deepep_bootstrap.core.redact import REMOVED, scrub
from deepep_bootstrap.report import bundle
from tests.support.paths import ROOT

S3 = "s3cr" + "etvalue"
KEY = "-----BEGIN OPENSSH PRIVATE " + "KEY-----\nb3BlbnNz\naC1rZXk=\n-----END OPENSSH PRIVATE " + "KEY-----"
LEAKS = [
    f"https://me:{S3}@git.example.com/a/b.git",
    f"https://{S3}@git.example.com/a",
    f"fatal: unable to access 'http://u:p{S3}@h/x/': 403",
    f"ssh://me:{S3}@host/x",
    f"git+https://a:b@{S3}@host/x",
    f"https://host/simple?token={S3}&x=1",
    f"https://s3.host/x?X-Amz-Signature={S3}&y=2",
    f"password={S3}",
    f"password={S3}&{S3}'{S3})",
    f"{{'token': '{S3}', 'x': 1}}",
    f"PGPASSWORD='{S3} and more {S3}'",
    f'"sudo_password": "{S3}"',
    f'"api-key" : "{S3}\\"{S3}"',
    f"UV_INDEX_SITE_PASSWORD={S3}",
    f"export HF_TOKEN={S3}",
    f"AWS_SECRET_ACCESS_KEY => {S3}",
    f"mysql --password {S3} -h x",
    f"curl --auth-token '{S3} x'",
    f"Authorization: Bearer {S3}",
    f"authorization=Basic {S3}==",
    f"header 'bearer {S3}xxxx'",
    f"machine h login me passphrase: {S3}",
    f"//registry/:_authToken={S3}",
    KEY.replace("b3BlbnNz", S3),
    KEY.replace("b3BlbnNz", S3).rpartition("-----END")[0],
    f"ghp_{S3 * 3}",
    f"the key is github_pat_{S3 * 3}.",
    f"hf_{S3 * 3}",
    f"nvapi-{S3 * 3}",
    f"glpat-{S3 * 2}",
    f"eyJ{S3}.{S3}{S3}.{S3}",
]
HARMLESS = [
    "python test_internode.py --num-tokens 4096 --hidden 7168",
    "num_tokens=4096, tokenizer: llama",
    "PATH=/usr/bin:/bin CUDA_HOME=/usr/local/cuda",
    "git@github.com:deepseek-ai/DeepEP.git",
    "ssh://git@host.example.com/team/x.git",
    "https://github.com/deepseek-ai/DeepEP",
    '"sudo_password_prompt": false',
    '{"password": null, "token": false}',
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKwu9bXk9tF4c2h6 me@here",
    "sha256-QWph8aBQ/TySa69tYU/QwyGAtB7cFzT4TxzSJk2Eksw=",
    "-DNVSHMEM_IBGDA_SUPPORT=ON -O2 x.cu:17:3: error: expected ';' before token",
    "error: n001: permission denied (publickey,password).",
    "botocore.exceptions.NoCredentialsError: Unable to locate credentials",
    "alice ran it on n001, 10.0.0.7",
]


@pytest.mark.parametrize("text", LEAKS)
def test_a_secret_is_replaced_and_only_once(text: str) -> None:
    clean = scrub(f"before\n{text}\nafter\n")
    assert S3 not in clean
    assert REMOVED in clean
    assert clean.startswith("before\n")
    assert clean.endswith("\nafter\n") or "BEGIN" in text
    assert scrub(clean) == clean


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_stays(text: str) -> None:
    assert scrub(text) == text


@given(st.text(max_size=60), st.sampled_from(LEAKS), st.text(max_size=60))
def test_a_secret_is_found_whatever_lines_are_around_it(before: str, leak: str, after: str) -> None:
    clean = scrub(f"{before}\n{leak}\n{after}")
    assert S3 not in clean
    assert scrub(clean) == clean


def test_values_of_secret_variables_are_taken_out_wherever_they_stand() -> None:
    environment = {
        "MY_TOKEN": "correcthorse",
        "SUDO_PASSWORD": "correcthorsebattery",
        "HOME": "/home/alice",
        "DB_SECRET": "abc",
        "X_TOKEN": "false",
    }
    found = redact.secrets_of(environment)
    assert found == ("correcthorsebattery", "correcthorse")
    clean = scrub("it said correcthorsebattery, then correcthorse in /home/alice", found)
    assert clean == f"it said {REMOVED}, then {REMOVED} in /home/alice"


def test_hosts_get_the_same_name_everywhere_and_addresses_none() -> None:
    hosts = redact.aliases({"n1": "", "n10": "10.0.0.7", "n1.example.com": ""})
    text = (
        "n1 n10 n1.example.com n1x xn1 logs/n10/x.log 10.0.0.7 192.168.3.4:22 127.0.0.1 fe80::1 0000:17:00.0 "
        "04:31:23 3.4.5 12.9.86"
    )
    clean = scrub(text, hosts=hosts)
    assert clean == (
        "host-1 host-2 host-3 n1x xn1 logs/host-2/x.log host-2 [address]:22 127.0.0.1 [address] 0000:17:00.0 "
        "04:31:23 3.4.5 12.9.86"
    )
    assert scrub(text) == text


def test_a_long_log_keeps_its_beginning_and_its_end() -> None:
    data = b"first\n" + b"x" * (2 * bundle.LARGEST) + b"\nlast\n"
    cut = bundle.cut(data)
    assert cut.startswith(b"first\n")
    assert cut.endswith(b"\nlast\n")
    assert len(cut) < bundle.LARGEST + 100
    assert bundle.cut(b"short") == b"short"


def test_the_same_files_give_the_same_archive_and_nobody_owns_them() -> None:
    files = {"b.txt": "two", "a/x.txt": "one \udcff"}
    data = bundle.pack(files, 1700000000)
    assert data == bundle.pack(dict(reversed(files.items())), 1700000000)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = archive.getmembers()
    assert [member.name for member in members] == ["deepep-report/a/x.txt", "deepep-report/b.txt"]
    assert {(member.uid, member.gid, member.uname, member.mode) for member in members} == {(0, 0, "", 0o644)}


def invoke(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), **environment}
    words = ("--search-root", str(ROOT), "report", *words)
    return subprocess.run(
        [sys.executable, "-m", "invoke", *words], cwd=folder, env=env, capture_output=True, text=True, check=False
    )


def contents(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        return {
            member.name.removeprefix("deepep-report/"): archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive.getmembers()
        }


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A folder with logs of four runs (and one that was stopped before it had any), a secret in one of them, and a
    hosts file with this machine and one that never answers."""
    for number in range(4):
        folder = tmp_path / f"state/deepep-bootstrap/logs/2026010{number + 1}T000000Z-bootstrap-aaaaaa/here"
        folder.mkdir(parents=True)
        (folder / "build-x.log").write_text(f"run {number}: GET https://me:{S3}@mirror.example.com/x of here\n")
    (tmp_path / "state/deepep-bootstrap/logs/20260105T000000Z-bootstrap-stopped/here").mkdir(parents=True)
    (tmp_path / "state/deepep-bootstrap/bugs").mkdir()
    (tmp_path / "state/deepep-bootstrap/bugs/20260101T000000Z-plan-1.log").write_text("Traceback\n")
    (tmp_path / "hosts.txt").write_text(f"defaults prefix={tmp_path}/prefix\nhere connection=local\nfar.invalid\n")
    return tmp_path


@pytest.mark.usefixtures("programs")
def test_a_bundle_has_what_a_helper_asks_for_and_no_secret_although_a_host_does_not_answer(state: Path) -> None:
    done = invoke(state, "--hosts=hosts.txt", "--bundle=out.tar.gz", "--json", DEPLOY_TOKEN="here-is-a-token")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert set(document) == {
        "schema",
        "verb",
        "exit",
        "errors",
        "file",
        "bytes",
        "contents",
        "missing",
    }  # as in docs/json.md
    assert document["file"] == str(state / "out.tar.gz")
    assert [each["where"] for each in document["missing"]][:1] == ["far.invalid"]
    found = contents(state / "out.tar.gz")
    assert sorted(found) == document["contents"]
    logs = [name for name in found if name.startswith("logs/")]
    assert logs == [f"logs/2026010{number}T000000Z-bootstrap-aaaaaa/here/build-x.log" for number in (2, 3, 4)]
    others = {
        "README.txt",
        "versions.json",
        "facts.json",
        "problems.json",
        "deepep.lock.toml",
        "hosts.txt",
        "bugs/20260101T000000Z-plan-1.log",
    }
    assert {*found} - {*logs} - {"plan.json"} == others  # whether this very machine can have a plan is not the subject
    assert S3 not in str(found)
    assert "here-is-a-token" not in str(found)
    assert json.loads(found["facts.json"])["here"]["cpus"] > 0
    assert json.loads(found["versions.json"])["packages"]["fabric"]
    assert found["deepep.lock.toml"] == (ROOT / "deepep.lock.toml").read_text()
    assert "far.invalid" in found["README.txt"]
    assert (state / "out.tar.gz").stat().st_mode & 0o777 == 0o600


@pytest.mark.usefixtures("programs")
def test_without_any_host_or_name_and_with_host_names_taken_out(state: Path) -> None:
    (state / "hosts.txt").write_text("here.invalid\nfar.invalid\n")
    done = invoke(state, "--hosts=~/hosts.txt", "--bundle", "--scrub-hosts", HOME=str(state))
    assert done.returncode == 0, done.stderr
    (bundle,) = state.glob("deepep-report-*Z.tar.gz")
    assert f"wrote {bundle}" in done.stdout
    assert "facts.json" not in done.stdout
    found = contents(bundle)
    assert "facts.json" not in found
    assert "invalid" not in found["README.txt"] + found["problems.json"] + found["hosts.txt"] + done.stdout
    assert "host-1" in found["hosts.txt"]


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--bundle=hosts.txt",), "--bundle=hosts.txt: is there already — wanted the name of a new file"),
        (("--bundle=none/x.tar.gz",), "--bundle=none/x.tar.gz: its folder is not there"),
    ],
)
def test_one_message_where_no_bundle_can_be_written(state: Path, words: tuple[str, ...], expected: str) -> None:
    before = (state / "hosts.txt").read_text()
    done = invoke(state, *words)
    assert done.returncode == 1
    assert done.stderr.startswith(expected), done.stderr
    assert done.stderr.count("\n") == 1
    assert (state / "hosts.txt").read_text() == before
