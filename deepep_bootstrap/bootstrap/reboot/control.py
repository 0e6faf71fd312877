"""Commands to one host or Slurm node during a rolling reboot: Slurm's through the hosts that have its
clients, boot ids, and reboots over SSH.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from deepep_bootstrap.core.errors import LostError, Problem, Trouble
from deepep_bootstrap.remote.host import Host
from deepep_bootstrap.remote.jobs import Job, Reply, Transport
from deepep_bootstrap.slurm import commands, nodes
from deepep_bootstrap.slurm.nodes import LOOK, Look, parse_look

BOOT_ID = "cat /proc/sys/kernel/random/boot_id"
BOOT_ID_LIMIT = 20.0
SLURM_LIMIT = 110.0
"""Seconds for one script on the Slurm host: five clients of 20 s each at most, and the way there."""

SLURM_PATIENCE = 180.0
"""Seconds that a controller may be away, as for a restart, before we give up; a wave, which may reboot the Slurm
host, says longer."""

HEAR_LIMIT = 20.0
"""Seconds to wait for slurmd's word after a node was resumed; slurmctld asks at once, and shows it as not responding
until then."""

GONE_LIMIT = 20.0
"""Seconds in which a host that reboots stops answering. One that shuts down takes new sessions until its sshd is
ended, and systemd queues a reboot behind jobs that it has already."""

SLURM_PROCESSES = r"""
set -u
list_slurm() { # NAME…: the processes of these names, as `name (PID, user)`
    grep -HsxF "$(printf '%s\n' "$@")" /proc/[0-9]*/comm | while IFS=: read -r file name; do
        folder=${file%/comm}
        words=$(tr '\0' ' ' <"$folder/cmdline" 2>/dev/null)
        # `slurmstepd infinity` is no step: with cgroups v2 it keeps their cgroup. Without words it has ended already.
        case $words in '' | *' infinity ') continue ;; esac
        printf '%s (%s, %s)\n' "$name" "${folder##*/}" "$(stat -c %U "$folder" 2>/dev/null)"
    done | sort -V | paste -s -d , - | sed 's/,\([^ ]\)/, \1/g'
}
"""
"""What Slurm runs on a host, whoever asks: only root sees it wherever /proc is mounted with hidepid."""

SEEN = f"{SLURM_PROCESSES}list_slurm slurmd slurmstepd"

KUBELETS = "kubelet k3s-server k3s-agent kubelite"
"""The programs that hold a kubelet: of Kubernetes itself and of RKE2, of k3s, of microk8s."""

KUBELET_SEEN = f"{SLURM_PROCESSES}list_slurm {KUBELETS}"

REBOOT = f"""{SLURM_PROCESSES}
if [ "$(cat /proc/sys/kernel/random/boot_id)" != "$1" ]; then echo 'somebody rebooted it just now' >&2; exit 1; fi
if [ -z "$2" ]; then
    found=$(list_slurm slurmd slurmstepd)
    why="although Slurm named no node for this host: there may be jobs that nobody sees"
else
    why="although Slurm shows no job on node $2: is it this host's?"
    for _ in 1 2 3 4 5 6 7 8 9 10; do # a step that has ended just now
        found=$(list_slurm slurmstepd)
        [ -n "$found" ] || break
        sleep 1
    done
fi
if [ -n "$found" ]; then echo "$found runs there, $why" >&2; exit 1; fi
if [ -z "$3" ]; then
    found=$(list_slurm {KUBELETS})
    if [ -n "$found" ]; then echo "$found runs there, although nobody drained its node in Kubernetes" >&2; exit 1; fi
