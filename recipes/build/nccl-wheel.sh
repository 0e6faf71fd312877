# shellcheck shell=bash
# NCCL as its wheel brings it, without a build: what DeepEP V2 is built against and loads in place of the NCCL that an external Python has.
# Inputs besides those of prefix/publish.sh: VERSION, and those of build/wheel.sh.

WORK="${SCRATCH}/build/${ENTRY}"

build_entry() {
    local -r tree="${WORK}/site/nvidia/nccl"
    mkdir -p -- "${WORK}"
    install_wheel "${WORK}"
    [[ -e "${tree}/include/nccl.h" && -e "${tree}/lib/libnccl.so.2" ]] ||
        die "the wheel of NCCL ${VERSION} has no nvidia/nccl/include/nccl.h and lib/libnccl.so.2"
    cp -a -- "${tree}/include" "${tree}/lib" "${OUT}/"
    [[ -e "${OUT}/lib/libnccl.so" ]] || ln -s -- libnccl.so.2 "${OUT}/lib/libnccl.so" # the name that linkers ask for
}

# check_entry: the header that DeepEP compiles against and the library that it calls are both of the locked version.
check_entry() {
    "${PYTHON}" - "${OUT}" "${VERSION}" <<'PYTHON_END'
import ctypes, pathlib, re, sys
root, wanted = pathlib.Path(sys.argv[1]), sys.argv[2]
number = ctypes.c_int()
ctypes.CDLL(str(root / "lib/libnccl.so.2")).ncclGetVersion(ctypes.byref(number))
library = f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
header = ".".join(re.findall(r"define NCCL_(?:MAJOR|MINOR|PATCH)\s+(\d+)", (root / "include/nccl.h").read_text()))
for what, found in (("library", library), ("header", header)):
    if found != wanted:
        sys.exit(f"NCCL's {what}: found {found}, wanted {wanted}")
print("NCCL", library, "from its wheel", file=sys.stderr)
PYTHON_END
}

main "$@"
