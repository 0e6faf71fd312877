"""The reboot of one host within a rolling reboot: drain in Slurm and in Kubernetes, wait until idle, change, reboot,
look again, give back.
"""

from __future__ import annotations

import random
import time
from datetime import datetime
from pathlib import Path

from msgspec.structs import replace

from deepep_bootstrap.bootstrap.reboot import control
from deepep_bootstrap.bootstrap.reboot.control import NotRebootedError
from deepep_bootstrap.bootstrap.reboot.pod_drain import KEEPS_IT, PodDrain
from deepep_bootstrap.bootstrap.reboot.policy import ACTIVE_LATER, HostReboot
from deepep_bootstrap.bootstrap.reboot.slurm_drain import NodeDrain
from deepep_bootstrap.bootstrap.reboot.wave import TITLE, Wave
from deepep_bootstrap.core.errors import TROUBLE, Problem, Trouble
from deepep_bootstrap.core.outcome import Outcome
from deepep_bootstrap.core.text import duration
from deepep_bootstrap.remote.host import LOCAL
from deepep_bootstrap.slurm import nodes
from deepep_bootstrap.slurm.nodes import Look, read_reason

ASKED_EVERY = 3
"""Tries to reach a host that boots for each look at its node in Slurm, whose periodic check for timeouts comes every
30 s."""

SHUTDOWN = 30.0
"""Seconds that a host may take from the end of its slurmd to the end of its sshd when it shuts down."""

OWN_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class LeftAloneError(Exception):
    """A host was not touched, or not further than a drain that is taken back; the text says why, `state` is that of
    the outcome."""

    def __init__(self, why: str, state: str = "skipped") -> None:
        super().__init__(why)
        self.state = state


def _active(outcome: Outcome, back_at: str) -> Outcome:
    """Return the outcome of a recipe whose change is active since the host is back."""
    return replace(outcome, detail=outcome.detail.replace(ACTIVE_LATER, f"active since the reboot at {back_at}"))


