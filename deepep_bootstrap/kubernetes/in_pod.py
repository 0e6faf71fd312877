"""What a container of the image runs first: it sets the environment of the stack, then runs a test or a command. It is
copied into the image, where nothing but Python's own library is there.

    in_pod.py test KIND [ARGUMENTS…]    a test of the stack, on this node or with the others of its Job
    in_pod.py node SCRIPT               the node's own recipes, as root of the node: look, do what lacks, look again
    in_pod.py reboot-node BOOT SCRIPT   the same with what needs a reboot, then the reboot out of this very boot
    in_pod.py wait                      nothing, until somebody ends it
    in_pod.py COMMAND [ARGUMENTS…]      any other command, with the environment of the stack

image.json beside it says what the stack is, and lib/ has the modules that look at GPUs and NICs. Variables that the
pod sets win over those of the stack.
"""

from __future__ import annotations

import base64
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

HERE = os.path.dirname(os.path.realpath(__file__))
LISTS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD")
DRIVER = "/proc/driver/nvidia"
PATIENCE = 600  # seconds for the first node's name: pods of a gang may start minutes apart, as images are pulled
NEW_MOUNTS = 0x00020000  # CLONE_NEWNS of linux/sched.h
PART = 4000  # characters of a file in one line of the log, below the 16 KiB at which a container runtime cuts lines
LARGEST = 4 * 2**20  # bytes of a rank's log that are handed over: the first and the last half of that
MOST = 32 * 2**20  # bytes of all of them
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
BOOT_ID = "/proc/sys/kernel/random/boot_id"
STATE, STATE_BOOT, CONDITION = "deepep-bootstrap/state", "deepep-bootstrap/state-boot", "DeepEPReady"  # kube/names.py
READY, PREPARING, PENDING, FAILED = "ready", "preparing", "pending-reboot", "failed"
REASONS = {READY: "AsWanted", PREPARING: "Preparing", PENDING: "RebootPending", FAILED: "NotAsWanted"}
REBOOT = ("systemctl", "reboot")
ANSWER = 30  # seconds for the API server
GIB_LINE = re.compile(r"\s*export\s+(NCCL_[A-Z0-9_]+)=(?:\"([^\"$`\\]*)\"|'([^']*)'|([^\s\"'$`\\;]*))\s*(?:#.*)?")


def say(text: str) -> None:
    """Print a line of ours; who follows the test tells it from the test's own by the mark, as launchers' lines are."""
    print(f"{'deepep-say' if os.environ.get('DEEPEP_RUN') else 'deepep'}: {text}", flush=True)


def stop(text: str) -> SystemExit:
    """Return what ends this program with a message."""
    return SystemExit(f"deepep: {text}")


def set_environment(image: Mapping[str, Any], environment: MutableMapping[str, str]) -> None:
    """Put the stack's entries in front of path lists, and set its variables where the pod has not. DEEPEP_UNSET names
    variables that must not be there, whatever their value."""
    for name in LISTS:
        entries = list(image["lists"].get(name, ()))
        if name == "LD_PRELOAD" and not os.path.isdir(DRIVER):
            entries = []  # our NVSHMEM needs the driver's libraries: without them no program would start
        rest = [each for each in environment.get(name, "").split(":") if each and each not in entries]
        if entries or rest:
            environment[name] = ":".join([*entries, *rest])
    for name, value in image["variables"].items():
        environment.setdefault(name, value)
    for name in environment.get("DEEPEP_UNSET", "").split():
        environment.pop(name, None)


def adopt_gib(script: str, environment: MutableMapping[str, str]) -> None:
    """Take NCCL's variables from Google's script. It is bash; in an image without bash its plain `export NAME=VALUE`
    lines are read, and what it works out is not known."""
    if not script:
        return
    if not os.access(script, os.R_OK):
        raise stop(f"{script} is not there: the gIB installer has not finished on this node")
    bash = shutil.which("bash", path=environment.get("PATH"))
    if bash:
        words = [bash, "-c", '. "$0" >/dev/null 2>&1; exec env -0', script]
        out = subprocess.run(words, env=dict(environment), stdout=subprocess.PIPE, check=False).stdout
        found = dict(each.split("=", 1) for each in out.decode(errors="replace").split("\0") if "=" in each)
        environment.update({name: value for name, value in found.items() if name.startswith("NCCL_")})
        return
    with open(script, encoding="utf-8", errors="replace") as lines:
        for match in filter(None, map(GIB_LINE.fullmatch, (line.rstrip("\n") for line in lines))):
            environment.setdefault(match[1], match[2] or match[3] or match[4] or "")


