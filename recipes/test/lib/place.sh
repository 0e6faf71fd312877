# shellcheck shell=bash
# Where a run of a test keeps its logs: in the prefix, else (where this user may not write there) in the home directory.
# It needs prefix/lib/share.sh before it. Inputs: PREFIX, RUN (the run's name).

# say_stopped FOLDER: say in a run's folder that whoever followed it was stopped.
say_stopped() {
    printf '{"schema": 1, "verdict": "stopped", "why": "whoever followed it was stopped"}\n' >"$1/verdict.json" ||
        true # a folder that is full or gone must not keep the job alive
}

# make_place: make the run's folder and print its path.
make_place() {
    local -r name="${RUN:?}"
    local base
    [[ "${name}" =~ ^[A-Za-z0-9._-]+$ && "${name}" != .* ]] || die "bad name of a run: '${name}'"
    follow_prefix
    for base in "${PREFIX:?}/logs/tests" "${HOME:-/nowhere}/deepep-tests"; do
        if mkdir -p -- "${base}/${name}/counters" 2>/dev/null && [[ -w "${base}/${name}" ]]; then
            printf '%s\n' "${base}/${name}"
            return 0
        fi
    done
    die "neither ${PREFIX}/logs/tests nor the home directory of $(id -un) can be written to"
}
