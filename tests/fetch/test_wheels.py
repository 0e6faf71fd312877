"""Wheels from directories and from a real index on the loopback, through pip; and a whole closure installed without
looking further."""

from __future__ import annotations

import functools
import hashlib
import http.server
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from deepep_bootstrap.core import filetree
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.fetch import locations, wheels
from deepep_bootstrap.fetch.locations import Mirrors
from deepep_bootstrap.lock import model
from deepep_bootstrap.lock.model import Wheel
from tests.support.paths import ROOT, TESTS

pytestmark = pytest.mark.usefixtures("programs")

WRONG = "sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="


def make_wheel(folder: Path, name: str, tags: str = "py3-none-any", requires: str = "", version: str = "1.0") -> Wheel:
    """Write a tiny but complete wheel; return its pin on the index `inner`."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-{version}-{tags}.whl"
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Python: >=3.8\n"
    texts = {
        f"{name}.py": f"NAME = {name!r}\n",
        f"{info}/METADATA": metadata + (f"Requires-Dist: {requires}\n" if requires else ""),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tags}\n",
    }
    texts[f"{info}/RECORD"] = "".join(f"{each},,\n" for each in (*texts, f"{info}/RECORD"))
    with zipfile.ZipFile(file, "w") as archive:
        for each, text in texts.items():
            archive.writestr(zipfile.ZipInfo(each), text)
    digest = filetree.sri(hashlib.sha256(file.read_bytes()).digest())
    return Wheel(name, version, "inner", file.name, digest, file.stat().st_size)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """A package index over tmp_path/simple/NAME/FILE: a folder listing is a page of links, which is all that pip
    needs."""
    (tmp_path / "simple").mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/simple"
        server.shutdown()


@pytest.fixture(autouse=True)
def own_settings_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the machine's pip takes part, except that it must not wait for what is not there."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")


def files_in(cache: Path) -> list[str]:
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file())


def refused(wheel: Wheel, mirrors: Mirrors, cache: Path) -> str:
    with pytest.raises(Trouble) as caught:
        wheels.fetch_wheel(wheel, mirrors, cache)
    assert files_in(cache) == []
    return str(caught.value)


@pytest.mark.parametrize("below", ["", "tiny"])
def test_from_a_directory(below: str, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "wheels" / below, "tiny")
    served = locations.read_mirrors([f"index:inner={tmp_path}/wheels"], {}, {})
    file = wheels.fetch_wheel(wheel, served, tmp_path / "cache")
    assert file.name == wheel.file
    assert file.read_bytes() == (tmp_path / "wheels" / below / wheel.file).read_bytes()
    (tmp_path / "wheels" / below / wheel.file).unlink()
    assert wheels.fetch_wheel(wheel, served, tmp_path / "cache") == file


def test_a_damaged_cache_is_fetched_again(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "wheels", "tiny")
    served = locations.read_mirrors([f"index:inner={tmp_path}/wheels"], {}, {})
    file = wheels.fetch_wheel(wheel, served, tmp_path / "cache")
    good = file.read_bytes()
    file.write_bytes(b"evil")
    assert wheels.fetch_wheel(wheel, served, tmp_path / "cache").read_bytes() == good


def test_a_directory_with_another_file(tmp_path: Path) -> None:
    wheel = replace(make_wheel(tmp_path / "wheels", "tiny"), hash=WRONG)
    served = locations.read_mirrors([f"index:inner={tmp_path}/wheels"], {}, {})
    found = filetree.sri(hashlib.sha256((tmp_path / "wheels" / wheel.file).read_bytes()).digest())
    message = refused(wheel, served, tmp_path / "cache")
    assert message == f"wheel {wheel.file}: this file is not the locked one — found {found}, wanted {WRONG}"


def test_a_directory_tells_everything_it_lacks(tmp_path: Path) -> None:
    all_of_them = [make_wheel(tmp_path / "made", f"tiny{number}") for number in range(9)]
    (tmp_path / "wheels").mkdir()
    (tmp_path / "made" / all_of_them[3].file).rename(tmp_path / "wheels" / all_of_them[3].file)
    with pytest.raises(Trouble) as caught:
        wheels.fetch_wheels(
            all_of_them,
            locations.read_mirrors([f"index:inner={tmp_path}/wheels"], {}, {}),
            tmp_path / "cache",
            lambda line: None,
        )
    assert [str(problem) for problem in caught.value.problems] == [
        f"index inner ({tmp_path}/wheels): does not have a wheel of the lock — wanted tiny{number}-1.0-py3-none-any.whl"
        for number in range(9)
        if number != 3
    ]


@pytest.mark.parametrize(
    "tags",
    [
        "py3-none-any",
        "py2.py3-none-any",
        "cp310-cp310-manylinux_2_17_x86_64.manylinux2014_x86_64",
        "cp399-cp399-manylinux_2_99_riscv64",
        "cp39-abi3-manylinux_2_28_aarch64",
        "py3-none-manylinux_2_17_aarch64.manylinux2014_aarch64.musllinux_1_1_aarch64",
        "7-cp312-cp312-manylinux_2_28_x86_64",
    ],
)
def test_through_pip_for_any_machine(tags: str, index: str, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "simple/tiny", "tiny", tags)
    make_wheel(tmp_path / "simple/tiny", "tiny", "py3-none-any", version="2.0")
    served = locations.read_mirrors([f"index:inner={index}"], {}, {})
    file = wheels.fetch_wheel(wheel, served, tmp_path / "cache")
    assert file.read_bytes() == (tmp_path / "simple/tiny" / wheel.file).read_bytes()


def test_the_hash_chooses_among_builds_of_one_version(index: str, tmp_path: Path) -> None:
    make_wheel(tmp_path / "simple/tiny", "tiny", "3-cp311-cp311-manylinux_2_28_x86_64", requires="other")
    wheel = make_wheel(tmp_path / "simple/tiny", "tiny", "cp311-cp311-manylinux_2_28_x86_64")
    files = sorted((tmp_path / "simple/tiny").iterdir())
    links = [
        f'<a href="{file.name}#sha256={hashlib.sha256(file.read_bytes()).hexdigest()}">{file.name}</a>'
        for file in files
    ]
    (tmp_path / "simple/tiny/index.html").write_text("<!DOCTYPE html>" + "".join(links))
    file = wheels.fetch_wheel(wheel, locations.read_mirrors([f"index:inner={index}"], {}, {}), tmp_path / "cache")
    assert file.name == wheel.file


def test_an_index_with_another_file(index: str, tmp_path: Path) -> None:
    wheel = replace(make_wheel(tmp_path / "simple/tiny", "tiny"), hash=WRONG)
    secret = index.replace("http://", "http://user:secret@")
    message = refused(wheel, locations.read_mirrors([f"index:inner={secret}"], {}, {}), tmp_path / "cache")
    assert message.startswith(f"index inner ({index}): does not give {wheel.file} with the locked hash — found ")
    assert message.endswith(". Try: --mirror index:inner=DIRECTORY with this file in it")
    assert "secret" not in message


def test_an_index_that_nothing_names(tmp_path: Path) -> None:
    message = refused(make_wheel(tmp_path / "wheels", "tiny"), Mirrors(), tmp_path / "cache")
    assert message == "index inner: nothing says where it is. Try: --mirror index:inner=URL_OR_DIRECTORY"


def test_the_lock_may_name_an_index(index: str, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "simple/tiny", "tiny")
    assert wheels.fetch_wheel(wheel, locations.read_mirrors([], {}, {"inner": index}), tmp_path / "cache").is_file()


def test_own_pip_settings_serve_pypi_and_nothing_else_does(
    index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's index answers for "pypi"; find-links and extra indexes never do, for no index, from file or
    environment."""
    listed = make_wheel(tmp_path / "simple/listed", "listed")
    extra = make_wheel(tmp_path / "extra/hidden", "hidden")
    found = make_wheel(tmp_path / "links", "linked")
    (tmp_path / "pip.conf").write_text(
        f"[global]\nindex-url = {index}\nextra-index-url = {index.replace('/simple', '/extra')}\nfind-links = "
        f"{tmp_path}/links\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    assert wheels.fetch_wheel(replace(listed, index="pypi"), Mirrors(), tmp_path / "cache").is_file()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", index.replace("/simple", "/extra"))
    named = locations.read_mirrors([f"index:inner={index}"], {}, {})
    for wheel in (extra, found):
        assert "does not give" in refused(replace(wheel, index="pypi"), Mirrors(), tmp_path / "cache2")
        assert "does not give" in refused(wheel, named, tmp_path / "cache2")
    monkeypatch.setenv("PIP_INDEX_URL", index.replace("/simple", "/extra"))
    assert wheels.fetch_wheel(replace(extra, index="pypi"), Mirrors(), tmp_path / "cache").is_file()
    assert "does not give" in refused(extra, named, tmp_path / "cache2")


