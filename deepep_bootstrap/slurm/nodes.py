"""Slurm nodes around a reboot: command lines and parsers for draining, resuming, rebooting and reservations.

A real slurmctld (22.05, seen on the embedded cluster) behaves so: `scontrol reboot ASAP` drains, and
takes the drain back when the node returns, whoever had drained it. `scontrol reboot` without ASAP, on a
node that is drained and idle, reboots it at once and leaves the drain alone. So a node is drained first,
and rebooted without ASAP. Slurm writes ` : reboot issued` behind the reason, and ` : reboot timed out`
where the node takes longer than ResumeTimeout, which is 60 s unless the site says otherwise: it is DOWN
then, and no longer drained.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timedelta

from msgspec import Struct

from deepep_bootstrap.core.errors import Problem, Trouble
from deepep_bootstrap.slurm import commands
from deepep_bootstrap.slurm.commands import SlurmNode

MARK = "deepep-bootstrap:"
"""What every reason for a drain of this program begins with."""

LONGEST_REASON = 400
"""Characters of a reason that we write: all that a host can have lost (losses) fits. Slurm has no limit of its own,
its listings have."""

REFUSED = ("invalid user", "permission denied", "access denied", "not permitted", "unauthorized")
"""How scontrol says, in small letters, that an account may not do something that another account may."""

AWAY = ("unable to contact", "connection refused", "connection timed out", "zero bytes", "socket timed out")
"""How Slurm's clients say, in small letters, that the controller does not answer now."""

OWN_WORDS = ("not responding", "node unexpectedly rebooted", "reboot timed out")
"""How the reasons begin, in small letters, that slurmctld sets by itself around a reboot."""

ACTIVE_JOBS = "RUNNING,COMPLETING,CONFIGURING,SUSPENDED,STOPPED,RESIZING,STAGE_OUT,SIGNALING"

LOOK = f"""
set -u
SLURM_TIME_FORMAT=standard; export SLURM_TIME_FORMAT
echo @nodes; timeout 20 scontrol show node -o "$1" || exit
echo @jobs; timeout 20 squeue -h -w "$1" --states={ACTIVE_JOBS} -o '%A|%N' || exit
echo @reservations; timeout 20 scontrol show reservation -o || exit
echo @reboot_program; timeout 20 scontrol show config | sed -n 's/^RebootProgram *= *//p'
echo @now; date +%Y-%m-%dT%H:%M:%S
"""
"""A script for the Slurm host; its argument is a folded list of nodes, its output is for `parse_look`. Times are
that host's."""


KNOWN = """
set -u
answer=$(timeout 20 scontrol show node -o "$1")
code=$?
case $code:$answer in 1:*'Node '*' not found'*) code=0 ;; esac
printf '%s\\n' "$answer"
exit $code
"""
"""A script for the Slurm host; its argument is a folded list of nodes, of which it prints those that Slurm knows.
scontrol goes on behind one that it does not know, says so on standard output, and ends with 1."""


OURS = f"""
set -u
answer=$(timeout 60 scontrol -a show node -o) || exit
printf '%s\\n' "$answer" | grep -F ' Reason={MARK}' || true # there is none
"""
"""A script for the Slurm host that prints the nodes anywhere in Slurm whose reason is ours, as `KNOWN` does."""


class DrainReason(Struct, frozen=True):
    """Why a node is drained or down: the text, and the user who set it (Slurm itself does so as its own user, mostly
    slurm)."""

    text: str
    user: str = ""

    @property
    def ours(self) -> bool:
        """Whether this program set it."""
        return is_ours(self.text)


class Reservation(Struct, frozen=True):
    """A reservation of nodes, with its times in the Slurm host's own zone."""

    name: str
    nodes: frozenset[str]
    start: datetime
    end: datetime


class Look(Struct, frozen=True):
    """What Slurm says of some nodes at one moment: the nodes, the jobs on each (by node name), all reservations,
    whether the site lets Slurm reboot (`reboot_program`, "" where not), and what time it is there."""

    nodes: Mapping[str, SlurmNode]
    jobs: Mapping[str, tuple[str, ...]]
    reservations: tuple[Reservation, ...]
    reboot_program: str
    now: datetime


def our_reason(why: str, run: str) -> str:
    """Return the reason with which this program drains: its own name, why, and the run."""
    text = f"{MARK} {' '.join(why.split())}"
    tail = f" (run {run})" if run else ""
    return text[: LONGEST_REASON - len(tail)].rstrip() + tail


def is_of_run(reason: str, run: str) -> bool:
    """Return whether a reason was written by the run `run` of this program."""
    return is_ours(reason) and bool(run) and reason.endswith(f"(run {run})")


