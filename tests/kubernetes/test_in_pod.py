"""What a container of the image runs first."""

from __future__ import annotations

import http.server
import json
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepep_bootstrap.kube import client, names, nodes
from deepep_bootstrap.kubernetes import in_pod
from tests.support.kube_api import LiveApi, live_api, make_node, refusal

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
    record = in_pod.NodeRecord({})
    assert in_pod.prepare_node(script, ["driver", "options"], record) == 1
    said = capsys.readouterr().out
    assert "deepep: to do: driver\n" in said
    assert "deepep: driver: ok: found x=y" in said
    assert "options: only with a reboot" in said
    assert [path.name for path in tmp_path.iterdir()] == ["driver"]
    assert in_pod.prepare_node(script, ["driver"], record) == 0
    assert "to do" not in capsys.readouterr().out


@pytest.mark.usefixtures("programs")
def test_a_recipe_without_an_answer_is_not_ready(capsys: pytest.CaptureFixture[str]) -> None:
    assert in_pod.prepare_node("exit 3", ["driver"], in_pod.NodeRecord({})) == 1
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


# --- what a node's pod writes down -----------------------------------------------------------------------------------


class Front(http.server.BaseHTTPRequestHandler):
    """The API server as pods reach it: over TLS, with the account's token. It hands on to the emulator."""

    behind = ""

    def do_PATCH(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        passed = {key: self.headers[key] for key in ("Content-Type", "Accept")}
        asked = urllib.request.Request(f"{self.behind}{self.path}", body, passed, method="PATCH")
        if self.headers["Authorization"] != "Bearer token-of-the-pod":
            self.send_error(401)
            return
        try:
            with urllib.request.urlopen(asked) as reply:
                self._answer(reply.status, reply.read())
        except urllib.error.HTTPError as error:
            self._answer(error.code, error.read())

    def _answer(self, status: int, text: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *words: Any) -> None:
        """Nothing."""


@pytest.fixture
def account(tmp_path: Path, programs: None) -> Iterator[tuple[LiveApi, Path, dict[str, str]]]:
    """An API server over TLS with a node in it; the folder of an account, and the variables that a pod gets."""
    folder = tmp_path / "account"
    folder.mkdir()
    (folder / "token").write_text("token-of-the-pod\n")
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    words += ["-subj", "/CN=api", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*words, "-keyout", tmp_path / "key", "-out", folder / "ca.crt"], check=True, capture_output=True)
    with live_api(tmp_path) as (api, file):
        cluster = client.connect(kubeconfig=str(file))
        cluster.create(nodes.NODES, make_node("gpu-a", "b1"))
        cluster.close()
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Front", (Front,), {"behind": api.url}))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "ca.crt", tmp_path / "key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.server_address[1])}
        yield api, folder, {"DEEPEP_NODE": "gpu-a", **place}
        server.shutdown()
        server.server_close()


def written(api: LiveApi) -> tuple[str, str, dict[str, str]]:
    """The node's label, the boot it is about, and our condition; those of kubelet are still there."""
    (node,) = api.objects("nodes")
    conditions = {each["type"]: each for each in node["status"]["conditions"]}
    assert conditions["Ready"]["status"] == "True"
    meta = node["metadata"]
    return meta["labels"][names.STATE], meta["annotations"][names.STATE_BOOT], conditions[names.CONDITION]


