# shellcheck shell=bash
# Unpack the tar stream on standard input into SCRATCH. Result: state=received.

main() {
    need_env SCRATCH
    [[ -O "${SCRATCH}/.owner" ]] || die "${SCRATCH} is not the scratch folder of a session of ours"
    tar -x -f - -C "${SCRATCH}" --no-same-owner >&2
    data state received
}

main "$@"
