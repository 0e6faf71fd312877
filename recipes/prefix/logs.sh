# shellcheck shell=bash
# Keep the logs of a run: the tar stream on standard input goes to PREFIX/logs/RUN. It needs prefix/lib/share.sh before it.
# Inputs: PREFIX, RUN. Result: logs=FOLDER.

main() {
    need_env PREFIX RUN
    local -r folder="${PREFIX}/logs/${RUN}"
    [[ "${RUN}" =~ ^[A-Za-z0-9._-]+$ && "${RUN}" != .* ]] || die "logs: bad run name '${RUN}'"
    follow_prefix
    mkdir -p -- "${folder}"
    tar -x -f - -C "${folder}" --no-same-owner >&2
    data logs "${folder}"
}

main "$@"
