"""Whatever a host, a log, a lock, a hosts file or a file's name says: nothing that a terminal would obey is written by
any verb, with a terminal and without."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepep_bootstrap.cli.app import Verb
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.core.text import plain
from deepep_bootstrap.plan.screen import plan_table, show_plan
from deepep_bootstrap.plan.steps import Plan, Reason, Step
from tests.support.paths import ROOT, TESTS
from tests.support.verbs import Said, discovered, run_verb

pytestmark = pytest.mark.usefixtures("programs")

VERBS = discovered()
EVIL = (
    "EVIL\x1b]0;EVILTITLE\x07\x1b[2J\x1b[35;5m\x1bc\x1b[?1049h\x9b2J\x9d0;x\x9c\x08\x7f\r\x0b"
    "\u202eEVIL\u202c\u2066\u2069\u200f\u200e\u061c"
)
"""A title, cleared screens, colours, another screen, C1 in one character, and everything that turns the direction."""

OF_RICH = re.compile(r"\x1b\[(?!35;5m)[0-9;]*m|\x1b\[\?25[hl]|\x1b\[[0-9]*A|\x1b\[2K|\r")
"""What rich draws colours and its live table with, and what a terminal makes of a newline."""

FORBIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")

FACTS = TESTS / "cases" / "inventory" / "facts" / "parse" / "roce-b200.txt"


@dataclass(frozen=True)
class World:
    """What is hostile in a run: the words behind each verb, and the folder in front of PATH with the host's bash."""

    path: Path
    words: Callable[[Verb], list[str]]


def hostile_shell(folder: Path, facts: str, out: str, err: str, code: int) -> Path:
    """Return a folder with a bash that runs nothing: it answers the script that asks for facts with `facts`, and all
    others with `out`, `err` and `code`. Nor does anything become root by sudo."""
    folder.mkdir()
    (folder / "facts").write_bytes(facts.encode())
    (folder / "out").write_bytes(out.encode())
    (folder / "err").write_bytes(err.encode())
    for name, text in {
        "bash": f"""\
names=$(sed -n 's/^data recipe //p' "$1")
if grep -q "put facts 1" "$1"; then
  cat {folder}/facts
elif [ -n "$names" ]; then
  for name in $names; do
    printf 'recipe=%s\\nfound=' "$name"; cat {folder}/err
    printf '\\nwanted='; cat {folder}/err
    printf '\\nstate=todo\\ncode=0\\n'
  done
else
  cat {folder}/out
fi
cat {folder}/err >&2
exit {code}""",
        "sudo": f"cat {folder}/err >&2; exit 1",
    }.items():
        file = folder / name
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)
    return folder


def files(folder: Path) -> dict[str, Path]:
    """Return hostile files below a folder whose name is hostile too."""
    made = folder / EVIL.replace("/", "")
    made.mkdir()
    run = made / "run"
    shutil.copytree(TESTS / "cases" / "report" / "runs" / "failed", run)
    for file in filter(Path.is_file, run.rglob("*")):
        text = file.read_text()
        file.write_text("".join(f"{line}{EVIL}\n" for line in text.splitlines()))
    texts = {
        "hosts": f"defaults prefix={folder}/prefix {EVIL}={EVIL}\nn{EVIL}001 user={EVIL}\nn002 connection={EVIL}\n",
        "good-hosts": f"# {EVIL.replace(chr(13), '')}\ndefaults prefix={folder}/prefix\nn001 connection=local\n",
        "lock": (ROOT / "deepep.lock.toml").read_text().replace('ref = "', f'ref = "{EVIL}'),
        "log": f"{EVIL}\n3: RuntimeError: Failed: CUDA error csrc/kernels/internode.cu:133 'named symbol not found' {EVIL}\n",
    }
    for name, text in texts.items():
        (made / name).write_bytes(text.encode())
    return {**{name: made / name for name in texts}, "run": run, "folder": made}


