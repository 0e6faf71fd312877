# shellcheck shell=bash
# Remove generations and store entries that the caller chose. It needs owner.sh, lock.sh, share.sh, current.sh and
# living.sh of prefix/lib before it.
#
# Everything goes out of its name by one rename first, then it is looked again who needs it, and only then it is deleted: whoever announced
# itself before it saw an entry keeps that entry, and a kill at any moment leaves a valid store.
# Inputs: PREFIX, TOKEN, SEEN (what the caller chose from: the current number, then all numbers), DROP (numbers of generations, one a line),
# ENTRIES (names, one a line).
# Results: state=collected, or state=stale (generations came or went meanwhile: nothing was removed, look again); dropped=NUMBER,
# removed=ENTRY, kept=ENTRY WHO (in use), swept=NAME (a leftover), stuck=PATH
# (could not be removed).

# show_generations: print the current number, then all numbers, in one line.
show_generations() {
    local current numbers
    current="$(find_current)" || exit 1
    numbers="$(find_numbers | tr '\n' ' ')"
    printf '%s: %s\n' "${current}" "${numbers% }"
}

drop_stage() {
    put_back ""
}

# is_plain NAME: whether a name is one that may stand in the store; hidden ones and paths are not.
is_plain() {
    [[ "$1" =~ ^[A-Za-z0-9][A-Za-z0-9._+-]*$ ]]
}

# set_aside: move what is to go out of its name. Names with "gone" belong to nobody: no builder sweeps them.
set_aside() {
    local name
    for name in ${DROPPED[@]+"${DROPPED[@]}"}; do
        mv -T -- "${GENERATIONS}/${name}" "${GENERATIONS}/.trash-offer-${name}-${TOKEN}"
    done
    for name in ${REMOVED[@]+"${REMOVED[@]}"}; do
        mv -T -- "${STORE}/${name}" "${STORE}/.gone-${name}-${TOKEN}"
    done
}

# put_back NAMES: give those entries their names again that stand in the lines NAMES, all and the generations too where NAMES is empty.
# Where a name was taken meanwhile, a builder was quicker, and ours is not needed.
put_back() {
    local -r names="$1"
    local name
    for name in ${REMOVED[@]+"${REMOVED[@]}"}; do
        [[ -z "${names}" || $'\n'"${names}" == *$'\n'"${name}"$'\t'* ]] || continue
        mv -T -- "${STORE}/.gone-${name}-${TOKEN}" "${STORE}/${name}" 2>/dev/null || true # never moved, or replaced
    done
    [[ -z "${names}" ]] || return 0
    for name in ${DROPPED[@]+"${DROPPED[@]}"}; do
        mv -T -- "${GENERATIONS}/.trash-offer-${name}-${TOKEN}" "${GENERATIONS}/${name}" 2>/dev/null || true # never moved
    done
}

# choose: fill DROPPED and REMOVED with what the caller named, is there, and nobody uses.
choose() {
    local -r used="$1"
    local name line
    for name in ${DROP:-}; do
        [[ "${name}" =~ ^[1-9][0-9]*$ && "${name}" != "$(find_current)" ]] || die "gc: generation '${name}' cannot be removed"
        DROPPED+=("${name}")
    done
    for name in ${ENTRIES:-}; do
        is_plain "${name}" || die "gc: '${name}' is no name of an entry"
        if line="$(grep -m 1 -F -- "${name}"$'\t' <<<"${used}")"; then
            data kept "${line}"
        elif [[ -d "${STORE}/${name}" ]]; then
            REMOVED+=("${name}")
        fi
    done
}

# keep_what_is_used USED: put entries back that somebody began to use while they were moved.
keep_what_is_used() {
    local -r used="$1"
    local name line
    local -a gone=()
    [[ -z "${used}" ]] || put_back "${used}"
    for name in ${REMOVED[@]+"${REMOVED[@]}"}; do
        if line="$(grep -m 1 -F -- "${name}"$'\t' <<<"${used}")"; then data kept "${line}"; else gone+=("${name}"); fi
    done
    REMOVED=(${gone[@]+"${gone[@]}"})
}

DROPPED=()
REMOVED=()

# expect_generations: print what show_generations must say now that DROPPED are moved.
expect_generations() {
    local number
    local -a left=()
    for number in ${SEEN#*:}; do
        [[ " ${DROPPED[*]-} " == *" ${number} "* ]] || left+=("${number}")
    done
    printf '%s: %s\n' "${SEEN%%:*}" "${left[*]-}"
}

# finish DEAD: delete what is out of its name, and what dead owners left.
finish() {
    local -r dead="$1"
    local -ra dropped=(${DROPPED[@]+"${DROPPED[@]}"}) removed=(${REMOVED[@]+"${REMOVED[@]}"})
    local name
    DROPPED=() REMOVED=() # nothing of it is put back from here on
    for name in ${dropped[@]+"${dropped[@]}"}; do
        ! delete_tree "${GENERATIONS}/.trash-offer-${name}-${TOKEN}" || data dropped "${name}"
    done
    for name in ${removed[@]+"${removed[@]}"}; do
        ! delete_tree "${STORE}/.gone-${name}-${TOKEN}" || data removed "${name}"
    done
    sweep "${dead}"
}

main() {
    local dead found
    local -a owners
    need_env PREFIX TOKEN SEEN
    need_generations
    [[ -w "${STORE}" ]] || die "$(id -un) may not write in ${STORE} (owner $(stat -c %U -- "${STORE}"), mode $(stat -c %a -- "${STORE}"))"
    refuse_unsafe
    follow_prefix
    let_go_on_exit
    take_lock offer never
    sweep_leftovers offer
    forget_names
    found="$(show_generations)"
    if [[ "${found}" != "${SEEN}" ]]; then
        data state stale
        return 0
    fi
    readarray -t owners < <(find_owners)
    dead="$(find_dead 30 ${owners[@]+"${owners[@]}"})"
    choose "$(find_used "${dead}")"
    set_aside
    if [[ "$(show_generations)" != "$(expect_generations)" ]]; then
        data state stale # our lock was taken for dead; on the way out everything gets its name back
        return 0
    fi
    keep_what_is_used "$(find_used "${dead}")"
    release_lock
    finish "${dead}"
    data state collected
}

main "$@"
