"""What a person needs to try the program on a lab: the stand-in sources beside it, and a file to source after which
every verb finds hosts, lock and mirrors without flags.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from deepep_bootstrap.lab import cluster_lab
from deepep_bootstrap.lab.cluster_lab import Lab

STANDIN = "https://example.invalid/standin/"
"""What the addresses of the demo lock begin with; nothing answers there."""

LOCK = "demo.lock.toml"


def write_try_file(lab: Lab) -> Path:
    """Make the stand-in sources and DIR/try.sh, again where they are there already; return the file."""
    sources, upstreams = lab.path / "standin", cluster_lab.data_folder() / "upstreams"
    _make_sources(sources, upstreams / "make.py")
    # A copy, for people who cannot read the source tree.
    lock = Path(shutil.copyfile(upstreams / LOCK, lab.path / LOCK))
    mirrors = f"{STANDIN}={sources}/git/standin/\nindex:standin={sources}/wheels"
    values = {
        "DEEPEP_SSH_CONFIG": str(lab.ssh_config),
        "DEEPEP_HOSTS": str(lab.hosts_file),
        "DEEPEP_LOCK": str(lock),
        "DEEPEP_MIRRORS": mirrors,
    }
    lines = [
        f"# Read by a shell: . {lab.try_file}",
        "# Then every verb works on this lab without flags, with stand-ins for the sources that need no GPU.",
        *(f"export {name}={shlex.quote(value)}" for name, value in values.items()),
    ]
    lab.try_file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return lab.try_file


def _make_sources(folder: Path, script: Path) -> None:
    """Run the script that makes them, under sudo as the person who asked: git reads nobody else's repositories."""
    folder.mkdir(exist_ok=True)
    person: list[str | Path] = []
    user, group = os.environ.get("SUDO_UID", ""), os.environ.get("SUDO_GID", "")
    if os.geteuid() == 0 and user.isdigit() and group.isdigit():
        os.chown(folder, int(user), int(group))
        person = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups"]
    cluster_lab.must([*person, sys.executable, script, folder])
