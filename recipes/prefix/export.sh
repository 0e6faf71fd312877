# shellcheck shell=bash
# Read store entries for an archive; change nothing in them. It needs prefix/lib/files.sh before it.
#
# `list`: what is in the entries ENTRIES (names, one a line), as fields that end with NUL: entry NAME; for each thing below it its type (f,
# d, l, or another letter of find -printf %y), mode, size, path and link target; record TEXT, the record of its files made when it was
# published, without it the same made now; end. `read`: the contents of the files whose paths in the store come on standard input, each
# ended by NUL, one behind the other. Standard output is bytes, not data lines. Inputs: PREFIX, and ENTRIES for `list`.

STORE="${PREFIX:?}/store"
WORK=""

clean_up() {
    [[ -z "${WORK}" ]] || rm -rf -- "${WORK}"
}

# list_entry NAME: print one entry.
list_entry() {
    local -r folder="${STORE}/$1"
    local foreign
    [[ -d "${folder}" ]] || die "there is no entry $1 in ${STORE}"
    foreign="$(find "${folder}" -maxdepth 0 -perm -0002 -printf 'others may write in it')"
    [[ -n "${foreign}" ]] || foreign="$(find "${folder}" -mindepth 1 ! -uid "$(stat -c %u -- "${folder}")" -printf '%P belongs to %u' -quit)"
    [[ -z "${foreign}" ]] || die "$1 is not as it was published, invoke verify --store names what differs: ${foreign}"
    printf 'entry\0%s\0' "$1"
    find "${folder}" -mindepth 1 ! -path "${folder}/${FILES_RECORD}" -printf '%y\0%m\0%s\0%P\0%l\0'
    printf 'record\0'
    if [[ -e "${folder}/${FILES_RECORD}" ]]; then
        cat -- "${folder}/${FILES_RECORD}"
    else
        list_files "${folder}" "${WORK}/parts"
    fi
    printf '\0'
}

list_entries() {
    local name
    need_env ENTRIES
    WORK="$(mktemp -d)"
    trap clean_up EXIT
    while IFS= read -r name; do
        list_entry "${name}"
    done <<<"${ENTRIES}"
    printf 'end\0'
}

main() {
    [[ -d "${STORE}" ]] || die "${PREFIX} is not a prefix of ours: there is no ${STORE}"
    case "$1" in
    list) list_entries ;;
    read) cd -- "${STORE}" && xargs -0 -r cat -- ;;
    *) die "unknown word: $1" ;;
    esac
}

main "$@"
