"""What a stack asks for: resolved by a real uv from indexes of the test, written into the lock, and held against the
indexes again."""

from __future__ import annotations

import base64
import functools
import http.server
import json
import os
import platform
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from deepep_bootstrap.cli.commands import lock as verb
from deepep_bootstrap.core import filetree
from deepep_bootstrap.core.errors import OK, TROUBLE, Trouble
from deepep_bootstrap.fetch import check, pip, uv, wheels
from deepep_bootstrap.fetch.check import Ways
from deepep_bootstrap.fetch.index import PackageIndex, size_of
from deepep_bootstrap.fetch.locations import Level, Mirrors
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.lock import edit
from deepep_bootstrap.lock import model as locks
from deepep_bootstrap.lock.model import Wheel, requirement_name
from tests.cli.test_json_doc import EXAMPLES, FREE_KEYS, keys, merge, shape
from tests.fetch.test_wheels import make_wheel
from tests.support.paths import ROOT, TESTS

pytestmark = pytest.mark.usefixtures("programs")

GOLDEN = TESTS / "golden" / "lock"
TAGS = "{0}-{0}-manylinux_2_28_{1}"


@dataclass
class Indexes:
    """A server of package indexes: folder/INDEX/*.whl is served as /INDEX/NAME/, as pages or as JSON. What it says
    of a file can be changed by file name; `asked` is what was asked of it."""

    folder: Path
    address: str = ""
    as_json: bool = False
    yanked: dict[str, str] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def make(self, index: str, name: str, version: str = "1.0", **words: str) -> Wheel:
        wheel = make_wheel(self.folder / index, name.replace("-", "_"), version=version, **words)
        return replace(wheel, name=name, index=index)

    def answer(self, path: str, want_json: bool) -> tuple[str, bytes] | None:
        parts = path.strip("/").split("/")
        if parts[-1].endswith(".whl"):
            file = self.folder / parts[-3] / parts[-1]
            return ("application/octet-stream", file.read_bytes()) if file.is_file() else None
        found = sorted((self.folder / parts[0]).glob(f"{parts[1].replace('-', '_')}-*.whl"))
        if not found:
            return None
        if self.as_json and want_json:
            files = [self.entry(file) for file in found]
            document = {"meta": {"api-version": "1.1"}, "name": parts[1], "versions": [], "files": files}
            return "application/vnd.pypi.simple.v1+json", json.dumps(document).encode()
        return "text/html", "".join(self.link(file) for file in found).encode()

    def entry(self, file: Path) -> dict[str, Any]:
        entry = {
            "filename": file.name,
            "url": file.name,
            "hashes": {"sha256": self.hex(file)},
            "size": file.stat().st_size,
        }
        return entry | ({"yanked": self.yanked[file.name]} if file.name in self.yanked else {})

    def link(self, file: Path) -> str:
        yanked = f' data-yanked="{self.yanked[file.name]}"' if file.name in self.yanked else ""
        digest = f"#sha256={self.hex(file)}" if self.hex(file) else ""
        return f'<a href="{file.name}{digest}"{yanked}>{file.name}</a>\n'

    def hex(self, file: Path) -> str:
        return self.hashes.get(file.name, base64.b64decode(filetree.hash_file(file).partition("-")[2]).hex())


class Server(http.server.BaseHTTPRequestHandler):
    def __init__(self, indexes: Indexes, *words: Any) -> None:
        self.indexes = indexes
        super().__init__(*words)

    def log_message(self, *words: object) -> None:
        pass

    def do_GET(self) -> None:
        self.indexes.asked.append(f"{self.command} {self.path}")
        if self.path.startswith("/moved/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/moved"))
            self.end_headers()
            return
        found = self.indexes.answer(self.path, "json" in self.headers.get("Accept", ""))
        if found is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", found[0])
        self.send_header("Content-Length", str(len(found[1])))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(found[1])

    do_HEAD = do_GET