def test_a_machine_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    wheel = make_wheel(tmp_path / "wheels", "tiny")
    message = refused(
        wheel, locations.read_mirrors(["index:inner=http://127.0.0.1:9/simple"], {}, {}), tmp_path / "cache"
    )
    assert message.startswith("pip: is not installed here")
    assert wheels.fetch_wheel(
        wheel, locations.read_mirrors([f"index:inner={tmp_path}/wheels"], {}, {}), tmp_path / "cache"
    ).is_file()


def entry(wheel: Wheel) -> str:
    keys = ("name", "version", "index", "file", "hash")
    return "{ " + ", ".join(f'{key} = "{getattr(wheel, key)}"' for key in keys) + f", size = {wheel.size} }}"


@pytest.mark.parametrize("complete", [True, False])
def test_a_closure_is_complete_or_pip_check_says_no(complete: bool, tmp_path: Path) -> None:
    """From a lock's text to an environment: every wheel of the target, installed without an index and without
    looking at dependencies."""
    target = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    first = make_wheel(tmp_path / "wheels", "first", requires="second>=1")
    second = make_wheel(tmp_path / "wheels", "second", f"{target}-abi3-manylinux_2_17_x86_64")
    chosen = [first, second] if complete else [first]
    base = (TESTS / "cases/lock/base.toml").read_text()
    head, rest = base.split("wheels.cp311-x86_64 = [", 1)
    text = f"{head}wheels.{target}-x86_64 = [{', '.join(map(entry, chosen))}]{rest.split(']', 1)[1]}"
    closure = model.parse_lock(text, "x.toml").stacks["one"].wheels[f"{target}-x86_64"]
    served = locations.read_mirrors([f"index:inner={tmp_path}/wheels"], {}, {})
    lines: list[str] = []
    files = wheels.fetch_wheels(closure, served, tmp_path / "cache", lines.append)
    assert list(files) == [wheel.name for wheel in chosen]
    assert sorted(line.split(" ")[0] for line in lines) == sorted(wheel.file for wheel in chosen)
    wanted = [
        f"{wheel.name} @ {files[wheel.name].as_uri()} "
        f"--hash=sha256:{hashlib.sha256(files[wheel.name].read_bytes()).hexdigest()}"
        for wheel in closure
    ]
    (tmp_path / "wanted.txt").write_text("\n".join(wanted))
    python = str(tmp_path / "env/bin/python")
    for words in (
        ("venv", "--python", sys.executable, str(tmp_path / "env")),
        (
            "pip",
            "install",
            "--python",
            python,
            "--no-index",
            "--no-deps",
            "--require-hashes",
            "--requirement",
            str(tmp_path / "wanted.txt"),
        ),
    ):
        subprocess.run([sys.executable, "-m", "uv", "--quiet", "--no-config", "--no-cache", *words], check=True)
    checked = subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "check"], capture_output=True, text=True, check=False
    )
    assert (checked.returncode == 0) == complete, checked.stdout
    assert ("first 1.0 requires second, which is not installed." in checked.stdout) != complete


