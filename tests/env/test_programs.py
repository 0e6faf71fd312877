"""Programs that tests run on the nodes: rank logs with real processes, and the parts of the others that need no GPU."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepep_bootstrap.analysis.results import own_programs
from deepep_bootstrap.analysis.results.model import Spread
from tests.support.paths import ROOT, TESTS
from tests.upstreams import make

pytestmark = pytest.mark.usefixtures("programs")

PROGRAMS = ROOT / "env" / "programs"
CASES = TESTS / "cases" / "env" / "programs"
DEMO = CASES / "ranks_demo.py"


@pytest.fixture(scope="module")
def torch_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The stand-in torch, importable from its wheel."""
    return str(make.make_wheel(make.WHEELS[0], tmp_path_factory.mktemp("wheels")))


@pytest.fixture
def environment(torch_path: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "PYTHONPATH": torch_path, "PYTHONDONTWRITEBYTECODE": "1", "RANK": "1"}


def ranks(logs: Path, *words: str | Path) -> list[str]:
    return [sys.executable, str(PROGRAMS / "ranks.py"), "--logs", str(logs), "--", *map(str, words)]


def logs_of(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def run(command: list[str], environment: dict[str, str], **options: object) -> subprocess.CompletedProcess[str]:
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
    return subprocess.run(command, env=environment, text=True, check=False, **given)  # type: ignore[call-overload]


def plainly(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """The same without ranks.py."""
    return run([sys.executable, str(DEMO), *words], environment)


def test_a_script_runs_as_it_would_without_us(environment: dict[str, str], tmp_path: Path) -> None:
    done, plain = run(ranks(tmp_path / "logs", DEMO, "well"), environment), plainly(environment, "well")
    assert (done.returncode, plain.returncode) == (0, 0)
    hide = re.compile(r"pid \d+")
    assert sorted(hide.sub("", done.stdout).splitlines()) == sorted(hide.sub("", plain.stdout).splitlines())
    assert done.stdout.splitlines()[0] == "launcher ['well'] programs True"
    assert done.stdout.splitlines()[-1] == "launcher ends"
    assert logs_of(tmp_path / "logs") == {
        f"rank-{2 + rank}.log": f"rank {rank} of 2, imported as __mp_main__\nC of {rank}\n" for rank in (0, 1)
    }


@pytest.mark.parametrize("how", ["fork", "later"])
def test_other_ways_to_start(environment: dict[str, str], tmp_path: Path, how: str) -> None:
    done = run(ranks(tmp_path, DEMO, how), environment)
    assert done.returncode == 0, done.stdout
    name = "__main__" if how == "fork" else "__mp_main__"
    assert {log.splitlines()[0] for log in logs_of(tmp_path).values()} == {
        f"rank {rank} of 2, imported as {name}" for rank in (0, 1)
    }
    assert all(line in done.stdout for log in logs_of(tmp_path).values() for line in log.splitlines())


@pytest.mark.parametrize("how", ["raise", "abort", "kill", "exit"])
def test_a_rank_that_ends_badly(environment: dict[str, str], tmp_path: Path, how: str) -> None:
    done, plain = run(ranks(tmp_path, DEMO, how), environment), plainly(environment, how)
    assert done.returncode == plain.returncode == 1
    assert done.stdout.splitlines()[-1] == plain.stdout.splitlines()[-1]
    lines = logs_of(tmp_path)["rank-3.log"].splitlines()
    assert lines[:2] == ["rank 1 of 2, imported as __mp_main__", "C of 1"]
    last = {
        "raise": ["unflushed Traceback (most recent call last):", "ValueError: wrong on purpose"],
        "abort": ["before the abort", "C before the abort"],
        "kill": ["before the kill"],
        "exit": [],
    }[how]
    assert [line for line in lines[2:] if not line.startswith("  ")] == last
    assert done.stdout.count("ValueError: wrong on purpose") == (how == "raise")


def test_lines_of_many_ranks_are_never_torn(environment: dict[str, str], tmp_path: Path) -> None:
    done = run(ranks(tmp_path, DEMO, "lines", "8"), environment)
    assert done.returncode == 0
    whole = re.compile(r"<(\d):(\d+):(x*)>|<\d:C>|no newline of \d|rank \d of 8.*|C of \d|launcher.*|pid \d+")
    assert [line for line in done.stdout.splitlines() if not whole.fullmatch(line)] == []
    for rank in range(8):
        wanted = [str(line) for line in range(1000)]
        assert [line for each, line, _ in re.findall(r"<(\d):(\d+):(x*)>", done.stdout) if each == str(rank)] == wanted
        log = (tmp_path / f"rank-{8 + rank}.log").read_text()
        assert re.findall(r"<\d:(\d+):x*>", log) == wanted
        assert log.endswith((f"<{rank}:C>\nno newline of {rank}", f"no newline of {rank}<{rank}:C>\n"))


def test_a_line_that_waits_for_its_end_is_shown_and_spoils_no_other(
    environment: dict[str, str], tmp_path: Path
) -> None:
    code = "import torch, m\nif __name__ == '__main__': torch.multiprocessing.spawn(m.run, nprocs=2)\n"
    (tmp_path / "script.py").write_text(code)
    (tmp_path / "m.py").write_text(
        "import time, pathlib\ndef run(rank):\n    if rank == 0: print('slow ... ', end='', flush=True)\n"
        "    while not pathlib.Path('shown').exists(): time.sleep(0.02)\n    print('passed' if rank == 0 else "
        "'other')\n"
    )
    started = subprocess.Popen(
        ranks(tmp_path / "logs", tmp_path / "script.py"),
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    assert started.stdout.read(9) == "slow ... "
    (tmp_path / "shown").touch()
    rest = started.stdout.read()
    assert started.wait() == 0
    assert rest in ("passed\nother\n", "\nother\npassed\n")
    assert logs_of(tmp_path / "logs") == {"rank-2.log": "slow ... passed\n", "rank-3.log": "other\n"}


def test_stdout_and_stderr_stay_apart(environment: dict[str, str], tmp_path: Path) -> None:
    done = run(ranks(tmp_path, DEMO, "lines", "1"), environment, stderr=subprocess.PIPE)
    assert {int(line) % 2 for line in re.findall(r"<0:(\d+):", done.stdout)} == {0}
    assert {int(line) % 2 for line in re.findall(r"<0:(\d+):", done.stderr)} == {1}
    assert len(re.findall(r"<0:\d+:", (tmp_path / "rank-1.log").read_text())) == 1000


def test_output_comes_at_once_and_a_signal_ends_everything(environment: dict[str, str], tmp_path: Path) -> None:
    started = subprocess.Popen(ranks(tmp_path, DEMO, "wait"), env=environment, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    lines: list[str] = []
    while lines.count("waiting\n") < 2:
        lines.append(started.stdout.readline())
    while any(not log.endswith("half a line") for log in logs_of(tmp_path).values()):
        time.sleep(0.02)
    family = set(descendants(started.pid))
    assert len(family) >= 3  # two ranks and the collector
    started.send_signal(signal.SIGTERM)
    assert started.wait() == -signal.SIGTERM
    started.stdout.read()  # ends when the last process with this output has ended
    wait_until_gone(family)


def test_interrupt_reaches_the_script(environment: dict[str, str], tmp_path: Path) -> None:
    started = subprocess.Popen(
        ranks(tmp_path, DEMO, "wait"),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert started.stdout is not None
    seen = 0
    while seen < 2:
        seen += "waiting" in started.stdout.readline()
    os.killpg(started.pid, signal.SIGINT)
    rest = started.stdout.read()
    assert started.wait() == -signal.SIGINT
    assert "KeyboardInterrupt" in rest


def test_an_interrupt_while_the_last_output_is_waited_for_says_nothing(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """Slurm and whoever ends a job signal more than once."""
    done = run(ranks(tmp_path, DEMO, "leave"), environment)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "launcher ends"


def descendants(pid: int) -> Iterator[int]:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield int(child)
        yield from descendants(int(child))


def wait_until_gone(pids: set[int]) -> None:
    def running(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return False

    while any(running(pid) for pid in pids):
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("text", "code", "output"),
    [
        ("import sys; print(sys.argv, flush=True); sys.exit(5)", 5, "['script.py', '--logs', 'x', '--', 'y']\n"),
        (
            "import atexit; atexit.register(print, 'late')\nif __name__ == '__main__': print('early')",
            0,
            "early\nlate\n",
        ),
        ("import sys; print('torch' in sys.modules, 'multiprocessing' in sys.modules)", 0, "False False\n"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("print(list[int], __annotations__)\nx: 'later' = 1", 0, None),
        ("1 +", 1, None),
    ],
)
def test_a_script_that_starts_nothing(
    environment: dict[str, str], tmp_path: Path, text: str, code: int, output: str | None
) -> None:
    (tmp_path / "script.py").write_text(text)
    words = ["script.py", "--logs", "x", "--", "y"]
    done = run(ranks(tmp_path / "logs", *words), environment, cwd=tmp_path)
    plain = run([sys.executable, *words], environment, cwd=tmp_path)
    assert done.returncode == plain.returncode == code
    assert done.stdout.splitlines()[-1:] == plain.stdout.splitlines()[-1:]
    assert output is None or done.stdout == plain.stdout == output
    assert list((tmp_path / "logs").iterdir()) == []


def test_a_script_that_is_not_there(environment: dict[str, str], tmp_path: Path) -> None:
    done = run(ranks(tmp_path, tmp_path / "nowhere.py"), environment)
    assert (done.returncode, done.stdout) == (
        2,
        f"ranks.py: can't open file '{tmp_path}/nowhere.py': No such file or directory\n",
    )


def test_without_torch_nothing_is_changed(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "try:\n    import torch.multiprocessing\nexcept ImportError as error:\n    print(error)\n"
    )
    done = run(ranks(tmp_path, tmp_path / "script.py"), {**environment, "PYTHONPATH": ""})
    assert (done.returncode, done.stdout) == (0, "No module named 'torch'\n")


def test_a_folder_that_cannot_be_made_costs_a_warning(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run(ranks(tmp_path / "file" / "logs", DEMO, "well"), environment)
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == f"ranks.py: no rank logs: {tmp_path}/file/logs: Not a directory"
    assert done.stdout.splitlines()[-1] == "launcher ends"


def test_a_file_that_cannot_be_written_costs_a_warning(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "rank-2.log").symlink_to("/dev/full")
    (tmp_path / "rank-3.log").mkdir()
    done = run(ranks(tmp_path, DEMO, "well"), environment)
    assert done.returncode == 0
    warnings = {line for line in done.stdout.splitlines() if line.startswith("ranks.py")}
    assert warnings == {
        f"ranks.py: {tmp_path}/rank-2.log is not complete: No space left on device",
        f"ranks.py: {tmp_path}/rank-3.log is not complete: Is a directory",
    }
    assert {"C of 0", "C of 1"} <= set(done.stdout.splitlines())


def test_nobody_reading_the_output_costs_no_log(environment: dict[str, str], tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    code = "import torch, m\nif __name__ == '__main__': torch.multiprocessing.spawn(m.run, nprocs=2)\n"
    (tmp_path / "script.py").write_text(code)
    (tmp_path / "m.py").write_text(
        "import os\ndef run(rank):\n    for line in range(100): os.write(1, b'%d\\n' % line)\n"
    )
    done = run(ranks(tmp_path / "logs", tmp_path / "script.py"), environment, stdout=writing, stderr=writing)
    os.close(writing)
    assert done.returncode == 0
    assert {log.splitlines()[-1] for log in logs_of(tmp_path / "logs").values()} == {"99"}


# The other programs, as far as they need neither torch nor a GPU


def load(name: str) -> ModuleType:
    """A program as a module; those it imports lie in its folder."""
    sys.path.insert(0, str(PROGRAMS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(PROGRAMS))


launching, nccl, pairs_judge, pairs_run = (load(name) for name in ("launching", "nccl", "pairs_judge", "pairs_run"))


@settings(deadline=None)
@given(st.integers(0, 70))
def test_every_pair_meets_once_and_nobody_twice_in_a_round(nodes: int) -> None:
    found = pairs_judge.rounds(nodes)
    assert len(found) == (0 if nodes < 2 else nodes - 1 if nodes % 2 == 0 else nodes)
    for pairs in found:
        present = [node for pair in pairs for node in pair]
        assert len(set(present)) == len(present) == nodes - nodes % 2
    assert sorted(pair for pairs in found for pair in pairs) == list(combinations(range(nodes), 2))


def rates_of(case: Mapping[str, Any]) -> dict[tuple[int, int], list[float | None]]:
    present = [node for node in range(case["nodes"]) if node not in case.get("absent", ())]
    rates: dict[tuple[int, int], list[float | None]] = {
        pair: [case["usual"]] * case["gpus"] for pair in combinations(present, 2)
    }
    for link, rate in case["links"].items():
        one, two, *gpu = map(int, link.split("-"))
        for each in gpu or range(case["gpus"]):
            rates[one, two][each] = rate
    return rates


@pytest.mark.parametrize("case", json.loads((CASES / "verdicts.json").read_text()), ids=lambda case: case["name"])
def test_what_slow_links_have_in_common(case: Mapping[str, Any]) -> None:
    verdict = pairs_judge.judge(rates_of(case), case["nodes"], 0.8)
    names = [f"n{node}" for node in range(case["nodes"])]
    assert list(pairs_judge.describe(verdict, names, case.get("absent", ()))) == case["lines"]


@settings(deadline=None)
@given(st.integers(2, 6), st.integers(1, 3), st.data())
def test_every_bad_link_is_explained_and_no_good_one_blamed(nodes: int, gpus: int, data: st.DataObject) -> None:
    rate = st.one_of(st.none(), st.sampled_from([5.0, 45.0, 45.0, 45.0, 46.0]))
    rates = {pair: tuple(data.draw(rate) for _ in range(gpus)) for pair in combinations(range(nodes), 2)}
    verdict = pairs_judge.judge(rates, nodes, 0.8)
    blamed = set()
    for finding in verdict.findings:
        for one, two in rates:
            for gpu in range(gpus):
                of_nodes = {"pair": finding.nodes == (one, two), "all": True, "rail": True}.get(
                    finding.kind, bool({one, two} & {*finding.nodes})
                )
                if of_nodes and (not finding.gpus or gpu in finding.gpus):
                    blamed.add((one, two, gpu))
    links = {(*pair, gpu): rate for pair, each in rates.items() for gpu, rate in enumerate(each)}
    assert blamed == {link for link, rate in links.items() if rate is None or rate < verdict.limit}


def crossing(case: Mapping[str, Any]) -> dict[tuple[int, int], list[float | None]]:
    """The rates of every GPU of each pair's first node, shift by shift."""
    gpus, bad = case["gpus"], {tuple(link): rate for *link, rate in case["bad"]}

    def rate(one: int, two: int, gpu: int, other: int) -> float | None:
        apart = case.get("apart", [])
        if gpu != other and (apart == "all" or sorted((gpu, other)) in apart):
            return None
        return bad.get((one, gpu, two, other), case["usual"])

    return {
        (one, two): [rate(one, two, gpu, (gpu + shift) % gpus) for shift in range(gpus) for gpu in range(gpus)]
        for one, two in combinations(range(case["nodes"]), 2)
    }


@pytest.mark.parametrize("case", json.loads((CASES / "crossings.json").read_text()), ids=lambda case: case["name"])
def test_what_bad_links_across_rails_have_in_common(case: Mapping[str, Any]) -> None:
    verdict = pairs_judge.judge(crossing(case), case["nodes"], 0.8, shifts=case["gpus"])
    names = [f"n{node}" for node in range(case["nodes"])]
    assert list(pairs_judge.describe(verdict, names)) == case["lines"]


@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_across_rails_every_gpu_meets_every_other(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    place, chosen = launching.Place(0, nodes, 3, "h", 1), Namespace(cross_rail=True)
    met: list[tuple[str, tuple[int, int]]] = []
    plan = pairs_run.meetings(place, chosen)
    store = Store(**{f"go_{number}": [] for number in range(len(plan))})
    monkeypatch.setattr(pairs_run, "connect", lambda *_: store)
    monkeypatch.setattr(pairs_run.ctypes, "CDLL", lambda _: Namespace(prctl=lambda *_: None))
    monkeypatch.setattr(
        pairs_run, "meet", lambda _store, gpu, here, _chosen, meeting: met.append((str(meeting[:2]), (here.node, gpu)))
    )
    for node in range(nodes):
        for gpu in range(3):
            pairs_run.work(gpu, launching.Place(node, nodes, 3, "h", 1), chosen, Namespace(value=0))
    by_name: dict[str, list[tuple[int, int]]] = {}
    for name, end in met:
        by_name.setdefault(name, []).append(end)
    ends = [(node, gpu) for node in range(nodes) for gpu in range(3)]
    wanted = sorted((one, two) for one, two in combinations(ends, 2) if one[0] != two[0])
    assert sorted(tuple(sorted(each)) for each in by_name.values()) == wanted
    assert len(pairs_run.meetings(place, Namespace(cross_rail=False))) == len(plan) / 3


def test_across_rails_a_gpu_uses_the_nic_of_the_modules_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pairs_run.MAP, "0:mlx5_0:1,1:mlx5_3:2")
    monkeypatch.delenv("NCCL_IB_HCA", raising=False)
    pairs_run.pin_nic(2)
    assert "NCCL_IB_HCA" not in os.environ
    pairs_run.pin_nic(1)
    assert os.environ["NCCL_IB_HCA"] == "=mlx5_3:2"
    pairs_run.pin_nic(0)
    assert os.environ["NCCL_IB_HCA"] == "=mlx5_3:2", "a value that is there stays"


class Store:
    """What pairs.py asks of torch's TCPStore, in memory."""

    def __init__(self, **values: Any) -> None:
        self.values = {key.replace("_", "/"): json.dumps(value).encode() for key, value in values.items()}

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()


def test_both_ends_of_a_pair_are_heard(capfd: pytest.CaptureFixture[str]) -> None:
    place = launching.Place(0, 3, 2, "h", 1)
    store = Store(
        done_1_0={"rate": 40.0},
        done_1_1={"rate": 9.0},
        done_1_4={"rate": 41.0},
        done_1_5={"error": "no answer in 60 s"},
    )
    rates, said = pairs_run.result(store, place, 1, (0, 2))
    assert (rates, said) == ((40.0, None), ["GPU 1: no answer in 60 s"])
    assert pairs_run.result(Store(), place, 1, (0, 2)) == (
        (None, None),
        ["GPU 0: nothing was heard of it", "GPU 1: nothing was heard of it"],
    )
    crossed, _ = pairs_run.result(Store(done_1_0={"rate": 40.0}, done_1_5={"rate": 39.0}), place, 1, (0, 2), 1)
    assert crossed == (39.0, None), "GPU 0 met GPU 1"
    for given_rates, more in (((40.0, 39.0), []), (rates, said), ((None, None), [])):
        pairs_run.report(0, ["a", "b"], given_rates, more)
    out, err = capfd.readouterr()
    assert out.splitlines() == [
        "[pairs] round 1: a b 79.00 GB/s",
        "[pairs] round 1: a b 40.00 GB/s (by GPU: 40.00, none)",
        "[pairs] round 1: a b no answer",
    ]
    assert err == "[pairs] round 1: a b: GPU 1: no answer in 60 s\n"


def test_nodes_that_do_not_come_are_missing() -> None:
    place = launching.Place(0, 3, 2, "h", 1)
    store = Store(ready_0_0="", ready_0_1="", ready_0_2="", ready_0_4="", ready_0_5="")
    assert pairs_run.missing(store, place, 0, set(), 0) == {1}
    assert pairs_run.missing(store, place, 0, {1}, 0) == set()
    assert pairs_run.unlike(["a", "b", "a"]) == ["a#0", "b", "a#2"]


@pytest.mark.parametrize(("text", "size"), [("4096", 4096), ("64K", 65536), ("1m", 1 << 20), ("2G", 2 << 30)])
def test_sizes(text: str, size: int) -> None:
    assert launching.size(text) == size


@pytest.mark.parametrize("text", ["", "K", "0", "-1", "1.5M", "1T", "1KK", "²"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="is not like"):
        launching.size(text)


def test_what_programs_print_is_what_results_read(capfd: pytest.CaptureFixture[str]) -> None:
    rates = (45.0, 44.0, 45.2, 10.0)
    launching.say("pairs", "2 nodes x 4 GPUs, 1 round, 67108864 bytes a message")
    pairs_run.report(0, ["a", "b"], rates, [])
    for line in pairs_judge.describe(pairs_judge.judge({(0, 1): rates}, 2, 0.8), ["a", "b"], [1]):
        launching.say("pairs", line)
    launching.say("pairs", "failed")
    launching.say("pairs", "2 nodes x 2 GPUs, 2 rounds, 67108864 bytes a message")
    pairs_run.report(0, ["a", "b"], (45.0, 45.0), [])
    pairs_run.report(1, ["a", "b"], (None, None), ["GPU 0-1: no answer in 60 s"], 1)
    launching.say("nccl", "1 node x 8 ranks, gloo, torch 2.11.0")
    launching.say("nccl", str(nccl.Figure("all_to_all", 10**9, 0.01, 8)))
    reduce, pair, across = own_programs.read_own_programs({"a.out": capfd.readouterr().out})
    assert (across.passed, across.failed, across.operations["pair"].gpu_gbs) == (1, 1, Spread(45.0, 45.0, 45.0))
    assert (reduce.operations["all_to_all"].bus_gbs, reduce.ended, reduce.passed) == (
        Spread(87.5, 87.5, 87.5),
        False,
        1,
    )
    assert (pair.operations["pair"].gpu_gbs, pair.ok) == (Spread(10.0, 44.5, 45.2), False)
    assert [error.partition(":")[0] for error in pair.errors] == ["absent", "slow"]


@pytest.mark.parametrize("when", ["starting", "waiting"])
def test_a_stopped_launcher_takes_its_ranks_along(environment: dict[str, str], when: str) -> None:
    done = run([sys.executable, str(CASES / "stopped_demo.py"), when], environment)
    assert done.returncode == 128 + signal.SIGTERM, done.stdout
    word, *pids = done.stdout.split()
    assert (word, len(pids)) == ("ranks", 2)
    assert not any(Path("/proc", pid).exists() for pid in pids), "collected before the launcher ended"


@given(st.integers(1, 1 << 30), st.integers(2, 1000))
def test_sizes_give_every_rank_the_same_count(size: int, ranks: int) -> None:
    whole = nccl.whole(size, ranks)
    assert whole % (4 * ranks) == 0
    assert size <= whole < size + 4 * ranks


def test_rates_follow_the_convention() -> None:
    reduce = nccl.Figure("all_reduce", 10**9, 0.01, 8)
    scatter = nccl.Figure("all_to_all", 10**9, 0.01, 8)
    assert math.isclose(reduce.bus, 175.0)
    assert str(reduce) == "all_reduce 1000000000 bytes: 100.00 GB/s (algorithm), 175.00 GB/s (bus), 10000.0 us"
    assert math.isclose(scatter.bus, 87.5)
    slower = nccl.Figure("all_reduce", 10**6, 0.01, 8)
    assert nccl.best([slower, reduce, scatter]) == [reduce, scatter]


@pytest.mark.parametrize("program", ["ranks", "nccl", "pairs", "smoke"])
def test_help_needs_no_torch(program: str) -> None:
    done = run([sys.executable, "-E", str(PROGRAMS / f"{program}.py"), "--help"], {})
    assert done.returncode == 0, done.stdout
    assert len(done.stdout.splitlines()) > 15


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "x"}, "RANK=x: not a number"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT=-1: not a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2: with WORLD_SIZE=2 nodes it must be below that"),
        (
            {"RANK": "0", "WORLD_SIZE": "1"},
            "[pairs] failed: one node is no pair; set WORLD_SIZE, RANK, MASTER_ADDR and MASTER_PORT on each",
        ),
    ],
)
def test_places_that_make_no_sense(environment: dict[str, str], variables: dict[str, str], message: str) -> None:
    done = run([sys.executable, str(PROGRAMS / "pairs.py"), "--num-processes", "1"], environment | variables)
    assert (done.returncode, done.stdout) == (1, message + "\n")
