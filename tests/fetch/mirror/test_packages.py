"""Package repositories in a mirror: what is taken, what is refused, what a host gets, and that real apt installs
from it alone."""

from __future__ import annotations

import bz2
import contextlib
import dataclasses
import functools
import gzip
import hashlib
import http.server
import json
import lzma
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepep_bootstrap.cli.commands import mirror as verb
from deepep_bootstrap.core import filetree
from deepep_bootstrap.core.errors import OK, TROUBLE, VERDICT, Trouble
from deepep_bootstrap.fetch import locations
from deepep_bootstrap.fetch.locations import Mirrors
from deepep_bootstrap.fetch.mirror import apt_parts, apt_solver, index, peek
from deepep_bootstrap.fetch.mirror.apt_fill import Brought, fill_packages, foretell_packages
from deepep_bootstrap.fetch.mirror.apt_solver import Pool, close
from deepep_bootstrap.fetch.mirror.fill import Filled, FillJob
from deepep_bootstrap.fetch.mirror.index import MirrorWants, parse_mirror_index, read_mirror_index, render_mirror_index
from deepep_bootstrap.inventory.survey import Flags
from deepep_bootstrap.lock import model
from deepep_bootstrap.lock.model import Lock
from deepep_bootstrap.plan import host_recipes, steps
from deepep_bootstrap.plan.host_recipes import BLOCKED, TO_APPLY, Check, Preparation
from tests.recipes.test_packages import Machine, machine, toolkit
from tests.support import plan as plan_support
from tests.support.paths import ROOT
from tests.support.repos import Package, Signer, make_apt_repository, signer

pytestmark = pytest.mark.usefixtures("programs")

__all__ = ["machine"]  # a fixture

CASES = ROOT / "tests" / "cases"
URL = "https://vendor.invalid/repos/x86_64"
FOLDER = "packages/vendor.invalid/repos/x86_64"


def read_cases(room: str) -> list[Any]:
    return [
        pytest.param(json.loads(path.read_text(encoding="utf-8")), id=path.stem)
        for path in sorted((CASES / room).glob("*.json"))
    ]


# --- indexes and closures ----------------------------------------------------------------------------------------------------------------

TAIL = st.text("0019aZ.+~", max_size=6)
VERSIONS = st.builds(
    lambda epoch, start, upstream, rev: f"{epoch}{start}{upstream}{rev and '-' + rev}",
    st.sampled_from(["", "", "0:", "1:", "01:"]),
    st.sampled_from("0129"),
    TAIL,
    TAIL,
)


def dpkg_says(left: str, right: str) -> int:
    """-1, 0 or 1 by `dpkg --compare-versions`."""
    for sign, value in (("lt", -1), ("eq", 0)):
        if (
            subprocess.run(
                ["dpkg", "--compare-versions", left, sign, right], check=False, stderr=subprocess.DEVNULL
            ).returncode
            == 0
        ):
            return value
    return 1


@settings(max_examples=150, deadline=None)
@given(VERSIONS, VERSIONS)
def test_versions_sort_as_dpkg_sorts_them(left: str, right: str) -> None:
    ours = (apt_solver.order(left) > apt_solver.order(right)) - (apt_solver.order(left) < apt_solver.order(right))
    assert ours == dpkg_says(left, right)


@pytest.mark.parametrize(
    ("left", "right"),
    [("1~~", "1~"), ("1~", "1"), ("1", "1-0"), ("1.0", "1.00"), ("0~", "0"), ("1a", "1+"), ("9" * 5000, "1")],
)
def test_versions_that_are_easily_wrong(left: str, right: str) -> None:
    ours = (apt_solver.order(left) > apt_solver.order(right)) - (apt_solver.order(left) < apt_solver.order(right))
    assert ours == dpkg_says(left, right)


@pytest.mark.parametrize("case", read_cases("debclosure"))
def test_what_is_taken(case: dict[str, Any]) -> None:
    debs = apt_solver.read_packages("\n".join(case["packages"]), "x")
    found = close(Pool(debs, "amd64"), case["words"], "packages x")
    assert [f"{deb.name} {deb.version}" for deb in found.debs] == case["takes"], case["says"]
    assert list(found.elsewhere) == case["elsewhere"], case["says"]
    assert [str(problem) for problem in found.problems] == case["problems"], case["says"]


@pytest.mark.parametrize("case", read_cases("debrepo"))
def test_indexes_that_are_refused(case: dict[str, Any]) -> None:
    text = "\n".join(case["lines"])
    read: dict[str, Callable[[], object]] = {
        "release": lambda: apt_solver.read_release(text, "x"),
        "packages": lambda: apt_solver.read_packages(text, "x"),
        "wants": lambda: good[0].wants,
    }
    good = apt_solver.read_packages(text, "x") if case["kind"] == "wants" else ()
    with pytest.raises(Trouble) as caught:
        read[case["kind"]]()
    assert str(caught.value) == case["message"]


LINES = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "Package: a",
                "Version: 1",
                "Architecture: all",
                "Filename: a",
                "Size: 1",
                f"SHA256: {'0' * 64}",
                "SHA256:",
                "",
                " x",
            ]
        ),
        st.builds(
            "{}: {}".format,
            st.sampled_from(["Depends", "Provides", "Valid-Until", "Date", "Filename", "Size"]),
            st.text(max_size=12),
        ),
        st.just(f" {'0' * 64} 1 Packages"),
        st.text(max_size=20),
    ),
    max_size=12,
).map("\n".join)


@given(LINES)
def test_whatever_an_index_holds_it_is_read_or_refused(text: str) -> None:
    for reader in (
        apt_solver.read_release,
        lambda text, where: [deb.wants for deb in apt_solver.read_packages(text, where)],
    ):
        with contextlib.suppress(Trouble):
            reader(text, "x")


