# shellcheck shell=bash
# Does this host reach the index of wheels? A uv arrives on standard input and is asked to resolve one small wheel, without installing it,
# in the environment that a build has. It needs build/common.sh before it.
# Inputs: REQUIREMENT (name==version), INDEXES (addresses, one a line; the first one is the default, empty: uv's own), PYTHON. Result: index=yes|no.

SCRATCH=""

clean_up() {
    [[ -z "${SCRATCH}" ]] || rm -rf -- "${SCRATCH}"
}

main() {
    need_env REQUIREMENT PYTHON
    SCRATCH="$(mktemp -d)"
    trap clean_up EXIT
    clear_environment
    cat >"${SCRATCH}/uv"
    chmod 700 -- "${SCRATCH}/uv"
    name_indexes "${INDEXES:-}"
    # Seconds, not uv's patience of minutes: this is a question, and the control machine is the other answer.
    export UV_HTTP_TIMEOUT=5 UV_HTTP_RETRIES=0 UV_PYTHON_DOWNLOADS=never
    # The strategy is that of build/python.sh.
    if timeout 30 "${SCRATCH}/uv" pip install --dry-run --no-deps --no-cache --no-progress --target "${SCRATCH}/none" \
        --python "${PYTHON}" --index-strategy unsafe-best-match "${REQUIREMENT}" >&2; then
        data index yes
    else
        data index no
    fi
}

main "$@"
