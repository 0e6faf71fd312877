# shellcheck shell=bash
# Publish one store entry: look, lock, look again, build aside, check, rename once. It needs owner.sh, lock.sh, share.sh,
# files.sh and manifest.sh of prefix/lib and build/common.sh before it and a build/<kind>.sh after it, which defines
# build_entry and check_entry and calls main.
#
# Inputs: PREFIX, ENTRY (name of the entry), TOKEN, SCRATCH (node-local, of this run), PYTHON (3.6 or newer, standard library only),
# MANIFEST (JSON text), SRC (source tree, "" for none), JOBS (0: as many as processors and free memory allow). Results: state=published|present,
# phase=…, waiting=….

STORE="${PREFIX:?}/store"
# shellcheck disable=SC2034 # read by prefix/lib/lock.sh
LOCK_DIR="${STORE}"
EARLY="${SCRATCH:?}/early"
OUT="${STORE}/.tmp-${ENTRY:?}-${TOKEN:?}"

# begin_phase NAME: tell the engine how far we are.
begin_phase() {
    data phase "$1"
}

# rename_into_place: the one step that publishes. A rename onto a folder that holds something fails, which is what tells that another
# builder was first.
rename_into_place() {
    if "${PYTHON}" -c 'import os, sys; os.rename(sys.argv[1], sys.argv[2])' "${OUT}" "${STORE}/${ENTRY}" 2>"${SCRATCH}/rename-${ENTRY}"; then
        data state published
    elif is_published "${ENTRY}"; then
        say "another builder published ${ENTRY} first; that one is used"
        data state present
    else
        die "cannot rename ${OUT} to ${ENTRY}: $(tail -n 1 "${SCRATCH}/rename-${ENTRY}")"
    fi
}

relocate() {
    "${PYTHON}" "${SCRATCH}/bin/relocate.py" "${OUT}" "${STORE}" "${SCRATCH}"
}

# build_and_publish: from sources to a name in the store; the lock is ours.
build_and_publish() {
    local -r start="${SECONDS}"
    mkdir -- "${OUT}"
    begin_phase build
    say "== build of ${ENTRY}"
    run_logged build_traced
    begin_phase relocate
    run_logged relocate
    begin_phase check
    run_logged check_entry
    write_manifest "$((SECONDS - start))"
    find "${OUT}" \( -type f -exec chmod a-w,a+r {} + \) -o \( -type d -exec chmod a+rx,o-w {} + \)
    share_tree "${OUT}"
    record_files "${OUT}" "${SCRATCH}/files-${ENTRY}"
    begin_phase publish
    sync -f "${OUT}"
    rename_into_place
}

# explain_full PATH: say so when a filesystem has no room left; a compiler's own message about it is often hard to see.
explain_full() {
    local -r path="$1"
    local free
    free="$(df -Pk -- "${path}" | awk 'NR == 2 { print $4 }')"
    ((free >= 1024)) || say "error: no space left on the filesystem of ${path} (${free} KiB free)"
}

# clean_up: on every way out, remove what is not published and let the lock go.
clean_up() {
    local -r code="$?"
    trap '' HUP INT TERM PIPE # whoever ends us may say so twice, and nobody may be listening any more
    trap - ERR
    set +e
    if ((code != 0)) && [[ -e "${OUT}" ]]; then
        explain_full "${STORE}"
        explain_full "${SCRATCH}"
    fi
    rm -rf -- "${OUT}"
    release_lock
    exit "${code}"
}

main() {
    need_env PREFIX ENTRY TOKEN SCRATCH PYTHON MANIFEST
    [[ -d "${STORE}" && -w "${STORE}" ]] || die "${STORE} is not a directory we may write in"
    if is_published "${ENTRY}"; then
        data state present
        return 0
    fi
    follow_prefix
    trap clean_up EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
    mkdir -p -- "${EARLY}"
    printf '%s %s\n' "$$" "$(find_start "$$")" >"${EARLY}/${ENTRY}.builder"
    renice -n 10 -p "$$" >/dev/null 2>&1 || true # nicer than that already: fine
    clear_environment
    [[ "${JOBS:-0}" != 0 ]] || JOBS="$(count_jobs)"
    if ! take_lock "${ENTRY}" is_published "${ENTRY}" || is_published "${ENTRY}"; then
        data state present
        return 0
    fi
    sweep_leftovers "${ENTRY}"
    build_and_publish
}