@given(st.text("0123456789 ,:+-TuesdayJanGMTUC", max_size=40))
def test_whatever_a_date_is_it_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(Trouble):
        apt_solver.read_release(f"Valid-Until: {text}\nSHA256:\n {'0' * 64} 1 Packages\n", "x")


def test_letters_that_python_takes_for_ends_of_lines_are_none() -> None:
    odd = "Description: x\u2028y\x85z\x0c.\n more\x1c.\n"
    text = f"Package: a\r\nVersion: 1\nArchitecture: all\nFilename: a\nSize: 1\nSHA256: {'0' * 64}\n{odd}"
    assert [deb.name for deb in apt_solver.read_packages(text, "x")] == ["a"]


NAMES = st.sampled_from("abcdefg")
GROUP = st.lists(NAMES, min_size=1, max_size=3).map(" | ".join)


@given(
    st.lists(st.tuples(NAMES, st.sampled_from("123"), st.lists(GROUP, max_size=3), NAMES), max_size=8),
    st.lists(NAMES, max_size=3),
)
def test_nothing_that_is_asked_for_is_left_open(rows: list[tuple[str, str, list[str], str]], words: list[str]) -> None:
    debs = tuple(
        apt_solver.Deb(name, version, "all", f"{name}{version}", 1, "0" * 64, ", ".join(groups), provides)
        for name, version, groups, provides in rows
    )
    found = close(Pool(debs, "amd64"), words, "x")
    have = {deb.name for deb in found.debs} | {deb.provides for deb in found.debs}
    asked = [*([word] for word in words), *([each.name for each in group] for deb in found.debs for group in deb.wants)]
    for names in asked:
        assert have.intersection(names) or " | ".join(names) in found.elsewhere, names
    assert not {name for name in {deb.name for deb in debs} if name in found.elsewhere}, (
        "what is here does not come from elsewhere"
    )


# --- a repository, and what is brought of it ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def key() -> Iterator[Signer]:
    with signer() as made:
        yield made


def deb(name: str, version: str = "1", arch: str = "amd64", **fields: str) -> dict[str, str]:
    """A package of an index; what its file holds is nobody's business here."""
    return {
        "Package": name,
        "Version": version,
        "Architecture": arch,
        **{word.replace("_", "-"): text for word, text in fields.items()},
    }


TOOLKIT = (
    deb("cuda-toolkit-12-9", "12.9.1-1", Depends="cuda-nvcc-12-9 (>= 12.9.1), libc6 (>= 2.34), cuda-common"),
    deb("cuda-toolkit-12-9", "12.9.2-1", Depends="cuda-nvcc-12-9 (>= 12.9.2)"),
    deb("cuda-nvcc-12-9", "12.9.1-1"),
    deb("cuda-nvcc-12-9", "1:12.9.0-1"),
    deb("cuda-config", "1", "all", Provides="cuda-common"),
    deb("cuda-toolkit-13-0", "13.0.2-1"),
    deb("nsight", "9"),
)
TAKEN = ["cuda-config_1_all.deb", "cuda-nvcc-12-9_1%3a12.9.0-1_amd64.deb", "cuda-toolkit-12-9_12.9.1-1_amd64.deb"]


@dataclass(frozen=True)
class Layout:
    """How a repository is laid out: flat or with a suite, which forms its list of packages has, and how it is
    signed."""

    flat: bool = True
    forms: tuple[str, ...] = ("", ".gz")
    detached: bool = False
    extra: str = ""

    @property
    def suite(self) -> str:
        return "/" if self.flat else "stable"

    @property
    def release(self) -> str:
        return "" if self.flat else "dists/stable/"

    @property
    def packages(self) -> str:
        return "Packages" if self.flat else "main/binary-amd64/Packages"


PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": bytes,
}


def make(folder: Path, by: Signer, debs: Sequence[dict[str, str]] = TOOLKIT, layout: Layout | None = None) -> None:
    """Make or replace a repository, with its key at key.pub."""
    layout = layout or Layout()
    shutil.rmtree(folder, ignore_errors=True)
    (folder / layout.release / layout.packages).parent.mkdir(parents=True)
    text = ""
    for each in debs:
        file = f"{each['Package']}_{each['Version'].replace(':', '%3a')}_{each['Architecture']}.deb"
        content = f"content of {file}".encode()
        (folder / file).write_bytes(content)
        fields = {
            **each,
            "Filename": f"./{file}",
            "Size": str(len(content)),
            "SHA256": hashlib.sha256(content).hexdigest(),
        }
        text += "".join(f"{name}: {value}\n" for name, value in fields.items()) + "\n"
    lines = ""
    for form in layout.forms:
        data = PACK[form](text.encode())
        (folder / layout.release / f"{layout.packages}{form}").write_bytes(data)
        lines += f" {hashlib.sha256(data).hexdigest()} {len(data)} {layout.packages}{form}\n"
    sign(
        folder,
        by,
        f"Origin: Vendor\nLabel: Vendor CUDA\nDate: Thu, 01 Jan 2026 00:00:00 UTC\n{layout.extra}SHA256:\n{lines}",
        layout,
    )
    (folder / "key.pub").write_bytes(by.public())


def sign(folder: Path, by: Signer, text: str, layout: Layout, *more: str) -> None:
    place = folder / layout.release
    if layout.detached:
        (place / "Release").write_text(text)
        (place / "Release.gpg").write_bytes(
            by.gpg("--local-user", by.fingerprint, *more, "--armor", "--detach-sign", given=text.encode())
        )
    else:
        (place / "InRelease").write_bytes(
            by.gpg("--local-user", by.fingerprint, *more, "--clearsign", given=text.encode())
        )