def adopt_network(environment: MutableMapping[str, str]) -> None:
    """Set what the NICs of this pod decide, for the link layer that the manifest names: the NIC of each GPU, the GID
    index, the interface over which ranks meet. What is set already stays."""
    link = environment.get("DEEPEP_LINK", "")
    if not link:
        return
    facts = pod_facts()
    found = facts.settings(facts.look(), link)
    for name, value in found.items():
        environment.setdefault(name, value)
    say("; ".join(f"{name}={environment[name]}" for name in found) or f"no NIC with link layer {link} is seen here")


def pod_facts() -> Any:
    """Return the module that looks at the GPUs and NICs; in the image it is below lib."""
    if os.path.isdir(os.path.join(HERE, "lib")) and os.path.join(HERE, "lib") not in sys.path:
        sys.path.insert(0, os.path.join(HERE, "lib"))
    from deepep_bootstrap.kubernetes import pod_facts as module

    return module


def hand_over(name: str, data: bytes) -> None:
    """Print a file into the log, from which whoever follows the test takes it: nothing else of a pod can be had when it
    has ended."""
    text = base64.b64encode(zlib.compress(data, 9)).decode()
    parts = [text[at : at + PART] for at in range(0, len(text), PART)]
    for number, part in enumerate(parts, 1):
        print(f"deepep-file: {name} {number}/{len(parts)} {part}", flush=number == len(parts))


def report(part: Callable[[], None]) -> None:
    """Hand over a part of the report. What cannot be had of it is beside the point of the test."""
    try:
        part()
    except (OSError, ValueError, ImportError, KeyError) as error:
        say(f"a part of the report is missing: {type(error).__name__}: {error}")


def begin_report(image: Mapping[str, Any], kind: str) -> None:
    """Hand over what the image is, what this pod sees, and the NICs' counters before the test."""
    facts = pod_facts()
    about = {key: image[key] for key in ("stack", "module", "deepep") if key in image}
    about |= {"prefix": image["root"], "script": image["kinds"][kind]["script"]}
    if os.environ["RANK"] == "0":
        hand_over("about", json.dumps(about).encode())
    node = os.environ.get("DEEPEP_NODE") or os.uname().nodename
    hand_over("facts", "".join(f"{line}\n" for line in facts.lines(facts.look(), node)).encode())
    hand_over("counters/before", count(facts))


def end_report() -> None:
    """Hand over the counters after the test, and what each rank printed."""
    print()  # what the test printed last may have no end of line
    hand_over("counters/after", count(pod_facts()))
    folder, left = os.environ.get("DEEPEP_RUN_DIR", ""), MOST
    for name in sorted(os.listdir(folder) if os.path.isdir(folder) else ()):
        if re.fullmatch(r"rank-[0-9]{1,5}\.log", name) and left > 0:
            with open(os.path.join(folder, name), "rb") as file:
                data = shortened(file.read())
            left -= len(data)
            hand_over(name, data)


def count(facts: Any) -> bytes:
    """Return the NICs' counters."""
    return "".join(f"{line}\n" for line in facts.counters(time.time())).encode()


def shortened(data: bytes) -> bytes:
    """Return the bytes of a log; of a long one its beginning and its end."""
    half = LARGEST // 2
    if len(data) <= LARGEST:
        return data
    return b"%s\n[%d bytes left out here]\n%s" % (data[:half], len(data) - LARGEST, data[-half:])


def find_place(environment: MutableMapping[str, str]) -> None:
    """Set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: those of the manifest, else those of an Indexed Job or a
    LeaderWorkerSet, else one node alone."""
    names = {
        "RANK": ("JOB_COMPLETION_INDEX", "LWS_WORKER_INDEX"),
        "WORLD_SIZE": ("LWS_GROUP_SIZE",),
        "MASTER_ADDR": ("LWS_LEADER_ADDRESS",),
        "MASTER_PORT": (),
    }
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, others in names.items():
        found = next((environment[other] for other in (name, *others) if environment.get(other)), alone[name])
        environment[name] = found


