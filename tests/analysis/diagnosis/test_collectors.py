"""What a collector of logs puts before every line changes neither the cause nor the first error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from deepep_bootstrap.analysis.diagnosis.collectors import LEAST, without_prefix
from deepep_bootstrap.analysis.diagnosis.engine import diagnose
from tests.support.diagnosis import BOOK, CASES

PREFIXES: dict[str, Callable[[int], str]] = {
    "journal": lambda n: f"Nov 22 10:{n // 60:02d}:{n % 60:02d} n1 python3[4711]: ",
    "kubectl": lambda _: "[pod/ep-0/main] ",
    "times": lambda n: f"2026-11-20T10:{n // 60:02d}:{n % 60:02d}.123456789Z ",
    "docker build": lambda n: f"#14 {n * 0.7:.3f} ",
    "mpirun": lambda _: "[1,3]<stderr>:",
    "mpirun with times": lambda n: f"Sat Nov 21 10:{n // 60:02d}:{n % 60:02d} 2026[1,3]<stderr>:",
    "srun": lambda _: "3: ",
    "ray": lambda _: "(WorkerDict pid=91833, ip=10.30.1.21) ",
    "compose": lambda _: "worker-1  | ",
    "stern": lambda _: "ep-0-abcde main ",
    "github": lambda n: f"ep\tbuild\t2026-11-20T10:{n // 60:02d}:{n % 60:02d}.1234567Z ",
    "two of them": lambda n: f"[pod/ep-0/main] 2026-11-20T10:{n // 60:02d}:{n % 60:02d}.1Z 3: ",
}
LOGS = [
    CASES / folder / f"{name}.log"
    for folder, name in (
        ("blind-2026", "trtllm-unequal-size"),
        ("blind-2026", "shm-leftovers"),
        ("outsider-2026-second", "nccltests_driver_too_old"),
        ("outsider-2026-third", "describe_nccl_worker_gb200"),
        ("outsider-2026-third", "symm_unittest_nccl_backend"),
    )
]


def seen(text: str) -> tuple[list[str], int | None]:
    found = diagnose({"log": text}, BOOK)
    return [each.cause for each in found.findings], found.first.evidence.line if found.first else None


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", PREFIXES)
def test_a_prefix_of_all_lines_changes_nothing(name: str, path: Path) -> None:
    """Before, 5 to 33 of 248 recorded logs had another first error, by the kind of prefix."""
    text = path.read_text(encoding="utf-8")
    prefixed = "\n".join(PREFIXES[name](number) + line for number, line in enumerate(text.split("\n")))
    assert seen(prefixed) == seen(text)


@pytest.mark.parametrize(
    ("lines", "rest"),
    [
        (["3: a", "3:   b", "3: ", "3: c"], ["a", "  b", "", "c"]),
        (["3: a", "3: b", "4: c", "4: d"], ["3: a", "3: b", "4: c", "4: d"]),
        (["3: a", "3: b", "3: c"], ["3: a", "3: b", "3: c"]),
        (["#7 0.1 a", "#7 0.2 b", "#8 0.1 c", "#8 0.1 d"], ["a", "b", "c", "d"]),
        (["[pod/x/y] 3: a"] * 4, ["a"] * 4),
        ([*["3: a"] * 9, "b"], [*["a"] * 9, "b"]),
        ([*["3: a"] * 8, "b", "c"], [*["3: a"] * 8, "b", "c"]),
        (["n1:7:7 [0] NCCL INFO a"] * 4, ["n1:7:7 [0] NCCL INFO a"] * 4),
        ([], []),
    ],
)
def test_only_what_one_writer_put_before_nearly_all_lines_is_taken_off(lines: Sequence[str], rest: list[str]) -> None:
    heads, found = without_prefix(lines)
    assert found == rest
    assert [head + line for head, line in zip(heads, found, strict=True)] == list(lines)


def test_time_node_and_rank_are_still_told() -> None:
    def first(prefix: str) -> tuple[str, str, str]:
        text = "\n".join(f"{prefix}{line}" for line in (*["hello"] * LEAST, "ValueError: odd"))
        found = diagnose({"log": text}, BOOK).first
        assert found
        return found.time, found.node, found.rank

    assert first("Nov 22 10:00:07 n17 python3[4711]: ") == ("Nov 22 10:00:07", "n17", "")
    assert first("5: ") == ("", "", "rank 5")
    assert first("2026-11-20T10:00:07.25Z [1,5]<stderr>:") == ("2026-11-20T10:00:07.25", "", "rank 5")


def test_a_time_behind_the_label_of_a_rank_does_not_hide_the_label() -> None:
    text = (
        "3: [2026-11-20 10:00:00 DP1 TP1] Scheduler hit an exception: Traceback (most recent call last):\n"
        '4: hello\n3:   File "/srv/a.py", line 3, in b\n3: KeyError: 7\n4: bye\n'
    )
    assert seen(text) == ([], 4)
