"""A person at a terminal: questions, live progress, ^C, a closed window; and hosts on which that person is not root."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.e2e import Engine, wait_until
from tests.support.terminal import Terminal

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]
pytestmark = pytest.mark.e2e

BUILDING = r"build nvshmem \S+ +0:\d\d [^\r\n]*nvcc|build nvshmem \S+ +0:0[2-9]"
SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def uncoloured(text: str) -> str:
    """Return what a terminal shows without colours and moves of the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def untouched(engine: Engine) -> bool:
    return not engine.on_disk.exists() and not (engine.lab.disk("n001") / "etc" / "profile.d").exists()


# The question


@pytest.mark.parametrize(
    ("keys", "code", "said"),
    [
        ("\r", 1, "bootstrap: not confirmed, nothing was changed"),
        ("n\r", 1, "bootstrap: not confirmed, nothing was changed"),
        ("what?\r", 1, "bootstrap: not confirmed, nothing was changed"),
        ("\x04", 1, "bootstrap: not confirmed, nothing was changed"),
        ("\x03", 130, "bootstrap: interrupted. Try: the same command again"),
    ],
    ids=["enter", "no", "neither", "end of file", "ctrl-c"],
)
def test_only_a_yes_begins(engine: Engine, keys: str, code: int, said: str) -> None:
    terminal = Terminal(engine, "bootstrap")
    terminal.expect(r"Go on\? \[y/N\] ")
    assert "Plan: 4 builds, 1 new generation" in terminal.text, "the plan stands above the question"
    terminal.child.send(keys)
    assert terminal.end() == code
    assert said in terminal.text
    assert untouched(engine)


def test_a_person_says_yes_watches_a_build_and_reads_the_summary(engine: Engine) -> None:
    engine.use_built(without="nvshmem|deepep")
    engine.slow_nvcc(1)
    terminal = Terminal(engine, "bootstrap", columns=80)
    terminal.expect(r"Go on\? \[y/N\] ")
    terminal.child.send("y\r")
    terminal.expect(BUILDING)
    assert terminal.end() == 0, terminal.text
    live, _, summary = terminal.text.rpartition(SHOW_CURSOR)
    assert HIDE_CURSOR in live
    # What the live table drew is gone; the summary has colours and nothing that moves the cursor but one clearing of
    # the spinner.
    assert re.findall(r"\x1b\[[0-9;?]*([A-Za-ln-z])", summary) in (["A", "K"], [])
    plain = uncoloured(summary)
    assert "done build nvshmem" not in plain, "what was told when it ended is not told again"
    told = re.findall(r"done build nvshmem \S+ on n001 \([^)]*\) — installed into the store", uncoloured(live))
    assert len(told) == 1, told
    assert re.search(r"^Finished after \d.*: \d+ done", plain, re.MULTILINE)
    assert "Next:\r\n    ssh login1\r\n    module load deepep\r\n" in plain
    assert max(len(line) for line in plain.splitlines() if line.startswith("Finished")) <= 80


def test_a_host_that_dies_while_somebody_reads_the_plan_costs_only_itself(engine: Engine) -> None:
    engine.use_built()
    terminal = Terminal(engine, "bootstrap", columns=180)
    terminal.expect(r"Go on\? \[y/N\] ")
    engine.lab.power_cut("n002")
    try:
        terminal.child.send("y\r")
        assert terminal.end() == 1, terminal.text
    finally:
        engine.lab.boot("n002")
    plain = uncoloured(terminal.text)
    assert re.search(r"^failed +prefix +\d\S* s +n002", plain, re.MULTILINE), plain
    assert re.search(r"done prefix on n001 .*one directory on .*n001", plain), plain
    assert re.search(r"done verify on ", plain), plain
    # The line is wrapped at the width of the terminal.
    assert "with failures on n002; once that is mended, the same command goes on from here" in " ".join(plain.split())
    assert engine.run("bootstrap").code == 0


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["lines", "json"])
def test_no_escape_codes_without_a_terminal(engine: Engine, flags: list[str]) -> None:
    ended = engine.run("plan", *flags)
    assert ended.code == 0
    assert "\x1b" not in ended.text


# Ends that nobody planned


def nothing_runs(engine: Engine) -> None:
    wait_until(
        lambda: not engine.processes(r"nvcc|cmake|ninja|salloc|publish"), "nothing of the run is left on the host"
    )
    wait_until(
        lambda: not engine.lab.ssh("n001", "ls -d /var/tmp/deepep-*/deepep-scratch-* 2>/dev/null; squeue -h").stdout,
        "scratch is gone",
    )


