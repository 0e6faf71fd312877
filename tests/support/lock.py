"""Git servers for tests of the lock: bare repositories made with real git, with fixed people and dates, so that
commit ids never change."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from deepep_bootstrap.core import filetree
from deepep_bootstrap.fetch import locations
from deepep_bootstrap.fetch.locations import Mirrors
from deepep_bootstrap.lock.model import Source

BASE = "https://host.invalid/"
FIRST = 1_700_000_000
"""The time of the first commit, 2023-11-14; each later one is a day younger."""
DAY = 86400


def git(where: Path, *words: str | Path, when: int = FIRST) -> str:
    """Run git in `where` at the time `when` and return what it prints."""
    person = {"NAME": "Nobody", "EMAIL": "nobody@host.invalid", "DATE": f"{when} +0000"}
    fixed = {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in person.items()}
    settings = ("-c", "protocol.file.allow=always", "-c", "init.defaultBranch=main", "-c", "advice.detachedHead=false")
    environment = {**os.environ, **fixed, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(
        ("git", *settings, *words), cwd=where, env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def commit(bare: Path, parents: list[str], files: dict[str, str], day: int) -> str:
    """Put a commit with exactly these files into a bare repository, without any ref to it; return its id."""
    index = bare / "index.tmp"
    index.unlink(missing_ok=True)
    environment = {**os.environ, "GIT_INDEX_FILE": str(index), "GIT_CONFIG_GLOBAL": "/dev/null"}
    for name, text in files.items():
        hashed = subprocess.run(
            ["git", "hash-object", "-w", "--stdin"], cwd=bare, input=text, text=True, capture_output=True, check=True
        )
        entry = f"{'160000' if text.startswith('link:') else '100644'},{text[5:] if text.startswith('link:') else hashed.stdout.strip()},{name}"
        subprocess.run(["git", "update-index", "--add", "--cacheinfo", entry], cwd=bare, env=environment, check=True)
    tree = subprocess.run(
        ["git", "write-tree"], cwd=bare, env=environment, text=True, capture_output=True, check=True
    ).stdout.strip()
    index.unlink(missing_ok=True)
    words = [word for parent in parents for word in ("-p", parent)]
    return git(bare, "commit-tree", tree, *words, "-m", f"day {day}", when=FIRST + day * DAY)


@dataclass(frozen=True)
class Server:
    """A folder of bare repositories that stands for a git host; `commits` are those of owner/engine by name."""

    folder: Path
    commits: dict[str, str]

    @property
    def engine(self) -> Path:
        """The repository owner/engine."""
        return self.folder / "owner/engine.git"

    @property
    def mirrors(self) -> Mirrors:
        """What makes every address below BASE lead here."""
        return locations.read_mirrors([self.flag], {}, {})

    @property
    def flag(self) -> str:
        """The value of --mirror that does so."""
        return f"{BASE}={self.folder}"

    def point(self, ref: str, rev: str) -> None:
        """Make a ref, or move it by force."""
        git(self.engine, "update-ref", ref, self.commits.get(rev, rev))

    def source(self, ref: str, rev: str, *, version: str = "1.0") -> Source:
        """Return a pin of owner/engine; its hash and time are those of nothing."""
        return Source(
            "engine", f"{BASE}owner/engine", ref, self.commits.get(rev, rev), filetree.sri(bytes(32)), 0, version
        )


FILES = {"a.txt": "old\n", "src/main.c": "int main;\n"}


def make_server(folder: Path) -> Server:
    """Make owner/engine: one, two, three on main; pull request 7 on top of one; `both` is a branch and a tag; tags
    of each kind."""
    bare = folder / "owner/engine.git"
    bare.mkdir(parents=True)
    git(bare, "init", "--quiet", "--bare")
    made: dict[str, str] = {}
    made["one"] = commit(bare, [], FILES, 0)
    made["two"] = commit(bare, [made["one"]], {**FILES, "two": "2"}, 1)
    made["three"] = commit(bare, [made["two"]], {**FILES, "two": "2", "three": "3"}, 2)
    made["pull"] = commit(bare, [made["one"]], {**FILES, "pull": "7"}, 3)
    made["pushed"] = commit(bare, [made["two"]], {**FILES, "pull": "7", "two": "2"}, 4)
    made["merge"] = commit(bare, [made["three"], made["pull"]], {**FILES, "three": "3", "pull": "7"}, 5)
    server = Server(folder, made)
    for ref, rev in {
        "heads/main": "three",
        "heads/both": "two",
        "tags/both": "one",
        "pull/7/head": "pull",
        "tags/v1.0": "one",
    }.items():
        server.point(f"refs/{ref}", rev)
    git(bare, "tag", "--annotate", "-m", "a", "v1.1", made["two"])
    git(bare, "tag", "--annotate", "-m", "a", "nested", "v1.1")
    git(bare, "tag", "v1.2.0rc1", made["three"])
    git(bare, "symbolic-ref", "HEAD", "refs/heads/main")
    return server


@pytest.fixture(scope="session")
def _server_template(programs: None, tmp_path_factory: pytest.TempPathFactory) -> Server:
    return make_server(tmp_path_factory.mktemp("git-server"))


@pytest.fixture
def server(_server_template: Server, tmp_path: Path) -> Server:
    """A server of one test, which may do with it what it likes."""
    folder = tmp_path / "server"
    shutil.copytree(_server_template.folder, folder)
    return Server(folder, _server_template.commits)