def is_ours(reason: str) -> bool:
    """Return whether a node's reason was written by this program."""
    return reason.startswith(MARK)


def read_reason(text: str) -> DrainReason:
    """Return a node's reason as `scontrol show node` prints it, without what Slurm adds about a reboot: user and
    time in brackets. From Slurm 23.02 on more keys may stand behind it, such as a comment or a cloud's InstanceId."""
    match = re.fullmatch(r"(.*?)(?: \[([^\s@\]]+)@[^\]]*\](?: [A-Z][A-Za-z]+=.*)?)?", text.strip(), re.DOTALL)
    reason, user = (match.group(1), match.group(2) or "") if match else (text, "")
    return DrainReason(re.sub(r"( : reboot (issued|complete|requested|timed out))+$", "", reason).strip(), user)


def is_drained(state: str) -> bool:
    """Return whether no job starts on a node in this state, whatever runs there still."""
    return "DRAIN" in state.upper()


def is_down(state: str) -> bool:
    """Return whether Slurm has given the node up, or was told to."""
    return "DOWN" in re.split(r"[^A-Z_]", state.upper())


def is_failing(state: str) -> bool:
    """Return whether somebody has told Slurm that the node is about to fail."""
    return "FAIL" in state.upper()


def is_out_of_use(state: str) -> bool:
    """Return whether a person, a program or Slurm itself keeps jobs from starting on the node."""
    return is_drained(state) or is_down(state) or is_failing(state)


def is_rebooting(state: str) -> bool:
    """Return whether a reboot was asked for through Slurm and has not come to its end."""
    return "REBOOT" in state.upper()


def answers(state: str) -> bool:
    """Return whether the node's slurmd is there and no reboot is under way."""
    return not ("*" in state or "NOT_RESPONDING" in state or is_down(state) or is_rebooting(state))


def is_occupied(state: str) -> bool:
    """Return whether jobs have a part of the node, also such as this account may not see (PrivateData in
    slurm.conf)."""
    return not {"ALLOCATED", "MIXED", "COMPLETING"}.isdisjoint(re.split(r"[^A-Z_]", state.upper()))


def has_registered(node: SlurmNode, before: str) -> bool:
    """Return whether the slurmd of a node that was rebooted has registered since; `before` is the `started` of the
    time before. A node that is down then is so because of that reboot alone: without ReturnToService=2 Slurm leaves
    it down until somebody resumes it."""
    if not (before and node.started):
        return answers(node.state)
    return node.started != before and not any(
        word in node.state.upper() for word in ("*", "NOT_RESPONDING", "REBOOT", "INVAL")
    )


def set_by_somebody(node: SlurmNode) -> bool:
    """Return whether a person or another program keeps the node out of use: drained or said to fail by anybody else,
    or down with a reason that is not Slurm's own. Where Slurm runs as root the two cannot be told apart; then it counts
    as somebody's."""
    reason = read_reason(node.reason)
    if reason.ours:
        return False
    return (
        is_drained(node.state)
        or is_failing(node.state)
        or (is_down(node.state) and bool(reason.text) and reason.user != "slurm")
    )


def reason_out_of_use(state: str, reason: str) -> str:
    """Return why a node is drained or down, "" for one in use."""
    return read_reason(reason).text if is_out_of_use(state) else ""


def taken_since(node: SlurmNode, before: str) -> str:
    """Return what somebody made of a node since it was out of use for the reason `before` ("": it was in use), ""
    for nothing. A drain of another run of this program is somebody's too; what Slurm itself does, as its own user, is
    not."""
    reason = read_reason(node.reason)
    if set_by_somebody(node) or (reason.ours and (is_drained(node.state) or is_failing(node.state))):
        return "" if _is_still(reason.text, before) else _says_who(reason)
    return BACK_IN_USE if is_ours(before) and not is_out_of_use(node.state) else ""


BACK_IN_USE = "somebody brought it back into use"


def not_to_resume(node: SlurmNode, before: str) -> str:
    """Return why a node that was left drained for the reason `before` must not be resumed, "" where it may."""
    if problem := taken_since(node, before):
        return problem
    return "" if is_drained(node.state) and not is_failing(node.state) else f"its state is {node.state} now"


def _is_still(reason: str, before: str) -> bool:
    """Return whether a reason is what it was. Slurm adds its own words behind " : ", whatever a later version says
    there."""
    now, was = (" ".join(text.split()) for text in (reason, before))
    return now == was or (bool(was) and now.startswith(f"{was} : "))


def _says_who(reason: DrainReason) -> str:
    return f"{reason.user or 'somebody else'} keeps it out of use now: {reason.text}"


