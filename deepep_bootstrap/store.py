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


@dataclass(frozen=True)
class Site:
    """What sbatch files take from the hosts file; empty fields give no directive. `gres` is already resolved ("gpu:8" or "")."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    gres: str = ""
    sbatch_args: tuple[str, ...] = ()


@dataclass(frozen=True)
class StackRecord:
    """Everything a generation's files say of one stack: the rendered offer is a pure function of these records.

    `module` is the modulefile's name (`deepep/1.2.1-8a07e7e-v1`); `deepep`, `nvshmem`, `gdrcopy`, `python` are entry names
    (`python` is "" where `external_python` holds an interpreter's path); `environment` the profile's variables in order.
    """

    stack: str
    module: str
    prefix: str
    deepep: str
    nvshmem: str
    gdrcopy: str
    python: str
    external_python: str
    python_version: str
    cuda_home: str
    archs: tuple[str, ...]
    profile: str
    environment: Mapping[str, str]
    site: Site


@dataclass(frozen=True)
class Offer:
    """The whole offer of a prefix: the stacks by name, and which one plain `module load deepep` means."""

    default_stack: str
    stacks: Mapping[str, StackRecord]
    templates: str
    """Digest of the template texts, so that a changed template is a changed offer."""


def offer_digest(offer: Offer) -> str:
    """Return the digest that tells whether two offers are equal."""
    raise NotImplementedError


def read_offer(manifest: str) -> Offer | None:
    """Return the offer recorded in a generation's manifest.json text (its key "offer"); None for an empty text."""
    raise NotImplementedError
