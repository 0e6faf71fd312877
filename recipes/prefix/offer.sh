# shellcheck shell=bash
# Publish a generation: the tar stream on standard input becomes generations/<next number>, and `current` points at it. It needs
# prefix/owner.sh and prefix/lock.sh before it.
#
# Inputs: PREFIX, TOKEN, BASE (number of the generation the offer was composed from, 0 for none). The manifest's "generation" is filled in here.
# Results: state=published with generation=NUMBER; state=stale with generation=CURRENT where BASE is no longer current (nothing was
# changed: compose again from that one).

GENERATIONS="${PREFIX:?}/generations"
# shellcheck disable=SC2034 # read by prefix/lock.sh
LOCK_DIR="${GENERATIONS}"
STAGE="${GENERATIONS}/.tmp-offer-${TOKEN:?}"

# find_current: print the number of the current generation, 0 without one.
find_current() {
    local target=""
    target="$(readlink -- "${PREFIX}/current")" || true # no generation yet
    if [[ "${target}" =~ ^generations/([0-9]+)$ ]]; then
        printf '%s\n' "${BASH_REMATCH[1]}"
    else
        [[ -z "${target}" ]] || die "${PREFIX}/current points at ${target}, wanted generations/<number>"
        printf '0\n'
    fi
}

# find_next: print a number above every generation there is; numbers are never used twice while their generation exists.
find_next() {
    local path highest=0
    for path in "${GENERATIONS}"/*/; do
        path="${path%/}"
        path="${path##*/}"
        [[ ! "${path}" =~ ^[0-9]+$ ]] || ((path <= highest)) || highest="${path}"
    done
    printf '%s\n' "$((highest + 1))"
}

# switch_link LINK TARGET: make or change a symbolic link by one rename.
switch_link() {
    local -r link="$1" target="$2"
    [[ "$(readlink -- "${link}")" != "${target}" ]] || return 0
    [[ -L "${link}" || ! -e "${link}" ]] || die "${link} exists and is not a link of ours"
    ln -s -- "${target}" "${link%/*}/.link-${TOKEN}"
    mv -fT -- "${link%/*}/.link-${TOKEN}" "${link}"
}

never() {
    return 1
}

clean_up() {
    local -r code="$?"
    trap '' HUP INT TERM PIPE # whoever ends us may say so twice, and nobody may be listening any more
    trap - ERR
    rm -rf -- "${STAGE}" "${PREFIX}/.link-${TOKEN}"
    release_lock
    exit "${code}"
}

# receive: unpack and complete the stage, with modes that let everybody read.
receive() {
    mkdir -m 0755 -- "${STAGE}"
    tar -x -f - -C "${STAGE}" --no-same-owner >&2
    [[ -s "${STAGE}/manifest.json" ]] || die "the offer holds no manifest.json"
    grep -q '"generation": [0-9]' "${STAGE}/manifest.json" || die "the offer's manifest has no \"generation\""
    chmod -R u+rwX,go+rX,go-w -- "${STAGE}"
}

# publish: give the stage the next free number. The lock keeps others away; a rename onto a number that was taken after all is refused.
publish() {
    local number
    while true; do
        number="$(find_next)"
        sed -i "0,/\"generation\": [0-9]*/s//\"generation\": ${number}/" "${STAGE}/manifest.json"
        ! mv -T -- "${STAGE}" "${GENERATIONS}/${number}" || break
        [[ -e "${GENERATIONS}/${number}" ]] || die "cannot rename the offer to ${GENERATIONS}/${number}"
    done
    switch_link "${PREFIX}/current" "generations/${number}"
    switch_link "${PREFIX}/modulefiles" current/modulefiles
    switch_link "${PREFIX}/sbatch" current/sbatch
    data state published
    data generation "${number}"
}

main() {
    local current
    need_env PREFIX TOKEN BASE
    umask 022
    [[ -d "${GENERATIONS}" && -w "${GENERATIONS}" ]] || die "${GENERATIONS} is not a directory we may write in"
    trap clean_up EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
    announce_ourselves offer
    receive
    take_lock offer never
    sweep_leftovers offer
    current="$(find_current)"
    if [[ "${current}" != "${BASE}" ]]; then
        data state stale
        data generation "${current}"
        return 0
    fi
    publish
}

main "$@"
