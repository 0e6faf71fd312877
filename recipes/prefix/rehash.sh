# shellcheck shell=bash
# Compare store entries with the record of their files that was made when they were published; change nothing in them. It needs
# prefix/lib/files.sh before it.
#
# Inputs: PREFIX, ENTRIES (names, one a line). Results, for each: entry=NAME first, then state=NAME same|changed|unrecorded|missing, and for a
# changed one lost=LINE and found=LINE: lines of the record that are not true any more, and those that are true instead; record=SHA256 of
# the record itself, for the caller to compare with what a generation says of it; end=1.

STORE="${PREFIX:?}/store"
WORK=""

clean_up() {
    [[ -z "${WORK}" ]] || rm -rf -- "${WORK}"
}

# tell KEY FILE: one result a line of FILE; a tab would separate fields.
tell() {
    local -r key="$1" file="$2"
    local line
    while IFS= read -r line; do
        data "${key}" "${line//$'\t'/\\t}"
    done <"${file}"
}

# compare_entry NAME: print its state and what differs. The record's last line is the sum of the others: damage there is told as such.
compare_entry() {
    local -r name="$1"
    local -r record="${STORE}/${name}/${FILES_RECORD}" old="${WORK}/old" new="${WORK}/new"
    data entry "${name}"
    if [[ ! -d "${STORE}/${name}" ]]; then
        data state missing
    elif [[ ! -e "${record}" ]]; then
        data state unrecorded
    else
        data record "$(sum_of <"${record}")"
        head -n -1 -- "${record}" >"${old}"
        list_files "${STORE}/${name}" "${WORK}/parts" >"${new}" || say "not all files of ${name} can be read"
        : >"${WORK}/lost"
        if [[ "$(tail -n 1 -- "${record}")" != "# sum $(sum_of <"${old}")" ]]; then
            printf '# record %s\n' "${FILES_RECORD}" >"${WORK}/lost"
        fi
        comm --nocheck-order -23 -- "${old}" "${new}" >>"${WORK}/lost"
        comm --nocheck-order -13 -- "${old}" "${new}" >"${WORK}/found"
        if [[ -s "${WORK}/lost" || -s "${WORK}/found" ]]; then data state changed; else data state same; fi
        tell lost "${WORK}/lost"
        tell found "${WORK}/found"
    fi
}

main() {
    local name
    need_env PREFIX ENTRIES
    [[ -d "${STORE}" ]] || die "${PREFIX} is not a prefix of ours: there is no ${STORE}"
    WORK="$(mktemp -d)"
    trap clean_up EXIT
    while IFS= read -r name; do
        compare_entry "${name}"
    done <<<"${ENTRIES}"
    data end 1
}

main "$@"
