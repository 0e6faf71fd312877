# shellcheck shell=bash
# Keep in mind what of PREFIX is unproved: stacks that have not been seen to work since they were last built or offered, and entries that are
# built again and not offered since. A run that fails, or is killed, before it is through must not look finished to the next one. It needs
# prefix/lib/share.sh before it; prefix/offer.sh takes the marks of entries away.
# Arguments: unproved|proved NAME…. Input: PREFIX. Result: state=unproved|proved.

main() {
    need_env PREFIX
    local -r state="${1:-}"
    local name mark
    shift
    follow_prefix
    for name in "$@"; do
        [[ "${name}" =~ ^[A-Za-z0-9][A-Za-z0-9._+-]*$ ]] || die "proof: bad name '${name}'"
        mark="${PREFIX}/.unproved-${name}"
        case "${state}" in
        unproved) : >"${mark}" || die "$(id -un) cannot write in ${PREFIX} (owner $(stat -c %U -- "${PREFIX}"))" ;;
        proved) rm -f -- "${mark}" ;;
        *) die "proof: unproved or proved, not '${state}'" ;;
        esac
    done
    data state "${state}"
}

main "$@"
