# shellcheck shell=bash
# Who works in the store right now, and what those left who do not any more. It needs owner.sh before it. Input: PREFIX, HEARTBEAT.
#
# Every process that makes something in the store first puts its description there (.own-<name>-<token>) and keeps it beating. That of a
# build session also has a line entry=… for every entry that the session builds or builds against.

STORE="${PREFIX:?}/store"

# find_owners: print the paths of all descriptions and locks in the store.
find_owners() {
    find "${STORE}" -mindepth 1 -maxdepth 1 -type f \( -name '.own-*' -o -name '.lock-*' \)
}

# find_dead PAUSES FILE…: print those descriptions whose owner is gone. One that this host cannot judge is gone when its text stays the
# same over PAUSES tenths of a heartbeat (30: three intervals, as for a lock), and lives as long as we do not look that long (0).
find_dead() {
    local -r pauses="$1"
    shift
    local -A first=()
    local path text tick
    for path in "$@"; do
        text="$(cat -- "${path}" 2>/dev/null)" || continue # let go meanwhile
        if is_dead "${text}"; then
            printf '%s\n' "${path}"
        elif ! is_here "${text}"; then
            first["${path}"]="${text}"
        fi
    done
    for ((tick = 0; tick < pauses && ${#first[@]} > 0; tick++)); do
        sleep "$(awk -v beat="${HEARTBEAT:-10}" 'BEGIN { print beat / 10 }')"
        for path in "${!first[@]}"; do
            text="$(cat -- "${path}" 2>/dev/null)" || true # let go meanwhile: not the text we know
            [[ "${text}" == "${first[${path}]}" ]] || unset "first[${path}]"
        done
    done
    ((pauses == 0)) || ((${#first[@]} == 0)) || printf '%s\n' "${!first[@]}"
}

# find_used DEAD: print ENTRY, a tab and who uses it, for every entry named in a description that is not among the lines DEAD.
find_used() {
    local -r dead="$1"
    local path text line
    for path in "${STORE}"/.own-*; do
        [[ -e "${path}" && $'\n'"${dead}"$'\n' != *$'\n'"${path}"$'\n'* ]] || continue
        text="$(cat -- "${path}" 2>/dev/null)" || continue # ended meanwhile
        while IFS= read -r line; do
            [[ "${line}" != entry=* ]] ||
                printf '%s\t%s pid %s since %s\n' "${line#entry=}" "$(owner_field "${text}" host)" "$(owner_field "${text}" pid)" "$(owner_field "${text}" since)"
        done <<<"${text}"
    done
}

# find_leftovers DEAD: print the names of trees in the store that nobody will finish. A tree under construction has its owner's description
# beside it from before it was begun until after it is gone.
find_leftovers() {
    local -r dead="$1"
    local path own
    for path in "${STORE}"/.tmp-* "${STORE}"/.trash-* "${STORE}"/.gone-*; do
        [[ -e "${path}" && "${path}" != *-"${TOKEN:-}" ]] || continue
        own="${STORE}/.own-${path##*/.tmp-}"
        if [[ "${path}" != */.tmp-* || ! -e "${own}" || $'\n'"${dead}"$'\n' == *$'\n'"${own}"$'\n'* ]]; then
            printf '%s\n' "${path##*/}"
        fi
    done
}

# delete_tree PATH: remove a read-only tree, on this filesystem alone; what is left is said and is there for the next time.
delete_tree() {
    local -r path="$1"
    find "${path}" -type d ! -perm -0700 -exec chmod u+rwx {} + 2>/dev/null || true # another owner's: the removal tells
    if ! rm -rf --one-file-system -- "${path}"; then
        data stuck "${path}"
        return 1
    fi
}

# sweep DEAD: remove what dead owners left in the store, and the locks they hold. It needs lock.sh.
sweep() {
    local -r dead="$1"
    local path name
    find_leftovers "${dead}" | while IFS= read -r name; do
        # Under another name first: should its owner live after all, it cannot publish a folder that is being emptied.
        path="${STORE}/.gone-${name#.}-${TOKEN}"
        ! mv -T -- "${STORE}/${name}" "${path}" 2>/dev/null || ! delete_tree "${path}" || data swept "${name}"
    done
    while IFS= read -r path; do
        case "${path##*/}" in
        .lock-*)
            # shellcheck disable=SC2030,SC2034 # read by break_lock, for this one lock
            (LOCK_DIR="${STORE}" LOCK="${path}" && break_lock "${path##*/.lock-}" "$(cat -- "${path}")" "its owner is gone")
            ;;
        .own-*) rm -f -- "${path}" ;;
        esac
    done <<<"${dead}"
}
