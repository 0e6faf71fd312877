# shellcheck shell=bash
# DeepEP V2, built by its own setup.py against the NCCL of the Python environment and our NVSHMEM (for its legacy half), with upstream's
# tests beside it. Most of its kernels are compiled on the nodes, when they are first used. Beside an external Python both are what its
# torch brings; for NCCL an entry of ours may stand in. It stands behind build/deepep-v2-checks.sh and build/deepep-setup.sh.
# Inputs besides those of build/deepep-setup.sh, whose SRC has its submodules: CHECKS (words), NVSHMEM (entry), NCCL_VERSION. For an external
# PYTHON in place of the two entries: TORCH_NVSHMEM and TORCH_NCCL (folders with include and lib), or for the latter NCCL (entry).

build_entry() {
    [[ " ${CHECKS:-} " != *" device-code "* ]] || need_command "${CUDA_HOME}/bin/cuobjdump"
    [[ -e "${SRC}/third-party/fmt/include/fmt/format.h" ]] || die "the source has no third-party/fmt: the lock's pin must say submodules = true"
    mkdir -p -- "${WORK}"
    choose_python
    wait_for_libraries
    export_settings
    check_version
    write_compilers "${WORK}/bin" ""
    run_setup
    install_tree
}

# export_settings: what setup.py and torch read from the environment, and nothing inherited.
export_settings() {
    local nccl nvshmem
    forget_settings
    nccl="$(find_nccl "${ENVIRONMENT}")"
    nvshmem="$(find_nvshmem)"
    [[ -n "${NVSHMEM:-}" ]] || complete_nvshmem "${nvshmem}" "${WORK}/nvshmem"
    export EP_NCCL_ROOT_DIR="${nccl}" EP_NVSHMEM_ROOT_DIR="${nvshmem}"
    [[ -n "${NVSHMEM:-}" ]] || EP_NVSHMEM_ROOT_DIR="${WORK}/nvshmem"
    export NVSHMEM_DIR="${EP_NVSHMEM_ROOT_DIR}"
    LDFLAGS="-Wl,-rpath,$(print_run_path "${nccl}/lib") -Wl,-rpath,$(print_run_path "${nvshmem}/lib")"
    export LDFLAGS
    # setup.py names NCCL's library without a folder: ours comes ahead of one that the system may have.
    export LIBRARY_PATH="${nccl}/lib"
    export_tools
}

# print_run_path FOLDER: print where a folder is, seen from where the extension will lie; one outside the store as it is.
print_run_path() {
    local -r store="${PREFIX}/store"
    local folder="$1"
    if [[ -n "${ENVIRONMENT}" && "${folder}" == "${ENVIRONMENT}"/* ]]; then
        folder="${store}/${PYTHON_ENTRY}${folder#"${ENVIRONMENT}"}"
    fi
    if [[ "${folder}" == "${store}"/* ]]; then
        # shellcheck disable=SC2016 # $ORIGIN is for the loader
        folder='$ORIGIN/../../../..'"${folder#"${store}"}"
    fi
    printf '%s\n' "${folder}"
}

# complete_nvshmem FOLDER TREE: make a tree of links to a wheel's NVSHMEM, with the names without a number that linkers ask for.
complete_nvshmem() {
    local -r folder="$1" tree="$2"
    local library name
    mkdir -p -- "${tree}/lib"
    ln -sfn -- "${folder}/include" "${tree}/include"
    for library in "${folder}"/lib/*; do
        name="${library##*/}"
        ln -sfn -- "${library}" "${tree}/lib/${name}"
        [[ "${name}" != *.so.* ]] || ln -sfn -- "${library}" "${tree}/lib/${name%.so.*}.so"
    done
}

main "$@"
