# shellcheck shell=bash
# Run one script on free nodes of Slurm as one step of one job, a task a node. It runs on a host with Slurm's clients.
#
# Arguments: options of srun, which name the nodes. Input: NAME of the job, LIMIT for all of it in seconds; STEP (the text of slurm/step.sh)
# with its arguments COMMAND, SECONDS_EACH and BYTES_EACH; and the function `payload`, which prints what each task reads.
# Results: `NUMBER: LINE`, the lines of task NUMBER as srun labels them; then what srun says itself, `srun: …`, among it which task was on
# which node. Nothing that a task prints can begin like that.

box=""
end_limit=10 # seconds for the nodes to be free again: a dead one never is

# names_job FORMAT: print what Slurm knows of our job.
names_job() {
    # shellcheck disable=SC2153 # NAME is an input
    timeout 20 squeue --noheader --states=all --user="$(id -un)" --name="${NAME}" --format="$1"
}

# end_job: cancel what still runs, and wait until the nodes are free again: who plans next must not take us for a user.
end_job() {
    local states="" since="${SECONDS}"
    timeout 20 scancel --quiet --user="$(id -un)" --name="${NAME}" >&2 || true # it has ended, or Slurm is silent: its time limit ends it
    while ((SECONDS - since < end_limit)); do
        states="$(names_job %T)" || break
        grep -qE 'RUNNING|COMPLETING|CONFIGURING|PENDING' <<<"${states}" || break
        sleep 0.2
    done
    [[ -z "${box}" ]] || rm -rf -- "${box}"
}

main() {
    local each code=0
    # An allocation in which the program itself was started is not the place.
    for each in "${!SLURM_@}" "${!SRUN_@}"; do
        [[ "${each}" == SLURM_CONF ]] || unset "${each}"
    done
    box="$(mktemp -d)"
    trap end_job EXIT
    payload >"${box}/in"
    # In our own process group, so that whoever ends that ends srun too.
    timeout --foreground -k 10 "${LIMIT}" srun --verbose --label --job-name="${NAME}" "$@" \
        /bin/sh -c "${STEP}" step "${COMMAND}" "${SECONDS_EACH}" "${BYTES_EACH}" <"${box}/in" 2>"${box}/err" || code=$?
    ((code != 0)) || end_limit=60 # an epilog may look at the whole node
    grep '^srun: ' "${box}/err" || true # it was killed before it said anything
    say "srun ended with ${code}"
}

main "$@"
