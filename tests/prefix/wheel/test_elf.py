"""The platform that a wheel names, from the symbol versions that its libraries ask for."""

from __future__ import annotations

import pytest

from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.prefix.wheel.elf import Relocator, platform_tag
from tests.support.paths import ROOT
from tests.support.wheel import shared


@pytest.mark.parametrize(
    ("versions", "tag"),
    [
        ((), "manylinux_2_17_x86_64"),
        ((("GLIBC", (2, 2, 5)),), "manylinux_2_17_x86_64"),
        ((("GLIBC", (2, 34)), ("GLIBC", (2, 4))), "manylinux_2_34_x86_64"),
        ((("GLIBC", (2, 17)), ("GLIBCXX", (3, 4, 30))), "manylinux_2_35_x86_64"),
        ((("GLIBC", (2, 38)), ("CXXABI", (1, 3, 9))), "manylinux_2_38_x86_64"),
        ((("CXXABI", (1, 3, 15)),), "manylinux_2_39_x86_64"),
        # A compiler that is newer than the table: no promise is better than a wrong one.
        ((("GLIBC", (2, 34)), ("GLIBCXX", (3, 4, 99))), "linux_x86_64"),
    ],
)
def test_the_platform_is_the_oldest_that_has_everything(
    versions: tuple[tuple[str, tuple[int, ...]], ...], tag: str
) -> None:
    assert platform_tag(versions, "x86_64") == tag


@pytest.mark.usefixtures("programs")
def test_a_library_that_does_not_take_the_path_is_refused(tmp_path) -> None:
    relocator = Relocator(ROOT)
    flags = {"none": (), "short": ("-Wl,-rpath,$ORIGIN",)}
    for name, words in flags.items():
        data = shared("int one;", tmp_path / f"{name}.so", *words).read_bytes()
        with pytest.raises(Trouble, match=r"entry/x\.so: .*RUNPATH"):
            relocator.with_run_path(data, "$ORIGIN/nvidia/nvshmem/lib", "entry/x.so")
