"""Names of the store: digests and entry names from inputs. Pure; the file work is done by recipes on the prefix's host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One store entry to be. `inputs` is everything its digest covers; `name` is `<hash32>-<kind>-<version>`.

    `needs` are the entry names that must be published before it is complete, `early` those whose headers suffice to begin.
    """

    kind: str
    version: str
    inputs: Mapping[str, object]
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the directory name under PREFIX/store."""
        return f"{digest(self.inputs)}-{self.kind}-{self.version}"


def digest(inputs: Mapping[str, object]) -> str:
    """Return the 32 characters (Nix base-32, 160 bits of SHA-256) that stand for `inputs`, independent of key order."""
    raise NotImplementedError
