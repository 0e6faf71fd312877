# shellcheck shell=bash
# Sends files of many runs' folders back, as test/collect.sh does of one: for each a line `file PATH SIZE SENT` and then SENT bytes of it;
# `end 1` is the last line. A file that is longer than LARGEST, or that comes when TOTAL bytes are reached, is named and not sent.
#
# Inputs: PREFIX, RUNS (folders, one a line, whose logs of nodes are wanted; empty: run.env and verdict.json of all runs there are), MOST
# (runs), LARGEST and TOTAL (bytes).

# send_file PATH: one file, if it still fits.
send_file() {
    local -r path="$1"
    local size sent
    size="$(stat -L -c %s -- "${path}")"
    sent="$((size <= LARGEST && size <= LEFT ? size : 0))"
    LEFT="$((LEFT - sent))"
    printf 'file %s %s %s\n' "${path}" "${size}" "${sent}"
    ((sent == 0)) || head -c "${sent}" -- "${path}"
}

# list_runs: the folders of the newest runs, where test/lib/place.sh makes them. Names with blanks or line ends are none of ours.
list_runs() {
    local path
    for path in "${PREFIX}"/logs/tests/*/run.env "${HOME:-/nowhere}"/deepep-tests/*/run.env; do
        [[ ! "${path##*/tests/}" =~ [[:space:]] && -f "${path}" ]] || continue
        path="${path%/run.env}"
        printf '%s %s\n' "${path##*/}" "${path}"
    done | sort -r | head -n "${MOST}" | cut -d ' ' -f 2-
}

main() {
    need_env PREFIX MOST LARGEST TOTAL
    local folder path
    LEFT="${TOTAL}"
    shopt -s nullglob
    if [[ -z "${RUNS:-}" ]]; then
        while IFS= read -r folder; do
            send_file "${folder}/run.env"
            [[ ! -f "${folder}/verdict.json" ]] || send_file "${folder}/verdict.json"
        done < <(list_runs)
    else
        while IFS= read -r folder; do
            for path in "${folder}"/node-*.log; do send_file "${path}"; done
        done <<<"${RUNS}"
    fi
    printf 'end 1\n'
}

main "$@"
