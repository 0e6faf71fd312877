"""DeepEP V1 and V2 in one prefix on the embedded cluster: `module load` chooses, jobs of each find their own
libraries. V2 for vLLM, in an environment of the store and beside one that somebody has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support import stacks as stacks_support
from tests.support.e2e import Engine

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]
pytestmark = [pytest.mark.e2e, pytest.mark.long]

PRINT = "import deep_ep, os; print(deep_ep.__version__, os.environ.get('EP_JIT_CACHE_DIR'))"


def test_v2_beside_v1(engine: Engine, tmp_path: Path) -> None:
    ended = engine.run("bootstrap")
    assert ended.code == 0, ended.text
    nvshmem = next(engine.on_disk.glob("store/*-nvshmem-*"))
    stacks = stacks_support.make_stacks(nvshmem, tmp_path)
    for host in ("n001", "n002"):
        assert engine.lab.nsenter(host, "bash /usr/local/cuda/install /usr/local/cuda-13.0 13.0.88").returncode == 0
    # One node has other GPUs: the second stack is built for both kinds.
    engine.lab.fake("n002", "capability", "10.0")
    second = Engine(engine.lab, engine.sources, stacks.lock)
    ended = second.run("bootstrap", "--stack=v2", f"--mirror=index:{stacks_support.INDEX}={stacks.wheels}")
    assert ended.code == 0, ended.text
    offer = json.loads((engine.on_disk / "current" / "manifest.json").read_text())["offer"]
    v1, v2 = offer["stacks"]["v1"], offer["stacks"]["v2"]
    assert (offer["default_stack"], v2["nccl"], v2["gdrcopy"]) == ("v1", stacks_support.NCCL, "")
    assert v2["archs"] == ["9.0", "10.0"]
    listed = engine.lab.ssh(
        "n001", f"/usr/local/cuda/bin/cuobjdump --list-elf /shared/deepep/store/{v2['deepep']}/lib/python/deep_ep/*.so"
    )
    assert {"sm_90", "sm_100"} <= set(re.findall(r"sm_\d+", listed.stdout))
    # A user goes from one to the other and back; V2's variables leave with it.
    moves = f'module load deepep/{{}}; python -c "{PRINT}"'
    script = "; ".join(moves.format(record["module"].removeprefix("deepep/")) for record in (v1, v2, v1))
    # Caches have a name of their own; the account's folder for scratch, deepep-0, stays.
    left = engine.lab.ssh("n001", "ls -A /tmp /dev/shm /var/tmp | grep 'deepep-0[.]'")
    assert left.stdout == "", "the look at the end of a bootstrap leaves nothing on the nodes"
    shown = engine.lab.ssh("n001", f"bash -lc {json.dumps(script)}")
    first, second_, third = shown.stdout.splitlines()
    assert (first, third) == ("1.2.1 None", "1.2.1 None"), shown.stderr
    assert re.fullmatch(rf"2\.1\.0 /tmp/deepep-0\.\w{{10}}/jit-{v2['deepep'][:12]}", second_), shown.stderr
    # Upstream's V2 test over two nodes, through Slurm, with its arguments.
    passed = second.run(
        "test", "--kind=internode", "--stack=v2", "--args=--num-tokens 128 --num-processes 2 --num-experts 8"
    )
    assert passed.code == 0, passed.text
    assert "EP: 0/4 | dispatch: " in passed.out
    assert f"NCCL {stacks_support.NCCL}" in passed.out
    cache = f"/tmp/deepep-0.*/jit-{v2['deepep'][:12]}"
    assert engine.lab.ssh("n002", f"stat -c %a {cache}").stdout.strip() == "700"


def offered(engine: Engine) -> dict[str, Any]:
    """Return what the current generation says of the stack v2-vllm."""
    record = json.loads((engine.on_disk / "current" / "manifest.json").read_text())["offer"]["stacks"]["v2-vllm"]
    assert isinstance(record, dict)
    return record


def test_v2_for_vllm_and_beside_its_own_environment(engine: Engine, tmp_path: Path) -> None:
    assert engine.built
    stacks = stacks_support.make_stacks(next(engine.built.glob("*-nvshmem-*")), tmp_path)
    for host in ("n001", "n002"):
        assert engine.lab.nsenter(host, "bash /usr/local/cuda/install /usr/local/cuda-13.0 13.0.88").returncode == 0
    mine = Engine(engine.lab, engine.sources, stacks.lock)
    index = f"--mirror=index:{stacks_support.INDEX}={stacks.wheels}"
    words = "--args=--num-tokens 128 --num-processes 2 --num-experts 8"
    ended = mine.run("bootstrap", "--stack=v2-vllm", index)
    assert ended.code == 0, ended.text
    passed = mine.run("test", "--kind=internode", "--stack=v2-vllm", words)
    assert passed.code == 0, passed.text
    assert f"NCCL {stacks_support.NCCL_OF_VLLM}" in passed.out
    record = offered(mine)
    assert (record["torch"], record["nccl"]) == (stacks_support.TORCH_OF_VLLM, stacks_support.NCCL_OF_VLLM)
    # The same stack for a Python that has all of it already: nothing but DeepEP is built, nothing is preloaded.
    stacks_support.make_environment(stacks, engine.lab.shared / "vllm", "/usr/bin/python3")
    python = "/shared/vllm/bin/python"
    before = set(mine.store())
    ended = mine.run("bootstrap", "--stack=v2-vllm", f"--python={python}", index)
    assert ended.code == 0, ended.text
    (made,) = set(mine.store()) - before
    record = offered(mine)
    assert (record["deepep"], record["nvshmem"], record["nccl"]) == (made, "", stacks_support.NCCL_OF_VLLM)
    look = "import deep_ep, deep_ep._C as c, os; print(c.nccl_version(), os.environ.get('LD_PRELOAD'))"
    shown = engine.lab.ssh("n002", "bash -lc " + json.dumps(f'module load deepep/v2-vllm; {python} -c "{look}"'))
    assert shown.stdout.split() == [stacks_support.NCCL_OF_VLLM, "None"], shown.stderr
    passed = mine.run("test", "--kind=internode", "--stack=v2-vllm", words)
    assert passed.code == 0, passed.text
    # An NCCL that is too old is refused with both ways out; ours is then an entry.
    stacks_support.make_environment(stacks, engine.lab.shared / "older", "/usr/bin/python3", nccl="2.28.9")
    older = ("--stack=v2-vllm", "--python=/shared/older/bin/python", index)
    refused = mine.run("plan", *older)
    assert refused.code == 1
    assert "a torch of 2.14 or newer" in refused.text
    ended = mine.run("bootstrap", *older, "--nccl=own")
    assert ended.code == 0, ended.text
    passed = mine.run("test", "--kind=internode", "--stack=v2-vllm", words)
    assert passed.code == 0, passed.text
    assert f"NCCL {stacks_support.NCCL_OF_VLLM}" in passed.out
