"""Messages, exit codes and the guard."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from deepep_bootstrap.core.errors import (
    BUG,
    CHANGES,
    INTERRUPTED,
    OK,
    TROUBLE,
    VERDICT,
    Problem,
    ToldInterrupt,
    Trouble,
    worst,
)
from deepep_bootstrap.core.guard import guarded


def test_a_problem_is_one_sentence_with_its_parts() -> None:
    whole = Problem(
        "deepep.lock.toml: source.nvshmem.rev", "short revision", "131da55", "40 hex digits", "git rev-parse 131da55"
    )
    assert str(whole) == (
        "deepep.lock.toml: source.nvshmem.rev: short revision — found 131da55, wanted 40 hex digits. Try: git "
        "rev-parse 131da55"
    )
    assert str(Problem("n001", "refused")) == "n001: refused"
    assert whole.message == str(whole).removeprefix("deepep.lock.toml: source.nvshmem.rev: ")


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([], OK),
        ([OK, CHANGES], CHANGES),
        ([CHANGES, VERDICT], VERDICT),
        ([VERDICT, TROUBLE], TROUBLE),
        ([TROUBLE, INTERRUPTED], INTERRUPTED),
        ([INTERRUPTED, BUG, OK], BUG),
        ([77, VERDICT], TROUBLE),
    ],
)
def test_worst_code_wins(codes: list[int], expected: int) -> None:
    assert worst(codes) == expected


def raising(error: BaseException) -> int:
    raise error


def test_trouble_is_one_line_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    trouble = Trouble(Problem("a", "x"), Problem("b", "y"), code=VERDICT)
    assert guarded("plan", lambda: raising(trouble)) == VERDICT
    assert capsys.readouterr() == ("", "a: x\nb: y\n")


def test_what_a_host_said_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    said = "\x1b]0;title\x07\x1b[2Jthe \x08disk\r is full\x9b"
    trouble = Trouble(Problem("n1", said, found="\x1b[31mred\x1b[0m"))
    assert guarded("plan", lambda: raising(trouble)) == TROUBLE
    assert capsys.readouterr() == ("", "n1: the disk is full — found red\n")


def test_trouble_as_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded("plan", lambda: raising(Trouble(Problem("a", "x", "f", "w", "t"))), as_json=True) == TROUBLE
    out, err = capsys.readouterr()
    wanted = {"where": "a", "what": "x", "found": "f", "wanted": "w", "try": "t"}
    assert json.loads(out) == {"schema": 1, "verb": "plan", "exit": 1, "errors": [wanted]}
    assert err == ""


@pytest.mark.parametrize(
    ("verb", "error", "said"),
    [
        ("bootstrap", KeyboardInterrupt(), "bootstrap: interrupted. Try: the same command again"),
        ("status", KeyboardInterrupt(), "status: interrupted\n"),
        ("bootstrap", ToldInterrupt(), ""),
    ],
    ids=["a verb that changes things", "a verb that looks", "it was told how far it came"],
)
def test_interrupt(verb: str, error: BaseException, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(verb, lambda: raising(error)) == INTERRUPTED
    err = capsys.readouterr().err
    assert err.startswith(said)
    assert bool(err) == bool(said)


def test_an_interrupt_is_a_document_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded("bootstrap", lambda: raising(ToldInterrupt()), as_json=True) == INTERRUPTED
    assert json.loads(capsys.readouterr().out)["exit"] == INTERRUPTED


@pytest.mark.usefixtures("programs")
def test_a_bug_leaves_a_log_and_no_traceback(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert guarded("plan", lambda: raising(ZeroDivisionError("boom"))) == BUG
    err = capsys.readouterr().err
    assert "Traceback" not in err
    (log,) = (tmp_path / "deepep-bootstrap" / "bugs").iterdir()
    assert str(log) in err
    assert "ZeroDivisionError: boom" in log.read_text()


@pytest.mark.usefixtures("programs")
def test_the_log_of_a_bug_is_for_the_account_alone_and_holds_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = "https://admin:S3cr3tPW@index.example/simple"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("SITE_TOKEN", "t0kenOfTheSite")
    monkeypatch.setattr("sys.argv", ["invoke", "plan", f"--mirror=index:pypi={address}", "--password", "hunter2"])
    before = os.umask(0)
    try:
        assert guarded("plan", lambda: raising(ValueError(f"cannot parse {address} with t0kenOfTheSite"))) == BUG
    finally:
        os.umask(before)
    folder = tmp_path / "deepep-bootstrap" / "bugs"
    (log,) = folder.iterdir()
    text = log.read_text()
    assert [word for word in ("S3cr3tPW", "t0kenOfTheSite", "hunter2") if word in text] == []
    assert "index.example/simple" in text
    assert "cannot parse" in text
    assert (stat.S_IMODE(log.stat().st_mode), stat.S_IMODE(folder.stat().st_mode)) == (0o600, 0o700)