def not_ours_any_more(node: SlurmNode, ours: str) -> str:
    """Return what somebody else made meanwhile of a node that was out of use for the reason `ours`, "" for nothing:
    given back to Slurm, or kept out of use for another reason, which may be that of another run of this program."""
    if not is_out_of_use(node.state):
        return BACK_IN_USE
    if is_ours(ours) and is_failing(node.state):
        return f"somebody set its state to {node.state}"
    reason = read_reason(node.reason)
    if _is_still(reason.text, ours) or reason.user == "slurm" or reason.text.lower().startswith(OWN_WORDS):
        return ""
    return _says_who(reason)


def drain(node: str, reason: str) -> tuple[str, ...]:
    """Return the command that lets no further job start on a node, or gives a drained one another reason."""
    return (commands.SCONTROL, "update", f"nodename={node}", "state=drain", f"reason={reason}")


def give_reason(node: str, reason: str) -> tuple[str, ...]:
    """Return the command that changes only the reason."""
    return (commands.SCONTROL, "update", f"nodename={node}", f"reason={reason}")


def resume(node: str) -> tuple[str, ...]:
    """Return the command that brings a node back into use; its reason goes."""
    return (commands.SCONTROL, "update", f"nodename={node}", "state=resume")


def reboot(node: str) -> tuple[str, ...]:
    """Return the command that reboots a drained, idle node at once and leaves it drained (see above). Without a
    reason: the one that it was drained with stays."""
    return (commands.SCONTROL, "reboot", node)


def cancel_reboot(node: str) -> tuple[str, ...]:
    """Return the command that takes back a reboot that was not issued yet."""
    return (commands.SCONTROL, "cancel_reboot", node)


def says_refused(text: str) -> bool:
    """Return whether scontrol said that this account may not do it."""
    return any(words in text.lower() for words in REFUSED)


def says_away(text: str) -> bool:
    """Return whether a client said that the controller does not answer."""
    return any(words in text.lower() for words in AWAY)


def parse_look(text: str) -> Look:
    """Return what `LOOK` printed; Trouble for an answer that is cut off or of another form."""
    parts: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        if re.fullmatch("@[a-z_]+", line):
            current = parts.setdefault(line[1:], [])
        else:
            current.append(line)
    now = _time("".join(parts.get("now", [])))
    if now is None:
        raise Trouble(
            Problem(
                "Slurm", "an answer that is cut off", text.strip()[-80:] or "nothing", "nodes, jobs, reservations, time"
            )
        )
    program = "".join(parts.get("reboot_program", [])).strip()
    return Look(
        {node.name: node for node in commands.parse_nodes("\n".join(parts.get("nodes", [])))},
        parse_jobs("\n".join(parts.get("jobs", []))),
        parse_reservations("\n".join(parts.get("reservations", []))),
        "" if program in {"(null)", "None"} else program,
        now,
    )


def parse_jobs(text: str) -> dict[str, tuple[str, ...]]:
    """Return the jobs on each node in lines `id|folded nodes`; others are Trouble."""
    found: dict[str, list[str]] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        job, bar, nodes = line.partition("|")
        if not bar or not job.isdecimal():
            raise Trouble(Problem(commands.SQUEUE, "a line that cannot be read", line[:80], "id|nodes"))
        for node in commands.unfold(nodes):
            found.setdefault(node, []).append(job)
    return {node: tuple(jobs) for node, jobs in found.items()}


def parse_reservations(text: str) -> tuple[Reservation, ...]:
    """Return the reservations in the output of `scontrol show reservation -o`; those without nodes or times are
    passed over."""
    found = []
    for line in text.splitlines():
        fields = dict(pair.split("=", 1) for pair in line.split() if "=" in pair)
        start, end = _time(fields.get("StartTime", "")), _time(fields.get("EndTime", ""))
        nodes = fields.get("Nodes", "(null)")
        if line.startswith("ReservationName=") and start and end and nodes not in {"(null)", ""}:
            found.append(Reservation(fields["ReservationName"], frozenset(commands.unfold(nodes)), start, end))
    return tuple(found)


def in_the_way(look: Look, node: str, seconds: float, allowed: str = "") -> Reservation | None:
    """Return the reservation that keeps this program from a node: one that holds now, or begins within `seconds`;
    the one named `allowed` does not count."""
    until = look.now + timedelta(seconds=seconds)
    others = (one for one in look.reservations if one.name != allowed and node in one.nodes)
    return next((one for one in others if one.start <= until and one.end > look.now), None)


def _time(text: str) -> datetime | None:
    try:
        return datetime.strptime(text.strip(), "%Y-%m-%dT%H:%M:%S")  # noqa: DTZ007 - all times are the Slurm host's own, compared only among themselves
    except ValueError:
        return None
