"""What a container of the image runs first."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deepep_bootstrap.kubernetes import in_pod

IMAGE = {
    "stack": "v1",
    "module": "deepep/1-v1",
    "root": "/opt/deepep",
    "python": "/opt/deepep/store/p/bin/python",
    "tests": "/opt/deepep/store/d/tests",
    "lists": {"PATH": ["/opt/deepep/store/p/bin"], "LD_PRELOAD": ["/opt/deepep/x.so"]},
    "variables": {"NVSHMEM_HOME": "/opt/deepep/store/n", "NCCL_IB_SL": "0"},
    "kinds": {
        "intranode": {"script": "test_intranode.py", "always": ["-a"], "instead": ["-i"], "ours": False, "passes": []},
        "low-latency": {"script": "x.py", "always": [], "instead": [], "ours": False, "passes": ["--pass=1:2:3:0"]},
        "nccl": {"script": "nccl.py", "always": [], "instead": [], "ours": True, "passes": []},
    },
}


def test_entries_come_first_and_the_pod_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(in_pod, "DRIVER", str(tmp_path / "absent"))
    found = {"PATH": "/usr/bin:/opt/deepep/store/p/bin:/bin", "NCCL_IB_SL": "3", "A": "1", "DEEPEP_UNSET": "A B"}
    in_pod.set_environment(IMAGE, found)
    assert found["PATH"] == "/opt/deepep/store/p/bin:/usr/bin:/bin"
    assert found["NCCL_IB_SL"] == "3"
    assert found["NVSHMEM_HOME"] == "/opt/deepep/store/n"
    assert "A" not in found
    assert "LD_PRELOAD" not in found
    monkeypatch.setattr(in_pod, "DRIVER", str(tmp_path))
    in_pod.set_environment(IMAGE, found)
    assert found["LD_PRELOAD"] == "/opt/deepep/x.so"


SCRIPT = """\
#!/bin/bash
export NCCL_NET=gIB
export NCCL_IB_TC="52"  # the class
export NCCL_TUNER='/usr/local/gib/a b'
export OTHER=1
export NCCL_MADE=$(echo made)
"""


@pytest.mark.usefixtures("programs")
def test_settings_of_gib_are_adopted(tmp_path: Path) -> None:
    (tmp_path / "set_nccl_env.sh").write_text(SCRIPT, encoding="utf-8")
    plain = {"NCCL_NET": "gIB", "NCCL_IB_TC": "52", "NCCL_TUNER": "/usr/local/gib/a b"}
    found = {"PATH": "/usr/bin:/bin"}
    in_pod.adopt_gib(str(tmp_path / "set_nccl_env.sh"), found)
    assert found == {"PATH": "/usr/bin:/bin", "NCCL_MADE": "made", **plain}
    found = {"PATH": str(tmp_path)}
    in_pod.adopt_gib(str(tmp_path / "set_nccl_env.sh"), found)
    assert found == {"PATH": str(tmp_path), **plain}
    with pytest.raises(SystemExit, match="absent is not there: the gIB installer has not finished"):
        in_pod.adopt_gib(str(tmp_path / "absent"), found)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, ("0", "1", "127.0.0.1", "29500")),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a-0.a", "MASTER_PORT": "1"}, ("1", "2", "a-0.a", "1")),
        ({"JOB_COMPLETION_INDEX": "3", "WORLD_SIZE": "4"}, ("3", "4", "127.0.0.1", "29500")),
        ({"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "l.g"}, ("1", "2", "l.g", "29500")),
    ],
)
def test_a_pod_knows_its_place(given: dict[str, str], wanted: tuple[str, ...]) -> None:
    in_pod.find_place(given)
    assert tuple(given[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")) == wanted


@pytest.mark.usefixtures("programs")
def test_a_name_without_an_address_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    in_pod.await_first({"MASTER_ADDR": "127.0.0.1"})
    with pytest.raises(SystemExit, match=r"no such name has no address after 0 s .*publishNotReadyAddresses"):
        in_pod.await_first({"MASTER_ADDR": "no such name"}, patience=0)


def test_commands_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPEP_RUN_DIR", "/run/deepep")
    front, programs = "/opt/deepep/store/p/bin/python", "/opt/deepep/programs"
    ranks = [front, f"{programs}/ranks.py", "--logs", "/run/deepep", "--", f"{IMAGE['tests']}/test_intranode.py", "-a"]
    assert in_pod.test_command(IMAGE, "intranode", []) == [*ranks, "-i"]
    assert in_pod.test_command(IMAGE, "intranode", ["-x"]) == [*ranks, "-x"]
    assert in_pod.test_command(IMAGE, "low-latency", [])[1:5] == [
        f"{programs}/passes.py", "--logs", "/run/deepep", "--pass=1:2:3:0",
    ]  # fmt: skip
    assert in_pod.test_command(IMAGE, "nccl", []) == [front, f"{programs}/nccl.py"]
    with pytest.raises(SystemExit, match="the stack v1 has no test ep, but intranode, low-latency, nccl"):
        in_pod.test_command(IMAGE, "ep", [])


RECIPES = """\
for name in ${RECIPES}; do
    echo "recipe=${name}"
    [ "${VERB}" = check ] || touch "${0%/*}/PLACE/${name}"
    if [ "${name}" = options ]; then echo state=todo; echo needs=reboot
    elif [ -e "PLACE/${name}" ]; then echo state=ok
    else echo state=todo; fi
    echo found=x=y
    echo code=0
done
"""


@pytest.mark.usefixtures("programs")
def test_a_node_gets_what_lacks_and_no_reboot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = RECIPES.replace("${0%/*}/PLACE", str(tmp_path)).replace("PLACE", str(tmp_path))
    assert in_pod.prepare_node(script, ["driver", "options"]) == 1
    said = capsys.readouterr().out
    assert "deepep: to do: driver\n" in said
    assert "deepep: driver: ok: found x=y" in said
    assert "options: only with a reboot" in said
    assert [path.name for path in tmp_path.iterdir()] == ["driver"]
    assert in_pod.prepare_node(script, ["driver"]) == 0
    assert "to do" not in capsys.readouterr().out


@pytest.mark.usefixtures("programs")
def test_a_recipe_without_an_answer_is_not_ready(capsys: pytest.CaptureFixture[str]) -> None:
    assert in_pod.prepare_node("exit 3", ["driver"]) == 1
    assert "driver: no answer" in capsys.readouterr().out


@pytest.mark.usefixtures("programs")
def test_any_command_runs_in_the_environment_of_the_stack(tmp_path: Path) -> None:
    program = tmp_path / "in_pod.py"
    program.write_bytes(Path(in_pod.__file__).read_bytes())
    (tmp_path / "image.json").write_text(json.dumps({**IMAGE, "lists": {}}), encoding="utf-8")
    words = [sys.executable, program, "sh", "-c", "echo $NVSHMEM_HOME"]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "/opt/deepep/store/n\n"
    done = subprocess.run([sys.executable, program, "no-such"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "deepep: no-such: No such file or directory\n")
