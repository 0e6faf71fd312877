"""What `invoke status` says of the hosts' MODULEPATH, and of nodes of Kubernetes that were left cordoned."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepep_bootstrap.cli.commands.status import (
    MISSING,
    NOT_NEEDED,
    cordoned_by_us,
    hook_words,
    tell_cordoned,
    tell_offer,
)
from deepep_bootstrap.core.console import Screen
from deepep_bootstrap.kube import client, nodes
from tests.support.kube_api import live_api, make_node, refusal

LEFT = "deepep-bootstrap: came back without what was wanted (run 7)"


@pytest.mark.parametrize(
    ("hook", "words", "style"),
    [
        ("/shared/deepep/modulefiles", "leads to /shared/deepep", ""),
        ("/shared/deepep2/modulefiles", "leads to /shared/deepep2, not to this prefix", "bold red"),
        (MISSING, "is not set up", "red"),
        (NOT_NEEDED, "not needed, no module system", ""),
    ],
)
def test_the_hook_of_another_prefix_is_red(hook: str, words: str, style: str) -> None:
    assert hook_words(hook, "/shared/deepep") == (words, style)


@pytest.mark.usefixtures("programs")
def test_nodes_that_we_left_cordoned_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with live_api(tmp_path) as (api, file):
        cluster = client.connect(kubeconfig=str(file))
        for name, reason in (("gpu-a", LEFT), ("gpu-b", LEFT), ("gpu-c", "")):
            cluster.create(nodes.NODES, make_node(name, f"boot of {name}", cordoned=reason))
        cluster.patch(f"{nodes.NODES}/gpu-c", {"spec": {"unschedulable": True}})  # somebody else's
        assert cordoned_by_us(cluster) == ({"gpu-a": LEFT, "gpu-b": LEFT}, ())
        api.inside(lambda each: each.refusals.update({"GET /api/v1/nodes": refusal(403, "may not list nodes")}))
        found, problems = cordoned_by_us(cluster)
        assert (found, len(problems)) == ({}, 1)
        assert "may not list nodes" in str(problems[0])
    assert cordoned_by_us(None) == ({}, ())
    tell_cordoned(Screen("status"), {"gpu-a": LEFT, "gpu-b": LEFT})
    said = " ".join(capsys.readouterr().out.split())
    assert said == f"cordoned by us in Kubernetes, given back by the next successful run: gpu-a,gpu-b (2) ({LEFT})"


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ({"cuda_home": "/usr/local/cuda", "toolkit": "a-toolkit-13.2.86"}, "CUDA in /usr/local/cuda, GPUs"),
        ({"cuda_home": "", "toolkit": f"{'7' * 32}-toolkit-13.2.86"}, "CUDA in 7777777…-toolkit-13.2.86, GPUs"),
        ({"cuda_home": ""}, "CUDA in no place, GPUs"),
    ],
)
def test_the_compiler_of_a_module_is_named(
    places: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"module": "deepep/2.1.0-dd758ca-v2", "archs": ["9.0"], "profile": "roce", **places}
    offer = {"stacks": {"v2": record}, "default_stack": "v2"}
    tell_offer(Screen("status"), {"generation": 1, "created": "today", "by": "root", "offer": offer})
    assert said in " ".join(capsys.readouterr().out.split())
