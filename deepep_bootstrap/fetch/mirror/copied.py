"""What the index of a mirror says of the package repositories in it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.core.toml import Form
from deepep_bootstrap.fetch.locations import packages_path
from deepep_bootstrap.lock.packages import FINGERPRINT

NAME = Form(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+", "DISTRIBUTION/REPOSITORY of a lock")


@dataclass(frozen=True)
class Copied:
    """A repository of which a mirror has a part: as the lock names it and its key, for which packages of the lock (`wanted`), and for
    which architectures."""

    url: str
    suite: str
    components: tuple[str, ...]
    key_url: str
    fingerprint: str
    wanted: tuple[str, ...]
    archs: tuple[str, ...]

    def lacks(self, wish: Copied) -> tuple[str, str] | None:
        """Return how this is not what is wished, found and wanted; None where it is. It may have more packages."""
        for name in ("url", "suite", "key_url", "fingerprint"):
            if getattr(self, name) != getattr(wish, name):
                return getattr(self, name) or "none", getattr(wish, name) or "none"
        for name in ("components", "wanted", "archs"):
            if missing := [word for word in getattr(wish, name) if word not in getattr(self, name)]:
                return " ".join(getattr(self, name)) or "none", " ".join(missing)
        return None


KEYS = {field.name for field in fields(Copied)}
LISTS = ("components", "wanted", "archs")


def render(copied: Mapping[str, Copied]) -> dict[str, dict[str, Any]]:
    """Return what the index has of them, for JSON."""
    return {name: {key: list(value) if key in LISTS else value for key, value in asdict(each).items()} for name, each in copied.items()}


def read(document: Mapping[str, Any]) -> dict[str, Copied]:
    """Return what `render` wrote, after `faults` found none."""
    return {
        name: Copied(
            url=each["url"],
            suite=each["suite"],
            components=tuple(each["components"]),
            key_url=each["key_url"],
            fingerprint=each["fingerprint"],
            wanted=tuple(each["wanted"]),
            archs=tuple(each["archs"]),
        )
        for name, each in document.items()
    }


def faults(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with it, for any JSON object whatever."""
    for name, each in document.items():
        if not NAME.fits(name):
            yield f"packages: {name!r:.80} is not {NAME.words}"
        elif type(each) is not dict or set(each) != KEYS or not all(_fits(key, value) for key, value in each.items()):
            yield f"packages: {name!r:.80} is no repository"


def _fits(key: str, value: object) -> bool:
    if key in LISTS:
        return type(value) is list and all(isinstance(word, str) and word.isprintable() for word in value)
    if not isinstance(value, str):
        return False
    if key == "fingerprint":
        return FINGERPRINT.fits(value)
    if key == "suite":
        return value.isprintable()
    with suppress(Trouble):
        return packages_path(value) != ""
    return False
