# shellcheck shell=bash
# The generations of a prefix and the link that names the current one. It needs owner.sh and lock.sh before it; who changes
# generations holds the lock "offer". Inputs: PREFIX, TOKEN.

GENERATIONS="${PREFIX:?}/generations"
STORE="${PREFIX}/store"
# shellcheck disable=SC2034 # read by prefix/lib/lock.sh
LOCK_DIR="${GENERATIONS}"

# find_current: print the number of the current generation, 0 without one.
find_current() {
    local target=""
    if ! target="$(readlink -v -- "${PREFIX}/current" 2>&1)"; then
        # No generation yet, or something of that name that is no link: not a filesystem that fails.
        [[ "${target}" =~ (No such file or directory|Invalid argument)$ ]] || die "cannot read the link ${PREFIX}/current: ${target##*: }"
        target=""
    fi
    if [[ "${target}" =~ ^generations/([0-9]+)$ ]]; then
        printf '%s\n' "${BASH_REMATCH[1]}"
    else
        [[ -z "${target}" ]] || die "${PREFIX}/current points at ${target}, wanted generations/<number>"
        printf '0\n'
    fi
}

# find_numbers: print the number of every generation, ascending, one a line.
find_numbers() {
    local path
    for path in "${GENERATIONS}"/*/; do
        path="${path%/}"
        path="${path##*/}"
        [[ ! "${path}" =~ ^[1-9][0-9]*$ ]] || printf '%s\n' "${path}"
    done | sort -n
}

# find_missing NAME…: print those names that are no entries of the store; an empty one names nothing.
find_missing() {
    local name
    for name in "$@"; do
        [[ -z "${name}" || -d "${STORE}/${name}" ]] || printf '%s\n' "${name}"
    done
}

# switch_link LINK TARGET: make or change a symbolic link by one rename.
switch_link() {
    local -r link="$1" target="$2"
    [[ "$(readlink -- "${link}")" != "${target}" ]] || return 0
    [[ -L "${link}" || ! -e "${link}" ]] || die "${link} exists and is not a link of ours"
    ln -s -- "${target}" "${link%/*}/.link-${TOKEN:?}"
    mv -fT -- "${link%/*}/.link-${TOKEN}" "${link}"
}

never() {
    return 1
}

# forget_names: make a network filesystem ask its server again which generation is current and which entries there are. For up to a
# minute it answers from memory, also that a name is not there; but not for a folder in which this host has just made a name itself.
# Whoever decides by such names does this first, when the lock is his.
forget_names() {
    local folder
    for folder in "${PREFIX}" "${STORE}"; do
        [[ -d "${folder}" ]] || continue
        # Where we cannot write (another owner's, a full disk), opening the folder makes most ask as well.
        { : >"${folder}/.fresh-${TOKEN:?}"; } 2>/dev/null || ls -a -- "${folder}" >/dev/null
        rm -f -- "${folder}/.fresh-${TOKEN}"
    done
}

# need_generations: end here unless we may change generations.
need_generations() {
    [[ -d "${GENERATIONS}" ]] || die "nothing was ever offered in ${PREFIX}: there is no ${GENERATIONS}"
    [[ -w "${GENERATIONS}" && -w "${PREFIX}" ]] ||
        die "$(id -un) may not write in ${GENERATIONS} (owner $(stat -c %U -- "${GENERATIONS}"), mode $(stat -c %a -- "${GENERATIONS}"))"
}

# let_go_on_exit: let the lock go on every way out; what a recipe leaves then is removed by its own `drop_stage`.
let_go_on_exit() {
    trap clean_up EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
}

clean_up() {
    local -r code="$?"
    trap '' HUP INT TERM PIPE # whoever ends us may say so twice, and nobody may be listening any more
    trap - ERR
    set +e
    drop_stage
    rm -f -- "${PREFIX}/.link-${TOKEN}" "${PREFIX}/.fresh-${TOKEN}" "${STORE}/.fresh-${TOKEN}"
    release_lock
    exit "${code}"
}