def await_first(environment: Mapping[str, str], patience: float = PATIENCE) -> None:
    """Return when the first node's name has an address: it gets one when its pod has, which may be later."""
    name, end = environment["MASTER_ADDR"], time.monotonic() + patience
    told = False
    while True:
        try:
            socket.getaddrinfo(name, None)
            return
        except OSError as error:
            if time.monotonic() > end:
                remedy = "is the headless Service there, with publishNotReadyAddresses?"
                raise stop(f"{name} has no address after {patience:g} s ({error}): {remedy}") from None
        if not told:
            say(f"waiting for the name {name}")
            told = True
        time.sleep(1)


def test_command(image: Mapping[str, Any], kind: str, arguments: Sequence[str]) -> list[str]:
    """Return the command of a test."""
    if kind not in image["kinds"]:
        raise stop(f"the stack {image['stack']} has no test {kind}, but {', '.join(image['kinds'])}")
    test = image["kinds"][kind]
    words = [*test["always"], *(arguments or test["instead"])]
    programs = os.path.join(image["root"], "programs")
    if test["ours"]:
        return [image["python"], os.path.join(programs, test["script"]), *words]
    runner = "passes.py" if test["passes"] else "ranks.py"
    logs = os.environ.get("DEEPEP_RUN_DIR", "/tmp/deepep")  # noqa: S108 - in a pod /tmp is the pod's own
    script = os.path.join(image["tests"], test["script"])
    front = [image["python"], os.path.join(programs, runner), "--logs", logs, *test["passes"], "--"]
    return [*front, script, *words]


def raise_memlock() -> None:
    """Let the test lock as much memory as this container may: RDMA locks what it works on."""
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    for limit in ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), (hard, hard)):
        try:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, limit)
            return
        except (OSError, ValueError):
            continue


def run_test(image: Mapping[str, Any], kind: str, arguments: Sequence[str]) -> int:
    """Run a test to its end; return its exit code. With DEEPEP_HOLD the pod stays afterwards, since a
    LeaderWorkerSet would start the test again."""
    command = test_command(image, kind, arguments)
    find_place(os.environ)
    os.environ.setdefault("DEEPEP_TEST_CAPABILITY", image["kinds"][kind]["capability"])
    reports = bool(os.environ.get("DEEPEP_RUN"))
    # The words of the sbatch files, by which readers of logs find a test. Of several nodes that are followed, the first
    # one speaks for all.
    speaks = not reports or os.environ["RANK"] == "0"
    if speaks:
        say(f"{kind} test of {image['module']}: {image['kinds'][kind]['script']} {' '.join(arguments)}".rstrip())
        say(f"node {os.environ['RANK']} of {os.environ['WORLD_SIZE']} at {os.environ['MASTER_ADDR']}")
    if reports:
        report(lambda: begin_report(image, kind))
    await_first(os.environ)
    raise_memlock()
    child = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, _: child.send_signal(signum))
    seconds = image["kinds"][kind]["seconds"]
    code = await_end(child, int(os.environ.get("DEEPEP_TEST_SECONDS") or seconds) if seconds else 0)
    if reports:
        report(end_report)
    if not reports:  # who follows the test says it when all nodes have ended
        say(f"{image['kinds'][kind]['script']} ended with exit code {code}")
    if os.environ.get("DEEPEP_HOLD"):
        say("the pod stays until it is deleted")
        wait()
    return code


def await_end(child: subprocess.Popen[bytes], seconds: int) -> int:
    """Return the exit code of a test as a shell has it. One without an end of its own is stopped after so many
    seconds (0: never), and has passed if it still ran then."""
    try:
        code = child.wait(seconds or None)
    except subprocess.TimeoutExpired:
        child.terminate()
        child.wait()
        say(f"stopped after {seconds} s, as planned")
        return 0
    return 128 - code if code < 0 else code


def wait() -> None:
    """Return when somebody ends this program."""
    ended: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, _: ended.append(signum))
    while not ended:
        signal.pause()


def read_states(text: str) -> dict[str, dict[str, str]]:
    """Return what recipes said, by recipe: the values of their data lines."""
    found: dict[str, dict[str, str]] = {}
    own: dict[str, str] = {}
    for key, _, value in (line.partition("=") for line in text.splitlines()):
        if key == "recipe":
            own = found.setdefault(value, {})
        else:
            own[key] = value
    return found


