"""Host recipes and their common ground, run for real: in temporary roots, in a chroot over this machine, on the
embedded cluster."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.paths import ROOT

if TYPE_CHECKING:
    from tests.support.lab import LiveLab

pytest_plugins = ["tests.support.lab"]
pytestmark = pytest.mark.usefixtures("programs")

RECIPES = ROOT / "recipes"
LIB = (RECIPES / "lib.sh").read_text(encoding="utf-8")
HOOK = "\n".join(
    (RECIPES / part).read_text(encoding="utf-8")
    for part in ("lib.sh", "host/lib/files.sh", "host/lib/hook.sh", "host/module-hook.sh")
)
LIBRARY = ("lib.sh", "host/lib/files.sh", "host/lib/packages.sh", "host/lib/repositories.sh", "host/lib/keys.sh")
DEPS = "\n".join((RECIPES / part).read_text(encoding="utf-8") for part in (*LIBRARY, "host/build-deps.sh"))
DEBIAN = "gcc g++ make cmake ninja-build git libibverbs-dev python3-dev"


def run_bash(script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a composed script the way hosts do: from a file, with nothing on stdin."""
    clean = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
    command = ["bash", "/dev/fd/3", *arguments]
    reading, writing = os.pipe()
    with (
        open(writing, "w", encoding="utf-8") as pipe,
        subprocess.Popen(
            ["bash", "-c", f'exec 3<&{reading}; exec "$@"', "bash", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**clean, **env},
            pass_fds=[reading],
        ) as process,
    ):
        os.close(reading)
        pipe.write(script)
        pipe.close()
        out, err = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def facts_of(text: str) -> dict[str, str]:
    """Return the data lines of a recipe; a line that is none fails the test."""
    return dict(line.split("=", 1) for line in text.splitlines())


# --- lib.sh ----------------------------------------------------------------------------------------------------------------------------


def test_data_lines_and_talk_go_separate_ways() -> None:
    done = run_bash(f"{LIB}\nsay one; warn two; data state ok; run_step build sh -c 'echo out; echo err >&2'")
    assert (done.returncode, done.stdout) == (0, "state=ok\n")
    assert [line for line in done.stderr.splitlines() if "==" not in line] == ["one", "warning: two", "out", "err"]


@pytest.mark.parametrize(("key", "value"), [("state", "a\nb"), ("Bad Key", "x"), ("", "x"), ("a=b", "x")])
def test_a_data_line_that_would_be_misread_ends_the_recipe(key: str, value: str) -> None:
    done = run_bash(f"{LIB}\ndata {shlex.quote(key)} {shlex.quote(value)}; echo reached")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: data: ")


def test_a_failing_command_is_named_with_its_line_and_code() -> None:
    done = run_bash(f"{LIB}\nmain() {{\n    ls /nowhere/at/all\n}}\nmain", RECIPE="host/module-hook.sh")
    assert done.returncode == 2
    line = LIB.count("\n") + 3
    assert f"error: host/module-hook.sh line {line}: exit code 2 from: ls /nowhere/at/all" in done.stderr


def test_die_says_one_line() -> None:
    done = run_bash(f"{LIB}\ndie 'two\nlines'")
    assert (done.returncode, done.stderr) == (1, "error: two lines\n")


def test_missing_inputs_and_programs_are_told_all_at_once() -> None:
    done = run_bash(f"{LIB}\nneed_env HERE ONE TWO", HERE="x", TWO="")
    assert (done.returncode, done.stderr) == (1, "error: missing input: ONE TWO\n")
    done = run_bash(f"{LIB}\nneed_command sh no-such-a no-such-b")
    assert (done.returncode, done.stderr) == (1, "error: not installed on this machine: no-such-a no-such-b\n")


BUSY = """sleep() { :; }
install() { if [[ -e once ]]; then echo done; else : >once; echo 'E: Could not get lock odd' >&2; return 100; fi; }
"""


