# shellcheck shell=bash
# DeepEP V2, built by its own setup.py against the NCCL of the Python environment and our NVSHMEM (for its legacy half), with upstream's
# tests beside it. Most of its kernels are compiled on the nodes, when they are first used. Beside an external Python both are what its
# torch brings; for NCCL an entry of ours may stand in.
# Inputs besides those of prefix/publish.sh: SRC (submodules filled in), VERSION, CUDA_HOME, CUDA_VERSION, ARCHS ("9.0 10.0"), OPTIONS
# (NAME=VALUE for setup.py's environment, one a line), CHECKS (words), NVSHMEM (entry), PYTHON_ENTRY (entry), NCCL_VERSION, SPLIT_COMPILE. For an
# external PYTHON in place of these two entries: TORCH_NVSHMEM and TORCH_NCCL (folders with include and lib), or for the latter NCCL (entry).

WORK="${SCRATCH}/build/${ENTRY}"

build_entry() {
    [[ " ${CHECKS:-} " != *" device-code "* ]] || need_command "${CUDA_HOME}/bin/cuobjdump"
    [[ -e "${SRC}/third-party/fmt/include/fmt/format.h" ]] || die "the source has no third-party/fmt: the lock's pin must say submodules = true"
    mkdir -p -- "${WORK}"
    choose_python
    wait_for_libraries
    export_settings
    check_version
    write_compilers
    cd -- "${SRC}" || exit
    with_driver_stub "${BUILD_PYTHON}" setup.py build --build-lib "${WORK}/lib" --build-temp "${WORK}/temp"
    install_tree
}

# choose_python: what this run is building is used from scratch as soon as it serves for compiling.
choose_python() {
    local -r early="${SCRATCH}/early"
    ENVIRONMENT="" BUILD_PYTHON="${PYTHON}"
    [[ -n "${PYTHON_ENTRY:-}" ]] || return 0
    wait_for_entry "${PYTHON_ENTRY}" "${early}/${PYTHON_ENTRY}.ready"
    ENVIRONMENT="${early}/${PYTHON_ENTRY}"
    if is_published "${PYTHON_ENTRY}" || ! can_import_torch "${ENVIRONMENT}/bin/python"; then
        wait_for_entry "${PYTHON_ENTRY}"
        ENVIRONMENT="${PREFIX}/store/${PYTHON_ENTRY}"
    fi
    BUILD_PYTHON="${ENVIRONMENT}/bin/python"
}

# export_settings: what setup.py and torch read from the environment, and nothing inherited.
export_settings() {
    local name option nccl nvshmem
    for name in "${!EP_@}" "${!NCCL_@}" "${!DEEP_EP_@}"; do
        [[ "${name}" == NCCL_VERSION ]] || unset "${name}"
    done
    nccl="$(find_nccl "${ENVIRONMENT}")"
    nvshmem="$(find_nvshmem)"
    [[ -n "${NVSHMEM:-}" ]] || complete_nvshmem "${nvshmem}" "${WORK}/nvshmem"
    export EP_NCCL_ROOT_DIR="${nccl}" EP_NVSHMEM_ROOT_DIR="${nvshmem}"
    [[ -n "${NVSHMEM:-}" ]] || EP_NVSHMEM_ROOT_DIR="${WORK}/nvshmem"
    export NVSHMEM_DIR="${EP_NVSHMEM_ROOT_DIR}"
    export TORCH_CUDA_ARCH_LIST="${ARCHS// /;}" MAX_JOBS="${JOBS}"
    export GIT_CEILING_DIRECTORIES="${SCRATCH}" GIT_DIR="${WORK}/no-repository" # the version must not depend on a git above us
    export PATH="${CUDA_HOME}/bin:${PATH}"
    unset CFLAGS CXXFLAGS # for setuptools they would replace Python's own flags; the compilers below add ours
    LDFLAGS="-Wl,-rpath,$(print_run_path "${nccl}/lib") -Wl,-rpath,$(print_run_path "${nvshmem}/lib")"
    export LDFLAGS
    # setup.py names NCCL's library without a folder: ours comes ahead of one that the system may have.
    export LIBRARY_PATH="${nccl}/lib"
    offer_driver "${WORK}/driver"
    ((${CUDA_VERSION%%.*} < 13)) || export CPLUS_INCLUDE_PATH="${CUDA_HOME}/include/cccl"
    [[ "${SPLIT_COMPILE:-0}" != 1 ]] || export NVCC_APPEND_FLAGS="--split-compile=0"
    while IFS= read -r option; do
        [[ "${option}" != *=* ]] || export "${option?}"
    done <<<"${OPTIONS:-}"
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

# check_version: the tree must be of the version that the lock promises; setup.py may add a local part.
check_version() {
    local found
    found="$(cd -- "${SRC}" && with_driver_stub "${BUILD_PYTHON}" setup.py --version | tail -n 1)"
    [[ "${found%%+*}" == "${VERSION%%+*}" ]] || die "DeepEP's version: found ${found}, wanted ${VERSION}"
}

# write_compilers: host compilers that name files without the scratch folder; what nvcc hands to them passes unchanged. Run paths into
# places of this build are left out of what is linked, since LDFLAGS has the right ones: their length would stay in the file.
write_compilers() {
    local name real
    mkdir -p -- "${WORK}/bin"
    for name in cc c++ gcc g++ "$(gcc -dumpmachine)-gcc" "$(gcc -dumpmachine)-g++"; do
        real="$(command -v "${name}")" || continue
        cat >"${WORK}/bin/${name}" <<WRAPPER
#!/bin/sh
case " \$* " in
*__CUDACC__*) ;;
*" -shared "*)
    for word; do
        shift
        case "\${word}" in
        -Wl,*rpath[,=]"${PREFIX}"/* | -Wl,*rpath[,=]"${SCRATCH}"/*) ;;
        *) set -- "\$@" "\${word}" ;;
        esac
    done
    ;;
*" -c "*) exec "${real}" -ffile-prefix-map="${SCRATCH}=." -ffile-prefix-map="${PREFIX}=." "\$@" ;;
esac
exec "${real}" "\$@"
WRAPPER
        chmod 755 -- "${WORK}/bin/${name}"
    done
    export PATH="${WORK}/bin:${PATH}"
}

# install_tree: setup.py keeps some of its environment as defaults of the package. Where NCCL was during the build is none: the module
# says where it is, and DeepEP finds it in its own environment otherwise.
install_tree() {
    local -r defaults="${OUT}/lib/python/deep_ep/envs.py"
    mkdir -p -- "${OUT}/lib"
    cp -a -- "${WORK}/lib" "${OUT}/lib/python"
    cp -a -- "${SRC}/tests" "${OUT}/tests"
    [[ ! -e "${defaults}" ]] || sed -i '/EP_NCCL_ROOT_DIR/d' "${defaults}"
    find "${OUT}" -name __pycache__ -type d -prune -exec rm -rf -- {} +
    compile_modules "${OUT}" lib "${BUILD_PYTHON}"
    compile_modules "${OUT}" tests "${BUILD_PYTHON}"
}

main "$@"
