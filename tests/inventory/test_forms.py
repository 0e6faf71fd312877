"""The trust boundary: every key that a recipe prints has a form, and no form lets through what an attacker would want."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.core.records import RecordForm, ValueForm, read_records
from deepep_bootstrap.core.text import HostText
from deepep_bootstrap.inventory import forms
from deepep_bootstrap.remote.jobs import Job
from tests.support.paths import ROOT

FORMS: dict[str, RecordForm] = {name: form for name, form in vars(forms).items() if isinstance(form, RecordForm)}

FIELDS: list[tuple[str, ValueForm]] = [
    (f"{name}.{key}.{index}", field)
    for name, form in FORMS.items()
    for key, fields in {**form.single, **form.many}.items()
    for index, field in enumerate(fields)
]

LONG = "a" * 70_000_000
"""Longer than anything that a host has to say: the longest is a manifest in base 64."""

NEVER = ("\x1b[2J", "a\x00b", "a\x07b", "a\u202eb", "a\rb", "\x9b31m")
"""What no checked value may hold: escape sequences, control characters, characters that turn text around."""

WORDS = (
    "-x",
    "--now",
    "-oDPkg::Pre-Invoke::=id",
    "a;id",
    "$(id)",
    "`id`",
    "a\nb",
    "a|b",
    "a&b",
    "a>b",
    "'a'",
    '"a"',
    "a\\b",
)
"""What would be an option or a command if it came into a command line."""

LINES = {
    "external_python",
    "nvidia_param",
    "nvidia_module",
    "slurm_reason",
    "route",
    "fabric_state",
    "hook",
    "prefix_path",
}
"""Keys of facts with a field that may be any line: it is read by a pattern, compared or shown."""

PRINTED = re.compile(
    r"(?:^|[;&|({`\]]|\bdo|\bthen|\belse)\s*(?:put|data|report) ([a-z][a-z_]*)(?= |$)"
    r'|\bprint "([a-z_]+)="|/([a-z_]+)=\\1/p',
    re.MULTILINE,
)
"""How recipes print a line: `put KEY`, `data KEY`, `report KEY`, awk's print, sed's replacement."""

NO_RECORDS = {"index": "prefix/probe-index.sh", "recipe": "", "code": ""}
"""Keys that are compared with a word and not read as records: of a look at an index, and of the frame of checks."""


def printed() -> Iterator[tuple[str, str]]:
    """Yield the recipe and the key of every line that recipes print."""
    for path in sorted((ROOT / "recipes").rglob("*.sh")):
        text = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
        for match in PRINTED.finditer(text):
            yield str(path.relative_to(ROOT / "recipes")), next(filter(None, match.groups()))


def test_every_key_that_a_recipe_prints_has_a_form() -> None:
    known = {key for form in FORMS.values() for key in (*form.single, *form.many)}
    keys = dict(printed())
    found = {key for _, key in printed()}
    assert len(found) > 120, "the pattern finds no lines any more"
    assert {"candidate", "gib", "slurmd_memlock", "reached", "deepep_entry", "visible", "scratch"} <= found
    assert found - known - NO_RECORDS.keys() == set(), keys


def test_every_form_belongs_to_a_key_that_a_recipe_prints() -> None:
    texts = "\n".join(path.read_text() for path in (ROOT / "recipes").rglob("*") if path.suffix in {".sh", ".py"})
    for name, form in FORMS.items():
        for key in (*form.single, *form.many):
            assert re.search(rf"\b{key}\b", texts), f"{name}: no recipe prints {key}"


def test_every_parser_reads_by_a_form_that_stands_here() -> None:
    made = re.compile(r"RecordForm\(")
    for path in (ROOT / "deepep_bootstrap").rglob("*.py"):
        if path.name not in {"forms.py", "records.py"}:
            assert not made.search(path.read_text()), f"{path.name} makes a form of its own"


@pytest.mark.parametrize(("place", "field"), FIELDS, ids=[place for place, _ in FIELDS])
def test_no_field_takes_what_an_attacker_would_send(place: str, field: ValueForm) -> None:
    if field.free:
        return
    for text in (*NEVER, LONG):
        assert not field.fits(text), f"{place} takes {text[:20]!r}"
    assert field.wanted
    if field is not forms.LINE and field is not forms.FILE and "GPU's name" not in field.wanted:
        taken = [text for text in WORDS if field.fits(text)]
        assert taken in ([], ["a\\b"]), f"{place} takes {taken}"  # a backslash stands before the account of a domain


def test_only_some_keys_of_facts_may_be_any_line() -> None:
    loose = {
        key
        for key, fields in {**forms.FACTS.single, **forms.FACTS.many}.items()
        if any(field is forms.LINE for field in fields)
    }
    assert loose == LINES | {"modules", "prefix_fs"}


def test_free_text_stands_last_and_in_one_field_of_a_line() -> None:
    for name, form in FORMS.items():
        for key, fields in {**form.single, **form.many}.items():
            assert not any(field.free for field in fields[:-1]), f"{name}: {key}"


@pytest.mark.parametrize(
    ("form", "line", "found", "wanted"),
    [
        (forms.FACTS, "gib=/home/mallory/gib/scripts/x.sh", "/home/mallory/gib/scripts/x.sh", forms.GIB),
        (forms.FACTS, "cpus=-1", "-1", "a whole number from 0 to 1000000"),
        (forms.FACTS, "cpus=9999999", "9999999", "a whole number from 0 to 1000000"),
        (forms.FACTS, "python=/home/mallory/python3.12\t3.12.3\t1", "/home/mallory", "a system's Python"),
        (forms.FACTS, "toolkit=/usr/local/../../tmp/x\t12.8\t1\t1\t", "/usr/local/../../tmp/x", "an absolute path"),
        (forms.FACTS, "slurm_node=n002 -oX\tIDLE\t\t", "n002 -oX", "a name"),
        (forms.FACTS, "kernel=6.1;id", "6.1;id", "a version"),
        (forms.FACTS, "mtu=eth0;id\t1500", "eth0;id", "a network interface"),
        (forms.CHECK, "candidate=nvidia-open-580=580.95.05-1 -oDPkg::Pre-Invoke::=id", "-oDPkg", "packages"),
        (forms.CHECK, "state=done", "done", "ok or todo or reboot or stuck or blocked"),
        (forms.SESSION, "scratch=/tmp/$(id)", "/tmp/$(id)", "an absolute path"),
        (forms.SESSION, "jobid=--name=victim", "--name=victim", "a job's number"),
        (forms.SWITCHED, "missing=../../etc", "../../etc", "the name of a store entry"),
    ],
)
def test_a_value_of_another_form_is_one_clear_problem_of_its_host(
    form: RecordForm, line: str, found: str, wanted: str
) -> None:
    with pytest.raises(Trouble) as caught:
        read_records(f"{line}\n{form.end}=1\n" if form.end else line, form, "n001", "some.sh")
    (problem,) = caught.value.problems
    assert problem.where == "n001"
    assert f"some.sh answers {line.partition('=')[0]} with what cannot be" in problem.what
    assert found in problem.found
    assert problem.wanted.startswith(wanted)


def test_free_text_cannot_be_had_as_a_value() -> None:
    records = read_records("state=todo\nnote=\x1b]0;title\x07look $(id)\n", forms.CHECK, "n001", "x.sh")
    with pytest.raises(TypeError, match="for showing alone"):
        records.text("note")
    note = records.shown("note")
    assert isinstance(note, HostText)
    assert str(note) == "look $(id)"


def test_a_hosts_text_is_no_word_and_no_variable_of_a_command() -> None:
    said = HostText("--now")
    for wrong in (
        lambda: Job("true", args=(said,)),  # type: ignore[arg-type]
        lambda: Job("true", env={"PACKAGES": said}),  # type: ignore[dict-item]
        lambda: Job(said),  # type: ignore[arg-type]
        lambda: Job("true", user=said),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match="no word and no variable of a command"):
            wrong()
    assert Job("true", args=("--now",), env={"A": "b"}).args == ("--now",)


@pytest.mark.usefixtures("programs")
def test_mypy_refuses_a_hosts_text_in_a_command(tmp_path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(
        "from deepep_bootstrap.core.text import HostText\n"
        "from deepep_bootstrap.plan.host_recipes import Check\n"
        "from deepep_bootstrap.remote.jobs import Job\n"
        "def wrong(check: Check, said: HostText) -> None:\n"
        "    Job('true', args=(said,))\n"
        "    Job('true', env={'A': said})\n"
        "    Job('true', args=(check.note,))\n"
        "    Job('true', env={'A': check.found})\n"
        "    Job('true', args=(str(check.candidate),))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(file)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = {int(match) for match in re.findall(r"wrong\.py:([0-9]+): error", done.stdout)}
    assert lines == {5, 6, 7, 8}, done.stdout + done.stderr
