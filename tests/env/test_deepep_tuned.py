"""The module `deepep_tuned`, as programs on the cluster import it: which document counts, what Config they get, what
it costs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomlkit

from deepep_bootstrap.analysis.tuning import shelf
from deepep_bootstrap.analysis.tuning.document import Document, gpu_slug, render_document
from deepep_bootstrap.prefix import modulefiles
from deepep_bootstrap.prefix.generations import PrefixHandle
from deepep_bootstrap.remote.fleet import ConnectionPool
from tests.support.build import HERE, RECIPES, make_prefix
from tests.support.tuning import CASES, MODULE, document, real_document

Load = Callable[..., Any]


@dataclass(frozen=True)
class Config:
    """deep_ep.Config: upstream's names, order and defaults (its pybind11 declaration in csrc/deep_ep.cpp)."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256


def deep_ep() -> types.ModuleType:
    """Return a module with what deepep_tuned uses of DeepEP V1."""
    module = types.ModuleType("deep_ep")
    defaults = {
        "get_dispatch_config": staticmethod(lambda ranks: ("dispatch", ranks)),
        "get_combine_config": staticmethod(lambda ranks: ("combine", ranks)),
    }
    module.Config, module.Buffer = Config, type("Buffer", (), defaults)  # type: ignore[attr-defined]
    return module


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Return what loads the module beside these documents, as on a node with GPUs of the model `gpu`."""
    monkeypatch.delenv("DEEPEP_STACK", raising=False)
    monkeypatch.setitem(sys.modules, "deep_ep", deep_ep())

    def load(*documents: Document, gpu: str = "NVIDIA H200", texts: dict[str, str] | None = None) -> Any:
        folder = tmp_path / "tuning"
        (folder / "python").mkdir(parents=True)
        (folder / "python/deepep_tuned.py").write_text(MODULE)
        for name, text in {**{each.key.file: render_document(each) for each in documents}, **(texts or {})}.items():
            (folder / name).write_text(text)
        for index in range(8 if gpu else 0):
            (tmp_path / f"gpus/0000:{index:02x}:00.0").mkdir(parents=True)
            (tmp_path / f"gpus/0000:{index:02x}:00.0/information").write_text(f"Model: \t\t {gpu}\nIRQ:   \t\t 120\n")
        spec = importlib.util.spec_from_file_location("deepep_tuned", folder / "python/deepep_tuned.py")
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.GPUS = str(tmp_path / "gpus")
        return module

    return load


TABLE = tomlkit.parse((CASES / "nearest.toml").read_text()).unwrap()


@pytest.mark.parametrize("case", TABLE["case"], ids=lambda case: case["why"])
def test_the_nearest_document(case: dict[str, Any], load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = {name: document(run=name, **values) for name, values in TABLE["document"].items()}
    module = load(*documents.values())
    monkeypatch.setenv("DEEPEP_STACK", case.get("loaded", ""))
    ask = dict(case["ask"])
    found = module.settings(ask.pop("ranks"), **ask)
    assert (found or {}).get("run") == case.get("wanted")
    assert found is None or found["exact"] == case.get("exact", False)


def test_a_config_is_the_one_that_the_test_measured_on_one_node(load: Load) -> None:
    module = load(real_document())
    # As upstream's tests/test_intranode.py makes it: deep_ep.Config(num_sms, nvl_chunk_size, nvl_buffer_size)
    assert module.dispatch_config(8, hidden=7168) == Config(24, 8, 256)
    assert module.dispatch_config(8, hidden=7168, dtype="bf16") == Config(24, 4, 256)
    assert module.combine_config(8, hidden=7168) == Config(24, 4, 256)


def test_a_config_is_the_one_that_the_test_measured_between_nodes(load: Load) -> None:
    module = load(document(nodes=3, ranks=24), document(nodes=2, ranks=16))
    assert module.dispatch_config(16) == module.combine_config(16) == Config(24, 8, 512, 16, 128)


def test_plain_numbers_are_the_arguments_of_config_and_of_set_num_sms(load: Load) -> None:
    found = load(real_document()).settings(8, hidden=7168, dtype="bf16")
    assert Config(**found["dispatch"]) == Config(24, 4, 256)
    assert found["num_sms"] == found["combine"]["num_sms"] == 24
    assert (found["gpu"], found["ranks"], found["run"], found["exact"]) == ("h200", 8, "intranode-1", True)


def test_where_nothing_was_measured_upstream_decides_and_it_is_said_once(load: Load) -> None:
    module = load(document())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert [module.dispatch_config(64), module.dispatch_config(64), module.combine_config(64)] == [
            ("dispatch", 64)
        ] * 2 + [("combine", 64)]
    (only,) = (one for one in said if one.category is UserWarning)
    assert "64 ranks on h200" in str(only.message)
    assert "invoke test --kind=internode" in str(only.message)
    assert only.filename == __file__, "the line that asked is named"


def test_without_any_document_everything_still_works(load: Load) -> None:
    module = load(gpu="")
    assert module.available() == []
    assert module.settings(8) is None
    with pytest.warns(UserWarning, match="8 ranks on this GPU"):
        assert module.dispatch_config(8) == ("dispatch", 8)


def test_a_node_without_a_gpu_takes_the_only_kind_there_is(load: Load) -> None:
    assert load(document(), gpu="").settings(8)["gpu"] == "h200"


def test_a_node_without_a_gpu_does_not_choose_between_kinds(load: Load) -> None:
    assert load(document(), document(gpu="b200"), gpu="").settings(8) is None


def test_files_that_are_no_documents_are_named_and_left_out(load: Load) -> None:
    good = render_document(document(run="good", nodes=2, ranks=16))
    changes = {
        "old.json": ('"schema": 1', '"schema": 0'),
        "text.json": ('"ranks": 16', '"ranks": "16"'),
        "zero.json": ('"hidden": 7168', '"hidden": 0'),
        "chunk.json": ('"nvl_chunk": 8', '"nvl_chunk": -8'),
        "half.json": ('"rdma_buffer": 128', '"rdma_buffer": null'),
        "less.json": ('"combine": {', '"combined": {'),
    }
    texts = {name: good.replace(*change) for name, change in changes.items()}
    texts |= {"cut.json": good[:200], "list.json": "[]", "empty.json": "", "deep.json": "[" * 100_000}
    module = load(document(run="best"), texts=texts)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert module.settings(8)["run"] == "best"
        assert module.settings(16) is None
        assert len(module.available()) == 1
    # A warning of another kind is of what the collector finds meanwhile, from whatever test ran before.
    ours = [str(one.message) for one in said if one.category is UserWarning]
    assert sorted(Path(text.split()[1]).name for text in ours) == sorted(texts)


PRODUCTS = (
    *(
        "NVIDIA H200",
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA GB200",
        "H200",
    ),
    *("NVIDIA B200", "Tesla V100-SXM2-32GB", "NVIDIA RTX PRO 6000 Blackwell Server Edition", "", "?"),
)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_gpu_has_one_name_here_and_in_the_engine(name: str, load: Load) -> None:
    assert load().__dict__["_slug"](name) == gpu_slug(name)


def test_names_of_gpus() -> None:
    wanted = {
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H200": "h200",
        "NVIDIA H100 NVL": "h100-nvl",
        "NVIDIA GB200": "gb200",
        "B200": "b200",
    }
    assert {name: gpu_slug(name) for name in wanted} == wanted


def test_what_is_asked_wrongly_is_said(load: Load) -> None:
    module = load(document())
    with pytest.raises(ValueError, match="'fp16'"):
        module.settings(8, dtype="fp16")
    with pytest.raises(ValueError, match="by top_k"):
        module.settings(8, top_k=8)


def test_a_deepep_without_config_is_told_apart(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(document())
    monkeypatch.setitem(sys.modules, "deep_ep", types.ModuleType("deep_ep"))
    with pytest.raises(RuntimeError, match="computes its settings itself"):
        module.dispatch_config(8)


def test_the_module_is_where_modulefiles_point() -> None:
    record = SimpleNamespace(prefix="/p")
    assert modulefiles.tuned_folder(record) == f"/p/{shelf.PYTHON_FOLDER}"  # type: ignore[arg-type]


@pytest.mark.usefixtures("programs")
def test_importing_it_needs_nothing_and_reads_nothing(tmp_path: Path) -> None:
    """As after `module load deepep`: the folder is on PYTHONPATH, whether it is there or not."""
    place = PrefixHandle(HERE, str(make_prefix(tmp_path)), RECIPES)
    environment = {**os.environ, "PYTHONPATH": f"{place.prefix}/{shelf.PYTHON_FOLDER}"}
    command = [
        sys.executable,
        "-c",
        "import deepep_tuned, sys; print(len(deepep_tuned.available()), *{'torch', 'deep_ep'} & set(sys.modules))",
    ]
    before = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "No module named 'deepep_tuned'" in before.stderr, "before the first run there is no such module"
    transport = ConnectionPool([HERE])
    shelf.store(transport, place, [document()], MODULE)
    transport.close()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("1\n", "")
    (Path(place.prefix) / "tuning/broken.json").write_text("{")
    silent = [sys.executable, "-W", "error", "-c", "import deepep_tuned"]
    assert subprocess.run(silent, env=environment, check=False).returncode == 0