def test_an_interrupt_ends_a_download_that_is_under_way(tmp_path: Path) -> None:
    """pip runs in a process group of its own: ^C must reach it through us, or gigabytes go on arriving."""
    slow = tmp_path / "bin" / "pip3"
    slow.parent.mkdir()
    index = "--index-url <url> Base URL (default http://127.0.0.1:9/simple)"
    slow.write_text(
        f"#!/bin/sh\n[ $1 = download ] || exit 0\n[ $2 != --help ] || {{ echo '{index}'; exit; }}\n"
        f"echo $$ >{tmp_path}/pid\nexec sleep 600\n"
    )
    slow.chmod(0o755)
    program = f"""
import signal, sys, pathlib, os
sys.path.insert(0, {str(ROOT)!r})
from deepep_bootstrap.fetch import locations, pip, wheels
from deepep_bootstrap.lock.model import Wheel
pip._pip = lambda: ({str(slow)!r},)
wheel = Wheel("six", "1.0", "pypi", "six-1.0-py3-none-any.whl", "sha256-" + "A" * 43 + "=", 1)
wheels.fetch_wheels([wheel], locations.Mirrors(), pathlib.Path({str(tmp_path / "cache")!r}), print)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert process.poll() is None
        time.sleep(0.02)
    pid = int((tmp_path / "pid").read_text())
    process.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in process.communicate(timeout=60)[1]
    assert not Path(f"/proc/{pid}").exists()
