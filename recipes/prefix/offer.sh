# shellcheck shell=bash
# Publish a generation: the tar stream on standard input becomes generations/<next number>, and `current` points at it. It needs
# owner.sh, lock.sh, share.sh, trust.sh and current.sh of prefix/lib before it.
#
# Inputs: PREFIX, TOKEN, BASE (number of the generation the offer was composed from, 0 for none), ENTRIES (the store entries it names, one a
# line). The manifest's "generation" is filled in here.
# Results: state=published with generation=NUMBER; state=stale with generation=CURRENT where BASE is no longer current (nothing was
# changed: compose again from that one); state=missing with missing=ENTRY where somebody removed entries meanwhile (nothing was changed).

STAGE="${GENERATIONS:?}/.tmp-offer-${TOKEN:?}"

# find_next: print a number above every generation there is; numbers are never used twice while their generation exists.
find_next() {
    local highest
    highest="$(find_numbers | tail -n 1)"
    printf '%s\n' "$((${highest:-0} + 1))"
}

drop_stage() {
    rm -rf -- "${STAGE}"
}

# receive: unpack and complete the stage, with modes that let everybody read.
receive() {
    mkdir -- "${STAGE}"
    tar -x -f - -C "${STAGE}" --no-same-owner >&2
    [[ -s "${STAGE}/manifest.json" ]] || die "the offer holds no manifest.json"
    grep -q '"generation": [0-9]' "${STAGE}/manifest.json" || die "the offer's manifest has no \"generation\""
    chmod -R u+rwX,go+rX,go-w -- "${STAGE}"
    share_tree "${STAGE}"
}

# publish ENTRY…: give the stage the next free number. The lock keeps others away; a rename onto a number that was taken after all is
# refused. What the manifest says of the entries is true from then on, so none of them is unproved.
publish() {
    local number name tried=0
    while true; do
        number="$(find_next)"
        # A folder that cannot be listed looks empty: the same number would be tried for ever.
        ((number > tried)) || die "cannot list ${GENERATIONS}: it holds ${number}, which the list does not show"
        tried="${number}"
        sed -i "0,/\"generation\": [0-9]*/s//\"generation\": ${number}/" "${STAGE}/manifest.json"
        ! mv -T -- "${STAGE}" "${GENERATIONS}/${number}" || break
        [[ -e "${GENERATIONS}/${number}" ]] || die "cannot rename the offer to ${GENERATIONS}/${number}"
    done
    switch_link "${PREFIX}/current" "generations/${number}"
    for name in modulefiles sbatch bin examples; do
        switch_link "${PREFIX}/${name}" "current/${name}"
    done
    for name in "$@"; do
        [[ -z "${name}" ]] || rm -f -- "${PREFIX}/.unproved-${name}"
    done
    data state published
    data generation "${number}"
}

main() {
    local current name
    local -a entries missing
    need_env PREFIX TOKEN BASE
    [[ -d "${GENERATIONS}" && -w "${GENERATIONS}" ]] || die "${GENERATIONS} is not a directory we may write in"
    refuse_unsafe
    follow_prefix
    let_go_on_exit
    announce_ourselves offer
    receive
    take_lock offer never
    sweep_leftovers offer
    forget_names
    current="$(find_current)"
    readarray -t entries <<<"${ENTRIES:-}"
    readarray -t missing < <(find_missing ${entries[@]+"${entries[@]}"})
    if [[ "${current}" != "${BASE}" ]]; then
        data state stale
        data generation "${current}"
    elif ((${#missing[@]} > 0)); then
        data state missing
        data generation "${current}"
        for name in ${missing[@]+"${missing[@]}"}; do
            data missing "${name}"
        done
    else
        publish ${entries[@]+"${entries[@]}"}
    fi
}

main "$@"
