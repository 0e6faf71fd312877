"""Host recipes on a made-up machine: a folder as its root, tools of its own in front of the real ones, and a record
of their calls."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.paths import ROOT

RECIPES = ROOT / "recipes"
LIBRARIES = (
    "lib.sh",
    "host/lib/files.sh",
    "host/lib/packages.sh",
    "host/lib/repositories.sh",
    "host/lib/keys.sh",
    "host/lib/kernel-modules.sh",
    "host/lib/hook.sh",
)
REAL_TOOLS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Said:
    """What a recipe said: exit code, data lines, talk."""

    code: int
    data: dict[str, str] = field(default_factory=dict)
    talk: str = ""

    @property
    def state(self) -> str:
        return self.data.get("state", f"none, exit code {self.code}: {self.talk}")


class Host:
    """A machine below `root`. Recipes see it through HOST_ROOT; nothing of the real one is written."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tools = root / "tools"
        self.calls_file = root / "calls"
        self.inside: tuple[str, ...] = ()
        self.tools.mkdir(parents=True)
        self.boot("first-boot")

    def write(self, path: str, text: str = "", mode: int = 0o644) -> Path:
        """Put a file at `path` of the machine and return where it is."""
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        file.chmod(mode)
        return file

    def read(self, path: str) -> str:
        return (self.root / path.lstrip("/")).read_text(encoding="utf-8")

    def has(self, path: str) -> bool:
        return (self.root / path.lstrip("/")).exists()

    def boot(self, name: str) -> None:
        self.write("/proc/sys/kernel/random/boot_id", f"{name}\n")

    def command_line(self, text: str) -> None:
        """Let recipes and modprobe see `text` as the kernel command line. Root alone can cover that of the machine."""
        if os.geteuid() != 0:
            pytest.skip("needs root to cover /proc/cmdline (make test uses sudo)")
        file = self.write("/proc/cmdline", text + "\n")
        self.inside = ("unshare", "-m", "sh", "-c", 'mount --bind "$0" /proc/cmdline && exec "$@"', str(file))

    def load(self, *modules: str) -> None:
        for module in modules:
            self.write(f"/sys/module/{module}/refcnt", "0\n")

    def unload(self, module: str) -> None:
        (self.root / "sys/module" / module / "refcnt").unlink()
        (self.root / "sys/module" / module).rmdir()

    def loaded(self) -> set[str]:
        return {path.name for path in (self.root / "sys/module").glob("*")}

    def tool(self, name: str, body: str = "") -> None:
        """Put a tool in front of the real ones; it records its call, then runs `body` (sh)."""
        self.write(f"/tools/{name}", f'#!/bin/sh\necho "{name} $*" >>"{self.calls_file}"\n{body}\n', 0o755)

    def module_tools(self) -> None:
        """rmmod and modprobe that act on /sys/module of this machine; modprobe reads configuration like the real
        one."""
        self.tool(
            "rmmod",
            f'[ ! -e "{self.root}/busy-$1" ] || {{ echo "rmmod: ERROR: Module $1 is in use" >&2; exit 1; }}; '
            f'rm -r "{self.root}/sys/module/$1"',
        )
        self.write(
            "/tools/modprobe",
            f'#!/bin/sh\n[ "$1" != --showconfig ] || exec /usr/sbin/modprobe "$@"\n'
            f'echo "modprobe $*" >>"{self.calls_file}"\n[ ! -e "{self.root}/broken-$1" ] || exit 1\n'
            f'mkdir -p "{self.root}/sys/module/$1"; echo 0 >"{self.root}/sys/module/$1/refcnt"\n'
            f'[ ! -e "{self.root}/after-$1" ] || . "{self.root}/after-$1"\n',
            0o755,
        )

    def calls(self) -> list[str]:
        """Return the calls since the last time this was asked."""
        if not self.calls_file.exists():
            return []
        lines = self.calls_file.read_text(encoding="utf-8").splitlines()
        self.calls_file.unlink()
        return lines

    def run(self, script: str, *arguments: str, **env: str) -> Said:
        """Run bash text behind the libraries."""
        text = "\n".join((RECIPES / name).read_text(encoding="utf-8") for name in LIBRARIES) + "\n" + script
        given = {"PATH": f"{self.tools}:{REAL_TOOLS}", "HOME": "/root", **env, "HOST_ROOT": str(self.root)}
        done = subprocess.run(
            [*self.inside, "bash", "-s", "--", *arguments],
            input=text,
            capture_output=True,
            text=True,
            env=given,
            check=False,
        )
        lines = [line.partition("=") for line in done.stdout.splitlines()]
        assert all(equals for _, equals, _ in lines), done.stdout
        data = {key: value for key, _, value in lines}
        assert len(data) == len(lines), f"a key twice: {done.stdout}"
        return Said(done.returncode, data, done.stderr)

    def recipe(self, name: str, verb: str, **env: str) -> Said:
        return self.run((RECIPES / "host" / f"{name}.sh").read_text(encoding="utf-8"), verb, **env)

    def files(self) -> dict[str, tuple[bytes, int, int]]:
        """Return content, mode and time of every file that a recipe could have written, the record left out."""
        found = {}
        for path in self.root.rglob("*"):
            name = str(path.relative_to(self.root))
            if (
                path.is_file()
                and not path.is_symlink()
                and not name.startswith(("var/lib/deepep-bootstrap", "tools/", "calls", "sys/"))
            ):
                status = path.stat()
                found[name] = (path.read_bytes(), status.st_mode, status.st_mtime_ns)
        return found
