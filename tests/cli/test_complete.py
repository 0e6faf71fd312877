"""Completion: what may come next on a command line, in a tenth of a second, and as bash, zsh and fish show it."""

from __future__ import annotations

import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

from deepep_bootstrap.cli.complete import candidates
from deepep_bootstrap.cli.verbs import KINDS, VERBS
from deepep_bootstrap.inventory import seen
from tests.support.paths import ROOT

HEAVY = ("invoke", "fabric", "paramiko", "rich", "tomlkit", "ClusterShell", "jinja2", "deepep_bootstrap.remote")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a hosts file whose prefix this machine does not see, and what was last seen of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.txt").write_text("defaults prefix=/not/here\nb200-[001-003,007] user=root\nlogin1 role=login\n")
    seen.keep(seen.GENERATIONS, "/not/here", ("9", "10", "$(id)"))
    seen.keep(seen.RUNS, "/not/here", ("20261122T0102-internode",), add=True)
    seen.keep(seen.RUNS, "/not/here/", ("20261123T0102-smoke",), add=True)
    return tmp_path


def words(*given: str) -> list[str]:
    return [word for word, _ in candidates(given)]


def test_verbs_come_first_then_flags() -> None:
    assert words("") == [*VERBS]
    assert words("ro") == ["rollback"]
    assert words("--v") == ["--version"]
    assert words("rollback", "--t") == ["--to="]
    assert words("rollback", "--to=3", "--t") == []
    assert "--mirror=" not in words("rollback", "-")
    assert dict(candidates(("plan", "--ch"))) == {"--check": "exit 2 when there is something to do"}


def test_values_that_are_known() -> None:
    assert words("test", "") == [*KINDS]
    assert words("test", "--kind=in") == ["--kind=internode", "--kind=intranode"]
    assert words("plan", "--via=") == ["--via=auto", "--via=slurm", "--via=ssh"]
    assert words("test", "--via=k") == words("facts", "--via=k") == ["--via=kubernetes"]
    assert words("test", "--kind", "sm") == ["smoke"]
    assert words("bootstrap", "--reboot=r") == ["--reboot=rolling", "--reboot=all"][:1]
    assert words("lab", "") == ["up", "down", "status"]
    assert words("completion", "z") == ["zsh"]
    assert words("plan", "--stack=v1-") == ["--stack=v1-wheel", "--stack=v1-cu13"]
    assert words("lock", "--update=g") == ["--update=gdrcopy"]
    assert words("plan", "--hosts=ho") == []  # files: the shell's own business


def test_values_of_a_site(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert words("plan", "hosts.txt", "--limit=b") == [f"--limit=b200-00{number}" for number in (1, 2, 3, 7)]
    monkeypatch.setenv("DEEPEP_HOSTS", "hosts.txt")
    assert words("status", "--limit", "l") == ["login1"]
    assert words("rollback", "") == ["10", "9"]
    assert words("diff", "1") == ["10"]
    assert words("report", "2026") == ["20261123T0102-smoke", "20261122T0102-internode"]
    (site / "prefix" / "generations" / "4").mkdir(parents=True)
    assert words("rollback", f"--prefix={site}/prefix", "--to=") == ["--to=4"]


def test_nothing_is_said_where_nothing_is_known() -> None:
    for given in (("plan", "--hosts="), ("nonsense", ""), ("plan", "--nonsense="), ("results", ""), ("plan", "\udc80")):
        assert words(*given) == []


@pytest.mark.usefixtures("programs")
def test_it_imports_nothing_heavy_and_takes_little() -> None:
    """Processor time counts, not the clock: other tests run beside this one. A warm start takes 0.08 s; 0.2 s are
    what a person does not notice."""
    program = Path(sys.executable).with_name("deepep-bootstrap")
    subprocess.run([program, "--complete", "test", ""], cwd=ROOT, check=True, capture_output=True)
    used = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([program, "--complete", "test", "--kind=in"], cwd=ROOT, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(used) < 0.2, used
    code = "import sys; sys.argv = ['x', '--complete', 'test', '']; from deepep_bootstrap.cli import program; program.main(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert [name for name in done.stdout.splitlines()[-1].split() if name.startswith(HEAVY)] == []


def environment(tmp_path: Path) -> dict[str, str]:
    folder = Path(sys.executable).parent
    return {**os.environ, "PATH": f"{folder}:/usr/bin:/bin", "HOME": str(tmp_path), "TERM": "dumb"}


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    ("line", "replies"),
    [
        ("deepep-bootstrap ro", ["rollback"]),
        ("deepep-bootstrap test --kind=in", ["internode", "intranode"]),
        ("deepep-bootstrap test ", [*KINDS]),
        ("deepep-bootstrap plan --hos", ["--hosts="]),
        ("deepep-bootstrap plan --hosts=ho", []),
    ],
)
def test_bash_completes(line: str, replies: list[str], tmp_path: Path) -> None:
    script = (
        "source <(deepep-bootstrap completion bash); complete -p deepep-bootstrap >&2; "
        f"COMP_LINE={shlex.quote(line)}; COMP_POINT=${{#COMP_LINE}}; _deepep_bootstrap; "
        "printf '%s\\n' ${COMPREPLY[@]+\"${COMPREPLY[@]}\"}"
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        cwd=ROOT,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == replies
    assert "-F _deepep_bootstrap deepep-bootstrap" in done.stderr


@pytest.mark.usefixtures("programs")
def test_fish_completes(tmp_path: Path) -> None:
    script = "deepep-bootstrap completion fish | source; complete -C 'deepep-bootstrap test --kind=in'; complete -C 'deepep-bootstrap ro'; complete -C 'deepep-bootstrap plan --hosts=hosts/h2'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", script],
        cwd=ROOT,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == [
        *("--kind=internode", "--kind=intranode", "rollback", "--hosts=hosts/h200.txt")
    ]


@pytest.mark.usefixtures("programs")
def test_zsh_completes(tmp_path: Path) -> None:
    child = pexpect.spawn(
        "zsh",
        ["-f", "-i"],
        cwd=str(ROOT),
        env=environment(tmp_path),
        encoding="utf-8",
        timeout=300,
        dimensions=(50, 200),
    )
    child.sendline(
        "PS1='ready> '; autoload -Uz compinit; compinit -u -D; source <(deepep-bootstrap completion zsh); echo lo''aded"
    )
    child.expect("loaded\r\n")
    child.send("echo deepep; deepep-bootstrap roll\t")
    child.expect(r"deepep-bootstrap rollback(\x1b\[[0-9;]*m)* ")
    child.send("--pref\t")
    child.expect("--prefix=")
    child.sendcontrol("u")
    child.send("deepep-bootstrap test --kind=inter\t")
    child.expect("--kind=internode")
    child.sendcontrol("u")
    child.sendline("exit")
    child.expect(pexpect.EOF)
