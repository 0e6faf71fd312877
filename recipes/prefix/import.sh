# shellcheck shell=bash
# Bring store entries that were built elsewhere into the store. It needs owner.sh, lock.sh, share.sh, trust.sh and files.sh of prefix/lib
# before it.
#
# `look`: what there is; changes nothing, and there may be no prefix yet. Results: free=KIB on its filesystem, present=NAME of ENTRIES that
# the store has.
# `receive`: unpack the tar stream on standard input aside: store/<entry> for each of ENTRIES, records/<entry> with the record of its files,
# and at last the file `complete`, without which nothing counts. Then every file is read again and compared with the record, and each entry
# gets its name by one rename. Results: phase=…; imported=NAME, or present=NAME where somebody else was quicker; end=1.
# Inputs: PREFIX, TOKEN, ENTRIES (names, one a line).

STORE="${PREFIX:?}/store"
# shellcheck disable=SC2034 # read by prefix/lib/lock.sh
LOCK_DIR="${STORE}"
STAGE="${STORE}/.tmp-import-${TOKEN:?}"

look() {
    local folder="${STORE}" name
    [[ ! -d "${STORE}" || -w "${STORE}" ]] || die "$(id -un) may not write in ${STORE} (owner $(stat -c %U -- "${STORE}"))"
    until [[ -d "${folder}" ]]; do folder="${folder%/*}" && folder="${folder:-/}"; done
    data free "$(df -Pk -- "${folder}" | awk 'NR == 2 { print $4 }')"
    while IFS= read -r name; do
        [[ ! -d "${STORE}/${name}" ]] || data present "${name}"
    done <<<"${ENTRIES}"
}

# clean_up: on every way out, remove what was not published. Folders that came may be anything but writable.
clean_up() {
    local -r code="$?"
    trap '' HUP INT TERM PIPE # whoever ends us may say so twice, and nobody may be listening any more
    trap - ERR
    set +e
    if [[ -d "${STAGE}" ]]; then
        find "${STAGE}" -type d ! -perm -0700 -exec chmod u+rwx {} +
        rm -rf -- "${STAGE}"
    fi
    release_lock
    exit "${code}"
}

# compare_entry NAME: end here unless what was unpacked is, file by file, what the record says; then the record joins it.
compare_entry() {
    local -r name="$1"
    local -r folder="${STAGE}/store/$1" record="${STAGE}/records/$1"
    local first
    [[ -d "${folder}" && ! -L "${folder}" && -f "${record}" ]] || die "${name} did not come"
    list_files "${folder}" "${STAGE}/parts" >"${STAGE}/found"
    first="$(head -n -1 -- "${record}" | comm -3 --nocheck-order -- - "${STAGE}/found" | sed -n '1{s/^\t//;p}')"
    [[ -z "${first}" ]] || die "${name} is not what the archive says once it is unpacked: ${first}"
    cp -- "${record}" "${folder}/${FILES_RECORD}"
    chmod 0444 -- "${folder}/${FILES_RECORD}"
}

# publish_entry NAME: its one rename; a name that somebody else published meanwhile stays what it is.
publish_entry() {
    local -r name="$1"
    if [[ ! -e "${STORE}/${name}" ]] && mv -T -- "${STAGE}/store/${name}" "${STORE}/${name}"; then
        data imported "${name}"
    elif [[ -d "${STORE}/${name}" ]]; then
        data present "${name}"
    else
        die "cannot rename ${name} to its place in ${STORE}"
    fi
}

receive() {
    local name
    local -a names
    [[ -d "${STORE}" && -w "${STORE}" ]] || die "${STORE} is not a directory we may write in"
    refuse_unsafe
    readarray -t names <<<"${ENTRIES}"
    follow_prefix
    trap clean_up EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 141' PIPE
    trap 'exit 143' TERM
    announce_ourselves import
    sweep_leftovers import
    mkdir -- "${STAGE}"
    tar -x -f - -C "${STAGE}" --no-same-owner >&2 || die "the archive cannot be unpacked in ${STORE} ($(df -Pk -- "${STAGE}" | awk 'NR == 2 { print $4 }') KiB free)"
    [[ -f "${STAGE}/complete" ]] || die "the archive did not come whole"
    data phase compare
    for name in ${names[@]+"${names[@]}"}; do compare_entry "${name}"; done
    share_tree "${STAGE}/store"
    sync -f "${STAGE}"
    data phase publish # nobody there to hear it: nothing is published
    for name in ${names[@]+"${names[@]}"}; do publish_entry "${name}"; done
    data end 1
}

main() {
    need_env PREFIX TOKEN ENTRIES
    case "$1" in
    look) look ;;
    receive) receive ;;
    *) die "unknown word: $1" ;;
    esac
}

main "$@"
