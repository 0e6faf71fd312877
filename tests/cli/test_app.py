"""The command line: which flags a verb has, what it makes of bad ones, and how a run ends that a signal or a full disk
ends."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from inspect import Parameter, signature
from pathlib import Path

import pytest

from deepep_bootstrap.bootstrap.planning import RunLogs
from deepep_bootstrap.cli import app
from deepep_bootstrap.cli.app import Verb, check
from deepep_bootstrap.cli.verbs import declared
from deepep_bootstrap.core.errors import BUG, INTERRUPTED, TROUBLE, Trouble
from deepep_bootstrap.core.guard import guarded
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.survey import number
from deepep_bootstrap.prefix.test_kinds import KINDS
from tests.support.paths import ROOT
from tests.support.verbs import run_verb


def invoke(*argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "invoke", *argv]
    return subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, **options
    )


@pytest.mark.parametrize(
    ("words", "more"),
    [
        ([], 0),
        (["a.out"], 0),
        (["a.out", "b.out"], 1),
        (["a.out", "--json", "b.out", "docs"], 2),
        (["a.out", "b.out", "status", "c"], 1),
        (["--logs=a.out", "b.out"], 1),
        (["a.out", "--log", "b.out", "c.out", "--log=d.out"], 1),
        (["a.out", "status"], 0),
    ],
)
def test_further_words_are_further_logs(words: list[str], more: int) -> None:
    """What a shell makes of a glob without quotation marks; a word that may be a verb is left to Invoke."""
    found = [parameter.name for parameter in app.as_written(declared("results"), ["results", *words])]
    assert found == ["logs", *(f"logs_{number}" for number in range(2, 2 + more)), "log", "json"]


@pytest.mark.usefixtures("programs")
def test_help_into_a_pipe_that_closes_is_silent() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "invoke", "plan", "--help"],
        cwd=ROOT,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert done.stderr == ""


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["plan"], "--hosts: no hosts named — wanted a hosts file or a node set. Try: --hosts=hosts/local.txt"),
        (["plan", "--forks=many"], "--forks: not a number it can be — found many, wanted a whole number from 1"),
        (["status", "--forks=0"], "--forks: not a number it can be — found 0, wanted a whole number from 1"),
        (["plan", "--on-busy-host=maybe"], "--on-busy-host: unknown value — found maybe, wanted leave or use"),
        (
            ["verify", "--prefix=here"],
            "--prefix: not a usable prefix — found here, wanted an absolute path of letters, digits and . _ / + -",
        ),
        (
            ["test", "--start-timeout=soon"],
            "--start-timeout: not a number it can be — found soon, wanted a whole number from 1",
        ),
        (["test", "--args='"], "--args: a quotation mark is not closed — found '"),
        (["test", "--kind=outernode"], f"--kind: no such test — found outernode, wanted {', '.join(KINDS)}"),
        (
            ["plan", "--lock=~no one/x"],
            "~no one/x: the lock cannot be read: No such file or directory. Try: --lock=FILE",
        ),
        (["lab", "sideways"], "lab: no such action — found sideways, wanted up, down or status"),
        (
            ["bootstrap", "--dry"],
            "invoke bootstrap: --dry is a flag of Invoke itself, not of this verb. Try: did you mean --dry-run?",
        ),
        (["plan", "--hots=x"], "invoke plan: no such flag — found --hots. Try: did you mean --hosts?"),
        (["results"], "invoke results: an argument is missing — wanted LOGS. Try: invoke results --help"),
        (["remove", "--limit=", "--yes"], "--limit: is empty — wanted a node set"),
        (["facts", "--mirror=/x"], "invoke facts: --mirror means nothing to this verb. Try: invoke facts --help"),
        (["plan", "--yes"], "invoke plan: --yes means nothing to this verb. Try: invoke plan --help"),
        (
            ["lock", "gdrcopy"],
            (
                "invoke lock: a word that is no flag, no argument and no verb — found gdrcopy. Try: invoke lock "
                "--update=gdrcopy"
            ),
        ),
        (
            ["remove", "v1"],
            "invoke remove: a word that is no flag, no argument and no verb — found v1. Try: invoke remove --stack=v1",
        ),
        (["test", "outernode"], f"--kind: no such test — found outernode, wanted {', '.join(KINDS)}"),
        (["rollback", "0x3"], "--to: not a number it can be — found 0x3, wanted a whole number from 1"),
        (
            ["plan", "/not/there.txt"],
            (
                "--hosts=/not/there.txt: not a hosts file — found nothing there, wanted a file, or a node set such as "
                "b200-[001-016]"
            ),
        ),
        (
            ["rollback", "3", "--to=4"],
            "invoke rollback: a word that is no flag, no argument and no verb — found 3. Try: invoke rollback --help",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_flags_are_one_line_or_one_document(argv: list[str], message: str, tmp_path: Path) -> None:
    done = run_verb(argv, tmp_path)
    assert (done.code, done.out, done.err) == (1, b"", f"{message}\n".encode())
    documented = run_verb([*argv, "--json"], tmp_path)
    document = json.loads(documented.out)
    assert (documented.err, document["verb"], document["exit"], len(document["errors"])) == (b"", argv[0], 1, 1)


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        (["--dry", "rollback", "--to=4", "--prefix=/nowhere"], "invoke rollback --dry-run"),
        (["-R", "bootstrap", "--hosts=hosts/local.txt", "--yes"], "invoke bootstrap --dry-run"),
        (["--dry", "lab", "status"], "invoke lab without it"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_dry_of_invoke_does_nothing(argv: list[str], remedy: str) -> None:
    done = invoke(*argv)
    message = f"invoke: --dry is Invoke's own and does nothing here, so nothing was done. Try: {remedy}\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", message)


VERBS = {
    verb.name: verb
    for verb in (
        Verb(
            "plan",
            valued=frozenset(("--hosts", "--mirror", "--args")),
            many=frozenset(("--mirror",)),
            switches=frozenset(("--json", "--yes")),
        ),
        Verb("diff", ("--old", "--new"), frozenset(("--old", "--new", "--bundle")), bare=frozenset(("--bundle",))),
    )
}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("plan --hosts=a --mirror=b --mirror c=d --json", ""),
        ("plan --hosts a diff 1 plan", ""),
        ("diff 1 --new=2 plan", ""),
        ("diff --bundle --old=1 2", ""),
        ("diff - 2 --bundle", ""),
        ("plan --args --unknown", ""),
        ("plan --args=", ""),
        ("plan -- --hots", ""),
        ("plan --hots --help", ""),
        ("--list --hots", ""),
        ("--echo plan", ""),
        ("--search-root /x plan --json", ""),
        (
            "--echo plan --dry",
            "invoke plan: --dry is a flag of Invoke itself, not of this verb. Try: invoke plan --help",
        ),
        ("plann", "invoke: no such verb — found plann. Try: invoke plan"),
        ("plan -e", "invoke plan: -e is a flag of Invoke itself, not of this verb. Try: invoke plan --help"),
        ("plan --ye", "invoke plan: no such flag — found --ye. Try: invoke plan --help"),
        ("plan --ho", "invoke plan: no such flag — found --ho. Try: did you mean --hosts?"),
        ("plan --json --hosts", "--hosts: has no value behind it — wanted a hosts file or a node set"),
        ("plan --hosts --json", "--hosts: has no value behind it — wanted a hosts file or a node set"),
        ("plan --hosts=a --hosts b", "--hosts: is given twice — wanted one value"),
        ("plan --json=yes", "--json: takes no value — found yes, wanted --json"),
        (
            "plan extra",
            "invoke plan: a word that is no flag, no argument and no verb — found extra. Try: invoke plan --help",
        ),
        ("diff 1", "invoke diff: an argument is missing — found 1, wanted OLD NEW. Try: invoke diff --help"),
        ("plan diff --old=1", "invoke diff: an argument is missing — wanted NEW. Try: invoke diff --help"),
    ],
)
def test_words_that_fit_no_verb_are_said_in_our_form(words: str, said: str) -> None:
    assert "\n".join(map(str, check(words.split(), VERBS))) == said


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("mirror", ["nonsense", "=", "https://example.invalid/=/not/there", "index:pypi=/not/there"])
def test_plan_refuses_a_bad_mirror_like_bootstrap(mirror: str, tmp_path: Path) -> None:
    ends = [
        run_verb([verb, "--hosts=hosts/local.txt", f"--mirror={mirror}", *more], tmp_path)
        for verb, more in (("plan", ()), ("bootstrap", ("--dry-run",)))
    ]
    assert ends[0].code == 1
    assert b"--mirror" in ends[0].err
    assert ends[0].err == ends[1].err


def test_a_verb_gets_its_own_flags_and_the_common_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def look(flags: Flags, *, check: bool, skip: str, **_: object) -> int:
        seen.append((flags.hosts, flags.mirror, flags.forks, flags.root, check, skip))
        return 0

    monkeypatch.setattr(app, "load", lambda name: look)
    made = app.task_of(declared("plan"), ["plan"])
    given = {name: parameter.default for name, parameter in signature(made.body).parameters.items() if name != "c"}
    assert Parameter.empty not in given.values()
    assert not {"yes", "dry_run"} & given.keys()
    made.body(None, **{**given, "hosts": "n[1-2]", "mirror": ["a=b"], "skip": "limits"})
    assert Flags.of(ROOT, {"lock": "~/x"}).lock == str(Path.home() / "x")
    assert seen == [("n[1-2]", ("a=b",), 64, ROOT, False, "limits")]


@pytest.mark.parametrize("text", ["", "-1", "1.5", "٣", "9999999999", "0", "x"])
def test_numbers_that_are_none(text: str) -> None:
    with pytest.raises(Trouble, match="--forks"):
        number("--forks", text)


# Signals and machines in trouble


def test_a_lost_terminal_interrupts_but_not_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    app.end_cleanly_on_signals()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    app.end_cleanly_on_signals()
    signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def raise_os_error(number: int, filename: str | None = None) -> int:
    raise OSError(number, os.strerror(number), filename) if filename else OSError(number, os.strerror(number))


def test_trouble_of_the_machine_is_trouble_and_no_bug(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded("plan", lambda: raise_os_error(errno.ENOSPC, "/somewhere")) == TROUBLE
    assert capsys.readouterr().err == "/somewhere: cannot be used: No space left on device\n"


@pytest.mark.usefixtures("programs")
def test_a_terminal_that_closes_is_an_interrupt() -> None:
    code = (
        "import sys; from tests_body import body; from deepep_bootstrap.core.guard import guarded; "
        "sys.exit(guarded('plan', body))"
    )
    body = (
        "def body():\n    try:\n        raise KeyboardInterrupt\n    finally:\n        raise OSError(5, "
        "'Input/output error')\n"
    )
    done = run_python(code, body)
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", "")


@pytest.mark.usefixtures("programs")
def test_a_bug_is_told_even_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    code = (
        "import sys; from tests_body import body; from deepep_bootstrap.core.guard import guarded; "
        "sys.exit(guarded('plan', body))"
    )
    done = run_python(
        code, "def body():\n    return 1 // 0\n", XDG_STATE_HOME=str(tmp_path / "file"), TMPDIR=str(tmp_path)
    )
    assert done.returncode == BUG
    assert "Traceback" not in done.stderr
    log = Path(done.stderr.split("details in ")[1].split(". Try")[0])
    assert "ZeroDivisionError" in log.read_text()


def run_python(code: str, body: str, **env: str) -> subprocess.CompletedProcess[str]:
    module = (
        f"module = types.ModuleType('tests_body')\nexec({body!r}, module.__dict__)\nsys.modules['tests_body'] = module"
    )
    script = f"import sys, types\n{module}\n{code}"
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


def test_logs_that_cannot_be_written_stop_a_run_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(Trouble, match=r"logs cannot be written there — found Not a directory\. Try: XDG_STATE_HOME="):
        RunLogs.start("bootstrap")


@pytest.mark.usefixtures("programs")
def test_output_to_a_full_disk_is_one_message() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "invoke", "lab", "--help"],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "output: cannot be used: No space left on device\n")


@pytest.mark.usefixtures("programs")
def test_characters_a_terminal_cannot_show_are_escaped() -> None:
    done = invoke("plan", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 1
    assert done.stderr.startswith("--hosts: no hosts named \\u2014 wanted")


@pytest.mark.usefixtures("programs")
def test_verbs_that_can_do_with_files_load_no_library_of_ssh() -> None:
    """It takes as long as all the rest of their start."""
    verbs = ("diagnose", "results", "report", "lock", "image", "manifests")
    code = (
        f"from deepep_bootstrap.cli import app; import sys; [app.load(each) for each in {verbs}]; print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {"paramiko", "fabric"} & {*loaded.split()} == set()
