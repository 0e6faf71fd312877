"""A tuning document: the settings of DeepEP's kernels that one run found best, as values and as the text of
a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deepep_bootstrap.analysis.results.model import OPERATIONS, Point
from deepep_bootstrap.core.errors import Problem, Trouble

SCHEMA = 1
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,180}\.json")


@dataclass(frozen=True)
class TunedSetting:
    """Settings of one operation, in tokens (buffers as the sweep had them; those of RDMA are None on one node), and
    what they gave: GB/s and microseconds as in figures.Best."""

    sms: int
    nvl_chunk: int
    nvl_buffer: int
    rdma_chunk: int | None
    rdma_buffer: int | None
    nvl_gbs: float | None
    rdma_gbs: float | None
    us: float


@dataclass(frozen=True)
class Key:
    """What settings are for. `gpu` as gpu_slug gives it, `stack` the stack of the lock that DeepEP belongs to."""

    gpu: str
    nodes: int
    ranks: int
    tokens: int
    hidden: int
    topk: int
    experts: int
    stack: str

    @property
    def file(self) -> str:
        """Return the name of the document."""
        shape = f"{self.tokens}x{self.hidden}-top{self.topk}of{self.experts}"
        return (
            re.sub(r"[^a-z0-9._-]+", "-", f"{self.gpu}-{self.nodes}n-{self.ranks}r-{shape}-{self.stack}".lower())
            + ".json"
        )


@dataclass(frozen=True)
class PastSetting:
    """A run in short: when it ended (seconds since 1970), microseconds of its best settings by operation, and
    whether it was `used`: its settings became the document's."""

    run: str
    measured: int
    deepep: str
    us: Mapping[str, float]
    used: bool


@dataclass(frozen=True)
class Document:
    """The settings for one key by operation (all of OPERATIONS, with one number of SMs), the run that found them,
    its whole sweep, and the runs known by now, oldest first."""

    key: Key
    test: str
    deepep: str
    run: str
    measured: int
    settings: Mapping[str, TunedSetting]
    sweep: Sequence[Point] = ()
    history: Sequence[PastSetting] = ()


def gpu_slug(name: str) -> str:
    """Return a GPU's type for file names: "h100" of "NVIDIA H100 80GB HBM3" and of "H100", "h100-nvl" where links
    differ. deepep_tuned has the same rule."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    return "-".join(
        word for word in words if not re.fullmatch(r"nvidia|tesla|graphics|device|\d+gb|hbm\d*e?|sxm\d*", word)
    )


def render_document(document: Document) -> str:
    """Return the text of a document, one point of the sweep a line."""
    head = {
        "schema": SCHEMA,
        **asdict(document.key),
        **{name: getattr(document, name) for name in ("test", "deepep", "run", "measured")},
    }
    head["settings"] = {name: asdict(setting) for name, setting in document.settings.items()}
    head["history"] = [asdict(past) for past in document.history]
    points = ",\n".join("    " + json.dumps(asdict(point)) for point in document.sweep)
    text = json.dumps(head, indent=2, ensure_ascii=False).removesuffix("\n}")
    return f'{text},\n  "sweep": [\n{points}\n  ]\n}}\n'


def parse_document(text: str, where: str) -> Document:
    """Return the document in `text`; Trouble that names `where` for a text that is none, or holds what no document
    can."""
    try:
        found: Any = json.loads(text, parse_constant=_refuse)
        if found["schema"] != SCHEMA:
            raise ValueError(f"schema {found['schema']!r}")
        return _read(found)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        said = f"no {error}" if isinstance(error, KeyError) else str(error)
        problem = Problem(
            where, "this is no tuning document and is left out", said[:200], f"schema {SCHEMA}", "removing the file"
        )
        raise Trouble(problem) from None


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is no measured value")


def _read(found: Mapping[str, Any]) -> Document:
    key = Key(**{name: _fit(name, kind, found[name]) for name, kind in Key.__annotations__.items()})
    settings = {name: _record(TunedSetting, found["settings"][name]) for name in OPERATIONS}
    history = [_record(PastSetting, {**past, "us": dict(past["us"])}) for past in found["history"]]
    sweep = tuple(_record(Point, point) for point in found["sweep"])
    test, deepep, run = (_fit(name, "str", found[name]) for name in ("test", "deepep", "run"))
    return Document(key, test, deepep, run, _fit("measured", "int", found["measured"]), settings, sweep, tuple(history))


def _record(kind: Any, table: Mapping[str, Any]) -> Any:
    return kind(**{name: _fit(name, wanted, table[name]) for name, wanted in kind.__annotations__.items()})


def _fit(name: str, wanted: str, value: Any) -> Any:
    """Return a value that is what the annotation `wanted` says; ValueError where it is not."""
    kinds: dict[str, tuple[type, ...]] = {
        "int": (int,),
        "float": (int, float),
        "str": (str,),
        "bool": (bool,),
        "None": (type(None),),
    }
    if wanted.startswith("Mapping"):
        return {str(each): _fit(f"{name}.{each}", "float", number) for each, number in value.items()}
    fits = isinstance(value, tuple(kind for part in wanted.split(" | ") for kind in kinds[part]))
    if not fits or (isinstance(value, bool) and wanted != "bool") or (isinstance(value, int | float) and value < 0):
        raise ValueError(f"{name} is {value!r}")
    return value
