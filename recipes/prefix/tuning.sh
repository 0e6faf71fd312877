# shellcheck shell=bash
# Tuned settings in PREFIX/tuning: looked at, or kept. It needs owner.sh, lock.sh, share.sh and trust.sh of prefix/lib before it.
#
# Inputs: PREFIX, TOKEN. Argument `look`: document=NAME TEXT (in base 64) for every document, end=1.
# Argument `keep`, with BASES (NAME SHA256 of each document as the caller saw it, "none" without one, one a line): the tar stream on
# standard input holds these documents and the Python module; each file takes its place by one rename. Results: state=kept; with
# state=stale nothing was changed, since another run kept its own meanwhile.

TUNING="${PREFIX:?}/tuning"
STAGE="${TUNING}/.tmp-tuning-${TOKEN:?}"
# shellcheck disable=SC2034 # read by prefix/lib/lock.sh
LOCK_DIR="${TUNING}"

look() {
    local path
    for path in "${TUNING}"/*.json; do
        [[ "${path##*/}" =~ ^[a-z0-9][a-z0-9._-]*$ && -f "${path}" && -r "${path}" ]] || continue # not a name that we give
        data document "${path##*/}"$'\t'"$(base64 -w 0 -- "${path}")"
    done
    data end 1
}

never() {
    return 1
}

clean_up() {
    local -r code="$?"
    trap '' HUP INT TERM PIPE # whoever ends us may say so twice
    trap - ERR
    rm -rf -- "${STAGE}"
    release_lock
    exit "${code}"
}

# is_unchanged: whether every document is still the one that the caller saw.
is_unchanged() {
    local name wanted found
    while read -r name wanted; do
        found=none
        [[ ! -e "${TUNING}/${name}" ]] || found="$(sha256sum <"${TUNING}/${name}")"
        [[ "${found%% *}" == "${wanted}" ]] || return 1
    done <<<"${BASES}"
}

# place FILE: give a file of the stage its name; one that is the same already stays, and with it what Python compiled of it.
place() {
    local -r file="$1"
    cmp -s -- "${STAGE}/${file}" "${TUNING}/${file}" || mv -fT -- "${STAGE}/${file}" "${TUNING}/${file}"
}

keep() {
    local path
    need_env BASES
    [[ -d "${PREFIX}" ]] || die "there is no directory ${PREFIX}"
    refuse_unsafe
    follow_prefix
    mkdir -p -- "${TUNING}/python" || die "$(id -un) may not write in ${PREFIX}"
    [[ -w "${TUNING}" && -w "${TUNING}/python" ]] || die "$(id -un) may not write in ${TUNING}"
    trap clean_up EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
    announce_ourselves tuning
    mkdir -- "${STAGE}"
    tar -x -f - -C "${STAGE}" --no-same-owner >&2
    chmod -R u+rwX,go+rX,go-w -- "${STAGE}"
    take_lock tuning never
    sweep_leftovers tuning
    if ! is_unchanged; then
        data state stale
        return 0
    fi
    # The module comes last: it is not there before there is something that it can say.
    for path in "${STAGE}"/*.json "${STAGE}"/python/*.py; do
        place "${path#"${STAGE}/"}"
    done
    share_tree "${TUNING}"
    data state kept
}

main() {
    need_env PREFIX TOKEN
    case "${1:-}" in
        look) look ;;
        keep) keep ;;
        *) die "tuning: look or keep, not '${1:-}'" ;;
    esac
}

main "$@"
