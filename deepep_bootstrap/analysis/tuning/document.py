"""A tuning document: the settings of DeepEP's kernels that one run found best, as values and as the text of
a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import fields

from deepep_bootstrap.analysis.results.model import OPERATIONS, Point
from deepep_bootstrap.core.errors import Problem, Trouble

SCHEMA = 1
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,180}\.json")


class TunedSetting(Struct, frozen=True):
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


class Key(Struct, frozen=True):
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


class PastSetting(Struct, frozen=True):
    """A run in short: when it ended (seconds since 1970), microseconds of its best settings by operation, and
    whether it was `used`: its settings became the document's."""

    run: str
    measured: int
    deepep: str
    us: Mapping[str, float]
    used: bool


class Document(Struct, frozen=True):
    """The settings for one key by operation (all of OPERATIONS, with one number of SMs), the run that found them,
    its whole sweep, and the runs known by now, oldest first."""

    key: Key
    test: str
    deepep: str
    run: str
    measured: int
    settings: Mapping[str, TunedSetting]
    sweep: tuple[Point, ...] = ()
    history: tuple[PastSetting, ...] = ()


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
        **msgspec.to_builtins(document.key),
        **{name: getattr(document, name) for name in ("test", "deepep", "run", "measured")},
        "settings": msgspec.to_builtins(document.settings),
        "history": msgspec.to_builtins(document.history),
    }
    points = ",\n".join("    " + json.dumps(point) for point in msgspec.to_builtins(document.sweep))
    text = json.dumps(head, indent=2, ensure_ascii=False).removesuffix("\n}")
    return f'{text},\n  "sweep": [\n{points}\n  ]\n}}\n'


class _SettingsForm(Struct, frozen=True):
    """`settings` of a document: one for each of OPERATIONS."""

    dispatch_fp8: TunedSetting
    dispatch_bf16: TunedSetting
    combine: TunedSetting


class _DocumentForm(Struct, frozen=True):
    """A document as JSON has it, without the fields of Key, which stand beside these."""

    test: str
    deepep: str
    run: str
    measured: int
    settings: _SettingsForm
    history: tuple[PastSetting, ...]
    sweep: tuple[Point, ...]


def parse_document(text: str, where: str) -> Document:
    """Return the document in `text`; Trouble that names `where` for a text that is none, or holds what no document
    can."""
    try:
        found = msgspec.json.decode(text)
        if found["schema"] != SCHEMA:
            raise ValueError(f"schema {found['schema']!r}")
        form = msgspec.convert(found, _DocumentForm)
        document = Document(
            key=msgspec.convert(found, Key),
            test=form.test,
            deepep=form.deepep,
            run=form.run,
            measured=form.measured,
            settings={name: getattr(form.settings, name) for name in OPERATIONS},
            sweep=form.sweep,
            history=form.history,
        )
        _check_numbers(document)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        problem = Problem(
            where, "this is no tuning document and is left out", reason[:200], f"schema {SCHEMA}", "removing the file"
        )
        raise Trouble(problem) from None
    return document


def _check_numbers(document: Document) -> None:
    """Raise ValueError for a number below zero: none of a document's can be."""
    _check_fields("$", document)
    _check_fields("$", document.key)
    for name, setting in document.settings.items():
        _check_fields(f"$.settings.{name}", setting)
    for number, past in enumerate(document.history):
        _check_fields(f"$.history[{number}]", past)
        for name, microseconds in past.us.items():
            _check_sign(f"$.history[{number}].us.{name}", microseconds)
    for number, point in enumerate(document.sweep):
        _check_fields(f"$.sweep[{number}]", point)


def _check_fields(place: str, record: Any) -> None:
    for each in fields(record):
        _check_sign(f"{place}.{each.name}", getattr(record, each.name))


def _check_sign(place: str, value: object) -> None:
    if isinstance(value, int | float) and value < 0:
        raise ValueError(f"{value} is below zero - at `{place}`")