class NodeRecord:
    """What the API server is told of this node, over the pod's own account. All of it is read at once, since the files
    of the pod are out of reach when those of the node are seen. A node that cannot be written down is prepared all the
    same."""

    def __init__(self, environment: Mapping[str, str], account: str = ACCOUNT) -> None:
        self.node = environment.get("DEEPEP_NODE", "")
        self._address = (environment.get("KUBERNETES_SERVICE_HOST", ""), environment.get("KUBERNETES_SERVICE_PORT", ""))
        self._token, self._trust = "", None
        if not self.node:
            return
        try:
            # Not when they are needed: Python's own files are out of reach then too, the codec of names included.
            import encodings.idna  # noqa: F401
            import http.client
            import ssl

            self._client = http.client
            with open(os.path.join(account, "token"), encoding="ascii") as file:
                self._token = file.read().strip()
            self._trust = ssl.create_default_context(cafile=os.path.join(account, "ca.crt"))
        except (OSError, ImportError, ValueError) as error:
            say(f"the state of {self.node} is not written down: {type(error).__name__}: {error}")

    def write(self, state: str, message: str) -> None:
        """Write how the node is: its label, the boot that this is about, and the condition with the reason."""
        if not self._token or self._trust is None:
            return
        try:
            with open(BOOT_ID, encoding="ascii") as file:
                boot = file.read().strip()
            about = {"labels": {STATE: state}, "annotations": {STATE_BOOT: boot}}
            there = self._patch("", "merge", {"metadata": about})
            old: Mapping[str, str] = next(
                (each for each in there["status"].get("conditions") or () if each["type"] == CONDITION), {}
            )
            now, status = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "True" if state == READY else "False"
            condition = {
                "type": CONDITION,
                "status": status,
                "reason": REASONS[state],
                "message": message[:1000],
                "lastHeartbeatTime": now,
                "lastTransitionTime": old["lastTransitionTime"] if old.get("status") == status else now,
            }
            # By the type of the condition it is merged into those of kubelet and others.
            self._patch("/status", "strategic-merge", {"status": {"conditions": [condition]}})
        except (OSError, ValueError, KeyError, self._client.HTTPException) as error:
            say(f"the state of {self.node} is not written down: {type(error).__name__}: {error}")

    def _patch(self, part: str, form: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Change the node's object; return it. OSError where the API server says no."""
        host, port = self._address
        connection = self._client.HTTPSConnection(host, int(port or 443), timeout=ANSWER, context=self._trust)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": f"application/{form}-patch+json"}
        headers["Accept"] = "application/json"
        try:
            connection.request("PATCH", f"/api/v1/nodes/{self.node}{part}", json.dumps(body).encode(), headers)
            reply = connection.getresponse()
            text = reply.read()
            if reply.status != 200:
                raise OSError(f"the API server answers {reply.status}: {text[:300].decode(errors='replace')}")
            found: dict[str, Any] = json.loads(text)
            return found
        finally:
            connection.close()


def enter_node() -> None:
    """See the node's files in place of the container's, as root of the node. The pod has the node's processes."""
    import ctypes  # small bases may lack its libffi, and only this needs it

    libc = ctypes.CDLL(None, use_errno=True)
    place = os.open("/proc/1/ns/mnt", os.O_RDONLY)
    if libc.setns(place, NEW_MOUNTS):
        raise stop(f"the node's files cannot be reached: {os.strerror(ctypes.get_errno())}; privileged and hostPID?")
    os.close(place)
    os.chdir("/")


def run_recipes(script: str, verb: str, recipes: Sequence[str]) -> dict[str, dict[str, str]]:
    """Run a verb of some recipes on this node; return what they said."""
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "VERB": verb, "RECIPES": " ".join(recipes), "HOME": "/root"}
    done = subprocess.run(["/bin/bash", "-s"], input=script.encode(), env=env, stdout=subprocess.PIPE, check=False)
    return read_states(done.stdout.decode(errors="replace"))


def is_doable(state: Mapping[str, str]) -> bool:
    """Return whether a recipe has something to do that disturbs nobody on this node."""
    return state.get("state") == "todo" and state.get("needs") != "reboot"


def waits_for_reboot(state: Mapping[str, str]) -> bool:
    """Return whether what a recipe lacks works only after a reboot."""
    return state.get("needs") == "reboot" or state.get("state") == "reboot"