LOCK = """version = 1
default_stack = "one"
[source.tiny]
url = "https://git.invalid/owner/tiny"
ref = "main"
rev = "{rev}"
hash = "{hash}"
last_modified = 1
version = "1.0"
submodules = false
[stack.one]
deepep = "tiny"
nvshmem = "tiny"
gdrcopy = "tiny"
cuda = "12"
[system.debian-12]
manager = "apt"
cuda-toolkit-12 = ["cuda-toolkit-12-9=12.9.1-1"]
cuda-toolkit-13 = ["cuda-toolkit-13-0=13.0.2-1"]
kernel-headers = ["linux-headers-{{kernel}}"]
[system.debian-12.repository.cuda]
url = "{url}"
suite = "{suite}"
{components}
key_url = "{url}/key.pub"
key_fingerprint = "{fingerprint}"
purposes = ["cuda-toolkit-12", "cuda-toolkit-13"]
priority = 100
[system.debian-13]
manager = "apt"
build-deps = ["gcc"]
[system.rocky-9]
manager = "dnf"
cuda-toolkit-12 = ["cuda-toolkit-12-9=12.9.1-1"]
[system.rocky-9.repository.cuda]
url = "https://vendor.invalid/rhel9"
key_url = "https://vendor.invalid/rhel9/key.pub"
key_fingerprint = "{fingerprint}"
purposes = ["cuda-toolkit-12"]
"""


@dataclass
class Site:
    """A vendor's repository below `vendor`, a lock that names it by its address, and a mirror."""

    folder: Path
    key: Signer
    layout: Layout = field(default_factory=Layout)
    said: list[str] = field(default_factory=list)
    pin: dict[str, str] = field(default_factory=lambda: {"rev": "0" * 40, "hash": filetree.sri(bytes(32))})

    @property
    def vendor(self) -> Path:
        return self.folder / "vendor"

    @property
    def repository(self) -> Path:
        return self.vendor / "repos/x86_64"

    @property
    def mirror(self) -> Path:
        return self.folder / "mirror"

    @property
    def copy(self) -> Path:
        return self.mirror / FOLDER

    @property
    def found(self) -> Mirrors:
        return locations.read_mirrors([f"https://vendor.invalid/={self.vendor}"], {}, {})

    def remake(self, debs: Sequence[dict[str, str]] = TOOLKIT, layout: Layout | None = None) -> None:
        self.layout = layout or self.layout
        make(self.repository, self.key, debs, self.layout)

    def write_lock(self, **changes: str) -> Lock:
        components = "" if self.layout.flat else 'components = ["main"]'
        values = {**self.pin, "url": URL, "suite": self.layout.suite, "components": components}
        (self.folder / "lock.toml").write_text(
            LOCK.format(**{**values, "fingerprint": self.key.fingerprint, **changes})
        )
        return model.read_lock_file(self.folder / "lock.toml")

    def job(self) -> FillJob:
        return FillJob(self.mirror, MirrorWants((), (), ()), self.found, None, False, self.said.append)

    def parts(self, **changes: str) -> tuple[apt_parts.RepositoryPart, ...]:
        return apt_parts.parts(self.write_lock(**changes), ["debian-12"], ["one"], ["cp312-x86_64"])

    def fill(self, **changes: str) -> tuple[Filled, tuple[Brought, ...]]:
        self.mirror.mkdir(exist_ok=True)
        filled = Filled()
        return filled, fill_packages(self.job(), filled, self.parts(**changes))

    def refuses(self, **changes: str) -> list[str]:
        filled, brought = self.fill(**changes)
        assert (brought, filled.packages) == ((), {})
        return [str(problem) for problem in filled.problems]


@pytest.fixture
def site(tmp_path: Path, key: Signer) -> Site:
    made = Site(tmp_path, key)
    made.remake()
    return made


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(detached=True),
        Layout(forms=(".xz",)),
        Layout(forms=(".bz2", ".zst")),
        Layout(flat=False, forms=("", ".gz", ".xz")),
    ],
    ids=["inrelease", "release-gpg", "xz", "bz2-zst", "suite"],
)
def test_what_is_taken_is_the_vendors_byte_for_byte(site: Site, layout: Layout) -> None:
    site.remake(layout=layout)
    filled, brought = site.fill()
    assert filled.problems == []
    signed = ("Release", "Release.gpg") if layout.detached else ("InRelease",)
    indexes = {f"{layout.release}{name}" for name in (*signed, *(f"{layout.packages}{form}" for form in layout.forms))}
    assert set(files_of(site.copy)) == {*TAKEN, "key.pub", *indexes}
    assert all(files_of(site.repository)[name] == content for name, content in files_of(site.copy).items())
    assert {path: record.hash for path, record in filled.files.items()} == {
        f"{FOLDER}/{name}": filetree.sri(hashlib.sha256(content).digest())
        for name, content in files_of(site.copy).items()
    }
    assert [(each.name, len(each.debs), each.elsewhere) for each in brought] == [
        ("debian-12/cuda", 3, ("libc6 (>= 2.34)",))
    ]
    assert site.said[-1] == "packages debian-12/cuda: hosts get from their distribution's own mirror: libc6 (>= 2.34)"
    assert f"signed by {site.key.fingerprint}" in site.said[-2]
    assert not list(site.mirror.glob(".tmp-*"))


def test_what_is_there_needs_nobody_and_what_was_damaged_is_brought_again(site: Site) -> None:
    site.fill()
    before = files_of(site.copy)
    (site.copy / TAKEN[0]).write_bytes(b"content of something else")
    (site.copy / TAKEN[1]).unlink()
    filled, _ = site.fill()
    assert (filled.added, filled.repaired) == ([f"{FOLDER}/{TAKEN[1]}"], [f"{FOLDER}/{TAKEN[0]}"])
    shutil.rmtree(site.vendor)
    site.vendor.mkdir()
    filled, _ = site.fill()
    assert (filled.added, filled.repaired, filled.problems) == ([], [], [])
    assert files_of(site.copy) == before


