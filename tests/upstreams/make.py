"""Make the stand-in sources into what the bootstrap reads: git repositories and wheels, the same bytes every time.

    python tests/upstreams/make.py OUTDIR [--lock]

OUTDIR/git/standin/<name>.git are bare repositories, for `--mirror
https://example.invalid/standin/=OUTDIR/git/standin/`; OUTDIR/wheels/*.whl for `--mirror index:standin=OUTDIR/wheels`.
With --lock, demo.lock.toml beside this file gets their revisions, hashes and sizes; everything else in it, comments
too, stays as it is.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit

HERE = Path(__file__).resolve().parent
if str(HERE.parent.parent) not in sys.path:  # run as a script, from a checkout that is not installed
    sys.path.insert(0, str(HERE.parent.parent))

from deepep_bootstrap.core.filetree import hash_path

LOCK = HERE / "demo.lock.toml"
WHEELS_INDEX = "standin"
COMMIT_TIME = 1767225600  # 2026-01-01T00:00:00Z, for every commit
LEFT_OUT = ("__pycache__", "*.pyc")


@dataclass(frozen=True)
class Shared:
    """A file of another stand-in that a repository has too, as `target`, with the first text of `change` replaced by
    the second."""

    source: str
    target: str
    change: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Repository:
    """One git repository: `ref` is what the lock asks for, besides the branch main. `submodules` are paths and the
    names of repositories that are made before."""

    name: str
    ref: str
    shared: tuple[Shared, ...] = ()
    submodules: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Wheel:
    """One wheel: the files below wheels/<folder>, `requires` in its metadata, @WORDS@ of *.in files replaced by
    `words`."""

    folder: str
    name: str
    version: str
    summary: str
    requires: tuple[str, ...] = ()
    words: tuple[tuple[str, str], ...] = ()

    @property
    def escaped(self) -> str:
        """The name as file names have it."""
        return self.name.replace("-", "_")

    @property
    def file(self) -> str:
        """The wheel's file name."""
        return f"{self.escaped}-{self.version}-py3-none-any.whl"


REPOSITORIES = (
    Repository("gdrcopy", "refs/tags/v2.5.1"),
    Repository("nvshmem", "refs/tags/v3.4.5-0"),
    Repository("deepep", "refs/pull/466/head"),
    Repository("fmt", "refs/tags/12.1.0"),
    Repository(
        "deepep-v2",
        "refs/tags/v2.1.0",
        (
            Shared("deepep/csrc/deep_ep.cpp", "csrc/legacy/deep_ep.cpp"),
            *(
                Shared(f"deepep/csrc/kernels/{name}.cu", f"csrc/kernels/legacy/{name}.cu")
                for name in ("intranode", "internode")
            ),
            Shared("deepep/deep_ep/buffer.py", "deep_ep/buffers/legacy.py", ("deep_ep_cpp", "deep_ep._C")),
            Shared("deepep/tests/utils.py", "tests/elastic/utils.py"),
            *(
                Shared(f"deepep/tests/{name}.py", f"tests/legacy/{name}.py")
                for name in ("utils", "test_intranode", "test_internode", "test_low_latency")
            ),
        ),
        (("third-party/fmt", "fmt"),),
    ),
    Repository("deep_jit", "refs/tags/v1"),
    Repository("deepep-v25", "refs/tags/v2.5.0", submodules=(("third-party/deep_jit", "deep_jit"),)),
)


def torch_of(version: str, cuda: str) -> Wheel:
    """Return the stand-in of a torch for a CUDA."""
    words = (
        ("VERSION", version),
        ("CUDA", cuda),
        ("GIT", hashlib.sha1(version.encode(), usedforsecurity=False).hexdigest()),
    )
    requires = ("numpy", f"nvidia-nvshmem-cu{cuda.split('.')[0]} (==3.4.5)", "setuptools (<82)")
    return Wheel("torch", "torch", version, "CPU stand-in of PyTorch: a version and processes", requires, words)