@pytest.fixture
def indexes(tmp_path: Path) -> Iterator[Indexes]:
    """Two indexes: `inner`, and `torches` that has a newer numpy nobody asked it for."""
    found = Indexes(tmp_path / "indexes")
    for python in ("cp312", "cp313"):
        needs = "nvidia-nccl-cu12==2.27.5\nRequires-Dist: nvidia-nvshmem-cu12"
        found.make("torches", "torch", "2.10.0", tags=TAGS.format(python, "x86_64"), requires=needs)
        found.make("torches", "torch", "2.10.0-3", tags=TAGS.format(python, "x86_64"), requires=needs)
    found.make("torches", "torch", "2.10.0", tags=TAGS.format("cp312", "aarch64"), requires="numpy")
    found.make("torches", "numpy", "9.0")
    found.make("inner", "nvidia-nccl-cu12", "2.27.5")
    found.make("inner", "nvidia-nccl-cu12", "2.30.4")
    found.make("inner", "nvidia-nvshmem-cu12", "3.3.9")
    found.make("inner", "numpy", "2.0")
    found.make("inner", "setuptools", "81.0")
    found.make("inner", "setuptools", "82.0")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Server, found)) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        found.address = f"http://127.0.0.1:{server.server_address[1]}"
        yield found
        server.shutdown()


