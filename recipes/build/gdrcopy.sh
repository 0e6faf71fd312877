# shellcheck shell=bash
# GDRCopy's library and header, without its kernel module: NVSHMEM compiles against them and opens the library when it is there.
# Inputs besides those of prefix/publish.sh: SRC, VERSION, CUDA_HOME.

build_entry() {
    need_command make gcc
    make -C "${SRC}" prefix="${OUT}" CUDA="${CUDA_HOME}" -j"${JOBS}" lib
    make -C "${SRC}" prefix="${OUT}" CUDA="${CUDA_HOME}" lib_install
}

check_entry() {
    local library
    [[ -f "${OUT}/include/gdrapi.h" ]] || die "gdrcopy installed no include/gdrapi.h"
    library="$(find "${OUT}/lib" -name 'libgdrapi.so.*.*' -type f | head -n 1)"
    [[ -n "${library}" ]] || die "gdrcopy installed no lib/libgdrapi.so.<version>"
    # The library's file name has the first two numbers of the version.
    [[ "${VERSION}." == "${library##*/libgdrapi.so.}."* ]] || die "gdrcopy: found ${library##*/}, wanted version ${VERSION}"
    "${PYTHON}" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "${library}"
}

main "$@"
