"""How often a test runs and with how many tokens: the table, and the program that does it on a node."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from deepep_bootstrap.analysis import site_references
from deepep_bootstrap.analysis.compare import judge
from deepep_bootstrap.analysis.reference_file import read_references
from deepep_bootstrap.analysis.results.model import LowLatency, Pass
from deepep_bootstrap.analysis.results.model import Tested as Found
from deepep_bootstrap.analysis.results.read import read_logs
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.inventory.facts import Facts, Gpu
from deepep_bootstrap.prefix import modulefiles, test_kinds
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.report.compose import keyed
from deepep_bootstrap.testing import ssh_run
from tests.support import modules as support

PROGRAM = support.REPOSITORY / "env" / "programs" / "passes.py"
ENV = support.templates()
TABLE = test_kinds.read_passes(ENV)
LINE = '[[pass]]\nkind = "low-latency"\ntokens = 128\ncalls = 8\nwhy = "x"\n'


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program as a module of its own folder, which has the name of ours."""
    monkeypatch.syspath_prepend(PROGRAM.parent)
    monkeypatch.delitem(sys.modules, "passes", raising=False)
    return importlib.import_module("passes")


# The table.


def test_a_fault_in_one_call_of_a_hundred_is_seen() -> None:
    first, second = (one for one in TABLE if one.kind == "low-latency")
    assert (first.tokens, first.checked, first.capability) == (128, 0, "")
    assert (second.tokens, second.capability) == (256, "10.0")
    assert 0.99**second.checked < 0.01 < 0.99 ** (second.checked - 2)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16, 72])
def test_the_time_limit_suffices(ranks: int) -> None:
    runs = sum(max(1, -(-one.checked // (one.calls * ranks))) for one in TABLE)
    assert runs * 30 < test_kinds.KINDS["low-latency"].minutes * 60


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LINE.replace("128", "0"), "is too small"),
        (LINE.replace("low-latency", "nothing"), "kind"),
        (LINE.replace("calls = 8\n", ""), "calls"),
        (LINE + 'capability = "10.0"\n', "the first pass of a kind is for all GPUs"),
        (LINE + 'capability = "new"\n', "a compute capability"),
        (LINE + "chekked = 4\n", "unknown key"),
        (LINE + "checked = 0\n", "is too small"),
    ],
)
def test_a_table_that_cannot_be_read(text: str, said: str) -> None:
    with pytest.raises(Trouble, match=said):
        test_kinds.load_passes(text, "env/rules/passes.toml")
    with pytest.raises(Trouble, match="missing"):
        test_kinds.read_passes({})


@pytest.mark.parametrize(
    ("archs", "options", "asks", "known"),
    [
        (("9.0",), ["128"], False, "export DEEPEP_TEST_CAPABILITY=9.0"),
        (("10.0", "10.3"), ["128", "256"], False, "export DEEPEP_TEST_CAPABILITY=10.3"),
        (("9.0", "10.0"), ["128", "256"], True, ""),
    ],
)
def test_the_file_of_a_stack_has_the_passes_of_its_gpus(
    archs: tuple[str, ...], options: list[str], asks: bool, known: str
) -> None:
    files = modulefiles.render_offer(support.offer("/p", support.record("/p", archs=archs)), ENV)
    text = files["sbatch/low-latency-test.sbatch"].content.decode()
    assert [word.split("=")[1].split(":")[0] for word in text.split() if word.startswith("--pass=")] == options
    assert (text.count("ask_gpus"), known in text) == (4 if asks else 0, True)
    other = files["sbatch/intranode-test.sbatch"].content.decode()
    assert "passes.py" not in other
    assert "CAPABILITY" not in other


def test_hosts_go_by_the_newest_gpu_among_them() -> None:
    def facts(*values: str) -> Facts:
        return Facts(gpus=tuple(Gpu(index, "x", 1, value, "580", "", "", 0, 0) for index, value in enumerate(values)))

    hosts = (Host("a"), Host("b"))
    assert ssh_run.capability(hosts, {"a": facts("9.0", "[N/A]"), "b": facts("10.0")}) == "10.0"
    assert ssh_run.capability(hosts, {"a": facts(), "b": facts("")}) == ""


# The program.