def prepare_node(script: str, recipes: Sequence[str], record: NodeRecord) -> int:
    """Do what lacks on the node and disturbs nobody, and write down how it is; return 0 where all is as it should be
    then."""
    states = run_recipes(script, "check", recipes)
    if doable := [name for name in recipes if is_doable(states.get(name, {}))]:
        say(f"to do: {', '.join(doable)}")
        record.write(PREPARING, f"to do: {', '.join(doable)}")
        run_recipes(script, "apply", doable)
        states = run_recipes(script, "check", recipes)
    for name in recipes:
        say(in_words(name, states.get(name, {})))
        if note := states.get(name, {}).get("note"):
            say(f"{name}: {note}")
    bad = [name for name in recipes if states.get(name, {}).get("state") != "ok"]
    waits = [name for name in bad if waits_for_reboot(states.get(name, {}))]
    if waits:
        say(f"{', '.join(waits)}: only with a reboot. Drain this node, reboot it, and it is looked at again")
    lacks = "; ".join(in_words(name, states.get(name, {})) for name in bad)
    state = READY if not bad else PENDING if waits == bad else FAILED
    record.write(state, lacks or f"{', '.join(recipes)}: as wanted")
    return 1 if bad else 0


def reboot_node(boot: str, script: str, recipes: Sequence[str]) -> int:
    """Do what lacks on this node, also what works only after a reboot, and reboot it, as long as it is in the boot that
    was meant. Somebody has emptied it. Return 1 where it is not rebooted; else this is ended by the reboot."""
    with open(BOOT_ID, encoding="ascii") as file:
        now = file.read().strip()
    if now != boot:
        say("not rebooted: somebody rebooted it just now")
        return 1
    if found := slurm_processes():
        say(f"not rebooted: {found} runs there. Its jobs are Slurm's: invoke bootstrap --reboot=rolling, over SSH")
        return 1
    states = run_recipes(script, "check", recipes)
    if todo := [name for name in recipes if states.get(name, {}).get("state") == "todo"]:
        say(f"to do: {', '.join(todo)}")
        run_recipes(script, "apply", todo)
        states = run_recipes(script, "check", recipes)
    for name in recipes:
        say(in_words(name, states.get(name, {})))
    bad = [name for name in recipes if states.get(name, {}).get("state") not in {"ok", "reboot"}]
    if bad or all(states[name]["state"] == "ok" for name in recipes):
        say(f"not rebooted: {', '.join(bad)} could not be done" if bad else "not rebooted: nothing waits for it")
        return 1
    say("reboots now")
    subprocess.run(["sync"], check=False)
    subprocess.run(REBOOT, check=False)
    wait()
    return 0


def slurm_processes() -> str:
    """Return which of Slurm's daemons and steps run on this node, "" for none."""
    found = set()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/comm", encoding="ascii", errors="replace") as file:
                found.add(file.read().strip())
        except OSError:  # it has ended
            continue
    return ", ".join(sorted(found & {"slurmd", "slurmstepd"}))


def in_words(name: str, state: Mapping[str, str]) -> str:
    """Return how far a recipe is, in a line."""
    return (
        f"{name}: {state.get('state', 'no answer')}: found {state.get('found', '')}; wanted {state.get('wanted', '')}"
    )


def main(words: Sequence[str]) -> int:
    """Run the command line; return the exit code."""
    if words[:1] == ["wait"]:
        wait()
        return 0
    if words[:1] == ["node"] and len(words) > 2:
        with open(words[1], encoding="utf-8") as file:
            script = file.read()
        record = NodeRecord(os.environ)
        enter_node()
        return prepare_node(script, words[2:], record)
    if words[:1] == ["reboot-node"] and len(words) > 3:
        with open(words[2], encoding="utf-8") as file:
            script = file.read()
        enter_node()
        return reboot_node(words[1], script, words[3:])
    with open(os.path.join(HERE, "image.json"), encoding="utf-8") as file:
        image = json.load(file)
    set_environment(image, os.environ)
    adopt_gib(os.environ.get("DEEPEP_GIB", ""), os.environ)
    adopt_network(os.environ)
    if words[:1] == ["test"] and len(words) > 1:
        return run_test(image, words[1], words[2:])
    if not words or words[0] in {"test", "node"}:
        raise stop(f"{' '.join(words) or 'nothing'} cannot be run: test KIND, node SCRIPT RECIPES…, wait or a command")
    try:
        os.execvp(words[0], list(words))  # noqa: S606 - the command that the pod names
    except OSError as error:
        raise stop(f"{words[0]}: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
