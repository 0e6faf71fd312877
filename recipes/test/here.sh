# shellcheck shell=bash
# Runs the file of a test on this host, without Slurm: alone, or as one of several nodes whose RANK, WORLD_SIZE, MASTER_ADDR and
# MASTER_PORT are set. It needs prefix/lib/share.sh and test/lib/place.sh before it.
#
# Inputs: PREFIX, RUN, FILE (the test's file), KEY (what to call its exit code), DEEPEP_NODE and DEEPEP_NODES (this host's name, and
# those of all). Arguments go to the test.
# Data lines: place-KEY (the run's folder); KEY (the exit code), last. Everything else is what the test prints.

PLACE="" ENDED=""

# The first node writes the verdict of a run that is stopped. A trap runs when the test has ended, which gets the same signal.
stop_run() {
    [[ "${ENDED}" || "${RANK:-0}" != 0 ]] || say_stopped "${PLACE}"
}

main() {
    need_env PREFIX RUN FILE KEY DEEPEP_NODE DEEPEP_NODES
    local code=0
    PLACE="$(make_place)"
    trap stop_run EXIT
    trap 'exit 143' TERM INT HUP
    data "place-${KEY}" "${PLACE}"
    # A job around this session is none of the test's: the file would take its nodes for its own.
    unset "${!SLURM_@}"
    cd -- "${PLACE}" || die "${PLACE} cannot be entered"
    DEEPEP_RUN_DIR="${PLACE}" DEEPEP_VIA=ssh bash "${FILE}" "$@" || code="$?"
    ENDED=yes
    # The test may have ended in the middle of a line.
    printf '\n'
    data "${KEY}" "${code}"
}

main "$@"