def test_a_node_says_how_it_is(account: tuple[LiveApi, Path, dict[str, str]], tmp_path: Path) -> None:
    api, folder, environment = account
    record = in_pod.NodeRecord(environment, str(folder))
    script = RECIPES.replace("${0%/*}/PLACE", str(tmp_path)).replace("PLACE", str(tmp_path))
    assert in_pod.prepare_node(script, ["driver", "options"], record) == 1
    state, boot, condition = written(api)
    assert (state, boot) == (names.PENDING, Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    assert (condition["status"], condition["reason"]) == ("False", "RebootPending")
    assert condition["message"] == "options: todo: found x=y; wanted "
    began = condition["lastTransitionTime"]
    assert in_pod.prepare_node("exit 3", ["driver"], record) == 1
    state, _, condition = written(api)
    assert (state, condition["reason"], condition["lastTransitionTime"]) == (names.FAILED, "NotAsWanted", began)
    assert in_pod.prepare_node(script, ["driver"], record) == 0
    state, _, condition = written(api)
    assert (state, condition["status"], condition["message"]) == (names.READY, "True", "driver: as wanted")


def test_it_is_written_when_the_pods_own_files_are_out_of_reach(account: tuple[LiveApi, Path, dict[str, str]]) -> None:
    """As after enter_node: nothing can be imported or read any more."""
    api, folder, environment = account
    code = f"""
import os, sys
from deepep_bootstrap.kubernetes import in_pod
record = in_pod.NodeRecord({environment!r}, {str(folder)!r})
os.rename({str(folder)!r}, {str(folder)!r} + ".gone")
class Gone:
    def find_spec(self, name, path=None, target=None):
        raise ImportError("out of reach: " + name)
sys.meta_path.insert(0, Gone())
sys.path_importer_cache.clear()
record.write(in_pod.READY, "well")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert written(api)[0] == names.READY


def test_a_node_that_cannot_be_written_down_is_prepared_all_the_same(
    account: tuple[LiveApi, Path, dict[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api, folder, environment = account
    script = RECIPES.replace("${0%/*}/PLACE", str(tmp_path)).replace("PLACE", str(tmp_path))
    words = "deepep may write on its own node alone"
    api.inside(lambda each: each.refusals.update({"PATCH .*/gpu-a": refusal(403, words)}))
    assert in_pod.prepare_node(script, ["driver"], in_pod.NodeRecord(environment, str(folder))) == 0
    assert "deepep: the state of gpu-a is not written down: OSError: the API server answers 403" in (
        capsys.readouterr().out
    )
    for lacking in ("token", "ca.crt"):
        (folder / lacking).unlink()
        assert in_pod.prepare_node(script, ["driver"], in_pod.NodeRecord(environment, str(folder))) == 0
        assert "the state of gpu-a is not written down: " in capsys.readouterr().out


def test_a_pod_writes_the_words_that_others_read() -> None:
    own = (in_pod.STATE, in_pod.STATE_BOOT, in_pod.CONDITION, in_pod.READY, in_pod.PREPARING, in_pod.PENDING)
    assert own == (names.STATE, names.STATE_BOOT, names.CONDITION, names.READY, names.PREPARING, names.PENDING)
    assert (in_pod.FAILED, set(in_pod.REASONS)) == (names.FAILED, set(names.STATES))


@pytest.mark.usefixtures("programs")
def test_a_node_in_another_boot_or_with_slurm_is_not_rebooted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = RECIPES.replace("${0%/*}/PLACE", str(tmp_path)).replace("PLACE", str(tmp_path))
    monkeypatch.setattr(in_pod, "REBOOT", ("touch", str(tmp_path / "rebooted")))
    assert in_pod.reboot_node("another", script, ["driver"]) == 1
    assert "not rebooted: somebody rebooted it just now" in capsys.readouterr().out
    boot = Path(in_pod.BOOT_ID).read_text().strip()
    monkeypatch.setattr(in_pod, "slurm_processes", lambda: "slurmd")
    assert in_pod.reboot_node(boot, script, ["driver"]) == 1
    assert "not rebooted: slurmd runs there" in capsys.readouterr().out
    monkeypatch.setattr(in_pod, "slurm_processes", lambda: "")
    (tmp_path / "driver").touch()
    assert in_pod.reboot_node(boot, script, ["driver"]) == 1
    assert "not rebooted: nothing waits for it" in capsys.readouterr().out
    assert in_pod.reboot_node(boot, script, ["options"]) == 1
    assert "not rebooted: options could not be done" in capsys.readouterr().out
    assert not (tmp_path / "rebooted").exists()