@pytest.fixture(autouse=True)
def traps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of this user and this shell that would answer for what the lock does not name; and an empty cache."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    trap = tmp_path / "trap"
    make_wheel(trap, "numpy", version="99.0")
    (tmp_path / "home/.config/uv").mkdir(parents=True)
    (tmp_path / "home/.config/uv/uv.toml").write_text(f'find-links = ["{trap}"]\n')
    for name, value in {
        "HOME": tmp_path / "home",
        "UV_FIND_LINKS": trap,
        "PIP_FIND_LINKS": trap,
        "PIP_CONFIG_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)


@pytest.fixture
def path(indexes: Indexes, tmp_path: Path) -> Path:
    """The lock of this test, and beside it rules that nothing breaks."""
    kept = indexes.make("inner", "setuptools", "81.0")
    text = (GOLDEN / "wheels-before.toml").read_text().replace("@torches@", f"{indexes.address}/torches")
    target = tmp_path / "deepep.lock.toml"
    target.write_text(text.replace("@setuptools@", kept.hash).replace("@size@", str(kept.size)))
    (tmp_path / "env/rules").mkdir(parents=True)
    (tmp_path / "env/rules/compatibility.toml").write_text("")
    return target


@pytest.fixture
def small(path: Path) -> None:
    """The same lock with one target and no overrides: uv runs once, not four times."""
    text = path.read_text().replace('"cp312-x86_64", "cp313-x86_64"]', '"cp312-x86_64"]')
    path.write_text(text.replace('overrides = ["nvidia-nccl-cu12==2.30.4"]\n', ""))


@pytest.fixture
def run(indexes: Indexes, path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the verb on that lock; return exit code, stdout, stderr."""

    def call(**words: Any) -> tuple[int, str, str]:
        own = {key: words.pop(key) for key in ("check", "update", "ref", "download") if key in words}
        mirror = words.pop("mirror", (f"index:inner={indexes.address}/inner",))
        flags = Flags(root=words.pop("root", path.parent), lock=str(path), mirror=mirror, **words)
        try:
            code = verb.lock(flags, **own)
        except Trouble as trouble:
            return TROUBLE, capsys.readouterr().out, str(trouble)
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_an_update_rewrites_the_lists_and_nothing_else(run: Any, path: Path) -> None:
    before = path.read_text()
    code, dry, err = run(update="python", stack="one", dry_run=True)
    assert (code, err, path.read_text()) == (OK, "", before)
    code, out, err = run(update="python", stack="one")
    assert (code, err) == (OK, "")
    assert out.split(str(path))[0] == dry.split(str(path))[0]
    said = out.partition("\n")[2].replace(str(path), "LOCK")  # which uv was found is this machine's own
    difference = edit.diff(before, path.read_text(), "lock")
    masked = re.sub(r'hash = "sha256-[^"]+", size = \d+', 'hash = "…", size = …', difference)
    assert f"{said}---\n{masked}" == (GOLDEN / "wheels.txt").read_text()
    assert (
        "asks for torch==2.10.0 from torches, numpy from inner, setuptools<82 from inner; in any case "
        "nvidia-nccl-cu12==2.30.4" in run()[1]
    )


@pytest.mark.usefixtures("small")
def test_a_directory_with_folders_serves_an_index_as_well(
    run: Any, path: Path, indexes: Indexes, tmp_path: Path
) -> None:
    """What `invoke mirror` writes is flat for nobody; uv is given links."""
    assert run(update="python")[0] == OK
    from_server = path.read_text()
    for index in ("inner", "torches"):
        for file in (indexes.folder / index).glob("*.whl"):
            folder = tmp_path / "folders" / index / file.name.split("-")[0].replace("_", "-")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / file.name).write_bytes(file.read_bytes())
    mirror = tuple(f"index:{index}={tmp_path / 'folders' / index}" for index in ("inner", "torches"))
    indexes.asked.clear()
    assert "nothing to change" in run(update="python", mirror=mirror)[1]
    assert indexes.asked == []
    assert path.read_text() == from_server
    code, out, err = run(check=True, stack="one", mirror=(*mirror, "https://host.invalid/=/"))
    assert code == TROUBLE, "there is no repository"
    assert "ok      5 wheels: as locked" in out
    assert "wheel" not in err
    served = (f"index:inner={indexes.address}/inner", "https://host.invalid/=/")
    assert (
        "ok      5 wheels: as their indexes state (--download fetches and hashes them)"
        in run(check=True, stack="one", mirror=served)[1]
    )


@pytest.mark.usefixtures("small")
def test_what_stands_in_the_document(run: Any) -> None:
    _, out, _ = run(update="python", json=True)
    document, free = json.loads(out), FREE_KEYS["lock"]
    merge(shape(document, free), shape(EXAMPLES["lock"], free))
    assert set(keys(document, free)) <= set(keys(EXAMPLES["lock"], free))
    first = document["changes"][0]
    assert (first["kind"], first["name"], first["changed"], first["before"]["numpy"], first["after"]["numpy"]) == (
        *("wheels", "one cp312-x86_64", True),
        *("1.0", "2.0"),
    )


def refused(run: Any, path: Path, old: str = "", new: str = "", **words: Any) -> str:
    """Change the lock, update its wheels in vain; return why."""
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    before = path.read_text()
    code, _, err = run(update="python", **words)
    assert code == TROUBLE
    assert path.read_text() == before
    return str(err).strip()


def test_every_target_without_an_answer_is_named(run: Any, path: Path) -> None:
    lines = refused(run, path, '"numpy", "setup', '"numpy>3", "setup').splitlines()
    for target, line in zip(("cp312", "cp313"), lines, strict=True):
        assert line.startswith(
            f"{path}: stack.one, {target}-x86_64: uv finds no set of wheels — found error: No solution found"
        )
        assert "numpy" in line
        assert line.endswith("Try: other requirements, overrides or indexes of this stack")


@pytest.mark.usefixtures("small")
def test_torch_without_cuda_is_refused(run: Any, path: Path) -> None:
    text = refused(run, path, '"cp312-x86_64"]', '"cp312-aarch64"]')
    assert text == (
        f"{path}: stack.one, cp312-aarch64: torch 2.10.0 on index torches is made without CUDA for aarch64 — found"
        " torch-2.10.0-cp312-cp312-manylinux_2_28_aarch64.whl, wanted a torch that needs wheels of CUDA."
        " Try: taking cp312-aarch64 out of targets, or an index in indexes.torch that has CUDA wheels for aarch64"
    )


@pytest.mark.usefixtures("small")
def test_torch_with_cuda_for_aarch64_is_taken(run: Any, path: Path, indexes: Indexes) -> None:
    indexes.make("torches", "torch", "2.10.0", tags=TAGS.format("cp312", "aarch64"), requires="nvidia-nccl-cu12")
    path.write_text(path.read_text().replace('"cp312-x86_64"]', '"cp312-aarch64"]'))
    assert run(update="python")[0] == OK
    found = locks.read_lock_file(path).stacks["one"].pinned("torch", "cp312-aarch64")
    assert found
    assert found.file.endswith("aarch64.whl")


@pytest.mark.usefixtures("small")
def test_wheels_that_break_a_rule_are_refused(run: Any, path: Path) -> None:
    text = refused(run, path, ', "setuptools<82"]', "]", root=ROOT)
    assert "DeepEP's setup.py needs setuptools, which an environment of Python 3.12 does not bring" in text


def test_an_index_that_nothing_names(run: Any, path: Path) -> None:
    assert refused(run, path, mirror=()) == (
        "index inner: nothing says where it is. Try: a table [indexes.inner] in the lock, or --mirror "
        "index:inner=URL_OR_DIRECTORY"
    )


@pytest.mark.usefixtures("small")
def test_an_index_without_hashes_is_asked_for_the_file(run: Any, path: Path, indexes: Indexes) -> None:
    indexes.hashes["numpy-2.0-py3-none-any.whl"] = ""
    assert run(update="python")[0] == OK
    found = locks.read_lock_file(path).stacks["one"].pinned("numpy")
    assert found
    assert found.hash == indexes.make("inner", "numpy", "2.0").hash


def test_nobody_asks(run: Any, path: Path) -> None:
    text = refused(run, path, stack="plain")
    assert text.startswith(
        "--update: no stack here says what its wheels are resolved from — found plain. Try: python = ["
    )
    assert run(update="python", ref="main")[2] == "--ref: is for one pin — wanted --update=NAME --ref=main"
    assert run(download=True)[2] == "--download: is a way to check wheels — wanted --check --download"


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "pages"])
def test_check_says_what_became_of_a_wheel(as_json: bool, indexes: Indexes) -> None:
    indexes.as_json = as_json
    good, gone, other, longer = (indexes.make("inner", name) for name in ("good", "gone", "other", "longer"))
    renamed, pulled, silent = (indexes.make("inner", name) for name in ("renamed", "pulled", "silent"))
    (indexes.folder / "inner" / gone.file).unlink()
    indexes.make("inner", "other", requires="good")
    indexes.make("inner", "gone", "1.1")
    (indexes.folder / "inner" / renamed.file).rename(indexes.folder / "inner/renamed-1.0-1-py3-none-any.whl")
    indexes.yanked[pulled.file] = "breaks everything"
    indexes.hashes[silent.file] = ""
    place = f"{indexes.address}/inner"
    pins = [
        good,
        gone,
        other,
        replace(longer, size=longer.size + 1),
        renamed,
        pulled,
        silent,
        replace(good, name="nobody", file="nobody-1.0-py3-none-any.whl"),
    ]
    ways = Ways(Mirrors((Level({}, {"inner": place}),)), Path("/nowhere"))
    found = check.check_wheels(pins, ways, lambda wheel, checked: None)
    said = {
        wheel.name: [f"{problem.what} — {problem.found}" for problem in checked.problems]
        for wheel, checked in found.items()
    }
    where = f"index inner ({place})"
    new = filetree.hash_file(indexes.folder / "inner" / other.file)
    assert said == {
        "good": [],
        "gone": [f"gone-1.0-py3-none-any.whl has vanished from {where} — 1 other files of gone"],
        "other": [f"what {where} offers is another file under the same name — {new}"],
        "longer": [f"what {where} offers has another size — {longer.size} bytes"],
        "renamed": [f"renamed-1.0-py3-none-any.whl has vanished from {where} — renamed-1.0-1-py3-none-any.whl"],
        "pulled": [],
        "silent": [f"{where} gives no hash for it — "],
        "nobody": [f"nobody-1.0-py3-none-any.whl has vanished from {where} — nothing of this name"],
    }
    assert found[pulled].notes == ("was withdrawn (yanked): breaks everything; it is still offered",)
    assert not [each for each in indexes.asked if each.startswith("GET") and each.endswith(".whl")], (
        "something was downloaded"
    )


def test_the_size_of_a_file_elsewhere_is_asked_for_without_the_file(indexes: Indexes) -> None:
    wheel = indexes.make("inner", "good")
    index = PackageIndex("inner", f"{indexes.address}/inner", {})
    assert size_of(index, f"{indexes.address}/moved/inner/good/{wheel.file}") == wheel.size
    assert indexes.asked == [f"HEAD /moved/inner/good/{wheel.file}", f"HEAD /inner/good/{wheel.file}"]


def test_downloads_and_caches(indexes: Indexes, tmp_path: Path) -> None:
    here, lost = indexes.make("inner", "here"), indexes.make("inner", "lost")
    indexes.hashes[here.file] = ""
    at = Mirrors((Level({}, {"inner": f"{indexes.address}/inner"}),))
    cache = tmp_path / "downloads"
    wheels.cached_file(here, cache).parent.mkdir(parents=True)
    wheels.cached_file(here, cache).write_bytes((indexes.folder / "inner" / here.file).read_bytes())
    (indexes.folder / "inner" / lost.file).unlink()

    def problems(ways: Ways) -> list[str]:
        found = check.check_wheels([here, lost], ways, lambda wheel, checked: None)
        return [wheel.name for wheel, checked in found.items() if checked.problems]

    indexes.asked.clear()
    assert problems(Ways(at, cache, download=True)) == ["lost"]
    assert f"GET /inner/here/{here.file}" in indexes.asked, "the cache must not answer"
    # Where no index answers, the cache does.
    away = Mirrors((Level({}, {"inner": "http://127.0.0.1:9/simple"}),))
    assert problems(Ways(away, cache)) == ["lost"]
    wheels.cached_file(here, cache).write_bytes(b"broken")
    assert problems(Ways(away, cache)) == ["here", "lost"]
    assert problems(Ways(Mirrors(), cache)) == ["here", "lost"]


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        ("another file", "does not give uv-1.0-py3-none-"),
        ("another file in a directory", "this file is not the locked one"),
        ("not in the directory", None),
        ("out of reach", None),
    ],
)
def test_a_locked_uv_that_was_tampered_with_is_told_and_one_out_of_reach_is_replaced(
    broken: str, found: str | None, indexes: Indexes, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = indexes.make("inner", "uv", tags=f"py3-none-manylinux_2_17_{platform.machine()}")
    if broken.startswith("not"):
        (indexes.folder / "inner" / tool.file).unlink()
    place = str(indexes.folder / "inner") if "directory" in broken else f"{indexes.address}/inner"
    at = Mirrors((Level({}, {"inner": "http://127.0.0.1:9/simple" if broken == "out of reach" else place}),))
    monkeypatch.setenv("PIP_RETRIES", "0")
    lock = replace(locks.read_lock_file(path), tools={"uv": (replace(tool, hash=ENTRY.hash),)})
    if found:
        with pytest.raises(Trouble, match=found):
            uv.find_uv(platform.machine(), lock, at, print)
        return
    own = uv.find_uv(platform.machine(), lock, at, print)
    assert own.remark.startswith(f"the locked uv 1.0 cannot be fetched: {own.path} (uv 0.")
    lacking = uv.find_uv(platform.machine(), replace(lock, tools={}), at, print)
    assert lacking.remark.startswith("the lock has no uv for this kind of machine: ")
    with pytest.raises(Trouble, match="no wheel of this program for the hosts"):
        uv.find_uv("riscv64", lock, at, print)


def test_own_index_is_the_one_of_pip(indexes: Indexes, monkeypatch: pytest.MonkeyPatch) -> None:
    default = pip.own_index({})
    assert default.startswith("https://")
    assert default.endswith("/simple")
    monkeypatch.setenv("PIP_INDEX_URL", f"{indexes.address}/inner")
    assert pip.own_index(pip.own_settings()) == f"{indexes.address}/inner"
    good = replace(indexes.make("inner", "good"), index="pypi")
    found = check.check_wheels([good], Ways(Mirrors(), Path("/nowhere")), lambda wheel, checked: None)
    assert found[good].problems == ()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(Trouble, match="pip is set up to ask no index"):
        pip.own_index(pip.own_settings())


ENTRY = Wheel("a", "1.0", "inner", "a-1.0-py3-none-any.whl", "sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=", 7)
LINE = edit.line(ENTRY)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[stack.s]\nwheels.cp312-x86_64 = []\n", f"[stack.s]\nwheels.cp312-x86_64 = [\n  {LINE}\n]\n"),
        ("[stack.s.wheels]\r\ncp312-x86_64=[]#x\r\n", f"[stack.s.wheels]\r\ncp312-x86_64=[\r\n  {LINE}\r\n]#x\r\n"),
        (
            "[stack.s]\ncuda = '12'\n# about t\n[t]\n",
            f"[stack.s]\ncuda = '12'\nwheels.cp312-x86_64 = [\n  {LINE}\n]\n# about t\n[t]\n",
        ),
        ("[stack.s] # x\ncuda = '12'", f"[stack.s] # x\ncuda = '12'\nwheels.cp312-x86_64 = [\n  {LINE}\n]\n"),
        (
            f'[stack."s"]\nnote = [\'[\', "]\\""]\nwheels.\'cp312-x86_64\' = [ # ]\n{LINE[:-1]}]\n',
            f'[stack."s"]\nnote = [\'[\', "]\\""]\nwheels.\'cp312-x86_64\' = [ # ]\n  {LINE}\n]\n',
        ),
    ],
    ids=["empty", "crlf-table", "added", "at-the-end", "last-line-with-bracket"],
)
def test_lists_are_put_where_they_belong(old: str, new: str) -> None:
    assert edit.put_wheels(old, {("s", "cp312-x86_64"): [ENTRY]}, "x") == new
    assert edit.put_wheels(new, {("s", "cp312-x86_64"): [ENTRY]}, "x") == new


@pytest.mark.parametrize(
    "old", ["stack = { s = { cuda = '12' } }\n", 'x = """\n[stack.s]\n"""\n[stack]\ns.cuda = "12"\n']
)
def test_what_cannot_be_rewritten_is_left_to_a_person(old: str) -> None:
    with pytest.raises(
        Trouble, match=r"x: cannot be rewritten without touching other lines — found stack\.s\.wheels\.cp312-x86_64"
    ):
        edit.put_wheels(old, {("s", "cp312-x86_64"): [ENTRY]}, "x")


def test_the_shipped_lock_has_wheels_for_what_it_asks() -> None:
    lock = locks.read_lock_file(ROOT / "deepep.lock.toml")
    for stack in lock.stacks.values():
        minors = (11, 12, 13) if stack.name == "v2-vllm" else (10, 11, 12, 13)
        # torch of CUDA 12 has no CUDA for aarch64 on PyPI.
        grace = {f"cp3{minor}-aarch64" for minor in (11, 12, 13)} if stack.cuda == "13" else set()
        assert set(stack.wheels) == set(stack.asked.targets) == {f"cp3{minor}-x86_64" for minor in minors} | grace
        for requirement in (*stack.asked.python, *stack.asked.overrides):
            _, equals, version = requirement.partition("==")
            found = [stack.pinned(requirement_name(requirement), target) for target in stack.wheels]
            assert all(wheel and (not equals or wheel.version == version) for wheel in found), (stack.name, requirement)
    assert uv.tool_wheel(lock, "uv", "x86_64")
    assert uv.tool_wheel(lock, "uv", "aarch64")