def behind(verb: Verb, given: dict[str, Path], **values: str) -> list[str]:
    """Return words for a verb: a hostile file for each argument and for each flag in `values` that it knows."""
    files = ("--logs", "--file", "--old", "--new")
    words = [verb.name, *(str(given["log"]) if each in files else EVIL for each in verb.arguments)]
    for name, value in values.items():
        if f"--{name}" in verb.flags:
            words.append(f"--{name}" if value == "yes" else f"--{name}={value}")
    return words


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    folder = tmp_path_factory.mktemp("hostile")
    there = files(folder)
    facts = "".join(
        f"{line}{EVIL}\n" if line.startswith(("os_name", "cpu_model", "nvidia_param", "hostname")) else f"{line}\n"
        for line in FACTS.read_text().splitlines()
    )
    raw = FACTS.read_text()
    lines = f"state={EVIL}\n{EVIL}={EVIL}\n{EVIL}\n" * 9
    shells = {
        "facts": hostile_shell(folder / "facts", facts, lines, EVIL, 0),
        "answers": hostile_shell(folder / "answers", raw, lines, f"{EVIL}\n", 0),
        "fails": hostile_shell(folder / "fails", raw, lines, f"error: {EVIL}\n", 7),
        "early": hostile_shell(folder / "early", lines, lines, f"{EVIL}\n", 3),
    }
    good = {"hosts": str(there["good-hosts"]), "yes": "yes", "reboot": "never", "on-busy-host": "use"}
    return {
        **{name: World(path, lambda verb: behind(verb, there, **good)) for name, path in shells.items()},
        "hosts file": World(shells["early"], lambda verb: behind(verb, there, hosts=str(there["hosts"]))),
        "lock": World(shells["answers"], lambda verb: behind(verb, there, **{**good, "lock": str(there["lock"])})),
        "run": World(shells["early"], lambda verb: behind(verb, there, run=str(there["run"]), **good)),
    }


def found_in(said: Said, *, terminal: bool) -> list[str]:
    """Return what should not be in the bytes of a verb, with what stands around it."""
    wrong = []
    for data in (said.out, said.err):
        text = data.decode("utf-8", "backslashreplace")
        text = OF_RICH.sub("", text) if terminal else text
        wrong += [ascii(text[max(0, hit.start() - 30) : hit.end() + 20]) for hit in FORBIDDEN.finditer(text)]
    return wrong


def run_all(world: World, folder: Path, columns: int, verbs: Sequence[str] = tuple(VERBS)) -> dict[str, Said]:
    env = {
        "PATH": f"{world.path}:/usr/bin:/bin",
        "XDG_STATE_HOME": str(folder / "state"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        # Nothing is fetched, whatever goes on.
        **dict.fromkeys(("http_proxy", "https_proxy", "PIP_INDEX_URL"), "http://127.0.0.1:9"),
        "PIP_RETRIES": "0",
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_FIND_LINKS": "",
    }
    # A verb that fills a folder gets a mirror that is not there.
    no_mirror = {"DEEPEP_MIRRORS": f"/nowhere/{EVIL}"}
    return {
        name: run_verb(
            world.words(VERBS[name]),
            folder,
            env=env | (no_mirror if "--directory" in VERBS[name].arguments else {}),
            columns=columns,
        )
        for name in verbs
    }


def test_the_verbs_are_found() -> None:
    assert {"bootstrap", "plan", "diagnose", "import", "lab"} <= VERBS.keys()
    assert len(VERBS) >= 20


@pytest.mark.parametrize("columns", [0, 200], ids=["pipe", "terminal"])
@pytest.mark.parametrize("name", ["facts", "answers", "fails", "early", "hosts file", "lock", "run"])
def test_no_verb_lets_a_terminal_obey(name: str, columns: int, worlds: dict[str, World], tmp_path: Path) -> None:
    said = run_all(worlds[name], tmp_path, columns)
    wrong = {verb: found_in(each, terminal=bool(columns))[:3] for verb, each in said.items()}
    assert {verb: found for verb, found in wrong.items() if found} == {}
    for verb, each in said.items():
        assert b"Traceback" not in each.out + each.err, (verb, each)
        assert each.code != 3, (verb, each)
    # What was hostile is read, and shown as what it is.
    shown = [verb for verb, each in said.items() if b"EVIL" in each.out + each.err]
    assert len(shown) > len(VERBS) // 3, shown


@pytest.mark.sample
def test_the_plan_that_is_to_be_confirmed_has_no_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    step = Step("host", "limits", f"limits {EVIL}", ("n001",), Reason(EVIL, EVIL))
    published = Step("offer", "offer", "publish", ("n001",), Reason(EVIL, EVIL), sentence=EVIL, changes=(EVIL,))
    screen = Screen("plan")
    screen.show(plan_table([step, published]))
    screen.show(plan_table([step, published], beside=True))
    show_plan(screen, Plan((step, published), None, (f"note {EVIL}",)))
    out = capsys.readouterr().out
    assert out.count("EVIL") >= 16
    assert not FORBIDDEN.search(out)


@pytest.mark.sample
@given(st.text())
def test_no_text_has_a_character_left_that_a_terminal_obeys(text: str) -> None:
    assert not FORBIDDEN.search(plain(text))
    assert plain(plain(text)) == plain(text)
