# shellcheck shell=bash
# What the host recipes wrote on this host, as far as it is on record. Read-only. Results: file=RECIPE PATH STATE (separated by tabs) for
# each file, where STATE is `ours` or `changed` (by somebody else since, or gone).

main() {
    local list recipe path
    for list in "$(kept_path files '')"*; do
        [[ -f "${list}" && "${list##*/}" =~ ^[a-z-]+$ ]] || continue
        recipe="${list##*/}"
        while read -r path; do
            data file "${recipe}"$'\t'"${path}"$'\t'"$(is_ours "${recipe}" "${path}" && echo ours || echo changed)"
        done < <(list_written "${list}")
    done
}

main "$@"
