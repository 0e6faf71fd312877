# shellcheck shell=bash
# What the host recipes wrote on this host, as far as it is on record. Read-only. Results, their fields separated by tabs: file=RECIPE PATH
# STATE for each file, where STATE is `ours` (also where it stands as before us again) or `changed` (by somebody else since); held=RECIPE
# PACKAGES for the packages that a recipe keeps at their versions; end=1, without which the answer is not whole.

print_whose() {
    if is_ours "$1" "$2" || stands_as_before "$2"; then echo ours; else echo changed; fi
}

main() {
    local list recipe path
    local -a names
    for list in "$(kept_path files '')"*; do
        [[ -f "${list}" && "${list##*/}" =~ ^[a-z-]+$ ]] || continue
        recipe="${list##*/}"
        while read -r path; do
            data file "${recipe}"$'\t'"${path}"$'\t'"$(print_whose "${recipe}" "${path}")"
        done < <(list_written "${list}")
    done
    for list in "$(kept_path held '')"*; do
        [[ -s "${list}" && "${list##*/}" =~ ^[a-z-]+$ ]] || continue
        mapfile -t names <"${list}"
        data held "${list##*/}"$'\t'"${names[*]-}"
    done
    data end 1
}

main "$@"