def _nvshmem(major: str) -> Wheel:
    return Wheel(
        "nvshmem",
        f"nvidia-nvshmem-cu{major}",
        "3.4.5",
        "Stand-in of the NVSHMEM wheel: a library that cannot be loaded",
    )


WHEELS = (torch_of("2.10.0", "12.8"), torch_of("2.11.0", "13.0"), _nvshmem("12"), _nvshmem("13"))


def git(*arguments: str, folder: Path, text: str = "", **environment: str) -> str:
    """Run git in the bare repository `folder`, with `text` on standard input, and return its output; nobody's
    settings, names or clocks get in."""
    clean = {
        "PATH": os.environ.get("PATH", os.defpath),
        "GIT_DIR": str(folder),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_NAME": "Stand-in",
        "GIT_AUTHOR_EMAIL": "standin@example.invalid",
        "GIT_AUTHOR_DATE": f"{COMMIT_TIME} +0000",
        **environment,
    }
    clean.update({name.replace("AUTHOR", "COMMITTER"): value for name, value in clean.items() if "_AUTHOR_" in name})
    return subprocess.run(
        ["git", *arguments], env=clean, input=text, check=True, capture_output=True, text=True
    ).stdout.strip()


def make_repository(repository: Repository, outdir: Path) -> str:
    """Make OUTDIR/git/standin/<name>.git from the tree of that name and return the commit's id."""
    folder = outdir / "git" / "standin" / f"{repository.name}.git"
    folder.mkdir(parents=True, exist_ok=True)
    git("init", "--quiet", "--bare", "--template=", "--initial-branch=main", str(folder), folder=folder)
    (folder / "info").mkdir(exist_ok=True)
    (folder / "info" / "exclude").write_text("\n".join(LEFT_OUT) + "\n")
    tree = {"GIT_WORK_TREE": str(HERE / repository.name), "GIT_INDEX_FILE": str(folder / "making.index")}
    git("add", "--all", "--", str(HERE / repository.name), folder=folder, **tree)
    for shared in repository.shared:
        content = (HERE / shared.source).read_text(encoding="utf-8")
        blob = git(
            "hash-object",
            "-w",
            "--stdin",
            folder=folder,
            text=content.replace(*shared.change) if shared.change[0] else content,
        )
        git("update-index", "--add", "--cacheinfo", f"100644,{blob},{shared.target}", folder=folder, **tree)
    for path, name in repository.submodules:
        commit = git("rev-parse", "refs/heads/main", folder=outdir / "git" / "standin" / f"{name}.git")
        git("update-index", "--add", "--cacheinfo", f"160000,{commit},{path}", folder=folder, **tree)
    written = git("write-tree", folder=folder, **tree)
    (folder / "making.index").unlink()
    commit = git("commit-tree", written, "-m", f"{repository.name}, CPU stand-in", folder=folder)
    for ref in ("refs/heads/main", repository.ref):
        git("update-ref", ref, commit, folder=folder)
    return commit


def export_tree(name: str, outdir: Path, target: Path) -> None:
    """Put the tree of a made repository, its submodules too, into the empty folder `target`, as a checkout without
    .git would be."""
    repository = outdir / "git" / "standin" / f"{name}.git"
    place = {"GIT_WORK_TREE": str(target), "GIT_INDEX_FILE": str(target) + ".index"}
    git("read-tree", "refs/heads/main", folder=repository, **place)
    git("checkout-index", "--all", folder=repository, **place)
    Path(place["GIT_INDEX_FILE"]).unlink()
    for path, module in next(each for each in REPOSITORIES if each.name == name).submodules:
        (target / path).mkdir(parents=True, exist_ok=True)
        export_tree(module, outdir, target / path)


