# shellcheck shell=bash
# Adds to a run's folder: the tar stream on standard input goes into it, and LINES are put behind its run.env. It needs prefix/lib/share.sh
# before it. Inputs: PREFIX, PLACE (the folder), LINES (may be empty). Result: kept=FOLDER.

main() {
    need_env PREFIX PLACE
    follow_prefix
    [[ -d "${PLACE}" ]] || die "there is no folder ${PLACE}"
    tar -x -f - -C "${PLACE}" --no-same-owner >&2
    [[ -z "${LINES:-}" ]] || printf '%s\n' "${LINES}" >>"${PLACE}/run.env"
    data kept "${PLACE}"
}

main "$@"
