"""A test between nodes out of an image of the demo's store: `invoke image`, `invoke test --via=kubernetes`, two pods as
processes on hosts of the embedded cluster, with the image's own root file system."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deepep_bootstrap.core.errors import OK
from deepep_bootstrap.kube import client, runs
from deepep_bootstrap.kube.client import Object
from deepep_bootstrap.lab import hosts
from tests.support.e2e import LOCK, Ended, Engine
from tests.support.images import PACKAGES, make_layout, tar_of_packages
from tests.support.kube_api import live_api
from tests.support.kube_cluster import Emulated, at_work
from tests.support.paths import ROOT

pytest_plugins = ["tests.support.lab", "tests.support.e2e"]
pytestmark = [pytest.mark.e2e, pytest.mark.long]

NODES = ("n001", "n002")
SETTINGS = """\
image = "registry.example/deepep@{digest}"
archs = ["9.0"]
profile = "infiniband"
networks = "host"
[selector]
gpu = "h100"
"""
SMI = """\
#!/usr/bin/python3
# What the host's own nvidia-smi answered: the image has no shell for it.
print(open("/usr/local/nvidia/gpus").read(), end="")
"""
ENTER = """\
mount --bind "$0" "$0" && mount -o remount,bind,ro "$0"
mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && mount --rbind /sys "$0/sys"
for folder in tmp run; do mount -t tmpfs tmpfs "$0/$folder"; done
mkdir -p "$0/run/deepep" "$0/run/lab/fake"
mount --bind "$1" "$0/etc/hosts"
root=$0; shift
exec env -i "$@"
"""
"""As a container runtime makes it: read-only, with folders of its own for what is written, and names of the pods. By
/run/lab/fake the stand-ins know that counters of NICs are theirs to move."""


class Pod:
    """A pod's container as a process in a host of the lab."""

    def __init__(self, words: list[str], say: Callable[..., None], log: Path) -> None:
        self._say, self._log, self._sent = say, log, 0
        with log.open("wb") as out:
            self._process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    def poll(self) -> int | None:
        code = self._process.poll()
        data = self._log.read_bytes()[self._sent :]
        whole = data if code is not None else data[: data.rfind(b"\n") + 1]
        self._sent += len(whole)
        if whole:
            self._say(*whole.decode("utf-8", "replace").rstrip("\n").split("\n"))
        return code

    def terminate(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def unpacked(engine: Engine, tmp_path: Path) -> tuple[Path, dict[str, object], str]:
    """Make the image and unpack it where the hosts see it: its root, its configuration, its digest."""
    make_layout(tmp_path / "base", tar_of_packages((*PACKAGES, "libstdc++6", "libgcc-s1")))
    made = engine.run("image", f"--out={tmp_path}/image", f"--base={tmp_path}/base", f"--lock={LOCK}")
    assert made.code == OK, made.text
    index = json.loads((tmp_path / "image/index.json").read_bytes())
    digest = index["manifests"][0]["digest"]
    manifest = json.loads((tmp_path / f"image/blobs/{digest.replace(':', '/')}").read_bytes())
    config = json.loads((tmp_path / f"image/blobs/{manifest['config']['digest'].replace(':', '/')}").read_bytes())
    bundle = engine.lab.shared / "pod"
    tag = index["manifests"][0]["annotations"]["org.opencontainers.image.ref.name"]
    words = ["umoci", "unpack", "--image", f"{tmp_path}/image:{tag}", bundle]
    subprocess.run(words, check=True, capture_output=True)
    root = bundle / "rootfs"
    for folder in ("proc", "dev", "sys", "tmp", "run", "etc", "usr/local/nvidia/bin"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "etc/hosts").touch()
    (root / "usr/local/nvidia/bin/nvidia-smi").write_text(SMI)
    (root / "usr/local/nvidia/bin/nvidia-smi").chmod(0o755)
    query = "nvidia-smi --query-gpu=index,name,memory.total,compute_cap,driver_version,pci.bus_id --format=csv,noheader,nounits"
    (root / "usr/local/nvidia/gpus").write_text(engine.lab.nsenter("n001", query).stdout)
    return root, config["config"], digest


def environment(pod: Object, node: str) -> list[str]:
    """The variables of a pod's container, those of its own fields worked out."""
    found = []
    for each in pod["spec"]["containers"][0]["env"]:
        value = each.get("value", "")
        if path := each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath"):
            note = re.fullmatch(r"metadata\.annotations\['(.+)'\]", path)
            value = pod["metadata"]["annotations"][note[1]] if note else {"spec.nodeName": node}[path]
        found.append(f"{each['name']}={value}")
    return found


def run_test(engine: Engine, kubeconfig: Path, settings: Path, *more: str) -> Ended:
    flags = ["--via=kubernetes", "--for=generic", f"--settings={settings}", f"--kubeconfig={kubeconfig}"]
    argv = [sys.executable, "-m", "invoke", "test", *flags, f"--lock={LOCK}", "--json", *more]
    done = subprocess.run(argv, cwd=ROOT, env=engine.environment(), capture_output=True, text=True, check=False)
    return Ended(done.returncode, done.stdout, done.stderr)


def test_between_two_pods(engine: Engine, tmp_path: Path) -> None:
    engine.use_built()
    engine.env["XDG_STATE_HOME"] = str(tmp_path / "state")
    assert engine.run("bootstrap").code == OK
    root, config, digest = unpacked(engine, tmp_path)
    (tmp_path / "settings.toml").write_text(SETTINGS.format(digest=digest))
    inside = Path("/shared") / root.relative_to(engine.lab.shared)

    def start(pod: Object, node: str, say: Callable[..., None]) -> Pod:
        job = pod["metadata"]["labels"]["job-name"]
        names = [f"{engine.lab.hosts[host]} {job}-{index}.{job}\n" for index, host in enumerate(NODES)]
        (engine.lab.shared / f"hosts-{job}").write_text("127.0.0.1 localhost\n" + "".join(names))
        assert NODES[runs.index_of(pod)] == node
        variables = [*config["Env"], *environment(pod, node)]
        command = ["/usr/sbin/chroot", str(inside), *config["Entrypoint"], *pod["spec"]["containers"][0]["args"]]
        spaces = ["unshare", "--mount", "--pid", "--fork", "--ipc", "sh", "-euc", ENTER, str(inside)]
        words = [*hosts.enter(engine.lab.lab, node), *spaces, f"/shared/hosts-{job}", *variables, *command]
        return Pod(words, say, tmp_path / f"{node}.log")

    with live_api(tmp_path, "deepep") as (api, file):
        cluster = client.connect(kubeconfig=str(file))
        with at_work(Emulated(api, cluster, NODES, start)):
            ended = run_test(engine, file, tmp_path / "settings.toml", "--args=--num-processes 2 --num-experts 8")
        cluster.close()
        assert not [each for kind in ("jobs", "services", "serviceaccounts") for each in api.objects(kind)]
    said = ended.text + "".join(path.read_text() for path in tmp_path.glob("n*.log"))
    assert ended.code == OK, said
    found = json.loads(ended.out)
    assert (found["verdict"], found["run"]["values"]["nodes"]) == ("passed", "n001,n002"), said
    assert found["tests"][0]["ok"]
    assert [rank["rank"] for rank in found["tests"][0]["ranks"]] == [0, 2], "the first rank of each node prints"
    assert {each["host"] for each in found["traffic"]} == set(NODES)
    folder = Path(found["run"]["folder"])
    facts = json.loads((folder / "facts.json").read_text())["hosts"]
    assert {name: len(seen["gpus"]) for name, seen in facts.items()} == dict.fromkeys(NODES, 8)
    assert "DEEP_EP_DEVICE_TO_HCA_MAPPING=0:mlx5_" in (folder / "job.log").read_text()
    told = engine_report(engine, folder)
    assert (told["verdict"], told["why"]) == (found["verdict"], found["why"])


def engine_report(engine: Engine, folder: Path) -> dict[str, object]:
    """What `invoke report` says of the run."""
    argv = [sys.executable, "-m", "invoke", "report", str(folder), "--json"]
    done = subprocess.run(argv, cwd=ROOT, env=engine.environment(), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)
