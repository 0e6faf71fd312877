"""A run that changes something: its name, and its logs on the control machine."""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.core.guard import state_dir


@dataclass(frozen=True)
class Run:
    """One run that changes something: its name (time, verb, random part) and the folder its logs go to on the control machine."""

    name: str
    folder: Path

    @classmethod
    def start(cls, verb: str) -> Run:
        """Return a new run with its folder; Trouble where that cannot be made, before anything is done that nobody could look up."""
        name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{verb}-{secrets.token_hex(3)}"
        folder = state_dir() / "logs" / name
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            remedy = "XDG_STATE_HOME=/a/directory/you/may/write"
            raise Trouble(Problem(str(folder.parent), "logs cannot be written there", error.strerror or str(error), try_=remedy)) from None
        return cls(name, folder)

    @classmethod
    def none(cls) -> Run:
        """Return what stands for a run where nothing is done and nothing logged."""
        return cls("", Path(os.devnull))

    def log(self, host: str, step: str, text: str) -> Path:
        """Append `text` to the log of one step on one host and return the file's path."""
        path = self.folder / host / f"{step}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
        return path
