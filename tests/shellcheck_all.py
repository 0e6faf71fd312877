"""Run shellcheck on every shell file of the tree, found by suffix or first line, so that a new file cannot be
forgotten."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def is_shell(path: Path) -> bool:
    """Return whether `path` is a shell script, by its suffix or its first line."""
    if path.suffix in {".sh", ".sbatch"}:
        return True
    if path.suffix in {".j2", ".log"}:  # the tests render templates and lint the result; a log may quote a script
        return False
    with path.open("rb") as file:
        first = file.readline(80)
    return first.startswith(b"#!") and any(shell in first for shell in (b"/sh", b"bash", b"dash"))


def main() -> int:
    """Lint everything git knows or could add; exit with shellcheck's code."""
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = [name for name in listing.stdout.splitlines() if (ROOT / name).is_file() and is_shell(ROOT / name)]
    print(f"shellcheck: {len(files)} files")
    return subprocess.run(["shellcheck", "-x", "--severity=style", *files], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
