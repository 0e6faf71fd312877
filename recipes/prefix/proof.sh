# shellcheck shell=bash
# Keep in mind that a stack of PREFIX has not been seen to work since it was last built or offered: a run that fails, or is killed, before
# its proofs are through must not look finished to the next one. It needs prefix/lib/share.sh before it.
# Arguments: unproved|proved STACK. Input: PREFIX. Result: state=unproved|proved.

main() {
    need_env PREFIX
    local -r state="${1:-}" stack="${2:-}"
    [[ "${stack}" =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || die "proof: bad name '${stack}'"
    local -r mark="${PREFIX}/.unproved-${stack}"
    follow_prefix
    case "${state}" in
    unproved) : >"${mark}" || die "$(id -un) cannot write in ${PREFIX} (owner $(stat -c %U -- "${PREFIX}"))" ;;
    proved) rm -f -- "${mark}" ;;
    *) die "proof: unproved or proved, not '${state}'" ;;
    esac
    data state "${state}"
}

main "$@"
