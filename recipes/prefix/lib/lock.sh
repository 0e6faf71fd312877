# shellcheck shell=bash
# A lock in a directory shared by many hosts. It needs owner.sh before it.
#
# The lock only saves work. Correctness comes from renames, so a lock that is broken wrongly costs time and nothing else. flock is
# not used: on network filesystems it is a matter of mount options whether it reaches other hosts.
# Inputs: LOCK_DIR, TOKEN (unlike any other run's), HEARTBEAT in seconds, OWN_COPY (a second file to keep our description fresh in, or "").

HEARTBEAT="${HEARTBEAT:-10}"
LOCK=""
OWN=""
OWN_COPY=""
BEAT=""
HEART=""

# keep_beating OWNER_PID START: rewrite our description with a new beat until the owner closes our standard input or is gone.
# The text keeps its length and is written over the old one, so that no reader ever sees it empty.
keep_beating() {
    local -r pid="$1" start="$2"
    local beat=0 code
    while true; do
        code=0
        read -rt "${HEARTBEAT}" || code="$?"
        ((code > 128)) || return 0 # end of input: the owner has let go
        [[ "$(find_start "${pid}")" == "${start}" && -e "${OWN}" ]] || return 0
        beat=$((beat + 1))
        describe_owner "${beat}" 1<>"${OWN}"
        [[ -z "${OWN_COPY}" ]] || describe_owner "${beat}" 1<>"${OWN_COPY}"
    done
}

# take_lock NAME FINISHED…: wait until the lock NAME is ours and return 0, or return 1 as soon as the command FINISHED succeeds.
take_lock() {
    local -r name="$1"
    shift
    local owner seen="" pause
    local unchanged=0 lost=0
    pause="$(awk -v beat="${HEARTBEAT}" 'BEGIN { print beat / 10 }')"
    [[ -n "${BEAT}" ]] || announce_ourselves "${name}"
    until ln -- "${OWN}" "${LOCK}" 2>/dev/null || [[ "${OWN}" -ef "${LOCK}" ]]; do
        ! "$@" || return 1
        if owner="$(cat -- "${LOCK}" 2>/dev/null)"; then
            [[ -n "${seen}" ]] || tell_holder "${name}" "${owner}"
            unchanged=$((unchanged + 1))
            [[ "${owner}" == "${seen}" ]] || unchanged=0
            seen="${owner}"
            if is_dead "${owner}"; then
                break_lock "${name}" "${owner}" "its process is gone"
            elif ((unchanged >= 30)); then # thirty pauses of a tenth: three intervals of our own clock
                break_lock "${name}" "${owner}" "no heartbeat over three intervals of ${HEARTBEAT} s"
            fi
        else
            lost=$((lost + 1)) # let go between the two looks, or this filesystem has no hard links
            ((lost < 50)) || die "cannot take the lock ${LOCK}: does this filesystem refuse hard links?"
        fi
        sleep "${pause}"
    done
}

# announce_ourselves NAME: write our description beside the lock and start the heart that keeps it fresh. What is made under a name
# with our token before the lock is ours needs this first, or the lock's holder sweeps it away as a dead owner's.
announce_ourselves() {
    local -r name="$1"
    LOCK="${LOCK_DIR}/.lock-${name}"
    OWN="${LOCK_DIR}/.own-${name}-${TOKEN:?}"
    describe_owner 0 >"${OWN}" || die "cannot write in ${LOCK_DIR}"
    exec {BEAT}> >(exec >/dev/null 2>&1 && keep_beating "$$" "$(find_start "$$")")
    HEART="$!"
}

# tell_holder NAME OWNER: say once for whom we wait, to the person and to the engine.
tell_holder() {
    local -r name="$1" owner="$2"
    local holder
    holder="$(owner_field "${owner}" host) pid $(owner_field "${owner}" pid) since $(owner_field "${owner}" since)"
    say "waiting for ${name}: held by ${holder}"
    data waiting "${holder}"
}

# break_lock NAME OWNER REASON: take the lock away from a dead owner, together with what it left. The lock is moved aside first and
# read again: what was moved may be the lock of somebody who was quicker, and that one is put back.
break_lock() {
    local -r name="$1" owner="$2" reason="$3"
    local -r aside="${LOCK_DIR}/.stale-${name}-${TOKEN}"
    local token
    token="$(owner_field "${owner}" token)"
    mv -fT -- "${LOCK}" "${aside}" 2>/dev/null || return 0 # somebody else broke it first
    if [[ "$(owner_field "$(<"${aside}")" token)" != "${token}" ]]; then
        ln -- "${aside}" "${LOCK}" 2>/dev/null || warn "two builders work on ${name}; the first to finish wins"
    else
        warn "the lock of ${name} was stale (${reason}; $(owner_field "${owner}" host) pid $(owner_field "${owner}" pid)): taken over"
        [[ -z "${token}" ]] || remove_leftover "${name}" "${token}"
    fi
    rm -f -- "${aside}"
}

# remove_leftover NAME TOKEN: remove what a dead owner left. Its folder gets another name first: should the owner live after all, it
# can no longer publish a folder that is being emptied.
remove_leftover() {
    local -r name="$1" token="$2"
    local -r left="${LOCK_DIR}/.tmp-${name}-${token}" trash="${LOCK_DIR}/.trash-${name}-${token}-${TOKEN}"
    if mv -T -- "${left}" "${trash}" 2>/dev/null; then
        rm -rf -- "${trash}" || warn "cannot remove all of ${trash}"
    fi
    rm -f -- "${LOCK_DIR}/.own-${name}-${token}"
}

# sweep_leftovers NAME: with the lock of NAME, remove what dead owners left. One we cannot judge (another host's) stays until its lock
# is broken.
sweep_leftovers() {
    local -r name="$1"
    local path token own
    for path in "${LOCK_DIR}/.trash-${name}-"* "${LOCK_DIR}/.tmp-${name}-"* "${LOCK_DIR}/.own-${name}-"*; do
        [[ -e "${path}" ]] || continue
        token="${path##*-"${name}"-}"
        own="${LOCK_DIR}/.own-${name}-${token}"
        if [[ "${path}" == */.trash-* ]]; then
            rm -rf -- "${path}" || warn "cannot remove ${path}"
        elif [[ "${token}" != "${TOKEN}" ]] && { [[ ! -e "${own}" ]] || is_dead "$(<"${own}")"; }; then
            say "removing what a dead owner left: ${path##*/}"
            remove_leftover "${name}" "${token}"
        fi
    done
}

# release_lock: stop the heart and let the lock go, if it is (still) ours.
release_lock() {
    [[ -n "${OWN}" ]] || return 0
    if [[ -n "${BEAT}" ]]; then
        exec {BEAT}>&-
        wait "${HEART}" || true # a signal to the whole process group ends the heart as well
        BEAT=""
    fi
    [[ ! "${OWN}" -ef "${LOCK}" ]] || rm -f -- "${LOCK}"
    rm -f -- "${OWN}"
    OWN=""
}
