"""relocate.py on real ELF files made with gcc, and on text."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.usefixtures("programs")

PROGRAM = ROOT / "recipes/build/relocate.py"


@pytest.fixture(scope="module")
def relocate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("relocate", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with one published library that says 7, and a scratch folder beside it."""
    folder = tmp_path / "prefix/store/dep-1/lib"
    folder.mkdir(parents=True)
    (tmp_path / "scratch/early").mkdir(parents=True)
    compile_c("int seven(void) { return 7; }", folder / "libseven.so", "-shared", "-Wl,-soname,libseven.so")
    return tmp_path / "prefix/store"


def compile_c(source: str, target: Path, *flags: str) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["gcc", "-x", "c", "-", "-o", target, "-fPIC", *flags], input=source.encode(), check=True)
    return target


def entry_with_program(store: Path, *rpaths: str, tags: str = "--enable-new-dtags") -> Path:
    """Return an unpublished entry whose bin/main needs libseven.so, linked with these run paths."""
    entry = store / ".tmp-new-1-token"
    flags = [f"-L{store}/dep-1/lib", "-lseven", *(f"-Wl,-rpath,{path}" for path in rpaths), f"-Wl,{tags}"]
    source = "int seven(void); int main(void) { return seven(); }"
    subprocess.run(
        ["gcc", "-x", "c", "-", "-o", make(entry / "bin") / "main", *["-x", "none"], *flags],
        input=source.encode(),
        check=True,
    )
    return entry


