"""What a wheel has beside the package: the lock, recipes, environment, examples of hosts files and pages of the
documentation as its data, the commit that it was built from, the manual page and the scripts of completion.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

DATA = "deepep_bootstrap/data"
BROUGHT = ("deepep.lock.toml", "recipes", "env", "hosts", "docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
COMMIT = "commit"
"""The file with the commit: in the wheel's data, and at the top of a source archive, which has no .git."""


class CustomBuildHook(BuildHookInterface[Any]):
    """Adds them; an editable installation finds the source tree itself."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the files that come along."""
        if version == "editable":
            return
        root = Path(self.root)
        made = Path(tempfile.mkdtemp(prefix="deepep-bootstrap-build-"))
        (made / COMMIT).write_text(f"{commit(root)}\n", encoding="utf-8")
        included = build_data["force_include"]
        if self.target_name == "sdist":
            included[str(made / COMMIT)] = COMMIT
            return
        included[str(made / COMMIT)] = f"{DATA}/{COMMIT}"
        for name in BROUGHT:
            included[str(root / name)] = f"{DATA}/{name}"
        sys.path.insert(0, str(root))
        from deepep_bootstrap.cli.manual import manual

        (made / "deepep-bootstrap.1").write_text(manual(self.metadata.version), encoding="utf-8")
        build_data["shared_data"][str(made / "deepep-bootstrap.1")] = "share/man/man1/deepep-bootstrap.1"


def commit(root: Path) -> str:
    """Return the commit of the source tree, "" where nobody knows."""
    if (root / COMMIT).is_file():
        return (root / COMMIT).read_text(encoding="utf-8").strip()
    if not (root / ".git").exists():
        return ""
    words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
