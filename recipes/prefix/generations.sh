# shellcheck shell=bash
# Look at the generations and the store; change nothing. It needs owner.sh, lock.sh, current.sh, living.sh and files.sh of
# prefix/lib before it.
#
# Inputs: PREFIX, TOKEN, LOCKS (1: with the lock file of every generation), METADATA (1: with what wheels say of themselves). Results: current=NUMBER; generation=NUMBER MANIFEST LOCK and
# entry=NAME BYTES MANIFEST RECORD (texts in base 64, BYTES may be empty, RECORD is the SHA-256 of files.sha256, or empty); used=ENTRY WHO; leftover=NAME BYTES;
# rolled_back=FROM TO TIME BY, the last rollback; metadata=ENTRY HEADERS, what the entry's wheels say of name, version and licence (base 64); end=1.

# text_of FILE: print a file in base 64 on one line; nothing where it is not there.
text_of() {
    [[ ! -r "$1" ]] || base64 -w 0 -- "$1"
}

# recorded_size FOLDER: print the size that an entry's manifest gives; that of its files where it has none.
recorded_size() {
    local found
    found="$(sed -n 's/^  "bytes": \([0-9][0-9]*\).*/\1/p' "$1/manifest.json" 2>/dev/null)" || true # no manifest
    printf '%s\n' "${found:-$(size_of "$1")}"
}

# sum_of_record FOLDER: print the SHA-256 of the record of an entry's files; nothing where there is none.
sum_of_record() {
    [[ ! -r "$1/${FILES_RECORD}" ]] || sum_of <"$1/${FILES_RECORD}"
}

# find_metadata FOLDER: print name, version and licence of each wheel that is unpacked in an entry, as its METADATA has them, with an empty
# line between two. Of a licence that is there as a whole text, the beginning is enough; wheels have up to 50 KiB of it.
find_metadata() {
    local path
    local -a files=()
    for path in "$1"/lib/python3*/site-packages/*.dist-info/METADATA "$1"/share/*.dist-info/METADATA; do
        [[ ! -f "${path}" || ! -r "${path}" ]] || files+=("${path}")
    done
    ((${#files[@]})) || return 0 # no wheels in it
    LC_ALL=C awk '
        { sub(/\r$/, "") }
        FNR == 1 { body = 0; keep = 0; if (NR > 1) print "" }
        /^$/ { body = 1 } # the description
        body { next }
        /^[^ \t]/ { more = 0; keep = tolower($0) ~ /^(name|version|license|license-expression):|^classifier: license ::/ }
        /^[ \t]/ { more += 1 }
        keep && more < 3 { print substr($0, 1, 500) }
    ' ${files[@]+"${files[@]}"}
}

main() {
    local number path dead name lock=""
    need_env PREFIX TOKEN
    [[ -d "${PREFIX}" ]] || die "there is no directory ${PREFIX}"
    [[ -d "${GENERATIONS}" && -d "${STORE}" ]] || die "${PREFIX} is not a prefix of ours: bootstrap makes one"
    data current "$(find_current)"
    for number in $(find_numbers); do
        [[ -z "${LOCKS:-}" ]] || lock="$(text_of "${GENERATIONS}/${number}/deepep.lock.toml")"
        data generation "${number}"$'\t'"$(text_of "${GENERATIONS}/${number}/manifest.json")"$'\t'"${lock}"
    done
    for path in "${STORE}"/*/; do
        path="${path%/}"
        [[ -d "${path}" ]] || continue # an empty store
        data entry "${path##*/}"$'\t'"$(recorded_size "${path}")"$'\t'"$(text_of "${path}/manifest.json")"$'\t'"$(sum_of_record "${path}")"
        [[ -z "${METADATA:-}" ]] || data metadata "${path##*/}"$'\t'"$(find_metadata "${path}" | base64 -w 0)"
    done
    dead="$(find_owners | while IFS= read -r path; do find_dead 0 "${path}"; done)"
    find_used "${dead}" | while IFS= read -r name; do data used "${name}"; done
    find_leftovers "${dead}" | while IFS= read -r name; do data leftover "${name}"$'\t'"$(size_of "${STORE}/${name}")"; done
    # A line of another form is nothing that rollback.sh wrote.
    ! grep -sqE $'^[0-9]{1,9}\t[0-9]{1,9}\t[0-9-]{10}T[0-9:]{8}Z\t' "${PREFIX}/.rolled-back" ||
        data rolled_back "$(head -n 1 "${PREFIX}/.rolled-back")"
    data end 1
}

main "$@"
