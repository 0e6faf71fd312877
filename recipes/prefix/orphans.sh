# shellcheck shell=bash
# What build sessions of this account left that are gone: Slurm allocations, scratch folders on this host, descriptions in the store. It
# needs owner.sh, living.sh and scratch.sh of prefix/lib before it.
#
# `jobs`: ask Slurm alone. Results: job=NUMBER for every allocation of ours, dead or alive; end=1.
# `look`: change nothing. Results, with WHO the session was of (HOST pid N since TIME): job=NUMBER STATE NODES WHO and scratch=FOLDER WHO of
# dead ones; ending=NUMBER (cancelled, its node not yet free); living=NUMBER; unknown=NUMBER STATE NODES FOLDER (asked for in a folder that
# is not here); owner=NAME WHO (a description whose owner is dead), elsewhere=NAME HOST WHO (one that HOST can judge); host=NAME of this one; slurm=silent; end=1.
# `remove`: cancel those allocations, remove those folders and the descriptions of this host's sessions. Results: removed=PATH, stuck=PATH;
# end=1.
# Input: PREFIX.

# describe TEXT: print who an owner is, for people.
describe() {
    printf '%s pid %s since %s' "$(owner_field "$1" host)" "$(owner_field "$1" pid)" "$(owner_field "$1" since)" | tr '\t' ' '
}

# read_owner FILE: print a description; nothing for one that is let go meanwhile.
read_owner() {
    cat -- "$1" 2>/dev/null || true # let go meanwhile
}

# look_at_jobs DEAD: tell of each allocation whose it is. DEAD: scratch folders of dead sessions, one a line.
look_at_jobs() {
    local -r dead="$1"
    local listed number state nodes folder
    local -A here=()
    if ! listed="$(list_jobs)"; then
        data slurm silent
        return 0
    fi
    while IFS= read -r folder; do
        number="$(read_number "${folder}")"
        [[ -z "${number}" ]] || here["${number}"]="${folder}"
    done < <(list_scratch)
    while IFS='|' read -r number state nodes folder; do
        [[ "${number}" =~ ^[0-9]+$ ]] || continue
        folder="${here["${number}"]:-${folder}}"
        if [[ "${state}" == COMPLETING ]]; then
            data ending "${number}"
        elif ! is_private "${folder}"; then
            data unknown "${number}"$'\t'"${state}"$'\t'"${nodes}"$'\t'"${folder//$'\t'/ }"
        elif [[ $'\n'"${dead}"$'\n' == *$'\n'"${folder}"$'\n'* ]]; then
            data job "${number}"$'\t'"${state}"$'\t'"${nodes}"$'\t'"$(describe "$(read_owner "${folder}/.owner")")"
        else
            data living "${number}"
        fi
    done <<<"${listed}"
}

# look_at_owners: tell of the descriptions in the store whose owners are gone, and of those that are another host's to judge.
look_at_owners() {
    local path text host
    local -a ours=()
    for path in "${STORE}"/.own-*; do
        [[ -f "${path}" ]] || continue
        text="$(read_owner "${path}")"
        host="$(owner_field "${text}" host)"
        if [[ "${host}" == "$(uname -n)" ]]; then
            ours+=("${path}")
        elif [[ -n "${text}" ]]; then
            data elsewhere "${path##*/}"$'\t'"${host//$'\t'/ }"$'\t'"$(describe "${text}")"
        fi
    done
    ((${#ours[@]} > 0)) || return 0
    find_dead 30 ${ours[@]+"${ours[@]}"} | while IFS= read -r path; do
        data owner "${path##*/}"$'\t'"$(describe "$(read_owner "${path}")")"
    done
}

look() {
    local dead folder
    data host "$(uname -n)"
    dead="$(find_dead_scratch)"
    [[ -z "${dead}" ]] || while IFS= read -r folder; do
        data scratch "${folder}"$'\t'"$(describe "$(read_owner "${folder}/.owner")")"
    done <<<"${dead}"
    ! command -v squeue >/dev/null || look_at_jobs "${dead}"
    look_at_owners
}

remove() {
    local folder
    find_dead_sessions | while IFS= read -r folder; do
        if remove_session "${folder}"; then data removed "${folder}"; else data stuck "${folder}"; fi
    done
}

list_numbers() {
    local number
    list_jobs | while IFS='|' read -r number _; do data job "${number}"; done
}

main() {
    need_env PREFIX
    case "${1:-}" in
    jobs) list_numbers ;;
    look) look ;;
    remove) remove ;;
    *) die "orphans: jobs, look or remove, not '${1:-}'" ;;
    esac
    data end 1
}

main "$@"