@pytest.mark.parametrize(
    ("gpus", "ranks", "runs"),
    [
        ("9.0", 8, {128: 1}),
        ("", 8, {128: 1}),
        ("10.0", 8, {128: 1, 256: 8}),
        ("12.0", 2, {128: 1, 256: 29}),
        ("10.3", 16, {128: 1, 256: 4}),
    ],
)
def test_passes_follow_gpus_and_ranks(gpus: str, ranks: int, runs: dict[int, int], program: ModuleType) -> None:
    table = [program.parse_pass(one.option.removeprefix("--pass=")) for one in TABLE]
    found = list(program.plan(table, ranks, program.capability(gpus)))
    assert {tokens: sum(one.tokens == tokens for one in found) for tokens in runs} == runs
    assert sum(one.calls for one in found if one.tokens == 256) >= (460 if 256 in runs else 0)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("", (0, 8, False)),
        ("--num-processes 4 --num-experts 8 --hidden=7168", (0, 4, False)),
        ("--num-processes=2 --disable-nvlink", (0, 2, False)),
        ("--num-tokens 600", (600, 8, True)),
        ("--num-tok=64 --num-p 2", (64, 2, True)),
        ("--pressure-test", (0, 8, True)),
        ("--shrink-test", (0, 8, True)),
        ("--num-tokens", (0, 8, True)),
        ("--help", (0, 8, True)),
    ],
)
def test_what_the_users_arguments_mean(words: str, wanted: tuple[int, int, bool], program: ModuleType) -> None:
    assert program.read_arguments(words.split()) == wanted


@pytest.mark.parametrize(
    ("tokens", "own", "wanted"),
    [
        (128, "", ""),
        (256, "", ""),
        (511, "", ""),
        (512, "", "2048"),
        (600, "", "2048"),
        (600, "4096", ""),
        (600, "512", "2048"),
        (256, "256", "1024"),
        (256, "x", ""),
        (1023, "", "2048"),
        (1024, "", "4096"),
    ],
)
def test_the_queue_is_long_enough(tokens: int, own: str, wanted: str, program: ModuleType) -> None:
    found = program.queue_depth(tokens, {"NVSHMEM_QP_DEPTH": own} if own else {})
    assert found == ({"NVSHMEM_QP_DEPTH": wanted} if wanted else {})


@pytest.mark.usefixtures("programs")
def test_runs_meet_at_different_ports(program: ModuleType) -> None:
    there = {"MASTER_PORT": "32760", "WORLD_SIZE": "2"}
    ports = [int(program.meeting_port(index, there).get("MASTER_PORT", 32760)) for index in range(40)]
    assert len(set(ports)) == 40
    assert all(20000 <= port <= 32767 for port in ports)
    assert program.meeting_port(1, {"MASTER_PORT": "40000", "WORLD_SIZE": "2"}) == {"MASTER_PORT": "40001"}
    assert program.meeting_port(1, {"MASTER_PORT": "40000"})["MASTER_PORT"] != "40000"
    assert program.meeting_port(3, {}) == {}


SCRIPT = """
import json, os, sys
names = ("NVSHMEM_QP_DEPTH", "DEEPEP_TEST_RUN", "MASTER_PORT")
with open(os.environ["SEEN"], "a") as file:
    print(json.dumps([sys.argv[1:], {name: os.environ.get(name) for name in names}]), file=file)
print("script", *sys.argv[1:], flush=True)
if "wait" in sys.argv:
    import time
    time.sleep(60)
sys.exit(7 if os.environ.get("FAIL", "") == os.environ.get("DEEPEP_TEST_RUN", "none") else 0)
"""


def command(folder: Path, *words: str) -> list[str]:
    (folder / "script.py").write_text(SCRIPT)
    table = ("--pass=128:8:0:0", "--pass=600:8:46:10.0")
    return [
        sys.executable,
        str(PROGRAM),
        "--logs",
        str(folder / "logs"),
        *table,
        "--",
        str(folder / "script.py"),
        *words,
    ]


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "SEEN": str(folder / "seen"),
        "MASTER_PORT": "20007",
        "WORLD_SIZE": "2",
        "RANK": "1",
        **more,
    }