def make(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run(entry: Path, store: Path) -> subprocess.CompletedProcess[str]:
    scratch = store.parent.parent / "scratch"
    return subprocess.run([sys.executable, PROGRAM, entry, store, scratch], capture_output=True, text=True, check=False)


def readelf(path: Path) -> list[str]:
    """Return what binutils reads, independently of our own reader."""
    lines = subprocess.run(["readelf", "-dW", path], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split("[")[1].rstrip("]") for line in lines if "(RUNPATH)" in line or "(RPATH)" in line]


def build_id(path: Path) -> str:
    """Return what binutils reads, in hexadecimal digits."""
    notes = subprocess.run(["readelf", "-nW", path], capture_output=True, text=True, check=True).stdout
    return re.search(r"Build ID: ([0-9a-f]+)", notes)[1]  # type: ignore[index]


@pytest.mark.parametrize("tags", ["--enable-new-dtags", "--disable-new-dtags"])
def test_a_run_path_into_the_store_becomes_relative_and_survives_a_move(store: Path, tags: str) -> None:
    entry = entry_with_program(store, f"{store}/dep-1/lib", tags=tags)
    assert run(entry, store).returncode == 0
    assert readelf(entry / "bin/main") == ["$ORIGIN/../../dep-1/lib"]
    entry.rename(store / "new-1")
    moved = store.parent.rename(store.parent.parent / "elsewhere")
    assert subprocess.run([moved / "store/new-1/bin/main"], check=False).returncode == 7


def test_paths_of_the_build_are_dropped_or_mapped_and_others_stay(store: Path) -> None:
    scratch = store.parent.parent / "scratch"
    entry = entry_with_program(
        store,
        f"{scratch}/build/lib",
        f"{scratch}/early/dep-1/lib",
        "$ORIGIN",
        "/usr/local/cuda/lib64",
        f"{store}/dep-1/lib",
    )
    assert run(entry, store).returncode == 0
    assert readelf(entry / "bin/main") == ["$ORIGIN/../../dep-1/lib:$ORIGIN:/usr/local/cuda/lib64"]
    assert os.fsencode(scratch) not in (entry / "bin/main").read_bytes()


def test_a_path_into_the_entry_itself(store: Path) -> None:
    entry = store / ".tmp-new-1-token"
    entry_with_program(store, f"{entry}/lib", f"{entry}/bin")
    assert run(entry, store).returncode == 0
    assert readelf(entry / "bin/main") == ["$ORIGIN/../lib:$ORIGIN"]


def test_the_rest_of_the_file_is_untouched(store: Path) -> None:
    entry = entry_with_program(store, f"{store}/dep-1/lib")
    before, before_id = (entry / "bin/main").read_bytes(), build_id(entry / "bin/main")
    run(entry, store)
    after = (entry / "bin/main").read_bytes()
    assert len(after) == len(before)
    old = os.fsencode(f"{store}/dep-1/lib")
    linked = bytes.fromhex(before_id)
    assert after == before.replace(old, b"$ORIGIN/../../dep-1/lib".ljust(len(old), b"\0")).replace(
        linked, bytes.fromhex(build_id(entry / "bin/main"))
    )
    assert os.access(entry / "bin/main", os.X_OK)


def test_the_build_id_does_not_tell_which_paths_were_there_when_it_was_linked(store: Path) -> None:
    """The linker makes it of everything it writes, paths of the build as well."""
    other = store.parent.parent / "scratch"
    programs = []
    for path in (f"{other}/one", f"{other}/two"):
        entry = entry_with_program(store, path, f"{store}/dep-1/lib")
        linked = build_id(entry / "bin/main")
        assert run(entry, store).returncode == 0
        assert build_id(entry / "bin/main") != linked
        programs.append((entry / "bin/main").read_bytes())
    assert programs[0] == programs[1]


def test_a_run_path_that_is_right_is_not_written(store: Path) -> None:
    entry = entry_with_program(store, "$ORIGIN/../../dep-1/lib")
    inode = (entry / "bin/main").stat().st_ino
    assert run(entry, store).returncode == 0
    assert (entry / "bin/main").stat().st_ino == inode


def test_what_cannot_be_read_is_named_in_one_line_each() -> None:
    """As a disk that answers EIO makes it, here for a user who may not read: in a process of its own, since root may."""
    folder = Path(tempfile.mkdtemp())
    script = (
        "import os, sys; sys.path.insert(0, sys.argv.pop()); import relocate; "
        "os.geteuid() or os.setuid(65534); sys.exit(relocate.main(*sys.argv[1:]))"
    )
    try:
        (folder / "lib/closed").mkdir(parents=True)
        (folder / "lib/text").write_text("a\n")
        for path, mode in ((folder, 0o755), (folder / "lib/text", 0), (folder / "lib/closed", 0)):
            path.chmod(mode)
        words = [folder / "lib", folder, folder / "scratch", PROGRAM.parent]
        done = subprocess.run([sys.executable, "-B", "-c", script, *words], capture_output=True, text=True, check=False)
    finally:
        (folder / "lib/closed").chmod(0o700)
        shutil.rmtree(folder)
    assert done.returncode == 1
    assert sorted(done.stderr.splitlines()) == [
        "closed: cannot be made relocatable: Permission denied",
        "text: cannot be made relocatable: Permission denied",
    ]


def test_a_run_path_without_room_is_an_error(store: Path, relocate: ModuleType) -> None:
    data = compile_c("int x;", store / "lib.so", "-shared", "-Wl,-rpath,/short").read_bytes()
    with pytest.raises(ValueError, match="does not fit in the place of"):
        relocate.with_run_path(data, lambda old: old + "/longer")


def test_a_run_path_that_shares_its_bytes_is_an_error(store: Path, relocate: ModuleType) -> None:
    """Linkers store a string that ends another one only once: the symbol `b` inside the run path `/a/b`."""
    data = compile_c(
        "int b_long_symbol(void) { return 1; }", store / "lib.so", "-shared", "-Wl,-rpath,/a/b_long_symbol"
    ).read_bytes()
    assert data.count(b"b_long_symbol\0", 0, data.index(b".symtab") if b".symtab" in data else len(data)) >= 1
    with pytest.raises(ValueError, match="shares its bytes"):
        relocate.with_run_path(data, lambda old: "/a")


def test_names_has_every_string_that_readelf_knows(store: Path, relocate: ModuleType) -> None:
    path = compile_c(
        '#include <stdio.h>\nint own_symbol(void) { return printf("x"); }',
        store / "lib.so",
        "-shared",
        "-Wl,-soname,libown.so",
        "-Wl,-rpath,/x",
    )
    elf = relocate.Elf(path.read_bytes())
    found = {elf.string(index).decode() for index in elf.names()}
    assert {"libown.so", "libc.so.6", "own_symbol", "printf"} <= found
    assert any(name.startswith("GLIBC_") for name in found)


def test_text_files(store: Path) -> None:
    entry, scratch = store / ".tmp-new-1-token", store.parent.parent / "scratch"
    make(entry / "lib/cmake/x")
    (entry / "lib/cmake/x/x.cmake").write_text(f'set(DIR "{entry}/include")\n')
    make(entry / "lib/pkgconfig")
    (entry / "lib/pkgconfig/x.pc").write_text(f"prefix={entry}\n")
    (entry / "notes.txt").write_text(f"built in {scratch}/build of {entry}\n")
    (entry / "other.txt").write_text("nothing\n")
    before = (entry / "other.txt").stat().st_ino
    assert run(entry, store).returncode == 0
    assert (entry / "lib/cmake/x/x.cmake").read_text() == 'set(DIR "${CMAKE_CURRENT_LIST_DIR}/../../../include")\n'
    assert (entry / "lib/pkgconfig/x.pc").read_text() == "prefix=${pcfiledir}/../..\n"
    assert (entry / "notes.txt").read_text() == "built in /build/build of /entry\n"
    assert (entry / "other.txt").stat().st_ino == before


def test_byte_code_that_names_the_build_is_an_error(store: Path) -> None:
    entry = make(store / ".tmp-new-1-token")
    (entry / "module.pyc").write_bytes(b"\0\0" + os.fsencode(entry))
    done = run(entry, store)
    assert done.returncode == 1
    assert "module.pyc: cannot be made relocatable: byte code that names" in done.stderr


def test_a_build_path_inside_a_binary_is_blanked_in_its_place(store: Path) -> None:
    entry = make(store / ".tmp-new-1-token")
    compile_c(f'const char *where = "{entry}/x.cu";', entry / "lib.so", "-shared")
    (entry / "lib.a").write_bytes(b"!<arch>\n\0" + os.fsencode(entry) + b"/y.o\0")
    sizes = [(entry / name).stat().st_size for name in ("lib.so", "lib.a")]
    done = run(entry, store)
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("lib.so", "lib.a"):
        assert os.fsencode(entry) not in (entry / name).read_bytes()
    assert b"/build/" in (entry / "lib.so").read_bytes()
    assert [(entry / name).stat().st_size for name in ("lib.so", "lib.a")] == sizes, "nothing after the path may move"


def test_what_wheels_brought_is_not_read_but_their_metadata_is(store: Path) -> None:
    entry = store / ".tmp-new-1-token"
    packages = make(entry / "lib/python3.12/site-packages")
    for folder in ("torch", "torch-2.dist-info"):
        make(packages / folder)
        (packages / folder / "file.txt").write_text(f"{entry}\n")
    assert run(entry, store).returncode == 0
    assert (packages / "torch/file.txt").read_text() == f"{entry}\n"
    assert (packages / "torch-2.dist-info/file.txt").read_text() == "/entry\n"


def test_links_are_left_alone(store: Path) -> None:
    entry = make(store / ".tmp-new-1-token")
    (entry / "dangling").symlink_to("../dep-1/nothing")
    assert run(entry, store).returncode == 0
    assert os.readlink(entry / "dangling") == "../dep-1/nothing"


def test_a_damaged_file_is_named(store: Path) -> None:
    entry = make(store / ".tmp-new-1-token")
    (entry / "broken.so").write_bytes(b"\x7fELF\x02\x01" + b"\xff" * 100)
    done = run(entry, store)
    assert done.returncode == 1
    assert "broken.so: cannot be made relocatable" in done.stderr