def test_when_the_vendor_went_on_the_indexes_of_today_are_taken_where_those_there_do_not_do(site: Site) -> None:
    site.fill()
    site.remake((*TOOLKIT, deb("cuda-nvcc-12-9", "1:12.9.5-1")))
    assert site.fill()[0].added == [], "what is there does"
    old = site.repository / TAKEN[1]
    (site.copy / TAKEN[1]).unlink()
    old.unlink()
    filled, brought = site.fill()
    assert filled.added == [f"{FOLDER}/cuda-nvcc-12-9_1%3a12.9.5-1_amd64.deb"]
    assert f"{FOLDER}/InRelease" in filled.repaired
    assert [each.version for each in brought[0].debs if each.name == "cuda-nvcc-12-9"] == ["1:12.9.5-1"]
    (site.copy / "InRelease").write_bytes(b"-----BEGIN PGP SIGNED MESSAGE-----\nnothing\n")
    assert site.fill()[0].repaired == [f"{FOLDER}/InRelease"]


def test_others_may_read_it_whatever_the_umask(site: Site) -> None:
    """apt reads as a user of its own, and so does a web server."""
    before = os.umask(0o077)
    try:
        assert site.fill()[0].problems == []
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o055 for path in (site.mirror / "packages").rglob("*") if path.is_dir()} == {0o055}
    assert {path.stat().st_mode & 0o044 for path in site.copy.iterdir()} == {0o044}


def test_only_the_toolkits_of_the_stacks_are_taken(site: Site) -> None:
    found = site.write_lock()
    one = dataclasses.replace(found.stacks["one"], cuda="13")
    lock_of_13 = dataclasses.replace(found, stacks={"one": one})
    parts = apt_parts.parts(lock_of_13, ["debian-12"], ["one"], ["cp312-x86_64"])
    assert parts[0].copied.wanted == ("cuda-toolkit-13-0=13.0.2-1",)
    parts = apt_parts.parts(
        dataclasses.replace(found, stacks={"one": dataclasses.replace(one, cuda="14")}), ["debian-12"], ["one"], []
    )
    assert parts == ()


# --- what is refused ---------------------------------------------------------------------------------------------------------------------


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "Packages",
            f"packages debian-12/cuda: {FOLDER}/Packages is not the file that the signed index names — found sha256-",
        ),
        (
            "Packages.gz",
            f"packages debian-12/cuda: {FOLDER}/Packages.gz is not the file that the signed index names — found sha256-",
        ),
        (
            TAKEN[2],
            f"packages debian-12/cuda: {FOLDER}/{TAKEN[2]} is not the file that the signed index names — found sha256-",
        ),
    ],
)
def test_what_was_tampered_with_is_refused(site: Site, name: str, says: str) -> None:
    flip(site.repository / name)
    said = site.refuses()
    assert [line[: len(says)] for line in said] == [says]
    assert said[0].endswith("Try: the same command again, later: the repository may just be changing")
    assert not (site.copy / "InRelease").exists(), "no signature over what is not there"
    assert not (site.copy / name).exists()


def test_a_deb_of_another_size_is_refused(site: Site) -> None:
    with (site.repository / TAKEN[2]).open("ab") as stream:
        stream.write(b"more")
    (said,) = site.refuses()
    assert "found more than 51 bytes, wanted 51 bytes" in said.replace(str(len(f"content of {TAKEN[2]}")), "51")


def test_a_signed_text_that_was_changed_is_refused(site: Site) -> None:
    text = (site.repository / "InRelease").read_text()
    (site.repository / "InRelease").write_text(text.replace("Label: Vendor CUDA", "Label: Vendor Cuda"))
    wanted = site.key.fingerprint
    assert site.refuses() == [
        (
            f"packages debian-12/cuda: InRelease: has no good signature of the key in the lock — found BADSIG, wanted "
            f"{wanted}"
        )
    ]


def test_text_before_and_after_the_signed_one_counts_for_nothing(site: Site) -> None:
    file = site.repository / "InRelease"
    file.write_text(f"SHA256:\n{'0' * 64} 1 Packages\n{file.read_text()}")
    (said,) = site.refuses()
    assert "InRelease: is not clear-signed — wanted -----BEGIN PGP SIGNED MESSAGE-----" in said


def test_another_key_is_refused(site: Site) -> None:
    wanted = "0123456789ABCDEF0123456789ABCDEF01234567"
    where = f"packages debian-12/cuda: {URL}/key.pub"
    assert site.refuses(fingerprint=wanted) == [
        f"{where}: is not the key in the lock — found {site.key.fingerprint}, wanted {wanted}"
    ]
    (site.repository / "key.pub").write_text("<html>not found</html>\n")
    assert site.refuses() == [f"{where}: is not the key in the lock — found no key, wanted {site.key.fingerprint}"]


def test_what_another_key_signed_is_refused_though_it_is_beside_the_locks(site: Site) -> None:
    with signer("Somebody else") as other:
        make(site.repository, other)
        (site.repository / "key.pub").write_bytes(other.public() + site.key.public())
        (said,) = site.refuses()
    assert f"found a signature of {other.fingerprint[-16:]}, wanted {site.key.fingerprint}" in said


def test_a_weak_digest_is_refused_as_apt_does(site: Site) -> None:
    with signer("Old vendor", "rsa2048") as old:
        make(site.repository, old)
        sign(site.repository, old, "Date: x\nSHA256:\n", Layout(), "--digest-algo", "SHA1")
        (said,) = site.refuses(fingerprint=old.fingerprint)
    assert f"found one over SHA1, wanted {old.fingerprint}" in said