def test_a_busy_package_manager_is_asked_again_until_the_limit(tmp_path: Path) -> None:
    """How long real ones take until they refuse depends on the machine: what is said does not."""
    done = run_bash(f"cd {tmp_path}\n{LIB}\n{BUSY}\nwith_package_lock install")
    assert (done.returncode, done.stderr.splitlines()) == (
        0,
        ["E: Could not get lock odd", "another program is installing packages: waiting up to 300 s", "done"],
    )
    (tmp_path / "once").unlink()
    done = run_bash(f"cd {tmp_path}\n{LIB}\n{BUSY}\nwith_package_lock install", PACKAGE_LOCK_WAIT="0")
    last = "error: the package database is still held by another program after 0 s: E: Could not get lock odd"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, last)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("before", encoding="utf-8")
    done = run_bash(f"{LIB}\nfill() {{ echo half; return 1; }}\nfill | write_file {target} 640")
    assert done.returncode != 0
    assert run_bash(f"{LIB}\necho whole | write_file {target} 640").returncode == 0
    assert target.read_text(encoding="utf-8") == "whole\n"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


# --- module-hook -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine's root with Lmod in it, as far as the recipe looks."""
    init = tmp_path / "usr/share/lmod/lmod/init/bash"
    init.parent.mkdir(parents=True)
    init.touch()
    return tmp_path


def hook(verb: str, root: Path, folder: str = "/shared/deepep/modulefiles", takes: str = "") -> dict[str, str]:
    done = run_bash(HOOK, verb, HOST_ROOT=str(root), MODULEFILES=folder, TAKES=takes)
    assert done.returncode == 0, done
    return facts_of(done.stdout)


def test_hook_check_apply_apply_remove(root: Path) -> None:
    folder, profile = "/shared/deepep/modulefiles", root / "etc/profile.d"
    assert hook("check", root) == {"state": "todo", "found": "no hook", "wanted": folder}
    assert not profile.exists()
    assert hook("apply", root) == {"state": "ok", "found": folder, "wanted": folder}
    written = {
        path.name: (path.read_text(encoding="utf-8"), path.stat().st_mtime_ns, path.stat().st_ino)
        for path in profile.iterdir()
    }
    assert sorted(written) == ["zz-deepep.csh", "zz-deepep.sh"]
    assert all(
        "Written by deepep-bootstrap" in text and f"# modulefiles: {folder}\n" in text
        for text, _, _ in written.values()
    )
    assert hook("check", root)["state"] == "ok"
    assert hook("apply", root)["state"] == "ok"
    again = {
        path.name: (path.read_text(encoding="utf-8"), path.stat().st_mtime_ns, path.stat().st_ino)
        for path in profile.iterdir()
    }
    assert again == written
    assert hook("check", root, "/other/modulefiles") == {
        "state": "todo",
        "found": folder,
        "wanted": "/other/modulefiles",
    }
    assert hook("remove", root) == {"state": "ok", "found": "no hook"}
    assert not (root / "etc").exists(), "what was made for it goes with it"
    assert hook("remove", root)["state"] == "ok"


A, B, C = (f"/shared/{name}/modulefiles" for name in "abc")


def offer(root: Path, *folders: str) -> None:
    """Let these directories have modules, and no others."""
    for folder in (A, B, C):
        shutil.rmtree(root / folder.removeprefix("/"), ignore_errors=True)
    for folder in folders:
        (root / folder.removeprefix("/") / "deepep").mkdir(parents=True)
        (root / folder.removeprefix("/") / "deepep/1.lua").touch()


