"""Settings of DeepEP's kernels that were measured on this cluster, in place of upstream's defaults.

    import deepep_tuned

    dispatch = deepep_tuned.dispatch_config(group.size(), hidden=7168, dtype="fp8")
    combine = deepep_tuned.combine_config(group.size(), hidden=7168, dtype="fp8")
    buffer.dispatch(x, ..., config=dispatch)
    buffer.combine(y, handle, config=combine)

The documents beside this file's folder were written by `invoke test` (kinds intranode and internode). Which one counts:

- The GPU and the number of ranks must be the same (and the number of nodes, if given). What was measured on other
  numbers does not
  carry over: the kernels divide their buffers by the number of nodes and refuse chunks that no longer fit.
- Among these, the stack that is loaded comes before others, then the hidden size nearest to `hidden`, then the nearest
  `tokens`,
  `topk` and `experts` where they are given (near means a small ratio), then the newest measurement.
- Where nothing is left, upstream's defaults are used, and a warning says so once.

Dispatch and combine of one document have the same number of SMs, as they must: combine reads what dispatch laid out for
its channels. This module needs nothing but Python; deep_ep (and so torch) is imported when a Config is asked for.
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import deep_ep

__all__ = ["available", "combine_config", "dispatch_config", "settings"]

SCHEMA = 1
OPERATIONS = ("dispatch_fp8", "dispatch_bf16", "combine")
KEYS = {"gpu": str, "nodes": int, "ranks": int, "tokens": int, "hidden": int, "topk": int, "experts": int, "stack": str}
ABOUT = {"run": str, "measured": int, "deepep": str}
GPUS = "/proc/driver/nvidia/gpus"


def available() -> list[dict[str, Any]]:
    """Return what was measured: for each document its file, gpu, nodes, ranks, tokens, hidden, topk, experts, stack,
    run, deepep (the commit) and measured (seconds since 1970)."""
    return [{name: document[name] for name in ("file", *KEYS, *ABOUT)} for document in _documents()]


def settings(num_ranks: int, hidden: int | None = None, dtype: str = "fp8", **wanted: Any) -> dict[str, Any] | None:
    """Return the settings as plain numbers, or None where nothing fits.

    `dispatch` and `combine` are the arguments of deep_ep.Config, `num_sms` is what Buffer.set_num_sms takes. `exact`
    says whether all that was asked is what was measured; the other entries say what that was, as in available().
    `dtype` is that of the dispatched tokens, "fp8" or "bf16" (combine is always bf16). `wanted` may hold gpu (found out
    by itself), nodes, tokens, topk, experts and stack (the one that is loaded); ValueError for other words.
    """
    if dtype not in ("fp8", "bf16"):
        raise ValueError(f"dtype is {dtype!r}, not 'fp8' or 'bf16'")
    if unknown := sorted(set(wanted) - set(KEYS)):
        raise ValueError(f"nothing is measured by {', '.join(unknown)}, but by {', '.join(KEYS)}")
    asked = {
        name: value for name, value in {**wanted, "ranks": num_ranks, "hidden": hidden}.items() if value is not None
    }
    document = _find(asked)
    if document is None:
        return None
    dispatch, combine = (_arguments(document["settings"][name]) for name in (f"dispatch_{dtype}", "combine"))
    exact = all(document[name] == (_slug(value) if name == "gpu" else value) for name, value in asked.items())
    about = {name: document[name] for name in ("file", *KEYS, *ABOUT)}
    return {"num_sms": dispatch["num_sms"], "dispatch": dispatch, "combine": combine, "exact": exact, **about}


def dispatch_config(num_ranks: int, hidden: int | None = None, dtype: str = "fp8", **wanted: Any) -> deep_ep.Config:
    """Return the Config for Buffer.dispatch; upstream's own where nothing fits. The arguments are those of
    settings()."""
    return _config("dispatch", num_ranks, settings(num_ranks, hidden, dtype, **wanted))


def combine_config(num_ranks: int, hidden: int | None = None, dtype: str = "fp8", **wanted: Any) -> deep_ep.Config:
    """Return the Config for Buffer.combine; upstream's own where nothing fits. The arguments are those of
    settings()."""
    return _config("combine", num_ranks, settings(num_ranks, hidden, dtype, **wanted))


def _config(operation: str, num_ranks: int, found: dict[str, Any] | None) -> deep_ep.Config:
    import deep_ep

    if not hasattr(deep_ep, "Config"):
        raise RuntimeError("this DeepEP computes its settings itself and takes no Config")
    if found is not None:
        return deep_ep.Config(**found[operation])
    _say(
        f"nothing was measured with {num_ranks} ranks on {_gpu() or 'this GPU'}: DeepEP's own defaults are used "
        f"(invoke test --kind={'intranode' if num_ranks <= 8 else 'internode'} measures)"
    )
    return getattr(deep_ep.Buffer, f"get_{operation}_config")(num_ranks)


def _arguments(setting: dict[str, Any]) -> dict[str, int]:
    """Return the arguments of deep_ep.Config; those of RDMA only where the test set them, so that the Config is the
    test's own."""
    names = {
        "num_sms": "sms",
        "num_max_nvl_chunked_send_tokens": "nvl_chunk",
        "num_max_nvl_chunked_recv_tokens": "nvl_buffer",
        "num_max_rdma_chunked_send_tokens": "rdma_chunk",
        "num_max_rdma_chunked_recv_tokens": "rdma_buffer",
    }
    return {name: setting[key] for name, key in names.items() if setting.get(key) is not None}


