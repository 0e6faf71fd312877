"""What a container of the image runs first: it sets the environment of the stack, then runs a test or a command. It is
copied into the image, where it is alone: nothing but Python's own library is there.

    in_pod.py test KIND [ARGUMENTS…]    a test of the stack, on this node or with the others of its Job
    in_pod.py node SCRIPT               the node's own recipes, as root of the node: look, do what lacks, look again
    in_pod.py wait                      nothing, until somebody ends it
    in_pod.py COMMAND [ARGUMENTS…]      any other command, with the environment of the stack

image.json beside it says what the stack is. Variables that the pod sets win over those of the stack.
"""

from __future__ import annotations

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
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

HERE = os.path.dirname(os.path.realpath(__file__))
LISTS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD")
DRIVER = "/proc/driver/nvidia"
PATIENCE = 600  # seconds for the first node's name: pods of a gang may start minutes apart, as images are pulled
NEW_MOUNTS = 0x00020000  # CLONE_NEWNS of linux/sched.h
GIB_LINE = re.compile(r"\s*export\s+(NCCL_[A-Z0-9_]+)=(?:\"([^\"$`\\]*)\"|'([^']*)'|([^\s\"'$`\\;]*))\s*(?:#.*)?")


def say(text: str) -> None:
    """Print a line of ours."""
    print(f"deepep: {text}", flush=True)


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
    place = f"node {os.environ['RANK']} of {os.environ['WORLD_SIZE']} at {os.environ['MASTER_ADDR']}"
    say(f"{kind} test of {image['module']}, {place}")
    await_first(os.environ)
    raise_memlock()
    child = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, _: child.send_signal(signum))
    code = await_end(child, image["kinds"][kind]["seconds"])
    say(f"{kind} test ended with exit code {code}")
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


def prepare_node(script: str, recipes: Sequence[str]) -> int:
    """Do what lacks on the node and disturbs nobody; return 0 where all is as it should be then."""
    states = run_recipes(script, "check", recipes)
    if doable := [name for name in recipes if is_doable(states.get(name, {}))]:
        say(f"to do: {', '.join(doable)}")
        run_recipes(script, "apply", doable)
        states = run_recipes(script, "check", recipes)
    for name in recipes:
        one = states.get(name, {})
        say(f"{name}: {one.get('state', 'no answer')}: found {one.get('found', '')}; wanted {one.get('wanted', '')}")
        if one.get("note"):
            say(f"{name}: {one['note']}")
    bad = [name for name in recipes if states.get(name, {}).get("state") != "ok"]
    waits = [
        name
        for name in bad
        if states.get(name, {}).get("needs") == "reboot" or states.get(name, {}).get("state") == "reboot"
    ]
    if waits:
        say(f"{', '.join(waits)}: only with a reboot. Drain this node, reboot it, and it is looked at again")
    return 1 if bad else 0


def main(words: Sequence[str]) -> int:
    """Run the command line; return the exit code."""
    if words[:1] == ["wait"]:
        wait()
        return 0
    if words[:1] == ["node"] and len(words) > 2:
        with open(words[1], encoding="utf-8") as file:
            script = file.read()
        enter_node()
        return prepare_node(script, words[2:])
    with open(os.path.join(HERE, "image.json"), encoding="utf-8") as file:
        image = json.load(file)
    set_environment(image, os.environ)
    adopt_gib(os.environ.get("DEEPEP_GIB", ""), os.environ)
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
