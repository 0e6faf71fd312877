"""A terminal on which somebody has typed an answer already."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, answer: str, question: str) -> Iterator[None]:
    """Give this process a terminal to ask on, where somebody has typed `answer`; `question` must have been asked."""
    person, ours = os.openpty()
    os.write(person, answer.encode())
    with (
        io.TextIOWrapper(os.fdopen(ours, "r+b", buffering=0), write_through=True) as shown,
        monkeypatch.context() as patch,
    ):
        patch.setattr(sys, "stdin", shown)
        patch.setattr(sys, "stderr", shown)
        yield
    pieces = []
    with (
        os.fdopen(person, "rb", buffering=0) as said,
        suppress(OSError),
    ):  # after the last piece, since nobody has this terminal any more
        while piece := said.read(100):
            pieces.append(piece)
    assert f"{question} [y/N] ".encode() in b"".join(pieces)
