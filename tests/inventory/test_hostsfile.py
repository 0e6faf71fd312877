"""The hosts file: recorded inputs with their values or faults, the flag, folding, and that nothing else can come
out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepep_bootstrap.core import nodeset
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.inventory import hostsfile
from deepep_bootstrap.inventory.flags import Flags
from deepep_bootstrap.inventory.hostsfile import Inventory
from deepep_bootstrap.inventory.survey import read_inventory
from deepep_bootstrap.remote import host
from tests.support.paths import ROOT, TESTS

CASES = TESTS / "cases" / "inventory" / "hosts"


def outcome(text: str) -> object:
    try:
        inventory = hostsfile.parse_hosts_file(text, "hosts.txt")
    except Trouble as trouble:
        return {"problems": [str(problem) for problem in trouble.problems]}
    default = msgspec.to_builtins(host.Host(""))
    listed = [
        {key: value for key, value in msgspec.to_builtins(host).items() if value != default[key]}
        for host in inventory.hosts
    ]
    settings = {
        key: value
        for key, value in msgspec.to_builtins(inventory.settings).items()
        if value != getattr(hostsfile.Settings(), key)
    }
    return json.loads(json.dumps({"hosts": listed, "settings": settings}))


@pytest.mark.parametrize("case", sorted(CASES.glob("*.txt")), ids=lambda path: path.stem)
def test_recorded(case: Path) -> None:
    assert outcome(case.read_text()) == json.loads(case.with_suffix(".json").read_text())


@pytest.mark.parametrize("path", sorted((ROOT / "hosts").glob("*.txt")), ids=lambda path: path.name)
def test_the_examples_are_good(path: Path) -> None:
    assert hostsfile.read_hosts(str(path)).hosts


def test_a_flag_is_a_file_or_a_node_set(tmp_path: Path) -> None:
    file = tmp_path / "cluster"
    file.write_text("n[1-2] user=root\n")
    assert [host.name for host in hostsfile.read_hosts(str(file)).hosts] == ["n1", "n2"]
    (first, second) = hostsfile.read_hosts("me@b200-[001-001]:2200,x").hosts
    assert (first.name, first.user, first.port, second.name) == ("b200-001", "me", 2200, "x")
    assert hostsfile.read_hosts("n[1-9/4]").path == "--hosts"


@pytest.mark.parametrize(
    "value", ["hosts/none.txt", "./none", "none.txt", "", "n[1-2", "@group", "n1,n1", "*", "n1 n2"]
)
def test_a_flag_that_is_neither(value: str) -> None:
    with pytest.raises(Trouble) as caught:
        hostsfile.read_hosts(value)
    assert all(problem.where.startswith("--hosts") for problem in caught.value.problems)


def test_what_a_shell_hands_over_and_what_other_editors_write_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "bom.txt").write_bytes("\ufeffn1 user=root\n".encode())
    assert [(host.name, host.user) for host in hostsfile.read_hosts(str(tmp_path / "bom.txt")).hosts] == [
        ("n1", "root")
    ]
    read, write = os.pipe()
    os.write(write, b"n[1-2]\n")
    os.close(write)
    assert len(hostsfile.read_hosts(f"/dev/fd/{read}").hosts) == 2
    os.close(read)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "hosts.txt"
    file.write_bytes(b"n1\n\xff\xfe\n")
    with pytest.raises(Trouble, match="not a text file"):
        hostsfile.read_hosts(str(file))


def test_limit_picks_a_subset_in_the_order_of_the_file() -> None:
    assert [host.name for host in hostsfile.read_hosts("c,n[1-3],a", "a,n[2-3]").hosts] == ["n2", "n3", "a"]


def test_limit_refuses_what_it_does_not_know_or_would_lose(tmp_path: Path) -> None:
    with pytest.raises(Trouble, match=r"--limit: n7 is no host of --hosts"):
        hostsfile.read_hosts("n[1-3]", "n[2-3],n7")
    file = tmp_path / "hosts.txt"
    file.write_text("defaults build_host=n1\nn[1-3]\n")
    with pytest.raises(Trouble, match=r"leaves out n1, which is build_host"):
        hostsfile.read_hosts(str(file), "n2")
    assert len(hostsfile.read_hosts(str(file), "n[1-2]").hosts) == 2


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["b200-003", "b200-017"], "b200-[003,017] (2)"),
        (["b200-003"], "b200-003"),
        (["n2", "n1", "n1", "login"], "login,n[1-2] (3)"),
        (["fe80::1", "fe80::2"], "fe80::[1-2] (2)"),
        (["a b", "[x"], "a b, [x (2)"),
    ],
)
def test_fold(names: list[str], folded: str) -> None:
    assert nodeset.fold(names) == folded


ALPHABET = st.text(st.sampled_from("abn019-[],/@:= \n#'\"\\._x!&^%*é\0\r"), max_size=60)
LINES = st.lists(
    st.one_of(
        ALPHABET,
        st.sampled_from(
            ["defaults prefix=/a", "n[1-3] user=root", "n2", "me@x:22", "defaults build_host=n1", "port=1"]
        ),
    ),
    max_size=5,
).map("\n".join)


def either(make: Callable[[], Inventory]) -> Inventory | Trouble:
    try:
        return make()
    except Trouble as trouble:
        return trouble


@given(LINES)
def test_a_text_is_an_inventory_or_trouble_with_its_place(text: str) -> None:
    result = either(lambda: hostsfile.parse_hosts_file(text, "f"))
    if isinstance(result, Trouble):
        assert result.problems
        assert all(problem.where.startswith("f:") for problem in result.problems)
    else:
        names = [host.name for host in result.hosts]
        assert names
        assert len(set(names)) == len(names)
        assert not any(name.startswith("-") or set(name) & set(" /@'\"\n") for name in names)


@given(st.one_of(ALPHABET, st.text(max_size=20)))
def test_a_flag_is_an_inventory_or_trouble(value: str) -> None:
    result = either(lambda: hostsfile.read_hosts(value))
    assert result.problems if isinstance(result, Trouble) else result.hosts


@given(st.sets(st.from_regex(r"[a-z]{1,3}-?[0-9]{0,3}", fullmatch=True), min_size=2, max_size=8))
def test_what_is_folded_reads_as_the_same_names(names: set[str]) -> None:
    folded, _, count = nodeset.fold(sorted(names)).rpartition(" ")
    assert count == f"({len(names)})"
    assert {host.name for host in hostsfile.read_hosts(folded).hosts} == names


@pytest.mark.parametrize("written", ["/shared/deepep", "/shared/deepep/", "//shared//deepep", "/shared/./deepep/."])
def test_a_prefix_has_one_form_wherever_it_is_given(written: str) -> None:
    flags = Flags.of(ROOT, {"prefix": written})
    inventory = hostsfile.parse_hosts_file(f"defaults prefix={written}\nn001\n", "hosts.txt")
    assert (flags.prefix, inventory.settings.prefix) == ("/shared/deepep", "/shared/deepep")


def test_several_hosts_without_a_prefix_are_refused() -> None:
    flags = Flags(ROOT, hosts="n[001-003]", limit="n001")
    with pytest.raises(Trouble) as caught:
        read_inventory(flags)
    assert str(caught.value) == (
        "--hosts: no prefix is named, and /opt/deepep would be another directory on each host — found n[001-003] (3), "
        "wanted a directory that all hosts share. Try: --prefix=/shared/deepep, or `defaults prefix=/shared/deepep` in "
        "the hosts file"
    )
    assert read_inventory(flags, apart=True)[1] == "/opt/deepep", "facts are of each host alone"
    assert read_inventory(Flags(ROOT, hosts="n001"))[1] == "/opt/deepep"
    assert read_inventory(Flags(ROOT, hosts="n[001-003]", prefix="/shared/x"))[1] == "/shared/x"
