# shellcheck shell=bash
# Make another generation the current one by one rename. It needs owner.sh, lock.sh, share.sh, trust.sh and current.sh of prefix/lib
# before it.
#
# Who did it and when is kept in PREFIX/.rolled-back, for `invoke status`; the line is written first, and counts while TO is current.
# Inputs: PREFIX, TOKEN, BASE (the generation that is current as far as the caller knows), TO (the one to be), ENTRIES (the store entries
# that one needs, one a line), BY (who asked for it; perhaps nobody). Results: state=switched; nothing was changed with state=stale (another one became current meanwhile:
# generation=CURRENT), state=absent (there is no generation TO any more) and state=missing with missing=ENTRY (entries that are gone).

drop_stage() {
    return 0
}

main() {
    local current name
    local -r by="${BY:-}"
    local -a entries missing
    need_env PREFIX TOKEN BASE TO
    [[ "${TO}" =~ ^[1-9][0-9]*$ ]] || die "rollback: bad number '${TO}'"
    need_generations
    refuse_unsafe
    follow_prefix
    let_go_on_exit
    take_lock offer never
    sweep_leftovers offer
    forget_names
    current="$(find_current)"
    readarray -t entries <<<"${ENTRIES:-}"
    readarray -t missing < <(find_missing ${entries[@]+"${entries[@]}"})
    if [[ "${current}" != "${BASE}" ]]; then
        data state stale
    elif [[ ! -s "${GENERATIONS}/${TO}/manifest.json" ]]; then
        data state absent
    elif ((${#missing[@]} > 0)); then
        data state missing
        for name in ${missing[@]+"${missing[@]}"}; do
            data missing "${name}"
        done
    else
        write_file "${PREFIX}/.rolled-back" 644 <<<"${BASE}"$'\t'"${TO}"$'\t'"$(date -u +%Y-%m-%dT%H:%M:%SZ)"$'\t'"${by//[[:cntrl:]]/ }"
        switch_link "${PREFIX}/current" "generations/${TO}"
        current="${TO}"
        data state switched
    fi
    data generation "${current}"
}

main "$@"