def wheel_files(wheel: Wheel) -> dict[str, bytes]:
    """Return the wheel's own files by the path they get in it."""
    root = HERE / "wheels" / wheel.folder
    files = {}
    for path in sorted(root.rglob("*")):
        if path.is_dir() or "__pycache__" in path.parts:
            continue
        name, content = path.relative_to(root).as_posix(), path.read_bytes()
        if name.endswith(".in"):
            name = name.removesuffix(".in")
            for word, value in wheel.words:
                content = content.replace(f"@{word}@".encode(), value.encode())
        files[name] = content
    return files


def wheel_metadata(wheel: Wheel) -> dict[str, bytes]:
    """Return the two files that every wheel must have besides RECORD."""
    metadata = [
        "Metadata-Version: 2.1",
        f"Name: {wheel.name}",
        f"Version: {wheel.version}",
        f"Summary: {wheel.summary}",
    ]
    metadata += ["Classifier: Development Status :: 1 - Planning", "Requires-Python: >=3.10"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in wheel.requires]
    tags = ["Wheel-Version: 1.0", "Generator: tests/upstreams/make.py", "Root-Is-Purelib: true", "Tag: py3-none-any"]
    return {"METADATA": "\n".join([*metadata, ""]).encode(), "WHEEL": "\n".join([*tags, ""]).encode()}


def make_wheel(wheel: Wheel, outdir: Path) -> Path:
    """Write OUTDIR/wheels/<file> and return its path. Stored, not compressed: zlib's output differs between its
    versions."""
    info = f"{wheel.escaped}-{wheel.version}.dist-info"
    files = wheel_files(wheel)
    files.update({f"{info}/{name}": content for name, content in wheel_metadata(wheel).items()})
    record = [f"{name},sha256={_url_digest(content)},{len(content)}" for name, content in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    target = outdir / "wheels" / wheel.file
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.create_system, entry.external_attr = 3, 0o100644 << 16
            archive.writestr(entry, content)
    return target


def _url_digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def _sri(content: bytes) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content).digest()).decode()


def hash_tree(name: str, outdir: Path) -> str:
    """Return the NAR hash (SRI) of the tree of a made repository."""
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / name
        tree.mkdir()
        export_tree(name, outdir, tree)
        return str(hash_path(tree))


def lock_text(text: str, revisions: dict[str, str], outdir: Path) -> str:
    """Return the lock `text` with the revisions, hashes and sizes of what was made in `outdir`."""
    document: Any = tomlkit.parse(text)
    for name, revision in revisions.items():
        if name not in document["source"]:
            continue  # a submodule is pinned by the tree it is in
        pin = document["source"][name]
        pin["rev"], pin["hash"], pin["last_modified"] = revision, hash_tree(name, outdir), COMMIT_TIME
    for stack in document["stack"].values():
        for wheels in stack["wheels"].values():
            for wheel in wheels:
                if wheel["index"] == WHEELS_INDEX:
                    content = (outdir / "wheels" / wheel["file"]).read_bytes()
                    wheel["hash"], wheel["size"] = _sri(content), len(content)
    return str(tomlkit.dumps(document))


def make_all(outdir: Path) -> dict[str, str]:
    """Make every repository and wheel below `outdir`, again where they are there already, and return the commit ids
    by name."""
    for wheel in WHEELS:
        make_wheel(wheel, outdir)
    return {repository.name: make_repository(repository, outdir) for repository in REPOSITORIES}


def main(arguments: list[str]) -> int:
    """Run the command line; 0 unless something could not be made."""
    parser = argparse.ArgumentParser(description="make the stand-in git repositories and wheels")
    parser.add_argument("outdir", type=Path)
    parser.add_argument("--lock", action="store_true", help="write their revisions and hashes into demo.lock.toml")
    chosen = parser.parse_args(arguments)
    outdir = chosen.outdir.resolve()
    revisions = make_all(outdir)
    if chosen.lock:
        LOCK.write_text(lock_text(LOCK.read_text(encoding="utf-8"), revisions, outdir), encoding="utf-8")
    for name, revision in revisions.items():
        print(f"{name} {revision}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
