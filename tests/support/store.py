"""A prefix with made-up entries and generations, made by the recipes that make real ones, and a transport to this
machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from deepep_bootstrap.core.recipes import NIX_BASE32
from deepep_bootstrap.prefix import generations, history
from deepep_bootstrap.prefix.contents import Holdings, entry_names
from deepep_bootstrap.prefix.generations import Content, PrefixHandle
from deepep_bootstrap.remote.fleet import ConnectionPool
from tests.support.build import HERE, RECIPES, make_prefix, run_bash, script

RECORD = script(
    "lib.sh",
    "prefix/lib/share.sh",
    "prefix/lib/files.sh",
    extra='share_tree "$1"; record_files "$1" "$(mktemp -d)/work"',
)


def entry_name(kind: str, version: str = "1.0") -> str:
    """Return a name that looks like a store entry's, always the same for the same words."""
    letters = [
        NIX_BASE32[(ord(char) * 7 + position) % 32] for position, char in enumerate((f"{kind}-{version}" * 32)[:32])
    ]
    return f"{''.join(letters)}-{kind}-{version}"


@dataclass
class Prefix:
    """A prefix on this machine."""

    path: Path
    transport: ConnectionPool
    keeps_records: bool = True
    """Whether generations keep the sums of the records of their entries; earlier versions did not."""

    @property
    def place(self) -> PrefixHandle:
        return PrefixHandle(HERE, str(self.path), RECIPES)

    def entry(
        self,
        name: str,
        needs: Sequence[str] = (),
        content: bytes = b"text\n",
        inputs: Mapping[str, object] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> Path:
        """Put an entry into the store as publish.sh leaves it, with more `files` by their path in it."""
        folder = self.path / "store" / name
        (folder / "lib").mkdir(parents=True)
        (folder / "lib/content").write_bytes(content)
        (folder / "lib/content.so").symlink_to("content")
        manifest = {
            "schema": 1,
            "name": name,
            "needs": list(needs),
            "inputs": dict(inputs or {}),
            "bytes": len(content),
        }
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=2))
        for each, data in (files or {}).items():
            (folder / each).parent.mkdir(parents=True, exist_ok=True)
            (folder / each).write_bytes(data)
        for path in (folder / "lib/content", folder / "manifest.json", *(folder / each for each in files or {})):
            path.chmod(0o444)
        done = run_bash(RECORD, {"PREFIX": str(self.path)}, str(folder))
        assert done.returncode == 0, done.stderr
        return folder

    def offer(self, *names: str, stack: str = "v1", lock: str = "", **record: object) -> int:
        """Publish a generation whose one stack names these entries, and return its number."""
        values = {
            "stack": stack,
            "module": f"deepep/1-{stack}",
            **{name.split("-")[1]: name for name in names},
            **record,
        }
        return self.offer_records({stack: values}, lock)

    def offer_records(self, records: Mapping[str, Mapping[str, object]], lock: str = "") -> int:
        """Publish a generation with these records of stacks, the first one its default, and return its number."""
        manifest = {
            "schema": 1,
            "generation": 0,
            "created": "2026-01-01T00:00:00Z",
            "by": "admin",
            "lock_digest": "abcdefghijklmn",
            "offer": {"default_stack": next(iter(records)), "stacks": records, "templates": ""},
            "hosts": ["n001", "n002"],
        }
        if self.keeps_records:
            manifest["records"] = self.look().records(entry_names(records))
        files = [
            Content("manifest.json", json.dumps(manifest, indent=2).encode()),
            Content("modulefiles/deepep/1", b"x"),
        ]
        files += [Content("deepep.lock.toml", lock.encode())] if lock else []
        done = generations.publish_generation(self.transport, self.place, files, self.look().current)
        assert not done.stale
        return done.generation

    def look(self, *, locks: bool = False) -> Holdings:
        return history.read_contents(self.transport, self.place, locks=locks)

    def names(self) -> set[str]:
        """Every name in the store, hidden ones too."""
        return {path.name for path in (self.path / "store").iterdir()}

    def numbers(self) -> list[str]:
        """Every name among the generations, hidden ones too."""
        return sorted(path.name for path in (self.path / "generations").iterdir())


@pytest.fixture
def prefix(programs: None, tmp_path: Path) -> Iterator[Prefix]:
    """An empty prefix."""
    fleet = ConnectionPool([HERE])
    yield Prefix(make_prefix(tmp_path), fleet)
    fleet.close()
