# shellcheck shell=bash
# DeepEP, built by its own setup.py against our NVSHMEM, with upstream's tests beside it.
# Inputs besides those of prefix/publish.sh: SRC, VERSION, CUDA_HOME, CUDA_VERSION, ARCHS ("9.0 10.0"), OPTIONS (NAME=VALUE for setup.py's
# environment, one a line), CHECKS (words), NVSHMEM (entry), PYTHON_ENTRY (entry, "" where PYTHON is an external one), SPLIT_COMPILE.

WORK="${SCRATCH}/build/${ENTRY}"
TOOLKIT="${WORK}/toolkit"

build_entry() {
    local code=0
    # Not every toolkit has it: better said now than after the build.
    [[ " ${CHECKS:-} " != *" device-code "* ]] || need_command "${CUDA_HOME}/bin/cuobjdump"
    mkdir -p -- "${WORK}"
    choose_python_and_nvshmem
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

# choose_python_and_nvshmem: what this run is building is used from scratch as soon as it serves for compiling.
choose_python_and_nvshmem() {
    local -r early="${SCRATCH}/early"
    BUILD_PYTHON="${PYTHON}"
    if [[ -n "${PYTHON_ENTRY:-}" ]]; then
        wait_for_entry "${PYTHON_ENTRY}" "${early}/${PYTHON_ENTRY}.ready"
        BUILD_PYTHON="${early}/${PYTHON_ENTRY}/bin/python"
        if is_published "${PYTHON_ENTRY}" || ! can_import_torch "${BUILD_PYTHON}"; then
            wait_for_entry "${PYTHON_ENTRY}"
            BUILD_PYTHON="${PREFIX}/store/${PYTHON_ENTRY}/bin/python"
        fi
    fi
    wait_for_entry "${NVSHMEM}" "${early}/${NVSHMEM}.ready"
    export NVSHMEM_DIR="${PREFIX}/store/${NVSHMEM}"
    [[ -d "${NVSHMEM_DIR}" ]] || NVSHMEM_DIR="${early}/${NVSHMEM}"
}

# export_settings: what setup.py and torch read from the environment, and nothing inherited.
export_settings() {
    local option
    export TORCH_CUDA_ARCH_LIST="${ARCHS// /;}" MAX_JOBS="${JOBS}"
    export GIT_CEILING_DIRECTORIES="${SCRATCH}" GIT_DIR="${WORK}/no-repository" # the version must not depend on a git above us
    export PATH="${CUDA_HOME}/bin:${PATH}"
    unset CFLAGS CXXFLAGS # for setuptools they would replace Python's own flags; the compilers below add ours
    # Where NVSHMEM is, seen from where the extension will lie.
    # shellcheck disable=SC2016 # $ORIGIN is for the loader
    export LDFLAGS='-Wl,-rpath,$ORIGIN/../../../'"${NVSHMEM}/lib"
    offer_driver "${WORK}/driver"
    ((${CUDA_VERSION%%.*} < 13)) || export CPLUS_INCLUDE_PATH="${CUDA_HOME}/include/cccl"
    [[ "${SPLIT_COMPILE:-0}" != 1 ]] || export NVCC_APPEND_FLAGS="--split-compile=0"
    while IFS= read -r option; do
        [[ "${option}" != *=* ]] || export "${option?}"
    done <<<"${OPTIONS:-}"
}

# check_version: the tree must be of the version that the lock promises; setup.py may add a local part.
check_version() {
    local found
    found="$(cd -- "${SRC}" && with_driver_stub "${BUILD_PYTHON}" setup.py --version | tail -n 1)"
    [[ "${found%%+*}" == "${VERSION%%+*}" ]] || die "DeepEP's version: found ${found}, wanted ${VERSION}"
}

# write_waiting_compilers: compilers that compile at once but wait with linking until NVSHMEM's libraries are there.
write_waiting_compilers() {
    local name real
    mkdir -p -- "${TOOLKIT}/bin"
    for name in include lib64 nvvm targets; do
        [[ ! -e "${CUDA_HOME}/${name}" ]] || ln -sfn -- "${CUDA_HOME}/${name}" "${TOOLKIT}/${name}"
    done
    for name in nvcc cc c++ gcc g++ "$(gcc -dumpmachine)-gcc" "$(gcc -dumpmachine)-g++"; do
        real="$(command -v "${name}")" || continue
        write_waiting_compiler "${real}" >"${TOOLKIT}/bin/${name}"
        chmod 755 -- "${TOOLKIT}/bin/${name}"
    done
    export PATH="${TOOLKIT}/bin:${PATH}" PYTORCH_NVCC="${TOOLKIT}/bin/nvcc"
}

# write_waiting_compiler REAL: print the wrapper of one compiler. It gives up when the process that builds NVSHMEM is gone. What nvcc
# hands to the host compiler passes unchanged; other code names its files without the scratch folder. Run paths into places of this
# build are left out of what is linked, since LDFLAGS has the right one: their length would stay in the file.
write_waiting_compiler() {
    local -r real="$1"
    local pid=0 map=""
    [[ "${real}" == */nvcc ]] || map="-ffile-prefix-map=${SCRATCH}=. -ffile-prefix-map=${PREFIX}=."
    read -r pid _ 2>/dev/null <"${SCRATCH}/early/${NVSHMEM}.builder" || true # published before this run: nobody builds it
    cat <<WRAPPER
#!/bin/sh
case " \$* " in
*" -dlink "* | *" --device-link "* | *" -shared "*)
    for word; do
        shift
        case "\${word}" in
        -Wl,*rpath[,=]"${PREFIX}"/* | -Wl,*rpath[,=]"${SCRATCH}"/*) ;;
        *) set -- "\$@" "\${word}" ;;
        esac
    done
    until [ -d "${PREFIX}/store/${NVSHMEM}" ]; do
        [ -d /proc/${pid} ] || [ -d "${PREFIX}/store/${NVSHMEM}" ] || { echo "${NVSHMEM} was not built" >&2; exit 1; }
        sleep 0.2
    done
    ;;
*__CUDACC__*) ;;
*" -c "*) exec "${real}" ${map} "\$@" ;;
esac
exec "${real}" "\$@"
WRAPPER
}

run_setup() {
    cd -- "${SRC}" || exit
    with_driver_stub "${BUILD_PYTHON}" setup.py build --build-lib "${WORK}/lib" --build-temp "${WORK}/temp"
}

install_tree() {
    mkdir -p -- "${OUT}/lib"
    cp -a -- "${WORK}/lib" "${OUT}/lib/python"
    cp -a -- "${SRC}/tests" "${OUT}/tests"
    find "${OUT}" -name __pycache__ -type d -prune -exec rm -rf -- {} +
    compile_modules "${OUT}" lib "${BUILD_PYTHON}"
    compile_modules "${OUT}" tests "${BUILD_PYTHON}"
}

main "$@"
