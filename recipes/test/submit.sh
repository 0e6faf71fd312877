# shellcheck shell=bash
# Submits one sbatch file, shows the job's output as it grows, and tells how it ended. Needs a Slurm client.
#
# Reads: FILE (the sbatch file), PREFIX and RUN (whose folder keeps the output; the compute nodes have to see it), START_LIMIT (seconds a
# job may wait for its nodes), TIME_LIMIT (seconds it may run), OPTIONS (more for sbatch, one a line). Arguments go to the test. It needs
# prefix/lib/share.sh and test/lib/place.sh before it. The job's output goes to standard error. When this script is ended, so is the job.
# Data lines: place (the run's folder), job, refused, late, hung (the time limit was reached), said (of a test that is cut off, each log of a
# node or rank: name, seconds since it was written, lines, the last one), record (the last `scontrol show job` line).

readonly POLL=0.5 PATIENCE=20
JOB=""

# However this script ends before the job does, the job must not go on for nobody, and its folder says that it was stopped.
stop_run() {
    [[ -n "${JOB}" ]] || return 0
    cancel_job
    say_stopped "${DEEPEP_RUN_DIR}"
}

# Signals may come twice: scancel inherits that they are ignored.
cancel_job() {
    trap '' TERM INT HUP
    [[ -z "${JOB}" ]] || scancel "${JOB}" || true # it may have ended in the meantime
}

# show_job: print the job's record on one line; nothing when Slurm does not answer or has forgotten the job.
show_job() {
    scontrol show job -o "${JOB}" 2>/dev/null || true # a controller that is busy answers the next question
}

# copy_output OUTPUT SEEN: show what the file holds beyond the first SEEN bytes; prints the new count.
copy_output() {
    local -r output="$1" seen="$2"
    local size
    size="$(stat -c %s -- "${output}" 2>/dev/null || echo 0)"
    if ((size > seen)); then
        dd if="${output}" iflag=skip_bytes,count_bytes skip="${seen}" count="$((size - seen))" bs=64K status=none >&2
        printf '%s\n' "${size}"
    else
        printf '%s\n' "${seen}"
    fi
}

# finish_output OUTPUT SEEN: the last lines may reach a network filesystem after the job's end; they say its exit code.
finish_output() {
    local -r output="$1"
    local seen="$2" tries
    for ((tries = 0; tries < PATIENCE; tries++)); do
        seen="$(copy_output "${output}" "${seen}")"
        ! tail -n 1 -- "${output}" 2>/dev/null | grep -q 'ended with exit code' || return 0
        sleep "${POLL}"
    done
}

# say_words: what each node and rank said last, before the end that they are put to adds to it.
say_words() {
    local log last now
    now="$(date +%s)"
    for log in "${DEEPEP_RUN_DIR}"/{node,rank}-*.log; do
        [[ -f "${log}" ]] || continue
        last="$(awk 'NF { last = $0 } END { print substr(last, 1, 160) }' "${log}" | tr -s '[:cntrl:]' ' ')"
        data said "${log##*/}"$'\t'"$((now - $(stat -c %Y -- "${log}")))"$'\t'"$(wc -l <"${log}")"$'\t'"${last}"
    done
}

# watch_time STATE: end a job that waits, or runs, for too long. Fails when it is not worth to go on.
watch_time() {
    local -r state="$1"
    case "${state}" in
        PENDING | CONFIGURING)
            ((SECONDS > START_LIMIT)) || return 0
            data late yes
            cancel_job
            return 1
            ;;
        RUNNING)
            ((STARTED > 0)) || STARTED="${SECONDS}"
            ((SECONDS - STARTED > TIME_LIMIT && HUNG == 0)) || return 0
            data hung yes
            HUNG=1
            say_words
            say "deepep: no end after ${TIME_LIMIT} s: the job is cancelled"
            cancel_job
            ;;
        COMPLETING | SUSPENDED | STOPPED | SIGNALING | STAGE_OUT | REQUEUED | "") ;;
        *) return 1 ;;
    esac
}

follow_job() {
    local seen=0 record="" last="" output="" state="" silent=0
    STARTED=0 HUNG=0
    while true; do
        record="$(show_job)"
        if [[ -z "${record}" ]]; then
            silent=$((silent + 1))
            ((silent < 120)) || break
        else
            silent=0
            last="${record}"
            [[ ! "${record}" =~ " StdOut="([^ ]+) ]] || output="${BASH_REMATCH[1]}"
        fi
        [[ ! "${record}" =~ " JobState="([A-Z_]+) ]] || state="${BASH_REMATCH[1]}"
        watch_time "${state}" || break
        [[ -z "${output}" ]] || seen="$(copy_output "${output}" "${seen}")"
        sleep "${POLL}"
    done
    data record "${last}"
    case "${state}" in
        COMPLETED | FAILED) finish_output "${output}" "${seen}" ;;
        *) [[ -z "${output}" ]] || copy_output "${output}" "${seen}" >/dev/null ;;
    esac
}

main() {
    need_env FILE PREFIX RUN START_LIMIT TIME_LIMIT
    need_command sbatch scontrol scancel
    trap stop_run EXIT
    trap 'exit 143' TERM INT HUP
    # Nobody may be listening any more when the end comes; a word to nobody must not be the death of the cancelling.
    trap '' PIPE
    local place answer
    local -a options
    readarray -t options < <(printf '%s' "${OPTIONS:-}")
    place="$(make_place)"
    data place "${place}"
    export DEEPEP_RUN_DIR="${place}"
    if ! answer="$(sbatch --parsable --export=ALL --chdir="${place}" --output="${place}/job.log" ${options[@]+"${options[@]}"} "${FILE}" "$@" 2>&1)"; then
        data refused "${answer//$'\n'/ }"
        return 0
    fi
    JOB="$(printf '%s\n' "${answer}" | sed -n 's/^\([0-9][0-9]*\).*/\1/p' | tail -n 1)"
    [[ -n "${JOB}" ]] || die "no job id in the answer of sbatch: ${answer}"
    data job "${JOB}"
    follow_job
    JOB=""
}

main "$@"
