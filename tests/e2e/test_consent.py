"""Nobody is hurt by surprise: what is changed was agreed to, and a second prefix leaves the users of the first alone."""

from __future__ import annotations

import dataclasses
import os
import re

import pytest

from tests.e2e.test_terminal import untouched
from tests.support.e2e import Engine
from tests.support.paths import ROOT
from tests.support.terminal import Terminal

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]
pytestmark = pytest.mark.e2e

GOLDEN = ROOT / "tests/golden/consent"
HOSTS = ("n001", "n002", "login1")


def script(engine: Engine, verb: str, *flags: str) -> tuple[int, str, str]:
    """Run a verb as a script that gives no consent; return exit code, stdout and stderr."""
    ended = dataclasses.replace(engine, consents=False).run(verb, *flags)
    return ended.code, ended.out, ended.err


def other(engine: Engine) -> Engine:
    """The same hosts with another prefix, whose entries are built already."""
    found = dataclasses.replace(engine, prefix="/shared/other")
    found.use_built()
    return found


def skipping(engine: Engine) -> Engine:
    """The program without the --skip that tests give otherwise, for one of their own."""
    return dataclasses.replace(engine, smoke=True)


def loads(engine: Engine, host: str, using: str = "") -> str:
    """What `module load deepep` gives in a login shell, "" for nothing: the prefix of deep_ep."""
    use = f"module use {using}/modulefiles && " if using else ""
    command = f"{use}module load deepep && python3 -c 'import deep_ep; print(deep_ep.__file__)'"
    done = engine.lab.ssh(host, f'bash -lc "{command}"')
    return done.stdout.partition("/store/")[0] if done.returncode == 0 else ""


def test_without_consent_the_plan_is_shown_and_nothing_is_done(engine: Engine) -> None:
    code, plan, refused = script(engine, "bootstrap")
    assert code == 1
    assert "Plan: " in plan
    assert refused == (
        "bootstrap: not confirmed, nothing was changed — found no terminal to ask on, wanted --yes. Try: the same "
        "command with --yes\n"
    )
    assert untouched(engine)
    document = dataclasses.replace(engine, consents=False).json("bootstrap")
    assert document["exit"] == 1
    assert {step["kind"] for step in document["steps"]} >= {"build", "offer", "module-hook"}
    assert [each["found"] for each in document["errors"]] == ["--json, which asks nothing"]
    assert untouched(engine)


def test_skip_all_leaves_the_hosts_alone(engine: Engine) -> None:
    engine.use_built()
    ended = skipping(engine).run("bootstrap", "--skip=all")
    assert ended.code == 0, ended.text
    assert f"no MODULEPATH hook: `module use {engine.prefix}/modulefiles` before `module load`" in ended.out
    for host in HOSTS:
        assert not (engine.lab.disk(host) / "etc/profile.d").exists()
        assert not (engine.lab.disk(host) / "etc/security").exists()
    assert loads(engine, "login1") == ""
    assert loads(engine, "login1", engine.prefix) == engine.prefix


def test_a_second_prefix_leaves_the_users_of_the_first_alone(engine: Engine) -> None:
    engine.use_built()
    first, second = engine, other(engine)
    assert first.run("bootstrap").code == 0
    assert loads(first, "login1") == first.prefix

    # A script without the flag for it changes nothing; the message names both ways on.
    code, _, refused = script(second, "bootstrap", "--yes")
    assert (code, refused) == (1, (GOLDEN / "take-over.txt").read_text(encoding="utf-8"))
    assert not (second.on_disk / "current").exists()

    # Left alone, the second one is there for those who ask for it, and leaves without a trace.
    assert skipping(second).run("bootstrap", "--skip=smoke,module-hook").code == 0
    assert (loads(first, "n002"), loads(first, "n002", second.prefix)) == (first.prefix, second.prefix)
    gone = second.run("remove", "--yes")
    assert gone.code == 0, gone.text
    assert screen(gone.out) == golden("remove-left.txt", screen(gone.out))
    assert [loads(first, host) for host in HOSTS] == [first.prefix] * 3
    assert (first.lab.disk("n001") / "etc/security/limits.d/deepep.conf").exists()

    # A person is asked apart; Enter leaves it, and the rest is done.
    terminal = Terminal(second, "bootstrap", columns=200)
    terminal.expect(r"Go on\? \[y/N\] ")
    terminal.child.send("y\r")
    terminal.expect(r"`module load deepep` now gives /shared/deepep. Make it /shared/other for all users of 3 hosts\? ")
    terminal.child.send("\r")
    assert terminal.end() == 0, terminal.text
    assert (loads(first, "login1"), loads(first, "login1", second.prefix)) == (first.prefix, second.prefix)

    # Taken over, the hook goes back when the second one leaves.
    taken = second.run("bootstrap", "--take-over")
    assert taken.code == 0, taken.text
    assert [loads(first, host) for host in HOSTS] == [second.prefix] * 3
    gone = second.run("remove", "--yes")
    assert gone.code == 0, gone.text
    assert screen(gone.out) == golden("remove-back.txt", screen(gone.out))
    assert [loads(first, host) for host in HOSTS] == [first.prefix] * 3
    assert first.run("plan", "--check").code == 0


def golden(name: str, said: str) -> str:
    if os.environ.get("UPDATE_GOLDEN"):
        (GOLDEN / name).write_text(said, encoding="utf-8")
    return (GOLDEN / name).read_text(encoding="utf-8")


def screen(text: str) -> str:
    """A screen with times and commits that differ from run to run left out."""
    text = re.sub(r"\d+(\.\d+)? s\b|\d+ min \d\d s", "N s", text)
    return re.sub(r"deepep/[\d.]+-[0-9a-f]{7}-", "deepep/VERSION-", text)