def run(folder: Path, *words: str, **more: str) -> tuple[int, list[str], list[tuple[list[str], dict[str, str | None]]]]:
    done = subprocess.run(
        command(folder, *words), env=environment(folder, **more), capture_output=True, text=True, check=False
    )
    seen = [json.loads(line) for line in (folder / "seen").read_text().splitlines()]
    return done.returncode, done.stdout.splitlines(), [(words, env) for words, env in seen]


@pytest.mark.usefixtures("programs")
def test_each_run_has_its_lines_and_variables(tmp_path: Path) -> None:
    code, lines, seen = run(tmp_path, "--num-processes", "1", DEEPEP_TEST_CAPABILITY="10.0")
    assert (code, len(seen)) == (0, 4)
    assert lines[:6] == [
        "deepep: pass 1 of 2 on node 1: 128 tokens, run 1 of 1, 16 combine calls to check",
        "script --num-processes 1 --num-tokens 128",
        "deepep: pass 1 of 2 on node 1: run 1 of 1 ended with exit code 0",
        "deepep: pass 2 of 2 on node 1: 600 tokens, run 1 of 3, 16 combine calls to check",
        "script --num-processes 1 --num-tokens 600",
        "deepep: pass 2 of 2 on node 1: run 1 of 3 ended with exit code 0",
    ]
    assert [env["NVSHMEM_QP_DEPTH"] for _, env in seen] == [None, "2048", "2048", "2048"]
    assert [env["MASTER_PORT"] for _, env in seen] == ["20007", "20008", "20009", "20010"]
    first, second = read_logs({"node-1-x.log": "\n".join([*lines, ""])})
    assert [(tested.test_pass, tested.ended) for tested in (first, second)] == [
        (Pass(1, 128, 1, 1, 16), False),
        (Pass(2, 600, 3, 3, 48), False),
    ]


@pytest.mark.usefixtures("programs")
def test_the_first_run_that_fails_is_the_last(tmp_path: Path) -> None:
    code, lines, seen = run(tmp_path, "--num-processes", "1", DEEPEP_TEST_CAPABILITY="10.0", FAIL="2")
    assert (code, len(seen)) == (7, 3)
    assert lines[-1] == "deepep: pass 2 of 2 on node 1: run 2 of 3 ended with exit code 7"


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    ("words", "depth"), [(("--num-tokens", "600"), "2048"), (("--num-tokens=64",), None), (("--shrink-test",), None)]
)
def test_what_the_user_asks_for_runs_once(words: tuple[str, ...], depth: str | None, tmp_path: Path) -> None:
    code, lines, seen = run(tmp_path, *words, DEEPEP_TEST_CAPABILITY="10.0")
    assert (code, lines) == (0, [f"script {' '.join(words)}"])
    assert seen[0][1] == {"NVSHMEM_QP_DEPTH": depth, "DEEPEP_TEST_RUN": None, "MASTER_PORT": "20007"}


@pytest.mark.usefixtures("programs")
def test_whoever_ends_it_ends_the_test(tmp_path: Path) -> None:
    process = subprocess.Popen(command(tmp_path, "wait"), env=environment(tmp_path), stdout=subprocess.PIPE, text=True)
    assert process.stdout
    while "script" not in process.stdout.readline():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    assert process.stdout.read() == "", "nothing runs any more that could write, and nothing more was started"


# What becomes of a later pass.


def test_only_the_first_pass_is_compared_and_kept() -> None:
    first, second = (
        Found(
            test="low-latency",
            generation="v1",
            ok=True,
            ended=True,
            config={"num_tokens": test_pass.tokens},
            low_latency=LowLatency(combine_us=us),
            test_pass=test_pass,
        )
        for us, test_pass in ((70.0, Pass(1, 128, 1, 1, 64)), (900.0, Pass(2, 256, 8, 8, 512)))
    )
    references = read_references(ENV)
    made = site_references.recorded(
        [first, second], "r", "2026-11-22", gpu="H200", fabric="nvlink", nodes=1, references=references
    )
    assert [(one.value, one.config["num_tokens"]) for one in made] == [(70.0, (128,))]
    verdicts = judge([first, second], gpu="H200", fabric="nvlink", nodes=1, references=references)
    assert [(each.test, each.state, each.wanted is None) for each in verdicts] == [
        ("low-latency", "ok", False),
        ("low-latency, 256 tokens", "none", True),
    ]
    assert keyed([first, second]) == {"low-latency low_latency.combine_us": 70.0}
