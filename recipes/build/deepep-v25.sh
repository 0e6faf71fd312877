# shellcheck shell=bash
# DeepEP V2.5, built by its own setup.py against the NCCL of the Python environment, with upstream's tests beside it: three files of the
# host compiler and no NVSHMEM, no GPU, no architectures. All of its kernels are compiled on the nodes, when they are first used.
# It stands behind build/deepep-v2-checks.sh and build/deepep-setup.sh.
# Inputs besides those of build/deepep-setup.sh, whose SRC has its submodules: CHECKS (import, nccl-version), NCCL_VERSION, KERNEL_NVCC (the
# version of the nvcc that comes along for kernels; "" where the host's own compiles them).

readonly GCC_FLOOR=13 NVCC_FLOOR=13.1 FLOOR_OF_NCCL=2.32.3

build_entry() {
    local nccl
    [[ -n "${PYTHON_ENTRY:-}" ]] || die "DeepEP V2.5 needs an environment of its own: torch's NCCL is replaced in it"
    [[ -d "${SRC}/third-party/deep_jit/include" ]] || die "the source has no third-party/deep_jit: the lock's pin must say submodules = true"
    need_at_least gcc "$(g++ -dumpfullversion -dumpversion)" "${GCC_FLOOR}" "its sources are C++20 with std::format"
    need_at_least nvcc "${KERNEL_NVCC:-${CUDA_VERSION}}" "${NVCC_FLOOR}" "it compiles its kernels with the nvcc of ${CUDA_HOME} on the nodes"
    [[ " ${CHECKS:-} " =~ ^(\ (import|nccl-version))*\ *$ ]] || die "checks of DeepEP V2.5: found '${CHECKS}', known are import, nccl-version"
    mkdir -p -- "${WORK}"
    choose_python
    nccl="$(find_nccl "${ENVIRONMENT}")"
    need_at_least NCCL "$(read_nccl_version "${nccl}/include/nccl.h")" "${FLOOR_OF_NCCL}" "its kernels use what NCCL's headers have since then"
    export_settings "${nccl}"
    check_version
    write_compilers "${WORK}/bin" ""
    run_setup
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

# export_settings NCCL-FOLDER: what setup.py and torch read from the environment, and nothing inherited.
export_settings() {
    local -r nccl="$1"
    forget_settings
    export EP_NCCL_ROOT_DIR="${nccl}"
    # Where NCCL is, seen from where the extension will lie.
    # shellcheck disable=SC2016 # $ORIGIN is for the loader
    export LDFLAGS='-Wl,-rpath,$ORIGIN/../../../../'"${PYTHON_ENTRY}${nccl#"${ENVIRONMENT}"}/lib"
    # setup.py names NCCL's library without a folder: ours comes ahead of one that the system may have.
    export LIBRARY_PATH="${nccl}/lib"
    export_tools
}

main "$@"
