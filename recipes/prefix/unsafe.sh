# shellcheck shell=bash
# Name what somebody could change of a prefix who must not; change nothing. It needs prefix/lib/share.sh and trust.sh before it.
# Inputs: PREFIX, OWNER ("" or the user who builds). Results: unsafe=PATH WHAT REMEDY for each, at most SHOWN of them; unsafe_count=NUMBER; end=1.

SHOWN=10

main() {
    local found line
    need_env PREFIX
    found="$(find_unsafe)"
    [[ -z "${found}" ]] || while IFS= read -r line; do data unsafe "${line}"; done < <(head -n "${SHOWN}" <<<"${found}")
    data unsafe_count "$(grep -c . <<<"${found}" || true)" # grep finds nothing to count: that is well
    data end 1
}

main "$@"
