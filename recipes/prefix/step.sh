# shellcheck shell=bash
# Run a script as a step of a Slurm allocation on this host, and end when its process ends: srun alone would stand still until the
# allocation's own end where the step's slurmstepd was killed, since nobody is left to tell it. It needs prefix/lib/owner.sh before it.
#
# Inputs: STEP (the file of the script, which writes pid, start time and pid namespace of its process to STEP.pid), TOKEN. Arguments: the
# command that runs it as a step. Standard output and error are the script's.

SRUN_GRACE=30    # seconds that srun may go on once the step's process is gone; it needs less than one as a rule
START_GRACE=1800 # seconds in which the process must begin: a prolog that tries the GPUs first takes minutes

# is_gone FILE: whether the process that wrote FILE is known to have ended. One in another pid namespace cannot be seen.
is_gone() {
    local pid start space
    read -r pid start space 2>/dev/null <"$1" || return 1 # it has not begun
    [[ "${space}" == "$(readlink /proc/self/ns/pid)" && "$(find_start "${pid}")" != "${start}" ]]
}

# watch_step SRUN: end srun, and leave in STEP.lost why, when it goes on for SRUN_GRACE seconds after the step's process has ended, or the
# process has not begun within START_GRACE: a slurmstepd that was killed before that.
watch_step() {
    local -r srun="$1"
    local since="" why=""
    while sleep 2; do
        ! is_gone "${STEP}.pid" || since="${since:-${SECONDS}}"
        if [[ -n "${since}" ]] && ((SECONDS - since >= SRUN_GRACE)); then
            why="its process has ended and srun was not told within ${SRUN_GRACE} s"
        elif [[ ! -e "${STEP}.pid" ]] && ((SECONDS >= START_GRACE)); then
            why="its process has not begun within ${START_GRACE} s"
        fi
        if [[ -n "${why}" ]]; then
            printf '%s\n' "${why}" >"${STEP}.lost"
            kill -KILL "${srun}"
            return 0
        fi
    done
}

main() {
    local srun watcher code=0
    need_env STEP
    "$@" &
    srun="$!"
    watch_step "${srun}" </dev/null >/dev/null 2>&1 &
    watcher="$!"
    disown "${watcher}"
    wait "${srun}" || code="$?"
    kill "${watcher}" 2>/dev/null || true # it may have ended srun
    [[ ! -e "${STEP}.lost" ]] || die "Slurm lost this step: $(<"${STEP}.lost") (was its slurmstepd killed?)"
    exit "${code}"
}

main "$@"
