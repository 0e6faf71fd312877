# shellcheck shell=bash
# DeepEP V2.5, built by its own setup.py against the NCCL of the Python environment, with upstream's tests beside it: three files of the
# host compiler and no NVSHMEM, no GPU, no architectures. All of its kernels are compiled on the nodes, when they are first used.
# It stands behind build/deepep-v2-checks.sh, of which it has the checks but that for NVSHMEM. What is as in build/deepep-v2.sh stands there
# and here: a text that both had would be another name for every V2 that is built already.
# Inputs besides those of prefix/publish.sh: SRC (submodules filled in), VERSION, CUDA_HOME, CUDA_VERSION, OPTIONS (NAME=VALUE for setup.py's
# environment, one a line), CHECKS (words), PYTHON_ENTRY (entry), NCCL_VERSION.

WORK="${SCRATCH}/build/${ENTRY}"
readonly GCC_FLOOR=13 NVCC_FLOOR=13.1 NCCL_FLOOR=2.32.3

build_entry() {
    [[ -n "${PYTHON_ENTRY:-}" ]] || die "DeepEP V2.5 needs an environment of its own: torch's NCCL is replaced in it"
    [[ -d "${SRC}/third-party/deep_jit/include" ]] || die "the source has no third-party/deep_jit: the lock's pin must say submodules = true"
    need_at_least gcc "$(g++ -dumpfullversion -dumpversion)" "${GCC_FLOOR}" "its sources are C++20 with std::format"
    need_at_least nvcc "${CUDA_VERSION}" "${NVCC_FLOOR}" "it compiles its kernels with the nvcc of ${CUDA_HOME} on the nodes"
    mkdir -p -- "${WORK}"
    choose_python
    need_at_least NCCL "$(read_nccl_version "${NCCL}/include/nccl.h")" "${NCCL_FLOOR}" "its kernels use what NCCL's headers have since then"
    export_settings
    check_version
    write_compilers
    cd -- "${SRC}" || exit
    with_driver_stub "${BUILD_PYTHON}" setup.py build --build-lib "${WORK}/lib" --build-temp "${WORK}/temp"
    install_tree
}

# need_at_least WHAT FOUND WANTED WHY: end the build where a tool or library is too old for this DeepEP.
need_at_least() {
    local -r what="$1" found="$2" wanted="$3" why="$4"
    [[ -n "${found}" && "$(printf '%s\n' "${wanted}" "${found}" | sort -V | head -n 1)" == "${wanted}" ]] ||
        die "${what} is too old for DeepEP V2.5: found ${found:-none}, wanted ${wanted} or newer, since ${why}"
}

# read_nccl_version HEADER: print 2.32.3.
read_nccl_version() {
    awk '$1 == "#define" && $2 ~ /^NCCL_(MAJOR|MINOR|PATCH)$/ { part[$2] = $3 }
        END { print part["NCCL_MAJOR"] "." part["NCCL_MINOR"] "." part["NCCL_PATCH"] }' "$1"
}

# choose_python: what this run is building is used from scratch as soon as it serves for compiling.
choose_python() {
    local -r early="${SCRATCH}/early"
    wait_for_entry "${PYTHON_ENTRY}" "${early}/${PYTHON_ENTRY}.ready"
    ENVIRONMENT="${early}/${PYTHON_ENTRY}"
    if is_published "${PYTHON_ENTRY}" || ! can_import_torch "${ENVIRONMENT}/bin/python"; then
        wait_for_entry "${PYTHON_ENTRY}"
        ENVIRONMENT="${PREFIX}/store/${PYTHON_ENTRY}"
    fi
    BUILD_PYTHON="${ENVIRONMENT}/bin/python"
    NCCL="$(find_nccl "${ENVIRONMENT}")"
}

# export_settings: what setup.py and torch read from the environment, and nothing inherited.
export_settings() {
    local name option
    for name in "${!EP_@}" "${!DJ_@}" "${!NCCL_@}" "${!DEEP_EP_@}"; do
        case "${name}" in NCCL_VERSION | NCCL_FLOOR) ;; *) unset "${name}" ;; esac
    done
    export EP_NCCL_ROOT_DIR="${NCCL}" MAX_JOBS="${JOBS}"
    # torch asks for architectures where no GPU is there to look at, also of a build without device code.
    export TORCH_CUDA_ARCH_LIST="${ARCHS// /;}"
    # The version must not depend on a git above us: without one setup.py calls it VERSION+local.
    export GIT_CEILING_DIRECTORIES="${SCRATCH}" GIT_DIR="${WORK}/no-repository"
    export PATH="${CUDA_HOME}/bin:${PATH}"
    unset CFLAGS CXXFLAGS # for setuptools they would replace Python's own flags; the compilers below add ours
    # Where NCCL is, seen from where the extension will lie.
    # shellcheck disable=SC2016 # $ORIGIN is for the loader
    export LDFLAGS='-Wl,-rpath,$ORIGIN/../../../../'"${PYTHON_ENTRY}${NCCL#"${ENVIRONMENT}"}/lib"
    # setup.py names NCCL's library without a folder: ours comes ahead of one that the system may have.
    export LIBRARY_PATH="${NCCL}/lib"
    offer_driver "${WORK}/driver"
    export CPLUS_INCLUDE_PATH="${CUDA_HOME}/include/cccl" # setup.py names that of /usr/local/cuda, which may be another toolkit
    while IFS= read -r option; do
        [[ "${option}" != *=* ]] || export "${option?}"
    done <<<"${OPTIONS:-}"
}

# check_version: the tree must be of the version that the lock promises; setup.py adds a local part.
check_version() {
    local found
    found="$(cd -- "${SRC}" && with_driver_stub "${BUILD_PYTHON}" setup.py --version | tail -n 1)"
    [[ "${found%%+*}" == "${VERSION%%+*}" ]] || die "DeepEP's version: found ${found}, wanted ${VERSION}"
}

# write_compilers: host compilers that name files without the scratch folder. Run paths into places of this build are left out of what is
# linked, since LDFLAGS has the right one: their length would stay in the file.
write_compilers() {
    local name real
    mkdir -p -- "${WORK}/bin"
    for name in cc c++ gcc g++ "$(gcc -dumpmachine)-gcc" "$(gcc -dumpmachine)-g++"; do
        real="$(command -v "${name}")" || continue
        cat >"${WORK}/bin/${name}" <<WRAPPER
#!/bin/sh
case " \$* " in
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

# check_entry: that of V2, without its NVSHMEM.
check_entry() {
    local word
    wait_for_entry "${PYTHON_ENTRY}"
    # shellcheck disable=SC2034 # read by with_entry
    RUN_PYTHON="${PREFIX}/store/${PYTHON_ENTRY}/bin/python" PRELOAD=""
    EXTENSION="$(find "${OUT}/lib/python/deep_ep" -maxdepth 1 -name '_C*.so')"
    [[ -n "${EXTENSION}" ]] || die "DeepEP's build made no deep_ep/_C*.so"
    EP_NCCL_ROOT_DIR="$(find_nccl "${PREFIX}/store/${PYTHON_ENTRY}")"
    # Importing prepares the compiler of kernels, which wants to know where it may write.
    export EP_NCCL_ROOT_DIR EP_JIT_CACHE_DIR="${SCRATCH}/jit-${ENTRY}" CUDA_HOME
    check_headers
    for word in ${CHECKS:-}; do
        case "${word}" in
        import) check_import ;;
        nccl-version) check_nccl_version ;;
        *) die "unknown check '${word}': known are import, nccl-version" ;;
        esac
        say "check ${word}: ok"
    done
}

main "$@"
