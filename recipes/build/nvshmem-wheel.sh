# shellcheck shell=bash
# NVSHMEM as its wheel brings it, without a build: headers and libraries in the tree that an installation would make, completed by the
# names that a linker asks for. The wheels are NVIDIA's own builds with IBGDA; their libraries look for each other beside themselves.
# Inputs besides those of prefix/publish.sh: VERSION, and those of build/wheel.sh.

WORK="${SCRATCH}/build/${ENTRY}"

build_entry() {
    local -r tree="${WORK}/site/nvidia/nvshmem"
    mkdir -p -- "${WORK}"
    install_wheel "${WORK}"
    [[ -d "${tree}/include" && -d "${tree}/lib" ]] || die "the wheel of NVSHMEM ${VERSION} has no nvidia/nvshmem/include and lib"
    cp -a -- "${tree}/include" "${tree}/lib" "${OUT}/"
    link_plain_names
}

# link_plain_names: a wheel carries each library once, under the name that programs load. Linkers want it without the number, and a
# person who looks at the tree finds the whole version.
link_plain_names() {
    local library
    for library in "${OUT}"/lib/*.so.*; do
        ln -s -- "${library##*/}" "${library%.so.*}.so"
    done
    [[ -e "${OUT}/lib/libnvshmem_host.so.${VERSION}" ]] || ln -s -- "$(readlink -- "${OUT}/lib/libnvshmem_host.so")" "${OUT}/lib/libnvshmem_host.so.${VERSION}"
}

check_entry() {
    local file
    for file in lib/libnvshmem_host.so lib/libnvshmem_host.so.3 lib/libnvshmem_device.a lib/nvshmem_transport_ibgda.so include/nvshmem.h include/nvshmemx.h; do
        [[ -s "${OUT}/${file}" ]] || die "the wheel of NVSHMEM ${VERSION}: no ${file}"
    done
    # There is no nvshmem-info in a wheel; the library itself carries the variables of its build.
    grep -qaF 'NVSHMEM_IBGDA_SUPPORT=ON' "${OUT}/lib/libnvshmem_host.so" ||
        die "the wheel of NVSHMEM ${VERSION}: found $(grep -aom 1 'NVSHMEM_IBGDA_SUPPORT=[A-Z]*' "${OUT}/lib/libnvshmem_host.so" ||
            echo 'no IBGDA line'), wanted NVSHMEM_IBGDA_SUPPORT=ON"
    check_versions
}

# check_versions: the header that DeepEP compiles against and the library that it calls are both of the locked version.
check_versions() {
    with_driver_stub "${PYTHON}" - "${OUT}" "${VERSION}" <<'PYTHON_END'
import ctypes, pathlib, re, sys
root, wanted = pathlib.Path(sys.argv[1]), sys.argv[2]
numbers = [ctypes.c_int() for _ in range(3)]
ctypes.CDLL(str(root / "lib/libnvshmem_host.so.3")).nvshmemx_vendor_get_version_info(*map(ctypes.byref, numbers))
library = ".".join(str(number.value) for number in numbers)
text = "".join(path.read_text() for path in sorted(root.glob("include/**/nvshmem_version.h")))
header = ".".join(re.findall(r"define NVSHMEM_VENDOR_(?:MAJOR|MINOR|PATCH)_VERSION\s+(\d+)", text)) or "none"
for what, found in (("library", library), ("header", header)):
    if found != wanted:
        sys.exit(f"NVSHMEM's {what}: found {found}, wanted {wanted}")
print("NVSHMEM", library, "with IBGDA, from its wheel", file=sys.stderr)
PYTHON_END
}

main "$@"
