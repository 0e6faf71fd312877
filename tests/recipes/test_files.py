"""recipes/host/lib/files.sh: files written whole, what stood there before kept, and all of it put back."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.host import Host

pytestmark = pytest.mark.usefixtures("programs")

TARGET = "/etc/some.d/x.conf"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "root")


def install(host: Host, text: str, path: str = TARGET, mode: str = "644") -> None:
    said = host.run(f"install_file r {path} {mode} <<<{shlex.quote(text)}")
    assert said.code == 0, said


def remove(host: Host) -> dict[str, str]:
    said = host.run("remove_files r")
    assert said.code == 0, said
    return said.data


def test_a_file_and_the_folders_made_for_it_go_again(host: Host) -> None:
    before = host.files()
    install(host, "ours", "/etc/a/b/c", "600")
    assert (host.read("/etc/a/b/c"), (host.root / "etc/a/b/c").stat().st_mode & 0o777) == ("ours\n", 0o600)
    assert remove(host) == {}
    assert host.files() == before
    assert not host.has("/etc")
    assert remove(host) == {}


def test_a_folder_that_others_use_meanwhile_stays(host: Host) -> None:
    install(host, "ours", "/etc/a/b/c")
    host.write("/etc/a/theirs")
    remove(host)
    assert host.has("/etc/a/theirs")
    assert not host.has("/etc/a/b")


def test_what_stood_there_comes_back_byte_for_byte_with_mode_and_time(host: Host) -> None:
    host.write(TARGET, "theirs, without a newline", 0o640)
    before = host.files()
    install(host, "one")
    install(host, "two")
    assert host.read(TARGET) == "two\n"
    assert remove(host) == {}
    assert host.files() == before


def test_what_is_so_already_is_not_touched_and_not_ours(host: Host) -> None:
    host.write(TARGET, "same\n")
    before = host.files()
    install(host, "same")
    assert host.files() == before
    assert remove(host) == {}
    assert host.files() == before


def test_a_second_run_changes_nothing(host: Host) -> None:
    install(host, "ours")
    everything = {path: path.stat().st_mtime_ns for path in host.root.rglob("*") if path.is_file()}
    install(host, "ours")
    assert {path: path.stat().st_mtime_ns for path in host.root.rglob("*") if path.is_file()} == everything


def test_a_link_is_kept_as_a_link(host: Host) -> None:
    host.write("/opt/real", "real\n")
    link = host.root / TARGET.lstrip("/")
    link.parent.mkdir(parents=True)
    link.symlink_to("/opt/real")
    install(host, "real")
    assert not link.is_symlink()
    remove(host)
    assert link.is_symlink()
    assert str(link.readlink()) == "/opt/real"
    assert host.read("/opt/real") == "real\n"


def test_a_file_changed_after_us_is_left_alone_and_named_the_others_go(host: Host) -> None:
    install(host, "ours")
    install(host, "also ours", "/etc/y")
    host.write(TARGET, "ours\nand theirs\n")
    for _ in range(2):
        assert remove(host) == {"note": f"changed by somebody else since, left alone: {TARGET}"}
        assert host.read(TARGET) == "ours\nand theirs\n"
        assert not host.has("/etc/y")


def test_a_text_that_is_written_over_is_kept_and_the_first_original_stays_the_original(host: Host) -> None:
    host.write(TARGET, "original\n")
    install(host, "ours")
    host.write(TARGET, "edited\n")
    said = host.run(f"install_file r {TARGET} 644 <<<ours")
    assert "changed by somebody else" in said.talk
    assert host.read(f"/var/lib/deepep-bootstrap/replaced{TARGET}") == "edited\n"
    remove(host)
    assert host.read(TARGET) == "original\n"


def test_a_file_that_somebody_removed_stays_removed(host: Host) -> None:
    install(host, "ours")
    (host.root / TARGET.lstrip("/")).unlink()
    assert remove(host) == {}
    assert not host.has(TARGET)


@pytest.mark.parametrize("dying", ["mv", "chmod", "cat"])
def test_an_interrupted_write_leaves_the_old_file(host: Host, dying: str) -> None:
    host.write(TARGET, "old\n")
    host.tool(dying, 'case "$*" in *some.d*|644*) kill -9 $PPID ;; esac; exec /bin/' + dying + ' "$@"')
    if dying == "cat":
        host.tool("cat", "kill -9 $PPID")
    assert host.run(f"install_file r {TARGET} 644 <<<new").code != 0
    assert host.read(TARGET) == "old\n"
    (host.tools / dying).unlink()
    assert remove(host) == {}, "what was only begun is nothing to name"
    install(host, "new")
    remove(host)
    assert host.read(TARGET) == "old\n"


def test_a_producer_that_fails_writes_nothing(host: Host) -> None:
    host.write(TARGET, "old\n")
    said = host.run(f'fill() {{ echo half; return 1; }}\ntext="$(fill)"\ninstall_file r {TARGET} 644 <<<"$text"')
    assert said.code != 0
    assert host.read(TARGET) == "old\n"


def test_a_folder_in_the_place_of_the_file_is_refused(host: Host) -> None:
    (host.root / TARGET.lstrip("/")).mkdir(parents=True)
    said = host.run(f"install_file r {TARGET} 644 <<<new")
    assert (said.code, said.talk) == (1, f"error: {TARGET} is a directory, wanted is a file\n")


def test_recipes_do_not_meet(host: Host) -> None:
    install(host, "ours")
    host.run("install_file other /etc/y 644 <<<theirs")
    assert remove(host) == {}
    assert host.read("/etc/y") == "theirs\n"


def test_the_stamp_tells_this_boot_from_a_later_one(host: Host) -> None:
    ask = 'data state "$(state_after_change r)"'
    assert host.run(ask).state == "todo"
    assert host.run(f"stamp_change r; {ask}").state == "reboot"
    host.boot("second-boot")
    assert host.run(ask).state == "stuck"
    assert host.run(f"stamp_change r; {ask}").state == "reboot"
    assert host.run(f"clear_stamp r; {ask}").state == "todo"


def test_what_is_on_record_is_told_file_by_file_and_held_packages_too(host: Host) -> None:
    def written() -> dict[str, str]:
        return host.recipe("written", "", MODULEFILES="/shared/deepep/modulefiles").data

    install(host, "ours")
    assert written() == {"file": f"r\t{TARGET}\tours", "hook": "", "heir": "", "end": "1"}
    host.write(TARGET, "theirs\n")
    assert written() == {"file": f"r\t{TARGET}\tchanged", "hook": "", "heir": "", "end": "1"}
    (host.root / TARGET.lstrip("/")).unlink()
    host.write("/var/lib/deepep-bootstrap/held/doca-ofed", "doca-kernel\ndoca-ofed\n")
    assert written() == {
        "file": f"r\t{TARGET}\tours",
        "held": "doca-ofed\tdoca-kernel doca-ofed",
        "hook": "",
        "heir": "",
        "end": "1",
    }


steps = st.lists(st.sampled_from(["install a", "install b", "remove"]), max_size=6)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=steps, there=st.booleans())
def test_whatever_was_written_in_whatever_order_removing_restores(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str], there: bool
) -> None:
    host = Host(tmp_path_factory.mktemp("machine") / "root")
    if there:
        host.write(TARGET, "before\n")
    before = host.files()
    lines = [
        f"install_file r {TARGET} 644 <<<{step[-1]}" if step != "remove" else "remove_files r"
        for step in [*steps, "remove"]
    ]
    said = host.run("\n".join(lines))
    assert (said.code, said.data) == (0, {}), said
    assert host.files() == before