class HostRebootRun:
    """The reboot of one host. What was done so far is in `outcomes`, also when the rest fails."""

    def __init__(self, wave: Wave, order: HostReboot) -> None:
        self.outcomes: list[Outcome] = []
        self._wave, self._order, self._policy, self._host = wave, order, wave.policy, order.host
        self._drain, self._pods = wave.drain(order), wave.pods(order)
        self._changed = self._rebooted = self._asked_slurm = False
        self._without_slurmd: float | None = None
        self._back_at = ""

    def run(self) -> tuple[Outcome, ...]:
        """Reboot the host and return the outcomes; nothing is raised that a host or Slurm can cause."""
        begin = time.monotonic()
        try:
            self._refuse()
            self._check_leave()
            end = self._work()
        except LeftAloneError as left:
            end = self._give_up(left)
        except Trouble as trouble:
            end = self._fail(trouble)
        finally:
            self._wave.leave(self._order.node)
        if self._back_at and end.state == "done":
            self.outcomes = [_active(each, self._back_at) for each in self.outcomes]
        return (*self.outcomes, replace(end, seconds=time.monotonic() - begin))

    @property
    def host(self) -> str:
        """The name of the host."""
        return self._host.name

    def _refuse(self) -> None:
        if self._order.refused:
            raise LeftAloneError(self._order.refused)
        own = OWN_BOOT_ID.read_text(encoding="ascii").strip()
        if self._host.connection == LOCAL or self._order.boot_id == own:
            raise LeftAloneError("this program runs there: reboot it yourself, then run again")

    def _check_leave(self) -> None:
        """Raise LeftAloneError when nothing may be begun any more."""
        if why := self._not_now():
            raise LeftAloneError(why)

    def _not_now(self) -> str:
        """Return why nothing may be begun any more: the wave was stopped, or its window is over; "" where it may."""
        if self._wave.stopped:
            return f"not started: {self._wave.stopped}"
        window = self._policy.window
        return (
            f"waits for the window {window}" if window and not window.holds(datetime.now().astimezone().time()) else ""
        )

    def _work(self) -> Outcome:
        """Free the host, change it, reboot it, look at it, and give it back."""
        self._free()
        before = control.boot_id(self._wave.transport, self._host)
        if before != self._order.boot_id and not self._wave.actions.look(self._host).unmet:
            return self._give_back("unchanged", "was rebooted meanwhile, and is as wanted")
        self._change()
        if self._order.reload and self._reload():
            return self._give_back("unchanged", "not needed: the driver was loaded anew")
        if not self._policy.reboot:
            raise LeftAloneError(f"waits for a reboot: {self._order.why}")
        if why := self._not_now():
            return self._leave_to_reboot(why)
        self._reboot(before)
        self._wait_until_back(before)
        self._check()
        return self._give_back("done", self._order.why)

    def _free(self) -> None:
        """Return when nobody uses the host and nobody will: drained by us or, before, by somebody else. Never ends a
        job."""
        if self._drain:
            self._take_out(self._drain)
            if kept := self._drain.kept:
                self._say(f"{kept.state.lower()} before, and stays so: {read_reason(kept.reason).text}")
        elif found := control.slurm_processes(self._wave.transport, self._host):
            raise LeftAloneError(
                f"left alone: {found} runs there, but Slurm named no node for it: its jobs cannot be seen"
            )
        self._cordon()
        self._wait_until_idle()
        if self._drain:
            self._check_leave()
            self._check_reservation(self._drain.look())
        if self._is_out:
            self._check_leave()
            self._check_not_lost()

    @property
    def _is_out(self) -> bool:
        """Whether nothing new is started on the host, neither by Slurm nor by Kubernetes."""
        return self._drain is not None or self._pods is not None

    def _cordon(self) -> None:
        """Cordon the host's node of Kubernetes, where it is one. What keeps the node is looked for before that: a node
        that cannot be drained stays in use."""
        if self._pods:
            if keeping := self._pods.departure().keeping:
                raise LeftAloneError(f"left alone: {keeping[0]}; kubectl drain {self._pods.node} says how to force it")
            self._pods.take_out(self._order.why)
            if self._pods.kept:
                self._say(KEEPS_IT)
        elif found := control.kubelet_processes(self._wave.transport, self._host):
            raise LeftAloneError(f"left alone: {found} runs there, and no node of Kubernetes is known that it is")

    def _wait_until_idle(self) -> None:
        """Return when nobody uses the host any more, LeftAloneError where it takes too long."""
        deadline, told, pause = time.monotonic() + self._policy.drain_timeout, "", self._policy.pause
        while busy := self._who_is_busy():
            if not self._is_out:
                raise LeftAloneError(f"in use, left alone: {busy}")
            if time.monotonic() > deadline:
                raise LeftAloneError(f"still in use after {duration(self._policy.drain_timeout)}: {busy}", "failed")
            if busy != told:
                self._say(f"drained, waiting for {busy}")
                told = busy
            self._wave.sleep(pause)
            # A job may go on for hours, on hundreds of nodes at a time: the controller is asked less and less often.
            pause = min(pause * 1.25, 10 * self._policy.pause)
            self._check_leave()

    def _check_not_lost(self) -> None:
        """Raise LeftAloneError where somebody else has taken the node over since it was taken out of use."""
        if self._drain and (lost := self._drain.lost()):
            raise LeftAloneError(f"not rebooted: {lost}")
        if self._pods and (lost := self._pods.lost()):
            raise LeftAloneError(f"not rebooted: {lost}")

    def _take_out(self, drain: NodeDrain) -> None:
        """Drain the node as soon as there is room for one more out of use, counted over all runs of this program. Who
        is not first waits: two that drain at the same moment both see it, and both take it back."""
        deadline, told, pause = time.monotonic() + self._policy.drain_timeout, "", self._policy.pause
        while True:
            look = drain.look()
            self._check_untouched(look)
            state = look.nodes[drain.node].state
            in_use = not nodes.is_out_of_use(state)
            full = self._wave.enter(drain.node, in_use=in_use)
            if not full:
                drain.take_out(self._order.why, look)
                if not in_use or not (full := self._wave.overfull()):
                    return
                drain.put_back()
                self._wave.leave(drain.node)
            if time.monotonic() > deadline:
                self._wave.stop(f"still no room after {duration(self._policy.drain_timeout)}: {full}")
                raise LeftAloneError(f"not started: {self._wave.stopped}", "failed")
            if full != told:
                self._say(f"waits: {full}")
                told = full
            self._wave.sleep(pause * random.SystemRandom().uniform(0.5, 1.5))
            pause = min(pause * 1.25, 10 * self._policy.pause)
            self._check_leave()

    def _check_untouched(self, look: Look) -> None:
        """Raise LeftAloneError where the node is not ours to drain now: reserved, rebooting, or taken by somebody since
        the plan was made, which may be hours ago."""
        self._check_reservation(look)
        node = look.nodes[self._order.node]
        if nodes.is_rebooting(node.state):
            raise LeftAloneError("Slurm reboots it already, for somebody else or another run")
        if taken := nodes.taken_since(node, self._order.out_of_use):
            raise LeftAloneError(f"left alone: {taken}; it was not so when this run looked")

    def _who_is_busy(self) -> str:
        """Return who uses the host, "" for nobody. A wait for jobs takes hours: a look that fails is tried again for
        a while."""
        deadline = time.monotonic() + self._policy.settle
        while True:
            try:
                return self._see_who_is_busy()
            except Trouble:
                if self._wave.interrupted or time.monotonic() > deadline:
                    raise
            self._wave.sleep(self._policy.pause)

    def _see_who_is_busy(self) -> str:
        """Return who uses the host now: jobs first, then pods, then processes on its GPUs."""
        if self._drain:
            look = self._drain.look()
            if jobs := look.jobs.get(self._order.node):
                return f"job {', '.join(jobs)}"
            if nodes.is_occupied(look.nodes[self._order.node].state):
                return "a job that Slurm does not show to this account"
        if self._pods and (pods := self._see_pods(self._pods)):
            return pods
        return self._wave.actions.look(self._host).busy

    def _see_pods(self, drain: PodDrain) -> str:
        """Ask pods away that may go; return those that are still there. A pod that came since the node was looked at
        may keep it."""
        self._check_not_lost()
        departure = drain.departure()
        if departure.keeping:
            raise LeftAloneError(f"left alone: {departure.keeping[0]}")
        return drain.evict(departure)

    def _check_reservation(self, look: Look) -> None:
        other = nodes.in_the_way(look, self._order.node, self._policy.boot_timeout, self._policy.reservation)
        if other:
            when = f"{other.start:%d %b %H:%M} to {other.end:%d %b %H:%M}"
            raise LeftAloneError(
                f"in reservation {other.name} ({when}), left alone; --reservation={other.name} takes it"
            )

    def _change(self) -> None:
        for step in self._order.steps:
            self._say(step.title)
            self._changed = True
            self.outcomes.append(self._wave.actions.apply(self._host, step))
            if self.outcomes[-1].state == "failed":
                raise Trouble(Problem(self._host.name, f"not rebooted: {step.title} failed", self.outcomes[-1].detail))

    def _reload(self) -> bool:
        """Return whether a reload of the driver was enough. Where a reboot follows, a reload that failed is no
        failure of the run; where none does, Trouble when it left the host without what it had."""
        self._say("loading the driver anew")
        self._changed = True
        outcome = self._wave.actions.reload(self._host)
        failed = outcome.state == "failed"
        self.outcomes.append(replace(outcome, state="skipped", code=0) if failed and self._policy.reboot else outcome)
        if failed and self._policy.reboot:
            return False
        patience = self._policy.settle if failed or self._policy.reboot else self._policy.boot_timeout
        deadline = time.monotonic() + patience
        while (seen := self._wave.actions.look(self._host)).lost and time.monotonic() < deadline:
            self._wave.sleep(self._policy.pause)  # an NVSwitch fabric is trained anew
        if seen.lost and not self._policy.reboot:
            raise Trouble(
                Problem(self._host.name, "not as before its driver was reloaded", "; ".join(seen.lost), try_="a reboot")
            )
        return not failed and not seen.unmet

    def _leave_to_reboot(self, why: str) -> Outcome:
        """Leave a host that was changed drained for the next run to reboot; one that was not goes back."""
        if not self._changed:
            raise LeftAloneError(why)
        for drain in (self._drain, self._pods):
            if drain:
                drain.leave(f"changed, waits for a reboot: {self._order.why}")
        reason = f"changed, waits for a reboot: {why}"
        self._say(reason)
        return Outcome(TITLE, self._host.name, "skipped", reason, code=TROUBLE)

    def _reboot(self, before: str) -> None:
        """Reboot through Slurm where that is possible, else over SSH; only as long as nobody else has taken the node
        over."""
        self._check_not_lost()
        self._rebooted = True
        refused = self._drain.reboot() if self._drain else "no node of Slurm"
        if not refused:
            self._say("rebooting through Slurm")
            self._asked_slurm = True
            return
        self._reboot_over_ssh(before, refused)

    def _reboot_over_ssh(self, before: str, why: str) -> None:
        self._say(f"rebooting over SSH ({why})")
        try:
            control.reboot(self._wave.transport, self._host, before, self._order.node, self._order.kube_node)
        except NotRebootedError:
            self._rebooted = False
            raise

    def _wait_until_back(self, before: str) -> None:
        """Return when the host answers with another boot id."""
        deadline, last, tries = time.monotonic() + self._policy.boot_timeout, "", 0
        while time.monotonic() < deadline:
            self._wave.sleep(self._policy.pause)
            # A session from before the reboot may look alive for long.
            self._wave.transport.forget(self._host)
            try:
                if control.boot_id(self._wave.transport, self._host) != before:
                    self._back_at = time.strftime("%H:%M")
                    self._say("back")
                    return
                last = "still the boot id from before"
                if self._slurmd_is_gone():
                    self._take_back_request()
                    self._reboot_over_ssh(before, "slurmd ended there before it heard of the reboot")
                    deadline = time.monotonic() + self._policy.boot_timeout
            except Trouble as trouble:
                last = trouble.problems[0].what
            tries += 1
            if self._drain and tries % ASKED_EVERY == 0:
                self._drain.keep_out(self._order.why)
        if self._drain:
            self._drain.forget_reboot()
        what = f"did not come back within {duration(self._policy.boot_timeout)} after its reboot"
        raise Trouble(Problem(self._host.name, what, last, try_="its console; then the same command again"))

    def _slurmd_is_gone(self) -> bool:
        """Return whether Slurm was asked for the reboot, and the slurmd that has to hear of it has ended, as one does
        that waits in vain for GPUs without a driver. It takes slurmctld minutes to notice that (SlurmdTimeout). A host
        that shuts down has no slurmd either, for a moment."""
        if not self._asked_slurm:
            return False
        if "slurmd (" in control.slurm_processes(self._wave.transport, self._host):
            self._without_slurmd = None
            return False
        self._without_slurmd = self._without_slurmd or time.monotonic()
        return time.monotonic() - self._without_slurmd >= min(SHUTDOWN, self._policy.boot_timeout / 3)

    def _take_back_request(self) -> None:
        """Take the reboot back from Slurm, and keep the node out of use."""
        self._asked_slurm = False
        if self._drain:
            self._drain.forget_reboot()
            self._drain.keep_out(self._order.why)

    def _check(self) -> None:
        """Return when the host has what was wanted and its slurmd answers; Trouble when it has not in time. What
        recipes wrote shows soon after the boot or never; drivers, fabrics, mounts and services may take as long as
        the boot itself."""
        begin = time.monotonic()
        while missing := self._what_is_missing():
            problem, patience = missing
            if time.monotonic() > begin + patience:
                raise Trouble(problem)
            self._wave.sleep(self._policy.pause)

    def _what_is_missing(self) -> tuple[Problem, float] | None:
        """Return what keeps the host from being given back, and how many seconds to wait for it; None for nothing."""
        slurmd = self._drain.hold(self._order.why) if self._drain else ""
        try:
            seen = self._wave.actions.look(self._host)
        except Trouble as trouble:
            return trouble.problems[0], self._policy.boot_timeout
        if seen.unmet:
            problem = Problem(
                self._host.name, "came back without what was wanted", "; ".join(seen.unmet), try_="invoke doctor"
            )
            return problem, self._policy.boot_timeout if seen.lost else self._policy.settle
        if slurmd:
            return Problem(
                self._host.name, "came back", slurmd, try_="systemctl status slurmd there"
            ), self._policy.boot_timeout
        return self._node_is_missing(seen.boot_id)

    def _node_is_missing(self, boot_id: str) -> tuple[Problem, float] | None:
        """Return what Kubernetes lacks of a node that returned, and how long to wait for it; None for nothing."""
        try:
            lacks = self._pods.missing(boot_id) if self._pods else ""
        except Trouble as trouble:
            return trouble.problems[0], self._policy.boot_timeout
        if not lacks:
            return None
        remedy = "journalctl -u kubelet there"
        return Problem(self._host.name, "came back", lacks, try_=remedy), self._policy.boot_timeout

    def _give_back(self, state: str, detail: str) -> Outcome:
        """Bring the host back into use, unless somebody else had taken it out; return the outcome."""
        stays = "; ".join(said for drain in (self._pods, self._drain) if drain and (said := drain.bring_back()))
        after = stays or ("back in use" if self._is_out else "")
        self._say(f"{state}: {detail}; {after}" if after else f"{state}: {detail}")
        return Outcome(TITLE, self._host.name, state, f"{detail}; {stays}" if stays else detail)

    def _give_up(self, left: LeftAloneError) -> Outcome:
        """Put everything back as it was: nothing was changed that must not run."""
        try:
            for drain in (self._pods, self._drain):
                if drain:
                    drain.put_back()
            self._say(str(left))
            end = Outcome(TITLE, self._host.name, left.state, str(left))
        except Trouble as trouble:
            end = Outcome(TITLE, self._host.name, "failed", f"{left}; stays drained: {trouble}")
        return replace(end, code=TROUBLE)

    def _fail(self, trouble: Trouble) -> Outcome:
        """End a reboot that went wrong. As long as nothing was changed the host is left as it was; after that the node
        stays drained, and its reason says what is missing; after a reboot the wave stops."""
        first = trouble.problems[0]
        reason = f"{first.what}: {first.found}" if first.found else first.what
        if self._wave.interrupted:
            return Outcome(TITLE, self._host.name, "failed", reason, code=TROUBLE)
        if not self._changed and not self._rebooted:
            return self._give_up(LeftAloneError(reason, "failed"))
        if self._rebooted:
            self._wave.stop(f"{self._host.name} {reason}")
        else:
            self._wave.count_failed_change(f"{self._host.name}: {reason}")
        for drain in (self._drain, self._pods):
            if drain:
                drain.leave(reason)
        self._say(str(trouble))
        return Outcome(TITLE, self._host.name, "failed", reason, code=TROUBLE)

    def _say(self, line: str) -> None:
        self._wave.tell(self._host.name, line)