def named(root: Path) -> str:
    """The directory that the hook names, "" without a hook."""
    path = root / "etc/profile.d/zz-deepep.sh"
    found = (
        re.search(r"^# modulefiles: (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE) if path.exists() else None
    )
    return found[1] if found else ""


@pytest.mark.parametrize("takes", ["", B, f"{C}:/shared/a"])
def test_a_hook_of_another_prefix_is_not_taken_unasked(root: Path, takes: str) -> None:
    hook("apply", root, A)
    done = run_bash(HOOK, "apply", HOST_ROOT=str(root), MODULEFILES=B, TAKES=takes)
    assert done.returncode == 1
    assert "/etc/profile.d/zz-deepep.sh is of /shared/a, and nobody said" in done.stderr
    assert named(root) == A


@pytest.mark.parametrize("takes", ["any", A, f"{C}:{A}"])
def test_a_hook_of_another_prefix_is_taken_when_asked(root: Path, takes: str) -> None:
    hook("apply", root, A)
    assert hook("apply", root, B, takes)["found"] == B
    assert named(root) == B


def test_a_hook_of_another_prefix_is_left_when_ours_leaves(root: Path) -> None:
    hook("apply", root, A)
    assert hook("remove", root, B) == {"note": "left, it is of /shared/a", "state": "ok", "found": A}
    assert named(root) == A


@pytest.mark.parametrize(
    ("order", "offered", "leaving", "goes_to"),
    [
        ((A, B), (A,), B, A),
        ((A, B), (), B, ""),  # nobody offers modules there any more
        ((A, B, C), (A, B), C, B),
        ((A, B, C), (A,), C, A),
        ((A, B, A), (A, B), A, B),
        ((A, B), (A, B), A, B),  # not ours: left
    ],
)
def test_a_hook_goes_back_to_whom_it_was_taken_from(
    root: Path, order: tuple[str, ...], offered: tuple[str, ...], leaving: str, goes_to: str
) -> None:
    for folder in order:
        hook("apply", root, folder, "any")
    offer(root, *offered)
    said = hook("remove", root, leaving)
    assert (named(root), said["found"]) == (goes_to, goes_to or "no hook")
    if goes_to and order[-1] == leaving:
        assert said["note"] == f"given back to {goes_to.removesuffix('/modulefiles')}"
    if not goes_to:
        assert not (root / "etc").exists()


def test_a_hook_that_somebody_changed_is_not_given_back(root: Path) -> None:
    hook("apply", root, A)
    hook("apply", root, B, "any")
    offer(root, A)
    with (root / "etc/profile.d/zz-deepep.sh").open("a", encoding="utf-8") as file:
        file.write("echo hello\n")
    assert "changed by somebody else" in hook("remove", root, B)["note"]
    assert named(root) == B


@pytest.mark.parametrize("damage", ["append", "mode", "no csh"])
def test_a_hook_that_is_not_as_written_is_written_again(root: Path, damage: str) -> None:
    hook("apply", root)
    sh, csh = root / "etc/profile.d/zz-deepep.sh", root / "etc/profile.d/zz-deepep.csh"
    if damage == "append":
        sh.write_text(sh.read_text(encoding="utf-8") + "echo hello\n", encoding="utf-8")
    elif damage == "mode":
        sh.chmod(0o600)
    else:
        csh.unlink()
    assert hook("check", root)["found"] == "the hook of another version"
    assert hook("apply", root)["state"] == "ok"


def test_a_hook_from_before_the_record_is_taken_away_too(root: Path) -> None:
    hook("apply", root)
    old = (root / "etc/profile.d/zz-deepep.sh").read_text(encoding="utf-8")
    shutil.rmtree(root / "var")
    assert hook("remove", root) == {"state": "ok", "found": "no hook"}
    (root / "etc/profile.d/zz-deepep.sh").write_text(old + "# of an older version\n", encoding="utf-8")
    assert hook("apply", root)["state"] == "ok"
    assert hook("remove", root) == {"state": "ok", "found": "no hook"}
    assert list((root / "etc/profile.d").iterdir()) == []


def test_a_hook_that_somebody_changed_is_left_alone_and_named(root: Path) -> None:
    hook("apply", root)
    with (root / "etc/profile.d/zz-deepep.sh").open("a", encoding="utf-8") as file:
        file.write("echo hello\n")
    said = hook("remove", root)
    assert said["note"] == "changed by somebody else since, left alone: /etc/profile.d/zz-deepep.sh"
    assert [path.name for path in (root / "etc/profile.d").iterdir()] == ["zz-deepep.sh"]


def test_no_module_system_is_said_and_nothing_is_written(tmp_path: Path) -> None:
    for verb in ("check", "apply"):
        said = hook(verb, tmp_path)
        assert (said["state"], said["found"]) == ("ok", "no module system")
        assert "/shared/deepep/current/env.sh" in said["note"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["relative/path", "/a b", "/a;reboot", "/$(id)", "/a'b", "/a\nb", "/a:b"])
def test_a_path_that_shells_would_read_otherwise_is_refused(root: Path, folder: str) -> None:
    done = run_bash(HOOK, "apply", HOST_ROOT=str(root), MODULEFILES=folder)
    assert done.returncode == 1
    assert "not a plain absolute path" in done.stderr
    assert not (root / "etc").exists()


def test_a_hook_that_cannot_be_written_is_an_error(root: Path) -> None:
    (root / "etc").write_text("a file where the folder should be", encoding="utf-8")
    assert run_bash(HOOK, "apply", HOST_ROOT=str(root), MODULEFILES="/a/modulefiles").returncode != 0


@pytest.mark.parametrize("shell", ["dash", "bash", "busybox sh", "tcsh -f"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "/shared/deepep/modulefiles"),
        ("", "/shared/deepep/modulefiles"),
        ("/a:/b", "/shared/deepep/modulefiles:/a:/b"),
        ("/a:/shared/deepep/modulefiles", "/a:/shared/deepep/modulefiles"),
        ("/shared/deepep/modulefiles2", "/shared/deepep/modulefiles:/shared/deepep/modulefiles2"),
    ],
)
def test_the_hook_puts_its_folder_first_and_once(root: Path, shell: str, before: str | None, after: str) -> None:
    hook("apply", root)
    kind, read = ("csh", "source") if "csh" in shell else ("sh", ".")
    script = root / "script"
    script.write_text(
        f"{read} {root}/etc/profile.d/zz-deepep.{kind}\n{read} {root}/etc/profile.d/zz-deepep.{kind}\necho "
        f'"$MODULEPATH"\n',
        encoding="utf-8",
    )
    env = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **({} if before is None else {"MODULEPATH": before})}
    done = subprocess.run([*shell.split(), str(script)], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{after}\n", "")


def try_hook_on(lab: LiveLab, tcl_only: bool) -> None:
    """Apply the hook on a lab host and log in: before the folder exists, with a module in it, nested, and after
    removal."""
    folder = "/shared/hooked/modulefiles"
    script = lab.shared / "hook.sh"
    script.write_text(HOOK, encoding="utf-8")

    def recipe(verb: str) -> dict[str, str]:
        done = lab.ssh("n001", f"MODULEFILES={folder} bash /shared/hook.sh {verb}")
        assert done.returncode == 0, done
        return facts_of(done.stdout)

    def login(command: str) -> tuple[str, str]:
        done = lab.ssh("n001", f"bash -lc {shlex.quote(command)}")
        return done.stdout, done.stderr

    # What tests of whole bootstraps left in this lab is another prefix's hook, which ours must not take over unasked.
    lab.ssh("n001", "rm -f /etc/profile.d/zz-deepep.sh /etc/profile.d/zz-deepep.csh")
    recipe("remove")
    plain, _ = login('echo "$MODULEPATH"')
    assert folder not in plain
    assert recipe("check")["state"] == "todo"
    assert recipe("apply")["state"] == "ok"
    # The folder is not there yet: a login and a look at the modules stay as quiet as before.
    assert login('module -t avail >/dev/null 2>/tmp/said; echo "$?"; grep -ci -e error -e hooked /tmp/said') == (
        "0\n0\n",
        "",
    )
    (lab.shared / "hooked/modulefiles/hello").mkdir(parents=True, exist_ok=True)
    (lab.shared / "hooked/modulefiles/hello/1.0").write_text("#%Module1.0\nsetenv HELLO tcl\n", encoding="utf-8")
    if not tcl_only:
        (lab.shared / "hooked/modulefiles/hello/2.0.lua").write_text('setenv("HELLO", "lua")\n', encoding="utf-8")
    assert login("module load hello/1.0; echo $HELLO") == ("tcl\n", "")
    if not tcl_only:
        assert login("module load hello/2.0; echo $HELLO") == ("lua\n", "")
    nested, _ = login("bash -lc 'echo $MODULEPATH'")
    assert nested.strip().split(":").count(folder) == 1
    assert set(plain.strip().split(":")) <= set(nested.strip().split(":"))
    recipe("remove")
    assert login('echo "$MODULEPATH"')[0] == plain


@pytest.mark.e2e
def test_the_hook_in_real_login_shells_with_lmod(lab: LiveLab) -> None:
    try_hook_on(lab, tcl_only=False)


@pytest.mark.e2e
def test_the_hook_in_real_login_shells_with_environment_modules(modules_lab: LiveLab) -> None:
    try_hook_on(modules_lab, tcl_only=True)


# --- build-deps ------------------------------------------------------------------------------------------------------------------------

# Everything happens in a mount namespace of its own, on an overlay over this machine: the last process takes it all
# away with it.
CHROOT = r"""
set -eu
lower=$1 script=$2
mount -t tmpfs tmpfs "$lower"
mkdir "$lower/upper" "$lower/work" "$lower/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$lower/upper,workdir=$lower/work" "$lower/root"
for folder in proc sys dev; do mount --rbind "/$folder" "$lower/root/$folder"; done
printf '#!/bin/sh\nexit 101\n' >"$lower/root/usr/sbin/policy-rc.d"
chmod 755 "$lower/root/usr/sbin/policy-rc.d"
# After each package mandb would index all manuals of this machine, for seconds.
rm -f "$lower/root/var/lib/man-db/auto-update"
cp "$script" "$lower/root/recipe"
shift 2
exec chroot "$lower/root" /usr/bin/env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C "$@"
"""


def in_chroot(tmp_path: Path, script: str, *unshare: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `script` (bash; the recipe is /recipe) as root of a copy of this machine that ends with it."""
    if os.geteuid() != 0:
        pytest.skip("needs root for a chroot (make test uses sudo)")
    recipe, below = tmp_path / "recipe", tmp_path / "below"
    recipe.write_text(DEPS, encoding="utf-8")
    below.mkdir(exist_ok=True)
    given = [f"{name}={value}" for name, value in env.items()]
    inside = ["bash", "-c", CHROOT, "bash", str(below), str(recipe), *given, "bash", "-euc", script]
    return subprocess.run(
        ["unshare", "-m", *unshare, *inside], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


LESS = (
    "dpkg -r --force-depends libibverbs-dev ninja-build >/dev/null 2>&1; rm -f /usr/include/infiniband/mlx5dv.h; "
    "hash -r; "
)


def test_build_deps_are_installed_once(tmp_path: Path) -> None:
    script = LESS + (
        "bash /recipe check; echo --; bash /recipe apply; echo --; state() { dpkg-query -W; stat -c %y "
        "/var/log/dpkg.log; }; "
        "state >/before; bash /recipe apply; state | cmp - /before; echo --; ls /usr/include/infiniband/mlx5dv.h "
        "/usr/bin/ninja"
    )
    done = in_chroot(tmp_path, script, MANAGER="apt", PACKAGES=DEBIAN, PYTHON="/usr/bin/python3")
    assert done.returncode == 0, done
    before, after, again, files = done.stdout.split("--\n")
    assert facts_of(before)["state"] == "todo"
    assert facts_of(before)["found"] == "no ninja, infiniband/mlx5dv.h"
    assert facts_of(after)["state"] == "ok"
    assert again == after
    assert files == "/usr/bin/ninja\n/usr/include/infiniband/mlx5dv.h\n"
    assert not Path("/recipe").exists()


HOLD = (
    "python3 -c \"import fcntl, time, sys; file = open('/var/lib/dpkg/lock-frontend', 'w'); fcntl.lockf(file, "
    "fcntl.LOCK_EX); "
    "open('/held', 'w'); time.sleep(float(sys.argv[1]))\" SECONDS & while [ ! -e /held ]; do sleep 0.1; done; "
)


def test_a_package_manager_at_work_is_waited_for_with_a_limit(tmp_path: Path) -> None:
    script = LESS + HOLD.replace("SECONDS", "600") + "bash /recipe apply || echo code $?; kill %1"
    done = in_chroot(tmp_path, script, MANAGER="apt", PACKAGES=DEBIAN, PACKAGE_LOCK_WAIT="3")
    assert done.stdout == "code 1\n", done
    assert "error: the package database is still held by another program after 3 s: " in done.stderr
    assert "/var/lib/dpkg/lock-frontend" in done.stderr


def test_a_package_manager_that_ends_in_time_is_no_error(tmp_path: Path) -> None:
    done = in_chroot(
        tmp_path, LESS + HOLD.replace("SECONDS", "3") + "bash /recipe apply", MANAGER="apt", PACKAGES=DEBIAN
    )
    assert facts_of(done.stdout)["state"] == "ok", done
    assert "waiting up to 300 s" in done.stderr


def test_without_network_the_packages_are_named_to_install_by_hand(tmp_path: Path) -> None:
    script = LESS + "rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb; bash /recipe apply"
    done = in_chroot(tmp_path, script, "-n", MANAGER="apt", PACKAGES=DEBIAN)
    assert (done.returncode, done.stdout) == (1, ""), done
    assert (
        f"error: apt could not install the packages (what it said is above). Please install by hand: {DEBIAN}\n"
        in done.stderr
    )


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (
            {"MANAGER": "zypper", "PACKAGES": "gcc ninja"},
            "no package manager that this recipe knows (MANAGER=zypper). Please install by hand: gcc ninja",
        ),
        (
            {},
            (
                "this lock does not say what this distribution calls the packages. Please install by hand: ninja, "
                "infiniband/mlx5dv.h"
            ),
        ),
        ({"MANAGER": "dnf", "PACKAGES": "ninja-build"}, "not installed on this machine: dnf"),
    ],
)
def test_other_distributions_are_told_what_to_install(tmp_path: Path, env: dict[str, str], said: str) -> None:
    done = in_chroot(tmp_path, LESS + "rm -f /usr/bin/dnf*; bash /recipe check; bash /recipe apply", **env)
    assert done.returncode == 1, done
    assert said in done.stderr
    check = facts_of(done.stdout)
    assert check["state"] == ("todo" if env else "blocked")
    assert check.get("note", "").endswith(
        "" if env else "for this distribution: install by hand ninja, infiniband/mlx5dv.h"
    )


def test_an_old_cmake_and_a_python_without_headers_are_found(tmp_path: Path) -> None:
    script = (
        "printf '#!/bin/sh\\necho cmake version 3.16.3\\n' >/usr/local/sbin/cmake; chmod 755 /usr/local/sbin/cmake; "
        "rm -f /usr/include/python3*/Python.h; PATH=/usr/local/sbin:$PATH bash /recipe check"
    )
    found = facts_of(in_chroot(tmp_path, script, PYTHON="/usr/bin/python3").stdout)["found"]
    assert "cmake 3.19 or newer (there is 3.16.3)" in found
    assert "Python.h of /usr/bin/python3" in found


def test_somebody_who_is_not_root_is_told_so(tmp_path: Path) -> None:
    script = LESS + "setpriv --reuid=65534 --regid=65534 --clear-groups bash /recipe apply"
    done = in_chroot(tmp_path, script, MANAGER="apt", PACKAGES="ninja-build")
    assert done.returncode == 1
    assert "error: packages can only be installed by root. As root, install by hand: ninja-build" in done.stderr


@pytest.mark.parametrize("script", [HOOK, DEPS])
def test_an_unknown_argument_is_refused(script: str) -> None:
    done = run_bash(script, "destroy", MODULEFILES="/a/modulefiles")
    assert done.returncode == 1
    assert "unknown argument destroy" in done.stderr
