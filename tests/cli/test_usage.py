"""Help: every verb has one, with its own flags alone, in sections, with examples that work; and the list of verbs."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from inspect import Parameter, signature

import pytest
from msgspec.structs import fields

import tasks
from deepep_bootstrap.cli import app, usage, verbs
from deepep_bootstrap.cli.verbs import GROUPS, HELP, SECTIONS, VERBS, declared, module_of
from deepep_bootstrap.core import program
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.prefix import test_kinds
from tests.support.paths import ROOT


@pytest.mark.usefixtures("programs")
def test_every_verb_says_its_flags_in_sections_with_two_examples() -> None:
    """All verbs in one process each would take a minute; `--help` behind the first one is told alike for all."""
    code = (
        "import sys, tasks\n"
        "from deepep_bootstrap.cli import app, verbs\n"
        "for name in verbs.VERBS:\n"
        "    for words in ([name, '--help'], [name, '-h'], ['--help', name], [name, 'x', '--json', '--help']):\n"
        "        sys.argv = ['invoke', *words]\n"
        "        try:\n"
        "            app.look_at_words(app.namespace())\n"
        "        except app.Exit as end:\n"
        "            print('ended', name, end.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in VERBS:
        assert done.stdout.count(f"ended {name} 0\n") == 4
        helps = re.findall(rf"^usage: invoke {name}(?: [^\n]*)?\n(.*?)^ended", done.stdout, re.MULTILINE | re.DOTALL)
        assert len(helps) == 4
        assert len(set(helps)) == 1
        flags = set(re.findall(r"^  (--[a-z-]+)", helps[0], re.MULTILINE))
        assert flags == {each.flag for each in declared(name).parameters if not each.is_argument}
        assert len(re.findall(rf"^  invoke {name} ?.*", helps[0], re.MULTILINE)) == 2
        (page,) = re.findall(r"^More: (.*)", helps[0], re.MULTILINE)
        assert (ROOT / page).is_file()
        assert max(map(len, helps[0].splitlines())) <= 100


@pytest.mark.parametrize("name", VERBS)
def test_examples_are_words_that_fit(name: str) -> None:
    for example in VERBS[name].examples:
        words = shlex.split(example)
        assert words[0] == name
        made = {each: app.verb_of(app.task_of(declared(each), words)) for each in VERBS}
        assert app.check(words, made) == (), example


@pytest.mark.parametrize("name", VERBS)
def test_declarations_are_read_as_python_would(name: str) -> None:
    module = importlib.import_module(f"deepep_bootstrap.cli.commands.{module_of(name)}")
    found = [each for each in signature(getattr(module, module_of(name))).parameters.values() if each.name != "flags"]
    own = [(each.name, None if each.is_argument else each.default) for each in declared(name).own]
    assert own == [(each.name, None if each.default is Parameter.empty else each.default) for each in found]


def test_common_flags_are_those_that_verbs_read() -> None:
    known = {each.name: each.default for each in fields(Flags) if each.name != "root"}
    used = {name for verb in VERBS.values() for name in verb.common}
    assert used == known.keys()
    assert {name for name in used if isinstance(known[name], bool)} == verbs.SWITCHES
    assert {
        name: str(value) for name, value in known.items() if value and not isinstance(value, bool)
    } == verbs.DEFAULTS


def test_every_flag_has_a_help_text() -> None:
    flags = {each.name for name in VERBS for each in declared(name).parameters}
    assert flags <= HELP.keys()
    assert {name.partition(".")[0] for name in HELP if "." in name} <= VERBS.keys()
    placed = [name for names in SECTIONS.values() for name in names]
    assert len(placed) == len(set(placed))


def test_constants_that_spare_an_import_are_right() -> None:
    assert tuple(test_kinds.KINDS) == verbs.KINDS
    assert {*program.VERBS} == {*VERBS, "VERB"}
    assert {*tasks.namespace.tasks} == VERBS.keys()


def test_the_list_has_every_verb_in_its_group() -> None:
    text = usage.listing(100)
    assert [line for line in text.splitlines() if line.endswith(":")] == [f"{group}:" for group in GROUPS]
    for verb in VERBS.values():
        assert f"\n  {verb.name} " in text
    assert max(map(len, usage.listing(60).splitlines()[2:-1])) <= 60


def test_commands_are_told_as_the_program_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Try: invoke plan --hosts=x, or `invoke --list`; the kernel could not invoke planes"
    assert program.as_called(text) == text
    monkeypatch.setattr(sys, "argv", ["/opt/bin/deepep-bootstrap", "plan"])
    assert program.as_called(text) == (
        "Try: deepep-bootstrap plan --hosts=x, or `deepep-bootstrap --list`; the kernel could not invoke planes"
    )
    assert usage.usage(declared("rollback"), 80).startswith("usage: deepep-bootstrap rollback [TO] [flags]")


@pytest.mark.parametrize(
    ("words", "argument"),
    [
        ("test internode", "kind"),
        ("test --hosts h internode", "kind"),
        ("test --kind=internode", ""),
        ("rollback 3", "to"),
        ("plan hosts/b200.txt", "hosts"),
        ("bootstrap hosts/b200.txt --yes", "hosts"),
        ("plan status", ""),
        ("plan --hosts=x diff 1 2", ""),
        ("export deepep.tar", "out"),
        ("gc 3", ""),
    ],
)
def test_the_natural_word_needs_no_flag(words: str, argument: str) -> None:
    given = words.split()
    found = [each.name for each in app.as_written(declared(given[0]), given) if each.is_argument]
    assert found == [argument][: bool(argument)]
