# shellcheck shell=bash
# What the host recipes wrote on this host, as far as it is on record. Read-only. Input: MODULEFILES, the directory of the prefix that asks.
# Results, their fields separated by tabs: file=RECIPE PATH STATE for each file, where STATE is `ours`, `replaced` (ours as well, and what
# stood there before is kept) or `changed` (by somebody else since); held=RECIPE PACKAGES for the packages that a recipe keeps at their
# versions; hook=FOLDER and heir=FOLDER, what the MODULEPATH hook names and what it goes back to when our prefix leaves, both perhaps empty;
# end=1, without which the answer is not whole. files.sh and hook.sh stand before this text.

# print_whose RECIPE PATH: also ours where it stands as before us again.
print_whose() {
    if ! is_ours "$1" "$2" && ! stands_as_before "$2"; then
        echo changed
    elif exists "$(kept_path originals "$2")"; then
        echo replaced
    else
        echo ours
    fi
}

main() {
    local list recipe path
    local -a names
    need_env MODULEFILES
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
    data hook "$(named_folder || :)" # there may be none
    data heir "$(print_heir "${MODULEFILES}")"
    data end 1
}

main "$@"
