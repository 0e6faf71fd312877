# shellcheck shell=bash
# A build session on one host, held open by the control machine: a scratch folder on the host's own disk and, where Slurm owns the host,
# an allocation. It needs owner.sh, lock.sh, share.sh, living.sh and scratch.sh of prefix/lib before it. Both go when the session ends: on
# end of standard input or on SIGTERM. As long as it lives, its description stands in the store with what it builds and builds against
# (ENTRIES, one a line), so that nobody removes that (prefix/lib/living.sh), and the same in scratch.
#
# Arguments: options for salloc; none where there is no Slurm. Inputs: TOKEN, PREFIX. Results: scratch=FOLDER, waiting=…, jobid=NUMBER
# (0 without Slurm), in this order.

SCRATCH=""
# shellcheck disable=SC2034 # read by prefix/lib/lock.sh
LOCK_DIR="${PREFIX:?}/store"
SALLOC=""

# choose_base: print the folder for scratch: on this host's disk, writable, and programs may run from it.
choose_base() {
    local base try
    while IFS= read -r base; do
        [[ -w "${base}" ]] || continue
        if ! is_trusted "${base}"; then
            warn "no scratch in ${base}: others may rename what is made there (mode $(stat -c %a -- "${base}"))"
            continue
        fi
        try="$(mktemp "${base}/deepep-try-XXXXXXXX")" || continue
        printf '#!/bin/sh\n' >"${try}"
        chmod 700 -- "${try}"
        if "${try}" 2>/dev/null; then
            rm -f -- "${try}"
            printf '%s\n' "${base}"
            return 0
        fi
        rm -f -- "${try}"
    done < <(list_bases)
    die "no folder to build in: ${TMPDIR:+${TMPDIR}, }/var/tmp and /tmp are not writable, programs may not run from them (noexec), or others may rename what is there"
}

# remove_dead: cancel allocations, and remove scratch folders and descriptions, of sessions that were killed.
remove_dead() {
    local path
    find_dead_sessions | while IFS= read -r path; do
        say "removing what a dead session left: ${path}"
        remove_session "${path}" || warn "cannot remove all of ${path}"
    done
}

# pending_reason NUMBER: print why the job waits, as Slurm says it; nothing while it does not say.
pending_reason() {
    local -r reason="$(squeue --noheader --jobs="$1" --states=PENDING --format=%r 2>/dev/null)"
    [[ -z "${reason}" || "${reason}" == None ]] || printf ' (%s)' "${reason}"
}

# allocate OPTIONS…: wait for an allocation and print its number as a result; meanwhile why it waits, each time that changes. What salloc
# says goes into a file at once, so that there is no moment at which a job is known and not written down.
allocate() {
    local -r said="${SCRATCH}/.salloc"
    local told="" waits number count=0
    salloc --no-shell --job-name="${JOB_NAME}" --chdir="${SCRATCH}" --mem=0 "$@" >"${said}" 2>&1 </dev/null {BEAT}>&- &
    SALLOC="$!"
    while kill -0 "${SALLOC}" 2>/dev/null; do
        sleep 0.2
        # Every five seconds: slurmctld has others to answer too.
        if grep -q Pending "${said}" && ((count++ % 25 == 0)); then
            number="$(read_number "${SCRATCH}")"
            waits="Slurm job ${number}$(pending_reason "${number}")"
            [[ "${waits}" == "${told}" ]] || data waiting "${waits}"
            told="${waits}"
        fi
    done
    wait "${SALLOC}" || die "Slurm gives no allocation ($*): $(tail -n 1 "${said}")$(suggest_user "sites for jobs")"
    SALLOC=""
    number="$(read_number "${SCRATCH}")"
    [[ -n "${number}" ]] || die "salloc named no job: $(tail -n 1 "${said}")"
    data jobid "${number}"
}

# end_scratch FOLDER: cancel the allocation and remove scratch; again until both is done, for the two hours after which the allocation ends
# by itself: Slurm may be silent, and recipes that are ended with us may write there for some seconds more.
end_scratch() {
    local -r folder="$1"
    local tries
    for ((tries = 0; tries < 7200; tries++)); do
        ! remove_scratch "${folder}" || return 0
        sleep 1
    done
}

# clean_up: on every way out. What can outlast the patience of whoever ends us has a session of its own.
clean_up() {
    local -r code="$?"
    local tries
    trap '' HUP INT TERM PIPE # whoever ends us may say so twice, and nobody may be listening any more
    trap - ERR
    set +e
    [[ -z "${SALLOC}" ]] || kill "${SALLOC}" 2>/dev/null
    release_lock
    if [[ -n "${SCRATCH}" ]]; then
        export -f end_scratch remove_scratch cancel_jobs list_jobs_of list_jobs read_number is_private say warn
        export JOB_NAME SLURM_LIMIT
        # shellcheck disable=SC2016 # expanded by the inner shell
        setsid bash -c 'end_scratch "$1"' - "${SCRATCH}" </dev/null >/dev/null 2>&1 &
        for ((tries = 0; tries < 100; tries++)); do
            kill -0 "$!" 2>/dev/null || break
            sleep 0.1
        done
    fi
    exit "${code}"
}

# wait_for_end: until our standard input ends; where the engine's watcher keeps it for itself, until its signal. That waits by reading
# from a pipe without a writer: no child process that could outlive us.
wait_for_end() {
    local never
    if [[ /dev/stdin -ef /dev/null ]]; then
        exec {never}<> <(:)
        read -ru "${never}" || true # only a signal ends it, and its trap exits
    else
        cat >/dev/null
    fi
}

# open_scratch BASE: make our folder there, with our description.
open_scratch() {
    local -r base="$1"
    local room
    umask 077
    room="$(open_room "${base}")"
    SCRATCH="$(mktemp -d "${room}/deepep-scratch-XXXXXXXX")"
    describe_owner 0 >"${SCRATCH}/.owner"
    mkdir -p -- "${SCRATCH}"/{bin,build,early,src,wheels}
}

# announce_entries: before anybody looks whether an entry is there. From here on both descriptions beat.
announce_entries() {
    local name
    follow_prefix
    # shellcheck disable=SC2034 # read by prefix/lib/lock.sh
    OWN_COPY="${SCRATCH}/.owner"
    announce_ourselves session
    sweep_leftovers session
    while IFS= read -r name; do
        [[ -z "${name}" ]] || printf 'entry=%s\n' "${name}" >>"${OWN}"
    done <<<"${ENTRIES:-}"
    umask 077
}

main() {
    local base
    need_env TOKEN PREFIX
    base="$(choose_base)"
    [[ "${base}/" != "${PREFIX%/}/"* ]] || die "scratch ${base} lies in the prefix ${PREFIX}: set TMPDIR to a folder on the host's own disk"
    trap clean_up EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
    open_scratch "${base}"
    announce_entries
    data scratch "${SCRATCH}"
    remove_dead
    if (($# == 0)); then
        data jobid 0
    else
        allocate "$@"
    fi
    wait_for_end
}

main "$@"
