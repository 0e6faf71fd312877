# shellcheck shell=bash
# Submits one sbatch file, shows the job's output as it grows, and tells how it ended. Needs a Slurm client.
#
# Reads: FILE (the sbatch file), FOLDER (where the output goes; must be seen by the compute nodes), START_LIMIT (seconds a job may wait
# for its nodes). Arguments go to the test. The job's output goes to standard error. When this script is ended, so is the job.
# Data lines: job, refused, late, record (the last `scontrol show job` line).

readonly POLL=1 PATIENCE=10
JOB=""

# However this script ends before the job does, the job must not go on for nobody. Signals may come twice: scancel inherits that they
# are ignored.
cancel_job() {
    trap '' TERM INT HUP
    [[ -z "${JOB}" ]] || scancel "${JOB}" || true # it may have ended in the meantime
}

choose_folder() {
    if mkdir -p -- "${FOLDER}" 2>/dev/null && [[ -w "${FOLDER}" ]]; then
        printf '%s\n' "${FOLDER}"
    else
        printf '%s\n' "${HOME}"
    fi
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

follow_job() {
    local seen=0 record="" last="" output="" silent=0
    while true; do
        record="$(show_job)"
        if [[ -z "${record}" ]]; then
            silent=$((silent + 1))
            ((silent < 60)) || break
        else
            silent=0
            last="${record}"
            [[ ! "${record}" =~ StdOut=([^ ]+) ]] || output="${BASH_REMATCH[1]}"
            case "${record}" in
                *JobState=PENDING* | *JobState=CONFIGURING*)
                    if ((SECONDS > START_LIMIT)); then
                        data late yes
                        cancel_job
                        break
                    fi
                    ;;
                *JobState=RUNNING* | *JobState=COMPLETING* | *JobState=SUSPENDED*) ;;
                *) break ;;
            esac
        fi
        [[ -z "${output}" ]] || seen="$(copy_output "${output}" "${seen}")"
        sleep "${POLL}"
    done
    data record "${last}"
    case "${last}" in
        *JobState=COMPLETED* | *JobState=FAILED*) finish_output "${output}" "${seen}" ;;
        *) [[ -z "${output}" ]] || copy_output "${output}" "${seen}" >/dev/null ;;
    esac
}

main() {
    need_env FILE FOLDER START_LIMIT
    need_command sbatch scontrol scancel
    trap cancel_job EXIT
    trap 'exit 143' TERM INT HUP
    # Nobody may be listening any more when the end comes; a word to nobody must not be the death of the cancelling.
    trap '' PIPE
    local place answer
    place="$(choose_folder)"
    if ! answer="$(sbatch --parsable --chdir="${place}" "${FILE}" "$@" 2>&1)"; then
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
