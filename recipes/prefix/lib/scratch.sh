# shellcheck shell=bash
# Scratch folders of build sessions on this host and the Slurm allocations that belong to them; what dead sessions left of both. It needs
# owner.sh and living.sh before it.
#
# A session's scratch is BASE/deepep-UID/deepep-scratch-RANDOM: the folder above it is this account's alone, so nobody else can put
# anything there that we would believe, follow or delete. An allocation is asked for in the session's scratch folder, which Slurm keeps
# (WorkDir): so every job called deepep-build says whose it is, also one of which salloc did not live to say the number.

JOB_NAME="deepep-build"
SLURM_LIMIT=20 # seconds for an answer of Slurm's controller, whose own limit (MessageTimeout) is 10 as a rule

# is_private PATH: a folder and no link, of this account, which nobody else may enter.
is_private() {
    local -r path="${1%/}"
    [[ ! -L "${path}" && -d "${path}" && -O "${path}" && "$(stat -c %a -- "${path}")" =~ ^[0-7]?700$ ]]
}

# is_trusted BASE: whether nobody but root and us can rename what we make there.
is_trusted() {
    local -r base="$1"
    [[ "$(stat -c %u -- "${base}")" == 0 || -O "${base}" ]] && [[ -k "${base}" || -z "$(find "${base}" -maxdepth 0 -perm /022)" ]]
}

# list_bases: print the folders in which scratch may be, each once and as the kernel calls it.
list_bases() {
    local base
    for base in "${TMPDIR:-}" /var/tmp /tmp; do
        [[ -z "${base}" || ! -d "${base}" ]] || realpath -e -- "${base}" || true # gone meanwhile
    done | awk '!seen[$0]++'
}

# open_room BASE: print this account's own folder there, made where it is missing. Where somebody else has its name, it gets another one.
open_room() {
    local -r room="$1/deepep-${UID}"
    mkdir -m 0700 -- "${room}" 2>/dev/null || true # it is looked at next
    if is_private "${room}"; then
        printf '%s\n' "${room}"
    else
        warn "${room} is not a folder of $(id -un) alone ($(stat -c '%F of %U, mode %a' -- "${room}" 2>&1)): it is left alone"
        mktemp -d "${room}.XXXXXXXX"
    fi
}

# list_scratch: print the scratch folders of this account on this host.
list_scratch() {
    local base room folder
    list_bases | while IFS= read -r base; do
        is_trusted "${base}" || continue
        for room in "${base}/deepep-${UID}" "${base}/deepep-${UID}".????????; do
            is_private "${room}" || continue
            for folder in "${room}"/deepep-scratch-????????; do
                ! is_private "${folder}" || printf '%s\n' "${folder}"
            done
        done
    done
}

# list_jobs: print NUMBER|STATE|NODES|FOLDER of each allocation of this account; fails where Slurm does not answer.
list_jobs() {
    timeout "${SLURM_LIMIT}" squeue --noheader --user="$(id -un)" --name="${JOB_NAME}" --format='%A|%T|%N|%Z'
}

# read_number FOLDER: print the number of the job that salloc named there; nothing where it named none.
read_number() {
    local -r folder="$1"
    [[ ! -f "${folder}/.salloc" ]] || sed -n 's/.*\(Pending\|Granted\) job allocation \([0-9][0-9]*\).*/\2/p' "${folder}/.salloc" | head -n 1
}

# list_jobs_of FOLDER: print the numbers of the allocations of a session that Slurm has not ended yet; fails where Slurm does not answer.
list_jobs_of() {
    local -r folder="$1"
    local number
    number="$(read_number "${folder}")"
    list_jobs | awk -F'|' -v number="${number}" -v folder="${folder}" '$2 != "COMPLETING" && ($1 == number || $4 == folder) { print $1 }'
}

# cancel_jobs FOLDER: end the allocations of a session; fails as long as Slurm has not heard it.
cancel_jobs() {
    local -r folder="$1"
    local listed
    local -a numbers
    [[ -e "${folder}/.salloc" ]] || return 0 # no allocation was ever asked for
    listed="$(list_jobs_of "${folder}")" || return 1
    [[ -n "${listed}" ]] || return 0
    readarray -t numbers <<<"${listed}"
    say "cancelling Slurm job ${numbers[*]-}"
    timeout "${SLURM_LIMIT}" scancel --name="${JOB_NAME}" -- ${numbers[@]+"${numbers[@]}"} >&2
}

# find_dead_scratch: print the scratch folders whose session is gone. One that this host had before it booted last, or that another host
# of the same name has on a disk that they share, is gone when its heartbeat is silent over three intervals.
find_dead_scratch() {
    find_dead_of list_scratch_owners
}

# find_dead_sessions: print the same, and the descriptions in the store that sessions of this host left: of one that it had before it booted
# last nobody else can say that it is gone.
find_dead_sessions() {
    find_dead_of list_session_owners
}

# find_dead_of LIST: what LIST prints and is gone, scratch folders without the name of the description in them.
find_dead_of() {
    local path
    local -a owners=()
    while IFS= read -r path; do owners+=("${path}"); done < <("$1")
    ((${#owners[@]} == 0)) || find_dead 30 ${owners[@]+"${owners[@]}"} | while IFS= read -r path; do printf '%s\n' "${path%/.owner}"; done
}

list_scratch_owners() {
    local folder
    while IFS= read -r folder; do
        [[ ! -f "${folder}/.owner" || -L "${folder}/.owner" ]] || printf '%s\n' "${folder}/.owner"
    done < <(list_scratch)
}

list_session_owners() {
    local path
    list_scratch_owners
    for path in "${STORE}"/.own-session-*; do
        # Gone meanwhile: no host, so not ours.
        [[ "$(owner_field "$(cat -- "${path}" 2>/dev/null)" host)" != "$(uname -n)" ]] || printf '%s\n' "${path}"
    done
}

# remove_session PATH: what a dead session left, as find_dead_sessions names it.
remove_session() {
    if [[ "$1" == "${STORE}"/.own-session-* ]]; then rm -f -- "$1"; else remove_scratch "$1"; fi
}

# remove_scratch FOLDER: its allocation first: without the folder nobody would know whose that is.
remove_scratch() {
    local -r folder="$1"
    [[ -e "${folder}" || -L "${folder}" ]] || return 0
    is_private "${folder}" || return 1
    if ! cancel_jobs "${folder}"; then
        warn "Slurm does not answer: ${folder} stays until its allocation can be cancelled"
        return 1
    fi
    rm -rf --one-file-system -- "${folder}"
}
