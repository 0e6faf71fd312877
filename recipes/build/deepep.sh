# shellcheck shell=bash
# DeepEP, built by its own setup.py against our NVSHMEM, with upstream's tests beside it. It stands behind build/deepep-setup.sh.
# Inputs besides those of build/deepep-setup.sh: CHECKS (words), NVSHMEM (entry).

TOOLKIT="${WORK}/toolkit"

build_entry() {
    local code=0
    # Not every toolkit has it: better said now than after the build.
    [[ " ${CHECKS:-} " != *" device-code "* ]] || need_command "${CUDA_HOME}/bin/cuobjdump"
    mkdir -p -- "${WORK}"
    choose_python
    choose_nvshmem
    export_settings
    check_version
    write_waiting_compilers
    if is_published "${NVSHMEM}"; then
        run_setup
    else
        # The waiting compilers cover every link we know; a setup.py that looks for the libraries by itself gets a second chance.
        (run_setup) || code="$?"
        if ((code != 0)); then
            say "the build beside NVSHMEM's did not succeed: once more when NVSHMEM is there"
            wait_for_entry "${NVSHMEM}"
            run_setup
        fi
    fi
    install_tree
}

# choose_nvshmem: that of the store, or what this run is building as soon as its headers are there.
choose_nvshmem() {
    wait_for_entry "${NVSHMEM}" "${SCRATCH}/early/${NVSHMEM}.ready"
    export NVSHMEM_DIR="${PREFIX}/store/${NVSHMEM}"
    [[ -d "${NVSHMEM_DIR}" ]] || NVSHMEM_DIR="${SCRATCH}/early/${NVSHMEM}"
}

# export_settings: what this version reads besides.
export_settings() {
    # Where NVSHMEM is, seen from where the extension will lie.
    # shellcheck disable=SC2016 # $ORIGIN is for the loader
    export LDFLAGS='-Wl,-rpath,$ORIGIN/../../../'"${NVSHMEM}/lib"
    export_tools
}

# write_waiting_compilers: compilers that compile at once but wait with linking until NVSHMEM's libraries are there. They give up when the
# process that builds NVSHMEM is gone.
write_waiting_compilers() {
    local -r entry="${PREFIX}/store/${NVSHMEM}"
    local name
    local pid=0
    read -r pid _ 2>/dev/null <"${SCRATCH}/early/${NVSHMEM}.builder" || true # published before this run: nobody builds it
    mkdir -p -- "${TOOLKIT}"
    for name in include lib64 nvvm targets; do
        [[ ! -e "${CUDA_HOME}/${name}" ]] || ln -sfn -- "${CUDA_HOME}/${name}" "${TOOLKIT}/${name}"
    done
    write_compilers "${TOOLKIT}/bin" "until [ -d '${entry}' ]; do
        [ -d /proc/${pid} ] || [ -d '${entry}' ] || { echo '${NVSHMEM} was not built' >&2; exit 1; }
        sleep 0.2
    done" nvcc
    export PYTORCH_NVCC="${TOOLKIT}/bin/nvcc"
}

main "$@"