def test_a_key_that_is_out_of_date_is_refused(site: Site) -> None:
    with signer() as other:
        past = ("--faked-system-time", "20200101T000000")
        other.gpg(
            *past, "--passphrase", "", "--quick-generate-key", "Old <old@example.invalid>", "ed25519", "sign", "1d"
        )
        listing = other.gpg("--with-colons", "--list-keys", "old@example.invalid").decode()
        old = Signer(other.home, next(line.split(":")[9] for line in listing.splitlines() if line.startswith("fpr:")))
        make(site.repository, other)
        sign(site.repository, old, "Date: x\nSHA256:\n", Layout(), *past)
        (site.repository / "key.pub").write_bytes(old.public())
        (said,) = site.refuses(fingerprint=old.fingerprint)
    assert f"found EXPKEYSIG, wanted {old.fingerprint}" in said


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ("Valid-Until: Fri, 02 Jan 2015 00:00:00 UTC\n", "its index is out of date"),
        ("Valid-Until: Fri, 02 Jan 2099 00:00:00 UTC\n", ""),
    ],
)
def test_an_index_that_apt_no_longer_takes_is_refused(site: Site, extra: str, says: str) -> None:
    site.remake(layout=Layout(extra=extra))
    if says:
        assert says in site.refuses()[0]
    else:
        assert site.fill()[0].problems == []


def test_what_cannot_be_had_is_named(site: Site) -> None:
    (site.repository / TAKEN[2]).unlink()
    assert f"{TAKEN[2]} cannot be read" in site.refuses()[0]
    (site.repository / "InRelease").unlink()
    assert f"{site.repository}/InRelease cannot be read" in site.refuses()[0]
    site.remake([deb("cuda-toolkit-12-9", "12.9.4-1")])
    assert site.refuses() == [
        "packages debian-12/cuda: has no package cuda-toolkit-12-9 in that version — found 12.9.4-1, wanted 12.9.1-1"
    ]
    site.remake(layout=Layout(forms=(".zst",)))
    assert "Packages is there in no form that can be read here" in site.refuses()[0]
    site.remake(layout=Layout(flat=False))
    shutil.move(site.repository / "dists", site.repository / "gone")
    assert "dists/stable/InRelease cannot be read" in site.refuses()[0]


# --- the verb ----------------------------------------------------------------------------------------------------------------------------


@dataclass
class Verb:
    """`invoke mirror` on a site whose lock has one small source."""

    site: Site

    def run(self, *, packages: str | bool = "", **flags: Any) -> int:
        own = {name: flags.pop(name) for name in ("check", "prune") if name in flags}
        places = (f"https://vendor.invalid/={self.site.vendor}", f"https://git.invalid/={self.site.folder}/git")
        common = Flags(ROOT, lock=str(self.site.folder / "lock.toml"), mirror=places, **flags)
        return verb.mirror(common, str(self.site.mirror), packages=packages, **own)


@pytest.fixture
def command(site: Site) -> Verb:
    tree = site.folder / "git/owner/tiny"
    tree.mkdir(parents=True)
    (tree / "file").write_text("x")
    hash_ = filetree.hash_path(tree)
    who = ["-c", "user.name=x", "-c", "user.email=x@example.invalid", "-c", "init.defaultBranch=main"]
    for words in (["init", "-q"], ["add", "file"], ["commit", "-qm", "x"]):
        subprocess.run(["git", *who, *words], cwd=tree, check=True)
    rev = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=tree, check=True, capture_output=True, text=True
    ).stdout.strip()
    site.pin = {"rev": rev, "hash": hash_}
    site.write_lock()
    return Verb(site)


