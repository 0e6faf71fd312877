# shellcheck shell=bash
# A build session on one host, held open by the control machine: a scratch folder on the host's own disk and, where Slurm owns the host,
# an allocation. It needs owner.sh, lock.sh and share.sh of prefix/lib before it. Both go when the session ends: on end of standard
# input or on SIGTERM. As long as it lives, its description stands in the store with what it builds and builds against (ENTRIES, one a
# line), so that nobody removes that (prefix/lib/living.sh).
#
# Arguments: options for salloc; none where there is no Slurm. Inputs: TOKEN, PREFIX. Results: scratch=FOLDER, waiting=…, jobid=NUMBER
# (0 without Slurm), in this order.

SCRATCH=""
# shellcheck disable=SC2034 # read by prefix/lib/lock.sh
LOCK_DIR="${PREFIX:?}/store"
JOB_NAME="deepep-build"
SALLOC=""

# choose_base: print the folder for scratch: on this host's disk, writable, and programs may run from it.
choose_base() {
    local base try
    for base in "${TMPDIR:-}" /var/tmp /tmp; do
        [[ -n "${base}" && -d "${base}" && -w "${base}" ]] || continue
        try="$(mktemp "${base}/deepep-try-XXXXXXXX")" || continue
        printf '#!/bin/sh\n' >"${try}"
        chmod 700 -- "${try}"
        if "${try}" 2>/dev/null; then
            rm -f -- "${try}"
            (cd -- "${base}" && pwd -P)
            return 0
        fi
        rm -f -- "${try}"
    done
    die "no folder to build in: ${TMPDIR:+${TMPDIR}, }/var/tmp and /tmp are not writable, or programs may not run from them (noexec)"
}

# remove_dead BASE: remove scratch folders, and cancel allocations, of sessions that were killed.
remove_dead() {
    local -r base="$1"
    local folder
    for folder in "${base}"/deepep-scratch-*/; do
        [[ -O "${folder}" && -r "${folder}.owner" ]] || continue
        is_dead "$(<"${folder}.owner")" || continue
        say "removing what a dead session left: ${folder}"
        [[ ! -s "${folder}.job" ]] || cancel_job "$(<"${folder}.job")"
        rm -rf -- "${folder}" || warn "cannot remove all of ${folder}"
    done
}

cancel_job() {
    scancel --name="${JOB_NAME}" "$1" >&2 || warn "cannot cancel Slurm job $1"
}

# record_job FILE: remember the job as soon as salloc names it, pending or granted, so that it can be cancelled.
record_job() {
    local -r said="$1"
    sed -n 's/.*\(Pending\|Granted\) job allocation \([0-9][0-9]*\).*/\2/p' "${said}" | head -n 1 >"${SCRATCH}/.job"
}

# pending_reason: print why the job waits, as Slurm says it; nothing while it does not say.
pending_reason() {
    local -r reason="$(squeue --noheader --jobs="$(<"${SCRATCH}/.job")" --states=PENDING --format=%r 2>/dev/null)"
    [[ -z "${reason}" || "${reason}" == None ]] || printf ' (%s)' "${reason}"
}

# allocate OPTIONS…: wait for an allocation and print its number as a result; meanwhile why it waits, each time that changes.
allocate() {
    local -r said="${SCRATCH}/salloc"
    local told="" waits count=0
    salloc --no-shell --job-name="${JOB_NAME}" --mem=0 "$@" >"${said}" 2>&1 </dev/null {BEAT}>&- &
    SALLOC="$!"
    while kill -0 "${SALLOC}" 2>/dev/null; do
        sleep 0.2
        record_job "${said}"
        # Every five seconds: slurmctld has others to answer too.
        if grep -q Pending "${said}" && ((count++ % 25 == 0)); then
            waits="Slurm job $(<"${SCRATCH}/.job")$(pending_reason)"
            [[ "${waits}" == "${told}" ]] || data waiting "${waits}"
            told="${waits}"
        fi
    done
    wait "${SALLOC}" || die "Slurm gives no allocation ($*): $(tail -n 1 "${said}")$(suggest_user "sites for jobs")"
    SALLOC=""
    record_job "${said}"
    [[ -s "${SCRATCH}/.job" ]] || die "salloc named no job: $(tail -n 1 "${said}")"
    data jobid "$(<"${SCRATCH}/.job")"
}

# clean_up: on every way out. Removing gigabytes can outlast the patience of whoever ends us, so the removal has a session of its own.
clean_up() {
    local -r code="$?"
    trap '' HUP INT TERM PIPE # whoever ends us may say so twice, and nobody may be listening any more
    trap - ERR
    set +e
    [[ -z "${SALLOC}" ]] || kill "${SALLOC}" 2>/dev/null
    release_lock
    [[ -n "${SCRATCH}" ]] || exit "${code}"
    [[ ! -s "${SCRATCH}/.job" ]] || cancel_job "$(<"${SCRATCH}/.job")"
    # Where we are all ended at once, recipes may write there for some seconds more: try again until it is gone.
    # shellcheck disable=SC2016 # expanded by the inner shell
    setsid bash -c 'for _ in {1..20}; do rm -rf -- "$1" && exit; sleep 0.5; done' - "${SCRATCH}" </dev/null >/dev/null 2>&1 &
    wait "$!"
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

# announce_entries: before anybody looks whether an entry is there.
announce_entries() {
    local name
    follow_prefix
    announce_ourselves session
    sweep_leftovers session
    while IFS= read -r name; do
        [[ -z "${name}" ]] || printf 'entry=%s\n' "${name}" >>"${OWN}"
    done <<<"${ENTRIES:-}"
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
    announce_entries
    umask 077
    remove_dead "${base}"
    SCRATCH="$(mktemp -d "${base}/deepep-scratch-XXXXXXXX")"
    describe_owner 0 >"${SCRATCH}/.owner"
    mkdir -p -- "${SCRATCH}"/{bin,build,early,src,wheels}
    data scratch "${SCRATCH}"
    if (($# == 0)); then
        data jobid 0
    else
        allocate "$@"
    fi
    wait_for_end
}

main "$@"