fi
echo rebooting=1
sync
if [ -d /run/systemd/system ]; then exec systemctl reboot; fi
exec reboot
"""
"""Reboots the host it runs on, as long as it is in the boot that its first argument names and Slurm runs nothing there
that a reboot would end: neither a job's step nor, where the second argument names no drained node, a slurmd. Where the
third argument names no node of Kubernetes that was drained, no kubelet may run there either. Outside
systemd (containers, sysvinit) `reboot` is the one name that all have."""


class NotRebootedError(Trouble):
    """A host did not begin to reboot, and says why."""


class Line(Transport, Protocol):
    """The connections to hosts that reboot."""

    def forget(self, host: Host) -> None:
        """Drop the session to a host; the next script opens a new one."""


class Cluster:
    """Slurm, through the first of `hosts` that reaches its controller; `sleep` waits between tries, for `patience`
    seconds in all. Safe for several threads."""

    def __init__(
        self,
        transport: Line,
        hosts: Sequence[Host],
        *,
        sleep: Callable[[float], None] = time.sleep,
        patience: float = SLURM_PATIENCE,
    ) -> None:
        self._transport, self._hosts, self._sleep, self._patience = transport, tuple(hosts), sleep, patience

    @property
    def impatient(self) -> Cluster:
        """The same Slurm, asked once: for whoever has something else to wait for."""
        return Cluster(self._transport, self._hosts, sleep=self._sleep, patience=0)

    def look(self, *nodes: str) -> Look:
        """Return what Slurm says of `nodes` now. Raises Trouble."""
        return parse_look(self._run(LOOK, commands.fold(nodes)).out)

    def known(self, *names: str) -> tuple[commands.SlurmNode, ...]:
        """Return what Slurm says now of those of `names` that are nodes of it. Raises Trouble."""
        return commands.parse_nodes(self._run(nodes.KNOWN, commands.fold(names)).out)

    def ours(self) -> tuple[commands.SlurmNode, ...]:
        """Return the nodes anywhere in Slurm whose reason was written by this program, in any run. Raises Trouble."""
        return commands.parse_nodes(self._run(nodes.OURS).out)

    def tell(self, command: Sequence[str]) -> None:
        """Run one command of Slurm, as root where the connection's own account may not. Raises Trouble when it is
        refused."""
        self._run(f"timeout 30 {shlex.join(command)}")

    def resume(self, node: str) -> None:
        """Bring a node back into use, and wait a moment for Slurm to hear from it: until then no job starts there."""
        self.tell(nodes.resume(node))
        deadline = time.monotonic() + HEAR_LIMIT
        while time.monotonic() < deadline:
            found = self.look(node).nodes.get(node)
            if found is None or nodes.answers(found.state):
                return
            self._sleep(0.5)

    def _run(self, script: str, *args: str) -> Reply:
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return self._try_all(script, args)
            except Trouble as trouble:
                if not trouble.may_pass or time.monotonic() > deadline:
                    raise
            self._sleep(3.0)

    def _try_all(self, script: str, args: tuple[str, ...]) -> Reply:
        last: Trouble | None = None
        for host in self._hosts:
            try:
                return self._try(host, script, args)
            except Trouble as trouble:
                last = trouble
                if not trouble.may_pass:
                    raise
        raise last or Trouble(Problem("Slurm", "no host to ask it from"))

    def _try(self, host: Host, script: str, args: tuple[str, ...]) -> Reply:
        reply = self._transport.run(host, Job(script, args=args, timeout=SLURM_LIMIT))
        if reply.code and nodes.says_refused(reply.err):
            reply = self._transport.run(host, Job(script, args=args, timeout=SLURM_LIMIT, user="root"))
        if reply.code:
            found = reply.last_line or f"exit code {reply.code}"
            remedy = "scontrol ping there"
            if reply.code == 124 or nodes.says_away(found):
                what = "Slurm's controller does not answer"
                raise Trouble(Problem(host.name, what, found[-200:], try_=remedy), may_pass=True)
            raise Trouble(Problem(host.name, "Slurm refuses", found[-200:], try_=remedy))
        return reply


def boot_id(transport: Line, host: Host) -> str:
    """Return the boot id of a host now. Raises Trouble, within a minute at the most."""
    reply = transport.run(host, Job(BOOT_ID, timeout=BOOT_ID_LIMIT))
    if reply.code or not reply.out.strip():
        raise Trouble(Problem(host.name, "has no boot id", (reply.err or f"exit code {reply.code}").strip()[-200:]))
    return reply.out.strip()


def slurm_processes(transport: Line, host: Host) -> str:
    """Return what Slurm runs on a host, as root sees it, such as `slurmd (812, root)`; "" for nothing. Raises
    Trouble."""
    reply = transport.run(host, Job(SEEN, user="root", timeout=60))
    if reply.code:
        raise Trouble(Problem(host.name, "cannot say what Slurm runs there", reply.err.strip()[-200:]))
    return reply.out.strip()


def kubelet_processes(transport: Line, host: Host) -> str:
    """Return the kubelet that runs on a host, as root sees it; "" for none. Raises Trouble."""
    reply = transport.run(host, Job(KUBELET_SEEN, user="root", timeout=60))
    if reply.code:
        raise Trouble(Problem(host.name, "cannot say whether kubelet runs there", reply.err.strip()[-200:]))
    return reply.out.strip()


def _stays_in(transport: Line, host: Host, boot: str, patience: float) -> bool:
    """Return whether a host still answers on a new session, in the boot `boot`, when `patience` seconds are over."""
    deadline = time.monotonic() + patience
    while True:
        transport.forget(host)
        try:
            if boot_id(transport, host) != boot:
                return False
        except Trouble:
            return False
        if time.monotonic() >= deadline:
            return True
        time.sleep(0.5)


def reboot(
    transport: Line, host: Host, boot: str, node: str, kube_node: str = "", *, patience: float = GONE_LIMIT
) -> None:
    """Reboot a host over its own connection, as root, out of the boot `boot`: after another one it may be in use.
    `node` is its node in Slurm, drained and without jobs, "" for a host that is none; `kube_node` that in Kubernetes,
    drained as well. How the session ends says nothing: where it is lost before the host's word, a reboot is taken to
    have begun when the host leaves that boot within `patience` seconds. NotRebootedError when the host refuses before
    it begins, other Trouble when nothing is known to have begun, or the host says why it does not."""
    begun: list[str] = []
    try:
        reply = transport.run(host, Job(REBOOT, args=(boot, node, kube_node), user="root", timeout=60), begun.append)
    except Trouble as trouble:
        # A reboot that was quick ends the session before its word is here.
        lost = isinstance(trouble, LostError)
        if "rebooting=1" in begun or (lost and not _stays_in(transport, host, boot, patience)):
            return
        raise
    # A shell that the shutdown itself ended has 128 and the signal's number.
    if 0 < reply.code < 128:
        reason = (reply.err.strip() or f"exit code {reply.code}").rpartition("\n")[2][-300:]
        if "rebooting=1" not in begun:
            raise NotRebootedError(Problem(host.name, "not rebooted", reason))
        raise Trouble(Problem(host.name, "does not reboot", reason))
