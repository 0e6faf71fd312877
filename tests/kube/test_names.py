"""Forms of names, and who may import the client library."""

from __future__ import annotations

import subprocess
import sys

import pytest

from deepep_bootstrap.kube import names
from tests.support.paths import ROOT

DIGEST = f"sha256:{'0' * 64}"


@pytest.mark.parametrize(
    ("reference", "fault"),
    [
        (f"registry.example/team/deepep@{DIGEST}", ""),
        (f"localhost:5000/deepep:v1@{DIGEST}", ""),
        (f"deepep@{DIGEST}", ""),
        ("", "no image is named"),
        ("registry.example/deepep:v1", "the image is named without its digest"),
        ("registry.example/deepep", "the image is named without its digest"),
        (f"registry.example/Deepep@{DIGEST}", "this names no image"),
        (f"registry.example/deepep@{DIGEST[:-1]}", "this names no image"),
        ("deepep; rm -rf /", "this names no image"),
    ],
)
def test_images_are_named_by_digest(reference: str, fault: str) -> None:
    assert names.image_fault(reference) == fault


@pytest.mark.parametrize(
    ("reference", "named"),
    [
        ("registry.example/gib:v1", "registry.example/gib"),
        ("registry.example:5000/gib", "registry.example:5000/gib"),
        (f"registry.example:5000/gib:v1@{DIGEST}", "registry.example:5000/gib"),
    ],
)
def test_a_digest_stands_in_place_of_a_tag(reference: str, named: str) -> None:
    assert names.with_digest(reference, DIGEST) == f"{named}@{DIGEST}"


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (names.DNS_LABEL, "a-1", "A_1"),
        (names.DNS_LABEL, "a" * 63, "a" * 64),
        (names.RESOURCE, "rdma/hca_shared_devices_a", "rdma/hca shared"),
        (names.LABEL_KEY, "cloud.google.com/gce-topology-block", "a/b/c"),
        (names.LABEL_VALUE, "", "a b"),
        (names.QUANTITY, "64Gi", "64 GB"),
    ],
)
def test_forms(form, good: str, bad: str) -> None:
    assert form.fits(good)
    assert not form.fits(bad)


@pytest.mark.usefixtures("programs")
def test_no_verb_imports_the_client_library() -> None:
    """All verbs are loaded, as plan, bootstrap and test load them, with a client library that says it was imported."""
    code = (
        "import sys, types\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        assert name.partition('.')[0] != 'kubernetes', name\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from deepep_bootstrap.cli import app\n"
        "from deepep_bootstrap.cli.verbs import VERBS\n"
        "for name in VERBS:\n"
        "    app.load(name)\n"
        "    print(name)\n"
        "assert 'kubernetes' not in sys.modules\n"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {"plan", "bootstrap", "test", "manifests"} <= set(done.stdout.split())