def _find(asked: dict[str, Any]) -> dict[str, Any] | None:
    gpu = _slug(asked.get("gpu") or _gpu())
    known = {document["gpu"] for document in _documents()}
    if not gpu and len(known) == 1:
        gpu = next(iter(known))  # no driver here, as on a login node, and only one kind of GPU it can be about
    same = {"gpu": gpu, **{name: asked[name] for name in ("ranks", "nodes") if name in asked}}
    fitting = [document for document in _documents() if all(document[name] == value for name, value in same.items())]
    stack = asked.get("stack") or os.environ.get("DEEPEP_STACK", "")

    def distance(document: dict[str, Any]) -> tuple[Any, ...]:
        apart = [
            abs(math.log(document[name] / asked[name]))
            for name in ("hidden", "tokens", "topk", "experts")
            if name in asked
        ]
        return (document["stack"] != stack, *apart, -document["measured"])

    return min(fitting, key=distance, default=None)


@cache
def _gpu() -> str:
    """Return the type of this node's GPUs, "" where there is none or more than one type."""
    models = set()
    for path in Path(GPUS).glob("*/information"):
        try:
            models |= {_slug(model) for model in re.findall(r"^Model:[ \t]*(.+)$", path.read_text(), re.MULTILINE)}
        except OSError:
            continue
    return models.pop() if len(models) == 1 else ""


def _slug(name: str) -> str:
    """Return a GPU's type as the documents write it: "h100" of "NVIDIA H100 80GB HBM3"."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    return "-".join(
        word for word in words if not re.fullmatch(r"nvidia|tesla|graphics|device|\d+gb|hbm\d*e?|sxm\d*", word)
    )


@cache
def _documents() -> tuple[dict[str, Any], ...]:
    """Return all documents that can be read, in order of their names; the others are named in a warning."""
    found = []
    for path in sorted(Path(__file__).resolve().parent.parent.glob("[a-z0-9]*.json")):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            _check(document)
        except FileNotFoundError:
            continue  # replaced while we looked
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            _say(f"{path} is left out: {type(error).__name__}: {error}")
            continue
        found.append({**document, "file": str(path)})
    return tuple(found)


def _check(document: dict[str, Any]) -> None:
    if document["schema"] != SCHEMA:
        raise ValueError(f"its schema is {document['schema']!r}")
    for name, kind in {**KEYS, **ABOUT}.items():
        if type(document[name]) is not kind or (kind is int and document[name] <= 0 and name != "measured"):
            raise ValueError(f"{name} is {document[name]!r}")
    for operation in OPERATIONS:
        numbers = _arguments(document["settings"][operation])
        if len(numbers) not in (3, 5) or any(type(number) is not int or number <= 0 for number in numbers.values()):
            raise ValueError(f"the settings of {operation} are {numbers!r}")


@cache
def _say(text: str) -> None:
    """Warn, once for each text."""
    warnings.warn(f"deepep_tuned: {text}", stacklevel=4)