def test_ctrl_c_while_the_table_is_live_leaves_a_clean_screen(engine: Engine) -> None:
    engine.use_built(without="nvshmem|deepep")
    engine.slow_nvcc(30)
    terminal = Terminal(engine, "bootstrap", "--yes")
    terminal.expect(BUILDING)
    terminal.child.sendintr()
    assert terminal.end() == 130
    live, _, after = terminal.text.rpartition(SHOW_CURSOR)
    assert HIDE_CURSOR in live
    plain = uncoloured(terminal.text)
    assert plain.count("stopping …") == 1, "^C is answered at once"
    assert plain.index("stopping …") < plain.index("stopped build nvshmem")
    assert "failed" not in plain
    assert "full log" not in plain
    assert re.search(r"Interrupted after .*: .*stopped\. The same command goes on\.", " ".join(plain.split())), plain
    assert uncoloured(after).rstrip().endswith("goes on.")
    nothing_runs(engine)


def test_closing_the_window_ends_the_run_on_the_hosts_too(engine: Engine) -> None:
    engine.use_built(without="nvshmem|deepep")
    engine.slow_nvcc(30)
    terminal = Terminal(engine, "bootstrap", "--yes")
    terminal.expect(BUILDING)
    assert terminal.close_window() == 130
    nothing_runs(engine)


# Not root on the hosts


@pytest.fixture
def as_keeper(engine: Engine, tmp_path: Path) -> Engine:
    """The program with a hosts file whose connections are those of keeper, who has sudo; builder, who has not,
    builds."""
    text = engine.lab.hosts_file.read_text()
    changed, count = re.subn(r"^defaults .*$", r"\g<0> user=keeper build_user=builder", text, flags=re.MULTILINE)
    assert count == 1, text
    engine.hosts = tmp_path / "hosts.txt"
    engine.hosts.write_text(changed)
    return engine


def test_keeper_prepares_hosts_and_builder_builds(as_keeper: Engine) -> None:
    ended = as_keeper.run("bootstrap")
    assert ended.code == 0, ended.text
    owners = as_keeper.lab.ssh("n001", f"find {as_keeper.prefix} -printf '%u\\n' | sort -u").stdout.split()
    assert owners == ["builder"]
    hook = as_keeper.lab.ssh("n002", "stat -c %U /etc/profile.d/zz-deepep.sh").stdout.strip()
    assert hook == "root"
    again = as_keeper.run("plan", "--check")
    assert again.code == 0, again.text
    assert as_keeper.run("verify").code == 0


def test_a_prefix_below_a_folder_of_roots_is_made_for_the_builder(as_keeper: Engine) -> None:
    as_keeper.prefix = "/opt/site/deepep"
    ended = as_keeper.run("bootstrap", "--limit=n001")
    assert ended.code == 0, ended.text
    assert as_keeper.lab.ssh("n001", "find /opt/site/deepep -printf '%u\\n' | sort -u").stdout.split() == ["builder"]


@pytest.fixture
def with_password(as_keeper: Engine) -> Engine:
    """Sudo asks keeper for a password on every host."""
    for host in as_keeper.lab.hosts:
        changed = as_keeper.lab.nsenter(
            host, "echo keeper:open-sesame | chpasswd && echo 'keeper ALL=(ALL) ALL' >/etc/sudoers.d/lab"
        )
        assert changed.returncode == 0, changed.stderr
    return as_keeper


def test_the_password_of_sudo_is_asked_once_and_with_yes_nothing_else(with_password: Engine) -> None:
    with_password.use_built(without="deepep")
    given = with_password.lab.nsenter("n001", f"chown -R builder: {with_password.prefix}")
    assert given.returncode == 0, given.stderr
    terminal = Terminal(with_password, "bootstrap", "--yes", "--sudo-password-prompt", term="dumb")
    terminal.expect("sudo password on the hosts: ")
    terminal.child.send("open-sesame\r")
    assert terminal.end() == 0, terminal.text
    assert terminal.text.count("sudo password") == 1
    assert "Go on?" not in terminal.text
    assert "\x1b" not in terminal.text, "a dumb terminal gets plain lines"
    assert "login1,n[001-002] (3): verify …" in terminal.text
    assert "open-sesame" not in terminal.text
    logs = [path.read_text() for path in with_password.on_disk.rglob("logs/*/*/*.log")]
    assert logs
    assert not any("open-sesame" in text for text in logs)


def test_without_the_password_every_host_says_what_it_needs(with_password: Engine) -> None:
    ended = with_password.run("bootstrap")
    assert ended.code == 1
    assert "--sudo-password-prompt" in ended.text
    assert "exit code 1" not in ended.text
    no_terminal = with_password.run("bootstrap", "--sudo-password-prompt")
    assert no_terminal.code == 1
    assert no_terminal.err.startswith("--sudo-password-prompt: there is no terminal to ask on")


def test_a_wrong_password_is_said_and_nothing_hangs(with_password: Engine) -> None:
    terminal = Terminal(with_password, "bootstrap", "--yes", "--sudo-password-prompt")
    terminal.expect("sudo password on the hosts: ")
    terminal.child.send("guess\r")
    assert terminal.end() == 1
    assert re.search(r"password", terminal.text.partition("hosts: ")[2])
