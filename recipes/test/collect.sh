# shellcheck shell=bash
# Sends the files of a run's folder back: for each a line `file NAME SIZE SENT` and then SENT bytes of it; `end 1` is the last line.
# Of a file that is longer than LARGEST the first and the last half of that are sent; when TOTAL bytes are reached, nothing of the rest.
#
# Inputs: PLACE (the folder), LARGEST and TOTAL (bytes), PATIENCE (seconds to wait for the end of the run to be seen here: on a network
# filesystem another host's last lines come a moment later; 0 where nobody wrote one).

# await_end: until the run's own exit code is there.
await_end() {
    local second
    for ((second = 0; second < PATIENCE; second++)); do
        ! grep -q '^code=' "${PLACE}/run.env" 2>/dev/null || return 0
        sleep 1
    done
}

# send_file NAME: one file, as far as LEFT bytes allow.
send_file() {
    local -r name="$1" path="${PLACE}/$1"
    local size half sent
    size="$(stat -L -c %s -- "${path}")"
    sent="$((size < LARGEST ? size : LARGEST))"
    ((sent <= LEFT)) || sent=0
    LEFT="$((LEFT - sent))"
    printf 'file %s %s %s\n' "${name}" "${size}" "${sent}"
    if ((sent == size)); then
        head -c "${size}" -- "${path}"
    elif ((sent > 0)); then
        half="$((sent / 2))"
        head -c "${half}" -- "${path}"
        tail -c "$((sent - half))" -- "${path}"
    fi
}

# list_files: the small ones first, and those that say most.
list_files() {
    local name
    shopt -s nullglob
    for name in run.env verdict.json facts.json results.json counters/* job.log; do
        [[ ! -f "${name}" ]] || printf '%s\n' "${name}"
    done
    printf '%s\n' node-*.log | sort -V
    printf '%s\n' rank-*.log | sort -V
}

main() {
    need_env PLACE LARGEST TOTAL PATIENCE
    local name
    LEFT="${TOTAL}"
    cd -- "${PLACE}" || die "there is no folder ${PLACE}"
    await_end
    # Names with blanks or line ends are none of ours.
    while IFS= read -r name; do
        [[ ! "${name}" =~ ^[A-Za-z0-9][A-Za-z0-9._/-]*$ ]] || send_file "${name}"
    done < <(list_files)
    printf 'end 1\n'
}

main "$@"
