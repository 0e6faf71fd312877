# shellcheck shell=bash
# Runs the file of a test on this host, without Slurm: alone, or as one of several nodes whose RANK, WORLD_SIZE, MASTER_ADDR and
# MASTER_PORT are set. It needs prefix/lib/share.sh and test/lib/place.sh before it.
#
# Inputs: PREFIX, RUN, FILE (the test's file), KEY (what to call its exit code), DEEPEP_NODE and DEEPEP_NODES (this host's name, and
# those of all). Arguments go to the test.
# Data lines: place-KEY (the run's folder); KEY (the exit code), last. Everything else is what the test prints.

main() {
    need_env PREFIX RUN FILE KEY DEEPEP_NODE DEEPEP_NODES
    local place code=0
    place="$(make_place)"
    data "place-${KEY}" "${place}"
    # A job around this session is none of the test's: the file would take its nodes for its own.
    unset "${!SLURM_@}"
    cd -- "${place}" || die "${place} cannot be entered"
    DEEPEP_RUN_DIR="${place}" DEEPEP_VIA=ssh bash "${FILE}" "$@" || code="$?"
    # The test may have ended in the middle of a line.
    printf '\n'
    data "${KEY}" "${code}"
}

main "$@"