def test_the_mirror_keeps_checks_and_prunes_packages(
    command: Verb, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run(packages="debian-12", dry_run=True) == OK
    said = capsys.readouterr().out
    assert [line.removeprefix("would fetch ") for line in said.splitlines() if FOLDER in line] == [
        f"{FOLDER}/{name}" for name in TAKEN
    ]
    assert not site.mirror.exists()
    assert command.run(packages="debian-12") == OK
    assert command.run(packages="debian-12", check=True) == OK
    assert command.run(packages="debian-12", dry_run=True) == OK
    assert ": 0 to fetch, " in capsys.readouterr().out
    index = read_mirror_index(site.mirror)
    assert index is not None
    assert index.packages["debian-12/cuda"] == site.parts()[0].copied
    assert parse_mirror_index(render_mirror_index(index).encode(), "x") == index
    assert command.run() == OK
    assert command.run(check=True) == OK, "what nobody named stays"
    flip(site.copy / TAKEN[0])
    (site.copy / TAKEN[1]).unlink()
    capsys.readouterr()
    assert command.run(check=True) == VERDICT
    said = capsys.readouterr().err
    assert f"{FOLDER}/{TAKEN[0]}: changed" in said
    assert f"{FOLDER}/{TAKEN[1]}: missing. Try: invoke mirror {site.mirror} --packages\n" in said
    assert command.run(packages=True) == OK
    assert "note: without rocky-9: repositories of dnf are not copied" in capsys.readouterr().out
    assert command.run(check=True) == OK
    assert command.run(prune=True) == OK
    assert not (site.mirror / "packages").exists()
    assert command.run(packages="debian-12", check=True) == VERDICT
    assert (
        f"packages debian-12/cuda: the mirror does not have this repository. Try: invoke mirror {site.mirror} "
        f"--packages=debian-12" in (capsys.readouterr().err)
    )


def test_the_document_has_what_docs_json_md_says(command: Verb, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/json.md").read_text(encoding="utf-8").partition("\n## mirror\n")[2]
    example = json.loads(text.partition("```json\n")[2].partition("```")[0])
    for flags in ({"packages": "debian-12", "dry_run": True}, {"packages": "debian-12"}, {"packages": "debian-12"}):
        assert command.run(json=True, **flags) == OK
        document = json.loads(capsys.readouterr().out)
        assert set(document) == set(example)
        assert {key: type(value) for key, value in document["packages"][0].items()} == {
            key: type(value) for key, value in example["packages"][0].items()
        }
        sizes = [len(f"content of {name}") for name in TAKEN]
        assert document["packages"] == [
            {
                "name": "debian-12/cuda",
                "date": "Thu, 01 Jan 2026 00:00:00 UTC",
                "packages": 3,
                "bytes": sum(sizes),
                "elsewhere": ["libc6 (>= 2.34)"],
            }
        ]
    assert command.run(json=True, check=True) == OK
    assert json.loads(capsys.readouterr().out)["packages"] == []


def test_a_mirror_of_another_lock_says_what_it_lacks(
    command: Verb, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run(packages="debian-12") == OK
    path = site.folder / "lock.toml"
    text = path.read_text()
    path.write_text(text.replace('"cuda-toolkit-12-9=12.9.1-1"', '"cuda-toolkit-12-9=12.9.2-1"'))
    capsys.readouterr()
    assert command.run(check=True) == VERDICT
    assert (
        "wants of it — found cuda-toolkit-12-9=12.9.1-1, wanted cuda-toolkit-12-9=12.9.2-1" in capsys.readouterr().err
    )
    assert command.run(packages="debian-12") == OK
    assert command.run(check=True) == OK
    assert (site.copy / TAKEN[2]).exists()
    assert command.run(packages="debian-12", prune=True) == OK
    assert command.run(check=True) == OK
    assert not (site.copy / TAKEN[2]).exists()
    path.write_text(text.replace('"cuda-toolkit-12-9=12.9.1-1"', '"cuda-toolkit-12-9=12.9.7-1"'))
    assert command.run(packages="debian-12") == TROUBLE
    assert "in that version — found 12.9.2-1, 12.9.1-1, wanted 12.9.7-1" in capsys.readouterr().err
    assert command.run(check=True) == VERDICT


def test_what_packages_cannot_mean(command: Verb) -> None:
    with pytest.raises(Trouble) as caught:
        command.run(packages="debian-12,debian-13,rocky-9,plan-9")
    assert [str(problem) for problem in caught.value.problems] == [
        "--packages: the lock has no repository for debian-13: its packages come from the distribution's own mirror",
        (
            "--packages: repositories of dnf are not copied, and rocky-9 has no other. Try: dnf reposync "
            "--download-metadata of "
            "https://vendor.invalid/rhel9 into a directory, with the key https://vendor.invalid/rhel9/key.pub beside "
            "the packages, "
            "and --mirror https://vendor.invalid/rhel9=DIRECTORY"
        ),
        "--packages: the lock has no such distribution — found plan-9, wanted all or debian-12",
    ]


def test_an_index_with_hostile_packages_is_refused(command: Verb, site: Site) -> None:
    assert command.run(packages="debian-12") == OK
    document = json.loads((site.mirror / "mirror.json").read_text())
    good = document["packages"]["debian-12/cuda"]
    changes: list[dict[str, Any]] = [
        {"url": "https://h/../.."},
        {"wanted": "x"},
        {"new": 1},
        {"fingerprint": "A"},
        {"suite": 1},
        {"archs": [1]},
    ]
    for name, value in (("x", good), ("a/b", []), *(("a/b", {**good, **change}) for change in changes)):
        with pytest.raises(Trouble, match="packages: "):
            index.parse_mirror_index(json.dumps({**document, "packages": {name: value}}).encode(), "x")
    with pytest.raises(Trouble, match="packages: of another kind"):
        index.parse_mirror_index(json.dumps({**document, "packages": []}).encode(), "x")


def test_a_dry_run_says_what_it_cannot_know(site: Site) -> None:
    site.remake()
    assert foretell_packages(site.job(), site.parts())[1] == {
        f"{FOLDER}/{name}": len(f"content of {name}") for name in TAKEN
    }
    shutil.rmtree(site.repository)
    with pytest.raises(Trouble, match=r"key\.pub cannot be read"):
        foretell_packages(site.job(), site.parts())


# --- what hosts get ----------------------------------------------------------------------------------------------------------------------


def test_from_where_hosts_get_a_repository(site: Site, tmp_path: Path) -> None:
    assert Mirrors().packages(URL) == URL
    assert (
        locations.read_mirrors([f"https://vendor.invalid/={site.vendor}/"], {}, {}).packages(f"{URL}/key.pub")
        == f"file://{site.repository}/key.pub"
    )
    assert locations.read_mirrors([f"{URL}={site.vendor}"], {}, {}).packages(URL) == f"file://{site.vendor}"
    assert (
        locations.read_mirrors([], {"DEEPEP_MIRRORS": "https://=http://proxy/"}, {}).packages(URL)
        == "http://proxy/vendor.invalid/repos/x86_64"
    )
    site.fill()
    (site.mirror / "mirror.json").touch()
    whole = locations.read_mirrors([str(site.mirror)], {}, {})
    assert whole.packages(URL) == f"file://{site.copy}"
    assert whole.packages(f"{URL}/key.pub") == f"file://{site.copy}/key.pub"
    assert whole.packages("https://vendor.invalid/other") == "https://vendor.invalid/other", (
        "a mirror without it leaves it where it is"
    )
    assert locations.read_mirrors(["http://server"], {}, {}).packages(URL) == f"http://server/{FOLDER}"
    (tmp_path / "a b").mkdir()
    with pytest.raises(
        Trouble,
        match=r"package managers do not take this path — wanted no blanks, % or special letters in it\. Try: another",
    ):
        locations.read_mirrors([f"https://vendor.invalid/={tmp_path}/a b"], {}, {}).packages(URL)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        """Say nothing."""


@pytest.fixture
def serve() -> Iterator[Callable[[Path], str]]:
    """Serve a folder as any plain web server does; returns its address."""
    servers = []

    def begin(folder: Path) -> str:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield begin
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_web_server_is_asked_what_its_mirror_has(command: Verb, site: Site, serve: Callable[[Path], str]) -> None:
    assert command.run() == OK
    address = serve(site.mirror)
    assert peek.look_for_packages(locations.read_mirrors([address], {}, {})).packages(URL) == URL
    assert command.run(packages="debian-12") == OK
    assert peek.look_for_packages(locations.read_mirrors([address], {}, {})).packages(URL) == f"{address}/{FOLDER}"
    assert (
        peek.look_for_packages(locations.read_mirrors(["http://127.0.0.1:9"], {}, {})).packages(URL)
        == f"http://127.0.0.1:9/{FOLDER}"
    ), "it is believed"


def test_a_repository_is_fetched_over_http_whatever_its_files_are_called(
    site: Site, serve: Callable[[Path], str]
) -> None:
    address = serve(site.vendor)
    filled = Filled()
    site.mirror.mkdir()
    job = dataclasses.replace(site.job(), mirrors=locations.read_mirrors([f"https://vendor.invalid={address}"], {}, {}))
    fill_packages(job, filled, site.parts())
    assert filled.problems == []
    assert all(files_of(site.repository)[name] == content for name, content in files_of(site.copy).items())
    (site.repository / TAKEN[0]).unlink()
    (site.copy / TAKEN[0]).unlink()
    fill_packages(job, filled, site.parts())
    assert "404" in str(filled.problems[0])


def test_the_plan_says_from_where(tmp_path: Path) -> None:
    facts = {"n001": plan_support.changed(plan_support.READY, {"os_id": "debian", "os_version": "12", "toolkits": ()})}
    nvidia = "https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64"
    wish = plan_support.request(
        "defaults prefix=/shared/deepep\nn001\n",
        mirrors=locations.read_mirrors(["https://developer.download.nvidia.com/=http://m/"], {}, {}),
    )
    inputs = host_recipes.wanted(wish, facts)
    fields = inputs["n001"]["cuda-toolkit"]["REPOSITORIES"].split()
    plain = host_recipes.wanted(dataclasses.replace(wish, mirrors=Mirrors()), facts)["n001"]["cuda-toolkit"][
        "REPOSITORIES"
    ].split()
    assert [fields[1], fields[4]] == [
        each.replace("https://developer.download.nvidia.com/", "http://m/") for each in (plain[1], plain[4])
    ]
    assert (plain[1], fields[5]) == (nvidia, plain[5]), "the fingerprint is the lock's"
    for state, noted in ((TO_APPLY, True), (BLOCKED, True), (host_recipes.OK, False)):
        checks = {"n001": {"cuda-toolkit": Check("cuda-toolkit", state, "no toolkit", "CUDA 12 with nvcc")}}
        made = steps.make_plan(wish, facts, Preparation(inputs, checks), anyhow=True)
        told = f"n001: repository cuda from http://m/compute/cuda/repos/debian12/x86_64, instead of {nvidia}"
        assert (told in made.notes) == noted


def test_a_mirror_that_no_host_sees_is_the_reason_that_is_told() -> None:
    bare = {"os_id": "debian", "os_version": "12", "toolkits": ()}
    facts = {name: plan_support.changed(plan_support.READY, bare) for name in ("n001", "n002")}
    unseen = Check(
        "cuda-toolkit",
        BLOCKED,
        "no toolkit",
        "CUDA 12 with nvcc",
        "the repository cuda is mirrored in the directory /srv/x",
    )
    with pytest.raises(Trouble) as caught:
        steps.make_plan(
            plan_support.request("defaults prefix=/shared/deepep\nn[001-002]\n"),
            facts,
            Preparation({}, {n: {"cuda-toolkit": unseen} for n in facts}),
        )
    said = [str(problem) for problem in caught.value.problems]
    assert said[0].startswith("n001: no CUDA toolkit fits the stack")
    assert said[1:] == [
        (
            "n[001-002] (2): CUDA toolkit: the repository cuda is mirrored in the directory /srv/x — found no toolkit, "
            "wanted CUDA 12 with nvcc"
        )
    ]


# --- with real apt -----------------------------------------------------------------------------------------------------------------------


def as_recipe(url: str, fingerprint: str, priority: int = 0, suite: str = "./") -> dict[str, str]:
    line = f"cuda {url} {suite} {'-' if suite.endswith('/') else 'main'} {url}/key.asc {fingerprint} {priority}"
    return {"MANAGER": "apt", "PACKAGES": "cuda-toolkit-12-9=12.9.1-1", "REPOSITORIES": line, "CUDA_MAJOR": "12"}


REAL = (
    dataclasses.replace(
        toolkit("12.9.1"), depends="cuda-nvcc (>= 12.9), cuda-common, no-such-thing | cuda-docs, libc6 (>= 2)"
    ),
    toolkit("12.9.2"),
    Package("cuda-nvcc", "12.9.1-1", {"/opt/nvcc": "1"}),
    Package("cuda-nvcc", "12.9.3-1", {"/opt/nvcc": "3"}),
    Package("cuda-config", "1:2.0", {"/opt/config": "x"}, provides="cuda-common"),
    Package("cuda-docs", "1+b~2", {"/opt/docs": "x"}),
    Package("nsight", "9", {"/opt/nsight": "x"}),
)


def mirrored(machine: Machine, tmp_path: Path, key: Signer) -> tuple[Site, Path]:
    """A mirror of a repository with real packages, in the folder that the machine shares with the test; the vendor
    is gone."""
    site = Site(tmp_path, key)
    make_apt_repository(site.repository, REAL, key)
    (site.repository / "key.asc").rename(site.repository / "key.pub")
    filled, brought = site.fill(suite="./")
    assert filled.problems == []
    assert [f"{each.name} {each.version}" for each in brought[0].debs] == [
        "cuda-config 1:2.0",
        "cuda-docs 1+b~2",
        "cuda-nvcc 12.9.3-1",
        "cuda-toolkit-12-9 12.9.1-1",
    ]
    shutil.rmtree(site.vendor)
    copy = machine.shared / "mirror"
    shutil.copytree(site.copy, copy)
    (copy / "key.pub").rename(copy / "key.asc")
    return site, copy


@pytest.mark.parametrize("over", ["folder", "http"])
def test_apt_installs_from_the_partial_copy_with_no_other_source(
    over: str, machine: Machine, tmp_path: Path, key: Signer, serve: Callable[[Path], str]
) -> None:
    _, copy = mirrored(machine, tmp_path, key)
    url = f"file://{copy}" if over == "folder" else serve(copy)
    after = machine.says("cuda-toolkit", "apply", as_recipe(url, key.fingerprint, 100))
    assert (after["state"], after["found"]) == ("ok", "12.9.1 in /usr/local/cuda-12.9")
    assert machine.out("cat /opt/nvcc; ls /opt/docs /opt/config; ls /etc/apt/sources.list.d") == (
        "3/opt/config\n/opt/docs\ndeepep-cuda.sources\n"
    )
    assert machine.sh("apt-get -y install nsight").returncode != 0, "what nobody asked for is not there"


def test_a_pin_does_not_reach_other_repositories_of_the_same_server(
    machine: Machine, tmp_path: Path, key: Signer
) -> None:
    """A site serves its distribution's mirror from the same host or directory: that keeps its own priority."""
    _, copy = mirrored(machine, tmp_path, key)
    make_apt_repository(machine.shared / "distribution", [Package("own-tool", "1", {"/opt/own": "x"})], key)
    text = (machine.shared / "distribution/InRelease").read_text()
    release = text.partition("\n\n")[2].partition("-----BEGIN PGP SIG")[0].replace("Label: Test", "Label: Distribution")
    sign(machine.shared / "distribution", key, release, Layout())
    (machine.shared / "site.gpg").write_bytes(key.gpg("--export", key.fingerprint))
    line = f"deb [signed-by={machine.shared}/site.gpg] file://{machine.shared}/distribution ./"
    machine.out(f"echo '{line}' >/etc/apt/sources.list.d/site.list; apt-get -qq update")
    machine.says("cuda-toolkit", "apply", as_recipe(f"file://{copy}", key.fingerprint, 100))
    assert " 500 file:" in machine.out("apt-cache policy own-tool").replace(" *** ", "     ")
    assert " 100 file:" in machine.out("apt-cache policy nsight")


def test_apt_takes_a_copy_with_a_suite_whose_other_indexes_are_not_there(
    machine: Machine, tmp_path: Path, key: Signer
) -> None:
    """As a vendor with many indexes has it: by-hash names, translations and other machines, of which the copy has
    none."""
    flat = tmp_path / "flat"
    make_apt_repository(flat, REAL, key)
    packages = (flat / "Packages").read_bytes()
    vendor = tmp_path / "vendor/repos/x86_64"
    folder = vendor / "dists/stable/main/binary-amd64"
    folder.mkdir(parents=True)
    for each in flat.glob("*.deb"):
        shutil.copy(each, vendor)
    lines = ""
    for name, data in (
        ("Packages", packages),
        ("Packages.xz", lzma.compress(packages)),
        ("Packages.gz", gzip.compress(packages)),
    ):
        (folder / name).write_bytes(data)
        lines += f" {hashlib.sha256(data).hexdigest()} {len(data)} main/binary-amd64/{name}\n"
    (folder / "Packages").unlink()
    lines += "".join(
        f" {'0' * 64} 10 main/{name}\n"
        for name in ("i18n/Translation-en.xz", "binary-i386/Packages.xz", "Contents-amd64.gz")
    )
    text = "Origin: Test\nLabel: Test\nSuite: stable\nCodename: stable\nArchitectures: amd64 i386\nComponents: main\n"
    layout = Layout(flat=False)
    sign(vendor, key, f"{text}Date: Thu, 01 Jan 2026 00:00:00 UTC\nAcquire-By-Hash: yes\nSHA256:\n{lines}", layout)
    (vendor / "key.pub").write_bytes(key.public())
    site = Site(tmp_path, key, layout)
    assert site.fill()[0].problems == []
    copy = machine.shared / "mirror"
    shutil.copytree(site.copy, copy)
    (copy / "key.pub").rename(copy / "key.asc")
    after = machine.says("cuda-toolkit", "apply", as_recipe(f"file://{copy}", key.fingerprint, suite="stable"))
    assert (after["state"], after["found"]) == ("ok", "12.9.1 in /usr/local/cuda-12.9")


def test_a_host_that_does_not_see_the_mirror_says_so_before_anything_is_written(machine: Machine, key: Signer) -> None:
    env = as_recipe("file:///srv/nowhere", key.fingerprint)
    told = (
        "the repository cuda is mirrored in the directory /srv/nowhere, which this host does not see: give "
        "--mirror a path"
    )
    check = machine.says("cuda-toolkit", "check", env)
    assert check["state"] == "blocked"
    assert check["note"].startswith(told)
    assert told in machine.refuses("cuda-toolkit", env)
    assert machine.written == ""
