"""Hostile inputs of every kind: no traceback, only trouble; nothing is written; what is accepted reaches shells to
the letter."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tomlkit
import tomllib
from hypothesis import given
from hypothesis import strategies as st

from deepep_bootstrap.cli import app
from deepep_bootstrap.cli.app import Verb
from deepep_bootstrap.cli.commands import status
from deepep_bootstrap.core import filetree, nodeset
from deepep_bootstrap.core.errors import Trouble
from deepep_bootstrap.fetch import locations
from deepep_bootstrap.fetch.mirror import index
from deepep_bootstrap.fetch.mirror.index import compare, is_inside, page, parse_mirror_index, render_mirror_index
from deepep_bootstrap.inventory import facts, hostsfile, network_env
from deepep_bootstrap.inventory.survey import Survey
from deepep_bootstrap.lock import model, packages
from deepep_bootstrap.plan import host_recipes, steps
from deepep_bootstrap.prefix import contents, entries, modulefiles, offer
from deepep_bootstrap.prefix.archive import stream
from deepep_bootstrap.prefix.archive.index import parse_index, record
from deepep_bootstrap.prefix.archive.stream import INDEX, members, read_index, read_trees, small_file, total
from deepep_bootstrap.prefix.offer import read_offer
from deepep_bootstrap.remote import channel
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.ssh_access import Account, Resolver
from deepep_bootstrap.slurm import commands
from tests.support import modules as modules_support
from tests.support import plan as plan_support
from tests.support.archive import document, folder_thing, made_up, small_tree
from tests.support.fuzz import (
    ANYTHING,
    CANARY,
    COMMANDS,
    HOSTILE,
    NO_TEXTS,
    WORDS,
    accepted,
    arrives,
    few,
    languages_say,
    places,
    put,
)
from tests.support.paths import ROOT
from tests.support.shipped import shipped_env

SHIPPED = (ROOT / "deepep.lock.toml").read_text(encoding="utf-8")
TREE = shipped_env()


def small_lock() -> dict[str, Any]:
    """The lock that is shipped with little in every list and table that is long: every kind of key, and quick to
    read."""
    found: dict[str, Any] = tomllib.loads(SHIPPED)
    found["system"] = {"ubuntu-24_04": found["system"]["ubuntu-24_04"]}
    for name, stack in found["stack"].items():
        needed = {stack.get("nvshmem_wheel"), stack.get("nccl_wheel"), "torch"} if name != "v1" else {"torch"}
        lists = {target: wheels for target, wheels in stack["wheels"].items() if target.startswith("cp312")}
        stack["wheels"] = {
            target: [each for each in wheels if each["name"] in needed] for target, wheels in lists.items()
        }
    return found


LOCK = small_lock()
LOCK_PLACES = list(places(LOCK))
PLAN = {"plan": Verb("plan", valued=frozenset(("--prefix",)))}
WISH = plan_support.request("defaults prefix=/shared/deepep\nn001\n")
MIRROR = {
    "format": 1,
    "lock": "a" * 32,
    "stacks": ["v1"],
    "targets": ["cp312-x86_64"],
    "sources": [
        {"name": "deepep", "url": "https://host.invalid/owner/name", "rev": "a" * 40, "hash": filetree.sri(bytes(32))}
    ],
    "files": {
        "files/host.invalid/x.tar.gz": {"size": 1, "hash": filetree.sri(bytes(32))},
        "wheels/pypi/torch/torch-1-py3-none-any.whl": {"size": 1, "hash": filetree.sri(bytes(32))},
    },
}
ARCHIVE = document(made_up(small_tree(folder_thing("a"))))
MANIFEST = json.loads(
    modulefiles.manifest(modules_support.offer(), generation=1, created="", by="", lock_digest="", hosts=())
)
MANY = modules_support.offer(
    "/opt/deepep", modules_support.cloud_record(), modules_support.v2_record(), modules_support.external_record()
)
OFFER = {**MANIFEST, "offer": json.loads(json.dumps(offer.offer_document(MANY)))}
RECORDED = sorted((ROOT / "tests/cases/inventory/facts/parse").glob("*.txt"))
DEEP = (
    "[" * 100_000,
    '{"a":' * 5000,
    "x = " + "[" * 3000 + "]" * 3000,
    "x = " + "{a=" * 3000,
    "[" + "a." * 3000 + "b]",
    '[[a]]\n"' + "[" * 3000,
)
RAW = (
    *WORDS,
    *DEEP,
    "\ufeff" + SHIPPED[:400],
    "version = 0x" + "f" * 6000,
    "version = " + "9" * 6000,
    "a = 2020-13-45",
    "a = 1e999",
    "a = 25:61:00",
)


def toml(values: Mapping[str, Any]) -> str | None:
    """The text of a document, None for a value that TOML has no spelling for."""
    try:
        return tomlkit.dumps(values).encode().decode()
    except (ValueError, TypeError):
        return None


def ssh_config(text: str, folder: Path, host: Host | None = None) -> Account:
    (folder / "config").write_text(text, encoding="utf-8", errors="surrogatepass")
    return Resolver(str(folder / "config")).account(host or Host("n1"))


def test_raw_text_is_a_value_or_trouble_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ssh").mkdir()
    readers: list[Callable[[str], object]] = [
        lambda text: model.parse_lock(text, "x.toml"),
        lambda text: hostsfile.parse_hosts_file(text, "hosts.txt"),
        hostsfile.read_hosts,
        lambda text: hostsfile.read_hosts("n[1-3]", text),
        nodeset.expand,
        commands.unfold,
        lambda text: locations.read_mirrors([text], {}, {}),
        lambda text: locations.read_mirrors(
            [f"https://host.invalid/={text}", f"index:x={text}"], {locations.VARIABLE: text}, {"y": text}
        ),
        locations.repository_path,
        lambda text: index.parse_mirror_index(text.encode(errors="surrogatepass"), "mirror.json"),
        lambda text: parse_index(text.encode(errors="surrogatepass"), "FILE"),
        lambda text: stream.read_index(io.BytesIO(text.encode(errors="surrogatepass")), "FILE"),
        lambda text: network_env.read_profile("x", {**TREE, "profiles/x.toml": text}),
        lambda text: facts.parse_facts(text, "h"),
        lambda text: host_recipes.parse_checks(text, text, ["limits"], "h"),
        lambda text: contents.parse_contents(text, "h"),
        offer.read_offer,
        lambda text: ssh_config(text, tmp_path / "ssh"),
        lambda text: app.check(["plan", text], PLAN),
    ]
    for reader in readers:
        for text in RAW:
            accepted(lambda reader=reader, text=text: reader(text))
    assert [path.name for path in tmp_path.iterdir()] == ["ssh"], "nothing but what the test itself wrote"


@given(st.sampled_from(LOCK_PLACES), ANYTHING, st.booleans())
@few(70)
def test_any_value_anywhere_in_the_lock(place: tuple[str | int, ...], value: Any, as_key: bool) -> None:
    text = toml(put(LOCK, place, value, as_key=as_key and isinstance(value, str)))
    found = accepted(lambda: model.parse_lock(text, "x.toml")) if text is not None else None
    if found is None:
        return
    for url in [source.url for source in found.sources.values()]:
        assert "\0" not in url
        path = accepted(lambda url=url: locations.repository_path(url))
        assert path is None or index.is_inside(path)


def lock_values() -> list[tuple[tuple[str, ...], Mapping[str, str]]]:
    """The environments of host recipes and builds for every command that some place of the lock accepts."""
    rows: list[tuple[tuple[str, ...], Mapping[str, str]]] = []
    ubuntu = ("system", "ubuntu-24_04")
    spots: dict[tuple[str | int, ...], Callable[[str], Any]] = {
        (*ubuntu, "build-deps", 0): str,
        (*ubuntu, "by-hand"): lambda word: {"rdma-userspace": word},
        (*ubuntu, "repository", "cuda", "url"): lambda word: f"https://h/{word}",
        ("source", "deepep-v1", "options"): lambda word: [f"A={word}"],
    }
    here, stack = plan_support.READY, WISH.stack
    small = {**LOCK, "stack": {"v1": LOCK["stack"]["v1"]}, "tool": {}, "default_stack": "v1"}
    surroundings = (WISH.recipes, ("9.0",), here, here.toolkits[0], here.pythons[0], "cp312-x86_64")
    for place, shape in spots.items():
        for word in COMMANDS:
            text = toml(put(small, place, shape(word)))
            found = accepted(lambda text=text: model.parse_lock(text, "x.toml"))
            if found is not None and place[0] == "source":
                rows += [
                    ((word,), entry.env)
                    for entry in entries.name_entries(entries.EntryInputs(found, stack, *surroundings))
                ]
            elif found is not None:
                row, kernel = found.systems["ubuntu-24_04"], "6.8.0-$(touch CANARY)"
                rows += [((word,), packages.recipe_env(row, purpose, kernel)) for purpose in packages.PURPOSES]
    return rows


@pytest.mark.usefixtures("programs")
def test_what_the_lock_may_hold_reaches_recipes_to_the_letter(tmp_path: Path) -> None:
    rows = lock_values()
    for name in ("OPTIONS", "BY_HAND", "REPOSITORIES", "HEADERS"):
        assert any(CANARY in env.get(name, "") for _, env in rows), f"no command got into {name}"
    unique = {tuple(env.items()): (words, env) for words, env in rows}
    arrives(list(unique.values()), tmp_path)


@pytest.mark.usefixtures("programs")
def test_checks_of_all_recipes_in_one_script_get_their_values_to_the_letter(tmp_path: Path) -> None:
    texts = dict.fromkeys(host_recipes.LIBRARIES, "")
    texts |= {"lib.sh": "data() { :; }; say() { :; }", "host/limits.sh": 'printf "%s\\0" "$VALUE"'}
    words = [word for word in WORDS if word.isprintable() or word.startswith("\n")]
    scripts = [host_recipes.check_script(texts, {"limits": {"VALUE": word}}) for word in words]
    (tmp_path / "all.sh").write_text("".join(f"(\n{script})\n" for script in scripts), encoding="utf-8")
    done = subprocess.run(["bash", "all.sh"], cwd=tmp_path, capture_output=True, check=False)
    assert done.stdout.decode().split("\0")[:-1] == words
    assert not (tmp_path / CANARY).exists()


HOST_LINES = [
    line
    for name in ("b200.txt", "demo.txt", "h200.txt", "local.txt")
    for line in (ROOT / "hosts" / name).read_text(encoding="utf-8").splitlines()
    if line.strip() and not line.startswith("#")
] + [
    "defaults account=a qos=b partition=c gres=gpu:8 sbatch_args='-C x' build_user=u profile=p",
    "n9 jump=a@b:22 identity='~/k' port=1 user=u",
]


@st.composite
def hosts_files(draw: st.DrawFn) -> str:
    """A line of the shipped hosts files with one of its words, keys or values made hostile, quoted well or not at
    all."""
    words = shlex.split(draw(st.sampled_from(HOST_LINES)), comments=True)
    at = draw(st.integers(0, len(words) - 1))
    key, equals, value = words[at].partition("=")
    hostile, quote = draw(HOSTILE), draw(st.sampled_from([shlex.quote, str]))
    front_part = draw(st.sampled_from(["", value, "--comment=", "a"]))
    words[at] = f"{key}={quote(front_part + hostile)}" if equals else quote(key + hostile)
    lines = [
        " ".join(word if number == at else shlex.quote(word) for number, word in enumerate(words)),
        "n1 user=root",
        "n2",
    ]
    return draw(st.sampled_from(["", "\ufeff"])) + draw(st.sampled_from(["\n", "\r\n", "\n\n"])).join(lines)


@pytest.mark.usefixtures("programs")
def test_what_a_hosts_file_may_hold_reaches_slurm_and_files_to_the_letter(tmp_path: Path) -> None:
    rows: list[tuple[tuple[str, ...], Mapping[str, str]]] = []

    @given(hosts_files())
    @few(200)
    def collect(text: str) -> None:
        found = accepted(lambda: hostsfile.parse_hosts_file(text, "f"))
        if found is None:
            return
        chosen = found.settings
        allocation = commands.AllocationRequest(
            "x", (), 1, chosen.partition, chosen.account, chosen.qos, chosen.gres, extra=chosen.sbatch_args
        )
        assert all(
            word.startswith("-") for word in commands.request_options(allocation) if word not in chosen.sbatch_args
        )
        rows.append(
            (
                ("salloc", *commands.request_options(allocation)),
                {"PREFIX": chosen.prefix, "BUILD_USER": chosen.build_user},
            )
        )
        for host in found.hosts:
            assert not any(text.startswith("-") for text in (host.name, host.user, host.jump))
            assert all(text.isprintable() for text in (host.name, host.user, host.jump, host.identity))
            accepted(lambda host=host: Resolver("").account(host))
        site = offer.SiteSettings(chosen.partition, chosen.account, chosen.qos, "", chosen.sbatch_args)
        record = modules_support.record(chosen.prefix, site=site)
        files = accepted(lambda: modulefiles.render_offer(modules_support.offer(chosen.prefix, record), TREE))
        lines = files["sbatch/internode-test.sbatch"].content.decode().splitlines() if files else []
        assert all(line.isprintable() for line in lines if line.startswith("#SBATCH"))

    collect()
    for word in COMMANDS:
        collect.hypothesis.inner_test(f"defaults sbatch_args={shlex.quote(f'--comment={shlex.quote(word)}')}\nn1\n")
    assert any(CANARY in word for words, _ in rows for word in words)
    arrives(rows, tmp_path)


@pytest.mark.parametrize(
    "names", [",".join(f"node{number}" for number in range(100)), "n[1-400]," + ",".join(f"x{n}" for n in range(200))]
)
def test_a_node_set_may_be_longer_than_a_file_name(names: str) -> None:
    assert len(hostsfile.read_hosts(names).hosts) >= 100


@pytest.mark.parametrize("line", ["n1 jump=a:99999", "n1 jump=a:" + "9" * 5000, "n1 jump=a@", "n1 jump=a,:22"])
def test_a_jump_host_has_a_name_and_a_port(line: str) -> None:
    (host,) = hostsfile.parse_hosts_file(line, "f").hosts
    with pytest.raises(Trouble, match="n1: "):
        Resolver("").account(host)


SSH_LINES = (
    "Port",
    "ProxyJump",
    "ProxyCommand",
    "User",
    "HostName",
    "UserKnownHostsFile",
    "IdentityFile",
    "IdentityAgent",
    "Host",
    "Include",
)


@given(st.sampled_from(SSH_LINES), HOSTILE, st.sampled_from(["", "a:", "a@b:", "[::1]:", '"', "~", "%"]))
@few(150)
def test_any_ssh_configuration_is_an_account_or_trouble(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: str, before: str
) -> None:
    found = accepted(lambda: ssh_config(f"Host *\n {key} {before}{value}\n", tmp_path_factory.getbasetemp()))
    assert found is None or 0 < found.port < 65536
    assert found is None or found.via is None or (found.via.name and 0 < found.via.port < 65536)


@given(
    st.sampled_from(
        ["title", "link_layer", "handler", "gib", "notes", "service_level", "service_level_low_latency", "environment"]
    ),
    ANYTHING,
)
@few(100)
def test_any_value_in_a_profile(key: str, value: Any) -> None:
    text = toml({key: value})
    found = (
        accepted(lambda: network_env.read_profile("x", {**TREE, "profiles/x.toml": text})) if text is not None else None
    )
    if found:
        assert all(line.isprintable() for line in (found.title, *found.notes))


def may_be_set(value: str) -> bool:
    """Whether a profile may give a variable this value, and the files of a generation say it."""
    text = toml({"environment": {"NCCL_DEBUG": value}})
    found = (
        accepted(lambda: network_env.read_profile("x", {**TREE, "profiles/x.toml": text})) if text is not None else None
    )
    if found is None:
        return False
    return not list(
        offer.check_offer(modules_support.offer("/opt/deepep", modules_support.record(environment=found.environment)))
    )


@pytest.mark.usefixtures("programs")
def test_what_a_profile_sets_arrives_to_the_letter(tmp_path: Path) -> None:
    words = [word for word in WORDS if may_be_set(word)]
    everywhere, here, kind = (
        {f"NCCL_{name}_{number}": word for number, word in enumerate(words)} for name in ("ALL", "HOST", "KIND")
    )
    node = os.uname().nodename.partition(".")[0]
    record = modules_support.record(environment=everywhere, by_host={node: here}, by_kind={"intranode": kind})
    files = modulefiles.render_offer(modules_support.offer("/opt/deepep", record), TREE)
    # Of the test file everything is read up to where it would start the test; there is no module system.
    cut = "sed '/^prepare$/,$d' file.sh >part.sh; . ./part.sh; load_module() { return 1; }; prepare >/dev/null"
    expected = {
        "env.sh": (". ./file.sh", (everywhere, here)),
        "sbatch/intranode-test.sbatch": (cut, (everywhere, here, kind)),
    }
    for name, (start, sets) in expected.items():
        (tmp_path / "file.sh").write_bytes(files[name].content)
        show = "\n".join(f'printf "%s\\0" "${{{variable}-}}"' for values in sets for variable in values)
        done = subprocess.run(
            ["bash", "-c", f"set -eu\n{start}\n{show}"], cwd=tmp_path, capture_output=True, check=False
        )
        assert done.stderr == b""
        assert done.stdout.decode().split("\0")[:-1] == [word for values in sets for word in values.values()]
    assert "$(touch CANARY)" in words
    assert not (tmp_path / CANARY).exists()


@pytest.mark.usefixtures("programs")
def test_literals_mean_their_text_in_every_language(tmp_path: Path) -> None:
    texts = [word for word in WORDS if word.isascii() and word.isprintable()] + [
        "a\nb",
        "[$x]{y}\\n\\",
        "%d",
        "\\x41",
        "]]",
        "${a}",
        "a\\\"'",
    ]
    for language, said in languages_say(texts, tmp_path).items():
        assert said == texts, language


@given(st.sampled_from(list(places(OFFER["offer"]))), ANYTHING, st.booleans())
@few(200)
def test_any_value_in_the_manifest_of_a_prefix(place: tuple[str | int, ...], value: Any, as_key: bool) -> None:
    """The files of the next generation come from what the last one recorded, and more people than one may write
    there."""
    text = json.dumps({**OFFER, "offer": put(OFFER["offer"], place, value, as_key=as_key and isinstance(value, str))})
    offer = accepted(lambda: read_offer(text))
    files = accepted(lambda: modulefiles.render_offer(offer, TREE)) if offer else None
    if files:
        assert all(file.content.decode().replace("\n", "").replace("\t", "").isprintable() for file in files.values())


@given(st.sampled_from([*places(OFFER)][:8]), ANYTHING)
@few(60)
def test_status_shows_any_manifest_or_says_that_it_cannot(place: tuple[str | int, ...], value: Any) -> None:
    text = json.dumps(put(OFFER, place, value))
    seen = plan_support.changed(plan_support.READY, {"prefix.manifest": text})
    found = accepted(lambda: status.offered_manifest(Survey(WISH.inventory, "/shared/deepep", {"n001": seen}))[0])
    assert found is None or found["generation"] + 1


@pytest.mark.parametrize("name", ["nccl", "python_version", "module", "cuda_home", "external_python", "gib", "nvshmem"])
def test_no_value_of_a_manifest_becomes_a_command(name: str) -> None:
    for word in WORDS:
        if CANARY in word:
            offer = modules_support.offer("/opt/deepep", modules_support.v2_record(**{name: word}))
            assert accepted(lambda offer=offer: modulefiles.render_offer(offer, TREE)) is None, word


@given(st.sampled_from(list(places(ARCHIVE))), ANYTHING, st.booleans())
@few(150)
def test_any_value_in_the_index_of_an_archive(place: tuple[str | int, ...], value: Any, as_key: bool) -> None:
    text = json.dumps(put(ARCHIVE, place, value, as_key=as_key and isinstance(value, str))).encode()
    index = accepted(lambda: parse_index(text, "FILE"))
    if index is None:
        return
    assert total(index, text) > 0
    for name, _ in members(index.trees):
        assert os.path.normpath(name) == name
        assert name.startswith("store/")
    for tree in index.trees:
        record(tree)
    stream = io.BytesIO(small_file(INDEX, text) + b"x" * 600)
    assert read_index(stream, "FILE") == text
    accepted(lambda: list(read_trees(stream, index, "FILE", ())))


@given(st.sampled_from(list(places(MIRROR))), ANYTHING, st.booleans())
@few(200)
def test_any_value_in_the_index_of_a_mirror(
    tmp_path_factory: pytest.TempPathFactory, place: tuple[str | int, ...], value: Any, as_key: bool
) -> None:
    data = json.dumps(put(MIRROR, place, value, as_key=as_key and isinstance(value, str))).encode()
    index = accepted(lambda: parse_mirror_index(data, "mirror.json"))
    if index is None:
        return
    root = tmp_path_factory.getbasetemp() / "empty-mirror"
    root.mkdir(exist_ok=True)
    assert all(is_inside(path) for path in index.files)
    assert {finding.state for finding in compare(root, index)} <= {"missing"}
    page(index.files).encode()
    assert render_mirror_index(index).encode()
    assert list(root.iterdir()) == []


@given(st.data())
@few(200)
def test_any_field_of_what_a_host_answers(data: st.DataObject) -> None:
    """Hosts are not trusted: what one says of itself is facts or trouble, and no argument or variable with a zero
    byte comes of it."""
    lines = data.draw(st.sampled_from(RECORDED)).read_text(encoding="utf-8").split("\n")
    at = data.draw(st.sampled_from([number for number, line in enumerate(lines) if "=" in line]))
    key, _, value = lines[at].partition("=")
    fields = value.split("\t")
    fields[data.draw(st.integers(0, len(fields) - 1))] = data.draw(HOSTILE)
    lines[at] = f"{key}={chr(9).join(fields)}"
    seen = accepted(lambda: facts.parse_facts("\n".join(lines), "n001"))
    if seen is None:
        return
    wishes = accepted(lambda: host_recipes.wanted(WISH, {"n001": seen}))
    assert wishes is not None
    assert not any("\0" in text for env in wishes["n001"].values() for text in env.values())
    accepted(lambda: steps.make_plan(WISH, {"n001": seen}))


def test_no_zero_byte_and_no_half_character_is_sent() -> None:
    with pytest.raises(ValueError, match="zero byte"):
        channel.compose("true", ("a\0b",), {})
    (problem,) = app.check(["plan", "--prefix=/x\udc80"], PLAN)
    assert problem.what == "an argument that is not UTF-8"
    with pytest.raises(Trouble, match="a zero byte"):
        facts.parse_facts("facts=1\nos_name=a\0b\nend=1\n", "h")


@pytest.mark.parametrize("value", [value for value in NO_TEXTS if value is not None])
def test_numbers_and_tables_where_a_text_belongs_name_the_place(value: Any) -> None:
    text = toml(put(LOCK, ("source", "deepep-v1", "rev"), value))
    if text is None:
        pytest.fail("TOML has a spelling for each of them")
    with pytest.raises(Trouble, match=r"source\.deepep-v1\.rev|more than 64 bits"):
        model.parse_lock(text, "x.toml")
