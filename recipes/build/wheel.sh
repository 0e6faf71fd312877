# shellcheck shell=bash
# What the recipes share whose entry is the content of one wheel. It stands between build/common.sh and build/nvshmem-wheel.sh or
# build/nccl-wheel.sh.
# Inputs: SCRATCH/bin/uv, SCRATCH/wheels, PYTHON, WHEEL (a line of pip's requirements with the hash); ONLINE=1 where the wheel comes from the
# index and not from SCRATCH/wheels, with the addresses of the indexes in INDEXES (one a line; the first is the default one, empty: uv's
# own). The hash decides in either case.

# install_wheel FOLDER: unpack it into FOLDER/site. uv unpacks the one file that has the hash, for whatever interpreter: nothing in it
# depends on Python.
install_wheel() {
    local -r folder="$1"
    local -ra quiet=(--no-progress --cache-dir "${SCRATCH}/uv-cache")
    local -a from=(--offline --no-config --no-index --find-links "${SCRATCH}/wheels")
    export UV_PYTHON_DOWNLOADS=never
    if [[ -n "${ONLINE:-}" ]]; then
        from=(--index-strategy unsafe-best-match) # the site's own uv settings (mirrors, proxies) hold here
        name_indexes "${INDEXES:-}"
    fi
    printf '%s\n' "${WHEEL}" >"${folder}/wheel.txt"
    "${SCRATCH}/bin/uv" pip install "${quiet[@]}" "${from[@]}" --python "${PYTHON}" --target "${folder}/site" \
        --no-deps --require-hashes --no-build --link-mode copy -r "${folder}/wheel.txt"
}
