# shellcheck shell=bash
# Unpack the tar stream on standard input as SRC, a folder of root's below /var/lib/deepep-bootstrap/src; what was there before goes.

main() {
    need_env SRC
    [[ "${SRC}" =~ ^/var/lib/deepep-bootstrap/src/[A-Za-z0-9._-]+$ ]] || die "SRC: not a folder for sources: ${SRC}"
    rm -rf -- "${HOST_ROOT:-}${SRC}"
    mkdir -p -- "${HOST_ROOT:-}${SRC}"
    tar -x -f - -C "${HOST_ROOT:-}${SRC}" --no-same-owner >&2
    data state received
}

main "$@"
